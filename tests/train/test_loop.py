"""One process from configuration to summary: steps, accumulation, resume, refusals."""

import importlib.util
import json
import math
import os
import re
import shlex
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.activations.whole_model.loss import TILES
from laconic.errors import CheckpointError, ConfigError, DataError, ModelError, TrainingError
from laconic.installation import command
from laconic.train import model as model_module
from laconic.train import trainer
from laconic.train.checkpoint import save_load
from laconic.train.checkpoint.resume import _differences
from laconic.train.config.schema import OptimizerConfig, TrainConfig
from laconic.train.config.toml import load_config
from laconic.train.model_source import resolve_defaults
from laconic.train.report.metrics import read_metrics
from laconic.train.report.run_dir import latest_name
from laconic.train.trainer import make_optimizer
from tests.train.runs import AGOQ, exact_metrics, losses, resumed, spoilt, tiny_config, train_alone, trained_model

# Adam divides by the root of the second moment, which turns the last bits of a small gradient into a large step. With
# this eps an update moves at most lr / eps = 0.2 times as far as its gradient, and rounding stays rounding.
SMOOTH = {"optimizer.eps": 1e-2, "activations.bits": 16}
# A loss near log(257) = 5.5 is a mean of 128 fp32 values: 5.5 * 128 * 2^-24 = 4e-5 if all roundings add up.
ROUNDING = 4e-5


def test_a_run_leaves_everything_it_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_config(tmp_path, "my run", {"checkpoint.every": 2, "checkpoint.keep": 1})
    assert train_alone(config) == 0
    run_dir = tmp_path / "my run"
    assert sorted(path.name for path in run_dir.iterdir()) == [
        "activations.json",
        "checkpoints",
        "config.toml",
        "metrics.jsonl",
        "summary.json",
    ]
    assert load_config(run_dir / "config.toml") == resolve_defaults(config)
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == [1, 2, 3, 3, 4, 5, 6, 6]
    training = [row for row in rows if "loss" in row]
    tokens = 4 * 32
    for row in training:
        assert row["tokens"] == row["step"] * tokens
        assert row["wire_nbytes"] == 0
        assert row["grad_norm"] > 0
        assert row["tokens_per_second"] == pytest.approx(tokens / row["step_seconds"])
    summary = json.loads((run_dir / "summary.json").read_text())
    validation = [row["validation_loss"] for row in rows if "validation_loss" in row]
    assert summary["steps"] == 6
    assert summary["loss"] == training[-1]["loss"]
    assert 0.9 < summary["bytes_per_token"] <= 1  # bytes, and ends of documents
    assert re.fullmatch("[0-9a-f]{64}", summary["data"])
    assert summary["validation_loss"] == validation[-1]
    assert summary["best_validation_loss"] == min(validation)
    assert summary["saved_nbytes_per_token"] == training[-1]["saved_nbytes"] / tokens
    assert summary["saved_nbytes_per_token"] < summary["bf16_nbytes_per_token"]
    assert (summary["world_size"], summary["parallel"]) == (1, "ddp")
    words, said = capsys.readouterr()
    assert re.search(r"^kept for backward per token \(float32\): [\d,]+ -> [\d,]+ bytes, [\d.]+x less$", said, re.M)
    assert "use_cache" not in said  # the trainer's own forwards fill no cache
    for part in ("6 of 6 steps", "validation loss", "tokens/s", "bytes per token", "peak memory", str(run_dir)):
        assert part in words
    next_command = words.partition("next:\n")[2].splitlines()[0]
    assert shlex.split(next_command) == [
        *shlex.split(command()),
        *("train", "--resume", "--run-dir", str(run_dir), "--steps", "12"),
    ]
    # The closing words have the figures of the first lines: both kept, in the same precision.
    report = json.loads((run_dir / "activations.json").read_text())
    before, after = report["before_nbytes_per_token"], report["after_nbytes_per_token"]
    assert f"{after:,.0f} bytes per token; exact training keeps {before:,.0f} ({before / after:.2f}x)" in words
    assert [path.name for path in sorted((run_dir / "checkpoints").iterdir())] == ["latest", "step-00000006"]


