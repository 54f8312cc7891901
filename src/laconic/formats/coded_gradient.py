"""A gradient in codes that torch takes for a tensor: the value of `parameter.grad` while gradients are compressed.

A reader (an optimizer, clip_grad_norm_, GradScaler, DDP's reducer, print) gets its values; a write is rounded to codes
once. So a gradient is in one place only, `parameter.grad`, as everywhere in torch.

Adding a gradient, scaling, the 2-norm and zeroing work on codes and scales. Everything else works on the dequantized
values. Views are computed when they are used, so writing through one reaches the codes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from laconic.errors import FormatError, TrainingError
from laconic.formats.gradient import QuantizedGradient
from laconic.formats.shards import local_part, sharded_like
from laconic.ops import DTYPES

Use = Literal["add", "scale", "zero", "write", "read"]
"""What is done with a gradient: more is added, it is multiplied, zeroed, values are replaced, values are used."""


class Guard(Protocol):
    """Called before each use of a gradient; raises where the use would be wrong at this moment."""

    def __call__(self, use: Use) -> None:
        """Raises if the use would be wrong."""

    def copy(self) -> Guard:
        """The guard of a copy of the gradient."""


_aten = torch.ops.aten
_ALIASES = (_aten.detach.default, _aten.alias.default)
_SAME_VALUES = (*_ALIASES, _aten.view.default, _aten._unsafe_view.default, _aten.expand.default)


class CodedGradient(Tensor):
    """A tensor of a parameter's shape and device, and its gradient's dtype, with the values of a QuantizedGradient."""

    codes: QuantizedGradient
    """The codes and scales themselves; aliases and views share them."""
    guard: Guard | None
    """Whom to ask before each use."""
    _path: tuple[Callable[[Tensor], Tensor], ...]
    """From the whole gradient to this view of it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        codes: QuantizedGradient,
        dtype: torch.dtype,
        guard: Guard | None = None,
        stride: Sequence[int] | None = None,
    ) -> CodedGradient:
        """`stride` is that of the parameter, which layouts of gradients follow; None is contiguous."""
        whole = torch.empty(codes.shape, dtype=dtype, device="meta")
        return cls._make(codes, whole if stride is None else whole.as_strided(codes.shape, stride), guard, ())

    @classmethod
    def _make(
        cls, codes: QuantizedGradient, like: Tensor, guard: Guard | None, path: tuple[Callable[[Tensor], Tensor], ...]
    ) -> CodedGradient:
        with torch.inference_mode(False):  # what is made inside could not be written to outside
            made: CodedGradient = torch.Tensor._make_wrapper_subclass(
                cls, like.size(), strides=like.stride(), dtype=like.dtype, device=codes.codes.device
            )
        # An extension that reads addresses must fail, not read address 0.
        torch._C._set_throw_on_mutable_data_ptr(made)
        made.codes, made.guard, made._path = codes, guard, path
        return made

    @property
    def is_whole(self) -> bool:
        """Whether this is the gradient and not a view of a part of it."""
        return not self._path

    def check(self, use: Use) -> None:
        """Ask the guard, and raise what it raises."""
        if self.guard is not None:
            self.guard(use)

    def dequantize_whole(self) -> Tensor:
        """The whole gradient in this dtype, laid out as the parameter is; does not ask the guard."""
        value = self.codes.dequantize().to(self.dtype)
        if self.is_whole and value.stride() != self.stride():
            value = torch.empty_strided(self.size(), self.stride(), dtype=self.dtype, device=self.device).copy_(value)
        return value

    def dequantize(self) -> Tensor:
        """The values, a plain tensor of this shape and dtype."""
        self.check("read")
        return self._of(self.dequantize_whole())

    def _of(self, whole: Tensor) -> Tensor:
        for step in self._path:
            whole = step(whole)
        return whole

    # --- what C++ does by addresses ---

    def numpy(self, *, force: bool = False) -> Any:
        """The values as a numpy array that cannot be written to: it is a copy, and the gradient would not change."""
        values = self.dequantize().numpy(force=force)
        values.flags.writeable = False
        return values

    def share_memory_(self) -> Tensor:
        """Refused: this tensor has no memory of its own that torch could move.

        Raises:
            FormatError: always.
        """
        raise FormatError(
            "a gradient in codes cannot be moved to shared memory (model.share_memory() moves gradients too); share the"
            " model before its first backward, or call zero_grad() first"
        )

    def tolist(self) -> Any:
        """The values as nested lists."""
        return self.dequantize().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copied = self.dequantize().clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dequantize().clone().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        part = "" if self.is_whole else ", a view"
        return f"CodedGradient(shape={tuple(self.shape)}, dtype={self.dtype}, bits={self.codes.bits}{part})"

    @property
    def data(self) -> Tensor:
        """The same gradient; assigned to when a module moves to another dtype or device."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, CodedGradient):
            self.check("write")
            codes = QuantizedGradient.zeros(value.shape, self.codes.bits, value.device)
            codes.assign_(value)
            value = CodedGradient(codes, value.dtype, self.guard, value.stride())
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.codes, self._path = value.codes, value._path

    # --- what torch's operators do ---

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None:
            result = handler(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if func.namespace == "c10d":
            raise TrainingError(
                f"{func.__name__} was called on a gradient in codes, but codes cannot be added in a collective; give"
                " compress_gradients the group and call reduce(), or call dequantize_to_grad() before"
            )
        first = args[0] if args else None
        if func.is_view and isinstance(first, CodedGradient):
            return _view(func, first, args[1:], kwargs)
        written = [
            value
            for argument, value in _by_name(func, args, kwargs)
            if argument.alias_info is not None and argument.alias_info.is_write and not _only_reads(func, argument)
        ]
        targets = [one for value in written for one in _coded(value)]
        if targets:
            return _write(func, targets, args, kwargs)
        if func in (_aten.mul.out, _aten.copy_.default) and torch._C._current_graph_task_id() != -1:
            _warn_of_buckets()
        return func(*tree_map(_dense, args), **tree_map(_dense, kwargs))


def quantized_gradient(parameter: Tensor) -> QuantizedGradient | None:
    """The codes of `parameter.grad`, of the local shard if it is a DTensor; None if it has no gradient in codes."""
    coded = coded_gradient(parameter)
    return None if coded is None else coded.codes


def coded_gradient(parameter: Tensor) -> CodedGradient | None:
    """`parameter.grad`, or the local part of it, if it is in codes."""
    gradient = parameter.grad
    if gradient is None or type(gradient) is Tensor:  # most are, of any parameter of any step
        return None
    with torch.no_grad():
        local = local_part(gradient)
    return local if isinstance(local, CodedGradient) and local.is_whole else None


def set_quantized_gradient(parameter: Tensor, gradient: QuantizedGradient | None, guard: Guard | None = None) -> None:
    """Make `parameter.grad` a gradient in codes, or with None take one in codes away.

    Args:
        parameter: plain, or a DTensor.
        gradient: of the shape of what this rank holds of the parameter.
        guard: called before each use.

    Raises:
        FormatError: the gradient has another shape.
    """
    if gradient is None:
        if coded_gradient(parameter) is not None:
            parameter.grad = None
        return
    with torch.no_grad():
        local = local_part(parameter)
        if gradient.shape != local.shape:
            raise FormatError(
                f"the quantized gradient has shape {tuple(gradient.shape)}, but what this process holds of the"
                f" parameter has {tuple(local.shape)}"
            )
        coded = CodedGradient(gradient, _gradient_dtype(parameter), guard, local.stride())
        parameter.grad = sharded_like(coded, parameter)


def _gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of a parameter's gradient, which need not be that of the parameter (Tensor.grad_dtype)."""
    if parameter.grad is not None:
        return parameter.grad.dtype
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


