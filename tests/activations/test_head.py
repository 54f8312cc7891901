"""loss="chunked" in Hugging Face models: the loss and gradients of the model, and who is left alone."""

from __future__ import annotations

import copy
import io
import logging
import threading
from typing import Any, Literal

import pytest
import torch
from torch import nn

import laconic
from laconic.activations import SavedTensorTracker
from laconic.activations.whole_model.head import find_head
from laconic.activations.whole_model.loss import LossSpec
from laconic.errors import DataError, ModelError
from tests.activations.models import VOCABULARY, gradients_of, loss_of, make_ids, make_model, relative_error
from tests.patience import patient

# Families with something between projection and loss, or beside them, and what that is.
SPECS: dict[str, tuple[dict[str, Any], LossSpec]] = {
    "llama": ({}, LossSpec()),
    "gpt2": ({}, LossSpec()),
    "gemma2": ({"head_dim": 16, "query_pre_attn_scalar": 16}, LossSpec(softcap=30.0)),
    "granite": ({"logits_scaling": 8.0}, LossSpec(scale=0.125)),
    "cohere": ({"logit_scale": 0.3}, LossSpec(scale=0.3)),
    "opt": ({"ffn_dim": 128, "word_embed_proj_dim": 64}, LossSpec()),
    "mixtral": ({"num_local_experts": 4, "output_router_logits": True}, LossSpec()),
}


def chunked(model: nn.Module, **options: Any) -> nn.Module:
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, loss="chunked", **options)
    return twin


@pytest.mark.parametrize("family", SPECS)
def test_loss_and_gradients_are_those_of_the_model(family: str) -> None:
    overrides, spec = SPECS[family]
    model = make_model(family, **overrides)
    assert find_head(model).spec == spec
    twin, ids = chunked(model, bits=16), make_ids()
    expected, got = loss_of(model, ids), loss_of(twin, ids)
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    expected.backward()
    got.backward()
    wanted, found = gradients_of(model), gradients_of(twin)
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert relative_error(found[name], grad) < 1e-4 or grad.norm() < 1e-6, name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_embeddings_get_both_gradients(tied: bool, dtype: torch.dtype) -> None:
    model = make_model("llama", tie_word_embeddings=tied).to(dtype)
    twin, ids = chunked(model, bits=16), make_ids()
    losses = [loss_of(each, ids) for each in (model, twin)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0.0)
    for value in losses:
        value.backward()
    wanted, found = gradients_of(model), gradients_of(twin)
    name = "model.embed_tokens.weight"
    assert relative_error(found[name], wanted[name]) < (0.02 if dtype == torch.bfloat16 else 1e-6)
    assert ("lm_head.weight" in found) != tied


def test_labels_may_be_ignored_shifted_and_counted_by_the_caller() -> None:
    model = make_model("llama")
    twin, ids = chunked(model, bits=16), make_ids()
    labels = ids.clone()
    labels[:, :10] = -100
    shifted = ids.roll(-1, 1)
    for options in (
        {"labels": labels},
        {"labels": labels, "num_items_in_batch": 19},
        {"labels": labels, "num_items_in_batch": torch.tensor(19)},
        {"labels": labels, "shift_labels": shifted},
        {"labels": ids, "ignore_index": int(ids[0, 3])},
        {"labels": labels, "return_dict": False},
    ):
        expected, got = (each(ids, use_cache=False, **options)[0] for each in (model, twin))
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_bytes_of_the_loss_are_gone_and_the_report_shows_it() -> None:
    # A Llama-3-8B has 128,256 / 4096 = 31.3 entries of the vocabulary per hidden value; so has this.
    hidden, vocabulary = 64, 2004
    model = make_model("llama", vocab_size=vocabulary).bfloat16()
    hint = 'loss="chunked" would not keep the 4,0'
    assert hint in str(laconic.compress_activations(model, sequence_length=64))
    laconic.decompress_activations(model)
    report = laconic.compress_activations(model, loss="chunked", sequence_length=64)
    assert hint not in str(report)
    rows = {row.name: row for row in report.rows}
    unit = 2 * hidden
    # Plain: the log-softmax in fp32. Chunked: the hidden states, a log-sum-exp and a label per token.
    assert rows[""].before_nbytes_per_token / unit == pytest.approx(62.6, rel=0.002)
    assert rows[""].after_nbytes_per_token == 0
    assert rows["lm_head"].format == "exact"
    assert rows["lm_head"].after_nbytes_per_token == pytest.approx(unit + 4 + 8, abs=1)
    with SavedTensorTracker(model) as tracker:
        model(input_ids=make_ids(), labels=make_ids(), use_cache=False)
    assert "" not in tracker.by_module


