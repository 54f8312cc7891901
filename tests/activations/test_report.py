"""The report says what autograd really keeps; plans and policies decide who keeps what; bad input is refused."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import BertConfig, BertForMaskedLM

import laconic
from laconic.activations import ActivationPlan, SavedTensorTracker, Site, find_sites, saved_nbytes_per_token, uniform
from laconic.activations.whole_model.report import UNMEASURED, TrainingCall
from laconic.activations.whole_model.suspended import measure_both
from laconic.errors import FormatError, ModelError
from laconic.formats import BlockFormat
from tests.activations.models import are_equal, cache_name, gradients_of, loss_of, make_ids, make_model, relative_error


def counted(model: nn.Module, batch: int = 1, length: int = 96) -> float:
    """Bytes per token counted by a hook of this test's own."""
    own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(model, make_ids(batch, length))
    return sum(storage.nbytes() for storage in storages.values()) / (batch * length)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reported_bytes_are_what_hooks_count(family: str, dtype: torch.dtype) -> None:
    model = make_model(family).to(dtype)
    plain = counted(model)
    report = laconic.compress_activations(model, sequence_length=96)
    assert report.before_nbytes_per_token == pytest.approx(plain, rel=0.01)
    assert report.after_nbytes_per_token == pytest.approx(counted(model), rel=0.01)
    assert sum(row.after_nbytes_per_token or 0 for row in report.rows) == pytest.approx(report.after_nbytes_per_token)
    assert sum(row.before_nbytes_per_token or 0 for row in report.rows) == pytest.approx(report.before_nbytes_per_token)


def test_a_llama_block_keeps_what_the_formula_says() -> None:
    """AGoQ's Table 1 in units of one bf16 hidden vector per token, scales included, attention exact."""
    hidden, ffn, heads = 128, 512, 4
    model = make_model(
        "llama", hidden_size=hidden, intermediate_size=ffn, num_attention_heads=heads, num_key_value_heads=heads
    ).to(torch.bfloat16)
    report = laconic.compress_activations(model, attention="exact")
    unit = 2 * hidden
    rows = {row.name: row for row in report.rows}
    before = sum(r.before_nbytes_per_token or 0 for n, r in rows.items() if n.startswith("model.layers.1."))
    after = sum(r.after_nbytes_per_token or 0 for n, r in rows.items() if n.startswith("model.layers.1."))
    log_sum_exp, inverse_rms = 4 * heads, 2 * 4
    assert before == 28 * unit + log_sum_exp + inverse_rms
    packed = BlockFormat("nf4").nbytes((hidden,)) * 2 + BlockFormat("nf4").nbytes((ffn,)) * 2
    assert after == 4 * unit + log_sum_exp + packed
    assert after <= 7.75 / 28 * before
    assert after <= 8.3 * unit


def test_the_report_prints_every_site_and_the_total() -> None:
    report = laconic.compress_activations(make_model("llama"), attention="exact")
    text = str(report)
    for row in report.rows:
        assert (row.name or "(model)") in text
    assert f"{report.before_nbytes_per_token:,.0f} -> {report.after_nbytes_per_token:,.0f} bytes" in text
    assert "model.layers.0.self_attn" in report.left_exact
    data = report.to_dict()
    assert sum(data["by_kind_after"].values()) == pytest.approx(report.after_nbytes_per_token)
    assert {row["name"] for row in data["sites"]} == {row.name for row in report.rows}


def test_measuring_leaves_no_trace() -> None:
    model = make_model("gpt2")
    state = torch.get_rng_state()
    laconic.compress_activations(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


def test_the_bf16_reference_is_what_the_model_would_keep() -> None:
    model = make_model("llama")
    reference = saved_nbytes_per_token(model, sequence_length=64)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert reference == pytest.approx(counted(model.to(torch.bfloat16)), rel=0.01)


def test_a_policy_decides_by_site_and_the_plan_is_data() -> None:
    def early_layers_only(site: Site) -> BlockFormat | None:
        return BlockFormat("int8") if site.layer == 0 else None

    model = make_model("llama")
    sites = find_sites(model)
    plan = ActivationPlan.make(sites, early_layers_only)
    assert ActivationPlan.from_json(plan.to_json()) == plan
    ids = make_ids()
    by_policy = laconic.compress_activations(model, policy=early_layers_only)
    loss_of(model, ids).backward()
    expected = gradients_of(model)
    laconic.decompress_activations(model)
    by_plan = laconic.compress_activations(model, plan=ActivationPlan.from_json(plan.to_json()))
    loss_of(model, ids).backward()
    assert are_equal(gradients_of(model), expected)
    assert by_policy.rows == by_plan.rows
    assert {row.format for row in by_plan.rows if row.name.startswith("model.layers.1.")} == {"exact"}
    assert {row.bits for row in by_plan.rows if row.name == "model.layers.0.mlp"} == {8}


def test_the_head_is_kept_at_eight_bits_unless_told_otherwise() -> None:
    model = make_model("llama")
    bits = {
        row.name: row.bits
        for row in laconic.compress_activations(model, bits=4, attention="nf4").rows
        if row.format != "exact"
    }
    assert bits.pop("model.norm") == bits.pop("lm_head") == 8
    assert set(bits.values()) == {4}
    laconic.decompress_activations(model)
    report = laconic.compress_activations(model, policy=uniform(BlockFormat("nf4")))
    assert {row.bits for row in report.rows if row.format != "exact"} == {4}


def test_hooks_work_on_any_module() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.GELU(), nn.Conv2d(16, 16, 3), nn.Tanh(), nn.Flatten(), nn.Linear(2304, 4)
    )
    x = torch.randn(8, 3, 16, 16)
    model(x).sum().backward()
    expected = gradients_of(model)
    value = model(x)
    report = laconic.compress_activations(model, bits=8, mode="hooks", example_inputs={"input": x})
    assert report.before_nbytes_per_token is not None
    assert torch.equal(model(x), value)
    model(x).sum().backward()
    got = gradients_of(model)
    assert any(not torch.equal(got[name], expected[name]) for name in got)
    for name, grad in got.items():
        assert relative_error(grad, expected[name]) < 0.02, name
    laconic.decompress_activations(model)
    model(x).sum().backward()
    assert are_equal(gradients_of(model), expected)


