"""What laconic.infer uses of transformers is there, or the error names it; what cannot be served is refused."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.generation.continuous_batching.scheduler import FIFOScheduler

from laconic.errors import ConfigError, ModelError
from laconic.infer.sampling import ChosenToken, Sampling, sample
from laconic.infer.transformers_seam import (
    FIRST,
    CacheLimits,
    check_transformers,
    check_weights,
    find_experts,
    load_attention_model,
    load_experts,
    read_config,
)
from laconic.infer.transformers_seam.sampler import Sampler
from tests.distributed.processes import ROOT
from tests.infer.alone import Asked
from tests.infer.models import make


def test_installed_transformers_has_every_name() -> None:
    """If this fails after an update, transformers has moved a name: its message says which."""
    check_transformers()


@pytest.mark.parametrize("version", ["5.24.1", "5.25.0", "6.0.0.dev0", "unknown"])
def test_a_version_is_not_refused_for_its_number(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    monkeypatch.setattr("transformers.__version__", version)  # by name: transformers replaces its module while it loads
    with caplog.at_level("WARNING", "laconic"):
        check_transformers(warns=False)
        assert not caplog.messages
        check_transformers()
        check_transformers()
    assert len(caplog.messages) == (version != "5.24.1")
    said = f"transformers {version} is installed, and laconic.infer has been tried with 5.23 and 5.24"
    assert all(said in message for message in caplog.messages)


def test_the_first_version_is_the_same_everywhere() -> None:
    first = ".".join(map(str, FIRST))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"transformers>={first}" in extras["serve"]
    assert f"transformers from {first} on" in (ROOT / "docs" / "inference.md").read_text()
    assert f"and from {first} on to generate and serve" in (ROOT / "docs" / "versioning.md").read_text()


def test_a_missing_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ContinuousBatchingManager, "cancel_request")
    with pytest.raises(ConfigError, match=r"has no .*continuous_api\.ContinuousBatchingManager\.cancel_request"):
        check_transformers()


def test_a_missing_module_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.generation.continuous_batching.model_runner", None)
    monkeypatch.setattr("transformers.__version__", "5.1.0")
    with pytest.raises(
        ConfigError, match=r"transformers 5\.1\.0 has no .*ModelRunner\._sample.*; pip install 'transformers>=5\.23'"
    ):
        check_transformers()


def test_a_missing_argument_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(self: ContinuousBatchingManager, block: bool = True) -> None:
        """As it might become."""

    monkeypatch.setattr(ContinuousBatchingManager, "stop", stop)
    with pytest.raises(ConfigError, match=r"ContinuousBatchingManager\.stop of .* has no argument timeout, hard_stop"):
        check_transformers()


def test_a_missing_field_of_the_scheduler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = load_attention_model(make("llama", tmp_path), None, None)
    reset = FIFOScheduler.reset

    def without(self: FIFOScheduler) -> None:
        reset(self)
        del self.waiting_requests_order

    monkeypatch.setattr(FIFOScheduler, "reset", without)
    asked = Asked(held)
    for name in ("early", "late"):  # the second one comes when nobody takes it any more
        asked.add(name, [5])
        assert "FIFOScheduler of transformers has no waiting_requests_order" in str(asked.end().error)
        asked.requests._manager._generation_thread.join()
    asked.requests.stop()


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no config"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(ModelError, match="cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "resnet"}))
    with pytest.raises(ModelError, match="model of type resnet"):
        read_config(tmp_path)


def test_layers_without_a_paged_cache_are_refused(tmp_path: Path) -> None:
    transformers.AutoConfig.for_model("qwen3_next").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"type qwen3_next.*no paged cache .*linear_attention"):
        read_config(tmp_path)


def test_a_window_that_the_model_itself_does_not_have_is_refused(tmp_path: Path) -> None:
    """The paged cache goes by the configuration alone, and the load's check ends before such a window begins."""
    transformers.AutoConfig.for_model("moshi").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"has a sliding_window, which .* MoshiForCausalLM itself does not"):
        read_config(tmp_path)


@pytest.mark.parametrize("family", ["gemma2", "vaultgemma"])
def test_soft_caps_that_paged_attention_leaves_out_are_refused(tmp_path: Path, family: str) -> None:
    """In half precision the load's check takes them for rounding."""
    capped = transformers.AutoConfig.for_model(family)
    assert capped.attn_logit_softcapping == 50.0
    capped.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"attn_logit_softcapping = 50.0, which \w+ForCausalLM obeys and .*paged"):
        read_config(tmp_path)
    transformers.AutoConfig.for_model(family, attn_logit_softcapping=None).save_pretrained(tmp_path)
    assert read_config(tmp_path).attn_logit_softcapping is None
    transformers.AutoConfig.for_model("gemma3_text", attn_logit_softcapping=50.0).save_pretrained(tmp_path)
    assert read_config(tmp_path).attn_logit_softcapping == 50.0  # which the model itself does not use


