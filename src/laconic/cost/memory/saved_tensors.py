"""Bytes that each unit of a model saves for backward, under every choice that can be made for it.

A unit is the smallest set of sites that are decided together: a norm with the linears that read it, the pair of gate
and up with the down projection, attention, its output projection. Formulas are those of the code in
`laconic.activations`, so the sum over units is what `SavedTensorTracker` counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from laconic.cost.memory.model_shape import ModelShape
from laconic.errors import PlanError
from laconic.options import CODE_BITS, DEFAULT_CODES, listed

__all__ = [
    "CODE_BITS",
    "EXACT",
    "PRECISIONS",
    "RECOMPUTE",
    "Batch",
    "Choice",
    "Precision",
    "Unit",
    "arguments_nbytes",
    "head_unit",
    "layer_units",
    "loss_nbytes",
    "rotary_nbytes",
]

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
        if not isinstance(entry, dict) or not set(entry) <= {
            "code",
            "block_size",
            "scale_dtype",
            "offload",
            "recompute",
        }:
            raise PlanError(f"site is {entry!r} in the plan, but it must be a format, {{'recompute': true}} or null")
        return cls(**entry)

    @classmethod
    def from_bits(cls, bits: int, block_size: int = 64) -> Choice:
        """The default code of so many bits; 16 keeps exactly.

        Raises:
            PlanError: there is no format of so many bits.
        """
        if bits == 16:
            return EXACT
        if bits not in DEFAULT_CODES:
            raise PlanError(f"bits is {bits!r}, but it must be {listed((*sorted(DEFAULT_CODES), 16))}")
        return cls(DEFAULT_CODES[bits], block_size)


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
        rows: (rows per token, length) of the tensors that a choice packs.
        tokens: of a micro-batch.
        weight_nbytes: part of `exact_nbytes` that does not grow with tokens (casts of weights).
        beside_nbytes: saved in addition to what a choice packs (decisions of routers).
        minimum_bits: fewer are not offered.
        rebuilt_with: a unit whose backward rebuilds this one's tensor if that one is not exact; then nothing is saved
            here, or `input_nbytes` more if this one is exact.
        input_nbytes: see `rebuilt_with`.
        packed: bytes of codes and scales by code, where they are known; else they follow from `rows`.
        rebuilds: whether backward needs workspace to rebuild what is inside unless this is exact; None for what the
            kind says.
        again_flops: operations that backward does again unless this is exact; None for what the kind says.
        recompute_flops: the same if this is recomputed.
    """

    name: str
    kind: Literal["norm", "linear", "mlp", "attention", "head"]
    layer: int | None
    sites: tuple[str, ...]
    exact_nbytes: int
    rows: tuple[tuple[int, int], ...]
    tokens: int
    weight_nbytes: int = 0
    beside_nbytes: int = 0
    minimum_bits: int = 2
    rebuilt_with: str | None = None
    input_nbytes: int = 0
    packed: tuple[tuple[str, int], ...] = ()
    rebuilds: bool | None = None
    again_flops: float | None = None
    recompute_flops: float | None = None

    @property
    def is_feed_forward(self) -> bool:
        """Whether the inside of a feed-forward block, or of experts, is rebuilt in backward unless this is exact."""
        if self.rebuilds is not None:
            return self.rebuilds
        return self.kind == "mlp" or self.beside_nbytes > 0

    @property
    def num_elements(self) -> int:
        """Values per micro-batch that are packed."""
        return self.tokens * sum(count * length for count, length in self.rows)

    def packed_nbytes(self, choice: Choice) -> int:
        """Bytes of codes and scales per micro-batch."""
        for code, nbytes in self.packed:
            if code == choice.code:
                return nbytes
        return sum(choice.packed_nbytes(count * self.tokens, length) for count, length in self.rows)

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


