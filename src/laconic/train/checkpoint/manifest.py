"""The manifest of a checkpoint: its metadata, and the size and SHA-256 of each of its files and of itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from laconic.durable import sha256_of
from laconic.errors import CheckpointError
from laconic.formats.zip_manifest import manifest_sha256
from laconic.json_text import parse_json

MANIFEST = "manifest.json"
VERSION = 1
_PLAIN_FILE = re.compile(r"[A-Za-z0-9._-]+")


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint in `path`, without its own checksum, every field of the right type."""
    file = path / MANIFEST
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {path} does not exist")
    if not file.is_file():
        raise CheckpointError(f"checkpoint {path} is damaged: {MANIFEST} is missing")
    try:
        manifest = parse_json(file.read_bytes())
        expected = manifest.pop("sha256")
        found = manifest_sha256(manifest)
    except (ValueError, KeyError, AttributeError, TypeError):
        raise CheckpointError(f"checkpoint {path} is damaged: {MANIFEST} is not a complete manifest") from None
    if found != expected:
        raise CheckpointError(
            f"checkpoint {path} is damaged: {MANIFEST} has SHA-256 {found[:16]}..., but {str(expected)[:16]}... is "
            "written in it"
        )
    if manifest.get("version") != VERSION:
        raise CheckpointError(
            f"checkpoint {path} has format version {manifest.get('version')!r}, but this laconic reads "
            f"version {VERSION}"
        )
    kinds = {"step": int, "world_size": int, "identity": dict, "files": dict}
    for field, kind in kinds.items():
        if type(manifest.get(field)) is not kind:
            raise CheckpointError(f"checkpoint {path} is damaged: {field} in {MANIFEST} is {manifest.get(field)!r}")
    for name, record in manifest["files"].items():
        whole = isinstance(record, dict) and type(record.get("nbytes")) is int and type(record.get("sha256")) is str
        if not whole:
            raise CheckpointError(f"checkpoint {path} is damaged: {MANIFEST} has no size and SHA-256 of {name!r}")
        if not _PLAIN_FILE.fullmatch(name) or name in (".", ".."):
            raise CheckpointError(f"checkpoint {path} names the file {name!r}, which is not a plain file name")
    if ".metadata" not in manifest["files"]:
        raise CheckpointError(f"checkpoint {path} is damaged: its manifest does not list .metadata")
    checked: dict[str, Any] = manifest
    return checked


def check_file(file: Path, record: Mapping[str, Any]) -> None:
    """Compare `file` with the size and SHA-256 of `record`, its entry in the manifest."""
    where = f"checkpoint {file.parent} is damaged: {file.name}"
    if not file.is_file():
        raise CheckpointError(f"{where} is missing")
    nbytes = file.stat().st_size
    if nbytes != record["nbytes"]:
        raise CheckpointError(f"{where} has {nbytes:,} bytes, but {record['nbytes']:,} were written")
    found = sha256_of(file).hex()
    if found != record["sha256"]:
        raise CheckpointError(f"{where} has SHA-256 {found[:16]}..., but {record['sha256'][:16]}... was written")
