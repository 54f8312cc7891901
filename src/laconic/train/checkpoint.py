"""Checkpoints that are either whole or not there, and are checked before a byte of them is used.

A checkpoint is the directory ``<run>/checkpoints/step-00000200``: the shards and `.metadata` that
torch.distributed.checkpoint (DCP) writes (zipped shards with `checkpoint.zip`), the model's Hugging Face config.json,
and a manifest.json with the size and SHA-256 of every file and of itself. It is written under a temporary name,
fsynced, renamed, and only then does the text file `latest` move; a crash at any point leaves the previous checkpoint as
`latest`.

DCP's own files carry no checksums, and its `.metadata` is a pickle. Both are read only after every file of the
checkpoint agrees with the manifest. That finds damage, not malice: whoever can write a run directory can write a
matching manifest, so resume only from directories you trust. Of ours nothing is pickled: the state holds tensors only
(weights, optimizer moments); the step is in the manifest, and learning rate, data position and dropout masks are
functions of the step.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import laconic
from laconic.errors import CheckpointError
from laconic.formats.durable import fsync_directory, fsync_file, sha256_of
from laconic.formats.shards import local_part
from laconic.train.pipeline import Parts
from laconic.train.run_dir import latest_name
from laconic.train.world import World
from laconic.train.zipped_storage import CheckpointReader, ZippedWriter

__all__ = ["Checkpoint", "find_checkpoint", "load_checkpoint", "load_weights", "save_checkpoint"]

_VERSION = 1
_MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")
_PLAIN_FILE = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files have been verified."""

    path: Path
    step: int
    """Optimizer steps done."""
    world_size: int
    """Processes of the run that wrote it; any other number can read it."""
    identity: dict[str, Any]
    """What the run passed to `save_checkpoint`: the settings that must not change when it is continued."""

    def text(self, name: str) -> str | None:
        """One of the `texts` that were saved beside the state; None if there is none of this name."""
        file = self.path / name
        return file.read_text(encoding="utf-8") if file.is_file() else None


def save_checkpoint(
    run_dir: Path,
    world: World,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    identity: Mapping[str, Any],
    texts: Mapping[str, str],
    keep: int,
    zipped: bool = False,
) -> Path:
    """Write the state after `step` steps, make it `latest`, and leave only the newest `keep` checkpoints.

    Called by all processes together; `model` is the plain, DDP- or FSDP2-wrapped module. `texts` maps file names to
    text stored beside the state. Checkpoints of later steps, left over from a continuation that was abandoned, are
    removed. With `zipped` the shards are losslessly shortened (docs/zip.md); whatever loads checkpoints loads both.

    Raises CheckpointError on every process when any of them fails (no space, no permission, non-finite weights); then
    nothing is left behind and `latest` is what it was.
    """
    root = run_dir / "checkpoints"
    final = root / f"step-{step:08d}"
    temporary = root / f".tmp-{final.name}"
    with warnings.catch_warnings():
        # DCP announces that it runs without a process group, which is what one process does.
        warnings.filterwarnings("ignore", message=".*assuming the intent is to (save|load) in a single process.*")
        state, _ = _state(model, optimizer)

        # 1. Refuse before writing anything.
        with _shared_outcome(world, final):
            _check_finite(model)
            if world.is_main:
                root.mkdir(parents=True, exist_ok=True)
                for leftover in root.glob(".*-step-*"):
                    shutil.rmtree(leftover)
                _check_space(root, _nbytes(state))
                temporary.mkdir()
        try:
            # 2. Every process writes and hashes its own shard.
            records: dict[str, Any] = {}
            with _shared_outcome(world, final):
                writer = ZippedWriter(temporary) if zipped else FileSystemWriter(temporary)
                save(state, storage_writer=writer, no_dist=world.size == 1)
                own = [temporary / ".metadata"] if world.is_main else []
                for path in (*own, *temporary.glob(f"__{world.rank}_*")):
                    records[path.name] = {"nbytes": path.stat().st_size, "sha256": sha256_of(path).hex()}
            gathered = world.gather(records)

            # 3. The main process writes the manifest and gives the directory its name.
            with _shared_outcome(world, final):
                if world.is_main:
                    files = {name: record for records in gathered for name, record in sorted(records.items())}
                    for name, text in texts.items():
                        _write_durably(temporary / name, text)
                        files[name] = {"nbytes": len(text.encode()), "sha256": sha256_of(temporary / name).hex()}
                    manifest = {
                        "format": "laconic checkpoint",
                        "version": _VERSION,
                        "step": step,
                        "world_size": world.size,
                        "laconic": laconic.__version__,
                        "torch": str(torch.__version__),
                        "identity": dict(identity),
                        "files": files,
                    }
                    manifest["sha256"] = _manifest_sha256(manifest)
                    _write_durably(temporary / _MANIFEST, json.dumps(manifest, indent=1) + "\n")
                    _publish(temporary, final, keep)
        except CheckpointError:
            if world.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
    return final