def layer_units(shape: ModelShape, layer: int, batch: Batch, precision: Precision) -> list[Unit]:
    """The units of one decoder layer, in the order of its forward."""
    traits, names, tokens = shape.traits, shape.traits.names, batch.tokens
    at = shape.layer_name(layer)
    attention, mlp = f"{at}.{names.attention}", f"{at}.mlp"
    hidden, ffn, query, key = shape.hidden_size, shape.intermediate_size, shape.query_size, shape.key_size
    qkv_sites = tuple(f"{attention}.{name}" for name in names.qkv)
    gate_up_sites = tuple(f"{mlp}.{name}" for name in names.gate_up)
    gate_up_size = (2 if traits.gated else 1) * ffn
    units: list[Unit] = []

    def norm(name: str, rows: int, length: int, element_nbytes: int = precision.residual_nbytes) -> Unit:
        exact = _norm_nbytes(shape, element_nbytes, tokens * rows, length)
        return Unit(name, "norm", layer, (name,), exact, ((rows, length),), tokens)

    def reads_hidden(norms: Sequence[str], *reads: tuple[tuple[str, ...], int]) -> Unit:
        """The norms in front of blocks and the linears that read them (with their width together), or these alone."""
        linears = [_linears_nbytes(shape, tokens, sites, out_size, precision) for sites, out_size in reads]
        kept, weights = sum(kept for kept, _ in linears), sum(weights for _, weights in linears)
        sites = tuple(site for names, _ in reads for site in names)
        if not norms:
            return Unit(sites[0], "linear", layer, sites, kept, ((1, hidden),), tokens, weights)
        unit = norm(f"{at}.{norms[0]}", 1, hidden)
        # Further norms read the same tensor, which is kept once.
        shared = (len(norms) - 1) * (unit.exact_nbytes - tokens * hidden * precision.residual_nbytes)
        return replace(
            unit,
            sites=(*(f"{at}.{name}" for name in norms), *sites),
            exact_nbytes=unit.exact_nbytes + shared + kept,
            weight_nbytes=weights,
        )

    # 1. Attention, and the input of a feed-forward block beside it.
    to_attention, to_mlp = (qkv_sites, query + 2 * key), (gate_up_sites, gate_up_size)
    if shape.parallel and len(shape.input_norms) == 1:
        sites = (*qkv_sites, *gate_up_sites)
        units.append(reads_hidden(shape.input_norms, (sites, query + 2 * key + gate_up_size)))
    elif shape.parallel:
        units.append(reads_hidden(shape.input_norms, to_attention, to_mlp))
    else:
        units.append(reads_hidden(shape.input_norms[:1], to_attention))
    if traits.qk_norm is not None:
        per_head = traits.qk_norm == "head"
        for name, heads in (("q_norm", shape.num_heads), ("k_norm", shape.num_kv_heads)):
            rows, length = (heads, shape.head_dim) if per_head else (1, heads * shape.head_dim)
            # These norms read what projections give.
            units.append(norm(f"{attention}.{name}", rows, length, precision.compute_nbytes))
    units += _attention_units(shape, layer, batch, precision)
    for name in traits.output_norms[:1]:
        units.append(norm(f"{at}.{name}", 1, hidden))

    # 2. Feed-forward block.
    if traits.experts:
        reads = reads_hidden(shape.input_norms[1:2], ((f"{mlp}.gate",), shape.num_experts))
        return [*units, _with_experts(reads, shape, precision)]
    if not shape.parallel:
        units.append(reads_hidden(shape.input_norms[1:2], to_mlp))
    weights = hidden * ffn * precision.compute_nbytes if precision.autocast else 0
    kept = 4 if traits.gated else 2  # gate, act(gate), up and their product; or one linear's output and its activation
    units.append(
        Unit(
            name=mlp,
            kind="mlp",
            layer=layer,
            sites=(mlp, f"{mlp}.{names.down}"),
            exact_nbytes=kept * tokens * ffn * precision.compute_nbytes + weights,
            rows=((2, ffn),) if traits.gated else ((1, ffn),),
            tokens=tokens,
            weight_nbytes=weights,
        )
    )
    for name in traits.output_norms[1:]:
        units.append(norm(f"{at}.{name}", 1, hidden))
    return units


def _linears_nbytes(
    shape: ModelShape, tokens: int, sites: Sequence[str], out_size: int, precision: Precision
) -> tuple[int, int]:
    """Bytes that linears keep of their shared input [tokens, hidden], and those of them that are casts of weights."""
    copies = len(sites) if precision.autocast else 1
    weights = shape.hidden_size * out_size * precision.compute_nbytes if precision.autocast else 0
    return copies * tokens * shape.hidden_size * precision.compute_nbytes + weights, weights


def _with_experts(unit: Unit, shape: ModelShape, precision: Precision) -> Unit:
    """The norm and router of a mixture of experts with its experts, which run again in backward if they are packed.

    The experts are Hugging Face's, grouped: one row for each choice of a token, in the dtype of the residual stream.
    """
    tokens, chosen, element = unit.tokens, shape.experts_per_token, precision.residual_nbytes
    rows = tokens * chosen
    # The router's probabilities, what it chose, and the sum by which weights are divided.
    decided = tokens * (4 * shape.num_experts + 8 * chosen + 4 + 4 * chosen)
    # Of each row: input, gate and up in one, activation, product, output, weight; three indices. And ends of groups.
    experts = rows * ((2 * shape.hidden_size + 4 * shape.intermediate_size) * element + 4 + 3 * 8)
    experts += 4 * shape.num_experts
    block = unit.sites[-1].rpartition(".")[0]
    return replace(
        unit,
        sites=(*unit.sites, f"{block}.experts"),
        exact_nbytes=unit.exact_nbytes + decided + experts,
        beside_nbytes=decided + rows * 4,  # the weights once more
    )


def head_unit(shape: ModelShape, batch: Batch, precision: Precision, chunked: bool = False) -> Unit:
    """The final norm and the output projection; below 8 bits the latter's gradient suffers (docs/activations.md).

    With a chunked loss the projection's input is kept by the loss.
    """
    hidden = shape.hidden_size
    weights = hidden * shape.vocab_size * precision.compute_nbytes if precision.autocast and not chunked else 0
    read = 0 if chunked else batch.tokens * hidden * precision.compute_nbytes
    names = shape.traits.names
    return Unit(
        name=names.final_norm,
        kind="head",
        layer=None,
        sites=(names.final_norm, names.head),
        exact_nbytes=_norm_nbytes(shape, precision.residual_nbytes, batch.tokens, hidden) + read + weights,
        rows=((1, hidden),),
        tokens=batch.tokens,
        weight_nbytes=weights,
        minimum_bits=8,
    )


