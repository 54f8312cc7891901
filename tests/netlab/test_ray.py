"""Ray Train on two hosts: a node on each, workers that find each other over the link, and a worker that fails."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from netlab import Lab, finish
from tests.distributed.processes import ROOT, environment
from tests.integrations.ray_driver import VARIABLES
from tests.netlab.conftest import MakeLab
from tests.patience import patient

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1300),
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed"),
    pytest.mark.skipif(" " in sys.prefix, reason="Ray starts no workers below a path with a space"),
]

PORT = 6379


def variables() -> dict[str, str]:
    """Of a process of Ray; all of a cluster need the same token."""
    return environment(**VARIABLES, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="f" * 64, GLOO_SOCKET_IFNAME="eth0")


def start_node(lab: Lab, host: int, folder: Path) -> None:
    """A node of Ray on a host, and wait until it runs."""
    joins = ["--head", "--port", str(PORT), "--include-dashboard", "false"] if host == 0 else []
    joins = joins or ["--address", f"{lab.address(0)}:{PORT}"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *joins, "--node-ip-address", lab.address(host)]
    command += ["--num-cpus", "1", "--object-store-memory", str(80 << 20), "--disable-usage-stats", "--block"]
    command += ["--temp-dir", str(folder)] if host == 0 else []
    lab.start(host, command, variables(), name=f"node {host}").wait_for("Ray runtime started", patient(300))


@pytest.fixture
def sessions() -> Iterator[Path]:
    """Ray's sockets are here, whose paths must be short."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def test_workers_on_two_hosts_train_over_the_link_and_bear_a_failure(
    sessions: Path, make_lab: MakeLab, tmp_path: Path
) -> None:
    lab = make_lab(num_hosts=2)
    for host in range(2):
        start_node(lab, host, sessions)
    before = lab.traffic()
    driver = [sys.executable, "tests/integrations/ray_driver.py", str(tmp_path), f"{lab.address(0)}:{PORT}"]
    (ending,) = finish([lab.start(0, driver, variables(), cwd=ROOT, name="driver")], patient(590))
    assert ending.code == 0, ending.out + ending.err
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert {rank["host"] for rank in ranks} == {lab.address(0), lab.address(1)}
    assert [rank["first"] for rank in ranks] == [3, 3]  # both began at the checkpoint, after one of them had failed
    assert all(0 < rank["sent"] < 0.9 * rank["raw"] for rank in ranks)
    crossed = [traffic - before[name] for name, traffic in lab.traffic().items()]
    assert all(min(t.sent_nbytes, t.received_nbytes) > max(rank["sent"] for rank in ranks) for t in crossed)
