"""Gradients that live in 8 or 12 bits from the moment autograd makes them.

AGoQ keeps the main gradient in 8 bits between micro-batches (arXiv 2605.00539). Here a hook folds each gradient into
codes and frees it, in int8 blocks of 128, optionally with an int4 residual that makes it finer than bf16. Scaling, norm
and clipping work on scales and codes. Ranks that hold the same parameters reduce the codes themselves, while backward
goes on; nothing keeps a full-precision buffer as DDP's buckets do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from laconic.collectives.lane import Work
from laconic.errors import ConfigError, ModelError, TrainingError
from laconic.formats import QuantizedGradient, quantized_gradient, set_quantized_gradient
from laconic.formats.shards import local_part
from laconic.gradients.buckets import Buckets
from laconic.gradients.reduce import all_reduce_quantized
from laconic.gradients.replicas import broadcast_state, check_same_settings

__all__ = ["CompressedGradients", "compress_gradients"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MARK = "_laconic_compresses_gradient"


def compress_gradients(
    model: nn.Module,
    group: dist.ProcessGroup | None = None,
    *,
    bits: int = 8,
    average: bool = True,
    broadcast: bool = True,
    bucket_nbytes: int = 8 << 20,
) -> CompressedGradients:
    """Keep the gradients of a model in 8 or 12 bits, from the next backward on.

    Arguments:
        model: any module, also an nn.ModuleList of pipeline stages or one that fully_shard was applied to; all its
            trainable parameters are float32, bfloat16 or float16. Not a DistributedDataParallel: its buckets keep every
            gradient in full precision, and the returned object reduces by itself.
        group: ranks that hold the same parameters and see different data; `reduce()` averages over them. None: nothing
            is reduced here (one process; or FSDP2, which reduces before the gradient is stored).
        bits: 8 (int8, 1.03 bytes per element) or 12 (int8 + int4 residual, 1.56 bytes; finer than bf16).
        average: divide by the number of ranks; False adds up.
        broadcast: start with the parameters and buffers of the group's first rank, as DDP does.
        bucket_nbytes: gradients of about this many bytes are reduced together.

    `laconic.formats.quantized_gradient(parameter)` finds a gradient; `parameter.grad` is None after each backward.
    Unlike DDP this broadcasts buffers once and not in every forward.

    Raises ModelError for a model that cannot be converted, FormatError for other bits, and ConfigError, on every rank
    alike, when the ranks of `group` differ in settings, parameters or versions.
    """
    _check_model(model, group)
    QuantizedGradient.zeros((0,), bits)  # refuses other bits
    if bucket_nbytes <= 0:
        raise ConfigError(f"bucket_nbytes is {bucket_nbytes}, but it must be positive")
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if group is not None:
        check_same_settings(_settings(parameters, bits, average, bucket_nbytes), group)
        if broadcast:
            broadcast_state(model, group)
    return CompressedGradients(model, parameters, group, bits, average, bucket_nbytes)


class CompressedGradients:
    """The gradients of a model in 8 or 12 bits: what `compress_gradients` returns.

    One step of training, with or without several micro-batches and ranks:

        for batch in micro_batches[:-1]:
            loss(batch).backward()
        with gradients.last_micro_batch():      # optional: reduction starts during this backward
            loss(micro_batches[-1]).backward()
        gradients.reduce()                      # nothing to do without a group
        gradients.scale_(1 / len(micro_batches))
        norm = gradients.clip_(1.0)
        if norm.isfinite():                     # the same on every rank
            optimizer.step()                    # one that reads quantized gradients, or dequantize_to_grad() before
        gradients.zero_()
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: dict[str, nn.Parameter],
        group: dist.ProcessGroup | None,
        bits: int,
        average: bool,
        bucket_nbytes: int,
    ) -> None:
        self.bits = bits
        self.group = group
        self.parameters = parameters
        self._model = model
        self._sharded_by_fsdp = _has_fsdp2(model)
        self._average = average
        self._unreduced = False
        self._buckets = None if group is None else self._make_buckets(bucket_nbytes)
        self._handles = []
        for number, (name, parameter) in enumerate(parameters.items()):
            setattr(parameter, _MARK, True)
            hook = partial(self._arrived, number, name)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    # --- backward ---

    @contextmanager
    def last_micro_batch(self, num_backwards: int = 1) -> Iterator[None]:
        """Let reduction start while the backward inside runs, because no gradient is added to this step after it.

        num_backwards: how many backwards inside reach each parameter (the micro-batches of a pipeline schedule).
        Without a group nothing changes. `reduce()` has to follow.
        """
        if self._buckets is not None:
            self._collect()
            self._buckets.expect(num_backwards)
        yield

    def reduce(self) -> None:
        """Average (or add up) the gradients over the group, in place; the same bytes on every rank.

        Every rank of the group calls it once per step. A parameter without gradient on some ranks counts as zero there;
        one without gradient on all ranks stays without. A block that is NaN or infinite on one rank becomes NaN on all.
        Without a group it returns at once.
        """
        self._collect()
        if self.group is None or self._buckets is None:
            return
        arrived = torch.zeros(len(self.parameters), dtype=torch.uint8)
        for number, parameter in enumerate(self.parameters.values()):
            if quantized_gradient(parameter) is None:
                set_quantized_gradient(parameter, self._zeros(parameter))
            else:
                arrived[number] = 1
        self._buckets.finish()
        arrived = arrived.to(self._device)
        dist.all_reduce(arrived, dist.ReduceOp.MAX, group=self.group)
        missing = {number for number, anywhere in enumerate(arrived.tolist()) if not anywhere}
        for number, parameter in enumerate(self.parameters.values()):
            if number in missing:
                set_quantized_gradient(parameter, None)
        self._buckets.put_last(missing)
        self._unreduced = False

    # --- what an optimizer's step needs ---

    @torch.no_grad()
    def scale_(self, factor: float | Tensor) -> None:
        """Multiply all gradients by a number or a 0-d tensor.

        Exact for powers of two, else each scale is rounded once, by 2**-24 at most. Raises TrainingError while a
        reduction is under way.
        """
        self._collect()
        if self._buckets is not None:
            self._buckets.forget()
        scales: dict[torch.device, list[Tensor]] = {}
        for gradient in self.gradients().values():
            scales.setdefault(gradient.scales.device, []).extend(gradient.all_scales())
        for device, tensors in scales.items():
            torch._foreach_mul_(tensors, factor.to(device, torch.float32) if isinstance(factor, Tensor) else factor)

    @torch.no_grad()
    def norm(self, over: Sequence[dist.ProcessGroup] = (), counted: Iterable[nn.Parameter] | None = None) -> Tensor:
        """The 2-norm of all gradients together, a 0-d fp64 tensor; NaN if any block is broken.

        Computed from codes and scales. Shards of DTensors are added up over their mesh.

        over: further groups whose ranks hold different parameters (pipeline stages); their ranks call together.
        counted: the parameters that count, where another rank counts its copy of the rest; None: all.

        Raises TrainingError, with a group, before `reduce()`.
        """
        self._collect_reduced()
        # Every rank asks its meshes in the same order, also where a parameter has no gradient.
        sums: dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[Tensor]] = {None: []}
        of_interest = None if counted is None else {id(parameter) for parameter in counted}
        for parameter in self.parameters.values():
            if of_interest is not None and id(parameter) not in of_interest:
                continue
            gradient = quantized_gradient(parameter)
            shares = sums.setdefault(_sharded_over(parameter), [])
            if gradient is not None:
                shares.append(gradient.square_sum().to(self._device))
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for sharding, shares in sums.items():
            share = torch.stack(shares).sum() if shares else torch.zeros_like(total)
            if sharding is not None:
                mesh, mesh_dims = sharding
                for mesh_dim in mesh_dims:
                    dist.all_reduce(share, group=mesh.get_group(mesh_dim))
            total += share
        for group in over:
            dist.all_reduce(total, group=group)
        return total.sqrt()

    def clip_(
        self,
        max_norm: float,
        over: Sequence[dist.ProcessGroup] = (),
        counted: Iterable[nn.Parameter] | None = None,
    ) -> Tensor:
        """Scale all gradients down so that their `norm(over, counted)` is at most `max_norm`; returns the norm before.

        The coefficient is torch.nn.utils.clip_grad_norm_'s: min(1, max_norm / (norm + 1e-6)). With a norm that is not
        finite the gradients are of no use afterwards; leave the step out.
        """
        norm = self.norm(over, counted)
        self.scale_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def found_nonfinite(self, over: Sequence[dist.ProcessGroup] = ()) -> bool:
        """Whether any gradient met NaN or infinity, so that this step must be left out; the same on every rank.

        Waits for the device. `clip_` returns a norm that is not finite in the same case.
        """
        return not bool(self.norm(over).isfinite())

    def zero_(self) -> None:
        """Forget all gradients and free their memory, also those in `grad`.

        Raises TrainingError while a reduction is under way.
        """
        if self._buckets is not None:
            self._buckets.forget()
        for parameter in self.parameters.values():
            parameter.grad = None
            set_quantized_gradient(parameter, None)
        self._unreduced = False

    def dequantize_to_grad(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Move gradients to `parameter.grad`, in the parameter's dtype, for an optimizer that knows nothing of codes.

        parameters: some of those compressed here; None: all. One after the other they are dequantized and their codes
        freed. An optimizer per parameter that steps in between keeps the peak at one full-precision gradient.

        Raises TrainingError, with a group, before `reduce()`.
        """
        self._collect_reduced()
        for parameter in self.parameters.values() if parameters is None else parameters:
            gradient = quantized_gradient(parameter)
            if gradient is None:
                continue
            value = gradient.dequantize().to(parameter.dtype)
            if isinstance(parameter, DTensor):
                value = DTensor.from_local(
                    value,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            parameter.grad = value
            set_quantized_gradient(parameter, None)

    # --- looking at it ---

    def gradients(self) -> dict[str, QuantizedGradient]:
        """The gradients there are, by the parameter's name."""
        found = ((name, quantized_gradient(parameter)) for name, parameter in self.parameters.items())
        return {name: gradient for name, gradient in found if gradient is not None}

    @property
    def without_gradient(self) -> list[str]:
        """Names of the parameters that have no gradient at the moment."""
        return [name for name, parameter in self.parameters.items() if quantized_gradient(parameter) is None]

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales that are held now."""
        return sum(gradient.nbytes for gradient in self.gradients().values())

    def remove(self) -> None:
        """Take the hooks off: from now on gradients stay in `grad`. Those that are quantized stay so until `zero_`."""
        for handle in self._handles:
            handle.remove()
        for parameter in self.parameters.values():
            vars(parameter).pop(_MARK, None)
        self._handles.clear()

    def __str__(self) -> str:
        num_elements = sum(local_part(parameter).numel() for parameter in self.parameters.values())
        held = f"{self.nbytes:,} bytes held now for {num_elements:,} elements, float32 takes {4 * num_elements:,}"
        missing = self.without_gradient
        without = f"; without gradient: {', '.join(missing)}" if 0 < len(missing) < len(self.parameters) else ""
        ranks = "" if self.group is None else f", reduced over {self.group.size()} ranks"
        return f"gradients of {len(self.parameters)} parameters in {self.bits} bits{ranks}: {held}{without}"

    # --- inside ---

    @property
    def _device(self) -> torch.device:
        return local_part(next(iter(self.parameters.values()))).device

    def _zeros(self, parameter: Tensor) -> QuantizedGradient:
        local = local_part(parameter)
        return QuantizedGradient.zeros(local.shape, self.bits, local.device)

    def _arrived(self, number: int, name: str, parameter: Tensor) -> None:
        """The hook: fold `parameter.grad` into the stored gradient and free it."""
        self._fold(name, parameter)
        if self._buckets is not None:
            self._buckets.arrived(number, name)

    @torch.no_grad()
    def _fold(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        gradient = _gradient_like(parameter, name)
        stored = quantized_gradient(parameter)
        if stored is None:
            stored = self._zeros(parameter)
        stored.accumulate_(gradient)
        parameter.grad = None
        set_quantized_gradient(parameter, stored)
        self._unreduced = True

    def _collect(self) -> None:
        """Fold gradients that came without a call of the hook, as a pipeline's separate weight backward leaves them."""
        if self._sharded_by_fsdp != _has_fsdp2(self._model):
            raise ModelError(
                "fully_shard was applied after compress_gradients; apply it first, so that shards are stored"
            )
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                self._fold(name, parameter)

    def _collect_reduced(self) -> None:
        self._collect()
        if self._unreduced and self.group is not None:
            raise TrainingError("the gradients of this rank have not been reduced yet; call reduce() first")

    def _make_buckets(self, bucket_nbytes: int) -> Buckets:
        parameters = list(self.parameters.values())

        def reduce(numbers: list[int]) -> Work[None]:
            found = (quantized_gradient(parameters[number]) for number in numbers)
            gradients = [gradient for gradient in found if gradient is not None]
            return all_reduce_quantized(gradients, self.group, average=self._average)

        nbytes = [local_part(parameter).numel() * self.bits // 8 for parameter in parameters]
        return Buckets(nbytes, bucket_nbytes, reduce)


def _gradient_like(parameter: Tensor, name: str) -> Tensor:
    """What this rank holds of parameter.grad, laid out as the parameter is. Raises ModelError if it is sparse."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout != torch.strided:
        raise ModelError(f"the gradient of {name} is sparse, but only dense ones can be compressed; use sparse=False")
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        if gradient.placements != parameter.placements:
            gradient = gradient.redistribute(placements=parameter.placements)
        return gradient.to_local()
    return gradient


def _sharded_over(parameter: Tensor) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """The mesh and its dimensions that a DTensor is sharded over; None for what is whole on this rank."""
    if not isinstance(parameter, DTensor):
        return None
    # Not is_shard(): the strided shards of FSDP2 over tensor parallelism deny it.
    mesh_dims = tuple(at for at, placement in enumerate(parameter.placements) if not placement.is_replicate())
    return (parameter.device_mesh, mesh_dims) if mesh_dims else None


def _has_fsdp2(model: nn.Module) -> bool:
    return any(isinstance(module, FSDPModule) for module in model.modules())


def _check_model(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Raises ModelError for a model whose gradients cannot be compressed."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"model is {type(model).__name__}, but it must be a torch.nn.Module")
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else "the model"
        if isinstance(module, DistributedDataParallel):
            raise ModelError(
                f"{where} is a DistributedDataParallel, whose buckets keep every gradient in full precision; pass the"
                " inner module with group=..., gradients are then reduced here, in few bytes"
            )
        if isinstance(module, FullyShardedDataParallel):
            raise ModelError(f"{where} is a FullyShardedDataParallel of FSDP1; use fully_shard (FSDP2) instead")
        if group is not None and isinstance(module, FSDPModule):
            raise ModelError(f"{where} is sharded by FSDP2, which reduces gradients itself; pass group=None")
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise ModelError(f"{where} makes sparse gradients, but only dense ones can be compressed; use sparse=False")
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        raise ModelError("the model has no parameter that requires a gradient, so there is nothing to compress")
    for name, parameter in trainable:
        if parameter.dtype not in _DTYPES:
            raise ModelError(
                f"parameter {name} is {str(parameter.dtype).removeprefix('torch.')}, but its gradient can be compressed"
                " only from float32, bfloat16 or float16; convert or freeze it"
            )
        if getattr(parameter, _MARK, False):
            raise ModelError(f"the gradient of {name} is compressed already; call remove() on the first result before")


def _settings(parameters: dict[str, nn.Parameter], bits: int, average: bool, bucket_nbytes: int) -> dict[str, object]:
    """What must be equal on all ranks, by name."""
    settings: dict[str, object] = {
        "laconic's version": import_module("laconic").__version__,
        "torch's version": torch.__version__,
        "bits": bits,
        "average": average,
        "bucket_nbytes": bucket_nbytes,
        "the number of trainable parameters": len(parameters),
    }
    for number, (name, parameter) in enumerate(parameters.items()):
        dtype = str(parameter.dtype).removeprefix("torch.")
        settings[f"trainable parameter {number}"] = f"{name} {list(local_part(parameter).shape)} {dtype}"
    return settings
