"""The directory of checkpoints in any order of saves, crashes, damage, loads and strangers, beside a model of it.

The model is a table: name -> what was saved under it, and whether it was damaged since. After each call every
checkpoint that the table has as good has to be found, verified and loaded with its own bits, and nothing else.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from torch import Tensor, nn

from laconic.errors import CheckpointError, ConfigError
from laconic.train.checkpoint.save_load import (
    Checkpoint,
    find_checkpoint,
    load_checkpoint,
    newest_good_checkpoint,
    save_checkpoint,
)
from laconic.train.report.run_dir import checkpoint_age, latest_name
from laconic.train.run_lock import LOCK_FILE, RunLock
from tests.distributed.processes import run_ranks
from tests.train.runs import ALONE

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Crash(BaseException):
    """What stands for SIGKILL: nothing is written below the folder from now on."""


class Crashing:
    """An audit hook that lets no write below a folder happen after the first `left` ones; None: all happen."""

    def __init__(self) -> None:
        self.folder = "/nowhere"
        self.left: int | None = None
        self.happened = False

    def __call__(self, event: str, given: tuple[Any, ...]) -> None:
        if self.left is None:
            return
        match event:
            case "open":
                writes = isinstance(given[2], int) and bool(given[2] & _WRITING)
            case "os.rename" | "os.remove" | "os.rmdir" | "os.mkdir" | "os.truncate":
                writes = True
            case _:
                return
        if writes and isinstance(given[0], str | os.PathLike) and os.path.abspath(given[0]).startswith(self.folder):
            if self.left == 0:
                self.happened = True
                raise Crash
            self.left -= 1


crashing = Crashing()


def trained(seed: int) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 5)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def bits(model: nn.Module, optimizer: torch.optim.AdamW) -> list[Tensor]:
    moments = [optimizer.state[p][name] for p in model.parameters() for name in ("exp_avg", "exp_avg_sq", "step")]
    return [t.detach().clone() for t in (*model.parameters(), *moments)]


class Directory(RuleBasedStateMachine):
    """`good` has the seed of each undamaged checkpoint by its name, `damaged` the names of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.run_dir = Path(tempfile.mkdtemp(prefix="laconic-machine-"))
        self.root = self.run_dir / "checkpoints"
        self.good: dict[str, int] = {}
        self.damaged: set[str] = set()
        self.step = 0
        self.seed = 0
        self.lock: RunLock | None = None

    def teardown(self) -> None:
        crashing.left = None
        if self.lock is not None:
            self.lock.__exit__(None)
        shutil.rmtree(self.run_dir)

    # --- saving ---

    def save(self, keep: int, zipped: bool) -> Path:
        model, optimizer = trained(self.seed)
        return save_checkpoint(
            self.run_dir,
            ALONE,
            model,
            optimizer,
            step=self.step,
            identity={"seed": self.seed},
            texts={"config.json": "{}\n"},
            keep=keep,
            zipped=zipped,
            allowed=self.lock.check if self.lock is not None else lambda: None,
        )

    @rule(keep=st.integers(1, 3), zipped=st.booleans(), ahead=st.sampled_from((1, 1, 1, 0, -1)))
    def saves(self, keep: int, zipped: bool, ahead: int) -> None:
        self.seed += 1
        self.step = max(0, self.step + ahead)
        name = self.save(keep, zipped).name
        assert name not in self.good
        assert name not in self.damaged
        self.good[name] = self.seed
        self.follow(name)
        assert len(self.names()) <= max(keep, 1)
        assert latest_name(self.run_dir) == name
        assert not list(self.root.glob(".*"))

    @rule(keep=st.integers(1, 3), zipped=st.booleans(), after=st.integers(0, 14))
    def crashes_in_a_save(self, keep: int, zipped: bool, after: int) -> None:
        self.seed += 1
        self.step += 1
        before, latest = set(self.names()), latest_name(self.run_dir)
        crashing.folder, crashing.left, crashing.happened = str(self.run_dir), after, False
        try:
            self.save(keep, zipped)
        except Crash:
            pass
        finally:
            crashing.left = None
        new = set(self.names()) - before
        assert len(new) <= 1
        for name in new:
            self.good[name] = self.seed
        now = latest_name(self.run_dir)
        assert now == latest or {now} == new
        if now == latest:  # nothing goes before `latest` has moved on
            assert before <= set(self.names())
        if not crashing.happened:
            assert {now} == new
        self.follow(now)

    def follow(self, latest: str | None) -> None:
        """Older checkpoints may have gone, to make room, or because they belong to steps that were given up."""
        present = set(self.names())
        gone = (set(self.good) | self.damaged) - present
        assert latest is None or latest in present
        self.good = {name: seed for name, seed in self.good.items() if name not in gone}
        self.damaged -= gone

    def names(self) -> list[str]:
        found = os.listdir(self.root) if self.root.exists() else []
        return sorted((n for n in found if n.startswith("step-")), key=checkpoint_age, reverse=True)

    # --- damage ---

    @precondition(lambda self: self.good)
    @rule(data=st.data(), how=st.sampled_from(("flip", "cut", "remove", "swap")))
    def damages(self, data: st.DataObject, how: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.good)))
        files = sorted(path for path in (self.root / name).iterdir())
        file = data.draw(st.sampled_from(files))
        whole = file.read_bytes()
        if how == "remove":
            file.unlink()
        elif how == "cut":
            file.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
        elif how == "flip":
            place = data.draw(st.integers(0, 8 * len(whole) - 1))
            file.write_bytes(
                whole[: place // 8] + bytes([whole[place // 8] ^ 1 << place % 8]) + whole[place // 8 + 1 :]
            )
        else:
            other = data.draw(st.sampled_from(files))
            if other.read_bytes() == whole:
                return
            file.write_bytes(other.read_bytes())
        del self.good[name]
        self.damaged.add(name)

    @rule()
    def loses_latest(self) -> None:
        (self.root / "latest").unlink(missing_ok=True)

    # --- loading ---

    def check(self, found: Checkpoint) -> None:
        seed = self.good[found.path.name]
        assert found.identity == {"seed": seed}
        model, optimizer = trained(0)
        load_checkpoint(found, ALONE, model, optimizer)
        for one, two in zip(bits(model, optimizer), bits(*trained(seed)), strict=True):
            assert torch.equal(one, two)

    @rule()
    def restarts(self) -> None:
        """What a restart takes: the newest good one, whatever `latest` says; what a crash left is put right."""
        found = newest_good_checkpoint(self.run_dir, ALONE)
        if not self.good:
            assert found is None
            return
        assert found is not None
        assert found.path.name == max(self.good, key=checkpoint_age)
        self.check(found)
        assert latest_name(self.run_dir) == found.path.name
        assert not list(self.root.glob(".*"))
        self.step = found.step

    @rule()
    def resumes(self) -> None:
        """What --resume takes: `latest`, or a refusal that names the newest good one."""
        latest, newest = latest_name(self.run_dir), max(self.good, key=checkpoint_age, default=None)
        if latest in self.good or (latest is None and newest is not None):
            found = find_checkpoint(self.run_dir, ALONE)
            assert found.path.name == (newest if latest is None else latest)
            self.check(found)
            return
        said = r"no checkpoint to continue from|is good"
        if latest is not None:
            said = f"The newest good checkpoint is {newest}: " if newest else "No other checkpoint here is good"
        with pytest.raises(CheckpointError, match=said):
            find_checkpoint(self.run_dir, ALONE)

    @invariant()
    def every_checkpoint_is_good_or_refused(self) -> None:
        for name in self.names():
            manifest = self.root / name / "manifest.json"
            if name in self.good:
                assert find_checkpoint(self.run_dir, ALONE, name).identity == {"seed": self.good[name]}
                assert json.loads(manifest.read_text())["step"] == checkpoint_age(name)[0]
            else:
                assert name in self.damaged
                with pytest.raises(CheckpointError):
                    find_checkpoint(self.run_dir, ALONE, name)

    # --- others in the same directory ---

    @precondition(lambda self: self.lock is None)
    @rule()
    def locks(self) -> None:
        self.lock = RunLock()
        self.lock.acquire(self.run_dir)

    @precondition(lambda self: self.lock is not None)
    @rule()
    def another_run_is_refused(self) -> None:
        with RunLock() as other, pytest.raises(ConfigError, match="is at work; stop it or choose another"):
            other.acquire(self.run_dir)
        assert (self.run_dir / LOCK_FILE).exists()

    @precondition(lambda self: self.lock is not None)
    @rule()
    def a_lost_lock_ends_saving(self) -> None:
        assert self.lock is not None
        (self.run_dir / LOCK_FILE).unlink()
        before = self.names(), latest_name(self.run_dir)
        self.step += 1
        with pytest.raises(CheckpointError, match=r"is no longer this run's"):
            self.save(2, False)
        assert (self.names(), latest_name(self.run_dir)) == before
        with RunLock() as other:
            other.acquire(self.run_dir)
            with pytest.raises(CheckpointError, match=r"is no longer this run's"):
                self.save(2, False)
            self.lock.__exit__(None)
            assert (self.run_dir / LOCK_FILE).exists()  # the other's
        self.lock = None

    @precondition(lambda self: self.lock is not None)
    @rule()
    def unlocks(self) -> None:
        assert self.lock is not None
        self.lock.__exit__(None)
        self.lock = None
        assert not (self.run_dir / LOCK_FILE).exists()


def work(_: int, examples: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    sys.addaudithook(crashing)  # it stays: hence a process of its own
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Directory, settings=settings(max_examples=examples, stateful_step_count=15, derandomize=True)
    )


@pytest.mark.parametrize("examples", [5, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
@pytest.mark.ci
def test_what_can_be_loaded_is_what_was_saved_whole(examples: int) -> None:
    run_ranks(work, (examples,), 1)
