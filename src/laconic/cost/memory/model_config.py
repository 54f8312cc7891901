"""Reads sizes from a Hugging Face configuration, and refuses what the planner cannot account for.

It answers two questions: which sizes a model has, with its family's defaults for absent fields, and whether any field
changes bytes that nothing here predicts. Such a field is always refused: a silently wrong prediction is worse than
none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from laconic.cost.memory.families import FAMILIES, Family
from laconic.errors import PlanError

__all__ = ["NoFormulaError", "sizes_of"]

_ACTIVATIONS = ("silu", "swish", "gelu", "gelu_pytorch_tanh")
"""Activations of which autograd keeps the input; others keep more, or something else."""

_LOGITS = "final_logit_softcapping"
_ATTENTION = ("full_attention", "sliding_attention")


class NoFormulaError(PlanError):
    """A model, or a setting of it, whose bytes no formula gives; a trace may."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_WITHOUT_BYTES = _words("""
    architectures auto_map bos_token_id chunk_size_feed_forward classifier_dropout dtype eos_token_id finetuning_task
    id2label initializer_range is_decoder is_encoder_decoder label2id max_position_embeddings model_type
    original_max_position_embeddings output_attentions output_hidden_states pad_token_id pretraining_tp problem_type
    query_pre_attn_scalar return_dict rms_norm_eps rope_interleaved rope_scaling rope_theta sep_token_id tokenizer_class
    torch_dtype transformers_version use_cache
""")
"""Fields that change no bytes, whatever they say."""

_SIZES = _words("""
    head_dim hidden_act hidden_activation hidden_size intermediate_size num_attention_heads num_hidden_layers
    num_key_value_heads partial_rotary_factor rope_parameters tie_word_embeddings vocab_size
""")
_WINDOWS = _words("sliding_window use_sliding_window max_window_layers layer_types")
_OF_FAMILIES = {
    "gemma3_text": _words("sliding_window_pattern"),
    "granite": _words("attention_multiplier embedding_multiplier logits_scaling residual_multiplier"),
    "smollm3": _words("no_rope_layers no_rope_layer_interval"),
    "stablelm": _words("layer_norm_eps use_parallel_residual"),
    "gpt_neox": _words("layer_norm_eps use_parallel_residual rotary_pct rotary_emb_base"),
    "mixtral": _words("num_local_experts num_experts_per_tok router_aux_loss_coef"),
}


def _fields_of(family: str) -> frozenset[str]:
    """Fields of a configuration that mean for this family what they mean here."""
    traits = FAMILIES[family]
    biases = {of for of in (traits.qkv_bias, traits.output_bias, traits.mlp_bias) if isinstance(of, str)}
    windows = _WINDOWS if traits.window != "none" else frozenset()
    return _WITHOUT_BYTES | _SIZES | windows | biases | set(traits.softcaps) | _OF_FAMILIES.get(family, frozenset())


def sizes_of(config: Mapping[str, Any], family: str | None = None) -> dict[str, Any]:
    """Arguments of `ModelShape` for a configuration; see `ModelShape.from_config`."""
    config, family = _text_model(config, family)
    traits = FAMILIES[family]

    def value(name: str, otherwise: Any = None) -> Any:
        return config.get(name, traits.defaults.get(name, otherwise))

    def size(name: str, optional: bool = False) -> int | None:
        given = value(name)
        if optional and given is None:
            return None
        if not isinstance(given, int) or isinstance(given, bool):
            raise PlanError(f"{name} is {given!r} in the model's configuration, but it must be an integer")
        return given

    def required(name: str) -> int:
        found = size(name)
        assert found is not None
        return found

    _refuse_what_is_not_predicted(config, family)
    hidden, heads, layers = required("hidden_size"), required("num_attention_heads"), required("num_hidden_layers")
    kv_heads = heads if family == "gpt_neox" else size("num_key_value_heads", optional=True) or heads
    head_dim = hidden // max(1, heads)
    if traits.norm != "layer":  # those families do not read it
        head_dim = size("head_dim", optional=True) or head_dim
    windowed = traits.window != "none" and value("use_sliding_window", True)
    window = size("sliding_window", optional=True) if windowed else None
    capped = {name: name in traits.softcaps and bool(value(name)) for name in ("attn_logit_softcapping", _LOGITS)}
    biases = {
        name: bool(value(of)) if isinstance(of := getattr(traits, name), str) else of
        for name in ("qkv_bias", "output_bias", "mlp_bias")
    }
    return {
        "family": family,
        "hidden_size": hidden,
        "intermediate_size": required("intermediate_size"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": required("vocab_size"),
        "tied": bool(value("tie_word_embeddings", False)),
        "sliding_window": window,
        "full_layers": () if window is None or traits.window == "all" else _full_layers(family, value, layers),
        "softcap": capped["attn_logit_softcapping"],
        "logit_softcap": capped[_LOGITS],
        "rotary_size": int(head_dim * _rotary_share(config, traits)),
        **biases,
        "exact_gelu": _activation(config, traits) == "gelu",
        "parallel": bool(value("use_parallel_residual", False)),
        "num_experts": required("num_local_experts") if traits.experts else 0,
        "experts_per_token": size("num_experts_per_tok", optional=True) or 2 if traits.experts else 0,
    }


def _text_model(config: Mapping[str, Any], family: str | None) -> tuple[Mapping[str, Any], str]:
    """The configuration that is meant, and its family."""
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        # Beside the language model such a model has towers for pictures or sound.
        if family is None or family != inner.get("model_type"):
            raise NoFormulaError(
                f"model_type is {config.get('model_type')!r}, a model with a text_config, of which the planner knows "
                f"the language model at most; to plan that alone, give --family {inner.get('model_type')}"
            )
        config = inner
    given = config.get("model_type")
    known = f"the planner knows {', '.join(FAMILIES)}"
    if family is None:
        if given is None:
            raise PlanError(f"model_type is missing in the model's configuration; {known}; name one with --family")
        family = str(given)
        if family not in FAMILIES:
            raise NoFormulaError(
                f"model_type is {family!r}, but {known} by formulas; laconic plan MODEL reads the bytes of others off a"
                " step without numbers"
            )
        return config, family
    if family not in FAMILIES:
        raise PlanError(f"family is {family!r}, but {known}")
    if given not in (None, family):
        if given in FAMILIES:
            raise PlanError(
                f"family is {family!r}, but the configuration is one of {given!r}, which the planner knows; "
                f"leave --family out"
            )
        _refuse_another_structure(config, family)
    return config, family


def _refuse_another_structure(config: Mapping[str, Any], family: str) -> None:
    """Refuse a configuration of another family with fields that `family` does not have.

    Raises:
        PlanError: it has such a field.
    """
    own = _fields_of(family)
    # Null, false, zero and empty switch something off; one is a factor, or one of something. Dropout is judged below.
    foreign = {
        name: value
        for name, value in config.items()
        if name not in own and value not in (None, False, 0, 1, [], {}, "") and name[0] != "_" and "drop" not in name
    }
    norm = "layer_norm_eps" if FAMILIES[family].norm == "layer" else "rms_norm_eps"
    if norm not in config:
        foreign = {f"no {norm}": "", **foreign}
    if foreign:
        shown = ", ".join(f"{name} = {value!r}" if value != "" else name for name, value in list(foreign.items())[:6])
        raise PlanError(
            f"family is {family!r}, but model_type is {config['model_type']!r} and its configuration has {shown}, "
            f"which layers of {family} do not have; plan a family that the planner knows ({', '.join(FAMILIES)})"
        )


def _activation(config: Mapping[str, Any], traits: Family) -> Any:
    """The name of the feed-forward block's activation."""
    return config.get("hidden_activation") or config.get("hidden_act") or traits.defaults.get("hidden_act", "silu")


