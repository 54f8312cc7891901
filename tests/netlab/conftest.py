"""Labs for tests; every test here is skipped, with the reason, where none can be built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Protocol

import pytest

from netlab import Lab, program, why_not
from tests.distributed.forked import forked_programs


class MakeLab(Protocol):
    def __call__(
        self,
        num_hosts: int,
        bits_per_second: float | None = None,
        *,
        num_nodes: int | None = None,
        node_bits_per_second: float | None = None,
    ) -> Lab: ...


@pytest.fixture
def forked_ranks() -> Iterator[None]:
    """Programs on hosts are forked; those whose interpreter ends by an error are under test with that end."""
    with forked_programs(program):
        yield


@pytest.fixture
def make_lab() -> Iterator[MakeLab]:
    """Builds labs that end with the test."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with ExitStack() as stack:

        def make(
            num_hosts: int,
            bits_per_second: float | None = None,
            *,
            num_nodes: int | None = None,
            node_bits_per_second: float | None = None,
        ) -> Lab:
            lab = Lab(num_hosts, bits_per_second, num_nodes=num_nodes, node_bits_per_second=node_bits_per_second)
            return stack.enter_context(lab)

        yield make
