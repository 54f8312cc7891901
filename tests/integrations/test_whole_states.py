"""States of optimizers with a group for each mesh, saved and loaded as those of one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from laconic.integrations.whole_states import groups_of_one_process


def trained(groups: list[dict[str, Any]]) -> tuple[AdamW, LambdaLR]:
    optimizer = AdamW(groups, lr=1e-2)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(2):
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                parameter.grad = torch.full_like(parameter, 1.0 + number)
        optimizer.step()
        scheduler.step()
    return optimizer, scheduler


def test_states_are_saved_and_loaded_with_the_groups_of_one_process() -> None:
    a, b, c, d, e = (nn.Parameter(torch.full((number,), 1.0)) for number in (1, 2, 3, 4, 5))
    wanted = [({"weight_decay": 0.1}, [a, b, c]), ({"weight_decay": 0.0}, [d, e])]
    split = [{"params": [a, c], "weight_decay": 0.1}, {"params": [b], "weight_decay": 0.1}]
    split += [{"params": [e], "weight_decay": 0.0}, {"params": [d], "weight_decay": 0.0}]
    optimizer, scheduler = trained([*map(dict, split)])
    before = copy.deepcopy(optimizer.state_dict()), scheduler.state_dict()
    moments = {p: optimizer.state[p]["exp_avg"].clone() for p in (a, b, c, d, e)}
    with groups_of_one_process(optimizer, scheduler, wanted):
        saved, steps = optimizer.state_dict(), scheduler.state_dict()

    # 1. One process loads it.
    alone = AdamW([{"params": [a, b, c], "weight_decay": 0.1}, {"params": [d, e], "weight_decay": 0.0}], lr=1e-2)
    plan = LambdaLR(alone, lambda step: 1 / (1 + step))
    alone.load_state_dict(saved)
    plan.load_state_dict(steps)
    assert all(torch.equal(alone.state[p]["exp_avg"], moments[p]) for p in moments)
    assert [group["lr"] for group in alone.param_groups] == [optimizer.param_groups[0]["lr"]] * 2
    assert plan.base_lrs == [1e-2] * 2

    # 2. So do several, in their own groups.
    again = AdamW([*map(dict, split)], lr=1e-2)
    later = LambdaLR(again, lambda step: 1 / (1 + step))
    with groups_of_one_process(again, later, wanted):
        again.load_state_dict(alone.state_dict())
        later.load_state_dict(plan.state_dict())
    assert all(torch.equal(again.state[p]["exp_avg"], moments[p]) for p in moments)
    assert again.state_dict()["param_groups"] == before[0]["param_groups"]
    assert later.state_dict() == before[1]

    # 3. What an earlier version saved, with a group for each mesh, is loaded as it is.
    with groups_of_one_process(again, later, wanted):
        again.load_state_dict(before[0])
    assert all(torch.equal(again.state[p]["exp_avg"], moments[p]) for p in moments)
