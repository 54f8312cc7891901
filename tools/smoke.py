"""The wheels of `make wheels` on every version of Python: installed from disk, imported, one step, Trainer, doctor.

    python tools/smoke.py                                        # dist/ on 3.11, 3.12 and 3.13, then from the sdist
    python tools/smoke.py --dist dist --pythons 3.13 --no-sdist

Each version gets an environment of its own in a temporary folder; an interpreter that this machine lacks is skipped
with a word. The step has to run in the wheel's own C++ kernels, not in the fallback, and from 3.12 on in those of the
stable ABI. Needs a package index; where that one has no CPU build of torch, name another by PIP_EXTRA_INDEX_URL.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from interpreters import find_interpreter
from stranger import ROOT, TRAINER, run

STEP = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import laconic
import laconic._kernels as kernels
from laconic.ops import kernels_in_use

stable = sys.version_info >= (3, 12)
assert kernels.__file__.endswith(".abi3.so") == stable, kernels.__file__
isa = kernels_in_use()["cpu"]["isa"]
assert isa is not None, "the fallback is in use"
shape = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape))
ids = torch.randint(0, 256, (4, 64))
exact = model(input_ids=ids, labels=ids).loss
report = laconic.compress_activations(model, bits=4)
optimizer = laconic.AdamW8bit(model.parameters(), lr=1e-3)
losses = []
for step in range(5):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[0] == exact.item(), (losses[0], exact.item())
assert losses[-1] < losses[0], losses
print(f"stepped on Python {sys.version.split()[0]}, torch {torch.__version__}, {isa}")
"""


def wheel_for(dist: Path, version: str) -> Path:
    """The wheel in a folder that a version of Python installs."""
    tag = "cp311-cp311" if version == "3.11" else "cp312-abi3"
    found = sorted(dist.glob(f"laconic-*-{tag}-*.whl"))
    if len(found) != 1:
        raise SystemExit(f"{dist} has {len(found)} wheels for Python {version}, but it must have one; run make wheels")
    return found[0]


def smoke(archive: Path, version: str, interpreter: Path) -> None:
    """Install a wheel or an sdist into a fresh environment and use it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(interpreter, "-m", "venv", "venv", cwd=folder)
        bin = folder / "venv" / "bin"
        # torch's build with CUDA names its own version of triton.
        pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("triton==")]
        (folder / "constraints.txt").write_text("\n".join(pins) + "\n")
        pip = (bin / "python", "-m", "pip", "--disable-pip-version-check", "install", "-c", folder / "constraints.txt")
        run(*pip, f"laconic[hf] @ {archive.resolve().as_uri()}", "accelerate", cwd=folder)
        run(bin / "laconic", "--version", cwd=folder, says="laconic ")
        run(bin / "laconic", "doctor", cwd=folder, says="Everything laconic needs works here.")
        (folder / "step.py").write_text(STEP)
        print(run(bin / "python", "step.py", cwd=folder, says=f"stepped on Python {version}").splitlines()[-1])
        (folder / "trainer.py").write_text(TRAINER)
        run(bin / "python", "trainer.py", cwd=folder, says="trained 3 steps")


def main() -> None:
    """Do all of it for every version that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder with the wheels and the sdist")
    parser.add_argument("--pythons", nargs="+", default=["3.11", "3.12", "3.13"], help="versions to install for")
    parser.add_argument("--no-sdist", action="store_true", help="leave the compilation of the sdist out")
    options = parser.parse_args()
    found = {version: find_interpreter(version) for version in options.pythons}
    there = {version: interpreter for version, interpreter in found.items() if interpreter is not None}
    for version in found.keys() - there.keys():
        print(f"skipped: Python {version} is not on the PATH and not in pyenv's folder")
    if not there:
        sys.exit("no interpreter was found, so nothing was tried")
    for version, interpreter in there.items():
        smoke(wheel_for(options.dist, version), version, interpreter)
    if not options.no_sdist:
        (sdist,) = options.dist.glob("laconic-*.tar.gz")
        version, interpreter = next(iter(there.items()))
        smoke(sdist, version, interpreter)


if __name__ == "__main__":
    main()
