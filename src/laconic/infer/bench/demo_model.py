"""A random mixture-of-experts model, for measurements without a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from laconic.train.data.tokenizer import BytesTokenizer


def save_demo_model(
    model_dir: Path, *, hidden_size: int = 128, layers: int = 4, experts: int = 16, vocab_size: int | None = None
) -> None:
    """Save a random Qwen2-MoE in float32: top-4 routing, a shared expert in every layer, no end-of-sequence token.

    `hidden_size` is a multiple of 32; an expert is half as wide, the shared expert twice. `vocab_size` None takes that
    of BytesTokenizer.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    ends: Any = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model(
        "qwen2_moe",
        vocab_size=BytesTokenizer.vocab_size if vocab_size is None else vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        moe_intermediate_size=hidden_size // 2,
        shared_expert_intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 32,
        num_experts=experts,
        num_experts_per_tok=min(4, experts),
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        **ends,
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        model.save_pretrained(model_dir)
