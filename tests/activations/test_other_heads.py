"""loss="chunked" for masked and sequence-to-sequence language models: their own loss, without their logits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.activations import SavedTensorTracker
from laconic.activations.whole_model.head import find_head
from laconic.errors import ModelError
from tests.activations.models import VOCABULARY, gradients_of, relative_error
from tests.activations.test_encoder_decoders import make
from tests.grid import few

MASKED: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {"max_position_embeddings": 64},
    "electra": {"embedding_size": 64},
    "distilbert": {"dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4},
    "modernbert": {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2},
}
SEQUENCES = ("t5", "bart", "marian", "pegasus")


def a_model(family: str, **overrides: Any) -> nn.Module:
    """A small model in training mode, with biases and dropout."""
    if family in SEQUENCES:
        model = make(family, "sdpa")
        for module in model.modules():
            if "final_logits_bias" in module._buffers:
                module.final_logits_bias = nn.Buffer(torch.randn(1, VOCABULARY))
        return model
    from transformers import AutoConfig, AutoModelForMaskedLM

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    if family == "distilbert":
        sizes = {"vocab_size": VOCABULARY}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**sizes, **MASKED[family], **overrides})
    model = AutoModelForMaskedLM.from_config(config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def batch(family: str, tokens: int = 24) -> dict[str, Tensor]:
    """Tokens, and labels of which many do not count."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (2, tokens), generator=generator)
    labels = torch.randint(3, VOCABULARY, (2, 16 if family in SEQUENCES else tokens), generator=generator)
    labels[:, ::3] = -100
    inputs = {"input_ids": ids, "labels": labels}
    if family in SEQUENCES:
        start = torch.full_like(labels[:, :1], 1)
        inputs["decoder_input_ids"] = torch.cat([start, labels[:, :-1].clamp(min=0)], dim=1)
    return inputs


def loss_of(model: nn.Module, inputs: dict[str, Tensor]) -> Any:
    torch.manual_seed(2)
    return model(**inputs)


@pytest.mark.parametrize("family", few([*MASKED, *SEQUENCES], 4))
def test_loss_and_gradients_are_those_of_the_model(family: str) -> None:
    model, inputs = a_model(family), batch(family)
    head = find_head(model)
    assert not head.shifts
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, bits=16, loss="chunked", example_inputs=inputs)
    expected, got = loss_of(model, inputs), loss_of(twin, inputs)
    torch.testing.assert_close(got.loss, expected.loss, rtol=2e-6, atol=1e-6)
    assert got.logits.shape == (2, 0, VOCABULARY)
    assert type(got.logits) is Tensor
    expected.loss.backward()
    got.loss.backward()
    wanted, found = gradients_of(model), gradients_of(twin)
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert relative_error(found[name], grad) < 1e-4 or grad.norm() < 1e-5, name


@pytest.mark.parametrize("family", few(["bert", "roberta", "bart", "t5"], 2))
def test_the_bytes_of_logits_are_gone(family: str) -> None:
    model, inputs = a_model(family), batch(family)
    twin = copy.deepcopy(model)
    laconic.compress_activations(model, loss="exact", example_inputs=inputs)
    laconic.compress_activations(twin, loss="chunked", example_inputs=inputs)
    kept = []
    for each in (model, twin):
        with SavedTensorTracker(each) as tracker:
            loss_of(each, inputs)
        kept.append(tracker.nbytes)
    tokens = inputs["labels"].numel()
    logits = tokens * VOCABULARY * 4
    hidden = tokens * 64 * 4  # which the chunked loss keeps exact
    assert kept[0] - kept[1] > logits - hidden - 12 * tokens


@pytest.mark.parametrize("family", ["bert", "bart"])
def test_other_calls_return_what_they_did(family: str) -> None:
    model, inputs = a_model(family), batch(family)
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, bits=16, loss="chunked")
    with torch.no_grad():
        assert torch.equal(loss_of(model, inputs).logits, loss_of(twin, inputs).logits)
        assert torch.equal(loss_of(model, inputs).loss, loss_of(twin, inputs).loss)
    del inputs["labels"]
    assert torch.equal(loss_of(model, inputs).logits, loss_of(twin, inputs).logits)
    laconic.decompress_activations(twin)
    assert not any("forward" in vars(module) for module in twin.modules())


def test_output_as_a_tuple_has_plain_logits() -> None:
    model, inputs = a_model("bert"), batch("bert")
    laconic.compress_activations(model, bits=16, loss="chunked")
    loss, logits = model(**inputs, return_dict=False)
    assert loss.shape == ()
    assert (logits.shape, type(logits)) == ((2, 0, VOCABULARY), Tensor)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_layers_keep_their_graphs_from_step_to_step() -> None:
    model, inputs = a_model("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), batch("bert")
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, bits=16, loss="chunked")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for layer in twin.bert.encoder.layer:
        layer.compile(backend="aot_eager")
    for _ in range(3):
        torch.testing.assert_close(loss_of(twin, inputs).loss, loss_of(model, inputs).loss)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_loss_with_another_term_is_refused() -> None:
    from transformers import AutoConfig, BertForPreTraining, BertForSequenceClassification

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    config = AutoConfig.for_model("bert", num_attention_heads=4, **sizes)
    with pytest.raises(ModelError, match="loss is 'chunked', but"):
        laconic.compress_activations(BertForPreTraining(config), loss="chunked")
    with pytest.raises(ModelError, match="loss is 'chunked', but"):
        laconic.compress_activations(BertForSequenceClassification(config), loss="chunked")
