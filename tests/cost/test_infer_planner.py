"""The inference planner: equal to brute force, monotone where FinDEP's theorems say so, honest about not splitting."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from laconic.cost.comm.rates import Line
from laconic.cost.infer import (
    MODELS,
    Arrivals,
    InferenceCostModel,
    InferenceRates,
    Search,
    Split,
    WorkerRates,
    Workers,
    Workload,
    choose,
    choose_for_arrivals,
    largest_batch,
    worker_nbytes,
)
from laconic.cost.infer.choice_text import choice_text, infer_rates_text
from laconic.cost.infer.memory import ATTENTION_WORKER, EXPERT_WORKER
from laconic.cost.infer.planner import (
    KINDS,
    Candidate,
    busy_shares,
    least_seconds,
    pass_seconds,
    plans_of,
    priced,
    sharded_seconds,
)
from laconic.cost.infer.rates import ExchangeCosts, LinkPair
from laconic.errors import PlanError
from laconic.schedule.inference import BlockTimes, InferencePlan, inference_plan
from laconic.schedule.streams import StreamPlan, Task, simulate
from tests.cost.infer_models import RATES, SLOW_WORKER, model_of

SEARCH = Search(max_micro_batches=3, max_slices=4, orders=("ASAS", "AASS"))
LARGE = 10**9

lines = st.builds(Line, st.floats(0, 1e-4), st.floats(1e-13, 1e-10))
workers_of = st.builds(WorkerRates, lines, st.floats(0, 1e-9), st.booleans(), lines)
rates_of = st.builds(
    lambda gemm, attention, link, read, grouped, exchange, experts: InferenceRates(
        Line(*gemm),
        Line(*attention),
        LinkPair(Line(*link), Line(*link)),
        read,
        grouped=grouped,
        exchange=ExchangeCosts(Line(*exchange), Line(*reversed(exchange))),
        experts=experts,
    ),
    st.tuples(st.floats(0, 1e-4), st.floats(1e-13, 1e-10)),
    st.tuples(st.floats(0, 1e-4), st.floats(1e-13, 1e-10)),
    st.tuples(st.floats(0, 1e-3), st.floats(1e-11, 1e-7)),
    st.floats(0, 1e-9),
    st.booleans(),
    st.tuples(st.floats(0, 1e-4), st.floats(0, 1e-4)),
    st.none() | workers_of,
)
"""Of one kind of worker, or of two."""
workloads = st.one_of(
    st.builds(Workload.prefill, st.integers(1, 200), st.just(8), st.none() | st.integers(1, 40)),
    st.builds(Workload.decode, st.integers(1, 200), st.just(8), st.none() | st.integers(1, 40)),
)


def all_split_candidates(model: InferenceCostModel, workers: Workers, search: Search) -> list[Candidate]:
    """Every split, r1, m_a, r2, order and slicing that memory allows, priced one by one."""
    found = []
    for groups, split in workers.splits(model.shape.num_experts):
        waiting = model.workload.requests
        group = replace(model, workload=replace(model.workload, requests=waiting and -(-waiting // groups)))
        plans = [plan for slicing in search.slicings for plan in plans_of("findep", slicing, search)]
        for plan in [*plans, *plans_of("pppipe", "tokens", search)]:
            most = largest_batch(
                group,
                split,
                workers.memory_nbytes,
                plan.num_micro_batches,
                expert_memory_nbytes=workers.expert_memory_nbytes,
            ).batch
            kind = "pppipe" if plan.shared_first else "findep"
            for batch in range(1, most + 1):
                held = -(-model.shape.num_experts // split.experts)
                cuts = held if plan.slicing == "experts" else batch * model.workload.new_tokens
                if plan.num_slices <= cuts:
                    found.append(priced(model, kind, split, batch, plan, groups))
    return found


@settings(max_examples=25)
@given(rates_of, workloads, st.integers(2, 4), st.integers(1, 6), st.sampled_from([0, 128]), st.floats(0.3, 3))
def test_it_is_brute_force(
    rates: InferenceRates, work: Workload, total: int, room: int, shared: int, of_experts: float
) -> None:
    model = model_of(work, rates, shared_hidden=shared)
    # Memory for a few requests beside the weights of the fullest split.
    memory = int(_bytes_of(model, Split(1, total - 1), 0) + room * _step(model, Split(1, total - 1)) * 1.01)
    workers = Workers(total, memory, expert_memory_nbytes=rates.experts and int(memory * of_experts))
    every = all_split_candidates(model, workers, SEARCH)
    assume(every and len(every) < 6000)
    choice = choose(model, workers, SEARCH)
    for kind in ("pppipe", "findep"):
        best = max(one.tokens_per_second for one in every if one.kind == kind)
        found = max(one.tokens_per_second for one in choice.candidates if one.kind == kind)
        assert found == pytest.approx(best, rel=1e-6)
    assert choice.best.tokens_per_second == pytest.approx(max(one.tokens_per_second for one in choice.candidates))


@settings(max_examples=40)
@given(rates_of, workloads, st.integers(2, 4), st.integers(1, 6))
def test_greedy_is_among_the_orders_and_never_makes_a_choice_worse(
    rates: InferenceRates, work: Workload, total: int, room: int
) -> None:
    """The best of ASAS and greedy over all plans, at the largest batch that fits and the two around an equal share."""
    model = model_of(work, rates)
    memory = int(_bytes_of(model, Split(1, total - 1), 0) + room * _step(model, Split(1, total - 1)) * 1.01)
    workers, search = Workers(total, memory), replace(SEARCH, orders=("ASAS", "greedy"))
    every = all_split_candidates(model, workers, search)
    assume(every and len(every) < 4000)
    most: dict[object, int] = {}
    for one in every:
        here = (one.num_groups, one.split, one.plan.num_micro_batches)
        most[here] = max(most.get(here, 0), one.batch)
    choice = choose(model, workers, search)
    found = max(one.tokens_per_second for one in choice.candidates if one.kind == "findep")
    for one in every:
        full = one.batch == most[one.num_groups, one.split, one.plan.num_micro_batches]
        if one.plan.order == "ASAS" or (full and one.num_requests != work.requests):
            assert one.tokens_per_second <= found * (1 + 1e-6)


def test_greedy_is_chosen_where_it_is_faster() -> None:
    line = Line(2e-5, 4e-15)
    rates = InferenceRates(line, line, LinkPair(Line(2e-5, 2.5e-11), Line(2e-5, 2.5e-11)), 4e-13)
    costs = InferenceCostModel(MODELS["deepseek-v2"], rates, Workload.prefill(4096, 1024))
    asas, both = (
        choose(costs, Workers(32, 80 * 10**9), Search(orders=orders)).best for orders in (("ASAS",), ("ASAS", "greedy"))
    )
    assert (asas.plan.order, both.plan.order) == ("ASAS", "greedy")
    assert both.tokens_per_second > asas.tokens_per_second


def _bytes_of(model: InferenceCostModel, split: Split, batch: int) -> float:
    return max(sum(of.values()) for of in worker_nbytes(model, split, batch).values())


def _step(model: InferenceCostModel, split: Split) -> float:
    return _bytes_of(model, split, 2) - _bytes_of(model, split, 1)


@settings(max_examples=60)
@given(
    rates_of, workloads, st.integers(1, 3), st.integers(1, 3), st.integers(1, 20), st.integers(1, 3), st.integers(1, 4),
    st.sampled_from(["ASAS", "AASS"]), st.sampled_from(["tokens", "experts"]), st.booleans(),
)  # fmt: skip
def test_the_rate_grows_with_the_batch(
    rates: InferenceRates, work: Workload, ag: int, eg: int, batch: int, r1: int, r2: int, order: str, slicing: str,
    shared_first: bool,
) -> None:  # fmt: skip
    """Theorems 1 and 2, for every order, both slicings and activated experts."""
    model = model_of(replace(work, requests=None), rates)
    plan = InferencePlan(r1, r2, order, slicing, shared_first)  # type: ignore[arg-type]
    few, more = (priced(model, "findep", Split(ag, eg), size, plan).tokens_per_second for size in (batch, batch + 1))
    assert more >= few * (1 - 1e-9)


@settings(max_examples=60)
@given(
    rates_of, workloads, st.integers(1, 3), st.integers(1, 3), st.integers(1, 8), st.integers(1, 5), st.integers(1, 4)
)
def test_the_rate_does_not_fall_with_micro_batches(
    rates: InferenceRates, work: Workload, ag: int, eg: int, batch: int, r1: int, r2: int
) -> None:
    """Theorem 3, for order ASAS."""
    model = model_of(replace(work, requests=None), rates)
    few, more = (
        priced(model, "findep", Split(ag, eg), batch, InferencePlan(n, r2)).tokens_per_second for n in (r1, r1 + 1)
    )
    assert more >= few * (1 - 1e-9)


def test_one_long_prompt_pays_for_a_split_and_slow_links_never_do() -> None:
    """One prompt leaves an unsplit run nothing to overlap with; slices overlap its way with its experts."""
    work = Workload.prefill(4096, 1, requests=1)
    slow_products = model_of(work, replace(RATES, gemm=Line(1e-5, 2e-11)))
    split = choose(slow_products, Workers(4, LARGE))
    assert split.split_pays
    assert split.best.plan.num_slices > 1
    assert (way := split.best.split) is not None
    text = choice_text(slow_products, Workers(4, LARGE), split, "")
    assert f"plan: split: {split.best.num_groups} x {way.attention} attention and {way.experts} expert workers" in text
    slow = replace(RATES, link=LinkPair(Line(0.1, 1e-6), Line(0.1, 1e-6)))
    for other in (work, Workload.decode(256, 64, requests=64)):
        whole = choose(model_of(other, slow), Workers(4, LARGE))
        assert not whole.split_pays
        assert whole.best.kind == "replicated"
        text = choice_text(model_of(other, slow), Workers(4, LARGE), whole, "")
        assert "plan: do not split: unsplit, replicas" in text


def test_a_model_too_large_for_one_worker_is_spread() -> None:
    model = model_of(Workload.prefill(64))
    whole = model.shape.num_parameters * model.shape.item_nbytes
    choice = choose(model, Workers(4, int(whole * 0.8)))
    assert "replicated" not in {one.kind for one in choice.candidates}
    assert {"sharded", "naive", "pppipe", "findep"} == {one.kind for one in choice.candidates}
    with pytest.raises(
        PlanError, match=r"does not fit on 4 workers .* with even one request; unsplit, experts over 1, "
    ):
        choose(model, Workers(4, whole // 10))


def test_why_nothing_fits_is_said_of_both_ways() -> None:
    """The fullest of those that run whole models and of those that split: the first and the last."""
    model = model_of(Workload.prefill(64))
    with pytest.raises(PlanError) as refused:
        choose(model, Workers(4, 100_000, expert_memory_nbytes=10**9))
    reasons = [reason.split(", ")[0] for reason in str(refused.value).split("; ")[1:-1]]
    assert reasons == ["unsplit", "unsplit", "split 1:3", "split 1:1"]
    # Beside unsplit runs that fit, too.
    workers = Workers(4, LARGE, attention=1, expert_memory_nbytes=100_000)
    choice = choose(model, workers)
    text = choice_text(model, workers, choice, "")
    assert "; no split fits: split 1:3, expert worker: weights (weights 884.74 KB, activations " in text
    assert (choice_text(model, Workers(1, LARGE), choose(model, Workers(1, LARGE)), "")).count("; no split fits\n") == 1


def test_no_more_micro_batches_than_asked_for() -> None:
    for most in (1, 2):
        choice = choose(model_of(Workload.prefill(64)), Workers(4, LARGE), Search(most, 2))
        assert max(one.plan.num_micro_batches for one in choice.candidates) <= most
        shape, load = model_of(Workload.prefill(64)).shape, Arrivals(20, 64, 16)
        found = choose_for_arrivals(shape, RATES, Workers(4, LARGE), load, Search(most, 2))
        assert max(one.plan.num_micro_batches for one in found.candidates) <= most


def test_candidates_of_more_freedom_are_never_slower() -> None:
    for work in (Workload.prefill(128), Workload.decode(128, 32)):
        choice = choose(model_of(work), Workers(5, 200_000_000))
        rates = {kind: max(o.tokens_per_second for o in choice.candidates if o.kind == kind) for kind in KINDS}
        assert rates["naive"] <= rates["pppipe"] <= rates["findep"] * (1 + 1e-9)
        listed = [one.tokens_per_second for one in choice.candidates]
        assert listed == sorted(listed, reverse=True)


def test_no_more_requests_are_counted_than_wait() -> None:
    for requests in (1, 3, 7):
        choice = choose(model_of(Workload.decode(64, 8, requests)), Workers(3, LARGE))
        for one in choice.candidates:
            assert one.num_requests <= requests
            assert one.tokens_per_second == pytest.approx(one.num_requests / one.seconds)
            assert one.requests_per_second == pytest.approx(one.tokens_per_second)


LARGER = {
    "hidden_size": 1024, "num_heads": 16, "key_dim": 64, "value_dim": 64, "attention_parameters": 4 << 20,
    "cache_values": 2048, "num_experts": 32, "top_k": 4, "expert_hidden": 1024, "shared_hidden": 1024,
}  # fmt: skip


def test_fast_attention_workers_with_slow_experts_of_much_memory_have_a_plan_of_their_own() -> None:
    """One device of a quarter of the model's memory, three hosts of several times that."""
    line, search = Line(5e-6, 4e-15), Search(3, 4)
    fast = InferenceRates(line, line, LinkPair(Line(2e-5, 1e-10), Line(2e-5, 1e-10)), 4e-13)
    slow = WorkerRates(Line(1e-5, 1e-12), 1e-11, grouped=False)
    one, two = (
        model_of(Workload.decode(256, 64, 24), replace(fast, experts=experts), **LARGER) for experts in (None, slow)
    )
    nbytes = one.shape.num_parameters * one.shape.item_nbytes
    workers = Workers(4, nbytes // 4, attention=1, expert_memory_nbytes=4 * nbytes)
    choice, alike = choose(two, workers, search), choose(one, workers, search)
    for found in (choice, alike):
        assert {each.kind for each in found.candidates} == {"naive", "pppipe", "findep"}
        assert found.best.split == Split(1, 3)
    assert choice.best.plan == InferencePlan(1, 4, "ASAS", "experts")
    assert alike.best.plan == InferencePlan(2, 1, "greedy", "tokens")
    every = all_split_candidates(two, workers, search)
    assert choice.best.tokens_per_second == pytest.approx(max(each.tokens_per_second for each in every))
    best_of_alike = priced(two, "findep", Split(1, 3), alike.best.batch, alike.best.plan)
    assert choice.best.tokens_per_second > 1.1 * best_of_alike.tokens_per_second
    text = choice_text(two, workers, choice, "")
    assert "workers: 1 for attention of 217." in text
    assert "order ASAS; unsplit, no request fits: experts over 1, worker: weights (weights 868." in text
    assert "\nbottleneck: expert workers, busy for 92% of a pass; links 8%, attention workers 5%\n" in text
    with pytest.raises(PlanError, match=r"4 workers of [\d,]+ bytes, expert workers of [\d,]+ bytes, with even one"):
        choose(two, replace(workers, expert_memory_nbytes=nbytes // 9), search)


@settings(max_examples=25, deadline=None)
@given(rates_of, workloads, st.integers(2, 4), st.integers(1, 6), st.booleans())
def test_equal_kinds_are_one(rates: InferenceRates, work: Workload, total: int, room: int, fixed: bool) -> None:
    rates = replace(rates, experts=None)
    model = model_of(work, rates)
    memory = int(_bytes_of(model, Split(1, total - 1), 0) + room * _step(model, Split(1, total - 1)) * 1.01)
    workers = Workers(total, memory, 1 if fixed else None)
    equal = replace(model, rates=replace(rates, experts=rates.of_experts))
    expected = choose(model, workers, SEARCH)
    assert choose(equal, replace(workers, expert_memory_nbytes=memory), SEARCH) == expected


@settings(max_examples=25, deadline=None)
@given(rates_of, workers_of, workloads, st.integers(1, 4), st.integers(1, 3))
def test_attention_workers_alone_run_whole_models(
    rates: InferenceRates, of_experts: WorkerRates, work: Workload, attention: int, experts: int
) -> None:
    """Unsplit candidates beside expert workers of another kind are those of a cluster without these."""
    alone = model_of(work, replace(rates, experts=None))
    assume(of_experts != alone.rates.of_experts)
    both = model_of(work, replace(rates, experts=of_experts))
    workers = Workers(attention + experts, 12_000_000, attention, expert_memory_nbytes=20_000_000)
    for kind in ("replicated", "sharded"):
        found, expected = (
            [one for one in choose(model, of, SEARCH).candidates if one.kind == kind]
            for model, of in ((both, workers), (alone, Workers(attention, 12_000_000)))
        )
        assert found == expected
    # All are of either kind where the planner chooses how many are of which.
    free = choose(both, replace(workers, attention=None), SEARCH)
    replicas = choose(alone, Workers(attention + experts, 12_000_000), SEARCH)
    assert [o for o in free.candidates if not o.split] == [o for o in replicas.candidates if not o.split]


def test_not_to_split_is_said_with_both_kinds_and_numbers() -> None:
    model = model_of(Workload.decode(64, 8), replace(RATES, experts=SLOW_WORKER))
    workers = Workers(4, LARGE, attention=2)
    choice = choose(model, workers, SEARCH)
    assert not choice.split_pays
    text = choice_text(model, workers, choice, "")
    assert f"workers: 2 for attention of {1:.2f} GB, 2 for experts of {1:.2f} GB; " in text
    assert "plan: do not split: unsplit, replicas, 2 x 1 attention workers, " in text
    others = [one for one in choice.candidates if one.split is not None]
    slower = choice.best.tokens_per_second / others[0].tokens_per_second
    assert (
        f"; the best split is slower by {slower:.2f}x\nbottleneck of the best split: expert workers, busy for" in text
    )


def test_fixed_numbers_of_workers_are_kept() -> None:
    choice = choose(model_of(Workload.prefill(64)), Workers(5, LARGE, attention=3))
    assert {(one.num_groups, one.split) for one in choice.candidates if one.split} == {(1, Split(3, 2))}


def test_all_splits_of_all_groups_are_tried() -> None:
    assert Workers(5, LARGE).splits(16) == [(1, Split(n, 5 - n)) for n in range(1, 5)]
    assert Workers(4, LARGE).splits(16) == [(1, Split(n, 4 - n)) for n in range(1, 4)] + [(2, Split(1, 1))]
    assert Workers(40, LARGE).splits(3)[:3] == [(1, Split(37, 3)), (1, Split(38, 2)), (1, Split(39, 1))]


def test_groups_share_nothing() -> None:
    """Eight workers in two groups do twice what four do."""
    work = Workload.decode(64, 8)
    four = priced(model_of(work), "findep", Split(2, 2), 5, InferencePlan(2))
    eight = priced(model_of(work), "findep", Split(2, 2), 5, InferencePlan(2), num_groups=2)
    assert eight.tokens_per_second == pytest.approx(2 * four.tokens_per_second)
    few = replace(work, requests=3)
    shared = priced(model_of(few), "findep", Split(2, 2), 1, InferencePlan(), num_groups=2)
    assert shared.num_requests == 3


def test_every_candidate_fits_as_its_limit_says() -> None:
    model, workers = model_of(Workload.decode(512, 64)), Workers(4, 60_000_000)
    choice = choose(model, workers)
    for one in choice.candidates:
        limit = choice.limits[one]
        assert 1 <= one.batch <= limit.batch
        assert all(sum(of.values()) <= workers.memory_nbytes for of in limit.nbytes.values())


@pytest.mark.parametrize("count", [1, 2])
def test_sharded_layers_are_the_simulation_of_their_tasks(count: int) -> None:
    times = BlockTimes(3.0, 1.0, (2.5,), (4.0,), (1.5,))
    tasks = []
    for layer in range(3):
        before = [f"combine {layer - 1}.{{}}"] if layer else []
        for m in range(count):
            tasks.append(Task(f"attention {layer}.{m}", "core", 3.0, tuple(name.format(m) for name in before)))
            tasks.append(Task(f"dispatch {layer}.{m}", "link", 2.5, (tasks[-1].name,)))
            tasks.append(Task(f"shared {layer}.{m}", "core", 1.0))
        for m in range(count):
            tasks.append(Task(f"experts {layer}.{m}", "core", 4.0, (f"dispatch {layer}.{m}",)))
            tasks.append(Task(f"combine {layer}.{m}", "link", 1.5, (tasks[-1].name,)))
    assert sharded_seconds(times, count, 3) == simulate(StreamPlan(tuple(tasks))).makespan_seconds


def test_seconds_of_a_candidate_are_those_of_its_tasks() -> None:
    model = model_of(Workload.prefill(64), num_dense_layers=1, dense_hidden=100)
    choice = choose(model, Workers(4, 50_000_000), SEARCH)
    for one in choice.candidates:
        if one.split is None:
            continue
        layers = model.layer_times(one.batch, one.split, one.plan)
        assert len(layers) == 1 + 3 + 1  # dense, with experts, output projection
        timeline = simulate(inference_plan(layers, one.plan, len(layers)))
        assert one.seconds == pytest.approx(timeline.makespan_seconds)
        attention, experts, *links = (timeline.busy_seconds(name) for name in ("attention", "experts", "a2e", "e2a"))
        busy = {"attention workers": attention, "expert workers": experts, "links": max(links)}
        assert busy_shares(model, one) == pytest.approx({name: each / one.seconds for name, each in busy.items()})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Workers(0, 1), "total is 0"),
        (lambda: Workers(4, 1, attention=4), "attention is 4 of 4 workers"),
        (lambda: Workers(4, 0), "memory_nbytes is 0"),
        (lambda: Workers(4, 1, expert_memory_nbytes=0), "expert_memory_nbytes is 0"),
        (lambda: Search(max_slices=0), "max_slices is 0"),
        (lambda: Search(orders=()), "orders is empty"),
    ],
)
def test_impossible_searches_are_refused(make: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()  # type: ignore[operator]


def test_thirty_two_workers_are_planned_quickly() -> None:
    """Under one second by a wide margin where it runs alone; processor time here, with room for slow machines."""
    shape = MODELS["qwen3-235b-a22b"]
    rates = InferenceRates(
        Line(2e-5, 4e-15), Line(2e-5, 4e-15), LinkPair(Line(2e-5, 2.5e-11), Line(2e-5, 2.5e-11)), 4e-13
    )
    for work in (Workload.prefill(4096, 1024), Workload.decode(4096, 1024)):
        started = time.process_time()
        choice = choose(InferenceCostModel(shape, rates, work), Workers(32, 80 * 10**9))
        assert time.process_time() - started < 10
        assert choice.best.tokens_per_second > 0


def test_codes_are_counted_on_expert_workers_alone() -> None:
    exact = model_of(Workload.decode(64, 64))
    for code, bits in (("int8", 8.25), ("nf4", 4.25)):
        coded = replace(exact, shape=replace(exact.shape, expert_format=code))
        before, after = (worker_nbytes(model, Split(1, 3), 1) for model in (exact, coded))
        assert after[EXPERT_WORKER]["weights"] == pytest.approx(before[EXPERT_WORKER]["weights"] * bits / 16)
        assert after[ATTENTION_WORKER] == before[ATTENTION_WORKER]
        assert worker_nbytes(coded, Split(2, 2), 1, whole=True) == worker_nbytes(exact, Split(2, 2), 1, whole=True)
        for kind, workers in (("replicated", Split(1, 1)), ("sharded", Split(2, 2))):
            seconds = [pass_seconds(model, kind, workers, 2, InferencePlan()) for model in (exact, coded)]
            assert seconds[0] == seconds[1], kind


def test_a_model_too_large_fits_in_codes() -> None:
    exact = model_of(Workload.decode(64, 64, 4), num_experts=64, expert_hidden=1024)
    workers = Workers(2, 40_000_000)
    with pytest.raises(PlanError, match="does not fit on 2 workers"):
        choose(exact, workers)
    found = choose(replace(exact, shape=replace(exact.shape, expert_format="int4")), workers)
    assert found.split_pays
    assert {one.kind for one in found.candidates} == {"naive", "pppipe", "findep"}  # unsplit workers hold exact experts


def test_tables_say_what_was_chosen_and_what_limits() -> None:
    model, workers = model_of(Workload.decode(512, 64)), Workers(4, 60_000_000)
    choice = choose(model, workers, SEARCH)
    text = choice_text(model, workers, choice, "decode")
    lines = text.splitlines()
    assert lines[0] == "decode"
    assert lines[-1].startswith(
        f"memory allows {choice.limits[choice.best].batch} requests per micro-batch; full is the "
    )
    assert lines[-2].startswith("bottleneck" if choice.split_pays else "bottleneck of the best split: ")
    assert lines[-3].startswith("plan: split: " if choice.split_pays else "plan: do not split")
    table = text.split("\n\n")[1].splitlines()
    assert len(table) == 2 + len(choice.candidates)
    assert table[2].endswith("1.000")
    json.dumps([one.to_dict() for one in choice.candidates])
    assert "link home, any split" in infer_rates_text(RATES)
    assert "expert workers" not in infer_rates_text(RATES)
    of_two = infer_rates_text(replace(RATES, experts=SLOW_WORKER))
    for words in (
        "expert workers, matrix product 500.0 20.00 Gmul-adds",
        "expert workers, weights 1.00 GB",
        "one call",
    ):
        assert words in " ".join(of_two.split())


@settings(max_examples=60)
@given(
    rates_of, workloads, st.integers(1, 3), st.integers(1, 3), st.integers(1, 8), st.integers(0, 2), st.integers(0, 1)
)
def test_no_plan_is_faster_than_its_bound(
    rates: InferenceRates, work: Workload, ag: int, eg: int, batch: int, dense: int, words: int
) -> None:
    model = model_of(work, rates, num_dense_layers=dense, dense_hidden=100, vocab_size=1000 * words)
    for slicing, r1, r2, order, first in product(
        ("tokens", "experts"), (1, 3), (1, 4), ("ASAS", "AASS"), (False, True)
    ):
        plan = InferencePlan(r1, r2, order, slicing, first)  # type: ignore[arg-type]
        least = least_seconds(model, batch, Split(ag, eg), plan)
        assert least <= priced(model, "findep", Split(ag, eg), batch, plan).seconds * (1 + 1e-9)
