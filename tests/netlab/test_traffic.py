"""What interfaces count is what the audit says; two levels spare the links between nodes."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from netlab import Lab, Traffic, finish
from tests.distributed.processes import ROOT, environment
from tests.netlab.conftest import MakeLab
from tests.netlab.ranks_once import NUMEL
from tests.netlab.ranks_sharded import LAYERS, WIDTH
from tests.patience import patient

pytestmark = pytest.mark.usefixtures("forked_ranks")

NBYTES = 2 * NUMEL


def run_once(
    lab: Lab, *arguments: str, module: str = "ranks_once", ranks_per_host: int = 1
) -> tuple[list[Any], dict[str, Traffic]]:
    """What each rank printed, and what passed each link."""
    before = lab.traffic()
    command = [sys.executable, "-m", f"tests.netlab.{module}", *arguments]
    endings = finish(lab.start_ranks(command, environment(), cwd=ROOT, ranks_per_host=ranks_per_host), patient(100))
    passed = {name: traffic - before[name] for name, traffic in lab.traffic().items()}
    for ending in endings:
        assert ending.code == 0, ending.err
    return [json.loads(ending.out.splitlines()[-1]) for ending in endings], passed


@pytest.mark.slow
def test_the_audit_of_every_collective_agrees_with_the_interface(make_lab: MakeLab) -> None:
    found, _ = run_once(make_lab(3, 1e9))
    shares = {"all_gather": 2 / 3, "reduce_scatter": 2 / 3, "all_reduce": 4 / 3, "all_to_all": 2 / 3}
    for rank, operations in enumerate(found):
        assert set(operations) == {*shares, "broadcast"}
        for operation, (raw_nbytes, sent_nbytes, interface_nbytes) in operations.items():
            if operation in shares:
                assert raw_nbytes == pytest.approx(shares[operation] * NBYTES, rel=0.001)
                assert 1.4 * sent_nbytes < raw_nbytes
            # A large part of TCP's and IP's headers is added behind the counter; barriers and answers are before it.
            assert sent_nbytes < interface_nbytes < 1.08 * sent_nbytes + 20_000, (rank, operation)


@pytest.mark.slow
def test_on_two_levels_less_passes_between_nodes(make_lab: MakeLab) -> None:
    flat, two = (run_once(make_lab(4, 1e9, num_nodes=2), *arguments) for arguments in ([], ["levels"]))
    between = [passed["node 0"].sent_nbytes for _, passed in (flat, two)]
    # Two calls of each. All-gather and reduce-scatter take a quarter of the tensor from each of two hosts to both hosts
    # of the other node, an all-reduce does both: 4, 4, 8 quarters; on two levels each host has one peer there: 2, 2, 4.
    # What an all-to-all carries is all different: 4 either way.
    assert between[0] > 1.5 * between[1]
    assert between[1] < 2 * (2 + 2 + 4 + 4) / 4 * NBYTES / 1.4


@pytest.mark.slow
def test_backward_gathers_inside_the_node_what_its_ranks_have_kept(make_lab: MakeLab) -> None:
    """hpZ of ZeRO++, as `reshard_after_forward=2`, with what shortens the gathers of forward."""
    for found in run_once(make_lab(2, 1e9), module="ranks_sharded", ranks_per_host=2)[0]:
        (plain, plain_node), (coded, coded_node), (zipped, zipped_node) = zip(found[::2], found[1::2], strict=True)
        assert plain[0] == plain_node[0] == zipped[0] == zipped_node[0] != coded[0] == coded_node[0]
        # Gradients pass in all of them. The gathers of backward pass between nodes, or not at all.
        nbytes = 4 * LAYERS * (WIDTH + 1) * WIDTH
        assert plain[1][1] - plain_node[1][1] == pytest.approx(0.75 * nbytes, rel=0.1)
        assert coded_node[1][1] == pytest.approx(plain_node[1][1], rel=0.03)
        assert 0.6 * nbytes < zipped[1][1] - zipped_node[1][1] < 0.9 * nbytes
        # Those of forward do as they would.
        for kept, node in ((plain, plain_node), (coded, coded_node), (zipped, zipped_node)):
            assert node[1][0] == pytest.approx(kept[1][0], rel=0.15)
        assert coded[1][0] < 0.5 * plain[1][0]
