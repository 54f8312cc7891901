"""Classification of images: batches with flips and crops, cross entropy, accuracy; and the model for it.

Flips and crops are a function of the seed and of a sample's place in the run's order, so they depend neither on the
number of processes nor on where a run was resumed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.errors import ConfigError, DataError, ModelError
from laconic.train.config.dotted_names import nearest
from laconic.train.config.schema import ModelConfig, TrainConfig
from laconic.train.data.images import ImageCorpus, ImageSet
from laconic.train.data.sampler import sample_id, split_mix
from laconic.train.model import check_config, no_progress_bars
from laconic.train.model_source import find_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ImageBatch", "ImageClassification", "build_classifier", "check_batch_norm", "preprocessor_config"]

logger = logging.getLogger(__name__)

_LANGUAGE_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("tie_word_embeddings", "allow_download"),
)


class ImageBatch(NamedTuple):
    """Normalized pixels, fp32 [n, C, H, W], and classes, int64 [n]."""

    pixels: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> ImageBatch:
        """The batch on `device`."""
        return ImageBatch(self.pixels.to(device), self.labels.to(device))


class ImageClassification:
    """A `Task`; its batches are `ImageBatch`.

    Args:
        corpus: the images.
        config: of the run: seed, flips and crops.
    """

    def __init__(self, corpus: ImageCorpus, config: TrainConfig) -> None:
        self._corpus = corpus
        self._seed = config.seed
        self._flip = config.images.flip
        self._padding = config.images.crop_padding
        self._mean = torch.from_numpy(corpus.mean).view(1, -1, 1, 1)
        self._std = torch.from_numpy(corpus.std).view(1, -1, 1, 1)

    @property
    def num_validation(self) -> int:
        """Images held out."""
        return 0 if self._corpus.validation is None else len(self._corpus.validation)

    def training_batch(self, indices: range) -> ImageBatch:
        """Images at `indices` of the run's order, flipped and cropped at random."""
        train = self._corpus.train
        batch = self._batch(train, [sample_id(self._seed, index, len(train)) for index in indices])
        rows = [self._augmented(image, index) for image, index in zip(batch.pixels, indices, strict=True)]
        return ImageBatch(torch.stack(rows), batch.labels)

    def validation_batch(self, samples: Sequence[int]) -> ImageBatch:
        """Validation images, as they are."""
        assert self._corpus.validation is not None
        return self._batch(self._corpus.validation, samples)

    def loss(self, model: nn.Module, batch: ImageBatch) -> Tensor:
        """Mean cross entropy per image, nats."""
        return F.cross_entropy(model(pixel_values=batch.pixels).logits.float(), batch.labels)

    def evaluate(self, model: nn.Module, batch: ImageBatch) -> tuple[Tensor, Tensor]:
        """Mean cross entropy, and the number of images whose class has the largest logit."""
        logits = model(pixel_values=batch.pixels).logits.float()
        return F.cross_entropy(logits, batch.labels), (logits.argmax(1) == batch.labels).sum()

    def _batch(self, images: ImageSet, samples: Sequence[int]) -> ImageBatch:
        chosen = np.asarray(samples, np.int64)
        pixels = torch.from_numpy(images.images[chosen]).float() / 255
        return ImageBatch((pixels - self._mean) / self._std, torch.from_numpy(images.labels[chosen]))

    def _augmented(self, image: Tensor, index: int) -> Tensor:
        """`image`, fp32 [C, H, W], flipped or not, and cropped from itself with a black border."""
        bits = split_mix(split_mix(self._seed) ^ split_mix(~index & (1 << 64) - 1))
        if self._flip and bits & 1:
            image = image.flip(-1)
        if self._padding:
            height, width = image.shape[-2:]
            border, offsets = self._padding, 2 * self._padding + 1
            black = -self._mean[0] / self._std[0]
            padded = F.pad(image - black, (border,) * 4) + black
            top, left = (bits >> 1) % offsets, (bits >> 32) % offsets
            image = padded[:, top : top + height, left : left + width]
        return image