def find_checkpoint(run_dir: Path, world: World, name: str | None = None) -> Checkpoint:
    """The checkpoint called `name` ("step-00000200", or just its step), or `latest`, every byte of it verified.

    Called by all processes together; they share the reading. Raises CheckpointError when there is none, or when a file
    is missing, truncated or altered: the message names the file, what was expected and found, and the newest
    checkpoint that is good.
    """
    root = run_dir / "checkpoints"
    if name is None:
        name = latest_name(run_dir)
    elif name.isdecimal():
        name = f"step-{int(name):08d}"
    if name is None:
        raise CheckpointError(f"{run_dir} has no checkpoint to continue from; start it without --resume")
    if not _NAME.fullmatch(name):
        raise CheckpointError(f"{name!r} is not the name of a checkpoint such as step-00000200")
    try:
        return _verified(root / name, world)
    except CheckpointError as error:
        good = _newest_good(root, world, name)
        if good is None:
            advice = "No other checkpoint here is good; restore the damaged one from a copy or start a new run."
        else:
            advice = (
                f"The newest good checkpoint is {good.path.name}: continue from it with --resume --checkpoint.load "
                f"{good.step}, or export it with --checkpoint {good.path.name}."
            )
        raise CheckpointError(f"{error}. {advice}") from None


