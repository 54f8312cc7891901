"""What to switch on in a host, and the conversion that all hosts share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from laconic.activations import compress_activations
from laconic.activations.report import Report
from laconic.errors import ConfigError
from laconic.formats import BlockFormat

__all__ = ["LaconicConfig", "compress", "logged"]

_GRADIENT_BITS = (8, 12, 32)
_MODES = ("sites", "hooks", "combined")
_LOSSES = ("exact", "chunked")
_OPTIMIZERS = ("host", "adamw8bit")


@dataclass
class LaconicConfig:
    """What laconic does in a host's training; also for transformers' HfArgumentParser.

    Attributes:
        activations: bits of saved activations, as in `compress_activations`; 16 leaves them exact.
        attention: how query, key and value are kept, as in `compress_activations`.
        mode: "sites", "hooks" or "combined", as in `compress_activations`.
        loss: "chunked" never holds the logits of a Hugging Face language model; "exact" is the model's own loss.
        gradients: bits in which gradients are held and reduced, 8 or 12, in place of DDP; 32 leaves them to the host.
        optimizer: "adamw8bit" is `laconic.AdamW8bit` with the host's hyperparameters; "host" what the host makes.

    Raises:
        ConfigError: a value is none of these.
    """

    activations: int = field(default=4, metadata={"help": "Bits of saved activations; 16 leaves them exact."})
    attention: str | None = field(
        default=None, metadata={"help": "How query, key and value are kept: exact, recompute or a code (int8)."}
    )
    mode: str = field(
        default="sites",
        metadata={"help": "sites: recognized layers. combined: and what lies between. hooks: any.", "choices": _MODES},
    )
    loss: str = field(
        default="exact",
        metadata={"help": "chunked never holds the logits of a Hugging Face language model.", "choices": _LOSSES},
    )
    gradients: int = field(
        default=32,
        metadata={
            "help": "Bits in which gradients are held and reduced, in place of DDP; 32 leaves them to the host.",
            "choices": _GRADIENT_BITS,
        },
    )
    optimizer: str = field(
        default="host", metadata={"help": "adamw8bit: AdamW with moments in 8 bits.", "choices": _OPTIMIZERS}
    )

    def __post_init__(self) -> None:
        BlockFormat.from_bits(self.activations)  # refuses other bits
        for name, allowed in (
            ("mode", _MODES),
            ("loss", _LOSSES),
            ("gradients", _GRADIENT_BITS),
            ("optimizer", _OPTIMIZERS),
        ):
            if getattr(self, name) not in allowed:
                words = ", ".join(map(str, allowed))
                raise ConfigError(f"{name} is {getattr(self, name)!r}, but it must be one of {words}")
        if self.activations == 16 and self.attention is not None:
            raise ConfigError(
                f"attention is {self.attention!r}, but activations is 16, which leaves all of them exact; give fewer "
                "bits, or leave attention out"
            )

    @property
    def changes_model(self) -> bool:
        """Whether a model is converted."""
        return self.activations != 16 or self.loss != "exact"


def compress(model: nn.Module, config: LaconicConfig) -> Report | None:
    """Convert a model as the configuration says; None if that leaves it as it is.

    Raises:
        ModelError: as `compress_activations`.
    """
    if not config.changes_model:
        return None
    mode: Any = config.mode
    loss: Any = config.loss
    return compress_activations(model, config.activations, attention=config.attention, mode=mode, loss=loss)


def logged(report: Report | None) -> dict[str, float]:
    """What a host logs of a conversion: bytes per token that a forward keeps for backward, and how much less it is."""
    if report is None:
        return {}
    before, after = report.before_nbytes_per_token, report.after_nbytes_per_token
    if before is None or after is None:
        return {}
    return {"laconic/activation_nbytes_per_token": after, "laconic/activation_factor": before / max(1.0, after)}
