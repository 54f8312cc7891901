"""The audit of a first step: what it compares on healthy models, and that it leaves nothing behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

import laconic
import laconic.auditing
from laconic.activations import seed_rounding
from laconic.auditing import audit_first_call
from laconic.auditing.runs import Outcome, RunKind, Runs
from laconic.errors import AuditError
from tests.activations.models import FAMILIES, MIXTURES, OTHERS, make_ids, make_model
from tests.grid import few, grid, slow_but


def batch(rows: int = 4, length: int = 24) -> dict[str, Tensor]:
    ids = make_ids(rows, length)
    return {"input_ids": ids, "labels": ids}


def audited(model: nn.Module, **options: Any) -> laconic.auditing.AuditReport:
    return laconic.audit(model.train(), batch(), **options)


@pytest.mark.parametrize("family", slow_but([*FAMILIES, *MIXTURES], "llama", "gpt2", "mixtral", "deepseek_v3"))
def test_a_healthy_model_passes(family: str) -> None:
    model = make_model(family)
    laconic.compress_activations(model)
    report = audited(model)
    assert report.loss_bits
    assert report.num_parameters > 10
    assert report.gradient_error is not None
    assert 0.005 < report.gradient_error < 0.2
    assert not report.left_out


FORMATS: list[dict[str, Any]] = [
    {"bits": 2, "block_size": 256},
    {"bits": 2},
    {"bits": 4, "format": "e2m1"},
    {"bits": 5, "attention": "exact"},
    {"bits": 6, "attention": "recompute"},
    {"bits": 8, "scale_dtype": torch.float16},
    {"bits": 4, "mode": "hooks"},
    {"bits": 8, "mode": "combined"},
    {"bits": 4, "loss": "chunked"},
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("family", "options", "dtype"), grid(few([*FAMILIES, *MIXTURES, *OTHERS], 9), FORMATS, DTYPES, strength=1)
)
def test_no_format_mode_or_dtype_alarms(family: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    model = make_model(family).to(dtype)
    if options.get("loss") == "chunked" and family == "gpt2":
        pytest.skip("its loss is told by loss_type")
    laconic.compress_activations(model, **options)
    report = audited(model)
    assert report.num_parameters > 10
    assert report.loss_bits or options.get("loss") == "chunked"


def test_hooks_around_a_model_leave_alone_what_stands_in_for_codes() -> None:
    model = make_model("opt")
    laconic.compress_activations(model, mode="combined")
    assert audited(model).loss_bits


@pytest.mark.parametrize(
    "kind", ["checkpointing", "reentrant", "autocast", "gradients", "dropout", "tied", "frozen", "one hook for all"]
)
def test_no_way_of_training_alarms(kind: str) -> None:
    model = make_model("llama", attention_dropout=0.2 if kind == "dropout" else 0.0, tie_word_embeddings=kind == "tied")
    if kind in ("checkpointing", "reentrant"):
        with pytest.warns(FutureWarning) if hasattr(model, "activation_checkpointing_enable") else nullcontext():
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": kind == "reentrant"})
    if kind == "frozen":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name or "down_proj" in name)
    if kind == "one hook for all":
        register_multi_grad_hook(tuple(model.parameters()), lambda gradients: None)
    laconic.compress_activations(model)
    if kind == "gradients":
        laconic.compress_gradients(model, bits=12)
    report = audited(model, autocast=torch.bfloat16 if kind == "autocast" else None)
    assert report.loss_bits
    assert report.num_stored == (21 if kind == "gradients" else 0)


class Vision(nn.Module):
    """Convolutions, batch norms and a counter, whose state a forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Dropout(0.1),
        )  # fmt: skip
        self.head = nn.Linear(32, 10)
        self.calls, self.seen = 0, []
        self.register_buffer("queue", torch.zeros(4, 32))
        self.average: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        features = self.body(x).mean((2, 3))
        self.queue = torch.cat([self.queue[1:], features[:1].detach()])
        self.average = features.detach().mean()
        self.seen.append(len(x))
        noise = float(np.random.rand()) + random.random()
        result: Tensor = self.head(features + noise * torch.rand(1))
        return result


