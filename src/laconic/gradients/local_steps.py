"""Local steps: ranks train alone for a while, then average in few bits how far they have come (DiLoCo).

Every rank trains `every` steps with its own optimizer, from a common point. Then each takes the difference of its
parameters from that point, ranks average the differences, and an outer optimizer, SGD with Nesterov momentum, moves the
common point along the average (Douillard et al., arXiv 2311.08105). Differences travel in 4 bits, parameters may be
synchronized in fragments, one after the other, and a synchronization may go on while the next steps run (Streaming
DiLoCo, arXiv 2501.18512).

What rounding has dropped from a rank's difference is added to its next one. The average has the same bits on all ranks,
and the outer update uses no operation that a processor may fuse, so the common point has the same bits everywhere, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from laconic.collectives import api
from laconic.collectives.arguments import find_groups, flat_group
from laconic.collectives.codec import Blockwise, Codec, Raw
from laconic.collectives.runtime.background import done
from laconic.collectives.runtime.group_facts import ranks_of
from laconic.errors import ConfigError, ModelError, TrainingError
from laconic.formats import BlockFormat
from laconic.formats.digest import digest
from laconic.gradients.fragments import MAX_BLOCK_SIZE, Fragment, Pending, cut
from laconic.gradients.local_checks import (
    WatchedLoads,
    averaged_elsewhere,
    change_of,
    check_alone,
    check_arguments,
    check_names,
    kind_of,
    trainable,
)
from laconic.gradients.replicas import broadcast_state, check_same_settings

_FORMATS = {4: BlockFormat("nf4", 64, torch.bfloat16), 8: BlockFormat("int8", 128, torch.float32)}


class LocalSteps:
    """Trains the ranks of a group apart, and brings them together every so many steps.

        local = laconic.LocalSteps(model, every=50)   # any loop; no DistributedDataParallel
        for batch in batches:                         # each rank its own
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            local.step()                              # on every rank, also if a step was left out
        local.finish()                                # the same parameters on all ranks

    The inner optimizer is the rank's own and is never synchronized. Beside the model a rank holds the common point and
    the outer momentum, and below 32 bits what rounding has dropped, in fp32: 12 bytes per parameter. Running statistics
    of batch and instance normalizations are averaged, in full precision, with the last fragment; other buffers stay
    each rank's own.

    Args:
        model: in which parameters that require a gradient are float32, bfloat16 or float16; no wrapper reduces its
            gradients. Their names and shapes stay as they are from now on; weights are loaded into it before, or with
            `load_state_dict` of this object.
        group: ranks that train it, at least 2; the default group if None.
        every: steps between two synchronizations of a parameter, H.
        bits: of differences and of their average: 4 (nf4 in blocks of 64), 8 (int8 in blocks of 128), or 32.
        outer_lr: learning rate of the outer optimizer.
        outer_momentum: its Nesterov momentum; 0 is plain SGD.
        num_fragments: groups of consecutive parameters, about equally large, that are synchronized in turn, evenly
            within `every` steps.
        delay: steps that go on while a synchronization runs in the background; its result is merged after so many of
            them, and what they changed is kept on top of it. 0: a synchronization is awaited. Less than `every`.
        error_feedback: add what rounding has dropped to the next difference.
        broadcast: start from the parameters and buffers of the group's first rank. Without it ranks have to hold the
            same; frozen parameters are compared at once, trainable ones when they are first synchronized.

    Raises:
        ConfigError: an argument is out of its range, there is no group of two ranks, or ranks differ in settings or
            parameters (raised on every rank alike).
        ModelError: the model reduces or shards by itself, or has a parameter of another dtype.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None = None,
        *,
        every: int,
        bits: int = 4,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        num_fragments: int = 1,
        delay: int = 0,
        error_feedback: bool = True,
        broadcast: bool = True,
    ) -> None:
        check_arguments(every, bits, outer_lr, outer_momentum, num_fragments, delay)
        world, _ = find_groups(flat_group("LocalSteps", group))
        if world < 2:
            raise ConfigError(
                "group has 1 rank, but local steps are averaged over at least 2; start more processes, or train without"
                " LocalSteps"
            )
        found = group or dist.group.WORLD
        assert found is not None, "find_groups has refused it"
        check_alone(model)
        self.every, self.bits, self.delay = every, bits, delay
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum
        self.group: dist.ProcessGroup = found
        self.steps = 0
        """Steps so far."""
        self._model = model
        self._format = _FORMATS.get(bits)
        self._codec: Codec = Raw() if self._format is None else Blockwise(self._format)
        self._wants_feedback = error_feedback
        self._is_at_common_point = False
        parameters = trainable(model)
        self._kinds = {name: kind_of(parameter) for name, parameter in parameters.items()}
        settings: dict[str, object] = {
            "every": every,
            "bits": bits,
            "outer_lr": outer_lr,
            "outer_momentum": outer_momentum,
        }
        settings |= {"num_fragments": num_fragments, "delay": delay, "error_feedback": error_feedback}
        settings |= {f"parameter {name}": kind.split(" on ")[0] for name, kind in self._kinds.items()}
        if not broadcast:  # trainable parameters are compared when they are synchronized, frozen ones never again
            frozen = [(name, x) for name, x in model.named_parameters() if not x.requires_grad and not x.is_meta]
            settings |= {f"the hash of frozen parameter {name}": int(digest(x)) for name, x in frozen}
        check_same_settings(settings, found)
        if broadcast:
            broadcast_state(model, found)
        feedback = error_feedback and self._format is not None
        with torch.no_grad():
            self._fragments = [
                Fragment(part, every * (number + 1) // num_fragments, world * MAX_BLOCK_SIZE, feedback)
                for number, part in enumerate(cut(parameters, num_fragments))
            ]
        self._forget_changes()
        self._loads = WatchedLoads(model)

    # --- steps ---

    def is_due(self, step: int) -> bool:
        """Whether a synchronization begins when `step` steps are done."""
        return any(fragment.is_due(step, self.every) for fragment in self._fragments)

    @torch.no_grad()
    def step(self) -> None:
        """Note that a step was made, and synchronize what is due; every rank calls it after each of its steps.

        Raises:
            TrainingError: the parameters or running statistics of a rank are not finite any more; on every rank,
                naming that one. Or the parameters are at the common point (`at_common_point`).
            ModelError: this rank's parameters are other ones than at the start, or were loaded since, or their
                gradients are averaged by now; ConfigError on the other ranks.
            ConfigError: ranks have not made equally many steps, or have not the same common point.

        Warns:
            UserWarning: the parameters of a rank have not changed at all, once each was synchronized after the start or
                a load; or those of all ranks have changed alike since the last synchronization.
        """
        self._check_own("step()")
        self.steps += 1
        for fragment in self._fragments:
            if fragment.pending is not None and fragment.pending.merge_at <= self.steps:
                self._merge(fragment)
        for number, fragment in enumerate(self._fragments):
            if fragment.is_due(self.steps, self.every):
                self._start(number, self.delay)
                if not self.delay:
                    self._merge(fragment)

    @torch.no_grad()
    def finish(self) -> None:
        """Bring all ranks to one common point, whatever is due: the parameters have the same bits on all of them.

        Every rank calls it, after training or before whatever needs equal parameters. A second call changes nothing;
        local steps may go on after it.

        Raises:
            TrainingError, ModelError, ConfigError: as `step`.
        """
        self._check_own("finish()")
        for number, fragment in enumerate(self._fragments):
            if fragment.pending is not None:
                self._merge(fragment)
            if fragment.met != self.steps:
                self._start(number, 0)
                self._merge(fragment)

    @contextmanager
    def at_common_point(self) -> Iterator[None]:
        """Put the common point in the place of this rank's parameters while the block runs; nothing is communicated.

        For evaluations and for what is saved to be used: it has the same bits on all ranks at any time, as of the last
        synchronization of each parameter. Running statistics stay this rank's own. `step`, `finish`, `state_dict` and
        `load_state_dict` are refused inside.

        Raises:
            TrainingError: the block has changed a parameter, which is not kept.
        """
        self._check_own("at_common_point()")
        parameters, point = self.parameters(), self.common()
        own = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(point[name])
        self._is_at_common_point = True
        try:
            yield
            now = dict(self._model.named_parameters())  # frozen ones too: evaluations may freeze
            for name, parameter in parameters.items():
                if now.get(name) is not parameter or not torch.equal(parameter, point[name].to(parameter.dtype)):
                    raise TrainingError(
                        f"{name} was changed inside of at_common_point(), which puts this rank's own parameters back; "
                        "train outside of it"
                    )
        finally:
            self._is_at_common_point = False
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(own[name])

    # --- what is the same on all ranks ---

    def common(self) -> dict[str, Tensor]:
        """The common point, fp32, by name of the parameter; views that the next synchronization changes."""
        return {name: x for fragment in self._fragments for name, x in fragment.views(fragment.common).items()}

    def momentum(self) -> dict[str, Tensor]:
        """The outer momentum, fp32, by name of the parameter; views that the next synchronization changes."""
        return {name: x for fragment in self._fragments for name, x in fragment.views(fragment.momentum).items()}

    # --- checkpoints ---

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """All that goes on with training bit for bit, beside the inner optimizer's own state.

        A synchronization under way is awaited. Tensors are copies.

        Returns:
            "steps"; "met", steps after which a parameter last was the common point on all ranks; "common", "momentum"
            and "average" (of synchronizations that are not merged yet), the same on all ranks; "local" (parameters and
            running statistics), "error" and "start", this rank's own. All but "steps" by name.

        Raises:
            TrainingError: the parameters are at the common point (`at_common_point`).
        """
        self._check_own("state_dict()")
        state: dict[str, Any] = {"steps": self.steps, "common": self.common(), "momentum": self.momentum()}
        state["local"] = {**self.parameters(), **self._statistics()}
        state |= {"error": {}, "average": {}, "start": {}}
        for fragment in self._fragments:
            if fragment.error is not None:
                state["error"] |= fragment.views(fragment.error)
            if fragment.pending is not None:
                self._check(fragment.pending)
                state["average"] |= fragment.views(fragment.pending.average.wait())
                state["start"] |= fragment.pending.start
        copies = {
            part: {name: tensor.detach().clone() for name, tensor in tensors.items()}
            for part, tensors in state.items()
            if part != "steps"
        }
        met = {name: fragment.met for fragment in self._fragments for name in fragment.shapes}
        return {"steps": self.steps, "met": met, **copies}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; the parameters become that rank's own.

        "error" may be empty: nothing is added to the next difference then. Otherwise it is added whatever the bits, but
        for error_feedback=False, which forgets it. The ranks' states may come from another number of ranks, as long as
        "common", "momentum" and "average" are the same everywhere.

        Raises:
            ConfigError: tensors are missing or have other shapes, or num_fragments or delay do not fit
                synchronizations under way.
            TrainingError: the parameters are at the common point (`at_common_point`).
        """
        self._check_own("load_state_dict()")
        parameters, statistics = self.parameters(), self._statistics()
        targets = {"common": self.common(), "momentum": self.momentum(), "local": {**parameters, **statistics}}
        optional = ("error", "average", "start")
        state = {part: {} for part in (*targets, *optional)} | dict(state)
        for part, tensors in targets.items():
            check_names(part, state[part], tensors)
        for part in optional:  # which may have some of the parameters, or none
            tensors = state[part]
            check_names(part, tensors, {name: x for name, x in targets["common"].items() if name in tensors})
        for fragment in self._fragments:
            here = [name for name in fragment.shapes if name in state["average"]]
            if here and (len(here) < len(fragment.shapes) or not self.delay):
                raise ConfigError(
                    f"the state has a synchronization of {here[0]} under way that num_fragments = "
                    f"{len(self._fragments)} and delay = {self.delay} do not fit; load it with those it was saved with"
                )
        for part, tensors in targets.items():
            for name, tensor in tensors.items():
                tensor.copy_(state[part][name])
        self._loads.forget()
        self.steps = int(state["steps"])
        self._forget_changes()
        for number, fragment in enumerate(self._fragments):
            began = self.steps - (self.steps - fragment.offset) % self.every
            # Saved with more fragments, some of its parameters may have met later than others.
            met = {state.get("met", {}).get(name) for name in fragment.shapes}
            fragment.met = met.pop() if len(met) == 1 else None
            fragment.pending = None
            if self._format is None:
                has_error = any(name in state["error"] for name in fragment.shapes)
                fragment.error = torch.zeros_like(fragment.common) if has_error and self._wants_feedback else None
            if fragment.error is not None:
                fragment.error.zero_()
                for name, x in fragment.views(fragment.error).items():
                    if name in state["error"]:
                        x.copy_(state["error"][name])
            if next(iter(fragment.shapes)) in state["average"]:
                average = torch.zeros_like(fragment.common)
                for name, x in fragment.views(average).items():
                    x.copy_(state["average"][name])
                start = {name: state["start"][name].clone() for name in fragment.shapes}
                fragment.pending = Pending(number, self.steps, began + self.delay, None, done(average), start)

    # --- one synchronization ---

    def _start(self, number: int, delay: int) -> None:
        """Begin to average the differences of a fragment; without a delay what ranks report is checked before.

        A rank that must not go on takes part in what the others have begun, and raises then.
        """
        fragment = self._fragments[number]
        found = trainable(self._model)
        change = change_of(self._kinds, found) or self._loads.changed() or averaged_elsewhere(found)
        difference = torch.zeros_like(fragment.common)
        views = fragment.views(difference)
        if change is None:
            for name, common in fragment.views(fragment.common).items():
                # From the point as this rank's dtype has it: what that rounds away is no progress of the rank.
                views[name].copy_(common.to(found[name].dtype)).sub_(found[name])
        filled = [x if x.numel() else x.new_zeros(1) for x in views.values()]
        norms = torch.stack(torch._foreach_norm(filled, float("inf")))
        finite = norms.isfinite()
        first_bad = torch.where(finite.all(), -1, finite.int().argmin())
        counts = map(first_bad.new_tensor, (self.steps, number, int(change is not None)))
        progress = difference.view(torch.int32).sum()
        said = torch.stack([first_bad, *counts, norms.any().long(), progress, fragment.checksum()])
        reports = said.new_empty(self.group.size(), said.numel())
        in_background = delay > 0
        work = api.all_gather(reports, said, self.group, codec=Raw(), async_op=in_background)
        pending = Pending(number, self.steps, self.steps + delay, work, done(difference), {})
        if not in_background:
            self._check(pending, change)
        if fragment.error is not None:
            difference.add_(fragment.error)
            if self._format is None:  # of a state in fewer bits, sent with the first difference that is not rounded
                fragment.error = None
            else:
                rounded = self._format.quantize(difference).dequantize()
                torch.sub(difference, rounded, out=fragment.error).nan_to_num_(0.0, 0.0, 0.0)
                difference = rounded
        pending.average = api.all_reduce(difference, self.group, op="avg", codec=self._codec, async_op=in_background)
        fragment.pending = pending  # on a rank that must not go on, too: the others do not, either
        if change is not None:
            self._check(pending, change)
        if delay:
            pending.start = {name: found[name].detach().clone() for name in fragment.shapes}

    def _merge(self, fragment: Fragment) -> None:
        """Move a fragment's common point by the average of its differences, and its parameters to that point."""
        pending = fragment.pending
        assert pending is not None, "a synchronization has begun"
        self._check(pending)
        average = pending.average.wait()
        # One rounding for each operation: additions with a factor are fused on some processors and not on others.
        fragment.momentum.mul_(self.outer_momentum).add_(average)
        fragment.common.sub_(fragment.momentum.mul(self.outer_momentum).add_(average).mul_(self.outer_lr))
        parameters = self.parameters()
        for name, common in fragment.views(fragment.common).items():
            parameter = parameters[name]
            if pending.start:
                parameter.sub_(pending.start[name]).add_(common.to(parameter.dtype))
            else:
                parameter.copy_(common)
                fragment.met = self.steps
        fragment.pending = None
        if pending.number == len(self._fragments) - 1:
            self._average_statistics()

    def _check(self, pending: Pending, change: str | None = None) -> None:
        """Check what all ranks reported when a synchronization began; the same error, of `step`, on all of them."""
        if pending.reports is None:
            return
        reports = pending.reports.wait().tolist()
        if change is not None:
            raise ModelError(
                f"{change} since LocalSteps was made, but ranks train the parameters of that time apart; make a new "
                "LocalSteps once the model is complete and its weights are loaded"
            )
        ranks = ranks_of(self.group)
        for rank, (first_bad, steps, number, changed, _, _, checksum) in zip(ranks, reports, strict=True):
            if changed:
                raise ConfigError(f"the parameters of rank {rank} are others than when LocalSteps was made; see there")
            if [steps, number] != reports[0][1:3]:
                raise ConfigError(
                    f"rank {rank} has made {steps} steps and synchronizes fragment {number}, but rank {ranks[0]} has "
                    f"made {reports[0][1]} and synchronizes fragment {reports[0][2]}; call step() and finish() equally "
                    "often on all ranks, also for a step that was left out"
                )
            if checksum != reports[0][-1]:
                raise ConfigError(
                    f"the common point of rank {rank} is not that of rank {ranks[0]}, so ranks would stay apart for"
                    " ever; start with broadcast=True, or load states of one and the same checkpoint on all ranks"
                )
            if first_bad >= 0:
                name = list(self._fragments[number].shapes)[first_bad]
                raise TrainingError(
                    f"{name} of rank {rank} is not finite, or infinitely far from the common point, after {steps} "
                    f"steps: that rank has diverged, and an average with it would be lost; lower the inner learning "
                    "rate and go on from the last checkpoint"
                )
        pending.reports = None  # behind an error, so that what was refused is not merged by the next call
        if pending.began > self._first:
            self._still -= {rank for rank, report in zip(ranks, reports, strict=True) if report[4]}
            self._unseen.discard(pending.number)
        if self._still and not self._unseen:
            warnings.warn(
                f"no parameter of rank {', '.join(map(str, sorted(self._still)))} had changed when it was synchronized,"
                f" in {pending.began - self._first} steps: each step was left out, or what is trained is a copy of the"
                " model that LocalSteps was given",
                stacklevel=5,  # the caller of a method that torch.no_grad wraps
            )
            self._still.clear()
        # The same text each time, which Python's filter shows once.
        if len({report[5] for report in reports}) == 1 and any(report[4] for report in reports):
            warnings.warn(
                "all ranks have made the very same progress since the last synchronization: they get the same batches,"
                " or their gradients are averaged in every step, as by DistributedDataParallel; give each rank its own"
                " batches, and leave the wrapper out",
                stacklevel=5,
            )

    def _forget_changes(self) -> None:
        """Look anew for ranks whose parameters do not change, from this step on."""
        self._first = self.steps
        self._still = {*ranks_of(self.group)}
        """Ranks of which no fragment has changed yet."""
        self._unseen = {*range(len(self._fragments))}
        """Fragments that were not synchronized yet after a step."""

    def _average_statistics(self) -> None:
        statistics = {name: x for name, x in self._statistics().items() if x.is_floating_point()}
        if not statistics:
            return
        own = torch.cat([x.flatten().float() for x in statistics.values()])
        average = own.clone()
        api.all_reduce(average, self.group, op="avg", codec=Raw()).wait()
        if not average.isfinite().all():
            bad = [name for name, x in statistics.items() if not x.isfinite().all()]
            said: list[list[str]] = [[]] * self.group.size()
            dist.all_gather_object(said, bad, group=self.group)
            rank, names = next(one for one in zip(ranks_of(self.group), said, strict=True) if one[1])
            raise TrainingError(
                f"{names[0]} of rank {rank} is not finite after {self.steps} steps, and an average with it would be "
                "lost; leave out batches that are not finite before the forward, and go on from the last checkpoint"
            )
        for x, part in zip(statistics.values(), average.split([x.numel() for x in statistics.values()]), strict=True):
            x.copy_(part.view_as(x))

    def _statistics(self) -> dict[str, Tensor]:
        """Running statistics of batch and instance normalizations, by name."""
        return {
            f"{prefix}.{name}" if prefix else name: buffer
            for prefix, module in self._model.named_modules()
            if isinstance(module, _NormBase)
            for name, buffer in module.named_buffers(recurse=False)
        }

    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's trainable parameters by name; hosts may have replaced those of the start.

        Raises:
            ModelError: names, shapes or dtypes have changed.
        """
        found = trainable(self._model)
        change = change_of(self._kinds, found)
        if change is not None:
            raise ModelError(f"{change} since LocalSteps was made, but parameters must stay the same")
        return found

    def _check_own(self, call: str) -> None:
        """Check that parameters are this rank's own."""
        if self._is_at_common_point:
            raise TrainingError(
                f"{call} inside of at_common_point(), where parameters are the common point and not this rank's own; "
                "call it after the block"
            )
