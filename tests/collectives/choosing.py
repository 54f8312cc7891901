"""What several processes do to choose: `python -m tests.collectives.choosing NAMES FOLDER` with torchrun's variables.

Each rank writes what it found to FOLDER/<name>.<rank>.json.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from laconic.collectives import choose as choosing
from laconic.collectives.choose import choose, observe, use_rates
from laconic.collectives.measure import Ranks
from laconic.cost.wire import RAW
from laconic.errors import ConfigError
from tests.collectives.simulated import made_up_rates

LARGE = 1 << 22
CPU = torch.device("cpu")
CALLS = [(op, n) for n in (1 << 13, 1 << 17, LARGE) for op in ("all_gather", "reduce_scatter", "all_reduce", "send")]


def choices(group: dist.ProcessGroup) -> list[Any]:
    """Choices with observations that differ between ranks."""
    found = []
    for call in range(4):
        for operation, numel in CALLS:
            choice = choose(operation, numel, torch.bfloat16, group)
            found.append(dataclasses.astuple(choice))
            if choice.codec != RAW:
                observe(operation, torch.bfloat16, group, choice, 3000, 2000 + 100 * group.rank() + call)
    return found


def measured(group: dist.ProcessGroup) -> Any:
    """Without a file."""
    started = time.perf_counter()
    choose("all_gather", LARGE, torch.bfloat16, group)
    seconds = time.perf_counter() - started
    rates = choosing._chooser_of(group, CPU).rates
    half = dist.new_group(list(range(group.size() // 2 + 1)))
    in_half = choices(half) if half is not dist.GroupMember.NON_GROUP_MEMBER else None
    return {"choices": choices(group), "rates": rates.to_dict(), "seconds": seconds, "half": in_half}


def from_rank_0(group: dist.ProcessGroup) -> Any:
    """Rank 0 has rates that nobody else has."""
    if group.rank() == 0:
        use_rates(made_up_rates())
    return {"choices": choices(group), "rates": choosing._chooser_of(group, CPU).rates.to_dict()}


def unreadable(group: dist.ProcessGroup) -> Any:
    """The file of rank 0 is damaged."""
    if group.rank() == 0:
        os.environ["LACONIC_WIRE_RATES"] = str(Path(sys.argv[2]) / "damaged.json")
    try:
        choose("all_gather", LARGE, torch.bfloat16, group)
    except ConfigError as error:
        return str(error)
    return None


def texts(group: dist.ProcessGroup) -> Any:
    """Texts of different lengths."""
    ranks = Ranks(group, CPU)
    return [ranks.texts("x" * group.rank()), ranks.texts(""), ranks.texts("gr\u00f6\u00dfer")]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    scenarios = {"measured": measured, "from_rank_0": from_rank_0, "unreadable": unreadable, "texts": texts}
    for name in sys.argv[1].split(","):
        # A group of its own for each, so that nothing is remembered.
        group = dist.new_group(list(range(dist.get_world_size())))
        assert group is not None
        found = scenarios[name](group)
        use_rates(None)
        os.environ.pop("LACONIC_WIRE_RATES", None)
        (Path(sys.argv[2]) / f"{name}.{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
