"""Notes on tensors that several forwards or several models read: each gets its own values, in its own precision."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.activations import SavedTensorTracker
from laconic.activations.keep.kept import Kept, Memo, attach, found, keep
from laconic.activations.keep.witnesses import RootForward
from laconic.formats import BlockFormat
from tests.grid import grid

FEATURES = 64
T = TypeVar("T")


def make_block() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(FEATURES), nn.Linear(FEATURES, FEATURES), nn.GELU(), nn.Linear(FEATURES, 8))


def compressed(model: nn.Module, x: Tensor, **options: Any) -> nn.Module:
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, mode="sites", example_inputs={"input": x.detach().clone()}, **options)
    return twin


def in_a_root(function: Callable[[], T]) -> T:
    return cast(T, RootForward().run_root(function, (), {}))


def gradients(loss: Tensor, model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    return (y * weights).sum()


@pytest.mark.parametrize(
    ("backward_between", "kind", "order"),
    grid([True, False], ["batch", "leaf", "trunk"], list(itertools.permutations((4, 6, 8))), strength=1),
)
def test_models_of_any_order_read_one_tensor_in_their_own_precision(
    order: tuple[int, ...], kind: str, backward_between: bool
) -> None:
    model, data = make_block(), torch.randn(32, FEATURES)

    def make_input() -> Tensor:
        x = data.clone()
        return x if kind == "batch" else x.requires_grad_() if kind == "leaf" else x.requires_grad_() * 1.0

    twins = {bits: compressed(model, data, bits=bits) for bits in order}
    alone = {bits: gradients(loss_of(twins[bits], make_input()), twins[bits]) for bits in order}
    exact = gradients(loss_of(model, data), model)
    x = make_input()
    losses, together = {}, {}
    for bits in order:
        losses[bits] = loss_of(twins[bits], x)
        if backward_between:
            together[bits] = gradients(losses[bits], twins[bits])
    for bits in order:
        got = together.get(bits) or gradients(losses[bits], twins[bits])
        # More bits than asked for may be read; fewer may not.
        for value, expected, target in zip(got, alone[bits], exact, strict=True):
            assert (value - target).norm() <= 1.05 * (expected - target).norm() + 1e-5 * target.norm()


def test_a_batch_filled_again_behind_the_back_of_torch_is_packed_again() -> None:
    array = torch.randn(32, FEATURES).numpy()
    batch, model = torch.from_numpy(array), make_block()
    twin = compressed(model, torch.randn(32, FEATURES))
    for read in (True, False):
        before = loss_of(twin, batch)
        if read:
            before.backward()
        else:
            del before
            gc.collect()
        array[:] = torch.randn(32, FEATURES).numpy()
        for got, expected in zip(
            gradients(loss_of(twin, batch), twin), gradients(loss_of(twin, batch.clone()), twin), strict=True
        ):
            assert torch.equal(got, expected)


def test_a_student_an_average_and_a_teacher_of_one_batch() -> None:
    x, model = torch.randn(32, FEATURES), make_block()
    student = compressed(model, x)
    average = copy.deepcopy(student)
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.mul_(0.5)
    alone = gradients(loss_of(student, x.clone()), student)
    with torch.no_grad():
        average(x)
    first, second = loss_of(average, x), loss_of(student, x)
    for got, expected in zip(gradients(second, student), alone, strict=True):
        assert torch.equal(got, expected)
    expected_average = gradients(loss_of(average, x.clone()), average)
    for got, expected in zip(gradients(first, average), expected_average, strict=True):
        assert torch.equal(got, expected)


class Twice(nn.Module):
    """Reads its input in two layers; the parts may read copies."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(FEATURES, 8), nn.Linear(FEATURES, 8)
        self.copies = False

    def forward(self, input: Tensor) -> Tensor:
        y: Tensor = self.one(input) + self.two(input.clone() if self.copies else input)
        return y


def test_one_forward_keeps_a_batch_once_and_two_keep_it_twice() -> None:
    x = torch.randn(64, FEATURES)
    model = compressed(Twice(), x)

    def nbytes(*batches: Tensor) -> int:
        with SavedTensorTracker(model) as tracker:
            losses = [model(batch) for batch in batches]
            assert losses
            return tracker.nbytes

    packed = BlockFormat("nf4").nbytes(x.shape)
    once = nbytes(x)
    assert nbytes(x, x) == nbytes(x.clone(), x.clone()) == 2 * once
    model.copies = True
    assert nbytes(x) == once + packed


def test_the_note_on_a_batch_ends_with_the_graph_and_frees_the_codes() -> None:
    x, format = torch.randn(64, FEATURES), BlockFormat("int8")

    def write_and_end() -> weakref.ref[Tensor]:
        kept = keep(x, format, "linear")
        codes = weakref.ref(kept.tensors[0])
        assert found(x) is not None
        del kept
        gc.collect()
        assert found(x) is None
        return codes

    assert in_a_root(write_and_end)() is None


def test_the_note_on_a_batch_ends_with_the_first_value_taken() -> None:
    x, format = torch.randn(64, FEATURES), BlockFormat("int8")

    def read() -> None:
        kept = keep(x, format, "linear")
        assert keep(x, format, "linear").memo is kept.memo
        kept.memo.announce()
        kept.memo.take(kept.tensors)
        assert found(x) is None
        assert keep(x, format, "linear").memo is not kept.memo

    in_a_root(read)


def test_the_note_on_a_batch_is_read_in_its_root_forward_only() -> None:
    x, format = torch.randn(64, FEATURES), BlockFormat("int8")
    kept = in_a_root(lambda: keep(x, format, "linear"))
    assert found(x) is None  # outside of it
    assert in_a_root(lambda: found(x)) is None  # in the next
    assert kept.memo is not in_a_root(lambda: keep(x, format, "linear")).memo
    assert keep(x, format, "linear").memo is not keep(x, format, "linear").memo  # none outside of a root


@pytest.mark.parametrize(
    ("layout", "shape", "dtype"),
    grid(
        ["contiguous", "transposed", "sliced", "expanded", "channels last"],
        [(), (1,), (3,), (17,), (33, 7), (4, 5, 6, 7), (0, 8)],
        [torch.float32, torch.bfloat16, torch.float16],
    ),
)
def test_a_note_holds_as_long_as_the_values_do(dtype: torch.dtype, shape: tuple[int, ...], layout: str) -> None:
    x = torch.randn(shape).to(dtype)
    if layout == "transposed" and x.dim() > 1:
        x = x.transpose(0, -1)
    elif layout == "sliced" and x.dim():
        x = torch.randn(*shape[:-1], 3 * shape[-1]).to(dtype)[..., shape[-1] : 2 * shape[-1]]
    elif layout == "expanded":
        x = x.unsqueeze(0).expand(3, *shape)
    elif layout == "channels last" and x.dim() == 4:
        x = x.to(memory_format=torch.channels_last)
    x = x.detach().requires_grad_().view_as(x)  # of a graph, so the note lasts
    if x.numel():
        x.data.view(-1)[:1].fill_(float("nan")) if x.is_contiguous() else None
    attach(x, Kept((), Memo(lambda tensors, after: x), "test"))
    assert found(x) is not None
    if x.numel():
        x.data = x.data + 1 if layout == "expanded" else x.data
        with torch.no_grad():
            x.data.copy_(torch.randn(x.shape))
        assert found(x) is None
