"""What the page draws beside curves: sites, loads of experts, the schedule of a step; and why a run lacks one."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from laconic.train.report.run_reader import LOADS, Run
from laconic.train.step_timeline import TIMELINE_VERSION

_MAX_STEPS = 60
_MAX_LAYERS = 12
_MAX_CELLS = 24_000
_MAX_TASKS = 2000


def sites_chart(run: Run) -> list[dict[str, Any]]:
    """Groups of sites that differ in the number of their layer only, with the bytes per token of all of them."""
    groups: dict[str, dict[str, Any]] = {}
    sites = run.activations.get("sites")
    for site in sites if isinstance(sites, list) else ():
        if not isinstance(site, Mapping) or not isinstance(site.get("name"), str):
            continue
        before, after = (_nbytes(site.get(f"{when}_nbytes_per_token")) for when in ("before", "after"))
        if before is None or after is None:
            continue
        name = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", site["name"]) or "the model itself"
        empty = {"name": name, "kind": str(site.get("kind", "other")), "before": 0.0, "after": 0.0, "kept_as": {}}
        group = groups.setdefault(name, empty)
        group["before"] += before
        group["after"] += after
        group["kept_as"][_kept_as(site, after)] = None
    for group in groups.values():
        group["kept_as"] = ", ".join(group["kept_as"])
    found = [group for group in groups.values() if group["before"] or group["after"]]
    return sorted(found, key=lambda group: -float(group["before"]))


def experts_chart(run: Run) -> dict[str, Any] | None:
    """Tokens of each expert at some steps, by layer; None if the run has not counted them."""
    found = {row["step"]: row[LOADS] for row in run.rows if row.get(LOADS) is not None}
    shapes = {tuple(map(len, loads)) for loads in found.values()}
    if len(shapes) != 1:
        return None
    (shape,) = shapes
    numbers = _spread(range(len(shape)), _MAX_LAYERS)
    most = max(2, min(_MAX_STEPS, _MAX_CELLS // sum(shape[layer] for layer in numbers)))
    steps = _spread(sorted(found), most)
    return {
        "steps": steps,
        "numbers": numbers,
        "layers": [[found[step][layer] for step in steps] for layer in numbers],
        "all_layers": len(shape),
    }


def timeline_chart(run: Run) -> dict[str, Any] | None:
    """timeline.json with the kind of each task; None if there is none or it cannot be drawn."""
    groups: list[dict[str, Any]]
    try:
        if not run.timeline or run.timeline["version"] != TIMELINE_VERSION:
            return None
        groups = [
            {
                "title": str(group["title"]),
                "lanes": [
                    {"name": str(lane["name"]), "tasks": [_task(*task) for task in lane["tasks"][:_MAX_TASKS]]}
                    for lane in group["lanes"]
                ],
            }
            for group in run.timeline["groups"]
        ]
        step, schedule = int(run.timeline["step"]), str(run.timeline["schedule"])
    except (KeyError, TypeError, ValueError):
        return None
    groups = [group for group in groups if any(lane["tasks"] for lane in group["lanes"])]
    kinds = dict.fromkeys(task[3] for group in groups for lane in group["lanes"] for task in lane["tasks"])
    return {"step": step, "schedule": schedule, "groups": groups, "kinds": list(kinds)} if groups else None


def left_out(runs: Sequence[Run]) -> list[str]:
    """A sentence for each chart that some of `runs` cannot have: which, and why."""
    sentences = []
    for title, reason in _REASONS.items():
        by_reason: dict[str, list[str]] = {}
        for run in runs:
            if (why := reason(run)) is not None:
                by_reason.setdefault(why, []).append(run.name)
        sentences += [f"{title} of {_listed(names)}: {why}." for why, names in by_reason.items()]
    return sentences


def _no_curve(field: str, why: str) -> Callable[[Run], str | None]:
    def reason(run: Run) -> str | None:
        if run.series(field):
            return None
        return why if run.rows else "there are no metrics"

    return reason


def _no_wire(run: Run) -> str | None:
    values = [value for _, value in run.series("wire_nbytes")]
    if any(values):
        return None
    return "a single process sends nothing" if values else "metrics.jsonl does not say what was sent"


def _no_sites(run: Run) -> str | None:
    if sites_chart(run):
        return None
    if not run.activations:
        return "there is no activations.json"
    if run.activations.get("mode") == "hooks":
        return "activations are packed by hooks, which know no sites"
    return "activations.json lists no sites with their bytes; a run that keeps everything exact has none"


def _no_experts(run: Run) -> str | None:
    if experts_chart(run) is not None:
        return None
    if any(row.get(LOADS) is not None for row in run.rows):
        return "its number of layers or experts has changed on the way"
    if run.series("moe_load_ratio") or run.series("moe_balance_loss"):
        return "metrics.jsonl has no moe_loads"
    if (run.config.get("pipeline.stages") or 1) > 1:
        return "a pipeline's stages do not count tokens of experts"
    return "no router of a mixture of experts was watched, as in a dense model"


def _no_timeline(run: Run) -> str | None:
    if timeline_chart(run) is not None:
        return None
    if run.timeline:
        return "timeline.json is damaged or of another version"
    if (run.config.get("pipeline.stages") or 1) > 1 or max(run.config.get("moe.chunks") or (1,)) > 1:
        return "there is no timeline.json, as of runs that ended before their third step"
    return "it has neither a pipeline nor layers of experts in chunks"


_REASONS: Mapping[str, Callable[[Run], str | None]] = {
    "Training loss": _no_curve("loss", "metrics.jsonl has none that can be compared"),
    "Validation loss": _no_curve("validation_loss", "none was measured, or none that can be compared"),
    "Memory after each step": _no_curve("memory_nbytes", "metrics.jsonl has no memory_nbytes"),
    "Bytes sent": _no_wire,
    "Bytes by site": _no_sites,
    "Load of experts": _no_experts,
    "Schedule": _no_timeline,
}


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _kept_as(site: Mapping[str, Any], after: float) -> str:
    if not after and site.get("origin"):
        return f"rebuilt from {site['origin']}"
    return str(site.get("format") or "exact")


def _nbytes(value: Any) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    return float(value) if good else None


def _task(name: str, start: float, end: float) -> list[Any]:
    if not 0 <= float(start) <= float(end) < math.inf:
        raise ValueError(f"task {name} has no place in time")
    return [str(name), float(start), float(end), _kind(str(name))]


def _kind(name: str) -> str:
    """What a task is, without its numbers: 0F2 is a forward, `dispatch 1` a dispatch."""
    match = re.fullmatch(r"\d+([FBIW])\d+", name)
    if match is None:
        return " ".join(re.sub(r"[\d.]*\d", " ", name).split()) or name
    return {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}[match[1]]


def _spread(values: Sequence[int], limit: int) -> list[int]:
    """At most `limit` of `values`, evenly spread, with the first and the last."""
    if len(values) <= limit:
        return list(values)
    return [values[round(place * (len(values) - 1) / (limit - 1))] for place in range(limit)]
