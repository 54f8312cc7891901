"""What a process takes from its environment, and what is said about workers that died."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

import laconic
from laconic.errors import ConfigError, CorruptionError, DataError, TrainingError
from laconic.installation import command
from laconic.train import signals
from laconic.train.config.schema import TrainConfig
from laconic.train.distributed import world
from laconic.train.distributed.world import RankInfo, read_environment
from laconic.train.launch import launcher as launch_module
from laconic.train.launch.failure import Failure, failure_of, was_asked_for, why_no_restart
from laconic.train.launch.launcher import _give_up, launch
from laconic.train.signals import EXIT_PEER_LOST, INTERRUPTED, STOP_SIGNAL
from tests.distributed.processes import environment, run_ranks
from tests.patience import patient
from tests.train.runs import tiny_config

GOOD = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def without(*names: str) -> dict[str, str]:
    return {name: value for name, value in GOOD.items() if name not in names}


@pytest.mark.parametrize("above", ["laconic", "a sp\u00e1ce/laconic", "laconic/src"])
def test_a_lost_process_says_where_in_the_library_it_was(
    above: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of the library are those below its own folder: a script of the user may lie in a folder of that name."""
    package = Path(laconic.__file__).parent
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))

    def record() -> None:
        thread = threading.Thread(target=signals._record_place)
        thread.start()
        thread.join()

    def through(path: Path, call: Callable[[], None]) -> Callable[[], None]:
        names: dict[str, Any] = {"call": call}
        exec(compile("def step(): call()", str(path), "exec"), names)
        return lambda: names["step"]()

    through(package / "train" / "any.py", through(tmp_path / above / "users.py", record))()
    text = json.loads(file.read_text())["message"]["message"]
    assert text.startswith(f"{INTERRUPTED}any.py:1 in step, threading.py:"), text


def test_torchruns_variables_are_understood() -> None:
    assert read_environment(GOOD) == RankInfo(rank=3, world_size=8, local_rank=1, local_world_size=2)
    assert read_environment(without("LOCAL_WORLD_SIZE")) == RankInfo(3, 8, 1, 8)
    assert read_environment({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}) == RankInfo(0, 1, 0, 1)


def test_processes_that_meet_in_a_file_need_no_port() -> None:
    assert read_environment(without("MASTER_ADDR", "MASTER_PORT") | {"LACONIC_STORE": "/a/file"}) == RankInfo(
        3, 8, 1, 2
    )


def test_an_environment_without_them_is_no_place() -> None:
    assert read_environment({"MASTER_PORT": "1", "HOME": "/"}) is None


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (without("RANK"), "RANK is not set in the environment, but WORLD_SIZE is; start the processes with torchrun"),
        (GOOD | {"RANK": "two"}, "RANK is 'two' in the environment, but it must be an integer"),
        (GOOD | {"RANK": "8"}, r"RANK is 8 .* must lie in \[0, WORLD_SIZE\) = \[0, 8\)"),
        (GOOD | {"WORLD_SIZE": "0"}, "WORLD_SIZE is 0"),
        (GOOD | {"LOCAL_RANK": "2"}, r"LOCAL_RANK is 2 .* \[0, LOCAL_WORLD_SIZE\) = \[0, 2\)"),
        (GOOD | {"LOCAL_WORLD_SIZE": "9"}, r"LOCAL_WORLD_SIZE is 9 .* \[1, 8\]"),
        (GOOD | {"RANK": "0"}, r"LOCAL_RANK is 1 .* at most RANK \(0\)"),
        (without("MASTER_ADDR"), "MASTER_ADDR is not set"),
        (GOOD | {"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        (GOOD | {"MASTER_PORT": "70000"}, "MASTER_PORT is '70000'"),
    ],
)
def test_a_wrong_environment_is_named(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_environment(environment)


def test_a_wrong_environment_stops_the_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="RANK is not set in the environment, but WORLD_SIZE is"):
        launch(tiny_config(tmp_path, "run"))
    assert not (tmp_path / "run").exists()


def test_one_process_needs_no_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "elastic_launch", None)
    assert launch(tiny_config(tmp_path, "run", {"steps": 1})) == 0
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    assert launch(tiny_config(tmp_path, "under-torchrun", {"steps": 1, "nproc": 7})) == 0


