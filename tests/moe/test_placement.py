from __future__ import annotations

import pytest
import torch

from laconic.errors import CheckpointError, RoutingError
from laconic.moe.placement.expert_map import Placement


def placed(*slots: int) -> Placement:
    placement = Placement(len(slots))
    placement.slots.copy_(torch.tensor(slots))
    return placement


def test_experts_are_at_home_at_first() -> None:
    placement = Placement(4)
    assert placement.is_identity
    assert placement(torch.tensor([[3, 0], [1, 1]])).tolist() == [[3, 0], [1, 1]]


def test_logical_is_the_inverse_of_slots() -> None:
    placement = placed(2, 0, 3, 1)
    assert placement.logical.tolist() == [1, 3, 0, 2]
    assert placement(placement.logical).tolist() == [0, 1, 2, 3]
    assert not placement.is_identity


def test_swapped_exchanges_two_and_changes_nothing_yet() -> None:
    placement = placed(2, 0, 3, 1)
    assert placement.swapped(0, 3).tolist() == [1, 0, 3, 2]
    assert placement.swapped(1, 1).tolist() == [2, 0, 3, 1]
    assert placement.slots.tolist() == [2, 0, 3, 1]


def test_a_state_dict_is_refused_while_experts_are_elsewhere() -> None:
    layers = torch.nn.ModuleDict({"moe": placed(1, 0)})
    with pytest.raises(CheckpointError, match=r"experts of moe have changed places.*logical_order\(\)"):
        layers.state_dict()
    assert torch.nn.ModuleDict({"moe": Placement(2)}).state_dict() == {}


def test_loading_the_experts_makes_the_placement_the_identity() -> None:
    placement = placed(1, 0)
    layers = torch.nn.ModuleDict({"experts": torch.nn.Linear(2, 2), "placement": placement})
    placement.bind(layers["experts"])
    layers.load_state_dict({}, strict=False)
    assert not placement.is_identity
    layers.load_state_dict({f"experts.{name}": p for name, p in layers["experts"].named_parameters()})
    assert placement.is_identity
    assert {*layers.state_dict()} == {"experts.weight", "experts.bias"}


@pytest.mark.parametrize("slots", [[0, 0, 1], [0, 1], [0, 1, 3], [0, 1, 2, 3]])
def test_slots_that_are_no_permutation_are_refused(slots: list[int]) -> None:
    with pytest.raises(RoutingError, match=r"must be a permutation of 0 \.\.\. 2"):
        Placement(3).check(torch.tensor(slots))


def test_experts_that_do_not_exist_are_refused() -> None:
    with pytest.raises(RoutingError, match="b is 4, but experts are numbered from 0 to 3"):
        Placement(4).swapped(0, 4)
