"""Layers whose one call is known beforehand are packed as those whose calls are watched: same gradients, same bytes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.activations import SavedTensorTracker, seed_rounding
from laconic.activations.forwards import leaves
from tests.grid import grid

CHANNELS = 16


class Padded(nn.Conv2d):
    """A subclass, which may do anything."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight / weight.std(), bias)


def patched() -> nn.Module:
    """An instance whose method is another."""
    layer = nn.Conv2d(CHANNELS, CHANNELS, 3)
    plain = layer._conv_forward
    layer._conv_forward = lambda x, weight, bias: plain(x, weight / weight.std(), bias)  # type: ignore[method-assign]
    return layer


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv2d(CHANNELS, 24, 3, bias=False),
    "1 x 1, strided": lambda: nn.Conv2d(CHANNELS, 8, 1, stride=2),
    "groups, dilated": lambda: nn.Conv2d(CHANNELS, 32, 3, dilation=2, groups=CHANNELS, padding=2),
    "padding by name": lambda: nn.Conv2d(CHANNELS, 8, 3, padding="same"),
    "reflecting": lambda: nn.Conv2d(CHANNELS, 8, 3, padding=1, padding_mode="reflect"),
    "subclass": lambda: Padded(CHANNELS, 8, 3),
    "patched": patched,
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(CHANNELS, 8, 3)),
    "batch norm": lambda: nn.BatchNorm2d(CHANNELS),
    "without parameters": lambda: nn.BatchNorm2d(CHANNELS, affine=False),
    "without statistics": lambda: nn.BatchNorm2d(CHANNELS, track_running_stats=False),
    "mean of all batches": lambda: nn.BatchNorm2d(CHANNELS, momentum=None),
    "evaluated": lambda: nn.BatchNorm2d(CHANNELS).eval(),
    "relu": lambda: nn.ReLU(),
    "relu in place": lambda: nn.ReLU(inplace=True),
}


def run(
    model: nn.Module, dtype: torch.dtype, channels_last: bool, frozen: bool, autocast: bool
) -> tuple[list[Tensor], int]:
    x = torch.randn(4, CHANNELS, 11, 9, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = (x.contiguous(memory_format=torch.channels_last) if channels_last else x).requires_grad_(not frozen)
    seed_rounding(0)
    with SavedTensorTracker(model) as tracker, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(x)
    found = [y.detach().clone(), *(buffer.clone() for buffer in model.buffers())]
    y.float().pow(2).sum().backward()
    found += [p.grad for p in (x, *model.parameters()) if p.grad is not None]
    return found, tracker.nbytes


@pytest.mark.parametrize(
    ("name", "case", "bits"),
    grid(list(LAYERS), ["fp32", "channels last", "bf16", "autocast", "frozen input"], [4, 2], strength=1),
)
def test_known_and_watched_calls_keep_the_same(
    name: str, case: str, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = torch.bfloat16 if case == "bf16" else torch.float32
    torch.manual_seed(1)
    # A convolution, norm and relu around the layer, so that it rebuilds its input and others rebuild theirs from it.
    around = nn.Conv2d(CHANNELS, CHANNELS, 1), nn.BatchNorm2d(CHANNELS), nn.ReLU()
    layer = LAYERS[name]()
    first = copy.deepcopy(nn.Sequential(*around, layer, nn.Flatten(2))) if name != "patched" else None
    results = []
    for calls in (leaves._KNOWN, {}):
        model = nn.Sequential(*around, LAYERS[name](), nn.Flatten(2)) if first is None else copy.deepcopy(first)
        if first is None:
            model[3].load_state_dict(layer.state_dict())
            model = nn.Sequential(*copy.deepcopy(around), *model[3:])
        model.to(dtype)
        laconic.compress_activations(model, bits, block_size=64)
        monkeypatch.setattr(leaves, "_KNOWN", calls)
        options = dtype, case == "channels last", case == "frozen input", case == "autocast"
        results.append(run(model, *options))
    (known, known_nbytes), (watched, watched_nbytes) = results
    assert len(known) == len(watched)
    for one, other in zip(known, watched, strict=True):
        assert torch.equal(one, other)
    assert known_nbytes == watched_nbytes


def test_known_calls_are_what_most_layers_make() -> None:
    seen = []
    watch = leaves.Packer.active

    def count(packer: leaves.Packer, module: nn.Module) -> object:
        seen.append(type(module))
        return watch(packer, module)

    model = nn.Sequential(nn.Conv2d(3, CHANNELS, 3), nn.BatchNorm2d(CHANNELS), nn.ReLU(), nn.GELU(), nn.MaxPool2d(2))
    laconic.compress_activations(model, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leaves.Packer, "active", count)
        model(torch.randn(2, 3, 16, 16))
    assert seen == [nn.GELU, nn.MaxPool2d]
