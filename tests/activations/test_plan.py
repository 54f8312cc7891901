"""Plans: what can be chosen for a site or a layer, written down, read back, refused, and followed."""

from __future__ import annotations

import copy
import gc
import json
from typing import Any

import pytest
import torch
from torch import nn

import laconic
from laconic.activations import (
    ActivationPlan,
    Choice,
    Offload,
    Recompute,
    SavedTensorTracker,
    Site,
    checkpoint,
    find_sites,
)
from laconic.activations.forwards.checkpoint import _warn_filled_cache
from laconic.activations.keep import kept, offload
from laconic.activations.keep.choice import entry_of
from laconic.errors import FormatError, ModelError
from laconic.formats import BlockFormat
from tests.activations.models import (
    are_equal,
    both_gradients,
    cache_name,
    everything,
    gradients_of,
    loss_of,
    make_ids,
    make_model,
    relative_error,
)
from tests.grid import grid

NF4, INT8 = BlockFormat("nf4"), BlockFormat("int8", 32, torch.float32)


def test_every_choice_survives_json() -> None:
    plan = ActivationPlan(
        {"a": None, "b": NF4, "c": INT8, "d": Offload(INT8), "e": Recompute()}, {"model.layers.1": INT8, "x.2": None}
    )
    assert ActivationPlan.from_json(plan.to_json()) == plan
    data = json.loads(plan.to_json())
    assert data["version"] == 2
    assert data["sites"]["d"] == {"code": "int8", "block_size": 32, "scale_dtype": "float32", "offload": True}
    assert data["sites"]["e"] == {"recompute": True}
    assert data["layers"]["x.2"] == {"input": None}


@pytest.mark.parametrize("version", [1, 3])
def test_another_version_is_refused(version: int) -> None:
    text = json.dumps({"version": version, "sites": {"a": None}, "layers": {}})
    with pytest.raises(FormatError, match=f"is {version}, but this laconic reads 2; write it again"):
        ActivationPlan.from_json(text)


@pytest.mark.parametrize(
    "entry",
    [
        {"recompute": True, "code": "nf4"},
        {"code": "nf4", "block_size": 64, "scale_dtype": "bfloat16", "bits": 4},
        {"offload": True},
        "nf4",
    ],
)
def test_a_damaged_entry_is_refused(entry: Any) -> None:
    with pytest.raises(FormatError, match="not an activation plan"):
        ActivationPlan.from_json(json.dumps({"version": 2, "sites": {"a": entry}}))


@pytest.mark.parametrize("entry", [{"recompute": True}, {**entry_of(NF4), "offload": True}])
def test_the_input_of_a_layer_is_packed_or_exact(entry: Any) -> None:
    text = json.dumps({"version": 2, "sites": {}, "layers": {"model.layers.0": {"input": entry}}})
    with pytest.raises(FormatError, match=r"input of layer 'model.layers.0' must be a format or null"):
        ActivationPlan.from_json(text)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (ActivationPlan({"model.norm": Recompute()}), r"recompute for 'model.norm', a site of kind 'norm'"),
        (ActivationPlan({"model.layers.0.self_attn.q_proj": Recompute()}), r"kind 'linear'.*name its layer"),
        (ActivationPlan({}, {"model.layers.7": None}), r"'model.layers.7', but the model has no such layer"),
        (ActivationPlan({}, {"model": None}), r"'model', but the model has no such layer"),
    ],
)
def test_what_a_model_cannot_follow_is_refused_and_changes_nothing(plan: ActivationPlan, message: str) -> None:
    model = make_model("llama")
    with pytest.raises(ModelError, match=message):
        laconic.compress_activations(model, plan=plan)
    assert not any("forward" in vars(module) for module in model.modules())


def recomputed_mlps(site: Site) -> Choice:
    return Recompute() if site.kind == "mlp" else None if site.kind == "attention" else BlockFormat("int8")


