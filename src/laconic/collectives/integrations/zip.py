"""One call that makes the collectives of a DDP or FSDP2 model lossless and smaller."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import pairwise
from typing import Any, Literal, NoReturn
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from laconic.collectives import api
from laconic.collectives.codec import Codec, Lossless, check_codec, setting_of
from laconic.collectives.integrations.ddp import ZipHookState, ddp_zip_hook
from laconic.errors import ConfigError, ModelError


@dataclass(frozen=True)
class ZippedPart:
    """One collective of one unit."""

    unit: str
    """Name of the module in the model; "" is the model itself."""
    operation: Literal["all_gather", "reduce_scatter", "all_reduce"]
    dtype: str
    """The dtype that the wrapper hands over: "bfloat16", ...; "uint8" for parameters of several types."""
    num_elements: int
    """Elements of the whole unit."""
    left: str | None
    """Why it is left native; None if it goes over the codec."""


@dataclass(frozen=True)
class ZippedCollectives:
    """Summary of `zip_collectives` or `quantize_gathers`: the collectives attached, those left, and why. Print it."""

    wrapper: Literal["DDP", "FSDP2"]
    codec: str
    """"auto", or the codec that was asked for: "Lossless(auto)"."""
    parts: tuple[ZippedPart, ...]
    _undo: list[Callable[[], None]] = field(repr=False)

    def __str__(self) -> str:
        lines = [f"{self.wrapper}, codec {self.codec}"]
        for (operation, dtype, left), parts in self._alike().items():
            what = f"{operation} of {sum(part.num_elements for part in parts):,} {dtype} in {len(parts)} unit(s)"
            lines.append(f"  {what}" if left is None else f"  left as it was: {what}: {left}")
        return "\n".join(lines)

    def remove(self) -> None:
        """Restore the model's original collectives, but for what another call has put in the place of one since."""
        while self._undo:
            self._undo.pop()()

    def _alike(self) -> dict[tuple[str, str, str | None], list[ZippedPart]]:
        found: dict[tuple[str, str, str | None], list[ZippedPart]] = {}
        for part in sorted(self.parts, key=lambda part: part.left is not None):
            found.setdefault((part.operation, part.dtype, part.left), []).append(part)
        return found


def zip_collectives(
    model: nn.Module, *, codec: Codec | str = "auto", across: dist.ProcessGroup | None = None, prefetch: bool = False
) -> ZippedCollectives:
    """Make a wrapped model communicate over a codec; the model stays as it is. Call it once, before the first backward.

    Parameters are gathered bit for bit. Gradients are summed in fp32 in the order of ranks and rounded once, which the
    native sum need not do: with two ranks and fp32 the bits are the same, with more the last one may differ from the
    native sum, but neither from run to run nor from codec to codec. `no_sync`, `set_requires_gradient_sync` and the
    settings for resharding and mixed precision keep their meaning. A collective that something else has replaced, as
    `quantize_reduction` does the reduce-scatter, is left to it.

    Args:
        model: a module with fully_shard applied to it or inside it, or a DistributedDataParallel, or a module that has
            some inside, as torch.compile makes one.
        codec: "auto" lets the cost model decide for each message whether it is shortened; a codec is used for all.
        across: FSDP2 on a mesh inside one node: the ranks of other nodes that hold the same shards. After the
            reduce-scatter the shard is averaged over them, over the codec too. They must start alike. This makes hybrid
            sharding; FSDP2's own (HSDP, on a 2-D mesh) does its all-reduce natively.
        prefetch: FSDP2 on CPUs: in forward, the parameters of each unit are gathered while the unit before it computes,
            which keeps one more unit in memory. Units follow each other as they do in the model. On GPUs FSDP2 does so
            by itself, and in backward everywhere.

    Returns:
        The collectives attached and left, with `remove()`.

    Raises:
        ModelError: the model is not wrapped, or has no collective that could be attached to.
        ConfigError: an argument does not go with the wrapper, or codec is a string other than "auto".
    """
    check_codec(codec)
    undo: list[Callable[[], None]] = []
    units = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    replicated = [(name, m) for name, m in model.named_modules() if isinstance(m, DistributedDataParallel)]
    if units and replicated:
        raise ModelError(
            f"model has modules in DDP ({_listed(replicated)}) and under FSDP2 ({_listed(units)}); call zip_collectives"
            " with each of them"
        )
    if replicated:
        for argument, value in (("across", across), ("prefetch", prefetch)):
            if value:
                raise ConfigError(f"{argument} is {value}, but DDP has whole parameters; it goes with FSDP2")
        parts = [part for name, module in replicated for part in _attach_to_ddp(name, module, codec, undo)]
        zipped = ZippedCollectives("DDP", _codec_name(codec), tuple(parts), undo)
    else:
        if not units:
            refuse_unwrapped(model)
        parts = [part for name, unit in units for part in _attach_to_unit(name, unit, codec, across, undo)]
        zipped = ZippedCollectives("FSDP2", _codec_name(codec), tuple(parts), undo)
        if prefetch:
            for (_, unit), (_, following) in pairwise(units):
                unit.set_modules_to_forward_prefetch([following])
                undo.append(partial(unit.set_modules_to_forward_prefetch, []))
    if all(part.left is not None for part in zipped.parts):
        reasons = "; ".join(dict.fromkeys(f"{part.operation}: {part.left}" for part in zipped.parts))
        raise ModelError(f"model has no collective that could go over a codec: {reasons or 'it has no parameters'}")
    return zipped


