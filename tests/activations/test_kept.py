"""Memos free what their last reader has had; notes on DTensors, and on what a tensor is a full view of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from laconic.activations.keep.kept import Kept, Memo, attach, found, keep, known, pack
from laconic.formats import BlockFormat


def memo_of(x: Tensor, *inner: Memo) -> Memo:
    return Memo(lambda tensors, after: x.clone(), inner)


@pytest.mark.parametrize("readers", [1, 2, 5])
@pytest.mark.parametrize("last", ["take", "leave"])
def test_a_value_is_held_until_its_last_reader_has_taken_it_or_left(readers: int, last: str) -> None:
    memo = memo_of(torch.ones(3))
    for _ in range(readers + 1):
        memo.announce()
    value = memo.take(())
    for _ in range(readers - 1):
        assert memo.take(()) is value
    assert memo._value is value
    if last == "take":
        assert memo.take(()) is value
    else:
        memo.leave()
    assert memo._value is None


def test_a_reader_that_leaves_early_takes_nothing_from_the_others() -> None:
    memo = memo_of(torch.ones(3))
    for _ in range(3):
        memo.announce()
    value = memo.take(())
    memo.leave()
    assert memo._value is value
    assert memo.take(()) is value
    assert memo._value is None


@pytest.mark.parametrize("readers", [1, 2, 5])
def test_what_a_value_is_made_of_is_held_as_long_as_that_value_is_wanted(readers: int) -> None:
    inner = memo_of(torch.ones(3))
    outer = Memo(lambda tensors, after: inner.take(tensors, after) * 2, (inner,))
    inner.announce()  # a reader of its own
    for _ in range(readers):
        outer.announce()
    for _ in range(readers):
        outer.take(())
    assert inner._value is not None
    inner.take(())
    assert inner._value is None


@pytest.mark.parametrize("readers", [1, 2, 5])
def test_who_does_without_a_value_does_without_what_it_is_made_of(readers: int) -> None:
    inner = memo_of(torch.ones(3))
    outer = Memo(lambda tensors, after: inner.take(tensors, after) * 2, (inner,))
    inner.announce()
    for _ in range(readers):
        outer.announce()
    for _ in range(readers):
        outer.leave()
    inner.take(())
    assert inner._value is None


@pytest.mark.parametrize("shape", [(24, 64), (2, 3, 4, 64), (24 * 64,)])
def test_a_full_view_is_rebuilt_in_its_own_shape(shape: tuple[int, ...]) -> None:
    x = torch.randn(4, 6, 64)
    whole = x.clone().requires_grad_() * 1
    attach(whole, Kept((whole.detach(),), memo_of(whole.detach()), "test"))
    kept = found(whole.view(shape))
    assert kept is not None
    assert torch.equal(kept.memo.take(kept.tensors), whole.detach().view(shape))


@pytest.mark.parametrize(("numel", "bits"), [(1, None), (2, None), (3, 8)])  # of 2, 4 and 6 bytes, in 3, 4 and 5
def test_what_codes_do_not_shorten_is_kept_as_it_is(numel: int, bits: int | None) -> None:
    x = torch.randn(numel).bfloat16()
    kept = pack(x, BlockFormat("int8", 64, torch.bfloat16), "linear")
    assert kept.bits == bits
    assert (kept.tensors[0] is x) == (bits is None)


def test_an_output_that_its_producer_saves_is_kept_as_it_is() -> None:
    x = torch.randn(4, 64, requires_grad=True)
    part = torch.tanh(x)[1:]
    held = known(part)
    assert held is not None
    assert held.tensors[0] is part
    part.data = part.detach().clone()  # memory that nobody holds but this tensor
    assert known(part) is None
    assert known(torch.sin(x)) is None


class CompiledFunction(torch.autograd.Function):
    """Shows what it saves under the name that nodes of compiled graphs have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, saves_output: bool) -> Tensor:
        y = 2 * x
        ctx.save_for_backward(y if saves_output else x)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return 2 * grad, None


class OfTheUser(CompiledFunction):
    """The same under another name."""


def test_what_a_compiled_graph_saves_is_kept_as_it_is() -> None:
    x = torch.randn(4, 64, requires_grad=True)
    y = CompiledFunction.apply(x, True)
    held = known(y)
    assert held is not None
    assert held.tensors[0] is y
    assert known(CompiledFunction.apply(x, False)) is None
    assert known(OfTheUser.apply(x, True)) is None
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        assert known(CompiledFunction.apply(x, True)) is None  # to read it would be to unpack it


@pytest.mark.parametrize("shape", [(4, 6, 64), (24, 64), (2, 3, 4, 64)])
def test_what_is_kept_of_a_dtensor_is_found_on_the_tensor_it_was_made_from(
    shape: tuple[int, ...], mesh: DeviceMesh
) -> None:
    whole = torch.randn(4, 6, 64).requires_grad_() * 1
    first, second = (DTensor.from_local(whole.view(shape), mesh, [Replicate()]) for _ in range(2))
    kept = keep(first, BlockFormat("int8"), "linear")
    rebuilt = kept.memo.take(kept.tensors)
    assert isinstance(rebuilt, DTensor)
    torch.testing.assert_close(rebuilt.to_local(), whole.detach().view(shape), rtol=0, atol=0.05)
    again = keep(second, BlockFormat("int8"), "linear")
    assert [tensor.data_ptr() for tensor in again.tensors] == [tensor.data_ptr() for tensor in kept.tensors]
    of_whole = found(whole)
    assert of_whole is not None
    torch.testing.assert_close(of_whole.memo.take(of_whole.tensors), whole.detach(), rtol=0, atol=0.05)
