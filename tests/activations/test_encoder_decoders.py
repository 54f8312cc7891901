"""Encoder-decoders and models of other shapes compute and draw in training what they did."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic
from tests.activations.models import VOCABULARY, relative_error
from tests.grid import few, grid

_BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "activation_dropout": 0.1,
}
_T5 = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.1}

ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    "t5": _T5,
    "mt5": {**_T5, "feed_forward_proj": "gated-gelu"},
    "umt5": _T5,
    "bart": _BART,
    "mbart": _BART,
    "marian": {**_BART, "decoder_vocab_size": VOCABULARY, "pad_token_id": 0},
    "pegasus": _BART,
    "blenderbot": _BART,
    "led": {**_BART, "max_encoder_position_embeddings": 64, "attention_window": 8},
}


def make(family: str, implementation: str) -> nn.Module:
    """A model with random weights, in training mode."""
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1}
    config = AutoConfig.for_model(family, vocab_size=VOCABULARY, **{**special, **ENCODER_DECODERS[family]})
    torch.manual_seed(0)
    try:
        model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation=implementation)
    except ValueError as error:
        pytest.skip(f"{family} has no attention of this kind: {error}")
    return model.train()


def step(model: nn.Module) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Loss, logits, random state after forward, and gradients of one training step."""
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(3, VOCABULARY, (2, n), generator=generator) for n in (24, 16))
    mask = torch.ones_like(ids)
    mask[0, -5:] = 0
    torch.manual_seed(2)
    out = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False)
    state = torch.get_rng_state()
    out.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return out.loss.detach(), out.logits.detach(), state, grads


@pytest.mark.parametrize(
    ("family", "attention", "implementation"),
    grid(few(sorted(ENCODER_DECODERS), 4), ["int8", "exact"], ["sdpa", "eager"], strength=1),
)
def test_an_encoder_decoder_computes_and_draws_what_it_did(family: str, attention: str, implementation: str) -> None:
    model = make(family, implementation)
    twin = copy.deepcopy(model)
    report = laconic.compress_activations(twin, bits=8, attention=attention, sequence_length=16)
    assert report.unmeasured is None
    assert report.after_nbytes_per_token < report.before_nbytes_per_token
    expected, got = step(model), step(twin)
    for part in range(3):
        assert torch.equal(got[part], expected[part])
    assert got[3].keys() == expected[3].keys()
    whole = (torch.cat([grads[name].flatten() for name in expected[3]]) for grads in (got[3], expected[3]))
    # A relu forgets on which side of zero a value was that eight bits round to it.
    assert relative_error(*whole) < (0.1 if family == "t5" else 0.03)


@pytest.mark.usefixtures("nothing_is_packed")
@pytest.mark.parametrize("family", few(sorted(ENCODER_DECODERS), 2))
def test_backward_is_right_when_nothing_is_packed(family: str) -> None:
    model = make(family, "eager")
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, attention="exact", sequence_length=16)
    expected, got = step(model)[3], step(twin)[3]
    assert got.keys() == expected.keys()
    for name, grad in expected.items():
        assert relative_error(got[name], grad) < 2e-5 or grad.norm() < 1e-6, name


def test_a_block_of_t5_is_a_site() -> None:
    for family, kind in (("t5", "wi"), ("mt5", "wi_0")):
        sites = {site.name: site for site in laconic.activations.find_sites(make(family, "eager"))}
        assert sites["encoder.block.0.layer.1.DenseReluDense"].spec.gate == kind
