"""Sources of text: files on disk, read as documents.

Everything streams: a text file is read in pieces of about 64 KiB, a JSONL file line by line. Order is fixed by sorting,
so a corpus is the same on every machine that holds the same files.
"""

from __future__ import annotations

import codecs
import glob
import json
import logging
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from laconic.errors import DataError
from laconic.json_text import unique_names

logger = logging.getLogger(__name__)

# What a directory contributes; a file that is named, or matched by a glob, is read whatever its name.
_SUFFIXES = (
    ".txt .text .md .markdown .rst .tex .org .log .csv .tsv .html .htm .xml .jsonl .ndjson .yaml .yml .toml .ini .cfg "
    ".py .pyi .c .h .cc .cpp .cxx .hh .hpp .cu .cuh .java .kt .scala .js .mjs .jsx .ts .tsx .go .rs .rb .php .pl .lua "
    ".r .jl .m .swift .cs .fs .hs .ml .mli .el .clj .ex .exs .erl .sh .bash .sql .proto .cmake .css .scss .vue"
)
_TEXT_SUFFIXES = frozenset(_SUFFIXES.split())
_JSONL_SUFFIXES = (".jsonl", ".ndjson")
_PIECE_NBYTES = 1 << 16
# Tests of the standard library are two thirds of it, and full of generated tables and deliberately broken files.
_STANDARD_LIBRARY_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def find_files(paths: Sequence[str]) -> list[Path]:
    """The files that `paths` (files, directories, glob patterns) name, absolute, sorted, each once.

    A directory contributes its files with a suffix in _TEXT_SUFFIXES, at any depth, hidden ones left out; links are
    followed. No paths mean `standard_library_files()`.
    """
    if not paths:
        return standard_library_files()
    found: set[Path] = set()
    for given in paths:
        path = Path(given).expanduser()
        if path.is_dir():
            files = _text_files(path)
            if not files:
                raise DataError(
                    f"data.paths names the directory {given}, which holds no text file (.txt, .md, .py, .jsonl, ...); "
                    f"for other suffixes use a glob such as '{given.rstrip('/')}/**/*.xyz'"
                )
        elif path.is_file():
            files = [path]
        elif path.exists():
            raise DataError(f"data.paths names {given}, which is neither a file nor a directory")
        elif glob.has_magic(given):
            files = [match for name in glob.glob(str(path), recursive=True) if (match := Path(name)).is_file()]
            if not files:
                only = "only directories" if glob.glob(str(path), recursive=True) else "no file"
                hint = f"; for the files in them use '{given.rstrip('/')}/*'" if only != "no file" else ""
                raise DataError(f"data.paths has the pattern {given!r}, which matches {only}{hint}")
        else:
            raise DataError(f"data.paths names {given}, which does not exist")
        found.update(Path(os.path.abspath(file)) for file in files)
    return sorted(found)


def standard_library_files() -> list[Path]:
    """The .py sources of the running Python's standard library without its tests: real text that is always there.

    About 12 MB on Python 3.11. Files that are not UTF-8 (a few declare another encoding) are left out.
    """
    root = sysconfig.get_path("stdlib")
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in _STANDARD_LIBRARY_SKIPPED)
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files = sorted(file for file in files if _is_utf8(file))
    if not files:
        raise DataError(f"data.paths is empty and {root} holds no sources of the standard library: name your own text")
    return files


def is_jsonl(path: Path) -> bool:
    """Whether each line of a file is a JSON value, by its suffix."""
    return path.suffix.lower() in _JSONL_SUFFIXES


