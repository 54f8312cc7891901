"""AdamW whose moments take 2 bytes per weight, or 1, instead of 8, and which reads quantized gradients as they are.

docs/optim.md has the format, the bound on the size of a step and the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from laconic.errors import ConfigError, FormatError, TrainingError
from laconic.formats import QuantizedGradient
from laconic.formats.coded_gradient import coded_gradient
from laconic.formats.shards import local_part
from laconic.ops import DTYPES, adamw8bit_multi_
from laconic.ops.adamw_scalars import largest_ratio, widened
from laconic.ops.declarations.adamw import share_memory
from laconic.optim.in_backward import UsedGradient, call_with_gradients
from laconic.optim.moments import BITS_OF_STATES, check_fits, check_state, is_coded, new_state, parameter_name
from laconic.options import MOMENT_BLOCK_SIZES


class _Update(NamedTuple):
    """A parameter that has a gradient in this step."""

    name: str
    parameter: Tensor
    gradient: Tensor | QuantizedGradient


class AdamW8bit(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, 2019) with block-wise 8-bit moments (Dettmers et al., 2022).

    State of a parameter: "step" (0-dim fp32 on the host), and "exp_avg_codes", "exp_avg_sq_codes" (uint8, the
    parameter's shape), "exp_avg_scales", "exp_avg_sq_scales" (fp32, [shape[0], ceil(elements of a row / 256)]); in fp32
    "exp_avg" and "exp_avg_sq". In 4 bits codes are [shape[0], ceil(elements of a row / 2)], and a scale has 128
    elements instead of 256. Those of a DTensor are DTensors, which torch.distributed.checkpoint can save, load and
    reshard.

    Args:
        params: parameters, or groups of them; float32, bfloat16 or float16, plain or DTensor (FSDP2).
        lr, betas, eps, weight_decay: as in torch.optim.AdamW: weight decay is decoupled from the gradient; lr and betas
            may be tensors of one element, which are read in each step.
        maximize: ascend instead of descend.
        foreach, fused: accepted as by torch.optim.AdamW, without effect. On CUDA a step of a group is one launch for
            the parameters of each dtype in any case, or one for each of those that share memory.
        amsgrad, capturable, differentiable: refused when True: there is no maximum of second moments in 8 bits, the
            host reads the number of the step, and autograd does not follow the step's writes.
        min_8bit_numel: parameters with fewer elements keep fp32 moments. So do vectors of less than 2**20 elements
            (norms, biases) and parameters with less than 16 elements per index of their first dimension.
        bits: of a moment, 8 or 4, for all groups; it is no option of a group, and no state dict changes it. Groups
            of 4 bits say so in "moment_bits", so that a state that is loaded tells of which bits its codes are.

    Raises:
        ConfigError: a hyperparameter is out of range.
    """

    bits: int = 8
    _updates_in_backward = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        min_8bit_numel: int = 4096,
        bits: int = 8,
    ) -> None:
        if bits not in MOMENT_BLOCK_SIZES or isinstance(bits, bool | float):
            raise ConfigError(f"bits is {bits!r}, but it must be {' or '.join(map(str, MOMENT_BLOCK_SIZES))}")
        self.bits = bits
        if foreach and fused:
            raise ConfigError("foreach and fused are both True, but they exclude each other; set one of them")
        refused = {"amsgrad": amsgrad, "capturable": capturable, "differentiable": differentiable}
        _check_refused(refused)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "min_8bit_numel": min_8bit_numel,
        }
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        # torch's has only what every optimizer has. Copies of parameters have no hooks.
        return {**super().__getstate__(), "bits": self.bits, "_updates_in_backward": False}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own, as in torch.

        Raises:
            ConfigError: an option is out of range.
        """
        if "bits" in param_group:
            raise ConfigError(
                f"bits is {param_group['bits']!r} in a parameter group, but it is the same for all groups of an"
                " optimizer; give it to the optimizer, or make one for each number of bits"
            )
        _check_group({**self.defaults, **param_group})
        _check_refused(param_group)
        if self.bits != 8 or BITS_OF_STATES in param_group:
            param_group = {**param_group}  # it may be another optimizer's, whose bits stay
            self._name_bits(param_group)
        super().add_param_group(param_group)
        if self._updates_in_backward:
            self._hook_on(len(self.param_groups) - 1)

    def _name_bits(self, group: dict[str, Any]) -> None:
        group.pop(BITS_OF_STATES, None)
        if self.bits != 8:
            group[BITS_OF_STATES] = self.bits

    def update_in_backward(self) -> None:
        """From now on, update a parameter in backward, as soon as it has its gradient, and let go of the gradient.

        So gradients take memory one after the other instead of 2 or 4 bytes per weight. The loop stays as it is:
        `step()` updates what still has a gradient, and `zero_grad()` allows the next backward. Weights have the bits of
        updates after backward. Learning rates and all other options are those at the time of backward.

        What needs all gradients before the update is refused when it reads one, after the updates of that backward:
        accumulation over several backwards, clipping, GradScaler, DistributedDataParallel's reduction, units of FSDP2
        that run twice before backward. A gradient in codes (`compress_gradients`) is refused in backward. Copies of the
        optimizer, by copy or pickle, update in `step()`; so do parameters that are frozen now and trained later.

        Raises:
            ConfigError: it was called before, or a parameter gets its shape in a first forward.
        """
        if self._updates_in_backward:
            raise ConfigError("update_in_backward() was called before, and must be called once only")
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
                    raise ConfigError(
                        f"{parameter_name(self, group, index)} gets its shape in a first forward, and torch allows no"
                        " hook on it before; run the model once before update_in_backward()"
                    )
        self._read: dict[int, tuple[int, dict[str, Any]]] = {}
        """By the number of a group, the backward that has read its options, and what it read."""
        for number in range(len(self.param_groups)):
            self._hook_on(number)
        self._updates_in_backward = True

    def _hook_on(self, number: int) -> None:
        for index, parameter in enumerate(self.param_groups[number]["params"]):
            if not parameter.requires_grad:  # torch refuses hooks on these
                continue
            call_with_gradients(parameter, partial(AdamW8bit._update_one, number=number, index=index), self)

    @torch.no_grad()
    def _update_one(self, parameter: Tensor, number: int, index: int) -> None:
        """Update a parameter that has been at a place of a group; if a host has moved it, `step` will."""
        group = self.param_groups[number] if number < len(self.param_groups) else {"params": []}
        if index >= len(group["params"]) or group["params"][index] is not parameter:
            return
        _check_not_captured()
        backward = torch._C._current_graph_task_id()
        if backward == -1 or self._read.get(number, (-1,))[0] != backward:  # an option may be a tensor, to wait for
            self._read[number] = backward, _read_options(group)
        update = self._update_of(group, index)
        if update is None:
            return
        if isinstance(update.gradient, QuantizedGradient):
            raise TrainingError(
                f"the gradient of {update.name} is in codes, which are reduced after backward, but "
                "update_in_backward() has updates made in backward; leave one of both out"
            )
        self._apply([(self._read[number][1], [update])], None)
        gradient = local_part(update.gradient)
        if gradient.is_cuda:  # FSDP2 allocates it on one stream and may run hooks on another
            gradient.record_stream(torch.cuda.current_stream(gradient.device))
        parameter.grad = UsedGradient(parameter, by=self, dtype=gradient.dtype)

    @property
    def state_nbytes(self) -> int:
        """Bytes of all moments on this process."""
        values = chain.from_iterable(state.values() for state in self.state.values())
        return sum(local_part(value).nbytes for value in values if isinstance(value, Tensor) and value.dim() > 0)

    @overload
    def step(self, closure: None = None, *, gradient_factor: Tensor | None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float], *, gradient_factor: Tensor | None = None) -> float: ...

    @torch.no_grad()
    def step(
        self, closure: Callable[[], float] | None = None, *, gradient_factor: Tensor | None = None
    ) -> float | None:
        """Update every parameter that has a gradient; a gradient in codes is read as it is.

        Args:
            closure: evaluates the model again and returns the loss.
            gradient_factor: a 0-dim tensor that every gradient is multiplied by as it is read, such as the coefficient
                of clipping; the gradients themselves stay as they are, and the host does not wait for its value.

        Raises:
            FormatError: a gradient cannot be used, or a parameter has another shape than its moments; nothing has
                changed then.
            TrainingError: a gradient in codes has not been reduced yet.
            ConfigError: a CUDA graph is captured; an option of a group has left its range; `gradient_factor` is given
                to an optimizer that updates in backward.
        """
        _check_not_captured()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if gradient_factor is not None and gradient_factor.dim() != 0:
            raise FormatError(f"gradient_factor has shape {tuple(gradient_factor.shape)}, but it must be 0-dimensional")
        if gradient_factor is not None and self._updates_in_backward:
            raise ConfigError(
                "gradient_factor is given, but update_in_backward() has updates made before it is known; leave one out"
            )
        if isinstance(gradient_factor, DTensor):
            gradient_factor = gradient_factor.full_tensor()
        found = [(group, list(self._updates(group))) for group in self.param_groups]
        # Backward has read the options of a group that it has updated.
        work = [(_read_options(one), updates) for one, updates in found if updates or not self._updates_in_backward]
        self._apply(work, gradient_factor)
        return loss

    def _apply(self, work: list[tuple[dict[str, Any], list[_Update]]], gradient_factor: Tensor | None) -> None:
        """Make updates with the options of their groups, as `_read_options` gives them."""
        for group, updates in work:
            for update in updates:
                if not self.state[update.parameter]:
                    self.state[update.parameter] = new_state(update.parameter, group["min_8bit_numel"], self.bits)
        for group, updates in work:
            self._step_coded(group, [u for u in updates if is_coded(self.state[u.parameter])], gradient_factor)
            rest = [u for u in updates if not is_coded(self.state[u.parameter])]
            for some in [[u] for u in rest] if self._is_shared(rest) else [rest]:
                self._step_fp32(group, some, gradient_factor)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of an AdamW8bit returned; tensors are copied.

        States of torch.optim.AdamW (or Adam without weight decay) and of bitsandbytes are converted, as
        laconic.optim.from_adamw_state and from_bitsandbytes_state do: moments larger than `min_8bit_numel` are rounded
        to codes. So are those of an AdamW8bit with other `bits`. Where the state and this optimizer name parameters
        (`param_names`), these are matched by name.

        Raises:
            FormatError: the state does not fit, or belongs to another optimizer; nothing has changed then.
        """
        if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
            found = sorted(state_dict) if isinstance(state_dict, Mapping) else type(state_dict).__name__
            raise FormatError(f"the state dict is {found}, but it must have state and param_groups")
        if not isinstance(state_dict["state"], Mapping):
            raise FormatError(f"state is a {type(state_dict['state']).__name__}, but it must map parameters to states")
        checked: dict[Tensor, dict[str, Any]] = {}

        def check(_: torch.optim.Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            from laconic.optim.convert import converted, matched_by_name  # converters know this class

            loaded = converted(self, matched_by_name(self, loaded))
            for group, saved in zip(self.param_groups, loaded["param_groups"], strict=False):
                _check_refused(saved, FormatError)
                _check_group({**self.defaults, **saved}, lowest_lr=-math.inf)  # as in a step
                for index, (parameter, key) in enumerate(zip(group["params"], saved["params"], strict=False)):
                    state = loaded["state"].get(key)
                    if state:
                        min_8bit_numel = saved.get("min_8bit_numel", group["min_8bit_numel"])
                        check_state(parameter_name(self, group, index), parameter, state, min_8bit_numel, self.bits)
                        checked[parameter] = state
            return loaded

        # The last of the hooks, so that it sees what is going to be loaded.
        handle = self.register_load_state_dict_pre_hook(check)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        # torch has cast every tensor to the parameter's dtype, which is no good for codes and scales.
        for parameter, state in checked.items():
            for key, value in state.items():
                step = key == "step"
                fresh = torch.as_tensor(value, dtype=torch.float32) if step else value
                self.state[parameter][key] = fresh.detach().to(device="cpu" if step else parameter.device, copy=True)
        for group in self.param_groups:
            for name, default in self.defaults.items():
                group.setdefault(name, default)
            self._name_bits(group)
            # Steps before have had the betas that were saved, whatever the host gives to those that come.
            group.setdefault(BETAS_SEEN, widened(None, *map(_number, group["betas"])))

    def _updates(self, group: Mapping[str, Any]) -> Iterator[_Update]:
        """The parameters of a group that have a gradient, each checked."""
        for index in range(len(group["params"])):
            update = self._update_of(group, index)
            if update is not None:
                yield update

    def _update_of(self, group: Mapping[str, Any], index: int) -> _Update | None:
        parameter = group["params"][index]
        dense, coded = parameter.grad, coded_gradient(parameter)
        if isinstance(dense, UsedGradient) and dense.by is not None and dense.by() is not self:
            raise TrainingError(
                f"another optimizer, whose update_in_backward() was called, has used the gradient of "
                f"{parameter_name(self, group, index)} already; let that optimizer go, or give each parameters of its "
                "own, and call zero_grad() before the next backward"
            )
        if dense is None or isinstance(dense, UsedGradient):
            return None
        name = parameter_name(self, group, index)
        if parameter.dtype not in DTYPES:
            raise FormatError(f"{name} is {parameter.dtype}, but it must be float32, bfloat16 or float16")
        if state := self.state.get(parameter):
            check_fits(name, parameter, state, self.bits)
        if coded is None:
            _check_dense(name, parameter, dense)
        else:
            coded.check("read")
        return _Update(name, parameter, dense if coded is None else coded.codes)

    def _step_coded(self, group: Mapping[str, Any], updates: list[_Update], factor: Tensor | None) -> None:
        """One call of the op for the parameters of each device, dtype, kind of gradient and number of the step."""
        batches: dict[Any, list[_Update]] = {}
        is_shared = self._is_shared(updates)
        for number, update in enumerate(updates):
            parameter, gradient = update.parameter, update.gradient
            kind = gradient.bits if isinstance(gradient, QuantizedGradient) else gradient.dtype
            step = self.state[parameter]["step"].item()
            place = number if is_shared else 0
            batches.setdefault((place, parameter.device, parameter.dtype, kind, step), []).append(update)
        for batch in batches.values():
            self._step_batch(group, batch, factor)

    def _is_shared(self, updates: list[_Update]) -> bool:
        """Whether a step writes what another one reads or writes; in one launch they are at the same time."""
        if len({id(self.state[update.parameter]) for update in updates}) < len(updates):
            return True
        dense = [update.gradient for update in updates if isinstance(update.gradient, Tensor)]
        return share_memory([local_part(tensor) for tensor in (*(update.parameter for update in updates), *dense)])

    def _step_batch(self, group: Mapping[str, Any], updates: list[_Update], factor: Tensor | None) -> None:
        states = [self.state[update.parameter] for update in updates]
        parameters = [local_part(update.parameter) for update in updates]
        # A parameter in another order of memory, such as channels_last, is updated in a copy.
        values = [parameter.contiguous() for parameter in parameters]
        quantized = [update.gradient for update in updates if isinstance(update.gradient, QuantizedGradient)]
        if quantized:
            gradients = [gradient.codes for gradient in quantized]
        else:
            gradients = [local_part(u.gradient).contiguous() for u in updates if isinstance(u.gradient, Tensor)]
        beta1, beta2 = group["betas"]
        step = int(states[0]["step"].item()) + 1
        adamw8bit_multi_(
            values,
            _local_parts(states, "exp_avg_codes"),
            _local_parts(states, "exp_avg_scales"),
            _local_parts(states, "exp_avg_sq_codes"),
            _local_parts(states, "exp_avg_sq_scales"),
            gradients,
            [gradient.scales for gradient in quantized],
            [gradient.residual_codes for gradient in quantized if gradient.residual_codes is not None],
            [gradient.residual_scales for gradient in quantized if gradient.residual_scales is not None],
            gradient_factor=None if factor is None else _on(values[0].device, factor),
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=step,
            maximize=group["maximize"],
            bits=self.bits,
            ratio=largest_ratio(group[BETAS_SEEN], step),
        )
        torch._foreach_add_([state["step"] for state in states], 1)
        for parameter, value in zip(parameters, values, strict=True):
            if value is not parameter:
                parameter.copy_(value)
        # Autograd does not see what the op writes; a backward that needs the old weights has to fail, not use the new.
        written = dict.fromkeys([*(update.parameter for update in updates), *parameters])
        torch.autograd.graph.increment_version(tuple(written))

    def _step_fp32(self, group: Mapping[str, Any], updates: list[_Update], factor: Tensor | None) -> None:
        """torch's own AdamW over the parameters with fp32 moments; they are small, so copies in fp32 do no harm."""
        if not updates:
            return
        states = [self.state[update.parameter] for update in updates]
        parameters = [local_part(update.parameter) for update in updates]
        values = [parameter.float() for parameter in parameters]
        gradients = [
            gradient.dequantize() if isinstance(gradient, QuantizedGradient) else local_part(gradient).float()
            for gradient in (update.gradient for update in updates)
        ]
        if factor is not None:
            gradients = [gradient * _on(gradient.device, factor) for gradient in gradients]
        beta1, beta2 = group["betas"]
        adamw(
            values,
            gradients,
            [local_part(state["exp_avg"]) for state in states],
            [local_part(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
        for parameter, value in zip(parameters, values, strict=True):
            if value is not parameter:
                parameter.copy_(value)


class AdamW4bit(AdamW8bit):
    """`AdamW8bit` with `bits=4`: AdamW with block-wise 4-bit moments (Li et al., 2023), of 1.06 bytes per weight.

    Raises:
        ConfigError: a hyperparameter is out of range.
    """

    bits: int = 4

    def __init__(self, *args: Any, bits: int = 4, **kwargs: Any) -> None:
        super().__init__(*args, bits=bits, **kwargs)


OPTIMIZER_CLASSES: dict[str, type[AdamW8bit]] = {"adamw8bit": AdamW8bit, "adamw4bit": AdamW4bit}
"""By the name of an option."""


def _local_parts(states: list[dict[str, Tensor]], key: str) -> list[Tensor]:
    return [local_part(state[key]) for state in states]


def _on(device: torch.device, factor: Tensor) -> Tensor:
    return factor.detach().to(device=device, dtype=torch.float32)


def _check_dense(name: str, parameter: Tensor, gradient: Tensor) -> None:
    if gradient.layout != torch.strided:
        raise FormatError(
            f"the gradient of {name} is sparse, but AdamW8bit reads dense ones; build the layer with sparse=False"
        )
    if gradient.dtype not in DTYPES:
        raise FormatError(f"the gradient of {name} is {gradient.dtype}, but it must be float32, bfloat16 or float16")
    if isinstance(gradient, DTensor) != isinstance(parameter, DTensor) or (
        isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements
    ):
        raise FormatError(
            f"the gradient of {name} is not placed as the parameter is; redistribute it to the parameter's placements"
        )


def _check_group(group: Mapping[str, Any], lowest_lr: float = 0.0) -> None:
    betas, seen = group["betas"], group.get(BETAS_SEEN)
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ConfigError(f"betas is {betas!r}, but it must be two numbers")
    if seen is not None and not (
        isinstance(seen, tuple | list)
        and len(seen) == 4
        and all(isinstance(beta, float | int) and 0 <= beta < 1 for beta in seen)
    ):
        raise ConfigError(f"{BETAS_SEEN} is {seen!r}, but it must be four numbers, each {_BETWEEN}")
    for field, value, low, below in (
        ("lr", group["lr"], lowest_lr, math.inf),
        ("betas[0]", betas[0], 0.0, 1.0),
        ("betas[1]", betas[1], 0.0, 1.0),
        ("eps", group["eps"], 0.0, math.inf),
        ("weight_decay", group["weight_decay"], 0.0, math.inf),
        ("min_8bit_numel", group["min_8bit_numel"], 0.0, math.inf),
    ):
        number = value
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ConfigError(f"{field} is a tensor of shape {tuple(value.shape)}, but it must have one element")
            number = value.item()
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ConfigError(f"{field} is {value!r}, but it must be a number")
        if not (math.isfinite(number) and low <= number < below):
            at_least = "finite" if low < 0 else "finite and at least 0"
            raise ConfigError(f"{field} is {number}, but it must be {at_least if below == math.inf else _BETWEEN}")


BETAS_SEEN = "betas_seen"
"""What a group remembers of the betas of its steps: bounds of moments hold for all of them (adamw_scalars.py)."""


def _read_options(group: dict[str, Any]) -> dict[str, Any]:
    """A group with its options as floats, checked in each step, as schedulers and hosts write to them.

    A rate may pass 0, as with torch's optimizers. A tensor is read here and nowhere else, as the host may wait for it.
    """
    _check_refused(group)
    read = {**group, **{name: _number(group[name]) for name in ("lr", "eps", "weight_decay", "min_8bit_numel")}}
    if isinstance(group["betas"], tuple | list):
        read["betas"] = tuple(map(_number, group["betas"]))
    _check_group(read, lowest_lr=-math.inf)
    group[BETAS_SEEN] = read[BETAS_SEEN] = widened(group.get(BETAS_SEEN), *read["betas"])
    return read


def _number(value: Any) -> Any:
    """The number in a tensor of one element; anything else as it is."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _check_not_captured() -> None:
    if torch.compiler.is_compiling() or not torch.cuda.is_initialized():
        return
    if torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            "AdamW8bit updates while a CUDA graph is captured, whose replays would all repeat the number of this step"
            " and its lr; capture forward and backward only, without update_in_backward(), and call step() after each"
            " replay"
        )


_BETWEEN = "at least 0 and below 1"
_REFUSED = {
    "amsgrad": "AdamW8bit keeps no maximum of second moments; leave it out, or use torch.optim.AdamW",
    "capturable": "AdamW8bit reads the number of the step on the host, which a CUDA graph cannot capture; leave it out",
    "differentiable": "autograd does not follow what AdamW8bit writes; use torch.optim.AdamW to differentiate a step",
}


def _check_refused(group: Mapping[str, Any], error: type[ConfigError | FormatError] = ConfigError) -> None:
    for name, why in _REFUSED.items():
        if group.get(name):
            raise error(f"{name} is {group[name]}, but {why}")
