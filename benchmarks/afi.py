"""Small residual networks on Fashion-MNIST: attention over a stage's levels beside its simplest rivals.

    python -m benchmarks.run afi --rounds 3 --out benchmarks/results/afi_NAME.md

`--rounds` is the number of seeds. All networks of a seed start from the same convolutions, see the same images in the
same order and train as long. The images are those of Debian's package dataset-fashion-mnist; FASHION_MNIST names the
folder of its files if that is another.
"""

from __future__ import annotations

import gzip
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import t as student
from torch import Tensor, nn

from benchmarks.registry import Options, Table, benchmark
from laconic.errors import DataError
from laconic.vision import (
    AFIResNetConfig,
    AFIResNetForImageClassification,
    AFIStage,
    Integrated,
    count_macs,
    integrate,
)

_FULL, _SHORTER = (4, 4, 4), (4, 4, 3)
_WIDTHS = [16, 32, 64]
_REDUCTION = 4
_BATCH = 64
_LEVEL = 0.95


@dataclass(frozen=True)
class _Data:
    """Images [N, 1, 28, 28] of mean 0 and deviation 1, and their classes [N]."""

    images: Tensor
    labels: Tensor


class _Last(nn.Module):
    """In place of an AFI: the last level alone, which is a ResNet."""

    def forward(self, feature: Tensor, earlier: Integrated | None = None) -> Integrated:
        return Integrated(feature, feature.new_zeros(()))


class _Even(nn.Module):
    """In place of an AFI: all levels alike."""

    def forward(self, feature: Tensor, earlier: Integrated | None = None) -> Integrated:
        return integrate(feature, feature.new_zeros(feature.shape[:2]), earlier)


class _SqueezeExcite(nn.Module):
    """Squeeze and excitation (arXiv 1709.01507): the channels of one block's feature, weighted."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze = nn.Linear(channels, channels // _REDUCTION)
        self.excite = nn.Linear(channels // _REDUCTION, channels)

    def forward(self, feature: Tensor) -> Tensor:
        weight = torch.sigmoid(self.excite(F.relu(self.squeeze(feature.mean((2, 3))))))
        return feature * weight[..., None, None]


def _afi(depths: Sequence[int]) -> AFIResNetForImageClassification:
    config = AFIResNetConfig(
        num_labels=10,
        num_channels=1,
        embedding_size=_WIDTHS[0],
        hidden_sizes=_WIDTHS,
        depths=list(depths),
        layer_type="basic",
        downsample_in_first_stage=True,
        small_inputs=True,
        reduction=_REDUCTION,
    )
    return AFIResNetForImageClassification(config)


def _stages(model: AFIResNetForImageClassification) -> list[AFIStage]:
    return [module for module in model.modules() if isinstance(module, AFIStage)]


def _with(integration: type[nn.Module], depths: Sequence[int]) -> nn.Module:
    model = _afi(depths)
    for stage in _stages(model):
        stage.afi = integration()  # type: ignore[assignment]
    return model


def _squeeze_excite(depths: Sequence[int]) -> nn.Module:
    model = _with(_Last, depths)
    for stage, width in zip(_stages(model), _WIDTHS, strict=True):
        for block in stage.layers:
            block.layer.append(_SqueezeExcite(width))
    return model


_AFI = "AFI"

_NETWORKS: dict[str, Callable[[], nn.Module]] = {
    f"ResNet, {'-'.join(map(str, _FULL))} blocks": lambda: _with(_Last, _FULL),
    f"ResNet, {'-'.join(map(str, _SHORTER))} blocks (AFI's depth)": lambda: _with(_Last, _SHORTER),
    "even average of the levels": lambda: _with(_Even, _SHORTER),
    "squeeze and excitation": lambda: _squeeze_excite(_SHORTER),
    _AFI: lambda: _afi(_SHORTER),
}


def _read(name: str) -> torch.Tensor:
    """One of the dataset's files, in the IDX format: two zeros, a type, the rank, the sizes, the bytes."""
    folder = Path(os.environ.get("FASHION_MNIST", "/usr/share/datasets/fashion-mnist"))
    try:
        raw = gzip.decompress((folder / name).read_bytes())
    except FileNotFoundError:
        raise DataError(
            f"{name} is not in {folder}; install Debian's package dataset-fashion-mnist, or name the folder of its "
            f"files in FASHION_MNIST"
        ) from None
    rank = raw[3]
    sizes = np.frombuffer(raw, ">i4", rank, offset=4)
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * rank).reshape(sizes).copy())


