"""States of bitsandbytes and of torch's AdamW become those of AdamW8bit, and go back."""

from __future__ import annotations

import copy
import logging
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from laconic.errors import FormatError
from laconic.ops import dequantize_dynamic
from laconic.optim import (
    AdamW8bit,
    from_adamw_state,
    from_bitsandbytes_state,
    to_adamw_state,
    to_bitsandbytes_state,
)
from laconic.optim.moments import MOMENTS, dequantize_moment

SHAPES = [(32, 512), (70, 100), (9,)]
"""Rows of whole blocks, ragged rows, and one that stays in fp32."""


@pytest.fixture(scope="module")
def bnb() -> Any:
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    return pytest.importorskip("bitsandbytes")


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def train(ps: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in ps:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


def moment_of(state: dict[str, Any], moment: str, shape: torch.Size | None = None) -> Tensor:
    if moment in state:
        value: Tensor = state[moment]
        return value
    return dequantize_moment(state[f"{moment}_codes"], state[f"{moment}_scales"], signed=MOMENTS[moment], shape=shape)


def theirs(state: dict[str, Any], moment: str) -> Tensor:
    number = {"exp_avg": 1, "exp_avg_sq": 2}[moment]
    codes: Tensor = state[f"state{number}"]
    if codes.dtype != torch.uint8:
        return codes
    flat = dequantize_dynamic(codes.view(1, -1), state[f"absmax{number}"].view(1, -1), signed=MOMENTS[moment])
    return flat.view(codes.shape)


def test_states_of_bitsandbytes_are_taken_over(bnb: Any) -> None:
    ps, qs = parameters(), parameters()
    source = bnb.optim.AdamW8bit(ps, lr=0.01, betas=(0.8, 0.99), weight_decay=0.2)
    train(ps, source, 3)
    target = AdamW8bit(qs, lr=7.0)
    from_bitsandbytes_state(target, source.state_dict())
    assert (target.param_groups[0]["lr"], target.param_groups[0]["betas"]) == (0.01, (0.8, 0.99))
    assert target.param_groups[0]["weight_decay"] == 0.2
    assert "alpha" not in target.param_groups[0]
    for p, q in zip(ps, qs, strict=True):
        assert target.state[q]["step"].item() == 3
        for moment in MOMENTS:
            found, expected = moment_of(target.state[q], moment), theirs(source.state[p], moment)
            if q.shape == (70, 100):  # other blocks: rounded once more
                assert not torch.equal(found, expected)
                error = (found - expected).norm() / expected.norm()
                assert error < 0.02
            else:
                assert torch.equal(found, expected)


def test_taken_over_states_go_back_as_they_were(bnb: Any) -> None:
    ps = parameters()
    source = bnb.optim.AdamW8bit(ps, lr=0.01)
    train(ps, source, 3)
    target = AdamW8bit(parameters())
    from_bitsandbytes_state(target, source.state_dict())
    back = bnb.optim.AdamW8bit(qs := [nn.Parameter(p.detach().clone()) for p in ps], lr=1.0)
    back.load_state_dict(to_bitsandbytes_state(target))
    for p, q in zip(ps, qs, strict=True):
        for key, value in source.state[p].items():
            if p.shape != (70, 100) or key in ("step", "qmap1", "qmap2"):
                assert torch.equal(torch.as_tensor(back.state[q][key]), torch.as_tensor(value)), key
    train(ps, source, 1, seed=1)
    train(qs, back, 1, seed=1)
    assert torch.equal(ps[0], qs[0])
    assert torch.equal(ps[2], qs[2])
    torch.testing.assert_close(ps[1], qs[1], rtol=0, atol=0.005)


def test_our_steps_agree_with_those_of_bitsandbytes(bnb: Any) -> None:
    # Not in bits: its CPU quantizer is coarse below 1e-2 of a block's largest number (tests/ops/test_dynamic_map.py).
    ps, qs = [parameters()[0]], [parameters()[0]]
    start = ps[0].detach().clone()
    train(ps, bnb.optim.AdamW8bit(ps, lr=0.01, weight_decay=0.1), 5)
    train(qs, AdamW8bit(qs, lr=0.01, weight_decay=0.1), 5)
    exact = [nn.Parameter(start.clone())]
    train(exact, torch.optim.AdamW(exact, lr=0.01, weight_decay=0.1), 5)
    moved = (exact[0] - start).norm()
    assert (ps[0] - qs[0]).norm() < 0.2 * moved
    # The same distance from exact AdamW, or less.
    assert (qs[0] - exact[0]).norm() < (ps[0] - exact[0]).norm()


def test_states_of_torch_are_quantized() -> None:
    ps = parameters()
    source = torch.optim.AdamW(ps, lr=0.01, weight_decay=0.3)
    train(ps, source, 3)
    qs = [nn.Parameter(p.detach().clone()) for p in ps]
    target = AdamW8bit(qs)
    from_adamw_state(target, source.state_dict())
    assert target.param_groups[0]["weight_decay"] == 0.3
    assert not {"amsgrad", "fused", "foreach"} & set(target.param_groups[0])
    for p, q in zip(ps, qs, strict=True):
        assert target.state[q]["step"].item() == 3
        for moment in MOMENTS:
            exact = source.state[p][moment]
            error = (moment_of(target.state[q], moment) - exact).norm() / exact.norm()
            assert error < (0.02 if q.dim() > 1 else 1e-12)
    assert "exp_avg_codes" in target.state[qs[1]]
    before = [p.detach().clone() for p in ps]
    train(ps, source, 1, seed=1)
    train(qs, target, 1, seed=1)
    for p, q, start in zip(ps, qs, before, strict=True):
        assert (p - q).norm() < 0.1 * (p - start).norm()


def test_groups_parameters_without_state_and_more_options_are_kept() -> None:
    ps, qs = parameters(), parameters()

    def groups(of: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": of[:1], "lr": 0.5, "initial_lr": 0.9}, {"params": of[1:], "maximize": True}]

    source, target = torch.optim.AdamW(groups(ps)), AdamW8bit(groups(qs))
    ps[1].grad = torch.ones_like(ps[1])
    source.step()
    from_adamw_state(target, source.state_dict())
    assert [group["lr"] for group in target.param_groups] == [0.5, 1e-3]
    assert target.param_groups[0]["initial_lr"] == 0.9
    assert target.param_groups[1]["maximize"] is True
    assert list(target.state) == [qs[1]]


def changed(state_dict: dict[str, Any], **entries: Any) -> dict[str, Any]:
    new = copy.deepcopy(state_dict)
    state = new["state"][0]
    state.get("__bnb_optimizer_quant_state__", state).update(entries)
    return new


def test_states_that_do_not_fit_are_refused(bnb: Any) -> None:
    ps = parameters()[:1]
    source = bnb.optim.AdamW8bit(ps)
    train(ps, source, 1)
    good = source.state_dict()
    target = AdamW8bit(parameters()[:1])
    for state, message in [
        (changed(good, qmap1=torch.zeros(256)), "qmap1 of parameter 0 of group 0 is not the dynamic map"),
        (changed(good, absmax2=torch.zeros(1)), r"absmax2 of parameter 0 .* must be fp32 \(64,\)"),
        (
            changed(good, state1=torch.zeros(3, dtype=torch.uint8), absmax1=torch.zeros(1)),
            r"exp_avg .* has shape \(3,\)",
        ),
        (good | {"param_groups": good["param_groups"] * 2}, "has 2 parameter groups, but the optimizer has 1"),
        (torch.optim.SGD(parameters()[:1]).state_dict() | {"state": {0: {"step": 1}}}, "has step, state1, state2"),
    ]:
        with pytest.raises(FormatError, match=message):
            from_bitsandbytes_state(target, state)
        assert not target.state
    with pytest.raises(FormatError, match="has 3 parameters, but the optimizer's has 1"):
        from_bitsandbytes_state(target, bnb.optim.AdamW8bit(parameters()).state_dict())
    with pytest.raises(FormatError, match="maximize is True, but bitsandbytes only minimizes"):
        to_bitsandbytes_state(AdamW8bit(parameters(), maximize=True))


def test_other_adams_are_refused() -> None:
    target = AdamW8bit(parameters())
    with pytest.raises(FormatError, match="amsgrad=True"):
        from_adamw_state(target, torch.optim.AdamW(parameters(), amsgrad=True).state_dict())
    with pytest.raises(FormatError, match=r"an Adam with weight_decay 0\.1, which it adds to gradients"):
        from_adamw_state(target, torch.optim.Adam(parameters(), weight_decay=0.1).state_dict())
    momentum = torch.optim.SGD(ps := parameters(), momentum=0.9)
    train(ps, momentum, 1)
    with pytest.raises(FormatError, match="has momentum_buffer, but AdamW's has step, exp_avg and exp_avg_sq"):
        from_adamw_state(target, momentum.state_dict())


# --- hosts that call load_state_dict themselves ---


def test_states_go_to_torch_and_come_back_bit_for_bit() -> None:
    ps = parameters()
    groups = [{"params": ps[:2], "lr": torch.tensor(0.02), "initial_lr": 0.5}, {"params": ps[2:], "weight_decay": 0.3}]
    source = AdamW8bit(groups, lr=0.01, betas=(0.8, 0.95), maximize=True)
    train(ps, source, 3)
    qs = [nn.Parameter(p.detach().clone()) for p in ps]
    exact = torch.optim.AdamW([{"params": qs[:2]}, {"params": qs[2:]}])
    exact.load_state_dict(to_adamw_state(source))
    for ours, theirs in zip(source.param_groups, exact.param_groups, strict=True):
        assert all(theirs[key] == value for key, value in ours.items() if key not in ("params", "min_8bit_numel"))
        assert (theirs["amsgrad"], theirs["decoupled_weight_decay"], theirs["foreach"]) == (False, True, None)
    for p, q in zip(ps, qs, strict=True):
        assert exact.state[q]["step"].item() == 3
        for moment in MOMENTS:
            assert torch.equal(exact.state[q][moment], moment_of(source.state[p], moment))
    rs = parameters()
    back = AdamW8bit([{"params": rs[:2]}, {"params": rs[2:]}])
    back.load_state_dict(exact.state_dict())
    for p, r in zip(ps, rs, strict=True):
        assert source.state[p].keys() == back.state[r].keys()
        assert all(torch.equal(value, back.state[r][key]) for key, value in source.state[p].items())
    assert back.param_groups[0]["min_8bit_numel"] == 4096
    for one, optimizer in ((ps, source), (qs, exact)):  # both go on alike
        before = [p.detach().clone() for p in one]
        train(one, optimizer, 1, seed=5)
        moved = [p.detach() - b for p, b in zip(one, before, strict=True)]
        if optimizer is source:
            expected = moved
    for found, step in zip(moved, expected, strict=True):
        assert (found - step).norm() < 0.01 * step.norm()  # AdamW8bit limits first moments that rounding made too large


@pytest.mark.parametrize(("old", "new"), [(8, 4), (4, 8)])
def test_states_of_other_bits_are_rounded_once(old: int, new: int) -> None:
    ps = parameters()
    source, target = AdamW8bit(ps, lr=0.01, bits=old), AdamW8bit(qs := parameters(), lr=1.0, bits=new)
    train(ps, source, 3)
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    assert (target.bits, target.param_groups[0]["lr"]) == (new, 0.01)
    assert target.param_groups[0].get("moment_bits", 8) == new
    through_exact = AdamW8bit(rs := parameters(), bits=new)
    from_adamw_state(through_exact, to_adamw_state(source))
    for p, q, r in zip(ps, qs, rs, strict=True):
        assert target.state[q]["step"].item() == 3
        assert all(torch.equal(value, through_exact.state[r][key]) for key, value in target.state[q].items())
        for moment in MOMENTS:
            before, after = (moment_of(o.state[of], moment, p.shape) for o, of in ((source, p), (target, q)))
            assert (before - after).norm() <= (0.02 if new == 8 else 0.25) * before.norm()
            assert (p.dim() == 1) == torch.equal(before, after)
    train(qs, target, 1)


def test_states_of_4_bits_go_to_torch_and_come_back_bit_for_bit() -> None:
    ps = parameters()
    source = AdamW8bit(ps, lr=0.01, bits=4)
    train(ps, source, 3)
    exact = torch.optim.AdamW(parameters())
    exact.load_state_dict(to_adamw_state(source))
    back = AdamW8bit(rs := parameters(), bits=4)
    back.load_state_dict(exact.state_dict())
    for p, r in zip(ps, rs, strict=True):
        assert source.state[p].keys() == back.state[r].keys()
        assert all(torch.equal(value, back.state[r][key]) for key, value in source.state[p].items())


def test_states_of_4_bits_become_those_of_bitsandbytes_in_8() -> None:
    ps = parameters()
    source = AdamW8bit(ps, lr=0.01, bits=4)
    train(ps, source, 3)
    state = to_bitsandbytes_state(source)
    back = AdamW8bit(rs := parameters(), bits=4)
    from_bitsandbytes_state(back, state)
    for p, r in zip(ps, rs, strict=True):
        for moment in MOMENTS:
            before, after = (moment_of(o.state[of], moment, p.shape) for o, of in ((source, p), (back, r)))
            assert (before - after).norm() <= 0.03 * before.norm()


@pytest.mark.parametrize("other", [8, 4])
def test_states_of_other_bits_that_do_not_fit_are_refused(other: int) -> None:
    source = AdamW8bit(ps := parameters(), bits=other)
    train(ps, source, 1)
    target = AdamW8bit(parameters(), bits=12 - other)
    bad = source.state_dict()
    bad["state"][1] = bad["state"][1] | {"exp_avg_scales": torch.zeros(3, 3)}
    with pytest.raises(FormatError, match=r"exp_avg_scales of parameter 1 .* \(3, 3\), but it must be"):
        target.load_state_dict(bad)
    assert not target.state


@pytest.mark.parametrize(("old", "new"), [(8, 4), (4, 8)])
def test_states_name_their_bits_where_shapes_do_not_tell_them(old: int, new: int) -> None:
    """Codes of 4 bits of rows of 64 have the shape of those of 8 bits of rows of 32; both have a block in a row."""
    wide, narrow = nn.Parameter(torch.randn(256, 64)), nn.Parameter(torch.randn(256, 32))
    p, q = (wide, narrow) if old == 4 else (narrow, wide)
    source, target = AdamW8bit([p], bits=old), AdamW8bit([q], bits=new)
    train([p], source, 1)
    state = source.state_dict()
    told = "exp_avg_codes of parameter 0 of group 0 is " if old == 4 else "half as wide"
    with pytest.raises(FormatError, match=told):
        target.load_state_dict(state)
    state["param_groups"][0]["moment_bits"] = True
    with pytest.raises(FormatError, match="moment_bits of a group is True, but it must be 8 or 4"):
        target.load_state_dict(state)
    del state["param_groups"][0]["moment_bits"]  # as a host may leave it out
    back = AdamW8bit([nn.Parameter(torch.zeros_like(p))], bits=old)
    if old == 4:
        with pytest.raises(FormatError, match=r"4-bit moments of this parameter, or 8-bit .* 'moment_bits' to 4"):
            back.load_state_dict(state)
        state["param_groups"][0]["moment_bits"] = 4
    back.load_state_dict(state)
    assert not target.state
    assert back.state_dict()["param_groups"][0].get("moment_bits", 8) == old
    assert "moment_bits" not in to_adamw_state(back)["param_groups"][0]


@pytest.mark.parametrize("length", [129, 130, 256, 1000])
@pytest.mark.parametrize(("old", "new"), [(8, 4), (4, 8), (8, 8), (4, 4)])
def test_shapes_tell_the_bits_of_long_rows_where_no_group_names_them(old: int, new: int, length: int) -> None:
    p, half = nn.Parameter(torch.randn(64, length)), nn.Parameter(torch.randn(64, -(-length // 2)))
    source, target = AdamW8bit([p], bits=old), AdamW8bit([q := nn.Parameter(p.detach().clone())], bits=new)
    train([p], source, 2)
    named, unnamed = source.state_dict(), source.state_dict()
    unnamed["param_groups"][0].pop("moment_bits", None)
    target.load_state_dict(unnamed)
    expected = AdamW8bit([r := nn.Parameter(p.detach().clone())], bits=new)
    expected.load_state_dict(named)
    assert all(torch.equal(value, expected.state[r][key]) for key, value in target.state[q].items())
    narrow = AdamW8bit([half])
    train([half], narrow, 1)
    with pytest.raises(FormatError, match=r"of parameter 0 of group 0 is .*, but it must be"):
        AdamW8bit([p], bits=new).load_state_dict(narrow.state_dict())


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "bitsandbytes", "fp32"])
def test_load_state_dict_converts(kind: str, request: pytest.FixtureRequest) -> None:
    ps = parameters()
    if kind == "bitsandbytes":
        source = request.getfixturevalue("bnb").optim.AdamW8bit(ps, lr=0.01)
    elif kind == "fp32":
        source = AdamW8bit(ps, lr=0.01, min_8bit_numel=10**9)
    else:
        source = getattr(torch.optim, kind)(ps, lr=0.01)
    train(ps, source, 3)
    target = AdamW8bit(parameters(), lr=1.0)
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    assert target.param_groups[0]["lr"] == 0.01
    states = [target.state[p] for p in target.param_groups[0]["params"]]
    assert all(state["step"].item() == 3 for state in states)
    assert ("exp_avg_codes" in states[0]) == (kind != "fp32")
    if kind != "bitsandbytes":
        for p, state in zip(ps, states, strict=True):
            exact = source.state[p]["exp_avg"]
            assert (moment_of(state, "exp_avg") - exact).norm() <= 0.02 * exact.norm()


def test_state_without_steps_brings_its_hyperparameters() -> None:
    target = AdamW8bit(parameters(), min_8bit_numel=5)
    target.load_state_dict(torch.optim.AdamW(parameters(), lr=0.25, betas=(0.5, 0.6)).state_dict())
    group = target.param_groups[0]
    assert (group["lr"], group["betas"], group["min_8bit_numel"]) == (0.25, (0.5, 0.6), 5)
    train(group["params"], target, 1)


def test_states_of_others_are_refused_and_nothing_changed() -> None:
    target = AdamW8bit(ps := parameters(), lr=0.125)
    train(ps, target, 1)
    before = copy.deepcopy(target.state_dict())
    for make, message in [
        (lambda qs: torch.optim.SGD(qs, momentum=0.9), "is not that of an Adam: it has momentum_buffer, but no betas"),
        (lambda qs: torch.optim.AdamW(qs, amsgrad=True), "amsgrad=True"),
        (lambda qs: torch.optim.Adam(qs, weight_decay=0.1), "adds to gradients"),
        (lambda qs: torch.optim.NAdam(qs), "has step, mu_product, exp_avg, exp_avg_sq"),
    ]:
        source = make(qs := parameters())
        train(qs, source, 1)
        with pytest.raises(FormatError, match=message):
            target.load_state_dict(source.state_dict())
    after = target.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert all(torch.equal(after["state"][0][key], value) for key, value in before["state"][0].items())


@pytest.mark.parametrize("kind", ["AdamW", "Adam"])
def test_torchs_adam_says_that_it_was_given_codes(kind: str) -> None:
    source = AdamW8bit(ps := parameters())
    train(ps, source, 1)
    target = getattr(torch.optim, kind)(qs := parameters())
    target.load_state_dict(source.state_dict())
    before = [q.detach().clone() for q in qs]
    with pytest.raises(FormatError, match=r"was given the state of an AdamW8bit.* laconic\.optim\.to_adamw_state"):
        train(qs, target, 1)
    assert all(torch.equal(q, b) for q, b in zip(qs, before, strict=True))


@pytest.mark.parametrize("bits", [8, 4])
def test_flattened_state_dicts_of_distributed_checkpoints_come_back(bits: int) -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 4))
    source, target = (AdamW8bit(model.parameters(), lr=0.01, bits=bits) for _ in range(2))
    train(list(model.parameters()), source, 3)
    model.zero_grad()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(model, source, options=options)
    # 8 bits have the entries that they always had: torch takes no state that lacks one of the optimizer's
    assert ("param_groups.0.weight.moment_bits" in state) == (bits == 4)
    set_optimizer_state_dict(model, target, state, options=options)
    for p in model.parameters():
        assert all(torch.equal(value, target.state[p][key]) for key, value in source.state[p].items())
    if bits == 4:  # torch drops the name for 8 bits, and rows of 64 do not tell
        model.zero_grad()
        with pytest.raises(FormatError, match=r"the state of parameter .* 4-bit moments of this parameter, or 8-bit"):
            set_optimizer_state_dict(model, AdamW8bit(model.parameters()), state, options=options)
    else:
        set_optimizer_state_dict(
            model, AdamW8bit(model.parameters()), state | {"param_groups.0.weight.moment_bits": 8}, options=options
        )


def test_state_dicts_of_distributed_checkpoints_convert() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 4))
    ps = list(model.parameters())
    exact, ours = torch.optim.AdamW(ps, lr=0.01), AdamW8bit(ps, lr=1.0)
    train(ps, exact, 3)
    for p in ps:
        p.grad = None
    options = StateDictOptions(flatten_optimizer_state_dict=False)
    set_optimizer_state_dict(model, ours, get_optimizer_state_dict(model, exact, options=options), options=options)
    assert ours.param_groups[0]["lr"] == 0.01
    assert ours.state[ps[0]]["exp_avg_codes"].dtype == torch.uint8
    back = torch.optim.AdamW(ps)
    back.load_state_dict(to_adamw_state(ours))
    again = AdamW8bit(ps)
    own = get_optimizer_state_dict(model, ours, options=options)
    set_optimizer_state_dict(model, again, own, options=options)
    for p in ps:
        assert (back.state[p]["exp_avg_sq"] - exact.state[p]["exp_avg_sq"]).norm() < 0.03 * exact.state[p][
            "exp_avg_sq"
        ].norm()
        assert all(torch.equal(value, again.state[p][key]) for key, value in ours.state[p].items())


