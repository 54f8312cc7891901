"""Bytes kept and step time of one decoder layer under torch.compile, dense and with a mixture of experts.

U is batch x sequence x hidden x 2 bytes, the unit of AGoQ's Table 1 (arXiv 2605.00539).
"""

from __future__ import annotations

import copy
import warnings

import torch
from torch import Tensor, nn

import laconic
from benchmarks.registry import Options, Table, benchmark, seconds_of
from laconic.activations import SavedTensorTracker

_HEAD_DIM = 64
_COMPILED = ", compiled"


@benchmark("compiled")
def compiled(options: Options) -> list[Table]:
    """One decoder layer in bf16, in eager mode and by inductor."""
    side = 1024 if options.elements >= 1 << 20 else 128
    return [_layer(kind, side, options) for kind in ("llama", "mixtral")]


def _layer(kind: str, side: int, options: Options) -> Table:
    plain, positions = _model(kind, side)
    x = torch.randn(1, side, side).to(torch.bfloat16)

    def compressed(**how: object) -> nn.Module:
        twin = copy.deepcopy(plain)
        laconic.compress_activations(twin, example_inputs={"hidden_states": x, "position_embeddings": positions}, **how)
        return twin

    layers = {
        "unmodified": plain,
        "laconic, nf4": compressed(bits=4, attention="exact"),
        "laconic, nf4, attention int8": compressed(bits=4, attention="int8"),
    }
    for name in tuple(layers):
        layers[name + _COMPILED] = copy.deepcopy(layers[name])
        layers[name + _COMPILED].compile()

    def forward(name: str) -> Tensor:
        out = layers[name](x.clone().requires_grad_(), position_embeddings=positions)
        return out[0] if isinstance(out, tuple) else out

    def step(name: str) -> None:
        forward(name).backward(x)
        layers[name].zero_grad(set_to_none=True)

    def kept_nbytes(name: str) -> int:
        with SavedTensorTracker(layers[name]) as tracker:
            forward(name)
        return tracker.nbytes

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about what inductor imports
        for name in layers:
            step(name)
        kept = {name: kept_nbytes(name) for name in layers}
        seconds = seconds_of({name: lambda name=name: step(name) for name in layers}, options.rounds)
    first, first_compiled = "unmodified", "unmodified" + _COMPILED
    return Table(
        f"One {kind} layer under torch.compile (inductor), bf16: hidden {side}, {side} tokens, "
        f"{options.threads} thread{'s' * (options.threads > 1)}",
        ("", "kept for backward", "of unmodified", "step", "of unmodified", "of unmodified, compiled"),
        [
            (
                name,
                f"{kept[name] / x.nbytes:.2f} U",
                f"{kept[name] / kept[first]:.3f}",
                f"{seconds[name] * 1e3:.0f} ms",
                f"{seconds[name] / seconds[first]:.3f}",
                f"{seconds[name] / seconds[first_compiled]:.3f}",
            )
            for name in layers
        ],
    )


def _model(kind: str, hidden: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A decoder layer and the rotary tables for as many tokens as it has features."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "hidden_size": hidden,
        "num_attention_heads": hidden // _HEAD_DIM,
        "num_key_value_heads": hidden // _HEAD_DIM,
    }
    inside = {"intermediate_size": 4 * hidden} if kind == "llama" else {"intermediate_size": 2 * hidden}
    config = AutoConfig.for_model(kind, vocab_size=8, num_hidden_layers=1, head_dim=_HEAD_DIM, **sizes, **inside)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    tables = model.model.rotary_emb(torch.zeros(1, 1, 1, dtype=torch.bfloat16), torch.arange(hidden)[None])
    return model.model.layers[0], tables
