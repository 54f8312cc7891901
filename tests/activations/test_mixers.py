"""attention="recompute": attention modules run again from their input in eight bits."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import laconic
from laconic.activations import ActivationPlan, Recompute, SavedTensorTracker, find_sites
from laconic.activations.forwards.checkpoint import run_again
from laconic.activations.forwards.mixer import MixerForward
from laconic.activations.forwards.replacement import replacements_of
from laconic.errors import ModelError
from laconic.formats import BlockFormat
from tests.activations.models import both_gradients, everything, loss_of, make_ids, make_model, relative_error


def test_every_family_computes_what_it_did_and_has_close_gradients(family: str) -> None:
    model, ids = make_model(family), make_ids()
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, bits=8, attention="recompute")
    assert torch.equal(loss_of(model, ids), loss_of(twin, ids))
    expected, got = both_gradients(model, twin, ids)
    assert relative_error(everything(got), everything(expected)) < 0.02


def test_a_llama_layer_keeps_half_a_u_for_attention() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 97, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2}
    config = AutoConfig.for_model("llama", num_attention_heads=4, num_key_value_heads=4, **sizes)
    model, ids = AutoModelForCausalLM.from_config(config).to(torch.bfloat16), make_ids(length=128)
    laconic.compress_activations(model, attention="recompute")
    with SavedTensorTracker(model) as tracker:
        loss_of(model, ids)
    layers = sum(nbytes for name, nbytes in tracker.by_module.items() if ".layers." in name)
    rotations = 2 * 128 * 64 * 2  # cosines and sines, once for all layers
    assert (layers - rotations) / 2 / (ids.numel() * 256 * 2) < 3.2


def test_a_plan_says_it_as_data_and_comes_out_again() -> None:
    model, ids = make_model("llama"), make_ids()
    choices = {
        site.name: Recompute() if site.kind == "attention" else BlockFormat("int8") for site in find_sites(model)
    }
    plan = ActivationPlan.from_json(ActivationPlan(choices).to_json())
    laconic.compress_activations(model, plan=plan)
    attention = model.get_submodule("model.layers.0.self_attn")
    assert [type(each) for each in replacements_of(attention)] == [MixerForward]
    loss_of(model, ids).backward()
    laconic.decompress_activations(model)
    assert "forward" not in vars(attention)


def test_what_cannot_be_recomputed_on_its_own_is_refused() -> None:
    with pytest.raises(ModelError, match=r"recompute for 'model.norm'.*only feed-forward blocks, attention and other"):
        laconic.compress_activations(make_model("llama"), plan=ActivationPlan({"model.norm": Recompute()}))


class Steered(nn.Module):
    """A mixer's shape: takes what steers it by name, alone and in a tuple."""

    def forward(self, x: Tensor, *, mask: Tensor, turns: tuple[Tensor, Tensor], gain: dict[str, Tensor]) -> Tensor:
        return torch.tanh(x * turns[0] + torch.roll(x, 1, -1) * turns[1] + mask) * gain["all"]


class Flipping(nn.Module):
    """Attention that writes a flag in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value, self.is_odd = nn.Linear(32, 32), nn.Linear(32, 32), False

    def forward(self, x: Tensor) -> Tensor:
        self.is_odd = not self.is_odd
        out: Tensor = self.value((self.query(x) @ x.mT).softmax(-1) @ x)
        return out


def test_flags_that_come_back_are_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, trials, original = nn.ModuleList([Flipping()]), [], MixerForward._repeats
    laconic.compress_activations(model, bits=8)
    monkeypatch.setattr(MixerForward, "_repeats", lambda *args: trials.append(1) or original(*args))
    for _ in range(6):
        model[0](torch.randn(2, 8, 32, requires_grad=True)).sum().backward()
    assert len(trials) == 2


def test_autograd_saves_every_tensor_that_a_region_is_given() -> None:
    module, x = Steered(), torch.randn(4, 64, requires_grad=True)
    named = {
        "mask": torch.randn(4, 64),
        "turns": (torch.randn(64), torch.randn(64, requires_grad=True)),
        "gain": {"all": torch.randn(4, 1, requires_grad=True)},
    }
    leaves = [x, named["turns"][1], named["gain"]["all"]]
    with SavedTensorTracker(module) as tracker:
        y = run_again(module, (x,), named)
    assert tracker.nbytes == 4 * sum(leaf.numel() for leaf in (*leaves, named["mask"], named["turns"][0]))
    for got, expected in zip(
        torch.autograd.grad(y.sum(), leaves), torch.autograd.grad(module(x, **named).sum(), leaves), strict=True
    ):
        assert torch.equal(got, expected)


def test_a_named_tensor_that_changes_before_backward_is_noticed() -> None:
    x, mask = torch.randn(4, 64, requires_grad=True), torch.randn(4, 64)
    named = {"mask": mask, "turns": (torch.randn(64), torch.randn(64)), "gain": {"all": torch.ones(1)}}
    y = run_again(Steered(), (x,), named)
    mask.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_an_object_that_is_registered_as_a_nest_stays_itself() -> None:
    class Cache(dict[str, Tensor]):
        pass

    cache, x = Cache(), torch.randn(4, 64, requires_grad=True)
    seen = []

    def region(x: Tensor, cache: Cache) -> Tensor:
        seen.append(cache)
        return x.sin()

    run_again(region, (x,), {"cache": cache}).sum().backward()
    assert len(seen) == 2
    assert all(each is cache for each in seen)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize(
    ("family", "input_of", "checkpoints"),
    [("llama", "model.layers.1.self_attn", False), ("mamba", "backbone.layers.1.mixer", False),
     ("llama", "model.layers.1", True)],
)  # fmt: skip
def test_what_runs_again_holds_its_input_in_codes_alone(family: str, input_of: str, checkpoints: bool) -> None:
    """torch holds hooks of saved tensors, and whatever their code refers to, as long as what they have packed."""
    model = make_model(family).train()
    if checkpoints:
        model.gradient_checkpointing_enable()
    ids = make_ids()
    laconic.compress_activations(model, attention="recompute")
    held: list[StorageWeakRef] = []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        held.append(StorageWeakRef(x.untyped_storage()))

    handle = model.get_submodule(input_of).register_forward_pre_hook(note, with_kwargs=True)
    for _ in range(2):  # the first one tries the code
        held.clear()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        gc.collect()
        assert held
        assert all(ref.expired() for ref in held)
        loss.backward()
    handle.remove()
