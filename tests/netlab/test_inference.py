"""An engine whose workers are on two hosts: tokens, bytes on the wire, hosts that are lost."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from netlab import Lab, finish
from tests.distributed.processes import ROOT, environment
from tests.infer.models import make
from tests.netlab.conftest import MakeLab
from tests.netlab.inference_ranks import Task
from tests.patience import patient

pytestmark = pytest.mark.usefixtures("forked_ranks")


def run(lab: Lab, task: Task) -> dict[str, Any]:
    """What rank 0 found."""
    endings = finish(
        lab.start_ranks(task.as_arguments(), environment(PYTHONWARNINGS="default"), cwd=ROOT), patient(100)
    )
    for ending in endings:
        assert ending.code == 0, ending.err
    return dict(json.loads(endings[0].out.splitlines()[-1]))


@pytest.mark.slow
def test_lossless_rows_between_two_hosts_give_the_same_tokens_in_fewer_bytes(make_lab: MakeLab, tmp_path: Path) -> None:
    model = make("mixtral", tmp_path, hidden_size=512, num_hidden_layers=2)
    # A message takes less than the 50 ms that a switch queues: none is cut, so none waits for a timeout of TCP.
    lab = make_lab(2, 30e6)
    raw, lossless = (run(lab, Task(str(model), payload)) for payload in ("raw", "lossless"))
    assert lossless["tokens"] == raw["tokens"]
    assert raw["hosts"][0] is None
    assert raw["hosts"][1] is not None
    for found in (raw, lossless):
        a2e, _ = found["traffic"]
        # The interface counts TCP and IP as well, the store and the requests.
        assert a2e["sent_nbytes"] < found["interface_nbytes"] < 1.1 * a2e["sent_nbytes"] + 100_000
    assert lossless["traffic"][0]["raw_nbytes"] == raw["traffic"][0]["raw_nbytes"]
    assert 1.4 * lossless["interface_nbytes"] < raw["interface_nbytes"]


ENGINE_END = """
import json, os
from torch._C._distributed_c10d import HashStore
from laconic.infer import connections as wire, control
from laconic.infer.settings import WorkerSettings
wire._KEEPALIVE |= {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 2}
wire._USER_TIMEOUT_MILLISECONDS = 3000
store = HashStore()
connections = control.RankConnections(store)
print("place", store.get("laconic-infer-0/laconic-infer/engine").decode(), flush=True)
worker = connections.accept({1: WorkerSettings(1, "", "")}, 30)[1]
print("connected", flush=True)
print(len(list(worker.events)), worker.ending(), flush=True)
"""
RANK_END = """
import json, os, socket, sys, time
sys.path.insert(0, "src")
from laconic.shared_secret import enter
address, port, token = json.loads(sys.argv[1])
connection = socket.create_connection((address, port))
enter(connection, token, "ranks of an engine", 10)
hello = {"rank": 1, "pid": os.getpid(), "host": "other"}
connection.sendall(json.dumps(hello).encode() + b"\\n")
time.sleep(60)
"""


@pytest.mark.slow
def test_a_host_that_is_cut_off_is_noticed_without_a_word_from_it(make_lab: MakeLab) -> None:
    """With shorter times than those of `_KEEPALIVE`; the connection is idle, so nothing else would fail."""
    lab = make_lab(2, 1e9)
    changes = {"MASTER_ADDR": lab.address(0), "PYTHONWARNINGS": "default"}
    engine = lab.start(0, [sys.executable, "-c", ENGINE_END], environment(**changes), cwd=ROOT)
    engine.wait_for("place", patient(60))
    place = engine.out.partition("place ")[2].splitlines()[0]
    lab.start(1, [sys.executable, "-S", "-c", RANK_END, place], cwd=ROOT)
    engine.wait_for("connected", patient(60))
    lab.host_links[1].cut()
    start = time.monotonic()
    engine.wait_for("0 (rank 1, pid ", patient(20))
    assert time.monotonic() - start < patient(10)
    assert "on other) broke its connection" in engine.out
