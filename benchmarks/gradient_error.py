"""Error of each kind of gradient when what its computation needs is kept in a format, on a trained model.

Everything else is exact, so an error is that of the kind itself: normalized L2, ||g - g_exact|| / ||g_exact||, mean
over the layers. The measure and the kinds are those of AGoQ's Table 13, taken there after 10 billion tokens.

A second table looks for attention in fewer bits: query, key and value of the same model in codes that laconic has, in
others (rotated, fitted), in different ones for each of the three, and with the least error that any code of so many
bits can have (the rate-distortion bound of a normal distribution).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import laconic
from benchmarks.kit.captured import batch_of_text, trained
from benchmarks.registry import Options, Table, benchmark
from laconic.activations import Site
from laconic.formats import BlockFormat
from laconic.ops import BITS
from laconic.train.config.schema import ModelConfig

_FORMATS = {
    "nf4, block 64": BlockFormat("nf4"),
    "e2m1, block 16": BlockFormat("e2m1", block_size=16),
    "int4, block 64": BlockFormat("int4"),
    "int5, block 64": BlockFormat("int5"),
    "int6, block 64": BlockFormat("int6"),
    "int8, block 64": BlockFormat("int8"),
}
_PAPER = {"norm": 0.003, "GEMM": 0.026, "SwiGLU": 0.051, "attention Q": 0.14, "attention K": 0.15, "attention V": 0.059}

Gradients = dict[str, Tensor]


@benchmark("gradient-error")
def gradient_error(options: Options) -> list[Table]:
    """The demo's Llama after 300 steps on bytes of the Python standard library."""
    steps = 2 if options.small else 300
    model, _ = trained(ModelConfig(), steps, lambda step: min(1.0, (step + 1) / 20, (steps - step) / steps + 0.1))
    batch = batch_of_text(10_000)
    exact = _gradients(model, batch)
    rows = []
    for name, format in _FORMATS.items():
        errors: dict[str, list[float]] = {kind: [] for kind in _PAPER}
        for layer in range(model.config.num_hidden_layers):
            for kinds, sites in _groups(layer):
                laconic.compress_activations(model, policy=_only(sites, format), sequence_length=8)
                got = _gradients(model, batch)
                laconic.decompress_activations(model)
                for kind, keys in kinds.items():
                    for key in keys:
                        errors[kind].append(float((got[key] - exact[key]).norm() / exact[key].norm()))
        rows.append((name, *(f"{mean(values):.4f}" for values in errors.values())))
    rows.append(("AGoQ, Table 13", *(f"{value:.3f}" for value in _PAPER.values())))
    note = (
        "norm: gradient of its input. GEMM: weight gradients of q, k, v, gate, up (input rebuilt through the norm) and "
        "down (input rebuilt from gate and up). SwiGLU: gradients of gate and up. Attention: gradients of q, k, v when "
        "the three are kept in the format and attention runs again in backward; AGoQ's figures are for 4 bits."
    )
    return [
        Table("Normalized L2 error of gradients", ("kept as", *_PAPER), rows, note),
        _attention_table(_attention_calls(model, batch)),
    ]


def _groups(layer: int) -> Iterator[tuple[Mapping[str, list[str]], list[str]]]:
    """Sites of a layer that are kept in the format together, with the gradients that show the error by kind."""
    path = f"model.layers.{layer}"
    queries = [f"{path}.self_attn.{part}_proj" for part in "qkv"]
    gated = [f"{path}.mlp.gate_proj", f"{path}.mlp.up_proj"]
    for norm, linears in (("input_layernorm", queries), ("post_attention_layernorm", gated)):
        name = f"{path}.{norm}"
        kinds = {"norm": [f"input of {name}"], "GEMM": [f"{linear}.weight" for linear in linears]}
        yield kinds, [name, *linears]
    down = f"{path}.mlp.down_proj"
    yield {"SwiGLU": [f"output of {name}" for name in gated], "GEMM": [f"{down}.weight"]}, [f"{path}.mlp", down]
    outputs = {f"attention {part.upper()}": [f"output of {path}.self_attn.{part}_proj"] for part in "qkv"}
    yield outputs, [f"{path}.self_attn"]


def _only(names: list[str], format: BlockFormat) -> Callable[[Site], BlockFormat | None]:
    return lambda site: format if site.name in names else None


