"""Losses of routers against Hugging Face's own, biases against the load, and both in runs."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from laconic.errors import ConfigError, ModelError
from laconic.moe.huggingface import find_blocks
from laconic.train.config.schema import ModelConfig
from laconic.train.config.toml import load_config
from laconic.train.distributed.world import World
from laconic.train.model import build_model
from laconic.train.moe.router_balance import Routers, watch_routers
from laconic.train.report.metrics import read_metrics
from tests.moe.worlds import run_world
from tests.train.runs import ALONE, losses, resumed, tiny_config, train_alone, trained_model

MIXTRAL: dict[str, Any] = {
    "model.family": "mixtral",
    "model.extra": {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1},
}
DEEPSEEK: dict[str, Any] = {
    "model.family": "deepseek_v3",
    "model.extra": {
        **{"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
        **{"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        **{"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
    },
}


def model_of(options: dict[str, Any]) -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    fields = {name.removeprefix("model."): value for name, value in options.items() if name.startswith("model.")}
    return build_model(ModelConfig(**sizes, **fields), 64, 16, seed=0)


def watched(model: nn.Module, **coefficients: float) -> Routers:
    return Routers(model, find_blocks(model).values(), ALONE, **coefficients)


def test_the_balance_loss_and_its_gradient_are_those_of_hugging_face() -> None:
    ids = torch.randint(0, 64, (3, 16), generator=torch.Generator().manual_seed(0))
    theirs, ours = model_of(MIXTRAL), model_of(MIXTRAL)
    out: Any = theirs(input_ids=ids, labels=ids, output_router_logits=True)
    out.loss.backward()
    routers = watched(ours, aux_loss_coef=0.1)
    routers.begin()
    plain = ours(input_ids=ids, labels=ids).loss
    found = routers.loss()
    assert found is not None
    torch.testing.assert_close(found, 0.1 * out.aux_loss)
    (plain + found).backward()
    for (name, one), two in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad, msg=name)
    assert routers.after_step(False) == {"moe_balance_loss": pytest.approx(out.aux_loss.item())}
    assert routers.after_step(False) == {}


def test_the_z_loss_is_the_mean_over_layers() -> None:
    model, ids = model_of(MIXTRAL), torch.arange(16)[None]
    routers = watched(model, z_loss_coef=0.5)
    seen: Any = model(input_ids=ids, output_router_logits=True).router_logits
    expected = torch.stack([logits.logsumexp(-1).square().mean() for logits in seen]).mean()
    found = routers.loss()
    assert found is not None
    torch.testing.assert_close(found, 0.5 * expected)
    assert load_balancing_loss_func(seen, 4, 2) > 0  # there is another loss, which is not in it


def test_biases_follow_the_load() -> None:
    model = model_of(DEEPSEEK)
    routers = watched(model, bias_rate=0.25)
    loads = []
    gates = [model.get_submodule(str(block.router)) for block in find_blocks(model).values()]
    for gate in gates:
        gate.register_forward_hook(lambda _, __, out: loads.append(torch.bincount(out[2].flatten(), minlength=4)))
    for _ in range(2):  # micro-batches
        model(input_ids=torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1)))
        assert routers.loss() is None
    fields = routers.after_step(skipped=False)
    for number, gate in enumerate(gates):
        load = (loads[number] + loads[number + len(gates)]).float()
        assert torch.equal(gate.get_buffer("e_score_correction_bias"), 0.25 * (load.mean() - load).sign())
    assert fields == {"moe_bias_range": 0.5}
    model(input_ids=torch.arange(16)[None])
    routers.loss()
    before = gates[0].get_buffer("e_score_correction_bias").clone()
    assert routers.after_step(skipped=True) == {"moe_bias_range": 0.5}
    assert torch.equal(gates[0].get_buffer("e_score_correction_bias"), before)


@pytest.mark.parametrize("whole", [False, True])
def test_layers_that_share_a_router_are_balanced_together(whole: bool) -> None:
    """The router alone, or the block; by the logits of all calls, of which transformers records some twice."""
    ids = torch.randint(0, 64, (3, 16), generator=torch.Generator().manual_seed(0))
    theirs, ours = model_of(MIXTRAL), model_of(MIXTRAL)
    for model in (theirs, ours):
        one, other = (model.get_submodule(f"model.layers.{number}") for number in (0, 2))
        if whole:
            other.mlp = one.mlp
        else:
            other.get_submodule("mlp").gate = one.get_submodule("mlp.gate")
    logits: list[torch.Tensor] = []
    for number in (0, 1):
        router = theirs.get_submodule(f"model.layers.{number}.mlp.gate")
        router.register_forward_hook(lambda _, __, out: logits.append(out[0]))
    expected = theirs(input_ids=ids, labels=ids).loss
    aux_loss = load_balancing_loss_func(tuple(logits), 4, 2)
    assert isinstance(aux_loss, torch.Tensor)
    (expected + 0.1 * aux_loss).backward()
    routers = watched(ours, aux_loss_coef=0.1)
    routers.begin()
    plain, found = ours(input_ids=ids, labels=ids).loss, routers.loss()
    assert found is not None
    assert len(logits) == 3
    torch.testing.assert_close(found, 0.1 * aux_loss)
    (plain + found).backward()
    for one, two in zip(theirs.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad)
    routers.after_step(False, count_loads=True)
    assert [sum(load) for load in routers.loads or ()] == [2 * 2 * ids.numel(), 2 * ids.numel()]


def test_evaluation_is_not_watched() -> None:
    model = model_of(MIXTRAL).eval()
    routers = watched(model, aux_loss_coef=1.0)
    model(input_ids=torch.arange(16)[None])
    for _ in range(19):
        routers.loss()
        routers.after_step(skipped=False)
    routers.loss()
    with pytest.raises(ModelError, match="was not called in a training forward of 20 steps, nor was any other"):
        routers.after_step(skipped=False)


@pytest.mark.parametrize("first", [True, False])
def test_steps_may_leave_out_all_layers_with_experts(first: bool) -> None:
    model = model_of(DEEPSEEK)
    routers = watched(model, aux_loss_coef=0.5, bias_rate=0.25)
    layers = [model.get_submodule(f"model.layers.{number}") for number in (1, 2)]
    for left_out in (first, not first, *[True] * 25):
        for layer in layers:
            layer.__dict__.pop("forward", None)
        if left_out:
            _skip(model, (1, 2))
        before = [layer.get_buffer("mlp.gate.e_score_correction_bias").clone() for layer in layers]
        routers.begin()
        model(input_ids=torch.arange(16)[None])
        routers.loss()
        fields = routers.after_step(skipped=False, count_loads=True)
        assert routers.loads is not None
        assert (sum(map(sum, routers.loads)) == 0) == left_out
        assert (fields["moe_balance_loss"] == 0) == left_out
        for layer, bias in zip(layers, before, strict=True):
            assert torch.equal(layer.get_buffer("mlp.gate.e_score_correction_bias"), bias) == left_out


def test_a_router_that_its_block_does_not_call_is_refused() -> None:
    model = model_of(MIXTRAL)
    watched(model, aux_loss_coef=1.0)
    block = model.get_submodule("model.layers.1.mlp")
    block.forward = lambda hidden: hidden @ block.get_parameter("gate.weight").T @ block.get_parameter("gate.weight")
    with pytest.raises(ModelError, match=r"its router model\.layers\.1\.mlp\.gate was not called"):
        model(input_ids=torch.arange(16)[None])


def _skip(model: nn.Module, layers: Iterable[int]) -> None:
    """Let decoder layers do nothing, as LayerDrop does."""
    for number in layers:
        model.get_submodule(f"model.layers.{number}").forward = lambda hidden, *_, **__: hidden


def biases_with_layers_left_out() -> None:
    """The second process leaves out one layer with experts in the first step, and all of them in the second."""
    rank = dist.get_rank()
    model = model_of(DEEPSEEK)
    names = [str(block.router) for block in find_blocks(model).values()]
    routers = Routers(model, find_blocks(model).values(), World(rank, 2, rank, torch.device("cpu")), bias_rate=0.25)
    loads = {name: torch.zeros(4, dtype=torch.int64) for name in names}

    def count(name: str, _: nn.Module, __: object, out: tuple[torch.Tensor, ...]) -> None:
        loads[name] += torch.bincount(out[2].flatten(), minlength=4)

    for name in names:
        model.get_submodule(name).register_forward_hook(partial(count, name))
    expected = torch.zeros(len(names), 4)
    for left_out in ([1], [1, 2]):
        if rank:
            _skip(model, left_out)
        routers.begin()
        model(input_ids=torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(rank)))
        assert routers.loss() is None
        routers.after_step(skipped=False, count_loads=True)
        load = torch.stack([*loads.values()])
        dist.all_reduce(load)
        assert routers.loads == load.tolist()
        expected += 0.25 * (load.float().mean(1, keepdim=True) - load).sign()
        for name, bias in zip(names, expected, strict=True):
            assert torch.equal(model.get_submodule(name).get_buffer("e_score_correction_bias"), bias)
        for one in loads.values():
            one.zero_()


def losses_with_layers_left_out() -> None:
    rank, ids = (
        dist.get_rank(),
        [torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(n)) for n in (0, 1)],
    )
    for left_out in ([2], [0, 1, 2]):
        model, seen = model_of(MIXTRAL), []
        router_of = [model.get_submodule(f"model.layers.{number}.mlp.gate") for number in range(3)]
        for router in router_of:
            router.register_forward_hook(
                lambda _, __, out, seen=seen: seen.append((out[0].softmax(-1).mean(0), out[2]))
            )
        world = World(rank, 2, rank, torch.device("cpu"))
        routers = Routers(model, find_blocks(model).values(), world, aux_loss_coef=0.5, z_loss_coef=0.0)
        if rank:
            _skip(model, left_out)
        routers.begin()
        plain = model(input_ids=ids[rank], labels=ids[rank]).loss
        found = routers.loss()
        counts = torch.stack(
            [torch.bincount(chosen.flatten(), minlength=4) for _, chosen in seen] or [torch.zeros(4).long()]
        )
        counts = torch.cat([counts.sum(0), torch.tensor([sum(len(chosen) for _, chosen in seen)])])
        dist.all_reduce(counts)
        assert found is not None
        if seen:
            mean = torch.stack([one for one, _ in seen]).mean(0)
            torch.testing.assert_close(found, 0.5 * 4 * (counts[:4] / counts[4] * mean).sum())
        else:
            assert found == 0
        (plain + found).backward()
        routers.after_step(skipped=False)


def test_processes_that_leave_out_layers_agree(tmp_path: Path) -> None:
    run_world([biases_with_layers_left_out, losses_with_layers_left_out], 2, tmp_path)


@pytest.mark.parametrize(
    ("options", "moe", "message"),
    [
        (
            {},
            {"router_aux_loss_coef": 0.1},
            "moe.router_aux_loss_coef is 0.1, but the model has no mixture-of-experts blocks",
        ),
        (DEEPSEEK, {"router_aux_loss_coef": 0.1}, "have biases for that; use moe.bias_rate"),
        (MIXTRAL, {"bias_rate": 0.1}, "have no e_score_correction_bias; use moe.router_aux_loss_coef"),
    ],
)
def test_what_a_family_cannot_do_is_refused(options: dict[str, Any], moe: dict[str, Any], message: str) -> None:
    config = load_config(None, {f"moe.{name}": value for name, value in moe.items()})
    with pytest.raises(ConfigError, match=message):
        watch_routers(model_of(options), config, ALONE)


def test_families_decide_where_nothing_is_asked() -> None:
    config = load_config(None, {})
    assert watch_routers(model_of({}), config, ALONE) == (None, None)
    assert watch_routers(model_of(MIXTRAL), config, ALONE)[1] == "routers: balance loss 0.1"
    assert watch_routers(model_of(DEEPSEEK), config, ALONE)[1] == "routers: bias by load 0.001"
    off = load_config(None, {"moe.router_aux_loss_coef": 0.0})
    assert watch_routers(model_of(MIXTRAL), off, ALONE)[1] == "routers: nothing balances them"


@pytest.mark.ci
def test_a_run_counts_the_loss_apart_and_lowers_it(tmp_path: Path) -> None:
    changes = MIXTRAL | {"moe.expert_parallel": 1, "steps": 12, "optimizer.learning_rate": 1e-2, "eval_every": 0}
    for name, coef in (("none", 0.0), ("weak", 1e-9), ("strong", 1.0)):
        train_alone(tiny_config(tmp_path, name, changes | {"moe.router_aux_loss_coef": coef}))
    rows = {name: [r for r in read_metrics(tmp_path / name) if "loss" in r] for name in ("none", "weak", "strong")}
    assert rows["strong"][0]["loss"] == rows["none"][0]["loss"]  # the cross entropy alone
    assert "moe_balance_loss" not in rows["none"][0]
    assert rows["strong"][0]["moe_balance_loss"] == rows["weak"][0]["moe_balance_loss"]
    assert 1.99 < rows["strong"][-1]["moe_balance_loss"] < rows["weak"][-1]["moe_balance_loss"]  # 2 where all is even


def test_own_blocks_and_layers_of_laconic_are_balanced_alike(tmp_path: Path) -> None:
    changes = MIXTRAL | {"optimizer.eps": 1e-2, "activations.bits": 16, "moe.router_z_loss_coef": 0.01}
    train_alone(tiny_config(tmp_path, "own", changes))
    train_alone(tiny_config(tmp_path, "ours", changes | {"moe.expert_parallel": 1}))
    for own, ours in zip(read_metrics(tmp_path / "own"), read_metrics(tmp_path / "ours"), strict=True):
        for name in ("loss", "grad_norm", "moe_balance_loss", "moe_z_loss"):
            if name in own:
                assert ours[name] == pytest.approx(own[name], rel=1e-4), (name, own["step"])


def test_a_gate_decides_in_the_place_of_the_routers(tmp_path: Path) -> None:
    """The softmax gate as Mixtral's own routers; expert choice evens the load."""
    changes = MIXTRAL | {"optimizer.eps": 1e-2, "activations.bits": 16, "moe.expert_parallel": 1}
    for name, more in (("own", {"moe.router_aux_loss_coef": 0.0}), ("softmax", {}), ("expert_choice", {})):
        train_alone(tiny_config(tmp_path, name, changes | more | ({} if more else {"moe.gate": name})))
    rows = {name: read_metrics(tmp_path / name) for name in ("own", "softmax", "expert_choice")}
    for own, gate in zip(rows["own"], rows["softmax"], strict=True):
        for name in ("loss", "grad_norm"):
            if name in own:
                assert gate[name] == pytest.approx(own[name], rel=1e-4), (name, own["step"])
    assert [row["moe_load_ratio"] for row in rows["expert_choice"] if "moe_load_ratio" in row] == [1.0] * 6
    assert max(row.get("moe_load_ratio", 0.0) for row in rows["own"]) > 1.0


def test_biases_are_in_checkpoints(tmp_path: Path) -> None:
    changes = DEEPSEEK | {"moe.bias_rate": 0.05, "steps": 5}
    whole = trained_model(tiny_config(tmp_path, "whole", changes))
    broken = tiny_config(tmp_path, "broken", changes)
    train_alone(broken, stop_after=3)
    again = trained_model(resumed(broken))
    biases = [
        [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
        for model in (whole, again)
    ]
    assert len(biases[0]) == 1
    assert biases[0][0].abs().max() > 0.04
    assert torch.equal(biases[0][0], biases[1][0])
    assert losses(tmp_path / "whole") == losses(tmp_path / "broken")