def build_classifier(config: ModelConfig, corpus: ImageCorpus, seed: int) -> PreTrainedModel:
    """Build a Hugging Face image classifier: parameters fp32, on the CPU, in training mode.

    Args:
        config: `path`, a directory as save_pretrained writes it, with or without weights; or `family` (resnet,
            afi_resnet, ...) with the fields of its configuration in `extra`.
        corpus: decides number and names of classes, and channels, of a model made from a family name.
        seed: of random weights.

    Raises:
        ConfigError: the family, a field or the directory is not usable.
        ModelError: a directory's files are not an image classifier's, or lack weights.
        DataError: the model has too few classes or other channels than the data.
    """
    try:
        from transformers import AutoConfig, AutoModelForImageClassification
        from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES

        import laconic.vision.resnet  # noqa: F401 - makes afi_resnet known
    except ImportError as error:
        raise ConfigError(f"training needs transformers ({error}): pip install 'laconic[train]'") from error
    defaults = ModelConfig()
    for name in _LANGUAGE_SIZES:
        if getattr(config, name) != getattr(defaults, name):
            raise ConfigError(
                f"model.{name} is {getattr(config, name)!r}, but it must be left out with task = image-classification; "
                "give fields of the family's configuration in model.extra"
            )
    channels = corpus.train.images.shape[1]
    source, weights = f"a {config.family} of model.family", None
    if config.path is None:
        families = {*MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, "afi_resnet"}
        if config.family not in families:
            raise ConfigError(
                f"model.family is {config.family!r}, but it must be an image classifier known to the installed "
                f"transformers, or afi_resnet{nearest(config.family, families)}"
            )
        known = AutoConfig.for_model(config.family).to_dict()
        if unknown := [name for name in config.extra if name not in known]:
            raise ConfigError(
                f"model.extra has {unknown[0]!r}, but family {config.family!r} has no such field"
                + nearest(unknown[0], known)
            )
        names = dict(enumerate(corpus.classes))
        fields: dict[str, Any] = {"id2label": names, "label2id": {name: label for label, name in names.items()}}
        for name, value in (("num_channels", channels), ("image_size", corpus.train.images.shape[2])):
            if name in known:
                fields[name] = value
        try:
            hf_config: Any = AutoConfig.for_model(config.family, **(fields | config.extra))
        except Exception as error:
            raise ConfigError(f"family {config.family!r} does not take these model fields: {error}") from error
    else:
        directory = Path(config.path)
        if not (directory / "config.json").is_file():
            raise ConfigError(f"model.path is {config.path!r}, but it must be a directory with a config.json")
        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        try:
            hf_config = AutoConfig.from_pretrained(config.path, **options)
        except Exception as error:
            raise ModelError(f"model.path {config.path!r} has no config that transformers can read: {error}") from error
        check_config(hf_config, f"model.path {config.path!r}")
        weights = find_weights(directory)
        source = f"as model.path {config.path!r} holds none"
    try:
        if weights is None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = AutoModelForImageClassification.from_config(
                    hf_config, dtype=torch.float32, trust_remote_code=False
                )
            logger.info("weights: initialized at random (seed %d), %s", seed, source)
        else:
            with no_progress_bars():
                model, loading = AutoModelForImageClassification.from_pretrained(
                    str(config.path), config=hf_config, dtype=torch.float32, output_loading_info=True, **options
                )
            if absent := sorted(str(key) for kind in ("missing_keys", "mismatched_keys") for key in loading[kind]):
                raise ModelError(
                    f"model.path {config.path!r} lacks {len(absent)} of the weights that its config.json asks for, "
                    f"first {absent[0]!r}"
                )
            logger.info("weights: loaded from %s", Path(str(config.path)) / weights)
    except ModelError:
        raise
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"transformers cannot build an image classifier of {hf_config.model_type}: {first[:300]}"
        ) from error
    _check_fit(model, corpus)
    built: PreTrainedModel = model
    return built.train()


def _check_fit(model: Any, corpus: ImageCorpus) -> None:
    """Check that `model` has a logit for every class and takes the data's channels and size.

    Raises:
        DataError: it does not.
    """
    num_classes, config = model.config.num_labels, model.config
    if num_classes < len(corpus.classes):
        raise DataError(
            f"the data has a label {len(corpus.classes) - 1}, but the model's classes end at {num_classes - 1}; "
            f"give the model num_labels of at least {len(corpus.classes)}"
        )
    channels, height, width = corpus.train.images.shape[1:]
    wanted = getattr(config, "num_channels", channels)
    if wanted != channels:
        mode = {1: "L", 3: "RGB"}.get(int(wanted or 0))
        remedy = f"set images.mode = {mode}" if mode else "use another model"
        raise DataError(f"the images have {channels} channels, but the model takes {wanted}; {remedy}")
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            model(pixel_values=torch.zeros(1, channels, height, width))
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"the model does not take images of {width} x {height} pixels: {first[:300]}; set images.size to another"
        ) from error
    finally:
        model.train(was_training)


def check_batch_norm(model: nn.Module, micro_batch_size: int) -> None:
    """Check that batch normalization has more than one image to normalize over.

    Raises:
        ConfigError: a micro-batch has one image and `model` normalizes over batches.
    """
    if micro_batch_size == 1 and any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        raise ConfigError(
            "batch_size gives one image per micro-batch, but the model has batch normalization and needs at least 2; "
            "raise batch_size or lower accumulation or nproc"
        )


def preprocessor_config(corpus: ImageCorpus) -> dict[str, Any]:
    """How images become a model's input, in the form of Hugging Face's preprocessor_config.json."""
    _, _, height, width = corpus.train.images.shape
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": height, "width": width},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [float(value) for value in corpus.mean],
        "image_std": [float(value) for value in corpus.std],
    }
