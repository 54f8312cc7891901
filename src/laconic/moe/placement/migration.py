"""Migration of experts: weights and optimizer state move in one batch of point-to-point messages.

[Note: moving is all or nothing]
Ranks first check that they agree on the move and on the tensors. Then all that leaves a rank goes to each receiver in
one message, of all layers together, into buffers beside the experts. Only when every rank has confirmed that it
received everything do weights, state and placements change, by local copies. A rank that is lost before that leaves the
others as they were; files are in logical order at any time, because checkpoints are written in no other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from laconic.collectives.codec import bytes_of
from laconic.collectives.engine.handshake import difference_in_group
from laconic.collectives.runtime import torch_compat
from laconic.collectives.runtime.failure_diagnosis import losses_named
from laconic.collectives.runtime.group_facts import registered_ranks
from laconic.errors import CheckpointError, ConfigError
from laconic.formats import quantized_gradient
from laconic.formats.shards import has_inner_tensors, local_part
from laconic.moe.dispatch.staged import experts_of, experts_per_rank
from laconic.moe.layer import MoELayer
from laconic.moe.placement.expert_map import Placement, placement_of


@dataclass(frozen=True)
class Moved:
    """Result of one move."""

    num_experts: int
    """Experts that changed their slot, over all layers."""
    sent_nbytes: int
    """Bytes that this rank sent to others."""
    received_nbytes: int
    """Bytes received from others."""


class ExpertMover:
    """Moves the experts of layers between the ranks of an expert-parallel group; outputs stay what they were.

    Gradients move too. All ranks of the groups call each method together, between steps.

    Args:
        layers: MoELayers; one without a placement gets a Placement. Parameters of their experts begin with the
            dimension of the local experts.
        group: the expert-parallel group, `Grid.ep`; None for a single process.
        optimizers: those that have the experts' parameters. Tensors of their state move along and must begin with that
            dimension too; scalars such as the number of steps must be the same on all ranks. While experts are
            elsewhere their state dicts are refused, as the model's are.
        replicas: the ranks with the same experts, `Grid.edp`, whose gradients are added: they have to move alike.

    Raises:
        ConfigError: a layer has a placement of another kind, or a tensor cannot be split by expert.
    """

    def __init__(
        self,
        layers: Sequence[MoELayer],
        group: dist.ProcessGroup | None = None,
        optimizers: Sequence[Optimizer] = (),
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        self.layers, self.group, self.optimizers = tuple(layers), group, tuple(optimizers)
        self.replicas = replicas
        if not self.layers:
            raise ConfigError("layers are empty, but there must be experts to move; give at least one MoELayer")
        self._rank, self._world = (0, 1) if group is None else (group.rank(), group.size())
        for number, layer in enumerate(self.layers):
            placement = placement_of(layer, number)
            if placement.num_experts < self._world:
                raise ConfigError(
                    f"layer {number} has {placement.num_experts} experts, but the {self._world} ranks of the group need"
                    " at least one each"
                )
            self._tensors(number)
        self._loads = {id(one): self._num_loads() for one in self.optimizers}
        """Loads of weights by which experts had gone home when the optimizer's state was loaded or taken over."""
        for one in self.optimizers:
            one.register_state_dict_pre_hook(self._refuse_unless_home)
            one.register_load_state_dict_pre_hook(self._refuse_unless_home)
            one.register_load_state_dict_post_hook(self._note_load)
            one.register_step_pre_hook(self._refuse_state_of_others)

    def placement(self, number: int) -> Placement:
        """Return the placement of layer `number`."""
        placement = self.layers[number].placement
        assert isinstance(placement, Placement)
        return placement

    def expert_nbytes(self, number: int) -> int:
        """Count the bytes that move with one expert of layer `number`: weights, gradients and state as they are now."""
        parts = self._tensors(number).values()
        return sum(math.prod(part.shape[1:]) * part.itemsize for part in parts)

    def expert_numel(self, number: int) -> int:
        """Count the parameters of one expert of layer `number`."""
        parameters = dict(self.layers[number].experts.named_parameters())
        return sum(math.prod(part.shape[1:]) for name, part in self._tensors(number).items() if name in parameters)

    def swap(self, pairs: Sequence[tuple[int, int] | None]) -> Moved:
        """Exchange two experts (logical numbers) of each layer; None leaves a layer as it is.

        Raises:
            RoutingError: an expert does not exist.
            ConfigError, CollectiveError: as in `move`.
        """
        placements = map(self.placement, range(len(self.layers)))
        return self.move(
            [None if pair is None else one.swapped(*pair) for one, pair in zip(placements, pairs, strict=True)]
        )

    def move(self, slots: Sequence[Tensor | None]) -> Moved:
        """Move the experts of each layer to new slots, int64 [E] as `Placement.slots`; None leaves a layer as it is.

        Nothing has changed here if it raises.

        Raises:
            RoutingError: slots are no permutation.
            ConfigError: on every rank, if ranks differ in the move.
            CollectiveError: a rank is lost.
        """
        if len(slots) != len(self.layers):
            raise ConfigError(
                f"slots are those of {len(slots)} layers, but there are {len(self.layers)}; give one each"
            )
        targets = []
        for number, wanted in enumerate(slots):
            placement = self.placement(number)
            if wanted is not None:
                placement.check(wanted)
            targets.append(placement.slots if wanted is None else wanted.to(placement.slots.device))
        routes = [list(self._route(number, target)) for number, target in enumerate(targets)]
        if not self._agree(targets):
            return Moved(0, 0, 0)
        with torch.no_grad():
            outgoing, incoming = self._packed(routes)
            self._exchange(outgoing, incoming)
            for put in self._unpacked(routes, incoming):
                put()
        for number, target in enumerate(targets):
            self.placement(number).put(target)
        return Moved(
            sum(map(len, routes)),
            sum(buffer.nbytes for peer, buffer in outgoing.items() if peer != self._rank),
            sum(buffer.nbytes for peer, buffer in incoming.items() if peer != self._rank),
        )

    def bring_home(self) -> Moved:
        """Move every expert to the slot of its own number."""
        return self.move([torch.arange(self.placement(i).num_experts, device="cpu") for i in range(len(self.layers))])

    @contextmanager
    def logical_order(self) -> Iterator[None]:
        """Keep experts in logical order inside the block and restore their slots after it: for checkpoints.

        If the block raises, they stay in logical order.
        """
        before = [self.placement(number).slots.clone() for number in range(len(self.layers))]
        self.bring_home()
        yield
        self.move(before)

    # --- state dicts of optimizers ---

    def _num_loads(self) -> int:
        return sum(self.placement(number).num_loads for number in range(len(self.layers)))

    def _refuse_unless_home(self, optimizer: Optimizer, *_: Any) -> None:
        if not all(self.placement(number).is_identity for number in range(len(self.layers))):
            raise CheckpointError(
                f"experts have changed places, and the state of {type(optimizer).__name__} with them, but a state dict"
                " has them in logical order; take it, or load it, inside of ExpertMover.logical_order(), or load the"
                " model's first"
            )

    def _note_load(self, optimizer: Optimizer) -> None:
        self._loads[id(optimizer)] = self._num_loads()

    def _refuse_state_of_others(self, optimizer: Optimizer, *_: Any) -> None:
        experts = [p for layer in self.layers for p in layer.experts.parameters()]
        if self._loads[id(optimizer)] == self._num_loads() or not any(optimizer.state.get(p) for p in experts):
            return
        raise CheckpointError(
            "weights were loaded while experts had changed places, so they are in logical order again, but the state of"
            f" {type(optimizer).__name__} is that of other experts; load its state dict as well, or clear its state"
        )

    # --- tensors to move ---

    def _per_rank(self, number: int) -> int:
        return experts_per_rank(self.placement(number).num_experts, self._world)

    def _tensors(self, number: int) -> dict[str, Tensor]:
        """Return all tensors of the experts here, by name; [E_local, ...] each."""
        experts = self.layers[number].experts
        found: dict[str, Tensor] = {}
        for name, parameter in experts.named_parameters():
            if quantized_gradient(parameter) is not None:
                raise ConfigError(
                    f"{name} of layer {number} has a quantized gradient, which cannot be split by expert; move experts"
                    " after zero_grad()"
                )
            found[name] = parameter
            if parameter.grad is not None:
                found[f"{name}.grad"] = parameter.grad
            for key, value in self._state(parameter).items():
                if not _is_known(value):
                    raise ConfigError(
                        f"{key} of the optimizer's state of {name} in layer {number} is a {type(value).__name__}, which"
                        " cannot be split by expert, so it would stay behind; take an optimizer whose state is plain"
                        " tensors and numbers, as torch.optim.AdamW and laconic.optim.AdamW8bit"
                    )
                if isinstance(value, Tensor) and value.dim() > 0 and value.numel() != 1:
                    found[f"{name}.{key}"] = value
        local = len(experts_of(self._rank, self.placement(number).num_experts, self._world))
        for name, buffer in experts.named_buffers():
            if buffer.dim() > 0 and len(buffer) == local:
                found[name] = buffer
        parts = {name: local_part(tensor).detach() for name, tensor in found.items()}
        for name, part in parts.items():
            if part.dim() == 0 or len(part) != local:
                raise ConfigError(
                    f"{name} of layer {number} has shape {list(part.shape)} here, but it must begin with the {local}"
                    " experts of this rank; shard experts along another dimension, or leave this optimizer"
                )
        return parts

    def _state(self, parameter: Tensor) -> dict[str, Any]:
        states = [one.state[parameter] for one in self.optimizers if parameter in one.state]
        return {f"{key} {i}" if i else key: value for i, state in enumerate(states) for key, value in state.items()}

    def _scalars(self, number: int) -> dict[str, float]:
        """Return the state that all experts of a parameter share, such as its number of steps."""
        found = {}
        for name, parameter in self.layers[number].experts.named_parameters():
            for key, value in self._state(parameter).items():
                if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
                    found[f"{name}.{key}"] = float(local_part(value)) if isinstance(value, Tensor) else float(value)
        return found

    def _agree(self, targets: Sequence[Tensor]) -> bool:
        """Return whether anything moves; all ranks must ask for the same, or all refuse."""
        slots = {
            f"the slots of layer {number}": [self.placement(number).slots.tolist(), target.tolist()]
            for number, target in enumerate(targets)
        }
        facts: dict[str, Any] = {**slots}
        for number in range(len(self.layers)):
            for name, part in self._tensors(number).items():
                facts[f"{name} of layer {number}"] = f"{part.dtype} {list(part.shape[1:])}"
            facts |= {f"{name} of layer {number}": value for name, value in self._scalars(number).items()}
        difference: str | None = None
        replicated = self.replicas is not None and self.replicas.size() > 1
        # The error goes to all ranks of the group, so that none of them waits for a rank that has raised.
        for group, mine in ((self.group, facts), (self.replicas, slots), (self.group if replicated else None, {})):
            if group is not None and group.size() > 1:
                found = difference_in_group({**mine, "whether ranks agree": difference is None}, group)
                difference = difference or found
        if difference is not None:
            raise ConfigError(f"{difference}, but experts move only between ranks that agree; nothing has moved")
        return any(not torch.equal(self.placement(number).slots, target) for number, target in enumerate(targets))

    # --- messages ---

    def _route(self, number: int, target: Tensor) -> Iterator[tuple[int, int]]:
        """Yield (from slot, to slot) of the experts that move, the same list on every rank."""
        for was, will in zip(self.placement(number).slots.tolist(), target.tolist(), strict=True):
            if was != will:
                yield was, will

    def _packed(self, routes: Sequence[list[tuple[int, int]]]) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Return by peer the bytes to send and buffers for those to receive; this rank's own are one buffer."""
        parts: dict[int, list[Tensor]] = {}
        sizes: dict[int, int] = {}
        device = self.placement(0).slots.device
        for number, route in enumerate(routes):
            local, tensors = self._per_rank(number), self._tensors(number).values()
            expert_nbytes = self.expert_nbytes(number)
            for was, will in route:
                if was // local == self._rank:
                    leaving = [bytes_of(tensor[was % local].contiguous()).to(device) for tensor in tensors]
                    parts.setdefault(will // local, []).extend(leaving)
                if will // local == self._rank:
                    sizes[was // local] = sizes.get(was // local, 0) + expert_nbytes
        outgoing = {peer: torch.cat(pieces) for peer, pieces in parts.items()}
        incoming = {peer: torch.empty(size, dtype=torch.uint8, device=device) for peer, size in sizes.items()}
        if self._rank in incoming:
            incoming[self._rank] = outgoing[self._rank]
        return outgoing, incoming

    def _exchange(self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> None:
        if self.group is None or self._world == 1:
            return
        ranks = registered_ranks(self.group)
        operations = [
            dist.P2POp(call, buffer, ranks[peer], self.group)
            for call, buffers in ((dist.isend, outgoing), (dist.irecv, incoming))
            for peer, buffer in buffers.items()
            if peer != self._rank
        ]
        remedy = "none has moved here, go on from the last checkpoint"
        with losses_named(lambda: ranks, "while experts moved", remedy):
            for work in torch_compat.batch_isend_irecv(operations) if operations else ():
                work.wait()
            received: list[bool] = [False] * self._world
            dist.all_gather_object(received, True, group=self.group)

    def _unpacked(
        self, routes: Sequence[list[tuple[int, int]]], incoming: dict[int, Tensor]
    ) -> list[Callable[[], object]]:
        """Return the copies that write the received bytes to their slots."""
        copies: list[Callable[[], object]] = []
        at = dict.fromkeys(incoming, 0)
        for number, route in enumerate(routes):
            local, tensors = self._per_rank(number), self._tensors(number).values()
            for was, will in route:
                if will // local != self._rank:
                    continue
                source = was // local
                for tensor in tensors:
                    target = tensor[will % local]
                    piece = incoming[source][at[source] : at[source] + target.nbytes]
                    at[source] += target.nbytes
                    copies.append(_copy(target, piece))
        return copies


def _copy(target: Tensor, piece: Tensor) -> Callable[[], object]:
    # Cloned: a view of bytes as numbers needs an aligned start.
    return lambda: target.copy_(piece.clone().view(target.dtype).view(target.shape))


def _is_known(value: Any) -> bool:
    """Return whether state of an optimizer is plain tensors and numbers, which can move."""
    if isinstance(value, Tensor):
        return not has_inner_tensors(value)
    return value is None or isinstance(value, bool | int | float | str)
