"""`laconic plan`: predict whether a run fits into memory, and choose the bits of its activations so that it does."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from laconic.cli.arguments import Parser, add_json
from laconic.cli.output import json_only, print_json
from laconic.cli.progress import working
from laconic.cost import Batch, Job, Layout, Plan, Settings
from laconic.cost.hardware.compute import Hardware, Sensitivity
from laconic.cost.memory.saved_tensors import EXACT, Choice
from laconic.cost.planner.largest import most_layers
from laconic.cost.planner.policy import ALL_CHOICES, CHOICES, BudgetError, Chosen, Weights, agoq, by_bits, choose
from laconic.cost.sizes import parse_nbytes
from laconic.cost.text.chart import save_chart
from laconic.cost.text.plan_text import plan_text
from laconic.errors import PlanError
from laconic.options import OPTIMIZERS
from laconic.schedule import SCHEDULES

_UNIFORM = {"exact": 16, **{f"uniform{bits}": bits for bits in (2, 4, 5, 6, 8)}}
_SIZES = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "vocab_size")
_ALL_SIZES = (*_SIZES, "num_kv_heads", "head_dim", "num_experts", "experts_per_token", "tied")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_USUAL_LENGTH = 4096
_TRACED_LAYERS = 12
"""Of the model whose layers --largest counts; kinds of layers alternate with at most so many."""
_OF_CALIBRATION = {
    "--calibrate",
    "--data",
    "--tokenizer",
    "--batches",
    "--batch",
    "--sequence-length",
    "--json",
    "--init",
}
"""Flags that --calibrate reads."""
_OF_TRAIN = {
    "hidden_size": "--model.hidden-size",
    "intermediate_size": "--model.intermediate-size",
    "num_layers": "--model.num-hidden-layers",
    "num_heads": "--model.num-attention-heads",
    "num_kv_heads": "--model.num-key-value-heads",
}
"""What `laconic train` calls sizes."""
_MOST = 10**9
"""Largest integer that the planner accepts: its arithmetic and its solver use 64-bit floats."""


def run(args: Sequence[str]) -> int:
    """Run `laconic plan` with `args`; return 0 if the run fits (or no budget was given), 1 if it does not."""
    parser = make_parser()
    options = parser.parse_args(args)
    if options.calibrate is not None:
        unused = [
            action.option_strings for action in parser.flags() if _OF_CALIBRATION.isdisjoint(action.option_strings)
        ]
        parser.refuse(chain(*unused), "with --calibrate, which measures and stops")
        return _calibrate(options)
    parser.refuse(["--data", "--tokenizer", "--batches"], "without --calibrate")
    if not 0 <= options.reserve < 1:
        raise PlanError(f"reserve is {options.reserve}, but it must be at least 0 and below 1")
    budget = None if options.memory is None else int(parse_nbytes(options.memory) * (1 - options.reserve))
    attention = EXACT if options.attention == "exact" else Choice(options.attention)
    policy = options.policy or ("budget" if budget is not None else "exact")
    if options.largest:
        _check_largest(options)
    if policy == "budget" and budget is None:
        raise PlanError("policy is 'budget', but no budget was given; add --memory, for example --memory 24GB")
    if budget is None:
        parser.refuse(["--reserve"], "without --memory, of which it is a share")
    if policy != "budget":
        parser.refuse(
            ["--choices", "--calibration", "--time-weight"], f"with the policy {policy}, which weighs nothing"
        )
    if policy in ("budget", "exact") and attention != EXACT:
        way = "give --choices" if policy == "budget" else "give --policy"
        parser.refuse(["--attention"], f"with the policy {policy}, which decides about attention itself ({way})")
    sensitivity = None if options.calibration is None else Sensitivity.load(options.calibration)
    choices = partial(_chosen, options, policy, attention, budget, sensitivity)
    if options.largest:
        assert budget is not None
        job, chosen = _largest(options, choices, budget)
    else:
        job = _job(options)
        chosen = choices(job)
    plan = Plan.of(job, chosen, budget)
    if options.out is not None:
        plan.save(options.out)
    if options.chart is not None:
        save_chart(chosen.prediction, options.chart, budget, f"{job.model.family}, policy {chosen.policy}")
    if options.json:
        print_json(plan.to_dict())
    else:
        print(plan_text(job, chosen, budget))
        for path in (options.out, options.chart):
            if path is not None:
                print(f"wrote {path}")
    return 0 if budget is None or chosen.prediction.peak_nbytes <= budget else 1


def _sequences(options: argparse.Namespace, micro_batches: int) -> int:
    if options.batch_size is None:
        return 1 if options.batch is None else int(options.batch)
    if options.batch is not None:
        raise PlanError(f"--batch is {options.batch} and --batch-size {options.batch_size}; give one of them")
    parts = options.dp * micro_batches
    if options.batch_size % parts:
        raise PlanError(
            f"--batch-size is {options.batch_size}, but it must be a multiple of {parts}: --dp {options.dp} times"
            f" --micro-batches {micro_batches}"
        )
    return int(options.batch_size) // parts


def _length(options: argparse.Namespace) -> int:
    return _USUAL_LENGTH if options.sequence_length is None else int(options.sequence_length)


def _job(options: argparse.Namespace) -> Job:
    usual = 2 * options.stages if options.stages > 1 else 1
    micro_batches = usual if options.micro_batches is None else options.micro_batches
    layout = Layout(
        data_parallel=options.dp,
        sharded=options.fsdp,
        stages=options.stages,
        stages_per_rank=options.virtual_stages,
        schedule=options.schedule or ("interleaved-1f1b" if options.virtual_stages > 1 else "1f1b"),
        micro_batches=micro_batches,
        split=tuple(options.split or ()),
        tensor_parallel=options.tp,
        expert_parallel=options.ep,
    )
    settings = Settings(
        precision=options.precision,
        optimizer=options.optimizer,
        gradient_bits=options.gradients,
        loss=options.loss,
        device="cpu" if options.hardware == "xeon-core" else "cuda",
        update_in_backward=options.update_in_backward,
    )
    of_stages = (("schedule", options.schedule), ("virtual-stages", options.virtual_stages), ("split", options.split))
    for flag, value in of_stages:
        if options.stages == 1 and value not in (None, 1):
            raise PlanError(f"--{flag} is {value!r}, but it must be left out with one stage; give --stages")
    batch = Batch(_sequences(options, micro_batches), _length(options))
    _check_sizes(options)
    what = options.model or f"a {options.family or 'llama'} of these sizes"
    with json_only(options.json), working(f"tracing a step of {what} without numbers"):
        try:
            import transformers  # noqa: F401
        except ImportError as error:
            raise PlanError(f"planning needs transformers ({error}): pip install 'laconic[train]'") from error
        from laconic.train.memory.trace import traced_job

        source, sizes = _source(options)
        job = traced_job(
            source, batch, layout, settings, sequence_length=options.sequence_length, image_size=options.image_size
        )
    return replace(job, model=replace(job.model, settings=sizes))


def _check_largest(options: argparse.Namespace) -> None:
    if options.memory is None:
        raise PlanError("--largest asks which model fits, so it needs --memory, for example --memory 24GB")
    for name, value in (
        ("a directory", options.model),
        ("--num-layers", options.num_layers),
        ("--split", options.split),
    ):
        if value:
            raise PlanError(
                f"--largest chooses the number of layers, but {name} ({value}) says it; leave it out and give the "
                f"other sizes: {_flags([size for size in _SIZES if size != 'num_layers'])}"
            )


def _largest(options: argparse.Namespace, choices: Callable[[Job], Chosen], budget: int) -> tuple[Job, Chosen]:
    def found(job: Job) -> Chosen | None:
        try:
            chosen = choices(job)
        except BudgetError:
            return None
        return chosen if chosen.prediction.peak_nbytes <= budget else None

    options.num_layers = max(_TRACED_LAYERS, options.stages * options.virtual_stages)
    options.num_layers = most_layers(_job(options), found)
    # Layers of several kinds may come in another order in a model of this depth.
    while (chosen := found(job := _job(options))) is None:
        options.num_layers -= 1
    return job, chosen


def _check_sizes(options: argparse.Namespace) -> None:
    given = [name for name in _ALL_SIZES if (size := getattr(options, name)) is not None and size is not False]
    if options.model is not None and given:
        raise PlanError(
            f"{_flags(given)} is given beside {options.model!r}, whose configuration has the sizes; leave one out"
        )
    missing = [name for name in _SIZES if getattr(options, name) is None]
    if options.model is None and missing:
        raise PlanError(f"without a model directory the sizes are needed: {_flags(missing)} missing")


def _flags(names: Sequence[str]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in names)


def _source(options: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """What is traced: a directory or a configuration; and the fields of `[model]` with which it is trained."""
    if options.model is None:
        return _sized(options)
    if options.family is None:
        path = Path(options.model).absolute()
        directory = path.parent if path.name == "config.json" else path
        return options.model, {"path": str(directory)} if directory.is_dir() else {}
    from laconic.train.memory.directory import config_as

    return config_as(options.model, options.family), {}


def _sized(options: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """The model that `laconic train` makes of these sizes: its configuration and its settings."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from laconic.train.config.schema import ModelConfig
    from laconic.train.model import sized_config

    family = options.family or "llama"
    known = CONFIG_MAPPING[family]().to_dict() if family in CONFIG_MAPPING else {}
    of_experts = next((name for name in _EXPERTS if name in known), _EXPERTS[0])
    extra = {"head_dim": options.head_dim, of_experts: options.num_experts}
    extra |= {"num_experts_per_tok": options.experts_per_token}
    settings = {
        "family": family,
        "hidden_size": options.hidden_size,
        "intermediate_size": options.intermediate_size,
        "num_hidden_layers": options.num_layers,
        "num_attention_heads": options.num_heads,
        "num_key_value_heads": options.num_kv_heads,
        "tie_word_embeddings": options.tied,
        "extra": {name: value for name, value in extra.items() if value is not None},
    }
    config = sized_config(ModelConfig(**settings), options.vocab_size, _length(options))
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]
    return config, settings


