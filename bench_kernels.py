"""bench_kernels.py: `python bench.py kernels`, the kernels measured or only compiled.

    python bench.py kernels                            on a GPU: every kernel against its ceilings
                                                       on a CPU: every operator, see bench_limits.py
    python bench.py kernels --static                   compiled for four GPUs: spills, roofline

CONTENTS
     1  Kernels and their work
     2  Without a GPU
     3  On a GPU
"""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import inspect
import json
import math
import multiprocessing
import os
import re
import statistics
import subprocess
import tempfile
import types
import warnings
from collections import namedtuple
from pathlib import Path

import torch

import bench_limits
import bench_plot
import kernels
from bench import add_measure_options, describe_run, publish, spread
from bench_limits import time_calls


# ==================================================================================================
# 1  Kernels and their work
# ==================================================================================================
# Problem: compiled for an absent GPU or timed on a present one, a kernel must be called with the
# same kind of arguments.  Idea: a case is a call without parameters, built for a device; on the
# device "meta" its tensors have shapes and no memory, which is all that a compiler asks for.
#
#     Case ──► device "meta"  section 2: compile, read the machine code
#         └──► device "cuda"  section 3: run, divide bytes and operations by the time
#
# Invariant: every kernel of kernels.py is launched by some case.
# Try: add a case to fused_cases(): both tables show it.

NUMBERS = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16",
           "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "int8": "int8"}
HEADS = {64: (9, 3), 80: (8, 2), 128: (32, 8), 256: (8, 4)}  # D: (H, KH), as in common models

def torch_dtype(name):
    return getattr(torch, NUMBERS[name])

# run: a call without parameters. bytes, flops: what it must move, and compute that is useful.
Case = namedtuple("Case", "name run bytes flops")

