"""Tiny models of every family that transformers can build, and inputs for them.

Families are listed by transformers' own auto classes. A configuration is its class's default with the sizes of `_SIZES`
wherever it has such a field, dropout switched on, and, for the few families that need more, the entries of `_ADJUSTED`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassFieldValidationError
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

KINDS = {
    "decoder": "Decoders and state-space models",
    "encoder": "Encoders",
    "encoder-decoder": "Encoder-decoders",
    "vision": "Vision",
    "audio": "Sound",
    "speech": "Sound to text",
}
"""Kinds of families, with titles of their tables."""

_TASKS = {
    "SEQ_TO_SEQ_CAUSAL_LM": "encoder-decoder",
    "MASKED_LM": "encoder",
    "CAUSAL_LM": "decoder",
    "IMAGE_CLASSIFICATION": "vision",
    "CTC": "audio",
    "AUDIO_CLASSIFICATION": "audio",
    "SPEECH_SEQ_2_SEQ": "speech",
}
"""The auto classes that list families; a family is of the kind of the first one."""

VOCABULARY, WIDTH, INSIDE, HEADS, LENGTH, LAYERS = 97, 64, 128, 4, 32, 2
MOST_PARAMETERS = 8_000_000


class NotBuiltError(Exception):
    """A family cannot be built or run small; says why."""


@dataclass(frozen=True)
class Family:
    """One `model_type` of transformers, with the class that is built of it."""

    name: str
    kind: str
    class_names: tuple[str, ...]


def families() -> list[Family]:
    """Every family of `_TASKS`, by kind and name."""
    found: dict[str, Family] = {}
    for task, kind in _TASKS.items():
        for name, classes in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            names = (classes,) if isinstance(classes, str) else tuple(classes)
            found.setdefault(name, Family(name, kind, names))
    kinds = list(KINDS)
    return sorted(found.values(), key=lambda family: (kinds.index(family.kind), family.name))


def _named(value: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


_SIZES: dict[str, Any] = {
    **_named(VOCABULARY, "vocab_size src_vocab_size tgt_vocab_size char_vocab_size t2u_vocab_size entity_vocab_size"),
    **_named(VOCABULARY, "vocab_size_per_layer_input pronunciation_vocab_size shape_vocab_size"),
    **_named(WIDTH, "hidden_size d_model n_embd dim emb_dim embedding_size embed_dim input_embedding_size"),
    **_named(
        WIDTH,
        "output_embedding_size entity_emb_size word_embed_proj_dim prediction_head_size hidden_size_per_layer_input",
    ),
    **_named(WIDTH, "encoder_hidden_size decoder_hidden_size d_latents linear_attn_hidden_size"),
    **_named(INSIDE, "intermediate_size encoder_ffn_dim decoder_ffn_dim ffn_dim d_ff d_inner dff dim_ff hidden_dim"),
    **_named(INSIDE, "ffn_hidden_size intermediate_size_mlp dense_intermediate_size shared_intermediate_size n_inner"),
    **_named(INSIDE, "speech_encoder_intermediate_size t2u_encoder_ffn_dim t2u_decoder_ffn_dim feed_forward_size"),
    **_named(
        48,
        "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size "
        "shared_experts_intermediate_size expert_ffn_hidden_size",
    ),
    **_named(
        LAYERS,
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
        "num_decoder_layers speech_encoder_layers t2u_encoder_layers t2u_decoder_layers encoder_num_hidden_layers "
        "decoder_num_hidden_layers num_blocks num_self_attends_per_block max_window_layers",
    ),
    **_named(
        HEADS,
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads "
        "num_encoder_attention_heads num_decoder_attention_heads speech_encoder_attention_heads "
        "t2u_encoder_attention_heads t2u_decoder_attention_heads encoder_num_attention_heads "
        "decoder_num_attention_heads num_self_attention_heads num_cross_attention_heads swa_num_attention_heads",
    ),
    **_named(2, "num_key_value_heads swa_num_key_value_heads encoder_num_key_value_heads decoder_num_key_value_heads"),
    **_named(16, "head_dim d_kv d_head dim_head swa_head_dim global_head_dim attention_head_size kv_channels"),
    **_named(4, "num_experts n_routed_experts num_local_experts moe_num_experts"),
    **_named(2, "num_experts_per_tok moe_topk moe_k"),
    **_named(1, "n_shared_experts num_shared_experts moe_num_shared_experts n_group topk_group first_k_dense_replace"),
    **_named(32, "q_lora_rank"),
    **_named(16, "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"),
    **_named(
        128,
        "max_position_embeddings n_positions n_ctx max_seq_len context_length max_source_positions "
        "max_target_positions max_encoder_position_embeddings max_decoder_position_embeddings max_sequence_length",
    ),
    **_named(16, "state_size mamba_d_state ssm_state_size mamba_chunk_size chunk_size"),
    **_named(16, "linear_head_dim linear_key_head_dim linear_value_head_dim mamba_head_dim index_head_dim"),
    **_named(2, "linear_num_key_heads index_n_heads mamba_n_groups n_groups num_groups"),
    **_named(4, "linear_num_heads linear_num_value_heads mamba_n_heads n_mamba_heads mamba_num_heads"),
    **_named(4, "cross_num_attention_heads cross_num_key_value_heads"),
    **_named(
        16,
        "cross_head_dim global_head_dim groups_width num_conv_pos_embeddings subsampling_conv_channels conv_channels",
    ),
    **_named(WIDTH, "cross_hidden_size attention_hidden_size audio_hidden_size stem_out_channels linear_hidden_size"),
    **_named(32, "image_size"),
    **_named(8, "patch_size"),
    "num_labels": 5,
}
"""Small sizes by the name of the field, for any configuration."""

DROPPED = 0.1
_DROPOUT = re.compile(r"(?!.*layerdrop).*(dropout|_pdrop|drop_path_rate)")

_LISTS: dict[str, Any] = {
    "depths": (2, 1, 1, 1, 1),
    "hidden_sizes": (32, 64, 64, 128, 128),
    "conv_dim": (32,) * 16,
    "neck_hidden_sizes": (16, 32, 32, 32, 32, 32, 64),
    "base_attn_unit_dims": (32, 32, 32),
    "stage_in_channels": (48, 32, 32, 32),
    "stage_mid_channels": (16, 16, 16, 16),
    "stage_out_channels": (32, 32, 32, 32),
    "stage_numb_of_layers": (1, 1, 1, 1),
    "num_block_repeats": (1,) * 7,
    "depth": (1, 1, 1),
    "image_size": (32, 32),
}
"""Small entries of lists, of which as many are taken as the default has."""

_WINDOWS = {"embed_dim": 32, "num_heads": (1, 2, 2, 4), "window_size": 4, "patch_size": 2, "image_size": 64}
_ALL_HEADS = {"num_key_value_heads": HEADS}
_ADJUSTED: dict[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {"max_length": 64, "num_mel_bins": 32},
    "big_bird": {"block_size": 4, "num_random_blocks": 1},
    "bigbird_pegasus": {"block_size": 4, "num_random_blocks": 1},
    "blt": {"encoder_hash_byte_group_vocab": VOCABULARY, "encoder_hash_byte_group_size": (3, 4)},
    "codegen": {"rotary_dim": 8},
    "convnext": {"image_size": 64},
    "convnextv2": {"image_size": 64},
    "cvt": {"embed_dim": (32, 64, 64), "num_heads": (1, 2, 4), "depth": (1, 2, 3), "drop_rate": (0.1,) * 3},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4, "attn_pdrop": DROPPED},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "diffllama": {"attention_dropout": 0.0},
    "donut-swin": _WINDOWS,
    "efficientnet": {"width_coefficient": 0.5, "depth_coefficient": 0.5, "hidden_dim": 640, "image_size": 64},
    "focalnet": {"embed_dim": 16, "patch_size": 4},
    "hgnet_v2": {"stage_out_channels": (32, 32, 32, 128)},
    "hiera": {"embed_dim": 16, "num_heads": (1, 2, 4, 4), "patch_stride": (4, 4), "image_size": (64, 64)},
    "dots3_note_text": _ALL_HEADS,
    "esmc": _ALL_HEADS,
    "flaubert": {"pad_index": 1, "n_langs": 1},
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma4_text": {"global_head_dim": 16},
    "gemma4_unified_text": {"global_head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 16},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "led": {"attention_window": 8, "max_encoder_position_embeddings": 128, "max_decoder_position_embeddings": 128},
    "levit": {"num_attention_heads": (2, 2, 2), "image_size": 128, "patch_size": 16},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "mobilevitv2": {"base_attn_unit_dims": (32, 64, 64), "image_size": 64, "patch_size": 2},
    "moonshine": {"encoder_num_key_value_heads": HEADS, "decoder_num_key_value_heads": HEADS},
    "pvt": {"num_attention_heads": (1, 2, 2, 4), "image_size": 64, "patch_size": 4},
    "pvt_v2": {"num_attention_heads": (1, 2, 2, 4), "image_size": 64},
    "reformer": {
        "axial_pos_shape": (4, 8),
        "axial_pos_embds_dim": (32, 32),
        "attn_layers": ("local", "lsh"),
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
    },
    "swin": _WINDOWS,
    "swinv2": _WINDOWS,
    "textnet": {"hidden_sizes": (32, 32, 32, 32, 32), "stem_out_channels": 32},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
"""What a family needs besides."""


def _tiny(config_class: Any, name: str) -> dict[str, Any]:
    """Keyword arguments of a small configuration of a class."""
    values: dict[str, Any] = {}
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    for field in fields.values():
        if isinstance(field.default, bool):
            continue
        if isinstance(field.default, list | tuple):
            if field.name in _LISTS:
                values[field.name] = _LISTS[field.name][: len(field.default)]
        elif field.name in _SIZES:
            values[field.name] = _SIZES[field.name]
        elif _DROPOUT.match(field.name) and isinstance(field.default, int | float):
            values[field.name] = DROPPED
        elif field.name.endswith("layerdrop"):
            values[field.name] = 0.0
    if "kv_lora_rank" in fields:
        values |= _ALL_HEADS
    values |= {key: value for key, value in _SPECIAL_TOKENS.items() if key in fields}
    inner_configs = [key for key in config_class.sub_configs or {} if key in fields]
    if inner_configs:
        default = config_class()
        for key in inner_configs:
            if (inner := getattr(default, key, None)) is not None:
                values[key] = _made(type(inner), inner.model_type)
    return values | _ADJUSTED.get(name, {})


_SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_REFUSED = re.compile(r"field '(\w+)'")


def _made(config_class: Any, name: str) -> Any:
    """A small configuration; a field that refuses a small value keeps its default."""
    values = _tiny(config_class, name)
    while True:
        try:
            return config_class(**values)
        except StrictDataclassFieldValidationError as error:
            refused = _REFUSED.search(str(error))
            if refused is None or values.pop(refused[1], None) is None:
                raise


def model_of(family: Family) -> nn.Module:
    """A small model with random weights, in training mode. Raises NotBuiltError."""
    try:
        config = _made(CONFIG_MAPPING[family.name], family.name)
    except Exception as error:  # whatever a configuration class raises is why there is none
        raise NotBuiltError(f"configuration: {short(error)}") from error
    errors = []
    for class_name in family.class_names:
        try:
            model_class = getattr(transformers, class_name)
            if config.get_text_config() is not config and model_class.config_class is type(config.get_text_config()):
                config = config.get_text_config()  # as AutoModelForCausalLM.from_config does
            with torch.device("meta"):
                size = sum(p.numel() for p in model_class(config).parameters())
        except Exception as error:
            errors.append(short(error))
            continue
        if size > MOST_PARAMETERS:
            raise NotBuiltError(f"{size / 1e6:.0f}M parameters with small sizes")
        break
    else:
        raise NotBuiltError(errors[0])
    torch.manual_seed(0)
    try:
        model: nn.Module = model_class(config)
    except Exception as error:
        raise NotBuiltError(short(error)) from error
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # fresh norms and biases are ones and zeros, which would hide mistakes
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.train()


def inputs_of(family: Family, model: nn.Module) -> dict[str, Any]:
    """Arguments of a training forward: a batch of two."""
    generator = torch.Generator().manual_seed(2)
    config: Any = model.config
    accepted = inspect.signature(type(model).forward).parameters
    ids = torch.randint(5, VOCABULARY, (2, LENGTH), generator=generator)
    main: str = model.main_input_name  # type: ignore[assignment]
    inputs: dict[str, Any] = {}
    if main == "pixel_values" and family.kind == "vision":
        size = getattr(config, "image_size", None) or 32
        height, width = size if isinstance(size, list | tuple) else (size, size)
        inputs[main] = torch.randn(2, getattr(config, "num_channels", 3), height, width, generator=generator)
        inputs["labels"] = torch.tensor([0, 1])
    elif main == "input_values":  # sound, or a spectrogram
        spectrogram = hasattr(config, "num_mel_bins") and hasattr(config, "frequency_stride")
        shape = (config.max_length, config.num_mel_bins) if spectrogram else (8000,)
        inputs[main] = torch.randn(2, *shape, generator=generator)
        inputs["labels"] = torch.tensor([0, 1]) if spectrogram else ids[:, :4]
    elif main == "input_features" and "input_ids" not in accepted:
        inner = getattr(config, "encoder_config", config)
        features = next((getattr(inner, key) for key in _FEATURES if hasattr(inner, key)), 80)
        length = 2 * config.max_source_positions if family.name == "whisper" else 4 * LENGTH
        shape = (features, length) if family.name == "whisper" else (length, features)
        inputs[main] = torch.randn(2, *shape, generator=generator)
        inputs["labels"] = ids[:, :4]
    else:
        inputs["input_ids"] = inputs["labels"] = ids
    if family.kind in ("encoder-decoder", "speech") and "decoder_input_ids" in accepted:
        inputs["labels"] = inputs["decoder_input_ids"] = ids[:, :16].flip(1).contiguous()
    inputs["use_cache"] = False
    return {key: value for key, value in inputs.items() if key in accepted} | _INPUTS.get(family.name, {})


_FEATURES = ("feature_projection_input_dim", "num_mel_bins", "input_feat_per_channel")
_INPUTS: dict[str, dict[str, Any]] = {}


def tensors_of(output: Any) -> Iterator[Tensor]:
    """Floating-point tensors of an output, in order."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_of(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from tensors_of(value)


def short(error: BaseException) -> str:
    """An error on one short line that can stand in a table."""
    text = " ".join(str(error).replace("|", "/").split())
    return f"{type(error).__name__}: {text if len(text) <= 110 else text[:107] + '...'}"
