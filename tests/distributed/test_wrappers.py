"""DDP and FSDP2 with gradients reduced in 8 bits, in real processes: the native losses for a quarter of the bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from laconic import quantize_gathers, zip_collectives
from laconic.collectives.integrations.fsdp2 import ZipAllGather, param_groups
from laconic.errors import ConfigError, ModelError
from laconic.gradients import all_reduce_q8, ddp_q8_hook, quantize_reduction
from laconic.gradients.ddp import q8_hook
from laconic.gradients.fsdp2 import Q8ReduceScatter
from laconic.train.distributed.traffic import WireCounter
from laconic.train.launch.worker import leave
from tests.activations.models import loss_of, make_ids, make_model, relative_error
from tests.distributed.processes import run_ranks
from tests.patience import patient

WORLD = 2
# Relative L2 error of a mean of two quantized Gaussians, quantized once more, is 0.8 %; gradients have heavier tails.
TOLERANCE = 0.02


def ids_of(step: int) -> Tensor:
    return make_ids(seed=10 * step + dist.get_rank())


def ddp(**options: object) -> nn.Module:
    # Two buckets or more.
    return DistributedDataParallel(make_model("llama"), bucket_cap_mb=0.2, **options)


def fsdp(bf16: bool = False) -> nn.Module:
    model = make_model("llama")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.model.layers, model):
        fully_shard(module, mp_policy=policy if bf16 else MixedPrecisionPolicy(), reshard_after_forward=False)
    return model


def gradients(model: nn.Module) -> Tensor:
    """All gradients as one vector, of the full parameters."""
    each = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        each.append(parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad)
    return torch.cat([grad.flatten() for grad in each])


def assert_same_on_all_ranks(x: Tensor) -> None:
    others = [torch.empty_like(x) for _ in range(WORLD)]
    dist.all_gather(others, x)
    assert all(torch.equal(x, other) for other in others)


def backward(model: nn.Module, steps: int = 1) -> Tensor:
    """Gradients after `steps` micro-batches, of which the last is reduced."""
    model.zero_grad()
    for step in range(steps):
        last = step == steps - 1
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)
        with nullcontext() if last or isinstance(model, FSDPModule) else model.no_sync():
            (loss_of(model, ids_of(step)) / steps).backward()
    return gradients(model)


def losses(model: nn.Module, steps: int = 6) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, ids_of(step % 2))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def backward_nbytes(model: nn.Module) -> int:
    loss = loss_of(model, ids_of(0))
    with WireCounter(WORLD) as wire:
        loss.backward()
    return wire.nbytes


def check(make: Callable[[], nn.Module], **options: object) -> None:
    """A quantized model beside a native one: gradients, with accumulation too, bytes, losses."""
    native, quantized = make(), make()
    report = quantize_reduction(quantized, min_nbytes=0, **options)
    assert report.num_elements == sum(parameter.numel() for parameter in quantized.parameters())
    for steps in (1, 3):
        exact, found = backward(native, steps), backward(quantized, steps)
        assert 0 < relative_error(found, exact) < TOLERANCE
        assert_same_on_all_ranks(found)
    ratio = backward_nbytes(native) / backward_nbytes(quantized)
    assert 3.75 < ratio <= 128 * 4 / 132
    native_losses, quantized_losses = losses(native), losses(quantized)
    assert native_losses[-1] < native_losses[0] - 0.2
    assert quantized_losses == pytest.approx(native_losses, abs=0.02)


def fsdp_divides_as_asked() -> None:
    native, quantized = fsdp(), fsdp()
    quantize_reduction(quantized, min_nbytes=0)
    for model in (native, quantized):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(0.5)
                module.set_force_sum_reduction_for_comms(True)
    assert relative_error(backward(quantized), backward(native)) < TOLERANCE


def hybrid_sharding_averages_across_nodes() -> None:
    """Two nodes of one process: the shard is the whole, averaged across in 8 bits."""
    mesh = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("cluster", "node"))
    model = make_model("llama")
    fully_shard(model, mesh=mesh["node"])
    quantize_reduction(model, across=mesh["cluster"].get_group(), min_nbytes=0)
    found = backward(model)
    assert 0 < relative_error(found, backward(ddp())) < TOLERANCE
    assert_same_on_all_ranks(found)
    hybrid = make_model("llama")
    fully_shard(hybrid, mesh=mesh)
    with pytest.raises(ModelError, match=r"2-D mesh \(HSDP\).*pass the ranks across nodes as `across`"):
        quantize_reduction(hybrid)


def error_feedback_is_kept_by_parameter() -> None:
    native, model = ddp(), ddp()
    state, hook = ddp_q8_hook(error_feedback=True, min_nbytes=0)
    assert hook is q8_hook
    assert hook.__qualname__ == "q8_hook"
    model.register_comm_hook(state, hook)
    assert losses(model) == pytest.approx(losses(native), abs=0.02)
    # DDP has cut its buckets anew after the first step; the errors are still those of the parameters.
    assert set(state.errors) == set(model.parameters())
    for parameter, error in state.errors.items():
        assert error.shape == (parameter.numel(),)
        assert 0 < error.abs().max() < 0.01


def small_buckets_are_exact() -> None:
    native, model = ddp(), ddp()
    quantize_reduction(model, min_nbytes=1 << 30)
    assert relative_error(backward(model), backward(native)) < 1e-6


def nan_reaches_all_ranks() -> None:
    model = ddp()
    quantize_reduction(model, min_nbytes=0)
    loss = loss_of(model, ids_of(0))
    (loss * float("nan") if dist.get_rank() == 1 else loss).backward()
    assert gradients(model).isnan().any()


def a_rank_that_does_not_come_is_an_error_in_time() -> None:
    """Synchronous, in the background, and in DDP's backward."""
    model = ddp(process_group=dist.new_group(timeout=timedelta(seconds=2)))
    quantize_reduction(model, min_nbytes=0)
    backward(model)
    group = dist.new_group(timeout=timedelta(seconds=2))
    all_reduce_q8(torch.zeros(300), group, min_nbytes=0, async_op=True).wait()
    if dist.get_rank() == 1:
        return  # to the barrier of all ranks
    started = time.monotonic()
    for call in (
        lambda: all_reduce_q8(torch.zeros(300), group, min_nbytes=0, async_op=True).wait(),
        lambda: all_reduce_q8(torch.zeros(300), group, min_nbytes=0),
        lambda: backward(model),
    ):
        with pytest.raises(RuntimeError, match=r"[Tt]imed out|closed"):
            call()
    assert 1.5 < time.monotonic() - started < 30