def _fashion(part: str, count: int) -> _Data:
    images = _read(f"{part}-images-idx3-ubyte.gz")[:count].float().unsqueeze(1) / 255
    # Mean and deviation of the pixels of the training images.
    return _Data((images - 0.2860) / 0.3530, _read(f"{part}-labels-idx1-ubyte.gz")[:count].long())


def _noise(count: int) -> _Data:
    return _Data(torch.randn(count, 1, 28, 28), torch.randint(10, (count,)))


@dataclass(frozen=True)
class _Result:
    accuracy: float
    """Per cent of the test images."""
    seconds: float
    """Of one training, as the processor's clock counts them."""


def _train(model: nn.Module, train: _Data, test: _Data, epochs: int, seed: int) -> _Result:
    order = torch.Generator().manual_seed(seed)
    steps = epochs * (len(train.labels) // _BATCH)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    groups = [
        {"params": decayed, "weight_decay": 5e-4},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps, pct_start=0.2)
    started = time.process_time()
    model.train()
    for _ in range(epochs):
        shuffled = torch.randperm(len(train.labels), generator=order)
        for batch in shuffled[: len(shuffled) // _BATCH * _BATCH].split(_BATCH):
            loss = F.cross_entropy(model(train.images[batch]).logits, train.labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    seconds = time.process_time() - started
    model.eval()
    with torch.no_grad():
        guesses = torch.cat([model(images).logits.argmax(1) for images in test.images.split(500)])
    return _Result(100 * (guesses == test.labels).double().mean().item(), seconds)


def _difference(values: Sequence[float]) -> tuple[str, str]:
    """Mean and half the width of its confidence interval (Student's t), and what that says."""
    if len(values) < 2:
        return f"{mean(values):+.2f}", "one seed, no interval"
    half = student.ppf((1 + _LEVEL) / 2, len(values) - 1) * stdev(values) / sqrt(len(values))
    verdict = "no difference shown" if abs(mean(values)) <= half else "better" if mean(values) > 0 else "worse"
    return f"{mean(values):+.2f} +- {half:.2f}", verdict


@benchmark("afi")
def afi(options: Options) -> list[Table]:
    """Accuracy of the networks over seeds, and paired differences."""
    if options.smoke:
        train, test, epochs = _noise(2 * _BATCH), _noise(_BATCH), 1
    else:
        train, test, epochs = _fashion("train", 6000), _fashion("t10k", 10_000), 3
    results: dict[str, list[_Result]] = {name: [] for name in _NETWORKS}
    for seed in range(options.rounds):
        for name, make in _NETWORKS.items():
            torch.manual_seed(seed)
            results[name].append(_train(make(), train, test, epochs, seed))
    accuracies = {name: [result.accuracy for result in one] for name, one in results.items()}
    rows = []
    for name, make in _NETWORKS.items():
        model = make()
        gain, verdict = _difference([a - b for a, b in zip(accuracies[_AFI], accuracies[name], strict=True)])
        rows.append(
            [
                name,
                f"{sum(p.numel() for p in model.parameters()):,}",
                f"{count_macs(model, 1, 1, 28, 28) / 1e6:.2f}",
                " ".join(f"{a:.2f}" for a in accuracies[name]),
                f"{mean(accuracies[name]):.2f}",
                "-" if name == _AFI else gain,
                "-" if name == _AFI else verdict,
                f"{mean(result.seconds for result in results[name]):.1f} s",
            ]
        )
    images = "random images (no result)" if options.smoke else "Fashion-MNIST"
    header = ["network", "parameters", "MMAC", "accuracy by seed, %", "mean", "AFI minus this", "AFI is", "CPU time"]
    return [
        Table(
            f"Accuracy on {images}, seeds 0 to {options.rounds - 1}",
            header,
            rows,
            f"Trained on {len(train.labels):,} images for {epochs} epochs, tested on {len(test.labels):,}; basic "
            f"blocks of {', '.join(map(str, _WIDTHS))} channels; AFI and squeeze and excitation reduce by "
            f"{_REDUCTION}. +- is half of the {_LEVEL:.0%} interval of the paired difference (Student's t over seeds).",
        )
    ]
