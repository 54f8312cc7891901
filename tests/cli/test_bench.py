"""`laconic bench infer`: a run from nothing, and what is refused before any work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from laconic.cli.main import main
from tests.infer.models import make

pytestmark = pytest.mark.usefixtures("forked_workers")

TINY = ["--requests", "3", "--max-new-tokens", "3", "--max-prompt-tokens", "8", "--rounds", "1", "--rates", "50"]


@pytest.mark.ci
def test_a_run_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "infer", "--plans", "unsplit", *TINY, "--output", str(tmp_path / "new")]) == 0
    out = capsys.readouterr().out
    assert "\na random Qwen2-MoE of 4 layers" in "\n" + out  # DeepSpeed, where it is installed, prints a line first
    assert "3 requests, " in out
    assert "9 new tokens" in out
    values = json.loads((tmp_path / "new" / "bench_infer.json").read_text())
    (plan,) = values["plans"]
    assert (plan["name"], plan["same_answers"], values["flags"]["requests"]) == ("unsplit", 3, 3)
    assert plan["tokens_per_second"][0] > 0
    assert (tmp_path / "new" / "bench_infer.png").stat().st_size > 1000


@pytest.mark.slow
def test_all_plans_answer_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make("qwen2_moe", tmp_path, vocab_size=257)
    text = tmp_path / "prompts.txt"
    text.write_text("One.\n\nTwo words.\n\nThree more words.")
    few = ["--micro-batches", "2", "--slices", "1"]
    assert main(["bench", "infer", "--model", str(model), "--prompts", str(text), *few, *TINY]) == 0
    assert capsys.readouterr().out.count("3 of 3") == 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--plans", "unsplit,fast"], "--plans names 'fast', but plans are unsplit, naive, pppipe, findep"),
        (["--plans", ""], "--plans is empty"),
        (["--rounds", "0"], "--rounds is 0, but it must be at least 1"),
        (["--experts", "0"], "--experts is 0, but it must be at least 1"),
        (["--rates", "1,-2"], "--rates is '1,-2', but it must be numbers above 0 between commas"),
        (["--rates", "nan"], "--rates is 'nan'"),
        (["--rates", "inf"], "--rates is 'inf'"),
        (["--slices", "1.5"], "--slices is '1.5', but it must be whole numbers of at least 1"),
        (["--micro-batches", "0"], "--micro-batches is '0'"),
        (["--cache-tokens", "200"], "leaves 100 to each of 2 micro-batches; give more"),
        (["--plans", "unsplit", "--cache-tokens", "100"], "leaves 100 to each of 1 micro-batches"),
        (["--output", __file__], "cannot use "),
        (["--model", "/nowhere"], "'/nowhere' holds no config.json"),
        (["--prompts", "/nowhere/prompts.txt"], "cannot use /nowhere/prompts.txt"),
    ],
)
def test_mistakes_are_named(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "infer", *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_dense_model_cannot_be_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make("llama", tmp_path)
    assert main(["bench", "infer", "--model", str(model)]) == 2
    assert "a llama model without experts, which cannot be split; give --plans unsplit" in capsys.readouterr().err


def test_other_benches_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "train"]) == 2
    assert "laconic bench train is no command, it must be: laconic bench infer" in capsys.readouterr().err
    assert main(["bench"]) == 0
    assert "usage: laconic bench infer" in capsys.readouterr().out
