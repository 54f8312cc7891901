"""laconic in Lightning's Trainer."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from laconic.activations.whole_model.report import Report
from laconic.collectives.runtime.torch_compat import sent_in_background_nbytes
from laconic.errors import ConfigError, ModelError
from laconic.gradients import CompressedGradients
from laconic.integrations.config import LaconicConfig, compress, given, hold_gradients, report_of
from laconic.integrations.figures import logged
from laconic.integrations.whole_states import take_whole_states, whole
from laconic.moe.huggingface.gradients import clip
from laconic.moe.huggingface.spread import is_cut_otherwise, is_spread, saved_by_host

__all__ = ["LaconicCallback", "LaconicConfig", "LaconicStrategy"]


_OF_DDP = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period")


class LaconicStrategy(DDPStrategy):
    """DDP's place with gradients in codes: they are held and averaged in 8 or 12 bits, and nothing is wrapped.

    `Trainer(strategy=LaconicStrategy())`, with `LaconicCallback` or without. As in DDP, gradients are averaged while
    backward goes on, but for the micro-batches that Lightning accumulates before the last. Clipping and any optimizer
    of torch read the codes.

    Args:
        gradients: bits, 8 or 12.
        kwargs: of DDPStrategy.

    Attributes:
        compressed: the gradients, once fitting has begun.
        sent_nbytes: bytes this process sent when gradients were last averaged; 0 in one process.

    Raises:
        ConfigError: gradients is neither 8 nor 12, or an argument is of DDP's own reduction.
        TypeError: an argument is not one of DDPStrategy's own, which hands others on to DDP: there is none here.
    """

    def __init__(self, gradients: int = 8, **kwargs: Any) -> None:
        if gradients not in (8, 12):
            raise ConfigError(f"gradients is {gradients!r}, but it must be 8 or 12; take 'ddp' for 32")
        for name in _OF_DDP:
            if kwargs.get(name) is not None:
                raise ConfigError(
                    f"{name} is {kwargs[name]!r}, but LaconicStrategy averages gradients without DDP; leave {name} out"
                )
        for name in kwargs.keys() - inspect.signature(DDPStrategy).parameters.keys():
            raise TypeError(
                f"LaconicStrategy() got an unexpected keyword argument {name!r}: DDPStrategy hands it on to DDP, "
                "without which gradients are averaged here"
            )
        self._gradient_bits = gradients
        self._accumulates = False
        self.compressed: CompressedGradients | None = None
        self.sent_nbytes = 0
        super().__init__(**kwargs)

    def configure_ddp(self) -> None:
        """Hold the gradients in codes instead of wrapping the model."""
        module = self.lightning_module
        assert module is not None
        self.compressed = hold_gradients(module, dist.group.WORLD, self._gradient_bits)

    def backward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Backward of a micro-batch; the last one of a step averages."""
        gradients = self.compressed
        if self._accumulates or gradients is None:
            return super().backward(*args, **kwargs)
        before = sent_in_background_nbytes()
        with gradients.last_micro_batch():
            loss = super().backward(*args, **kwargs)
        gradients.reduce()
        self.sent_nbytes = sent_in_background_nbytes() - before
        return loss

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Let the backwards inside accumulate."""
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before


class LaconicCallback(Callback):
    """Converts the module when fitting begins, before a strategy wraps it.

    A module without parameters, whose `configure_model` makes the model, is converted after that.
    All loggers of the trainer get "laconic/activation_factor" and "laconic/activation_nbytes_per_token" (models of
    images and sounds have none) once, of the first micro-batch, and, under `LaconicStrategy`, "laconic/gradient_nbytes"
    (held) and "laconic/gradient_sent_nbytes" (by this process, for one step) with the module's own figures, every
    `log_every_n_steps`.

    Args:
        laconic: what to switch on; None is 4-bit activations. Gradients are `LaconicStrategy`'s, and the optimizer is
            what `configure_optimizers` returns.
        submodule: name of the part to convert; None is the only Hugging Face model in the module, or all of it.

    Raises:
        ConfigError: the configuration asks for gradients or an optimizer.
        ModelError: when fitting begins: there is no such submodule, or it cannot be converted.
    """

    def __init__(self, laconic: LaconicConfig | None = None, submodule: str | None = None) -> None:
        self.laconic = given(laconic)
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
        self._is_logged = False
        self._gradient_nbytes = 0

    @property
    def report(self) -> Report | None:
        """Of the model, once fitting has begun."""
        return report_of(self._model)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Convert, when stage is "fit"."""
        if stage != "fit":
            return
        if is_overridden("configure_model", pl_module) and next(pl_module.parameters(), None) is None:
            self._convert_when_made(trainer, pl_module)
        else:
            self._convert(trainer, pl_module)

    def _convert(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model = _chosen(pl_module, self._submodule)
        if is_cut_otherwise(model):
            raise ModelError(
                f"{type(model).__name__} is sharded already; call laconic.compress_activations in configure_model, "
                "before fully_shard, and leave the callback out"
            )
        if is_spread(model):
            _check_spread(trainer)
            saved_by_host(model)
        compress(model, self.laconic)
        self._model = model

    def _convert_when_made(self, trainer: Trainer, pl_module: LightningModule) -> None:
        make = pl_module.configure_model

        @wraps(make)
        def made() -> None:
            del pl_module.configure_model  # the class's own again
            make()
            self._convert(trainer, pl_module)

        pl_module.configure_model = made  # type: ignore[method-assign]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log anew, and let Lightning clip and load spread experts."""
        self._is_logged = False
        if is_spread(pl_module):
            plugin: Any = trainer.precision_plugin
            plugin.clip_grad_by_norm = lambda optimizer, clip_val: clip([*plugin.main_params(optimizer)], clip_val)
            plugin.clip_grad_by_value = lambda optimizer, clip_val: torch.nn.utils.clip_grad_value_(
                plugin.main_params(optimizer), clip_val, foreach=False
            )
            for optimizer in trainer.optimizers:
                take_whole_states(optimizer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Gather spread experts and their optimizer states; Lightning calls it on all processes, and rank 0 writes."""
        if is_spread(pl_module):
            for key in ("state_dict", "optimizer_states"):
                if key in checkpoint:
                    checkpoint[key] = whole(checkpoint[key])

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Note what is held: modules with an optimization of their own may drop it before the batch ends."""
        strategy = trainer.strategy
        if isinstance(strategy, LaconicStrategy) and strategy.compressed is not None:
            self._gradient_nbytes = strategy.compressed.nbytes

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Log what was saved and, once there was a step, what gradients in codes take."""
        if not self._is_logged and (saved := logged(self.report)):
            for logger in trainer.loggers:
                logger.log_metrics(saved, step=trainer.global_step)
        self._is_logged = True
        strategy = trainer.strategy
        if not isinstance(strategy, LaconicStrategy) or not self._gradient_nbytes:
            return
        found = {"laconic/gradient_nbytes": float(self._gradient_nbytes)}
        if strategy.sent_nbytes:
            found["laconic/gradient_sent_nbytes"] = float(strategy.sent_nbytes)
        pl_module.log_dict(found, on_step=True, on_epoch=False)


def _check_spread(trainer: Trainer) -> None:
    strategy = trainer.strategy
    if not isinstance(strategy, DDPStrategy) or isinstance(strategy, LaconicStrategy):
        raise ConfigError(
            f"experts are spread over processes, but {type(strategy).__name__} would hold and reduce them as if each"
            " process had all; take strategy='ddp'"
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise ConfigError(
            "precision is '16-mixed', whose GradScaler would leave out a step on some processes only, since they have"
            " other experts; take 'bf16-mixed'"
        )


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