def test_a_recomputed_feed_forward_block_keeps_nothing(family: str) -> None:
    model, ids = make_model(family), make_ids()
    twin = copy.deepcopy(model)
    report = laconic.compress_activations(twin, policy=recomputed_mlps)
    rows = [row for row in report.rows if row.kind == "mlp"]
    for row in rows:
        assert (row.format, row.bits, row.origin) == ("recompute", 0, None)
        assert row.after_nbytes_per_token == 0
    assert torch.equal(loss_of(model, ids), loss_of(twin, ids))
    expected, got = both_gradients(model, twin, ids)
    assert 0 < relative_error(everything(got), everything(expected)) < 0.012  # the norm's input in 8 bits


@pytest.mark.usefixtures("nothing_is_packed")
def test_a_recomputed_block_has_the_gradients_of_autograd(family: str) -> None:
    model, ids = make_model(family), make_ids()
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, policy=recomputed_mlps)
    expected, got = both_gradients(model, twin, ids)
    for name, grad in got.items():
        assert relative_error(grad, expected[name]) < 2e-5, name


@pytest.mark.usefixtures("nothing_is_packed")
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks transformers the old way
def test_dropout_in_an_adapter_is_drawn_again() -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["gate_proj"], lora_dropout=0.5, init_lora_weights=False)
    model, ids = get_peft_model(make_model("llama"), config), make_ids()
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, policy=recomputed_mlps)
    expected, got = both_gradients(model, twin, ids)
    assert relative_error(everything(got), everything(expected)) < 2e-5


# Whole layers


def test_recomputed_layers_keep_their_packed_input_only(family: str) -> None:
    model, ids = make_model(family), make_ids()
    stack = "transformer.h" if family == "gpt2" else "model.layers"
    exact, packed = copy.deepcopy(model), copy.deepcopy(model)
    choices = {site.name: NF4 for site in find_sites(model) if site.kind == "norm"}
    for twin, format in ((exact, None), (packed, INT8)):
        plan = ActivationPlan(choices, {f"{stack}.0": format, f"{stack}.1": format})
        report = laconic.compress_activations(twin, plan=ActivationPlan.from_json(plan.to_json()))
        rows = {row.name: row for row in report.rows}
        nbytes = 64 * 4 if format is None else format.nbytes((64,))
        mask = 128 * 4 if family == "gemma2" else 0  # its even and odd layers have masks of their own
        assert rows[f"{stack}.1"].after_nbytes_per_token == nbytes + mask
        assert all(row.after_nbytes_per_token == 0 for name, row in rows.items() if name.startswith(f"{stack}.1."))
        inside = [row for name, row in rows.items() if name.startswith(f"{stack}.1.") and row.shape]
        assert {row.format for row in inside} == {"recompute"}
    choices_outside = {name: NF4 for name in choices if not name.startswith(stack)}
    laconic.compress_activations(model, plan=ActivationPlan(choices_outside))
    loss = loss_of(model, ids)
    assert torch.equal(loss_of(exact, ids), loss)
    assert torch.equal(loss_of(packed, ids), loss)
    expected, got = both_gradients(model, exact, ids)
    assert are_equal(got, expected)
    expected, got = both_gradients(model, packed, ids)
    assert 0 < relative_error(everything(got), everything(expected)) < 0.02


def test_a_cache_asked_for_is_dropped_by_a_recomputed_layer() -> None:
    model, ids = make_model("llama"), make_ids()
    laconic.compress_activations(model, plan=ActivationPlan({}, {"model.layers.0": INT8}))
    with_cache = model(input_ids=ids, labels=ids, use_cache=True)
    with_cache.loss.backward()
    got = gradients_of(model)
    loss_of(model, ids).backward()
    assert all(torch.equal(grad, got[name]) for name, grad in gradients_of(model).items())
    with torch.no_grad():
        assert getattr(model(input_ids=ids, use_cache=True), cache_name()).get_seq_length(0) == ids.shape[1]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # its newer name is not in 5.0
