"""nanoserve: a whole LLM serving engine in one module, to chat with, to read and to fork.

    python nanoserve.py                               chat with SmolLM2-135M (fetched once, 98 MB)
    python nanoserve.py --model toy --prompt hello    a random two-layer model, starts at once
    python nanoserve.py --model FOLDER | FILE.gguf | org/name
    python nanoserve.py generate --input prompts.jsonl --output out.jsonl
    python nanoserve.py serve --model toy             a chat page and an OpenAI-compatible API
    python nanoserve.py list                          what can be selected here

CONTENTS (find section N in any editor with the pattern "# N  ")
     0  Front matter
     1  Configuration
     2  KV arithmetic
     3  Text
     4  Linear layers
     5  Checkpoints
     6  Model
     7  Block pool
     8  Prefix cache and KV manager
     9  Requests and messages
    10  Scheduler
    11  Sampler
    12  Speculation
    13  Model runner
    14  Engine
    15  Server
    16  Command line
    17  Invariants

READING ORDERS.  A first evening: 2, 7, 8, 10, 13, 14, 11.  Sections 3 and 5 can wait, and what the
scheduler does for drafts and placeholders too.  The theory: grep -n Invariant: nanoserve.py

LETTERS.  T tokens in the step, S sequences, E model width, H query heads, KH key/value heads, G = H
// KH, D head width, F MLP width, V vocabulary, L layers, NB blocks, BS block size, R rows that get
a token, K drafts, M rows that face a draft.  token_id, pos, block_id, slot and request_id are five
different integers and keep their names.

GLOSSARY
    prefill        computing the part of a request's input that is not computed yet
    decode         computing one token to sample the next
    block          BS consecutive positions of one request in the KV cache, the unit of allocation
    slot           the place of one token in a block: K and V of all KV heads of a layer
    block table    per request: where position pos lives, slot = table[pos // BS] * BS + pos % BS
    KV pool        all blocks; their number is fixed at start
    prefix cache   finding full blocks of an equal prefix by name (hash) instead of computing them
    token budget   positions computed in one step over all requests; not a limit on outputs
    preemption     taking all blocks from a running request; it recomputes later
    TTFT, ITL      seconds from arrival to the first token; between two tokens of one request
    TPOT           the mean ITL of one request
    rank           one of the processes that share a model's heads or layers; here there is one
    backend        an implementation of attention over the paged cache
    candidate      a backend in the table: not yet possible here, selected or executed
    exact          attention that equals the dense formula up to rounding, however it is tiled

THE LIFE OF A REQUEST
    token_ids = tokenizer.encode(prompt)                          # 3   text becomes ids, once
    scheduler.add_request(Request(token_ids, params))             # 9   refused if it can never fit
    while scheduler.requests:
        plan = scheduler.schedule()                               # 10  who computes how many tokens
            cached = kv.find_cached_blocks(request)               # 8   skip what is there already
            kv.allocate_slots(request, count)                     # 8   blocks, or preempt somebody
        batch = runner.pack(plan)                                 # 13  ids, positions, slots
        hidden = model.forward(batch)                             # 6   K, V to slots; attention
        token_id = sample(model.logits(hidden[last]))             # 11  one per request at its end
        for entry in scheduler.update_from_output(plan, output):  # 10  append, stop, free
            text += detokenizer.push(entry.new_token_ids)         # 3   ids become text
"""

# ==================================================================================================
# 0  Front matter
# ==================================================================================================

from __future__ import annotations

import os

# Before torch starts its threads: waiting threads that spin take the cores from each other as soon
# as anything else runs on the machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import bisect
import codecs
import contextlib
import enum
import hashlib
import itertools
import json
import logging
import math
import operator
import random
import re
import signal
import sys
import threading
import time
from array import array
from collections import Counter, deque
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import Callable

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import kernels
from checkpoints import (
    NO_TEMPLATE, GgufFile, ModelConfig, SafetensorsFolder, Toy, default_model, dense, explained,
    fetch_from_hub, is_int, is_number, require)

__version__ = "0.1.0"
log = logging.getLogger("nanoserve")


# ==================================================================================================
# 1  Configuration
# ==================================================================================================
# Problem: one setting is needed by three audiences (Python callers, the command line, the docs) and
# drifts apart when each has its own list.  Idea: a dataclass field is the only place; it carries
# the default, the type, the range and the help text; checks and flags are generated from it.
#
#     field ──► EngineConfig(max_num_seqs=8)      LLM(max_num_seqs=8)      --max-num-seqs 8
#
# Two kinds: EngineConfig (how to run a model, chosen once) and SamplingParams (what one request
# wants).  What the model is nobody chooses: ModelConfig is read from its files (checkpoints.py).
#
# Invariant: an unknown or impossible value raises ValueError naming the field; nothing is ignored.
# Why: a config key that changes the mathematics and is silently skipped gives fluent wrong text.

def open_text(path, mode="r"):
    """A UTF-8 text file as a context; "-" is stdin or stdout, which stay open."""
    if path == "-":
        return contextlib.nullcontext(sys.stdin if mode == "r" else sys.stdout)
    with explained("cannot open", OSError):
        return open(path, mode, encoding="utf-8-sig" if mode == "r" else "utf-8", errors="replace")

def is_text(value):
    return isinstance(value, str) and value != ""

def all_are(kind):
    return lambda value: isinstance(value, (list, tuple)) and all(map(kind, value))

@dataclass(frozen=True)
class Row:
    """A row of a table that forks extend. why_not(config): None, or why it cannot run here."""
    summary: str

    def why_not(self, config):
        return None

