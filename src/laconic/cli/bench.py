"""`laconic bench infer`: tokens per second and latency of plans of inference, measured on this machine."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laconic.cli.arguments import Parser, add_json, at_least
from laconic.cli.output import json_only
from laconic.cli.progress import working
from laconic.errors import ConfigError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from laconic.infer.bench.plans import BenchPlan, Kind
    from laconic.infer.token_engine import TokenEngine


def run(args: Sequence[str]) -> int:
    """Run `laconic bench` with `args`."""
    parser = make_parser()
    if not args or args[0] in ("-h", "--help"):
        print(parser.format_help())
        return 0
    if args[0] != "infer":
        raise ConfigError(f"laconic bench {args[0]} is no command, it must be: laconic bench infer")
    options = parser.parse_args(args[1:])
    with json_only(options.json) as emit:
        return _measure(options, emit)


def _measure(options: argparse.Namespace, emit: Callable[[Any], None]) -> int:
    kinds, micro_batches, slices, rates = _checked(options)
    from laconic.infer.bench.report import check_plots, report_json, report_text, save_report

    if options.output is not None:
        check_plots()
        Path(options.output).mkdir(parents=True, exist_ok=True)
    from laconic.infer.bench.compare import compare
    from laconic.infer.bench.demo_model import save_demo_model
    from laconic.infer.bench.workload import draw_prompts, own_text, paragraphs
    from laconic.infer.transformers_seam import check_transformers, find_experts, quiet_transformers, read_config

    check_transformers()
    with contextlib.ExitStack() as stack:
        if options.model is None:
            model_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="laconic-bench-")))
            with quiet_transformers():
                save_demo_model(model_dir)
            name = "a random Qwen2-MoE of 4 layers, hidden 128, 16 experts"
        else:
            model_dir = Path(options.model)
            name = str(model_dir)
        config = read_config(model_dir)
        if kinds != ["unsplit"] and not find_experts(config)[1]:
            raise ConfigError(
                f"{name} is a {config.model_type} model without experts, which cannot be split; give --plans unsplit"
            )
        from laconic.infer.tokenizer import load_text_tokenizer

        encode = load_text_tokenizer(model_dir).encode
        text = own_text() if options.prompts is None else _read(Path(options.prompts))
        prompts = draw_prompts(paragraphs(text), encode, options.requests, options.max_prompt_tokens, options.seed)
        print(f"{name}, {options.dtype}, {len(os.sched_getaffinity(0))} cores", flush=True)
        say = stack.enter_context(working("measuring plans"))
        comparison = compare(
            _starter(model_dir, options),
            kinds,
            prompts,
            options.max_new_tokens,
            micro_batches=micro_batches,
            slices=slices,
            rates=rates,
            rounds=options.rounds,
            seed=options.seed,
            say=say,
        )
    about = {
        "command": "laconic bench infer",
        "flags": {key: value for key, value in vars(options).items() if key not in ("output", "json")},
        "model": name,
        "date": str(date.today()),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
    }
    if options.json:
        emit({**about, **report_json(comparison)})
    else:
        print(report_text(comparison))
    for path in [] if options.output is None else save_report(comparison, Path(options.output), about):
        print(f"wrote {path}")
    return 0


def _starter(
    model_dir: Path, options: argparse.Namespace
) -> Callable[[BenchPlan], AbstractContextManager[TokenEngine]]:
    from laconic.infer import Engine

    def start(plan: BenchPlan) -> Engine:
        unsplit = plan.kind == "unsplit"
        return Engine(
            model_dir,
            attention=1 if unsplit else options.attention,
            experts=0 if unsplit else options.experts,
            plan=plan.plan,
            dtype=options.dtype,
            cache_tokens=options.cache_tokens // plan.plan.num_micro_batches,
            batch_tokens=options.batch_tokens,
        )

    return start


def make_parser() -> Parser:
    """Make the parser of the command's arguments."""
    parser = Parser(
        prog="laconic bench infer",
        description="Measure plans of inference: all requests at once for tokens per second, Poisson arrivals for "
        "latency. Every plan's engine is up for the whole run, and plans take turns.",
    )
    add = parser.add_argument
    add("--model", metavar="DIR", help="directory with config.json and safetensors (default: random)")
    add("--plans", default="unsplit,naive,pppipe,findep", metavar="KIND,...", help="to compare (default: all four)")
    add("--rounds", type=at_least(1), default=3, metavar="N", help="that count (default: 3)")
    add_json(parser)
    add("--output", metavar="DIR", help="where to write bench_infer.json and bench_infer.png")
    add = parser.add_argument_group("requests").add_argument
    add("--prompts", metavar="FILE", help="text, a prompt a paragraph (default: docstrings of laconic)")
    add("--requests", type=at_least(1), default=16, metavar="N", help="of a round (default: 16)")
    add("--max-prompt-tokens", type=at_least(1), default=128, metavar="N", help="longer are cut (default: 128)")
    add("--max-new-tokens", type=at_least(1), default=16, metavar="N", help="of each request (default: 16)")
    add("--rates", metavar="R,...",
        help="arrivals per second (default: half of what the slowest plan finishes when all come at once)")  # fmt: skip
    add("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals (default: 0)")
    add = parser.add_argument_group("engines").add_argument
    add("--attention", type=at_least(1), default=1, metavar="N", help="attention workers, split (default: 1)")
    add("--experts", type=at_least(1), default=1, metavar="N", help="expert workers, split (default: 1)")
    add("--dtype", default="auto", help="float32, bfloat16, float16, or auto (the checkpoint's)")
    add("--cache-tokens", type=int, default=8192, metavar="N", help="of all micro-batches together (default: 8192)")
    add("--batch-tokens", type=int, default=256, metavar="N", help="of a forward (default: 256)")
    add("--micro-batches", default="1,2", metavar="N,...", help="r1 that plans may choose (1,2)")
    add("--slices", default="1,2", metavar="N,...", help="r2 that plans may choose (1,2)")
    return parser


