"""A kernel with other bits than the reference's is refused at its first use, and only there is it looked at."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from functools import partial
from typing import Any

import pytest
import torch

import laconic
from laconic.errors import FormatError, KernelError
from laconic.ops import native, reference, self_check
from laconic.ops.declarations import OPS
from laconic.ops.lossless import DTYPE_NUMBERS
from tests.patience import patient

CPU = torch.device("cpu")


def checked(op: str, implementation: self_check.Implementation) -> self_check.Implementation:
    return self_check.checked(op, implementation, lambda _: CPU)


def tensors_of(arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """All tensors among arguments, also those of lists."""
    listed = (x if isinstance(x, list) else [x] for x in arguments)
    return [x for each in listed for x in each if isinstance(x, torch.Tensor)]


WITHOUT_CPP: frozenset[str] = frozenset()
"""Ops that have no C++ kernel on purpose: a kernel that is lost fails below."""


@pytest.mark.parametrize("op", [op for op in OPS if op not in WITHOUT_CPP])
def test_cpp_kernels_pass_and_a_wrong_bit_in_anything_they_write_is_refused(op: str) -> None:
    if not native.supported_isas():
        pytest.skip("the C++ kernels were not built")
    kernel = getattr(native, op)
    for number, (choices, arguments) in enumerate(self_check.examples(op)):
        assert self_check.difference(op, kernel, arguments, CPU) == "", choices
        writes = getattr(torch.ops.laconic, op).default._schema.arguments
        places = [i for i, argument in enumerate(writes) if argument.is_write and arguments[i] is not None]

        def flip(written: torch.Tensor | list[torch.Tensor]) -> None:
            tensor = written[-1] if isinstance(written, list) else written
            tensor.view(-1).view(torch.uint8)[tensor.element_size() - 1] ^= 1

        for place in places or [None]:

            def wrong(*given: Any, place: int | None = place) -> Any:
                results = kernel(*given)
                first = results[0] if isinstance(results, tuple) else results
                if place is not None:
                    flip(given[place])
                elif first.dim() == 0:
                    return first + 1
                else:
                    flip(first)
                return results

            before = [x.clone() for x in tensors_of(arguments)]
            for _ in range(2):  # a refusal stays
                with pytest.raises(KernelError, match=f"kernel of {op} on cpu gives other bits .* not used"):
                    checked(op, wrong)(*arguments)
            for x, y in zip(tensors_of(arguments), before, strict=True):
                assert torch.equal(x.view(-1).view(torch.uint8), y.view(-1).view(torch.uint8))
        if number == 3:
            break


def test_each_combination_is_checked_once_or_once_per_thread_that_comes_first() -> None:
    calls: list[torch.Size] = []

    def kernel(*arguments: Any) -> Any:
        calls.append(arguments[0].shape)
        return reference.sum_rows(*arguments)

    function = checked("sum_rows", kernel)
    rows, index, offsets = torch.ones(2, 3), torch.tensor([0, 1]), torch.tensor([0, 2])
    threads = [threading.Thread(target=function, args=(rows, index, offsets, None)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls.count(rows.shape) == 4
    assert 5 <= len(calls) <= 8
    calls.clear()
    function(rows, index, offsets, None)
    function(rows.bfloat16(), index, offsets, None)
    function(rows, index, offsets, torch.ones(2))
    function(rows, index, offsets, torch.ones(2))
    assert len(calls) == 4 + 2


def test_only_the_wrong_combination_is_refused() -> None:
    def kernel(x: torch.Tensor, code: str, *rest: Any) -> Any:
        codes, scales = reference.quantize_blockwise(x, code, *rest)
        return (codes ^ 1 if code == "int5" else codes), scales

    function = checked("quantize_blockwise", kernel)
    x = torch.randn(3, 64)
    assert function(x, "nf4", 64, torch.bfloat16, None)[1].shape == (3, 1)
    with pytest.raises(KernelError, match=r"quantize_blockwise on cpu .*torch\.float32, int5, 64"):
        function(x, "int5", 64, torch.bfloat16, None)
    assert function(x, "int6", 64, torch.bfloat16, None)[1].shape == (3, 1)


def test_bad_arguments_keep_their_own_error() -> None:
    with pytest.raises(FormatError, match="code is 'int7'"):
        laconic.ops.quantize_blockwise(torch.randn(64), code="int7")
    with pytest.raises(FormatError, match="block_size is 48"):
        laconic.ops.quantize_blockwise(torch.randn(64), block_size=48)
    with pytest.raises(FormatError, match=r"x.dtype is torch.int32"):
        laconic.ops.quantize_blockwise(torch.zeros(64, dtype=torch.int32))


def test_neither_random_numbers_nor_settings_of_the_caller_matter() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    examples = {op: next(self_check.examples(op))[1] for op in OPS}
    checks = []

    def kernel(op: str, *arguments: Any) -> Any:
        if torch.get_default_device() == CPU:  # the check; the caller's own call comes with the caller's device
            checks.append(op)
            return getattr(reference, op)(*arguments)
        return None

    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.inference_mode():
            for op, arguments in examples.items():
                checked(op, partial(kernel, op))(*arguments)
        assert checks == list(OPS)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.rand(3), expected)


WRONG_KERNEL = """
import sys, torch
import laconic._kernels as kernels
right = kernels.quantize_blockwise
def wrong(*arguments):
    import ctypes
    right(*arguments)
    ctypes.c_uint8.from_address(arguments[8]).value ^= 1
kernels.quantize_blockwise = wrong
import laconic.ops
from laconic.errors import KernelError
try:
    laconic.ops.quantize_blockwise(torch.randn(64))
    print("used")
except KernelError as error:
    print("refused", error)
"""


@pytest.mark.skipif(not native.supported_isas(), reason="the C++ kernels were not built")
@pytest.mark.ci
@pytest.mark.parametrize(
    ("switch", "shown"),
    [
        ("1", "refused"),
        ("0", "used"),
        pytest.param("yes", "LACONIC_CHECK_KERNELS is 'yes'", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_cpp_kernel_is_refused_by_the_op_unless_switched_off(switch: str, shown: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRONG_KERNEL],
        env=os.environ | {"LACONIC_CHECK_KERNELS": switch},
        capture_output=True,
        text=True,
        timeout=patient(120),
    )
    assert shown in done.stdout + done.stderr


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_lossless_kernels_pass_for_every_type_that_a_message_holds() -> None:
    for dtype in DTYPE_NUMBERS:
        for op, *choices in (("lossless_encode", dtype, "tiered", False), ("lossless_decode_", dtype)):
            found = self_check.difference(op, getattr(native, op), OPS[op].example(*choices), "cpu")
            assert found == "", (op, dtype)
