"""Launches of Triton kernels without a device: which kernel, in which specialization, on which grid.

A launcher of `laconic.ops.triton` runs on CPU tensors here. Triton binds and specializes the arguments of each launch
as on a device (types, alignment of pointers, integers that 16 divides), and the launch is recorded, not run.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

import laconic.ops.triton

_TARGET = GPUTarget("cuda", 80, 32)
"""Specialization is the same for every CUDA device; the kernels are compiled for the devices asked for."""
_NO_LAUNCH = {"empty", "empty_like", "new_empty", "empty_strided", "view", "_unsafe_view", "reshape", "detach", "slice"}
_NO_LAUNCH |= {"select", "alias", "as_strided", "expand", "t", "transpose", "unsqueeze", "squeeze", "lift_fresh"}


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel, specialized."""

    kernel: JITFunction
    signature: dict[str, str]
    """Type of each parameter as Triton writes it, "constexpr" for constants."""
    constants: dict[tuple[int, ...], object]
    attributes: dict[tuple[int, ...], list[list[object]]]
    options: dict[str, Any]
    """What the launcher asked the compiler for: `num_warps`, `enable_fp_fusion`."""
    num_programs: int

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.kernel.fn.__name__)

    @property
    def specialization(self) -> str:
        """All that machine code depends on, as text."""
        return repr((self.name, self.signature, self.constants, self.attributes, sorted(self.options.items())))


@dataclass(frozen=True)
class Recording:
    """What one call of an op launches."""

    launches: list[Launch]
    """Of Triton's kernels, in order."""
    torch_ops: list[str]
    """Operations of torch that launch kernels of their own, in order."""


def kernels() -> dict[str, JITFunction]:
    """Every kernel of `laconic.ops`: each function under `triton.jit` that no other such function calls."""
    functions: dict[str, JITFunction] = {}
    for module in pkgutil.walk_packages(laconic.ops.__path__, "laconic.ops."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, JITFunction) and value.fn.__module__ == module.name:
                functions[f"{module.name}.{value.fn.__name__}"] = value
    called = {name for function in functions.values() for name in _called_names(function)}
    return {name: function for name, function in functions.items() if function.fn.__name__ not in called}


def _called_names(function: JITFunction) -> Iterator[str]:
    for node in ast.walk(function.parse()):
        if isinstance(node, ast.Call):
            match node.func:
                case ast.Name(id=name) | ast.Attribute(attr=name):
                    yield name


def record(call: Callable[[], object], target: GPUTarget = _TARGET) -> Recording:
    """Run `call` on CPU tensors; record what it launches. Results hold whatever was in memory.

    Args:
        call: what launches kernels.
        target: whose rules specialize arguments: those of CUDA devices are alike.
    """
    launches: list[Launch] = []
    with _recorded(launches, target), _TorchOps() as seen:
        call()
    return Recording(launches, seen.names)


@contextmanager
def _recorded(launches: list[Launch], target: GPUTarget) -> Iterator[None]:
    backend = make_backend(target)

    def run(kernel: JITFunction, *args: object, grid: tuple[int, ...], warmup: bool, **kwargs: object) -> None:
        kwargs["debug"] = False
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialization, given = bind(*args, **kwargs)
        _, signature, constants, attributes = kernel._pack_args(backend, given, bound, specialization, given)
        launches.append(Launch(kernel, signature, constants, attributes, given, prod(grid)))

    with mock.patch.object(JITFunction, "run", run):
        yield


class _TorchOps(TorchDispatchMode):
    """Names of the operations that launch kernels on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in _NO_LAUNCH:
            self.names.append(name)
        return func(*args, **(kwargs or {}))
