"""Checkpoints: whole or not there, verified before use, and told apart when damaged."""

import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import filesystem

from laconic.errors import CheckpointError
from laconic.train import checkpoint
from laconic.train.checkpoint import find_checkpoint, load_checkpoint, load_weights, save_checkpoint
from laconic.train.run_dir import latest_name
from tests.train.runs import ALONE

ROOT = Path(__file__).parents[2]


class Tied(nn.Module):
    """Two names for one weight, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.inner(self.embed(ids)).relu())
        return output


def trained(seed: int = 0, steps: int = 2) -> tuple[Tied, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for step in range(steps):
        model(torch.arange(step, step + 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save(run_dir: Path, step: int, seed: int = 0, keep: int = 2, **fields: Any) -> Path:
    model, optimizer = trained(seed)
    texts = {"config.json": "{}\n"}
    return save_checkpoint(
        run_dir, ALONE, model, optimizer, step=step, identity={"seed": seed}, texts=texts, keep=keep, **fields
    )


def names_in(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = trained()
    save(tmp_path, 2)
    fresh, fresh_optimizer = trained(seed=1, steps=0)
    found = find_checkpoint(tmp_path, ALONE)
    assert (found.step, found.world_size, found.identity) == (2, 1, {"seed": 0})
    load_checkpoint(found, ALONE, fresh, fresh_optimizer)
    assert fresh.head.weight is fresh.embed.weight
    for (name, one), two in zip(model.named_parameters(), fresh.parameters(), strict=True):
        assert torch.equal(one, two), name
        for key, value in optimizer.state[one].items():
            assert torch.equal(value, fresh_optimizer.state[two][key]), (name, key)
    weights = trained(seed=1, steps=0)[0]
    load_weights(found, weights)
    assert torch.equal(weights.head.weight, model.head.weight)


def test_a_tied_weight_is_stored_once(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    with open(path / ".metadata", "rb") as file:
        stored = pickle.load(file).state_dict_metadata
    assert [name for name in stored if name.endswith("embed.weight") and name.startswith("model")] == [
        "model.embed.weight"
    ]
    assert "model.head.weight" not in stored
    assert not [name for name in stored if "param_groups" in name]


def test_the_newest_are_kept_and_latest_follows(tmp_path: Path) -> None:
    for step in (1, 2, 3, 100_000_000):
        save(tmp_path, step)
        assert latest_name(tmp_path) == f"step-{step:08d}"
    assert names_in(tmp_path) == ["latest", "step-00000003", "step-100000000"]
    save(tmp_path, 100_000_001, keep=1)
    assert names_in(tmp_path) == ["latest", "step-100000001"]


def test_an_abandoned_future_is_removed(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        save(tmp_path, step, keep=3)
    save(tmp_path, 4, seed=5, keep=3)  # continued from 2 another way
    assert names_in(tmp_path) == ["latest", "step-00000002", "step-00000004"]
    assert find_checkpoint(tmp_path, ALONE).identity == {"seed": 5}


def test_leftovers_of_a_crash_are_cleared(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "checkpoints" / ".tmp-step-00000002").mkdir()
    (tmp_path / "checkpoints" / ".tmp-step-00000002" / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "checkpoints" / ".old-step-00000001").mkdir()
    save(tmp_path, 2)
    assert names_in(tmp_path) == ["latest", "step-00000001", "step-00000002"]


def test_a_checkpoint_is_found_by_step_and_by_name(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    assert find_checkpoint(tmp_path, ALONE, "1").step == 1
    assert find_checkpoint(tmp_path, ALONE, "step-00000001").step == 1


# What can happen to a file; offsets as shares of its length.
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    **{f"cut at {n}/16": lambda data, n=n: data[: len(data) * n // 16] for n in (0, 1, 8, 15)},
    **{
        f"bit {bit} at {n}/16": lambda data, n=n, bit=bit: (
            data[: len(data) * n // 16]
            + bytes([data[len(data) * n // 16] ^ (1 << bit)])
            + data[len(data) * n // 16 + 1 :]
        )
        for n in (0, 5, 10, 15)
        for bit in (0, 7)
    },
    "one byte more": lambda data: data + b"\0",
}


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "config.json", "manifest.json"])
def test_damage_anywhere_is_refused_and_the_good_one_named(name: str, tmp_path: Path) -> None:
    save(tmp_path, 1)
    file = save(tmp_path, 2) / name
    original = file.read_bytes()
    for what, damage in DAMAGES.items():
        file.write_bytes(damage(original))
        if name == "manifest.json" and what in ("one byte more", "cut at 15/16"):
            # Blank space after the closing brace means nothing; anything else must be noticed.
            file.write_bytes(original.rstrip()[:-1] if what.startswith("cut") else original + b"x")
        with pytest.raises(CheckpointError) as refused:
            find_checkpoint(tmp_path, ALONE)
        message = str(refused.value)
        assert f"step-00000002 is damaged: {name} " in message, what
        assert "The newest good checkpoint is step-00000001" in message, what
        assert "--resume --checkpoint.load 1" in message, what
        if name != "manifest.json":
            expected = f"{len(original):,} were written" if len(damage(original)) != len(original) else "was written"
            assert expected in message, what
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        find_checkpoint(tmp_path, ALONE)
    file.write_bytes(original)
    assert find_checkpoint(tmp_path, ALONE).step == 2


def test_nothing_is_read_by_dcp_before_verification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, 1)

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "executed"),)

    (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"damaged: .metadata has"):
        find_checkpoint(tmp_path, ALONE)
    assert not (tmp_path / "executed").exists()


def test_two_damaged_checkpoints_leave_none_to_name(tmp_path: Path) -> None:
    for step in (1, 2):
        (save(tmp_path, step) / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointError, match="No other checkpoint here is good"):
        find_checkpoint(tmp_path, ALONE)


def test_swapped_shards_are_refused(tmp_path: Path) -> None:
    first, second = save(tmp_path, 1, seed=1), save(tmp_path, 2, seed=2)
    shard = "__0_0.distcp"
    first_bytes, second_bytes = (first / shard).read_bytes(), (second / shard).read_bytes()
    (first / shard).write_bytes(second_bytes)
    (second / shard).write_bytes(first_bytes)
    with pytest.raises(CheckpointError, match="has SHA-256"):
        find_checkpoint(tmp_path, ALONE)


def resealed(manifest: dict[str, Any]) -> str:
    """A manifest with a matching checksum of its own, as someone could write on purpose."""
    manifest.pop("sha256", None)
    return json.dumps(manifest | {"sha256": checkpoint._manifest_sha256(manifest)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "format version 2, but this laconic reads version 1"),
        ({"files": {"../outside": {"nbytes": 0, "sha256": ""}}}, "names the file '../outside'"),
        ({"files": {"/etc/passwd": {"nbytes": 0, "sha256": ""}}}, "not a plain file name"),
        ({"files": {"..": {"nbytes": 0, "sha256": ""}}}, "not a plain file name"),
        ({"files": {}}, r"does not list .metadata"),
    ],
)
def test_a_manifest_that_asks_for_too_much_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(resealed(manifest | change))
    with pytest.raises(CheckpointError, match=message):
        find_checkpoint(tmp_path, ALONE)


@pytest.mark.parametrize("content", ["step-00000009\n", "../../elsewhere", "", "\xff\x00"])
def test_a_latest_that_names_nothing_is_refused(content: str, tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "checkpoints" / "latest").write_text(content)
    with pytest.raises(CheckpointError, match=r"does not exist|is not the name of a checkpoint"):
        find_checkpoint(tmp_path, ALONE)


def test_no_checkpoint_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no checkpoint to continue from"):
        find_checkpoint(tmp_path, ALONE)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    other = nn.Linear(3, 3)
    with pytest.raises(CheckpointError, match="step-00000001"):
        load_checkpoint(find_checkpoint(tmp_path, ALONE), ALONE, other, torch.optim.AdamW(other.parameters()))
    with pytest.raises(CheckpointError, match="step-00000001"):
        load_weights(find_checkpoint(tmp_path, ALONE), other)


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    save(tmp_path, 1)
    model, optimizer = trained()
    with torch.no_grad():
        model.inner.bias[2] = float("nan")
    with pytest.raises(CheckpointError, match=r"parameter inner.bias holds a value that is not finite"):
        save_checkpoint(tmp_path, ALONE, model, optimizer, step=2, identity={}, texts={}, keep=2)
    assert names_in(tmp_path) == ["latest", "step-00000001"]


class FailingStream:
    """A file that takes `room` bytes and then reports a full disk, as the kernel would."""

    def __init__(self, stream: Any, room: int) -> None:
        self._stream = stream
        self._room = room

    def write(self, data: Any) -> int:
        self._room -= len(data)
        if self._room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count: int = self._stream.write(data)
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __enter__(self) -> "FailingStream":
        self._stream.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._stream.__exit__(*details)


@pytest.mark.parametrize("room", [0, 100, 3000])
def test_a_full_disk_leaves_the_previous_checkpoint(room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    create = filesystem.FileSystem.create_stream

    def create_stream(self: Any, path: Any, mode: str) -> Any:
        manager = create(self, path, mode)
        return manager if "w" not in mode else SimpleManager(manager)

    class SimpleManager:
        def __init__(self, manager: Any) -> None:
            self._manager = manager

        def __enter__(self) -> Any:
            return FailingStream(self._manager.__enter__(), room)

        def __exit__(self, *details: Any) -> Any:
            return self._manager.__exit__(*details)

    monkeypatch.setattr(filesystem.FileSystem, "create_stream", create_stream)
    with pytest.raises(CheckpointError, match=r"step-00000002: .*No space left on device"):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert names_in(tmp_path) == ["latest", "step-00000001"]
    assert find_checkpoint(tmp_path, ALONE).step == 1
    save(tmp_path, 2)
    assert find_checkpoint(tmp_path, ALONE).step == 2


@pytest.mark.parametrize("call", ["_write_durably", "fsync_directory", "_publish"])
def test_a_failure_while_publishing_leaves_the_previous_checkpoint(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)

    def fail(*args: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "the disk")

    monkeypatch.setattr(checkpoint, call, fail)
    with pytest.raises(CheckpointError, match="Input/output error: the disk"):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert latest_name(tmp_path) == "step-00000001"
    assert find_checkpoint(tmp_path, ALONE).step == 1


def test_too_little_space_is_noticed_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    with pytest.raises(CheckpointError, match=r"needs [\d,]+ bytes and 100 are free"):
        save(tmp_path, 2)
    assert names_in(tmp_path) == ["latest", "step-00000001"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(CheckpointError, match=f"File exists: {tmp_path}/checkpoints"):
        save(tmp_path, 1)


# Dies at every call that matters while saving step 2 over step 1, and tells what can be found afterwards.
KILLED_WHILE_SAVING = """
import os, shutil, signal, sys
from pathlib import Path
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from laconic.train import checkpoint
from laconic.train.checkpoint import find_checkpoint
from tests.train.runs import ALONE
from tests.train.test_checkpoint import names_in, save

