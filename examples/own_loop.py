"""Your own loop, everything on: 4-bit activations, gradients and Adam's moments in 8 bits. About 20 seconds.

    pip install 'laconic[train]'
    python examples/own_loop.py

Prints what a forward keeps per token and how the loss falls.
"""

from __future__ import annotations

from common import batches, llama

import laconic


def main() -> None:
    """Train 40 steps of two micro-batches."""
    model = llama()
    report = laconic.compress_activations(model, bits=4)
    print(f"{report.after_nbytes_per_token:.0f} bytes per token instead of {report.before_nbytes_per_token:.0f}")
    gradients = laconic.compress_gradients(model, bits=8)
    optimizer = laconic.AdamW8bit(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for step, (first, second) in enumerate(zip(batches(40, seed=1), batches(40, seed=2), strict=True)):
        model(input_ids=first, labels=first).loss.backward()
        with gradients.last_micro_batch():
            loss = model(input_ids=second, labels=second).loss
            loss.backward()
        gradients.reduce()
        gradients.scale_(0.5)
        gradients.clip_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
