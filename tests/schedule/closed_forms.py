"""The closed forms of FinDEP (arXiv 2512.21487) and FSMoE (arXiv 2501.10714), which simulations are held against."""

from __future__ import annotations

from laconic.schedule.inference import BlockTimes
from laconic.schedule.moe_pipeline import ChunkTime, LayerTimes


def makespan_asas(times: BlockTimes, r1: int, num_layers: int, shared_first: bool = False) -> float:
    """FinDEP's makespan of the order ASAS, corrected, and extended to different times of the two directions.

    The paper's letters: x is attention and shared experts of a micro-batch, y the slowest step of a slice's way, f the
    distance at which micro-batches follow each other, g a micro-batch's way through a layer, in which the paper counts
    the slices once more.
    """
    r2, way = len(times.dispatch), (times.dispatch[0], times.experts[0], times.combine[0])
    x, y = times.attention + times.shared, max(way)
    f, g = max(x, r2 * y), (x if shared_first else times.attention) + sum(way) + (r2 - 1) * y
    return (num_layers - 1) * max(g, r1 * f) + max(x, g) + (r1 - 1) * f


def fsmoe(times: LayerTimes, degree: int, gradient_seconds: float = 0.0) -> float:
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
        return 2 * r * a2a + gradient_seconds
    if (q1 and q2) or (not q1 and q3):
        return 2 * a2a + ag + rs + r * exp
    if q1:
        return 2 * r * a2a + ag + rs
    return 2 * a2a + r * (ag + rs)
