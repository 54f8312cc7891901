"""The end of part 7: tokens of the inference engine, and attention on the device with experts on the CPU."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_day.setting import Setting, relative_error
from benchmarks.registry import Table
from laconic.errors import ConfigError
from laconic.infer.transformers_seam import check_transformers


def run(setting: Setting) -> None:
    """Both alone. A transformers that the engine does not know leaves its reason in the table."""
    with setting.report.section("inference engine"):
        try:
            check_transformers()
        except ConfigError as error:
            setting.table(_tokens_table([["not run", "", f"{error}; tools/gpu_wheels.py --transformers brings it"]]))
        else:
            setting.table(_engine_table(setting))
    with setting.report.section("attention on the device, experts on the CPU"):
        setting.table(_split_table(setting))


def _tokens_table(rows: list[list[str]]) -> Table:
    return Table("Tokens of the inference engine", ["expert workers", "tokens", "beside generate on the CPU"], rows)


def _engine_table(setting: Setting) -> Table:
    """Tokens of the engine, whole and split, are those of `generate`."""
    from laconic.infer import Engine
    from tests.infer.models import NEW_TOKENS, PROMPTS, generated, make

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = make("qwen2_moe", Path(folder))
        expected = generated(path)
        for experts in (0, 1):
            with Engine(path, experts=experts, device=setting.device, dtype="float32") as engine:
                found = engine.generate(PROMPTS, NEW_TOKENS)
            if found != expected:
                raise AssertionError(f"with {experts} expert workers tokens differ from those of generate: {found}")
            rows.append([str(experts), str(sum(map(len, found))), "equal"])
    return _tokens_table(rows)


def _split_table(setting: Setting) -> Table:
    """Logits of a model whose attention is on the device and whose experts are on the CPU."""
    from tests.infer.models import make

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for family in ("qwen2_moe", "deepseek_v3", "gpt_oss")[: setting.sized(3, 1)]:
            error = _split_error(make(family, Path(folder)), setting.device)
            if error > 1e-3:
                raise AssertionError(f"{family}: logits are off by {error:.1e} of their norm")
            rows.append([family, f"{error:.1e}"])
    return Table("Attention on the device, experts on the CPU", ["model", "error of the logits beside the CPU"], rows)


def _split_error(path: Path, device: str) -> float:
    from benchmarks.kit.local_link import LocalLink
    from laconic.infer.attention_worker import put_remote_experts
    from laconic.infer.expert_share import ExpertShare
    from laconic.infer.remote_experts import RemoteExperts, RemoteLayer
    from laconic.infer.split import EngineSplit
    from laconic.infer.transformers_seam import load_attention_model, load_experts
    from laconic.schedule.inference import InferencePlan

    split = EngineSplit(1, 1)
    layers = load_experts(path, torch.float32, lambda count: split.expert_range(0, count))
    ranges = [[split.expert_range(0, layer.num_global_experts)] for layer in layers]
    experts = RemoteExperts([LocalLink(ExpertShare(layers).run)], ranges, InferencePlan(num_slices=1))
    model: Any = load_attention_model(path, torch.float32, lambda layer, _: RemoteLayer(experts, layer)).to(device)
    put_remote_experts(model, experts)
    whole: Any = load_attention_model(path, torch.float32, None)
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    ends = torch.tensor([0, tokens.shape[1]], dtype=torch.int32)
    with torch.no_grad():
        found = model(tokens.to(device), use_cache=False, cu_seq_lens_q=ends).logits
        return relative_error(found, whole(tokens, use_cache=False).logits)
