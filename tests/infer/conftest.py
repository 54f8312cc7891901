"""Workers of engines are forked."""

from __future__ import annotations

import subprocess

import pytest

from laconic.infer import control


@pytest.fixture(scope="module", autouse=True)
def _forked_workers(forked_workers: None) -> None:
    """Most tests ask for what workers do, few for how an engine starts them: those ask for `fresh_workers`."""


@pytest.fixture
def fresh_workers(forked_workers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines start their workers as they do elsewhere, by an interpreter for each."""
    monkeypatch.setattr(control, "subprocess", subprocess)
