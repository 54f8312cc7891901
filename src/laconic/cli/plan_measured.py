"""`laconic plan` by a measured table: `--measure` writes one, `--measured` plans with it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from laconic.cli.output import json_only, print_json
from laconic.cli.progress import working
from laconic.cost.planner.measured import EXACT_WORD, MeasuredPlan, MeasuredTable, choose_measured
from laconic.cost.sizes import parse_nbytes
from laconic.cost.text.measured import measured_plan_text, measured_table_text
from laconic.errors import PlanError

__all__ = ["measure", "plan_measured", "quiet_profiler"]

_TO_MEASURE = frozenset(
    ("model", "measure", "measure_batches", "choices", "image_size", "sequence_length", "precision", "json")
)
_TO_PLAN = frozenset(
    ("measured", "batch", "memory", "reserve", "policy", "choices", "time_weight", "optimizer", "out", "json")
)


def measure(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Measure the model of a directory and write the table; return 0.

    Raises:
        PlanError, ConfigError, ModelError: a flag has no meaning here, or see `measure_table`.
    """
    _refuse_others(options, parser, "--measure", _TO_MEASURE)
    if options.model is None:
        raise PlanError("--measure measures a model, so it needs its directory, with a config.json")
    if not Path(options.measure).absolute().parent.is_dir():  # before minutes of measuring
        raise PlanError(f"--measure is {options.measure!r}, but its directory does not exist; make it first")
    import torch

    from laconic.train.memory.directory import load_any, made_up_batches
    from laconic.train.memory.measure import WORDS, measure_table

    words = WORDS if options.choices == parser.get_default("choices") else options.choices
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_any(options.model, torch.bfloat16 if options.precision == "bf16-pure" else torch.float32)
    torch.nn.Module.to(model, device)
    inputs = made_up_batches(model, options.sequence_length, options.image_size)
    with json_only(options.json), working(f"measuring {options.model}"), quiet_profiler():
        table = measure_table(model, inputs, batches=options.measure_batches, words=words, precision=options.precision)
    table.save(options.measure)
    if options.json:
        print_json(table.to_dict())
    else:
        print(measured_table_text(table))
        print(f"wrote {options.measure}; plan with laconic plan --measured {options.measure} --memory SIZE --batch N")
    return 0


def plan_measured(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Plan with a measured table; return 0 if the run fits (or no budget was given), 1 if it does not.

    Raises:
        PlanError: a flag has no meaning here, the table is no such table, or nothing meets the budget.
    """
    _refuse_others(options, parser, "--measured", _TO_PLAN)
    budget = None if options.memory is None else int(parse_nbytes(options.memory) * (1 - options.reserve))
    table = MeasuredTable.load(options.measured)
    policy = options.policy or ("budget" if budget is not None else "exact")
    if policy == "agoq":
        raise PlanError("policy is 'agoq', which asks for pipeline stages; a measured table has none, use budget")
    if policy == "budget" and budget is None:
        raise PlanError("policy is 'budget', but no budget was given; add --memory, for example --memory 24GB")
    if policy == "budget":
        assert budget is not None
        allowed = None if options.choices == parser.get_default("choices") else options.choices
        weight = options.time_weight
        plan = choose_measured(
            table, options.batch, budget, allowed=allowed, optimizer=options.optimizer, time_weight=weight
        )
    else:
        word = EXACT_WORD if policy == "exact" else policy.removeprefix("uniform")
        plan = MeasuredPlan.uniform(table, options.batch, word, options.optimizer)
    if options.out is not None:
        plan.save(options.out)
    if options.json:
        said = {
            "policy": policy,
            "batch": plan.samples,
            "budget_nbytes": budget,
            "choices": dict(plan.choices),
            "saved_nbytes": plan.saved_nbytes,
            "nbytes": dict(plan.nbytes),
            "relative_error": plan.relative_error,
            "time_share": plan.time_share,
            "activations": plan.activation_plan(),
        }
        print_json(said)
    else:
        print(measured_plan_text(plan, budget))
        if options.out is not None:
            print(f"wrote {options.out}, for compress_activations(model, plan=ActivationPlan.from_json(text))")
    return 0 if budget is None or plan.total_nbytes <= budget else 1


def _refuse_others(
    options: argparse.Namespace, parser: argparse.ArgumentParser, flag: str, known: Collection[str]
) -> None:
    flags = sorted("--" + name.replace("_", "-") for name in known if name not in ("model", "measure", "measured"))
    for name, value in vars(options).items():
        if name not in known and value != parser.get_default(name):
            given = name if name == "model" else "--" + name.replace("_", "-")
            raise PlanError(
                f"{given} is given beside {flag}, where it has no meaning; leave it out, {flag} takes"
                f" {', '.join(flags)}"
            )


@contextmanager
def quiet_profiler() -> Iterator[None]:
    """Without the lines that torch's profiler writes to the file descriptor of errors at each of its starts."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
