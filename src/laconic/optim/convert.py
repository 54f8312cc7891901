"""Converts states of other optimizers to those of AdamW8bit, and back: bitsandbytes' AdamW8bit, torch's AdamW.

An optimizer of torch that was given codes by mistake says so at its next step.

bitsandbytes cuts the flat parameter into blocks, AdamW8bit its rows. Where rows are multiples of 256 long these are the
same blocks, and codes and scales are copied unchanged; elsewhere the conversion rounds moments once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from laconic.errors import FormatError
from laconic.formats.shards import has_inner_tensors, local_part
from laconic.ops import STATE_BLOCK_SIZE, dequantize_dynamic, quantize_dynamic
from laconic.ops.adamw_scalars import LARGEST_GRADIENT
from laconic.ops.dynamic_map import dynamic_map
from laconic.optim.adamw import AdamW8bit
from laconic.optim.moments import (
    BITS_OF_STATES,
    MOMENTS,
    check_state,
    dequantize_moment,
    has_own_blocks,
    is_coded,
    new_state,
    parameter_name,
    placed_like,
    quantize_moment,
    rows_of,
    state_bits,
    unnamed_state_bits,
)
from laconic.options import MOMENT_BLOCK_SIZES, takes

_BNB_NUMBERS = {"exp_avg": "1", "exp_avg_sq": "2"}
# Newer versions of bitsandbytes put tensors one level down in a state dict.
_BNB_NESTED = "__bnb_optimizer_quant_state__"
_BNB_GROUP: dict[str, Any] = {"alpha": 0.0, "t_alpha": None, "t_beta3": None}
_TORCH_GROUP = ("amsgrad", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay")
_ADAMS_RULE = {"caution": False, "corrected_weight_decay": False, "nesterov": False, "bias_correction": True}
"""Options of other packages' Adams, and with which value the update is that of AdamW."""
_BNB_OTHER_RULES = {
    "unorm_vec": "LAMB and LARS scale updates by norms",
    "gnorm_vec": "percentile_clipping limits gradients",
}
_TORCH_DEFAULTS: dict[str, Any] = {
    "amsgrad": False,
    "capturable": False,
    "differentiable": False,
    "decoupled_weight_decay": True,
}

Moments = Mapping[str, Tensor | tuple[Tensor, Tensor]]
"""By name: the moment itself, or codes uint8 [n] and scales fp32 [ceil(n / 256)] in flat blocks of 8 bits."""


def from_adamw_state(optimizer: AdamW8bit, state_dict: Mapping[str, Any]) -> None:
    """Load the state dict of a torch.optim.AdamW (or Adam without weight decay), its moments rounded to codes.

    `optimizer` has the same parameters in the same groups, and in the same order where the two do not name them. The
    moments of a DTensor are DTensors placed as it is, or plain tensors of its global shape, then the same on every
    process. Options of the groups are copied too.

    Raises:
        FormatError: the state does not fit, or has amsgrad; nothing has changed then.
    """
    optimizer.load_state_dict(_from_adamw(optimizer, matched_by_name(optimizer, state_dict)))


