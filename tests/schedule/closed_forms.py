"""The closed forms of FinDEP (arXiv 2512.21487) and FSMoE (arXiv 2501.10714), which simulations are held against."""

from __future__ import annotations

from typing import NamedTuple

from laconic.schedule.inference import BlockTimes, InferencePlan
from laconic.schedule.moe_pipeline import ChunkTime, LayerTimes


class Terms(NamedTuple):
    """FinDEP's quantities for equal slices, in seconds.

    Attributes:
        x: attention and shared experts of a micro-batch (X).
        y: the slowest step of a slice's way (Y); slices follow each other at this distance.
        f: distance at which micro-batches follow each other (F).
        g: a micro-batch's way through a layer, from attention to the last slice's return (G).
    """

    x: float
    y: float
    f: float
    g: float


def terms(times: BlockTimes, shared_first: bool = False) -> Terms:
    r2, way = len(times.dispatch), (times.dispatch[0], times.experts[0], times.combine[0])
    x, y = times.attention + times.shared, max(way)
    return Terms(x, y, max(x, r2 * y), (x if shared_first else times.attention) + sum(way) + (r2 - 1) * y)


def makespan_asas(times: BlockTimes, r1: int, num_layers: int, shared_first: bool = False) -> float:
    """FinDEP's makespan of the order ASAS, corrected, and extended to different times of the two directions."""
    t = terms(times, shared_first)
    return (num_layers - 1) * max(t.g, r1 * t.f) + max(t.x, t.g) + (r1 - 1) * t.f


def published_makespan(times: BlockTimes, r1: int, num_layers: int) -> float:
    """The same as the paper prints it: G contains (r2 - 1) Y, which its objective's denominator adds once more."""
    return makespan_asas(times, r1, num_layers) + (len(times.dispatch) - 1) * terms(times).y


def layer_seconds(times: BlockTimes, plan: InferencePlan) -> float:
    """Seconds that each further layer takes, in ASAS or AASS.

    In AASS a cycle through two layers waits for all shared experts once.
    """
    t, r1 = terms(times, plan.shared_first), plan.num_micro_batches
    if plan.order == "ASAS":
        return max(t.g, r1 * t.f)
    cycle = t.g + (r1 - 1) * max(times.attention, plan.num_slices * t.y) + times.attention + r1 * times.shared
    return max(t.g, r1 * t.f, cycle / 2)


class FSMoE(NamedTuple):
    """One of FSMoE's four cases: its number and its time."""

    case: int
    seconds: float


def fsmoe(times: LayerTimes, degree: int, gradient_seconds: float = 0.0) -> FSMoE:
    """A layer's time by FSMoE's predicates Q1 to Q7 and its four cases; dispatch and combine take the same time.

    Equal to the simulation where all_gather and reduce_scatter take the same time; elsewhere never above it.
    """
    r, none = degree, ChunkTime(0.0, 0.0)
    a2a, exp = times.dispatch.seconds(r), times.experts.seconds(r)
    ag, rs = ((time or none).seconds(r) for time in (times.all_gather, times.reduce_scatter))
    q1 = a2a > ag
    q2 = r * exp > 2 * (r - 1) * a2a
    q3 = r * exp > (r - 1) * (ag + rs)
    q4 = gradient_seconds > ag + rs
    q5 = q7 = gradient_seconds > r * exp - 2 * (r - 1) * a2a + ag + rs
    q6 = gradient_seconds > r * (ag + rs) - 2 * (r - 1) * a2a
    if (q1 and ((not q2 and q4) or (q2 and q5))) or (not q1 and ((not q3 and q6) or (q3 and q7))):
        return FSMoE(1, 2 * r * a2a + gradient_seconds)
    if (q1 and q2) or (not q1 and q3):
        return FSMoE(2, 2 * a2a + ag + rs + r * exp)
    if q1:
        return FSMoE(3, 2 * r * a2a + ag + rs)
    return FSMoE(4, 2 * a2a + r * (ag + rs))
