"""lessons.py: the articles, run: each worked example executed by the engine's own code.

    python bench.py lesson 1 | 2 | ... | 7 | all | 4.5        an article, all, or one example
    python bench.py capacity --config Qwen3-0.6B --tp 4 --lengths 17 32
    python bench.py simulate --budget 6 --chunk 4 A:0:4:2 B:0:8:3 C:1:3:2
    python bench.py slots --table 7,3,11 --block 4 --pos 9

An example's number is its place in the articles (4.5 is the fifth part of the fourth). Each figure
is printed with where it comes from (computed, measured, quoted) and compared with the article's;
the first that differs ends the run with one sentence and exit status 2. Articles 6 and 7 are in
lessons_kernels.py.

CONTENTS
     1  Showing and comparing
     2  Tools                    capacity, slots, simulate
     3  KV cache                 lesson 1
     4  Architecture             lesson 2
     5  PagedAttention           lesson 3
     6  Prefix caching           lesson 4
     7  Scheduling               lesson 5
"""

from __future__ import annotations

import importlib
import itertools
import math
import pickle
import random
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import checkpoints
import kernels
import nanoserve as ns
from bench import positive
from checkpoints import require


# ==================================================================================================
# 1  Showing and comparing
# ==================================================================================================
# Problem: a worked example in a text is believed or not.  Idea: it is a function here that calls
# the engine, and every number it shows is held against the number of the text.
#
#     @example("4.5", ...)  ──► claim("table of R", got, want)  ──► printed, or WrongNumber
#
# Invariant: nothing the engine has is computed here a second time; nothing is shown unchecked.
# Try: change a + to a - in slot_of (nanoserve.py, section 2): python bench.py lesson 3.

Example = namedtuple("Example", "title where run")  # where: the sections it executes
EXAMPLES = {}  # "4.5": Example, in the order of the articles

class WrongNumber(ValueError):
    """What was computed is not what the article says."""

def example(number, title, where):
    def keep(run):
        EXAMPLES[number] = Example(title, where, run)
        return run
    return keep

def show(value):
    """
    >>> show(286720), show(0.98612), show([1, 2]), show("x"), show((2, 0.5))
    ('286,720', '0.98612', '[1, 2]', 'x', '(2, 0.5)')
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"

def claim(what, got, want, source="computed", within=0.0):
    """Print one figure; WrongNumber if it is farther than `within` from the article's."""
    near = got == want if not within else abs(got - want) <= within
    if not near:
        raise WrongNumber(f"{what} is {show(got)}, the article says {show(want)}")
    print(f"      {what:54s} {show(got):>26s}  {source}")

def between(what, low, got, high, source="measured"):
    """Print a figure that depends on the machine or on a draw; WrongNumber outside its bounds."""
    if not low <= got <= high:
        raise WrongNumber(f"{what} is {show(got)}, not between {show(low)} and {show(high)}")
    print(f"      {what:54s} {show(got):>26s}  {source}, {show(low)} to {show(high)}")

