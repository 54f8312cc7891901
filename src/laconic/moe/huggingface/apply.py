"""Parallelizes Hugging Face models: replaces the experts of their mixture-of-experts blocks by MoELayers.

Names stay: every parameter is found where it was, so state dicts, `save_pretrained` and optimizer states keep their
keys. With expert parallelism (EP) the experts' parameters are DTensors, sharded along the experts over the grid's `ep`
dimension: torch.distributed.checkpoint reshards them and their optimizer state for any other number of processes, and
FSDP2 shards them further over `edp`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from laconic.collectives.codec import Codec
from laconic.errors import ConfigError, ModelError
from laconic.moe.dispatch.base import Dispatcher, LocalDispatcher, StartsDispatch
from laconic.moe.dispatch.parm import Path
from laconic.moe.gates import Gate, make_gate
from laconic.moe.hooks import Hook
from laconic.moe.huggingface.adapters import adapt_above, check_adaptable
from laconic.moe.huggingface.apart import ApartLayer, ModulesApart, StackApart, check_apart, find_apart
from laconic.moe.huggingface.blocks import (
    FLAGS,
    Block,
    described,
    find_blocks,
    has_identities,
    lies_flat,
    place_in_block,
    takes_rows,
    unknown_experts,
)
from laconic.moe.huggingface.dispatching import choose_dispatcher
from laconic.moe.huggingface.experts import CallsFlat, FlatExperts, FusedExperts, check, is_of
from laconic.moe.huggingface.gate import GivenRouting, RoutedRows, RouterGate, WithIdentities
from laconic.moe.huggingface.gradients import clip
from laconic.moe.huggingface.layer import ExpertsLayer
from laconic.moe.huggingface.saving import save_gathered
from laconic.moe.huggingface.sharding import Slots, block_size, hidden_dim, shard
from laconic.moe.huggingface.shared_experts import SharedCall, SharedExperts
from laconic.moe.huggingface.shared_recognition import find_shared_experts
from laconic.moe.huggingface.wrapping import watch_wrappers
from laconic.moe.layer import Schedule, moe_layers
from laconic.moe.parallel.cut_tensors import mend_dtensors
from laconic.moe.parallel.grid import Grid
from laconic.moe.permute import Order
from laconic.moe.placement.expert_map import Placement
from laconic.moe.replica_gradients import fully_shard_layers, reduce_gradients
from laconic.moe.router_bias import CountedBias
from laconic.options import GateName


@dataclass(frozen=True, eq=False)
class Parallelized:
    """Result of `parallelize`: the model, its layers and what a training loop needs."""

    model: nn.Module
    layers: dict[str, ExpertsLayer]
    """The layers, by the names of the experts they serve."""
    grid: Grid | None
    """Process groups of the experts; None if no mesh was given."""
    left: tuple[str, ...] = ()
    """Modules that seem to hold experts of another kind, which every process keeps whole."""
    shared: Mapping[str, SharedExperts] = field(default_factory=dict)
    """Shared experts beside the layers, by the layers' names, and whether they are computed while rows travel; empty if
    no rows do."""

    def experts(self) -> list[nn.Parameter]:
        """List the parameters of all layers' experts; under EP each process has its own."""
        return [p for layer in self.layers.values() for p in layer.experts.parameters()]

    def dense(self) -> list[nn.Parameter]:
        """List all other parameters, of which every process has a copy (or, under FSDP2, a shard)."""
        known = {id(p) for p in self.experts()}
        return [p for p in self.model.parameters() if id(p) not in known]

    def parameter_groups(
        self, weight_decay: Callable[[str, nn.Parameter], float] | None = None
    ) -> list[dict[str, Any]]:
        """Return groups for an optimizer, dense and experts: a fused step cannot mix tensors, DTensors and meshes.

        Under tensor parallelism the dense part is more than one group.

        Args:
            weight_decay: of each parameter, from its name and itself; makes groups of their own. None leaves it to the
                optimizer.
        """
        names = {id(p): name for name, p in self.model.named_parameters()}
        groups: dict[tuple[bool, Any, float | None], list[nn.Parameter]] = {}
        for of_experts, parameters in enumerate((self.dense(), self.experts())):
            for p in parameters:
                if p.requires_grad:
                    mesh = p.device_mesh if isinstance(p, DTensor) else None
                    decay = None if weight_decay is None else float(weight_decay(names[id(p)], p))
                    groups.setdefault((bool(of_experts), mesh, decay), []).append(p)
        return [
            {"params": group} | ({} if decay is None else {"weight_decay": decay})
            for (_, _, decay), group in groups.items()
        ]

    def reduce_gradients(self, *, codec: Codec | str = "auto") -> None:
        """Make gradients those of the mean of all processes' losses, after backward; see laconic.moe.reduce_gradients.

        For a model without FSDP2 and DDP. All processes call it, once a step. Without a grid it does nothing. Modules
        around the model that `parallelize` was given (a head, say) are not reduced here; the first call warns of them.

        Raises:
            ConfigError: the last forward was DDP's, in whose backward gradients have become the mean already, or a part
                of the model is FSDP2's.
        """
        if self.grid is None:
            return
        if any(layer.ran_under_ddp for layer in self.layers.values()):
            raise ConfigError(
                "reduce_gradients is called, but the last forward was that of DistributedDataParallel, which averages"
                " gradients in backward, those of experts too; leave the call out"
            )
        reduce_gradients(self.model, self.grid, codec=codec)

    def fully_shard(
        self, units: Iterable[nn.Module] = (), *, gradient_divide_factor: float | None = None, **options: Any
    ) -> None:
        """Apply FSDP2: experts over their replicas (edp), the rest over dp; see laconic.moe.fully_shard_layers.

        Call it before the optimizer is made.

        Args:
            units: modules to be gathered one at a time, as decoder layers are.
            gradient_divide_factor: None makes gradients the mean of all processes' losses; 1 makes them the sum, for
                losses that are divided by the tokens of all processes already, as torchtitan's.
            options: of fully_shard.

        Raises:
            ConfigError: there is no grid.
        """
        if self.grid is None:
            raise ConfigError("no mesh was given, but fully_shard needs its groups; call parallelize with one")
        fully_shard_layers(self.model, self.grid, units=units, gradient_divide_factor=gradient_divide_factor, **options)

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale gradients so that their 2-norm over the whole model is at most `max_norm`; return the norm before.

        Gradients must be reduced already. All processes call it and get the same norm, 0-dim. (torch's own
        clip_grad_norm_ cannot take tensors and DTensors together.)
        """
        return clip([*self.dense(), *self.experts()], max_norm)

    def __str__(self) -> str:
        ep, esp = (1, 1) if self.grid is None else (self.grid.layout.ep, self.grid.layout.esp)
        shards = f", each cut over {esp}" if esp > 1 else ""
        lines = [f"{len(self.layers)} mixture-of-experts blocks, experts over {ep} processes{shards}"]
        for name, layer in self.layers.items():
            here = f"{layer.experts.num_experts} here" if ep > 1 else "all here"
            lines.append(f"  {name}: {layer.gate.num_experts} experts ({here})")
            if name in self.shared:
                lines.append(f"    {self.shared[name]}")
        lines += [f"  left as it is, whole on every process: {name}" for name in self.left]
        return "\n".join(lines)


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh | Grid | None = None,
    *,
    codec: Codec | str = "auto",
    order: Order | None = None,
    gate: GateName | Callable[[int, int, int], Gate] | None = None,
    dispatcher: Path | Callable[[Grid | None], Dispatcher] | None = None,
    schedule: Schedule | None = None,
    hooks: Iterable[Hook] = (),
    movable: bool = False,
    check_logits: bool = True,
    overlap_shared: bool = True,
) -> Parallelized:
    """Replace the experts of `model` in place by layers of laconic.moe with the same outputs.

    Call it on all processes, after loading weights and before DDP, FSDP2 and the optimizer. Routers, shared experts and
    everything else of a block stay the model's own code. DDP skips experts by itself, and their gradients become the
    mean of all processes' in its backward. If it raises, nothing has changed.

    Args:
        model: a Hugging Face model with fused experts (transformers' ExpertsInterface: Mixtral, Qwen3-MoE, DeepSeek-V3,
            GPT-OSS and most others), or with experts that its own code calls apart (Switch, NLLB-MoE, JetMoE); all
            processes have the same weights.
        mesh: a Grid, or a DeviceMesh over the world with a dimension "ep" (or without names), over which experts are
            spread: each process of an EP group keeps the next ceil(E / N_EP), the last ones fewer. With esp each
            expert's hidden dimension is cut. With mp the processes of an MP group have the same tokens, as tensor
            parallelism has them. None keeps all.
        codec: of rows in the all-to-all, see laconic.collectives.
        order, schedule, hooks: of the layers, see MoELayer.
        gate: decides in the place of the model's router, with its weight: a name of laconic.moe.make_gate, or a
            function from the numbers of experts, their model_dim and the experts per token. It has no parameters but a
            weight, as "softmax", "sinkhorn" and "expert_choice"; the model's configuration knows nothing of it, so pass
            it wherever the model is used. Its losses are `laconic.moe.auxiliary_losses(model)`. None is the router.
        dispatcher: a path of laconic.moe.make_dispatcher ("joint", "sharded", "s1", "s2", "baseline"), or a function
            that makes each layer's dispatcher from the grid; None is "s1" with mp, else "joint". The model's router
            sees all tokens on every process, also on paths that share them before their gate. With mp > 1 the paths
            compare the tokens of an MP group in forward, where others are a RoutingError; a dispatcher of your own
            class compares for itself.
        movable: give each layer a Placement, so that a laconic.moe.ExpertMover can move its experts.
        check_logits: refuse routing weights that are not finite, as those of NaN logits are, which waits for a GPU once
            in each block.
        overlap_shared: compute a block's shared experts while rows travel to its routed ones, with the same bits, where
            a trial of the block shows that it can be done: print the result to see. Not under torch.compile, and not in
            a forward in which their dropout is active.

    Raises:
        ModelError: there are no fused experts, or some compute something else, are sharded already, or have tied
            parameters, gradients or hooks that would be lost; `gate` or a router has other parameters.
        ConfigError: there are fewer experts than N_EP, esp does not divide their hidden dimension, the mesh does not
            fit, or the dispatcher would add up other things than this grid's.
    """
    blocks, apart = find_blocks(model, rows=True), find_apart(model)
    left = tuple(one for one in unknown_experts(model) if one.partition(" (")[0] not in apart)
    if not blocks and not apart:
        reason = (
            " left, since it is parallelized already"
            if moe_layers(model)
            else f"; not {'; '.join(left[:3])}; put a laconic.moe.MoELayer in its place by hand"
            if left
            else "; fused experts are looked for"
        )
        raise ModelError(f"{type(model).__name__} has no mixture-of-experts block of Hugging Face transformers{reason}")
    grid = Grid.from_mesh(mesh) if isinstance(mesh, DeviceMesh) else mesh
    if (
        isinstance(mesh, DeviceMesh)
        and grid is not None
        and not {*(mesh.mesh_dim_names or ["ep"])} & {"ep", "esp", "etp"}
    ):
        layout = grid.layout
        raise ConfigError(
            f"mesh has the dimensions {mesh.mesh_dim_names}, but none is called ep, so every process would keep all"
            f" experts; pass Grid(mp={layout.mp}, ep={layout.num_ranks}), or None to spread nothing"
        )
    if not (grid is None or isinstance(grid, Grid)):
        raise ConfigError(f"mesh is {mesh!r}, but it must be a Grid, a DeviceMesh or None; make one, as in Grid(ep=8)")
    _check_fit(model, blocks, grid, movable)
    _check_movable(model, apart, grid is not None and grid.layout.joint > 1)
    check_apart(model, apart, grid)
    hooks = tuple(hooks)
    if apart and (gate is not None or movable or hooks):
        raise ModelError(
            f"{next(iter(apart))} has experts that are called apart, which work without gate, movable and hooks alone;"
            " leave these out"
        )
    if any(name.endswith(".base_layer") for name in (*blocks, *apart)):
        check_adaptable("experts", 1 if grid is None else grid.layout.mp, movable)
    dispatchers = [choose_dispatcher(grid, dispatcher, codec) for _ in (*blocks, *apart)]
    gates = [_gate_of(model, block, gate, check_logits) for block in blocks.values()]

    is_cut = grid is not None and grid.layout.joint > 1
    shared = _shared_experts(model, blocks, dispatchers, overlap_shared)
    layers: dict[str, ExpertsLayer] = {}
    for (name, block), decides, made in zip(blocks.items(), gates, dispatchers, strict=False):
        whole = model.get_submodule(name)
        original, is_flat = described(whole), lies_flat(whole)
        parameters = {
            key: shard(key, parameter, original, grid) if grid is not None and is_cut else parameter
            for key, parameter in original.named_parameters()
        }
        make = FlatExperts if is_flat else FusedExperts
        experts = make(original, parameters, adds_down_bias=grid is None or grid.esp.rank() == 0)
        layers[name] = ExpertsLayer(
            original,
            decides,
            experts,
            order,
            made,
            schedule=schedule,
            hooks=hooks,
            placement=Placement(block.num_experts, _device_of(experts, grid)) if movable else None,
            grid=grid,
        )
        if grid is not None and 1 < block_size(original) < block.num_experts:
            layers[name].placement = Slots(
                block.num_experts, block_size(original), grid.layout.ep, _device_of(experts, grid)
            )
        if is_flat:
            whole.mlp, whole.__class__ = experts, CallsFlat
        else:
            above, _, child = name.rpartition(".")
            setattr(model.get_submodule(above), child, experts)
            adapt_above(model, name)
        owner, _ = place_in_block(name)
        if gate is None:
            layers[name].router_bias = CountedBias.of_block(model.get_submodule(owner), block.num_experts)
        if name in shared and (place := shared[name].place) is not None:
            layer = layers[name]
            moved = SharedCall(
                model.get_submodule(owner),
                shared[name].name,
                place,
                shared[name].num_nodes,
                groups=partial(_groups_of_rows, layer),
            )
            layer.shared_call = moved
            moved.attach()
        # Free the whole experts before the next ones are sharded.
        original._parameters.clear()
    for (name, keys), made in zip(apart.items(), dispatchers[len(blocks) :], strict=True):
        original = model.get_submodule(name)
        called = ModulesApart(original, keys, grid) if keys else StackApart(original, grid)
        decides = GivenRouting(called.num_global_experts, check_logits)
        layers[name] = ApartLayer(original, decides, called, order, made, schedule=schedule, grid=grid)
        above, _, child = name.rpartition(".")
        setattr(model.get_submodule(above), child, called)
        adapt_above(model, name)
    watch_wrappers()
    if grid is not None and is_cut:
        mend_dtensors()
        save_gathered(model, grid.stages)
    return Parallelized(model, layers, grid, left, shared)


def _groups_of_rows(layer: ExpertsLayer) -> tuple[dist.ProcessGroup, ...]:
    return layer.dispatcher.groups if isinstance(layer.dispatcher, StartsDispatch) else ()


def _shared_experts(
    model: nn.Module, blocks: dict[str, Block], dispatchers: list[Dispatcher], overlap: bool
) -> dict[str, SharedExperts]:
    """Return the shared experts of blocks whose rows travel."""
    found: dict[str, SharedExperts] = {}
    tried: dict[tuple[object, ...], SharedExperts | None] = {}
    for name, dispatcher in zip(blocks, dispatchers, strict=False):
        if isinstance(dispatcher, LocalDispatcher):
            continue
        owner, child = place_in_block(name)
        block = model.get_submodule(owner)
        # Blocks of one model mostly are of one kind; one of each kind is tried.
        plain = {key: value for key, value in vars(block).items() if isinstance(value, bool | int | float | str)}
        dtypes = [(parameter.dtype, parameter.device.type) for parameter in block.parameters()]
        kind = (type(block), str(block), str(plain), str(dtypes))
        if kind not in tried:
            tried[kind] = find_shared_experts(model, f"{owner}.{child}")
        one = tried[kind]
        if one is not None:
            if one.place is not None and not isinstance(dispatcher, StartsDispatch):
                one = replace(one, place=None, reason=f"{type(dispatcher).__name__} cannot start to send rows")
            found[name] = one if overlap else replace(one, place=None, reason="overlap_shared is False")
    return found


def _gate_of(
    model: nn.Module, block: Block, wanted: str | Callable[[int, int, int], Gate] | None, check_logits: bool
) -> GivenRouting:
    if wanted is None:
        experts = model.get_submodule(block.experts)
        kind = RoutedRows if takes_rows(experts) else WithIdentities if has_identities(experts) else GivenRouting
        return kind(block.num_experts, check_logits)
    if block.router is None or block.top_k is None:
        raise ModelError(
            f"gate is {wanted!r}, but beside {block.experts} no one module is its router for certain, with the number"
            " of experts per token as top_k; leave gate out"
        )
    router = model.get_submodule(block.router)
    model_dim = next(router.parameters()).shape[-1]
    if isinstance(wanted, str):
        options = {"device": "meta", "check_logits": check_logits}
        made = make_gate(wanted, block.num_experts, model_dim, block.top_k, **options)
    else:
        made = wanted(block.num_experts, model_dim, block.top_k)
    return RouterGate(made, router, block.router, block.top_k, check_logits)


def _check_movable(model: nn.Module, blocks: Iterable[str], cuts: bool) -> None:
    """Refuse experts to which something is attached that a module in their place, or a part of them, would not have."""
    holders: dict[int, dict[tuple[int, str], str]] = {}
    for name, module in model.named_modules():
        for key, held in [*module._modules.items(), *module._parameters.items()]:
            if held is not None:
                holders.setdefault(id(held), {})[id(module), key] = f"{name}.{key}".lstrip(".")
    for name in blocks:
        if not name:
            raise ModelError(
                f"the model is a module of experts itself ({type(model).__name__}), which parallelize cannot replace;"
                " pass the module that holds it"
            )
        experts = model.get_submodule(name)
        tensors = {f"{name}.{key}": p for key, p in experts.named_parameters()} if cuts else {}
        for what, held in {name: experts, **tensors}.items():
            if len(places := holders[id(held)]) > 1:
                raise ModelError(
                    f"{what} is {' and '.join(places.values())} at once, but experts over layers of their own would"
                    " not stay the same; untie them, or share the whole block"
                )
        for kind in (kind for kind, found in vars(experts).items() if "state_dict" in kind and found):
            raise ModelError(
                f"{name} has {kind.strip('_')}, which the module in its place would not have; register them after"
                " parallelize"
            )
        for what, p in tensors.items():
            hooks = [*(p._backward_hooks or {}).values(), *(p._post_accumulate_grad_hooks or {}).values()]
            if not all(is_of(hook, "laconic.gradients.") for hook in hooks):  # which come back at the first reduce
                raise ModelError(
                    f"{what} has hooks on its gradient, but a process's part of it is another parameter; register them"
                    " (update_in_backward does, too) after parallelize"
                )
            if p.grad is not None:
                raise ModelError(f"{what} has a gradient, which would be lost; call zero_grad() before parallelize")


def _check_fit(model: nn.Module, blocks: dict[str, Block], grid: Grid | None, movable: bool) -> None:
    tried: set[tuple[object, ...]] = set()
    _check_movable(model, blocks, grid is not None and grid.layout.joint > 1)
    for name, block in blocks.items():
        experts = described(model.get_submodule(name))
        if any(isinstance(p, DTensor) for p in experts.parameters()) or getattr(experts, "_is_expert_parallel", False):
            raise ModelError(
                f"{name} is sharded already; parallelize a model before fully_shard, and load it unsharded"
            )
        if grid is not None and block.num_experts < grid.layout.ep:
            raise ConfigError(
                f"{name} has {block.num_experts} experts, but ep = {grid.layout.ep} processes need at least one each;"
                f" lower ep to {block.num_experts} or less"
            )
        ep, esp = (1, 1) if grid is None else (grid.layout.ep, grid.layout.esp)
        check_layout(name, model.get_submodule(name), ep=ep, esp=esp, movable=movable)
        if grid is not None and (size := hidden_dim(experts)) % grid.layout.esp:
            raise ConfigError(
                f"esp is {grid.layout.esp}, but it must divide the hidden dimension of {name}, which is {size}; change"
                " esp"
            )
        if "forward" in {**model.get_submodule(name).__dict__, **experts.__dict__}:
            raise ModelError(
                f"{name} has a forward that was put there, as compress_activations does; parallelize first"
            )
        # Layers of one model mostly have experts of one kind; one layer of each kind is checked.
        kind = (type(experts), block.num_experts, str(experts), *(getattr(experts, flag) for flag in FLAGS))
        if kind not in tried:
            check(model.get_submodule(name), name, 1 if grid is None else grid.layout.esp)
            tried.add(kind)


def check_layout(name: str, experts: nn.Module, *, ep: int = 1, esp: int = 1, movable: bool = False) -> None:
    """Refuse what is not known of experts behind each other in one dimension, and of those beside identities.

    A ConfigError says that ep would cut an expert, or a block of them, or that esp or movable are not known of these.
    """
    if not (is_flat := lies_flat(experts)) and not has_identities(experts):
        return
    one = described(experts)
    kind, size = type(experts).__name__, one.num_experts if is_flat else block_size(one)
    if size % ep and (is_flat or size < one.num_experts):
        what = "experts behind each other" if is_flat else "experts in blocks beside identities"
        raise ConfigError(f"ep is {ep}, but it must divide the {size} {what} of {name} ({kind}); change ep")
    if is_flat and esp > 1:
        raise ConfigError(
            f"esp is {esp}, but experts of {name} ({kind}) lie behind each other in the dimension that esp would cut;"
            " take ep"
        )
    if movable:
        raise ConfigError(
            f"movable is True, but {name} ({kind}) has its experts' parameters in a layout of its own, which an"
            " ExpertMover does not know; leave movable out"
        )


def _device_of(experts: nn.Module, grid: Grid | None) -> torch.device | str:
    """Return the device of experts, or the one that those on the meta device will get."""
    device = next(experts.parameters()).device
    if device.type != "meta":
        return device
    return "cpu" if grid is None else grid.expert_mesh.device_type
