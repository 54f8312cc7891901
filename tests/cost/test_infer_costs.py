"""Seconds and bytes of inference: formulas of the paper, activated experts by enumeration, both slicings, memory."""

from __future__ import annotations

import itertools
from dataclasses import replace
from itertools import combinations, product
from math import comb
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.cost.comm.rates import Line
from laconic.cost.infer import (
    MODELS,
    InferenceCostModel,
    InferenceRates,
    Split,
    WorkerRates,
    Workload,
    largest_batch,
    worker_nbytes,
)
from laconic.cost.infer.costs import active_experts, reach
from laconic.cost.infer.planner import replicated_seconds
from laconic.cost.infer.rates import ExchangeCosts, LinkPair
from laconic.errors import ConfigError, PlanError
from laconic.infer.split import EngineSplit
from laconic.options import EXPERT_ROWS_FROM_CODES
from laconic.schedule.inference import InferencePlan, Slicing
from tests.cost.infer_models import LINK, RATES, SLOW_WORKER, model_of, shape_of

PROMPT = Workload.prefill(64)
DECODE = Workload.decode(64, 32)
OF_EXPERTS = replace(RATES, experts=SLOW_WORKER).to_dict()["experts"]


@pytest.mark.parametrize(("experts", "top_k", "rows"), [(4, 1, 1), (4, 2, 2), (5, 2, 3), (3, 3, 2)])
def test_activated_experts_are_the_mean_over_all_routings(experts: int, top_k: int, rows: int) -> None:
    one = list(combinations(range(experts), top_k))
    counts = [len(set().union(*routing)) for routing in product(one, repeat=rows)]
    assert active_experts(experts, top_k / experts, rows) == pytest.approx(sum(counts) / len(counts))


@pytest.mark.parametrize("experts", [4, 6, 8])
def test_a_row_reaches_a_worker_with_the_enumerated_probability(experts: int) -> None:
    for top_k, held in product(range(1, experts + 1), range(experts + 1)):
        hit = sum(min(chosen) < held for chosen in combinations(range(experts), top_k))
        assert reach(held, experts, top_k) == pytest.approx(hit / comb(experts, top_k))


def test_prefill_follows_the_papers_lines() -> None:
    """Section 4.1, with 3 products per gated expert, and multi-head attention."""
    shape = replace(shape_of(num_layers=1), vocab_size=0)
    link = LinkPair(Line(3e-4, 2e-9), Line(3e-4, 2e-9))
    rates = InferenceRates(Line(1e-4, 1e-12), Line(2e-4, 3e-12), link, grouped=False)
    length, batch, split = 512, 3, Split(1, 2)
    model = InferenceCostModel(shape, rates, Workload.prefill(length), deduplicated=False)
    times = model.block_times(batch, split, InferencePlan())
    projections = 5 * 1e-4 + 1e-12 * batch * length * (4 * 64 * 64 + 64 * 16)
    kernel = 2e-4 + 3e-12 * batch * 4 * length**2 / 2 * (16 + 16)
    assert times.attention == pytest.approx(projections + kernel)
    assert times.shared == pytest.approx(3 * (1e-4 + 1e-12 * batch * length * 64 * 128))
    rows_of_expert = batch * length * 2 / 16
    assert times.experts == pytest.approx((8 * 3 * (1e-4 + 1e-12 * rows_of_expert * 64 * 96),))
    assert times.dispatch == times.combine == pytest.approx((3e-4 + 2e-9 * batch * length * 2 * 64 * 2,))


def test_a_link_is_as_slow_as_its_busier_end() -> None:
    model = replace(model_of(PROMPT), deduplicated=False)
    sent = {str(split): model.sent_nbytes(1, split) for split in (Split(1, 4), Split(2, 2), Split(4, 1), Split(6, 2))}
    whole = 64 * 2 * 64 * 2  # tokens, copies, hidden, bytes: what one attention worker sends
    assert sent == {"1:4": whole, "2:2": whole, "4:1": 4 * whole, "6:2": 3 * whole}


