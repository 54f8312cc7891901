"""The values that options take: of Python functions, of flags, in TOML files and in the configurations of hosts.

What leaves a thing to its host has another name in each of them: no flag in `laconic run`, "host" in `LaconicConfig`,
"adamw" in `laconic train`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

Code = Literal["uint2", "nf4", "e2m1", "int4", "int5", "int6", "int8"]


class BlockCode(NamedTuple):
    """A code, the format of a block."""

    bits: int
    """Stored per element."""
    level_max: float
    """The level that a block's largest magnitude is mapped to; of an affine code its largest value."""
    is_affine: bool = False
    """Two numbers per block, step and minimum: value = minimum + code * step, code from 0 to level_max."""


BLOCK_CODES: dict[str, BlockCode] = {
    "uint2": BlockCode(2, 3.0, is_affine=True),
    "nf4": BlockCode(4, 1.0),
    "e2m1": BlockCode(4, 6.0),
    "int4": BlockCode(4, 7.0),
    "int5": BlockCode(5, 15.0),
    "int6": BlockCode(6, 31.0),
    "int8": BlockCode(8, 127.0),
}
"""Every code. Those of 4 bits have a table of levels in `laconic.ops.codebooks`; the others are integers."""
CODE_BITS: dict[str, int] = {name: code.bits for name, code in BLOCK_CODES.items()}
"""Bits stored per element of each code."""
DEFAULT_CODES: dict[int, str] = {bits: name for name, bits in reversed(CODE_BITS.items())}
"""The code of so many bits, where none is named: the first."""

BlockSize = Literal[16, 32, 64, 128, 256]
BLOCK_SIZES: tuple[int, ...] = get_args(BlockSize)
"""Elements that may share one scale."""

ActivationBits = Literal[2, 4, 5, 6, 8, 16]
ACTIVATION_BITS: tuple[int, ...] = get_args(ActivationBits)
"""Of saved activations; 16 keeps them as they are."""

ExpertFormat = Literal["exact", "nf4", "e2m1", "int4", "int5", "int6", "int8"]
EXPERT_FORMATS: tuple[str, ...] = get_args(ExpertFormat)
"""In which expert workers of inference hold matrices: as they are, or rounded to the nearest code."""
EXPERT_BLOCK_SIZE = 64
"""Values of these matrices that share a bfloat16 scale."""
EXPERT_ROWS_FROM_CODES = {"nf4": 3, "e2m1": 3, "int4": 3, "int5": 8, "int6": 8, "int8": 3}
"""As many rows of an expert are multiplied from codes. For more, decoding first takes no longer on an EPYC; codes of 5
and 6 bits, which lie across bytes, gain for more still (`benchmarks.run expert-formats`)."""

Attention = Literal["exact", "recompute", Code]
ATTENTIONS: tuple[str, ...] = get_args(Attention)
"""How query, key and value are kept."""

GateName = Literal["softmax", "gshard", "sigmoid", "sinkhorn", "cosine", "expert_choice", "soft"]
GATES: tuple[str, ...] = get_args(GateName)
"""Gates of layers of experts; each is the class in the file of its name in laconic.moe.gates."""

Mode = Literal["sites", "hooks", "combined"]
MODES: tuple[str, ...] = get_args(Mode)
"""What is packed: recognized layers, all saved tensors, or both."""

Loss = Literal["exact", "chunked"]
LOSSES: tuple[str, ...] = get_args(Loss)
"""Whether the logits of a language model are held. `laconic train` also takes "auto"."""

GradientBits = Literal[8, 12, 32]
GRADIENT_BITS: tuple[int, ...] = get_args(GradientBits)
"""In which gradients are held; 32 leaves them as they are."""

DifferenceBits = Literal[4, 8, 32]
DIFFERENCE_BITS: tuple[int, ...] = get_args(DifferenceBits)
"""In which ranks that train apart send how far they have come; 32 sends it as it is."""

Optimizer = Literal["adamw8bit", "adamw4bit"]
OPTIMIZERS: tuple[str, ...] = get_args(Optimizer)
"""Those that take the place of the host's."""

MOMENT_BITS: dict[str, int] = {"adamw8bit": 8, "adamw4bit": 4}
"""Bits of their moments."""

MOMENT_BLOCK_SIZES: dict[int, int] = {8: 256, 4: 128}
"""By the bits of a moment, how many elements share one scale."""

_ONLY_IN_TRAIN = {"auto": "auto is for laconic train, whose configuration says how many logits there will be"}


def takes(allowed: Sequence[object], value: object) -> bool:
    """Whether an option takes a value; 8.0 and True are no integers."""
    return value in allowed and not isinstance(value, bool | float)


def listed(allowed: Sequence[object]) -> str:
    """Return "2, 4 or 8", with words in quotes."""
    *most, last = [str(value) if isinstance(value, int) else repr(value) for value in allowed]
    return f"{', '.join(most)} or {last}" if most else last


def refused(name: str, value: object, allowed: Sequence[object]) -> str:
    """Say that an option does not take a value, what it takes, and why another host takes it if one does."""
    why = _ONLY_IN_TRAIN.get(value) if isinstance(value, str) else None
    words = ", ".join(map(str, allowed))
    return f"{name} is {value!r}, but it must be one of {words}" + ("" if why is None else f"; {why}")
