"""Checkpoints that are either whole or not there, and are checked before a byte of them is used.

A checkpoint is the directory ``<run>/checkpoints/step-00000200``: the shards and `.metadata` that
torch.distributed.checkpoint (DCP) writes (zipped shards with `checkpoint.zip`), the model's Hugging Face config.json,
and a manifest.json with the size and SHA-256 of every file and of itself. It is written under a temporary name,
fsynced, renamed, and only then does the text file `latest` move; a crash at any point leaves the previous checkpoint as
`latest`. A name is never used twice: a step that is saved again is step-00000200-2.

DCP's own files carry no checksums, and its `.metadata` is a pickle. Both are read only after every file of the
checkpoint agrees with the manifest. That finds damage, not malice: whoever can write a run directory can write a
matching manifest and other weights. They cannot have code run: the pickle may ask for nothing but records (see
formats/dcp.py). Of ours nothing is pickled: the state holds tensors only (weights, optimizer moments); the step is in
the manifest, and learning rate, data position and dropout masks are functions of the step.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
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
from laconic.durable import fsync_directory, fsync_file, sha256_of
from laconic.errors import CheckpointError, first_line
from laconic.formats.dcp import SafeLoadPlanner
from laconic.formats.shards import alias_key, local_part, without_aliases
from laconic.formats.zip_manifest import manifest_sha256
from laconic.gradients import LocalSteps
from laconic.json_text import parse_json
from laconic.ops.adamw_scalars import BetaRanges, widened
from laconic.optim.adamw import BETAS_SEEN
from laconic.train.checkpoint.manifest import MANIFEST, VERSION, check_file, read_manifest
from laconic.train.checkpoint.zipped_storage import CheckpointReader, ZippedWriter
from laconic.train.distributed.world import World, is_peer_lost
from laconic.train.pipeline import LocalChunks
from laconic.train.report.run_dir import CHECKPOINT_NAME, checkpoint_age, checkpoint_names, latest_name

logger = logging.getLogger(__name__)

BETAS_FILE = "betas_seen.json"
"""Name of the file in a checkpoint that holds the ranges of the betas of all steps, of an optimizer that needs them."""
_RANGES = ("beta1_min", "beta1_max", "beta2_min", "beta2_max")


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
    files: frozenset[str]
    """Names of the files that the manifest lists."""

    def text(self, name: str) -> str | None:
        """One of the `texts` that were saved beside the state; None if the manifest lists none of this name."""
        if name not in self.files:
            return None
        file = self.path / name
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error


@contextmanager
def _unannounced() -> Iterator[None]:
    """Silence DCP's announcement that it runs without a process group, which is what one process does."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to (save|load) in a single process.*")
        yield


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
    adapters: bool = False,
    allowed: Callable[[], None] = lambda: None,
    local: LocalSteps | None = None,
) -> Path:
    """Write the state after `step` steps, make it `latest`, and leave only the newest `keep` checkpoints.

    All processes call it together. Checkpoints of later steps, left over from a continuation that was abandoned, are
    removed.

    Args:
        model: plain, DDP- or FSDP2-wrapped, or the chunks of a pipeline.
        identity: settings that must not change when the run is continued.
        texts: file name -> text stored beside the state.
        zipped: whether shards are losslessly shortened (docs/zip.md); loading takes both kinds.
        adapters: whether frozen weights are left out, as they are those of another directory.
        allowed: called before anything is written; raises if nothing may be.
        local: of processes that train apart: the common point is saved as the model, and beside it the outer momentum
            and each process's own weights, moments and dropped roundings.

    Raises:
        CheckpointError: on every process when any of them fails (no space, no permission, non-finite weights); then
            nothing is left behind and `latest` is unchanged.
    """
    root = run_dir / "checkpoints"
    final = root / f"step-{step:08d}"
    temporary = root / f".tmp-{final.name}"
    apart = None if local is None else _apart(local, world.rank)
    texts = {**texts, **_text_of_betas(optimizer)}
    with _unannounced(), nullcontext() if local is None else local.at_common_point():
        state, _ = _state(model, optimizer, adapters, _prefix_of(world.rank) if apart is not None else "")
        state |= apart or {}
        nbytes = _nbytes(state) * (1 if local is None else world.size)  # at most

        # 1. Refuse before writing anything.
        with _shared_outcome(world, final):
            _check_finite(model)
            allowed()
            if world.is_main:
                root.mkdir(parents=True, exist_ok=True)
                _clear_leftovers(root)
                _check_space(root, nbytes)
                temporary.mkdir()
        try:
            # 2. Every process writes and hashes its own shard.
            records: dict[str, Any] = {}
            with _outcome_of_dcp(world, final):
                writer = ZippedWriter(temporary) if zipped else FileSystemWriter(temporary)
                save(state, storage_writer=writer, no_dist=world.size == 1)
            with _shared_outcome(world, final):
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
                        "version": VERSION,
                        "step": step,
                        "world_size": world.size,
                        "laconic": laconic.__version__,
                        "torch": str(torch.__version__),
                        "identity": dict(identity),
                        "files": files,
                    }
                    manifest["sha256"] = manifest_sha256(manifest)
                    _write_durably(temporary / MANIFEST, json.dumps(manifest, indent=1) + "\n")
                    final = _publish(temporary, final, keep)
        except CheckpointError:
            if world.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
    return root / world.gather(final.name)[0]


