"""CPU: the C++ kernels of csrc/, or the reference where they were not built.

The extension knows pointers only. This file allocates, passes sizes that schemas.py has checked, and chooses the
instruction set once: the widest that the CPU runs, or the one that LACONIC_ISA names.
"""

from __future__ import annotations

import math
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from laconic.errors import ConfigError
from laconic.ops import reference
from laconic.ops.codebooks import LEVEL_MAX, codebook_tensor
from laconic.ops.schemas import LIBRARY, check_dequantize_blockwise, check_quantize_blockwise
from laconic.ops.selection import Selection, forced_isa, reference_is_forced, say_once

__all__ = ["SELECTION", "dequantize_blockwise", "quantize_blockwise", "supported_isas"]

_kernels: ModuleType | None
try:
    _kernels, _missing = import_module("laconic._kernels"), ""
except ImportError as error:
    _kernels, _missing = None, f"the compiled kernels cannot be imported ({error}); reinstall laconic to build them"

_CPU = torch.device("cpu")
# The enumeration FloatType of csrc/kernels/blockwise.h.
_FLOAT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def supported_isas() -> tuple[str, ...]:
    """Instruction sets of the C++ kernels that this CPU runs, slowest first; empty where they were not built."""
    return tuple(_kernels.supported_isas()) if _kernels is not None else ()


def _select() -> Selection:
    if reference_is_forced():
        return Selection("reference", "", "LACONIC_KERNELS asks for it")
    wanted, supported = forced_isa(), supported_isas()
    if not supported:
        if wanted:
            raise ConfigError(f"LACONIC_ISA is {wanted!r}, but {_missing}")
        return Selection("reference", "", _missing)
    if wanted:
        if wanted not in supported:
            raise ConfigError(f"LACONIC_ISA is {wanted!r}, but this CPU runs only {', '.join(supported)}")
        return Selection("c++", wanted, "LACONIC_ISA asks for it")
    return Selection("c++", supported[-1], f"the widest of what this CPU runs: {', '.join(supported)}")


def _codebook_address(code: str) -> int:
    return 0 if code == "int8" else codebook_tensor(code, _CPU).data_ptr()


def _isa_number(isa: str | None) -> int:
    return _ISAS.index(isa or SELECTION.isa)


def quantize_blockwise(
    x: Tensor,
    code: str,
    block_size: int,
    scale_dtype: torch.dtype,
    seed: int | None,
    *,
    isa: str | None = None,
    first_index: int = 0,
) -> tuple[Tensor, Tensor]:
    """`reference.quantize_blockwise` in C++, the same bits; `isa` overrides the instruction set."""
    length, num_codes, num_scales = check_quantize_blockwise(x, code, block_size, scale_dtype)
    leading = x.shape[:-1]
    if x.dim() != 2 or x.stride(1) != 1:
        x = x.contiguous()
    codes = torch.empty((*leading, num_codes), dtype=torch.uint8)
    scales = torch.empty((*leading, num_scales), dtype=scale_dtype)
    assert _kernels is not None
    _kernels.quantize_blockwise(
        _isa_number(isa),
        torch.get_num_threads(),
        x.data_ptr(),
        _FLOAT_TYPES[x.dtype],
        math.prod(leading),
        x.stride(0) if x.dim() == 2 else length,
        length,
        block_size,
        codes.data_ptr(),
        scales.data_ptr(),
        _FLOAT_TYPES[scale_dtype],
        LEVEL_MAX[code],
        _codebook_address(code),
        seed is not None,
        seed or 0,
        first_index,
    )
    return codes, scales


def dequantize_blockwise(
    codes: Tensor,
    scales: Tensor,
    code: str,
    block_size: int,
    length: int,
    dtype: torch.dtype,
    *,
    isa: str | None = None,
) -> Tensor:
    """`reference.dequantize_blockwise` in C++, the same bits; `isa` overrides the instruction set."""
    check_dequantize_blockwise(codes, scales, code, block_size, length, dtype)
    codes, scales = codes.contiguous(), scales.contiguous()
    values = torch.empty((*codes.shape[:-1], length), dtype=dtype)
    assert _kernels is not None
    _kernels.dequantize_blockwise(
        _isa_number(isa),
        torch.get_num_threads(),
        codes.data_ptr(),
        scales.data_ptr(),
        _FLOAT_TYPES[scales.dtype],
        math.prod(codes.shape[:-1]),
        length,
        block_size,
        values.data_ptr(),
        _FLOAT_TYPES[dtype],
        _codebook_address(code),
    )
    return values


def _quantize_by_reference(
    x: Tensor, code: str, block_size: int, scale_dtype: torch.dtype, seed: int | None
) -> tuple[Tensor, Tensor]:
    say_once("cpu", SELECTION.reason)
    return reference.quantize_blockwise(x, code, block_size, scale_dtype, seed)


_ISAS = supported_isas()
SELECTION = _select()
"""What runs on CPU tensors in this process."""

if SELECTION.implementation == "c++":
    LIBRARY.impl("quantize_blockwise", quantize_blockwise, "CPU")
    LIBRARY.impl("dequantize_blockwise", dequantize_blockwise, "CPU")
else:
    LIBRARY.impl("quantize_blockwise", _quantize_by_reference, "CPU")
