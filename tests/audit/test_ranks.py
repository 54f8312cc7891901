"""Audits over two processes that pass, and faults between them: FSDP2, DDP, and weights after the first step."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.auditing import audit_first_call
from laconic.errors import AuditError
from laconic.formats.shards import local_part
from tests.activations.models import make_ids, make_model
from tests.audit import faults
from tests.distributed.processes import run_ranks

Plant = Callable[[pytest.MonkeyPatch], None]


@contextmanager
def joined(rank: int, store: str) -> Iterator[None]:
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank)}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    yield
    dist.destroy_process_group()


def sharded(optimizer: bool = True) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    model: Any = make_model("llama").train()
    laconic.compress_activations(model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, laconic.AdamW8bit(model.parameters(), weight_decay=0.5) if optimizer else None


def state_of(model: nn.Module) -> list[Tensor]:
    return [local_part(p).detach().clone() for p in model.parameters()]


def one_rank_computes_wrongly(patch: pytest.MonkeyPatch) -> None:
    if dist.get_rank() == 1:
        faults.linear_layers_pass_no_gradient_on(patch)


def one_rank_rounds_beyond_the_format(patch: pytest.MonkeyPatch) -> None:
    if dist.get_rank() == 1:
        faults.values_are_rounded_down_in_place_of_to_nearest(patch)


def one_rank_rebuilds_wrongly(patch: pytest.MonkeyPatch) -> None:
    if dist.get_rank() == 0:
        faults.what_is_rebuilt_has_no_sign(patch)


def one_rank_decays_twice(patch: pytest.MonkeyPatch) -> None:
    if dist.get_rank() == 0:
        faults.weight_decay_is_applied_twice(patch)


OF_SHARDS: list[Plant] = [
    one_rank_computes_wrongly,
    one_rank_rounds_beyond_the_format,
    one_rank_rebuilds_wrongly,
    one_rank_decays_twice,
]


def audit_shards(rank: int, store: str) -> None:
    with joined(rank, store):
        ids = make_ids(4, 24, seed=rank)
        batch = {"input_ids": ids, "labels": ids}
        model, optimizer = sharded()
        before = state_of(model)
        report = laconic.audit(model, batch, optimizer=optimizer)
        assert report.num_parameters == 21, report
        assert report.num_updates > 0, report
        assert report.loss_bits, report
        assert all(isinstance(p, DTensor) and p.grad is None for p in model.parameters())
        assert all(torch.equal(a, b) for a, b in zip(before, state_of(model), strict=True))
        assert optimizer is not None
        for _ in range(2):  # it trains as before
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        for fault in OF_SHARDS:
            model, optimizer = sharded()
            patch = pytest.MonkeyPatch()
            try:
                fault(patch)
                with pytest.raises(AuditError):
                    laconic.audit(model, batch, optimizer=optimizer)
            except BaseException:
                print(f"planted: {fault}", flush=True)
                raise
            finally:
                patch.undo()


def host(model: nn.Module, steps: int = 2, wrong: bool = False) -> str:
    """A loop that knows nothing of the audit; what is said while it runs."""
    optimizer = laconic.AdamW8bit(model.parameters(), weight_decay=0.5)
    said = StringIO()
    with redirect_stderr(said):
        for number in range(steps):
            ids = make_ids(4, 24, seed=2 * number + dist.get_rank())
            model(input_ids=ids, labels=ids).loss.backward()
            if wrong and dist.get_rank() == 1:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
    return said.getvalue()


def train_under_hosts(rank: int, store: str) -> None:
    with joined(rank, store):
        for wrong in (False, True):
            model = make_model("llama").train()
            laconic.compress_activations(model)
            audit_first_call(model)
            wrapped = DistributedDataParallel(model)
            if wrong:
                with pytest.raises(AuditError, match="after the first step replicas differ"):
                    host(wrapped, wrong=True)
                continue
            said = host(wrapped)
            assert ("gradients of 21 parameters" in said) == (rank == 0), said
            assert ("21 replicated tensors" in said) == (rank == 0), said
        model, _ = sharded(optimizer=False)
        audit_first_call(model)
        said = host(model)
        assert ("left out: all, as the model is sharded" in said) == (rank == 0), said


@pytest.mark.ci
@pytest.mark.parametrize("work", [audit_shards, train_under_hosts])
def test_between_two_ranks(work: Callable[[int, str], None]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(work, (os.path.join(folder, "store"),), 2)
