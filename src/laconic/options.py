"""The values that options take: of Python functions, of flags, in TOML files and in the configurations of hosts.

What leaves a thing to its host has another name in each of them: no flag in `laconic run`, "host" in `LaconicConfig`,
"adamw" in `laconic train`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

__all__ = [
    "ACTIVATION_BITS",
    "ATTENTIONS",
    "BLOCK_SIZES",
    "CODE_BITS",
    "DEFAULT_CODES",
    "GATES",
    "GRADIENT_BITS",
    "LOSSES",
    "MODES",
    "OPTIMIZERS",
    "ActivationBits",
    "Attention",
    "BlockSize",
    "Code",
    "GateName",
    "GradientBits",
    "Loss",
    "Mode",
    "Optimizer",
    "listed",
    "refused",
    "takes",
]

Code = Literal["uint2", "nf4", "e2m1", "int4", "int5", "int6", "int8"]
CODE_BITS: dict[str, int] = {"uint2": 2, "nf4": 4, "e2m1": 4, "int4": 4, "int5": 5, "int6": 6, "int8": 8}
"""Bits stored per element of each code, the format of a block."""
DEFAULT_CODES: dict[int, str] = {2: "uint2", 4: "nf4", 5: "int5", 6: "int6", 8: "int8"}
"""The code of so many bits, where none is named."""

BlockSize = Literal[16, 32, 64, 128, 256]
BLOCK_SIZES: tuple[int, ...] = get_args(BlockSize)
"""Elements that may share one scale."""

ActivationBits = Literal[2, 4, 5, 6, 8, 16]
ACTIVATION_BITS: tuple[int, ...] = get_args(ActivationBits)
"""Of saved activations; 16 keeps them as they are."""

Attention = Literal["exact", "recompute", Code]
ATTENTIONS: tuple[str, ...] = get_args(Attention)
"""How query, key and value are kept."""

GateName = Literal["softmax", "gshard", "sigmoid", "cosine", "expert_choice", "soft"]
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

Optimizer = Literal["adamw8bit"]
OPTIMIZERS: tuple[str, ...] = get_args(Optimizer)
"""Those that take the place of the host's."""

_ONLY_IN_TRAIN = {
    "auto": "auto is for laconic train, whose configuration says how many logits there will be",
}


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
