"""The wire audit: sums, differences, reasons, threads, text and JSON."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest
import torch

from laconic.collectives import audit


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    audit.reset()
    yield
    audit.reset()


def test_calls_of_one_kind_are_summed_and_others_kept_apart() -> None:
    audit.record("all_gather", torch.bfloat16, 1500, 1000, "tiered", "pays", 0.25, saved_seconds=0.5)
    audit.record("all_gather", "bfloat16", 3000, 2000, "tiered", "pays", 0.25, saved_seconds=0.25)
    audit.record("all_gather", torch.bfloat16, 10, 10, "raw", "too small", 0.0)
    audit.record("all_reduce", torch.float32, 200, 200, "raw", "not a coded dtype", 0.0)
    found = audit.snapshot()
    assert [(e.operation, e.dtype, e.codec, e.num_calls) for e in found.entries] == [
        ("all_gather", "bfloat16", "raw", 1),
        ("all_gather", "bfloat16", "tiered", 2),
        ("all_reduce", "float32", "raw", 1),
    ]
    tiered = found.entries[1]
    assert (tiered.raw_nbytes, tiered.sent_nbytes, tiered.ratio) == (4500, 3000, 1.5)
    assert (tiered.coding_seconds, tiered.saved_seconds, tiered.reasons) == (0.5, 0.75, {"pays": 2})
    assert (found.raw_nbytes, found.sent_nbytes, found.ratio) == (4710, 3210, 4710 / 3210)
    assert found.left_raw() == {"not a coded dtype": 1, "too small": 1}


def test_a_later_snapshot_minus_an_earlier_one_is_what_came_between() -> None:
    audit.record("send", torch.bfloat16, 300, 200, "window", "pays", 1.0)
    before = audit.snapshot()
    assert (audit.snapshot() - before).entries == ()
    audit.record("send", torch.bfloat16, 30, 30, "window", "probe", 0.5)
    audit.record("recv", torch.bfloat16, 0, 0, "raw", "too small", 0.0)
    between = audit.snapshot() - before
    assert [(e.operation, e.num_calls, e.raw_nbytes, dict(e.reasons)) for e in between.entries] == [
        ("recv", 1, 0, {"too small": 1}),
        ("send", 1, 30, {"probe": 1}),
    ]
    assert before + between == audit.snapshot()


def test_nothing_sent_has_ratio_one_and_says_so() -> None:
    assert audit.snapshot().ratio == 1.0
    assert audit.snapshot().table() == "no collective of laconic was called"


def test_the_table_shows_every_entry_the_sum_and_what_was_left_raw() -> None:
    audit.record("all_gather", torch.bfloat16, 3_000_000, 2_000_000, "tiered", "pays", 0.25, saved_seconds=0.5)
    audit.record("all_gather", torch.bfloat16, 1000, 1000, "raw", "too small", 0.0)
    lines = audit.snapshot().table().splitlines()
    assert lines[0].split("  ")[-1].strip() == "saved s (estimated)"
    assert " ".join(lines[3].split()) == "all_gather bfloat16 tiered 1 3.00 MB 2.00 MB 1.500 0.250 0.500"
    assert lines[4].split()[:2] == ["all", "2"]
    assert lines[5] == "left raw: 1 calls, too small"


def test_a_snapshot_survives_json() -> None:
    audit.record("all_to_all", torch.float16, 3, 2, "tiered", "pays", 0.125, saved_seconds=0.5)
    found = audit.snapshot()
    assert audit.Snapshot.from_dict(json.loads(found.to_json())) == found


def test_reasons_with_numbers_in_them_do_not_grow_without_end() -> None:
    for number in range(100):
        audit.record("send", "bfloat16", 1, 1, "raw", f"because of {number}", 0.0)
    (entry,) = audit.snapshot().entries
    assert sum(entry.reasons.values()) == 100
    assert len(entry.reasons) <= 33


def test_no_call_is_lost_between_threads() -> None:
    def work() -> None:
        for _ in range(500):
            audit.record("send", "bfloat16", 3, 2, "tiered", "pays", 0.5)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (entry,) = audit.snapshot().entries
    assert (entry.num_calls, entry.raw_nbytes, entry.coding_seconds) == (2000, 6000, 1000.0)
