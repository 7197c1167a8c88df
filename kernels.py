"""Every operation of the engine that touches the KV cache or is worth a kernel of its own.

One operation is one pair and one wrapper:

    rms_norm_ref        plain torch, fp32 inside, short enough to be checked by eye: the definition
    _rms_norm_kernel    Triton, for NVIDIA and AMD; on a CPU only under TRITON_INTERPRET=1
    rms_norm_c          C for the CPU, where it pays (bf16 and fp32)
    rms_norm            the wrapper: checks shapes, types, contiguity; runs one and counts it

The table KERNELS lists the operations, the table ATTENTION the attention backends. A test walks
both and compares every member with its reference, so a new row is tested on arrival.

CONTENTS
    1  Formats                   AttentionMetadata, LayerKV
    2  References                the definitions, in plain torch
    3  Launching Triton kernels  tiles per GPU
    4  Memory-bound kernels      norm, activation, RoPE and cache write, argmax
    5  Flash attention           forward and backward (Dao et al. 2022, 2023)
    6  Paged attention           block tables and split contexts (Kwon et al. 2023)
    7  Narrow weights            int8, int4 and fp8 matrix products
    8  The CPU members, in C     kernels.c, built at first use
    9  Wrappers                  checks, dispatch, the table KERNELS
    10 Attention backends        the table ATTENTION and the choice at start-up
    11 The numbers of section 5  what flash attention moves and saves
    12 Recorded steps            all operators of a step in one call

Letters: T tokens in the step, S sequences, E model width, H query heads, KH key/value heads,
G = H // KH, D head width, F MLP width, V vocabulary, NB blocks, BS block size.
"""
from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import mmap
import os
import pathlib
import platform
import re
import shlex
import struct
import subprocess
import tempfile
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from typing import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

try:
    import triton
    import triton.language as tl
    jit = triton.jit
except ImportError:             # Triton is published for Linux; elsewhere its members are absent
    triton = tl = None
    jit = lambda fn=None, **options: fn or (lambda fn: fn)    # the kernels stay plain, uncalled

FORCE: str | None = None     # "torch", "triton" or "c": every wrapper runs that member
RECORDING = None             # of a step, while one is recorded (section 12)


# ==================================================================================================
# 1  Formats
# ==================================================================================================
# The cache of one layer is a heap of fixed-size blocks; who owns which block is written in a table.
#
#     block_table[s] = [7, 3, 11]              BS = 4
#     pos   0 1 2 3 | 4 5 6 7 | 8 9            token at pos 9: block 11, offset 1
#     block    7    |    3    |  11            slot = 11 * 4 + 1 = 45
#
# Kernels see the step as one packed batch: T tokens of S sequences back to back, no padding.
#
# Invariant: token i of a sequence sits at pos = seq_len - q_len + i and sees the last `window`
#   positions up to and including pos, all of them when window is 0.
# Invariant: a slot that no token was written to is never read, not even to be multiplied by zero.

@dataclass
class AttentionMetadata:
    """What the attention of one step needs to know; built once, shared by all layers."""
    query_start_loc: torch.Tensor   # int32 (S+1,): first row of each sequence; last entry T
    seq_lens: torch.Tensor          # int32 (S,): tokens in the cache after this step; 0 = padding
    block_table: torch.Tensor       # int32 (S, max_blocks): physical block of each logical block
    slot_mapping: torch.Tensor      # int64 (T,): cache slot of each token; -1 = write nowhere
    max_query_len: int
    max_seq_len: int

@dataclass
class LayerKV:
    """The KV cache of one layer. Keys are stored rotated, values as they are."""
    data: torch.Tensor                   # (2, NB, BS, KH, D), K then V; bf16, fp16, fp32, fp8, int8
    scales: torch.Tensor | None = None   # int8: fp32 (2, NB, BS, KH), one scale per token and head
    k_scale: float = 1.0                 # fp8: one scale per tensor, from the checkpoint
    v_scale: float = 1.0

FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}    # OCP 8-bit floats

# What a cache may hold, in the order of the enum in kernels.c. float16 comes with the activations.
KV_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8,
             "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}

@dataclass
class QuantizedWeight:
    """A weight (N, K) as codes and scales: w[n, k] = codes[n, k] * scales[n, k // group] + mins,
    where mins, if there are any, has a number for each scale."""
    codes: torch.Tensor                  # (N, K) uint8 or int8, integers, or float8_e4m3fn
    scales: torch.Tensor                 # fp32 (N, ceil(K / group))
    group: int                           # columns that share a scale; K: one scale per row
    bits: int = 8                        # 4: every code is in 0..15 (uint8) or -8..7 (int8)
    mins: torch.Tensor | None = None     # fp32, like scales
    inputs: torch.Tensor | None = None   # int64 (K,): column k multiplies input inputs[k]
    int8_inputs: bool = False            # multiply inputs that are rounded to int8, row by row

    @property
    def shape(self):
        return tuple(self.codes.shape)

    def signed(self):
        """(what to take from the codes so that they are signed: 0 if they are; the minima then)."""
        if self.codes.dtype != torch.uint8:
            return 0, self.mins
        half = 1 << self.bits - 1
        return half, (0 if self.mins is None else self.mins) + half * self.scales

    def rows(self, index):
        """Some of the rows, a slice or a tensor of ids, as a weight of their own."""
        cut = {name: as_bytes(t)[index].view(t.dtype) for name in ("codes", "scales", "mins")
               if (t := getattr(self, name)) is not None}
        return replace(self, **cut)

    def to(self, device):
        tensors = {f.name: t.to(device) for f in fields(self)
                   if isinstance(t := getattr(self, f.name), torch.Tensor)}
        return replace(self, **tensors)

    def dequantize(self):
        """The weight in fp32 (N, K), columns in the order of the inputs."""
        K = self.codes.shape[1]
        spread = lambda x: x.repeat_interleave(self.group, 1)[:, :K]
        w = self.codes.float() * spread(self.scales)
        w = w if self.mins is None else w + spread(self.mins)
        return w if self.inputs is None else torch.empty_like(w).index_copy_(1, self.inputs, w)

def stack(parts):
    """The rows of several QuantizedWeight one under another, or None if they differ in anything
    but their numbers. Parts with other inputs (GPTQ act order) cannot share a product."""
    first, *rest = parts
    if not rest:
        return first
    same = lambda a, b: (a is None) == (b is None) and (a is None or torch.equal(a, b))
    facts = lambda p: (p.codes.dtype, p.codes.shape[1], p.group, p.bits, p.mins is None,
                       p.int8_inputs)
    if any(facts(p) != facts(first) or not same(p.inputs, first.inputs) for p in rest):
        return None
    join = lambda name: torch.cat([as_bytes(getattr(p, name)) for p in parts])
    return replace(first, codes=join("codes").view(first.codes.dtype), scales=join("scales"),
                   mins=None if first.mins is None else join("mins"))

def require(condition, *parts):
    """Raise ValueError with the parts in a row when the condition fails."""
    if not condition:
        show = lambda p: f"{tuple(p.shape)} {p.dtype}" if isinstance(p, torch.Tensor) else str(p)
        raise ValueError(" ".join(map(show, parts)))

def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """fp8 tensors as uint8: torch cannot index them, but it can move their bytes."""
    return x.view(torch.uint8) if x.dtype in FP8_MAX else x


# ==================================================================================================
# 2  References
# ==================================================================================================
# The definition of each operation. Slow and obvious; the other members are compared with these.
#
#     rms_norm   y = x / sqrt(mean(x^2) + eps) * w
#     silu_mul   y = g / (1 + exp(-g)) * u
#     rope       (a, b) -> (a cos - b sin, b cos + a sin)   for each pair i, angle pos * theta_i
#     attention  o = softmax(cap(q k^T scale)) v            over the positions a token may see
#
# Why: fp32 inside and one rounding at the end. bf16 has 8 significant bits; a sum of 576 squares
#   kept in bf16 would lose three of them.

def rms_norm_ref(x, weight, eps, residual=None, out=None):
    """Root mean square norm over the last dimension (Zhang and Sennrich 2019)."""
    y = x.float() if residual is None else residual.add_(x)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    y = (y * weight.float()).to(x.dtype)
    return y if out is None else out.copy_(y)

def silu_mul_ref(gate_up):
    """SwiGLU activation (Shazeer 2020): silu of the first half times the second half."""
    gate, up = gate_up.float().chunk(2, dim=-1)    # (T, F) each
    return (F.silu(gate) * up).to(gate_up.dtype)

def rope_ref(x, cos_sin, positions, interleaved=False):
    """Rotate (T, heads, D) in place (Su et al. 2021). The first rotary_dim = cos_sin.shape[1] dims
    of a head are turned, the rest pass. Dim i is paired with i + rotary_dim/2 (NeoX) or,
    interleaved, 2i with 2i + 1 (GPT-J)."""
    rot = x[..., :cos_sin.shape[1]]
    cos, sin = cos_sin[positions].float().unsqueeze(1).chunk(2, dim=-1)    # (T, 1, rotary_dim/2)
    even, odd = (rot[..., 0::2], rot[..., 1::2]) if interleaved else rot.chunk(2, dim=-1)
    a, b = even.float().clone(), odd.float().clone()     # in fp32 .float() is the tensor itself
    even.copy_(a * cos - b * sin)
    odd.copy_(b * cos + a * sin)

def quantize_kv(x, kv, scale):
    """(T, KH, D) in the number format of the cache, and for int8 its scales (T, KH), else None."""
    if kv.data.dtype in FP8_MAX:
        top = FP8_MAX[kv.data.dtype]
        return (x.float() / scale).clamp(-top, top).to(kv.data.dtype), None
    if kv.data.dtype == torch.int8:
        step = (x.float().abs().amax(-1) / 127).clamp_min(1e-8)
        return torch.round(x.float() / step[..., None]).to(torch.int8), step
    return x.to(kv.data.dtype), None

def store_kv_ref(k, v, kv, slot_mapping):
    """Write k and v (T, KH, D) to their slots in the format of the cache; slot -1 is skipped."""
    keep = slot_mapping >= 0
    slots = slot_mapping[keep]
    for half, (x, scale) in enumerate(((k, kv.k_scale), (v, kv.v_scale))):
        code, step = quantize_kv(x[keep], kv, scale)
        as_bytes(kv.data[half]).flatten(0, 1)[slots] = as_bytes(code)    # (NB * BS, KH, D)
        if step is not None:
            kv.scales[half].flatten(0, 1)[slots] = step

def rope_store_kv_ref(qkv, cos_sin, positions, kv, slot_mapping, H, KH, D, interleaved=False):
    """Split fused qkv, rotate q and k in place, store k and v. Returns the q view (T, H, D)."""
    heads = qkv.view(-1, H + 2 * KH, D)
    q, k, v = heads.split((H, KH, KH), dim=1)
    rope_ref(heads[:, :H + KH], cos_sin, positions, interleaved)
    store_kv_ref(k, v, kv, slot_mapping)
    return q

