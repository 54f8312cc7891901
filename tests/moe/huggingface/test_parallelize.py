"""Hugging Face models on MoELayers: the same outputs, gradients, router logits, losses, names and files."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laconic.activations import compress_activations
from laconic.errors import ConfigError, ModelError, RoutingError
from laconic.moe.experts.grouped_mm import expert_by_expert
from laconic.moe.huggingface import ExpertsLayer, FusedExperts, experts, find_blocks, parallelize
from laconic.moe.huggingface.experts import check
from laconic.moe.layer import moe_layers
from tests.activations.models import MIXTURES, both_gradients, make_ids, make_model, relative_error
from tests.distributed.test_moe_layouts import own_layout

FAMILIES = ["mixtral", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "qwen2_moe", "gpt_oss"]
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in FAMILIES),
    ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": [0]}),
    ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}),
    ("deepseek_v3", {"norm_topk_prob": False, "routed_scaling_factor": 1.5, "n_group": 1}),
]


def pair(family: str, dtype: torch.dtype = torch.float64, **changes: Any) -> tuple[nn.Module, nn.Module]:
    """A model and its twin on our layers."""
    model = make_model(family, experts_implementation="eager", **changes).to(dtype)  # grouped ones know no float64
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.linspace(-0.3, 0.3, len(buffer)))
    twin = copy.deepcopy(model)
    parallelize(twin)
    return model, twin


def close(got: Tensor, expected: Tensor) -> bool:
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 3e-2}[got.dtype]
    return got.shape == expected.shape and bool(((got - expected).abs() <= tolerance * (1 + expected.abs())).all())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT reads it
def test_adapted_models_can_be_pickled() -> None:
    peft = pytest.importorskip("peft")
    targets = {"target_modules": ["o_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    model, ids, file = make_model("qwen3_moe"), make_ids(2, 8), io.BytesIO()
    parallelize(model)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **targets))
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert torch.equal(again(input_ids=ids, use_cache=False).logits, model(input_ids=ids, use_cache=False).logits)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT reads it
def test_adapters_of_experts_without_flags_are_those_of_the_original() -> None:
    peft = pytest.importorskip("peft")
    logits = []
    for parallelizes in (False, True):
        model = own_layout("llama4_text")
        if parallelizes:
            parallelize(model)
        torch.manual_seed(1)
        targets = {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **targets))
        logits.append(adapted(input_ids=make_ids(2, 8)).logits)
    assert relative_error(logits[1], logits[0]) < 1e-5  # its router is in fp32


@pytest.mark.parametrize(("family", "changes"), VARIANTS, ids=lambda v: v if isinstance(v, str) else "-".join(v))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
def test_outputs_gradients_and_router_logits_are_those_of_the_original(
    family: str, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    model, twin = pair(family, dtype, **changes)
    ids = make_ids(2, 12)
    records = {"output_router_logits": True} if "router_logits" in str(type(model).forward.__doc__) else {}
    expected, got = (each(input_ids=ids, labels=ids, use_cache=False, **records) for each in (model, twin))
    assert close(got.logits, expected.logits)
    assert close(got.loss, expected.loss)
    if records:
        assert len(got.router_logits) == len(expected.router_logits) > 0
        assert all(close(a, b) for a, b in zip(got.router_logits, expected.router_logits, strict=True))
        auxiliary = getattr(expected, "aux_loss", None)  # DeepSeek's have none
        assert close(got.aux_loss, auxiliary) if auxiliary is not None else got.get("aux_loss") is None
    expected.loss.backward()
    got.loss.backward()
    for (name, a), (other, b) in zip(twin.named_parameters(), model.named_parameters(), strict=True):
        assert name == other
        assert a.grad is not None, name
        assert b.grad is not None, name
        assert close(a.grad, b.grad), name


@pytest.mark.parametrize("family", FAMILIES)
def test_names_values_and_saved_files_stay(family: str, tmp_path: Path) -> None:
    model, twin = pair(family, torch.float32)
    before, after = model.state_dict(), twin.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    for each, folder in ((model, "before"), (twin, "after")):
        each.save_pretrained(tmp_path / folder)
    names = sorted(path.name for path in (tmp_path / "before").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "after").iterdir())
    for name in names:
        assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "after" / name).read_bytes(), name
    again = type(model).from_pretrained(tmp_path / "after")
    parallelize(again)
    ids = make_ids(1, 5)
    assert close(again.eval()(input_ids=ids).logits, model.eval()(input_ids=ids).logits)


def test_every_block_becomes_a_layer_and_dense_ones_stay() -> None:
    model = make_model("qwen3_moe", mlp_only_layers=[0])
    assert list(find_blocks(model)) == ["model.layers.1.mlp.experts"]
    done = parallelize(model)
    assert list(done.layers) == ["model.layers.1.mlp.experts"]
    assert moe_layers(model) == done.layers
    assert "4 experts (all here)" in str(done)
    assert len(done.dense()) + len(done.experts()) == len(list(model.parameters()))
    assert [len(group["params"]) for group in done.parameter_groups()] == [len(done.dense()), 2]


def test_groups_have_the_weight_decay_of_each_parameter() -> None:
    done = parallelize(make_model("gpt_oss"))
    seen: list[str] = []

    def decay(name: str, parameter: nn.Parameter) -> float:
        seen.append(name)
        return 0.0 if name.endswith("bias") or parameter.dim() < 2 else 0.1

    groups = done.parameter_groups(decay)
    assert sorted(seen) == sorted(name for name, _ in done.model.named_parameters())
    assert sorted(group["weight_decay"] for group in groups) == [0.0, 0.0, 0.1, 0.1]
    found = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    for name, parameter in done.model.named_parameters():
        assert found[id(parameter)] == (0.0 if name.endswith("bias") or parameter.dim() < 2 else 0.1), name
    torch.optim.AdamW(groups, lr=1e-3)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT asks transformers by an older name
def test_experts_in_flat_stacks_are_refused_under_adapters_and_where_they_compute_something_else() -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(own_layout("dbrx"), peft.LoraConfig(target_parameters=["experts.mlp.w1"]))
    with pytest.raises(ModelError, match=r"experts\.mlp\.base_layer \(DbrxExpertGLU\).*; call parallelize before PEFT"):
        parallelize(adapted)
    model: Any = own_layout("dbrx")
    for block in model.transformer.blocks:
        block.ffn.experts.forward = lambda x, indices, weights: 2 * x
    with pytest.raises(ModelError, match=r"ffn\.experts has a forward that was put there"):
        parallelize(model)
    model = own_layout("longcat_flash")
    for layer in model.model.layers:
        layer.mlp.experts.identity_expert.forward = torch.neg
    with pytest.raises(
        ModelError, match=r"mlp\.experts is a LongcatFlashExperts, whose output is not that of products"
    ):
        parallelize(model)


def test_layers_report_their_load() -> None:
    _, twin = pair("mixtral")
    twin(input_ids=make_ids(2, 12))
    layers = moe_layers(twin)
    assert len(layers) == 2
    for layer in layers.values():
        assert isinstance(layer, ExpertsLayer)
        assert layer.load is not None
        assert int(layer.load.sum()) == 2 * 24


def test_jitter_draws_what_the_original_draws() -> None:
    model, twin = pair("mixtral", router_jitter_noise=0.1)
    ids = make_ids(1, 12)
    out = []
    for each in (model.train(), twin.train()):
        torch.manual_seed(3)
        out.append(each(input_ids=ids).logits)
    assert close(out[1], out[0])
    assert not close(out[1], twin.eval()(input_ids=ids).logits)


def test_autocast_computes_like_the_original() -> None:
    model, twin = pair("deepseek_v3", torch.float32)
    ids = make_ids(1, 12)
    with torch.autocast("cpu", torch.bfloat16):
        expected, got = (each(input_ids=ids).logits for each in (model, twin))
    assert got.dtype == expected.dtype
    assert ((got - expected).norm() / expected.norm()).item() < 2e-2


def test_training_gives_the_same_weights_and_state_dicts_cross() -> None:
    model, twin = pair("olmoe")
    for each in (model, twin):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-3)
        for step in range(3):
            ids = make_ids(2, 8, seed=step)
            each(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(close(a, b) for a, b in zip(twin.parameters(), model.parameters(), strict=True))
    model.load_state_dict(twin.state_dict())
    twin.load_state_dict(model.state_dict())


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_with_many_rows_run_one_by_one_where_nothing_is_kept(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 tokens on average; the first expert has none. Experts that lie the other way, with biases, stay together."""
    model = make_model(family, experts_implementation="eager")
    original = next(module for module in model.modules() if hasattr(module, "has_gate"))
    parameters = {name: nn.Parameter(p.double()) for name, p in original.named_parameters()}
    x = torch.randn(1024, 64, dtype=torch.float64)
    indices = torch.randint(1, 4, (1024, 1))
    ran = []
    monkeypatch.setattr(experts, "expert_by_expert", lambda *given: ran.append(1) or expert_by_expert(*given))
    with torch.no_grad():
        expected = original.double()(x, indices, torch.ones(1024, 1, dtype=torch.float64))
        order = indices.flatten().argsort(stable=True)
        rows = FusedExperts(original, parameters)(x[order], indices.flatten().bincount(minlength=4))
    assert bool(ran) == (family != "gpt_oss")
    assert close(torch.empty_like(rows).index_copy_(0, order, rows), expected)