def test_a_row_travels_once_to_a_worker_with_several_of_its_experts() -> None:
    once, every = model_of(PROMPT), replace(model_of(PROMPT), deduplicated=False)
    assert once.sent_nbytes(1, Split(1, 1)) == every.sent_nbytes(1, Split(1, 1)) / 2
    # With one expert per worker nothing is saved.
    assert once.sent_nbytes(1, Split(1, 16)) == pytest.approx(every.sent_nbytes(1, Split(1, 16)))
    # A group of experts is a smaller worker: in slices of experts rows travel again, up to once per expert.
    groups = [n * once.sent_nbytes(1, Split(1, 2), n) for n in (1, 2, 4, 8)]
    assert groups == sorted(groups)
    assert groups[-1] == pytest.approx(every.sent_nbytes(1, Split(1, 2)))


def test_in_decode_slices_of_tokens_read_weights_again_and_slices_of_experts_do_not() -> None:
    model = model_of(DECODE, replace(RATES, gemm=Line(0.0, 0.0)))
    for rows in (2, 8, 64):

        def total(slicing: str, slices: int, rows: int = rows) -> float:
            return sum(model.block_times(rows, Split(1, 2), InferencePlan(1, slices, slicing=slicing)).experts)  # type: ignore[arg-type]

        whole = total("tokens", 1)
        assert total("experts", 2) == total("experts", 4) == pytest.approx(whole)
        assert whole < total("tokens", 2) < total("tokens", 4)
    # A long prompt activates all experts in every slice.
    prompt = model_of(PROMPT, replace(RATES, gemm=Line(0.0, 0.0)))
    sliced = [sum(prompt.block_times(64, Split(1, 2), InferencePlan(1, n)).experts) for n in (1, 4)]
    assert sliced[1] == pytest.approx(4 * sliced[0])


def test_decode_is_linear_in_rows_and_in_cached_tokens() -> None:
    def seconds(batch: int, context: int) -> float:
        return model_of(Workload(1, context)).attention_seconds(batch)

    assert seconds(3, 100) - seconds(2, 100) == pytest.approx(seconds(2, 100) - seconds(1, 100))
    assert seconds(2, 300) - seconds(2, 200) == pytest.approx(seconds(2, 200) - seconds(2, 100))
    assert seconds(2, 200) > seconds(2, 100)


def test_prompts_are_quadratic_in_their_length() -> None:
    first, second, third = (model_of(Workload(length)).attention_seconds(1) for length in (100, 200, 300))
    assert third - 2 * second + first == pytest.approx(2e-12 * 4 * 32 / 2 * 2 * 100**2)


def test_experts_are_planned_where_the_engine_puts_them() -> None:
    """Of each worker and slice of experts, what a row has of them, for all that there are up to 64."""
    for num_experts in range(1, 65):
        shape = replace(shape_of(), num_experts=num_experts, top_k=1)
        shares = tuple(2.0 * (number + 1) / (num_experts * (num_experts + 1)) for number in range(num_experts))
        model = InferenceCostModel(shape, RATES, PROMPT, shares)
        for workers in range(1, num_experts + 1):
            held = [EngineSplit(1, workers).expert_range(worker, num_experts) for worker in range(workers)]
            expected = [sum(shares[expert] for expert in each) for each in held]
            assert [load for load, _ in model._held(8.0, workers, 0, 1)] == pytest.approx(expected)
            uniform = InferenceCostModel(shape, RATES, PROMPT)._held(8.0, workers, 0, 1)
            assert uniform[0][0] == pytest.approx(max(map(len, held)) / num_experts)


def test_uniform_shares_are_the_uniform_formula() -> None:
    uniform = model_of(DECODE)
    measured = replace(uniform, shares=(2 / 16,) * 16)
    for plan in (InferencePlan(), InferencePlan(1, 4), InferencePlan(1, 4, slicing="experts")):
        one, two = (model.block_times(32, Split(1, 4), plan) for model in (uniform, measured))
        assert one.experts == pytest.approx(two.experts)


