"""Ray Train's own release on two nodes: workers of laconic's process group have gloo's losses, in fewer bytes."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.processes import environment, finish, start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1300),
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed"),
]

_REFUSALS = """
from laconic.collectives import Blockwise
from laconic.formats import BlockFormat
from laconic.errors import ConfigError
from laconic.integrations.ray import LaconicTorchConfig

for changes, words in (
    ({"backend": "gloo"}, "backend is 'gloo', but it must be one of laconic, laconic:gloo, laconic:nccl"),
    ({"codec": "zip"}, "codec is 'zip'"),
    ({"codec": Blockwise(BlockFormat.from_bits(8))}, "which must not change"),
    ({"min_nbytes": -1}, "min_nbytes is -1"),
):
    try:
        LaconicTorchConfig(**changes)
    except ConfigError as error:
        assert words in str(error), error
    else:
        raise AssertionError(changes)
"""


def test_settings_are_checked_where_the_trainer_is_made() -> None:
    ending = finish(start(["-c", _REFUSALS], environment(PYTHONWARNINGS="ignore")))
    assert ending.code == 0, ending.err


def trained(folder: Path, backend: str) -> list[dict[str, Any]]:
    folder.mkdir()
    quiet = {"PYTHONWARNINGS": "ignore", "RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "150"}
    variables = environment(**quiet, GLOO_SOCKET_IFNAME="lo")
    ending = finish(start(["tests/integrations/ray_driver.py", str(folder), backend], variables), 590)
    assert ending.code == 0, ending.out + ending.err
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_two_nodes_have_the_losses_of_gloo_in_fewer_bytes_also_after_a_worker_has_failed(tmp_path: Path) -> None:
    gloo, ours = trained(tmp_path / "gloo", "gloo"), trained(tmp_path / "laconic", "laconic")
    for alone, rank in zip(gloo, ours, strict=True):
        assert (alone["backend"], rank["backend"]) == ("gloo", "laconic")
        assert rank["wrapped"] == "DistributedDataParallel"
        assert (alone["first"], rank["first"]) == (0, 3)  # the second attempt began at the checkpoint
        assert rank["losses"] == alone["losses"][3:]
        assert 0 < rank["sent"] < 0.9 * rank["raw"]
    assert len({rank["node"] for rank in ours}) == 2
