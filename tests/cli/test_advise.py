"""`laconic advise`: targets, flags and outputs."""

import json
import textwrap
from pathlib import Path

import pytest

from laconic.cli.main import main
from tests.activations.models import make_model
from tests.cli.test_json import document

FUNCTION = """
    import torch
    from torch import nn
    def build():
        return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()), torch.randn(8, 64)
    def with_loss():
        model, x = build()
        return model, {"input": x}, lambda y: y.abs().sum()
    def wrong():
        return build()[0]
    number = 3
"""


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "my_model.py"
    path.write_text(textwrap.dedent(FUNCTION))
    return path


@pytest.mark.ci
def test_a_function_of_a_file(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", f"{target}:with_loss", "--rounds", "1", "--plot", str(target.with_suffix(".svg"))]) == 0
    out = capsys.readouterr().out
    assert "loss: the given function" in out
    assert "wrote" in out
    assert target.with_suffix(".svg").stat().st_size > 1000


@pytest.mark.ci
def test_a_directory_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model("llama").config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    flags = ["--rounds", "1", "--batch-size", "1", "--sequence-length", "32", "--precision", "bf16-pure"]
    found = document("advise", [str(tmp_path), *flags], capsys)
    assert {row["name"] for row in found["rows"]} >= {"exact", "4 bits", "chunked loss"}
    assert found["loss"] == "output.loss"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["{}:missing"], "has no function 'missing'"),
        (["{}:number"], "has no function 'number'"),
        (["{}:wrong"], "must return (model, batch)"),
        (["{}.py:build"], "there is no file"),
        (["{}"], "a file; name its function"),
        (["nowhere"], "must be a directory with a config.json"),
        (["{}:build", "--batch-size", "2"], "--batch-size is given beside"),
        (["{}:build", "--precision", "bf16-pure"], "convert it there"),
        (["{}:build", "--rounds", "0"], "--rounds is 0"),
        (["{}:build", "--plot", "missing/advice.png"], "its directory does not exist"),
        (["{}:build", "--plot", "advice.nonsense"], "must end in one of"),
    ],
)
def test_wrong_flags_are_named(target: Path, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", *(flag.format(target) for flag in flags)]) == 2
    assert said in capsys.readouterr().err
