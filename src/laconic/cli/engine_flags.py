"""Flags of the commands that start an inference engine, and the engine they describe."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from laconic.infer import Engine

__all__ = ["add_engine_flags", "start_engine"]


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add --model and the flags of workers and plan."""
    parser.add_argument("--model", metavar="DIR", required=True, help="directory with config.json and safetensors")
    workers = parser.add_argument_group("workers")
    workers.add_argument("--attention", type=int, default=1, metavar="N", help="attention workers (default: 1)")
    workers.add_argument(
        "--experts", type=int, default=1, metavar="N", help="expert workers; 0 serves the whole model (default: 1)"
    )
    workers.add_argument("--dtype", default="auto", help="float32, bfloat16, float16, or auto (the checkpoint's)")
    workers.add_argument("--cache-tokens", type=int, default=4096, metavar="N", help="of a micro-batch (default: 4096)")
    workers.add_argument("--batch-tokens", type=int, default=256, metavar="N", help="of a forward (default: 256)")
    plan = parser.add_argument_group("plan (see `laconic.schedule.inference.InferencePlan`)")
    plan.add_argument("--micro-batches", type=int, default=1, metavar="N", help="r1 (default: 1)")
    plan.add_argument("--slices", type=int, default=1, metavar="N", help="r2 (default: 1)")
    plan.add_argument("--order", choices=("ASAS", "AASS", "greedy"), default="ASAS", help="of the attention workers")
    plan.add_argument("--slicing", choices=("tokens", "experts"), default="tokens", help="what a slice is a part of")
    plan.add_argument("--shared-first", action="store_true", help="shared experts before rows leave (PPPipe)")


def start_engine(options: argparse.Namespace) -> Engine:
    """Start the engine that parsed flags describe.

    Raises:
        ConfigError: a flag breaks its rule.
        ModelError: the directory holds no model that can be served.
    """
    from laconic.infer import Engine, InferencePlan

    return Engine(
        Path(options.model),
        attention=options.attention,
        experts=options.experts,
        plan=InferencePlan(
            options.micro_batches, options.slices, options.order, options.slicing, shared_first=options.shared_first
        ),
        dtype=options.dtype,
        cache_tokens=options.cache_tokens,
        batch_tokens=options.batch_tokens,
        trace=getattr(options, "trace", None),
    )
