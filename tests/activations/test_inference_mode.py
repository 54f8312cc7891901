"""`compress_activations` where no gradient is wanted: conversion and report are those of a plain call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import nn

import laconic
from tests.activations.models import make_ids, make_model
from tests.grid import grid


def plain() -> tuple[nn.Module, dict[str, Any]]:
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    return model, {"input": torch.randn(32, 64)}


def language_model() -> tuple[nn.Module, dict[str, Any]]:
    ids = make_ids()
    return make_model("llama"), {"input_ids": ids, "labels": ids}


def images() -> tuple[nn.Module, dict[str, Any]]:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 4))
    return model, {"input": torch.randn(4, 3, 8, 8)}


@pytest.mark.parametrize(
    ("around", "mode", "make"),
    grid(
        [torch.inference_mode, torch.no_grad],
        ["sites", "hooks", "combined"],
        [plain, language_model, images],
        strength=1,
    ),
)
def test_the_report_is_that_of_a_plain_call_and_the_model_trains(
    make: Callable[[], tuple[nn.Module, dict[str, Any]]],
    mode: Literal["sites", "hooks", "combined"],
    around: Callable[[], contextlib.AbstractContextManager[Any]],
) -> None:
    torch.manual_seed(0)
    model, inputs = make()
    expected = laconic.compress_activations(model, mode=mode, example_inputs=inputs)
    torch.manual_seed(0)
    model, _ = make()
    with around():
        inputs = {name: value.clone() for name, value in inputs.items()}  # inference tensors, under inference_mode
        report = laconic.compress_activations(model, mode=mode, example_inputs=inputs)
        value = model(**inputs)
    assert str(report) == str(expected)
    assert report.before_nbytes_per_token
    inputs = {name: value.clone() for name, value in inputs.items()}
    trained = model(**inputs)
    for one in (value, trained):
        assert one is not None
    output = trained if isinstance(trained, torch.Tensor) else trained.loss
    output.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("mode", ["sites", "combined"])
def test_gradients_enabled_inside_of_inference_mode_keep_nothing(mode: Literal["sites", "combined"]) -> None:
    model, inputs = plain()
    expected = model(**inputs).detach()
    laconic.compress_activations(model, mode=mode)
    with torch.inference_mode(), torch.enable_grad():
        assert torch.equal(model(inputs["input"]), expected)
