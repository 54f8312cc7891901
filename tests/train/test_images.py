"""Image classification in the trainer: data, augmentation, runs, resume, refusals."""

import gzip
import json
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image
import pytest
import torch

from laconic.errors import ConfigError, DataError, LaconicError
from laconic.train.checkpoint.export import export
from laconic.train.config.schema import DataConfig, ImagesConfig, ModelConfig, TrainConfig
from laconic.train.config.toml import load_config
from laconic.train.data.images import load_images
from laconic.train.distributed.parallel_state import ParallelState
from laconic.train.image_model import build_classifier
from laconic.train.launch.launcher import launch
from laconic.train.report.metrics import read_metrics
from laconic.train.report.run_reader import load_runs
from laconic.train.report.side_by_side import summary_rows
from laconic.train.tasks.image_classification import ImageClassification
from laconic.vision import AFIResNetConfig
from tests.train.runs import ALONE, exact_metrics, resumed, train_alone

_TINY: dict[str, Any] = {
    "task": "image-classification",
    "model.family": "afi_resnet",
    "model.extra.depths": [2],
    "model.extra.hidden_sizes": [8],
    "model.extra.embedding_size": 8,
    "model.extra.layer_type": "basic",
    "model.extra.small_inputs": True,
    "model.extra.reduction": 4,
    "optimizer.warmup_steps": 2,
    "optimizer.learning_rate": 2e-2,
    "steps": 6,
    "batch_size": 16,
    "eval_every": 3,
    "nproc": 1,
    "zip": "off",
    "images.flip": True,
    "images.crop_padding": 1,
}


