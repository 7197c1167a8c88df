"""bench_limits.py: how fast this machine could be at best, and which share of that is reached.

    python bench.py throughput                 ends with the shares of a decode step (section 3)
    python bench.py kernels                    on a CPU: the shares of each C operator (section 4)

Ceilings and times are measured, bytes, operations and the limit that follows from them computed.

CONTENTS
     1  Ceilings
     2  Work and its limit
     3  A decode step
     4  Operators
"""

from __future__ import annotations

import functools
import statistics
import time
from collections import Counter, namedtuple
from dataclasses import replace

import torch

import bench_plot
import kernels
import nanoserve
from bench import DTYPES, describe_run, make_workload, publish, spread


# ==================================================================================================
# 1  Ceilings
# ==================================================================================================
# Problem: a number of GB/s means nothing alone, and data sheets do not know the virtual machine.
# Idea: measure what the machine does when it does nothing else, each ceiling by the fastest way
# that is at hand here, the engine's own kernels among them.
#
#     read      a buffer, over and over, by all cores              bytes per second
#     matmul    a square product that stays in the caches          operations per second, per dtype
#
# Why: the buffer is as large as what is compared with it: a model that fits the last-level cache
#   is not read from memory, and a ceiling for memory would flatter it.
# Why: the fastest of the repeats. Whatever else runs on the machine can only lower a ceiling.

KINDS = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float16: "fp16"}

def time_calls(run, device, repeats):
    """Seconds of each of `repeats` calls, by device events on a GPU and by the clock elsewhere."""
    run()
    seconds = []
    for _ in range(repeats):
        if device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
    return seconds

def fastest(ways, work, device, repeats):
    """(work per second, name) of the fastest of {name: call}."""
    rates = {name: work / min(time_calls(run, device, repeats)) for name, run in ways.items()}
    return max((rate, name) for name, rate in rates.items())

