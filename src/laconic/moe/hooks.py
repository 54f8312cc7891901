"""Six places in a layer where code of others may look and change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from laconic.moe.dispatch.base import ExpertRows
from laconic.moe.routing import RoutedTokens

if TYPE_CHECKING:
    from laconic.moe.layer import MoELayer

__all__ = ["Hook"]


class Hook:
    """Override any of the six. Each gets what flows there and returns what flows on; None leaves it as it is.

    A schedule that cuts a layer into chunks calls after_dispatch and before_combine once for each slice. There experts
    are numbered by slot, and a SoftRouting has become its slots: each is a row that its routing sends to its expert.

    (FSMoE, section 3, names the outer two before_moe_start and before_moe_end.)
    """

    def before_start(self, layer: MoELayer, x: Tensor) -> Tensor | None:
        """The input x [..., M] came."""

    def before_dispatch(self, layer: MoELayer, tokens: RoutedTokens) -> RoutedTokens | None:
        """The gate has decided."""

    def after_dispatch(self, layer: MoELayer, inputs: ExpertRows) -> ExpertRows | None:
        """Rows are where their experts are."""

    def before_combine(self, layer: MoELayer, outputs: ExpertRows) -> ExpertRows | None:
        """The experts are done."""

    def after_combine(self, layer: MoELayer, out: Tensor) -> Tensor | None:
        """Tokens [n, M] are back."""

    def after_end(self, layer: MoELayer, out: Tensor) -> Tensor | None:
        """The output is about to be returned: in the input's shape, with shared experts added."""
