"""Quantized reductions between real processes: the reference's bits, on every rank, in every world."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives.codec import Codec
from laconic.collectives.engine import transport
from laconic.errors import ConfigError, FormatError
from laconic.gradients import TwoLevel, Work, all_reduce_q8, all_reduce_quantized, reduce, reduce_scatter_q8
from laconic.ops import sum_blockwise
from laconic.train.distributed.traffic import WireCounter
from laconic.train.launch.worker import leave
from tests.distributed.processes import run_ranks
from tests.gradients.reference import error_bound, gradient_of, mean_by_reference, value_of
from tests.ops.shards import shards_of

LENGTHS = (1, 127, 128, 129, 700, 3001)


def inputs(world: int, length: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """What every rank has, [W, n], the same on all of them."""
    generator = torch.Generator().manual_seed(1000 * seed + 10 * length + world)
    return torch.randn(world, length, generator=generator).to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def finished(result: Tensor | Work[Tensor]) -> Tensor:
    return result if isinstance(result, Tensor) else result.wait()


@contextmanager
def chunks_of(numel: int) -> Iterator[None]:
    """Cut tensors into chunks of `numel` elements."""
    before, reduce._CHUNK_NUMEL = reduce._CHUNK_NUMEL, numel
    try:
        yield
    finally:
        reduce._CHUNK_NUMEL = before


@contextmanager
def threads_of(name: str) -> Iterator[list[threading.Thread]]:
    """Which threads call a function of reduce.py, call by call."""
    threads, function = [], getattr(reduce, name)

    def seen(*arguments: object) -> object:
        threads.append(threading.current_thread())
        return function(*arguments)

    with mock.patch.object(reduce, name, seen):
        yield threads


class Checks:
    """What each process checks, as `rank` of `world` in `group`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.world = group, group.rank(), group.size()

    def all_reduce(self) -> None:
        for length in LENGTHS:
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                x = inputs(self.world, length, dtype)
                expected = value_of(mean_by_reference(x.float(), 8, 1 / self.world), dtype)
                if self.world == 1:
                    expected = x[0]
                mine = x[self.rank].clone()
                assert all_reduce_q8(mine, self.group, min_nbytes=0) is mine
                assert same(mine, expected), (length, dtype)
                # In the background, in three dimensions and chunks, a sum.
                with chunks_of(256):
                    mine = x[self.rank].clone().view(1, -1, 1)
                    work = all_reduce_q8(mine, self.group, op="sum", async_op=True, min_nbytes=0)
                    assert work.wait() is mine
                    assert work.is_completed()
                assert same(mine, value_of(mean_by_reference(x.float(), 8, 1.0), dtype)) or self.world == 1
        x = inputs(self.world, 3000)
        mine = all_reduce_q8(x[self.rank].clone(), self.group, min_nbytes=0)
        assert ((mine - x.double().mean(0)).abs() <= error_bound(x, gathered=True)).all()

    def all_reduce_of_what_is_not_contiguous(self) -> None:
        x = inputs(self.world, 600).view(self.world, 20, 30)
        mine = x[self.rank].t().contiguous().t()
        assert not mine.is_contiguous()
        all_reduce_q8(mine, self.group, min_nbytes=0)
        if self.world > 1:
            expected = value_of(mean_by_reference(x.reshape(self.world, -1), 8, 1 / self.world))
            assert same(mine, expected.view(20, 30))

    def reduce_scatter(self) -> None:
        for length in (0, *LENGTHS):
            for dtype in (torch.float32, torch.bfloat16):
                # What each rank has for each chunk: [ranks, chunks, n].
                x = inputs(self.world, self.world * length, dtype).view(self.world, self.world, length)
                expected = sum_blockwise(*shards_of(x[:, self.rank].float(), 8), factor=1 / self.world)
                if self.world == 1:
                    expected = x[0, 0].float()
                found = reduce_scatter_q8(x[self.rank], self.group, min_nbytes=0)
                assert same(found, expected), (length, dtype)
                with chunks_of(256 * self.world):
                    work = reduce_scatter_q8(x[self.rank].reshape(-1), self.group, async_op=True, min_nbytes=0)
                    assert same(work.wait(), expected), (length, dtype)
                if length and self.world > 1:
                    assert (
                        (found - x[:, self.rank].double().mean(0)).abs()
                        <= error_bound(x[:, self.rank].float(), gathered=False) + 1e-12
                    ).all()

    def stored_gradients(self) -> None:
        for bits in (8, 12):
            shapes = [(3, 5), (128,), (0,), (130,), (7, 300)]
            x = [inputs(self.world, torch.Size(shape).numel(), seed=i) for i, shape in enumerate(shapes)]
            gradients = [gradient_of(x[i][self.rank].view(shape), bits) for i, shape in enumerate(shapes)]
            with chunks_of(512):
                all_reduce_quantized(gradients, self.group).wait()
            for gradient, shards in zip(gradients, x, strict=True):
                expected = mean_by_reference(shards, bits, 1 / self.world)
                parts = (gradient.codes, gradient.scales, gradient.residual_codes, gradient.residual_scales)
                for found, reference in zip(parts, expected, strict=True):
                    if found is not None and self.world > 1:
                        assert same(found, reference)
        all_reduce_quantized([], self.group).wait()

    def long_tensors_are_cut_into_chunks(self) -> None:
        """Here, or in the background's thread, where stored gradients are reduced without being asked to."""
        if self.world == 1:
            return
        calls: dict[str, tuple[Callable[[], object], int]] = {
            "_reduce_scatter_chunk": (
                lambda: reduce_scatter_q8(torch.zeros(self.world, 1300), self.group, min_nbytes=0),
                128 * math.ceil(512 / self.world / 128),
            ),
            "_values_chunk": (lambda: all_reduce_q8(torch.zeros(1300), self.group, min_nbytes=0), 512),
            "_codes_chunk": (
                lambda: all_reduce_quantized([gradient_of(torch.zeros(1300), 12)], self.group).wait(),
                512,
            ),
        }
        for name, (call, size) in calls.items():
            with chunks_of(512), threads_of(name) as threads:
                call()
            assert len(threads) == math.ceil(1300 / size), name
            assert (threading.main_thread() in threads) == (name != "_codes_chunk")

    def small_tensors_are_exact(self) -> None:
        x = inputs(self.world, 1000)
        mine = all_reduce_q8(x[self.rank].clone(), self.group)
        assert torch.allclose(mine, x.mean(0), rtol=0, atol=1e-6)
        mine = reduce_scatter_q8(inputs(self.world, self.world * 10)[self.rank], group=self.group, op="sum")
        rows = inputs(self.world, self.world * 10).view(self.world, self.world, 10)
        assert torch.allclose(mine, rows[:, self.rank].sum(0), rtol=0, atol=1e-5)
        negated = torch._neg_view(-x[self.rank])
        for min_nbytes in (0, 1 << 20):
            all_reduce_q8(negated, self.group, min_nbytes=min_nbytes)
            assert torch.allclose(negated, x.mean(0), rtol=0, atol=0.05)
            negated.copy_(x[self.rank])

    def broken_numbers_reach_all_ranks(self) -> None:
        if self.world == 1:
            return
        for value in (float("nan"), float("inf")):
            for min_nbytes in (0, 1 << 20):
                mine = inputs(self.world, 500)[self.rank].clone()
                if self.rank == self.world - 1:
                    mine[300] = value
                all_reduce_q8(mine, self.group, min_nbytes=min_nbytes)
                assert not mine[256:384].isfinite().all()
                assert mine[:256].isfinite().all()
                assert mine[384:].isfinite().all()
        gradient = gradient_of(inputs(self.world, 300)[self.rank] / (self.rank != 0), 12)
        all_reduce_quantized([gradient], self.group).wait()
        assert gradient.scales.isnan().all()

    def error_feedback_averages_the_error_out(self) -> None:
        if self.world == 1:
            return
        x = inputs(self.world, 256)
        exact = x.double().mean(0)
        error, total, steps = torch.zeros(256), torch.zeros(256, dtype=torch.float64), 16
        for _ in range(steps):
            total += all_reduce_q8(x[self.rank].clone(), self.group, min_nbytes=0, error=error)
        once = sum_blockwise(*shards_of(x, 8), factor=1 / self.world)
        # What the ranks' own codes lose cancels over the steps; what the gathered mean loses is a rounding of its own.
        fed_back = total / steps - exact
        assert error.abs().max() <= 0.51 * x[self.rank].abs().max() / 127
        assert fed_back.abs().max() <= error.abs().max() / steps + 0.51 * exact.abs().max() / 127 + 1e-6
        assert (once - exact).abs().max() > error.abs().max() / steps
        before = error.clone()
        found = all_reduce_q8(torch.zeros(256), self.group, op="sum", error=error)  # natively: all that was lost
        assert error.count_nonzero() == 0
        assert found.abs().max() <= self.world * 0.51 * x.abs().max() / 127
        assert found.abs().max() > 0 or before.abs().max() == 0
        broken = x[self.rank].clone()
        broken[3] = float("nan")
        all_reduce_q8(broken, self.group, min_nbytes=0, error=error)
        assert error.isfinite().all()

    def batches_give_the_same_bits(self) -> None:
        """On GPUs sends and receives start together, and are waited for where the values are used."""

        def start(
            wire: transport.Wire,
            codec: Codec,
            outgoing: Sequence[transport.Outgoing],
            incoming: Sequence[transport.Incoming],
        ) -> transport.InFlightMessages:
            return transport._BatchedMessages(wire, codec, outgoing, incoming)

        before, transport.Wire.start = transport.Wire.start, start  # type: ignore[method-assign]
        try:
            self.all_reduce_of_what_is_not_contiguous()
            with chunks_of(256):
                self.all_reduce_of_what_is_not_contiguous()
                x = inputs(self.world, self.world * 700).view(self.world, self.world, 700)
                found = reduce_scatter_q8(x[self.rank], self.group, min_nbytes=0)
                if self.world > 1:
                    assert same(found, sum_blockwise(*shards_of(x[:, self.rank], 8), factor=1 / self.world))
        finally:
            transport.Wire.start = before  # type: ignore[method-assign]

    def bytes_on_the_wire(self) -> None:
        length = 128 * 64 * self.world
        for async_op in (False, True):
            with WireCounter(self.world) as wire:
                finished(all_reduce_q8(torch.randn(length), self.group, min_nbytes=0, async_op=async_op))
            handshake = 256 * (self.world - 1)
            assert wire.nbytes == 2 * (self.world - 1) * length // self.world * 132 // 128 + handshake

    def background_reductions_stay_apart_from_the_callers_collectives(self) -> None:
        """One rank starts its reduction before a barrier, the others after it: in one group that would be a mix-up."""
        if self.world == 1:
            return
        x = inputs(self.world, 300)
        mine = x[self.rank].clone()
        early = self.rank == 0
        if early:
            reduction = all_reduce_q8(mine, self.group, min_nbytes=0, async_op=True)
            assert not reduction.is_completed()
        dist.barrier(self.group)
        if not early:
            reduction = all_reduce_q8(mine, self.group, min_nbytes=0, async_op=True)
        assert same(reduction.wait(), value_of(mean_by_reference(x, 8, 1 / self.world)))

    def disagreement_is_refused(self) -> None:
        if self.world == 1:
            return
        odd = self.rank == self.world - 1
        ranks = dist.get_process_group_ranks(self.group)
        calls = {
            f"numel is 1000 on rank {ranks[0]} and 1001 on rank {ranks[-1]} in all_reduce_q8": lambda **o: (
                all_reduce_q8(torch.zeros(1000 + odd), self.group, **o)
            ),
            "op is 'avg' on rank": lambda **o: all_reduce_q8(
                torch.zeros(10), self.group, op="sum" if odd else "avg", **o
            ),
            "dtype is 'float32' on rank": lambda **o: reduce_scatter_q8(
                torch.zeros(self.world, 5, dtype=torch.bfloat16 if odd else torch.float32), self.group, **o
            ),
            "function is": lambda **o: (reduce_scatter_q8 if odd else all_reduce_q8)(
                torch.zeros(5 * self.world), self.group, **o
            ),
            "min_nbytes is 1": lambda **o: all_reduce_q8(torch.zeros(5), self.group, min_nbytes=1 + odd, **o),
        }
        for message, call in calls.items():
            for async_op in (False, True):
                started = time.monotonic()
                with pytest.raises(ConfigError, match=message):
                    finished(call(async_op=async_op))
                assert time.monotonic() - started < 20
        gradient = gradient_of(torch.zeros(100), 12 if odd else 8)
        with pytest.raises(ConfigError, match="bits is 8 on rank"):
            all_reduce_quantized([gradient], self.group).wait()
        # The group goes on.
        all_reduce_q8(torch.zeros(1000), self.group)

    def bad_arguments_are_refused(self) -> None:
        for tensor, message in (
            (torch.zeros(4, dtype=torch.float64), "is torch.float64, but it must be float32, bfloat16 or float16"),
            (torch.zeros(4, 4).to_sparse(), "make gradients with sparse=False"),
        ):
            with pytest.raises(FormatError, match=message):
                all_reduce_q8(tensor, self.group)
        with pytest.raises(FormatError, match="op is 'max'"):
            all_reduce_q8(torch.zeros(4), self.group, op="max")  # type: ignore[call-overload]
        with pytest.raises(FormatError, match=r"but it must be contiguous float32 \(4,\)"):
            all_reduce_q8(torch.zeros(4), self.group, error=torch.zeros(5))
        with pytest.raises(FormatError, match="bits 12, 8, but those of one call must have one"):
            all_reduce_quantized([gradient_of(torch.zeros(3), bits) for bits in (8, 12)], self.group)
        if self.world > 1:
            with pytest.raises(FormatError, match="fill it up with zeros to equal chunks"):
                reduce_scatter_q8(torch.zeros(self.world + 1), self.group)


