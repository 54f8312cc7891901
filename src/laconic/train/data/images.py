"""From image files to arrays: folders of classes, Hugging Face datasets, IDX files and NumPy arrays, held in memory.

Every process reads the data and keeps all of it. An image set is uint8 [N, C, H, W]; images of one set have one size
and one mode, or the configuration says which.
"""

from __future__ import annotations

import gzip
import hashlib
import logging
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from laconic.errors import ConfigError, DataError
from laconic.train.config.schema import DataConfig, ImagesConfig
from laconic.train.data.image_datasets import is_dataset, read_splits
from laconic.train.data.sampler import split_mix

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
_VALIDATION_NAMES = ("validation", "valid", "val", "test")
_CHANNELS = (1, 3)
_SAMPLE_IMAGES = 10_000
_REMEDY = "set images.size and images.mode to convert all images alike"


@dataclass(frozen=True)
class ImageSet:
    """Images and their classes.

    Attributes:
        images: uint8 [N, C, H, W].
        labels: int64 [N].
    """

    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, chosen: npt.NDArray[np.bool_]) -> ImageSet:
        """The images where `chosen`, bool [N], is true."""
        return ImageSet(self.images[chosen], self.labels[chosen])


@dataclass(frozen=True)
class ImageCorpus:
    """Training and validation images of a run.

    Attributes:
        train, validation: without held-out images `validation` is None.
        classes: their names, by label.
        mean, std: of the training pixels in [0, 1] (of the first 10,000 images), fp32 [C].
        fingerprint: hex digest of all pixels and labels.
    """

    train: ImageSet
    validation: ImageSet | None
    classes: tuple[str, ...]
    mean: npt.NDArray[np.float32]
    std: npt.NDArray[np.float32]
    fingerprint: str


def load_images(data: DataConfig, images: ImagesConfig) -> ImageCorpus:
    """Read the images that `data.paths` names: one folder or one .npz file.

    A folder holds class folders of image files; or `train` and `validation` (valid, val, test) with class folders; or
    IDX files (train-images-idx3-ubyte, t10k-..., also .gz); or images.npy and labels.npy; or a dataset of the Hugging
    Face library. An .npz file holds x_train and y_train, x_test and y_test, or images and labels. Where there are no
    validation images, `validation_fraction` of them is held out.
    """
    if len(data.paths) != 1:
        raise ConfigError(
            f"data.paths is {list(data.paths)}, but it must be one folder or .npz file with task = image-classification"
        )
    path = Path(data.paths[0])
    train, validation, classes = _read(path, images)
    if not len(train):
        raise DataError(f"{path} holds no images")
    if classes is None:
        largest = max(int(part.labels.max(initial=-1)) for part in (train, validation) if part is not None)
        if largest >= len(train) + 1000:
            raise DataError(f"{path} has a label {largest}, but {len(train)} images; labels must count classes from 0")
        classes = tuple(map(str, range(largest + 1)))
    if validation is not None and validation.images.shape[1:] != train.images.shape[1:]:
        shapes = [_shape_text(part.images.shape[1:]) for part in (train, validation)]
        raise DataError(f"{path} has training images of {shapes[0]} and validation images of {shapes[1]}; {_REMEDY}")
    if len(np.unique(train.labels)) < 2:
        raise DataError(f"{path} has training images of one class only; a classifier needs at least 2")
    if validation is not None and (unseen := np.setdiff1d(validation.labels, train.labels)).size:
        raise DataError(
            f"{path} has validation images of class {classes[unseen[0]]!r}, but no training images of it; add some, or "
            "leave the class out"
        )
    sha = hashlib.sha256(repr((classes, data.validation_fraction)).encode())
    for part in (train, validation):
        if part is not None:
            sha.update(repr(part.images.shape).encode() + part.images.tobytes() + part.labels.tobytes())
    if validation is None:
        train, validation = _hold_out(train, data.validation_fraction, path)
    sample = train.images[:_SAMPLE_IMAGES].astype(np.float32) / 255
    mean, std = sample.mean((0, 2, 3)), sample.std((0, 2, 3))
    return ImageCorpus(train, validation, classes, mean, np.maximum(std, 1e-3), sha.hexdigest())


def _hold_out(images: ImageSet, fraction: float, path: Path) -> tuple[ImageSet, ImageSet | None]:
    if fraction == 0:
        return images, None
    held_out = np.array([split_mix(index) < fraction * 2**64 for index in range(len(images))])
    if len(np.unique(images.labels[~held_out])) < 2:
        raise DataError(
            f"data.validation_fraction is {fraction}, which leaves fewer than two classes of {path} for training; "
            "lower it (0: no validation)"
        )
    return images.take(~held_out), images.take(held_out) if held_out.any() else None


_Sets = tuple[ImageSet, ImageSet | None, tuple[str, ...] | None]


