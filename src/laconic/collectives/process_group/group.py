"""Process group of torch's own kind that sends messages losslessly compressed.

    import laconic.collectives.process_group  # not needed where laconic is installed: torch finds it by itself
    torch.distributed.init_process_group("laconic")

DDP, FSDP2, DeviceMesh, functional collectives, torch.compile and checkpoints run over it unchanged. A
`ProcessGroupLaconic` has a backend group: gloo for CPU tensors, NCCL for CUDA tensors. Floating-point tensors of some
size, for which coding is predicted to pay, go through `laconic.collectives.api`, in the background and in the order of
calls; all else goes straight to the backend group. The route of a call follows from operation, number of elements,
dtype, reduction, the group's options and the rates on which its ranks agreed when it was made, so all ranks take the
same.

Sends and receives are coded by themselves, outside of that order: two ranks may send to each other at the same time.

torch 2.13 renamed the methods of process groups; both sets of names are here, since torch's C++ looks for either.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, Store

from laconic.autoload import register
from laconic.collectives import api, audit
from laconic.collectives.arguments import Op, check_group_rank
from laconic.collectives.codec import Codec, check_codec, is_auto, setting_of
from laconic.collectives.policy.raw_calls import raw_calls_of
from laconic.collectives.policy.selector import predict, prepare
from laconic.collectives.process_group.averages import averages_of_integers
from laconic.collectives.process_group.backends import compare, connect, forget
from laconic.collectives.process_group.p2p import CODED, P2P, as_bytes
from laconic.collectives.process_group.strided import on_dense
from laconic.collectives.process_group.torch_patches import prepare_reducers, take_groups_of
from laconic.collectives.process_group.work_handles import AfterWork, Ordered, RawWork, WorkGroup
from laconic.collectives.runtime import background, callbacks
from laconic.collectives.runtime.background import BackgroundWork
from laconic.collectives.runtime.callbacks import queue_of
from laconic.collectives.runtime.failure_diagnosis import broken_off
from laconic.collectives.runtime.group_facts import ranks_of
from laconic.collectives.runtime.torch_compat import method_of, untraced
from laconic.cost.comm.seconds import NO_CODE, ONE_RANK, RAW, TOO_SMALL, sent_nbytes
from laconic.errors import ConfigError, FormatError

register()

_SUMMED = (torch.float32, torch.bfloat16, torch.float16)

_LARGE_NUMEL = 1 << 25

# Why a call went to the backend group, beside the cost model's reasons.
_OTHER_OP = "neither a sum nor an average"
_OTHER_CALL = "left to the backend"


@dataclass(frozen=True)
class ProcessGroupOptions:
    """Options of `init_process_group("laconic", pg_options=...)` and `new_group(backend="laconic", pg_options=...)`.

    A group that is made without options has those of the default group, if that is laconic's too. All ranks need the
    same.

    Raises:
        ConfigError: codec is neither "auto" nor a lossless codec, or min_nbytes is negative.
    """

    codec: Codec | str = "auto"
    """"auto": per message, by what `laconic profile` measured, or this group when it was made (docs/choosing.md). Or a
    lossless codec for all of them: `Lossless()`; `Raw()` sends everything as it is and sums in the same order."""
    min_nbytes: int = 1 << 16
    """Tensors of fewer bytes go straight to the backend group, which takes a fraction of a millisecond for them."""
    _timeout: timedelta | None = None
    """DeviceMesh looks for it in the options of every backend."""

    def __post_init__(self) -> None:
        check_codec(self.codec)
        if not isinstance(self.codec, str) and not self.codec.lossless:
            raise ConfigError(
                f"codec is {self.codec.name}, but a process group also carries checkpoints and parameters, which must"
                " not change; use Lossless() here and lossy codecs in laconic.collectives or quantize_reduction"
            )
        if self.min_nbytes < 0:
            raise ConfigError(f"min_nbytes is {self.min_nbytes}, but it must be 0 or more")


_default_options: ProcessGroupOptions | None = None


def set_default_options(options: ProcessGroupOptions | None) -> None:
    """Options of groups of this process that are made without any, for hosts that call init_process_group themselves.

    A default group's own come first. None: the defaults again.
    """
    global _default_options
    _default_options = options


def create(name: str, arguments: Any, options: ProcessGroupOptions | None) -> ProcessGroupLaconic:
    """Make a group for torch, whose record is `arguments`; options None: those of the default group, or the defaults.

    ConfigError if they are another backend's, or two ranks' options differ, which raises on all ranks alike.
    """
    if options is None:
        default = dist.group.WORLD
        given = default.options if isinstance(default, ProcessGroupLaconic) else _default_options
        options = given or ProcessGroupOptions()
    if not isinstance(options, ProcessGroupOptions):
        raise ConfigError(
            f"pg_options is a {type(options).__name__}, but backend {name!r} takes"
            " laconic.collectives.ProcessGroupOptions; pass that, or None"
        )
    from laconic.collectives.process_group.short_path import QuickGroup  # which is a ProcessGroupLaconic

    take_groups_of(ProcessGroupLaconic)
    prepare_reducers(ProcessGroupLaconic)
    return QuickGroup(name, arguments, options)


_BACKEND_WORK = dist.Work
"""The class of C++ works; works of this package are of subclasses."""


_NAMES = {
    **{"allreduce": "all_reduce", "allreduce_coalesced": "all_reduce", "allgather": "all_gather"},
    **{"reduce_scatter_single": "reduce_scatter", "reduce_scatter_single_coalesced": "reduce_scatter"},
    **{"all_gather_single": "all_gather", "all_gather_single_coalesced": "all_gather"},
    **{"alltoall": "all_to_all", "all_to_all_single": "all_to_all"},
}
"""Names of methods in errors, where they are others."""

_REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")


def _coalescing(method: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
    """Decorate a method, whose work is part of the one of `_end_coalescing`."""

    @functools.wraps(method)
    def call(group: ProcessGroupLaconic, *args: Any, **kwargs: Any) -> dist.Work:
        try:
            work = method(group, *args, **kwargs)
        except BaseException:
            group._coalesced = None  # torch does not end it then, and it would keep all later works
            raise
        if group._coalesced is not None:
            group._coalesced.append(work)
        return work

    return call


def _call(**roles: tuple[str, ...]) -> Callable[[Callable[..., dist.Work]], Callable[..., dist.Work]]:
    """Decorate a collective, with roles as of `on_dense`: tensors are plain, and callbacks of the work may wait."""

    def decorate(method: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
        name = _NAMES.get(method.__name__, method.__name__)
        position = list(inspect.signature(method).parameters).index("opts")

        @on_dense(**roles)
        @functools.wraps(method)
        def dense(*args: Any, **kwargs: Any) -> dist.Work:
            work = method(*args, **kwargs)
            if type(work) is not _BACKEND_WORK:
                return work
            opts = args[position] if position < len(args) else kwargs.get("opts")
            group: ProcessGroupLaconic = args[0]
            return group._handle(work, opts, name)

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> dist.Work:
            work = dense(*args, **kwargs)
            return work.kept_in(args[0]._unfinished) if isinstance(work, AfterWork) else work

        return _coalescing(averages_of_integers(call) if name in _REDUCTIONS else call)

    return decorate


# torch's stubs have several signatures of a method that call the same argument by different names.
_Base: Any = dist.ProcessGroup


@untraced
class ProcessGroupLaconic(_Base):
    """The processes of a group; see the module's docstring. torch makes it, through `create`."""

    options: ProcessGroupOptions

    def __init__(self, name: str, arguments: Any, options: ProcessGroupOptions) -> None:
        # Of the base's constructors only this one makes an object whose methods C++ finds; it knows no store.
        super().__init__(arguments.group_rank, arguments.group_size)
        self.options = options
        self._name = name
        self._store = arguments.store
        settings = {"backend": name, "codec": setting_of(options.codec), "min_nbytes": options.min_nbytes}
        compare(settings, arguments)
        self._backend_group, backends = connect(name, arguments)
        self._has_cuda = torch.device("cuda") in backends
        for device, (kind, backend) in backends.items():
            self._set_default_backend(kind)
            self._register_backend(device, kind, backend)
        if options.codec == "auto" and torch.device("cpu") in backends:
            # Here, where all ranks are: a program may send before its first collective, or with one under way.
            prepare(self._backend_group)
        self._raw = raw_calls_of(self, self._backend_group)
        self._p2p = P2P(self._backend_group, options.codec, options.min_nbytes)
        self._coalesced: list[dist.Work] | None = None
        self._unfinished: set[AfterWork] = set()
        """Collectives whose results have to be copied or divided once the backend is done."""

    # --- identity and life cycle ---

    def getBackendName(self) -> str:
        """Name under which the group was made: one of `laconic.autoload.NAMES`."""
        return self._name

    def get_group_store(self) -> Store:
        """Store of the group, as torch gave it."""
        return self._store

    @property
    def bound_device_id(self) -> torch.device | None:
        """None, so that DeviceMesh makes its groups anew: those split from a bound NCCL group would be torch's own."""
        return None

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        pass

    def shutdown(self) -> None:
        """Finish all calls, as gloo does when a group is destroyed; works can be waited for afterwards."""
        self._p2p.start()
        background.close(self._backend_group, self)
        self._backend_group.shutdown()
        forget(self._backend_group)

    def abort(self) -> None:
        """Abort NCCL's running operations; over gloo they go on, unattended."""
        self._backend_group.abort()
        forget(self._backend_group)

    # --- sums ---
    #
    # All methods are overridden, those too that hand everything on: C++ calls the base's own while it holds Python's
    # lock, and a thread of gloo that frees a tensor may want that lock while it holds gloo's: a deadlock, now and then.

    @_call(updates=("tensors",))
    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Sum one tensor over ranks, coded or by the backend."""
        if isinstance(opts, dist.AllreduceOptions) and self._takes("all_reduce", tensors, tensors[0], opts.reduceOp):
            return self._all_reduce(tensors[0], opts)
        return self._direct.allreduce(*given(tensors, opts, timeout))

    @_call(updates=("tensors",))
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Sum several tensors over ranks; each is coded by itself, the rest go to the backend together."""
        known = isinstance(opts, dist.AllreduceCoalescedOptions)
        taken = [known and self._takes("all_reduce", [x], x, opts.reduceOp) for x in tensors]
        works = [self._all_reduce(x, opts) for x, is_taken in zip(tensors, taken, strict=True) if is_taken]
        rest = [x for x, is_taken in zip(tensors, taken, strict=True) if not is_taken]
        if rest:
            works.append(self._direct.allreduce_coalesced(*given(rest, opts)))
        return WorkGroup(works, tensors, queue_of(self._backend_group))

    @_call(reads=("input",), writes=("output",))
    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        """Sum over ranks and scatter, coded or by the backend; `input` [W * n], `output` [n]."""
        known = isinstance(opts, dist.ReduceScatterOptions)
        if known and self._takes("reduce_scatter", [input], input, opts.reduceOp):
            return self._reduce_scatter(output, input, opts)
        return method_of(self._direct, "reduce_scatter_single", "_reduce_scatter_base")(*given(output, input, opts))

    @_call(reads=("inputs",), writes=("outputs",))
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Run `reduce_scatter_single` of several pairs; each is coded by itself, the rest go to the backend at once."""
        known = isinstance(opts, dist.ReduceScatterOptions)
        taken = [known and self._takes("reduce_scatter", [x], x, opts.reduceOp) for x in inputs]
        method = method_of(self._direct, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
        return _split(taken, outputs, inputs, opts, self._reduce_scatter, method, queue_of(self._backend_group))

    @_call(reads=("inputs",), writes=("outputs",))
    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Sum over ranks and scatter, from lists of W tensors; coded if they are one list of equal tensors."""
        if isinstance(opts, dist.ReduceScatterOptions) and len(inputs) == 1 and _alike(inputs[0]):
            rows = torch.stack([x.reshape(-1) for x in inputs[0]])
            if self._takes("reduce_scatter", inputs, rows, opts.reduceOp):
                return self._reduce_scatter(outputs[0], rows, opts)
        return self._direct.reduce_scatter(*given(outputs, inputs, opts, timeout))

    def _all_reduce(self, tensor: Tensor, opts: Any) -> dist.Work:
        op, codec = _op_of(opts), self.options.codec
        return BackgroundWork(api.all_reduce(tensor, self._ready, op=op, codec=codec, async_op=True), [tensor])

    def _reduce_scatter(self, output: Tensor, input: Tensor, opts: Any) -> dist.Work:
        op, codec = _op_of(opts), self.options.codec
        return BackgroundWork(
            api.reduce_scatter(output, input, self._ready, op=op, codec=codec, async_op=True), [output]
        )

    # --- movements ---

    @_call(reads=("input",), writes=("output",))
    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        """Gather from all ranks, coded or by the backend; `input` [n], `output` [W * n]."""
        if self._takes("all_gather", [input], input):
            return self._all_gather(output, input)
        method = method_of(self._direct, "all_gather_single", "_allgather_base")
        return method(*given(as_bytes(output), as_bytes(input), opts))

    @_call(reads=("inputs",), writes=("outputs",))
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Run `all_gather_single` of several pairs; each is coded by itself, the rest go to the backend together."""
        taken = [self._takes("all_gather", [x], x) for x in inputs]
        method = method_of(self._direct, "all_gather_single_coalesced", "allgather_into_tensor_coalesced")

        def rest(*sides: Any) -> dist.Work:
            return method(*map(as_bytes, sides))

        return _split(taken, outputs, inputs, opts, self._all_gather, rest, queue_of(self._backend_group))

    @_call(reads=("inputs",), writes=("outputs",))
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Gather from all ranks into lists of W tensors; coded if they are one list of equal tensors."""
        _check_lists(outputs, inputs, self.size())
        known = isinstance(opts, AllgatherOptions) and len(outputs) == 1 and _alike(outputs[0])
        if known and self._takes("all_gather", inputs, outputs[0][0]):
            rows = inputs[0].new_empty(len(outputs[0]), inputs[0].numel())

            def spread() -> None:
                for output, row in zip(outputs[0], rows, strict=True):
                    output.copy_(row.view(output.shape))

            return self._all_gather(rows, inputs[0]).then(spread, outputs[0])
        return self._direct.allgather(*given(as_bytes(outputs), as_bytes(inputs), opts, timeout))

    @_call(reads=("input",), writes=("output",))
    def all_to_all_single(
        self, output: Any, input: Any, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> dist.Work:
        """Exchange rows between all ranks, in equal parts or by split sizes; coded or by the backend."""
        uneven = bool(output_splits or input_splits)
        # Of uneven parts no rank knows how many bytes the others have. If large ones would be coded, all are taken, and
        # the ranks decide together.
        known = ("uneven all_to_all" if uneven else "all_to_all", input)
        if self._takes("all_to_all", [input], input, None, known, any_size=uneven):
            splits, codec = (list(output_splits) or None, list(input_splits) or None), self.options.codec
            # gloo cuts elements where no sizes are given, and not rows.
            out, into = (output, input) if uneven else (output.view(-1), input.view(-1))
            work = api.all_to_all(out, into, *splits, self._ready, codec=codec, async_op=True)
            return BackgroundWork(work, [output])
        method = method_of(self._direct, "all_to_all_single", "alltoall_base")
        return method(*given(as_bytes(output), as_bytes(input), output_splits, input_splits, opts))

    @_call(updates=("tensors",))
    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Replace one tensor by the root's, coded or by the backend."""
        if isinstance(opts, dist.BroadcastOptions) and self._takes("broadcast", tensors, tensors[0]):
            check_group_rank("src", opts.rootRank, self.size())
            src = ranks_of(self._backend_group)[opts.rootRank]
            work = api.broadcast(tensors[0], src, self._ready, codec=self.options.codec, async_op=True)
            return BackgroundWork(work, [tensors[0]])
        return self._direct.broadcast(*given(as_bytes(tensors), opts, timeout))

    def _all_gather(self, output: Tensor, input: Tensor, opts: Any = None) -> BackgroundWork:
        codec = self.options.codec
        work = api.all_gather(output, input, self._ready, codec=codec, async_op=True)
        # The values of its future are those of the backend: gloo's are one for each rank.
        return BackgroundWork(work, [output] if output.is_cuda else list(output.chunk(self.size())))

    # --- between two ranks ---

    @_coalescing
    @on_dense(reads=("tensors",))
    def send(self, tensors: Any, dst: int, tag: int = 0) -> dist.Work:
        """Send one tensor to group rank `dst`; see `P2P.send`."""
        return self._p2p.send(tensors, dst, tag)

    @_coalescing
    @on_dense(writes=("tensors",))
    def recv(self, tensors: Any, src: int, tag: int = 0) -> dist.Work:
        """Receive one tensor from group rank `src`; see `P2P.recv`."""
        return self._p2p.recv(tensors, src, tag)

    @_coalescing
    @on_dense(writes=("tensors",))
    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        """Receive one tensor from any rank; see `P2P.recv`."""
        return self._p2p.recv(tensors, None, tag)

    # torch calls these around sends and receives of CUDA tensors, from 2.15 on in groups of any class. Those of the
    # backend would return a work of what was sent by then: nothing, as P2P puts it off.

    def _start_coalescing(self, device: torch.device) -> None:
        """Begin what is one work for torch: all calls up to `_end_coalescing`."""
        self._p2p.start()
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        """Return the work of all calls since `_start_coalescing`."""
        works, self._coalesced = self._coalesced or [], None
        self._p2p.start()
        return WorkGroup(works, [], queue_of(self._backend_group))

    # --- calls left to the backend group ---

    @_call(updates=("tensors",))
    def reduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Reduce to the root by the backend; never coded."""
        self._leave("reduce", tensors)
        return self._direct.reduce(*given(tensors, opts, timeout))

    @_call(reads=("inputs",), writes=("outputs",))
    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Gather on the root by the backend; never coded."""
        self._leave("gather", [outputs, inputs])
        return self._direct.gather(*given(as_bytes(outputs), as_bytes(inputs), opts, timeout))

    @_call(reads=("inputs",), writes=("outputs",))
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Scatter from the root by the backend; never coded."""
        self._leave("scatter", [outputs, inputs])
        return self._direct.scatter(*given(as_bytes(outputs), as_bytes(inputs), opts, timeout))

    @_call(reads=("inputs",), writes=("outputs",))
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Exchange lists of tensors by the backend; never coded."""
        self._leave("all_to_all", [outputs, inputs])
        return self._direct.alltoall(*given(as_bytes(outputs), as_bytes(inputs), opts, timeout))

    # --- all ranks ---

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait until all ranks have called it and all earlier calls of each of them on this group are done."""
        works: list[dist.Work] = [self._direct.barrier(*given(opts))]
        if type(works[0]) is _BACKEND_WORK and not self._has_cuda:
            works = [RawWork(works[0], self._backend_group, "barrier")]
        if callbacks.depth() == 0:
            # Ranks make the same calls, so all of them have an executor or none.
            if background.has_executor(self._backend_group):
                works.append(Ordered(self._backend_group).barrier(*given(opts)))
            if (queue := queue_of(self._backend_group)).is_running:
                works.append(BackgroundWork(background.after_callbacks(queue), []))
        works += self._unfinished
        works += [
            BackgroundWork(submit(lambda _: None), []) for submit in background.executors_of(self._backend_group, self)
        ]
        return works[0] if len(works) == 1 else WorkGroup(works, [])

    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        """Run gloo's: on the group's first rank an error names the rank that did not come in time, or all of them."""
        if isinstance(timeout, float):
            timeout = timedelta(seconds=timeout)  # as torch
        ready: Any = self._ready
        ready.monitored_barrier(*given(timeout), wait_all_ranks=wait_all_ranks)

    # What torch 2.12 and older call, and other code may still.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # --- routes ---

    def _handle(self, work: dist.Work, opts: Any, name: str) -> dist.Work:
        """The handle of a raw call, whose errors name the rank that was lost.

        A caller that waits in the call needs no future, so this waits and gives it the backend's own.
        """
        if self._coalesced is not None:
            self._coalesced.append(work)
        if self._has_cuda:
            return work  # callbacks run on streams of their own
        if getattr(opts, "asyncOp", False):
            return RawWork(work, self._backend_group, name)
        try:
            work.wait()
        except RuntimeError as error:
            raise broken_off(name, self._backend_group, error) from error
        return work

    @property
    def _ready(self) -> dist.ProcessGroup:
        """The backend group, after deferred sends and receives were started."""
        self._p2p.start()
        return self._backend_group

    @property
    def _direct(self) -> Any:
        """The backend group for raw calls; those of callbacks run in an order of their own."""
        return self._ready if callbacks.depth() == 0 else Ordered(self._ready)

    def _takes(
        self,
        operation: str,
        tensors: Sequence[Tensor],
        message: Tensor,
        reduce_op: Any = None,
        known: tuple[str, Tensor] | None = None,
        any_size: bool = False,
    ) -> bool:
        """Whether `laconic.collectives.api` carries out a call whose part of one rank is as long as `message`.

        The answer depends only on facts that all ranks of the group share. A call that is left raw whatever its other
        arguments are is known from now on, by name and tensor: `known`, or else `operation` and `message`.
        """
        reason, lasts = None, True
        if len(tensors) != 1 or message.layout != torch.strided:
            reason, lasts = _OTHER_CALL, False
        elif message.dtype not in (CODED if reduce_op is None else _SUMMED):
            reason = NO_CODE
        elif self._backend_group.size() == 1:
            reason = ONE_RANK
        elif message.nbytes < self.options.min_nbytes and not any_size:
            reason = TOO_SMALL
        elif reduce_op is not None and _op(reduce_op) is None:
            reason, lasts = _OTHER_OP, False
        elif is_auto(self.options.codec):
            numel = _LARGE_NUMEL if any_size else message.numel()
            choice = predict(operation, numel, message.dtype, self._backend_group, device=message.device)
            reason = choice.reason if choice.codec == RAW else None
        if reason is not None:
            self._record_raw(operation, message, reason, *(known or (operation, message)), lasts)
        return reason is None

    def _leave(self, operation: str, arguments: Any) -> None:
        """Count a call that always goes to the backend, by its input, the longest of its tensors."""
        tensors = [x for x in torch.utils._pytree.tree_leaves(list(arguments)) if isinstance(x, Tensor)]
        if tensors:
            longest = max(tensors, key=Tensor.numel)
            lasts = all(x.numel() == longest.numel() for x in tensors)
            self._record_raw(operation, longest, _OTHER_CALL, operation, longest, lasts)

    def _record_raw(self, operation: str, message: Tensor, reason: str, call: str, x: Tensor, lasts: bool) -> None:
        nbytes = round(sent_nbytes(operation, message.numel() * message.dtype.itemsize, self._backend_group.size()))
        audit.record(operation, message.dtype, nbytes, nbytes, RAW, reason, 0.0)
        if lasts:
            self._know(call, x, operation, nbytes, reason)

    def _know(self, call: str, x: Tensor, operation: str, nbytes: int, reason: str) -> None:
        """Remember that calls like this one are left raw."""
        if not (x.dtype in CODED and x.dtype.itemsize == 1):  # fp8 goes to gloo as bytes
            self._raw.add(call, x, operation, nbytes, reason)


def _op(reduce_op: Any) -> Op | None:
    if reduce_op == dist.ReduceOp.SUM:
        return "sum"
    return "avg" if reduce_op == dist.ReduceOp.AVG else None


def _op_of(opts: Any) -> Op:
    op = _op(opts.reduceOp)
    assert op is not None, "taken"
    return op


def given(*arguments: Any) -> list[Any]:
    """Arguments that the caller has set; the backend group has defaults of its own for the others."""
    return [argument for argument in arguments if argument is not None]


def _split(
    taken: Sequence[bool],
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    opts: Any,
    each: Callable[[Tensor, Tensor, Any], dist.Work],
    rest: Callable[..., dist.Work],
    queue: callbacks.CallbackQueue,
) -> dist.Work:
    """Run pairs that are taken one by one, the others together."""
    pairs = list(zip(outputs, inputs, taken, strict=True))
    works = [each(output, input, opts) for output, input, is_taken in pairs if is_taken]
    left = [(output, input) for output, input, is_taken in pairs if not is_taken]
    if left:
        sides = [list(side) for side in zip(*left, strict=True)]
        works.append(rest(*given(*sides, opts)))
    return WorkGroup(works, outputs, queue)


def _check_lists(outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], world: int) -> None:
    """Refuse lists of an all-gather that have not one tensor for each rank."""
    for output in outputs:
        if len(output) != world:
            raise FormatError(
                f"tensor_list has {len(output)} tensors, but the group has {world} ranks; pass one tensor for each"
            )
    for output, input in zip(outputs, inputs, strict=False):
        if _alike(output) and output[0].numel() != input.numel():
            raise FormatError(
                f"the tensors of tensor_list have {output[0].numel()} elements each, but tensor has {input.numel()};"
                " they must have as many"
            )


def _alike(tensors: Sequence[Tensor]) -> bool:
    """Whether these tensors could be rows of one tensor."""
    return len({(x.shape, x.dtype, x.device) for x in tensors}) == 1