def _checked(options: argparse.Namespace) -> tuple[list[Kind], list[int], list[int], list[float] | None]:
    """Return kinds, numbers of micro-batches and of slices, and rates; refuse what breaks a rule before any work."""
    from laconic.infer.bench.plans import KINDS

    given = [each.strip() for each in options.plans.split(",")]
    kinds = [kind for kind in KINDS if kind in given]
    if unknown := [each for each in given if each not in KINDS]:
        raise ConfigError(f"--plans names {', '.join(map(repr, unknown))}, but plans are {', '.join(KINDS)}")
    micro_batches = [int(number) for number in _numbers("--micro-batches", options.micro_batches, whole=True)]
    slices = [int(number) for number in _numbers("--slices", options.slices, whole=True)]
    rates = None if options.rates is None else _numbers("--rates", options.rates)
    most = max(micro_batches) if {"pppipe", "findep"} & set(kinds) else 1
    longest, cache = options.max_prompt_tokens + options.max_new_tokens, options.cache_tokens // most
    if longest > cache:
        raise ConfigError(
            f"--max-prompt-tokens and --max-new-tokens make requests of up to {longest} tokens, but --cache-tokens"
            f" {options.cache_tokens} leaves {cache} to each of {most} micro-batches; give more"
        )
    return kinds, micro_batches, slices, rates


def _numbers(flag: str, text: str, *, whole: bool = False) -> list[float]:
    """Read positive numbers between commas; a number that stands twice counts once."""
    rule = "whole numbers of at least 1" if whole else "numbers above 0"
    try:
        found = [float(int(each)) if whole else float(each) for each in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} is {text!r}, but it must be {rule} between commas") from None
    if not all(0 < each < math.inf for each in found):
        raise ConfigError(f"{flag} is {text!r}, but it must be {rule} between commas")
    return list(dict.fromkeys(found))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompts is {str(path)!r}, which is not UTF-8 text: {error.reason}") from None
