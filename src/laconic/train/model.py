"""Builds a Hugging Face model from a `ModelConfig`, without a network unless asked; a causal one by `build_model`.

Three origins: a family name with sizes (random weights), a local directory with only a config.json (random weights),
and a local directory with weights in any form that from_pretrained loads. The log says which. Parameters are fp32 on
the CPU; every rank that calls with the same arguments gets the same bits. transformers is imported inside, because it
is an extra and slow to load.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from laconic.errors import ConfigError, ModelError, first_line
from laconic.train.config.dotted_names import nearest
from laconic.train.config.schema import ModelConfig
from laconic.train.model_source import check_path, find_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

# Names that transformers still takes for what its configurations now hold in rope_parameters.
_ROPE = ("rope_theta", "rope_scaling", "partial_rotary_factor")
# What families call the width of the feed-forward layer; transformers' attribute_map does not cover it.
_FEED_FORWARD_NAMES = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")


def build_model(
    config: ModelConfig, vocab_size: int, max_sequence_length: int, seed: int, eos_token_id: int | None = None
) -> PreTrainedModel:
    """Build the model `config` describes: parameters fp32, on the CPU, in training mode.

    Args:
        vocab_size, eos_token_id: from the tokenizer; they shape a model made from a family name, a directory keeps its
            own.
        max_sequence_length: tokens of the longest input the model must take.
        seed: decides the initial weights and leaves the caller's random state alone.

    Raises:
        ConfigError: the family, a field or the directory is not usable.
        ModelError: a directory's files cannot be read as a causal language model or lack weights.
    """
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError(f"training needs transformers ({error}): pip install 'laconic[train]'") from error
    if config.path is None:
        hf_config = sized_config(config, vocab_size, max_sequence_length, eos_token_id)
        return random_model(AutoModelForCausalLM, hf_config, seed, f"a {config.family} of model.family")
    check_path(config)
    hf_config = path_config(config)
    _check_experts(hf_config, f"model.path {config.path!r}")
    longest = getattr(hf_config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and max_sequence_length > longest:
        raise ConfigError(
            f"sequence_length is {max_sequence_length}, but model.path {config.path!r} takes at most {longest} tokens "
            "(max_position_embeddings in its config.json)"
        )
    return load_model(AutoModelForCausalLM, config, hf_config, seed)


def sized_config(
    config: ModelConfig, vocab_size: int, max_sequence_length: int, eos_token_id: int | None = None
) -> Any:
    """The configuration of a causal language model that `model.family` and its sizes describe; see `build_model`."""
    hf_config = family_config(config, _family_fields(config, vocab_size, max_sequence_length, eos_token_id))
    _check_family(hf_config, config)
    return hf_config


def family_config(config: ModelConfig, fields: Mapping[str, Any]) -> Any:
    """The configuration of `model.family` with `fields`, and `model.extra` over them."""
    from transformers import AutoConfig

    if "dtype" in config.extra:
        raise ConfigError(
            f"model.extra.dtype is {config.extra['dtype']!r}, but it must be left out: weights are made and trained in "
            "float32; precision says what is computed in"
        )
    try:
        hf_config = AutoConfig.for_model(config.family, **{**fields, **config.extra})
    except Exception as error:
        raise ConfigError(f"family {config.family!r} does not take these model fields: {error}") from error
    for name, value in config.extra.items():  # what is moved into rope_parameters is `_check_family`'s
        taken = getattr(hf_config, name, value)
        if isinstance(value, bool | int | float | str) and taken != value and value == value:
            raise ConfigError(
                f"model.extra.{name} is {value!r}, but family {config.family!r} makes it {taken!r}; leave it out, or "
                "set as well what it depends on"
            )
    return hf_config


def path_config(config: ModelConfig) -> Any:
    """The configuration in `model.path`."""
    from transformers import AutoConfig

    try:
        hf_config = AutoConfig.from_pretrained(
            str(config.path), local_files_only=not config.allow_download, trust_remote_code=False
        )
    except Exception as error:
        raise ModelError(f"model.path {config.path!r} has no config that transformers can read: {error}") from error
    check_config(hf_config, f"model.path {config.path!r}")
    return hf_config


def check_extra(config: ModelConfig, known: Collection[str]) -> None:
    """Refuse a field of `model.extra` that the family does not know."""
    for name in config.extra:
        if name not in known:
            raise ConfigError(
                f"model.extra has {name!r}, but family {config.family!r} has no such field{nearest(name, known)}"
            )


def check_config(hf_config: Any, origin: str) -> None:
    """Check that a configuration names no code on the hub, which transformers would fetch and run."""
    for part in (hf_config, hf_config.get_text_config()):
        chosen = getattr(part, "_attn_implementation", None)
        if isinstance(chosen, str) and "/" in chosen:
            raise ModelError(
                f"{origin} asks in config.json for the attention {chosen!r}, which is code on the Hugging Face hub; "
                "remove attn_implementation from config.json"
            )


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing bars for files while the block runs."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _family_fields(
    config: ModelConfig, vocab_size: int, max_sequence_length: int, eos_token_id: int | None
) -> dict[str, Any]:
    """The sizes of `[model]` under the names that the family's configuration has for them."""
    from transformers import CONFIG_MAPPING, AutoConfig
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    family = config.family
    if family not in CONFIG_MAPPING or family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(
            f"model.family is {family!r}, but it must be a causal language model known to the installed transformers"
            + nearest(family, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        )
    defaults = AutoConfig.for_model(family)
    known = set(defaults.to_dict()) | set(type(defaults).attribute_map)
    if family in MODEL_FOR_MASKED_LM_MAPPING_NAMES and "is_decoder" in known and not config.extra.get("is_decoder"):
        # Such a family attends in both directions by default, and would learn to copy the token it should predict.
        raise ConfigError(
            f"model.family is {family!r}, which attends in both directions; "
            "set is_decoder = true in model.extra to train it as a causal language model"
        )
    if "rope_parameters" in known:
        known |= set(_ROPE)
    check_extra(config, known)
    feed_forward = next((name for name in _FEED_FORWARD_NAMES if name in known), "intermediate_size")
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "max_position_embeddings": max_sequence_length,
        "tie_word_embeddings": config.tie_word_embeddings,
        feed_forward: config.intermediate_size,
    }
    absent = [name for name in fields if name not in known]
    if "num_key_value_heads" in known:
        fields["num_key_value_heads"] = config.num_key_value_heads or config.num_attention_heads
    elif config.num_key_value_heads not in (None, config.num_attention_heads):
        absent.append("num_key_value_heads")
    if absent:
        raise ConfigError(
            f"model.{absent[0]} cannot be set for family {family!r}, whose transformers config has no such field; "
            "write a config.json and give its directory as model.path"
        )
    _check_sizes_once(config, fields, feed_forward, type(defaults).attribute_map)
    if "head_dim" in known and "qk_rope_head_dim" not in known:
        # Some families fix it (Gemma2 at 256, Qwen3 at 128) whatever the width is. With latent attention it follows.
        fields["head_dim"] = config.hidden_size // config.num_attention_heads
    for usual, own in type(defaults).attribute_map.items():
        if own in config.extra:  # the same field by the family's name for it
            fields.pop(usual, None)
    # The families' own special tokens belong to their own tokenizers and may lie beyond this vocabulary.
    return fields | {"bos_token_id": None, "eos_token_id": eos_token_id, "pad_token_id": None}


