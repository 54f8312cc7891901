"""Moving experts inside of one process: what belongs to them follows, and nothing else changes."""

from __future__ import annotations

import copy

import pytest
import torch

from laconic.errors import CheckpointError, ConfigError, RoutingError
from laconic.formats import QuantizedGradient, set_quantized_gradient
from laconic.moe import MoELayer
from laconic.moe.placement.migration import ExpertMover, Moved
from tests.moe.moving import OPTIMIZERS, E, build, experts_of, forward, inputs, train_step


def shuffled(seed: int) -> torch.Tensor:
    return torch.randperm(E, generator=torch.Generator().manual_seed(seed))


def test_outputs_and_gradients_keep_their_bits() -> None:
    layers = build(2, 0, 1, torch.float32, None)
    x = inputs(0, 0, torch.float32)
    expected = forward(layers, x)
    (gate_gradient,) = torch.autograd.grad(expected.sum(), layers[0].gate.weight)
    moved = ExpertMover(layers).move([shuffled(1), shuffled(2)])
    output = forward(layers, x)
    assert torch.equal(output, expected)
    assert torch.equal(torch.autograd.grad(output.sum(), layers[0].gate.weight)[0], gate_gradient)
    home = torch.arange(E)
    assert moved == Moved(int((shuffled(1) != home).sum() + (shuffled(2) != home).sum()), 0, 0)


def test_weights_lie_where_the_placement_says() -> None:
    layers = build(1, 0, 1, torch.float32, None)
    before = [parameter.detach().clone() for parameter in experts_of(layers)]
    ExpertMover(layers).move([shuffled(1)])
    ExpertMover(layers).swap([(2, 5)])
    expected = shuffled(1)
    expected[[2, 5]] = expected[[5, 2]]
    placement = layers[0].placement
    assert torch.equal(placement.slots, expected)
    for was, parameter in zip(before, experts_of(layers), strict=True):
        assert torch.equal(parameter[expected], was)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_with_moves_is_training_without(name: str) -> None:
    plain = build(2, 0, 1, torch.float32, None)
    moving = copy.deepcopy(plain)
    runs = []
    for layers in (plain, moving):
        optimizer = OPTIMIZERS[name](experts_of(layers))
        mover = ExpertMover(layers, None, [optimizer])
        for step in range(5):
            train_step(layers, [optimizer], inputs(step, 0, torch.float32))
            if layers is moving:
                mover.move([shuffled(step), None if step % 2 else shuffled(step + 50)])
                mover.swap([(step, 7), (1, step)])
        mover.bring_home()
        runs.append(optimizer)
    # Adafactor takes means over all experts of a parameter, whose order of sums is another one.
    rounding = 1e-5 if name == "adafactor" else 0.0
    for mine, other in zip(experts_of(plain), experts_of(moving), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=rounding)
        ours, theirs = runs[0].state[mine], runs[1].state[other]
        assert {*ours} == {*theirs}
        for key, value in ours.items():
            torch.testing.assert_close(value, theirs[key], rtol=0, atol=rounding, msg=key)
    if name in ("adamw8bit", "adamw4bit"):
        assert any(key.endswith("_codes") for state in runs[0].state.values() for key in state)


