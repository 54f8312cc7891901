"""The study runs, resumes and refuses to mix setups; what it measures is not asserted."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from benchmarks import afi
from benchmarks import run as command
from benchmarks.afi_networks import AFI_NAME, AT_BUDGET, NETWORKS, build, stages
from benchmarks.fashion_mnist import fashion_mnist
from laconic.errors import DataError
from netlab import why_not
from tests.benchmark_runs import tables

SETUP = afi.Setup(train_images=64, test_images=64, epochs=1, random_images=True)


def test_networks_of_a_seed_start_from_the_same_weights() -> None:
    models = {name: dict(build(name, 3).named_parameters()) for name in NETWORKS}
    common = models[AT_BUDGET]
    for parameters in models.values():
        assert all(torch.equal(parameters[name], value) for name, value in common.items())
    assert not all(torch.equal(value, dict(build(AT_BUDGET, 4).named_parameters())[n]) for n, value in common.items())


@pytest.mark.ci
def test_a_study_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(afi, "NETWORKS", {name: NETWORKS[name] for name in (AT_BUDGET, AFI_NAME)})
    path = tmp_path / "study.json"
    first = afi.extend(path, SETUP, seeds=1, most=1)
    assert [(each.network, each.seed, each.bits) for each in first] == [(AT_BUDGET, 0, 32)]
    everything = afi.extend(path, SETUP, seeds=1)
    assert everything[0] == first[0]
    assert [(each.network, each.bits) for each in everything] == [
        (AT_BUDGET, 32), (AFI_NAME, 32), (AT_BUDGET, 4), (AFI_NAME, 4),
    ]  # fmt: skip
    by_bits = {(each.network, each.bits): each for each in everything}
    for name in (AT_BUDGET, AFI_NAME):
        assert by_bits[name, 32].kept_nbytes > 5 * by_bits[name, 4].kept_nbytes
    assert afi.load(path, SETUP) == everything == afi.extend(path, SETUP, seeds=1)
    accuracy, bits = afi.tables(everything, SETUP)
    assert len(accuracy.rows) == len(bits.rows) == 2
    with pytest.raises(DataError, match=r"study.json holds trainings with .*'epochs': 1.*'epochs': 2.*name another"):
        afi.load(path, afi.Setup(64, 64, 2, random_images=True))
    path.write_text(json.dumps({"setup": json.loads(path.read_text())["setup"], "trainings": []}))
    assert afi.load(path, SETUP) == []
    pytest.importorskip("matplotlib")
    afi.draw(everything, tmp_path / "study.png")
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")


def test_attention_of_a_network_that_has_learned_nothing_is_even() -> None:
    model = build(AFI_NAME, 0)
    found = afi._attention(model, torch.randn(2, 1, 28, 28))
    assert len(found) == len(stages(model)) == 3
    for stage in found:
        for i, (means, deviations) in enumerate(zip(stage["mean"], stage["deviation"], strict=True), 1):
            assert means == pytest.approx([1 / i] * i + [0.0] * (len(means) - i))
            assert deviations == pytest.approx([0.0] * len(deviations), abs=1e-6)


def test_an_interval_is_students() -> None:
    # t of 2 degrees of freedom at 97.5 % is 4.3027.
    center, half = afi.interval([1.0, 2.0, 3.0])
    assert (center, half) == pytest.approx((2.0, 4.3027 / 3**0.5), abs=1e-4)


def test_files_of_the_dataset_are_read_as_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASHION_MNIST", str(tmp_path))
    with pytest.raises(DataError, match=r"train-images.* is not in .*install .*dataset-fashion-mnist"):
        fashion_mnist("train", 1)
    pixels = torch.arange(2 * 28 * 28, dtype=torch.int64).remainder(256).to(torch.uint8)
    sizes = b"".join(size.to_bytes(4, "big") for size in (2, 28, 28))
    images = bytes([0, 0, 8, 3]) + sizes + bytes(pixels.tolist())
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
    labels = bytes([0, 0, 8, 1]) + (2).to_bytes(4, "big") + bytes([7, 9])
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    data = fashion_mnist("train", 10)
    assert data.labels.tolist() == [7, 9]
    assert data.pixels.shape == (2, 1, 28, 28)
    torch.testing.assert_close(data.pixels.flatten() * 0.3530 + 0.2860, pixels / 255)


@pytest.mark.slow
def test_step_benchmark_compares_with_checkpointing() -> None:
    found = tables("vision-step", "--smoke")
    for row in ("exact", "laconic, 4 bits", "checkpointing of blocks", "checkpointing of stages"):
        assert f"\n| {row} | " in found
    assert "## ResNet-18, " in found


@pytest.mark.slow
def test_step_benchmark_measures_one_network_alone() -> None:
    found = tables("vision-step", "--smoke", "--only", "ResNet-50")
    assert [line.split(",")[0] for line in found.splitlines() if line.startswith("## ")] == ["## ResNet-50"]


@pytest.mark.slow
def test_bits_benchmark_compares_two_four_and_eight() -> None:
    found = tables("vision-bits", "--smoke")
    for row in ("8 bits, block 64", "4 bits, block 64", "2 bits, block 64", "2 bits, block 256"):
        assert f"\n| {row} | " in found


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("vision-step", r"--only 'ResNet-51': vision-step has no such case; its cases are 'ResNet-18', 'ResNet-50', "),
        ("vision-ddp", r"--only 'ResNet-51': vision-ddp has no such case; it always runs whole"),
    ],
)
def test_a_case_that_a_benchmark_does_not_have_is_refused(name: str, why: str) -> None:
    with pytest.raises(SystemExit, match=why):
        command.main([name, "--part", "--threads", str(torch.get_num_threads()), "--only", "ResNet-51"])


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason="hosts need network namespaces")
def test_data_parallel_benchmark_counts_bytes_on_the_wire() -> None:
    found = tables("vision-ddp", "--smoke")
    rows = [line.strip("| ").split(" | ") for line in found.splitlines() if line.startswith("| ")]
    sent = {row[0]: float(row[3]) for row in rows[2:]}
    assert sent["8-bit gradients"] < 0.4 * sent["DDP over gloo"]
