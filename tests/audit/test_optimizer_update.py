"""Updates of AdamW8bit that are right are never refused, whatever gradients and hyperparameters are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.auditing.optimizer_update import check_updates
from laconic.errors import AuditError
from laconic.optim import adamw
from tests.grid import grid

GRADIENTS = {
    "normal": lambda x: x,
    "heavy": lambda x: x.sign() * x.abs().pow(6),
    "sparse": lambda x: x * (x > 2),
    "rows": lambda x: x * torch.logspace(-12, 4, len(x)).unsqueeze(1),
    "tiny": lambda x: x * 1e-21,
    "small": lambda x: x * 1e-9,
    "outlier": lambda x: x.index_fill(1, torch.tensor([3]), 1e6),
    "zero": torch.zeros_like,
}
OPTIONS = [
    {},
    {"eps": 1e-15, "weight_decay": 0.1},
    {"lr": 1e-2, "betas": (0.5, 0.9)},
    {"lr": 1e-4, "betas": (0.95, 0.9), "weight_decay": 0.0},
    {"maximize": True, "eps": 0.0},
]


def prepared(kind: str, dtype: torch.dtype, **options: object) -> tuple[laconic.AdamW8bit, dict[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(len(kind))
    shapes = [(48, 300), (33, 256), (8, 4100), (64, 16, 3, 3), (7,)]
    parameters = [nn.Parameter((0.02 * torch.randn(shape, generator=generator)).to(dtype)) for shape in shapes]
    made = {}
    for parameter in parameters:
        x = torch.randn(len(parameter), parameter.numel() // len(parameter), generator=generator)
        x = GRADIENTS[kind](x) if parameter.dim() > 1 else x
        made[parameter] = x.reshape(parameter.shape).to(dtype)
    return laconic.AdamW8bit(parameters, **options), made  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "options", "dtype"), grid(list(GRADIENTS), OPTIONS, [torch.float32, torch.bfloat16], strength=1)
)
def test_right_updates_are_not_refused(kind: str, options: dict[str, object], dtype: torch.dtype) -> None:
    for bits in (8, 4):
        optimizer, gradients = prepared(kind, dtype, **options, bits=bits)
        assert check_updates(optimizer, gradients, {}) == 5
        assert not optimizer.state


@pytest.mark.parametrize("moment", [1, 3])
@pytest.mark.parametrize("kind", ["normal", "heavy", "sparse", "rows", "outlier"])
def test_moments_of_another_block_are_refused(kind: str, moment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    step = adamw.adamw8bit_multi_

    def wrong(*args: list[Tensor], **kwargs: object) -> None:
        step(*args, **kwargs)  # type: ignore[arg-type]
        for codes in args[moment]:
            codes.copy_(codes.roll(1, 1))

    monkeypatch.setattr(adamw, "adamw8bit_multi_", wrong)
    optimizer, gradients = prepared(kind, torch.float32)
    with pytest.raises(AuditError, match="in the state of AdamW8bit is not the exact one"):
        check_updates(optimizer, gradients, {})
