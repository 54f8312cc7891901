"""Ray Train's own release on two nodes: workers of laconic's process group have gloo's losses, in fewer bytes."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.processes import environment, finish, run_ranks, start
from tests.integrations.ray_driver import STEPS, VARIABLES, make_model, train_step

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1300),
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed"),
    pytest.mark.skipif(" " in torch.__file__, reason="Ray starts no workers below a path with a space"),
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


def _over_gloo(rank: int, folder: Path) -> None:
    """Losses of the workers without Ray and laconic's process group, in `folder`/{rank}.json."""
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = [train_step(model, optimizer, step, rank) for step in range(STEPS)]
    (folder / f"{rank}.json").write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


def test_two_nodes_have_the_losses_of_gloo_in_fewer_bytes_also_after_a_worker_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    gloo, ray = tmp_path / "gloo", tmp_path / "ray"
    gloo.mkdir()
    ray.mkdir()
    run_ranks(_over_gloo, (gloo,), 2)
    variables = environment(**VARIABLES, GLOO_SOCKET_IFNAME="lo")
    ending = finish(start(["tests/integrations/ray_driver.py", str(ray)], variables), 590)
    assert ending.code == 0, ending.out + ending.err
    ranks = [json.loads((ray / f"{rank}.json").read_text()) for rank in range(2)]
    for number, rank in enumerate(ranks):
        assert (rank["backend"], rank["wrapped"]) == ("laconic", "DistributedDataParallel")
        assert rank["first"] == 3  # the second attempt began at the checkpoint
        assert rank["losses"] == json.loads((gloo / f"{number}.json").read_text())[3:]
        assert 0 < rank["sent"] < 0.9 * rank["raw"]
    assert len({rank["node"] for rank in ranks}) == 2
