"""laconic in loops over Hugging Face's Accelerator, which is also what its Trainer trains with."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import MODEL_NAME, SAFE_MODEL_NAME, DistributedType
from safetensors.torch import load_file
from torch import Tensor, nn

from laconic.activations.whole_model.report import Report
from laconic.collectives.runtime.torch_compat import sent_in_background_nbytes
from laconic.errors import CheckpointError, ConfigError
from laconic.gradients import CompressedGradients
from laconic.gradients.replicas import check_same_settings
from laconic.integrations.config import LaconicConfig, compress, given, hold_gradients, release_gradients, report_of
from laconic.integrations.whole_states import take_whole_states, whole, whole_states
from laconic.moe.huggingface.gradients import clip
from laconic.moe.huggingface.spread import is_cut_otherwise, is_spread, saved_by_host

__all__ = ["Attached", "LaconicConfig", "attach", "attach_anew", "check_fsdp_not_dropped"]

_OF_GRADIENTS = ("prepare_model", "backward")
_OF_EXPERTS = ("get_state_dict", "save_state", "load_state", "clip_grad_norm_", "clip_grad_value_")
"""Functions of an accelerator that are replaced for coded gradients and for spread experts."""
_WITHOUT_GRADIENTS = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM)


@dataclass
class Attached:
    """What `attach` did.

    Attributes:
        model: that was converted.
        gradients: those in codes; None where the host holds them.
        sent_nbytes: bytes this process sent when gradients were last averaged in codes; 0 in one process.
    """

    model: nn.Module
    gradients: CompressedGradients | None = None
    sent_nbytes: int = 0

    @property
    def report(self) -> Report | None:
        """Of the compressed activations; None where they are left exact."""
        return report_of(self.model)


def attach(accelerator: Accelerator, model: nn.Module, config: LaconicConfig | None = None) -> Attached:
    """Convert a model before `accelerator.prepare`, and let the accelerator train it with gradients in codes.

    With `gradients` of 8 or 12 bits, `prepare` does not wrap the model in DistributedDataParallel, and
    `accelerator.backward` averages the gradients over all processes in the last micro-batch of a step
    (`accelerator.sync_gradients`), while backward goes on. `accumulate`, `clip_grad_norm_`, `save_state` and
    `load_state` are used as ever.

    Args:
        accelerator: of one process, or of several with one model each.
        model: not prepared yet.
        config: `optimizer` has to be "host": make `laconic.AdamW8bit` yourself.

    Raises:
        ConfigError: the model is prepared already, the configuration asks for an optimizer, or `gradients` is not 32
            and the accelerator shards the model, leaves training to DeepSpeed or Megatron-LM, or was attached to
            another model in the same way; or the processes' configurations differ, or Accelerate has left FSDP out
            (`check_fsdp_not_dropped`).
        ModelError: the model cannot be converted.
    """
    config = given(config)
    if config.optimizer != "host":
        raise ConfigError(
            f"optimizer is {config.optimizer!r}, but a loop of your own makes its optimizer itself; write "
            "laconic.AdamW8bit(model.parameters(), ...) and leave optimizer out"
        )
    if any(model is prepared for prepared in accelerator._models):
        raise ConfigError("the model has been prepared already; call attach before accelerator.prepare")
    taken = getattr(accelerator.backward, "laconic_model", model)
    if config.gradients != 32 and taken is not model:
        raise ConfigError(
            f"gradients is {config.gradients}, but the accelerator averages those of another {type(taken).__name__} "
            "already; make an Accelerator for each model"
        )
    return attach_anew(accelerator, model, config)


def attach_anew(accelerator: Accelerator, model: nn.Module, config: LaconicConfig) -> Attached:
    """Do what `attach` does, also with a model that was evaluated or trained before, in place of an earlier one.

    Raises:
        ConfigError, ModelError: as `attach`.
    """
    check_fsdp_not_dropped(accelerator.state)
    if accelerator.unwrap_model(model) is not model or is_cut_otherwise(model):
        raise ConfigError(
            "the model is wrapped or sharded already (evaluating before training does so, too); convert it before"
        )
    if config.gradients != 32 and accelerator.distributed_type in _WITHOUT_GRADIENTS:
        raise ConfigError(
            f"gradients is {config.gradients}, but {accelerator.distributed_type.value} holds and reduces gradients "
            "itself; leave gradients at 32, or train one model per process"
        )
    world = dist.group.WORLD if accelerator.num_processes > 1 else None
    if world is not None:
        check_same_settings(asdict(config), world)
    for name in (*_OF_GRADIENTS, *_OF_EXPERTS):  # those of an earlier model
        if hasattr(accelerator.__dict__.get(name), "laconic_model"):
            delattr(accelerator, name)
    # Accelerate wraps nothing that it has prepared before, be it for evaluation: replicas would train each on its own.
    if accelerator.num_processes > 1 and getattr(model, "_is_accelerate_prepared", False):
        model._is_accelerate_prepared = False
    if is_spread(model):
        if config.gradients != 32:
            raise ConfigError(
                f"gradients is {config.gradients}, but experts that are spread over processes are reduced over others"
                " than the rest; leave gradients at 32"
            )
        _check_spread(accelerator)
        saved_by_host(model)
        _save_whole(accelerator, model)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        from laconic.integrations import deepspeed

        deepspeed.attach(model, accelerator.state.deepspeed_plugin.deepspeed_config, config)
        return Attached(model)
    compress(model, config)
    attached = Attached(model)
    if config.gradients == 32:
        release_gradients(model)
        return attached
    model.to(accelerator.device)
    attached.gradients = hold_gradients(model, world, config.gradients)
    if world is not None:
        _reduce_in(accelerator, model, attached, attached.gradients)
    return attached


def check_fsdp_not_dropped(state: Any) -> None:
    """Refuse a training that was to be sharded and is not: Accelerate leaves FSDP out, without a word, on CPUs.

    In one process, where nothing could be sharded, it is a UserWarning.

    Raises:
        ConfigError: every one of several processes would hold the whole model.
    """
    # Accelerate sets the variable itself where it is given a plugin, and reads nothing else after that.
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true" or state.distributed_type in _WITHOUT_GRADIENTS:
        return
    found = (
        "FSDP is asked for (by fsdp, a plugin, or ACCELERATE_USE_FSDP, which both set), but Accelerate shards only "
        f"where processes have a GPU or other accelerator, and has left it out ({state.distributed_type.value})"
    )
    if state.num_processes == 1:
        warnings.warn(f"{found}; this one process trains without its settings", stacklevel=2)
        return
    raise ConfigError(
        f"{found}: all {state.num_processes} processes would hold the whole model; leave FSDP out, and unset "
        "ACCELERATE_USE_FSDP, to train as under DDP"
    )


def _check_spread(accelerator: Any) -> None:
    if accelerator.distributed_type in _WITHOUT_GRADIENTS:
        raise ConfigError(
            f"experts are spread over processes, but {accelerator.distributed_type.value} would shard and reduce them"
            " as if each process had all; train under DDP, or, in a loop of your own, call fully_shard of what"
            " parallelize returns"
        )
    if accelerator.scaler is not None:
        raise ConfigError(
            "mixed_precision is 'fp16', whose GradScaler would leave out a step on some processes only, since they have"
            " other experts; take 'bf16'"
        )


def _save_whole(accelerator: Any, model: nn.Module) -> None:
    """Let an accelerator save, load and clip spread experts as one process that has all of them does."""
    get_state_dict, save_state = accelerator.get_state_dict, accelerator.save_state
    load_state, clip_grad_norm_ = accelerator.load_state, accelerator.clip_grad_norm_

    def optimizers() -> list[Any]:
        return [getattr(one, "optimizer", one) for one in accelerator._optimizers]

    def gathered(saved: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return whole(get_state_dict(saved, *args, **kwargs))

    def save(*args: Any, **kwargs: Any) -> Any:
        with whole_states(optimizers()):
            return save_state(*args, **kwargs)

    def load(*args: Any, **kwargs: Any) -> Any:
        for optimizer in optimizers():
            take_whole_states(optimizer)
        hook = accelerator.register_load_state_pre_hook(_load_models)
        try:
            return load_state(*args, **kwargs)
        finally:
            hook.remove()

    def clip_all(parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        if norm_type != 2:
            return clip_grad_norm_(parameters, max_norm, norm_type)
        accelerator.unscale_gradients()
        return clip([parameters] if isinstance(parameters, nn.Parameter) else [*parameters], max_norm)

    def clip_values(parameters: Any, clip_value: float) -> None:
        accelerator.unscale_gradients()
        torch.nn.utils.clip_grad_value_(parameters, clip_value, foreach=False)  # which cannot mix tensors and DTensors

    functions: tuple[Callable[..., Any], ...] = (gathered, save, load, clip_all, clip_values)
    for name, function in zip(_OF_EXPERTS, functions, strict=True):
        function.laconic_model = model  # type: ignore[attr-defined]
        setattr(accelerator, name, function)


def _load_models(models: list[nn.Module], input_dir: str) -> None:
    """Load models in Accelerate's place, which asks safetensors for the memory of parameters: DTensors have none."""
    for number, model in enumerate(models):
        ending = f"_{number}" if number else ""
        file = Path(input_dir) / f"{SAFE_MODEL_NAME}{ending}.safetensors"
        if file.exists():
            state = load_file(file)
        else:
            state = torch.load(file.with_name(f"{MODEL_NAME}{ending}.bin"), map_location="cpu", weights_only=True)
        tied = {name for part in model.modules() for name in getattr(part, "all_tied_weights_keys", None) or ()}
        missing, unexpected = model.load_state_dict(state, strict=False)
        missing = [name for name in missing if name.removeprefix("module.") not in tied]
        if missing or unexpected:
            raise CheckpointError(
                f"{input_dir} does not fit the model: {', '.join([*missing, *unexpected][:5])} are missing or unknown;"
                " make the model that was saved"
            )
    models.clear()


def _reduce_in(accelerator: Any, model: nn.Module, attached: Attached, gradients: CompressedGradients) -> None:
    prepare_model, backward = accelerator.prepare_model, accelerator.backward

    def prepare(prepared: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        # Evaluation mode is all of it but the wrapping in DDP.
        return (partial(prepare_model, evaluation_mode=True) if prepared is model else prepare_model)(
            prepared, *args, **kwargs
        )

    def reducing(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if not accelerator.sync_gradients:
            backward(loss, *args, **kwargs)
            return
        before = sent_in_background_nbytes()
        with gradients.last_micro_batch():
            backward(loss, *args, **kwargs)
        gradients.reduce()
        attached.sent_nbytes = sent_in_background_nbytes() - before

    own: dict[str, Any] = {"prepare_model": prepare, "backward": reducing}
    for name, function in own.items():
        function.laconic_model = model
        setattr(accelerator, name, function)