def _read(path: Path, config: ImagesConfig) -> _Sets:
    if path.is_dir():
        names = {entry.name for entry in path.iterdir()}
        if is_dataset(path):
            return _dataset(path, config)
        _no_columns(config, path)
        if any("-images-idx3-ubyte" in name or "-images.idx3-ubyte" in name for name in names):
            _only_arrays(config, path)
            return _idx_pair(path, "train"), _idx_pair(path, "t10k") if _idx_file(path, "t10k-images") else None, None
        if "images.npy" in names:
            _only_arrays(config, path)
            arrays = [_load_array(path / name) for name in ("images.npy", "labels.npy")]
            return _image_set(arrays[0], arrays[1], str(path)), None, None
        return _class_folders(path, config)
    if path.suffix == ".npz" and path.is_file():
        _only_arrays(config, path)
        return _npz(path)
    raise DataError(
        f"data.paths is {str(path)!r}, but it must be a folder of class folders, IDX files, images.npy and labels.npy "
        "or a Hugging Face dataset, or an .npz file"
    )


def _only_arrays(config: ImagesConfig, path: Path) -> None:
    """Refuse settings that convert image files: arrays are taken as they are."""
    _no_columns(config, path)
    for name in ("size", "mode", "skip_corrupt"):
        if getattr(config, name):
            raise ConfigError(
                f"images.{name} is {getattr(config, name)!r}, but it must be left out for the arrays in {path}, which "
                "are taken as they are"
            )


def _no_columns(config: ImagesConfig, path: Path) -> None:
    for name in ("image_column", "label_column"):
        if getattr(config, name) is not None:
            raise ConfigError(
                f"images.{name} is {getattr(config, name)!r}, but it must be left out for {path}, which is no Hugging"
                " Face dataset"
            )


def _dataset(path: Path, config: ImagesConfig) -> _Sets:
    splits, classes = read_splits(path, config, _VALIDATION_NAMES)
    shape: list[tuple[int, ...]] = []
    sets = [_decoded(rows.files(), rows.labels, rows.origin, config, shape) for rows in splits]
    return sets[0], sets[1] if len(sets) > 1 else None, classes


def _class_folders(path: Path, config: ImagesConfig) -> _Sets:
    """Read `path`/CLASS/*.png, or `path`/train/CLASS/*.png and `path`/validation/CLASS/*.png."""
    folders = sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    parts = [path]
    if "train" in folders:
        parts = [path / "train"]
        parts += [path / name for name in _VALIDATION_NAMES if name in folders][:1]
    classes = _subfolders(parts[0])
    if len(classes) < 2:
        raise DataError(
            f"{parts[0]} has {len(classes)} class folders, but a classifier needs at least 2; images of a class lie in "
            "a folder with its name"
        )
    for part in parts[1:]:
        if unknown := sorted(set(_subfolders(part)) - set(classes)):
            raise DataError(f"{part} has the class {unknown[0]!r}, which {parts[0]} has not")
    shape: list[tuple[int, ...]] = []
    sets = [_read_files(part, classes, config, shape) for part in parts]
    return sets[0], sets[1] if len(sets) > 1 else None, tuple(classes)


