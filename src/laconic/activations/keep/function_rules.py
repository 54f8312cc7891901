"""What backward of a function of torch reads of the tensors that it saves, and how its output is computed again.

Three kinds of knowledge, by function: exact codes (a mask for a relu, see `keep.exact_codes`), which
saved tensors may be rounded (`keep.tolerant`), and for norms and elementwise activations the function
that gives their output once more. What is not listed stays exact and is not rebuilt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from laconic.activations.keep.exact_codes import Coded, MemoryLayout, as_mask, as_offsets, as_shape
from laconic.activations.keep.tolerant import functions_named, least_numel

_NOT_READ_ON = ("cpu", "cuda")
"""Devices whose pooling reads no value of its input in backward."""

ENOUGH = 64
"""Values of a channel whose batch norm has a gradient that bears rounding."""

_SIGNATURES: dict[str, tuple[str, ...]] = {
    "relu": ("input", "inplace"),
    "leaky_relu": ("input", "negative_slope"),
    "relu6": ("input",),
    "hardtanh": ("input", "min_val", "max_val"),
    "hardsigmoid": ("input",),
    "hardshrink": ("input", "lambd"),
    "softshrink": ("input", "lambd"),
    "threshold": ("input", "threshold"),
    "dropout": ("input",),
    "max_pool2d": ("input", "kernel_size", "stride", "padding", "dilation"),
    "avg_pool1d": ("input",),
    "avg_pool2d": ("input",),
    "avg_pool3d": ("input",),
    "adaptive_avg_pool2d": ("input",),
    "adaptive_avg_pool3d": ("input",),
    "convolution": ("input", "weight"),
    "gelu": ("input", "approximate"),
    "silu": ("input",),
    "mish": ("input",),
    "hardswish": ("input",),
    "softplus": ("input", "beta", "threshold"),
    "elu": ("input", "alpha"),
    "selu": ("input",),
    "prelu": ("input",),
    "batch_norm": ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    "group_norm": ("input", "num_groups", "weight", "bias", "eps"),
    "instance_norm": ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps"),
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
}
"""Arguments of the functions known here, in the order of torch.nn.functional."""

_FUNCTIONS = {name: getattr(F, name) for name in _SIGNATURES if name != "convolution"}
"""torch's own, whatever a host puts in their places."""

_SPELLINGS = {"convolution": "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"}
_DROPOUTS = "dropout dropout1d dropout2d dropout3d feature_dropout"


def _families() -> dict[Callable[..., Any], str]:
    found: dict[Callable[..., Any], str] = {}
    for family in _SIGNATURES:
        for function in functions_named(_SPELLINGS.get(family, _DROPOUTS if family == "dropout" else family)):
            found[function] = family
    del found[torch.batch_norm]  # which takes its arguments in another order than that of torch.nn.functional
    return found


_STEPS = ("relu6", "hardtanh", "hardsigmoid", "hardshrink", "softshrink", "threshold")
"""Families whose derivative is a step: in bits, or exact where `_tells_apart` says no."""

_NORMS = ("batch_norm", "group_norm", "layer_norm", "rms_norm")
_FAMILIES = _families()


Again = tuple[Callable[..., Tensor], tuple[Tensor, ...]]
"""What computes the output of a call again from its input, and the tensors that it takes after that."""


@dataclass(frozen=True)
class Side:
    """On which side of a jump of the derivative the values of a tensor lie.

    Attributes:
        mask: bool, of the shape of the tensor.
        correct: (rounded tensor, mask) to the tensor with each value on its side.
    """

    mask: Tensor
    correct: Callable[[Tensor, Tensor], Tensor]


