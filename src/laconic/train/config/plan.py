"""Runs from a plan of `laconic plan`: the settings it was made for, and the check that a run is the planned one.

Light to import, as the command line reads a plan before it imports torch.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from laconic.cost import Plan
from laconic.errors import PlanError
from laconic.train.config.schema import TrainConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from laconic.activations import ActivationPlan
    from laconic.train.distributed.parallel_state import ParallelState


def plan_settings(plan: Plan) -> dict[str, Any]:
    """Return values for fields of TrainConfig, as nested tables, that make a run the planned one."""
    model, batch, layout, settings = plan.job.model, plan.job.batch, plan.job.layout, plan.job.settings
    if layout.tensor_parallel != 1:
        raise PlanError(
            f"tensor_parallel is {layout.tensor_parallel} in the plan, but laconic train has none; plan with 1"
        )
    if layout.expert_parallel != 1:
        raise PlanError(
            f"expert_parallel is {layout.expert_parallel} in the plan, but laconic train carries out no plan with it; "
            f"plan with 1, or train with --moe.expert-parallel {layout.expert_parallel} and without the plan"
        )
    if settings.precision not in ("fp32", "bf16"):
        raise PlanError(f"precision is {settings.precision!r} in the plan, but laconic train knows fp32 and bf16")
    if settings.gradient_bits == 16:
        raise PlanError("gradient_bits is 16 in the plan, but laconic train keeps gradients in 32, 12 or 8")
    pipelined = layout.stages > 1
    in_backward = {"update_in_backward": True, "clip_norm": 0.0} if settings.update_in_backward else {}
    return {
        "model": dict(model.settings),
        "sequence_length": batch.sequence_length,
        "batch_size": batch.sequences * layout.data_parallel * layout.micro_batches,
        "accumulation": 1 if pipelined else layout.micro_batches,
        "nproc": layout.world_size,
        "parallel": "fsdp" if layout.sharded else "ddp",
        "precision": settings.precision,
        "pipeline": {
            "stages": layout.stages,
            "virtual_stages": layout.stages_per_rank,
            "schedule": layout.schedule if pipelined else "1f1b",
            "micro_batches": layout.micro_batches if pipelined else None,
            "split": plan.job.split if pipelined else (),
        },
        "activations": {"loss": settings.loss},
        "gradients": {"bits": settings.gradient_bits},
        "optimizer": {"kind": settings.optimizer, **in_backward},
    }


def check_plan(
    plan: Plan, config: TrainConfig, parallel_state: ParallelState, model_config: PretrainedConfig, chunked_loss: bool
) -> None:
    """Check that a run is the one that `plan` was made for."""
    replicas = parallel_state.num_replicas
    world: dict[str, Any] = {
        "stages": parallel_state.num_stages,
        "data_parallel": replicas,
        "tensor_parallel": 1,
        "micro_batches": config.micro_batches,
        "sequences": config.batch_size // (replicas * config.micro_batches),
        "sequence_length": config.sequence_length,
    }
    if replicas > 1:
        world["sharded"] = config.parallel == "fsdp"
    if parallel_state.num_stages > 1:
        world["stages_per_rank"] = config.pipeline.virtual_stages
        world["schedule"] = config.pipeline.schedule
        if config.pipeline.split:
            world["split"] = config.pipeline.split
    plan.check(model_config.to_dict(), **world)
    planned = plan.job.settings
    for name, mine, theirs in (
        ("activations.loss", planned.loss, "chunked" if chunked_loss else "exact"),
        ("precision", planned.precision, config.precision),
        ("optimizer.kind", planned.optimizer, config.optimizer.kind),
        ("optimizer.update_in_backward", planned.update_in_backward, config.optimizer.update_in_backward),
        ("gradients.bits", planned.gradient_bits, config.gradients.bits),
    ):
        if mine != theirs:
            raise PlanError(
                f"the plan is for {name} = {mine!r}, but this run has {theirs!r}; leave the setting to the plan or "
                "make another one with laconic plan"
            )


def activation_plan(plan: Plan) -> ActivationPlan:
    """Return the part of `plan` that `compress_activations` carries out."""
    from laconic.activations import ActivationPlan

    return ActivationPlan.from_json(json.dumps(plan.activation_plan()))
