"""A FinDEP plan as commands of vLLM with its plugin for attention and FFN on workers of their own (vllm-afd-plugin).

The plugin runs a part of what a plan can say: as many attention as FFN ranks or more, one or two micro-batches, no
slices, one order, experts in order. So the fastest plan of that part is looked for, and what is given up is said. The
rules are those of the plugin's config.py, distributed/topology.py and validation.py for its connector over NCCL, which
its authors recommend for decoding.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Literal

from laconic.cost.infer.choice_text import candidate_name
from laconic.cost.infer.costs import InferenceCostModel, Workload
from laconic.cost.infer.planner import Candidate, Choice, Search, Workers, choose, priced
from laconic.cost.infer.rates import InferenceRates
from laconic.cost.infer.shape import InferenceShape
from laconic.errors import PlanError
from laconic.schedule.inference import InferencePlan

_CONNECTOR = "P2pNcclAFDConnector"
_GATES: dict[str, bool] = {"deepseek_v2": True, "deepseek_v3": True, "qwen3_moe": False}
"""Families that plugin and planner know, and whether attention may compute the gate, as in a FinDEP plan."""
Role = Literal["attention", "ffn"]
_ROLES: tuple[Role, ...] = ("attention", "ffn")
_PARTS = ("naive", "pppipe")
_CONNECTOR_PORT, _API_PORT = 6239, 8000
_NEVER = 1 << 30
"""Tokens that no batch has."""


@dataclass(frozen=True)
class VllmServe:
    """One `vllm serve`: all ranks of one role of one group."""

    role: Role
    group: int
    environment: dict[str, str]
    arguments: tuple[str, ...]
    """After `vllm serve`."""

    def command(self) -> str:
        """The command for a shell."""
        variables = " ".join(f"{name}={value}" for name, value in self.environment.items())
        return f"{variables} vllm serve {shlex.join(self.arguments)}"


@dataclass(frozen=True)
class VllmAfd:
    """The plan that the plugin can run, its commands, and what it gives up."""

    plan: Candidate
    commands: tuple[VllmServe, ...]
    given_up: tuple[str, ...]
    """A line each, with what the plan without the plugin's limits predicts."""

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        commands = [
            {"role": one.role, "group": one.group, "environment": one.environment, "arguments": list(one.arguments)}
            for one in self.commands
        ]
        return {"plan": self.plan.to_dict(), "commands": commands, "given_up": list(self.given_up)}

    def script(self) -> str:
        """All commands as a shell script that starts them and waits."""
        lines = ["#!/bin/sh", *(f"# {line}" for line in self.given_up)]
        for one in self.commands:
            lines += ["", f"# group {one.group + 1}, {one.role}", f"{one.command()} &"]
        return "\n".join([*lines, "", "wait", ""])


def plan_vllm_afd(
    shape: InferenceShape,
    rates: InferenceRates,
    workers: Workers,
    path: str,
    *,
    prompt: int,
    output: int,
    requests: int | None = None,
    shares: Sequence[float] = (),
    search: Search | None = None,
    host: str = "127.0.0.1",
) -> VllmAfd:
    """Plan decoding for vLLM with its plugin.

    Args:
        shape, rates: of the model and the cluster.
        workers: GPUs that are there; a group's are numbered in order, attention first.
        path: of the model, for `vllm serve`.
        prompt, output: tokens of a request.
        requests: that wait; None: as many as fit.
        shares: measured routing, as in `InferenceCostModel`.
        search: limits of the plan that it is compared with.
        host: address on which the ranks of a group meet and answer.

    Raises:
        PlanError: plugin and planner do not both know the family, or no split fits that the plugin can run.
    """
    if shape.family not in _GATES:
        raise PlanError(
            f"model_type is {shape.family!r}, but vllm-afd-plugin and the planner both know {', '.join(_GATES)} only"
        )
    model = InferenceCostModel(shape, rates, Workload.decode(prompt, output, requests), shares)
    narrow = Search(max_micro_batches=2, max_slices=1, slicings=("tokens",))
    runnable = choose(model, replace(workers, attention_first=True), narrow)
    found = [one for one in runnable.candidates if one.kind in _PARTS]
    if not found:
        raise PlanError(
            f"no split of {workers.total} workers fits that has as many attention as FFN ranks or more, as "
            f"{_CONNECTOR} needs; give more workers or memory"
        )
    plan = found[0]
    unlimited = InferenceCostModel(shape, rates, Workload.decode(prompt, output), shares)
    prefill = InferenceCostModel(shape, rates, Workload.prefill(prompt, output), shares)
    thresholds = _threshold(unlimited, plan), _threshold(prefill, plan)
    commands = tuple(
        _serve(shape, plan, role, group, [path, "--max-model-len", str(prompt + output)], host, thresholds)
        for group in range(plan.num_groups)
        for role in _ROLES
    )
    given_up = _given_up(model, plan, choose(model, workers, search))
    if workers.are_of_two_kinds(rates):
        given_up.append("GPUs are of two kinds: CUDA has to number them group by group, those of attention ranks first")
    return VllmAfd(plan, commands, tuple(given_up))


