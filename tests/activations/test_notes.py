"""Notes on tensors that several forwards or several models read: each gets its own values, in its own precision."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.activations import SavedTensorTracker
from laconic.activations.kept import found, keep
from laconic.formats import BlockFormat

FEATURES = 64


def make_block() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(FEATURES), nn.Linear(FEATURES, FEATURES), nn.GELU(), nn.Linear(FEATURES, 8))


def compressed(model: nn.Module, x: Tensor, **options: Any) -> nn.Module:
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, mode="sites", example_inputs={"input": x.detach().clone()}, **options)
    return twin


def gradients(loss: Tensor, model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    return (y * weights).sum()


@pytest.mark.parametrize("order", list(itertools.permutations((4, 6, 8))), ids=str)
@pytest.mark.parametrize("kind", ["batch", "leaf", "trunk"])
@pytest.mark.parametrize("backward_between", [True, False])
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


def test_one_model_that_reads_a_batch_twice_keeps_it_once() -> None:
    x = torch.randn(64, FEATURES)
    model = compressed(make_block(), x)

    def nbytes(*batches: Tensor) -> int:
        with SavedTensorTracker(model) as tracker:
            losses = [model(batch) for batch in batches]
            assert losses
            return tracker.nbytes

    packed = BlockFormat("nf4").nbytes(x.shape)
    assert nbytes(x.clone(), x.clone()) - nbytes(*[x.clone()] * 2) >= packed


def test_the_note_on_a_batch_ends_with_the_graph_and_frees_the_codes() -> None:
    x, format = torch.randn(64, FEATURES), BlockFormat("int8")
    kept = keep(x, format, "linear")
    codes = weakref.ref(kept.tensors[0])
    assert found(x) is not None
    del kept
    gc.collect()
    assert found(x) is None
    assert codes() is None


def test_the_note_on_a_batch_ends_with_the_first_value_taken() -> None:
    x, format = torch.randn(64, FEATURES), BlockFormat("int8")
    kept = keep(x, format, "linear")
    kept.memo.announce()
    kept.memo.take(kept.tensors)
    assert found(x) is None
    assert keep(x, format, "linear").memo is not kept.memo
