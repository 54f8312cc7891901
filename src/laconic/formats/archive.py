"""Zips, unzips and verifies safetensors files and whole checkpoint directories (`laconic zip`).

A zipped directory has the files of the original, each safetensors file as a container (`model.safetensors.laconic`),
every other one as it is, and a manifest, `laconic-zip.json`, with sizes and checksums of all of them and of itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laconic.durable import begin_writeback, fsync_file, new_directory, new_file
from laconic.errors import CheckpointError, FormatError
from laconic.formats.chunk import Code
from laconic.formats.container import SUFFIX, ContainerFile, Progress, write_container
from laconic.formats.mapped import SafetensorsFile, TensorSource, map_file
from laconic.formats.zip_manifest import (
    MANIFEST,
    SAFETENSORS,
    VERSION,
    check_file,
    compare_file,
    listed_container,
    manifest_sha256,
    read_manifest,
)
from laconic.formats.zipped import is_zipped, open_tensors

_PIECE_NBYTES = 1 << 20


@dataclass(frozen=True)
class Summary:
    """The result of zipping, unzipping or verifying."""

    path: Path
    """What was written, or verified."""
    original_nbytes: int
    zipped_nbytes: int
    num_tensors: int
    num_other_files: int = 0
    unchecked: str | None = None
    """The base that was not at hand, so that only the differences to it were verified."""
    unlisted: tuple[str, ...] = ()
    """Files of the directory that its manifest does not list; they are no part of it."""


def tensors_nbytes(path: Path) -> int:
    """Bytes of tensors in a file or directory, zipped or not: the total of a progress bar."""
    if path.is_dir():
        files = [p for p in path.rglob("*") if p.name.endswith((SAFETENSORS, SAFETENSORS + SUFFIX))]
    else:
        files = [path]
    return sum(ContainerFile(p).data_nbytes if is_zipped(p) else len(SafetensorsFile(p).data) for p in files)


def zip_path(
    path: Path,
    out: Path | None = None,
    *,
    base: Path | None = None,
    code: Code = "auto",
    num_threads: int = 1,
    progress: Progress | None = None,
) -> Summary:
    """Compress the safetensors file or directory `path` losslessly into `out` (default: `path` with .laconic).

    Links to files are followed, as in the cache of the Hugging Face hub. `out` appears whole or not at all.

    Args:
        path: a .safetensors file, or a directory.
        out: what to write; must not exist.
        base: a checkpoint, zipped or plain; tensors are stored as the difference to its tensors of the same name where
            that is shorter.
        code: lossless code, see `laconic.encode`; or "best", which entropy-codes where that is shorter, by a
            sample of each chunk; for files only.
        num_threads: chunks encoded at a time.
        progress: called with numbers of bytes done.

    Raises:
        FormatError: a file is not what its name says.
        CheckpointError: something cannot be read or written, or `out` exists.
    """
    out = path.with_name(path.name + SUFFIX) if out is None else out
    source = None if base is None else open_tensors(base)
    if not path.is_dir():
        return _zip_file(path, out, source, code, num_threads, progress)
    files = dict(_walk(path))
    if MANIFEST in files:
        raise FormatError(f"{path} is zipped already: it has a {MANIFEST}")
    zipped_before = next((name for name in files if name.endswith(SAFETENSORS + SUFFIX)), None)
    if zipped_before is not None:
        raise FormatError(f"{path} holds {zipped_before}, which is zipped already; unzip it or move it away")
    if _is_inside(out, path):
        raise CheckpointError(f"{out} is inside of {path}, which is being zipped; choose another --out")
    records: dict[str, dict[str, Any]] = {}
    original_nbytes = zipped_nbytes = num_tensors = 0
    with new_directory(out) as temporary:
        for name, file in files.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            if name.endswith(SAFETENSORS):
                made = _zip_file(file, temporary / (name + SUFFIX), source, code, num_threads, progress)
                zipped = ContainerFile(made.path)
                records[name + SUFFIX] = {"nbytes": made.zipped_nbytes, "digest": zipped.digest}
                original_nbytes += made.original_nbytes
                zipped_nbytes += made.zipped_nbytes
                num_tensors += made.num_tensors
            else:
                nbytes, digest = _copy(file, temporary / name)
                records[name] = {"nbytes": nbytes, "sha256": digest}
                original_nbytes += nbytes
                zipped_nbytes += nbytes
        manifest = {"format": "laconic zip", "version": VERSION, "files": records}
        text = json.dumps(manifest | {"sha256": manifest_sha256(manifest)}, indent=1) + "\n"
        with open(temporary / MANIFEST, "w", encoding="ascii") as manifest_file:
            manifest_file.write(text)
            fsync_file(manifest_file)
    num_other = sum("sha256" in record for record in records.values())
    return Summary(out, original_nbytes, zipped_nbytes + len(text), num_tensors, num_other)


def unzip(
    path: Path,
    out: Path | None = None,
    *,
    base: Path | None = None,
    num_threads: int = 1,
    progress: Progress | None = None,
) -> Summary:
    """Restore what `zip_path` wrote, byte for byte, to `out` (default: `path` without .laconic).

    Every checksum is compared; `out` appears whole or not at all. Arguments are those of `zip_path`.

    Raises:
        FormatError: anything is damaged or another base is given.
        CheckpointError: something cannot be read or written, or `out` exists.
    """
    if out is None:
        if not is_zipped(path):
            raise FormatError(f"{path} does not end with {SUFFIX}, so say where to unzip it with --out")
        out = path.with_name(path.name.removesuffix(SUFFIX))
    source = None if base is None else open_tensors(base)
    if not path.is_dir():
        return _unzip_file(ContainerFile(path, source), out, num_threads, progress)
    records = read_manifest(path)
    unlisted = _unlisted(path, records)
    if _is_inside(out, path):
        raise CheckpointError(f"{out} is inside of {path}, which is being unzipped; choose another --out")
    original_nbytes = zipped_nbytes = num_tensors = 0
    with new_directory(out) as temporary:
        for name, record in records.items():
            target = temporary / (name.removesuffix(SUFFIX) if "digest" in record else name)
            target.parent.mkdir(parents=True, exist_ok=True)
            if "digest" in record:
                made = _unzip_file(listed_container(path / name, record, source), target, num_threads, progress)
                original_nbytes += made.original_nbytes
                num_tensors += made.num_tensors
            else:
                found = _copy(path / name, target)
                compare_file(path / name, record, *found)
                original_nbytes += found[0]
            zipped_nbytes += record["nbytes"]
    num_other = sum("sha256" in record for record in records.values())
    return Summary(out, original_nbytes, zipped_nbytes, num_tensors, num_other, unlisted=unlisted)


def verify(path: Path, *, base: Path | None = None, num_threads: int = 1, progress: Progress | None = None) -> Summary:
    """Decode everything that `zip_path` wrote and compare every checksum, without writing anything.

    Without the base of a checkpoint that needs one, the stored differences are verified instead. Errors as of `unzip`.
    """
    source = None if base is None else open_tensors(base)
    if not path.is_dir():
        return _verify_file(ContainerFile(path, source), num_threads, progress)
    records = read_manifest(path)
    unlisted = _unlisted(path, records)
    original_nbytes = zipped_nbytes = num_tensors = num_other = 0
    unchecked = None
    for name, record in records.items():
        if "digest" in record:
            seen = _verify_file(listed_container(path / name, record, source), num_threads, progress)
            original_nbytes += seen.original_nbytes
            num_tensors += seen.num_tensors
            unchecked = unchecked or seen.unchecked
        else:
            check_file(path / name, record)
            original_nbytes += record["nbytes"]
            num_other += 1
        zipped_nbytes += record["nbytes"]
    return Summary(path, original_nbytes, zipped_nbytes, num_tensors, num_other, unchecked, unlisted)


def _zip_file(
    path: Path, out: Path, base: TensorSource | None, code: Code, num_threads: int, progress: Progress | None
) -> Summary:
    if is_zipped(path):
        raise FormatError(f"{path} is zipped already")
    plain = SafetensorsFile(path)
    before = _version(path)
    tensors = (plain.read(name, 0, entry.nbytes) for name, entry in plain.entries.items())
    with new_file(out) as file:
        nbytes, _ = write_container(
            file,
            plain.header,
            tensors,
            code=code,
            base=base,
            num_threads=num_threads,
            progress=progress,
            name=str(path),
        )
        _check_unchanged(path, before)
    return Summary(out, len(plain.content), nbytes, len(plain.entries))


def _unzip_file(zipped: ContainerFile, out: Path, num_threads: int, progress: Progress | None) -> Summary:
    with new_file(out) as file:
        written = file.write(len(zipped.header).to_bytes(8, "little") + zipped.header)
        for chunk in zipped.chunks(num_threads):
            file.write(chunk.numpy().data)
            begin_writeback(file, written, written + len(chunk))
            written += len(chunk)
            if progress is not None:
                progress(len(chunk))
    return Summary(out, zipped.original_nbytes, zipped.nbytes, len(zipped.entries))


def _verify_file(zipped: ContainerFile, num_threads: int, progress: Progress | None) -> Summary:
    unknown_base = zipped.base is None
    for chunk in zipped.chunks(num_threads, unknown_base=unknown_base):
        if progress is not None:
            progress(len(chunk))
    unchecked = zipped.base_name if unknown_base and zipped.needs_base else None
    return Summary(zipped.path, zipped.original_nbytes, zipped.nbytes, len(zipped.entries), unchecked=unchecked)


def _walk(directory: Path) -> Iterator[tuple[str, Path]]:
    """(relative name with slashes, path) of every file, in order; CheckpointError if one is neither file nor folder."""
    try:
        for path in sorted(directory.iterdir()):
            if path.is_dir():
                if path.is_symlink():
                    raise CheckpointError(f"{path} is a link to a directory; only links to files are followed")
                yield from ((f"{path.name}/{name}", file) for name, file in _walk(path))
            elif path.is_file():
                yield path.name, path
            else:
                raise CheckpointError(f"{path} is neither a file nor a directory")
    except OSError as error:
        raise CheckpointError(f"cannot read {directory}: {error.strerror}") from error


def _unlisted(directory: Path, records: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(name for name, _ in _walk(directory) if name not in records and name != MANIFEST)


def _is_inside(path: Path, directory: Path) -> bool:
    return path.absolute().resolve().is_relative_to(directory.resolve())


def _version(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _check_unchanged(path: Path, before: tuple[int, int, int]) -> None:
    if _version(path) != before:
        raise CheckpointError(f"{path} changed while it was being read; try again")


def _copy(source: Path, target: Path) -> tuple[int, str]:
    """Copy a file durably; its size and SHA-256."""
    content = map_file(source)
    before = _version(source)
    digest = hashlib.sha256()
    with open(target, "xb") as writing:
        for start in range(0, len(content), _PIECE_NBYTES):
            piece = content[start : start + _PIECE_NBYTES].numpy().data
            digest.update(piece)
            writing.write(piece)
        fsync_file(writing)
    _check_unchanged(source, before)
    return len(content), digest.hexdigest()
