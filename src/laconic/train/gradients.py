"""What becomes of gradients between backward and the update: kept dense or in codes, reduced, measured, clipped.

The two kinds answer the same calls, so the loop is the same for both:

- `DenseGradients`: `parameter.grad`; DDP or FSDP2 has reduced them when the last backward ends.
- `StoredGradients`: 8 or 12 bits per element (laconic.gradients.compress_gradients), folded in after each backward and
  reduced as codes, or as FSDP2 does before they are stored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.collectives import operations
from laconic.collectives.codec import Codec
from laconic.formats import quantized_gradient
from laconic.formats.shards import local_part
from laconic.gradients import CompressedGradients, all_reduce_quantized, compress_gradients
from laconic.train.config import TrainConfig
from laconic.train.layout import Layout
from laconic.train.parallel import accumulate, clip_gradients, full_value, gradient_norm
from laconic.train.zipped import zip_codec

__all__ = ["DenseGradients", "Gradients", "StoredGradients", "make_gradients"]


class Gradients(ABC):
    """The gradients of this process's parameters."""

    @abstractmethod
    def last_backward(self, num_backwards: int = 1) -> AbstractContextManager[object]:
        """The context of the last micro-batch of a step, or of all `num_backwards` of a pipeline."""

    @abstractmethod
    def earlier_backward(self) -> AbstractContextManager[object]:
        """The context of a micro-batch before the last."""

    @abstractmethod
    def reduce(self) -> None:
        """Average over the replicas what backward has not averaged yet."""

    @abstractmethod
    def add_copies(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        """Add up the gradients of parameters that each process of `group` has a copy of."""

    @abstractmethod
    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """2-norm of the gradients of `parameters` together, 0-dim, the same on all replicas."""

    @abstractmethod
    def clip(self, norm: Tensor, max_norm: float) -> None:
        """Scale all gradients so that their 2-norm, `norm` now, is at most `max_norm`; 0 leaves them alone."""

    @abstractmethod
    def prepare_update(self) -> None:
        """Put gradients where the optimizer looks for them."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all gradients."""


class DenseGradients(Gradients):
    """Gradients as autograd makes them."""

    def __init__(self, model: nn.Module, codec: Codec | str | None = None) -> None:
        """`model` is plain, or wrapped in DDP or FSDP2, or the parts of a pipeline whose modules are wrapped.

        Copies are added up over `codec`; None means natively.
        """
        self._model = model
        self._codec = codec

    def last_backward(self, num_backwards: int = 1) -> AbstractContextManager[object]:
        return accumulate(self._model, last=True)

    def earlier_backward(self) -> AbstractContextManager[object]:
        return accumulate(self._model, last=False)

    def reduce(self) -> None:
        pass

    def add_copies(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = local_part(parameter.grad)
            if self._codec is None:
                dist.all_reduce(gradient, group=group)
            else:
                operations.all_reduce(gradient, group, op="sum", codec=self._codec)

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        return full_value(gradient_norm(parameters))

    def clip(self, norm: Tensor, max_norm: float) -> None:
        clip_gradients(self._model.parameters(), norm, max_norm)

    def prepare_update(self) -> None:
        pass

    def clear(self) -> None:
        self._model.zero_grad(set_to_none=True)


class StoredGradients(Gradients):
    """Gradients in codes; `store` has been put on the model."""

    def __init__(self, store: CompressedGradients, unpack: bool) -> None:
        """`unpack`: whether the optimizer needs dense gradients."""
        self._store = store
        self._unpack = unpack

    def last_backward(self, num_backwards: int = 1) -> AbstractContextManager[object]:
        return self._store.last_micro_batch(num_backwards)

    def earlier_backward(self) -> AbstractContextManager[object]:
        return nullcontext()

    def reduce(self) -> None:
        self._store.reduce()

    def add_copies(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        gradients = [quantized_gradient(parameter) for parameter in parameters]
        present = [gradient for gradient in gradients if gradient is not None]
        if not present:  # the same at both ends: they run the same layers' worth of the same model
            return
        all_reduce_quantized(present, group, average=False).wait()

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        return self._store.norm(counted=parameters)

    def clip(self, norm: Tensor, max_norm: float) -> None:
        if max_norm > 0:
            self._store.scale_((max_norm / (norm.float() + 1e-6)).clamp(max=1.0))

    def prepare_update(self) -> None:
        if self._unpack:
            self._store.dequantize_to_grad()

    def clear(self) -> None:
        self._store.zero_()


def make_gradients(config: TrainConfig, layout: Layout, model: nn.Module) -> Gradients:
    """The gradients of `model` as the configuration asks; all processes call it together.

    `model` is what `DenseGradients` takes, except that with 8 or 12 bits it is not wrapped in DDP.
    """
    if config.gradients.bits == 32:
        return DenseGradients(model, zip_codec(config))
    sharded = config.parallel == "fsdp" and layout.num_replicas > 1
    store = compress_gradients(model, None if sharded else layout.stage_group, bits=config.gradients.bits)
    return StoredGradients(store, unpack=config.optimizer.kind == "adamw")
