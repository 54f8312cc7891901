"""Puts MoELayers in the place of a Hugging Face model's mixture-of-experts blocks, and their experts on many processes.

Names stay: every parameter is found where it was, so state dicts, `save_pretrained` and optimizer states keep their
keys. With expert parallelism (EP) the experts' parameters are DTensors, sharded along the experts over the grid's `ep`
dimension: torch.distributed.checkpoint reshards them and their optimizer state for any other number of processes, and
FSDP2 shards them further over `edp`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from laconic.collectives.codec import Codec
from laconic.errors import ConfigError, ModelError
from laconic.moe.dispatch import Dispatcher, LocalDispatcher
from laconic.moe.flat import FlatDispatcher
from laconic.moe.grid import Grid
from laconic.moe.hooks import Hook
from laconic.moe.huggingface.blocks import Block, find_blocks
from laconic.moe.huggingface.experts import FusedExperts, check
from laconic.moe.huggingface.gate import RouterGate
from laconic.moe.huggingface.gradients import clip
from laconic.moe.huggingface.layer import BlockLayer
from laconic.moe.huggingface.saving import save_gathered
from laconic.moe.layer import MoELayer, Schedule
from laconic.moe.order import Order
from laconic.moe.placement import Placement
from laconic.moe.replicas import fully_shard_layers, reduce_gradients

__all__ = ["Parallelized", "parallelize"]


@dataclass(frozen=True, eq=False)
class Parallelized:
    """What `parallelize` did to a model, and what a training loop needs to know of it."""

    model: nn.Module
    layers: dict[str, BlockLayer]
    """The layers by the names of the blocks they replaced."""
    grid: Grid | None
    """Who holds which experts; None if no mesh was given."""

    def experts(self) -> list[nn.Parameter]:
        """The parameters of all layers' experts: under EP those of other processes are others'."""
        return [p for layer in self.layers.values() for p in layer.experts.parameters()]

    def dense(self) -> list[nn.Parameter]:
        """All other parameters, of which every process has a copy (or, under FSDP2, a shard)."""
        known = {id(p) for p in self.experts()}
        return [p for p in self.model.parameters() if id(p) not in known]

    def parameter_groups(self) -> list[dict[str, list[nn.Parameter]]]:
        """Two groups for an optimizer, dense parameters and experts: a fused step cannot mix tensors and DTensors."""
        groups = [[p for p in group if p.requires_grad] for group in (self.dense(), self.experts())]
        return [{"params": group} for group in groups if group]

    def reduce_gradients(self, *, codec: Codec | str = "auto") -> None:
        """Make gradients those of the mean of all processes' losses, after backward; see laconic.moe.reduce_gradients.

        For a model that FSDP2 does not take care of. All processes call it. Without a grid it does nothing.
        """
        if self.grid is not None:
            reduce_gradients(self.model, self.grid, codec=codec)

    def fully_shard(self, units: Iterable[nn.Module] = (), **options: Any) -> None:
        """FSDP2: experts over those that have the same (edp), the rest over dp; see laconic.moe.fully_shard_layers.

        `units` are modules to be gathered one at a time, as decoder layers are. Call it before the optimizer is made.
        Raises ConfigError without a grid.
        """
        if self.grid is None:
            raise ConfigError("no mesh was given, but fully_shard needs its groups; call parallelize with one")
        fully_shard_layers(self.model, self.grid, units=units, **options)

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale gradients so that their 2-norm over the whole model is at most `max_norm`; returns the norm before.

        Gradients must be reduced already. All processes call it and get the same norm, 0-dim. (torch's own
        clip_grad_norm_ cannot take tensors and DTensors together.)
        """
        return clip([*self.dense(), *self.experts()], max_norm)

    def __str__(self) -> str:
        ep = 1 if self.grid is None else self.grid.layout.ep
        lines = [f"{len(self.layers)} mixture-of-experts blocks, experts over {ep} processes"]
        for name, layer in self.layers.items():
            block = layer.block
            shared = "" if block.shared is None else ", and shared ones"
            here = f"{block.num_experts // ep} here" if ep > 1 else "all here"
            lines.append(f"  {name}: {block.top_k} of {block.num_experts} experts ({here}){shared}")
        return "\n".join(lines)


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh | Grid | None = None,
    *,
    codec: Codec | str = "auto",
    order: Order | None = None,
    dispatcher: Callable[[Grid | None], Dispatcher] | None = None,
    schedule: Schedule | None = None,
    hooks: Iterable[Hook] = (),
    movable: bool = False,
    check_logits: bool = True,
) -> Parallelized:
    """Replace the mixture-of-experts blocks of `model` in place by layers of laconic.moe with the same outputs.

    Call it on all processes, after loading weights and before DDP, FSDP2 and the optimizer.

    Arguments:
        model: a Hugging Face model whose blocks have fused experts (Mixtral, Qwen3-MoE, OLMoE, DeepSeek-V2 and V3, and
            others built the same way); all processes have the same weights.
        mesh: a Grid, or a DeviceMesh over the world with a dimension "ep" (or without names), over which experts are
            spread: of E experts, process r of an EP group keeps numbers r E / N_EP and following. None keeps all.
        codec: what rows are in the all-to-all, see laconic.collectives.
        order, schedule, hooks: of the layers, see MoELayer. `dispatcher` makes each layer's from the grid.
        movable: give each layer a Placement, so that a laconic.moe.ExpertMover can move its experts.
        check_logits: refuse router logits that are not finite, which waits for a GPU once in each block.

    Raises ModelError if there are no such blocks, or one is not understood, or experts are sharded already, and
    ConfigError if E / N_EP is no whole number or the mesh does not fit. Nothing is changed then.
    """
    blocks = find_blocks(model)
    if not blocks:
        again = any(isinstance(module, MoELayer) for module in model.modules())
        raise ModelError(
            f"{type(model).__name__} has no mixture-of-experts block of Hugging Face transformers"
            + (" left, since it is parallelized already" if again else "; blocks with fused experts are looked for")
        )
    grid = Grid.from_mesh(mesh) if isinstance(mesh, DeviceMesh) else mesh
    if not (grid is None or isinstance(grid, Grid)):
        raise ConfigError(f"mesh is {mesh!r}, but it must be a Grid, a DeviceMesh or None; make one, as in Grid(ep=8)")
    _check_fit(model, blocks, grid)

    ep = 1 if grid is None else grid.layout.ep
    hooks = tuple(hooks)
    layers: dict[str, BlockLayer] = {}
    for name, block in blocks.items():
        original = model.get_submodule(name)
        held = original.get_submodule(block.experts)
        parameters = {
            key: parameter if grid is None or ep == 1 else _shard(parameter, grid)
            for key, parameter in held.named_parameters()
        }
        layer = BlockLayer(
            original,
            block,
            RouterGate(original.get_submodule(block.router), block.num_experts, block.top_k, check_logits),
            FusedExperts(held, parameters),
            order,
            _spread(grid, codec) if dispatcher is None else dispatcher(grid),
            schedule=schedule,
            hooks=hooks,
            placement=Placement(block.num_experts) if movable else None,
        )
        owner, _, child = name.rpartition(".")
        setattr(model.get_submodule(owner), child, layer)
        # Free the whole experts before the next block's are cut.
        held._parameters.clear()
        layers[name] = layer
    if ep > 1 and hasattr(model, "save_pretrained"):
        model.__dict__["save_pretrained"] = save_gathered(model)
    return Parallelized(model, layers, grid)