def test_copies_and_gradient_checkpointing_work() -> None:
    model, twin = pair("deepseek_v2")
    ids = make_ids(1, 8)
    other = copy.deepcopy(twin)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    enable = getattr(other, "activation_checkpointing_enable", other.gradient_checkpointing_enable)
    enable()
    for each in (other.train(), model.train()):
        each(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for a, b in zip(other.parameters(), model.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert close(a.grad, b.grad)


def test_a_model_on_the_meta_device_is_recognized() -> None:
    with torch.device("meta"):
        model = make_model("deepseek_v3")
    done = parallelize(model)
    assert [p.device.type for p in done.experts()] == ["meta"] * 2


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_without_experts_is_refused(family: str) -> None:
    with pytest.raises(ModelError, match="has no mixture-of-experts block"):
        parallelize(make_model(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_that_take_more_experts_than_there_are_are_refused(family: str) -> None:
    match = r"layers\.\d\.mlp\.(gate|router) has top_k = 5, but a token takes at most all 4 experts; lower num_experts_"
    with pytest.raises(ModelError, match=match):
        parallelize(make_model(family, num_experts_per_tok=5))


def test_a_mesh_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"mesh is 2, but it must be a Grid, a DeviceMesh or None.*Grid\(ep=8\)"):
        parallelize(make_model("mixtral"), 2)  # type: ignore[arg-type]


def test_a_second_call_is_refused() -> None:
    _, twin = pair("mixtral")
    with pytest.raises(ModelError, match="parallelized already"):
        parallelize(twin)


def test_transposed_experts_with_biases_and_their_own_gating_are_computed() -> None:
    check(make_model("gpt_oss").model.layers[0].mlp.experts, "experts")  # raises if they are not


def test_a_block_that_does_something_else_around_its_experts_keeps_doing_it() -> None:
    model = make_model("mixtral")
    block = model.model.layers[1].mlp

    class Doubled(type(block)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor) -> Tensor:
            return 2 * super().forward(hidden_states)

    block.__class__ = Doubled
    twin = copy.deepcopy(model)
    parallelize(twin)
    ids = make_ids(1, 5)
    assert close(twin(input_ids=ids).logits, model(input_ids=ids).logits)


def test_experts_that_compute_something_else_are_refused() -> None:
    model = make_model("qwen3_moe")
    block_experts = model.model.layers[0].mlp.experts
    block_experts.act_fn = nn.ReLU()
    parallelize(copy.deepcopy(model))  # another activation is no other computation

    class Doubled(type(block_experts)):  # type: ignore[misc]
        def forward(self, *args: Tensor) -> Tensor:
            return 2 * super().forward(*args)

    block_experts.__class__ = Doubled
    with pytest.raises(ModelError, match=r"layers.0.mlp.experts"):
        parallelize(model)


def test_a_block_that_was_compressed_before_is_refused_and_compressing_after_works() -> None:
    model = make_model("qwen3_moe")
    compress_activations(model)
    with pytest.raises(ModelError, match=r"layers.0.mlp.experts has a forward that was put there.*parallelize first"):
        parallelize(model)
    model, twin = make_model("deepseek_v3"), make_model("deepseek_v3")
    parallelize(twin)
    compress_activations(twin)
    ids = make_ids(1, 48)
    expected, got = both_gradients(model, twin, ids)
    assert all(relative_error(got[name], expected[name]) < 0.2 for name in expected)


def test_logits_that_are_no_numbers_are_refused() -> None:
    _, twin = pair("mixtral")
    with torch.no_grad():
        twin.model.layers[0].mlp.gate.weight[1, 3] = float("nan")
    with pytest.raises(RoutingError, match="routing weights of 4 of 4 tokens are not finite"):
        twin(input_ids=make_ids(1, 4))


def test_all_families_of_the_tests_are_covered() -> None:
    assert set(FAMILIES) == set(MIXTURES)
