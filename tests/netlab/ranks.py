"""What each rank of a fault test does: `python -m tests.netlab.ranks TASK` with torchrun's variables.

Sums tensors over all ranks again and again, through `laconic.collectives`, and checks every result. Errors are left to
the interpreter, as in a user's program that does not expect them.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from laconic import collectives
from laconic.collectives import Lossless
from tests.patience import patient


@dataclass(frozen=True)
class Task:
    """What all ranks are told."""

    rounds: int = 1
    numel: int = 1 << 20
    timeout_seconds: float = field(default_factory=lambda: patient(60))
    codecs: tuple[str, ...] = ("tiered",)
    """By rank, again from the first when there are more ranks."""
    pause_seconds: float = 0.0
    """How long a rank computes between two sums."""
    slow_rank: int = -1
    """This one takes ten times as long."""
    background: bool = False
    """Whether sums run in the background."""

    def as_arguments(self) -> list[str]:
        """The command that carries it out."""
        return [sys.executable, "-m", "tests.netlab.ranks", json.dumps(asdict(self))]


def main(task: Task) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=task.timeout_seconds))
    rank, world = dist.get_rank(), dist.get_world_size()
    codec = Lossless(task.codecs[rank % len(task.codecs)])
    values = [
        torch.randn(task.numel, generator=torch.Generator().manual_seed(other)).bfloat16() for other in range(world)
    ]
    expected = torch.stack(values).float().sum(0).bfloat16()  # a few ranks: fp32 adds them in the same order
    dist.barrier()  # one that fails at once leaves others whose connections are not all made
    print("ready", flush=True)
    for number in range(task.rounds):
        time.sleep(task.pause_seconds * (10 if rank == task.slow_rank else 1))
        x = values[rank].clone()
        collectives.all_reduce(x, codec=codec, async_op=task.background).wait()
        assert torch.equal(x.view(torch.int16), expected.view(torch.int16)), f"round {number} gave another sum"
        print(f"round {number}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Task(**json.loads(sys.argv[1])))