# --- operators ---


def _dense(value: Any) -> Any:
    return value.dequantize() if isinstance(value, CodedGradient) else value


def _coded(value: Any) -> list[CodedGradient]:
    values = value if isinstance(value, list | tuple) else [value]
    return [one for one in values if isinstance(one, CodedGradient)]


def _by_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    """The schema's arguments and their values, those that were given."""
    named = list(zip(func._schema.arguments, args, strict=False))
    return named + [(argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs]


def _only_reads(func: Any, argument: Any) -> bool:
    """Whether an operator only reads an argument that its schema declares as written.

    torch's fused optimizers declare gradients as written, because they can unscale them; without a scale they read.
    Scaled losses go through GradScaler.unscale_ first.
    """
    return str(func.__name__).startswith("_fused_") and bool(argument.name == "grads")


def _view(func: Any, base: CodedGradient, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    like = torch.empty_strided(base.size(), base.stride(), dtype=base.dtype, device="meta")
    made = func(like, *rest, **kwargs)
    if isinstance(made, list | tuple):

        def part(at: int) -> Callable[[Tensor], Tensor]:
            return lambda x: func(x, *rest, **kwargs)[at]

        return [
            CodedGradient._make(base.codes, one, base.guard, (*base._path, part(at))) for at, one in enumerate(made)
        ]
    same = func in _SAME_VALUES and made.shape == like.shape and made.stride() == like.stride()
    path = base._path if same else (*base._path, lambda x: func(x, *rest, **kwargs))
    return CodedGradient._make(base.codes, made, base.guard, path)


def _write(func: Any, targets: list[CodedGradient], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that writes to gradients on their values, then store what it wrote."""
    if torch.Tag.inplace_view in func.tags:
        raise FormatError(
            f"{func.__name__} would change the shape of a gradient in codes in place; take a view of it, or a copy"
            " with clone()"
        )
    wholes: dict[int, Tensor] = {}
    dense: dict[int, Tensor] = {}
    for target in targets:
        target.check("write")
        whole = wholes.setdefault(id(target.codes), target.dequantize_whole())
        dense[id(target)] = target._of(whole)

    def replaced(value: Any) -> Any:
        return dense.get(id(value), _dense(value)) if id(value) in dense else _dense(value)

    result = func(*tree_map(replaced, args), **tree_map(replaced, kwargs))
    for target in targets:
        if dense[id(target)].shape != target.shape:
            raise FormatError(
                f"{func.__name__} would give a gradient of shape {tuple(target.shape)} the shape"
                f" {tuple(dense[id(target)].shape)}; copy it with clone() first"
            )
        target.codes.assign_(wholes[id(target.codes)])
    back = {id(dense[id(target)]): target for target in targets}
    return tree_map(lambda value: back.get(id(value), value), result)


def _add(func: Any, self: Any, other: Any, *, alpha: Any = 1) -> Any:
    if not isinstance(self, CodedGradient):
        return NotImplemented
    self.check("add")
    plain = isinstance(other, Tensor) and other.dtype in DTYPES and other.layout == torch.strided
    if not self.is_whole or not plain or other.shape != self.shape or other.device != self.device:
        whole = self.dequantize_whole()
        func(self._of(whole), _dense(other), alpha=alpha)
        self.codes.assign_(whole)
    else:
        self.codes.accumulate_(_dense(other), alpha=float(alpha))
    return self


def _scale(func: Any, self: Any, factor: Any, **options: Any) -> Any:
    if not isinstance(self, CodedGradient) or not self.is_whole or options:
        return NotImplemented
    if isinstance(factor, Tensor) and factor.dim() > 0:
        return NotImplemented
    self.check("scale")
    for scales in self.codes.all_scales():
        func(scales, factor)
    return self


def _zero(func: Any, self: Any) -> Any:
    if not self.is_whole:
        return NotImplemented
    self.check("zero")
    self.codes.zero_()
    return self


def _copy(func: Any, self: Any, source: Any, non_blocking: bool = False) -> Any:
    if not isinstance(self, CodedGradient) or not self.is_whole:
        return NotImplemented
    self.check("write")
    values = _dense(source)
    self.codes.assign_(values.to(self.device, self.dtype).expand(self.shape))
    return self


def _move(func: Any, self: CodedGradient, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    """A copy in another dtype or on another device: codes move, values are not looked at."""
    if not self.is_whole or (dtype is not None and not dtype.is_floating_point):
        return NotImplemented
    codes = self.codes.to(self.device if device is None else device)
    guard = None if self.guard is None else self.guard.copy()
    like = torch.empty_strided(self.size(), self.stride(), dtype=dtype or self.dtype, device="meta")
    return CodedGradient._make(codes, like, guard, ())


def _norm(func: Any, self: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    if not isinstance(self, CodedGradient) or not self.is_whole or ord != 2 or dim is not None or keepdim:
        return NotImplemented
    self.check("read")
    return self.codes.square_sum().sqrt().to(dtype or self.dtype)


def _norms(func: Any, tensors: Any, ord: Any = 2, dtype: Any = None) -> Any:
    return [_aten.linalg_vector_norm.default(one, ord, dtype=dtype) for one in tensors]


def _zeros(func: Any, tensors: Any) -> None:
    for one in tensors:
        one.zero_()


def _scales(func: Any, tensors: Any, factor: Any) -> None:
    for at, one in enumerate(tensors):
        one.mul_(factor[at] if isinstance(factor, list | tuple) else factor)


def _unscale(func: Any, tensors: Any, found_inf: Tensor, inv_scale: Tensor) -> None:
    """What GradScaler does: multiply, and say whether any value is not finite."""
    for one in tensors:
        if isinstance(one, CodedGradient):
            one.check("read")
            one.mul_(inv_scale)
            finite = one.codes.square_sum().isfinite()
            found_inf.copy_(torch.where(finite, found_inf, torch.ones_like(found_inf)))
        else:
            func([one], found_inf, inv_scale)


def _nothing(func: Any, self: Any) -> Any:
    return self


_HANDLERS: dict[Any, Callable[..., Any]] = {
    _aten.add_.Tensor: _add,
    _aten.mul_.Tensor: _scale,
    _aten.mul_.Scalar: _scale,
    _aten.div_.Tensor: _scale,
    _aten.div_.Scalar: _scale,
    _aten.zero_.default: _zero,
    _aten.copy_.default: _copy,
    _aten.detach_.default: _nothing,
    _aten._to_copy.default: _move,
    _aten.linalg_vector_norm.default: _norm,
    _aten._foreach_norm.Scalar: _norms,
    _aten._foreach_zero_.default: _zeros,
    _aten._foreach_mul_.Scalar: _scales,
    _aten._foreach_mul_.Tensor: _scales,
    _aten._foreach_mul_.ScalarList: _scales,
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}


@cache
def _warn_of_buckets() -> None:
    warnings.warn(
        "gradients in codes are copied into full-precision buckets during backward, as DistributedDataParallel does:"
        " results are right, but the buckets take 4 bytes per element; compress_gradients(model, group) without"
        " DistributedDataParallel reduces the codes themselves",
        stacklevel=2,
    )
