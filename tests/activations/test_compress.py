"""A converted model computes the same values and, up to the error of its formats, the same gradients."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from pathlib import Path
from types import MethodType

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import laconic
from benchmarks.kit.allocated import peak_nbytes
from laconic import BlockFormat
from laconic.activations import SavedTensorTracker
from laconic.activations.backward.functions import _product
from laconic.activations.backward.saving import LARGE_NUMEL
from laconic.activations.forwards.base import SiteForward
from tests.activations.models import (
    FAMILIES,
    are_equal,
    both_gradients,
    compressed,
    gradients_of,
    loss_of,
    make_ids,
    make_model,
    relative_error,
)
from tests.grid import grid


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_is_bit_identical(family: str, dtype: torch.dtype) -> None:
    model = make_model(family).to(dtype)
    twin, ids = compressed(model, attention="exact"), make_ids()
    assert torch.equal(loss_of(model, ids), loss_of(twin, ids))  # in training mode: GPT-2 draws the same dropout
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=ids).logits, twin.eval()(input_ids=ids).logits)


@pytest.mark.usefixtures("nothing_is_packed")
def test_backward_is_right_when_nothing_is_packed(family: str) -> None:
    model = make_model(family)
    twin, ids = compressed(model, attention="exact"), make_ids()
    expected, got = both_gradients(model, twin, ids)
    for name, grad in got.items():
        # Sums of a few hundred fp32 terms in another order.
        assert relative_error(grad, expected[name]) < 2e-5, name


def test_bits_16_is_the_identity(family: str) -> None:
    model = make_model(family)
    twin, ids = copy.deepcopy(model), make_ids()
    report = laconic.compress_activations(twin, bits=16)
    expected, got = both_gradients(model, twin, ids)
    assert are_equal(got, expected)
    assert report.before_nbytes_per_token == report.after_nbytes_per_token
    assert all(row.format == "exact" for row in report.rows)


# Relative error of one gradient on random data is that of one packed factor (nf4 .092, e2m1 b64 .10, int4 b64 .11, int8
# .006, int6 .024, int5 .048 on Gaussian numbers), a little more after two layers. Bounds are 1.6 times that.
FORMATS = [
    pytest.param({"bits": 4}, 0.16),
    pytest.param({"bits": 4, "format": "e2m1"}, 0.17),
    pytest.param({"bits": 4, "format": "int4"}, 0.19),
    pytest.param({"bits": 5}, 0.08),
    pytest.param({"bits": 6}, 0.04),
    pytest.param({"bits": 8}, 0.012),
    pytest.param({"bits": 8, "block_size": 16, "scale_dtype": torch.float32}, 0.01),
]


@pytest.mark.parametrize(("family", "options", "bound"), grid(sorted(FAMILIES), FORMATS, strength=1))
def test_gradients_are_as_close_as_the_format_allows(family: str, options: dict[str, object], bound: float) -> None:
    model = make_model(family)
    twin, ids = compressed(model, **options), make_ids(batch=4)
    expected, got = both_gradients(model, twin, ids)
    assert got.keys() == expected.keys()
    everything = torch.cat([got[name].flatten() for name in got]), torch.cat([expected[name].flatten() for name in got])
    assert 0 < relative_error(*everything) < bound


def test_the_input_gradient_of_a_norm_hardly_notices_four_bits() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    torch.manual_seed(0)
    model = nn.Sequential(LlamaRMSNorm(256))
    x, grad = torch.randn(1024, 256), torch.randn(1024, 256)
    errors = []
    for twin in (model, compressed(model)):
        twin_x = x.clone().requires_grad_()
        twin(twin_x).backward(grad)
        errors.append(twin_x.grad)
    # Only the rms and a rank-one term see x, so the error is far below that of the packed numbers (.09).
    assert relative_error(errors[1], errors[0]) <= 0.012


def test_state_dict_and_names_are_untouched(family: str) -> None:
    model = make_model(family)
    twin = compressed(model)
    state, twin_state = model.state_dict(), twin.state_dict()
    assert list(state) == list(twin_state)
    assert [name for name, _ in model.named_modules()] == [name for name, _ in twin.named_modules()]
    laconic.decompress_activations(twin)
    assert not any("forward" in vars(module) for module in twin.modules())


def test_decompressing_gives_back_a_forward_that_was_there_before() -> None:
    model = make_model("llama")
    block = model.model.layers[0].mlp
    mine = block.forward = MethodType(lambda self, x: type(self).forward(self, x), block)
    laconic.compress_activations(model)
    assert isinstance(block.forward.__self__, SiteForward)
    x = torch.randn(2, 64)
    assert torch.equal(block(x), mine(x))
    laconic.decompress_activations(model)
    assert block.forward == mine


def test_a_linear_with_a_forward_of_somebody_else_stays_exact() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    mine = model[0].forward = lambda x: x * 3
    laconic.compress_activations(model)
    assert model[0].forward is mine
    x = torch.randn(2, 64, requires_grad=True)
    model[0](x).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3))


def test_save_pretrained_round_trips(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = make_model("llama", tie_word_embeddings=True)
    twin, ids = compressed(model, attention="exact"), make_ids()
    loss_of(twin, ids).backward()
    twin.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loss_of(again, ids), loss_of(model, ids))


def test_a_converted_model_can_be_copied_and_pickled() -> None:
    model = compressed(make_model("llama"))
    ids = make_ids()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.lm_head.forward.__self__.module is twin.lm_head
        loss_of(twin, ids).backward()
        loss_of(model, ids).backward()
        expected = gradients_of(model)
        assert are_equal(gradients_of(twin), expected)


def test_tied_weights_get_both_gradients() -> None:
    model = make_model("llama", tie_word_embeddings=True)
    twin, ids = compressed(model, bits=8), make_ids()
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    loss_of(model, ids).backward()
    loss_of(twin, ids).backward()
    name = "model.embed_tokens.weight"
    assert relative_error(gradients_of(twin)[name], gradients_of(model)[name]) < 0.012


def test_nothing_is_kept_without_gradients() -> None:
    model = compressed(make_model("llama"))
    with SavedTensorTracker(model) as tracker, torch.no_grad():
        model(input_ids=make_ids())
    assert tracker.nbytes == 0
    tokens = model.eval().generate(make_ids(1, 4), max_new_tokens=4, do_sample=False)
    expected = laconic.decompress_activations(model).generate(make_ids(1, 4), max_new_tokens=4, do_sample=False)
    assert torch.equal(tokens, expected)


def test_frozen_linears_keep_no_input() -> None:
    model = make_model("llama").requires_grad_(False)
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
    twin, ids = compressed(model, bits=8), make_ids()
    with SavedTensorTracker(twin) as tracker:
        loss = loss_of(twin, ids)
    loss.backward()
    loss_of(model, ids).backward()
    # The first norm's input needs no gradient, so the packed input of the projection is all that layer 0 keeps here.
    assert tracker.by_module["model.layers.0.self_attn.k_proj"] == 0
    assert tracker.by_module["model.layers.1.self_attn.q_proj"] == 0
    got, expected = gradients_of(twin), gradients_of(model)
    assert got.keys() == expected.keys() == {"model.layers.0.self_attn.q_proj.weight"}
    for name, grad in got.items():
        assert relative_error(grad, expected[name]) < 0.012


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks transformers the old way
def test_lora_adapters_share_what_is_kept() -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(make_model("llama"), config)
    twin, ids = copy.deepcopy(model), make_ids()
    report = laconic.compress_activations(twin, bits=8)
    rows = {row.name.removeprefix("base_model.model.model."): row for row in report.rows}
    assert rows["layers.0.mlp"].kind == "mlp"
    assert rows["layers.0.mlp.down_proj.lora_A.default"].origin == "mlp"
    assert rows["layers.1.self_attn.q_proj.lora_A.default"].origin == "norm"
    assert torch.equal(loss_of(model, ids), loss_of(twin, ids))
    expected, got = both_gradients(model, twin, ids)
    assert got.keys() == expected.keys()
    assert all("lora" in name for name in got)
    for name, grad in got.items():
        assert relative_error(grad, expected[name]) < 0.03, name


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_a_lora_model_keeps_nothing_for_frozen_weights() -> None:
    from peft import LoraConfig, get_peft_model

    rank = 8
    config = LoraConfig(r=rank, target_modules="all-linear", lora_dropout=0.0, init_lora_weights=False)
    model, ids = get_peft_model(make_model("llama"), config), make_ids()
    laconic.compress_activations(model)
    with SavedTensorTracker(model) as tracker:
        loss_of(model, ids).backward()
    kept = Counter({name.removeprefix("base_model.model.model.layers."): n for name, n in tracker.by_module.items()})
    packed = BlockFormat("nf4")
    layers = [name for name, _ in model.named_modules() if name.endswith("base_layer")]
    assert len(layers) == 14
    assert all(tracker.by_module[name] == 0 for name in layers)
    for layer in ("0", "1"):
        # The first norm's input depends on no trained weight, so there it is the first adapter that packs its own.
        reader = "0.self_attn.q_proj.lora_A.default" if layer == "0" else "1.input_layernorm"
        assert kept[reader] == packed.nbytes((ids.numel(), 64))
        assert kept[f"{layer}.mlp"] == kept[f"{layer}.mlp.act_fn"] == packed.nbytes((ids.numel(), 160))  # up, gate
        for adapter in ("self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
            assert kept[f"{layer}.{adapter}.lora_A.default"] == 0
            # Rows of so few features share blocks.
            assert kept[f"{layer}.{adapter}.lora_B.default"] == packed.nbytes((ids.numel() * rank,))
    assert tracker.by_module["base_model.model.model.embed_tokens"] == 0


def test_autocast_behaves() -> None:
    model = make_model("llama")
    twin, ids = compressed(model, bits=8), make_ids()
    with torch.autocast("cpu", torch.bfloat16):
        loss, twin_loss = loss_of(model, ids), loss_of(twin, ids)
    assert torch.equal(loss, twin_loss)
    loss.backward()
    twin_loss.backward()
    expected = gradients_of(model)
    for name, grad in gradients_of(twin).items():
        assert grad.dtype == torch.float32
        assert relative_error(grad, expected[name]) < 0.03, name


def test_a_retained_graph_gives_the_same_gradients_again() -> None:
    model, ids = compressed(make_model("gemma2")), make_ids()
    loss = loss_of(model, ids)
    loss.backward(retain_graph=True)
    first = gradients_of(model)
    loss.backward(retain_graph=True)
    second = gradients_of(model)
    loss.backward()
    third = gradients_of(model)
    for name, grad in first.items():
        assert torch.equal(grad, second[name])
        assert torch.equal(grad, third[name])


def test_second_derivatives_of_a_whole_model_are_those_of_the_exact_one() -> None:
    found = []
    for model in (make_model("llama"), compressed(make_model("llama"))):
        parameters = list(model.parameters())
        with sdpa_kernel(SDPBackend.MATH):  # the exact model's other kernels have no second derivatives
            grads = torch.autograd.grad(loss_of(model, make_ids()), parameters, create_graph=True)
            penalty = torch.stack([grad.square().sum() for grad in grads]).sum()
            found.append(torch.cat([grad.flatten() for grad in torch.autograd.grad(penalty, parameters)]))
    assert 0 < relative_error(found[1], found[0]) < 0.3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_gradient_of_a_large_weight_is_made_in_tiles_of_the_same_bits(dtype: torch.dtype, transposed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, rows = (torch.randn(32, width, generator=generator).to(dtype) for width in (4112, 4100))
    a, b = (x, rows) if transposed else (rows, x)
    made = 4100 * 4112 * dtype.itemsize
    tiles = 0 if dtype == torch.float32 else 2 * 4 * LARGE_NUMEL
    with torch.no_grad():  # as in backward, and where gradients are wanted no tiles are made
        assert torch.equal(_product(a, b), a.t() @ b)
        # Where torch holds an fp32 copy of it all, as on processors without 16-bit products, that is 67 MB more.
        assert peak_nbytes(lambda: _product(a, b)) < made + tiles + (4 << 20)


def test_double_precision_stays_exact() -> None:
    model = make_model("llama").double()
    twin, ids = compressed(model, attention="exact"), make_ids()
    expected, got = both_gradients(model, twin, ids)
    assert are_equal(got, expected)


def test_an_input_can_be_copied_and_saved_after_it_was_used(tmp_path: Path) -> None:
    model = compressed(nn.Sequential(nn.Linear(64, 64)), bits=8)
    x = torch.randn(8, 64)
    model(x).sum().backward()
    expected = gradients_of(model)
    torch.save(x, tmp_path / "x.pt")
    for again in (copy.deepcopy(x), pickle.loads(pickle.dumps(x)), torch.load(tmp_path / "x.pt", weights_only=True)):
        assert torch.equal(again, x)
        model(again).sum().backward()
        assert torch.equal(gradients_of(model)["0.weight"], expected["0.weight"])


def test_an_input_changed_in_place_is_packed_again() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    laconic.compress_activations(model, bits=8)
    x = torch.randn(8, 64)
    first = model[0](x).sum()
    x.mul_(3)
    second = model[1](x).sum()
    (first + second).backward()
    assert relative_error(model[1].weight.grad, (x.sum(0).expand(64, 64))) < 0.01
    assert relative_error(model[0].weight.grad, (x / 3).sum(0).expand(64, 64)) < 0.01


def test_nothing_lives_on_after_backward() -> None:
    import gc
    import weakref

    model, ids = compressed(make_model("llama")), make_ids()
    seen: list[weakref.ref[torch.UntypedStorage]] = []

    def watch(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.uint8:
            seen.append(weakref.ref(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(watch, lambda tensor: tensor):
        loss = loss_of(model, ids)
    assert len(seen) > 10
    loss.backward()
    del loss
    gc.collect()
    assert not any(ref() is not None for ref in seen)
