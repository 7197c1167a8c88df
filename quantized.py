"""Weights that other tools quantized, read as QuantizedWeight (kernels.py).

Four families of tools write Hugging Face folders with narrow weights. config.json names the family
and its settings in quantization_config; each linear layer then has a few tensors under its name in
place of one `weight`. Here they all become w[n, k] = codes[n, k] * scales + mins.

CONTENTS
    1  Words      small integers inside int32 words
    2  Schemes    one class per family, the table SCHEMES
"""

from __future__ import annotations

import re

import torch

from kernels import QuantizedWeight, require


# ==================================================================================================
# 1  Words
# ==================================================================================================
#     int32  0x87654321   4 bits   ──►   1 2 3 4 5 6 7 8      the lowest bits come first
#
# Invariant: a code is unsigned here, 0 .. 2^bits - 1, and stands for (code - zero) * scale.

def unpack(words, bits):
    """int32 words (..., M) -> their codes, uint8 (..., M * 32 / bits).

    >>> unpack(torch.tensor([0x87654321 - 2**32], dtype=torch.int32), 4).tolist()
    [1, 2, 3, 4, 5, 6, 7, 8]
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words.unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(-2).to(torch.uint8)

def affine(codes, scales, zeros, bits, group):
    """(codes - zeros) * scales: codes uint8 (N, K); scales, zeros (N, K / group); None: zeros in
    the middle of the range. Then the codes become signed and there are no minima."""
    middle, scales = 1 << bits - 1, scales.float()
    if zeros is None or bool((zeros == middle).all()):
        return QuantizedWeight((codes - middle).view(torch.int8), scales, group, bits)
    # Exact: a 16-bit scale times a code of 8 bits has 19 bits, and fp32 holds 24.
    return QuantizedWeight(codes, scales, group, bits, -scales * zeros.float())

def in_group_order(weight, group_of, name):
    """The weight with its columns sorted by group, where group_of (K,) says which group's scale a
    column uses (act order: GPTQ quantizes columns in another order than they lie in)."""
    K, group = len(group_of), weight.group
    natural = torch.arange(K) // group
    group_of = group_of.long()
    if torch.equal(group_of, natural) or bool((group_of == -1).all()):  # -1: no order was kept
        return weight
    order = torch.argsort(group_of, stable=True)
    require(torch.equal(group_of[order], natural),
            f"{name} does not put {group} columns into each of {-(-K // group)} groups")
    weight.codes, weight.inputs = weight.codes[:, order], order
    return weight


# ==================================================================================================
# 2  Schemes
# ==================================================================================================
# A scheme is made from quantization_config, before any weight is read, and refuses what it cannot
# read. Which layers are quantized the tensors themselves say: a layer that was left dense (an
# ignore list, the LM head) has a plain `weight` and none of the scheme's MARKS.
#
# Invariant: every tensor of a layer is taken with the shape that config and layer imply.
# Simplification: inputs that a checkpoint wants rounded to fp8 stay as wide as they are, which is
#   more exact; int8 inputs are rounded, because integer products are what makes them fast.

class Scheme:
    """MARKS: suffixes of tensors that only a quantized layer has."""
    MARKS = ()

    def __init__(self, settings, name):
        self.settings, self.name = settings, name

    def only(self, key, allowed, default=None, settings=None):
        """The value of a setting that must be one of `allowed`."""
        value = (self.settings if settings is None else settings).get(key, default)
        require(value in allowed, f"{self.name}: {self.settings['quant_method']} with {key} "
                f"{value!r} is not supported, only {', '.join(map(repr, allowed))}")
        return value

    def group_size(self, K, layer, size=None):
        """Columns that share a scale: a divisor of K; -1 and None: all of them."""
        size = self.settings.get("group_size", -1) if size is None else size
        size = K if size in (-1, None) else size
        good = isinstance(size, int) and size > 0 and K % size == 0
        require(good,
                f"{self.name}: group size {size!r} does not divide the {K} columns of {layer}")
        return size

    def whole(self, size, per_word, layer):
        """size / per_word: rows or columns that must fill their words."""
        require(size % per_word == 0,
                f"{self.name}: {size} codes of {layer} do not fill their words")
        return size // per_word

    def holds(self, ckpt, layer):
        return any(f"{layer}.{mark}" in ckpt.shapes for mark in self.MARKS)

class Gptq(Scheme):
    """Frantar et al. 2022, arXiv 2210.17323, as AutoGPTQ and GPTQModel write it: codes run down the
    input dimension; the first format (v1) stores zero - 1, v2 stores zero."""
    MARKS = ("qweight", "qzeros")

    def __init__(self, settings, name):
        super().__init__(settings, name)
        self.bits = self.only("bits", (4, 8))
        self.first = self.only("checkpoint_format", ("gptq", "gptq_v2"), "gptq") == "gptq"
        self.only("dynamic", (None, {}))  # settings per layer

    def read(self, ckpt, layer, N, K):
        bits, group, per_word = self.bits, self.group_size(K, layer), 32 // self.bits
        rows, columns = self.whole(K, per_word, layer), self.whole(N, per_word, layer)
        codes = unpack(ckpt.take(f"{layer}.qweight", (rows, N)).T, bits)  # (N, K)
        scales = ckpt.take(f"{layer}.scales", (K // group, N)).T
        zeros = unpack(ckpt.take(f"{layer}.qzeros", (K // group, columns)), bits).T
        zeros = zeros + 1 & (1 << bits) - 1 if self.first else zeros
        # A symmetric file has its zeros in the middle, whichever format its label names.
        weight = affine(codes, scales, None if self.settings.get("sym") else zeros, bits, group)
        if f"{layer}.g_idx" in ckpt.shapes or self.settings.get("desc_act"):
            group_of = ckpt.take(f"{layer}.g_idx", (K,))
            weight = in_group_order(weight, group_of, f"{ckpt.name}: {layer}.g_idx")
        return weight

class Awq(Scheme):
    """Lin et al. 2023, arXiv 2306.00978, as AutoAWQ writes it. gemm: codes of 8 outputs in a word,
    outputs 0 2 4 6 1 3 5 7 from the lowest bits up. gemv: codes of 8 inputs, in order, and the
    tables of scales and zeros padded."""
    MARKS = ("qweight", "qzeros")
    PLACE = [0, 4, 1, 5, 2, 6, 3, 7]  # of outputs 0 .. 7 in a gemm word

    def __init__(self, settings, name):
        super().__init__(settings, name)
        self.only("bits", (4,))
        self.version = self.only("version", ("gemm", "gemv"), "gemm")

    def read(self, ckpt, layer, N, K):
        group = self.group_size(K, layer)
        groups = K // group
        take = lambda part, shape: ckpt.take(f"{layer}.{part}", shape)
        if self.version == "gemv":
            align = max(128 // group, 1)  # tables are as wide as for 1024 inputs, or a multiple
            width = -(-groups // (8 * align)) * align
            codes = unpack(take("qweight", (N, self.whole(K, 8, layer))), 4)
            zeros = unpack(take("qzeros", (N, width)), 4)[:, :groups]
            return affine(codes, take("scales", (N, 8 * width))[:, :groups], zeros, 4, group)
        columns = self.whole(N, 8, layer)
        spread = lambda words: unpack(words, 4).unflatten(1, (-1, 8))[..., self.PLACE].flatten(1).T
        codes = spread(take("qweight", (K, columns)))
        zeros = spread(take("qzeros", (groups, columns)))
        return affine(codes, take("scales", (groups, N)).T, zeros, 4, group)

class CompressedTensors(Scheme):
    """The format of llm-compressor (vllm-project/compressed-tensors). config_groups say how the
    layers that their targets name are stored."""
    MARKS = ("weight_packed", "weight_scale")
    FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")

    def __init__(self, settings, name):
        super().__init__(settings, name)
        self.only("format", (*self.FORMATS, "mixed-precision"))
        groups = settings.get("config_groups")
        self.groups = [*groups.values()] if isinstance(groups, dict) else []
        good = self.groups and all(
            isinstance(g, dict) and isinstance(g.get("weights"), dict)
            and all(isinstance(target, str) for target in g.get("targets") or [])
            for g in self.groups)
        require(good, f"{name}: config_groups of quantization_config are missing or malformed")
        for group in self.groups:
            self.only("format", (None, *self.FORMATS), settings=group)
            weights, inputs = group["weights"], group.get("input_activations") or {}
            self.only("num_bits", (4, 8), settings=weights)
            kind = self.only("type", ("int", "float"), "int", settings=weights)
            if inputs and kind == "int":
                self.only("num_bits", (8,), settings=inputs)
                self.only("type", ("int",), "int", settings=inputs)
                self.only("dynamic", (True,), settings=inputs)
                self.only("strategy", ("token",), settings=inputs)
                self.only("symmetric", (True,), True, settings=inputs)

    def group_of(self, layer):
        """The first group with a target for the layer: Linear, its name, or re: and a pattern."""
        for group in self.groups:
            for target in group.get("targets") or []:
                pattern = target[3:] if target.startswith("re:") else re.escape(target)
                if target == "Linear" or re.match(pattern + "$", layer):
                    return group
        require(False, f"{self.name}: no target of config_groups names the quantized {layer}")

    def read(self, ckpt, layer, N, K):
        group = self.group_of(layer)
        settings, inputs = group["weights"], group.get("input_activations")
        if settings.get("type") == "float":
            return read_fp8(ckpt, layer, N, K, "weight_scale", settings.get("block_structure"))
        bits, size = settings["num_bits"], self.group_size(K, layer, settings.get("group_size"))
        take = lambda part, shape: ckpt.take(f"{layer}.{part}", shape)
        if f"{layer}.weight_packed" not in ckpt.shapes:
            codes = take("weight", (N, K))
            require(codes.dtype == torch.int8, f"{ckpt.name}: {layer}.weight is not int8")
            weight = QuantizedWeight(codes, take("weight_scale", (N, K // size)).float(), size)
        else:
            per_word, zeros = 32 // bits, None
            codes = unpack(take("weight_packed", (N, self.whole(K, per_word, layer))), bits)
            stored = take("weight_shape", (2,)).tolist()
            require(stored == [N, K],
                    f"{ckpt.name}: {layer}.weight_shape is {stored}, not {[N, K]}")
            if not settings.get("symmetric", True):
                words = take("weight_zero_point", (self.whole(N, per_word, layer), K // size))
                zeros = unpack(words.T, bits).T
            weight = affine(codes, take("weight_scale", (N, K // size)), zeros, bits, size)
        if f"{layer}.weight_g_idx" in ckpt.shapes:
            order = take("weight_g_idx", (K,))
            weight = in_group_order(weight, order, f"{ckpt.name}: {layer}.weight_g_idx")
        weight.int8_inputs = bool(inputs)
        return weight

class Fp8(Scheme):
    """e4m3 weights with weight_scale_inv per block (DeepSeek-V3, arXiv 2412.19437, section 3.3) or
    one weight_scale per tensor."""
    MARKS = ("weight_scale_inv", "weight_scale")

    def __init__(self, settings, name):
        super().__init__(settings, name)
        self.only("fmt", (None, "e4m3"))

    def read(self, ckpt, layer, N, K):
        inverse = f"{layer}.weight_scale_inv" in ckpt.shapes  # a name; it multiplies all the same
        return read_fp8(ckpt, layer, N, K, "weight_scale_inv" if inverse else "weight_scale",
                        self.settings.get("weight_block_size"))

def read_fp8(ckpt, layer, N, K, scale_name, block):
    """An e4m3 weight. block: rows and columns that share a scale, the last ones cut at the edge;
    without it there is one scale per row, or a single one."""
    codes = ckpt.take(f"{layer}.weight", (N, K))
    require(codes.dtype == torch.float8_e4m3fn,
            f"{ckpt.name}: {layer}.weight is {codes.dtype}, not float8_e4m3fn")
    name = f"{layer}.{scale_name}"
    if block:
        good = isinstance(block, list) and len(block) == 2 and all(
            isinstance(size, int) and size > 0 for size in block)
        require(good, f"{ckpt.name}: the block {block} must be two sizes")
        grid = ckpt.take(name, (-(-N // block[0]), -(-K // block[1])))
        scales, group = grid.float().repeat_interleave(block[0], 0)[:N], block[1]
    else:
        shape = ckpt.shapes.get(name)
        single = shape in ((), (1,), (1, 1))
        scales, group = ckpt.take(name, shape if single else (N, 1)).float(), K
        scales = scales.reshape(-1, 1).expand(N, 1)
    if f"{layer}.input_scale" in ckpt.shapes:  # a range for inputs, which stay as they are
        ckpt.take(f"{layer}.input_scale", ckpt.shapes[f"{layer}.input_scale"])
    return QuantizedWeight(codes, scales.contiguous(), group)

SCHEMES = {"gptq": Gptq, "awq": Awq, "compressed-tensors": CompressedTensors, "fp8": Fp8}

def read_scheme(config, name):
    """The Scheme of a folder's config, None if its weights are dense. ValueError names what is not
    supported."""
    settings = config.get("quantization_config")
    if settings is None:
        return None
    require(isinstance(settings, dict), f"{name}: quantization_config must be an object")
    if settings.get("kv_cache_scheme") and not settings.get("config_groups"):
        return None  # only the KV cache is quantized
    method = settings.get("quant_method")
    require(method in SCHEMES,
            f"{name}: quant_method {method!r} is not supported, only {[*SCHEMES]}")
    return SCHEMES[method](settings, name)
