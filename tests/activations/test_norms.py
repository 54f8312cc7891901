"""Norms computed again: fused kernels beside the steps, and refused where they are not the same."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

import laconic
from benchmarks.kit.fused_norms import fused_norms
from laconic.activations.backward import norms
from laconic.activations.backward.norms import NormSpec, norm_again, norm_backward, normalize
from laconic.ops.native import norms as native
from laconic.ops.native.library import supported_isas

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


@contextmanager
def no_kernels() -> Iterator[None]:
    with patch.dict(norms.KERNELS, clear=True):
        yield


WAYS = {"ours": nullcontext, "torch's": fused_norms, "steps": no_kernels}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "which"), [(kind, which) for kind in PARAMETERS for which in PARAMETERS[kind]])
@pytest.mark.parametrize("way", WAYS)
def test_result_and_gradients(way: str, kind: Literal["rms", "layer"], which: tuple[bool, bool], dtype: Any) -> None:
    for shape in ((7, 48), (2, 3, 33), (1, 1, 256)):
        spec = NormSpec(kind, 1e-5, unit_offset=kind == "rms" and way != "torch's" and shape == (7, 48))
        x, grad = draw(*shape, dtype=dtype), draw(*shape, seed=1, dtype=dtype)
        weight, bias = (draw(shape[-1], seed=i, dtype=dtype) if given else None for i, given in enumerate(which, 2))
        for needs in itertools.product([True, False], *([True, False] if given else [False] for given in which)):
            with WAYS[way](), torch.no_grad():
                assert (norms.kernels_of(x, weight, bias, spec) is None) == (way == "steps")
                y = norm_again(x, weight, bias, spec=spec, dtype=dtype)
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
def test_what_torch_has_no_kernels_for_goes_step_by_step(kind: Literal["rms", "layer"]) -> None:
    x, weight = draw(4, 64, dtype=torch.bfloat16), draw(64, dtype=torch.bfloat16)
    spec = NormSpec(kind, 1e-6)
    freed = weight.clone()
    freed.untyped_storage().resize_(0)
    for way in (nullcontext, fused_norms):
        with way():
            assert norms.kernels_of(x, weight, None, spec) is not None
            assert norms.kernels_of(x, nn.Parameter(weight), None, spec) is not None
            assert norms.kernels_of(x, weight.float(), None, spec) is None
            assert norms.kernels_of(x, weight[:1], None, spec) is None
            assert norms.kernels_of(x[:0], weight, None, spec) is None
            assert norms.kernels_of(torch._neg_view(x), weight, None, spec) is None
            assert norms.kernels_of(x, freed, None, spec) is None
            for grad in (torch._neg_view(x), torch._efficientzerotensor(x.shape, dtype=x.dtype), x.to("meta")):
                assert norms.kernels_of(x, weight, None, spec, grad) is None
            takes_offset = norms.kernels_of(x, weight, None, NormSpec("rms", 1e-6, unit_offset=True)) is not None
            assert takes_offset == (way is nullcontext)
            with torch._subclasses.FakeTensorMode() as mode:
                assert norms.kernels_of(mode.from_tensor(x), mode.from_tensor(weight), None, spec) is None
            with FlopCounterMode(display=False):  # what runs must not depend on who watches
                assert norms.kernels_of(x, weight, None, spec) is not None
            make_fx(lambda x: x if norms.kernels_of(x, weight, None, spec) is None else pytest.fail("traced"))(x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_all_instruction_sets_and_numbers_of_threads_give_the_same_bits(
    kind: Literal["rms", "layer"], dtype: torch.dtype
) -> None:
    for rows, length in ((1, 1), (3, 63), (130, 768), (2200, 65)):
        grad, x = draw(rows, length, dtype=dtype), draw(rows, length, seed=1, dtype=dtype)
        weight, bias = draw(length, seed=2, dtype=dtype), draw(length, seed=3, dtype=dtype)
        x[0] = 2.0  # a row without spread
        given = {"centered": kind == "layer", "unit_offset": rows == 3}
        results = set()
        for isa, threads in [*((isa, 1) for isa in supported_isas()), (None, 2), (None, 5)]:
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            try:
                y = native.norm(x, weight, bias, 1e-6, **given, isa=isa)
                grads = native.norm_backward(grad, x, weight, bias, 1e-6, (True, True, True), **given, isa=isa)
            finally:
                torch.set_num_threads(before)
            results.add(tuple(t.view(torch.uint8).numpy().tobytes() for t in (y, *grads) if t is not None))
        assert len(results) == 1


def test_a_gradient_that_is_still_on_its_way_is_waited_for(mesh: DeviceMesh) -> None:
    class Reduce(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return all_reduce(grad, "sum", mesh)

    model, grads = nn.Sequential(nn.LayerNorm(64)), []
    for bits in (16, 8):
        x = draw(4, 64).requires_grad_()
        if bits == 8:
            laconic.compress_activations(model, 8)
        (Reduce.apply(model(x)) * draw(4, 64, seed=1)).sum().backward()
        grads.append([x.grad, *(p.grad.clone() for p in model.parameters())])
        model.zero_grad()
    for found, exact in zip(*reversed(grads), strict=True):
        assert float((found - exact).norm() / exact.norm()) < 0.02


def test_values_that_no_norm_has() -> None:
    weight, spec = torch.ones(64), NormSpec("rms", 0.0)
    for value in (float("nan"), float("inf"), 1e30, 0.0):
        x, grad = draw(3, 64), draw(3, 64, seed=1)
        x[1] = value
        found, steps = [], []
        for way, results in ((nullcontext, found), (no_kernels, steps)):
            with way():
                results.append(norm_again(x, weight, spec=spec, dtype=x.dtype))
                results += norm_backward(grad, x, weight, None, spec, (True, True, False))[:2]
        torch.testing.assert_close(found, steps, equal_nan=True)


def test_kernels_are_tried_once_for_each_length(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def agree(kernels: object, like: Tensor, *_: object) -> bool:
        tried.append(like.shape[-1])
        return like.shape[-1] == 64

    monkeypatch.setattr(norms, "_agree", agree)
    with fused_norms():
        for shape in ((4, 64), (4, 128), (7, 64), (7, 128)):
            found = norms.kernels_of(draw(*shape), draw(shape[-1]), None, NormSpec("rms", 1e-6))
            assert (found is not None) == (shape[-1] == 64)
    assert tried == [64, 128]


@pytest.mark.parametrize("wrong", ["norm", "backward"])
def test_a_kernel_that_gives_something_else_is_not_used(
    wrong: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    x, weight, spec = draw(4, 64, dtype=torch.bfloat16), draw(64, dtype=torch.bfloat16), NormSpec("rms", 1e-6)
    kernel = getattr(norms.KERNELS["cpu"], wrong)

    def off(*arguments: Any) -> Any:
        found = kernel(*arguments)
        return found * 1.05 if wrong == "norm" else (found[0], found[1] * 1.05, None)

    monkeypatch.setitem(norms.KERNELS, "cpu", replace(norms.KERNELS["cpu"], **{wrong: off}))
    monkeypatch.setattr(norms, "_VERDICTS", {})
    with caplog.at_level(logging.WARNING, "laconic"):
        for _ in range(2):
            assert torch.equal(norm_again(x, weight, spec=spec, dtype=x.dtype), normalize(x, weight, None, spec))
    (said,) = caplog.messages
    assert ("result" if wrong == "norm" else "gradient of the weight") in said


def test_a_device_without_the_kernels_goes_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, spec = draw(4, 64), draw(64), NormSpec("rms", 1e-6)
    monkeypatch.setitem(norms.KERNELS, "cpu", norms.KERNELS["cuda"])
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

    def counted(name: str, kernel: Any) -> Any:
        return lambda *arguments: (calls.append(name), kernel(*arguments))[1]

    for device, kernels in norms.KERNELS.items():
        both = {name: counted(name, getattr(kernels, name)) for name in ("norm", "backward")}
        monkeypatch.setitem(norms.KERNELS, device, replace(kernels, **both))
    monkeypatch.setattr(norms, "_VERDICTS", {})

    def gradient() -> Tensor:
        twin = copy.deepcopy(model)
        twin(input_ids=ids, labels=ids).loss.backward()
        return torch.cat([p.grad.float().flatten() for p in twin.parameters() if p.grad is not None])

    with no_kernels():
        steps = gradient()
    assert not calls
    for way in (nullcontext, fused_norms):
        with way():
            fused = gradient()
        # Two norms in each layer and one behind them, and a comparison.
        assert sorted(calls) == 6 * ["backward"] + 6 * ["norm"]
        calls.clear()
        assert float((fused - steps).norm() / steps.norm()) < 0.01


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_kernels_of_cuda_are_used(kind: Literal["rms", "layer"], dtype: torch.dtype) -> None:
    x, weight = draw(64, 4096, dtype=dtype).cuda(), draw(4096, dtype=dtype).cuda()
    assert norms.kernels_of(x, weight, None, NormSpec(kind, 1e-6)) is norms.KERNELS["cuda"]