def _check_fit(model: nn.Module, blocks: dict[str, Block], grid: Grid | None) -> None:
    tried: set[tuple[type, int]] = set()
    for name, block in blocks.items():
        experts = model.get_submodule(name).get_submodule(block.experts)
        where = f"{name}.{block.experts}"
        if any(isinstance(p, DTensor) for p in experts.parameters()) or getattr(experts, "_is_expert_parallel", False):
            raise ModelError(
                f"{where} is sharded already; parallelize a model before fully_shard, and load it unsharded"
            )
        if grid is not None and block.num_experts % grid.layout.ep:
            fitting = [n for n in range(1, block.num_experts + 1) if block.num_experts % n == 0]
            raise ConfigError(
                f"{where} has {block.num_experts} experts, which ep = {grid.layout.ep} processes cannot share evenly;"
                f" let ep be one of {fitting}"
            )
        for child in (block.router, block.experts):
            if "forward" in model.get_submodule(name).get_submodule(child).__dict__:
                raise ModelError(
                    f"{name}.{child} has a forward that was put there, as compress_activations does; parallelize first"
                )
        if (kind := (type(experts), block.num_experts)) not in tried:
            check(experts, where)
            tried.add(kind)
    if grid is not None and (grid.layout.mp > 1 or grid.layout.esp > 1):
        raise ConfigError(
            f"mp is {grid.layout.mp} and esp is {grid.layout.esp}, but layers of a Hugging Face model take 1 for both:"
            " each process has whole experts and tokens of its own; put these processes into ep or edp"
        )


def _shard(parameter: nn.Parameter, grid: Grid) -> nn.Parameter:
    """This process's experts of a parameter [E, ...], in memory of its own."""
    mesh = grid.expert_mesh["ep"]
    num_local = len(parameter) // mesh.size()
    first = mesh.get_local_rank() * num_local
    local = parameter.detach()[first : first + num_local].clone()
    sharded = DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(sharded, requires_grad=parameter.requires_grad)


def _spread(grid: Grid | None, codec: Codec | str) -> Dispatcher:
    if grid is None or grid.layout.ep == 1:
        return LocalDispatcher()
    return FlatDispatcher(grid.ep, codec=codec)
