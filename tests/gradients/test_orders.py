"""Every order of compress, wrap, accumulate, reduce, clip, step and zero on two ranks, against exact replicas.

Each call either has the effect it has on exact gradients, or raises an error of laconic's on both ranks and has none.
"""

from __future__ import annotations

import copy
import itertools
import os
import random
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from laconic.errors import LaconicError, TrainingError
from laconic.gradients import CompressedGradients, compress_gradients
from laconic.optim import AdamW8bit
from laconic.train.launch.worker import leave
from tests.distributed.processes import run_ranks

pytestmark = pytest.mark.ci  # hundreds of orders on two processes

WORLD = 2
CLIP = 0.05
Found = dict[str, Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(9, 7)
        self.never = nn.Linear(2, 2)
        self.last = nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.tanh(self.first(x)))
        return y


def loss_of(model: nn.Module, number: int, rank: int) -> Tensor:
    x = torch.randn(4, 9, generator=torch.Generator().manual_seed(100 * number + rank))
    value: Tensor = (model(x) - 1).square().mean()
    return value


class Exact:
    """Both ranks' exact replicas, in this process."""

    def __init__(self, optimizer: Callable[[Any], torch.optim.Optimizer], synchronous: bool) -> None:
        """`synchronous`: every backward ends with the mean over ranks, as under DDP."""
        self.models = [Net() for _ in range(WORLD)]
        self.optimizers = [optimizer(model.parameters()) for model in self.models]
        self.synchronous = synchronous

    def do(self, event: str, number: int) -> None:
        if event in "aln":
            for rank, model in enumerate(self.models):
                loss_of(model, number, rank).backward()
        if event == "r" or (event == "a" and self.synchronous):
            for group in zip(*(model.parameters() for model in self.models), strict=True):
                if group[0].grad is not None:
                    mean = torch.stack([p.grad for p in group if p.grad is not None]).mean(0)
                    for parameter in group:
                        parameter.grad = mean.clone()
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            if event in "cC":
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            elif event == "s":
                optimizer.step()
            elif event in "zZ":
                model.zero_grad()


class Compressed:
    """This rank's replica with gradients in codes."""

    def __init__(
        self, rank: int, make: Callable[[nn.Module], tuple[nn.Module, CompressedGradients]], adamw: bool
    ) -> None:
        self.rank = rank
        self.inner = Net()
        self.model, self.gradients = make(self.inner)
        self.optimizer = optimizer_of(adamw)(self.inner.parameters())

    def do(self, event: str, number: int) -> None:
        gradients = self.gradients
        if event == "a":
            loss_of(self.model, number, self.rank).backward()
        elif event == "l":
            with gradients.last_micro_batch():
                loss_of(self.model, number, self.rank).backward()
        elif event == "n":
            with self.model.no_sync() if isinstance(self.model, DistributedDataParallel) else nullcontext():
                loss_of(self.model, number, self.rank).backward()
        elif event == "r":
            gradients.reduce()
        elif event == "c":
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        elif event == "C":
            gradients.clip_(CLIP)
        elif event == "s":
            self.optimizer.step()
        elif event == "z":
            self.optimizer.zero_grad()
        else:
            gradients.zero_()


def optimizer_of(adamw: bool) -> Callable[[Any], torch.optim.Optimizer]:
    if adamw:
        return lambda ps: AdamW8bit(ps, lr=0.01, min_8bit_numel=16)
    return lambda ps: torch.optim.SGD(ps, lr=0.3, momentum=0.5)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def play(
    rank: int,
    events: Iterable[str],
    make: Callable[[nn.Module], tuple[nn.Module, CompressedGradients]],
    adamw: bool = False,
    synchronous: bool = False,
) -> tuple[str, str]:
    """What went wrong ("" if nothing did), and the log of events, those that were refused in brackets."""
    exact, ours = Exact(optimizer_of(adamw), synchronous), Compressed(rank, make, adamw)
    start = flat(ours.inner)
    log = ""
    for number, event in enumerate(events):
        try:
            ours.do(event, number)
        except LaconicError as error:
            log += f"[{event}]"
            if "are gone on every rank" in str(error):
                exact.do("z", number)
        else:
            log += event
            exact.do(event, number)
    moved = (flat(exact.models[rank]) - start).norm()
    off = (flat(ours.inner) - flat(exact.models[rank])).norm()
    present = [p.grad is not None for p in ours.inner.parameters()]
    if present != [p.grad is not None for p in exact.models[rank].parameters()]:
        return "other parameters have gradients than in the exact replica", log
    if off > (0.5 if adamw else 0.03) * moved:
        return f"{off:.2g} off after moving {moved:.2g}", log
    if not torch.isfinite(flat(ours.inner)).all():
        return "not finite", log
    ours.gradients.zero_()  # ranks leave together
    return "", log