def stripes(count: int, size: int = 8) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Images [N, size, size] of horizontal (0) or vertical (1) stripes in noise: a task that is learned in seconds."""
    rng = np.random.default_rng(0)
    labels = np.arange(count) % 2
    wave = np.where(np.arange(size) // 2 % 2, 180, 40)
    clean = np.where(labels[:, None, None] == 1, wave[None, None, :], wave[None, :, None])
    return (clean + rng.integers(0, 40, clean.shape)).astype(np.uint8), labels.astype(np.int64)


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    images, labels = stripes(160)
    np.savez(
        tmp_path / "data.npz", x_train=images[:128], y_train=labels[:128], x_test=images[128:], y_test=labels[128:]
    )
    return tmp_path / "data.npz"


def tiny(data: Path, run_dir: Path, changes: dict[str, Any] | None = None) -> TrainConfig:
    fixed = {"data.paths": (str(data),), "run_dir": str(run_dir)}
    return load_config(None, {**_TINY, **fixed, **(changes or {})})


def read(path: Path, **images: Any) -> Any:
    return load_images(DataConfig(paths=(str(path),), validation_fraction=0.25), ImagesConfig(**images))


def write_folder(folder: Path, count: int = 12, mode: str = "L") -> Path:
    images, labels = stripes(count)
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        target = folder / ("flat", "upright")[label]
        target.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(image).convert(mode).save(target / f"{index}.png")
    return folder


def idx(values: npt.NDArray[Any]) -> bytes:
    header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    return header + values.astype(np.uint8).tobytes()


def test_a_run_learns_and_reports_accuracy(npz: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_alone(tiny(npz, tmp_path / "run", {"steps": 30, "eval_every": 0})) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["validation_accuracy"] > 0.9  # chance is 0.5
    assert "accuracy" in capsys.readouterr().out
    row = read_metrics(tmp_path / "run")[0]
    assert row["images"] == 16
    assert "tokens_per_second" not in row
    labels = [row.label for row in summary_rows(load_runs([tmp_path / "run", tmp_path / "run"]))]
    assert {"validation accuracy", "images/s, median", "kept for backward per image"} <= set(labels)


def test_an_exported_model_gives_the_accuracy_of_its_run(npz: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForImageClassification

    config = tiny(npz, tmp_path / "run")
    train_alone(config)
    model = AutoModelForImageClassification.from_pretrained(export(tmp_path / "run", tmp_path / "out")).eval()
    assert json.loads((tmp_path / "out" / "preprocessor_config.json").read_text())["do_normalize"]
    task = ImageClassification(config, ALONE, ParallelState())
    with torch.no_grad():
        _, correct = task.evaluate(model, task.validation_batch(range(32)))
    assert correct / 32 == json.loads((tmp_path / "run" / "summary.json").read_text())["validation_accuracy"]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param(
            {"activations.mode": "hooks", "optimizer.kind": "adamw8bit", "gradients.bits": 8, "accumulation": 2},
            marks=pytest.mark.ci,
        ),
    ],
    ids=["exact gradients", "everything compressed"],
)
def test_a_resumed_run_is_equal_bit_for_bit(npz: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    through, cut = (tiny(npz, tmp_path / name, changes) for name in ("through", "cut"))
    train_alone(through)
    train_alone(cut, stop_after=2)
    assert len(exact_metrics(tmp_path / "cut")) < len(exact_metrics(tmp_path / "through"))
    train_alone(resumed(cut))
    assert exact_metrics(tmp_path / "cut") == exact_metrics(tmp_path / "through")


def test_all_layouts_hold_the_same_images(tmp_path: Path) -> None:
    images, labels = stripes(12)
    folder = write_folder(tmp_path / "folder")
    (tmp_path / "idx").mkdir()
    (tmp_path / "idx" / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
    (tmp_path / "idx" / "train-labels-idx1-ubyte").write_bytes(idx(labels))
    (tmp_path / "npy").mkdir()
    np.save(tmp_path / "npy" / "images.npy", images[..., None])
    np.save(tmp_path / "npy" / "labels.npy", labels)
    np.savez(tmp_path / "x.npz", images=images, labels=labels)
    corpora = [read(tmp_path / name) for name in ("idx", "npy", "x.npz")]
    assert len({corpus.fingerprint for corpus in corpora}) == 1
    by_folder = read(folder)
    assert by_folder.classes == ("flat", "upright")
    for corpus in (*corpora, by_folder):
        assert corpus.train.images.shape[1:] == (1, 8, 8)
        assert len(corpus.train) + len(corpus.validation) == 12
        vertical = (np.abs(np.diff(corpus.train.images.astype(int), axis=3)).mean((1, 2, 3)) > 40).astype(int)
        assert (vertical == corpus.train.labels).all()


def test_flips_and_crops_depend_on_the_place_in_the_order_alone(npz: Path, tmp_path: Path) -> None:
    config = tiny(npz, tmp_path / "run")
    task = ImageClassification(config, ALONE, ParallelState())
    whole = task.training_batch(range(64)).pixels
    assert torch.equal(whole[20:40], task.training_batch(range(20, 40)).pixels)
    unchanged = tiny(npz, tmp_path, {"images.flip": False, "images.crop_padding": 0})
    plain = ImageClassification(unchanged, ALONE, ParallelState()).training_batch(range(64)).pixels
    same = sum(torch.allclose(a, b, atol=1e-5) for a, b in zip(whole, plain, strict=True))
    flipped = sum(torch.allclose(a, b.flip(-1), atol=1e-5) for a, b in zip(whole, plain, strict=True))
    assert 0 < same + flipped < 32  # one crop of nine does not move
    inner = [(a[:, 2:-2, 2:-2], b) for a, b in zip(whole, plain, strict=True)]
    for cropped, original in inner:  # what is inside comes from the original, moved by at most one pixel
        views = [o[:, 2 + i : 6 + i, 2 + j : 6 + j] for o in (original, original.flip(-1)) for i in (-1, 0, 1)
                 for j in (-1, 0, 1)]  # fmt: skip
        assert any(torch.allclose(cropped, view, atol=1e-5) for view in views)


def test_files_that_are_no_images_are_named_or_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_folder(tmp_path / "folder")
    (folder / "flat" / "bad.png").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"bad\.png.*skip_corrupt"):
        read(folder)
    corpus = read(folder, skip_corrupt=True)
    assert len(corpus.train) + len(corpus.validation) == 12
    assert "left out 1 of 13" in caplog.text


@pytest.mark.parametrize(("dtype", "mode"), [(np.uint16, "I;16"), (np.int32, "I"), (np.float32, "F")])
def test_images_of_more_than_8_bits_are_not_cut(dtype: type, mode: str, tmp_path: Path) -> None:
    """16-bit X-rays became white all over, and values from 0 to 1 black."""
    folder = write_folder(tmp_path / "images")
    PIL.Image.fromarray(np.full((12, 12), 700, dtype)).save(next(folder.iterdir()) / "deep.tiff")
    for chosen in (None, "L", "RGB"):
        with pytest.raises(
            DataError, match=rf"deep\.tiff is an image of mode {mode}, whose values have more than 8 bits"
        ):
            read(folder, size=10, mode=chosen)


def test_images_of_other_sizes_and_modes_are_refused_or_converted(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder")
    PIL.Image.new("L", (9, 8)).save(folder / "upright" / "z.png")
    with pytest.raises(DataError, match=r"z\.png is 9 x 8 pixels of 1 channel, but .* 8 x 8"):
        read(folder)
    PIL.Image.new("P", (9, 8)).save(folder / "upright" / "z.png")
    with pytest.raises(DataError, match=r"z\.png is an image of mode P"):
        read(folder)
    assert read(folder, size=10, mode="RGB").train.images.shape[1:] == (3, 10, 10)


_LABELS = np.arange(12) % 2


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (_LABELS * 0, "one class only"),
        (_LABELS - 1, "label -1"),
        (_LABELS * 5000, "label 5000"),
        (np.where(_LABELS, np.uint64(2**63), np.uint64(0)), "label 9223"),
        (_LABELS[:11], "one integer for each of the 12"),
        (_LABELS.astype(float), "labels of float64"),
    ],
)
def test_labels_that_are_no_classes_are_refused(tmp_path: Path, labels: npt.NDArray[Any], words: str) -> None:
    np.savez(tmp_path / "x.npz", images=stripes(12)[0], labels=labels)
    with pytest.raises(DataError, match=words):
        read(tmp_path / "x.npz")


def test_a_class_without_training_images_is_refused(tmp_path: Path) -> None:
    images, labels = stripes(12)
    np.savez(tmp_path / "x.npz", x_train=images, y_train=labels, x_test=images, y_test=labels * 2)
    with pytest.raises(DataError, match="validation images of class '2', but no training images"):
        read(tmp_path / "x.npz")


@pytest.mark.parametrize(
    ("raw", "words"),
    [(b"\0\0\x08", "not an IDX"), (b"\0\0\x08\x01\0\0\0\x09ab", "2 values, but"), (b"\x1f\x8b", "read")],
)
def test_damaged_idx_files_are_named(tmp_path: Path, raw: bytes, words: str) -> None:
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(stripes(4)[0]))
    suffix = ".gz" if raw.startswith(b"\x1f") else ""
    (tmp_path / f"train-labels-idx1-ubyte{suffix}").write_bytes(raw)
    with pytest.raises(DataError, match=f"train-labels-idx1-ubyte.*{words}"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_size": 1}, "one image per micro-batch.*batch normalization"),
        ({"model.family": "llama"}, "model.family is 'llama'.*image classifier"),
        ({"model.hidden_size": 64}, "model.hidden_size.*left out"),
        ({"model.extra.depth": [2]}, "model.extra has 'depth'.*depths"),
        ({"model.extra.num_channels": 3}, "1 channels, but the model takes 3.*images.mode"),
        ({"images.size": 16}, "images.size.*left out for the arrays"),
        ({"parallel": "fsdp"}, "parallel is 'fsdp', but it must be ddp"),
        ({"moe.expert_parallel": 1}, "moe.expert_parallel is 1, .*left out"),
        ({"sequence_length": 32}, "sequence_length is 32"),
        ({"task": "language-modeling"}, "images.flip is .*task = image-classification"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(
    npz: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises((ConfigError, DataError), match=words) as caught:
        train_alone(tiny(npz, tmp_path / "run", changes))
    assert isinstance(caught.value, LaconicError)
    assert not (tmp_path / "run").exists()


def test_a_label_beyond_the_classes_of_a_saved_model_is_refused(tmp_path: Path) -> None:
    AFIResNetConfig(num_labels=2, num_channels=1, small_inputs=True).save_pretrained(tmp_path / "model")
    images, labels = stripes(12)
    np.savez(tmp_path / "x.npz", images=images, labels=labels + np.eye(12, dtype=np.int64)[3])
    with pytest.raises(DataError, match="label 2, but the model's classes end at 1"):
        build_classifier(ModelConfig(path=str(tmp_path / "model")), read(tmp_path / "x.npz"), 0)


def test_a_saved_model_gets_the_names_of_the_classes_and_knows_none_under_another_label(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images")
    sizes = {"num_channels": 1, "small_inputs": True, "depths": [2, 1, 1, 1]}
    for known, words in ((("oval", "square", "upright"), "'upright' has the label 1 in the data, but 2"), ((), None)):
        names = dict(enumerate(known or ("oval", "square", "round")))
        path = str(tmp_path / f"{len(known)}")
        AFIResNetConfig(id2label=names, label2id={name: i for i, name in names.items()}, **sizes).save_pretrained(path)
        if words is not None:
            with pytest.raises(DataError, match=words):
                build_classifier(ModelConfig(path=path), read(folder), 0)
            continue
        config = build_classifier(ModelConfig(path=path), read(folder), 0).config
        assert config.id2label == {0: "flat", 1: "upright", 2: "round"}
        assert config.label2id == {"flat": 0, "upright": 1, "round": 2}


@pytest.mark.slow
def test_two_processes_with_compressed_gradients_resume_bit_for_bit(npz: Path, tmp_path: Path) -> None:
    changes = {"nproc": 2, "gradients.bits": 8, "zip": "on", "optimizer.kind": "adamw8bit", "steps": 3}
    changes |= {"activations.mode": "hooks", "checkpoint.every": 2, "eval_every": 2}
    through, cut = (tiny(npz, tmp_path / name, changes) for name in ("through", "cut"))
    assert launch(through) == 0
    shutil.copytree(tmp_path / "through", tmp_path / "cut", ignore=shutil.ignore_patterns(".*lock*"))
    assert launch(replace(cut, resume=True, checkpoint=replace(cut.checkpoint, load=2))) == 0
    assert exact_metrics(tmp_path / "cut") == exact_metrics(tmp_path / "through")
    rows = read_metrics(tmp_path / "cut")
    assert rows[0]["wire_nbytes"] > 0
    assert rows[-1]["validation_accuracy"] == read_metrics(tmp_path / "through")[-1]["validation_accuracy"]