# annotation of a field: (test, words for the error message)
FIELD_TYPES = {
    "int": (is_int, "an integer"),
    "float": (is_number, "a finite number"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "str": (is_text, "a non-empty string"),
    "list[int]": (all_are(is_int), "a list of integers"),
    "list[str]": (all_are(is_text), "a list of non-empty strings"),
    "dict[int, float]": (lambda value: isinstance(value, dict) and all(map(is_int, value))
                         and all(map(is_number, value.values())), "a dict from ids to numbers"),
}

def option(default, help, low=None, high=None, above=None, choices=None):
    """A dataclass field with help text and range: low <= value <= high, above < value."""
    bounds = [(">=", operator.ge, low), (">", operator.gt, above), ("<=", operator.le, high)]
    bounds = [row for row in bounds if row[2] is not None]
    return field(default=default, metadata=dict(help=help, bounds=bounds, choices=choices))

def check_fields(config):
    """Hold every field of a dataclass against its annotation and its option()."""
    for f in fields(config):
        value, annotation = getattr(config, f.name), str(f.type)
        if value is None and "None" in annotation:
            continue
        fits, words = FIELD_TYPES[annotation.removesuffix(" | None")]
        bounds, choices = f.metadata["bounds"], f.metadata["choices"]
        words += " and".join(f" {sign} {bound}" for sign, _, bound in bounds)
        good = fits(value) and all(holds(value, bound) for _, holds, bound in bounds)
        require(good, f"{f.name} must be {words}, got {value!r}")
        require(value in (choices or [value]), f"{f.name} must be one of {choices}, got {value!r}")

@dataclass
class EngineConfig:
    """How to run a model: the keyword arguments of LLM(), and the flags of the command line."""
    model: str | None = option(None, "toy, folder, file.gguf or hub id (default: SmolLM2-135M)")
    dtype: str = option("auto", "auto = the checkpoint's; on a CPU float32 for all but the weights",
                        choices=("auto", "float32", "bfloat16", "float16"))
    device: str = option("auto", "cpu, cuda or cuda:N; auto = a GPU if there is one")
    seed: int | None = option(None, "for requests that bring none (default: a fresh one per run)")
    max_model_len: int | None = option(None, "longest prompt + output (default: what fits)", 2)
    block_size: int = option(16, "tokens per KV block", 1)
    num_kv_blocks: int | None = option(None, "KV blocks, the null block included", 2)
    kv_cache_memory: str | None = option(None, "bytes of KV cache, e.g. 512MiB (default: measured)")
    kv_cache_dtype: str = option("auto", "auto = the checkpoint's, else that of activations",
                                 choices=("auto", *kernels.KV_DTYPES))
    quantization: str = option("auto", "form of the weights, a row of the table QUANTS")
    quantization_group: int = option(32, "int4: columns that share a scale", choices=(32, 64, 128))
    quantization_symmetric: bool = option(False, "int4: zero is a code; no minima beside scales")
    max_num_seqs: int = option(256, "requests running at once", 1)
    max_num_batched_tokens: int = option(2048, "token budget of one step", 1)
    long_prefill_token_threshold: int = option(0, "largest chunk of a request; 0 = the budget", 0)
    enable_prefix_caching: bool = option(True, "share KV blocks between equal prefixes")
    enable_chunked_prefill: bool = option(True, "let a prompt spread over several steps")
    reserve_full_sequence: bool = option(True, "admit only if free blocks could hold all its input")
    scheduling_policy: str = option("fcfs", "who is served, who is preempted (table POLICIES)")
    attention_backend: str = option("auto", "a row of the table ATTENTION (see the list command)")
    speculative: str = option("none", "what drafts tokens to verify at once (table DRAFTERS)")
    speculative_model: str | None = option(None, "the model of speculative=draft; implies it")
    num_speculative_tokens: int = option(4, "most drafts of a request in a step", 1, 128)
    prompt_lookup_min: int = option(2, "fewest tokens that ngram must find again", 1)
    prompt_lookup_max: int = option(4, "most tokens that ngram looks for", 1)
    adapt_draft_length: bool = option(True, "draft less where drafts are rejected")
    enforce_eager: bool = option(False, "run every step call by call, do not record and replay it")
    paranoid: bool = option(False, "check every invariant of section 17 after every step (slow)")
    trace: str | None = option(None, "write one record per step to this file")
    trace_format: str = option("jsonl", "jsonl, or chrome to open it in Perfetto",
                               choices=("jsonl", "chrome"))

    def __post_init__(self):
        check_fields(self)
        require(self.max_num_seqs <= self.max_num_batched_tokens,
                f"max_num_seqs {self.max_num_seqs} must not exceed max_num_batched_tokens "
                f"{self.max_num_batched_tokens}: a running request takes a token a step")
        require(self.num_kv_blocks is None or self.kv_cache_memory is None,
                "give num_kv_blocks or kv_cache_memory, not both")
        require(self.prompt_lookup_min <= self.prompt_lookup_max,
                f"prompt_lookup_min ({self.prompt_lookup_min}) must not exceed prompt_lookup_max "
                f"({self.prompt_lookup_max})")
        if self.speculative_model is not None and self.speculative == "none":
            self.speculative = "draft"
        require((self.speculative == "draft") == (self.speculative_model is not None),
                "speculative=draft and speculative_model go together")

GREEDY_EPSILON = 1e-5  # a temperature below this means greedy, as in vLLM

@dataclass
class SamplingParams:
    """What one request wants."""
    n: int = option(1, "independent completions of the prompt", 1, 16384)
    temperature: float = option(1.0, "0 = greedy; below 1 sharper, above 1 flatter", 0, 1e6)
    top_p: float = option(1.0, "keep the fewest tokens with this mass", above=0, high=1)
    top_k: int = option(0, "keep the k likeliest tokens; 0 = all", -1, 2**31 - 1)
    min_p: float = option(0.0, "drop tokens below this fraction of the likeliest", 0, 1)
    presence_penalty: float = option(0.0, "subtracted once from each generated token", -2, 2)
    frequency_penalty: float = option(0.0, "subtracted per occurrence in the output", -2, 2)
    repetition_penalty: float = option(1.0, "divides logits of tokens seen so far", 0.01, 100)
    seed: int | None = option(None, "same seed, same tokens, in any batch", -(2**63), 2**63 - 1)
    stop: list[str] | None = option(None, "end when this text appears")
    stop_token_ids: list[int] | None = option(None, "end when this token is drawn")
    include_stop_str_in_output: bool = option(False, "keep the stop string in the text")
    ignore_eos: bool = option(False, "go on past the end-of-sequence token")
    max_tokens: int | None = option(16, "most tokens to generate (None: all there is room for)", 1)
    min_tokens: int = option(0, "no end of sequence or stop before this many tokens", 0)
    logprobs: int | None = option(None, "log-probabilities of this many best tokens; -1 = all", -1)
    prompt_logprobs: int | None = option(None, "the same for the prompt's tokens", -1)
    logit_bias: dict[int, float] | None = option(None, "added to the logits of these tokens")
    allowed_token_ids: list[int] | None = option(None, "nothing else may be drawn")
    bad_words: list[str] | None = option(None, "texts whose last token may not complete them")
    skip_special_tokens: bool = option(True, "leave special tokens out of the text")
    detokenize: bool = option(True, "produce text, not only token ids")
    priority: int = option(0, "lower is served sooner (scheduling_policy priority)")
    cache_salt: str | None = option(None, "prefixes are shared only between equal salts")

    def __post_init__(self):
        for name in ("stop", "bad_words", "stop_token_ids"):  # None and a single text are shorthand
            value = getattr(self, name)
            value = [] if value is None else [value] if isinstance(value, str) else value
            setattr(self, name, value)
        if isinstance(self.logit_bias, dict):  # keys of a JSON object are strings
            self.logit_bias = {int(k) if re.fullmatch(r"\d+", str(k)) else k: v
                               for k, v in self.logit_bias.items()}
        check_fields(self)
        require(self.detokenize or not self.stop, "stop strings need detokenize=True")
        require(self.allowed_token_ids != [], "allowed_token_ids must not be empty")
        require(self.n == 1 or self.temperature >= GREEDY_EPSILON,
                f"n = {self.n} needs temperature above 0: greedy completions would all be the same")
        require(self.max_tokens is None or self.min_tokens <= self.max_tokens,
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")

def parse_bytes(text, name="size"):
    """Bytes from a human spelling.

    >>> parse_bytes("512MiB"), parse_bytes("1.5G"), parse_bytes("4096")
    (536870912, 1610612736, 4096)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    require(match, f"{name} {text!r} is not a size; write e.g. 512MiB or 2G")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))

def show_bytes(count):
    """
    >>> show_bytes(114688), show_bytes(470_000_000)
    ('112.0 KiB', '448.2 MiB')
    """
    power = next(p for p in range(4) if count < 1024 ** (p + 1) or p == 3)
    return f"{count / 1024**power:.{min(power, 1)}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"

def add_options(parser, config_class, skip=()):
    """One flag per scalar or list field; a flag that is not given leaves no trace in the result."""
    for f in fields(config_class):
        kind, extra = str(f.type).removesuffix(" | None"), {"default": argparse.SUPPRESS}
        if f.name in skip or kind.startswith("dict"):
            continue
        if kind == "bool":
            extra["action"] = argparse.BooleanOptionalAction
        else:
            element = kind.removeprefix("list[").removesuffix("]")
            extra["type"] = {"int": int, "float": float, "str": str}[element]
            extra["action"] = "store" if element == kind else "append"
        shown = "" if f.default is None else f" (default: {f.default})"
        flag = "--" + f.name.replace("_", "-")
        parser.add_argument(flag, help=f.metadata["help"] + shown, **extra)


# ==================================================================================================
# 2  KV arithmetic
# ==================================================================================================
# Problem: how many requests fit?  Each token keeps one key and one value vector per layer and KV
# head: a product of six numbers, and every off-by-one in it is an off-by-one in admission.
#
#     bytes per token = 2 (K and V) x L layers x KH heads x D width x bytes per element
#
# Lengths become blocks and positions become slots in these functions and nowhere else:
#
#     position 9, block size 4, table [7, 3, 11]  ->  block 11, offset 1  ->  slot 11*4 + 1 = 45
#
# Invariant: writer (slot mapping) and reader (block table) use the same position -> slot rule.
# Try: python nanoserve.py --model toy --num-kv-blocks 5 --verbose --prompt hi.

def cdiv(a, b):
    """Ceiling division.

    >>> [cdiv(tokens, 4) for tokens in (0, 1, 4, 5, 8, 9)]
    [0, 1, 1, 2, 2, 3]
    """
    return -(-a // b)

def slot_of(block_id, pos, block_size):
    """Cache slot of a position whose block is known; works on integers and on arrays.

    >>> [slot_of([7, 3, 11][pos // 4], pos, 4) for pos in (0, 3, 4, 7, 8, 9)]
    [28, 31, 12, 15, 44, 45]
    """
    return block_id * block_size + pos % block_size

def hit_cap(num_tokens, block_size):
    """Most tokens a prefix hit may cover: whole blocks, and the last token is always computed,
    because its hidden state is what the next token is sampled from.

    >>> [hit_cap(n, 16) for n in (16, 17, 1728, 1729)]
    [0, 16, 1712, 1728]
    """
    return (num_tokens - 1) // block_size * block_size

def kv_bytes_per_token(num_layers, num_kv_heads, head_dim, element_size, scale_size=0):
    """
    >>> kv_bytes_per_token(28, 8, 128, 2)           # Qwen3-0.6B in bf16: 112 KiB
    114688
    >>> kv_bytes_per_token(28, 8, 128, 1, scale_size=4)   # int8, an fp32 scale per token and head
    59136
    """
    return 2 * num_layers * num_kv_heads * (head_dim * element_size + scale_size)

def num_blocks_in(pool_bytes, block_size, bytes_per_token):
    """Blocks of a pool, the null block included.

    >>> num_blocks_in(16 << 30, 16, kv_bytes_per_token(32, 8, 128, 2))   # Llama-3-8B, 16 GiB
    8192
    """
    return pool_bytes // (block_size * bytes_per_token)

def slots_of(num_blocks, block_size):
    """Tokens a pool can hold: block 0 is the null block and stores nothing.

    >>> slots_of(8192, 16), slots_of(8192, 16) // 8192     # 15 full requests, not 16
    (131056, 15)
    """
    return (num_blocks - 1) * block_size

def max_blocks_of(num_tokens, block_size, window=0, max_step_tokens=0):
    """Most blocks a sequence of this length holds at once. A sliding window frees what it has
    passed, but a step needs its own tokens' blocks before it ends.

    >>> max_blocks_of(8193, 16), max_blocks_of(100_000, 16, window=4096, max_step_tokens=2048)
    (513, 385)
    """
    full = cdiv(num_tokens, block_size)
    return min(full, cdiv(window - 1 + max_step_tokens, block_size) + 1) if window else full


# ==================================================================================================
# 3  Text
# ==================================================================================================
# Problem: the model speaks in token ids, people in text, and one token is often not one character:
# it can be half an emoji, a space glued to a word, or a marker that nobody should see.  Idea: a
# token stands for fixed bytes.  A reply is these bytes joined and read as UTF-8; streaming is the
# same reading bit by bit, where unfinished characters and beginnings of stop strings wait.
#
#     tokens        K V   E7 BC    93    F0 9F   9A 80    E     N     xyz
#     characters    "KV"   ""     "缓"    ""     "🚀"    "E"   "N"    "xyz"
#     stop "END"    "KV"   ""     "缓"    ""     "🚀"     ""    ""    "ENxyz"
#                          └ half a character waits        └ and so does the start of a stop string
#
# Invariant: joined deltas equal decode(prompt + output) minus decode(prompt).
# Invariant: what was shown is final: no part of a stop string and no half character is taken back.
# Why: bytes, not text: checkpoints.py knows which bytes each token stands for, whatever the
#   tokenizer's own decoder would do to a text as a whole.

class IncrementalDetokenizer:
    """Text of one output while it grows: push token ids, take text that will not change again.

    stop: strings that end the output. The text ends before the match, or right after it when
    include_stop_str_in_output is set; the match that is complete first wins. A match counts only if
    its last character comes after min_tokens tokens. A token costs the same in a long text."""
    def __init__(self, tokenizer, prompt_token_ids, stop=(), min_tokens=0,
                 include_stop_str_in_output=False, skip_special_tokens=True):
        self.tokenizer, self.skip_special = tokenizer, skip_special_tokens
        self.stop, self.include_stop = stop, include_stop_str_in_output
        self.longest_stop = max(map(len, stop), default=0)
        self.min_tokens, self.num_tokens = min_tokens, 0  # num_tokens: read, up to the stop string
        self.stop_reason, self.pieces, self.num_taken = None, [], 0
        self.held = ""  # a tail that may still become a stop string
        # The prompt's last bytes decide where the output begins: at the start of the text, where
        # leading spaces are dropped, or inside a character, which the output completes.
        tail = b""
        for token_id in reversed(prompt_token_ids):
            tail = tokenizer.token_bytes(token_id, skip_special_tokens) + tail
            if len(tail) >= 4:  # the longest UTF-8 character
                break
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.utf8.decode(tail)
        self.prompt_is_broken = bool(self.utf8.getstate()[0])
        self.num_strip = 0 if tail else tokenizer.num_stripped

    def push(self, token_ids, finished=False):
        """Append output tokens; finished releases what was held back. Returns the stop string that
        ended the output, else None; nothing is read after that."""
        for token_id in token_ids:
            if self.stop_reason is not None:
                break
            self.num_tokens += 1
            data = self.tokenizer.token_bytes(token_id, self.skip_special)
            if self.num_strip and data:  # spaces that SentencePiece put in front of the text
                spaces = min(self.num_strip, len(data) - len(data.lstrip(b" ")))
                data = data[spaces:]
                self.num_strip = 0 if data else self.num_strip - spaces
            self._append(self.utf8.decode(data))
        if finished and self.stop_reason is None:
            self._append(self.utf8.decode(b"", final=True))  # half a character: U+FFFD, once
            self.pieces.append(self.held)
            self.held = ""
        return self.stop_reason

    def _append(self, piece):
        if piece and self.prompt_is_broken:  # its own text shows what it left unfinished
            piece, self.prompt_is_broken = piece.removeprefix("\ufffd"), False
        if not piece:
            return
        text, kept = self.held + piece, ""
        found = self._find_stop(text) if self.num_tokens > self.min_tokens else None
        if found:
            start, self.stop_reason = found
            text = text[: start + len(self.stop_reason) if self.include_stop else start]
        else:  # the longest tail that some stop string begins with
            num_held = next((n for n in range(min(len(text), self.longest_stop - 1), 0, -1)
                             if any(s.startswith(text[-n:]) for s in self.stop if len(s) > n)), 0)
            text, kept = text[: len(text) - num_held], text[len(text) - num_held :]
        self.pieces.append(text)
        self.held = kept

    def _find_stop(self, text):
        """(start, stop string) of the first match that ends in the new characters of text."""
        starts = [(text.find(s, max(0, len(self.held) - len(s) + 1)), s) for s in self.stop]
        found = [(start + len(s), start, s) for start, s in starts if start >= 0]
        return min(found)[1:] if found else None

    @property
    def text(self):
        """All text that may be shown so far."""
        return "".join(self.pieces)

    def take_delta(self):
        """Text that became final since the last call."""
        pieces, self.num_taken = self.pieces[self.num_taken :], len(self.pieces)
        return "".join(pieces)


# ==================================================================================================
# 4  Linear layers
# ==================================================================================================
# Problem: a decoder layer multiplies by seven matrices, and reading them is most of a decode step.
# Idea: fewer, larger products (q, k and v share their input, and so do gate and up), and fewer
# bytes: a weight may be codes of 4 or 8 bits with a scale per row or group of columns.
#
#     checkpoint   q_proj (H*D, E)   k_proj (KH*D, E)   v_proj (KH*D, E)
#     here         one weight ((H + 2*KH)*D, E);  q, k, v are column ranges of its output
#
#     w  -0.9 0.3 0.5 1.4   ──►   codes -5 2 3 -8, scale -0.175   ──►   0.88 -0.35 -0.53 1.4 ...
#
# Codes are widened in registers, next to the product; nowhere is there a wide copy of a weight.
#
# Invariant: a stacked layer gives the results of its parts side by side; only their place differs.
# Why: parts that differ (one left dense, or quantized in another order of inputs) stay apart.
# Simplification: weights made here are rounded to nearest; GPTQ and AWQ, which look at activations
#   to round better, are read from checkpoints (quantized.py) and not made.
# Try: python bench.py quant --quick

class Linear:
    """y = x W^T + b, W stacked from checkpoint matrices with the same input width."""
    def __init__(self, model, names, out_sizes, in_size, bias):
        parts = [model.weight(name, (size, in_size)) for name, size in zip(names, out_sizes)]
        # (sum of out_sizes, in_size), each in the layout that the machine multiplies fastest
        self.weights = [kernels.prepare_weight(weight, model.dtype) for weight in join_rows(parts)]
        biases = [model.tensor(f"{name}.bias", (size,))
                  for name, size in zip(names, out_sizes) if bias]
        self.bias = torch.cat(biases) if bias else None

    def __call__(self, x):
        if len(self.weights) == 1:
            return kernels.linear(x, self.weights[0], self.bias)
        sizes = [weight.shape[0] for weight in self.weights]
        y = kernels.empty((len(x), sum(sizes)), x.dtype, x.device)
        biases = self.bias.split(sizes) if self.bias is not None else [None] * len(sizes)
        for weight, bias, columns in zip(self.weights, biases, y.split(sizes, dim=1)):
            kernels.linear(x, weight, bias, out=columns)
        return y

    def gated(self, x):
        """silu(first half of y) * second half, if possible without storing y."""
        if len(self.weights) == 1:
            return kernels.gated_linear(x, self.weights[0], self.bias)
        return kernels.silu_mul(self(x))

def join_rows(parts):
    """One weight that holds the rows of all, or the parts as they are if their forms differ."""
    narrow = [isinstance(part, kernels.QuantizedWeight) for part in parts]
    if not any(narrow):
        return [torch.cat(parts)]
    stacked = kernels.stack(parts) if all(narrow) else None
    return parts if stacked is None else [stacked]

@dataclass(frozen=True)
class Quant(Row):
    """convert(weight, config): a weight as it is stored, tensor or QuantizedWeight, as it is to
    run. head: the row for the LM head, whose errors go straight into the logits."""
    convert: Callable
    head: str

QUANTS = {
    "auto": Quant("as the checkpoint stores them", lambda w, config: w, "auto"),
    "none": Quant("dense: quantized weights are expanded", lambda w, config: dense(w), "none"),
    "int8": Quant("8 bits, a scale per row",
                  lambda w, config: kernels.quantize_int8(dense(w)), "int8"),
    "int4": Quant("4 bits, a scale per quantization_group columns; LM head int8",
                  lambda w, config: kernels.quantize_int4(
                      dense(w), config.quantization_group, config.quantization_symmetric), "int8"),
    "w8a8": Quant("int8, and inputs rounded to int8 row by row; LM head int8",
                  lambda w, config: replace(kernels.quantize_int8(dense(w)), int8_inputs=True),
                  "int8"),
    "fp8": Quant("8-bit floats (e4m3), a scale per row",
                 lambda w, config: kernels.quantize_fp8(dense(w)), "fp8"),
}


# ==================================================================================================
# 5  Checkpoints
# ==================================================================================================
# Problem: weights come as a folder of safetensors shards, one GGUF file or a hub id, under
# different names, number types and row orders.  What a serving engine must know of that fits in a
# sentence: a checkpoint is a bag of tensors with Hugging Face's names, from which each is TAKEN
# once, in whatever order the layers are built.  How files spell it is in checkpoints.py.
#
#     open_checkpoint("model.gguf")  ─► .config  .tokenizer()  .take(name, shape) ...  .finish()
#
# Invariant: a tensor costs memory when it is taken, and only then; in the end the bag is empty.

def open_checkpoint(model=None):
    """The checkpoint that `--model` names: nothing, toy, a folder, a .gguf file or a hub id."""
    if model is None:
        return GgufFile(default_model())
    if model == "toy":
        return Toy()
    path = Path(model).expanduser()
    if path.is_dir():
        return SafetensorsFolder(path)
    if path.suffix == ".gguf":
        return GgufFile(path)
    require(re.fullmatch(r"[\w.-]+/[\w.-]+", str(model)),
            f"model {model!r} is neither toy, a folder, a .gguf file nor a hub id")
    return SafetensorsFolder(fetch_from_hub(model))


# ==================================================================================================
# 6  Model
# ==================================================================================================
# Problem: Llama, Mistral, Qwen2 and Qwen3 are one network with a few switches.  Idea: one decoder,
# read once; a row of ARCHS says which switches a family sets, the config file brings the numbers.
#
#     token_ids ─ embed ─► x ─┬─ norm ─ qkv ─ RoPE ─ store K,V ─ attention ─ o ─┬─ norm ─ MLP ─┬─►
#         (T,)                └───────────────── residual ──────────────────────┴──────────────┘
#
# All sequences of a step lie end to end in one packed batch of T tokens, without padding; only
# attention knows where one ends and the next begins (AttentionMetadata), all else is row by row.
# K is rotated before it is stored, V is not; the cache holds KH heads, never copies per query head.
#
# Invariant: a row's result depends on its sequence and position, not on the packing.
# Why: layers are plain objects that take their tensors from the checkpoint by name (section 5), so
#   there is no empty model to fill, no name map, and a tensor nobody takes is noticed.

def rope_frequencies(rope, dim, max_position, max_len):
    """Inverse frequencies (dim / 2,) and the factor on cos and sin, for every type in ROPE_KEYS.
    RoPE: Su et al. 2021, arXiv 2104.09864. YaRN: Peng et al. 2023, arXiv 2309.00071."""
    base, kind = rope["rope_theta"], rope["rope_type"]
    if kind == "dynamic" and max_len > max_position:
        # NTK scaling stretches the base with the length. The published rule follows the current
        # length, which would rotate cached keys anew at every step; here it follows max_model_len.
        stretch = rope["factor"] * max_len / max_position - (rope["factor"] - 1)
        base *= stretch ** (dim / (dim - 2))
    inv_freq = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if kind == "linear":
        inv_freq /= rope["factor"]
    elif kind == "llama3":
        inv_freq = llama3_frequencies(inv_freq, rope)
    elif kind == "factors":
        inv_freq /= torch.tensor(rope["factors"], dtype=torch.float32)
    elif kind == "yarn":
        return yarn_frequencies(inv_freq, rope, dim)
    return inv_freq, 1.0

def llama3_frequencies(inv_freq, rope):
    """Llama 3.1: long waves are stretched by the factor, short ones kept, those between blended."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * inv_freq / (2 * math.pi)  # in that context
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return inv_freq / rope["factor"] * (1 - blend) + inv_freq * blend

def yarn_frequencies(inv_freq, rope, dim):
    """YaRN: dimensions that turn often within the original context keep their frequency, those that
    turn less than once are interpolated; cos and sin are scaled to keep the softmax as sharp."""
    def dim_of(turns):  # the (fractional) frequency index that makes this many turns
        ratio = rope["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(rope["rope_theta"]))

    def magnitude(m):
        return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0
    factor, scale = rope["factor"], rope.get("attention_factor")
    low, high = dim_of(rope.get("beta_fast") or 32), dim_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
    if scale is None:
        pair = (rope.get("mscale"), rope.get("mscale_all_dim"))
        scale = magnitude(pair[0]) / magnitude(pair[1]) if all(pair) else magnitude(1.0)
    return inv_freq / factor * ramp + inv_freq * (1 - ramp), scale

def rope_table(config, max_len, device):
    """cos and sin of every position, fp32: (max_len, rotary_dim), cos in the first half."""
    dim = int(config.head_dim * config.rope["partial_rotary_factor"])
    inv_freq, scale = rope_frequencies(config.rope, dim, config.max_position, max_len)
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * inv_freq  # (max_len, dim / 2)
    return (torch.cat([angles.cos(), angles.sin()], dim=1) * scale).to(device)

@dataclass(frozen=True)
class Arch(Row):
    """The switches of one model family. None: the config's attention_bias or mlp_bias decides."""
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    mlp_bias: bool | None = False
    qk_norm: bool = False

ARCHS = {
    "LlamaForCausalLM": Arch("Llama 1 to 3, SmolLM, and what is converted to it", mlp_bias=None),
    "MistralForCausalLM": Arch("Mistral: a sliding window", qkv_bias=False, o_bias=False),
    "Qwen2ForCausalLM": Arch("Qwen2, Qwen2.5: biased q, k, v", qkv_bias=True, o_bias=False),
    "Qwen3ForCausalLM": Arch("Qwen3: q and k normalised per head", qk_norm=True),
}

def read_model_config(checkpoint):
    """ModelConfig of a checkpoint whose architecture has a row in ARCHS."""
    config, name = checkpoint.config, checkpoint.name
    arch = (config.get("architectures") or [None])[0]
    require(arch in ARCHS, f"{name}: architecture {arch!r} is not supported, only {[*ARCHS]}")
    return ModelConfig.from_dict(config, name)

@dataclass
class ForwardContext:
    """What all layers share in one step."""
    positions: torch.Tensor  # int64 (T,)
    meta: kernels.AttentionMetadata
    kv: list  # LayerKV of each layer

class Attention:
    """Grouped-query attention over the paged cache."""
    def __init__(self, model, layer_index):
        c, arch, prefix = model.config, model.arch, f"model.layers.{layer_index}.self_attn."
        H, KH, D, E = c.num_heads, c.num_kv_heads, c.head_dim, c.hidden_size
        self.model, self.layer_index, self.window = model, layer_index, c.layer_windows[layer_index]
        names, sizes = [prefix + n for n in ("q_proj", "k_proj", "v_proj")], [H * D, KH * D, KH * D]
        qkv_bias = c.attention_bias if arch.qkv_bias is None else arch.qkv_bias
        o_bias = c.attention_bias if arch.o_bias is None else arch.o_bias
        self.qkv_proj = Linear(model, names, sizes, E, qkv_bias)
        self.o_proj = Linear(model, [prefix + "o_proj"], [E], H * D, o_bias)
        self.norms = [model.tensor(prefix + n, (D,)) for n in ("q_norm.weight", "k_norm.weight")
                      if arch.qk_norm]
        self.kv_scales = [model.kv_scale(prefix + n) for n in ("k_scale", "v_scale")]

    def __call__(self, x, ctx):
        """x (T, E) -> (T, E). K and V of the step are cached before they are read."""
        c, kv = self.model.config, ctx.kv[self.layer_index]
        H, KH, D = c.num_heads, c.num_kv_heads, c.head_dim
        qkv = self.qkv_proj(x)  # (T, (H + 2*KH) * D)
        if self.norms:
            heads = qkv.view(len(x), H + 2 * KH, D)
            for part, weight in zip((heads[:, :H], heads[:, H : H + KH]), self.norms):
                kernels.rms_norm(part, weight, c.rms_norm_eps, out=part)
        q = kernels.rope_store_kv(qkv, self.model.cos_sin, ctx.positions, kv, ctx.meta.slot_mapping,
                                  H, KH, D, c.rope["interleaved"])  # (T, H, D)
        out = self.model.attention_backend(q, kv, ctx.meta, D**-0.5, self.window)  # (T, H, D)
        return self.o_proj(out.reshape(len(x), H * D))

class MLP:
    """SwiGLU: down(silu(gate(x)) * up(x)). Shazeer 2020, arXiv 2002.05202."""
    def __init__(self, model, layer_index):
        c, prefix = model.config, f"model.layers.{layer_index}.mlp."
        E, width = c.hidden_size, c.intermediate_size
        bias = c.mlp_bias if model.arch.mlp_bias is None else model.arch.mlp_bias
        names = [prefix + "gate_proj", prefix + "up_proj"]
        self.gate_up_proj = Linear(model, names, [width, width], E, bias)
        self.down_proj = Linear(model, [prefix + "down_proj"], [E], width, bias)

    def __call__(self, x):
        return self.down_proj(self.gate_up_proj.gated(x))

class Model:
    """The decoder. Built from a checkpoint, run on packed batches.

    dtype: of activations. weight_dtype: of matrices, where it differs."""
    def __init__(self, ckpt, config, dtype, device, attention_backend, max_len, weight_dtype=None,
                 engine_config=None):
        self.ckpt, self.config, self.arch = ckpt, config, ARCHS[config.architecture]
        self.engine_config = engine_config or EngineConfig()
        self.dtype, self.device, self.attention_backend = dtype, device, attention_backend
        self.weight_dtype = weight_dtype or dtype
        self.cos_sin = rope_table(config, max_len, device)
        V, E = config.vocab_size, config.hidden_size
        # The largest matrices come first, while memory is empty. Tied: one table for both.
        self.embed_tokens = self.lm_head = self.prepared("model.embed_tokens", (V, E))
        if not config.tie_word_embeddings:
            self.lm_head = self.prepared("lm_head", (V, E))
        self.layers = [
            (self.tensor(f"model.layers.{i}.input_layernorm.weight", (E,)), Attention(self, i),
             self.tensor(f"model.layers.{i}.post_attention_layernorm.weight", (E,)), MLP(self, i))
            for i in range(config.num_layers)]
        self.norm = self.tensor("model.norm.weight", (E,))
        ckpt.finish()
        del self.ckpt  # its files are closed with it

    def tensor(self, name, shape, dtype=None):
        return self.ckpt.take(name, shape).to(self.device, dtype or self.dtype)

    def kv_scale(self, name):
        """What a layer's keys or values are divided by in an fp8 cache; 1 if no tensor says so."""
        shape = self.ckpt.shapes.get(name)
        if shape is None:
            return 1.0
        scale = self.tensor(name, shape and (1,), torch.float32).item()
        require(0 < scale < math.inf, f"{self.ckpt.name}: {name} cannot be {scale}")
        return scale

    def weight(self, name, shape, head=False):
        """A matrix in the form that QUANTS asks for. head: of the embedding or the LM head."""
        row = QUANTS[self.engine_config.quantization]
        row = QUANTS[row.head] if head else row
        weight = row.convert(self.ckpt.take_weight(name, shape), self.engine_config)
        if isinstance(weight, kernels.QuantizedWeight):
            return weight.to(self.device)
        return weight.to(self.device, self.weight_dtype)

    def prepared(self, name, shape):
        """The embedding or the LM head."""
        return kernels.prepare_weight(self.weight(name, shape, head=True), self.dtype)

    def matrices(self):
        """The weights of all layers and of the tables, which are one weight where they are tied."""
        linears = [linear for _, attention, _, mlp in self.layers for linear in (
            attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)]
        tables = {id(w): w for w in (self.embed_tokens, self.lm_head)}
        return [weight for linear in linears for weight in linear.weights] + [*tables.values()]

    def matrix_bytes(self):
        """({"weights": bytes, "scales": bytes}, {form: bytes}) of all matrices."""
        parts, forms = Counter(), Counter()
        for weight in self.matrices():
            sizes = kernels.weight_bytes(weight)
            parts.update(sizes)
            forms[kernels.weight_kind(weight)] += sizes["weights"]
        return parts, forms

    def activation_bytes(self, num_tokens, num_rows):
        """Bytes alive at the widest place of a step: the residual stream and either what is around
        attention or what is around the MLP, and the logits of num_rows rows."""
        c = self.config
        E, F, D, H = c.hidden_size, c.intermediate_size, c.head_dim, c.num_heads
        widest = E + max((2 * H + 2 * c.num_kv_heads) * D, 3 * F)
        return num_tokens * (4 * E + self.dtype.itemsize * widest) + 4 * num_rows * c.vocab_size

    def forward(self, token_ids, ctx):
        """token_ids (T,) -> normalised hidden states (T, E). `x` is always the newest contribution;
        the norm adds it to the residual stream, which is fp32 (see rms_norm), and normalises."""
        x, residual = kernels.embed(token_ids, self.embed_tokens, self.dtype)  # (T, E)
        eps = self.config.rms_norm_eps
        for input_norm, attention, post_norm, mlp in self.layers:
            x = attention(kernels.rms_norm(x, input_norm, eps, residual), ctx)  # residual += x
            x = mlp(kernels.rms_norm(x, post_norm, eps, residual))
        return kernels.rms_norm(x, self.norm, eps, residual)

    def logits(self, hidden):
        """hidden (R, E) -> fp32 (R, V): only rows that someone wants a token or a probability from.
        Why fp32: at a logit of 20 neighbouring bf16 numbers are 0.125 apart: many ties."""
        return kernels.linear(hidden, self.lm_head, dtype=torch.float32)


# ==================================================================================================
# 7  Block pool
# ==================================================================================================
# Problem: requests grow one token at a time and end at unknown lengths; contiguous reservations
# waste most of the memory.  Idea (PagedAttention, Kwon et al. 2023): cut the cache into equal
# blocks, hand them out singly, and let a table per request say which block holds which positions.
#
#     free queue:  head ⇄ 5 ⇄ 2 ⇄ 9 ⇄ tail       oldest first: the head is reused next
#                              │
#                a prefix hit takes 2 out of the middle in O(1): the links live in the block
#
# A block whose reference count is 0 waits in the free queue and keeps its hash: it is free *and*
# still hittable, until it is handed out again.
#
# Invariant: every block but the null block is in the free queue exactly when its ref_cnt is 0.
# Invariant: the hash map and the blocks' own hashes say the same.
# Why: block 0 is the null block, a stand-in for positions that need no storage; nobody owns it.

class KVCacheBlock:
    """One block of the pool, without its tensors: identity, counts and links."""
    __slots__ = ("block_id", "ref_cnt", "block_hash", "prev_free", "next_free")

    def __init__(self, block_id):
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash = None  # set while the block is full and published
        self.prev_free = self.next_free = None

    def __repr__(self):
        return f"<block {self.block_id} ref {self.ref_cnt}{' hashed' if self.block_hash else ''}>"

class FreeBlockQueue:
    """Doubly linked list through the blocks themselves: every operation is O(1)."""
    def __init__(self, blocks):
        self.head, self.tail = KVCacheBlock(-1), KVCacheBlock(-2)  # no special case at the ends
        self.head.next_free, self.tail.prev_free = self.tail, self.head
        self.num_free = 0
        for block in blocks:
            self.append(block)

    def append(self, block):
        last = self.tail.prev_free
        last.next_free, block.prev_free = block, last
        block.next_free, self.tail.prev_free = self.tail, block
        self.num_free += 1

    def remove(self, block):
        block.prev_free.next_free, block.next_free.prev_free = block.next_free, block.prev_free
        block.prev_free = block.next_free = None
        self.num_free -= 1

    def popleft(self):
        block = self.head.next_free
        self.remove(block)
        return block

    def __iter__(self):
        block = self.head.next_free
        while block is not self.tail:
            yield block
            block = block.next_free

class BlockPool:
    """All blocks, which of them are free, and which content each published block holds."""
    def __init__(self, num_blocks):
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.free_queue = FreeBlockQueue(self.blocks[1:])
        self.cached = {}  # block hash -> {block_id: block}; equal content may exist more than once

    @property
    def num_free(self):
        return self.free_queue.num_free

    @property
    def usage(self):
        """Fraction of the blocks that some request owns."""
        return 1 - self.num_free / max(len(self.blocks) - 1, 1)

    def get_new_blocks(self, count):
        """Take blocks from the head of the queue; the caller knows they are free."""
        taken = [self.free_queue.popleft() for _ in range(count)]
        for block in taken:
            if block.block_hash is not None:
                self.withdraw(block)  # the old content is about to be overwritten
            block.ref_cnt = 1
        return taken

    def touch(self, blocks):
        """Take a reference on blocks found by their hash; a free one leaves the free queue."""
        for block in blocks:
            if block is not self.null_block:
                if block.ref_cnt == 0:
                    self.free_queue.remove(block)
                block.ref_cnt += 1

    def free_blocks(self, blocks):
        """Give references back. `blocks` come tail first, so that a sequence loses its tail before
        its head: a prefix without its head can never be found again."""
        for block in blocks:
            if block is not self.null_block:
                block.ref_cnt -= 1
                if block.ref_cnt == 0:
                    self.free_queue.append(block)

    def publish(self, block, block_hash):
        """From now on a lookup of this hash may find this block."""
        block.block_hash = block_hash
        self.cached.setdefault(block_hash, {})[block.block_id] = block

    def withdraw(self, block):
        """The block no longer stands for its content."""
        same = self.cached[block.block_hash]
        del same[block.block_id]
        if not same:
            del self.cached[block.block_hash]
        block.block_hash = None

    def lookup(self, block_hash):
        """The oldest published block with this hash, or None."""
        same = self.cached.get(block_hash)
        return next(iter(same.values())) if same else None

    def reset(self):
        """Forget all cached content. False, and nothing changed, while any request owns a block."""
        if self.num_free != len(self.blocks) - 1:
            return False
        for block in self.blocks:
            if block.block_hash is not None:
                self.withdraw(block)
        return True


# ==================================================================================================
# 8  Prefix cache and KV manager
# ==================================================================================================
# Problem: many prompts begin alike, and recomputing K and V of an equal prefix gives equal bytes.
# Idea: name every full block by a hash of *everything it depends on*, the chain of blocks before it
# included, and look the names up before computing.
#
#     tokens   A B C D | E F G H | I J           block size 4
#     names    h1=H(0,ABCD)  h2=H(h1,EFGH)        (I J is not full: no name, never shared)
#     a second request A..H X finds h1, h2: 8 tokens cost nothing, one is computed
#
# The hash is sha256, so two different contents meet with probability 2^-128 and tokens are not
# compared on a hit.  It needs no seed: a name means the same content in every process.
#
# Invariant: only full blocks of confirmed tokens are published; drafts and partial blocks never.
# Invariant: a request's table only grows at its end, except that window-expired blocks become null.
# Why: "confirmed" is about ids. A block is published when it is *scheduled*, before its K and V
#   exist: in each layer the step writes all K and V before any attention reads them, so a later
#   request of the same step may hit (three prompts that share 16 tokens: 21, 5 and 5 computed).
# Simplification: one cache group. Production engines keep one table per kind of layer; here a model
#   with mixed layers keeps all positions, and each layer's kernel applies its own window.
# Try: python nanoserve.py, two turns of chat, then /stats: turn 2 reports cached tokens.

ROOT_HASH = hashlib.sha256(b"nanoserve").digest()  # the parent of every first block

def hash_block(parent, token_ids, extra_keys=(), group_id=0):
    """Name of one full block: 32 bytes of sha256 and 4 bytes of cache-group id.

    >>> a = hash_block(ROOT_HASH, [1, 2]); a == hash_block(ROOT_HASH, [1, 2]), len(a)
    (True, 36)
    >>> a == hash_block(ROOT_HASH, [1, 3]), a == hash_block(ROOT_HASH, [1, 2], ("salt",))
    (False, False)
    """
    digest = hashlib.sha256(parent)
    digest.update(array("q", token_ids).tobytes())
    if extra_keys:
        digest.update(repr(extra_keys).encode())
    return digest.digest() + group_id.to_bytes(4, "big")

def block_extra_keys(start, block_size, cache_salt=None, lora_name=None, mm_items=(), embeds=None):
    """What besides token ids decides the K and V of the block at position `start`.

    mm_items: (offset, length, content id) of images or audio standing for placeholder tokens;
    embeds: bytes of the prompt embeddings of this block. The salt enters the first block only: the
    chain carries it to all later ones."""
    keys = [("lora", lora_name)] if lora_name else []
    end = start + block_size
    keys += [("mm", content_id, offset - start) for offset, length, content_id in mm_items
             if offset < end and offset + length > start]
    if start == 0 and cache_salt is not None:
        keys.append(("salt", cache_salt))
    if embeds is not None:
        keys.append(("embeds", hashlib.sha256(embeds).hexdigest()))
    return tuple(keys)

@dataclass
class PrefixCacheStats:
    """Counted once per admission; those after a preemption apart. Requests, tokens."""
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0

    def record(self, num_tokens, num_hits, preempted):
        kind = "preempted_" if preempted else ""
        for name, amount in (("requests", 1), ("queries", num_tokens), ("hits", num_hits)):
            setattr(self, kind + name, getattr(self, kind + name) + amount)

    def since(self, earlier):
        """Deltas: what happened between two copies of the totals."""
        return PrefixCacheStats(*(now - then for now, then in zip(astuple(self), astuple(earlier))))

class KVCacheManager:
    """Which blocks each request owns. Speaks of requests to the scheduler, of blocks to the pool.

    window: sliding window shared by all layers, 0 if any layer attends to everything.
    max_step_tokens: most tokens a request can compute in one step, all inside the window."""
    def __init__(self, num_blocks, block_size, enable_caching=True, window=0, max_step_tokens=2048):
        self.pool = BlockPool(num_blocks)
        self.block_size, self.enable_caching = block_size, enable_caching
        self.window, self.max_step_tokens = window, max_step_tokens
        self.tables = {}  # request_id -> list of blocks, in position order
        self.num_published = {}  # request_id -> leading blocks that have their name
        self.published = {}  # request_id -> blocks it published in the current step
        self.stats = PrefixCacheStats()

    def find_cached_blocks(self, request):
        """Longest usable prefix in the cache: a list of blocks, null where a window has passed."""
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return []
        num_usable = hit_cap(request.num_tokens, self.block_size) // self.block_size
        names = request.block_hashes[:num_usable]
        if self.window:
            return self._find_window(names)
        # Up to the first miss: past a hole nothing can be used.
        return list(itertools.takewhile(bool, map(self.pool.lookup, names)))

    def _find_window(self, names):
        """With a window only the last window-1 tokens before the next one must be there: search
        from the right for that many blocks in a row; what lies before them is null."""
        wanted = max(cdiv(self.window - 1, self.block_size), 1)
        null, run = self.pool.null_block, []
        for i in reversed(range(len(names))):
            block = self.pool.lookup(names[i])
            run = [block, *run] if block else []
            if len(run) == wanted:
                return [null] * i + run
        return run  # a run that touches position 0 is a prefix, however short

    def blocks_for_whole(self, num_tokens):
        return max_blocks_of(num_tokens, self.block_size, self.window, self.max_step_tokens)

    def can_admit_whole(self, num_tokens, cached):
        """Would the full input fit the blocks that are free now? A check, not a reservation."""
        usable = [block for block in cached if block is not self.pool.null_block]
        needed = self.blocks_for_whole(num_tokens) - len(usable)
        return max(needed, 0) + sum(block.ref_cnt == 0 for block in usable) <= self.pool.num_free

    def allocate_slots(self, request, num_new_tokens, cached=(), num_lookahead=0, max_len=1 << 60):
        """Give the request room for its next tokens; all or nothing.

        cached: blocks found for a request that owns none yet. num_lookahead: slots for drafts.
        Returns the blocks the table grew by, cached ones included; None if too few are free."""
        table = self.tables.get(request.request_id)
        start = request.num_computed_tokens
        if table is None:
            start, length = start + len(cached) * self.block_size, len(cached)
        else:
            self._free_expired(table, start)
            length = len(table)
        wanted = min(start + num_new_tokens + num_lookahead, max_len)
        num_new = max(cdiv(wanted, self.block_size) - length, 0)
        revived = sum(b.ref_cnt == 0 and b is not self.pool.null_block for b in cached)
        if num_new + revived > self.pool.num_free:
            return None
        if table is None:
            self.pool.touch(cached)
            table = self.tables[request.request_id] = list(cached)
            self.num_published[request.request_id] = len(cached)
        fresh = self.pool.get_new_blocks(num_new)
        table.extend(fresh)
        self.publish_full_blocks(request, min(start + num_new_tokens, request.num_tokens))
        return [*cached, *fresh]

    def _free_expired(self, table, num_computed):
        """Blocks wholly before the window of the next token become null, the latest first."""
        if not self.window:
            return
        for i in reversed(range(max(num_computed - self.window + 1, 0) // self.block_size)):
            if table[i] is self.pool.null_block:
                break
            self.pool.free_blocks([table[i]])
            table[i] = self.pool.null_block

    def publish_full_blocks(self, request, num_tokens):
        """Name the blocks that `num_tokens` confirmed tokens fill."""
        if not self.enable_caching:
            return
        table, request_id = self.tables[request.request_id], request.request_id
        first, last = self.num_published[request_id], num_tokens // self.block_size
        for i in range(first, last):
            if table[i] is not self.pool.null_block:
                self.pool.publish(table[i], request.block_hashes[i])
                self.published.setdefault(request_id, []).append(table[i])
        self.num_published[request_id] = max(first, last)

    def withdraw(self, request_id):
        """The request's part of the step will not run: unname what it published."""
        for block in self.published.pop(request_id, []):
            if block.block_hash is not None:
                self.pool.withdraw(block)

    def free(self, request):
        """Give all blocks of the request back, tail first. Harmless if it owns none."""
        self.num_published.pop(request.request_id, None)
        self.pool.free_blocks(reversed(self.tables.pop(request.request_id, [])))

    def block_ids(self, request):
        return [block.block_id for block in self.tables.get(request.request_id, [])]


# ==================================================================================================
# 9  Requests and messages
# ==================================================================================================
# Problem: four layers handle one request and each must see only its own part.  Idea: one mutable
# object, owned by the scheduler, and small plain messages for everything that crosses a border.
#
#     EngineCoreRequest ──► Request ──► SchedulerOutput ──► ModelRunnerOutput ──► EngineCoreOutput
#     front end → core      core only   core → runner       runner → core         core → front end
#
#     WAITING ──► RUNNING ──► FINISHED_*          one field, changed by one function
#        ▲          │
#        └ PREEMPTED┘    a preempted request keeps its tokens and block names, and loses its blocks
#
# Invariant: no status tells prefill from decode; num_computed_tokens says how far a request is.
# Invariant: messages hold ids, counts and short lists, never a tensor, and survive pickling.

class RequestStatus(enum.IntEnum):
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED_STOPPED = 3  # end of sequence, stop token or stop string
    FINISHED_LENGTH_CAPPED = 4  # max_tokens or max_model_len
    FINISHED_ABORTED = 5
    FINISHED_ERROR = 6

    @property
    def is_finished(self):
        return self > RequestStatus.PREEMPTED

    @property
    def finish_reason(self):
        return (None, None, None, "stop", "length", "abort", "error")[self]

@dataclass
class Logprob:
    """Log of a token's raw probability, and its rank (1 = likeliest; ties share the worst)."""
    logprob: float
    rank: int
    decoded_token: str | None = None

@dataclass
class EngineCoreRequest:
    """A validated request on its way into the core."""
    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams  # max_tokens filled in, seed filled in, n = 1
    eos_token_ids: tuple[int, ...]  # all ids that end a sequence, whatever ignore_eos says
    bad_words_ids: list[list[int]]
    arrival_time: float  # time.monotonic()

class Request:
    """The scheduler's view of a request: all its tokens and how far they are computed."""
    def __init__(self, message, block_size):
        params = message.sampling_params
        self.request_id = message.request_id
        self.params = params
        self.priority, self.arrival_time = params.priority, message.arrival_time
        self.eos_token_ids = () if params.ignore_eos else message.eos_token_ids
        self.message = message
        self.num_prompt_tokens = len(message.prompt_token_ids)
        self.all_token_ids = list(message.prompt_token_ids)  # prompt, then outputs
        self.spec_token_ids = []  # drafts waiting to be verified
        self.num_computed_tokens = 0  # K and V exist, or will once the steps in flight land
        self.num_output_placeholders = 0  # tokens in flight whose ids are not known yet
        self.is_prefill_chunk = True  # the last plan left known tokens uncomputed
        self.num_preemptions = 0
        self.num_cached_tokens = 0  # prefix hit at the first admission
        self.status, self.stop_reason, self.error = RequestStatus.WAITING, None, None
        self.first_scheduled_time = None
        self.prompt_logprobs = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * self.num_prompt_tokens
        # Cached positions have no logits: a request that wants them all must compute them all.
        self.skip_reading_prefix_cache = params.prompt_logprobs is not None
        self.block_size, self.block_hashes = block_size, []
        self._extend_block_hashes()

    @property
    def num_tokens(self):
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self):
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def num_tokens_to_compute(self):
        """The one deficit behind prefill, decode, chunks, recomputation and verification.
        new prompt of 10: 10; half of it done: 6 left of 10 with 4 computed; 8 of 10 cached: 2; a
        token just sampled: 1; three drafts on top: 4; preempted with 13 tokens: 13."""
        return (self.num_tokens + len(self.spec_token_ids) + self.num_output_placeholders
                - self.num_computed_tokens)

    def append_token(self, token_id):
        self.all_token_ids.append(token_id)
        if self.num_tokens % self.block_size == 0:
            self._extend_block_hashes()

    def _extend_block_hashes(self):
        BS = self.block_size
        for start in range(len(self.block_hashes) * BS, self.num_tokens - BS + 1, BS):
            parent = self.block_hashes[-1] if self.block_hashes else ROOT_HASH
            extras = block_extra_keys(start, BS, self.params.cache_salt)
            tokens = self.all_token_ids[start : start + BS]
            self.block_hashes.append(hash_block(parent, tokens, extras))

    def set_status(self, status, stop_reason=None, error=None):
        """The only place where a status changes."""
        running, preempted = RequestStatus.RUNNING, RequestStatus.PREEMPTED
        goal = preempted if self.status is running else running  # where it may go without ending
        assert not self.status.is_finished and (status.is_finished or status is goal)
        self.status, self.stop_reason, self.error = status, stop_reason, error

@dataclass
class NewRequestData:
    """A request the runner does not know: at its admission, and after a preemption."""
    request_id: str
    token_ids: list[int]  # prompt, and outputs of an earlier life
    num_prompt_tokens: int
    sampling_params: SamplingParams
    eos_token_ids: tuple[int, ...]  # for the min_tokens mask
    bad_words_ids: list[list[int]]
    block_ids: list[int]
    num_computed_tokens: int

@dataclass
class CachedRequestData:
    """What changed for a request the runner knows: a few integers."""
    request_id: str
    new_block_ids: list[int]  # to append to its table
    num_computed_tokens: int

@dataclass
class SchedulerOutput:
    """The plan of one step."""
    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: list[CachedRequestData]
    num_scheduled_tokens: dict[str, int]  # request_id -> tokens, in batch order, all above 0
    scheduled_spec_decode_tokens: dict[str, list[int]]
    preempted_req_ids: list[str]
    finished_req_ids: list[str]  # since the last step: the runner forgets them

@dataclass
class ModelRunnerOutput:
    """What one step produced; prompt_logprobs by position. Requests mid-input have no entries."""
    sampled_token_ids: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[dict[int, Logprob]]] = field(default_factory=dict)
    prompt_logprobs: dict[str, dict[int, dict[int, Logprob]]] = field(default_factory=dict)
    not_finite: list[str] = field(default_factory=list)  # whose hidden state has NaN or infinity
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)  # to verify next

@dataclass
class EngineCoreOutput:
    """News of one request: new tokens, or its end, or both."""
    request_id: str
    new_token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    first_scheduled_time: float | None = None

@dataclass
class RequestMetrics:
    """time.monotonic() stamps of a request's life, in seconds."""
    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None

    @property
    def queue_time(self):
        return self.first_scheduled_time and self.first_scheduled_time - self.arrival_time

@dataclass
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

@dataclass
class RequestOutput:
    """The result of one prompt. `error` is set when its finish_reason is "error"."""
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: str | None = None


# ==================================================================================================
# 10  Scheduler
# ==================================================================================================
# Problem: each step can compute a limited number of tokens for a limited number of requests in a
# limited number of blocks; who gets what?  Idea (continuous batching, Yu et al. 2022; chunked
# prefill, Agrawal et al. 2024): there are no phases.  Every request has a deficit, tokens known
# minus tokens computed, and a step hands out the token budget: to running requests, then waiting.
#
#     budget 6, chunk 4     A 4 prompt, 2 out   B 8, 3 out   C 3, 2 out (arrives in round 1)
#     round 0   A4 B2 = 6     1   A1 B4 C1 = 6     2   B2 C2 = 4     3   B1 C1 = 2     4   B1 = 1
#
# If a running request finds no block, a victim is preempted: its blocks are freed, its tokens kept,
# and it waits in front.  Its published blocks stay findable until they are reused.
#
# Invariant: sum of scheduled tokens <= budget; every entry > 0; running requests <= max_num_seqs.
# Invariant: nobody is admitted in a step that preempted; otherwise the two would chase each other.
# Invariant: num_computed_tokens advances with the plan and is corrected by the results.
# Why: so the next plan can be made before the results of this one are known (asynchronous
#   scheduling): a token in flight counts as one placeholder.
# Simplification: no swap to host memory; a victim recomputes, mostly from the prefix cache.

def fcfs_enqueue(waiting, request):
    """Newcomers at the end, a preempted request in front."""
    (waiting.appendleft if request.status is RequestStatus.PREEMPTED else waiting.append)(request)

def fcfs_victim(running):
    """The request admitted last has done the least work."""
    return running[-1]

def priority_enqueue(waiting, request):
    bisect.insort(waiting, request, key=lambda r: (r.priority, r.arrival_time, r.request_id))

def priority_victim(running):
    """The least urgent request, and among those the youngest."""
    return max(running, key=lambda r: (r.priority, r.arrival_time))

@dataclass(frozen=True)
class Policy(Row):
    """Two pure decisions: where a request joins the waiting queue, and who loses its blocks."""
    enqueue: Callable
    victim: Callable

POLICIES = {
    "fcfs": Policy("first come, first served; the last admitted is preempted",
                   fcfs_enqueue, fcfs_victim),
    "priority": Policy("lowest (priority, arrival) first; the highest is preempted",
                       priority_enqueue, priority_victim),
}

@dataclass
class SpeculationStats:
    """How drafts fared, by their place in the round; a round with drafts gives a token more than
    were accepted, and that token is a bonus if no draft was rejected."""
    rounds: int = 0
    drafted: Counter = field(default_factory=Counter)  # place -> drafts
    accepted: Counter = field(default_factory=Counter)
    bonus: int = 0

    def record(self, num_drafts, num_accepted):
        self.rounds += 1
        self.drafted.update(range(num_drafts))
        self.accepted.update(range(num_accepted))
        self.bonus += num_accepted == num_drafts

    def summary(self):
        """Flat figures for stats(); nothing before the first round."""
        drafted, accepted = self.drafted.total(), self.accepted.total()
        return self.rounds and dict(
            spec_rounds=self.rounds, spec_drafted=drafted, spec_accepted=accepted,
            spec_bonus=self.bonus, spec_mean_acceptance_length=1 + accepted / self.rounds,
            spec_drafted_per_position=[n for _, n in sorted(self.drafted.items())],
            spec_accepted_per_position=[self.accepted[i] for i in sorted(self.drafted)]) or {}

class Scheduler:
    """Decides every step's work. Knows ids, counts and blocks; no tensor, clock or text.

    config: an EngineConfig with max_model_len. num_spec_tokens: slots to hold ready for drafts.
    async_scheduling: plans are made before the results of the step in flight are known."""
    def __init__(self, config, kv_manager, num_spec_tokens=0, async_scheduling=False):
        name = config.scheduling_policy
        require(name in POLICIES, f"scheduling_policy must be one of {[*POLICIES]}, got {name!r}")
        self.config, self.policy, self.kv = config, POLICIES[name], kv_manager
        self.num_spec_tokens, self.async_scheduling = num_spec_tokens, async_scheduling
        self.requests = {}  # request_id -> every unfinished request
        self.waiting = deque()
        self.running = []  # in order of admission
        self.finished_req_ids = []  # since the last plan
        self.num_preemptions, self.num_finished = 0, Counter()  # the latter by finish_reason
        self.num_chunks = 0  # shares of an input that were not its last
        self.speculation = SpeculationStats()

    def add_request(self, request):
        """Queue a request. ValueError, with the arithmetic, if it could never run to its end."""
        name, prompt = request.request_id, request.num_prompt_tokens
        most = request.params.max_tokens
        require(name not in self.requests, f"request id {name!r} is already in use")
        longest = self.config.max_model_len
        require(prompt < longest, f"request {name}: {prompt} prompt tokens leave no room for an "
                f"output: max_model_len is {longest}")
        # The last sampled token is never fed back, so it needs no slot.
        needed = self.kv.blocks_for_whole(min(prompt + most, longest) - 1)
        BS, usable = self.kv.block_size, len(self.kv.pool.blocks) - 1
        require(needed <= usable, f"request {name}: {prompt} prompt and {most} output tokens need "
                f"{needed} KV blocks of {BS}, the pool has {usable}")
        self.requests[request.request_id] = request
        self.policy.enqueue(self.waiting, request)

    def finish_request(self, request_id, status, error=None):
        """End a request from outside (abort, error, stop string). Unknown ids are ignored."""
        request = self.requests.get(request_id)
        if request is not None:
            request.set_status(status, request.stop_reason, error)
            self._drop(request)

    def _drop(self, request):
        """A finished request leaves every queue and gives its blocks back."""
        (self.running if request in self.running else self.waiting).remove(request)
        self.kv.free(request)
        del self.requests[request.request_id]
        self.finished_req_ids.append(request.request_id)
        self.num_finished[request.status.finish_reason] += 1

    def schedule(self):
        """Make the plan of the next step, and move every frontier as if it had already run."""
        self.kv.published = {}
        plan = SchedulerOutput([], [], {}, {}, [], self.finished_req_ids)
        self.finished_req_ids = []
        budget = self._schedule_running(plan, self.config.max_num_batched_tokens)
        if not plan.preempted_req_ids:
            self._schedule_waiting(plan, budget)
        for request_id, count in plan.num_scheduled_tokens.items():
            request = self.requests[request_id]
            request.num_computed_tokens += count
            known = request.num_tokens + request.num_output_placeholders
            request.is_prefill_chunk = request.num_computed_tokens < known
            self.num_chunks += request.is_prefill_chunk
            if self.async_scheduling and not request.is_prefill_chunk:
                drafts = plan.scheduled_spec_decode_tokens.get(request_id, ())
                request.num_output_placeholders += 1 + len(drafts)
        return plan

    def _schedule_running(self, plan, budget):
        """Continue running requests in order of admission; returns the budget left."""
        i = 0
        while i < len(self.running) and budget > 0:
            request = self.running[i]
            count = min(self._chunk(request.num_tokens_to_compute), budget,
                        self.config.max_model_len - 1 - request.num_computed_tokens)
            if count <= 0 or self._surely_ends_in_flight(request):
                i += 1
                continue
            blocks, count, budget, i = self._allocate_or_preempt(request, count, plan, budget, i)
            if blocks is None:
                break  # the request preempted itself: those behind it would fare no better
            plan.num_scheduled_tokens[request.request_id] = count
            plan.scheduled_cached_reqs.append(CachedRequestData(
                request.request_id, [b.block_id for b in blocks], request.num_computed_tokens))
            budget -= count
            i += 1
            self._take_drafts(request, count, plan)
        return budget

    def _chunk(self, count):
        """The long-prefill cap on one request's share of a step."""
        threshold = self.config.long_prefill_token_threshold
        return min(count, threshold) if threshold else count

    def _surely_ends_in_flight(self, request):
        """The step in flight brings the last token that max_tokens allows."""
        placeholders = request.num_output_placeholders
        least_outputs = request.num_computed_tokens + 2 - placeholders - request.num_prompt_tokens
        return placeholders > 0 and least_outputs >= request.params.max_tokens

    def _allocate_or_preempt(self, request, count, plan, budget, i):
        """Find room, at the cost of victims if need be. Drafts are no reason to preempt: where they
        do not fit, they are dropped. Returns (blocks or None, count, budget, index)."""
        known = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
        lookahead = self.num_spec_tokens
        longest = min(request.num_prompt_tokens + request.params.max_tokens,
                      self.config.max_model_len)
        while True:
            blocks = self.kv.allocate_slots(
                request, count, num_lookahead=lookahead, max_len=max(longest, 1))
            if blocks is not None:
                return blocks, count, budget, i
            if lookahead or count > known > 0:
                lookahead, count = 0, min(count, known)
                continue
            victim = self.policy.victim(self.running)
            refund = plan.num_scheduled_tokens.pop(victim.request_id, 0)
            if refund:  # it was already in the plan, hence before index i
                plan.scheduled_cached_reqs = [data for data in plan.scheduled_cached_reqs
                                              if data.request_id != victim.request_id]
                plan.scheduled_spec_decode_tokens.pop(victim.request_id, None)
                budget, i = budget + refund, i - 1
                self.kv.withdraw(victim.request_id)
            self._preempt(victim, plan)
            if victim is request:
                return None, count, budget, i

    def _preempt(self, request, plan):
        """Take all blocks away; tokens, block names and its place in line remain."""
        self.running.remove(request)
        self.kv.free(request)
        request.set_status(RequestStatus.PREEMPTED)
        request.num_computed_tokens, request.spec_token_ids = 0, []
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.policy.enqueue(self.waiting, request)
        plan.preempted_req_ids.append(request.request_id)

    def _take_drafts(self, request, count, plan):
        """Drafts that fit the scheduled count go into the plan; the rest is dropped."""
        known = request.num_tokens + request.num_output_placeholders
        num_drafts = request.num_computed_tokens + count - known
        drafts, request.spec_token_ids = request.spec_token_ids, []
        if drafts and num_drafts > 0:
            plan.scheduled_spec_decode_tokens[request.request_id] = drafts[:num_drafts]

    def _schedule_waiting(self, plan, budget):
        """Admit from the head of the queue until seats, tokens or blocks run out. The head blocks
        the rest: skipping it could starve it."""
        while self.waiting and budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            cached = self.kv.find_cached_blocks(request)
            num_hits = len(cached) * self.kv.block_size
            count = self._chunk(request.num_tokens - num_hits)
            if count > budget and not self.config.enable_chunked_prefill:
                break
            count = min(count, budget)
            whole = min(request.num_tokens, self.config.max_model_len)
            if self.config.reserve_full_sequence and not self.kv.can_admit_whole(whole, cached):
                break
            if self.kv.allocate_slots(request, count, cached) is None:
                break
            self._admit(self.waiting.popleft(), num_hits, count, plan)
            budget -= count

    def _admit(self, request, num_hits, count, plan):
        returning = request.status is RequestStatus.PREEMPTED
        self.kv.stats.record(request.num_tokens, num_hits, preempted=returning)
        if not returning:
            request.num_cached_tokens = num_hits
        request.set_status(RequestStatus.RUNNING)
        request.num_computed_tokens = num_hits
        self.running.append(request)
        plan.num_scheduled_tokens[request.request_id] = count
        message = request.message
        plan.scheduled_new_reqs.append(NewRequestData(
            request.request_id, list(request.all_token_ids), request.num_prompt_tokens,
            request.params, message.eos_token_ids, message.bad_words_ids,
            self.kv.block_ids(request), num_hits))

    def set_drafts(self, request_id, token_ids):
        """Propose tokens to verify next; ignored while the request is in its input."""
        request = self.requests.get(request_id)
        if request is not None and not request.is_prefill_chunk:
            request.spec_token_ids = list(token_ids)

    def update_from_output(self, plan, output):
        """Append what the step produced, test every stop, free what ended."""
        news = []
        for request_id in plan.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None:
                continue  # finished while the step was in flight: its late result is dropped
            if request_id in output.not_finite:
                error = "the model computed NaN or infinity"
                self.finish_request(request_id, RequestStatus.FINISHED_ERROR, error)
                news.append(EngineCoreOutput(request_id, [], finish_reason="error", error=error))
                continue
            for pos, entry in output.prompt_logprobs.get(request_id, {}).items():
                request.prompt_logprobs[pos] = entry
            sampled = output.sampled_token_ids.get(request_id, [])
            if sampled:
                news.append(self._append_sampled(request, sampled, plan, output))
        for request_id, token_ids in output.draft_token_ids.items():
            self.set_drafts(request_id, token_ids)
        return news

    def _append_sampled(self, request, sampled, plan, output):
        """Tokens of one request; those after a stop are dropped."""
        drafts = plan.scheduled_spec_decode_tokens.get(request.request_id)
        if drafts:
            num_rejected = len(drafts) - (len(sampled) - 1)
            self.speculation.record(len(drafts), len(sampled) - 1)
            request.num_computed_tokens -= num_rejected  # their slots will be overwritten
            request.num_output_placeholders -= num_rejected if self.async_scheduling else 0
        first, kept = request.num_output_tokens == 0, []
        for token_id in sampled:
            request.append_token(token_id)
            kept.append(token_id)
            request.num_output_placeholders -= 1 if request.num_output_placeholders else 0
            if self._stops(request, token_id):
                break
        if self.async_scheduling and request.request_id in self.kv.tables:
            confirmed = request.num_computed_tokens - request.num_output_placeholders
            self.kv.publish_full_blocks(request, confirmed)
        logprobs = output.logprobs.get(request.request_id)
        news = EngineCoreOutput(
            request.request_id, kept, logprobs and logprobs[: len(kept)],
            request.prompt_logprobs if first else None, num_cached_tokens=request.num_cached_tokens,
            first_scheduled_time=request.first_scheduled_time)
        if request.status.is_finished:
            news.finish_reason, news.stop_reason = request.status.finish_reason, request.stop_reason
            self._drop(request)
        return news

    def _stops(self, request, token_id):
        """Stop tests in vLLM's order, after each appended token: end of sequence beats length."""
        params = request.params
        if request.num_output_tokens >= params.min_tokens:
            if token_id in request.eos_token_ids:
                request.set_status(RequestStatus.FINISHED_STOPPED)
                return True
            if token_id in params.stop_token_ids:
                request.set_status(RequestStatus.FINISHED_STOPPED, stop_reason=token_id)
                return True
        if (request.num_output_tokens >= params.max_tokens
                or request.num_tokens >= self.config.max_model_len):
            request.set_status(RequestStatus.FINISHED_LENGTH_CAPPED)
            return True
        return False

    def fail_step(self, plan, error):
        """The step raised: end its requests, and only those, and take back what it published. The
        runner may not have read the plan, so what it should forget is said again."""
        self.finished_req_ids += [*plan.finished_req_ids, *plan.preempted_req_ids]
        for request_id in plan.num_scheduled_tokens:
            self.kv.withdraw(request_id)
            request = self.requests.get(request_id)
            if request is not None and request.status.is_finished:
                self._drop(request)  # the results were half read
            else:
                self.finish_request(request_id, RequestStatus.FINISHED_ERROR, error)
        return [EngineCoreOutput(request_id, [], finish_reason="error", error=error)
                for request_id in plan.num_scheduled_tokens]


# ==================================================================================================
# 11  Sampler
# ==================================================================================================
# Problem: a batch mixes greedy, seeded, penalised and filtered requests, and each must get exactly
# what it would get alone.  Idea: one documented order, vectorised where all rows take part, row by
# row for rules that few requests use, and randomness that is a function instead of a stream.
#
#     raw logits ─► allowed ids ─► bad words ─► min_tokens ─► bias ─► penalties ─► argmax if greedy
#         │                                                                └► / temperature ─►
#         └► log-softmax = the reported logprobs                 min_p ─► top_k ─► top_p ─► draw
#
# The draw is inverse-CDF: one uniform number u in [0, 1), and the first token whose cumulative
# probability exceeds u.  u is a hash of (seed, output position): no generator, no history.
#
# Invariant: same seed, same tokens, whatever the batch, the chunking or preemptions in between.
# Invariant: a token with probability 0 is never drawn, and rules and filters always leave one.
# Try: python nanoserve.py --model toy --seed 1 --prompt hi, twice; then with --block-size 4.

def uniform(seeds, positions, stream=0):
    """One number in [0, 1) per row, a fixed function of (seed, position): float64 (R,).
    The finaliser of splitmix64 (Steele, Lea, Flood 2014) is applied to the seed and then to its sum
    with the position; neighbouring inputs give unrelated outputs. Streams are independent."""
    def mix(x):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
    step = np.uint64(0x9E3779B97F4A7C15)
    x = mix(np.asarray(seeds, np.int64).astype(np.uint64) * step + np.uint64(1))
    positions = np.asarray(positions, np.int64) + (stream << 40)
    x = mix(x + positions.astype(np.uint64) * step)
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53

class LogitsRules:
    """One request's rules about single tokens. Most requests have none: active is False."""
    def __init__(self, request, vocab_size, device):
        self.params = p = request.sampling_params
        self.bad_words_ids = request.bad_words_ids
        ends = {*request.eos_token_ids, *p.stop_token_ids}
        self.stop_ids = sorted(token_id for token_id in ends if token_id < vocab_size)
        self.forbidden = None
        if p.allowed_token_ids is not None:
            self.forbidden = torch.ones(vocab_size, dtype=torch.bool, device=device)
            self.forbidden[p.allowed_token_ids] = False
        self.num_observed = len(request.token_ids) - request.num_prompt_tokens
        penalties = (p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
        self.penalised = penalties != (1, 0, 0)
        if self.penalised:
            token_ids = torch.tensor(request.token_ids, device=device)
            prompt, outputs = token_ids.tensor_split([request.num_prompt_tokens])
            self.in_prompt = torch.bincount(prompt, minlength=vocab_size) > 0  # (V,)
            self.counts = torch.bincount(outputs, minlength=vocab_size)  # (V,) in the output

    @property
    def active(self):
        p = self.params
        return (self.penalised or p.allowed_token_ids is not None or p.min_tokens > 0
                or bool(p.logit_bias or self.bad_words_ids))

    def observe(self, token_id):
        """A token was generated."""
        self.num_observed += 1
        if self.penalised:
            self.counts[token_id] += 1

    @staticmethod
    def _forbid(logits, token_ids):
        """Mask tokens, unless nothing would be left to draw."""
        before = logits[token_ids]
        logits[token_ids] = -math.inf
        if logits.max() == -math.inf:
            logits[token_ids] = before

    def apply(self, logits, outputs):
        """Change one row of fp32 logits (V,) in place. outputs: token ids generated so far, and
        drafts behind those that were observed."""
        p = self.params
        if self.forbidden is not None:
            logits.masked_fill_(self.forbidden, -math.inf)
        for *start, last in self.bad_words_ids:
            if outputs[len(outputs) - len(start) :] == start:
                self._forbid(logits, [last])
        if len(outputs) < p.min_tokens:
            self._forbid(logits, self.stop_ids)
        for token_id, bias in (p.logit_bias or {}).items():
            logits[token_id] += max(-100.0, min(100.0, bias))
        if self.penalised:
            counts, drafts = self.counts, outputs[self.num_observed :]
            if drafts:
                counts = counts.clone()
                for token_id in drafts:
                    counts[token_id] += 1
            seen, r = self.in_prompt | (counts > 0), p.repetition_penalty
            logits.copy_(torch.where(seen, torch.where(logits > 0, logits / r, logits * r), logits))
            logits -= p.frequency_penalty * counts + p.presence_penalty * (counts > 0)

@dataclass
class SamplingMetadata:
    """The rows of one step that get a token, as columns."""
    temperature: np.ndarray  # float32 (R,)
    top_k: np.ndarray  # int64 (R,); 0 or less = off
    top_p: np.ndarray  # float32 (R,)
    min_p: np.ndarray  # float32 (R,)
    seeds: np.ndarray  # int64 (R,)
    positions: np.ndarray  # int64 (R,): how many outputs came before
    rules: list  # (row, LogitsRules, output ids) of the rows that have any
    logprobs: list  # (row, how many best) of the rows that want them
    drafts: Drafts | None = None  # of rows whose token may be a draft drawn from a law of its own
    stream: int = 0  # of the noise
    probs: torch.Tensor | None = None  # fp32 (rows above temperature 0, V), filled in by sample()

@dataclass
class Drafts:
    """Rows of logits that face a draft, the drafts, and the laws they were drawn from."""
    rows: np.ndarray  # int64 (M,)
    token_ids: torch.Tensor  # int64 (M,)
    laws: torch.Tensor  # fp32 (M, V)

def sample(logits, meta):
    """logits (R, V) -> (token ids int64 (R,), {row: {token_id: Logprob}})."""
    drawn = np.flatnonzero(meta.temperature >= GREEDY_EPSILON)
    if not len(drawn) and not meta.rules and not meta.logprobs:
        return kernels.argmax(logits), {}
    raw = logits.float()
    work = raw.clone() if meta.rules else raw
    for row, rules, outputs in meta.rules:
        rules.apply(work[row], outputs)
    token_ids = kernels.argmax(work)
    if len(drawn):
        rows = torch.from_numpy(drawn).to(logits.device)
        probs = meta.probs = sampling_distribution(work[rows], meta, drawn)
        if meta.drafts is not None:
            at, own = np.searchsorted(drawn, meta.drafts.rows), meta.drafts.rows
            luck = torch.from_numpy(uniform(meta.seeds[own], meta.positions[own], ACCEPTANCE))
            probs[at] = verified_law(probs[at], meta.drafts.laws, meta.drafts.token_ids,
                                     luck.to(logits.device))
        noise = torch.from_numpy(uniform(meta.seeds[drawn], meta.positions[drawn], meta.stream))
        token_ids[rows] = draw(probs, noise.to(logits.device))
    return token_ids, {row: gather_logprobs(raw[row], int(token_ids[row]), count)
                       for row, count in meta.logprobs}

def sampling_distribution(logits, meta, rows):
    """The distribution that tokens are drawn from: fp32 (R, V), after temperature and filters."""
    def column(values):
        return torch.from_numpy(values[rows]).to(logits.device)[:, None]
    logits = logits / column(meta.temperature)
    if (meta.min_p[rows] > 0).any():
        floor = logits.amax(dim=-1, keepdim=True) + column(meta.min_p).log()  # log 0: keeps all
        logits = logits.masked_fill(logits < floor, -math.inf)
    if ((meta.top_k[rows] > 0) | (meta.top_p[rows] < 1)).any():
        logits = keep_top(logits, column(meta.top_k), column(meta.top_p))
    return logits.softmax(dim=-1)

def keep_top(logits, top_k, top_p, width=1024):
    """Mask what top_k, then top_p (of the mass top_k left), exclude. logits (R, V), both (R, 1).
    Sorting a whole vocabulary is slow, and the kept tokens are almost always among the best
    `width`; a row that needs more shows it by its mass, and then everything is sorted."""
    V = logits.shape[1]
    limit = torch.where((top_k > 0) & (top_k < V), top_k, V)  # (R, 1)
    width = min(V, max(width, int(limit.masked_fill(limit == V, 0).max())))
    values, index = logits.topk(width, dim=-1)  # (R, width), best first
    inside = torch.arange(width, device=logits.device) < limit
    values = values.masked_fill(~inside, -math.inf)
    total = torch.where(limit < V, values.logsumexp(-1, True), logits.logsumexp(-1, True))
    probs = (values - total).exp()
    mass, free = probs.cumsum(-1), (limit == V) & (top_p >= 1)  # free: no filter at all
    if width < V and ((mass[:, -1:] < top_p) & (limit == V) & ~free).any():
        return keep_top(logits, top_k, top_p, width=V)
    keep = inside & ((mass - probs < top_p) | (top_p >= 1))
    keep[:, 0] = True  # a top_p too small for fp32 is 0
    values = values.masked_fill(~keep, -math.inf)
    kept = torch.full_like(logits, -math.inf).scatter(1, index, values)
    return torch.where(free, logits, kept)

def draw(probs, noise):
    """Inverse CDF: probs (R, V), noise (R,) in [0, 1) -> token ids (R,)."""
    cdf = probs.cumsum(-1)
    total = cdf[:, -1]
    below = torch.nextafter(total, torch.zeros_like(total))  # u near 1 must not round up to 1
    target = torch.minimum((noise * total).to(cdf.dtype), below)[:, None]
    return torch.searchsorted(cdf, target, right=True)[:, 0].clamp_(max=probs.shape[1] - 1)

ACCEPTANCE, DRAFTING = 1, 2  # streams of noise; 0 draws the tokens

def verified_law(p, q, drafts, luck):
    """The law of each row's token, its draft judged: p, q (M, V), drafts, luck (M,) -> (M, V).
    A draft drawn from q is accepted with probability min(1, p/q), and then it is the token. Else
    the token comes from what p has more than q, normalised by draw(). Over all drafts that is p:
    q(x) min(1, p(x)/q(x)) + max(p(x) - q(x), 0) = p(x). Leviathan et al. 2023, arXiv 2211.17192."""
    at = drafts[:, None]
    accepted = luck[:, None] * q.gather(1, at) < p.gather(1, at)
    rest = (p - q).clamp_(min=0)
    rest = torch.where(rest.sum(1, keepdim=True) > 0, rest, p)  # p = q but for rounding
    return torch.where(accepted, torch.zeros_like(p).scatter_(1, at, 1), rest)

def gather_logprobs(logits, token_id, count):
    """Raw log-probabilities of one row (V,): the token itself and the `count` best (-1 = all)."""
    logprobs = logits.log_softmax(-1)
    best, index = logprobs.topk(len(logprobs) if count < 0 else min(count, len(logprobs)))
    own = logprobs[token_id]
    entries = {token_id: Logprob(float(own), int((logprobs >= own).sum()))}
    for rank, (token, value) in enumerate(zip(index.tolist(), best.tolist()), 1):
        entries.setdefault(token, Logprob(value, rank))
    return entries


# ==================================================================================================
# 12  Speculation
# ==================================================================================================
# Problem: a decode step reads the whole model for one token, and reading costs more than computing.
# Idea (Leviathan et al. 2023, Chen et al. 2023): guess K tokens cheaply, compute all of them in one
# step, and keep those that the model itself would have drawn.
#
#     tokens .. t    drafts d1 d2 d3     one step computes t d1 d2 d3; each row gives a token
#     rows           t: d1   d1: d2   d2: x   d3: -      kept: d1, d2 (accepted) and x; d3 is void
#     all accepted   t: d1   d1: d2   d2: d3  d3: y      kept: d1, d2, d3 and y (the bonus)
#
# One rule: row after row gives a token, and the next row counts while the token is the draft.  What
# differs is the law of a row's token.  A draft that follows from the tokens before it (n-gram, or a
# draft model's argmax) changes nothing: the row draws with its position's own noise.  A draft that
# was itself drawn, from q, is judged by verified_law().  Requests above temperature 0 have such
# drafts if a model drafts; everybody else has the first kind.
#
# Invariant: with drafts of the first kind, the very tokens of the run without speculation; with the
#   second, tokens of the same law, repeatable by their seed whatever the batch.
# Invariant: how many tokens are drafted for a request depends on its own past alone, as long as
#   budget and blocks suffice.
# Invariant: p and q pass through the same rules and filters, and no draft is ever published.
# Why: no noise is used twice: of a rejected round nothing behind the rejection was looked at.
# Simplification: one sequence of drafts, not a tree, and on a GPU no recordings of such steps.
# Try: python nanoserve.py --speculative ngram --stats, and ask for a text to be repeated.

def propose_ngram(token_ids, count, config):
    """Prompt lookup (Saxena 2023): what followed the last time when the text ended like now.
    The longest of prompt_lookup_max to prompt_lookup_min tokens counts, then the latest place; a
    text that repeats with a period goes on with it. Linear in the length.

    >>> config = EngineConfig(prompt_lookup_min=1)
    >>> propose_ngram(np.array([5, 1, 2, 3, 9, 2, 3, 7, 1, 2, 3]), 3, config)  # not 7: 2 3 is short
    [9, 2, 3]
    >>> propose_ngram(np.array([4, 8, 6, 8, 6]), 5, config)
    [8, 6, 8, 6, 8]
    """
    last = len(token_ids) - 1
    ends, found = np.flatnonzero(token_ids[:last] == token_ids[last]), None
    for length in range(1, config.prompt_lookup_max + 1):
        if not len(ends):
            break
        if length >= config.prompt_lookup_min:
            found = ends[-1]
        ends = ends[ends >= length]
        ends = ends[token_ids[ends - length] == token_ids[last - length]]
    if found is None:
        return []
    period = last - found
    return [int(token_ids[found + 1 + i % period]) for i in range(count)]

@dataclass(frozen=True)
class Drafter(Row):
    """propose(token_ids, count, config): at most `count` ids that may follow the ids so far; the
    same ids must give the same drafts. None: no drafts, or a DraftModel makes them."""
    propose: Callable | None = None

DRAFTERS = {
    "none": Drafter("one token per request and step"),
    "ngram": Drafter("what followed the same tokens before (prompt lookup)", propose_ngram),
    "draft": Drafter("a smaller model with the same vocabulary (--speculative-model)"),
}

class DraftLength:
    """How many tokens are worth drafting, for each row of the runner.

    A rejected draft costs a computed position, so the length follows success: twice the length
    after a round without rejection, what was accepted after another, and after a round in vain a
    rest of 2, 4, .. 64 steps. Text that cannot be predicted is left alone after a few tries, and
    tried again now and then: it may begin to repeat. Whatever share of drafts is right, that costs
    a few percent at most, as long as a drafted token costs less than a plain step."""
    def __init__(self, config, max_num_seqs):
        self.most, self.adapts = config.num_speculative_tokens, config.adapt_draft_length
        self.length, self.failures, self.rest = np.zeros((3, max_num_seqs), np.int64)

    def reset(self, row):
        self.length[row] = min(2, self.most) if self.adapts else self.most
        self.failures[row] = self.rest[row] = 0

    def learn(self, row, num_drafts, num_accepted):
        """The result of a round."""
        if not self.adapts:
            return
        if num_accepted == 0:
            self.failures[row] = min(self.failures[row] + 1, 6)
            self.length[row], self.rest[row] = 1, 2 ** self.failures[row]
        else:
            whole = num_accepted == num_drafts
            self.length[row] = min(2 * num_drafts if whole else num_accepted, self.most)
            self.failures[row] = 0

    def wanted(self, rows):
        """Drafts for these rows, each of which just got a token."""
        resting = self.rest[rows] > 0
        self.rest[rows] -= resting
        return np.where(resting, 0, self.length[rows])

class DraftModel:
    """A smaller model that runs ahead of the target. Its K and V lie in arrays of its own under the
    target's block ids, so blocks that are shared, found again or freed are so for both."""
    def __init__(self, model, kv, config):
        self.model, self.kv, self.max_len = model, kv, len(model.cos_sin)
        self.steps = RecordedSteps(model, kv, config, self.max_len)
        self.num_computed = np.zeros(config.max_num_seqs, np.int64)
        self.laws = {}  # row -> [q (V,) of each draft], of rows above temperature 0

    def hidden(self, runner, rows, ends):
        """Compute what is missing before `ends`; the hidden states of the last positions (R, E)."""
        counts = ends - self.num_computed[rows]
        token_ids, ctx = runner.pack(rows, self.num_computed[rows], counts)
        hidden = self.steps.run(token_ids, replace(ctx, kv=self.kv))
        self.num_computed[rows] = ends
        return hidden[torch.from_numpy(counts.cumsum() - 1).to(hidden.device)]

    def propose(self, runner, requests, known, wanted):
        """Write up to wanted (R,) drafts behind the `known` tokens of each request; how many.
        A block that is full is computed at once, because others may find it; the rest waits until
        it is drafted from."""
        rows, BS = np.array([r.row for r in requests]), runner.block_size
        room = np.minimum(runner.num_blocks[rows] * BS, self.max_len)  # positions with a slot
        wanted = np.clip(room - known + 1, 0, wanted)
        ends = np.minimum(known, room)
        self.num_computed[rows] = np.minimum(self.num_computed[rows], np.minimum(ends, known - 1))
        due = (wanted > 0) | (ends // BS > self.num_computed[rows] // BS)
        for row in rows:
            self.laws.pop(row, None)
        if not due.any():
            return wanted
        hidden = self.hidden(runner, rows[due], ends[due])
        active = np.flatnonzero(due)
        for j in range(wanted.max()):
            go_on = wanted[active] > j
            active, hidden = active[go_on], hidden[torch.from_numpy(go_on).to(hidden.device)]
            if j:
                hidden = self.hidden(runner, rows[active], known[active] + j)
            self._draw(runner, [requests[i] for i in active], hidden, known[active] + j)
        return wanted

    def _draw(self, runner, requests, hidden, positions):
        """One draft for each request, to stand at its position."""
        meta = runner.sampling_metadata(requests, positions, logprobs=False)
        meta.stream, V = DRAFTING, runner.model.config.vocab_size
        logits = self.model.logits(hidden)[:, :V].float()  # padding of the vocabularies may differ
        token_ids, _ = sample(F.pad(logits, (0, V - logits.shape[1]), value=-math.inf), meta)
        runner.token_ids[[r.row for r in requests], positions] = token_ids.cpu()
        drawn = [r.row for r in requests if r.params.temperature >= GREEDY_EPSILON]
        for row, q in zip(drawn, meta.probs if drawn else ()):
            self.laws.setdefault(row, []).append(q)


# ==================================================================================================
# 13  Model runner
# ==================================================================================================
# Problem: the plan speaks of request ids and counts, the model wants tensors.  Idea: one row of
# plain arrays per running request, kept from step to step; a step's tensors are gathered from the
# rows with a few array operations, whatever the number of requests.
#
#     plan {A: 1, B: 3}    rows:  A tokens 7 1 4, computed 2      B tokens 5 9 2, computed 0
#     packed   token_ids 4 5 9 2    positions 2 0 1 2    query_start_loc 0 1 4    seq_lens 3 3
#              slot_mapping = block_table[row, pos // BS] * BS + pos % BS
#
# The runner appends the tokens it samples to its own rows, so the plan never carries them back.
# A decode step is hundreds of short kernels, and calling them takes longer than running some of
# them: the step is recorded once and replayed with one call.
#
# Invariant: a row's blocks equal the scheduler's table (what a window expired is never read).
# Invariant: the tensors of a step follow from the plan and the rows alone.
# Why: a request whose input is not finished gets no logits: the LM head is the largest matrix, and
#   it runs on the last row of a sequence only.

@dataclass
class RunnerRequest:
    """What the runner knows of a request besides its row of numbers."""
    request_id: str
    row: int
    params: SamplingParams
    rules: LogitsRules | None

class RecordedSteps:
    """The steps of a model, recorded once and replayed (kernels.py 12) where that is possible.

    A recording reads and writes fixed addresses, so the inputs of a step are copied into buffers.
    On a CPU one recording serves every step: it has room for the token budget, and memory that no
    step has touched costs nothing. A CUDA graph serves one size, and only decode steps (one token
    per sequence): they are recorded for 1, 2, 4, 8, 16, 24, ..., 256 sequences when first needed,
    and a step is padded to the next of these. A padding row has sequence length 0 and slot -1: it
    attends to nothing and writes nowhere."""
    def __init__(self, model, kv, config, max_model_len):
        self.model, self.kv, self.max_len, self.recorded = model, kv, max_model_len, {}
        self.eager = "enforce_eager" if config.enforce_eager else ""  # the reason to record nothing
        self.decode_only = model.device.type == "cuda"
        self.sizes = [config.max_num_batched_tokens]
        if self.decode_only:
            self.sizes = [size for size in (1, 2, 4, *range(8, 257, 8))
                          if size < 2 * config.max_num_seqs]
        if self.eager:
            return
        largest, narrow = self.sizes[-1], dict(dtype=torch.int32, device=model.device)
        wide = torch.zeros((3, largest), dtype=torch.int64, device=model.device)
        self.token_ids, self.positions, self.slots = wide
        self.seq_lens = torch.zeros(largest, **narrow)
        width = cdiv(max_model_len, config.block_size)
        self.block_table = kernels.zeros((largest, width), **narrow)
        self.query_start_loc = torch.arange(largest + 1, **narrow)
        if not self.decode_only:
            try:
                self.record(largest)
            except ValueError as e:
                self.eager = str(e)

    def run(self, token_ids, ctx):
        """Hidden states (T, E) like model.forward, which runs what no recording fits."""
        T, S = len(token_ids), len(ctx.meta.seq_lens)
        fits = T <= self.sizes[-1] and not (self.decode_only and ctx.meta.max_query_len > 1)
        if self.eager or not fits:
            return self.model.forward(token_ids, ctx)
        size = self.sizes[bisect.bisect_left(self.sizes, T)]
        self.fill(token_ids, ctx, size)
        if size not in self.recorded:
            self.record(size)
        replay, hidden = self.recorded[size]
        replay(T, S)
        return hidden[:T]

    def fill(self, token_ids, ctx, size):
        """Copy a step into the buffers and make the rows up to `size` padding."""
        meta = ctx.meta
        for buffer, values, blank in (
                (self.token_ids, token_ids, 0), (self.positions, ctx.positions, 0),
                (self.slots, meta.slot_mapping, -1), (self.seq_lens, meta.seq_lens, 0)):
            buffer[: len(values)] = values
            buffer[len(values) : size] = blank
        self.query_start_loc[: len(meta.query_start_loc)] = meta.query_start_loc
        count, width = meta.block_table.shape
        self.block_table[:count, :width] = meta.block_table

    def inputs(self, size):
        """(token ids, ForwardContext) of the first rows of the buffers."""
        meta = kernels.AttentionMetadata(
            self.query_start_loc[: size + 1], self.seq_lens[:size], self.block_table[:size],
            self.slots[:size], max_query_len=1, max_seq_len=self.max_len)
        return self.token_ids[:size], ForwardContext(self.positions[:size], meta, self.kv)

    def record(self, size):
        inputs = self.inputs(size)
        with torch.inference_mode():
            self.recorded[size] = kernels.record(
                lambda: self.model.forward(*inputs), self.model.device)

def kv_arrays(model, num_blocks, block_size, kv_dtype):
    """The KV cache of a model: a LayerKV of zeros for each layer."""
    c, device = model.config, model.device
    shape = (2, num_blocks, block_size, c.num_kv_heads, c.head_dim)
    arrays = [kernels.LayerKV(kernels.zeros(shape, kv_dtype, device),
                              k_scale=attention.kv_scales[0], v_scale=attention.kv_scales[1])
              for _, attention, *_ in model.layers]
    for kv in arrays if kv_dtype == torch.int8 else ():
        kv.scales = kernels.zeros(shape[:4], torch.float32, device)
    return arrays

class ModelRunner:
    """Owns the KV cache tensors and one row of arrays per running request."""
    def __init__(self, model, num_blocks, config, max_model_len, kv_dtype, draft_model=None):
        self.model, self.device, self.config = model, model.device, config
        self.block_size, R = config.block_size, config.max_num_seqs
        self.kv = kv_arrays(model, num_blocks, self.block_size, kv_dtype)
        self.drafter, self.draft_model = DRAFTERS[config.speculative], draft_model
        self.draft_length, self.max_model_len = DraftLength(config, R), max_model_len
        self.activation_bytes = 0  # the most of any step
        self.steps = RecordedSteps(model, self.kv, config, max_model_len)
        self.requests, self.free_rows = {}, list(range(R))[::-1]
        self.token_ids = np.zeros((R, max_model_len + 1), np.int64)
        self.block_table = np.zeros((R, cdiv(max_model_len, self.block_size)), np.int32)
        self.num_tokens, self.num_blocks, self.prompt_len = np.zeros((3, R), np.int64)
        self.top_k, self.seed = np.zeros((2, R), np.int64)
        self.temperature, self.top_p, self.min_p = np.zeros((3, R), np.float32)

    def update_rows(self, plan):
        """Forget what ended or lost its blocks, take in newcomers, extend tables."""
        for request_id in (*plan.finished_req_ids, *plan.preempted_req_ids):
            if request_id in self.requests:
                self.free_rows.append(self.requests.pop(request_id).row)
        for new in plan.scheduled_new_reqs:
            self._add_row(new)
        for cached in plan.scheduled_cached_reqs:
            self._append_blocks(self.requests[cached.request_id].row, cached.new_block_ids)

    def _add_row(self, new):
        p, rules = new.sampling_params, LogitsRules(new, self.model.config.vocab_size, self.device)
        row = self.free_rows.pop()
        self.requests[new.request_id] = RunnerRequest(
            new.request_id, row, p, rules if rules.active else None)
        self.token_ids[row, : len(new.token_ids)] = new.token_ids
        self.num_tokens[row], self.prompt_len[row] = len(new.token_ids), new.num_prompt_tokens
        self.temperature[row], self.top_p[row], self.min_p[row] = p.temperature, p.top_p, p.min_p
        self.top_k[row], self.seed[row], self.num_blocks[row] = p.top_k, p.seed, 0
        self._append_blocks(row, new.block_ids)
        self.draft_length.reset(row)
        if self.draft_model:  # what the cache has, the draft model computed too
            self.draft_model.num_computed[row] = new.num_computed_tokens

    def _append_blocks(self, row, block_ids):
        start = self.num_blocks[row]
        self.block_table[row, start : start + len(block_ids)] = block_ids
        self.num_blocks[row] += len(block_ids)

    def execute(self, plan, clock):
        """Run the plan: K and V of its tokens are in the cache afterwards, and whoever reached the
        end of its known tokens has a new one, or with drafts several."""
        self.update_rows(plan)
        output, drafts = ModelRunnerOutput(), plan.scheduled_spec_decode_tokens
        requests = [self.requests[request_id] for request_id in plan.num_scheduled_tokens]
        if not requests:
            return output
        rows = np.array([request.row for request in requests])
        counts = np.fromiter(plan.num_scheduled_tokens.values(), np.int64, len(rows))
        # In the plan, running requests come before admitted ones, as in these two lists.
        starts = np.array([data.num_computed_tokens for data in
                           (*plan.scheduled_cached_reqs, *plan.scheduled_new_reqs)])
        num_drafts = np.array([len(drafts.get(r.request_id, ())) for r in requests])
        for row, num, r in zip(rows, num_drafts, requests):
            if num:
                first = self.num_tokens[row]
                self.token_ids[row, first : first + num] = drafts[r.request_id]
        token_ids, ctx = self.pack(rows, starts, counts)
        done = np.flatnonzero(starts + counts >= self.num_tokens[rows])  # the others are mid-input
        clock.lap("pack")
        with torch.inference_mode():
            hidden = self.steps.run(token_ids, ctx)  # (T, E)
            ends = counts.cumsum()
            for i, request in enumerate(requests):
                if request.params.prompt_logprobs is not None:
                    chunk = hidden[ends[i] - counts[i] : ends[i]]
                    entries = self._prompt_logprobs(request, chunk, int(starts[i]))
                    output.prompt_logprobs[request.request_id] = entries
            # A request has a row of logits behind its last known token and one behind each draft.
            row_counts = num_drafts[done] + 1
            of = np.repeat(done, row_counts)  # (R,) request of each row of logits
            place = np.arange(len(of)) - np.repeat(row_counts.cumsum() - row_counts, row_counts)
            last = hidden[torch.from_numpy(ends[of] - 1 - num_drafts[of] + place).to(self.device)]
            logits = self.model.logits(last)  # (R, V)
            self.activation_bytes = max(
                self.activation_bytes, self.model.activation_bytes(len(token_ids), len(of)))
            # One number of a hidden state that is not finite makes every logit of its row so.
            finite = logits[:, 0].isfinite().tolist()
            clock.lap("forward")
            self._sample(logits, [requests[i] for i in done], row_counts, finite, output)
            clock.lap("sample")
            if self.config.speculative != "none":
                self._propose(requests, starts + counts, done, output)
                clock.lap("draft")
        return output

    def pack(self, rows, starts, counts):
        """Token ids (T,) and context of `counts` tokens from `starts` on, for each row."""
        def tensor(values):
            return torch.from_numpy(values).to(self.device)
        ends, seq_lens = counts.cumsum(), starts + counts
        max_len = int(seq_lens.max())
        seq = np.repeat(np.arange(len(rows)), counts)  # (T,) sequence of each token
        positions = np.arange(len(seq)) - (ends - counts)[seq] + starts[seq]  # (T,)
        block_ids = self.block_table[rows[seq], positions // self.block_size].astype(np.int64)
        meta = kernels.AttentionMetadata(
            query_start_loc=tensor(np.concatenate([[0], ends]).astype(np.int32)),
            seq_lens=tensor(seq_lens.astype(np.int32)),
            block_table=tensor(self.block_table[rows, : cdiv(max_len, self.block_size)]),
            slot_mapping=tensor(slot_of(block_ids, positions, self.block_size)),
            max_query_len=int(counts.max()), max_seq_len=max_len)
        token_ids = tensor(self.token_ids[rows[seq], positions])
        return token_ids, ForwardContext(tensor(positions), meta, self.kv)

    def sampling_metadata(self, requests, positions, logprobs=True):
        """For rows of logits: whose they are, and where in the sequence their token will stand."""
        rows, rules = np.array([r.row for r in requests]), []
        for i, r in enumerate(requests):
            if r.rules is not None:
                outputs = self.token_ids[r.row, self.prompt_len[r.row] : positions[i]]
                rules.append((i, r.rules, outputs.tolist()))
        wanted = [(i, r.params.logprobs) for i, r in enumerate(requests)
                  if logprobs and r.params.logprobs is not None]
        return SamplingMetadata(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows],
            self.seed[rows], positions - self.prompt_len[rows], rules, wanted)

    def _drafts_to_judge(self, requests, firsts, row_counts):
        """The rows that face a draft drawn from a law, as Drafts; None if there are none."""
        rows, token_ids, laws = [], [], []
        for r, first, count in zip(requests, firsts, row_counts):
            known = self.num_tokens[r.row]
            laws += self.draft_model.laws.get(r.row, [])[: count - 1] if count > 1 else []
            rows += range(first, first + len(laws) - len(rows))
            token_ids += self.token_ids[r.row, known : known + len(rows) - len(token_ids)].tolist()
        if rows:
            return Drafts(np.array(rows), torch.tensor(token_ids, device=self.device),
                          torch.stack(laws))

    def _sample(self, logits, requests, row_counts, finite, output):
        """Tokens for `requests`; each has row_counts rows of logits: a token comes from the first,
        and from a later one if all before it gave the drafts."""
        if not requests:
            return
        firsts = row_counts.cumsum() - row_counts
        known = self.num_tokens[[r.row for r in requests]]
        place = np.arange(row_counts.sum()) - np.repeat(firsts, row_counts)
        meta = self.sampling_metadata(
            [r for r, count in zip(requests, row_counts) for _ in range(count)],
            np.repeat(known, row_counts) + place)
        if self.draft_model:
            meta.drafts = self._drafts_to_judge(requests, firsts, row_counts)
        token_ids, logprobs = sample(logits, meta)
        token_ids = token_ids.tolist()
        for request, start, first, count in zip(requests, known, firsts, row_counts):
            drafts = self.token_ids[request.row, start : start + count - 1].tolist()
            drawn = token_ids[first : first + count]
            right = map(operator.eq, drawn, drafts)
            tokens = drawn[: 1 + sum(itertools.takewhile(bool, right))]
            if count > 1:
                self.draft_length.learn(request.row, count - 1, len(tokens) - 1)
            self.token_ids[request.row, start : start + len(tokens)] = tokens
            self.num_tokens[request.row] += len(tokens)
            for token_id in tokens if request.rules is not None else ():
                request.rules.observe(token_id)
            output.sampled_token_ids[request.request_id] = tokens
            if first in logprobs:
                output.logprobs[request.request_id] = [
                    logprobs[i] for i in range(first, first + len(tokens))]
            if not all(finite[first : first + len(tokens)]):
                output.not_finite.append(request.request_id)

    def _propose(self, requests, known, done, output):
        """Drafts for whoever just got a token, to be verified in the next step."""
        rows = np.array([r.row for r in requests])
        wanted = np.zeros(len(requests), np.int64)
        known[done] = self.num_tokens[rows[done]]
        most = np.array([r.params.max_tokens for r in requests]) + self.prompt_len[rows]
        room = np.minimum(most, self.max_model_len) - known - 1  # the row behind the drafts gives 1
        wanted[done] = np.clip(room[done], 0, self.draft_length.wanted(rows[done]))
        if self.draft_model:
            wanted = self.draft_model.propose(self, requests, known, wanted)
        for request, n, count in zip(requests, known, wanted):
            drafts = self.token_ids[request.row, n : n + count].tolist()
            if count and self.drafter.propose is not None:
                drafts = self.drafter.propose(self.token_ids[request.row, :n], count, self.config)
            if drafts:
                output.draft_token_ids[request.request_id] = drafts

    def _prompt_logprobs(self, request, hidden, start):
        """{position: entry} of the prompt tokens that this chunk's hidden states predict."""
        entries, count = {}, request.params.prompt_logprobs
        last = min(start + len(hidden), self.prompt_len[request.row] - 1)
        for first in range(start, last, 64):  # a few rows at a time: a row of logits is V numbers
            rows = hidden[first - start : min(first + 64, last) - start]
            logits = self.model.logits(rows).float()
            for pos, row in enumerate(logits, first + 1):
                token_id = int(self.token_ids[request.row, pos])
                entries[pos] = gather_logprobs(row, token_id, count)
        return entries


# ==================================================================================================
# 14  Engine
# ==================================================================================================
# Problem: scheduler, runner and tokenizer each do one thing; someone must turn prompts into
# answers.  Idea: EngineCore repeats one loop and knows only ids; the front end knows only text.
#
#     LLM.generate ─ encode ─► add_request ─►┌── EngineCore.step() ─────────────────┐
#                                            │ plan   = scheduler.schedule()        │
#                                            │ output = runner.execute(plan)        │ until nothing
#     RequestOutput ◄─ detokenize ◄─ news ◄──│ news   = scheduler.update(...)       │ is unfinished
#                                            └──────────────────────────────────────┘
#
# Invariant: if a step raises, its requests end with finish_reason "error" and give every block
#   back; requests outside the step go on as if nothing had happened.
# Invariant: phase times sum to wall time: a lap books all time since the lap before.
# Why: stop strings live in the front end, because they are text; the core sees an abort.
# Try: python nanoserve.py --model toy --prompt hello --trace t.jsonl --stats

class PhaseClock:
    """Where the time went: lap(phase) books everything since the previous lap under that name."""
    def __init__(self):
        self.totals, self.step, self.last = Counter(), Counter(), time.perf_counter()

    def lap(self, phase):
        now = time.perf_counter()
        self.totals[phase] += now - self.last
        self.step[phase] += now - self.last
        self.last = now

class Tracer:
    """One record per step; replaying them rebuilds all tables."""
    def __init__(self, path, style):
        self.file = open_text(path, "w").__enter__()  # stays open to the end of the program
        self.style, self.num_steps = style, 0
        self.file.write("[\n" if style == "chrome" else "")  # that format allows a missing end

    def record(self, core, plan, tables, waited, news, started):
        BS, scheduled, frontier, slots = core.config.block_size, plan.num_scheduled_tokens, {}, {}
        for data in (*plan.scheduled_cached_reqs, *plan.scheduled_new_reqs):
            i, start = data.request_id, data.num_computed_tokens
            frontier[i] = start + scheduled[i]
            slots[i] = [slot_of(tables[i][pos // BS], pos, BS) for pos in range(start, frontier[i])]
        row = dict(
            step=self.num_steps, time=started, scheduled=scheduled, total=sum(scheduled.values()),
            budget=core.config.max_num_batched_tokens, preempted=plan.preempted_req_ids,
            new=[*waited], waited=waited,  # seconds from the front end to the first plan
            forgotten=plan.finished_req_ids, tables=tables, slots=slots, frontier=frontier,
            backend=core.attention_name,
            new_token_ids={n.request_id: n.new_token_ids for n in news},
            finished={n.request_id: n.finish_reason for n in news if n.finish_reason},
            free_blocks=core.scheduler.kv.pool.num_free,
            prefix_cache=vars(core.scheduler.kv.stats), phases=dict(core.clock.step))
        self.num_steps += 1
        if self.style == "jsonl":
            self.file.write(json.dumps(row) + "\n")
        else:  # Trace Event Format: complete events, times in microseconds
            self._span("step", started, sum(row["phases"].values()), row)
            for phase, seconds in row["phases"].items():
                self._span(phase, started, seconds, {})
                started += seconds
        self.file.flush()

    def _span(self, name, start, seconds, args):
        event = dict(name=name, ph="X", ts=start * 1e6, dur=seconds * 1e6, pid=1, tid=1, args=args)
        self.file.write(json.dumps(event) + ",\n")

class EngineCore:
    """One model, one scheduler, one runner. Token ids in, token ids out."""
    def __init__(self, config):
        self.config, self.clock, self.counts = config, PhaseClock(), Counter()
        for name, table in (("quantization", QUANTS), ("speculative", DRAFTERS)):
            value = getattr(config, name)
            require(value in table, f"{name} must be one of {[*table]}, got {value!r}")
        checkpoint = open_checkpoint(config.model)
        self.tokenizer = checkpoint.tokenizer()
        self.generation_config = checkpoint.generation_config
        self.model_config = mc = read_model_config(checkpoint)
        device, self.report = kernels.resolve_device(config.device), []  # what was chosen, and why
        BS, budget, longest = config.block_size, config.max_num_batched_tokens, mc.longest_context()
        require((config.max_model_len or 0) <= longest,
                f"max_model_len {config.max_model_len} exceeds the model's {longest} positions")
        self.max_model_len = config.max_model_len or longest
        window = max(mc.layer_windows) if min(mc.layer_windows) else 0
        # The pool is sized when the weights are there: what is free then is free for it.
        model, kv_dtype = self._load_model(checkpoint, mc, device)
        self.attention_name = model.attention_backend.name
        self.bytes = model.matrix_bytes()[0]
        draft = self._load_draft(device, window) if config.speculative == "draft" else None
        num_blocks = self._size_pool((model, kv_dtype), draft, device, window)
        if self.max_model_len < len(model.cos_sin):  # the pool cut it
            model.cos_sin = rope_table(mc, self.max_model_len, device)
        require(config.enable_chunked_prefill or self.max_model_len <= budget,
                f"max_num_batched_tokens {budget} cannot hold a whole prompt (max_model_len)")
        if draft:
            draft = DraftModel(draft[0], kv_arrays(draft[0], num_blocks, BS, draft[1]), config)
        self.runner = ModelRunner(model, num_blocks, config, self.max_model_len, kv_dtype, draft)
        eager = self.runner.steps.eager
        how = f"run eagerly ({eager})" if eager else "recorded and replayed"
        self.report.append(f"steps: {how}")
        self.seeds = random.Random(config.seed)  # for requests that bring none
        self.scheduler = Scheduler(
            replace(config, max_model_len=self.max_model_len),
            KVCacheManager(num_blocks, BS, config.enable_prefix_caching, window, budget),
            num_spec_tokens=config.num_speculative_tokens if draft else 0)
        self.tracer = Tracer(config.trace, config.trace_format) if config.trace else None
        self.clock.lap("start")

    def _load_model(self, checkpoint, mc, device, role="model"):
        """(Model, dtype of its KV cache), and in the report what was chosen."""
        config = self.config
        dtype, weight_dtype = kernels.resolve_dtypes(config.dtype, mc.dtype, device)
        asked = mc.kv_cache_dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
        kv_dtype = kernels.KV_DTYPES.get(asked, dtype)
        backend, lines = kernels.select_attention(
            config.attention_backend, device=device, dtype=dtype, kv_dtype=kv_dtype,
            head_dim=mc.head_dim, block_size=config.block_size,
            group=mc.num_heads // mc.num_kv_heads)
        types = f"{weight_dtype} weights, {dtype} activations".replace("torch.", "")
        what = f"{mc.architecture}, {mc.num_layers} layers, {types} on {device}"
        self.report += [f"{role} {checkpoint.name}: {what}", *lines]
        max_len = min(self.max_model_len, mc.longest_context())
        model = Model(checkpoint, mc, dtype, device, backend, max_len, weight_dtype, config)
        sizes, forms = model.matrix_bytes()
        self.report.append("matrices: " + ", ".join(
            f"{show_bytes(n)} {form}" for form, n in forms.most_common())
            + f"; scales {show_bytes(sizes['scales'])}")
        return model, kv_dtype

    def _load_draft(self, device, window):
        """The same for the draft model, which must speak the target's language."""
        checkpoint = open_checkpoint(self.config.speculative_model)
        name, own = checkpoint.name, checkpoint.tokenizer().backend.get_vocab()
        require(own == self.tokenizer.backend.get_vocab(),
                f"speculative_model {name} has another vocabulary than the model")
        require(not window, f"speculative_model {name} cannot draft for a model whose layers all "
                "have a sliding window: it needs the blocks that the window gives back")
        draft = self._load_model(checkpoint, read_model_config(checkpoint), device, "draft model")
        self.bytes["draft"] = draft[0].matrix_bytes()[0].total()
        return draft

    def _size_pool(self, target, draft, device, window):
        """Number of KV blocks; cuts max_model_len to what they hold. target, draft: (Model, dtype
        of its cache); a block holds the positions of both."""
        config, BS, free = self.config, self.config.block_size, kernels.free_memory(device)
        own, *drafts = [kv_bytes_per_token(
            model.config.num_layers, model.config.num_kv_heads, model.config.head_dim,
            kv_dtype.itemsize, 4 if kv_dtype == torch.int8 else 0)
            for model, kv_dtype in filter(None, (target, draft))]
        per_token = own + sum(drafts)
        if config.num_kv_blocks is not None:
            num_blocks = config.num_kv_blocks
        elif config.kv_cache_memory is not None:
            memory = parse_bytes(config.kv_cache_memory, "kv_cache_memory")
            num_blocks = num_blocks_in(memory, BS, per_token)
        else:
            memory = free * 9 // 10 if device.type == "cuda" else min(free * 4 // 10, 4 << 30)
            useful = config.max_num_seqs * cdiv(self.max_model_len, BS) + 1
            num_blocks = min(num_blocks_in(memory, BS, per_token), useful)
        kind = str(target[1]).removeprefix("torch.")
        each = f"{show_bytes(own)} ({kind})"
        if draft:
            each = f"({each} + {show_bytes(*drafts)} of the draft model)"
        self.bytes["kv"] = num_blocks * BS * per_token
        size = (f"{num_blocks} blocks x {BS} tokens x {each} = {show_bytes(self.bytes['kv'])} of "
                f"{show_bytes(free)} free")
        require(self.bytes["kv"] <= free, f"the KV cache does not fit: {size}")
        needed = max_blocks_of(self.max_model_len, BS, window, config.max_num_batched_tokens)
        if needed > num_blocks - 1:
            fits = max(slots_of(num_blocks, BS), 0)
            require(config.max_model_len is None and fits >= 2,
                    f"a sequence of max_model_len {self.max_model_len} needs {needed} KV blocks, "
                    f"the pool has {max(num_blocks - 1, 0)} of {show_bytes(BS * per_token)}")
            self.report.append(f"max_model_len {self.max_model_len} cut to {fits}: the pool's size")
            self.max_model_len, needed = fits, num_blocks - 1
        self.report.append(f"KV cache: {size}; {(num_blocks - 1) / needed:.1f} requests of "
                           f"{self.max_model_len} tokens at once")
        return num_blocks

    def add_request(self, message):
        """Queue an EngineCoreRequest. ValueError if it can never run."""
        if message.sampling_params.seed is None:
            params = replace(message.sampling_params, seed=self.seeds.getrandbits(62))
            message = replace(message, sampling_params=params)
        self.scheduler.add_request(Request(message, self.config.block_size))

    def abort_requests(self, request_ids, stopped=False):
        """End requests from outside; `stopped`: by a stop string. Ignores unknown ids."""
        status = RequestStatus.FINISHED_STOPPED if stopped else RequestStatus.FINISHED_ABORTED
        for request_id in request_ids:
            self.scheduler.finish_request(request_id, status)

    def step(self):
        """One turn of the loop. Returns the news of the step as EngineCoreOutputs."""
        self.clock.lap("idle")
        self.clock.step.clear()
        scheduler, started = self.scheduler, self.clock.last
        plan, waited = scheduler.schedule(), {}
        for new in plan.scheduled_new_reqs:
            request = scheduler.requests[new.request_id]
            if request.first_scheduled_time is None:  # not back from a preemption
                request.first_scheduled_time = time.monotonic()
                self.counts["prompt_tokens"] += request.num_prompt_tokens
            waited[new.request_id] = request.first_scheduled_time - request.arrival_time
        if self.tracer:
            planned = [scheduler.requests[i] for i in plan.num_scheduled_tokens]
            tables = {r.request_id: scheduler.kv.block_ids(r) for r in planned}
        self.clock.lap("schedule")
        try:
            news = scheduler.update_from_output(plan, self.runner.execute(plan, self.clock))
        except BaseException as error:
            news = scheduler.fail_step(plan, f"{type(error).__name__}: {error}")
            if not isinstance(error, Exception):
                raise
            log.exception("a step failed; its %d requests end with an error", len(news))
        self.counts["steps"] += 1
        self.counts["scheduled_tokens"] += sum(plan.num_scheduled_tokens.values())
        self.counts["generation_tokens"] += sum(len(entry.new_token_ids) for entry in news)
        if self.config.paranoid:
            check_invariants(self)
        self.clock.lap("update")
        if self.tracer:
            self.tracer.record(self, plan, tables, waited, news, started)
            self.clock.lap("trace")
        return news

    def reset_prefix_cache(self):
        """Forget all cached prefixes; False while a request is running."""
        return self.scheduler.kv.pool.reset()

    def stats(self):
        """Counters and gauges as one flat dict."""
        scheduler, pool, cache = self.scheduler, self.scheduler.kv.pool, self.scheduler.kv.stats
        finished = {f"finished_{reason}": n for reason, n in scheduler.num_finished.items()}
        return dict(
            self.counts, **finished, running=len(scheduler.running), waiting=len(scheduler.waiting),
            preemptions=scheduler.num_preemptions, prefill_chunks=scheduler.num_chunks,
            kv_usage=pool.usage, free_blocks=pool.num_free,
            weight_bytes=self.bytes["weights"], scale_bytes=self.bytes["scales"],
            draft_model_bytes=self.bytes["draft"], kv_bytes=self.bytes["kv"],
            activation_bytes=self.runner.activation_bytes,
            prefix_queries=cache.queries, prefix_hits=cache.hits, attention=self.attention_name,
            attention_executed=kernels.ATTENTION[self.attention_name].executed,
            **scheduler.speculation.summary())

@dataclass(eq=False)
class Pending:
    """One completion on its way to the caller."""
    parent: RequestOutput
    completion: CompletionOutput
    detokenizer: IncrementalDetokenizer | None
    num_taken: int = 0  # tokens a streaming caller has had
    end_taken: bool = False

    def take_delta(self):
        """A CompletionOutput with only what is new since the last call; None if nothing is."""
        completion = self.completion
        token_ids = completion.token_ids[self.num_taken :]
        text = self.detokenizer.take_delta() if self.detokenizer else ""
        ended = completion.finish_reason is not None and not self.end_taken
        self.num_taken, self.end_taken = len(completion.token_ids), self.end_taken or ended
        if token_ids or text or ended:
            return replace(completion, token_ids=token_ids, text=text)

class FrontEnd:
    """Text in, text out, around any core: makes requests, folds news into RequestOutputs."""
    def __init__(self, tokenizer, generation_config, vocab_size, max_model_len):
        self.tokenizer, self.vocab_size, self.max_model_len = tokenizer, vocab_size, max_model_len
        self.eos_token_ids = tuple(i for i in tokenizer.eos_token_ids if is_int(i))
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        self.defaults = {name: generation_config[name] for name in names
                         if generation_config.get(name) is not None}
        self.pending, self.next_id = {}, itertools.count()  # request_id in the core -> Pending

    def default_sampling_params(self, **overrides):
        """SamplingParams with the checkpoint's own defaults (generation_config.json)."""
        return SamplingParams(**{**self.defaults, **overrides})

    def token_ids_of(self, prompt):
        """(text or None, token ids) of a prompt: str, list of ids, or a dict with one of them."""
        if isinstance(prompt, dict):
            require(len(prompt) == 1 and set(prompt) <= {"prompt", "prompt_token_ids"},
                    f"a prompt dict holds either prompt or prompt_token_ids, got {[*prompt]}")
            (prompt,) = prompt.values()
        text = prompt if isinstance(prompt, str) else None
        token_ids = prompt if text is None else self.tokenizer.encode(text)
        require(isinstance(token_ids, (list, tuple)),
                f"a prompt is a string, a list of token ids or a dict, got {type(prompt).__name__}")
        self.check_ids("prompt", token_ids)
        return text, [int(token_id) for token_id in token_ids]

    def check_ids(self, name, token_ids):
        bad = next((t for t in token_ids if not is_int(t) or not 0 <= t < self.vocab_size), None)
        require(bad is None, f"{name} holds {bad!r}, which is no token id below {self.vocab_size}")

    def make_requests(self, prompt, params, request_id=None):
        """Check one prompt and its parameters. Returns (RequestOutput, [EngineCoreRequest]), a
        message per completion; nothing is registered yet."""
        require(isinstance(params, SamplingParams),
                f"sampling_params must be SamplingParams, got {type(params).__name__}")
        text, token_ids = self.token_ids_of(prompt)
        room = self.max_model_len - len(token_ids)
        require(token_ids, "the prompt is empty")
        require(room > 0, f"the prompt has {len(token_ids)} tokens, which leaves no room for an "
                f"output: max_model_len is {self.max_model_len}")
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            self.check_ids(name, getattr(params, name) or ())
        bad_words_ids = [ids for word in params.bad_words for ids in self._spellings(word)]
        max_tokens = min(params.max_tokens or room, room)
        child = replace(params, n=1, max_tokens=max_tokens,
                        min_tokens=min(params.min_tokens, max_tokens))
        now, request_id, messages = time.monotonic(), request_id or str(next(self.next_id)), []
        for index in range(params.n):
            if params.seed is not None:
                seed = (params.seed + index + 2**63) % 2**64 - 2**63  # stays a signed 64-bit number
                child = replace(child, seed=seed)
            child_id = request_id if params.n == 1 else f"{index}_{request_id}"
            messages.append(EngineCoreRequest(
                child_id, token_ids, child, self.eos_token_ids, bad_words_ids,
                now + index * 1e-6))  # of equals none is the younger, and they would take turns
        outputs = [CompletionOutput(index) for index in range(params.n)]
        metrics = RequestMetrics(now)
        return RequestOutput(request_id, text, token_ids, outputs, metrics=metrics), messages

    def _spellings(self, word):
        """Token sequences of a bad word: as it is, and with a space in front if that is as long."""
        plain = self.tokenizer.encode(word, add_special_tokens=False)
        spaced = self.tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        return [plain, spaced] if len(spaced) == len(plain) and spaced[0] != plain[0] else [plain]

    def register(self, parent, messages):
        """From now on news of these requests are expected. Returns a Pending for each."""
        for message, completion in zip(messages, parent.outputs):
            params, detokenizer = message.sampling_params, None
            if params.detokenize:
                detokenizer = IncrementalDetokenizer(
                    self.tokenizer, parent.prompt_token_ids, params.stop, params.min_tokens,
                    params.include_stop_str_in_output, params.skip_special_tokens)
            if params.logprobs is not None:
                completion.logprobs, completion.cumulative_logprob = [], 0.0
            self.pending[message.request_id] = Pending(parent, completion, detokenizer)
        return [self.pending[message.request_id] for message in messages]

    def process(self, news):
        """Fold the core's news into the RequestOutputs. Returns the ids of requests that met a stop
        string and must be ended in the core."""
        stopped = []
        for entry in news:
            pending = self.pending.get(entry.request_id)
            if pending is None:
                continue  # its caller has left
            self._fold(pending, entry)
            if pending.completion.finish_reason:
                self.end(entry.request_id)
                stopped += [] if entry.finish_reason else [entry.request_id]
        return stopped

    def _fold(self, pending, entry):
        """News of one completion: ids, probabilities, text, and perhaps its end."""
        parent, completion, detokenizer = pending.parent, pending.completion, pending.detokenizer
        metrics = parent.metrics
        metrics.first_scheduled_time = metrics.first_scheduled_time or entry.first_scheduled_time
        metrics.first_token_time = metrics.first_token_time or time.monotonic()
        parent.num_cached_tokens = max(parent.num_cached_tokens, entry.num_cached_tokens)
        parent.error = entry.error or parent.error
        if entry.prompt_logprobs is not None:
            parent.prompt_logprobs = self._with_text(entry.prompt_logprobs)
        new_token_ids = entry.new_token_ids
        completion.finish_reason, completion.stop_reason = entry.finish_reason, entry.stop_reason
        if detokenizer:
            # A token that ended the output is an id like others, but text only on request.
            hidden = entry.finish_reason == "stop" and not detokenizer.include_stop
            shown = entry.new_token_ids[:-1] if hidden else entry.new_token_ids
            met = detokenizer.push(shown, finished=entry.finish_reason is not None)
            if met is not None:
                completion.finish_reason, completion.stop_reason = "stop", met
                new_token_ids = new_token_ids[: detokenizer.num_tokens - len(completion.token_ids)]
        completion.token_ids += new_token_ids
        if entry.logprobs:
            rows = entry.logprobs[: len(new_token_ids)]
            completion.logprobs += self._with_text(rows)
            completion.cumulative_logprob += sum(
                row[token_id].logprob for row, token_id in zip(rows, new_token_ids))

    def end(self, request_id, reason=None):
        """Nothing more will come. The last completion finishes its RequestOutput."""
        pending = self.pending.pop(request_id)
        parent, completion = pending.parent, pending.completion
        completion.finish_reason = reason or completion.finish_reason
        completion.text = pending.detokenizer.text if pending.detokenizer else ""
        parent.finished = all(c.finish_reason for c in parent.outputs)
        parent.metrics.finished_time = time.monotonic() if parent.finished else None

    def _with_text(self, rows):
        for row in rows:
            for token_id, entry in (row or {}).items():
                data = self.tokenizer.token_bytes(token_id)
                entry.decoded_token = data.decode("utf-8", "replace")
        return rows

class LLM:
    """The engine in this process: `LLM(model=...).generate(prompts, SamplingParams(...))`.
    Keyword arguments are the fields of EngineConfig; an unknown one raises TypeError."""
    def __init__(self, model=None, **options):
        self.core = EngineCore(EngineConfig(model=model, **options))
        self.tokenizer = self.core.tokenizer
        self.front = FrontEnd(self.tokenizer, self.core.generation_config,
                              self.core.model_config.vocab_size, self.core.max_model_len)
        self.default_sampling_params = self.front.default_sampling_params
        self.lock = threading.RLock()

    def generate(self, prompts, sampling_params=None, use_tqdm=True):
        """Complete one prompt or many. Returns a RequestOutput per prompt, in order.

        prompts: str, list of token ids, {"prompt": ...}, {"prompt_token_ids": ...}, or a list of
        those. sampling_params: one for all, or a list of as many. ValueError says what is wrong
        with which prompt, before anything runs. A request that fails later has finish_reason
        "error"."""
        require(isinstance(prompts, (str, dict, list, tuple)),
                f"prompts must be a prompt or a list of prompts, got {prompts!r}")
        if isinstance(prompts, (str, dict)) or prompts and is_int(prompts[0]):
            prompts = [prompts]
        params = self.default_sampling_params() if sampling_params is None else sampling_params
        params = params if isinstance(params, (list, tuple)) else [params] * len(prompts)
        require(len(params) == len(prompts),
                f"sampling_params has {len(params)} entries for {len(prompts)} prompts")
        pendings, before = [], self.core.counts["generation_tokens"]
        with contextlib.closing(self._run(prompts, params, pendings)) as steps:
            next(steps)  # queued
            parents = list({id(pending.parent): pending.parent for pending in pendings}.values())
            bar = tqdm(total=len(prompts), disable=None if use_tqdm else True, desc="Prompts")
            for _ in steps:
                if bar.disable:
                    continue
                stats, seconds = self.core.stats(), bar.format_dict["elapsed"] or 1e-9
                rate = (stats["generation_tokens"] - before) / seconds
                bar.update(sum(parent.finished for parent in parents) - bar.n)
                bar.set_postfix_str(
                    f"{rate:.0f} tok/s, {stats['running']} running, {stats['waiting']} waiting, "
                    f"KV {stats['kv_usage']:.0%}", refresh=False)
            bar.close()
        return parents

    def chat(self, messages, sampling_params=None, use_tqdm=True, **template_variables):
        """Answer one conversation or many: lists of {"role": ..., "content": ...}."""
        require(isinstance(messages, (list, tuple)) and messages,
                f"messages must be a list that is not empty, got {messages!r}")
        conversations = messages if isinstance(messages[0], (list, tuple)) else [messages]
        prompts = [self.tokenizer.encode_chat(m, **template_variables) for m in conversations]
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(self, prompt, sampling_params=None):
        """Yield RequestOutputs whose outputs hold only what is new: text and token_ids. Closing the
        generator aborts the request."""
        params, pendings = sampling_params or self.default_sampling_params(), []
        for _ in self._run([prompt], [params], pendings):
            news = [delta for pending in pendings if (delta := pending.take_delta())]
            if news:
                yield replace(pendings[0].parent, outputs=news)

    def _add_all(self, prompts, params, pendings):
        """Check every prompt before the first is queued: bad input leaves nothing behind."""
        checked = []
        for i, (prompt, param) in enumerate(zip(prompts, params)):
            with explained(f"prompt {i}", ValueError) if prompts[1:] else contextlib.nullcontext():
                checked.append(self.front.make_requests(prompt, param))
        with self._whole():
            for parent, messages in checked:
                pendings += self.front.register(parent, messages)
                for message in messages:
                    self.core.add_request(message)

    @contextlib.contextmanager
    def _whole(self):
        """What runs inside is not cut in half, neither by other threads nor by Ctrl-C."""
        pressed, main = [], threading.current_thread() is threading.main_thread()
        with self.lock:
            before = main and signal.signal(signal.SIGINT, lambda *args: pressed.append(args))
            try:
                yield
            finally:
                if main:
                    signal.signal(signal.SIGINT, before)
        if pressed and callable(before):
            before(*pressed[0])

    def _run(self, prompts, params, pendings):
        """Queue and step until all are finished, yielding first once queued, then after steps."""
        try:
            self._add_all(prompts, params, pendings)
            yield
            while self.core.scheduler.requests and not all(p.parent.finished for p in pendings):
                with self._whole():
                    stopped = self.front.process(self.core.step())
                    self.core.abort_requests(stopped, stopped=True)
                    self.core.clock.lap("detokenize")
                yield
            yield  # another caller's loop may have finished these
        finally:  # whoever leaves early aborts the rest
            with self._whole():
                left = [i for i, pending in self.front.pending.items() if pending in pendings]
                self.core.abort_requests(left)
                for request_id in left:
                    self.front.end(request_id, "abort")


# ==================================================================================================
# 15  Server
# ==================================================================================================
# Problem: a step takes the processor for tens of milliseconds, and meanwhile somebody connects,
# somebody leaves and a hundred clients want their next word.  Idea: two processes.  The front end
# (server.py) owns sockets and text and never computes; the core owns the model and never waits.
# Between them runs one pipe with small messages.
#
#     client ═ HTTP ═ front end ── add, abort, stop, view, reset ──►  core: read_mail(), step()
#                               ◄── ready, news, refused, view, reset, crashed ──
#
# Invariant: mail is read between any two steps, so who leaves is gone within one step.
# Invariant: whoever dies, the other notices: its end of the pipe closes. Nobody waits for ever.
# Why: a process and not a thread: Python runs one thread at a time, and the core never rests.
# Simplification: one core. Production engines put several behind one front end.
# Try: python nanoserve.py serve --model toy --num-kv-blocks 64, and open the page it names

@dataclass
class ServerConfig:
    """How to serve: flags of the serve command beside those of EngineConfig."""
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 = reachable from outside")
    port: int = option(8000, "0 = any free one, named at start", 0, 65535)
    api_key: str | None = option(None, "clients must send it: Authorization: Bearer KEY")
    served_model_name: str | None = option(None, "what clients call the model (default: --model)")
    allowed_origins: list[str] | None = option(
        None, "web pages that may call, e.g. http://localhost:3000; * = all (default: only ours)")
    max_body_bytes: int = option(4 << 20, "largest request body", 1024)
    max_connections: int = option(2048, "open at once; more are turned away with 503", 1)
    max_choices: int = option(128, "completions of one request: prompts x n", 1)
    request_timeout: float = option(30.0, "seconds a client may take to send a request", above=0)
    keep_alive_timeout: float = option(75.0, "seconds a connection may stay idle", above=0)
    write_timeout: float = option(30.0, "seconds a client may leave its answer unread", above=0)
    drain_timeout: float = option(30.0, "seconds after SIGTERM for what is running", 0)
    log_prompts: bool = option(False, "put prompts into the log")

    def __post_init__(self):
        check_fields(self)

def block_map(core):
    """What the page draws: a letter per KV block, and who owns which.

    f free and empty, c free but its content can still be found, u used by one request, s shared,
    - the null block."""
    scheduler, pool = core.scheduler, core.scheduler.kv.pool
    letters = ["s" if b.ref_cnt > 1 else "u" if b.ref_cnt else "c" if b.block_hash else "f"
               for b in pool.blocks]
    letters[pool.null_block.block_id] = "-"
    rows = [dict(id=r.request_id, computed=r.num_computed_tokens, tokens=r.num_tokens,
                 prompt=r.num_prompt_tokens, cached=r.num_cached_tokens,
                 preemptions=r.num_preemptions, blocks=scheduler.kv.block_ids(r))
            for r in (*scheduler.running, *itertools.islice(scheduler.waiting, 100))]
    return dict(blocks="".join(letters), requests=rows, stats=core.stats())

def read_mail(core, pipe):
    """Act on all messages of the front end; wait for one if there is nothing to compute."""
    timeout = 0 if core.scheduler.requests else None
    while pipe.poll(timeout):
        kind, content = pipe.recv()
        if kind == "add":
            for message in content:
                try:
                    core.add_request(message)
                except ValueError as error:
                    pipe.send(("refused", (message.request_id, str(error))))
        elif kind == "view":
            pipe.send(("view", block_map(core)))
        elif kind == "reset":
            pipe.send(("reset", core.reset_prefix_cache()))
        else:  # abort, or stop: the text met a stop string
            core.abort_requests(content, stopped=kind == "stop")
        timeout = 0

def run_core(options, pipe):
    """The core process: mail, step, news, until the front end is gone. options: of EngineConfig."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the front end decides when it is over
    core = None
    try:
        core = EngineCore(EngineConfig(**options))
        pipe.send(("ready", dict(max_model_len=core.max_model_len, report=core.report)))
        while True:
            read_mail(core, pipe)
            news = core.step() if core.scheduler.requests else []
            pipe.send(("news", (news, core.stats())))
    except (EOFError, ConnectionError):
        pass  # the other end of the pipe is closed
    except BaseException as error:
        name = type(error).__name__
        pipe.send(("crashed", f"{name}: {error}" if core else str(error) or name))
        if core:
            raise

def run_server(options, server_options):
    """Serve until SIGTERM or Ctrl-C. Returns the exit code."""
    import server  # it imports this file under its own name, so that messages have one type
    return server.serve(options, server_options)


# ==================================================================================================
# 16  Command line
# ==================================================================================================
# Problem: the first minute decides whether anyone stays.  Idea: no arguments, and you are talking
# to a model; everything else is a flag generated from the fields of section 1.
#
#     nanoserve.py [options]                         chat (default), or one answer with --prompt
#     nanoserve.py generate --input F --output F     a batch: JSON lines in, JSON lines out
#     nanoserve.py serve [--host H] [--port P]       section 15
#     nanoserve.py list                              the tables a fork extends, and what runs here
#
# The answer goes to stdout, everything said about it to stderr.
#
# Invariant: bad input ends with one sentence on stderr and exit code 2, never with a traceback.
# Try: /stats after a second turn: "cached" counts the tokens that the prefix cache saved.

CHAT_DEFAULTS = {"temperature": 0.6, "top_p": 0.95}  # where the checkpoint brings none of its own
CHAT_HELP = """  /help            this list
  /stats           tokens, cached tokens and times of the last reply, and the engine's totals
  /system TEXT     set the system message (alone: show it)
  /set NAME=VALUE  change a sampling parameter, e.g. /set temperature=0.2 (alone: show them)
  /reset           forget the conversation
  /quit            leave (so does end of input); Ctrl-C stops a reply"""

def say(text):
    """Anything that is not the answer."""
    print(text, file=sys.stderr, flush=True)

def say_stats(llm):
    say("  ".join(f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={value}"
                  for name, value in llm.core.stats().items()))

class Chat:
    """A conversation with one engine, line by line."""
    def __init__(self, llm, options, system=None):
        self.llm, self.options, self.system = llm, options, system
        self.messages, self.interrupted, self.last = [], False, None  # last: newest RequestOutput

    @property
    def params(self):
        defaults = self.llm.front.defaults or CHAT_DEFAULTS
        params = SamplingParams(**{"max_tokens": 1024, **defaults, **self.options})
        require(params.n == 1, "n must be 1 in a chat; the generate command takes more")
        return params

    def run(self):
        """Read and answer until /quit or end of input."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives input() line editing and history)
        commands = {"/help": lambda text: say(CHAT_HELP), "/stats": self.show_stats,
                    "/system": self.set_system, "/set": self.set_option,
                    "/reset": lambda text: self.messages.clear() or say("(a new conversation)")}
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
                name, _, rest = line.partition(" ")
                if name in ("/quit", "/exit"):
                    return
                if name.startswith("/"):
                    require(name in commands, f"unknown command {name}; /help lists them")
                    commands[name](rest.strip())
                elif line:
                    self.reply(line)
            except EOFError:
                return say("")
            except KeyboardInterrupt:
                say("\n(/quit leaves)")
            except ValueError as error:
                say(f"error: {error}")

    def set_system(self, text):
        self.system = text or self.system
        say(f"system: {self.system or '(the template decides)'}")

    def set_option(self, text):
        """NAME=VALUE, the value as JSON or plain text; an invalid one changes nothing."""
        name, given, value = (part.strip() for part in text.partition("="))
        known = {f.name for f in fields(SamplingParams)}
        require(not text or name in known, f"unknown sampling parameter {name!r}; /set lists them")
        if given:
            words = {"none": "null", "true": "true", "false": "false"}
            with contextlib.suppress(ValueError):
                value = json.loads(words.get(value.lower(), value))
            options = {**self.options, name: value}
            Chat(self.llm, options).params  # refuses what is not valid
            self.options = options
        say("\n".join(f"  {k}={v!r}" for k, v in vars(self.params).items() if name in ("", k)))

    def prompt_ids(self):
        """Ids of the conversation; the oldest turns go when it outgrows the context."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        while True:
            token_ids = self.llm.tokenizer.encode_chat(system + self.messages)
            room = self.llm.core.max_model_len - len(token_ids)
            if room >= min(self.params.max_tokens or 1, 64) or len(self.messages) < 3:
                return token_ids
            del self.messages[:2]
            say("(the oldest turn was dropped: the context is full)")

    def reply(self, line):
        """Answer one message, streamed to stdout. Ctrl-C ends the reply; what was said stays."""
        self.messages.append({"role": "user", "content": line})
        text = ""
        try:
            prompt = {"prompt_token_ids": self.prompt_ids()}
            stream = contextlib.closing(self.llm.stream(prompt, self.params))
            with stream as outputs, self.stop_on_ctrl_c():  # closing aborts what is unfinished
                for self.last in outputs:
                    piece = "".join(completion.text for completion in self.last.outputs)
                    text += piece
                    print(piece, end="", flush=True)
                    if self.interrupted:
                        break
        except ValueError:
            self.messages.pop()
            raise
        print("" if text.endswith("\n") else "\n", end="", flush=True)
        self.messages.append({"role": "assistant", "content": text})
        require(not self.last.error, self.last.error)

    @contextlib.contextmanager
    def stop_on_ctrl_c(self):
        """Turn Ctrl-C into a flag, so that it never cuts a step in half."""
        def remember(signum, frame):
            self.interrupted = True
        self.interrupted, before = False, signal.signal(signal.SIGINT, remember)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def show_stats(self, _):
        if self.last is not None:
            m = self.last.metrics
            waited = (m.first_token_time or m.arrival_time) - m.arrival_time
            say(f"last reply: {len(self.last.prompt_token_ids)} prompt tokens, "
                f"{self.last.num_cached_tokens} cached; first token after {waited:.3f} s")
        say_stats(self.llm)

def run_chat(llm, args, sampling):
    """A conversation, or the answer to one --prompt."""
    chat = Chat(llm, sampling, args["system"])
    chat.params  # a bad flag is reported before the first question
    if args["prompt"] is not None:
        chat.reply(args["prompt"])
        return 130 if chat.interrupted else 0
    say("Type a message; /help lists commands.")
    chat.run()

def run_generate(llm, args, sampling):
    """A batch: a line holds prompt, prompt_token_ids or messages, and any SamplingParams fields."""
    jobs, rows = {}, {}
    if args["input"] == "-" and sys.stdin.isatty():
        say("Reading JSON lines from the terminal, up to end of input.")
    with open_text(args["input"]) as source:
        lines = [(index, line) for index, line in enumerate(source) if line.strip()]
    for index, line in lines:
        try:
            jobs[index] = read_job(llm, line, sampling)
        except (ValueError, TypeError, RecursionError) as error:
            rows[index] = {"index": index, "error": str(error)}
    outputs = llm.generate(*map(list, zip(*jobs.values()))) if jobs else []
    with open_text(args["output"], "w") as sink:
        rows |= {index: {"index": index, **asdict(row)} for index, row in zip(jobs, outputs)}
        for index in sorted(rows):
            sink.write(json.dumps(rows[index]) + "\n")
    failed = sum(row["error"] is not None for row in rows.values())
    say(f"{len(rows) - failed} of {len(rows)} prompts completed")
    return 1 if failed else 0

def read_job(llm, line, sampling):
    """(prompt, SamplingParams) of one line of the batch. ValueError if they cannot be run."""
    with explained("a line is not JSON", ValueError):
        job = json.loads(line)
    job = {"prompt": job} if isinstance(job, str) else job
    require(isinstance(job, dict), "a line must be a JSON object or a string")
    keys = [key for key in ("prompt", "prompt_token_ids", "messages") if key in job]
    require(len(keys) == 1, "a line needs exactly one of prompt, prompt_token_ids and messages")
    prompt = job.pop(keys[0])
    if keys[0] == "messages":
        prompt = llm.tokenizer.encode_chat(prompt)
    unknown = set(job) - {f.name for f in fields(SamplingParams)}
    require(not unknown, f"unknown fields {sorted(unknown)}")
    params = llm.default_sampling_params(**{**sampling, **job})
    llm.front.make_requests(prompt, params, "unused")  # only to see whether it is valid
    return prompt, params

def run_list():
    """Print every table a fork extends, with what can be selected on this machine."""
    for title, table in (("ARCHS", ARCHS), ("QUANTS", QUANTS), ("POLICIES", POLICIES),
                         ("DRAFTERS", DRAFTERS)):
        print(title, *(f"  {name:20s} {row.summary}" for name, row in table.items()), sep="\n")
    device = kernels.resolve_device("auto")
    dtype, _ = kernels.resolve_dtypes("auto", "bfloat16", device)
    _, lines = kernels.select_attention(
        "auto", device=device, dtype=dtype, kv_dtype=dtype, head_dim=64, block_size=16, group=3)
    print("ATTENTION", *(f"  {line}" for line in lines), sep="\n")

def make_parser(command):
    parser = argparse.ArgumentParser(prog=f"nanoserve.py {command}", description=(
        f"{COMMANDS[command][1]} Commands: chat (default), generate, serve, list."))
    if command == "list":
        return parser
    if command == "serve":
        add_options(parser.add_argument_group("server"), ServerConfig)
        add_options(parser.add_argument_group("engine"), EngineConfig)
        return parser
    if command == "generate":
        parser.add_argument("--input", default="-", help="JSON lines (default: stdin)")
        parser.add_argument("--output", default="-", help="JSON lines (default: stdout)")
    else:
        parser.add_argument("--prompt", help="answer this once, print only the answer, and leave")
        parser.add_argument("--system", help="system message")
    parser.add_argument("--verbose", action="store_true", help="say what was chosen at start")
    parser.add_argument("--stats", action="store_true", help="at the end, say where the time went")
    add_options(parser.add_argument_group("engine"), EngineConfig)
    add_options(parser.add_argument_group("sampling"), SamplingParams, skip=("seed",))
    return parser

def say_phases(llm):
    """Where the time went since the engine was created; the phases sum to the wall time."""
    llm.core.clock.lap("idle")
    totals = llm.core.clock.totals
    wall = sum(totals.values())
    say("time: " + "  ".join(f"{phase} {t:.3f} s ({t / wall:.0%})" for phase, t in totals.items()))
    say_stats(llm)

COMMANDS = {
    "chat": (run_chat, "Chat with a model, or answer one --prompt."),
    "generate": (run_generate, "Complete a batch of prompts: JSON lines in, JSON lines out."),
    "serve": (run_server, "Serve a model to OpenAI clients and to a chat page."),
    "list": (run_list, "List architectures, formats, policies, drafters and attention backends."),
}

def main(argv=None):
    """Exit code: 0, 1 if prompts of a batch failed, or 2 with one sentence on stderr."""
    argv = list(sys.argv[1:] if argv is None else argv)
    command = argv.pop(0) if argv and not argv[0].startswith("-") else "chat"
    try:
        require(command in COMMANDS, f"unknown command {command!r}; there are {[*COMMANDS]}")
        args = vars(make_parser(command).parse_args(argv))
        if command == "list":
            run_list()
            return 0
        config, serving, sampling = (
            {f.name: args[f.name] for f in fields(kind) if f.name in args}
            for kind in (EngineConfig, ServerConfig, SamplingParams))
        if command == "serve":
            return run_server(config, serving)
        sampling.pop("seed", None)  # it picks the seeds of requests that bring none
        llm = LLM(**config)
        chats = command == "chat" and args["prompt"] is None
        require(not chats or llm.tokenizer.chat_template, NO_TEMPLATE)
        if args["verbose"] or chats:
            say("\n".join(llm.core.report))
        code = COMMANDS[command][0](llm, args, sampling)
        if args["stats"]:
            say_phases(llm)
        return code or 0  # a chat has no code
    except BrokenPipeError:  # whoever read the answer has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        say(f"error: {error or type(error).__name__}")
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return 130


# ==================================================================================================
# 17  Invariants
# ==================================================================================================
# Problem: a block that leaks or is owned twice shows hours later, as wrong text.  Idea: everything
# that must hold between two steps is written down here as code; tests call it after every step of
# random workloads, and --paranoid does so in production.
#
#     blocks:   null | free queue (ref 0, once) | owned (ref = number of tables that hold it)
#     requests: waiting (no blocks) | running (blocks cover what is computed)
#
# Invariant: all of check_invariants().

def check_invariants(core):
    """AssertionError, with what differs, if the books do not balance."""
    scheduler, kv = core.scheduler, core.scheduler.kv
    pool = kv.pool
    owned = itertools.chain(*kv.tables.values())
    owners = Counter(block for block in owned if block is not pool.null_block)
    free = set(pool.free_queue)
    assert len(free) == pool.num_free, "the free queue and its count differ"
    for block in pool.blocks[1:]:
        assert block.ref_cnt == owners[block], f"{block} is held by {owners[block]} tables"
        assert (block.ref_cnt == 0) == (block in free), f"{block}: free queue and count differ"
    named = {block: name for name, same in pool.cached.items() for block in same.values()}
    hashed = {block: block.block_hash for block in pool.blocks if block.block_hash}
    assert named == hashed, "the hash map and the blocks' own hashes differ"
    assert not pool.null_block.ref_cnt and not pool.null_block.block_hash, "the null block was used"
    running, waiting = scheduler.running, scheduler.waiting
    assert len(running) <= scheduler.config.max_num_seqs, "more requests run than there are seats"
    assert len(running) + len(waiting) == len(scheduler.requests), "a request is in no queue or two"
    assert set(kv.tables) == {r.request_id for r in running}, "blocks without a running request"
    for request in scheduler.requests.values():
        check_request(request, kv)

def check_request(request, kv):
    name, BS = request.request_id, kv.block_size
    assert not request.status.is_finished, f"{name} is finished but still registered"
    known = request.num_tokens + len(request.spec_token_ids) + request.num_output_placeholders
    computed, hashes = request.num_computed_tokens, request.block_hashes
    table = kv.tables.get(name, [])
    assert 0 <= computed <= known, f"{name}: computed {computed} of {known}"
    assert len(hashes) == request.num_tokens // BS, f"{name}: a full block has no name"
    if request.status is not RequestStatus.RUNNING:
        assert not table and computed == 0, f"{name} waits but holds blocks"
        return
    assert len(table) >= cdiv(computed, BS), f"{name}: computed tokens without a block"
    for i, block in enumerate(table):
        shared = block.ref_cnt > 1 and block is not kv.pool.null_block
        assert not shared or i < len(hashes), f"{name}: shared block {i} is not full"
        own = block.block_hash is None or hashes[i : i + 1] == [block.block_hash]
        assert own, f"{name}: block {i} has a foreign name"

if __name__ == "__main__":
    sys.exit(main())
