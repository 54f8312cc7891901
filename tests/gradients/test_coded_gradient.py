"""A gradient made of codes in torch's own hands: what torch does to it is what it does to the same values."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from laconic.errors import FormatError, ModelError, TrainingError
from laconic.formats import CodedGradient, QuantizedGradient, quantized_gradient, set_quantized_gradient
from laconic.gradients import compress_gradients
from laconic.optim import AdamW8bit

STEP = {8: 1 / 254, 12: 1 / 254 / 14}


def pair(bits: int = 12, shape: tuple[int, ...] = (6, 40), dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Two equal parameters, the first with its gradient in codes, the second with the same values."""
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(shape, generator=generator).to(dtype)
    coded, dense = nn.Parameter(value.clone()), nn.Parameter(value.clone())
    codes = QuantizedGradient.zeros(shape, bits)
    codes.accumulate_(torch.randn(shape, generator=generator))
    set_quantized_gradient(coded, codes)
    dense.grad = codes.dequantize().to(dtype)
    return [coded, dense]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    name: getattr(torch.optim, name)
    for name, found in vars(torch.optim).items()
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer)
    if name not in ("Optimizer", "SparseAdam", "LBFGS")
}
WAYS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD, foreach": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "SGD, fused": lambda ps: torch.optim.SGD(ps, lr=0.1, fused=True),
    "SGD, decay, maximize": lambda ps: torch.optim.SGD(ps, lr=0.1, weight_decay=0.1, maximize=True),
    "Adam, fused": lambda ps: torch.optim.Adam(ps, fused=True),
    "AdamW, foreach": lambda ps: torch.optim.AdamW(ps, amsgrad=True, foreach=True),
    "Adagrad, fused": lambda ps: torch.optim.Adagrad(ps, fused=True),
}


@pytest.mark.parametrize("name", [*OPTIMIZERS, *WAYS])
def test_every_optimizer_of_torch_steps_as_with_the_values(name: str) -> None:
    coded, dense = pair()
    start = coded.detach().clone()
    make = OPTIMIZERS.get(name) or WAYS[name]
    one, two = make([coded]), make([dense])
    for _ in range(3):
        one.step()
        two.step()
    if name == "SGD, foreach":  # with Nesterov's momentum it writes to gradients, which are rounded then
        torch.testing.assert_close(coded, dense, rtol=0, atol=1e-3)
    else:
        assert torch.equal(coded, dense)
    assert not torch.equal(coded, start)
    assert isinstance(coded.grad, CodedGradient)
    one.zero_grad(set_to_none=False)
    assert not coded.grad.any()
    one.zero_grad()
    assert coded.grad is None


