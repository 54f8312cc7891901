"""Builds a Hugging Face image classifier from a `ModelConfig`, without a network, and checks that images fit it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from laconic.errors import ConfigError, DataError, first_line
from laconic.train.config.dotted_names import nearest
from laconic.train.config.schema import ModelConfig
from laconic.train.data.images import ImageCorpus
from laconic.train.model import check_extra, family_config, load_model, path_config, random_model
from laconic.train.model_source import check_path, how_to_get_a_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LANGUAGE_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("tie_word_embeddings", "allow_download"),
)


def build_classifier(config: ModelConfig, corpus: ImageCorpus, seed: int) -> PreTrainedModel:
    """Build a Hugging Face image classifier: parameters fp32, on the CPU, in training mode.

    Args:
        config: `path`, a directory as save_pretrained writes it, with or without weights; or `family` (resnet,
            afi_resnet, ...) with the fields of its configuration in `extra`.
        corpus: decides number and names of classes, and channels, of a model made from a family name.

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
    if config.path is None:
        families = {*MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, "afi_resnet"}
        if config.family not in families:
            raise ConfigError(
                f"model.family is {config.family!r}, but it must be an image classifier known to the installed "
                f"transformers, or afi_resnet{nearest(config.family, families)}"
            )
        known = AutoConfig.for_model(config.family).to_dict()
        check_extra(config, known)
        names = dict(enumerate(corpus.classes))
        fields: dict[str, Any] = {"id2label": names, "label2id": {name: label for label, name in names.items()}}
        _, channels, height, _ = corpus.train.images.shape
        fields |= {name: n for name, n in (("num_channels", channels), ("image_size", height)) if name in known}
        source = f"a {config.family} of model.family"
        model = random_model(AutoModelForImageClassification, family_config(config, fields), seed, source)
    elif (Path(config.path) / "config.json").is_file():
        check_path(config)
        model = load_model(AutoModelForImageClassification, config, path_config(config), seed)
    else:
        remedy = how_to_get_a_model(Path(config.path))
        raise ConfigError(f"model.path is {config.path!r}, but it must be a directory with a config.json; {remedy}")
    _check_fit(model, corpus)
    if config.path is not None:
        _name_classes(model.config, corpus, config.path)
    return model


def _name_classes(config: Any, corpus: ImageCorpus, path: str) -> None:
    """Give the labels of a saved model the names of the data's classes, by which an exported model answers."""
    names, known = dict(enumerate(corpus.classes)), {name: label for label, name in config.id2label.items()}
    if all(name == str(label) for label, name in names.items()):
        return  # of arrays, which name none
    for label, name in names.items():
        if (other := known.get(name, label)) != label:
            raise DataError(
                f"class {name!r} has the label {label} in the data, but {other} in the model of model.path {path!r}; "
                f"classes are numbered in the order of their names: number those of id2label in its config.json so"
            )
    config.id2label = {**config.id2label, **names}
    config.label2id = {name: label for label, name in config.id2label.items()}


def _check_fit(model: Any, corpus: ImageCorpus) -> None:
    """Check that `model` has a logit for every class and takes the data's channels and size."""
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
            model(pixel_values=torch.zeros(1, channels, height, width, dtype=torch.float32, device="cpu"))
    except Exception as error:
        raise DataError(
            f"the model does not take images of {width} x {height} pixels: {first_line(error)[:300]}; set images.size"
            " to another"
        ) from error
    finally:
        model.train(was_training)


def check_batch_norm(model: nn.Module, micro_batch_size: int) -> None:
    """Check that batch normalization has more than one image to normalize over."""
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
