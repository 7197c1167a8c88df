"""lessons_kernels.py: articles 6 and 7, run: narrow numbers, speculation, FlashAttention.

    python bench.py lesson 6 | 7 | 6.4                 see lessons.py

CONTENTS
     1  Narrow numbers           lesson 6, first half
     2  Speculation              lesson 6, second half
     3  FlashAttention           lesson 7
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from fractions import Fraction
from itertools import product

import numpy as np
import torch

import kernels
import nanoserve as ns
from bench_spec import expected_tokens
from lessons import Simulation, between, claim, example, table


# ==================================================================================================
# 1  Narrow numbers
# ==================================================================================================
# Fewer bits help where bytes are what a step waits for, and rounding hurts least where it knows
# which inputs are large.

def rounded(values, digits):
    """A list, a tensor or nested lists of numbers, each rounded; -0.0 becomes 0.0.

    >>> rounded([[-0.0001, 2.5], 1.2345], 2)
    [[0.0, 2.5], 1.23]
    """
    if isinstance(values, torch.Tensor):
        values = values.tolist()
    if isinstance(values, (list, tuple)):
        return [rounded(value, digits) for value in values]
    return round(values, digits) + 0.0

@example("6.1", "Eight numbers in four bytes", "kernels.py 7, 9")
def eight_numbers():
    x = torch.tensor([[-1, -.33, 0, .26, .74, 1.13, 1.57, 2]])
    weight = kernels.quantize_int4(x, 8)
    codes, scale = weight.codes.int() + 8, weight.scales.item()
    zero = 8 - weight.mins.item() / scale
    claim("scale, and the code of 0", rounded([scale, zero], 1), [0.2, 5.0])
    claim("codes", codes[0].tolist(), [0, 3, 5, 6, 9, 11, 13, 15])
    low, high = codes[0, ::2].tolist(), codes[0, 1::2].tolist()
    claim("bytes", bytes(a | b << 4 for a, b in zip(low, high)).hex(" "), "30 65 b9 fd")
    claim("errors, none above half a scale", rounded((x - weight.dequantize())[0], 2),
          [0, .07, 0, .06, -.06, -.07, -.03, 0])
    y = torch.tensor([[1, -2, .5, 3, -1, 2, .25, -.5]])
    claim("dot product, by the engine", round(kernels.linear(y, weight).item(), 2), 1.4)
    integers = scale * ((codes * y).sum() - zero * y.sum()).item()
    claim("and as scale * (sum of codes - zero * sum of inputs)", round(integers, 2), 1.4)
    words = torch.randint(16, (1000, 1000), generator=torch.Generator().manual_seed(0))
    again = kernels.unpack_int4(kernels.pack_int4(words), 1000)
    claim("a million codes, packed and unpacked: the same", torch.equal(again, words.int()), True)

@example("6.2", "Bits of a weight, and a product that never unpacks it", "kernels.py 7, 9")
def bits_per_weight():
    for K, group, want in ((1024, 128, 544), (4096, 64, 2304)):
        w = torch.randn(64, K, generator=torch.Generator().manual_seed(0))
        codes = kernels.quantize_int4(w, group)
        weight = kernels.prepare_weight(codes, torch.float32)
        if isinstance(weight, kernels.NarrowWeight):  # where there is a C compiler
            claim(f"bytes of {K:,} weights, group {group}",
                  sum(kernels.weight_bytes(weight).values()) // 64, want, "measured")
        x = torch.randn(3, K, generator=torch.Generator().manual_seed(1))
        between("   product, packed, less the expanded one: largest", 0.0,
                (kernels.linear(x, weight) - x @ codes.dequantize().T).abs().max().item(), 1e-3)
    claim("bits per weight at group 128", 544 * 8 / 1024, 4.25)

def eight_bits():
    rows = []
    for dtype in kernels.FP8_MAX:
        values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
        finite = sorted(set(values[values.isfinite()].tolist()))
        above = lambda x: finite[finite.index(x) + 1] - x
        rows.append((str(dtype)[6:], finite[-1], torch.finfo(dtype).smallest_normal, above(0.0),
                     len(finite), int(values.isnan().sum()), int(values.isinf().sum()),
                     above(1.0), above(96.0)))
    table(["", "largest", "smallest normal", "smallest", "finite", "NaN", "inf", "step at 1",
           "at 100"], rows, [("float8_e4m3fn", 448, 2**-6, 2**-9, 253, 2, 0, .125, 8),
                             ("float8_e5m2", 57_344, 2**-14, 2**-16, 247, 6, 2, .25, 16)])
    claim("the largest, as the cache's kernels know them", [*kernels.FP8_MAX.values()],
          [row[1] for row in rows])

H100 = (989e12, 3.35e12)  # bf16 FLOP/s and bytes/s, quoted from the data sheet of the SXM card

def product_seconds(batch, n, bits, flops=H100[0], bandwidth=H100[1]):
    """Floor of (batch, n) times (n, n): arithmetic, or the bytes of weight, input and output."""
    moved = bits / 8 * n * n + 2 * 2 * batch * n
    return max(2 * batch * n * n / flops, moved / bandwidth)

def amdahl(share, gain):
    """Speed-up of the whole when `share` of its time becomes `gain` times faster.

    >>> amdahl(1, 4), amdahl(0.5, 1)
    (4.0, 1.0)
    """
    return 1 / (share / gain + 1 - share)

def roofline():
    ridge = H100[0] / H100[1]
    claim("FLOP per byte at the ridge of an H100", round(ridge), 295)
    claim("batch from which arithmetic decides, 16 bits and 4.25",
          [round(ridge * bits / 16) for bits in (16, 4.25)], [295, 78])
    gains = [(b, round(product_seconds(b, 4096, 16) / product_seconds(b, 4096, 4.25), 3))
             for b in (1, 16, 64, 128, 256, 512)]
    table(["batch of 4096 x 4096", "gain of 4 bits"], gains,
          [(1, 3.76), (16, 3.686), (64, 3.474), (128, 2.451), (256, 1.297), (512, 1.0)])
    E, F, KH, L, V, D = 4096, 14336, 8, 32, 128_256, 128  # Llama-3-8B
    layers, one_table = L * (2 * E * E + 2 * E * KH * D + 3 * E * F), V * E
    cache = ns.kv_bytes_per_token(L, KH, D, 2) * 4096
    wide, narrow = ((layers * bits / 8 + 2 * one_table + cache) for bits in (16, 4.25))
    claim("GB a decode step of Llama-3-8B reads at 4,096 tokens", rounded([wide / 1e9,
          narrow / 1e9], 2), [15.55, 5.3])
    claim("ms at least", rounded([x / H100[1] * 1e3 for x in (wide, narrow)], 2), [4.64, 1.58])
    claim("gain", round(wide / narrow, 2), 2.94)
    total = [layers * bits / 8 + 4 * one_table + 2**32 for bits in (16, 4.25)]
    claim("gain in memory, with 4 GiB of cache", round(total[0] / total[1], 1), 2.0)
    claim("0.8 of the time 2, 4 and very many times faster: the whole",
          rounded([amdahl(0.8, gain) for gain in (2, 4, 1e9)], 3), [1.667, 2.5, 5.0])

@example("6.3", "What eight bits can say, and where narrow numbers help", "kernels.py 1")
def formats_and_limits():
    eight_bits()
    roofline()

def nearest(w):
    """Integers."""
    return w.round()

def gptq(w, hessian, quantize):
    """Columns are rounded one after another; what each loses, those still free make up for, so
    that the outputs move least (Frantar et al. 2022). w (N, K); hessian (K, K) = X^T X."""
    w = w.clone()
    for i in range(w.shape[1]):
        column = quantize(w)[:, i]
        lost, w[:, i] = column - w[:, i], column
        if i + 1 < w.shape[1]:
            free = hessian[i + 1 :, i + 1 :]
            w[:, i + 1 :] -= torch.outer(lost, torch.linalg.solve(free, hessian[i + 1 :, i]))
    return w

def output_error(w, other, x):
    return ((w - other) @ x.T).pow(2).mean().item()

def correlated_inputs(num, width, seed):
    """Activations as layers see them: a few directions carry most, some channels are large."""
    mix = torch.randn(width, width, generator=torch.Generator().manual_seed(1)) * torch.linspace(
        3, 0.1, width)[:, None]
    sizes = torch.ones(width)
    sizes[:: 8] = 8
    return torch.randn(num, width, generator=torch.Generator().manual_seed(seed)) @ mix * sizes

def error_compensation():
    w, H = torch.tensor([[.7, .6]]), torch.tensor([[2, 1.5], [1.5, 2]])
    cost = lambda q: round(((q - w) @ H @ (q - w).T).item(), 2)
    claim("GPTQ: w = (.7, .6); nearest, and what that costs", (nearest(w).tolist(),
          cost(nearest(w))), ([[1.0, 1.0]], 0.86))
    states = []
    q = gptq(w, H, lambda state: states.append(state.clone()) or nearest(state))
    claim("   .6 before and after it makes up for what .7 lost",
          rounded([state[0, 1].item() for state in states], 3), [0.6, 0.375])
    claim("   compensated, and what that costs", (q.tolist(), cost(q)), ([[1.0, 0.0]], 0.36))
    w = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)) * 2
    seen, held_out = correlated_inputs(512, 64, 2), correlated_inputs(512, 64, 3)
    hessian = seen.T @ seen + 0.01 * len(seen) * torch.eye(64)
    plain, better = (output_error(w, q, held_out) for q in (nearest(w), gptq(w, hessian, nearest)))
    between("   512 unseen inputs: squared error, nearest's is 1", 0.0, better / plain, 0.7)

def channel_scaling():
    w, x = torch.tensor([[.33, 1.5]]), torch.tensor([[10.0, 1.0]])
    step = 1.5 / 7  # of symmetric codes -7 .. 7
    def error(s):
        scale = torch.tensor([[s, 1.0]])
        q = nearest(w * scale / step) * step / scale
        return round(abs(((q - w) @ x.T).item()), 3)
    claim("AWQ: the first channel as it is, and doubled: error", [error(1.0), error(2.0)],
          [0.986, 0.086])
    w = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    seen, held_out = correlated_inputs(512, 64, 2), correlated_inputs(512, 64, 3)
    def scaled(strength):
        scale = seen.abs().mean(0) ** strength
        return kernels.quantize_int4(w * scale, 32).dequantize() / scale
    best = min(range(10), key=lambda tenths: output_error(w, scaled(tenths / 10), seen)) / 10
    plain, better = (output_error(w, scaled(a), held_out) for a in (0, best))
    between("   512 unseen inputs: squared error, nearest's is 1", 0.0, better / plain, 0.7)

@example("6.4", "Rounding that knows the inputs: GPTQ, AWQ", "kernels.py 7, lessons_kernels.py 1")
def calibrated_rounding():
    error_compensation()
    channel_scaling()

@example("6.5", "One GiB of KV cache in two bytes and in one", "nanoserve.py 2")
def one_gib():
    names = ("bf16", "one byte", "int8 and a scale per token and head")
    blocks = [ns.num_blocks_in(1 << 30, 16, ns.kv_bytes_per_token(28, 8, 128, size, scale))
              for size, scale in ((2, 0), (1, 0), (1, 4))]
    table(["28 layers, 8 heads of 128", "blocks", "slots"],
          [(name, n, n * 16) for name, n in zip(names, blocks)],
          [(names[0], 585, 9360), (names[1], 1170, 18_720), (names[2], 1134, 18_144)])
    claim("times the blocks of bf16, scales included", round(blocks[2] / blocks[0], 3), 1.938)


# ==================================================================================================
# 2  Speculation
# ==================================================================================================
# Several guessed tokens are judged in the step that would have made one. The rule makes the law of
# the output the target's, whatever the guesses; only the number of steps depends on them.

P, Q = ([Fraction(n, 10) for n in law] for law in ((6, 3, 1), (3, 4, 3)))  # target, drafter

def judged(p, q, draft):
    """Law of the token in a row that faces `draft`, drawn from q, by the engine's rule: exact, for
    min(1, p/q) lies on the grid of lucks that are tried. p, q: Fractions."""
    luck = (np.arange(n := (p[draft] / q[draft]).denominator) + 0.5) / n
    rows = lambda law: torch.tensor([float(x) for x in law], dtype=torch.float64).expand(n, -1)
    laws = ns.verified_law(rows(p), rows(q), torch.full((n,), draft), torch.from_numpy(luck))
    laws = laws / laws.sum(1, keepdim=True)
    return [Fraction(x).limit_denominator(10**6) for x in laws.mean(0).tolist()]

def decimals(law):
    return rounded([float(x) for x in law], 4)

@example("6.6", "A draft is accepted or replaced; the law is the target's", "nanoserve.py 10-12")
def acceptance():
    laws = [judged(P, Q, draft) for draft in range(3)]
    accepted = [Q[draft] * laws[draft][draft] for draft in range(3)]
    claim("p = .6 .3 .1, q = .3 .4 .3: drafted and accepted", decimals(accepted), [.3, .3, .1])
    claim("   rejected", decimals([1 - sum(accepted)]), [.3])
    late = ns.verified_law(*(torch.tensor([[float(x) for x in law]]) for law in (P, Q)),
                           torch.tensor([2]), torch.tensor([0.999]))
    claim("   then the token comes from", rounded(late / late.sum(), 4), [[1, 0, 0]])
    tokens = [sum(q * law[token] for q, law in zip(Q, laws)) for token in range(3)]
    claim("   all tokens together: p, in fractions", [str(x) for x in tokens], [str(x) for x in P])
    biased = [a + Fraction(3, 10) * p for a, p in zip(accepted, P)]
    claim("   replaced from p itself they were", decimals(biased), [.48, .39, .13])
    claim("   total variation from p", float(sum(abs(a - b) for a, b in zip(biased, P)) / 2), .12)
    sim, rows = Simulation(64, 4, 64), []
    sim.add("R", [11, 12, 13, 14], 12)
    rounds = [([], [21]), ([22, 23, 99], [22, 23, 24]), ([25, 26, 27], [25, 26, 27, 28]),
              ([91, 92, 93], [29]), ([30, 31, 32], [30, 31, 32, 33])]
    for drafts, tokens in rounds:
        sim.scheduler.set_drafts("R", drafts)
        done = sim.step(lambda request: tokens)
        named = [i for i in done.tables["R"] if sim.kv.pool.blocks[i].block_hash is not None]
        rows.append((str(drafts), done.sched["R"], done.frontier["R"], *sim.progress("R"), named))
    table(["drafts of R", "scheduled", "computed", "then", "all", "blocks published"], rows[:4], [
        ("[]", 4, 4, 4, 5, [1]), ("[22, 23, 99]", 4, 8, 7, 8, [1]),
        ("[25, 26, 27]", 4, 11, 11, 12, [1, 2]), ("[91, 92, 93]", 4, 15, 12, 13, [1, 2, 3])])
    claim("round 5 ends it: scheduled, computed, then, all", rows[4][1:5], (4, 16, 16, 16))
    claim("   its 12 tokens are 21 .. 32",
          sim.requests["R"].all_token_ids[4:] == [*range(21, 33)], True)
    def found(token):
        before = sim.kv.stats.hits
        sim.add(str(token), [11, 12, 13, 14, 21, 22, 23, token, 5], 1)
        sim.step()
        return sim.kv.stats.hits - before
    claim("a prompt with the rejected 99, with 24 instead: hits", [found(99), found(24)], [4, 8])
    params = ns.SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    outputs, steps = [], []
    for options in ({}, {"speculative_model": "toy"}):
        llm = ns.LLM(model="toy", num_kv_blocks=16, **options)
        done = llm.generate([{"prompt_token_ids": [11, 12, 13, 14]}], params, use_tqdm=False)
        outputs.append(done[0].outputs[0].token_ids)
        steps.append(llm.core.counts["steps"])
    claim("60 tokens of the toy, alone and with itself as drafter: the same",
          outputs[0] == outputs[1], True, "measured")
    claim("   steps alone", steps[0], 60, "measured")
    between("   steps with at most 4 drafts", 60 // 5, steps[1], 20)

def toy_law(context, name):
    """A law over three tokens that depends on all tokens before: exact fractions."""
    digest = hashlib.sha256(repr((name, context)).encode()).digest()
    weights = [1 + digest[i] % 7 for i in range(3)]
    return [Fraction(w, sum(weights)) for w in weights]

def one_round(num_drafts):
    """{the tokens a round gives: probability}, all drafts and lucks enumerated."""
    alive, ended = {(): Fraction(1)}, Counter()
    for _ in range(num_drafts):
        accepted = Counter()
        for tokens, share in alive.items():
            p, q = toy_law(tokens, "p"), toy_law(tokens, "q")
            for draft in range(3):
                for token, chance in enumerate(judged(p, q, draft)):
                    into = accepted if token == draft else ended
                    into[(*tokens, token)] += share * q[draft] * chance
        alive = accepted
    for tokens, share in alive.items():  # the bonus
        for token, chance in enumerate(toy_law(tokens, "p")):
            ended[(*tokens, token)] += share * chance
    return ended

def speculative_gain(a, k, draft, verify=1.0):
    """Speed-up over plain steps; a draft costs `draft` of a step, a round's verification `verify`.

    >>> speculative_gain(0.5, 1, draft=0.5)       # 1.5 tokens for 1.5 steps
    1.0
    """
    return expected_tokens(a, k) / (k * draft + verify)

@example("6.7", "Exact for whole sequences; what it gains", "nanoserve.py 11, 12")
def exactness():
    ended = one_round(2)
    def after(tokens, start):  # plain steps for what the round left open
        steps = (toy_law(tokens[:i], "p")[tokens[i]] for i in range(start, len(tokens)))
        return math.prod(steps, start=Fraction(1))
    equal = sum(sum(ended[s[:n]] * after(s, n) for n in (1, 2, 3)) == after(s, 0)
                for s in product(range(3), repeat=3))
    claim("2 drafts: sequences of 3 tokens with the target's probability", equal, 27)
    shares = [sum(x for s, x in ended.items() if len(s) == n) for n in (1, 2, 3)]
    claim("tokens per round: 1, 2, 3", [str(x) for x in shares], ["14/165", "83/264", "793/1320"])
    mean = sum(n * x for n, x in enumerate(shares, 1))
    claim("   on average", f"{mean} = {float(mean):.3f}", "1107/440 = 2.516")
    n = 300_000
    p, q = (torch.tensor([float(x) for x in law]).expand(n, -1) for law in (P, Q))
    noise = lambda stream: torch.from_numpy(ns.uniform(np.full(n, 7), np.arange(n), stream))
    drafts = ns.draw(q, noise(ns.DRAFTING))
    tokens = ns.draw(ns.verified_law(p, q, drafts, noise(ns.ACCEPTANCE)), noise(0))
    for token, share in enumerate(P):  # four standard deviations: one run in 5,000 is outside
        share, sigma = float(share), math.sqrt(share * (1 - share) / n)
        between(f"300,000 draws, seed 7: share of token {token}", share - 4 * sigma,
                (tokens == token).double().mean().item(), share + 4 * sigma)
    claim("standard deviation of the first", round(math.sqrt(.6 * .4 / n), 4), .0009)
    claim("a = .7, k = 3: tokens per round", round(expected_tokens(.7, 3), 3), 2.533)
    claim("a = .5, k = 5, a draft costs .2: slower", round(speculative_gain(.5, 5, .2), 3), .984)
    claim("a = .9, k = 3, a full batch, verifying costs 4: slower",
          round(speculative_gain(.9, 3, .05, verify=4), 3), .829)


# ==================================================================================================
# 3  FlashAttention
# ==================================================================================================
# Lesson 7. Attention is exact and stays quadratic; what changes is which numbers leave the chip,
# and how many programs can work at once. The counts are of section 11 in kernels.py.

ON_CHIP = 192 * 1024 // 2  # 16-bit elements of fast memory: an A100's

@example("7.1", "What one head moves between memory and chip", "kernels.py 11")
def memory_traffic():
    rows = []
    for N in (1024, 2048, 4096, 8192):
        moved = kernels.hbm_elements(N, 64, ON_CHIP, 128, 128)
        gain = lambda name: round(moved["standard"] / moved[name], 2)
        rows.append((N, moved["standard"], moved["v1"], gain("v1"), moved["v2"], gain("v2"),
                     moved["v2_causal"]))
    table(["elements, D = 64", "standard", "v1", "gain", "v2", "gain", "v2 causal"], rows, [
        (1024, 4_456_448, 733_184, 6.08, 1_180_672, 3.77, 721_920),
        (2048, 17_301_504, 2_670_592, 6.48, 4_458_496, 3.88, 2_492_416),
        (4096, 68_157_440, 9_355_264, 7.29, 17_305_600, 3.94, 9_179_136),
        (8192, 270_532_608, 36_372_480, 7.44, 68_165_632, 3.97, 35_135_488)])
    for causal, want in ((False, 1_180_672), (True, 721_920)):
        moved, x = [], torch.zeros(1024, 64)
        kernels.tiled_attention(x, x, x, 128, 128, causal, moved)
        claim(f"the tiled loop itself at 1,024, causal {causal}: moved", sum(moved), want,
              "measured")
    claim("GFLOP of a head at 8,192: the same for all", round(4 * 8192**2 * 64 / 1e9, 2), 17.18)
    claim("GiB of the scores of 32 heads at 8,192, 16 bits", 32 * 8192**2 * 2 / 2**30, 4)

@example("7.2", "Softmax in two tiles", "kernels.py 11")
def online():
    rows = [[0., 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    tiles = [([1000., 999], rows[:2]), ([1002., 998], rows[2:])]
    states, out, lse = kernels.online_softmax(tiles)
    table(["after tile", "m", "l", "A"],
          [(i, m, round(l, 6), rounded(A, 6)) for i, (m, l, A) in enumerate(states, 1)],
          [(1, 1000, 1.367879, [1.103638, 2.471518, 3.839397]),
           (2, 1002, 1.203438, [6.314202, 7.51764, 8.721078])])
    claim("between them A and l shrink to",
          round(math.exp(states[0][0] - states[1][0]), 6), .135335)
    claim("o = A / l", rounded(out, 6), [5.246803, 6.246803, 7.246803])
    claim("lse = m + log l", round(lse, 6), 1002.185182)
    exact = torch.softmax(torch.tensor([1000., 999, 1002, 998], dtype=torch.float64), 0)
    claim("softmax of all four at once", rounded(exact @ torch.tensor(rows).double(), 6),
          rounded(out, 6))
    claim("without the rescale", rounded(kernels.online_softmax(tiles, rescale=False)[1], 3),
          [3.046, 4.046, 5.046])
    q, k, v = (torch.randn(1, 40, heads, 16, generator=torch.Generator().manual_seed(i))[0]
               for i, heads in enumerate((4, 2, 2)))
    start = torch.tensor([0, 40], dtype=torch.int32)
    out, _ = kernels.flash_attention(q, k, v, start, start, 40, 0.25)
    heads = zip(q.unbind(1), *(x.repeat_interleave(2, 1).unbind(1) for x in (k, v)))
    tiled = torch.stack([kernels.tiled_attention(*head, 16, 8, True)[0] for head in heads], 1)
    between("4 heads over 2, causal: the engine's kernel less the tiles", 0.0,
            (out - tiled).abs().max().item(), 1e-5)

@example("7.3", "Backward from what the forward kept: o and lse", "kernels.py 11")
def backward():
    g = torch.Generator().manual_seed(0)
    q, k, v, do = torch.randn(4, 37, 8, dtype=torch.float64, generator=g)
    for causal in (False, True):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        scores = leaves[0] @ leaves[1].T / math.sqrt(8)
        if causal:
            scores = scores.masked_fill(torch.ones(37, 37, dtype=torch.bool).triu(1), -math.inf)
        exact = torch.autograd.grad(torch.softmax(scores, 1) @ leaves[2], leaves, do)
        out, lse = kernels.tiled_attention(q, k, v, 8, 5, causal)
        grads = kernels.tiled_backward(do, q, k, v, out, lse, 8, 5, causal)
        worst = max((a - b).abs().max().item() for a, b in zip(grads, exact))
        between(f"tiles of 8 x 5, causal {causal}: dq, dk, dv less autograd's", 0.0, worst, 1e-13)

@example("7.4", "More programs, and pieces that merge", "kernels.py 11")
def parallel():
    use = kernels.grid_use(1, 8, 8192, 128, 132)
    claim("8 heads, 8,192 tokens, 132 processors: programs of v1", use["v1"], 8)
    claim("   which keep busy", use["v1_busy"], 0.061)
    claim("   programs of v2, waves", [use["v2"], use["v2_waves"]], [512, 4])
    costs = kernels.sliced_costs(8192, 64, 128, 128, 4)
    claim("warps that share keys (sliced K): sums per Q tile", costs["sliced_k"], 1_572_864)
    claim("warps that share rows (sliced Q)", costs["sliced_q"], 0)
    claim("divisions per head: v1, v2", [costs["v1_divisions"], costs["v2_divisions"]],
          [33_554_432, 524_288])
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(n, 8, dtype=torch.float64, generator=g) for n in (1, 100, 100))
    for cuts in ([0, 100], [0, 16, 100], [0, 1, 2, 50, 99, 100]):
        pieces = [kernels.tiled_attention(q, k[a:b], v[a:b], 1, 8) for a, b in zip(cuts, cuts[1:])]
        out, _ = kernels.merge_pieces(*(torch.cat(x) for x in zip(*pieces)))
        exact = torch.softmax(k @ q[0] / math.sqrt(8), 0) @ v
        between(f"100 tokens cut at {cuts}: merged by lse, off by", 0.0,
                (out - exact).abs().max().item(), 1e-14)

@example("7.5", "Fewer pairs, or approximate ones", "kernels.py 11")
def approximations():
    full, kept = kernels.attention_pairs(4096, 512, 4)
    claim("4,096 tokens: causal pairs", full, 8_390_656)
    claim("window of 512 and 4 global tokens", kept, 1_980_666)
    claim("   which are, %", round(100 * kept / full, 2), 23.61)
    errors = kernels.favor_error()
    table(["random features", "relative error"], [(n, round(x, 2)) for n, x in errors.items()],
          [(16, .87), (64, .46), (256, .38), (1024, .28)], "measured")

@example("7.6", "Products of one tile beside the softmax of the next", "kernels.py 11")
def schedules():
    ticks = kernels.schedule_ticks(8, load=1, matmul=2, softmax=2)
    table(["8 tiles: load 1, products 2, softmax 2", "ticks", "matrix unit busy, %"],
          [(name, n, round(100 * 8 * 2 / n, 1)) for name, n in ticks.items()],
          [("serial", 40, 40.0), ("producer", 33, 48.5), ("ping_pong", 19, 84.2)])
    print("      ping_pong   products of tile  0 1 2 3 4 ..   on the one matrix unit, in turn\n"
          "                  softmax of tile     0 1 2 3 ..   of one group, beside the other's")

@example("7.7", "Eight-bit attention and its outliers", "kernels.py 11")
def eight_bit_attention():
    R, spike = kernels.hadamard(64), torch.zeros(64)
    spike[3] = 8
    claim("R R^T less the identity: largest",
          round((R @ R.T - torch.eye(64)).abs().max().item(), 6), 0.0)
    claim("an outlier of 8, rotated: largest", (spike @ R).abs().max().item(), 1.0)
    error = kernels.fp8_attention_error()
    for name, want in (("tensor", .01949), ("block", .01588), ("rotated", .01142)):
        between(f"output error, scales: {name}", 0.99 * want, error[name], 1.01 * want)

@example("7.8", "Candidate, possible, selected, executed", "kernels.py 10, nanoserve.py 13")
def backends():
    facts = dict(device="cpu", dtype=torch.float32, kv_dtype=torch.float32, head_dim=64,
                 block_size=16, group=3)
    chosen, lines = kernels.select_attention(**facts)
    print("\n".join(f"      {line}" for line in lines))
    claim("reasons against the selected one", chosen.why_not(**facts), None)
    refused = next(iter(kernels.ATTENTION))
    try:
        kernels.select_attention(refused, **{**facts, "head_dim": 512, "group": 32})
        answer = "selected"
    except ValueError as error:
        answer = str(error).split(":")[0]
    claim("heads of 512 in groups of 32, asked for by name", answer,
          f"attention backend {refused} cannot run")
    llm = ns.LLM(model="toy", num_kv_blocks=16)
    backend = kernels.ATTENTION[llm.core.attention_name]
    before = backend.executed
    llm.generate(["abc"], ns.SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    claim("executed for 4 tokens of the toy: steps x layers", backend.executed - before,
          llm.core.counts["steps"] * llm.core.runner.model.config.num_layers, "measured")
