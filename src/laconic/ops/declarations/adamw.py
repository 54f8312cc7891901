"""AdamW with moments in 8 or 4 bits: the declarations. One parameter is a list of one."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from laconic.errors import FormatError
from laconic.ops.adamw_scalars import AdamWScalars, adamw_scalars
from laconic.ops.codebooks import GRADIENT_BLOCK_SIZE
from laconic.ops.declarations.accumulate import store_example
from laconic.ops.declarations.op import (
    DIRECT,
    DTYPES,
    Arguments,
    declare,
    is_direct,
    names,
    random_bytes,
    random_values,
)
from laconic.options import MOMENT_BLOCK_SIZES


class AdamWTensors(NamedTuple):
    """The tensors of one parameter, in the order of adamw8bit_'s arguments."""

    parameter: Tensor
    exp_avg_codes: Tensor
    exp_avg_scales: Tensor
    exp_avg_sq_codes: Tensor
    exp_avg_sq_scales: Tensor
    gradient: Tensor
    gradient_scales: Tensor | None
    residual_codes: Tensor | None
    residual_scales: Tensor | None


_KIND = ("parameter.dtype", "parameter.device", "gradient.dtype")
_LISTS = ("parameters", *AdamWTensors._fields[1:5], "gradients", *AdamWTensors._fields[6:])


@dataclass(frozen=True)
class AdamWStep:
    """The arguments of one call of adamw8bit_multi_, checked."""

    each: list[AdamWTensors]
    shapes: list[tuple[int, int]]
    """Rows and length of a row of each parameter: the shape that blocks run along."""
    gradient_factor: Tensor | None
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    maximize: bool
    bits: int = 8
    """Of a code of a moment."""
    ratio: float | None = None
    """See adamw_scalars."""

    @property
    def scalars(self) -> AdamWScalars:
        """The numbers of this step, the same for all elements."""
        return adamw_scalars(self.lr, self.beta1, self.beta2, self.eps, self.weight_decay, self.step, self.ratio)


def checked_step(*arguments: Any) -> AdamWStep:
    """Check the arguments of adamw8bit_multi_, in its order: nine lists of tensors, and what is the same for all.

    Raises:
        FormatError: an argument breaks its rule; the message names field, value and rule.
    """
    lists, (gradient_factor, *numbers) = arguments[:9], arguments[9:]
    count = len(lists[0])
    for number, (name, tensors) in enumerate(zip(_LISTS, lists, strict=True)):
        if len(tensors) != count and (tensors or number < 6):
            rule = f"{count}, one for each parameter" + ("" if number < 6 else ", or 0")
            raise FormatError(f"{name} has {len(tensors)} tensors, but it must have {rule}")
    # An empty list is None for each.
    each = [AdamWTensors(*tensors) for tensors in zip(*(part or [None] * count for part in lists), strict=True)]
    step = AdamWStep(each, [], gradient_factor, *numbers)
    kinds = [(tensors.parameter.dtype, tensors.parameter.device, tensors.gradient.dtype) for tensors in each]
    for index, tensors in enumerate(each):
        try:
            step.shapes.append(_check_one(tensors, gradient_factor, step.step, step.bits, step.ratio))
        except FormatError as error:
            raise FormatError(f"tensor {index}: {error}") from None
        for name, found, first in zip(_KIND, kinds[index], kinds[0], strict=True):
            if found != first:
                raise FormatError(
                    f"tensor {index}: {name} is {found}, but it must be {first}, as that of tensor 0; make one call"
                    " for each dtype and device"
                )
    if share_memory(lists[0]):
        raise FormatError(
            "two of the parameters share memory, but a device updates all at once; make one call for each"
        )
    return step


