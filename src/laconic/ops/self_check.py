"""Kernels beside the plain-torch reference on small inputs, at the first use of an op and in `laconic doctor`.

`checked` wraps an implementation. Before its first call with a combination of dtypes, formats and options it runs the
implementation on a small input of that combination; other bits than the reference's raise `KernelError`, and the
implementation is not used. LACONIC_CHECK_KERNELS=0 switches this off.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from laconic.errors import ConfigError, FormatError, KernelError
from laconic.ops import reference
from laconic.ops.declarations.op import OPS, Arguments, Choices

Implementation = Callable[..., Any]
_CPU = torch.device("cpu")


def examples(op: str) -> Iterator[tuple[Choices, Arguments]]:
    """Choices that cover the code of an op's kernels, and arguments on the CPU for each."""
    for chosen in OPS[op].examples:
        yield chosen, OPS[op].example(*chosen)


# --- the comparison ---


def difference(op: str, implementation: Implementation, arguments: Arguments, device: torch.device | str) -> str:
    """Run an op and its reference on the same arguments.

    Args:
        op: one of `OPS` of `declarations`.
        implementation: takes the op's arguments, positional.
        arguments: tensors on the CPU; they are copied.
        device: where the implementation runs.

    Returns:
        "" if all results and all tensors written to have the same bits; else which of them differ.
    """
    there, here = ([_copied(argument, where) for argument in arguments] for where in (device, "cpu"))
    with torch.no_grad(), _on_cpu():
        found = _tensors(op, implementation(*there), there)
        expected = _tensors(op, getattr(reference, op)(*here), here)
    wrong = [name for name, truth in expected.items() if not _same_bits(found[name].cpu(), truth)]
    return ", ".join(wrong)


def _on_cpu() -> AbstractContextManager[object]:
    """New tensors lie on the CPU, whatever the caller's default device is; not by a mode in vain, which costs time."""
    return nullcontext() if torch.get_default_device() == _CPU else _CPU


def _tensors(op: str, results: Any, arguments: list[Any]) -> dict[str, Tensor]:
    """Results and arguments by name; an op may write to the arguments."""
    listed = results if isinstance(results, (tuple, list)) else () if results is None else (results,)
    named = {f"result {number}": x for number, x in enumerate(listed)}
    if named:
        named["result 0"] = OPS[op].significant(named["result 0"])
    for number, argument in enumerate(arguments):
        if isinstance(argument, list):
            named |= {f"argument {number}[{index}]": x for index, x in enumerate(argument)}
        elif isinstance(argument, Tensor):
            named[f"argument {number}"] = argument
    return named


def _copied(argument: Any, device: torch.device | str) -> Any:
    """An argument with copies of its tensors on a device; lists are lists of tensors."""
    if isinstance(argument, list):
        return [x.to(device, copy=True) for x in argument]
    return argument.to(device, copy=True) if isinstance(argument, Tensor) else argument


def _same_bits(found: Tensor, truth: Tensor) -> bool:
    if found.shape != truth.shape or found.dtype != truth.dtype:
        return False
    found, truth = (x.contiguous().view(-1).view(torch.uint8) for x in (found, truth))
    return torch.equal(found, truth)


# --- the first use ---


def _is_switched_on() -> bool:
    value = os.environ.get("LACONIC_CHECK_KERNELS", "1")
    if value not in ("0", "1"):
        raise ConfigError(f"LACONIC_CHECK_KERNELS is {value!r}, but it must be 1 (the default), or 0 to trust kernels")
    return value == "1"


IS_ON = _is_switched_on()
"""Whether kernels are held against the reference at their first use."""


def checked(
    op: str, implementation: Implementation, device_of: Callable[[Arguments], torch.device] | None = None
) -> Implementation:
    """`implementation`, refused if it does not give the reference's bits on a small input.

    Args:
        op: one of `OPS` of `declarations`.
        implementation: takes the op's arguments, positional.
        device_of: the device of the op's arguments; None if that is the CPU.

    Returns:
        A function like `implementation`. Its first call with each combination of device, dtypes, formats and options
        checks it; while a CUDA graph is captured nothing is checked, and the next call outside of a capture does it.
        `KernelError` names op, device and combination, at every call with it.
    """
    if not IS_ON:
        return implementation
    example, choices_of = OPS[op].example, OPS[op].choices_of
    verdicts: dict[Choices, str] = {}

    # No lock: two threads may both check, but a process forked in the middle of a check cannot wait for ever.
    def check(key: Choices) -> str:
        device, *choices = key
        # The implementation itself words its refusal of a format that is not known.
        try:
            with torch.no_grad(), _on_cpu():
                arguments = example(*choices)
        except FormatError:
            return ""
        verdicts[key] = difference(op, implementation, arguments, device)
        return verdicts[key]

    def call(*arguments: Any) -> Any:
        key = (_CPU if device_of is None else device_of(arguments), *choices_of(*arguments))
        wrong = verdicts.get(key)
        if wrong is None and not (key[0].type == "cuda" and torch.cuda.is_current_stream_capturing()):
            wrong = check(key)
        if wrong:
            raise KernelError(
                f"the kernel of {op} on {key[0]} gives other bits than the reference for"
                f" ({', '.join(map(str, key[1:]))}): {wrong}; its result was not used. Set LACONIC_KERNELS=reference to"
                " run plain torch, and report what `laconic doctor` says"
            )
        return implementation(*arguments)

    return call
