"""What to switch on in a host, and the conversion that all hosts share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch.distributed as dist
from torch import nn

from laconic.activations import compress_activations
from laconic.activations.whole_model.report import Measurement, Report
from laconic.activations.whole_model.suspended import is_compressed
from laconic.auditing import audit_first_call
from laconic.errors import ConfigError
from laconic.gradients import CompressedGradients, compress_gradients
from laconic.gradients.turns import owner_of
from laconic.integrations.figures import measure_first_call
from laconic.options import ACTIVATION_BITS, ATTENTIONS, GRADIENT_BITS, LOSSES, MODES, OPTIMIZERS, refused, takes

_OPTIMIZERS = ("host", *OPTIMIZERS)


@dataclass
class LaconicConfig:
    """What laconic does in a host's training; also for transformers' HfArgumentParser.

    Attributes:
        activations: bits of saved activations, as in `compress_activations`; 16 leaves them exact.
        attention: how query, key and value are kept, as in `compress_activations`.
        mode: "sites", "hooks" or "combined", as in `compress_activations`.
        loss: "chunked" never holds the logits of a Hugging Face language model; "exact" is the model's own loss.
        gradients: bits in which gradients are held and reduced, 8 or 12, in place of DDP; 32 leaves them to the host.
        optimizer: "adamw8bit" is `laconic.AdamW8bit` with the host's hyperparameters, "adamw4bit" the same with bits=4;
            "host" what the host makes.
        audit: compare the first training call with the exact computation (`laconic.audit`), and refuse what differs.

    Raises:
        ConfigError: a value is none of these, or does nothing beside another.
    """

    activations: int = field(default=4, metadata={"help": "Bits of saved activations; 16 leaves them exact."})
    attention: str | None = field(
        default=None, metadata={"help": "How query, key and value are kept: exact, recompute or a code (int8)."}
    )
    mode: str = field(
        default="sites",
        metadata={"help": "sites: recognized layers. combined: and what lies between. hooks: any.", "choices": MODES},
    )
    loss: str = field(
        default="exact",
        metadata={"help": "chunked never holds the logits of a Hugging Face language model.", "choices": LOSSES},
    )
    gradients: int = field(
        default=32,
        metadata={
            "help": "Bits in which gradients are held and reduced, in place of DDP; 32 leaves them to the host.",
            "choices": GRADIENT_BITS,
        },
    )
    optimizer: str = field(
        default="host", metadata={"help": "adamw8bit, adamw4bit: moments in 8 or 4 bits.", "choices": _OPTIMIZERS}
    )
    audit: bool = field(default=True, metadata={"help": "Compare the first training call with the exact computation."})

    def __post_init__(self) -> None:
        for name, allowed in (
            ("activations", ACTIVATION_BITS),
            ("attention", (None, *ATTENTIONS)),
            ("mode", MODES),
            ("loss", LOSSES),
            ("gradients", GRADIENT_BITS),
            ("optimizer", _OPTIMIZERS),
        ):
            value = getattr(self, name)
            if not takes(allowed, value):
                raise ConfigError(refused(name, value, allowed))
        if not isinstance(self.audit, bool):
            raise ConfigError(f"audit is {self.audit!r}, but it must be True or False")
        for name, value, idle, why in (
            ("attention", self.attention, self.activations == 16, "activations is 16, which leaves all of them exact"),
            ("mode", self.mode, self.activations == 16, "activations is 16, which leaves all of them exact"),
            ("attention", self.attention, self.mode == "hooks", "mode is 'hooks', which packs all tensors alike"),
            ("loss", self.loss, self.mode == "hooks", "mode is 'hooks', which leaves the loss as it is"),
        ):
            if idle and value not in (None, "sites", "exact"):
                raise ConfigError(f"{name} is {value!r}, but {why}; change one of the two, or leave {name} out")

    @property
    def changes_model(self) -> bool:
        """Whether a model is converted."""
        return self.activations != 16 or self.loss != "exact"


def given(config: LaconicConfig | None) -> LaconicConfig:
    """The configuration that a host was given; the default in place of None.

    Raises:
        ConfigError: it is something else.
    """
    if config is None:
        return LaconicConfig()
    if not isinstance(config, LaconicConfig):
        raise ConfigError(f"laconic is a {type(config).__name__}, but it must be a LaconicConfig, or None")
    return config


_converted: WeakKeyDictionary[nn.Module, tuple[dict[str, Any], Report]] = WeakKeyDictionary()
_held: WeakSet[CompressedGradients] = WeakSet()


def compress(model: nn.Module, config: LaconicConfig, *, agrees: bool = True) -> Report | None:
    """Convert a model as the configuration says; None if that leaves it as it is.

    A model that an earlier trainer converted in the same way stays as it is, and the result is that trainer's. The
    report has what tokens that are made up keep; once the model has been called in training, `report_of` has what
    that call keeps. Unless the configuration leaves it out, that call is audited; all ranks decide together, if
    `agrees`.

    Raises:
        ConfigError: an earlier trainer converted the model in another way.
        ModelError: as `compress_activations`.
    """
    wished: dict[str, Any] = {name: getattr(config, name) for name in ("activations", "attention", "mode", "loss")}
    if model in _converted and is_compressed(model):
        earlier, report = _converted[model]
        for name, value in wished.items():
            if value != earlier[name]:
                raise ConfigError(
                    f"{name} is {value!r}, but the model was converted for an earlier trainer, where {name} is "
                    f"{earlier[name]!r}; give the same, or call laconic.decompress_activations(model) first"
                )
    elif not config.changes_model:
        if config.audit and config.gradients != 32:
            audit_first_call(model, agrees=agrees)
        return None
    else:
        report = compress_activations(
            model, wished["activations"], attention=wished["attention"], mode=wished["mode"], loss=wished["loss"]
        )
    _converted[model] = wished, report
    found = ref(model)

    def measured(before: Measurement, after: Measurement) -> None:
        if (model := found()) in _converted:
            assert model is not None
            _converted[model] = wished, report.measured(before, after)

    measure_first_call(model, measured)
    if config.audit:  # after the measurement, which calls the model
        audit_first_call(model, agrees=agrees)
    return report


def report_of(model: nn.Module | None) -> Report | None:
    """The report of a model that a host has converted, of its first training call once that was made."""
    return None if model is None or model not in _converted else _converted[model][1]


def hold_gradients(model: nn.Module, group: dist.ProcessGroup | None, bits: int) -> CompressedGradients:
    """Hold a model's gradients in codes, as `compress_gradients`, in place of those an earlier trainer held."""
    release_gradients(model)
    gradients = compress_gradients(model, group, bits=bits)
    _held.add(gradients)
    return gradients


def release_gradients(model: nn.Module) -> None:
    """Drop the gradients that an earlier trainer holds in codes, and let autograd make plain ones again."""
    owners = {id(owner): owner for owner in map(owner_of, model.parameters()) if owner is not None}
    for owner in owners.values():
        if isinstance(owner, CompressedGradients) and owner in _held:
            for parameter in owner.parameters.values():
                parameter.grad = None
            owner.remove()