def test_optimizer_that_needs_sparse_gradients_says_so() -> None:
    with pytest.raises(RuntimeError, match="does not support dense gradients"):
        torch.optim.SparseAdam([pair()[0]]).step()


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_by_norm_is_right(foreach: bool | None, norm_type: float) -> None:
    coded, dense = pair()
    norms = [nn.utils.clip_grad_norm_([p], 0.5, norm_type, foreach=foreach) for p in (coded, dense)]
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-6, atol=0)
    assert coded.grad is not None
    assert dense.grad is not None
    torch.testing.assert_close(coded.grad + 0, dense.grad, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(
        nn.utils.get_total_norm([coded.grad]), nn.utils.get_total_norm([dense.grad]), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize("bits", [8, 12])
def test_clipping_by_value_is_rounded_once_per_bound(foreach: bool | None, bits: int) -> None:
    coded, dense = pair(bits)
    for p in (coded, dense):
        nn.utils.clip_grad_value_([p], 0.7, foreach=foreach)
    assert coded.grad is not None
    assert dense.grad is not None
    assert isinstance(coded.grad, CodedGradient)
    assert ((coded.grad - dense.grad).abs() <= (2 if foreach else 1) * 4 * STEP[bits]).all()


def test_vectors_of_gradients_and_prints() -> None:
    coded, dense = pair()
    vectors = [nn.utils.parameters_to_vector([p.grad]) for p in (coded, dense) if p.grad is not None]
    assert torch.equal(*vectors)
    assert coded.grad is not None
    assert "CodedGradient(shape=(6, 40)" in repr(coded.grad)
    assert coded.grad.tolist() == dense.grad.tolist()  # type: ignore[union-attr]
    assert (coded.grad.numpy() == dense.grad.numpy()).all()  # type: ignore[union-attr]
    assert type(copy.deepcopy(coded.grad)) is Tensor
    file = io.BytesIO()
    torch.save(coded.grad, file)
    file.seek(0)
    assert torch.equal(torch.load(file), dense.grad)
    with pytest.raises(FormatError, match="change the shape"):
        coded.grad.t_()
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        coded.grad.data_ptr()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, while it compiles an optimizer
@pytest.mark.ci
def test_gradients_are_read_in_inference_mode_and_by_compiled_code() -> None:
    coded, dense = pair()
    with torch.inference_mode():
        assert coded.grad is not None
        assert dense.grad is not None
        assert torch.equal(coded.grad.view(-1)[3:9] * 2, dense.grad.view(-1)[3:9] * 2)
        assert nn.utils.get_total_norm([coded.grad]) > 0
    assert torch.equal(torch.compile(lambda: coded.grad * 3, backend="aot_eager")(), dense.grad * 3)
    coded.grad.add_(1.0)
    for p in (coded, dense):
        p.grad.copy_(dense.grad)  # type: ignore[union-attr]
        optimizer = torch.optim.SGD([p], lr=0.1)
        step = torch.compile(optimizer.step, backend="aot_eager") if p is coded else optimizer.step
        step()
    torch.testing.assert_close(coded, dense, rtol=0, atol=1e-3)


def test_any_layout_and_size_of_parameter() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.factor = nn.Parameter(torch.tensor(2.0))
            self.empty = nn.Parameter(torch.zeros(0))

        def forward(self, x: Tensor) -> Tensor:
            return (self.conv(x) * self.factor).sum() + self.empty.sum()

    model = Odd().to(memory_format=torch.channels_last)
    exact = copy.deepcopy(model)
    compress_gradients(model, bits=12)
    for one in (model, exact):
        for _ in range(2):
            one(torch.ones(1, 3, 5, 5)).backward()
        nn.utils.clip_grad_norm_(one.parameters(), 1.0)
        torch.optim.SGD(one.parameters(), lr=0.1).step()
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert p.grad.stride() == q.grad.stride()
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)
    AdamW8bit(model.parameters()).step()


@pytest.mark.parametrize("bits", [8, 12])
@pytest.mark.parametrize("layout", ["contiguous", "channels last", "transposed"])
def test_values_lie_as_the_parameter_does(layout: str, bits: int) -> None:
    value = torch.randn(4, 3, 5, 5)
    if layout == "channels last":
        value = value.to(memory_format=torch.channels_last)
    elif layout == "transposed":
        value = value.transpose(0, 3)
    parameter = nn.Parameter(value)
    codes = QuantizedGradient.zeros(parameter.shape, bits)
    exact = torch.randn(parameter.shape)
    codes.accumulate_(exact)
    set_quantized_gradient(parameter, codes)
    assert isinstance(parameter.grad, CodedGradient)
    found = parameter.grad.dequantize()
    assert found.stride() == parameter.stride()
    assert torch.equal(found, codes.dequantize())


def test_codes_move_to_the_device_that_is_asked_for() -> None:
    coded, _ = pair()
    assert isinstance(coded.grad, CodedGradient)
    moved = coded.grad.to("meta")
    assert isinstance(moved, CodedGradient)
    assert {part.device.type for part in (moved.codes.codes, *moved.codes.all_scales())} == {"meta"}
    stayed = coded.grad.to(torch.bfloat16)
    assert isinstance(stayed, CodedGradient)
    assert stayed.codes.codes.device.type == "cpu"


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "data": lambda x: x.data,
    "flat": lambda x: x.view(-1),
    "row": lambda x: x[2],
    "columns": lambda x: x[:, 3:30:2],
    "transposed": lambda x: x.t(),
    "half": lambda x: x.chunk(2)[1],
    "row of transposed half": lambda x: x.detach().split(20, dim=1)[0].t()[5],
}
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda x: x.add_(torch.ones(x.shape)),
    "add a number": lambda x: x.add_(0.25),
    "add itself": lambda x: x.add_(x),
    "subtract": lambda x: x.sub_(torch.full(x.shape, 0.5), alpha=2),
    "scale": lambda x: x.mul_(0.5),
    "scale by a tensor": lambda x: x.mul_(torch.tensor(3.0)),
    "divide": lambda x: x.div_(4.0),
    "mask": lambda x: x.mul_((torch.arange(x.numel()) % 2).view(x.shape)),
    "clamp": lambda x: x.clamp_(-0.3, 0.4),
    "zero": lambda x: x.zero_(),
    "copy": lambda x: x.copy_(torch.linspace(-1, 1, x.numel()).view(x.shape)),
    "fill": lambda x: x.fill_(2.0),
    "set one": lambda x: x.__setitem__(0, 1.5),
    "out": lambda x: torch.mul(torch.ones(x.shape), 1.25, out=x),
    "sign": lambda x: x.sign_(),
    "nan to num": lambda x: torch.nan_to_num_(x),
    "foreach": lambda x: torch._foreach_add_([x], 0.5),
}


