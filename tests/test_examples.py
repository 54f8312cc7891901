"""Every example runs as its docstring says, and prints what it promises."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.distributed.processes import ROOT, environment, free_port
from tests.patience import patient

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
    assert all(f"examples/{name}.py" in page for name in EXAMPLES)


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
