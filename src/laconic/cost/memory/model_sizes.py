"""The model of a plan file from before bytes were traced: sizes, by which a run is recognized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from laconic.errors import PlanError

_FIELDS = {
    "family": "model_type",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "tied": "tie_word_embeddings",
    "num_experts": "num_local_experts",
    "experts_per_token": "num_experts_per_tok",
}
"""Entries of such a file, and what configurations of transformers call them."""


@dataclass(frozen=True)
class ModelSizes:
    """Sizes as the file has them. They are enough to run its plan, not to make another one."""

    entries: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not isinstance(self.entries["family"], str):
            raise PlanError(f"family is {self.entries['family']!r} in the plan, but it must be a model_type")
        for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "vocab_size"):
            value = self.entries[name]
            if not isinstance(value, int) or value < 1:
                raise PlanError(f"{name} is {value!r} in the plan, but it must be at least 1")

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return int(self.entries["num_layers"])

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of `[model]` that make such a model."""
        names = ("family", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "tied")
        return {_FIELDS[name] if name != "family" else name: self.entries[name] for name in names}

    def difference(self, config: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
        """The first size that a Hugging Face configuration has otherwise: its name, here, there."""
        for name, theirs in _FIELDS.items():
            mine, found = self.entries.get(name), config.get(theirs)
            if found is not None and mine != found:
                return name, mine, found
        return None
