"""Experts held as codes: outputs are those of decoded matrices, tokens those of a model with its experts rounded."""

from __future__ import annotations

import weakref
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from laconic.errors import ConfigError, ModelError
from laconic.formats.blockwise import BlockFormat
from laconic.infer import Engine, InferencePlan
from laconic.infer.coded_experts import CodedExperts, keep_experts
from laconic.infer.expert_share import ExpertShare
from laconic.infer.transformers_seam import CacheLimits, find_experts, load_experts, read_config
from laconic.moe.huggingface.experts import FusedExperts
from laconic.options import EXPERT_FORMATS, EXPERT_ROWS_FROM_CODES
from tests.infer.inside import Inside
from tests.infer.models import NEW_TOKENS, PROMPTS, SERVED_SPLIT, generated, make

CODED = EXPERT_FORMATS[1:]
LIMITS = CacheLimits(cache_tokens=256, batch_tokens=24)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("models")
    return cache(lambda family: make(family, folder, num_hidden_layers=2))


def layer_of(path: Path, dtype: torch.dtype) -> FusedExperts:
    """The first layer's experts; of 80 inputs, so that the last block of a row is shorter, and with biases."""
    model, blocks = find_experts(read_config(path), dtype)
    original, generator = model.get_submodule(next(iter(blocks))), torch.Generator().manual_seed(0)
    drawn = {key: torch.randn(p.shape, generator=generator) for key, p in original.named_parameters()}
    return FusedExperts(original, {key: nn.Parameter(p.to(dtype), requires_grad=False) for key, p in drawn.items()})


def rounded(matrices: torch.Tensor, code: str, is_transposed: bool) -> torch.Tensor:
    """Matrices in blocks of inputs, whichever dimension that is."""
    matrices = matrices.mT if is_transposed else matrices
    found = BlockFormat(code).quantize(matrices).dequantize()
    return found.mT if is_transposed else found


@pytest.mark.parametrize("code", CODED)
@pytest.mark.parametrize(("family", "dtype"), [("mixtral", torch.float32), ("gpt_oss", torch.bfloat16)])
def test_outputs_are_those_of_the_decoded_matrices(models: Any, family: str, dtype: torch.dtype, code: str) -> None:
    layer = layer_of(models(family), dtype)
    coded = CodedExperts(layer, BlockFormat(code), "experts")
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() == 3:
                parameter.copy_(rounded(parameter, code, family == "gpt_oss"))
    few = EXPERT_ROWS_FROM_CODES[code]
    for counts in ([3, 0, 1, 2], [0, 0, 0, 0], [200, few, 0, few + 1]):
        rows = torch.randn(sum(counts), 32, generator=torch.Generator().manual_seed(1)).to(dtype)
        with torch.no_grad():
            found, wanted = coded(rows, torch.tensor(counts)), layer(rows, torch.tensor(counts))
        assert found.dtype == dtype
        # Sums run in another order; in bfloat16 a product from codes does not round the decoded matrix.
        off = 2e-6 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(found, wanted, rtol=0, atol=off * float(wanted.abs().max()) if len(wanted) else 0)
    moved, exact = ExpertShare([coded]).rounding, ExpertShare([layer]).rounding
    assert exact is None
    assert moved is not None
    assert 0.2 * 2.0**-coded.format.bits < moved < 2.0 ** (1 - coded.format.bits)


def test_bytes_are_those_of_codes_and_scales(models: Any) -> None:
    layer = layer_of(models("gpt_oss"), torch.bfloat16)
    biases = sum(p.nbytes for p in layer.parameters() if p.dim() < 3)
    for code in CODED:
        matrices = sum(BlockFormat(code).nbytes(p.mT.shape) for p in layer.parameters() if p.dim() == 3)
        assert ExpertShare([keep_experts(code, "experts", layer)]).nbytes == matrices + biases
    assert keep_experts("exact", "experts", layer) is layer


