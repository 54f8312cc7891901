"""Short path of a process group's calls: calls known to be left raw go to the backend group at once.

Most calls of a program are small. gloo takes a tenth of a millisecond for one on one machine, so these methods are the
few lines that may stand in front of it; all else goes to `ProcessGroupLaconic`, which decides and remembers.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from laconic.collectives.policy.raw_calls import is_plain
from laconic.collectives.process_group.group import ProcessGroupLaconic, given
from laconic.collectives.runtime.torch_compat import method_of, untraced

_AVG: Any = dist.ReduceOp.AVG  # whose type the stubs do not accept


@untraced
class QuickGroup(ProcessGroupLaconic):
    """The group that torch is given."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        group = self._backend_group
        self._backend_reduce_scatter = method_of(group, "reduce_scatter_single", "_reduce_scatter_base")
        self._backend_all_gather = method_of(group, "all_gather_single", "_allgather_base")
        self._backend_all_to_all = method_of(group, "all_to_all_single", "alltoall_base")

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Sum one tensor over ranks; at once if known to be raw."""
        if (
            opts is not None
            and timeout is None
            and _in_one_step(tensors[0], opts)
            and self._raw.has("all_reduce", tensors[0])
        ):
            return self._handle(self._backend_group.allreduce(tensors, opts), opts, "all_reduce")
        return super().allreduce(tensors, opts, timeout)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Replace one tensor by the root's; at once if known to be raw."""
        if opts is not None and timeout is None and self._raw.has("broadcast", tensors[0]):
            return self._handle(self._backend_group.broadcast(tensors, opts), opts, "broadcast")
        return super().broadcast(tensors, opts, timeout)

    def reduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Reduce to the root; at once if known to be raw."""
        if (
            opts is not None
            and timeout is None
            and _in_one_step(tensors[0], opts)
            and self._raw.has("reduce", tensors[0])
        ):
            return self._handle(self._backend_group.reduce(tensors, opts), opts, "reduce")
        return super().reduce(*given(tensors, opts, timeout))

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Gather on the root; at once if known to be raw."""
        if opts is not None and timeout is None and _dense(outputs) and self._raw.has("gather", inputs[0]):
            return self._handle(self._backend_group.gather(outputs, inputs, opts), opts, "gather")
        return super().gather(*given(outputs, inputs, opts, timeout))

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        """Scatter from the root; at once if known to be raw."""
        if opts is not None and timeout is None and _dense(inputs) and self._raw.has("scatter", outputs[0]):
            return self._handle(self._backend_group.scatter(outputs, inputs, opts), opts, "scatter")
        return super().scatter(*given(outputs, inputs, opts, timeout))

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        """Sum over ranks and scatter, `input` [W * n], `output` [n]; at once if known to be raw."""
        if (
            opts is not None
            and is_plain(output)
            and _in_one_step(input, opts)
            and self._raw.has("reduce_scatter", input)
        ):
            return self._handle(self._backend_reduce_scatter(output, input, opts), opts, "reduce_scatter")
        return super().reduce_scatter_single(output, input, opts)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        """Gather from all ranks, `input` [n], `output` [W * n]; at once if known to be raw."""
        if opts is not None and is_plain(output) and self._raw.has("all_gather", input):
            return self._handle(self._backend_all_gather(output, input, opts), opts, "all_gather")
        return super().all_gather_single(output, input, opts)

    def all_to_all_single(
        self, output: Any, input: Any, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> dist.Work:
        """Exchange rows between all ranks; at once if known to be raw."""
        known = "uneven all_to_all" if output_splits or input_splits else "all_to_all"
        if opts is not None and is_plain(output) and self._raw.has(known, input):
            work = self._backend_all_to_all(output, input, output_splits, input_splits, opts)
            return self._handle(work, opts, "all_to_all")
        return super().all_to_all_single(output, input, output_splits, input_splits, opts)

    def send(self, tensors: Any, dst: int, tag: int = 0) -> dist.Work:
        """Send one tensor to group rank `dst`; at once if known to be raw."""
        if self._coalesced is None and self._raw.has("send", tensors[0]):
            return self._p2p.send_raw(tensors[0], tensors, dst, tag)
        codec, reason = self._p2p.choose(tensors)
        if codec is None:
            self._know("send", tensors[0], "send", tensors[0].nbytes, reason)
        return super().send(tensors, dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> dist.Work:
        """Receive one tensor from group rank `src`; at once if known to be raw."""
        if self._coalesced is None and self._raw.find("send", tensors[0]) is not None:
            return self._p2p.receive_raw(tensors[0], tensors, src, tag)
        return super().recv(tensors, src, tag)

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


def _in_one_step(x: Tensor, opts: Any) -> bool:
    """Whether the backend does the reduction; averages of integers are divided here."""
    return x.is_floating_point() or opts.reduceOp != _AVG


def _dense(lists: Any) -> bool:
    """Whether rows that a gather writes or a scatter reads are contiguous; only the root has any."""
    return all(is_plain(x) for row in lists for x in row)