points = [(FileSystemWriter, "write_data", 1), (FileSystemWriter, "finish", 1), (checkpoint, "_write_durably", 1),
          (checkpoint, "_write_durably", 2), (checkpoint, "fsync_directory", 1), (os, "rename", 1), (os, "rename", 2),
          (checkpoint, "fsync_directory", 2), (checkpoint, "_write_durably", 3), (os, "replace", 1),
          (shutil, "rmtree", 1), (shutil, "rmtree", 2)]
for number, (owner, name, call) in enumerate(points):
    run_dir = Path(sys.argv[1]) / str(number)
    save(run_dir, 1)
    child = os.fork()
    if child == 0:
        original, calls = getattr(owner, name), []
        def dying(*args, **kwargs):
            calls.append(name)
            if len(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)
        setattr(owner, name, dying)
        save(run_dir, 2, keep=1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9, name
    print(find_checkpoint(run_dir, ALONE).step, end=" ")
    save(run_dir, 3)
    assert find_checkpoint(run_dir, ALONE).step == 3
    assert not [name for name in names_in(run_dir) if name.startswith(".")], names_in(run_dir)
"""


def test_a_process_killed_while_saving_leaves_a_good_latest(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED_WHILE_SAVING, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # a forked child has none of its parent's OpenMP threads
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1"] * 10 + ["2"] * 2