def _codec_name(codec: Codec | str) -> str:
    """A codec's name; that of `Lossless()` is "auto" too, so its class stands in front."""
    return setting_of(codec) if isinstance(codec, Lossless) else codec if isinstance(codec, str) else codec.name


def _listed(modules: Sequence[tuple[str, object]]) -> str:
    names = [name or "the model itself" for name, _ in modules]
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def refuse_unwrapped(model: nn.Module) -> NoReturn:
    """Say how a model has to be wrapped."""
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ModelError(
            "model is wrapped by FSDP1 (FullyShardedDataParallel), whose collectives cannot be replaced; use FSDP2"
            " (fully_shard), or init_process_group('laconic'), over which FSDP1's are coded too"
        )
    raise ModelError(
        f"model is a {type(model).__name__} that neither DDP nor FSDP2 has wrapped; wrap it first"
        " (DistributedDataParallel(model), fully_shard(model))"
    )


# --- DDP ---


def _attach_to_ddp(
    name: str, model: DistributedDataParallel, codec: Codec | str, undo: list[Callable[[], None]]
) -> Iterator[ZippedPart]:
    left, state = None, _removed_state(model)
    if model.process_group.size() == 1:
        left = "its group has one rank"
    elif state is not None:
        state.codec, state.native = codec, False
        undo.append(partial(setattr, state, "native", True))
    elif getattr(model, "_comm_hooks", None):
        left = "another communication hook is registered; a model takes one"
    else:
        state, hook = ddp_zip_hook(model.process_group, codec=codec)
        state.model = ref(model)
        model.register_comm_hook(state, hook)
        undo.append(partial(setattr, state, "native", True))
    numels: dict[str, int] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            dtype = _name(parameter.dtype)
            numels[dtype] = numels.get(dtype, 0) + parameter.numel()
    for dtype, numel in numels.items():
        yield ZippedPart(name, "all_reduce", dtype, numel, left)


def _removed_state(model: DistributedDataParallel) -> ZipHookState | None:
    """The state of the hook that an earlier call has left, which DDP cannot get rid of, after `remove`."""
    states = [state for _, state in getattr(model, "_comm_hooks", None) or ()]
    return next((state for state in states if isinstance(state, ZipHookState) and state.native), None)


# --- FSDP2 ---


