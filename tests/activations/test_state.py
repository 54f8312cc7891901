"""Measuring changes nothing in a model and is never fatal; a conversion that fails leaves the model as it was."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

import laconic
from laconic import BlockFormat
from laconic.activations import Recompute, Site, saved_nbytes_per_token
from laconic.activations.forwards.attention import attention_core_of
from laconic.activations.forwards.dropout import DropoutForward
from laconic.activations.forwards.elementwise import ElementwiseForward
from laconic.activations.forwards.experts import ExpertsForward, RouterForward
from laconic.activations.forwards.feedforward import ActivationForward, ProjectionForward
from laconic.activations.forwards.functional import FunctionsForward
from laconic.activations.forwards.mixer import MixerForward
from laconic.activations.keep.choice import Choice
from laconic.activations.whole_model import apply
from laconic.errors import ModelError
from tests.activations.models import VOCABULARY, loss_of, make_ids, make_model
from tests.grid import few

FEATURES = 32


class Stateful(nn.Module):
    """Changes in its forward whatever a module can change."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, FEATURES, max_norm=0.5)  # renormalizes its weight in place
        self.batch_norm = nn.BatchNorm1d(FEATURES)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(FEATURES, FEATURES))
        self.old_spectral = nn.utils.spectral_norm(nn.Linear(FEATURES, FEATURES))
        self.linear, self.norm, self.drop = nn.Linear(FEATURES, FEATURES), nn.LayerNorm(FEATURES), nn.Dropout()
        self.register_buffer("table", torch.zeros(4))
        self.weight = nn.Parameter(torch.ones(FEATURES))
        self.calls, self.seen, self.recent, self.cache = 0, [], deque(maxlen=2), {"keys": torch.zeros(2)}
        self.config = SimpleNamespace(problem_type=None, inner=SimpleNamespace(losses=[]))
        self.generator = torch.Generator().manual_seed(5)
        self.tensor = torch.zeros(3)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        x.mul_(2)
        self.calls += 1
        self.seen.append(self.calls)
        self.recent.append(self.calls)
        self.cache["keys"].add_(1)
        self.cache["values"] = torch.ones(2)
        self.config.problem_type = "regression"
        self.config.inner.losses.append(1.0)
        self.tensor.add_(torch.rand(3, generator=self.generator))
        self.table = torch.full((8,), random.random() + float(np.random.rand()))
        with torch.no_grad():
            self.weight.clamp_(max=0.5)
        self.late = 1
        self.linear.bias.requires_grad_(False)
        self.drop.train(False)
        h = self.embed(ids) + F.dropout(x, 0.5)
        h = self.old_spectral(self.spectral(self.batch_norm(h)))
        return self.linear(self.norm(h)) * self.weight


def everything(value: Any, depth: int = 6) -> Any:
    """All that a value holds, as plain data."""
    if isinstance(value, Tensor):
        return (value.tolist(), value.requires_grad, None if value.grad_fn or value.grad is None else id(value.grad))
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, dict):
        return {str(key): everything(item, depth) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return [everything(item, depth) for item in value]
    if isinstance(value, nn.Module | SimpleNamespace) and depth:
        replaced = ("forward", "_replicate_for_data_parallel", "__reduce_ex__")
        return {key: everything(item, depth - 1) for key, item in vars(value).items() if key not in replaced}
    return value if isinstance(value, int | float | str | None) else str(type(value))


def random_states() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]


@pytest.mark.parametrize("mode", ["sites", "hooks"])
def test_measuring_changes_no_state(mode: str) -> None:
    torch.manual_seed(0)
    model, x = Stateful(), torch.randn(6, FEATURES)
    model.weight.grad = torch.ones(FEATURES)
    ids = torch.arange(6)
    before, states, given = everything(model), random_states(), x.clone()
    report = laconic.compress_activations(model, mode=mode, example_inputs={"ids": ids, "x": x})  # type: ignore[arg-type]
    assert report.unmeasured is None
    assert report.after_nbytes_per_token
    assert torch.equal(x, given)
    assert random_states() == states
    after = everything(model)
    assert after.keys() == before.keys()
    for name in before:
        assert after[name] == before[name], name
    saved_nbytes_per_token(model, dtype=None, example_inputs={"ids": ids, "x": x})
    assert everything(model) == before


