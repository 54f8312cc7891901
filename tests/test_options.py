"""A value of an option is taken wherever the option is, or refused with a reason of that place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch

import laconic
from laconic import options
from laconic.cli.run import make_parser
from laconic.errors import LaconicError, ModelError
from laconic.integrations.config import LaconicConfig
from laconic.run.models import Wishes
from laconic.run.savings import Savings
from laconic.train.config.toml import load_config
from laconic.train.report.metrics import read_metrics
from tests.run.scripts import Net, Run, adamw, batch, loop
from tests.train.runs import losses, tiny_config, train_alone

VALUES: dict[str, tuple[object, ...]] = {
    "activations": options.ACTIVATION_BITS,
    "attention": options.ATTENTIONS,
    "mode": options.MODES,
    "loss": options.LOSSES,
    "gradients": options.GRADIENT_BITS,
    "optimizer": options.OPTIMIZERS,
}
WRONG: dict[str, tuple[object, ...]] = {
    "activations": (0, 1, 7, 9, 32, -4),
    "attention": ("", "int7", "Exact", "bf16"),
    "mode": ("", "hook"),
    "loss": ("", "chunk", "auto"),
    "gradients": (0, 4, 16),
    "optimizer": ("", "sgd"),
}


def flags(name: str, value: object) -> None:
    given = make_parser().parse_args([f"--{name}={value}", "script.py"])
    Wishes(given.activations, given.attention, given.loss, given.optimizer)


def wishes(name: str, value: object) -> None:
    Wishes(**{name: value})  # type: ignore[arg-type]


def configuration(name: str, value: object) -> None:
    LaconicConfig(**{name: value})  # type: ignore[arg-type]


def toml(name: str, value: object, folder: Path) -> None:
    path = {"activations": "activations.bits", "gradients": "gradients.bits", "optimizer": "optimizer.kind"}
    section, _, key = path.get(name, f"activations.{name}").partition(".")
    (folder / "train.toml").write_text(f"[{section}]\n{key} = {value!r}\n", encoding="utf-8")
    load_config(folder / "train.toml")


def function(name: str, value: object) -> None:
    argument = "bits" if name == "activations" else name
    try:
        laconic.compress_activations(Net(), **{argument: value})  # type: ignore[arg-type]
    except ModelError as error:
        if "must be one of" in str(error) or value != "chunked":  # of what is no language model
            raise


HOSTS: dict[str, tuple[Callable[..., None], tuple[str, ...]]] = {
    "flags of laconic run": (flags, ("activations", "attention", "loss", "optimizer")),
    "wishes of laconic run": (wishes, ("activations", "attention", "loss", "optimizer")),
    "LaconicConfig": (configuration, tuple(VALUES)),
    "laconic train": (toml, tuple(VALUES)),
    "compress_activations": (function, ("activations", "attention", "mode", "loss")),
}
CASES = [(host, name) for host, (_, names) in HOSTS.items() for name in names]


def given(host: str, name: str, value: object, folder: Path) -> None:
    call = HOSTS[host][0]
    call(name, value, folder) if call is toml else call(name, value)


@pytest.mark.parametrize(("host", "name"), CASES)
def test_a_value_that_one_takes_all_take(host: str, name: str, tmp_path: Path) -> None:
    for value in VALUES[name]:
        given(host, name, value, tmp_path)


@pytest.mark.parametrize(("host", "name"), CASES)
def test_no_host_takes_another(host: str, name: str, tmp_path: Path) -> None:
    for value in WRONG[name]:
        if (host, value) == ("laconic train", "auto"):  # which only it has
            given(host, name, value, tmp_path)
            continue
        with pytest.raises(LaconicError, match=r"must be") as refusal:
            given(host, name, value, tmp_path)
        assert repr(value) in str(refusal.value)
        for listed in VALUES[name]:
            assert str(listed) in str(refusal.value)
        if value == "auto" and host != "flags of laconic run":
            assert "auto is for laconic train" in str(refusal.value)


@pytest.mark.parametrize("host", [host for host, (call, _) in HOSTS.items() if call not in (flags, toml)])
@pytest.mark.parametrize("value", [4.0, True, "4"])
def test_numbers_of_bits_are_integers(host: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(LaconicError, match="must be"):
        given(host, "activations", value, tmp_path)


def test_the_types_list_what_the_tables_hold() -> None:
    assert get_args(options.Code) == tuple(options.CODE_BITS)
    assert {bits: options.CODE_BITS[code] for bits, code in options.DEFAULT_CODES.items()} == {
        bits: bits for bits in options.ACTIVATION_BITS if bits != 16
    }
    assert options.DEFAULT_CODES[4] == "nf4"
    assert options.listed((2, 4, 16)) == "2, 4 or 16"
    assert options.listed(("one",)) == "'one'"


def test_laconic_run_trains_in_two_bits() -> None:
    net, run = Net(), Run()
    with Savings(Wishes(activations=2)) as savings:
        loop(run, lambda: net(batch()).square().mean(), adamw(net), of=(("Net", (net,)),))
    [model] = savings.models
    assert model.left_exact is None
    before, after = model.measured
    assert before is not None
    assert after is not None
    assert after.nbytes < before.nbytes / 4
    assert all(torch.isfinite(loss) for loss in run.losses)


def test_exact_attention_is_taken_beside_hooks_as_by_the_other_hosts() -> None:
    laconic.compress_activations(Net(), attention="exact", mode="hooks")
    with pytest.raises(ModelError, match="attention= need mode='sites'"):
        laconic.compress_activations(Net(), attention="int8", mode="hooks")


@pytest.mark.parametrize("mode", ["sites", pytest.param("combined", marks=pytest.mark.ci)])
def test_the_reference_trainer_keeps_attention_as_it_is_told(mode: str, tmp_path: Path) -> None:
    kept = {}
    for attention in ("int8", "recompute"):
        changes = {"steps": 2, "eval_every": 0, "activations.attention": attention, "activations.mode": mode}
        config = tiny_config(tmp_path, attention, changes)
        train_alone(config)
        assert len(losses(config.run_dir)) == 2
        rows = read_metrics(tmp_path / attention)
        [kept[attention]] = {row["saved_nbytes"] for row in rows if "saved_nbytes" in row}
    assert kept["recompute"] < kept["int8"]
