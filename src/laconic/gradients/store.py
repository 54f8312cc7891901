"""Gradients stored in 8 or 12 bits from the moment autograd makes them.

AGoQ keeps the main gradient in 8 bits between micro-batches (arXiv 2605.00539). Here a hook turns each gradient into
codes, in int8 blocks of 128, optionally with an int4 residual that makes it finer than bf16; `parameter.grad` is then a
tensor made of codes, to which autograd adds the next gradient in one pass. Scaling, norm and clipping work on scales
and codes. Ranks that hold the same parameters reduce the codes themselves, while backward goes on; no full-precision
buffer is kept, as DDP's buckets are. turns.py has the states of a gradient and the uses each allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from laconic.collectives.runtime.group_facts import check_member
from laconic.errors import ConfigError, ModelError, TrainingError
from laconic.formats import QuantizedGradient, quantized_gradient, set_quantized_gradient
from laconic.formats.coded_gradient import coded_gradient
from laconic.formats.shards import local_part, sharded_like
from laconic.gradients.members import Members, check_model
from laconic.gradients.reduction import Reduction, settings_of, zeros_for
from laconic.gradients.replicas import broadcast_state, check_same_settings
from laconic.gradients.turns import Turn, TurnGuard, is_marked_reduced, is_zero, mark_reduced, turn_of
from laconic.ops import DTYPES


def compress_gradients(
    model: nn.Module,
    group: dist.ProcessGroup | None = None,
    *,
    bits: int = 8,
    average: bool = True,
    broadcast: bool = True,
    bucket_nbytes: int = 8 << 20,
) -> CompressedGradients:
    """Keep the gradients of a model in 8 or 12 bits, from now on.

    After backward `parameter.grad` is a tensor made of codes, which torch's optimizers, clip_grad_norm_, GradScaler and
    zero_grad use as any other; `laconic.formats.quantized_gradient(parameter)` finds the codes. With a group any use of
    a gradient before `reduce()` raises TrainingError. Parameters that the model gets later, or that are unfrozen, join.
    Unlike DDP this broadcasts buffers once and not in every forward.

    Args:
        model: any module, also an nn.ModuleList of pipeline stages or one that fully_shard was applied to; all its
            trainable parameters are float32, bfloat16 or float16. Not a DistributedDataParallel: its buckets keep every
            gradient in full precision, and the returned object reduces by itself.
        group: ranks that hold the same parameters and see different data; `reduce()` averages over them. None: nothing
            is reduced here (one process; FSDP2, which reduces before the gradient is stored; or a
            DistributedDataParallel that wraps the model afterwards).
        bits: 8 (int8, 1.03 bytes per element) or 12 (int8 + int4 residual, 1.56 bytes; finer than bf16).
        average: divide by the number of ranks; False adds up.
        broadcast: start with the parameters and buffers of the group's first rank, as DDP does.
        bucket_nbytes: gradients of about this many bytes are reduced together.

    Returns:
        The object that reduces, scales and clips the gradients.

    Raises:
        ModelError: the model cannot be converted.
        FormatError: bits is neither 8 nor 12.
        ConfigError: bucket_nbytes is not positive; or the ranks of `group` differ in settings, parameters or versions,
            which raises on every rank alike.
    """
    check_member(group)
    check_model(model, group)
    QuantizedGradient.zeros((0,), bits)  # refuses other bits
    if bucket_nbytes <= 0:
        raise ConfigError(f"bucket_nbytes is {bucket_nbytes}, but it must be positive")
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if group is not None:
        check_same_settings(settings_of(parameters, bits, average, bucket_nbytes), group)
        if broadcast:
            broadcast_state(model, group)
    return CompressedGradients(model, group, bits, average, bucket_nbytes)


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
            optimizer.step()                    # any; AdamW8bit reads the codes as they are
        gradients.zero_()                       # or zero_grad() of the model or the optimizer
    """

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup | None, bits: int, average: bool, bucket_nbytes: int
    ) -> None:
        self.bits = bits
        self.group = group
        self._members = Members(model, self, self._arrived, group)
        self._reduction = None if group is None else Reduction(group, bits, average, bucket_nbytes)
        self.follow()
        self._collect()

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters whose gradients are kept here, by name."""
        return self._members.parameters

    @property
    def has_group(self) -> bool:
        """Whether gradients are reduced here."""
        return self.group is not None

    @property
    def state(self) -> str:
        """State of the step: "empty", "accumulating", "reducing" (`reduce()` has to follow), "reduced" or "failed".

        Without a group gradients are "accumulating" until they are zeroed, and may be used at any time.
        """
        if self._reduction is not None and self._reduction.is_under_way:
            return "failed" if self._reduction.buckets.has_failed else "reducing"
        present = [parameter for parameter in self.parameters.values() if parameter.grad is not None]
        if not present:
            return "empty"
        return "accumulating" if self.group is None or any(map(_is_local, present)) else "reduced"

    # --- backward ---

    @contextmanager
    def last_micro_batch(self, num_backwards: int = 1) -> Iterator[None]:
        """Let reduction start while the backward inside runs, because no gradient is added to this step after it.

        Without a group nothing changes. `reduce()` has to follow; or `zero_()`, on every rank, which gives the step up.
        If the inside raises, `zero_()` is the only way on.

        Args:
            num_backwards: how many backwards inside reach each parameter (the micro-batches of a pipeline schedule),
                at least 1.

        Raises:
            ConfigError: num_backwards is no integer of at least 1.
        """
        if isinstance(num_backwards, bool) or not isinstance(num_backwards, int) or num_backwards < 1:
            raise ConfigError(
                f"num_backwards is {num_backwards!r}, but it must be an integer of at least 1: the backwards inside "
                "that reach each parameter"
            )
        if self._reduction is None:
            yield
            return
        self._collect()
        self._reduction.buckets.expect(num_backwards)
        try:
            yield
        except BaseException:
            self._reduction.buckets.fail()
            raise

    def reduce(self) -> None:
        """Average (or add up) the gradients over the group, in place; the same bytes on every rank.

        Every rank of the group calls it once per step. A parameter without gradient on some ranks counts as zero there;
        one without gradient on all ranks stays without. A block that is NaN or infinite on one rank becomes NaN on all.
        Without a group it returns at once.

        Raises:
            TrainingError: there is nothing to reduce because all gradients have been reduced, or a rank gave the step
                up; raised on every rank alike.
            ConfigError: the ranks' parameters have become different.
        """
        self._collect()
        if self._reduction is not None:
            self._reduction.run()

    # --- scaling, norm, clipping ---

    @torch.no_grad()
    def scale_(self, factor: float | Tensor) -> None:
        """Multiply all gradients by a number or a 0-d tensor.

        Exact for powers of two, else each scale is rounded once, by 2**-24 at most.

        Raises:
            TrainingError: a reduction is under way.
        """
        self._collect()
        self._check_not_reducing()
        scales: dict[torch.device, list[Tensor]] = {}
        for gradient in self.gradients().values():
            scales.setdefault(gradient.scales.device, []).extend(gradient.all_scales())
        for device, tensors in scales.items():
            torch._foreach_mul_(tensors, factor.to(device, torch.float32) if isinstance(factor, Tensor) else factor)

    @torch.no_grad()
    def norm(self, over: Sequence[dist.ProcessGroup] = (), counted: Iterable[nn.Parameter] | None = None) -> Tensor:
        """Compute the 2-norm of all gradients together from codes and scales.

        Shards of DTensors are added up over their mesh.

        Args:
            over: further groups whose ranks hold different parameters (pipeline stages); their ranks call together.
            counted: the parameters that count, where another rank counts its copy of the rest; None: all.

        Returns:
            A 0-d fp64 tensor; NaN if any block is not finite.

        Raises:
            TrainingError: there is a group, and `reduce()` has not been called.
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
        self, max_norm: float, over: Sequence[dist.ProcessGroup] = (), counted: Iterable[nn.Parameter] | None = None
    ) -> Tensor:
        """Scale all gradients down so that their `norm(over, counted)` is at most `max_norm`.

        The coefficient is torch.nn.utils.clip_grad_norm_'s: min(1, max_norm / (norm + 1e-6)). With a norm that is not
        finite the gradients are of no use afterwards; leave the step out.

        Args:
            max_norm: upper bound of the norm.
            over, counted: as in `norm`.

        Returns:
            The norm before clipping.

        Raises:
            ConfigError: max_norm is negative or NaN.
        """
        if not max_norm >= 0:
            raise ConfigError(f"max_norm is {max_norm}, but it must be at least 0; inf leaves gradients as they are")
        norm = self.norm(over, counted)
        self.scale_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def found_nonfinite(self, over: Sequence[dist.ProcessGroup] = ()) -> bool:
        """Whether any gradient met NaN or infinity, so that this step must be left out; the same on every rank.

        Waits for the device. `clip_` returns a norm that is not finite in the same case.

        Args:
            over: as in `norm`.
        """
        return not bool(self.norm(over).isfinite())

    def zero_(self) -> None:
        """Drop all gradients and free their memory. Also done by zero_grad() of the model or an optimizer.

        Inside of a step whose last micro-batch has begun this gives the step up: every rank has to call it, and a rank
        that calls `reduce()` instead gets a TrainingError.
        """
        try:
            if self._reduction is not None:
                self._reduction.abandon()
        finally:
            for parameter in self.parameters.values():
                parameter.grad = None

    def dequantize_to_grad(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Make `parameter.grad` a plain tensor, in the gradient's dtype, for code that cannot use one made of codes.

        Parameters are dequantized one after the other and their codes freed. An optimizer per parameter that steps in
        between keeps the peak at one full-precision gradient.

        Args:
            parameters: some of those compressed here; None: all.

        Raises:
            TrainingError: there is a group, and `reduce()` has not been called.
        """
        self._collect_reduced()
        for parameter in self.parameters.values() if parameters is None else parameters:
            coded = coded_gradient(parameter)
            if coded is None:
                continue
            value = sharded_like(coded.codes.dequantize().to(coded.dtype), parameter)
            mark_reduced(value)
            parameter.grad = value

    # --- inspection ---

    def gradients(self) -> dict[str, QuantizedGradient]:
        """Gradients that exist now, by the parameter's name."""
        found = ((name, quantized_gradient(parameter)) for name, parameter in self.parameters.items())
        return {name: gradient for name, gradient in found if gradient is not None}

    @property
    def without_gradient(self) -> list[str]:
        """Names of the parameters that have no gradient now."""
        return [name for name, parameter in self.parameters.items() if quantized_gradient(parameter) is None]

    @property
    def nbytes(self) -> int:
        """Bytes of all codes and scales that are held now."""
        return sum(gradient.nbytes for gradient in self.gradients().values())

    def remove(self) -> None:
        """Remove the hooks: gradients that autograd makes from now on are plain, those in codes stay as they are."""
        self._members.remove()

    def __str__(self) -> str:
        num_elements = sum(local_part(parameter).numel() for parameter in self.parameters.values())
        held = f"{self.nbytes:,} bytes held now for {num_elements:,} elements, float32 takes {4 * num_elements:,}"
        missing = self.without_gradient
        without = f"; without gradient: {', '.join(missing)}" if 0 < len(missing) < len(self.parameters) else ""
        ranks = "" if self.group is None else f", reduced over {self.group.size()} ranks"
        return f"gradients of {len(self.parameters)} parameters in {self.bits} bits{ranks}: {held}{without}"

    # --- called by hooks and optimizers ---

    def follow(self) -> None:
        """Take in parameters that joined the model or were unfrozen, and leave those that are gone."""
        if self._reduction is None:
            self._members.follow()
        elif not self._reduction.is_under_way and self._members.follow():  # else the next step takes what is new
            self._reduction.take(self.parameters)

    def before_step(self, parameter: nn.Parameter) -> None:
        """Check that an optimizer may use the parameter's gradient now.

        Raises:
            TrainingError: it holds only this rank's share.
        """
        gradient = parameter.grad
        if self.group is None or gradient is None:
            return
        coded = coded_gradient(parameter)
        if coded is not None:
            coded.check("read")
        elif not is_marked_reduced(gradient) and not is_zero(gradient):
            raise TrainingError(
                f"the gradient of {self._members.place_of(parameter)[1]} holds only this rank's share, not reduced yet;"
                " call reduce() of compress_gradients' result first, on every rank"
            )

    @property
    def _device(self) -> torch.device:
        return local_part(next(iter(self.parameters.values()))).device

    def _arrived(self, parameter: nn.Parameter) -> None:
        """Hook of autograd: turn `parameter.grad` into codes, unless autograd has added to codes."""
        self._members.check_engine(parameter)
        number, name = self._members.place_of(parameter)
        if self._reduction is not None:
            try:
                self._reduction.buckets.check_open(number, name)
            except TrainingError:
                if coded_gradient(parameter) is None:  # set to None since, and made anew by this backward
                    parameter.grad = None
                raise
        self._fold(name, parameter)
        if self._reduction is not None:
            self._reduction.arrived(number, parameter.device)

    @torch.no_grad()
    def _fold(self, name: str, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        if gradient is None or coded_gradient(parameter) is not None:
            return
        if gradient.requires_grad:
            raise TrainingError(
                f"the gradient of {name} is differentiable (create_graph=True), which codes are not; use"
                " torch.autograd.grad for gradients that are differentiated again"
            )
        value = _gradient_like(parameter, name)
        guard = None
        if self._reduction is not None:
            guard = TurnGuard(
                name, self._reduction.average, Turn.REDUCED if is_marked_reduced(gradient) else Turn.LOCAL
            )
            if torch._C._current_graph_task_id() != -1:  # autograd has added to it
                guard("add")
        codes = zeros_for(parameter, self.bits)
        codes.accumulate_(value)
        set_quantized_gradient(parameter, codes, guard)

    def _collect(self) -> None:
        """Take in parameters that joined, and gradients that came without a call of the hook."""
        self.follow()
        for name, parameter in self.parameters.items():
            self._fold(name, parameter)

    def _collect_reduced(self) -> None:
        self._collect()
        self._check_not_reducing()
        if self.group is not None and any(map(_is_local, self.parameters.values())):
            raise TrainingError("the gradients of this rank have not been reduced yet; call reduce() first")

    def _check_not_reducing(self) -> None:
        if self._reduction is not None and self._reduction.is_under_way:
            raise TrainingError("gradients are being reduced; call reduce(), on every rank, before this")


def _is_local(parameter: nn.Parameter) -> bool:
    return turn_of(parameter) in (Turn.LOCAL, Turn.IN_FLIGHT)


def _gradient_like(parameter: Tensor, name: str) -> Tensor:
    """This rank's part of parameter.grad, laid out as the parameter; ModelError if it is sparse or of another dtype."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.dtype not in DTYPES:
        raise ModelError(
            f"the gradient of {name} is {str(gradient.dtype).removeprefix('torch.')}, but it can be compressed only"
            " from float32, bfloat16 or float16; convert or freeze the parameter"
        )
    if gradient.layout != torch.strided:
        raise ModelError(f"the gradient of {name} is sparse, but only dense ones can be compressed; use sparse=False")
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        if gradient.placements != parameter.placements:
            gradient = gradient.redistribute(placements=parameter.placements)
        return gradient.to_local()
    return gradient


def _sharded_over(parameter: Tensor) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """The mesh and its dimensions that a DTensor is sharded over; None for a parameter that is whole on this rank."""
    if not isinstance(parameter, DTensor):
        return None
    # Not is_shard(): the strided shards of FSDP2 over tensor parallelism deny it.
    mesh_dims = tuple(at for at, placement in enumerate(parameter.placements) if not placement.is_replicate())
    return (parameter.device_mesh, mesh_dims) if mesh_dims else None