def test_measuring_on_inputs_that_fail_changes_no_state_either() -> None:
    model, x = Stateful(), torch.randn(6, FEATURES)
    before, given = everything(model), x.clone()
    report = laconic.compress_activations(model, example_inputs={"ids": torch.full((6,), 99), "x": x})
    assert report.unmeasured is not None
    assert everything(model) == before
    assert torch.equal(x, given)


def test_a_loss_that_a_measuring_forward_chose_is_chosen_again() -> None:
    """Hugging Face's classifiers note in their configuration which loss their first labels were for."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": VOCABULARY, "pad_token_id": 0, "num_labels": 3}
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("gpt2", **sizes))
    report = laconic.compress_activations(model)
    assert report.unmeasured is None
    assert report.after_nbytes_per_token < report.before_nbytes_per_token
    assert model.config.problem_type is None
    labels = torch.tensor([[0.0, 1.0, 1.0]])
    assert model(input_ids=make_ids(1, 8), labels=labels).loss.item() < 2
    assert model.config.problem_type == "multi_label_classification"


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_model_of_few_positions_is_measured_on_few_tokens(family: str) -> None:
    name = "n_positions" if family == "gpt2" else "max_position_embeddings"
    model = make_model(family, **{name: 24})
    report = laconic.compress_activations(model)
    assert report.before is not None
    assert report.before.tokens == 24
    assert 0 < report.after_nbytes_per_token < report.before_nbytes_per_token


def test_a_model_on_the_meta_device_is_converted_and_says_why_it_is_not_measured(family: str) -> None:
    model = make_model(family).to("meta")
    report = laconic.compress_activations(model)
    assert report.rows
    if report.before is None:
        assert report.unmeasured is not None
        assert report.unmeasured in str(report)
        assert report.to_dict()["unmeasured"] == report.unmeasured
    else:
        assert report.before_nbytes_per_token == saved_nbytes_per_token(make_model(family), dtype=None)


def test_a_model_whose_forward_runs_on_the_meta_device_is_measured_there() -> None:
    options = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    with torch.device("meta"):
        model = BertForMaskedLM(BertConfig(**options, num_attention_heads=2)).train()
        report = laconic.compress_activations(model)
    assert report.before is not None
    assert report.after_nbytes_per_token < report.before_nbytes_per_token / 2


class Fails(nn.Module):
    """Raises in its forward, always or once it has been converted."""

    def __init__(self, error: BaseException, later: bool = False) -> None:
        super().__init__()
        self.linear, self.norm, self.error, self.later = nn.Linear(8, 8), nn.LayerNorm(8), error, later

    def forward(self, x: Tensor) -> Tensor:
        if not self.later or "forward" in vars(self.linear):
            raise self.error
        y: Tensor = self.linear(self.norm(x))
        return y


@pytest.mark.parametrize("error", [ValueError("no luck\nat all"), RuntimeError(), AssertionError(), KeyError("x")])
def test_a_measuring_forward_that_fails_is_not_fatal(error: Exception) -> None:
    model = Fails(error)
    report = laconic.compress_activations(model, example_inputs={"x": torch.randn(2, 8)})
    assert "forward" in vars(model.linear)
    assert report.unmeasured is not None
    assert f"the measuring forward failed ({type(error).__name__}" in report.unmeasured
    assert "at all" not in report.unmeasured
    assert report.after_nbytes_per_token is None
    assert {row.format for row in report.rows} == {"nf4"}
    with pytest.raises(ModelError, match="cannot be measured: the measuring forward failed"):
        saved_nbytes_per_token(model, example_inputs={"x": torch.randn(2, 8)})


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (ValueError("no luck"), "leave sites exact"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."), "fewer tokens"),
        (torch.OutOfMemoryError("CUDA out of memory"), "fewer tokens"),
    ],
)
def test_a_conversion_that_cannot_run_says_what_to_do(error: Exception, remedy: str) -> None:
    model = Fails(error, later=True)
    with pytest.raises(ModelError, match=f"not with compressed activations .*{remedy}"):
        laconic.compress_activations(model, example_inputs={"x": torch.randn(2, 8)})
    assert "forward" not in vars(model.linear)


def test_inputs_that_do_not_fit_and_models_without_any_are_not_fatal() -> None:
    report = laconic.compress_activations(make_model("llama"), example_inputs={"nonsense": torch.ones(2, 2)})
    assert "exactly one of input_ids" in (report.unmeasured or "")
    report = laconic.compress_activations(nn.Sequential(nn.Linear(4, 4)))
    assert report.unmeasured == "inputs of Sequential cannot be made up; pass example_inputs="
    report = laconic.compress_activations(nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4)))
    assert "get their shape in its first forward" in (report.unmeasured or "")


@pytest.mark.parametrize("mode", ["combined", "hooks"])
def test_hooks_on_a_model_that_has_no_shapes_yet_are_refused(mode: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4))
    with pytest.raises(ModelError, match=r"1\.weight gets its shape in the model's first forward.*run the model once"):
        laconic.compress_activations(model, mode=mode)
    assert is_untouched(model)
    model(torch.randn(64, 4))
    laconic.compress_activations(model, mode=mode)
    model(torch.randn(64, 4)).sum().backward()


def is_untouched(model: nn.Module) -> bool:
    return not any("forward" in vars(module) or attention_core_of(module) for module in model.modules())


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
def test_a_model_that_fails_once_converted_is_left_as_it_was(error: BaseException) -> None:
    model = Fails(error, later=True)
    with pytest.raises((KeyboardInterrupt, ModelError), match=r"^$|but not with.*ValueError: broken"):
        laconic.compress_activations(model, example_inputs={"x": torch.randn(2, 8)})
    assert is_untouched(model)


class Injected(Exception):
    pass


FUNCTIONS = tuple(
    step.__name__
    for step in (
        apply.find_sites,
        apply.find_head,
        apply.sample_inputs,
        apply.measure_first,
        apply.measure,
        apply.convert,
        apply._report,
        apply.make_report,
    )
)
CLASSES = (
    apply.AttentionCore,
    apply.CausalForward,
    apply.CausalLossForward,
    apply.ExactForward,
    apply.HeadForward,
    apply.HooksForward,
    apply.LayerForward,
    apply.RecomputedMlpForward,
    ActivationForward,
    ProjectionForward,
    *dict.fromkeys(apply._FORWARDS.values()),
)


FAMILY_OF = {
    RouterForward: "mixtral",
    ExpertsForward: "mixtral",
    DropoutForward: "gpt2",
    ElementwiseForward: "opt",
    FunctionsForward: "opt",
    MixerForward: "bloom",
}


def recomputed(site: Site) -> Choice:
    return Recompute() if site.kind == "mlp" else BlockFormat("int8")


@pytest.mark.parametrize("step", few([*FUNCTIONS, *CLASSES], 9))
def test_a_failure_at_any_step_leaves_the_model_as_it_was(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call of a step fails: its first, its second, one in the middle or its last."""
    model = make_model(FAMILY_OF.get(step, "llama"))
    options: dict[str, Any] = {"loss": "chunked", "attention": "int8"}
    if step in (apply.RecomputedMlpForward, ProjectionForward):
        options = {"policy": recomputed}
    elif step is apply.CausalLossForward:
        options = {}
    elif step is apply.HooksForward:
        options = {"mode": "hooks"}
    elif step is apply.ExactForward:
        options = {"mode": "combined", "policy": lambda site: None if site.kind == "norm" else BlockFormat("int8")}
    owner, name = (apply, step) if isinstance(step, str) else (step, "__init__")
    original = getattr(owner, name)
    calls, limit = 0, 1000

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > limit:
            raise Injected
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, fail)
    laconic.compress_activations(model, **options)
    laconic.decompress_activations(model)
    assert is_untouched(model)
    assert calls > 0
    for number in sorted({0, min(1, calls - 1), calls // 2, calls - 1}):
        calls, limit = 0, number
        with pytest.raises((Injected, ModelError)) as caught:
            laconic.compress_activations(model, **options)
        assert isinstance(caught.value if isinstance(caught.value, Injected) else caught.value.__cause__, Injected)
        assert is_untouched(model)
    loss_of(model, make_ids()).backward()
