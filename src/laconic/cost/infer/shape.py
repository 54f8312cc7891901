"""Sizes of a mixture-of-experts model that decide seconds and bytes of its inference, from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from laconic.cost.comm.rates import ITEM_NBYTES
from laconic.errors import PlanError
from laconic.json_text import parse_json
from laconic.options import CODE_BITS, EXPERT_BLOCK_SIZE, EXPERT_FORMATS, refused

FAMILIES = ("deepseek_v2", "deepseek_v3", "gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""`model_type`s whose configurations say all sizes."""

MODELS: Mapping[str, Mapping[str, Any]] = parse_json(
    (resources.files("laconic.cost") / "data" / "infer_models.json").read_text(encoding="utf-8")
)
"""Configurations of FinDEP's two models, by name: the fields that `InferenceShape.from_config` reads."""

_MOST_LAYERS = 100_000
_SCALE_BITS = 16
_QUANTIZED = "quantization_config"
_SEE = "; see the model's config"


@dataclass(frozen=True, kw_only=True)
class InferenceShape:
    """Sizes of a model. Parameters are numbers of values.

    Raises:
        PlanError: a size is not possible.
    """

    name: str = ""
    family: str = ""
    """model_type of the configuration, if it was made from one."""
    hidden_size: int
    """M."""
    num_layers: int
    """All decoder layers."""
    num_dense_layers: int = 0
    """Of them, those with a feed-forward block in place of experts."""
    num_heads: int
    key_dim: int
    """d_k of a head, of queries and keys."""
    value_dim: int
    """d_v of a head."""
    attention_parameters: int
    """Of a layer's projections around attention: the sum of k * n over its matrix products."""
    attention_products: int = 4
    """Number of those products."""
    cache_values: int
    """Values of one token in a layer's key-value cache."""
    sliding_window: int | None = None
    """Tokens that layers other than the full ones look back."""
    num_full_layers: int = 0
    """Layers whose attention has no window. Without a window: not used."""
    num_experts: int
    """E, of a layer."""
    top_k: int
    """k, experts of a token."""
    expert_hidden: int
    """H, of one routed expert with three products."""
    shared_hidden: int = 0
    """Hidden width of all shared experts together, 0 without."""
    shared_products: int = 3
    """Matrix products of the shared experts: 3, whether they are one block or not; 3 each where they run apart."""
    dense_hidden: int = 0
    """Hidden width of a dense layer's feed-forward block."""
    small_parameters: int = 0
    """Of an attention worker in all layers: norms, biases, gates of shared experts."""
    expert_biases: int = 0
    """Of one expert."""
    vocab_size: int = 0
    """0: the model is priced without embedding and output projection."""
    tied: bool = False
    """Embedding and output projection share their matrix."""
    item_nbytes: int = 2
    """Of a weight, an activation and a cached value."""
    expert_format: str = "exact"
    """In which expert workers hold the matrices of experts, one of laconic.options.EXPERT_FORMATS."""
    positions: int | None = None
    """Tokens of the longest request, prompt and answer together; None: any."""

    def __post_init__(self) -> None:
        if self.expert_format not in EXPERT_FORMATS:
            raise PlanError(refused("expert_format", self.expert_format, EXPERT_FORMATS))
        attention = ("num_heads", "key_dim", "value_dim", "attention_parameters", "attention_products", "cache_values")
        for name in ("hidden_size", "num_layers", *attention, "num_experts", "top_k", "expert_hidden", "item_nbytes"):
            check_whole(name, getattr(self, name), 1, _SEE)
        for name in ("num_dense_layers", "shared_hidden", "dense_hidden", "vocab_size"):
            check_whole(name, getattr(self, name), 0, _SEE)
        if self.num_moe_layers < 1:
            raise PlanError(
                f"num_dense_layers is {self.num_dense_layers} of num_layers = {self.num_layers}, but at least one "
                "layer must have experts; a dense model is served unsplit"
            )
        if self.top_k > self.num_experts:
            raise PlanError(
                f"top_k is {self.top_k}, but a token has at most num_experts = {self.num_experts} experts; lower top_k"
            )

    @property
    def num_moe_layers(self) -> int:
        """T, layers with experts."""
        return self.num_layers - self.num_dense_layers

    @property
    def row_nbytes(self) -> int:
        """Bytes of one token's activation."""
        return self.hidden_size * self.item_nbytes

    @property
    def expert_parameters(self) -> int:
        """Of the three products of one routed expert."""
        return 3 * self.hidden_size * self.expert_hidden

    @property
    def router_parameters(self) -> int:
        """Of one layer's router."""
        return self.hidden_size * self.num_experts

    @property
    def shared_parameters(self) -> int:
        """Of one layer's shared experts."""
        return 3 * self.hidden_size * self.shared_hidden

    @property
    def dense_parameters(self) -> int:
        """Of one dense layer's feed-forward block."""
        return 3 * self.hidden_size * self.dense_hidden

    @property
    def attention_worker_parameters(self) -> int:
        """All that an attention worker holds: everything but the routed experts."""
        moe = self.num_moe_layers * (self.router_parameters + self.shared_parameters)
        layers = self.num_layers * self.attention_parameters + moe + self.num_dense_layers * self.dense_parameters
        vocabulary = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return layers + vocabulary + self.small_parameters

    def experts_parameters(self, num_experts: int) -> int:
        """Of this many experts in every layer that has some."""
        return self.num_moe_layers * num_experts * (self.expert_parameters + self.expert_biases)

    @property
    def expert_nbytes(self) -> float:
        """Bytes of one expert as an expert worker holds it: codes and scales, and biases as they are."""
        biases = self.expert_biases * self.item_nbytes
        if self.expert_format == "exact":
            return biases + self.expert_parameters * self.item_nbytes
        bits = CODE_BITS[self.expert_format] + _SCALE_BITS / EXPERT_BLOCK_SIZE
        return biases + self.expert_parameters * bits / 8

    @property
    def num_parameters(self) -> int:
        """Of the whole model."""
        return self.attention_worker_parameters + self.experts_parameters(self.num_experts)

    def keys_seen(self, length: float) -> float:
        """Mean over layers of the keys that a query can reach, of `length` before it."""
        if self.sliding_window is None or length <= self.sliding_window:
            return length
        full = self.num_full_layers / self.num_layers
        return full * length + (1 - full) * self.sliding_window

    @classmethod
    def load(cls, model: str | Path, item_nbytes: int | None = None) -> InferenceShape:
        """Read a model by a name of `MODELS`, or its directory or config.json.

        Args:
            model: name or path.
            item_nbytes: bytes of a value; None: those of the configuration's dtype.

        Raises:
            PlanError: it is neither, or see `from_config`.
        """
        if str(model) in MODELS:
            return cls.from_config(MODELS[str(model)], item_nbytes, str(model))
        path = Path(model)
        path = path / "config.json" if path.is_dir() else path
        try:
            config = parse_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise PlanError(
                f"model is {str(model)!r}, but it must be a directory with a config.json, or one of "
                f"{', '.join(MODELS)}: {error}"
            ) from error
        except ValueError as error:
            raise PlanError(f"configuration {path} is not JSON: {error}") from error
        if not isinstance(config, dict):
            raise PlanError(f"configuration {path} is a {type(config).__name__}, but it must be a table")
        return cls.from_config(config, item_nbytes, path.resolve().parent.name)

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], item_nbytes: int | None = None, name: str = "", *, latent_cache: bool = False
    ) -> InferenceShape:
        """Read a Hugging Face configuration.

        Args:
            config: of one of `FAMILIES`.
            item_nbytes: bytes of a value; None: those of the configuration's dtype, or 2.
            name: of the model, for tables.
            latent_cache: DeepSeek's attention caches its latent vectors, not keys and values of all heads.

        Raises:
            PlanError: the family is not known, a field is missing, or weights are quantized.
        """
        reader, nbytes = _Reader(config, latent_cache), item_nbytes or _item_nbytes(config)
        return cls(**reader.fields(), name=name, family=reader.family, item_nbytes=nbytes)


