"""Every operation of the engine that touches the KV cache or is worth a kernel of its own.

One operation is one pair and one wrapper:

    rms_norm_ref        plain torch, fp32 inside, short enough to be checked by eye: the definition
    _rms_norm_kernel    Triton, for NVIDIA and AMD; runs on a CPU too, slowly, under TRITON_INTERPRET=1
    rms_norm_c          C for the CPU, where it pays (bf16 and fp32)
    rms_norm            the wrapper: checks shapes, types and contiguity, runs one of the three, counts it

The table KERNELS lists the operations, the table ATTENTION the attention backends. A test walks both
and compares every member with its reference, so a new row is tested on arrival.

CONTENTS
    1  Formats            AttentionMetadata, LayerKV, number formats of the cache
    2  References         the definitions, in plain torch
    3  Wrappers           checks, dispatch, the table KERNELS
    4  Attention backends the table ATTENTION and the choice at start-up

Letters: T tokens in the step, S sequences, E model width, H query heads, KH key/value heads,
G = H // KH, D head width, F MLP width, V vocabulary, NB blocks, BS block size.
"""
from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Callable

import torch
import torch.nn.functional as F

FORCE: str | None = None     # "torch" or "triton": every wrapper runs that member, whatever the device


# ======================================================================================================
# 1  Formats
# ======================================================================================================
# The cache of one layer is a heap of fixed-size blocks; who owns which block is written in a table.
#
#     block_table[s] = [7, 3, 11]              BS = 4
#     pos   0 1 2 3 | 4 5 6 7 | 8 9            token at pos 9: block 11, offset 1
#     block    7    |    3    |  11            slot = 11 * 4 + 1 = 45
#
# Kernels see the step as one packed batch: T tokens of S sequences back to back, no padding.
#
# Invariant: token i of sequence s sits at pos = seq_len - q_len + i and sees max(0, pos-window+1)..pos.
# Invariant: a slot that no token was written to is never read, not even to be multiplied by zero.

@dataclass
class AttentionMetadata:
    """What the attention of one step needs to know; built once, shared by all layers."""
    query_start_loc: torch.Tensor   # int32 (S+1,): first row of each sequence in the batch; last entry T
    seq_lens: torch.Tensor          # int32 (S,): tokens in the cache once this step is written; 0 = padding
    block_table: torch.Tensor       # int32 (S, max_blocks): physical block of each logical block
    slot_mapping: torch.Tensor      # int64 (T,): cache slot of each token of the step; -1 = write nowhere
    max_query_len: int
    max_seq_len: int


@dataclass
class LayerKV:
    """The KV cache of one layer. Keys are stored rotated, values as they are."""
    data: torch.Tensor                     # (2, NB, BS, KH, D), K then V; bf16, fp16, fp32, fp8 or int8
    scales: torch.Tensor | None = None     # int8: fp32 (2, NB, BS, KH), one scale per token and head
    k_scale: float = 1.0                   # fp8: one scale per tensor, from the checkpoint
    v_scale: float = 1.0


FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}    # OCP 8-bit formats, saturating


def slot_of(pos: int, blocks: list[int], block_size: int) -> int:
    """Cache slot of position `pos` of a sequence that owns `blocks`, in logical order.

    >>> slot_of(9, [7, 3, 11], 4)
    45
    """
    return blocks[pos // block_size] * block_size + pos % block_size


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """fp8 tensors as uint8: torch cannot index them, but it can move their bytes."""
    return x.view(torch.uint8) if x.dtype in FP8_MAX else x


# ======================================================================================================
# 2  References
# ======================================================================================================
# The definition of each operation. Slow and obvious; the other members are compared with these.
#
#     rms_norm   y = x / sqrt(mean(x^2) + eps) * w
#     silu_mul   y = g / (1 + exp(-g)) * u
#     rope       (a, b) -> (a cos - b sin, b cos + a sin)   for each pair of a head, angle pos * theta_i
#     attention  o = softmax(cap(q k^T scale)) v            over the positions a token may see
#
# Why: fp32 inside and one rounding at the end. bf16 has 8 significant bits; a sum of 576 squares kept
#   in bf16 would lose three of them.

def rms_norm_ref(x, weight, eps, residual=None):
    """Root mean square norm over the last dimension (Zhang and Sennrich 2019)."""
    if residual is not None:
        x = residual.add_(x)            # the sum is rounded to the stream's dtype before it is normed
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * weight.float()).to(x.dtype)