@pytest.mark.parametrize(("format", "use_reentrant"), grid(["int8", "nf4", "exact"], [False, True], strength=1))
def test_gradient_checkpointing_keeps_packed_inputs(use_reentrant: bool, format: str) -> None:
    model, ids = make_model("llama"), make_ids()
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, bits=8, checkpoint=format, attention="int8")
    twin.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    with SavedTensorTracker(twin) as tracker:
        loss = loss_of(twin, ids)
    assert torch.equal(loss, loss_of(model, ids))
    per_token = 64 * 4 if format == "exact" else BlockFormat(format).nbytes((64,))
    for layer in range(2):
        assert tracker.by_module[f"model.layers.{layer}"] == ids.numel() * per_token
        assert not any(n for name, n in tracker.by_module.items() if name.startswith(f"model.layers.{layer}."))
    expected, got = both_gradients(model, twin, ids)
    error = relative_error(everything(got), everything(expected))
    assert 0 < error < {"int8": 0.02, "nf4": 0.2, "exact": 0.012}[format]  # the final norm has 8 bits


def test_a_cache_that_the_caller_has_filled_is_read_by_a_recomputed_layer() -> None:
    """As that of prefix tuning is, whose entries are trained."""
    from transformers import DynamicCache

    model, ids = make_model("llama"), make_ids()
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, plan=ActivationPlan({}, {f"model.layers.{i}": INT8 for i in range(2)}))
    prefix = nn.Parameter(torch.randn(2, 2, 2, 2, 3, 16))
    found = []
    for each in (model, twin):
        cache = DynamicCache()
        for layer in range(2):
            cache.update(*(prefix[layer] * 1), layer)
        loss = each(input_ids=ids, labels=ids, **{cache_name(): cache}).loss
        found.append((loss.detach(), torch.autograd.grad(loss, prefix)[0]))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_a_cache_of_fixed_length_is_written_once_by_a_recomputed_layer(caplog: pytest.LogCaptureFixture) -> None:
    from transformers import StaticCache

    _warn_filled_cache.cache_clear()
    model, ids = make_model("llama"), make_ids()
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, plan=ActivationPlan({}, {f"model.layers.{i}": INT8 for i in range(2)}))
    found = []
    for each in (model, twin):
        cache = StaticCache(config=model.config, max_cache_len=2 * ids.shape[1])
        each(input_ids=ids, labels=ids, **{cache_name(): cache}).loss.backward()
        assert cache.get_seq_length(0) == ids.shape[1]
        found.append(gradients_of(each))
    assert are_equal(found[1], found[0])
    assert "is filled or no DynamicCache" in caplog.text


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_a_format_of_checkpointed_inputs_is_followed_beside_exact_sites_and_refused_without_sites() -> None:
    model, ids = make_model("llama"), make_ids()
    laconic.compress_activations(model, bits=16, checkpoint="nf4")
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    with SavedTensorTracker(model) as tracker:
        loss_of(model, ids)
    assert tracker.by_module["model.layers.1"] == ids.numel() * BlockFormat("nf4").nbytes((64,))
    with pytest.raises(ModelError, match="checkpoint is 'nf4', but mode='hooks' knows no layers"):
        laconic.compress_activations(make_model("llama"), mode="hooks", checkpoint="nf4")


def test_what_a_region_keeps_exactly_may_not_change_before_backward() -> None:
    layer, x, mask = nn.Linear(64, 64), torch.randn(8, 64, requires_grad=True), torch.rand(8, 64)
    y = checkpoint(lambda x, mask: (layer(x) * mask).exp(), x * 1, mask)
    mask.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_region_of_ones_own_keeps_its_input_packed() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Dropout(0.3), nn.Linear(256, 64))
    x, scale = torch.randn(128, 64, requires_grad=True), torch.randn(64)
    found = []
    for run in (layers, lambda x: checkpoint(layers, x), lambda x: checkpoint(layers, x, format=None)):
        torch.manual_seed(1)
        with SavedTensorTracker(layers) as tracker:
            y = run(x * scale)
        y.square().sum().backward()
        found.append((y.detach(), gradients_of(layers), tracker.nbytes))
    assert torch.equal(found[0][0], found[1][0])
    assert 0 < relative_error(everything(found[1][1]), everything(found[0][1])) < 0.01
    assert all(torch.equal(grad, found[0][1][name]) for name, grad in found[2][1].items())
    multiplied = 64 * 4  # by the product in front of the region
    assert found[1][2] - multiplied == BlockFormat("int8").nbytes((128, 64))
    assert found[2][2] - multiplied == 128 * 64 * 4


