"""Losses by hand and against Hugging Face; over a group as if its tokens lay together."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laconic.errors import RoutingError
from laconic.moe import SigmoidGate, SoftmaxGate
from laconic.moe.gates import losses
from laconic.moe.gates.losses import FirstRuns, load_balance_loss, sequence_balance_loss, z_loss


def test_balance_loss_is_one_when_even_and_the_number_of_experts_when_all_go_to_one() -> None:
    even = load_balance_loss(torch.full((6, 4), 0.25), torch.tensor([3, 3, 3, 3]))
    assert float(even) == pytest.approx(1.0)
    one = torch.zeros(6, 4)
    one[:, 2] = 1
    assert float(load_balance_loss(one, torch.tensor([0, 0, 6, 0]))) == pytest.approx(4.0)


def test_balance_loss_times_top_k_is_that_of_hugging_face() -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    gate = SoftmaxGate(8, 16, 2, balance_coef=1.0)
    x = torch.randn(40, 16)
    logits = gate.logits(x)
    expected = load_balancing_loss_func((logits,), 8, 2)
    ours = gate(x).losses["balance"]
    torch.testing.assert_close(2 * ours, expected)
    (a,) = torch.autograd.grad(2 * ours, gate.weight)
    (b,) = torch.autograd.grad(expected, gate.weight)
    torch.testing.assert_close(a, b)


def test_z_loss_is_the_mean_square_of_the_log_of_the_sum() -> None:
    logits = torch.randn(5, 7, dtype=torch.float64)
    expected = sum(float(row.exp().sum().log()) ** 2 for row in logits) / 5
    assert float(z_loss(logits)) == pytest.approx(expected)


def test_losses_of_no_tokens_are_zero() -> None:
    assert float(z_loss(torch.zeros(0, 4))) == 0
    assert float(load_balance_loss(torch.zeros(0, 4), torch.zeros(4, dtype=torch.int64))) == 0


def test_coefficients_scale_and_zero_leaves_out() -> None:
    x = torch.randn(10, 16)
    gate = SoftmaxGate(8, 16, 2)
    assert gate(x).losses == {}
    gate.balance_coef, gate.z_coef = 1.0, 1.0
    whole = gate(x).losses
    gate.balance_coef, gate.z_coef = 0.25, 0.5
    part = gate(x).losses
    torch.testing.assert_close(part["balance"], 0.25 * whole["balance"])
    torch.testing.assert_close(part["z"], 0.5 * whole["z"])


def test_sequence_loss_is_the_mean_of_the_balance_losses_of_sequences() -> None:
    gate = SigmoidGate(8, 16, 2, sequence_coef=0.5, sequence_length=6, dtype=torch.float64)
    x = torch.randn(18, 16, dtype=torch.float64)
    routing = gate(x)
    scores = gate.scores(gate.logits(x))
    parts = [
        load_balance_loss(part / part.sum(1, keepdim=True), torch.bincount(chosen, minlength=8))
        for part, chosen in zip(scores.split(6), routing.experts.split(12), strict=True)
    ]
    torch.testing.assert_close(routing.losses["sequence balance"], 0.5 * sum(parts) / 3)
    assert float(sequence_balance_loss(torch.zeros(0, 8), torch.zeros(0, 2, dtype=torch.int64), 6)) == 0


def test_sequences_that_do_not_fit_are_refused() -> None:
    gate = SigmoidGate(8, 16, 2, sequence_coef=0.5, sequence_length=6)
    with pytest.raises(RoutingError, match="sequence_length = 6 must be positive and divide the 17 tokens"):
        gate(torch.randn(17, 16))
    with pytest.raises(RoutingError, match=r"sequence_coef = 0.5 needs sequence_length"):
        SigmoidGate(8, 16, 2, sequence_coef=0.5)


class Once(torch.autograd.Function):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class WithContext(Once):
    @staticmethod
    def forward(ctx: Any, x: Tensor, runs: FirstRuns) -> Tensor:
        assert not runs.is_first()
        return x * 1


class WithSetup(Once):
    @staticmethod
    def forward(x: Tensor, runs: FirstRuns) -> Tensor:
        assert not runs.is_first()
        return x * 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass


@pytest.mark.parametrize("function", [WithContext, WithSetup])
def test_a_forward_in_a_function_is_counted_by_its_second_run(
    function: type[torch.autograd.Function], monkeypatch: pytest.MonkeyPatch
) -> None:
    if function is WithContext:
        monkeypatch.setattr(losses, "_APPLY", None)  # as since torch 2.15
    elif losses._APPLY is None:
        pytest.skip("since torch 2.15 nothing in Python tells of a Function without a context")
    runs, counted = FirstRuns(), []
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        runs.is_first()  # by itself, and never run again
    y = function.apply(x, runs)
    y.register_hook(lambda grad: counted.extend([runs.is_first(), runs.is_first()]))
    y.sum().backward()
    assert counted == [True, False]


def test_a_look_for_functions_holds_no_hidden_states() -> None:
    class Layer(nn.Module):
        def forward(self, x: Tensor) -> None:
            hidden = x * 1
            held = weakref.ref(hidden)
            with torch.no_grad():
                FirstRuns().is_first()
            del hidden
            assert held() is None

    Layer()(torch.ones(2))
