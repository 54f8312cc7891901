"""Measures the table that plans models for which there are no formulas: vision, encoders, state spaces, a user's own.

A model is cut into groups of alike blocks. For each group and each number of bits the blocks of the group, and nothing
else, are compressed, and the bytes that a forward saves, the gradient and the step's time are compared with the exact
model's. What two groups share is saved until both are compressed, so bytes are measured the other way round as well,
with everything but the group compressed, and each of the two is charged for half of it.
"""

from __future__ import annotations

import logging
import math
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor, nn

from laconic.activations import (
    ActivationPlan,
    SavedTensorTracker,
    Site,
    compress_activations,
    decompress_activations,
    find_sites,
)
from laconic.activations.keep.choice import Choice, entry_of
from laconic.activations.recognize.plan import ATTENTION, careful_head
from laconic.activations.whole_model.report import SAVINGS_LOGGER
from laconic.cost.planner.measured import EXACT_WORD, Linear, Measured, MeasuredGroup, MeasuredTable
from laconic.errors import PlanError
from laconic.formats import BlockFormat
from laconic.train.memory.directory import usual_loss
from laconic.train.memory.step_peak import peak_nbytes

__all__ = ["WORDS", "measure_table"]

WORDS = ("8", "6", "5", "4")
"""Bits that are measured; attention and other mixers have 8 at all of them, the head of a model at least 8."""

_KNOWN = (*WORDS, "2")

Inputs = Callable[[int], Mapping[str, Any]]
LossOf = Callable[[Any], Tensor]

_MOST_GROUPS = 12
"""Blocks are cut as finely as this allows: each group costs a dozen steps."""

_LINEAR_WITHIN, _ADDS_UP_WITHIN = 0.02, 0.05  # of a line's largest value, and of the exact model's bytes
_ROUNDS = 3


def measure_table(
    model: nn.Module,
    inputs: Inputs,
    *,
    batches: Sequence[int] = (2, 4, 6),
    words: Sequence[str] = WORDS,
    precision: str = "fp32",
    loss_of: LossOf | None = None,
) -> MeasuredTable:
    """Measure saved bytes, gradient error and time of a model's blocks. Gradients are cleared, the rest is unchanged.

    Args:
        model: any module with sites (`laconic.activations.find_sites`), without compressed activations.
        inputs: keyword arguments of a training forward for a batch of so many samples.
        batches: three sizes of batches, rising; bytes at the middle one have to lie on the line of the others. Errors
            and times are those of the largest.
        words: numbers of bits, also "2", whose rounding is random.
        precision: "fp32", "bf16" (autocast over fp32 parameters) or "bf16-pure" (parameters are bf16 already).
        loss_of: the loss of what the model returns. None takes its `loss`, or the mean square of its first
            floating-point tensor.

    Raises:
        PlanError: the model has no sites or is not of the precision; bytes do not grow linearly with the batch, or
            those of groups do not add up (the message has the numbers); the exact gradient is zero or not finite.
    """
    _check(batches, words, precision, model)
    sites = find_sites(model)
    if not sites:
        raise PlanError(
            f"{type(model).__name__} has no sites, so there is nothing to choose; use mode='hooks', or see"
            " laconic.activations.find_sites"
        )
    run = _Runs(model, inputs, precision, loss_of or usual_loss)
    with run.unchanged():
        return _measure(run, _groups(model, sites), sites, batches, words, precision)