def test_skew_slows_the_busiest_worker_of_a_prompt_and_spares_weights_in_decode() -> None:
    shares = (0.9, 0.7) + (0.4 / 14,) * 14
    arithmetic = replace(RATES, gemm=Line(0.0, 1e-9), read_seconds_per_byte=0.0)
    reading = replace(RATES, gemm=Line(0.0, 0.0))
    (even,), (skewed,) = (
        replace(model_of(PROMPT, arithmetic), shares=given).block_times(1, Split(1, 4), InferencePlan()).experts
        for given in ((), shares)
    )
    assert skewed / even == pytest.approx((0.9 + 0.7 + 2 * 0.4 / 14) / (4 * 2 / 16))  # of the first worker
    (even,), (skewed,) = (
        replace(model_of(DECODE, reading), shares=given).block_times(4, Split(1, 1), InferencePlan()).experts
        for given in ((), shares)
    )
    assert skewed < even


@pytest.mark.parametrize(
    ("shares", "message"),
    [((0.5,) * 3, "shares has 3 entries"), ((0.1,) * 16, "add up to 1.6"), ((2.0,) + (0.0,) * 15, "from 0 to 1")],
)
def test_impossible_shares_are_refused(shares: tuple[float, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        replace(model_of(PROMPT), shares=shares)


@pytest.mark.parametrize(
    "fields", [{"new_tokens": 0}, {"new_tokens": 2, "reserved": 1}, {"new_tokens": 1, "requests": 0}]
)
def test_impossible_workloads_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(PlanError, match="must be a whole number"):
        Workload(**fields)


@settings(max_examples=60)
@given(
    st.integers(1, 12),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 300),
    st.integers(1, 6),
    st.booleans(),
    st.integers(20_000_000, 2_000_000_000),
)
def test_the_largest_batch_fits_and_one_more_does_not(
    workers: int, attention: int, r1: int, length: int, layers: int, whole: bool, memory: int
) -> None:
    model = model_of(Workload.prefill(length, 8), num_layers=layers)
    split = Split(workers, 1 if attention == 1 else workers) if whole else Split(attention, workers)

    def fullest(batch: int) -> float:
        found = worker_nbytes(model, split, batch, r1, whole=whole)
        return max(sum(of.values()) for of in found.values())

    limit = largest_batch(model, split, memory, r1, whole=whole)
    assert fullest(limit.batch + 1) > memory
    assert not limit.batch or fullest(limit.batch) <= memory
    assert limit.kind in limit.nbytes[limit.worker]


def test_weights_of_roles_add_up_to_the_model() -> None:
    model = model_of(PROMPT)
    roles = worker_nbytes(model, Split(1, 1), 0)
    assert sum(of["weights"] for of in roles.values()) == model.shape.num_parameters * 2
    (whole,) = worker_nbytes(model, Split(4, 1), 0, whole=True).values()
    assert whole["weights"] == model.shape.num_parameters * 2
    shared = worker_nbytes(model, Split(1, 3), 0)["expert worker"]["weights"]
    assert shared == model.shape.experts_parameters(6) * 2  # 16 experts on 3 workers: one has 6


def test_what_limits_is_named() -> None:
    model = model_of(Workload.decode(20_000, 100))
    limit = largest_batch(model, Split(1, 2), 200_000_000)
    assert (limit.worker, limit.kind) == ("attention worker", "key-value cache")
    assert str(limit).startswith("attention worker: key-value cache (weights ")
    tight = largest_batch(model, Split(1, 2), 1_000_000)
    assert (tight.batch, tight.worker, tight.kind) == (0, "expert worker", "weights")
    roomy = largest_batch(model, Split(1, 2), 10_000_000, expert_memory_nbytes=10**9)
    assert (roomy.batch, roomy.worker) == (largest_batch(model, Split(1, 16), 10_000_000).batch, "attention worker")
    small = largest_batch(model, Split(1, 2), 10**9, expert_memory_nbytes=1_000_000)
    assert (small.batch, small.worker, small.kind) == (0, "expert worker", "weights")
    with pytest.raises(PlanError, match="memory_nbytes is 0"):
        largest_batch(model, Split(1, 2), 0)
    with pytest.raises(PlanError, match="expert_memory_nbytes is 0"):
        largest_batch(model, Split(1, 2), 1, expert_memory_nbytes=0)


def test_rates_come_back_from_their_file(tmp_path: Path) -> None:
    exchange = ExchangeCosts(Line(1e-4, 1e-9, 0.1), Line(2e-4, 3e-9, 0.2))
    rates = replace(RATES, links={"3:5": LINK}, exchange=exchange)
    rates.save(tmp_path / "new" / "rates.json")
    assert InferenceRates.load(tmp_path / "new" / "rates.json") == rates
    assert rates.link_of(3, 5) is LINK
    assert replace(rates, link=LinkPair(Line(0, 0), Line(0, 0))).link_of(5, 3) != LINK
    assert "experts" not in rates.to_dict()  # which releases before expert workers' rates read, too
    two = replace(rates, experts=SLOW_WORKER)
    two.save(tmp_path / "two.json")
    assert InferenceRates.load(tmp_path / "two.json") == two


def test_rates_of_two_kinds_are_put_together(tmp_path: Path) -> None:
    exchange = ExchangeCosts(Line(1e-4, 1e-9), Line(2e-4, 3e-9))
    slow = InferenceRates(Line(1, 2), Line(3, 4), LINK, 5, exchange=exchange, source="slow")
    for name, rates in {"fast": RATES, "slow": slow}.items():
        rates.save(tmp_path / name)
    both = InferenceRates.load(tmp_path / "fast", tmp_path / "slow")
    experts = WorkerRates(Line(1, 2), 5, True, Line(2e-4, 3e-9))
    assert both == replace(RATES, experts=experts, source="made up; expert workers: slow")
    assert both.are_of_two_kinds
    assert not RATES.are_of_two_kinds
    assert not RATES.with_experts(RATES).are_of_two_kinds
    both.save(tmp_path / "both")
    with pytest.raises(ConfigError, match="the rates of attention workers have `experts` already"):
        InferenceRates.load(tmp_path / "both", tmp_path / "slow")
    with pytest.raises(ConfigError, match="the rates of expert workers have `experts` already"):
        InferenceRates.load(tmp_path / "fast", tmp_path / "both")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "laconic moe rates"}, "no laconic inference rates file"),
        ({"version": 1}, "version is 1.*measure with laconic profile --infer"),
        ({"exchange": {"attention": RATES.to_dict()["gemm"]}}, "exchange.experts is missing"),
        ({"read_seconds_per_byte": -1}, "read_seconds_per_byte is -1"),
        ({"link": {}}, "link.dispatch is missing"),
        ({"links": {"3": RATES.to_dict()["link"]}}, "links.3.* is '3', but it must match"),
        ({"experts": {"gem": 1}}, "experts.gemm is missing"),
        ({"read_second_per_byte": 1e-9}, "read_second_per_byte is not known here"),
    ],
)
def test_wrong_rates_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        InferenceRates.from_dict(RATES.to_dict() | change)


