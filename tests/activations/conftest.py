"""Fixtures of the activation tests."""

from __future__ import annotations

import pytest

from laconic.activations import kept
from tests.activations.models import FAMILIES


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets every site keep its tensor as it is, which leaves the hand-written backward alone under test."""
    monkeypatch.setattr(kept, "_producer_holds", lambda x, nodes: True)
