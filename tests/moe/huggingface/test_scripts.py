"""What training scripts do with parameters and gradients gives the weights of one process, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from laconic.collectives.integrations.zip import zip_collectives
from laconic.errors import CheckpointError, ConfigError, TrainingError
from laconic.gradients import quantize_reduction
from laconic.moe.huggingface import parallelize
from laconic.moe.parallel.grid import Grid
from tests.activations.models import make_ids, make_model
from tests.moe.huggingface.test_parallelize import close
from tests.moe.worlds import run_world

Backward = Callable[[], object]
Script = Callable[[nn.Module, Backward], object]
"""What a script does with a model in a step, given what computes the gradients."""


def _model(family: str = "qwen3_moe") -> nn.Module:
    return make_model(family, experts_implementation="eager").double()


def _down(model: nn.Module) -> Any:
    return model.get_parameter("model.layers.0.mlp.experts.down_proj")


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _stepped(model: nn.Module, rate: float = 0.1) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(p.grad, alpha=rate)
    model.zero_grad()


def clipped_by_hand(model: nn.Module, backward: Backward) -> None:
    backward()
    total = sum(p.grad.norm().item() ** 2 for p in model.parameters() if p.grad is not None) ** 0.5
    count = sum(int((p.grad > 0).sum()) for p in model.parameters() if p.grad is not None)
    _stepped(model, count / total * 1e-5)


def scaled_by_norms(model: nn.Module, backward: Backward) -> None:
    backward()
    torch.optim.Adafactor(model.parameters(), lr=0.1).step()
    model.zero_grad()


def sharpness_aware(model: nn.Module, backward: Backward) -> None:
    backward()
    kept = {p: p.data.clone() for p in model.parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.add_(p.grad, alpha=0.05 / float(p.grad.norm()))
    model.zero_grad()
    backward()
    for p, data in kept.items():
        p.data = data
    _stepped(model)


def evaluated_with_averages(model: nn.Module, backward: Backward) -> None:
    kept = {name: p.data for name, p in model.named_parameters()}
    for p in model.parameters():
        p.data = p.data * 0.9
    backward()
    for name, p in model.named_parameters():
        p.data = kept[name]
    _stepped(model)


def converted_with_hooks(model: nn.Module, backward: Backward) -> None:
    calls = []
    handles = [
        _down(model).register_hook(lambda grad: grad * 0.5),
        _down(model).register_post_accumulate_grad_hook(lambda p: calls.append(p)),
    ]
    _down(model).mark = True
    backward()
    model.to(torch.float32).to(torch.float64)
    _stepped(model)
    backward()
    assert len(calls) == 2
    assert _down(model).mark
    _stepped(model)
    for handle in handles:
        handle.remove()


def drawn_anew(model: nn.Module, backward: Backward) -> None:
    generator = torch.Generator().manual_seed(3)
    for experts in (layer.get_submodule("mlp.experts") for layer in model.get_submodule("model.layers").children()):
        nn.init.normal_(experts.get_parameter("down_proj"), std=0.02, generator=generator)
        nn.init.trunc_normal_(experts.get_parameter("gate_up_proj"), std=0.02, generator=generator)
    backward()
    torch.manual_seed(4)
    for p in model.parameters():
        assert p.grad is not None
        p.grad.add_(torch.randn_like(p.grad), alpha=1e-3)
    _stepped(model)


def gated_otherwise(model: nn.Module, backward: Backward) -> None:
    for layer in model.get_submodule("model.layers").children():
        experts: Any = layer.get_submodule("mlp.experts")
        if hasattr(experts, "limit"):
            experts.limit *= 0.01
        else:
            experts.act_fn = nn.GELU()
    backward()
    _stepped(model)


def converted_after_fully_shard() -> None:
    """FSDP2 on a mesh of one process divides gradients of some dtypes twice."""
    found = []
    for again in (False, True):
        model = _model().float() if again else _model()
        parallelize(model, Grid(ep=2)).fully_shard([*model.get_submodule("model.layers").children()])
        model.double()
        model(input_ids=make_ids(2, 8), labels=make_ids(2, 8), use_cache=False).loss.backward()
        found.append(_whole(_down(model).grad))
    assert close(found[1], found[0])


def divided_by_the_factor_that_is_set() -> None:
    """1, as torchtitan sets on all units, leaves out the division of experts too; hooks of reductions do not."""
    own: Any = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]

    def undivided(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo knows no other

    def in_8_bits(model: nn.Module) -> None:
        quantize_reduction(model, across=own, min_nbytes=1 << 30)

    def zipped(model: nn.Module) -> None:
        parts = zip_collectives(model, across=own).parts
        assert not [part for part in parts if part.operation == "all_reduce" and part.left is not None]

    ids = make_ids(2, 8)
    for dtype in (torch.float32, torch.float64):
        found = []
        for change in (lambda _: None, undivided, in_8_bits, zipped):
            if change is in_8_bits and dtype == torch.float64:
                continue  # which it refuses
            model = _model().float()
            parallelize(model, Grid(ep=2)).fully_shard([*model.get_submodule("model.layers").children()])
            model.to(dtype)
            change(model)
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            found.append([_whole(p.grad) for p in (_down(model), model.get_submodule("lm_head").weight)])
        plain, twice, *others = found
        for number in range(2):
            assert torch.allclose(twice[number], 2 * plain[number], rtol=1e-3, atol=1e-7), (dtype, number)
            for other in others:
                assert torch.allclose(other[number], plain[number], rtol=1e-3, atol=1e-7), (dtype, number)


def scripts_of_one_process() -> None:
    for script, family in (
        (clipped_by_hand, "qwen3_moe"),
        (scaled_by_norms, "qwen3_moe"),
        (sharpness_aware, "qwen3_moe"),
        (evaluated_with_averages, "qwen3_moe"),
        (converted_with_hooks, "qwen3_moe"),
        (drawn_anew, "qwen3_moe"),
        (gated_otherwise, "qwen3_moe"),
        (gated_otherwise, "gpt_oss"),
    ):
        found = []
        for grid in (None, Grid(ep=2), *([] if script is scaled_by_norms else [Grid(esp=2)])):
            model = _model(family)
            done = None if grid is None else parallelize(model, grid)

            def backward(model: nn.Module = model, done: Any = done) -> None:
                ids = make_ids(4, 8)
                ids = ids if done is None else ids.chunk(2)[dist.get_rank()]
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                if done is not None:
                    done.reduce_gradients()

            for _ in range(2):
                script(model, backward)
            found.append({name: _whole(p.detach()) for name, p in model.named_parameters()})
        for name, expected in found[0].items():
            assert all(close(one[name], expected) for one in found[1:]), (script.__name__, name)


def writes_that_would_be_lost() -> None:
    model = _model()
    parallelize(model, Grid(ep=2))
    model(input_ids=make_ids(2, 8), labels=make_ids(2, 8)).loss.backward()
    p = _down(model)
    whole = p.full_tensor()
    assert torch.equal(_whole(p.detach()[3]), whole[3])  # reading is fine
    assert torch.equal(_whole(p.detach()[3][1:5] * 2), whole[3][1:5] * 2)
    with torch.inference_mode():
        assert abs(p.norm().item() - whole.norm().item()) < 1e-9
        assert not p.isnan().any()
    (grad,) = torch.autograd.grad(p[3].square().sum().full_tensor(), p)
    assert torch.equal(_whole(grad)[3], 2 * whole[3])
    for write in (
        lambda: p.grad[3].zero_(),
        lambda: p.data[3][0].zero_(),
        lambda: p.data.chunk(4)[1].mul_(2),
        lambda: p.grad.__setitem__(3, 0.0),
    ):
        with pytest.raises(TrainingError, match="gathered copy, so that the change would be lost"):
            write()
    for write in (
        lambda: torch._foreach_mul_([p.data[3]], 2),
        lambda: p.data.tensor_split(4)[1].mul_(2),
        lambda: p.data.__setitem__((3, torch.ones(64, dtype=torch.bool)), 0.0),
    ):
        with pytest.raises(TrainingError, match="gathered copy, so that the change would be lost"):
            write()
    assert torch.equal(p.full_tensor(), whole)
    p.data[:, 3].mul_(2)
    assert torch.equal(p.full_tensor()[:, 3], 2 * whole[:, 3])
    with pytest.raises(TrainingError, match=r"data of a tensor \[4, 64, 48\] .* use copy_"):
        p.data = whole
    with pytest.raises(TrainingError, match=r"values are \[2, 64, 48\] over .* of its shape"):
        p.data = p.data[:2]
    whole, grad = p.full_tensor(), p.grad.full_tensor()
    p.data -= 0.1 * p.grad
    assert torch.equal(p.full_tensor(), whole - 0.1 * grad)
    whole = p.full_tensor()
    p.data = p.data.flip(0)
    assert torch.equal(p.full_tensor(), whole.flip(0))
    assert p.placements == p.grad.placements
    model(input_ids=make_ids(2, 8), labels=make_ids(2, 8)).loss.backward()

    parallelize(model := _model(), Grid(ep=2)).fully_shard()  # which holds the values elsewhere, too
    p = _down(model)
    with pytest.raises(TrainingError, match=r"data of a tensor \[4, 64, 48\] .* use copy_"):
        p.data = p.data * 2
    whole = p.full_tensor()
    p.data *= 2
    assert torch.equal(p.full_tensor(), 2 * whole)


def tensors_of_others() -> None:
    """What `parallelize` has not cut keeps torch's way."""
    parallelize(model := _model(), Grid(ep=2))
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    other = fully_shard(nn.Linear(4, 4))
    whole = other.weight.full_tensor()
    other.weight.data -= 0.5 * other.weight
    other.weight.data *= 4
    assert torch.equal(other.weight.full_tensor(), 2 * whole)
    if rank == 0:  # numbers and writes send nothing
        part = DTensor.from_local(torch.tensor(3.0), mesh, [Partial()], run_check=False)
        assert part.item() == 3.0
        same = DTensor.from_local(torch.arange(8.0), mesh, [Replicate()], run_check=False)
        same[same > 5] = 0
        assert same.to_local().sum() == 15
    torch.manual_seed(3)
    summed = DTensor.from_local(torch.zeros(5000), mesh, [Partial()], run_check=False)
    assert abs(torch.randn_like(summed).full_tensor().std() - 1) < 0.1
    cut = distribute_tensor(torch.zeros(8, 4), mesh, [Shard(0)])
    before = torch.get_rng_state()
    torch.rand_like(cut)
    assert not torch.equal(torch.get_rng_state(), before)

    p = _down(model).detach()
    torch.manual_seed(3)
    expected = torch.rand(p.shape, dtype=p.dtype)
    torch.manual_seed(3)
    assert torch.equal(torch.compile(torch.rand_like, backend="aot_eager")(p).full_tensor(), expected)
    with FakeTensorMode():
        local = torch.empty(2, 8)
        fake = DTensor.from_local(local, p.device_mesh, p.placements, run_check=False)
        nn.init.normal_(fake)


