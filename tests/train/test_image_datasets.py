"""Hugging Face image datasets on disk: the same images as in class folders, whatever wrote them."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from laconic.errors import ConfigError, DataError
from tests.train.runs import train_alone
from tests.train.test_images import read, stripes, tiny

datasets = pytest.importorskip("datasets")

NAMES = ["flat", "upright"]


def png(image: Any) -> bytes:
    file = io.BytesIO()
    PIL.Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def rows(count: int = 12, **columns: Any) -> Any:
    """A dataset of stripes; more columns are (feature, values)."""
    images, labels = stripes(count)
    found = {"image": (datasets.Image(), [{"bytes": png(image), "path": None} for image in images])}
    found |= {"label": (datasets.ClassLabel(names=NAMES), labels.tolist())} | columns
    features = datasets.Features({name: feature for name, (feature, _) in found.items()})
    return datasets.Dataset.from_dict({name: values for name, (_, values) in found.items()}, features)


def save_parquet(split: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    split.to_parquet(str(path))


def test_every_layout_of_a_dataset_holds_the_same_images(tmp_path: Path) -> None:
    whole = rows()
    whole.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=rows(8), test=rows(12).select(range(8, 12))).save_to_disk(tmp_path / "splits")
    save_parquet(whole.select(range(5)), tmp_path / "hub" / "data" / "train-00000-of-00002.parquet")
    save_parquet(whole.select(range(5, 12)), tmp_path / "hub" / "data" / "train-00001-of-00002.parquet")
    save_parquet(whole.select(range(8)), tmp_path / "folders" / "default" / "train" / "0000.parquet")
    save_parquet(whole.select(range(8, 12)), tmp_path / "folders" / "default" / "validation" / "0000.parquet")
    images, labels = stripes(12)
    for name in ("one", "hub"):
        corpus = read(tmp_path / name)
        np.savez(tmp_path / "same.npz", images=images, labels=labels)
        assert corpus.classes == tuple(NAMES)
        same = read(tmp_path / "same.npz")
        assert (corpus.train.images == same.train.images).all()
        assert (corpus.validation.labels == same.validation.labels).all()
    for name in ("splits", "folders"):
        corpus = read(tmp_path / name)
        assert (corpus.train.images == images[:8, None]).all()
        assert (corpus.validation.images == images[8:, None]).all()
        assert (corpus.validation.labels == labels[8:]).all()


def test_a_run_trains_on_a_dataset(tmp_path: Path) -> None:
    datasets.DatasetDict(train=rows(128), validation=rows(32)).save_to_disk(tmp_path / "data")
    assert train_alone(tiny(tmp_path / "data", tmp_path / "run")) == 0
    assert "validation_accuracy" in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_labels_may_be_integers_or_strings(tmp_path: Path) -> None:
    labels = stripes(12)[1].tolist()
    kinds = {"int64": labels, "int8": labels, "string": [NAMES[label] for label in labels]}
    for kind, values in kinds.items():
        rows(label=(datasets.Value(kind), values)).save_to_disk(tmp_path / kind)
    found = {kind: read(tmp_path / kind) for kind in kinds}
    assert found["string"].classes == tuple(NAMES)
    assert found["int64"].classes == found["int8"].classes == ("0", "1")
    assert all((corpus.train.labels == found["int64"].train.labels).all() for corpus in found.values())


def test_columns_are_named_where_several_fit(tmp_path: Path) -> None:
    images, labels = stripes(12)
    fine = (datasets.ClassLabel(names=["a", "b", "c"]), (labels + (np.arange(12) == 5)).tolist())
    more = (datasets.Image(), [{"bytes": png(255 - image), "path": None} for image in images])
    rows(fine=fine, more=more, text=(datasets.Value("string"), list("abcdefghijkl"))).save_to_disk(tmp_path)
    with pytest.raises(DataError, match=r"images in image, more; set images.image_column to one"):
        read(tmp_path)
    with pytest.raises(DataError, match=r"labels .* in label, fine; set images.label_column to one"):
        read(tmp_path, image_column="more")
    corpus = read(tmp_path, image_column="more", label_column="fine")
    assert corpus.classes == ("a", "b", "c")
    assert (np.sort(corpus.train.images.ravel())[-1]) == 255 - images.min()
    assert len(read(tmp_path, image_column="image", label_column="text").classes) == 12
    for column in ("image", "nothing"):
        with pytest.raises(ConfigError, match=rf"images.label_column is '{column}'.*label, fine, text of its columns"):
            read(tmp_path, image_column="more", label_column=column)


def test_images_that_cannot_be_read_are_named_or_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    images, _ = stripes(12)
    broken = [{"bytes": png(image), "path": None} for image in images]
    broken[7] = {"bytes": b"not an image", "path": "seven.png"}
    rows(image=(datasets.Image(), broken)).save_to_disk(tmp_path / "broken")
    with pytest.raises(DataError, match=r"image 7 of .*broken \(train\) \(seven\.png\) cannot be read.*skip_corrupt"):
        read(tmp_path / "broken")
    corpus = read(tmp_path / "broken", skip_corrupt=True)
    assert len(corpus.train) + len(corpus.validation) == 11
    assert "left out 1 of 12" in caplog.text
    broken[7] = None
    rows(image=(datasets.Image(), broken)).save_to_disk(tmp_path / "missing")
    with pytest.raises(DataError, match=r"image 7 of .* is missing"):
        read(tmp_path / "missing")


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (lambda: {"train": rows().remove_columns("label")}, "no column of labels"),
        (lambda: {"train": rows().remove_columns("image")}, "no column of images; its columns are label"),
        (lambda: {"test": rows()}, "splits test, but it must have one called train"),
        (lambda: {"train": rows(label=(datasets.Value("int64"), [0, 1, -1] * 4))}, "row 2 .* has no label"),
        (lambda: {"train": rows(label=(datasets.Value("int64"), [0, None, -1] * 4))}, "row 1 .* has no label"),
        (lambda: {"train": rows(label=(datasets.Value("int64"), [0, 1, -7] * 4))}, "labels from -7 to 1"),
        (lambda: {"train": rows(), "test": rows(more=(datasets.Value("float32"), [0.0] * 12))}, "different columns"),
    ],
)
def test_datasets_that_cannot_be_used_are_refused(tmp_path: Path, split: Any, words: str) -> None:
    datasets.DatasetDict(**split()).save_to_disk(tmp_path)
    with pytest.raises(DataError, match=words):
        read(tmp_path)


def test_a_split_that_is_not_used_may_lack_labels(tmp_path: Path) -> None:
    unlabelled = rows(label=(datasets.ClassLabel(names=NAMES), [-1] * 12))
    datasets.DatasetDict(train=rows(), validation=rows(), test=unlabelled).save_to_disk(tmp_path)
    assert len(read(tmp_path).validation) == 12


@pytest.mark.parametrize("damage", [b"", b"PAR1 and nothing else"])
def test_damaged_files_are_refused_by_name(tmp_path: Path, damage: bytes) -> None:
    rows().save_to_disk(tmp_path / "saved")
    next((tmp_path / "saved").glob("*.arrow")).write_bytes(damage + b"ARROW1")
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "train-0.parquet").write_bytes(damage)
    for name in ("saved", "hub"):
        with pytest.raises(DataError, match=rf"{name} cannot be read as a Hugging Face dataset"):
            read(tmp_path / name)
    (tmp_path / "hub" / "train-0.parquet").rename(tmp_path / "hub" / "part-0.parquet")
    with pytest.raises(DataError, match=r"part-0.parquet names no split"):
        read(tmp_path / "hub")


def test_a_dataset_that_was_cut_or_changed_is_an_error_or_images(tmp_path: Path) -> None:
    """Cut anywhere it is refused, also between two batches; with any byte changed it neither crashes nor escapes."""
    rows().save_to_disk(tmp_path, num_shards=1)
    (file,) = tmp_path.glob("*.arrow")
    whole = file.read_bytes()
    for end in [*range(0, len(whole), 97), len(whole) - 8, len(whole) - 1]:
        file.write_bytes(whole[:end])
        with pytest.raises(DataError, match=r"arrow has been cut short; copy it again"):
            read(tmp_path)
    for place in range(0, len(whole), 41):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        with contextlib.suppress(DataError):
            assert read(tmp_path).train.images.dtype == np.uint8


def test_columns_of_what_is_no_dataset_are_refused(tmp_path: Path) -> None:
    images, labels = stripes(12)
    np.savez(tmp_path / "x.npz", images=images, labels=labels)
    with pytest.raises(ConfigError, match=r"images.label_column is 'label', but it must be left out"):
        read(tmp_path / "x.npz", label_column="label")
