"""Zipped checkpoints keep every promise of plain ones."""

import hashlib
import json
import os
import signal
import subprocess
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save
from transformers import AutoModelForCausalLM

import laconic
from laconic.errors import CheckpointError
from laconic.formats.archive import unzip, verify, zip_path
from laconic.train.checkpoint import save_load, zipped_storage
from laconic.train.checkpoint.export import export
from laconic.train.checkpoint.save_load import find_checkpoint, load_checkpoint, load_weights
from laconic.train.checkpoint.zipped_storage import CheckpointReader, ZippedWriter
from laconic.train.report.run_dir import latest_name
from tests.distributed.processes import run_ranks
from tests.train.runs import ALONE, exact_metrics, resumed, tiny_config, train_alone
from tests.train.test_checkpoint import DAMAGES, names_in, resealed, save, trained

SHARD = "__0_0.safetensors.laconic"


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("code", ["auto", "best"])
def test_state_comes_back_bit_for_bit(code: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipped_storage, "write_container", partial(zipped_storage.write_container, code=code))
    model, optimizer = trained()
    path = save(tmp_path, 2, zipped=True)
    assert (path / SHARD).read_bytes()[8] == (2 if code == "best" else 1)
    assert sorted(file.name for file in path.iterdir()) == [".metadata", SHARD, "config.json", "manifest.json"]
    fresh, fresh_optimizer = trained(seed=1, steps=0)
    load_checkpoint(find_checkpoint(tmp_path, ALONE), ALONE, fresh, fresh_optimizer)
    assert fresh.head.weight is fresh.embed.weight
    for one, two in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(one, two)
        for key, value in optimizer.state[one].items():
            assert torch.equal(value, fresh_optimizer.state[two][key]), key
    weights = trained(seed=1, steps=0)[0]
    load_weights(find_checkpoint(tmp_path, ALONE), weights)
    assert all(map(torch.equal, weights_of(weights), weights_of(model)))


def test_a_shard_can_be_loaded_and_unzipped_by_itself(tmp_path: Path) -> None:
    path = save(tmp_path, 2, zipped=True) / SHARD
    weight = trained()[0].inner.weight
    assert torch.equal(laconic.load_zipped(path)["model.inner.weight[0,0]"], weight)
    back = load_file(unzip(path, tmp_path / "back.safetensors").path)
    assert torch.equal(back["model.inner.weight[0,0]"], weight)


def test_odd_states_come_back(tmp_path: Path) -> None:
    """What DCP can be given: no dimensions, no elements, every dtype, views, and objects that are no tensors."""
    matrix = torch.arange(12.0).view(3, 4)
    state: dict[str, Any] = {
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "transposed": matrix.t(),
        "every other": matrix[:, ::2],
        "flags": torch.tensor([True, False]),
        "codes": torch.arange(7, dtype=torch.uint8),
        "fp8": torch.randn(9).to(torch.float8_e4m3fn),
        "complex": torch.tensor([1 + 2j]),
        "object": {"inner": "text"},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_save(state, storage_writer=ZippedWriter(tmp_path / "state"), no_dist=True)
        found = {
            name: torch.zeros_like(v) if isinstance(v, torch.Tensor) else {"inner": ""} for name, v in state.items()
        }
        dcp_load(found, storage_reader=CheckpointReader(tmp_path / "state"), no_dist=True)
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            one, two = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (found[name], value))
            assert found[name].dtype == value.dtype
            assert torch.equal(one, two), name
        else:
            assert found[name] == value


@pytest.mark.ci
def test_a_run_goes_on_from_either_kind(tmp_path: Path) -> None:
    whole = tiny_config(tmp_path, "whole")
    assert train_alone(whole) == 0
    for name, kinds in (("plain-zip-plain", (False, True, False)), ("zip-plain-zip", (True, False, True))):
        first, second, third = (tiny_config(tmp_path, name, {"checkpoint.zip": zipped}) for zipped in kinds)
        assert train_alone(first, stop_after=2) == 130
        assert train_alone(resumed(second), stop_after=2) == 130
        assert train_alone(resumed(third)) == 0
        assert exact_metrics(first.run_dir) == exact_metrics(whole.run_dir)
        for step, zipped in ((4, kinds[1]), (6, kinds[2])):
            assert (tmp_path / name / "checkpoints" / f"step-{step:08d}" / SHARD).exists() == zipped


