"""Models of transformers in sizes of a benchmark's choice."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import laconic

HEAD_DIM = 64


def causal_model(family: str, hidden_size: int, *, head_dim: int = HEAD_DIM, **sizes: Any) -> nn.Module:
    """A language model with random weights, the same in every call."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"num_attention_heads": max(1, hidden_size // head_dim)} | sizes
    sizes.setdefault("num_key_value_heads", sizes["num_attention_heads"])
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, hidden_size=hidden_size, head_dim=head_dim, **sizes), trust_remote_code=False
    )
    return model


@dataclass(frozen=True)
class DecoderLayers:
    """Layers that are alike, and what one forward takes: x [1, length, hidden] and rotary tables."""

    layers: list[nn.Module]
    x: Tensor
    positions: tuple[Tensor, Tensor]

    def forward(self, layer: nn.Module, source: Tensor) -> Tensor:
        """One layer's output."""
        out = layer(source, position_embeddings=self.positions)
        return out[0] if isinstance(out, tuple) else out

    def source(self) -> Tensor:
        """x as a leaf of its own."""
        return self.x.detach().clone().requires_grad_()

    def compressed(self, bits: int = 4, **how: Any) -> nn.Module:
        """A copy of the first layer with compressed activations."""
        twin = copy.deepcopy(self.layers[0])
        inputs = {"hidden_states": self.x, "position_embeddings": self.positions}
        laconic.compress_activations(twin, bits, example_inputs=inputs, **how)
        return twin


def decoder_layers(
    family: str, hidden_size: int, length: int, num_layers: int = 1, device: str = "cpu", **sizes: Any
) -> DecoderLayers:
    """Decoder layers in bf16 with heads of 64."""
    model: Any = causal_model(family, hidden_size, vocab_size=8, num_hidden_layers=num_layers, **sizes)
    x = torch.randn(1, length, hidden_size).to(device, torch.bfloat16)
    positions = model.model.rotary_emb.to(device)(x, torch.arange(length, device=device)[None])
    return DecoderLayers([layer.to(device, torch.bfloat16) for layer in model.model.layers], x, positions)
