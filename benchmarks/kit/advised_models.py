"""Models and batches for `laconic advise benchmarks/kit/advised_models.py:llama` and `:vit`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    """A Llama of 37 million parameters in bf16, 2 x 256 tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16384,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=8,
        use_cache=False,
    )
    tokens = torch.randint(8, 16384, (2, 256))
    return LlamaForCausalLM(config).bfloat16(), {"input_ids": tokens, "labels": tokens}


def vit() -> tuple[nn.Module, dict[str, Tensor]]:
    """A small vision transformer in fp32, 8 images of 96 x 96."""
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=192, num_hidden_layers=6, intermediate_size=768, num_attention_heads=3, image_size=96, num_labels=10
    )
    return ViTForImageClassification(config), {
        "pixel_values": torch.randn(8, 3, 96, 96),
        "labels": torch.randint(10, (8,)),
    }
