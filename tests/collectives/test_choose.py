"""Choices: all ranks make the same ones, and they follow the data."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.collectives import audit
from laconic.collectives.policy.chooser import CallKind, Chooser, Refusal
from laconic.collectives.policy.microbench import group_shape_of
from laconic.cost.comm.rates import WireRates
from laconic.cost.comm.seconds import (
    LOW_RATIO,
    MAY_PAY,
    MEASURED_SLOWER,
    NOT_PREPARED,
    PAYS,
    PROBE,
    PROBE_CODED,
    PROBE_RAW,
    RAW,
    TOO_SMALL,
    AlgorithmChoice,
    GroupShape,
    decide,
)
from laconic.errors import FormatError
from tests.collectives.choosing import choose_together
from tests.collectives.simulated import made_up_rates
from tests.distributed.processes import free_port, run_ranks

LARGE = 1 << 23
CALL = CallKind("all_gather", LARGE, "bfloat16")


def chooser(num_ranks: int = 4, **more: Any) -> Chooser:
    return Chooser(GroupShape(num_ranks), made_up_rates(**more))


def tell(own: Chooser, call: CallKind, choice: AlgorithmChoice, raw: int, sent: int, nanoseconds: int = 1000) -> None:
    """Observe, and learn it as if all ranks had observed the same."""
    own.observe(call, choice, raw, sent, nanoseconds)
    own.merge_notes([own.note()])


def test_without_observations_the_choice_is_the_model_s() -> None:
    own = Chooser(GroupShape(4), made_up_rates(), repeats=True)
    assert own.choose(CALL) == decide("all_gather", LARGE, "bfloat16", GroupShape(4), made_up_rates())
    assert own.choose(CALL).reason == PAYS


def test_what_a_brief_measurement_leaves_open_is_tried_where_time_decides() -> None:
    """The profile's margin would leave calls raw for ever that coding makes faster."""
    rates = made_up_rates(1e9)
    for numel, reason in ((1 << 17, PAYS), (1 << 15, MAY_PAY)):
        call = replace(CALL, numel=numel)
        careful, untaught = Chooser(GroupShape(4), rates, repeats=True), Chooser(GroupShape(4), rates, learns=False)
        assert careful.choose(call).reason == untaught.choose(call).reason == TOO_SMALL
        brief = Chooser(GroupShape(4), rates)
        assert brief.why_always_raw(call.operation, call.numel, call.dtype) is None
        found = simulated(brief, lambda number, is_coded: 0.02 if is_coded else 0.01, 200, call)
        assert (found[0].reason, found[0].num_chunks) == (reason, 0)
        assert found[0].saved_seconds >= 0
        assert sum(choice.codec != RAW for choice in found) < 20


def test_data_that_does_not_shrink_is_not_tried_for_its_time() -> None:
    own = chooser()
    tell(own, CALL, own.choose(CALL), 1000, 1000)
    assert own.choose(CALL).reason == LOW_RATIO


def test_data_that_does_not_shrink_is_left_raw_and_tried_again_ever_less_often() -> None:
    own = chooser()
    coded_at, reasons = [], set()
    for number in range(1000):
        choice = own.choose(CALL)
        reasons.add(choice.reason)
        if choice.codec != RAW:
            coded_at.append(number)
            tell(own, CALL, choice, 1000, 1000)
    assert coded_at == [0, 64, 64 + 128, 64 + 128 + 256, 64 + 128 + 256 + 512]
    assert reasons == {PAYS, LOW_RATIO, PROBE}


def test_a_probe_promises_nothing() -> None:
    own = chooser()
    for _ in range(70):
        choice = own.choose(CALL)
        if choice.codec != RAW:
            tell(own, CALL, choice, 1000, 1000)
        if choice.reason == PROBE:
            assert choice.saved_seconds == 0.0
            return
    raise AssertionError("no probe")


def test_a_probe_finds_that_the_data_shrinks_again() -> None:
    own = chooser()
    codecs = []
    for number in range(80):
        choice = own.choose(CALL)
        codecs.append(choice.codec if choice.reason != PROBE_RAW else "what raw takes")
        if choice.codec != RAW:
            tell(own, CALL, choice, 1500, 1500 if number == 0 else 1000)
    assert codecs[1:64] == [RAW] * 63
    assert RAW not in codecs[64:]


def test_kinds_of_data_are_kept_apart() -> None:
    own = chooser()
    weights = replace(CALL, tag="weights")
    tell(own, weights, own.choose(weights), 1000, 1000)
    assert own.choose(weights).codec == RAW
    assert own.choose(replace(CALL, tag="gradients")).codec != RAW
    assert own.choose(replace(CALL, operation="reduce_scatter", tag="weights")).codec != RAW
    assert own.choose(replace(CALL, dtype="float32", tag="weights")).codec != RAW


