"""Updates that are made in backward, as soon as a gradient is whole, so that gradients need memory one at a time.

What stands in `parameter.grad` afterwards has the parameter's shape and no values: whoever clips, scales, sums up or
reduces gradients after backward gets an error instead of a norm of nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from laconic.errors import TrainingError

_aten = torch.ops.aten


class UsedGradient(Tensor):
    """In place of a gradient whose update is made. It can be let go of; any other use raises."""

    by: weakref.ref[Any] | None = None
    """The optimizer that made the update; None in copies."""

    @staticmethod
    def __new__(
        cls, like: Tensor, *, by: Any = None, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> UsedGradient:
        """Of the shape and strides of `like`, and of its dtype and device where none is given; `by` made the update."""
        made: UsedGradient = torch.Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), dtype=dtype or like.dtype, device=device or like.device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        made.by = None if by is None else weakref.ref(by)
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"UsedGradient(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> UsedGradient:
        return UsedGradient(self)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in (_aten.detach.default, _aten._to_copy.default):  # Module.to moves gradients, too
            wanted = {name: value for name in ("dtype", "device") if (value := (kwargs or {}).get(name)) is not None}
            return cls(args[0], **wanted)
        shape = next(tuple(x.shape) for x in tree_iter((args, kwargs)) if isinstance(x, UsedGradient))
        raise TrainingError(
            f"{function.name()} reads or adds to a gradient of shape {shape} that backward has used for its update "
            "already (update_in_backward): nothing can be clipped, scaled, added up or reduced after backward; call "
            "zero_grad(), with set_to_none, between two backwards, or leave update_in_backward out"
        )


def call_with_gradients(parameter: Tensor, update: Callable[[Any, Tensor], None], owner: Any) -> None:
    """Call `update` with the owner and the parameter as soon as a backward has all of the parameter's gradient.

    The parameter does not keep the owner alive.
    """
    found = weakref.ref(owner)

    def arrived(parameter: Tensor) -> None:
        alive = found()
        if alive is not None:
            update(alive, parameter)

    parameter.register_post_accumulate_grad_hook(arrived)