def stored(model: nn.Module) -> tuple[nn.Module, CompressedGradients]:
    return model, compress_gradients(model, dist.group.WORLD, bits=12, bucket_nbytes=8)


def wrapped_later(model: nn.Module) -> tuple[nn.Module, CompressedGradients]:
    gradients = compress_gradients(model, bits=12)
    return DistributedDataParallel(model, find_unused_parameters=True), gradients


def wrapped_before(model: nn.Module) -> tuple[nn.Module, CompressedGradients]:
    ddp = DistributedDataParallel(model, find_unused_parameters=True, gradient_as_bucket_view=True)
    return ddp, compress_gradients(ddp.module, bits=12)


def short(alphabet: str, length: int) -> list[str]:
    """All sequences that begin with a backward."""
    return [first + "".join(rest) for first in "al" for rest in itertools.product(alphabet, repeat=length - 1)]


def long(alphabet: str, count: int, length: int, seed: int) -> list[str]:
    """Random steps, with some calls left out, doubled or in another order."""
    generator = random.Random(seed)
    return ["".join(generator.choices(alphabet, k=length)) for _ in range(count)]


CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "group, short": (short("alrcsz", 3), {"make": stored}),
    "group, steps": (long("aaalrrrccCssszZ", 50, 14, 0), {"make": stored}),
    "group, AdamW8bit": (long("aaalrrrccCssszZ", 15, 14, 1), {"make": stored, "adamw": True}),
    "wrapped later": (long("aaancCssszZ", 15, 12, 2), {"make": wrapped_later, "synchronous": True}),
    "wrapped before": (long("aaancCssszZ", 15, 12, 3), {"make": wrapped_before, "synchronous": True}),
}
SLOW_CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "group, all of 4": (short("alrcsz", 4), {"make": stored}),
    "group, many": (long("aaalrrrccCssszZ", 150, 20, 4), {"make": stored}),
    "wrapped, many": (long("ancsz", 100, 6, 5), {"make": wrapped_later, "synchronous": True}),
}


def work(rank: int, directory: str, slow: bool) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD))
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=WORLD)
    found: Found = {}
    for name, (sequences, options) in (SLOW_CASES if slow else CASES).items():
        found[name] = {events: play(rank, events, **options) for events in sequences}
    if not slow:
        found["group and DDP"] = group_and_ddp(rank)
        found["failed"] = failed_backward(rank)
        found["one gives up"] = one_gives_up(rank)
        found["zeroed in flight"] = zeroed_in_flight(rank)
        found["unfrozen"] = unfrozen(rank)
        found["differently"] = changed_differently(rank)
        found["sums"] = sums(rank)
        found["closure"] = closure(rank)
        found["raw collective"] = raw_collective(rank)
    torch.save(found, f"{directory}/{rank}.pt")
    dist.barrier()
    leave(0)


def error_of(function: Callable[[], object]) -> str:
    try:
        function()
    except LaconicError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def group_and_ddp(rank: int) -> Found:
    """The wrapper would average what the store has to average."""
    model = Net()
    compress_gradients(model, dist.group.WORLD)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    return {"error": error_of(lambda: loss_of(ddp, 0, rank).backward())}


def failed_backward(rank: int) -> Found:
    """The last micro-batch raises on both ranks after some buckets have left; the next step is sound."""
    model, gradients = stored(Net())

    def fail(_: Tensor) -> None:
        raise RuntimeError("out of memory")

    handle = model.first.weight.register_hook(fail)  # type: ignore[union-attr, operator]
    with pytest.raises(RuntimeError, match="out of memory"), gradients.last_micro_batch():
        loss_of(model, 0, rank).backward()
    handle.remove()
    state = gradients.state
    refused = [
        error_of(lambda: loss_of(model, 1, rank).backward()),
        error_of(gradients.norm),
        error_of(lambda: gradients.last_micro_batch().__enter__()),
    ]
    gradients.zero_()
    loss_of(model, 1, rank).backward()
    gradients.reduce()
    return {"state": state, "refused": refused, "norm": gradients.norm(), "then": gradients.state}