def named(ps: list[nn.Parameter], order: list[int]) -> list[tuple[str, nn.Parameter]]:
    return [(f"layer.{index}", ps[index]) for index in order]


@pytest.mark.parametrize("kind", ["own", "AdamW", "from_adamw_state"])
@pytest.mark.parametrize("seed", range(4))
def test_named_parameters_are_matched_by_name(kind: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(32, 512), (32, 512), (9,), (9,), (70, 100), (70, 100), (32, 512)]
    ps = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    qs = [nn.Parameter(p.detach().clone()) for p in ps]
    orders = [torch.randperm(len(ps), generator=generator).tolist() for _ in range(2)]
    cuts = (2, 5)

    def groups(of: list[nn.Parameter], order: list[int]) -> list[dict[str, Any]]:
        pairs = [named(of, order[: cuts[0]]), named(of, order[cuts[0] : cuts[1]]), named(of, order[cuts[1] :])]
        return [{"params": pair, "lr": 0.1 * (number + 1)} for number, pair in enumerate(pairs)]

    source = AdamW8bit(groups(ps, orders[0])) if kind == "own" else torch.optim.AdamW(groups(ps, orders[0]))
    train(ps, source, 2, seed)
    target = AdamW8bit(groups(qs, orders[1]))
    if kind == "from_adamw_state":
        from_adamw_state(target, source.state_dict())
    else:
        target.load_state_dict(source.state_dict())
    for group, fresh in zip(target.param_groups, groups(qs, orders[1]), strict=True):
        assert group["param_names"] == [name for name, _ in fresh["params"]]
        assert group["lr"] == fresh["lr"]
    for p, q in zip(ps, qs, strict=True):
        for moment in MOMENTS:
            expected, found = moment_of(source.state[p], moment), moment_of(target.state[q], moment)
            assert (found - expected).norm() <= (0 if kind == "own" else 0.03) * expected.norm()


