"""Checkpoints: whole or not there, verified before use, and told apart when damaged."""

import errno
import hashlib
import json
import os
import pickle
import shutil
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException

from laconic.errors import CheckpointError
from laconic.formats.zip_manifest import manifest_sha256
from laconic.optim import AdamW8bit
from laconic.train.checkpoint import save_load
from laconic.train.checkpoint.save_load import find_checkpoint, load_checkpoint, load_weights, save_checkpoint
from laconic.train.distributed.world import World, is_peer_lost
from laconic.train.report.run_dir import latest_name
from tests.distributed.processes import run_ranks
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


def save(run_dir: Path, step: int, seed: int = 0, keep: int = 2, world: World = ALONE, **fields: Any) -> Path:
    model, optimizer = trained(seed)
    texts = {"config.json": "{}\n"}
    return save_checkpoint(
        run_dir, world, model, optimizer, step=step, identity={"seed": seed}, texts=texts, keep=keep, **fields
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


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Steps with one gradient, after which m is 5 times sqrt(v) with beta2 = 0.999: 0.95 allows 1.16."""
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.linspace(-1, 1, parameter.numel()).view_as(parameter)
        optimizer.step()


def coded(beta2: float) -> tuple[nn.Module, AdamW8bit]:
    torch.manual_seed(0)
    model = nn.Linear(64, 128)
    return model, AdamW8bit(model.parameters(), lr=0.01, betas=(0.9, beta2))


def test_betas_of_the_steps_before_bound_the_moments_of_those_after(tmp_path: Path) -> None:
    model, optimizer = coded(0.999)
    stepped(model, optimizer, 30)
    path = save_checkpoint(tmp_path, ALONE, model, optimizer, step=30, identity={}, texts={}, keep=1)
    assert json.loads((path / save_load.BETAS_FILE).read_text()) == {
        **{"beta1_min": 0.9, "beta1_max": 0.9, "beta2_min": 0.999, "beta2_max": 0.999}
    }
    found = find_checkpoint(tmp_path, ALONE)
    fresh, of_fresh = coded(0.95)
    load_checkpoint(found, ALONE, fresh, of_fresh)
    assert of_fresh.param_groups[0]["betas_seen"] == (0.9, 0.9, 0.999, 0.999)  # of no step that only makes states
    optimizer.param_groups[0]["betas"] = (0.9, 0.95)
    stepped(model, optimizer, 2)
    stepped(fresh, of_fresh, 2)
    for one, two in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(one, two)
    assert of_fresh.param_groups[0]["betas_seen"] == (0.9, 0.9, 0.95, 0.999)


def test_a_tied_weight_is_stored_once(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    with open(path / ".metadata", "rb") as file:
        stored = pickle.load(file).state_dict_metadata
    assert [name for name in stored if name.endswith("embed.weight") and name.startswith("model")] == [
        "model.embed.weight"
    ]
    assert "model.head.weight" not in stored
    assert not [name for name in stored if "param_groups" in name]


def test_parameters_that_are_parts_of_one_buffer_are_all_stored(tmp_path: Path) -> None:
    model, other = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
    for one in (model, other):
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(one.parameters()), one.parameters())
    optimizers = [torch.optim.AdamW(one.parameters()) for one in (model, other)]
    save_checkpoint(tmp_path, ALONE, model, optimizers[0], step=1, identity={}, texts={}, keep=1)
    load_checkpoint(find_checkpoint(tmp_path, ALONE), ALONE, other, optimizers[1])
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))


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
    assert names_in(tmp_path) == ["latest", "step-00000002", "step-00000004-2"]
    for name in (None, "4", "step-00000004", "step-00000004-2"):
        assert find_checkpoint(tmp_path, ALONE, name).identity == {"seed": 5}
    save(tmp_path, 4, seed=6, keep=3)
    save(tmp_path, 5, keep=2)
    assert names_in(tmp_path) == ["latest", "step-00000004-3", "step-00000005"]
    assert find_checkpoint(tmp_path, ALONE, "4").identity == {"seed": 6}


def test_a_missing_latest_is_made_from_the_newest_good_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, keep=3)
    pointer = tmp_path / "checkpoints" / "latest"
    pointer.unlink()
    (tmp_path / "checkpoints" / "step-00000003" / "__0_0.distcp").write_bytes(b"")
    assert find_checkpoint(tmp_path, ALONE).step == 2
    assert "has no file `latest`; the newest good checkpoint is step-00000002" in caplog.text
    assert pointer.read_text() == "step-00000002\n"
    pointer.unlink()
    for step in (1, 2):
        (tmp_path / "checkpoints" / f"step-0000000{step}" / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"has no file `latest`, and none of its checkpoints .* is good"):
        find_checkpoint(tmp_path, ALONE)
    assert not pointer.exists()


def test_leftovers_of_a_crash_are_cleared(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "checkpoints" / ".tmp-step-00000002").mkdir()
    (tmp_path / "checkpoints" / ".tmp-step-00000002" / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "checkpoints" / ".old-step-00000001").mkdir()
    save(tmp_path, 2)
    assert names_in(tmp_path) == ["latest", "step-00000001", "step-00000002"]


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


def test_two_damaged_checkpoints_leave_none_to_name(tmp_path: Path) -> None:
    for step in (1, 2):
        (save(tmp_path, step) / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointError, match="No other checkpoint here is good"):
        find_checkpoint(tmp_path, ALONE)


def resealed(manifest: dict[str, Any]) -> str:
    """A manifest with a matching checksum of its own, as someone could write on purpose."""
    manifest.pop("sha256", None)
    return json.dumps(manifest | {"sha256": manifest_sha256(manifest)})


def test_a_hostile_index_with_a_matching_manifest_is_not_run(tmp_path: Path) -> None:
    path = save(tmp_path, 1)

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "executed"),)

    content = pickle.dumps(Evil())
    (path / ".metadata").write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][".metadata"] = {"nbytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / "manifest.json").write_text(resealed(manifest))
    model, optimizer = trained()
    for load in (
        lambda found: load_checkpoint(found, ALONE, model, optimizer),  # --resume
        lambda found: load_weights(found, model),  # export
    ):
        with pytest.raises(CheckpointError, match=r"asks for \S+\.mkdir, which no checkpoint needs"):
            load(find_checkpoint(tmp_path, ALONE))
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "format version 2, but this laconic reads version 1"),
        ({"files": {"../outside": {"nbytes": 0, "sha256": ""}}}, "names the file '../outside'"),
        ({"files": {"/etc/passwd": {"nbytes": 0, "sha256": ""}}}, "not a plain file name"),
        ({"files": {"..": {"nbytes": 0, "sha256": ""}}}, "not a plain file name"),
        ({"files": {}}, r"does not list .metadata"),
        ({"files": ["x"]}, r"files in manifest.json is"),
        ({"files": {"\udcff": 3}}, r"no size and SHA-256 of '\\udcff'"),
        ({"files": {"x": {"nbytes": "1", "sha256": ""}}}, "no size and SHA-256 of 'x'"),
        ({"step": "4"}, r"step in manifest.json is '4'"),
        ({"step": True}, r"step in manifest.json is True"),
        ({"identity": "\udc80"}, r"identity in manifest.json is '\\udc80'"),
        ({"world_size": None}, r"world_size in manifest.json is None"),
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


def test_a_rank_that_cannot_tell_the_others_says_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot_gather(self: World, value: object) -> NoReturn:
        raise RuntimeError("[gloo] Timed out waiting for send")

    monkeypatch.setattr(World, "gather", cannot_gather)
    two = World(rank=1, size=2, local_rank=1, device=torch.device("cpu"))
    with (
        pytest.raises(CheckpointError, match=r"checkpoint .*: rank 1: can't allocate memory$"),
        save_load._shared_outcome(two, tmp_path),
    ):
        raise RuntimeError("can't allocate memory\nand more")
    with pytest.raises(RuntimeError, match="Timed out"), save_load._shared_outcome(two, tmp_path):
        pass


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_rank_that_loses_a_peer_in_a_save_does_not_blame_itself(wrapped: bool, tmp_path: Path) -> None:
    two = World(rank=0, size=2, local_rank=0, device=torch.device("cpu"))
    lost: BaseException = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    if wrapped:
        lost = CheckpointException("write", {0: (lost, traceback.extract_stack())})
    with pytest.raises(type(lost)) as raised, save_load._outcome_of_dcp(two, tmp_path):
        raise lost
    assert raised.value is lost
    assert is_peer_lost(lost)


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

    monkeypatch.setattr(save_load, call, fail)
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


# Saves, and at the n-th call that changes something on the disk either dies or is told that the disk has failed, for
# every n there is. What can be found afterwards must be whole, be the old or the new state, and be gone on from.
CALLS = ("mkdir", "open", "fsync", "rename", "replace", "link", "unlink", "remove", "rmdir", "truncate", "symlink")


def _interrupted(how: str, run_dir: Path, number: int) -> bool:
    """Save, with the `number`-th of CALLS dying or failing; whether there are fewer calls."""
    calls = 0
    originals = {name: getattr(os, name) for name in CALLS}

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number and how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if calls == number:
                raise OSError(errno.EIO, "the disk has failed")
            return originals[name](*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, counted(name))
    try:
        save(run_dir, 2, seed=3, keep=1)
    except CheckpointError:
        if how != "fail":
            raise
    finally:
        for name in CALLS:
            setattr(os, name, originals[name])
    return calls < number


def _interrupt_every_call(rank: int, how: str, scenario: str, folder: Path) -> None:
    torch.set_num_threads(1)  # a forked child has none of its parent's threads
    base = folder / "base"
    save(base, 1, seed=1)
    if scenario == "again":
        save(base, 2, seed=2)
    number, done, seen = 0, False, []
    while not done:
        number += 1
        run_dir = folder / str(number)
        shutil.copytree(base, run_dir)
        if how == "die":
            child = os.fork()
            if child == 0:
                os._exit(7 if _interrupted(how, run_dir, number) else 8)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert code in (-9, 7), code
            done = code == 7
        else:
            done = _interrupted(how, run_dir, number)
        found = find_checkpoint(run_dir, ALONE)
        before = (2, 2) if scenario == "again" else (1, 1)
        assert (found.step, found.identity["seed"]) in (before, (2, 3)), (number, found)
        seen.append(found.identity["seed"])
        # The pointer is not all there is.
        (run_dir / "checkpoints" / "latest").unlink()
        assert find_checkpoint(run_dir, ALONE).identity["seed"] in (before[1], 3), number
        save(run_dir, 3)
        assert find_checkpoint(run_dir, ALONE).step == 3
        assert not [name for name in names_in(run_dir) if name.startswith(".")], (number, names_in(run_dir))
        shutil.rmtree(run_dir)
    if how == "die":  # first the old state, from some call on the new one; some failures stand in nobody's way
        assert seen == sorted(seen), seen
    assert {before[1], 3} == set(seen)
    assert number > 15  # calls there are


@pytest.mark.parametrize(
    ("how", "scenario"),
    [
        *(pytest.param(*c, marks=pytest.mark.ci) for c in (("die", "again"), ("fail", "new"))),
        *(pytest.param(*c, marks=pytest.mark.slow) for c in (("die", "new"), ("fail", "again"))),
    ],
)
def test_a_save_that_is_interrupted_anywhere_leaves_a_good_latest(how: str, scenario: str, tmp_path: Path) -> None:
    run_ranks(_interrupt_every_call, (how, scenario, tmp_path), 1)


def test_nothing_is_read_by_dcp_before_verification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, 1)

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "executed"),)

    (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"damaged: .metadata has"):
        find_checkpoint(tmp_path, ALONE)
    assert not (tmp_path / "executed").exists()


def test_swapped_shards_are_refused(tmp_path: Path) -> None:
    first, second = save(tmp_path, 1, seed=1), save(tmp_path, 2, seed=2)
    shard = "__0_0.distcp"
    first_bytes, second_bytes = (first / shard).read_bytes(), (second / shard).read_bytes()
    (first / shard).write_bytes(second_bytes)
    (second / shard).write_bytes(first_bytes)
    with pytest.raises(CheckpointError, match="has SHA-256"):
        find_checkpoint(tmp_path, ALONE)
