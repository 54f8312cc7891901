"""CUDA: the Triton kernels, imported at the first call that needs them."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from laconic.ops import reference
from laconic.ops.declarations import implement
from laconic.ops.selection import Selection, reference_is_forced, warn_once
from laconic.ops.self_check import checked

__all__ = ["implement_on_cuda", "selection"]


@cache
def selection() -> Selection:
    """What runs on CUDA tensors in this process."""
    if reference_is_forced():
        return Selection("reference", "", "LACONIC_KERNELS asks for it")
    if find_spec("triton") is None:
        return Selection("reference", "", "the package triton is not installed")
    return Selection("triton", "", "the package triton is installed")


@cache
def _family(name: str) -> ModuleType:
    """The module with the kernels of a family of ops, or the reference."""
    chosen = selection()
    if chosen.implementation == "reference":
        warn_once("cuda", chosen.reason)
        return reference
    if find_spec(f"laconic.ops.triton.{name}") is None:
        warn_once("cuda", f"there are no kernels for {name} yet")
        return reference
    return import_module(f"laconic.ops.triton.{name}")


def implement_on_cuda(op: str, family: str) -> None:
    """Make `op` run on CUDA tensors: the function of the same name in laconic/ops/triton/<family>.py."""

    def call(*args: Any) -> Any:
        return getattr(_family(family), op)(*args)

    kernel = checked(op, call, _device_of)

    def call_checked(*args: Any) -> Any:
        return (call if _family(family) is reference else kernel)(*args)

    implement(op, call_checked, "CUDA")


def _device_of(arguments: tuple[Any, ...]) -> torch.device:
    """Where the first tensor is that the arguments hold, themselves or in lists."""
    listed = (argument if isinstance(argument, list) else [argument] for argument in arguments)
    return next(x.device for tensors in listed for x in tensors if isinstance(x, torch.Tensor))