def test_values_that_have_no_code_are_refused(models: Any) -> None:
    layer = layer_of(models("mixtral"), torch.float32)
    with torch.no_grad():
        layer.down_proj[1, 2, 3] = torch.inf
    with pytest.raises(ModelError, match=r"layers\.0\.experts\.down_proj holds NaN or infinity.* no codes in int8"):
        CodedExperts(layer, BlockFormat("int8"), "layers.0.experts")


def test_matrices_of_zeros_are_held_in_codes_too(models: Any) -> None:
    layer = layer_of(models("mixtral"), torch.float32)
    with torch.no_grad():
        layer.down_proj.zero_()
        layer.gate_up_proj.zero_()
    assert ExpertShare([keep_experts("int8", "experts", layer)]).rounding == 0.0


def test_a_layer_is_gone_before_the_next_is_read(models: Any) -> None:
    exact: list[weakref.ref[torch.Tensor]] = []

    def keep(name: str, layer: FusedExperts) -> Any:
        assert all(one() is None for one in exact), name
        exact.extend(weakref.ref(p.untyped_storage()) for p in layer.parameters())  # type: ignore[type-var]
        return keep_experts("nf4", name, layer)

    layers = load_experts(models("mixtral"), None, range, keep)
    assert len(layers) == 2
    assert all(one() is None for one in exact)


def rounded_tokens(path: Path, code: str, folder: Path) -> list[list[int]]:
    """What transformers' generate says with the experts' matrices rounded."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    _, blocks = find_experts(read_config(path))
    with torch.no_grad():
        for name in blocks:
            experts: Any = model.get_submodule(name)
            for parameter in experts.parameters():
                if parameter.dim() == 3:
                    parameter.copy_(rounded(parameter, code, experts.is_transposed))
    model.save_pretrained(folder)
    return generated(folder)


@pytest.mark.slow
@pytest.mark.parametrize("family", SERVED_SPLIT)
def test_tokens_are_those_of_a_model_with_rounded_experts(models: Any, family: str, tmp_path: Path) -> None:
    wanted = rounded_tokens(models(family), "int4", tmp_path)
    assert wanted != generated(models(family))  # so that exact experts would be found out
    plan = InferencePlan(num_micro_batches=2, num_slices=2)
    inside = Inside(models(family), 2, plan, expert_format="int4")
    assert "its experts rounded to int4 in both, to" in inside.check()
    assert inside.generate(PROMPTS, NEW_TOKENS, LIMITS) == wanted


def test_the_load_check_finds_one_wrong_scale(models: Any) -> None:
    inside = Inside(models("mixtral"), 1, InferencePlan(), expert_format="int8")
    assert "its experts rounded to int8 in both, to" in inside.check()
    first: Any = inside.shares[0]._layers[0]
    first.down_proj_scales[0] *= 1.02
    with pytest.raises(ModelError, match="are not those of the model's own"):
        inside.check()


def test_what_cannot_be_held_in_codes_is_refused(models: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expert_format is 'uint2', but it must be one of exact, nf4"):
        Engine(models("mixtral"), expert_format="uint2")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expert_format is 'int8' with experts = 0"):
        Engine(models("mixtral"), experts=0, expert_format="int8")
    with pytest.raises(
        ConfigError,
        match=r"expert_format is 'int8', but llama has no experts that an expert worker could hold \(it is dense\)",
    ):
        Engine(make("llama", tmp_path), expert_format="int8")


@pytest.mark.slow
def test_an_engine_holds_its_experts_in_codes(models: Any, tmp_path: Path) -> None:
    path = models("mixtral")
    with Engine(path, experts=2, expert_format="int4", threads=1) as engine:
        held = sum(worker.nbytes for worker in engine.workers if worker.role == "expert")
        layers = load_experts(path, None, range, partial(keep_experts, "int4"))
        assert held == ExpertShare(layers).nbytes
        assert all("in codes that move them by" in str(each) for each in engine.workers if each.role == "expert")
        assert engine.generate(PROMPTS, NEW_TOKENS) == rounded_tokens(path, "int4", tmp_path)
