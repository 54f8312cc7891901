"""What the model's gradients cost on the link: averaged as they are, coded losslessly, and in 8 bits.

The gradients of the exact model travel in buckets of DDP's size. Ranks start each reduction together, and the slowest
rank's time counts, so that all ranks have the same table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collectives import Lossless, all_reduce
from laconic.collectives.audit import snapshot
from laconic.cost.comm.seconds import sent_nbytes
from laconic.cost.sizes import format_nbytes
from laconic.formats import BlockFormat
from laconic.gradients.reduce import all_reduce_q8
from laconic.ops.codebooks import GRADIENT_BLOCK_SIZE
from laconic.text_columns import columns

_BUCKET_NBYTES = 25 << 20
"""What DistributedDataParallel sends at once by default."""

_PAYS = 0.95
"""Of the exact time: what takes longer is within the spread of two measurements."""


@dataclass(frozen=True)
class LinkRow:
    """One way to average gradients, measured.

    Attributes:
        name: of the way.
        sent_nbytes: by this rank.
        seconds: of the slowest rank, the median of the rounds.
        slowdown: seconds over those of the exact way in the same round, the median of the rounds.
        error: distance of the average from the exact one, relative to it.
        lines: of Python that do it.
    """

    name: str
    sent_nbytes: int
    seconds: float
    slowdown: float
    error: float
    lines: tuple[str, ...]

    @property
    def pays(self) -> bool:
        """Whether it takes less time than the exact way, by more than a twentieth."""
        return self.slowdown < _PAYS


@dataclass(frozen=True)
class Link:
    """What ranks send for one average of the model's gradients.

    Attributes:
        num_ranks: of the group.
        nbytes: of the gradients.
        rows: measured ways, the exact one first.
    """

    num_ranks: int
    nbytes: int
    rows: tuple[LinkRow, ...]

    @property
    def nbytes_per_second(self) -> float:
        """What a rank sends in a second, in the exact way."""
        return self.rows[0].sent_nbytes / self.rows[0].seconds

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data for JSON."""
        rows = [{**vars(row), "lines": list(row.lines), "pays": row.pays} for row in self.rows]
        return {**vars(self), "nbytes_per_second": self.nbytes_per_second, "rows": rows}

    def text(self, step_seconds: float) -> str:
        """The table, beside a step of so many seconds."""
        exact = self.rows[0]
        table = [
            [
                "*" if row.pays else "",
                row.name,
                format_nbytes(row.sent_nbytes),
                f"{row.seconds * 1e3:.1f}",
                f"{row.slowdown:.2f}",
                "0" if row.error == 0 else f"{row.error:.2e}",
            ]
            for row in self.rows
        ]
        share = exact.seconds / step_seconds
        parts = [
            f"gradients of {format_nbytes(self.nbytes)} averaged over {self.num_ranks} ranks at "
            f"{format_nbytes(int(self.nbytes_per_second))} per second and rank: {share:.2f} of a step's "
            f"{step_seconds * 1e3:.1f} ms, of which backward may hide some",
            columns(["", "gradients", "sent", "average, ms", "of exact", "off"], table, left="all"),
        ]
        paying = [row for row in self.rows if row.pays]
        if not paying:
            parts.append("* takes less time than exact; none does on this link: leave gradients as they are")
        parts += [f"# gradients: {row.name}\n" + "\n".join(row.lines) for row in paying]
        return "\n\n".join(parts)


Reduce = Callable[[Tensor, dist.ProcessGroup], object]


def _exact(x: Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(x, group=group)
    x.div_(group.size())


_WAYS: tuple[tuple[str, Reduce, tuple[str, ...]], ...] = (
    ("exact", _exact, ()),
    (
        "coded losslessly",
        lambda x, group: all_reduce(x, group, op="avg", codec=Lossless()),
        ("import laconic", "laconic.zip_collectives(model)  # after DDP or fully_shard; or: laconic run --zip auto"),
    ),
    (
        "8 bits",
        lambda x, group: all_reduce_q8(x, group, min_nbytes=0),
        (
            "import laconic",
            "gradients = laconic.compress_gradients(model, group)  # in the place of DDP",
            "gradients.reduce()  # before each step",
        ),
    ),
)


def measure_link(gradients: Sequence[Tensor], group: dist.ProcessGroup, rounds: int) -> Link:
    """Average gradients over the ranks of a group in each way; all ranks call it together.

    Args:
        gradients: of one backward, of the same shapes and dtypes on all ranks; they stay as they are.
        group: whose link is measured.
        rounds: of timing; each times every way once.
    """
    buckets = list(_buckets(gradients))
    seconds: dict[str, list[float]] = {name: [] for name, _, _ in _WAYS}
    sent: dict[str, int] = {}
    averages: dict[str, list[Tensor]] = {}
    for number in range(rounds + 1):  # the first connects, compiles and allocates
        for name, reduce, _ in _WAYS:
            copies = [bucket.clone() for bucket in buckets]
            before = snapshot()
            took = _together(copies, reduce, group)
            if number == 0:
                sent[name] = (snapshot() - before).sent_nbytes
                averages[name] = copies
            else:
                seconds[name].append(took)
    nbytes = sum(bucket.nbytes for bucket in buckets)
    sent["exact"] = round(sent_nbytes("all_reduce", nbytes, group.size()))
    # The audit counts lossless messages only: codes, and a scale in fp32 for each block of them, go both ways.
    coded = sum(BlockFormat("int8", GRADIENT_BLOCK_SIZE, torch.float32).nbytes((b.numel(),)) for b in buckets)
    sent["8 bits"] = round(sent_nbytes("all_reduce", coded, group.size()))
    norm = _norm(averages["exact"]) or 1.0
    rows = []
    for name, _, lines in _WAYS:
        off = [a.float() - b.float() for a, b in zip(averages[name], averages["exact"], strict=True)]
        quotients = [a / b for a, b in zip(seconds[name], seconds["exact"], strict=True)]
        error = _norm(off) / norm
        rows.append(LinkRow(name, sent[name], median(seconds[name]), median(quotients), error, lines))
    return Link(group.size(), nbytes, tuple(rows))


def _buckets(gradients: Sequence[Tensor]) -> Iterator[Tensor]:
    """The gradients, flattened one behind the other, each dtype for itself."""
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        flat = torch.cat([gradient.detach().flatten() for gradient in gradients if gradient.dtype == dtype])
        yield from flat.split(max(1, _BUCKET_NBYTES // flat.element_size()))


def _together(buckets: Sequence[Tensor], reduce: Reduce, group: dist.ProcessGroup) -> float:
    """Seconds of the slowest rank to average all buckets."""
    device = buckets[0].device
    dist.barrier(group)
    _wait(device)
    started = time.perf_counter()
    for bucket in buckets:
        reduce(bucket, group)
    _wait(device)
    took = torch.tensor(time.perf_counter() - started, dtype=torch.float64, device=device)
    dist.all_reduce(took, dist.ReduceOp.MAX, group)
    return float(took)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(sum(float(x.float().norm()) ** 2 for x in tensors)) ** 0.5
