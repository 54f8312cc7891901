"""Packed activations in models whose layers, sequences or parameters are spread over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import tensor_parallel as work
from tests.distributed.processes import run_ranks

pytestmark = pytest.mark.ci

CASES = [("llama", "plain"), ("llama", "sequence")]
SLOW_CASES = [("llama", "vocabulary"), ("llama", "loss"), ("qwen3", "plain"), ("mixtral", "vocabulary")]
ALL_CASES = [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)]

Results = list[dict[str, Any]]


def results_of(folder: Path, function: Any, num_ranks: int, *args: Any) -> Results:
    run_ranks(function, (num_ranks, str(folder), *args), num_ranks)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(num_ranks)]


@pytest.fixture(scope="module")
def by_torch(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results_of(tmp_path_factory.mktemp("torch"), work.torch_plans, 2, CASES)


@pytest.fixture(scope="module")
def by_torch_slowly(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results_of(tmp_path_factory.mktemp("torch"), work.torch_plans, 2, SLOW_CASES)


@pytest.fixture
def results(request: pytest.FixtureRequest, family: str, plan: str) -> Results:
    """The records of each rank that hold a case."""
    is_slow = (family, plan) in SLOW_CASES
    found: Results = request.getfixturevalue("by_torch_slowly" if is_slow else "by_torch")
    return found


@pytest.fixture(scope="module")
def by_transformers(tmp_path_factory: pytest.TempPathFactory) -> Results:
    families = ["qwen3", "mixtral"]
    return results_of(tmp_path_factory.mktemp("transformers"), work.transformers_plans, 2, families)


@pytest.fixture(scope="module")
def in_context(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results_of(tmp_path_factory.mktemp("context"), work.context_parallel, 2)


def cosines(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, float]:
    assert a.keys() == b.keys()
    flat = {name: (a[name].flatten().double(), b[name].flatten().double()) for name in a}
    return {name: float(x @ y / (x.norm() * y.norm()).clamp_min(1e-30)) for name, (x, y) in flat.items()}


def check_same_step(found: dict[str, Any], packed: dict[str, Any]) -> None:
    """Values as without packing, gradients near them and placed alike."""
    exact = found["exact"]
    assert torch.equal(exact["loss"], packed["loss"])
    assert torch.equal(exact["logits"], packed["logits"])
    assert exact["placements"] == packed["placements"]
    assert min(cosines(exact["grads"], packed["grads"]).values()) > 0.97


@pytest.mark.parametrize(("family", "plan"), ALL_CASES)
@pytest.mark.parametrize("order", ["packed", "late"])
def test_a_plan_of_torch_packs_what_a_rank_holds(results: Results, family: str, plan: str, order: str) -> None:
    for of_rank in results:
        found = of_rank[f"{family}-{plan}"]
        check_same_step(found, found[order])
        # The loss keeps the same with and without; mixtral's whole experts need tokens of the loss's size.
        exact, packed = (sum(n for name, n in found[key]["by_module"].items() if name) for key in ("exact", order))
        assert exact > 6 * packed


@pytest.mark.parametrize("order", ["packed", "late"])
def test_saved_bytes_of_layers_between_the_collectives_fall_with_the_ranks(by_torch: Results, order: str) -> None:
    for results in by_torch:
        alone, found = results["llama-alone"]["packed"]["by_module"], results["llama-plain"][order]["by_module"]
        assert alone.keys() == found.keys()
        for name in alone:
            if ".mlp" in name:
                # Rows of 80 values take two blocks of 64, rows of 160 three.
                assert found[name] == pytest.approx(alone[name] / 2, rel=0.03), name
            elif "self_attn" not in name:
                assert found[name] == alone[name], name


def test_projections_share_one_note_through_their_own_dtensors(by_torch: Results) -> None:
    for results in by_torch:
        for family, plan in CASES:
            saved = results[f"{family}-{plan}"]["packed"]["by_module"]
            assert not {name for name in saved if name.endswith(("k_proj", "v_proj", "o_proj", "up_proj", "down_proj"))}
            # A gathered input is a new tensor, which the first of its readers packs.
            first = {name for name in saved if name.endswith(("q_proj", "gate_proj"))}
            assert bool(first) == (plan == "sequence")


@pytest.mark.parametrize(("family", "plan"), ALL_CASES)
def test_decompressing_restores_the_parallel_model(results: Results, family: str, plan: str) -> None:
    for of_rank in results:
        exact, again = of_rank[f"{family}-{plan}"]["exact"], of_rank[f"{family}-{plan}"]["again"]
        assert exact["nbytes"] == again["nbytes"]
        assert all(torch.equal(exact["grads"][name], again["grads"][name]) for name in exact["grads"])


@pytest.mark.parametrize("plan", ["vocabulary", "sequence"])
def test_a_chunked_loss_is_right_over_a_vocabulary_on_several_ranks(by_torch: Results, plan: str) -> None:
    for results in by_torch:
        exact, chunked = results[f"unchunked-{plan}"], results[f"chunked-{plan}"]
        assert torch.allclose(exact["loss"], chunked["loss"], rtol=1e-6)
        assert min(cosines(exact["grads"], chunked["grads"]).values()) > 0.97
        # The head keeps its input exactly, so nothing but rounding of sums is in its own gradient.
        head = cosines(exact["grads"], chunked["grads"])["lm_head.weight"]
        assert head > 1 - 1e-6
        assert exact["placements"] == chunked["placements"]
        assert chunked["logits"].shape == (2, 0, work.VOCABULARY)
        assert 5 * chunked["nbytes"] < exact["nbytes"]


def test_a_chunked_loss_of_another_layout_is_refused_by_name(by_torch: Results) -> None:
    for results in by_torch:
        assert "loss is 'chunked', but the input of 'lm_head' is placed (Shard(dim=2),)" in results["chunked-rows"]
        assert "use ColwiseParallel for it, or loss='exact'" in results["chunked-rows"]


def test_codes_of_everything_train_in_parallel(by_torch: Results) -> None:
    for results in by_torch:
        exact, coded = results["trained-exact"], results["trained-coded"]
        assert coded[-1] < coded[0] - 0.3
        assert coded == pytest.approx(exact, abs=0.1)


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
@pytest.mark.ci
def test_a_plan_of_transformers_packs_what_a_rank_holds(by_transformers: Results, family: str) -> None:
    for results in by_transformers:
        found = results[family]
        check_same_step(found, found["packed"])
        saved = found["packed"]["by_module"]
        assert found["exact"]["nbytes"] > 5 * found["packed"]["nbytes"]
        assert not {name for name in saved if name.endswith("_proj")}
        assert found["exact"]["nbytes"] == found["again"]["nbytes"]


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_a_chunked_loss_is_right_in_a_plan_of_transformers(by_transformers: Results, family: str) -> None:
    for results in by_transformers:
        exact, chunked = results[family]["exact"], results[f"{family}-chunked"]
        assert torch.allclose(exact["loss"], chunked["loss"], rtol=1e-6)
        assert min(cosines(exact["grads"], chunked["grads"]).values()) > 0.97


def test_tensor_parallel_inside_of_fsdp2_packs_the_same_in_any_order(tmp_path: Path) -> None:
    for results in results_of(tmp_path, work.two_dimensions, 4):
        assert "FSDP2" in results["unmeasured"]
        for name in ("before", "between", "after"):
            check_same_step(results, results[name])
            assert results["exact"]["nbytes"] > 5 * results[name]["nbytes"]
            assert results[name]["by_module"] == results["before"]["by_module"]


@pytest.mark.slow
def test_transformers_tensor_parallel_inside_of_its_fsdp2(tmp_path: Path) -> None:
    for results in results_of(tmp_path, work.transformers_plans, 4, ["llama"]):
        check_same_step(results["llama"], results["llama"]["packed"])
        exact, packed = (
            sum(n for name, n in results["llama"][key]["by_module"].items() if name) for key in ("exact", "packed")
        )
        assert exact > 3.5 * packed


@pytest.mark.parametrize("name", ["packed", "chunked"])
def test_a_part_of_the_sequence_is_packed_and_attention_sees_all_of_it(in_context: Results, name: str) -> None:
    for results in in_context:
        assert min(cosines(results["alone"]["grads"], results["exact"]["grads"]).values()) > 1 - 1e-6
        assert torch.allclose(results["exact"]["loss"], results[name]["loss"], rtol=1e-6)
        assert min(cosines(results["exact"]["grads"], results[name]["grads"]).values()) > 0.97
        assert results["exact"]["nbytes"] > 5 * results[name]["nbytes"]


@pytest.mark.parametrize("name", ["attention", "mixer"])
def test_backward_outside_of_the_context_is_refused(in_context: Results, name: str) -> None:
    for results in in_context:
        assert "call loss.backward() inside of the block" in results[f"outside-{name}"]
