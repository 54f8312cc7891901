"""Every worker loads its own weights and no others."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2MoeForCausalLM

from laconic.errors import ModelError
from laconic.infer import Engine
from laconic.infer.expert_share import ExpertShare
from laconic.infer.transformers_seam import load_attention_model, load_experts
from laconic.schedule.slices import slice_ranges
from tests.grid import few
from tests.infer.models import SERVED_SPLIT, make, split_families


@pytest.mark.parametrize("family", split_families("mixtral", "gpt_oss", "deepseek_v2"))
def test_workers_together_hold_every_weight_once(tmp_path: Path, family: str) -> None:
    path = make(family, tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    attention = load_attention_model(path, None, lambda layer, experts: torch.nn.Identity())
    assert not any(p.is_meta for p in [*attention.parameters(), *attention.buffers()])
    kept = attention.state_dict()
    assert {name for name in whole.state_dict() if name not in kept} == {
        name for name in whole.state_dict() if ".experts." in name
    }
    for name, tensor in kept.items():
        assert torch.equal(tensor, whole.state_dict()[name]), name
    for name, buffer in whole.named_buffers():
        assert torch.equal(attention.get_buffer(name), buffer), name

    layers = [name for name, module in whole.named_modules() if name.endswith(".experts")]
    shares = [load_experts(path, None, lambda count, w=w: slice_ranges(count, 3)[w]) for w in range(3)]
    for layer, name in enumerate(layers):
        for key, parameter in whole.get_submodule(name).named_parameters():
            together = torch.cat([share[layer].get_parameter(key) for share in shares])
            assert torch.equal(together, parameter), f"{name}.{key}"
    nbytes = sum(p.nbytes for p in attention.parameters()) + sum(ExpertShare(share).nbytes for share in shares)
    assert nbytes == sum(p.nbytes for p in whole.parameters())


@pytest.mark.parametrize("family", split_families("mixtral", "gpt_oss"))
def test_a_worker_holds_any_experts(tmp_path: Path, family: str) -> None:
    path = make(family, tmp_path)
    whole = load_experts(path, None, range)
    some = load_experts(path, None, lambda count: [0, count - 1])
    for layer, one in zip(whole, some, strict=True):
        for key, parameter in layer.named_parameters():
            assert torch.equal(one.get_parameter(key), parameter[[0, -1]]), key


def test_all_workers_read_the_same_of_two_checkpoints(tmp_path: Path) -> None:
    """transformers takes one file before an index, which may be left of an older save."""
    path = make("mixtral", tmp_path)
    wanted = load_experts(path, None, range)
    tensors = {name: tensor + 1 for name, tensor in load_file(path / "model.safetensors").items()}
    save_file(tensors, path / "model-00001-of-00001.safetensors", {"format": "pt"})
    index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    for ours, theirs in zip(load_experts(path, None, range), wanted, strict=True):
        for key, parameter in ours.named_parameters():
            assert torch.equal(parameter, theirs.get_parameter(key)), key


def test_all_workers_take_the_checkpoints_dtype_where_none_is_named(tmp_path: Path) -> None:
    path = make("mixtral", tmp_path)
    settings = json.loads((path / "config.json").read_text())
    del settings["dtype"]
    (path / "config.json").write_text(json.dumps(settings))
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(path / "model.safetensors").items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    found = [load_attention_model(path, None, lambda *_: torch.nn.Identity()), *load_experts(path, None, range)]
    assert {parameter.dtype for each in found for parameter in each.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])  # a tensor for each expert, and one for all
def test_more_experts_than_the_model_has_are_refused(tmp_path: Path, family: str) -> None:
    path = make(family, tmp_path)
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | {"num_local_experts": 3}))
    with pytest.raises(ModelError, match=r"holds expert 3 \(.*, but config.json says that a layer has 3 experts"):
        load_experts(path, None, range)


@pytest.mark.parametrize("family", few(["llama", *SERVED_SPLIT], 6, pytest.mark.ci))
def test_a_whole_model_runs_as_the_first_of_a_process_as_transformers_would_run_it(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers remembers with a class what it may choose for it; a worker has not loaded another model before."""
    path = make(family, tmp_path)
    whole: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for kind in type(whole).__mro__:
        for name in [name for name in vars(kind) if name.endswith("_cached_value")]:
            monkeypatch.delattr(kind, name)
    ours: Any = load_attention_model(path, None, None)
    for setting in ("_experts_implementation", "_attn_implementation"):
        assert getattr(ours.config, setting) == getattr(whole.config, setting), setting


PEAK = """
import sys
from pathlib import Path
import torch
from laconic.infer.transformers_seam import find_experts, load_attention_model, load_experts, read_config

def mib(field):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024

role, path = sys.argv[1], Path(sys.argv[2])
find_experts(read_config(path))  # code and everything else that is loaded once
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
before = mib("VmRSS")
if role == "experts":
    held = load_experts(path, None, lambda count: range(count // 4))
else:
    replace = None if role == "whole" else lambda layer, experts: torch.nn.Identity()
    held = load_attention_model(path, None, replace)
print(mib("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
def test_peak_of_loading_is_that_of_the_own_share(tmp_path: Path) -> None:
    """288 MiB of experts: an attention worker grows by far less, a quarter of them by not much more than twice that."""
    path = make("mixtral", tmp_path, hidden_size=512, intermediate_size=1024, num_local_experts=8, num_hidden_layers=6)
    size = sum(file.stat().st_size for file in path.glob("*.safetensors")) / 2**20
    assert size > 288

    def peak(role: str) -> float:
        command = [sys.executable, "-c", PEAK, role, str(path)]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert peak("whole") > 0.9 * size  # so the measurement sees weights
    assert peak("attention") < 0.15 * size
    assert peak("experts") < 0.75 * size  # in the file's pages and copied, beside what a first load brings


@pytest.mark.parametrize("split", [False, True])
def test_tensors_that_the_model_has_not_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, split: bool
) -> None:
    path = make("qwen2_moe", tmp_path)
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"model.layers.0.mlp.bias": torch.zeros(2)}, path / "model.safetensors", {"format": "pt"})
    with caplog.at_level("WARNING"):
        load_attention_model(path, None, (lambda layer, _: torch.nn.Identity()) if split else None)
    assert [record.message for record in caplog.records] == [
        "qwen2_moe holds 1 tensors that a Qwen2MoeForCausalLM has not, and that are left aside: model.layers.0.mlp.bias"
    ]


def test_what_transformers_warns_of_while_it_loads_is_heard(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make("qwen2_moe", tmp_path)
    logger = logging.getLogger("transformers.modeling_utils")
    load = Qwen2MoeForCausalLM._load_pretrained_model

    def warn(*args: Any, **kwargs: Any) -> Any:
        logger.warning("an odd checkpoint")
        return load(*args, **kwargs)

    monkeypatch.setattr(Qwen2MoeForCausalLM, "_load_pretrained_model", staticmethod(warn))
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    load_attention_model(path, None, lambda layer, _: torch.nn.Identity())
    assert {record.message for record in caplog.records} == {"an odd checkpoint"}


@pytest.mark.parametrize("arguments", [{"experts": 0}, {"experts": 1}, {"experts": 1, "expert_format": "int8"}])
def test_a_checkpoint_in_float64_is_refused_before_a_worker_starts(tmp_path: Path, arguments: dict[str, Any]) -> None:
    path = make("mixtral", tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"dtype": "float64"}))
    with pytest.raises(ModelError, match=r"weights in .* are torch.float64, but they must be float32, .* as dtype"):
        Engine(path, **arguments)
