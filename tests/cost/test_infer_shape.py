"""Sizes of models for the inference planner: parameters equal those of the real classes, refusals name the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from laconic.cost.infer import MODELS, InferenceShape
from laconic.errors import PlanError
from tests.cost.infer_models import shape_of

COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "intermediate_size": 48,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_group": 1,
    "topk_group": 1,
}
DEEPSEEK = {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2Moe", EXPERTS | {"num_key_value_heads": 2, "shared_expert_intermediate_size": 40}),
    "qwen2, every second layer dense": (
        "Qwen2Moe",
        EXPERTS | {"num_key_value_heads": 2, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2},
    ),
    "qwen3": ("Qwen3Moe", EXPERTS | {"num_key_value_heads": 2, "head_dim": 12}),
    "qwen3, biases, tied, a dense layer": (
        "Qwen3Moe",
        EXPERTS
        | {
            "num_key_value_heads": 2,
            "head_dim": 12,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "mlp_only_layers": [2],
        },
    ),
    "mixtral": ("Mixtral", {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": ("Olmoe", {"num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2}),
    "gpt-oss": ("GptOss", {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek v2": ("DeepseekV2", DEEPSEEK | LATENT | {"q_lora_rank": 12, "first_k_dense_replace": 1}),
    "deepseek v2 lite": ("DeepseekV2", DEEPSEEK | LATENT | {"q_lora_rank": None, "first_k_dense_replace": 0}),
    "deepseek v3": ("DeepseekV3", DEEPSEEK | LATENT | {"q_lora_rank": 12, "first_k_dense_replace": 2}),
}


def small(name: str) -> Any:
    family, sizes = SMALL[name]
    return getattr(transformers, f"{family}Config")(**(COMMON | sizes))


@pytest.mark.parametrize("name", SMALL)
def test_parameters_of_both_roles_are_those_of_the_model(name: str) -> None:
    config = small(name)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shape = InferenceShape.from_config(config.to_dict())
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    routed = sum(p.numel() for key, p in model.named_parameters() if ".experts." in key)
    assert shape.experts_parameters(shape.num_experts) == routed
    assert shape.attention_worker_parameters == shape.num_parameters - routed


def test_the_papers_models_have_their_published_sizes() -> None:
    billions = {name: InferenceShape.load(name).num_parameters / 1e9 for name in MODELS}
    assert billions["deepseek-v2"] == pytest.approx(236, abs=0.5)
    assert billions["qwen3-235b-a22b"] == pytest.approx(235, abs=0.5)


def test_what_the_cache_holds() -> None:
    deepseek = MODELS["deepseek-v2"]
    assert InferenceShape.from_config(deepseek, latent_cache=True).cache_values == 512 + 64
    assert InferenceShape.from_config(deepseek).cache_values == 128 * (192 + 128)
    assert InferenceShape.load("qwen3-235b-a22b").cache_values == 2 * 4 * 128


def test_windows_shorten_what_queries_see() -> None:
    oss = InferenceShape.from_config(small("gpt-oss").to_dict())
    assert (oss.sliding_window, oss.num_full_layers) == (128, 2)
    assert oss.keys_seen(100) == 100
    assert oss.keys_seen(1000) == (1000 + 128) / 2
    assert shape_of().keys_seen(1000) == 1000


def test_a_directory_or_its_file_can_be_read_and_its_dtype_counts(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    config = small("mixtral").to_dict() | {"dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    shape = InferenceShape.load(folder)
    assert (shape.name, shape.item_nbytes) == ("tiny", 4)
    assert shape == InferenceShape.load(folder / "config.json")
    assert InferenceShape.load(folder, item_nbytes=2).row_nbytes == 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama', but a configuration alone says the sizes of deepseek_v2"),
        ({"hidden_size": None}, "hidden_size is None, but it must be a whole number"),
        ({"num_experts_per_tok": 9}, "top_k is 9, but a token has at most num_experts = 8"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is set"),
        ({"mlp_only_layers": [0, 1, 2, 3]}, "at least one layer must have experts"),
        ({"moe_intermediate_size": True}, "moe_intermediate_size is True"),
        ({"mlp_only_layers": 3}, "mlp_only_layers is 3, but it must be a list or null"),
        ({"num_hidden_layers": 2**70}, "num_hidden_layers is 1180591620717411303424, but it must be at most 100000"),
    ],
)
def test_refusals_name_the_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message.replace("(", r"\(")):
        InferenceShape.from_config(small("qwen3").to_dict() | change)


def test_a_missing_or_broken_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"must be a directory with a config\.json, or one of deepseek-v2"):
        InferenceShape.load(tmp_path / "none")
    for text, message in (
        ("{", "is not JSON"),
        ("{}", "has no model_type"),
        ("[]", "is a list, but it must be a table"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(PlanError, match=message):
            InferenceShape.load(tmp_path)
