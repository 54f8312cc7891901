"""The gradient store in any order of calls, beside a plain model that gets the same calls.

What the store allows has the effect it has on plain gradients, up to the roundings so far; what it refuses has none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from laconic.errors import TrainingError
from laconic.formats import quantized_gradient
from laconic.gradients import compress_gradients

STEP = {8: 1 / 254, 12: 1 / 254 / 14}
"""Largest error of one rounding, as a share of the block's largest magnitude."""
KINDS = ("alone", "group", "ddp")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(9, 20)
        self.never = nn.Linear(2, 2)
        self.last = nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.tanh(self.first(x)))
        return y


class Aborted(Exception):
    """Raised within a backward."""


def block_largest(x: Tensor) -> Tensor:
    """For each element the largest magnitude of its block of 128."""
    flat = x.flatten().abs()
    padded = nn.functional.pad(flat, (0, -flat.numel() % 128)).view(-1, 128)
    return padded.amax(-1, keepdim=True).expand_as(padded).flatten()[: flat.numel()].view_as(x)


class Store(RuleBasedStateMachine):
    """Two models with the same weights: `plain`, and `model` with its gradients in codes.

    `slack` bounds how far a stored gradient may be from the plain one, per element. `turns` says of each parameter with
    a gradient whether it was reduced; without a group it counts as reduced.
    """

    @initialize(bits=st.sampled_from((8, 12)), kind=st.sampled_from(KINDS), momentum=st.sampled_from((0.0, 0.9)))
    def begin(self, bits: int, kind: str, momentum: float) -> None:
        self.bits, self.kind = bits, kind
        self.plain, self.model = Net(), Net()
        self.store = compress_gradients(self.model, dist.group.WORLD if kind == "group" else None, bits=bits)
        self.wrapped: nn.Module = self.model
        if kind == "ddp":
            self.wrapped = DistributedDataParallel(self.model, find_unused_parameters=True)
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=momentum) for m in (self.plain, self.model)]
        self.slack: dict[str, Tensor] = {}
        self.local: set[str] = set()
        self.failed = False
        self.saved = self.states()

    def states(self) -> Any:
        """The exact states, which both have after each step."""
        return copy.deepcopy((self.plain.state_dict(), self.optimizers[0].state_dict()))

    def plain_gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.plain.named_parameters() if p.grad is not None}

    def refused(self, call: Callable[[], object]) -> bool:
        """Whether the store refuses a call; then it must have done nothing, which the invariant checks."""
        try:
            call()
        except TrainingError:
            return True
        return False

    # --- backward ---

    def backward(self, model: nn.Module, seed: int, size: float, aborted: bool) -> None:
        hook = lambda grad: (_ for _ in ()).throw(Aborted)  # noqa: E731
        first = model.module.first if isinstance(model, DistributedDataParallel) else model.first
        handle = first.weight.register_hook(hook) if aborted else None
        x = torch.randn(4, 9, generator=torch.Generator().manual_seed(seed))
        try:
            (size * (model(x) - 1).square().mean()).backward()
        except Aborted:
            assert aborted
        finally:
            if handle is not None:
                handle.remove()

    def added(self, before: dict[str, Tensor]) -> None:
        """Account for the rounding of each gradient that a backward has changed."""
        for name, gradient in self.plain_gradients().items():
            old = before.get(name)
            if old is None or not torch.equal(old, gradient):
                slack = self.slack.get(name, torch.zeros_like(gradient))
                self.slack[name] = slack + STEP[self.bits] * (block_largest(gradient) + block_largest(slack)) * 1.01
                if self.kind == "group":
                    self.local.add(name)

    def both(self, seed: int, size: float, aborted: bool) -> None:
        before = {name: gradient.clone() for name, gradient in self.plain_gradients().items()}
        self.backward(self.plain, seed, size, aborted)
        self.added(before)

    @precondition(lambda self: not self.failed)
    @rule(seed=st.integers(0, 30), size=st.sampled_from((1e-4, 1.0, 300.0)), sync=st.booleans())
    def micro_batch(self, seed: int, size: float, sync: bool) -> None:
        self.both(seed, size, False)
        quiet = isinstance(self.wrapped, DistributedDataParallel) and not sync
        with self.wrapped.no_sync() if quiet else nullcontext():  # type: ignore[operator]
            self.backward(self.wrapped, seed, size, False)

    @precondition(lambda self: not self.failed and self.kind != "ddp")  # DDP's reducer is of no use afterwards
    @rule(seed=st.integers(0, 30))
    def aborted_micro_batch(self, seed: int) -> None:
        self.both(seed, 1.0, True)
        self.backward(self.wrapped, seed, 1.0, True)

    @precondition(lambda self: self.kind == "group" and not self.failed)
    @rule(seed=st.integers(0, 30), aborted=st.booleans())
    def last_micro_batch(self, seed: int, aborted: bool) -> None:
        if aborted:
            with pytest.raises(RuntimeError, match="no batch"), self.store.last_micro_batch():
                raise RuntimeError("no batch")
            self.failed = True
            assert self.store.state == "failed"
            return
        self.both(seed, 1.0, False)
        with self.store.last_micro_batch():
            self.backward(self.model, seed, 1.0, False)
        assert self.store.state == "reducing"
        for use in (self.optimizers[1].step, self.store.norm, lambda: self.store.scale_(2.0)):
            assert self.refused(use)
        self.store.reduce()
        self.reduced()

    def reduced(self) -> None:
        """All that was this rank's is everyone's; a sum of one rank may be rounded once more."""
        for name in self.plain_gradients():
            gradient, slack = self.plain_gradients()[name], self.slack[name]
            self.slack[name] = slack + 2 * STEP[self.bits] * (block_largest(gradient) + block_largest(slack))
        self.local.clear()

    @precondition(lambda self: self.kind == "group")
    @rule()
    def reduce(self) -> None:
        if self.failed:
            assert self.refused(self.store.reduce)
            self.dropped()
        elif self.refused(self.store.reduce):
            assert self.plain_gradients()
            assert not self.local
        else:
            assert self.local or not self.plain_gradients()
            self.reduced()

    # --- uses ---

    @precondition(lambda self: not self.failed)
    @rule(factor=st.sampled_from((0.5, 0.3, -1.0, 4.0)))
    def scale(self, factor: float) -> None:
        self.store.scale_(factor)
        for name, gradient in self.plain_gradients().items():
            gradient.mul_(factor)
            self.slack[name] = self.slack[name] * abs(factor) + 2.0**-22 * block_largest(gradient)

    @precondition(lambda self: not self.failed)
    @rule(most=st.sampled_from((0.01, 1.0, 1e6)), by_torch=st.booleans())
    def clip(self, most: float, by_torch: bool) -> None:
        parameters = list(self.model.parameters())
        found: list[Tensor] = []
        if self.refused(
            lambda: found.append(nn.utils.clip_grad_norm_(parameters, most) if by_torch else self.store.clip_(most))
        ):
            assert self.local
            return
        assert not self.local
        plain = nn.utils.get_total_norm(list(self.plain_gradients().values()))
        if not self.plain_gradients():
            assert found[0] == 0
            return
        off = torch.stack([slack.norm() for slack in self.slack.values()]).norm()
        assert abs(found[0].float() - plain) <= off + 1e-5 * plain
        factor = min(1.0, most / (float(found[0]) + 1e-6))
        for name, gradient in self.plain_gradients().items():
            gradient.mul_(factor)
            self.slack[name] = self.slack[name] * factor + 2.0**-20 * block_largest(gradient)

    @precondition(lambda self: not self.failed)
    @rule()
    def step(self) -> None:
        if self.refused(self.optimizers[1].step):
            assert self.local
            return
        assert not self.local
        self.optimizers[0].step()
        for (name, plain), parameter in zip(self.plain.named_parameters(), self.model.parameters(), strict=True):
            if plain.grad is not None:
                assert ((plain - parameter).abs() <= 0.1 * self.slack[name] + 1e-5 * plain.abs() + 1e-6).all(), name
            else:
                assert torch.equal(plain, parameter)
        self.level()

    @precondition(lambda self: not self.failed)
    @rule()
    def plain_tensors(self) -> None:
        """Gradients as plain tensors; the next backward takes them up again."""
        if self.refused(self.store.dequantize_to_grad):
            assert self.local
            return
        assert not self.local
        for name, gradient in self.plain_gradients().items():
            parameter = self.model.get_parameter(name)
            assert parameter.grad is not None
            assert type(parameter.grad) is Tensor
            assert ((parameter.grad - gradient).abs() <= self.slack[name] * 1.01 + 1e-30).all()
            slack = self.slack[name]  # to be rounded again when it is stored again
            self.slack[name] = slack + STEP[self.bits] * (block_largest(gradient) + block_largest(slack))
        self.store.gradients()

    @rule(how=st.sampled_from(("store", "model", "optimizer")))
    def zero(self, how: str) -> None:
        if self.failed:
            how = "store"
        {"store": self.store.zero_, "model": self.model.zero_grad, "optimizer": self.optimizers[1].zero_grad}[how]()
        self.dropped()

    def dropped(self) -> None:
        self.plain.zero_grad()
        self.slack.clear()
        self.local.clear()
        self.failed = False

    # --- states ---

    @rule()
    def save(self) -> None:
        self.saved = self.states()

    @rule()
    def load(self) -> None:
        """An earlier state; gradients stay."""
        for model, optimizer in zip((self.plain, self.model), self.optimizers, strict=True):
            model.load_state_dict(self.saved[0])
            optimizer.load_state_dict(copy.deepcopy(self.saved[1]))

    def level(self) -> None:
        """Give the store's model the exact state, so that differences do not add up from step to step."""
        now = self.states()
        self.model.load_state_dict(now[0])
        self.optimizers[1].load_state_dict(now[1])

    @invariant()
    def gradients_are_those_of_the_plain_model(self) -> None:
        if not hasattr(self, "store") or self.failed:
            return
        for name, parameter in self.model.named_parameters():
            plain = self.plain.get_parameter(name).grad
            if plain is None:
                assert parameter.grad is None, name
                continue
            stored = quantized_gradient(parameter)
            found = parameter.grad if stored is None else stored.dequantize()
            assert found is not None, name
            assert ((found - plain).abs() <= self.slack[name] * 1.01 + 1e-30).all(), name
        held = "empty" if not self.plain_gradients() else "accumulating" if self.local else "reduced"
        assert self.store.state == ("accumulating" if self.kind != "group" and held == "reduced" else held)


@pytest.fixture
def _group(tmp_path: Path) -> Iterator[None]:
    """This process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_group")
@pytest.mark.filterwarnings("ignore:gradients in codes are copied into full-precision buckets")  # said once, of DDP
@pytest.mark.parametrize("examples", [10, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_any_order_of_calls_is_that_of_plain_gradients_or_refused(examples: int) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Store, settings=settings(max_examples=examples, stateful_step_count=30, derandomize=True)
    )