def find_checkpoint(run_dir: Path, world: World, name: str | None = None) -> Checkpoint:
    """The checkpoint called `name` ("step-00000200", or just its step), or `latest`, every byte of it verified.

    Where `latest` is missing it is the newest good one. All processes call it together; they share the reading.
    """
    root = run_dir / "checkpoints"
    present, chosen = _seen_by_main(world, lambda: _choose(run_dir, name))
    if chosen is None:
        good = newest_good_checkpoint(run_dir, world)
        if good is None:
            raise CheckpointError(
                f"{root} has no file `latest`, and none of its checkpoints ({', '.join(present[:5])}) is good; restore "
                "one from a copy or start a new run"
            )
        if world.is_main:
            logger.warning("%s has no file `latest`; the newest good checkpoint is %s", root, good.path.name)
        return good
    try:
        return _verified(root / chosen, world)
    except CheckpointError as failure:
        advice = "No other checkpoint here is good; restore the damaged one from a copy or start a new run."
        for other in present:
            if other != chosen:
                with contextlib.suppress(CheckpointError):
                    good = _verified(root / other, world)
                    advice = (
                        f"The newest good checkpoint is {other}: continue from it with --resume --checkpoint.load "
                        f"{good.step}, or export it with --checkpoint {other}."
                    )
                    break
        raise CheckpointError(f"{failure}. {advice}") from None


def newest_good_checkpoint(run_dir: Path, world: World, without: Collection[str] = ()) -> Checkpoint | None:
    """The newest checkpoint that is good and not among the names `without`, every byte of it verified; None: no such.

    All processes call it together; they share the reading. One that is damaged is logged and passed over. What a save
    that was cut short has left is put right: `latest` names the found one, and no temporary directory stays.
    """
    root = run_dir / "checkpoints"
    for name in _seen_by_main(world, lambda: [one for one in checkpoint_names(run_dir) if one not in without]):
        try:
            found = _verified(root / name, world)
        except CheckpointError as failure:
            if world.is_main:
                logger.warning("%s; trying the one before", failure)
            continue
        if world.is_main:
            with contextlib.suppress(OSError):  # the next save meets the same, and tells
                _clear_leftovers(root)
                if latest_name(run_dir) != name:
                    _point_latest(root, name)
        return found
    return None


def _seen_by_main(world: World, look: Callable[[], Any]) -> Any:
    """What `look` finds on the first process, for all: listings of a shared file system may differ for a while."""
    found: tuple[str | None, Any] = (None, None)
    if world.is_main:
        try:
            found = None, look()
        except CheckpointError as failure:
            found = str(failure), None
    error, value = world.gather(found)[0]
    if error is not None:
        raise CheckpointError(error)
    return value


