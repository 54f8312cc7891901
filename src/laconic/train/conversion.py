"""From the model a task builds to the one that is trained: routers watched, experts spread, activations compressed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch._dynamo
from torch import Tensor, nn

import laconic
from laconic.activations import Report
from laconic.cost import load_plan
from laconic.train.config.plan import activation_plan, check_plan
from laconic.train.config.schema import TrainConfig
from laconic.train.data.sampler import global_indices
from laconic.train.distributed.data_parallel import autocast, decoder_layers
from laconic.train.distributed.parallel_state import ParallelState
from laconic.train.distributed.world import World
from laconic.train.moe.router_balance import Routers, watch_routers
from laconic.train.moe.setup import SpreadExperts, spread_experts
from laconic.train.task import Task

if TYPE_CHECKING:
    from laconic.cost import Plan


@dataclass(frozen=True)
class Conversion:
    """What a model was converted to, and what it was before."""

    plan: Plan | None
    report: Report
    """Report of the activation compression."""
    bf16_nbytes_per_unit: float
    """Bytes per unit that the unchanged model would keep for backward with parameters in bf16."""
    model_config: dict[str, Any]
    """Of a Hugging Face model; empty for another."""
    texts: dict[str, str]
    """The Hugging Face files that describe the unchanged model, to be saved beside its weights."""
    routers: Routers | None
    router_message: str | None
    experts: SpreadExperts | None


def convert_model(
    model: nn.Module, task: Task, config: TrainConfig, world: World, parallel_state: ParallelState
) -> Conversion:
    """Hook the routers of `model`, spread its experts, compress its activations and compile its layers, all in place.

    Raises:
        ConfigError, ModelError, PlanError: the model does not go with the settings.
    """
    bf16_nbytes_per_unit = task.bf16_nbytes_per_unit(model)
    plan = None
    if config.plan is not None:
        plan = load_plan(config.plan)
        check_plan(plan, config, parallel_state, model.config, task.chunked_loss)  # type: ignore[arg-type]
    texts, described = _texts(model), getattr(model, "config", None)
    model_config = {} if described is None else described.to_dict()
    routers, router_message = watch_routers(model, config, world)
    experts = spread_experts(model, config, world)
    kept = _kept(config) if plan is None else {"plan": activation_plan(plan)}
    report = laconic.compress_activations(model, **kept, **task.activation_options(model))
    report = replace(report, fills_cache=False)  # every forward of the trainer says use_cache=False
    if experts is not None:
        experts.tune(lambda: _first_loss(model, task, config, world, parallel_state))
    if config.compile:
        torch._dynamo.config.optimize_ddp = False  # it cuts graphs, and each layer has one of its own already
        for block in decoder_layers(model) or [model]:
            block.compile()
    return Conversion(plan, report, bf16_nbytes_per_unit, model_config, texts, routers, router_message, experts)


def _kept(config: TrainConfig) -> dict[str, Any]:
    """How `compress_activations` is told what `[activations]` says; how the loss is computed is the task's."""
    return {name: getattr(config.activations, name) for name in ("bits", "format", "block_size", "mode", "attention")}


def _first_loss(
    model: nn.Module, task: Task, config: TrainConfig, world: World, parallel_state: ParallelState
) -> Tensor:
    places = parallel_state.replica, parallel_state.num_replicas
    batch = task.training_batch(global_indices(0, config.batch_size, config.micro_batches, 0, *places))
    with autocast(model, world.device, config.precision):
        return task.loss(model, batch.to(world.device))


def _texts(model: Any) -> dict[str, str]:
    texts = {}
    if hasattr(model, "config"):
        texts["config.json"] = model.config.to_json_string(use_diff=False)
    if hasattr(model, "can_generate") and model.can_generate():
        texts["generation_config.json"] = model.generation_config.to_json_string(use_diff=False)
    return texts
