"""Plans from a measured table: for models whose saved bytes no formula of `laconic.cost.memory` gives.

The table has, for every group of alike blocks of a model and every choice, the bytes that a block saves, the error that
it adds to the gradient and the time that it adds to the step. `laconic.train.memory.measure` measures it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from laconic.cost.memory.persistent import tensor_nbytes
from laconic.cost.sizes import format_nbytes
from laconic.errors import PlanError
from laconic.json_text import parse_json

__all__ = ["EXACT_WORD", "Linear", "Measured", "MeasuredGroup", "MeasuredPlan", "MeasuredTable", "choose_measured"]

_FORMAT, _VERSION = "laconic memory table", 1

EXACT_WORD = "16"
"""The choice that every group has: nothing is packed."""

_ERROR_UNIT, _TIME_UNIT = 0.05, 0.02
_SCALE = 2.0**20


@dataclass(frozen=True)
class Linear:
    """Bytes that grow with the batch: `fixed` + `per_sample` for each sample. Parts of a sum may be negative."""

    fixed: float
    per_sample: float

    def at(self, samples: int) -> int:
        """Bytes of a batch."""
        return round(self.fixed + self.per_sample * samples)


@dataclass(frozen=True)
class Measured:
    """What one choice means for one block of a group.

    Attributes:
        saved_nbytes: kept for backward.
        squared_error: added to (norm of the gradient's error over norm of the gradient)^2.
        time_share: added seconds over seconds of the exact step.
        sites: what an activation plan says about each site of the block, by name within the block.
    """

    saved_nbytes: Linear
    squared_error: float
    time_share: float
    sites: Mapping[str, Any]


@dataclass(frozen=True)
class MeasuredGroup:
    """Alike blocks of a model and what was measured of them, together and divided by their number.

    Attributes:
        kind: the class of the blocks.
        blocks: their names; "" is what is in no block.
        options: by choice: "16" (exact), "8", "6", "5", "4".
    """

    kind: str
    blocks: tuple[str, ...]
    options: Mapping[str, Measured]


@dataclass(frozen=True)
class MeasuredTable:
    """What was measured of a model.

    Attributes:
        source: model, inputs, machine, versions and date.
        precision: "fp32", "bf16" (autocast) or "bf16-pure".
        sample_shape: what one sample of the batch was, by argument of the forward; other shapes need another table.
        tensors: rows and columns of every parameter (vectors have one column), for persistent memory.
        buffers_nbytes: of the model.
        other_nbytes: saved for backward outside of all groups, whatever is chosen.
        workspace_nbytes: by choice, the peak of a step beyond saved bytes, parameters and gradients, where the choice
            is taken for all groups.
        groups: that are decided.
        order: names of all blocks as forward comes to them; backward frees the last one first.
        uniform_only: neighbours share much of what they save, so that only the same choice for all can be predicted.
        largest_batch: samples of the largest batch that was measured.
    """

    source: str
    precision: str
    sample_shape: Mapping[str, Sequence[int]]
    tensors: tuple[tuple[int, int], ...]
    buffers_nbytes: int
    other_nbytes: Linear
    workspace_nbytes: Mapping[str, Linear]
    groups: tuple[MeasuredGroup, ...]
    order: tuple[str, ...]
    largest_batch: int
    uniform_only: bool = False

    def group_of(self, block: str) -> MeasuredGroup:
        """The group that a block belongs to."""
        return next(group for group in self.groups if block in group.blocks)

    def persistent_nbytes(self, optimizer: str) -> dict[str, int]:
        """Bytes of parameters with buffers, of their gradients, and of the optimizer's states."""
        element = 2 if self.precision == "bf16-pure" else 4
        total = {"parameters": self.buffers_nbytes, "gradients": 0, "optimizer": 0}
        for rows, columns in self.tensors:
            for kind, nbytes in tensor_nbytes(rows, columns, element, optimizer).items():
                total[kind] += nbytes
        return total

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"format": _FORMAT, "version": _VERSION, **asdict(self)}

    def save(self, path: str | Path) -> None:
        """Write the table as JSON.

        Raises:
            PlanError: it cannot be written.
        """
        _write(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> MeasuredTable:
        """Read what `save` wrote.

        Raises:
            PlanError: there is no such file, or it is no such table.
        """
        try:
            return cls.from_dict(parse_json(Path(path).read_text(encoding="utf-8")))
        except OSError as error:
            raise PlanError(f"measured is {str(path)!r}, but it must be a file: {error}") from error
        except ValueError as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(f"measured {path} is not JSON: {error}") from error

    @classmethod
    def from_dict(cls, data: Any) -> MeasuredTable:
        """Read what `to_dict` gave.

        Raises:
            PlanError: the data is no such table, of another version, or has impossible numbers.
        """
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise PlanError("the file is no laconic memory table; write one with laconic plan MODEL --measure FILE")
        if data.get("version") != _VERSION:
            raise PlanError(f"the memory table has version {data.get('version')!r}, but only {_VERSION} is known")
        try:
            table = cls(
                source=str(data["source"]),
                precision=data["precision"],
                sample_shape={str(k): [int(n) for n in v] for k, v in data["sample_shape"].items()},
                tensors=tuple((int(rows), int(columns)) for rows, columns in data["tensors"]),
                buffers_nbytes=int(data["buffers_nbytes"]),
                other_nbytes=_linear(data["other_nbytes"]),
                workspace_nbytes={word: _linear(entry) for word, entry in data["workspace_nbytes"].items()},
                groups=tuple(_group(entry) for entry in data["groups"]),
                order=tuple(str(name) for name in data["order"]),
                largest_batch=int(data["largest_batch"]),
                uniform_only=bool(data["uniform_only"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(f"the memory table is damaged: {error!r}; measure it again") from error
        if table.precision not in ("fp32", "bf16", "bf16-pure"):
            raise PlanError(
                f"the memory table has precision {table.precision!r}, but it must be fp32, bf16 or bf16-pure"
            )
        if sorted(table.order) != sorted(block for group in table.groups for block in group.blocks):
            raise PlanError("the memory table's order has other blocks than its groups; measure it again")
        for group in table.groups:
            if not group.blocks or EXACT_WORD not in group.options:
                raise PlanError(f"the memory table's group of {group.kind} has no blocks or no exact choice")
            for word in group.options:
                if word not in table.workspace_nbytes:
                    raise PlanError(f"the memory table has no workspace for the choice {word!r} of {group.kind}")
        return table


@dataclass(frozen=True)
class MeasuredPlan:
    """The choice for each block of a measured model, with its predicted bytes, error and time.

    Attributes:
        choices: by name of the block, a word such as "4" or "16".
        saved_nbytes: kept for backward by one forward.
        nbytes: at the peak of a step, by kind: parameters, gradients, optimizer, activations (what is still saved, and
            what is alive inside of a forward or backward).
        relative_error: predicted norm of the gradient's error over that of the gradient.
        time_share: predicted seconds added over seconds of the exact step.
    """

    table: MeasuredTable
    samples: int
    choices: Mapping[str, str]
    saved_nbytes: int
    nbytes: Mapping[str, int]
    relative_error: float
    time_share: float

    @property
    def total_nbytes(self) -> int:
        """Predicted peak on the device."""
        return sum(self.nbytes.values())

    def activation_plan(self) -> dict[str, Any]:
        """The plan for `compress_activations(model, plan=ActivationPlan.from_json(...))`, as plain data."""
        sites = {}
        for group in self.table.groups:
            for block in group.blocks:
                for name, entry in group.options[self.choices[block]].sites.items():
                    sites[".".join(filter(None, (block, name)))] = entry
        return {"version": 2, "sites": sites, "layers": {}}

    def save(self, path: str | Path) -> None:
        """Write the activation plan as JSON.

        Raises:
            PlanError: it cannot be written.
        """
        _write(path, self.activation_plan())

    @classmethod
    def of(
        cls, table: MeasuredTable, samples: int, choices: Mapping[str, str], optimizer: str = "adamw"
    ) -> MeasuredPlan:
        """The prediction for these choices.

        Args:
            table: of the model.
            samples: of a batch on one device.
            choices: by name of the block.
            optimizer: "adamw" or "adamw8bit".

        Raises:
            PlanError: samples is not positive, or a block has no choice or one that was not measured.
        """
        _check_samples(samples)
        squared_error = time_share = 0.0
        for block in table.order:
            group, word = table.group_of(block), choices.get(block, "")
            if word not in group.options:
                raise PlanError(
                    f"block {block!r} has the choice {word!r}, but it must be one of {', '.join(group.options)}"
                )
            squared_error += group.options[word].squared_error
            time_share += group.options[word].time_share
        if table.uniform_only and len(set(choices.values())) > 1:
            raise PlanError(
                "blocks have different choices, but in this model neighbours share much of what they save, which is"
                " exact until both are packed; take one choice for all"
            )
        first, stack = _stack(table)
        saved = {block: table.group_of(block).options[choices[block]].saved_nbytes.at(samples) for block in table.order}
        alive = peak = table.other_nbytes.at(samples) + sum(saved[block] for block in first)
        for block in stack:
            alive += saved[block]
            peak = max(peak, alive + table.workspace_nbytes[choices[block]].at(samples))
        nbytes = {**table.persistent_nbytes(optimizer), "activations": peak}
        return cls(table, samples, dict(choices), alive, nbytes, squared_error**0.5, time_share)

    @classmethod
    def uniform(cls, table: MeasuredTable, samples: int, word: str, optimizer: str = "adamw") -> MeasuredPlan:
        """The same choice for all blocks.

        Raises:
            PlanError: it was not measured.
        """
        _check_words(table, (word,))
        return cls.of(table, samples, dict.fromkeys(table.order, word), optimizer)


def choose_measured(
    table: MeasuredTable,
    samples: int,
    budget_nbytes: int,
    *,
    allowed: Sequence[str] | None = None,
    optimizer: str = "adamw",
    time_weight: float = 1.0,
) -> MeasuredPlan:
    """The cheapest choices under a budget: (relative error / 0.05)^2 + time_weight * (share of the step's time / 0.02).

    Args:
        table: of the model.
        samples: of a batch on one device.
        budget_nbytes: of the device.
        allowed: choices that may be taken; None is all that were measured.
        optimizer: "adamw" or "adamw8bit".
        time_weight: of added time against error.

    Raises:
        PlanError: nothing meets the budget (the message says the smallest that can be met), a choice was not measured,
            or SciPy is missing.
    """
    _check_samples(samples)
    words = list(table.workspace_nbytes) if allowed is None else list(allowed)
    _check_words(table, words)
    for group in table.groups:
        if not set(words) & set(group.options):
            raise PlanError(f"no choice is left for {group.kind} ({group.blocks[0] or 'the rest'}); allow 16")
    if table.uniform_only:
        return _cheapest_uniform(table, samples, words, budget_nbytes, optimizer, time_weight)
    choices = _solve(table, samples, words, budget_nbytes, optimizer, time_weight)
    if choices is None:
        least = _solve(table, samples, words, None, optimizer, time_weight)
        assert least is not None, "without a budget everything fits"
        raise _too_little(budget_nbytes, MeasuredPlan.of(table, samples, least, optimizer).total_nbytes)
    return MeasuredPlan.of(table, samples, choices, optimizer)


def _cheapest_uniform(
    table: MeasuredTable,
    samples: int,
    words: Sequence[str],
    budget_nbytes: int,
    optimizer: str,
    time_weight: float,
) -> MeasuredPlan:
    plans = [MeasuredPlan.uniform(table, samples, word, optimizer) for word in words]
    fitting = [plan for plan in plans if plan.total_nbytes <= budget_nbytes]
    if not fitting:
        raise _too_little(budget_nbytes, min(plan.total_nbytes for plan in plans))
    return min(fitting, key=lambda plan: _cost(plan.relative_error**2, plan.time_share, time_weight))


def _cost(squared_error: float, time_share: float, time_weight: float) -> float:
    return squared_error / _ERROR_UNIT**2 + time_weight * time_share / _TIME_UNIT


def _too_little(budget_nbytes: int, smallest: int) -> PlanError:
    return PlanError(
        f"the budget is {budget_nbytes:,} bytes, but the least that these choices can do with is {smallest:,} bytes"
        f" ({format_nbytes(smallest)}); raise the budget, allow more choices, use smaller batches or adamw8bit"
    )


def _stack(table: MeasuredTable) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Blocks whose tensors are taken to be alive all the time, and those that backward frees one after the other.

    What is outside of blocks lies in front of them and behind them.
    """
    inside = tuple(block for block in table.order if block)
    return (("",), inside) if inside and "" in table.order else ((), table.order)


def _solve(
    table: MeasuredTable,
    samples: int,
    words: Sequence[str],
    budget_nbytes: int | None,
    optimizer: str,
    time_weight: float,
) -> dict[str, str] | None:
    """The cheapest choices by block under a budget, or without one those of the smallest peak."""
    try:
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError as error:
        raise PlanError(
            f"choosing under a budget needs SciPy ({error}): pip install 'laconic[plan]'; policies do without"
        ) from error
    # A column of 0 and 1 for each choice of a block, and the peak.
    columns = [(block, word) for block in table.order for word in words if word in table.group_of(block).options]
    options = [table.group_of(block).options[word] for block, word in columns]
    saved = np.array([option.saved_nbytes.at(samples) / _SCALE for option in options])
    workspace = np.array([table.workspace_nbytes[word].at(samples) / _SCALE for _, word in columns])
    first, stack = _stack(table)
    known = (sum(table.persistent_nbytes(optimizer).values()) + table.other_nbytes.at(samples)) / _SCALE
    place = {block: index for index, block in enumerate((*first, *stack))}
    at = np.array([place[block] for block, _ in columns])
    rows, low, high = [], [], []
    for index in range(len(place)):
        rows.append(np.append((at == index).astype(float), 0.0))  # each block has one choice
        low.append(1.0)
        high.append(1.0)
        if index >= len(first):  # while its backward runs, blocks before it wait
            rows.append(np.append(saved * (at <= index) + workspace * (at == index), -1.0))
            low.append(-np.inf)
            high.append(-known)
    cost = np.zeros(len(columns) + 1)
    if budget_nbytes is None:
        cost[-1] = 1.0
    else:
        for i, option in enumerate(options):
            cost[i] = _cost(option.squared_error, option.time_share, time_weight)
            cost[i] += 1e-9 * i / len(columns)  # equal costs are settled by order
    most = np.inf if budget_nbytes is None else budget_nbytes / _SCALE
    result = milp(
        cost,
        constraints=LinearConstraint(np.array(rows), low, high),
        bounds=Bounds(np.zeros(len(cost)), np.append(np.ones(len(columns)), most)),
        integrality=np.append(np.ones(len(columns)), 0.0),
        options={"mip_rel_gap": 0.0},
    )
    if result.x is None:
        return None
    return {block: word for (block, word), taken in zip(columns, result.x, strict=False) if taken > 0.5}


def _check_words(table: MeasuredTable, words: Sequence[str]) -> None:
    for word in words:
        if word not in table.workspace_nbytes:
            known = ", ".join(table.workspace_nbytes)
            raise PlanError(f"choices name {word!r}, but the table knows {known}; measure it or leave it out")


def _check_samples(samples: int) -> None:
    if samples < 1:
        raise PlanError(f"batch is {samples!r}, but it must be at least 1")


def _write(path: str | Path, data: dict[str, Any]) -> None:
    target = Path(path)
    try:
        temporary = target.with_name(target.name + ".part")
        try:
            temporary.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except (OSError, ValueError) as error:  # ValueError: no name, or a NUL in it
        raise PlanError(f"{str(target)!r} cannot be written: {error}") from error


def _linear(entry: Any) -> Linear:
    found = Linear(float(entry["fixed"]), float(entry["per_sample"]))
    if not all(abs(value) < float("inf") for value in (found.fixed, found.per_sample)):
        raise PlanError(f"the memory table says {entry}, but bytes must be finite")
    return found


def _group(entry: Any) -> MeasuredGroup:
    options = {}
    for word, option in entry["options"].items():
        error, share = float(option["squared_error"]), float(option["time_share"])
        if not (0 <= error < float("inf") and 0 <= share < float("inf")):
            raise PlanError(
                f"the memory table says error {error} and time {share}, but they must be finite, not negative"
            )
        options[str(word)] = Measured(_linear(option["saved_nbytes"]), error, share, dict(option["sites"]))
    return MeasuredGroup(str(entry["kind"]), tuple(str(name) for name in entry["blocks"]), options)
