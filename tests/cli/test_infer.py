"""`laconic infer plan` and `laconic profile --infer`: tables, JSON, charts, measured rates, refusals in one line."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from laconic.cli.infer_profile import fit_products
from laconic.cli.main import main
from laconic.cost.infer import InferenceRates
from laconic.errors import ConfigError
from laconic.infer.auto_plan import check_measured
from tests.cost.infer_models import RATES, SLOW_WORKER
from tests.distributed.processes import environment, finish, free_port, rank_environment, run_ranks, start
from tests.streams.cuda import cuda

MODEL = ["infer", "plan", "qwen3-235b-a22b"]
SMALL = ["--workers", "16", "--memory", "80GB", "--prompt", "1024", "--output", "64", "--requests", "64"]


@pytest.fixture
def rates(tmp_path: Path) -> list[str]:
    RATES.save(tmp_path / "rates.json")
    return ["--rates", str(tmp_path / "rates.json")]


def test_both_phases_are_planned_and_drawn(
    rates: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chart = tmp_path / "plan.html"
    assert main([*MODEL, *SMALL, *rates, "--gantt", str(chart)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "prefill\nqwen3-235b-a22b: 94 layers, hidden 4096, 128 experts 1536 wide, top-8; 235.1 billion"
    )
    assert out.count("plan: ") == out.count("memory allows ") == 2
    assert "\ndecode\n" in out
    assert out.endswith(f"wrote {chart}\n")
    page = chart.read_text()
    assert "experts 0.0.0" in page
    assert all(f": {stream}<" in page for stream in ("attention", "a2e", "experts", "e2a"))


def test_json_has_the_plan_and_all_candidates(rates: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MODEL, *SMALL, *rates, "--phase", "decode", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["decode"]
    plan = found["decode"]
    assert plan["best"] in plan["candidates"]
    assert plan["split"] == (plan["best"]["attention_workers"] is not None)
    assert plan["memory"]["nbytes"][plan["memory"]["worker"]]["weights"] > 0


def test_commands_of_vllm_are_a_script_and_json(rates: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*MODEL, "--workers", "8", "--memory", "141GB", "--prompt", "64", "--output", "64", *rates]
    flags += ["--requests", "8", "--max-micro-batches", "2", "--max-slices", "2", "--for", "vllm-afd"]
    assert main([*flags, "--host", "10.0.0.1"]) == 0
    script = capsys.readouterr().out
    assert script.startswith("#!/bin/sh\n# predicted for decoding: ")
    assert script.count("vllm serve qwen3-235b-a22b") == script.count("--host 10.0.0.1") == 2
    assert main([*flags, "--json"]) == 0
    assert [one["role"] for one in json.loads(capsys.readouterr().out)["commands"]] == ["attention", "ffn"]


@pytest.mark.ci
def test_arrivals_are_planned_for_their_latency(rates: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*MODEL, "--workers", "16", "--memory", "80GB", "--output", "64", *rates, "--arrivals"]
    assert main([*flags, "0.5"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("arrivals: 0.5 requests/s, prompts of 1024 tokens, answers of 64\n")
    assert "plan: " in out
    assert main([*flags, "0.5", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["arrivals"]["best"]
    assert best["first_token_seconds"] > 0
    for more, message in (
        (["100000"], "no plan carries 100000 requests/s of 1024 + 64 tokens on 16 workers"),
        (["-1"], "--arrivals is -1.0, but it must be above 0"),
        (["nan"], "--arrivals is nan, but it must be above 0"),
        (["1", "--output", "0"], "--output is 0 with --arrivals"),
        (["1", "--requests", "4"], "--requests is given with --arrivals"),
        (["1", "--gantt", "x.html"], "--gantt is given with --arrivals"),
    ):
        assert main([*flags, *more]) == 2
        assert message in capsys.readouterr().err


def test_measured_routing_and_fixed_workers_are_used(
    rates: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rate(*more: str) -> float:
        fixed = ["--attention-workers", "8", "--phase", "decode", "--max-micro-batches", "2", "--max-slices", "2"]
        assert main([*MODEL, *SMALL, *rates, *fixed, *more, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["decode"]["candidates"]
        assert {one["attention_workers"] for one in found} <= {8, None}
        return max(one["tokens_per_second"] for one in found if one["kind"] == "findep")

    routing = tmp_path / "routing.json"
    routing.write_text(json.dumps([1.0] * 7 + [1 / 121] * 121))
    assert rate("--routing", str(routing)) < rate()


def test_rates_can_be_printed(rates: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["infer", "plan", *rates, "--show-rates"]) == 0
    out = capsys.readouterr().out
    assert "link to experts, any split" in out
    assert "1,000.00 Gmul-adds" in out
    assert out.endswith("made up\n")


@pytest.fixture
def expert_rates(tmp_path: Path) -> list[str]:
    slow = replace(RATES, gemm=SLOW_WORKER.gemm, read_seconds_per_byte=1e-9, source="slower")
    slow.save(tmp_path / "slow.json")
    return ["--expert-rates", str(tmp_path / "slow.json")]


def test_two_kinds_of_workers_are_planned(
    rates: list[str], expert_rates: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    few = [*rates, "--attention-workers", "4", "--max-micro-batches", "2", "--max-slices", "2", "--phase", "decode"]
    assert main([*MODEL, *SMALL, *few, *expert_rates, "--expert-memory", "200GB"]) == 0
    out = capsys.readouterr().out
    assert "workers: 4 for attention of 80.00 GB, 12 for experts of 200.00 GB; " in out
    assert "bottleneck: expert workers, busy for " in out
    assert "unsplit, no request fits" in out  # 470 GB on 4 x 80 GB
    assert main([*MODEL, *SMALL, *few]) == 0
    alike = capsys.readouterr().out
    assert "16 workers of 80.00 GB; " in alike
    assert "unsplit, experts sharded" in alike
    assert main([*MODEL, *SMALL, *few, "--expert-rates", rates[1], "--expert-memory", "80GB"]) == 0
    assert capsys.readouterr().out == alike
    assert main([*MODEL, *SMALL, *few, "--expert-memory", "10GB"]) == 2
    assert "expert workers of 10,000,000,000 bytes, with even one request; " in capsys.readouterr().err
    assert main(["infer", "plan", *rates, *expert_rates, "--show-rates"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"rates of {rates[1]}, expert workers' of {expert_rates[1]}\n")
    assert "expert workers, matrix product" in out
    assert out.endswith("made up; expert workers: slower\n")
    assert main(["infer", "plan", *rates, *expert_rates, "--show-rates", "--json"]) == 0
    assert InferenceRates.from_dict(json.loads(capsys.readouterr().out)["rates"]).experts is not None
    assert main([*MODEL, *SMALL, *few, *expert_rates, "--expert-memory", "200GB", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["decode"]
    assert plan["best"]["attention_workers"] == 4
    assert max(plan["busy"], key=plan["busy"].get) == "expert workers"


def test_two_kinds_of_workers_carry_arrivals_and_serve_with_vllm(
    rates: list[str], expert_rates: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*MODEL, *SMALL[:-2], *rates, "--attention-workers", "8", "--max-micro-batches", "2", "--max-slices", "2"]
    two = [*expert_rates, "--expert-memory", "200GB"]
    found = []
    for more in ([], two):
        assert main([*flags, *more, "--arrivals", "0.001"]) == 0
        out = capsys.readouterr().out
        assert "\nbottleneck" in out
        assert ("workers: 8 for attention of 80.00 GB, 8 for experts of 200.00 GB\n" in out) == (more == two)
        assert main([*flags, *more, "--for", "vllm-afd"]) == 0
        found.append((out, capsys.readouterr().out.splitlines()[1]))
    assert found[0][0] != found[1][0]
    assert found[0][1] != found[1][1]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["infer", "serve"], "laconic infer serve is no command"),
        (["infer", "plan"], "a model, --workers and --memory are needed"),
        (
            ["infer", "plan", "nothing", "--workers", "2", "--memory", "1GB"],
            "model is 'nothing', but it must be a directory",
        ),
        ([*MODEL, "--workers", "2", "--memory", "1GB"], "does not fit on 2 workers"),
        ([*MODEL, *SMALL, "--output", "-9"], "--output is -9, but it must be at least 0"),
        ([*MODEL, *SMALL, "--prompt", "0"], "--prompt is 0, but it must be at least 1"),
        ([*MODEL, *SMALL, "--requests", "0"], "--requests is 0, but"),
        ([*MODEL, *SMALL, "--max-slices", "0"], "--max-slices is 0, but"),
        ([*MODEL, *SMALL, "--expert-memory", "9"], "--expert-memory is '9', but it must have a unit"),
        ([*MODEL, *SMALL, "--expert-rates", "none.json"], "inference rates are 'none.json', but it must be a file"),
        ([*MODEL, *SMALL, "--output", "0"], "--output is 0, but decoding is planned for answers; give 1 or more, or"),
        ([*MODEL, *SMALL, "--output", "0", "--for", "vllm-afd"], "--output is 0, but decoding is planned for answers"),
        (
            [*MODEL, *SMALL, "--workers", "200", "--attention-workers", "9"],
            "191 expert workers cannot share 128 experts",
        ),
        (
            [*MODEL, *SMALL[:-2], "--workers", "200", "--attention-workers", "9", "--arrivals", "1"],
            "191 expert workers cannot share 128 experts",
        ),
        ([*MODEL, "--show-rates"], "model is 'qwen3-235b-a22b' with --show-rates, but rates are of no model"),
        (
            ["infer", "plan", "--show-rates", "--workers", "3", "--requests", "1"],
            "--workers and --requests are given, but would have no effect with --show-rates",
        ),
        ([*MODEL, *SMALL, "--workers", "1", "--expert-memory", "1TB"], "--expert-memory is given, but would have no"),
        ([*MODEL, *SMALL, "--workers", "1", "--attention-workers", "1"], "no effect with --workers 1, which runs the"),
        ([*MODEL, *SMALL, "--workers", "0"], "--workers is 0, but"),
        ([*MODEL, *SMALL, "--attention-workers", "16"], "--attention-workers is 16 of --workers 16, but"),
        ([*MODEL, *SMALL, "--prompt", "40960"], "--prompt 40960 and --output 64 are 41024 tokens of a request, but"),
        ([*MODEL, *SMALL, "--for", "vllm-afd", "--arrivals", "2"], "--arrivals is given with --for vllm-afd"),
        ([*MODEL, *SMALL, "--for", "vllm-afd", "--expert-format", "int8"], "--expert-format is given with --for"),
        ([*MODEL, *SMALL, "--host", "10.0.0.1"], "--host is given, but it is an address in the commands of --for"),
    ],
)
def test_refusals_are_one_line(
    rates: list[str], args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*args, *rates]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_a_wrong_routing_file_is_refused(rates: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "routing.json"
    for text, message in (
        ("[", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "must be a list of numbers"),
        ('["a"]', "must be a list of numbers"),
        ("[1]", f"--routing {file}: shares has 1 entries"),
    ):
        file.write_text(text)
        assert main([*MODEL, *SMALL, *rates, "--routing", str(file)]) == 2
        assert message in capsys.readouterr().err


def test_missing_rates_name_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LACONIC_INFER_RATES", str(tmp_path / "none.json"))
    assert main([*MODEL, *SMALL]) == 2
    assert "measure with laconic profile --infer" in capsys.readouterr().err


def test_products_are_fitted_to_their_three_rates() -> None:
    points = [
        (rows, weights, 1e-5 + 2e-12 * rows * weights + 3e-10 * weights * 4)
        for rows in (1, 8, 64, 512)
        for weights in (1 << 16, 1 << 20)
    ]
    line, read = fit_products(points, 4)
    assert (line.alpha_seconds, line.seconds_per_byte, read) == pytest.approx((1e-5, 2e-12, 3e-10))
    assert line.error < 1e-9
    # Times that fall with size have no such rates; none of the fitted ones is negative.
    line, read = fit_products([(1, 100, 5e-6), (10, 100, 4e-6), (1, 1000, 3e-6)], 4)
    assert min(line.alpha_seconds, line.seconds_per_byte, read) >= 0


@pytest.mark.slow
def test_two_local_processes_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "rates.json"
    sizes = ["--model-dim", "256", "--hidden-dim", "512", "--dtype", "float32"]
    ending = finish(
        start(["-m", "laconic", "profile", "--infer", "--quick", *sizes, "--infer-out", str(file)], environment())
    )
    assert ending.code == 0, ending.err
    assert f"wrote {file}; see laconic infer plan" in ending.out
    rates = InferenceRates.load(file)
    assert rates.gemm.seconds_per_byte + rates.read_seconds_per_byte > 0
    assert rates.link.dispatch.seconds(1 << 20) > 0
    for end in (rates.exchange.attention, rates.exchange.experts):
        assert 1e-6 < end.seconds(1 << 16) < 1e-1
    assert not rates.grouped
    check_measured(rates.source, file, "cpu")
    with pytest.raises(ConfigError, match="were measured on 'cpu'"):
        check_measured(rates.source, file, "cuda")
    assert main([*MODEL, *SMALL, "--rates", str(file)]) == 0
    assert "plan: " in capsys.readouterr().out


PROFILE = ["profile", "--infer", "--quick", "--model-dim", "64", "--hidden-dim", "128", "--dtype", "float32"]


def _profile_beside_host(rank: int, port: int, file: Path) -> None:
    os.environ |= rank_environment(rank, 2, port)
    with cuda() as device:
        assert main([*PROFILE, "--infer-out", str(file)]) == 0
    issued = {node.name for node in device._nodes}
    of_device = {"aten.mm.default", "aten._scaled_dot_product_flash_attention_for_cpu.default"}
    assert issued & of_device == (set() if rank else of_device)


@pytest.mark.slow
def test_one_device_is_measured_beside_a_process_of_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpu, host = tmp_path / "gpu.json", tmp_path / "host.json"
    run_ranks(_profile_beside_host, (free_port(), gpu), 2)
    rates = InferenceRates.load(gpu)
    assert rates.grouped
    assert "attention and reading on the CUDA device, messages with a process of the CPU" in rates.source
    check_measured(rates.source, gpu, "cuda")
    with pytest.raises(
        ConfigError, match=r"expert_device = 'cuda', but the rates in .* have messages with a process of"
    ):
        check_measured(rates.source, gpu, "cuda", "expert_device")
    assert min(way.seconds(1 << 12) for way in (rates.link.dispatch, rates.link.combine)) > 0
    replace(rates, grouped=False).save(host)
    memory = ["--attention-workers", "1", "--expert-memory", "512GB"]
    assert main([*MODEL, *SMALL, *memory, "--rates", str(gpu), "--expert-rates", str(host)]) == 0
    assert "bottleneck: " in capsys.readouterr().out


def test_one_device_takes_two_processes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert main([*PROFILE, "--nproc", "3"]) == 2
    assert "nproc is 3, but this machine has one CUDA device, which --infer measures" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() != 1, reason="needs one CUDA device")
def test_a_gpu_is_measured_beside_its_host(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    ending = finish(start(["-m", "laconic", *PROFILE, "--infer-out", str(file)], environment()))
    assert ending.code == 0, ending.err
    assert "messages with a process of the CPU" in InferenceRates.load(file).source
