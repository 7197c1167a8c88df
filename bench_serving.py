"""bench_serving.py: what people feel while others are served too, one variable at a time.

    python bench.py latency                    open-loop arrivals: TTFT, ITL, TPOT, E2E, goodput
    python bench.py prefix                     prefix caching: prefix x output, on and off
    python bench.py chunk                      chunk size: who waits while a long prompt is read
    python bench.py switches                   every optimisation off in turn, and what that costs
    python bench.py latency --quick --work rag --rate 1 4 --plot latency.svg

    python bench.py latency --url http://localhost:8000             a server that is running

All but the last run the engine in this process.  TTFT starts when a request arrives, not when it is
scheduled; E2E ends with its last token; ITL is a gap between two tokens (a server's: two texts),
TPOT the mean gap of one request.
--plot draws the figure, .svg by itself, other endings with matplotlib where that is installed.

CONTENTS
     1  Work
     2  Clock
     3  latency
     4  prefix
     5  chunk
     6  switches
     7  Command line
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import random
import statistics
import time
import urllib.error
import urllib.request
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import bench_plot
import nanoserve
from bench import (
    DEFAULT_MODEL, add_measure_options, describe_run, make_workload, percentile, positive, publish,
    spread)


# ==================================================================================================
# 1  Work
# ==================================================================================================
# Random ids share nothing and repeat nothing, which no user's text does.  Everything here is cut
# from the text that ships with Python, so it needs no download and one version gives one workload.
#
#     chat     one system prompt; requests are the 1st, 2nd, 3rd turn of conversations
#     rag      a few documents of some hundred tokens, many questions about each
#     code     the first half of a function
#     random   ids, as in bench.py throughput

MODULES = "ast", "heapq", "json", "shutil", "statistics", "tempfile", "textwrap", "tokenize"
SYSTEM = "You explain Python's standard library. Be exact, be brief, and give one example. " * 3

def functions_of(name):
    """The documented functions of a module of the standard library, by name."""
    found = vars(importlib.import_module(name))
    return [found[key] for key in sorted(found) if inspect.isfunction(found[key])
            and found[key].__module__ == name and found[key].__doc__]

def conversation(i, rng):
    """Messages of request i: conversation i // 3 up to its turn i % 3."""
    module = MODULES[i // 3 % len(MODULES)]
    messages = [dict(role="system", content=SYSTEM)]
    for turn, f in enumerate((functions_of(module) * 3)[: i % 3 + 1]):
        messages.append(dict(role="user", content=f"What does {module}.{f.__name__} do?"))
        messages.append(dict(role="assistant", content=" ".join(f.__doc__.split()[:40])))
    return messages[:-1]

def question(i, rng):
    """Messages of request i: a document and a question that only it can answer."""
    name = MODULES[i % 4]
    document = inspect.getsource(importlib.import_module(name))[:1200]
    asked = rng.choice(functions_of(name)).__name__
    return [dict(role="system", content=f"Answer from this document:\n{document}"),
            dict(role="user", content=f"Question {i}: what is {asked} for?")]

def half_function(i, rng):
    source = inspect.getsource(rng.choice(functions_of(MODULES[i % len(MODULES)])))
    return source[: max(40, min(len(source) // 2, 600))]

WORK = {"chat": conversation, "rag": question, "code": half_function, "random": None}

def make_texts(work, count, seed=0):
    """`count` prompts: messages of a chat, or text to be continued."""
    rng = random.Random(seed)
    return [WORK[work](i, rng) for i in range(count)]

def make_prompts(llm, work, count, seed=0):
    """`count` prompts as ids; texts with a chat template where the model has one."""
    if work == "random":
        return make_workload(count, seed, llm.front.vocab_size)[0]
    prompts = []
    for text in make_texts(work, count, seed):
        if isinstance(text, str):
            prompts.append(llm.tokenizer.encode(text))
        elif llm.tokenizer.chat_template:
            prompts.append(llm.tokenizer.encode_chat(text))
        else:
            prompts.append(llm.tokenizer.encode("".join(
                f"{message['role']}: {message['content']}\n" for message in text)))
    return [ids[: llm.core.max_model_len - 300] for ids in prompts]

def long_text(llm, length):
    """One prompt of `length` ids: documents, one after the other."""
    ids = [i for prompt in make_prompts(llm, "rag", 12) for i in prompt]
    return (ids * (length // len(ids) + 1))[:length]


# ==================================================================================================
# 2  Clock
# ==================================================================================================
# Requests come when they come, whether the engine keeps up or not (open loop): a client that waits
# for its answer before it asks again would hide exactly the queue that users feel.

# at: seconds from the start. prompt: ids, or what make_texts() gives for a server.
Job = namedtuple("Job", "at prompt max_tokens salt", defaults=(None,))

@dataclass
class Trip:
    """One request as its client sees it. Times in seconds from the start of the run."""
    at: float
    parent: nanoserve.RequestOutput
    times: list[float] = field(default_factory=list)  # of each token; of each text from a server
    told: int = 0  # tokens by the server's count, which may come several in one text

    @property
    def count(self):
        return self.told or len(self.times)

    @property
    def ttft(self):
        return self.times[0] - self.at

    @property
    def e2e(self):
        return self.times[-1] - self.at

    @property
    def gaps(self):
        return [b - a for a, b in zip(self.times, self.times[1:])]

    @property
    def tpot(self):
        return (self.times[-1] - self.times[0]) / (self.count - 1) if self.count > 1 else 0.0

    @property
    def token_ids(self):
        return self.parent.outputs[0].token_ids

def drive(llm, jobs):
    """Serve jobs, each from its moment on. Returns a Trip for each, in their order."""
    jobs, start = sorted(jobs, key=lambda job: job.at), time.perf_counter()
    trips, waiting = {}, list(reversed(jobs))
    while waiting or llm.core.scheduler.requests:
        while waiting and waiting[-1].at <= time.perf_counter() - start:
            job = waiting.pop()
            params = nanoserve.SamplingParams(
                max_tokens=job.max_tokens, temperature=0, ignore_eos=True, detokenize=False,
                cache_salt=job.salt)
            parent, messages = llm.front.make_requests({"prompt_token_ids": job.prompt}, params)
            llm.front.register(parent, messages)
            llm.core.add_request(messages[0])
            trips[messages[0].request_id] = Trip(job.at, parent)
        if not llm.core.scheduler.requests:
            time.sleep(max(0.0, waiting[-1].at - (time.perf_counter() - start)))
            continue
        news = llm.core.step()
        llm.front.process(news)
        now = time.perf_counter() - start
        for entry in news:
            trips[entry.request_id].times += [now] * len(entry.new_token_ids)
    return list(trips.values())

def drive_server(url, jobs):
    """Serve jobs by an OpenAI-compatible server, a thread for each. Trips as drive() gives them."""
    name = fetch(f"{url}/v1/models")["data"][0]["id"]
    start = time.perf_counter()
    def serve(job):
        time.sleep(max(0.0, job.at - (time.perf_counter() - start)))
        chat = not isinstance(job.prompt, str)
        body = {"model": name, "stream": True, "stream_options": {"include_usage": True},
                "max_tokens": job.max_tokens, "temperature": 0, "ignore_eos": True,
                "messages" if chat else "prompt": job.prompt}
        trip = Trip(job.at, nanoserve.RequestOutput("", None, [], []))
        for chunk in fetch(f"{url}/v1/{'chat/' * chat}completions", body):
            now = time.perf_counter() - start
            if chunk.get("usage"):
                trip.told = chunk["usage"]["completion_tokens"]
                details = chunk["usage"].get("prompt_tokens_details") or {}
                trip.parent.num_cached_tokens = details.get("cached_tokens", 0)
            for choice in chunk["choices"]:
                if choice["delta"].get("content") if chat else choice["text"]:
                    trip.times.append(now)
        trip.times = trip.times or [time.perf_counter() - start]  # nothing to be seen but the end
        return trip
    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(serve, sorted(jobs, key=lambda job: job.at)))

def fetch(url, body=None):
    """The JSON at an address, or what a POST of `body` streams: one dict per event."""
    data = None if body is None else json.dumps(body).encode()
    try:
        answer = urllib.request.urlopen(urllib.request.Request(
            url, data, {"Content-Type": "application/json"}))
    except urllib.error.HTTPError as error:
        words = " ".join(error.read(500).decode(errors="replace").split())
        raise ValueError(f"{url}: {error.code}, {words}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{url}: {getattr(error, 'reason', error)}") from None
    return json.load(answer) if body is None else events_of(answer)

def events_of(answer):
    with answer:
        for line in answer:
            if line.startswith(b"data:") and b"[DONE]" not in line:
                yield json.loads(line[5:])

def warm_up(llm):
    drive(llm, [Job(0.0, [5] * 40, 4)])
    llm.core.reset_prefix_cache()

def milliseconds(values):
    """{mean, p50, p99} of seconds, in ms."""
    if not values:
        return dict(mean=0.0, p50=0.0, p99=0.0)
    return dict(mean=1000 * statistics.mean(values), p50=1000 * percentile(values, 50),
                p99=1000 * percentile(values, 99))

def begin(args, **facts):
    """Describe the run: (head of the JSON object, function that loads the model with other options,
    number of rounds)."""
    repeat = args["repeat"] or (1 if args["quick"] else 3)
    def load(**options):
        llm = nanoserve.LLM(**{"model": args["model"], "max_model_len": 2048,
                               "num_kv_blocks": 1024, **options})
        warm_up(llm)
        return llm
    model = dict(model=args["model"] or DEFAULT_MODEL, kv_blocks=1024)
    head = describe_run(**(dict(url=args["url"]) if args.get("url") else model), repeat=repeat,
                        **facts)
    return head, load, repeat


# ==================================================================================================
# 3  latency
# ==================================================================================================
# Throughput says what the machine delivers, not how long anybody waits.  The same requests arrive
# at rising rates (Poisson: gaps are exponential); where TTFT begins to climb, the queue begins.

def arrivals(count, rate, seed=0):
    """Moments of `count` arrivals at `rate` per second; the first comes at 0."""
    rng, moments = random.Random(seed), [0.0]
    while len(moments) < count:
        moments.append(moments[-1] + rng.expovariate(rate))
    return moments[:count]

def summary(trips, limits):
    """Figures of one run; goodput: requests per second that kept both limits (TTFT, TPOT in ms)."""
    good = sum(1000 * t.ttft <= limits[0] and 1000 * t.tpot <= limits[1] for t in trips)
    wall = max(t.times[-1] for t in trips)
    return dict(ttft=milliseconds([t.ttft for t in trips]),
                itl=milliseconds([gap for t in trips for gap in t.gaps]),
                tpot=milliseconds([t.tpot for t in trips]),
                e2e=milliseconds([t.e2e for t in trips]), good=good / len(trips),
                goodput=good / wall, tok_s=sum(t.count for t in trips) / wall,
                cached=sum(t.parent.num_cached_tokens for t in trips))

def medians(rounds):
    """The median of each figure of summary() over several rounds.

    >>> medians([dict(a=1, b=dict(c=2)), dict(a=5, b=dict(c=4)), dict(a=3, b=dict(c=9))])
    {'a': 3, 'b': {'c': 4}}
    """
    of = lambda key: [figures[key] for figures in rounds]
    return {key: medians(of(key)) if isinstance(value, dict) else statistics.median(of(key))
            for key, value in rounds[0].items()}

def run_latency(args):
    limits, quick = (args["ttft_limit"], args["tpot_limit"]), args["quick"]
    head, load, repeat = begin(args, work=args["work"], limits_ms=limits)
    count, outputs = (8, 8) if quick else (args["requests"], 64)
    rates, rows = args["rate"] or ([2, 16] if quick else [0.5, 1, 2, 4, 8]), []
    if args["url"]:
        if args["work"] == "random":
            raise ValueError("--work random is ids, not text; it runs without --url")
        run = functools.partial(drive_server, args["url"].rstrip("/"))
        prompts = make_texts(args["work"], count)
        run([Job(0.0, prompts[-1], 2)])  # warm
    else:
        llm = load()
        prompts = make_prompts(llm, args["work"], count)
        def run(jobs):
            llm.core.reset_prefix_cache()
            return drive(llm, jobs)
    print(f"\n{count} requests of {args['work']}, {outputs} outputs each; ms as mean / p50 / p99, "
          "TTFT from arrival on")
    print(f"{'req/s':>6s} {'TTFT':>22s} {'ITL':>20s} {'TPOT':>20s} {'E2E':>24s} {'kept':>5s} "
          f"{'goodput':>8s} {'tok/s':>6s} cached  TTFT p50 of the rounds")
    for rate in rates:
        runs = [summary(run([Job(at, prompt, outputs) for at, prompt in
                             zip(arrivals(count, rate, seed), prompts)]), limits)
                for seed in range(repeat)]  # other moments in each round
        row = medians(runs)
        rows.append(dict(row, rate=rate, rounds=runs))
        cell = lambda key: " / ".join(f"{row[key][k]:.0f}" for k in ("mean", "p50", "p99"))
        print(f"{rate:6g} {cell('ttft'):>22s} {cell('itl'):>20s} {cell('tpot'):>20s} "
              f"{cell('e2e'):>24s} {row['good']:5.0%} {row['goodput']:8.2f} {row['tok_s']:6.1f} "
              f"{row['cached']:6.0f}  {spread([r['ttft']['p50'] for r in runs])}")
    print(f"medians of {repeat} round(s)\n")
    bench_plot.draw(args["plot"], f"Waiting, {args['work']}", "arrivals, requests per second",
                    "time to first token, ms", {
                        name: [(row["rate"], row["ttft"][name]) for row in rows]
                        for name in ("p50", "p99")}, log_x=True)
    publish(dict(head, rows=rows), args["json"])


# ==================================================================================================
# 4  prefix
# ==================================================================================================
# What a hit saves is prefill: a factor in TTFT when the prefix is long, little of E2E when much is
# generated, nothing in ITL.  Negatives must not gain: another first token, another salt.

def run_prefix(args):
    head, load, repeat = begin(args)
    lengths, outputs = (((128, 512), (1, 16)) if args["quick"] else
                        ((128, 512, 1536), (1, 32, 256)))
    on, off = load(), load(enable_prefix_caching=False)
    text, rows = long_text(on, max(lengths)), []
    print(f"\n{'prefix':>6s} {'outputs':>7s} {'case':12s} {'hits':>5s} {'TTFT ms off':>20s} "
          f"{'on':>20s} {'x':>6s} {'E2E x':>6s} {'ITL x':>6s} same tokens")
    cases = [(n, m, "second") for n in lengths for m in outputs]
    cases += [(lengths[1], outputs[0], name) for name in ("first token", "salt")]
    for prefix, count, case in cases:
        row = compare_prefix(on, off, text[:prefix], count, case, repeat)
        rows.append(dict(prefix=prefix, outputs=count, case=case, **row))
        ratio = lambda key: statistics.median(row[key]["off"]) / statistics.median(row[key]["on"])
        itl = f"{ratio('tpot'):6.2f}" if count > 1 else "     -"
        print(f"{prefix:6d} {count:7d} {case:12s} {row['hits']:5d} "
              f"{spread([1000 * x for x in row['ttft']['off']]):>20s} "
              f"{spread([1000 * x for x in row['ttft']['on']]):>20s} {ratio('ttft'):6.2f} "
              f"{ratio('e2e'):6.2f} {itl} {row['same']}")
    print("off / on, medians of", repeat, "run(s), in turns; TTFT starts at arrival\n")
    bench_plot.draw(args["plot"], "What a prefix hit is worth", "prefix, tokens",
                    "E2E without / with the cache", {
                        f"{m} output{'s' * (m > 1)}": [
                            (r["prefix"], statistics.median(r["e2e"]["off"])
                             / statistics.median(r["e2e"]["on"]))
                            for r in rows if r["outputs"] == m and r["case"] == "second"]
                        for m in outputs}, log_x=True)
    publish(dict(head, rows=rows), args["json"])

def compare_prefix(on, off, prefix, count, case, repeat):
    """Send a prompt, then one that shares its prefix (or, for a negative, does not)."""
    found = dict(ttft={}, e2e={}, tpot={})
    second = prefix if case != "first token" else [prefix[0] + 1, *prefix[1:]]
    salts = ("a", "b") if case == "salt" else (None, None)
    told, hits = {}, 0
    for _ in range(repeat):
        for name, llm in (("off", off), ("on", on)):  # in turns: noise hits both alike
            llm.core.reset_prefix_cache()
            drive(llm, [Job(0.0, [*prefix, 7], 1, salts[0])])
            trip, = drive(llm, [Job(0.0, [*second, 8, 9], count, salts[1])])
            for key, values in found.items():
                values.setdefault(name, []).append(getattr(trip, key))
            told[name] = trip.token_ids
        hits = trip.parent.num_cached_tokens
    return dict(found, hits=hits, same=told["on"] == told["off"])


# ==================================================================================================
# 5  chunk
# ==================================================================================================
# A long prompt in one step keeps everybody else waiting for that step; in chunks each of them waits
# a little, and the long one a little longer.

def run_chunk(args):
    (head, load, repeat), quick = begin(args), args["quick"]
    streams, length = (4, 700) if quick else (8, 1800)
    sizes = (64, 700) if quick else (64, 128, 256, 512, 2048)
    llm = load(enable_prefix_caching=False)
    text = long_text(llm, length)
    short = [ids[:32] for ids in make_prompts(llm, "code", streams)]  # they decode soon
    config, runs = llm.core.config, {size: [] for size in sizes}
    for _ in range(repeat):
        for size in sizes:  # the scheduler looks this option up in every step
            llm.core.scheduler.config = nanoserve.replace(
                config, max_model_len=llm.core.max_model_len, long_prefill_token_threshold=size)
            jobs = [Job(0.0, ids, 24 if quick else 96) for ids in short]
            runs[size].append(drive(llm, [*jobs, Job(0.15, text, 4)]))
    tokens = {size: [t.token_ids for t in trips[-1]] for size, trips in runs.items()}
    rows = []
    print(f"\n{streams} streams decode, then a prompt of {length} tokens comes; ms")
    print(f"{'chunk':>6s} {'ITL p50':>18s} {'ITL p99':>18s} {'ITL max':>18s} "
          f"{'TTFT of the long':>20s} same tokens as unchunked")
    for size in sizes:
        gaps = [[1000 * gap for t in trips if t.at == 0.0 for gap in t.gaps]
                for trips in runs[size]]
        row = dict(chunk=size, itl_p50=[percentile(g, 50) for g in gaps],
                   itl_p99=[percentile(g, 99) for g in gaps], itl_max=[max(g) for g in gaps],
                   ttft_long=[1000 * t.ttft for trips in runs[size] for t in trips if t.at],
                   same=tokens[size] == tokens[sizes[-1]])
        rows.append(row)
        print(f"{size:6d} {spread(row['itl_p50']):>18s} {spread(row['itl_p99']):>18s} "
              f"{spread(row['itl_max']):>18s} {spread(row['ttft_long']):>20s} {row['same']}")
    print()
    bench_plot.draw(args["plot"], f"A prompt of {length} tokens among {streams} streams",
                    "chunk, tokens", "ms", {
                        name: [(row["chunk"], statistics.median(row[key])) for row in rows]
                        for name, key in (("longest gap of the others", "itl_max"),
                                          ("TTFT of the long prompt", "ttft_long"))}, log_x=True)
    publish(dict(head, rows=rows), args["json"])


# ==================================================================================================
# 6  switches
# ==================================================================================================
# What each mechanism is worth here and now: the same conversations, all at once, with everything as
# it is by default, and with one thing off (or on, after a plus).

SWITCHES = {
    "as it is": {},
    "no prefix cache": dict(enable_prefix_caching=False),
    "no chunked prefill": dict(enable_chunked_prefill=False),
    "no batching": dict(max_num_seqs=1),
    "no C attention": dict(attention_backend="sdpa"),
    "+ n-gram drafts": dict(speculative="ngram"),
    "+ int8 weights": dict(quantization="int8"),
    "+ int8 KV cache": dict(kv_cache_dtype="int8"),
}

def run_switches(args):
    head, load, repeat = begin(args, work=args["work"])
    count, outputs = (6, 12) if args["quick"] else (24, 64)
    engines = {name: load(**options) for name, options in SWITCHES.items()}
    prompts = make_prompts(engines["as it is"], args["work"], count)
    runs, tokens, rows = {name: [] for name in SWITCHES}, {}, []
    for _ in range(repeat):
        for name, llm in engines.items():
            llm.core.reset_prefix_cache()
            trips = drive(llm, [Job(0.0, ids, outputs) for ids in prompts])
            tokens[name] = [trip.token_ids for trip in trips]
            runs[name].append(summary(trips, (0, 0)))
    print(f"\n{count} requests of {args['work']} at once, {outputs} outputs each")
    print(f"{'':20s} {'tok/s':>18s} {'speed x':>16s} {'TTFT p50 ms':>20s} {'ITL p99 ms':>20s} "
          "same tokens")
    base = [run["tok_s"] for run in runs["as it is"]]
    for name in SWITCHES:
        speed = [run["tok_s"] for run in runs[name]]
        ttft = [run["ttft"]["p50"] for run in runs[name]]
        itl = [run["itl"]["p99"] for run in runs[name]]
        same = sum(a == b for a, b in zip(tokens[name], tokens["as it is"]))
        rows.append(dict(switch=name, tok_s=speed, ratio=[a / b for a, b in zip(speed, base)],
                         ttft_p50=ttft, itl_p99=itl, same=same))
        print(f"{name:20s} {spread(speed):>18s} {spread(rows[-1]['ratio']):>16s} "
              f"{spread(ttft):>20s} {spread(itl):>20s} {same} of {count}")
    print("speed: tokens per second over those of the same round as it is\n")
    bench_plot.draw_bars(args["plot"], f"One thing changed: {count} requests of {args['work']}",
                         "tokens per second / as it is",
                         {row["switch"]: row["ratio"] for row in rows})
    publish(dict(head, rows=rows), args["json"])


# ==================================================================================================
# 7  Command line
# ==================================================================================================

def add_options(parser, work=False):
    add_measure_options(parser, "a small run", "rounds (default: 3, quick: 1)")
    if work:
        parser.add_argument("--work", choices=WORK, default="chat",
                            help="kind of prompts (default: chat)")

def add_latency_options(parser):
    add_options(parser, work=True)
    add = parser.add_argument
    add("--url", help="measure the server at this address; its prefix cache stays as it is")
    add("--rate", type=rate, nargs="+", help="arrivals per second (default: 0.5 1 2 4 8)")
    add("--requests", type=positive, default=32, help="of each rate (default: 32)")
    add("--ttft-limit", type=float, default=1000.0, help="ms, for goodput (default: 1000)")
    add("--tpot-limit", type=float, default=100.0, help="ms, for goodput (default: 100)")

def rate(text):
    """An argparse type: a number above 0."""
    if not 0 < float(text) < float("inf"):
        raise ValueError
    return float(text)

add_prefix_options = add_chunk_options = add_options

def add_switches_options(parser):
    add_options(parser, work=True)
