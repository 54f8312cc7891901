"""Norms computed again: fused kernels beside the steps, and refused where they are not the same."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
from contextlib import nullcontext
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import laconic
from benchmarks.kit.fused_norms import fused_norms
from laconic.activations.backward import norms
from laconic.activations.backward.norms import NormSpec, norm_again, norm_backward, normalize
from laconic.ops import native
from tests.ops.cases import same_bits, threads

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PARAMETERS = {"rms": [(True, False), (False, False)], "layer": [(True, True), (True, False), (False, False)]}


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def truth(grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec) -> list[Tensor]:
    """Result and gradients by autograd, in fp64."""
    leaves = [None if t is None else t.double().requires_grad_() for t in (x, weight, bias)]
    wide, w, b = leaves
    assert wide is not None
    centered = wide - wide.mean(-1, keepdim=True) if spec.kind == "layer" else wide
    y = centered * (centered.square().mean(-1, keepdim=True) + spec.eps).rsqrt()
    y = y if w is None else y * (w + 1 if spec.unit_offset else w)
    y = y if b is None else y + b
    return [y.detach(), *torch.autograd.grad(y, [t for t in leaves if t is not None], grad.double())]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "which"), [(kind, which) for kind in PARAMETERS for which in PARAMETERS[kind]])
@pytest.mark.parametrize("how", ["steps", "torch", "c++"])
def test_result_and_gradients(
    how: str, kind: Literal["rms", "layer"], which: tuple[bool, bool], dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = NormSpec(kind, 1e-5)
    if how == "steps":
        monkeypatch.setattr(norms, "_KERNELS", {})
    shapes = [(7, 48), (2, 3, 33), (1, 1, 256)]
    for shape in (*shapes, (300, 17)) if how == "c++" and kind == "rms" else shapes:
        x, grad = draw(*shape, dtype=dtype), draw(*shape, seed=1, dtype=dtype)
        weight, bias = (draw(shape[-1], seed=i, dtype=dtype) if given else None for i, given in enumerate(which, 2))
        for needs in itertools.product([True, False], *([True, False] if given else [False] for given in which)):
            with fused_norms() if how == "torch" else nullcontext(), torch.no_grad():
                is_served = how == "torch" or (how == "c++" and kind == "rms" and dtype is not torch.float16)
                assert (norms._kernels_for(x, weight, bias, spec) is not None) == is_served
                y = norm_again(x, weight, bias, spec, dtype)
                found = norm_backward(grad, x, weight, bias, spec, needs)
            exact = iter(truth(grad, x, weight, bias, spec))
            present = (True, True, *which)
            for got, is_there, needed in zip((y, *found), present, (True, *needs), strict=True):
                expected = next(exact) if is_there else None
                if not needed or expected is None:
                    assert got is None
                    continue
                assert got is not None
                assert float((got - expected).abs().max()) <= 4 * torch.finfo(dtype).eps * float(expected.abs().max())


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_what_there_are_no_kernels_for_goes_step_by_step(kind: Literal["rms", "layer"]) -> None:
    x, weight = draw(4, 64, dtype=torch.bfloat16), draw(64, dtype=torch.bfloat16)
    spec, unit_offset = NormSpec(kind, 1e-6), NormSpec(kind, 1e-6, unit_offset=True)
    ours = norms.CPP if kind == "rms" else None

    def kernels(x: Tensor, weight: Tensor, spec: NormSpec = spec) -> norms.Kernels | None:
        return norms._kernels_for(x, weight, None, spec)

    assert kernels(x, weight) is kernels(x, nn.Parameter(weight)) is kernels(x, weight.float()) is ours
    assert kernels(x, weight, unit_offset) is ours
    assert kernels(x.half(), weight) is kernels(x.double(), weight) is kernels(x, weight.double()) is None
    with fused_norms():
        assert kernels(x, weight) is kernels(x, nn.Parameter(weight)) is norms.TORCH
        assert kernels(x, weight.float()) is kernels(x, weight, unit_offset) is None
    for how in (nullcontext, fused_norms):
        with how():
            assert kernels(x[:0], weight) is None
            with torch._subclasses.FakeTensorMode() as mode:
                assert kernels(mode.from_tensor(x), mode.from_tensor(weight)) is None
    with torch._subclasses.FakeTensorMode():
        assert kernels(x, weight) is None


def test_a_lazily_negated_gradient_is_read_as_it_is() -> None:
    x, weight = draw(4, 64), draw(64)
    grad = torch.view_as_complex(draw(4, 64, 2, seed=1)).conj().imag
    assert grad.is_neg()
    arguments: Any = (x, weight, None, NormSpec("rms", 1e-6), (True, True, False))
    for got, expected in zip(norm_backward(grad, *arguments), norm_backward(grad.clone(), *arguments), strict=True):
        assert got is expected is None or torch.allclose(got, expected, atol=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("isa", native.supported_isas())
def test_each_instruction_set_and_number_of_threads_gives_the_same_bits(isa: str) -> None:
    for dtype, length, rows in itertools.product(DTYPES[:2], (1, 31, 96, 1500), (1, 70, 200)):
        x, grad, weight = draw(rows, length, dtype=dtype), draw(rows, length, seed=1, dtype=dtype), draw(length, seed=2)

        def results(isa: str, given: Any = (x, weight, 1e-5), grad: Any = grad) -> Any:
            both = native.rms_norm_backward(grad, *given, isa=isa, offset=1.0)
            return native.rms_norm(*given, isa=isa, offset=1.0), *both

        with threads(1):
            expected = results("portable")
        with threads(3):
            for got, one in zip(results(isa), expected, strict=True):
                assert same_bits(got, one), (dtype, length, rows)


def test_parts_of_other_tensors_and_other_orders_of_memory() -> None:
    x, grad, weight = draw(6, 40)[:, 3:36], draw(33, 6, seed=1).t(), draw(66, seed=2)[::2]
    whole = x.contiguous(), weight.contiguous(), 1e-5
    assert same_bits(native.rms_norm(x, weight, 1e-5), native.rms_norm(*whole))
    expected = native.rms_norm_backward(grad.clone(memory_format=torch.contiguous_format), *whole)
    for got, one in zip(native.rms_norm_backward(grad, x, weight, 1e-5), expected, strict=True):
        assert got is not None
        assert one is not None
        assert same_bits(got, one)


def test_kernels_are_tried_once_for_each_length(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def agree(_: object, like: Tensor, *__: object) -> bool:
        tried.append(like.shape[-1])
        return like.shape[-1] == 64

    monkeypatch.setattr(norms, "_agree", agree)
    with fused_norms():
        for shape in ((4, 64), (4, 128), (7, 64), (7, 128)):
            kernels = norms._kernels_for(draw(*shape), draw(shape[-1]), None, NormSpec("rms", 1e-6))
            assert kernels is (norms.TORCH if shape[-1] == 64 else None)
    assert tried == [64, 128]


@pytest.mark.parametrize("wrong", ["forward", "backward"])
def test_a_kernel_that_gives_something_else_is_not_used(
    wrong: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    x, weight, spec = draw(4, 64, dtype=torch.bfloat16), draw(64, dtype=torch.bfloat16), NormSpec("rms", 1e-6)
    name = "norm" if wrong == "forward" else "backward"
    kernel = getattr(norms.CPP, name)

    def off(*arguments: Any) -> Any:
        found = kernel(*arguments)
        return found * 1.05 if wrong == "forward" else (found[0], found[1] * 1.05, None)

    monkeypatch.setattr(norms, "_KERNELS", {"cpu": dataclasses.replace(norms.CPP, **{name: off})})
    monkeypatch.setattr(norms, "_VERDICTS", {})
    with caplog.at_level(logging.WARNING, "laconic"):
        for _ in range(2):
            assert torch.equal(norm_again(x, weight, None, spec, x.dtype), normalize(x, weight, None, spec))
    (said,) = caplog.messages
    assert ("result" if wrong == "forward" else "gradient of the weight") in said


def test_a_device_without_the_kernels_goes_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, spec = draw(4, 64), draw(64), NormSpec("rms", 1e-6)
    monkeypatch.setattr(norms, "_KERNELS", {"cpu": norms.TORCH})
    monkeypatch.setattr(norms, "_VERDICTS", {})
    found = norm_backward(draw(4, 64, seed=1), x, weight, None, spec, (True, True, False))
    assert list(norms._VERDICTS.values()) == [False]
    expected = norms._steps_backward(draw(4, 64, seed=1), x, weight, None, spec, (True, True, False))
    for got, truth_ in zip(found[:2], expected[:2], strict=True):
        assert got is not None
        assert truth_ is not None
        assert torch.equal(got, truth_)


def test_a_model_trains_alike_with_fused_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).bfloat16()
    laconic.compress_activations(model, 8)
    ids = torch.arange(96).view(2, 48) % 64
    calls: list[str] = []

    def counted(name: str) -> Any:
        kernel = getattr(norms.CPP, name)
        return lambda *arguments: (calls.append(name), kernel(*arguments))[1]

    counting = dataclasses.replace(norms.CPP, norm=counted("norm"), backward=counted("backward"))

    def gradient() -> Tensor:
        twin = copy.deepcopy(model)
        twin(input_ids=ids, labels=ids).loss.backward()
        return torch.cat([p.grad.float().flatten() for p in twin.parameters() if p.grad is not None])

    monkeypatch.setattr(norms, "_KERNELS", {})
    steps = gradient()
    monkeypatch.setattr(norms, "_KERNELS", {"cpu": counting})
    monkeypatch.setattr(norms, "_VERDICTS", {})
    fused = gradient()
    # Two norms in each layer and one behind them, and a comparison.
    assert sorted(calls) == 6 * ["backward"] + 6 * ["norm"]
    assert float((fused - steps).norm() / steps.norm()) < 0.01


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_kernels_of_cuda_are_used(kind: Literal["rms", "layer"], dtype: torch.dtype) -> None:
    x, weight = draw(64, 4096, dtype=dtype).cuda(), draw(4096, dtype=dtype).cuda()
    assert norms._kernels_for(x, weight, None, NormSpec(kind, 1e-6)) is norms.TORCH
