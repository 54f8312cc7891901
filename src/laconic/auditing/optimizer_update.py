"""The first updates of an AdamW8bit against those of AdamW in double precision, on copies of parts of its parameters.

A step of the optimizer itself would write weights and moments. So its own code runs two steps, with its groups'
hyperparameters, on copies of up to `_MAX_ROWS` rows of each parameter. One that keeps exact moments is held to
rounding. Of one in 8 bits the first step has exact moments, which begin at zero; the second reads what the first has
coded. Each code of m and of v is off by a few per cent of itself at most, and what is below the smallest code of its
block counts as zero, so a change may be off by a share of its size, `_CODED`. A wrong bias correction, rate, decay or
block is off by more, and on the side of all weights.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

from laconic.errors import AuditError
from laconic.formats.shards import local_part
from laconic.optim import AdamW8bit
from laconic.optim.moments import is_8bit

__all__ = ["check_updates"]

_MAX_ROWS = 32
_MAX_NUMEL = 1 << 16
_CODED = 0.12
"""Root mean square of the error of the second change of coded moments, as a share of that of the change."""


@torch.no_grad()
def check_updates(optimizer: AdamW8bit, gradients: Mapping[Tensor, Tensor], names: Mapping[Tensor, str]) -> int:
    """Compare two steps of the optimizer's code with exact AdamW; returns how many parameters were compared.

    Args:
        optimizer: stays as it is.
        gradients: of its parameters.
        names: of its parameters, for errors.

    Raises:
        AuditError: an update is another one.
    """
    twin = _twin(optimizer)
    copies: list[tuple[str, Tensor, Tensor, dict[str, Any]]] = []
    for group, own in zip(optimizer.param_groups, twin.param_groups, strict=True):
        for parameter in group["params"]:
            gradient = gradients.get(parameter)
            if gradient is None or parameter.numel() == 0 or not bool(gradient.isfinite().all()):
                continue
            part, its_gradient = _part(parameter), _part(gradient).to(parameter.dtype)
            part.grad = its_gradient
            own["params"].append(part)
            copies.append((names.get(parameter, "a parameter"), part, part.double(), group))
    if not copies:
        return 0
    exact = [_Exact(start, group) for _, _, start, group in copies]
    with _without_hooks():
        for step in (1, 2):
            if step == 2:  # other gradients: of equal ones neither betas nor the number of the step show
                for _, part, _, _ in copies:
                    assert part.grad is not None
                    part.grad.mul_(-0.5)
            before = [part.double() for _, part, _, _ in copies]
            type(twin).step(twin)
            for (name, part, _, group), reference, old in zip(copies, exact, before, strict=True):
                assert part.grad is not None
                _check(name, part, old, reference.change(old, part.grad.double(), step), step,
                       is_8bit(twin.state[part]), group)  # fmt: skip
    return len(copies)


class _Exact:
    """AdamW of one tensor in double precision."""

    def __init__(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        self._m, self._v = torch.zeros_like(parameter), torch.zeros_like(parameter)
        self._group = group

    def change(self, parameter: Tensor, gradient: Tensor, step: int) -> Tensor:
        """What step `step` (1 is the first) adds to the parameter."""
        group = self._group
        beta1, beta2 = (float(beta) for beta in group["betas"])
        gradient = -gradient if group["maximize"] else gradient
        self._m = beta1 * self._m + (1 - beta1) * gradient
        self._v = beta2 * self._v + (1 - beta2) * gradient.square()
        root = (self._v / (1 - beta2**step)).sqrt() + group["eps"]
        rate = float(group["lr"])
        return -rate * (group["weight_decay"] * parameter + self._m / (1 - beta1**step) / root)


def _check(
    name: str, part: Tensor, old: Tensor, expected: Tensor, step: int, is_coded: bool, group: Mapping[str, Any]
) -> None:
    found = part.double() - old
    # A weight is rounded to its dtype, a scalar of the step to fp32.
    rounding = old.abs() * torch.finfo(part.dtype).eps + float(group["lr"]) * 1e-4
    error = ((found - expected).abs() - rounding).clamp(min=0).square().mean().sqrt().item()
    size = expected.square().mean().sqrt().item()
    allowed = _CODED if is_coded and step == 2 else 1e-3
    if error <= allowed * size or size == 0.0 == error:
        return
    slope = float((found * expected).sum() / expected.square().sum()) if size else math.inf
    raise AuditError(
        f"update {step} of {name} by AdamW8bit is {slope:.3f} times that of exact "
        f"AdamW, off by {error / size if size else math.inf:.2g} of it where {allowed:g} is allowed; likely causes: a "
        "learning rate, weight decay or number of the step that is not the group's, or moments of other values"
    )


def _part(x: Tensor) -> Tensor:
    """A copy of the first rows of what this rank holds; whole if it is small, as small ones keep exact moments."""
    local = local_part(x).detach()
    if local.numel() > _MAX_NUMEL and local.dim() > 1:
        rows = max(1, min(_MAX_ROWS, _MAX_NUMEL * 4 // (local.numel() // local.shape[0])))
        return local[:rows].clone(memory_format=torch.contiguous_format)
    if local.numel() > _MAX_NUMEL:
        return local[:_MAX_NUMEL].clone()
    return local.clone()


def _twin(optimizer: AdamW8bit) -> AdamW8bit:
    """The optimizer with its groups' hyperparameters, no parameters and no state."""
    twin = type(optimizer).__new__(type(optimizer))
    twin.__dict__.update({name: value for name, value in optimizer.__dict__.items() if name != "step"})
    twin.state = defaultdict(dict)
    twin.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    return twin


@contextmanager
def _without_hooks() -> Iterator[None]:
    """Let no hook of all optimizers see the steps inside, which may be inside of one."""
    module: Any = torch_optimizer
    names = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    before = [getattr(module, name) for name in names]
    try:
        for name in names:
            setattr(module, name, OrderedDict())
        yield
    finally:
        for name, hooks in zip(names, before, strict=True):
            setattr(module, name, hooks)
