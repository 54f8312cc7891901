"""The model cut over two and four processes: the training of one, and the same decisions on every stage."""

import json
import math
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from transformers import AutoModelForCausalLM

from laconic.train.checkpoint.export import export
from laconic.train.report.metrics import read_metrics
from tests.distributed.pipelined import (
    BROKEN_RUNS,
    LAYERS,
    SLOW_BROKEN_RUNS,
    SLOW_SMOOTH_RUNS,
    SMOOTH,
    SMOOTH_RUNS,
    UNTIED,
    everything,
    more,
)
from tests.distributed.processes import run_joined
from tests.train.runs import AGOQ, exact_metrics, losses, tiny_config, train_alone

pytestmark = pytest.mark.ci

# As in test_parallel: 128 fp32 values near 5.5 are averaged, and this Adam's updates are smooth in their gradients.
ROUNDING = 4e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the runs of two processes, and those of one to compare with."""
    folder = tmp_path_factory.mktemp("pipelined")
    train_alone(tiny_config(folder, "alone", SMOOTH))
    train_alone(tiny_config(folder, "alone-untied", SMOOTH | UNTIED))
    run_joined(everything, (folder,), 2)
    return folder


@pytest.fixture(scope="module")
def more_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the slow runs, most of four processes, and those of one to compare with."""
    folder = tmp_path_factory.mktemp("more")
    train_alone(tiny_config(folder, "alone", SMOOTH))
    train_alone(tiny_config(folder, "alone-agoq", LAYERS | AGOQ))
    for world_size in (2, 4):
        run_joined(more, (folder,), world_size)
    return folder


@pytest.fixture
def runs(request: pytest.FixtureRequest, name: str) -> Path:
    """The folder with the run `name`."""
    is_slow = name in SLOW_SMOOTH_RUNS or name in SLOW_BROKEN_RUNS
    found: Path = request.getfixturevalue("more_folder" if is_slow else "folder")
    return found


def reference(name: str) -> str:
    return "alone-untied" if "untied" in name else "alone"


def _slow(names: Iterable[str]) -> list[ParameterSet]:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


SMOOTH_NAMES = [*SMOOTH_RUNS, "2-changed", *_slow(SLOW_SMOOTH_RUNS)]
BROKEN_NAMES = [*BROKEN_RUNS, *_slow(SLOW_BROKEN_RUNS)]


@pytest.mark.parametrize("name", SMOOTH_NAMES)
def test_losses_and_norms_do_not_depend_on_the_pipeline(runs: Path, name: str) -> None:
    rows, expected = read_metrics(runs / name), read_metrics(runs / reference(name))
    for field in ("loss", "validation_loss"):
        found = [row[field] for row in rows if field in row]
        assert found == pytest.approx([row[field] for row in expected if field in row], abs=ROUNDING)
    norms = [row["grad_norm"] for row in rows if "grad_norm" in row]
    # The same sums in another order, and the embedding counted once however many copies it has.
    assert norms == pytest.approx([row["grad_norm"] for row in expected if "grad_norm" in row], rel=1e-4)


