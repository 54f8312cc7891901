"""Fine-tuning a directory that somebody saved: its tokenizer, its weights in every form, its rate, or a refusal."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from laconic.errors import ConfigError, DataError, LaconicError, ModelError
from laconic.train.checkpoint.export import export
from laconic.train.config.schema import FINE_TUNING_RATE, PRETRAINING_RATE, ModelConfig, TrainConfig
from laconic.train.config.toml import load_config
from laconic.train.data.corpus import prepare
from laconic.train.model import build_model
from laconic.train.model_source import resolve_defaults
from tests.train.runs import resumed, tiny_config, train_alone, write_corpus

_VOCABULARY = 300


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as save_pretrained leaves it: a small Llama and a BPE tokenizer of 300 tokens."""
    folder = tmp_path_factory.mktemp("pretrained")
    corpus = write_corpus(folder / "corpus")
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=_VOCABULARY, special_tokens=["<end>"], initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train([str(file) for file in sorted(corpus.iterdir())], trainer)
    out = folder / "model"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(out)
    torch.manual_seed(5)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=_VOCABULARY, max_position_embeddings=64, **sizes)).save_pretrained(out)
    return out


def copied(pretrained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pretrained, tmp_path / "model"))


def config_for(path: Path, **changes: Any) -> TrainConfig:
    return load_config(None, {"model.path": str(path), **changes})


