"""One process, two with DDP, two with FSDP2: the same training, and the same decisions on every process."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from laconic.train.checkpoint.export import export
from laconic.train.checkpoint.save_load import find_checkpoint
from laconic.train.distributed.data_parallel import decoder_layers
from laconic.train.model import build_model
from laconic.train.report.metrics import read_metrics
from laconic.train.report.run_dir import latest_name
from tests.distributed.pair import RUNS, SLOW_RUNS
from tests.train.runs import ALONE, exact_metrics, losses, tiny_config

# A loss near log(257) = 5.5 is a mean of 128 fp32 values: 5.5 * 128 * 2^-24 = 4e-5 if all roundings add up. The runs
# compared use an Adam whose eps keeps updates within 0.2 times their gradient, so rounding stays rounding.
ROUNDING = 4e-5

pytestmark = pytest.mark.ci  # 27 trainings of two processes

NAMES = [*RUNS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_RUNS)]


@pytest.fixture
def runs(request: pytest.FixtureRequest, pair: Path, name: str) -> Path:
    """The folder with the run `name`."""
    found: Path = request.getfixturevalue("pair_with_more") if name in SLOW_RUNS else pair
    return found


@pytest.mark.parametrize(
    "name",
    [
        *("smooth-ddp", "smooth-fsdp", "smooth-accumulated", "smooth-1-2-1", "smooth-ddp-fsdp", "smooth-fsdp-ddp"),
        *("smooth-chunked-fsdp", pytest.param("smooth-chunked-ddp", marks=pytest.mark.slow)),
    ],
)
def test_losses_do_not_depend_on_the_processes(request: pytest.FixtureRequest, pair: Path, name: str) -> None:
    if name == "smooth-chunked-ddp":
        request.getfixturevalue("pair_with_more")
    expected = losses(pair / "smooth-alone")
    found = losses(pair / name)
    assert list(found) == list(expected) == [1, 2, 3, 4, 5, 6]
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, abs=ROUNDING), step
    rows, expected_rows = read_metrics(pair / name), read_metrics(pair / "smooth-alone")
    validation = [row["validation_loss"] for row in rows if "validation_loss" in row]
    expected_validation = [row["validation_loss"] for row in expected_rows if "validation_loss" in row]
    # A run that was stopped at a step with an evaluation has that evaluation too.
    assert validation == pytest.approx(expected_validation, abs=ROUNDING)


def test_weights_do_not_depend_on_the_processes(pair: Path, tmp_path: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(export(pair / "smooth-alone", tmp_path / "alone"))
    for name in ("smooth-ddp", "smooth-fsdp"):
        found = AutoModelForCausalLM.from_pretrained(export(pair / name, tmp_path / name))
        for one, two in zip(expected.parameters(), found.parameters(), strict=True):
            # Six updates of at most lr / eps = 0.2 times a gradient error of 2^-20 each.
            assert torch.allclose(one, two, rtol=0, atol=6 * 0.2 * 2**-20)


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(runs: Path, name: str) -> None:
    assert exact_metrics(runs / f"{name}-broken") == exact_metrics(runs / name)
    found = find_checkpoint(runs / name, ALONE)
    assert found.world_size == 2
    suffix = ".safetensors.laconic" if (RUNS | SLOW_RUNS)[name].get("checkpoint.zip") else ".distcp"
    assert all((found.path / f"__{rank}_0{suffix}").is_file() for rank in range(2))


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_ends_with_the_same_weights(runs: Path, name: str, tmp_path: Path) -> None:
    whole, broken = (export(runs / run, tmp_path / run) for run in (name, f"{name}-broken"))
    assert (whole / "model.safetensors").read_bytes() == (broken / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_bf16_stays_close_to_fp32(pair_with_more: Path) -> None:
    # bf16 rounds to 2^-9; a loss near 5.5 from logits near 0 moves by less than four such steps.
    ddp = losses(pair_with_more / "ddp-bf16")
    assert ddp[1] == pytest.approx(losses(pair_with_more / "smooth-alone")[1], abs=2**-7)
    for run in ("ddp-bf16", "fsdp-bf16"):
        assert losses(pair_with_more / run)[6] < losses(pair_with_more / run)[1]


@pytest.mark.parametrize("name", [pytest.param("ddp-agoq", marks=pytest.mark.slow), "fsdp-agoq", "agoq-1-2-1"])
def test_everything_compressed_trains_alike_on_any_number_of_processes(
    request: pytest.FixtureRequest, pair: Path, name: str
) -> None:
    if name == "ddp-agoq":
        request.getfixturevalue("pair_with_more")
    expected, found = losses(pair / "agoq-alone"), losses(pair / name)
    assert list(found) == list(expected)
    # Codes of a gradient that is shared by two are made of other values, each within 1/254 of its block's largest.
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, abs=0.01), step


def test_both_refuse_the_moments_of_another_optimizer(pair: Path) -> None:
    for error in errors(pair, "kind"):
        assert error.startswith("ConfigError: optimizer.kind is 'adamw8bit', but the run that wrote")


def test_codes_take_a_quarter_of_the_bytes(pair: Path) -> None:
    model = build_model(tiny_config(pair, "-").model, 257, 32, 0)
    dense_nbytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    sent = read_metrics(pair / "nan-agoq")[0]["wire_nbytes"]
    # One byte per element and 4 per 128, of which a vector of 32 has one of its own.
    assert dense_nbytes / 4 < sent < dense_nbytes / 3.3


def test_the_summary_counts_both_processes(pair: Path) -> None:
    summary = json.loads((pair / "smooth-fsdp" / "summary.json").read_text())
    assert (summary["world_size"], summary["parallel"]) == (2, "fsdp")


def test_ddp_sends_each_gradient_once(pair: Path) -> None:
    model = build_model(tiny_config(pair, "-").model, 257, 32, 0)
    gradients_nbytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    votes_nbytes = 3 * 8
    # 2 (W - 1) / W = 1 for two processes.
    for row in read_metrics(pair / "smooth-ddp"):
        if "loss" in row:
            assert row["wire_nbytes"] == gradients_nbytes + votes_nbytes
    accumulated = read_metrics(pair / "smooth-accumulated")[0]
    assert accumulated["wire_nbytes"] == gradients_nbytes + votes_nbytes


def test_fsdp_gathers_layers_twice_and_the_rest_once(pair: Path) -> None:
    model = build_model(tiny_config(pair, "-").model, 257, 32, 0)
    layers = sum(parameter.numel() for layer in decoder_layers(model) for parameter in layer.parameters())
    rest = model.num_parameters() - layers
    # Per parameter (W = 2): half of it sent per gather, and half per reduce-scatter. 257 rows are padded to 258.
    expected_nbytes = 4 * (layers * (0.5 + 0.5 + 0.5) + (rest + 32) * (0.5 + 0.5))
    found = read_metrics(pair / "smooth-fsdp")[0]["wire_nbytes"]
    assert expected_nbytes <= found <= expected_nbytes + 100  # the norm and the votes


@pytest.mark.parametrize("name", ["nan-ddp", "nan-fsdp", "nan-agoq"])
def test_a_bad_loss_on_one_process_is_skipped_by_both(pair: Path, name: str) -> None:
    values = losses(pair / name)
    assert [step for step, loss in values.items() if math.isnan(loss)] == [2, 4]
    rows = [row for row in read_metrics(pair / name) if "loss" in row]
    assert [row["skipped_steps"] for row in rows] == [0, 1, 1, 2, 2, 2]
    assert latest_name(pair / name) == "step-00000006"


def errors(pair: Path, name: str) -> list[str]:
    return [(pair / f"{name}.{rank}.txt").read_text() for rank in range(2)]


def test_both_stop_when_one_has_nothing_finite_any_more(pair: Path) -> None:
    for error in errors(pair, "nan-all"):
        assert error.startswith("TrainingError: loss or gradient was not finite in 5 steps in a row, 3 to 7")
    assert find_checkpoint(pair / "nan-all", ALONE).step == 6


def test_a_full_disk_on_one_process_fails_the_save_on_both(pair: Path) -> None:
    for error in errors(pair, "full"):
        assert error.startswith("CheckpointError: checkpoint ")
        assert "step-00000006: rank " in error
        assert "No space left on device" in error
    assert sorted(path.name for path in (pair / "full" / "checkpoints").iterdir()) == ["latest", "step-00000003"]
    assert find_checkpoint(pair / "full", ALONE).step == 3


def test_both_refuse_a_batch_that_does_not_divide(pair: Path) -> None:
    for error in errors(pair, "batch"):
        assert error == ("ConfigError: batch_size is 3, but it must be a multiple of world size x accumulation (2 x 1)")


def test_both_refuse_a_damaged_checkpoint(pair: Path) -> None:
    for error in errors(pair, "damaged"):
        assert "step-00000006 is damaged: __1_0.distcp has" in error
        assert "--checkpoint.load 3" in error
    assert find_checkpoint(pair / "damaged", ALONE).step == 6
