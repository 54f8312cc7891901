"""A bit that flips in an 8-bit reduction, which has no checksum: what is found, by whom, and what is not.

docs/reliability.md says the same in a table. A flip before the sum is in the result of all ranks alike; one after it is
in the result of one rank, where a vote of replicas finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic import verify_replicas
from laconic.errors import CorruptionError
from laconic.gradients import reduce as module
from laconic.gradients.reduce import all_reduce_q8
from laconic.train.launch.worker import leave
from tests.distributed.processes import run_ranks

NUMEL = 1024
FAULTS = {
    "code before the sum": ("all_to_all_chunk", (0, 16), 0x40),
    "scale before the sum": ("all_to_all_chunk", (0, 2), 0x40),
    "exponent of a scale before the sum": ("all_to_all_chunk", (0, 3), 0x40),
    "code after the sum": ("all_gather_chunk", (0, 16), 0x40),
    "scale after the sum": ("all_gather_chunk", (0, 2), 0x40),
}
"""In which transfer, at which byte of what arrives (rank of the sender, place), and the bits that flip; on rank 1.

A rank's part has 512 elements: four scales, then the codes.
"""
SEND_CODES = module.all_to_all_chunk
Found = dict[str, Any]


class Held(nn.Module):
    """Weights that are what a reduction returned."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(value)


def flipping(transfer: Callable[..., Iterator[Any]], place: tuple[int, int], bits: int) -> Callable[..., Iterator[Any]]:
    """The transfer, after which bits of what arrived are others."""

    def flipped(*args: Any) -> Iterator[Any]:
        result = yield from transfer(*args)
        received = args[2] if transfer is SEND_CODES else args[3]
        received.view(2, -1)[place] ^= bits
        return result

    return flipped


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    x = torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))
    found: Found = {"sound": all_reduce_q8(x.clone(), min_nbytes=0)}
    for name, (transfer, place, bits) in FAULTS.items():
        original = getattr(module, transfer)
        if rank == 1:
            setattr(module, transfer, flipping(original, place, bits))
        result = all_reduce_q8(x.clone(), min_nbytes=0)
        setattr(module, transfer, original)
        try:
            verify_replicas(Held(result))
        except CorruptionError as error:
            vote = str(error)
        else:
            vote = "all the same"
        found[name] = {"result": result, "vote": vote}
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    leave(0)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    folder = tmp_path_factory.mktemp("flipped")
    run_ranks(work, (str(folder),), 2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def wrong(found: list[Found], name: str, rank: int) -> Tensor:
    """Which elements of a rank's result differ from the sound one."""
    sound, result = found[rank]["sound"], found[rank][name]["result"]
    return ~torch.isclose(sound, result, rtol=0, atol=1e-7, equal_nan=False)


def test_a_flip_before_the_sum_is_on_all_ranks_and_found_by_none(found: list[Found]) -> None:
    name = "code before the sum"
    results = [found[rank][name] for rank in range(2)]
    assert torch.equal(results[0]["result"], results[1]["result"])
    assert results[0]["vote"] == results[1]["vote"] == "all the same"
    off = wrong(found, name, 0)
    assert off.any()
    assert off.nonzero().max() - off.nonzero().min() < 128  # its block: a larger sum has another scale
    assert (results[0]["result"] - found[0]["sound"]).abs().max() < 4  # a code of 7 bits times a scale


def test_a_flipped_scale_before_the_sum_changes_its_block_on_all_ranks(found: list[Found]) -> None:
    name = "scale before the sum"
    assert torch.equal(found[0][name]["result"], found[1][name]["result"])
    assert found[0][name]["vote"] == "all the same"
    off = wrong(found, name, 0)
    assert 100 < int(off.sum()) <= 128


def test_an_exponent_that_overflows_is_seen_as_nan_or_as_a_huge_norm(found: list[Found]) -> None:
    """What a trainer does with it: it skips a step that is not finite, and clips one that is."""
    for rank in range(2):
        result = found[rank]["exponent of a scale before the sum"]["result"]
        assert not result.isfinite().all() or result.norm() > 1e30


@pytest.mark.parametrize("name", ["code after the sum", "scale after the sum"])
def test_a_flip_after_the_sum_is_found_by_a_vote(name: str, found: list[Found]) -> None:
    assert not wrong(found, name, 0).any()
    assert wrong(found, name, 1).any()
    for rank in range(2):
        assert "weight" in found[rank][name]["vote"]
