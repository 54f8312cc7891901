"""Constant tensors are made once, but not where they would have no values for those who find them later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from laconic.activations.keep import exact_codes
from laconic.ops import codebooks, dynamic_map
from laconic.ops.constants import constant_tensor

CPU = torch.device("cpu")


def test_equal_calls_share_a_tensor_and_others_do_not() -> None:
    made: list[tuple[int, int]] = []

    @constant_tensor
    def make(a: int, b: int = 0) -> Tensor:
        made.append((a, b))
        return torch.tensor([a, b])

    assert make(1) is make(1)
    assert make(1, b=2) is make(1, b=2)
    assert make(1, b=2).tolist() == [1, 2]
    assert made == [(1, 0), (1, 2)]
    for number in range(1000):  # the oldest go, and are made again
        make(number)
    assert make(1).tolist() == [1, 0]
    assert made[-1] == (1, 0)


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (codebooks.codebook_tensor, ("nf4", CPU)),
        (codebooks.bucket_tensor, ("nf4", False, CPU)),
        (dynamic_map.dynamic_map_tensor, (True, CPU)),
        (exact_codes._steps_of_offsets, (113, (3, 3), (1, 1), CPU)),
        (exact_codes._offsets_of_steps, (113, (3, 3), (1, 1), CPU)),
    ],
)
def test_a_fake_constant_is_not_found_by_those_who_need_values(make: object, arguments: tuple[object, ...]) -> None:
    assert callable(make)
    for _ in range(2):  # the second time a real one is kept, and is none of the mode's
        with FakeTensorMode(allow_non_fake_inputs=False):
            fake = make(*arguments)
            assert isinstance(fake, FakeTensor)
            assert isinstance(fake + 1, FakeTensor)
        real = make(*arguments)
        assert type(real) is Tensor
        assert make(*arguments) is real


def test_what_a_captured_graph_makes_is_not_kept() -> None:
    made = 0

    @constant_tensor
    def make() -> Tensor:
        nonlocal made
        made += 1
        return torch.ones(3)

    stream = mock.Mock()
    with (
        mock.patch.object(Tensor, "is_cuda", True),
        mock.patch.object(torch.cuda, "current_stream", return_value=stream),
    ):
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
            make(), make()
        assert made == 2
        stream.synchronize.assert_not_called()  # which a capture refuses
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False):
            found = make()
        stream.synchronize.assert_called_once_with()
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
            assert make() is found  # what was there before may be used
    assert made == 3


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_what_is_made_in_any_mode_can_be_used_by_autograd(mode: Callable[[], AbstractContextManager[object]]) -> None:
    @constant_tensor
    def make() -> Tensor:
        return torch.ones(3)

    with mode():
        found = make()
    assert make() is found
    (torch.ones(3, requires_grad=True) * found).sum().backward()  # which keeps it for backward


def test_threads_that_make_one_together_get_the_one_that_stays() -> None:
    """Kernels are given its address, so another one would be freed under them."""
    together = threading.Barrier(2)

    @constant_tensor
    def made() -> Tensor:
        together.wait()
        return torch.zeros(4)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: made(), range(2))
    assert first is second is made()
