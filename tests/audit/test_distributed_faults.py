"""Faults of two processes that share gradients: the audit refuses them on both, and passes without them."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import laconic
from laconic.errors import AuditError
from laconic.formats import QuantizedGradient
from laconic.gradients import reduction
from tests.activations.models import make_ids, make_model
from tests.distributed.processes import run_ranks

Patch = pytest.MonkeyPatch


def every_second_bucket_is_not_reduced(patch: Patch) -> None:
    before, calls = reduction.all_reduce_quantized, []

    def forgetting(gradients: list[QuantizedGradient], *args: Any, **kwargs: Any) -> Any:
        calls.append(gradients)
        return before(copy.deepcopy(gradients) if len(calls) % 2 == 0 else gradients, *args, **kwargs)

    patch.setattr(reduction, "all_reduce_quantized", forgetting)


def gradients_are_summed_in_place_of_averaged(patch: Patch) -> None:
    before = QuantizedGradient.dequantize
    patch.setattr(QuantizedGradient, "dequantize", lambda self: dist.get_world_size() * before(self))


def a_micro_batch_is_dropped(patch: Patch) -> None:
    before = QuantizedGradient.accumulate_

    def assign(self: QuantizedGradient, gradient: torch.Tensor, alpha: float = 1.0) -> None:
        self.zero_()
        before(self, gradient, alpha)

    patch.setattr(QuantizedGradient, "accumulate_", assign)


def two_shards_are_swapped(patch: Patch) -> None:
    before = QuantizedGradient.dequantize

    def swapped(self: QuantizedGradient) -> torch.Tensor:
        whole = before(self)
        flat = whole.reshape(-1)
        return flat.roll(len(flat) // 2).view(whole.shape) if flat.numel() >= 256 else whole

    patch.setattr(QuantizedGradient, "dequantize", swapped)


def a_weight_differs_on_one_rank(patch: Patch) -> None:
    pass  # planted into the model


def one_rank_alone_computes_wrongly(patch: Patch) -> None:
    from laconic.activations.backward import saving

    before = saving._Rebuilt.__call__
    if dist.get_rank() == 1:
        patch.setattr(saving._Rebuilt, "__call__", lambda self: 2 * before(self))


FAULTS: list[Callable[[Patch], None]] = [
    every_second_bucket_is_not_reduced,
    gradients_are_summed_in_place_of_averaged,
    a_micro_batch_is_dropped,
    two_shards_are_swapped,
    a_weight_differs_on_one_rank,
    one_rank_alone_computes_wrongly,
]


def plant_each(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    ids = make_ids(4, 24, seed=rank)
    for fault in (None, *FAULTS):
        model = make_model("llama").train()
        laconic.compress_activations(model)
        laconic.compress_gradients(model, dist.group.WORLD, bucket_nbytes=1 << 14)
        if fault is a_weight_differs_on_one_rank and rank == 0:
            with torch.no_grad():
                model.lm_head.weight[3, 4] += 1e-6
        patch = pytest.MonkeyPatch()
        try:
            if fault is None:
                report = laconic.audit(model, {"input_ids": ids, "labels": ids})
                assert report.num_stored == 21, report
                assert report.num_replicas == 21, report
                continue
            fault(patch)
            with pytest.raises(AuditError):
                laconic.audit(model, {"input_ids": ids, "labels": ids})
        except BaseException:
            print(f"planted: {fault}", flush=True)
            raise
        finally:
            patch.undo()
    dist.destroy_process_group()


@pytest.mark.ci
def test_both_ranks_refuse_each_fault_and_nothing_without() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(plant_each, (os.path.join(folder, "store"),), 2)
