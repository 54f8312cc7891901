"""A stranger's first hour: the wheel in a fresh environment, Getting started, a script run with `laconic run`, goodbye.

    python tools/stranger.py                 # builds sdist and wheel from this checkout first
    python tools/stranger.py dist/x.whl      # takes a wheel that is there

Everything happens in a temporary folder, so that nothing of the checkout is imported. Ends with an error at the first
thing that does not work. Needs a package index.
"""

from __future__ import annotations

import os
import re
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


def run(*command: str | Path, cwd: Path, says: str = "") -> str:
    """Standard output and error of a command that has to succeed and to say something."""
    began = time.monotonic()
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=outside, capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    shown = " ".join(Path(part).name if "/" in str(part) else str(part) for part in map(str, command))
    print(f"{time.monotonic() - began:6.1f} s  {shown[:100].splitlines()[0]}", flush=True)
    if done.returncode != 0 or says not in text:
        print(text, file=sys.stderr)
        raise SystemExit(f"{shown} ended with {done.returncode}" + (f" and without {says!r}" if says else ""))
    return text


def blocks(page: Path) -> str:
    """The Python of a page, as one program."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE))


def main(wheel: Path | None) -> None:
    """Do all of it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if wheel is None:
            run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder / "dist", ROOT, cwd=ROOT)
            (wheel,) = (folder / "dist").glob("*.whl")
        run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
        bin = folder / "venv" / "bin"
        pip = (bin / "python", "-m", "pip", "--disable-pip-version-check")
        run(*pip, "install", "-c", ROOT / "constraints.txt", f"laconic[train] @ {wheel.resolve().as_uri()}", cwd=folder)
        run(bin / "laconic", "--version", cwd=folder, says="laconic ")
        run(bin / "laconic", "doctor", cwd=folder, says="Everything laconic needs works here.")
        (folder / "started.py").write_text(blocks(ROOT / "docs" / "getting_started.md"))
        run(bin / "python", "started.py", cwd=folder, says="Adam's moments")
        (folder / "train.py").write_text(SCRIPT)
        run(bin / "laconic", "run", "--optimizer", "adamw8bit", "train.py", cwd=folder, says="3 of AdamW8bit")
        run(*pip, "uninstall", "--yes", "laconic", cwd=folder)
        run(bin / "python", "train.py", cwd=folder)  # torch does not miss the backend that was registered with it
        gone = "import importlib.util as u; assert u.find_spec('laconic') is None"
        run(bin / "python", "-c", gone, cwd=folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
