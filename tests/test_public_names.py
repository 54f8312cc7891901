"""Every public callable takes what it honours and refuses the rest by name."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import GenericAlias, SimpleNamespace
from typing import Any

import pytest

from docs import make_api
from laconic.errors import LaconicError

MADE_UP = "no_such_argument"


@cache
def _callables() -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {}
    for package in make_api.PACKAGES:
        module = importlib.import_module(package)
        for name in make_api._public(module):
            value = getattr(module, name)
            if callable(value) and not isinstance(value, GenericAlias):
                found.setdefault(f"{value.__module__}.{value.__qualname__}", value)
    return found


_GATE = {"num_experts": 4, "model_dim": 8}


def _parallelized(folder: Path) -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes)).save_pretrained(folder)
    return {"directory": folder}


def _layer(_: Path) -> dict[str, Any]:
    """Stand-ins for groups, which fully_shard would look at after its arguments."""
    from laconic.moe import GatedExperts, MoELayer, SoftmaxGate

    meshes = {"edp": None, "dp": None}
    grid = SimpleNamespace(layout=SimpleNamespace(edp=1, dp=1), expert_mesh=meshes, dense_mesh=meshes)
    return {"model": MoELayer(SoftmaxGate(2, 8, 1), GatedExperts(2, 8, 8)), "grid": grid}


ARGUMENTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "laconic.activations.forwards.checkpoint.checkpoint": lambda _: {"function": lambda x=0: x},
    "laconic.moe.gates.make_gate": lambda _: _GATE | {"name": "softmax", "top_k": 2},
    "laconic.moe.gates.cosine.CosineGate": lambda _: _GATE | {"top_k": 2},
    "laconic.moe.gates.gshard.GShardGate": lambda _: _GATE,
    "laconic.moe.gates.sigmoid.SigmoidGate": lambda _: _GATE | {"top_k": 2},
    "laconic.moe.gates.sinkhorn.SinkhornGate": lambda _: _GATE,
    "laconic.moe.gates.softmax.SoftmaxGate": lambda _: _GATE | {"top_k": 2},
    "laconic.moe.huggingface.pretrained.from_pretrained": _parallelized,
    "laconic.moe.replica_gradients.fully_shard_layers": _layer,
}
"""Of callables that hand keywords on: what else they need before anybody looks at those."""


def _hands_on(value: Callable[..., Any]) -> bool:
    """Whether the callable takes any keyword, so that Python does not refuse one by itself."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except ValueError:
        return False
    return any(one.kind is one.VAR_KEYWORD for one in parameters)


def _refuses(name: str, value: Callable[..., Any], arguments: dict[str, Any]) -> str:
    """The message with which a callable refuses an argument that does not exist."""
    try:
        value(**arguments, **{MADE_UP: 1})
    except (TypeError, LaconicError) as error:
        return str(error)
    pytest.fail(f"{name} takes {MADE_UP}")


def test_arguments_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    silent = {}
    for name, value in _callables().items():
        message = _refuses(name, value, ARGUMENTS.get(name, lambda _: {})(tmp_path))
        if getattr(value, "_is_protocol", False) or "takes no arguments" in message or "takes exactly one" in message:
            continue  # whatever it is given, it cannot be made
        if MADE_UP not in message:
            silent[name] = message
    assert silent == {}


def test_the_walk_meets_what_hands_keywords_on() -> None:
    """Otherwise a missing argument would be all that they refuse."""
    assert len(_callables()) > 200
    handing = {name for name, value in _callables().items() if _hands_on(value)}
    assert set(ARGUMENTS) <= handing


@pytest.mark.parametrize("name", ["afi_resnet50", "afi_resnet101", "afi_resnet152", "AFIResNetConfig"])
@pytest.mark.parametrize(
    ("given", "meant"), [("num_clases", "num_classes"), ("dropratee", "drop_rate"), ("reductions", "reduction")]
)
def test_a_misspelt_argument_of_a_network_is_named(name: str, given: str, meant: str) -> None:
    vision = importlib.import_module("laconic.vision")
    if (name, given) == ("AFIResNetConfig", "num_clases"):
        meant = "num_labels"
    with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected keyword argument '{given}'"):
        partial(getattr(vision, name), **{given: 10})()
    if name != "AFIResNetConfig":
        with pytest.raises(TypeError, match=f"did you mean {meant}"):
            getattr(vision, name)(**{given: 10})


@pytest.mark.ci
def test_every_documented_package_is_found_by_importing_laconic_alone() -> None:
    packages = [name for name in make_api.PACKAGES if name.count(".") == 1]
    code = f"import laconic; found = [{', '.join(packages)}]; assert {packages} == [one.__name__ for one in found]"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert {name.partition(".")[2] for name in packages} <= {*dir(importlib.import_module("laconic"))}
