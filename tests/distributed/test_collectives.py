"""Collectives over codecs between real processes: native results, documented sums, on every rank, in every world."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from laconic import collectives
from laconic.collectives import audit
from laconic.collectives.codec import Auto, Blockwise, Codec, Lossless, Raw
from laconic.collectives.engine import call as engine_call
from laconic.collectives.engine.layouts import TwoLevel
from laconic.collectives.policy.selector import use_rates
from laconic.collectives.runtime.background import Work
from laconic.errors import ConfigError, FormatError
from laconic.formats import BlockFormat
from laconic.train.launch.worker import leave
from tests.collectives.simulated import made_up_rates
from tests.distributed.processes import run_ranks
from tests.formats.lossless_cases import bits
from tests.patience import patient

# 11.5 bits hold Gaussian bfloat16 in long messages and nothing else: the rest travels twice.
LOSSLESS: list[Codec] = [Raw(), Lossless(), Lossless("window"), Lossless("tiered", capacity_bits=11.5)]
INT8 = Blockwise(BlockFormat("int8", 128, torch.float32))
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (0, 1, 5, 3001)


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """The same on all ranks, with NaN and infinities among them."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    if x.numel() > 100:
        x.view(-1)[7], x.view(-1)[77] = float("nan"), float("-inf")
    if dtype == torch.bool or dtype.is_floating_point:
        return x.to(dtype)
    return (100 * x).nan_to_num(0, 0, 0).to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """The same bits; of NaN that it is one."""
    if a.dtype in FLOATS and a.isnan().any():
        return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(3), b.nan_to_num(3))
    return a.shape == b.shape and torch.equal(bits(a), bits(b))


def rank_order_sum(rows: Tensor, factor: float = 1.0) -> Tensor:
    """What docs/collectives.md says about sums, for rows [W, n]."""
    total = rows[0].float()
    for row in rows[1:]:
        total = total + row.float()
    return (total * factor).to(rows.dtype)


@contextmanager
def chunks_of(nbytes: int) -> Iterator[None]:
    """Cut messages into chunks of this size."""
    before, engine_call._CHUNK_NBYTES = engine_call._CHUNK_NBYTES, nbytes
    try:
        yield
    finally:
        engine_call._CHUNK_NBYTES = before


