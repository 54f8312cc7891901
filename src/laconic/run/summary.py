"""What a script's run saved, as data and as text."""

from __future__ import annotations

from statistics import median
from typing import Any

from laconic.run.models import Model
from laconic.run.savings import Savings
from laconic.run.zipped_groups import ZippedGroups


def summarize(savings: Savings, groups: ZippedGroups | None = None) -> dict[str, Any]:
    """The outcome as plain data for JSON.

    Returns:
        "models": of each "model" (its class), bytes kept for backward by its first training call in "exact_nbytes" and
        "nbytes" (None if not measured, and then "unmeasured" says why), "calls" (how many modules in it these are calls
        of, each called by itself; 0 where the model itself is called), "since_step" (of its optimizer, from which on it
        is converted), "left_exact" (why the whole model is as it was, or None), "by_script" (whether the script
        compresses it itself) and "exact_modules"; "outside": values of parameters that get gradients and lie in no
        module; "missed": those that trained only while another thread's model was converted; "asked_exact": whether the
        flags leave activations exact;
        "optimizers": class -> steps; "step_seconds": median between
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
        "outside": savings.outside,
        "missed": savings.missed,
        "asked_exact": not savings.wishes.converts,
        "optimizers": dict(savings.optimizers),
        "step_seconds": median(seconds) if seconds else None,
        "step_nbytes": round(median(savings.step_nbytes)) if savings.step_nbytes else None,
        "sent": None if groups is None else groups.sent(),
        "spawned": 0,
        "own": True,
    }


def _model(model: Model) -> dict[str, Any]:
    report = model.report
    before, after = (None, None) if report is None else (report.before, report.after)
    unmeasured = None if before is not None or report is None else model.unmeasured or "no call of it was measured"
    return {
        "model": model.name,
        "exact_nbytes": None if before is None else before.nbytes,
        "nbytes": None if after is None else after.nbytes,
        "unmeasured": unmeasured,
        "calls": model.num_part_calls,
        "since_step": model.since_step,
        "left_exact": model.left_exact,
        "by_script": model.is_scripts,
        "exact_modules": [] if report is None else list(report.left_exact),
    }


def render(summary: dict[str, Any]) -> str:
    """The same as lines of text."""
    lines = []
    for model in summary["models"]:
        lines += _model_lines(model)
    if summary["outside"]:
        lines.append(
            f"{summary['outside']:,} values of parameters lie in no module; what is computed with them is exact"
        )
    if summary["missed"]:
        lines.append(
            f"{summary['missed']:,} values of parameters are exact, as they trained while another thread's model was "
            f"converted"
        )
    steps = ", ".join(f"{count} of {name}" for name, count in summary["optimizers"].items())
    if not steps:
        lines.append("no optimizer of torch made a step in this process; processes that it forked are not counted")
    else:
        time = summary["step_seconds"]
        lines.append(f"steps: {steps}" + ("" if time is None else f"; {time * 1e3:.1f} ms per step (median)"))
        if summary["asked_exact"]:
            lines.append("activations are exact, as --activations 16 asks for")
        elif not (summary["models"] or summary["outside"] or summary["missed"]):
            lines.append("activations are exact: no parameter of an optimizer had a gradient when it made a step")
    if summary["spawned"]:
        first = "the script's own process" if summary["own"] else "the first of them to end"
        lines.append(f"{summary['spawned']} processes that the script spawned were trained in; the above is of {first}")
    if summary["step_nbytes"] is not None:
        more = "" if summary["sent"] is not None else "; --zip auto codes them losslessly where that is faster"
        lines.append(f"this process sent {summary['step_nbytes']:,} bytes over TCP per step (median){more}")
    if summary["sent"] is not None:
        lines += _sent_lines(summary["sent"])
    return "\n".join(f"laconic run: {line}" for line in lines)


def _model_lines(model: dict[str, Any]) -> list[str]:
    name = model["model"]
    if model["by_script"]:
        return [f"{name} is as the script compresses it itself"]
    if model["left_exact"] is not None:
        return [f"{name} left exact: {model['left_exact']}"]
    since = "" if model["since_step"] == 1 else f", from step {model['since_step']} on"
    if model["nbytes"] is None:
        return [f"{name} compressed{since}; bytes not measured: {model['unmeasured']}"]
    number = model["calls"]
    where = (
        ""
        if number == 0
        else f" in one call of each of {number} modules in it"
        if number > 1
        else (" in a call of a module in it")
    )
    lines = [
        f"{name} keeps {model['nbytes']:,} bytes for backward instead of {model['exact_nbytes']:,}{where} "
        f"({_less(model['exact_nbytes'], model['nbytes'])}){since}"
    ]
    if model["exact_modules"]:
        names = [name or "the model itself" for name in model["exact_modules"]]
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        lines.append(f"  no site covers {', '.join(names[:5])}{more}")
    return lines


def _less(before: int, after: int) -> str:
    if after < before:
        return f"{before / max(1, after):.2f}x less"
    return "no less" if after == before else f"{after / max(1, before):.2f}x more"


def _sent_lines(sent: dict[str, Any]) -> list[str]:
    if not sent["groups"] and not sent["left_groups"]:
        return [f"--zip {sent['zip']} had no effect: this process made no process group of torch.distributed"]
    lines = []
    if sent["groups"]:
        lines.append(
            f"this process sent {sent['sent_nbytes']:,} bytes for {sent['nbytes']:,} bytes of values "
            f"({_less(sent['nbytes'], sent['sent_nbytes'])}) in {sent['calls']:,} calls, "
            f"{sent['coded_calls']:,} of them coded"
        )
    lines += [f"  uncoded: {count:,} calls, {why}" for why, count in sent["uncoded"].items()]
    lines += [
        f"  left as the script made it, and not counted: {count} group(s), {why}"
        for why, count in sent["left_groups"].items()
    ]
    return lines
