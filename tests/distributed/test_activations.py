"""Compressed activations under DDP and FSDP2, in real processes: the gradients of one process, to rounding."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.activations import ActivationPlan, Recompute, SavedTensorTracker, find_sites, uniform
from laconic.activations.forwards.mixer import MixerForward
from laconic.activations.forwards.replacement import replacements_of
from laconic.formats import BlockFormat
from laconic.train.launch.worker import leave
from tests.activations.models import gradients_of, loss_of, make_ids, make_model, relative_error
from tests.distributed.processes import run_ranks

WORLD = 2


def gradients_and_bytes(model: nn.Module, inner: nn.Module, ids: torch.Tensor) -> tuple[dict[str, torch.Tensor], int]:
    with SavedTensorTracker(inner) as tracker:
        loss = loss_of(model, ids)
    loss.backward()
    found = {}
    for name, grad in gradients_of(inner).items():
        found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found, tracker.nbytes


def compressed(how: str) -> nn.Module:
    """How: a mode, "attention" packed, or "recompute": layer 0 as a whole, of layer 1 the feed-forward block.

    "again" recomputes attention modules, and "mixer" Bloom's; the latter proves its mixers in the wrapped model.
    """
    model = make_model("bloom" if how == "mixer" else "llama")
    if how == "mixer":
        laconic.compress_activations(model, bits=4)
        for module in model.modules():
            for forward in replacements_of(module):
                if isinstance(forward, MixerForward):
                    forward.repeats = None
    elif how == "again":
        laconic.compress_activations(model, bits=4, attention="recompute")
    elif how == "attention":
        laconic.compress_activations(model, bits=4, attention="int8")
    elif how == "recompute":
        choices = ActivationPlan.make(
            find_sites(model), uniform(BlockFormat("nf4"), attention=BlockFormat("int8"))
        ).choices
        choices = {**choices, "model.layers.1.mlp": Recompute()}
        laconic.compress_activations(model, plan=ActivationPlan(choices, {"model.layers.0": BlockFormat("int8")}))
    else:
        laconic.compress_activations(model, bits=4, mode=how)  # type: ignore[arg-type]
    return model


def work(rank: int, wrapping: str, mode: str, directory: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD))
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=WORLD)
    model = compressed(mode)
    wrapped: nn.Module = model
    if wrapping == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policy = bf16 if wrapping == "fsdp-bf16" else MixedPrecisionPolicy()
        for layer in model.transformer.h if mode == "mixer" else model.model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    ids = make_ids(batch=2 * WORLD)
    got, nbytes = gradients_and_bytes(wrapped, model, ids[2 * rank : 2 * rank + 2].clone())
    if rank == 0:
        torch.save((got, nbytes), f"{directory}/result.pt")
    dist.barrier()
    leave(0)


@pytest.mark.parametrize(
    ("wrapping", "mode", "bound"),
    [
        ("ddp", "sites", 1e-5),
        ("fsdp", "mixer", 1e-5),
        *(
            pytest.param(*case, marks=pytest.mark.ci)
            for case in (("fsdp-bf16", "attention", 0.05), ("fsdp", "hooks", 1e-5), ("fsdp", "again", 1e-5))
        ),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("fsdp", "sites", 1e-5),
                ("fsdp-bf16", "sites", 0.05),
                ("ddp", "mixer", 1e-5),
                ("ddp", "attention", 1e-5),
                ("fsdp", "recompute", 1e-5),
            )
        ),
    ],
)
def test_gradients_and_kept_bytes_are_those_of_one_process(
    wrapping: str, mode: str, bound: float, tmp_path: Path
) -> None:
    run_ranks(work, (wrapping, mode, str(tmp_path)), WORLD)
    got, nbytes = torch.load(tmp_path / "result.pt")
    model = compressed(mode)
    expected, _ = gradients_and_bytes(model, model, make_ids(batch=2 * WORLD))
    assert got.keys() == expected.keys()
    everything = torch.cat([got[n].flatten() for n in got]), torch.cat([expected[n].flatten() for n in got])
    assert relative_error(*everything) < bound
    reference = model.bfloat16() if wrapping == "fsdp-bf16" else model
    assert nbytes == gradients_and_bytes(reference, reference, make_ids(batch=2))[1]