def test_an_adapter_beside_the_model_is_refused(tmp_path: Path) -> None:
    """transformers adds it to the weights that it loads itself, with peft installed: not to experts elsewhere."""
    path = make("mixtral", tmp_path)
    (path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"holds an adapter of PEFT beside the model, .*; merge it"):
        read_config(path)


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    path = make("mixtral", tmp_path)
    settings = json.loads((path / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4"}
    (path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="quantized weights"):
        read_config(path)


@pytest.mark.parametrize("scaled", [False, True])
def test_quantized_weights_that_no_config_names_are_refused(tmp_path: Path, scaled: bool) -> None:
    """transformers takes codes for values, and leaves their scales aside."""
    path = make("mixtral", tmp_path)
    tensors = load_file(path / "model.safetensors")
    coded = torch.float8_e4m3fn if scaled else torch.int8
    tensors = {name: t.to(coded) if "experts" in name else t for name, t in tensors.items()}
    if scaled:
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        check_weights(path)  # these may be the values
        tensors |= {f"{name}_scale_inv": torch.ones(1) for name in list(tensors) if "experts" in name}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"quantized weights \(model\.layers\.0\..*w1\.weight"):
        check_weights(path)


def test_weights_by_another_name_are_refused(tmp_path: Path) -> None:
    path = make("mixtral", tmp_path)
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | {"transformers_weights": "other.safetensors"}))
    with pytest.raises(ModelError, match=r"transformers_weights = 'other\.safetensors'"):
        read_config(path)


@pytest.mark.parametrize("lost", ["model.norm.weight", "experts.0.w2.weight"])
def test_missing_weights_are_named(tmp_path: Path, lost: str) -> None:
    path = make("mixtral", tmp_path)
    tensors = load_file(path / "model.safetensors")
    gone = [name for name in tensors if name.endswith(lost)]
    assert gone, sorted(tensors)
    save_file(
        {name: t for name, t in tensors.items() if name not in gone}, path / "model.safetensors", {"format": "pt"}
    )

    def load() -> None:
        load_experts(path, None, lambda count: range(count))
        load_attention_model(path, None, lambda layer, experts: torch.nn.Identity())

    with pytest.raises(ModelError, match="lacks"):
        load()


def test_a_checkpoint_without_safetensors_is_refused(tmp_path: Path) -> None:
    path = make("mixtral", tmp_path)
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"holds no model\.safetensors"):
        load_experts(path, None, lambda count: range(count))


@pytest.mark.parametrize("field", ["cache_tokens", "batch_tokens"])
def test_limits_below_their_least_are_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field} is 0"):
        CacheLimits(**{field: 0})


def test_experts_are_found_without_memory(tmp_path: Path) -> None:
    model, blocks = find_experts(read_config(make("qwen2_moe", tmp_path)))
    assert all(p.is_meta for p in model.parameters())
    assert list(blocks) == ["model.layers.0.mlp.experts", "model.layers.2.mlp.experts"]


class _NoProcessors:
    do_processing = False
    tensors_required = 0

    def prepare_tensor_args(self, requests: list[Any], storage: torch.Tensor) -> torch.Tensor:
        return storage


def _chosen(
    rows: torch.Tensor, samplings: list[Sampling]
) -> tuple[list[tuple[str, int]], dict[str, str], torch.Tensor]:
    """What the sampler says of a batch, one request a row and one row of padding, and what it gives the manager."""
    heard: list[list[tuple[str, ChosenToken]]] = []
    failed: dict[str, str] = {}
    sampler = Sampler(_NoProcessors(), heard.append, failed.__setitem__)
    states = [
        SimpleNamespace(
            request_id=str(number),
            initial_tokens=[1],
            generated_len=lambda: 0,
            logit_processor_kwargs={"sampling": sampling, "rules": None, "prompt_tokens": 1},
        )
        for number, sampling in enumerate(samplings)
    ]
    empty = torch.empty(0)
    sampler.prepare_tensor_args([SimpleNamespace(state=state, has_new_token=True) for state in states], empty)
    output_ids = torch.full((1, len(rows) + 2), -1, dtype=torch.int32)
    sampler.choose(torch.cat([rows.float(), torch.full((1, rows.shape[1]), torch.nan)])[None], output_ids)
    assert output_ids[0, len(rows) :].tolist() == [-1, -1]
    assert len(heard) == 1
    return [(name, token.token) for name, token in heard[0]], failed, output_ids[0, : len(rows)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_batches_choose_as_single_requests_do(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = torch.randint(-3, 3, (40, 29)).to(dtype)  # many equal logits: the lowest id counts
    rows[3, :5] = -torch.inf
    greedy, sampled = Sampling(), Sampling(temperature=1.0)
    heard, failed, managers = _chosen(rows, [greedy] * 40)
    assert not failed
    assert [token for _, token in heard] == managers.tolist() == [sample(row, greedy, 0).token for row in rows]
    mixed, _, managers = _chosen(rows, [greedy] * 39 + [sampled])
    assert mixed[:39] == heard[:39]
    assert managers.tolist() == [token for _, token in mixed]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_one_bad_row_fails_its_request_alone(bad: float) -> None:
    rows = torch.arange(12.0).view(3, 4).contiguous()
    rows[1] = bad
    heard, failed, _ = _chosen(rows, [Sampling()] * 3)
    assert heard == [("0", 3), ("2", 3)]
    assert list(failed) == ["1"]