def _measure(
    run: _Runs,
    groups: Sequence[tuple[str, tuple[str, ...], tuple[Site, ...]]],
    sites: Sequence[Site],
    batches: Sequence[int],
    words: Sequence[str],
    precision: str,
) -> MeasuredTable:
    largest = batches[-1]
    exact = {n: run.saved(n) for n in batches}
    reference, seconds = run.gradients(largest)
    norm = sum(gradient.double().square().sum().item() for gradient in reference.values())
    if not 0 < norm < math.inf:
        raise PlanError(f"the squared norm of the exact gradient is {norm}, but errors are relative to it")
    whole = Linear(*_line(batches, [sum(exact[n].values()) for n in batches], "the exact model"))
    everywhere = {word: run.saved_with(_choices(word, sites), batches) for word in words}
    every = {block for _, blocks, _ in groups for block in blocks}
    shares = _shares(run, groups, sites, every, words[-1], largest, exact[largest])
    measured = []
    for kind, blocks, first in groups:
        booked = [sum(b for name, b in exact[n].items() if _is_in(name, blocks)) for n in batches]
        own_sites = [site for site in sites if _owner(site.name, every) in blocks]
        others = [site for site in sites if _owner(site.name, every) not in blocks]
        found = {}
        for word in words:
            alone = run.saved_with(_choices(word, own_sites), batches)
            without = run.saved_with(_choices(word, others), batches)
            saving = [(sum(exact[n].values()) - alone[n] + without[n] - everywhere[word][n]) / 2 for n in batches]
            with run.compressed(_choices(word, own_sites)):
                found[word] = (_line(batches, saving, f"{kind} at {word} bits"), *run.gradients(largest))
        less = {word: line for word, (line, _, _) in found.items()}
        # Blocks are charged for all that a choice saves, which may be booked on a module beside them.
        own = _line((batches[0], batches[-1]), (booked[0], booked[-1]), kind)
        own = max([own, *less.values()], key=lambda line: line[0] + line[1] * largest)
        count = len(blocks)
        options = {EXACT_WORD: Measured(_share(own, count), 0.0, 0.0, {_within(s.name, blocks): None for s in first})}
        for word in words:
            _, gradients, took = found[word]
            off = sum((gradients[k].double() - g.double()).square().sum().item() for k, g in reference.items())
            rest = (own[0] - less[word][0], own[1] - less[word][1])
            entries = {_within(site.name, blocks): entry_of(_choice(word, site)) for site in first}
            share = max(0.0, took / seconds - 1) / count
            options[word] = Measured(_share(rest, count), off / norm / count, share, entries)
        measured.append(MeasuredGroup(kind, blocks, options))
    fixed = whole.fixed - sum(len(g.blocks) * g.options[EXACT_WORD].saved_nbytes.fixed for g in measured)
    growing = whole.per_sample - sum(len(g.blocks) * g.options[EXACT_WORD].saved_nbytes.per_sample for g in measured)
    workspace = {}
    for word in (EXACT_WORD, *words):
        with run.compressed(_choices(word, sites)):
            saved = {n: sum(run.saved(n).values()) for n in (batches[0], largest)}
            peaks = [max(0, run.peak(n) - saved[n]) for n in saved]
        workspace[word] = _growing((batches[0], largest), peaks)
        summed = sum(len(g.blocks) * g.options[word].saved_nbytes.at(largest) for g in measured)
        summed += round(fixed + growing * largest)
        if abs(summed - saved[largest]) > _ADDS_UP_WITHIN * sum(exact[largest].values()):
            raise PlanError(
                f"with {word} bits everywhere the model saves {saved[largest]:,} bytes, but its groups of blocks alone"
                f" add up to {summed:,}; choices for them are not independent, so no table of them can be right"
            )
    given = run.inputs(1)
    order = dict.fromkeys(_owner(site.name, every) for site in sites)
    return MeasuredTable(
        source=run.source(batches),
        precision=precision,
        sample_shape={name: list(value.shape[1:]) for name, value in given.items() if isinstance(value, Tensor)},
        tensors=tuple(
            (p.shape[0], math.prod(p.shape[1:])) if p.dim() > 1 else (p.numel(), 1) for p in run.parameters()
        ),
        buffers_nbytes=sum(buffer.nbytes for buffer in run.model.buffers()),
        other_nbytes=Linear(fixed, growing),
        workspace_nbytes=workspace,
        groups=tuple(measured),
        order=tuple(order),
        uniform_only=shares,
        largest_batch=largest,
    )


def _shares(
    run: _Runs,
    groups: Sequence[tuple[str, tuple[str, ...], tuple[Site, ...]]],
    sites: Sequence[Site],
    every: Set[str],
    word: str,
    samples: int,
    exact: Mapping[str, int],
) -> bool:
    """Whether much of what blocks save is shared by neighbours, and exact until both are packed.

    Then what single blocks save when they alone are packed adds up to less than what all save together.
    """
    whole = sum(exact.values())
    together = whole - run.saved_with(_choices(word, sites), [samples])[samples]
    apart = 0
    for _, blocks, _ in groups:
        first = [site for site in sites if _owner(site.name, every) == blocks[0]]
        apart += len(blocks) * (whole - run.saved_with(_choices(word, first), [samples])[samples])
    return together - apart > _ADDS_UP_WITHIN * whole


