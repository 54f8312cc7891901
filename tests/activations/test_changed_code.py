"""A host puts code of its own in the place of a class's forward, a function of torch or the loss, after the conversion.

Liger Kernel, profilers and quantizers do. Forward has their bits, and the gradient is that of what they compute.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laconic
from laconic.activations.host.patched import RunningCode
from laconic.errors import ModelError
from tests.activations.models import loss_of, make_ids, make_model


def _compared(
    model: nn.Module, patch: Callable[[], None], undo: Callable[[], None], *, early: bool, **options: Any
) -> None:
    """Step with the patch in force, in forward or in forward and backward; with packed activations as without."""
    ids = make_ids()
    exact, packed = copy.deepcopy(model), copy.deepcopy(model)
    laconic.compress_activations(packed, bits=8, **options)
    found = []
    for one in (exact, packed):
        torch.manual_seed(0)
        patch()
        try:
            value = loss_of(one, ids) if hasattr(one, "config") else one(torch.linspace(-2, 2, 4096).view(2, 32, 64))
            if not early:
                value.square().sum().backward()
        finally:
            undo()
        if early:
            value.square().sum().backward()
        found.append([value, *(p.grad for p in one.parameters() if p.grad is not None)])
    assert torch.equal(found[0][0], found[1][0])
    largest = max(a.norm() for a in found[0][1:])
    for a, b in zip(found[0][1:], found[1][1:], strict=True):
        assert (a - b).norm() <= 0.05 * a.norm() + 1e-3 * largest


def _block() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 96), nn.GELU(), nn.Dropout(0.3), nn.Linear(96, 64)
    )


FORWARDS: dict[type[nn.Module], Callable[[Any, Tensor], Tensor]] = {
    nn.LayerNorm: lambda self, x: (x - x.mean(-1, keepdim=True)) * self.weight * x,
    nn.GELU: lambda self, x: x.sin(),
    nn.Dropout: lambda self, x: x * torch.randn_like(x),
}


@pytest.mark.parametrize("kind", FORWARDS)
def test_another_forward_of_a_class_has_its_own_gradient(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    _compared(_block(), lambda: monkeypatch.setattr(kind, "forward", FORWARDS[kind]), monkeypatch.undo, early=False)


def test_another_class_of_a_module_has_its_own_gradient() -> None:
    class Other(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return FORWARDS[nn.LayerNorm](self, x)

    model = _block()
    norm = model[1]
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, bits=8)
    grads = []
    for one in (model, twin):
        one[1].__class__ = Other
        one.eval()(torch.linspace(-2, 2, 4096).view(2, 32, 64)).square().sum().backward()
        grads.append(one[1].weight.grad)
    assert (grads[0] - grads[1]).norm() <= 0.05 * grads[0].norm()
    assert isinstance(norm, Other)


@pytest.mark.parametrize(
    ("family", "name", "early", "mode"),
    [
        ("llama", "silu", False, "combined"),
        ("llama", "softmax", True, "sites"),
        ("bloom", "softmax", True, "sites"),
        pytest.param("bloom", "softmax", False, "combined", marks=pytest.mark.slow),
    ],
)
def test_a_wrapper_of_a_function_of_torch_runs_once(
    family: str, name: str, early: bool, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch hands a mode the wrapper; and code that runs again in backward calls it also where it has gone by then."""
    original = getattr(F, name)
    model = make_model(family)
    model.config._attn_implementation = "eager"
    _compared(
        model,
        lambda: monkeypatch.setattr(F, name, lambda x, *args, **kwargs: original(2 * x, *args, **kwargs) * 1.5),
        monkeypatch.undo,
        early=early,
        mode=mode,
    )
    assert getattr(F, name) is original


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("now", [F.relu, torch.sin])
def test_code_that_runs_again_finds_the_functions_of_its_first_run(
    now: Callable[..., Any], moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, relu = RunningCode(), F.relu
    if moves:  # behind all others in the module
        monkeypatch.delattr(F, "relu")
    monkeypatch.setattr(F, "relu", now, raising=False)
    with ExitStack() as undo:
        code.again(undo)
        assert F.relu is relu
    assert F.relu is now


def test_a_function_that_has_gone_is_there_while_code_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "of_a_host", torch.sin, raising=False)
    code = RunningCode()
    monkeypatch.undo()
    with ExitStack() as undo:
        code.again(undo)
        assert F.of_a_host is torch.sin  # type: ignore[attr-defined]
    assert not hasattr(F, "of_a_host")


