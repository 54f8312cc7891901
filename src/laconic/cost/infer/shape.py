"""Sizes of a mixture-of-experts model that decide seconds and bytes of its inference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from laconic.errors import PlanError
from laconic.json_text import parse_json
from laconic.options import CODE_BITS, EXPERT_BLOCK_SIZE, EXPERT_FORMATS, refused

_SCALE_BITS = 16
_SEE = "; see the model's config"


@dataclass(frozen=True, kw_only=True)
class InferenceShape:
    """Sizes of a model. Parameters are numbers of values.

    Raises:
        PlanError: a size is not possible.
    """

    name: str = ""
    family: str = ""
    """model_type of the configuration."""
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


def check_whole(name: str, value: object, least: int, remedy: str = "") -> None:
    """Check one of the numbers that a prediction starts from."""
    if type(value) is not int or value < least:
        raise PlanError(f"{name} is {value!r}, but it must be a whole number from {least} on{remedy}")


_SIZES = parse_json((resources.files("laconic.cost") / "data" / "infer_models.json").read_text(encoding="utf-8"))

MODELS: Mapping[str, InferenceShape] = {name: InferenceShape(name=name, **sizes) for name, sizes in _SIZES.items()}
"""Sizes of FinDEP's two models, by name."""
