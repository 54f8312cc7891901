"""What is decided of a model: units, which save bytes for backward under every choice that can be made for them.

A unit is the smallest set of sites that are decided together: attention, its output projection, a feed-forward block,
the rest of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from laconic.errors import PlanError
from laconic.options import CODE_BITS, DEFAULT_CODES, listed

_SCALE_NBYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Precision:
    """Element sizes in bytes: of parameters, of the residual stream, and of what matrix products read.

    Attributes:
        autocast: whether linears cast their input and their weight; autograd then keeps both casts.
    """

    name: str
    parameter_nbytes: int
    residual_nbytes: int
    compute_nbytes: int
    autocast: bool = False


PRECISIONS = {
    "fp32": Precision("fp32", 4, 4, 4),
    "bf16": Precision("bf16", 4, 4, 2, autocast=True),
    "bf16-pure": Precision("bf16-pure", 2, 2, 2),
}
"""fp32; bf16 autocast over fp32 parameters, as `laconic train --precision bf16`; everything in bf16."""


@dataclass(frozen=True)
class Choice:
    """How the tensors of a unit are saved.

    Attributes:
        code: block format, None to keep them exact.
        block_size, scale_dtype: of the block format.
        offload: packed bytes are moved to host memory.
        recompute: nothing is saved; backward computes the tensors again.
    """

    code: str | None = None
    block_size: int = 64
    scale_dtype: str = "bfloat16"
    offload: bool = False
    recompute: bool = False

    def __post_init__(self) -> None:
        if self.code is not None and self.code not in CODE_BITS:
            raise PlanError(f"code is {self.code!r}, but it must be one of {', '.join(CODE_BITS)}")
        if self.scale_dtype not in _SCALE_NBYTES:
            raise PlanError(f"scale_dtype is {self.scale_dtype!r}, but it must be one of {', '.join(_SCALE_NBYTES)}")
        if not isinstance(self.block_size, int) or isinstance(self.block_size, bool) or self.block_size < 1:
            raise PlanError(f"block_size is {self.block_size!r}, but it must be a whole number of at least 1")
        for name in ("offload", "recompute"):
            if not isinstance(getattr(self, name), bool):
                raise PlanError(f"{name} is {getattr(self, name)!r}, but it must be true or false")

    @property
    def bits(self) -> int:
        """Bits per value without the scale's share: 16 for exact, 0 for recompute."""
        return 0 if self.recompute else 16 if self.code is None else CODE_BITS[self.code]

    @property
    def name(self) -> str:
        """The choice in a word, for tables: "exact", "nf4", "int8 offload", "recompute"."""
        own = "recompute" if self.recompute else self.code or "exact"
        return f"{own} offload" if self.offload else own

    def packed_nbytes(self, rows: int, length: int) -> int:
        """Bytes of codes and scales of `rows` rows of `length` values.

        Rows share blocks where blocks of their own would cost an eighth more (laconic.activations.keep.kept).
        """
        whole = -(-length // self.block_size) * self.block_size
        if 8 * self._row_nbytes(length) * whole > 9 * length * self._row_nbytes(whole):
            return self._row_nbytes(rows * length)
        return rows * self._row_nbytes(length)

    def _row_nbytes(self, length: int) -> int:
        # uint2 has two numbers per block, step and minimum.
        scales = -(-length // self.block_size) * _SCALE_NBYTES[self.scale_dtype] * (2 if self.code == "uint2" else 1)
        return -(-length * self.bits // 8) + scales

    def to_json(self) -> dict[str, Any] | None:
        """An entry of an activation plan."""
        if self.recompute:
            return {"recompute": True}
        if self.code is None:
            return None
        entry = {"code": self.code, "block_size": self.block_size, "scale_dtype": self.scale_dtype}
        return {**entry, "offload": True} if self.offload else entry

    @classmethod
    def from_json(cls, entry: Any) -> Choice:
        """Read what `to_json` wrote.

        Raises:
            PlanError: the entry is not valid.
        """
        if entry is None:
            return EXACT
        if not isinstance(entry, dict) or not entry.keys() <= {field.name for field in fields(cls)}:
            raise PlanError(f"site is {entry!r} in the plan, but it must be a format, {{'recompute': true}} or null")
        return cls(**entry)

    @classmethod
    def from_bits(cls, bits: int) -> Choice:
        """The default code of so many bits; 16 keeps exactly.

        Raises:
            PlanError: there is no format of so many bits.
        """
        if bits == 16:
            return EXACT
        if bits not in DEFAULT_CODES:
            raise PlanError(f"bits is {bits!r}, but it must be {listed((*sorted(DEFAULT_CODES), 16))}")
        return cls(DEFAULT_CODES[bits])


EXACT = Choice()
RECOMPUTE = Choice(recompute=True)


@dataclass(frozen=True)
class Batch:
    """One micro-batch on one rank: `sequences` of `sequence_length` tokens."""

    sequences: int
    sequence_length: int

    def __post_init__(self) -> None:
        for name in ("sequences", "sequence_length"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)!r}, but it must be at least 1")

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch."""
        return self.sequences * self.sequence_length


@dataclass(frozen=True)
class Unit:
    """Sites that are decided together.

    Attributes:
        name: of the site that says most about it.
        kind: "norm", "linear", "mlp", "attention" or "head".
        layer: None outside of the stack.
        sites: modules that get the choice.
        exact_nbytes: saved per micro-batch if nothing is packed.
        num_elements: values per micro-batch that a choice packs; None where nothing is chosen.
        weight_nbytes: part of `exact_nbytes` that are autocast's casts of weights.
        beside_nbytes: saved in addition to what a choice packs (decisions of routers).
        minimum_bits: fewer are not offered.
        rebuilt_with: a unit whose backward rebuilds this one's tensor if that one is not exact; then nothing is saved
            here, or `input_nbytes` more if this one is exact.
        input_nbytes: see `rebuilt_with`.
        packed: bytes of codes and scales by code, where they are known; else they follow from `num_elements`.
        rebuilds: whether backward needs workspace to rebuild what is inside unless this is exact.
        again_flops: operations that backward does again unless this is exact.
        recompute_flops: the same if this is recomputed.
    """

    name: str
    kind: Literal["norm", "linear", "mlp", "attention", "head"]
    layer: int | None
    sites: tuple[str, ...]
    exact_nbytes: int
    num_elements: int | None
    weight_nbytes: int = 0
    beside_nbytes: int = 0
    minimum_bits: int = 2
    rebuilt_with: str | None = None
    input_nbytes: int = 0
    packed: tuple[tuple[str, int], ...] = ()
    rebuilds: bool = False
    again_flops: float = 0.0
    recompute_flops: float = 0.0

    def packed_nbytes(self, choice: Choice) -> int:
        """Bytes of codes and scales per micro-batch."""
        for code, nbytes in self.packed:
            if code == choice.code:
                return nbytes
        return 0 if self.num_elements is None else choice.packed_nbytes(1, self.num_elements)

    def nbytes(self, choice: Choice) -> int:
        """Bytes on the device per micro-batch in flight."""
        if choice.recompute or choice.offload:
            return self.beside_nbytes
        return self.exact_nbytes if choice.code is None else self.packed_nbytes(choice) + self.beside_nbytes

    def nbytes_beside(self, choice: Choice, other: Choice) -> int:
        """Bytes on the device if `other` is chosen for the unit in `rebuilt_with`."""
        if self.rebuilt_with is None or other == EXACT:
            return self.nbytes(choice)
        return self.exact_nbytes + self.input_nbytes if choice == EXACT else 0

    def host_nbytes(self, choice: Choice) -> int:
        """Bytes in host memory per micro-batch in flight."""
        return self.packed_nbytes(choice) if choice.offload else 0
