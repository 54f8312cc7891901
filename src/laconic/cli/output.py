"""What `--json` prints: one JSON document on stdout and nothing else, strict JSON without NaN and Infinity."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any

from laconic.json_text import json_number


def json_text(data: Any) -> str:
    """`data` as JSON; numbers that are not finite are "NaN", "Infinity" and "-Infinity", as in metrics.jsonl."""
    return json.dumps(_plain(data), indent=1, allow_nan=False)


def print_json(data: Any) -> None:
    """Print `data` as the one document of a command."""
    print(json_text(data))


@contextmanager
def json_only(wanted: bool = True) -> Iterator[Callable[[Any], None]]:
    """Keep stdout for one document: what the block, its libraries and its child processes print goes to stderr.

    Yields:
        A function to call once with the result; it is printed when the block has ended without an exception.
    """
    if not wanted:
        yield print_json
        return
    documents: list[Any] = []
    sys.stdout.flush()
    try:
        kept = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # one of them is closed
        kept = None
    try:
        with redirect_stdout(sys.stderr):
            yield documents.append
    finally:
        if kept is not None:
            os.dup2(kept, 1)
            os.close(kept)
    for document in documents:
        print_json(document)


def _plain(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {str(key): _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(value) for value in data]
    return os.fspath(data) if isinstance(data, os.PathLike) else json_number(data)
