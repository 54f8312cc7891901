"""Gates: choose the experts of each token. A new one is a file here and its name in `laconic.options.GateName`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from laconic.errors import ConfigError
from laconic.moe.gates.base import Gate, TokenChoiceGate
from laconic.moe.gates.cosine import CosineGate
from laconic.moe.gates.expert_choice import ExpertChoiceGate
from laconic.moe.gates.gshard import GShardGate
from laconic.moe.gates.sigmoid import SigmoidGate
from laconic.moe.gates.sinkhorn import SinkhornGate
from laconic.moe.gates.soft import SoftMoEGate
from laconic.moe.gates.softmax import SoftmaxGate
from laconic.options import GATES, refused

__all__ = [
    "Gate",
    "TokenChoiceGate",
    "SoftmaxGate",
    "GShardGate",
    "SigmoidGate",
    "SinkhornGate",
    "CosineGate",
    "ExpertChoiceGate",
    "SoftMoEGate",
    "make_gate",
]


def make_gate(name: str, num_experts: int, model_dim: int, *sizes: float, **options: Any) -> Gate:
    """Make the gate of a name, as "softmax" makes a SoftmaxGate.

    Args:
        name: one of `laconic.options.GATES`.
        num_experts, model_dim, sizes, options: of its class; `sizes` begins with experts per token where a gate has
            that number.

    Raises:
        ConfigError: there is no gate of this name.
    """
    if name not in GATES:
        raise ConfigError(refused("gate", name, GATES))
    file = import_module(f"laconic.moe.gates.{name}")
    (kind,) = (one for one in vars(file).values() if isinstance(one, type) and one.__module__ == file.__name__)
    made: Gate = kind(num_experts, model_dim, *sizes, **options)
    return made