def test_one_bad_message_among_good_ones_changes_little() -> None:
    own = chooser()
    for number in range(20):
        choice = own.choose(CALL)
        assert choice.codec != RAW or choice.reason == PROBE_RAW
        if choice.codec != RAW:
            tell(own, CALL, choice, 1500, 1500 if number == 10 else 1000)


def test_a_note_that_was_damaged_is_refused() -> None:
    own = chooser()
    own.observe(CALL, own.choose(CALL), 1500, 1000, 10)
    note = bytearray(own.note())
    note[3] ^= 1
    with pytest.raises(FormatError, match="arrived damaged"):
        own.merge_notes([bytes(note)])


# --- what calls take ---


def simulated(
    own: Chooser, seconds: Callable[[int, bool], float], num_calls: int, call: CallKind = CALL
) -> list[AlgorithmChoice]:
    """Calls that take `seconds(number, is_coded)`."""
    choices = []
    for number in range(num_calls):
        choice = own.choose(call)
        choices.append(choice)
        is_coded = choice.codec != RAW
        own.observe(call, choice, 1500 * is_coded, 1000 * is_coded, round(1e9 * seconds(number, is_coded)))
        if is_coded:
            own.merge_notes([own.note()])
    return choices


def test_coding_that_is_slower_than_raw_stops_and_is_tried_now_and_then() -> None:
    found = simulated(chooser(), lambda number, is_coded: 0.02 if is_coded else 0.01, 2000)
    num_coded = sum(choice.codec != RAW for choice in found)
    assert {choice.reason for choice in found} == {PAYS, PROBE_RAW, MEASURED_SLOWER, PROBE_CODED}
    assert num_coded < 30
    assert sum(choice.codec != RAW for choice in found[1000:]) <= 4
    # What is lost against raw all the time.
    assert sum(0.02 if choice.codec != RAW else 0.01 for choice in found) < 1.03 * 0.01 * len(found)


def test_coding_that_is_faster_goes_on_and_raw_is_measured_now_and_then() -> None:
    found = simulated(chooser(), lambda number, is_coded: 0.007 if is_coded else 0.01, 2000)
    assert {choice.reason for choice in found} == {PAYS, PROBE_RAW}
    assert 5 <= sum(choice.reason == PROBE_RAW for choice in found) < 15
    assert sum(choice.reason == PROBE_RAW for choice in found[1000:]) <= 4


def test_ranks_that_leave_a_raw_call_early_do_not_make_it_fast() -> None:
    """gloo's all-to-all of 1 MB at 1 Gbit/s: one of two ranks leaves after 4 ms, the other after 7."""
    own = chooser(2)
    for _ in range(200):
        choice = own.choose(CALL)
        own.observe(CALL, choice, 1500, 1000, 4_100_000)
        if choice.codec != RAW:
            ours = own.note()
            theirs = Chooser(GroupShape(2), made_up_rates())
            theirs.observe(CALL, replace(choice, codec="tiered"), 1500, 1000, 4_200_000)
            theirs.observe(CALL, replace(choice, codec=RAW, reason=PROBE_RAW), 0, 0, 7_100_000)
            own.merge_notes([ours, theirs.note()])
    assert own.choose(CALL).reason == PAYS


def test_a_coded_call_that_is_held_up_does_not_stand_for_all() -> None:
    found = simulated(chooser(), lambda number, is_coded: (0.007 if number % 5 else 0.05) if is_coded else 0.01, 2000)
    assert MEASURED_SLOWER not in {choice.reason for choice in found}


def test_a_raw_call_that_is_held_up_does_not_stand_for_all() -> None:
    num_raw = itertools.count()

    def seconds(number: int, is_coded: bool) -> float:
        return 0.012 if is_coded else 0.05 if next(num_raw) == 0 else 0.01

    found = simulated(chooser(), seconds, 2000)
    assert sum(choice.codec != RAW for choice in found) < 60


def test_a_machine_that_is_busy_for_a_while_is_left_raw_for_that_while() -> None:
    def seconds(number: int, is_coded: bool) -> float:
        return (0.03 if 500 <= number < 1000 else 0.007) if is_coded else 0.01

    found = simulated(chooser(), seconds, 2000)
    share = [sum(choice.codec != RAW for choice in found[i : i + 100]) / 100 for i in range(0, 2000, 100)]
    assert min(share[:5]) > 0.9
    assert max(share[6:10]) < 0.2
    assert min(share[16:]) > 0.9