def test_hooks_report_what_they_keep() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    report = laconic.compress_activations(model, mode="hooks", example_inputs={"input": torch.randn(32, 64)})
    assert report.before_nbytes_per_token == 4 * (64 + 128 + 128)
    assert report.after_nbytes_per_token == BlockFormat("nf4").nbytes((64 + 128,))  # gelu's output is computed again


def test_hooks_leave_attention_exact() -> None:
    model = make_model("llama")
    before = laconic.compress_activations(model, bits=16).to_dict()["by_kind_before"]["attention"]
    after = laconic.compress_activations(model, mode="hooks").to_dict()["by_kind_after"]["attention"]
    rotary_tables = 2 * 4 * 16  # sine and cosine of one head are plain tensors and packed like all others
    assert before - rotary_tables <= after <= before


def test_hooks_pack_once_what_is_saved_twice_and_never_parameters() -> None:
    model = make_model("llama")
    ids = make_ids()
    plain = saved_nbytes_per_token(model, dtype=None)
    loss_of(model, ids).backward()
    expected = gradients_of(model)
    laconic.compress_activations(model, bits=4, mode="hooks")
    packed: list[int] = []
    original = BlockFormat.quantize

    def count(self: BlockFormat, x: torch.Tensor, *args: object, **kwargs: object) -> object:
        packed.append(x.numel() * x.element_size())
        return original(self, x, *args, **kwargs)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockFormat, "quantize", count)
        loss = loss_of(model, ids)
    loss.backward()
    assert sum(packed) < plain * ids.numel()
    got = gradients_of(model)
    everything = torch.cat([got[name].flatten() for name in got]), torch.cat([expected[name].flatten() for name in got])
    assert relative_error(*everything) < 0.2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"bits": 7}, FormatError, r"bits is 7, but it must be 2, .* 8 or 16"),
        ({"block_size": 48}, FormatError, r"block_size is 48, but it must be"),
        ({"bits": 8, "format": "nf4"}, FormatError, r"nf4"),
        ({"format": "fp4"}, FormatError, r"fp4"),
        ({"example_inputs": torch.zeros(2, 3)}, ModelError, r"example_inputs is a Tensor, not a dict of keyword"),
        (
            {"format": "nf5"},
            FormatError,
            r"format is 'nf5', but with bits = 4 it must be one of nf4, e2m1, int4, or left",
        ),
        ({"bits": 16, "format": "nf4"}, FormatError, r"format is 'nf4', but with bits = 16 it must be left out"),
        ({"bits": 3, "format": "nf4"}, FormatError, r"bits is 3"),
        ({"mode": "magic"}, ModelError, r"mode is 'magic', but it must be one of sites, hooks, combined"),
        ({"mode": "hooks", "policy": uniform(None)}, ModelError, r"need mode='sites'"),
        (
            {"plan": ActivationPlan({"model.layers.9.mlp": None})},
            ModelError,
            r"'model.layers.9.mlp', but the model has no",
        ),
    ],
)
def test_bad_input_is_refused_and_the_model_stays_as_it_was(
    options: dict[str, object], error: type[Exception], message: str
) -> None:
    model = make_model("llama")
    with pytest.raises(error, match=message):
        laconic.compress_activations(model, **options)  # type: ignore[arg-type]
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_model_without_sites_is_refused() -> None:
    with pytest.raises(ModelError, match=r"no site recognized in Sequential.*mode='hooks'"):
        laconic.compress_activations(nn.Sequential(nn.Embedding(4, 4), nn.Flatten()))