def gather_kv(kv, blocks, n):
    """K and V of the first n positions stored in `blocks`, as fp32 (2, n, KH, D)."""
    ids = blocks[:-(-n // kv.data.shape[2])].long()
    x = as_bytes(kv.data)[:, ids].view(kv.data.dtype).flatten(1, 2)[:, :n].float()
    if kv.data.dtype in FP8_MAX:
        x = x * torch.tensor([kv.k_scale, kv.v_scale], device=x.device).view(2, 1, 1, 1)
    elif kv.scales is not None:
        x = x * kv.scales[:, ids].flatten(1, 2)[:, :n, :, None]
    return x

def visible(q_len, n, window, device=None):
    """bool (q_len, n): may query token i, at position n - q_len + i, see position j?"""
    behind = torch.arange(n - q_len, n, device=device)[:, None] - torch.arange(n, device=device)
    return (behind >= 0) & (behind < (window or n + 1))

def dense_attention(q, k, v, scale, window=0, softcap=0.0):
    """Attention of one sequence: q (q_len, H, D), k and v (n, KH, D) -> fp32 o and lse (q_len, H).
    The last token of q is the last of k. A row that sees nothing gives 0 and lse -inf."""
    grouped = q.float().unflatten(1, (k.shape[1], -1))                    # (q_len, KH, G, D)
    scores = torch.einsum("qkgd,nkd->qkgn", grouped, k.float()) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    seen = visible(len(q), len(k), window, q.device)[:, None, None]
    scores = scores.masked_fill(~seen, -math.inf)
    weights = scores.softmax(-1).masked_fill(~seen, 0.0)                  # no score at all: NaN
    out = torch.einsum("qkgn,nkd->qkgd", weights, v.float())
    return out.flatten(1, 2), scores.logsumexp(-1).flatten(1, 2)

def flash_attention_ref(q, k, v, start_q, start_k, max_q, scale, window=0, softcap=0.0):
    """Attention of packed sequences, q (T, H, D), k and v (N, KH, D): (o, lse), differentiable."""
    cut = lambda x, starts: x.tensor_split(starts.tolist()[1:-1])         # one piece per sequence
    pairs = [dense_attention(*qkv, scale, window, softcap)
             for qkv in zip(cut(q, start_q), cut(k, start_k), cut(v, start_k))]
    outs, lses = zip(*pairs)
    return torch.cat(outs).to(q.dtype), torch.cat(lses)

def flash_backward_ref(do, q, k, v, out, lse, start_q, start_k, max_q, max_k, scale, window=0,
                       softcap=0.0):
    """(dq, dk, dv) of flash attention, by autograd on the reference in fp32."""
    with torch.enable_grad():
        leaves = [x.detach().float().requires_grad_() for x in (q, k, v)]
        o, _ = flash_attention_ref(*leaves, start_q, start_k, max_q, scale, window, softcap)
        return [g.to(q.dtype) for g in torch.autograd.grad(o, leaves, do.float())]

def each_sequence(kv, meta, window=0):
    """(rows of the batch, k, v) of every sequence with queries and keys; k, v fp32 (n, KH, D), zero
    before the window of the first query: those blocks may belong to somebody else by now."""
    starts = meta.query_start_loc.tolist()
    for s, n in enumerate(meta.seq_lens.tolist()):
        q_len = starts[s + 1] - starts[s]
        if n and q_len:
            k, v = pair = gather_kv(kv, meta.block_table[s], n)
            pair[:, : max(n - q_len - window + 1, 0) if window else 0] = 0
            yield slice(starts[s], starts[s + 1]), k, v

def attention_ref(q, kv, meta, scale, window=0, softcap=0.0, lse=None):
    """Softmax attention through the block table, one sequence at a time. q (T, H, D) -> (T, H, D).
    lse (T, H) fp32, when given, receives log(sum(exp(scores))), -inf where a row sees nothing."""
    out = q.new_zeros(q.shape)
    lse = torch.empty(q.shape[:2], device=q.device) if lse is None else lse
    lse.fill_(-math.inf)
    for rows, k, v in each_sequence(kv, meta, window):
        o, lse[rows] = dense_attention(q[rows], k, v, scale, window, softcap)
        out[rows] = o.to(q.dtype)
    return out

def argmax_ref(logits):
    """Index of the largest logit of each row, int64 (S,); the lowest index wins ties."""
    return logits.argmax(dim=-1)


# ==================================================================================================
# 3  Launching Triton kernels
# ==================================================================================================
# A Triton program is one block of threads that owns one tile of the output and streams tiles of the
# inputs through shared memory. Too large a tile runs out of registers and spills to memory; too
# small a one waits for it. What is tuned per GPU is the tile, and only the tile:
#
#     TILES[operation, size][architecture] = rows, columns, warps, pipeline stages
#
# Invariant: no row of TILES spills, passes the shared memory limit, or misses the matrix unit
#   (`python bench.py kernels --static` prints the evidence; no GPU is needed to compile).
# Why: a table and not an autotuner. Tuning needs the device, takes seconds at start-up, and makes
#   two runs of one program compute different bits.
# Simplification: consumer chips take the sm_80 row; it stays under their 99 KB of shared memory.

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"     # Triton reads it when imported, as here
LOG2E = tl.constexpr(1.4426950408889634) if triton else None    # exp(x) = exp2(x * LOG2E)
NATIVE_FP8 = {"sm_90", "sm_100", "interpreter"}    # can convert e4m3; the others unpack its bits
SPLIT_TOKENS = 256     # context tokens per program of the split attention; a multiple of every tile
SHORT_QUERY = 8        # sequences with at most this many new tokens take the split attention
ARCHS = ("sm_80", "sm_90", "sm_100", "gfx942")
TMA_ARCHS = {"sm_90", "sm_100", "interpreter"}     # have a copy engine that takes coordinates
# (operation, padded bytes of a head, or rows of x) -> per ARCHS (rows, columns, warps, stages) and,
# where the assembler would spill, the number of registers
TILES = {
    ("flash", 128): ((64, 64, 4, 2), (128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 1)),
    ("flash", 256): ((64, 32, 4, 2), (128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 1)),
    ("flash", 512): ((64, 32, 8, 2), (64, 32, 8, 2), (64, 32, 8, 2), (64, 32, 8, 1)),
    ("flash_dkdv", 128): ((32, 64, 4, 2), (32, 64, 4, 2), (32, 64, 4, 2), (32, 64, 4, 1)),
    ("flash_dkdv", 256): ((64, 32, 8, 2), (64, 64, 8, 2), (64, 64, 8, 1), (32, 64, 4, 1)),
    ("flash_dkdv", 512): ((16, 32, 8, 1), (16, 32, 8, 1), (16, 32, 8, 1), (16, 32, 4, 1)),
    ("flash_dq", 128): ((64, 32, 4, 2), (64, 32, 4, 2), (64, 32, 4, 2), (64, 32, 4, 1)),
    ("flash_dq", 256): ((64, 32, 8, 2), (64, 32, 8, 2), (64, 32, 8, 2), (64, 32, 4, 1)),
    ("flash_dq", 512): ((32, 16, 8, 1), (32, 16, 8, 1), (32, 16, 8, 1), (32, 16, 4, 1)),
    ("paged_short", 128): ((16, 64, 4, 3), (16, 64, 4, 2), (16, 64, 4, 3), (16, 64, 4, 2)),
    ("paged_short", 256): ((16, 64, 4, 2), (16, 64, 4, 3), (16, 64, 4, 3), (16, 32, 4, 2)),
    ("paged_short", 512): ((16, 32, 4, 2), (16, 32, 4, 3, 255), (16, 32, 4, 3, 255),
                           (16, 16, 4, 2)),
    ("paged_long", 128): ((64, 64, 8, 2), (64, 64, 4, 3), (64, 64, 4, 3, 255), (64, 64, 4, 2)),
    ("paged_long", 256): ((64, 64, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2, 255), (64, 32, 4, 1)),
    ("paged_long", 512): ((64, 32, 8, 2), (64, 32, 8, 2), (64, 32, 8, 2), (64, 16, 8, 1)),
    ("int8_matmul", 16): ((16, 64, 4, 3), (16, 64, 4, 3), (16, 64, 4, 3), (16, 64, 4, 1)),
    ("int8_matmul", 64): ((64, 64, 4, 2), (64, 128, 4, 3), (64, 128, 4, 3), (64, 64, 4, 1)),
    ("int4_matmul", 16): ((16, 64, 4, 3), (16, 64, 4, 3), (16, 64, 4, 3), (16, 64, 4, 2)),
    ("int4_matmul", 64): ((32, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 1)),
    ("fp8_matmul", 16): ((16, 64, 4, 3), (16, 64, 4, 3), (16, 64, 4, 3, 168), (16, 64, 4, 1)),
    ("fp8_matmul", 64): ((64, 64, 8, 2), (64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 1)),
}

def tile_for(kind, size, dtype, rows_at_least=1):
    """The tile and its launch options, as keyword arguments of a kernel that works on `dtype`.
    size: D of an attention kernel, or the rows of x of a matrix product."""
    product = kind.endswith("_matmul")
    if INTERPRET:
        rows, columns, *rest = 16 if product or kind == "paged_short" else 32, 32 + 32 * product, 4
    elif dtype == torch.float32 and not product:    # exact, for checking: registers hold the tiles
        rows, columns, *rest = 16, 16, 4, 1, 255
    else:
        key = (16 if size <= 16 else 64) if product else max(128, pow2(size) * dtype.itemsize)
        rows, columns, *rest = TILES[kind, key][ARCHS.index(arch())]
    options = hardware(*rest)
    return dict(BM=max(rows, pow2(rows_at_least)), BN=columns, STAGES=options["num_stages"],
                PRECISION=precision(dtype), **options)

def head_shape(H, D, window, softcap):
    """What every attention kernel is compiled for. DP: the matrix unit wants 16 columns or more."""
    return dict(H=H, D=D, DP=max(16, pow2(D)), WINDOW=window, SOFTCAP=softcap > 0)

def arch():
    """Row of the tile tables for the current device (or the one that a stub driver pretends)."""
    if INTERPRET:
        return "interpreter"
    target = triton.runtime.driver.active.get_current_target()
    if target.backend == "hip":
        return "gfx942"
    return "sm_90" if target.arch == 90 else "sm_100" if 100 <= target.arch < 120 else "sm_80"

def launch(kernel, grid, *args, **meta):
    """Run kernel on grid. The static checks replace this function to compile for an absent GPU."""
    kernel[grid](*args, **meta)

def hardware(warps, stages=1, registers=0):
    """Launch options of a tile. registers: the limit for one thread; 0 leaves it to the assembler,
    which may spill a few when that fits one more program on a multiprocessor."""
    limit = {"maxnreg": registers} if registers and arch().startswith("sm_") else {}
    return dict(num_warps=warps, num_stages=stages, **limit)

def _fp32(like, *shape):
    return torch.empty(shape, dtype=torch.float32, device=like.device)

def pow2(n):
    """Smallest power of two >= n (80 -> 128): the sides of a Triton tile are powers of two."""
    return 1 << max(0, n - 1).bit_length()

def cache_format(kv):
    """(K and V as kernels see them, format, factor that the format leaves out of the values)."""
    if kv.data.dtype == torch.float8_e4m3fn and arch() not in NATIVE_FP8:
        return kv.data.view(torch.uint8), "e4m3_bits", 256.0
    if kv.data.dtype in FP8_MAX:
        return kv.data, "fp8", 1.0
    return kv.data, "int8" if kv.data.dtype == torch.int8 else "plain", 1.0

def precision(dtype):
    """How tl.dot multiplies: fp32 must stay exact, TF32 keeps 10 of its 23 mantissa bits."""
    return "ieee" if dtype == torch.float32 else "tf32"


# ==================================================================================================
# 4  Memory-bound kernels
# ==================================================================================================
# These do a handful of operations per byte, and a GPU can do hundreds in the time one byte takes.
# Time is bytes moved; the only way to be faster is to move nothing twice.
#
#     operation        reads             writes            fused, and what that saves
#     rms_norm         x, residual       residual, y       the sum: one write and one read of (T, E)
#     silu_mul         gate, up          y                 silu: one write and one read of (T, F)
#     rope_store_kv    qkv               q, k, cache       rotation, quantising: a read of k and v
#     argmax           logits            one int a row
#
# Why: fp32 in registers costs nothing here; only what crosses the memory bus has a narrow type.

@jit
def _rms_norm_kernel(x_ptr, res_ptr, w_ptr, y_ptr, stride_t, stride_h, eps, heads,
                     y_stride_t, y_stride_h, E: tl.constexpr, EP: tl.constexpr,
                     RESIDUAL: tl.constexpr):
    """One program, one row, read once. 4 E bytes in bf16, 12 E with a residual."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EP)
    ok = e < E
    x_row = x_ptr + row // heads * stride_t + row % heads * stride_h
    x = tl.load(x_row + e, mask=ok, other=0.0).to(tl.float32)
    if RESIDUAL:
        x += tl.load(res_ptr + row * E + e, mask=ok, other=0.0)
        tl.store(res_ptr + row * E + e, x, mask=ok)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / E + eps)
    w = tl.load(w_ptr + e, mask=ok, other=0.0).to(tl.float32)
    y_row = y_ptr + row // heads * y_stride_t + row % heads * y_stride_h
    tl.store(y_row + e, (y * w).to(y_ptr.dtype.element_ty), mask=ok)

def _rms_norm_triton(x, weight, eps, residual=None, out=None):
    E = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    stride_h = lambda x: x.stride(1) if heads > 1 else 0
    launch(_rms_norm_kernel, (x.numel() // E,), x, residual, weight, y, x.stride(0), stride_h(x),
           eps, heads, y.stride(0), stride_h(y), E=E, EP=pow2(E),
           RESIDUAL=residual is not None, **hardware(min(8, max(1, pow2(E) // 512))))
    return y

@jit
def _silu_mul_kernel(x_ptr, y_ptr, F: tl.constexpr, BF: tl.constexpr):
    """One program, one piece of BF columns of one row: 6 BF bytes in bf16."""
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    ok = f < F
    gate = tl.load(x_ptr + row * 2 * F + f, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * F + F + f, mask=ok, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp2(-gate * LOG2E)) * up
    tl.store(y_ptr + row * F + f, y.to(y_ptr.dtype.element_ty), mask=ok)

def _silu_mul_triton(gate_up):
    T, F2 = gate_up.shape
    y = torch.empty(T, F2 // 2, dtype=gate_up.dtype, device=gate_up.device)
    BF = min(1024, pow2(F2 // 2))
    launch(_silu_mul_kernel, (T, -(-F2 // 2 // BF)), gate_up, y, F=F2 // 2, BF=BF, **hardware(4))
    return y

@jit
def _to_cache(x, amax, factor, KV: tl.constexpr, TOP: tl.constexpr):
    """fp32 values in the number format of the cache, not yet in its type: (codes, int8 step)."""
    if KV == "fp8":
        return tl.clamp(x / factor, -TOP, TOP), amax
    elif KV == "e4m3_bits":             # as fp16 of x / 256, the 7 low bits rounded half to even
        half = (tl.clamp(x / factor, -TOP, TOP) / 256.0).to(tl.float16)
        bits = half.to(tl.int16, bitcast=True).to(tl.int32)
        size = bits & 0x7FFF
        return ((bits >> 8) & 0x80) | ((size + 0x3F + ((size >> 7) & 1)) >> 7), amax
    elif KV == "int8":
        step = tl.maximum(amax / 127.0, 1e-8)
        x = x / step
        return (x + 12582912.0) - 12582912.0, step     # 1.5 * 2^23: rounds half to even, in fp32
    else:
        return x, amax

@jit
def _rope_store_kv_kernel(
        qkv_ptr, cos_sin_ptr, pos_ptr, slot_ptr, k_ptr, v_ptr, k_step_ptr, v_step_ptr, k_scale,
        v_scale, H: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, ROT: tl.constexpr,
        HALF: tl.constexpr, REST: tl.constexpr, DP: tl.constexpr, INTERLEAVED: tl.constexpr,
        KV: tl.constexpr, TOP: tl.constexpr):
    """One program, one head of one token: a query head, or a key head together with its value head.

        head:  | a: ROT/2 | b: ROT/2 | rest |      a' = a cos - b sin     b' = b cos + a sin
    The thread that holds a_i holds b_i too, so the rotation in place has no race."""
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    row = qkv_ptr + t * ((H + 2 * KH) * D)
    c = tl.arange(0, HALF)                     # HALF: power of two >= ROT / 2
    ok = c < ROT // 2
    at_a = 2 * c if INTERLEAVED else c
    at_b = 2 * c + 1 if INTERLEAVED else c + ROT // 2
    pos = tl.load(pos_ptr + t).to(tl.int64)
    cos = tl.load(cos_sin_ptr + pos * ROT + c, mask=ok, other=0.0)
    sin = tl.load(cos_sin_ptr + pos * ROT + ROT // 2 + c, mask=ok, other=0.0)
    a0 = tl.load(row + h * D + at_a, mask=ok, other=0.0).to(tl.float32)
    b0 = tl.load(row + h * D + at_b, mask=ok, other=0.0).to(tl.float32)
    a = (a0 * cos - b0 * sin).to(qkv_ptr.dtype.element_ty)
    b = (b0 * cos + a0 * sin).to(qkv_ptr.dtype.element_ty)
    tl.store(row + h * D + at_a, a, mask=ok)
    tl.store(row + h * D + at_b, b, mask=ok)
    slot = tl.load(slot_ptr + t)
    if (h >= H) & (slot >= 0):
        d = tl.arange(0, DP)
        rest_at = ROT + tl.arange(0, REST)
        v = tl.load(row + (h + KH) * D + d, mask=d < D, other=0.0).to(tl.float32)
        rest = tl.load(row + h * D + rest_at, mask=rest_at < D, other=0.0).to(tl.float32)
        k_a, k_b = a.to(tl.float32), b.to(tl.float32)     # rounded as in q k^T
        k_max = tl.max(tl.maximum(tl.maximum(tl.abs(k_a), tl.abs(k_b)), tl.max(tl.abs(rest), 0)), 0)
        a_code, k_step = _to_cache(k_a, k_max, k_scale, KV, TOP)
        b_code, k_step = _to_cache(k_b, k_max, k_scale, KV, TOP)
        rest_code, k_step = _to_cache(rest, k_max, k_scale, KV, TOP)
        v_code, v_step = _to_cache(v, tl.max(tl.abs(v), 0), v_scale, KV, TOP)
        at = slot * KH + h - H                        # slot is int64: offsets pass 2^31 elements
        ty: tl.constexpr = k_ptr.dtype.element_ty
        tl.store(k_ptr + at * D + at_a, a_code.to(ty), mask=ok)
        tl.store(k_ptr + at * D + at_b, b_code.to(ty), mask=ok)
        tl.store(k_ptr + at * D + rest_at, rest_code.to(ty), mask=rest_at < D)
        tl.store(v_ptr + at * D + d, v_code.to(ty), mask=d < D)
        if KV == "int8":
            tl.store(k_step_ptr + at, k_step)
            tl.store(v_step_ptr + at, v_step)

def _rope_store_kv_triton(qkv, cos_sin, positions, kv, slot_mapping, H, KH, D, interleaved=False):
    rot = cos_sin.shape[1]
    data, fmt, _ = cache_format(kv)
    launch(_rope_store_kv_kernel, (qkv.shape[0], H + KH), qkv, cos_sin, positions, slot_mapping,
           *data, *(kv.scales if fmt == "int8" else (None, None)), kv.k_scale, kv.v_scale, H=H,
           KH=KH, D=D, ROT=rot, HALF=pow2(max(1, rot // 2)), REST=pow2(max(1, D - rot)),
           DP=pow2(D), INTERLEAVED=interleaved, KV=fmt, TOP=FP8_MAX.get(kv.data.dtype, 0.0),
           **hardware(1))
    return qkv.view(-1, H + 2 * KH, D)[:, :H]

@jit
def _argmax_kernel(x_ptr, y_ptr, stride, V, BV: tl.constexpr):
    """One program, one row. A lane keeps its first maximum; the lowest index of all wins."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BV)
    best, where = tl.full((BV,), float("-inf"), tl.float32), lane
    for v in tl.range(0, V, BV):
        at = v + lane
        x = tl.load(x_ptr + row * stride + at, mask=at < V, other=float("-inf")).to(tl.float32)
        where = tl.where(x > best, at, where)
        best = tl.maximum(x, best)
    top = tl.max(best, 0)
    tl.store(y_ptr + row, tl.min(tl.where(best == top, where, V), 0).to(tl.int64))

def _argmax_triton(logits):
    S, V = logits.shape
    y = torch.empty(S, dtype=torch.int64, device=logits.device)
    launch(_argmax_kernel, (S,), logits, y, logits.stride(0), V, BV=min(4096, pow2(V)),
           **hardware(8, 3))
    return y


# ==================================================================================================
# 5  Flash attention
# ==================================================================================================
# Attention over n keys needs an n x n matrix of scores that is used once. Flash attention (Dao et
# al. 2022, 2023) never writes it: a tile of scores is made, used and forgotten in registers.
#
#              keys -->                      for each tile of keys, with scores s (rows x BN):
#     q tile  [ s0 ][ s1 ][ s2 ]                 m' = max(m, rowmax s)
#     (BM     stays in registers;                p  = exp(s - m')           alpha = exp(m - m')
#      rows)  k, v tiles stream by               l  = l alpha + rowsum p
#                                                A  = A alpha + p v
#                                            at the end:  o = A / l,  lse = m + log l
#
# alpha repairs what was summed under the old maximum; without it those terms weigh too much. One
# row is one query token and one head. The G heads that share a KV head are rows of one tile, so K
# and V are read once for all of them:  row r = token r // G, head r % G. Elements moved, one head
# of N tokens: plain attention 4 N^2 + 4 N D; here 2 N D + N, and 2 N D more per tile of queries.
#
# Invariant: hidden scores are -inf, and V of a hidden key is 0: 0 * NaN would be NaN.
# Invariant: a row that sees nothing has m = -inf; it is replaced by 0 before the subtraction, so
#   such a row is 0 and its lse -inf.
# Why: log2 inside. exp(x) is exp2(x log2 e) in hardware, so log2 e is folded into the scale once.
# Simplification: production kernels skip the mask on tiles below the diagonal, and overlap the
#   softmax of one tile with the products of the next by hand (FlashAttention-3).

@jit
def _scores(dot, cols, pos, row_ok, col_ok, scale, softcap, SOFTCAP: tl.constexpr,
            WINDOW: tl.constexpr):
    """Raw q.k -> log2 scores, hidden pairs at -inf, and d capped / d raw (1 with no softcap)."""
    slope = 1.0
    if SOFTCAP:
        t = 1.0 - 2.0 / (1.0 + tl.exp2(dot * (scale * (2.0 * LOG2E) / softcap)))      # tanh
        slope = 1.0 - t * t
        s = t * (softcap * LOG2E)
    else:
        s = dot * (scale * LOG2E)
    seen = (cols <= pos) & row_ok & col_ok
    if WINDOW > 0:
        seen = seen & (pos - cols < WINDOW)
    return tl.where(seen, s, float("-inf")), slope

@jit
def _softmax_step(s, m, l):
    """Fold one tile of log2 scores into the running maximum m and sum l: (p, alpha, m, l)."""
    m_new = tl.maximum(m, tl.max(s, 1))
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s - shift[:, None])
    alpha = tl.exp2(m - shift)
    return p, alpha, m_new, l * alpha + tl.sum(p, 1)

@jit
def _finish(acc, m, l):
    """Normalise: (o, lse in log2); rows that saw nothing give 0 and -inf."""
    some = tl.where(l == 0.0, 1.0, l)
    lse = tl.where(l == 0.0, float("-inf"), m + tl.log2(some))
    return acc / some[:, None], lse

@jit
def _bounds(start_q_ptr, start_k_ptr, seq):
    """First row in the packed queries and keys of sequence seq, and how many it has of each."""
    q0 = tl.load(start_q_ptr + seq)
    k0 = tl.load(start_k_ptr + seq)
    return q0, k0, tl.load(start_q_ptr + seq + 1) - q0, tl.load(start_k_ptr + seq + 1) - k0

@jit
def _flash_kernel(
        q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, start_q_ptr, start_k_ptr, scale, softcap,
        stride_q, stride_k, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
        BM: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
        TMA: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr):
    """Grid (query blocks, KV heads, sequences). Reads q once, K and V once per query block.
    TMA (Hopper): one thread asks the copy engine for a whole tile by coordinates; the others
    compute no addresses. At D 128 on sm_90 the loop has 529 instructions instead of 583.
    Simplification: no warp specialisation; whether it helps was not measured."""
    kvh = tl.program_id(1)
    q0, k0, q_len, k_len = _bounds(start_q_ptr, start_k_ptr, tl.program_id(2))
    BQ: tl.constexpr = BM // G                             # query tokens of a tile
    first = tl.program_id(0) * BQ
    if first >= q_len:
        return
    r, d = tl.arange(0, BM), tl.arange(0, DP)
    token = first + r // G
    row_ok = (r < BQ * G) & (token < q_len)
    at = (q0 + token).to(tl.int64) * stride_q + (kvh * G + r % G) * D
    rows = at[:, None] + d[None, :]
    mask = row_ok[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + rows, mask=mask, other=0.0)
    pos = k_len - q_len + token
    hi = tl.minimum(k_len, k_len - q_len + first + BQ)
    lo = tl.maximum(0, k_len - q_len + first - WINDOW + 1) // BN * BN if WINDOW > 0 else 0
    k_head = k_ptr + k0.to(tl.int64) * stride_k + kvh * D
    v_head = v_ptr + k0.to(tl.int64) * stride_k + kvh * D
    if TMA:                                                # rows past k_len arrive as zeros
        k_desc = tl.make_tensor_descriptor(k_head, [k_len, D], [stride_k, 1], [BN, DP])
        v_desc = tl.make_tensor_descriptor(v_head, [k_len, D], [stride_k, 1], [BN, DP])
    m, l = tl.full((BM,), float("-inf"), tl.float32), tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, DP), tl.float32)
    for n0 in tl.range(lo, hi, BN, num_stages=STAGES):
        n = n0 + tl.arange(0, BN)
        tile = n.to(tl.int64)[:, None] * stride_k + d[None, :]
        tile_ok = (n < k_len)[:, None] & (d < D)[None, :]
        k = k_desc.load([n0, 0]) if TMA else tl.load(k_head + tile, mask=tile_ok, other=0.0)
        dot = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        s, _ = _scores(dot, n[None, :], pos[:, None], row_ok[:, None], (n < k_len)[None, :],
                       scale, softcap, SOFTCAP, WINDOW)
        p, alpha, m, l = _softmax_step(s, m, l)
        v = v_desc.load([n0, 0]) if TMA else tl.load(v_head + tile, mask=tile_ok, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    o, lse = _finish(acc, m, l)
    tl.store(out_ptr + (q0 + token).to(tl.int64)[:, None] * (H * D) + (kvh * G + r % G)[:, None] * D
             + d[None, :], o.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + (q0 + token) * H + kvh * G + r % G, lse / LOG2E, mask=row_ok)

@jit
def _flash_delta_kernel(o_ptr, do_ptr, delta_ptr, rows, D: tl.constexpr, DP: tl.constexpr,
                        BM: tl.constexpr):
    """delta = rowsum(dO * O), fp32: what the softmax subtracts from dP. Reads O and dO once."""
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, DP)
    at = r.to(tl.int64)[:, None] * D + d[None, :]
    ok = (r < rows)[:, None] & (d < D)[None, :]
    o = tl.load(o_ptr + at, mask=ok, other=0.0).to(tl.float32)
    do = tl.load(do_ptr + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(delta_ptr + r, tl.sum(o * do, 1), mask=r < rows)

@jit
def _flash_dkdv_kernel(
        q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, start_q_ptr, start_k_ptr,
        scale, softcap, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
        BM: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
        STAGES: tl.constexpr, PRECISION: tl.constexpr):
    """Grid (key blocks, KV heads, sequences). One program owns one tile of dK and dV.

    P is recomputed from the saved lse, transposed (keys x queries), for each head of the group:
        P^T = exp(S^T - lse)      dV += P^T dO      dS = P (dP - delta)      dK += dS^T Q scale
    Reads K and V once, Q and dO once per key block of their sequence.
    Why: the owner of a tile sums it alone, in one order. No atomics, so the result is reproducible.
    """
    kvh = tl.program_id(1)
    q0, k0, q_len, k_len = _bounds(start_q_ptr, start_k_ptr, tl.program_id(2))
    n0 = tl.program_id(0) * BN
    if n0 >= k_len:
        return
    n = n0 + tl.arange(0, BN)
    d = tl.arange(0, DP)
    tile = (k0 + n).to(tl.int64)[:, None] * ((H // G) * D) + kvh * D + d[None, :]
    tile_ok = (n < k_len)[:, None] & (d < D)[None, :]
    k = tl.load(k_ptr + tile, mask=tile_ok, other=0.0)
    v = tl.load(v_ptr + tile, mask=tile_ok, other=0.0)
    dk, dv = tl.zeros((BN, DP), tl.float32), tl.zeros((BN, DP), tl.float32)
    lo = tl.maximum(0, n0 - (k_len - q_len)) // BM * BM    # the first query that sees key n0
    hi = tl.minimum(q_len, n0 + BN + WINDOW - 1 - (k_len - q_len)) if WINDOW > 0 else q_len
    for g in range(G):
        h = kvh * G + g
        for m0 in tl.range(lo, hi, BM, num_stages=STAGES):
            i = m0 + tl.arange(0, BM)
            i_ok = i < q_len
            row = (q0 + i).to(tl.int64) * H + h
            at = row[:, None] * D + d[None, :]
            at_ok = i_ok[:, None] & (d < D)[None, :]
            q = tl.load(q_ptr + at, mask=at_ok, other=0.0)
            do = tl.load(do_ptr + at, mask=at_ok, other=0.0)
            lse = tl.load(lse_ptr + row, mask=i_ok, other=0.0)
            lse = tl.where(lse == float("-inf"), 0.0, lse) * LOG2E
            delta = tl.load(delta_ptr + row, mask=i_ok, other=0.0)
            dot = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            s, slope = _scores(dot, n[:, None], (i + (k_len - q_len))[None, :], i_ok[None, :],
                               (n < k_len)[:, None], scale, softcap, SOFTCAP, WINDOW)
            p = tl.exp2(s - lse[None, :])
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
            dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
            ds = p * (dp - delta[None, :]) * slope
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    tl.store(dk_ptr + tile, (dk * scale).to(dk_ptr.dtype.element_ty), mask=tile_ok)
    tl.store(dv_ptr + tile, dv.to(dv_ptr.dtype.element_ty), mask=tile_ok)

@jit
def _flash_dq_kernel(
        q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, start_q_ptr, start_k_ptr, scale,
        softcap, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
        BM: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
        STAGES: tl.constexpr, PRECISION: tl.constexpr):
    """Grid (query blocks, query heads, sequences). One program owns one tile of dQ = dS K scale.
    Reads Q and dO once, K and V once per query block and head."""
    h = tl.program_id(1)
    q0, k0, q_len, k_len = _bounds(start_q_ptr, start_k_ptr, tl.program_id(2))
    m0 = tl.program_id(0) * BM
    if m0 >= q_len:
        return
    i = m0 + tl.arange(0, BM)
    d = tl.arange(0, DP)
    i_ok = i < q_len
    row = (q0 + i).to(tl.int64) * H + h
    at = row[:, None] * D + d[None, :]
    at_ok = i_ok[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + at, mask=at_ok, other=0.0)
    do = tl.load(do_ptr + at, mask=at_ok, other=0.0)
    lse = tl.load(lse_ptr + row, mask=i_ok, other=0.0)
    lse = tl.where(lse == float("-inf"), 0.0, lse) * LOG2E
    delta = tl.load(delta_ptr + row, mask=i_ok, other=0.0)
    pos = i + (k_len - q_len)
    hi = tl.minimum(k_len, m0 + BM + k_len - q_len)
    lo = tl.maximum(0, m0 + k_len - q_len - WINDOW + 1) // BN * BN if WINDOW > 0 else 0
    dq = tl.zeros((BM, DP), tl.float32)
    for n0 in tl.range(lo, hi, BN, num_stages=STAGES):
        n = n0 + tl.arange(0, BN)
        tile = (k0 + n).to(tl.int64)[:, None] * ((H // G) * D) + h // G * D + d[None, :]
        tile_ok = (n < k_len)[:, None] & (d < D)[None, :]
        k = tl.load(k_ptr + tile, mask=tile_ok, other=0.0)
        v = tl.load(v_ptr + tile, mask=tile_ok, other=0.0)
        dot = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        s, slope = _scores(dot, n[None, :], pos[:, None], i_ok[:, None], (n < k_len)[None, :],
                           scale, softcap, SOFTCAP, WINDOW)
        p = tl.exp2(s - lse[:, None])
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        ds = p * (dp - delta[:, None]) * slope
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    tl.store(dq_ptr + at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=at_ok)

def _flash_triton(q, k, v, start_q, start_k, max_q, scale, window=0, softcap=0.0):
    (T, H, D), KH = q.shape, k.shape[1]
    out, lse = torch.empty_like(q, memory_format=torch.contiguous_format), _fp32(q, T, H)
    tma = (arch() in TMA_ARCHS and q.dtype != torch.float32 and D == pow2(D)
           and k.stride(0) * k.element_size() % 16 == 0)
    if tma:                             # the descriptors are built in memory that Triton asks for
        room = lambda size, align, stream: torch.empty(size, dtype=torch.int8, device=q.device)
        triton.set_allocator(room)
    tile = tile_for("flash", D, q.dtype, H // KH)
    query_blocks = -(-max_q // (tile["BM"] // (H // KH)))
    launch(_flash_kernel, (query_blocks, KH, len(start_q) - 1), q, k, v, out, lse, start_q, start_k,
           scale, softcap, q.stride(0), k.stride(0), G=H // KH, TMA=tma, **tile,
           **head_shape(H, D, window, softcap))
    return out, lse

def _flash_backward_triton(do, q, k, v, out, lse, start_q, start_k, max_q, max_k, scale, window=0,
                           softcap=0.0):
    (T, H, D), KH, S = q.shape, k.shape[1], len(start_q) - 1
    shape = head_shape(H, D, window, softcap) | dict(G=H // KH)
    delta = _fp32(q, T, H)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    launch(_flash_delta_kernel, (-(-T * H // 64),), out, do, delta, T * H, D=D, DP=shape["DP"],
           BM=64, **hardware(4, 1, 255))
    tile = tile_for("flash_dkdv", D, q.dtype)
    launch(_flash_dkdv_kernel, (-(-max_k // tile["BN"]), KH, S), q, k, v, do, lse, delta, dk, dv,
           start_q, start_k, scale, softcap, **tile, **shape)
    tile = tile_for("flash_dq", D, q.dtype)
    launch(_flash_dq_kernel, (-(-max_q // tile["BM"]), H, S), q, k, v, do, lse, delta, dq, start_q,
           start_k, scale, softcap, **tile, **shape)
    return dq, dk, dv


# ==================================================================================================
# 6  Paged attention
# ==================================================================================================
# The flash kernel with two changes: keys are found through the block table, and a long context may
# be cut in pieces that run at the same time (flash decoding).
#
#     short sequences (at most SHORT_QUERY new tokens: decode, verification)
#         grid (S * PER, KH, pieces of SPLIT_TOKENS context tokens), PER query blocks each
#         piece c: (o_c, lse_c) in fp32   ->   merge: o = sum_c exp(lse_c - lse) o_c
#     long sequences (prefill, chunks)
#         grid (T // BQ + S, KH, 1); sequence s starts at query block start[s] // BQ + s
#
# A decode step of one sequence has KH programs without the cut and KH * n / 256 with it: 8 heads at
# 8,192 tokens give 256 programs for 132 multiprocessors instead of 8. Bytes: every K and V element
# of the context once, 2 n KH D; a piece adds 2 (D + 1) fp32 per row.
#
# Invariant: which launch serves a sequence, and where its context is cut, depend on that sequence
#   alone, so a decode step gives the same bits whatever else is in the batch.
# Invariant: a query block never spans two sequences; row r of it is token r // G, head r % G.
# Why: a captured graph keeps its grid. Capture with max_seq_len = the longest context: pieces past
#   the end of a sequence return at once, and padding rows (seq_len 0) give zeros.
# Why: two launches whenever a step has a long sequence, even if it has no short one: which it has
#   is known on the device only, and asking would make the host wait. Programs without work return.
# Why: block ids become int64 before they are multiplied: 2^31 elements are 4 GiB of bf16.
# Try: SPLIT_TOKENS = 1 << 20 (no cut) and `bench.py kernels` on a GPU: only "decode S 1" suffers.
# Simplification: long sequences are not cut, and the mask is computed on every tile.

@jit
def _find_sequence(start_ptr, block, num_seqs, BQ: tl.constexpr, GAP: tl.constexpr):
    """Last sequence s with start[s] // BQ + s * GAP <= block, by bisection."""
    lo, hi = 0, num_seqs
    while lo < hi:
        mid = (lo + hi) // 2
        if tl.load(start_ptr + mid) // BQ + mid * GAP <= block:
            lo = mid + 1
        else:
            hi = mid
    return lo - 1

@jit
def _load_kv(ptrs, mask, dtype: tl.constexpr, KV: tl.constexpr):
    """A tile of the cache in the dtype of q; e4m3 bits are moved into fp16 as value / 256."""
    x = tl.load(ptrs, mask=mask, other=0.0)
    if KV == "e4m3_bits":
        bits = x.to(tl.uint16)
        x = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return x.to(dtype)

@jit(do_not_specialize=["num_seqs", "stride_table"])
def _paged_kernel(
        q_ptr, k_ptr, v_ptr, k_step_ptr, v_step_ptr, out_ptr, lse_ptr, table_ptr, start_ptr,
        len_ptr, k_factor, v_factor, softcap, stride_q, stride_table, stride_piece, num_seqs,
        H: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BS: tl.constexpr,
        BM: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
        KV: tl.constexpr, SHORT: tl.constexpr, LIMIT: tl.constexpr, PER: tl.constexpr,
        SPLIT: tl.constexpr, PIECE: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr):
    """One program: a block of queries of one sequence, one KV head, one piece of the context.
    k_factor = softmax scale * scale of K; v_factor = scale of V. SPLIT: out and lse are partial,
    (pieces, T, H, D) and (pieces, T, H) fp32, lse in log2. SHORT: PER query blocks per sequence."""
    G: tl.constexpr = H // KH
    BQ: tl.constexpr = BM // G
    block, kvh, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if SHORT:
        seq = block // PER
        first = block % PER * BQ
    else:
        seq = _find_sequence(start_ptr, block, num_seqs, BQ, 1)
        first = (block - (tl.load(start_ptr + seq) // BQ + seq)) * BQ
    q0 = tl.load(start_ptr + seq)
    q_len = tl.load(start_ptr + seq + 1) - q0
    other = q_len > LIMIT if SHORT else q_len <= LIMIT
    if (first >= q_len) | other:
        return
    context = tl.load(len_ptr + seq) - q_len           # -1 for a padding row: it sees nothing
    end = context + tl.minimum(first + BQ, q_len)
    seen = tl.maximum(0, context + first - WINDOW + 1) if WINDOW > 0 else 0    # by the first row
    lo = seen // BN * BN
    if SPLIT:
        lo = tl.maximum(lo, piece * PIECE)
        end = tl.minimum(end, (piece + 1) * PIECE)
        if lo >= end:
            return
    r, d = tl.arange(0, BM), tl.arange(0, DP)
    token = first + r // G
    head = kvh * G + r % G
    row_ok = (r < BQ * G) & (token < q_len)
    mask = row_ok[:, None] & (d < D)[None, :]
    row = (q0 + token).to(tl.int64)
    q_at = row[:, None] * stride_q + (head * D)[:, None] + d[None, :]
    q = tl.load(q_ptr + q_at, mask=mask, other=0.0)
    table_row = table_ptr + seq.to(tl.int64) * stride_table
    m, l = tl.full((BM,), float("-inf"), tl.float32), tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, DP), tl.float32)
    for n0 in tl.range(lo, end, BN, num_stages=STAGES):
        n = n0 + tl.arange(0, BN)
        n_ok = (n >= seen) & (n < end) if WINDOW > 0 else n < end
        if BS % BN == 0:                               # the tile lies in one block: one table entry
            block_id = tl.load(table_row + n0 // BS)
        else:
            block_id = tl.load(table_row + n // BS, mask=n_ok, other=0)
        at = (block_id.to(tl.int64) * BS + n % BS) * KH + kvh
        tile = at[:, None] * D + d[None, :]
        tile_ok = n_ok[:, None] & (d < D)[None, :]
        k = _load_kv(k_ptr + tile, tile_ok, q.dtype, KV)
        dot = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if KV == "int8":
            dot = dot * tl.load(k_step_ptr + at, mask=n_ok, other=0.0)[None, :]
        s, _ = _scores(dot, n[None, :], (context + token)[:, None], row_ok[:, None], n_ok[None, :],
                       k_factor, softcap, SOFTCAP, WINDOW)
        p, alpha, m, l = _softmax_step(s, m, l)
        if KV == "int8":
            p = p * tl.load(v_step_ptr + at, mask=n_ok, other=0.0)[None, :]
        v = _load_kv(v_ptr + tile, tile_ok, q.dtype, KV)
        acc = tl.dot(p.to(q.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    o, lse = _finish(acc, m, l)
    out = out_ptr + piece.to(tl.int64) * stride_piece + (row * H + head)[:, None] * D + d[None, :]
    tl.store(out, (o * v_factor).to(out_ptr.dtype.element_ty), mask=mask)
    if lse_ptr is not None:
        at = piece.to(tl.int64) * (stride_piece // D) + row * H + head
        tl.store(lse_ptr + at, lse if SPLIT else lse / LOG2E, mask=row_ok)

@jit(do_not_specialize=["num_seqs"])
def _merge_pieces_kernel(
        part_ptr, part_lse_ptr, out_ptr, lse_ptr, start_ptr, len_ptr, stride_piece, num_seqs,
        H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, WINDOW: tl.constexpr,
        LIMIT: tl.constexpr, PIECE: tl.constexpr):
    """Grid (T, H): merge the pieces that this row saw, in order, as if each were one tile.

        m' = max(m, lse_c)    acc = acc 2^(m - m') + o_c 2^(lse_c - m')    l likewise with 1 for o_c
    One piece alone comes back bit for bit, so a context may pass from one piece to two unnoticed.
    """
    t, h = tl.program_id(0), tl.program_id(1)
    seq = _find_sequence(start_ptr, t, num_seqs, 1, 0)
    q0 = tl.load(start_ptr + seq)
    q_len = tl.load(start_ptr + seq + 1) - q0
    if q_len > LIMIT:
        return
    pos = tl.load(len_ptr + seq) - q_len + t - q0
    first = tl.maximum(0, pos - WINDOW + 1) // PIECE if WINDOW > 0 else 0
    d = tl.arange(0, DP)
    row = t.to(tl.int64) * H + h
    m, l, acc = float("-inf"), 0.0, tl.zeros((DP,), tl.float32)
    for piece in tl.range(first, tl.cdiv(pos + 1, PIECE)):
        base = piece * stride_piece.to(tl.int64)
        lse = tl.load(part_lse_ptr + base // D + row)
        part = tl.load(part_ptr + base + row * D + d, mask=d < D, other=0.0)
        m_new = tl.maximum(m, lse)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha, weight = tl.exp2(m - shift), tl.exp2(lse - shift)
        acc = acc * alpha + part * weight
        l = l * alpha + weight
        m = m_new
    some = tl.where(l == 0.0, 1.0, l)
    tl.store(out_ptr + row * D + d, (acc / some).to(out_ptr.dtype.element_ty), mask=d < D)
    if lse_ptr is not None:
        tl.store(lse_ptr + row, tl.where(l == 0.0, float("-inf"), (m + tl.log2(some)) / LOG2E))

def _paged_attention_triton(q, kv, meta, scale, window=0, softcap=0.0, lse=None):
    """Both launches of paged attention; see the essay above for which serves what."""
    (T, H, D), (BS, KH) = q.shape, kv.data.shape[2:4]
    S, G = len(meta.seq_lens), H // KH
    data, fmt, factor = cache_format(kv)
    k_scale, v_scale = (kv.k_scale, kv.v_scale) if kv.data.dtype in FP8_MAX else (1.0, 1.0)
    steps = kv.scales if fmt == "int8" else (None, None)
    out = torch.empty(T, H, D, dtype=q.dtype, device=q.device)
    shape = head_shape(H, D, window, softcap)

    def run(kind, grid_x, pieces, o, lse):
        tile = tile_for(kind, D, q.dtype, G)
        blocks = grid_x(tile["BM"] // G)
        launch(_paged_kernel, (blocks, KH, pieces), q, *data, *steps, o, lse, meta.block_table,
               meta.query_start_loc, meta.seq_lens, scale * factor * k_scale, factor * v_scale,
               softcap, q.stride(0), meta.block_table.stride(0), T * H * D, S, KH=KH, BS=BS,
               KV=fmt, SHORT=kind == "paged_short", LIMIT=SHORT_QUERY, PER=blocks // S,
               SPLIT=pieces > 1, PIECE=SPLIT_TOKENS, **tile, **shape)

    if meta.max_query_len > SHORT_QUERY:
        run("paged_long", lambda BQ: T // BQ + S, 1, out, lse)
    short_grid = lambda BQ: S * -(-min(SHORT_QUERY, meta.max_query_len) // BQ)
    pieces = -(-meta.max_seq_len // SPLIT_TOKENS)
    if pieces <= 1:
        run("paged_short", short_grid, 1, out, lse)
        return out
    part, part_lse = _fp32(q, pieces, T, H, D), _fp32(q, pieces, T, H)
    run("paged_short", short_grid, pieces, part, part_lse)
    launch(_merge_pieces_kernel, (T, H), part, part_lse, out, lse, meta.query_start_loc,
           meta.seq_lens, T * H * D, S, H=H, D=D, DP=shape["DP"], WINDOW=window,
           LIMIT=SHORT_QUERY, PIECE=SPLIT_TOKENS, **hardware(1))
    return out


# ==================================================================================================
# 7  Narrow weights
# ==================================================================================================
# A decode step reads every weight once for a handful of rows, so its time is the bytes of the
# weights: 4-bit codes are a quarter of bf16. They are widened in registers, at the matrix unit.
#
#     int8_matmul   w int8 (N, K), one scale per output row:        y = (x w^T) * s
#     int4_matmul   w 4-bit (K, N), scale, zero per group of k:  y = sum_g s_g * (x_g (q_g - z_g))
#     fp8_matmul    w e4m3 (N, K), one scale per 128 x 128 block:   y = sum_b s_b * (x_b w_b^T)
#
# int4 words are stored in the order in which a tile is unpacked, so that `(word >> 4 j) & 15` is
# already a tile of 16 x N, with no shuffle between threads:
#
#     one word, tile of 128 k:   nibble 7 ...  nibble 1   nibble 0       nibble j of word r is row
#                                k=112+r  ...  k=16+r     k=r            k = 16 j + r of its tile
#
# Why: scales multiply the fp32 sums and not the weights. The codes are exact in bf16, so nothing is
#   rounded before the product.
# Why: 0x4300 | code is the bf16 number 128 + code. An OR replaces the integer-to-float conversion,
#   of which a multiprocessor can do only 16 per clock.
# Simplification: no split along K for a few rows, and no repacking for the registers of one matrix
#   instruction (Marlin does both).
#
# prepare_weight lays a QuantizedWeight out for one of the three, if triton_form finds that it fits.
# What a product has no room for, minima and the scales of rows or inputs, becomes an exact step
# after it. Other weights stay as they are: their product expands them, slowly, in every step.

DEPTH = 128        # k per tile: int4 rows packed together, and the block of one fp8 scale

def pack_int4(codes):
    """4-bit codes (K, N) in 0..15 -> int32 words (ceil(K / 128) * 16, N); missing rows hold 0."""
    K, N = codes.shape
    padded = F.pad(codes.to(torch.int64), (0, 0, 0, -K % DEPTH))
    nibbles = padded.view(-1, 8, DEPTH // 8, N) << (4 * torch.arange(8, device=codes.device)
                                                        ).view(1, 8, 1, 1)
    words = nibbles.sum(1)                                       # (tiles, 16, N), up to 2^32 - 1
    return (words - ((words >> 31) << 32)).to(torch.int32).view(-1, N)

def unpack_int4(words, K):
    """The inverse of pack_int4: codes (K, N), int32."""
    tiles = words.view(-1, 1, DEPTH // 8, words.shape[1])
    shifts = (4 * torch.arange(8, device=words.device, dtype=torch.int32)).view(1, 8, 1, 1)
    return ((tiles >> shifts) & 15).view(-1, words.shape[1])[:K]

def by_rows(quantize):
    """The same function, some rows at a time: what is wide of a large matrix stays small."""
    @functools.wraps(quantize)
    def pieces(w, *args, **options):
        step = max(1, (1 << 20) // w.shape[1])
        parts = [quantize(w[n : n + step], *args, **options)
                 for n in range(0, max(1, len(w)), step)]
        return stack(parts)
    return pieces

@by_rows
def quantize_int8(w):
    """w (N, K) as int8 with one scale per row: the largest of a row becomes 127, halves go to even.
    With int8_inputs the result is what is called w8a8."""
    w = w.float()
    scales = (w.abs().amax(1, keepdim=True) / 127).clamp_min(1e-12)
    return QuantizedWeight(torch.round(w / scales).to(torch.int8), scales, w.shape[1])

@by_rows
def quantize_int4(w, group=32, symmetric=False):
    """w (N, K) in 4 bits with a scale per `group` columns, K a multiple of it; halves go to even.
    Symmetric: the number farthest from zero becomes -8, as in GGUF's Q4_0; its scale may be
    negative. Otherwise the smallest becomes -8 and the largest 7, and what 0 stands for is kept
    beside the scale. Both are numbers that bf16 holds: 16 bits each."""
    require(w.shape[1] % group == 0,
            f"int4: groups of {group} do not divide the {w.shape[1]} columns of a weight")
    short = lambda x: x.to(torch.bfloat16).float()
    w = w.float().unflatten(1, (-1, group))                                # (N, K / group, group)
    low, high = w.amin(2), w.amax(2)
    scales = torch.where(high > -low, high, low) / -8 if symmetric else (high - low) / 15
    scales = short(torch.where(scales.abs() < 1e-12, 1e-12, scales))
    mins = None if symmetric else short(low + 8 * scales)
    codes = (w if symmetric else w - mins[..., None]) / scales[..., None]
    return QuantizedWeight(codes.round().clamp(-8, 7).flatten(1).to(torch.int8), scales, group, 4,
                           mins)

@by_rows
def quantize_fp8(w):
    """w (N, K) as e4m3 with one scale per row: the largest of a row becomes 448, halves to even."""
    w = w.float()
    scales = (w.abs().amax(1, keepdim=True) / 448).clamp_min(1e-12)
    return QuantizedWeight((w / scales).to(torch.float8_e4m3fn), scales, w.shape[1])

def int8_matmul_ref(x, weight, scale, dtype=None):
    """x (T, K) times int8 weight (N, K), scale (N,) -> (T, N)."""
    return (x.float() @ weight.float().T * scale.float()).to(dtype or x.dtype)

def int4_matmul_ref(x, words, scales, zeros, group, dtype=None):
    """x (T, K) times packed 4-bit weight; scales, zeros (K / group, N); zeros None means 8."""
    codes = unpack_int4(words, x.shape[1]).float()
    zeros = torch.full_like(scales, 8.0, dtype=torch.float32) if zeros is None else zeros.float()
    spread = lambda table: table.float().repeat_interleave(group, 0)
    return (x.float() @ ((codes - spread(zeros)) * spread(scales))).to(dtype or x.dtype)

def fp8_matmul_ref(x, weight, scales, fp8_inputs=False, dtype=None):
    """x (T, K) times e4m3 weight (N, K), scales fp32 (ceil(N / 128), ceil(K / 128)) (DeepSeek-V3).
    fp8_inputs rounds x to e4m3 too, with one scale per row and 128 columns."""
    N, K = weight.shape
    wide = scales.repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)[:, :K]
    x32 = x.float()
    if fp8_inputs:
        blocks = F.pad(x32, (0, -K % 128)).unflatten(1, (-1, 128))              # (T, K / 128, 128)
        step = (blocks.abs().amax(-1, keepdim=True) / 448).clamp_min(1e-12)
        x32 = ((blocks / step).to(torch.float8_e4m3fn).float() * step).flatten(1)[:, :K]
    return (x32 @ (weight.float() * wide).T).to(dtype or x.dtype)

@jit(do_not_specialize=["T"])
def _int8_matmul_kernel(x_ptr, w_ptr, s_ptr, y_ptr, T, N, K, stride_x, BM: tl.constexpr,
                        BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
                        PRECISION: tl.constexpr):
    """Grid (N / BN, T / BM). Reads w once per BM rows of x: N K bytes for a decode batch."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    t = tl.program_id(1) * BM + tl.arange(0, BM)
    x_row = t.to(tl.int64)[:, None] * stride_x
    w_row = n.to(tl.int64)[:, None] * K
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        k = k0 + tl.arange(0, BK)
        x = tl.load(x_ptr + x_row + k[None, :], mask=(t < T)[:, None] & (k < K)[None, :], other=0.0)
        w = tl.load(w_ptr + w_row + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0)
        acc = tl.dot(x, tl.trans(w.to(x.dtype)), acc, input_precision=PRECISION)
    s = tl.load(s_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + t.to(tl.int64)[:, None] * N + n[None, :],
             (acc * s[None, :]).to(y_ptr.dtype.element_ty),
             mask=(t < T)[:, None] & (n < N)[None, :])

@jit
def _nibble(code, dtype: tl.constexpr):
    """An integer 0..15 plus BIAS (128 for bf16, 1024 for fp16, 0 for fp32), exactly."""
    if dtype == tl.bfloat16:
        return (code | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif dtype == tl.float16:
        return (code | 0x6400).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        return code.to(dtype)

@jit(do_not_specialize=["T"])
def _int4_matmul_kernel(x_ptr, w_ptr, s_ptr, z_ptr, y_ptr, T, N, K, stride_x, GROUP: tl.constexpr,
                        BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr,
                        STAGES: tl.constexpr, PRECISION: tl.constexpr):
    """Grid (N / BN, T / BM). One tile: BK / 8 words x BN; eight products of 16 rows of k each."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    t = tl.program_id(1) * BM + tl.arange(0, BM)
    KW: tl.constexpr = BK // 8
    r = tl.arange(0, KW)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x_row = x_ptr + t.to(tl.int64)[:, None] * stride_x
    acc = tl.zeros((BM, BN), tl.float32)
    for tile in tl.range(0, tl.cdiv(K, BK), num_stages=STAGES):
        words = tl.load(w_ptr + (tile * KW + r).to(tl.int64)[:, None] * N + n[None, :],
                        mask=(n < N)[None, :], other=0)
        for j in tl.static_range(8):
            k0 = tile * BK + j * KW
            k = k0 + r
            if (j * KW) % GROUP == 0:                      # a group of k, or the tile, starts
                at = k0 // GROUP * N + n
                ok = (n < N) & (k0 < K)
                s = tl.load(s_ptr + at, mask=ok, other=0.0).to(tl.float32)
                z = tl.full((BN,), 8.0 + BIAS, tl.float32)
                if z_ptr is not None:
                    z = tl.load(z_ptr + at, mask=ok, other=0).to(tl.float32) + BIAS
                part = tl.zeros((BM, BN), tl.float32)
            x = tl.load(x_row + k[None, :], mask=(t < T)[:, None] & (k < K)[None, :], other=0.0)
            code = _nibble((words >> (4 * j)) & 15, dtype) - z.to(dtype)[None, :]
            part = tl.dot(x, code, part, input_precision=PRECISION)
            if ((j + 1) * KW) % GROUP == 0 or j == 7:      # and ends
                acc += part * s[None, :]
    tl.store(y_ptr + t.to(tl.int64)[:, None] * N + n[None, :], acc.to(y_ptr.dtype.element_ty),
             mask=(t < T)[:, None] & (n < N)[None, :])

@jit(do_not_specialize=["T"])
def _fp8_matmul_kernel(x_ptr, w_ptr, s_ptr, y_ptr, T, N, K, stride_x, BM: tl.constexpr,
                       BN: tl.constexpr, BK: tl.constexpr, FP8_INPUTS: tl.constexpr,
                       BITS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr):
    """Grid (N / BN, T / BM); BK is the scale block, 128. BITS: e4m3 arrives as uint8 and is
    unpacked. FP8_INPUTS casts a tile of x in registers, so the cast moves no bytes; it is repeated
    for each column block, N / BN casts of T K elements against 2 T N K operations of the
    product."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    t = tl.program_id(1) * BM + tl.arange(0, BM)
    x_row = t.to(tl.int64)[:, None] * stride_x
    w_row = n.to(tl.int64)[:, None] * K
    s_row = tl.program_id(0) * BN // BK * tl.cdiv(K, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for tile in tl.range(0, tl.cdiv(K, BK), num_stages=STAGES):
        k = tile * BK + tl.arange(0, BK)
        x = tl.load(x_ptr + x_row + k[None, :], mask=(t < T)[:, None] & (k < K)[None, :], other=0.0)
        w_ok = (n < N)[:, None] & (k < K)[None, :]
        s = tl.load(s_ptr + s_row + tile)
        if FP8_INPUTS:
            w = tl.load(w_ptr + w_row + k[None, :], mask=w_ok, other=0.0)
            step = tl.maximum(tl.max(tl.abs(x.to(tl.float32)), 1) / 448.0, 1e-12)
            x8 = (x.to(tl.float32) / step[:, None]).to(w.dtype)
            acc += tl.dot(x8, tl.trans(w)) * (step * s)[:, None]
        else:
            fmt: tl.constexpr = "e4m3_bits" if BITS else "plain"
            w = _load_kv(w_ptr + w_row + k[None, :], w_ok, x.dtype, fmt)
            dot = tl.dot(x, tl.trans(w), input_precision=PRECISION)
            acc += dot * (s * 256.0 if BITS else s)
    tl.store(y_ptr + t.to(tl.int64)[:, None] * N + n[None, :], acc.to(y_ptr.dtype.element_ty),
             mask=(t < T)[:, None] & (n < N)[None, :])

def _matmul_triton(kernel, name, x, N, dtype, *args, **meta):
    """Launch one of the three products, tiles by the number of rows: y (T, N)."""
    T, K = x.shape
    tile = tile_for(name, T, x.dtype)
    y = torch.empty(T, N, dtype=dtype or x.dtype, device=x.device)
    launch(kernel, (-(-N // tile["BN"]), -(-T // tile["BM"])), x, *args, y, T, N, K, x.stride(0),
           BK=DEPTH, **tile, **meta)
    return y

def _int8_matmul_triton(x, weight, scale, dtype=None):
    return _matmul_triton(_int8_matmul_kernel, "int8_matmul", x, len(weight), dtype, weight, scale)

def _int4_matmul_triton(x, words, scales, zeros, group, dtype=None):
    bias = {torch.bfloat16: 128.0, torch.float16: 1024.0}.get(x.dtype, 0.0)
    return _matmul_triton(_int4_matmul_kernel, "int4_matmul", x, words.shape[1], dtype, words,
                          scales, zeros, GROUP=group, BIAS=bias)

def _fp8_matmul_triton(x, weight, scales, fp8_inputs=False, dtype=None):
    bits = arch() not in NATIVE_FP8
    require(not (bits and fp8_inputs), f"fp8 inputs need a GPU with fp8 units, not {arch()}")
    weight = weight.view(torch.uint8) if bits else weight
    return _matmul_triton(_fp8_matmul_kernel, "fp8_matmul", x, len(weight), dtype, weight, scales,
                          BITS=bits, FP8_INPUTS=fp8_inputs)

def int4_fits(K, group):
    """Can int4_matmul take groups of this many of K columns?"""
    return K % group == 0 and group >= 16 and (group % DEPTH == 0 or DEPTH % group == 0)

def triton_form(weight):
    """Which product multiplies a QuantizedWeight: "int4", "int8", "w8a8" (int8 with rounded inputs)
    or "fp8"; None where no product can, and the reference has to.
    4 bits: groups that int4_matmul takes, any minima. int8: one scale per row, no minima. e4m3: one
    scale per row, or one per 128 x 128 block, which the rows of a block repeat."""
    (_, K), group, kind = weight.shape, weight.group, weight.codes.dtype
    if weight.bits == 4 and not weight.int8_inputs:
        return "int4" if int4_fits(K, group) else None
    if kind == torch.int8 and group >= K and weight.mins is None:
        return "w8a8" if weight.int8_inputs else "int8"
    if kind != torch.float8_e4m3fn or weight.mins is not None or weight.int8_inputs:
        return None
    repeated = weight.scales[::DEPTH].repeat_interleave(DEPTH, 0)[: len(weight.scales)]
    blocks = group == DEPTH and torch.equal(repeated, weight.scales)
    return "fp8" if group >= K or blocks else None

def pack_triton(weight, form):
    """A QuantizedWeight as a TritonWeight of the form that triton_form found for it. 4-bit codes
    count as signed, which the minima make up for: they vanish if 8 was what stood for 0."""
    (N, K), codes, (half, mins) = weight.shape, weight.codes, weight.signed()
    scales, rows = weight.scales.float(), None
    if form == "int4":
        mins = mins if mins is not None and mins.any() else None
        step = max(1, (1 << 24) // K)          # the wide copies stay small
        codes = torch.cat([pack_int4((codes[n : n + step] + (8 - half)).T)
                           for n in range(0, N, step)], 1)
        scales = scales.T.contiguous()
        short = scales.to(torch.bfloat16)
        scales = short if torch.equal(short.float(), scales) else scales
    elif form == "fp8" and weight.group < K:
        scales = scales[::DEPTH].contiguous()
    elif form == "fp8":
        rows, scales = scales[:, 0], scales.new_ones(-(-N // DEPTH), -(-K // DEPTH))
    else:
        scales = scales[:, 0].contiguous()
    return TritonWeight(codes.contiguous(), scales, rows, mins, weight.inputs, (N, K),
                        weight.group, form)

def linear_triton(x, weight, bias=None):
    """x (T, K) times a TritonWeight, plus bias (N,) -> (T, N) fp32."""
    x, wide = x if weight.inputs is None else x[:, weight.inputs], torch.float32
    x = x if x.stride(1) == 1 else x.contiguous()
    if weight.form == "int4":
        y = int4_matmul(x, weight.codes, weight.scales, None, weight.group, wide)
        if weight.mins is not None:            # (T, groups) times (N, groups): small
            y += x.float().unflatten(1, (-1, weight.group)).sum(2) @ weight.mins.T
    elif weight.form == "fp8":
        y = fp8_matmul(x, weight.codes, weight.scales, False, wide)
        y = y if weight.rows is None else y * weight.rows
    elif weight.form == "w8a8":                # bf16 holds the codes of the inputs exactly
        rounded = quantize_int8(x)
        y = int8_matmul(rounded.codes.to(torch.bfloat16), weight.codes, weight.scales, wide)
        y *= rounded.scales
    else:
        y = int8_matmul(x, weight.codes, weight.scales, wide)
    return y if bias is None else y + bias.float()

def unpack_triton(weight, ids):
    """Rows ids (T,) of a TritonWeight as a QuantizedWeight; the inverse of pack_triton."""
    K, group, mins = weight.shape[1], weight.group, weight.mins
    if weight.form == "int4":
        codes = (unpack_int4(weight.codes[:, ids], K).T - 8).to(torch.int8)
        return QuantizedWeight(codes, weight.scales[:, ids].T.float(), group, 4,
                               None if mins is None else mins[ids], weight.inputs)
    blocks = weight.form == "fp8" and weight.rows is None
    scales = weight.scales if weight.rows is None else weight.rows
    codes = as_bytes(weight.codes)[ids].view(weight.codes.dtype)
    return QuantizedWeight(codes, scales[ids // DEPTH] if blocks else scales[ids, None], group,
                           inputs=weight.inputs, int8_inputs=weight.form == "w8a8")


# ==================================================================================================
# 8  The CPU members, in C
# ==================================================================================================
# A decode step on a CPU is two hundred small operators, and a general library spends more time in
# starting them than in reading memory. One C file, kernels.c, holds the whole set. The system's own
# compiler builds it at first use, ctypes loads it; without a compiler the references run instead.
#
#     wrapper --pack--> Op {kind, pointers, sizes} --run--> thread 0: tickets 0, 2, 3, 5 ..
#                                                           thread 1: tickets 1, 4 ..   (woke late)
#
# Every matrix product in it (q k^T, p v, the linear layers) is one inner loop, `tile`: up to 8 rows
# times a *packed panel*, 32 columns laid out in the order in which the loop reads them. A CPU with
# a matrix unit (AMX) multiplies bf16 and int8 by it instead, from the same panels.
#
# Invariant: the bits of a row depend on that row alone, not on batch, chunking or thread count.
#   Sums run in an order fixed by position: 16 lanes, pairs of k, chunks of 128 tokens.
# Invariant: what a token must not see is never read as a number; zeros stand in its place.
# Why: not -ffast-math, which reorders sums as it likes and assumes that NaN does not exist. The
#   lanes are written out instead, and the loops are as fast.
# Why: one thread for small work. With OMP_WAIT_POLICY=passive, which a shared machine needs, waking
#   another takes 50 us; a norm of one row takes 1.
# Simplification: one source for every CPU, with intrinsics only where gcc 12 was measured to miss
#   the instruction; production engines pick one of many kernels per shape and CPU.
# Try: NANOSERVE_NO_C=1, and compare tokens per second.

C_SOURCE = pathlib.Path(__file__).with_name("kernels.c").read_text(encoding="utf-8")
C_FLAGS = ["-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math",
           "-fopenmp", "-fPIC", "-Wno-psabi"]
if platform.machine() in ("x86_64", "AMD64"):
    C_FLAGS.append("-mprefer-vector-width=512")     # gcc prefers 256 bits on CPUs that have 512

@functools.lru_cache(maxsize=1)
def c_library():
    """(the compiled library, None), or (None, one sentence saying why there is none); never raises.
    $CC names the compiler, cc by default; NANOSERVE_NO_C=1 turns all of this off. The file is kept
    in $XDG_CACHE_HOME/nanoserve or ~/.cache/nanoserve under a hash of the source, the flags and the
    compiler's predefined macros: these name its version and every instruction set of this CPU."""
    if os.environ.get("NANOSERVE_NO_C") == "1":
        return None, "NANOSERVE_NO_C=1 is set"
    try:
        cc = shlex.split(os.environ.get("CC") or "cc")
        macros = _compiler(cc, "-dM", "-E", "-x", "c", os.devnull)
        key = hashlib.sha256(repr((C_SOURCE, C_FLAGS, macros)).encode()).hexdigest()[:16]
        cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        file = cache / "nanoserve" / f"{key}.so"
        if not (file.exists() and file.read_bytes().endswith(key.encode())):
            _build(cc, file)
        lib = ctypes.CDLL(str(file))
        lib.run.argtypes, lib.run.restype = [ctypes.c_char_p, *[ctypes.c_long] * 3], None
        return lib, None
    except subprocess.CalledProcessError as e:
        lines = e.stderr.decode(errors="replace").strip().splitlines()
        return None, f"the C compiler {cc[0]!r} failed: {lines[0] if lines else e.returncode}"
    except Exception as e:      # a folder, a linker, an ABI: whatever it is, the references can run
        return None, f"no C library could be built: {e}"

def _compiler(cc, *args):
    return subprocess.run([*cc, *C_FLAGS, *args], capture_output=True, check=True).stdout

def _build(cc, file):
    """Compile under a name of its own, then rename: another process sees the whole file or none.
    Its last bytes are its name: a file that a full disk cut short would crash the program. The
    operators for fp32 and those for bf16 are compiled at the same time: 4 s instead of 7."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        source, fp32, bf16, built = (
            pathlib.Path(folder, name) for name in ("kernels.c", "fp32.o", "bf16.o", "kernels.so"))
        source.write_text(C_SOURCE)
        build = lambda bf, out: _compiler(cc, f"-DBF={bf}", "-c", source, "-o", out)
        with ThreadPoolExecutor() as pool:
            list(pool.map(build, (0, 1), (fp32, bf16)))     # raises what a build raised
        _compiler(cc, "-shared", fp32, bf16, "-o", built, "-lm")
        with open(built, "ab") as end:
            end.write(file.stem.encode())
        os.replace(built, file)

def _operator(kind, pointers, numbers, floats=0):
    """A function f(bf, rows, *pointers, *numbers, *floats) that runs an operator of the C library,
    or adds it to the recording. It packs the struct Op; what a kind does not use stays zero.
    Packing bytes takes 0.5 us, ctypes with twenty arguments several times as long, and a decode
    step makes two hundred of these."""
    pack = struct.Struct(f"3q{pointers}q{64 - 8 * pointers}x{numbers}q{120 - 8 * numbers}x"
                         f"{floats}d{32 - 8 * floats}x").pack
    def call(*values):
        op = pack(kind, *values)
        if RECORDING:
            RECORDING.ops.append(op)
        else:
            c_library()[0].run(op, 1, -1, -1)
    return call

_run_norm, _run_silu, _run_rope = _operator(0, 4, 5, 1), _operator(1, 2, 2), _operator(2, 6, 13, 2)
_run_argmax, _run_embed = _operator(3, 2, 2), _operator(4, 8, 8)
_run_attention, _run_linear = _operator(5, 7, 12, 3), _operator(6, 4, 6)
_RUN_NARROW = {form: _operator(7 + i, 7, 8)
               for i, form in enumerate(("int4", "int8", "fp8", "w8a8"))}
_BF16 = torch.bfloat16

def empty(shape, dtype, device="cpu"):
    """A tensor to write a result to; while a step is recorded, a place in the recording."""
    if RECORDING:
        return RECORDING.empty(shape, dtype)
    return torch.empty(shape, dtype=dtype, device=device)

def _address(tensor):
    return 0 if tensor is None else tensor.data_ptr()

_CACHE = {dtype: number for number, dtype in enumerate(KV_DTYPES.values())}

def c_cache(dtype, kv_dtype):
    """Do the C members work on such a cache with activations of this type? It must be no wider."""
    return dtype in C_DTYPES and kv_dtype in _CACHE and kv_dtype.itemsize <= dtype.itemsize

def _cache_scales(kv):
    """(address of an int8 cache's scales or 0, scale of the keys, of the values)"""
    if kv.data.dtype in FP8_MAX:
        return 0, kv.k_scale, kv.v_scale
    return _address(kv.scales), 1.0, 1.0

def rms_norm_c(x, weight, eps, residual=None, out=None):
    """See rms_norm; x fp32 or bf16."""
    inner, E = (1, x.shape[1]) if x.ndim == 2 else x.shape[1:]
    if x.stride(-1) != 1 or (inner > 1 and x.stride(1) != E):
        x = x.contiguous()
    if weight.dtype is not _BF16 and weight.dtype is not torch.float32:
        weight = weight.float()
    out = empty(x.shape, x.dtype) if out is None else out
    _run_norm(x.dtype is _BF16, len(x), x.data_ptr(), weight.data_ptr(), _address(residual),
              out.data_ptr(), inner, E, x.stride(0), out.stride(0), weight.dtype is _BF16, eps)
    return out

def silu_mul_c(gate_up):
    """See silu_mul; gate_up fp32 or bf16."""
    T, F = gate_up.shape[0], gate_up.shape[1] // 2
    out = empty((T, F), gate_up.dtype)
    _run_silu(gate_up.dtype is _BF16, T, gate_up.data_ptr(), out.data_ptr(), F, gate_up.stride(0))
    return out

def rope_store_kv_c(qkv, cos_sin, positions, kv, slot_mapping, H, KH, D, interleaved=False):
    """See rope_store_kv; qkv fp32 or bf16, a cache no wider."""
    T, data, (scales, k_scale, v_scale) = len(qkv), kv.data, _cache_scales(kv)
    require(qkv.stride(1) == data.stride(4) == 1 and c_cache(qkv.dtype, data.dtype),
            "rope_store_kv: the C member cannot store", qkv, "in", data)
    _run_rope(qkv.dtype is _BF16, T, qkv.data_ptr(), cos_sin.data_ptr(),
              positions.data_ptr(), slot_mapping.data_ptr(), data.data_ptr(), scales,
              *data.stride()[:4], data.shape[2], positions.dtype is torch.int64, H, KH, D,
              qkv.stride(0), cos_sin.shape[1], interleaved, _CACHE[data.dtype], k_scale, v_scale)
    return qkv[:, :H * D].unflatten(1, (H, D))

def argmax_c(logits):
    """See argmax; logits fp32 or bf16. NaN is ignored."""
    S, V = logits.shape
    out = empty((S,), torch.int64)
    _run_argmax(logits.dtype is _BF16, S, logits.data_ptr(), out.data_ptr(), V, logits.stride(0))
    return out

def attention_c(q, kv, meta, scale, window=0, softcap=0.0):
    """q (T, H, D) over the paged cache -> (T, H, D). Query fp32 or bf16, a cache no wider, heads
    of q contiguous. Prompts, chunks and decode rows in one call; any width, group, block size."""
    (T, H, D), data, table, S = q.shape, kv.data, meta.block_table, meta.seq_lens.shape[0]
    require(c_cache(q.dtype, data.dtype) and data.stride(4) == 1,
            "attention: the C member cannot read", data, "for", q)
    out = empty((T, H, D), q.dtype)
    KH, (scales, k_scale, v_scale) = data.shape[3], _cache_scales(kv)
    _run_attention(q.dtype is _BF16, S, q.data_ptr(), out.data_ptr(), data.data_ptr(),
                   meta.query_start_loc.data_ptr(), meta.seq_lens.data_ptr(), table.data_ptr(),
                   scales, *data.stride()[:4], data.shape[2], table.stride(0), H, KH, D,
                   q.stride(0), window, _CACHE[data.dtype], scale * k_scale, softcap, v_scale)
    return out

def pack_linear(weight):
    """weight (N, K) -> bf16 panels (N/32, K/2, 32, 2) for linear_c, N padded with zeros; K even.
    A panel is 32 output columns, k by k and two k at a time, in the order in which the inner loop
    reads them. As many bytes as the weight itself, which is no longer needed."""
    N, K = weight.shape
    require(K % 2 == 0, f"pack_linear: the input width must be even, not {K}")
    padded = F.pad(weight.to(_BF16), (0, 0, 0, -N % 32))
    return padded.view(-1, 32, K // 2, 2).transpose(1, 2).contiguous()

def linear_c(x, packed, N, K, bias=None, dtype=None, out=None, gated=False):
    """x (T, K) times the weight (N, K) that pack_linear packed, plus bias (N,) -> (T, N).
    x and bias bf16, out bf16 or, with dtype, fp32; or all three fp32, which costs two products.
    gated: silu_mul of that, (T, N / 2); N a multiple of 64."""
    x, columns = x if x.stride(1) == 1 else x.contiguous(), N // 2 if gated else N
    out = empty((len(x), columns), dtype or x.dtype) if out is None else out
    require(x.shape[1] == K and packed.shape[:2] == (-(-N // 32), K // 2), "linear: x", x, "weight",
            (N, K), "as", packed)
    _run_linear(x.dtype is _BF16, len(x), x.data_ptr(), packed.data_ptr(),
                _address(bias), out.data_ptr(), columns, K, x.stride(0), out.stride(0),
                out.dtype is _BF16, gated)
    return out

def narrow_form(weight):
    """How linear_narrow_c reads a QuantizedWeight: a key of _RUN_NARROW, or ValueError saying why
    it cannot."""
    K, group, fp8 = weight.codes.shape[1], weight.group, weight.codes.dtype in FP8_MAX
    require(weight.codes.dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn),
            f"codes of type {weight.codes.dtype} are not supported")
    require(group >= K or group % 128 == 0 or (group % 8 == 0 and group <= 128),
            f"a group of {group} columns is neither a multiple of 128 nor up to 128 and one of 8")
    if weight.int8_inputs:
        return "w8a8"
    return "fp8" if fp8 else f"int{weight.bits}"

def _pack_words(codes, form):
    """Signed codes (N, K) uint8 -> the words of pack_codes."""
    codes = F.pad(codes, (0, -codes.shape[1] % 8, 0, -len(codes) % 64))
    if form == "int4":      # a byte holds codes k and k + 2
        codes = codes.unflatten(1, (-1, 2, 2, 2)) & 15                 # (N, K / 8, 2, 2, 2)
        codes = codes[:, :, :, 0] | codes[:, :, :, 1] << 4             # (N, K / 8, 2, 2)
    else:
        codes = codes.unflatten(1, (-1, 2, 2))
    panels = codes.transpose(2, 3).reshape(len(codes) // 64, 64, -1, 4)
    return panels.transpose(1, 2).contiguous()

def pack_codes(weight):
    """QuantizedWeight -> (words, scales, mins) as kernels.c describes them: panels of 64 rows, N
    padded with zeros, K to a multiple of 8. Unsigned codes become signed, which the minima make up
    for. Scales and minima in bf16 if it holds all of them exactly."""
    (N, K), form, codes = weight.shape, narrow_form(weight), weight.codes
    half, mins = weight.signed()
    step = 64 * max(1, (1 << 14) // K)          # a million at a time: the copies stay small
    words = torch.cat([_pack_words(codes[n : n + step].view(torch.uint8) - half, form)
                       for n in range(0, N, step)])
    tables = [None if t is None else F.pad(t, (0, 0, 0, -N % 64)).unflatten(0, (-1, 64))
              .transpose(1, 2).contiguous() for t in (weight.scales.float(), mins)]
    short = [t if t is None else t.to(_BF16) for t in tables]
    if all(t is None or torch.equal(t, s.float()) for t, s in zip(tables, short)):
        tables = short
    return words, *tables

def unpack_codes(weight, ids):
    """Rows ids (T,) of a NarrowWeight as a QuantizedWeight; the inverse of pack_codes."""
    panel, row, (_, K) = ids // 64, ids % 64, weight.shape
    words = weight.words[panel, :, row].view(torch.uint8).unflatten(-1, (2, 2)).transpose(-2, -1)
    if weight.form == "int4":                                              # (T, K / 8, 2, 2)
        words = torch.stack([words & 15, words >> 4], -2)                  # (T, K / 8, 2, 2, 2)
        words = (words ^ 8) - 8                                            # the sign, in a byte
    kind = torch.float8_e4m3fn if weight.form == "fp8" else torch.int8
    codes = words.reshape(len(ids), -1)[:, :K].contiguous().view(kind)
    scales, mins = (None if t is None else t[panel, :, row].float()
                    for t in (weight.scales, weight.mins))
    bits = 4 if weight.form == "int4" else 8
    return QuantizedWeight(codes, scales, weight.group, bits, mins, weight.inputs,
                           weight.form == "w8a8")

def linear_narrow_c(x, weight, bias=None, dtype=None, out=None, gated=False):
    """x (T, K) times a NarrowWeight, plus bias (N,) -> (T, N) in dtype (default: x's). x and bias
    both fp32 or both bf16. Sums are fp32; x is rounded only if the weight asks for it. gated:
    silu_mul of that, (T, N / 2); N a multiple of 128."""
    x, (N, K) = x if x.stride(1) == 1 else x.contiguous(), weight.shape
    require(x.shape[1] == K and x.dtype in C_DTYPES, "linear: x", x, "weight", (N, K))
    columns = N // 2 if gated else N
    out = empty((len(x), columns), dtype or x.dtype) if out is None else out
    _RUN_NARROW[weight.form](
        x.dtype is _BF16, len(x), x.data_ptr(), weight.words.data_ptr(), weight.scales.data_ptr(),
        _address(weight.mins), _address(bias), _address(weight.inputs), out.data_ptr(), columns,
        K, x.stride(0), out.stride(0), out.dtype is _BF16, weight.group,
        weight.scales.dtype is _BF16, gated)
    return out

def embed_c(ids, weight, dtype):
    """See embed; dtype and a table that is not packed fp32 or bf16."""
    N, K = weight.shape
    x, residual = empty((len(ids), K), dtype), empty((len(ids), K), torch.float32)
    if isinstance(weight, NarrowWeight):
        form, data, group = [*_RUN_NARROW].index(weight.form), weight.words, weight.group
        scales, mins = weight.scales, weight.mins
    else:
        data, group, scales, mins = getattr(weight, "panels", weight), K, None, None
        form = -1 if data is not weight else -2 if data.dtype is _BF16 else -3
    _run_embed(dtype is _BF16, len(ids), ids.data_ptr(), data.data_ptr(), _address(scales),
               _address(mins), 0, 0, x.data_ptr(), residual.data_ptr(), N, K, 0, 0, 0, group,
               scales is not None and scales.dtype is _BF16, form)
    return x, residual


# ==================================================================================================
# 9  Wrappers
# ==================================================================================================
# One public function per operation. It refuses what the kernels cannot do, with the reason, then
# runs one member of the pair:
#
#     FORCE set           that member                       (tests)
#     tensor on a GPU     Triton
#     CPU, bf16 or fp32   C, when a compiler was found
#     otherwise           the reference
#
# Invariant: KERNELS[name].executed counts what ran, by member.

C_DTYPES = (torch.bfloat16, torch.float32)

@dataclass
class Kernel:
    """One operation and its members; a missing member is None."""
    ref: Callable
    triton: Callable | None = None
    c: Callable | None = None
    executed: Counter = field(default_factory=Counter)

def run_member(name, x, *args, c_fits=True):
    """Run operation `name` on (x, *args) with the member that fits tensor x, and count it."""
    kernel = KERNELS[name]
    member = FORCE or ("triton" if x.is_cuda else None)
    if member is None:
        native = kernel.c and c_fits and x.dtype in C_DTYPES and c_library()[0]
        member = "c" if native else "torch"
    fn = kernel.ref if member == "torch" else getattr(kernel, member)
    require(fn, f"{name}: no {member} member on this machine")
    kernel.executed[member] += 1
    return fn(x, *args)

def rms_norm(x, weight, eps, residual=None, out=None):
    """Norm of the last dimension of x, (T, E) or (T, heads, D), in x's dtype. With residual (same
    shape, fp32, contiguous): residual += x in place, and the norm of the sum is returned. Rows may
    be strided (q inside qkv), their elements not. out: where the result goes, for example x.
    Why: an fp32 stream. It adds up two contributions per layer; 60 roundings to bf16 decide near
      ties."""
    require(x.dim() in (2, 3) and x.stride(-1) == 1, "rms_norm: x", x, x.stride())
    require(weight.shape == x.shape[-1:], "rms_norm: weight", weight, "x", x)
    require(residual is None or residual.shape == x.shape and residual.dtype == torch.float32
            and residual.is_contiguous(), "rms_norm: residual", residual, "x", x)
    require(out is None or out.shape == x.shape and out.dtype == x.dtype
            and out.stride()[1:] == x.stride()[1:], "rms_norm: out", out, "x", x)
    return run_member("rms_norm", x, weight, eps, residual, out)

def silu_mul(gate_up):
    """gate_up (T, 2F), gate in the first half of each row -> silu(gate) * up, (T, F)."""
    require(gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0 and gate_up.is_contiguous(),
            "silu_mul: gate_up", gate_up, gate_up.stride())
    return run_member("silu_mul", gate_up)

def rope_store_kv(qkv, cos_sin, positions, kv, slot_mapping, H, KH, D, interleaved=False):
    """Rotate q and k of qkv (T, (H + 2 KH) D) in place, store k and v, return q (T, H, D).
    cos_sin (max_pos, rotary_dim) fp32, cosines then sines; a table of width 0 rotates nothing.
    positions int (T,); slot_mapping int64 (T,), -1 writes nowhere."""
    require(qkv.dim() == 2 and qkv.shape[1] == (H + 2 * KH) * D and qkv.is_contiguous(),
            "rope_store_kv: qkv", qkv, f"is not (T, ({H} + 2 * {KH}) * {D})")
    require(cos_sin.shape[1] % 2 == 0 and cos_sin.shape[1] <= D and cos_sin.dtype == torch.float32,
            "rope_store_kv: cos_sin", cos_sin)
    require(kv.data.shape[0] == 2 and kv.data.shape[3:] == (KH, D) and kv.data.is_contiguous(),
            "rope_store_kv: cache", kv.data, "is not (2, NB, BS, KH, D)")
    require((kv.scales is not None) == (kv.data.dtype == torch.int8),
            "rope_store_kv: scales come with an int8 cache and with no other")
    require(len(positions) == len(qkv) == len(slot_mapping) and slot_mapping.dtype == torch.int64,
            "rope_store_kv: one position and one int64 slot per token")
    return run_member("rope_store_kv", qkv, cos_sin, positions, kv, slot_mapping, H, KH, D,
                      interleaved, c_fits=c_cache(qkv.dtype, kv.data.dtype))

def argmax(logits):
    """Index of the largest of each row of logits (S, V), int64 (S,); the lowest index wins ties."""
    require(logits.dim() == 2 and logits.stride(-1) == 1, "argmax: logits", logits)
    return run_member("argmax", logits)

def check_packed(q, k, v, start_q, start_k):
    """What flash attention and its backward need."""
    require(q.dim() == k.dim() == 3 and k.shape == v.shape and q.shape[2] == k.shape[2]
            and q.shape[1] % k.shape[1] == 0 and q.dtype == k.dtype == v.dtype,
            "flash: q", q, "k", k, "v", v)
    require(q[0].is_contiguous() and k[0].is_contiguous() and k.stride() == v.stride(),
            "flash: heads must be contiguous, k and v strided alike")
    require(start_q.dtype == start_k.dtype == torch.int32 and start_q.shape == start_k.shape,
            "flash: starts must be int32 (S + 1,)")

def flash_attention(q, k, v, start_q, start_k, max_q, scale, window=0, softcap=0.0):
    """Causal attention of packed sequences without a cache: (o (T, H, D), lse (T, H) fp32).
    q (T, H, D), k and v (N, KH, D); start_q, start_k int32 (S + 1,) first rows; max_q the longest
    query. The last query of a sequence is aligned with its last key."""
    check_packed(q, k, v, start_q, start_k)
    return run_member("flash_attention", q, k, v, start_q, start_k, max_q, scale, window, softcap)

def flash_backward(do, q, k, v, out, lse, start_q, start_k, max_q, max_k, scale, window=0,
                   softcap=0.0):
    """(dq, dk, dv) from dO and what the forward saved, (o, lse) instead of the N x N matrix P."""
    check_packed(q, k, v, start_q, start_k)
    require(all(x.is_contiguous() for x in (do, q, k, v, out, lse)),
            "flash_backward: inputs must be contiguous")
    return run_member("flash_backward", do, q, k, v, out, lse, start_q, start_k, max_q, max_k,
                      scale, window, softcap)

def check_product(name, x, weight, K, dtype, scales, scales_shape):
    """What the products with narrow weights need: x (T, K), and a weight and scales that fit."""
    require(x.dim() == 2 and x.stride(1) == 1 and x.shape[1] == K and weight.dtype == dtype
            and weight.is_contiguous() and scales.shape == scales_shape,
            f"{name}: x", x, "weight", weight, "scales", scales)

def int8_matmul(x, weight, scale, dtype=None):
    """x (T, K) times int8 weight (N, K) with one scale per row (N,) -> (T, N) in dtype (default:
    x's; so for the other two)."""
    N, K = weight.shape
    check_product("int8_matmul", x, weight, K, torch.int8, scale, (N,))
    return run_member("int8_matmul", x, weight, scale, dtype)

def int4_matmul(x, words, scales, zeros, group, dtype=None):
    """x (T, K) times 4-bit weight packed by pack_int4 -> (T, N).
    scales, zeros (K / group, N); zeros integers, None means 8. group: at least 16, a divisor of K,
    and a multiple or divisor of 128."""
    K = x.shape[1]
    require(int4_fits(K, group) and len(words) == -(-K // DEPTH) * DEPTH // 8,
            f"int4_matmul: group {group} and words", words, f"do not fit K {K}")
    check_product("int4_matmul", x, words, K, torch.int32, scales, (K // group, words.shape[1]))
    return run_member("int4_matmul", x, words, scales, zeros, group, dtype)

def fp8_matmul(x, weight, scales, fp8_inputs=False, dtype=None):
    """x (T, K) times e4m3 weight (N, K), fp32 scales per 128 x 128 block -> (T, N).
    fp8_inputs rounds x to e4m3 as well and uses the fp8 matrix unit (sm_89 and later)."""
    N, K = weight.shape
    check_product("fp8_matmul", x, weight, K, torch.float8_e4m3fn, scales,
                  (-(-N // 128), -(-K // 128)))
    return run_member("fp8_matmul", x, weight, scales, fp8_inputs, dtype)

@dataclass
class PackedWeight:
    """A weight of shape (N, K) as the C member reads it, see pack_linear."""
    panels: torch.Tensor
    shape: tuple[int, int]

@dataclass
class NarrowWeight:
    """A quantized weight of shape (N, K) as the C member reads it, see pack_codes."""
    words: torch.Tensor
    scales: torch.Tensor
    mins: torch.Tensor | None
    inputs: torch.Tensor | None
    shape: tuple[int, int]
    group: int
    form: str

@dataclass
class TritonWeight:
    """A quantized weight of shape (N, K) as a product of section 7 reads it, see pack_triton."""
    codes: torch.Tensor            # int4: words of pack_int4; otherwise (N, K), int8 or e4m3
    scales: torch.Tensor           # int4 (K / group, N), int8 (N,), fp8 one per 128 x 128 block
    rows: torch.Tensor | None      # fp8 with one scale per row: fp32 (N,); its blocks have scale 1
    mins: torch.Tensor | None      # int4: fp32 (N, K / group)
    inputs: torch.Tensor | None    # int64 (K,): column k multiplies input inputs[k]
    shape: tuple[int, int]
    group: int
    form: str                      # see triton_form

def zeros(shape, dtype, device):
    """A tensor of zeros. On a CPU the operating system hands out zeroed pages when they are first
    touched, so a large cache costs memory only as it fills; pages of 4 KB, not of 2 MB as numpy
    asks for, of which threads that touch the same one each clear their own. Why zeros: masked
    positions are multiplied by 0, and 0 times what was left there before may be NaN."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, access=mmap.ACCESS_COPY)
    return torch.frombuffer(pages, dtype=dtype).view(shape)

def resolve_device(name):
    """The torch device that a configuration names, if this machine has it."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    match = re.fullmatch(r"cpu|cuda(?::(\d+))?", name)
    require(match, f"device {name!r} is not supported, only cpu and cuda")
    present = name == "cpu" or int(match[1] or 0) < torch.cuda.device_count()
    require(present, f"device {name!r} is not available on this machine")
    return torch.device(name)

def resolve_dtypes(name, checkpoint_dtype, device):
    """(dtype of activations, dtype of matrices) from the configuration.

    auto is the checkpoint's dtype for both on a GPU. On a CPU 16-bit activations cost accuracy and
    gain little in a chat, where the time goes into reading weights: activations are float32 there,
    and matrices bfloat16 where the kernels can multiply the two."""
    if name != "auto":
        return getattr(torch, name), getattr(torch, name)
    name = checkpoint_dtype or "float32"
    known = name in ("float32", "bfloat16", "float16")
    require(known, f"the checkpoint's dtype {name!r} is not supported")
    if device.type == "cpu":
        narrow = name != "float32" and keeps_bf16(device)
        return torch.float32, torch.bfloat16 if narrow else torch.float32
    return getattr(torch, name), getattr(torch, name)

def free_memory(device):
    """Bytes that could still be allocated."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        meminfo = pathlib.Path("/proc/meminfo").read_text()
        return 1024 * int(re.search(r"MemAvailable:\s+(\d+)", meminfo)[1])
    except (OSError, TypeError):  # not Linux: half of what is built in
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2

def keeps_bf16(device):
    """Does linear() read bf16 weights for fp32 activations here? On a CPU with bf16 units and the C
    member: half the bytes of fp32 weights, and products as exact as the weights."""
    return (device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()
            and FORCE != "torch" and c_library()[0] is not None)

def prepare_weight(weight, dtype):
    """The weight (N, K) of a linear layer, a tensor or a QuantizedWeight, for activations of
    `dtype`, in the layout that its machine multiplies fastest."""
    if isinstance(weight, QuantizedWeight):
        if weight.codes.is_cuda or FORCE == "triton":
            form = triton_form(weight)
            return pack_triton(weight, form) if form else weight
        native = (weight.codes.device.type == "cpu" and dtype in C_DTYPES and FORCE != "torch"
                  and c_library()[0])
        if not native:
            return weight
        return NarrowWeight(*pack_codes(weight), weight.inputs, weight.shape, weight.group,
                            narrow_form(weight))
    packs = (weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and dtype in C_DTYPES
             and weight.shape[1] % 2 == 0 and FORCE != "torch" and c_library()[0])
    return PackedWeight(pack_linear(weight), tuple(weight.shape)) if packs else weight.to(dtype)

def linear(x, weight, bias=None, dtype=None, out=None):
    """x (T, K) times a prepared weight (N, K), plus bias (N,) -> (T, N) in dtype (default: x's).
    out: where the result goes, for example some columns of a wider matrix."""
    if isinstance(weight, PackedWeight):
        return linear_c(x, weight.panels, *weight.shape, bias, dtype, out)
    if isinstance(weight, NarrowWeight):
        return linear_narrow_c(x, weight, bias, dtype, out)
    if isinstance(weight, TritonWeight):
        y = linear_triton(x, weight, bias)
    elif isinstance(weight, QuantizedWeight):
        y = quantized_linear_ref(x, weight, bias)
    else:
        y = F.linear(x, weight, bias)
    return y.to(dtype or x.dtype) if out is None else out.copy_(y)

def gated_linear(x, weight, bias=None):
    """silu_mul of linear: x (T, K) and a weight (2F, K) -> (T, F). The C member is one operator."""
    if isinstance(weight, PackedWeight) and weight.shape[0] % 64 == 0:
        return linear_c(x, weight.panels, *weight.shape, bias, gated=True)
    if isinstance(weight, NarrowWeight) and weight.shape[0] % 128 == 0:
        return linear_narrow_c(x, weight, bias, gated=True)
    return silu_mul(linear(x, weight, bias))

def quantized_linear_ref(x, weight, bias=None):
    """x (T, K) times a QuantizedWeight in fp32 (T, N). A million weights at a time are expanded."""
    x, scale, (N, K) = x.float(), None, weight.codes.shape
    if weight.int8_inputs:
        rounded = quantize_int8(x)
        x, scale = rounded.codes.float(), rounded.scales
    step = max(1, (1 << 20) // K)
    y = torch.cat([F.linear(x, weight.rows(slice(n, n + step)).dequantize())
                   for n in range(0, N, step)], 1)
    y = y if scale is None else y * scale
    return y if bias is None else y + bias.float()

def embed(ids, weight, dtype):
    """Rows ids (T,) of a prepared weight (N, K), and the residual stream before anything was added
    to it: (x (T, K) in dtype, zeros (T, K) fp32)."""
    packed = isinstance(weight, PackedWeight) or (
        isinstance(weight, NarrowWeight) and weight.inputs is None)
    plain = (isinstance(weight, torch.Tensor) and not weight.is_cuda and weight.dtype in C_DTYPES
             and FORCE != "torch" and c_library()[0])
    if (packed or plain) and dtype in C_DTYPES:
        return embed_c(ids, weight, dtype)
    x = embedding(ids, weight).to(dtype)
    return x, torch.zeros(x.shape, device=x.device)

def embedding(ids, weight):
    """Rows ids (T,) of a prepared or unprepared weight (N, K): (T, K), fp32 unless they are stored
    as they are. With tied embeddings the packed LM head serves as the table."""
    if isinstance(weight, PackedWeight):
        _, pairs, rows, _ = weight.panels.shape                    # (panels, K / 2, 32, 2)
        return weight.panels[ids // rows, :, ids % rows].view(len(ids), 2 * pairs)
    if isinstance(weight, NarrowWeight):
        return unpack_codes(weight, ids).dequantize()
    if isinstance(weight, TritonWeight):
        return unpack_triton(weight, ids).dequantize()
    if isinstance(weight, QuantizedWeight):
        return weight.rows(ids).dequantize()
    return F.embedding(ids, weight)

def weight_bytes(weight):
    """Bytes of a prepared weight: {"weights": codes or numbers, "scales": scales and minima}."""
    size = lambda x: 0 if x is None else x.numel() * x.element_size()
    if isinstance(weight, (QuantizedWeight, NarrowWeight, TritonWeight)):
        codes = weight.words if isinstance(weight, NarrowWeight) else weight.codes
        tables = [weight.scales, weight.mins]
        tables += [weight.rows] if isinstance(weight, TritonWeight) else []
        return {"weights": size(codes), "scales": sum(map(size, tables))}
    return {"weights": size(getattr(weight, "panels", weight)), "scales": 0}

def weight_kind(weight):
    """One word for the form of a prepared weight, for people."""
    if isinstance(weight, (NarrowWeight, TritonWeight)):
        return weight.form
    if isinstance(weight, QuantizedWeight):
        return f"{narrow_form(weight)} (expanded in every step)"
    return str(getattr(weight, "panels", weight).dtype).removeprefix("torch.")

KERNELS: dict[str, Kernel] = {
    "rms_norm": Kernel(rms_norm_ref, _rms_norm_triton, rms_norm_c),
    "silu_mul": Kernel(silu_mul_ref, _silu_mul_triton, silu_mul_c),
    "rope_store_kv": Kernel(rope_store_kv_ref, _rope_store_kv_triton, rope_store_kv_c),
    "argmax": Kernel(argmax_ref, _argmax_triton, argmax_c),
    "flash_attention": Kernel(flash_attention_ref, _flash_triton),
    "flash_backward": Kernel(flash_backward_ref, _flash_backward_triton),
    "paged_attention": Kernel(attention_ref, _paged_attention_triton, attention_c),
    "int8_matmul": Kernel(int8_matmul_ref, _int8_matmul_triton),
    "int4_matmul": Kernel(int4_matmul_ref, _int4_matmul_triton),
    "fp8_matmul": Kernel(fp8_matmul_ref, _fp8_matmul_triton),
}


# ==================================================================================================
# 10  Attention backends
# ==================================================================================================
# Candidate, possible, selected, executed are four different facts; this section keeps them apart.
#
#     ATTENTION            candidates, in order of preference
#     why_not(...)         None, or why this one cannot run here
#     select_attention     the first possible one, or the one asked for; reasons of the others
#     backend.executed     how often it really ran
#
# Invariant: a backend asked for by name that cannot run is an error, never another backend.

@dataclass
class AttentionBackend:
    """One way to run paged attention: fn(q, kv, meta, scale, window, softcap) -> (T, H, D)."""
    name: str
    fn: Callable
    reason: Callable          # the facts of why_not, by name -> None or one phrase

    @property
    def executed(self):
        """How often this backend ran."""
        return KERNELS["paged_attention"].executed[self.name]

    def why_not(self, device, dtype, kv_dtype, head_dim, block_size, group, softcap=False):
        """None when the backend can run this model here, else the reason as one phrase."""
        return self.reason(device=torch.device(device).type, dtype=dtype, kv_dtype=kv_dtype,
                           head_dim=head_dim, group=group, softcap=softcap)

    def __call__(self, q, kv, meta, scale, window=0, softcap=0.0):
        """Attention of q (T, H, D) over the cache -> (T, H, D); 0 for sequences of length 0."""
        (_, H, D), KH = q.shape, kv.data.shape[3]
        require(q.stride(2) == 1 and q.stride(1) == D, "attention: heads of q must be contiguous")
        require(H % KH == 0 and kv.data.shape[4] == D, "attention: q", q, "cache", kv.data)
        require(meta.block_table.dtype == meta.seq_lens.dtype == meta.query_start_loc.dtype
                == torch.int32, "attention: metadata must be int32")
        KERNELS["paged_attention"].executed[self.name] += 1
        return self.fn(q, kv, meta, scale, window, softcap)

def attention_sdpa(q, kv, meta, scale, window=0, softcap=0.0):
    """Gather each sequence's K and V, then torch's scaled_dot_product_attention.
    Why: the G query heads of a KV head become extra query rows. enable_gqa would say the same, but
      torch's CPU kernel runs it three to four times slower in bf16."""
    require(not softcap, "sdpa has no softcap")
    out = q.new_zeros(q.shape)
    for rows, *pair in each_sequence(kv, meta, window):
        k, v = (x.to(q.dtype).transpose(0, 1) for x in pair)                     # (KH, n, D)
        grouped = q[rows].unflatten(1, (len(k), -1)).permute(1, 2, 0, 3)         # (KH, G, q_len, D)
        _, G, q_len, _ = grouped.shape
        seen = visible(q_len, k.shape[1], window, q.device)
        o = F.scaled_dot_product_attention(
            grouped.flatten(1, 2)[None], k[None], v[None], scale=scale,
            attn_mask=seen.repeat(G, 1) if q_len > 1 or window else None)[0]
        out[rows] = o.unflatten(1, (G, q_len)).permute(2, 0, 1, 3).flatten(1, 2)
    return out

def _triton_why_not(device, dtype, head_dim, group, **_):
    if triton is None:
        return "Triton is not installed"
    if device != "cuda" and not INTERPRET:
        return f"needs a GPU, not {device} (TRITON_INTERPRET=1 runs it on a CPU, for tests)"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"no {dtype}"
    if not 1 <= group <= 16 or head_dim > 256:
        return f"group size 1-16 and head width up to 256, not {group} and {head_dim}"

def _c_why_not(device, dtype, kv_dtype, **_):
    if device != "cpu":
        return f"runs on the CPU, not on {device}"
    if not c_cache(dtype, kv_dtype):
        return f"bf16 or fp32 with a cache of at most that width, not {dtype} and {kv_dtype}"
    return c_library()[1]

ATTENTION: dict[str, AttentionBackend] = {b.name: b for b in (
    AttentionBackend("triton", _paged_attention_triton, _triton_why_not),
    AttentionBackend("c", attention_c, _c_why_not),
    AttentionBackend("sdpa", attention_sdpa,
                     lambda softcap, **_: "no softcap" if softcap else None),
    AttentionBackend("torch", attention_ref, lambda **_: None),
)}

def select_attention(requested="auto", **facts):
    """Choose a backend: (backend, report lines). facts are the arguments of why_not. Raises
    ValueError, with the reasons, for an unknown name or a backend that cannot run here."""
    require(requested == "auto" or requested in ATTENTION,
            f"attention backend {requested!r} is unknown; candidates:", ", ".join(ATTENTION))
    reasons = {name: backend.why_not(**facts) for name, backend in ATTENTION.items()}
    if requested == "auto" and INTERPRET:
        reasons["triton"] = reasons["triton"] or "the interpreter runs only when asked for by name"
    possible = [name for name, reason in reasons.items() if reason is None]
    chosen = requested if requested != "auto" else possible[0]
    require(chosen in possible, f"attention backend {chosen} cannot run:", reasons[chosen])
    lines = [f"attention candidates: {', '.join(ATTENTION)}"]
    lines += [f"attention {name}: no, {reason}" for name, reason in reasons.items() if reason]
    lines.append(f"attention selected: {chosen} (requested: {requested})")
    return ATTENTION[chosen], lines


# ==================================================================================================
# 11  The numbers of section 5
# ==================================================================================================
# Flash attention is an argument about bytes. These functions count what the kernels above move, so
# that the argument can be checked without a GPU; each is called by a test with known numbers.
#
#     v1   for each K/V tile: for each Q tile      Q, O and m, l travel once per K/V tile
#     v2   for each Q tile:   for each K/V tile    K and V travel once per Q tile; O is written once
#
# Why: v2 can ask for more bytes than v1 (its K/V tiles come from the L2 cache); what it buys is one
#   independent program per Q tile instead of one per head.
# Try: hbm_elements(8192, 64, 98304, 64, 128): halve BM and watch which column moves.

def online_softmax(tiles, rescale=True):
    """One row through tiles [(scores, values)]: the states (m, l, A) after each tile, then o, lse.
    rescale=False leaves alpha out, the mistake that the kernel's tests must catch."""
    m, l, A, states = -math.inf, 0.0, [0.0] * len(tiles[0][1][0]), []
    for scores, values in tiles:
        m_new = max(m, *scores)
        alpha = math.exp(m - m_new) if rescale else 1.0
        p = [math.exp(s - m_new) for s in scores]
        m, l = m_new, l * alpha + sum(p)
        A = [a * alpha + sum(w * x for w, x in zip(p, col)) for a, col in zip(A, zip(*values))]
        states.append((m, l, A))
    return states, [a / l for a in A], m + math.log(l)

def hbm_elements(N, D, on_chip, BM, BN):
    """Elements one head's forward moves between HBM and the chip, by algorithm. on_chip: elements
    of fast memory, which fixes v1's tiles; BM x BN: v2's tiles."""
    v1_tiles, q_tiles = math.ceil(N / math.ceil(on_chip / (4 * D))), math.ceil(N / BM)
    once = 2 * N * D + N                                   # Q read, O and lse written
    seen = [min(N, math.ceil((i + 1) * BM / BN) * BN) for i in range(q_tiles)]
    return {"standard": 4 * N * N + 4 * N * D,             # S and P written and read
            "v1": 2 * N * D + v1_tiles * (3 * N * D + 4 * N),
            "v2": once + q_tiles * 2 * N * D, "v2_causal": once + sum(2 * D * n for n in seen)}

def tiled_attention(q, k, v, BM, BN, causal=False, moved=None):
    """The forward pass of section 5 in plain torch, one head: (o, lse). q, k, v (N, D).
    moved: a list that receives the size of every tile read from or written to "HBM"."""
    moved = [] if moved is None else moved
    out, lse = torch.empty_like(q), q.new_empty(len(q))
    for i in range(0, len(q), BM):
        rows, tile_q = slice(i, i + BM), q[i:i + BM]
        m, l, acc = q.new_full((len(tile_q),), -math.inf), q.new_zeros(len(tile_q)), 0.0 * tile_q
        for j in range(0, min(len(k), i + BM) if causal else len(k), BN):
            s = tile_q @ k[j:j + BN].T / math.sqrt(q.shape[1])
            if causal:
                later = torch.arange(j, j + s.shape[1]) > torch.arange(i, i + len(s))[:, None]
                s = s.masked_fill(later, -math.inf)
            m_new = torch.maximum(m, s.amax(1))
            p, alpha = torch.exp(s - m_new[:, None]), torch.exp(m - m_new)
            m, l, acc = m_new, l * alpha + p.sum(1), acc * alpha[:, None] + p @ v[j:j + BN]
            moved.append(2 * k[j:j + BN].numel())
        out[rows], lse[rows] = acc / l[:, None], m + l.log()
        moved += [tile_q.numel(), tile_q.numel() + len(tile_q)]      # q in; o and lse out
    return out, lse

def tiled_backward(do, q, k, v, out, lse, BM, BN, causal=False):
    """The backward pass of section 5, one head: (dq, dk, dv), P recomputed from lse."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    delta, scale = (do * out).sum(1), 1 / math.sqrt(q.shape[1])
    for j in range(0, len(k), BN):
        for i in range(0, len(q), BM):
            rows, cols = slice(i, i + BM), slice(j, j + BN)
            p = torch.exp(q[rows] @ k[cols].T * scale - lse[rows, None])
            if causal:
                p = p * (torch.arange(len(q))[rows, None] >= torch.arange(len(k))[cols])
            ds = p * (do[rows] @ v[cols].T - delta[rows, None])
            dv[cols] += p.T @ do[rows]
            dk[cols] += ds.T @ q[rows] * scale
            dq[rows] += ds @ k[cols] * scale
    return dq, dk, dv

def merge_pieces(outs, lses):
    """Attention over a context from its pieces: outs (pieces, D), lses (pieces,) -> (o, lse)."""
    lse = torch.logsumexp(lses, 0)
    return (torch.exp(lses - lse)[:, None] * outs).sum(0), lse

def grid_use(batch, heads, N, BM, processors):
    """Programs of v1 (one per head) and v2 (one per head and Q tile), and how they fill a GPU.
    Eight heads of 8,192 tokens on 132 processors: 8 programs keep 6% busy, 512 make 4 waves."""
    v1, v2 = batch * heads, batch * heads * math.ceil(N / BM)
    return {"v1": v1, "v2": v2, "v1_busy": round(min(1.0, v1 / processors), 3),
            "v2_waves": math.ceil(v2 / processors)}

def sliced_costs(N, D, BM, BN, warps):
    """What the warps of one program must add up, and how often outputs are divided, per head.
    sliced_k: each warp holds other keys, so partial outputs (BM, D) are summed through shared
    memory for every tile. sliced_q: each holds other rows. v1 divides after each tile, v2 once."""
    tiles = math.ceil(N / BN)
    return {"sliced_k": (warps - 1) * BM * D * tiles, "sliced_q": 0,
            "v1_divisions": N * D * tiles, "v2_divisions": N * D}

def schedule_ticks(tiles, load, matmul, softmax):
    """Ticks for `tiles` tiles: one after the other, loads hidden, and two groups in ping-pong: one
    group's softmax runs beside the other's products, on the one matrix unit (FlashAttention-3)."""
    unit_free, group_free = 0, [0, 0]
    for tile in range(tiles):
        unit_free = max(unit_free, group_free[tile % 2], load * (tile + 1)) + matmul
        group_free[tile % 2] = unit_free + softmax
    return {"serial": tiles * (load + matmul + softmax),
            "producer": load + tiles * (matmul + softmax), "ping_pong": max(group_free)}

def attention_pairs(N, window, first):
    """(causal pairs, pairs kept by a window plus `first` global tokens), as Longformer counts."""
    near = sum(min(i + 1, window) for i in range(N))
    return N * (N + 1) // 2, near + sum(min(first, max(0, i + 1 - window)) for i in range(N))

def favor_error(features=(16, 64, 256, 1024), D=8, draws=8):
    """Relative error of exp(q k^T) from random features, by number of features (Performer, FAVOR+).
    exp(q.k) = E[phi(q).phi(k)], phi(x) = exp(w.x - |x|^2 / 2), w normal, orthogonal in blocks of D.
    An approximation, shown for comparison: everything else in this file keeps every pair."""
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(64, D)) * 0.5 for _ in range(2))
    exact = np.exp(q @ k.T)

    def draw(count):
        w = np.concatenate([np.linalg.qr(rng.normal(size=(D, D)))[0]
                            * np.sqrt(rng.chisquare(D, (D, 1))) for _ in range(count // D)])
        phi = lambda x: np.exp(x @ w.T - (x * x).sum(1, keepdims=True) / 2)
        return np.abs(phi(q) @ phi(k).T / count - exact).mean() / exact.mean()
    return {count: float(np.mean([draw(count) for _ in range(draws)])) for count in features}

def hadamard(D):
    """Orthogonal (D, D) matrix of +-1 / sqrt(D), D a power of two (Sylvester's construction)."""
    H = torch.ones(1, 1)
    while len(H) < D:
        H = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), H)
    return H / math.sqrt(D)

def round_fp8(x, rows):
    """x (N, D) through e4m3 with one scale per `rows` rows, back in fp32."""
    blocks = x.view(-1, rows, x.shape[1])
    step = blocks.abs().amax((1, 2), keepdim=True) / 448
    return ((blocks / step).to(torch.float8_e4m3fn).float() * step).view_as(x)

def fp8_attention_error(seeds=(0, 1, 2), N=1024, D=64):
    """Output error (RMSE) of attention on fp8 q, k, v with rare outliers of ten times the spread:
    one scale per tensor, one per 64 rows, and one per 64 rows after rotating q and k by R (random
    signs, then Hadamard). (q R)(k R)^T = q k^T, but an outlier is spread over all D dims and no
    longer sets the scale for its neighbours (FlashAttention-3, section 3.3)."""
    error = Counter()
    attend = lambda q, k, v: torch.softmax(q @ k.T / math.sqrt(D), -1) @ v
    for seed in seeds:
        g = torch.Generator().manual_seed(seed)
        normal = lambda: torch.randn(N, D, generator=g)
        q, k, v = (normal() + normal() * 10 * (torch.rand(N, D, generator=g) < 0.001)
                   for _ in range(3))
        signs = torch.where(torch.rand(D, generator=g) < .5, -1.0, 1.0)
        R, exact = signs[:, None] * hadamard(D), attend(q.double(), k.double(), v.double())
        for name, rows, a, b in (("tensor", N, q, k), ("block", 64, q, k),
                                 ("rotated", 64, q @ R, k @ R)):
            o = attend(round_fp8(a, rows), round_fp8(b, rows), round_fp8(v, rows))
            error[name] += (o.double() - exact).pow(2).mean().sqrt().item() / len(seeds)
    return dict(error)


# ==================================================================================================
# 12  Recorded steps
# ==================================================================================================
# The Python of a decode step, two hundred calls, takes longer than some of the operators it calls,
# and each call wakes the other threads up once more. What it does is the same in every step but for
# the numbers in its inputs. So the step is recorded once: the operators are not run but written
# down, with the addresses of what they read and write, and a replay runs the list in C, in one
# parallel region. A CUDA graph is the same idea on a GPU, where a launch is what takes the time.
#
#     record   rms_norm -> linear -> rope_store_kv -> attention -> ..   once, with buffers as inputs
#     replay   inputs into the buffers, run(list, tokens, sequences)    every step
#
# Invariant: a replay has the bits of the step run eagerly.
# Invariant: every operator of a recording is in the list: one that torch would run is an error.
# Why: the number of tokens is an argument here, so one recording does for all. A CUDA graph has
#   its grid sizes built in; there one is made for each batch size.

def record(step, device):
    """Record what step() does to tensors: (replay(tokens, sequences), what it returned, which every
    replay writes anew). ValueError names an operation that cannot be recorded."""
    if device.type == "cpu":
        recording = Recording(step)
        return recording.replay, recording.result
    step()  # kernels compile outside the recording
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return lambda tokens, sequences: graph.replay(), result

class Recording:
    """The C operators of a step, and the memory that they write to."""
    def __init__(self, step):
        global RECORDING
        self.ops, self.memory = [], []      # memory: [buffer, weak reference to who has it]
        before = {name: kernel.executed.copy() for name, kernel in KERNELS.items()}
        RECORDING = self
        try:
            with _OnlyViews():
                self.result = step()
        finally:
            RECORDING = None
            made = {name: kernel.executed - before[name] for name, kernel in KERNELS.items()}
            self.counts = {name: counts for name, counts in made.items() if counts}
            for name in self.counts:
                KERNELS[name].executed = before[name]
        self.program = b"".join(self.ops)

    def empty(self, shape, dtype):
        """A tensor for a result. It takes the place of one of the same size that nobody holds any
        more, so that the layers use the same few buffers, which stay in the processor's cache."""
        size = math.prod(shape) * dtype.itemsize
        for place in self.memory:
            if len(place[0]) == size and place[1]() is None:
                break
        else:
            raw = np.empty(size + 64, np.uint8)
            start = -raw.ctypes.data % 64       # as aligned as torch's own memory
            place = [raw[start : start + size], None]
            self.memory.append(place)
        array = place[0][:]             # lives as long as a tensor that uses it
        place[1] = weakref.ref(array)
        return torch.from_numpy(array).view(dtype).view(shape)

    def replay(self, tokens, sequences):
        """Run the step again, on the first so many rows of its inputs."""
        c_library()[0].run(self.program, len(self.ops), tokens, sequences)
        for name, counts in self.counts.items():
            KERNELS[name].executed.update(counts)

class _OnlyViews(TorchDispatchMode):
    """Refuses every torch operation that computes: a replay would leave it out."""
    @classmethod
    def _should_skip_dynamo(cls):
        return False    # else the first operation imports torch's compiler, which takes a second

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        require(function.is_view, f"{function} has no C member")
        return function(*args, **(kwargs or {}))