def test_what_torchrun_decides_has_no_effect_and_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    for number, (nproc, restarts, expected) in enumerate(
        [(7, 2, ["nproc = 7", "restarts = 2"]), (1, 1, ["restarts = 1"]), (TrainConfig().nproc, 0, [])]
    ):
        config = tiny_config(tmp_path, f"run{number}", {"steps": 1, "nproc": nproc, "restarts": restarts})
        assert launch(config) == 0
        assert re.findall(r"laconic: (.*) has no effect: RANK is set", capsys.readouterr().err) == expected


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"eval_every": 1, "data.validation_fraction": 0.0}, ["eval_every = 1"]),
        ({"eval_every": 1, "eval_sequences": 0, "data.validation_fraction": 0.25}, ["eval_every = 1"]),
        ({"eval_every": 1, "data.validation_fraction": 0.25}, []),
        ({"eval_every": 0, "data.validation_fraction": 0.0}, []),
        (
            {"task": "instruction-tuning", "data.validation_fraction": 0.25, "eval_every": 1},
            ["eval_every = 1", "data.validation_fraction = 0.25"],
        ),
    ],
)
def test_validation_that_cannot_be_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: dict[str, Any], expected: list[str]
) -> None:
    if "task" in changed:
        (tmp_path / "one.jsonl").write_text('{"prompt": "one ", "completion": "example"}\n', encoding="utf-8")
        changed = {**changed, "data.paths": [str(tmp_path / "one.jsonl")]}
    assert launch(tiny_config(tmp_path, "run", {"steps": 1, "nproc": 1, "eval_sequences": 2, **changed})) == 0
    assert re.findall(r"laconic: (.*) has no effect: th", capsys.readouterr().err) == expected


def test_one_process_says_what_has_no_effect_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(tiny_config(tmp_path, "run", {"steps": 1, "zip": "on", "gradients.reduce": "q8"})) == 0
    said = re.findall(r"laconic: (.*) has no effect: this run is one process", capsys.readouterr().err)
    assert said == ["zip = on", "gradients.reduce = q8"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"nproc": 100, "batch_size": 4},
            r"batch_size is 4, but it must be a multiple of .* \(100 x 1",
        ),
        ({"nproc": 3, "pipeline.stages": 2}, "pipeline.stages is 2, but it must divide the number of processes"),
        ({"nproc": 1_000_000, "batch_size": 1_000_000}, r"nproc is 1000000, but this machine has \d+ GiB of memory"),
    ],
)
def test_no_process_is_started_for_what_cannot_be(
    changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_module, "elastic_launch", None)
    with pytest.raises(ConfigError, match=message):
        launch(tiny_config(tmp_path, "run", changes))
    assert not (tmp_path / "run").exists()


def test_too_few_cores_are_worth_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch_module, "num_cores", lambda: 2)
    monkeypatch.setattr(launch_module, "_launch_workers", lambda config: 0)
    assert launch(tiny_config(tmp_path, "run", {"nproc": 4})) == 0
    assert "4 processes share 2 cores" in capsys.readouterr().err
    assert launch(tiny_config(tmp_path, "run", {"nproc": 2})) == 0
    assert capsys.readouterr().err == ""


def failure(tmp_path: Path, rank: int, code: int, error: str | None = None) -> ProcessFailure:
    """A worker's end as the elastic agent hands it over."""
    file = tmp_path / f"error-{rank}.json"
    if error is not None:
        details = {"message": error, "extraInfo": {"py_callstack": "...", "timestamp": "1"}}
        file.write_text(json.dumps({"message": details}))
    return ProcessFailure(local_rank=rank, pid=1000 + rank, exitcode=code, error_file=str(file))