def silu_mul_ref(gate_up):
    """SwiGLU activation (Shazeer 2020): silu of the first half times the second half."""
    gate, up = gate_up.float().chunk(2, dim=-1)    # (T, F) each
    return (F.silu(gate) * up).to(gate_up.dtype)


def rope_ref(x, cos_sin, positions, interleaved=False):
    """Rotate (T, heads, D) in place (Su et al. 2021).

    The first rotary_dim = cos_sin.shape[1] dims of a head are turned, the rest pass. Dim i is paired
    with i + rotary_dim/2 (NeoX) or, interleaved, 2i with 2i + 1 (GPT-J).
    """
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
    """Write k and v (T, KH, D) to their slots, quantised to the cache's format; slot -1 is skipped."""
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
    """K and V of the first n positions of the sequence that owns `blocks`, as fp32 (2, n, KH, D)."""
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


def attention_ref(q, kv, meta, scale, window=0, softcap=0.0, lse=None):
    """Softmax attention through the block table, one sequence at a time. q (T, H, D) -> (T, H, D).

    lse (T, H) fp32, when given, receives log(sum(exp(scores))), -inf where a row sees nothing.
    """
    out = q.new_zeros(q.shape)
    starts = meta.query_start_loc.tolist()
    for s, n in enumerate(meta.seq_lens.tolist()):
        rows = slice(starts[s], starts[s + 1])
        q_len = starts[s + 1] - starts[s]
        if n == 0 or q_len == 0:
            continue
        k, v = gather_kv(kv, meta.block_table[s], n)                      # (n, KH, D)
        grouped = q[rows].float().unflatten(1, (k.shape[1], -1))          # (q_len, KH, G, D)
        scores = torch.einsum("qkgd,nkd->qkgn", grouped, k) * scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        hidden = ~visible(q_len, n, window, q.device)[:, None, None]
        scores = scores.masked_fill(hidden, -math.inf)
        out[rows] = torch.einsum("qkgn,nkd->qkgd", scores.softmax(-1), v).flatten(1, 2).to(q.dtype)
        if lse is not None:
            lse[rows] = scores.logsumexp(-1).flatten(1, 2)
    return out


def argmax_ref(logits):
    """Index of the largest logit of each row, int64 (S,); the lowest index wins ties."""
    return logits.argmax(dim=-1)


# ======================================================================================================
# 3  Wrappers
# ======================================================================================================
# One public function per operation. It refuses what the kernels cannot do, with the reason, then runs
# one member of the pair:
#
#     FORCE set           that member                       (tests)
#     tensor on a GPU     Triton
#     CPU, bf16 or fp32   C, when a compiler was found
#     otherwise           the reference
#
# Invariant: KERNELS[name].executed counts what ran, by member; nothing is selected without being counted.

@dataclass
class Kernel:
    """One operation and its members; a missing member is None."""
    ref: Callable
    triton: Callable | None = None
    c: Callable | None = None
    executed: Counter = field(default_factory=Counter)


def require(condition, *parts):
    """Raise ValueError with the parts joined when the condition fails."""
    if not condition:
        raise ValueError(" ".join(str(p) for p in parts))


def run_member(name, x, *args):
    """Run operation `name` with the member that fits tensor x, and count it."""
    kernel = KERNELS[name]
    if FORCE:
        member = FORCE
    elif x.is_cuda:
        member = "triton"
    else:
        member = "c" if kernel.c and x.dtype in (torch.bfloat16, torch.float32) else "torch"
    fn = kernel.ref if member == "torch" else getattr(kernel, member)
    require(fn, f"{name}: no {member} member on this machine")
    kernel.executed[member] += 1
    return fn(*args)