def _norm_nbytes(shape: ModelShape, element_nbytes: int, rows: int, length: int) -> int:
    """Bytes that autograd saves of a norm.

    Of a Hugging Face RMS norm: fp32 input, normalized value, inverse root mean square; of a layer norm its input, the
    mean and the inverse standard deviation.
    """
    if shape.traits.norm == "layer":
        return rows * (length * element_nbytes + 2 * element_nbytes)
    normalized = element_nbytes if shape.traits.norm == "cast" else 4
    extra = length * 4 if shape.traits.norm == "offset" else 0  # 1 + weight in fp32
    return rows * (length * (4 + normalized) + 4) + extra


def _attention_units(shape: ModelShape, layer: int, batch: Batch, precision: Precision) -> list[Unit]:
    """Queries, keys, values, output and log-sum-exp; with `eager` attention the scores as well.

    A choice other than exact keeps packed queries, keys and values by head; the rest is made again in backward. The
    output projection reads what attention holds, or keeps it where attention does not, unless backward makes it again.
    """
    names = shape.traits.names
    tokens, element, name = batch.tokens, precision.compute_nbytes, f"{shape.layer_name(layer)}.{names.attention}"
    query, key = shape.query_size, shape.key_size
    masked = _masked(shape, batch, layer)
    spread = query if masked or shape.traits.eager else key  # with a mask keys and values are repeated for all heads
    weights = query * shape.hidden_size * element if precision.autocast else 0
    exact = tokens * (query + 2 * spread) * element
    if shape.traits.eager:
        # tanh of the scores if they are capped, their softmax in fp32 and, if that is another dtype, rounded.
        per_score = (element if shape.softcap else 0) + 4 + (element if element != 4 else 0)
        exact += tokens * shape.num_heads * batch.sequence_length * per_score
    else:
        exact += tokens * (query * element + 4 * shape.num_heads)
    if masked and not shape.traits.eager:
        exact += tokens * batch.sequence_length * element  # the mask as numbers, made anew by each call
    if shape.traits.fused_qkv and not masked:
        exact += tokens * (query + key) * element  # values are a view of the fused projection
    core = Unit(
        name=name,
        kind="attention",
        layer=layer,
        sites=(name,),
        exact_nbytes=exact,
        rows=((shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim),),
        tokens=tokens,
    )
    held = not (shape.traits.eager or shape.traits.attention_copies)
    read = tokens * query * element
    output = Unit(
        name=f"{name}.{names.output}",
        kind="linear",
        layer=layer,
        sites=(f"{name}.{names.output}",),
        exact_nbytes=weights if held else read + weights,
        rows=() if held else ((1, query),),
        tokens=tokens,
        weight_nbytes=weights,
        rebuilt_with=name,
        input_nbytes=read if held else 0,
    )
    return [core, output]


def loss_nbytes(shape: ModelShape, batch: Batch, precision: Precision, chunked: bool) -> int:
    """Bytes that the loss saves: log-probabilities in fp32 and labels, with capped logits the tanh as well.

    Computed in chunks: the hidden states, a log-sum-exp per token and labels.
    """
    if chunked:
        return batch.tokens * (shape.hidden_size * precision.compute_nbytes + 4 + 8) + 8
    capped = shape.vocab_size * precision.compute_nbytes if shape.logit_softcap else 0
    return batch.tokens * (4 * shape.vocab_size + capped + 8) + 4


def rotary_nbytes(shape: ModelShape, batch: Batch, precision: Precision, layers: Sequence[int]) -> int:
    """The cosine and sine that all attention modules of a stage share; in some families a pair per kind of layer."""
    element = 4 if shape.traits.wide_rotary else precision.residual_nbytes
    assert shape.rotary_size is not None
    kinds = len({layer in shape.full_layers for layer in layers}) if shape.traits.layer_rotary else 1
    return 2 * batch.sequence_length * shape.rotary_size * element * kinds


def arguments_nbytes(shape: ModelShape, batch: Batch, precision: Precision, layers: Sequence[int]) -> int:
    """Bytes of the arguments besides tensors of attention that runs again in backward, shared by the layers of a stage.

    Positions, and the mask: none for plain causal attention, one of bools that all sequences share for a sliding
    window, for eager attention one of numbers for each sequence and each of the two kinds of layers (Gemma2).
    """
    square = batch.sequence_length**2
    masked = any(_masked(shape, batch, layer) for layer in layers)
    eager = 2 * batch.sequences * square * precision.residual_nbytes
    mask = eager if shape.traits.eager else square if masked else 0
    return mask + 8 * batch.sequence_length


def _masked(shape: ModelShape, batch: Batch, layer: int) -> bool:
    window = shape.window_of(layer)
    return window is not None and window < batch.sequence_length
