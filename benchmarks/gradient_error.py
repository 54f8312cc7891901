"""Error of each kind of gradient when what its computation needs is kept in a format, on a trained model.

Everything else is exact, so an error is that of the kind itself: normalized L2, ||g - g_exact|| / ||g_exact||, mean
over the layers. The measure and the kinds are those of AGoQ's Table 13, taken there after 10 billion tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import mean

from torch import Tensor, nn

import laconic
from benchmarks.kit.captured import batch_of_text, trained
from benchmarks.registry import Options, Table, benchmark
from laconic.activations import Site
from laconic.formats import BlockFormat
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
    return [Table("Normalized L2 error of gradients", ("kept as", *_PAPER), rows, note)]


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
