"""Gates: choose the experts of each token."""

from __future__ import annotations

from laconic.moe.gates.base import Gate, TokenChoiceGate
from laconic.moe.gates.cosine import CosineGate
from laconic.moe.gates.expert_choice import ExpertChoiceGate
from laconic.moe.gates.gshard import GShardGate
from laconic.moe.gates.sigmoid import SigmoidGate
from laconic.moe.gates.soft import SoftMoEGate
from laconic.moe.gates.softmax import SoftmaxGate

__all__ = [
    "Gate",
    "TokenChoiceGate",
    "SoftmaxGate",
    "GShardGate",
    "SigmoidGate",
    "CosineGate",
    "ExpertChoiceGate",
    "SoftMoEGate",
]
