"""The compiled extension, loaded once: the CPU's widest instruction set, or the one that LACONIC_ISA names."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from laconic.errors import ConfigError
from laconic.ops.selection import Selection, forced_isa, reference_is_forced

__all__ = ["FLOAT_TYPES", "ISA_NUMBERS", "SELECTION", "kernels", "supported_isas"]

kernels: Any
"""The extension module; None if it was not built."""
try:
    kernels, _missing = import_module("laconic._kernels"), ""
except ImportError as error:
    kernels, _missing = None, f"the compiled kernels cannot be imported ({error}); reinstall laconic to build them"

FLOAT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The enumeration FloatType of csrc/kernels/blockwise.h."""


def supported_isas() -> tuple[str, ...]:
    """Instruction sets of the C++ kernels that this CPU runs, slowest first; empty where they were not built."""
    return tuple(kernels.supported_isas()) if kernels is not None else ()


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


SELECTION = _select()
"""What runs on CPU tensors in this process."""

ISA_NUMBERS: dict[str | None, int] = {isa: number for number, isa in enumerate(supported_isas())}
"""The extension's number of each instruction set, and under None of the selected one."""
ISA_NUMBERS[None] = ISA_NUMBERS.get(SELECTION.isa, -1)