def test_other_names_are_refused_and_states_without_names_keep_their_order() -> None:
    ps, qs = parameters(), parameters()
    source = AdamW8bit(named(ps, [0, 1, 2]))
    train(ps, source, 1)
    others = AdamW8bit([(f"module.{name}", q) for name, q in named(qs, [0, 1, 2])])
    with pytest.raises(FormatError, match=r"no module\.layer\.0, .* but layer\.0, .* delete them to match"):
        others.load_state_dict(source.state_dict())
    assert not others.state
    state = source.state_dict()
    for group in state["param_groups"]:
        del group["param_names"]
    for target in (others, AdamW8bit(qs)):
        target.load_state_dict(state)
        assert all(
            torch.equal(value, target.state[q][key])
            for p, q in zip(ps, qs, strict=True)
            for key, value in source.state[p].items()
        )


def test_distributed_checkpoints_that_have_matched_names_are_not_matched_again() -> None:
    model = nn.ModuleDict({name: nn.Linear(64, 64, bias=False) for name in "abc"})
    reversed_names = list(reversed([*model.named_parameters()]))
    source, target = AdamW8bit(model.named_parameters()), AdamW8bit(reversed_names)
    train([p for _, p in model.named_parameters()], source, 1)
    for p in model.parameters():
        p.grad = None
    set_optimizer_state_dict(model, target, get_optimizer_state_dict(model, source))
    assert target.param_groups[0]["param_names"] == [name for name, _ in reversed_names]
    for p in model.parameters():
        assert all(torch.equal(value, target.state[p][key]) for key, value in source.state[p].items())


