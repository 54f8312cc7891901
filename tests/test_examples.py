"""Every example runs as its docstring says, and prints what it promises."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.distributed.processes import ROOT, environment, free_port
from tests.patience import patient
from tests.scripts import load_script

EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py")) if path.stem != "common"}
SAYS = {
    "fsdp2_slow_link": r"(no slow link here|100 Mbit/s)[\s\S]*all_gather +float32",
    "moe_two_nodes": r"rows left for the other node",
    "moe_two_ranks": r"8 experts \(4 here\)",
    "own_codec": r"error of the sum: 0\.\d+%",
    "own_loop": r"step 40: loss [0-3]\.",
    "own_policy": r"largest error of a gradient: \d+\.\d%",
    "serve_moe": r"^'.*'$",
    "trainer_lora": r"laconic/activation_factor",
    "vision": r"MB kept for backward instead of [\s\S]*step 8: loss 0\.",
}
_QUICK = ("own_codec",)


def test_every_example_is_tried_and_named_in_the_documentation() -> None:
    assert EXAMPLES.keys() == SAYS.keys()
    page = (ROOT / "docs" / "examples.md").read_text()
    rows = dict(re.findall(r"^\| .*?\(\.\./examples/(\w+)\.py\) \|.*?(\| \w+ \|[^|]*)\|$", page, re.MULTILINE))
    assert rows.keys() == EXAMPLES.keys()
    for name, path in EXAMPLES.items():
        said = path.read_text()
        assert re.search(r"\d+ seconds\.$", said.partition("\n")[0]), name
        (install,) = re.findall(r"^    pip install (.*)$", said, re.MULTILINE)
        (start,) = re.findall(r"^    (python|torchrun) .*$", said, re.MULTILINE)
        more = install.removeprefix("'laconic[train]'").replace("'", "").strip()
        assert rows[name].replace(" ", "") == f"|{start}|{more}".replace(" ", ""), name


def test_one_process_where_two_are_needed_is_told_how_they_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    common = load_script(ROOT / "examples" / "common.py")
    with pytest.raises(SystemExit, match=r"torchrun --nproc-per-node 2 examples/own_codec\.py"):
        common.need_torchrun("examples/own_codec.py")
    monkeypatch.setenv("RANK", "0")
    common.need_torchrun("examples/own_codec.py")


@pytest.mark.parametrize(
    "name", [name if name in _QUICK else pytest.param(name, marks=pytest.mark.slow) for name in EXAMPLES]
)
@pytest.mark.ci
def test_an_example_runs_and_prints_what_it_promises(name: str) -> None:
    (line,) = re.findall(r"^    ((?:python|torchrun) .*)$", EXAMPLES[name].read_text(), re.MULTILINE)
    launcher, *arguments = line.split()
    command = [sys.executable, *arguments]
    if launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--master-port", str(free_port()), *arguments]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(PYTHONWARNINGS="ignore"),
        capture_output=True,
        text=True,
        timeout=patient(280),
    )
    assert done.returncode == 0, done.stderr
    assert re.search(SAYS[name], done.stdout, re.MULTILINE), done.stdout