def is_read(model: str | Path) -> bool:
    """Return whether `InferenceShape.load` is to be asked for a model: not where it does not know the family."""
    path = Path(model)
    try:
        config = parse_json((path / "config.json" if path.is_dir() else path).read_bytes())
    except (OSError, ValueError):  # a name, or what it refuses
        return True
    return not isinstance(config, dict) or config.get("model_type") in (None, *FAMILIES)


class _Reader:
    """Turns one configuration into the arguments of `InferenceShape`."""

    def __init__(self, config: Mapping[str, Any], latent_cache: bool) -> None:
        self.config = config
        self.latent_cache = latent_cache
        if "model_type" not in config:
            raise PlanError("the configuration has no model_type; give a directory that save_pretrained wrote")
        self.family = str(config["model_type"])
        if self.family not in FAMILIES:
            raise PlanError(
                f"model_type is {self.family!r}, but a configuration alone says the sizes of {', '.join(FAMILIES)}; "
                "laconic infer plan DIR and plan='auto' count those of other models"
            )
        if config.get(_QUANTIZED):
            raise PlanError(f"{_QUANTIZED} is set, but weights must be unquantized; plan the unquantized model")

    def size(self, name: str, otherwise: int | None = None) -> int:
        value = self.config.get(name)
        value = otherwise if value is None else value
        check_whole(name, value, 0, _SEE)
        assert value is not None
        return value

    def entries(self, name: str) -> list[Any] | None:
        value = self.config.get(name)
        if not (value is None or isinstance(value, list)):
            raise PlanError(f"{name} is {value!r}, but it must be a list or null{_SEE}")
        return value

    def fields(self) -> dict[str, Any]:
        hidden, layers = self.size("hidden_size"), self.size("num_hidden_layers")
        if layers > _MOST_LAYERS:
            raise PlanError(f"num_hidden_layers is {layers}, but it must be at most {_MOST_LAYERS}{_SEE}")
        deepseek, gpt_oss = self.family.startswith("deepseek"), self.family == "gpt_oss"
        attention = self._latent_attention(hidden) if deepseek else self._grouped_attention(hidden)
        small = attention.pop("small") + 2 * hidden  # the norms in front of attention and experts
        dense = self._num_dense_layers(layers)
        if deepseek:
            experts, width = self.size("n_routed_experts"), self.size("moe_intermediate_size")
            shared = self.size("n_shared_experts", 0) * width
        elif self.family.startswith("qwen"):
            experts, width = self._num_experts(), self.size("moe_intermediate_size")
            shared = self.size("shared_expert_intermediate_size") if self.family == "qwen2_moe" else 0
        else:
            experts = self._num_experts()
            width, shared = self.size("intermediate_size"), 0
        small_moe = (hidden if shared and not deepseek else 0) + (experts if gpt_oss else 0)
        window, full = self._windows(layers)
        return {
            "hidden_size": hidden,
            "num_layers": layers,
            "num_dense_layers": dense,
            **attention,
            "sliding_window": window,
            "num_full_layers": full,
            "num_experts": experts,
            "top_k": self.size("num_experts_per_tok"),
            "expert_hidden": width,
            "shared_hidden": shared,
            "dense_hidden": self.size("intermediate_size") if dense else 0,
            "small_parameters": layers * small + (layers - dense) * small_moe + hidden,
            "expert_biases": 2 * width + hidden if gpt_oss else 0,
            "vocab_size": self.size("vocab_size"),
            "tied": bool(self.config.get("tie_word_embeddings", False)),
            "positions": self.size("max_position_embeddings", 0) or None,
        }

    def _num_experts(self) -> int:
        """Routed experts of a layer; transformers has two names for them, also within a family."""
        return self.size("num_local_experts" if "num_local_experts" in self.config else "num_experts")

    def _grouped_attention(self, hidden: int) -> dict[str, int]:
        heads = self.size("num_attention_heads")
        kv_heads = self.size("num_key_value_heads", heads)
        head = self.size("head_dim", {"qwen3_moe": 128, "gpt_oss": 64}.get(self.family, hidden // max(1, heads)))
        query, kv = heads * head, kv_heads * head
        small = 0
        biases = {"qwen2_moe": ("qkv_bias", True), "gpt_oss": ("attention_bias", True), "mixtral": ("", False)}
        field, usual = biases.get(self.family, ("attention_bias", False))
        if self.config.get(field, usual):
            small += query + 2 * kv + (hidden if field == "attention_bias" else 0)
        small += {"qwen3_moe": 2 * head, "olmoe": query + kv, "gpt_oss": heads}.get(self.family, 0)
        return {
            "num_heads": heads,
            "key_dim": head,
            "value_dim": head,
            "attention_parameters": 2 * hidden * (query + kv),
            "cache_values": 2 * kv,
            "small": small,
        }

    def _latent_attention(self, hidden: int) -> dict[str, int]:
        heads, latent = self.size("num_attention_heads"), self.size("kv_lora_rank")
        rope, key, value = (self.size(name) for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
        rank = self.size("q_lora_rank") if self.config.get("q_lora_rank") is not None else 0
        query = heads * (key + rope)
        products = [hidden * rank, rank * query] if rank else [hidden * query]
        products += [hidden * (latent + rope), latent * heads * (key + value), heads * value * hidden]
        bias = rank + latent + rope + hidden if self.config.get("attention_bias") else 0
        return {
            "num_heads": heads,
            "key_dim": key + rope,
            "value_dim": value,
            "attention_parameters": sum(products),
            "attention_products": len(products),
            "cache_values": latent + rope if self.latent_cache else heads * (key + rope + value),
            "small": rank + latent + bias,  # norms of the latent vectors, and biases
        }

    def _num_dense_layers(self, layers: int) -> int:
        if self.family.startswith("deepseek"):
            return min(layers, self.size("first_k_dense_replace", 0))
        if not self.family.startswith("qwen"):
            return 0
        step, only = self.size("decoder_sparse_step", 1), self.entries("mlp_only_layers") or ()
        return sum(layer in only or not step or (layer + 1) % step != 0 for layer in range(layers))

    def _windows(self, layers: int) -> tuple[int | None, int]:
        """Window, and number of layers without one."""
        usual = {"gpt_oss": 128, "mixtral": 0, "qwen2_moe": 4096, "qwen3_moe": 4096}
        asked = self.family in usual and (not self.family.startswith("qwen") or self.config.get("use_sliding_window"))
        window = self.size("sliding_window", usual[self.family]) if asked else 0
        if not window:
            return None, layers
        if self.family in ("mixtral", "qwen3_moe"):
            return window, 0
        last = self.size("max_window_layers", 28) if self.family == "qwen2_moe" else layers
        kinds = self.entries("layer_types")
        if kinds is None:  # by turns
            kinds = ["full_attention" if layer % 2 or layer >= last else "sliding_attention" for layer in range(layers)]
        full = sum(kind == "full_attention" for kind in kinds[:layers])
        return (window if full < layers else None), full


def _item_nbytes(config: Mapping[str, Any]) -> int:
    return ITEM_NBYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 2)


def check_whole(name: str, value: object, least: int, remedy: str = "") -> None:
    """Check one of the numbers that a prediction starts from.

    Raises:
        PlanError: it is no whole number from `least` on; `remedy` ends the message.
    """
    if type(value) is not int or value < least:
        raise PlanError(f"{name} is {value!r}, but it must be a whole number from {least} on{remedy}")
