"""Every line of the summary, and the situation in which it is true."""

from __future__ import annotations

from typing import Any

import pytest

from laconic.run.models import Wishes
from laconic.run.savings import Savings
from laconic.run.summary import render, summarize

NET = {
    "model": "Net",
    "exact_nbytes": 1000,
    "nbytes": 100,
    "unmeasured": None,
    "calls": 0,
    "since_step": 1,
    "left_exact": None,
    "by_script": False,
    "exact_modules": [],
}
NOTHING_SENT = {
    "zip": "on",
    "groups": 0,
    "left_groups": {},
    "calls": 0,
    "coded_calls": 0,
    "nbytes": 0,
    "sent_nbytes": 0,
    "coding_seconds": 0.0,
    "uncoded": {},
}
SENT = NOTHING_SENT | {"groups": 1, "calls": 3, "coded_calls": 2, "nbytes": 900, "sent_nbytes": 600}
ONE_STEP = {"optimizers": {"AdamW": 1}}

CASES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("nothing", {}, ["no optimizer of torch made a step in this process; processes that it forked are not counted"]),
    (
        "no gradients",
        ONE_STEP,
        [
            "steps: 1 of AdamW",
            "activations are exact: no parameter of an optimizer had a gradient when it made a step",
        ],
    ),
    (
        "16 bits",
        ONE_STEP | {"asked_exact": True},
        ["steps: 1 of AdamW", "activations are exact, as --activations 16 asks for"],
    ),
    (
        "whole",
        ONE_STEP | {"models": [NET], "step_seconds": 0.25},
        [
            "Net keeps 100 bytes for backward instead of 1,000 (10.00x less)",
            "steps: 1 of AdamW; 250.0 ms per step (median)",
        ],
    ),
    (
        "a part",
        ONE_STEP | {"models": [NET | {"calls": 1}]},
        [
            "Net keeps 100 bytes for backward instead of 1,000 in a call of a module in it (10.00x less)",
            "steps: 1 of AdamW",
        ],
    ),
    (
        "parts, later, with modules that no site covers",
        ONE_STEP | {"models": [NET | {"calls": 3, "since_step": 2, "exact_modules": ["", *"abcdef"]}]},
        [
            "Net keeps 100 bytes for backward instead of 1,000 in one call of each of 3 modules in it "
            "(10.00x less), from step 2 on",
            "  no site covers the model itself, a, b, c, d and 2 more",
            "steps: 1 of AdamW",
        ],
    ),
    (
        "nothing saved",
        ONE_STEP | {"models": [NET | {"nbytes": 1000}, NET | {"nbytes": 1500}, NET | {"nbytes": 0, "exact_nbytes": 0}]},
        [
            "Net keeps 1,000 bytes for backward instead of 1,000 (no less)",
            "Net keeps 1,500 bytes for backward instead of 1,000 (1.50x more)",
            "Net keeps 0 bytes for backward instead of 0 (no less)",
            "steps: 1 of AdamW",
        ],
    ),
    (
        "unmeasured, exact and the script's",
        ONE_STEP
        | {
            "models": [
                NET | {"nbytes": None, "exact_nbytes": None, "unmeasured": "why", "since_step": 3},
                NET | {"left_exact": "no site"},
                NET | {"by_script": True},
            ],
            "outside": 2048,
        },
        [
            "Net compressed, from step 3 on; bytes not measured: why",
            "Net left exact: no site",
            "Net is as the script compresses it itself",
            "2,048 values of parameters lie in no module; what is computed with them is exact",
            "steps: 1 of AdamW",
        ],
    ),
    (
        "spawned, TCP without --zip",
        ONE_STEP | {"models": [NET | {"by_script": True}], "spawned": 2, "own": False, "step_nbytes": 4096},
        [
            "Net is as the script compresses it itself",
            "steps: 1 of AdamW",
            "2 processes that the script spawned were trained in; the above is of the first of them to end",
            "this process sent 4,096 bytes over TCP per step (median); --zip auto codes them losslessly "
            "where that is faster",
        ],
    ),
    (
        "--zip",
        ONE_STEP | {"asked_exact": True, "step_nbytes": 4096, "sent": SENT | {"uncoded": {"too small": 1}}},
        [
            "steps: 1 of AdamW",
            "activations are exact, as --activations 16 asks for",
            "this process sent 4,096 bytes over TCP per step (median)",
            "this process sent 600 bytes for 900 bytes of values (1.50x less) in 3 calls, 2 of them coded",
            "  uncoded: 1 calls, too small",
        ],
    ),
    (
        "--zip without a group, and without a call",
        ONE_STEP | {"asked_exact": True, "sent": NOTHING_SENT},
        [
            "steps: 1 of AdamW",
            "activations are exact, as --activations 16 asks for",
            "--zip on had no effect: this process made no process group of torch.distributed",
        ],
    ),
    (
        "--zip, groups left, nothing sent",
        ONE_STEP
        | {"asked_exact": True, "sent": NOTHING_SENT | {"groups": 1, "left_groups": {"its backend is mpi": 2}}},
        [
            "steps: 1 of AdamW",
            "activations are exact, as --activations 16 asks for",
            "this process sent 0 bytes for 0 bytes of values (no less) in 0 calls, 0 of them coded",
            "  left as the script made it, and not counted: 2 group(s), its backend is mpi",
        ],
    ),
]


@pytest.mark.parametrize(("changes", "lines"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_lines(changes: dict[str, Any], lines: list[str]) -> None:
    summary = summarize(Savings(Wishes())) | changes
    assert render(summary).splitlines() == [f"laconic run: {line}" for line in lines]