def test_gradients_between_micro_batches_move_too() -> None:
    layers = build(1, 0, 1, torch.float64, None)
    for step in range(2):
        forward(layers, inputs(step, 0, torch.float64)).sum().backward()
    expected = [parameter.grad for parameter in experts_of(layers)]
    layers = build(1, 0, 1, torch.float64, None)
    mover = ExpertMover(layers)
    for step in range(2):
        forward(layers, inputs(step, 0, torch.float64)).sum().backward()
        if step == 0:
            mover.move([shuffled(3)])
    mover.bring_home()
    for parameter, gradient in zip(experts_of(layers), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_checkpoints_are_in_logical_order() -> None:
    layers = build(1, 0, 1, torch.float32, None)
    before = copy.deepcopy(layers[0].state_dict())
    mover = ExpertMover(layers)
    mover.move([shuffled(1)])
    with pytest.raises(CheckpointError, match="have changed places"):
        layers[0].state_dict()
    with mover.logical_order():
        saved = copy.deepcopy(layers[0].state_dict())
    assert torch.equal(layers[0].placement.slots, shuffled(1))
    assert {*saved} == {*before}
    assert all(torch.equal(saved[name], value) for name, value in before.items())
    layers[0].load_state_dict(saved)
    assert layers[0].placement.is_identity
    assert all(torch.equal(layers[0].state_dict()[name], value) for name, value in before.items())


def test_a_move_to_where_everything_is_does_nothing() -> None:
    layers = build(2, 0, 1, torch.float32, None)
    versions = [parameter._version for parameter in experts_of(layers)]
    assert ExpertMover(layers).move([None, torch.arange(E)]) == Moved(0, 0, 0)
    assert [parameter._version for parameter in experts_of(layers)] == versions


def test_what_cannot_move_is_refused() -> None:
    layers = build(1, 0, 1, torch.float32, None)
    mover = ExpertMover(layers)
    with pytest.raises(RoutingError, match="must be a permutation"):
        mover.move([torch.zeros(E, dtype=torch.int64)])
    with pytest.raises(RoutingError, match="a is 8, but experts are numbered"):
        mover.swap([(8, 0)])
    with pytest.raises(ConfigError, match="slots are those of 2 layers, but there are 1"):
        mover.move([None, None])
    with pytest.raises(ConfigError, match="layers are empty"):
        ExpertMover([])
    other = MoELayer(layers[0].gate, layers[0].experts, placement=torch.clone)
    with pytest.raises(ConfigError, match=r"layer 0 has the placement .*laconic\.moe\.Placement; leave it out"):
        ExpertMover([other])


def test_a_layer_without_a_placement_gets_one() -> None:
    (layer,) = build(1, 0, 1, torch.float32, None)
    bare = MoELayer(layer.gate, layer.experts)
    expected = bare(inputs(0, 0, torch.float32))
    mover = ExpertMover([bare])
    assert mover.placement(0).is_identity
    mover.move([shuffled(1)])
    assert torch.equal(bare(inputs(0, 0, torch.float32)), expected)
    assert not bare.placement.is_identity


def test_tensors_that_cannot_be_split_by_expert_are_refused() -> None:
    layers = build(1, 0, 1, torch.float32, None)
    optimizer = torch.optim.SGD(experts_of(layers), lr=0.1)
    down = experts_of(layers)[1]
    optimizer.state[down]["history"] = torch.zeros(3)
    with pytest.raises(
        ConfigError, match=r"down\.history of layer 0 has shape \[3\] here, but it must begin with the 8"
    ):
        ExpertMover(layers, None, [optimizer])
    optimizer.state[down].clear()
    set_quantized_gradient(down, QuantizedGradient.zeros(down.shape, 8))
    with pytest.raises(ConfigError, match=r"down of layer 0 has a quantized gradient.*after zero_grad"):
        ExpertMover(layers)


def moved(name: str = "adamw") -> tuple[list[MoELayer], torch.optim.Optimizer, ExpertMover]:
    """A layer with two steps of training whose experts 0 and 7 have changed places."""
    layers = build(1, 0, 1, torch.float32, None)
    optimizer = OPTIMIZERS[name](experts_of(layers))
    mover = ExpertMover(layers, None, [optimizer])
    for step in range(2):
        train_step(layers, [optimizer], inputs(step, 0, torch.float32))
    mover.swap([(0, 7)])
    return layers, optimizer, mover


def test_state_dicts_of_parts_are_in_logical_order_or_refused() -> None:
    layers, optimizer, mover = moved()
    with pytest.raises(CheckpointError, match=r"this layer have changed places.*logical_order\(\)"):
        layers[0].experts.state_dict()
    with pytest.raises(CheckpointError, match="and the state of AdamW with them, but a state dict has them in logical"):
        optimizer.state_dict()
    with mover.logical_order():
        saved = copy.deepcopy(optimizer.state_dict())
        weights = copy.deepcopy(layers[0].state_dict())
    with pytest.raises(CheckpointError, match="or load the model's first"):
        optimizer.load_state_dict(saved)

    # Without the experts: they stay where they are.
    x = inputs(9, 0, torch.float32)
    expected = forward(layers, x)
    layers[0].load_state_dict({"gate.weight": weights["gate.weight"]}, strict=False)
    assert torch.equal(forward(layers, x), expected)
    assert not mover.placement(0).is_identity
    with pytest.raises(RuntimeError, match=r"has experts\.down without experts\.gate_up, but the experts have changed"):
        layers[0].load_state_dict({"experts.down": weights["experts.down"]}, strict=False)

    # With them, and the optimizer's state is that of others until it is loaded, too.
    layers[0].experts.load_state_dict({name[8:]: each for name, each in weights.items() if name.startswith("experts.")})
    assert mover.placement(0).is_identity
    assert torch.equal(forward(layers, x), expected)
    with pytest.raises(CheckpointError, match="but the state of AdamW is that of other experts; load its state dict"):
        train_step(layers, [optimizer], x)
    optimizer.load_state_dict(saved)
    train_step(layers, [optimizer], x)


class Nested(torch.optim.SGD):
    """Keeps momentum in a dictionary of its own."""

    def step(self, closure: object = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["momentum"] = {"first": torch.zeros_like(parameter)}


def test_state_that_cannot_be_split_is_refused_and_that_of_each_optimizer_moves() -> None:
    layers = build(1, 0, 1, torch.float32, None)
    nested = Nested(experts_of(layers))
    mover = ExpertMover(layers, None, [nested])
    train_step(layers, [nested], inputs(0, 0, torch.float32))
    with pytest.raises(ConfigError, match=r"momentum of the optimizer's state of gate_up in layer 0 is a dict, which"):
        mover.swap([(0, 7)])
    both = [OPTIMIZERS[name](experts_of(layers)) for name in ("adamw", "sgd momentum")]
    for step, optimizer in enumerate(both):
        train_step(layers, [optimizer], inputs(step, 0, torch.float32))
    weight = experts_of(layers)[0]
    before = [both[0].state[weight]["exp_avg"].clone(), both[1].state[weight]["momentum_buffer"].clone()]
    ExpertMover(layers, None, both).swap([(0, 7)])
    after = [both[0].state[weight]["exp_avg"], both[1].state[weight]["momentum_buffer"]]
    assert all(torch.equal(one[0], other[7]) for one, other in zip(after, before, strict=True))
