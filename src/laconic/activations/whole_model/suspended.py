"""Runs a converted model as it was before its conversion, for the length of a block, and measures a call both ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic.activations.forwards.attention import attention_core_of
from laconic.activations.forwards.replacement import ModelReplacement, owner_of, replacements_of
from laconic.activations.host.modules import forward_of, store_forward
from laconic.activations.whole_model.report import (
    Measurement,
    TrainingCall,
    brief,
    measure,
    only_runs_exactly,
    unmeasurable,
)
from laconic.errors import ModelError


def unwrapped(module: nn.Module) -> nn.Module:
    """The model inside of DDP and torch.compile."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
            module = inner
        else:
            return module


def is_compressed(model: nn.Module) -> bool:
    """Whether something in the model is converted."""
    return any([*replacements_of(module)] or attention_core_of(module) is not None for module in model.modules())


@contextmanager
def suspended(model: nn.Module) -> Iterator[None]:
    """In the block the model computes and keeps what the unmodified one does; no other thread may call it meanwhile.

    Raises:
        ModelError: a host has put something around the forward of a site, inside of which it cannot be taken out.
    """
    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(_suspend(module))
        yield


def _suspend(module: nn.Module) -> Callable[[], None]:
    """Take the forwards of a module out; the result puts them back."""
    undo: list[Callable[[], None]] = []
    core = attention_core_of(module)
    if core is not None:
        name = next(name for name, value in vars(module).items() if value is core)
        undo.append(lambda: module.__dict__.__setitem__(name, core))
        del module.__dict__[name]
    stored = forward_of(module)
    below = stored
    while (owner := owner_of(below)) is not None:
        below = owner.replaced
    if below is not stored:
        undo.append(lambda: store_forward(module, stored))
        store_forward(module, below)
    for inner in replacements_of(module):  # around which a host has put a function of its own
        if not isinstance(inner, ModelReplacement):
            _all(undo)
            raise ModelError(
                f"the forward of a converted {type(module).__name__} is inside of a host's function, so it cannot be "
                f"taken out for a while"
            )
        undo.append(lambda inner=inner: setattr(inner, "enabled", True))  # type: ignore[misc]
        inner.enabled = False
    return lambda: _all(undo)


def _all(actions: list[Callable[[], None]]) -> None:
    for action in actions:
        action()


def measure_both(model: nn.Module, call: TrainingCall) -> tuple[Measurement | None, Measurement | None, str | None]:
    """What a call keeps for backward in the model as it was and as it is converted; or why that is not known.

    The call is made twice, once of them exact; the model, random states and gradients stay as they were.

    Args:
        model: converted.
        call: of the model, or of a module in it.

    Raises:
        ModelError: the model as it was can be called so, the converted one cannot.
    """
    if (reason := unmeasurable(model)) is not None:
        return None, None, reason
    try:
        with suspended(model):
            before = measure(model, call)
    except Exception as error:  # a model may ask for anything
        return None, None, f"the measuring forward failed ({brief(error)})"
    try:
        return before, measure(model, call), None
    except Exception as error:
        raise only_runs_exactly(model, error) from error


def fitting(model: nn.Module, call: TrainingCall) -> TrainingCall:
    """The call, or as many rows of its batch as an exact forward has memory for.

    What two rows keep says what all keep. A call that cannot be cut into rows stays as it is.

    Args:
        model: converted.
        call: of the model, or of a module in it.
    """
    rows = call.num_rows
    if rows is None or rows <= _PROBED or unmeasurable(model) is not None:
        return call
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    try:
        with suspended(model):
            of_few = measure(model, call.first_rows(_PROBED)).nbytes
    except Exception:  # a model may ask for anything, such as a batch of this very size
        return call
    free = _free_nbytes(device)
    if free is None or of_few * rows <= _PROBED * _SHARE * free:
        return call
    return call.first_rows(max(_PROBED, int(_PROBED * _SHARE * free) // max(1, of_few)))


_PROBED = 2
"""Rows: normalization over the batch refuses a single one."""

_SHARE = 0.5
"""Of the free memory that the kept bytes may take: a forward has other tensors, too."""


def _free_nbytes(device: torch.device) -> int | None:
    """Memory that is free; None where that is not known."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + reserved
    try:
        for line in Path("/proc/meminfo").read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None
