"""The first rows of a batch."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor


def num_rows(batch: Any) -> int | None:
    """How many samples a batch has: the size that most of its tensors have first; None if it has no such tensor."""
    sizes = [x.shape[0] for x in _tensors(batch) if x.dim() > 0]
    return max(set(sizes), key=lambda size: (sizes.count(size), size)) if sizes else None


def first_rows(batch: Any, rows: int, tokens: int | None = None) -> Any:
    """The same batch with its first `rows` samples; of whole numbers [samples, tokens] only the first `tokens`.

    Positions are cut only where all tensors of the batch are such numbers of one shape: token ids, masks and labels.
    """
    size = num_rows(batch)
    shapes = {tuple(x.shape) for x in _tensors(batch)}
    are_ids = len(shapes) == 1 and len(next(iter(shapes))) == 2
    are_ids = are_ids and not any(x.is_floating_point() or x.is_complex() for x in _tensors(batch))

    def cut(x: Tensor) -> Tensor:
        if x.dim() == 0 or x.shape[0] != size:
            return x
        return x[:rows, :tokens] if are_ids and tokens is not None else x[:rows]

    return _mapped(batch, cut)


def _mapped(value: Any, cut: Any) -> Any:
    if isinstance(value, Tensor):
        return cut(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, cut) for item in value))
    if type(value) in (tuple, list):
        return type(value)(_mapped(item, cut) for item in value)
    if isinstance(value, Mapping):
        made = {key: _mapped(item, cut) for key, item in value.items()}
        if type(value) is dict:
            return made
        other = copy.copy(value)  # as of BatchEncoding, which is no dict but has its items
        for key, item in made.items():
            other[key] = item  # type: ignore[index]
        return other
    return value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return [tensor for item in items for tensor in _tensors(item)]