def test_the_log_says_that_warm_up_outlasts_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_config(tmp_path, "run", {"optimizer.warmup_steps": 8, "optimizer.learning_rate": 1e-3})
    assert train_alone(config) == 0
    said = "ends within its 8 steps of warm-up, at 0.00075 instead of 0.001; lower optimizer.warmup_steps"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({}, "--activations.loss chunked would not keep the 1,036 bytes a token of the loss"),
        # Of this model so little is saved that the conversion warns, and says the same.
        (
            {"model.hidden_size": 8, "model.intermediate_size": 8, "activations.bits": 8},
            'loss="chunked" would not keep the 1,036 bytes a token of the loss',
        ),
    ],
)
def test_what_chunks_of_the_loss_would_save_is_said_once(
    changes: dict[str, int],
    advice: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert train_alone(tiny_config(tmp_path, "run", {"steps": 1, **changes})) == 0
    said = caplog.text + capsys.readouterr().err
    assert said.count("would not keep") == said.count(advice) == 1


def test_memory_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_alone(tiny_config(tmp_path, "run", {"model.family": "gpt2"})) == 0
    memory = json.loads((tmp_path / "run" / "summary.json").read_text())["memory"]
    assert set(memory["measured"]) == {"saved per micro-batch", "parameters", "gradients", "optimizer"}
    assert (memory["predicted"], memory["error"]) == ({}, None)  # without a plan
    assert "memory: saved per micro-batch" in capsys.readouterr().err


def test_the_loss_falls(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "run", {"steps": 40, "optimizer.learning_rate": 1e-2, "eval_every": 0})
    assert train_alone(config) == 0
    values = losses(config.run_dir)
    assert values[40] < values[1] - 2.0


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"activations.bits": 16}, marks=pytest.mark.slow),
        pytest.param({"model.extra": {"attention_dropout": 0.3}, "accumulation": 2}, marks=pytest.mark.slow),
        pytest.param({"precision": "bf16"}, marks=pytest.mark.slow),
        {"model.family": "gpt2", "model.extra": {"resid_pdrop": 0.2}, "model.tie_word_embeddings": False},
        pytest.param(AGOQ | {"accumulation": 2}, marks=pytest.mark.slow),
        pytest.param({"gradients.bits": 12}, marks=pytest.mark.slow),
        pytest.param(AGOQ | {"checkpoint.zip": True}, marks=pytest.mark.ci),
        pytest.param({"activations.bits": 2, "accumulation": 2}, marks=pytest.mark.slow),
    ],
    ids=["nf4", "exact", "dropout", "bf16", "gpt2", "agoq", "12-bit-gradients", "zipped", "two-bits"],
)
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(changes: dict[str, Any], tmp_path: Path) -> None:
    whole = tiny_config(tmp_path, "whole", changes)
    broken = replace(whole, run_dir=str(tmp_path / "broken"))
    assert train_alone(whole) == 0
    assert train_alone(broken, stop_after=3) == 130
    assert latest_name(tmp_path / "broken") == "step-00000003"
    torch.manual_seed(1234)
    assert train_alone(resumed(broken)) == 0
    assert exact_metrics(broken.run_dir) == exact_metrics(whole.run_dir)


BETA2_LATER = {"optimizer.kind": "adamw8bit", "optimizer.beta2": 0.999, "steps": 8}


def with_beta2(config: TrainConfig, beta2: float) -> TrainConfig:
    return replace(config, optimizer=replace(config.optimizer, beta2=beta2))


@pytest.mark.ci
def test_a_resumed_run_with_another_beta2_has_the_steps_of_one_that_went_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tiny_config(tmp_path, "broken", BETA2_LATER)
    assert train_alone(broken, stop_after=4) == 130
    assert train_alone(resumed(with_beta2(broken, 0.95))) == 0
    saved = tmp_path / "broken" / "checkpoints" / "step-00000008" / save_load.BETAS_FILE
    assert [*json.loads(saved.read_text()).values()] == [0.9, 0.9, 0.95, 0.999]

    original = trainer.Trainer.step

    def step(self: Any, number: int, *args: Any) -> Any:
        for group in self.optimizer.param_groups if number == 4 else ():
            group["betas"] = (0.9, 0.95)
        return original(self, number, *args)

    monkeypatch.setattr(trainer.Trainer, "step", step)
    whole = tiny_config(tmp_path, "whole", BETA2_LATER)
    assert train_alone(whole) == 0
    assert exact_metrics(broken.run_dir) == exact_metrics(whole.run_dir)


