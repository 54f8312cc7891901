"""Model families: how their layers differ, and the defaults of fields that their configurations leave out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["FAMILIES", "Family", "Names"]


@dataclass(frozen=True)
class Names:
    """Module names of a family.

    Attributes:
        layers: the list of decoder layers.
        attention, qkv, output: in a layer, the attention module, and in that its projections.
        gate_up, down: in a layer, the linears that read the feed-forward block's input, and the one behind.
        final_norm, head: behind the layers.
    """

    layers: str = "model.layers"
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    output: str = "o_proj"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    final_norm: str = "model.norm"
    head: str = "lm_head"


@dataclass(frozen=True)
class Family:
    """How the layers of a model family differ from Llama's.

    Attributes:
        norm: "cast" rounds the normalized value to the model's dtype before the weight multiplies it (Llama), "wide"
            multiplies in fp32 (OLMo2), "offset" multiplies by 1 + weight in fp32 (Gemma), "layer" is torch's layer
            norm.
        input_norms: names of the norms in front of attention and feed-forward block.
        output_norms: names of norms behind the two blocks.
        qk_norm: whether queries and keys are normalized, per "head" or over the "full" projection.
        fused_qkv: whether q, k, v are one linear.
        gated: whether the feed-forward block has a gate.
        fused_gate: whether gate and up are one linear.
        attention_copies: whether the attention output is copied before its projection reads it.
        eager: attention materializes scores [heads, sequence, sequence].
        wide_rotary: rotary tables are fp32.
        layer_rotary: rotary tables differ between layers with a window and those without.
        experts: a router and fused experts replace the feed-forward block.
        parallel_norms: number of input norms where both blocks read the same residual stream.
        qkv_bias, output_bias, mlp_bias: the field of the configuration that says whether linears have biases, or a
            constant.
        rotary_share: default share of a head that is rotated.
        window: which layers can have a sliding window.
        softcaps: fields that cap attention scores or logits.
        defaults: meaning of absent fields, where that differs from Llama's.
        names: of modules.
    """

    norm: Literal["cast", "wide", "offset", "layer"] = "cast"
    input_norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    output_norms: tuple[str, ...] = ()
    qk_norm: Literal["head", "full"] | None = None
    fused_qkv: bool = False
    gated: bool = True
    fused_gate: bool = False
    attention_copies: bool = False
    eager: bool = False
    wide_rotary: bool = False
    layer_rotary: bool = False
    experts: bool = False
    parallel_norms: int | None = None
    qkv_bias: str | bool = False
    output_bias: str | bool = False
    mlp_bias: str | bool = False
    rotary_share: float = 1.0
    window: Literal["none", "all", "some"] = "none"
    softcaps: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    names: Names = Names()


_EVERY_BIAS: dict[str, Any] = {"qkv_bias": "attention_bias", "output_bias": "attention_bias"}
_FUSED = Names(qkv=("qkv_proj",), gate_up=("gate_up_proj",))
_NEOX = Names(
    layers="gpt_neox.layers",
    attention="attention",
    qkv=("query_key_value",),
    output="dense",
    gate_up=("dense_h_to_4h",),
    down="dense_4h_to_h",
    final_norm="gpt_neox.final_layer_norm",
)
_SANDWICH: dict[str, Any] = {
    "norm": "offset",
    "input_norms": ("input_layernorm", "pre_feedforward_layernorm"),
    "output_norms": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "window": "some",
    **_EVERY_BIAS,
}
_GEMMA: dict[str, Any] = {
    "head_dim": 256,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
}

FAMILIES: dict[str, Family] = {
    "llama": Family(**_EVERY_BIAS, mlp_bias="mlp_bias"),
    "mistral": Family(window="all", defaults={"sliding_window": 4096, "num_key_value_heads": 8}),
    "mixtral": Family(window="all", experts=True, defaults={"num_key_value_heads": 8, "num_local_experts": 8}),
    "qwen2": Family(
        window="some",
        qkv_bias=True,
        defaults={"use_sliding_window": False, "sliding_window": 4096, "num_key_value_heads": 32},
    ),
    "qwen3": Family(
        window="some",
        qk_norm="head",
        **_EVERY_BIAS,
        defaults={"head_dim": 128, "use_sliding_window": False, "sliding_window": 4096, "num_key_value_heads": 32},
    ),
    "olmo2": Family(
        norm="wide",
        input_norms=(),
        output_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        qk_norm="full",
        wide_rotary=True,
        **_EVERY_BIAS,
    ),
    "gemma2": Family(
        **_SANDWICH,
        eager=True,
        softcaps=("attn_logit_softcapping", "final_logit_softcapping"),
        defaults={**_GEMMA, "num_key_value_heads": 4, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3_text": Family(
        **_SANDWICH,
        qk_norm="head",
        layer_rotary=True,
        softcaps=("final_logit_softcapping",),
        defaults={**_GEMMA, "num_key_value_heads": 4, "sliding_window_pattern": 6},
    ),
    "phi3": Family(window="all", fused_qkv=True, fused_gate=True, attention_copies=True, names=_FUSED),
    "granite": Family(**_EVERY_BIAS, mlp_bias="mlp_bias"),
    "smollm3": Family(
        window="some",
        **_EVERY_BIAS,
        mlp_bias="mlp_bias",
        defaults={"num_key_value_heads": 4, "tie_word_embeddings": True, "use_sliding_window": False},
    ),
    "stablelm": Family(
        norm="layer",
        attention_copies=True,
        parallel_norms=1,
        qkv_bias="use_qkv_bias",
        rotary_share=0.25,
        defaults={"num_key_value_heads": 32},
    ),
    "gpt_neox": Family(
        norm="layer",
        fused_qkv=True,
        gated=False,
        attention_copies=True,
        parallel_norms=2,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias=True,
        rotary_share=0.25,
        defaults={"attention_bias": True, "use_parallel_residual": True, "hidden_act": "gelu"},
        names=_NEOX,
    ),
}
"""The families that the planner knows, by `model_type` of their Hugging Face configuration."""
