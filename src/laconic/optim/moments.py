"""How the moments of one parameter are stored: in 8 or 4 bits or in fp32, plain or sharded like the parameter.

Blocks of 256 (128 in 4 bits) run along rows, where a row holds the elements that share an index of the first dimension.
FSDP2 cuts that dimension only, so every block lies on one process whatever the world size, and codes and scales are
DTensors with the parameter's own placements: a checkpoint of theirs can be loaded by any number of processes, bit for
bit. Where rows are multiples of 256 long, as in language models, this is the flat order of bitsandbytes. In 4 bits a
byte holds two codes of a row, the last one perhaps one. Tensor parallelism that cuts rows within a block makes blocks
of its own, filled up at each cut; only the same cut can continue those.

What depends on the shape alone is decided by the parameter's global shape, so that all layouts agree on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard

from laconic.errors import FormatError
from laconic.formats.shards import has_inner_tensors, local_part
from laconic.ops import dequantize_dynamic, quantize_dynamic
from laconic.ops.dynamic_map import zero_code
from laconic.options import MOMENT_BLOCK_SIZES

MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""Adam's moments by their names in a state, and whether each has a sign. In codes, <name>_codes and <name>_scales."""

BITS_OF_STATES = "moment_bits"
"""What names, in a group, that its states are of 4 bits: with short rows their codes have the shape of those of 8 bits
of a parameter half as wide. Groups of 8 bits have no such name, as states that were saved before there was one."""

# Shorter rows would spend more on scales than they save; only depthwise convolutions and the like have them.
_MIN_ROW_LENGTH = 16
# A vector shorter than this is a norm or a bias: small, and cut anywhere by FSDP2, also within a block.
_MIN_VECTOR_NUMEL = 1 << 20


def rows_of(shape: torch.Size) -> tuple[int, int]:
    """(rows, length of a row) that the blocks of a tensor of this shape run along; a vector is one row."""
    if len(shape) < 2:
        return 1, shape.numel()
    return shape[0], math.prod(shape[1:])


def parameter_name(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], index: int) -> str:
    """What errors call a parameter: its name, if the optimizer was given named parameters."""
    if "param_names" in group:
        return f"parameter {group['param_names'][index]}"
    number = next(number for number, other in enumerate(optimizer.param_groups) if other is group)
    return f"parameter {index} of group {number}"


def _wants_codes(parameter: Tensor, min_8bit_numel: int) -> bool:
    """Whether the moments of a parameter are kept in codes, which its global shape decides."""
    rows, length = rows_of(parameter.shape)
    smallest = min_8bit_numel if parameter.dim() >= 2 else max(min_8bit_numel, _MIN_VECTOR_NUMEL)
    return rows * length >= smallest and length >= _MIN_ROW_LENGTH


def is_coded(state: Mapping[str, Any]) -> bool:
    """Whether a state holds codes and scales."""
    return "exp_avg_codes" in state


def state_bits(state: Mapping[str, Any], parameter: Tensor) -> int:
    """Of a code of a state that holds codes: in 8 bits they have the parameter's shape, in 4 bits one of their own."""
    return 8 if state["exp_avg_codes"].shape == parameter.shape else 4


def unnamed_state_bits(name: str, state: Mapping[str, Any], parameter: Tensor) -> int:
    """`state_bits` of a state whose group names none: 8, unless shapes say 4; FormatError if they say both."""
    if state["exp_avg_codes"].shape != _shape_kept(parameter, "exp_avg_codes", 4):
        return 8
    if (bits := state_bits(state, parameter)) == 4 and max(_parts_of_row(parameter)) <= MOMENT_BLOCK_SIZES[4]:
        raise FormatError(
            f"the state of {name} has codes of shape {tuple(state['exp_avg_codes'].shape)}: 4-bit moments of this"
            " parameter, or 8-bit moments of one half as wide; if it is of an AdamW4bit, set"
            f" {BITS_OF_STATES!r} to 4 in the state's param_groups, which a flattened optimizer state dict of"
            " torch.distributed.checkpoint loses for an optimizer of 8 bits"
        )
    return bits


def new_state(parameter: Tensor, min_8bit_numel: int, bits: int = 8) -> dict[str, Any]:
    """The state before the first step: both moments zero, on the parameter's device and with its placements.

    "step" is a 0-dim fp32 tensor on the host, as in torch. Codes cannot follow every way to shard, nor several tensors.
    """
    if _wants_codes(parameter, min_8bit_numel):
        _check_one("a parameter", parameter, bits)
    state: dict[str, Any] = {"step": torch.tensor(0.0, dtype=torch.float32, device="cpu")}
    for name, signed in MOMENTS.items():
        if _wants_codes(parameter, min_8bit_numel):
            codes, scales = _zero_moment(local_part(parameter), signed, bits)
            state[f"{name}_codes"], state[f"{name}_scales"] = _placed_like(parameter, codes, scales, bits)
        else:
            state[name] = torch.zeros_like(parameter, dtype=torch.float32, memory_format=torch.contiguous_format)
    return state