def _choose(run_dir: Path, name: str | None) -> tuple[list[str], str | None]:
    """The names of the checkpoints there are, newest first, and the chosen one.

    None is chosen when `latest` is missing and there are checkpoints.
    """
    present = checkpoint_names(run_dir)
    wanted = latest_name(run_dir) if name is None else name
    if wanted is None:
        if not present:
            raise CheckpointError(
                f"{run_dir} has no checkpoint to continue from; bring its checkpoints back, or start a new run, "
                "without --resume, in another directory"
            )
        return present, None
    if wanted.isascii() and wanted.isdecimal():
        wanted = f"step-{int(wanted[:20]):08d}"
    if not CHECKPOINT_NAME.fullmatch(wanted):
        raise CheckpointError(f"{wanted!r} is not the name of a checkpoint such as step-00000200")
    if wanted not in present and checkpoint_age(wanted)[1] == 1:  # that step was saved again
        step = checkpoint_age(wanted)[0]
        wanted = next((other for other in present if checkpoint_age(other)[0] == step), wanted)
    return present, wanted


@_unannounced()
def load_checkpoint(
    checkpoint: Checkpoint,
    world: World,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    adapters: bool = False,
    local: LocalSteps | None = None,
) -> None:
    """Load the weights and the optimizer state of `checkpoint` into `model` and `optimizer`, in place.

    All processes call it together. World size and parallelism may differ from the run that wrote it. `adapters` and
    `local` as in `save_checkpoint`; of another number of processes, process r goes on as r modulo theirs.

    Raises:
        CheckpointError: the state does not fit the model.
    """
    of_rank = "" if local is None else _prefix_of(world.rank % checkpoint.world_size)
    state, full = _state(model, optimizer, adapters, of_rank)
    apart: dict[str, torch.Tensor] = {}
    with _shared_outcome(world, checkpoint.path):
        betas_seen = _saved_betas(checkpoint)
        reader = CheckpointReader(checkpoint.path, checkpoint.files)
        stored = reader.read_metadata().state_dict_metadata
        _leave_out_unmoved(state[f"{of_rank}optimizer"], stored, f"{of_rank}optimizer.")
        if local is not None:
            device = next(model.parameters()).device
            apart = _room_for_apart(stored, of_rank, world.size == checkpoint.world_size, device)
            state |= apart
    with _outcome_of_dcp(world, checkpoint.path):
        load(state, storage_reader=reader, planner=SafeLoadPlanner(), no_dist=world.size == 1)
    set_state_dict(model, optimizer, model_state_dict=full["model"], optim_state_dict=full["optimizer"])
    # Only now: torch steps a new optimizer to have states to load into.
    for group in optimizer.param_groups if betas_seen is not None else ():
        group[BETAS_SEEN] = betas_seen
    if local is not None:
        _load_apart(local, apart, of_rank, checkpoint.step)


@_unannounced()
def load_weights(checkpoint: Checkpoint, model: nn.Module, adapters: bool = False) -> None:
    """Load only the weights of `checkpoint` into the plain `model`, in this process alone; of `adapters` only these."""
    state = {"model": without_aliases(model.state_dict(), _frozen(model) if adapters else ())}
    try:
        reader = CheckpointReader(checkpoint.path, checkpoint.files)
        load(state, storage_reader=reader, planner=SafeLoadPlanner(), no_dist=True)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"checkpoint {checkpoint.path}: {_reason(error)}") from error


