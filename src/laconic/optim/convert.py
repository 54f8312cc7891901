"""States of other optimizers as those of AdamW8bit, and back: bitsandbytes' AdamW8bit, torch's AdamW.

bitsandbytes cuts the flat parameter into blocks, AdamW8bit its rows. Where rows are multiples of 256 long these are the
same blocks, and codes and scales are taken over as they are; elsewhere moments are rounded once more on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from laconic.errors import FormatError
from laconic.formats.shards import local_part
from laconic.ops import STATE_BLOCK_SIZE, dequantize_dynamic, quantize_dynamic
from laconic.ops.dynamic_map import dynamic_map
from laconic.optim.adamw import AdamW8bit
from laconic.optim.moments import (
    MOMENTS,
    dequantize_moment,
    is_8bit,
    new_state,
    parameter_name,
    quantize_moment,
    rows_of,
)

__all__ = ["from_adamw_state", "from_bitsandbytes_state", "to_bitsandbytes_state"]

_BNB_NUMBERS = {"exp_avg": "1", "exp_avg_sq": "2"}
# Newer versions of bitsandbytes put tensors one level down in a state dict.
_BNB_NESTED = "__bnb_optimizer_quant_state__"
_BNB_GROUP: dict[str, Any] = {"alpha": 0.0, "t_alpha": None, "t_beta3": None}
_TORCH_GROUP = ("amsgrad", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay")

Moments = Mapping[str, Tensor | tuple[Tensor, Tensor]]
"""By name: the moment itself, or codes uint8 [n] and scales fp32 [ceil(n / 256)] in flat blocks."""


def from_adamw_state(optimizer: AdamW8bit, state_dict: Mapping[str, Any]) -> None:
    """Load the state dict of a torch.optim.AdamW (or Adam without weight decay), its moments rounded to 8 bits.

    `optimizer` has the same parameters in the same groups and order. The moments of a DTensor are DTensors placed as it
    is, or plain tensors of its global shape, then the same on every process. Options of the groups are taken over too.
    Raises FormatError, before anything changed, for a state that does not fit, and for amsgrad.
    """
    for group in state_dict["param_groups"]:
        if group.get("amsgrad"):
            raise FormatError("the state was made with amsgrad=True, but AdamW8bit keeps no maximum of second moments")
        if not group.get("decoupled_weight_decay", True) and group["weight_decay"]:
            raise FormatError(
                f"the state is that of an Adam with weight_decay {group['weight_decay']}, which it adds to gradients,"
                " but AdamW8bit decays weights; load a state of torch.optim.AdamW"
            )

    def moments_of(name: str, state: Mapping[str, Any]) -> Moments:
        if not {"step", *MOMENTS} <= set(state):
            raise FormatError(
                f"the state of {name} has {', '.join(map(str, state))}, but AdamW's has step, exp_avg and exp_avg_sq"
            )
        return {moment: state[moment] for moment in MOMENTS}

    _load(optimizer, state_dict, moments_of, ignored=_TORCH_GROUP)


def from_bitsandbytes_state(optimizer: AdamW8bit, state_dict: Mapping[str, Any]) -> None:
    """Load the state dict of a bitsandbytes AdamW8bit, Adam8bit or their 32-bit forms.

    `optimizer` has the same parameters in the same groups and order. For DTensors every process is given the same state
    dict, and takes its part. Options of the groups are taken over too. Raises FormatError, before anything changed, for
    a state that does not fit.
    """

    def moments_of(name: str, state: Mapping[str, Any]) -> Moments:
        flat = {**state, **state.get(_BNB_NESTED, {})}
        moments: dict[str, Tensor | tuple[Tensor, Tensor]] = {}
        for moment, signed in MOMENTS.items():
            number = _BNB_NUMBERS[moment]
            value = flat.get(f"state{number}")
            if not isinstance(value, Tensor) or "step" not in flat:
                raise FormatError(
                    f"the state of {name} has {', '.join(map(str, flat))}, but bitsandbytes' has step, state1, state2"
                )
            if value.dtype != torch.uint8:
                moments[moment] = value
                continue
            if not torch.equal(flat[f"qmap{number}"].cpu(), torch.tensor(dynamic_map(signed).levels)):
                raise FormatError(f"qmap{number} of {name} is not the dynamic map, but AdamW8bit knows no other")
            scales = flat.get(f"absmax{number}")
            num_blocks = -(-value.numel() // STATE_BLOCK_SIZE)
            if not isinstance(scales, Tensor) or scales.shape != (num_blocks,):
                raise FormatError(
                    f"absmax{number} of {name} must be fp32 ({num_blocks},), one per {STATE_BLOCK_SIZE} elements, as"
                    " bitsandbytes' block-wise optimizers make it"
                )
            moments[moment] = (value, scales)
        return moments

    _load(optimizer, state_dict, moments_of, ignored=tuple(_BNB_GROUP))


def to_bitsandbytes_state(optimizer: AdamW8bit) -> dict[str, Any]:
    """The state dict that a bitsandbytes AdamW8bit with the same parameters can load; tensors are copies.

    DTensors are gathered, so all processes call it together, and each gets the whole state. Raises FormatError for
    maximize=True, which bitsandbytes does not know.
    """
    saved = optimizer.state_dict()
    states: dict[Any, dict[str, Any]] = {}
    groups = []
    for group, packed in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        if group["maximize"]:
            raise FormatError("maximize is True, but bitsandbytes only minimizes; flip the sign of the loss instead")
        options = {name: packed[name] for name in ("lr", "betas", "eps", "weight_decay", "params")}
        groups.append(options | _BNB_GROUP)
        for parameter, key in zip(group["params"], packed["params"], strict=True):
            state = {name: _full(value) for name, value in optimizer.state.get(parameter, {}).items()}
            if not state:
                continue
            tensors = {}
            for moment, signed in MOMENTS.items():
                number = _BNB_NUMBERS[moment]
                if not is_8bit(state):
                    tensors[f"state{number}"] = state[moment].clone()
                    continue
                codes, scales = _in_flat_blocks(state[f"{moment}_codes"], state[f"{moment}_scales"], signed)
                tensors[f"state{number}"] = codes
                tensors[f"absmax{number}"] = scales
                tensors[f"qmap{number}"] = torch.tensor(dynamic_map(signed).levels, device=codes.device)
            states[key] = {"step": int(state["step"].item()), _BNB_NESTED: tensors}
    return {"state": states, "param_groups": groups}


def _load(
    optimizer: AdamW8bit,
    state_dict: Mapping[str, Any],
    moments_of: Callable[[str, Mapping[str, Any]], Moments],
    ignored: tuple[str, ...],
) -> None:
    """Give the optimizer what `moments_of` finds in each parameter's state."""
    groups = []
    if len(optimizer.param_groups) != len(state_dict["param_groups"]):
        raise FormatError(
            f"the state has {len(state_dict['param_groups'])} parameter groups, but the optimizer has"
            f" {len(optimizer.param_groups)}"
        )
    states: dict[Any, dict[str, Any]] = {}
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        options = {name: value for name, value in saved.items() if name not in ignored}
        groups.append({"maximize": False, "min_8bit_numel": group["min_8bit_numel"]} | options)
        for name, parameter, key in _parameters(optimizer, group, saved):
            state = state_dict["state"].get(key)
            if not state:
                continue
            fresh = new_state(parameter, group["min_8bit_numel"])
            for moment, value in moments_of(name, state).items():
                _fill(name, parameter, moment, fresh, value)
            fresh["step"].fill_(float(state["step"]))
            states[key] = fresh
    optimizer.load_state_dict({"state": states, "param_groups": groups})


