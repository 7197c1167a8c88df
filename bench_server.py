"""bench_server.py: what HTTP and a second process cost: the same requests by a server and here.

    python nanoserve.py serve                              in one terminal
    python bench.py streams --url http://localhost:8000    in another

Both have the same model and machine, and take turns, so that the ratio holds where the machine is
shared with others.  The clients read and count nothing while the clock runs.

CONTENTS
     1  Two ways
     2  streams
"""

import asyncio
import json
import random
import time
import urllib.parse

import bench_plot
import nanoserve
from bench import (
    DEFAULT_MODEL, add_measure_options, describe_run, positive, publish, spread)


# ==================================================================================================
# 1  Two ways
# ==================================================================================================
# Greedy, so that both ways must give the same texts; new prompts in each round, so that no cache
# helps the second.

HEAD = ("POST /v1/completions HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\n"
        "Connection: close\r\nContent-Length: {}\r\n\r\n")

def run_here(llm, prompts, outputs):
    """(seconds, texts) of these ids, each continued by as many tokens as asked for."""
    params = nanoserve.SamplingParams(max_tokens=outputs, temperature=0, ignore_eos=True)
    started = time.perf_counter()
    done = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return time.perf_counter() - started, [output.outputs[0].text for output in done]

def run_there(url, prompts, outputs):
    """The same by the server: a connection and a stream for each prompt, all at once."""
    place = urllib.parse.urlsplit(url)

    async def stream(ids):
        reader, writer = await asyncio.open_connection(place.hostname, place.port or 80)
        body = json.dumps(dict(prompt=ids, max_tokens=outputs, temperature=0, ignore_eos=True,
                               stream=True)).encode()
        writer.write(HEAD.format(place.netloc, len(body)).encode() + body)
        received = await reader.read()
        writer.close()
        return received

    async def all_at_once():
        return await asyncio.gather(*map(stream, prompts))

    started = time.perf_counter()
    try:
        answers = asyncio.run(all_at_once())
    except OSError as error:
        raise ValueError(f"{url}: {error}") from None
    return time.perf_counter() - started, [text_of(url, answer) for answer in answers]

def text_of(url, answer):
    """The text of a stream, which must have come to its end."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200") or b"data: [DONE]" not in body:
        status = head.partition(b"\r\n")[0].decode()
        raise ValueError(f"{url}: {status} {body[:300].decode()}")
    events = [line[6:] for line in body.splitlines() if line.startswith(b"data: {")]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


# ==================================================================================================
# 2  streams
# ==================================================================================================

NUM_BLOCKS = 1024  # 64 streams of up to 255 tokens

def run_streams(args):
    quick, url = args["quick"], args["url"].rstrip("/")
    count, outputs = args["streams"], args["outputs"] or (8 if quick else 32)
    repeat = args["repeat"] or (1 if quick else 7)
    head = describe_run(url=url, model=args["model"] or DEFAULT_MODEL, streams=count,
                        outputs=outputs, repeat=repeat, kv_blocks=NUM_BLOCKS)
    llm = nanoserve.LLM(model=args["model"], num_kv_blocks=NUM_BLOCKS, max_model_len=1024)
    rng = random.Random(0)
    ways = {"here": lambda prompts: run_here(llm, prompts, outputs),
            "server": lambda prompts: run_there(url, prompts, outputs)}
    speeds, same = {way: [] for way in ways}, 0
    for turn in range(repeat + 1):  # the first warms up
        prompts = [[rng.randrange(llm.front.vocab_size) for _ in range(32)] for _ in range(count)]
        texts = {}
        for way in sorted(ways, reverse=turn % 2):
            seconds, texts[way] = ways[way](prompts)
            speeds[way].append(count * outputs / seconds)
        same += sum(a == b for a, b in zip(*texts.values()))
    for way in ways:
        del speeds[way][0]
    total = count * (repeat + 1)
    ratios = [there / here for here, there in zip(speeds["here"], speeds["server"])]
    print(f"\n{count} streams of {outputs} tokens, greedy, prompts of 32\n"
          f"tok/s here    {spread(speeds['here'])}\ntok/s server  {spread(speeds['server'])}\n"
          f"ratio         {spread(ratios)}\nsame texts    {same} of {total}\n")
    bench_plot.draw_bars(args["plot"], f"{count} streams, {outputs} tokens each",
                         "tokens per second", speeds)
    publish(dict(head, tok_s=speeds, ratio=ratios, same=same), args["json"])

def add_streams_options(parser):
    add_measure_options(parser, "8 tokens of each, one round", "rounds (default: 7, quick: 1)")
    add = parser.add_argument
    add("--url", required=True, help="a server that runs the same model on this machine")
    add("--streams", type=positive, default=64, help="at once (default: 64)")
    add("--outputs", type=positive, help="tokens of each (default: 32, quick: 8)")