def _gradients(model: nn.Module, batch: Tensor) -> Gradients:
    """Gradients of all parameters, of norms' inputs and of projections' outputs."""
    found: Gradients = {}
    handles = []

    def input_of(name: str) -> Callable[..., object]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            own = args[0].view_as(args[0])  # apart from the residual stream, which reads the same tensor
            own.register_hook(lambda gradient: found.__setitem__(f"input of {name}", gradient.clone()))
            return (own, *args[1:])

        return hook

    def output_of(name: str) -> Callable[..., object]:
        def hook(module: nn.Module, args: object, output: Tensor) -> None:
            output.register_hook(lambda gradient: found.__setitem__(f"output of {name}", gradient.clone()))

        return hook

    for name, module in model.named_modules():
        if name.endswith("layernorm"):
            handles.append(module.register_forward_pre_hook(input_of(name)))
        elif name.endswith("_proj"):
            handles.append(module.register_forward_hook(output_of(name)))
    model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
    for handle in handles:
        handle.remove()
    found |= {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


# --- attention in fewer bits ---

Rounding = Callable[[Tensor], Tensor]
"""What backward gets in the place of a query, key or value [batch, heads, tokens, head width]."""


def _as(code: str, block_size: int) -> Rounding:
    format = BlockFormat(code, block_size=block_size)
    return lambda x: format.quantize(x.contiguous()).dequantize().view_as(x)


def _rotated(rounding: Rounding) -> Rounding:
    """Within heads by a Hadamard matrix, which leaves products of query and key as they are and spreads outliers."""

    def rotate(x: Tensor) -> Tensor:
        matrix = torch.ones(1, 1)
        while len(matrix) < x.shape[-1]:
            matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
        matrix = matrix / math.sqrt(x.shape[-1])
        return rounding(x @ matrix) @ matrix

    return rotate


def _without_mean(rounding: Rounding) -> Rounding:
    """Around the mean over tokens, which softmax does not see in keys."""

    def center(x: Tensor) -> Tensor:
        middle = x.mean(2, keepdim=True)
        return rounding(x - middle) + middle

    return center


def _fitted(bits: int, block_size: int) -> Rounding:
    """Levels that fit the tensor's own values over the largest of their block, found anew by Lloyd's algorithm."""

    def fit(x: Tensor) -> Tensor:
        blocks = x.reshape(-1, block_size)
        scales = blocks.abs().amax(1, keepdim=True).clamp_min(1e-12)
        values = (blocks / scales).flatten()
        ordered = values.sort().values
        levels = ordered[((torch.arange(2**bits) + 0.5) / 2**bits * len(ordered)).long()]
        for _ in range(60):
            nearest = torch.bucketize(values, (levels[1:] + levels[:-1]) / 2)
            count = torch.bincount(nearest, minlength=2**bits).clamp_min(1)
            levels = (torch.zeros(2**bits).scatter_add_(0, nearest, values) / count).sort().values
        nearest = torch.bucketize(values, (levels[1:] + levels[:-1]) / 2)
        return (levels[nearest].view_as(blocks) * scales).view_as(x)

    return fit


def _bound(bits: int) -> Rounding:
    """Values as far off as those of the best code: D = 2^-2R of the variance, by the optimal test channel."""

    def add_noise(x: Tensor) -> Tensor:
        distortion = 2.0 ** (-2 * bits)
        variance = x.square().mean(-1, keepdim=True)
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
        return (1 - distortion) * x + (variance * distortion * (1 - distortion)).sqrt() * noise

    return add_noise


def _searched() -> Iterator[tuple[str, float, tuple[Rounding, Rounding, Rounding]]]:
    """Names, bits per value of query and key as of value, and roundings of the three."""
    scale = 16 / 32  # of bf16, of blocks as long as a head is wide
    codes = {code: _as(code, 32) for code in ("int8", "int6", "int5", "nf4", "int4")}
    for code, rounding in codes.items():
        yield code, BITS[code] + scale, (rounding,) * 3
        if code != "int8":
            yield f"{code}, rotated", BITS[code] + scale, (_rotated(rounding),) * 3
    for name, rounding in {"fitted levels": _fitted(4, 32), "rotated, fitted levels": _rotated(_fitted(4, 32))}.items():
        yield f"4 bits, {name}", 4 + scale, (rounding,) * 3
    turned = _rotated(codes["nf4"])
    yield "nf4, rotated, key without its mean", 4 + scale, (turned, _rotated(_without_mean(codes["nf4"])), turned)
    for wide in ("int8", "int6"):
        bits = (2 * BITS[wide] + 4) / 3 + scale
        yield f"query and key {wide}, value nf4", bits, (codes[wide], codes[wide], codes["nf4"])
    for bits in (4, 5, 6):
        yield f"bound of any code of {bits} bits", bits, (_bound(bits),) * 3


def _attention_table(calls: list[tuple[Tensor, Tensor, Tensor, Tensor]]) -> Table:
    exact = [_attention_gradients(*call) for call in calls]
    rows = []
    for name, bits, roundings in _searched():
        errors: list[list[float]] = []
        for (*inputs, cotangent), wanted in zip(calls, exact, strict=True):
            rounded = [rounding(x) for rounding, x in zip(roundings, inputs, strict=True)]
            got = _attention_gradients(*rounded, cotangent)
            errors.append([float((a - b).norm() / b.norm()) for a, b in zip(got, wanted, strict=True)])
        rows.append(
            (name, f"{bits:.2f}", f"{3 * bits / 16:.2f}", *(f"{mean(each):.4f}" for each in zip(*errors, strict=True)))
        )
    width = calls[0][0].shape[-1]
    return Table(
        "Attention in fewer bits: normalized L2 error of gradients",
        ("query, key and value kept as", "bits a value", "U", "attention Q", "attention K", "attention V"),
        rows,
        f"Heads of {width} and blocks as wide, mean over the layers. U counts query, key and value with as many key "
        "heads as query heads. A bound is of normally distributed values without any cost for scales.",
    )


def _attention_calls(model: Any, batch: Tensor) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Query, key, value and the gradient of the output of each layer's attention."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    inputs: list[tuple[Tensor, Tensor, Tensor]] = []
    cotangents: dict[int, Tensor] = {}
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def noting(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        output, weights = own(module, query, key, value, mask, **kwargs)
        layer = len(inputs)
        inputs.append((query.detach(), key.detach(), value.detach()))
        output.register_hook(lambda gradient: cotangents.__setitem__(layer, gradient.transpose(1, 2)))
        return output, weights

    ALL_ATTENTION_FUNCTIONS.register("noting", noting)
    model.set_attn_implementation("noting")
    model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
    model.zero_grad(set_to_none=True)
    return [(*values, cotangents[layer]) for layer, values in enumerate(inputs)]


def _attention_gradients(query: Tensor, key: Tensor, value: Tensor, cotangent: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    return torch.autograd.grad(F.scaled_dot_product_attention(*leaves, is_causal=True), leaves, cotangent)
