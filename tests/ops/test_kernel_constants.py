"""What a launch of a Triton kernel costs the host beside Triton's own work."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

import pytest

import laconic.ops.triton
from laconic.ops.triton.kernel_constants import KernelConstant

pytest.importorskip("triton")


def kernels() -> list[Any]:
    from triton.runtime.jit import JITFunction

    names = [module.name for module in pkgutil.iter_modules(laconic.ops.triton.__path__)]
    values = [value for name in names for value in vars(import_module(f"laconic.ops.triton.{name}")).values()]
    found = {value.__name__: value for value in values if type(value) is JITFunction}
    return [found[name] for name in sorted(found) if name.endswith("_kernel")]


def test_every_number_that_a_kernel_uses_is_its_own_copy() -> None:
    """Triton compares them at every launch with `!=`, at 4 us for a tl.constexpr."""
    for kernel in kernels():
        _ = kernel.cache_key
        for (name, _), (value, scope) in kernel.used_global_vals.items():
            assert isinstance(value, KernelConstant), f"{kernel.__name__} uses {name}"
            assert scope[name] is value


def test_other_numbers_differ() -> None:
    assert KernelConstant(3) != KernelConstant(4)
    assert (KernelConstant(3) != KernelConstant(3)) is False
