"""A stranger's first hour: Getting started as the page says it, Trainer, `laconic run`, advise, goodbye.

Last an editable install, from a folder that is then moved.

    python tools/stranger.py                 # installs from a copy of this checkout, as docs/getting_started.md says
    python tools/stranger.py dist/x.whl      # as the page says it of a wheel
    python tools/stranger.py --examples      # only the examples and notebooks, with what their page names: ten minutes
    python tools/stranger.py --examples 1/3  # a third of these

Everything happens in a temporary folder, so that nothing of the checkout is imported. Ends with an error at the first
thing that does not work. Start-up times are printed beside what they should be, the best of several; only one that
is five times as long ends the hour, since machines of CI are busy. Needs a package index.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

shape = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    ids = torch.randint(0, 256, (4, 64))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


ADVISED = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

shape = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
LlamaForCausalLM(LlamaConfig(vocab_size=257, **shape)).save_pretrained("small")
"""
TRAINER = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from laconic.integrations.huggingface import LaconicConfig, LaconicTrainer

shape = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape))
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 256, (16, 64))]
arguments = TrainingArguments("out", max_steps=3, per_device_train_batch_size=4, report_to=[], save_strategy="no")
config = LaconicConfig(activations=4, gradients=8, optimizer="adamw8bit")
print("trained", LaconicTrainer(model, arguments, train_dataset=rows, laconic=config).train().global_step, "steps")
"""
_FAR_OFF = 5.0
"""Times the limit from which a start-up time is an error."""


def outside() -> dict[str, str]:
    """The environment without this one's Python."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}


