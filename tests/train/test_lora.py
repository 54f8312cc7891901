"""Adapters: what is trained, what is refused, and that an export is what was trained."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from laconic.cli.train import resolve
from laconic.errors import CheckpointError, ConfigError
from laconic.train.checkpoint.export import export
from laconic.train.config.schema import LoraConfig, ModelConfig, TrainConfig
from laconic.train.config.toml import load_config, save_config
from laconic.train.lora import add_adapters, freeze_in_bf16
from laconic.train.model import build_model
from laconic.train.report.metrics import read_metrics
from laconic.train.run import run
from tests.distributed.processes import ForkedCommand
from tests.train.runs import AGOQ, ALONE, StopAfter, tiny_config, train_alone
from tests.train.tuning import write_lines, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tuning")
    write_model(root / "base")
    write_model(root / "untied", tied=False)
    write_lines(root / "chat.jsonl")
    return root


def adapted(path: Path, **lora: Any) -> tuple[torch.nn.Module, str | None]:
    config = TrainConfig(model=ModelConfig(path=str(path)), lora=LoraConfig(**{"r": 4, **lora}))
    model = build_model(config.model, 260, 16, 0)
    return model, add_adapters(model, config)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lora.alpha": 8}, r"lora\.alpha is 8, but it must be left out without lora\.r"),
        ({"lora.target_modules": ["q_proj"]}, r"lora\.target_modules is .* without lora\.r"),
        ({"lora.r": 0}, r"lora\.r is 0, but it must be at least 1"),
        ({"lora.r": 4}, r"lora\.r is 4, but it must come with model\.path"),
        ({"lora.r": 4, "model.path": "m", "moe.expert_parallel": 2}, r"moe\.expert_parallel is 2, .* with lora\.r"),
        ({"lora.r": 4, "model.path": "m", "pipeline.stages": 2}, r"lora\.r is 4, .* with pipeline\.stages = 2"),
        ({"lora.r": 4, "model.path": "m", "moe.bias_rate": 0.1}, r"moe\.bias_rate is 0\.1, .* with lora\.r"),
        ({"lora.r": 4, "model.path": "m", "plan": "p.json"}, r"lora\.r is 4, .* with a plan"),
        (
            {"lora.r": 4, "model.path": "m", "task": "image-classification"},
            r"lora\.r is 4, .* left out with task = image",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, values)


def test_fields_of_a_section_follow_its_flag() -> None:
    short, _ = resolve(["--init", "m", "--lora", "r=16", "target_modules=q_proj,v_proj", "alpha=8", "--steps", "9"])
    dotted = ["--lora.r", "16", "--lora.target-modules", "q_proj", "v_proj", "--lora.alpha", "8", "--steps", "9"]
    assert short == resolve(["--model.path", "m", *dotted])[0]
    with pytest.raises(ConfigError, match=r"--init is 'a', but --model\.path is 'b'"):
        resolve(["--init", "a", "--model.path", "b"])
    with pytest.raises(ConfigError, match=r"unknown flag --lora\.rank"):
        resolve(["--init", "m", "--lora", "rank=16"])
    with pytest.raises(ConfigError, match=r"--lora is a table; .* --lora\.r VALUE"):
        resolve(["--lora", "16"])


def test_only_adapters_are_trained_and_the_frozen_weights_are_hashed(folder: Path) -> None:
    model, base = adapted(folder / "base")
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 7 * 2
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)
    other, with_others = adapted(folder / "base", target_modules=("q_proj",))
    assert base == with_others  # the adapters are no part of it
    assert len([p for p in other.parameters() if p.requires_grad]) == 4
    assert adapted(folder / "untied")[1] != base


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("q_proj", "v_porj"), r"no module 'v_porj'; did you mean v_proj\?; its linear layers are .*down_proj"),
        (("lm_head",), "'lm_head' shares its weight"),
        (("input_layernorm",), "which peft refuses for this model"),
    ],
)
def test_layers_that_cannot_be_adapted_are_refused(folder: Path, targets: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        adapted(folder / "base", target_modules=targets)


def test_adapters_of_random_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "base" / "config.json").read_bytes())
    with pytest.raises(ConfigError, match="holds no weights"):
        adapted(tmp_path)


def test_without_peft_the_command_that_installs_it_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"lora\.r is 4, but adapters need peft .*pip install 'laconic\[lora\]'"):
        adapted(folder / "base")


def test_frozen_linear_weights_are_kept_as_autocast_rounds_them(folder: Path) -> None:
    model, _ = adapted(folder / "base")
    ids = torch.arange(32).view(2, 16)

    def loss_and_gradients() -> list[torch.Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, labels=ids).loss
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    before = loss_and_gradients()
    config = TrainConfig(model=ModelConfig(path="m"), lora=LoraConfig(r=4), precision="bf16")
    freeze_in_bf16(model, replace(config, parallel="fsdp"))
    freeze_in_bf16(model, replace(config, precision="fp32"))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    freeze_in_bf16(model, config)
    halved = {name for name, p in model.named_parameters() if p.dtype == torch.bfloat16}
    assert len(halved) == 14
    assert all(name.endswith(".base_layer.weight") for name in halved)  # the head is the embedding
    assert all(torch.equal(x, y) for x, y in zip(before, loss_and_gradients(), strict=True))


def settings(folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    paths = {"model.path": str(folder / "base"), "data.paths": (str(folder / "chat.jsonl"),)}
    tuning = {"task": "instruction-tuning", "lora.r": 4, "lora.dropout": 0.1, "optimizer.learning_rate": 1e-2}
    return {**paths, **tuning, "sequence_length": 48, "checkpoint.every": 3, "audit": True, **changes}


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run_dir) if "loss" in row]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks transformers the old way
@pytest.mark.ci
@pytest.mark.parametrize("changes", [{}, {"precision": "bf16", **AGOQ}], ids=["fp32", "bf16-agoq"])
def test_a_model_is_tuned_stopped_resumed_and_exported(
    folder: Path, tmp_path: Path, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    whole, part = (tiny_config(tmp_path, name, settings(folder, changes)) for name in ("whole", "part"))
    assert train_alone(whole) == 0
    assert "audit: as in the exact computation" in capsys.readouterr().err
    assert run(part, ALONE, StopAfter(3)) == 130
    for other, message in (
        ({"lora.r": 8}, r"lora\.r is 8, but the run that wrote .* had 4"),
        ({"lora.alpha": 1}, r"lora\.alpha is 1, but"),
        ({"model.path": str(folder / "untied")}, r"model\.path is|weights of model\.path is"),
    ):
        with pytest.raises(ConfigError, match=message):
            train_alone(tiny_config(tmp_path, "part", settings(folder, {**changes, "resume": True, **other})))
    assert train_alone(replace(part, resume=True)) == 0
    assert losses(tmp_path / "part") == losses(tmp_path / "whole")

    adapters = export(tmp_path / "part", tmp_path / "adapters")
    merged = export(tmp_path / "part", tmp_path / "merged", merge=True)
    ids = torch.arange(24).view(1, 24)
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    with torch.no_grad():
        before = base(ids).logits
        tuned = PeftModel.from_pretrained(base, adapters)(ids).logits
        again = AutoModelForCausalLM.from_pretrained(merged)(ids).logits
    torch.testing.assert_close(again, tuned, rtol=1e-4, atol=1e-5)
    assert (tuned - before).abs().max() > 1e-2
    assert {path.name for path in adapters.iterdir()} >= {"adapter_config.json", "chat_template.jinja"}
    assert not list(adapters.glob("model*"))


@pytest.mark.ci
def test_two_processes_have_the_losses_of_one(folder: Path, tmp_path: Path) -> None:
    plain = {"lora.dropout": 0.0, "verify.every": 2}
    assert train_alone(tiny_config(tmp_path, "one", settings(folder, plain))) == 0
    for name, changes in {
        "ddp": {"accumulation": 2},
        "fsdp": {"parallel": "fsdp"},
        "codes": {"gradients.bits": 8, "optimizer.kind": "adamw8bit"},
    }.items():
        config = tiny_config(tmp_path, name, settings(folder, {**plain, "nproc": 2, **changes}))
        save_config(config, tmp_path / f"{name}.toml")
        ending = ForkedCommand(["train", "--config", str(tmp_path / f"{name}.toml")], tmp_path / f"{name}-out").finish()
        assert ending.code == 0, ending.err
        tolerance = 1e-3 if name != "codes" else 2e-2
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "one"), rel=tolerance)
        stored = FileSystemReader(tmp_path / name / "checkpoints" / "step-00000006").read_metadata().state_dict_metadata
        assert len(stored) >= 28 * 3
        assert all(".lora_" in key for key in stored)
        export(tmp_path / name, tmp_path / f"{name}-merged", merge=True)
        if name == "fsdp":  # a checkpoint of shards goes on in one process
            more = {**plain, "parallel": "fsdp", "resume": True, "steps": 7}
            assert train_alone(tiny_config(tmp_path, name, settings(folder, more))) == 0


@pytest.mark.slow
def test_a_base_that_has_changed_and_a_run_without_adapters_are_not_exported(folder: Path, tmp_path: Path) -> None:
    base = write_model(tmp_path / "base")
    changes = settings(folder, {"model.path": str(base), "steps": 1, "audit": False})
    assert train_alone(tiny_config(tmp_path, "run", changes)) == 0
    base.rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match=r"adapters belong to, but it is no directory here; .* config\.toml"):
        export(tmp_path / "run", tmp_path / "out")
    (tmp_path / "moved").rename(base)
    content = (base / "config.json").read_text()
    (base / "config.json").write_text(json.dumps(json.loads(content) | {"rms_norm_eps": 0.5}))
    with pytest.raises(ConfigError, match=r"config\.json has rms_norm_eps = 0\.5 .*; restore it$"):
        export(tmp_path / "run", tmp_path / "out", merge=True)
    write_model(base, seed=1)
    with pytest.raises(CheckpointError, match="holds other weights than those that the run's adapters"):
        export(tmp_path / "run", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"weights of model\.path is .*, but the run that wrote"):
        train_alone(tiny_config(tmp_path, "run", {**changes, "resume": True, "steps": 2}))
    assert train_alone(tiny_config(tmp_path, "all", {**changes, "lora.r": None, "lora.dropout": 0.0})) == 0
    with pytest.raises(ConfigError, match=r"--merge is given, but .* without adapters"):
        export(tmp_path / "all", tmp_path / "out", merge=True)
