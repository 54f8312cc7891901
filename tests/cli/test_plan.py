"""`laconic plan`: tables, plan files, exit codes, refusals in one line, calibration."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from laconic.cli.main import main
from laconic.cli.plan import make_parser
from laconic.cli.train import make_parser as train_parser
from laconic.cli.train import resolve
from laconic.cost import Batch, Plan, TracedModel, load_plan
from laconic.cost.hardware.compute import Sensitivity
from laconic.cost.memory.saved_tensors import Precision
from laconic.cost.sizes import format_nbytes, parse_nbytes
from laconic.errors import PlanError
from laconic.train.config.plan import check_plan, plan_settings
from laconic.train.config.schema import MoEConfig
from laconic.train.config.toml import load_config
from laconic.train.distributed.parallel_state import ParallelState
from laconic.train.model import build_model
from tests.activations.models import make_model
from tests.cost.shapes import shape_of, traced_llama

CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
LAYOUT = [
    *("--stages", "4", "--virtual-stages", "2", "--micro-batches", "8"),
    *("--dp", "8", "--fsdp", "--sequence-length", "8192", "--loss", "chunked"),
]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A directory of a model of 8 billion parameters, whose bytes come from closed formulas: a trace takes seconds."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    def trace_config(source: str, batch: Batch, precision: Precision, *, chunked: bool, **_: Any) -> TracedModel:
        assert source in (str(tmp_path), str(tmp_path / "config.json"))
        return traced_llama(shape_of("llama3-8b"), batch, precision, "chunked" if chunked else "exact")

    monkeypatch.setattr("laconic.train.memory.trace.trace_config", trace_config)
    return str(tmp_path)


def test_a_plan_is_made_printed_and_written(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, chart = tmp_path / "plan.json", tmp_path / "plan.png"
    assert main(["plan", model, "--memory", "48GB", *LAYOUT, "--out", str(plan), "--chart", str(chart)]) == 0
    text = capsys.readouterr().out
    assert "32 processes: 4 stages x 2 chunks (interleaved-1f1b, 8 micro-batches), 8 x FSDP2" in text
    assert "8.03 billion parameters" in text
    assert "\nfits: " in text
    assert text.isascii()
    assert [line.split()[2] for line in text.splitlines() if line[:4].strip() in ("0", "1", "2", "3")][:4] == [
        "11",
        "9",
        "7",
        "5",
    ]
    read = load_plan(plan)
    assert read.policy == "budget"
    assert read.prediction.peak_nbytes <= 48e9 * 0.95
    assert sum(read.job.layout.split) == 32  # explicit in a file, so that every version cuts alike
    assert chart.read_bytes().startswith(b"\x89PNG")


@pytest.mark.ci
def test_sizes_do_instead_of_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden-size": 64, "intermediate-size": 96, "num-layers": 4, "num-heads": 4, "num-kv-heads": 2}
    flags = [part for name, size in sizes.items() for part in (f"--{name}", str(size))]
    rest = ["--vocab-size", "257", "--sequence-length", "32", "--stages", "2"]
    experts = ["--family", "mixtral", "--num-experts", "4", "--experts-per-token", "2"]
    for family, extra in ((experts[1], experts), ("llama", ["--head-dim", "24"])):
        assert main(["plan", *flags, *rest, *extra, "--json"]) == 0
        plan = Plan.from_dict(json.loads(capsys.readouterr().out))
        assert plan.policy == "exact"
        # The run of the plan makes the same model.
        plan.save(tmp_path / "plan.json")
        config = load_config(None, plan_settings(load_plan(tmp_path / "plan.json")))
        made = build_model(config.model, 257, 32, 0, eos_token_id=256)
        assert made.config.model_type == family
        assert plan.job.model.num_parameters == sum(p.numel() for p in made.parameters())
        plan.check(made.config.to_dict(), stages=2)
    assert main(["plan", *flags, *rest, "--num-experts", "4"]) == 2
    assert "num_local_experts" in capsys.readouterr().err


@pytest.mark.ci
def test_what_experts_over_processes_take_beyond_one_all_to_all_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden-size": 64, "intermediate-size": 96, "num-layers": 2, "num-heads": 4, "vocab-size": 257, "batch": 1}
    flags = [part for name, size in sizes.items() for part in (f"--{name}", str(size))]
    flags += ["--family", "mixtral", "--num-experts", "4", "--experts-per-token", "2", "--sequence-length", "32"]
    for spread in (False, True):
        more = ["--dp", "2", "--ep", "2"] if spread else ["--dp", "2"]
        assert main(["plan", *flags, *more]) == 0
        text = capsys.readouterr().out
        assert main(["plan", *flags, *more, "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        for name in ("dispatcher", "chunks", "copies", "dispatch_codec"):
            assert (f"\n  moe.{name} (" in text) == spread
            assert (f"moe.{name}" in data["predicted"].get("not_counted", {})) == spread
            assert hasattr(MoEConfig(expert_parallel=2), name)
        assert Plan.from_dict(data).to_dict()["predicted"] == data["predicted"]


@pytest.mark.parametrize(
    ("policy", "bits"),
    [("agoq", [4, 5, 6, 8]), ("uniform2", [2] * 4), ("uniform4", [4] * 4), ("uniform8", [8] * 4), ("exact", [16] * 4)],
)
def test_policies_are_kept_whether_they_fit_or_not(
    model: str, policy: str, bits: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    attention = [] if policy == "exact" else ["--attention", "int8"]
    arguments = ["plan", model, *LAYOUT, "--policy", policy, *attention, "--out", str(out)]
    assert main([*arguments, "--memory", "1000GB"]) == 0
    assert main([*arguments, "--memory", "1GB"]) == 1
    assert "does not fit: " in capsys.readouterr().out
    plan = load_plan(out)
    firsts = [stage.layers[0] for stage in plan.job.stages()[:4]]
    found = [plan.choices[f"model.layers.{layer}.mlp"].bits for layer in firsts]
    assert found == bits
    assert plan.attention == ("exact" if policy == "exact" else "int8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "2GB"], r"the least that these choices can do with is [\d,]+ bytes \(\d+\.\d\d GB\)"),
        (["--memory", "lots"], r"memory is 'lots', but it must be a size such as 24GB"),
        (["--memory", "9GB", "--reserve", "1"], r"reserve is 1.0"),
        (["--policy", "budget"], r"no budget was given; add --memory"),
        (["--optimizer", "sgd"], r"optimizer is 'sgd', but it must be one of adamw, adamw8bit, adamw4bit"),
        (["--schedule", "gpipe"], r"--schedule is 'gpipe', but it must be left out with one stage"),
        (["--virtual-stages", "2"], r"--virtual-stages is 2, but it must be left out with one stage"),
        (["--split", "32"], r"--split is \[32\], but it must be left out with one stage"),
        (["--stages", "64"], r"the model has 32 layers, but 64 chunks"),
        (["--stages", "4", "--virtual-stages", "2", "--micro-batches", "9"], r"num_micro_batches is 9"),
        (["--policy", "uniform4", "--attention", "fp3"], r"code is 'fp3'"),
        (["--memory", "1TB", "--calibration", "/nowhere"], r"calibration is '/nowhere'"),
        (["--attention", "int8"], r"--attention is given, but would have no effect with the policy exact"),
        (["--memory", "9GB", "--attention", "nf4"], r"with the policy budget, which .* itself \(give --choices\)"),
        (["--policy", "agoq", "--choices", "8", "--time-weight", "2"], r"--choices and --time-weight are given, but"),
        (["--reserve", "0.2"], r"--reserve is given, but would have no effect without --memory"),
        (
            ["--batch-size", "6", "--dp", "4"],
            r"--batch-size is 6, but it must be a multiple of 4: --dp 4 times --",
        ),
        (["--batch-size", "8", "--batch", "2"], r"--batch is 2 and --batch-size 8; give one of them"),
        (["--batches", "2"], r"--batches is given, but would have no effect without --calibrate"),
        (["--calibrate", "x", "--memory", "9GB"], r"--memory is given, .* with --calibrate, which measures and stops"),
        (["--micro-batches", "0"], r"micro_batches is 0, but it must be at least 1"),
        (["--policy", "agoq", "--chart", "/nowhere/plan.png"], r"chart is '/nowhere/plan.png', but it cannot"),
    ],
)
def test_bad_input_ends_in_one_line(
    model: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", model, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("laconic: error: ")
    assert error.count("\n") == 1
    assert re.search(message, error)


def test_sizes_are_asked_for_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--num-layers", "2"]) == 2
    assert "--hidden-size, --intermediate-size, --num-heads, --vocab-size missing" in capsys.readouterr().err


@pytest.mark.ci
def test_a_model_is_calibrated_and_the_planner_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory, measured, text = tmp_path / "model", tmp_path / "measured.json", tmp_path / "text.txt"
    make_model("llama", vocab_size=257).save_pretrained(directory)  # type: ignore[operator]
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    arguments = ["--data", str(text), "--sequence-length", "32", "--batch", "2", "--batches", "2"]
    assert main(["plan", str(directory), "--calibrate", str(measured), *arguments]) == 0
    sensitivity = Sensitivity.load(measured)
    assert set(sensitivity.errors) == {"norm", "attention", "mlp", "head"}
    assert set(sensitivity.errors["head"]) == {"int8"}
    for kind in ("norm", "attention", "mlp"):
        errors = [sensitivity.errors[kind][code] for code in ("int8", "int6", "int5", "nf4")]
        assert errors == sorted(errors)
        assert 0 < errors[0] < 0.05
        assert errors[-1] < 1
        assert errors[-1] < sensitivity.errors[kind]["uint2"] < 3
    assert "measured by laconic plan --calibrate" in sensitivity.source
    capsys.readouterr()
    plan = ["plan", str(directory), "--memory", "20MB", "--precision", "fp32", "--calibration", str(measured)]
    assert main([*plan, "--sequence-length", "64", "--batch", "8"]) == 0
    assert "fits: " in capsys.readouterr().out
    # Two bits have an error as well, for who names them.
    assert main([*plan, "--sequence-length", "64", "--batch", "8", "--choices", "2", "8"]) == 0


def test_sizes_in_words() -> None:
    assert [parse_nbytes(text) for text in ("24GB", "24 GiB", "1.5k", "7B", "2TB")] == [
        24_000_000_000,
        24 * 2**30,
        1500,
        7,
        2 * 10**12,
    ]
    assert [format_nbytes(n) for n in (7, 1500, 24e9, 2e12)] == ["7 B", "1.50 KB", "24.00 GB", "2.00 TB"]
    for text in ("", "GB", "-3GB", "0", "3 parsecs"):
        with pytest.raises(PlanError, match="must be a size"):
            parse_nbytes(text)


@pytest.mark.parametrize("text", ["40", "1", "0.5", " 80 ", "24000000000"])
@pytest.mark.parametrize(
    "command",
    [
        ["plan", "x", "--memory"],
        ["infer", "plan", "Qwen3-30B-A3B", "--workers", "2", "--memory"],
    ],
)
def test_memory_without_a_unit_is_refused(command: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """40 would be 40 bytes; only a flag whose name says bytes takes a number alone."""
    assert main([*command, text]) == 2
    number = text.strip()
    error = capsys.readouterr().err
    assert f"memory is {text!r}, but it must have a unit: {number}GB, {number}GiB, or {number}B" in error
    with pytest.raises(PlanError, match="must have a unit"):
        parse_nbytes(text)
    assert parse_nbytes("40", "nbytes") == 40


_TERM = re.compile(
    r"^  (parameters|gradients|optimizer|activations|logits|buffers|workspace) +([\d.]+ [KMGT]?B)  (.*)$", re.M
)
_TRIED = {
    "--optimizer adamw8bit": ["--optimizer", "adamw8bit"],
    "--gradients 8": ["--gradients", "8"],
    "--loss chunked": ["--loss", "chunked"],
    "--policy uniform4": ["--policy", "uniform4"],
    "--fsdp with --dp 2 or more": ["--fsdp", "--dp", "4"],
    "more --dp": ["--dp", "16"],
    "--stages 2 or more": ["--stages", "2"],
    "fewer --micro-batches": ["--micro-batches", "4"],
    "fewer tokens per micro-batch: --batch": ["--sequence-length", "64"],
}


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--optimizer", "adamw8bit", "--sequence-length", "512"],
        ["--optimizer", "adamw8bit", "--sequence-length", "512", "--update-in-backward"],
        ["--optimizer", "adamw8bit", "--gradients", "8", "--sequence-length", "128", "--policy", "uniform4"],
        ["--dp", "8", "--fsdp", "--policy", "uniform4", "--sequence-length", "8192"],
        ["--dp", "8", "--fsdp", "--policy", "uniform4", "--loss", "chunked", "--sequence-length", "128"],
        ["--stages", "4", "--micro-batches", "64", "--policy", "uniform4", "--sequence-length", "8192"],
    ],
    ids=" ".join,
)
def test_what_is_said_of_the_largest_terms_makes_them_smaller(
    model: str, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def largest(*more: str) -> dict[str, tuple[float, str]]:
        assert main(["plan", model, *flags, *more]) in (0, 1)
        found = _TERM.findall(capsys.readouterr().out)
        return {name: (parse_nbytes(size.replace(" ", "")), told) for name, size, told in found}

    terms = largest()
    assert len(terms) == 3
    tried = 0
    for name, (nbytes, told) in terms.items():
        switch = next((flag for flag in _TRIED if told.startswith(flag)), None)
        if switch is None:
            assert told.startswith("--memory SIZE")
            continue
        then = largest(*_TRIED[switch])
        assert name not in then or then[name][0] < nbytes, told
        tried += 1
    assert tried


_GIVEN = {"hidden-size": 64, "intermediate-size": 96, "num-heads": 4, "vocab-size": 257, "sequence-length": 32}
_SIZES = [part for name, size in _GIVEN.items() for part in (f"--{name}", str(size))]


@pytest.mark.usefixtures("traced_once")
@pytest.mark.ci
def test_the_largest_model_fits_and_a_deeper_one_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["plan", *_SIZES, "--memory", "4MB", "--optimizer", "adamw8bit", "--json"]
    assert main([*flags, "--largest"]) == 0
    plan = Plan.from_dict(json.loads(capsys.readouterr().out))
    layers = plan.job.model.num_layers
    assert layers > 3
    assert main([*flags, "--num-layers", str(layers)]) == 0
    assert Plan.from_dict(json.loads(capsys.readouterr().out)) == plan
    assert main([*flags, "--num-layers", str(layers + 1)]) == 2
    assert "the least that these choices can do with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ([], "--largest asks which model fits, so it needs --memory"),
        (["--memory", "1GB", "--num-layers", "4"], "but --num-layers (4) says it; leave it out"),
        (
            ["--memory", "1GB", "some_model"],
            "but a directory (some_model) says it; leave it out and give the other sizes",
        ),
        (["--memory", "1GB", "--split", "1", "2"], "but --split ([1, 2]) says it"),
    ],
)
def test_what_says_the_depth_does_not_go_with_largest(
    flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *_SIZES, "--largest", *flags]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("size", ["0", "64"])
def test_sizes_beside_a_directory_are_refused(model: str, size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", model, "--hidden-size", size]) == 2
    assert "--hidden-size is given beside" in capsys.readouterr().err


@pytest.mark.usefixtures("traced_once")
@pytest.mark.ci
def test_flags_of_train_are_those_of_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--hidden-size", "--intermediate-size", "--num-layers", "--num-heads")
    model = [f"--model.{name}" for name in ("hidden-size", "intermediate-size")]
    model += ["--model.num-hidden-layers", "--model.num-attention-heads"]
    values = ("32", "64", "4", "2")
    usual = ("--vocab-size", "257", "--sequence-length", "32", "--json")
    plan = [*itertools.chain(*zip(sizes, values, strict=True)), "--micro-batches", "2", "--batch", "4", "--dp", "2"]
    train = [*itertools.chain(*zip(model, values, strict=True)), "--accumulation=2", "--batch-size", "16", "--dp", "2"]
    assert main(["plan", *plan, *usual, "--optimizer", "adamw8bit", "--gradients", "8", "--loss", "chunked"]) == 0
    ours = capsys.readouterr().out
    named = ["--optimizer.kind", "adamw8bit", "--gradients.bits=8", "--activations.loss", "chunked"]
    assert main(["plan", *train, *usual, *named]) == 0
    assert capsys.readouterr().out == ours
    assert main(["plan", *(flag.replace("-", "_").replace("__", "--", 1) for flag in train), *usual, *named]) == 0
    assert capsys.readouterr().out == ours
    known = {flag for action in make_parser().flags() for flag in action.option_strings if "." in flag}
    assert known <= {flag for action in train_parser().flags() for flag in action.option_strings}


@pytest.mark.ci
@pytest.mark.usefixtures("traced_once")
def test_updates_in_backward_are_planned_and_carried_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [*_SIZES, "--num-layers", "2", "--optimizer", "adamw8bit", "--hardware", "xeon-core", "--precision", "fp32"]
    plans = []
    for flags in ([], ["--update-in-backward"], ["--optimizer.update-in-backward"]):
        out = tmp_path / f"{len(plans)}.json"
        assert main(["plan", *sizes, *flags, "--out", str(out)]) == 0
        plans.append(load_plan(out))
    assert "32-bit gradients used in backward" in capsys.readouterr().out
    after, during, again = plans
    assert during == again
    assert after.to_dict()["settings"]["update_in_backward"] is False
    assert during.prediction.ranks[0].gradients_nbytes == 0 < after.prediction.ranks[0].gradients_nbytes
    settings = plan_settings(during)
    config = load_config(None, settings)
    assert (config.optimizer.update_in_backward, config.optimizer.clip_norm) == (True, 0.0)
    made = build_model(config.model, 257, 32, 0, eos_token_id=256)
    one = {**settings, "nproc": 1}
    check_plan(during, load_config(None, one), ParallelState(), made.config, False)
    with pytest.raises(PlanError, match=r"is for optimizer\.update_in_backward = False, but this run has True"):
        check_plan(after, load_config(None, one), ParallelState(), made.config, False)


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (
            ["--optimizer", "adamw"],
            "optimizer is 'adamw', but it must be adamw8bit or adamw4bit with",
        ),
        (["--gradients", "8"], "gradient_bits is 8, but it must be 32 or 16 with update_in_backward"),
        (["--micro-batches", "2"], "micro_batches is 2, but it must be 1 with update_in_backward"),
        (["--stages", "2", "--micro-batches", "1", "--schedule", "gpipe"], "stages is 2, but it must be 1 with"),
        (["--dp", "2"], "data_parallel is 2, but it must be 1 with update_in_backward: DDP averages whole gradients"),
    ],
    ids=lambda flags: " ".join(flags) if isinstance(flags, list) else "",
)
def test_what_needs_all_gradients_is_not_planned_with_updates_in_backward(
    flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = [*_SIZES, "--num-layers", "2", "--optimizer", "adamw8bit", "--update-in-backward"]
    assert main(["plan", *sizes, *flags]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--init", "--model.path", "--init=", "--model.path="])
def test_a_directory_is_given_as_to_train(model: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = [flag + model] if flag.endswith("=") else [flag, model]
    assert main(["plan", model, "--json"]) == 0
    ours = capsys.readouterr().out
    assert main(["plan", *given, "--json"]) == 0
    assert capsys.readouterr().out == ours
    for both in (["other", *given], [*given, "other"], [*given, "--init", "other"]):
        assert main(["plan", *both]) == 2
        assert re.search(r"(the model is '.*' and '.*'|are the same flag); give one of them", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--init"], "--init needs a value, e.g. --init DIR"),
        (["--out", "--init"], "--out needs a value, e.g. --out FILE"),
        (["--model.num_hidden_layers"], "--model.num-hidden-layers needs a value"),
        (["x", "--accumulation=2", "--micro_batches", "4"], "--accumulation and --micro-batches are given, which are"),
        (["x", "--data.paths", "y"], "--data.paths is given, but would have no effect without --calibrate"),
        (["x", "--calibrate", "y", "--optimizer.kind", "adamw"], "--optimizer.kind is given, but would have no effect"),
    ],
)
def test_flags_of_train_are_refused_by_their_names(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    assert f"laconic: error: {message}" in capsys.readouterr().err


@pytest.mark.ci
@pytest.mark.parametrize("file", ["", "config.json"])
def test_a_plan_carries_the_directory_that_it_is_for(model: str, tmp_path: Path, file: str) -> None:
    out = tmp_path / "plan.json"
    assert main(["plan", str(Path(model, file)), "--sequence-length", "32", "--out", str(out)]) == 0
    assert resolve(["--plan", str(out)])[0].model.path == model
    other = tmp_path / "other"
    assert resolve(["--plan", str(out), "--init", str(other)])[0].model.path == str(other)
