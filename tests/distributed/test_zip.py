"""DDP, FSDP2 and all-to-all over a codec, in real processes: the same losses, bit for bit, in fewer bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.collectives.codec import Codec, Lossless, Raw
from laconic.collectives.integrations.autograd import all_to_all
from laconic.errors import ConfigError, ModelError
from laconic.gradients import quantize_reduction
from laconic.train.launch.worker import leave
from tests.activations.models import loss_of, make_ids, make_model
from tests.distributed.processes import run_ranks
from tests.patience import patient

STEPS = 4
LOSSLESS = Lossless()


def fsdp(
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reshard: bool = True,
    mesh: Any = None,
) -> nn.Module:
    model = make_model("llama")
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    return model


def ddp(**options: Any) -> nn.Module:
    return DistributedDataParallel(make_model("llama"), bucket_cap_mb=0.2, **options)


def losses(model: nn.Module, accumulation: int = 1) -> list[str]:
    """The losses of a few steps as hex floats: equal means equal bit for bit."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(accumulation):
            last = micro == accumulation - 1
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(last)
            with nullcontext() if last or isinstance(model, FSDPModule) else model.no_sync():
                loss = loss_of(model, make_ids(seed=100 * step + 10 * micro + dist.get_rank()))
                loss.backward()
        optimizer.step()
        found.append(loss.item().hex())
    assert len(set(found)) == STEPS
    return found


def zipped_losses(
    make: Callable[[], nn.Module], codec: Codec | str, accumulation: int = 1, prefetch: bool = False
) -> list[str]:
    model = make()
    laconic.zip_collectives(model, codec=codec, prefetch=prefetch)
    return losses(model, accumulation)


FSDP_SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16, reduced in fp32": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "bf16, kept after forward": {"param_dtype": torch.bfloat16, "reshard": False},
}


# --- two ranks ---


def fsdp_losses_are_those_of_gloo() -> None:
    # Two fp32 numbers have one sum, whatever the order.
    for settings in (FSDP_SETTINGS["fp32"], FSDP_SETTINGS["bf16, reduced in fp32"]):
        make = lambda settings=settings: fsdp(**settings)  # noqa: E731
        assert zipped_losses(make, LOSSLESS) == losses(make())
        assert zipped_losses(make, LOSSLESS, accumulation=2) == losses(make(), accumulation=2)


def ddp_losses_are_those_of_gloo() -> None:
    assert zipped_losses(ddp, LOSSLESS, accumulation=2) == losses(ddp(), accumulation=2)


def removal_gives_back_what_was_there() -> None:
    for make in (fsdp, ddp):
        model = make()
        zipped = laconic.zip_collectives(model)
        loss_of(model, make_ids()).backward()
        model.zero_grad()
        zipped.remove()
        zipped.remove()
        assert losses(model) == losses(make())


def quantized_reduction_keeps_its_part() -> None:
    both, alone = fsdp(), fsdp()
    for model in (both, alone):
        quantize_reduction(model, min_nbytes=0)
    text = str(laconic.zip_collectives(both, codec=LOSSLESS))
    assert "left as it was: reduce_scatter" in text
    assert "Q8ReduceScatter is set as its reduce-scatter" in text
    assert losses(both) == losses(alone)


def handles_say_what_they_did() -> None:
    text = str(laconic.zip_collectives(fsdp(torch.bfloat16, torch.float32), codec=Raw()))
    assert text.startswith("FSDP2, codec raw\n  all_gather of ")
    assert " bfloat16 in 3 unit(s)\n" in text
    assert " float32 in 3 unit(s)" in text
    assert "left" not in text
    assert str(laconic.zip_collectives(ddp())).startswith("DDP, codec auto\n  all_reduce of ")


def hybrid_shards_leave_their_all_reduce() -> None:
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("cluster", "node"))
    make = lambda: fsdp(mesh=mesh)  # noqa: E731
    model = make()
    zipped = laconic.zip_collectives(model, codec=LOSSLESS)
    assert "left as it was: all_reduce" in str(zipped)
    assert "pass `across` with a 1-D mesh" in str(zipped)
    assert losses(model) == zipped_losses(make, Raw())
    inside = make_model("llama")
    fully_shard(inside, mesh=mesh["node"])
    zipped = laconic.zip_collectives(inside, codec=LOSSLESS, across=mesh["cluster"].get_group())
    assert {part.operation for part in zipped.parts} == {"all_gather", "reduce_scatter", "all_reduce"}
    # The same mean in two levels.
    assert [float.fromhex(x) for x in losses(inside)] == pytest.approx(
        [float.fromhex(x) for x in losses(make())], abs=1e-4
    )