@pytest.mark.parametrize("name", SMOOTH_NAMES)
def test_weights_do_not_depend_on_the_pipeline(runs: Path, name: str, tmp_path: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(export(runs / reference(name), tmp_path / "alone"))
    found = AutoModelForCausalLM.from_pretrained(export(runs / name, tmp_path / name))
    theirs = dict(found.named_parameters())
    assert theirs.keys() == dict(expected.named_parameters()).keys()
    for parameter_name, one in expected.named_parameters():
        # Six updates of at most lr / eps = 0.2 times a gradient error of 2^-20 each.
        assert torch.allclose(one, theirs[parameter_name], rtol=0, atol=6 * 0.2 * 2**-20), parameter_name


@pytest.mark.parametrize("name", BROKEN_NAMES)
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(runs: Path, name: str, tmp_path: Path) -> None:
    assert exact_metrics(runs / f"{name}-broken") == exact_metrics(runs / name)
    whole, broken = (export(runs / run, tmp_path / run) for run in (name, f"{name}-broken"))
    assert (whole / "model.safetensors").read_bytes() == (broken / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["4-fsdp-agoq", "4-ddp-agoq"])
def test_everything_compressed_trains_alike_in_a_pipeline(runs: Path, name: str) -> None:
    expected, found = losses(runs / "alone-agoq"), losses(runs / name)
    # Codes of other micro-batches differ by up to 1/254 of their block's largest value.
    assert list(found.values()) == pytest.approx(list(expected.values()), abs=0.01)


def test_stages_keep_compressed_activations(folder: Path) -> None:
    def kept(name: str) -> float:
        value: float = json.loads((folder / name / "summary.json").read_text())["saved_nbytes_per_token"]
        return value

    # The stages together keep what one process keeps, but for masks and rotary tables that each of them makes.
    assert kept("2-1f1b") == pytest.approx(kept("alone"), rel=0.03)
    assert kept("2-1f1b-nf4") < 0.6 * kept("2-1f1b")


def test_bytes_between_stages_are_counted(folder: Path) -> None:
    model = AutoModelForCausalLM.from_config(_hf_config(folder / "2-untied"))
    votes_nbytes = 4 * 8
    # Rank 0 of two stages sends hidden states [2, 32, 32] in fp32 for two micro-batches. In its first step it also
    # sends, as the schedule's opening, one int32.
    first = read_metrics(folder / "2-untied")[0]
    assert first["wire_nbytes"] == 2 * 2 * 32 * 32 * 4 + votes_nbytes + 4
    # A tied embedding's gradient is added up between the ends: 2 (W - 1) / W = 1 for two.
    embedding_nbytes = 4 * model.get_input_embeddings().weight.numel()
    assert read_metrics(folder / "2-1f1b")[0]["wire_nbytes"] == first["wire_nbytes"] + embedding_nbytes


def _hf_config(run_dir: Path) -> object:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(run_dir / "checkpoints" / "step-00000006")


def test_a_bad_loss_on_the_last_stage_is_skipped_by_all(folder: Path) -> None:
    values = losses(folder / "2-nan")
    assert [step for step, loss in values.items() if math.isnan(loss)] == [2]
    rows = [row for row in read_metrics(folder / "2-nan") if "loss" in row]
    assert [row["skipped_steps"] for row in rows] == [0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("stages", "pipeline.stages is 3, but it must divide the number of processes (2)"),
        ("uneven", "batch_size is 4, but it must be a multiple of replicas x micro-batches (1 x 3)"),
        ("layers", "the model has 2 decoder layers, but pipeline.stages x pipeline.virtual_stages asks for 4"),
        ("settings", "optimizer.learning_rate is 0.001 on rank 0 and 0.002 on rank 1"),
    ],
)
def test_every_process_refuses_what_cannot_be_done(folder: Path, name: str, message: str) -> None:
    for rank in range(2):
        assert (folder / f"{name}.{rank}.txt").read_text().startswith(f"ConfigError: {message}")
    assert not (folder / name).exists()


def test_a_run_has_the_timeline_of_its_third_step(folder: Path) -> None:
    name = next(iter(SMOOTH_RUNS))
    found = json.loads((folder / name / "timeline.json").read_text())
    assert (found["version"], found["step"]) == (1, 3)
    (group,) = found["groups"]
    assert [lane["name"] for lane in group["lanes"]] == ["rank 0", "rank 1"]
    passes = {task for lane in group["lanes"] for task, _, _ in lane["tasks"]}
    micro_batches = {task[2:] for task in passes}
    assert passes == {f"{stage}{kind}{micro}" for stage in range(2) for kind in "FB" for micro in micro_batches}
    starts = {task: start for lane in group["lanes"] for task, start, _ in lane["tasks"]}
    ends = {task: end for lane in group["lanes"] for task, _, end in lane["tasks"]}
    assert min(starts.values()) == 0
    for micro in micro_batches:  # on one machine, whose processes share a clock: what a stage needs has been made
        assert ends[f"0F{micro}"] <= starts[f"1F{micro}"] + 1e-3
        assert ends[f"1B{micro}"] <= starts[f"0B{micro}"] + 1e-3
