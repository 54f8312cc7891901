"""Flags of the commands that start an inference engine, and the engine they describe."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laconic.cli.arguments import at_least
from laconic.errors import ConfigError
from laconic.options import EXPERT_FORMATS

if TYPE_CHECKING:
    from laconic.infer import AutoPlan, Engine, InferencePlan

_EXPECTED = ("prompt", "output", "requests")
_AS_THEY_ARE = (
    *("attention", "experts", "dtype", "device", "expert_device", "cache_tokens", "batch_tokens", "payload", "link"),
    *("expert_format", "max_restarts", "expert_loads", "redundant_experts"),
)
"""Flags that are arguments of the engine."""


def add_engine_flags(parser: argparse.ArgumentParser, **defaults: str) -> None:
    """Add --model and the flags of workers and plan.

    Args:
        defaults: for the help: what is expected of prompt, output and requests where nothing is said.
    """
    defaults = {"prompt": "512", "output": "128", "requests": "8"} | defaults
    parser.add_argument("--model", metavar="DIR", required=True, help="directory with config.json and safetensors")
    add = parser.add_argument_group("workers").add_argument
    add("--attention", type=int, default=1, metavar="N", help="attention workers (default: 1)")
    add("--experts", type=int, metavar="N",
        help="expert workers; 0 serves the whole model (default: 1, 0 for a model without experts; --plan auto may do"
        " without)")  # fmt: skip
    add("--dtype", default="auto", help="float32, bfloat16, float16, or auto (the checkpoint's)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="of all workers (default: cpu)")
    add("--expert-device", choices=("cpu", "cuda"), help="of expert workers (default: --device)")
    add("--cache-tokens", type=int, default=4096, metavar="N", help="of a micro-batch (default: 4096)")
    add("--batch-tokens", type=int, default=256, metavar="N", help="of a forward (default: 256)")
    add("--payload", choices=("auto", "raw", "lossless", "int8"), default="raw",
        help="rows and sums between workers: as they are, in fewer bytes with the same tokens, in 8 bits with others,"
        " or raw or lossless by measured rates (default: raw)")  # fmt: skip
    add("--link", choices=("tcp", "group"), default="tcp",
        help="how rows and sums travel: over connections of our own, or a process group of torch.distributed"
        " (default: tcp)")  # fmt: skip
    add("--expert-format", choices=EXPERT_FORMATS, default="exact",
        help="in which expert workers hold the experts' matrices: as they are, or rounded to 8, 6, 5 or 4 bits"
        " (default: exact)")  # fmt: skip
    add("--max-restarts", type=int, default=0, metavar="N", help="of all workers after one was lost (default: 0)")
    add(
        "--expert-loads",
        metavar="FILE",
        help="rows that each expert was chosen for: experts are placed by it if it is there, and the end writes it",
    )
    add(
        "--redundant-experts",
        type=int,
        default=0,
        metavar="N",
        help="further copies in each layer of the experts that have most to do by --expert-loads (default: 0)",
    )
    add = parser.add_argument_group("plan (see `laconic.schedule.inference.InferencePlan`)").add_argument
    add("--plan", choices=("auto",), help="auto: what the flags below do not say is chosen by --rates")
    add("--micro-batches", type=at_least(1), metavar="N", help="r1 (default: 1)")
    add("--slices", type=at_least(1), metavar="N", help="r2 (default: 1)")
    add("--order", choices=("ASAS", "AASS", "greedy"), help="of the attention workers (default: ASAS)")
    add("--slicing", choices=("tokens", "experts"), help="what a slice is a part of (default: tokens)")
    add("--shared-first", action="store_true", help="shared experts before rows leave (PPPipe)")
    add = parser.add_argument_group("--plan auto").add_argument
    add("--rates", metavar="FILE", help="written by laconic profile --infer (default: where it writes)")
    add("--expert-rates", metavar="FILE",
        help="the same, of machines like those of expert workers (default: all machines are alike)")  # fmt: skip
    for name, what in (
        ("prompt", "tokens of a prompt"),
        ("output", "tokens of an answer"),
        ("requests", "requests in flight together"),
    ):
        add(f"--expect-{name}", type=int, metavar="N", help=f"{what} (default: {defaults[name]})")


def serve_if_not_first(options: argparse.Namespace) -> None:
    """Under torchrun, be the worker of this rank and end with it, unless this is rank 0, which runs the engine.

    Raises:
        ConfigError: the environment is no torchrun's, or has another number of processes than there are workers.
        ModelError: the directory holds no model that can be served.
    """
    from laconic.train.distributed.world import read_environment

    info = read_environment(os.environ)
    if info is None or info.rank == 0:
        return
    from laconic.infer import serve_rank
    from laconic.infer.control import check_world
    from laconic.infer.serving_plan import serving_split

    # Rank 0 refuses the same; no rank then waits for another.
    check_world(info, serving_split(Path(options.model), options.attention, options.experts))
    serve_rank()


def start_engine(options: argparse.Namespace) -> Engine:
    """Start the engine that parsed flags describe.

    Raises:
        ConfigError: a flag breaks its rule.
        ModelError: the directory holds no model that can be served.
        PlanError: no plan can be chosen.
    """
    from laconic.infer import Engine

    return Engine(
        Path(options.model),
        plan=_plan(options),
        trace=getattr(options, "trace", None),
        launcher="torchrun" if "RANK" in os.environ else "engine",
        **{name: getattr(options, name) for name in _AS_THEY_ARE},
    )


def _plan(options: argparse.Namespace) -> InferencePlan | AutoPlan:
    from laconic.infer import AutoPlan, InferencePlan

    given = {
        "num_micro_batches": options.micro_batches,
        "num_slices": options.slices,
        "order": options.order,
        "slicing": options.slicing,
    }
    fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    expected = {name: getattr(options, f"expect_{name}") for name in _EXPECTED}
    if options.plan is None:
        files = ("rates", options.rates), ("expert-rates", options.expert_rates)
        for flag, value in *files, *((f"expect-{name}", expected[name]) for name in _EXPECTED):
            if value is not None:
                raise ConfigError(f"--{flag} is {value!r}, but only --plan auto uses it; give both")
        return InferencePlan(**fields, shared_first=options.shared_first)
    fields |= {name: value for name, value in expected.items() if value is not None}
    return AutoPlan(options.rates, **fields, shared_first=options.shared_first, expert_rates=options.expert_rates)
