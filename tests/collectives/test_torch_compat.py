"""What goes to torch's own functions, and what around them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from laconic.collectives.runtime import torch_compat


@pytest.mark.parametrize("device", ["cuda:0", "cuda", "cpu"])
def test_a_batch_of_a_group_with_a_backend_for_the_device_is_torchs(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    group = SimpleNamespace(_device_types=[torch.device("cuda")])  # as torch lists them, without an index
    tensor = SimpleNamespace(device=torch.device(device))
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda _: ["torch's"])
    monkeypatch.setattr(dist, "isend", lambda *_, **__: "one by one")
    operation: Any = SimpleNamespace(op=dist.isend, tensor=tensor, group=group, tag=0, group_peer=1)
    expected = "one by one" if device == "cpu" else "torch's"
    assert torch_compat.batch_isend_irecv([operation]) == [expected]
