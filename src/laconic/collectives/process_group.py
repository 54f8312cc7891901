"""A process group of torch's own kind whose messages are shortened without loss.

    import laconic.collectives.process_group  # not needed where laconic is installed: torch finds it by itself
    torch.distributed.init_process_group("laconic")

DDP, FSDP2, DeviceMesh, functional collectives, torch.compile and checkpoints run over it unchanged. A
`ProcessGroupLaconic` has a group inside, gloo for CPU tensors and NCCL for CUDA tensors. Floating-point tensors of some
size, for which coding is predicted to pay, go through `laconic.collectives.operations`, in the background and in the
order of calls; all else goes straight to the group inside. Which way a call takes follows from operation, number of
elements, dtype, reduction, the group's options and the rates on which its ranks agreed when it was made, so all ranks
take the same.

Sends and receives are coded by themselves, outside of that order: two ranks may send to each other at the same time.

torch 2.13 renamed the methods of process groups; both sets of names are here, since torch's C++ looks for either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, Store

from laconic.autoload import register
from laconic.collectives import audit, lane, operations
from laconic.collectives.choose import foresee, prepare
from laconic.collectives.codec import Codec
from laconic.collectives.inner import compare, connect, forget, global_ranks, tell
from laconic.collectives.points import CODED, Points, as_bytes
from laconic.collectives.works import AfterWork, LaneWork, Together
from laconic.cost.wire.seconds import NO_CODE, ONE_RANK, RAW, TOO_SMALL, sent_nbytes
from laconic.errors import ConfigError

__all__ = ["ProcessGroupLaconic", "ProcessGroupOptions", "create"]

register()

_SUMMED = (torch.float32, torch.bfloat16, torch.float16)

_LARGE_NUMEL = 1 << 25

# Why a call went to the group inside, beside the cost model's reasons.
_OTHER_OP = "neither a sum nor an average"
_OTHER_CALL = "left to the backend"


@dataclass(frozen=True)
class ProcessGroupOptions:
    """What `init_process_group("laconic", pg_options=...)` and `new_group(backend="laconic", pg_options=...)` take.

    A group that is made without options has those of the default group, if that is laconic's too. All ranks need the
    same.
    """

    codec: Codec | str = "auto"
    """"auto": per message, by what `laconic profile` measured, or this group when it was made (docs/choosing.md). Or a
    lossless codec for all of them: `Lossless()`; `Raw()` sends everything as it is and sums in the same order."""
    min_nbytes: int = 1 << 16
    """Tensors of fewer bytes go straight to the group inside, which takes a fraction of a millisecond for them."""
    _timeout: timedelta | None = None
    """DeviceMesh looks for it in the options of every backend."""

    def __post_init__(self) -> None:
        if isinstance(self.codec, str) and self.codec != "auto":
            raise ConfigError(f"codec is {self.codec!r}, but it must be 'auto' or a codec such as Lossless() or Raw()")
        if not isinstance(self.codec, str) and not self.codec.lossless:
            raise ConfigError(
                f"codec is {self.codec.name}, but a process group also carries checkpoints and parameters, which must"
                " not change; use Lossless() here and lossy codecs in laconic.collectives or quantize_reduction"
            )
        if self.min_nbytes < 0:
            raise ConfigError(f"min_nbytes is {self.min_nbytes}, but it must be 0 or more")


def create(name: str, arguments: Any, options: ProcessGroupOptions | None) -> ProcessGroupLaconic:
    """What torch calls to make a group: `name` is one of `autoload.NAMES`, `arguments` torch's record of the group.

    Raises ConfigError for options of another backend, and on all ranks alike if two ranks' options differ.
    """
    if options is None:
        default = dist.group.WORLD
        options = default.options if isinstance(default, ProcessGroupLaconic) else ProcessGroupOptions()
    if not isinstance(options, ProcessGroupOptions):
        raise ConfigError(
            f"pg_options is a {type(options).__name__}, but backend {name!r} takes"
            " laconic.collectives.ProcessGroupOptions; pass that, or None"
        )
    return ProcessGroupLaconic(name, arguments, options)


# torch's stubs have several signatures of a method that call the same argument by different names.
_Base: Any = dist.ProcessGroup


class ProcessGroupLaconic(_Base):
    """The processes of a group; see the module's text. torch makes it, through `create`."""

    options: ProcessGroupOptions

    def __init__(self, name: str, arguments: Any, options: ProcessGroupOptions) -> None:
        # Of the base's constructors only this one makes an object whose methods C++ finds; it knows no store.
        super().__init__(arguments.group_rank, arguments.group_size)
        self.options = options
        self._name = name
        self._store = arguments.store
        codec = options.codec if isinstance(options.codec, str) else options.codec.name
        settings = {"backend": name, "codec": codec, "min_nbytes": options.min_nbytes}
        compare(tell(arguments, settings), global_ranks(arguments))
        self._inner, backends = connect(name, arguments)
        for device, (kind, backend) in backends.items():
            self._set_default_backend(kind)
            self._register_backend(device, kind, backend)
        if options.codec == "auto" and torch.device("cpu") in backends:
            # Here, where all ranks are: a program may send before its first collective, or with one under way.
            default = dist.group.WORLD
            prepare(self._inner, like=default._inner if isinstance(default, ProcessGroupLaconic) else None)
        self._points = Points(self._inner, options.codec, options.min_nbytes)

    # --- what it is ---

    def getBackendName(self) -> str:
        return self._name

    def get_group_store(self) -> Store:
        return self._store

    @property
    def bound_device_id(self) -> torch.device | None:
        """None, so that DeviceMesh makes its groups anew: those split from a bound NCCL group would be torch's own."""
        return None

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        pass

    def shutdown(self) -> None:
        self._direct.shutdown()
        forget(self._inner)

    def abort(self) -> None:
        self._inner.abort()

    # --- sums ---
    #
    # All methods are overridden, those too that hand everything on: C++ calls the base's own while it holds Python's
    # lock, and a thread of gloo that frees a tensor may want that lock while it holds gloo's: a deadlock, now and then.

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        if isinstance(opts, dist.AllreduceOptions) and self._takes("all_reduce", tensors, tensors[0], opts.reduceOp):
            return self._all_reduce(tensors[0], opts)
        return self._direct.allreduce(*_given(tensors, opts, timeout))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        known = isinstance(opts, dist.AllreduceCoalescedOptions)
        taken = [known and self._takes("all_reduce", [x], x, opts.reduceOp) for x in tensors]
        works = [self._all_reduce(x, opts) for x, is_taken in zip(tensors, taken, strict=True) if is_taken]
        rest = [x for x, is_taken in zip(tensors, taken, strict=True) if not is_taken]
        if rest:
            works.append(self._direct.allreduce_coalesced(*_given(rest, opts)))
        return Together(works, tensors)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        known = isinstance(opts, dist.ReduceScatterOptions)
        if known and self._takes("reduce_scatter", [input], input, opts.reduceOp):
            return self._reduce_scatter(output, input, opts)
        return _named(self._direct, "reduce_scatter_single", "_reduce_scatter_base")(*_given(output, input, opts))

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        known = isinstance(opts, dist.ReduceScatterOptions)
        taken = [known and self._takes("reduce_scatter", [x], x, opts.reduceOp) for x in inputs]
        method = _named(self._direct, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
        return _split(taken, outputs, inputs, opts, self._reduce_scatter, method)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        if isinstance(opts, dist.ReduceScatterOptions) and len(inputs) == 1 and _alike(inputs[0]):
            rows = torch.stack([x.reshape(-1) for x in inputs[0]])
            if self._takes("reduce_scatter", inputs, rows, opts.reduceOp):
                return self._reduce_scatter(outputs[0], rows, opts)
        return self._direct.reduce_scatter(*_given(outputs, inputs, opts, timeout))

    def _all_reduce(self, tensor: Tensor, opts: Any) -> dist.Work:
        x, op, codec = tensor.contiguous(), _op_of(opts), self.options.codec
        return _after(operations.all_reduce(x, self._direct, op=op, codec=codec, async_op=True), tensor, x)

    def _reduce_scatter(self, output: Tensor, input: Tensor, opts: Any) -> dist.Work:
        out, x, op, codec = _dense(output), input.contiguous(), _op_of(opts), self.options.codec
        return _after(operations.reduce_scatter(out, x, self._direct, op=op, codec=codec, async_op=True), output, out)

    # --- movements ---

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        if self._takes("all_gather", [input], input):
            return self._all_gather(output, input)
        method = _named(self._direct, "all_gather_single", "_allgather_base")
        return method(*_given(as_bytes(output), as_bytes(input), opts))

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        taken = [self._takes("all_gather", [x], x) for x in inputs]
        method = _named(self._direct, "all_gather_single_coalesced", "allgather_into_tensor_coalesced")
        return _split(taken, outputs, inputs, opts, self._all_gather, method)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        known = isinstance(opts, AllgatherOptions) and len(outputs) == 1 and _alike(outputs[0])
        if known and self._takes("all_gather", inputs, outputs[0][0]):
            rows = inputs[0].new_empty(len(outputs[0]), inputs[0].numel())
            work = self._all_gather(rows, inputs[0])

            def spread() -> None:
                for output, row in zip(outputs[0], rows, strict=True):
                    output.copy_(row.view(output.shape))

            return AfterWork(work, outputs[0], spread)
        return self._direct.allgather(*_given(as_bytes(outputs), as_bytes(inputs), opts, timeout))

    def all_to_all_single(
        self, output: Any, input: Any, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> dist.Work:
        uneven = bool(output_splits or input_splits)
        # Of uneven parts no rank knows how many bytes the others have. If large ones would be coded, all are taken, and
        # the ranks decide together.
        if self._takes("all_to_all", [input], input, any_size=uneven):
            out, x, codec = _dense(output), input.contiguous(), self.options.codec
            splits = (list(output_splits) or None, list(input_splits) or None)
            return _after(operations.all_to_all(out, x, *splits, self._direct, codec=codec, async_op=True), output, out)
        method = _named(self._direct, "all_to_all_single", "alltoall_base")
        return method(*_given(as_bytes(output), as_bytes(input), output_splits, input_splits, opts))

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        if isinstance(opts, dist.BroadcastOptions) and self._takes("broadcast", tensors, tensors[0]):
            x, src = tensors[0].contiguous(), dist.get_global_rank(self._inner, opts.rootRank)
            work = operations.broadcast(x, src, self._direct, codec=self.options.codec, async_op=True)
            return _after(work, tensors[0], x)
        return self._direct.broadcast(*_given(as_bytes(tensors), opts, timeout))

    def _all_gather(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        out, x, codec = _dense(output), input.contiguous(), self.options.codec
        return _after(operations.all_gather(out, x, self._direct, codec=codec, async_op=True), output, out)

    # --- between two ranks ---

    def send(self, tensors: Any, dst: int, tag: int = 0) -> dist.Work:
        return self._points.send(tensors, dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> dist.Work:
        return self._points.recv(tensors, src, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        return self._points.recv(tensors, None, tag)

    # --- what is left to the group inside ---

    def reduce(self, *args: Any, **kwargs: Any) -> dist.Work:
        self._leave("reduce", args)
        return self._direct.reduce(*args, **kwargs)

    def gather(self, *args: Any, **kwargs: Any) -> dist.Work:
        self._leave("gather", args)
        return self._direct.gather(*args, **kwargs)

    def scatter(self, *args: Any, **kwargs: Any) -> dist.Work:
        self._leave("scatter", args)
        return self._direct.scatter(*args, **kwargs)

    def alltoall(self, *args: Any, **kwargs: Any) -> dist.Work:
        self._leave("all_to_all", args)
        return self._direct.alltoall(*args, **kwargs)

    def barrier(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._direct.barrier(*args, **kwargs)

    # What torch 2.12 and older call, and other code may still.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # --- which way ---

    @property
    def _direct(self) -> dist.ProcessGroup:
        """The group inside, with nothing put off."""
        self._points.start()
        return self._inner

    def _takes(
        self, operation: str, tensors: Sequence[Tensor], message: Tensor, reduce_op: Any = None, any_size: bool = False
    ) -> bool:
        """Whether `laconic.collectives.operations` do a call whose part of one rank is as long as `message`.

        What is said here depends on nothing but what all ranks of the group know.
        """
        reason = None
        if len(tensors) != 1 or message.layout != torch.strided:
            reason = _OTHER_CALL
        elif message.dtype not in (CODED if reduce_op is None else _SUMMED):
            reason = NO_CODE
        elif reduce_op is not None and _op(reduce_op) is None:
            reason = _OTHER_OP
        elif self._inner.size() == 1:
            reason = ONE_RANK
        elif message.nbytes < self.options.min_nbytes and not any_size:
            reason = TOO_SMALL
        elif isinstance(self.options.codec, str):
            numel = _LARGE_NUMEL if any_size else message.numel()
            choice = foresee(operation, numel, message.dtype, self._inner, device=message.device)
            reason = choice.reason if choice.codec == RAW else None
        if reason is not None:
            self._record_raw(operation, message, reason)
        return reason is None

    def _leave(self, operation: str, arguments: Any) -> None:
        """Count a call that is handed on whatever it is: by its input, the longest of its tensors."""
        tensors = [x for x in torch.utils._pytree.tree_leaves(list(arguments)) if isinstance(x, Tensor)]
        if tensors:
            self._record_raw(operation, max(tensors, key=Tensor.numel), _OTHER_CALL)

    def _record_raw(self, operation: str, message: Tensor, reason: str) -> None:
        nbytes = round(sent_nbytes(operation, message.numel() * message.dtype.itemsize, self._inner.size()))
        audit.record(operation, message.dtype, nbytes, nbytes, RAW, reason, 0.0)


def _op(reduce_op: Any) -> operations.Op | None:
    if reduce_op == dist.ReduceOp.SUM:
        return "sum"
    return "avg" if reduce_op == dist.ReduceOp.AVG else None


def _op_of(opts: Any) -> operations.Op:
    op = _op(opts.reduceOp)
    assert op is not None, "taken"
    return op


def _given(*arguments: Any) -> list[Any]:
    """Those that the caller has given."""
    return [argument for argument in arguments if argument is not None]


def _named(group: dist.ProcessGroup, new: str, old: str) -> Callable[..., dist.Work]:
    return getattr(group, new, None) or getattr(group, old)


def _split(
    taken: Sequence[bool],
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    opts: Any,
    each: Callable[[Tensor, Tensor, Any], dist.Work],
    rest: Callable[..., dist.Work],
) -> dist.Work:
    """Those pairs that are taken go one by one, the others together."""
    pairs = list(zip(outputs, inputs, taken, strict=True))
    works = [each(output, input, opts) for output, input, is_taken in pairs if is_taken]
    left = [(output, input) for output, input, is_taken in pairs if not is_taken]
    if left:
        sides = [as_bytes(list(side)) for side in zip(*left, strict=True)]
        works.append(rest(*_given(*sides, opts)))
    return Together(works, outputs)


def _alike(tensors: Sequence[Tensor]) -> bool:
    """Whether these could be rows of one tensor."""
    return len({(x.shape, x.dtype, x.device) for x in tensors}) == 1


def _dense(output: Tensor) -> Tensor:
    """Memory in which a result for `output` can be written from front to back."""
    return output if output.is_contiguous() else torch.empty_like(output, memory_format=torch.contiguous_format)


def _after(work: lane.Work[Any], output: Tensor, found: Tensor) -> dist.Work:
    """torch's handle of a result in `found` that is wanted in `output`."""
    if found is output:
        return LaneWork(work, [output])
    return AfterWork(LaneWork(work, [output]), [output], lambda: output.copy_(found))
