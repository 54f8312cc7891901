"""Every family of transformers with fused experts, in training mode with dropout: the same outputs, random numbers and
gradients on laconic's layers. What is not known is refused by name."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from benchmarks import family_models
from benchmarks.family_models import Family, NotBuiltError, inputs_of, model_of, tensors_of
from laconic.moe.huggingface import find_blocks, parallelize

WITH_EXPERTS = {
    "gemma4_text": {"global_head_dim": 16, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"], "num_dense_layers": 0},
    "nllb-moe": {"encoder_sparse_step": 2, "decoder_sparse_step": 2, "moe_token_dropout": 0.2},
    "switch_transformers": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "expert_capacity": 6},
    "longcat_flash": {"zero_expert_num": 6, "moe_topk": 4},
}
"""What else families need for a layer of experts among the first two."""

DENSE_WHEN_SMALL = {"beam", "flint", "gemma4", "bamba", "doge", "dots3_note"}
"""Their layers of experts come after the first two, or are no such layers at all."""
CALLED_APART = {"jetmoe", "nllb-moe", "switch_transformers"}
NO_SINGLE_ROUTER = {"dbrx", "inkling_text", "llama4", "llama4_text", "longcat_flash", "zaya"} | CALLED_APART


def families_with_experts() -> list[Family]:
    found = []
    for family in family_models.families():
        source = inspect.getsourcefile(getattr(transformers, family.class_names[0]))
        if source is not None and "xperts" in Path(source).read_text():
            found.append(family)
    return found


def built(family: Family, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    if family.name in WITH_EXPERTS:
        monkeypatch.setitem(family_models._ADJUSTED, family.name, WITH_EXPERTS[family.name])
    model = model_of(family)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def assert_alike(family: Family, model: nn.Module) -> None:
    twin = copy.deepcopy(model)
    done = parallelize(twin)
    assert done.layers
    results = []
    for each in (model, twin):
        torch.manual_seed(0)
        output = each(**inputs_of(family, model))
        output.loss.backward()
        results.append(([*tensors_of(output)], torch.get_rng_state()))
    (expected, drawn), (got, drawn_too) = results
    assert torch.equal(drawn, drawn_too)
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    for (name, a), (other, b) in zip(twin.named_parameters(), model.named_parameters(), strict=True):
        assert name == other
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None and b.grad is not None:
            assert (a.grad - b.grad).norm() <= 1e-3 * b.grad.norm() + 1e-6, name
    routers = [block.router for block in find_blocks(model).values()]
    assert all(router is None for router in routers) == (family.name in NO_SINGLE_ROUTER)


def check(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for family in families_with_experts():
        if family.name not in names:
            continue
        model = built(family, monkeypatch)
        try:
            assert_alike(family, model)
        except AssertionError as error:
            raise AssertionError(f"{family.name}: {error}") from error


@pytest.mark.ci
def test_routers_of_every_kind_are_left_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Correction biases beside a router, norms between it and the experts, scales and jitter."""
    families = ["dbrx", "ernie4_5_moe", "gemma4_text", "llama4_text", "longcat_flash", "minimax_m2", "phimoe"]
    check(families, monkeypatch)


@pytest.mark.ci
def test_experts_that_are_called_apart_keep_their_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    check([*CALLED_APART], monkeypatch)


@pytest.mark.slow
def test_every_family_is_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    spread = []
    for family in families_with_experts():
        if family.name in DENSE_WHEN_SMALL:
            continue
        try:
            model = built(family, monkeypatch)
        except NotBuiltError:
            continue
        try:
            assert_alike(family, model)
        except AssertionError as error:
            raise AssertionError(f"{family.name}: {error}") from error
        spread.append(family.name)
    assert len(spread) >= 48, spread
