"""Workers of engines are forked; their settings of transformers end with the file that uses them in this process."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from laconic.infer import control


@pytest.fixture(scope="module", autouse=True)
def _attention_is_given_back() -> Iterator[None]:
    """A worker of latent attention replaces "sdpa" for its whole process, which here runs other tests afterwards."""
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    yield
    ALL_ATTENTION_FUNCTIONS.register("sdpa", before)


@pytest.fixture(scope="module", autouse=True)
def _forked_workers(forked_workers: None) -> None:
    """Most tests ask for what workers do, few for how an engine starts them: those ask for `fresh_workers`."""


@pytest.fixture
def fresh_workers(forked_workers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines start their workers as they do elsewhere, by an interpreter for each."""
    monkeypatch.setattr(control, "subprocess", subprocess)