def test_rows_after_the_last_checkpoint_are_not_written_twice(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "run", {"checkpoint.every": 2})
    assert train_alone(config) == 0
    expected = exact_metrics(config.run_dir)
    back = replace(resumed(config), checkpoint=replace(config.checkpoint, load=4))
    assert train_alone(back) == 0
    assert exact_metrics(config.run_dir) == expected


def test_a_finished_run_has_nothing_to_resume_but_can_go_further(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(tmp_path, "run")
    assert train_alone(config) == 0
    before = exact_metrics(config.run_dir)
    assert train_alone(resumed(config)) == 0
    assert "has done 6 of 6 steps" in capsys.readouterr().out
    assert exact_metrics(config.run_dir) == before
    summary_file = Path(str(config.run_dir)) / "summary.json"
    summary = json.loads(summary_file.read_text())
    assert summary["earlier_peak_memory_nbytes"] is None
    summary_file.write_text(json.dumps(summary | {"peak_memory_nbytes": 1 << 50}))  # another rank's
    assert train_alone(replace(resumed(config), steps=8)) == 0
    summary = json.loads(summary_file.read_text())
    assert summary["earlier_peak_memory_nbytes"] == 1 << 50
    out = capsys.readouterr().out
    assert "done: 8 of 8 steps, 2 of them since the run was resumed, in" in out
    assert re.search(r"peak memory +\S+ .?B per process in this start, 1125\S* TB in earlier ones", out)
    assert sorted(losses(config.run_dir)) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_chunked_loss_trains_alike_and_keeps_less(tmp_path: Path) -> None:
    exact = tiny_config(tmp_path, "exact", SMOOTH)
    chunked = tiny_config(tmp_path, "chunked", SMOOTH | {"activations.loss": "chunked"})
    train_alone(exact)
    train_alone(chunked)
    assert losses(chunked.run_dir) == pytest.approx(losses(exact.run_dir), abs=ROUNDING)
    kept = [read_metrics(Path(str(config.run_dir)))[0]["saved_nbytes"] for config in (exact, chunked)]
    # 4 x 32 tokens with 257 log-probabilities in fp32 each.
    assert kept[0] - kept[1] > 0.9 * 4 * 32 * 257 * 4


def test_the_loss_is_chunked_where_logits_are_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    for tile_numel in (1 << 20, 1 << 10):
        monkeypatch.setitem(TILES, "cpu", (32, tile_numel))
        config = tiny_config(tmp_path, f"run-{tile_numel}", {"activations.loss": "auto", "steps": 1})
        train_alone(config)
        kept.append(read_metrics(Path(str(config.run_dir)))[0]["saved_nbytes"])
    assert kept[0] > kept[1] + 100_000


def test_accumulation_equals_the_large_batch(tmp_path: Path) -> None:
    whole = tiny_config(tmp_path, "whole", SMOOTH)
    parts = tiny_config(tmp_path, "parts", SMOOTH | {"accumulation": 4})
    assert train_alone(whole) == 0
    assert train_alone(parts) == 0
    for step, loss in losses(whole.run_dir).items():
        assert losses(parts.run_dir)[step] == pytest.approx(loss, abs=ROUNDING)


def test_bf16_stays_close_to_fp32(tmp_path: Path) -> None:
    exact = tiny_config(tmp_path, "fp32", SMOOTH)
    rough = tiny_config(tmp_path, "bf16", SMOOTH | {"precision": "bf16"})
    assert train_alone(exact) == 0
    assert train_alone(rough) == 0
    assert exact_metrics(exact.run_dir) != exact_metrics(rough.run_dir)
    for step, loss in losses(exact.run_dir).items():
        # Logits of size about 1, each rounded to 8 bits: 2^-8 = 0.004, and the loss is 1-Lipschitz in them.
        assert losses(rough.run_dir)[step] == pytest.approx(loss, abs=2**-7)


def test_a_step_that_is_not_finite_is_skipped_and_counted(tmp_path: Path) -> None:
    clean = tiny_config(tmp_path, "clean")
    assert train_alone(clean) == 0
    config = tiny_config(tmp_path, "run")
    with spoilt({2, 4}):
        assert train_alone(config) == 0
    values = losses(config.run_dir)
    assert [step for step, loss in values.items() if math.isnan(loss)] == [3, 5]
    assert [values[step].hex() for step in (1, 2)] == [losses(clean.run_dir)[step].hex() for step in (1, 2)]
    assert [row["skipped_steps"] for row in read_metrics(tmp_path / "run") if "loss" in row] == [0, 0, 1, 1, 2, 2]
    assert latest_name(tmp_path / "run") == "step-00000006"


def test_the_run_stops_when_nothing_is_finite_any_more(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "run", {"steps": 20, "checkpoint.every": 1})
    five = r"not finite in 5 steps in a row, 3 to 7; .*--resume"
    with spoilt(set(range(2, 100))), pytest.raises(TrainingError, match=five):
        train_alone(config)
    assert latest_name(tmp_path / "run") == "step-00000006"
    assert len(losses(config.run_dir)) == 7


def test_a_short_run_with_nothing_finite_after_its_first_step_ends_with_an_error(tmp_path: Path) -> None:
    both = r"not finite in 2 steps in a row, 2 to 3; lower optimizer.learning_rate"
    with spoilt(set(range(1, 100))), pytest.raises(TrainingError, match=both):
        train_alone(tiny_config(tmp_path, "run", {"steps": 3}))


def interrupt_in(monkeypatch: pytest.MonkeyPatch, signals: dict[int, list[signal.Signals]]) -> None:
    """Send signals to this process while these steps (0-based) run."""
    original = trainer.Trainer.step

    def step(self: Any, number: int, *args: Any) -> Any:
        for one in signals.get(number, []):
            os.kill(os.getpid(), one)
        return original(self, number, *args)

    monkeypatch.setattr(trainer.Trainer, "step", step)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_step_saves_and_leaves(
    number: signal.Signals, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(number)
    interrupt_in(monkeypatch, {2: [number]})
    config = tiny_config(tmp_path, "run")
    assert train_alone(config) == code
    assert latest_name(tmp_path / "run") == "step-00000003"
    assert signal.getsignal(number) is before
    monkeypatch.undo()
    whole = tiny_config(tmp_path, "whole")
    assert train_alone(resumed(config)) == train_alone(whole) == 0
    assert exact_metrics(config.run_dir) == exact_metrics(whole.run_dir)


def test_a_second_interrupt_leaves_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_in(monkeypatch, {1: [signal.SIGTERM, signal.SIGINT]})
    with pytest.raises(KeyboardInterrupt):
        train_alone(tiny_config(tmp_path, "run"))
    assert latest_name(tmp_path / "run") is None


def test_vectors_are_not_decayed() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    model[0].bias.requires_grad_(False)
    optimizer = make_optimizer(model, OptimizerConfig(weight_decay=0.5))
    assert [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups] == [(1, 0.5), (2, 0.0)]
    model.up_proj_bias = torch.nn.Parameter(torch.zeros(4, 8))  # of four experts, as gpt-oss has them
    optimizer = make_optimizer(model, OptimizerConfig(weight_decay=0.5))
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 3]


def test_clipping_bounds_the_update(tmp_path: Path) -> None:
    # With a huge eps Adam's update is proportional to the gradient, so a hundredth of it moves the loss a hundredth.
    free = tiny_config(tmp_path, "free", SMOOTH | {"optimizer.clip_norm": 0.0, "optimizer.warmup_steps": 0})
    tight = replace(free, run_dir=str(tmp_path / "tight"), optimizer=replace(free.optimizer, clip_norm=1e-9))
    assert train_alone(free) == 0
    assert train_alone(tight) == 0
    free_rows, tight_rows = read_metrics(tmp_path / "free"), read_metrics(tmp_path / "tight")
    assert free_rows[0]["grad_norm"] == tight_rows[0]["grad_norm"] > 0.1
    assert losses(free.run_dir)[6] < losses(tight.run_dir)[6]


REFUSALS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"batch_size": 4, "accumulation": 3}, ConfigError, "batch_size is 4"),
    ({"data.paths": ("/nowhere/*.txt",)}, DataError, "/nowhere"),
    ({"sequence_length": 10**6}, DataError, "sequence_length is 1000000"),
    ({"model.family": "lama"}, ConfigError, "did you mean"),
    ({"activations.bits": 3}, ConfigError, "activations.bits is 3"),
]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSALS, ids=[message for _, _, message in REFUSALS])
def test_bad_input_leaves_no_run_directory(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        train_alone(tiny_config(tmp_path, "run", changes))
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_too_small_for_the_data_is_refused(tmp_path: Path) -> None:
    from laconic.train.config.schema import ModelConfig
    from laconic.train.model import build_model

    small = build_model(ModelConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1), 100, 64, seed=0)
    small.save_pretrained(tmp_path / "small")
    with pytest.raises(DataError, match=r"holds token id \d+, but the model's vocabulary ends at 99"):
        train_alone(tiny_config(tmp_path, "run", {"model.path": str(tmp_path / "small"), "data.tokenizer": "bytes"}))


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "letter.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds no run to continue: there is letter\.txt, but no config\.toml"):
        train_alone(tiny_config(tmp_path, "run"))
    with pytest.raises(ConfigError, match=r"must hold the config.toml of a run"):
        train_alone(resumed(tiny_config(tmp_path, "run")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "seed is 1, but the run that wrote .* had 0"),
        ({"batch_size": 8}, "batch_size is 8"),
        ({"sequence_length": 16}, "sequence_length is 16"),
        ({"model.hidden_size": 64}, "model.hidden_size is 64, but the run that wrote .* had 32"),
        ({"data.validation_fraction": 0.2}, "data is"),
    ],
)
def test_a_resumed_run_must_be_the_same_run(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert train_alone(tiny_config(tmp_path, "run"), stop_after=1) == 130
    with pytest.raises(ConfigError, match=message):
        train_alone(resumed(tiny_config(tmp_path, "run", changes)))


def test_a_directory_that_holds_another_model_by_now_is_refused(tmp_path: Path) -> None:
    from laconic.train.config.schema import ModelConfig
    from laconic.train.model import build_model

    made = build_model(ModelConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1), 257, 64, seed=0)
    made.save_pretrained(tmp_path / "m")
    config = tiny_config(tmp_path, "run", {"model.path": str(tmp_path / "m"), "data.tokenizer": "bytes"})
    assert train_alone(config, stop_after=1) == 130
    made.config.rms_norm_eps = 0.5
    made.config.save_pretrained(tmp_path / "m")
    message = (
        r"model\.path '.*/m': config\.json has rms_norm_eps = 0\.5 \(transformers [\d.]+\), but the run "
        r"that wrote .* had 1e-0\d \(transformers [\d.]+\); restore it, or export the model"
    )
    with pytest.raises(ConfigError, match=message):
        train_alone(resumed(config))


