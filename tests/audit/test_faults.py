"""Faults planted one at a time: the audit alone has to refuse each in the first step, and nothing without it."""

from __future__ import annotations

import pytest

from laconic.errors import AuditError
from tests.audit.faults import FAULTS, Fault

QUICK = {repr(fault.host): fault for fault in FAULTS}.values()
"""A fault of every training."""


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, id=fault.name, marks=[] if fault in QUICK else pytest.mark.ci) for fault in FAULTS]
)
def test_a_planted_fault_is_refused(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AuditError):
        fault.host(lambda: fault.plant(monkeypatch))


@pytest.mark.parametrize("fault", {repr(fault.host): fault for fault in FAULTS}.values(), ids=lambda fault: fault.name)
@pytest.mark.ci
def test_without_the_fault_its_training_passes(fault: Fault) -> None:
    report = fault.host(lambda: None)
    assert report.num_parameters or report.num_layers_of_experts
