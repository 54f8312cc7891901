"""Checkpoints loaded into models on the meta device: the same as transformers' from_pretrained, refused where not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from laconic.errors import CheckpointError
from laconic.moe.huggingface import from_pretrained, load_pretrained, parallelize
from tests.activations.models import MIXTURES, make_ids, make_model
from tests.grid import grid


def saved(folder: Path, family: str, **changes: Any) -> nn.Module:
    model = make_model(family, **changes)
    model.save_pretrained(folder, max_shard_size="60KB")
    return model


@pytest.mark.parametrize(("family", "tied"), grid(list(MIXTURES), [False, True], strength=1))
def test_a_model_is_what_transformers_loads(family: str, tied: bool, tmp_path: Path) -> None:
    saved(tmp_path, family, tie_word_embeddings=tied)
    model = from_pretrained(tmp_path).model
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager")
    for found, whole in (
        (model.state_dict().items(), expected.state_dict().items()),
        (model.named_buffers(), expected.named_buffers()),  # rotary frequencies, too
    ):
        for (name, a), (other, b) in zip(found, whole, strict=True):
            assert name == other
            assert a.dtype == b.dtype, name
            assert torch.equal(a, b), name
    ids = make_ids(1, 6)
    torch.testing.assert_close(model(ids).logits, expected(ids).logits)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    assert not model.training


def test_files_have_experts_one_by_one(tmp_path: Path) -> None:
    """What the test above reads is converted."""
    saved(tmp_path, "mixtral")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in index
    assert len(set(index.values())) > 2


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_values_get_the_dtype_asked_for_but_where_transformers_keeps_fp32(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.linspace(-0.3, 0.3, len(buffer)))
    model.save_pretrained(tmp_path)
    half = from_pretrained(tmp_path, dtype=torch.bfloat16).model
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for (name, got), other in zip(half.state_dict().items(), expected.state_dict().values(), strict=True):
        assert got.dtype == other.dtype, name
        assert torch.equal(got, other), name
    assert half.model.rotary_emb.inv_freq.dtype == torch.float32


def test_a_model_that_has_values_is_filled_in_place(tmp_path: Path) -> None:
    model, other = saved(tmp_path, "deepseek_v3"), make_model("deepseek_v3")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    done = parallelize(other)
    before = [id(parameter) for parameter in other.parameters()]
    loaded = load_pretrained(other, tmp_path)
    assert before == [id(parameter) for parameter in done.model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
    assert loaded.nbytes == sum(tensor.nbytes for tensor in model.state_dict().values())


def change(folder: Path, name: str, value: torch.Tensor | None) -> None:
    """Replace a tensor of the only file, or take it out."""
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name, None)
    save_file(tensors | ({} if value is None else {name: value}), folder / "model.safetensors", {"format": "pt"})


EXPERT = "model.layers.1.block_sparse_moe.experts.2.w3.weight"


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("model.norm.weight", None, r"1 tensors are missing.*: model\.norm\.weight is missing"),
        ("model.norm.weight", torch.ones(63), r"model\.norm\.weight is \[63\] there and \[64\] here"),
        (EXPERT, None, r"layers\.1\.mlp\.experts\.gate_up_proj is made of 4 of .*w1.*, 3 of .*w3"),
        (EXPERT, torch.ones(161, 64), r"gate_up_proj is stacked of tensors that differ: .*\[160, 64\]; .*\[161, 64\]"),
    ],
    ids=["missing", "misfit", "expert-missing", "expert-misfit"],
)
def test_a_misfit_is_refused_before_anything_is_read(
    name: str, value: torch.Tensor | None, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("mixtral").save_pretrained(tmp_path)
    change(tmp_path, name, value)
    monkeypatch.setattr("laconic.moe.huggingface.safetensors_source.TensorFiles.read", lambda *_: pytest.fail("read"))
    with torch.device("meta"):
        model = make_model("mixtral")
    with pytest.raises(CheckpointError, match=match):
        load_pretrained(model, tmp_path)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_tensor_without_use_is_named(tmp_path: Path) -> None:
    make_model("mixtral").save_pretrained(tmp_path)
    change(tmp_path, "model.layers.7.norm", torch.ones(3))
    with pytest.warns(UserWarning, match=r"1 tensors that MixtralForCausalLM has no use for: model\.layers\.7\.norm"):
        from_pretrained(tmp_path)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    model = make_model("mixtral")
    with pytest.raises(CheckpointError, match=r"is no directory; .*snapshot_download"):
        load_pretrained(model, tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load_pretrained(model, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../a.safetensors"}}')
    with pytest.raises(CheckpointError, match="not the name of a file beside it"):
        load_pretrained(model, tmp_path)
    with pytest.raises(CheckpointError, match="only models of transformers"):
        load_pretrained(nn.Linear(2, 2), tmp_path)