def test_an_export_can_be_zipped(tmp_path: Path) -> None:
    assert train_alone(tiny_config(tmp_path, "run", {"steps": 2, "checkpoint.zip": True})) == 0
    plain = export(tmp_path / "run", tmp_path / "plain")
    zipped = export(tmp_path / "run", tmp_path / "zipped", zipped=True)
    assert (zipped / "model.safetensors.laconic").is_file()
    assert verify(zipped).num_other_files == 2
    weights = laconic.load_zipped(zipped).state_dict()
    model = AutoModelForCausalLM.from_pretrained(plain)
    missing = model.load_state_dict(weights, strict=False).missing_keys
    assert missing == ["lm_head.weight"]  # tied, so it is stored once
    back = unzip(zipped, tmp_path / "back").path
    assert {p.name: p.read_bytes() for p in back.iterdir()} == {p.name: p.read_bytes() for p in plain.iterdir()}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_damage_is_refused_and_the_good_one_named(tmp_path: Path) -> None:
    save(tmp_path, 1, zipped=True)
    file = save(tmp_path, 2, zipped=True) / SHARD
    original = file.read_bytes()
    for damage in DAMAGES.values():
        file.write_bytes(damage(original))
        with pytest.raises(CheckpointError, match=f"step-00000002 is damaged: {SHARD} .*newest good .*step-00000001"):
            find_checkpoint(tmp_path, ALONE)


def test_a_shard_that_fits_its_manifest_alone_is_refused(tmp_path: Path) -> None:
    """The container has checksums of its own; whatever gets past the manifest does not get past them."""
    path = save(tmp_path, 2, zipped=True)
    content = bytearray((path / SHARD).read_bytes())
    for position in range(64, len(content), len(content) // 20):
        damaged = bytes(content[:position]) + bytes([content[position] ^ 1]) + bytes(content[position + 1 :])
        (path / SHARD).write_bytes(damaged)
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["files"][SHARD]["sha256"] = hashlib.sha256(damaged).hexdigest()
        (path / "manifest.json").write_text(resealed(manifest))
        fresh, optimizer = trained(seed=1, steps=0)
        with pytest.raises(CheckpointError, match=f"step-00000002: .*{SHARD}"):
            load_checkpoint(find_checkpoint(tmp_path, ALONE), ALONE, fresh, optimizer)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory on a disk of 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs root to mount a small disk")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_leaves_the_previous_checkpoint(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(small_disk, 1, zipped=True)
    monkeypatch.setattr(save_load, "_check_space", lambda root, nbytes: None)
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    (small_disk / "other").write_bytes(bytes(free - 4096))
    with pytest.raises(CheckpointError, match=r"step-00000002: .*No space left on device"):
        save(small_disk, 2, zipped=True)
    assert names_in(small_disk) == ["latest", "step-00000001"]
    (small_disk / "other").unlink()
    save(small_disk, 2, zipped=True)
    assert find_checkpoint(small_disk, ALONE).step == 2


def test_a_full_disk_leaves_no_half_of_a_file(small_disk: Path, tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    save_file({"a": torch.randn(1 << 15)}, source / "model.safetensors")
    zipped = zip_path(source).path
    for attempt in (
        lambda: zip_path(source / "model.safetensors", small_disk / "out"),
        lambda: zip_path(source, small_disk / "out"),
        lambda: unzip(zipped, small_disk / "out"),
        lambda: unzip(zipped / "model.safetensors.laconic", small_disk / "out"),
    ):
        with pytest.raises(CheckpointError, match=f"cannot write {small_disk}/out.*: No space left on device"):
            attempt()
        assert not list(small_disk.iterdir())


# Dies at each call while saving step 2 over step 1; the previous checkpoint stays.
def _kill_while_saving(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)  # a forked child has none of its parent's threads
    for number, name in enumerate(["write_header", "write_container", "fsync_file", "ContainerFile"]):
        run_dir = folder / str(number)
        save(run_dir, 1, zipped=True)
        child = os.fork()
        if child == 0:
            setattr(zipped_storage, name, lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL))
            save(run_dir, 2, zipped=True)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9, name
        assert find_checkpoint(run_dir, ALONE).step == 1
        save(run_dir, 3, zipped=True)
        assert find_checkpoint(run_dir, ALONE).step == 3


@pytest.mark.ci
def test_a_process_killed_while_saving_leaves_a_good_latest(tmp_path: Path) -> None:
    run_ranks(_kill_while_saving, (tmp_path,), 1)
    assert latest_name(tmp_path / "0") == "step-00000003"
