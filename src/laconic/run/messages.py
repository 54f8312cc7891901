"""Lets a script that knows nothing of laconic send fewer bytes: its process groups become laconic's as it makes them.

torch's `init_process_group` and `new_group` are replaced while the script runs, wherever a loaded module has them by
name. Everything else of torch.distributed is as it was: what a script sends goes through the group that it made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Literal

import torch.distributed as dist

from laconic.autoload import NAMES
from laconic.collectives import Lossless, ProcessGroupOptions, audit
from laconic.collectives.audit import Snapshot
from laconic.run.refusal import Refusal

__all__ = ["Messages"]

_INSTEAD = {
    None: "laconic",
    "undefined": "laconic",
    "cpu:gloo,cuda:nccl": "laconic",
    "cuda:nccl,cpu:gloo": "laconic",
    "gloo": "laconic:gloo",
    "cpu:gloo": "laconic:gloo",
    "nccl": "laconic:nccl",
    "cuda:nccl": "laconic:nccl",
}
"""Backends that carry what laconic shortens -> laconic's over the same one."""
_MAKERS = ("init_process_group", "new_group")


@dataclass
class Messages:
    """Context manager in which process groups shorten floating-point messages losslessly.

    Args:
        zip: "auto" codes where that is predicted to be faster; "on" everything that can be coded; None changes nothing.

    Attributes:
        groups: backends that the script named -> groups of them that were made laconic's.
        own: groups that the script itself made laconic's.
    """

    zip: Literal["auto", "on"] | None
    groups: dict[str, int] = field(default_factory=dict)
    own: int = 0

    def __post_init__(self) -> None:
        self._originals: dict[str, Callable[..., Any]] = {}
        self._before = Snapshot(())

    def __enter__(self) -> Messages:
        self._before = audit.snapshot()
        if self.zip is not None and dist.is_available():
            for name in _MAKERS:
                original = getattr(dist.distributed_c10d, name)
                self._originals[name] = original
                _rename(name, original, self._making(name, original))
        return self

    def __exit__(self, *_: object) -> None:
        for name, original in self._originals.items():
            _rename(name, getattr(dist.distributed_c10d, name), original)

    @property
    def sent(self) -> Snapshot:
        """What this process sent through laconic's groups since the context was entered."""
        return audit.snapshot() - self._before

    def _making(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        place = 0 if name == "init_process_group" else 2  # of `backend` among the positional arguments

        @wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            named = args[place] if len(args) > place else kwargs.get("backend")
            backend = None if named is None else str(named).lower()
            if name == "new_group" and backend is None:
                return original(*args, **kwargs)  # as the default group
            if backend in NAMES or (backend is not None and backend.partition(":")[2] in NAMES):
                self.own += 1
                return original(*args, **kwargs)
            instead = _INSTEAD.get(backend)
            if instead is None:
                raise Refusal(
                    f"--zip is {self.zip}, but the script calls {name} with backend {backend!r}; only gloo and nccl "
                    "carry what is coded: leave out --zip"
                )
            if kwargs.get("pg_options") is not None:
                raise Refusal(
                    f"--zip is {self.zip}, but the script calls {name} with pg_options, which are its backend's own; "
                    "leave out --zip"
                )
            given = list(args)
            if len(given) > place:
                given[place] = instead
            else:
                kwargs["backend"] = instead
            kwargs["pg_options"] = ProcessGroupOptions(codec="auto" if self.zip == "auto" else Lossless())
            made = original(*given, **kwargs)
            key = backend or "torch's default"
            self.groups[key] = self.groups.get(key, 0) + 1
            return made

        return make


def _rename(name: str, old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Let a name mean `new` in every loaded module in which it means `old`."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)
