"""Plans that are compared, and the measured sweep that chooses those with settings of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, get_args

from laconic.schedule.inference import InferencePlan

Kind = Literal["unsplit", "naive", "pppipe", "findep"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""From plain to complicated: see BenchPlan."""


@dataclass(frozen=True)
class BenchPlan:
    """A plan to measure.

    Attributes:
        kind: "unsplit": one worker runs the whole model; "naive": experts in workers of their own, one micro-batch in
            one slice, so that one side works at a time; "pppipe": micro-batches, shared experts before rows leave
            (MegaScale-Infer); "findep": micro-batches, slices and orders (FinDEP).
        plan: what the engine runs.
    """

    kind: Kind
    plan: InferencePlan

    def __str__(self) -> str:
        plan = self.plan
        if self.kind in ("unsplit", "naive"):
            return self.kind
        if self.kind == "pppipe":
            return f"pppipe r1={plan.num_micro_batches}"
        slicing = f" by {plan.slicing}" if plan.num_slices > 1 else ""
        return f"findep r1={plan.num_micro_batches} r2={plan.num_slices}{slicing} {plan.order}"


def first_candidates(kind: Kind, micro_batches: Sequence[int], slices: Sequence[int]) -> list[BenchPlan]:
    """List the plans of a kind to begin with."""
    if kind == "unsplit":
        return [BenchPlan(kind, InferencePlan())]
    if kind == "naive":
        return [BenchPlan(kind, InferencePlan(shared_first=True))]
    if kind == "pppipe":
        return [BenchPlan(kind, InferencePlan(r1, shared_first=True)) for r1 in micro_batches]
    return [BenchPlan(kind, InferencePlan(r1, r2)) for r1, r2 in product(micro_batches, slices)]


def variants(best: BenchPlan) -> Iterator[BenchPlan]:
    """Yield what else to try around the best of the first candidates: FinDEP's other order, its other slicing."""
    if best.kind != "findep":
        return
    if best.plan.num_micro_batches > 1:  # one micro-batch has one order
        yield replace(best, plan=replace(best.plan, order="AASS"))
    if best.plan.num_slices > 1:
        yield replace(best, plan=replace(best.plan, slicing="experts"))


def sweep(first: Sequence[BenchPlan], rate: Callable[[BenchPlan], float]) -> BenchPlan:
    """Return the plan of the highest `rate`: of the first candidates, then of the variants of the best of these.

    A single candidate without variants is returned unmeasured.
    """
    best = first[0]
    if len(first) == 1 and not list(variants(best)):
        return best
    rates = {plan: rate(plan) for plan in first}
    best = max(rates, key=rates.__getitem__)
    rates |= {plan: rate(plan) for plan in variants(best)}
    return max(rates, key=rates.__getitem__)