def rms_norm(x, weight, eps, residual=None):
    """Norm of the last dimension of x, (T, E) or (T, heads, D), in x's dtype.

    With residual (same shape and dtype, contiguous): residual += x in place, and the norm of the sum
    is returned. Every row's last dimension must be contiguous; rows may be strided (q inside qkv).
    """
    require(x.dim() in (2, 3) and x.stride(-1) == 1, "rms_norm: x", tuple(x.shape), x.stride())
    require(weight.shape == x.shape[-1:], "rms_norm: weight", tuple(weight.shape), "x", tuple(x.shape))
    if residual is not None:
        require(residual.shape == x.shape and residual.dtype == x.dtype and residual.is_contiguous(),
                "rms_norm: residual", tuple(residual.shape), residual.dtype)
    return run_member("rms_norm", x, x, weight, eps, residual)


def silu_mul(gate_up):
    """gate_up (T, 2F), gate in the first half of each row -> silu(gate) * up, (T, F)."""
    require(gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0 and gate_up.is_contiguous(),
            "silu_mul: gate_up", tuple(gate_up.shape), gate_up.stride())
    return run_member("silu_mul", gate_up, gate_up)


def rope_store_kv(qkv, cos_sin, positions, kv, slot_mapping, H, KH, D, interleaved=False):
    """Rotate q and k of qkv (T, (H + 2 KH) D) in place, write k and v to the cache, return q (T, H, D).

    cos_sin (max_pos, rotary_dim) fp32, cosines then sines; a table of width 0 rotates nothing.
    positions int (T,); slot_mapping int64 (T,), -1 writes nowhere.
    """
    require(qkv.dim() == 2 and qkv.shape[1] == (H + 2 * KH) * D and qkv.is_contiguous(),
            f"rope_store_kv: qkv {tuple(qkv.shape)} is not (T, ({H} + 2 * {KH}) * {D})")
    require(cos_sin.shape[1] % 2 == 0 and cos_sin.shape[1] <= D and cos_sin.dtype == torch.float32,
            "rope_store_kv: cos_sin", tuple(cos_sin.shape), cos_sin.dtype)
    require(kv.data.shape[0] == 2 and kv.data.shape[3:] == (KH, D) and kv.data.is_contiguous(),
            "rope_store_kv: cache", tuple(kv.data.shape), "is not (2, NB, BS, KH, D)")
    require((kv.scales is not None) == (kv.data.dtype == torch.int8),
            "rope_store_kv: scales come with an int8 cache and with no other")
    require(len(positions) == len(qkv) == len(slot_mapping) and slot_mapping.dtype == torch.int64,
            "rope_store_kv: one position and one int64 slot per token")
    return run_member("rope_store_kv", qkv, qkv, cos_sin, positions, kv, slot_mapping, H, KH, D,
                      interleaved)


def argmax(logits):
    """Index of the largest of each row of logits (S, V), int64 (S,); the lowest index wins ties."""
    require(logits.dim() == 2 and logits.stride(-1) == 1, "argmax: logits", tuple(logits.shape))
    return run_member("argmax", logits, logits)


KERNELS: dict[str, Kernel] = {
    "rms_norm": Kernel(rms_norm_ref),
    "silu_mul": Kernel(silu_mul_ref),
    "rope_store_kv": Kernel(rope_store_kv_ref),
    "argmax": Kernel(argmax_ref),
}


# ======================================================================================================
# 4  Attention backends
# ======================================================================================================
# Candidate, possible, selected, executed are four different facts; this section keeps them apart.
#
#     ATTENTION            candidates, in order of preference
#     why_not(...)         None, or why this one cannot run here
#     select_attention     the first possible one, or the one asked for; with the reasons of the others
#     backend.executed     how often it really ran
#
# Invariant: a backend asked for by name that cannot run is an error, never another backend.

