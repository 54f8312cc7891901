"""Norms over the last dimension, computed again, and their gradients.

Step by step in fp32 an RMS norm's backward moves some 20 tensors of the size of its input, in as many calls of torch.
Where input, weight and bias have one dtype there are fused kernels, ours on the CPU and torch's on CUDA; they read
16-bit tensors as they are and move three. Before their first use with a device, dtype and length they run on a small
input beside the steps; what differs is not used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import layer_norm  # torch's own, whatever a host puts in its place

from laconic.activations.host.cuda_graph import is_captured
from laconic.activations.host.traceable import argument_class
from laconic.ops.constants import constant_tensor
from laconic.ops.declarations.op import is_memory
from laconic.ops.native import norms as native
from laconic.ops.native.library import SELECTION


@dataclass(frozen=True)
class NormSpec:
    """Which normalization over the last dimension a module computes.

    Attributes:
        kind: "rms" is x / sqrt(mean(x^2) + eps) * w, "layer" is torch's layer norm.
        eps: added to the mean square or the variance.
        unit_offset: the stored weight is w - 1 (Gemma).
    """

    kind: Literal["rms", "layer"]
    eps: float
    unit_offset: bool = False


argument_class(NormSpec)


def normalize(x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec) -> Tensor:
    """The normalization `spec` of x [..., features], in fp32, returned in x's dtype."""
    wide = x.float()
    if spec.kind == "layer":
        weight, bias = (None if p is None else p.float() for p in (weight, bias))
        return layer_norm(wide, x.shape[-1:], weight, bias, spec.eps).to(x.dtype)
    y = wide * _inverse_rms(wide, spec.eps)
    return (y if weight is None else y.mul_(_scale(weight, spec))).to(x.dtype)


def norm_formula(x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec, dtype: torch.dtype) -> Tensor:
    """`normalize` in `dtype`, by operations that torch differentiates as often as asked."""
    wide = x.float()
    if spec.kind == "layer":
        weight, bias = (None if p is None else p.float() for p in (weight, bias))
        return layer_norm(wide, x.shape[-1:], weight, bias, spec.eps).to(dtype)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + spec.eps)
    return (y if weight is None else y * _scale(weight, spec)).to(dtype)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dimension of x fp32, which is kept with size 1."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(_number(eps, x.device), norm, norm, value=1 / max(1, x.shape[-1])).rsqrt_()


@constant_tensor
def _number(value: float, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=device)


def _scale(weight: Tensor, spec: NormSpec) -> Tensor:
    return weight.float() + 1.0 if spec.unit_offset else weight.float()


def norm_again(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, spec: NormSpec, dtype: torch.dtype
) -> Tensor:
    """`normalize` in `dtype`, by a fused kernel where there is one."""
    if dtype == x.dtype and (kernels := kernels_of(x, weight, bias, spec)) is not None:
        return kernels.norm(x, weight, bias, spec)
    return normalize(x, weight, bias, spec).to(dtype)


Grads = tuple[Tensor | None, Tensor | None, Tensor | None]


def norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec, needs: tuple[bool, ...]
) -> Grads:
    """Gradients of the normalization `spec`.

    Args:
        grad: [..., features], of its result.
        x: [..., features].
        weight, bias: [features] or None.
        spec: which normalization.
        needs: of which of x, weight and bias a gradient is wanted.

    Returns:
        Those gradients, in fp32 or in the dtype of x; None where not wanted.
    """
    if grad.dtype == x.dtype and (kernels := kernels_of(x, weight, bias, spec, grad)) is not None:
        return kernels.backward(grad, x, weight, bias, spec, needs)
    return _steps_backward(grad.float(), x.float(), weight, bias, spec, needs)


def _steps_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec, needs: tuple[bool, ...]
) -> Grads:
    return (_rms_steps if spec.kind == "rms" else _layer_steps)(grad, x, weight, bias, spec, needs)


def _rms_steps(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec, needs: tuple[bool, ...]
) -> Grads:
    """Gradients of RMS norm in fp32: dx = r (w g - n mean(w g n)) with r the inverse rms and n = x r.

    Layer norm's kernel with a mean of zero gives r (w g - mean(w g) - n mean(w g n)) in one pass over memory; the term
    in the middle, which RMS norm does not have, is added back.
    """
    inverse_rms = _inverse_rms(x, spec.eps)
    scale = None if weight is None else _scale(weight, spec)
    dx, dweight, _ = torch.ops.aten.native_layer_norm_backward.default(
        grad, x, x.shape[-1:], torch.zeros_like(inverse_rms), inverse_rms, scale, None, [*needs[:2], False]
    )
    if needs[0]:
        total = grad.sum(-1, keepdim=True) if scale is None else (grad @ scale).unsqueeze(-1)
        dx.addcmul_(total, inverse_rms, value=1 / max(1, x.shape[-1]))
    return (dx if needs[0] else None), (dweight if needs[1] else None), None


def _layer_steps(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec, needs: tuple[bool, ...]
) -> Grads:
    """Gradients of layer norm in fp32, by torch's own kernel."""
    shape = x.shape[-1:]
    weight, bias = (None if p is None else p.float() for p in (weight, bias))
    _, mean, inverse_std = torch.native_layer_norm(x, shape, weight, bias, spec.eps)
    grads: Grads = torch.ops.aten.native_layer_norm_backward(
        grad, x, shape, mean, inverse_std, weight, bias, list(needs)
    )
    return grads


