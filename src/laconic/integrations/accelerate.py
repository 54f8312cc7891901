"""laconic in loops over Hugging Face's Accelerator, which is also what its Trainer trains with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from laconic.activations.report import Report
from laconic.errors import ConfigError
from laconic.gradients import CompressedGradients, compress_gradients
from laconic.integrations.config import LaconicConfig, compress

__all__ = ["Attached", "LaconicConfig", "attach"]

_WITHOUT_GRADIENTS = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM)


@dataclass(frozen=True)
class Attached:
    """What `attach` did.

    Attributes:
        report: of the compressed activations; None where they are left exact.
        gradients: those in codes; None where the host holds them.
    """

    report: Report | None
    gradients: CompressedGradients | None


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
        ConfigError: the model is prepared already, the configuration asks for an optimizer, or the accelerator shards
            the model or leaves training to DeepSpeed or Megatron-LM and `gradients` is not 32.
        ModelError: the model cannot be converted.
    """
    config = config or LaconicConfig()
    if config.optimizer != "host":
        raise ConfigError(
            f"optimizer is {config.optimizer!r}, but a loop of your own makes its optimizer itself; write "
            "laconic.AdamW8bit(model.parameters(), ...) and leave optimizer out"
        )
    return _attach(accelerator, model, config)


def _attach(accelerator: Accelerator, model: nn.Module, config: LaconicConfig) -> Attached:
    if getattr(model, "_is_accelerate_prepared", False) or accelerator.unwrap_model(model) is not model:
        raise ConfigError("the model has been prepared already; call attach before accelerator.prepare")
    if config.gradients != 32 and accelerator.distributed_type in _WITHOUT_GRADIENTS:
        raise ConfigError(
            f"gradients is {config.gradients}, but {accelerator.distributed_type.value} holds and reduces gradients "
            "itself; leave gradients at 32, or train one model per process"
        )
    report = compress(model, config)
    if config.gradients == 32:
        return Attached(report, None)
    model.to(accelerator.device)
    group = dist.group.WORLD if accelerator.num_processes > 1 else None
    gradients = compress_gradients(model, group, bits=config.gradients)
    if group is not None:
        _reduce_in(accelerator, model, gradients)
    return Attached(report, gradients)


def _reduce_in(accelerator: Any, model: nn.Module, gradients: CompressedGradients) -> None:
    """Let `gradients` take the place of DDP in an accelerator."""
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
        with gradients.last_micro_batch():
            backward(loss, *args, **kwargs)
        gradients.reduce()

    accelerator.prepare_model, accelerator.backward = prepare, reducing
