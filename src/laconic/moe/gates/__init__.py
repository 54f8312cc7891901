"""Gates: who goes where."""

from __future__ import annotations

from laconic.moe.gates.base import Gate, TokenChoiceGate
from laconic.moe.gates.softmax import SoftmaxGate

__all__ = ["Gate", "TokenChoiceGate", "SoftmaxGate"]
