"""Processes that die, hang or are told to stop; disks that are full; environments that are wrong."""

import re
import shlex
import signal
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest

from laconic.train.checkpoint.save_load import find_checkpoint
from laconic.train.config.toml import save_config
from laconic.train.distributed.world import World
from laconic.train.report.run_dir import latest_name
from tests.distributed.pair import DROPOUT, Pair
from tests.distributed.processes import (
    ForkedCommand,
    environment,
    finish,
    free_port,
    is_running,
    num_steps,
    rank_environment,
    run_joined,
    start,
    start_training,
    wait_until,
    workers_of,
)
from tests.train.runs import ALONE, exact_metrics, tiny_config

LONG = {"steps": 100, "eval_every": 0, "checkpoint.every": 10, "nproc": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Path:
    """The same folder, with what two runs are if nothing happens to them."""
    run_joined(_undisturbed, (folder,), 2)
    return folder


def _undisturbed(world: World, folder: Path) -> None:
    pair = Pair(folder, world)
    pair.train(tiny_config(folder, "long", LONG))
    pair.train(tiny_config(folder, "ddp", DROPOUT))


def long_config(folder: Path, name: str, **changes: Any) -> Any:
    return tiny_config(folder, name, LONG | changes)


@pytest.mark.slow
def test_a_killed_rank_is_named_and_resume_continues_as_if_nothing_happened(undisturbed: Path, tmp_path: Path) -> None:
    config = long_config(undisturbed, "killed")
    launcher = start_training(config, tmp_path / "config.toml")
    wait_until(lambda: num_steps(config.run_dir) >= 15)
    workers = workers_of(launcher)
    workers[1].kill()
    ending = finish(launcher, timeout_seconds=20)
    assert ending.code == 1
    assert re.search(rf"rank 1 \(pid {workers[1].pid} on .+\) was killed by SIGKILL", ending.err)
    assert "Traceback" not in ending.err
    assert "SIGABRT" not in ending.err
    assert "terminate called" not in ending.err
    assert not workers[0].is_running() or workers[0].status() == psutil.STATUS_ZOMBIE
    advice = re.search(r"continue after step-(\d+) with: .*laconic'? (train --resume .*)", ending.err)
    assert advice is not None
    assert latest_name(undisturbed / "killed") == f"step-{advice[1]}"
    assert int(advice[1]) >= 10

    ending = finish(start(["-m", "laconic", *shlex.split(advice[2])], environment()))
    assert ending.code == 0, ending.err
    assert exact_metrics(config.run_dir) == exact_metrics(undisturbed / "long")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_stop_request_saves_and_leaves(number: signal.Signals, code: int, folder: Path, tmp_path: Path) -> None:
    config = long_config(folder, f"stopped-{code}", parallel="fsdp")
    launcher = start_training(config, tmp_path / "config.toml")
    wait_until(lambda: num_steps(config.run_dir) >= 3)
    launcher.send_signal(number)
    ending = finish(launcher, timeout_seconds=30)
    assert ending.code == code, ending.err
    assert "stopping after this step" in ending.err
    assert f" train --resume --run-dir {config.run_dir}" in ending.out
    assert find_checkpoint(Path(str(config.run_dir)), ALONE).step == num_steps(config.run_dir) < 100


@pytest.mark.ci
def test_a_stop_request_before_the_first_step_just_leaves(folder: Path, tmp_path: Path) -> None:
    config = long_config(folder, "too-early")
    launcher = start_training(config, tmp_path / "config.toml")
    wait_until(lambda: len(workers_of(launcher)) == 2)
    launcher.send_signal(signal.SIGINT)
    ending = finish(launcher, timeout_seconds=20)
    assert ending.code == 130
    assert "Traceback" not in ending.err
    assert not (folder / "too-early").exists()


@pytest.mark.slow
def test_a_second_interrupt_leaves_at_once(folder: Path, tmp_path: Path) -> None:
    config = long_config(folder, "at-once", **{"checkpoint.every": 0})
    launcher = start_training(config, tmp_path / "config.toml")
    wait_until(lambda: num_steps(config.run_dir) >= 3)
    workers = workers_of(launcher)
    workers[1].suspend()  # so that the step cannot be finished
    launcher.send_signal(signal.SIGINT)
    wait_until(lambda: launcher.poll() is not None or _has_stopped_stepping(config.run_dir))
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGINT)
    ending = finish(launcher, timeout_seconds=20)
    assert ending.code == 130
    assert "nothing was saved" in ending.err
    assert latest_name(folder / "at-once") is None


