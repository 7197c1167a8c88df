"""bench_quant.py: what each weight and KV format costs in quality, and what it gives in speed.

    python bench.py quant                      every format, 1,000 tokens of real text
    python bench.py quant --quick              the same in small
    python bench.py quant --format bf16 int8   some of them

Quality: mean Kullback-Leibler divergence of the next-token distributions from those of the bf16
model, in nats per token, and how often the likeliest token is the same.  Speed: decode tokens per
second of one stream and of 64, the formats in turns, medians, as ratios to bf16.  Contexts are
short there, so that weights decide; what a KV format gives attention is in `bench.py kernels`.

CONTENTS
     1  Quality
     2  Speed
     3  quant
"""

from __future__ import annotations

import importlib
import statistics

import torch

import bench_plot
import nanoserve
from bench import DEFAULT_MODEL, add_measure_options, describe_run, make_workload, publish, spread
from bench_spec import run_work

FORMATS = {  # name: fields of EngineConfig; the first is what the others are compared with
    "bf16": dict(dtype="bfloat16", quantization="none"),
    "fp32": dict(dtype="float32", quantization="none"),
    "int8": dict(quantization="int8"),
    "int4": dict(quantization="int4"),
    "int4 symmetric": dict(quantization="int4", quantization_symmetric=True),
    "int4 group 64": dict(quantization="int4", quantization_group=64),
    "w8a8": dict(quantization="w8a8"),
    "fp8": dict(quantization="fp8"),
    "as stored": dict(quantization="auto"),
    "kv bf16": dict(quantization="auto", kv_cache_dtype="bf16"),
    "kv int8": dict(quantization="auto", kv_cache_dtype="int8"),
    "kv fp8_e4m3": dict(quantization="auto", kv_cache_dtype="fp8_e4m3"),
    "kv fp8_e5m2": dict(quantization="auto", kv_cache_dtype="fp8_e5m2"),
}
VARIANTS = ("fp32", "int4 symmetric", "int4 group 64")  # left out by --quick


# ==================================================================================================
# 1  Quality
# ==================================================================================================
# Problem: a rounded model still writes fluent text; reading it shows nothing.  Idea: both models
# read the same text, and at each of its tokens their predictions of the next one are compared.
#
# Invariant: every format sees the same ids in the same steps.

def real_text(llm, num_tokens):
    """Ids of English prose that comes with Python: the help texts of the language."""
    topics = importlib.import_module("pydoc_data.topics").topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return llm.tokenizer.encode(text[: 10 * num_tokens])[:num_tokens]

def next_token_logprobs(llm, ids):
    """Log-probabilities of the token after each of ids: fp32 (len(ids), V).

    The engine computes them for a prompt whose own log-probabilities are asked for; here they are
    read where they pass, because the answer keeps those of the likeliest tokens only."""
    model, rows = llm.core.runner.model, []
    logits = model.logits

    def listen(hidden):
        rows.append(logits(hidden))
        return rows[-1]
    model.logits = listen
    try:
        params = nanoserve.SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
        llm.generate([ids], params, use_tqdm=False)
    finally:
        del model.logits
    return torch.cat(rows)[: len(ids)].log_softmax(1)

def compare(base, other):
    """(mean KL(base || other) in nats, fraction of equal argmax) of two sets of log-probabilities.

    >>> half = torch.tensor([[0.5, 0.5]]).log()
    >>> kl, top = compare(half, torch.tensor([[0.25, 0.75]]).log())
    >>> round(kl, 4), compare(half, half)
    (0.1438, (0.0, 1.0))
    """
    kl = (base.exp() * (base - other)).sum(1).mean().item()
    return kl, (base.argmax(1) == other.argmax(1)).float().mean().item()


# ==================================================================================================
# 2  Speed
# ==================================================================================================
# Invariant: formats take turns, so that a busy machine slows all of them.

def decode_rate(llm, streams, count):
    """Tokens per second of `streams` requests that decode `count` tokens each, after their first.
    """
    prompts, _ = make_workload(streams, streams, llm.front.vocab_size, prompt_lens=(4, 4))
    return streams * count / run_work(llm, prompts, count + 1, 0)[0]


# ==================================================================================================
# 3  quant
# ==================================================================================================

NUM_BLOCKS = 640

def run_quant(args):
    quick = args["quick"]
    num_tokens, many = (128, 8) if quick else (1000, 64)
    counts = {1: 10, many: 4} if quick else {1: 64, many: 8}  # streams: tokens of each
    formats = args["format"] or [name for name in FORMATS if not quick or name not in VARIANTS]
    names = list(dict.fromkeys(["bf16", *formats]))
    repeat = args["repeat"] or (1 if quick else 3)
    head = describe_run(model=args["model"] or DEFAULT_MODEL, tokens=num_tokens,
                        many=many, repeat=repeat, kv_blocks=NUM_BLOCKS)
    llms, quality, base = {}, {}, None
    for name in names:
        llms[name] = llm = nanoserve.LLM(args["model"], num_kv_blocks=NUM_BLOCKS,
                                         max_model_len=2048, enable_prefix_caching=False,
                                         **FORMATS[name])
        found = next_token_logprobs(llm, real_text(llm, num_tokens))
        base = found if base is None else base
        quality[name] = compare(base, found)
    rates = {(name, streams): [] for streams in counts for name in names}
    for _ in range(repeat):
        for name, streams in rates:
            rates[name, streams].append(decode_rate(llms[name], streams, counts[streams]))
    rows = []
    for name in names:
        stats, (kl, top) = llms[name].core.stats(), quality[name]
        one, many_rate = (rates[name, streams] for streams in counts)
        slots = NUM_BLOCKS * llms[name].core.config.block_size
        rows.append(dict(
            format=name, kl=kl, top1=top, one=one, many=many_rate,
            weight_mib=stats["weight_bytes"] / 2**20, scale_mib=stats["scale_bytes"] / 2**20,
            kv_bytes_per_token=stats["kv_bytes"] // slots))
    print_table(rows, many)
    bench_plot.draw_bars(args["plot"], "Formats: one stream, and what they cost in quality",
                         "decoded tokens per second", {
                             f"{r['format']}, KL {r['kl']:.4f}": r["one"] for r in rows})
    publish(dict(head, formats=rows), args["json"])

def print_table(rows, many):
    base = rows[0]
    print(f"\n{'format':14s} {'KL, nats':>9s} {'top-1':>6s} {'1 stream':>18s} {'ratio':>5s} "
          f"{many:18d} {'ratio':>5s} {'weights':>8s} {'scales':>7s} {'KV B/token':>10s}")
    for r in rows:
        ratio = lambda key: statistics.median(r[key]) / statistics.median(base[key])
        print(f"{r['format']:14s} {r['kl']:9.5f} {r['top1']:6.1%} {spread(r['one']):>18s} "
              f"{ratio('one'):5.2f} {spread(r['many']):>18s} {ratio('many'):5.2f} "
              f"{r['weight_mib']:8.1f} {r['scale_mib']:7.1f} {r['kv_bytes_per_token']:10,d}")
    print(f"weights and scales in MiB; 1 stream and {many} in decoded tokens per second, medians "
          "(smallest-largest)\n")

def add_quant_options(parser):
    add_measure_options(parser, "128 tokens, one short run",
                        "rounds of the speed runs (default: 3, quick: 1)")
    parser.add_argument("--format", nargs="+", choices=FORMATS, help="only these (and bf16)")