@pytest.mark.parametrize(
    ("here", "there", "found"),
    [
        ({"use_cache": True, "architectures": None, "b": 1}, {"use_cache": False, "architectures": ["A"], "c": 1}, []),
        ({"text_config": {"_name_or_path": "a"}}, {"text_config": {"_name_or_path": "b"}}, []),
        ({"bos": 1, "model_type": "a"}, {"bos": 2, "model_type": "b"}, ["model_type", "bos"]),
        ({"rope": None, "sub": {}}, {"rope": {"factor": 2}, "sub": {"a": 1}}, ["rope", "sub"]),
        ({"sub": {"a": 1, "b": 2}}, {"sub": {"a": 2, "c": 3}}, ["sub.a"]),
    ],
)
def test_fields_that_change_what_a_model_computes_are_compared(
    here: dict[str, Any], there: dict[str, Any], found: list[str]
) -> None:
    assert [name for name, _, _ in _differences(here, there)] == found


@pytest.mark.ci
def test_a_damaged_checkpoint_is_not_resumed_from_but_an_older_one_can_be(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "run", {"checkpoint.every": 2})
    assert train_alone(config) == 0
    expected = exact_metrics(config.run_dir)
    shard = tmp_path / "run" / "checkpoints" / "step-00000006" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"__0_0.distcp has .* --resume --checkpoint.load 4"):
        train_alone(resumed(config))
    assert exact_metrics(config.run_dir) == expected
    assert train_alone(replace(resumed(config), checkpoint=replace(config.checkpoint, load=4))) == 0
    assert exact_metrics(config.run_dir) == expected
    assert train_alone(resumed(config)) == 0


