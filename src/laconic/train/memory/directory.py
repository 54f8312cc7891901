"""A Hugging Face model of any kind from its directory, and batches made up for it, to be measured."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from laconic.errors import ConfigError, ModelError, PlanError
from laconic.json_text import parse_json
from laconic.train.config.dotted_names import nearest
from laconic.train.model import check_config, no_progress_bars
from laconic.train.model_source import find_weights, how_to_get_a_model

_IMAGE_SIZE = 224
"""Of models whose configuration names none, as convolutional networks."""


def load_any(path: str, dtype: torch.dtype) -> nn.Module:
    """The model that config.json names under `architectures`, with the directory's weights, or random ones without.

    Raises:
        ConfigError: `path` is no directory with a config.json.
        ModelError: transformers has no such class or cannot build or load it.
    """
    directory = Path(path)
    config = _config_of(path)
    name = next(iter(config.architectures or ()), None)
    kind = _class_of(path, config)
    try:
        with torch.random.fork_rng(devices=[]), no_progress_bars():
            torch.manual_seed(0)
            if find_weights(directory) is None:
                model: nn.Module = kind(config)
            else:
                model = kind.from_pretrained(
                    path, config=config, local_files_only=True, weights_only=True, trust_remote_code=False
                )
    except (ConfigError, ModelError):
        raise
    except Exception as error:
        raise ModelError(f"model {path!r} cannot be built as {name}: {error}") from error
    return nn.Module.to(model, dtype)


def build_meta(source: Any) -> nn.Module:
    """A model on the meta device, without weights, of the class that its configuration names under `architectures`.

    One that names none is built as it is trained.

    Args:
        source: directory with a config.json, or a file like it; a configuration of transformers; or a model like it.

    Raises:
        ConfigError, ModelError: see `load_any`.
    """
    what = source
    if isinstance(source, str):
        config = _config_of(source)
    else:
        given: Any = source.config if isinstance(source, nn.Module) else source
        config = copy.deepcopy(given)
        what = config.model_type
    if not config.architectures and not isinstance(source, nn.Module):
        config.architectures = [_trained_class(what, str(config.model_type))]
    kind = type(source) if isinstance(source, nn.Module) else _class_of(what, config)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            model: nn.Module = kind(config)
    except Exception as error:
        raise ModelError(f"model {what!r} cannot be built as {kind.__name__}: {error}") from error
    return model.train()


def config_as(path: str, family: str) -> Any:
    """The configuration in a directory, read as one of another family; of a model with towers its language model."""
    from transformers import CONFIG_MAPPING

    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        fields = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model is {path!r}, but it must be a directory with a config.json: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{path!r} holds a {type(fields).__name__}, but a model's configuration is a JSON object")
    if family not in CONFIG_MAPPING:
        raise ConfigError(
            f"family is {family!r}, but transformers has no such model_type{nearest(family, CONFIG_MAPPING)}"
        )
    inner = fields.get("text_config")
    if isinstance(inner, dict) and inner.get("model_type") == family:
        fields = inner
    given = fields.get("model_type")
    if given != family and str(given) in CONFIG_MAPPING:
        raise ConfigError(
            f"family is {family!r}, but the configuration is one of {given!r}, which is known; leave it out"
        )
    kind = CONFIG_MAPPING[family]
    known = {*kind().to_dict(), *kind.attribute_map, "rope_theta", "rope_scaling"}
    # Null, false, zero and empty switch something off; one is a factor, or one of something.
    off: tuple[Any, ...] = (None, False, 0, 1, [], {}, "")
    foreign = {name: x for name, x in fields.items() if name not in known and x not in off and name != "auto_map"}
    if foreign:
        shown = ", ".join(f"{name} = {value!r}" for name, value in list(foreign.items())[:6])
        raise ConfigError(f"family is {family!r}, but {path!r} has {shown}, which models of {family} do not have")
    known -= {"model_type", "architectures"}
    return kind(**{name: value for name, value in fields.items() if name in known})


def _config_of(path: str) -> Any:
    import transformers

    if not Path(path).is_file() and not (Path(path) / "config.json").is_file():
        remedy = how_to_get_a_model(Path(path))
        raise ConfigError(f"model is {path!r}, but it must be a directory with a config.json; {remedy}")
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"model {path!r} has no config that transformers can read: {error}") from error
    check_config(config, f"model {path!r}")
    return config


def _class_of(path: str, config: Any) -> Any:
    import transformers

    name = next(iter(config.architectures or ()), None)
    kind = getattr(transformers, str(name), None)
    if kind is None:
        raise ModelError(
            f"model {path!r} names {name!r} under architectures in its config.json, which transformers does not have;"
            " name the class that is trained there, such as ViTForImageClassification"
        )
    return kind


def _trained_class(path: str, family: str) -> str:
    from transformers.models.auto import modeling_auto

    for task in ("SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM", "IMAGE_CLASSIFICATION"):
        found = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").get(family)
        if found is not None:
            return str(found if isinstance(found, str) else found[0])
    raise ModelError(
        f"model {path!r} names no class under architectures in its config.json, and model_type {family!r} has none that"
        " laconic would train; name the class that is trained there, such as ViTForImageClassification"
    )


def usual_loss(output: Any) -> Tensor:
    """The `loss` of what a model returns, or the mean square of its first floating-point tensor."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    values = (
        output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else [output]
    )
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.float().square().mean()
    raise PlanError(f"the model returns a {type(output).__name__} without a loss or tensor; pass loss_of=")