def _subfolders(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _read_files(part: Path, classes: list[str], config: ImagesConfig, shape: list[tuple[int, ...]]) -> ImageSet:
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = sorted(file for file in (part / name).rglob("*") if file.suffix.lower() in _SUFFIXES)
        if not found:
            raise DataError(f"{part / name} holds no images ({', '.join(sorted(_SUFFIXES))})")
        files += found
        labels += [label] * len(found)
    return _decoded(((str(file), file) for file in files), np.array(labels, np.int64), str(part), config, shape)


def _decoded(
    files: Iterable[tuple[str, Path | BinaryIO]],
    labels: npt.NDArray[np.int64],
    origin: str,
    config: ImagesConfig,
    shape: list[tuple[int, ...]],
) -> ImageSet:
    """Decode images, each with its name; the first of all sets decides `shape`, which is filled with it."""
    try:
        import PIL.Image
    except ImportError:
        raise ConfigError("image files need Pillow: pip install 'laconic[vision]'") from None
    images: list[npt.NDArray[np.uint8]] = []
    skipped: list[str] = []
    is_there = np.ones(len(labels), np.bool_)
    for number, (name, file) in enumerate(files):
        try:
            with PIL.Image.open(file) as opened:
                pixels = _pixels(opened, config, name)
        except (OSError, SyntaxError, ValueError, EOFError, PIL.Image.DecompressionBombError) as error:
            if isinstance(error, DataError):
                raise
            if not config.skip_corrupt:
                raise DataError(
                    f"{name} cannot be read as an image: {error}; mend it, or set images.skip_corrupt to leave such "
                    "files out"
                ) from None
            skipped.append(name)
            is_there[number] = False
            continue
        shape[:] = shape or [pixels.shape]
        if pixels.shape != shape[0]:
            raise DataError(
                f"{name} is {_shape_text(pixels.shape)}, but the images before it are {_shape_text(shape[0])}; "
                + _REMEDY
            )
        images.append(pixels)
    if skipped:
        logger.warning("left out %d of %d images that cannot be read, first %s", len(skipped), len(labels), skipped[0])
    if not images:
        why = f"none of the {len(skipped)} images in {origin} can be read, first {skipped[0]}" if skipped else None
        raise DataError(why or f"{origin} holds no images")
    return ImageSet(np.stack(images), labels[is_there])


def _pixels(image: Image, config: ImagesConfig, name: str) -> npt.NDArray[np.uint8]:
    if image.mode in ("I", "F") or image.mode.startswith("I;"):  # Pillow's conversion would cut them at 255
        raise DataError(
            f"{name} is an image of mode {image.mode}, whose values have more than 8 bits; scale them to 0 to 255 and "
            "save it in 8 bits"
        )
    if config.mode is not None:
        image = image.convert(config.mode)
    elif image.mode not in ("L", "RGB"):
        raise DataError(f"{name} is an image of mode {image.mode}, but it must be L or RGB; set images.mode to convert")
    if config.size is not None:
        image = image.resize((config.size, config.size))
    pixels: npt.NDArray[np.uint8] = np.asarray(image, np.uint8)
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _npz(path: Path) -> _Sets:
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:  # whatever zipfile, zlib and NumPy raise for a damaged archive
        raise DataError(f"{path} cannot be read as an .npz file: {error}") from None
    for train, test in ((("x_train", "y_train"), ("x_test", "y_test")), (("images", "labels"), ())):
        if set(train) <= set(arrays):
            sets = [
                _image_set(*(arrays[name] for name in names), f"{path} ({names[0]})")  # type: ignore[call-arg]
                for names in (train, test)
                if names and set(names) <= set(arrays)
            ]
            return sets[0], sets[1] if len(sets) > 1 else None, None
    raise DataError(f"{path} holds {sorted(arrays)}, but it must hold x_train and y_train, or images and labels")


def _load_array(path: Path) -> npt.NDArray[Any]:
    try:
        array: npt.NDArray[Any] = np.load(path, allow_pickle=False)
    except Exception as error:  # whatever NumPy raises for a damaged file
        raise DataError(f"{path} cannot be read as a NumPy array: {error}") from None
    return array


def _idx_file(folder: Path, name: str) -> Path | None:
    for separator in "-.":
        for suffix in ("", ".gz"):
            for rank in (3, 1):
                path = folder / f"{name}{separator}idx{rank}-ubyte{suffix}"
                if path.is_file():
                    return path
    return None


def _idx_pair(folder: Path, part: str) -> ImageSet:
    paths = [_idx_file(folder, f"{part}-{name}") for name in ("images", "labels")]
    if None in paths:
        raise DataError(f"{folder} must hold both {part}-images-idx3-ubyte and {part}-labels-idx1-ubyte (or .gz)")
    images, labels = (_idx(path) for path in paths if path is not None)
    return _image_set(images, labels, str(paths[0]))


def _idx(path: Path) -> npt.NDArray[np.uint8]:
    """Read an IDX file: two zeros, the type (8: bytes), the rank, the sizes as big-endian int32, the values."""
    try:
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if len(raw) < 4 or raw[:3] != b"\0\0\x08" or len(raw) < 4 + 4 * raw[3]:
        raise DataError(f"{path} is not an IDX file of bytes")
    sizes = [int(size) for size in np.frombuffer(raw, ">u4", raw[3], offset=4)]
    values = np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3])
    if values.size != int(np.prod(sizes, dtype=object)):
        raise DataError(f"{path} is damaged: it holds {values.size} values, but its header says {sizes}")
    return values.reshape(sizes)


def _image_set(images: npt.NDArray[Any], labels: npt.NDArray[Any], origin: str) -> ImageSet:
    """Check arrays of images, uint8 [N, H, W], [N, H, W, C] or [N, C, H, W], and labels, [N] or [N, 1]."""
    if images.dtype != np.uint8:
        raise DataError(f"{origin} has images of {images.dtype}, but they must be uint8, 0 to 255")
    if images.ndim == 3:
        images = images[:, None]
    elif images.ndim == 4 and images.shape[1] not in _CHANNELS and images.shape[3] in _CHANNELS:
        images = images.transpose(0, 3, 1, 2)
    if images.ndim != 4 or images.shape[1] not in _CHANNELS or not images.size:
        raise DataError(
            f"{origin} has images of shape {list(images.shape)}, but it must be [N, H, W], [N, H, W, C] or "
            "[N, C, H, W] with 1 or 3 channels C"
        )
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or len(labels) != len(images):
        raise DataError(
            f"{origin} has labels of {labels.dtype}, shape {list(labels.shape)}, but they must be one integer for each "
            f"of the {len(images)} images"
        )
    for label in (labels.min(), labels.max()):
        if not 0 <= int(label) < 2**31:  # before the conversion below, in which a large one would wrap around
            raise DataError(f"{origin} has a label {label}, but labels must count classes from 0")
    return ImageSet(np.ascontiguousarray(images), labels.astype(np.int64))


def _shape_text(shape: tuple[int, ...]) -> str:
    channels, height, width = shape
    return f"{width} x {height} pixels of {channels} channel{'' if channels == 1 else 's'}"
