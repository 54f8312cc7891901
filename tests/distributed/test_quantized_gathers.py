"""FSDP2 that gathers parameters in few bits: what ranks compute with, and that what they train stays exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import laconic
from laconic.errors import ConfigError, ModelError
from laconic.formats import BlockFormat
from laconic.gradients import quantize_reduction
from tests.activations.models import loss_of, make_ids
from tests.distributed.processes import run_joined
from tests.distributed.test_zip import ddp, fsdp, losses

FORMATS = {8: "int8", 6: "int6", 5: "int5", 4: "nf4"}


def rounded(whole: Tensor, ranks: int, bits: int) -> Tensor:
    """A parameter as each rank's shard of it is quantized."""
    shards = []
    for shard in whole.chunk(ranks):
        flat = shard.reshape(-1)
        packed = BlockFormat(FORMATS[bits], 128).quantize(flat)
        shards.append(packed.dequantize().view(shard.shape))
    return torch.cat(shards)


def computed_with(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that a forward sees, by name."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.unshard()
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for unit in units:
        unit.reshard()
    return found


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.full_tensor().detach().clone() for name, parameter in model.named_parameters()}


def check_values(model: nn.Module, bits: int, dtype: torch.dtype | None = None, ranks: int | None = None) -> None:
    whole, ranks = trained(model), ranks or dist.get_world_size()
    zipped = laconic.quantize_gathers(model, bits=bits)
    found = computed_with(model)
    for name, exact in whole.items():
        exact = exact if dtype is None else exact.to(dtype)
        expected = exact if exact.dim() < 2 else rounded(exact, ranks, bits)
        assert torch.equal(found[name], expected), name
        assert exact.dim() < 2 or not torch.equal(expected, exact)
    assert all(torch.equal(one, whole[name]) for name, one in trained(model).items())
    zipped.remove()
    exact = computed_with(model)
    assert all(torch.equal(exact[name], whole[name].to(exact[name].dtype)) for name in whole)


class Uneven(nn.Module):
    """Parameters that two ranks have unequal and empty shards of, beside one of other magnitudes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(7, 5), nn.Linear(5, 1, bias=False)
        self.large = nn.Parameter(1e4 * torch.randn(3, 3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()) * self.large.sum()


def forgets_what_was_kept(reshard: bool | int) -> None:
    """An evaluation has no backward, so units keep what its forward has gathered."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    x = torch.randn(2, 16)
    exact = model(x)
    for part in model:
        fully_shard(part, reshard_after_forward=reshard)
    with torch.no_grad():
        assert torch.equal(model(x), exact)
        zipped = laconic.quantize_gathers(model)
        rounded = model(x)
        assert not torch.equal(rounded, exact)
        model.state_dict()  # of the exact shards, which stand for what was kept from here on
        assert torch.equal(model(x), rounded)
        zipped.remove()
        assert torch.equal(model(x), exact)


def in_two_ranks(_: object) -> None:
    for bits in FORMATS:
        check_values(fsdp(), bits)
    check_values(fsdp(param_dtype=torch.bfloat16), 8, torch.bfloat16)
    check_values(fully_shard(Uneven()), 8)

    exact, model = losses(fsdp()), fsdp()
    zipped = laconic.quantize_gathers(model)
    assert "all_gather of" in str(zipped)
    with pytest.raises(ModelError, match="QuantizedAllGather is set as its all-gather"):
        laconic.quantize_gathers(model)
    others = laconic.zip_collectives(model)
    assert {part.operation for part in others.parts if part.left is None} == {"reduce_scatter"}
    others.remove()
    quantize_reduction(model, min_nbytes=0)
    near = losses(model)
    assert near != exact
    for one, other in zip(near, exact, strict=True):
        assert float.fromhex(one) == pytest.approx(float.fromhex(other), abs=5e-3)

    # The gradient belongs to the values that forward computed with.
    model = fsdp(reshard=True)
    laconic.quantize_gathers(model, bits=4)
    loss_of(model, make_ids(seed=3)).backward()
    first = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    kept = fsdp(reshard=False)  # nothing is gathered again in backward
    laconic.quantize_gathers(kept, bits=4)
    loss_of(kept, make_ids(seed=3)).backward()
    assert all(torch.equal(first[name], p.grad.full_tensor()) for name, p in kept.named_parameters())

    forgets_what_was_kept(reshard=False)

    with pytest.raises(ModelError, match="model is in DDP, whose ranks hold all parameters"):
        laconic.quantize_gathers(ddp())
    with pytest.raises(ModelError, match="neither DDP nor FSDP2 has wrapped"):
        laconic.quantize_gathers(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="bits is 3, but parameters are gathered in 8, 6, 5 or 4 bits"):
        laconic.quantize_gathers(model, bits=3)


@pytest.mark.ci
def test_ranks_compute_with_the_same_rounded_parameters_and_train_exact_ones() -> None:
    run_joined(in_two_ranks, (), 2)


def backward_has_what_forward_had(bits: int) -> None:
    """Shards of two ranks are cut into other blocks than those of four, as none has a whole number of blocks."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(60, 60), nn.Tanh()) for _ in range(3)])
    for part in (*model, model):
        fully_shard(part, reshard_after_forward=2)
    laconic.quantize_gathers(model, bits=bits)
    seen: dict[nn.Module, Tensor] = {}

    def forward(module: nn.Module, *_: object) -> None:
        seen[module] = module.weight.detach().clone()

    def backward(module: nn.Module, *_: object) -> None:
        assert torch.equal(seen.pop(module), module.weight)

    for part in model:
        part[0].register_forward_hook(forward)
        part[0].register_full_backward_pre_hook(backward)
    model(torch.randn(4, 60, requires_grad=True)).square().sum().backward()
    assert not seen


def in_four_ranks(_: object) -> None:
    """Shards of half a node after forward, and copies of shards."""
    model = fsdp(reshard=2)  # type: ignore[arg-type]
    laconic.quantize_gathers(model)
    near, exact = losses(model), losses(fsdp())
    for one, other in zip(near, exact, strict=True):
        assert float.fromhex(one) == pytest.approx(float.fromhex(other), abs=5e-3)
    for bits in FORMATS:
        backward_has_what_forward_had(bits)
    forgets_what_was_kept(reshard=2)
    mesh: Any = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    check_values(fsdp(mesh=mesh), 8, ranks=2)


@pytest.mark.slow
def test_four_ranks_with_other_shards_after_forward_and_with_copies() -> None:
    run_joined(in_four_ranks, (), 4)