def _check_sizes_once(
    config: ModelConfig, fields: Mapping[str, Any], feed_forward: str, aliases: Mapping[str, str]
) -> None:
    """Refuse a field of `model.extra`, by any of its names, that is another size than `[model]` says."""
    names = {family: usual for usual, family in aliases.items()} | {feed_forward: "intermediate_size"}
    for name, value in config.extra.items():
        size = names.get(name, name)
        given = fields.get(feed_forward if size == "intermediate_size" else size)
        if hasattr(config, size) and value != given:
            raise ConfigError(f"model.extra.{name} is {value!r}, but model.{size} makes it {given!r}; set only that")


def _check_family(hf_config: Any, config: ModelConfig) -> None:
    """Refuse a configuration that has not taken what `model.extra` says about rotary positions, or its experts."""
    for name in _ROPE:
        parameters = getattr(hf_config, "rope_parameters", None) or {}
        if name in config.extra and name != "rope_scaling" and config.extra[name] not in _entries(parameters, name):
            raise ConfigError(
                f"model.extra.{name} is {config.extra[name]!r}, but family {config.family!r} does not take it so; "
                f"set it in model.extra.rope_parameters, which is {parameters!r}"
            )
    _check_experts(hf_config, "model.extra")


def _entries(parameters: dict[str, Any], name: str) -> list[Any]:
    """The values of `name` in rope_parameters, which may be one table, or one for each kind of layer."""
    tables = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return [table[name] for table in tables if name in table]