class FunctionCall:
    """One call of a function of torch.

    Attributes:
        function, args, kwargs: of the call.
        mask: the factors of zero or one number that the call's dropout drew, or the sides of zero of a
            relu's values, once they were packed.
        normed: of a batch norm in training its input, weight, running mean and variance; else empty.
        statistics: what such a call saves beside these, of each channel: mean and reciprocal standard deviation.
        late: what is saved for the input of such a call, and that input, which is packed when the call has returned.
    """

    mask: Coded | None = None
    normed: tuple[Any, ...] = ()
    late: tuple[Any, Tensor] | None = None

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.statistics: list[Tensor] = []
        self.family = _FAMILIES.get(function)
        if self.family == "batch_norm" and self.argument("training", False):
            self.normed = tuple(map(self.argument, ("input", "weight", "running_mean", "running_var")))

    def argument(self, name: str, default: Any = None) -> Any:
        """An argument by name; `default` where it was not given."""
        assert self.family is not None
        position = _SIGNATURES[self.family].index(name)
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)

    @property
    def is_norm(self) -> bool:
        """Whether the function normalizes its input."""
        return self.family in (*_NORMS, "instance_norm")

    @property
    def is_in_place(self) -> bool:
        """Whether the call of a relu changes its input."""
        if self.function.__name__.endswith("_"):
            return True
        return bool(self.argument("inplace", False))

    def may_round(self, tensor: Tensor) -> bool:
        """Whether the function tolerates that this saved tensor is rounded."""
        least = None if self.function is torch.batch_norm else least_numel(self.function, self.args, self.kwargs)
        if least is None or tensor.numel() < least or self.family in _STEPS:
            return False
        if self.family == "batch_norm":
            # Over a few values the gradient is what is left of terms that almost cancel: rounding drowns it.
            return tensor.numel() >= ENOUGH * tensor.shape[1]
        if self.family != "convolution":
            return True
        # A computed weight (standardized, cast by autocast) is exact, like one that is a parameter.
        x, weight = self.argument("input"), self.argument("weight")
        return bool(tensor.shape != weight.shape or tensor.shape == x.shape)

    def standard(self, x: Tensor) -> Standard | None:
        """How the input of a norm is standardized before it is rounded; None for other functions.

        Args:
            x: [batch, channels, ...], or [..., features] of a layer or RMS norm: what the call saves.
        """
        family = self.family
        # Statistics are saved too, and instance norm saves a view of its input.
        if not self.is_norm or x.numel() != self.argument("input").numel():
            return None
        eps = self.argument("eps", 1e-5) or 0.0
        if family in ("layer_norm", "rms_norm"):
            return _standard_of_rows(x, len(self.argument("normalized_shape")), eps, family == "layer_norm")
        if x.dim() < 2:
            return None
        if family == "batch_norm":
            running = None if self.normed else (self.argument("running_mean"), self.argument("running_var"))
            return standard_of_channels(x, eps, statistics=self.statistics, running=running)
        return _standard_of_groups(x, self.argument("num_groups") if family == "group_norm" else x.shape[1], eps)

    def code(self, tensor: Tensor) -> Coded | None:
        """The exact codes of a tensor that the call saves; None if backward may read all of it."""
        match self.family:
            case "dropout":
                coded = _mask_of_dropout(tensor, self.argument("input"))
                self.mask = None if tensor.dtype is torch.bool else coded
                return coded
            case "max_pool2d":
                return self._pooled(tensor)
            case "avg_pool1d" | "avg_pool2d" | "avg_pool3d" | "adaptive_avg_pool2d" | "adaptive_avg_pool3d":
                return as_shape(tensor) if tensor.device.type in _NOT_READ_ON else None
        step = self._step(tensor) if tensor.is_floating_point() else None
        if step is None:
            return None
        coded = as_mask(step[0], MemoryLayout.of(tensor), *step[1:])
        self.mask = coded if self.family in ("relu", "leaky_relu") else None
        return coded

    def _step(self, x: Tensor) -> tuple[Tensor, float, float] | None:
        """For a derivative that is a step: a mask of what passes, a value that does, and one that does not."""
        match self.family:
            case "relu":
                return x, 1.0, 0.0  # it saves its result, which is not negative
            case "leaky_relu":
                return x > 0, 1.0, -1.0
            case "relu6" | "hardtanh":
                low, high = (0.0, 6.0) if self.family == "relu6" else self._limits()
                if _tells_apart(x.dtype, (low + high) / 2, low, high):
                    return ~((x <= low) | (x >= high)), (low + high) / 2, high
            case "hardsigmoid":
                return (x > -3) & (x < 3), 0.0, 6.0
            case "hardshrink" | "softshrink":
                limit = self.argument("lambd", 0.5)
                if _tells_apart(x.dtype, 2 * limit + 1, limit):
                    return ~((x >= -limit) & (x <= limit)), 2 * limit + 1, 0.0
            case "threshold":
                limit = self.argument("threshold")
                if _tells_apart(x.dtype, limit + abs(limit) + 1, limit):
                    return ~(x <= limit), limit + abs(limit) + 1, limit
        return None

    def side(self, x: Tensor) -> Side | None:
        """For a smooth derivative that jumps somewhere: on which side of the jump each value of x lies.

        Rounding may carry a value over the jump, however close the rounded value is.

        Args:
            x: [...], what the call saves.

        Returns:
            None for other functions.
        """
        match self.family:
            case "hardswish":  # x / 3 + 1 / 2 between -3 and 3, then 0 and 1
                return Side((x > -3) & (x < 3), _around_three)
            case "elu" if self.argument("alpha", 1.0) == 1.0:
                return None
            case "elu" | "selu" | "prelu":
                return Side(x > 0, _around_zero)
        return None

    def _limits(self) -> tuple[float, float]:
        return self.argument("min_val", -1.0), self.argument("max_val", 1.0)

    def _pooled(self, tensor: Tensor) -> Coded | None:
        x = self.argument("input")
        if tensor.is_floating_point():
            return as_shape(tensor) if tensor.device.type in _NOT_READ_ON else None
        kernel = _pair(self.argument("kernel_size"))
        stride = _pair(self.argument("stride") or kernel)
        padding, dilation = _pair(self.argument("padding", 0)), _pair(self.argument("dilation", 1))
        if tensor.dtype != torch.int64 or kernel[0] * kernel[1] > 256:
            return None
        return as_offsets(tensor, x.shape[-1], kernel, stride, padding, dilation)

    def again(self, *, unbiased: bool = False) -> Again | None:
        """None for functions that are not known to depend on their first argument and on parameters alone.

        Args:
            unbiased: the input will be right on average only. Batch and group norm and relu become linear in it, with
                the statistics and the signs of the exact input, so that their output is right on average, too. (The
                rounded input varies more than the exact one, and relu makes more of values that were rounded up than
                of others.) A function that clips at both ends is not computed again, nor a relu without kept signs.
        """
        family = self.family or ""
        match family:
            case "relu6" | "hardtanh" if unbiased:
                return None
            case "relu" | "leaky_relu" if unbiased and self.mask is None:
                return None
            case "leaky_relu" if unbiased and self.mask is not None:
                signs, slope = self.mask, self.argument("negative_slope", 0.01)
                return (lambda x, *codes: torch.where(signs.decode(codes) > 0, x, slope * x)), signs.tensors
            case "relu":
                return relu_again(self.mask if unbiased else None)
            case "relu6":
                return partial(_FUNCTIONS["hardtanh"], min_val=0.0, max_val=6.0), ()
            case "hardtanh":
                low, high = self._limits()
                return partial(_FUNCTIONS["hardtanh"], min_val=low, max_val=high), ()
            case "leaky_relu":
                return partial(_FUNCTIONS[family], negative_slope=self.argument("negative_slope", 0.01)), ()
            case "gelu":
                return partial(_FUNCTIONS[family], approximate=self.argument("approximate", "none")), ()
            case "elu":
                return partial(_FUNCTIONS[family], alpha=self.argument("alpha", 1.0)), ()
            case "softplus":
                beta, threshold = self.argument("beta", 1.0), self.argument("threshold", 20.0)
                return partial(_FUNCTIONS[family], beta=beta, threshold=threshold), ()
            case "silu" | "mish" | "hardswish" | "hardsigmoid":
                return _FUNCTIONS[family], ()
            case "dropout" if self.mask is not None:
                decode = self.mask.decode
                return (lambda x, *codes: x * decode(codes)), self.mask.tensors
            case "batch_norm":
                names = ("input", "running_mean", "running_var", "weight", "bias")
                x, *given = (self.argument(name) for name in names)
                return batch_norm_again(
                    x, given, self.argument("training", False), self.argument("eps", 1e-5), unbiased
                )
            case "group_norm" | "layer_norm" | "rms_norm":
                return self._group_norm_of_exact() if unbiased and family == "group_norm" else self._norm(family)
        return None

    def _group_norm_of_exact(self) -> Again:
        """Group norm with the statistics of the call's own input."""
        x, groups = self.argument("input").detach(), self.argument("num_groups")
        weight, bias = self.argument("weight"), self.argument("bias")
        variance, mean = torch.var_mean(x.reshape(x.shape[0], groups, -1).float(), -1, correction=0, keepdim=True)
        reciprocal = (variance + self.argument("eps", 1e-5)).rsqrt()
        each_channel = (-1, *[1] * (x.dim() - 2))

        def normalize(x: Tensor, mean: Tensor, reciprocal: Tensor, *affine: Tensor) -> Tensor:
            y = ((x.reshape(x.shape[0], groups, -1).float() - mean) * reciprocal).view(x.shape)
            parameters = iter(affine)
            if weight is not None:
                y = y * next(parameters).view(each_channel)
            return y if bias is None else y + next(parameters).view(each_channel)

        return normalize, (mean, reciprocal, *(given for given in (weight, bias) if given is not None))

    def _norm(self, family: str) -> Again:
        options = {"eps": None if family == "rms_norm" else 1e-5, "num_groups": None, "normalized_shape": None}
        others = {name: self.argument(name, x) for name, x in options.items() if name in _SIGNATURES[family]}
        if isinstance(others.get("normalized_shape"), list):  # which the caller may change
            others["normalized_shape"] = tuple(others["normalized_shape"])
        given = {name: self.argument(name) for name in ("weight", "bias") if name in _SIGNATURES[family]}
        names = [name for name, value in given.items() if isinstance(value, Tensor)]
        function: Callable[..., Tensor] = _FUNCTIONS[family]

        def normalize(x: Tensor, *tensors: Tensor) -> Tensor:
            return function(x, **dict(zip(names, tensors, strict=True)), **others)

        return normalize, tuple(given[name] for name in names)


