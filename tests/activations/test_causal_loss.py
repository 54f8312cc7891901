"""The loss of causal language models has the bits of transformers' loss, and fewer copies of the logits."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss

import laconic
from benchmarks.kit.allocated import peak_of_step
from laconic.activations import SavedTensorTracker
from laconic.activations.forwards.replacement import replacements_of
from laconic.activations.whole_model import causal_loss
from laconic.activations.whole_model.causal_loss import CausalLossForward, standing_in
from laconic.errors import ModelError
from tests.activations.models import gradients_of, make_ids, make_model, relative_error
from tests.grid import grid

VOCABULARY = 1000


def numbers(dtype: torch.dtype, tokens: int = 33) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(3, tokens, VOCABULARY, generator=generator) * 5).to(dtype)
    labels = torch.randint(VOCABULARY, (3, tokens), generator=generator)
    labels[0, 2:9] = -100
    return logits.requires_grad_(), labels


OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"num_items_in_batch": torch.tensor(17)},
    "ignored": {"ignore_index": 5},
    "nothing counts": {"shift_labels": torch.full((3, 33), -100)},
    "unknown": {"num_items_in_batch": 3, "use_cache": False},
}


@pytest.mark.parametrize(
    ("name", "dtype", "tile"),
    grid(list(OPTIONS), [torch.float32, torch.bfloat16, torch.float16], [1, 7 * VOCABULARY + 3, 1 << 20]),
)
def test_value_and_gradient_have_the_same_bits(
    name: str, dtype: torch.dtype, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(causal_loss.TILES, "cpu", tile)
    logits, labels = numbers(dtype)
    if name == "ignored":
        labels = labels.clamp(min=0)
    kept = []
    results = []
    for function in (ForCausalLMLoss, causal_loss.causal_loss):
        with SavedTensorTracker(torch.nn.Identity()) as tracker:
            value = function(logits, labels, vocab_size=VOCABULARY, **OPTIONS[name])
        kept.append(tracker.nbytes)
        grads = [torch.autograd.grad(value * 3, logits, retain_graph=True)[0] for _ in range(2)]
        assert torch.equal(grads[0].nan_to_num(7.0), grads[1].nan_to_num(7.0))
        results.append((value.detach(), grads[0]))
    for got, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert kept[1] <= kept[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_labels_out_of_range_are_refused(dtype: torch.dtype) -> None:
    logits, labels = numbers(dtype)
    labels[1, 1] = VOCABULARY
    with pytest.raises(IndexError, match="out of bounds"):
        causal_loss.causal_loss(logits, labels, vocab_size=VOCABULARY)


def test_a_converted_model_has_the_same_loss_and_a_lower_peak() -> None:
    model = make_model("llama", vocab_size=10000).bfloat16()
    ids = make_ids(2, 96)
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin)
    losses = [each(input_ids=ids, labels=ids).loss for each in (model, twin)]
    assert torch.equal(*losses)
    # Told so, the step asks the model for its loss.
    before, after = (peak_of_step(each, ids, bf16=False, micro_batches=1, chunked=True) for each in (model, twin))
    # At the peak there were three tensors of fp32 logits, and are the logits and their gradient in the model's dtype.
    fp32 = 4 * ids.numel() * 10000
    assert before - after > 1.2 * fp32


def test_gradients_behind_the_loss_are_those_of_the_plain_one() -> None:
    model = make_model("llama")
    twin = copy.deepcopy(model)
    laconic.compress_activations(
        twin, policy=lambda site: laconic.BlockFormat("int8") if site.name == "lm_head" else None
    )
    ids = make_ids()
    for each in (model, twin):
        each(input_ids=ids, labels=ids, num_items_in_batch=50).loss.backward()
    expected, got = gradients_of(model), gradients_of(twin)
    assert torch.equal(got["model.layers.1.mlp.up_proj.weight"], expected["model.layers.1.mlp.up_proj.weight"])


def test_a_loss_that_the_model_is_given_is_asked() -> None:
    model, ids = make_model("llama"), make_ids()
    laconic.compress_activations(model)
    calls = []

    def own(logits: Tensor, labels: Tensor, vocab_size: int, **options: Any) -> Tensor:
        calls.append(logits.shape)
        return logits.float().square().mean()

    before = model(input_ids=ids, labels=ids).loss
    model.loss_function = own
    assert model(input_ids=ids, labels=ids).loss != before
    assert len(calls) == 1
    assert model.loss_function is own
    del model._loss_function
    with pytest.raises(RuntimeError):
        model(input_ids=ids, labels=ids[:, :7])
    assert "_loss_function" not in vars(model)
    assert torch.equal(model(input_ids=ids, labels=ids).loss, before)


@pytest.mark.parametrize("call", ["names", "positions", "other names"])
def test_a_loss_with_other_arguments_gets_them_as_they_are(call: str) -> None:
    """ConvNext's loss, for one, has no argument called logits."""
    model = make_model("llama")
    laconic.compress_activations(model, bits=4, example_inputs={"input_ids": make_ids()})
    (forward,) = [each for each in replacements_of(model) if isinstance(each, CausalLossForward)]
    asked: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def loss(*args: Any, **kwargs: Any) -> str:
        asked.append((args, kwargs))
        return "loss"

    model.loss_function = loss
    given: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "names": ((), {"logits": torch.ones(2, 3), "labels": 1}),
        "positions": ((torch.ones(2, 3), 1), {}),
        "other names": ((), {"pooled_logits": torch.ones(2, 3), "config": None}),
    }
    args, kwargs = given[call]
    with standing_in(model, forward._loss):
        assert model.loss_function(*args, **kwargs) == "loss"
    assert asked == [(args, kwargs)]
    assert model.loss_function is loss


