"""Hooks at six places in a layer, which may read and replace what passes there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from laconic.moe.dispatch.base import ExpertRows
from laconic.moe.routing import RoutedTokens

if TYPE_CHECKING:
    from laconic.moe.layer import MoELayer


class Hook:
    """Override any of the six methods. Each gets the value at its place and returns a replacement; None keeps it.

    A schedule that cuts a layer into chunks calls after_dispatch and before_combine once for each slice. There experts
    are numbered by slot, and a SoftRouting has become its slots: each is a row that its routing sends to its expert.

    (FSMoE, section 3, names the outer two before_moe_start and before_moe_end.)
    """

    def before_start(self, layer: MoELayer, x: Tensor) -> Tensor | None:
        """Called with the layer's input x [..., M]."""

    def before_dispatch(self, layer: MoELayer, tokens: RoutedTokens) -> RoutedTokens | None:
        """Called with tokens and routing after the gate."""

    def after_dispatch(self, layer: MoELayer, inputs: ExpertRows) -> ExpertRows | None:
        """Called with the experts' input rows."""

    def before_combine(self, layer: MoELayer, outputs: ExpertRows) -> ExpertRows | None:
        """Called with the experts' output rows."""

    def after_combine(self, layer: MoELayer, out: Tensor) -> Tensor | None:
        """Called with the combined tokens [n, M]."""

    def after_end(self, layer: MoELayer, out: Tensor) -> Tensor | None:
        """Called with the layer's output, in the input's shape and with shared experts added."""