def only_elements_in_units_are_counted() -> None:
    """Embeddings, the last norm and the head lie in no unit: FSDP2 does not reduce them."""
    model = make_model("llama")
    model.model.layers[1].mlp.requires_grad_(False)
    for layer in model.model.layers:
        fully_shard(layer)
    trained = [p for layer in model.model.layers for p in layer.parameters() if p.requires_grad]
    assert quantize_reduction(model).num_elements == sum(p.numel() for p in trained)


def what_was_there_before_does_not_come_back() -> None:
    """The 8-bit reduction, and other gathers, stay when what they replaced is removed."""
    model = fsdp()
    zipped = zip_collectives(model)
    quantize_reduction(model, min_nbytes=0)
    zipped.remove()
    gathers = quantize_gathers(model)
    unit = next(param_groups(model))
    mine = ZipAllGather()
    unit._all_gather_comm = mine
    gathers.remove()
    assert unit._all_gather_comm is mine
    assert all(
        isinstance(group._reduce_scatter_comm, Q8ReduceScatter)
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in param_groups(module)
    )
    assert 0 < relative_error(backward(model), backward(fsdp())) < TOLERANCE


def refusals() -> None:
    plain = make_model("llama")
    with pytest.raises(ModelError, match=r"neither DDP nor FSDP2 has wrapped.*or use compress_gradients"):
        quantize_reduction(plain)
    with pytest.raises(ModelError, match=r"is torch\.float64, but its gradient must be float32, bfloat16 or float16"):
        quantize_reduction(DistributedDataParallel(nn.Linear(2, 2).double()))
    with pytest.raises(ConfigError, match="needs DDP"):
        quantize_reduction(fsdp(), error_feedback=True)
    with pytest.raises(ConfigError, match="call set_force_sum_reduction_for_comms"):
        Q8ReduceScatter()(torch.zeros(2), torch.zeros(4), dist.group.WORLD, dist.ReduceOp.MAX)


def work(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/r",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=patient(100)),
    )
    check(ddp)
    check(fsdp)
    check(lambda: fsdp(bf16=True))
    fsdp_divides_as_asked()
    hybrid_sharding_averages_across_nodes()
    error_feedback_is_kept_by_parameter()
    small_buckets_are_exact()
    nan_reaches_all_ranks()
    only_elements_in_units_are_counted()
    what_was_there_before_does_not_come_back()
    refusals()
    a_rank_that_does_not_come_is_an_error_in_time()
    dist.barrier()
    leave(0)


@pytest.mark.ci
def test_wrapped_models_train_with_a_quarter_of_the_bytes(tmp_path: Path) -> None:
    run_ranks(work, (str(tmp_path),), WORLD)