def paged_args(device, q_len, S, n, D, cache="bf16", BS=16, dtype="bf16"):
    """Paged attention's: S sequences of n tokens in shuffled blocks, the last q_len of them new."""
    (H, KH), NB, int32 = HEADS[D], S * -(-n // BS), torch.int32
    data, scales = torch.randn(2, NB, BS, KH, D, device=device), None
    if cache == "int8":
        data, scales = data * 40, torch.rand(2, NB, BS, KH, device=device) / 50
    kv = kernels.LayerKV(data.to(torch_dtype(cache)), scales)
    table = torch.randperm(NB, device=device).view(S, -1).to(int32)  # (S, blocks of one)
    starts = q_len * torch.arange(S + 1, dtype=int32, device=device)
    lens = torch.full((S,), n, dtype=int32, device=device)
    slots = torch.zeros(S * q_len, dtype=torch.int64, device=device)  # attention does not read them
    qkv = torch.randn(S * q_len, H + 2 * KH, D, device=device).to(torch_dtype(dtype))
    step = kernels.AttentionMetadata(starts, lens, table, slots, q_len, n)
    return qkv[:, :H], kv, step, D**-0.5

def paged_case(name, device, D, q_len, S, n, cache="bf16", BS=16, dtype="bf16", more=()):
    """One case of paged attention; `more` holds a window and a softcap."""
    args = paged_args(device, q_len, S, n, D, cache, BS, dtype)
    pairs = S * q_len * (n - (q_len - 1) / 2)  # of a query and a key it sees
    size = 2 * S * n * HEADS[D][1] * D * args[1].data.element_size()
    run = lambda: kernels.KERNELS["paged_attention"].triton(*args, *more)
    return Case(name, run, size, 4 * pairs * HEADS[D][0] * D)

def flash_cases(device, S, n, D, dtype="bf16"):
    """Forward and backward over S packed sequences of n tokens."""
    (H, KH), prefix = HEADS[D], "" if dtype == "bf16" else f"{dtype} "
    q, k = (torch.randn(S * n, heads, D, device=device).to(torch_dtype(dtype))
            for heads in (H, KH))
    starts = n * torch.arange(S + 1, dtype=torch.int32, device=device)
    lse = torch.full((S * n, H), math.log(n) + 0.5, device=device)  # about what random q, k leave
    scale, flops = D**-0.5, 2 * S * n * (n + 1) * H * D
    yield Case(f"{prefix}flash D{D}",
               lambda: kernels.flash_attention(q, k, k, starts, starts, n, scale),
               2 * (q.nbytes + k.nbytes), flops)
    yield Case(f"{prefix}flash backward D{D}",
               lambda: kernels.flash_backward(q, q, k, k, q, lse, starts, starts, n, n, scale),
               4 * (q.nbytes + k.nbytes), 2.5 * flops)

def product_cases(device, T, K, N):
    """x (T, K) times narrow weights for N outputs; the bytes are the weight's."""
    random_ints = functools.partial(torch.randint, device=device)
    scales = lambda *shape: torch.rand(*shape, device=device)
    x = torch.randn(T, K, device=device).to(torch.bfloat16)
    w8 = random_ints(-128, 128, (N, K), dtype=torch.int8)
    w4 = random_ints(-(2**31), 2**31, (K // 8, N), dtype=torch.int32)  # 8 weights a word
    f8 = torch.randn(N, K, device=device).to(torch.float8_e4m3fn)
    wide, blocks = scales(N), scales(-(-N // 128), -(-K // 128))
    s64, s128 = (scales(K // group, N).to(torch.bfloat16) for group in (64, 128))
    z64 = random_ints(0, 16, (K // 64, N), dtype=torch.int8)
    products = {"int8": (8, lambda: kernels.int8_matmul(x, w8, wide)),
                "int4": (4, lambda: kernels.int4_matmul(x, w4, s64, z64, 64)),
                "int4 g128": (4, lambda: kernels.int4_matmul(x, w4, s128, None, 128)),
                "fp8": (8, lambda: kernels.fp8_matmul(x, f8, blocks))}
    if kernels.arch() in kernels.NATIVE_FP8:
        products["fp8 inputs"] = 8, lambda: kernels.fp8_matmul(x, f8, blocks, True)
    for name, (bits, run) in products.items():
        yield Case(f"{name} {T} rows", run, bits * N * K // 8, 2 * T * N * K)

def fused_cases(device, T, E=4096, F=6144, V=49152):
    """The operations that only move data: T rows, widths E (model), F (MLP), V (vocabulary)."""
    (H, KH), D = HEADS[128], 128
    qkv = torch.randn(T, (H + 2 * KH) * D, device=device).to(torch.bfloat16)
    cos_sin = torch.rand(max(T, 4096), D, device=device)
    pos = torch.arange(T, device=device)  # and slot
    for cache in ("bf16", "e4m3", "e5m2", "int8"):
        kv = paged_args(device, 1, 1, T, D, cache)[1]
        moved = qkv.nbytes + T * D * (2 * (H + KH) + 2 * KH * kv.data.element_size())
        yield Case(f"rope {cache}", lambda kv=kv: kernels.rope_store_kv(
            qkv, cos_sin, pos, kv, pos, H, KH, D), moved, 0)
    x, weight = (torch.randn(*shape, device=device).to(torch.bfloat16) for shape in ((T, E), (E,)))
    stream, logits = (torch.zeros(rows, width, device=device)
                      for rows, width in ((T, E), (min(T, 256), V)))
    q, gate_up = qkv.view(T, -1, D)[:, :H], qkv.new_zeros(T, 2 * F)
    yield Case("rms_norm", lambda: kernels.rms_norm(x, weight, 1e-5, stream), 12 * T * E, 0)
    yield Case("q norm", lambda: kernels.rms_norm(q, weight[:D], 1e-5), 4 * T * H * D, 0)
    yield Case("silu_mul", lambda: kernels.silu_mul(gate_up), 6 * T * F, 0)
    yield Case("argmax", lambda: kernels.argmax(logits), logits.nbytes, 0)


# ==================================================================================================
# 2  Without a GPU
# ==================================================================================================
# Problem: whether a kernel spills registers or misses the matrix unit is decided by the compiler,
# for GPUs that are not here.  Idea: Triton compiles for any target, only launching needs a device.
# A stub driver answers what a launch asks of the device, and kernels.launch is replaced by a
# function that compiles, so what is read is what a GPU would have been given.
#
#     wrapper(meta tensors) ─► kernels.launch ─► compile(target) ─► registers, spills, shared memory
#                                                                   matrix instruction, copies, loop
#
# Roofline: one pass of the main loop moves some bytes and issues some instructions. Each resource
# has a rate; the one that takes longest binds. The fraction is the time of the bytes, or of the
# useful products, over that of the binding resource.
#
# Simplification: a bound from counts: no cache misses, bank conflicts or tail waves are in it.

MACHINES = {  # per multiprocessor; bytes per second (bw) and rates per clock from data sheets
    "sm_80": dict(kind="cuda", arch=80, warp=32, shared_kib=164, sms=108, ghz=1.41, bw=2.04e12,
                  mma=2048, alu=64, lanes=16, ns=600),
    "sm_90": dict(kind="cuda", arch=90, warp=32, shared_kib=228, sms=132, ghz=1.755, bw=3.35e12,
                  mma=4096, alu=128, lanes=16, ns=700),
    "sm_100": dict(kind="cuda", arch=100, warp=32, shared_kib=228, sms=148, ghz=1.85, bw=8.0e12,
                   mma=8192, alu=128, lanes=16, ns=800),
    "gfx942": dict(kind="hip", arch="gfx942", warp=64, shared_kib=64, sms=304, ghz=2.1, bw=5.3e12,
                   mma=2048, alu=128, lanes=16, ns=800)}
MATRIX = {"wgmma": r"\bwgmma\.mma_async", "tcgen05": r"\btcgen05\.mma", "mma.sync": r"\bmma\.sync",
          "mfma": r"\bv_mfma"}
COPIES = {"cp.async": r"\bcp\.async\.c[ag]", "tma": r"cp\.async\.bulk\.tensor",
          "buffer_load": r"\bbuffer_load", "global_load": r"\bglobal_load"}
CLASSES = {"mma": r"\b(?:HMMA|HGMMA|QGMMA|IMMA|IGMMA|QMMA|UTC\w*MMA)\b", "mufu": r"\bMUFU",
           "convert": r"\b(?:I2F|F2I|I2FP|F2F)\b", "load": r"\b(?:LDG|LDGSTS|UTMALDG)\b",
           "alu": r"\b(?:F(?:FMA|ADD|MUL|MNMX|SETP|SEL)|IADD3|IMAD|LOP3|SHF|LEA|ISETP|PRMT|SEL"
                  r"|VIADD)\b"}

def static_cases():
    """What every target compiles: each head width, cache format and weight format, as shipped."""
    decode, prefill, few = (1, 64, 1024), (512, 4, 512), (1, 64, 128)  # q_len, S, n
    rows = [(f"decode D{D} {c}", D, decode, c) for D in (64, 128) for c in ("bf16", "e4m3", "int8")]
    rows += [(f"prefill D{D} {c}", D, prefill, c) for D in (64, 128) for c in ("bf16", "int8")]
    rows += [
        ("decode D256 bf16", 256, decode), ("decode D256 int8", 256, few, "int8"),
        ("prefill D256 bf16", 256, prefill), ("prefill D80", 80, (64, 4, 64)),
        ("decode D64 short", 64, few), ("decode D64 e5m2", 64, few, "e5m2"),
        ("decode D128 block 64", 128, few, "bf16", 64),
        ("prefill D64 window softcap", 64, prefill, "bf16", 16, "bf16", (100, 30.0)),
        ("fp32 decode D64", 64, (1, 4, 1024), "fp32", 16, "fp32"),
        ("fp32 decode D256", 256, (1, 4, 1024), "fp32", 16, "fp32"),
        ("fp32 prefill D256", 256, (64, 4, 64), "fp32", 16, "fp32")]
    for name, D, shape, *options in rows:
        yield paged_case(name, "meta", D, *shape, *options)
    for D in (64, 128, 256):
        yield from flash_cases("meta", 4, 512, D)
    yield from flash_cases("meta", 4, 64, 128, "fp32")
    for T in (1, 512):
        yield from product_cases("meta", T, 2048, 1536)
    yield from fused_cases("meta", 64)

def stub_driver(target):
    """What Triton asks of a driver before it compiles."""
    from triton.backends.compiler import GPUTarget
    gpu = GPUTarget(*(MACHINES[target][key] for key in ("kind", "arch", "warp")))
    return types.SimpleNamespace(get_current_device=lambda: target, get_current_target=lambda: gpu,
                                 get_current_stream=lambda device: 0)

def run_tool(tool, *arguments):
    """(stdout, stderr) of one of the binary tools that ship inside the Triton wheel."""
    from triton import knobs
    command = [getattr(knobs.nvidia, tool).path, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout, done.stderr

def found(text, patterns):
    return {name: n for name, pattern in patterns.items() if (n := len(re.findall(pattern, text)))}

def read_nvidia(binary, target):
    """Registers, spills, advice of the assembler and the disassembly of one compiled kernel."""
    with tempfile.TemporaryDirectory() as folder:
        cubin, ptx = Path(folder, "k.cubin"), Path(folder, "k.ptx")
        cubin.write_bytes(binary.asm["cubin"])
        usage, _ = run_tool("cuobjdump", "-res-usage", str(cubin))
        registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
        sass, _ = run_tool("nvdisasm", "-c", str(cubin))
        log = ""
        if "wgmma" in binary.asm["ptx"]:  # Triton drops the log where ptxas says it serialised
            ptx.write_text(binary.asm["ptx"])
            _, log = run_tool("ptxas", "-v", f"--gpu-name={target}a", str(ptx), "-o", os.devnull)
    spills = len(re.findall(r"\b(?:LDL|STL)\b", sass))
    advice = [line.strip()[:160] for line in log.splitlines()
              if "erializ" in line or "arning" in line]
    return dict(registers=registers, spills=spills + stack, advice=advice, sass=sass,
                instructions=len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", sass, re.M)),
                matrix=found(binary.asm["ptx"], MATRIX), copies=found(binary.asm["ptx"], COPIES))

def read_amd(binary, target):
    """The same from AMD assembly; spilled scalar registers go to vector lanes, not to memory."""
    text = binary.asm["amdgcn"]
    number = lambda key: int(re.search(key + r":?\s+(\d+)", text).group(1))
    return dict(registers=number(r"\.vgpr_count"), sass=None, advice=[],
                spills=number(r"\.vgpr_spill_count") + number(r"\.private_segment_fixed_size"),
                instructions=len(re.findall(r"^\t[a-z]", text, re.M)),
                matrix=found(text, MATRIX), copies=found(text, COPIES))

def blocks_per_sm(report, target):
    """Programs that fit one multiprocessor at a time, by registers, threads and shared memory."""
    machine, warps, registers = MACHINES[target], report["warps"], max(1, report["registers"])
    if machine["kind"] == "hip":  # 4 SIMDs, 512 registers a lane in units of 8, 8 waves at most
        by_registers, reserved = min(8, 512 // (-(-registers // 8) * 8)) * 4 // warps, 0
    else:  # 65,536 registers in 4 partitions, units of 256 a warp; 1 KiB of shared memory is taken
        by_registers, reserved = 16384 // (-(-registers * 32 // 256) * 256) * 4 // warps, 1024
    by_shared = (machine["shared_kib"] << 10) // max(1, report["shared"] + reserved)
    return min(by_registers, 2048 // (warps * machine["warp"]), by_shared, 32)

def main_loop(sass):
    """Instruction counts of the innermost loop with the most matrix instructions, by class."""
    code, labels = [], {}
    for line in sass.splitlines():
        if label := re.match(r"^(\.L_\w+):", line):
            labels[label.group(1)] = len(code)
        elif word := re.match(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            code.append(word.group(1))
    loops = []
    for i, text in enumerate(code):
        jump = re.search(r"\bBRA\S*\s.*?`\((\.L_\w+)\)", text)
        if jump and labels.get(jump.group(1), i + 1) <= i:
            loops.append(code[labels[jump.group(1)] : i + 1])
    counts = [{"all": len(body), **{name: sum(bool(re.search(p, text)) for text in body)
                                    for name, p in CLASSES.items()}} for body in loops]
    return max(counts, key=lambda c: (c["mma"] > 0, c["load"] > 0, -c["all"]), default=None)

def tile_cost(name, meta, arguments):
    """(bytes from memory, useful floating point operations) of one pass of a kernel's main loop."""
    size = lambda i: arguments[i].element_size()
    if name in ("_paged_kernel", "_flash_kernel"):
        G = meta["H"] // meta["KH"] if name == "_paged_kernel" else 1  # heads that share a row tile
        rows = meta["BM"] // G * G
        return 2 * meta["BN"] * meta["D"] * size(1), 4 * rows * meta["BN"] * meta["D"]
    if name.endswith("_matmul_kernel"):
        bits = 4 if "int4" in name else 8 * size(1)
        return meta["BN"] * meta["BK"] * bits // 8, 2 * meta["BM"] * meta["BN"] * meta["BK"]
    return 0, 0

def roofline(report, target, tile_bytes, tile_flops):
    """Static bound of one pass of the main loop: what binds, and the fraction that it leaves.

    latency: the bytes in flight cover the memory's latency (Little's law).
    """
    machine, loop = MACHINES[target], report["sass"] and main_loop(report["sass"])
    if not loop or not tile_flops or not report["matrix"]:
        return None
    if report["rows"] >= 64 and "matmul" not in report["kernel"]:
        tile_bytes = 0  # K and V of a prefill tile come from the L2 cache
    bandwidth, threads = machine["bw"] / machine["sms"], 32 * report["warps"]
    cycles = dict(memory=tile_bytes / (bandwidth / machine["ghz"] / 1e9),
                  matrix=tile_flops / machine["mma"], issue=loop["all"] * report["warps"] / 4,
                  exp2=loop["mufu"] * threads / machine["lanes"],
                  convert=loop["convert"] * threads / machine["lanes"],
                  alu=loop["alu"] * threads / machine["alu"])
    binds = max(cycles, key=cycles.get)
    flying = report["tile_bytes"] * max(1, report["stages"] - 1) * report["blocks"]
    return dict(fraction=round(max(cycles["memory"], cycles["matrix"]) / cycles[binds], 2),
                binds=binds, latency=flying >= bandwidth * machine["ns"] * 1e-9, loop=loop["all"])

def compile_launches(target, run):
    """Call run(), which calls wrappers; one report per kernel that they would launch."""
    reports = []
    read = read_amd if MACHINES[target]["kind"] == "hip" else read_nvidia

    def compile_only(kernel, grid, *arguments, **meta):
        binary = kernel.warmup(*arguments, grid=grid, **meta)
        name, made = kernel.fn.__name__, binary.metadata
        report = dict(kernel=name, warps=meta["num_warps"], stages=meta.get("num_stages", 1),
                      shared=made.shared, tmem=getattr(made, "tmem_size", 0) or 0,
                      rows=meta.get("BM", 0), **read(binary, target))
        report["trap"] = "llvm.trap" in binary.asm["llir"] and report["instructions"] < 40
        report["blocks"] = blocks_per_sm(report, target)
        report["tile_bytes"], flops = tile_cost(name, meta, arguments)
        report["roof"] = roofline(report, target, report["tile_bytes"], flops)
        del report["sass"]
        reports.append(report)

    kernels.launch, kernels.FORCE = compile_only, "triton"  # for good: see static_target()
    run()
    return reports

def static_target(target, only=""):
    """Reports of every case for one target: [{case, target, kernel, ...}]; errors are reports.

    The process it is called in can compile afterwards and nothing else.
    """
    from triton.runtime import driver
    driver.set_active(stub_driver(target))
    reports = []
    for case in static_cases():
        if only not in case.name:
            continue
        try:
            new = compile_launches(target, case.run)
        except Exception as error:
            new = [dict(kernel="", error=f"{type(error).__name__}: {str(error)[-500:]}")]
        reports += [dict(case=case.name, target=target, **report) for report in new]
    return reports

def static_reports(targets, only=""):
    """Reports for all targets, two processes at a time; kept until a source of theirs changes."""
    functions = [getattr(member, "fn", member) for _, member in sorted(vars(kernels).items())]
    parts = [inspect.getsource(f) for f in functions if inspect.isfunction(f)]  # not the C text
    parts += [kernels.TILES, kernels.SPLIT_TOKENS, kernels.SHORT_QUERY, kernels.triton.__version__,
              Path(__file__).read_text(), targets, only]
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "nanoserve"
    kept = folder / f"static-{key}.json"
    if kept.exists():
        return json.loads(kept.read_text())
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        reports = sum(pool.map(static_target, targets, [only] * len(targets)), [])
    folder.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(reports))
    return reports

def print_static(reports):
    """One line per compiled kernel."""
    print(f"{'case':26s} {'target':6s} {'kernel':20s} regs spill shared tmem blk/SM matrix   copies"
          " B/tile  roofline")
    for r in reports:
        start = f"{r['case']:26s} {r['target']:6s}"
        if "error" in r:
            print(f"{start} ERROR {r['error'][-120:]}")
            continue
        name = r["kernel"].removeprefix("_").removesuffix("_kernel")
        matrix = next(iter(r["matrix"]), "-")
        copies = r["copies"].get("tma") or r["copies"].get("cp.async") or 0
        bound = f"{r['roof']['fraction']:.2f} {r['roof']['binds']}" if r["roof"] else "-"
        print(f"{start} {name:20s} {r['registers']:4d} {r['spills']:5d} {r['shared']:6d} "
              f"{r['tmem']:4d} {r['blocks']:6d} {matrix:8s} {copies:6d} {r['tile_bytes']:6d}  "
              + "  ".join([bound, *r["advice"][:1]]))


# ==================================================================================================
# 3  On a GPU
# ==================================================================================================
# Problem: a number of GB/s means nothing alone.  Idea: measure the ceilings first, with torch, and
# show each kernel as a fraction of the one that binds it, beside torch's own attention.
#
#     memory      a large copy             ─┐
#     arithmetic  a large matrix product   ─┴─► of copy, of matmul: 1.00 is as fast as this GPU goes
#
# Simplification: the caches stay warm between repeats, so what fits into them may pass 1.00.

def measure_ceilings(device, small, repeats):
    """(bytes per second of a copy, bf16 operations per second of a matrix product)"""
    n, side = (1 << 20, 256) if small else (1 << 30, 8192)
    source = torch.zeros(n, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a = torch.zeros(side, side, dtype=torch.bfloat16, device=device)
    copy = 2 * n / min(time_calls(lambda: target.copy_(source), device, repeats))
    return copy, 2 * side**3 / min(time_calls(lambda: a @ a, device, repeats))

def measured_cases(device, small):
    """Decode, prefill, narrow weights, fused operations; small: for the interpreter."""
    D, n = (64, 32) if small else (128, 4096)
    for cache in ("bf16", "e4m3", "int8"):
        for S, tokens in ((2, 64),) if small else ((1, 8192), (32, 2048), (128, 2048)):
            yield paged_case(f"decode S {S} n {tokens} {cache}", device, D, 1, S, tokens, cache)
    yield paged_case(f"paged prefill {n}", device, D, n, 1, n)
    yield from flash_cases(device, 1, n, D)
    yield from torch_cases(device, n, D)
    yield from product_cases(device, *((2, 256, 128) if small else (16, 4096, 4096)))
    yield from fused_cases(device, 4 if small else 8192)

def torch_cases(device, n, D):
    """torch's own attention on the work of flash_cases()."""
    q, k = (torch.randn(1, heads, n, D, device=device).to(torch.bfloat16) for heads in HEADS[D])
    work = 2 * (q.nbytes + k.nbytes), 2 * n * (n + 1) * q.shape[1] * D
    sdpa = torch.nn.functional.scaled_dot_product_attention
    yield Case(f"torch sdpa {n}", lambda: sdpa(q, k, k, is_causal=True, enable_gqa=True), *work)
    if device == "cuda":
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
        mask = create_block_mask(lambda b, h, i, j: j <= i, None, None, n, n, device=device)
        flex = torch.compile(flex_attention)
        yield Case(f"torch flex {n}", lambda: flex(q, k, k, block_mask=mask, enable_gqa=True),
                   *work)

def measure_kernels(device, small, repeats):
    """Print the ceilings, then each kernel as a fraction of them; returns all of it."""
    copy, matmul = measure_ceilings(device, small, repeats)
    print(f"ceilings: copy {copy / 1e9:.1f} GB/s, bf16 matmul {matmul / 1e12:.2f} TFLOP/s")
    print(f"{'kernel':28s}                   us      GB/s  of copy   TFLOP/s  of matmul")
    measured = {}
    for name, run, size, flops in measured_cases(device, small):
        measured[name] = time_calls(run, device, repeats)
        seconds = statistics.median(measured[name])
        rate, speed = size / seconds, flops / seconds
        print(f"{name:28s} {spread([s * 1e6 for s in measured[name]]):>20s} {rate / 1e9:9.1f} "
              f"{rate / copy:8.2f} {speed / 1e12:9.3f} {speed / matmul:10.2f}")
    return dict(copy_bytes_per_s=copy, matmul_flop_per_s=matmul, seconds=measured)

def run_kernels(args):
    """What the kernels compile to (--static), or how fast they are on this machine."""
    triton = args["static"] or args["dry"] or torch.cuda.is_available()
    if triton and kernels.triton is None:
        raise ValueError("Triton is not installed here: there is nothing to compile or to measure")
    if args["static"]:
        run_static(args)
    elif triton:
        run_measured(args)
    else:
        bench_limits.run_operators(args)

def run_measured(args):
    """Time the kernels on this GPU, or show that the timing works, in Triton's interpreter."""
    dry = args["dry"]
    if dry != kernels.INTERPRET:
        raise ValueError("--dry and TRITON_INTERPRET=1 in the environment go together")
    warnings.simplefilter("ignore", RuntimeWarning)  # bf16 overflows in the interpreter
    kernels.FORCE = "triton"
    repeats = 1 if dry else args["repeat"] or (5 if args["quick"] else 20)
    head = describe_run(
        device="Triton's interpreter" if dry else torch.cuda.get_device_name(), repeat=repeats)
    result = measure_kernels("cpu" if dry else "cuda", dry, repeats)
    bench_plot.draw_bars(args["plot"], "Kernels", "us", {
        name: [s * 1e6 for s in seconds] for name, seconds in result["seconds"].items()})
    publish({**head, **result}, args["json"])

def run_static(args):
    """Print what the kernels compile to for the targets."""
    if kernels.INTERPRET:
        raise ValueError("--static compiles: it wants TRITON_INTERPRET unset")
    if args["plot"]:
        raise ValueError("--plot draws measurements, and --static has none")
    targets = tuple(args["targets"].split(","))
    unknown = [target for target in targets if target not in MACHINES]
    if unknown:
        raise ValueError(f"--targets: {unknown[0]!r} is not one of {', '.join(MACHINES)}")
    head = describe_run(source="computed", targets=args["targets"])
    reports = static_reports(targets, args["only"])
    print_static(reports)
    publish(dict(head, reports=reports), args["json"])

def add_kernels_options(parser):
    add_measure_options(parser, "fewer repeats, less data", "calls of each kernel (default: 20 on "
                        "a GPU, 15 on a CPU)", model=False)
    add = parser.add_argument
    add("--dtype", choices=("bf16", "fp32"), default="bf16", help="on a CPU: of activations")
    add("--static", action="store_true", help="compile for GPUs that need not be here")
    add("--targets", default=",".join(MACHINES), help="with --static: GPUs (default: all)")
    add("--only", default="", help="with --static: cases whose name contains this")
    add("--dry", action="store_true", help="tiny shapes through Triton's interpreter")
