"""Makes the process groups of a script laconic's, so that what it sends is coded losslessly.

Every group of torch.distributed (of `init_process_group`, `new_group` and DeviceMesh alike) is made in one function of
torch, which is watched. The script finds the name of the backend that it asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from laconic.collectives import audit
from laconic.collectives.codec import Lossless
from laconic.run.models import Refusal

_WHOLE = {"undefined": "cpu:gloo,cuda:nccl", "gloo": "cpu:gloo,cuda:gloo", "nccl": "cuda:nccl", "cpu:gloo": "gloo"}
_NAMES = {
    frozenset({"cpu:gloo", "cuda:nccl"}): "laconic",
    frozenset({"cpu:gloo", "cuda:gloo"}): "laconic:gloo",
    frozenset({"cuda:nccl"}): "laconic:nccl",
}


def laconic_backend(backend: str) -> str | None:
    """The name of laconic's backend over the same backends of torch; None if there is none.

    Args:
        backend: as of `init_process_group`: "gloo", "nccl", "cpu:gloo,cuda:nccl"; "undefined" is torch's name of none.
    """
    name = backend.lower()
    while name in _WHOLE:
        name = _WHOLE[name]
    return _NAMES.get(frozenset(name.split(",")))


@dataclass
class ZippedGroups:
    """Context manager in which process groups of gloo and NCCL become laconic's.

    Attributes:
        zip: "auto" codes a message where that is predicted to be faster; "on" codes all that can be.
    """

    zip: Literal["auto", "on"]
    _names: set[str] = field(default_factory=set)
    _left: dict[str, int] = field(default_factory=dict)

    def __enter__(self) -> ZippedGroups:
        self._before = audit.snapshot()
        if dist.is_available():
            self._make = c10d._new_process_group_helper
            c10d._new_process_group_helper = self._make_zipped  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        if dist.is_available():
            c10d._new_process_group_helper = self._make

    def sent(self) -> dict[str, Any]:
        """What this process sent since the block began, as `summarize` tells it."""
        counts = audit.snapshot() - self._before
        return {
            "zip": self.zip,
            "groups": len(self._names),
            "left_groups": dict(self._left),
            "calls": sum(entry.num_calls for entry in counts.entries),
            "coded_calls": sum(entry.num_calls for entry in counts.entries if entry.codec != audit.RAW),
            "nbytes": counts.raw_nbytes,
            "sent_nbytes": counts.sent_nbytes,
            "coding_seconds": counts.coding_seconds,
            "uncoded": counts.left_raw(),
        }

    def _make_zipped(
        self,
        group_size: int,
        group_rank: int,
        global_ranks: list[int],
        backend: Any,
        store: Any,
        group_name: Any,
        backend_options: Any = None,
        **others: Any,
    ) -> tuple[Any, Any]:
        """torch's `_new_process_group_helper`, with laconic's backend in place of gloo and NCCL."""
        make, given = self._make, (group_size, group_rank, global_ranks)
        name, asked_for = laconic_backend(str(backend)), str(backend).lower()
        is_member = not global_ranks or c10d.get_rank() in global_ranks
        if asked_for.startswith("laconic"):  # the script's own choice, with its own options
            self._names.update({group_name} if is_member else ())
            return make(*given, backend, store, group_name, backend_options=backend_options, **others)
        if asked_for == "nccl" and not dist.is_nccl_available():  # as torch is about to say
            return make(*given, backend, store, group_name, backend_options=backend_options, **others)
        if name is None or backend_options is not None:
            self._leave(is_member, asked_for if name is None else None, backend_options)
            return make(*given, backend, store, group_name, backend_options=backend_options, **others)
        from laconic.collectives.process_group import ProcessGroupOptions  # which registers laconic's backends

        options = ProcessGroupOptions() if self.zip == "auto" else ProcessGroupOptions(codec=Lossless())
        group, its_store = make(*given, c10d.Backend(name), store, group_name, backend_options=options, **others)
        if is_member:
            self._names.add(group_name)
            c10d._world.pg_map[group] = (backend, its_store)  # what `get_backend` says
        return group, its_store

    def _leave(self, is_member: bool, backend: str | None, options: Any) -> None:
        """Note why a group is left as it is."""
        if backend is not None:
            why = f"its backend is {backend}, neither gloo nor nccl"
        else:
            why = f"the script gives it {type(options).__qualname__}, which a coded group does not take"
        if self.zip == "on":
            raise Refusal(
                f"--zip is on, but a process group cannot be coded: {why}; --zip auto leaves such groups as they are"
            )
        if is_member:
            self._left[why] = self._left.get(why, 0) + 1
