"""Four processes that take themselves for two nodes of two measure all kinds of groups.

`python -m tests.collectives.profiling FOLDER` with torchrun's variables; each rank writes FOLDER/<rank>.json.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from laconic.collectives import cluster_profile as profiling


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    profiling.host_name = lambda: f"host{rank // 2}"
    rates = profiling.profile(torch.device("cpu"), quick=True)
    rates.save(Path(sys.argv[1]) / f"{rank}.json")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