def what_cannot_be_zipped_is_refused() -> None:
    with pytest.raises(ModelError, match=r"neither DDP nor FSDP2 has wrapped; wrap it first"):
        laconic.zip_collectives(make_model("llama"))
    hooked = ddp()
    quantize_reduction(hooked)
    with pytest.raises(ModelError, match=r"another communication hook is registered; a model takes one"):
        laconic.zip_collectives(hooked)
    with pytest.raises(ConfigError, match=r"across is .*, but DDP has whole parameters; it goes with FSDP2"):
        laconic.zip_collectives(ddp(), across=dist.group.WORLD)
    alone = make_model("llama")
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("cluster", "node"))
    fully_shard(alone, mesh=mesh["node"])
    with pytest.raises(ModelError, match=r"no collective that could go over a codec.*sharded over one rank"):
        laconic.zip_collectives(alone)
    twice = fsdp()
    laconic.zip_collectives(twice)
    with pytest.raises(ModelError, match=r"ZipAllGather is set as its all-gather"):
        laconic.zip_collectives(twice)


def ranks_with_different_codecs_are_refused() -> None:
    model = fsdp()
    laconic.zip_collectives(model, codec=LOSSLESS if dist.get_rank() else Raw())
    with pytest.raises(
        ConfigError, match=r"codec is 'Raw\(raw\)' on rank 0 and '(Lossless\()?auto\)?' on rank 1 in all_gather"
    ):
        loss_of(model, make_ids())


# --- any number of ranks ---


def losses_do_not_depend_on_the_codec() -> None:
    for settings in FSDP_SETTINGS.values():
        make = lambda settings=settings: fsdp(**settings)  # noqa: E731
        raw = zipped_losses(make, Raw())
        assert zipped_losses(make, LOSSLESS) == raw
        assert zipped_losses(make, LOSSLESS, prefetch=True) == raw
    assert zipped_losses(ddp, LOSSLESS) == zipped_losses(ddp, Raw())


def exchanged_rows_have_exact_gradients() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    # Rank r sends r + s rows to rank s; rank 0 sends itself none.
    input_splits = [rank + other for other in range(world)]
    output_splits = [other + rank for other in range(world)]
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(sum(input_splits), 3, 5, generator=generator, requires_grad=True)
    y = all_to_all(x, output_splits, input_splits, codec=LOSSLESS)
    expected = torch.empty_like(y)
    dist.all_to_all_single(expected, x.detach(), output_splits, input_splits)
    assert torch.equal(y, expected)
    weight = torch.randn(y.shape, generator=generator)
    (y * weight).sum().backward()
    found = torch.empty_like(x)
    dist.all_to_all_single(found, weight, input_splits, output_splits)
    assert x.grad is not None
    assert torch.equal(x.grad, found)


def exchanged_rows_pass_gradcheck() -> None:
    """All ranks perturb the same element of their own rows at once, so numbers of one rank are those of all."""
    x = torch.randn(2 * dist.get_world_size(), 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x.requires_grad_()
    run = lambda x: all_to_all(x, codec=Raw())  # noqa: E731
    assert torch.equal(run(run(x)), x)
    torch.autograd.gradcheck(lambda x: run(run(x) ** 2), x)
    torch.autograd.gradgradcheck(lambda x: run(run(x) ** 2), x)


TWO = [
    fsdp_losses_are_those_of_gloo,
    ddp_losses_are_those_of_gloo,
    removal_gives_back_what_was_there,
    quantized_reduction_keeps_its_part,
    handles_say_what_they_did,
    what_cannot_be_zipped_is_refused,
]
ANY = [losses_do_not_depend_on_the_codec, exchanged_rows_have_exact_gradients, exchanged_rows_pass_gradcheck]
# The last one leaves groups behind that nobody should use.
SCENARIOS = {
    2: [*TWO, *ANY, ranks_with_different_codecs_are_refused],
    3: ANY,
    4: [hybrid_shards_leave_their_all_reduce],
}


def work(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=patient(60)))
    for scenario in SCENARIOS[world]:
        started = time.perf_counter()
        scenario()
        if rank == 0:
            print(f"{world} ranks, {scenario.__name__}: {time.perf_counter() - started:.1f} s")
    dist.destroy_process_group()
    leave(0)


@pytest.mark.parametrize("world", [2, *(pytest.param(world, marks=pytest.mark.slow) for world in (3, 4))])
@pytest.mark.ci
def test_zipped_collectives_keep_every_bit(world: int, tmp_path: Path) -> None:
    run_ranks(work, (world, str(tmp_path)), world)
