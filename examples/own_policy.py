"""Your own policy: 8 bits for attention's inputs, 4 for the rest, the last layer exact. About 10 seconds.

    pip install 'laconic[train]'
    python examples/own_policy.py

A policy sees every site and says how it is kept. Prints the report and the largest error of a gradient.
"""

from __future__ import annotations

import copy

from common import batches, llama

import laconic
from laconic.activations import Site
from laconic.formats import BlockFormat


def policy(site: Site) -> BlockFormat | None:
    """How a site is kept; None leaves it exact."""
    if ".layers.3." in site.name:
        return None
    return BlockFormat("int8") if "input_layernorm" in site.name else BlockFormat("nf4")


def main() -> None:
    """Compare the gradients of one batch."""
    exact = llama()
    model = copy.deepcopy(exact)
    print(laconic.compress_activations(model, policy=policy))
    (batch,) = batches(1)
    for part in (exact, model):
        part(input_ids=batch, labels=batch).loss.backward()
    errors = {
        name: float((got.grad - expected.grad).norm() / expected.grad.norm())
        for (name, got), expected in zip(model.named_parameters(), exact.parameters(), strict=True)
    }
    worst = max(errors, key=errors.__getitem__)
    print(f"largest error of a gradient: {errors[worst]:.1%} ({worst})")


if __name__ == "__main__":
    main()
