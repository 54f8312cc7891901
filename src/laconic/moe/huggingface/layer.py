"""A MoELayer behind the experts of a Hugging Face block.

[Note: the seam]
The module under the name of a block's experts is a FusedExperts with the block's original parameters. The block calls
it as before, with hidden states, indices and weights; it passes them to its ExpertsLayer, which sends rows to the ranks
of their experts and calls FusedExperts with sorted rows there. So the block's own code before and after its experts
runs unchanged, and FSDP2, compress_activations and adapters find one module with one set of parameters. The layer
itself is no module of the model: `laconic.moe.moe_layers` lists it.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from laconic.collectives.runtime.group_facts import ranks_of
from laconic.errors import ConfigError
from laconic.moe.dispatch.base import Dispatcher
from laconic.moe.hooks import Hook
from laconic.moe.huggingface.experts import FusedExperts, is_of
from laconic.moe.huggingface.gate import GivenRouting
from laconic.moe.huggingface.shared_experts import SharedCall
from laconic.moe.layer import MoELayer, Schedule
from laconic.moe.parallel.expert_mean import ExpertMean
from laconic.moe.parallel.grid import Grid
from laconic.moe.permute import Order
from laconic.moe.placement.expert_map import Placement
from laconic.moe.router_bias import CountedBias
from laconic.moe.routing import Routing, SoftRouting

_HOOKS = tuple(
    name for name in vars(nn.Module()) if "hook" in name and name.startswith(("_forward", "_backward", "_is_full"))
)


def has_own_replicas(grid: Grid) -> bool:
    """Return whether the replicas of experts (edp) are others than those of the dense part (dp)."""
    return grid.layout.joint > 1 or grid.layout.mp > 1


def _may_end_alone(ddp: DistributedDataParallel) -> bool:
    """Return whether a process that has no batch left takes part in DDP's messages only."""
    config = ddp._join_config
    return config.enable and not config.throw_on_early_termination


