"""AdamW8bit: torch's semantics, a bound on every step, quantized gradients, refusals, and states that come back."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import laconic
from laconic.errors import ConfigError, FormatError
from laconic.formats import QuantizedGradient, quantized_gradient, set_quantized_gradient
from laconic.formats.gradient import GRADIENT_FORMAT, RESIDUAL_FORMAT
from laconic.gradients import compress_gradients
from laconic.ops import adamw8bit_
from laconic.ops.adamw_scalars import largest_ratio, largest_step, widened
from laconic.optim import AdamW4bit, AdamW8bit
from laconic.optim.moments import _zero_moment, quantize_moment
from tests.grid import grid


def parameter(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(shape, generator=generator).to(dtype))


def quantized(gradient: Tensor, bits: int) -> QuantizedGradient:
    """`gradient`, fp32, as the gradient store would hold it."""
    flat = gradient.flatten()
    coarse = GRADIENT_FORMAT.quantize(flat)
    if bits == 8:
        return QuantizedGradient(gradient.shape, coarse.codes, coarse.scales)
    rest = RESIDUAL_FORMAT.quantize(flat - coarse.dequantize())
    return QuantizedGradient(gradient.shape, coarse.codes, coarse.scales, rest.codes, rest.scales)


def same_state(one: Any, two: Any) -> bool:
    return set(one) == set(two) and all(torch.equal(one[key], two[key]) for key in one)


def test_first_step_is_that_of_exact_adamw() -> None:
    ours, exact = parameter(20, 300), parameter(20, 300)
    gradient = torch.randn(20, 300) * torch.exp2(20 * torch.randn(20, 300)).clamp(1e-12, 1e12)
    gradient[3] = 0
    ours.grad, exact.grad = gradient.clone(), gradient.clone()
    AdamW8bit([ours], lr=0.01, weight_decay=0.1).step()
    torch.optim.AdamW([exact], lr=0.01, weight_decay=0.1).step()
    torch.testing.assert_close(ours, exact, rtol=1e-6, atol=3e-8)


@pytest.mark.parametrize("maximize", [False, True])
def test_follows_exact_adamw(maximize: bool) -> None:
    ours, exact = parameter(64, 512), parameter(64, 512)
    options: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "maximize": maximize}
    mine, theirs = AdamW8bit([ours], **options), torch.optim.AdamW([exact], **options)
    start = ours.detach().clone()
    for _ in range(20):
        gradient = torch.randn(64, 512) + 0.3
        ours.grad, exact.grad = gradient, gradient.clone()
        mine.step()
        theirs.step()
    moved = (exact - start).square().mean().sqrt()
    assert moved > 2e-3
    assert (ours - exact).square().mean().sqrt() < 0.02 * moved


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bits", [None, 8, 12])
def test_a_cuda_device_takes_the_steps_of_the_cpu(bits: int | None) -> None:
    ps = [parameter(33, 300), nn.Parameter(parameter(33, 300).detach().cuda())]
    optimizers = [AdamW8bit([p]) for p in ps]
    for step in range(3):
        gradient = torch.randn(33, 300, generator=torch.Generator().manual_seed(step))
        for p, optimizer in zip(ps, optimizers, strict=True):
            if bits is None:
                p.grad = gradient.to(p.device)
            else:
                set_quantized_gradient(p, quantized(gradient.to(p.device), bits))
            optimizer.step(gradient_factor=torch.tensor(0.5))
    assert torch.equal(ps[0], ps[1].cpu())
    there = {key: value.cpu() for key, value in optimizers[1].state[ps[1]].items()}
    assert same_state(optimizers[0].state[ps[0]], there)


def trained_loss(make: Callable[[Any], torch.optim.Optimizer], seed: int) -> float:
    """Held-out loss of a small network after it learned from another one."""
    torch.manual_seed(seed)
    teacher = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    student = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    optimizer = make(student.parameters())
    for _ in range(300):
        x = torch.randn(64, 64)
        optimizer.zero_grad()
        (student(x) - teacher(x).detach()).square().mean().backward()
        optimizer.step()
    x = torch.randn(2000, 64)
    with torch.no_grad():
        return float((student(x) - teacher(x)).square().mean())


@pytest.mark.ci
def test_training_ends_at_the_loss_of_exact_adamw() -> None:
    start = trained_loss(lambda ps: torch.optim.AdamW(ps, lr=0.0), 0)
    ours = sum(trained_loss(lambda ps: AdamW8bit(ps, lr=3e-3), seed) for seed in range(2))
    exact = sum(trained_loss(lambda ps: torch.optim.AdamW(ps, lr=3e-3), seed) for seed in range(2))
    assert exact < 0.05 * 2 * start
    assert ours == pytest.approx(exact, rel=0.02)


def test_states_take_two_bytes_per_weight() -> None:
    model = nn.Linear(512, 256)
    optimizer = AdamW8bit(model.parameters())
    model(torch.randn(3, 512)).sum().backward()
    optimizer.step()
    weight = optimizer.state[model.weight]
    assert {key: (value.dtype, tuple(value.shape)) for key, value in weight.items()} == {
        "step": (torch.float32, ()),
        "exp_avg_codes": (torch.uint8, (256, 512)),
        "exp_avg_scales": (torch.float32, (256, 2)),
        "exp_avg_sq_codes": (torch.uint8, (256, 512)),
        "exp_avg_sq_scales": (torch.float32, (256, 2)),
    }
    assert optimizer.state[model.bias]["exp_avg"].dtype == torch.float32
    assert optimizer.state_nbytes == 2 * (256 * 512 + 256 * 2 * 4) + 2 * 256 * 4


def test_states_of_4_bits_take_a_byte_per_weight() -> None:
    p = parameter(256, 513)
    optimizer = AdamW4bit([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert {key: (value.dtype, tuple(value.shape)) for key, value in optimizer.state[p].items()} == {
        "step": (torch.float32, ()),
        "exp_avg_codes": (torch.uint8, (256, 257)),
        "exp_avg_scales": (torch.float32, (256, 5)),
        "exp_avg_sq_codes": (torch.uint8, (256, 257)),
        "exp_avg_sq_scales": (torch.float32, (256, 5)),
    }
    assert optimizer.state_nbytes == 2 * 256 * (257 + 5 * 4)


def test_moments_of_4_bits_follow_exact_adamw_within_a_third_of_a_step() -> None:
    ours, exact = parameter(64, 512), parameter(64, 512)
    mine, theirs = AdamW8bit([ours], betas=(0.9, 0.95), bits=4), torch.optim.AdamW([exact], betas=(0.9, 0.95))
    for step in range(20):
        gradient = torch.randn(64, 512, generator=torch.Generator().manual_seed(step))
        before = ours.detach().clone(), exact.detach().clone()
        ours.grad, exact.grad = gradient, gradient.clone()
        mine.step()
        theirs.step()
    change, expected = ours.detach() - before[0], exact.detach() - before[1]
    assert (change - expected).norm() < 0.5 * expected.norm()
    assert (change * expected).sum() / expected.square().sum() == pytest.approx(0.95, abs=0.1)


def test_bits_stay_those_of_the_optimizer() -> None:
    p, optimizer = stepped(bits=4)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert twin.bits == 4
    assert optimizer.state_dict()["param_groups"][0]["moment_bits"] == 4
    # Groups of another optimizer bring no states along, and keep its bits
    assert "moment_bits" not in AdamW8bit(optimizer.param_groups).param_groups[0]
    assert optimizer.param_groups[0]["moment_bits"] == 4
    eight = AdamW8bit([parameter(3)])
    assert AdamW4bit(eight.param_groups).param_groups[0]["moment_bits"] == 4
    assert "moment_bits" not in eight.param_groups[0]
    assert AdamW4bit([parameter(3)]).bits == 4
    with pytest.raises(ConfigError, match="bits is 4 in a parameter group, but it is the same for all groups"):
        AdamW8bit([{"params": [p], "bits": 4}])


@pytest.mark.parametrize(
    ("shape", "eight"),
    [
        ((64, 64), True),
        ((63, 65), False),
        ((4096,), False),
        (((1 << 20) - 1,), False),
        ((1 << 20,), True),
        ((512, 1, 16), True),
        ((2048, 1, 8), False),
        ((1, 4096), True),
    ],
)
def test_small_parameters_and_vectors_keep_fp32(shape: tuple[int, ...], eight: bool) -> None:
    p = nn.Parameter(torch.zeros(shape))
    p.grad = torch.ones(shape)
    optimizer = AdamW8bit([p])
    optimizer.step()
    assert ("exp_avg_codes" in optimizer.state[p]) == eight
    torch.testing.assert_close(p.detach(), torch.full(shape, -1e-3))


def test_parameters_with_fp32_states_follow_torch_exactly() -> None:
    ours, exact = parameter(70), parameter(70)
    mine = AdamW8bit([ours], lr=0.1, weight_decay=0.2)
    theirs = torch.optim.AdamW([exact], lr=0.1, weight_decay=0.2)
    for _ in range(3):
        ours.grad = torch.randn(70)
        exact.grad = ours.grad.clone()
        mine.step()
        theirs.step()
    assert torch.equal(ours, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_parameters_move_as_wide_ones_do(dtype: torch.dtype) -> None:
    narrow, wide = parameter(64, 256, dtype=dtype), nn.Parameter(parameter(64, 256, dtype=dtype).float())
    bias = parameter(10, dtype=dtype)
    mine, theirs = AdamW8bit([narrow, bias], lr=0.1), AdamW8bit([wide], lr=0.1)
    gradient = torch.randn(64, 256).to(dtype)
    narrow.grad, wide.grad, bias.grad = gradient, gradient.float(), torch.ones(10, dtype=dtype)
    mine.step()
    theirs.step()
    assert torch.equal(narrow, wide.to(dtype))
    assert bias.dtype == dtype
    assert mine.state[bias]["exp_avg"].dtype == torch.float32


# --- the bound ---


def outlier(block: Tensor, generator: torch.Generator) -> Tensor:
    """One element of each block is a million times the others."""
    block[:, int(torch.randint(0, block.shape[1], (), generator=generator))] *= 1e6
    return block


def fading(block: Tensor, generator: torch.Generator) -> Tensor:
    """Each element has a magnitude of its own, from 1 down to 1e-18."""
    return block * torch.logspace(0, -18, block.shape[1])


def sparse(block: Tensor, generator: torch.Generator) -> Tensor:
    """Most gradients are zero."""
    return block * (torch.rand(block.shape, generator=generator) < 0.05)


def wild(block: Tensor, generator: torch.Generator) -> Tensor:
    """A new magnitude each time."""
    return block * torch.exp2(12 * torch.randn(block.shape, generator=generator))


def nothing(block: Tensor, generator: torch.Generator) -> Tensor:
    """No gradient at all."""
    return block * 0


def tiny(block: Tensor, generator: torch.Generator) -> Tensor:
    """Squares below the smallest number of fp32."""
    return block * 1e-22


KINDS: list[Callable[[Tensor, torch.Generator], Tensor]] = [outlier, fading, sparse, wild, nothing, tiny]


@settings(max_examples=120)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=30),
    betas=st.sampled_from([(0.9, 0.999), (0.9, 0.95), (0.0, 0.99), (0.95, 0.9), (0.5, 0.0)]),
    eps=st.sampled_from([1e-8, 0.0, 1e-15]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 1 << 30),
    bits=st.sampled_from([8, 4]),
)
def test_no_step_is_larger_than_adams_largest(
    kinds: list[Callable[[Tensor, torch.Generator], Tensor]],
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    seed: int,
    bits: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    p = nn.Parameter(torch.randn(4, 300, generator=generator))
    lr = 1e-2
    optimizer = AdamW8bit([p], lr, betas, eps, weight_decay, min_8bit_numel=0, bits=bits)
    for step, kind in enumerate(kinds, start=1):
        before = p.detach().double()
        p.grad = kind(torch.randn(4, 300, generator=generator), generator)
        optimizer.step()
        change = (p.detach().double() - before).abs()
        assert change.isfinite().all()
        bound = lr * largest_step(*betas, step) * (1 + 2.0**-15) + lr * weight_decay * before.abs()
        rounding = 2.0**-23 * (before.abs() + bound)
        assert (change <= bound + rounding).all(), (change / lr).max()
        if betas == (0.9, 0.999):  # what is usually quoted as Adam's worst case
            assert (change <= lr * 0.1 / 0.001**0.5 + lr * weight_decay * before.abs() + rounding).all()


@settings(max_examples=60)
@given(
    step=st.integers(1, 10**6),
    betas=st.tuples(st.floats(0, 0.999), st.floats(0.001, 0.9999)),
    exponents=st.tuples(st.integers(-40, 15), st.integers(-40, 15)),
    seed=st.integers(0, 1 << 30),
    bits=st.sampled_from([8, 4]),
)
def test_moments_of_any_bytes_keep_to_the_bound(
    step: int, betas: tuple[float, float], exponents: tuple[int, int], seed: int, bits: int
) -> None:
    # Moments that no training leaves: random codes, and scales that have nothing to do with each other.
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (2, 3, 300 * bits // 8), generator=generator, dtype=torch.uint8)
    scales = (
        torch.tensor(exponents)
        .view(2, 1, 1)
        .double()
        .mul(3.32)
        .exp2()
        .float()
        .expand(2, 3, {8: 2, 4: 3}[bits])
        .contiguous()
    )
    p, gradient = torch.randn(2, 3, 300, generator=generator)
    gradient *= torch.exp2(20 * torch.randn(3, 300, generator=generator))
    before = p.double()
    adamw8bit_(
        p,
        codes[0],
        scales[0],
        codes[1],
        scales[1],
        gradient,
        lr=1e-2,
        beta1=betas[0],
        beta2=betas[1],
        eps=1e-8,
        weight_decay=0.0,
        step=step,
        bits=bits,
    )
    bound = min(1e-2 * largest_step(*betas, step) * (1 + 2.0**-15), 3e38)
    assert ((p.double() - before).abs() <= bound + 2.0**-23 * (before.abs() + bound)).all()


@settings(max_examples=100)
@given(
    betas=st.lists(st.tuples(st.floats(0, 0.999), st.floats(0.001, 0.9999)), min_size=1, max_size=12),
    growth=st.floats(0.05, 20),
    seed=st.integers(0, 1 << 30),
)
def test_no_moments_of_changing_betas_are_beyond_their_bound(
    betas: list[tuple[float, float]], growth: float, seed: int
) -> None:
    gradients = torch.randn(len(betas), 50, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    m, v, seen = torch.zeros(50, dtype=torch.float64), torch.zeros(50, dtype=torch.float64), None
    for step, ((beta1, beta2), gradient) in enumerate(zip(betas, gradients, strict=True), start=1):
        gradient = gradient.abs() * growth**step
        m, v = beta1 * m + (1 - beta1) * gradient, beta2 * v + (1 - beta2) * gradient.square()
        seen = widened(seen, beta1, beta2)
        assert (m <= largest_ratio(seen, step) * v.sqrt() * (1 + 1e-12)).all()


def _one_cycle(optimizer: torch.optim.Optimizer, step: int) -> None:
    """What OneCycleLR writes by default: beta1 falls from 0.95 to 0.85 and rises again."""
    for group in optimizer.param_groups:
        group["betas"] = (0.85 + 0.1 * abs(step - 10) / 10, 0.999)


def _later_averages(optimizer: torch.optim.Optimizer, step: int) -> None:
    """beta2 falls, as where a run goes on with shorter averages."""
    for group in optimizer.param_groups:
        group["betas"] = (0.9, 0.999 if step < 5 else 0.95)


def _longer_averages(optimizer: torch.optim.Optimizer, step: int) -> None:
    """beta2 = 1 - step**-0.8, as in PaLM."""
    for group in optimizer.param_groups:
        group["betas"] = (0.9, torch.tensor(1 - (step + 1) ** -0.8))


@pytest.mark.parametrize("way", ["step", "backward", "saved", "saved by torch"])
@pytest.mark.parametrize("schedule", [_one_cycle, _later_averages, _longer_averages])
def test_betas_may_change_between_steps(schedule: Callable[[torch.optim.Optimizer, int], None], way: str) -> None:
    ends = []
    for kind in (AdamW8bit, torch.optim.AdamW):
        p = parameter(32, 256)
        start = p.detach().clone()
        optimizer: Any = kind([p], lr=1e-2)
        if way == "backward" and kind is AdamW8bit:
            optimizer.update_in_backward()
        generator = torch.Generator().manual_seed(1)
        direction = torch.randn(32, 256, generator=generator)
        for step in range(20):
            if step == 5 and way.startswith("saved"):
                by_torch = way == "saved by torch" and kind is AdamW8bit
                state = laconic.optim.to_adamw_state(optimizer) if by_torch else optimizer.state_dict()
                optimizer = kind([p], lr=1e-2)
                optimizer.load_state_dict(state)
            schedule(optimizer, step)
            noise = torch.randn(32, 256, generator=generator)
            (p * (direction + 0.1 * noise)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append((p.detach() - start).double())
    assert (ends[0] - ends[1]).norm() < 0.04 * ends[1].norm()


@pytest.mark.parametrize("seen", [(0.9, 0.9, 0.999), "0.9", (0.9, 0.9, 0.999, 1.0), (0.9, 0.9, 0.999, float("nan"))])
def test_betas_of_steps_before_that_are_none_are_refused(seen: Any) -> None:
    p = parameter(32, 256)
    optimizer = AdamW8bit([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    state = optimizer.state_dict()
    state["param_groups"][0]["betas_seen"] = seen
    with pytest.raises((ConfigError, FormatError), match=r"betas_seen is .* but it must be four numbers"):
        optimizer.load_state_dict(state)


def test_exact_adam_reaches_the_bound() -> None:
    # Gradients that grow by beta2 / beta1 a step; the frequently quoted (1 - b1) / sqrt(1 - b2) = 3.16 is passed.
    p = nn.Parameter(torch.zeros(1, 1, dtype=torch.float64))
    optimizer = torch.optim.AdamW([p], lr=1.0, eps=0.0, weight_decay=0.0)
    for step in range(1, 1001):
        before = p.item()
        p.grad = torch.full((1, 1), 1e-40 * (0.999 / 0.9) ** step, dtype=torch.float64)
        optimizer.step()
    assert abs(p.item() - before) == pytest.approx(largest_step(0.9, 0.999, 1000), rel=1e-9)
    assert abs(p.item() - before) > 5.7


def extreme(shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator, share: float) -> Tensor:
    """Finite gradients: ordinary ones, and a share of all magnitudes that the dtype has, its largest included."""
    x = torch.randn(shape, generator=generator)
    largest = torch.finfo(dtype).max
    magnitudes = torch.rand(shape, generator=generator).mul(149 + 128).sub(149).clamp(max=127.9).exp2()
    magnitudes = magnitudes.clamp(max=largest)
    magnitudes[torch.rand(shape, generator=generator) < 0.2] = largest
    is_extreme = torch.rand(shape, generator=generator) < share
    return torch.where(is_extreme, magnitudes * x.sign(), x).to(dtype)


@pytest.mark.parametrize(
    ("betas", "gradient", "dtype"),
    grid(
        [(0.9, 0.999), (0.9, 0.95), (0.0, 0.0), (0.95, 0.8)],
        ["dense", "8 bits", "12 bits"],
        [torch.float32, torch.bfloat16, torch.float16],
    ),
)
def test_finite_gradients_of_any_size_leave_finite_weights(
    dtype: torch.dtype, gradient: str, betas: tuple[float, float]
) -> None:
    # Squares of what is beyond 2**64 overflow fp32, and one block's scale is that of 256 weights.
    generator = torch.Generator().manual_seed(0)
    for shape, share in (((16, 300), 1 / 256), ((3, 5000), 0.3), ((64, 256), 0.0)):
        p = parameter(*shape, dtype=dtype)
        optimizer = AdamW8bit([p], lr=1e-3, betas=betas, weight_decay=0.0)
        for step in range(1, 7):
            before = p.detach().float().clone()
            values = extreme(
                shape, dtype if gradient == "dense" else torch.float32, generator, share if step < 5 else 0
            )
            if share == 0 and step == 2:
                values[0, 0] = min(2e19, torch.finfo(values.dtype).max)  # one element
            if gradient == "dense":
                p.grad = values
            else:
                # The largest number of all rounds up to infinity when it is read from codes.
                values = values.clamp(-3.4e38, 3.4e38)
                set_quantized_gradient(p, quantized(values, int(gradient.split()[0])))
            optimizer.step()
            assert p.isfinite().all(), (shape, step)
            assert all(value.isfinite().all() for value in optimizer.state[p].values()), (shape, step)
            rounding = torch.finfo(dtype).eps * torch.maximum(before.abs(), p.float().abs()) + torch.finfo(dtype).tiny
            assert ((p.float() - before).abs() <= 1e-3 * largest_step(*betas, step) * 1.001 + rounding).all()


def test_a_huge_element_moves_as_in_adam_and_its_neighbours_in_other_blocks_as_if_it_were_not_there() -> None:
    for huge in (4e18, 2e19, 1e20, 5e20, 3.4e38):
        ours, exact, without = parameter(32, 512), parameter(32, 512), parameter(32, 512)
        optimizers = [AdamW8bit([ours]), torch.optim.AdamW([exact]), AdamW8bit([without])]
        for step in range(3):
            gradient = torch.randn(32, 512, generator=torch.Generator().manual_seed(step))
            without.grad = gradient.clone()
            if step == 0:
                gradient[5, 7] = huge
            ours.grad, exact.grad = gradient, gradient.clone()
            for optimizer in optimizers:
                optimizer.step()
        if huge < 1e21:  # torch has stopped that weight for good
            torch.testing.assert_close(ours[5, 7], exact[5, 7], rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(ours[5, 256:], without[5, 256:], rtol=0, atol=0)
        torch.testing.assert_close(ours[6:], without[6:], rtol=0, atol=0)


def test_an_element_without_gradient_does_not_move_and_a_late_one_moves_as_in_adam() -> None:
    ours, exact = parameter(16, 256), parameter(16, 256)
    mine, theirs = AdamW8bit([ours], weight_decay=0.0), torch.optim.AdamW([exact], weight_decay=0.0)
    start = ours.detach().clone()
    for step in range(6):
        gradient = torch.randn(16, 256)
        if step < 5:
            gradient[:, 128:] = 0
        ours.grad, exact.grad = gradient, gradient.clone()
        mine.step()
        theirs.step()
        if step < 5:
            assert torch.equal(ours[:, 128:], start[:, 128:])
    torch.testing.assert_close(ours[:, 128:], exact[:, 128:])


# --- many parameters ---


class Calls(TorchDispatchMode):
    """Remembers how many parameters each call of the op was given."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.laconic.adamw8bit_multi_.default:
            self.sizes.append(len(args[0]))
        return func(*args, **(kwargs or {}))