def _attach_to_unit(
    name: str, unit: Any, codec: Codec | str, across: dist.ProcessGroup | None, undo: list[Callable[[], None]]
) -> Iterator[ZippedPart]:
    # Imported late: it needs a torch whose FSDP2 is where we know it.
    from laconic.collectives.integrations import fsdp2

    def replace(group: Any, attribute: str, new: Any) -> None:
        undo.append(partial(fsdp2.put_back, group, attribute, new, getattr(group, attribute)))
        setattr(group, attribute, new)

    for group in fsdp2.param_groups(unit):
        _, reduced, _ = _dtypes_of(group)
        alone = "it is sharded over one rank" if fsdp2.num_shards(group) == 1 else None
        gathered, numel, left = gather_of(group)
        # Through the attributes and not set_custom_*: those refuse modules with several groups, and none takes back.
        if left is None:
            replace(group, "_all_gather_comm", fsdp2.ZipAllGather(codec))
        yield ZippedPart(name, "all_gather", gathered, numel, left)
        if reduced is None:
            continue
        left = alone or _replaced(group._reduce_scatter_comm, fsdp2.DefaultReduceScatter, "reduce-scatter")
        if left is None:
            replace(group, "_reduce_scatter_comm", fsdp2.ZipReduceScatter(codec))
            if group.gradient_divide_factor is not None:  # a plain sum, and FSDP2 divides afterwards
                replace(group, "force_sum_reduction_for_comms", True)
        yield ZippedPart(name, "reduce_scatter", reduced, numel, left)
        left = None
        if fsdp2.replicates(group):
            if across is not None:
                raise ConfigError(
                    "across is a process group, but the model is sharded over a 2-D mesh (HSDP) and averages over its"
                    " second dimension; shard over the mesh inside the node only, or leave `across` out"
                )
            left = "FSDP2 does not let others replace the all-reduce of a 2-D mesh; pass `across` with a 1-D mesh"
        elif across is None:
            continue
        elif (before := group._all_reduce_hook) is not None and not (
            isinstance(before, fsdp2.DividedOnce) and before.then is None
        ):
            left = "another all-reduce hook is set"
        else:
            hook = partial(_average_across, group=across, codec=codec)
            replace(group, "_all_reduce_hook", hook if before is None else before.followed_by(hook))
        yield ZippedPart(name, "all_reduce", reduced, numel, left)


def gather_of(group: Any) -> tuple[str, int, str | None]:
    """Of a group of FSDP2's parameters: the dtype that is gathered, elements, and why it has to stay as it is."""
    from laconic.collectives.integrations import fsdp2

    dtype, _, numel = _dtypes_of(group)
    alone = "it is sharded over one rank" if fsdp2.num_shards(group) == 1 else None
    return dtype, numel, alone or _replaced(group._all_gather_comm, fsdp2.DefaultAllGather, "all-gather")


def _average_across(shard: Tensor, group: dist.ProcessGroup, codec: Codec | str) -> None:
    api.all_reduce(shard, group, op="avg", codec=codec)


def _replaced(comm: Any, native: type, what: str) -> str | None:
    return None if isinstance(comm, native) else f"{type(comm).__name__} is set as its {what}"


def _dtypes_of(group: Any) -> tuple[str, str | None, int]:
    """Dtypes of a group's gathered parameters and reduced gradients (None: it has none), and its number of elements."""
    gathered, reduced, numel = set(), set(), 0
    for member in group.fsdp_params:
        parameter = member.sharded_param
        policy = group.mp_policy if hasattr(group, "mp_policy") else member.mp_policy  # torch 2.15 has one for each
        gathered.add(policy.param_dtype or parameter.dtype)
        if parameter.requires_grad:
            reduced.add(policy.reduce_dtype or policy.param_dtype or parameter.dtype)
        numel += parameter.numel()
    # FSDP2 gathers parameters of several types as bytes.
    dtype = "uint8" if len(gathered) > 1 else _name(gathered.pop())
    # Gradients of several types are reduced in the one that holds all of them.
    return dtype, _name(reduce(torch.promote_types, reduced)) if reduced else None, numel


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
