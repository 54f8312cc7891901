"""One run that meets faults: started with restarts, watched to its end, and compared with an undisturbed run."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from laconic.train.config.schema import TrainConfig
from laconic.train.config.toml import save_config
from laconic.train.report.run_dir import latest_name
from tests.distributed.forked_workers import FAULTS
from tests.distributed.processes import Ending, ForkedCommand, environment, is_running, wait_until
from tests.patience import patient
from tests.train.runs import exact_metrics, tiny_config
from tests.trust.faults import Fault, dump

__all__ = ["KINDS", "STEPS", "Outcome", "Trial", "trial_config", "undisturbed"]

STEPS, EVERY = 16, 4
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
KINDS: dict[str, dict[str, Any]] = {
    "ddp": {"model.extra": {"attention_dropout": 0.3}},
    "fsdp": {"parallel": "fsdp", "optimizer.kind": "adamw8bit"},
    "pipeline": {"pipeline.stages": 2},
    "ep": {"model.family": "qwen3_moe", "model.extra": _EXPERTS, "moe.expert_parallel": 2},
}
"""Two processes each."""
_REASONS = {
    "kill": "was killed by SIGKILL",
    "stop": "was stopped for",
    "exit": "failed with exit code 3",
    "raise": "a fault of the test",
    "memory": "can't allocate memory",
    "spin": "was not there for a collective",
}
_CULPRIT = re.compile(r"rank (\d+) \(pid (\d+) on [^)]*\)")


def trial_config(folder: Path, name: str, kind: str, changes: Mapping[str, Any] | None = None) -> TrainConfig:
    """The run `name` of a kind in `folder`."""
    always = {"steps": STEPS, "checkpoint.every": EVERY, "eval_every": 8, "nproc": 2, "verify.every": 4}
    return tiny_config(folder, name, always | {"rank_timeout_seconds": patient(20.0)} | KINDS[kind] | (changes or {}))


def undisturbed(folder: Path, kind: str) -> Path:
    """The run of a kind that nothing happens to; made once."""
    config = trial_config(folder, f"undisturbed-{kind}", kind)
    if not (folder / f"undisturbed-{kind}").exists():
        trial = Trial(folder, config, [])
        trial.run()
        assert not trial.outcome.faults
    return folder / f"undisturbed-{kind}"


@dataclass
class Outcome:
    """What came of a trial."""

    seconds: list[float | None] = field(default_factory=list)
    """From each fault to the moment it was seen: by the launcher, or, of the launcher's death, by its processes. None:
    the launcher was killed before anybody could write it down."""
    faults: list[Fault] = field(default_factory=list)
    """Those that happened."""
    reasons: list[str] = field(default_factory=list)
    """What was said of each."""


class Trial:
    """`laconic train` with faults in a folder of its own; `run` fails if anything is not as promised."""

    def __init__(self, folder: Path, config: TrainConfig, faults: Sequence[Fault]) -> None:
        self._config = config
        self._faults = list(faults)
        self._run_dir = Path(str(config.run_dir))
        self._scratch = folder / f"{self._run_dir.name}-files"
        self.outcome = Outcome()
        self.endings: list[Ending] = []

    def run(self) -> None:
        """Start it, again with --resume when the launcher was killed, and check everything."""
        self._scratch.mkdir()
        (self._scratch / "tmp").mkdir()
        shared = set(os.listdir("/dev/shm"))
        remaining = self._faults
        for number in range(len(self._faults) + 1):
            ending = self._start(number, remaining)
            self.endings.append(ending)
            happened = self._happened(number)
            self._check_named(happened, ending)
            if ending.code == -9:
                self._wait_for_orphans(number)
            remaining = remaining[len(happened) :]
            if not (happened and happened[-1][0].action == "launcher"):
                break
        assert ending.code == 0, ending.err
        self._check_nothing_is_left(shared)

    def _start(self, number: int, faults: Sequence[Fault]) -> Ending:
        """One `laconic train` to its end."""
        log = self._log(number)
        file = self._scratch / f"config-{number}.toml"
        config = self._config
        again = number > 0 and (self._run_dir / "config.toml").is_file()  # else it had not begun
        save_config(config, file)
        arguments = ["train", "--config", str(file), "--restarts", str(len(faults))]
        arguments += ["--resume", "--run-dir", str(self._run_dir)] if again else []
        variables = environment(TMPDIR=str(self._scratch / "tmp"))
        if faults:
            variables |= {FAULTS: dump(list(faults), log)}
        command = ForkedCommand(arguments, self._scratch / f"printed-{number}", variables)
        return command.finish(240)

    def _log(self, number: int) -> Path:
        return self._scratch / f"log-{number}"

    def _entries(self, number: int) -> list[dict[str, Any]]:
        file = self._log(number)
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def _happened(self, number: int) -> list[tuple[Fault, float]]:
        """The faults of one start, and when they were."""
        return [(Fault(**entry["fault"]), entry["time"]) for entry in self._entries(number) if "fault" in entry]

    def _wait_for_orphans(self, number: int) -> None:
        """The launcher has been killed: its processes have to leave, and then its files."""
        pids = [entry["pid"] for entry in self._entries(number) if "pid" in entry]
        wait_until(lambda: not any(map(is_running, pids)), timeout_seconds=20)
        fault, began = self._happened(number)[-1]
        self.outcome.seconds.append(time.time() - began)
        self.outcome.reasons.append("the launcher was killed")
        self.outcome.faults.append(fault)
        wait_until(lambda: not os.listdir(self._scratch / "tmp"), timeout_seconds=20)

    def _check_named(self, happened: Sequence[tuple[Fault, float]], ending: Ending) -> None:
        """Each fault is one restart whose reason names the rank and what happened."""
        # A process that is killed while it writes leaves half a line in front.
        lines = [line for line in ending.err.splitlines() if "; restart " in line and "laconic: " in line]
        said = [line[line.index("laconic: ") :] for line in lines]
        by_launcher = [(fault, at) for fault, at in happened if fault.action != "launcher"]
        assert len(said) == len(by_launcher), (by_launcher, ending.err)
        file = self._run_dir / "launch.json"
        record = json.loads(file.read_text())["restarts"] if file.exists() else []
        times = {restart["reason"]: restart["time"] for restart in record}
        for (fault, at), line in zip(by_launcher, said, strict=True):
            culprit = _CULPRIT.search(line)
            assert culprit is not None, line
            assert int(culprit[1]) == fault.rank, (fault, line)
            assert _REASONS[fault.action] in line, (fault, line)
            reason = line.removeprefix("laconic: ").partition("; restart ")[0]
            self.outcome.faults.append(fault)
            self.outcome.reasons.append(reason)
            seen = datetime.fromisoformat(times[reason]).timestamp() if reason in times else None
            self.outcome.seconds.append(None if seen is None else seen - at)

    def _check_nothing_is_left(self, shared: set[str]) -> None:
        """No process, no file, no shared memory, no lock."""
        pids = [e["pid"] for number in range(len(self.endings)) for e in self._entries(number) if "pid" in e]
        alive = [pid for pid in pids if is_running(pid)]
        assert not alive, alive
        wait_until(lambda: not os.listdir(self._scratch / "tmp"), timeout_seconds=20)
        ours = [name for name in set(os.listdir("/dev/shm")) - shared if any(str(pid) in name for pid in pids)]
        assert not ours, ours
        listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.pid in pids]
        assert not listening, listening
        assert not (self._run_dir / "lock.json").exists()
        leftovers = [path.name for path in self._run_dir.rglob(".*") if path.name not in (".metadata",)]
        assert not leftovers, leftovers

    def check_same(self, expected: Path) -> None:
        """The metrics and the last checkpoint are those of the run in `expected`, bit for bit."""
        assert exact_metrics(str(self._run_dir)) == exact_metrics(str(expected))
        assert _state(self._run_dir) == _state(expected)
        summary = json.loads((self._run_dir / "summary.json").read_text())
        assert len(summary["restarts"]) >= sum(fault.action != "launcher" for fault in self.outcome.faults[-1:])


def _state(run_dir: Path) -> dict[str, str]:
    """SHA-256 of the shards of the last checkpoint."""
    name = latest_name(run_dir)
    # Killed between the new name and `latest`, a run saves the step again beside what nothing points to.
    assert name is not None
    assert re.fullmatch(rf"step-{STEPS:08d}(-\d+)?", name), name
    manifest = json.loads((run_dir / "checkpoints" / name / "manifest.json").read_text())
    return {file: record["sha256"] for file, record in manifest["files"].items() if file.startswith("__")}
