"""Fixtures of the activation tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from laconic.activations.keep import kept
from tests.activations.models import FAMILIES
from tests.grid import slow_but


# test_gradients_are_as_close_as_the_format_allows and the audit's tests run all families.
@pytest.fixture(params=slow_but(sorted(FAMILIES), "gemma2", "gpt2", "llama"))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets every site keep its tensor as it is, which leaves the hand-written backward alone under test."""
    monkeypatch.setattr(kept, "_producer_holds", lambda x, nodes: True)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """One process on the CPU, for DTensors."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
