"""Seconds of collectives raw and coded, the choice between them, and the file of rates."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from laconic.cost.comm import seconds as wire
from laconic.cost.comm.rates import (
    OPERATIONS,
    RING,
    CodecRates,
    Line,
    LinkRates,
    WireRates,
    default_path,
    fit_line,
)
from laconic.cost.comm.seconds import (
    GroupShape,
    candidates,
    coded_seconds,
    decide,
    ring_seconds,
    send_pays,
    sent_nbytes,
)
from laconic.errors import ConfigError

GIGABIT = 125e6


def line(bytes_per_second: float, alpha_seconds: float = 0.0) -> Line:
    return Line(alpha_seconds, 1 / bytes_per_second)


def link(bytes_per_second: float, alpha: float = 2e-4, world: int = 4, overlap: float = 1.0) -> LinkRates:
    lines = {name: line(bytes_per_second, alpha) for name in OPERATIONS}
    return LinkRates(world, lines, chunk_seconds=alpha, overlap=overlap)


def rates(
    bytes_per_second: float = GIGABIT, coding_bytes_per_second: float = 8e9, overlap: float = 1.0, **more: Any
) -> WireRates:
    coding = line(coding_bytes_per_second, 2e-5)
    codes = {
        "window": CodecRates(line(2 * coding_bytes_per_second, 2e-5), coding, coding, 1.43),
        "tiered": CodecRates(coding, coding, coding, 1.49),
    }
    return WireRates({"across": link(bytes_per_second, overlap=overlap)}, {"bfloat16": codes}, **more)


FOUR = GroupShape(4)


# --- predictions ---


def test_one_piece_is_the_sum_of_latency_encode_wire_and_decode() -> None:
    numel, encode, decode = 1 << 19, 2e9, 1e9
    found = rates()
    codec = CodecRates(line(encode), line(decode), line(decode), 1.5)
    found = replace(found, codecs={"bfloat16": {"tiered": codec}})
    (seconds,) = [c.seconds for c in candidates("all_gather", numel, "bfloat16", FOUR, found) if c[:2] == ("tiered", 1)]
    nbytes = 2 * numel
    expected = nbytes / encode + 2e-4 + 3 * nbytes / 1.5 / GIGABIT + 3 * nbytes / decode
    assert seconds == pytest.approx(expected)


def test_many_chunks_approach_the_slowest_stage() -> None:
    numel = 1 << 26
    base = rates()
    free = replace(base.links["across"], chunk_seconds=0.0, operations={n: line(GIGABIT) for n in OPERATIONS})
    codec = CodecRates(line(GIGABIT), line(1e12), line(1e12), 1.5)  # encoding an all-to-all is slower than its wire
    seconds = [
        coded_seconds("all_to_all", 2 * numel, 4, free, codec, 1.5, num_chunks) for num_chunks in (1, wire.MAX_CHUNKS)
    ]
    encode = wire_raw = sent_nbytes("all_to_all", 2 * numel, 4) / GIGABIT
    assert seconds[0] == pytest.approx(encode + wire_raw / 1.5, rel=1e-3)
    assert seconds[1] == pytest.approx(encode + wire_raw / 1.5 / wire.MAX_CHUNKS, rel=1e-3)


def test_without_overlap_cutting_gains_nothing() -> None:
    found = [c for c in candidates("all_gather", 1 << 19, "bfloat16", FOUR, rates(overlap=0.0)) if c[0] == "tiered"]
    assert min(found, key=lambda c: c.seconds).num_chunks == 1


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather_of_the_sums() -> None:
    numel = 1 << 20

    def coded(operation: str, numel: int) -> float:
        found = candidates(operation, numel, "bfloat16", FOUR, rates())
        return next(c.seconds for c in found if c[:2] == ("tiered", 1))

    assert coded("all_reduce", numel) == pytest.approx(coded("reduce_scatter", numel) + coded("all_gather", numel // 4))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_on_a_slow_link_large_messages_gain_the_ratio(operation: str) -> None:
    choice = decide(operation, 1 << 26, "bfloat16", FOUR, rates(GIGABIT / 10))
    assert choice.codec == "tiered"
    assert choice.raw_seconds / choice.predicted_seconds == pytest.approx(1.49, rel=0.03)
    assert choice.reason == wire.PAYS
    assert choice.saved_seconds > 0


def test_a_link_a_little_faster_than_the_slow_code_gets_the_fast_one() -> None:
    found = rates()
    slow = CodecRates(line(0.35e9), line(1e9), line(1e9), 1.49)
    fast = CodecRates(line(20e9), line(20e9), line(20e9), 1.43)
    found = replace(found, codecs={"bfloat16": {"tiered": slow, "window": fast}})
    assert decide("all_to_all", 1 << 24, "bfloat16", FOUR, found).codec == "window"
    slow_link = replace(found, links={"across": link(GIGABIT / 10)})
    assert decide("all_to_all", 1 << 24, "bfloat16", FOUR, slow_link).codec == "tiered"


@given(
    operation=st.sampled_from(OPERATIONS),
    numel=st.integers(1, 1 << 30),
    num_ranks=st.integers(2, 64),
    link_rate=st.floats(1e6, 1e11),
    coding_rate=st.floats(1e7, 1e11),
    overlap=st.floats(0, 1),
    ratio=st.floats(0.9, 20),
)
def test_what_is_coded_is_predicted_to_gain_five_per_cent_and_half_a_latency(
    operation: str, numel: int, num_ranks: int, link_rate: float, coding_rate: float, overlap: float, ratio: float
) -> None:
    found = rates(link_rate, coding_rate, overlap)
    choice = decide(operation, numel, "bfloat16", GroupShape(num_ranks), found, {"tiered": ratio, "window": ratio})
    if choice.codec == "raw":
        assert (choice.num_chunks, choice.saved_seconds) == (1, 0.0)
    else:
        assert choice.predicted_seconds < (1 - wire.MIN_GAIN) * choice.raw_seconds
        assert choice.num_chunks <= wire.MAX_CHUNKS
        latency = found.link("across").at(num_ranks).line(operation).alpha_seconds
        assert wire.pays(choice.predicted_seconds, choice.raw_seconds, latency)
    assert math.isfinite(choice.predicted_seconds)


# --- why a message is left raw ---


@given(st.integers(1, 1 << 22), st.floats(5, 11), st.floats(7, 11))
def test_a_send_as_a_whole_pays_where_encode_wire_and_decode_together_are_faster(
    numel: int, link_power: float, coding_power: float
) -> None:
    speed, coding = 10**link_power, 10**coding_power
    nbytes = 2 * numel
    raw = 2e-4 + nbytes / speed
    coded = 2e-4 + 2 * (2e-5 + nbytes / coding) + nbytes / 1.49 / speed
    wanted = nbytes >= wire.MIN_CODED_NBYTES and coded < 0.95 * raw - 1e-4
    if abs(coded - (0.95 * raw - 1e-4)) > 1e-9:
        assert send_pays(numel, "bfloat16", "tiered", FOUR, rates(speed, coding)) == wanted


def test_a_send_of_what_was_not_measured_never_pays() -> None:
    for dtype, code in (("float32", "tiered"), ("bfloat16", "other"), ("int64", "tiered")):
        assert not send_pays(1 << 24, dtype, code, FOUR, rates(1e6))


def test_every_reason_is_told() -> None:
    large = 1 << 26

    def reason(numel: int, dtype: str, world: GroupShape, found: WireRates, **more: Any) -> str:
        choice = decide("all_gather", numel, dtype, world, found, **more)
        assert choice.codec == "raw"
        return choice.reason

    assert reason(large, "bfloat16", GroupShape(1), rates()) == wire.ONE_RANK
    assert reason(large, "int64", FOUR, rates()) == wire.NO_CODE
    assert reason(large, "float16", FOUR, rates()) == wire.NOT_MEASURED
    assert reason(1000, "bfloat16", FOUR, rates()) == wire.TOO_SMALL
    assert reason(large, "bfloat16", FOUR, rates(1e11)) == wire.FAST_LINK
    assert reason(large, "bfloat16", FOUR, rates(), ratio={"window": 1.0, "tiered": 1.0}) == wire.LOW_RATIO


def test_an_unknown_operation_is_refused() -> None:
    with pytest.raises(ConfigError, match="operation is 'gossip', but it must be one of all_gather"):
        decide("gossip", 1, "bfloat16", FOUR, rates())


# --- worlds ---


def test_the_kind_of_group_follows_from_its_machines() -> None:
    assert [GroupShape(4).kind, GroupShape(4, 4).kind, GroupShape(8, 4).kind] == ["across", "node", "all"]
    assert GroupShape(8, 4).num_nodes == 2


def test_two_levels_are_taken_where_nodes_are_fast_inside() -> None:
    links = {
        "all": link(GIGABIT / 4, world=8),  # four ranks share a node's one link
        "across": link(GIGABIT / 4, world=2),
        "node": link(1e11, alpha=1e-6, world=4),
    }
    found = replace(rates(), links=links)
    world = GroupShape(8, 4)
    for operation in ("all_gather", "reduce_scatter", "all_reduce"):
        both = decide(operation, 1 << 22, "bfloat16", world, found, levels=(1, 2))
        flat = decide(operation, 1 << 22, "bfloat16", world, found, levels=(1,))
        assert (both.levels, flat.levels, both.codec, flat.codec) == (2, 1, "tiered", "tiered")
        assert both.predicted_seconds < flat.predicted_seconds
    # An all-to-all says the same to other nodes on either way, and broadcast has no two-level form.
    assert decide("broadcast", 1 << 22, "bfloat16", world, found, levels=(1, 2)).levels == 1
    assert decide("all_gather", 1 << 22, "bfloat16", FOUR, found, levels=(2,)).levels == 1


def test_more_ranks_than_measured_cost_more_latency_and_the_same_per_byte() -> None:
    measured = link(GIGABIT, alpha=3e-4, world=4)
    scaled = measured.at(7)
    assert scaled.operations["all_gather"].alpha_seconds == pytest.approx(6e-4)
    assert scaled.operations["send"].alpha_seconds == 3e-4
    assert scaled.operations["all_gather"].seconds_per_byte == 1 / GIGABIT
    assert scaled.chunk_seconds == pytest.approx(6e-4)
    assert measured.at(4) is measured


def test_a_kind_that_was_not_measured_takes_the_nearest() -> None:
    found = rates()
    assert found.link("all") is found.links["across"]
    assert found.link("node") is found.links["across"]


# --- lines ---


@given(
    alpha=st.floats(1e-7, 1e-2),
    beta=st.floats(1e-12, 1e-6),
    sizes=st.lists(st.integers(1, 1 << 28), min_size=2, max_size=8, unique=True),
)
def test_a_line_is_found_again(alpha: float, beta: float, sizes: list[int]) -> None:
    found = fit_line([(n, alpha + beta * n) for n in sizes])
    assert found.error < 1e-3
    for n in sizes:
        assert found.seconds(n) == pytest.approx(alpha + beta * n, rel=1e-3)


@given(st.lists(st.tuples(st.integers(1, 1 << 24), st.floats(1e-6, 1.0)), min_size=1, max_size=6))
def test_no_line_fits_noise_better_without_going_negative(points: list[tuple[int, float]]) -> None:
    found = fit_line(points)
    assert found.alpha_seconds >= 0
    assert found.seconds_per_byte >= 0
    # Relative errors, columns scaled alike so that the solver sees numbers of one size.
    matrix = [[1 / s, n / 2**24 / s] for n, s in points]
    _, residual = nnls(matrix, [1.0] * len(points))
    own = math.sqrt(sum((found.seconds(n) / s - 1) ** 2 for n, s in points))
    assert own <= residual + 1e-6


def test_a_line_needs_a_point() -> None:
    with pytest.raises(ValueError, match="points are empty"):
        fit_line([(1, 0.0)])


# --- the file ---


def test_rates_survive_the_file_and_have_a_digest(tmp_path: Path) -> None:
    found = rates(layout=(4, 1), hosts=("a", "b"), source="a test")
    found.save(tmp_path / "deep" / "rates.json")
    again = WireRates.load(tmp_path / "deep" / "rates.json")
    assert again == found
    assert again.digest == found.digest != rates(1e9).digest
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["rates.json"]


def test_the_default_path_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    monkeypatch.delenv("LACONIC_WIRE_RATES", raising=False)
    assert default_path() == Path("/cache/laconic/wire_rates.json")
    monkeypatch.setenv("LACONIC_WIRE_RATES", "/elsewhere.json")
    assert default_path() == Path("/elsewhere.json")


def _change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    *outer, leaf = path.split(".")

    def change(data: dict[str, Any]) -> None:
        for key in outer:
            data = data[key]
        if value is None:
            del data[leaf]
        else:
            data[leaf] = value

    return change


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("format", "plan", "no laconic wire rates file"),
        ("version", 2, "version is 2, but this laconic reads version 1"),
        ("links", {}, "links is empty"),
        ("links.across.world", 1, "links.across.world is 1, but it must be greater than or equal to 2"),
        ("links.across.operations.all_to_all", None, "operations has no all_to_all"),
        ("links.across.operations.send.seconds_per_byte", float("inf"), "seconds_per_byte is inf"),
        ("links.across.operations.gossip", {}, "gossip is 'gossip', but it must be one of all_gather, "),
        ("links.far", {}, "links.far is 'far', but it must be one of all, node, across;"),
        ("codecs.bfloat16.tiered.encode", None, "encode is missing"),
        ("codecs.int64", {}, "codecs.int64 is 'int64', but it must be one of bfloat16, "),
        ("codecs.bfloat16.huffman", {}, "codecs.bfloat16.huffman is 'huffman', but it must be one of window, tiered;"),
        ("layout", [1], "layout.1 is missing"),
    ],
)
def test_a_file_that_lies_is_refused(path: str, value: Any, words: str, tmp_path: Path) -> None:
    data = rates().to_dict()
    data = json.loads(json.dumps(data))
    _change(path, value)(data)
    file = tmp_path / "rates.json"
    file.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=words):
        WireRates.load(file)


def test_a_file_need_not_say_where_it_was_measured_and_may_say_more_of_a_link() -> None:
    data = json.loads(json.dumps(rates().to_dict()))
    for name in ("device", "layout", "hosts", "source"):
        del data[name]
    data["links"]["across"]["remark"] = "behind a switch"
    assert WireRates.from_dict(data) == WireRates(rates().links, rates().codecs)
    with pytest.raises(ConfigError, match=r"is not JSON serializable; measure with laconic profile"):
        WireRates.from_dict(data | {"source": {1}})


def test_a_file_that_is_no_json_or_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "half.json").write_text('{"format": ')
    with pytest.raises(ConfigError, match="are not JSON"):
        WireRates.load(tmp_path / "half.json")
    with pytest.raises(ConfigError, match="must be a file"):
        WireRates.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    "sent_nbytes", [1, 1 << 18, (1 << 19) - 1, 1 << 19, 1 << 22, (1 << 22) + 1, 1 << 26, 1 << 27, 1 << 30]
)
def test_chunks_are_neither_tiny_nor_larger_than_what_codecs_were_measured_on(sent_nbytes: int) -> None:
    numbers = list(wire.chunk_numbers(sent_nbytes))
    assert numbers == sorted(numbers)
    assert max(numbers) <= wire.MAX_CHUNKS
    assert all(sent_nbytes / number <= wire.MAX_CHUNK_NBYTES or number == wire.MAX_CHUNKS for number in numbers)
    assert all(sent_nbytes / number >= wire.MIN_CHUNK_NBYTES or number == 1 for number in numbers)


# --- rings ---


def with_ring(share: float, alpha: float = 2e-4, world: int = 4) -> WireRates:
    """A link whose one stream takes `share` of what streams between every two ranks take."""
    one = link(GIGABIT, world=world)
    ring = Line(alpha, share / GIGABIT)
    return replace(rates(), links={"across": replace(one, travels={RING: ring})})


def test_a_sum_goes_around_where_one_stream_is_faster_than_many() -> None:
    for operation in ("all_reduce", "reduce_scatter"):
        assert decide(operation, 1 << 24, "bfloat16", FOUR, with_ring(0.7)).ring, operation
        assert not decide(operation, 1 << 24, "bfloat16", FOUR, with_ring(1.3)).ring, operation
    for operation in ("all_gather", "all_to_all", "broadcast"):
        assert not any(c.ring for c in candidates(operation, 1 << 24, "bfloat16", FOUR, with_ring(0.7)))


def test_two_ranks_and_rates_without_a_ring_know_none() -> None:
    assert not any(c.ring for c in candidates("all_reduce", 1 << 24, "bfloat16", GroupShape(2), with_ring(0.5)))
    assert not any(c.ring for c in candidates("all_reduce", 1 << 24, "bfloat16", FOUR, rates()))


def test_a_ring_pays_its_latency_at_every_hop() -> None:
    def best(alpha: float, numel: int) -> bool:
        return decide("all_reduce", numel, "bfloat16", FOUR, with_ring(0.9, alpha)).ring

    assert best(1e-5, 1 << 20)
    assert not best(5e-3, 1 << 20)
    assert best(5e-3, 1 << 27)


def test_hops_of_a_ring_are_those_of_the_definition() -> None:
    """Without coding, one chunk: W - 1 hops of a W-th each, twice for an all-reduce."""
    none = Line(0.0, 0.0)
    codec = CodecRates(none, none, none, 1.5)
    one = with_ring(1.0, alpha=1e-3).links["across"]
    nbytes = 12e6
    for operation, hops in (("reduce_scatter", 3), ("all_reduce", 6)):
        expected = hops * (1e-3 + nbytes / 4 / 1.5 / GIGABIT)
        assert ring_seconds(operation, nbytes, 4, one, codec, 1.5, 1) == pytest.approx(expected)


def test_how_messages_travel_is_kept_in_the_file(tmp_path: Path) -> None:
    found = with_ring(0.7)
    found.save(tmp_path / "rates.json")
    assert WireRates.load(tmp_path / "rates.json") == found
    data = found.to_dict()
    data["links"]["across"]["travels"] = {"pigeon": {"alpha_seconds": 1.0, "seconds_per_byte": 1.0, "error": 0.0}}
    with pytest.raises(ConfigError, match=r"travels.pigeon is 'pigeon', but it must be one of "):
        WireRates.from_dict(data)
    del data["links"]["across"]["travels"]
    with pytest.raises(ConfigError, match=r"links.across.travels is missing; measure with laconic profile"):
        WireRates.from_dict(data)


def test_a_neighbour_is_one_however_many_ranks_there_are() -> None:
    one = with_ring(0.7).links["across"]
    assert one.at(16).travels[RING] == one.travels[RING]


def test_raw_is_the_backend_s_and_coded_messages_travel_as_they_do() -> None:
    """A backend that is slow at all-gathers makes coding pay, and not coded messages slow."""
    slow, fast = line(GIGABIT / 3, 2e-4), line(GIGABIT, 2e-4)
    one = link(GIGABIT)
    given = replace(one, operations={**one.operations, "all_gather": slow}, travels={"all_gather": fast})
    found = decide("all_gather", 1 << 22, "bfloat16", FOUR, replace(rates(), links={"across": given}))
    plain = decide("all_gather", 1 << 22, "bfloat16", FOUR, rates())
    assert found.predicted_seconds == plain.predicted_seconds
    assert found.raw_seconds > 2.9 * plain.raw_seconds
