"""Routes of a layer as text: seconds by kind of work, the fastest route, and where it gains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from laconic.cost.comm.explain import format_seconds
from laconic.cost.comm.seconds import RAW
from laconic.cost.moe.routes import Route, fastest
from laconic.cost.moe.search import UNEXPLAINED, LayerCandidate, LayerPlan, best_plan
from laconic.cost.sizes import format_nbytes
from laconic.text_columns import columns

_PARTS = ("all-to-all", "other collectives", "experts", "within the rank", "unexplained", "overlapped")


def parts_of(route: Route) -> dict[str, float]:
    """Return seconds by kind of work; overlapped ones are negative. They add up to the route's seconds."""
    parts = dict.fromkeys(_PARTS, 0.0)
    for step in route.steps:
        if step.operation:
            kind = "all-to-all" if step.operation == "all_to_all" else "other collectives"
        else:
            kind = step.name if step.name in ("experts", UNEXPLAINED) else "within the rank"
        parts[kind] += step.seconds
    parts["overlapped"] = -route.overlapped_seconds
    return parts


def routes_text(routes: Sequence[Route], title: str = "") -> str:
    """Format a table of routes, fastest first, and the reason why the first is.

    Raises:
        ConfigError: there are no routes.
    """
    best = fastest(routes)
    ordered = sorted(routes, key=lambda route: route.seconds)
    parts = [parts_of(route) for route in ordered]
    shown = _columns(parts)
    rows = [
        [
            route.name,
            str(route.degree),
            *(_signed(of_route[name]) for name in shown),
            format_seconds(route.seconds),
            format_nbytes(round(route.sent_nbytes)),
            f"{route.seconds / best.seconds:.2f}x" if best.seconds else "-",
        ]
        for route, of_route in zip(ordered, parts, strict=True)
    ]
    table = columns(["route", "chunks", *shown, "predicted", "sent", "over best"], rows)
    heading = f"{title}\n\n" if title else ""
    return f"{heading}{table}\n\nchoice: {_reason(ordered)}"


def candidates_data(candidates: Sequence[LayerCandidate]) -> list[dict[str, Any]]:
    """Candidates as data, fastest first: plan, seconds, and seconds of each direction by kind of work."""
    return [
        {
            "plan": str(one.plan),
            "seconds": one.seconds,
            "forward": {"seconds": one.forward.seconds, "parts": parts_of(one.forward)},
            "backward": {"seconds": one.backward.seconds, "parts": parts_of(one.backward)},
        }
        for one in sorted(candidates, key=lambda one: one.seconds)
    ]


def candidates_text(
    candidates: Sequence[LayerCandidate],
    title: str = "",
    measured: Mapping[LayerPlan, float] | None = None,
    chosen: LayerPlan | None = None,
) -> str:
    """Format a table of candidates, forward and backward together, fastest first, and the reason of the choice.

    Args:
        measured: seconds of those that were run; the choice is one of them.
        chosen: the choice; None: see `best_plan`.

    Raises:
        ConfigError: there are no candidates.
    """
    ordered = sorted(candidates, key=lambda one: one.seconds)
    routes = [_whole(one) for one in ordered]
    best, parts = fastest(routes), [parts_of(route) for route in routes]
    shown, rows = _columns(parts), []
    for one, of_route in zip(ordered, parts, strict=True):
        rows.append(
            [
                str(one.plan),
                one.plan.rows,
                str(one.plan.degree),
                *(_signed(of_route[name]) for name in shown),
                format_seconds(one.forward.seconds),
                format_seconds(one.backward.seconds),
                format_seconds(one.seconds),
                f"{one.seconds / best.seconds:.2f}x" if best.seconds else "-",
                *([format_seconds(measured[one.plan]) if one.plan in measured else "-"] if measured else []),
            ]
        )
    header = ["path", "rows", "chunks", *shown, "forward", "backward", "predicted", "over best"]
    header += ["measured"] if measured else []
    seconds = measured or {one.plan: one.seconds for one in ordered}
    chosen, reason = chosen or best_plan(seconds), _reason(routes)
    names = {one.plan: route.name for one, route in zip(ordered, routes, strict=True)}
    fast = min(seconds, key=lambda plan: seconds[plan])
    if chosen != fast:
        less = f"{1 - seconds[fast] / seconds[chosen]:.1%} less" if seconds[chosen] else "as long"
        reason = f"{names[chosen]}: plainer than {names[fast]}, which takes {less}"
        reason += f", of {len(measured)} that were run" if measured else ""
    elif measured and chosen != ordered[0].plan:
        reason = f"{names[chosen]}: {len(measured)} were run, and it was the fastest"
    elif measured:
        reason += f"; of {len(measured)} that were run it was the fastest, too"
    heading = f"{title}\n\n" if title else ""
    return f"{heading}{columns(header, rows, left=(0, 1))}\n\nchoice: {reason}"


def _columns(parts: Sequence[Mapping[str, float]]) -> list[str]:
    return [name for name in _PARTS if name != UNEXPLAINED or any(one[name] for one in parts)]


def _whole(candidate: LayerCandidate) -> Route:
    """Join both directions to one route, named after plan, code and chunks."""
    plan, forward, backward = candidate.plan, candidate.forward, candidate.backward
    overlapped = forward.overlapped_seconds + backward.overlapped_seconds
    return Route(plan_text(plan), (*forward.steps, *backward.steps), overlapped, plan.degree)


def plan_text(plan: LayerPlan) -> str:
    """Name a plan by path, code of rows and chunks, as "depth 1, tiered, 2 chunks"."""
    code = "" if plan.rows == RAW else f", {plan.rows}"
    return f"{plan}{code}" + ("" if plan.degree == 1 else f", {plan.degree} chunks")


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
    where = f"{less} more is overlapped" if part == "overlapped" else f"of {less} less for {part}"
    return f"{best.name}: {saved} less than {second.name}, mostly because {where}"


def _signed(seconds: float) -> str:
    return f"-{format_seconds(-seconds)}" if seconds < 0 else format_seconds(seconds) if seconds else "-"
