"""`--json` of every command: one strict JSON document with the keys that docs/cli.md promises, and nothing else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import laconic
from laconic.cli.main import COMMANDS, main
from laconic.cli.output import json_only, json_text
from laconic.train.config.toml import save_config
from tests.collectives.simulated import made_up_rates
from tests.cost.infer_models import RATES
from tests.infer.models import make
from tests.patience import patient
from tests.train.report_runs import make_run
from tests.train.runs import tiny_config

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


def documented(command: str) -> list[str]:
    """Keys of the first document that the page names for `command`."""
    row = re.search(rf"^\| `{command}` \| (.*) \|$", DOCS.read_text(), re.MULTILINE)
    assert row, command
    first = re.split(r", each with|; with| and the rest", row[1])[0]
    return re.findall(r"`([a-z_]+)`", first)


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def document(command: str, args: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    assert main([command, *args, "--json"]) == code
    out = capsys.readouterr().out
    found: dict[str, Any] = strict(out)
    assert set(documented(command)) <= set(found), sorted(found)
    return found


def test_the_page_has_every_command_that_prints_results() -> None:
    without = {"run", "serve", "completion"}
    assert all(documented(command) for command in COMMANDS if command not in without)


@pytest.mark.ci
def test_plan(traced_once: None, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden-size": 256, "intermediate-size": 512, "num-layers": 2, "num-heads": 4, "vocab-size": 512}
    flags = [part for name, size in sizes.items() for part in (f"--{name}", str(size))]
    document("plan", flags, capsys)
    uniform = [*flags, "--policy", "uniform4"]
    document("plan", [*uniform, "--memory", "1MB"], capsys, code=1)  # does not fit: the same document
    assert main(["plan", *flags, "--precision", "fp7", "--json"]) == 2
    assert capsys.readouterr().out == ""


def test_explain_and_infer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_up_rates().save(tmp_path / "rates.json")
    record = ["--record", str(tmp_path / "rates.json")]
    found = document("explain", [*record, "--operation", "all_gather", "--nbytes", "4MB"], capsys)
    (message,) = found["messages"]
    assert message["choice"]["predicted_seconds"] == message["candidates"][0]["seconds"]
    assert len(document("explain", record, capsys)["messages"]) == 3 * 10
    assert main(["explain", *record, "--rates", "--json"]) == 0
    assert strict(capsys.readouterr().out)["rates"] == strict(json_text(made_up_rates().to_dict()))
    RATES.save(tmp_path / "infer.json")
    model = ["plan", "qwen3-235b-a22b", "--workers", "16", "--memory", "80GB", "--requests", "64", "--output", "64"]
    found = document("infer", [*model, "--rates", str(tmp_path / "infer.json")], capsys)
    assert set(found["decode"]) == {"best", "busy", "candidates", "split", "memory"}


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document("compare", [str(make_run(tmp_path, "run")), "--out", str(tmp_path / "report.html")], capsys)


def test_zip_verify_unzip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, zipped = tmp_path / "model.safetensors", tmp_path / "model.safetensors.laconic"
    save_file({"a": torch.randn(64, 64), "b": torch.arange(3)}, file)
    size = file.stat().st_size
    for command, path, named in (("zip", file, zipped), ("verify", zipped, zipped), ("unzip", zipped, file)):
        if command == "unzip":
            file.unlink()
        found = document(command, [str(path)], capsys)
        assert found.pop("seconds") > 0
        sizes = {"original_nbytes": size, "zipped_nbytes": zipped.stat().st_size, "num_tensors": 2}
        assert found.items() >= {"path": str(named), **sizes}.items()


def test_train_and_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_config(tiny_config(tmp_path, "run"), tmp_path / "run.toml")
    found = document("train", ["--config", str(tmp_path / "run.toml")], capsys)
    assert (found["run_dir"], found["steps"]) == (str(tmp_path / "run"), 6)
    assert found["loss"] == json.loads((tmp_path / "run" / "summary.json").read_text())["loss"]
    assert document("export", [str(tmp_path / "run"), str(tmp_path / "model")], capsys) == {
        "path": str(tmp_path / "model")
    }
    assert main(["train", "--config", str(tmp_path / "run.toml"), "--json"]) == 2  # the directory is not empty
    assert capsys.readouterr().out == ""


def test_train_under_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "--json"]) == 2
    assert "--json is given under torchrun" in capsys.readouterr().err


def test_doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("laconic.cli.diagnosis._test_kernels", lambda: {"reference": "ok"})
    found = document("doctor", [], capsys)
    assert found["versions"]["laconic"] == laconic.__version__
    assert found["kernels"]["cpu"]["implementation"] in ("c++", "reference")
    assert set(found["self_test"].values()) == {"ok"}
    assert found["problems"] == []
    assert all(set(one) == {"finding", "remedy"} for one in found["faster"])
    assert found["links"][-1]["name"] == "loopback"


@pytest.mark.slow
def test_generate_and_bench(tmp_path: Path, forked_workers: None, capsys: pytest.CaptureFixture[str]) -> None:
    path = make("mixtral", tmp_path, vocab_size=257)
    capsys.readouterr()  # making it imports DeepSpeed where that is installed, which prints
    found = document("generate", ["--model", str(path), "--prompt", "one", "--max-new-tokens", "2"], capsys)
    assert [set(one) for one in found["generations"]] == [{"prompt", "text", "tokens"}]
    few = ["--requests", "2", "--max-new-tokens", "2", "--max-prompt-tokens", "4", "--rounds", "1", "--rates", "50"]
    document("bench", ["infer", "--plans", "unsplit", *few], capsys)


@pytest.mark.slow
def test_profile(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "laconic", "profile", "--quick", "--out", str(tmp_path / "rates.json"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(280))
    assert done.returncode == 0, done.stderr
    assert set(documented("profile")) == set(strict(done.stdout))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version", "--json"]) == 0
    assert strict(capsys.readouterr().out) == {"version": laconic.__version__}


def test_what_libraries_and_child_processes_print_does_not_reach_stdout() -> None:
    code = (
        "import os, subprocess, sys\nfrom laconic.cli.output import json_only\n"
        "with json_only() as emit:\n    print('noise')\n    os.write(1, b'raw noise\\n')\n"
        "    subprocess.run(['echo', 'noise of a child'])\n    emit({'loss': float('nan'), 'path': None})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=patient(60))
    assert strict(done.stdout) == {"loss": "NaN", "path": None}
    assert {"noise", "raw noise", "noise of a child"} == set(done.stderr.splitlines())


def test_nothing_is_printed_when_the_work_fails(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with json_only() as emit:
            emit({"half": 1})
            raise ValueError

    with pytest.raises(ValueError):
        fail()
    assert capsys.readouterr().out == ""


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_every_value_is_strict_json(value: Any) -> None:
    strict(json_text({"value": value, "path": Path("a") / "b"}))
    assert strict(json_text(Path("a"))) == os.fspath(Path("a"))
