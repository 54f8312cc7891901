"""`laconic train` with experts spread over processes: the same training, and checkpoints for any number of them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from laconic.train.checkpoint.export import export
from laconic.train.checkpoint.save_load import find_checkpoint
from laconic.train.model import build_model
from laconic.train.report.metrics import read_metrics
from tests.distributed.spread import ALIKE, BROKEN, FAMILIES, FOUR, SMOOTH_QWEN, run_processes
from tests.distributed.test_parallel import ROUNDING
from tests.train.runs import ALONE, exact_metrics, losses, resumed, tiny_config, train_alone

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which two processes have done all that `tests.distributed.spread` lists for them."""
    folder = tmp_path_factory.mktemp("spread")
    train_alone(tiny_config(folder, "alone", SMOOTH_QWEN))
    train_alone(tiny_config(folder, "resharded", SMOOTH_QWEN), stop_after=2)
    run_processes(folder, "two", 2)
    return folder


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of four processes."""
    folder = tmp_path_factory.mktemp("four")
    train_alone(tiny_config(folder, "resharded", SMOOTH_QWEN), stop_after=2)
    run_processes(folder, "four", 4)
    return folder


def assert_alike(folder: Path, name: str, reference: str, tolerance: float = ROUNDING) -> None:
    expected, found = losses(folder / reference), losses(folder / name)
    assert list(found) == list(expected) == [1, 2, 3, 4, 5, 6]
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, abs=tolerance), step
    rows, expected_rows = read_metrics(folder / name), read_metrics(folder / reference)
    for row, expected_row in zip(rows, expected_rows, strict=True):
        if "grad_norm" in row:
            assert row["grad_norm"] == pytest.approx(expected_row["grad_norm"], rel=max(1e-4, 10 * tolerance))
        else:
            assert row["validation_loss"] == pytest.approx(expected_row["validation_loss"], abs=tolerance)


@pytest.mark.parametrize("name", list(ALIKE))
def test_losses_are_those_of_the_model_as_it_was(folder: Path, name: str) -> None:
    assert_alike(folder, name, "plain")


def test_five_experts_are_trained_by_two_processes(folder: Path) -> None:
    assert len(losses(folder / "five")) == 2


def test_so_are_the_exported_weights(folder: Path, tmp_path: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(export(folder / "alone", tmp_path / "alone"))
    for name in ("ep2", "ep2-fsdp"):
        found = AutoModelForCausalLM.from_pretrained(export(folder / name, tmp_path / name))
        for one, two in zip(expected.parameters(), found.parameters(), strict=True):
            assert torch.allclose(one, two, rtol=0, atol=6 * 0.2 * 2**-20)  # as in test_parallel


@pytest.mark.parametrize("name", list(BROKEN))
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(folder: Path, name: str, tmp_path: Path) -> None:
    assert exact_metrics(folder / f"{name}-broken") == exact_metrics(folder / name)
    swaps = [[row.get("moe_swaps") for row in read_metrics(folder / run)] for run in (name, f"{name}-broken")]
    assert swaps[0] == swaps[1]
    if name == "swapping":  # experts are elsewhere when it stops, and go on moving
        assert 0 < swaps[0][2] < swaps[0][-2]
    if name == "copying":  # which change how sums are rounded
        copies = [[row.get("moe_copied") for row in read_metrics(folder / run)] for run in (name, f"{name}-broken")]
        assert copies[0] == copies[1]
        assert read_metrics(folder / name)[2]["moe_copies"] > 0
    whole, broken = (export(folder / run, tmp_path / run) for run in (name, f"{name}-broken"))
    assert (whole / "model.safetensors").read_bytes() == (broken / "model.safetensors").read_bytes()


def test_each_process_writes_its_own_experts(folder: Path) -> None:
    checkpoint = find_checkpoint(folder / "ep2", ALONE).path
    sizes = [sum(path.stat().st_size for path in checkpoint.glob(f"__{rank}_*")) for rank in range(2)]
    experts_nbytes = 2 * 4 * 3 * 32 * 48 * 4 * 3  # layers, experts, matrices, their size, bytes, weight and moments
    assert min(sizes) > experts_nbytes / 2


def test_a_run_goes_on_with_other_numbers_of_processes_for_experts(folder: Path) -> None:
    # 1: two steps alone; 2: two in two processes, done in the fixture; 1: the rest alone.
    train_alone(resumed(tiny_config(folder, "resharded", SMOOTH_QWEN | {"moe.expert_parallel": 1})))
    assert_alike(folder, "resharded", "alone")


def test_metrics_tell_what_experts_did(folder: Path) -> None:
    rows = {name: [r for r in read_metrics(folder / name) if "loss" in r] for name in ("ep1", "ep2", "ep2-deep")}
    tokens = 4 * 32
    for row, flat, deep in zip(rows["ep1"], rows["ep2"], rows["ep2-deep"], strict=True):
        assert 1 <= row["moe_load_ratio"] <= row["moe_load_ratio_worst"] <= 2  # each token takes 2 of 4
        assert row["moe_load_ratio"] == pytest.approx(flat["moe_load_ratio"], abs=0.05)
        assert row["moe_dropped"] == flat["moe_dropped"] == 0
        assert "moe_level1_nbytes" not in row
        # Of 2 assignments per token and layer some are in one process; a row is 32 fp32 values.
        most_nbytes = 2 * 2 * tokens * 32 * 4
        assert 0 < deep["moe_level1_nbytes"] < flat["moe_level1_nbytes"] < most_nbytes
        assert 0 < flat["moe_duplicate_rate"] < 0.5
        assert "moe_swaps" not in flat
    moe = json.loads((folder / "ep2-deep" / "summary.json").read_text())["moe"]
    assert moe["experts"] == "experts: 2 layers over 2 processes, depth 1 of 1, raw, 2 chunks forward and 2 backward"
    cut = [row["moe_schedule"] for row in read_metrics(folder / "ep2-fsdp") if "loss" in row]
    assert cut == ["one all-to-all, raw, 2 chunks forward and 4 backward"] * 6
    assert [sum(load) for load in moe["last_step"]["loads"]] == [2 * tokens] * 2
    assert json.loads((folder / "plain" / "summary.json").read_text())["moe"] is None


def test_what_was_chosen_and_why_is_in_the_summary(folder: Path) -> None:
    moe = json.loads((folder / "ep2-auto" / "summary.json").read_text())["moe"]
    text = "\n".join(moe["autotune"])
    assert "flat" in text
    assert "depth 1" in text  # two processes with rows of their own: other paths do not exist
    assert moe["schedule"].startswith(("one all-to-all, raw", "depth 1 of 1, raw"))


@pytest.mark.parametrize("name", ["ep2-deep", "ep2-zip"])
def test_dense_gradients_are_averaged_in_windows(folder: Path, name: str) -> None:
    rows = [row for row in read_metrics(folder / name) if "loss" in row]
    # Without units all that is behind the second layer's experts, with FSDP2's at least a shard of that layer.
    least_nbytes = 4 * 32 * 32 * 4 // (1 if name == "ep2-deep" else 2)
    assert all(row["moe_window_nbytes"] >= least_nbytes for row in rows)
    assert "moe_window_nbytes" not in read_metrics(folder / "ep2")[0]


def test_windows_average_codes_where_asked_for(folder: Path) -> None:
    assert_alike(folder, "windows-q8", "plain", 5e-3)
    model = build_model(tiny_config(folder, "-", SMOOTH_QWEN).model, 257, 32, 0)
    dense_nbytes = 4 * (model.num_parameters() - 2 * 4 * 3 * 32 * 48)  # without layers * experts * matrices
    exact, codes = ([r for r in read_metrics(folder / name) if "loss" in r] for name in ("ep2-deep", "windows-q8"))
    for row, expected in zip(codes, exact, strict=True):
        assert row["moe_window_nbytes"] == expected["moe_window_nbytes"] > 0
        # Both send as many rows, and of two processes each sends all of its gradients: a byte for four, and scales.
        assert 0.65 * dense_nbytes < expected["wire_nbytes"] - row["wire_nbytes"] < 0.78 * dense_nbytes


def test_experts_moved_where_losses_are_the_same(folder: Path) -> None:
    assert read_metrics(folder / "ep2-swapped")[-2]["moe_swaps"] > 0


def test_experts_had_copies_where_losses_are_the_same(folder: Path) -> None:
    rows = [row for row in read_metrics(folder / "ep2-copies") if "loss" in row]
    assert all(0 < row["moe_copies"] <= 2 * 2 for row in rows)  # layers, processes
    assert all(1 <= row["moe_busiest_after"] < row["moe_busiest_before"] for row in rows)
    chosen = [row["moe_busiest_before"] for row in rows]
    assert chosen[1] == chosen[2] != chosen[3] == chosen[4] != chosen[5]  # after steps 1, 2, 4 and 6
    copies = json.loads((folder / "ep2-copies" / "summary.json").read_text())["moe"]["copies"]
    assert rows[-1]["moe_copies"] == sum(map(len, copies))
    said = ", ".join(f"{expert} on {process}" for expert, process in copies[0])
    assert f"layer 0: {said}" in rows[-1]["moe_copied"]


def test_a_capacity_drops_and_says_so(folder: Path) -> None:
    for row in read_metrics(folder / "full"):
        if "loss" in row:
            # Half of the even share: at most that much is left of 2 layers' assignments.
            assert row["moe_dropped"] >= 4 * 32 * 2 * 2 / 2


def test_experts_keep_codes_only(folder: Path) -> None:
    exact, codes = (
        json.loads((folder / name / "summary.json").read_text())["saved_nbytes_per_token"] for name in ("ep2", "agoq")
    )
    # Exactly an expert keeps 32 values in and 4 x 48 inside for each of two assignments in two layers, in fp32.
    assert exact - codes > 2 * 2 * (4 * 48 + 32) * 4


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("name", "error"),
    [
        (
            "unrated",
            "ConfigError: moe.swap_every is 1, but there are no rates at none.json, by which swaps are decided; "
            "write them with laconic profile --moe, or",
        ),
        ("odd", "ConfigError: moe.expert_parallel is 3, but it must divide the number of processes (2)"),
        ("dense", "ModelError: moe.expert_parallel is 2, but LlamaForCausalLM has no mixture-of-experts block"),
        ("deep", "ConfigError: moe.depth is 2, but it must be at most 1"),
        ("greedy", "ConfigError: num_experts_per_tok of model.extra is 5, but it must be from 1 to the number of exp"),
    ],
)
def test_what_does_not_fit_is_refused_by_all(folder: Path, name: str, error: str, rank: int) -> None:
    assert (folder / f"{name}.{rank}.txt").read_text().startswith(error)
    assert not (folder / name).exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_with_other_experts_is_not_continued(folder: Path, rank: int) -> None:
    assert (
        (folder / f"eight.{rank}.txt")
        .read_text()
        .startswith("ConfigError: model.extra.num_experts is 8, but the run that wrote")
    )


def test_steps_in_which_one_process_has_router_logits_that_are_no_numbers_are_left_out(folder: Path) -> None:
    found = losses(folder / "nan")
    assert [step for step, loss in found.items() if math.isnan(loss)] == [2, 4]
    assert [row["skipped_steps"] for row in read_metrics(folder / "nan") if "loss" in row] == [0, 1, 1, 2, 2, 2]


@pytest.mark.slow
def test_a_process_killed_amid_a_swap_costs_the_steps_since_the_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    run_processes(tmp_path, "killed", 2)
    assert (tmp_path / "killed.0.txt").read_text().startswith("CollectiveError: one of ranks [0, 1] ended or stopped")
    assert not (tmp_path / "killed.1.txt").exists()
    run_processes(tmp_path, "revived", 2)
    assert exact_metrics(tmp_path / "killed") == exact_metrics(tmp_path / "whole")
    places = [json.loads((newest(tmp_path / name) / "experts.json").read_text()) for name in ("killed", "whole")]
    assert places[0] == places[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FOUR))
def test_four_processes_with_replicas_of_experts_are_alike(of_four: Path, name: str) -> None:
    assert_alike(of_four, name, "plain", 5e-3 if "q8" in name else ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_family_is_alike(of_four: Path, family: str) -> None:
    assert_alike(of_four, f"{family}-ep", family)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["broken-ddp", "broken-fsdp-bf16", "broken-agoq", "broken-fsdp-agoq"])
def test_four_processes_resume_bit_for_bit(of_four: Path, name: str) -> None:
    assert exact_metrics(of_four / f"{name}-broken") == exact_metrics(of_four / name)


def newest(run: Path) -> Path:
    """The last checkpoint of a run."""
    return max((run / "checkpoints").iterdir())


@pytest.mark.slow
def test_experts_that_change_places_change_nothing_else(of_four: Path) -> None:
    for name in ("swapped", "continued"):
        assert_alike(of_four, name, "plain")
        assert read_metrics(of_four / name)[-2]["moe_swaps"] > 0
    assert exact_metrics(of_four / "continued") == exact_metrics(of_four / "swapped")
    places = [json.loads((newest(of_four / name) / "experts.json").read_text()) for name in ("continued", "swapped")]
    assert places[0] == places[1]


@pytest.mark.slow
def test_experts_go_from_one_to_two_to_four_and_back(of_four: Path) -> None:
    # Two steps alone, one with each expert on two of four processes, one with it on one of them, the rest alone.
    train_alone(resumed(tiny_config(of_four, "resharded", SMOOTH_QWEN | {"moe.expert_parallel": None})))
    assert_alike(of_four, "resharded", "plain")
