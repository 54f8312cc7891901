"""Models that amplify rounding are not refused for it, and still are for a fault."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laconic
from laconic.auditing import AuditReport
from laconic.errors import AuditError
from laconic.vision import afi_densenet121, afi_resnet50
from tests.audit import faults
from tests.grid import grid


def images(build: object, size: int, seed: int) -> AuditReport:
    torch.manual_seed(seed)
    model: nn.Module = build(num_classes=10).train()  # type: ignore[operator]
    x = torch.randn(4, 3, size, size)
    laconic.compress_activations(model, example_inputs={"x": x})

    def loss_of(output: object) -> Tensor:
        logits = output if isinstance(output, Tensor) else output.logits  # type: ignore[attr-defined]
        return F.cross_entropy(logits, torch.arange(len(logits)))

    return laconic.audit(model, x, loss_of=loss_of)


@pytest.mark.slow
@pytest.mark.parametrize(("build", "size", "seed"), grid([afi_resnet50, afi_densenet121], [32, 64], list(range(3))))
def test_a_deep_network_on_two_images_passes(build: object, size: int, seed: int) -> None:
    assert images(build, size, seed).num_parameters > 100


@pytest.mark.slow
def test_a_fault_in_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    faults.the_gradient_of_a_bias_leaves_the_first_token_out(monkeypatch)
    with pytest.raises(AuditError):
        images(afi_densenet121, 32, 0)