def test_sums_of_many_ranks_do_not_depend_on_time_where_runs_must_repeat() -> None:
    for operation, num_ranks, depends in (("all_reduce", 4, False), ("all_reduce", 2, True), ("all_gather", 4, True)):
        own = Chooser(GroupShape(num_ranks), made_up_rates(), repeats=True)
        call = replace(CALL, operation=operation)
        found = simulated(own, lambda number, is_coded: 0.02 if is_coded else 0.01, 100, call)
        assert (MEASURED_SLOWER in {choice.reason for choice in found}) == depends, operation


@settings(max_examples=15)
@given(num_ranks=st.integers(2, 4), seed=st.integers(0, 2**32), repeats=st.booleans())
def test_ranks_always_agree_whatever_they_observe(num_ranks: int, seed: int, repeats: bool) -> None:
    """The same calls in the same order; other data and other, even absurd, times on each rank."""
    calls, data = random.Random(seed), [random.Random(seed * 31 + rank) for rank in range(num_ranks)]
    ranks = [Chooser(GroupShape(num_ranks), made_up_rates(), repeats=repeats) for _ in range(num_ranks)]
    for _ in range(200):
        numel = calls.choice([1 << 14, 1 << 20, LARGE, LARGE - 5])
        operation, dtype = (
            calls.choice(["all_gather", "all_to_all", "all_reduce"]),
            calls.choice(["bfloat16", "float32"]),
        )
        call = CallKind(operation, numel, dtype, calls.choice(["", "gradients"]))
        first, *others = (own.choose(call) for own in ranks)
        assert all(other == first for other in others)
        if first.codec != RAW and calls.random() < 0.1:
            continue  # it broke off on all ranks before they had told each other
        if first.codec != RAW:
            notes = [own.note() for own in ranks]
            for own in ranks:
                own.merge_notes(notes)
        for own, noise in zip(ranks, data, strict=True):
            sent = noise.randint(1, 2 * numel) if first.codec != RAW else 0
            own.observe(call, first, 2 * numel if sent else 0, sent, round(10 ** noise.uniform(0, 12)))


@settings(max_examples=200)
@given(
    numel=st.integers(1, 1 << 28),
    operation=st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "gather"]),
    dtype=st.sampled_from(["bfloat16", "float32", "float16", "int64"]),
    rate=st.floats(1e6, 1e11),
    num_ranks=st.integers(2, 64),
)
def test_what_is_always_raw_is_raw_at_every_call(
    numel: int, operation: str, dtype: str, rate: float, num_ranks: int
) -> None:
    """Such calls bypass everything that is learnt, on whichever ranks: so nothing learnt may change them."""
    own = Chooser(GroupShape(num_ranks), made_up_rates(rate))
    if own.why_always_raw(operation, numel, dtype) is None:
        return
    call = CallKind(operation, numel, dtype)
    for number in range(20):
        choice = own.choose(call)
        assert choice.codec == RAW
        tell(own, call, choice, 0, 0, number)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_calls_refused_in_advance_change_no_choice_and_no_note(seed: int) -> None:
    """A refusal is kept with the call and asked instead of `choose`: as if `choose` had been asked in each call."""
    calls = random.Random(seed)
    asked, own = chooser(), chooser()
    kept: dict[CallKind, Refusal | None] = {}
    refused: Counter[str] = Counter()
    numels = [LARGE, 1 << 22][: 1 + seed % 2]  # of one size, data that shrinks does so by the same factor in each call
    for number in range(1000):
        call = CallKind(calls.choice(["all_gather", "all_reduce"]), calls.choice(numels), "bfloat16")
        right = asked.choose(call)
        nanoseconds = round(calls.uniform(1, 1.2) * 1e6)
        refusal = kept.get(call)
        if refusal is not None and refusal.holds():
            assert (right.codec, right.reason) == (RAW, refusal.reason)
            refused[refusal.reason] += 1
            if refusal.observe is not None:
                refusal.observe(nanoseconds)
            asked.observe(call, right, 0, 0, nanoseconds)
            continue
        kept[call] = own.refusal(call)
        assert own.choose(call) == right
        if right.codec == RAW:
            raw, sent = 0, 0
        else:
            notes = [each.note() for each in (asked, own)]
            assert notes[0] == notes[1]
            asked.merge_notes(notes[:1])
            own.merge_notes(notes[:1])
            # Gathered data shrinks, but coding takes longer for a while; sums do not shrink, for most of the time.
            raw = 2 * call.numel
            sent = round(raw * (1.0 if call.operation == "all_reduce" and calls.random() < 0.95 else 0.7))
            nanoseconds = nanoseconds // 3 if 150 <= number < 400 else nanoseconds * 3
        for each in (asked, own):
            each.observe(call, right, raw, sent, nanoseconds)
    assert min(refused[LOW_RATIO], refused[MEASURED_SLOWER]) > 50, refused


