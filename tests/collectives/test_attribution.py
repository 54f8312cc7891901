"""Errors of a rank's own in a collective are raised as they are; what the network says is attributed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from laconic.collectives import Raw, api
from laconic.collectives.runtime.failure_diagnosis import broke_off, broken_off
from laconic.errors import CollectiveError
from laconic.moe.parallel.autograd_collectives import losses_named
from tests.streams.echo import echo

OWN = [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("[enforce fail] DefaultCPUAllocator: no memory")]
NETWORK = RuntimeError("Connection closed by peer")


@pytest.mark.parametrize("error", OWN)
def test_an_error_of_this_rank_is_raised_as_it_is(error: RuntimeError) -> None:
    with echo() as group:
        with pytest.raises(type(error)) as caught:
            broke_off("all_gather", group, [0, 1], 1, error, wake=True)
        assert caught.value is error
        with pytest.raises(type(error)) as caught:
            broken_off("all_gather", group, error)
        assert caught.value is error


def test_an_error_of_the_network_is_attributed() -> None:
    with echo() as group:
        for found in (broke_off("all_gather", group, [0, 1], 1, NETWORK, wake=True), broken_off("it", group, NETWORK)):
            assert isinstance(found, CollectiveError)
            assert "rank 1" in str(found)
            assert "Connection closed by peer" in str(found)


@pytest.mark.parametrize("error", [*OWN, NETWORK])
def test_rows_of_experts(error: RuntimeError) -> None:
    with echo() as group, pytest.raises((type(error), CollectiveError)) as caught, losses_named(group):
        raise error
    assert (caught.value is error) == (error is not NETWORK)


@pytest.mark.parametrize("error", [*OWN, NETWORK])
def test_rows_of_other_lengths(error: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("laconic.collectives.runtime.torch_compat.all_to_all_uneven", fail)
    with echo() as group, pytest.raises((type(error), CollectiveError)) as caught:
        uneven(group)
    assert (caught.value is error) == (error is not NETWORK)


def uneven(group: dist.ProcessGroup) -> None:
    x = torch.zeros(4)
    table = [[1, 3], [1, 3]]
    api.all_to_all(torch.empty(2), x, [1, 1], [1, 3], group, table=table, codec=Raw())