def test_it_is_copied_and_taken_out_with_the_rest() -> None:
    model, ids = make_model("llama"), make_ids()
    laconic.compress_activations(model)
    assert any(isinstance(forward, CausalLossForward) for forward in replacements_of(model))
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        found = [forward for forward in replacements_of(each) if isinstance(forward, CausalLossForward)]
        assert [forward.module for forward in found] == [each]
        assert torch.equal(each(input_ids=ids, labels=ids).loss, model(input_ids=ids, labels=ids).loss)
    laconic.decompress_activations(model)
    assert "forward" not in vars(model)
    exact = make_model("llama")
    laconic.compress_activations(exact, bits=16)
    assert not any(isinstance(forward, CausalLossForward) for forward in replacements_of(exact))


@pytest.mark.parametrize("num_items", [None, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_second_derivatives_are_those_of_transformers(dtype: torch.dtype, num_items: int | None) -> None:
    found = []
    for loss in (ForCausalLMLoss, causal_loss.causal_loss):
        logits, labels = numbers(dtype, 4)
        value = loss(logits * 2, labels, vocab_size=VOCABULARY, num_items_in_batch=num_items)
        (grad,) = torch.autograd.grad(value, logits, create_graph=True)
        found.append((grad, *torch.autograd.grad(grad.square().sum(), logits)))
    for expected, got in zip(*found, strict=True):
        assert expected.dtype == got.dtype == dtype
        assert relative_error(got, expected) < (1e-5 if dtype == torch.float32 else 0.02)


def test_a_function_of_transformers_that_computes_something_else_is_not_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "transformers.loss.loss_utils.ForCausalLMLoss", lambda *args, **kwargs: 2 * ForCausalLMLoss(*args, **kwargs)
    )
    assert not causal_loss.has_causal_loss(make_model("llama"))


def test_a_function_of_transformers_that_honours_further_arguments_is_not_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers takes and ignores them, and a model's own call may bring any."""

    def smoothed(*args: Any, label_smoothing: float = 0.0, **kwargs: Any) -> Any:
        return ForCausalLMLoss(*args, **kwargs) * (1 - label_smoothing)

    monkeypatch.setattr("transformers.loss.loss_utils.ForCausalLMLoss", smoothed)
    assert not causal_loss.has_causal_loss(make_model("llama"))


def test_hooks_around_see_what_is_kept() -> None:
    logits, labels = numbers(torch.bfloat16)
    expected = torch.autograd.grad(ForCausalLMLoss(logits, labels, vocab_size=VOCABULARY), logits)[0]
    with torch.autograd.graph.save_on_cpu():
        value = causal_loss.causal_loss(logits, labels, vocab_size=VOCABULARY)
    assert torch.equal(torch.autograd.grad(value, logits)[0], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda logits: logits.mul_(2), "modified by an inplace operation"),
        (lambda logits: logits.data.zero_(), "a tensor of logits .* holds other values in backward"),
        (lambda logits: logits.detach().view(torch.int16).numpy().fill(0), "a tensor of logits .* holds other values"),
    ],
)
def test_logits_that_are_changed_before_backward_are_refused(dtype: torch.dtype, change: Any, error: str) -> None:
    leaf, labels = numbers(dtype)
    logits = leaf * 1
    value = causal_loss.causal_loss(logits, labels, vocab_size=VOCABULARY)
    change(logits)
    with pytest.raises((RuntimeError, ModelError), match=error):
        value.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_more_than_the_logits_is_kept(dtype: torch.dtype) -> None:
    logits, labels = numbers(dtype)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.nbytes) or x, lambda x: x):
        causal_loss.causal_loss(logits, labels, vocab_size=VOCABULARY)
    assert max(kept) == logits.nbytes