def _parameters(
    optimizer: AdamW8bit, group: dict[str, Any], saved: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor, Any]]:
    """Name, parameter and key in the state dict of each parameter of a group."""
    if len(group["params"]) != len(saved["params"]):
        raise FormatError(
            f"a parameter group of the state has {len(saved['params'])} parameters, but the optimizer's has"
            f" {len(group['params'])}"
        )
    for index, (parameter, key) in enumerate(zip(group["params"], saved["params"], strict=True)):
        yield parameter_name(optimizer, group, index), parameter, key


def _fill(
    name: str, parameter: Tensor, moment: str, fresh: dict[str, Any], value: Tensor | tuple[Tensor, Tensor]
) -> None:
    """Write a moment into a new state, in the form that the new state has."""
    signed = MOMENTS[moment]
    found = value if isinstance(value, Tensor) else value[0]
    if found.shape != parameter.shape:
        raise FormatError(
            f"{moment} of {name} has shape {tuple(found.shape)}, but the parameter has {tuple(parameter.shape)}"
        )
    if isinstance(found, DTensor) and (not isinstance(parameter, DTensor) or found.placements != parameter.placements):
        raise FormatError(f"{moment} of {name} is a DTensor, but not placed as the parameter is; redistribute it")

    # 1. Codes and scales as they are, or the moment in fp32: of this process if it is a DTensor, else of all.
    codes = scales = exact = None
    if isinstance(value, Tensor):
        exact = local_part(value).float()
    else:
        rows, length = rows_of(parameter.shape)
        codes, scales = value[0], value[1].view(1, -1)
        if is_8bit(fresh) and (rows == 1 or length % STATE_BLOCK_SIZE == 0):
            scales = scales.view(rows, -1)
        else:
            exact = dequantize_dynamic(codes.reshape(1, -1), scales, signed=signed).view(parameter.shape)

    # 2. The new state's form.
    if not is_8bit(fresh):
        parts = {moment: exact}
    else:
        if exact is not None:
            codes, scales = quantize_moment(exact, signed=signed)
        parts = {f"{moment}_codes": codes, f"{moment}_scales": scales}
    for key, part in parts.items():
        assert part is not None
        _write(fresh[key], part, whole=not isinstance(found, DTensor))


def _write(target: Tensor, value: Tensor, whole: bool) -> None:
    """Copy a plain tensor into a state's: all of it, or what belongs to this process."""
    value = value.to(target.device)
    if whole and isinstance(target, DTensor):
        value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None).to_local()
    local_part(target).copy_(value)


def _full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _in_flat_blocks(codes: Tensor, scales: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Copies of codes and scales with blocks along the flat tensor."""
    rows, length = rows_of(codes.shape)
    if rows == 1 or length % STATE_BLOCK_SIZE == 0:
        return codes.clone(), scales.flatten().clone()
    exact = dequantize_moment(codes, scales, signed=signed)
    flat_codes, flat_scales = quantize_dynamic(exact.reshape(1, -1), signed=signed)
    return flat_codes.view(codes.shape), flat_scales.flatten()