def _check_one(
    tensors: AdamWTensors, gradient_factor: Tensor | None, step: int, bits: int, ratio: float | None
) -> tuple[int, int]:
    """Check the arguments of one parameter; return its rows and the length of a row."""
    parameter, exp_avg_codes, exp_avg_scales, exp_avg_sq_codes, exp_avg_sq_scales = tensors[:5]
    gradient, gradient_scales, residual_codes, residual_scales = tensors[5:]
    if parameter.dtype not in DTYPES:
        raise FormatError(f"parameter.dtype is {parameter.dtype}, but it must be one of {names(DTYPES)}")
    if bits not in MOMENT_BLOCK_SIZES:
        raise FormatError(f"bits is {bits}, but it must be one of {', '.join(map(str, MOMENT_BLOCK_SIZES))}")
    if step < 1:
        raise FormatError(f"step is {step}, but it must be at least 1, the number of the first step")
    if ratio is not None and not ratio > 0:
        raise FormatError(f"ratio is {ratio}, but it must be above 0, or None")

    # 1. Moments: codes like the parameter, or two in a byte by row; scales by row.
    rows = exp_avg_scales.shape[0] if exp_avg_scales.dim() == 2 else 0
    length = parameter.numel() // rows if rows else 0
    block_size = MOMENT_BLOCK_SIZES[bits]
    scales_shape = (rows, (length + block_size - 1) // block_size)
    codes_shape: tuple[int, ...] = parameter.shape
    if bits == 4:  # of no rows the length is not known
        codes_shape = (rows, (length + 1) // 2) if rows else exp_avg_codes.shape
    if parameter.numel() != rows * length or (rows and exp_avg_scales.shape[1] != scales_shape[1]):
        raise FormatError(
            f"exp_avg_scales has shape {tuple(exp_avg_scales.shape)}, but for a parameter with {parameter.numel()}"
            f" elements it must be [rows, ceil(elements / rows / {block_size})]"
        )
    n = parameter.numel()
    expected: list[tuple[str, Tensor, tuple[int, ...], tuple[torch.dtype, ...]]] = [
        ("parameter", parameter, parameter.shape, DTYPES),
        ("exp_avg_codes", exp_avg_codes, codes_shape, (torch.uint8,)),
        ("exp_avg_scales", exp_avg_scales, exp_avg_scales.shape, (torch.float32,)),
        ("exp_avg_sq_codes", exp_avg_sq_codes, codes_shape, (torch.uint8,)),
        ("exp_avg_sq_scales", exp_avg_sq_scales, exp_avg_scales.shape, (torch.float32,)),
    ]

    # 2. The gradient: dense, or flat codes.
    num_scales = (n + GRADIENT_BLOCK_SIZE - 1) // GRADIENT_BLOCK_SIZE
    if gradient_scales is None:
        expected.append(("gradient", gradient, parameter.shape, DTYPES))
    else:
        expected.append(("gradient", gradient, (n,), (torch.uint8,)))
        expected.append(("gradient_scales", gradient_scales, (num_scales,), (torch.float32,)))
    if (residual_codes is None) != (residual_scales is None):
        raise FormatError("residual_codes and residual_scales belong together, but one of them is None")
    if residual_codes is not None and residual_scales is not None:
        if gradient_scales is None:
            raise FormatError("residual_codes is given for a dense gradient, but only a quantized one has a residual")
        expected.append(("residual_codes", residual_codes, ((n + 1) // 2,), (torch.uint8,)))
        expected.append(("residual_scales", residual_scales, (num_scales,), (torch.float32,)))
    if gradient_factor is not None:
        expected.append(("gradient_factor", gradient_factor, (), (torch.float32,)))

    # 3. Every tensor as the kernels read it.
    device = parameter.device
    for name, tensor, shape, dtypes in expected:
        if tensor.shape != shape:
            raise FormatError(f"{name} has shape {tuple(tensor.shape)}, but it must be {tuple(shape)}")
        if tensor.dtype not in dtypes:
            raise FormatError(f"{name}.dtype is {tensor.dtype}, but it must be {names(dtypes)}")
        if tensor.device != device:
            raise FormatError(f"{name} is on {tensor.device}, but it must be on {device}, as the parameter")
        if not tensor.is_contiguous():
            raise FormatError(
                f"{name} has strides {tensor.stride()}, but it must be contiguous; pass a contiguous copy"
            )
    return rows, length


def _check_step(*arguments: Any) -> None:
    checked_step(*arguments)


def _check_arguments_of_one(*arguments: Any) -> None:
    bits = arguments[17] if len(arguments) > 17 else 8  # torch leaves defaults out
    ratio = arguments[18] if len(arguments) > 18 else None
    _check_one(AdamWTensors(*arguments[:9]), arguments[9], arguments[15], bits, ratio)


def share_memory(tensors: list[Tensor]) -> bool:
    """Whether two of the tensors, of any strides, span a common byte; those without memory (meta, fake) share none."""
    spans = []
    for tensor in tensors:
        if (numel := tensor.numel()) and not tensor.is_meta and not isinstance(tensor, FakeTensor):
            last = numel - 1
            if not tensor.is_contiguous():
                last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            spans.append((start, start + (last + 1) * tensor.element_size()))
    spans.sort()
    return any(end > start for (_, end), (start, _) in pairwise(spans))


def _example_of_one(
    dtype: torch.dtype, gradient_dtype: torch.dtype, has_residual: bool, shape: tuple[int, int], bits: int
) -> AdamWTensors:
    rows, n = shape[0], shape[0] * shape[1]
    moments = [
        part
        for seed in (1, 2)
        for part in (
            random_bytes(rows, -(-shape[1] * bits // 8), seed=seed),
            random_values(rows, -(-shape[1] // MOMENT_BLOCK_SIZES[bits]), seed=seed).abs(),
        )
    ]
    if gradient_dtype == torch.uint8:
        gradient: Arguments = store_example(n, has_residual)
    else:
        dense = random_values(*shape, seed=5).to(gradient_dtype)
        dense[0, 0] = min(2e19, torch.finfo(gradient_dtype).max)  # whose square is not finite
        gradient = (dense, None, None, None)
    return AdamWTensors(random_values(*shape, seed=6).to(dtype), *moments, *gradient)


def _example(
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    is_quantized: bool,
    has_residual: bool,
    has_factor: bool,
    maximizes: bool,
    is_alone: bool,
    bits: int = 8,
) -> Arguments:
    # Whole blocks; ragged rows, whose accesses are narrow; a tensor of several programs.
    shapes = ((4, 2 * MOMENT_BLOCK_SIZES[bits]), (3, 300), (9, 3 * MOMENT_BLOCK_SIZES[bits]))[: 1 if is_alone else 3]
    each = [_example_of_one(dtype, gradient_dtype, has_residual, shape, bits) for shape in shapes]
    lists = [[] if tensors[0] is None else list(tensors) for tensors in zip(*each, strict=True)]
    factor = torch.tensor(0.75, dtype=torch.float32, device="cpu") if has_factor else None
    return *lists, factor, 1e-3, 0.9, 0.999, 1e-8, 0.1, 3, maximizes, bits


def _choices_of(*arguments: Any) -> Arguments:
    parameters, gradients = arguments[0], arguments[5]
    return (
        parameters[0].dtype if parameters else torch.float32,
        gradients[0].dtype if gradients else torch.float32,  # the implementation refuses what does not fit
        bool(arguments[6]),
        bool(arguments[7]),
        arguments[9] is not None,
        bool(arguments[16]),
        len(parameters) == 1,  # on CUDA another kernel
        arguments[17] if len(arguments) > 17 else 8,  # torch leaves defaults out
    )


_adamw8bit_multi_ = declare(
    "adamw8bit_multi_(Tensor(a!)[] parameters, Tensor(b!)[] exp_avg_codes, Tensor(c!)[] exp_avg_scales,"
    " Tensor(d!)[] exp_avg_sq_codes, Tensor(e!)[] exp_avg_sq_scales, Tensor[] gradients, Tensor[] gradient_scales,"
    " Tensor[] residual_codes, Tensor[] residual_scales, Tensor? gradient_factor, float lr, float beta1, float beta2,"
    " float eps, float weight_decay, int step, bool maximize, int bits=8,"
    " float? ratio=None) -> ()",
    fake=_check_step,
    example=_example,
    choices_of=_choices_of,
    examples=[
        (torch.float32, torch.float32, False, False, False, False, False, 8),
        (torch.bfloat16, torch.bfloat16, False, False, True, True, True, 8),
        (torch.bfloat16, torch.uint8, True, False, False, False, False, 8),
        (torch.float16, torch.uint8, True, True, True, False, True, 8),
        (torch.bfloat16, torch.bfloat16, False, False, True, True, False, 8),
        (torch.float16, torch.uint8, True, True, True, False, False, 8),
        (torch.float32, torch.float32, False, False, False, False, True, 8),
        (torch.float32, torch.float32, False, False, False, False, True, 4),
        (torch.bfloat16, torch.uint8, True, True, True, True, False, 4),
    ],
)


def adamw8bit_multi_(
    parameters: list[Tensor],
    exp_avg_codes: list[Tensor],
    exp_avg_scales: list[Tensor],
    exp_avg_sq_codes: list[Tensor],
    exp_avg_sq_scales: list[Tensor],
    gradients: list[Tensor],
    gradient_scales: list[Tensor] | None = None,
    residual_codes: list[Tensor] | None = None,
    residual_scales: list[Tensor] | None = None,
    *,
    gradient_factor: Tensor | None = None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    maximize: bool = False,
    bits: int = 8,
    ratio: float | None = None,
) -> None:
    """`adamw8bit_` of many parameters with the same bits, on CUDA in one launch however many they are.

    Two launches where some parameters do not begin at multiples of 16 bytes or have rows that are no multiple of 16
    elements; one for each parameter while a CUDA graph is captured. The device reads addresses from a table; a table is
    used again only by a call with the same addresses and sizes, so that it cannot be out of date.

    Args:
        parameters: of one dtype on one device, no two of which share memory; of no parameter nothing happens.
        exp_avg_codes, exp_avg_scales, exp_avg_sq_codes, exp_avg_sq_scales: one for each parameter.
        gradients: one for each parameter, of one dtype, all dense or all codes.
        gradient_scales, residual_codes, residual_scales: one for each parameter; None if the gradients have none.
        gradient_factor, lr, beta1, beta2, eps, weight_decay, step, maximize, bits, ratio: as in `adamw8bit_`, the
            same for all.

    Raises:
        FormatError: an argument is outside of these values; nothing has changed then.
    """
    if parameters:
        _adamw8bit_multi_(
            parameters, exp_avg_codes, exp_avg_scales, exp_avg_sq_codes, exp_avg_sq_scales, gradients,
            gradient_scales or [], residual_codes or [], residual_scales or [], gradient_factor, lr, beta1, beta2, eps,
            weight_decay, step, maximize, bits, ratio,
        )  # fmt: skip


def _by_lists(*arguments: Any) -> None:
    """adamw8bit_ as adamw8bit_multi_ of lists of one."""
    lists = [[] if tensor is None else [tensor] for tensor in arguments[:9]]
    run = DIRECT["adamw8bit_multi_"] if is_direct(*arguments[:10]) else _adamw8bit_multi_
    try:
        run(*lists, *arguments[9:])
    except FormatError as error:
        raise FormatError(str(error).removeprefix("tensor 0: ")) from None


_adamw8bit_ = declare(
    "adamw8bit_(Tensor(a!) parameter, Tensor(b!) exp_avg_codes, Tensor(c!) exp_avg_scales, Tensor(d!) exp_avg_sq_codes,"
    " Tensor(e!) exp_avg_sq_scales, Tensor gradient, Tensor? gradient_scales, Tensor? residual_codes,"
    " Tensor? residual_scales, Tensor? gradient_factor, float lr, float beta1, float beta2, float eps,"
    " float weight_decay, int step, bool maximize, int bits=8,"
    " float? ratio=None) -> ()",
    fake=_check_arguments_of_one,
    composed=_by_lists,
)


def adamw8bit_(
    parameter: Tensor,
    exp_avg_codes: Tensor,
    exp_avg_scales: Tensor,
    exp_avg_sq_codes: Tensor,
    exp_avg_sq_scales: Tensor,
    gradient: Tensor,
    gradient_scales: Tensor | None = None,
    residual_codes: Tensor | None = None,
    residual_scales: Tensor | None = None,
    *,
    gradient_factor: Tensor | None = None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    maximize: bool = False,
    bits: int = 8,
    ratio: float | None = None,
) -> None:
    """One step of AdamW with moments in 8 or 4 bits, in place, one pass over the data.

    No weight moves by more than lr * C(step) + lr * weight_decay * |weight|, Adam's own worst case (adamw_scalars.py),
    plus its rounding. A block that meets NaN or infinity gets scale NaN.

    Args:
        parameter: [...], float32, bfloat16 or float16. It is cut into rows that blocks of 256, or of
            128 in 4 bits, run along: `rows` rows of
            n / rows elements each, in the order of the contiguous tensor.
        exp_avg_codes, exp_avg_sq_codes: codes of the signed and of the unsigned map of ops/dynamic_map.py, uint8 [...];
            in 4 bits uint8 [rows, ceil(n / rows / 2)], the first of two in the low half of a byte.
        exp_avg_scales, exp_avg_sq_scales: fp32 [rows, ceil(n / rows / 256)], or / 128 in 4 bits.
        gradient: [...], float32, bfloat16 or float16; or the int8 codes of a quantized gradient, uint8 [n], with
            gradient_scales fp32 [ceil(n / 128)] and, at 12 bits, residual_codes uint8 [ceil(n / 2)] and
            residual_scales fp32 [ceil(n / 128)].
        gradient_factor: fp32, 0-d; the gradient is multiplied by it. It is not read by the host.
        lr, beta1, beta2, eps, weight_decay, maximize: as in torch.optim.AdamW. eps counts as at least 2**-126.
        step: number of this step, 1 for the first.
        bits: of a code of a moment, 8 or 4.
        ratio: a bound on |m| / sqrt(v) of exact moments, where steps before had other betas (adamw_scalars.py).

    Raises:
        FormatError: an argument is outside of these values.
    """
    _adamw8bit_(
        parameter, exp_avg_codes, exp_avg_scales, exp_avg_sq_codes, exp_avg_sq_scales, gradient, gradient_scales,
        residual_codes, residual_scales, gradient_factor, lr, beta1, beta2, eps, weight_decay, step, maximize, bits,
        ratio,
    )  # fmt: skip
