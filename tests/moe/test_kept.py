"""What autotune keeps on disk: found again by equal facts alone, and never in the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import laconic
from laconic.collectives.policy.microbench import Ranks
from laconic.cost.moe.search import LayerPlan
from laconic.moe.tuning import kept
from laconic.moe.tuning.autotune import Measured
from laconic.moe.tuning.kept import Kept


class _Alone(Ranks):
    """A world of one."""

    def __init__(self, host: str) -> None:
        self.device, self.group, self.host = torch.device("cpu"), SimpleNamespace(rank=lambda: 0), host  # type: ignore[assignment]

    def texts(self, text: str) -> list[str]:
        return [self.host]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kept, "first_answer", lambda mine, group: mine)
    return tmp_path / "laconic" / "moe_autotune"


def _plus_one(values: Any) -> int:
    return int(values["n"]) + 1


def test_equal_facts_find_it_and_others_do_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Kept(_Alone("a"), True)
    assert one.get({"shape": (1, 2)}, _plus_one) is None
    one.put({"shape": (1, 2)}, {"n": 1})
    assert Kept(_Alone("a"), True).get({"shape": [1, 2]}, _plus_one) == 2
    assert one.get({"shape": (1, 3)}, _plus_one) is None
    assert Kept(_Alone("b"), True).get({"shape": (1, 2)}, _plus_one) is None
    monkeypatch.setattr(laconic, "__version__", "0.0.0")
    assert Kept(_Alone("a"), True).get({"shape": (1, 2)}, _plus_one) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"kept": {}}', '{"kept": {"n": "x"}}', "{}", "1" * 400])
def test_what_cannot_be_read_is_measured_again(text: str, folder: Path) -> None:
    one = Kept(_Alone("a"), True)
    one.put({}, {"n": 1})
    (file,) = folder.iterdir()
    file.write_text(text)
    assert one.get({}, _plus_one) is None
    one.put({}, {"n": 3})
    assert one.get({}, _plus_one) == 4


def test_switched_off_nothing_is_written_and_nothing_found(folder: Path) -> None:
    Kept(_Alone("a"), False).put({}, {"n": 1})
    assert not folder.exists()
    Kept(_Alone("a"), True).put({}, {"n": 1})
    assert Kept(_Alone("a"), False).get({}, _plus_one) is None


def test_a_folder_that_cannot_be_written_is_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.parent.write_text("a file in its place")
    Kept(_Alone("a"), True).put({}, {"n": 1})
    assert str(folder) in caplog.text
    assert Kept(_Alone("a"), True).get({}, _plus_one) is None


def test_measurements_survive_being_kept(folder: Path) -> None:
    plans: Sequence[LayerPlan] = [LayerPlan("flat"), LayerPlan("depth 2", "tiered", 4, "raw")]
    measured = Measured(dict.fromkeys(plans, (0.1, 0.2)), plans[1], {plans[0]: (0.9, float("inf"))})
    Kept(_Alone("a"), True).put({}, measured.to_json())
    assert Kept(_Alone("a"), True).get({}, Measured.from_json) == replace(measured, is_kept=True)
