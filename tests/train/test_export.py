"""Exports: Hugging Face loads them, with the checkpoint's weights bit for bit."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from laconic.errors import CheckpointError, ConfigError
from laconic.train.checkpoint.export import export
from tests.train.runs import tiny_config, train_alone, trained_model


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        ("llama", True),
        ("phi3", False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("llama", False), ("gpt2", True), ("gemma2", True))),
    ],
)
def test_exported_weights_are_the_trained_ones(family: str, tied: bool, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "run", {"model.family": family, "model.tie_word_embeddings": tied, "steps": 2})
    trained = trained_model(config)
    out = export(tmp_path / "run", tmp_path / "out")
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight) == tied
    expected = dict(trained.named_parameters())
    for name, parameter in loaded.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, expected.pop(name)), name
    assert not expected
    ids = torch.arange(24).view(1, 24)
    trained.eval()
    loaded.eval()
    with torch.no_grad():
        assert torch.equal(trained(ids).logits, loaded(ids).logits)
    assert loaded.generation_config.eos_token_id == 256
    assert loaded.generate(ids, max_new_tokens=2, do_sample=False).shape[1] in (25, 26)


def test_an_exported_model_can_be_trained_further(tmp_path: Path) -> None:
    assert train_alone(tiny_config(tmp_path, "first", {"steps": 2})) == 0
    out = export(tmp_path / "first", tmp_path / "out")
    assert train_alone(tiny_config(tmp_path, "second", {"steps": 2, "model.path": str(out)})) == 0
    export(tmp_path / "second", tmp_path / "again")


def test_the_checkpoint_asked_for_is_exported(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "run", {"checkpoint.every": 3})
    assert train_alone(config) == 0
    weights = {
        name: AutoModelForCausalLM.from_pretrained(export(tmp_path / "run", tmp_path / f"out-{name}", name))
        .get_input_embeddings()
        .weight
        for name in ("step-00000003", "3", "6", None)
    }
    assert torch.equal(weights["step-00000003"], weights["3"])
    assert torch.equal(weights["6"], weights[None])
    assert not torch.equal(weights["3"], weights["6"])


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    vocabulary = {character: index for index, character in enumerate("abcdefghij ")} | {"</s>": 11}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=None))
    tokenizer.pre_tokenizer = Split("", "isolated")
    source = tmp_path / "elsewhere" / "characters.json"
    source.parent.mkdir()
    tokenizer.save(str(source))
    config = tiny_config(tmp_path, "run", {"data.tokenizer": str(source), "steps": 1})
    assert train_alone(config) == 0
    shutil.rmtree(source.parent)
    moved = tmp_path / "moved"
    (tmp_path / "run").rename(moved)
    out = export(moved, tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(out).config.vocab_size == 12
    assert AutoTokenizer.from_pretrained(out)("bad")["input_ids"] == [1, 0, 3]


def test_what_is_there_already_is_not_overwritten(tmp_path: Path) -> None:
    assert train_alone(tiny_config(tmp_path, "run", {"steps": 1})) == 0
    out = tmp_path / "out"
    out.mkdir()
    export(tmp_path / "run", out)  # empty is fine
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(ConfigError, match=r"out is not empty; export into a new directory"):
        export(tmp_path / "run", out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is not a directory"):
        export(tmp_path / "run", tmp_path / "file")


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run directory with checkpoints"):
        export(tmp_path, tmp_path / "out")
    assert train_alone(tiny_config(tmp_path, "run", {"steps": 1})) == 0
    with pytest.raises(CheckpointError, match="step-00000009 does not exist"):
        export(tmp_path / "run", tmp_path / "out", "9")
    with pytest.raises(CheckpointError, match="'best' is not the name of a checkpoint"):
        export(tmp_path / "run", tmp_path / "out", "best")


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    assert train_alone(tiny_config(tmp_path, "run", {"steps": 1})) == 0
    shard = tmp_path / "run" / "checkpoints" / "step-00000001" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp has SHA-256"):
        export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import PreTrainedModel

    assert train_alone(tiny_config(tmp_path, "run", {"steps": 1})) == 0

    def save_pretrained(self: Any, directory: Path) -> None:
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", save_pretrained)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=r"cannot write .*out: .*No space left"):
        export(tmp_path / "run", tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before
