"""The mixture-of-experts layer: composes a gate, an order, a dispatcher and experts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from laconic.collectives.runtime.group_facts import ranks_of
from laconic.errors import RoutingError
from laconic.moe.dispatch.base import Dispatcher, ExpertRows, LocalDispatcher, SharesTokens, StartsDispatch
from laconic.moe.gates.base import Gate
from laconic.moe.gates.losses import runs_without_graph_first
from laconic.moe.hooks import Hook
from laconic.moe.meanwhile import Meanwhile
from laconic.moe.parallel.calling_host import check_not_wrapped
from laconic.moe.parallel.expert_mean import ExpertMean
from laconic.moe.permute import Order, SortedOrder
from laconic.moe.routing import RoutedTokens, Routing, SoftRouting

T = TypeVar("T")


class Schedule(Protocol):
    """Execution of the inside of a layer: whole or in chunks, on one stream or several."""

    def run(self, layer: MoELayer, x: Tensor, routing: Routing) -> Tensor:
        """Dispatch x [n, M] by `routing`, run the experts and combine: [n, M].

        Uses `layer.dispatcher` and `layer.compute`, and runs `layer.meanwhile`, if there is one, when rows have been
        sent (otherwise it is computed later). The result must not depend on the chunks, up to rounding.
        """


class MoELayer(nn.Module):
    """out = sum over a token's experts of weight * expert(x), plus shared(x).

    Args:
        gate: tokens [n, M] to a Routing (or SoftRouting).
        experts: an `Experts`, or any module from (rows [q, M] sorted by expert, counts int64 [E_local]) to [q, M].
        order: expands tokens to rows; None is SortedOrder().
        dispatcher: moves rows to their experts; None is LocalDispatcher().
        shared: a module that every token passes, [..., M] to [..., M].
        overlap_shared: run `shared` while rows travel to their experts, where the dispatcher can start them; its
            backward runs while their gradients come home. Bits stay. A module with active dropout waits for the experts
            in any case; one that draws random numbers otherwise needs False, if experts or hooks draw any, too.
        schedule: runs dispatch, experts and combine; None is one after the other.
        hooks: called in their order at six places.
        placement: maps logical experts to slots; called with int64 logical numbers, returns int64 slots of the same
            shape.

    Raises:
        RoutingError: the gate's experts are not those that are here.
    """

    load: Tensor | None
    """int64 [E]: this rank's tokens per logical expert in the last forward."""
    num_dropped: int
    """Assignments dropped by a capacity in the last forward."""
    is_known_to_hosts = False
    """Whether DDP leaves the experts alone, and FSDP is told of them, by other means than `named_parameters`."""

    def __init__(
        self,
        gate: Gate,
        experts: nn.Module,
        order: Order | None = None,
        dispatcher: Dispatcher | None = None,
        *,
        shared: nn.Module | None = None,
        overlap_shared: bool = True,
        schedule: Schedule | None = None,
        hooks: Iterable[Hook] = (),
        placement: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.order: Order = order if order is not None else SortedOrder()
        self.dispatcher: Dispatcher = dispatcher if dispatcher is not None else LocalDispatcher()
        self.shared, self.overlap_shared = shared, overlap_shared
        self.schedule = schedule
        self.hooks = tuple(hooks)
        self.placement = placement
        self._losses: dict[str, Tensor] = {}
        self._are_losses_read, self._have_losses_no_graph = True, False
        self.load, self.num_dropped = None, 0
        self.is_fully_sharded = False
        """Whether `fully_shard_layers` has arranged who reduces the gradients of experts."""
        self.meanwhile: Meanwhile | None = None
        """What the current forward computes while rows travel; a schedule runs it when it has started to send them."""
        if isinstance(self.dispatcher, LocalDispatcher) and gate.num_experts != (here := num_experts_of(experts)):
            raise RoutingError(
                f"the gate routes to num_experts = {gate.num_experts}, but {here} experts are here; give both the same "
                "number, or a dispatcher that reaches the others"
            )

    def run(self, x: Tensor, routing: Routing | SoftRouting | None = None) -> Tensor:
        """Return outputs [..., M] of tokens x [..., M], in x's dtype; any number of tokens, also none.

        torch.compile breaks its graph here for layers over several processes, and compiles the code before and after.

        Args:
            x: the tokens.
            routing: in place of the gate's decision.

        Raises:
            RoutingError: the routing is of other tokens, or is soft where ranks share their tokens before the gate.
        """
        if torch.compiler.is_compiling() and not isinstance(self.dispatcher, LocalDispatcher):
            return _run_uncompiled(self, x, routing)
        if self.hooks:
            x = self._call("before_start", x)
        tokens = x.reshape(-1, x.shape[-1])
        shares = self.dispatcher if isinstance(self.dispatcher, SharesTokens) else None
        if routing is not None and routing.num_tokens != len(tokens):
            raise RoutingError(
                f"routing is of {routing.num_tokens} tokens, but {type(self.dispatcher).__name__} gets {len(tokens)};"
                " route the tokens that come"
            )
        share = None
        if shares is not None:
            if isinstance(routing, SoftRouting):
                raise RoutingError(
                    f"routing is soft, but {type(self.dispatcher).__name__} shares tokens before the gate; use path s2"
                )
            share = shares.route(self.gate, tokens) if routing is None else shares.share(tokens, routing)
        routed = share or RoutedTokens(tokens, self.gate(tokens) if routing is None else routing)
        if self.hooks:
            routed = self._call("before_dispatch", routed)
        self._record(routed.routing)
        own = None
        if self.shared is not None and self.overlap_shared and not has_active_dropout(self.shared):
            self.meanwhile = own = Meanwhile(partial(self.shared, x))
        try:
            if isinstance(soft := routed.routing, SoftRouting):
                out = soft.unmix(self._scheduled(soft.mix(routed.x), soft.slots()))
            else:
                out = self._scheduled(routed.x, soft)
        finally:
            self.meanwhile = None
        if shares is not None and share is not None:
            out = shares.restore(out, share)
        if self.hooks:
            out = self._call("after_combine", out)
        out = out.reshape(*x.shape[:-1], out.shape[-1]).to(x.dtype)  # under autocast experts have another dtype
        if self.shared is not None:
            out = out + (self.shared(x) if own is None else own.run())
        return self._call("after_end", out) if self.hooks else out

    forward = run

    def compute(self, inputs: ExpertRows, experts: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
        """Return outputs [q, M] of the experts, or of `experts` in their place, with the hooks before and after."""
        if self.hooks:
            inputs = self._call("after_dispatch", inputs)
        mean = None if experts is not None else self.mean_of_forward()
        run = experts or (self.experts if mean is None else partial(mean.call, self.experts))
        rows = run(inputs.rows, inputs.counts)
        return self._call("before_combine", ExpertRows(rows, inputs.counts)).rows if self.hooks else rows

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters, as of any module, unless DDP or FSDP asks for experts of which processes have others.

        Raises:
            ConfigError: one of them does, over the processes that rows travel between.
        """
        if not (self.is_known_to_hosts or self.is_fully_sharded):
            peers = {rank for group in getattr(self.dispatcher, "groups", ()) for rank in ranks_of(group)}
            peers -= {dist.get_rank()} if peers else set()
            if peers:
                check_not_wrapped(self.experts.parameters(), peers)
        return super().named_parameters(*args, **kwargs)

    @property
    def losses(self) -> dict[str, Tensor]:
        """Auxiliary losses of the last forward, by name; scalars with a graph, to be added to the training loss.

        Raises:
            RoutingError: a reentrant checkpoint ran the layer, so that they have no graph, and gradients are on.
        """
        if self._have_losses_no_graph and torch.is_grad_enabled():
            raise RoutingError(
                f"a reentrant checkpoint ran the layer, so its losses ({', '.join(self._losses)}) have no gradient and"
                " would train nothing; checkpoint with use_reentrant=False, or read them under torch.no_grad()"
            )
        self._are_losses_read = True
        return self._losses

    @losses.setter
    def losses(self, losses: dict[str, Tensor]) -> None:
        self._losses = losses

    def mean_of_forward(self) -> ExpertMean | None:
        """Return what reduces the gradients of experts in the backward of the current forward, if anything does."""
        return None

    def by_slot(self, routing: Routing) -> Routing:
        """Return a routing with experts numbered by their slots, those of copies included."""
        copies = getattr(self.placement, "copies", None)
        if copies is not None:
            found: Routing = copies.routing(routing)
            return found
        return routing if self.placement is None else replace(routing, experts=self.placement(routing.experts))

    def run_whole(
        self, x: Tensor, routing: Routing, experts: Callable[[Tensor, Tensor], Tensor] | None = None
    ) -> Tensor:
        """Dispatch, compute and combine, one after the other: `Schedule.run` without a schedule."""
        if self.meanwhile is None or not isinstance(self.dispatcher, StartsDispatch):
            dispatched = self.dispatcher.dispatch(x, routing, self.order)
        else:
            started = self.dispatcher.start(x, routing, self.order)
            try:
                self.meanwhile.run()
            except BaseException:
                started.abandon()
                raise
            dispatched = started.finish()
        return self.dispatcher.combine(self.compute(dispatched, experts), dispatched)

    def _scheduled(self, x: Tensor, routing: Routing) -> Tensor:
        routing = self.by_slot(routing)
        if (copies := getattr(self.placement, "copies", None)) is not None:
            return self.run_whole(*copies.begin(self, x, routing))
        return self.run_whole(x, routing) if self.schedule is None else self.schedule.run(self, x, routing)

    def _record(self, routing: Routing | SoftRouting) -> None:
        self._have_losses_no_graph = False
        if routing.losses and self.training and self.gate.training and not torch.compiler.is_compiling():
            self._check_losses(", ".join(routing.losses))
        self._losses = dict(routing.losses)
        if isinstance(routing, Routing):
            self.load, self.num_dropped = routing.counts(), routing.num_dropped
        else:
            self.load, self.num_dropped = routing.slots().counts(), 0

    def _check_losses(self, names: str) -> None:
        """Warn of losses that train nothing, and note whether these can."""
        self._have_losses_no_graph = runs_without_graph_first()
        is_first = torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1  # not a run in backward
        if is_first and not self._are_losses_read:
            warnings.warn(
                f"a MoELayer runs again before anybody has read the losses of its last run ({names}), which train"
                " nothing then; where one forward runs a layer several times, add up layer.losses after each, as in the"
                " after_end of a hook",
                stacklevel=2,
            )
        self._are_losses_read = not is_first

    def _call(self, place: str, flowing: T) -> T:
        for hook in self.hooks:
            changed = getattr(hook, place)(self, flowing)
            flowing = flowing if changed is None else changed
        return flowing

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without tensors of the last forward: with a graph they can be neither copied nor pickled."""
        return {**self.__dict__, "_losses": {}, "load": None, "meanwhile": None}


@torch.compiler.disable
def _run_uncompiled(layer: MoELayer, x: Tensor, routing: Routing | SoftRouting | None) -> Tensor:
    return layer.run(x, routing)


def has_active_dropout(module: nn.Module) -> bool:
    """Return whether a layer of dropout in `module` draws random numbers as things are."""
    return any(isinstance(one, _DropoutNd) and one.training and one.p > 0 for one in module.modules())


def num_experts_of(experts: nn.Module) -> int:
    """Return `experts.num_experts`, or for other modules the first dimension of the first parameter, if any."""
    number = getattr(experts, "num_experts", None)
    if isinstance(number, int):
        return number
    first = next(experts.parameters(), None)
    if first is None or first.dim() == 0:
        raise RoutingError(f"{type(experts).__name__} does not say how many experts it holds; give it num_experts")
    return first.shape[0]


def moe_layers(model: nn.Module) -> dict[str, MoELayer]:
    """Return all layers of `model` by name, in the order of its modules.

    Those of `parallelize` have the names of the experts that they serve.
    """
    found = {}
    for name, module in model.named_modules():
        layer = module if isinstance(module, MoELayer) else module.__dict__.get("layer")
        if isinstance(layer, MoELayer):
            found[name] = layer
    return found


def auxiliary_losses(model: nn.Module) -> Mapping[str, Tensor]:
    """Sum the losses that the layers of `model` left in their last forward, by name; empty if there are none."""
    sums: dict[str, Tensor] = {}
    for layer in moe_layers(model).values():
        for name, loss in layer.losses.items():
            sums[name] = sums[name] + loss if name in sums else loss
    return sums