def test_no_validation_data_means_no_validation_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, changes in (("a", {"data.validation_fraction": 0.0}), ("b", {"eval_sequences": 0})):
        assert train_alone(tiny_config(tmp_path, name, changes)) == 0
        assert json.loads((tmp_path / name / "summary.json").read_text())["validation_loss"] is None
    assert "validation loss" not in capsys.readouterr().out


def test_a_model_that_nothing_is_recognized_in_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from laconic.activations.whole_model import apply

    monkeypatch.setattr(apply, "find_sites", lambda model: [])
    with pytest.raises(ModelError, match="no site recognized"):
        train_alone(tiny_config(tmp_path, "run"))


def test_missing_tensorboard_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else find_spec(name))
    with pytest.raises(ConfigError, match="TensorBoard is not installed"):
        train_alone(tiny_config(tmp_path, "run", {"tensorboard": True}))
    assert not (tmp_path / "run").exists()


def with_idle_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of the trainer get a parameter that forward does not use, and their first norm is frozen."""
    build = model_module.build_model

    def build_idle(*arguments: Any) -> Any:
        model = build(*arguments)
        model.register_parameter("idle", torch.nn.Parameter(torch.ones(3, 5)))
        model.model.layers[0].input_layernorm.weight.requires_grad_(False)
        return model

    monkeypatch.setattr(model_module, "build_model", build_idle)


@pytest.mark.parametrize("changes", [pytest.param({}, marks=pytest.mark.slow), AGOQ], ids=["exact", "agoq"])
def test_parameters_without_gradient_stay_as_they_are(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_idle_parameters(monkeypatch)
    whole = tiny_config(tmp_path, "whole", changes)
    model = trained_model(whole)
    assert bool((model.idle == 1).all())
    norms = [layer.input_layernorm.weight for layer in model.model.layers]
    assert bool((norms[0] == 1).all())
    assert not bool((norms[1] == 1).all())
    parts = tiny_config(tmp_path, "parts", changes | {"checkpoint.every": 3})
    train_alone(parts, stop_after=3)
    assert train_alone(resumed(parts)) == 0
    assert exact_metrics(parts.run_dir) == exact_metrics(whole.run_dir)


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of Dynamo
def test_compiled_layers_train_bit_for_bit_and_from_the_third_step_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []

    def compile_exactly(self: torch.nn.Module) -> None:  # by a backend that keeps the bits, unlike inductor
        compiled.append(self)
        original(self, backend=backend)

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        steps.append(len(read_metrics(tmp_path / "compiled")))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    original, steps = torch.nn.Module.compile, []
    monkeypatch.setattr(torch.nn.Module, "compile", compile_exactly)
    monkeypatch.setattr(torch._dynamo.config, "optimize_ddp", True)
    torch._dynamo.reset()
    short = {"model.num_hidden_layers": 1, "steps": 4, "eval_every": 0, "eval_sequences": 0}
    config = tiny_config(tmp_path, "eager", short)
    assert train_alone(config) == 0
    assert train_alone(replace(config, compile=True, run_dir=str(tmp_path / "compiled"))) == 0
    torch._dynamo.reset()
    assert [type(layer).__name__ for layer in compiled] == ["LlamaDecoderLayer"]
    assert min(steps) == 2  # two steps are counted by a dispatch mode, below which nothing compiles
    assert losses(tmp_path / "compiled") == losses(tmp_path / "eager")
