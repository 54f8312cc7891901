"""Fixtures of commands."""

from __future__ import annotations

from typing import Any

import pytest

from laconic.cost.memory.traced import TracedModel
from laconic.train.memory import trace

_traced: dict[str, TracedModel] = {}


@pytest.fixture
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Further plans of the same sizes, in this test and others, take the first one's trace, which takes seconds."""
    trace_config = trace.trace_config

    def once(source: Any, *args: Any, **options: Any) -> TracedModel:
        key = repr((source, args, options))
        assert " at 0x" not in key, "the address of an object that may be gone, and another at its place"
        if key not in _traced:
            _traced[key] = trace_config(source, *args, **options)
        return _traced[key]

    monkeypatch.setattr(trace, "trace_config", once)