def optimizers_of_torch() -> list[type[torch.optim.Optimizer]]:
    found = (getattr(torch.optim, name) for name in torch.optim.__all__)
    return [one for one in found if isinstance(one, type) and one is not torch.optim.Optimizer]


@pytest.mark.parametrize("kind", optimizers_of_torch(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("steps", [0, 3])
def test_states_of_torchs_optimizers_continue_alike_or_are_refused(
    kind: type[torch.optim.Optimizer], steps: int
) -> None:
    p, q = (nn.Parameter(torch.full((16, 256), 0.5)) for _ in range(2))
    source = kind([p], lr=0.01)  # type: ignore[call-arg]

    def step(one: nn.Parameter, optimizer: torch.optim.Optimizer, number: int) -> None:
        gradient = torch.randn(16, 256, generator=torch.Generator().manual_seed(number)) + 0.5
        one.grad = gradient.to_sparse() if kind is torch.optim.SparseAdam and optimizer is source else gradient
        optimizer.step(lambda: 0.0) if kind is torch.optim.LBFGS else optimizer.step()  # type: ignore[arg-type]

    for number in range(steps):
        step(p, source, number)
    target = AdamW8bit([q], lr=7.0)
    if kind not in (torch.optim.Adam, torch.optim.AdamW):
        with pytest.raises(FormatError, match="the state"):
            target.load_state_dict(source.state_dict())
        assert not target.state
        assert target.param_groups[0]["lr"] == 7.0
        return
    target.load_state_dict(source.state_dict())
    before = p.detach().clone()
    q.data.copy_(before)
    step(p, source, steps)
    step(q, target, steps)
    assert (p - q).norm() < 0.02 * (p - before).norm()


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"caution": True}, "has caution True"),
        ({"nesterov": True, "bias_correction": False}, "has nesterov True and bias_correction False"),
        ({"caution": False, "bias_correction": True}, None),
        ({"initial_lr": 0.5, "name": "layers"}, None),
    ],
)
def test_other_packages_adams_are_told_apart_by_their_options(group: dict[str, Any], message: str | None) -> None:
    source = torch.optim.AdamW(ps := parameters())
    train(ps, source, 1)
    state = source.state_dict()
    state["param_groups"][0] |= group
    target = AdamW8bit(parameters())
    with nullcontext() if message is None else pytest.raises(FormatError, match=message):
        target.load_state_dict(state)
    assert bool(target.state) == (message is None)


