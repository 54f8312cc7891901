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
from benchmarks.kit.models import HEAD_DIM, decoder_layers
from benchmarks.kit.timing import UNUSUAL_ROUNDS, seconds_of
from benchmarks.registry import Options, Table, benchmark
from laconic.activations import Choice, Recompute, SavedTensorTracker, Site
from laconic.activations import checkpoint as packed_checkpoint
from laconic.formats import BlockFormat
from laconic.train.config.schema import ModelConfig
from laconic.train.model import build_model

_CHECKPOINTING = "activation checkpointing"


@benchmark("activations")
def activations(options: Options) -> list[Table]:
    """One block in bf16, and forward, backward and AdamW of the demo's model in fp32."""
    side = 128 if options.small else 1024
    return [_block(side, side, options), _training(side // 128, options)]


def _block(hidden: int, length: int, options: Options) -> Table:
    """A Llama block with multi-head attention and a 4x feed-forward layer."""
    block = decoder_layers("llama", hidden, length, intermediate_size=4 * hidden)
    (plain,), heads, unit = block.layers, hidden // HEAD_DIM, block.x.nbytes

    def recomputed(layer: nn.Module, source: Tensor) -> Tensor:
        return checkpoint(lambda t: block.forward(layer, t), source, use_reentrant=False)

    def recomputed_from_packed(layer: nn.Module, source: Tensor) -> Tensor:
        return packed_checkpoint(lambda t: block.forward(layer, t), source)

    def no_feed_forward(site: Site) -> Choice:
        packed = BlockFormat("int8" if site.kind == "attention" else "nf4")
        return Recompute() if site.kind == "mlp" else packed

    variants: dict[str, tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor]]] = {
        "unmodified": (plain, block.forward),
        "laconic, nf4": (block.compressed(attention="exact"), block.forward),
        "laconic, int8": (block.compressed(8, attention="exact"), block.forward),
        "laconic, nf4, attention int8": (block.compressed(attention="int8"), block.forward),
        "laconic, nf4, attention nf4": (block.compressed(attention="nf4"), block.forward),
        "laconic, nf4, attention int8, feed-forward again": (block.compressed(policy=no_feed_forward), block.forward),
        "laconic, nf4 by hooks": (block.compressed(mode="hooks"), block.forward),
        _CHECKPOINTING: (plain, recomputed),
        "activation checkpointing, input int8": (plain, recomputed_from_packed),
    }

    def step(name: str) -> None:
        layer, run = variants[name]
        run(layer, block.source()).backward(block.x)
        layer.zero_grad(set_to_none=True)

    def kept_nbytes(name: str) -> int:
        layer, run = variants[name]
        if name == _CHECKPOINTING:
            return unit  # the region's input; its own hooks hide it from the tracker
        with SavedTensorTracker(layer) as tracker:
            run(layer, block.source())
        return tracker.nbytes

    steps = {name: lambda name=name: step(name) for name in variants}
    seconds = seconds_of(steps, options.rounds, warm_up_rounds=UNUSUAL_ROUNDS)
    kept = {name: kept_nbytes(name) for name in variants}
    packed = 2 * BlockFormat("nf4").nbytes((length, hidden)) + 2 * BlockFormat("nf4").nbytes((length, 4 * hidden))
    formula = packed + 4 * unit + 4 * length * heads + 2 * block.positions[0].nbytes
    first = "unmodified"
    return Table.of(
        f"One Llama block, bf16: hidden {hidden}, {heads} heads, feed-forward {4 * hidden}, {length} tokens, "
        f"{options.thread_text}",
        variants,
        [
            ("", str),
            ("kept for backward", lambda name: f"{kept[name] / unit:.2f} U"),
            ("of unmodified", lambda name: f"{kept[name] / kept[first]:.3f}"),
            ("step", lambda name: f"{seconds[name] * 1e3:.0f} ms"),
            ("of unmodified", lambda name: f"{seconds[name] / seconds[first]:.3f}"),
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
    for name, bits, attention in (
        ("laconic, nf4, attention exact", 4, "exact"),
        ("laconic, nf4, attention int8", 4, "int8"),
        ("laconic, int8, attention int8", 8, "int8"),
    ):
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

    steps = {name: lambda name=name: step(name) for name in models}
    seconds = seconds_of(steps, 2 * options.rounds, warm_up_rounds=UNUSUAL_ROUNDS)
    return Table.of(
        f"Demo-size training, fp32: {batch} x {length} bytes per step, {options.thread_text}",
        models,
        [
            ("", str),
            ("tokens/s", lambda name: f"{ids.numel() / seconds[name]:,.0f}"),
            ("of unmodified", lambda name: f"{seconds['unmodified'] / seconds[name]:.3f}"),
            ("kept for backward", lambda name: f"{kept_nbytes(name) / ids.numel():,.0f} bytes per token"),
        ],
    )
