"""Processes that a script spawns get the savings, and the interpreter's own way to start them comes back."""

from __future__ import annotations

from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess

from laconic.run.models import Wishes
from laconic.run.spawned import Spawned


def test_blocks_may_stand_in_each_other() -> None:
    with Spawned(Wishes(), "off"), Spawned(Wishes(), "off"):
        assert SpawnProcess.start is not BaseProcess.start
    assert SpawnProcess.start is BaseProcess.start
