"""Layers of experts against every token on its own, whether their experts are in one process or on several ranks.

While a forward runs, each layer's tokens of a sample, their routing and its outputs for them are noted. Afterwards each
of these tokens passes its experts alone: one expert at a time, whose weights are cut out of the layer's, with the
weights that the gate gave it. Then the layer runs on the sample once more, with a backward, and the gradients of its
tokens, of the gate's weights and of each expert are compared with those of the experts alone.

[Note: over ranks]
Where experts lie on several ranks no weight travels. The ranks that hold all experts once gather each other's sample,
each computes what its own experts make of it, and the parts are added up by plain collectives of torch, so that nothing
of laconic's dispatch takes part in what is expected. A rank then holds, for W ranks and tokens of M values, at most
64 W tokens: 64 W (2 M itemsize + 12 M + 8) bytes (their values and cotangents; outputs and gradients in fp32), and the
gradient of one expert beside that of the layer. All ranks of the audit meet layer by layer, in the order of the model's
modules, whatever one of them finds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from laconic.activations.host.audited import in_an_audit, running_originals
from laconic.auditing.comparison import TOLERANCE, relative_error
from laconic.auditing.experts_ranks import ExpertRanks, gathered, ranks_of_experts, summed
from laconic.auditing.replicated import is_sharded_by_fsdp
from laconic.auditing.state import ModelState
from laconic.collectives.runtime.group_facts import ranks_of
from laconic.errors import AuditError
from laconic.formats.shards import local_part
from laconic.moe.dispatch.staged import experts_per_rank
from laconic.moe.hooks import Hook
from laconic.moe.huggingface.layer import ExpertsLayer
from laconic.moe.layer import MoELayer, has_active_dropout, moe_layers, num_experts_of
from laconic.moe.routing import Routing

_FIRST_TOKENS = 8
_MAX_TOKENS = 64
_MAX_VALUES = 1 << 16
"""Of a parameter of an expert whose gradient replicas average."""
_OUTPUT_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2.0**-6, torch.bfloat16: 2.0**-5}
"""Of a token's output, relative to the sum of its experts' parts."""
_LOSSY_TOLERANCE = 2.0**-4
"""Where rows travel in codes of eight bits, each of which is off by 1/254 of its block's largest."""
_MAX_NAMES = 3


@dataclass(frozen=True, eq=False)
class _Noted:
    x: Tensor
    """[n, M]."""
    routing: Routing
    """Of these n tokens, to logical experts."""
    out: Tensor
    """[n, M]."""
    cast: Callable[[], AbstractContextManager[Any]]
    """The autocast of the call."""