def call_sizes(optimizer: AdamW8bit) -> list[int]:
    with Calls() as calls:
        optimizer.step()
    return sorted(calls.sizes)


def test_a_step_is_one_call_per_group_dtype_and_kind_of_gradient() -> None:
    wide = [parameter(4, 64, seed=seed) for seed in range(5)]
    narrow = [parameter(4, 64, dtype=torch.bfloat16, seed=seed) for seed in range(3)]
    other = [parameter(4, 64, seed=seed) for seed in range(2)]
    optimizer = AdamW8bit([{"params": wide + narrow}, {"params": other, "betas": (0.8, 0.9)}], min_8bit_numel=0)
    for p in (*wide, *narrow, *other):
        p.grad = torch.randn(4, 64).to(p.dtype)
    assert call_sizes(optimizer) == [2, 3, 5]
    set_quantized_gradient(wide[0], quantized(torch.randn(4, 64), 8))
    set_quantized_gradient(wide[1], quantized(torch.randn(4, 64), 12))
    wide[2].grad = None
    assert call_sizes(optimizer) == [1, 1, 2, 2, 3]
    wide[2].grad = torch.randn(4, 64)  # a step behind the others
    assert call_sizes(optimizer) == [1, 1, 1, 2, 2, 3]


def test_parameters_step_together_as_each_does_alone() -> None:
    """Also with other memory from step to step, and when some have no gradient."""

    def parameters() -> list[nn.Parameter]:
        shapes = ((20, 300), (7, 64), (33, 131), (0, 64), (8, 512))
        return [parameter(*shape, seed=seed) for seed, shape in enumerate(shapes)] + [
            parameter(5, 70, dtype=torch.bfloat16),
            nn.Parameter(torch.randn(4, 16, 3, 3).contiguous(memory_format=torch.channels_last)),
        ]

    torch.manual_seed(0)
    together = parameters()
    alone = [nn.Parameter(p.detach().clone()) for p in together]
    options: dict[str, Any] = {"min_8bit_numel": 0, "weight_decay": 0.1, "lr": 1e-2}
    one, many = AdamW8bit(together, **options), [AdamW8bit([p], **options) for p in alone]
    for step in range(5):
        for number, (p, q) in enumerate(zip(together, alone, strict=True)):
            p.grad = None if (step + number) % 5 == 0 else torch.randn_like(p)
            q.grad = None if p.grad is None else p.grad.clone()
            if step == 2 and number % 2:
                p.data, q.data = torch.zeros_like(p), torch.zeros_like(q)
        one.step()
        for optimizer in many:
            optimizer.step()
        if step == 3:
            one.load_state_dict(copy.deepcopy(one.state_dict()))
    for number, (p, q) in enumerate(zip(together, alone, strict=True)):
        assert torch.equal(p, q), number
        assert same_state(one.state[p], many[number].state[q]), number


