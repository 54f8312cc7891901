"""Biases of routers follow the load of experts, by one call in a training loop."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from laconic.errors import ConfigError, RoutingError
from laconic.moe import (
    GatedExperts,
    Grid,
    MoELayer,
    SigmoidGate,
    SoftmaxGate,
    moe_layers,
    parallelize,
    update_router_biases,
)
from tests.activations.models import make_ids, make_model
from tests.moe.worlds import run_world

NAME = "e_score_correction_bias"


def tiny(family: str = "deepseek_v3") -> nn.Module:
    return make_model(family, experts_implementation="eager").double()


def step(model: nn.Module, ids: Tensor) -> None:
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


def biases(model: nn.Module) -> list[Tensor]:
    return [getattr(part, NAME) for part in model.modules() if isinstance(getattr(part, NAME, None), Tensor)]


def test_a_call_moves_the_biases_by_the_loads_of_all_micro_batches() -> None:
    model, load = tiny(), torch.zeros(4, dtype=torch.int64)
    parallelize(model)
    (layer,) = moe_layers(model).values()
    for seed in (1, 2):
        step(model, make_ids(2, 8, seed))
        assert layer.load is not None
        load += layer.load
    with torch.no_grad():
        step_in_evaluation = model.eval()(input_ids=make_ids(2, 8, 3))
        assert step_in_evaluation.logits.isfinite().all()
    model.train()
    update_router_biases(model, rate=0.25)
    (bias,) = biases(model)
    assert bias.tolist() == (0.25 * (load.double().mean() - load).sign()).tolist()
    assert float(bias.abs().max()) == 0.25
    update_router_biases(model, rate=0.25)
    assert float(bias.abs().max()) == 0.25, "nothing was counted since"


def test_an_optimizer_may_call_it() -> None:
    model = tiny()
    parallelize(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer.register_step_post_hook(lambda *_: update_router_biases(model))
    step(model, make_ids(2, 8))
    optimizer.step()
    assert float(biases(model)[0].abs().max()) == pytest.approx(1e-3)


def test_sigmoid_gates_move_by_their_own_rate() -> None:
    gate = SigmoidGate(4, 8, 1, bias_rate=0.5)
    gate.load.copy_(torch.tensor([5, 3, 3, 1]))
    update_router_biases(nn.Sequential(MoELayer(gate, GatedExperts(4, 8, 16))))
    assert gate.bias.tolist() == [-0.5, 0.0, 0.0, 0.5]
    assert not gate.load.any()


def test_biases_that_would_lose_steps_are_refused() -> None:
    model = make_model("deepseek_v3").bfloat16()
    parallelize(model)
    for update in (SigmoidGate(4, 8, 1).bfloat16().update_bias, partial(update_router_biases, model)):
        with pytest.raises(RoutingError, match=r"biases of a router are torch\.bfloat16.*; give the module a float32"):
            update()


def test_layers_that_share_a_router_move_its_bias_once() -> None:
    gate = SigmoidGate(4, 8, 1, bias_rate=0.5)
    model = nn.Sequential(*(MoELayer(gate, GatedExperts(4, 8, 16)) for _ in range(2)))
    model(torch.randn(16, 8))
    load = gate.load.float()
    assert load.sum() == 32
    update_router_biases(model)
    assert gate.bias.tolist() == (0.5 * (load.mean() - load).sign()).tolist()

    model = make_model("deepseek_v3", num_hidden_layers=3, first_k_dense_replace=1, experts_implementation="eager")
    model.get_submodule("model.layers.2.mlp").gate = model.get_submodule("model.layers.1.mlp.gate")
    parallelize(model)
    step(model, make_ids(2, 8))
    loads = [layer.load for layer in moe_layers(model).values()]
    assert len(loads) == 2
    load = torch.stack([load for load in loads if load is not None]).sum(0).float()
    update_router_biases(model, rate=0.25)
    assert biases(model)[0].tolist() == (0.25 * (load.mean() - load).sign()).tolist()


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_runs_again_is_counted_once(reentrant: bool) -> None:
    """Micro-batches that run again would otherwise weigh twice as much as others."""
    gate = SigmoidGate(4, 8, 1)
    layer, expected = MoELayer(gate, GatedExperts(4, 8, 16)), torch.zeros(4, dtype=torch.int64)
    model, of_model = tiny(), torch.zeros(4, dtype=torch.int64)
    parallelize(model)
    (spread,) = moe_layers(model).values()
    block = model.get_submodule("model.layers.1.mlp")
    plain = block.forward
    for number, again in enumerate((True, False, True, True)):
        x = torch.randn(2 * number + 1, 8, generator=torch.Generator().manual_seed(number)).requires_grad_()
        out = checkpoint(layer, x, use_reentrant=reentrant) if again else layer(x)
        assert layer.load is not None
        expected += layer.load
        assert isinstance(out, Tensor)
        out.sum().backward()
        block.forward = partial(checkpoint, plain, use_reentrant=reentrant) if again else plain
        step(model, make_ids(1, 4 + number, number))
        assert spread.load is not None
        of_model += spread.load
    assert torch.equal(gate.load, expected)
    assert spread.router_bias is not None
    assert torch.equal(spread.router_bias.take(), of_model)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_without_gradients_in_between_is_not_counted(reentrant: bool) -> None:
    gate = SigmoidGate(4, 8, 1)
    layer = MoELayer(gate, GatedExperts(4, 8, 16))
    with torch.no_grad():
        layer(torch.randn(7, 8))
    out = checkpoint(layer, torch.randn(5, 8, requires_grad=True), use_reentrant=reentrant)
    assert isinstance(out, Tensor)
    out.sum().backward()
    assert gate.load.sum() == 5


def test_models_without_such_biases_are_refused() -> None:
    with pytest.raises(ConfigError, match="has no layers yet; call parallelize first"):
        update_router_biases(tiny())
    for model in (tiny("mixtral"), nn.Sequential(MoELayer(SoftmaxGate(4, 8, 1), GatedExperts(4, 8, 16)))):
        if not moe_layers(model):
            parallelize(model)
        with pytest.raises(ConfigError, match=f"no router of {type(model).__name__} has an {NAME} of as many values"):
            update_router_biases(model)
    model = tiny()
    parallelize(model, gate="softmax")  # the router does not decide
    with pytest.raises(ConfigError, match="no router"):
        update_router_biases(model)


def _like_one_process() -> None:
    place, size = dist.get_rank(), dist.get_world_size()
    alone = tiny()
    parallelize(alone)
    step(alone, make_ids(4, 8, 1))
    update_router_biases(alone, rate=0.25)  # of as many times the same tokens
    (wanted,) = biases(alone)
    grids = [Grid(ep=2), Grid(ep=1), *([Grid(mp=2, ep=2), Grid(ep=4)] if size == 4 else [])]
    for grid in grids:
        for shards in (False, True):
            model = tiny()
            done = parallelize(model, grid)
            if shards:
                done.fully_shard(model.model.layers)
            dp, mp = grid.layout.dp, grid.layout.mp
            step(model, make_ids(4, 8, 1).chunk(dp)[place // mp])
            update_router_biases(model, rate=0.25)
            (bias,) = biases(model)
            assert float(bias.abs().max()) == 0.25
            assert torch.equal(bias, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_loads_are_those_of_all_processes(world: int, tmp_path: Path) -> None:
    run_world([_like_one_process], world, tmp_path)
