"""Shared experts move in between sending and waiting only where the block's output stays the same, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from laconic.infer.remote_experts import RemoteExperts, RemoteLayer
from laconic.infer.shared_experts import overlap_shared
from laconic.schedule.inference import InferencePlan

WIDTH = 6


class Block(nn.Module):
    """A block whose forward is given: (shared, experts, x [1, n, M]) -> [1, n, M]."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.experts = RemoteLayer(RemoteExperts([], [], InferencePlan()), 0)
        self.shared_experts = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.shared_expert_gate = nn.Linear(WIDTH, 1)
        self._do = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._do(self.shared_experts, lambda rows: self.experts(rows, rows, rows), x)


def before(shared: Callable[[Tensor], Tensor], experts: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    flat = x.view(-1, WIDTH)
    added = shared(flat)
    return (experts(flat) + added.view(-1, WIDTH)).view(x.shape)


def after(shared: Callable[[Tensor], Tensor], experts: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return experts(x.view(-1, WIDTH)).view(x.shape) + shared(x)


def read_too_early(shared: Callable[[Tensor], Tensor], experts: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    added = shared(x) * 2
    return experts(x.view(-1, WIDTH)).view(x.shape) + added


def of_other_rows(shared: Callable[[Tensor], Tensor], experts: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return experts(x.view(-1, WIDTH)).view(x.shape) + shared(x + 1)


def twice(shared: Callable[[Tensor], Tensor], experts: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return shared(shared(x)) + experts(x.view(-1, WIDTH)).view(x.shape)


def moved(forward: Callable[..., Tensor]) -> tuple[bool, list[str]]:
    """Whether the shared experts moved, and what happens in which order in a call then."""
    block, happened = Block(forward), []
    done = overlap_shared(block, block.experts, WIDTH, torch.float32)
    compute = block.shared_experts[0].forward
    block.shared_experts[0].forward = lambda x: (happened.append("shared"), compute(x))[1]  # type: ignore[method-assign]

    def experts(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        happened.append("send")
        if block.experts.shared is not None and (work := block.experts.shared(hidden)) is not None:
            work()
        happened.append("wait")
        return hidden

    block.experts.forward = experts  # type: ignore[method-assign]
    with torch.no_grad():
        assert block(torch.randn(1, 3, WIDTH)).isfinite().all()
    return done, happened


def test_shared_experts_before_and_after_the_others_move() -> None:
    assert moved(before) == (True, ["send", "shared", "wait"])
    assert moved(after) == (True, ["send", "shared", "wait"])


def test_what_would_change_stays() -> None:
    assert moved(read_too_early) == (False, ["shared", "send", "wait"])
    assert moved(twice) == (False, ["shared", "shared", "send", "wait"])


def test_shared_experts_of_other_rows_are_computed_on_those() -> None:
    """They run once more between sending and waiting, for nothing, but what the block gets is right."""
    done, happened = moved(of_other_rows)
    assert done
    assert happened == ["send", "shared", "wait", "shared"]


def test_a_block_without_shared_experts_is_left_alone() -> None:
    block = Block(after)
    del block.shared_experts
    assert not overlap_shared(block, block.experts, WIDTH, torch.float32)
    assert block.experts.shared is None
