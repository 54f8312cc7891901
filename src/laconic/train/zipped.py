"""What `--zip` means in a run: who sends over which codec, and what is said about it."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from laconic.collectives.choose import choose, prepare
from laconic.collectives.codec import Codec, Lossless
from laconic.collectives.zipped import zip_collectives
from laconic.cost.wire.seconds import NOT_PREPARED, RAW
from laconic.errors import ModelError
from laconic.train.config import TrainConfig
from laconic.train.layout import Layout
from laconic.train.world import World

__all__ = ["stage_codec", "zip_codec", "zip_model"]


def zip_codec(config: TrainConfig) -> Codec | str | None:
    """The codec of all collectives of a run; None: they are torch's own."""
    if config.zip == "off":
        return None
    return "auto" if config.zip == "auto" else Lossless()


def zip_model(modules: Sequence[nn.Module], config: TrainConfig, world: World, layout: Layout) -> list[str]:
    """Send what the wrapped `modules` send over the run's codec; lines that say what was attached and what was not.

    Whatever cannot go over a codec stays as it is, and the lines say why.
    """
    codec = zip_codec(config)
    if codec is None or layout.stage_group is None:
        return []
    lines = []
    for module in modules:
        try:
            prefetch = world.device.type == "cpu" and isinstance(module, FSDPModule)
            lines += str(zip_collectives(module, codec=codec, prefetch=prefetch)).splitlines()
        except ModelError as error:
            lines.append(f"nothing is shortened losslessly: {error}")
    return list(dict.fromkeys(lines))


def stage_codec(config: TrainConfig, hidden: Tensor, group: dist.ProcessGroup | None) -> tuple[Lossless | None, str]:
    """The codec between the stages of a run's pipeline, and a line that says why.

    `hidden` stands for what they send each other, on any device; `group` are the stages of one replica. The decision
    falls once: both ends of a message have to know it.
    """
    if config.zip == "off":
        return None, "between stages: left as it is"
    assert group is not None, "a pipeline has at least two stages"
    backend = dist.get_backend(group)
    if backend != "gloo":
        return None, f"between stages: left to {backend}; only gloo delivers messages whose length is not known before"
    if config.zip == "on":
        return Lossless(), "between stages: shortened losslessly"
    choice = choose("send", hidden.numel(), hidden.dtype, group)
    if choice.reason == NOT_PREPARED:  # large enough to ask what link and codec can do
        prepare(group)
        choice = choose("send", hidden.numel(), hidden.dtype, group)
    if choice.codec == RAW:
        return None, f"between stages: left as it is, {choice.reason}"
    return Lossless(choice.codec), f"between stages: shortened losslessly ({choice.codec}), {choice.reason}"
