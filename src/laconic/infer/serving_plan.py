"""What an engine will run: the workers that a model can be served by, and the plan, given or chosen."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from laconic.cost.infer.engine_plan import EngineChoice, EngineLimits
from laconic.errors import ConfigError, ModelError
from laconic.infer.auto_plan import AutoPlan
from laconic.infer.device import DeviceKind
from laconic.infer.payload import DTYPES
from laconic.infer.split import EngineSplit
from laconic.infer.transformers_seam import find_experts, num_positions, read_config
from laconic.moe.huggingface.blocks import unknown_experts
from laconic.ops.declarations.op import names
from laconic.schedule.inference import InferencePlan, Order

_OF_SLICES = ("num_slices", "slicing", "order", "shared_first")
"""What a plan says about rows that travel to expert workers."""
_USUAL: Mapping[str, tuple[object, ...]] = {
    "expert_format": ("exact",),
    "expert_device": (None,),
    "payload": ("raw", "auto"),
    "link": ("tcp",),
    "expert_loads": (None,),
    "redundant_experts": (0,),
    **{name: (getattr(InferencePlan(), name),) for name in _OF_SLICES},
}
"""Values with which these ask for nothing that needs expert workers."""


@dataclass(frozen=True)
class ServingPlan:
    """What an engine will run, and notes: what an automatic plan chose, and what differs from what was asked for.

    The model has `vocabulary` tokens, `positions`, None if its configuration names no number, and `num_experts` in each
    layer that has any.
    """

    split: EngineSplit
    plan: InferencePlan
    choice: EngineChoice | None
    notes: tuple[str, ...]
    vocabulary: int
    positions: int | None
    num_experts: tuple[int, ...] = ()


def plan_serving(
    model_dir: Path,
    attention: int,
    experts: int | None,
    plan: InferencePlan | AutoPlan | str | None,
    rates: str | os.PathLike[str] | None,
    limits: EngineLimits,
    dtype: str,
    traced: bool,
    of_experts: Mapping[str, object],
    device: DeviceKind = "cpu",
) -> ServingPlan:
    """Return what an engine with these arguments runs; see Engine, also for what it refuses.

    A run that is to be traced needs expert workers; `of_experts` are arguments that only expert workers use, by name.
    """
    automatic = _automatic(plan, rates, experts)
    of_slices = {name: getattr(plan, name) for name in _OF_SLICES} if isinstance(plan, InferencePlan) else {}
    asked = {name: value for name, value in {**of_experts, **of_slices}.items() if value not in _USUAL[name]}
    if asked and experts == 0:
        said, it = _in_words(asked)
        raise ConfigError(
            f"{said} with experts = 0, but only expert workers use {it}; give at least one, or leave {it} out"
        )
    config = read_config(model_dir)
    if dtype == "auto" and config.dtype not in (None, *DTYPES):
        raise ModelError(
            f"dtype is 'auto', and the weights in {str(model_dir)!r} are {config.dtype}, but they must be"
            f" {names(DTYPES)} to be served; give one of these as dtype"
        )
    split = serving_split(model_dir, attention, experts)
    model, blocks = find_experts(config)
    if not split.experts:
        needless = {**({"experts": experts} if experts else {}), **asked, **({"plan": "auto"} if automatic else {})}
        if needless:
            said, it = _in_words(needless)
            why = "; ".join(unknown_experts(model)[:1]) or "it is dense"
            raise ConfigError(
                f"{said}, but {config.model_type} has no experts that an expert worker could hold ({why}), so every"
                f" attention worker holds all of it; leave {it} out"
            )
    notes: tuple[str, ...] = ()
    if not split.experts and experts is None:
        notes += (
            f"{model_dir.name} is a {config.model_type} model without experts that could be elsewhere, so every"
            " attention worker holds all of it",
        )
    choice = None
    if automatic is not None and split.experts:
        may_unsplit = experts is None and not traced and not asked.keys() - {"payload"}
        expert_format = str(asked.get("expert_format", "exact"))
        choice = automatic.choose(
            model_dir,
            split,
            limits,
            dtype=dtype,
            may_unsplit=may_unsplit,
            expert_format=expert_format,
            device=device,
            expert_device=cast(DeviceKind, asked.get("expert_device", device)),
        )
        notes += (f"plan auto: {choice}",)
        logging.getLogger("laconic").info("plan auto: %s", choice)
        if choice.split is None:
            split = EngineSplit(split.num_workers, 0)
            if "payload" in asked:
                notes += (f"every worker holds whole models, so payload = {asked['payload']!r} has no effect",)
        plan = choice.plan
    runs, changed = _runnable(plan if isinstance(plan, InferencePlan) else InferencePlan(), split)
    vocabulary, positions = config.get_text_config().vocab_size, num_positions(config)
    if positions != (named := getattr(config.get_text_config(), "max_position_embeddings", positions)):
        notes += (
            f"{model_dir.name} names {named} positions, of which {positions} are served: behind them the frequencies of"
            " its longrope change for all requests of a batch",
        )
    num_experts = tuple(block.num_experts for block in blocks.values())
    return ServingPlan(split, runs, choice, notes + changed, vocabulary, positions, num_experts)


def serving_split(model_dir: Path, attention: int, experts: int | None) -> EngineSplit:
    """Return the workers that will serve a model: a dense one has no expert workers, others one for None."""
    wanted = EngineSplit(attention, 1 if experts is None else experts)
    _, blocks = find_experts(read_config(model_dir))
    if not blocks:
        return EngineSplit(wanted.attention, 0)
    if wanted.experts:
        for block in blocks.values():
            wanted.expert_range(0, block.num_experts)
    return wanted


def _automatic(
    plan: InferencePlan | AutoPlan | str | None, rates: str | os.PathLike[str] | None, experts: int | None
) -> AutoPlan | None:
    if isinstance(plan, AutoPlan):
        if rates is not None:
            raise ConfigError(
                f"rates is {str(rates)!r} beside an AutoPlan, which has its own; give AutoPlan(rates=...)"
            )
        automatic = plan
    elif plan is None or isinstance(plan, InferencePlan):
        if rates is not None:
            raise ConfigError(f"rates is {str(rates)!r}, but only an automatic plan needs rates; give plan='auto'")
        return None
    elif plan == "auto":
        automatic = AutoPlan(rates)
    else:
        raise ConfigError(f"plan is {plan!r}, but it must be an InferencePlan, an AutoPlan or 'auto'")
    if experts == 0:
        raise ConfigError("plan is automatic with experts = 0, which leaves nothing to choose; leave out one of them")
    return automatic


def _in_words(asked: Mapping[str, object]) -> tuple[str, str]:
    """What is asked for, with values, and the pronoun of all of it."""
    flags = {"num_slices": " (--slices)"}  # the others are those of their flags
    said = ", ".join(f"{name}{flags.get(name, '')} is {value!r}" for name, value in asked.items())
    return said, "it" if len(asked) == 1 else "them"


def _runnable(plan: InferencePlan, split: EngineSplit) -> tuple[InferencePlan, tuple[str, ...]]:
    """The plan that will run in place of one that asks micro-batches to keep step, and a note of that."""
    if plan.order != "AASS":
        return plan, ()
    runs: Order = "ASAS" if plan.shared_first else "greedy"
    note = f"order AASS runs as {runs}: micro-batches do not wait for each other between attention and shared experts"
    return replace(plan, order=runs), (note,) if plan.num_micro_batches > 1 and split.experts else ()
