"""Bytes kept and step time of one Llama block and of demo-size training, compressed beside unmodified and recomputed.

U is batch x sequence x hidden x 2 bytes, the unit of AGoQ's Table 1.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import laconic
from benchmarks.registry import Options, Table, benchmark, seconds_of
from laconic.activations import Choice, Recompute, SavedTensorTracker, Site
from laconic.activations import checkpoint as packed_checkpoint
from laconic.formats import BlockFormat
from laconic.train.config.schema import ModelConfig
from laconic.train.model import build_model

_HEAD_DIM = 64
_CHECKPOINTING = "activation checkpointing"


@benchmark("activations")
def activations(options: Options) -> list[Table]:
    """One block in bf16, and forward, backward and AdamW of the demo's model in fp32."""
    side = 1024 if options.elements >= 1 << 20 else 128
    return [_block(side, side, options), _training(side // 128, options)]


def _block(hidden: int, length: int, options: Options) -> Table:
    """A Llama block with multi-head attention and a 4x feed-forward layer."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    torch.manual_seed(0)
    heads = hidden // _HEAD_DIM
    config = LlamaConfig(hidden_size=hidden, intermediate_size=4 * hidden, num_attention_heads=heads)
    config._attn_implementation = "sdpa"
    plain = LlamaDecoderLayer(config, 0).to(torch.bfloat16)
    x = torch.randn(1, length, hidden).to(torch.bfloat16)
    positions = LlamaRotaryEmbedding(config)(x, torch.arange(length)[None])

    def compressed(**how: object) -> nn.Module:
        twin = copy.deepcopy(plain)
        laconic.compress_activations(twin, example_inputs={"hidden_states": x, "position_embeddings": positions}, **how)
        return twin

    def forward(layer: nn.Module, source: Tensor) -> Tensor:
        out = layer(source, position_embeddings=positions)
        return out[0] if isinstance(out, tuple) else out

    def recomputed(layer: nn.Module, source: Tensor) -> Tensor:
        return checkpoint(lambda t: forward(layer, t), source, use_reentrant=False)

    def recomputed_from_packed(layer: nn.Module, source: Tensor) -> Tensor:
        return packed_checkpoint(lambda t: forward(layer, t), source)

    def no_feed_forward(site: Site) -> Choice:
        packed = BlockFormat("int8" if site.kind == "attention" else "nf4")
        return Recompute() if site.kind == "mlp" else packed

    variants: dict[str, tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor]]] = {
        "unmodified": (plain, forward),
        "laconic, nf4": (compressed(bits=4, attention="exact"), forward),
        "laconic, int8": (compressed(bits=8, attention="exact"), forward),
        "laconic, nf4, attention int8": (compressed(bits=4, attention="int8"), forward),
        "laconic, nf4, attention nf4": (compressed(bits=4, attention="nf4"), forward),
        "laconic, nf4, attention int8, feed-forward again": (compressed(policy=no_feed_forward), forward),
        "laconic, nf4 by hooks": (compressed(bits=4, mode="hooks"), forward),
        _CHECKPOINTING: (plain, recomputed),
        "activation checkpointing, input int8": (plain, recomputed_from_packed),
    }

    def step(name: str) -> None:
        layer, run = variants[name]
        run(layer, x.clone().requires_grad_()).backward(x)
        layer.zero_grad(set_to_none=True)

    def kept_nbytes(name: str) -> int:
        layer, run = variants[name]
        if name == _CHECKPOINTING:
            return x.nbytes  # the region's input; its own hooks hide it from the tracker
        with SavedTensorTracker(layer) as tracker:
            run(layer, x.clone().requires_grad_())
        return tracker.nbytes

    seconds = seconds_of({name: lambda name=name: step(name) for name in variants}, options.rounds)
    kept = {name: kept_nbytes(name) for name in variants}
    unit = x.nbytes
    packed = 2 * BlockFormat("nf4").nbytes((length, hidden)) + 2 * BlockFormat("nf4").nbytes((length, 4 * hidden))
    formula = packed + 4 * unit + 4 * length * heads + 2 * positions[0].nbytes
    first = "unmodified"
    return Table(
        f"One Llama block, bf16: hidden {hidden}, {heads} heads, feed-forward {4 * hidden}, {length} tokens, "
        f"{options.threads} thread{'s' * (options.threads > 1)}",
        ("", "kept for backward", "of unmodified", "step", "of unmodified"),
        [
            (
                name,
                f"{kept[name] / unit:.2f} U",
                f"{kept[name] / kept[first]:.3f}",
                f"{seconds[name] * 1e3:.0f} ms",
                f"{seconds[name] / seconds[first]:.3f}",
            )
            for name in variants
        ],
        f"The formula for nf4 (q, k, v and output exact, log-sum-exp, rotary tables, two norms and gate and up at 4.25 "
        f"bits) gives {formula / unit:.2f} U. With q, k and v packed and the output rebuilt, 4 U and the log-sum-exp "
        f"become 1.55 U at int8 (three times 8.25 bits) or 0.80 U at nf4. The paper's account: 28 U unmodified, 7.75 U "
        f"for AGoQ, 0.277 of it.",
    )


def _training(batch: int, options: Options) -> Table:
    """Steps of the demo's model on random bytes."""
    length = 256
    plain = build_model(ModelConfig(), 257, length, 0)
    models: dict[str, nn.Module] = {"unmodified": plain}
    settings = {
        "laconic, nf4, attention exact": (4, "exact"),
        "laconic, nf4, attention int8": (4, "int8"),
        "laconic, int8, attention int8": (8, "int8"),
    }
    for name, (bits, attention) in settings.items():
        models[name] = copy.deepcopy(plain)
        laconic.compress_activations(models[name], bits, attention=attention)
    optimizers = {name: torch.optim.AdamW(model.parameters(), fused=True) for name, model in models.items()}
    ids = torch.randint(0, 257, (batch, length), generator=torch.Generator().manual_seed(0))

    def loss(name: str) -> Tensor:
        value: Tensor = models[name](input_ids=ids, labels=ids, use_cache=False).loss
        return value

    def step(name: str) -> None:
        loss(name).backward()
        optimizers[name].step()
        optimizers[name].zero_grad()

    def kept_nbytes(name: str) -> int:
        with SavedTensorTracker(models[name]) as tracker:
            loss(name)
        return tracker.nbytes

    seconds = seconds_of({name: lambda name=name: step(name) for name in models}, 2 * options.rounds)
    return Table(
        f"Demo-size training, fp32: {batch} x {length} bytes per step, "
        f"{options.threads} thread{'s' * (options.threads > 1)}",
        ("", "tokens/s", "of unmodified", "kept for backward"),
        [
            (
                name,
                f"{ids.numel() / seconds[name]:,.0f}",
                f"{seconds['unmodified'] / seconds[name]:.3f}",
                f"{kept_nbytes(name) / ids.numel():,.0f} bytes per token",
            )
            for name in models
        ],
    )