def test_compressing_twice_and_decompressing_nothing_are_refused() -> None:
    model = make_model("llama")
    with pytest.raises(ModelError, match="nothing to take out"):
        laconic.decompress_activations(model)
    laconic.compress_activations(model)
    with pytest.raises(ModelError, match=r"compressed activations already; call laconic.decompress_activations"):
        laconic.compress_activations(model)


@pytest.mark.parametrize("text", ["", "[]", '{"version": 3}', '{"version": 2, "sites": {"a": {"code": "nf4"}}}'])
def test_a_damaged_plan_is_refused(text: str) -> None:
    with pytest.raises(FormatError, match="activation plan"):
        ActivationPlan.from_json(text)


class Seen(torch.autograd.Function):
    """The identity, with a node that can be referred to weakly."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


@pytest.mark.parametrize("mode", ["sites", "hooks"])
def test_measuring_holds_on_to_nothing(mode: str) -> None:
    model = make_model("llama")
    laconic.compress_activations(model, mode=mode)  # type: ignore[arg-type]
    refs: list[weakref.ref[Any]] = []

    def watch(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        seen: torch.Tensor = Seen.apply(out)
        refs.append(weakref.ref(seen.grad_fn))
        return seen

    model.model.layers[0].mlp.register_forward_hook(watch)
    with SavedTensorTracker(model):
        loss_of(model, make_ids())
    gc.collect()
    assert len(refs) == 1
    assert refs[0]() is None


def test_the_tracker_counts_each_storage_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    x = torch.randn(4, 8)
    with SavedTensorTracker(model) as tracker:
        out = model(x) + model(x)
    assert tracker.by_module == {"0": 4 * 8 * 4, "1": 2 * 4 * 8 * 4}
    assert tracker.nbytes == 3 * 4 * 8 * 4
    del out


class Block(nn.Module):
    """A residual block; the residual stream is saved by nobody but its norm."""

    def __init__(self, does_backward: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
        self.does_backward = does_backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(self.up(self.norm(x)).tanh())
        if self.does_backward:  # as a force is made of an energy
            (slope,) = torch.autograd.grad(y.square().sum(), self.up.weight, retain_graph=True)
            return y + slope.mean()
        return y


@pytest.mark.parametrize("mode", ["sites", "hooks", "combined"])
@pytest.mark.parametrize("backward_at", [None, 0, 5])
def test_measuring_holds_no_saved_tensors(mode: Any, backward_at: int | None) -> None:
    model = nn.Sequential(*(Block(number == backward_at) for number in range(6)))
    x, alive = torch.randn(32, 64), []
    refs: list[StorageWeakRef] = []

    def watch(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        alive.append(sum(not ref.expired() for ref in refs))
        refs.append(StorageWeakRef(out.untyped_storage()))

    laconic.compress_activations(model, bits=8, mode=mode, example_inputs=UNMEASURED)
    handles = [block.norm.register_forward_hook(watch) for block in model]
    before, after, unmeasured = measure_both(model, TrainingCall(model, (x,), {}, is_hosts=True))
    for handle in handles:
        handle.remove()
    assert unmeasured is None
    assert before is not None
    assert after is not None
    if backward_at is None:
        assert alive == [0] * 12
    with SavedTensorTracker(model) as tracker:
        model(x)
    assert after.nbytes == tracker.nbytes
    laconic.decompress_activations(model)
    with SavedTensorTracker(model) as tracker:
        model(x)
    assert before.by_module == tracker.by_module


class Renewing(nn.Module):
    """Replaces its buffer in every forward, so that its storage's address is free for activations."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.factor = torch.full((64, 64), 1.5)
        return F.softplus(x * self.factor.mean())


@pytest.mark.parametrize("mode", [None, "hooks"])
def test_addresses_of_replaced_buffers_are_not_taken_for_buffers(mode: str | None) -> None:
    model: nn.Module = nn.Sequential(*(Renewing() for _ in range(16)))
    if mode is not None:
        laconic.compress_activations(model, mode=mode, example_inputs={"input": torch.randn(64, 64)})  # type: ignore[arg-type]
    for _ in range(5):
        x = torch.randn(64, 64, requires_grad=True)
        with SavedTensorTracker(model) as tracker:
            out = model(x)
        # Every softplus keeps its input, every product its scalar factor.
        exact = 16 * (64 * 64 * 4 + 4)
        assert tracker.nbytes == exact if mode is None else tracker.nbytes < exact / 6
        del out


def test_a_cache_that_a_training_forward_fills_is_named_with_its_remedy() -> None:
    """Beside codes, keys and values of all layers would stay in bf16 until the forward ends."""
    model = make_model("llama")
    line = "set model.config.use_cache = False"
    for fills in (True, False):
        model.config.use_cache = fills
        assert (line in str(laconic.compress_activations(model))) == fills
        assert (getattr(model(input_ids=make_ids()), cache_name()) is not None) == fills
        laconic.decompress_activations(model)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    assert line not in str(laconic.compress_activations(BertForMaskedLM(BertConfig(vocab_size=50, **sizes))))
