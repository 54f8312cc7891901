"""All savings of laconic at once, beside stacks of what peers do best."""

from __future__ import annotations

import torch

from benchmarks.contenders.activations import checkpointed, compiled, compiled_layers, compressed
from benchmarks.contenders.losses import torch_chunked
from benchmarks.contenders.optimizers import adamw8bit, coded_gradients, peer_adamw
from benchmarks.contenders.training import EXACT, Contender


def contenders() -> list[Contender]:
    """The rows of the table."""
    ours = compressed(bits=4, loss="chunked")
    loss = [torch_chunked()] if hasattr(torch.nn, "LinearCrossEntropyOptions") else []
    bitsandbytes = peer_adamw("bitsandbytes.optim", "AdamW8bit")
    torchao = peer_adamw("torchao.optim", "AdamW4bit")
    return [
        Contender(EXACT),
        Contender("laconic, everything on", [ours, adamw8bit(), coded_gradients(8)], own_weights=True),
        Contender("laconic, everything on + recompute of layers",
                  [checkpointed(), ours, adamw8bit(), coded_gradients(8)], own_weights=True),
        Contender("torch recompute and chunked loss", [checkpointed(), *loss]),
        Contender("torch recompute and chunked loss, bitsandbytes AdamW8bit",
                  [checkpointed(), *loss, bitsandbytes], package="bitsandbytes"),
        Contender("torch recompute and chunked loss, torchao AdamW4bit",
                  [checkpointed(), *loss, torchao], package="torchao"),
        Contender("torch.compile, memory budget 0.5", [compiled(0.5)], compiled=True),
        Contender("torch.compile, memory budget 0.5, torchao AdamWFp8",
                  [compiled(0.5), peer_adamw("torchao.optim", "AdamWFp8")], package="torchao", compiled=True),
        Contender("torch.compile, laconic, everything on",
                  [ours, compiled(1.0), adamw8bit(), coded_gradients(8)], own_weights=True, compiled=True),
        Contender("layers compiled, laconic, everything on",
                  [ours, compiled_layers(), adamw8bit(), coded_gradients(8)], own_weights=True, compiled=True),
    ]  # fmt: skip
