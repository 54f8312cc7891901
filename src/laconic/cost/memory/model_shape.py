"""The sizes of a decoder-only model and the traits of its family: all that the cost model needs to know of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from laconic.cost.memory.families import FAMILIES, Family
from laconic.errors import PlanError
from laconic.json_text import parse_json

__all__ = ["FAMILIES", "Family", "ModelShape"]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a model.

    Attributes:
        family: key of `FAMILIES`.
        hidden_size, intermediate_size: width of the residual stream and of the feed-forward layer, or of one expert.
        num_layers: decoder layers.
        num_heads, num_kv_heads, head_dim: of attention.
        vocab_size: rows of the embedding.
        tied: whether embedding and output projection share their matrix.
        sliding_window: tokens that attention looks back, None without limit.
        full_layers: layers without that limit.
        softcap, logit_softcap: whether attention scores, and logits, pass through tanh.
        rotary_size: features of a head that are rotated, None for the family's share.
        qkv_bias, output_bias, mlp_bias: whether linears have biases; None for the family's default.
        parallel: whether attention and feed-forward block read the same residual stream; None for the family's default.
        exact_gelu: whether the activation is GELU by erf, whose gradients are not made from codes.
        num_experts, experts_per_token: of a mixture of experts, 0 elsewhere.

    Raises:
        PlanError: the family is not known or a size is not positive.
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
    full_layers: tuple[int, ...] = ()
    softcap: bool = False
    logit_softcap: bool = False
    rotary_size: int | None = None
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = None
    parallel: bool | None = None
    exact_gelu: bool = False
    num_experts: int = 0
    experts_per_token: int = 0

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise PlanError(
                f"model_type is {self.family!r}, but the planner knows {', '.join(FAMILIES)}; bytes of other families "
                f"would be a guess"
            )
        traits = self.traits
        positive = (
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
        )
        for name in (*positive, *(("num_experts", "experts_per_token") if traits.experts else ())):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)!r}, but it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise PlanError(f"num_kv_heads is {self.num_kv_heads}, but it must divide num_heads ({self.num_heads})")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise PlanError(f"sliding_window is {self.sliding_window}, but it must be at least 1 or left out")
        if self.num_experts and not traits.experts:
            raise PlanError(f"num_experts is {self.num_experts}, but layers of {self.family} have no experts")
        if self.experts_per_token > self.num_experts:
            raise PlanError(
                f"experts_per_token is {self.experts_per_token}, but the model has {self.num_experts} experts"
            )
        if self.parallel and traits.parallel_norms is None:
            raise PlanError(f"parallel is True, but the blocks of {self.family} run one after the other")
        parallel = traits.defaults.get("use_parallel_residual", False) if self.parallel is None else self.parallel
        rotary_size = int(self.head_dim * traits.rotary_share) if self.rotary_size is None else self.rotary_size
        resolved = {"full_layers": tuple(self.full_layers), "rotary_size": rotary_size, "parallel": bool(parallel)}
        for name in ("qkv_bias", "output_bias", "mlp_bias"):
            own, of_family = getattr(self, name), getattr(traits, name)
            if own is None:
                own = bool(traits.defaults.get(of_family, False)) if isinstance(of_family, str) else of_family
            resolved[name] = own
        for name, value in resolved.items():
            object.__setattr__(self, name, value)

    @property
    def traits(self) -> Family:
        """How the family's layers differ from Llama's."""
        return FAMILIES[self.family]

    @property
    def input_norms(self) -> tuple[str, ...]:
        """Names of the norms in front of the blocks of a layer."""
        norms = self.traits.input_norms
        return norms[: self.traits.parallel_norms] if self.parallel else norms

    @property
    def active_width(self) -> int:
        """Width of the feed-forward layer that a token passes, summed over its experts."""
        return self.intermediate_size * max(1, self.experts_per_token)

    @property
    def query_size(self) -> int:
        """Width of all queries together, which is that of the attention output."""
        return self.num_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """Width of all keys together, which is that of the values."""
        return self.num_kv_heads * self.head_dim

    def layer_name(self, layer: int) -> str:
        """Name of a decoder layer's module."""
        return f"{self.traits.names.layers}.{layer}"

    def window_of(self, layer: int) -> int | None:
        """Tokens that attention of a layer looks back; None without limit."""
        return None if layer in self.full_layers else self.sliding_window

    @property
    def is_stack(self) -> bool:
        """Whether the layers are one list, which may run again and can be cut into stages."""
        return True

    @property
    def shares(self) -> bool:
        """Whether only one choice for all layers can be predicted."""
        return False

    def kind_of(self, layer: int) -> int | None:
        """What distinguishes layers: the window of their attention."""
        return self.window_of(layer)

    def parameters_of(self, layer: int) -> int:
        """Parameters of a layer, those of all experts included."""
        return self.layer_parameters

    def tensors_of(self, layer: int) -> list[tuple[int, int]]:
        """Rows and columns of every parameter of a layer but experts'; vectors have one column."""
        return [(t[0], t[1] if len(t) > 1 else 1) for t in self.layer_tensors if len(t) < 3]

    def experts_of(self, layer: int) -> list[tuple[int, int, int]]:
        """Experts, rows and columns of each of the parameters that hold all experts of a layer."""
        return [(t[0], t[1], t[2]) for t in self.layer_tensors if len(t) == 3]

    @property
    def first_tensors(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of the parameters in front of the layers."""
        return ((self.vocab_size, self.hidden_size),)

    @property
    def last_tensors(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of the parameters behind the layers."""
        return (*[(self.hidden_size, 1)] * self.tensors_of_a_norm, (self.vocab_size, self.hidden_size))

    @property
    def tied_tensor(self) -> tuple[int, int] | None:
        """Which of `last_tensors` is one of `first_tensors`."""
        return (self.vocab_size, self.hidden_size) if self.tied else None

    def describe(self) -> str:
        """Family and sizes in a line."""
        return (
            f"{self.family}: {self.num_layers} layers, hidden {self.hidden_size:,}, feed-forward "
            f"{self.intermediate_size:,}, {self.num_heads} heads, {self.num_kv_heads} key/value heads, vocabulary "
            f"{self.vocab_size:,}"
        )

    @property
    def layer_tensors(self) -> list[tuple[int, ...]]:
        """Shapes of the parameters of one layer."""
        traits, hidden, ffn = self.traits, self.hidden_size, self.intermediate_size
        query, key = self.query_size, self.key_size
        qkv = [(query + 2 * key, hidden)] if traits.fused_qkv else [(query, hidden), (key, hidden), (key, hidden)]
        tensors: list[tuple[int, ...]] = [*qkv, (hidden, query)]
        tensors += [(rows,) for rows, _ in qkv] * bool(self.qkv_bias) + [(hidden,)] * bool(self.output_bias)
        if traits.experts:
            count = self.num_experts
            tensors += [(count, hidden), (count, 2 * ffn, hidden), (count, hidden, ffn)]
        else:
            wide = [2 * ffn] if traits.fused_gate else [ffn] * (2 if traits.gated else 1)
            tensors += [(rows, hidden) for rows in wide] + [(hidden, ffn)]
            tensors += ([(rows,) for rows in wide] + [(hidden,)]) * bool(self.mlp_bias)
        if traits.qk_norm == "head":
            tensors += [(self.head_dim,)] * 2
        elif traits.qk_norm == "full":
            tensors += [(query,), (key,)]
        num_norms = len(self.input_norms) + len(traits.output_norms)
        return [*tensors, *[(hidden,)] * (num_norms * self.tensors_of_a_norm)]

    @property
    def tensors_of_a_norm(self) -> int:
        """Parameters of a norm over the residual stream: the weight, and a layer norm's bias."""
        return 2 if self.traits.norm == "layer" else 1

    @property
    def layer_linear_parameters(self) -> int:
        """Parameters of the weight matrices of one layer that one token uses."""
        attention = self.hidden_size * (2 * self.query_size + 2 * self.key_size)
        matrices = 3 if self.traits.gated else 2
        feed_forward = matrices * self.hidden_size * self.intermediate_size
        if self.traits.experts:
            return attention + self.experts_per_token * feed_forward + self.num_experts * self.hidden_size
        return attention + feed_forward

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer."""
        return sum(prod(shape) for shape in self.layer_tensors)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding, and of the output projection if it is not tied."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; a tied matrix counts once."""
        ends = self.embedding_parameters * (1 if self.tied else 2) + self.hidden_size * self.tensors_of_a_norm
        return self.num_layers * self.layer_parameters + ends

    @classmethod
    def from_config(cls, config: Mapping[str, Any], family: str | None = None) -> ModelShape:
        """Read a Hugging Face configuration as a dictionary, that is config.json.

        Args:
            config: with a model_type that the planner knows. Absent fields mean what transformers takes them for.
            family: what an unknown model_type is built like. Every field of the configuration must then be one that
                this family has.

        Raises:
            PlanError: a size is missing, the family is not known or not what the configuration says, or the
                configuration asks for something whose bytes are not predicted.
        """
        from laconic.cost.memory.model_config import sizes_of

        return cls(**sizes_of(config, family))

    @classmethod
    def load(cls, path: str | Path, family: str | None = None) -> ModelShape:
        """Read config.json of a model directory, or the file itself.

        Raises:
            PlanError: there is no such file, it is not JSON, or see `from_config`.
        """
        file = Path(path)
        file = file / "config.json" if file.is_dir() else file
        try:
            config = parse_json(file.read_text(encoding="utf-8"))
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
        return {**asdict(self), "full_layers": list(self.full_layers)}
