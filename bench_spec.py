"""bench_spec.py: what drafting gains, one variable at a time.

    python bench.py spec                       drafts, text, temperature, batch size
    python bench.py spec --quick               the same in small, under 50 s on 2 cores
    python bench.py spec --speculative-model M a draft model as well

Each row is compared with the same work without drafts, in turns in the same run.  "accepted" is the
share of drafts, "tokens/call" what a request gets per step, with drafts or without; "rows/call"
what is computed for it; "predicted" the speed-up that follows from these two and from the measured
cost of a step with more rows (section 2).

CONTENTS
     1  Work
     2  Prediction
     3  spec
"""

from __future__ import annotations

import inspect
import statistics
import time

import numpy as np
import torch

import bench_plot
import nanoserve
from bench import DEFAULT_MODEL, add_measure_options, describe_run, make_workload, publish, spread


# ==================================================================================================
# 1  Work
# ==================================================================================================
# Problem: speculation is as good as the text is predictable, so a figure without its text says
# nothing.  Idea: text that repeats (an edit writes most of the code again), text that does not (a
# story, drawn at temperature 1), and what follows random ids.
#
# Invariant: both engines decode the same number of tokens; the clock starts behind the prompts.

EDIT = "Rename the parameter `name` to `label` in this code. Write the whole code again:\n\n"
STORY = "Write a long story about a whale who sells umbrellas."

def make_prompts(llm, text, count):
    """`count` prompts as lists of ids; a stream ends with a number of its own."""
    if text == "random":
        return make_workload(count, 1, llm.front.vocab_size, prompt_lens=(64, 64))[0]
    code = f"```python\n{inspect.getsource(nanoserve.parse_bytes)}```"
    ask = STORY if text == "story" else EDIT + code
    contents = [f"{ask}\n\n({i})" if i else ask for i in range(count)]
    if llm.tokenizer.chat_template:
        return [llm.tokenizer.encode_chat([{"role": "user", "content": c}]) for c in contents]
    return [llm.tokenizer.encode(content) for content in contents]

def run_work(llm, prompts, count, temperature):
    """(seconds, steps, seconds spent on drafts) of all tokens behind each request's first step."""
    core, steps = llm.core, 0
    params = [nanoserve.SamplingParams(max_tokens=count, temperature=temperature, seed=i,
                                       ignore_eos=True, detokenize=False)
              for i in range(len(prompts))]
    llm._add_all(prompts, params, [])
    while any(r.num_output_tokens == 0 for r in core.scheduler.requests.values()):
        llm.front.process(core.step())
    start, drafting = time.perf_counter(), core.clock.totals["draft"]
    while core.scheduler.requests:
        llm.front.process(core.step())
        steps += 1
    return time.perf_counter() - start, steps, core.clock.totals["draft"] - drafting


# ==================================================================================================
# 2  Prediction
# ==================================================================================================
# Problem: a speed-up below the tokens per call must come from somewhere.  Idea: verifying is not
# free where the cores, not the memory, are the limit: the cost of r rows per request is measured
# apart from any text, and
#
#     predicted = tokens per call / (cost of the rows per call + drafting, in plain steps)
#
# With acceptance a and k drafts in each round, tokens per call would be (1 - a^(k+1)) / (1 - a).
# Why: it is another figure than the measured one, so a gap is a cost that nobody counted.

ROWS_PER_REQUEST = (1, 2, 3, 5, 9)

