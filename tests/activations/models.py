"""Small models of every supported family, and inputs for them."""

from __future__ import annotations

import copy
import inspect
import weakref
from typing import Any

import torch
from torch import Tensor, nn

import laconic

VOCABULARY = 97

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "olmo2": {},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16},
    "phi3": {},
    "gpt2": {},
}

_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
_LATENT["num_key_value_heads"] = 4
_SHARED = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 48}

MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 48, "head_dim": 16, "norm_topk_prob": True},
    "olmoe": {"num_experts": 4, "intermediate_size": 32},  # gate and up together are as wide as the hidden states
    "deepseek_v2": {**_LATENT, **_SHARED, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "deepseek_v3": {**_LATENT, **_SHARED, "n_group": 2, "topk_group": 1},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 16},
}
"""Models with mixture-of-experts blocks, four experts each of which a token takes two."""


OTHERS: dict[str, dict[str, Any]] = {
    "opt": {"word_embed_proj_dim": 64, "ffn_dim": 160},
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon": {"alibi": False, "new_decoder_architecture": False},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
    "mamba": {"state_size": 8},
    "qwen3_next": {
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 48,
    },
}
"""Models whose layers call functions of torch or mix tokens by code of their own."""


def make_model(family: str, **overrides: Any) -> nn.Module:
    """A two-layer model of a family with random weights, norms and biases included."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    if family == "gpt2":
        sizes = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "loss_type": "ForCausalLM"}
    if family in MIXTURES:
        sizes["num_experts_per_tok"] = 2
    if family == "gpt_neox":
        sizes.pop("num_key_value_heads")
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model(
        family,
        **{
            **sizes,
            **special,
            **FAMILIES.get(family, {}),
            **MIXTURES.get(family, {}),
            **OTHERS.get(family, {}),
            **overrides,
        },
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # fresh norms and biases are ones and zeros, which would hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def make_ids(batch: int = 2, length: int = 48, seed: int = 1) -> Tensor:
    """Random tokens [batch, length]."""
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def cache_name() -> str:
    """What models call their cache, as an argument and of their output; transformers 5.24 renamed it."""
    from transformers import LlamaForCausalLM

    return "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


def loss_of(model: nn.Module, ids: Tensor, seed: int = 0) -> Tensor:
    """Next-token loss; the seed makes dropout repeatable."""
    torch.manual_seed(seed)
    loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Gradients by parameter name; they are taken off the model."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def everything(gradients: dict[str, Tensor]) -> Tensor:
    """All of them, in the order of their names."""
    return torch.cat([gradients[name].flatten() for name in sorted(gradients)])


def compressed(model: nn.Module, **options: Any) -> nn.Module:
    """A copy that is converted."""
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, **options)
    return twin


def both_gradients(model: nn.Module, twin: nn.Module, ids: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of the next-token loss of two models, by parameter name; the same parameters must have some."""
    found = []
    for each in (model, twin):
        loss_of(each, ids).backward()
        found.append(gradients_of(each))
    assert found[0].keys() == found[1].keys(), found[0].keys() ^ found[1].keys()
    return found[0], found[1]


def are_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Whether the same names have the same bits."""
    return found.keys() == expected.keys() and all(torch.equal(grad, expected[name]) for name, grad in found.items())


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference over norm of the expected value."""
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


class Gated(nn.Module):
    """A gated feed-forward block with the names of Llama's."""

    def __init__(self, width: int, inside: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, inside), nn.Linear(width, inside)
        self.down_proj, self.act_fn = nn.Linear(inside, width), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return y


def alive_gradients(model: nn.Module) -> list[int]:
    """How many of the gradients so far are alive when each arrives; hooks that are registered later come after it."""
    arrived: list[weakref.ref[Tensor]] = []
    counts: list[int] = []

    def count(parameter: Tensor) -> None:
        assert parameter.grad is not None
        arrived.append(weakref.ref(parameter.grad))
        counts.append(sum(reference() is not None for reference in arrived))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    return counts
