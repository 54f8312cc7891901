"""What a script's run saved, as data and as text."""

from __future__ import annotations

from statistics import median
from typing import Any

from laconic.collectives.audit import RAW
from laconic.run.savings import ModelOutcome, Savings
from laconic.run.zipped_groups import ZippedGroups

__all__ = ["render", "summarize"]


def summarize(savings: Savings, groups: ZippedGroups | None = None) -> dict[str, Any]:
    """The outcome as plain data for JSON.

    Returns:
        "models": of each "model" (its class), bytes kept for backward by one forward of its first batch in
        "exact_nbytes" and "nbytes" (None if not measured, and then "unmeasured" says why), "left_exact" (why the whole
        model is as it was, or None) and "exact_modules"; "optimizers": class -> steps; "step_seconds": median between
        two steps of the same optimizer, None below two steps; "step_nbytes": median of what TCP sent meanwhile for this
        process, whatever sent it, None outside of process groups or where the kernel does not tell; "sent": without
        `groups` None, else what this process sent: "zip" (the flag), "groups" (coded process groups), "left_groups"
        (why others were left -> how many), "calls" and "coded_calls", "nbytes" of values and "sent_nbytes" of messages,
        "coding_seconds", and "uncoded" (why -> calls); "spawned": how many processes trained that the script spawned;
        "own": whether this is of the script's own process.
    """
    seconds = savings.step_seconds
    return {
        "models": [_model(outcome) for outcome in savings.models],
        "optimizers": dict(savings.optimizers),
        "step_seconds": median(seconds) if seconds else None,
        "step_nbytes": round(median(savings.step_nbytes)) if savings.step_nbytes else None,
        "sent": None if groups is None else _sent(groups),
        "spawned": 0,
        "own": True,
    }


def _sent(groups: ZippedGroups) -> dict[str, Any]:
    sent = groups.sent
    return {
        "zip": groups.zip,
        "groups": sent.num_groups,
        "left_groups": sent.left,
        "calls": sum(entry.num_calls for entry in sent.counts.entries),
        "coded_calls": sum(entry.num_calls for entry in sent.counts.entries if entry.codec != RAW),
        "nbytes": sent.counts.raw_nbytes,
        "sent_nbytes": sent.counts.sent_nbytes,
        "coding_seconds": sent.counts.coding_seconds,
        "uncoded": sent.counts.left_raw(),
    }


def _model(outcome: ModelOutcome) -> dict[str, Any]:
    report = outcome.report
    before, after = (None, None) if report is None else (report.before, report.after)
    return {
        "model": outcome.model,
        "exact_nbytes": None if before is None else sum(before.by_module.values()),
        "nbytes": None if after is None else sum(after.by_module.values()),
        "unmeasured": None if report is None else report.unmeasured,
        "left_exact": outcome.left_exact,
        "exact_modules": [] if report is None else list(report.left_exact),
    }


def render(summary: dict[str, Any]) -> str:
    """The same as lines of text."""
    lines = []
    for model in summary["models"]:
        if model["left_exact"] is not None:
            lines.append(f"{model['model']} left exact: {model['left_exact']}")
        elif model["nbytes"] is None:
            lines.append(f"{model['model']} compressed; bytes not measured: {model['unmeasured']}")
        else:
            factor = model["exact_nbytes"] / max(1, model["nbytes"])
            lines.append(
                f"{model['model']} keeps {model['nbytes']:,} bytes for backward instead of {model['exact_nbytes']:,} "
                f"({factor:.2f}x less)"
            )
        if model["exact_modules"]:
            names = [name or "the model itself" for name in model["exact_modules"]]
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            lines.append(f"  no site covers {', '.join(names[:5])}{more}")
    steps = ", ".join(f"{count} of {name}" for name, count in summary["optimizers"].items())
    if not steps:
        lines.append("no optimizer made a step: the script did not train, and nothing was saved")
    else:
        time = summary["step_seconds"]
        lines.append(f"steps: {steps}" + ("" if time is None else f"; {time * 1e3:.1f} ms per step (median)"))
        if not summary["models"]:
            lines.append("activations are exact: no module with the optimizer's parameters was called in training mode")
    if summary["spawned"]:
        first = "the script's own process" if summary["own"] else "the first of them to end"
        lines.append(f"{summary['spawned']} processes that the script spawned were trained in; the above is of {first}")
    if summary["step_nbytes"] is not None:
        more = "" if summary["sent"] is not None else "; --zip auto codes them losslessly where that is faster"
        lines.append(f"this process sent {summary['step_nbytes']:,} bytes over TCP per step (median){more}")
    if summary["sent"] is not None:
        lines += _sent_lines(summary["sent"])
    return "\n".join(f"laconic run: {line}" for line in lines)


def _sent_lines(sent: dict[str, Any]) -> list[str]:
    if not sent["groups"] and not sent["left_groups"]:
        return [f"--zip {sent['zip']} had no effect: this process made no process group of torch.distributed"]
    lines = []
    if sent["groups"]:
        factor = sent["nbytes"] / max(1, sent["sent_nbytes"])
        lines.append(
            f"this process sent {sent['sent_nbytes']:,} bytes for {sent['nbytes']:,} bytes of values ({factor:.2f}x "
            f"less) in {sent['calls']:,} calls, {sent['coded_calls']:,} of them coded"
        )
    lines += [f"  uncoded: {count:,} calls, {why}" for why, count in sent["uncoded"].items()]
    lines += [
        f"  left as the script made it, and not counted: {count} group(s), {why}"
        for why, count in sent["left_groups"].items()
    ]
    return lines