def load_checkpoint(checkpoint: Checkpoint, world: World, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put the weights and the optimizer state of `checkpoint` into `model` and `optimizer`, in place.

    Called by all processes together. World size and parallelism may differ from the run that wrote it. Raises
    CheckpointError when the state does not fit the model.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to (save|load) in a single process.*")
        state, full = _state(model, optimizer)
        with _shared_outcome(world, checkpoint.path):
            reader = CheckpointReader(checkpoint.path)
            _leave_out_unmoved(state["optimizer"], reader.read_metadata().state_dict_metadata)
            load(state, storage_reader=reader, no_dist=world.size == 1)
        set_state_dict(model, optimizer, model_state_dict=full["model"], optim_state_dict=full["optimizer"])


def load_weights(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Put only the weights of `checkpoint` into the plain `model`, in this process alone.

    Raises CheckpointError when they do not fit.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to (save|load) in a single process.*")
        state = {"model": _without_aliases(model.state_dict())}
        try:
            load(state, storage_reader=CheckpointReader(checkpoint.path), no_dist=True)
        except (Exception, CheckpointException) as error:
            raise CheckpointError(f"checkpoint {checkpoint.path}: {_reason(error)}") from error


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """What DCP stores, and the full state dicts it is a view of.

    Names are those of the plain model whatever wraps it, and of the whole model for the parts of a pipeline. DCP gets
    no param_groups (they follow from the configuration) and a tied weight once.
    """
    model_state, optimizer_state = get_state_dict(model, optimizer)
    weights, moments = model_state, cast(dict[str, Any], optimizer_state["state"])
    if isinstance(model, Parts):
        weights, moments = ({name.partition(".")[2]: value for name, value in s.items()} for s in (weights, moments))
    stored = {"model": _without_aliases(weights), "optimizer": moments}
    return stored, {"model": model_state, "optimizer": optimizer_state}


def _leave_out_unmoved(moments: dict[str, dict[str, Any]], stored: Iterable[str]) -> None:
    """Do not ask for moments that the checkpoint has none of: those of parameters that never had a gradient.

    `moments` by parameter are zeros that torch made up to be loaded into; without any, the optimizer starts afresh.
    """
    have = {key.removeprefix("optimizer.").rpartition(".")[0] for key in stored if key.startswith("optimizer.")}
    for name in moments.keys() - have:
        moments[name].clear()


def _without_aliases(state: Mapping[str, Any]) -> dict[str, Any]:
    seen: set[tuple[int, torch.Size]] = set()
    unique = {}
    for name, tensor in state.items():
        key = (local_part(tensor).untyped_storage()._cdata, tensor.shape)
        if key not in seen:
            seen.add(key)
            unique[name] = tensor
    return unique


def _nbytes(state: Any) -> int:
    if isinstance(state, Mapping):
        return sum(_nbytes(value) for value in state.values())
    return int(state.numel() * state.element_size()) if isinstance(state, torch.Tensor) else 0


@contextmanager
def _shared_outcome(world: World, path: Path) -> Iterator[None]:
    """Runs the block on every process; when it fails on any, raises the same CheckpointError on all."""
    error: str | None = None
    cause: BaseException | None = None
    try:
        yield
    except (Exception, CheckpointException) as failure:  # CheckpointException is no Exception
        cause = failure
        error = f"rank {world.rank}: {_reason(failure)}" if world.size > 1 else _reason(failure)
    error = world.first_error(error)
    if error is not None:
        raise CheckpointError(f"checkpoint {path}: {error}") from cause


def _reason(error: BaseException) -> str:
    """The innermost readable cause of a failure inside DCP."""
    if isinstance(error, CheckpointException):
        causes = [failure[0] for failure in error.failures.values()]
        return _reason(causes[0]) if causes else str(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    for earlier in (error.__cause__, error.__context__):
        if isinstance(earlier, OSError) and earlier.strerror:
            return _reason(earlier)
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _check_finite(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not torch.isfinite(local_part(parameter.detach())).all():
            raise CheckpointError(f"not saved, because parameter {name} holds a value that is not finite")


def _check_space(root: Path, needed_nbytes: int) -> None:
    free_nbytes = shutil.disk_usage(root).free
    if free_nbytes < needed_nbytes:
        raise CheckpointError(f"not saved, because it needs {needed_nbytes:,} bytes and {free_nbytes:,} are free there")


def _publish(temporary: Path, final: Path, keep: int) -> None:
    """Give the complete `temporary` its `final` name, then move `latest`, then prune; durable in this order."""
    root = final.parent
    fsync_directory(temporary)
    if final.exists():  # saved by a continuation that was abandoned
        os.rename(final, root / f".old-{final.name}")
    os.rename(temporary, final)
    fsync_directory(root)
    _write_durably(root / ".latest", final.name + "\n")
    os.replace(root / ".latest", root / "latest")
    fsync_directory(root)
    shutil.rmtree(root / f".old-{final.name}", ignore_errors=True)
    current = _step_of(final)
    past = [path for path in _by_step(root) if _step_of(path) <= current]
    for path in _by_step(root):
        if path not in past[:keep]:
            shutil.rmtree(path)


def _step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _by_step(root: Path) -> list[Path]:
    """The checkpoint directories in `root`, newest first."""
    if not root.is_dir():
        return []
    return sorted((path for path in root.iterdir() if _NAME.fullmatch(path.name)), key=_step_of, reverse=True)


def _newest_good(root: Path, world: World, bad_name: str) -> Checkpoint | None:
    for path in _by_step(root):
        if path.name != bad_name:
            try:
                return _verified(path, world)
            except CheckpointError:
                continue
    return None


def _verified(path: Path, world: World) -> Checkpoint:
    """Read the manifest and compare every file with it; rank r takes every world-size-th file."""
    manifest: dict[str, Any] = {}
    error: str | None = None
    try:
        manifest = _read_manifest(path)
        for index, (name, record) in enumerate(manifest["files"].items()):
            if index % world.size == world.rank:
                _check_file(path / name, record)
    except CheckpointError as failure:
        error = str(failure)
    except OSError as failure:
        error = f"checkpoint {path} cannot be read: {failure.strerror}"
    error = world.first_error(error)
    if error is not None:
        raise CheckpointError(error)
    return Checkpoint(path, manifest["step"], manifest["world_size"], manifest["identity"])


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / _MANIFEST
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {path} does not exist")
    if not file.is_file():
        raise CheckpointError(f"checkpoint {path} is damaged: {_MANIFEST} is missing")
    try:
        manifest = json.loads(file.read_bytes())
        expected = manifest.pop("sha256")
        found = _manifest_sha256(manifest)
    except (ValueError, KeyError, AttributeError, RecursionError):
        raise CheckpointError(f"checkpoint {path} is damaged: {_MANIFEST} is not a complete manifest") from None
    if found != expected:
        raise CheckpointError(
            f"checkpoint {path} is damaged: {_MANIFEST} has SHA-256 {found[:16]}..., but {str(expected)[:16]}... is "
            "written in it"
        )
    if manifest["version"] != _VERSION:
        raise CheckpointError(
            f"checkpoint {path} has format version {manifest['version']}, but this laconic reads version {_VERSION}"
        )
    for name in manifest["files"]:
        if not _PLAIN_FILE.fullmatch(name) or name in (".", ".."):
            raise CheckpointError(f"checkpoint {path} names the file {name!r}, which is not a plain file name")
    if ".metadata" not in manifest["files"]:
        raise CheckpointError(f"checkpoint {path} is damaged: its manifest does not list .metadata")
    checked: dict[str, Any] = manifest
    return checked


def _check_file(file: Path, record: Mapping[str, Any]) -> None:
    where = f"checkpoint {file.parent} is damaged: {file.name}"
    if not file.is_file():
        raise CheckpointError(f"{where} is missing")
    nbytes = file.stat().st_size
    if nbytes != record["nbytes"]:
        raise CheckpointError(f"{where} has {nbytes:,} bytes, but {record['nbytes']:,} were written")
    found = sha256_of(file).hex()
    if found != record["sha256"]:
        raise CheckpointError(f"{where} has SHA-256 {found[:16]}..., but {record['sha256'][:16]}... was written")


def _manifest_sha256(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _write_durably(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        fsync_file(file)