def table(header, rows, want=None, source="computed"):
    """Print rows under a header; with `want`, WrongNumber names the first row that differs."""
    if want is not None and rows != want:
        pairs = itertools.zip_longest(rows, want)
        got, right = next((a, b) for a, b in pairs if a != b)
        raise WrongNumber(f"row {got} should be {right}, by the article")
    cells = [header] + [[show(x) for x in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    for row in cells:
        first, *rest = [f"{x:{'<' if i == 0 else '>'}{widths[i]}}" for i, x in enumerate(row)]
        tag = f"  {source}" if row is header and want is not None else ""
        print(f"      {'  '.join([first, *rest])}{tag}")

def run_lesson(args):
    """Run the examples that a lesson's number names; the first wrong number ends it."""
    importlib.import_module("lessons_kernels")  # its examples enter themselves
    wanted = args["number"]
    chosen = [n for n in EXAMPLES if wanted in ("all", n, n.split(".")[0])]
    require(chosen, f"there is no lesson {wanted}: 1 to 7, all, or one of {', '.join(EXAMPLES)}")
    for number in chosen:
        title, where, run = EXAMPLES[number]
        print(f"\n{number}   {title}   [{where}]")
        try:
            run()
        except WrongNumber as error:
            raise WrongNumber(f"lesson {number} ({title}): {error}") from None
    print(f"\n{len(chosen)} example{'s' * (len(chosen) > 1)}, every number as in the articles")

def add_lesson_options(parser):
    parser.add_argument("number", metavar="1..7|all|4.5", help="an article, all, or one example")


# ==================================================================================================
# 2  Tools
# ==================================================================================================
# Problem: what fits, who runs when, where is a token: three questions that are asked with other
# numbers than the article's.  Idea: commands around the functions that the engine asks itself.
#
#     capacity   config.json ─► bytes per token ─► per rank ─► blocks ─► requests
#     simulate   arrivals ─► the Scheduler, the pool, no model ─► who computes what in each round
#     slots      position ─► block of the table, offset ─► slot
#
# Invariant: a simulated round is a real one; check_invariants (nanoserve.py, 17) holds after it.
# Why: tensor parallelism, pipeline stages and replicas are arithmetic here: the engine is one rank.

def shape(layers, width, heads, kv_heads, head_dim, mlp, vocab, tied=False, **more):
    """A published config.json, as far as the arithmetic needs it."""
    return dict(num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads,
                num_key_value_heads=kv_heads, head_dim=head_dim, intermediate_size=mlp,
                vocab_size=vocab, tie_word_embeddings=tied, max_position_embeddings=8192,
                rms_norm_eps=1e-5, **{"architectures": ["LlamaForCausalLM"], **more})

QWEN3 = {"architectures": ["Qwen3ForCausalLM"]}
SHAPES = {
    "SmolLM2-135M": shape(30, 576, 9, 3, 64, 1536, 49152, True),
    "Qwen3-0.6B": shape(28, 1024, 16, 8, 128, 3072, 151936, True, **QWEN3),
    "Mistral-7B-v0.1": shape(32, 4096, 32, 8, 128, 14336, 32000),
    "Llama-3-8B": shape(32, 4096, 32, 8, 128, 14336, 128256),
    "Qwen3-8B": shape(36, 4096, 32, 8, 128, 12288, 151936, **QWEN3),
    "Llama-3.1-70B": shape(80, 8192, 64, 8, 128, 28672, 128256),
    "Qwen3-30B-A3B": shape(48, 2048, 32, 4, 128, 768, 151936, num_experts=128, **QWEN3),
}
CACHES = {"bf16": (2, 0), "fp32": (4, 0), "fp8": (1, 0), "int8": (1, 4)}  # bytes, of a scale

def model_shape(name):
    """ModelConfig of a row of SHAPES, a config.json or the folder it is in."""
    if name in SHAPES:
        return checkpoints.ModelConfig.from_dict(SHAPES[name], name)
    path = Path(name, "config.json") if Path(name).is_dir() else Path(name)
    require(path.is_file(), f"--config: {name} is no config.json, no folder with one and none of "
            f"{', '.join(SHAPES)}")
    return checkpoints.ModelConfig.from_dict(checkpoints.read_json(path), str(path))

def count_parameters(config, experts=1):
    """Parameters of a Llama-like model; with experts, a router beside each layer's MLPs."""
    E, D = config.hidden_size, config.head_dim
    qk_norm = 2 * D if ns.ARCHS[config.architecture].qk_norm else 0
    attention = 2 * E * D * (config.num_heads + config.num_kv_heads) + qk_norm
    mlp = 3 * E * config.intermediate_size * experts + (E * experts if experts > 1 else 0)
    tables = config.vocab_size * E * (1 if config.tie_word_embeddings else 2)
    return tables + config.num_layers * (attention + mlp + 2 * E) + E

def heads_per_rank(config, tp):
    """KV heads each of tp ranks keeps: a share, or one that several ranks hold a copy of."""
    H, KH = config.num_heads, config.num_kv_heads
    require(H % tp == 0, f"--tp {tp} does not divide {H} query heads")
    require(KH % tp == 0 or tp % KH == 0, f"--tp {tp} and {KH} KV heads do not divide each other")
    return max(1, KH // tp)

def stage_layers(num_layers, pp):
    """Layers of each pipeline stage. What is left over goes to the stages before the last, which
    has the logits to do.

    >>> stage_layers(28, 3), stage_layers(80, 3), stage_layers(30, 4)
    ([9, 10, 9], [27, 27, 26], [7, 8, 8, 7])
    """
    require(pp <= num_layers, f"--pp {pp} stages are more than {num_layers} layers")
    layers = [num_layers // pp] * pp
    for i in range(num_layers % pp):
        layers[-2 - i] += 1
    return layers

def rank_bytes_per_token(config, tp=1, layers=None, cache="bf16"):
    layers = config.num_layers if layers is None else layers
    return ns.kv_bytes_per_token(layers, heads_per_rank(config, tp), config.head_dim,
                                 *CACHES[cache])

def global_rank(dp_rank, stage, tp_rank, pp, tp):
    """
    >>> global_rank(1, 0, 1, pp=1, tp=4)       # of 2 replicas x 4 ranks
    5
    """
    return (dp_rank * pp + stage) * tp + tp_rank

def run_capacity(args):
    """Print what a token, a request and a pool cost on each rank."""
    config, BS = model_shape(args["config"]), args["block_size"]
    tp, pp, dp, cache = args["tp"], args["pp"], args["dp"], args["dtype"]
    stages = stage_layers(config.num_layers, pp)
    whole = rank_bytes_per_token(config, cache=cache)
    per_stage = [rank_bytes_per_token(config, tp, layers, cache) for layers in stages]
    kib, mib = 1024, 2**20
    print(f"{args['config']}: {config.num_layers} layers x {config.num_kv_heads} KV heads x "
          f"{config.head_dim}, {cache}: {whole / kib:g} KiB per token          (all: computed)")
    copies = tp * heads_per_rank(config, tp) / config.num_kv_heads
    print(f"TP {tp} x PP {pp} x DP {dp} = {tp * pp * dp} ranks; each KV head is held "
          f"{copies:g} x in a replica")
    table(["stage", "layers", "KiB per token and rank", "ranks of replica 0"],
          [(i, n, size / kib, [global_rank(0, i, t, pp, tp) for t in range(tp)][:8])
           for i, (n, size) in enumerate(zip(stages, per_stage))])
    lengths = [(n, n, ns.cdiv(n, BS)) for n in args["lengths"]]
    lengths.append(("sum", *(sum(row[i] for row in lengths) for i in (1, 2))))
    table(["length", "blocks", "MiB used", "MiB in blocks", "MiB per rank, in blocks"],
          [(name, b, n * whole / mib, b * BS * whole / mib, b * BS * max(per_stage) / mib)
           for name, n, b in lengths])
    memory = ns.parse_bytes(args["memory"], "--memory")
    num_blocks = ns.num_blocks_in(memory, BS, max(per_stage))
    usable = ns.slots_of(num_blocks, BS)
    require(num_blocks > 1, f"--memory {args['memory']} holds no block of "
            f"{ns.show_bytes(BS * max(per_stage))}")
    fits = (num_blocks - 1) // ns.cdiv(max(args["lengths"]), BS)
    print(f"pool of {args['memory']} per rank: {num_blocks:,} blocks, one of them null: {usable:,} "
          f"tokens, {fits:,} requests of {max(args['lengths']):,} at once")
    if dp > 1:
        print(f"{dp} replicas have {dp} pools: a request needs all its blocks in one of them")

def add_capacity_options(parser):
    add = parser.add_argument
    add("--config", required=True, help="config.json, its folder, or " + ", ".join(SHAPES))
    for name, words in (("tp", "ranks that share a layer's heads"), ("pp", "pipeline stages"),
                        ("dp", "replicas")):
        add(f"--{name}", type=positive, default=1, help=words)
    add("--dtype", choices=CACHES, default="bf16", help="of the KV cache (default: bf16)")
    add("--block-size", type=positive, default=16)
    add("--lengths", type=positive, nargs="+", default=[8192], help="tokens of each request")
    add("--memory", default="16GiB", help="KV cache of one rank (default: 16GiB)")

def run_slots(args):
    """Print where a position lies, step by step."""
    BS, ids = args["block"], args["table"]
    for pos in args["pos"]:
        require(0 <= pos < len(ids) * BS, f"position {pos} is outside: {len(ids)} blocks of {BS} "
                f"hold positions 0 to {len(ids) * BS - 1}")
        i = pos // BS
        print(f"position {pos}: block {pos} // {BS} = {i} of the table, offset {pos} % {BS} = "
              f"{pos % BS}; table[{i}] = {ids[i]}; slot {ids[i]} * {BS} + {pos % BS} = "
              f"{ns.slot_of(ids[i], pos, BS)}")

def add_slots_options(parser):
    ids = lambda text: [int(word) for word in text.split(",")]
    ids.__name__ = "list of block ids"
    parser.add_argument("--table", type=ids, required=True, help="block ids, e.g. 7,3,11")
    parser.add_argument("--block", type=positive, required=True, help="tokens per block")
    parser.add_argument("--pos", type=int, nargs="+", required=True, help="positions to look up")

# What one round did. sched, tables, frontier, sampled: by request.
Round = namedtuple("Round", "plan sched preempted tables frontier sampled")

class Simulation:
    """The engine's Scheduler and KVCacheManager with nobody behind them: the caller is the model.

    config: fields of EngineConfig that the scheduler reads."""
    def __init__(self, num_blocks=1000, block_size=16, budget=8192, caching=True, window=0,
                 asynchronous=False, **config):
        config = {"max_num_seqs": min(256, budget), "max_model_len": 1 << 20, **config}
        config = ns.EngineConfig(max_num_batched_tokens=budget, **config)
        self.kv = ns.KVCacheManager(num_blocks, block_size, caching, window, budget)
        self.scheduler = ns.Scheduler(config, self.kv, async_scheduling=asynchronous)
        self.requests, self.rounds = {}, []  # finished requests stay readable

    def add(self, name, token_ids, max_tokens, eos=(), **params):
        params = ns.SamplingParams(max_tokens=max_tokens, temperature=0, **params)
        message = ns.EngineCoreRequest(name, list(token_ids), params, eos, [], len(self.requests))
        request = ns.Request(message, self.kv.block_size)
        self.scheduler.add_request(request)
        self.requests[name] = request

    def plan(self):
        """Schedule a round whose results come later."""
        plan = self.scheduler.schedule()
        found = {name: self.requests[name] for name in plan.num_scheduled_tokens}
        self.rounds.append(Round(
            plan, dict(plan.num_scheduled_tokens), plan.preempted_req_ids,
            {name: self.kv.block_ids(r) for name, r in found.items()},
            {name: r.num_computed_tokens for name, r in found.items()}, {}))
        self.ready = {name for name, r in found.items() if not r.is_prefill_chunk}
        return self.rounds[-1]

    def update(self, done, sample=lambda request: [7], ready=None):
        """The results of a planned round: sample(request) -> the tokens it got."""
        output = ns.ModelRunnerOutput()
        for name in self.ready if ready is None else ready:
            if name in self.scheduler.requests:
                output.sampled_token_ids[name] = list(sample(self.requests[name]))
        news = self.scheduler.update_from_output(done.plan, output)
        done.sampled.update((entry.request_id, entry.new_token_ids) for entry in news)
        return done

    def step(self, sample=lambda request: [7]):
        done = self.update(self.plan(), sample)
        ns.check_invariants(self)
        return done

    def run(self, arrivals=None, sample=lambda request: [7]):
        """All rounds to the end. arrivals: {round: [arguments of add]}"""
        arrivals = dict(arrivals or {})
        while arrivals or self.scheduler.requests:
            for request in arrivals.pop(len(self.rounds), []):
                self.add(*request[:3], **dict(request[3:]))
            done = self.step(sample)
            stuck = self.scheduler.requests and not (done.sched or done.preempted or arrivals)
            require(not stuck, f"round {len(self.rounds) - 1}: nobody can run, the first in line "
                    "needs more than the budget")
        return self.rounds

    def total(self):
        return sum(sum(done.sched.values()) for done in self.rounds)

    def progress(self, name):
        """(computed, all) tokens of a request."""
        return self.requests[name].num_computed_tokens, self.requests[name].num_tokens

    def show(self):
        """A line per round: tokens of each request, "x" where it lost its blocks."""
        names, lines = list(self.requests), []
        for i, done in enumerate(self.rounds):
            cell = lambda name: "x" if name in done.preempted else done.sched.get(name, "-")
            words = [name + (" ends" if self.last_round(name) == i else "")
                     for name in done.sampled]
            lines.append((i, *map(cell, names), sum(done.sched.values()), ", ".join(words)))
        header = ["round", *names, "sum", "sampled"]
        lines.append(("computed", *(self.progress(name)[0] for name in names), self.total(), ""))
        lines.append(("all", *(self.progress(name)[1] for name in names), "", ""))
        table(header, lines)

    def last_round(self, name):
        return max(i for i, done in enumerate(self.rounds) if name in done.sampled)

def read_arrivals(specs):
    """{round: [arguments of Simulation.add]} of ["A:0:4:2", ...]: id:arrival:prompt:output, and
    :priority if need be. All prompts differ."""
    arrivals, names = {}, set()
    for i, spec in enumerate(specs):
        name, *numbers = spec.split(":")
        good = name and len(numbers) in (3, 4) and all(n.lstrip("-").isdigit() for n in numbers)
        require(good, f"a request is id:arrival:prompt:output[:priority], got {spec!r}")
        arrival, prompt, output, priority = [*map(int, numbers), 0][:4]
        require(arrival >= 0 and prompt > 0 and output > 0 and name not in names,
                f"{spec!r}: ids differ, arrival is at least 0, prompt and output are at least 1")
        names.add(name)
        ids = range(10**6 * i, 10**6 * i + prompt)
        arrivals.setdefault(arrival, []).append((name, ids, output, ("priority", priority)))
    return arrivals

def run_simulate(args):
    """Print the rounds of the real scheduler for these requests."""
    sim = Simulation(
        args["blocks"], args["block_size"], args["budget"], not args["no_prefix_caching"],
        max_num_seqs=min(args["seats"], args["budget"]), scheduling_policy=args["policy"],
        long_prefill_token_threshold=args["chunk"], reserve_full_sequence=not args["no_reserve"])
    sim.run(read_arrivals(args["request"]))
    sim.show()
    stats = sim.kv.stats
    print(f"preemptions {sim.scheduler.num_preemptions}, prefix hits {stats.hits} tokens, "
          f"{stats.preempted_hits} after preemption, {sim.kv.pool.num_free} blocks free "
          "at the end          (computed)")

def add_simulate_options(parser):
    add = parser.add_argument
    add("request", nargs="+", help="id:arrival:prompt:output[:priority], e.g. A:0:4:2")
    add("--budget", type=positive, default=2048, help="tokens per round (default: 2048)")
    add("--chunk", type=int, default=0, help="largest share of one request; 0 = the budget")
    add("--blocks", type=positive, default=1000, help="of the pool, the null block included")
    add("--block-size", type=positive, default=16)
    add("--seats", type=positive, default=256, help="requests that run at once")
    add("--policy", choices=ns.POLICIES, default="fcfs")
    add("--no-prefix-caching", action="store_true")
    add("--no-reserve", action="store_true", help="admit although the whole input may not fit")


# ==================================================================================================
# 3  KV cache
# ==================================================================================================
# Lesson 1. Keys and values of a position never change, so each is computed once and kept: the work
# of generating falls from quadratic to linear, and memory becomes what limits the batch.

@example("1.1", "One stacked matrix gives Q, K and V", "nanoserve.py 4, 6")
def fused_projection():
    config = ns.read_model_config(checkpoints.Toy())
    backend = kernels.ATTENTION["torch"]
    model = ns.Model(checkpoints.Toy(), config, torch.float32, torch.device("cpu"), backend, 64)
    E, D, H, KH = config.hidden_size, config.head_dim, config.num_heads, config.num_kv_heads
    x = torch.randn(3, E, generator=torch.Generator().manual_seed(0))
    stacked = model.layers[0][1].qkv_proj(x).split([H * D, KH * D, KH * D], 1)
    for name, heads, got in zip("qkv", (H, KH, KH), stacked):
        weight = checkpoints.Toy().take(f"model.layers.0.self_attn.{name}_proj.weight",
                                        (heads * D, E))
        claim(f"{name} of 3 tokens: {heads} heads of {D}, largest difference",
              round((got - x @ weight.T).abs().max().item(), 4), 0.0)

@example("1.2", "A rotated score depends on the distance only", "kernels.py 2, nanoserve.py 6")
def rotation():
    cos_sin = ns.rope_table(ns.read_model_config(checkpoints.Toy()), 2048, torch.device("cpu"))
    q, k = torch.randn(2, 1, 1, 16, generator=torch.Generator().manual_seed(1))
    def score(i, j):
        turned = q.clone(), k.clone()
        for x, pos in zip(turned, (i, j)):
            kernels.rope_ref(x, cos_sin, torch.tensor([pos]))
        return (turned[0] * turned[1]).sum().item()
    near, plain = score(5, 2), (q * k).sum().item()
    for pos in (105, 1003):
        claim(f"score of positions {pos}, {pos - 3} less that of 5, 2",
              round(score(pos, pos - 3) - near, 3), 0.0)
    claim("score of positions 0, 0 less the plain product", round(score(0, 0) - plain, 5), 0.0)
    claim("another distance gives another score", abs(score(5, 3) - near) > 1e-3, True)

def rounds_of(P, G, cached):
    """[(tokens computed, where they end)] of the rounds that give G outputs after a prompt of P."""
    sim = Simulation(caching=False)
    if cached:
        sim.add("R", range(P), G)
        sim.run()
    else:  # every output recomputes all tokens before it
        for count in range(P, P + G):
            sim.add(str(count), range(count), 1)
            sim.run()
    return [(n, done.frontier[name]) for done in sim.rounds for name, n in done.sched.items()]

def positions_of(rounds):
    return sum(n for n, _ in rounds)

@example("1.3", "4 prompt tokens, 5 outputs: with a cache and without", "nanoserve.py 10, 14")
def eight_or_thirty():
    rows = []
    for name, cached in (("KV cache", True), ("none", False)):
        rounds = rounds_of(4, 5, cached)
        causal = sum(int(kernels.visible(n, end, 0).sum()) for n, end in rounds)
        rows.append((name, positions_of(rounds), sum(n * end for n, end in rounds), causal))
    table(["4 + 5", "positions", "dense pairs", "causal pairs"], rows,
          [("KV cache", 8, 42, 36), ("none", 30, 190, 110)])
    claim("one output: no difference", rounds_of(4, 1, True), rounds_of(4, 1, False))
    few, many = (positions_of(rounds_of(2048, 128, cached)) for cached in (True, False))
    claim("2,048 + 128: positions with a cache, without", (few, many), (2175, 270_272))
    claim("   times as many positions, which is not times the time", many / few, 124.26,
          within=0.005)
    llm = ns.LLM(model="toy", num_kv_blocks=8, enable_prefix_caching=False)
    def outputs(ids, count):
        before = llm.core.counts["scheduled_tokens"]
        params = ns.SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        done = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0]
        return done.outputs[0].token_ids, llm.core.counts["scheduled_tokens"] - before
    kept, computed = outputs([11, 12, 13, 14], 5)
    again, spent = [], 0
    for _ in range(5):
        tokens, count = outputs([11, 12, 13, 14, *again], 1)
        again, spent = again + tokens, spent + count
    claim("the toy model computed, with and without", (computed, spent), (8, 30), "measured")
    claim("and said the same", kept == again, True, "measured")

SEVEN = [  # parameters; KiB per token, at TP 2, 4, 8, 16; MiB of 8,192, of 8,193 in blocks;
    # GiB of 32 x 2,048; in 16 GiB: blocks, tokens, requests of 8,192
    ("SmolLM2-135M", 134_515_008, 22.5, "-", "-", "-", "-"),
    ("Qwen3-0.6B", 596_049_920, 112.0, 56.0, 28.0, 14.0, 14.0),
    ("Mistral-7B-v0.1", 7_241_732_096, 128.0, 64.0, 32.0, 16.0, 16.0),
    ("Llama-3-8B", 8_030_261_248, 128.0, 64.0, 32.0, 16.0, 16.0),
    ("Qwen3-8B", 8_190_735_360, 144.0, 72.0, 36.0, 18.0, 18.0),
    ("Llama-3.1-70B", 70_553_706_496, 320.0, 160.0, 80.0, 40.0, 40.0),
    ("Qwen3-30B-A3B", 30_532_122_624, 96.0, 48.0, 24.0, 24.0, 24.0),
]
SEVEN_POOLS = [
    ("SmolLM2-135M", "7+8+8+7", 180.0, 180.352, 1.40625, 46_603, 745_632, 91),
    ("Qwen3-0.6B", "7+7+7+7", 896.0, 897.75, 7.0, 9362, 149_776, 18),
    ("Mistral-7B-v0.1", "8+8+8+8", 1024.0, 1026.0, 8.0, 8192, 131_056, 15),
    ("Llama-3-8B", "8+8+8+8", 1024.0, 1026.0, 8.0, 8192, 131_056, 15),
    ("Qwen3-8B", "9+9+9+9", 1152.0, 1154.25, 9.0, 7281, 116_480, 14),
    ("Llama-3.1-70B", "20+20+20+20", 2560.0, 2565.0, 20.0, 3276, 52_400, 6),
    ("Qwen3-30B-A3B", "12+12+12+12", 768.0, 769.5, 6.0, 10_922, 174_736, 21),
]

@example("1.4", "Seven published shapes", "nanoserve.py 2, checkpoints.py 1")
def seven_shapes():
    rows, pools = [], []
    for name in SHAPES:
        c = model_shape(name)
        per_token = rank_bytes_per_token(c)
        split = [rank_bytes_per_token(c, tp) / 1024 if c.num_heads % tp == 0 else "-"
                 for tp in (2, 4, 8, 16)]
        experts = SHAPES[name].get("num_experts", 1)
        rows.append((name, count_parameters(c, experts), per_token / 1024, *split))
        blocks = ns.num_blocks_in(16 << 30, 16, per_token)
        pools.append((name, "+".join(map(str, stage_layers(c.num_layers, 4))),
                      8192 * per_token / 2**20,
                      round(ns.cdiv(8193, 16) * 16 * per_token / 2**20, 3),
                      32 * 2048 * per_token / 2**30, blocks, ns.slots_of(blocks, 16),
                      ns.slots_of(blocks, 16) // 8192))
    table(["bf16", "parameters", "KiB/token", "TP 2", "TP 4", "TP 8", "TP 16"], rows, SEVEN)
    table(["", "PP 4 layers", "8,192: MiB", "8,193 blocks", "32x2,048: GiB", "blocks", "tokens",
           "fit"], pools, SEVEN_POOLS)
    print("      9 query heads divide by 3 only; fit: requests of 8,192 tokens in 16 GiB: 15 for "
          "Llama-3-8B,\n      not 16, because one block is the null block")

@example("1.5", "Ranks: what is split, copied or apart", "nanoserve.py 2")
def ranks():
    c = model_shape("Qwen3-0.6B")
    claim("one slot in one layer, bytes", rank_bytes_per_token(c, 1, 1), 4096)
    claim("4,096 tokens, MiB", 4096 * rank_bytes_per_token(c) / 2**20, 448)
    claim("at TP 16, KiB per token in all ranks together: twice",
          16 * rank_bytes_per_token(c, 16) / 1024, 224)
    claim("TP 4, PP 2: 4,096 tokens per rank, MiB",
          4096 * rank_bytes_per_token(c, 4, stage_layers(28, 2)[0]) / 2**20, 56)
    claim("layers of 28 on 3 stages", stage_layers(28, 3), [9, 10, 9])
    tokens, slots = 17 + 32, 16 * (ns.cdiv(17, 16) + ns.cdiv(32, 16))
    claim("lengths 17 and 32 in use, KiB", tokens * rank_bytes_per_token(c) / 1024, 5488)
    claim("in blocks of 16, MiB", slots * rank_bytes_per_token(c) / 2**20, 7)
    claim("tail, KiB", (slots - tokens) * rank_bytes_per_token(c) / 1024, 1680)
    claim("rank of replica 1, tensor rank 1 (DP 2, TP 4)", global_rank(1, 0, 1, 1, 4), 5)
    two = [Simulation(7, caching=False) for _ in range(2)]
    claim("free blocks of two replicas", [sim.kv.pool.num_free for sim in two], [6, 6])
    fits = [sim.kv.can_admit_whole(8 * 16, []) for sim in two]
    claim("a request of 8 blocks fits one of them", any(fits), False)

@example("1.6", "Windows and branches change the count", "nanoserve.py 2, 8")
def boundaries():
    sim = Simulation(100, 2, caching=False, window=4)
    sim.add("R", range(3), 10)
    live = [sum(map(bool, done.tables["R"])) for done in sim.run()]
    claim("window 4, blocks of 2, computed 3..12: blocks held", live,
          [2, 2, 3, 2, 3, 2, 3, 2, 3, 2])
    most = ns.max_blocks_of(100_000, 16, 4096, 2048)
    claim("Mistral, window 4,096, budget 2,048: blocks at most", most, 385)
    per_token = rank_bytes_per_token(model_shape("Mistral-7B-v0.1"))
    claim("which are, MiB", most * 16 * per_token / 2**20, 770)
    for caching, want in ((True, 14), (False, 32)):
        sim = Simulation(caching=caching)
        for branch in range(4):
            sim.add(str(branch), range(100), 21)
        sim.run(sample=lambda request: [1000 + int(request.request_id)])
        owned = {block for table in sim.rounds[-1].tables.values() for block in table}
        claim(f"4 branches of 100 + 20 tokens, shared: {caching}: blocks", len(owned), want)


# ==================================================================================================
# 4  Architecture
# ==================================================================================================
# Lesson 2. A request is ids and counts on its way in, text on its way out, and only the runner
# turns it into tensors.

@example("2.1", "Text comes out in whole characters, and no stop string", "nanoserve.py 3")
def streamed_text():
    def deltas(pieces, **options):
        out, shown = ns.IncrementalDetokenizer(checkpoints.Tokenizer.byte(), [], **options), []
        for i, piece in enumerate(pieces):
            out.push(list(piece), finished=i == len(pieces) - 1)
            shown.append(out.take_delta())
        return shown
    a, b, c = "\u7f13".encode(), "\u5b58".encode(), "\U0001f680".encode()
    claim("KV, two Chinese characters and a rocket, cut inside",
          deltas([b"KV", a[:2], a[2:] + b[:1], b[1:], c[:3], c[3:]]),
          ["KV", "", a.decode(), b.decode(), "", c.decode()])
    claim('stop "END" over abE, N, Dxyz', deltas([b"abE", b"N", b"Dxyz"], stop=["END"]),
          ["ab", "", ""])
    claim('stop "END" over abE, N, xyz', deltas([b"abE", b"N", b"xyz"], stop=["END"]),
          ["ab", "", "ENxyz"])

@example("2.3", "A plan is small, what it points to is not", "nanoserve.py 9, 10")
def messages():
    sim = Simulation(block_size=16)
    sim.add("R", range(48), 2)
    plan = sim.plan().plan
    data = pickle.dumps(plan)
    between("pickled plan of a new request, bytes", 100, len(data), 4096)
    claim("tensors in it", data.count(b"torch"), 0)
    claim("K and V of its 3 blocks in Llama-3-8B, bytes",
          3 * 16 * rank_bytes_per_token(model_shape("Llama-3-8B")), 6_291_456)

@example("2.5", "[11, 12, 13, 14] gives [21, 22, 23]", "nanoserve.py 9, 10")
def one_request():
    sim, outputs, rows = Simulation(10, 4, 64), iter((21, 22, 23)), []
    sim.add("R", [11, 12, 13, 14], 3)
    rows.append(("WAITING", "-", "-", *sim.progress("R"), []))
    while sim.scheduler.requests:
        done = sim.step(lambda request: [next(outputs)])
        rows.append((f"round {len(rows)}", done.sched["R"], *done.sampled["R"], *sim.progress("R"),
                     done.tables["R"]))
    table(["", "scheduled", "sampled", "computed", "all", "table"], rows, [
        ("WAITING", "-", "-", 0, 4, []), ("round 1", 4, 21, 4, 5, [1]),
        ("round 2", 1, 22, 5, 6, [1, 2]), ("round 3", 1, 23, 6, 7, [1, 2])])
    print("      token  11  12  13  14 | 21  22  23\n"
          "      round   1   1   1   1 |  2   3   -    23 is never fed back")
    claim("free queue afterwards, the tail first", [b.block_id for b in sim.kv.pool.free_queue],
          [3, 4, 5, 6, 7, 8, 9, 2, 1])

@example("2.6", "The runner's row grows by what is new", "nanoserve.py 13")
def runner_row():
    runner = ns.LLM(model="toy", num_kv_blocks=16, block_size=4).core.runner
    def row_after(*news):
        runner.block_table[0], runner.num_blocks[0] = 0, 0
        for block_ids in news:
            runner._append_blocks(0, block_ids)
        _, context = runner.pack(np.array([0]), np.array([9]), np.array([1]))
        return context.meta.block_table[0].tolist(), context.meta.slot_mapping.item()
    claim("[7], +[3], +[], +[11]: table, slot of position 9", row_after([7], [3], [], [11]),
          ([7, 3, 11], 45))
    claim("the last commit forgotten: a silent wrong slot", row_after([7], [3], []), ([7, 3, 0], 1))


# ==================================================================================================
# 5  PagedAttention
# ==================================================================================================
# Lesson 3. Memory in blocks of equal size cannot break into holes that fit nobody; what is wasted
# is the tail of each request's last block.

@example("3.1", "Fragmentation, and what paging does not create", "nanoserve.py 2, 8, 10")
def fragmentation():
    claim("16 + 16 slots reserved, 5 + 12 used: wasted inside", 32 - (5 + 12), 15)
    claim("free 8 + 6 around somebody: does 10 fit in one hole", max(8, 6) >= 10, False)
    claim("and in blocks of 2", ns.cdiv(10, 2) <= (8 + 6) // 2, True)
    lengths = [1, 4, 5, 8, 9]
    blocks = [ns.cdiv(n, 4) for n in lengths]
    claim("blocks of 4 for lengths 1, 4, 5, 8, 9", blocks, [1, 1, 2, 2, 3])
    claim("slots left in each tail", [4 * b - n for b, n in zip(blocks, lengths)], [3, 0, 3, 0, 3])
    claim("12 slots reserved for each: slots, tokens in them", (12 * 5, sum(lengths)), (60, 27))
    sim = Simulation(9, 4, 64, caching=False)
    for i, n in enumerate(lengths):
        sim.add(f"r{i}", range(n), 1)
    claim("8 blocks are one too few: scheduled", sim.step().sched,
          {"r0": 1, "r1": 4, "r2": 5, "r3": 8})
    rng = random.Random(0)
    lengths, rows = [rng.randint(1, 2048) for _ in range(256)], []
    for BS in (1, 8, 16, 32, 64, 128, 256):
        count = sum(ns.cdiv(n, BS) for n in lengths)
        rows.append((BS, count, round(100 * (1 - sum(lengths) / (count * BS)), 2)))
    table([f"{sum(lengths):,} tokens: block size", "table entries", "waste %"], rows, [
        (1, 249_109, 0.0), (8, 31_246, 0.34), (16, 15_685, 0.74), (32, 7904, 1.51),
        (64, 4016, 3.08), (128, 2076, 6.25), (256, 1105, 11.94)])

@example("3.2", "From a position to a slot", "nanoserve.py 2, kernels.py 1")
def slots():
    for ids, BS, want in (([7, 3, 11], 4, {0: 28, 3: 31, 4: 12, 7: 15, 8: 44, 9: 45}),
                          ([5, 2], 16, {0: 80, 15: 95, 16: 32, 23: 39, 31: 47})):
        claim(f"{ids}, blocks of {BS}", {p: ns.slot_of(ids[p // BS], p, BS) for p in want}, want)
    kv = kernels.LayerKV(torch.empty(2, 12, 4, 8, 128, device="meta"))
    claim("slot 45, head 2 of 8: element of a (blocks, slots, heads, D) cache",
          kv.data[0, 11, 1, 2].storage_offset(), 46_336)

@example("3.3", "Six blocks of 4, handed out and given back", "nanoserve.py 7, 8")
def allocator():
    sim, rows = Simulation(7, 4, 64, caching=False), []
    def grow(name, count):
        if name not in sim.requests:
            sim.add(name, range(20), 1)
        request = sim.requests[name]
        got = sim.kv.allocate_slots(request, count)
        request.num_computed_tokens += count if got is not None else 0
        return got
    free = lambda: [block.block_id for block in sim.kv.pool.free_queue]
    for name, count in (("A", 6), ("B", 3), ("B", 0), ("A", 3), ("C", 5), ("A", 0), ("D", 10)):
        if count:
            grow(name, count)
        else:
            sim.kv.free(sim.requests[name])
        held = {r: sim.kv.block_ids(request) for r, request in sim.requests.items()}
        rows.append((f"{name} +{count}" if count else f"free {name}", held[name], free()))
    table(["", "its table", "free queue"], rows, [
        ("A +6", [1, 2], [3, 4, 5, 6]), ("B +3", [3], [4, 5, 6]), ("free B", [], [4, 5, 6, 3]),
        ("A +3", [1, 2, 4], [5, 6, 3]), ("C +5", [5, 6], [3]), ("free A", [], [3, 4, 2, 1]),
        ("D +10", [3, 4, 2], [1])])
    claim("slot of D's position 9", ns.slot_of(sim.kv.block_ids(sim.requests["D"])[2], 9, 4), 9)
    claim("a growth that does not fit", grow("D", 100), None)
    claim("changed nothing", (sim.kv.block_ids(sim.requests["D"]), free()), ([3, 4, 2], [1]))
    print("      The article's own allocator counts from 0 and frees the head first: "
          "D = [2, 0, 1], slot 5  quoted")

@example("3.4", "A block without an owner can still be found", "nanoserve.py 7")
def lifecycle():
    pool = ns.BlockPool(6)
    a, b, c = pool.get_new_blocks(3)
    pool.publish(a, b"a")
    pool.publish(b, b"b")
    pool.free_blocks([c, b, a])
    free = lambda: [block.block_id for block in pool.free_queue]
    claim("free queue", free(), [4, 5, 3, 2, 1])
    pool.touch([b])
    claim("a hit takes block 2 out of its middle", free(), [4, 5, 3, 1])
    claim("the four others, handed out", [x.block_id for x in pool.get_new_blocks(4)], [4, 5, 3, 1])
    claim("found afterwards: a, b", (pool.lookup(b"a"), pool.lookup(b"b") is b), (None, True))

@example("3.5", "Attention through a shuffled table is the same attention", "kernels.py 1, 2, 10")
def paged_attention():
    n, BS, g = 23, 4, torch.Generator().manual_seed(2)
    k_v, q = torch.randn(2, n, 2, 16, generator=g), torch.randn(1, 4, 16, generator=g)
    table_ids, pos, int32 = [9, 2, 14, 5, 11, 3], torch.arange(n), torch.int32
    def attend(ids, backend):
        data = torch.full((2, 16, BS, 2, 16), math.nan)
        slots = torch.tensor([ns.slot_of(ids[p // BS], p, BS) for p in pos.tolist()])
        data.view(2, -1, 2, 16)[:, slots] = k_v
        meta = kernels.AttentionMetadata(torch.tensor([0, 1], dtype=int32),
                                         torch.tensor([n], dtype=int32),
                                         torch.tensor([ids], dtype=int32), slots[-1:], 1, n)
        return backend(q, kernels.LayerKV(data), meta, 0.25)
    for name in ("torch", "sdpa"):
        backend = kernels.ATTENTION[name]
        same = torch.equal(attend(table_ids, backend), attend([*range(1, 7)], backend))
        claim(f"{name}: {table_ids} and 1..6 bit-equal, NaN elsewhere", same, True, "measured")

@example("3.6", "One block of 32 is two of 16", "nanoserve.py 2")
def kernel_blocks():
    wide, narrow = [4, 1], [2 * block + half for block in (4, 1) for half in (0, 1)]
    claim("[4, 1] in halves", narrow, [8, 9, 2, 3])
    same = all(ns.slot_of(wide[p // 32], p, 32) == ns.slot_of(narrow[p // 16], p, 16)
               for p in range(64))
    claim("all 64 positions have the same slot", same, True)


# ==================================================================================================
# 6  Prefix caching
# ==================================================================================================
# Lesson 4. A full block is named by everything its K and V depend on; who asks for that name again
# gets the block. What it saves is prefill, and only prefill.

@example("4.1", "The template decides what is common", "checkpoints.py 2, nanoserve.py 2")
def template():
    path, there = checkpoints.default_path()
    if not there:
        print("      passed over: SmolLM2 is not here yet, python nanoserve.py fetches it")
        return
    tokenizer = checkpoints.GgufFile(path).tokenizer()
    system = "You are a careful assistant. " * 20
    def ids(system, question):
        return tokenizer.encode_chat([dict(role="system", content=system),
                                      dict(role="user", content=question)])
    first = ids(system, "What is a KV cache?")
    for what, other, want in (
            ("another question", ids(system, "What is paging?"), (131, 8)),
            ("a space before the system text", ids(" " + system, "What is a KV cache?"), (3, 0))):
        common = sum(itertools.takewhile(bool, (a == b for a, b in zip(first, other))))
        claim(f"{what}: common tokens, full blocks", (common, common // 16), want)

def hits(first, second, salts=(None, None), junk=0, num_blocks=100):
    """Tokens that `second` finds of `first`, `junk` other tokens having passed in between."""
    sim = Simulation(num_blocks, 4, 64)
    sim.add("first", first, 1, cache_salt=salts[0])
    sim.run()
    if junk:
        sim.add("junk", range(1000, 1000 + junk), 1)
        sim.run()
    before = replace(sim.kv.stats)
    sim.add("second", second, 1, cache_salt=salts[1])
    sim.run()
    return sim.kv.stats.since(before).hits

@example("4.2", "What is in a name, and what then misses", "nanoserve.py 8")
def names():
    p = list(range(13))
    for what, got, want in (
            ("13 tokens again", hits(p, p), 12),
            ("another first token", hits(p, [99, *p[1:]]), 0),
            ("another token in the second block", hits(p, [*p[:4], 99, *p[5:]]), 4),
            ("the same salt", hits(p, p, ("t", "t")), 12),
            ("another salt", hits(p, p, ("t", "u")), 0),
            ("32 other tokens through 8 blocks first", hits(p, p, junk=32, num_blocks=9), 0),
            ("24: the tail went first", hits(p, p, junk=24, num_blocks=9), 8)):
        claim(what, got, want)

@example("4.4", "Two equal prompts in one round", "nanoserve.py 8, 10")
def shared():
    for n, tables, found in ((10, {"x": [1, 2, 3], "y": [1, 2, 4]}, 8),
                             (8, {"x": [1, 2], "y": [1, 3]}, 4)):
        sim = Simulation(100, 4, 64)
        sim.add("x", range(n), 2)
        sim.add("y", range(n), 2)
        claim(f"{n} tokens each: tables", sim.step().tables, tables)
        claim("   tokens found; the last one is always computed", sim.kv.stats.hits, found)

@example("4.5", "Blocks 7 and 19 are found, 23 is new", "nanoserve.py 7, 8, 10")
def seven_nineteen():
    sim, letters, rows = Simulation(24, 4, 64), [*range(65, 75)], []
    block = lambda i: sim.kv.pool.blocks[i]
    refs = lambda: [block(i).ref_cnt for i in (7, 19, 23)]
    def enter(**requests):
        for name, (ids, count) in requests.items():
            sim.add(name, ids, count)
        done, before = sim.step(), enter.hits
        enter.hits = sim.kv.stats.hits
        for name in requests or ["R"]:
            rows.append((len(sim.rounds) - 1, name, done.sched[name], enter.hits - before,
                         done.tables[name] if name in ("P1", "P2", "R", "R2") else "...", refs()))
    enter.hits = 0
    enter(X=(range(500, 524), 1), P1=(letters[:4], 1))
    enter(Y=(range(600, 644), 1), P2=(letters[:8], 1))
    named = [bool(block(i).block_hash) for i in (7, 19)]
    enter(Z=(range(700, 712), 1), R=(letters, 4))
    state = (*sim.progress("R"), bool(block(23).block_hash))
    enter(R2=([*letters[:8], 99], 2))
    enter()
    table(["round", "", "computes", "hits", "table", "owners of 7, 19, 23"], rows, [
        (0, "X", 24, 0, "...", [0, 0, 0]), (0, "P1", 4, 0, [7], [0, 0, 0]),
        (1, "Y", 44, 4, "...", [0, 0, 0]), (1, "P2", 4, 4, [7, 19], [0, 0, 0]),
        (2, "Z", 12, 8, "...", [1, 1, 1]), (2, "R", 2, 8, [7, 19, 23], [1, 1, 1]),
        (3, "R2", 1, 8, [7, 19, 6], [2, 2, 1]), (4, "R", 1, 0, [7, 19, 23], [1, 1, 1])])
    claim("after round 1, without an owner, 7 and 19 keep their names", named, [True, True])
    claim("after round 2, R: computed, all, is block 23 named", state, (10, 11, False))
    claim("after round 4, block 23 is full: named", bool(block(23).block_hash), True)
    claim("slots of R's positions 8 to 11", [ns.slot_of(23, p, 4) for p in range(8, 12)],
          [92, 93, 94, 95])

@example("4.6", "1,712 of 1,729 tokens, and 2% of the time", "nanoserve.py 2, 8, 10")
def delta():
    def second(n1, common, n2):
        sim, base = Simulation(), range(1000, 1000 + common)
        sim.add("1", [*base, *range(50_000, 50_000 + n1 - common)], 1)
        sim.run()
        before = replace(sim.kv.stats)
        sim.add("2", [*base, *range(60_000, 60_000 + n2 - common)], 1)
        sim.run()
        return before, sim.kv.stats, sim.kv.stats.since(before)
    first, both, new = second(1727, 1715, 1729)
    claim("first request: hits, queries", (first.hits, first.queries), (0, 1727))
    claim("both: hits, queries", (both.hits, both.queries), (1712, 3456))
    claim("the second alone", (new.hits, new.queries), (1712, 1729))
    claim("share of the second, %", 100 * new.hits / new.queries, 99.02, within=0.005)
    claim("common prefix 1711, 1712, 1727, 1728: hits",
          [second(c + 1, c, 1729)[2].hits for c in (1711, 1712, 1727, 1728)],
          [1696, 1712, 1712, 1728])
    claim("1,727, 1,728, 1,729 tokens sent twice: hits",
          [second(n, n, n)[2].hits for n in (1727, 1728, 1729)], [1712, 1712, 1728])
    missed = 1 - new.hits / new.queries
    e2e = lambda share, outputs: 50 * share + 10 * (outputs - 1) + 5  # ms: prefill, decode, other
    for outputs, want in ((1, 10.015), (32, 1.157), (256, 1.019)):
        claim(f"model 50 + 10 + 5 ms, {outputs} outputs: times faster",
              e2e(1, outputs) / e2e(missed, outputs), want, within=0.0005)
    claim("   its TTFT, ms: without and with the hit", [round(e2e(x, 1), 2) for x in (1, missed)],
          [55, 5.49])
    claim("the article's own run, 0.182 and 0.178 s: % saved", 100 * (1 - 0.178 / 0.182), 2.2,
          "quoted", within=0.05)


# ==================================================================================================
# 7  Scheduling
# ==================================================================================================
# Lesson 5. There is one deficit, tokens known less tokens computed, and three limits: the round's
# tokens, the seats, the blocks.

@example("5.1", "A batch that anyone may join and leave", "nanoserve.py 10")
def continuous():
    jobs = [("A", 4, 2), ("B", 4, 8), ("C", 20, 2)]
    sim = Simulation(100, 4, 64, max_num_seqs=2)
    sim.run({0: [(name, range(100 * i, 100 * i + n), count)
                 for i, (name, n, count) in enumerate(jobs)]})
    sim.show()
    first = lambda sim, name: next(i for i, d in enumerate(sim.rounds, 1) if d.sampled.get(name))
    claim("two seats: rounds, round of C's first token", (len(sim.rounds), first(sim, "C")), (8, 3))
    claim("positions computed", sim.total(), 37)
    static = Simulation(100, 4, 64, max_num_seqs=2)
    for pair in (jobs[:2], jobs[2:]):  # the next pair enters when both have ended
        for i, (name, n, count) in enumerate(pair):
            static.add(name, range(n), count)
        static.run()
    claim("fixed pairs: the same two", (len(static.rounds), first(static, "C")), (10, 9))
    alone = Simulation(100, 4, 64, max_num_seqs=1)
    for i, (name, n, count) in enumerate(jobs):
        alone.add(name, range(100 * i, 100 * i + n), count)
    alone.run()
    claim("one at a time: rounds C waits, its first token's", (first(alone, "C") - 1,
          first(alone, "C")), (10, 11))
    claim("one rectangle: padded positions", 3 * 20 - (4 + 4 + 20), 32)
    claim("one rectangle: idle row-steps", 3 * 8 - (2 + 8 + 2), 12)

@example("5.3", "One deficit, and tokens in flight", "nanoserve.py 9, 10")
def deficit():
    def of(known, computed, drafts=0, in_flight=0):
        sim = Simulation()
        sim.add("R", range(known), 9)
        request = sim.requests["R"]
        request.num_computed_tokens, request.num_output_placeholders = computed, in_flight
        request.spec_token_ids = [0] * drafts
        return request.num_tokens_to_compute
    claim("new, half done, 8 of 10 cached, sampled, 3 drafts, preempted",
          [of(10, 0), of(10, 4), of(10, 8), of(11, 10), of(11, 10, 3), of(13, 0)],
          [10, 6, 2, 1, 4, 13])
    sim, rows = Simulation(64, 16, 4, asynchronous=True), []
    sim.add("R", range(10), 3)
    request, plans = sim.requests["R"], []
    for _ in range(3):
        plans.append((sim.plan(), sim.ready))
        rows.append((len(rows), plans[-1][0].sched["R"], request.num_computed_tokens,
                     request.num_output_placeholders))
    table(["planned ahead", "scheduled", "computed", "in flight"], rows,
          [(0, 4, 4, 0), (1, 4, 8, 0), (2, 2, 10, 1)])
    before = (request.num_tokens, request.num_output_placeholders)
    for done, ready in plans:
        sim.update(done, ready=ready)
    claim("all, in flight: before and after the result",
          [before, (request.num_tokens, request.num_output_placeholders)], [(10, 1), (11, 0)])
    late = Simulation(64, 16, 64, asynchronous=True)
    late.add("R", range(10), 10, eos=(2,))
    flight = [late.plan(), late.plan()]
    late.update(flight[0])
    flight.append(late.plan())
    late.update(flight[1], lambda request: [2])
    late.update(flight[2], lambda request: [9])  # was planned before the end was known
    claim("the end found with a round in flight: output", late.requests["R"].all_token_ids[10:],
          [7, 2])

@example("5.4", "Three limits, one at a time", "nanoserve.py 10")
def limits():
    def first(num_blocks=100, budget=64, seats=8):
        sim = Simulation(num_blocks, 4, budget, caching=False, max_num_seqs=seats)
        for i in range(4):
            sim.add(f"r{i}", range(8), 4)
        return [*sim.step().sched.values()]
    claim("four prompts of 8: no limit", first(), [8, 8, 8, 8])
    claim("20 tokens", first(budget=20), [8, 8, 4])
    claim("2 seats", first(seats=2), [8, 8])
    claim("5 blocks of 4", first(num_blocks=6), [8, 8])

@example("5.5", "A, B and C in 19 tokens", "nanoserve.py 10")
def nineteen():
    sim = Simulation(100, 16, 6, long_prefill_token_threshold=4)
    sim.run(read_arrivals(["A:0:4:2", "B:0:8:3", "C:1:3:2"]))
    sim.show()
    claim("rounds", [done.sched for done in sim.rounds][:2],
          [{"A": 4, "B": 2}, {"A": 1, "B": 4, "C": 1}])
    claim("", [done.sched for done in sim.rounds][2:],
          [{"B": 2, "C": 2}, {"B": 1, "C": 1}, {"B": 1}])
    claim("tokens of each round", [sum(d.sched.values()) for d in sim.rounds], [6, 6, 4, 2, 1])
    claim("computed, all", [sim.progress(name) for name in "ABC"], [(5, 6), (10, 11), (4, 5)])
    claim("sampled", ["".join(sorted(d.sampled)) for d in sim.rounds], ["A", "A", "BC", "BC", "B"])
    claim("together", sim.total(), 19)

@example("5.6", "Too few blocks: somebody starts again", "nanoserve.py 8, 10")
def preemption():
    for policy, caching, want in (("fcfs", False, 44), ("fcfs", True, 36), ("priority", False, 44),
                                  ("priority", True, 40)):
        sim, ranks = Simulation(7, 4, 64, caching, scheduling_policy=policy), (2, 0, 1)
        a, b, c = [("priority", rank * (policy == "priority")) for rank in ranks]
        sim.run({0: [("A", range(100, 108), 6, a), ("B", range(200, 208), 6, b)],
                 1: [("C", range(300, 304), 3, c)]},
                lambda request: [50 + request.num_tokens])
        if (policy, caching) == ("fcfs", False):
            sim.show()
        claim(f"{policy}, prefix cache {caching}: positions (32 + lost - found)", sim.total(), want)
        claim("   of 12 lost, found again", sim.kv.stats.preempted_hits, 44 - want)
        if policy == "fcfs":  # B lost its blocks to A, which then runs alone; nobody is admitted
            claim("   B preempted in round 5, then", (sim.rounds[5].preempted, *(
                done.sched for done in sim.rounds[5:7])),
                (["B"], {"A": 1}, {"B": 5 if caching else 13, "C": 4}))
    sim = Simulation(5, 4, 64, caching=False, scheduling_policy="priority")
    sim.run({0: [("A", range(5), 6, ("priority", 2))], 1: [("B", range(7), 4)]})
    claim("a victim already planned: round 3", (sim.rounds[3].sched, sim.rounds[3].preempted),
          ({"B": 1}, ["A"]))
    claim("27 = 20 and 7 computed again", sim.total(), 27)

@example("5.7", "6,000 tokens among 100 decodes", "nanoserve.py 10")
def long_prompt():
    def among_decodes(outputs, chunk=0, rounds=None):
        sim = Simulation(3000, budget=2048, caching=False, long_prefill_token_threshold=chunk)
        for i in range(100):
            sim.add(f"d{i}", range(8), 50)
        sim.step()
        sim.add("L", range(6000), outputs)
        rows = []
        while not rows or (len(rows) < rounds if rounds else "L" not in sim.rounds[-1].sampled):
            done = sim.step()
            rows.append((len(rows) + 1, sum(done.sched.values()), done.sched["L"],
                         len(done.sched) - 1, done.frontier["L"],
                         "#" * (done.sched["L"] // 128) + "+" * (len(done.sched) // 100)))
        return rows
    rows = among_decodes(4, rounds=5)
    table(["round", "tokens", "of L", "decodes", "L computed", "(# 128 of L, + 100 decodes)"],
          rows)
    claim("tokens, of L, decodes, computed: rounds 1, 2", [row[1:5] for row in rows[:2]],
          [(2048, 1948, 100, 1948), (2048, 1948, 100, 3896)])
    claim("rounds 3, 4", [row[1:5] for row in rows[2:4]],
          [(2048, 1948, 100, 5844), (256, 156, 100, 6000)])
    claim("round 5", [row[1:5] for row in rows[4:]], [(101, 1, 100, 6001)])
    claim("blocks of L", ns.cdiv(6000, 16), 375)
    claim("K/V tokens read by 6,000 in one piece", rounds_of(6000, 1, True), [(6000, 6000)])
    table(["chunk", "rounds", "decoded meanwhile", "K/V tokens read", "pairs"], [
        (c, len(r), sum(x[3] for x in r), sum(x[4] for x in r),
         sum(n * (2 * end - n + 1) // 2 for _, _, n, _, end, _ in r))
        for c in (256, 512, 1024, 2048) for r in [among_decodes(1, c)]], [
        (256, 24, 2400, 76_656, 18_003_000), (512, 12, 1200, 39_792, 18_003_000),
        (1024, 6, 600, 21_360, 18_003_000), (2048, 4, 400, 17_688, 18_003_000)])
    for n, rows in ((600, [(26, 0, 1206), (26, 2, 1654)]), (400, [(20, 1, 1126), (20, 2, 1318)])):
        for reserve, want in zip((True, False), rows):
            sim = Simulation(41, budget=128, caching=False, long_prefill_token_threshold=64,
                             reserve_full_sequence=reserve, max_num_seqs=8)
            sim.run({0: [(str(i), range(n), 4) for i in range(2)]})
            claim(f"2 x {n} in 40 blocks, check {reserve}: rounds, preempted, computed",
                  (len(sim.rounds), sim.scheduler.num_preemptions, sim.total()), want)
    try:
        Simulation(301).add("L", range(6000), 4)
    except ValueError as error:
        claim("6,000 tokens, 300 blocks: refused at once", "376 KV blocks" in str(error), True)