def _chosen(
    options: argparse.Namespace,
    policy: str,
    attention: Choice,
    budget: int | None,
    sensitivity: Sensitivity | None,
    job: Job,
) -> Chosen:
    if policy == "agoq":
        return agoq(job, attention)
    if policy in _UNIFORM:
        bits = [_UNIFORM[policy]] * job.layout.num_chunks
        return by_bits(job, bits, EXACT if policy == "exact" else attention, policy)
    assert budget is not None
    return choose(
        job,
        budget,
        allowed=options.choices,
        sensitivity=sensitivity,
        hardware=Hardware.named(options.hardware),
        weights=Weights(options.time_weight),
    )


def _calibrate(options: argparse.Namespace) -> int:
    if options.model is None:
        raise PlanError("--calibrate measures a model, so it needs its directory, with weights")
    from laconic.train.memory.calibrate import calibrate_directory

    with json_only(options.json), working(f"measuring the sensitivities of {options.model}"):
        measured = calibrate_directory(
            options.model,
            options.data or (),
            options.tokenizer,
            sequences=_sequences(options, 1),
            sequence_length=_length(options),
            num_batches=options.batches,
        )
    Path(options.calibrate).write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    if options.json:
        print_json(measured)
        return 0
    for kind, errors in measured["errors"].items():
        print(f"{kind:<10}" + "  ".join(f"{code} {error:.2%}" for code, error in errors.items()))
    print(f"wrote {options.calibrate}; use it with --calibration {options.calibrate}")
    return 0