def _threshold(model: InferenceCostModel, plan: Candidate) -> int | None:
    """Tokens of an attention rank from which two micro-batches are faster than one, by halving; None: never."""
    num_requests, found = plan.batch * plan.plan.num_micro_batches, None
    while num_requests >= 2 and _seconds(model, plan, num_requests, 2) < _seconds(model, plan, num_requests, 1):
        found = num_requests * model.workload.new_tokens
        num_requests //= 2
    return found


def _seconds(model: InferenceCostModel, plan: Candidate, num_requests: int, r1: int) -> float:
    assert plan.split is not None
    how = InferencePlan(r1, shared_first=True)
    return priced(model, "pppipe", plan.split, ceil(num_requests / r1), how).seconds


def _serve(
    shape: InferenceShape,
    plan: Candidate,
    role: Role,
    group: int,
    arguments: list[str],
    host: str,
    thresholds: tuple[int | None, int | None],
) -> VllmServe:
    assert plan.split is not None
    split = plan.split
    num_ranks = split.attention if role == "attention" else split.experts
    first = group * (split.attention + split.experts) + (0 if role == "attention" else split.attention)
    settings = {
        "role": role,
        "connector": _CONNECTOR,
        "host": host,
        "port": _CONNECTOR_PORT + group,
        "num_attention_ranks": split.attention,
        "num_ffn_ranks": split.experts,
        "compute_gate_on_attention": _GATES[shape.family],
    }
    arguments = [*arguments, "--data-parallel-size", str(num_ranks), "--tensor-parallel-size", "1"]
    arguments += ["--enable-expert-parallel", "--enforce-eager"]
    arguments += ["--max-num-seqs", str(plan.batch * plan.plan.num_micro_batches)]
    if thresholds != (None, None):
        decode, prefill = (str(_NEVER if one is None else one) for one in thresholds)
        arguments += ["--enable-dbo", "--dbo-decode-token-threshold", decode, "--dbo-prefill-token-threshold", prefill]
    arguments += ["--host", host, "--port", str(_API_PORT + len(_ROLES) * group + _ROLES.index(role))]
    arguments += ["--additional-config", json.dumps({"afd": settings})]
    devices = ",".join(str(first + rank) for rank in range(num_ranks))
    return VllmServe(role, group, {"CUDA_VISIBLE_DEVICES": devices, "VLLM_USE_V2_MODEL_RUNNER": "0"}, tuple(arguments))


def _given_up(model: InferenceCostModel, plan: Candidate, free: Choice) -> list[str]:
    """What the commands do not have of the best plan, and where they are not what was predicted."""
    assert plan.split is not None
    best, how = free.best, free.best.plan
    lines = [
        f"predicted for decoding: {plan.tokens_per_second:,.1f} tokens/s by {plan.num_groups} x {plan.split} workers, "
        f"r1 = {plan.plan.num_micro_batches} of {plan.batch} requests per attention rank"
    ]
    gain = f"predicted to give {best.tokens_per_second / plan.tokens_per_second:.2f}x as many tokens/s"
    if best.split is None:
        lines.append(f"do not split: {candidate_name(best)} is {gain}")
    else:
        lost = [
            what
            for is_lost, what in (
                (best.split.attention < best.split.experts, f"more expert than attention workers ({best.split})"),
                (how.num_micro_batches > 2, f"{how.num_micro_batches} micro-batches"),
                (how.num_slices > 1, f"{how.num_slices} slices of {how.slicing}"),
                (how.order != "ASAS", f"the order {how.order}"),
            )
            if is_lost
        ]
        if lost:
            lines.append(f"the plugin cannot run the best plan, {gain}: {', '.join(lost)}")
    if model.shares:
        lines.append("measured routing places no experts: the plugin keeps them in order")
    lines.append("a row goes whole to one FFN rank, which exchanges with the others: bytes are not those predicted")
    return lines
