"""The sizes of a decoder-only model, and what its family does differently: all that arithmetic needs to know of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from laconic.errors import PlanError

__all__ = ["FAMILIES", "Family", "ModelShape"]


@dataclass(frozen=True)
class Family:
    """How the layers of a model family differ from Llama's.

    norm: "cast" rounds the normalized value to the model's dtype before the weight multiplies it (Llama), "wide"
    multiplies in fp32 (OLMo2), "offset" multiplies by 1 + weight in fp32 (Gemma).
    input_norms: whether attention and feed-forward block each read the output of a norm. output_norms: names of norms
    behind the two blocks. qk_norm: whether queries and keys are normalized, per "head" or over the "full" projection.
    fused: whether q, k, v are one linear, and gate and up another. qkv_bias: whether the former have biases.
    attention_copies: whether the attention output is copied before its projection reads it.
    eager: attention materializes scores [heads, sequence, sequence]. wide_rotary: its tables are fp32.
    """

    norm: Literal["cast", "wide", "offset"] = "cast"
    input_norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    output_norms: tuple[str, ...] = ()
    qk_norm: Literal["head", "full"] | None = None
    fused: bool = False
    qkv_bias: bool = False
    attention_copies: bool = False
    eager: bool = False
    wide_rotary: bool = False


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm="head"),
    "olmo2": Family(
        norm="wide",
        input_norms=(),
        output_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        qk_norm="full",
        wide_rotary=True,
    ),
    "gemma2": Family(
        norm="offset",
        input_norms=("input_layernorm", "pre_feedforward_layernorm"),
        output_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        eager=True,
    ),
    "phi3": Family(fused=True, attention_copies=True),
}
"""The families that the planner knows, by `model_type` of their Hugging Face configuration."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a model.

    hidden_size, intermediate_size: width of the residual stream and of the feed-forward layer. num_heads, num_kv_heads,
    head_dim: of attention. tied: whether embedding and output projection share their matrix. sliding_window: tokens
    that attention looks back; None without limit. softcap: whether attention scores and logits pass through tanh.

    Raises PlanError if the family is not known or a size is not positive.
    """

    family: str = "llama"
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool = False
    sliding_window: int | None = None
    softcap: bool = False

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise PlanError(_unknown_family(self.family))
        for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)!r}, but it must be at least 1")
        if self.vocab_size < 1:
            raise PlanError(f"vocab_size is {self.vocab_size!r}, but it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise PlanError(f"num_kv_heads is {self.num_kv_heads}, but it must divide num_heads ({self.num_heads})")

    @property
    def traits(self) -> Family:
        """What the family does differently."""
        return FAMILIES[self.family]

    @property
    def query_size(self) -> int:
        """Width of all queries together, which is that of the attention output."""
        return self.num_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """Width of all keys together, which is that of the values."""
        return self.num_kv_heads * self.head_dim

    @property
    def layer_linear_parameters(self) -> int:
        """Parameters of the weight matrices of one layer."""
        attention = self.hidden_size * (2 * self.query_size + 2 * self.key_size)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer."""
        traits = self.traits
        norms = (len(traits.input_norms) + len(traits.output_norms)) * self.hidden_size
        if traits.qk_norm == "head":
            norms += 2 * self.head_dim
        elif traits.qk_norm == "full":
            norms += self.query_size + self.key_size
        biases = self.query_size + 2 * self.key_size if traits.qkv_bias else 0
        return self.layer_linear_parameters + norms + biases

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding, and of the output projection if it is not tied."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; a tied matrix counts once."""
        ends = self.embedding_parameters * (1 if self.tied else 2) + self.hidden_size
        return self.num_layers * self.layer_parameters + ends

    @classmethod
    def from_config(cls, config: Mapping[str, Any], family: str | None = None) -> ModelShape:
        """Reads a Hugging Face configuration as a dictionary, that is config.json.

        Args:
            config: with the names that Llama-like models use. A missing num_key_value_heads means as many as heads, a
                missing head_dim hidden_size / num_attention_heads.
            family: instead of the configuration's model_type.

        Raises:
            PlanError: a size is missing, or the family is not known.
        """
        config = config.get("text_config", config)
        family = family or config.get("model_type") or "llama"
        if family not in FAMILIES:
            raise PlanError(_unknown_family(family))

        def size(name: str) -> int:
            if not isinstance(config.get(name), int):
                raise PlanError(
                    f"{name} is {config.get(name)!r} in the model's configuration, but it must be an integer"
                )
            return int(config[name])

        hidden, heads = size("hidden_size"), size("num_attention_heads")
        window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
        return cls(
            family=family,
            hidden_size=hidden,
            intermediate_size=size("intermediate_size"),
            num_layers=size("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            vocab_size=size("vocab_size"),
            tied=bool(config.get("tie_word_embeddings", family == "gemma2")),
            sliding_window=window,
            softcap=bool(config.get("attn_logit_softcapping") or config.get("final_logit_softcapping")),
        )

    @classmethod
    def load(cls, path: str | Path, family: str | None = None) -> ModelShape:
        """Reads config.json of a model directory, or the file itself.

        Raises:
            PlanError: there is no such file, it is not JSON, or see `from_config`.
        """
        file = Path(path)
        file = file / "config.json" if file.is_dir() else file
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise PlanError(
                f"model is {str(path)!r}, but it must be a directory with a config.json: {error}"
            ) from error
        except ValueError as error:
            raise PlanError(f"{file} is not JSON: {error}") from error
        if not isinstance(config, dict):
            raise PlanError(f"{file} holds a {type(config).__name__}, but a model's configuration is a JSON object")
        return cls.from_config(config, family)

    def to_dict(self) -> dict[str, Any]:
        """The sizes as plain data: the fingerprint of a model in a plan."""
        return asdict(self)


def _unknown_family(family: str) -> str:
    return (
        f"model_type is {family!r}, but the planner knows {', '.join(FAMILIES)}; for a model whose layers are built "
        f"like one of these, give that family"
    )
