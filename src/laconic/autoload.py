"""Tells torch the names of laconic's process groups.

torch runs `register` at the end of `import torch` (entry point group `torch.backends`, by src/_laconic_backends.py), so
that `init_process_group("laconic")` works in programs that never import laconic. Nothing of laconic but this file is
loaded until a group is made. TORCH_DEVICE_BACKEND_AUTOLOAD=0 switches it off.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

__all__ = ["NAMES", "register"]

NAMES = {
    "laconic": ("cpu", "cuda"),
    "laconic:gloo": ("cpu", "cuda"),
    "laconic:nccl": ("cuda",),
}
"""Backends for `init_process_group` and `new_group` -> devices whose tensors they take. "laconic" carries CPU tensors
by gloo and CUDA tensors by NCCL, as torch's own default does."""


def register() -> None:
    """Register the backends with torch. A second call changes nothing."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    for name, devices in NAMES.items():
        if name.upper() not in dist.Backend._plugins:
            dist.Backend.register_backend(name, _Creator(name), extended_api=True, devices=list(devices))
    original = dist.monitored_barrier
    if not hasattr(original, "__wrapped__"):
        wrapped = _monitored_barrier(original)
        dist.monitored_barrier = dist.distributed_c10d.monitored_barrier = wrapped


def _monitored_barrier(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap torch's barrier, which refuses every group whose backend is not called gloo."""

    @wraps(original)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        import torch.distributed as dist

        found: Any = dist.group.WORLD if group is None else group
        if not getattr(found, "is_laconic", False):
            original(group, timeout, wait_all_ranks)
        else:
            found.monitored_barrier(timeout, wait_all_ranks)

    return monitored_barrier


class _Creator:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, arguments: Any, options: Any) -> Any:
        from laconic.collectives.process_group.group import create

        return create(self._name, arguments, options)
