"""A model in somebody else's loop: whichever part is called first is audited, and what was not is said."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laconic
from laconic.activations import SavedTensorTracker
from laconic.auditing import audit_first_call, audit_now
from laconic.errors import AuditError
from tests.activations.models import make_ids, make_model
from tests.audit import faults

Step = Callable[[nn.Module, Tensor], Tensor]


def whole(model: nn.Module, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def decoder(model: nn.Module, ids: Tensor) -> Tensor:
    """A loss in pieces, as trainers of preferences compute it."""
    hidden = model.get_submodule("model")(input_ids=ids).last_hidden_state
    logits = model.get_submodule("lm_head")(hidden[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def layer(model: nn.Module, ids: Tensor) -> Tensor:
    """Nothing that has most of the parameters is called."""
    inner = model.get_submodule("model")
    x = inner.get_submodule("embed_tokens")(ids)
    y: Tensor = inner.get_submodule("layers")[0].get_submodule("mlp")(x)
    return y.square().mean()


def train(step: Step, steps: int = 2) -> nn.Module:
    model = make_model("llama").train()
    laconic.compress_activations(model)
    audit_first_call(model)
    optimizer = laconic.AdamW8bit(model.parameters(), weight_decay=0.5)
    for number in range(steps):
        step(model, make_ids(4, 24, seed=number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (whole, "audit: as in the exact computation: loss bit for bit, gradients of 21 parameters"),
        (decoder, "left out: what is not in model, which is called by itself"),
        (layer, "audit: nothing was compared; left out: all, as no training call of the model was seen"),
    ],
)
def test_one_line_says_what_was_compared(step: Step, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = train(step)
    lines = [line for line in capsys.readouterr().err.splitlines() if "laconic audit: " in line]
    assert len(lines) == 1
    assert said in lines[0]
    if step is not layer:
        assert not any("_FirstCall" in repr(h) for m in model.modules() for h in m._forward_pre_hooks.values())


@pytest.mark.parametrize("step", [whole, decoder])
@pytest.mark.parametrize(
    "plant", [faults.linear_layers_pass_no_gradient_on, faults.what_is_rebuilt_is_twice_as_large,
              faults.weight_decay_is_applied_twice],
)  # fmt: skip
def test_a_fault_is_refused_whatever_is_called(
    step: Step, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AuditError):
        train(step)


def test_nothing_is_left_out_where_the_part_has_all_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(make_model("llama").train())
    laconic.compress_activations(model, example_inputs={"input": make_ids(2, 24)})
    audit_first_call(model)
    whole(model[0], make_ids(4, 24)).backward()
    said = capsys.readouterr().err
    assert "gradients of 21 parameters" in said
    assert "left out" not in said


@pytest.mark.parametrize("drops", [False, True])
def test_a_tracker_counts_the_call_and_not_its_audit(drops: bool, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model("llama").train()
    laconic.compress_activations(model)
    with SavedTensorTracker(model, drops=drops) as unaudited:
        whole(model, make_ids(4, 24))
    audit_first_call(model)
    with SavedTensorTracker(model, drops=drops) as audited:
        whole(model, make_ids(4, 24))
    assert "audit: as in the exact computation" in capsys.readouterr().err
    assert audited.by_module == unaudited.by_module
    assert not audited.was_asked


def test_a_copy_has_hooks_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model("llama").train()
    laconic.compress_activations(model)
    audit_first_call(model)
    other = copy.deepcopy(model)
    whole(model, make_ids(4, 24)).backward()
    whole(other, make_ids(4, 24)).backward()
    assert capsys.readouterr().err.count("audit: as in the exact computation") == 2


def test_an_audit_of_a_call_returns_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    ids = make_ids(2, 16)
    model = make_model("llama").train()
    laconic.compress_activations(model)
    report = audit_now(model, (), {"input_ids": ids, "labels": ids}, agrees=False)
    assert report.num_parameters == 21
    assert str(report) in capsys.readouterr().err


def test_a_dropped_model_is_waited_for_no_longer() -> None:
    import gc
    import weakref

    model = make_model("llama").train()
    audit_first_call(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    torch.optim.SGD([weight]).step()
