"""Six places in a layer where code of others may look and change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from laconic.moe.layer import MoELayer

__all__ = ["Hook"]


class Hook:
    """Override any of the six; `batch` is a dict that the layer reads again after each call.

    Keys, from the moment they are known:
        x: the input, before_start as it came, later as tokens [n, M]
        routing: Routing | SoftRouting, from before_dispatch on
        rows: [q, M], after_dispatch the experts' inputs, before_combine their outputs
        counts: int64 [E_local], of the rows; after_dispatch and before_combine
        out: after_combine [n, M], after_end in the input's shape with shared experts added

    A schedule that cuts the tokens into pieces calls after_dispatch and before_combine once for each. There experts are
    numbered by slot, and a SoftRouting has become its slots: x is one row for each, routing sends each to its expert.

    (FSMoE, section 3, names the outer two before_moe_start and before_moe_end.)
    """

    def before_start(self, layer: MoELayer, batch: dict[str, Any]) -> None:
        """The input came."""

    def before_dispatch(self, layer: MoELayer, batch: dict[str, Any]) -> None:
        """The gate has decided."""

    def after_dispatch(self, layer: MoELayer, batch: dict[str, Any]) -> None:
        """Rows are where their experts are."""

    def before_combine(self, layer: MoELayer, batch: dict[str, Any]) -> None:
        """The experts are done."""

    def after_combine(self, layer: MoELayer, batch: dict[str, Any]) -> None:
        """Tokens are back."""

    def after_end(self, layer: MoELayer, batch: dict[str, Any]) -> None:
        """The output is about to be returned."""
