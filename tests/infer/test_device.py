"""Workers on CUDA devices, of which there are none here: models on a simulated one, and what is refused."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.kit.local_link import LocalLink
from laconic.cost.comm.rates import Line
from laconic.cost.infer.engine_plan import EngineLimits
from laconic.cost.infer.rates import LinkPair
from laconic.errors import ConfigError, ModelError
from laconic.infer import AutoPlan, Engine
from laconic.infer.attention_worker import put_remote_experts
from laconic.infer.coded_experts import keep_experts
from laconic.infer.device import take_device
from laconic.infer.exchange_costs import copy_seconds
from laconic.infer.expert_share import ExpertShare
from laconic.infer.messages import Rows
from laconic.infer.remote_experts import RemoteExperts, RemoteLayer
from laconic.infer.serving_plan import plan_serving
from laconic.infer.settings import WorkerSettings
from laconic.infer.split import EngineSplit
from laconic.infer.transformers_seam import load_attention_model, load_experts
from laconic.schedule.inference import InferencePlan
from tests.cost.infer_models import RATES
from tests.grid import slow_but
from tests.infer.models import NEW_TOKENS, PROMPTS, expected, make
from tests.streams.cuda import CUDA, counted_waits, cuda

MEASURED = "measure_infer, 2026-11-30 06:00 UTC, 2 ranks, {}, float32"
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


class Noting(LocalLink):
    """Keeps the rows it is sent."""

    def __init__(self, share: ExpertShare) -> None:
        super().__init__(share.run)
        self.rows: list[Rows] = []

    def send(self, rows: Rows) -> None:
        self.rows.append(rows)
        super().send(rows)


def logits(
    path: Path, plan: InferencePlan, device: torch.device, experts_on: torch.device, expert_format: str = "exact"
) -> tuple[Tensor, list[Noting], list[str]]:
    """Logits of a model on `device` whose experts are divided between two workers."""
    keep = partial(keep_experts, expert_format)
    split = EngineSplit(1, 2)
    links: list[Noting] = []
    for worker in range(2):
        layers = load_experts(path, torch.float32, lambda count, worker=worker: split.expert_range(worker, count), keep)
        links.append(Noting(ExpertShare([layer.to(experts_on) for layer in layers])))
    ranges = [[split.expert_range(worker, layers[0].num_experts * 2) for worker in range(2)] for _ in layers]
    experts = RemoteExperts(links, ranges, plan)
    model: Any = load_attention_model(path, torch.float32, lambda layer, _: RemoteLayer(experts, layer)).to(device)
    moved, _ = put_remote_experts(model, experts)
    ends = torch.tensor([0, TOKENS.shape[1]], dtype=torch.int32)
    with torch.no_grad():
        model.config._attn_implementation = "eager"  # torch makes the mask of its own in C++, unseen by the simulation
        found = model(TOKENS.to(device), use_cache=False, cu_seq_lens_q=ends).logits
    assert found.device == device
    return found.cpu(), links, moved


@pytest.mark.parametrize("family", slow_but(["qwen2_moe", "deepseek_v3", "gpt_oss"], "deepseek_v3"))
def test_a_split_model_on_a_device_gives_the_same_logits_and_sends_rows_of_the_host(
    family: str, tmp_path: Path
) -> None:
    path, plan = make(family, tmp_path), InferencePlan(num_slices=2)
    cpu = torch.device("cpu")
    right, _, moved = logits(path, plan, cpu, cpu)
    with cuda() as device:
        found, links, moved_there = logits(path, plan, CUDA, CUDA)
    device.check(orders=20)  # of one stream there is one order
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
    assert moved_there == moved
    sent = [rows for link in links for rows in link.rows]
    assert len(sent) >= 2 * plan.num_slices
    assert not any(x.is_cuda for rows in sent for x in (rows.hidden, rows.experts, rows.weights))


@pytest.mark.parametrize("expert_format", ["exact", "int8"])
@pytest.mark.parametrize(("attention_on", "experts_on"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_attention_and_experts_may_be_on_different_devices(
    attention_on: str, experts_on: str, expert_format: str, tmp_path: Path
) -> None:
    path, plan, places = make("qwen2_moe", tmp_path), InferencePlan(), {"cpu": torch.device("cpu"), "cuda": CUDA}
    right, _, _ = logits(path, plan, places["cpu"], places["cpu"], expert_format)
    with cuda() as device:
        found, _, _ = logits(path, plan, places[attention_on], places[experts_on], expert_format)
    device.check(orders=20)
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


def test_each_kind_of_worker_is_told_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Stop(Exception):
        pass

    def launcher(settings: list[WorkerSettings], *args: Any) -> Any:
        told.extend(each.device for each in settings)
        raise Stop

    monkeypatch.setattr("laconic.infer.engine.WorkerLauncher", launcher)
    path = make("qwen2_moe", tmp_path)
    for devices, wanted in (
        ({"device": "cuda", "expert_device": "cpu"}, ["cuda", "cpu", "cpu"]),
        ({"expert_device": "cuda"}, ["cpu", "cuda", "cuda"]),
        ({"device": "cuda"}, ["cuda"] * 3),
        ({"device": "cuda", "trace": tmp_path / "run.json"}, ["cuda"] * 3),
        ({"expert_device": "cuda", "trace": tmp_path / "run.json"}, ["cpu", "cuda", "cuda"]),
    ):
        told.clear()
        with pytest.raises(Stop):
            Engine(path, experts=2, **devices)
        assert told == wanted


def test_workers_of_a_machine_take_its_devices_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for visible, wanted in ((None, "010"), ("5, 3", "535")):
        for rank, name in enumerate(wanted):
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
            if visible is not None:
                monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
            assert take_device("cuda", rank) == torch.device("cuda", 0)
            assert os.environ["CUDA_VISIBLE_DEVICES"] == name
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="uses CUDA already"):
        take_device("cuda", 0)
    assert take_device("cpu", 3) == torch.device("cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "tpu"}, "device is 'tpu', but it must be one of cpu, cuda"),
        ({"device": "cuda:1"}, "CUDA_VISIBLE_DEVICES"),
        ({"expert_device": "meta"}, "expert_device is 'meta', but it must be one of cpu, cuda"),
        ({"expert_device": "cpu", "experts": 0}, "expert_device is 'cpu' with experts = 0"),
    ],
)
def test_what_is_not_known_of_a_device_is_refused(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(make("qwen2_moe", tmp_path), **arguments)


@pytest.mark.parametrize(
    ("source", "device", "message"),
    [
        (
            MEASURED.format("cpu"),
            "cuda",
            "were measured on 'cpu'; give .* on machines with CUDA devices",
        ),
        (MEASURED.format("cuda"), "cpu", "were measured on 'cuda'; give .* on machines without CUDA devices"),
        ("made up", "cuda", "do not say on what they were measured"),
    ],
)
def test_an_automatic_plan_refuses_rates_of_another_kind_of_device(
    tmp_path: Path, source: str, device: Any, message: str
) -> None:
    replace(RATES, source=source).save(tmp_path / "rates.json")
    with pytest.raises(ConfigError, match=message):
        Engine(make("qwen2_moe", tmp_path), plan="auto", rates=tmp_path / "rates.json", device=device)


def test_rates_of_both_kinds_of_devices_are_needed_where_there_are_two(tmp_path: Path) -> None:
    gpu, host = (replace(RATES, source=MEASURED.format(device)) for device in ("cuda", "cpu"))
    host = replace(host, gemm=Line(1e-3, 1e-9))
    gpu.save(tmp_path / "gpu.json")
    host.save(tmp_path / "host.json")
    gpu.with_experts(host).save(tmp_path / "both.json")
    path, limits = make("qwen2_moe", tmp_path), EngineLimits(4096, 256)

    def planned(plan: AutoPlan, device: Any, expert_device: Any) -> str:
        asked = {"expert_device": expert_device}
        return plan_serving(path, 1, None, plan, None, limits, "auto", False, asked, device).notes[0]

    for plan in (
        AutoPlan(tmp_path / "gpu.json", expert_rates=tmp_path / "host.json"),
        AutoPlan(tmp_path / "both.json"),
    ):
        assert "give experts = 0 if it fits, which was not counted" in planned(plan, "cuda", "cpu")
        with pytest.raises(ConfigError, match=r"expert_device = 'cuda', but the rates in .* were measured on 'cpu'"):
            planned(plan, "cuda", "cuda")
    with pytest.raises(ConfigError, match=r"device = 'cuda' and expert_device = 'cpu', but .* attention workers alone"):
        planned(AutoPlan(tmp_path / "gpu.json"), "cuda", "cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_automatic_plan_is_chosen_by_the_rates_of_the_device(tmp_path: Path, device: Any) -> None:
    slow = LinkPair(Line(0.1, 1e-6), Line(0.1, 1e-6))
    replace(RATES, source=MEASURED.format(device), link=slow).save(tmp_path / "rates.json")
    path, limits = make("qwen2_moe", tmp_path), EngineLimits(4096, 256)
    found = plan_serving(path, 1, None, "auto", tmp_path / "rates.json", limits, "auto", False, {}, device)
    # Nobody has counted whether a whole model fits into a CUDA device.
    assert found.split == (EngineSplit(2, 0) if device == "cpu" else EngineSplit(1, 1))
    assert found.choice is not None
    assert "x of as many workers with the whole model" in found.notes[0] or device == "cpu"


def test_copies_of_messages_are_timed_until_the_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    assert copy_seconds([1, 8], 16, torch.float32, torch.device("cpu")) == [0.0, 0.0]
    idle: list[bool] = []
    with cuda() as device, counted_waits(device):

        def clock() -> float:
            idle.append(device.is_known(device.defaults[0].tail))
            return float(len(idle))

        monkeypatch.setattr("laconic.infer.exchange_costs.time.perf_counter", clock)
        found = copy_seconds([1, 8], 16, torch.float32, CUDA)
    assert all(idle)
    assert found == [1 / 32, 1 / 32]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_worker_without_a_device_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"worker 0: device is 'cuda', but .* has no CUDA device"):
        Engine(make("qwen2_moe", tmp_path), device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("experts", [0, 1])
def test_tokens_on_a_gpu_are_those_of_generate(tmp_path: Path, experts: int) -> None:
    path = make("qwen2_moe", tmp_path)
    with Engine(path, experts=experts, device="cuda", dtype="float32") as engine:
        assert engine.generate(PROMPTS, NEW_TOKENS) == expected(path)
