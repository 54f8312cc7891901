"""laconic in Lightning's Trainer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from laconic.activations.report import Report
from laconic.errors import ConfigError, ModelError
from laconic.gradients import CompressedGradients, compress_gradients
from laconic.integrations.config import LaconicConfig, compress, logged

__all__ = ["LaconicCallback", "LaconicConfig", "LaconicStrategy"]


class LaconicStrategy(DDPStrategy):
    """DDP's place with gradients in codes: they are held and averaged in 8 or 12 bits, and nothing is wrapped.

    `Trainer(strategy=LaconicStrategy(), callbacks=[LaconicCallback()])`; without the callback nobody reduces, and the
    first step raises TrainingError. Clipping and any optimizer of torch read the codes.

    Args:
        gradients: bits, 8 or 12.
        kwargs: of DDPStrategy.

    Attributes:
        compressed: the gradients, once fitting has begun.

    Raises:
        ConfigError: gradients is neither 8 nor 12.
    """

    def __init__(self, gradients: int = 8, **kwargs: Any) -> None:
        if gradients not in (8, 12):
            raise ConfigError(f"gradients is {gradients!r}, but it must be 8 or 12; take 'ddp' for 32")
        self._gradient_bits = gradients
        self.compressed: CompressedGradients | None = None
        super().__init__(**kwargs)

    def configure_ddp(self) -> None:
        """Hold the gradients in codes instead of wrapping the model."""
        module = self.lightning_module
        assert module is not None
        if self.compressed is None:
            self.compressed = compress_gradients(module, dist.group.WORLD, bits=self._gradient_bits)


class LaconicCallback(Callback):
    """Converts the module when fitting begins, before a strategy wraps it, and reduces for `LaconicStrategy`.

    What was saved is logged as "laconic/activation_nbytes_per_token" and "laconic/activation_factor".

    Args:
        laconic: what to switch on; None is 4-bit activations. Gradients are `LaconicStrategy`'s, and the optimizer is
            what `configure_optimizers` returns.
        submodule: name of the part to convert; None is the only Hugging Face model in the module, or all of it.

    Attributes:
        report: of the model, once fitting has begun.

    Raises:
        ConfigError: the configuration asks for gradients or an optimizer.
        ModelError: when fitting begins: there is no such submodule, or it cannot be converted.
    """

    def __init__(self, laconic: LaconicConfig | None = None, submodule: str | None = None) -> None:
        self.laconic = LaconicConfig() if laconic is None else laconic
        if self.laconic.gradients != 32:
            raise ConfigError(
                f"gradients is {self.laconic.gradients}, but in Lightning they are the strategy's; give "
                f"strategy=LaconicStrategy(gradients={self.laconic.gradients}) and leave gradients out"
            )
        if self.laconic.optimizer != "host":
            raise ConfigError(
                f"optimizer is {self.laconic.optimizer!r}, but in Lightning configure_optimizers makes it; return "
                "laconic.AdamW8bit there and leave optimizer out"
            )
        self._submodule = submodule
        self._model: nn.Module | None = None
        self.report: Report | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Convert, when stage is "fit"."""
        if stage != "fit":
            return
        model = _chosen(pl_module, self._submodule)
        if self._model is not model:
            self.report, self._model = compress(model, self.laconic), model

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what was saved."""
        if trainer.logger is not None and (found := logged(self.report)):
            trainer.logger.log_metrics(found, step=trainer.global_step)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Average the gradients of `LaconicStrategy`, before they are clipped."""
        strategy = trainer.strategy
        if isinstance(strategy, LaconicStrategy) and strategy.compressed is not None:
            strategy.compressed.reduce()


def _chosen(module: LightningModule, name: str | None) -> nn.Module:
    if name is not None:
        try:
            return module.get_submodule(name)
        except AttributeError:
            parts = ", ".join(part for part, _ in module.named_children())
            raise ModelError(
                f"submodule is {name!r}, but {type(module).__name__} has no such part; it has {parts}"
            ) from None
    try:
        from transformers import PreTrainedModel
    except ImportError:
        return module
    found: list[nn.Module] = []
    for part in module.modules():
        inside = any(part is inner for outer in found for inner in outer.modules())
        if isinstance(part, PreTrainedModel) and not inside:
            found.append(part)
    return found[0] if len(found) == 1 else module