def _refuse_what_is_not_predicted(config: Mapping[str, Any], family: str) -> None:
    """Refuse settings of a known family that change bytes in ways that nothing here accounts for.

    Raises:
        PlanError: there is such a setting.
    """
    traits = FAMILIES[family]
    activation = _activation(config, traits)
    reasons = [
        ("hidden_act", activation not in _ACTIVATIONS, f"it must be one of {', '.join(_ACTIVATIONS)}"),
        ("quantization_config", config.get("quantization_config"), "weights must be unquantized"),
        ("qk_layernorm", config.get("qk_layernorm"), "norms of single heads are not predicted"),
        ("output_router_logits", config.get("output_router_logits"), "a loss of the routers is not predicted"),
        ("router_jitter_noise", config.get("router_jitter_noise"), "what noise keeps is not predicted"),
        ("use_bidirectional_attention", config.get("use_bidirectional_attention"), "attention must be causal"),
        ("is_encoder_decoder", config.get("is_encoder_decoder"), "the planner knows decoders"),
    ]
    reasons += [
        (name, config[name], "what dropout keeps is not predicted; plan without it, for a lower bound")
        for name in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "residual_dropout")
        if name in config
    ]
    for name, is_wrong, why in reasons:
        if is_wrong:
            shown = activation if name == "hidden_act" else config.get(name)
            raise NoFormulaError(f"{name} is {shown!r} in the model's configuration, but {why}")


def _rotary_share(config: Mapping[str, Any], traits: Family) -> float:
    """The share of a head's features that is rotated."""
    nested = [config.get(name) for name in ("rope_parameters", "rope_scaling")]
    for table in (*(table for table in nested if isinstance(table, Mapping)), config):
        for name in ("partial_rotary_factor", "rotary_pct"):
            if isinstance(table.get(name), int | float):
                return float(table[name])
    return traits.rotary_share


def _full_layers(family: str, value: Any, num_layers: int) -> tuple[int, ...]:
    """Layers whose attention has no window, though others have one.

    Raises:
        PlanError: a kind of layer is not known.
    """
    kinds = value("layer_types")
    if kinds is not None:
        strange = sorted(set(kinds) - set(_ATTENTION))
        if strange or len(kinds) < num_layers:
            raise PlanError(
                f"layer_types has {len(kinds)} entries and names {', '.join(strange) or 'known kinds'}, but it must "
                f"name {' or '.join(_ATTENTION)} for each of {num_layers} layers"
            )
        return tuple(layer for layer in range(num_layers) if kinds[layer] == "full_attention")
    if family == "gemma3_text":
        pattern = int(value("sliding_window_pattern"))
        return tuple(layer for layer in range(num_layers) if (layer + 1) % pattern == 0)
    if family == "gemma2":
        return tuple(range(1, num_layers, 2))
    if family in ("qwen2", "qwen3"):
        return tuple(range(min(num_layers, int(value("max_window_layers", 28)))))
    if family == "smollm3":
        rotated = value("no_rope_layers") or [
            (layer + 1) % value("no_rope_layer_interval", 4) for layer in range(num_layers)
        ]
        return tuple(layer for layer in range(num_layers) if rotated[layer])
    return ()