class Checks:
    """What each process checks, as `rank` of `world` in `group`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.world = group, group.rank(), group.size()
        self.ranks = dist.get_process_group_ranks(group)

    def all_gather(self) -> None:
        for codec in LOSSLESS:
            for dtype in (*FLOATS, torch.float8_e4m3fn, torch.int64, torch.bool, torch.uint8):
                for length in LENGTHS:
                    x = values((self.world, length), dtype)
                    for async_op in (False, True):
                        out = torch.empty_like(x)
                        work = collectives.all_gather(out, x[self.rank], self.group, codec=codec, async_op=async_op)
                        assert work.wait() is out
                        assert same(out, x), (codec.name, dtype, length)
        out = values((self.world, 300), torch.bfloat16)
        collectives.all_gather(out, out[self.rank], self.group, codec=Lossless())  # in place

    def inputs_may_lie_anywhere_in_outputs(self) -> None:
        # Twice "auto": what was left raw goes another way when it comes again.
        for codec in (*LOSSLESS, "auto", "auto"):
            for length in (1000, 600_000):  # the latter in several chunks
                x = values((self.world, self.world * length), torch.float32)  # [rank, n]
                rows = x.view(self.world, self.world, length)
                mine = x[self.rank, :length]
                for start in (0, length // 2, (self.world - 1) * length):
                    gathered = x.new_zeros(self.world * length)
                    part = gathered[start : start + length].copy_(mine) if self.world > 1 else gathered.copy_(mine)
                    collectives.all_gather(gathered, part, self.group, codec=codec)
                    assert same(gathered, x[:, :length].flatten()), (codec, length, start)

                    gathered = x.new_zeros(self.world * length)
                    part = gathered[start : start + length].copy_(mine) if self.world > 1 else gathered.copy_(mine)
                    out = gathered if self.rank == 0 else None
                    collectives.gather(out, part, self.ranks[0], self.group, codec=codec)
                    if self.rank == 0:
                        assert same(gathered, x[:, :length].flatten()), (codec, length, start)

                    sent = x[self.rank].clone()
                    out = sent[start : start + length] if self.world > 1 else sent
                    collectives.reduce_scatter(out, sent, self.group, codec=codec)
                    total = rank_order_sum(rows[:, self.rank])
                    if codec == "auto":  # what is left raw is summed in the backend's order
                        torch.testing.assert_close(out, total, equal_nan=True)
                    else:
                        assert same(out, total), (codec, length, start)

                    sent = x[0].clone()
                    out = sent[start : start + length] if self.world > 1 else sent
                    whole = sent if self.rank == 0 else None
                    collectives.scatter(out, whole, self.ranks[0], self.group, codec=codec)
                    assert same(out, rows[0, self.rank]), (codec, length, start)
                for splits in (None, [length] * self.world):
                    sent = x[self.rank].clone()
                    collectives.all_to_all(sent, sent, splits, splits, self.group, codec=codec)
                    assert same(sent, rows[:, self.rank].flatten()), (codec, length, splits)

    def lossy_all_gather(self) -> None:
        x = values((self.world, 3001), torch.bfloat16, seed=1)
        out = torch.empty_like(x)
        collectives.all_gather(out, x[self.rank], self.group, codec=INT8)
        if self.world > 1:
            assert same(out, torch.stack([INT8.format.quantize(row).dequantize() for row in x]))
        else:
            assert same(out, x)

    def reduce_scatter(self) -> None:
        for codec in LOSSLESS:
            for dtype in FLOATS:
                for length in LENGTHS:
                    x = values((self.world, self.world, length), dtype)  # [from, to, n]
                    for op, factor in (("sum", 1.0), ("avg", 1 / self.world)):
                        out = x.new_empty(length)
                        work = collectives.reduce_scatter(
                            out, x[self.rank], self.group, op=op, codec=codec, async_op=op == "avg"
                        )
                        assert work.wait() is out
                        assert same(out, rank_order_sum(x[:, self.rank], factor)), (codec.name, dtype, length, op)

    def all_reduce(self) -> None:
        for codec in LOSSLESS:
            for dtype in FLOATS:
                for length in (*LENGTHS, 40_000):
                    x = values((self.world, length), dtype)
                    for op, factor in (("sum", 1.0), ("avg", 1 / self.world)):
                        mine = x[self.rank].clone().view(1, -1)
                        collectives.all_reduce(mine, self.group, op=op, codec=codec, async_op=op == "avg").wait()
                        assert same(mine[0], rank_order_sum(x, factor)), (codec.name, dtype, length, op)

    def negative_zeros_stay(self) -> None:
        x = torch.full((100,), -0.0)
        collectives.all_reduce(x, self.group, codec=Lossless())
        assert same(x, torch.full((100,), -0.0))

    def lossy_all_reduce(self) -> None:
        x = values((self.world, 3001), torch.float32, seed=1).nan_to_num(0, 0, 0)
        mine = x[self.rank].clone()
        collectives.all_reduce(mine, self.group, codec=INT8)
        everywhere = torch.empty(self.world, 3001)
        collectives.all_gather(everywhere, mine, self.group, codec=Raw())
        assert all(same(row, everywhere[0]) for row in everywhere)
        assert (mine - x.sum(0)).norm() <= 0.02 * x.sum(0).norm()

    def other_dtypes_are_summed_by_the_backend(self) -> None:
        for dtype in (torch.int64, torch.int32, torch.uint8, torch.float64):
            x = values((self.world, self.world, 50), dtype).nan_to_num(0, 0, 0)
            out = x.new_empty(50)
            collectives.reduce_scatter(out, x[self.rank], self.group)
            assert torch.equal(out, x[:, self.rank].sum(0).to(dtype))
            mine = x[self.rank].clone()
            collectives.all_reduce(mine, self.group)
            assert torch.equal(mine, x.sum(0).to(dtype))

    def all_to_all(self) -> None:
        for codec in (*LOSSLESS, INT8):
            for length in LENGTHS:
                x = values((self.world, self.world, length), torch.bfloat16)
                out = x.new_empty(self.world, length)
                collectives.all_to_all(out, x[self.rank], group=self.group, codec=codec, async_op=True).wait()
                expected = x[:, self.rank]
                if codec is INT8 and length:
                    quantized = torch.stack([INT8.format.quantize(row).dequantize() for row in expected])
                    quantized[self.rank] = expected[self.rank]
                    expected = quantized
                assert same(out, expected), (codec.name, length)

    def uneven_all_to_all(self) -> None:
        table = [[(3 * i + 5 * j) % 4 * 700 for j in range(self.world)] for i in range(self.world)]
        for codec in (*LOSSLESS, "auto"):
            rows = [values((sum(table[i]), 3), torch.bfloat16, seed=i) for i in range(self.world)]
            sizes = [table[i][self.rank] for i in range(self.world)]
            out = torch.empty(sum(sizes), 3, dtype=torch.bfloat16)
            collectives.all_to_all(out, rows[self.rank], sizes, table[self.rank], self.group, codec=codec)
            parts = [rows[i].split(table[i])[self.rank] for i in range(self.world)]
            assert same(out, torch.cat(parts))

    def broadcast(self) -> None:
        for codec in (*LOSSLESS, INT8):
            for length in (*LENGTHS, 300_000):
                for src in {0, self.world - 1}:
                    x = values((length,), torch.bfloat16)
                    expected = x
                    if codec is INT8 and length and self.world > 1:
                        expected = None
                    mine = x.clone() if self.rank == src else torch.zeros_like(x)
                    collectives.broadcast(mine, self.ranks[src], self.group, codec=codec, async_op=src > 0).wait()
                    if expected is not None:
                        assert same(mine, expected), (codec.name, length, src)
                    else:
                        rows = torch.empty(self.world, length, dtype=torch.bfloat16)
                        collectives.all_gather(rows, mine, self.group, codec=Raw())
                        assert all(same(row, rows[0]) for row in rows)
                        assert (mine.float() - x.float()).nan_to_num(0).norm() <= 0.02 * x.float().nan_to_num(
                            0, 0, 0
                        ).norm()

    def gather_and_scatter(self) -> None:
        for codec in LOSSLESS:
            for length in LENGTHS:
                x = values((self.world, length), torch.float16)
                end = self.world - 1
                whole = torch.empty_like(x) if self.rank == end else None
                collectives.gather(whole, x[self.rank], self.ranks[end], self.group, codec=codec, async_op=True).wait()
                assert whole is None or same(whole, x)
                mine = x.new_empty(length)
                collectives.scatter(mine, x if self.rank == end else None, self.ranks[end], self.group, codec=codec)
                assert same(mine, x[self.rank])

    def send_and_receive(self) -> None:
        if self.world == 1:
            with pytest.raises(ConfigError, match="which is this rank; copy the tensor instead"):
                collectives.send(torch.zeros(3), self.ranks[0], self.group)
            return
        if self.rank > 1:
            return
        other = self.ranks[1 - self.rank]
        for codec in (*LOSSLESS, INT8, "auto"):
            for length in LENGTHS:
                x = values((length,), torch.bfloat16)
                mine, expected = x if self.rank == 0 else torch.zeros_like(x), x
                (collectives.send if self.rank == 0 else collectives.recv)(mine, other, self.group, codec=codec)
                if codec is INT8 and length and self.rank == 1:
                    expected = INT8.format.quantize(x).dequantize()
                assert same(mine, expected)
        # Both send first, several messages, and wait in another order.
        with chunks_of(1 << 14):
            sent = [values((20_000,), torch.float32, seed=i) for i in range(3)]
            works = [collectives.send(x, other, self.group, codec=Lossless(), async_op=True) for x in sent]
            got = [torch.empty_like(x) for x in sent]
            receipts = [collectives.recv(x, other, self.group, codec=Lossless(), async_op=True) for x in got]
            assert receipts[2].get_future().wait() is got[2]
            while not receipts[1].is_completed():
                time.sleep(0.001)
            assert receipts[0].wait() is got[0]
            for work in works:
                work.wait()
        assert all(map(same, sent, got))
        for async_op in (False, True):
            call = collectives.send if self.rank == 0 else collectives.recv
            with pytest.raises(ConfigError, match=r"numel is \d+ on rank .* and \d+ on rank .* in send"):
                call(torch.zeros(10 + self.rank), other, self.group, codec=Lossless(), async_op=async_op).wait()

    def chunks_change_nothing(self) -> None:
        x = values((self.world, 60_000), torch.bfloat16)
        mine, out, echo = x[self.rank].clone(), torch.empty_like(x), x[0].clone()
        with chunks_of(1 << 14):
            works: list[Work[Any]] = [
                collectives.all_reduce(mine, self.group, codec=Lossless("tiered", capacity_bits=11.5), async_op=True),
                collectives.all_gather(out, x[self.rank], self.group, codec=Lossless("window"), async_op=True),
                collectives.broadcast(echo, self.ranks[0], self.group, codec=Lossless(), async_op=True),
            ]
            for work in works:
                work.wait()
            again = torch.empty_like(x)
            collectives.all_to_all(again, out, group=self.group, codec=Lossless())
        assert same(mine, rank_order_sum(x))
        assert same(out, x)
        assert same(echo, x[0])
        assert same(again, x[self.rank].expand_as(x))

    def auto(self) -> None:
        for length in (10, 200_000):
            x = values((self.world, length), torch.bfloat16)
            for async_op in (False, True):
                mine = x[self.rank].clone()
                collectives.all_reduce(mine, self.group, async_op=async_op).wait()
                if self.world <= 2:
                    assert same(mine, rank_order_sum(x))
                    continue
                # Left raw, or around a ring, more than two ranks add in another order, in bfloat16 even.
                total, bound = x.float().sum(0), self.world * 2**-8 * x.float().abs().sum(0)
                close = (mine.float() - total).abs() <= bound
                assert bool((close | ~total.isfinite() & ~mine.isfinite()).all())
                everyone = x.new_empty(self.world, length)
                collectives.all_gather(everyone, mine, self.group, codec=Raw())
                assert same(everyone, mine.expand_as(everyone))

    def auto_with_a_capacity(self) -> None:
        rates = made_up_rates(bytes_per_second=12.5e6)
        use_rates(replace(rates, links=dict.fromkeys(("node", "across", "all"), rates.links["across"])))
        x = values((self.world, self.world * 100_000), torch.bfloat16)
        for codec in (Auto(capacity_bits=14.0), Auto(capacity_bits=4.0)):  # all fits, and nothing
            audit.reset()
            everyone = x.new_empty(x.shape)
            collectives.all_gather(everyone, x[self.rank], self.group, codec=codec)
            assert same(everyone, x)
            mine, total = x.new_empty(100_000), rank_order_sum(x)
            collectives.reduce_scatter(mine, x[self.rank].clone(), self.group, codec=codec, async_op=True).wait()
            assert same(mine, total.view(self.world, -1)[self.rank])
            whole = x[self.rank].clone()
            collectives.all_reduce(whole, self.group, codec=codec)
            assert same(whole, total)
            names = {entry.codec for entry in audit.snapshot().entries}
            assert self.world == 1 or names == {f"tiered-{codec.capacity_bits:g}-bits"}
            if self.world == 2:  # raw, because nobody prepared the group for sends
                if self.rank == 0:
                    collectives.send(whole, self.ranks[1], self.group, codec=codec)
                else:
                    collectives.recv(whole.zero_(), self.ranks[0], self.group, codec=codec)
                assert same(whole, total)
        use_rates(None)

    def what_was_sent_is_recorded(self) -> None:
        if self.world == 1:
            return
        audit.reset()
        x = torch.randn(100_000, generator=torch.Generator().manual_seed(self.rank)).bfloat16()
        out = x.new_empty(self.world, x.numel())
        collectives.all_gather(out, x, self.group, codec=Lossless())
        (entry,) = audit.snapshot().entries
        assert (entry.operation, entry.dtype, entry.codec) == ("all_gather", "bfloat16", Lossless().name)
        assert entry.raw_nbytes == (self.world - 1) * x.nbytes
        assert 1.4 < entry.ratio < 1.52
        assert entry.coding_seconds > 0

    def disagreement_is_refused(self) -> None:
        if self.world == 1:
            return
        odd = self.rank == self.world - 1
        first, last = self.ranks[0], self.ranks[-1]
        g = self.group

        def reduce(numel: int = 1000, dtype: torch.dtype = torch.float32, **more: Any) -> Callable[[bool], Work[Any]]:
            return lambda async_op: collectives.all_reduce(
                torch.zeros(numel, dtype=dtype), g, async_op=async_op, **({"codec": Lossless()} | more)
            )

        def gather(numel: int) -> Callable[[bool], Work[Any]]:
            return lambda async_op: collectives.all_gather(
                torch.zeros(self.world * numel), torch.zeros(numel), g, codec=Lossless(), async_op=async_op
            )

        splits = [1] * self.world
        wrong = [1 + odd, *[1] * (self.world - 1)]
        calls: dict[str, Callable[[bool], Work[Any]]] = {
            f"numel is 100000 on rank {first} and 100001 on rank {last} in all_reduce": reduce(100_000 + odd),
            f"numel is 10 on rank {first} and 11 on rank {last}": reduce(10 + odd, codec=Raw()),
            f"dtype is 'bfloat16' on rank {first} and 'float32'": reduce(
                dtype=torch.float32 if odd else torch.bfloat16
            ),
            r"codec is 'Lossless\(auto\)' on rank .* and 'Lossless\(window\)'": reduce(
                codec=Lossless("window") if odd else Lossless()
            ),
            "factor is '1.0' on rank": reduce(op="avg" if odd else "sum"),
            f"function is 'all_gather' on rank {first} and 'all_reduce' on rank {last}": reduce() if odd else gather(5),
            f"rank {last} sends 2 elements to rank {first} in all_to_all, which expects 1": lambda async_op: (
                collectives.all_to_all(
                    torch.zeros(self.world),
                    torch.zeros(sum(wrong)),
                    splits,
                    wrong,
                    g,
                    codec=Lossless(),
                    async_op=async_op,
                )
            ),
        }
        for message, call in calls.items():
            for async_op in (False, True):
                started = time.monotonic()
                with pytest.raises(ConfigError, match=message):
                    call(async_op).wait()
                assert time.monotonic() - started < 20
        # The group goes on.
        self.all_to_all()

    def bad_arguments_are_refused(self) -> None:
        x = torch.zeros(self.world * 4)
        for call, message in (
            (lambda: collectives.all_gather(x[:3], x[:4], self.group), "output has 3 elements, but it must have"),
            (lambda: collectives.all_gather(x, x[:4].double(), self.group), "they must have one dtype"),
            (lambda: collectives.all_reduce(torch.zeros(4, 4).t()[1:], self.group), "tensor is not contiguous"),
            (lambda: collectives.all_reduce(torch.zeros(4, 4).to_sparse(), self.group), r"pass tensor\.to_dense"),
            (lambda: collectives.all_reduce(x, self.group, op="max"), "op is 'max', but it must be 'sum' or 'avg'"),  # type: ignore[arg-type]
            (lambda: collectives.all_reduce(x.long(), self.group, op="avg"), "average of integers"),
            (lambda: collectives.all_reduce(x.bool(), self.group), "convert it first"),
            (lambda: collectives.all_to_all(x, x, [1], None, self.group), r"output_split_sizes is \[1\]"),
            (
                lambda: collectives.gather(None, x, self.ranks[self.rank], self.group),
                "it must be a tensor on the rank dst",
            ),
        ):
            with pytest.raises(FormatError, match=message) as raised:
                call()
            assert raised.value
        with pytest.raises(ConfigError, match="codec is 'zip', but it must be 'auto' or a codec"):
            collectives.all_reduce(x, self.group, codec="zip")
        ids, first, is_first = x.long(), self.ranks[0], self.rank == 0
        coded: dict[str, Callable[[], object]] = {
            "all_gather": lambda: collectives.all_gather(ids, ids[:4], self.group, codec=INT8),
            "reduce_scatter": lambda: collectives.reduce_scatter(ids[:4].clone(), ids, self.group, codec=INT8),
            "all_reduce": lambda: collectives.all_reduce(ids, self.group, codec=INT8),
            "all_to_all": lambda: collectives.all_to_all(ids.clone(), ids, group=self.group, codec=INT8),
            "broadcast": lambda: collectives.broadcast(ids, first, self.group, codec=INT8),
            "gather": lambda: collectives.gather(ids if is_first else None, ids[:4], first, self.group, codec=INT8),
            "scatter": lambda: collectives.scatter(
                ids[:4].clone(), ids if is_first else None, first, self.group, codec=INT8
            ),
            "recv": lambda: collectives.recv(ids, self.ranks[self.rank - 1], self.group, codec=INT8),
        }
        for call in coded.values():
            with pytest.raises(FormatError, match="takes float32, bfloat16 and float16"):  # on the receiving ranks, too
                call()
        if self.world > 1:
            num_rows = self.world + 1  # whose elements can be shared evenly
            torn, whole = torch.zeros(num_rows, self.world), torch.zeros(self.world, num_rows)
            for codec in ("auto", Raw(), Lossless()):
                collectives.all_to_all(whole.clone(), whole, group=self.group, codec=codec)
                for output, input, name in ((torn, torn, "output"), (whole, torn, "input"), (torn, whole, "output")):
                    with pytest.raises(FormatError, match=f"{name} has {num_rows} rows, which {self.world} ranks"):
                        collectives.all_to_all(output, input, group=self.group, codec=codec)
        with pytest.raises(ConfigError, match="src is 77, but the group has the global ranks"):
            collectives.broadcast(x, 77, self.group)


def two_levels() -> None:
    """Four processes as two nodes of two."""
    rank = dist.get_rank()
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    clusters = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    levels = TwoLevel(nodes[rank // 2], clusters[rank % 2])
    for codec in LOSSLESS:
        for length in LENGTHS:
            for dtype in FLOATS:
                x = values((4, 4, length), dtype)
                out = torch.empty_like(x[0])
                collectives.all_gather(out, x[0][rank], levels, codec=codec, async_op=True).wait()
                assert same(out, x[0])
                collectives.all_to_all(out, x[rank], group=levels, codec=codec)
                assert same(out, x[:, rank])
                nodes_sums = torch.stack([rank_order_sum(x[:2]), rank_order_sum(x[2:])])
                part = x.new_empty(length)
                collectives.reduce_scatter(part, x[rank], levels, codec=codec)
                assert same(part, rank_order_sum(nodes_sums)[rank])
                mine = x[rank].clone()
                collectives.all_reduce(mine, levels, op="avg", codec=codec, async_op=True).wait()
                assert same(mine, rank_order_sum(nodes_sums, 0.25))
    for length in LENGTHS:  # sums of two, which have one order: the backend's
        x = values((2, 2 * length), torch.float32)
        everywhere = torch.cat([x, torch.zeros_like(x)])[[0, 2, 1, 3]]  # a rank of each node has some
        mine, part = everywhere[rank].clone(), x.new_empty(length)
        collectives.all_reduce(mine, levels, op="avg")
        assert same(mine, rank_order_sum(x, 0.25))
        collectives.reduce_scatter(part, everywhere[rank].repeat(2), levels, op="avg")
        assert same(part, rank_order_sum(x, 0.25).repeat(2).view(4, -1)[rank])
    with pytest.raises(ConfigError, match="group is a TwoLevel, which broadcast does not take"):
        collectives.broadcast(torch.zeros(4), 0, levels)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="TwoLevel takes equal parts only"):
        collectives.all_to_all(torch.zeros(4), torch.zeros(4), [1] * 4, [1] * 4, levels)


def work(rank: int, world: int, sizes: list[int], directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=patient(60)),
    )
    for size in sizes:
        # Not the first ranks, so that places and global ranks differ.
        members = list(range(world - size, world))
        group = dist.new_group(members)
        if rank in members:
            checks = Checks(group)
            for name in (name for name in vars(Checks) if not name.startswith("_")):
                getattr(checks, name)()
        else:
            with pytest.raises(ConfigError, match="group does not contain this process"):
                collectives.all_reduce(torch.zeros(4), group)
        dist.barrier()
    if world == 4:
        two_levels()
    dist.barrier()
    leave(0)


def test_collectives_give_native_results_and_documented_sums_on_every_rank(tmp_path: Path) -> None:
    run_ranks(work, (2, [1, 2], str(tmp_path)), 2)


@pytest.mark.slow
def test_collectives_give_the_same_in_larger_worlds(tmp_path: Path) -> None:
    run_ranks(work, (4, [3, 4], str(tmp_path)), 4)


def test_call_without_a_process_group_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"call torch\.distributed\.init_process_group first"):
        collectives.all_reduce(torch.zeros(4))