@lru_cache(maxsize=256)
def _tells_apart(dtype: torch.dtype, passes: float, *limits: float) -> bool:
    """Whether backward takes `passes` for a value that passes, and a limit in `dtype` for one that does not.

    torch compares 16-bit values with a limit in fp32, which may lie beside that limit in their dtype.
    """
    info = torch.finfo(dtype)
    if not all(value == 0 or info.tiny <= abs(value) <= info.max for value in (passes, *limits)):
        return False
    is_exact = info.bits > 16 or all((math.frexp(limit)[0] * 2 / info.eps).is_integer() for limit in limits)
    return is_exact and all(abs(passes - limit) > 2 * info.eps * abs(limit) for limit in limits)


class Standard(NamedTuple):
    """What the input of a norm is standardized by before it is rounded.

    A norm divides each channel, group or row by its own deviation, and so the error of its rounding. Rounding is
    relative to the largest value of a block: an offset of many deviations, or a neighbour of another size in the same
    block, would leave nothing but error.

    Attributes:
        center: about what the norm subtracts, fp32 of a shape that broadcasts; None for nothing.
        factor: about what it multiplies by then, likewise.
        run: values that lie side by side in memory and have one factor.
    """

    center: Tensor | None
    factor: Tensor
    run: int


def standard_of_channels(
    x: Tensor,
    eps: float,
    *,
    statistics: Sequence[Tensor] = (),
    running: tuple[Tensor | None, Tensor | None] | None = None,
) -> Standard:
    """That of a batch norm's input x [batch, channels, ...].

    Args:
        x: the input.
        eps: of the norm.
        statistics: mean and reciprocal standard deviation [channels] that it saved.
        running: in evaluation mean and variance [channels] that it uses.
    """
    if len(statistics) > 1:
        mean, factor = statistics[:2]
    else:
        given, variance = running or (None, None)
        if given is None or variance is None:
            variance, given = torch.var_mean(x.float(), (0, *range(2, x.dim())), correction=0)
        mean, factor = given.clone(), (variance + eps).rsqrt()  # a forward in training may come before backward
    shape = (1, -1, *[1] * (x.dim() - 2))
    return Standard(
        mean.float().view(shape), factor.float().view(shape), x.shape[2:].numel() if x.is_contiguous() else 1
    )