def bits(model: nn.Module) -> dict[str, Any]:
    """Everything that an audit could have changed, as bytes."""
    state: dict[str, Any] = {name: value.clone().numpy().tobytes() for name, value in model.state_dict().items()}
    state |= {f"{name}.grad": p.grad for name, p in model.named_parameters()}
    state |= {f"{name} version": x._version for name, x in model.named_parameters()}
    for name, module in model.named_modules():
        plain = {key: value for key, value in vars(module).items() if isinstance(value, bool | int | float | str)}
        hooks = {key: list(value) for key, value in vars(module).items() if key.endswith("_hooks")}
        state[f"{name} module"] = (plain, hooks, list(vars(module)))
    for name, parameter in model.named_parameters():
        state[f"{name} hooks"] = (parameter._backward_hooks, list(parameter._post_accumulate_grad_hooks or ()))
    generator = np.random.get_state()
    state["random"] = (torch.get_rng_state().numpy().tobytes(), random.getstate(), generator[1].tobytes(), generator[2])
    return state


@pytest.mark.parametrize("with_gradients", [False, True])
def test_an_audit_changes_nothing(with_gradients: bool) -> None:
    torch.manual_seed(5)
    model = Vision()
    laconic.compress_activations(model, example_inputs={"x": torch.randn(2, 3, 16, 16)})
    optimizer = laconic.AdamW8bit(model.parameters())
    x, y = torch.randn(6, 3, 16, 16), torch.arange(6)
    if with_gradients:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
    model.body[1].eval()
    called: list[int] = []
    model.head.weight.register_post_accumulate_grad_hook(lambda p: called.append(1))
    before, seen, queue = bits(model), model.seen, model.queue
    report = laconic.audit(model, x, loss_of=lambda out: F.cross_entropy(out, y[: len(out)]), optimizer=optimizer)
    assert report.loss_bits
    assert report.num_updates == 10
    assert bits(model) == before
    assert model.seen is seen
    assert not seen
    assert model.queue is queue
    assert model.average is None
    assert not called
    assert not optimizer.state
    assert len(optimizer.param_groups[0]["params"]) == 10