LOST = "RuntimeError: gloo/transport/tcp/pair.cc:553 Connection closed by peer"
TIMED_OUT = "RuntimeError: gloo/transport/tcp/unbound_buffer.cc:78 Timed out waiting 3000ms"


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        # The agent may see the bystander first.
        ([(0, EXIT_PEER_LOST, LOST), (1, -9, None)], r"rank 1 \(pid 1001 on .*\) was killed by SIGKILL, as the kernel"),
        ([(1, -11, None), (0, -15, None)], r"rank 1 .* was killed by SIGSEGV; the other processes were stopped"),
        ([(0, -15, None), (2, 3, None)], "rank 2 .* failed with exit code 3;"),
        ([(1, 1, "ZeroDivisionError: oh"), (0, EXIT_PEER_LOST, LOST)], r"rank 1 .* code 1 \(ZeroDivisionError: oh\)"),
        ([(0, EXIT_PEER_LOST, TIMED_OUT), (1, -9, None)], "rank 1 .* did not answer within rank_timeout_seconds"),
        ([(0, EXIT_PEER_LOST, TIMED_OUT), (1, EXIT_PEER_LOST, TIMED_OUT)], "rank 0 .* lost contact .* Timed out"),
        (
            [(0, EXIT_PEER_LOST, TIMED_OUT), (1, EXIT_PEER_LOST, INTERRUPTED + "data.py:7 in read")],
            r"rank 1 .* was not there for a collective for rank_timeout_seconds, but at data.py:7 in read",
        ),
        (
            [(1, EXIT_PEER_LOST, "RuntimeError: Application timeout caused pair closure"), (0, EXIT_PEER_LOST, None)],
            "rank 0 .* was not there for a collective",
        ),
        ([(0, EXIT_PEER_LOST, LOST), (1, EXIT_PEER_LOST, None)], "rank 0 .* lost contact"),
        # An error of ours that a peer caused says no more than torch's.
        (
            [(0, EXIT_PEER_LOST, f"CollectiveError: rows ({TIMED_OUT})"), (1, EXIT_PEER_LOST, INTERRUPTED + "a.py:7")],
            r"rank 1 .* was not there for a collective for rank_timeout_seconds, but at a.py:7",
        ),
        ([(0, EXIT_PEER_LOST, f"CollectiveError: rows ({LOST})"), (1, -9, None)], "rank 1 .* was killed by SIGKILL"),
    ],
)
def test_the_culprit_is_named(
    ends: list[tuple[int, int, str | None]], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = {rank: failure(tmp_path, rank, code, error) for rank, code, error in ends}
    assert _give_up(failure_of(failures), "", tiny_config(tmp_path, "run"), tmp_path) == 1
    said = capsys.readouterr().err
    assert re.search(message, said)
    assert "no checkpoint had been saved" in said


def test_a_rank_that_did_not_run_is_the_culprit_whatever_the_others_did(tmp_path: Path) -> None:
    failures = {0: failure(tmp_path, 0, 1, "RuntimeError: oh"), 1: failure(tmp_path, 1, -9)}
    found = failure_of(failures, {0: 4, 1: 3}, {1: 2.0})
    assert (found.rank, found.kind, found.step) == (1, "hung", 3)
    assert re.fullmatch(r"rank 1 \(pid 1001 on .*, step 3\) was stopped for 2.0 s and was killed", found.what)


def test_the_last_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "my run"
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "checkpoints" / "latest").write_text("step-00000040\n")
    killed = failure_of({0: failure(tmp_path, 0, -9)})
    assert _give_up(killed, "", tiny_config(tmp_path, "run"), run_dir) == 1
    said = capsys.readouterr().err
    assert f"continue after step-00000040 with: {command()} train --resume --run-dir '{run_dir}'\n" in said


@pytest.mark.parametrize("cls", [DataError, TrainingError, ConfigError, CorruptionError])
def test_an_error_of_ours_is_raised_here_as_it_was_there(cls: type[Exception], tmp_path: Path) -> None:
    failures = {
        0: failure(tmp_path, 0, EXIT_PEER_LOST, LOST),
        1: failure(tmp_path, 1, 2, f"{cls.__name__}: the data: is empty"),
    }
    with pytest.raises(cls, match=r"^the data: is empty$"):
        _give_up(failure_of(failures), "", tiny_config(tmp_path, "run"), tmp_path)


def test_a_stop_that_was_asked_for_is_no_failure(tmp_path: Path) -> None:
    saved = {rank: failure(tmp_path, rank, code) for rank, code in ((0, 130), (1, 130), (2, -signal.SIGTERM))}
    too_early = {0: failure(tmp_path, 0, -STOP_SIGNAL), 1: failure(tmp_path, 1, EXIT_PEER_LOST)}
    crashed_meanwhile = {0: failure(tmp_path, 0, 130), 1: failure(tmp_path, 1, -signal.SIGSEGV)}
    assert [was_asked_for(each) for each in (saved, too_early, crashed_meanwhile)] == [True, True, False]


