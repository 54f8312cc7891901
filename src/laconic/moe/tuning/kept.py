"""Measurements kept in the cache folder, by all that they depend on: what is tuned, the cluster, the versions."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

import laconic
from laconic.cache_folder import cache_folder, is_homeless
from laconic.collectives.policy.microbench import Ranks, host_name
from laconic.cost.hardware.rates_file import save_json
from laconic.errors import ConfigError
from laconic.json_text import parse_json
from laconic.moe.placement.consensus import first_answer

T = TypeVar("T")


class Kept:
    """Files of one cluster, read and written by its first rank; all ranks call each method together. It may be off."""

    def __init__(self, ranks: Ranks, is_on: bool) -> None:
        self._ranks, self._is_on = ranks, is_on
        device = torch.cuda.get_device_name() if ranks.device.type == "cuda" else platform.machine()
        threads = str(torch.get_num_threads())
        self._cluster: dict[str, Any] = {
            "laconic": laconic.__version__,
            "torch": torch.__version__,
            "ranks": ranks.texts(f"{host_name()} {device} {threads}"),
        }

    def get(self, facts: Mapping[str, Any], read: Callable[[Any], T]) -> T | None:
        """Return what `read` makes of the values kept of these facts; None if nothing that it takes is there."""
        found: T | None = None
        if self._is_on and self._ranks.group.rank() == 0:
            path = self._path(facts)
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, ConfigError):  # it is measured again
                found = read(parse_json(path.read_text(encoding="utf-8"))["kept"])
        return first_answer(found, self._ranks.group) if self._is_on else None

    def put(self, facts: Mapping[str, Any], values: Any) -> None:
        """Keep JSON values of these facts, if there is a folder for them."""
        if self._is_on and self._ranks.group.rank() == 0 and not is_homeless(path := self._path(facts)):
            try:
                save_json({"facts": {**self._cluster, **facts}, "kept": values}, path)
            except OSError as error:
                logging.getLogger("laconic").warning("what autotune has measured is not kept in %s: %s", path, error)

    def _path(self, facts: Mapping[str, Any]) -> Path:
        text = json.dumps({**self._cluster, **facts}, sort_keys=True)
        return cache_folder() / "moe_autotune" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
