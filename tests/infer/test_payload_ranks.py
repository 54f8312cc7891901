"""Codings of rows and sums between real processes: every slicing, empty and uneven slices, what is counted."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from laconic.collectives.policy.selector import use_rates
from laconic.infer.connections import accept_attention, connect_expert
from laconic.infer.control import open_store
from laconic.infer.links import TcpExpertLink, serve
from laconic.infer.messages import Rows
from laconic.infer.payload import Coder, prepared_coder
from laconic.infer.remote_experts import RemoteExperts
from laconic.infer.settings import WorkerSettings
from laconic.infer.split import EngineSplit
from laconic.infer.worker import _join_group
from laconic.schedule.inference import InferencePlan
from laconic.train.launch.worker import leave
from tests.collectives.simulated import made_up_rates
from tests.distributed.processes import run_ranks

NUM_EXPERTS, TOP_K, WIDTH = 5, 2, 192
SPLIT = EngineSplit(1, 2)
PLANS = [InferencePlan(1, r2, "ASAS", slicing) for r2, slicing in product((1, 2, 3, 7), ("tokens", "experts"))]
NUM_ROWS = (0, 1, 2, 5, 400)
"""Fewer rows than slices leave slices empty; 400 rows are 75 KB and more, which "auto" may code."""


def weighted(rows: Rows) -> Tensor:
    """Experts that multiply by 1, 2, ...: the error of the sums follows from that of the rows."""
    factors = torch.where(rows.experts >= 0, (rows.experts + 1) * rows.weights, 0.0).sum(1, keepdim=True)
    return (rows.hidden.float() * factors).to(rows.hidden.dtype)


def layer_input(num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    hidden = torch.randn(num_rows, WIDTH, generator=generator).to(dtype)
    experts = torch.randint(NUM_EXPERTS, (num_rows, TOP_K), generator=generator)
    return hidden, experts, torch.rand(num_rows, TOP_K, generator=generator)


def with_links(folder: str, rank: int, payload: str, work: object) -> None:
    """Rank 0 calls `work` with links to the others, which answer."""
    torch.set_num_threads(1)
    settings = WorkerSettings(rank, "", f"{folder}/{payload}", SPLIT)
    store = open_store(settings.store, SPLIT.num_workers)
    if rank > 0:
        found = accept_attention(store, rank - 1, 1)
    else:
        found = [connect_expert(store, number, 0) for number in range(2)]
    coder = prepared_coder(payload, lambda: _join_group(settings, store))
    if rank > 0:
        serve(found, weighted, coder)
        return
    links = [TcpExpertLink(one, f"expert worker {number}", 30.0, coder=coder) for number, one in enumerate(found)]
    assert callable(work)
    work(links, coder)
    for link in links:
        link.close()


def outputs(links: list[TcpExpertLink], plan: InferencePlan, num_rows: int, dtype: torch.dtype) -> Tensor:
    remote = RemoteExperts(links, [[SPLIT.expert_range(worker, NUM_EXPERTS) for worker in range(2)]], plan)
    remote.begin_forward(num_rows)
    found = remote.run(0, *layer_input(num_rows, dtype))
    remote.end_forward()
    return found


def _every_slicing(rank: int, folder: str) -> None:
    raw: dict[object, Tensor] = {}
    raw_nbytes = []

    def work(payload: str, links: list[TcpExpertLink], coder: Coder) -> None:
        for case in product(PLANS, NUM_ROWS, (torch.float32, torch.bfloat16)):
            found = outputs(links, *case)
            wanted = raw.setdefault(case, found)
            if payload != "int8":
                assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)), case
                continue
            hidden, experts, weights = layer_input(*case[1:])
            # Rows and sums are off by 1/254 of a block's largest value each; bfloat16 rounds in every message.
            largest = hidden.float().abs().amax() if len(hidden) else torch.zeros(())
            factor = ((experts + 1) * weights).sum(1, keepdim=True)
            rounding = 0 if case[2] == torch.float32 else 2**-7
            bound = (2.1 / 254 + rounding) * factor * largest * 2
            assert ((found.float() - wanted.float()).abs() <= bound).all(), case
        for traffic in [link.a2e_traffic for link in links] + [link.e2a_traffic for link in links]:
            assert traffic.messages > 0
            assert traffic.coded == (0 if payload == "raw" else traffic.messages)
            assert (traffic.sent_nbytes < 0.9 * traffic.raw_nbytes) == (payload != "raw")
        raw_nbytes.append([(link.a2e_traffic.raw_nbytes, link.e2a_traffic.raw_nbytes) for link in links])
        assert raw_nbytes[0] == raw_nbytes[-1]

    for payload in ("raw", "lossless", "int8"):
        with_links(folder, rank, payload, lambda links, coder, p=payload: work(p, links, coder))
    leave(0)


@pytest.mark.ci
def test_lossless_rows_give_the_same_bits_and_int8_stays_within_its_bound(tmp_path: Path) -> None:
    run_ranks(_every_slicing, (str(tmp_path),), 3)


def _auto(rank: int, folder: str, bytes_per_second: float, coded: bool) -> None:
    use_rates(made_up_rates(bytes_per_second) if bytes_per_second else None)

    def work(links: list[TcpExpertLink], coder: Coder) -> None:
        for num_rows in (2, 400):
            outputs(links, InferencePlan(), num_rows, torch.bfloat16)
            for link in links:
                expected = int(coded and num_rows == 400)  # 2 rows are never worth it
                assert link.a2e_traffic.coded == expected
                assert link.e2a_traffic.coded == expected

    with_links(folder, rank, "auto", work)
    leave(0)


@pytest.mark.parametrize(("bytes_per_second", "coded"), [(1e6, True), (1e12, False)])
def test_auto_follows_the_rates_of_link_and_codec(tmp_path: Path, bytes_per_second: float, coded: bool) -> None:
    run_ranks(_auto, (str(tmp_path), bytes_per_second, coded), 3)


def _measured(rank: int, folder: str) -> None:
    os.environ["XDG_CACHE_HOME"] = folder  # no rates of this machine
    wanted = [outputs_of_whole(case) for case in NUM_ROWS]

    def work(links: list[TcpExpertLink], coder: Coder) -> None:
        for num_rows, one in zip(NUM_ROWS, wanted, strict=True):
            assert torch.allclose(outputs(links, InferencePlan(), num_rows, torch.float32), one, rtol=1e-5)

    with_links(folder, rank, "auto", work)
    leave(0)


def outputs_of_whole(num_rows: int) -> Tensor:
    hidden, experts, weights = layer_input(num_rows, torch.float32)
    # Numbers are those among a worker's experts: 0 and 1 of the first, 0 to 2 of the second.
    local = torch.where(experts < 2, experts, experts - 2)
    return hidden * ((local + 1) * weights).sum(1, keepdim=True)


def test_auto_measures_by_itself(tmp_path: Path) -> None:
    run_ranks(_measured, (str(tmp_path),), 3)