class ExpertsLayer(MoELayer):
    """MoELayer whose routing comes with the call; see [Note: the seam].

    Attributes:
        ran_under_ddp: whether the last forward with gradients was DDP's, which does not reduce the gradients of
            experts.
        averages_under_ddp: such a forward averages them in its backward; False means that the caller must.
        is_running: whether this layer is calling the experts.
    """

    gate: GivenRouting
    experts: FusedExperts
    is_known_to_hosts = True  # by laconic.moe.huggingface.wrapping

    def __init__(
        self,
        original: nn.Module,
        gate: GivenRouting,
        experts: FusedExperts,
        order: Order | None = None,
        dispatcher: Dispatcher | None = None,
        *,
        schedule: Schedule | None = None,
        hooks: Iterable[Hook] = (),
        placement: Placement | None = None,
        grid: Grid | None = None,
    ) -> None:
        """Replace `original` by `experts`; hooks of `original` see this layer's calls from now on."""
        super().__init__(gate, experts, order, dispatcher, schedule=schedule, hooks=hooks, placement=placement)
        self.__dict__.update({name: original.__dict__[name] for name in _HOOKS})  # whose handles remove them here
        self.shared_call: SharedCall | None = None
        """Moves the block's call of its shared experts to where rows travel; None: the block calls them itself."""
        self.router_bias: CountedBias | None = None
        """The bias by which the block's router is balanced; see `laconic.moe.update_router_biases`."""
        self.grid = grid if grid is not None and (has_own_replicas(grid) or grid.stages > 1) else None
        """None where the dense part's replicas are all processes, so that a model can be copied."""
        self.ran_under_ddp, self.averages_under_ddp, self.is_running = False, True, False
        self.stages = 1 if grid is None else grid.stages
        """Pipeline stages, of which the model is one."""
        self._signature = inspect.signature(original.forward)
        experts.stand_for(self)
        self.num_mp = 1 if grid is None else grid.layout.mp
        """Processes that have the same tokens."""
        self.is_saved_by_host = False
        """Whether the host that wraps the model knows that its processes have different experts."""
        self._own_replicas = grid if grid is not None and has_own_replicas(grid) else None
        """None where DDP averages experts like all others."""
        self._mean_under_ddp = None if self._own_replicas is None else ExpertMean(self._own_replicas)
        self._without_graph: list[bool] = []
        self._ran_again = False
        self._checked_ddp: weakref.ref[DistributedDataParallel] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        # In the model's tree, so that it moves with the model and a state dict is refused while experts are elsewhere.
        if name == "placement":
            self.experts.placement = value
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        return self.experts.placement if name == "placement" else super().__getattr__(name)

    @property
    def training(self) -> bool:
        """Whether the experts, which `model.train()` reaches, are in training mode."""
        experts = self.__dict__.get("_modules", {}).get("experts")
        return True if experts is None else experts.training

    @training.setter
    def training(self, mode: bool) -> None:
        """Ignore the assignment that nn.Module's constructor makes."""

    def arguments(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return hidden states, indices and weights, passed under the original's names.

        Raises:
            TypeError: arguments do not fit, as in the original's call.
        """
        return self._signature.bind(*args, **kwargs).args if kwargs or len(args) != 3 else args

    @torch.compiler.disable
    def forward(self, *call: Tensor) -> Tensor:
        """Return outputs [..., M] of hidden states [..., M], with [..., k] choices and weights for each.

        torch.compile breaks its graph here: the number of rows of an expert is known only when they arrive.
        """
        hidden_states, routing = self.gate.of_call(*call)
        if self.router_bias is not None and self.training and isinstance(routing, Routing):
            self.router_bias.count(routing)
        return self.gate.beside(self.run(hidden_states, routing), *call)

    def run(self, x: Tensor, routing: Routing | SoftRouting | None = None) -> Tensor:
        """See `MoELayer.run`; a ConfigError where DDP runs the layer and was made before it.

        In backward also where a reentrant checkpoint runs it, and it is unknown whether DDP reduces the gradients.
        """
        self._note_ddp()
        self.is_running = True
        self.meanwhile = None if self.shared_call is None else self.shared_call.window(x)
        try:
            return super().run(x, routing)
        finally:
            self.is_running, self.meanwhile = False, None

    @property
    def has_own_replicas(self) -> bool:
        """Whether the replicas of experts are others than those of the dense part."""
        return self._own_replicas is not None

    def mean_of_forward(self) -> ExpertMean | None:
        averages = self.ran_under_ddp and self.averages_under_ddp and torch.is_grad_enabled()
        return self._mean_under_ddp if averages else None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_checked_ddp": None}

    def _check_left_out(self, ddp: DistributedDataParallel) -> None:
        """Refuse a DDP that was made before `parallelize`, is over too few, or may not average."""
        own = {id(p) for p in self.experts.parameters()} if self.has_own_replicas else set()
        left_out = ddp.parameters_to_ignore
        if any(id(p) in own and name not in left_out for name, p in ddp.module.named_parameters()):
            raise ConfigError(
                "experts are spread over processes, but DistributedDataParallel was made before, so it waits for"
                " gradients of parameters that are gone and reduces none; call parallelize first"
            )
        grid = self._own_replicas
        if grid is not None and (left := {*ranks_of(grid.dp)} - {*ranks_of(ddp.process_group)}):
            raise ConfigError(
                f"DistributedDataParallel is over ranks {[*ranks_of(ddp.process_group)]}, but"
                f" {sorted(left)} have other tokens, so that gradients would be no means over all; give it"
                " process_group=grid.dp, or none"
            )
        for hook, _ in getattr(ddp, "_comm_hooks", ()) if grid is not None and self.averages_under_ddp else ():
            if not is_of(hook, "torch.distributed.", "laconic."):
                raise ConfigError(
                    f"DistributedDataParallel reduces gradients by a hook of {hook.__module__}, which may make other"
                    " sums than the means that experts' gradients become; take a hook of torch.distributed or laconic,"
                    " or set averages_under_ddp = False on all layers of parallelize, and reduce the gradients of"
                    " experts, sums over all processes, as the hook does"
                )
        self._checked_ddp = weakref.ref(ddp)

    def _note_ddp(self) -> None:
        """Note whether the gradients of this forward are DDP's.

        A reentrant checkpoint runs a layer without gradients, and again in backward, where DDP is not active; the kind
        of such a run is that of the last one without gradients in training.
        """
        if torch._C._current_graph_task_id() == -1:
            ddp = DistributedDataParallel._get_active_ddp_module()
            of_ddp = ddp is not None
            if ddp is not None and (self._checked_ddp is None or self._checked_ddp() is not ddp):
                self._check_left_out(ddp)
            if ddp is not None and self.has_own_replicas and _may_end_alone(ddp):
                raise ConfigError(
                    "join() lets a process without a batch leave, but the others need its experts; pass"
                    " throw_on_early_termination=True, which ends all together, or give it batches of weight 0"
                )
            if torch.is_grad_enabled():
                self.ran_under_ddp = of_ddp
                self._without_graph.clear()
            elif self.training:
                if self._ran_again:
                    self._without_graph.clear()
                self._without_graph = [kind for kind in self._without_graph if kind != of_ddp] + [of_ddp]
            self._ran_again = False
        elif torch.is_grad_enabled() and self._without_graph:
            if self._without_graph == [True, False]:
                raise ConfigError(
                    "a reentrant checkpoint runs experts again in backward, but since the forward of"
                    " DistributedDataParallel the bare model ran in training mode without gradients, so it is unknown"
                    " who averages their gradients; call model.eval() around that run, or checkpoint with"
                    " use_reentrant=False"
                )
            self.ran_under_ddp, self._ran_again = self._without_graph[-1], True
