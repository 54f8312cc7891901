"""The gradient store in one process: what is folded, freed, scaled, clipped, refused."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import laconic
import laconic.optim
from laconic.errors import ConfigError, FormatError, ModelError, TrainingError
from laconic.formats import CodedGradient, QuantizedGradient, quantized_gradient, set_quantized_gradient
from laconic.gradients import CompressedGradients, compress_gradients
from laconic.gradients.buckets import Buckets
from laconic.gradients.store import _gradient_like
from tests.activations.models import alive_gradients, loss_of, make_ids, make_model

BITS = (8, 12)
STEP = {8: 1 / 254, 12: 1 / 254 / 14}
"""Largest error of one rounding, as a share of the block's largest magnitude."""


class Net(nn.Module):
    """Two layers, the first used twice when tied."""

    def __init__(self, tied: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(12, 12, dtype=dtype)
        self.second = nn.Linear(12, 12, dtype=dtype)
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def batch(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(5, 12, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain_gradients(model: nn.Module, losses: list[Callable[[nn.Module], Tensor]]) -> dict[str, Tensor]:
    """What autograd accumulates in fp64 of separate backwards, without compression."""
    total: dict[str, Tensor] = {}
    for loss in losses:
        model.zero_grad()
        loss(model).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                total[name] = total.get(name, torch.zeros(())) + parameter.grad.double()
    model.zero_grad()
    return total


def blockwise_largest(x: Tensor) -> Tensor:
    """For each element the largest magnitude of its block of 128."""
    flat = x.flatten()
    padded = torch.nn.functional.pad(flat.abs(), (0, -flat.numel() % 128)).view(-1, 128)
    return padded.amax(-1, keepdim=True).expand_as(padded).flatten()[: flat.numel()].view_as(x)


def assert_stored(gradients: CompressedGradients, expected: dict[str, Tensor], slack: float) -> None:
    """Each stored gradient is `expected` up to `slack` rounding steps of its block."""
    found = gradients.gradients()
    assert found.keys() == expected.keys()
    for name, exact in expected.items():
        bound = slack * STEP[gradients.bits] * blockwise_largest(exact) + 1e-7 * exact.abs().max()
        assert ((found[name].dequantize() - exact).abs() <= bound).all(), name


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_backward_is_one_quantization(bits: int, dtype: torch.dtype) -> None:
    model = Net(dtype=dtype)
    expected = plain_gradients(model, [lambda m: m(batch(1, dtype)).square().sum()])
    gradients = compress_gradients(model, bits=bits)
    model(batch(1, dtype)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, CodedGradient)
        stored, fresh = gradients.gradients()[name], QuantizedGradient.zeros(parameter.shape, bits)
        fresh.accumulate_(expected[name].to(dtype))
        assert torch.equal(stored.codes, fresh.codes)
        assert torch.equal(stored.dequantize(), fresh.dequantize())
        assert stored is quantized_gradient(parameter)


@pytest.mark.parametrize("bits", BITS)
def test_micro_batches_add_up(bits: int) -> None:
    model = Net()
    losses = [lambda m, seed=seed: m(batch(seed)).exp().mean() for seed in range(6)]
    expected = plain_gradients(model, losses)
    gradients = compress_gradients(model, bits=bits)
    for loss in losses:
        loss(model).backward()
    assert_stored(gradients, expected, slack=6 * 1.5)


def test_every_gradient_is_freed_before_the_next_one_is_there() -> None:
    model = make_model("llama")
    counts = alive_gradients(model)
    gradients = compress_gradients(model)
    gc.collect()
    gc.disable()
    try:
        loss_of(model, make_ids()).backward()
    finally:
        gc.enable()
    assert len(counts) == len(list(model.parameters())) == len(gradients.gradients())
    assert max(counts) == 1
    assert all(isinstance(parameter.grad, CodedGradient) for parameter in model.parameters())


@pytest.mark.parametrize(("bits", "bytes_per_element"), [(8, 1 + 4 / 128), (12, 1.5 + 8 / 128)])
def test_store_takes_the_bytes_it_says(bits: int, bytes_per_element: float) -> None:
    model = nn.Linear(256, 64, bias=False)
    gradients = compress_gradients(model, bits=bits)
    assert gradients.nbytes == 0
    model(torch.ones(2, 256)).sum().backward()
    assert gradients.nbytes == 256 * 64 * bytes_per_element
    assert f"in {bits} bits" in str(gradients)
    gradients.zero_()
    assert gradients.nbytes == 0


def test_its_line_names_bytes_and_what_has_no_gradient() -> None:
    model = Net()
    gradients = compress_gradients(model)
    model(batch(1)).sum().backward()
    held = 2 * (12 + 12 * 12) + 4 * 2 * (1 + 2)  # codes of 8 bits, a scale to 128 of them
    assert str(gradients) == (
        f"gradients of 4 parameters in 8 bits: {held:,} bytes held now for 312 elements, float32 takes 1,248"
    )


def test_tied_parameter_gets_the_sum_once() -> None:
    model = Net(tied=True)
    expected = plain_gradients(model, [lambda m: m(batch(1)).square().sum()])
    calls = 0

    def count(_: Tensor) -> None:
        nonlocal calls
        calls += 1

    model.first.weight.register_post_accumulate_grad_hook(count)
    gradients = compress_gradients(model)
    assert list(gradients.parameters) == ["first.weight", "first.bias", "second.bias"]
    model(batch(1)).square().sum().backward()
    assert calls == 1
    assert_stored(gradients, expected, slack=1.001)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_regions_fold_too(use_reentrant: bool) -> None:
    model = Net(tied=True)
    x = batch(3).requires_grad_()
    expected = plain_gradients(model, [lambda m: m(x).square().sum()])
    gradients = compress_gradients(model, bits=12)
    y = torch.tanh(checkpoint(model.first, x, use_reentrant=use_reentrant))
    checkpoint(model.second, y, use_reentrant=use_reentrant).square().sum().backward()
    assert_stored(gradients, expected, slack=3)


def test_unused_and_frozen_parameters_have_no_gradient() -> None:
    model = Net()
    model.first.bias.requires_grad_(False)
    gradients = compress_gradients(model)
    model.first(batch(1)).sum().backward()
    assert gradients.without_gradient == ["second.weight", "second.bias"]
    assert list(gradients.gradients()) == ["first.weight"]
    assert "without gradient: second.weight, second.bias" in str(gradients)


def test_gradient_that_bypassed_the_hook_is_found() -> None:
    # As the separate weight backward of zero-bubble pipelines leaves it.
    model = Net()
    gradients = compress_gradients(model)
    model.first.weight.grad = torch.full((12, 12), 127.0)
    assert gradients.norm() == 127 * 12
    assert isinstance(model.first.weight.grad, CodedGradient)


@pytest.mark.parametrize("max_norm", [-1.0, float("nan")])
def test_norms_that_would_turn_gradients_around_are_refused(max_norm: float) -> None:
    with pytest.raises(ConfigError, match=f"max_norm is {max_norm}, but it must be at least 0"):
        compress_gradients(make_model("llama")).clip_(max_norm)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("norm_type_scale", [0.01, 1.0, 100.0])
def test_clipping_is_torchs(bits: int, norm_type_scale: float) -> None:
    model = make_model("llama")
    gradients = compress_gradients(model, bits=bits)
    loss_of(model, make_ids()).backward()
    dense = {name: gradient.dequantize() for name, gradient in gradients.gradients().items()}
    max_norm = norm_type_scale * gradients.norm().item()
    parameters = [nn.Parameter(value) for value in dense.values()]
    for parameter, value in zip(parameters, dense.values(), strict=True):
        parameter.grad = value.clone()
    expected = nn.utils.clip_grad_norm_(parameters, max_norm)
    norm = gradients.clip_(max_norm)
    assert norm.shape == ()
    torch.testing.assert_close(norm.float(), expected, rtol=1e-6, atol=0)
    for parameter, gradient in zip(parameters, gradients.gradients().values(), strict=True):
        torch.testing.assert_close(gradient.dequantize(), parameter.grad, rtol=1e-6, atol=1e-12)
    assert gradients.norm() <= max_norm * (1 + 1e-6) or norm_type_scale > 1


def test_norm_can_leave_out_copies() -> None:
    model = Net()
    gradients = compress_gradients(model)
    model(batch(1)).square().sum().backward()
    weight = gradients.gradients()["first.weight"].dequantize().double().norm().item()
    assert gradients.norm(counted=[model.first.weight]).item() == pytest.approx(weight)
    norm = gradients.clip_(weight / 2, counted=[model.first.weight])
    assert norm.item() == pytest.approx(weight)
    assert gradients.norm(counted=[model.first.weight]).item() == pytest.approx(weight / 2, rel=1e-5)


def test_compressed_activations_and_gradients_train_together() -> None:
    losses = {}
    for kind in ("plain", "compressed"):
        model, ids = make_model("llama"), make_ids()
        optimizer = laconic.optim.AdamW8bit(model.parameters(), lr=3e-3)
        gradients = None
        if kind == "compressed":
            laconic.compress_activations(model, bits=4)
            gradients = compress_gradients(model)
        for _ in range(12):
            loss = loss_of(model, ids)
            loss.backward()
            if gradients is not None:
                assert all(isinstance(parameter.grad, CodedGradient) for parameter in model.parameters())
                gradients.clip_(1.0)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses[kind] = loss.item()
    assert losses["compressed"] == pytest.approx(losses["plain"], rel=0.03)
    assert losses["compressed"] < 0.8 * loss_of(make_model("llama"), make_ids()).item()


def test_compiled_model_folds_its_gradients() -> None:
    model = Net()
    expected = plain_gradients(model, [lambda m: m(batch(1)).square().sum()])
    gradients = compress_gradients(model, bits=12)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(batch(1)).square().sum().backward()
    assert_stored(gradients, expected, slack=1.01)


def test_scaling_by_a_power_of_two_is_exact() -> None:
    model = Net()
    gradients = compress_gradients(model, bits=12)
    model(batch(1)).sum().backward()
    before = {name: gradient.dequantize() for name, gradient in gradients.gradients().items()}
    gradients.scale_(2.0**-5)
    gradients.scale_(torch.tensor(2.0**3))
    for name, gradient in gradients.gradients().items():
        assert torch.equal(gradient.dequantize(), before[name] / 4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_value_that_is_not_finite_is_found(value: float) -> None:
    model = Net()
    gradients = compress_gradients(model)
    model(batch(1)).sum().backward()
    assert not gradients.found_nonfinite()
    (model(batch(1)).sum() * value).backward()
    assert gradients.found_nonfinite()
    assert not gradients.clip_(1.0).isfinite()
    gradients.zero_()
    model(batch(1)).sum().backward()
    assert not gradients.found_nonfinite()


def test_zero_forgets_and_a_gradient_taken_off_is_not_counted() -> None:
    model = Net()
    gradients = compress_gradients(model)
    model(batch(1)).sum().backward()
    first = gradients.norm()
    set_quantized_gradient(model.first.weight, None)  # as an optimizer's zero_grad does
    assert gradients.norm() < first
    gradients.zero_()
    assert gradients.gradients() == {}
    model(batch(1)).sum().backward()
    assert gradients.norm() == first


def test_dequantized_gradients_serve_any_optimizer() -> None:
    model = Net(dtype=torch.bfloat16)
    gradients = compress_gradients(model, bits=12)
    model(batch(1, torch.bfloat16)).sum().backward()
    expected = {name: gradient.dequantize() for name, gradient in gradients.gradients().items()}
    gradients.dequantize_to_grad([model.first.bias])
    assert list(gradients.gradients()) == ["first.weight", "second.weight", "second.bias"]
    # What went to grad comes back with the next accumulation; nothing is lost.
    model(batch(1, torch.bfloat16)).sum().backward()
    gradients.dequantize_to_grad()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.bfloat16
        torch.testing.assert_close(parameter.grad.float(), 2 * expected[name], rtol=2e-2, atol=2e-3)
    before = model.first.weight.detach().clone()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not torch.equal(model.first.weight, before)


def test_removed_hooks_leave_gradients_to_autograd() -> None:
    model = Net()
    gradients = compress_gradients(model)
    gradients.remove()
    model(batch(1)).sum().backward()
    assert model.first.weight.grad is not None
    laconic.compress_gradients(model)


@settings(max_examples=40)
@given(
    numel=st.sampled_from((0, 1, 127, 128, 129)) | st.integers(0, 400),
    bits=st.sampled_from(BITS),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    strided=st.booleans(),
    accumulations=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_any_parameter_is_stored_within_the_bound(
    numel: int, bits: int, dtype: torch.dtype, strided: bool, accumulations: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Autograd lays a gradient out as its parameter is.
    parameter = nn.Parameter(torch.zeros(2, numel, dtype=dtype).t() if strided else torch.zeros(numel, dtype=dtype))
    compress_gradients(nn.ParameterList([parameter]), bits=bits)
    exact = torch.zeros(parameter.shape, dtype=torch.float64)
    largest = torch.zeros_like(exact)
    for _ in range(accumulations):
        weight = torch.randn(parameter.shape, generator=generator).to(dtype)
        (parameter * weight).sum().backward()
        exact += weight.double()
        largest = torch.maximum(largest, blockwise_largest(exact))
    stored = quantized_gradient(parameter)
    assert stored is not None
    assert stored.shape == parameter.shape
    bound = accumulations * STEP[bits] * largest * 1.1 + 1e-6
    assert ((stored.dequantize() - exact).abs() <= bound).all()


def test_error_grows_no_faster_than_derived() -> None:
    # K roundings, each at most half a step of the block's scale at that time: linear in K at worst, about sqrt(K) here.
    generator = torch.Generator().manual_seed(0)
    signal = torch.randn(1 << 14, generator=generator)
    errors: dict[tuple[int, int], float] = {}
    for bits in BITS:
        stored, exact = QuantizedGradient.zeros((1 << 14,), bits), torch.zeros(1 << 14, dtype=torch.float64)
        bound = torch.zeros_like(exact)
        for k in range(1, 65):
            gradient = 0.3 * signal + torch.randn(1 << 14, generator=generator)
            stored.accumulate_(gradient)
            exact += gradient.double()
            bound += STEP[bits] * 1.01 * blockwise_largest(stored.dequantize().double())
            error = stored.dequantize() - exact
            assert (error.abs() <= bound).all()
            errors[bits, k] = (error.norm() / exact.norm()).item()
    assert errors[8, 64] < 0.05
    assert errors[12, 64] < 0.005
    assert errors[8, 1] < errors[8, 16] < errors[8, 64] < 10 * errors[8, 1]


# --- refusals ---


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.double_ = nn.Linear(2, 2).double()


def test_bad_models_are_refused_with_the_remedy() -> None:
    with pytest.raises(ModelError, match=r"model is str, but it must be a torch\.nn\.Module"):
        compress_gradients("model")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"'1' makes sparse gradients, .* use sparse=False"):
        compress_gradients(nn.Sequential(nn.Linear(2, 2), nn.Embedding(3, 2, sparse=True)))
    with pytest.raises(ModelError, match="no parameter that requires a gradient"):
        compress_gradients(Net().requires_grad_(False))
    with pytest.raises(ModelError, match=r"parameter double_.weight is float64, .* convert or freeze it"):
        compress_gradients(Mixed())
    with pytest.raises(
        ModelError, match=r"parameter 0\.weight gets its shape in the first forward.*run the model once"
    ):
        compress_gradients(nn.Sequential(nn.LazyLinear(4)))
    with pytest.raises(FormatError, match=r"bits is 4, but it must be 8 .* or 12"):
        compress_gradients(Net(), bits=4)
    with pytest.raises(ConfigError, match="bucket_nbytes is 0, but it must be positive"):
        compress_gradients(Net(), bucket_nbytes=0)


def test_model_that_is_compressed_is_refused() -> None:
    model = Net()
    compress_gradients(model)
    with pytest.raises(ModelError, match=r"first.weight is compressed already; call remove\(\)"):
        compress_gradients(model)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_a_gradient_that_lies_otherwise_than_its_parameter_is_stored_as_the_parameter_lies(
    placement: Replicate | Shard,
) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.arange(48.0).view(6, 8)
        value = DTensor.from_local(whole, mesh, [Replicate()])
        parameter = nn.Parameter(torch.zeros_like(value).redistribute(placements=[placement]))
        parameter.grad = value
        expected = {0: whole[3:], 1: whole[:, 4:], None: whole}[getattr(placement, "dim", None)]
        assert torch.equal(_gradient_like(parameter, "weight"), expected)
    finally:
        dist.destroy_process_group()


def test_sparse_gradient_is_refused_and_kept() -> None:
    model = nn.Embedding(5, 3)
    compress_gradients(model)
    model.sparse = True
    with pytest.raises(ModelError, match=r"the gradient of weight is sparse, .* use sparse=False"):
        model(torch.tensor([1])).sum().backward()
    assert model.weight.grad is not None


# --- buckets ---


class Done:
    def wait(self) -> None:
        pass


def test_buckets_leave_in_one_order_whatever_arrives_first() -> None:
    sent: list[list[int]] = []
    buckets = Buckets([10, 10, 10, 30, 5], 20, lambda numbers: sent.append(numbers) or Done())
    buckets.expect(1)
    for number in (0, 1, 3):
        buckets.arrived(number)
    assert sent == []
    buckets.arrived(4)
    assert sent == [[4], [3]]
    buckets.arrived(2)
    assert sent == [[4], [3], [2, 1], [0]]
    with pytest.raises(TrainingError, match="a gradient of p0 arrived after its reduction had started"):
        buckets.check_open(0, "p0")
    assert buckets.is_under_way
    buckets.finish()
    buckets.expect(2)
    buckets.arrived(4)
    assert buckets.num_launched == 0
    with pytest.raises(TrainingError, match="announced twice"):
        buckets.expect(1)
    buckets.fail()
    for refused in (lambda: buckets.check_open(3, "p3"), lambda: buckets.expect(1)):
        with pytest.raises(TrainingError, match=r"ended with an exception.* call zero_\(\)"):
            refused()
    buckets.drain(1)
    assert sent[4:] == [[4]]
    assert not buckets.is_under_way
    sent.clear()
    buckets.put_last([4, 2])
    buckets.finish()
    assert sent == [[3], [1, 0], [4, 2]]


@pytest.mark.parametrize("number", [0, -1, True, 1.0, None])
def test_a_number_of_backwards_that_cannot_be_is_refused_and_changes_nothing(number: object) -> None:
    model = nn.Linear(4, 4)
    gradients = compress_gradients(model)
    with pytest.raises(ConfigError, match=r"num_backwards is .* at least 1"), gradients.last_micro_batch(number):  # type: ignore[arg-type]
        pytest.fail("the inside ran")
    with gradients.last_micro_batch():
        model(torch.ones(1, 4)).sum().backward()
    gradients.reduce()
    assert gradients.norm() > 0


def test_a_model_that_nobody_needs_any_more_is_freed() -> None:
    for steps in range(2):
        model = nn.Sequential(nn.Linear(64, 64))
        gradients = compress_gradients(model)
        for _ in range(steps):
            model(torch.randn(2, 64)).sum().backward()
        gone = weakref.ref(model)
        del model, gradients
        gc.collect()
        assert gone() is None


def test_a_result_that_nobody_keeps_goes_on_and_is_in_no_copy() -> None:
    model = nn.Linear(64, 64)
    compress_gradients(model)
    gc.collect()
    model(torch.randn(2, 64)).sum().backward()
    assert quantized_gradient(model.weight) is not None
    model.zero_grad()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        other(torch.randn(2, 64)).sum().backward()
        assert quantized_gradient(other.weight) is None
        assert other.weight.grad is not None


def test_a_deepspeed_engine_of_the_model_is_refused_whichever_came_first() -> None:
    def prologue(module: nn.Module, inputs: object) -> None:
        """Stands for the hook that an engine of any stage puts on the model's forward."""

    prologue.__module__ = "deepspeed.runtime.engine"
    model = make_model("llama")
    handle = model.register_forward_pre_hook(prologue)
    with pytest.raises(ModelError, match="of a DeepSpeed engine, which holds and reduces gradients itself"):
        compress_gradients(model)
    handle.remove()
    kept = compress_gradients(model)
    handle = model.register_forward_pre_hook(prologue)
    with pytest.raises(ModelError, match=r"of a DeepSpeed engine.*remove\(\) undoes compress_gradients"):
        loss_of(model, make_ids()).backward()
    kept.remove()
    model.zero_grad()
    loss_of(model, make_ids()).backward()
    handle.remove()
