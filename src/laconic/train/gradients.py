"""Gradients between backward and the update: dense or in codes, reduced, measured, clipped.

All kinds have the same methods, so the loop is the same for all:

- `Gradients`: `parameter.grad`; DDP or FSDP2 has reduced them when the last backward ends.
- `PassingGradients`: the same, measured and gone in backward, whose end they do not reach.
- `ExpertParallelGradients`: the same with expert parallelism: gradients of experts are averaged over other groups.
- `OverlappedGradients`: those again, the dense ones averaged while backward of expert layers leaves links idle.
- `StoredGradients`: 8 or 12 bits per element (laconic.gradients.compress_gradients), folded in after each backward and
  reduced as codes, or as FSDP2 does before they are stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from laconic.auditing.comparison import relative_error
from laconic.collectives import api
from laconic.collectives.codec import Blockwise, Codec, Raw
from laconic.formats import BlockFormat, quantized_gradient
from laconic.formats.shards import local_part
from laconic.gradients import CompressedGradients, all_reduce_q8, all_reduce_quantized, compress_gradients
from laconic.gradients.members import Subset
from laconic.moe.huggingface import Parallelized
from laconic.moe.huggingface import gradients as spread
from laconic.moe.parallel.grid import Grid
from laconic.moe.pipeline import grad_reduce
from laconic.moe.pipeline.grad_reduce_fsdp2 import reduce_in_slots
from laconic.moe.pipeline.schedule import ChunkedSchedule
from laconic.train.config.schema import TrainConfig
from laconic.train.distributed.comm_compression import zip_codec
from laconic.train.distributed.data_parallel import plain_model
from laconic.train.distributed.parallel_state import ParallelState

_CODES = BlockFormat("int8", 128)


class Gradients:
    """Gradients as autograd makes them: DDP or FSDP2 has averaged them when the last backward ends.

    Args:
        model: plain, or wrapped in DDP or FSDP2, or the local chunks of a pipeline whose modules are wrapped.
        codec: of the sums over copies of a parameter; None for torch's own.
    """

    def __init__(self, model: nn.Module, codec: Codec | str | None = None) -> None:
        self._model = model
        self._codec = codec

    def last_backward(self, num_backwards: int = 1) -> AbstractContextManager[object]:
        """Context of the last micro-batch of a step, or of all `num_backwards` of a pipeline."""
        return nullcontext()

    def earlier_backward(self) -> AbstractContextManager[object]:
        """Context of a micro-batch before the last, in which DDP does not reduce.

        FSDP2 reduces in each, so that gradients are never held in full.
        """
        return self._model.no_sync() if isinstance(self._model, DistributedDataParallel) else nullcontext()

    def reduce(self) -> None:
        """Average over the replicas the gradients that backward has not averaged yet."""

    def add_copies(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        """Add up the gradients of parameters that each process of `group` has a copy of; a missing one is zero."""
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = local_part(parameter.grad)
            if self._codec is None:
                dist.all_reduce(gradient, group=group)
            else:
                api.all_reduce(gradient, group, op="sum", codec=self._codec)

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """2-norm of the gradients of `parameters` together, 0-dim, the same on all replicas."""
        return _whole(get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None]))

    def clip(self, norm: Tensor, max_norm: float) -> None:
        """Scale all gradients so that their 2-norm, `norm` now, is at most `max_norm`; 0 leaves them alone."""
        if max_norm > 0:
            clip_grads_with_norm_(self._model.parameters(), max_norm, norm)

    def prepare_update(self) -> None:
        """Put gradients where the optimizer reads them."""

    def clear(self) -> None:
        """Drop all gradients."""
        self._model.zero_grad(set_to_none=True)

    @property
    def overlapped_nbytes(self) -> int | None:
        """Bytes of dense gradients that the last backward averaged during expert layers; None without that overlap."""
        return None


class PassingGradients(Gradients):
    """Gradients that an optimizer uses in backward, each as soon as it is whole.

    Make it before the optimizer's `update_in_backward`, whose hooks come after these.

    Args:
        model: plain, or wrapped in FSDP2.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.are_used = True
        """Whether the next backward updates; else it drops gradients, and nothing changes."""
        self._norms: dict[nn.Parameter, Tensor] = {}
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._arrived)

    @torch.no_grad()
    def _arrived(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        self._norms[parameter] = torch.linalg.vector_norm(parameter.grad)
        if not self.are_used:
            parameter.grad = None

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        norms = [self._norms[parameter] for parameter in parameters if parameter in self._norms]
        return _whole(torch.linalg.vector_norm(torch.stack(norms)))

    def clear(self) -> None:
        super().clear()
        self._norms.clear()


class ExpertParallelGradients(Gradients):
    """Gradients of a model with expert parallelism.

    Backward has brought an expert the gradients of all tokens of its EP group. They are added up over the processes
    that have the same experts and divided by the number of all, as FSDP2 has done already when backward ends.

    Args:
        model: plain, or wrapped in DDP or FSDP2.
        grid: which processes have the same experts.
    """

    def __init__(self, model: nn.Module, experts: Parallelized, grid: Grid, config: TrainConfig) -> None:
        super().__init__(model)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._experts = [p for p in experts.experts() if p.requires_grad] if config.parallel == "ddp" else []
        for layer in experts.layers.values():
            layer.averages_under_ddp = False  # `reduce` does it, once for all micro-batches and over a codec
        self._names = {id(p): name for name, p in plain_model(model).named_parameters()}
        self._grid, self._q8 = grid, config.reduce == "q8"
        self._codec: Codec | str = zip_codec(config) or Raw()

    def reduce(self) -> None:
        """Average gradients of experts over the expert-data-parallel group; a missing one counts as zero."""
        for parameter in self._experts:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = local_part(parameter.grad)
            if self._grid.layout.edp == 1:
                gradient.div_(self._grid.layout.dp)
            elif self._q8:
                all_reduce_q8(gradient, self._grid.edp, op="sum").div_(self._grid.layout.dp)
            else:
                api.all_reduce(gradient, self._grid.edp, codec=self._codec).wait()
                gradient.div_(self._grid.layout.dp)

    def reduce_audited(self) -> str | None:
        """`reduce`; some values of each expert's gradient are compared with a plain sum over its replicas."""
        parts = [
            torch.zeros_like(_some(p)) if p.grad is None else _some(local_part(p.grad)).clone() for p in self._experts
        ]
        self.reduce()
        if not parts:
            return None
        expected = torch.cat([part.double() for part in parts])
        if self._grid.layout.edp > 1:
            dist.all_reduce(expected, group=self._grid.edp)
        expected /= self._grid.layout.dp
        tolerance = 2.0**-4 if self._q8 else 1e-3
        for parameter, wanted in zip(self._experts, expected.split([len(part) for part in parts]), strict=True):
            assert parameter.grad is not None
            error, slope = relative_error(_some(local_part(parameter.grad)), wanted, 0.0)
            if not error <= tolerance:
                return (
                    f"the gradient of {self._names[id(parameter)]} is {slope:.3f} times the mean over all processes, "
                    f"off by {error:.2g}"
                )
        return None

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """2-norm in which each expert counts once, whichever process has it."""
        return spread.norm(self._parameters)

    def clip(self, norm: Tensor, max_norm: float) -> None:
        if max_norm > 0:
            spread.scale(self._parameters, norm, max_norm)


class OverlappedGradients(ExpertParallelGradients):
    """The same, the dense ones averaged while chunked expert layers leave the link between nodes idle (FSMoE).

    Args:
        model: wrapped in FSDP2, or else bare.
    """

    def __init__(
        self, model: nn.Module, experts: Parallelized, grid: Grid, config: TrainConfig, group: dist.ProcessGroup
    ) -> None:
        super().__init__(model, experts, grid, config)
        if config.parallel == "fsdp":
            self._dense = grad_reduce.DenseGradients((), None)
            reduce_in_slots(model, self._dense)
        else:
            codec = Blockwise(_CODES) if self._q8 else self._codec
            self._dense = grad_reduce.DenseGradients(experts.dense(), grad_reduce.mean_over(group, codec=codec))
        for layer in experts.layers.values():
            if isinstance(layer.schedule, ChunkedSchedule):
                layer.schedule.gradients = self._dense

    def earlier_backward(self) -> AbstractContextManager[object]:
        return self._dense.no_sync()

    def reduce(self) -> None:
        """Average the dense gradients that backward left over, then those of experts."""
        self._dense.finish()
        super().reduce()

    @property
    def overlapped_nbytes(self) -> int:
        return sum(one.nbytes for one in self._dense.sent if one.slot is not None)


class StoredGradients(Gradients):
    """Gradients in codes.

    Args:
        stores: each has been put on some of the model's parameters.
        unpack: whether the optimizer needs dense gradients.
        divided: the one of `stores` that holds sums.
    """

    def __init__(
        self, stores: Sequence[CompressedGradients], unpack: bool, divided: CompressedGradients | None = None
    ) -> None:
        self._stores = tuple(stores)
        self._unpack = unpack
        self._divided = divided

    @contextmanager
    def last_backward(self, num_backwards: int = 1) -> Iterator[None]:
        with ExitStack() as stack:
            for store in self._stores:
                stack.enter_context(store.last_micro_batch(num_backwards))
            yield

    def earlier_backward(self) -> AbstractContextManager[object]:
        """No context: hooks fold gradients into codes."""
        return nullcontext()

    def reduce(self) -> None:
        for store in self._stores:
            store.reduce()
        if self._divided is not None:
            self._divided.scale_(1 / dist.get_world_size())

    def add_copies(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        gradients = [quantized_gradient(parameter) for parameter in parameters]
        present = [gradient for gradient in gradients if gradient is not None]
        if not present:  # the same at both ends: they run the same layers' worth of the same model
            return
        all_reduce_quantized(present, group, average=False).wait()

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        if len(self._stores) == 1:
            return self._stores[0].norm(counted=parameters)
        return torch.stack([store.norm(counted=parameters) for store in self._stores]).square().sum().sqrt()

    def clip(self, norm: Tensor, max_norm: float) -> None:
        if max_norm > 0:
            for store in self._stores:
                store.scale_((max_norm / (norm.float() + 1e-6)).clamp(max=1.0))

    def prepare_update(self) -> None:
        if self._unpack:
            for store in self._stores:
                store.dequantize_to_grad()

    def clear(self) -> None:
        for store in self._stores:
            store.zero_()


def make_gradients(
    config: TrainConfig, parallel_state: ParallelState, model: nn.Module, experts: Parallelized | None = None
) -> Gradients:
    """The gradients of `model` as the configuration asks; all processes call it together.

    Args:
        model: as in `Gradients`, except that with 8 or 12 bits it is not wrapped in DDP.
    """
    if config.optimizer.update_in_backward:
        return PassingGradients(model)
    grid = None if experts is None else experts.grid
    if config.gradients.bits == 32:
        if experts is None or grid is None:
            return Gradients(model, zip_codec(config))
        if config.moe.overlap_grad_reduce and parallel_state.stage_group is not None:
            return OverlappedGradients(model, experts, grid, config, parallel_state.stage_group)
        return ExpertParallelGradients(model, experts, grid, config)
    sharded = config.parallel == "fsdp" and parallel_state.num_replicas > 1
    group, bits = None if sharded or config.local_steps else parallel_state.stage_group, config.gradients.bits
    unpack = config.optimizer.kind == "adamw"
    if experts is None or grid is None or sharded:
        return StoredGradients([compress_gradients(model, group, bits=bits)], unpack)
    held = Subset(model, experts.experts())
    edp = grid.edp if grid.layout.edp > 1 else None
    sums = compress_gradients(held, edp, bits=bits, average=False)
    return StoredGradients(
        [compress_gradients(Subset(model, experts.dense()), group, bits=bits), sums], unpack, divided=sums
    )


def _whole(norm: Tensor) -> Tensor:
    """A scalar that FSDP2 may have sharded as one plain tensor, the same on each process."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _some(gradient: Tensor) -> Tensor:
    """At most some thousand values of a gradient or parameter, evenly chosen; flat."""
    flat = local_part(gradient.detach()).reshape(-1)
    return flat[:: max(1, len(flat) // 4096)]