def bitsandbytes_state(ps: list[nn.Parameter], **others: Any) -> dict[str, Any]:
    """As a 32-bit optimizer of bitsandbytes leaves it."""
    states = {
        index: {"step": 1, "state1": torch.ones_like(p), "state2": torch.ones_like(p), **others}
        for index, p in enumerate(ps)
    }
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "alpha": 0.0, "t_alpha": None}
    return {"state": states, "param_groups": [group | {"t_beta3": None, "params": list(range(len(ps)))}]}


def test_other_optimizers_of_bitsandbytes_are_refused() -> None:
    ps = parameters()
    target = AdamW8bit(ps)
    for state, message in [
        (bitsandbytes_state(ps, unorm_vec=torch.zeros(1)), "has unorm_vec.*LAMB and LARS"),
        (bitsandbytes_state(ps, gnorm_vec=torch.zeros(100)), "has gnorm_vec.*percentile_clipping"),
        (bitsandbytes_state(ps), None),
    ]:
        with nullcontext() if message is None else pytest.raises(FormatError, match=message):
            target.load_state_dict(state)
    ademamix = bitsandbytes_state(ps)
    ademamix["param_groups"][0]["alpha"] = 5.0
    with pytest.raises(FormatError, match="AdEMAMix"):
        target.load_state_dict(ademamix)


def test_a_second_moment_that_overflowed_in_torch_stops_no_other_weight_for_good() -> None:
    p, q = nn.Parameter(torch.ones(16, 256)), nn.Parameter(torch.ones(16, 256))
    source = torch.optim.AdamW([p])
    p.grad = torch.randn(16, 256)
    p.grad[3, 3] = 1e25
    source.step()
    assert source.state[p]["exp_avg_sq"].isinf().any()
    target = AdamW8bit([q])
    target.load_state_dict(source.state_dict())
    train([q], target, 2)
    assert q.isfinite().all()
    assert ((q - 1).abs()[torch.arange(16) != 3] > 1e-4).float().mean() > 0.8
