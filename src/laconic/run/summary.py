"""What a script's run saved, as data and as text."""

from __future__ import annotations

from statistics import median
from typing import Any

from laconic.run.messages import Messages
from laconic.run.savings import ModelOutcome, Savings

__all__ = ["render", "summarize"]


def summarize(savings: Savings, messages: Messages) -> dict[str, Any]:
    """The outcome as plain data for JSON.

    Returns:
        "models": of each "model" (its class), bytes kept for backward by one forward of its first batch in
        "exact_nbytes" and "nbytes" (None if not measured, and then "unmeasured" says why), "left_exact" (why the whole
        model is as it was, or None) and "exact_modules"; "optimizers": class -> steps; "step_seconds": median between
        two steps of the same optimizer, None below two steps; "messages" (None without --zip): groups by "groups" that
        were made laconic's and "own_groups" that the script made so, and of this process "raw_nbytes", "sent_nbytes",
        "calls" and "left_raw" (reason -> calls).
    """
    seconds = savings.step_seconds
    return {
        "models": [_model(outcome) for outcome in savings.models],
        "optimizers": dict(savings.optimizers),
        "step_seconds": median(seconds) if seconds else None,
        "messages": None if messages.zip is None else _sent(messages),
    }


def _sent(messages: Messages) -> dict[str, Any]:
    sent = messages.sent
    return {
        "groups": dict(messages.groups),
        "own_groups": messages.own,
        "raw_nbytes": sent.raw_nbytes,
        "sent_nbytes": sent.sent_nbytes,
        "calls": sum(entry.num_calls for entry in sent.entries),
        "left_raw": sent.left_raw(),
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
    if summary["messages"] is not None:
        lines += _message_lines(summary["messages"])
    return "\n".join(f"laconic run: {line}" for line in lines)


def _message_lines(sent: dict[str, Any]) -> list[str]:
    if not sent["groups"]:
        made = "the script made its own groups laconic's" if sent["own_groups"] else "the script made no process group"
        lines = [f"--zip changed nothing: {made}"]
    else:
        lines = []
    if sent["calls"]:
        factor = sent["raw_nbytes"] / max(1, sent["sent_nbytes"])
        lines.append(
            f"this process sent {sent['sent_nbytes']:,} bytes instead of {sent['raw_nbytes']:,} ({factor:.2f}x less) "
            f"in {sent['calls']:,} calls"
        )
        lines += [f"  left raw: {count:,} calls, {reason}" for reason, count in sent["left_raw"].items()]
    elif sent["groups"]:
        lines.append("nothing was sent through the script's process groups")
    return lines
