"""What the examples share: a small model and real text, both without a network."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH = 64


def llama(**changes: Any) -> LlamaForCausalLM:
    """A Llama of under a million parameters, whose tokens are bytes."""
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, **(shape | changes)))


def batches(count: int, seed: int = 0, size: int = 8) -> Iterator[Tensor]:
    """Bytes of the Python standard library, int64 [size, LENGTH], `count` times."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = b"\n".join(path.read_bytes() for path in sorted(root.glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(0, len(data) - LENGTH, (size, 1), generator=generator)
        yield data[starts + torch.arange(LENGTH)]