def test_a_shape_is_a_model_without_embedding_if_it_has_no_vocabulary() -> None:
    shape = MODELS["deepseek-v2"]
    plan = InferencePlan()
    whole = InferenceCostModel(shape, RATES, PROMPT).layer_times(4, Split(1, 1), plan)
    assert [len(times.dispatch) for times in whole] == [0, *[1] * 59, 0]
    cut = InferenceCostModel(replace(shape, vocab_size=0, num_dense_layers=0, num_layers=8), RATES, PROMPT)
    assert cut.layer_times(4, Split(1, 1), plan) == (cut.block_times(4, Split(1, 1), plan),) * 8


@pytest.mark.parametrize("slicing", ["tokens", "experts"])
def test_experts_are_priced_as_on_a_cluster_of_their_own_kind(slicing: Slicing) -> None:
    costly = replace(RATES, exchange=ExchangeCosts(Line(1e-4, 1e-9), Line(2e-4, 3e-9)))
    slow = replace(
        costly,
        gemm=SLOW_WORKER.gemm,
        read_seconds_per_byte=SLOW_WORKER.read_seconds_per_byte,
        grouped=SLOW_WORKER.grouped,
        exchange=replace(costly.exchange, experts=SLOW_WORKER.exchange),
    )
    of_one, of_other, of_two = (
        model_of(DECODE, rates).block_times(8, Split(2, 4), InferencePlan(1, 4, slicing=slicing))
        for rates in (costly, slow, replace(costly, experts=SLOW_WORKER))
    )
    assert of_two == replace(of_one, experts=of_other.experts)
    assert of_two.experts > of_one.experts
    two = model_of(DECODE, replace(costly, experts=SLOW_WORKER))
    assert replicated_seconds(two, 4) == replicated_seconds(model_of(DECODE, costly), 4)
    assert two.unsplit.block_times(8, Split(2, 2), InferencePlan()) == model_of(DECODE, costly).block_times(
        8, Split(2, 2), InferencePlan()
    )


