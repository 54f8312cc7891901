"""The first updates of an AdamW8bit against those of AdamW in double precision, on copies of parts of its parameters.

A step of the optimizer itself would write weights and moments. So its own code runs two steps, with its groups'
hyperparameters, on copies of up to `_MAX_ROWS` rows of each parameter, and both are held to rounding. Moments in
codes begin exact, at zero. What the first step leaves of them has to be the exact ones to the nearest code of their
blocks; the second step is compared with that of exact AdamW from there, as an update is no smooth function of its
moments: where a second moment was coded as almost nothing, a change is off by any share of itself. A wrong bias
correction, rate, decay or block is off by more than rounding.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

from laconic.errors import AuditError
from laconic.formats.shards import local_part
from laconic.ops.adamw_scalars import adamw_scalars, largest_ratio, widened
from laconic.ops.dynamic_map import dynamic_map, has_signed_scale
from laconic.optim import AdamW8bit
from laconic.optim.adamw import BETAS_SEEN
from laconic.optim.moments import MOMENTS, dequantize_moment, is_coded, rows_of, state_bits
from laconic.options import MOMENT_BLOCK_SIZES

_MAX_ROWS = 32
_MAX_NUMEL = 1 << 16
_SMALLEST = 2.0**-50
"""Gradients below it count as zero here: fp32 keeps little of their squares, with which exact ones are compared."""
_ROUNDING = 1e-3
"""Root mean square of the error of a change, as a share of that of the change."""


@torch.no_grad()
def check_updates(optimizer: AdamW8bit, gradients: Mapping[Tensor, Tensor], names: Mapping[Tensor, str]) -> int:
    """Compare two steps of the optimizer's code with exact AdamW; returns how many parameters were compared.

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
            part.grad = its_gradient.masked_fill_(its_gradient.abs() < _SMALLEST, 0.0)
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
                _check(name, part, old, reference.change(old, part.grad.double(), step), step, group)
                reference.take(name, twin.state[part])
    return len(copies)


class _Exact:
    """AdamW of one tensor in double precision; `take` goes on from the moments that a step has coded."""

    def __init__(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        self._m, self._v = torch.zeros_like(parameter), torch.zeros_like(parameter)
        self._group = group
        self._beta1, self._beta2 = (float(beta) for beta in group["betas"])
        self._is_coded = False

    def change(self, parameter: Tensor, gradient: Tensor, step: int) -> Tensor:
        """What step `step` (1 is the first) adds to the parameter."""
        group, beta1, beta2 = self._group, self._beta1, self._beta2
        rate, decay, eps = float(group["lr"]), float(group["weight_decay"]), max(float(group["eps"]), 2.0**-126)
        gradient = -gradient if group["maximize"] else gradient
        self._m = beta1 * self._m + (1 - beta1) * gradient
        self._v = beta2 * self._v + (1 - beta2) * gradient.square()
        if self._is_coded:  # rounded apart, they may have a ratio that those of no gradients have
            ratio = largest_ratio(widened(group.get(BETAS_SEEN), beta1, beta2), step)
            limit = self._v.sqrt() * adamw_scalars(rate, beta1, beta2, eps, decay, step, ratio).ratio_max
            self._m = self._m.clamp(-limit, limit)
        root = (self._v / (1 - beta2**step)).sqrt() + eps
        return -rate * (decay * parameter + self._m / (1 - beta1**step) / root)

    def take(self, name: str, state: Mapping[str, Any]) -> None:
        """Go on from the moments of a state, if that holds codes."""
        if not is_coded(state):
            return
        self._is_coded = True
        shape, bits = self._m.shape, state_bits(state, self._m)
        stored = [
            dequantize_moment(state[f"{moment}_codes"], state[f"{moment}_scales"], signed=signed, shape=shape).double()
            for moment, signed in MOMENTS.items()
        ]
        for found, exact, (moment, signed) in zip(stored, (self._m, self._v), MOMENTS.items(), strict=True):
            if not bool(((found - exact).abs() <= _code_bound(exact, signed, bits)).all()):
                raise AuditError(
                    f"{moment} of {name} in the state of AdamW8bit is not the exact one to the nearest code of its "
                    "blocks; likely causes: codes or scales of another block or parameter, a moment not written"
                )
        self._m, self._v = stored


def _code_bound(moment: Tensor, signed: bool, bits: int) -> Tensor:
    """How far the nearest code may be from each value of an exact moment, of its shape.

    Half of the gap between the levels around it, in scales of its block; values of no sign below the smallest level
    become that, and -1 the level next to it.
    """
    values = moment.reshape(rows_of(moment.shape))
    block_size = MOMENT_BLOCK_SIZES[bits]
    padding = -values.shape[1] % block_size
    blocks = F.pad(values, (0, padding)).unflatten(1, (-1, block_size))
    scales = blocks.abs().amax(-1, keepdim=True)
    n = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)
    if has_signed_scale(signed, bits):
        n = torch.where(blocks.amax(-1, keepdim=True) == scales, n, -n)
    levels = torch.tensor(dynamic_map(signed, bits).levels, dtype=torch.float64, device=moment.device)
    above = torch.bucketize(n, levels).clamp(max=len(levels) - 1)
    low, high = levels[(above - 1).clamp(min=0)], levels[above]
    gap = (high - low) / 2 if signed else torch.where(low == 0, high, (high - low) / 2)
    bound = gap.maximum(levels[0] - n) * (1 + 1e-3) + 1e-6
    bound = bound * scales + torch.finfo(torch.float32).tiny
    return bound.flatten(1)[:, : values.shape[1]].reshape(moment.shape)


def _check(name: str, part: Tensor, old: Tensor, expected: Tensor, step: int, group: Mapping[str, Any]) -> None:
    found = part.double() - old
    # A weight is rounded to its dtype, a scalar of the step to fp32.
    rounding = old.abs() * torch.finfo(part.dtype).eps + float(group["lr"]) * 1e-4
    error = ((found - expected).abs() - rounding).clamp(min=0).square().mean().sqrt().item()
    size = expected.square().mean().sqrt().item()
    if error <= _ROUNDING * size or size == 0.0 == error:
        return
    slope = float((found * expected).sum() / expected.square().sum()) if size else math.inf
    raise AuditError(
        f"update {step} of {name} by AdamW8bit is {slope:.3f} times that of exact "
        f"AdamW, off by {error / size if size else math.inf:.2g} of it where {_ROUNDING:g} is allowed; likely causes: "
        "a learning rate, weight decay or number of the step that is not the group's, or moments of other values"
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