def one_gives_up(rank: int) -> Found:
    """Rank 0 fails before anything has left and zeroes; rank 1 goes on to reduce()."""
    model, gradients = stored(Net())
    try:
        with gradients.last_micro_batch():
            if rank == 0:
                raise RuntimeError("no batch")
            loss_of(model, 0, rank).backward()
    except RuntimeError:
        pass
    error = error_of(gradients.zero_ if rank == 0 else gradients.reduce)
    loss_of(model, 1, rank).backward()
    gradients.reduce()
    return {"error": error, "norm": gradients.norm()}


def zeroed_in_flight(rank: int) -> Found:
    model, gradients = stored(Net())
    with gradients.last_micro_batch():
        loss_of(model, 0, rank).backward()
    in_place = error_of(lambda: model.zero_grad(set_to_none=False))
    if rank == 0:
        model.zero_grad()
    error = error_of(gradients.reduce)
    loss_of(model, 1, rank).backward()
    gradients.reduce()
    return {"error": error, "in place": in_place, "norm": gradients.norm()}


def unfrozen(rank: int) -> Found:
    """A layer is frozen, unfrozen, replaced; each time its gradients are reduced and counted."""
    model, exact = Net(), Net()
    model.first.requires_grad_(False)
    gradients = compress_gradients(model, dist.group.WORLD, bits=12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.first.requires_grad_(True)
    loss_of(model, 0, rank).backward()
    alone = [p for p in model.first.parameters()]
    early = error_of(torch.optim.SGD(alone, lr=0.1).step)
    gradients.reduce()
    torch.stack([loss_of(exact, 0, other) for other in range(WORLD)]).mean().backward()
    norms = [gradients.norm(), nn.utils.get_total_norm([p.grad for p in exact.parameters() if p.grad is not None])]
    optimizer.step()
    gradients.zero_()
    model.last = copy.deepcopy(model.last)
    loss_of(model, 1, rank).backward()
    late = error_of(torch.optim.SGD(model.last.parameters(), lr=0.1).step)
    gradients.reduce()
    gradients.dequantize_to_grad()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return {"early": early, "late": late, "norms": norms, "end": flat(model)}


def changed_differently(rank: int) -> Found:
    model = Net()
    gradients = compress_gradients(model, dist.group.WORLD)
    if rank == 1:
        model.more = nn.Linear(2, 2)
    loss_of(model, 0, rank).backward()
    error = error_of(gradients.reduce)
    if rank == 1:
        del model.more
    loss_of(model, 1, rank).backward()
    gradients.reduce()
    return {"error": error, "norm": gradients.norm()}


def sums(rank: int) -> Found:
    """Added up instead of averaged: what was added up must not be added up again."""
    model = Net()
    gradients = compress_gradients(model, dist.group.WORLD, average=False)
    loss_of(model, 0, rank).backward()
    gradients.reduce()
    norm = gradients.norm()
    added = error_of(lambda: loss_of(model, 1, rank).backward())
    kept = gradients.norm() == norm
    model.last.zero_grad()
    mixed = error_of(lambda: (model.last(torch.ones(1, 7)).sum().backward(), gradients.reduce()))
    return {"added": added, "kept": bool(kept), "mixed": mixed}


def closure(rank: int) -> Found:
    """An optimizer that makes gradients itself."""
    model, gradients = stored(Net())

    def evaluate(reduces: bool) -> Tensor:
        model.zero_grad()
        value = loss_of(model, 0, rank)
        value.backward()
        if reduces:
            gradients.reduce()
        return value

    before = flat(model)
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.optim.LBFGS(model.parameters()),
        AdamW8bit(model.parameters()),
    ]
    refused = [error_of(partial(one.step, lambda: evaluate(False))) for one in optimizers]
    unchanged = torch.equal(before, flat(model))
    torch.optim.LBFGS(model.parameters(), max_iter=3).step(lambda: evaluate(True))
    return {"refused": refused, "unchanged": unchanged, "moved": (flat(model) - before).norm(), "end": flat(model)}


def raw_collective(rank: int) -> Found:
    """A loop that averages `grad` by itself."""
    model = Net()
    compress_gradients(model)
    loss_of(model, 0, rank).backward()
    gradient = model.first.weight.grad
    assert gradient is not None
    return {"error": error_of(lambda: dist.all_reduce(gradient))}