@pytest.mark.parametrize("slicing", ["tokens", "experts"])
def test_messages_take_time_of_both_workers(slicing: Slicing) -> None:
    plain = model_of(PROMPT)
    costly = replace(plain, rates=replace(RATES, exchange=ExchangeCosts(Line(1e-4, 1e-9), Line(2e-4, 3e-9))))
    split, plan = Split(2, 4), InferencePlan(1, 4, slicing=slicing)
    without, with_costs = (model.block_times(8, split, plan) for model in (plain, costly))
    # With more expert than attention workers, the busier end of a link is an attention worker.
    nbytes = plain.sent_nbytes(8, split, 4) if slicing == "experts" else plain.sent_nbytes(8 / 4, split)
    assert with_costs.attention - without.attention == pytest.approx(4 * (4 * 1e-4 + nbytes * 1e-9))
    for before, after in zip(without.experts, with_costs.experts, strict=True):
        assert after - before == pytest.approx(2 * 2e-4 + nbytes * 2 / 4 * 3e-9)
    assert (with_costs.dispatch, with_costs.combine) == (without.dispatch, without.combine)
    assert with_costs.shared == without.shared


def test_replicas_send_no_messages() -> None:
    plain = model_of(PROMPT)
    costly = replace(plain, rates=replace(RATES, exchange=ExchangeCosts(Line(1, 1), Line(1, 1))))
    assert replicated_seconds(costly, 4) == replicated_seconds(plain, 4)


def test_an_expert_is_decoded_in_part_for_a_few_rows_and_once_for_many() -> None:
    shape = replace(shape_of(num_layers=1), expert_format="int4")
    free = Line(0.0, 0.0)
    rates = replace(RATES, gemm=free, grouped=True, read_seconds_per_byte=1.0)
    model = InferenceCostModel(shape, rates, DECODE)
    share = shape.top_k / shape.num_experts
    exact = shape.expert_parameters * shape.item_nbytes
    for rows in (1, 10_000):
        active = active_experts(shape.num_experts, share, rows)
        decoded = {1: shape.top_k / EXPERT_ROWS_FROM_CODES["int4"], 10_000: active}[rows]
        assert model.experts_seconds(rows, 1) == pytest.approx(active * shape.expert_nbytes + decoded * exact)
    seconds = [model.experts_seconds(rows, 1) for rows in range(200)]
    gains = [after - before for before, after in itertools.pairwise(seconds)]
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in itertools.pairwise(gains)), "slices would gain"