@pytest.mark.parametrize(
    ("text", "rank"),
    [
        ("CheckpointError: checkpoint /a/step-00000004: rank 1: No space left on device", 1),
        ("CheckpointError: checkpoint /a/step-00000004: not there", None),
        ("CorruptionError: after step 4, replicas differ: rank 1 has other bits than ranks 0 and 2 in w", 1),
        ("CorruptionError: after step 4, replicas differ: ranks 0 and 1 have different bits, and", None),
    ],
)
def test_what_all_ranks_raise_together_is_the_doing_of_the_one_it_names(
    text: str, rank: int | None, tmp_path: Path
) -> None:
    found = failure_of({number: failure(tmp_path, number, 2, text) for number in (0, 1, 2)}, {0: 4, 1: 4, 2: 4})
    assert (found.rank, found.kind, found.step) == (rank, "error", 4)
    assert found.what.startswith("rank 1 (pid 1001 on " if rank else text)


def ended(kind: Any, text: str = "", step: int | None = None) -> Failure:
    return Failure(1, "rank 1 ended", kind, text, None, step)


@pytest.mark.parametrize(
    ("last", "earlier", "reason"),
    [
        (ended("killed"), [], None),
        (ended("hung", step=3), [ended("hung", step=3)], None),
        (ended("killed"), [ended("killed")] * 3, r"restarts \(3\) used up"),
        (ended("refused", "ConfigError: no"), [], "refused again"),
        (ended("refused", "DataError: gone", 7), [ended("killed")], "refused again"),
        (ended("error", "ValueError: oh"), [], "before the first step"),
        (ended("error", "ValueError: oh", 5), [], None),
        (ended("error", "ValueError: oh", 5), [ended("error", "ValueError: oh", 5)], "again in the same place"),
        (ended("error", "ValueError: oh", 6), [ended("error", "ValueError: oh", 5)], None),
        (ended("error", "ValueError: oh", 5), [ended("error", "exit code 3", 5)], None),
        # A checkpoint that cannot be read after a kill is an error before the first step, and not the first failure.
        (ended("error", "CheckpointError: no"), [ended("killed", step=5)], None),
    ],
)
def test_what_may_pass_is_tried_again_and_nothing_else(
    last: Failure, earlier: list[Failure], reason: str | None
) -> None:
    found = why_no_restart(last, earlier, 3)
    assert found is None if reason is None else re.search(reason, found or "")


def test_why_it_is_not_tried_again_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_config(tmp_path, "run", {"restarts": 3})
    assert _give_up(ended("killed"), "that is restarts (3) used up", config, tmp_path) == 1
    assert "no further restart: that is restarts (3) used up" in capsys.readouterr().err


def _join_with_threads(rank: int, local_world_size: int, variable: str | None, wanted: int) -> None:
    world.num_cores = lambda: 6
    world._init_process_group = lambda *args: None
    os.environ.pop("OMP_NUM_THREADS", None)
    if variable is not None:
        os.environ["OMP_NUM_THREADS"] = variable
    torch.set_num_threads(5)
    world.join_world(RankInfo(rank=0, world_size=4, local_rank=0, local_world_size=local_world_size), 1.0)
    assert torch.get_num_threads() == wanted


@pytest.mark.parametrize(("local", "variable", "wanted"), [(2, None, 3), (2, "1", 5), (1, None, 5)])
def test_threads_are_shared_by_the_processes_of_a_machine(local: int, variable: str | None, wanted: int) -> None:
    run_ranks(_join_with_threads, (local, variable, wanted), 1)


def test_a_worker_whose_launcher_has_removed_its_files_leaves_without_a_word(tmp_path: Path) -> None:
    # As after Ctrl-C while torch's agent starts the processes: one may be nobody's.
    done = subprocess.run(
        [sys.executable, "-m", "laconic.train.launch.worker", str(tmp_path / "gone")],
        env=environment(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0"),
        capture_output=True,
        text=True,
        timeout=patient(60),
    )
    assert (done.returncode, done.stdout, done.stderr) == (EXIT_PEER_LOST, "", "")