def train(model: nn.Module, audits: bool) -> list[float]:
    torch.manual_seed(3)
    seed_rounding(None)
    optimizer = laconic.AdamW8bit(model.parameters(), lr=1e-3)
    losses = []
    for step in range(3):
        if audits and step == 0:
            laconic.audit(model, batch(), optimizer=optimizer)
        loss = model(**batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("options", few([{"bits": 2}, {"attention": "recompute"}, {"mode": "combined"}], 1))
def test_a_run_has_the_same_bits_with_and_without(options: dict[str, Any]) -> None:
    runs = []
    for audits in (False, True):
        model = make_model("llama", attention_dropout=0.1).train()
        laconic.compress_activations(model, **options)
        runs.append((train(model, audits), [p.clone() for p in model.parameters()]))
    assert runs[0][0] == runs[1][0]
    assert all(map(torch.equal, runs[0][1], runs[1][1]))


class Restless(nn.Module):
    """A model that does not repeat itself: its draws are of nobody's state."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(64), nn.Linear(64, 64)
        self.generator = np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(self.norm(x)) * float(self.generator.random())
        return result


def test_a_model_that_does_not_repeat_itself_is_said_to() -> None:
    model = Restless()
    laconic.compress_activations(model, example_inputs={"x": torch.randn(4, 64)})
    report = laconic.audit(model, torch.randn(4, 64))
    assert report.loss_bits is None
    assert "does not repeat" in str(report)


def test_what_the_slice_is_too_small_for_runs_whole() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 8)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.linear(x.view(6, 64)).square().mean()
            return result

    model = Whole()
    laconic.compress_activations(model, example_inputs={"x": torch.randn(6, 64)})
    assert laconic.audit(model, torch.randn(6, 64)).num_parameters == 2


def test_a_loss_that_is_not_finite_is_left_out() -> None:
    model = make_model("llama")
    laconic.compress_activations(model)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    report = audited(model)
    assert not report.num_parameters
    assert "not finite" in str(report)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("full"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 81920000 bytes."),
    ],
)
def test_no_memory_for_the_exact_run_leaves_all_out(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    model = make_model("llama")
    laconic.compress_activations(model)

    def full(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(torch.autograd, "grad", full)
    assert "does not fit in memory" in str(audited(model))


def test_the_line_says_what_was_compared() -> None:
    model = make_model("llama")
    laconic.compress_activations(model)
    laconic.compress_gradients(model)
    line = str(audited(model, optimizer=laconic.AdamW8bit(model.parameters())))
    assert line.startswith("audit: as in the exact computation: loss bit for bit, gradients of 21 parameters (rounding")
    assert "21 gradients in codes, 21 first updates of AdamW8bit [" in line
    assert "\n" not in line


@pytest.mark.parametrize("factor", [2.0, 0.5, -1.0, 1.01])
def test_a_factor_is_found_whatever_made_it(factor: float) -> None:
    model = make_model("llama")
    laconic.compress_activations(model)
    layer = model.model.layers[1].mlp.down_proj
    before: Callable[..., Tensor] = layer.forward

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return factor * grad

    from laconic.activations.host.audited import AUDITED

    layer.forward = lambda x: before(x) if AUDITED.originals else Scaled.apply(before(x))
    with pytest.raises(AuditError, match=rf"layers.1.mlp.down_proj.weight has {factor:.3f} times the expected"):
        audited(model)


class Apart(nn.Module):
    """Returns a loss that no parameter has a gradient of, but only when it is `apart`."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.apart = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)), False

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        return (y.detach().requires_grad_() if self.apart else y).square().mean()


@pytest.mark.parametrize("mode", ["sites", "hooks", "combined"])
def test_a_call_that_trains_nothing_is_not_the_first_one(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(4, 64)
    model = Apart()
    laconic.compress_activations(model, bits=8, mode=mode, example_inputs={"x": x})  # type: ignore[arg-type]
    audit_first_call(model, agrees=False)
    model.requires_grad_(False)
    assert "no parameter of the model requires a gradient" in str(laconic.audit(model, x))
    model(x.clone().requires_grad_()).backward()
    assert "audit" not in capsys.readouterr().err
    model.requires_grad_(True)
    model.apart = True
    assert "gradients, as none reaches a parameter" in str(laconic.audit(model, x))
    model.apart = False
    model(x)
    assert "gradients of 6 parameters" in capsys.readouterr().err


def test_an_audit_leaves_no_gradients_in_any_of_several_stores() -> None:
    """A backward adds to all stores of a model, also to those that are not compared at that moment."""
    model = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 8)).train()
    batch = torch.randn(8, 64)
    laconic.compress_activations(model, example_inputs={"input": batch})
    stores = [laconic.compress_gradients(part, bits=8) for part in (model[0], model[2])]
    laconic.audit(model, batch)
    assert [store.state for store in stores] == ["empty", "empty"]
    model(batch).sum().backward()
    assert "there are some already" in str(laconic.audit(model, batch))


class Spectral(nn.Module):
    """A layer with a sparse gradient, and one with a complex one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(32, 64, sparse=True), nn.LayerNorm(64)
        self.filter, self.last = nn.Parameter(torch.randn(33, dtype=torch.cfloat)), nn.Linear(64, 64)

    def forward(self, ids: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.norm(self.embedding(ids))) * self.filter
        output: Tensor = self.last(torch.fft.irfft(spectrum, n=64))
        return output


def test_sparse_and_complex_gradients_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = Spectral(), torch.randint(32, (2, 16))
    laconic.compress_activations(model, 8)
    report = laconic.audit(model, ids, optimizer=torch.optim.SGD(model.parameters()))
    assert report.num_parameters == 6
    assert not report.left_out
    run = Runs.run

    def conjugated(self: Runs, way: RunKind) -> Outcome:
        outcome = run(self, way)
        if way == "compressed":
            gradient = outcome.gradients["filter"]
            assert gradient is not None
            outcome = replace(outcome, gradients={**outcome.gradients, "filter": gradient.conj_physical()})
        return outcome

    monkeypatch.setattr(Runs, "run", conjugated)
    with pytest.raises(AuditError, match="filter"):
        laconic.audit(model, ids)