def _torch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec) -> Tensor:
    shape = x.shape[-1:]
    if spec.kind == "layer":
        return torch.native_layer_norm(x, shape, weight, bias, spec.eps)[0]
    y: Tensor = torch.ops.aten._fused_rms_norm(x, shape, weight, spec.eps)[0]
    return y


def _torch_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec, needs: tuple[bool, ...]
) -> Grads:
    shape, grad = x.shape[-1:], grad.contiguous()
    if spec.kind == "layer":
        _, mean, inverse_std = torch.native_layer_norm(x, shape, weight, bias, spec.eps)
        grads: Grads = torch.ops.aten.native_layer_norm_backward(
            grad, x, shape, mean, inverse_std, weight, bias, list(needs)
        )
        return grads
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    inverse_rms = norm.square_().div_(shape[0]).add_(spec.eps).rsqrt_()
    dx, dweight = torch.ops.aten._fused_rms_norm_backward(grad, x, shape, inverse_rms, weight, list(needs[:2]))
    return (dx if needs[0] else None), (dweight if needs[1] else None), None


def _own_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec) -> Tensor:
    return native.norm(x, weight, bias, spec.eps, centered=spec.kind == "layer", unit_offset=spec.unit_offset)


def _own_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec, needs: tuple[bool, ...]
) -> Grads:
    centered = spec.kind == "layer"
    return native.norm_backward(grad, x, weight, bias, spec.eps, needs, centered=centered, unit_offset=spec.unit_offset)


@dataclass(frozen=True)
class _Kernels:
    """Fused kernels: `norm` takes what `normalize` does, `backward` what `norm_backward` does."""

    norm: Callable[..., Tensor]
    backward: Callable[..., Grads]
    takes_unit_offset: bool


_TORCHS = _Kernels(_torch_norm, _torch_backward, takes_unit_offset=False)
_OURS = _Kernels(_own_norm, _own_backward, takes_unit_offset=True)

KERNELS: dict[str, _Kernels] = {"cuda": _TORCHS} | ({"cpu": _OURS} if SELECTION.implementation == "c++" else {})
"""The fused kernels of a type of device."""

_VERDICTS: dict[tuple[Any, ...], bool] = {}


def kernels_of(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec, grad: Tensor | None = None
) -> _Kernels | None:
    """The fused kernels for this norm (and this gradient of it), if there are any and they give what the steps do."""
    parameters = [p for p in (weight, bias) if p is not None]
    others = parameters if grad is None else [*parameters, grad]
    if not is_memory(x, *others) or any([y.device != x.device for y in others]):
        return None
    if any([p.dtype is not x.dtype or p.shape != x.shape[-1:] for p in parameters]):
        return None
    kernels = KERNELS.get(x.device.type)
    if kernels is None or (spec.unit_offset and not kernels.takes_unit_offset):
        return None
    which = weight is not None, bias is not None
    key = (x.device, x.dtype, x.shape[-1], which, spec)
    verdict = _VERDICTS.get(key)
    if verdict is None:
        if is_captured(x.device):
            return None
        verdict = _VERDICTS[key] = _agree(kernels, x, which, spec)
    return kernels if verdict else None


def _agree(kernels: _Kernels, like: Tensor, which: tuple[bool, bool], spec: NormSpec) -> bool:
    """Run kernels and steps on a few rows of the length of `like`, with or without weight and bias, and compare."""
    generator, length = torch.Generator("cpu").manual_seed(0), like.shape[-1]

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32).to(like.device, like.dtype)

    with torch.no_grad(), torch.autocast(like.device.type, enabled=False):
        x, grad = drawn(3, length), drawn(3, length)
        weight, bias = (drawn(length) if is_given else None for is_given in which)
        needs = (True, *which)
        try:
            fused = kernels.norm(x, weight, bias, spec), *kernels.backward(grad, x, weight, bias, spec, needs)
        except NotImplementedError:  # a build of torch, or a device, that lacks them
            return False
        steps = normalize(x, weight, bias, spec), *_steps_backward(grad.float(), x.float(), weight, bias, spec, needs)
        names = ("result", "gradient of the input", "gradient of the weight", "gradient of the bias")
        results = zip(names, fused, steps, strict=True)
        near = {
            name: _is_near(found, truth) for name, found, truth in results if found is not None or truth is not None
        }
        are_near = torch.stack(list(near.values())).tolist()  # the host waits once
    wrong = [name for name, is_near in zip(near, are_near, strict=True) if not is_near]
    if wrong:
        logging.getLogger("laconic").warning(
            "the fused kernel of a %s norm over %d features is not used on %s: not the steps' %s in %s",
            *(spec.kind, length, like.device, " and ".join(wrong), like.dtype),
        )
    return not wrong


def _is_near(found: Tensor | None, truth: Tensor | None) -> Tensor:
    """Whether two results, one of which may be missing, differ by no more than a few roundings of what is largest."""
    if found is None or truth is None:
        present = found if truth is None else truth
        assert present is not None
        return torch.zeros((), dtype=torch.bool, device=present.device)
    distance = (found.float() - truth.float()).abs().amax()
    return distance <= 4 * torch.finfo(found.dtype).eps * truth.float().abs().amax()