# The host's memory


STEPWISE = {"hidden_act": "gelu"}
"""No gradients of it are made from codes, which only codes on the device are (see backward.gated)."""


def test_offloading_on_the_host_itself_is_the_identity() -> None:
    model, ids = make_model("llama", **STEPWISE), make_ids()
    twin = copy.deepcopy(model)
    laconic.compress_activations(model, policy=lambda site: INT8)
    report = laconic.compress_activations(twin, policy=lambda site: Offload(INT8))
    assert "8 bit int8 on host" in str(report)
    expected, got = both_gradients(model, twin, ids)
    assert are_equal(got, expected)


def test_offloaded_gated_products_differ_by_what_exp_rounds() -> None:
    model, ids = make_model("llama"), make_ids()
    twin = copy.deepcopy(model)
    laconic.compress_activations(model, policy=lambda site: INT8)
    laconic.compress_activations(twin, policy=lambda site: Offload(INT8))
    expected, got = both_gradients(model, twin, ids)
    for name, grad in got.items():
        assert (grad - expected[name]).norm() <= 2e-6 * expected[name].norm(), name


class Distance:
    """Stands for a device far away: what it sends becomes other tensors, and it writes down what it is asked for."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.sent = 0

    def send(self, tensors: tuple[torch.Tensor, ...]) -> tuple[tuple[torch.Tensor, ...], int]:
        self.sent += 1
        return tuple(~t if t.dtype == torch.uint8 else -t for t in tensors), self.sent

    def fetch(self, tensors: tuple[torch.Tensor, ...], sent: int) -> tuple[tuple[torch.Tensor, ...], int]:
        self.log.append(("fetch", sent))
        return tuple(~t if t.dtype == torch.uint8 else -t for t in tensors), sent

    def wait(self, tensors: tuple[torch.Tensor, ...], fetched: int) -> None:
        self.log.append(("wait", fetched))


def test_offloaded_tensors_are_fetched_once_and_before_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    far = Distance()
    lane = offload.Offloader(far)
    monkeypatch.setattr(kept, "offloader_of", lambda device: lane)
    model, ids = make_model("llama", num_hidden_layers=4, **STEPWISE), make_ids()
    twin = copy.deepcopy(model)
    laconic.compress_activations(model, policy=lambda site: INT8)
    laconic.compress_activations(twin, policy=lambda site: Offload(INT8))
    gc.collect()  # a graph watched by hooks, as in measuring, goes with the garbage
    far.log.clear()
    expected, got = both_gradients(model, twin, ids)
    assert are_equal(got, expected)

    fetched = [number for what, number in far.log if what == "fetch"]
    waited = [number for what, number in far.log if what == "wait"]
    assert len(set(fetched)) == len(fetched) == len(waited) == 4 * (2 + 2 + 3) + 1
    assert set(fetched) == set(waited)
    ahead = [far.log.index(("wait", number)) - far.log.index(("fetch", number)) for number in waited]
    assert sum(distance > offload.AHEAD for distance in ahead) > len(ahead) / 2


def test_offloaded_tensors_come_again_for_a_retained_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = offload.Offloader(Distance())
    monkeypatch.setattr(kept, "offloader_of", lambda device: lane)
    model, ids = make_model("llama"), make_ids()
    laconic.compress_activations(model, policy=lambda site: Offload(INT8))
    loss, other = loss_of(model, ids), loss_of(model, ids)
    found = []
    for value, last in ((loss, False), (other, True), (loss, True)):
        value.backward(retain_graph=not last)
        found.append(gradients_of(model))
    for name, grad in found[0].items():
        assert torch.equal(grad, found[1][name])
        assert torch.equal(grad, found[2][name])
