"""Which host is calling, and what a user of spread experts does in its place.

[Note: FSDP is seen when it lists parameters]
DDP and FSDP1 register the model as their child. `fully_shard` registers nothing, but before it changes any it lists the
parameters of each module, to tell those to be ignored from those to be sharded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType

from torch import nn

from laconic.errors import ConfigError

__all__ = ["calling_host", "check_not_listed_by_fsdp", "fsdp_refused"]

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


def check_not_listed_by_fsdp(experts: Iterable[nn.Parameter], depth: int) -> None:
    """Refuse FSDP as the caller `depth` frames above; see [Note: FSDP is seen when it lists parameters].

    Raises:
        ConfigError: it is, and would shard `experts`, or train them without reducing their gradients.
    """
    caller = sys._getframe(depth + 1)
    if "ignored_params" not in caller.f_locals or not caller.f_globals.get("__name__", "").startswith(_FSDP):
        return
    ignored = {id(parameter) for parameter in caller.f_locals["ignored_params"] or ()}
    if any(id(parameter) not in ignored for parameter in experts):
        raise fsdp_refused(_SHARDED)
    if any(parameter.requires_grad for parameter in experts):
        raise fsdp_refused(_LEFT_OUT)


def fsdp_refused(what: str = _SHARDED) -> ConfigError:
    """Return the error to raise where FSDP would do `what` with spread experts."""
    by_host, remedy = "", ""
    if (host := calling_host()) is not None:
        name, package, call = host
        by_host, remedy = f" by {package}'s {name}", f"leave FSDP out and {call}; or, in a loop of your own, "
    return ConfigError(
        f"experts are spread over processes, but FSDP{by_host} would {what}; {remedy}call fully_shard of what"
        " parallelize returns in its place"
    )
