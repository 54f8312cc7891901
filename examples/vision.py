"""An AFI-ResNet on generated images, activations in 4 bits. About 30 seconds.

    pip install 'laconic[train]'
    python examples/vision.py

Prints what a forward keeps, exact and packed, and the loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

import laconic
from laconic.vision import afi_resnet50


def stripes(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images [8, 3, 64, 64] of horizontal or vertical stripes, and which of them they are."""
    labels = torch.randint(0, 2, (8,), generator=generator)
    wave = torch.sin(torch.arange(64) * 0.6)
    images = torch.where(labels.view(8, 1, 1, 1) == 0, wave.view(64, 1), wave.view(1, 64)).expand(8, 3, 64, 64)
    return images + 0.5 * torch.randn(images.shape, generator=generator), labels


def main() -> None:
    """Train 8 steps."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = afi_resnet50(num_classes=2)
    images, labels = stripes(generator)
    report = laconic.compress_activations(
        model, bits=4, mode="combined", example_inputs={"pixel_values": images, "labels": labels}
    )
    assert report.before is not None
    assert report.after is not None
    before, after = (sum(found.by_module.values()) for found in (report.before, report.after))
    print(f"{after / 1e6:.1f} MB kept for backward instead of {before / 1e6:.1f}")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)
    for step in range(8):
        images, labels = stripes(generator)
        loss = model(pixel_values=images, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
