"""Models of diffusers: the same forward bits, gradients near the exact ones, fewer bytes."""

from __future__ import annotations

import copy

import pytest
import torch

import laconic
from benchmarks.diffusion import MODELS, made, step_of

pytest.importorskip("diffusers")
pytestmark = pytest.mark.slow

FACTORS = {"UNet2DModel": 5.0, "UNet2DConditionModel": 4.0, "AutoencoderKL": 7.0}
"""At 4 bits; of the others 3, with hooks for what lies between their sites."""


@pytest.mark.parametrize("name", MODELS)
def test_a_step_in_four_bits(name: str) -> None:
    plain, arguments = made(name)
    output, exact, before = step_of(plain, arguments)
    exact = {parameter: gradient.clone() for parameter, gradient in exact.items()}
    model = copy.deepcopy(plain)
    laconic.compress_activations(model, 4, mode="combined", example_inputs=arguments)
    got, gradients, after = step_of(model, arguments)
    assert torch.equal(got, output)
    assert gradients.keys() == exact.keys()
    one, other = (torch.cat([g[n].flatten() for n in exact]).double() for g in (exact, gradients))
    assert torch.nn.functional.cosine_similarity(one, other, 0) > 0.99
    assert before / after > FACTORS.get(name, 3.0)
