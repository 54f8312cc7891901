"""`laconic run` over scripts that build and call their models in many orders: what it says is what was measured."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from laconic.errors import ConfigError
from laconic.run.models import Refusal, Wishes
from laconic.run.savings import Savings
from laconic.run.summary import render, summarize
from tests.grid import grid
from tests.run.scripts import SCRIPTS, STEPS, Run, Script

FLAGS: dict[str, dict[str, Any]] = {
    "none": {},
    "4": {"activations": 4},
    "8": {"activations": 8},
    "16": {"activations": 16},
    "attention-exact": {"attention": "exact"},
    "attention": {"attention": "int8"},
    "chunked": {"loss": "chunked"},
    "adamw8bit": {"optimizer": "adamw8bit"},
    "all": {"activations": 4, "optimizer": "adamw8bit"},
}


@cache
def plain(name: str) -> Run:
    """The script alone."""
    torch.manual_seed(1)
    run = Run()
    SCRIPTS[name].run(run)
    return run


@dataclass
class Outcome:
    """Of a script under `laconic run`."""

    run: Run
    refused: bool
    summary: dict[str, Any]
    lines: list[str]


def trained(name: str, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Outcome:
    monkeypatch.setattr(torch.optim, "AdamW", torch.optim.AdamW)
    torch.manual_seed(1)
    run, savings = Run(), Savings(Wishes(**flags))
    with savings, suppress(Refusal):
        SCRIPTS[name].run(run)
    summary = summarize(savings)
    lines = [line.removeprefix("laconic run: ") for line in render(summary).splitlines()]
    return Outcome(run, savings.refusal is not None, summary, lines)


def is_refused(script: Script, flags: dict[str, Any]) -> bool:
    if not script.trains:
        return False
    if (
        flags.get("attention") == "int8" or flags.get("loss") == "chunked"
    ):  # of models without attention, or such a loss
        return True
    return script.is_refused and flags.get("activations") in (4, 8)


KEEPS = re.compile(r"(\w+) keeps ([\d,]+) bytes for backward instead of ([\d,]+)(.*) \(.*\)(?:, from step (\d+) on)?$")


EVERY_SECOND = [pytest.param(name, id=name, marks=[pytest.mark.ci] * (index % 2)) for index, name in enumerate(SCRIPTS)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # a refusal in a thread
@pytest.mark.parametrize(("name", "flags"), grid(EVERY_SECOND, list(FLAGS), strength=1))
def test_lines_bits_and_endings(name: str, flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script, expected = SCRIPTS[name], plain(name)
    outcome = trained(name, FLAGS[flags], monkeypatch)
    assert outcome.refused == is_refused(script, FLAGS[flags])
    # Forward values are the same bits until the first update, also of a run that is refused.
    assert torch.equal(outcome.run.losses[0], expected.losses[0]) if outcome.run.losses else outcome.refused
    if outcome.refused:
        assert not outcome.summary["optimizers"]  # before the first step
        return
    assert len(outcome.run.losses) == STEPS
    is_exact = FLAGS[flags].get("activations") == 16
    steps = f"steps: {STEPS * (2 if len(outcome.summary['optimizers']) > 1 else 1)}"
    if not script.trains:
        alone = "no optimizer of torch made a step in this process; processes that it forked are not counted"
        assert outcome.lines == [alone]
        assert all(map(torch.equal, outcome.run.losses, expected.losses))
        return
    kind = "AdamW8bit" if "adamw8bit" in FLAGS[flags].values() else "AdamW"
    assert set(outcome.summary["optimizers"]) == {kind}
    assert sum(line.startswith("steps: ") and f" of {kind}" in line for line in outcome.lines) == 1, steps
    assert ("activations are exact, as --activations 16 asks for" in outcome.lines) == is_exact
    if is_exact:
        assert outcome.summary["models"] == []
        if kind == "AdamW":
            assert all(map(torch.equal, outcome.run.losses, expected.losses))
        return
    # Models, and since when.
    assert {model["model"]: model["since_step"] for model in outcome.summary["models"] if not model["left_exact"]} == (
        script.converted
    )
    assert tuple(model["model"] for model in outcome.summary["models"] if model["left_exact"]) == script.exact
    assert outcome.summary["outside"] == script.outside
    # Bytes, against a tracker in the script: exact ones in the plain run, packed ones in the last step of this one.
    said = {match[1]: match for match in map(KEEPS.match, outcome.lines) if match is not None}
    if script.is_checkpointed:
        assert not said
        assert (
            "Net compressed; bytes not measured: the script calls it inside of torch.utils.checkpoint"
            in outcome.lines[0]
        )
        assert outcome.run.kept[-1] == expected.kept[-1] == {"Net": 0}
        return
    assert set(said) == set(script.converted)
    for model, since in script.converted.items():
        after, before = (int(said[model][group].replace(",", "")) for group in (2, 3))
        assert before == expected.kept[-1][model]
        assert after == outcome.run.kept[-1][model]
        assert after < before
        assert int(said[model][5] or 1) == since
        assert ("module" in said[model][4]) == (script.parts > 0)
        for step in range(1, since - 1 if name != "trained_in_evaluation_mode" else since):
            got, exact = outcome.run.kept[step - 1][model], expected.kept[step - 1][model]
            assert (got == exact) == (since == 2)
    for model in script.exact:
        assert outcome.run.kept[-1][model] == expected.kept[-1][model]
        assert sum(line.startswith(f"{model} left exact: ") for line in outcome.lines) == 1
    [calls] = {model["calls"] for model in outcome.summary["models"]} if script.parts else [0]
    assert calls == script.parts
    # Nothing else is said but what is true of all of these.
    others = ("steps: ", "  no site covers ", *(f"{model} " for model in (*script.converted, *script.exact)))
    rest = [line for line in outcome.lines if not line.startswith(others)]
    assert rest == [f"{script.outside} values of parameters lie in no module; what is computed with them is exact"] * (
        script.outside > 0
    )
    torch.testing.assert_close(outcome.run.losses[-1], expected.losses[-1], rtol=0.2, atol=0.02)


@pytest.mark.parametrize(
    "name", [n if i % 8 == 0 else pytest.param(n, marks=pytest.mark.slow) for i, n in enumerate(SCRIPTS)]
)
def test_torch_is_its_own_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = nn.Module.__call__, torch.optim.Optimizer.add_param_group, torch.optim.AdamW
    trained(name, FLAGS["all"], monkeypatch)
    assert (nn.Module.__call__, torch.optim.Optimizer.add_param_group, torch.optim.AdamW) == before


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attention": "int7"}, "--attention is 'int7', but it must be one of exact, recompute"),
        ({"activations": 16, "attention": "int8"}, "--attention is 'int8', but --activations is 16"),
    ],
)
def test_flags_that_do_nothing_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Wishes(**values)