@functools.cache
def read_rate(size, device="cpu", repeats=5):
    """(bytes per second, by what) of reading a buffer of about `size` bytes: a power of two from
    64 MiB to 1 GiB."""
    size = min(1 << 30, 1 << max(26, (size - 1).bit_length()))
    buffer = torch.ones(size // 4, device=device)
    ways = {"torch": buffer.sum}
    if device == "cpu" and kernels.c_library()[0]:
        K = 4096
        panels = buffer.view(torch.bfloat16).view(-1, K // 2, 32, 2)
        weight = kernels.PackedWeight(panels, (32 * len(panels), K))
        x = torch.ones(1, K, dtype=torch.bfloat16)
        ways["kernels.c"] = lambda: kernels.linear(x, weight)
    return fastest(ways, size, device, repeats)

@functools.cache
def matmul_rate(kind, device="cpu", side=2048, repeats=5):
    """(operations per second, by what) of a product of two square matrices of this kind: bf16,
    fp16, fp32 or int8."""
    g = torch.Generator(device).manual_seed(0)
    a = torch.randn(side, side, generator=g, device=device)
    if kind == "int8":
        codes = (a * 40).to(torch.int8)
        narrow = replace(kernels.quantize_int8(a), int8_inputs=True)
        ways, x = {"torch": lambda: torch._int_mm(codes, codes.T)}, a.bfloat16()
    else:
        x = a.to({name: dtype for dtype, name in KINDS.items()}[kind])
        ways, narrow = {"torch": lambda: x @ x.T}, a.bfloat16()
    if device == "cpu" and kernels.c_library()[0] and x.dtype in kernels.C_DTYPES:
        weight = kernels.prepare_weight(narrow, x.dtype)
        ways["kernels.c"] = lambda: kernels.linear(x, weight)
    return fastest(ways, 2 * side**3, device, repeats)


# ==================================================================================================
# 2  Work and its limit
# ==================================================================================================
# Problem: is a step slow, or is the machine?  Idea: whoever computes it must read these bytes once
# and do these operations, and neither can go faster than its ceiling:
#
#     bytes   weights and scales + K and V of every token of every stream
#     flops   2 x rows x N x K of each matrix + 4 x context x heads x head width of each row
#     limit = the longer of bytes / read and flops / matmul          as if both ran side by side
#
# Invariant: every formula of this file is in this section.
# Simplification: activations are counted for single operators only; in a whole step they stay in
#   the caches.

# bytes: {what: bytes}. flops: {kind of product: operations}.
Work = namedtuple("Work", "bytes flops")

def limit_seconds(work, device="cpu", span=None):
    """(least seconds, "read" or "matmul": which of them). span: bytes that the data lies in, if
    it is a part of more that is read in turn."""
    size = sum(work.bytes.values())
    read = size / read_rate(span or size, device)[0]
    products = sum(flops / matmul_rate(kind, device)[0] for kind, flops in work.flops.items())
    return max((read, "read"), (products, "matmul"))

def product_kind(weight, dtype):
    """Which product a prepared weight takes part in: that of the activations, of whatever width
    the weight is kept, unless it asks for int8 inputs."""
    return "int8" if kernels.weight_kind(weight) == "w8a8" else KINDS[dtype]

def product_work(weight, rows, dtype):
    """Of rows (T, K) times a prepared weight (N, K), activations apart."""
    N, K = weight.shape
    return Work(kernels.weight_bytes(weight),
                Counter({product_kind(weight, dtype): 2 * rows * N * K}))

def attention_work(rows, context, H, KH, D, dtype, kv_dtype, layers=1):
    """Of `rows` queries, each over `context` tokens of its own."""
    scale = 4 if kv_dtype == torch.int8 else 0
    size = nanoserve.kv_bytes_per_token(layers, KH, D, kv_dtype.itemsize, scale)
    return Work({"kv": rows * context * size},
                Counter({KINDS[dtype]: 4 * rows * context * layers * H * D}))

def step_work(model, kv_dtype, streams, context):
    """Of a decode step of `streams` requests with `context` tokens each."""
    c, size, flops = model.config, Counter(), Counter()
    parts = [attention_work(streams, context, c.num_heads, c.num_kv_heads, c.head_dim, model.dtype,
                            kv_dtype, c.num_layers)]
    for weight in model.matrices():
        if weight is not model.embed_tokens or weight is model.lm_head:  # a table is only looked up
            parts.append(product_work(weight, streams, model.dtype))
    for part in parts:
        size.update(part.bytes)
        flops.update(part.flops)
    return Work(size, flops)


# ==================================================================================================
# 3  A decode step
# ==================================================================================================
# The step that is measured is the engine's whole: plan, packing, model, sampling, text left out.

STREAMS = 64

def decode_seconds(llm, streams, context, count):
    """Seconds of `count` decode steps of `streams` requests, `context` tokens long on average."""
    core, first = llm.core, max(1, context - count // 2)
    prompts, _ = make_workload(streams, 3, llm.front.vocab_size, prompt_lens=(first, first))
    params = nanoserve.SamplingParams(max_tokens=count + 2, temperature=0, ignore_eos=True,
                                      detokenize=False)
    llm._add_all(prompts, [params] * streams, [])
    while any(r.num_output_tokens == 0 for r in core.scheduler.requests.values()):
        llm.front.process(core.step())
    seconds = []
    while core.scheduler.requests:
        full, start = len(core.scheduler.running) == streams, time.perf_counter()
        llm.front.process(core.step())
        if full:
            seconds.append(time.perf_counter() - start)
    return seconds[:count]

def measure_steps(llm, context, count):
    """One dict per number of streams: its work, its limit, its times. JSON."""
    core, rows, device = llm.core, [], llm.core.runner.device.type
    context = min(context, core.max_model_len - 2 * count)
    blocks = nanoserve.cdiv(context + count + 2, core.config.block_size)
    most = min(STREAMS, core.config.max_num_seqs, core.scheduler.kv.pool.num_free // blocks)
    for streams in dict.fromkeys((most, 1)):
        work = step_work(core.runner.model, core.runner.kv[0].data.dtype, streams, context)
        seconds = decode_seconds(llm, streams, context, count)
        limit, bound = limit_seconds(work, device)
        size = sum(work.bytes.values())
        rows.append(dict(
            streams=streams, context=context, bytes=dict(work.bytes), flops=dict(work.flops),
            read=read_rate(size, device), matmul={k: matmul_rate(k, device) for k in work.flops},
            limit_s=limit, bound=bound, seconds=seconds,
            share=limit / statistics.median(seconds)))
    return rows

def print_steps(rows):
    """The shares, and from what they follow."""
    print("limit of a decode step (bytes, GFLOP and limit: computed from measured ceilings)")
    print("streams context weights MiB  KV MiB   GFLOP  limit ms  by          step ms, measured "
          "of limit")
    for row in rows:
        kv = row["bytes"]["kv"]
        weights = sum(row["bytes"].values()) - kv
        print(f"{row['streams']:7d} {row['context']:7d} {weights / 2**20:11.1f} {kv / 2**20:7.1f} "
              f"{sum(row['flops'].values()) / 1e9:7.2f} {1e3 * row['limit_s']:9.2f}  "
              f"{row['bound']:8s} {spread([1e3 * s for s in row['seconds']]):>20s} "
              f"{row['share']:8.0%}")
    for row in rows:
        print(f"ceilings for {row['streams']} stream{'s' * (row['streams'] > 1)} (measured): "
              + show_ceilings(row["read"], row["matmul"]))

def show_ceilings(read, matmul):
    """One line of [bytes per second, by what] and {kind: the same for operations}."""
    parts = [f"read {read[0] / 1e9:.1f} GB/s by {read[1]}"]
    parts += [f"{kind} products {rate / 1e9:,.0f} GFLOP/s by {name}"
              for kind, (rate, name) in matmul.items()]
    return ", ".join(parts)


# ==================================================================================================
# 4  Operators
# ==================================================================================================
# The operators of a decode step on a CPU, in the shapes of SmolLM2-135M, for one row and for 64.
# Weights and the KV cache lie apart from call to call, as those of 30 layers do; what comes from
# the operator before (activations, logits) is warm, so its share may pass 1.

E, F, H, KH, D, V = 576, 1536, 9, 3, 64, 49152  # SmolLM2-135M
CONTEXT, BS, SPANS = 256, 16, {True: 64 << 20, False: 256 << 20}  # quick or not: bytes
FORMS = {"bf16": torch.Tensor.bfloat16, "int8": kernels.quantize_int8,
         "int4": kernels.quantize_int4, "fp8": kernels.quantize_fp8,
         "w8a8": lambda w: replace(kernels.quantize_int8(w), int8_inputs=True)}

# calls: of equal work, on data that lies in `span` bytes
Operator = namedtuple("Operator", "name rows calls work span")

def warm_operators(T, dtype):
    """Norm, silu, rope with its store, argmax: T rows that the operator before has just written."""
    a, pos = dtype.itemsize, torch.arange(T)  # and slot
    x, gate_up, logits, qkv = (torch.randn(T, n).to(dtype) for n in (E, 2 * F, V, (H + 2 * KH) * D))
    stream, weight, cos_sin = torch.zeros(T, E), torch.ones(E, dtype=dtype), torch.rand(4096, D)
    kv = kernels.LayerKV(torch.zeros(2, nanoserve.cdiv(T, BS), BS, KH, D, dtype=dtype))
    calls = {
        "rms_norm": (T * E * (2 * a + 8) + E * a,
                     lambda: kernels.rms_norm(x, weight, 1e-5, stream)),
        "silu_mul": (3 * T * F * a, lambda: kernels.silu_mul(gate_up)),
        "rope_store_kv": (T * (2 * qkv.shape[1] * a + 4 * D), lambda: kernels.rope_store_kv(
            qkv, cos_sin, pos, kv, pos, H, KH, D)),
        "argmax": (T * V * a, lambda: kernels.argmax(logits))}
    for name, (moved, call) in calls.items():
        yield Operator(name, T, [call] * 100, Work({"moved": moved}, {}), moved)

def cold_attention(T, dtype, kv_dtype, span):
    """T streams of CONTEXT tokens, as many times as fit a cache of `span` bytes."""
    work = attention_work(T, CONTEXT, H, KH, D, dtype, kv_dtype)
    blocks, count = T * CONTEXT // BS, max(1, span // work.bytes["kv"])
    data = torch.zeros(2, count * blocks, BS, KH, D, dtype=kv_dtype)
    kv = kernels.LayerKV(data, torch.ones(data.shape[:4]) if kv_dtype == torch.int8 else None)
    tables = torch.randperm(count * blocks).to(torch.int32).view(count, T, -1)
    start, lens = torch.arange(T + 1, dtype=torch.int32), torch.full((T,), CONTEXT).int()
    q, slots = torch.randn(T, H, D).to(dtype), torch.zeros(T, dtype=torch.int64)
    run = kernels.ATTENTION["c" if kernels.c_library()[0] else "sdpa"]
    calls = [functools.partial(run, q, kv, kernels.AttentionMetadata(
        start, lens, table, slots, 1, CONTEXT), D**-0.5) for table in tables]
    return Operator(f"attention, {KINDS.get(kv_dtype, 'int8')} KV", T, calls, work, span)

def apart(weight):
    """A copy of a prepared weight, with memory of its own."""
    if torch.is_tensor(weight):
        return weight.clone()
    return replace(weight, **{name: part.clone() for name, part in vars(weight).items()
                              if torch.is_tensor(part)})

def cold_linears(T, dtype, span):
    """The largest matrix of a layer in each form, as many copies as make `span` bytes."""
    x, w = torch.randn(T, E).to(dtype), torch.randn(2 * F, E)
    for form, narrow in FORMS.items():
        weight = kernels.prepare_weight(narrow(w), dtype)
        work = product_work(weight, T, dtype)
        copies = [apart(weight) for _ in range(max(1, span // sum(work.bytes.values())))]
        calls = [functools.partial(kernels.linear, x, copy) for copy in copies]
        work.bytes["moved"] = T * (E + 2 * F) * dtype.itemsize  # inputs and outputs
        yield Operator(f"linear, {form}", T, calls, work, span)

def operators(dtype, span):
    """Every operator for one row and for 64."""
    for T in (1, STREAMS):
        yield from warm_operators(T, dtype)
        for kv_dtype in (dtype, torch.int8):
            yield cold_attention(T, dtype, kv_dtype, span)
        yield from cold_linears(T, dtype, span)

def measure_operator(op, repeats):
    """Its work, limit and times per call: a dict as those of section 3."""
    seconds = time_calls(lambda: [call() for call in op.calls], "cpu", repeats)
    seconds = [s / len(op.calls) for s in seconds]
    limit, bound = limit_seconds(op.work, span=op.span)
    return dict(name=op.name, rows=op.rows, bytes=dict(op.work.bytes), flops=dict(op.work.flops),
                limit_s=limit, bound=bound, seconds=seconds,
                share=limit / statistics.median(seconds))

def run_operators(args):
    """Print the ceilings, then each operator as a share of the one that binds it."""
    quick, dtype = args["quick"], getattr(torch, DTYPES[args["dtype"]])
    span, repeats = SPANS[quick], args["repeat"] or (3 if quick else 15)
    library, reason = kernels.c_library()
    head = describe_run(dtype=args["dtype"], repeat=repeats, members=reason or "kernels.c",
                        kv_blocks=span // (2 * BS * KH * D * dtype.itemsize))
    kinds = dict.fromkeys((args["dtype"], "int8"))
    ceilings = dict(read=read_rate(span), matmul={kind: matmul_rate(kind) for kind in kinds})
    print(f"ceilings (measured): {show_ceilings(**ceilings)}")
    print(f"\n{'operator':20s} rows       KiB   MFLOP  limit us  by           us, measured    GB/s "
          "of limit")
    rows = []
    for op in operators(dtype, span):
        rows.append(row := measure_operator(op, repeats))
        size, flops = (sum(row[key].values()) for key in ("bytes", "flops"))
        print(f"{op.name:20s} {op.rows:4d} {size / 1024:9.1f} {flops / 1e6:7.1f} "
              f"{1e6 * row['limit_s']:9.2f}  {row['bound']:6s} "
              f"{spread([1e6 * s for s in row['seconds']]):>20s} "
              f"{size / statistics.median(row['seconds']) / 1e9:7.1f} {row['share']:8.0%}")
    print("KiB, MFLOP, limit: computed; us: measured, per call, median (smallest-largest)\n")
    bench_plot.draw_bars(args["plot"], "Operators of a decode step", "share of the limit, %", {
        f"{r['name']}, {r['rows']} row{'s' * (r['rows'] > 1)}":
            [100 * r["limit_s"] / s for s in r["seconds"]] for r in rows})
    publish(dict(head, ceilings=ceilings, operators=rows), args["json"])
