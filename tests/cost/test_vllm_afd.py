"""Plans as commands of vLLM with its plugin: its rules hold, the plan is the best under them, what is lost is said."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from math import ceil
from typing import Any

import pytest

from laconic.cost.comm.rates import Line
from laconic.cost.infer import InferenceCostModel, VllmAfd, VllmServe, Workers, Workload, choose, plan_vllm_afd
from laconic.cost.infer.memory import largest_batch
from laconic.cost.infer.planner import Search, priced
from laconic.cost.infer.rates import LinkPair
from laconic.errors import PlanError
from laconic.schedule.inference import InferencePlan
from tests.cost.infer_models import RATES, SLOW_WORKER, shape_of

SHAPE = replace(shape_of(), family="deepseek_v3")
SLOW_LINK = replace(RATES, link=LinkPair(Line(1e-4, 1e-7), Line(1e-4, 1e-7)))
WORKERS = Workers(6, 100_000_000)


def planned(workers: Workers = WORKERS, shape: Any = SHAPE, rates: Any = RATES, **more: Any) -> VllmAfd:
    return plan_vllm_afd(shape, rates, workers, "folder/a model", **({"prompt": 256, "output": 32} | more))


def settings_of(one: VllmServe) -> dict[str, Any]:
    return {"afd": json.loads(value_of(one, "--additional-config"))["afd"]}


def value_of(one: VllmServe, flag: str) -> str:
    return one.arguments[one.arguments.index(flag) + 1]


def test_commands_have_the_ranks_devices_and_ports_of_the_plan() -> None:
    groups = 0
    for total in (2, 3, 4, 6, 8):
        found = planned(replace(WORKERS, total=total), rates=SLOW_LINK)
        split = found.plan.split
        assert split is not None
        assert split.attention >= split.experts
        groups = max(groups, found.plan.num_groups)
        assert [(one.group, one.role) for one in found.commands] == [
            (group, role) for group in range(found.plan.num_groups) for role in ("attention", "ffn")
        ]
        devices = [device for one in found.commands for device in one.environment["CUDA_VISIBLE_DEVICES"].split(",")]
        assert devices == [str(device) for device in range(total)]
        assert len({value_of(one, "--port") for one in found.commands}) == len(found.commands)
        for one in found.commands:
            settings = settings_of(one)["afd"]
            assert settings["num_attention_ranks"] == split.attention
            assert settings["num_ffn_ranks"] == split.experts
            assert settings["role"] == one.role
            ranks = split.attention if one.role == "attention" else split.experts
            assert value_of(one, "--data-parallel-size") == str(ranks)
            assert value_of(one, "--max-model-len") == "288"
            assert value_of(one, "--max-num-seqs") == str(found.plan.batch * found.plan.plan.num_micro_batches)
        ports = {settings_of(one)["afd"]["port"] for one in found.commands}
        assert len(ports) == found.plan.num_groups
    assert groups > 1, "no case has several groups"


def test_the_plan_is_the_fastest_that_the_plugin_can_run() -> None:
    for total, rates in ((3, RATES), (4, SLOW_LINK), (6, SLOW_LINK), (4, replace(SLOW_LINK, experts=SLOW_WORKER))):
        workers = replace(WORKERS, total=total, expert_memory_nbytes=rates.experts and 2_000_000)
        model = InferenceCostModel(SHAPE, rates, Workload.decode(256, 32))
        every = [
            priced(model, "pppipe", split, most, InferencePlan(r1, shared_first=True), num_groups).tokens_per_second
            for num_groups, split in workers.splits(SHAPE.num_experts)
            if split.attention >= split.experts
            for r1 in (1, 2)
            if (
                most := largest_batch(
                    model, split, workers.memory_nbytes, r1, expert_memory_nbytes=workers.expert_memory_nbytes
                ).batch
            )
        ]
        assert planned(workers, rates=rates).plan.tokens_per_second == pytest.approx(max(every))


def test_micro_batches_begin_where_they_are_predicted_to_pay() -> None:
    model, seen = InferenceCostModel(SHAPE, SLOW_LINK, Workload.decode(256, 32)), set()
    for memory_nbytes in (10_000_000, 20_000_000, 100_000_000):
        found = planned(Workers(4, memory_nbytes, 3), rates=SLOW_LINK)
        split, most = found.plan.split, found.plan.batch * found.plan.plan.num_micro_batches
        assert split is not None

        def gains(num_requests: int, split: Any = split) -> bool:
            one, two = (
                priced(model, "pppipe", split, ceil(num_requests / r1), InferencePlan(r1, shared_first=True)).seconds
                for r1 in (1, 2)
            )
            return two < one

        for one in found.commands:
            if "--enable-dbo" not in one.arguments:
                assert not gains(most)
                continue
            threshold = int(value_of(one, "--dbo-decode-token-threshold"))
            seen.add(threshold <= most)
            if threshold <= most:
                assert gains(threshold)
                assert gains(most)
                assert threshold < 4 or not gains(threshold // 2)
            else:
                assert not gains(most)
    assert seen, "no case enables micro-batches"


def test_what_is_lost_is_said_with_what_it_costs() -> None:
    workers = Workers(6, 100_000_000, 1)
    with pytest.raises(PlanError, match="as many attention as FFN ranks or more"):
        planned(workers)
    found = planned(rates=SLOW_LINK, search=Search(8, 8), requests=3)
    best = choose(InferenceCostModel(SHAPE, SLOW_LINK, Workload.decode(256, 32, 3)), WORKERS, Search(8, 8)).best
    assert f"{best.tokens_per_second / found.plan.tokens_per_second:.2f}x as many" in found.given_up[1]
    assert "exchanges with the others" in found.given_up[-1]
    shares = [2 / 16] * 16
    assert any("measured routing" in line for line in planned(shares=shares).given_up)
    two = planned(rates=replace(SLOW_LINK, experts=SLOW_WORKER))
    assert two.given_up[-1].startswith("GPUs are of two kinds: ")


def test_families_that_the_plugin_does_not_know_are_refused() -> None:
    with pytest.raises(PlanError, match=r"model_type is 'mixtral'.*deepseek_v2, deepseek_v3, qwen3_moe"):
        planned(shape=replace(SHAPE, family="mixtral"))


def test_the_gate_is_where_the_family_allows() -> None:
    for family, on_attention in (("deepseek_v2", True), ("qwen3_moe", False)):
        for one in planned(shape=replace(SHAPE, family=family)).commands:
            assert settings_of(one)["afd"]["compute_gate_on_attention"] is on_attention


def test_the_script_starts_every_command_and_quotes_paths() -> None:
    found = planned()
    script = found.script()
    assert script.startswith("#!/bin/sh\n# predicted for decoding: ")
    lines = [line.removesuffix(" &") for line in script.splitlines() if "vllm serve" in line]
    for line, one in zip(lines, found.commands, strict=True):
        words = shlex.split(line)
        assert tuple(words[4:]) == one.arguments
        assert words[:2] == [f"{name}={value}" for name, value in one.environment.items()]
        assert words[4] == "folder/a model"
    assert json.loads(json.dumps(found.to_dict()))["commands"][0]["role"] == "attention"


def test_the_plugin_s_own_validator_takes_them() -> None:
    config = pytest.importorskip("afd_plugin.config", reason="vllm-afd-plugin is not installed")
    for total in (2, 3, 4, 6, 8):
        for family in ("deepseek_v2", "deepseek_v3", "qwen3_moe"):
            for one in planned(replace(WORKERS, total=total), replace(SHAPE, family=family)).commands:
                parsed = config.parse_afd_config(settings_of(one), expected_role=one.role)
                assert (parsed.num_attention_ranks, parsed.host) == (
                    settings_of(one)["afd"]["num_attention_ranks"],
                    "127.0.0.1",
                )