def _standard_of_groups(x: Tensor, num_groups: int, eps: float) -> Standard:
    """That of x [batch, channels, ...] for a norm of each sample's groups of channels."""
    batch, channels = x.shape[:2]
    groups = x.reshape(batch, num_groups, -1)
    variance, mean = torch.var_mean(groups.float(), -1, correction=0)
    shape, each = (batch, channels, *[1] * (x.dim() - 2)), channels // num_groups
    center, factor = (y.repeat_interleave(each, 1).view(shape) for y in (mean, (variance + eps).rsqrt()))
    return Standard(center, factor, groups.shape[2] if x.is_contiguous() else 1)


def _standard_of_rows(x: Tensor, num_dims: int, eps: float, has_mean: bool) -> Standard:
    """That of x [..., features], whose last `num_dims` dimensions a norm takes together."""
    dims, run = tuple(range(-num_dims, 0)), x.shape[x.dim() - num_dims :].numel() if x.is_contiguous() else 1
    wide = x.float()
    if not has_mean:
        return Standard(None, (wide.square().mean(dims, keepdim=True) + eps).rsqrt(), run)
    variance, mean = torch.var_mean(wide, dims, correction=0, keepdim=True)
    return Standard(mean, (variance + eps).rsqrt(), run)


def relu_again(signs: Coded | None) -> Again:
    """See `FunctionCall.again`; by the signs of the exact input, or those of the rebuilt one."""
    return (torch.relu, ()) if signs is None else ((lambda x, *codes: x * signs.decode(codes)), signs.tensors)


