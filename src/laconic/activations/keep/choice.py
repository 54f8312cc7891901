"""Choices for a site, and their form in JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from laconic.activations.host.traceable import argument_class
from laconic.errors import FormatError
from laconic.formats import BlockFormat

RECOMPUTED = ("mlp", "attention", "mixer")
"""Kinds of sites that can be recomputed on their own."""


@dataclass(frozen=True)
class Offload:
    """Packed as `format` says, and moved to host memory until backward (see `laconic.activations.keep.offload`)."""

    format: BlockFormat


argument_class(BlockFormat)
argument_class(Offload)


@dataclass(frozen=True)
class Recompute:
    """Nothing is saved: backward computes the tensors again from the rebuilt input of the site.

    Of a feed-forward block gate and up are projected a second time. An attention module or another mixer of tokens
    runs again as a whole, projections included, from its input in 8 bits. A norm or linear saves nothing but its input
    anyway; to recompute a whole decoder layer, see `ActivationPlan.layers`.
    """


Packing = BlockFormat | Offload
"""How a tensor is packed."""


def block_format_of(packing: Packing) -> BlockFormat:
    """The format of what is packed, wherever it is held."""
    return packing.format if isinstance(packing, Offload) else packing


Choice = Packing | Recompute | None
"""What a policy may answer about a site; None keeps it exact, as it was before."""


def entry_of(choice: Choice) -> dict[str, Any] | None:
    """A choice as plain data for JSON.

    Either {"code", "block_size", "scale_dtype"}, with "offload": true if so, or {"recompute": true}, or None.
    """
    if choice is None:
        return None
    if isinstance(choice, Recompute):
        return {"recompute": True}
    format = choice.format if isinstance(choice, Offload) else choice
    entry = {
        "code": format.code,
        "block_size": format.block_size,
        "scale_dtype": str(format.scale_dtype).removeprefix("torch."),
    }
    return {**entry, "offload": True} if isinstance(choice, Offload) else entry


def choice_of(entry: dict[str, Any] | None) -> Choice:
    """The choice that `entry_of` wrote.

    Raises:
        FormatError: a value is not allowed, or a key is not known.
        KeyError, TypeError, AttributeError: the entry has another structure.
    """
    if entry is None:
        return None
    unknown = set(entry) - {"code", "block_size", "scale_dtype", "offload", "recompute"}
    if unknown:
        raise FormatError(f"not an activation plan: a site has the key {min(unknown)!r}, which is not known")
    if entry.get("recompute", False):
        if len(entry) > 1:
            raise FormatError("not an activation plan: a site with recompute keeps nothing, so it has no other keys")
        return Recompute()
    format = BlockFormat(entry["code"], entry["block_size"], getattr(torch, entry["scale_dtype"]))
    return Offload(format) if entry.get("offload", False) else format
