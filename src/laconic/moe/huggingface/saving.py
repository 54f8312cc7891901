"""save_pretrained for a model whose experts are on several processes."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from laconic.errors import CheckpointError
from laconic.moe.huggingface.apart import own_names


def gathered_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict as before any sharding, on the CPU of global rank 0; empty elsewhere.

    All processes call it. Tensors are gathered one after the other.
    """
    main = dist.get_rank() == 0
    gathered: dict[str, Tensor] = {}
    names = own_names(model)
    for name, tensor in model.state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if main and name in names:
            gathered |= {one: part.detach().cpu().clone() for one, part in zip(names[name], whole, strict=True)}
        elif main:
            gathered[name] = whole.detach().cpu()
    return gathered


def save_gathered(model: nn.Module, stages: int = 1) -> None:
    """Let all processes call `save_pretrained` of `model` and its parts together; rank 0 writes what one would.

    They take the same arguments; with `state_dict`, nothing is gathered. PEFT's models save adapters, of which every
    process has all: rank 0 writes those, whoever else calls. The calls raise CheckpointError everywhere, if writing
    fails or the model is one of several pipeline stages.
    """
    for part in model.modules():
        if hasattr(type(part), "save_pretrained"):
            save = _SaveAdapters(part) if hasattr(type(part), "get_base_model") else _SaveGathered(part, stages)
            part.__dict__["save_pretrained"] = save


class _SaveAdapters:
    """Saves adapters on rank 0."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(
        self, save_directory: str | os.PathLike[str], *args: Any, is_main_process: bool = True, **options: Any
    ) -> None:
        model = self._model
        is_main_process = is_main_process and dist.get_rank() == 0
        trained = [name for name, p in model.named_parameters() if p.requires_grad and isinstance(p, DTensor)]
        if trained:
            raise CheckpointError(
                f"{trained[0]} is trained beside the adapters and cut over processes, which PEFT cannot save; freeze"
                " it, or save all weights with laconic.moe.huggingface.save_sharded"
            )
        type(model).save_pretrained(model, save_directory, *args, is_main_process=is_main_process, **options)


class _SaveGathered:
    """Gathers a model's weights and saves them; a class, so that a copy of the model saves the copy."""

    def __init__(self, model: Any, stages: int) -> None:
        self._model, self._stages = model, stages

    def __call__(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        **options: Any,
    ) -> None:
        model = self._model
        if self._stages > 1:
            raise CheckpointError(
                f"the model is one of {self._stages} pipeline stages, and save_pretrained would write the first only;"
                " use laconic.moe.huggingface.save_sharded, with the names of the whole model in each stage"
            )
        if state_dict is not None:  # gathered already: nothing is sent, so that rank 0 may call alone
            if dist.get_rank() == 0:
                type(model).save_pretrained(model, save_directory, is_main_process, state_dict, **options)
            return
        tensors = gathered_state_dict(model)
        failure: Exception | None = None
        if dist.get_rank() == 0:
            try:
                type(model).save_pretrained(model, save_directory, is_main_process, tensors, **options)
            except Exception as error:  # of any kind: the other ranks must learn of it first
                failure = error
        device = next(model.parameters()).device
        failed = torch.tensor([failure is not None], dtype=torch.int64, device=device)
        dist.all_reduce(failed)
        if failed.item():
            reason = f": {failure}" if failure is not None else " on rank 0, which says why"
            raise CheckpointError(f"{save_directory} could not be saved{reason}") from failure
