"""`laconic.audit`: one batch computed exactly and compressed, and what differs refused by name."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.activations.forwards.replacement import check_module
from laconic.activations.whole_model.head import has_chunked_loss
from laconic.activations.whole_model.report import is_out_of_memory
from laconic.activations.whole_model.suspended import is_compressed, unwrapped
from laconic.auditing.batch import first_rows, num_rows
from laconic.auditing.comparison import TOLERANCE, Difference, compare, in_doubles, relative_error, same_bits
from laconic.auditing.gradient_store import check_store
from laconic.auditing.optimizer_update import check_updates
from laconic.auditing.replicated import compare_replicas
from laconic.auditing.runs import Outcome, RunKind, Runs
from laconic.auditing.state import ModelState
from laconic.auditing.training_call import LossOf, TrainingCall, copied, find_loss
from laconic.collectives.runtime.group_facts import check_member, ranks_of
from laconic.errors import AuditError, LaconicError, ModelError
from laconic.gradients import CompressedGradients
from laconic.gradients.turns import owner_of
from laconic.optim import AdamW8bit

if TYPE_CHECKING:
    from laconic.auditing.experts_alone import ExpertsWatch

_ROWS = 2  # norms over the batch need two
_TOKENS = 512
_MAX_NAMES = 4
_MOST_ALLOWED = 2.0**-4
"""Of the error that a gradient may have where rounding alone moves it far."""


@dataclass(frozen=True)
class AuditReport:
    """What an audit compared, all of which was as it has to be; `str` is one line of it.

    Attributes:
        num_parameters: whose gradients were compared.
        loss_bits: whether the losses had the same bits; None where they cannot (a chunked loss, a model that does not
            repeat itself).
        gradient_error: of all compressed gradients together against the exact ones, relative; None if nothing was
            compressed.
        num_updates: parameters whose first updates by AdamW8bit were compared.
        num_stored: parameters whose gradients in codes were.
        num_layers_of_experts: that were compared with every token on its own, wherever their experts are.
        num_replicas: tensors that were compared with those of other ranks.
        seconds: it took.
        left_out: why something, or all, was not compared.
    """

    num_parameters: int = 0
    loss_bits: bool | None = None
    gradient_error: float | None = None
    num_updates: int = 0
    num_stored: int = 0
    num_layers_of_experts: int = 0
    num_replicas: int = 0
    seconds: float = 0.0
    left_out: tuple[str, ...] = ()

    def __str__(self) -> str:
        found = []
        if self.num_parameters:
            bits = {True: "loss bit for bit, ", False: "", None: "loss, "}[self.loss_bits]
            off = "" if self.gradient_error is None else f" (rounding moves them by {100 * self.gradient_error:.2g} %)"
            found.append(f"{bits}gradients of {self.num_parameters} parameters{off}")
        for number, what in (
            (self.num_stored, "gradients in codes"),
            (self.num_updates, "first updates of AdamW8bit"),
            (self.num_layers_of_experts, "layers of experts"),
            (self.num_replicas, "replicated tensors"),
        ):
            if number:
                found.append(f"{number} {what}")
        said = f"as in the exact computation: {', '.join(found)}" if found else "nothing was compared"
        left_out = f"; left out: {', '.join(self.left_out)}" if self.left_out else ""
        return f"audit: {said}{left_out} [{self.seconds:.1f} s]"


def audit(
    model: nn.Module,
    batch: Any,
    *,
    loss_of: LossOf | None = None,
    optimizer: Optimizer | None = None,
    autocast: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
) -> AuditReport:
    """Compare a first step with the exact computation; nothing is changed by it.

    A few rows of the batch run exactly and compressed, from the same random state. Compared are the loss, bit for bit;
    each parameter's gradient, of which docs/reliability.md has the bound, and whether it has one; where gradients are
    held in codes, what the store makes of two micro-batches on all its ranks; two updates of an AdamW8bit; layers of
    experts, also over several ranks, with every token on its own, and their gradients; weights of the ranks of a
    process group. Weights, buffers, gradients, random states, hooks and training modes are as before, bit for bit. It
    takes four forwards and backwards of those rows, and memory for the gradients three times. What torch.compile
    compiled runs as it is written.

    Args:
        model: in training mode, compressed or with gradients in codes; DDP and FSDP2 are served. All ranks call it.
        batch: as in `laconic.advise`: a dict of keyword arguments of the forward, a tuple or list of positional ones,
            or a tensor; on the model's device.
        loss_of: the loss of what the model returns. None takes `output.loss`, or the number that the model returns, or
            its outputs times fixed random numbers.
        optimizer: of the model.
        autocast: dtype of torch.autocast around forward and loss.
        group: the ranks that take one decision; None is the default group, if there is one.

    Returns:
        What was compared; `print` it.

    Raises:
        AuditError: on all ranks: something differs. The message names parameters and likely causes.
        ModelError: the model is no module, or does not run on the batch.
    """
    check_module(model)
    inner = unwrapped(model)

    def loss(rows: int | None) -> Tensor:
        part = TrainingCall(inner, batch if rows is None else first_rows(batch, rows, _TOKENS), loss_of, autocast)
        return part.loss(inner, part.arguments())

    return audit_loss(inner, _cut(loss, batch), optimizer=optimizer, group=group)


def audit_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, agrees: bool) -> AuditReport:
    """`audit` of a call of a model's forward with these arguments, of which some rows are taken.

    Args:
        model: whose forward is called, below wrappers.
        args, kwargs: of the call.
        agrees: whether the ranks of the default group decide together.

    Raises:
        AuditError, ModelError: as `audit`.
    """

    def loss(rows: int | None) -> Tensor:
        given = (args, dict(kwargs)) if rows is None else first_rows((args, dict(kwargs)), rows, _TOKENS)
        found = copied(given)
        with torch.enable_grad():
            return find_loss(model(*found[0], **found[1]))[0]

    return audit_loss(model, _cut(loss, (args, dict(kwargs))), agrees=agrees)


def _cut(loss: Callable[[int | None], Tensor], batch: Any) -> list[Callable[[], Tensor]]:
    size = num_rows(batch)
    return [partial(loss, rows) for rows in ((None,) if size is None or size <= _ROWS else (_ROWS, None))]


def audit_loss(
    model: nn.Module,
    losses: Sequence[Callable[[], Tensor]],
    *,
    optimizer: Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
    agrees: bool = True,
) -> AuditReport:
    """`audit` of a loss that the caller computes.

    Args:
        model: whose parameters have the gradients.
        losses: each runs the forward of a batch in training mode; the first that runs, and is finite, counts.
        optimizer, group: as in `audit`.
        agrees: whether ranks decide, and compare what they hold alike, together.

    Raises:
        AuditError: as `audit`.
    """
    begun = time.perf_counter()
    state = ModelState(model)
    try:
        return _Audit(model, losses, optimizer, group, agrees).report(begun)
    finally:
        state.restore()


class _Audit:
    def __init__(
        self,
        model: nn.Module,
        losses: Sequence[Callable[[], Tensor]],
        optimizer: Optimizer | None,
        group: dist.ProcessGroup | None,
        agrees: bool,
    ) -> None:
        check_member(group)
        self._model, self._losses, self._optimizer, self._group = model, losses, optimizer, group
        self._agrees = agrees and dist.is_available() and dist.is_initialized()
        self._loss = losses[-1]
        self._left_out: list[str] = []
        self._found: dict[str, Any] = {}

    def report(self, begun: float) -> AuditReport:
        """Run and compare; ranks agree before each part in which they meet.

        Raises:
            AuditError: something differs.
        """
        is_ours = is_compressed(self._model)
        if not (is_ours or self._has_more_of_ours):
            self._left_out.append("all, as nothing of laconic's computes here")
            return self._report(begun)
        if not any(parameter.requires_grad for parameter in self._model.parameters()):
            self._left_out.append("all, as no parameter of the model requires a gradient")
            return self._report(begun)
        with self._agreeing():
            first = self._first_run()
        if first is None:  # alike on all ranks
            return self._report(begun)
        runs, exact, experts = first
        if experts is not None:
            with self._agreeing():
                self._compare_experts(experts)
        with self._agreeing():
            made = self._compare_gradients(runs, exact) if is_ours else exact
        with self._agreeing():
            self._compare_store(made)
        with self._agreeing():
            self._compare_updates(made)
        if self._num_ranks > 1:
            with self._agreeing():
                self._found["num_replicas"] = self._compare_replicas()
        return self._report(begun)

    def _report(self, begun: float) -> AuditReport:
        return AuditReport(**self._found, seconds=time.perf_counter() - begun, left_out=tuple(self._left_out))

    @property
    def _has_more_of_ours(self) -> bool:
        stores = any(isinstance(owner_of(p), CompressedGradients) for p in self._model.parameters())
        return stores or isinstance(_bare(self._optimizer), AdamW8bit) or has_experts(self._model)

    @property
    def _num_ranks(self) -> int:
        return dist.get_world_size(self._group) if self._agrees else 1

    @contextmanager
    def _agreeing(self) -> Iterator[None]:
        """Raise on all ranks when the block raises on one: none of them goes on alone."""
        error: Exception | None = None
        try:
            yield
        except Exception as found:
            error = found
        try:
            votes = self._votes(0 if error is None else 2 if isinstance(error, AuditError) else 1)
        except Exception:
            if error is not None:
                raise error from None  # ranks cannot meet any more, and it says why
            raise
        if error is not None:
            raise error
        failed = [rank for rank, vote in enumerate(votes) if vote == max(votes)]
        if max(votes) == 2:
            raise AuditError(
                f"the first step of {_named(failed)} differs from the exact one; the error there says where"
            )
        if max(votes) == 1:
            raise ModelError(f"the first step does not run on {_named(failed)}; the error there says why")

    def _ranks_that(self, holds: bool) -> list[int]:
        """The ranks on which something holds; one small all-reduce."""
        return [rank for rank, vote in enumerate(self._votes(int(holds))) if vote]

    def _votes(self, own: int) -> list[int]:
        if self._num_ranks == 1:
            return [own]
        device = next((p.device for p in self._model.parameters()), torch.device("cpu"))
        found = torch.zeros(self._num_ranks, device=device, dtype=torch.float32)
        found[dist.get_rank(self._group)] = own
        dist.all_reduce(found, group=self._group)
        return [int(vote) for vote in found.tolist()]

    def _first_run(self) -> tuple[Runs, Outcome, ExpertsWatch | None] | None:
        """The exact run of the first batch that runs and has a finite loss, and what its layers of experts did.

        All ranks try again where one cannot: those of some models meet in each run.
        """
        tries = len(self._losses)
        if self._ranks_that(tries > 1):
            tries = max(tries, 2)
        for number in range(tries):
            loss = self._losses[min(number, len(self._losses) - 1)]
            runs, reason = Runs(self._model, loss), "all, as the exact loss is not finite"
            exact, error = None, None
            try:
                with _watching_experts(self._model) as experts:
                    exact = runs.run("exact")
            except AuditError:
                raise
            except (ModelError, RuntimeError, ValueError, IndexError, TypeError, MemoryError) as found:
                if is_out_of_memory(found):
                    reason = "all, as the exact run does not fit in memory"
                else:
                    error = found
            is_finite = exact is not None and bool(exact.loss.isfinite().all())
            lacking = self._ranks_that(not is_finite)
            if not lacking:
                assert exact is not None
                self._loss = loss
                return runs, exact, experts
            if number == tries - 1 or (self._num_ranks == 1 and "memory" in reason):
                if error is not None:
                    raise error
                self._left_out.append(f"all, as rank {lacking[0]} could not run" if is_finite else reason)
                return None
        return None

    def _compare_experts(self, experts: ExpertsWatch) -> None:
        """Compare layers of experts with every token on its own; ranks that decide together meet."""
        members: Sequence[int] | None = None
        if self._agrees:
            group = dist.group.WORLD if self._group is None else self._group
            assert group is not None, "a group exists"
            members = ranks_of(group)
        experts.compare(members)
        self._found["num_layers_of_experts"] = experts.num_compared
        self._left_out += experts.left_out

    def _compare_gradients(self, runs: Runs, exact: Outcome) -> Outcome:
        """Compare the runs along the chain of comparison.py; returns the compressed one."""
        tolerance = _tolerance(self._model, exact)
        faults: list[AuditError] = []  # raised when all runs are through: in a sharded model ranks meet in each

        def check(refuse: Callable[..., None], *args: Any) -> None:
            try:
                refuse(*args)
            except AuditError as error:
                faults.append(error)

        def run(kind: RunKind) -> Outcome | None:
            try:
                return runs.run(kind)
            except AuditError as error:
                faults.append(error)
            except ModelError as error:  # of a second run that decides otherwise, say
                faults.append(AuditError(f"the first step runs exactly, but not compressed: {error}"))
            return None

        is_chunked = has_chunked_loss(self._model)
        bits: bool | None = None if is_chunked else True
        allowed: dict[str, float] = {}
        outcome = run("unrounded")
        has_other_bits = bits is True and outcome is not None and not same_bits(outcome.loss, exact.loss)
        if self._ranks_that(has_other_bits):  # all of them run: those of a sharded model meet
            again = runs.run("exact")
            if not same_bits(again.loss, exact.loss):
                bits, allowed = None, _own_errors(again, exact)
                self._left_out.append("loss bits, as the exact run does not repeat its own")
        if outcome is not None:
            if bits:
                check(_refuse_bits, outcome.loss, exact.loss)
            elif is_chunked:
                check(_check_near, outcome.loss, exact.loss, tolerance)
            if bits:
                check(_refuse_buffers, outcome.buffers, exact.buffers)
        check(_refuse, self._differing(runs, exact, (outcome, exact), tolerance, allowed), _IN_BACKWARD)
        rounded, outcome = run("rounded"), run("compressed")
        if outcome is not None and bits:
            check(_refuse_bits, outcome.loss, exact.loss)
        check(_refuse, self._differing(runs, exact, (outcome, rounded), tolerance, allowed), _IN_CODES)
        if faults:
            raise faults[0]
        assert rounded is not None
        assert outcome is not None
        number, error = _total_error(rounded, exact)
        if not number:
            self._left_out.append("gradients, as none reaches a parameter in this call's forward")
        self._found |= {"num_parameters": number, "loss_bits": bits, "gradient_error": error if number else None}
        return outcome

    def _differing(
        self,
        runs: Runs,
        exact: Outcome,
        pair: tuple[Outcome | None, Outcome | None],
        tolerance: float,
        allowed: dict[str, float],
    ) -> Sequence[Difference]:
        """Gradients of the first run of a pair that are not those of the second one.

        Before any is said to be, the exact run shows how far rounding alone moves it: `allowed` grows by that.
        """
        got, wanted = pair

        def found() -> Sequence[Difference]:
            if got is None or wanted is None:
                return ()
            return compare(got.gradients, wanted.gradients, tolerance, allowed)

        differing = found()
        if self._ranks_that(bool(differing)):  # all of them run: those of a sharded model meet
            for name, error in _own_errors(runs.run("nudged"), exact).items():
                allowed[name] = max(allowed.get(name, 0.0), min(error, _MOST_ALLOWED))
            differing = found()
        return differing

    def _compare_store(self, made: Outcome) -> None:
        owners = {id(o): o for o in map(owner_of, self._model.parameters()) if isinstance(o, CompressedGradients)}
        if any(store.state != "empty" for store in owners.values()):  # a backward adds to all of them
            self._left_out.append("gradients in codes, as there are some already")
            return
        for store in owners.values():
            if store.group is not None and store.group.size() > 1 and not self._agrees:
                self._left_out.append("gradients in codes, as ranks reduce them together")
                continue
            names = {id(p): name for name, p in self._model.named_parameters()}
            gradients = {name: made.gradients.get(names.get(id(p), "")) for name, p in store.parameters.items()}
            state = ModelState(self._model)

            def backward(state: ModelState = state) -> None:
                self._loss().backward()
                state.restore()

            try:
                _refuse(check_store(store, gradients, backward), _IN_STORE)
            finally:
                for each in owners.values():
                    each.zero_()
            self._found["num_stored"] = self._found.get("num_stored", 0) + len(gradients)

    def _compare_updates(self, made: Outcome) -> None:
        optimizer = _bare(self._optimizer)
        if not isinstance(optimizer, AdamW8bit):
            return
        parameters = dict(self._model.named_parameters())
        gradients: dict[Tensor, Tensor] = {
            parameters[name]: one for name, one in made.gradients.items() if one is not None
        }
        names: Mapping[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
        self._found["num_updates"] = check_updates(optimizer, gradients, names)

    def _compare_replicas(self) -> int:
        try:
            return compare_replicas(self._model, self._group).num_tensors
        except LaconicError as error:
            raise AuditError(str(error)) from error


_IN_BACKWARD = (
    "a forward of laconic, or its backward, does not compute what the module's own code does; likely causes: a note of "
    "another tensor on an input, a module changed or replaced after compress_activations, a hook or wrapper that runs "
    "in one of the two only, a loss scaled for one of the two only"
)
_IN_CODES = (
    "what backward rebuilds from codes is not what was packed; likely causes: a kernel that is wrong on this device, "
    "scales or codes of another tensor, a buffer that was written to before backward"
)
_IN_STORE = (
    "gradients in codes are not the mean over the ranks of what backward made; likely causes: a bucket that was not "
    "reduced, a factor of the number of ranks, a micro-batch left out, a hook lost when parameters were replaced"
)


def _refuse(differing: Sequence[Difference], cause: str) -> None:
    if not differing:
        return
    named = "; ".join(f"{one.name} {one.what}" for one in differing[:_MAX_NAMES])
    more = f"; and {len(differing) - _MAX_NAMES} more parameters" if len(differing) > _MAX_NAMES else ""
    raise AuditError(f"the first step differs from the exact one: {named}{more}; {cause}")


def _refuse_bits(got: Tensor, exact: Tensor) -> None:
    if not same_bits(got, exact):
        raise AuditError(
            f"the loss is {got.item()!r} compressed and {exact.item()!r} exactly, but forward has to give the same "
            "bits; likely causes: a forward of laconic in the place of another one, a random draw that is not "
            "repeated, a dtype that a wrapper changed, packing that has written to what forward computes with"
        )


def _refuse_buffers(got: Mapping[str, int], exact: Mapping[str, int]) -> None:
    differing = [name for name, digest in exact.items() if got.get(name) != digest]
    if differing:
        raise AuditError(
            f"a forward leaves other bits in {', '.join(differing[:_MAX_NAMES])} compressed than exactly; "
            "likely causes: statistics or counters that are updated twice, or not at all"
        )


def _check_near(got: Tensor, expected: Tensor, tolerance: float) -> None:
    if not bool((got - expected).abs() <= tolerance * expected.abs() + 1e-6):
        raise AuditError(
            f"the chunked loss is {got.item():.6g} and the model's own {expected.item():.6g}; likely causes: labels "
            "that are shifted or ignored otherwise, a number of items in the batch that only one of the two divides by"
        )


def _named(ranks: Sequence[int]) -> str:
    return f"ranks {', '.join(map(str, ranks))}" if len(ranks) > 1 else f"rank {ranks[0]}"


def _bare(optimizer: Optimizer | None) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


def _total_error(outcome: Outcome, exact: Outcome) -> tuple[int, float]:
    """How many gradients are not zero, and the relative error of these together."""
    number, difference, size = 0, 0.0, 0.0
    for name, wanted in exact.gradients.items():
        one = outcome.gradients[name]
        if wanted is not None and one is not None and bool(wanted.any()):
            values = in_doubles(wanted)
            finite = values.isfinite()
            difference += float((in_doubles(one) - values)[finite].square().sum())
            number, size = number + 1, size + float(values[finite].square().sum())
    return number, math.sqrt(difference / size) if size else 0.0


def _own_errors(again: Outcome, exact: Outcome) -> dict[str, float]:
    """Twice what the exact run differs by from itself."""
    return {
        name: 2 * relative_error(one, wanted, 0.0)[0]
        for name, one in again.gradients.items()
        if one is not None and (wanted := exact.gradients[name]) is not None
    }


def _tolerance(model: nn.Module, exact: Outcome) -> float:
    """That of the coarsest dtype that computes."""
    dtypes = {p.dtype for p in model.parameters() if p.dtype in TOLERANCE} | {exact.loss.dtype}
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            dtypes.add(torch.get_autocast_dtype(kind))
    return max(TOLERANCE.get(dtype, 0.0) for dtype in dtypes)


def has_experts(model: nn.Module) -> bool:
    """Whether it has layers of laconic.moe, whose import takes a second: without it there are none."""
    moe = sys.modules.get("laconic.moe.layer")
    return moe is not None and bool(moe.moe_layers(model))


def _watching_experts(model: nn.Module) -> AbstractContextManager[Any]:
    if not has_experts(model):
        return nullcontext()
    from laconic.auditing.experts_alone import watching_experts  # see has_experts

    return watching_experts(model)
