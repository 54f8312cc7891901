"""One training call of any module: a batch becomes arguments, what the module returns becomes a loss."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from laconic.errors import ModelError

LossOf = Callable[[Any], Tensor]


class TrainingCall:
    """Forward and loss of a model on one batch, the same random numbers each time.

    Args:
        batch: a dict (or another mapping) of keyword arguments, a tuple or list of positional ones, or one tensor.
        loss_of: the loss of what the model returns; None looks for one, see `find_loss`.
        autocast: dtype of torch.autocast around forward and loss; None is without.
    """

    def __init__(self, model: nn.Module, batch: Any, loss_of: LossOf | None, autocast: torch.dtype | None) -> None:
        self._args: tuple[Any, ...]
        self._kwargs: dict[str, Any]
        if isinstance(batch, Mapping):
            self._args, self._kwargs = (), dict(batch)
        elif isinstance(batch, tuple | list):
            self._args, self._kwargs = tuple(batch), {}
        else:
            self._args, self._kwargs = (batch,), {}
        if not any(True for _ in _tensors((self._args, self._kwargs))):
            raise ModelError(
                f"batch is a {type(batch).__name__} without a tensor; pass a dict of the forward's keyword arguments, a"
                " tuple of its positional ones, or a tensor"
            )
        self._loss_of = loss_of
        self._autocast = autocast
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.loss_from = "the given function"

    def named(self, model: nn.Module) -> dict[str, Any] | None:
        """The batch as keyword arguments of the model's forward; None if some have no name."""
        if not self._args:
            return self._kwargs
        try:
            signature = inspect.signature(model.forward)
            bound = signature.bind(*self._args).arguments
        except (TypeError, ValueError):
            return None
        kinds = {signature.parameters[name].kind for name in bound}
        return dict(bound) if kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD} else None

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Copies of the arguments, which the model may write to."""
        args, kwargs = copied((self._args, self._kwargs))
        return args, kwargs

    def loss(self, model: nn.Module, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Tensor:
        """The loss of one forward."""
        args, kwargs = arguments
        torch.manual_seed(0)  # the same dropout each time
        cast = nullcontext() if self._autocast is None else torch.autocast(self.device.type, self._autocast)
        with torch.enable_grad(), cast:
            output = model(*args, **kwargs)
            if self._loss_of is None:
                loss, self.loss_from = find_loss(output)
            else:
                loss = self._loss_of(output)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ModelError(
                f"the loss of {type(model).__name__} is {found}, but it must be one number that depends on parameters;"
                " pass loss_of=, a function of what the model returns"
            )
        return loss


def find_loss(output: Any) -> tuple[Tensor, str]:
    """The loss in what a model returns, and where it was found.

    `output.loss` or `output["loss"]`, then a single number (alone, or first of a tuple), then a weighted sum of all
    floating-point tensors that depend on parameters. Its weights are random numbers, the same each time: the sum of
    squares behind a layer norm, say, hardly depends on parameters, and its gradient is rounding errors.
    """
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, Tensor) and _is_number(named):
        return named, "output.loss"
    first = output[0] if isinstance(output, tuple | list) and output else output
    if _is_number(first):
        return first, "the number that the model returns"
    tensors = [x for x in _tensors(output) if x.is_floating_point() and x.requires_grad]
    if not tensors:
        raise ModelError(
            f"the model returns a {type(output).__name__} without a loss or tensor that depends on parameters; pass"
            " loss_of=, a function of what the model returns"
        )
    total = torch.zeros((), device=tensors[0].device, dtype=torch.float32)
    for x in tensors:
        weights = torch.randn(
            x.shape, generator=torch.Generator().manual_seed(2611), dtype=torch.float32, device="cpu"
        ).to(x.device, x.dtype)
        total = total + (x * weights).float().mean()
    return total, "outputs times fixed random numbers, as no loss was found"


def _is_number(value: Any) -> bool:
    """Whether this is a tensor of one number that depends on parameters."""
    return isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point() and value.requires_grad


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "__dataclass_fields__"):
        yield from _tensors(vars(value))


def copied(value: Any) -> Any:
    """A copy of arguments, which a model may write to: tensors are leaves of their own."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value) is tuple or type(value) is list:
        return type(value)(copied(item) for item in value)
    if type(value) is dict:
        return {key: copied(item) for key, item in value.items()}
    return copy.deepcopy(value)
