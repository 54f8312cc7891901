"""Training steps of residual networks: 4-bit and 8-bit activations beside exact ones and activation checkpointing.

Seconds are processor time of forward and backward, the cases in turn, in channels_last; a ratio is the median of the
rounds' quotients. Kept bytes of checkpointing are the inputs of its regions and what the code around them keeps: while
a region runs again, all that it keeps is there as well.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import ResNetConfig, ResNetForImageClassification

import laconic
from benchmarks.kit.timing import UNUSUAL_ROUNDS, Case, processor_clock, seconds_of
from benchmarks.registry import Options, Table, benchmark
from laconic.activations import SavedTensorTracker
from laconic.vision import AFIResNetConfig, AFIResNetForImageClassification

_BASIC = {"layer_type": "basic", "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2]}
_SETUPS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "ResNet-18": (lambda: ResNetForImageClassification(ResNetConfig(num_labels=10, **_BASIC)), 16, 96),
    "ResNet-50": (lambda: ResNetForImageClassification(ResNetConfig(num_labels=10, depths=[3, 4, 6, 3])), 8, 96),
    "AFI-ResNet, 2-2-2-2 basic blocks": (
        lambda: AFIResNetForImageClassification(AFIResNetConfig(num_labels=10, **_BASIC)),
        16,
        96,
    ),
}
"""How each network is made, images in a batch, their side."""


@benchmark("vision-step", cases=_SETUPS)
def vision_step(options: Options) -> list[Table]:
    """Kept bytes and processor time of a step, for each network."""
    names = options.only or list(_SETUPS)[: 1 if options.smoke else None]
    return [_table(name, options) for name in names]


def _table(name: str, options: Options) -> Table:
    make, batch, side = _SETUPS[name]
    batch, side = (2, 32) if options.smoke else (batch, side)
    torch.manual_seed(0)
    plain = make().train().to(memory_format=torch.channels_last)
    pixels = torch.randn(batch, 3, side, side).to(memory_format=torch.channels_last)
    inputs = {"pixel_values": pixels, "labels": torch.randint(10, (batch,))}
    mode = "combined" if name.startswith("AFI") else "sites"
    models = {"exact": plain}
    for bits in (4, 8):
        models[f"laconic, {bits} bits"] = model = copy.deepcopy(plain)
        laconic.compress_activations(model, bits, mode=mode, example_inputs=inputs)
    kept = {case: sum(_kept(model, inputs).values()) for case, model in models.items()}
    for case, regions in (("blocks", _blocks(plain)), ("stages", _stages(plain))):
        if regions:
            title = f"checkpointing of {case}"
            models[title] = again = copy.deepcopy(plain)
            inside = tuple(f"{region}." for region in regions)
            kept[title] = sum(
                nbytes for module, nbytes in _kept(plain, inputs).items() if not f"{module}.".startswith(inside)
            ) + _run_again(again, regions, inputs)

    def step(model: nn.Module) -> None:
        model(**inputs).loss.backward()
        model.zero_grad()

    steps: dict[str, Case] = {case: partial(step, model) for case, model in models.items()}
    seconds = seconds_of(steps, options.rounds, warm_up_rounds=UNUSUAL_ROUNDS, clock=processor_clock)
    exact = seconds["exact"]
    return Table.of(
        f"{name}, {batch} x 3 x {side} x {side}, fp32, {options.thread_text}",
        models,
        [
            ("", str),
            ("kept, MB", lambda case: f"{kept[case] / 1e6:.2f}"),
            ("exact over this", lambda case: f"{kept['exact'] / kept[case]:.2f}x"),
            ("step, ms of CPU (spread)", lambda case: f"{seconds[case] * 1e3:.0f} ({seconds[case].spread:.0%})"),
            ("over exact", lambda case: f"{seconds[case].over(exact):.3f}"),
        ],
        f"{options.rounds} rounds, medians; spread is the distance between the quartiles. laconic: mode {mode!r}.",
    )


def _kept(model: nn.Module, inputs: dict[str, Tensor]) -> Mapping[str, int]:
    """Bytes that autograd keeps from forward to backward, by module."""
    with SavedTensorTracker(model) as tracker:
        model(**inputs)
    return tracker.by_module


# --- activation checkpointing ---


def _stages(model: nn.Module) -> list[str]:
    encoder: Any = model.get_submodule("resnet.encoder.stages")
    return [f"resnet.encoder.stages.{number}" for number in range(len(encoder))]


def _blocks(model: nn.Module) -> list[str]:
    """A ResNet's blocks; those of an AFI stage hand features on, so only its stages can be run again."""
    if isinstance(model, AFIResNetForImageClassification):
        return []
    found = []
    for stage in _stages(model):
        layers: Any = model.get_submodule(f"{stage}.layers")
        found += [f"{stage}.layers.{number}" for number in range(len(layers))]
    return found


def _run_again(model: nn.Module, regions: list[str], inputs: dict[str, Tensor]) -> int:
    """Run these modules under `checkpoint` from now on; returns the bytes of their inputs."""
    nbytes: dict[str, int] = {}
    for name in regions:
        module = model.get_submodule(name)

        def forward(x: Tensor, original: Callable[..., Tensor] = module.forward, name: str = name) -> Tensor:
            nbytes[name] = x.nbytes
            result: Tensor = checkpoint(original, x, use_reentrant=False)
            return result

        module.forward = forward  # type: ignore[method-assign]
    with torch.no_grad():
        model(**inputs)
    return sum(nbytes.values())