def batch_norm_again(x: Tensor, given: Sequence[Tensor | None], training: bool, eps: float, unbiased: bool) -> Again:
    """See `FunctionCall.again`; `given` are running mean and variance, weight and bias."""
    mean, variance, weight, bias = given
    if training:
        # Statistics of the rebuilt input: with those of the exact one, rounding to nearest in a channel that hardly
        # varies would be divided by a standard deviation of almost nothing.
        mean = variance = None
        if unbiased:
            variance, mean = torch.var_mean(x.detach().float(), (0, *range(2, x.dim())), correction=0)
    tensors = (mean, variance, weight, bias)
    which = tuple([tensor is not None for tensor in tensors])
    return partial(_batch_norm, which, eps, unbiased), tuple([tensor for tensor in tensors if tensor is not None])


def _batch_norm(given: tuple[bool, ...], eps: float, widens: bool, x: Tensor, *tensors: Tensor) -> Tensor:
    """Batch norm of x with those `tensors` that were given of mean, variance, weight and bias."""
    if widens:  # exact statistics are fp32, and torch wants parameters to be of the same dtype
        x, tensors = x.float(), tuple([tensor.float() for tensor in tensors])
    rest = iter(tensors)
    mean, variance, weight, bias = [next(rest) if is_given else None for is_given in given]
    return torch.batch_norm(x, weight, bias, mean, variance, mean is None, 0.0, eps, torch.backends.cudnn.enabled)


def _around_three(x: Tensor, inside: Tensor) -> Tensor:
    """x, with the values that are `inside` between -3 and 3, and all others beyond."""
    limit = 3 - 2 * torch.finfo(x.dtype).eps  # the value next to 3
    return torch.where(inside, x.clamp(-limit, limit), x.sign() * 4)


def _around_zero(x: Tensor, above: Tensor) -> Tensor:
    """x, with the values that are `above` larger than zero, and no others."""
    return torch.where(above, x.clamp(min=torch.finfo(x.dtype).tiny), x.clamp(max=0))


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    values = tuple(value)
    return (values[0], values[-1])


def _mask_of_dropout(tensor: Tensor, x: Any) -> Coded | None:
    """One bit per value of what dropout multiplied its input by: zero, or one and the same number."""
    if tensor.dtype is torch.bool:
        return as_mask(tensor, MemoryLayout.of(tensor), 1.0, 0.0)
    if not tensor.is_floating_point() or tensor is x:
        return None
    kept = tensor != 0
    largest = tensor.amax()
    if not bool((kept.logical_not() | (tensor == largest)).all()):
        return None
    return as_mask(kept, MemoryLayout.of(tensor), float(largest), 0.0)