def _from_adamw(optimizer: AdamW8bit, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    for group in state_dict["param_groups"]:
        if group.get("amsgrad"):
            raise FormatError("the state was made with amsgrad=True, but AdamW8bit keeps no maximum of second moments")
        if not group.get("decoupled_weight_decay", True) and group["weight_decay"]:
            raise FormatError(
                f"the state is that of an Adam with weight_decay {group['weight_decay']}, which it adds to gradients,"
                " but AdamW8bit decays weights; load a state of torch.optim.AdamW"
            )

    def moments_of(name: str, state: Mapping[str, Any]) -> Moments:
        if set(state) != {"step", *MOMENTS}:
            raise FormatError(
                f"the state of {name} has {', '.join(map(str, state))}, but AdamW's has step, exp_avg and exp_avg_sq"
            )
        for moment in MOMENTS:
            if has_inner_tensors(state[moment]):
                raise FormatError(
                    f"{moment} of {name} is a {type(state[moment]).__name__}, which consists of several tensors, but"
                    " AdamW's moments are plain ones; dequantize() those of another package's optimizer first"
                )
        return {moment: state[moment] for moment in MOMENTS}

    found = _convert(optimizer, state_dict, moments_of, ignored=_TORCH_GROUP)
    for group in state_dict["param_groups"]:
        _refuse_other_rules(group)
    return found


def _refuse_other_rules(group: Mapping[str, Any]) -> None:
    """Refuse the state of an optimizer that keeps Adam's moments and makes other updates of them.

    RAdam's and SparseAdam's states have the same keys; only the groups of torch's Adam and AdamW have amsgrad.
    """
    missing = [name for name in ("amsgrad", "weight_decay") if name not in group]
    others = [f"{name} {group[name]}" for name, value in _ADAMS_RULE.items() if group.get(name, value) != value]
    if missing or others:
        found = f"no {' and no '.join(missing)}" if missing else " and ".join(others)
        raise FormatError(
            f"the state is not that of an AdamW: a parameter group has {found}. AdamW8bit makes other updates of the"
            " same moments than the optimizer of this state (RAdam, SparseAdam, ...); start with fresh moments"
        )


def from_bitsandbytes_state(optimizer: AdamW8bit, state_dict: Mapping[str, Any]) -> None:
    """Load the state dict of a bitsandbytes AdamW8bit, Adam8bit or their 32-bit forms.

    `optimizer` has the same parameters in the same groups, and in the same order where the two do not name them. For
    DTensors every process is given the same state dict, and takes its part. Options of the groups are copied too.

    Raises:
        FormatError: the state does not fit; nothing has changed then.
    """
    optimizer.load_state_dict(_from_bitsandbytes(optimizer, matched_by_name(optimizer, state_dict)))


def _from_bitsandbytes(optimizer: AdamW8bit, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    for group in state_dict["param_groups"]:
        if group.get("alpha"):
            raise FormatError(
                f"the state has alpha {group['alpha']}, that of an AdEMAMix, which adds a slower moment, but AdamW8bit"
                " has none"
            )

    def moments_of(name: str, state: Mapping[str, Any]) -> Moments:
        flat = {**state, **state.get(_BNB_NESTED, {})}
        for key, why in _BNB_OTHER_RULES.items():
            if key in flat:
                raise FormatError(f"the state of {name} has {key}, but AdamW8bit has nothing like it: {why}")
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
            if not torch.equal(
                flat[f"qmap{number}"].cpu(), torch.tensor(dynamic_map(signed).levels, dtype=torch.float32, device="cpu")
            ):
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

    return _convert(optimizer, state_dict, moments_of, ignored=tuple(_BNB_GROUP))


def converted(optimizer: AdamW8bit, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict as the optimizer's own: of torch's AdamW, bitsandbytes or other bits converted, others unchanged."""
    states = [state for state in state_dict["state"].values() if isinstance(state, Mapping)]
    if any("state1" in state or _BNB_NESTED in state for state in states):
        return _from_bitsandbytes(optimizer, state_dict)
    if any(is_coded(state) for state in states) or all(
        "min_8bit_numel" in group for group in state_dict["param_groups"]
    ):
        return _from_other_bits(optimizer, state_dict)
    if any("betas" not in group for group in state_dict["param_groups"]):
        keys = sorted({key for state in states for key in state} or set(state_dict["param_groups"][0]))
        raise FormatError(
            f"the state is not that of an Adam: it has {', '.join(keys)}, but no betas; states of AdamW8bit,"
            " torch.optim.AdamW and bitsandbytes can be loaded"
        )
    return _from_adamw(optimizer, state_dict)


def _from_other_bits(optimizer: AdamW8bit, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict of AdamW8bit with the optimizer's bits: moments in others are rounded to these.

    Groups of 4 bits name them; where a host has left that out, shapes tell them, or the state is refused.
    """
    states = dict(state_dict["state"])
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):  # torch checks them
        if (named := saved.get(BITS_OF_STATES)) is not None and not takes(tuple(MOMENT_BLOCK_SIZES), named):
            raise FormatError(
                f"{BITS_OF_STATES} of a group is {named!r}, but it must be 8 or 4; the state is not whole"
            )
        for index, (parameter, key) in enumerate(zip(group["params"], saved["params"], strict=False)):
            state = states.get(key)
            if not state or not is_coded(state):
                continue
            name = parameter_name(optimizer, group, index)
            bits = named or unnamed_state_bits(name, state, parameter)
            if bits == optimizer.bits:
                continue
            check_state(name, parameter, state, group["min_8bit_numel"], bits)
            fresh = new_state(parameter, 0, optimizer.bits)
            for moment in MOMENTS:
                _fill(name, parameter, moment, fresh, _exact(parameter, state, moment))
            states[key] = {**fresh, "step": state["step"]}
    return {**state_dict, "state": states}


def matched_by_name(optimizer: AdamW8bit, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with its parameters in the optimizer's order, where both name them alike; otherwise unchanged.

    torch's own optimizers match by place also where there are names. Functions of torch.distributed.checkpoint have
    matched already, by the names that are their keys.
    """
    groups, saved_groups = optimizer.param_groups, state_dict["param_groups"]
    if not all("param_names" in group for group in (*groups, *saved_groups)) or len(groups) != len(saved_groups):
        return dict(state_dict)
    saved_keys = [key for group in saved_groups for key in group["params"]]
    saved_names = [name for group in saved_groups for name in group["param_names"]]
    if any(isinstance(key, str) for key in saved_keys):
        keys_of_groups = [group["params"] for group in saved_groups]
    else:
        names = [name for group in groups for name in group["param_names"]]
        if sorted(names) != sorted(saved_names) or len(saved_keys) != len(saved_names):
            missing, unknown = sorted({*names} - {*saved_names}), sorted({*saved_names} - {*names})
            raise FormatError(
                f"the state has no {', '.join(missing[:3]) or 'parameter twice'}, but"
                f" {', '.join(unknown[:3]) or 'another number of parameters'}, which the optimizer does not have;"
                " rename param_names in the state's groups, or delete them to match parameters by their order"
            )
        key_of = dict(zip(saved_names, saved_keys, strict=True))
        keys_of_groups = [[key_of[name] for name in group["param_names"]] for group in groups]
    matched = [
        {**saved, "params": keys, "param_names": list(group["param_names"])}
        for group, saved, keys in zip(groups, saved_groups, keys_of_groups, strict=True)
    ]
    return {**state_dict, "param_groups": matched}


def to_adamw_state(optimizer: AdamW8bit) -> dict[str, Any]:
    """The state dict that a torch.optim.AdamW with the same parameters can load; tensors are copies in fp32.

    Moments have exactly the values of their codes: `from_adamw_state` of the result is the same state, bit for bit.
    Those of a DTensor are DTensors placed as it is. Options of the groups go along, with keys of others.
    """
    saved = optimizer.state_dict()
    states: dict[Any, dict[str, Any]] = {}
    groups = []
    for group, packed in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        options = {name: value for name, value in packed.items() if name not in ("min_8bit_numel", BITS_OF_STATES)}
        groups.append(dict.fromkeys(_TORCH_GROUP, None) | _TORCH_DEFAULTS | options)
        for parameter, key in zip(group["params"], packed["params"], strict=True):
            state = optimizer.state.get(parameter, {})
            if state:
                moments = {moment: _exact(parameter, state, moment) for moment in MOMENTS}
                states[key] = {"step": state["step"].clone(), **moments}
    return {"state": states, "param_groups": groups}


def _exact(parameter: Tensor, state: Mapping[str, Any], moment: str) -> Tensor:
    """A moment in fp32, placed as the parameter is."""
    if not is_coded(state):
        value: Tensor = state[moment].clone()
        return value
    codes, scales = (local_part(state[f"{moment}_{part}"]) for part in ("codes", "scales"))
    exact = dequantize_moment(codes, scales, signed=MOMENTS[moment], shape=local_part(parameter).shape)
    return placed_like(parameter, exact)


def to_bitsandbytes_state(optimizer: AdamW8bit) -> dict[str, Any]:
    """The state dict that a bitsandbytes AdamW8bit with the same parameters can load; tensors are copies.

    DTensors are gathered, so all processes call it together, and each gets the whole state. Moments in 4 bits become
    ones in 8.

    Raises:
        FormatError: the optimizer has maximize=True, which bitsandbytes does not know.
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
            state = optimizer.state.get(parameter, {})
            if not state:
                continue
            tensors = {}
            for moment, signed in MOMENTS.items():
                number = _BNB_NUMBERS[moment]
                if not is_coded(state):
                    tensors[f"state{number}"] = _full(state[moment]).clone()
                    continue
                if optimizer.bits != 8 or has_own_blocks(parameter):
                    exact = _full(_exact(parameter, state, moment)).reshape(1, -1)
                    codes, scales = quantize_dynamic(exact, signed=signed)
                    codes, scales = codes.view(parameter.shape), scales.flatten()
                else:
                    codes, scales = (_full(state[f"{moment}_{part}"]) for part in ("codes", "scales"))
                    codes, scales = _in_flat_blocks(codes, scales, signed)
                tensors[f"state{number}"] = codes
                tensors[f"absmax{number}"] = scales
                tensors[f"qmap{number}"] = torch.tensor(
                    dynamic_map(signed).levels, device=codes.device, dtype=torch.float32
                )
            states[key] = {"step": int(state["step"].item()), _BNB_NESTED: tensors}
    return {"state": states, "param_groups": groups}


def _convert(
    optimizer: AdamW8bit,
    state_dict: Mapping[str, Any],
    moments_of: Callable[[str, Mapping[str, Any]], Moments],
    ignored: tuple[str, ...],
) -> dict[str, Any]:
    """A state dict of AdamW8bit with what `moments_of` finds in each parameter's state."""
    groups = []
    if len(optimizer.param_groups) != len(state_dict["param_groups"]):
        raise FormatError(
            f"the state has {len(state_dict['param_groups'])} parameter groups, but the optimizer has"
            f" {len(optimizer.param_groups)}"
        )
    states: dict[Any, dict[str, Any]] = {}
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        options = {name: value for name, value in saved.items() if name not in ignored}
        groups.append(
            {"maximize": False, "min_8bit_numel": group["min_8bit_numel"]} | options | {BITS_OF_STATES: optimizer.bits}
        )
        for name, parameter, key in _parameters(optimizer, group, saved):
            state = state_dict["state"].get(key)
            if not state:
                continue
            fresh = new_state(parameter, group["min_8bit_numel"], optimizer.bits)
            for moment, value in moments_of(name, state).items():
                _fill(name, parameter, moment, fresh, value)
            fresh["step"].fill_(float(state["step"]))
            states[key] = fresh
    return {"state": states, "param_groups": groups}


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
    whole, bits = not isinstance(found, DTensor), state_bits(fresh, parameter) if is_coded(fresh) else None

    # 1. Codes and scales as they are, or the moment in fp32: of this process if it is a DTensor, else of all.
    codes = scales = exact = None
    if isinstance(value, Tensor):
        exact = local_part(value).float()
    else:
        rows, length = rows_of(parameter.shape)
        codes, scales = value[0], value[1].view(1, -1)
        if bits == 8 and (rows == 1 or length % STATE_BLOCK_SIZE == 0):
            scales = scales.view(rows, -1)
        else:
            exact = dequantize_dynamic(codes.reshape(1, -1), scales, signed=signed).view(parameter.shape)
    if bits is not None and whole and has_own_blocks(parameter, bits):
        if exact is None:
            assert codes is not None
            assert scales is not None
            exact = dequantize_moment(codes, scales, signed=signed)
        exact, whole = _part(exact.to(parameter.device), parameter), False
    if bits is not None and exact is not None and not signed:
        # Of a weight that torch's AdamW has stopped for good; in a block it would stop 256.
        exact = exact.clamp(max=LARGEST_GRADIENT**2)

    # 2. The new state's form.
    if bits is None:
        parts = {moment: exact}
    else:
        if exact is not None and whole and bits == 4:
            # Codes in pairs cannot be cut as the parameter is.
            exact, whole = _part(exact.to(parameter.device), parameter), False
        if exact is not None:
            codes, scales = _quantize_again(exact, signed=signed, bits=bits)
        parts = {f"{moment}_codes": codes, f"{moment}_scales": scales}
    for key, part in parts.items():
        assert part is not None
        _write(fresh[key], part, whole=whole)


def _quantize_again(exact: Tensor, *, signed: bool, bits: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of a moment; those it came from, if it was dequantized from codes.

    The signed map of 8 bits has a level 1, but none at -1: the largest magnitude of a block is a little below its scale
    where it is negative. So for such blocks the scale that this implies is tried, and taken where it gives every value
    exactly.
    """
    codes, scales = quantize_moment(exact, signed=signed, bits=bits)
    if not signed or bits == 4 or exact.numel() == 0:
        return codes, scales
    rows, length = rows_of(exact.shape)
    levels = torch.tensor(dynamic_map(signed).levels, device=exact.device, dtype=torch.float32)
    middles = (levels[1:] + levels[:-1]) / 2
    blocks = F.pad(exact.reshape(rows, length), (0, -length % STATE_BLOCK_SIZE)).view(rows, -1, STATE_BLOCK_SIZE)
    lowest = blocks.amin(-1)
    is_largest = (lowest < 0) & (-lowest >= blocks.amax(-1))
    implied = lowest / levels[0]
    padded_codes = F.pad(codes.reshape(rows, length), (0, -length % STATE_BLOCK_SIZE)).view(blocks.shape).clone()
    for scale in (implied, implied.nextafter(torch.zeros_like(implied)), implied.nextafter(2 * implied)):
        found = torch.bucketize(blocks / scale.unsqueeze(-1), middles)
        fits = is_largest & (levels[found] * scale.unsqueeze(-1) == blocks).all(-1)
        scales[fits] = scale[fits]
        padded_codes[fits] = found[fits].to(torch.uint8)
    return padded_codes.view(rows, -1)[:, :length].reshape(exact.shape), scales


def _write(target: Tensor, value: Tensor, whole: bool) -> None:
    """Copy a plain tensor into a state's: all of it, or what belongs to this process."""
    value = value.to(target.device)
    local_part(target).copy_(_part(value, target) if whole else value)


def _part(value: Tensor, like: Tensor) -> Tensor:
    """What belongs to this process of a plain tensor with the global shape of `like`."""
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None).to_local()


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


def _refuse_codes(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """torch's Adam takes any state dict; with codes in it it would fail at this step with a KeyError."""
    if isinstance(optimizer, torch.optim.Adam) and any(is_coded(state) for state in optimizer.state.values()):
        raise FormatError(
            f"this {type(optimizer).__name__} was given the state of an AdamW8bit, whose moments are codes; load"
            " laconic.optim.to_adamw_state(optimizer) instead"
        )


register_optimizer_step_pre_hook(_refuse_codes)