class _Runs:
    """Forwards and steps of one model on made batches."""

    def __init__(self, model: nn.Module, inputs: Inputs, precision: str, loss_of: LossOf) -> None:
        self.model, self._make, self._loss_of = model, inputs, loss_of
        self._autocast = precision == "bf16"
        self.device = next(model.parameters()).device
        self._made: dict[int, Mapping[str, Any]] = {}

    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def inputs(self, samples: int) -> Mapping[str, Any]:
        if samples not in self._made:
            self._made[samples] = self._make(samples)
        return self._made[samples]

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Put buffers, mode and random states back; nothing is left in gradients."""
        buffers = {buffer: buffer.detach().clone() for buffer in self.model.buffers()}
        modes = {module: module.training for module in self.model.modules()}
        logger = logging.getLogger(SAVINGS_LOGGER)
        level = logger.level
        self.model.train()
        logger.setLevel(logging.ERROR)  # a model of which one group is compressed saves little, and would say so
        devices = [self.device] if self.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices):
                yield
        finally:
            logger.setLevel(level)
            self.model.zero_grad(set_to_none=True)
            for module, training in modes.items():
                module.training = training
            with torch.no_grad():
                for buffer, value in buffers.items():
                    buffer.copy_(value)

    @contextmanager
    def compressed(self, choices: Mapping[str, Choice]) -> Iterator[None]:
        """The model with these choices; as it is if all are exact."""
        if all(choice is None for choice in choices.values()):
            yield
            return
        compress_activations(self.model, plan=ActivationPlan(dict(choices)), example_inputs=self.inputs(1))
        try:
            yield
        finally:
            decompress_activations(self.model)

    def saved(self, samples: int) -> dict[str, int]:
        """Bytes that a forward saves, by the module that they are booked on."""
        with SavedTensorTracker(self.model) as tracker:
            kept = self._loss(samples)
        del kept
        return dict(tracker.by_module)

    def saved_with(self, choices: Mapping[str, Choice], batches: Sequence[int]) -> dict[int, int]:
        """Bytes that a forward saves with these choices, by batch."""
        with self.compressed(choices):
            return {n: sum(self.saved(n).values()) for n in batches}

    def gradients(self, samples: int) -> tuple[dict[str, Tensor], float]:
        """Gradients by parameter, on the CPU, and the median seconds of forward and backward."""
        seconds, found = [], {}
        for _ in range(_ROUNDS):
            self.model.zero_grad(set_to_none=True)
            started = self._now()
            self._loss(samples).backward()
            seconds.append(self._now() - started)
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                found[name] = parameter.grad.detach().cpu().clone()
        self.model.zero_grad(set_to_none=True)
        return found, statistics.median(seconds)

    def peak(self, samples: int) -> int:
        """The most bytes during a step whose gradients are added to those of an earlier one."""
        self._loss(samples).backward()
        found = peak_nbytes(lambda: self._loss(samples).backward(), self.device)
        self.model.zero_grad(set_to_none=True)
        return found

    def source(self, batches: Sequence[int]) -> str:
        """What was measured, for who reads the table."""
        number = sum(p.numel() for p in self.model.parameters())
        device = platform.processor() or platform.machine()
        if self.device.type == "cuda":
            device = torch.cuda.get_device_name(self.device)
        return (
            f"measured {datetime.now(UTC):%Y-%m-%d}: {type(self.model).__name__}, {number:,} parameters, batches of"
            f" {', '.join(map(str, batches))}, {device}, torch {torch.__version__}"
        )

    def _loss(self, samples: int) -> Tensor:
        torch.manual_seed(0)  # the same dropout each time
        with torch.autocast(self.device.type, torch.bfloat16) if self._autocast else nullcontext():
            return self._loss_of(self.model(**self.inputs(samples)))

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


# --- blocks ---


def _groups(model: nn.Module, sites: Sequence[Site]) -> list[tuple[str, tuple[str, ...], tuple[Site, ...]]]:
    """Alike blocks: their class, their names, and the sites of the first. As fine as _MOST_GROUPS allows."""
    best = None
    for depth in range(1, 1 + max(_depth(site.name) for site in sites)):
        found = _groups_at(model, sites, depth)
        if best is None or len(found) <= _MOST_GROUPS:
            best = found
    return best or _groups_at(model, sites, 1)


def _groups_at(
    model: nn.Module, sites: Sequence[Site], depth: int
) -> list[tuple[str, tuple[str, ...], tuple[Site, ...]]]:
    """Groups of the blocks that `depth` numbers of a name tell apart, such as encoder.stages.0.layers.1 for two."""
    blocks: dict[str, list[Site]] = {}
    for site in sites:
        blocks.setdefault(_block(site.name, depth), []).append(site)
    alike: dict[Any, list[str]] = {}
    for block, own in blocks.items():
        module = model.get_submodule(block)
        inside = tuple((_within(site.name, (block,)), site.kind, site.features, site.head) for site in own)
        shapes = tuple((name, p.shape, p.dtype) for name, p in module.named_parameters())
        # What is in no block is not what the whole model has.
        key = ("", inside) if not block else (type(module), inside, shapes)
        alike.setdefault(key, []).append(block)
    return [
        (
            type(model.get_submodule(names[0])).__name__ if names[0] else "outside of blocks",
            tuple(names),
            tuple(blocks[names[0]]),
        )
        for names in alike.values()
    ]


def _depth(name: str) -> int:
    return sum(part.isdigit() for part in name.split("."))


def _block(name: str, depth: int) -> str:
    """The name up to its number `depth`, or up to its last; "" without one."""
    ends = [match.end() for match in re.finditer(r"(?:^|\.)\d+(?=\.|$)", name)]
    return name[: ends[min(depth, len(ends)) - 1]] if ends else ""


def _within(name: str, blocks: Sequence[str]) -> str:
    """The name of a module of the first block within it; "" is the block itself."""
    return name.removeprefix(blocks[0]).removeprefix(".") if blocks[0] else name


def _is_in(name: str, blocks: Sequence[str]) -> bool:
    return any(block and (name == block or name.startswith(f"{block}.")) for block in blocks)


def _owner(name: str, blocks: Set[str]) -> str:
    """The block that a site is in."""
    while name and name not in blocks:
        name = name.rpartition(".")[0]
    return name


def _choices(word: str, sites: Sequence[Site]) -> dict[str, Choice]:
    return {site.name: _choice(word, site) for site in sites}


def _choice(word: str, site: Site) -> Choice:
    """What a number of bits means for a site; as in compress_activations."""
    if word == EXACT_WORD:
        return None
    return careful_head(BlockFormat.from_bits(int(word)), BlockFormat(ATTENTION))(site)


# --- numbers ---


def _line(batches: Sequence[int], values: Sequence[float], what: str) -> tuple[float, float]:
    """Offset and slope through the first and the last of the values.

    Raises:
        PlanError: one between them is not on it.
    """
    slope = (values[-1] - values[0]) / (batches[-1] - batches[0])
    offset = values[0] - slope * batches[0]
    for n, value in zip(batches, values, strict=True):
        if abs(offset + slope * n - value) > _LINEAR_WITHIN * max(abs(v) for v in values) + 4096:
            sizes = ", ".join(f"{v:,.0f} at {b}" for b, v in zip(batches, values, strict=True))
            raise PlanError(
                f"bytes of {what} do not grow linearly with the batch ({sizes} samples), so they cannot be predicted"
                " for other batches; measure larger ones, nearer to that of the run"
            )
    return offset, slope


def _growing(batches: tuple[int, int], values: Sequence[int]) -> Linear:
    """A line that neither starts below zero nor falls: what allocators and libraries take is no exact function."""
    slope = (values[1] - values[0]) / (batches[1] - batches[0])
    offset = values[0] - slope * batches[0]
    if slope < 0:
        return Linear(float(max(values)), 0.0)
    return Linear(offset, slope) if offset >= 0 else Linear(0.0, values[1] / batches[1])


def _share(line: tuple[float, float], count: int) -> Linear:
    return Linear(line[0] / count, line[1] / count)


def _check(batches: Sequence[int], words: Sequence[str], precision: str, model: nn.Module) -> None:
    if len(batches) != 3 or min(batches) < 1 or list(batches) != sorted(set(batches)):
        raise PlanError(f"batches are {list(batches)}, but they must be three rising sizes of at least 1")
    for word in words:
        if word not in _KNOWN:
            raise PlanError(f"choices name {word!r}, but what is measured must be among {', '.join(_KNOWN)}")
    if precision not in ("fp32", "bf16", "bf16-pure"):
        raise PlanError(f"precision is {precision!r}, but it must be fp32, bf16 or bf16-pure")
    wanted = torch.bfloat16 if precision == "bf16-pure" else torch.float32
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != wanted:
            raise PlanError(f"precision is {precision}, but parameter {name} is {parameter.dtype}, not {wanted}")
