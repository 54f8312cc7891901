"""Choices: all ranks make the same ones, and they follow the data."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.collectives import audit
from laconic.collectives.choose import Chooser
from laconic.collectives.measure import Exchange, world_of
from laconic.cost.wire.rates import WireRates
from laconic.cost.wire.seconds import LOW_RATIO, NOT_PREPARED, PAYS, PROBE, RAW, Choice, World, decide
from tests.collectives.simulated import made_up_rates, on_ranks
from tests.distributed.processes import finish, free_port, rank_environment, start

LARGE = 1 << 23


def chooser(num_ranks: int = 4, exchange: Exchange | None = None, **more: Any) -> Chooser:
    return Chooser(World(num_ranks), made_up_rates(**more), exchange)


def test_without_observations_the_choice_is_the_model_s() -> None:
    found = chooser().choose("all_gather", LARGE, "bfloat16", "", (1,))
    assert found == decide("all_gather", LARGE, "bfloat16", World(4), made_up_rates())
    assert found.reason == PAYS


def test_data_that_does_not_shrink_is_left_raw_and_tried_again_ever_less_often() -> None:
    own = chooser()
    coded_at, reasons = [], set()
    for call in range(1000):
        choice = own.choose("all_gather", LARGE, "bfloat16", "", (1,))
        reasons.add(choice.reason)
        if choice.codec != RAW:
            coded_at.append(call)
            own.observe("all_gather", "bfloat16", choice.codec, 1000, 1000, True, "")
    assert coded_at == [0, 64, 64 + 128, 64 + 128 + 256, 64 + 128 + 256 + 512]
    assert reasons == {PAYS, LOW_RATIO, PROBE}


def test_a_probe_promises_nothing() -> None:
    own = chooser()
    for _ in range(70):
        choice = own.choose("all_gather", LARGE, "bfloat16", "", (1,))
        if choice.codec != RAW:
            own.observe("all_gather", "bfloat16", choice.codec, 1000, 1000, True, "")
        if choice.reason == PROBE:
            assert choice.saved_seconds == 0.0
            return
    raise AssertionError("no probe")


def test_a_probe_finds_that_the_data_shrinks_again() -> None:
    own = chooser()
    codecs = []
    for call in range(80):
        choice = own.choose("all_gather", LARGE, "bfloat16", "", (1,))
        codecs.append(choice.codec)
        if choice.codec != RAW:
            own.observe("all_gather", "bfloat16", choice.codec, 1500, 1500 if call == 0 else 1000, True, "")
    assert codecs[1:64] == [RAW] * 63
    assert RAW not in codecs[64:]


def test_kinds_of_data_are_kept_apart() -> None:
    own = chooser()
    first = own.choose("all_gather", LARGE, "bfloat16", "weights", (1,))
    own.observe("all_gather", "bfloat16", first.codec, 1000, 1000, True, "weights")
    assert own.choose("all_gather", LARGE, "bfloat16", "weights", (1,)).codec == RAW
    assert own.choose("all_gather", LARGE, "bfloat16", "gradients", (1,)).codec != RAW
    assert own.choose("reduce_scatter", LARGE, "bfloat16", "weights", (1,)).codec != RAW
    assert own.choose("all_gather", LARGE, "float32", "weights", (1,)).codec != RAW


def test_one_bad_message_among_good_ones_changes_little() -> None:
    own = chooser()
    for call in range(20):
        choice = own.choose("all_gather", LARGE, "bfloat16", "", (1,))
        assert choice.codec != RAW
        own.observe("all_gather", "bfloat16", choice.codec, 1500, 1500 if call == 10 else 1000, True, "")


def test_data_that_shrinks_better_than_gaussian_is_coded_on_faster_links() -> None:
    own = chooser(bytes_per_second=3e9)
    choice = own.choose("all_gather", LARGE, "bfloat16", "", (1,))
    assert choice.codec == RAW
    # What is never coded is never observed; zeros of a padded dispatch, say, come with another tag or a slower link.
    own.observe("all_gather", "bfloat16", "tiered", 1_000_000, 1000, True, "")
    assert own.choose("all_gather", LARGE, "bfloat16", "", (1,)).codec != RAW


def test_ranks_tell_each_other_soon_and_then_ever_less_often() -> None:
    def job(rank: int, exchange: Exchange) -> list[int]:
        asked_at: list[int] = []
        num_calls = 0

        def counted(values: Any) -> list[list[int]]:
            asked_at.append(num_calls)
            return exchange(values)

        own = chooser(2, counted)
        for _ in range(100):
            choice = own.choose("all_to_all", LARGE, "bfloat16", "", (1,))
            own.observe("all_to_all", "bfloat16", choice.codec, 1490, 1000 + rank, False, "")
            num_calls += 1
        return asked_at

    first, second = on_ranks(2, job)
    assert first == second == [1, 3, 7, 15, 31, 63, 95]


def test_the_slowest_shrinking_rank_is_outvoted_by_bytes_not_by_ranks() -> None:
    def job(rank: int, exchange: Exchange) -> Choice:
        own = chooser(2, exchange)
        choice = own.choose("all_to_all", LARGE, "bfloat16", "", (1,))
        nbytes = 1_000_000 if rank == 0 else 10
        own.observe("all_to_all", "bfloat16", choice.codec, nbytes, nbytes if rank == 0 else nbytes // 2, False, "")
        return own.choose("all_to_all", LARGE, "bfloat16", "", (1,))

    assert [choice.reason for choice in on_ranks(2, job)] == [LOW_RATIO] * 2


@settings(deadline=None, max_examples=25)
@given(num_ranks=st.integers(2, 4), seed=st.integers(0, 2**32))
def test_ranks_always_agree_whatever_they_observe(num_ranks: int, seed: int) -> None:
    """The same calls in the same order, other data on each rank."""

    def job(rank: int, exchange: Exchange) -> list[Choice]:
        calls, own_data = random.Random(seed), random.Random(seed * 31 + rank)
        own = chooser(num_ranks, exchange)
        choices = []
        for _ in range(150):
            operation = calls.choice(["all_gather", "all_to_all", "all_reduce"])
            numel, dtype = calls.choice([1 << 14, 1 << 20, LARGE]), calls.choice(["bfloat16", "float32"])
            tag, shared = calls.choice(["", "gradients"]), calls.random() < 0.3
            choice = own.choose(operation, numel, dtype, tag, (1,))
            choices.append(choice)
            if choice.codec != RAW and calls.random() < 0.9:
                data = calls if shared else own_data
                own.observe(operation, dtype, choice.codec, 2 * numel, data.randint(1, 2 * numel), shared, tag)
            elif shared:
                calls.random()
        return choices

    first, *others = on_ranks(num_ranks, job)
    assert all(other == first for other in others)


# --- machines ---


def test_hosts_in_order_make_nodes() -> None:
    assert world_of(["a", "a", "b", "b"]) == World(4, 2)
    assert world_of(["a", "b"]) == World(2, 1)
    assert world_of(["a", "a", "a"]) == World(3, 3)


@pytest.mark.parametrize("hosts", [["a", "b", "a", "b"], ["a", "a", "b"]])
def test_hosts_out_of_order_or_of_different_size_make_no_nodes(hosts: list[str]) -> None:
    assert world_of(hosts) == World(len(hosts), 1)


# --- processes ---

WORLD = 3


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What three processes found, by scenario and rank."""
    folder = tmp_path_factory.mktemp("choosing")
    (folder / "damaged.json").write_text('{"format": "laconic wire rates", "version": 9}')
    names = ["measured", "from_rank_0", "unreadable", "prepared", "talking", "carried_out", "texts"]
    arguments = ["-m", "tests.collectives.choosing", str(folder)]
    port, home = free_port(), str(folder / "cache")
    environments = [rank_environment(rank, WORLD, port, XDG_CACHE_HOME=home) for rank in range(WORLD)]
    endings = [finish(process) for process in [start(arguments, environment) for environment in environments]]
    assert [ending.code for ending in endings] == [0] * WORLD, endings[0].err
    return {name: [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(WORLD)] for name in names}


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
    # A small message and a send never; the first call, then after 1, 2 and 4 coded ones.
    assert found["talking"] == [[False, False, True, True, False, True]] * WORLD


def test_what_was_chosen_is_what_travels(found: dict[str, list[Any]]) -> None:
    for rank in found["carried_out"]:
        (weights,) = audit.Snapshot.from_dict(rank["weights"]).entries
        assert (weights.codec, weights.num_calls, weights.reasons) == ("tiered", 4, {PAYS: 4})
        assert 1.45 < weights.ratio < 1.5
        assert weights.saved_seconds > 0
        # Random bits do not shrink: after the first message all ranks leave them raw.
        raw, coded = audit.Snapshot.from_dict(rank["noise"]).entries
        assert (raw.codec, raw.num_calls, raw.reasons) == ("raw", 3, {LOW_RATIO: 3})
        assert (coded.codec, coded.num_calls) == ("tiered", 1)


def test_texts_of_all_ranks_arrive(found: dict[str, list[Any]]) -> None:
    for texts in found["texts"]:
        assert texts == [["", "x", "xx"], [""] * WORLD, ["gr\u00f6\u00dfer"] * WORLD]
