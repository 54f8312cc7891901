"""Reads the files that wandb writes offline: LevelDB's log format after seven bytes, protocol buffers inside."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest

_HEADER, _BLOCK = 7, 1 << 15


class OfflineRun:
    """One start of a run: the folder that wandb made for it."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.rows: list[dict[str, Any]] = []
        self.config: dict[str, Any] = {}
        self.exit_code: int | None = None
        [file] = folder.glob("run-*.wandb")
        for record in _records(file.read_bytes()):
            kind = record.WhichOneof("record_type")
            if kind == "history":
                items = record.history.item
                row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
                self.rows.append(row)
            elif kind in ("run", "config"):
                self.id = record.run.run_id if kind == "run" else self.id
                changes = record.run.config if kind == "run" else record.config
                self.config |= {item.key or "/".join(item.nested_key): item.value_json for item in changes.update}
            elif kind == "exit":
                self.exit_code = record.exit.exit_code

    def column(self, name: str) -> list[Any]:
        return [row[name] for row in self.rows if name in row]


def offline_runs(folder: Path) -> list[OfflineRun]:
    """Those below `folder`/wandb, in order of time. wandb's process ends first: `finish` does not wait for files."""
    pytest.importorskip("wandb").teardown()
    return [OfflineRun(path) for path in sorted(folder.glob("wandb/offline-run-*"))]


def _records(content: bytes) -> list[Any]:
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    assert content[:4] == b":W&B"
    found, whole, at = [], b"", _HEADER
    while at + 7 <= len(content):
        if (left := _BLOCK - at % _BLOCK) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last of several parts
            found.append(pb.Record.FromString(whole))
            whole = b""
    return found


@pytest.fixture
def wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """wandb, offline, with settings of this test's environment alone."""
    wandb = pytest.importorskip("wandb")
    wandb.teardown()
    for name, value in {"MODE": "offline", "SILENT": "true", "CONSOLE": "off", "ERROR_REPORTING": "false"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "netrc"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(wandb, "run", None)  # a run whose process was killed would stay
    yield wandb
    with contextlib.suppress(ConnectionError):  # a test has killed wandb's process
        wandb.teardown()
