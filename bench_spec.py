"""bench_spec.py: what drafting gains, one variable at a time.

    python bench.py spec                       drafts, temperature, batch size; two kinds of text
    python bench.py spec --quick               the same in small
    python bench.py spec --speculative-model M a draft model as well

Each row is compared with the same work without drafts, in turns in the same run.  "tokens per call"
counts the tokens of a request per step that verified drafts or not; "predicted" is that number over
the measured cost of a step relative to a plain one: the speed-up if nothing else cost time.

CONTENTS
     1  Work
     2  spec
"""

from __future__ import annotations

import inspect
import random
import statistics
import time

import nanoserve
from bench import describe_run, positive, publish, versions_of


# ==================================================================================================
# 1  Work
# ==================================================================================================
# Text that repeats is where prompt lookup lives (quoting, editing code); text that nobody can
# predict is where it must not cost.

def make_prompts(llm, text, count):
    """Chats that ask for code to be written again with a change, or prompts of random ids."""
    if text == "random":
        draw = random.Random(1)
        return [[draw.randrange(100, llm.front.vocab_size - 100) for _ in range(64)]
                for _ in range(count)]
    functions = [nanoserve.cdiv, nanoserve.slot_of, nanoserve.parse_bytes, nanoserve.show_bytes]
    ask = "Repeat this code exactly, but rename every function to run:\n\n"
    return [llm.tokenizer.encode_chat([{
        "role": "user", "content": ask + inspect.getsource(functions[i % len(functions)])}])
        for i in range(count)]

def run_work(llm, prompts, count, temperature):
    """(output tokens per second after the prompts, steps after the prompts)."""
    params = [nanoserve.SamplingParams(max_tokens=count, temperature=temperature, seed=i,
                                       ignore_eos=True, detokenize=False)
              for i in range(len(prompts))]
    for prompt, own in zip(prompts, params):
        llm._add_all([prompt], [own], [])
    while any(r.num_output_tokens == 0 for r in llm.core.scheduler.requests.values()):
        llm.front.process(llm.core.step())
    done = sum(r.num_output_tokens for r in llm.core.scheduler.requests.values())
    steps, start = 0, time.perf_counter()
    while llm.core.scheduler.requests:
        llm.front.process(llm.core.step())
        steps += 1
    seconds = time.perf_counter() - start
    return (len(prompts) * count - done) / seconds, steps, seconds / steps


# ==================================================================================================
# 2  spec
# ==================================================================================================

BASE = dict(text="code", temperature=0.0, streams=1, num_speculative_tokens=4)
ROWS = [dict(), dict(text="random"), dict(num_speculative_tokens=2),
        dict(num_speculative_tokens=8), dict(temperature=0.8), dict(text="random", temperature=0.8),
        dict(streams=8)]

def run_spec(args):
    quick = args["quick"]
    count, repeat = (24 if quick else 128), args["repeat"] or (1 if quick else 5)
    model = args["speculative_model"]
    kinds = {"ngram": dict(speculative="ngram")}
    if model:
        kinds["draft"] = dict(speculative_model=model)
    head = describe_run(model=args["model"] or "SmolLM2-135M-Instruct", tokens=count,
                        versions=versions_of("torch"))
    fixed = dict(model=args["model"], num_kv_blocks=640, max_model_len=2048,
                 enable_prefix_caching=False)
    plain, rows = nanoserve.LLM(**fixed), []
    engines = {(kind, k): nanoserve.LLM(num_speculative_tokens=k, **options, **fixed)
               for kind, options in kinds.items() for k in (2, 4, 8)}
    for kind in kinds:
        for change in ROWS:
            row = BASE | change
            llm = engines[kind, row["num_speculative_tokens"]]
            prompts = make_prompts(llm, row["text"], row["streams"])
            runs, before = [], llm.core.stats()
            for _ in range(repeat):
                pair = [run_work(engine, prompts, count, row["temperature"])
                        for engine in (plain, llm)]
                runs.append((pair[1][0] / pair[0][0], pair[0][1] / pair[1][1],
                             pair[1][2] / pair[0][2], pair[1][0]))
            speedup, per_call, cost, rate = map(statistics.median, zip(*runs))
            after = llm.core.stats()
            drafted, accepted = (after.get(f"spec_{x}", 0) - before.get(f"spec_{x}", 0)
                                 for x in ("drafted", "accepted"))
            rows.append(dict(row, drafter=kind, acceptance=accepted / max(drafted, 1),
                             tokens_per_call=per_call, step_cost=cost, tokens_per_s=rate,
                             speedup=speedup, predicted=per_call / cost))
    print_table(rows)
    publish(dict(head, rows=rows), args["json"])

def print_table(rows):
    print(f"\n{'drafter':8s} {'text':7s} {'K':>2s} {'temp':>4s} {'streams':>7s} {'accepted':>8s} "
          f"{'tokens/call':>11s} {'step cost':>9s} {'tok/s':>7s} {'speed-up':>8s} predicted")
    for r in rows:
        print(f"{r['drafter']:8s} {r['text']:7s} {r['num_speculative_tokens']:2d} "
              f"{r['temperature']:4.1f} {r['streams']:7d} {r['acceptance']:8.0%} "
              f"{r['tokens_per_call']:11.2f} {r['step_cost']:9.2f} {r['tokens_per_s']:7.1f} "
              f"{r['speedup']:8.2f} {r['predicted']:9.2f}")
    print()

def add_spec_options(parser):
    add = parser.add_argument
    add("--model", help="as nanoserve.py --model (default: SmolLM2-135M-Instruct)")
    add("--speculative-model", help="also measure this draft model")
    add("--repeat", type=positive, help="rounds of each row (default: 5, quick: 1)")
    add("--quick", action="store_true", help="24 tokens once, as a check")
    add("--json", metavar="FILE", help="append the JSON object to this file")