def test_parameters_that_share_memory_step_one_after_the_other() -> None:
    found = []
    for groups in ("one", "two"):
        whole = parameter(6, 64).detach()
        ps = [nn.Parameter(whole[:4]), nn.Parameter(whole[2:])]
        optimizer = AdamW8bit(ps if groups == "one" else [{"params": [p]} for p in ps], min_8bit_numel=0)
        for seed in range(3):
            for p in ps:
                p.grad = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
            assert call_sizes(optimizer) == [1, 1]
        found.append((whole, [optimizer.state[p] for p in ps]))
    assert torch.equal(found[0][0], found[1][0])
    assert all(same_state(one, two) for one, two in zip(found[0][1], found[1][1], strict=True))


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("how", ["twice", "views"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_small_parameters_that_share_memory_lose_no_update(how: str, dtype: torch.dtype) -> None:
    found = []
    for kind in (AdamW8bit, torch.optim.AdamW):
        whole = torch.ones(6, 8, dtype=dtype)
        ps = [nn.Parameter(whole)] * 2 if how == "twice" else [nn.Parameter(whole[:4]), nn.Parameter(whole[2:])]
        optimizer = kind(ps, lr=0.1)
        for seed in range(3):
            for p in ps:
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
            optimizer.step()
        found.append(whole)
    torch.testing.assert_close(*found, rtol=0.02 if dtype == torch.bfloat16 else 1e-6, atol=0.0)


class Around(Tensor):
    """A subclass around one tensor, as torchao's for fp8 gathers."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Around:
        made: Around = torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype)
        made.inner = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(Around, lambda x: x.inner, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return Around(out) if func is torch.ops.aten.detach.default else out


def test_parameters_of_several_tensors_are_refused_or_keep_fp32() -> None:
    def made(kind: Any, *shape: int) -> nn.Parameter:
        return nn.Parameter(kind(*(parameter(*shape, seed=seed).detach() for seed in range(2))))

    p = made(TwoTensor, 64, 128)
    p.grad = TwoTensor(torch.ones(64, 128), torch.ones(64, 128))
    with pytest.raises(FormatError, match=r"is a TwoTensor, which consists of several tensors.*larger min_8bit_numel"):
        AdamW8bit([p]).step()
    coded = AdamW8bit([parameter(64, 128)])
    coded.param_groups[0]["params"][0].grad = torch.ones(64, 128)
    coded.step()
    with pytest.raises(FormatError, match="is a TwoTensor, which consists of several tensors"):
        AdamW8bit([p]).load_state_dict(coded.state_dict())

    ours, exact = [], []
    for kind, found in ((AdamW8bit, ours), (torch.optim.AdamW, exact)):
        q = made(TwoTensor, 8, 8)
        optimizer = kind([q], lr=0.1)
        q.grad = TwoTensor(torch.ones(8, 8), -torch.ones(8, 8))
        optimizer.step()
        found += [q.a.detach(), q.b.detach()]  # type: ignore[attr-defined]
    for one, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(one, other)

    plain, wrapped = parameter(64, 128), nn.Parameter(Around(parameter(64, 128).detach()))
    for one in (plain, wrapped):
        one.grad = torch.ones(64, 128)
        AdamW8bit([one]).step()
    assert torch.equal(plain, wrapped.inner)  # type: ignore[attr-defined]


@pytest.mark.parametrize("shared", ["gradient of another", "gradient", "state"])
def test_what_steps_share_is_read_and_written_by_one_after_the_other(shared: str) -> None:
    p, q = parameter(4, 64), parameter(4, 64, seed=1)
    optimizer = AdamW8bit([p, q], min_8bit_numel=0)
    p.grad, q.grad = torch.ones(4, 64), torch.ones(4, 64)
    assert call_sizes(optimizer) == [2]
    if shared == "gradient of another":
        q.grad = p.data
    elif shared == "gradient":
        p.grad = p.data
    else:
        optimizer.state[q] = optimizer.state[p]
    assert call_sizes(optimizer) == [1, 1]
    assert optimizer.state[p]["step"] == (3 if shared == "state" else 2)


@pytest.mark.parametrize("kind", ["fake", "meta"])
def test_parameters_without_memory_step_in_one_call(kind: str) -> None:
    with FakeTensorMode() if kind == "fake" else nullcontext():
        device = "cpu" if kind == "fake" else "meta"
        ps = [nn.Parameter(torch.empty(64, 64, device=device)) for _ in range(2)]
        for p in ps:
            p.grad = torch.empty(64, 64, device=device)
        assert call_sizes(AdamW8bit(ps)) == [2]


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_listed_twice_takes_two_steps() -> None:
    p, q = parameter(4, 64), parameter(4, 64)
    twice, single = AdamW8bit([p, p], min_8bit_numel=0), AdamW8bit([q], min_8bit_numel=0)
    p.grad = q.grad = torch.randn(4, 64)
    twice.step()
    single.step()
    single.step()
    assert torch.equal(p, q)
    assert same_state(twice.state[p], single.state[q])


@pytest.mark.ci
def test_compiled_steps_leave_what_eager_ones_leave() -> None:
    ends = []
    for compiled in (False, True):
        ps = [parameter(8, 64, seed=seed) for seed in range(3)]
        optimizer = AdamW8bit(ps, min_8bit_numel=0)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for seed in range(3):
            for p in ps:
                p.grad = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
            step()
        ends.append([*ps, *(value for p in ps for value in optimizer.state[p].values())])
    assert all(torch.equal(one, two) for one, two in zip(*ends, strict=True))


# --- gradients ---


@pytest.mark.parametrize("bits", [8, 12])
@pytest.mark.parametrize("shape", [(64, 256), (33, 131), (70,)])
def test_quantized_gradients_step_as_their_values_do(bits: int, shape: tuple[int, ...]) -> None:
    one, two = parameter(*shape), parameter(*shape)
    first, second = AdamW8bit([one]), AdamW8bit([two])
    for seed in range(3):
        gradient = quantized(torch.randn(shape, generator=torch.Generator().manual_seed(seed)), bits)
        set_quantized_gradient(one, gradient)
        two.grad = gradient.dequantize()
        first.step()
        second.step()
        assert quantized_gradient(one) is gradient
    assert torch.equal(one, two)
    assert same_state(first.state[one], second.state[two])


class Allocations(TorchDispatchMode):
    """Remembers the largest result of any op."""

    largest_numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple) else (result,):
            if isinstance(value, Tensor):
                self.largest_numel = max(self.largest_numel, value.numel())
        return result


@pytest.mark.parametrize("bits", [8, 12])
def test_a_step_makes_no_copy_of_a_quantized_gradient(bits: int) -> None:
    p = parameter(64, 512)
    optimizer = AdamW8bit([p])
    for _ in range(2):  # the first step makes the states
        set_quantized_gradient(p, quantized(torch.randn(64, 512), bits))
        with Allocations() as allocations:
            optimizer.step(gradient_factor=torch.tensor(0.5))
    assert allocations.largest_numel <= 1


@pytest.mark.parametrize("bits", [None, 8])
def test_gradient_factor_multiplies_what_is_read(bits: int | None) -> None:
    ps = [parameter(32, 256), parameter(9)]
    qs = [parameter(32, 256), parameter(9)]
    first, second = AdamW8bit(ps), AdamW8bit(qs)
    for p, q in zip(ps, qs, strict=True):
        gradient = torch.randn(p.shape)
        if bits is None:
            p.grad, q.grad = gradient, gradient * 0.25
        else:
            set_quantized_gradient(p, quantized(gradient, bits))
            q.grad = quantized(gradient, bits).dequantize() * 0.25
    first.step(gradient_factor=torch.tensor(0.25))
    second.step()
    for p, q in zip(ps, qs, strict=True):
        assert torch.equal(p, q)
        assert same_state(first.state[p], second.state[q])


def test_parameters_without_gradient_are_left_alone() -> None:
    used, unused = parameter(64, 64), parameter(64, 64)
    optimizer = AdamW8bit([used, unused])
    before = unused.detach().clone()
    used.grad = torch.ones(64, 64)
    optimizer.step()
    assert torch.equal(unused, before)
    assert not optimizer.state[unused]
    unused.grad = torch.ones(64, 64)
    optimizer.step()
    assert optimizer.state[used]["step"].item() == 2
    assert optimizer.state[unused]["step"].item() == 1


def test_any_order_of_memory_gives_the_same_step() -> None:
    one, two = nn.Parameter(torch.randn(8, 16, 6, 6).contiguous(memory_format=torch.channels_last)), None
    two = nn.Parameter(one.detach().clone(memory_format=torch.contiguous_format))
    gradient = torch.randn(16, 8, 6, 6).transpose(0, 1)
    one.grad, two.grad = gradient, gradient.contiguous()
    AdamW8bit([one]).step()
    AdamW8bit([two]).step()
    assert torch.equal(one, two)
    assert one.is_contiguous(memory_format=torch.channels_last)


def test_non_finite_gradients_are_not_hidden() -> None:
    p = parameter(16, 512)
    optimizer = AdamW8bit([p])
    p.grad = torch.ones(16, 512)
    p.grad[2, 3], p.grad[5, 300] = float("nan"), float("inf")
    optimizer.step()
    assert p[2, 3].isnan()
    assert p[5, 300].isnan()
    assert p.isnan().sum() == 2
    scales = optimizer.state[p]["exp_avg_sq_scales"]
    assert scales.isnan().nonzero().tolist() == [[2, 0], [5, 1]]


def test_zero_grad_clears_quantized_gradients() -> None:
    p = parameter(64, 64)
    optimizer = AdamW8bit([p])
    set_quantized_gradient(p, quantized(torch.ones(64, 64), 12))
    optimizer.zero_grad(set_to_none=False)
    kept = quantized_gradient(p)
    assert kept is not None
    assert not kept.dequantize().any()
    optimizer.zero_grad()
    assert quantized_gradient(p) is None


def test_closure_is_evaluated_with_gradients() -> None:
    p = parameter(64, 64)
    optimizer = AdamW8bit([p])

    def closure() -> float:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return float(loss.detach())

    losses = [optimizer.step(closure) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("shape", [(64, 64), (8, 8)])
def test_backward_through_weights_of_before_the_step_is_refused(shape: tuple[int, int]) -> None:
    p = parameter(*shape)
    loss = (torch.randn(4, shape[0], requires_grad=True) @ p @ p.t()).sum()
    p.grad = torch.ones_like(p)
    AdamW8bit([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_groups_and_schedules_work_as_in_torch() -> None:
    slow, fast = parameter(64, 64), parameter(64, 64)
    optimizer = AdamW8bit([{"params": [slow], "lr": 0.0, "weight_decay": 0.0}, {"params": [fast]}], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    before = fast.detach().clone()
    for p in (slow, fast):
        p.grad = torch.ones(64, 64)
    optimizer.step()
    scheduler.step()
    assert torch.equal(slow, parameter(64, 64))
    assert not torch.equal(fast, before)
    assert optimizer.param_groups[1]["lr"] == 0.05


# --- states ---


def stepped(
    shape: tuple[int, ...] = (64, 256), dtype: torch.dtype = torch.float32, bits: int = 8
) -> tuple[nn.Parameter, AdamW8bit]:
    p = parameter(*shape, dtype=dtype)
    optimizer = AdamW8bit([p], bits=bits)
    p.grad = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    optimizer.step()
    return p, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 256), (5, 7), (33, 131)])
@pytest.mark.parametrize("bits", [8, 4])
def test_state_dict_comes_back_bit_for_bit(shape: tuple[int, ...], dtype: torch.dtype, bits: int) -> None:
    p, optimizer = stepped(shape, dtype, bits)
    q = nn.Parameter(p.detach().clone())
    other = AdamW8bit([q], lr=7.0, bits=bits)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert same_state(other.state[q], optimizer.state[p])
    for parameter_, optimizer_ in ((p, optimizer), (q, other)):
        parameter_.grad = torch.ones_like(parameter_)
        optimizer_.step()
    assert torch.equal(p, q)
    assert same_state(other.state[q], optimizer.state[p])


def test_loaded_states_are_copies() -> None:
    p, optimizer = stepped()
    q = nn.Parameter(p.detach().clone())
    other = AdamW8bit([q])
    other.load_state_dict(optimizer.state_dict())
    before = optimizer.state[p]["exp_avg_codes"].clone()
    q.grad = -torch.ones_like(q)
    other.step()
    assert torch.equal(optimizer.state[p]["exp_avg_codes"], before)
    assert optimizer.state[p]["step"].item() == 1


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    p, optimizer = stepped()
    saved = optimizer.state_dict()
    exact = parameter(64, 256)
    fp32 = AdamW8bit([exact], min_8bit_numel=10**9)
    exact.grad = torch.ones(64, 256)
    fp32.step()
    fp32.param_groups[0]["min_8bit_numel"] = 4096

    def changed(**entries: Any) -> dict[str, Any]:
        return saved | {"state": {0: saved["state"][0] | entries}}

    bad = [
        (fp32.state_dict(), "the state of parameter 0 of group 0 is in fp32, .* or set min_8bit_numel above"),
        (
            changed(exp_avg_scales=torch.zeros(64, 2)),
            r"exp_avg_scales of parameter 0 .* must be torch.float32 \(64, 1\)",
        ),
        (changed(exp_avg_codes=torch.zeros(64, 256)), "exp_avg_codes of parameter 0 .* must be torch.uint8"),
        (changed(max_exp_avg_sq=torch.zeros(3)), "has exp_avg_codes, .*max_exp_avg_sq.* but AdamW8bit keeps"),
    ]
    before = copy.deepcopy(optimizer.state[p])
    for state, message in bad:
        with pytest.raises(FormatError, match=message):
            optimizer.load_state_dict(state)
        assert same_state(optimizer.state[p], before)


# --- refusals ---


def test_a_parameter_has_one_gradient() -> None:
    p = parameter(64, 64)
    p.grad = torch.ones(64, 64)
    set_quantized_gradient(p, quantized(torch.full((64, 64), 2.0), 8))
    assert p.grad is not None
    assert torch.equal(p.grad + 0, torch.full((64, 64), 2.0))
    p.grad = torch.ones(64, 64)
    assert quantized_gradient(p) is None


def test_sparse_gradients_are_refused_with_the_remedy() -> None:
    layer = nn.Embedding(100, 64, sparse=True)
    layer(torch.tensor([3])).sum().backward()
    with pytest.raises(FormatError, match=r"parameter 0 of group 0 is sparse, .* build the layer with sparse=False"):
        AdamW8bit(layer.parameters()).step()


def test_other_gradients_that_cannot_be_read_are_refused() -> None:
    p = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))
    p.grad = torch.zeros_like(p)
    with pytest.raises(FormatError, match=r"parameter 0 of group 0 is torch\.float64"):
        AdamW8bit([p]).step()
    p = parameter(4, 4)
    with pytest.raises(FormatError, match=r"has shape \(4, 5\), but .* has \(4, 4\)"):
        set_quantized_gradient(p, quantized(torch.zeros(4, 5), 8))
    with pytest.raises(FormatError, match=r"gradient_factor has shape \(2,\), but it must be 0-dimensional"):
        AdamW8bit([p]).step(gradient_factor=torch.ones(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr is -1.0, but it must be finite and at least 0"),
        ({"lr": torch.tensor([0.1, 0.2])}, r"lr is a tensor of shape \(2,\), but it must have one element"),
        ({"lr": "1e-3"}, "lr is '1e-3', but it must be a number"),
        ({"lr": None}, "lr is None, but it must be a number"),
        ({"betas": 0.9}, "betas is 0.9, but it must be two numbers"),
        ({"weight_decay": float("inf")}, "weight_decay is inf, but it must be finite"),
        ({"amsgrad": True}, r"amsgrad is True, but .* use torch\.optim\.AdamW"),
        ({"capturable": True}, "capturable is True, but AdamW8bit reads the number of the step on the host"),
        ({"differentiable": True}, "differentiable is True, but autograd does not follow"),
        ({"foreach": True, "fused": True}, "foreach and fused are both True"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\] is 1.0, but it must be at least 0 and below 1"),
        ({"betas": (0.9, -0.1)}, r"betas\[1\] is -0.1, but"),
        ({"eps": -1e-8}, "eps is -1e-08, but it must be finite and at least 0"),
        ({"weight_decay": float("nan")}, "weight_decay is nan, but it must be finite and at least 0"),
        ({"min_8bit_numel": -1}, "min_8bit_numel is -1, but"),
        ({"bits": 5}, "bits is 5, but it must be 8 or 4"),
        ({"bits": 8.0}, "bits is 8.0, but it must be 8 or 4"),
        ({"bits": "4"}, "bits is '4', but it must be 8 or 4"),
    ],
)
def test_hyperparameters_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AdamW8bit([parameter(2, 2)], **options)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("betas", (0.9, 1.5), r"betas\[1\] is 1.5, but it must be at least 0 and below 1"),
        ("betas", 0.9, "betas is 0.9, but it must be two numbers"),
        ("eps", -1.0, "eps is -1.0, but it must be finite and at least 0"),
        ("weight_decay", float("nan"), "weight_decay is nan, but it must be finite and at least 0"),
        ("weight_decay", -0.1, "weight_decay is -0.1, but it must be finite and at least 0"),
        ("lr", torch.tensor([0.1, 0.2]), r"lr is a tensor of shape \(2,\), but it must have one element"),
        ("lr", float("-inf"), "lr is -inf, but it must be finite"),
        ("lr", None, "lr is None, but it must be a number"),
    ],
)
def test_options_that_leave_their_range_later_are_refused(bits: int, option: str, value: Any, message: str) -> None:
    first, second = parameter(64, 64), parameter(64, 64)
    optimizer = AdamW8bit([{"params": [first]}, {"params": [second]}], bits=bits)
    for p in (first, second):
        p.grad = torch.ones_like(p)
    before = first.detach().clone()
    optimizer.param_groups[1][option] = value
    with pytest.raises(ConfigError, match=message):
        optimizer.step()
    assert torch.equal(first, before)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("shape", "later"),
    [((64, 128), (128, 64)), ((64, 128), (32, 128)), ((64, 128), (64, 256)), ((10, 5), (5, 10)), ((10, 5), (10, 6))],
)
def test_parameters_that_changed_their_shape_are_refused(
    bits: int, shape: tuple[int, ...], later: tuple[int, ...]
) -> None:
    p, optimizer = stepped(shape, bits=bits)
    p.grad, p.data = None, torch.ones(later)
    p.grad = torch.ones(later)
    said = rf"^parameter 0 of group 0 has shape {re.escape(str(later))}, but its moments are of another shape: exp_avg"
    with pytest.raises(FormatError, match=said + r"(_codes)? is \(\d+, \d+\) instead of \(\d+, \d+\); make"):
        optimizer.step()
    assert torch.equal(p, torch.ones(later))


# --- torch's own hyperparameters ---


# What torch's own tests of AdamW try (torch.testing._internal.common_optimizers), times the ways to compute.
KINDS: list[dict[str, Any]] = [
    {},
    {"lr": 0.01},
    {"lr": torch.tensor(0.001)},
    {"weight_decay": 0.1, "maximize": True},
    {"weight_decay": 0.1, "amsgrad": True},
    {"betas": (torch.tensor(0.9), torch.tensor(0.99))},
    {"eps": 0.1},
    {"capturable": True},
    {"differentiable": True},
]
WAYS: list[dict[str, Any]] = [{}, {"foreach": True}, {"fused": True}, {"foreach": False, "fused": False}]


@pytest.mark.parametrize("options", [{**kind, **way} for kind in KINDS for way in WAYS], ids=str)
def test_hyperparameters_of_torchs_tests_are_followed_or_refused(options: dict[str, Any]) -> None:
    refused = [name for name in ("amsgrad", "capturable", "differentiable") if options.get(name)]
    p, q = parameter(9, 300), parameter(9, 300)
    if refused:
        with pytest.raises(ConfigError, match=f"{refused[0]} is True, but"):
            AdamW8bit([p], **options)
        return
    ours = AdamW8bit([p], **copy.deepcopy(options), min_8bit_numel=10**9)  # moments in fp32, so the same numbers
    exact = torch.optim.AdamW([q], **{**copy.deepcopy(options), "foreach": False, "fused": False})
    for seed in range(3):
        p.grad = torch.randn(9, 300, generator=torch.Generator().manual_seed(seed))
        q.grad = p.grad.clone()
        ours.step()
        exact.step()
    torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bits", [None, 8])
def test_schedulers_tensor_rates_and_late_groups(bits: int | None) -> None:
    ends = []
    for kind in ("float", "tensor"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 128), nn.Tanh(), nn.Linear(128, 2))
        if bits is not None:
            compress_gradients(model, bits=bits)
        rate = 1e-2 if kind == "float" else torch.tensor(1e-2)
        optimizer = AdamW8bit([{"params": model[0].parameters(), "name": "first", "initial_lr": 1e-2}], lr=rate)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=8, cycle_momentum=True)
        for step in range(6):
            if step == 2:
                schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n)
                optimizer.add_param_group({"params": model[2].parameters(), "lr": 1e-3, "weight_decay": 0.0})
            model(torch.ones(3, 40)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step < 2:
                schedule.step()
        assert optimizer.param_groups[0]["name"] == "first"
        ends.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigError, match="amsgrad is True"):
        optimizer.add_param_group({"params": [parameter(3)], "amsgrad": True})


def test_complex_parameters_are_refused_by_name() -> None:
    p = nn.Parameter(torch.zeros(4, 4, dtype=torch.complex64))
    p.grad = torch.zeros_like(p)
    with pytest.raises(FormatError, match=r"parameter 0 of group 0 is torch\.complex64"):
        AdamW8bit([p]).step()


def test_what_is_written_to_groups_later_is_checked_before_anything_moves() -> None:
    p = parameter(64, 64)
    optimizer = AdamW8bit([p])
    before = p.detach().clone()
    for name, value in {"amsgrad": True, "capturable": True, "lr": float("nan")}.items():
        p.grad = torch.ones(64, 64)
        kept = optimizer.param_groups[0].get(name)
        optimizer.param_groups[0][name] = value
        with pytest.raises(ConfigError, match=f"{name} is {value}, but"):
            optimizer.step()
        optimizer.param_groups[0][name] = kept
    assert torch.equal(p, before)
    optimizer.step()
    assert not torch.equal(p, before)


@pytest.mark.parametrize("lr", [-1e-3, torch.tensor(-1e-3)])
def test_a_rate_below_0_that_a_step_takes_is_saved_and_loaded(lr: float | Tensor) -> None:
    p, optimizer = stepped((64, 64))
    optimizer.param_groups[0]["lr"] = lr
    optimizer.step()
    q = nn.Parameter(p.detach().clone())
    again = AdamW8bit([q])
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    q.grad = p.grad
    for one in (optimizer, again):
        one.step()
    assert torch.equal(p, q)


@pytest.mark.parametrize("bad", [None, {}, {"state": {}}, {"state": [], "param_groups": []}, [1]], ids=str)
def test_what_is_no_state_dict_is_refused(bad: Any) -> None:
    with pytest.raises(FormatError, match=r"the state dict is|state is a list"):
        AdamW8bit([parameter(3)]).load_state_dict(bad)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", [(3, 300), (2, 17), (1 << 6,), (4, 3, 5), (0, 16)])
@pytest.mark.parametrize("signed", [True, False])
def test_new_states_are_the_codes_of_zero(shape: tuple[int, ...], bits: int, signed: bool) -> None:
    zeros = torch.zeros(shape)
    made, expected = _zero_moment(zeros, signed, bits), quantize_moment(zeros, signed=signed, bits=bits)
    assert all(torch.equal(one, other) for one, other in zip(made, expected, strict=True))
