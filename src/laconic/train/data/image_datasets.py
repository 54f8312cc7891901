"""Hugging Face image datasets on disk: what `save_to_disk` writes, and folders of Parquet files as the hub holds them.

Nothing is downloaded and no script of a dataset is run. Images come undecoded, so that whoever decodes them can name
the one that is damaged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from laconic.errors import ConfigError, DataError
from laconic.train.config.schema import ImagesConfig

if TYPE_CHECKING:
    from datasets import Dataset

_MARKS = ("dataset_info.json", "dataset_dict.json")
_END = b"\xff\xff\xff\xff\0\0\0\0"
"""Of an Arrow stream."""
_LABELS = re.compile("u?int|string|large_string")


@dataclass(frozen=True)
class ImageRows:
    """One split of a dataset.

    Attributes:
        origin: names it in messages.
        column: of undecoded images in `table`.
        table: its rows.
        labels: int64 [N].
    """

    origin: str
    column: str
    table: Dataset
    labels: npt.NDArray[np.int64]

    def files(self) -> Iterator[tuple[str, BinaryIO | Path]]:
        """For each image its name in messages, and what to open."""
        for number, row in enumerate(self.table):
            image = row[self.column] or {}
            path, raw = image.get("path"), image.get("bytes")
            name = f"image {number} of {self.origin}" + (f" ({path})" if path else "")
            if raw is None and not path:
                raise DataError(f"{name} is missing; leave the row out of the dataset")
            yield name, Path(str(path)) if raw is None else BytesIO(raw)


def is_dataset(path: Path) -> bool:
    """Whether a folder is a dataset of the Hugging Face library."""
    return any((path / name).is_file() for name in _MARKS) or next(path.rglob("*.parquet"), None) is not None


def read_splits(
    path: Path, config: ImagesConfig, validation: Sequence[str]
) -> tuple[list[ImageRows], tuple[str, ...] | None]:
    """Read the split "train" of a dataset, or all of one without splits, and the first of `validation` that it has.

    Returns:
        One or two splits, and the names of the classes if the dataset has some.
    """
    try:
        from datasets import ClassLabel, Image, Value
    except ImportError:
        raise ConfigError(f"{path} is a Hugging Face dataset: pip install 'laconic[vision,datasets]'") from None
    try:
        tables = _load(path)
        for table in tables.values():
            table.data.validate(full=True)  # a wrong offset would be read far outside of the memory
    except DataError:
        raise
    except Exception as error:  # whatever the library and Arrow raise for damaged files
        raise DataError(f"{path} cannot be read as a Hugging Face dataset: {error}") from None
    if "train" not in tables:
        raise DataError(f"{path} has the splits {', '.join(tables)}, but it must have one called train")
    parts = ["train", *[name for name in validation if name in tables][:1]]
    tables = {name: tables[name] for name in parts}
    features: dict[str, Any] = dict(next(iter(tables.values())).features)
    for name, table in tables.items():
        if dict(table.features) != features:
            raise DataError(f"the splits of {path} have different columns: {name} has {dict(table.features)}")
    images = [name for name, feature in features.items() if isinstance(feature, Image)]
    column = _chosen(path, "image_column", config.image_column, images, features)
    classed = [name for name, feature in features.items() if isinstance(feature, ClassLabel)]
    plain = [name for name, feature in features.items() if isinstance(feature, Value) and _LABELS.match(feature.dtype)]
    wanted = config.label_column
    label = _chosen(path, "label_column", wanted, [*classed, *plain] if wanted else classed or plain, features)
    values = {name: table[label][:] for name, table in tables.items()}
    for name, found in values.items():
        if None in found or -1 in found:
            number = min(found.index(none) for none in (None, -1) if none in found)
            raise DataError(
                f"row {number} of {path} ({name}) has no label; leave such rows, or a split without labels, out"
            )
    kind = features[label]
    classes: tuple[str, ...] | None = None
    if isinstance(kind, ClassLabel):
        classes = tuple(kind.names)
    elif kind.dtype.endswith("string"):
        classes = tuple(sorted({value for found in values.values() for value in found}))
        numbers = {value: number for number, value in enumerate(classes)}
        values = {name: [numbers[value] for value in found] for name, found in values.items()}
    splits = []
    for name, table in tables.items():
        labels = np.array(values[name], np.int64)
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < (len(classes) if classes else 2**31):
            raise DataError(
                f"{path} ({name}) has labels from {labels.min()} to {labels.max()}, but they must count classes from 0"
            )
        undecoded = table.select_columns([column]).cast_column(column, Image(decode=False))
        splits.append(ImageRows(f"{path} ({name})", column, undecoded, labels))
    return splits, classes


def _load(path: Path) -> dict[str, Dataset]:
    import pyarrow.parquet
    from datasets import Dataset, DatasetDict, concatenate_datasets, load_from_disk
    from datasets.table import InMemoryTable

    if any((path / name).is_file() for name in _MARKS):
        for file in path.rglob("*.arrow"):
            _check_whole(file)
        loaded = load_from_disk(str(path), keep_in_memory=True)
        return dict(loaded) if isinstance(loaded, DatasetDict) else {"train": loaded}
    parts: dict[str, list[Dataset]] = {}
    for file in sorted(path.rglob("*.parquet")):
        split = _split_of(file, path)
        # Written by the library, a file says which of its columns are images.
        table = Dataset(InMemoryTable(pyarrow.parquet.read_table(file)), fingerprint=str(file))
        parts.setdefault(split, []).append(table)
    return {name: concatenate_datasets(tables) for name, tables in parts.items()}


def _check_whole(file: Path) -> None:
    """Look for the end of an Arrow stream: one that was cut between two batches reads as a shorter one."""
    with file.open("rb") as opened:
        size = opened.seek(0, 2)
        opened.seek(max(0, size - len(_END)))
        end = opened.read()
    if end != _END and not end.endswith(b"ARROW1"):
        raise DataError(f"{file} has been cut short; copy it again")


def _split_of(file: Path, path: Path) -> str:
    """The split of a Parquet file: train-00000-of-00001.parquet, or train/0000.parquet."""
    for name in (file.stem, *(parent.name for parent in file.relative_to(path).parents)):
        if found := re.match(r"(train|validation|valid|val|test)(?![a-z])", name):
            return found[1]
    raise DataError(
        f"{file} names no split; Parquet files are train-*.parquet and perhaps validation-*.parquet or test-*.parquet,"
        " or lie in folders with these names"
    )


def _chosen(path: Path, field: str, wanted: str | None, fitting: list[str], columns: Iterable[str]) -> str:
    what = "images" if field == "image_column" else "labels (ClassLabel, integers or strings)"
    if wanted is not None and wanted not in fitting:
        raise ConfigError(
            f"images.{field} is {wanted!r}, but {path} has {what} in {', '.join(fitting) or 'none'} of its columns"
            f" {', '.join(columns)}"
        )
    if not fitting:
        raise DataError(f"{path} has no column of {what}; its columns are {', '.join(columns)}")
    if wanted is None and len(fitting) > 1:
        raise DataError(f"{path} has {what} in {', '.join(fitting)}; set images.{field} to one of them")
    return wanted or fitting[0]
