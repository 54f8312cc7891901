"""laconic in Hugging Face's Trainer, and in trainers that inherit from it (TRL's)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.training_args import OptimizerNames

from laconic.activations.whole_model.report import Report
from laconic.errors import ConfigError
from laconic.integrations.accelerate import Attached, attach_anew, check_fsdp_not_dropped
from laconic.integrations.config import LaconicConfig, compress, given, report_of
from laconic.integrations.figures import logged
from laconic.integrations.whole_states import groups_of_one_process, take_whole_states, whole_states
from laconic.moe.huggingface.blocks import is_fused_experts
from laconic.moe.huggingface.experts import FusedExperts
from laconic.moe.huggingface.pretrained import load_pretrained
from laconic.moe.huggingface.spread import is_cut_otherwise, is_spread, saved_by_host
from laconic.optim import OPTIMIZER_CLASSES, AdamW8bit

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["LaconicCallback", "LaconicConfig", "LaconicTrainer", "LaconicTrainerMixin"]

_ADAMW = (OptimizerNames.ADAMW_TORCH, OptimizerNames.ADAMW_TORCH_FUSED)


class LaconicTrainerMixin:
    """Switches laconic on in a subclass of transformers' Trainer: `class Mine(LaconicTrainerMixin, Trainer)`.

    The model is converted when training begins: after PEFT has wrapped it, before DDP, FSDP2 or torch.compile do. What
    is saved has no trace of it and loads with `from_pretrained`. Logs of training gain "laconic/activation_factor" and
    "laconic/activation_nbytes_per_token" (models of images and sounds have none), measured on the first micro-batch as
    the host trains it, and, with gradients in codes, "laconic/gradient_nbytes" (held) and
    "laconic/gradient_sent_nbytes" (by this process, for one step).

    With `gradients` of 8 or 12 bits the model is not wrapped in DDP: gradients are averaged in codes in the last
    micro-batch of a step, and clipping, `grad_norm` and the optimizer read the codes. With `optimizer="adamw8bit"` the
    arguments' learning rate, betas, epsilon and weight decay are AdamW8bit's; checkpoints of torch's AdamW are
    converted when training resumes from them.

    Args:
        laconic: what to switch on; None is 4-bit activations.
        args, kwargs: of the trainer.

    Raises:
        ConfigError: at construction, when the trainer's arguments and the configuration exclude each other; when
            training begins, if a subclass makes another optimizer than `optimizer` says, or an earlier trainer has
            converted the model in another way.
    """

    def __init__(self, *args: Any, laconic: LaconicConfig | None = None, **kwargs: Any) -> None:
        self.laconic = given(laconic)
        self._laconic_model: nn.Module | None = None
        self._laconic_attached: Attached | None = None
        self._laconic_accelerator: Accelerator | None = None
        self._laconic_gradient_nbytes = 0
        super().__init__(*args, **kwargs)
        _check(self, self.laconic)

    @property
    def laconic_report(self) -> Report | None:
        """Of the compressed activations, once training has begun."""
        return None if self._laconic_attached is None else self._laconic_attached.report

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Convert the model, which has neither been wrapped nor prepared, and make the optimizer."""
        self._convert_laconic()
        trainer: Any = self
        if self.laconic.optimizer != "host" and trainer.optimizer is None:
            arguments: TrainingArguments = trainer.args
            _check_optim(arguments, self.laconic)  # a search of hyperparameters may have changed them
            trainer.optimizer_cls_and_kwargs = (
                OPTIMIZER_CLASSES[self.laconic.optimizer],
                {
                    "lr": arguments.learning_rate,
                    "betas": (arguments.adam_beta1, arguments.adam_beta2),
                    "eps": arguments.adam_epsilon,
                },
            )
        models = () if model is None else (model,)  # transformers 5.1 takes none
        optimizer: torch.optim.Optimizer = super().create_optimizer(*models)  # type: ignore[misc]
        return optimizer

    def _wrap_model(self, model: nn.Module, training: bool = True, *args: Any, **kwargs: Any) -> nn.Module:
        trainer: Any = self
        if training:
            # A subclass may make its optimizer itself and so have called neither of the two above.
            self._convert_laconic()
            _check_optimizer(self)
        saved_by_host(trainer.model)
        wrapped: nn.Module = super()._wrap_model(model, training, *args, **kwargs)  # type: ignore[misc]
        return wrapped

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        trainer: Any = self
        if state_dict is None and not trainer.args.should_save and is_spread(trainer.model):
            # The others take part in what rank 0 gathers.
            trainer.model.save_pretrained(output_dir or trainer.args.output_dir, is_main_process=False)
        else:
            super()._save(output_dir, state_dict)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        trainer: Any = self
        if not is_spread(trainer.model) or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        with whole_states([_bare(trainer.optimizer)]), _groups_of_one_process(trainer):
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            if not trainer.args.should_save:
                trainer.optimizer.state_dict()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        trainer: Any = self
        if _has_files_of_experts(trainer, resume_from_checkpoint):
            load_pretrained(trainer.model if model is None else model, resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        trainer: Any = self
        if _has_files_of_experts(trainer, trainer.state.best_model_checkpoint):
            load_pretrained(trainer.model, trainer.state.best_model_checkpoint)
        else:
            super()._load_best_model()  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        trainer: Any = self
        if not is_spread(trainer.model):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        take_whole_states(_bare(trainer.optimizer))
        with _groups_of_one_process(trainer):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of a micro-batch, as the trainer's."""
        loss: torch.Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        attached = self._laconic_attached
        if attached is not None and attached.gradients is not None:
            self._laconic_gradient_nbytes = attached.gradients.nbytes
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log with what was saved beside the loss."""
        if "loss" in logs:
            logs = {**logs, **logged(self.laconic_report), **self._logged_gradients()}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _logged_gradients(self) -> dict[str, int]:
        attached = self._laconic_attached
        if attached is None or attached.gradients is None:
            return {}
        found = {"laconic/gradient_nbytes": self._laconic_gradient_nbytes}
        if attached.sent_nbytes:
            found["laconic/gradient_sent_nbytes"] = attached.sent_nbytes
        return found

    def _convert_laconic(self) -> None:
        trainer: Any = self
        if self._laconic_model is trainer.model and self._laconic_accelerator is trainer.accelerator:
            return
        attached = attach_anew(trainer.accelerator, trainer.model, self.laconic)
        self._laconic_model, self._laconic_accelerator = trainer.model, trainer.accelerator
        self._laconic_attached = attached


class LaconicTrainer(LaconicTrainerMixin, Trainer):
    """transformers' Trainer with laconic switched on; see `LaconicTrainerMixin`."""


class LaconicCallback(TrainerCallback):
    """Compressed activations in any transformers Trainer, without a class of one's own.

    The model is converted when training begins. For the loss, gradients and the optimizer take `LaconicTrainerMixin`,
    and for figures in what `report_to` names: the Trainer calls its trackers before callbacks that it is given, so they
    do not see what this one adds to the printed logs.

    Args:
        laconic: what to switch on; None is 4-bit activations.

    Raises:
        ConfigError: the configuration asks for a chunked loss, gradients in codes or an optimizer; or, when training
            begins, the model is sharded, or was to be and is not.
    """

    def __init__(self, laconic: LaconicConfig | None = None) -> None:
        self.laconic = given(laconic)
        for name, own in (("gradients", 32), ("optimizer", "host"), ("loss", "exact")):
            if getattr(self.laconic, name) != own:
                raise ConfigError(
                    f"{name} is {getattr(self.laconic, name)!r}, but a callback sees neither how the trainer makes its "
                    "optimizer and loss nor how it wraps the model; make class Mine(LaconicTrainerMixin, Trainer)"
                )
        self._model: nn.Module | None = None

    @property
    def report(self) -> Report | None:
        """Of the model, once training has begun."""
        return report_of(self._model)

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Convert the model."""
        model: nn.Module = kwargs["model"]
        if self._model is model:
            return
        if is_cut_otherwise(model):
            raise ConfigError("the model is sharded already; make class Mine(LaconicTrainerMixin, Trainer)")
        _check_arguments(args, self.laconic)
        check_fsdp_not_dropped(PartialState())
        compress(model, self.laconic)
        self._model = model

    def on_log(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Add what was saved to the logs of training."""
        logs = kwargs.get("logs")
        if logs is not None and "loss" in logs:
            logs.update(logged(self.report))


def _check(trainer: Any, config: LaconicConfig) -> None:
    arguments: TrainingArguments = trainer.args
    _check_arguments(arguments, config)
    check_fsdp_not_dropped(trainer.accelerator.state)
    if config.gradients != 32 and (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
        host = "FSDP" if trainer.is_fsdp_enabled else "DeepSpeed"
        raise ConfigError(
            f"gradients is {config.gradients}, but {host} holds and reduces gradients itself; leave gradients at 32"
        )
    if trainer.is_fsdp_enabled and getattr(trainer.accelerator.state.fsdp_plugin, "fsdp_version", 1) != 2:
        raise ConfigError("fsdp_version is 1, but laconic converts models for FSDP2; set fsdp_config fsdp_version to 2")
    if config.loss == "chunked":
        owner = next(kind for kind in type(trainer).__mro__ if "compute_loss" in vars(kind))
        if owner is not Trainer or trainer.compute_loss_func is not None:
            own = "compute_loss_func" if owner is Trainer else f"{owner.__name__}.compute_loss"
            raise ConfigError(
                f"loss is 'chunked', but {own} computes the loss instead of the model; leave loss out, or call "
                "laconic.linear_cross_entropy there"
            )
    if config.optimizer == "host":
        return
    _check_optim(arguments, config)
    if trainer.is_deepspeed_enabled and "optimizer" in trainer.accelerator.state.deepspeed_plugin.deepspeed_config:
        raise ConfigError(
            f"optimizer is {config.optimizer!r}, but DeepSpeed's configuration has an optimizer section; leave it out, "
            "the arguments have its hyperparameters"
        )
    if trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None:
        raise ConfigError(
            f"optimizer is {config.optimizer!r}, but the trainer was given an optimizer; leave one of them out"
        )


def _check_optim(arguments: TrainingArguments, config: LaconicConfig) -> None:
    if arguments.optim not in _ADAMW or arguments.optim_args:
        raise ConfigError(
            f"optimizer is {config.optimizer!r}, but optim is {OptimizerNames(arguments.optim).value!r} with "
            f"optim_args {arguments.optim_args!r}; leave both out"
        )


def _has_files_of_experts(trainer: Any, folder: str) -> bool:
    """Return whether a checkpoint may hold experts one by one, which the Trainer leaves out (transformers 5.23)."""
    return (
        isinstance(trainer.model, PreTrainedModel)
        and not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled)
        and any(is_fused_experts(part) or isinstance(part, FusedExperts) for part in trainer.model.modules())
        and any(Path(folder).glob("model*.safetensors*"))
    )


def _groups_of_one_process(trainer: Any) -> AbstractContextManager[object]:
    """Let optimizer.pt and scheduler.pt have the Trainer's two groups; its optimizer has one of each for each mesh."""
    optimizer, named = _bare(trainer.optimizer), dict(trainer.model.named_parameters())
    decays = {*trainer.get_decay_parameter_names(trainer.model)}
    wanted = [
        ({"weight_decay": decay}, [p for name, p in named.items() if p.requires_grad and (name in decays) == has])
        for has, decay in ((True, trainer.args.weight_decay), (False, 0.0))
    ]
    of = {id(p): place for place, (_, parameters) in enumerate(wanted) for p in parameters}
    parts = [{of.get(id(p)) for p in group["params"]} for group in optimizer.param_groups]
    if any(len(part) != 1 or None in part for part in parts) or sum(
        len(group["params"]) for group in optimizer.param_groups
    ) != len(of):
        return nullcontext()  # a subclass has made groups of its own
    return groups_of_one_process(optimizer, trainer.lr_scheduler, wanted)


def _bare(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


def _check_optimizer(trainer: Any) -> None:
    made = _bare(trainer.optimizer)
    if trainer.laconic.optimizer == "host" or isinstance(made, AdamW8bit):
        return
    own = (
        kind for kind in type(trainer).__mro__ if kind is not LaconicTrainerMixin and "create_optimizer" in vars(kind)
    )
    raise ConfigError(
        f"optimizer is {trainer.laconic.optimizer!r}, but {next(own).__name__}.create_optimizer made "
        f"{type(made).__name__}; return super().create_optimizer() there, or leave optimizer out"
    )


def _check_arguments(arguments: TrainingArguments, config: LaconicConfig) -> None:
    if arguments.n_gpu > 1:
        raise ConfigError(
            f"the trainer would copy the model to {arguments.n_gpu} GPUs in every step (DataParallel); start it with "
            "torchrun, one process per GPU"
        )
    if config.loss == "chunked" and arguments.label_smoothing_factor:
        raise ConfigError(
            f"loss is 'chunked', but label_smoothing_factor is {arguments.label_smoothing_factor}, for which the "
            "trainer computes the loss from logits; leave one of them out"
        )


def __getattr__(name: str) -> Any:
    """`LaconicSFTTrainer`, made when TRL is asked for."""
    if name != "LaconicSFTTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trl import SFTTrainer  # type: ignore[attr-defined]

    made = type(
        name,
        (LaconicTrainerMixin, SFTTrainer),
        {"__doc__": "TRL's SFTTrainer with laconic switched on; see `LaconicTrainerMixin`.", "__module__": __name__},
    )
    globals()[name] = made
    return made