@settings(max_examples=150)
@given(
    bits=st.sampled_from((8, 12)),
    steps=st.lists(st.tuples(st.sampled_from(sorted(VIEWS)), st.sampled_from(sorted(WRITES))), min_size=1, max_size=4),
)
def test_writing_reaches_the_codes_through_any_view(bits: int, steps: list[tuple[str, str]]) -> None:
    coded, dense = pair(bits)
    assert coded.grad is not None
    assert dense.grad is not None
    largest = dense.grad.abs().max().item()
    error = 0.0
    for view, write in steps:
        for p in (coded, dense):
            assert p.grad is not None
            WRITES[write](VIEWS[view](p.grad))
        largest = max(largest, dense.grad.abs().max().item())
        error = 3 * error + largest * STEP[bits] * 1.01
        assert isinstance(coded.grad, CodedGradient)
        assert torch.equal(VIEWS[view](coded.grad) + 0, VIEWS[view](coded.grad + 0))
        if write != "sign":  # a value that rounds to another sign
            assert ((coded.grad - dense.grad).abs() <= error + 1e-6).all()
        dense.grad.copy_(coded.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_gradients_follow_a_module_to_another_dtype(dtype: torch.dtype) -> None:
    for swap in (False, True):
        model = nn.Linear(8, 4)
        gradients = compress_gradients(model, bits=12)
        model(torch.ones(2, 8)).sum().backward()
        norm = gradients.norm()
        torch.__future__.set_swap_module_params_on_conversion(swap)
        try:
            model.to(dtype)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        assert model.weight.grad is not None
        assert model.weight.grad.dtype == dtype
        assert gradients.norm() == norm
        model(torch.ones(2, 8, dtype=dtype)).sum().backward()
        assert gradients.norm().item() == pytest.approx(2 * norm.item(), rel=0.002)
        assert isinstance(model.weight.grad, CodedGradient)
        before = model.weight.detach().clone()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert not torch.equal(before, model.weight)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, scale: float, steps: int = 4) -> list[float]:
    """A loop with torch's GradScaler and clipping; the scales it came to."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
    scales = []
    for step in range(steps):
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(step))
        scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("scale", [2.0**10, 2.0**126])
@pytest.mark.parametrize("kind", ["SGD", "AdamW8bit"])
def test_grad_scaler_unscales_and_skips(scale: float, kind: str) -> None:
    ends, scales = [], []
    for compressed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 3))
        start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        if compressed:
            compress_gradients(model, bits=12)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        if kind == "AdamW8bit":
            optimizer = AdamW8bit(model.parameters(), lr=0.01)
        scales.append(train(model, optimizer, scale))
        ends.append(nn.utils.parameters_to_vector(model.parameters()).detach() - start)
    assert scales[0] == scales[1]
    assert ends[0].norm() > 0
    assert (ends[0] - ends[1]).norm() < 0.02 * ends[0].norm()


def test_compiled_model_accumulates() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))
    exact = copy.deepcopy(model)
    compress_gradients(model, bits=12)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        compiled(torch.ones(2, 12)).square().sum().backward()
        exact(torch.ones(2, 12)).square().sum().backward()
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        assert isinstance(p.grad, CodedGradient)
        torch.testing.assert_close(p.grad + 0, q.grad, rtol=0.01, atol=0.01)


def test_parameters_added_replaced_unfrozen_and_tied_are_counted() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    model[0].requires_grad_(False)
    gradients = compress_gradients(model, bits=12)
    model[0].requires_grad_(True)  # unfrozen
    model[1] = nn.Linear(6, 6)  # replaced
    model.append(nn.Linear(6, 6))  # added
    model[3].weight = model[2].weight  # tied

    def check() -> None:
        gradients.zero_()
        exact = copy.deepcopy(model)
        for one in (model, exact):
            one(torch.ones(2, 6)).square().sum().backward()
        present = [p.grad for p in exact.parameters() if p.grad is not None]
        for _ in range(2):
            norm = nn.utils.get_total_norm(present)
            assert nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item() == (
                pytest.approx(norm.item(), rel=0.002)
            )
            assert gradients.norm().item() == pytest.approx(norm.item(), rel=0.002)
        assert all(p.grad is None or isinstance(p.grad, CodedGradient) for p in model.parameters())

    check()
    assert len(gradients.parameters) == 7
    model[2].requires_grad_(False)  # frozen
    check()


def test_parameters_join_in_a_loop_that_knows_torch_only() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    compress_gradients(model)
    model[0] = nn.Linear(6, 6)
    model[1].load_state_dict({key: value.clone() for key, value in model[1].state_dict().items()}, assign=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(torch.ones(2, 6)).sum().backward()
        if step == 1:
            assert all(isinstance(p.grad, CodedGradient) for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()


def test_stores_of_parts_are_apart() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    first, second = compress_gradients(model[0]), compress_gradients(model[1], bits=12)
    model(torch.ones(2, 6)).sum().backward()
    both = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert (first.norm() ** 2 + second.norm() ** 2).sqrt().item() == pytest.approx(both.item(), rel=1e-6)
    model[1].weight = model[0].weight  # belongs to the first store, and is counted there alone
    first.zero_()
    second.zero_()
    model(torch.ones(2, 6)).sum().backward()
    assert list(second.gradients()) == ["bias"]
    assert quantized_gradient(model[1].weight) is first.gradients()["weight"]


def test_gradients_of_before_are_taken_over() -> None:
    model = nn.Linear(6, 6)
    model(torch.ones(2, 6)).sum().backward()
    assert model.weight.grad is not None
    before = model.weight.grad.clone()
    compress_gradients(model, bits=12)
    model(torch.ones(2, 6)).sum().backward()
    torch.testing.assert_close(model.weight.grad + 0, 2 * before, rtol=1e-3, atol=0)


@pytest.mark.parametrize("bits", [8, 12])
def test_gradients_of_another_dtype_than_the_parameters_keep_it(bits: int) -> None:
    model = nn.Linear(64, 32).bfloat16()
    for p in model.parameters():
        p.grad_dtype = torch.float32
    gradients = compress_gradients(model, bits=bits)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    for _ in range(2):
        model(x).float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    coded = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    gradients.dequantize_to_grad()
    for p, value in zip(model.parameters(), coded, strict=True):
        assert p.grad is not None
        assert type(p.grad) is torch.Tensor
        assert torch.equal(p.grad, value)
        assert value.any()


def test_parameters_of_several_tensors_are_refused() -> None:
    model = nn.Linear(64, 32)
    model.weight = nn.Parameter(TwoTensor(torch.ones(32, 64), torch.ones(32, 64)))
    with pytest.raises(ModelError, match="parameter weight is a TwoTensor, which consists of several tensors"):
        compress_gradients(model)


def test_differentiable_gradients_are_refused_by_name() -> None:
    model = nn.Linear(6, 6)
    compress_gradients(model)
    with pytest.raises(TrainingError, match=r"is differentiable \(create_graph=True\)"):
        model(torch.ones(2, 6)).square().sum().backward(create_graph=True)
    model.zero_grad()
    value = model(torch.ones(2, 6)).square().sum()
    value.backward(retain_graph=True)
    value.backward()
    (penalty,) = torch.autograd.grad(model(torch.ones(2, 6)).square().sum(), model.weight, create_graph=True)
    penalty.square().sum().backward()
    assert isinstance(model.weight.grad, CodedGradient)


def test_writes_past_torch_are_refused_and_no_memory_is_moved() -> None:
    """A numpy array would be a copy, whose writes the gradient never sees; memory to share there is none."""
    coded, _ = pair()
    before = coded.grad + 0  # type: ignore[operator]
    for array in (coded.grad.numpy(), coded.grad.numpy(force=True), np.asarray(coded.grad)):  # type: ignore[union-attr]
        with pytest.raises(ValueError, match="read-only"):
            array *= 2
    with pytest.raises(FormatError, match="shared memory"):
        nn.ParameterList([coded]).share_memory()
    assert torch.equal(coded.grad + 0, before)  # type: ignore[operator]


def test_hooks_of_others_see_the_gradient() -> None:
    model = nn.Linear(6, 6, bias=False)
    seen: list[Tensor] = []
    model.weight.register_hook(lambda gradient: seen.append(gradient))
    compress_gradients(model)
    model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    model(torch.ones(2, 6)).sum().backward()
    assert type(seen[0]) is Tensor
    assert isinstance(seen[1], CodedGradient)


def test_models_are_copied_and_saved_without_the_store() -> None:
    model = nn.Linear(6, 6)
    gradients = compress_gradients(model)
    model(torch.ones(2, 6)).sum().backward()
    twin = copy.deepcopy(model)
    assert twin.weight.grad is None
    twin(torch.ones(2, 6)).sum().backward()
    assert type(twin.weight.grad) is Tensor
    assert not isinstance(twin.weight.grad, CodedGradient)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded.weight, model.weight)
    assert gradients.state == "accumulating"
    compress_gradients(twin)