def sums_that_are_no_means() -> None:
    def started(buffer: Tensor) -> Any:
        return dist.all_reduce(buffer, async_op=True).get_future().then(lambda it: it.value()[0])

    ids, grid = make_ids(2, 8), Grid(ep=2)
    model = _model()
    done = parallelize(model, grid)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, lambda _, bucket: started(bucket.buffer()))
    with pytest.raises(ConfigError, match=r"hook of .*, which may make other sums"):
        ddp(input_ids=ids, labels=ids)
    for layer in done.layers.values():
        layer.averages_under_ddp = False
    ddp(input_ids=ids, labels=ids).loss.backward()

    model = _model()
    parallelize(model, grid)
    ddp = DistributedDataParallel(model)
    with ddp.join(), pytest.raises(ConfigError, match="lets a process without a batch leave"):
        ddp(input_ids=ids, labels=ids)
    with ddp.join(throw_on_early_termination=True):
        ddp(input_ids=ids, labels=ids).loss.backward()


def files_of_one_process(folder: Path) -> None:
    model, rank = _model(), dist.get_rank()
    parallelize(model, Grid(ep=2))
    with pytest.warns(UserWarning, match=rf"is pickled, or copied by copy.copy, with the part of rank {rank} only"):
        torch.save(model.state_dict(), folder / f"{rank}.pt")
    dist.barrier()
    model.load_state_dict(torch.load(folder / f"{rank}.pt"))
    if rank:
        with pytest.raises(CheckpointError, match=r"part of a process at \(0,\) of \('ep',\), and is loaded at \(1,\)"):
            model.load_state_dict(torch.load(folder / "0.pt"))


@pytest.mark.ci
def test_a_pair_of_processes(tmp_path: Path) -> None:
    scenarios = [
        converted_after_fully_shard,
        divided_by_the_factor_that_is_set,
        tensors_of_others,
        scripts_of_one_process,
        writes_that_would_be_lost,
        sums_that_are_no_means,
        partial(files_of_one_process, tmp_path),
    ]
    run_world(scenarios, 2, tmp_path)