def as_bin(path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(path)
    torch.save(model.state_dict(), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()


def as_shards(path: Path) -> None:
    LlamaForCausalLM.from_pretrained(path).save_pretrained(path, max_shard_size="20KB")
    (path / "model.safetensors").unlink()
    assert len(list(path.glob("model-*.safetensors"))) > 1


def as_bin_shards(path: Path) -> None:
    state = LlamaForCausalLM.from_pretrained(path).state_dict()
    places = {name: f"pytorch_model-{index % 2 + 1:05d}-of-00002.bin" for index, name in enumerate(state)}
    for file in set(places.values()):
        torch.save({name: state[name] for name in state if places[name] == file}, path / file)
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (path / "model.safetensors").unlink()


@pytest.mark.parametrize("save_as", [lambda path: None, as_bin, as_shards, as_bin_shards])
def test_weights_of_every_form_are_loaded_and_counted(
    save_as: Callable[[Path], None], pretrained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = copied(pretrained, tmp_path)
    save_as(path)
    expected = dict(LlamaForCausalLM.from_pretrained(pretrained).named_parameters())
    with caplog.at_level(logging.INFO):
        model = build_model(ModelConfig(path=str(path)), 257, 32, 0)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    assert f"loaded {len(expected)} of {len(expected)} tensors from {path}" in caplog.text
    assert resolve_defaults(config_for(path)).optimizer.learning_rate == FINE_TUNING_RATE


def test_random_weights_are_said_to_be_random(
    pretrained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = copied(pretrained, tmp_path)
    (path / "model.safetensors").unlink()
    with caplog.at_level(logging.INFO):
        build_model(ModelConfig(path=str(path)), 257, 32, 3)
        build_model(ModelConfig(hidden_size=32, num_hidden_layers=1), 257, 32, 3)
    assert caplog.text.count("initialized at random (seed 3)") == 2
    assert resolve_defaults(config_for(path)).optimizer.learning_rate == PRETRAINING_RATE


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("tf_model.h5", "save_pretrained"),
        ("model.gguf", "save_pretrained"),
        ("model.fp16.safetensors", "save_pretrained"),
        ("consolidated.00.pth", "save_pretrained"),
        ("__0_0.distcp", "laconic export"),
        ("model.safetensors.laconic", "laconic unzip"),
        ("adapter_model.safetensors", "merge the adapter"),
    ],
)
def test_weights_that_cannot_be_loaded_are_not_taken_for_none(
    name: str, remedy: str, pretrained: Path, tmp_path: Path
) -> None:
    path = copied(pretrained, tmp_path)
    (path / "model.safetensors").rename(path / name)
    with pytest.raises(ModelError, match=f"holds {name}, which .*{remedy}"):
        build_model(ModelConfig(path=str(path)), 257, 32, 0)


def test_what_trainer_leaves_beside_a_config_is_no_weights(pretrained: Path, tmp_path: Path) -> None:
    path = copied(pretrained, tmp_path)
    (path / "model.safetensors").unlink()
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state_0.pth"):
        (path / name).write_bytes(b"")
    build_model(ModelConfig(path=str(path)), 257, 32, 0)


def test_missing_and_unexpected_tensors_are_named(
    pretrained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = copied(pretrained, tmp_path)
    as_bin(path)
    state = torch.load(path / "pytorch_model.bin", weights_only=True)
    torch.save(state | {"another.weight": torch.zeros(2)}, path / "pytorch_model.bin")
    with caplog.at_level(logging.INFO):
        build_model(ModelConfig(path=str(path)), 257, 32, 0)
    assert "not in the model: 1 (another.weight)" in caplog.text
    del state["model.layers.1.mlp.up_proj.weight"]
    torch.save(state, path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"first 'model.layers.1.mlp.up_proj.weight': loaded \d+ of \d+ tensors"):
        build_model(ModelConfig(path=str(path)), 257, 32, 0)


class MakesFile:
    """A pickle that creates a directory when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        import os

        return os.mkdir, (str(self.path),)


def test_a_bin_file_is_not_run(pretrained: Path, tmp_path: Path) -> None:
    path = copied(pretrained, tmp_path)
    (path / "model.safetensors").unlink()
    torch.save({"model.norm.weight": MakesFile(tmp_path / "executed")}, path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="weights that cannot be loaded"):
        build_model(ModelConfig(path=str(path)), 257, 32, 0)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_in_the_directory_is_not_run(file: str, pretrained: Path, tmp_path: Path) -> None:
    path = copied(pretrained, tmp_path)
    (path / "code.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'executed')!r})\n")
    content = json.loads((path / file).read_text())
    if file == "config.json":
        content |= {"model_type": "mine", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
    else:
        (path / "tokenizer.json").rename(path / "vocab.json")  # so that transformers has to read the directory
        content |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["code.T", "code.T"]}}
    (path / file).write_text(json.dumps(content))
    with pytest.raises(LaconicError):
        train_alone(tiny_config(tmp_path, "run", {"model.path": str(path)}))
    assert not (tmp_path / "executed").exists()


def test_attention_from_the_hub_is_refused(pretrained: Path, tmp_path: Path) -> None:
    path = copied(pretrained, tmp_path)
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(content | {"attn_implementation": "somebody/attention"}))
    with pytest.raises(ModelError, match="'somebody/attention', which is code on the Hugging Face hub"):
        build_model(ModelConfig(path=str(path)), 257, 32, 0)


def test_an_adapter_is_refused(pretrained: Path, tmp_path: Path) -> None:
    path = copied(pretrained, tmp_path)
    (path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "somebody/else"}))
    with pytest.raises(ModelError, match=r"adapter_config\.json"):
        build_model(ModelConfig(path=str(path)), 257, 32, 0)


def without_tokenizer_json(path: Path) -> None:
    """Leave vocab.json and merges.txt of the tokenizer, as GPT-2 came."""
    content = json.loads((path / "tokenizer.json").read_text())
    (path / "vocab.json").write_text(json.dumps(content["model"]["vocab"]))
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in content["model"]["merges"]]
    (path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (path / "tokenizer.json").unlink()
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<end>", "bos_token": "<end>", "unk_token": "<end>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("change", [lambda path: None, without_tokenizer_json])
def test_the_directory_s_tokenizer_is_used(
    change: Callable[[Path], None], pretrained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = copied(pretrained, tmp_path)
    change(path)
    corpus = tiny_config(tmp_path, "-").data
    with caplog.at_level(logging.INFO):
        config = resolve_defaults(config_for(path, **{"data.paths": corpus.paths, "data.cache_dir": corpus.cache_dir}))
    assert config.data.tokenizer is not None
    assert config.data.tokenizer.startswith(str(path))
    assert f"tokenizer: {config.data.tokenizer}" in caplog.text
    found = prepare(config.data)
    text = "".join(Path(file).read_text() for file in sorted(Path(corpus.paths[0]).iterdir()))
    assert found.vocab_size == _VOCABULARY
    assert found.num_tokens < 0.8 * len(text)  # bytes would be more
    if change is not without_tokenizer_json:
        ids = AutoTokenizer.from_pretrained(path)(Path(corpus.paths[0], "0.txt").read_text()).input_ids
        assert found.train.read(0, 100).tolist() == ids[:100] or found.validation.read(0, 100).tolist() == ids[:100]


def test_a_path_without_a_model_is_refused_before_anything_is_said_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for path, why in ((tmp_path / "nowhere", "must be a directory"), (tmp_path, "has no config.json")):
        with caplog.at_level(logging.INFO), pytest.raises(ConfigError, match=why):
            resolve_defaults(config_for(path))
    assert not caplog.text


def test_what_the_user_says_wins(pretrained: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        config = resolve_defaults(
            config_for(pretrained, **{"data.tokenizer": "bytes", "optimizer.learning_rate": 1e-3})
        )
    assert (config.data.tokenizer, config.optimizer.learning_rate) == ("bytes", 1e-3)
    assert "tokenizer: bytes, as data.tokenizer says, not tokenizer.json" in caplog.text


def test_without_a_tokenizer_only_a_model_of_bytes_is_trained(pretrained: Path, tmp_path: Path) -> None:
    path = copied(pretrained, tmp_path)
    for file in path.glob("*token*"):
        file.unlink()
    with pytest.raises(ConfigError, match="has weights but no tokenizer, and its vocabulary of 300 entries is not"):
        resolve_defaults(config_for(path))
    assert resolve_defaults(config_for(path, **{"data.tokenizer": "bytes"})).data.tokenizer == "bytes"
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(content | {"vocab_size": 257}))
    assert resolve_defaults(config_for(path)).data.tokenizer == "bytes"


def test_a_tokenizer_that_the_model_has_no_entries_for_is_refused(pretrained: Path, tmp_path: Path) -> None:
    changes = {"model.path": str(pretrained), "data.tokenizer": str(tmp_path / "large.json")}
    large = Tokenizer(BPE())
    large.pre_tokenizer = ByteLevel(add_prefix_space=False)
    corpus = write_corpus(tmp_path / "corpus")
    trainer = BpeTrainer(
        vocab_size=400, special_tokens=["</s>"], initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    large.train([str(file) for file in sorted(corpus.iterdir())], trainer)
    large.save(str(tmp_path / "large.json"))
    with pytest.raises(DataError, match="but the model's vocabulary ends at 299"):
        train_alone(tiny_config(tmp_path, "run", changes))


def test_a_fine_tuned_model_is_resumed_and_exported_with_its_tokenizer(
    pretrained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config(tmp_path, "run", {"model.path": str(pretrained), "checkpoint.every": 2})
    with caplog.at_level(logging.INFO, "laconic"):
        assert train_alone(config, stop_after=3) == 130
    assert "learning rate: 2e-05, the default for weights that are trained already" in caplog.text
    saved = load_config(tmp_path / "run" / "config.toml")
    assert saved.optimizer.learning_rate == FINE_TUNING_RATE
    assert saved.data.tokenizer == str(pretrained / "tokenizer.json")
    assert train_alone(resumed(saved)) == 0
    out = export(tmp_path / "run", tmp_path / "out")
    assert AutoTokenizer.from_pretrained(out).eos_token == "<end>"
    assert LlamaForCausalLM.from_pretrained(out).config.vocab_size == _VOCABULARY
    again = tiny_config(tmp_path, "again", {"model.path": str(out), "steps": 1})
    assert train_alone(again) == 0
    by_directory = tiny_config(tmp_path, "folder", {"data.tokenizer": str(pretrained), "steps": 1})
    assert train_alone(by_directory) == 0
    assert (tmp_path / "folder" / "tokenizer.json").is_file()
