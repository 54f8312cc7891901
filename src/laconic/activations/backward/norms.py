"""Norms over the last dimension, computed again, and their gradients.

Step by step in fp32 an RMS norm's backward moves some 20 tensors of the size of its input. Fused kernels read 16-bit
tensors as they are and move three: C++ of ours for RMS norms on the CPU, where torch has one for layer norms, and
torch's on CUDA, where input, weight and bias have one dtype. Before their first use with a device, dtypes and length
they run on a small input beside the steps; what differs is not used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm  # torch's own, whatever a host puts in its place

from laconic.activations.host.cuda_graph import is_captured
from laconic.activations.host.traceable import argument_class
from laconic.ops import DTYPES, native
from laconic.ops.declarations.op import is_direct


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
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _scale(weight: Tensor, spec: NormSpec) -> Tensor:
    return weight.float() + 1.0 if spec.unit_offset else weight.float()


def norm_again(x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec, dtype: torch.dtype) -> Tensor:
    """`normalize` in `dtype`, by a fused kernel where there is one."""
    kernels = _kernels_for(x, weight, bias, spec) if dtype is x.dtype else None
    return normalize(x, weight, bias, spec).to(dtype) if kernels is None else kernels.norm(x, weight, bias, spec)


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
    is_alike = type(grad) is Tensor and grad.dtype is x.dtype and not grad.is_neg()
    kernels = _kernels_for(x, weight, bias, spec) if is_alike else None
    if kernels is not None:
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
    dx, dweight, _ = torch.ops.aten.native_layer_norm_backward(
        grad, x, x.shape[-1:], torch.zeros_like(inverse_rms), inverse_rms, scale, None, [*needs[:2], False]
    )
    if needs[0]:
        mean = grad.mean(-1, keepdim=True) if scale is None else (grad @ scale).div_(x.shape[-1]).unsqueeze(-1)
        dx.add_(mean.mul_(inverse_rms))
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


@dataclass(frozen=True)
class Kernels:
    """A device's fused kernels.

    Attributes:
        serve: whether they take such tensors: x, the parameters that are there, the norm.
        norm: as `normalize`.
        backward: as `norm_backward`.
    """

    serve: Callable[[Tensor, list[Tensor], NormSpec], bool]
    norm: Callable[[Tensor, Tensor | None, Tensor | None, NormSpec], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor | None, Tensor | None, NormSpec, tuple[bool, ...]], Grads]


def _torch_serves(x: Tensor, parameters: list[Tensor], spec: NormSpec) -> bool:
    return not spec.unit_offset and all(p.dtype is x.dtype for p in parameters)


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


TORCH = Kernels(_torch_serves, _torch_norm, _torch_backward)


def _cpp_serves(x: Tensor, parameters: list[Tensor], spec: NormSpec) -> bool:
    is_ours = spec.kind == "rms" and x.dtype in native.RMS_NORM_DTYPES and native.SELECTION.implementation == "c++"
    return is_ours and is_direct(x) and all(p.dtype in DTYPES and p.is_cpu for p in parameters)


def _cpp_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec) -> Tensor:
    return native.rms_norm(x, weight, spec.eps, offset=float(spec.unit_offset))


def _cpp_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec, needs: tuple[bool, ...]
) -> Grads:
    offset = float(spec.unit_offset)
    return *native.rms_norm_backward(grad, x, weight, spec.eps, offset=offset, needs=needs[:2]), None


CPP = Kernels(_cpp_serves, _cpp_norm, _cpp_backward)

_KERNELS = {"cpu": CPP, "cuda": TORCH}
_VERDICTS: dict[tuple[Any, ...], bool] = {}


def _kernels_for(x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec) -> Kernels | None:
    """The device's kernels, if they serve this norm and give what the steps do."""
    kernels = _KERNELS.get(x.device.type)
    if kernels is None or torch.compiler.is_compiling() or not x.numel():
        return None
    parameters = [p for p in (weight, bias) if p is not None]
    # Other classes, as fake tensors are, would not show what runs.
    if type(x) is not Tensor or any(type(p) not in (Tensor, nn.Parameter) for p in parameters):
        return None
    if not kernels.serve(x, parameters, spec):
        return None
    dtypes = tuple([None if p is None else p.dtype for p in (weight, bias)])
    key = (x.device, x.dtype, x.shape[-1], dtypes, spec)
    verdict = _VERDICTS.get(key)
    if verdict is None:
        if is_captured(x.device):
            return None
        verdict = _VERDICTS[key] = _agree(kernels, x, dtypes, spec)
    return kernels if verdict else None


def _agree(kernels: Kernels, like: Tensor, dtypes: tuple[torch.dtype | None, ...], spec: NormSpec) -> bool:
    """Run kernels and steps on a few rows of the length of `like`, with parameters of these dtypes, and compare."""
    generator, length = torch.Generator("cpu").manual_seed(0), like.shape[-1]

    def drawn(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32).to(like.device, dtype)

    with torch.no_grad(), torch.autocast(like.device.type, enabled=False):
        x, grad = drawn(like.dtype, 3, length), drawn(like.dtype, 3, length)
        weight, bias = (None if dtype is None else drawn(dtype, length) for dtype in dtypes)
        needs = (True, *[dtype is not None for dtype in dtypes])
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