def _has_stopped_stepping(run_dir: str) -> bool:
    before = num_steps(run_dir)
    try:
        wait_until(lambda: num_steps(run_dir) > before, timeout_seconds=1)
    except AssertionError:
        return True
    return False


@pytest.mark.slow
def test_a_hung_rank_is_given_up_on_and_named(folder: Path, tmp_path: Path) -> None:
    config = long_config(folder, "hung", rank_timeout_seconds=3.0)
    launcher = start_training(config, tmp_path / "config.toml")
    wait_until(lambda: num_steps(config.run_dir) >= 12)
    workers_of(launcher)[1].suspend()
    ending = finish(launcher, timeout_seconds=90)
    assert ending.code == 1
    assert re.search(r"rank 1 \(.*\) was stopped for [0-9.]+ s and was killed", ending.err)
    assert "continue after step-000000" in ending.err


@pytest.mark.slow
def test_workers_do_not_outlive_their_launcher(folder: Path, tmp_path: Path) -> None:
    config = long_config(folder, "orphans", steps=100_000)
    launcher = start_training(config, tmp_path / "config.toml")
    wait_until(lambda: num_steps(config.run_dir) >= 3)
    workers = workers_of(launcher)
    launcher.kill()
    finish(launcher)
    wait_until(lambda: not any(is_running(worker.pid) for worker in workers.values()), timeout_seconds=20)


@pytest.mark.slow
def test_an_error_in_the_workers_is_told_once(folder: Path, tmp_path: Path) -> None:
    config = long_config(folder, "no-data", **{"data.paths": ("/nowhere/at/all.txt",)})
    ending = finish(start_training(config, tmp_path / "config.toml"))
    assert ending.code == 2
    assert ending.err.count("/nowhere/at/all.txt") == 1
    assert "Traceback" not in ending.err
    assert not (folder / "no-data").exists()


@pytest.mark.slow
def test_torchrun_runs_the_same_command(undisturbed: Path, tmp_path: Path) -> None:
    config = tiny_config(undisturbed, "torchrun", {"model.extra": {"attention_dropout": 0.3}, "nproc": 5})
    save_config(config, tmp_path / "config.toml")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "laconic", "train"]
    # PYTHONWARNINGS is not ours to set for torchrun itself.
    ending = finish(start([*command, "--config", str(tmp_path / "config.toml")], environment(PYTHONWARNINGS="default")))
    assert ending.code == 0, ending.err
    assert exact_metrics(config.run_dir) == exact_metrics(undisturbed / "ddp")


@pytest.mark.ci
def test_a_world_that_never_meets_is_reported(folder: Path, tmp_path: Path) -> None:
    save_config(long_config(folder, "lonely", rank_timeout_seconds=2.0), tmp_path / "config.toml")
    command = ["train", "--config", str(tmp_path / "config.toml")]
    ending = ForkedCommand(command, tmp_path / "printed", rank_environment(0, 2, free_port())).finish(60)
    assert ending.code == 2
    assert re.search(r"WORLD_SIZE is 2, but rank 0 on .* could not meet that many processes .* within 2 s", ending.err)
    assert not (folder / "lonely").exists()


@pytest.mark.ci
def test_a_taken_master_port_is_named(folder: Path, tmp_path: Path) -> None:
    save_config(long_config(folder, "taken"), tmp_path / "config.toml")
    command = ["train", "--config", str(tmp_path / "config.toml")]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ending = ForkedCommand(command, tmp_path / "printed", rank_environment(0, 2, port)).finish(60)
    assert ending.code == 2
    assert f"MASTER_PORT is {port}, but that port is in use" in ending.err


@pytest.mark.slow
def test_a_file_that_cannot_grow_fails_the_save_and_leaves_no_latest(folder: Path, tmp_path: Path) -> None:
    config = tiny_config(folder, "small-files", {"checkpoint.every": 2})
    save_config(config, tmp_path / "config.toml")
    limit_nbytes = 60_000  # the metrics fit, a shard does not
    program = (
        f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit_nbytes}, {limit_nbytes})); "
        "from laconic.cli.main import main; sys.exit(main())"
    )
    ending = finish(start(["-c", program, "train", "--config", str(tmp_path / "config.toml")], environment()))
    assert ending.code == 2, ending.err
    assert re.search(r"error: checkpoint .*step-00000002: .*File too large", ending.err)
    assert list((folder / "small-files" / "checkpoints").iterdir()) == []