def test_bytes_of_the_loss_are_named_where_chunking_serves_and_nowhere_else(caplog: pytest.LogCaptureFixture) -> None:
    class Wrapped(nn.Module):
        def __init__(self, vocabulary: int = 2004) -> None:
            super().__init__()
            self.inner = make_model("llama", vocab_size=vocabulary)

        def forward(self, **inputs: Any) -> Any:
            return self.inner(**inputs)

    inputs = {"input_ids": make_ids(), "labels": make_ids()}
    report = laconic.compress_activations(Wrapped(), example_inputs=inputs)
    assert report.loss_owner == "inner"
    assert report.loss_nbytes_per_token == pytest.approx(2004 * 4, rel=0.05)
    remedy = f'loss="chunked" would not keep the {report.loss_nbytes_per_token:,.0f} bytes a token of the loss'
    assert str(report).endswith(f"2.09x less\n{remedy}")
    with caplog.at_level(logging.WARNING, logger="laconic"):
        laconic.compress_activations(Wrapped(4004), example_inputs=inputs)  # saves less than half
    assert 'loss="chunked" would not keep the 16,0' in caplog.text
    other = make_model("llama", vocab_size=2004)
    other.loss_function = lambda logits, labels, **_: logits.float().square().mean()
    report = laconic.compress_activations(other, example_inputs=inputs)
    assert (report.loss_owner, report.loss_nbytes_per_token) == (None, 0.0)
    assert "chunked" not in str(report)


def test_logits_hold_no_tokens_only_where_the_loss_is_chunked() -> None:
    model = make_model("llama")
    twin, ids = chunked(model, bits=16), make_ids()
    assert twin(ids, labels=ids).logits.shape == (2, 0, VOCABULARY)
    whole = model(ids).logits
    assert torch.equal(twin(ids).logits, whole)  # no labels
    assert twin(ids, labels=ids, logits_to_keep=ids.shape[1]).logits.shape == whole.shape
    with torch.no_grad():
        assert torch.equal(twin(ids, labels=ids).logits, whole)
    twin.loss_function = lambda logits, labels, **_: logits.sum()
    assert torch.equal(twin(ids, labels=ids).loss, whole.sum())


def test_an_error_inside_leaves_nothing_behind() -> None:
    model = make_model("llama")
    twin, ids = chunked(model, bits=16), make_ids()
    with pytest.raises(DataError, match=r"a label is 97, but it must be in \[0, 97\)"):
        twin(ids, labels=torch.full_like(ids, VOCABULARY))
    with pytest.raises(DataError, match=r"labels have shape \(2, 10\), but the hidden states \(2, 48, 64\) of Linear"):
        twin(ids, labels=ids[:, :10])
    assert torch.equal(twin(ids).logits, model(ids).logits)
    assert "_loss_function" not in vars(twin)


def test_double_precision_keeps_the_exact_loss() -> None:
    model = make_model("llama").double()
    twin, ids = chunked(model), make_ids()
    output = twin(ids, labels=ids)
    assert output.logits.shape[1] == ids.shape[1]
    assert torch.equal(output.loss, model(ids, labels=ids).loss)


def test_packed_layers_and_chunked_loss_work_together_and_come_out_again() -> None:
    model = make_model("llama")
    twin, ids = chunked(model, bits=4), make_ids()
    assert torch.allclose(loss_of(twin, ids), loss_of(model, ids), rtol=1e-6)
    plain = copy.deepcopy(model)
    laconic.compress_activations(plain, bits=4)
    loss_of(twin, ids).backward()
    loss_of(plain, ids).backward()
    wanted, found = gradients_of(plain), gradients_of(twin)
    for name, grad in wanted.items():
        # The head's own gradient is exact now, and was that of int8; all others are the same.
        assert relative_error(found[name], grad) < (0.02 if name == "lm_head.weight" else 1e-4), name
    copied = copy.deepcopy(twin)
    assert torch.equal(loss_of(copied, ids), loss_of(twin, ids))
    buffer = io.BytesIO()
    torch.save(twin, buffer)
    buffer.seek(0)
    assert torch.equal(loss_of(torch.load(buffer, weights_only=False), ids), loss_of(twin, ids))
    laconic.decompress_activations(twin)
    assert not any("forward" in vars(module) for module in twin.modules())
    assert torch.equal(loss_of(twin, ids), loss_of(model, ids))


