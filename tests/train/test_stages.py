"""A model cut into chunks, in one process: the chain of chunks is the model, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import laconic
from laconic.errors import ConfigError, ModelError
from laconic.train.config.schema import ModelConfig
from laconic.train.model import build_model
from laconic.train.model_split import Gap, ModelChunk, balanced_split, mean_loss, split_model
from laconic.train.pipeline import StageModule
from tests.grid import grid

VOCABULARY = 97
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "olmo2", "phi3", "gpt2", "gpt_neox", "mixtral"]


def tiny(family: str = "llama", **changes: Any) -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    config = ModelConfig(family=family, **({"num_hidden_layers": 5} | sizes | changes))
    return build_model(config, VOCABULARY, 128, seed=0)


def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (2, 18), generator=torch.Generator().manual_seed(0))


def chained(chunks: list[ModelChunk], ids: Tensor) -> Tensor:
    x = ids[:, :-1]
    for chunk in chunks[:-1]:
        x = chunk.hidden_states(x)
    return chunks[-1].loss(x, ids[:, 1:])


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    for parameter in model.parameters():
        parameter.grad = None
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("family", "bits"), grid(FAMILIES, [16, 4], strength=1))
def test_the_chain_of_chunks_has_the_loss_and_the_gradients_of_the_model(family: str, bits: int) -> None:
    model = tiny(family)
    if bits == 4:
        laconic.compress_activations(model)
    model.eval()  # GPT-2 has dropout
    chunks = split_model(model, (2, 1, 2))
    ids = tokens()
    whole = mean_loss(model, ids[:, 1:], input_ids=ids[:, :-1])
    expected = gradients(model, whole)
    parts = chained(chunks, ids)
    found = gradients(model, parts)
    assert torch.equal(parts, whole)
    assert found.keys() == expected.keys() == dict(model.named_parameters()).keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("tied", [True, False])
def test_names_are_those_of_the_whole_model(tied: bool) -> None:
    model = tiny(tie_word_embeddings=tied)
    names = [set(dict(chunk.model.named_parameters())) for chunk in split_model(model, (2, 2, 1))]
    assert set.union(*names) == set(dict(model.named_parameters()))
    assert names[0] & names[2] == ({"model.embed_tokens.weight"} if tied else set())
    assert not names[0] & names[1]
    assert not names[1] & names[2]
    assert {name.split(".")[2] for name in names[1]} == {"2", "3"}


def test_chunks_share_the_parameters_of_the_model() -> None:
    model = tiny()
    own = {id(parameter) for parameter in model.parameters()}
    for chunk in split_model(model, (3, 2)):
        assert {id(parameter) for parameter in chunk.model.parameters()} <= own
    assert not any(isinstance(module, Gap) for module in model.modules())


def test_labels_of_minus_100_do_not_count() -> None:
    model = tiny()
    ids = tokens()
    labels = ids[:, 1:].clone()
    labels[1] = -100
    expected = mean_loss(model, ids[:1, 1:], input_ids=ids[:1, :-1])
    torch.testing.assert_close(mean_loss(model, labels, input_ids=ids[:, :-1]), expected)
    labels[:] = -100
    assert mean_loss(model, labels, input_ids=ids[:, :-1]).item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_is_the_cross_entropy_of_torch_bit_for_bit(dtype: torch.dtype) -> None:
    model, ids = tiny(), tokens()
    with_ignored = ids.clone()
    with_ignored[0, 1:4] = -100
    labels = with_ignored[:, 1:]  # strided, as the trainer's are
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        assert logits.dtype == dtype
        loss = mean_loss(model, labels, input_ids=ids[:, :-1])
    total = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
    exact = total / (labels != -100).sum()
    assert torch.equal(loss, exact)
    for found, expected in zip(*(gradients(model, each).values() for each in (loss, exact)), strict=True):
        assert torch.equal(found, expected)


def test_the_split_makes_the_largest_chunk_as_small_as_it_can_be() -> None:
    assert balanced_split(tiny(num_hidden_layers=4, tie_word_embeddings=False), 2) == (2, 2)
    small = tiny(num_hidden_layers=7)
    large_head = build_model(
        ModelConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=7, num_attention_heads=2), 1000, 128, 0
    )
    # A layer has 10304 parameters; the head 3104 or 32000. Looking up the embedding is no work.
    assert max(balanced_split(small, 3)) == 3
    assert balanced_split(large_head, 3) == (3, 3, 1)


def test_impossible_cuts_are_refused() -> None:
    model = tiny(num_hidden_layers=2)
    with pytest.raises(ConfigError, match="the model has 2 decoder layers"):
        balanced_split(model, 3)
    with pytest.raises(ConfigError, match=r"pipeline.split is \[1, 2\]"):
        split_model(model, (1, 2))


def test_a_model_whose_parts_do_not_add_up_is_refused() -> None:
    model = tiny(num_hidden_layers=2)
    original = type(model.model).forward

    class Twice(type(model.model)):  # type: ignore[misc]
        """Adds the embedding to the output, behind the back of its layers."""

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = original(self, *args, **kwargs)
            embedded = kwargs.get("inputs_embeds")
            if embedded is None:
                embedded = self.embed_tokens(kwargs["input_ids"])
            out.last_hidden_state = out.last_hidden_state + embedded
            return out

    model.model.__class__ = Twice
    with pytest.raises(ModelError, match="cannot be cut into pipeline stages"):
        split_model(model, (1, 1))


def test_a_received_tensor_that_is_filled_again_is_packed_again() -> None:
    """A schedule receives every step's hidden states into one tensor, and torch does not count that as a change."""
    model = tiny()
    laconic.compress_activations(model)
    last = split_model(model, (2, 3))[1]
    stage = StageModule(last, torch.device("cpu"), "fp32", chunked_loss=False)
    ids = tokens()
    hidden = [torch.randn(2, 17, 32, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    expected = gradients(last, stage(hidden[1].clone().requires_grad_(), ids[:, 1:]).sum())
    received = hidden[0].clone().requires_grad_()
    gradients(last, stage(received, ids[:, 1:]).sum())
    received.data.copy_(hidden[1])  # as gloo does: no change of version
    found = gradients(last, stage(received, ids[:, 1:]).sum())
    for name in expected:
        assert torch.equal(found[name], expected[name]), name