def found_by_ranks(directory: Path, slow: bool) -> list[Found]:
    run_ranks(work, (str(directory), slow), WORLD)
    return [torch.load(directory / f"{rank}.pt") for rank in range(WORLD)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return found_by_ranks(tmp_path_factory.mktemp("orders"), False)


@pytest.fixture(scope="module")
def found_in_more(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return found_by_ranks(tmp_path_factory.mktemp("more"), True)


def assert_all_right(found: list[Found], case: str) -> None:
    ranks = [found[rank][case] for rank in range(WORLD)]
    wrong = {events: error for each in ranks for events, (error, _) in each.items() if error}
    assert not wrong, f"{len(wrong)} of {len(ranks[0])} orders: {dict(itertools.islice(wrong.items(), 5))}"
    assert all(ranks[0][events][1] == ranks[1][events][1] for events in ranks[0]), "ranks were refused other calls"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_CASES)])
def test_any_order_is_right_or_refused(request: pytest.FixtureRequest, case: str) -> None:
    found = request.getfixturevalue("found_in_more" if case in SLOW_CASES else "found")
    assert_all_right(found, case)
    logs = [log for _, log in found[0][case].values()]
    if case in CASES and case != "group, short":  # most of what is random does something
        assert sum("s" in log.replace("[s]", "") for log in logs) > len(logs) / 2


def test_steps_in_their_order_are_never_refused(found: list[Found]) -> None:
    for events, (_, log) in found[0]["group, short"].items():
        if events in ("ars", "lrs", "arc", "aar", "alr", "aza", "arz", "ara"):
            assert log == events
    for case in ("wrapped later", "wrapped before"):
        assert not any("[" in log for _, log in found[0][case].values())


def test_replicas_are_equal_to_the_last_bit(found: list[Found]) -> None:
    for case in ("unfrozen", "closure"):
        assert torch.equal(found[0][case]["end"], found[1][case]["end"])


def test_wrapping_what_a_group_reduces_is_refused(found: list[Found]) -> None:
    for rank in range(WORLD):
        assert "holds only this rank's share, not reduced yet" in found[rank]["group and DDP"]["error"]
        assert "DistributedDataParallel" in found[rank]["group and DDP"]["error"]


def test_step_that_failed_is_given_up_by_all(found: list[Found]) -> None:
    for rank in range(WORLD):
        failed = found[rank]["failed"]
        assert failed["state"] == "failed"
        assert "zero_() of compress_gradients' result to give the step up" in failed["refused"][0]
        assert "gradients are being reduced" in failed["refused"][1]
        assert "ended with an exception" in failed["refused"][2]
        assert failed["then"] == "reduced"
    assert found[0]["one gives up"]["error"] == "no error"
    assert "a rank gave the step up" in found[1]["one gives up"]["error"]
    for case in ("failed", "one gives up", "zeroed in flight", "differently"):
        assert found[0][case]["norm"] == found[1][case]["norm"] > 0


def test_gradient_zeroed_in_flight_is_no_secret(found: list[Found]) -> None:
    for rank in range(WORLD):
        assert "zeroed a gradient while it was being reduced" in found[rank]["zeroed in flight"]["error"]
        assert "is being reduced; call reduce()" in found[rank]["zeroed in flight"]["in place"]


def test_parameters_that_join_are_reduced_counted_and_watched(found: list[Found]) -> None:
    for rank in range(WORLD):
        result = found[rank]["unfrozen"]
        assert "not reduced yet" in result["early"]
        assert "not reduced yet" in result["late"]
        assert result["norms"][0].item() == pytest.approx(result["norms"][1].item(), rel=0.002)
        assert (
            "the number of trainable parameters is 6 on rank 0 and 8 on rank 1" in found[rank]["differently"]["error"]
        )


def test_what_was_added_up_is_not_added_up_again(found: list[Found]) -> None:
    for rank in range(WORLD):
        assert "would add up once more" in found[rank]["sums"]["added"]
        assert found[rank]["sums"]["kept"]
        assert "would be added up once more" in found[rank]["sums"]["mixed"]


def test_closures_reduce_or_are_refused(found: list[Found]) -> None:
    for rank in range(WORLD):
        assert all("not reduced yet" in text for text in found[rank]["closure"]["refused"])
        assert found[rank]["closure"]["unchanged"]
        assert found[rank]["closure"]["moved"] > 0
        assert found[rank]["raw collective"]["error"].startswith(TrainingError.__name__)
