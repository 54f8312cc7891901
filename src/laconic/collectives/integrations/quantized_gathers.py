"""One call that makes FSDP2 gather parameters in few bits (ZeRO++, arXiv 2306.10209, section 3.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from laconic.collectives.codec import Blockwise
from laconic.collectives.integrations.zip import ZippedCollectives, ZippedPart, gather_of, refuse_unwrapped
from laconic.errors import ConfigError, ModelError
from laconic.formats import BlockFormat

_FORMATS = {8: "int8", 6: "int6", 5: "int5", 4: "nf4"}
_BLOCK_SIZE = 128


def quantize_gathers(model: nn.Module, *, bits: int = 8) -> ZippedCollectives:
    """Make an FSDP2 model gather its parameters in few bits. Call it once, before the first forward.

    Every rank keeps and trains its exact shard; rounded are the copies that travel. So errors do not add up from step
    to step, and forward and backward of a step compute with the same values, of which all ranks have the same bits,
    their own shard's included. Parameters of one dimension (biases, weights of norms) are gathered exactly, beside the
    others, and what `reshard_after_forward=N` gathers in backward, as it is rounded already. Blocks of 128 values have
    a scale and lie inside one parameter.

    Evaluation computes with rounded parameters too; `remove()` makes the model exact again. Gradients are another call:
    `quantize_reduction(model)`, or `zip_collectives(model)` after this one.

    Args:
        model: a module with fully_shard applied to it or inside it.
        bits: of a value, 8, 6, 5 (whole numbers) or 4 (nf4), and 1/8 bit more for scales.

    Returns:
        The gathers attached and those left as they were, with `remove()`.

    Raises:
        ModelError: the model is not under FSDP2, or has no gather that could be quantized.
        ConfigError: bits is another number.
    """
    if bits not in _FORMATS:
        raise ConfigError(f"bits is {bits}, but parameters are gathered in 8, 6, 5 or 4 bits")
    units = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    if not units:
        if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
            raise ModelError(
                "model is in DDP, whose ranks hold all parameters and gather none; quantize_reduction(model) makes its"
                " gradients smaller"
            )
        refuse_unwrapped(model)
    codec = Blockwise(BlockFormat(_FORMATS[bits], _BLOCK_SIZE))
    # What a forward has kept was gathered in the other way; undone last, when gathers are as they were.
    undo: list[Callable[[], None]] = [unit.reshard for _, unit in units]
    parts = [part for name, unit in units for part in _attach(name, unit, codec, undo)]
    if all(part.left is not None for part in parts):
        reasons = "; ".join(dict.fromkeys(str(part.left) for part in parts))
        raise ModelError(f"model has no gather that could be quantized: {reasons or 'it has no parameters'}")
    for _, unit in units:
        unit.reshard()
    return ZippedCollectives("FSDP2", codec.name, tuple(parts), undo)


def _attach(name: str, unit: Any, codec: Blockwise, undo: list[Callable[[], None]]) -> Iterator[ZippedPart]:
    from laconic.collectives.integrations import fsdp2  # needs a torch whose FSDP2 is where we know it

    for group in fsdp2.param_groups(unit):
        dtype, numel, left = gather_of(group)
        if left is None and dtype not in ("float32", "bfloat16", "float16"):
            left = f"its parameters are gathered as {dtype}"
        if left is None and all(parameter.sharded_param.dim() < 2 for parameter in group.fsdp_params):
            left = "its parameters have one dimension"
        if left is None and any(
            hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather") for parameter in group.fsdp_params
        ):
            left = "a parameter has a way of its own to be gathered"
        if left is None:
            gather = fsdp2.QuantizedAllGather(group, codec)
            undo.append(partial(fsdp2.put_back, group, "_all_gather_comm", gather, group._all_gather_comm))
            group._all_gather_comm = gather
        yield ZippedPart(name, "all_gather", dtype, numel, left)
