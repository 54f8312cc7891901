"""`laconic infer plan`: whether and how to split a mixture-of-experts model's inference over workers."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from laconic.cli.arguments import Parser, add_json, at_least
from laconic.cli.output import print_json
from laconic.cost.infer import (
    MODELS,
    Arrivals,
    Choice,
    InferenceCostModel,
    InferenceRates,
    InferenceShape,
    Search,
    Workers,
    Workload,
    choose,
    choose_for_arrivals,
    default_infer_path,
    plan_vllm_afd,
)
from laconic.cost.infer.choice_text import arrivals_text, candidate_name, choice_text, infer_rates_text
from laconic.cost.infer.planner import busy_shares, group_costs
from laconic.cost.sizes import parse_nbytes
from laconic.errors import ConfigError, PlanError
from laconic.json_text import parse_json
from laconic.options import EXPERT_FORMATS
from laconic.schedule.gantt import save_gantt
from laconic.schedule.inference import inference_plan
from laconic.schedule.streams import Timeline, simulate

_DRAWN_LAYERS = 3


def run(args: Sequence[str]) -> int:
    """Run `laconic infer` with `args`."""
    parser = make_parser()
    if not args or args[0] in ("-h", "--help"):
        print(parser.format_help())
        return 0
    if args[0] != "plan":
        raise ConfigError(f"laconic infer {args[0]} is no command, it must be: laconic infer plan")
    return _plan(parser, parser.parse_args(args[1:]))


def _plan(parser: Parser, options: argparse.Namespace) -> int:
    memory_nbytes, expert_memory_nbytes = (
        None if size is None else parse_nbytes(size, flag)
        for flag, size in (("--memory", options.memory), ("--expert-memory", options.expert_memory))
    )
    path = Path(options.rates or default_infer_path())
    if options.show_rates:
        flags = {string for action in parser.flags() for string in action.option_strings}
        parser.refuse(
            flags - {"--show-rates", "--rates", "--expert-rates", "--json", "-h", "--help"}, "with --show-rates"
        )
        if options.model is not None:
            raise ConfigError(f"model is {options.model!r} with --show-rates, but rates are of no model; leave one out")
    rates = InferenceRates.load(path, options.expert_rates)
    if options.show_rates and options.json:
        print_json({"path": path, "rates": rates.to_dict()})
        return 0
    if options.show_rates:
        of = path if options.expert_rates is None else f"{path}, expert workers' of {options.expert_rates}"
        print(f"rates of {of}\n\n{infer_rates_text(rates)}")
        return 0
    if options.model is None or options.workers is None or memory_nbytes is None:
        raise PlanError("a model, --workers and --memory are needed: laconic infer plan DIR --workers 8 --memory 48GB")
    _check_flags(parser, options)
    shape = _shape(options)
    taken = options.prompt + options.output
    if shape.positions is not None and taken > shape.positions:
        raise PlanError(
            f"--prompt {options.prompt} and --output {options.output} are {taken} tokens of a request, but {shape.name}"
            f" has {shape.positions} positions (max_position_embeddings); lower them"
        )
    workers = Workers(
        options.workers, memory_nbytes, options.attention_workers, expert_memory_nbytes=expert_memory_nbytes
    )
    search = Search(options.max_micro_batches, options.max_slices)
    shares = _shares(options.routing, shape, rates)
    if options.for_server is not None:
        return _plan_vllm(options, shape, rates, workers, search, shares)
    if options.host is not None:
        raise PlanError("--host is given, but it is an address in the commands of --for; give both or neither")
    if options.arrivals is not None:
        return _plan_arrivals(options, shape, rates, workers, search, shares)
    make = {"prefill": Workload.prefill, "decode": Workload.decode}
    phases = [options.phase] if options.phase != "both" else list(make)
    choices, models = {}, {}
    for phase in phases:
        work = make[phase](options.prompt, options.output, options.requests)
        models[phase] = InferenceCostModel(shape, rates, work, shares)
        choices[phase] = choose(models[phase], workers, search)
    if options.json:
        print_json({phase: _json(models[phase], choice) for phase, choice in choices.items()})
    else:
        print("\n\n".join(choice_text(models[phase], workers, choice, phase) for phase, choice in choices.items()))
    if options.gantt is not None:
        drawn = dict(_timeline(phase, models[phase], choice) for phase, choice in choices.items())
        save_gantt(drawn, options.gantt, f"{shape.name}, {_DRAWN_LAYERS} layers")
        if not options.json:
            print(f"\nwrote {options.gantt}")
    return 0


def _check_flags(parser: Parser, options: argparse.Namespace) -> None:
    if options.workers == 1:
        of_experts = ["--attention-workers", "--expert-memory", "--expert-rates", "--expert-format"]
        parser.refuse(of_experts, "with --workers 1, which runs the whole model")
    if options.attention_workers is not None and not 1 <= options.attention_workers < options.workers:
        raise PlanError(
            f"--attention-workers is {options.attention_workers} of --workers {options.workers}, but both roles need"
            f" one: it must be from 1 to {options.workers - 1}"
        )
    if options.arrivals is not None and not 0 < options.arrivals < math.inf:
        raise PlanError(f"--arrivals is {options.arrivals}, but it must be above 0 and finite")
    if options.arrivals is not None and options.output < 1:
        raise PlanError("--output is 0 with --arrivals, which plans for answers; give 1 or more")
    if options.output < 1 and options.phase != "prefill":
        raise PlanError("--output is 0, but decoding is planned for answers; give 1 or more, or --phase prefill")


def _shape(options: argparse.Namespace) -> InferenceShape:
    shape = MODELS.get(options.model)
    if shape is None:
        from laconic.infer.transformers_seam import planned_shape  # late: names need no torch

        shape = planned_shape(options.model, options.item_nbytes)
    item_nbytes = options.item_nbytes or shape.item_nbytes
    return replace(shape, item_nbytes=item_nbytes, expert_format=options.expert_format)


def _refuse_flags(beside: str, given: Mapping[str, bool]) -> None:
    for flag, is_given in given.items():
        if is_given:
            raise PlanError(f"{flag} is given with {beside}; leave out one")


def _plan_vllm(
    options: argparse.Namespace,
    shape: InferenceShape,
    rates: InferenceRates,
    workers: Workers,
    search: Search,
    shares: tuple[float, ...],
) -> int:
    _refuse_flags(
        f"--for {options.for_server}, which plans decoding",
        {
            "--arrivals": options.arrivals is not None,
            "--phase": options.phase == "prefill",
            "--gantt": options.gantt is not None,
            "--expert-format": options.expert_format != "exact",
        },
    )
    found = plan_vllm_afd(
        shape,
        rates,
        workers,
        options.model,
        prompt=options.prompt,
        output=options.output,
        requests=options.requests,
        shares=shares,
        search=search,
        host=options.host or "127.0.0.1",
    )
    if options.json:
        print_json(found.to_dict())
    else:
        print(found.script(), end="")
    return 0


def _plan_arrivals(
    options: argparse.Namespace,
    shape: InferenceShape,
    rates: InferenceRates,
    workers: Workers,
    search: Search,
    shares: tuple[float, ...],
) -> int:
    _refuse_flags(
        "--arrivals, which sizes batches for both phases",
        {
            "--requests": options.requests is not None,
            "--phase": options.phase != "both",
            "--gantt": options.gantt is not None,
        },
    )
    arrivals = Arrivals(options.arrivals, options.prompt, options.output)
    choice = choose_for_arrivals(shape, rates, workers, arrivals, search, shares)
    if options.json:
        found = {"best": choice.best.to_dict(), "candidates": [one.to_dict() for one in choice.candidates]}
        print_json({"arrivals": found})
    else:
        print(arrivals_text(shape, rates, workers, arrivals, choice, shares))
    return 0


def _timeline(phase: str, model: InferenceCostModel, choice: Choice) -> tuple[str, Timeline]:
    """Name and timeline of the chosen plan in its first layers; of the best split one, where that is not to split."""
    best = choice.best_split
    if best is None or best.split is None:
        raise PlanError("gantt shows the four streams of a split run, but no split fits; give more memory or workers")
    times = group_costs(model, best.num_groups).block_times(best.batch, best.split, best.plan)
    plan = inference_plan(times, best.plan, min(_DRAWN_LAYERS, model.shape.num_moe_layers))
    return f"{phase}, {candidate_name(best)} {best.split}", simulate(plan)


def _json(model: InferenceCostModel, choice: Choice) -> dict[str, object]:
    limit, split = choice.limits[choice.best], choice.best_split
    return {
        "split": choice.split_pays,
        "best": choice.best.to_dict(),
        "candidates": [one.to_dict() for one in choice.candidates],
        "busy": None if split is None else busy_shares(model, split),
        "memory": {"batch": limit.batch, "worker": limit.worker, "kind": limit.kind, "nbytes": limit.nbytes},
    }


def _shares(path: str | None, shape: InferenceShape, rates: InferenceRates) -> tuple[float, ...]:
    """Read a file of measured routing: a JSON list with one number per expert of a layer."""
    if path is None:
        return ()
    try:
        values = parse_json(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise PlanError(f"--routing {path} is not JSON: {error}") from error
    if not values or not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
        raise PlanError(f"--routing {path} must be a list of numbers, the share of rows that choose each expert")
    shares = tuple(map(float, values))
    try:
        InferenceCostModel(shape, rates, Workload(1), shares)
    except PlanError as error:
        raise PlanError(f"--routing {path}: {error}") from None
    return shares


def make_parser() -> Parser:
    """Make the parser of the command's arguments."""
    parser = Parser(
        prog="laconic infer plan",
        description="Decide whether attention and experts of a mixture-of-experts model should run on workers of their "
        "own, on how many, and in which micro-batches and slices. Prints the best plan of every kind with its "
        "predicted tokens/s, the fastest, and what memory limits. Arithmetic on what laconic profile --infer measured; "
        "nothing runs.",
    )
    parser.add_argument("model", nargs="?", help=f"directory with a config.json, or one of {', '.join(MODELS)}")
    add = parser.add_argument_group("workers").add_argument
    add("--workers", type=at_least(1), metavar="N", help="processes or GPUs in all")
    add("--memory", metavar="SIZE", help="of each, for example 48GB or 80GiB")
    add("--expert-memory", metavar="SIZE", help="of each expert worker (default: --memory)")
    add("--attention-workers", type=int, metavar="N", help="fix how many run attention (default: as is best)")
    add("--expert-format", choices=EXPERT_FORMATS, default="exact",
        help="in which expert workers hold experts; unsplit workers hold them exactly (default: exact)")  # fmt: skip
    add = parser.add_argument_group("requests").add_argument
    add("--prompt", type=at_least(1), default=1024, metavar="N", help="tokens of a prompt (default: %(default)s)")
    add("--output", type=at_least(0), default=256, metavar="N", help="tokens of an answer (default: %(default)s)")
    add("--requests", type=at_least(1), metavar="N", help="requests that wait (default: as many as fit)")
    add("--arrivals", type=float, metavar="RATE", help="requests/s that keep arriving: plan for their latency instead")
    add("--phase", choices=("prefill", "decode", "both"), default="both", help="default: %(default)s")
    add("--routing", metavar="FILE", help="JSON list: share of rows that choose each expert (default: uniform)")
    add = parser.add_argument_group("search").add_argument
    add("--max-micro-batches", type=at_least(1), default=8, metavar="N", help="largest r1 (default: %(default)s)")
    add("--max-slices", type=at_least(1), default=16, metavar="N", help="largest r2 (default: %(default)s)")
    add = parser.add_argument_group("rates").add_argument
    add("--rates", metavar="FILE", help=f"written by laconic profile --infer (default: {default_infer_path()})")
    add("--expert-rates", metavar="FILE", help="the same, written on machines like those of expert workers, where these"
        " differ from attention workers'; links are those of --rates (default: all machines are alike)")  # fmt: skip
    add("--show-rates", action="store_true", help="print what was measured instead")
    add("--item-nbytes", type=at_least(1), metavar="N", help="bytes of a weight (default: the configuration's dtype)")
    add = parser.add_argument_group("output").add_argument
    add("--for", dest="for_server", choices=["vllm-afd"], help="print vLLM commands with vllm-afd-plugin, as a script")
    add("--host", help="address of the ranks in these commands (default: 127.0.0.1)")
    add("--gantt", metavar="FILE", help="draw the plan's first layers, for example plan.html")
    add_json(parser, "print the plans as one JSON document instead of tables")
    return parser
