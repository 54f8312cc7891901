"""Vision networks at 2, 4 and 8 bits: bytes kept for backward, and how near the gradients are.

A factor is bytes that autograd keeps in one training forward, exact over packed, labels and logits included
(`SavedTensorTracker`). ActNN's (Chen et al., ICML 2021) are context memory of its own quantizers over that of PyTorch
as its paper prints them. Gradients are those of the loss with all parameters at their initial values after a few steps
of SGD on noise; the cosine of a seed is that of all parameters together, the worst is that of the worst parameter that
has at least a thousandth of the gradient's norm.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from statistics import mean

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetForImageClassification, ViTConfig, ViTForImageClassification

import laconic
from benchmarks.registry import Options, Table, benchmark
from laconic.activations import SavedTensorTracker, seed_rounding

_BASIC = {"layer_type": "basic", "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2]}
_NETWORKS: dict[str, tuple[Callable[[int], nn.Module], int]] = {
    "ResNet-18": (lambda side: ResNetForImageClassification(ResNetConfig(num_labels=10, **_BASIC)), 8),
    "ResNet-50": (lambda side: ResNetForImageClassification(ResNetConfig(num_labels=10, depths=[3, 4, 6, 3])), 4),
    "ViT, 6 layers of 384": (
        lambda side: ViTForImageClassification(
            ViTConfig(
                hidden_size=384,
                num_hidden_layers=6,
                num_attention_heads=6,
                intermediate_size=1536,
                image_size=side,
                patch_size=16,
                num_labels=10,
            )
        ),
        8,
    ),
}
"""How each network is made for images of a side, and images in a batch."""

_FORMATS = {
    "8 bits, block 64": (8, 64),
    "4 bits, block 64": (4, 64),
    "2 bits, block 64": (2, 64),
    "2 bits, block 256": (2, 256),
}
_ACTNN = {8: "", 4: "6 to 7", 2: "12"}


@benchmark("vision-bits", cases=_NETWORKS)
def vision_bits(options: Options) -> list[Table]:
    """One table for each network."""
    names = options.only or list(_NETWORKS)[: 1 if options.smoke else None]
    return [_table(name, options) for name in names]


def _table(name: str, options: Options) -> Table:
    make, batch = _NETWORKS[name]
    batch, side, steps, seeds = (2, 32, 1, 2) if options.smoke else (batch, 96, 6, 8)
    torch.manual_seed(0)
    plain = make(side).train()
    inputs = {"pixel_values": torch.randn(batch, 3, side, side), "labels": torch.randint(10, (batch,))}
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        plain(**inputs).loss.backward()
        optimizer.step()
    exact, exact_nbytes = _gradients(plain, inputs), _kept(plain, inputs)
    rows = []
    for title, (bits, block_size) in _FORMATS.items():
        model = copy.deepcopy(plain)
        # A first layer's images need no gradient; attention of a ViT has the bits of everything else.
        attention = "uint2" if bits == 2 else None
        laconic.compress_activations(
            model, bits, block_size=block_size, mode="combined", attention=attention, example_inputs=inputs
        )
        found = []
        for seed in range(seeds if bits == 2 else 1):
            seed_rounding(seed)
            found.append(_gradients(model, inputs))
        average = [torch.stack(parameters).mean(0) for parameters in zip(*found, strict=True)]
        rows.append(
            (
                title,
                f"{_kept(model, inputs) / 2**20:.2f}",
                f"{exact_nbytes / _kept(model, inputs):.1f}",
                _ACTNN[bits],
                f"{mean(_cosine(one, exact) for one in found):.4f}",
                f"{mean(_error(one, exact) for one in found):.3f}",
                f"{_cosine(average, exact):.4f}",
                f"{_error(average, exact):.3f}",
                f"{_worst(average, exact):.3f}",
            )
        )
    columns = (
        "",
        "kept MiB",
        "factor",
        "ActNN's factor",
        "cosine",
        "error",
        "cosine of the mean",
        "error of the mean",
        "worst parameter's cosine, mean",
    )
    note = f"Exact: {exact_nbytes / 2**20:.2f} MiB. Means of 2 bits over {seeds} seeds; 4 and 8 bits round to nearest."
    return Table(f"{name}, {batch} x 3 x {side} x {side}, fp32", columns, rows, note)


def _gradients(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    state = copy.deepcopy(model.state_dict())
    model.zero_grad()
    model(**inputs).loss.backward()
    model.load_state_dict(state)
    return [p.grad.double() for p in model.parameters() if p.grad is not None]


def _kept(model: nn.Module, inputs: dict[str, Tensor]) -> int:
    with SavedTensorTracker(model) as tracker:
        model(**inputs)
    return tracker.nbytes


def _flat(gradients: list[Tensor]) -> Tensor:
    return torch.cat([g.flatten() for g in gradients])


def _cosine(found: list[Tensor], exact: list[Tensor]) -> float:
    return float(F.cosine_similarity(_flat(found), _flat(exact), dim=0))


def _error(found: list[Tensor], exact: list[Tensor]) -> float:
    return float((_flat(found) - _flat(exact)).norm() / _flat(exact).norm())


def _worst(found: list[Tensor], exact: list[Tensor]) -> float:
    least = 1e-3 * float(_flat(exact).norm())
    pairs = [(a, b) for a, b in zip(found, exact, strict=True) if float(b.norm()) >= least]
    return min(_cosine([a], [b]) for a, b in pairs)