def integer(text: str) -> int:
    """Parse an integer within the planner's range, for argparse."""
    if len(text) > 30 or not -_MOST <= int(text) <= _MOST:
        raise argparse.ArgumentTypeError(f"{text[:40]} is more than the largest number that can be planned, {_MOST:,}")
    return int(text)


class _Model(argparse.Action):
    """Keeps the model's directory, which an argument or a flag gives."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, flag: str | None = None) -> None:
        if (before := getattr(namespace, self.dest, None)) not in (None, values):
            raise PlanError(f"the model is {before!r} and {values!r}; give one of them")
        setattr(namespace, self.dest, values)


def make_parser() -> Parser:
    """Make the parser of the command's arguments."""
    parser = Parser(
        prog="laconic plan",
        description="Predict the bytes of every rank of a training run by kind, say whether it fits, and choose what "
        "each site keeps for backward under the budget. No weights and no memory are needed, for any number of ranks. "
        "Sizes, batch, pipeline, loss and optimizer go by their flags of laconic train, too: --optimizer.kind for "
        "--optimizer.",
    )
    add = parser.add_argument
    add("model", nargs="?", default=argparse.SUPPRESS, action=_Model,
        help="directory with a config.json, or that file; or give sizes")  # fmt: skip
    add("--init", "--model.path", dest="model", metavar="DIR", action=_Model, help="the same, as laconic train has it")
    add = parser.add_argument_group("model by sizes").add_argument
    add(
        "--family", "--model.family", help="whose layers these are, for sizes or an unknown model_type (default: llama)"
    )
    for name in _ALL_SIZES[:-1]:
        add(*filter(None, ("--" + name.replace("_", "-"), _OF_TRAIN.get(name))), type=integer, metavar="N")
    add("--tied", action="store_true", help="embedding and output projection share their matrix")
    add = parser.add_argument_group("run").add_argument
    add("--sequence-length", type=integer, metavar="N", help=f"tokens of a sample (default: {_USUAL_LENGTH})")
    add("--batch", type=integer, metavar="N", help="sequences per micro-batch (default: 1)")
    add(
        "--batch-size", type=integer, metavar="N", help="sequences of a step, as laconic train has it; not with --batch"
    )
    add("--micro-batches", "--accumulation", "--pipeline.micro-batches", type=integer, metavar="N",
        help="per step and pipeline (default: twice the stages)")  # fmt: skip
    add("--precision", default="bf16", help="fp32, bf16 (autocast over fp32 parameters) or bf16-pure")
    add("--image-size", type=integer, metavar="N", help="pixels of a side (default: the configuration's, or 224)")
    add("--optimizer", "--optimizer.kind", default="adamw", help=f"adamw, {' or '.join(OPTIMIZERS)}")
    add("--update-in-backward", "--optimizer.update-in-backward", action="store_true",
        help="the optimizer uses each gradient in backward, so that they are never there together")  # fmt: skip
    add("--gradients", "--gradients.bits", type=integer, default=32, metavar="BITS", help="32, 16, 12 or 8")
    add("--loss", "--activations.loss", default="exact", help="exact or chunked")
    add = parser.add_argument_group("layout").add_argument
    add("--dp", type=integer, default=1, metavar="N", help="data-parallel processes of a stage")
    add("--fsdp", action="store_true", help="shard over them (FSDP2) instead of copying (DDP)")
    add("--stages", "--pipeline.stages", type=integer, default=1, metavar="N", help="pipeline stages")
    add("--virtual-stages", "--pipeline.virtual-stages", type=integer, default=1, metavar="N",
        help="chunks of layers per stage")  # fmt: skip
    add("--schedule", "--pipeline.schedule", choices=list(SCHEDULES),
        help="default: 1f1b, or interleaved-1f1b with virtual stages")  # fmt: skip
    add(
        "--split", "--pipeline.split", type=integer, nargs="+", metavar="N", help="layers per chunk (default: balanced)"
    )
    add("--ep", type=integer, default=1, metavar="N", help="processes of --dp that share the experts of a layer")
    add("--tp", type=integer, default=1, metavar="N", help="tensor parallel with sequence parallelism; estimates only")
    add = parser.add_argument_group("choosing").add_argument
    add("--memory", metavar="SIZE", help="of each device, for example 24GB or 80GiB")
    add("--largest", action="store_true", help="the most layers that fit into --memory, given the other sizes")
    add("--reserve", type=float, default=0.05, help="share of it that is left free (default: %(default)s)")
    add("--policy", choices=["budget", "agoq", *_UNIFORM],
        help="who chooses (default: budget with --memory, else exact)")  # fmt: skip
    add("--choices", nargs="+", default=list(CHOICES), choices=ALL_CHOICES, help="what the budget policy may choose")
    add("--attention", "--activations.attention", default="exact", help="for the other policies: exact, int8, nf4")
    add("--calibration", metavar="FILE", help="sensitivities written by --calibrate instead of the shipped ones")
    add("--hardware", default="h100", help="for the time that choices cost: h100, a100, a6000, xeon-core")
    add("--time-weight", type=float, default=1.0,
        help="two per cent of the step against five per cent of gradient error")  # fmt: skip
    add = parser.add_argument_group("output").add_argument
    add("--out", metavar="FILE", help="write the plan as JSON, for laconic train --plan FILE")
    add("--chart", metavar="FILE", help="write a picture, for example plan.png")
    add_json(parser, "print the plan as one JSON document instead of tables")
    add = parser.add_argument_group("calibration").add_argument
    add("--calibrate", metavar="FILE", help="measure the model's sensitivities, write them to FILE and stop")
    add("--data", "--data.paths", nargs="+", metavar="PATH",
        help="text to measure on (default: the Python standard library)")  # fmt: skip
    add("--tokenizer", "--data.tokenizer", help="tokenizer.json (default: the one in the model directory, else bytes)")
    add("--batches", type=integer, default=4, metavar="N", help="batches to measure on (default: %(default)s)")
    return parser