def _state(
    model: nn.Module, optimizer: torch.optim.Optimizer, adapters: bool, of_rank: str = ""
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state that DCP stores, and the full state dicts it is a view of. `of_rank` begins the moments' key.

    Names are those of the plain model whatever wraps it, and of the whole model for the chunks of a pipeline. DCP gets
    no param_groups (they follow from the configuration, and `BETAS_FILE` has the rest), a tied weight once, and with
    `adapters` no frozen weight.
    """
    model_state, optimizer_state = get_state_dict(model, optimizer)
    weights, moments = model_state, cast(dict[str, Any], optimizer_state["state"])
    if isinstance(model, LocalChunks):
        weights, moments = ({name.partition(".")[2]: value for name, value in s.items()} for s in (weights, moments))
    stored = {"model": without_aliases(weights, _frozen(model) if adapters else ()), f"{of_rank}optimizer": moments}
    return stored, {"model": model_state, "optimizer": optimizer_state}


def _leave_out_unmoved(moments: dict[str, dict[str, Any]], stored: Iterable[str], prefix: str) -> None:
    """Do not ask for moments that the checkpoint lacks: those of parameters that never had a gradient.

    `moments` by parameter are zeros that torch made up to be loaded into; without any, the optimizer starts afresh.
    """
    have = {key.removeprefix(prefix).rpartition(".")[0] for key in stored if key.startswith(prefix)}
    for name in moments.keys() - have:
        moments[name].clear()


def _text_of_betas(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """The file with the ranges of betas that the optimizer's groups have had, if these remember any.

    One for all: groups have the configuration's betas, and other numbers of processes cut groups otherwise.
    """
    seen = [group[BETAS_SEEN] for group in optimizer.param_groups if BETAS_SEEN in group]
    if not seen:
        return {}
    ranges: BetaRanges = seen[0]
    for low1, high1, low2, high2 in seen[1:]:
        ranges = widened(widened(ranges, low1, low2), high1, high2)
    return {BETAS_FILE: json.dumps(dict(zip(_RANGES, ranges, strict=True))) + "\n"}


def _saved_betas(checkpoint: Checkpoint) -> BetaRanges | None:
    """The ranges that `_text_of_betas` wrote; None if the checkpoint has none."""
    text = checkpoint.text(BETAS_FILE)
    if text is None:
        return None
    low1, high1, low2, high2 = (float(parse_json(text)[name]) for name in _RANGES)
    return low1, high1, low2, high2


# --- processes that train apart ---
#
# What is the same on all is stored once, as "outer/momentum/NAME"; what is a process's own for each, as
# "rank3/local/NAME", "rank3/optimizer.NAME.KEY". The common point is the model.

_OUTER = ("momentum", "average")
_OWN = ("local", "error", "start")


def _prefix_of(rank: int) -> str:
    return f"rank{rank}/"


def _apart(local: LocalSteps, rank: int) -> dict[str, torch.Tensor]:
    """What a checkpoint keeps of local steps beside the common point, by key."""
    state = local.state_dict()
    parts = [("outer/", part) for part in _OUTER] + [(_prefix_of(rank), part) for part in _OWN]
    return {f"{prefix}{part}/{name}": x for prefix, part in parts for name, x in state[part].items()}


def _room_for_apart(
    stored: Mapping[str, Any], of_rank: str, with_error: bool, device: torch.device
) -> dict[str, torch.Tensor]:
    own = [part for part in _OWN if with_error or part != "error"]
    beginnings = tuple([f"outer/{part}/" for part in _OUTER] + [f"{of_rank}{part}/" for part in own])
    return {
        key: torch.empty(one.size, dtype=one.properties.dtype, device=device)
        for key, one in stored.items()
        if key.startswith(beginnings)
    }


@torch.no_grad()
def _load_apart(local: LocalSteps, apart: Mapping[str, torch.Tensor], of_rank: str, step: int) -> None:
    state: dict[str, Any] = {"steps": step, "common": local.parameters()}
    for prefix, parts in (("outer/", _OUTER), (of_rank, _OWN)):
        for part in parts:
            beginning = f"{prefix}{part}/"
            state[part] = {key.removeprefix(beginning): x for key, x in apart.items() if key.startswith(beginning)}
    local.load_state_dict(state)


def _frozen(model: nn.Module) -> set[tuple[Any, ...]]:
    return {alias_key(parameter) for parameter in model.parameters() if not parameter.requires_grad}


def _nbytes(state: Any) -> int:
    if isinstance(state, Mapping):
        return sum(_nbytes(value) for value in state.values())
    return int(state.numel() * state.element_size()) if isinstance(state, torch.Tensor) else 0


@contextmanager
def _shared_outcome(world: World, path: Path) -> Iterator[None]:
    """Run the block, without collectives, on every process; if it fails on any, raise the same error on all."""
    error: str | None = None
    cause: BaseException | None = None
    try:
        yield
    except Exception as failure:
        cause = failure
        error = f"{_prefix(world, world.rank)}{_reason(failure)}"
    try:
        error = world.first_error(error)
    except (RuntimeError, MemoryError):
        if cause is None:
            raise
        # A rank without memory for a message cannot tell the others; it says its own error then.
    if error is not None:
        raise CheckpointError(f"checkpoint {path}: {error}") from cause


@contextmanager
def _outcome_of_dcp(world: World, path: Path) -> Iterator[None]:
    """Run a collective call of DCP, which itself tells all processes what has failed on one of them.

    What fails between its steps is known here only: the others wait in DCP's collectives, where no message of ours
    reaches them, and learn of it as soon as this process ends.
    """
    try:
        yield
    except (Exception, CheckpointException) as failure:  # CheckpointException is no Exception
        if is_peer_lost(failure):
            raise
        failures = failure.failures if isinstance(failure, CheckpointException) else {}
        reason = f"{_prefix(world, min(failures, default=world.rank))}{_reason(failure)}"
        raise CheckpointError(f"checkpoint {path}: {reason}") from failure


def _prefix(world: World, rank: int) -> str:
    return f"rank {rank}: " if world.size > 1 else ""


def _reason(error: BaseException) -> str:
    """The innermost readable cause of a failure inside DCP."""
    if isinstance(error, CheckpointException):
        return _reason(error.failures[min(error.failures)][0]) if error.failures else str(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    for earlier in (error.__cause__, error.__context__):
        if isinstance(earlier, OSError) and earlier.strerror:
            return _reason(earlier)
    return first_line(error)


def _check_finite(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not torch.isfinite(local_part(parameter.detach())).all():
            raise CheckpointError(f"not saved, because parameter {name} holds a value that is not finite")


def _check_space(root: Path, needed_nbytes: int) -> None:
    free_nbytes = shutil.disk_usage(root).free
    if free_nbytes < needed_nbytes:
        raise CheckpointError(f"not saved, because it needs {needed_nbytes:,} bytes and {free_nbytes:,} are free there")


def _publish(temporary: Path, wanted: Path, keep: int) -> Path:
    """Give the complete `temporary` its name, then move `latest`, then prune; durable in this order. Returns its path.

    The name is `wanted`, or with a number behind it when that step has been saved before, by a continuation that was
    abandoned: what `latest` names is not touched before `latest` has moved on.
    """
    root = wanted.parent
    present = checkpoint_names(root.parent)
    step = checkpoint_age(wanted.name)[0]
    before = [number for other, number in map(checkpoint_age, present) if other == step]
    final = root / f"{wanted.name}-{max(before) + 1}" if before else wanted
    fsync_directory(temporary)
    os.rename(temporary, final)
    fsync_directory(root)
    _point_latest(root, final.name)
    kept = {final.name}
    for name in present:
        if checkpoint_age(name)[0] < step and len(kept) < keep:
            kept.add(name)
        else:
            os.rename(root / name, root / f".old-{name}")  # half of it is no checkpoint
            shutil.rmtree(root / f".old-{name}")
    return final


def _clear_leftovers(root: Path) -> None:
    for leftover in root.glob(".*-step-*"):
        shutil.rmtree(leftover)


def _point_latest(root: Path, name: str) -> None:
    _write_durably(root / ".latest", name + "\n")
    os.replace(root / ".latest", root / "latest")
    fsync_directory(root)


def _verified(path: Path, world: World) -> Checkpoint:
    """Read the manifest and compare every file with it; rank r takes every world-size-th file."""
    manifest: dict[str, Any] = {}
    error: str | None = None
    try:
        manifest = read_manifest(path)
        for index, (name, record) in enumerate(manifest["files"].items()):
            if index % world.size == world.rank:
                check_file(path / name, record)
    except CheckpointError as failure:
        error = str(failure)
    except OSError as failure:
        error = f"checkpoint {path} cannot be read: {failure.strerror}"
    found = world.gather([error, manifest_sha256(manifest)])
    error = next((other for other, _ in found if other is not None), None)
    if error is None:
        differing = next((rank for rank, (_, digest) in enumerate(found) if digest != found[0][1]), None)
        if differing is not None:
            error = f"checkpoint {path} is another one on rank {differing} than on rank 0; all need the same files"
    if error is not None:
        raise CheckpointError(error)
    files = frozenset(manifest["files"])
    return Checkpoint(path, manifest["step"], manifest["world_size"], manifest["identity"], files)


def _write_durably(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        fsync_file(file)
