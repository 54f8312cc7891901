"""Four processes, then two, then four: the same samples in the same order, the same state after each load."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from laconic.formats.digest import digest
from laconic.train import run as run_module
from laconic.train.checkpoint import save_load
from laconic.train.config.toml import save_config
from laconic.train.distributed.world import World
from laconic.train.report.run_dir import latest_name
from laconic.train.steps import Steps
from laconic.train.tasks.language_modeling import LanguageModeling
from laconic.train.trainer import Trainer
from tests.distributed.pair import FSDP, SMOOTH, Pair
from tests.distributed.processes import (
    ForkedCommand,
    environment,
    finish,
    free_port,
    num_steps,
    rank_environment,
    run_joined,
    start,
    wait_until,
)
from tests.distributed.spread import SMOOTH_QWEN
from tests.train.runs import losses, resumed, tiny_config

STEPS = 6
COMMON = {"steps": STEPS, "batch_size": 8, "accumulation": 2, "eval_every": 0, "eval_sequences": 0}
KINDS: dict[str, dict[str, Any]] = {
    "ddp": SMOOTH,
    "fsdp": SMOOTH | FSDP | {"optimizer.kind": "adamw8bit"},
    "ep": SMOOTH_QWEN,
}


def config_of(folder: Path, name: str, kind: str, num_ranks: int) -> Any:
    experts = {"moe.expert_parallel": num_ranks} if kind.startswith("ep") else {}
    return tiny_config(folder, name, COMMON | KINDS[kind] | experts)


@contextmanager
def recorded(world: World, folder: Path, name: str) -> Iterator[None]:
    """Write down the samples of each step, and the state whenever it is saved or has been loaded."""
    current = {"step": 0}
    step, training_batch = Trainer.step, LanguageModeling.training_batch
    save, restore = run_module.save_checkpoint, Steps.restore

    def write(file: str, entry: Any) -> None:
        with (folder / f"{name}.{file}").open("a") as stream:
            stream.write(json.dumps(entry) + "\n")

    def state(number: int, model: Any, optimizer: Any) -> None:
        stored = save_load._state(model, optimizer, adapters=False)[0]
        parts = {f"weights of {key}": value for key, value in stored["model"].items()}
        parts |= {f"{k} of {key}": v for key, values in stored["optimizer"].items() for k, v in values.items()}
        hashes = {}
        for key, value in sorted(parts.items()):
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            hashes[key] = int(digest(whole))
        if world.is_main:
            write("states", [number, hashes])

    def count(self: Trainer, number: int, *args: Any) -> Any:
        current["step"] = number + 1
        return step(self, number, *args)

    def note(self: LanguageModeling, indices: Sequence[int]) -> Any:
        write(f"samples.{world.rank}", [current["step"], list(map(int, indices))])
        return training_batch(self, indices)

    def save_and_note(run_dir: Path, world: World, model: Any, optimizer: Any, **options: Any) -> Path:
        state(options["step"], model, optimizer)
        return save(run_dir, world, model, optimizer, **options)

    def restore_and_note(steps: Steps, checkpoint: Any) -> int:
        number = restore(steps, checkpoint)
        if number:
            state(number, steps.trainer.model, steps.trainer.optimizer)
        return number

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", count)
        patch.setattr(LanguageModeling, "training_batch", note)
        patch.setattr(run_module, "save_checkpoint", save_and_note)
        patch.setattr(Steps, "restore", restore_and_note)
        yield


def part(world: World, folder: Path, kind: str, number: int) -> None:
    """The first, second or third part of the run of a kind; the first also makes the undisturbed one."""
    pair = Pair(folder, world)
    config = config_of(folder, kind, kind, world.size)
    with recorded(world, folder, kind):
        pair.train(config if number == 0 else resumed(config), stop_after=None if number == 2 else 2)
    if number == 0:
        with recorded(world, folder, f"whole-{kind}"):
            pair.train(config_of(folder, f"whole-{kind}", kind, world.size))


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, folder: Path) -> str:
    """A kind whose runs are there."""
    for number, num_ranks in enumerate((4, 2, 4)):
        run_joined(part, (folder, request.param, number), num_ranks)
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elastic")


def samples(folder: Path, name: str) -> dict[int, list[int]]:
    """The samples of each step over all processes."""
    found: dict[int, list[int]] = {}
    for file in folder.glob(f"{name}.samples.*"):
        for step, indices in map(json.loads, file.read_text().splitlines()):
            found.setdefault(step, []).extend(indices)
    return {step: sorted(indices) for step, indices in sorted(found.items()) if step > 0}


def states(folder: Path, name: str) -> list[tuple[int, dict[str, int]]]:
    return [(step, hashes) for step, hashes in map(json.loads, (folder / f"{name}.states").read_text().splitlines())]


@pytest.mark.slow
def test_the_samples_of_every_step_are_the_same(kind: str, folder: Path) -> None:
    found = samples(folder, kind)
    assert found == samples(folder, f"whole-{kind}")
    assert list(found) == list(range(1, STEPS + 1))
    assert all(len(set(indices)) == 8 for indices in found.values())


@pytest.mark.slow
def test_the_losses_agree(kind: str, folder: Path) -> None:
    found, expected = losses(folder / kind), losses(folder / f"whole-{kind}")
    assert list(found) == list(expected) == list(range(1, STEPS + 1))
    assert [found[step] for step in (1, 2)] == [expected[step] for step in (1, 2)]
    for step in range(3, STEPS + 1):
        assert found[step] == pytest.approx(expected[step], rel=1e-6), step


@pytest.mark.slow
def test_the_state_that_is_loaded_has_the_bits_that_were_saved(kind: str, folder: Path) -> None:
    found = states(folder, kind)
    assert [step for step, _ in found] == [2, 2, 4, 4, 6]
    assert len(found[0][1]) > 20
    for saved, loaded in ((0, 1), (2, 3)):
        assert found[saved][1] == found[loaded][1]


@pytest.mark.slow
def test_a_group_of_torchrun_goes_on_with_fewer_machines(tmp_path: Path) -> None:
    """Two agents with --nnodes 1:2; one is killed with its process, and the other goes on alone."""
    config = tiny_config(tmp_path, "run", {"steps": 200, "eval_every": 0, "checkpoint.every": 5, "batch_size": 4})
    save_config(config, tmp_path / "config.toml")
    quick = "join_timeout=60,last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=8"
    command = ["-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "elastic"]
    command += ["--local-addr", "127.0.0.1"]
    trains = ["-m", "laconic", "train", "--config", str(tmp_path / "config.toml")]
    variables = environment(PYTHONWARNINGS="default", GLOO_SOCKET_IFNAME="lo")
    host, guest = (
        start([*command, "--rdzv-conf", f"{quick},is_host={is_host}", *trains], variables)
        for is_host in ("true", "false")
    )

    def both_have_saved() -> bool:  # an agent that came late is taken in by a restart
        newest = tmp_path / "run/checkpoints" / (latest_name(tmp_path / "run") or "none") / "manifest.json"
        with contextlib.suppress(FileNotFoundError):  # until the first one, and where a newer one has replaced it
            return num_steps(config.run_dir) >= 12 and json.loads(newest.read_text())["world_size"] == 2
        return False

    try:
        wait_until(both_have_saved, timeout_seconds=240)
        for process in (*psutil.Process(guest.pid).children(recursive=True), psutil.Process(guest.pid)):
            process.send_signal(signal.SIGKILL)
        ending = finish(host)
    finally:
        host.kill()
        guest.kill()
        guest.communicate()
    assert ending.code == 0, ending.err
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["world_size"] == 1
    assert {restart["reason"] for restart in summary["restarts"]} == {"torchrun started it again"}
    assert list(losses(config.run_dir)) == list(range(1, 201))
    assert re.search(r"resumed after step \d+", ending.err + ending.out)
    assert torch.isfinite(torch.tensor(summary["loss"]))


@pytest.mark.slow
def test_torchrun_restarts_a_killed_process_and_the_run_goes_on(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "run", {"steps": 60, "eval_every": 0, "checkpoint.every": 5})
    save_config(config, tmp_path / "config.toml")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["-m", "laconic", "train", "--config", str(tmp_path / "config.toml")]
    torchrun = start(command, environment(PYTHONWARNINGS="default"))
    wait_until(lambda: num_steps(config.run_dir) >= 12, timeout_seconds=240)
    workers = psutil.Process(torchrun.pid).children()
    workers[1].kill()
    ending = finish(torchrun)
    assert ending.code == 0, ending.err
    assert list(losses(config.run_dir)) == list(range(1, 61))
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert [restart["reason"] for restart in summary["restarts"]] == ["torchrun started it again"]
    assert "resumed after step" in ending.err + ending.out


@pytest.mark.slow
def test_a_run_that_torchrun_may_restart_needs_a_name(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "run")
    save_config(replace(config, run_dir=None), tmp_path / "config.toml")
    variables = rank_environment(0, 1, free_port(), TORCHELASTIC_RUN_ID="none", TORCHELASTIC_MAX_RESTARTS="2")
    command = ["train", "--config", str(tmp_path / "config.toml")]
    ending = ForkedCommand(command, tmp_path / "printed", variables).finish(120)
    assert ending.code == 2
    assert "run_dir is not set, but torchrun may start the processes again" in ending.err