def _check_unused(name: str, value: int | None, model: nn.Module, takes: str) -> None:
    if value is not None:
        raise PlanError(f"{name} is {value}, but {type(model).__name__} takes {takes}; leave it out")


def made_up_batches(
    model: nn.Module, sequence_length: int | None = None, image_size: int | None = None, *, usual_length: int = 4096
) -> Callable[[int], Mapping[str, Any]]:
    """Random images or tokens with labels that the model's forward takes: keyword arguments for so many samples.

    Args:
        sequence_length: tokens of a sample of text; None takes `usual_length`.
        image_size: pixels of a side; None takes the configuration's, or 224.
    """
    config: Any = model.config
    accepted = set(inspect.signature(type(model).forward).parameters)
    device, dtype = next((p.device, p.dtype) for p in model.parameters())
    if "pixel_values" in accepted and "input_ids" not in accepted:
        _check_unused("sequence_length", sequence_length, model, "images")
        found = image_size or getattr(config, "image_size", None) or _IMAGE_SIZE
        height, width = found if isinstance(found, list | tuple) else (found, found)
        channels = getattr(config, "num_channels", 3)

        def data(samples: int, generator: torch.Generator) -> dict[str, Any]:
            return {
                "pixel_values": torch.randn(
                    samples, channels, height, width, generator=generator, dtype=torch.float32, device="cpu"
                ).to(dtype)
            }

        shape = tuple[int, ...]((height, width))
    elif "input_ids" in accepted and "pixel_values" not in accepted:
        _check_unused("image_size", image_size, model, "tokens")
        vocab, length = (
            config.get_text_config().vocab_size,
            usual_length if sequence_length is None else sequence_length,
        )

        def data(samples: int, generator: torch.Generator) -> dict[str, Any]:
            ids = torch.randint(min(8, vocab - 1), vocab, (samples, length), generator=generator, device="cpu")
            return {"input_ids": ids} | ({"use_cache": False} if "use_cache" in accepted else {})

        shape = (length,)
    else:
        raise PlanError(
            f"{type(model).__name__} takes neither images nor tokens alone, so its batches cannot be made up; plan"
            " it in Python with laconic.train.memory.trace.trace_model(model, inputs, ...)"
        )
    num_labels = max(2, int(getattr(config, "num_labels", 2) or 2))

    def labels(kind: str, given: Mapping[str, Any], samples: int, generator: torch.Generator) -> Tensor | None:
        if kind == "tokens":
            ids: Tensor = given["input_ids"]
            return ids
        classes = {"classes": (samples,), "class of each token": (samples, *shape), "none": None}[kind]
        return None if classes is None else torch.randint(num_labels, classes, generator=generator, device="cpu")

    def make(kind: str, samples: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(samples)
        given = data(samples, generator)
        target = labels(kind, given, samples, generator) if "labels" in accepted else None
        given |= {} if target is None else {"labels": target}
        return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in given.items()}

    kinds = ("tokens", "classes", "class of each token", "none") if "input_ids" in accepted else ("classes", "none")
    reasons = []
    for kind in kinds if "labels" in accepted else ("none",):
        try:
            with torch.no_grad():
                model(**make(kind, 2))
        except (DataDependentOutputException, DynamicOutputShapeException):  # whatever the batch
            raise
        except Exception as error:  # a model may refuse for any reason
            reasons.append(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
            continue
        return lambda samples, kind=kind: make(kind, samples)  # type: ignore[misc]
    raise PlanError(
        f"{type(model).__name__} runs on no batch that was made up ({reasons[0]}); plan it in Python"
        " with laconic.train.memory.trace.trace_model(model, inputs, ...)"
    )