def two_levels() -> None:
    """Four processes as two nodes of two."""
    rank = dist.get_rank()
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    clusters = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    levels = TwoLevel(nodes[rank // 2], clusters[rank % 2])
    for length in (1, 130, 2001):
        x = inputs(4, length)
        mine = all_reduce_q8(x[rank].clone(), levels, min_nbytes=0)
        sums = torch.nn.functional.pad(torch.stack((x[0] + x[1], x[2] + x[3])), (0, length % 2))
        halves = [value_of(mean_by_reference(half, 8, 0.25)) for half in sums.chunk(2, dim=1)]
        assert same(mine, torch.cat(halves)[:length])
        work = all_reduce_q8(x[rank].bfloat16(), levels, op="sum", min_nbytes=0, async_op=True)
        assert torch.allclose(work.wait().float(), x.sum(0), rtol=0.02, atol=0.1)
    everyone = dist.new_group([0, 1, 2, 3])
    alone = [dist.new_group([other]) for other in range(4)][rank]
    x = inputs(4, 130)
    for op, factor in (("avg", 0.25), ("sum", 1.0)):
        within = all_reduce_q8(x[rank].clone(), TwoLevel(everyone, alone), op=op, min_nbytes=0)
        assert torch.allclose(within, factor * x.sum(0), rtol=0, atol=1e-6), "one node: in fp32"
        across = all_reduce_q8(x[rank].clone(), TwoLevel(alone, everyone), op=op, min_nbytes=0)
        assert same(across, value_of(mean_by_reference(x, 8, factor))), "a node for each: one level"
    with pytest.raises(ConfigError, match="feedback needs one level"):
        all_reduce_q8(torch.zeros(4), levels, error=torch.zeros(4))
    with pytest.raises(ConfigError, match="which all_reduce_quantized does not take; pass a process group"):
        all_reduce_quantized([], levels)  # type: ignore[arg-type]


def work(rank: int, world: int, worlds: list[int], directory: str) -> None:

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=world)
    for size in worlds:
        group = dist.new_group(list(range(size)))
        if rank < size:
            checks = Checks(group)
            for name in (name for name in vars(Checks) if not name.startswith("_")):
                getattr(checks, name)()
        else:
            with pytest.raises(ConfigError, match="group does not contain this process"):
                all_reduce_q8(torch.zeros(4), group)
        dist.barrier()
    if world == 4:
        two_levels()
    dist.barrier()
    leave(0)


def test_reductions_return_the_references_bits_on_every_rank(tmp_path: Path) -> None:
    run_ranks(work, (4, [1, 2, 4], str(tmp_path)), 4)


@pytest.mark.slow
def test_reductions_return_the_references_bits_in_worlds_up_to_eight(tmp_path: Path) -> None:
    run_ranks(work, (8, [3, 5, 6, 7, 8], str(tmp_path)), 8)


def test_call_without_a_process_group_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"call torch\.distributed\.init_process_group first"):
        all_reduce_q8(torch.zeros(4))