def _check_experts(hf_config: Any, origin: str) -> None:
    """Check that a token takes no more experts than there are: transformers would fail in the forward."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next((number for name in names if (number := getattr(hf_config, name, None)) is not None), None)
    top_k = getattr(hf_config, "num_experts_per_tok", None)
    if num_experts is not None and top_k is not None and not 1 <= top_k <= num_experts:
        raise ConfigError(
            f"num_experts_per_tok of {origin} is {top_k}, but it must be from 1 to the number of experts, which is "
            f"{num_experts}; change one of them"
        )


def random_model(auto: Any, hf_config: Any, seed: int, origin: str) -> PreTrainedModel:
    """A model of transformers' class `auto` with weights by `seed`; the caller's random state stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model: PreTrainedModel = auto.from_config(hf_config, dtype=torch.float32, trust_remote_code=False)
        except Exception as error:
            raise ModelError(
                f"transformers cannot build a {hf_config.model_type} model: {first_line(error)[:300]}"
            ) from error
    logger.info("weights: initialized at random (seed %d), %s", seed, origin)
    return model.train()


def load_model(auto: Any, config: ModelConfig, hf_config: Any, seed: int) -> PreTrainedModel:
    """The model of class `auto` in `model.path`, or a random one where the directory holds no weights."""
    path = str(config.path)
    source, directory = path, Path(path)
    if directory.is_dir():
        file = find_weights(directory)
        if file is None:
            return random_model(auto, hf_config, seed, f"as model.path {path!r} holds none")
        source = str(directory / file)
    try:
        with no_progress_bars():
            loaded: Any = auto.from_pretrained(
                path,
                config=hf_config,
                dtype=torch.float32,
                weights_only=True,
                output_loading_info=True,
                local_files_only=not config.allow_download,
                trust_remote_code=False,
            )
    except Exception as error:
        raise ModelError(f"model.path {path!r} has weights that cannot be loaded: {error}") from error
    model, loading = loaded
    wanted = len({(tensor.data_ptr(), tensor.shape) for tensor in model.state_dict().values()})
    absent = sorted(str(key) for kind in ("missing_keys", "mismatched_keys") for key in loading[kind])
    unexpected = sorted(map(str, loading["unexpected_keys"]))
    said = f"loaded {wanted - len(absent)} of {wanted} tensors from {source}"
    if absent:
        raise ModelError(
            f"model.path {path!r} lacks {len(absent)} of the weights that its config.json asks for, "
            f"first {absent[0]!r}: {said}{_listed('not in the model: ', unexpected)}"
        )
    logger.info("weights: %s%s", said, _listed("left aside, not in the model: ", unexpected))
    pretrained: PreTrainedModel = model
    return pretrained.train()


def _listed(what: str, names: list[str]) -> str:
    """`; WHAT N tensors (names)`, or nothing without any."""
    if not names:
        return ""
    return f"; {what}{len(names)} ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"