def read_documents(path: Path, text_key: str) -> Iterator[tuple[str, bool]]:
    """Pieces of text of one file, each with True where a document ends after it.

    A .jsonl or .ndjson file holds one document per line, the string under `text_key`; any other file is one document,
    cut after line ends into pieces of about 64 KiB.
    """
    if is_jsonl(path):
        for number, record in read_records(path):
            if not isinstance(record, dict) or not isinstance(record.get(text_key), str):
                has = f"its keys are {sorted(record)}" if isinstance(record, dict) else "it is no object"
                instructs = isinstance(record, dict) and {"messages", "completion"} & set(record)
                remedy = "set task = instruction-tuning" if instructs else "set data.text_key"
                raise DataError(f"{path}:{number} has no string under {text_key!r} ({has}); {remedy}")
            yield whole_text(record[text_key], f"{path}:{number}"), True
        return
    try:
        yield from _read_text(path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


def read_records(path: Path) -> Iterator[tuple[int, Any]]:
    """The values of a JSONL file with the numbers of their lines, from 1; empty lines are passed over."""
    if not is_jsonl(path):
        raise DataError(f"data.paths names {path}, but it must be a .jsonl file, with a JSON value on each line")
    try:
        with open(path, "rb") as file:
            offset = begin(file)
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _json_value(line, path, number, offset)
                offset += len(line)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


def whole_text(text: str, where: str) -> str:
    """The text of a JSONL file's line, unless its escapes write half of a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"{where} has half of a surrogate pair (\\ud800 to \\udfff), which is no text") from None
    return text


def _read_text(path: Path) -> Iterator[tuple[str, bool]]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    kept = ""  # decoded, not yet yielded: the unfinished last line
    with open(path, "rb") as file:
        offset = begin(file)
        while block := file.read(_PIECE_NBYTES):
            if (nul := block.find(0)) >= 0:
                raise _not_text(path, offset + nul, "a NUL byte")
            text = kept + _decoded(decoder, block, path, offset)
            cut = text.rfind("\n") + 1 or (len(text) if len(text) >= _PIECE_NBYTES else 0)
            if cut:
                yield text[:cut], False
            kept = text[cut:]
            offset += len(block)
        yield kept + _decoded(decoder, b"", path, offset), True


def begin(file: BinaryIO) -> int:
    """Go to where the text of a file begins, behind a byte order mark, which is no part of it; how far that is."""
    return len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else file.seek(0)


def _decoded(decoder: codecs.IncrementalDecoder, block: bytes, path: Path, offset: int) -> str:
    held = len(decoder.getstate()[0])  # bytes of a character that began in the previous block
    try:
        return decoder.decode(block, final=not block)
    except UnicodeDecodeError as error:
        raise _not_text(path, offset - held + error.start, "a byte that is not valid UTF-8") from None


def _not_text(path: Path, offset: int, what: str) -> DataError:
    return DataError(f"{path} is not text: {what} at offset {offset}; leave the file out or convert it to UTF-8")


def _json_value(line: bytes, path: Path, number: int, offset: int) -> Any:
    try:
        return json.loads(line.decode("utf-8"), object_pairs_hook=unique_names)
    except UnicodeDecodeError as error:
        raise _not_text(path, offset + error.start, "a byte that is not valid UTF-8") from None
    except ValueError as error:
        raise DataError(f"{path}:{number} is not valid JSON: {error}") from None
    except RecursionError:
        raise DataError(f"{path}:{number} is nested too deeply to be read") from None


_OF_FILE_SYSTEM = "lost+found"
"""At the root of many, for its administrator alone."""


def _text_files(root: Path) -> list[Path]:
    def refuse(error: OSError) -> None:  # os.walk alone passes over what it cannot list
        raise DataError(f"cannot read {error.filename}: {error.strerror}") from None

    def is_new(folder: str) -> bool:  # links may lead back, or twice to the same place
        before = len(seen)
        seen.add(os.path.realpath(folder))
        return len(seen) > before

    files: list[Path] = []
    skipped = 0
    seen = {os.path.realpath(root)}
    for folder, subfolders, names in os.walk(root, onerror=refuse, followlinks=True):
        subfolders[:] = [
            name
            for name in sorted(subfolders)
            if not name.startswith(".") and name != _OF_FILE_SYSTEM and is_new(os.path.join(folder, name))
        ]
        visible = [Path(folder, name) for name in names if not name.startswith(".")]
        chosen = [file for file in visible if file.suffix.lower() in _TEXT_SUFFIXES and file.is_file()]
        files += chosen
        skipped += len(visible) - len(chosen)
    if skipped:
        logger.info("%s: %d files read, %d left out because their suffix is not one of text", root, len(files), skipped)
    return files


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return True
