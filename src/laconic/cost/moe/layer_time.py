"""What a layer computes within a rank: its gate by tokens and its experts by rows, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

from laconic.cost.comm.rates import Line
from laconic.cost.moe.rates import MoERates
from laconic.cost.moe.shape import LayerShape
from laconic.topology import GridLayout

__all__ = ["LayerWork"]


@dataclass(frozen=True)
class LayerWork:
    """Lines of one layer on the slowest rank while all ranks work: sizes are numbers of tokens or rows, not bytes."""

    gate: Line
    """By tokens."""
    gate_backward: Line
    experts: Line
    """By rows of all experts of a rank."""
    experts_backward: Line

    @classmethod
    def of_rates(cls, shape: LayerShape, grid: GridLayout, rates: MoERates) -> LayerWork:
        """From the line of matrix products, where the layer itself was not measured; backward counts them twice."""
        local = 1 if rates.grouped else shape.num_experts // grid.ep

        def products(number: int, multiply_adds: float, calls: int) -> Line:
            line = rates.gemm
            return Line(number * calls * line.alpha_seconds, number * multiply_adds * line.seconds_per_byte, line.error)

        gate, row = shape.model_dim * shape.num_experts, shape.model_dim * shape.hidden_dim / grid.esp
        return cls(
            products(1, gate, 1),
            products(2, gate, 1),
            products(shape.num_gemms, row, local),
            products(2 * shape.num_gemms, row, local),
        )

    def gate_seconds(self, num_tokens: float, backward: bool) -> float:
        """Scores and choices of so many tokens."""
        return (self.gate_backward if backward else self.gate).seconds(num_tokens)

    def experts_line(self, backward: bool) -> Line:
        """Of one direction."""
        return self.experts_backward if backward else self.experts
