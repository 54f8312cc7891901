"""FSDP2's all-gather and reduce-scatter over a codec.

The interfaces are in private modules of torch, so they are imported here only; a torch that has moved them gets an
ImportError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.collectives import api
from laconic.collectives.arguments import Op
from laconic.collectives.codec import Blockwise, Codec, check_codec, is_unread
from laconic.collectives.runtime.background import BackgroundWork
from laconic.errors import ConfigError, ModelError

try:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo
except ImportError as error:
    raise ImportError(
        f"torch {torch.__version__} has moved FSDP2's interface for custom collectives; laconic knows the place it has"
        " in torch 2.11 to 2.15"
    ) from error

__all__ = [
    "AllGather",
    "DefaultAllGather",
    "DefaultReduceScatter",
    "DividedOnce",
    "OwnBuffers",
    "QuantizedAllGather",
    "ReduceScatter",
    "ZipAllGather",
    "ZipReduceScatter",
    "num_shards",
    "num_trained",
    "param_groups",
    "put_back",
    "replicates",
]


class OwnBuffers:
    """What torch asks of each of its custom collectives beside the call: where they write."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate an uninitialized buffer."""
        return torch.empty(*size, dtype=dtype, device=device)


class ZipAllGather(OwnBuffers, AllGather):
    """`api.all_gather` for `FSDPModule.set_custom_all_gather`; the gathered parameters have the same bits.

    The call does not wait. On CPU tensors the message is sent in the background, and FSDP2 waits when it needs the
    parameters, so a unit that was prefetched is on its way while the layer before it computes; torch's own all-gather
    on CPUs is waited for where it starts. On CUDA tensors everything is started on the stream that FSDP2 has for it;
    with `Lossless(capacity_bits=...)` on that of the background executor, and the host waits for the gather where FSDP2
    needs the parameters, not here.
    """

    def __init__(self, codec: Codec | str = "auto") -> None:
        check_codec(codec)
        self.codec = codec

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather input_tensor [n] of each of the W ranks into output_tensor [W * n], of which it may be a part."""
        is_late = not isinstance(self.codec, str) and is_unread(self.codec)
        if input_tensor.device.type == "cuda" and not async_op and not is_late:
            api.all_gather(output_tensor, input_tensor, group, codec=self.codec)
            return None
        return BackgroundWork(
            api.all_gather(output_tensor, input_tensor, group, codec=self.codec, async_op=True), [output_tensor]
        )


class QuantizedAllGather(OwnBuffers, AllGather):
    """An all-gather of a group of FSDP2's parameters in the blocks of a codec; `quantize_gathers` says what holds.

    FSDP2 hands over the shards of all parameters of the group, one behind the other. Each is padded to whole blocks, so
    that no block has values of two; those of one dimension travel exactly, in a gather of their own at the same time.
    So do shards of fewer ranks that FSDP2 has made after forward of what was gathered (`reshard_after_forward=2`): they
    are rounded already, and once more, in other blocks, backward would compute with other values than forward.
    """

    def __init__(self, params: Any, codec: Blockwise) -> None:
        self._params, self.codec = params, codec

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather input_tensor [n] of each of the W ranks into output_tensor [W * n], of which it may be a part."""
        rows = output_tensor.view(group.size(), -1)
        is_blocking = input_tensor.device.type == "cuda" and not async_op
        works = []
        for codec, parts in self._parts(input_tensor.numel()):
            padding = self.codec.format.block_size if codec is self.codec else 1
            shards = [input_tensor[part] for part in parts]
            mine = torch.cat([nn.functional.pad(shard, (0, -shard.numel() % padding)) for shard in shards])
            gathered = mine.new_empty(group.size() * mine.numel())
            put = partial(_put, rows, parts, padding)
            works.append(api.all_gather(gathered, mine, group, codec=codec, async_op=not is_blocking).map(put))
        if is_blocking:
            for work in works:
                work.wait()
            return None
        *others, last = works  # a function that referred to `last` would keep all of its buffers, as `last` keeps it
        return BackgroundWork(last.map(lambda _: [work.wait() for work in others]), [output_tensor])

    def _parts(self, numel: int) -> Iterator[tuple[Codec | str, list[slice]]]:
        """How the parts of a shard of `numel` elements travel."""
        parts: dict[bool, list[slice]] = {False: [], True: []}
        start, is_kept = 0, self._params.is_sharded_post_forward  # of fewer ranks, after forward
        for parameter in self._params.fsdp_params:
            shard = parameter._sharded_post_forward_param_data if is_kept else parameter._sharded_param_data
            parts[parameter.sharded_param.dim() > 1 and not is_kept].append(slice(start, start + shard.numel()))
            start += shard.numel()
        if start != numel:
            raise ModelError(
                f"FSDP2 gathers {numel} elements of parameters that have {start}, so their borders are not known; call"
                " quantize_gathers(...).remove()"
            )
        return ((codec, found) for codec, found in (("auto", parts[False]), (self.codec, parts[True])) if found)


