"""The manifest of a zipped directory: the files it has, with sizes and checksums of all of them and of itself."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from laconic.errors import CheckpointError, FormatError
from laconic.formats.container import SUFFIX, ContainerFile
from laconic.formats.mapped import TensorSource
from laconic.json_text import parse_json

MANIFEST = "laconic-zip.json"
VERSION = 1
SAFETENSORS = ".safetensors"
_LIMIT_NBYTES = 100_000_000
_REMEDY = "restore the file, or zip the original again"


def listed_container(path: Path, record: Mapping[str, Any], base: TensorSource | None) -> ContainerFile:
    """The container that a manifest lists."""
    zipped = ContainerFile(path, base)
    if (zipped.nbytes, zipped.digest) != (record["nbytes"], record["digest"]):
        raise FormatError(
            f"{path}: is another file than the one listed in {MANIFEST}: {zipped.nbytes:,} bytes with digest "
            f"{zipped.digest[:16]}... instead of {record['nbytes']:,} with {record['digest'][:16]}...; {_REMEDY}"
        )
    return zipped


def check_file(path: Path, record: Mapping[str, Any]) -> None:
    """Compare a file that is no container with what a manifest says of it."""
    try:
        with open(path, "rb") as file:
            compare_file(path, record, os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


def compare_file(path: Path, record: Mapping[str, Any], nbytes: int, sha256: str) -> None:
    """Compare size and SHA-256 of a file with what a manifest says of it."""
    if nbytes != record["nbytes"]:
        raise FormatError(
            f"{path}: damaged: it has {nbytes:,} bytes, but {record['nbytes']:,} are listed in {MANIFEST}; {_REMEDY}"
        )
    if sha256 != record["sha256"]:
        raise FormatError(
            f"{path}: damaged: it has SHA-256 {sha256[:16]}..., but {record['sha256'][:16]}... is listed in "
            f"{MANIFEST}; {_REMEDY}"
        )


def read_manifest(directory: Path) -> dict[str, dict[str, Any]]:
    """What a zipped directory's manifest lists. Names are checked to stay inside of the directory."""
    path = directory / MANIFEST
    if not path.is_file():
        raise FormatError(f"{directory} has no {MANIFEST} that is a file, so `laconic zip` has not written it")
    try:
        if path.stat().st_size > _LIMIT_NBYTES:
            raise ValueError
        manifest = parse_json(path.read_text("utf-8"))
        expected = manifest.pop("sha256")
        found = manifest_sha256(manifest)
        version, records = manifest["version"], manifest["files"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise FormatError(f"{path}: is not a complete manifest of `laconic zip`") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if found != expected:
        raise FormatError(f"{path}: damaged: its SHA-256 is not the one written in it")
    if version != VERSION:
        raise FormatError(f"{path}: has format version {version}, but this laconic reads version {VERSION}")
    if not isinstance(records, dict):
        raise FormatError(f"{path}: files must be a table")
    for name, record in records.items():
        _check_name(name, path)
        kind = "digest" if name.endswith(SAFETENSORS + SUFFIX) else "sha256"
        fields = {"nbytes": int, kind: str}
        if not isinstance(record, dict) or {key: type(value) for key, value in record.items()} != fields:
            raise FormatError(f"{path}: the record of {name!r} must have nbytes and {kind}")
    return records


def _check_name(name: str, manifest: Path) -> None:
    parts = name.split("/")
    try:
        os.fsencode(name)
    except UnicodeEncodeError:  # half of a surrogate pair
        parts = [""]
    if any(part in ("", ".", "..") for part in parts) or "\\" in name or "\0" in name or name == MANIFEST:
        raise FormatError(f"{manifest}: lists {name!r}, which is not the name of a file inside of its directory")


def manifest_sha256(manifest: Mapping[str, Any]) -> str:
    """Hex digest of a manifest without its own checksum."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
