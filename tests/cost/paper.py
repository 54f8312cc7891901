"""Memory tables of AGoQ (arXiv 2605.00539), by its own account: bytes that a Llama layer keeps, in U.

U is batch x sequence x hidden x 2 bytes. The paper counts a norm's input in fp32, the sigmoid of SwiGLU as a tensor of
its own, attention with q, k, v, output and one more U that it does not name, four bits without scales, and no logits.
The planner counts what our code keeps; this is for comparison with what was published.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tests.cost.shapes import Sizes

__all__ = ["COMPONENTS", "PaperRun", "components", "real_components"]

COMPONENTS = (
    "qkv input",
    "attention",
    "output projection input",
    "norms",
    "gate and up input",
    "swiglu",
    "down input",
)

System = Literal["megatron", "modern", "coat", "agoq"]


def components(system: Literal["megatron", "coat", "agoq"]) -> dict[str, float]:
    """Table 1: U by component of a layer with multi-head attention and a feed-forward layer of 4 x hidden."""
    unit, four_bits, eight_bits = 1.0, 4 / 16, 8 / 16
    f = 4.0
    swiglu = 3 * f  # gate, up, sigmoid
    attention = 5 * unit
    if system == "megatron":
        values = (unit, attention, unit, 2 * 2 * unit, unit, swiglu, f)
    elif system == "coat":
        # fp8 for the inputs of the feed-forward linears and of what is elementwise, 16 bits for those of attention.
        values = (unit, attention, unit, 2 * eight_bits, eight_bits, swiglu * eight_bits, f * eight_bits)
    else:
        # The norms' packed inputs rebuild what linears read, packed gate and up the rest; attention is exact.
        values = (0.0, attention, four_bits, 2 * four_bits, 0.0, 2 * f * four_bits, 0.0)
    return dict(zip(COMPONENTS, values, strict=True))


def real_components(shape: Sizes, system: Literal["megatron", "modern", "agoq"]) -> dict[str, float]:
    """The same account for a real shape: attention is q, k, v and output, the feed-forward layer as wide as it is.

    "modern" is bf16 with fused norm (its input once) and fused SwiGLU (gate and up once, no sigmoid, no product).
    """
    f, kv = shape.intermediate_size / shape.hidden_size, shape.key_size / shape.query_size
    attention = 2 + 2 * kv
    if system == "megatron":
        values = (1.0, attention, 1.0, 4.0, 1.0, 3 * f, f)
    elif system == "modern":
        values = (1.0, attention, 1.0, 2.0, 1.0, 2 * f, f)
    else:
        values = (0.0, attention, 0.25, 0.5, 0.0, 2 * f * 0.25, 0.0)
    return dict(zip(COMPONENTS, values, strict=True))


@dataclass(frozen=True)
class PaperRun:
    """One row of the paper's end-to-end tables: a model over `tensor_parallel` ranks with sequence parallelism.

    Every byte is divided by `tensor_parallel`. Parameters are bf16 with an fp32 master copy, states of Adam fp32 or
    8 bits in blocks of 256, gradients as said.
    """

    shape: Sizes
    tokens: int
    tensor_parallel: int

    @property
    def unit_nbytes(self) -> float:
        """One U on one rank."""
        return self.tokens * self.shape.hidden_size * 2 / self.tensor_parallel

    @property
    def num_parameters(self) -> float:
        """Parameters of one rank."""
        return self.shape.num_parameters / self.tensor_parallel

    def weights_nbytes(self) -> float:
        """bf16 parameters and their fp32 master copy."""
        return 6 * self.num_parameters

    def optimizer_nbytes(self, bits: Literal[8, 32]) -> float:
        """Bytes of Adam's first and second moment."""
        return self.num_parameters * (8 if bits == 32 else 2 * (1 + 4 / 256))

    def gradients_nbytes(self, bits: Literal[8, 16, 32]) -> float:
        """Main gradients; at 8 bits with an fp32 scale per block of 256, as the release has them."""
        return self.num_parameters * (bits / 8 if bits > 8 else 1 + 4 / 256)

    def activations_nbytes(self, units_per_layer: float) -> float:
        """What all layers keep, at so many U each."""
        return units_per_layer * self.unit_nbytes * self.shape.num_layers

    def logits_nbytes(self) -> float:
        """Logits in fp32, over the ranks."""
        return 4 * self.tokens * self.shape.vocab_size / self.tensor_parallel