def run(*command: str | Path, cwd: Path, says: str = "", code: int = 0) -> str:
    """Standard output and error of a command that has to end with an exit code and to say something."""
    began = time.monotonic()
    done = subprocess.run([*map(str, command)], cwd=cwd, env=outside(), capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    shown = " ".join(Path(part).name if "/" in str(part) else str(part) for part in map(str, command))
    print(f"{time.monotonic() - began:6.1f} s  {shown[:100].splitlines()[0]}", flush=True)
    if done.returncode != code or says not in text:
        print(text, file=sys.stderr)
        raise SystemExit(f"{shown} ended with {done.returncode}" + (f" and without {says!r}" if says else ""))
    return text


def starts_within(limit_seconds: float, what: str, *command: str | Path, cwd: Path, tries: int = 5) -> None:
    """Print the shortest of several times of a command beside its limit; an error if it is far off."""
    seconds = []
    for _ in range(tries):
        began = time.monotonic()
        subprocess.run([*map(str, command)], cwd=cwd, env=outside(), capture_output=True, check=True)
        seconds.append(time.monotonic() - began)
    report_start(min(seconds), limit_seconds, what)


def report_start(seconds: float, limit_seconds: float, what: str) -> None:
    """Print a time beside its limit; an error if it is far off."""
    print(f"{seconds:6.2f} s  {what} (limit {limit_seconds} s)", flush=True)
    if seconds > _FAR_OFF * limit_seconds:
        raise SystemExit(f"{what} took {seconds:.2f} s, more than {_FAR_OFF:.0f} times {limit_seconds} s")


def first_step_seconds(laconic: Path, cwd: Path) -> float:
    """From the start of `laconic train` to its first step, as metrics.jsonl appears."""
    flags = ["--steps", "2", "--log-every", "1", "--eval-every", "0", "--nproc", "1", "--run-dir", "first"]
    with open(cwd / "train.log", "w", encoding="utf-8") as log:
        began = time.monotonic()
        process = subprocess.Popen([str(laconic), "train", *flags], cwd=cwd, env=outside(), stdout=log, stderr=log)
        metrics, seconds = cwd / "first" / "metrics.jsonl", None
        while process.poll() is None:
            if seconds is None and metrics.exists() and '"loss"' in metrics.read_text():
                seconds = time.monotonic() - began
            time.sleep(0.02)
    if process.returncode != 0 or seconds is None:
        raise SystemExit(f"laconic train ended with {process.returncode}:\n{(cwd / 'train.log').read_text()}")
    return seconds


def blocks(page: Path) -> str:
    """The Python of a page, as one program."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE))


def installed(folder: Path, wheel: Path | None) -> Path:
    """Do what Getting started says in a copy of this checkout, or with a wheel; returns the environment's programs."""
    checkout = folder / "a clone" / "laconic"
    made = shutil.ignore_patterns(".git", ".venv", "build", "dist", "runs", "__pycache__", ".*_cache", ".hypothesis")
    shutil.copytree(ROOT, checkout, ignore=made)
    page = (ROOT / "docs" / "getting_started.md").read_text(encoding="utf-8")
    (block,) = (
        text for text in re.findall(r"^```\n(.*?)^```", page, re.DOTALL | re.MULTILINE) if "pip install" in text
    )
    clone, *lines = block.splitlines()
    assert clone.startswith("git clone"), f"the page begins with {clone}; the copy stands for a clone"
    if wheel is not None:
        (line,) = re.findall(r"`(pip install \"WHEEL\[\w+\]\")`", page)
        lines = [line.replace("WHEEL", str(wheel.resolve())) if "pip install" in one else one for one in lines]
    run("bash", "-euc", "\n".join(lines), cwd=checkout, says="Everything laconic needs works here.")
    return checkout / ".venv" / "bin"


def examples(folder: Path, bin: Path, share: str) -> None:
    """Run the K-th of N shares of the examples as their first lines say, and a command for torchrun with python.

    The notebooks count as one, the last.
    """
    checkout = bin.parents[1]
    before = {path: path.read_bytes() for path in checkout.glob("examples/**/*.*")}
    activated = f"PATH={bin}:{os.environ['PATH']}"
    constrained = f"PIP_CONSTRAINT={(ROOT / 'constraints.txt').resolve().as_uri()}"
    k, n = map(int, share.split("/"))
    notebooks = checkout / "examples" / "notebooks"
    scripts = [path for path in sorted(checkout.glob("examples/*.py")) if path.stem != "common"]
    for path in [*scripts, notebooks][k - 1 :: n]:
        if path == notebooks:
            page = (ROOT / "docs/examples.md").read_text()
            (install,) = re.findall(r"`(pip install .*?)`, then `python tools/notebooks.py`", page)
            start = "python tools/notebooks.py"
        else:
            install, start = (
                re.findall(rf"^    ({words} .*)$", path.read_text(encoding="utf-8"), re.MULTILINE)[0]
                for words in ("pip install", "(?:python|torchrun)")
            )
        run("env", activated, constrained, "bash", "-euc", install, cwd=checkout)
        run("env", activated, "bash", "-euc", start, cwd=checkout)
        if start.startswith("torchrun"):
            run(bin / "python", path, cwd=folder, code=1, says="start them with: torchrun")
    changed = [path for path, content in before.items() if path.read_bytes() != content]
    assert not changed, f"running them changed {changed}"


def moved_checkout(folder: Path, bin: Path, pip: tuple[str | Path, ...]) -> None:
    """An editable install whose folder is moved, and then removed by pip: torch goes on each time."""
    here, there = folder / "a sp\u00e1ce" / "laconic", folder / "elsewhere"
    for name in ("pyproject.toml", "README.md", "LICENSE", "src"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, _with_parent(here / name))
    run("env", "LACONIC_PURE=1", *pip, "install", "--no-deps", "-e", here, cwd=folder)
    registered = "import torch.distributed as d; print('LACONIC' in d.Backend._plugins)"
    run(bin / "python", "-c", registered, cwd=folder, says="True")
    here.rename(there)
    run(bin / "python", "-c", registered, cwd=folder, says="laconic is installed, but cannot be imported")
    run(*pip, "uninstall", "--yes", "laconic", cwd=folder)
    run(bin / "python", "-W", "error", "-c", registered, cwd=folder, says="False")


def _with_parent(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def main(argument: str | None = None, share: str = "1/1") -> None:
    """Do all of it, or what `argument` names."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = None if argument in (None, "--examples") else Path(argument)
        bin = installed(folder, wheel)
        if argument == "--examples":
            examples(folder, bin, share)
            return
        pip = (bin / "python", "-m", "pip", "--disable-pip-version-check")
        run(bin / "laconic", "--version", cwd=folder, says="laconic ")
        run(*pip, "install", "-c", ROOT / "constraints.txt", "laconic[plan]", cwd=folder)  # as messages say it
        (folder / "started.py").write_text(blocks(ROOT / "docs" / "getting_started.md"))
        run(bin / "python", "started.py", cwd=folder, says="Adam's moments")
        (folder / "train.py").write_text(SCRIPT)
        run(bin / "laconic", "run", "--optimizer", "adamw8bit", "train.py", cwd=folder, says="3 of AdamW8bit")
        (folder / "trainer.py").write_text(TRAINER)
        run(*pip, "install", "-c", ROOT / "constraints.txt", "accelerate", cwd=folder)
        run(bin / "python", "trainer.py", cwd=folder, says="trained 3 steps")
        (folder / "small.py").write_text(ADVISED)
        run(bin / "python", "small.py", cwd=folder)
        run(bin / "laconic", "advise", "small", cwd=folder, says="exact")
        run(bin / "laconic", "--no-such", cwd=folder, code=2, says="unknown command")
        run(bin / "laconic", "train", "--steps", "0", cwd=folder, code=2, says="steps is 0")
        run(bin / "laconic", "plan", "small", "--memory", "1kB", cwd=folder, code=2, says="the budget is")
        run(bin / "laconic", "run", "missing.py", cwd=folder, code=2, says="missing.py")
        starts_within(0.1, "laconic --help", bin / "laconic", "--help", cwd=folder)
        starts_within(0.1, "import laconic", bin / "python", "-c", "import laconic", cwd=folder)
        report_start(first_step_seconds(bin / "laconic", folder), 10.0, "laconic train to its first step")
        run(*pip, "uninstall", "--yes", "laconic", cwd=folder)
        run(bin / "python", "train.py", cwd=folder)  # torch does not miss the backend that was registered with it
        gone = "import importlib.util as u; assert not any(map(u.find_spec, ('laconic', '_laconic_backends')))"
        run(bin / "python", "-c", gone, cwd=folder)
        moved_checkout(folder, bin, pip)


if __name__ == "__main__":
    main(*sys.argv[1:])