def _check_one(name: str, parameter: Tensor, bits: int) -> None:
    if has_inner_tensors(parameter):
        raise FormatError(
            f"{name} of shape {tuple(parameter.shape)} is a {type(local_part(parameter)).__name__}, which consists of"
            f" several tensors, but {bits}-bit moments are those of one; put it into a group with a larger"
            " min_8bit_numel to keep its moments in fp32"
        )


def _zero_moment(part: Tensor, signed: bool, bits: int) -> tuple[Tensor, Tensor]:
    """What `quantize_moment` makes of zeros; a device has nothing to wait for."""
    rows, length = rows_of(part.shape)
    zero = zero_code(signed, bits)
    if bits == 8:
        codes = torch.full(part.shape, zero, dtype=torch.uint8, device=part.device)
    else:
        codes = torch.full((rows, -(-length // 2)), zero << 4 | zero, dtype=torch.uint8, device=part.device)
        if length % 2:
            codes[:, -1] = zero
    return codes, torch.zeros(rows, -(-length // MOMENT_BLOCK_SIZES[bits]), dtype=torch.float32, device=part.device)


def quantize_moment(moment: Tensor, *, signed: bool, bits: int = 8) -> tuple[Tensor, Tensor]:
    """Codes and scales, fp32 [rows, blocks per row], of a plain fp32 tensor.

    Codes are uint8 of the moment's shape; in 4 bits [rows, ceil(length of a row / 2)].
    """
    codes, scales = quantize_dynamic(moment.reshape(rows_of(moment.shape)), signed=signed, bits=bits)
    return codes.view(moment.shape) if bits == 8 else codes, scales


def dequantize_moment(codes: Tensor, scales: Tensor, *, signed: bool, shape: torch.Size | None = None) -> Tensor:
    """The moment, fp32, from plain tensors; `shape` is its own, which codes of 8 bits have too."""
    shape = codes.shape if shape is None else shape
    rows, length = rows_of(shape)
    bits = 8 if codes.shape == shape else 4
    codes = codes.reshape(rows, length) if bits == 8 else codes
    return dequantize_dynamic(codes, scales, signed=signed, bits=bits, length=length).view(shape)


def check_fits(name: str, parameter: Tensor, state: Mapping[str, Any], bits: int) -> None:
    """Check that a parameter, called `name` in the error, still has the shape that its state was made for."""
    key = "exp_avg_codes" if is_coded(state) else "exp_avg"
    found, wanted = state[key].shape, _shape_kept(parameter, key, bits)
    if found != wanted:
        raise FormatError(
            f"{name} has shape {tuple(parameter.shape)}, but its moments are of another shape: {key} is {tuple(found)}"
            f" instead of {tuple(wanted)}; make a new optimizer, or delete its state, when a parameter changes its"
            " shape"
        )


def check_state(name: str, parameter: Tensor, state: Mapping[str, Any], min_8bit_numel: int, bits: int) -> None:
    """Check that a loaded state fits a parameter, called `name` in the error, whose moments have so many bits."""
    expected = {"step"} | (
        {f"{moment}_{part}" for moment in MOMENTS for part in ("codes", "scales")} if is_coded(state) else set(MOMENTS)
    )
    if set(state) != expected:
        raise FormatError(
            f"the state of {name} has {', '.join(sorted(map(str, state)))}, but AdamW8bit keeps"
            f" {', '.join(sorted(expected))}; states of torch.optim.AdamW and bitsandbytes can be loaded, no others"
        )
    if is_coded(state):
        _check_one(name, parameter, bits)
    elif _wants_codes(parameter, min_8bit_numel):
        raise FormatError(
            f"the state of {name} is in fp32, but this optimizer keeps it in {bits} bits; convert a state of"
            " torch.optim.AdamW with laconic.optim.from_adamw_state, or set min_8bit_numel above"
            f" {parameter.numel()} to go on in fp32"
        )
    for key, value in state.items():
        if key == "step":
            continue
        shape = tuple(_shape_kept(parameter, key, bits))
        dtype = torch.uint8 if key.endswith("_codes") else torch.float32
        if not isinstance(value, Tensor) or tuple(value.shape) != shape or value.dtype != dtype:
            found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise FormatError(f"{key} of {name} is {found}, but it must be {dtype} {shape}")
        if isinstance(value, DTensor) != isinstance(parameter, DTensor):
            kinds = ["a plain tensor", "a DTensor"]
            raise FormatError(
                f"{key} of {name} is {kinds[isinstance(value, DTensor)]}, but the parameter is"
                f" {kinds[isinstance(parameter, DTensor)]}; load it with"
                " torch.distributed.checkpoint.state_dict.set_state_dict"
            )


def _shape_kept(parameter: Tensor, key: str, bits: int) -> torch.Size:
    """The shape of one tensor of a parameter's state."""
    if key.endswith("_scales"):
        return _shape_by(parameter, MOMENT_BLOCK_SIZES[bits])
    return _shape_by(parameter, 2) if bits == 4 and key.endswith("_codes") else parameter.shape


def _shape_by(parameter: Tensor, size: int) -> torch.Size:
    """Rows, and blocks or bytes of `size` elements in one."""
    return torch.Size((rows_of(parameter.shape)[0], sum(_parts_by(parameter, size))))


def _parts_by(parameter: Tensor, size: int) -> list[int]:
    """How many blocks, or bytes, of `size` elements each process has of a row that they share, in order.

    Tensor parallelism may cut rows within a block. Each process then fills its last block up, as the last one of a row
    always is, so there are more blocks than in an uncut row, and others.
    """
    return [-(-length // size) for length in _parts_of_row(parameter)]


def has_own_blocks(parameter: Tensor, bits: int = 8) -> bool:
    """Whether the blocks of a parameter are those of this way to cut it, and not those of its global shape."""
    lengths = _parts_of_row(parameter)
    return len(lengths) > 1 and any(length % MOMENT_BLOCK_SIZES[bits] for length in lengths[:-1])


def _parts_of_row(parameter: Tensor) -> list[int]:
    """Lengths of the parts of a row on the processes that share it, in order; a row that is not cut is one part."""
    length = rows_of(parameter.shape)[1]
    dim = _along_rows(parameter)
    cuts = [size for placement, size in _placements(parameter) if placement.is_shard(dim)]
    if not cuts:
        return [length]
    num_parts, size = math.prod(cuts), parameter.shape[dim]
    each = -(-size // num_parts)
    sizes = [max(0, min(each, size - each * part)) for part in range(num_parts)]
    return [length // max(size, 1) * part for part in sizes]


def _along_rows(parameter: Tensor) -> int:
    """The dimension whose cuts are cuts of rows; a vector is one row."""
    return 0 if parameter.dim() < 2 else 1


def _placements(parameter: Tensor) -> list[tuple[Placement, int]]:
    """Placement and number of processes for each dimension of a DTensor's mesh."""
    if not isinstance(parameter, DTensor):
        return []
    return list(zip(parameter.placements, parameter.device_mesh.shape, strict=True))


def _placed_like(parameter: Tensor, codes: Tensor, scales: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of the local part as DTensors, if the parameter is one."""
    if not isinstance(parameter, DTensor):
        return codes, scales
    along_rows = _along_rows(parameter)
    followed = True
    placements: list[Placement] = []
    for placement, _ in _placements(parameter):
        if placement.is_shard(along_rows):
            placements.append(Shard(1))
        else:
            # FSDP2 over tensor parallelism makes a placement that has a dimension, but does not count as Shard.
            between_rows = along_rows == 1 and getattr(placement, "dim", None) == 0
            followed = followed and (placement.is_replicate() or between_rows)
            placements.append(placement)
    sizes = (MOMENT_BLOCK_SIZES[bits],) if bits == 8 else (MOMENT_BLOCK_SIZES[bits], 2)
    if not followed or not all(_are_chunks(parameter, size) for size in sizes):
        raise FormatError(
            f"a parameter of shape {tuple(parameter.shape)} is placed as {parameter.placements} on a mesh of shape"
            f" {tuple(parameter.device_mesh.shape)}, but {bits}-bit moments follow shards of dimension 0, and those of"
            " dimension 1 that are equal or cut once; shard dimension 0, or put the parameter into a group with a"
            " larger min_8bit_numel to keep its moments in fp32"
        )
    by_row = tuple(placements)
    coded = (parameter.shape, parameter.placements) if bits == 8 else (_shape_by(parameter, 2), by_row)
    blocks = _shape_by(parameter, MOMENT_BLOCK_SIZES[bits])
    return _distributed(parameter, codes, *coded), _distributed(parameter, scales, blocks, by_row)


def placed_like(parameter: Tensor, moment: Tensor) -> Tensor:
    """The local part of a moment as a DTensor, if the parameter is one."""
    if not isinstance(parameter, DTensor):
        return moment
    return _distributed(parameter, moment, parameter.shape, parameter.placements)


def _distributed(parameter: DTensor, local: Tensor, shape: torch.Size, where: tuple[Placement, ...]) -> DTensor:
    mesh = parameter.device_mesh
    return DTensor.from_local(local, mesh, where, run_check=False, shape=shape, stride=_strides(shape))


def _are_chunks(parameter: Tensor, size: int) -> bool:
    """Whether parts of a row, and their blocks of `size`, are what torch makes of it: equal, but for the last ones."""
    lengths = _parts_of_row(parameter)
    num_cuts = sum(placement.is_shard(_along_rows(parameter)) for placement, _ in _placements(parameter))
    if num_cuts > 1 and len(set(lengths)) > 1:  # torch cuts the parts of one dimension of the mesh again
        return False
    blocks = _parts_by(parameter, size)
    each = -(-sum(blocks) // len(blocks))
    return blocks == [max(0, min(each, sum(blocks) - each * part)) for part in range(len(blocks))]


def _strides(shape: torch.Size) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
