"""Which host is calling, and what a user of spread experts does in its place.

[Note: DDP and FSDP are seen when they list parameters]
Both list the parameters of each module before they change any: DDP those to be reduced, `fully_shard` to tell those to
be ignored from those to be sharded. `replicate` lists those to be reduced in its first forward, where it makes a DDP of
a bare list of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence, Set
from types import FrameType

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from laconic.collectives.runtime.group_facts import ranks_of
from laconic.errors import ConfigError

_REMEDIES = {
    ("transformers.trainer", "Trainer"): "take LaconicTrainer, or class Mine(LaconicTrainerMixin, ...), of"
    " laconic.integrations.huggingface",
    ("lightning.pytorch.trainer.trainer", "Trainer"): "give it callbacks=[LaconicCallback()] of"
    " laconic.integrations.lightning",
    ("pytorch_lightning.trainer.trainer", "Trainer"): "import it from lightning, and give it"
    " callbacks=[LaconicCallback()] of laconic.integrations.lightning",
    ("accelerate.accelerator", "Accelerator"): "call attach(accelerator, model) of laconic.integrations.accelerate"
    " before prepare",
}
"""What to do with hosts that save on rank 0 what they take for the whole model, by module and name of their class."""


_FSDP = "torch.distributed.fsdp"
_SHARDED = "shard and reduce them as if each process had all"
_LEFT_OUT = "leave their gradients sums over all processes, where those of the rest are means"


def calling_host() -> tuple[str, str, str] | None:
    """Return name, package and remedy of the host that is calling, the outermost of several; None: it is none."""
    found = None
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        for (module, name), remedy in _REMEDIES.items():
            kind = getattr(sys.modules.get(module), name, None)
            if kind is not None and isinstance(frame.f_locals.get("self"), kind):
                found = name, module.partition(".")[0], remedy
        frame = frame.f_back
    return found


def check_not_listed(experts: Iterable[nn.Parameter]) -> None:
    """Refuse FSDP and `replicate` as the caller of the function that calls this one.

    See [Note: DDP and FSDP are seen when they list parameters]. FSDP would shard `experts`, or train them without
    reducing their gradients; `replicate` would give all processes the first one's.
    """
    caller, experts = sys._getframe(2), [*experts]
    _check_not_replicated(experts, None, caller)
    ignored = _ignored_by_fsdp(caller)
    if ignored is None:
        return
    if any(id(parameter) not in ignored for parameter in experts):
        raise fsdp_refused(_SHARDED)
    if any(parameter.requires_grad for parameter in experts):
        raise fsdp_refused(_LEFT_OUT)


def check_not_wrapped(experts: Iterable[nn.Parameter], peers: Set[int]) -> None:
    """Refuse DDP and FSDP over `peers`, ranks with other experts, as the caller of the function that calls this one.

    Those that leave out `experts` that are whole may be.
    """
    caller, experts = sys._getframe(2), [*experts]
    _check_not_replicated(experts, peers, caller)
    frame: FrameType | None = caller
    whole = [parameter for parameter in experts if not isinstance(parameter, DTensor)]
    if (ignored := _ignored_by_fsdp(caller)) is not None:
        while frame is not None and frame.f_code.co_name != "fully_shard":
            frame = frame.f_back
        mesh = None if frame is None else frame.f_locals.get("mesh")
        is_apart = mesh is not None and peers.isdisjoint(mesh.mesh.flatten().tolist())
        if not is_apart and any(id(parameter) not in ignored for parameter in whole):
            raise fsdp_refused(_SHARDED, "call laconic.moe.fully_shard_layers(model, grid) in its place")
        return
    for _ in range(3):  # comprehensions may have frames of their own
        if frame is None or frame.f_code.co_name == "_build_params_for_reducer":
            break
        frame = frame.f_back
    ddp = None if frame is None else frame.f_locals.get("self")
    if not isinstance(ddp, DistributedDataParallel) or peers.isdisjoint(ranks_of(ddp.process_group)):
        return
    named = nn.Module.named_parameters(ddp.module)
    ignored = {id(parameter) for name, parameter in named if name in ddp.parameters_to_ignore}
    if any(id(parameter) not in ignored for parameter in whole):
        raise ConfigError(
            "experts are spread over processes, but DDP would give all the first one's; leave DDP out and call"
            " laconic.moe.reduce_gradients(model, grid) after backward"
        )


def _check_not_replicated(experts: Sequence[nn.Parameter], peers: Set[int] | None, caller: FrameType) -> None:
    """Refuse torch's composable `replicate` as the caller, over `peers` or (None) any, unless it leaves out."""
    if caller.f_code.co_name != "_collect_params" or not caller.f_globals.get("__name__", "").endswith(".replicate"):
        return
    ignored = {id(parameter) for parameter in caller.f_locals["ignored_params"]}
    if all(id(parameter) in ignored for parameter in experts):
        return
    frame: FrameType | None = caller
    while frame is not None and frame.f_code.co_name == "_collect_params":  # it calls itself for each child
        frame = frame.f_back
    options = {} if frame is None else frame.f_locals.get("kwargs", {})
    mesh = options.get("device_mesh")
    group = mesh.get_group() if mesh is not None else options.get("process_group") or dist.group.WORLD
    if peers is None or group is None or not peers.isdisjoint(ranks_of(group)):
        raise ConfigError(
            "experts are spread over processes, but replicate would give all the first one's; give it ignored_modules ="
            " [layer.experts for layer in moe_layers(model).values()] of laconic.moe, or leave it out and call"
            " laconic.moe.reduce_gradients(model, grid) after backward"
        )


def _ignored_by_fsdp(caller: FrameType) -> set[int] | None:
    """Return the ids of the parameters that FSDP leaves out, if it is the caller."""
    if "ignored_params" not in caller.f_locals or not caller.f_globals.get("__name__", "").startswith(_FSDP):
        return None
    return {id(parameter) for parameter in caller.f_locals["ignored_params"] or ()}


def fsdp_refused(
    what: str = _SHARDED, instead: str = "call fully_shard of what parallelize returns in its place"
) -> ConfigError:
    """Return the error to raise where FSDP would do `what` with spread experts."""
    by_host, remedy = "", ""
    if (host := calling_host()) is not None:
        name, package, call = host
        by_host, remedy = f" by {package}'s {name}", f"leave FSDP out and {call}; or, in a loop of your own, "
    return ConfigError(f"experts are spread over processes, but FSDP{by_host} would {what}; {remedy}{instead}")