# --- machines ---


def test_hosts_in_order_make_nodes() -> None:
    assert group_shape_of(["a", "a", "b", "b"]) == GroupShape(4, 2)
    assert group_shape_of(["a", "b"]) == GroupShape(2, 1)
    assert group_shape_of(["a", "a", "a"]) == GroupShape(3, 3)


@pytest.mark.parametrize("hosts", [["a", "b", "a", "b"], ["a", "a", "b"]])
def test_hosts_out_of_order_or_of_different_size_make_no_nodes(hosts: list[str]) -> None:
    assert group_shape_of(hosts) == GroupShape(len(hosts), 1)


# --- processes ---

WORLD = 3


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What three processes found, by scenario and rank."""
    folder = tmp_path_factory.mktemp("choosing")
    (folder / "damaged.json").write_text('{"format": "laconic wire rates", "version": 9}')
    names = ["measured", "from_rank_0", "unreadable", "prepared", "talking", "carried_out", "one_sided", "texts"]
    run_ranks(choose_together, (folder, WORLD, free_port()), WORLD)
    return {name: [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(WORLD)] for name in names}


@pytest.mark.ci
@pytest.mark.parametrize("scenario", ["measured", "from_rank_0"])
def test_processes_choose_alike(scenario: str, found: dict[str, list[Any]]) -> None:
    first, *others = found[scenario]
    assert len(first["choices"]) == 48
    for other in others:
        assert other["choices"] == first["choices"]
        assert other["rates"] == first["rates"]


def test_without_a_file_rates_are_measured_at_first_use(found: dict[str, list[Any]]) -> None:
    first, second, third = found["measured"]
    rates = WireRates.from_dict(first["rates"])
    assert rates.source == "measured at first use"
    assert (list(rates.links), rates.links["node"].world) == (["node"], WORLD)
    assert list(rates.codecs) == ["bfloat16"]
    assert rates.codecs["bfloat16"]["tiered"].ratio == pytest.approx(1.49, abs=0.02)
    assert first["half"] == second["half"] is not None
    assert third["half"] is None


def test_rank_0_s_rates_count_for_all(found: dict[str, list[Any]]) -> None:
    # bfloat16 and float32 are known, so nothing was measured.
    assert WireRates.from_dict(found["from_rank_0"][2]["rates"]) == made_up_rates()
    assert any(choice[0] != RAW for choice in found["from_rank_0"][2]["choices"])


def test_a_damaged_file_is_an_error_on_every_rank(found: dict[str, list[Any]]) -> None:
    for message in found["unreadable"]:
        assert message.startswith("rank 0 of the group cannot read its rates:")
        assert "version is 9, but this laconic reads version 1" in message


def test_sends_are_chosen_for_in_prepared_groups(found: dict[str, list[Any]]) -> None:
    assert [one["early"] for one in found["prepared"]] == [NOT_PREPARED] * WORLD
    first, second, third = found["prepared"]
    assert first["here"] == second["here"] == first["in_lane"] == second["in_lane"]
    assert first["here"][0][0] == "tiered"
    assert third["here"] == []


def test_ranks_know_when_choosing_will_communicate(found: dict[str, list[Any]]) -> None:
    # A small message and a send never; others at the first call.
    assert found["talking"] == [[False, False, True, False, False, False]] * WORLD


def test_what_was_chosen_is_what_travels(found: dict[str, list[Any]]) -> None:
    for rank in found["carried_out"]:
        (weights,) = audit.Snapshot.from_dict(rank["weights"]).entries
        assert (weights.codec, weights.num_calls, weights.reasons) == ("tiered", 4, {PAYS: 4})
        assert 1.45 < weights.ratio < 1.5
        assert weights.saved_seconds > 0
        # Random bits do not shrink: ranks tell each other with the second message and leave the others raw.
        raw, coded = audit.Snapshot.from_dict(rank["noise"]).entries
        assert (raw.codec, raw.num_calls, raw.reasons) == ("raw", 2, {LOW_RATIO: 2})
        assert (coded.codec, coded.num_calls) == ("tiered", 2)


def test_ranks_that_send_nothing_choose_as_those_that_do(found: dict[str, list[Any]]) -> None:
    for rank in found["one_sided"]:
        assert rank == {name: {"raw": 3, "tiered": 2} for name in ("broadcast", "gather", "scatter", "all_to_all")}


def test_texts_of_all_ranks_arrive(found: dict[str, list[Any]]) -> None:
    for texts in found["texts"]:
        assert texts == [["", "x", "xx"], [""] * WORLD, ["gr\u00f6\u00dfer"] * WORLD]
