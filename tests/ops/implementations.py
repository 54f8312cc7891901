"""The kernels that run here: C++, with every instruction set at once, and Triton.

A property that all of them have is one test with `@each_kernel`, and takes its kernels as `kernels`. Triton decides at
import whether it interprets: without a GPU `test_interpreted.py` runs these tests once more in a process with the
interpreter, whose table holds Triton alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from laconic.ops import native, reference
from laconic.ops.declarations import OPS
from tests.ops.cases import same_bits
from tests.ops.interpreter import DEVICE, INTERPRETED

T = TypeVar("T")


@dataclass(frozen=True)
class Kernels:
    """One implementation of every op. It takes an op's arguments in order and tensors on the CPU, and returns such."""

    name: str

    def __getattr__(self, op: str) -> Callable[..., Any]:
        if op not in OPS:
            raise AttributeError(op)
        if self.name == "reference":
            return getattr(reference, op)
        if self.name != "triton":
            kernel = getattr(native, op, None)  # an op without C++ kernels runs the reference
            return partial(kernel, isa=self.name) if kernel else getattr(reference, op)
        kernel = getattr(import_module(f"laconic.ops.triton.{OPS[op].family}"), op)

        def call(*arguments: Any, **options: Any) -> Any:
            there = _moved(arguments, DEVICE)
            results = kernel(*there, **options)
            if DEVICE != "cpu":
                for argument, here, changed in zip(_arguments(op), arguments, there, strict=False):
                    if _is_written(argument):
                        tree_map(lambda x, y: x.copy_(y) if isinstance(x, Tensor) else None, here, changed)
            return _moved(results, "cpu")

        return call

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Alike:
    """Implementations as one: a call runs all of them, and what they return and write must have the same bits."""

    name: str
    members: tuple[Kernels, ...]

    def __getattr__(self, op: str) -> Callable[..., Any]:
        runs = [getattr(member, op) for member in self.members]

        def call(*arguments: Any, **options: Any) -> Any:
            given = [arguments, *(_with_own_results(op, arguments) for _ in runs[1:])]
            found = [(run(*own, **options), own) for run, own in zip(runs, given, strict=True)]
            for member, other in zip(self.members, found, strict=True):
                assert all(map(_same, tree_leaves(other), tree_leaves(found[0]))), (op, member.name)
            return found[0][0]

        return call

    def __str__(self) -> str:
        return self.name


def _arguments(op: str) -> Any:
    return getattr(torch.ops.laconic, op).default._schema.arguments


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _with_own_results(op: str, arguments: Sequence[Any]) -> list[Any]:
    """The arguments with copies of what the op writes to."""
    return [
        tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, value) if _is_written(argument) else value
        for argument, value in zip(_arguments(op), arguments, strict=False)
    ]


def _same(a: Any, b: Any) -> bool:
    return a is b or (same_bits(a, b) if isinstance(a, Tensor) else a == b)


def _moved(values: Any, device: str) -> Any:
    return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, values)


REFERENCE = Kernels("reference")
NATIVE = [] if INTERPRETED else [Kernels(isa) for isa in native.supported_isas()]
_ALL_NATIVE = [Alike("native", (*NATIVE,))] if NATIVE else []
_TRITON = [Kernels("triton")] if INTERPRETED or (torch.cuda.is_available() and find_spec("triton")) else []
CPU_IMPLEMENTATIONS = [REFERENCE, *NATIVE]
ON_CPU = Alike("cpu", (*CPU_IMPLEMENTATIONS,))

each_kernel = pytest.mark.parametrize("kernels", [*_ALL_NATIVE, *_TRITON], ids=str)
each_native = pytest.mark.parametrize("kernels", _ALL_NATIVE, ids=str)
"""For what only C++ has: threads."""
each_implementation = pytest.mark.parametrize("ops", [ON_CPU, *_TRITON], ids=str)


def few(cases: Sequence[T], step: int, start: int = 0) -> Sequence[T]:
    """All cases; in the interpreter, which is slow, every `step`-th of them."""
    return cases[start % step :: step] if INTERPRETED else cases


def num_examples(number: int) -> int:
    """For hypothesis: a fifth in the interpreter."""
    return number // 5 if INTERPRETED else number