# Dynamo asks the hidden states that enter a layer for their gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("whole", "bits"), [*(pytest.param(True, bits, marks=pytest.mark.slow) for bits in (4, 16)), (False, 16)]
)
@pytest.mark.ci
def test_compiled_models_compute_their_loss_eagerly_and_alike(whole: bool, bits: int) -> None:
    torch._dynamo.reset()
    model, ids = chunked(make_model("llama"), bits=bits), make_ids()
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, backend="aot_eager") if whole else twin
    if not whole:
        for layer in twin.model.layers:
            layer.compile(backend="aot_eager")
    expected, got = loss_of(model, ids), loss_of(compiled, ids)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    expected.backward()
    got.backward()
    wanted, found = gradients_of(model), gradients_of(twin)
    assert found.keys() == wanted.keys()
    # A graph of the whole model packs what separate layers rebuild from each other.
    bound = 1e-5 if bits == 16 else 0.15
    assert all(relative_error(found[name], wanted[name]) < bound for name in wanted)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft asks for it
def test_adapters_are_looked_through() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], r=4, task_type="CAUSAL_LM")
    torch.manual_seed(0)
    model = peft.get_peft_model(make_model("llama"), config)
    twin, ids = chunked(model, bits=16), make_ids()
    expected, got = loss_of(model, ids), loss_of(twin, ids)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    expected.backward()
    got.backward()
    wanted, found = gradients_of(model), gradients_of(twin)
    assert found.keys() == wanted.keys()
    assert all(relative_error(found[name], wanted[name]) < 1e-4 for name in wanted if wanted[name].norm() > 0)


def test_what_cannot_be_chunked_is_refused_with_the_reason() -> None:
    with pytest.raises(ModelError, match=r"Sequential holds no Hugging Face language model; call laconic\.linear"):
        laconic.compress_activations(nn.Sequential(nn.Linear(8, 8)), loss="chunked")
    with pytest.raises(ModelError, match="loss='chunked' needs mode='sites'"):
        laconic.compress_activations(make_model("llama"), mode="hooks", loss="chunked")
    with pytest.raises(ModelError, match="loss is 'none', but it must be one of exact, chunked"):
        laconic.compress_activations(make_model("llama"), loss="none")  # type: ignore[arg-type]
    model = make_model("llama")
    model.loss_function = lambda logits, labels, **_: logits.float().square().mean()
    with pytest.raises(ModelError, match="LlamaForCausalLM computes another loss than the cross entropy of each"):
        laconic.compress_activations(model, loss="chunked")
    model = make_model("llama")
    model.lm_head = nn.Sequential(nn.Linear(64, VOCABULARY))
    with pytest.raises(ModelError, match="output projection of LlamaForCausalLM is Sequential, and it must be a plain"):
        laconic.compress_activations(model, loss="chunked")
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_classifier_holds_no_language_model() -> None:
    from transformers import ViTConfig, ViTForImageClassification

    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = ViTForImageClassification(ViTConfig(image_size=32, patch_size=16, **shape))
    with pytest.raises(ModelError, match="ViTForImageClassification holds no Hugging Face language model"):
        laconic.compress_activations(model, loss="chunked")


@pytest.mark.parametrize("loss", ["exact", "chunked"])
@pytest.mark.parametrize("first", [True, False])
def test_threads_that_run_one_model_get_their_own_losses(first: bool, loss: Literal["exact", "chunked"]) -> None:
    model = make_model("llama").bfloat16()  # in which the exact loss is computed by laconic, too
    laconic.compress_activations(model, loss=loss)
    batches = [make_ids(), make_ids().flip(0).flip(1)]
    expected = [loss_of(model, ids).item() for ids in batches]
    inside, go_on = [threading.Event(), threading.Event()], [threading.Event(), threading.Event()]
    found: dict[int, float] = {}
    numbers: dict[int, int] = {}

    def wait(*_: Any) -> None:
        number = numbers.get(threading.get_ident())
        if number is not None:
            inside[number].set()
            assert go_on[number].wait(patient(60))

    def run(number: int) -> None:
        numbers[threading.get_ident()] = number
        found[number] = loss_of(model, batches[number]).item()

    model.get_submodule("model.layers.0").register_forward_hook(wait)
    threads = [threading.Thread(target=run, args=(number,)) for number in (0, 1)]
    for number in (0, 1):  # both are in the middle of the model
        threads[number].start()
        assert inside[number].wait(patient(60))
    with torch.no_grad():
        evaluated = model(input_ids=batches[0], labels=batches[0])
    assert evaluated.logits.shape == (*batches[0].shape, VOCABULARY)
    for number in (0, 1) if first else (1, 0):
        go_on[number].set()
        threads[number].join(patient(60))
    assert [found.get(0), found.get(1)] == expected
    assert evaluated.loss.item() == pytest.approx(expected[0], rel=1e-2)
    assert "_loss_function" not in vars(model)
    assert loss_of(model, batches[0]).item() == expected[0]
