"""What other libraries say goes into messages of our own, also where they say nothing."""

from __future__ import annotations

import pytest

from laconic.errors import first_line
from laconic.train.launch.worker import EXIT_PEER_LOST, _lost


@pytest.mark.parametrize(
    ("said", "found"),
    [("one\ntwo", "one"), ("\n  one\ntwo", "one"), ("", "RuntimeError"), (" \n", "RuntimeError")],
)
def test_an_error_is_cited_by_its_first_line(said: str, found: str) -> None:
    assert first_line(RuntimeError(said)) == found


def test_a_peer_is_lost_without_a_word() -> None:
    assert _lost("rank 1", RuntimeError()).code == EXIT_PEER_LOST
