"""Writes one small file of every kind that laconic writes, to be read by all later releases.

    python -m tests.compatibility.write tests/compatibility/0.1.0

Run it once for a release, and again only when a kind of file is added: what older releases wrote stays as it is. The
folder also holds expected.json: what a reader must find in the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

from laconic.activations.recognize.plan import ActivationPlan
from laconic.cost import Plan
from laconic.cost.planner.policy import agoq
from laconic.formats.archive import zip_path
from laconic.formats.blockwise import BlockFormat
from laconic.moe.huggingface import save_sharded
from laconic.optim import AdamW8bit
from laconic.schedule.pipelines import one_f_one_b
from laconic.schedule.streams import StreamPlan, Task
from laconic.train.config.toml import load_config
from laconic.train.run import run
from laconic.train.signals import StopRequest
from tests.collectives.simulated import made_up_rates
from tests.cost.infer_models import RATES as INFERENCE_RATES
from tests.cost.moe.test_rates import rates as moe_rates
from tests.cost.test_choose import LARGE
from tests.train.runs import ALONE, losses, write_corpus

__all__ = ["LINEAR", "RUNS", "SHARDED", "STREAMS", "digest", "run_settings", "sharded_model", "sharded_step"]

LINEAR = ActivationPlan(
    {"layers.0.norm": BlockFormat("nf4", 64, torch.bfloat16), "layers.0.mlp": None}, {"layers.0": BlockFormat("int8")}
)
STREAMS = StreamPlan((Task("a", "compute", 1.0), Task("b", "wire", 0.5, ("a",)), Task("c", "compute", 0.25, ("b",))))
RUNS = {"run": {}, "zipped_run": {"checkpoint.zip": True, "optimizer.kind": "adamw", "precision": "fp32"}}
"""Directory -> settings of a trained run."""
SHARDED = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


def run_settings(name: str, **changes: Any) -> dict[str, Any]:
    """A run of four steps on the folder's corpus; paths are relative to the folder."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return {
        **{f"model.{field}": size for field, size in sizes.items()},
        **{"run_dir": name, "data.paths": ("corpus",), "data.cache_dir": "cache", "nproc": 1, "zip": "off"},
        **{"steps": 4, "batch_size": 2, "sequence_length": 16, "checkpoint.every": 4, "checkpoint.keep": 1},
        **{"optimizer.warmup_steps": 1, "optimizer.kind": "adamw8bit", "precision": "bf16"},
        **RUNS[name],
        **changes,
    }


def sharded_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A mixture of experts and its optimizer, after no step."""
    torch.manual_seed(0)
    config = MixtralConfig(vocab_size=64, num_local_experts=4, num_key_value_heads=2, **SHARDED)
    model = MixtralForCausalLM(config)
    return model, AdamW8bit(model.parameters(), lr=1e-2)


def sharded_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Train one step, the same each time; returns the loss after it."""
    tokens = torch.arange(16).view(2, 8) * 3
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        return float(model(input_ids=tokens, labels=tokens).loss)


def digest(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """SHA-256 of the bytes of each tensor."""
    return {
        name: hashlib.sha256(bytes(x.detach().contiguous().view(-1).view(torch.uint8).numpy().data)).hexdigest()
        for name, x in sorted(tensors.items())
    }


def write(folder: Path) -> None:
    """Write all files into `folder`, the current directory."""
    expected: dict[str, Any] = {}
    write_corpus(folder / "corpus")
    for path in sorted((folder / "corpus").iterdir())[3:]:
        path.unlink()
    for name in RUNS:
        run(load_config(None, run_settings(name)), ALONE, StopRequest())
        shutil.copytree(name, "gone_on")
        run(load_config(None, run_settings(name, run_dir="gone_on", resume=True, steps=6)), ALONE, StopRequest())
        expected[name] = {"losses": list(losses("gone_on").values())}
        shutil.rmtree("gone_on")
    for lock in folder.rglob("*.lock"):
        lock.unlink()

    generator = torch.Generator().manual_seed(0)
    tensors = {
        "weight": torch.randn(40, 50, generator=generator).bfloat16(),
        "bias": torch.randn(33, generator=generator),
        "steps": torch.arange(7),
    }
    save_file(tensors, "tensors.safetensors", {"format": "pt"})
    zip_path(folder / "tensors.safetensors", folder / "tensors.laconic")
    zip_path(folder / "tensors.safetensors", folder / "tensors_best.laconic", code="best")
    expected["tensors"] = digest(load_file("tensors.safetensors"))

    model, optimizer = sharded_model()
    sharded_step(model, optimizer)
    save_sharded("sharded", model, optimizer)
    expected["sharded"] = digest(model.state_dict())
    expected["next_loss"] = sharded_step(model, optimizer)

    Path("activation_plan.json").write_text(LINEAR.to_json())
    Path("streams.json").write_text(STREAMS.to_json())
    Path("pipeline.txt").write_text(str(one_f_one_b(2, 4)) + "\n")
    Plan.of(LARGE, agoq(LARGE)).save("plan.json")
    made_up_rates().save("wire_rates.json")
    moe_rates().save("moe_rates.json")
    INFERENCE_RATES.save("infer_rates.json")
    shipped = resources.files("laconic.cost") / "data" / "sensitivity.json"
    Path("sensitivity.json").write_text(shipped.read_text(encoding="utf-8"), encoding="utf-8")
    Path("expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def main(target: Path) -> None:
    """Write the folder whole or not at all."""
    if target.exists():
        sys.exit(f"{target} exists; what a release wrote stays as it is")
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        write(Path(name).resolve())
        here = os.getcwd()
        told = [p for p in Path(here).rglob("*") if p.is_file() and here.encode() in p.read_bytes()]
        assert not told, f"{told} name this machine's folder"
        shutil.copytree(here, target)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]).resolve())