def test_torchs_functions_may_lie_beside_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        monkeypatch.setattr(F, "of_a_host", torch.ones(3), raising=False)
        code = RunningCode()
    monkeypatch.setattr(F, "of_a_host", torch.ones(3))
    with ExitStack() as undo:
        code.again(undo)


def test_a_forward_that_has_gone_before_it_runs_again_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("bloom")
    laconic.compress_activations(model, bits=8)
    attention = type(model.transformer.h[0].self_attention)
    loss_of(model, make_ids()).backward()  # its first call tries whether it may run again
    original = attention.forward
    monkeypatch.setattr(attention, "forward", lambda self, *args, **kwargs: original(self, *args, **kwargs))
    loss = loss_of(model, make_ids())
    monkeypatch.undo()
    with pytest.raises(ModelError, match=r"call loss.backward\(\) before another forward"):
        loss.backward()


@pytest.mark.parametrize("change", ["attribute", "buffer"])
def test_what_changes_before_code_runs_again_is_refused(change: str) -> None:
    model = make_model("bloom" if change == "attribute" else "gptj")
    laconic.compress_activations(model, bits=8)
    attention = model.transformer.h[0].self_attention if change == "attribute" else model.transformer.h[0].attn
    loss = loss_of(model, make_ids())
    if change == "attribute":
        attention.inv_norm_factor *= 3
    else:
        buffer = next(attention.buffers(), None)
        if buffer is None:
            pytest.skip("attention of this transformers' GPT-J has no buffer")
        buffer.data.mul_(3)
    with pytest.raises(ModelError, match=r"inv_norm_factor changed since its forward|holds other values in backward"):
        loss.backward()


def _smooth(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: original(*args, **{**kwargs, "label_smoothing": 0.3})


@pytest.mark.parametrize("loss", ["exact", "chunked"])
@pytest.mark.parametrize("before", [False, True])
def test_another_cross_entropy_is_the_loss(loss: str, before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = make_model("llama"), make_ids()
    twin = copy.deepcopy(model)
    if before:
        monkeypatch.setattr(F, "cross_entropy", _smooth(F.cross_entropy))
        if loss == "chunked":
            with pytest.raises(ModelError, match="computes another loss"):
                laconic.compress_activations(twin, bits=8, loss=loss)
            return
    laconic.compress_activations(twin, bits=8, loss=loss)
    if not before:
        monkeypatch.setattr(F, "cross_entropy", _smooth(F.cross_entropy))
    assert torch.equal(loss_of(twin, ids), loss_of(model, ids))
    monkeypatch.undo()
    assert torch.allclose(loss_of(twin, ids), loss_of(model, ids))


def _scale(module: nn.Module, args: Any, logits: Tensor) -> Tensor:
    return logits * 3


def _halve(module: nn.Module, grads: tuple[Tensor]) -> tuple[Tensor]:
    return (grads[0] / 2,)


class _Tripled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 3


def _own_forward(module: nn.Module) -> None:
    before = module.forward
    module.forward = lambda x: before(x) * 3  # type: ignore[method-assign]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a forward hook": lambda model: model.lm_head.register_forward_hook(_scale),
    "a backward hook": lambda model: model.lm_head.register_full_backward_pre_hook(_halve),
    "a cap": lambda model: setattr(model.config, "final_logit_softcapping", 0.1),
    "a forward of its own": lambda model: _own_forward(model.lm_head),
    "another class": lambda model: setattr(model.lm_head, "__class__", _Tripled),
    "another linear": lambda model: None,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_logits_later_makes_the_chunked_loss_inactive(
    change: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = make_model("gemma2"), make_ids()
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, bits=16, loss="chunked")
    if change == "another linear":
        linear = F.linear
        monkeypatch.setattr(F, "linear", lambda *args: linear(*args) * 1.1)
    grads = []
    with caplog.at_level(logging.WARNING, "laconic"):
        for one in (model, twin):
            CHANGES[change](one.train())
            loss = loss_of(one, ids)
            loss.backward()
            grads.append((loss, one.model.norm.weight.grad))
    assert all(map(torch.equal, *grads))
    assert "loss='chunked' is inactive" in caplog.text