def _put(rows: Tensor, parts: Sequence[slice], padding: int, gathered: Tensor) -> None:
    found, start = gathered.view(len(rows), -1), 0
    for part in parts:
        length = part.stop - part.start
        rows[:, part] = found[:, start : start + length]
        start += length + -length % padding


class ZipReduceScatter(OwnBuffers, ReduceScatter):
    """`api.reduce_scatter` for `FSDPModule.set_custom_reduce_scatter`.

    The sum of a shard is made in fp32 in the order of ranks and rounded once to the buffer's type
    (`MixedPrecisionPolicy.reduce_dtype`): the same bits in every run, whatever the codec. FSDP2 uses the result where
    it called, so on CPUs this waits, as torch's own does; on CUDA only FSDP2's stream for reductions does.
    """

    def __init__(self, codec: Codec | str = "auto") -> None:
        check_codec(codec)
        self.codec = codec

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Reduce input_tensor [W * n] over the W ranks into output_tensor [n]; refuses all but SUM and AVG."""
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ConfigError(
                f"op is {op}, but a reduce-scatter over a codec does SUM and AVG; with a gradient divide factor call"
                " set_force_sum_reduction_for_comms(True) on the module"
            )
        name: Op = "avg" if op == dist.ReduceOp.AVG else "sum"
        if async_op:
            started = api.reduce_scatter(output_tensor, input_tensor, group, op=name, codec=self.codec, async_op=True)
            return BackgroundWork(started, [output_tensor])
        api.reduce_scatter(output_tensor, input_tensor, group, op=name, codec=self.codec)
        return None


class DividedOnce:
    """All-reduce hook of a group of parameters on one rank, which FSDP2 may divide twice by the divide factor.

    It does so in dtypes other than float32 and bfloat16, which a model may be converted to later, and in forced sums.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.then: Callable[[Tensor], None] | None = None
        """Another hook that follows."""

    def __call__(self, gradient: Tensor) -> None:
        """Undo one of two divisions."""
        factor, forced = self._group.gradient_divide_factor, self._group.force_sum_reduction_for_comms
        if factor is not None and (forced or gradient.dtype not in (torch.float32, torch.bfloat16)):
            gradient.mul_(factor)
        if self.then is not None:
            self.then(gradient)

    def followed_by(self, hook: Callable[[Tensor], None]) -> DividedOnce:
        """Return a hook of the same group that another one follows."""
        both = DividedOnce(self._group)
        both.then = hook
        return both


def param_groups(module: Any) -> Iterator[Any]:
    """The groups of parameters that an FSDPModule gathers and reduces together; none if it has no parameters."""
    state = module._get_fsdp_state()
    # torch 2.13 knows several groups per module.
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return (group for group in groups if group is not None)


def num_shards(group: Any) -> int:
    """Ranks that a group of parameters is sharded over; 1 if it is only replicated."""
    mesh_info = group.mesh_info
    return int(mesh_info.shard_mesh_size) if isinstance(mesh_info, FSDPMeshInfo) else 1


def num_trained(group: Any) -> int:
    """Elements of a group's parameters that require a gradient, over all ranks."""
    parameters = [parameter.sharded_param for parameter in group.fsdp_params]
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)


def put_back(group: Any, attribute: str, new: Any, old: Any) -> None:
    """Undo `group.attribute = new`, unless something else has been put in its place since."""
    if getattr(group, attribute) is new:
        setattr(group, attribute, old)


def replicates(group: Any) -> bool:
    """Whether other ranks hold copies of a group's shards (HSDP), which FSDP2 all-reduces natively."""
    return isinstance(group.mesh_info, DDPMeshInfo)
