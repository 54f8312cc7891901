"""laconic in Ray Train: workers whose process group shortens floating-point messages losslessly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray.train.torch import TorchConfig

from laconic.autoload import NAMES
from laconic.collectives import Codec, ProcessGroupOptions
from laconic.collectives.process_group.group import set_default_options
from laconic.errors import ConfigError

__all__ = ["LaconicTorchConfig"]


@dataclass
class LaconicTorchConfig(TorchConfig):
    """`TorchTrainer(..., torch_config=LaconicTorchConfig())`: the workers' process group is laconic's.

    `prepare_model` and the rest of Ray Train stay as they are. In the training function
    `laconic.compress_activations(model)` goes before `prepare_model`.

    Args:
        backend: "laconic" (gloo for CPU tensors, NCCL for CUDA tensors), "laconic:gloo" or "laconic:nccl".
        codec, min_nbytes: as in `laconic.collectives.ProcessGroupOptions`.
        init_method, timeout_s: as in TorchConfig.

    Raises:
        ConfigError: the backend is another one, the codec is lossy, or min_nbytes is negative.
    """

    backend: str | None = "laconic"
    codec: Codec | str = "auto"
    min_nbytes: int = 1 << 16

    def __post_init__(self) -> None:
        if self.backend not in NAMES:
            raise ConfigError(
                f"backend is {self.backend!r}, but it must be one of {', '.join(NAMES)}; others are TorchConfig's"
            )
        self.options  # noqa: B018  # which checks the other two

    @property
    def options(self) -> ProcessGroupOptions:
        """Those of the workers' process group."""
        return ProcessGroupOptions(codec=self.codec, min_nbytes=self.min_nbytes)

    @property
    def backend_cls(self) -> type[Any]:
        """Ray's backend for torch, which hands the options to the workers before they meet."""
        return _LaconicBackend


class _LaconicBackend(TorchConfig().backend_cls):  # type: ignore[misc]
    def on_start(self, worker_group: Any, backend_config: LaconicTorchConfig) -> None:
        # Ray calls init_process_group itself, and without options.
        worker_group.execute(set_default_options, backend_config.options)
        super().on_start(worker_group, backend_config)
