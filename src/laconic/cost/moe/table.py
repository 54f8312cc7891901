"""Routes of a layer as text: what each takes, which is fastest, and where it gains."""

from __future__ import annotations

from collections.abc import Sequence

from laconic.cost.moe.candidates import Candidate
from laconic.cost.moe.routes import Route, fastest
from laconic.cost.sizes import format_nbytes
from laconic.cost.wire.seconds import RAW
from laconic.cost.wire.table import columns, format_seconds

__all__ = ["candidates_text", "parts_of", "routes_text"]

_PARTS = ("all-to-all", "other collectives", "experts", "within the rank", "hidden")


def parts_of(route: Route) -> dict[str, float]:
    """Seconds by kind of work; hidden counts against the others. They add up to the route's seconds."""
    parts = dict.fromkeys(_PARTS, 0.0)
    for step in route.steps:
        if step.operation:
            kind = "all-to-all" if step.operation == "all_to_all" else "other collectives"
        else:
            kind = "experts" if step.name == "experts" else "within the rank"
        parts[kind] += step.seconds
    parts["hidden"] = -route.hidden_seconds
    return parts


def routes_text(routes: Sequence[Route], title: str = "") -> str:
    """A table of routes, fastest first, and why the fastest one is. Raises ConfigError for no routes."""
    best = fastest(routes)
    ordered = sorted(routes, key=lambda route: route.seconds)
    rows = [
        [
            route.name,
            str(route.degree),
            *(_signed(seconds) for seconds in parts_of(route).values()),
            format_seconds(route.seconds),
            format_nbytes(round(route.sent_nbytes)),
            f"{route.seconds / best.seconds:.2f}x" if best.seconds else "-",
        ]
        for route in ordered
    ]
    table = columns(["route", "chunks", *_PARTS, "predicted", "sent", "over best"], rows)
    heading = f"{title}\n\n" if title else ""
    return f"{heading}{table}\n\nchoice: {_reason(ordered)}"


def candidates_text(candidates: Sequence[Candidate], title: str = "") -> str:
    """A table of candidates, forward and backward together, fastest first, and why the fastest one is.

    Raises ConfigError for no candidates.
    """
    ordered = sorted(candidates, key=lambda one: one.seconds)
    best = fastest([_whole(one) for one in ordered])
    rows = []
    for one in ordered:
        whole = _whole(one)
        rows.append(
            [
                str(one.plan),
                one.plan.code,
                one.plan.chunks,
                *(_signed(seconds) for seconds in parts_of(whole).values()),
                format_seconds(one.forward.seconds),
                format_seconds(one.backward.seconds),
                format_seconds(one.seconds),
                f"{one.seconds / best.seconds:.2f}x" if best.seconds else "-",
            ]
        )
    header = ["path", "rows", "chunks", *_PARTS, "forward", "backward", "predicted", "over best"]
    heading = f"{title}\n\n" if title else ""
    return f"{heading}{columns(header, rows, left=(0, 1))}\n\nchoice: {_reason([_whole(one) for one in ordered])}"


def _whole(candidate: Candidate) -> Route:
    """Both directions as one route with a name that says everything."""
    plan, forward, backward = candidate.plan, candidate.forward, candidate.backward
    code = "" if plan.code == RAW else f", {plan.code}"
    cut = "" if max(plan.degrees) == 1 else f", {plan.chunks} chunks"
    hidden = forward.hidden_seconds + backward.hidden_seconds
    return Route(f"{plan}{code}{cut}", (*forward.steps, *backward.steps), hidden, max(plan.degrees))


def _reason(ordered: Sequence[Route]) -> str:
    best = ordered[0]
    if len(ordered) == 1:
        return f"{best.name}: there is no other"
    second = ordered[1]
    if second.seconds <= best.seconds:
        return f"{best.name}: none is faster"
    mine, its = parts_of(best), parts_of(second)
    gains = {part: its[part] - mine[part] for part in _PARTS}
    part = max(gains, key=lambda name: gains[name])
    saved = format_seconds(second.seconds - best.seconds)
    less = format_seconds(gains[part])
    where = f"{less} more is hidden" if part == "hidden" else f"of {less} less for {part}"
    return f"{best.name}: {saved} less than {second.name}, mostly because {where}"


def _signed(seconds: float) -> str:
    return f"-{format_seconds(-seconds)}" if seconds < 0 else format_seconds(seconds) if seconds else "-"
