"""Tiny random models of the families that are served, and what transformers' generate says."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 97
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MLA = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_group": 1,
    "topk_group": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [1],
    },
    "qwen3_moe": {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3, "head_dim": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 5, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 8},
    "deepseek_v2": _MLA | {"topk_method": "greedy"},
    "deepseek_v3": _MLA,
    "glm4_moe": {
        "moe_intermediate_size": 24,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "head_dim": 8,
    },
    "ernie4_5_moe": {"moe_intermediate_size": 24, "moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 1},
    "phimoe": {"num_local_experts": 4},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoeshared": {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 8},
    "afmoe": {
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "head_dim": 8,
        "num_dense_layers": 1,
    },
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "dots1": {
        "moe_intermediate_size": 24,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "llama": {},
}
"""Families by model_type: what differs from the common sizes."""
SERVED_SPLIT = [name for name in FAMILIES if name != "llama"]
MOVED = {
    "qwen2_moe": 2,
    "deepseek_v2": 2,
    "deepseek_v3": 2,
    "glm4_moe": 2,
    "ernie4_5_moe": 2,
    "hunyuan_v1_moe": 3,
    "afmoe": 2,
    "dots1": 2,
}
"""Families with shared experts in their blocks: number of layers in which these run while rows are away."""

PROMPTS = [[5, 9, 2], [17], list(range(1, 40)), [3, 3, 3, 3, 8, 1, 90], list(range(60, 40, -1)), [44, 2]]
"""Lengths differ, so that prefill and decode share batches; the longest is cut by a small batch."""
NEW_TOKENS = 12


def split_families(*quick: str) -> list[Any]:
    """Parameters of a test: all families that are served split, of which the suite runs `quick` every time."""
    return [pytest.param(name, marks=[] if name in quick else pytest.mark.slow) for name in SERVED_SPLIT]


def make(family: str, folder: Path, **changes: Any) -> Path:
    """Save a tiny random model of `family` in float32; returns its directory."""
    torch.manual_seed(11)
    config = AutoConfig.for_model(family, **_COMMON | FAMILIES.get(family, {}) | changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    path = folder / family
    model.save_pretrained(path)
    return path


@torch.no_grad()
def generated(path: Path, prompts: list[list[int]] | None = None, new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    """The new tokens of transformers' generate, prompt by prompt."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    found = []
    for prompt in PROMPTS if prompts is None else prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
        found.append(out[0, len(prompt) :].tolist())
    return found


@cache
def expected(path: Path) -> list[list[int]]:
    """`generated` for the usual prompts, computed once for each model."""
    return generated(path)
