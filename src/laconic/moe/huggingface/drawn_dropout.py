"""Dropout inside experts whose rows come from other processes: drawn at home, where one process would draw it.

Which elements are kept travels with the rows, one bit each, behind their columns. So random numbers, and all that is
drawn after them, are those of one process, whatever the number of processes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from laconic.errors import ModelError

Drops = list[tuple[float, int]]
"""For each call of dropout in an expert that drops something: how probably, and elements of a row."""
_OTHERS = (F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d)


class Dropping(TorchFunctionMode):
    """Calls a function in the place of dropout that drops something."""

    def __init__(self, drop: Callable[[Tensor, float], Tensor]) -> None:
        super().__init__()
        self._drop = drop

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout or func in _OTHERS:
            given = inspect.signature(func).bind(*args, **kwargs)
            given.apply_defaults()
            x, p, training, in_place = given.args
            if training and p > 0:
                if func is not F.dropout or in_place:
                    raise ModelError(
                        f"experts use {func.__name__}{' in place' * in_place}, which cannot be drawn for rows of other"
                        " processes; set its p to 0, or call parallelize without a mesh"
                    )
                return self._drop(x, p)
        return func(*args, **kwargs)


def drops_in(expert: nn.Module, like: Tensor) -> Drops:
    """Find what drops elements in an expert, which is on the meta device, for rows like those of `like` [., M].

    One that cannot run there, or has another kind of dropout, is a ModelError.
    """
    found: Drops = []

    def drop(x: Tensor, p: float) -> Tensor:
        found.append((p, x[0].numel()))
        return x

    try:
        with torch.no_grad(), Dropping(drop):
            # Of one dtype: which one autocast would choose does not matter here.
            weights = {name: p.to(like.dtype) for name, p in expert.named_parameters()}
            functional_call(expert, weights, (torch.empty(1, like.shape[1], dtype=like.dtype, device="meta"),))
    except ModelError:
        raise
    except Exception as error:  # foreign code may raise anything
        raise ModelError(
            f"an expert cannot be tried on the meta device ({type(error).__name__}: {error}), to see what its dropout"
            " draws; call parallelize without a mesh"
        ) from error
    return found


def drawn(drops: Drops, rows: Tensor) -> Tensor:
    """Draw what dropout keeps of rows [q, M], in the order and shapes of its calls: bool [q, elements]."""
    kept = [F.dropout(rows.new_ones(len(rows), size), p) != 0 for p, size in drops]
    return torch.cat(kept, 1)


def num_columns(drops: Drops, dtype: torch.dtype) -> int:
    """Return the columns of a dtype that hold what is kept of a row."""
    return -(-sum(size for _, size in drops) // (8 * dtype.itemsize))


def packed(kept: Tensor, num: int, dtype: torch.dtype) -> Tensor:
    """Return `num` columns of a dtype whose bits are `kept`, bool [q, elements]."""
    bits = F.pad(kept.to(torch.uint8), (0, 8 * num * dtype.itemsize - kept.shape[1]))
    places = torch.arange(8, dtype=torch.uint8, device=kept.device)
    return (bits.view(len(kept), num * dtype.itemsize, 8) << places).sum(2, dtype=torch.uint8).view(dtype)


def unpacked(columns: Tensor) -> Tensor:
    """Return what `packed` has packed, bool [q, ...]; the last ones may be none."""
    places = torch.arange(8, dtype=torch.uint8, device=columns.device)
    return (columns.contiguous().view(torch.uint8)[:, :, None] >> places & 1).flatten(1).bool()


class GivenDropout(Dropping):
    """Drops what the rows that an expert runs on bring along: `kept`, bool [q, elements]."""

    def __init__(self, kept: Tensor) -> None:
        super().__init__(self._next)
        self._kept = kept

    def _next(self, x: Tensor, p: float) -> Tensor:
        size = x[0].numel() if len(x) else x.shape[1:].numel()
        here, self._kept = self._kept[:, :size], self._kept[:, size:]
        return x * here.view(x.shape).to(x.dtype).div_(1 - p if p < 1 else 1)
