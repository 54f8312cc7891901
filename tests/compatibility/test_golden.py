"""What each release wrote is read by this one, and means what it meant. `tests.compatibility.write` made the files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from laconic.activations.recognize.plan import ActivationPlan
from laconic.cost import load_plan
from laconic.cost.comm.rates import WireRates
from laconic.cost.hardware.compute import Sensitivity
from laconic.cost.infer import InferenceRates
from laconic.cost.moe import MoERates
from laconic.errors import PlanError
from laconic.formats.archive import unzip
from laconic.formats.zipped import load_zipped
from laconic.moe.huggingface import load_sharded
from laconic.schedule.pipeline import PipelineSchedule
from laconic.schedule.pipelines import one_f_one_b
from laconic.schedule.streams import StreamPlan
from laconic.train.config.plan import plan_settings
from laconic.train.config.toml import load_config
from laconic.train.data.token_file import TokenFile
from laconic.train.report.run_reader import load_runs
from laconic.train.run import run
from laconic.train.signals import StopRequest
from tests.collectives.simulated import made_up_rates
from tests.compatibility.write import LINEAR, RUNS, STREAMS, digest, run_settings, sharded_model, sharded_step
from tests.cost.infer_models import RATES as INFERENCE_RATES
from tests.cost.moe.test_rates import rates as moe_rates
from tests.cost.test_choose import LARGE
from tests.train.runs import ALONE, losses

RELEASES = sorted(path for path in Path(__file__).parent.iterdir() if (path / "expected.json").exists())

pytestmark = pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)


def expected(release: Path) -> dict[str, Any]:
    return json.loads((release / "expected.json").read_text())


def test_plans_and_rates_mean_what_they_meant(release: Path) -> None:
    assert ActivationPlan.from_json((release / "activation_plan.json").read_text()) == LINEAR
    assert StreamPlan.from_json((release / "streams.json").read_text()) == STREAMS
    assert PipelineSchedule.parse((release / "pipeline.txt").read_text()) == one_f_one_b(2, 4)
    assert WireRates.load(release / "wire_rates.json") == made_up_rates()
    assert MoERates.load(release / "moe_rates.json") == moe_rates()
    assert InferenceRates.load(release / "infer_rates.json") == INFERENCE_RATES
    assert Sensitivity.load(release / "sensitivity.json").errors
    plan = load_plan(release / "plan.json")
    config = LARGE.model.config
    plan.check(config, stages=4, world_size=32, sequence_length=8192)
    with pytest.raises(PlanError, match="for a model with num_hidden_layers = 32, but this model has 31"):
        plan.check({**config, "num_hidden_layers": 31})
    assert json.loads(json.dumps(plan.to_dict())) == json.loads((release / "plan.json").read_text())
    settings = load_config(None, plan_settings(plan))
    assert (settings.nproc, settings.pipeline.split) == (32, plan.job.split)
    ActivationPlan.from_json(json.dumps(plan.activation_plan()))


@pytest.mark.parametrize("name", ["tensors.laconic", "tensors_best.laconic"])
def test_zipped_files_give_their_bytes_back(name: str, release: Path, tmp_path: Path) -> None:
    assert digest(load_zipped(release / name)) == expected(release)["tensors"]
    unzip(release / name, tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (release / "tensors.safetensors").read_bytes()
    assert digest(load_file(release / "tensors.safetensors")) == expected(release)["tensors"]


def test_token_files_are_opened(release: Path) -> None:
    (index,) = (release / "cache").glob("*.idx")
    file = TokenFile.open(index.with_suffix(""))
    texts = sorted((release / "corpus").iterdir())
    assert len(file.offsets) == len(texts) + 1
    assert [
        bytes(file.tokens[a : b - 1].astype("u1")) for a, b in zip(file.offsets, file.offsets[1:], strict=False)
    ] == [path.read_bytes() for path in texts]


@pytest.mark.parametrize("name", RUNS)
def test_runs_go_on(release: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(release, tmp_path / "there")
    monkeypatch.chdir(tmp_path / "there")
    assert load_config(f"{name}/config.toml").steps == 4
    (read,) = load_runs([name])
    assert [value for _, value in read.series("loss")] == expected(release)[name]["losses"][:4]
    assert run(load_config(None, run_settings(name, resume=True, steps=6)), ALONE, StopRequest()) == 0
    # Not to the bit: other machines and releases of torch add up in another order.
    assert list(losses(name).values()) == pytest.approx(expected(release)[name]["losses"], abs=2e-3)


def test_sharded_checkpoints_are_loaded(release: Path) -> None:
    model, optimizer = sharded_model()
    torch.nn.init.zeros_(model.get_parameter("model.norm.weight"))
    load_sharded(release / "sharded", model, optimizer)
    assert digest(model.state_dict()) == expected(release)["sharded"]
    assert sharded_step(model, optimizer) == pytest.approx(expected(release)["next_loss"], abs=1e-4)
