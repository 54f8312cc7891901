"""Tells torch the names of laconic's process groups.

torch runs `register` at the end of `import torch` (entry point group `torch.backends`, by src/_laconic_backends.py), so
that `init_process_group("laconic")` works in programs that never import laconic. Nothing of laconic but this file is
loaded until a group is made. TORCH_DEVICE_BACKEND_AUTOLOAD=0 switches it off.
"""

from __future__ import annotations

from typing import Any

NAMES = {"laconic": ("cpu", "cuda"), "laconic:gloo": ("cpu", "cuda"), "laconic:nccl": ("cuda",)}
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


class _Creator:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, arguments: Any, options: Any) -> Any:
        from laconic.collectives.process_group.group import create

        return create(self._name, arguments, options)