@dataclass
class AttentionBackend:
    """One way to run paged attention: fn(q, kv, meta, scale, window, softcap) -> (T, H, D)."""
    name: str
    fn: Callable
    reason: Callable          # same arguments as why_not
    executed: int = 0

    def why_not(self, device, dtype, kv_dtype, head_dim, block_size, group, softcap=False):
        """None when the backend can run this model here, else the reason as one phrase."""
        return self.reason(torch.device(device).type, dtype, kv_dtype, head_dim, block_size, group,
                           softcap)

    def __call__(self, q, kv, meta, scale, window=0, softcap=0.0):
        """Attention of q (T, H, D) over the cache -> (T, H, D); rows of sequences of length 0 are 0."""
        H, D = q.shape[1:]
        KH = kv.data.shape[3]
        require(q.stride(2) == 1 and q.stride(1) == D, "attention: heads of q must be contiguous")
        require(H % KH == 0 and kv.data.shape[4] == D, "attention: q", tuple(q.shape), "cache",
                tuple(kv.data.shape))
        require(meta.block_table.dtype == meta.seq_lens.dtype == meta.query_start_loc.dtype
                == torch.int32, "attention: metadata must be int32")
        self.executed += 1
        return self.fn(q, kv, meta, scale, window, softcap)


def attention_sdpa(q, kv, meta, scale, window=0, softcap=0.0):
    """Gather each sequence's K and V, then torch's scaled_dot_product_attention.

    Why: the G query heads of a KV head become extra query rows. enable_gqa would say the same, but
      torch's CPU kernel runs it three to four times slower in bf16.
    """
    require(not softcap, "sdpa has no softcap")
    out = q.new_zeros(q.shape)
    KH = kv.data.shape[3]
    starts = meta.query_start_loc.tolist()
    for s, n in enumerate(meta.seq_lens.tolist()):
        rows = slice(starts[s], starts[s + 1])
        q_len = starts[s + 1] - starts[s]
        if n == 0 or q_len == 0:
            continue
        k, v = gather_kv(kv, meta.block_table[s], n).to(q.dtype).transpose(1, 2)     # (KH, n, D)
        grouped = q[rows].unflatten(1, (KH, -1)).permute(1, 2, 0, 3)                 # (KH, G, q_len, D)
        G = grouped.shape[1]
        mask = visible(q_len, n, window, q.device).repeat(G, 1) if q_len > 1 or window else None
        o = F.scaled_dot_product_attention(grouped.flatten(1, 2)[None], k[None], v[None],
                                           attn_mask=mask, scale=scale)[0]
        out[rows] = o.unflatten(1, (G, q_len)).permute(2, 0, 1, 3).flatten(1, 2)
    return out


def _sdpa_why_not(device, dtype, kv_dtype, head_dim, block_size, group, softcap):
    return "no softcap" if softcap else None


def _torch_why_not(device, dtype, kv_dtype, head_dim, block_size, group, softcap):
    return None


ATTENTION: dict[str, AttentionBackend] = {b.name: b for b in (
    AttentionBackend("sdpa", attention_sdpa, _sdpa_why_not),
    AttentionBackend("torch", attention_ref, _torch_why_not),
)}


def select_attention(requested="auto", **facts):
    """Choose a backend: (backend, report lines). facts are the arguments of why_not.

    Raises ValueError, with the reasons, for an unknown name or a backend that cannot run here.
    """
    require(requested == "auto" or requested in ATTENTION,
            f"attention backend {requested!r} is unknown; candidates:", ", ".join(ATTENTION))
    reasons = {name: backend.why_not(**facts) for name, backend in ATTENTION.items()}
    possible = [name for name, reason in reasons.items() if reason is None]
    chosen = requested if requested != "auto" else possible[0]
    require(chosen in possible, f"attention backend {chosen} cannot run:", reasons[chosen])
    lines = [f"attention candidates: {', '.join(ATTENTION)}"]
    lines += [f"attention {name}: no, {reason}" for name, reason in reasons.items() if reason]
    lines.append(f"attention selected: {chosen} (requested: {requested})")
    return ATTENTION[chosen], lines