def cost_of_rows(llm, streams, repeat):
    """Seconds of a forward pass with r rows for each request, for r in ROWS_PER_REQUEST."""
    runner = llm.core.runner
    rows, starts = np.arange(streams), np.full(streams, min(256, runner.max_model_len // 2))
    seconds = {r: [] for r in ROWS_PER_REQUEST}
    with torch.inference_mode():
        for _ in range(repeat + 1):
            for r in ROWS_PER_REQUEST:
                begin = time.perf_counter()
                token_ids, ctx = runner.pack(rows, starts, np.full(streams, r))
                runner.model.logits(runner.model.forward(token_ids, ctx))
                seconds[r].append(time.perf_counter() - begin)
    return [statistics.median(values[1:]) for values in seconds.values()]

def expected_tokens(acceptance, num_drafts):
    """Tokens per round if each draft is accepted with the same probability, whatever came before.

    >>> round(expected_tokens(0.7, 3), 3), expected_tokens(1.0, 3)
    (2.533, 4.0)
    """
    return sum(acceptance**i for i in range(num_drafts + 1))


# ==================================================================================================
# 3  spec
# ==================================================================================================

BASE = dict(text="edit", temperature=0.0, streams=1, num_speculative_tokens=4)
ROWS = [dict(), dict(text="story", temperature=1.0), dict(num_speculative_tokens=8),
        dict(streams=4), dict(num_speculative_tokens=1), dict(num_speculative_tokens=2),
        dict(temperature=0.8), dict(streams=16), dict(text="story"),
        dict(text="random", temperature=1.0)]
QUICK_ROWS = 4

def measure_row(row, plain, llm, count, repeat):
    """The row's figures: medians of `repeat` pairs of runs, without drafts and with."""
    core, most, streams = llm.core, row["num_speculative_tokens"], row["streams"]
    core.runner.draft_length.most = most
    core.scheduler.num_spec_tokens = most if core.runner.draft_model else 0
    prompts, pairs = make_prompts(llm, row["text"], streams), []
    for engine in (plain, llm):  # the prompts are in the cache from here on
        run_work(engine, prompts, 2, 0)
    core.scheduler.speculation = nanoserve.SpeculationStats()
    for i in range(repeat):  # who goes first changes, so that neither has the warmer machine
        pair = [run_work(engine, prompts, count, row["temperature"])
                for engine in ((plain, llm) if i % 2 else (llm, plain))]
        pairs.append(pair if i % 2 else pair[::-1])
    speculation, steps = core.scheduler.speculation, sum(ours[1] for _, ours in pairs)
    drafted, accepted = speculation.drafted.total(), speculation.accepted.total()
    base = statistics.median(seconds / steps for (seconds, steps, _), _ in pairs)
    costs = cost_of_rows(plain, streams, repeat)
    calls = steps * streams
    rows_per_call = 1 + drafted / calls
    cost = np.interp(rows_per_call, ROWS_PER_REQUEST, costs) / costs[0]
    per_call = statistics.median(theirs[1] / ours[1] for theirs, ours in pairs)
    drafting = sum(ours[2] for _, ours in pairs) / steps / base
    speedups = [theirs[0] / ours[0] for theirs, ours in pairs]
    return dict(
        row, acceptance=accepted / max(drafted, 1), tokens_per_call=per_call,
        rows_per_call=rows_per_call, row_costs=[c / costs[0] for c in costs],
        tokens_per_s=statistics.median(streams * (count - 1) / ours[0] for _, ours in pairs),
        speedup=statistics.median(speedups), speedups=speedups,
        drafting=drafting, predicted=per_call / (cost + drafting),
        expected_per_round=expected_tokens(accepted / max(drafted, 1), most),
        mean_acceptance_length=1 + accepted / max(speculation.rounds, 1))

def run_spec(args):
    quick, model = args["quick"], args["speculative_model"]
    count, repeat = (32 if quick else 160), args["repeat"] or (1 if quick else 5)
    kinds = {"ngram": dict(speculative="ngram")}
    if model:
        kinds["draft"] = dict(speculative_model=model)
    fixed = dict(model=args["model"], num_kv_blocks=640, max_model_len=1024, max_num_seqs=16)
    head = describe_run(model=args["model"] or DEFAULT_MODEL, tokens=count,
                        repeat=repeat, kv_blocks=fixed["num_kv_blocks"])
    plain, rows = nanoserve.LLM(**fixed), []
    print("\ndrafter  text     K temp streams accepted tokens/call rows/call   tok/s  "
          "       speed-up predicted (computed)")
    for kind, options in kinds.items():
        llm = nanoserve.LLM(num_speculative_tokens=8, **options, **fixed)
        for change in ROWS[: QUICK_ROWS if quick else None]:
            rows.append(dict(measure_row(BASE | change, plain, llm, count, repeat), drafter=kind))
            print_row(rows[-1])
    print("\ncost of a step with", ", ".join(map(str, ROWS_PER_REQUEST)), "rows for one stream:",
          " ".join(f"{cost:.2f}" for cost in rows[0]["row_costs"]))
    bench_plot.draw_bars(args["plot"], "Speculation: the same tokens, sooner or later",
                         "speed-up over no drafts", {
                             f"{r['drafter']}, {r['text']}, {r['num_speculative_tokens']} drafts, "
                             f"T {r['temperature']}, {r['streams']} at once": r["speedups"]
                             for r in rows})
    publish(dict(head, rows=rows), args["json"])

def print_row(r):
    print(f"{r['drafter']:8s} {r['text']:7s} {r['num_speculative_tokens']:2d} "
          f"{r['temperature']:4.1f} {r['streams']:7d} {r['acceptance']:8.0%} "
          f"{r['tokens_per_call']:11.2f} {r['rows_per_call']:9.2f} {r['tokens_per_s']:7.1f} "
          f"{spread(r['speedups']):>16s} {r['predicted']:9.2f}", flush=True)

def add_spec_options(parser):
    add_measure_options(parser, "32 tokens, four rows", "rounds of each (default: 5, quick: 1)")
    parser.add_argument("--speculative-model", help="also measure this draft model")