class ExpertsWatch:
    """Layers that were called, and what was found.

    Attributes:
        num_compared: layers whose outputs were compared.
        left_out: why some layers, or their gradients, were not.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers = moe_layers(model)
        self._noted: dict[str, _Noted] = {}
        self.num_compared = 0
        self.left_out: list[str] = []

    def note(self, name: str, layer: MoELayer, x: Tensor, routing: Routing, out: Tensor) -> None:
        """Keep a sample of a call; further calls of the layer, and those that run again in backward, are not noted."""
        if name in self._noted or torch._C._current_graph_task_id() != -1:
            return
        chosen = _sample(routing)
        kind = x.device.type
        cast = partial(
            torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False
        )
        self._noted[name] = _Noted(
            x.detach()[chosen].clone(), _part(routing, chosen), out.detach()[chosen].clone(), cast
        )

    def compare(self, members: Sequence[int] | None) -> None:
        """Compare what was noted; all ranks of the audit call it together, after the same run.

        Args:
            members: ranks of the audit, by their global numbers; None if each decides alone.

        Raises:
            AuditError: an output or a gradient differs, on this rank. All its collectives are over then.
        """
        faults: list[str] = []
        state = ModelState(self._model)
        try:
            with running_originals(), in_an_audit():
                for name, layer in self._layers.items():
                    ranks = self._place_of(name, layer, members)
                    if ranks is not None:
                        with _running(layer):
                            faults += self._compare(name, layer, ranks)
        finally:
            state.restore()
        if faults:
            more = f"; and {len(faults) - _MAX_NAMES} more" if len(faults) > _MAX_NAMES else ""
            raise AuditError("; ".join(faults[:_MAX_NAMES]) + more)

    def _place_of(self, name: str, layer: MoELayer, members: Sequence[int] | None) -> ExpertRanks | None:
        """Where its experts are; None if it is left out, alike on all ranks."""
        why = None
        ranks = ranks_of_experts(layer.dispatcher)
        if ranks is None:
            why = f"whose {type(layer.dispatcher).__name__} is not laconic's"
        elif ranks.groups and members is None:
            why = "over ranks that do not decide together"
        elif any(not {*ranks_of(group)} <= {*(members or ())} for group in ranks.groups):
            why = "over ranks that are not all in the audit"
        elif ranks.is_coarse:
            why = "whose rows travel in codes of fewer than eight bits"
        elif has_active_dropout(layer.experts):
            why = "with dropout in its experts"
        elif any(_sees_rows(hook) for hook in layer.hooks):
            why = "whose hooks may change rows"
        elif _is_sharded_outside(layer):
            why = "whose experts are sharded with other parameters"
        if why is None:
            assert ranks is not None
            called = summed(
                ranks.groups, torch.tensor(float(name in self._noted), device=_device(layer), dtype=torch.float32)
            )
            if float(called) == ranks.size:
                return ranks
            why = "as it was not called" if not float(called) else "as it was not called on all ranks"
        self.left_out.append(f"the layer of experts {name}, {why}")
        return None

    def _compare(self, name: str, layer: MoELayer, ranks: ExpertRanks) -> list[str]:
        noted = self._noted[name]
        why = _no_gradients(layer, ranks)
        if why is not None:
            self.left_out.append(f"gradients of the layer of experts {name}, {why}")
        with noted.cast():
            alone = _Alone(layer, ranks, noted, why is None)
            made = None if why is not None else _backward(layer, noted, alone.own_cotangents)
            averaged = made is not None and _averages(layer)
            faults = alone.faults_of_gradients(made, averaged) if made is not None else []
        self.num_compared += 1
        return [f"the layer of experts {name!r} {fault}" for fault in [*alone.faults_of_outputs(), *faults]]


@contextmanager
def watching_experts(model: nn.Module) -> Iterator[ExpertsWatch]:
    """Note a sample of the first call of each layer of experts while the block runs; `ExpertsWatch.compare` is next."""
    watch = ExpertsWatch(model)
    changed = []
    for name, layer in moe_layers(model).items():
        own = layer._scheduled

        def scheduled(x: Tensor, routing: Routing, layer: MoELayer = layer, name: str = name, own: Any = own) -> Tensor:
            out: Tensor = own(x, routing)
            watch.note(name, layer, x, routing, out)
            return out

        layer.__dict__["_scheduled"] = scheduled
        changed.append(layer)
    try:
        yield watch
    finally:
        for layer in changed:
            layer.__dict__.pop("_scheduled", None)


@contextmanager
def _running(layer: MoELayer) -> Iterator[None]:
    """Let calls of the experts be those with rows and counts, as while the layer runs."""
    if not isinstance(layer, ExpertsLayer):
        yield
        return
    before, layer.is_running = layer.is_running, True
    try:
        yield
    finally:
        layer.is_running = before


class _Alone:
    """What the experts of a layer, each alone, make of the sample of all ranks."""

    def __init__(self, layer: MoELayer, ranks: ExpertRanks, noted: _Noted, differentiates: bool) -> None:
        x, routing = noted.x, noted.routing
        self._layer, self._noted = layer, noted
        slots = routing.experts if layer.placement is None else layer.placement(routing.experts)

        # 1. The sample of all ranks, by rank.
        sizes = gathered(torch.tensor([[len(x), len(slots)]], device=x.device), ranks.groups)
        self._here = ranks.index
        tokens, entries = sizes.unbind(1)
        first_token, first_entry = tokens.cumsum(0) - tokens, entries.cumsum(0) - entries
        self._tokens = slice(int(first_token[self._here]), int(first_token[self._here]) + len(x))
        self._entries = slice(int(first_entry[self._here]), int(first_entry[self._here]) + len(slots))
        every_x = gathered(x, ranks.groups, tokens)
        ids = gathered(torch.stack([routing.tokens + first_token[self._here], slots], 1), ranks.groups, entries)
        weights = gathered(routing.weights.detach()[:, None], ranks.groups, entries)[:, 0]
        generator = torch.Generator().manual_seed(2612)
        num_tokens, width, out_width = *every_x.shape, noted.out.shape[1]
        self._cotangents = torch.randn(
            num_tokens, out_width, generator=generator, dtype=torch.float32, device="cpu"
        ).to(every_x.device, every_x.dtype)
        self.own_cotangents = self._cotangents[self._tokens]

        # 2. What this rank's experts make of it, one after the other.
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        parts = torch.zeros(num_tokens, out_width + width + 2, dtype=wide, device=x.device)
        of_weights = torch.zeros(len(weights), dtype=wide, device=x.device)
        self.gradients: list[dict[str, Tensor]] = []
        """Of each expert of this rank, by the names of its parameters; [1, ...] each."""
        most = experts_per_rank(routing.num_experts, ranks.num_places)
        self.first = ranks.place * most
        for number in range(num_experts_of(layer.experts)):
            mine = (ids[:, 1] == self.first + number).nonzero().flatten()
            token, weight = ids[mine, 0], weights[mine].to(wide)[:, None]
            rows, cotangent = every_x[token], self._cotangents[token].to(wide)
            out, of_rows, of_parameters = _of_one(layer.experts, number, rows, cotangent * weight, differentiates)
            part = out.to(wide)
            of_weights[mine] = (part * cotangent).sum(-1)
            weighed = part * weight
            of_rows = torch.zeros_like(rows, dtype=wide) if of_rows is None else of_rows.to(wide)
            norms = torch.stack([weighed.norm(dim=-1), of_rows.norm(dim=-1)], 1)
            parts.index_add_(0, token, torch.cat([weighed, of_rows, norms], 1))
            if of_parameters is not None:
                self.gradients.append(of_parameters)
        parts, of_weights = summed(ranks.groups, parts), summed(ranks.groups, of_weights)
        own = parts[self._tokens]
        self._outputs, self._of_x, self._sizes = own.split([out_width, width, 2], 1)
        self._of_weights = of_weights[self._entries]
        self._is_lossy = ranks.is_lossy

    def faults_of_outputs(self) -> list[str]:
        """Whether the layer gave what its experts give alone."""
        noted = self._noted
        tolerance = max(_OUTPUT_TOLERANCE.get(dtype, 2.0**-5) for dtype in (noted.x.dtype, noted.out.dtype))
        tolerance = max(tolerance, _LOSSY_TOLERANCE if self._is_lossy else 0.0)
        off = self._off(noted.out, self._outputs, self._sizes[:, 0], tolerance)
        if not bool(off.any()):
            return []
        token = int(off.argmax())
        return [
            f"does not give what every token gets from its experts alone: {int(off.count_nonzero())} of {len(off)} "
            f"tokens are off, token {token} by {float(off[token]):.2g}{self._experts_of(off)}; likely causes: an expert"
            " that was skipped, a row that reached another expert, token or rank, weights of another assignment, a "
            "factor of the number of ranks"
        ]

    def faults_of_gradients(self, made: _Gradients, averaged: bool) -> list[str]:
        """Whether the layer's backward gives the gradients of its experts alone.

        Args:
            averaged: whether it averages gradients of experts over their replicas, as DDP does those of the others.
        """
        dtypes = {self._noted.x.dtype, self._noted.out.dtype}
        tolerance = max(TOLERANCE.get(dtype, 2.0**-3) for dtype in dtypes)
        tolerance = max(tolerance, _LOSSY_TOLERANCE if self._is_lossy else 0.0)
        found = []
        off = self._off(made.of_x, self._of_x, self._sizes[:, 1], tolerance)
        if bool(off.any()):
            slope = relative_error(made.of_x, self._of_x, 0.0)[1]
            found.append(
                f"has another gradient of its input than its experts alone: {int(off.count_nonzero())} of {len(off)} "
                f"tokens are off, by {float(off.max()):.2g}, {slope:.3f} times as large{self._experts_of(off)}"
            )
        scale = float(self._of_weights.norm()) / math.sqrt(max(1, len(self._of_weights)))
        error, slope = relative_error(made.of_weights, self._of_weights, scale)
        if not error <= tolerance:
            found.append(
                f"gives the gate {slope:.3f} times the gradient that its experts give alone, off by {error:.2g}"
            )
        return [*found, *self._faults_of_experts(made, averaged, tolerance)]

    def _faults_of_experts(self, made: _Gradients, averaged: bool, tolerance: float) -> list[str]:
        layer: Any = self._layer
        grid = layer._own_replicas if averaged else None
        found = []
        for number, expected in enumerate(self.gradients if any(self.gradients) else ()):
            wanted = {name: _values(gradient) for name, gradient in expected.items()}
            if grid is not None:
                together = torch.cat([*wanted.values()])
                if grid.layout.edp > 1:
                    dist.all_reduce(together, group=grid.edp)
                together /= grid.layout.dp
                sizes = [len(one) for one in wanted.values()]
                wanted = dict(zip(wanted, together.split(sizes), strict=True))
            total = sum(float(one.double().square().sum()) for one in wanted.values())
            scale = math.sqrt(total / max(1, sum(len(one) for one in wanted.values())))
            for name, values in wanted.items():
                whole = made.of_experts.get(name)
                got = torch.zeros_like(values) if whole is None else _values(whole[number : number + 1])
                error, slope = relative_error(got, values, scale)
                if not error <= tolerance:
                    found.append(
                        f"gives expert {self._logical(self.first + number)} {slope:.3f} times the gradient of {name} "
                        f"that its rows of all ranks give it, off by {error:.2g}; likely causes: rows of a rank left "
                        "out or counted twice, a factor of the number of ranks, replicas that are not averaged, or "
                        "twice"
                    )
        return found

    def _off(self, got: Tensor, expected: Tensor, sizes: Tensor, tolerance: float) -> Tensor:
        """By how much of its size each token is off, [n]; 0 where that is within the tolerance, or not finite."""
        errors = (got.to(expected.dtype) - expected).norm(dim=-1)
        off = errors / (sizes + 1e-30)
        is_off = errors > tolerance * sizes + 1e-6 * tolerance
        is_off |= got.isfinite().all(-1) != expected.isfinite().all(-1)
        return torch.where(is_off, off.nan_to_num(math.inf), torch.zeros_like(off))

    def _experts_of(self, off: Tensor) -> str:
        """The experts whose tokens are off most often, in words."""
        routing = self._noted.routing
        if not len(routing):
            return ""
        of_entry = (off[routing.tokens] > 0).double()
        counts = routing.counts().double()
        shares = torch.zeros_like(counts).index_add_(0, routing.experts, of_entry) / counts.clamp(min=1)
        worst = (shares >= float(shares.max()) - 1e-9).nonzero().flatten().tolist()
        names = ", ".join(map(str, worst[:_MAX_NAMES])) + (", ..." if len(worst) > _MAX_NAMES else "")
        return f" (most of those of expert{'s' if len(worst) > 1 else ''} {names})"

    def _logical(self, slot: int) -> int:
        if self._layer.placement is None:
            return slot
        numbers = torch.arange(self._noted.routing.num_experts, device=self._noted.x.device)
        return int((self._layer.placement(numbers) == slot).nonzero()[0])


@dataclass(frozen=True, eq=False)
class _Gradients:
    """Those of a layer on its sample: of x [n, M], of the gate's weights [a], and of this rank's experts by name."""

    of_x: Tensor
    of_weights: Tensor
    of_experts: dict[str, Tensor | None]


def _backward(layer: MoELayer, noted: _Noted, cotangents: Tensor) -> _Gradients:
    """Run the layer on its sample, forward and backward, as under DDP."""
    any_layer: Any = layer
    x, weights = noted.x.detach().requires_grad_(), noted.routing.weights.detach().requires_grad_()
    parameters = {name: p for name, p in layer.experts.named_parameters() if p.requires_grad}
    has_mode = isinstance(layer, ExpertsLayer)
    before = (any_layer.ran_under_ddp, any_layer.is_running) if has_mode else None
    try:
        if has_mode:
            any_layer.ran_under_ddp, any_layer.is_running = True, True
        with torch.enable_grad():
            out = layer._scheduled(x, replace(noted.routing, weights=weights))
            found = torch.autograd.grad(
                out, [x, weights, *parameters.values()], cotangents.to(out.dtype), allow_unused=True
            )
    finally:
        if before is not None:
            any_layer.ran_under_ddp, any_layer.is_running = before
    of_x, of_weights, *others = (None if one is None else local_part(one) for one in found)
    return _Gradients(
        torch.zeros_like(x) if of_x is None else of_x,
        torch.zeros_like(weights) if of_weights is None else of_weights,
        dict(zip(parameters, others, strict=True)),
    )


def _of_one(
    experts: nn.Module, number: int, rows: Tensor, cotangent: Tensor, differentiates: bool
) -> tuple[Tensor, Tensor | None, dict[str, Tensor] | None]:
    """Outputs of one expert for rows [q, M]; with `differentiates` the gradients of rows and of its parameters."""
    parameters = _cut_out(experts, number)
    if parameters is None or not differentiates:
        with torch.no_grad():
            if parameters is None:
                counts = torch.zeros(num_experts_of(experts), dtype=torch.int64, device=rows.device)
                counts[number] = len(rows)
                return experts(rows, counts), None, None
            return _called(experts, parameters, rows), None, None
    wanted = {name: p for name, p in experts.named_parameters() if p.requires_grad}
    with torch.enable_grad():
        rows = rows.detach().requires_grad_()
        leaves = {name: one.detach().requires_grad_(name in wanted) for name, one in parameters.items()}
        out = _called(experts, leaves, rows)
        asked = [rows, *(leaves[name] for name in wanted)]
        found: Sequence[Tensor | None] = [None] * len(asked)
        if out.requires_grad:
            found = torch.autograd.grad(out, asked, cotangent.to(out.dtype), allow_unused=True)
    of_rows, *others = (torch.zeros_like(leaf) if one is None else one for leaf, one in zip(asked, found, strict=True))
    return out.detach(), of_rows, dict(zip(wanted, others, strict=True))


def _called(experts: nn.Module, parameters: dict[str, Tensor], rows: Tensor) -> Tensor:
    counts = torch.tensor([len(rows)], device=rows.device)
    out: Tensor = functional_call(experts, parameters, (rows, counts))
    return out


def _cut_out(experts: nn.Module, number: int) -> dict[str, Tensor] | None:
    if getattr(experts, "adapters", ()):
        return None  # PEFT's add to all experts' parameters at once
    if is_sharded_by_fsdp(experts) or any(not name.startswith("placement.") for name, _ in experts.named_buffers()):
        return None
    found = {name: local_part(parameter.detach()) for name, parameter in experts.named_parameters()}
    here = num_experts_of(experts)
    if any(one.dim() == 0 or len(one) != here for one in found.values()):
        return None
    return {name: one[number : number + 1] for name, one in found.items()}


def _no_gradients(layer: MoELayer, ranks: ExpertRanks) -> str | None:
    if not ranks.differ:
        return f"as ranks share tokens in {type(layer.dispatcher).__name__}"
    if is_sharded_by_fsdp(layer.experts):
        return "as FSDP2 shards its experts"
    if num_experts_of(layer.experts) and _cut_out(layer.experts, 0) is None:
        return "as parameters of its experts are not cut by expert"
    return None


def _averages(layer: MoELayer) -> bool:
    """Whether gradients of its experts are averaged in its own backward."""
    return isinstance(layer, ExpertsLayer) and layer._own_replicas is not None and layer.averages_under_ddp


def _sees_rows(hook: Hook) -> bool:
    places = ("after_dispatch", "before_combine")
    return any(getattr(type(hook), place, None) is not getattr(Hook, place) for place in places)


def _is_sharded_outside(layer: MoELayer) -> bool:
    """Whether FSDP2 of a module around the experts shards them, which gathers them in its own forward only."""
    experts = layer.experts
    if is_sharded_by_fsdp(experts):
        return False
    here = num_experts_of(experts)
    sharded = [p for p in experts.parameters() if isinstance(p, DTensor)]
    if not isinstance(layer, ExpertsLayer):
        return bool(sharded)
    return any(len(p.to_local()) * layer.experts.num_global_experts != len(p) * here for p in sharded)


def _device(layer: MoELayer) -> torch.device:
    parameter = next(layer.experts.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def _sample(routing: Routing) -> Tensor:
    """int64 [n], ascending: the first tokens, and one more of each expert that has none of them."""
    number = min(_FIRST_TOKENS, routing.num_tokens)
    first = torch.full((routing.num_experts,), routing.num_tokens, device=routing.tokens.device)
    first.scatter_reduce_(0, routing.experts, routing.tokens, "amin")
    others = first[(first >= number) & (first < routing.num_tokens)].unique()[: _MAX_TOKENS - number]
    return torch.cat([torch.arange(number, device=others.device), others])


def _part(routing: Routing, chosen: Tensor) -> Routing:
    """The routing of some tokens, int64 [n] ascending, numbered anew."""
    places = torch.searchsorted(chosen, routing.tokens)
    kept = (chosen[places.clamp(max=max(0, len(chosen) - 1))] == routing.tokens) if len(chosen) else places.bool()
    index = kept.nonzero().flatten()
    return replace(
        routing,
        tokens=places[index],
        experts=routing.experts[index],
        weights=routing.weights.detach()[index],
        num_tokens=len(chosen),
        losses={},
    )


def _values(gradient: Tensor) -> Tensor:
    """Some values of a gradient, evenly chosen; flat, fp32 (fp64 for fp64)."""
    flat = gradient.detach().reshape(-1)
    flat = flat[:: max(1, -(-len(flat) // _MAX_VALUES))]
    return flat if flat.dtype == torch.float64 else flat.float()
