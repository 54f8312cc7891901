"""Functions, dropout, activations and mixers in hand-written models: same bits, same draws, fewer bytes."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.modules.module import register_module_full_backward_pre_hook
from torch.utils.module_tracker import ModuleTracker

import laconic
from laconic.activations import ActivationPlan, Recompute, SavedTensorTracker, find_sites
from laconic.activations.forwards.checkpoint import checkpoint
from laconic.activations.forwards.mixer import MixerForward
from laconic.activations.forwards.replacement import replacements_of
from laconic.activations.host.storages import place_of
from laconic.activations.keep.preserve import preserved
from laconic.activations.recognize.sites import MixerSpec, Site
from laconic.formats import BlockFormat
from laconic.optim.in_backward import UsedGradient
from tests.activations.hand_written import Attention, EagerAttention, FunctionsOnly, Language, Recurrent
from tests.activations.models import cache_name, everything, gradients_of, loss_of, make_ids, make_model, relative_error
from tests.grid import few, grid

MODELS = [
    *(("function", feedforward) for feedforward in ("plain", "gelu", "relu", "silu")),
    ("eager", "plain"),
    ("recurrent", "gelu"),
]


def step(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor], int]:
    """Loss, random state after the step, gradients, and bytes kept for backward but the loss's own."""
    torch.manual_seed(3)
    with SavedTensorTracker(model) as tracker:
        loss = model(ids)
    loss.backward()
    return loss.detach(), torch.get_rng_state(), gradients_of(model), tracker.nbytes - tracker.by_module[""]


@pytest.mark.parametrize(
    ("mixer", "feedforward", "dtype"),
    grid([pytest.param(*model, id="-".join(model)) for model in MODELS], [torch.float32, torch.bfloat16], strength=1),
)
def test_a_hand_written_model_computes_and_draws_what_it_did(mixer: str, feedforward: str, dtype: torch.dtype) -> None:
    model, ids = Language(mixer, feedforward).to(dtype), make_ids()
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, example_inputs={"ids": ids})
    expected, got = step(model, ids), step(twin, ids)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    assert got[2].keys() == expected[2].keys()
    a, b = everything(got[2]).double(), everything(expected[2]).double()
    assert F.cosine_similarity(a, b, dim=0) > 0.98
    assert expected[3] > (4 if dtype is torch.float32 else 3) * got[3]


@pytest.mark.parametrize(("mixer", "feedforward"), MODELS)
def test_at_eight_bits_every_gradient_is_close(mixer: str, feedforward: str) -> None:
    model, ids = Language(mixer, feedforward), make_ids()
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, bits=8)
    expected, got = step(model, ids), step(twin, ids)
    for name, grad in got[2].items():
        assert relative_error(grad, expected[2][name]) < 0.03, name


@pytest.mark.usefixtures("nothing_is_packed")
@pytest.mark.parametrize(("mixer", "feedforward"), [case for case in MODELS if case[0] == "function"])
def test_backward_is_right_when_nothing_is_packed(mixer: str, feedforward: str) -> None:
    model, ids = Language(mixer, feedforward), make_ids()
    twin = copy.deepcopy(model)
    # Attention packs by itself: with 8 bits its own error would hide mistakes, so it stays exact here.
    plan = ActivationPlan.make(
        find_sites(twin), lambda site: None if site.kind in ("attention", "mixer") else BlockFormat("int8")
    )
    laconic.compress_activations(twin, plan=plan)
    expected, got = step(model, ids), step(twin, ids)
    for name, grad in got[2].items():
        assert relative_error(grad, expected[2][name]) < 2e-5, name


def test_a_plan_that_leaves_a_child_exact_is_followed_in_the_code_around_it() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = FunctionsOnly("gelu", 0.0)
            self.linear = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inside(F.gelu(self.linear(x)))
            return y

    def nbytes(**choices: BlockFormat) -> tuple[int, int]:
        model = Around()
        laconic.compress_activations(model, plan=ActivationPlan(choices))
        with SavedTensorTracker(model) as tracker:
            model(torch.randn(8, 64, requires_grad=True)).sum()
        return tracker.by_module[""], tracker.by_module["inside"]

    exact, packed = (
        nbytes(linear=BlockFormat("int8")),
        nbytes(**{"": BlockFormat("int8"), "linear": BlockFormat("int8")}),
    )
    assert packed[0] < exact[0]
    assert packed[1] == exact[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.999])
def test_dropout_keeps_a_bit_per_value_and_its_exact_gradient(dtype: torch.dtype, p: float) -> None:
    model = nn.Sequential(nn.Dropout(p))
    x = torch.randn(16, 40).to(dtype)
    x[:, ::3] = 0  # a zero that stays and one that is dropped look alike in the output, and differ in the gradient
    weights = torch.randn(16, 40).to(dtype)
    grads = []
    for compressed in (False, True):
        if compressed:
            laconic.compress_activations(model, example_inputs={"input": x.clone().requires_grad_()})
        given = x.clone().requires_grad_()
        torch.manual_seed(0)
        with SavedTensorTracker(model) as tracker:
            y = model(given)
        (y * weights).sum().backward()
        grads.append((y.detach(), given.grad, torch.get_rng_state()))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))  # type: ignore[arg-type]
    assert tracker.nbytes == 16 * 40 // 8


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_that_draws_nothing_is_left_to_torch(p: float) -> None:
    model = nn.Sequential(nn.Dropout(p))
    laconic.compress_activations(model)
    x = torch.randn(4, 8, requires_grad=True)
    model(x).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 1 - p))  # type: ignore[arg-type]


class Remembering(Recurrent):
    """Gives something else every time that it runs."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.last.add_(1)
        return super().forward(x) * self.last


class Counting(Recurrent):
    """Counts its calls in an attribute."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Unseeded(Recurrent):
    """Draws from a generator of its own, which nobody sets back."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.rand(x.shape, generator=self.generator)


class Tossing(Recurrent):
    """Draws from a generator of Python's or NumPy's, which decides something else in few calls only."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__(0.0)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if self.draw() < 1e-9 else 1)


@pytest.mark.parametrize(
    "cls",
    [Remembering, lambda: Counting(0.0), Unseeded, lambda: Tossing(random.random), lambda: Tossing(np.random.rand)],
)
def test_a_mixer_that_does_not_repeat_itself_stays_exact_and_the_log_says_so(
    cls: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model, ids = Language("recurrent", rate=0.0), make_ids()
    model.h[0].mixer = cls()
    exact = copy.deepcopy(model)
    with caplog.at_level(logging.WARNING, "laconic"):
        laconic.compress_activations(model, bits=8, example_inputs={"ids": ids})
    assert "h.0.mixer" in caplog.text
    assert "stays exact" in caplog.text
    expected, got = step(exact, ids), step(model, ids)
    for name, grad in got[2].items():
        assert relative_error(grad, expected[2][name]) < 0.03, name


class Seeding(Recurrent):
    """Draws the same numbers in each call, as BigBird does for the blocks that attend each other."""

    def forward(self, x: Tensor) -> Tensor:
        np.random.seed(3)
        return super().forward(x * np.random.rand())


def test_a_mixer_that_seeds_numpy_itself_runs_again_and_the_host_draws_on(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = Language("recurrent", rate=0.0), make_ids()
    model.h[0].mixer = Seeding(0.0)
    expected = step(copy.deepcopy(model), ids)[2]  # and NumPy's generator is as the mixer leaves it
    with caplog.at_level(logging.WARNING, "laconic"):
        laconic.compress_activations(model, bits=8, example_inputs={"ids": ids})
    assert "stays exact" not in caplog.text
    loss = model(ids)
    np.random.seed(8)
    loss.backward()
    drawn = np.random.rand()
    np.random.seed(8)
    assert drawn == np.random.rand()
    for name, parameter in model.named_parameters():
        assert relative_error(parameter.grad, expected[name]) < 0.03, name


class Masked(nn.Module):
    """Attention with a mask, which it returns in front of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.query(x) @ x.transpose(1, 2)
        return mask.float(), self.value(torch.softmax(scores.masked_fill(mask == 0, -1e9), -1) @ x)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_a_mask_of_the_shape_of_the_input_is_no_input(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    exact, found = nn.ModuleList([Masked()]), []
    model, x = copy.deepcopy(exact), torch.randn(2, 32, 32, requires_grad=True)
    mask = torch.eye(32).expand(2, 32, 32).logical_or(torch.rand(2, 32, 32) > 0.5).to(dtype)
    laconic.compress_activations(model, bits=8)
    for each in (exact, model):
        (each[0](x, mask)[1] * 2).square().sum().backward()
        found.append(gradients_of(each))
    assert relative_error(everything(found[1]), everything(found[0])) < 0.05


MAPS: list[Tensor] = []


class Leaving(nn.Module):
    """Attention that leaves its probabilities, or a count, in some place."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place, self.maps, self.calls = place, list[Tensor](), torch.zeros(())
        self.query, self.value = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor, maps: list[Tensor]) -> Tensor:
        if self.place == "input":
            x.mul_(1.5)
        probabilities = torch.softmax(self.query(x) @ x.transpose(1, 2), -1)
        match self.place:
            case "attribute":
                self.calls = self.calls + 1
            case "tensor":
                self.calls += 1
            case "list":
                self.maps.append(probabilities)
            case "global":
                MAPS.append(probabilities)
            case "argument":
                maps.append(probabilities)
            case "draw":
                probabilities = probabilities * random.random()
        out: Tensor = self.value(probabilities @ x)
        return out


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("place", ["attribute", "tensor", "list", "global", "argument", "input"])
def test_what_a_mixer_leaves_is_left_once(place: str, later: bool) -> None:
    torch.manual_seed(0)
    exact = nn.ModuleList([Leaving("" if later else place)])
    model, x = copy.deepcopy(exact), torch.randn(2, 8, 32, requires_grad=True)
    laconic.compress_activations(model, bits=8)  # measures nothing, so the first call is one of training
    found = []
    for each in (exact[0], model[0]):
        maps: list[Tensor] = []
        MAPS.clear()
        if later:
            each(x * 1, maps).sum().backward()
            each.place = place
        y = each(x * 1, maps)
        left = [*maps, *MAPS, *each.maps]
        torch.stack([y.square().sum(), *(m.square().sum() for m in left)]).sum().backward()
        found.append((y, torch.tensor(len(left)), each.calls, *left))
    assert all(map(torch.equal, *found))


def test_a_mixer_that_draws_a_number_later_has_the_gradients_of_that_number() -> None:
    torch.manual_seed(0)
    exact, found = nn.ModuleList([Leaving("")]), []
    model, x = copy.deepcopy(exact), torch.randn(2, 8, 32)
    laconic.compress_activations(model, bits=8)
    for each in (exact[0], model[0]):
        each(x, []).sum().backward()
        each.place = "draw"
        each.zero_grad()
        random.seed(0)
        each(x, []).sum().backward()
        found.append(torch.cat([parameter.grad.flatten() for parameter in each.parameters()]))  # type: ignore[union-attr]
    assert (found[1] - found[0]).norm() < 0.02 * found[0].norm()


class Called:
    """A decorator of methods that is an object."""

    def __init__(self, method: Any) -> None:
        self.method = method

    def __call__(self, module: nn.Module, x: Tensor) -> Any:
        return self.method(module, x)

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        return self if module is None else MethodType(self, module)


class CalledLeaving(Leaving):
    """Attention whose forward is an object that is called."""

    @Called
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return Leaving.forward(self, x, [])


def empty_closure() -> Any:
    def forward(module: Leaving, x: Tensor) -> Any:
        return Leaving.forward(module, x, []) if x is not None else missing

    if forward is None:
        missing = None
    return forward


class EmptyClosure(Leaving):
    """Attention whose forward has a closure that nobody has filled."""

    forward = empty_closure()


def as_mixer(module: nn.Module) -> MixerForward:
    ours = MixerForward(module, Site("0", "mixer", 0, (), MixerSpec()), BlockFormat("int8", block_size=32))
    ours.install()
    return ours


@pytest.mark.parametrize("cls", [CalledLeaving, EmptyClosure])
def test_a_forward_whose_closure_cannot_be_read_runs_as_a_mixer(cls: type[Leaving]) -> None:
    mixer, x = cls(""), torch.randn(2, 8, 32, requires_grad=True)
    ours = as_mixer(mixer)
    mixer(x).sum().backward()
    assert ours.repeats


class Caching(Leaving):
    """Attention with a mask, which it makes once for each length."""

    def __init__(self) -> None:
        super().__init__("")
        self.masks: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        if x.shape[1] not in self.masks:
            self.masks[x.shape[1]] = torch.ones(x.shape[1], 1).tril()
        return super().forward(x * self.masks[x.shape[1]], [])


def test_a_mixer_that_fills_a_cache_once_runs_again() -> None:
    mixer, x = Caching(), torch.randn(2, 8, 32, requires_grad=True)
    ours = as_mixer(mixer)
    mixer(x).sum().backward()
    assert ours.repeats
    assert list(mixer.masks) == [8]


def test_a_mixer_whose_gradients_are_used_up_is_tried() -> None:
    mixer, x = Leaving(""), torch.randn(2, 8, 32, requires_grad=True)
    mixer.query.weight.grad = UsedGradient(mixer.query.weight)
    ours = as_mixer(mixer)
    mixer(x, [])
    assert ours.repeats
    assert isinstance(mixer.query.weight.grad, UsedGradient)


def test_no_parameter_that_a_mixer_leads_to_is_copied() -> None:
    model, buffer = nn.Linear(4, 4), torch.ones(3)
    part = nn.Linear(2, 2)
    part.root = [model, buffer]  # type: ignore[assignment]
    model.weight.grad = torch.ones(4, 4)
    with preserved(part, tensors="copied") as state:
        assert list(state.writes._copies) == list(place_of(buffer))


class Frozen(dict):  # type: ignore[type-arg]
    """A dict that makes no copies of itself."""

    def copy(self) -> Any:
        raise TypeError


def test_a_dict_that_makes_no_copies_is_preserved() -> None:
    part = nn.Linear(2, 2)
    part.options = Frozen(a=1)  # type: ignore[assignment]
    with preserved(part) as state:
        part.options["a"] = 2  # type: ignore[index, operator]
    assert part.options == {"a": 1}
    assert state.has_undone
    assert isinstance(part.options, Frozen)


def test_a_mixer_of_frozen_parameters_and_exact_inputs_runs_as_it_is() -> None:
    model = nn.ModuleList([Recurrent(0.0)])
    model.requires_grad_(False)
    laconic.compress_activations(model)
    x = torch.randn(2, 4, 64)
    with SavedTensorTracker(model) as tracker:
        model[0](x)
    assert tracker.nbytes == 0


@pytest.mark.parametrize("hooked", ["parameter", "parameters together", "module", "every module"])
def test_hooks_on_gradients_do_not_see_those_of_the_trial_of_a_mixer(hooked: str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([EagerAttention(0.0)])
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, bits=8)
    x = torch.randn(2, 12, 64)
    found: list[list[Tensor]] = []
    for each in (model, twin):
        seen: list[Tensor] = []
        into = each[0].c_attn
        hook: Any = lambda *given, seen=seen: seen.append(given[-1][0].clone())  # noqa: E731
        match hooked:
            case "parameter":
                handle = into.weight.register_hook(lambda grad, hook=hook: hook([grad]))
            case "parameters together":
                handle = register_multi_grad_hook((into.weight, into.bias), hook)
            case "module":
                handle = into.register_full_backward_hook(hook)
            case "every module":
                handle = register_module_full_backward_pre_hook(hook)
        with handle, ModuleTracker():  # which puts hooks on the gradients of inputs
            each[0](x.clone().requires_grad_()).square().sum().backward()
        found.append(seen)
    expected, got = found
    assert len(got) == len(expected) > 0
    assert all(relative_error(a, b) < 0.03 for a, b in zip(got, expected, strict=True))


def test_a_mixer_runs_again_with_the_dropout_of_the_first_run() -> None:
    torch.manual_seed(0)
    mixer = nn.ModuleList([Recurrent(0.5)])
    twin = copy.deepcopy(mixer)
    laconic.compress_activations(twin, policy=lambda site: BlockFormat("int8", block_size=16))
    x = torch.randn(2, 12, 64)
    found = []
    for each in (mixer, twin):
        given = x.clone().requires_grad_()
        torch.manual_seed(1)
        y = each[0](given)
        torch.rand(5)  # other code draws before backward
        y.square().sum().backward()
        found.append((y.detach(), given.grad, torch.get_rng_state()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][2], found[1][2])
    assert relative_error(found[1][1], found[0][1]) < 0.03  # type: ignore[arg-type]


@pytest.mark.parametrize("family", few(["opt", "bloom", "falcon", "gptj", "mamba", "qwen3_next"], 3))
def test_layers_with_code_of_their_own_keep_a_third_or_less(family: str) -> None:
    model, ids = make_model(family), make_ids(length=32)
    twin = copy.deepcopy(model)
    report = laconic.compress_activations(twin, example_inputs={"input_ids": ids, "labels": ids})
    assert torch.equal(loss_of(model, ids), loss_of(twin, ids))
    assert report.before is not None
    assert report.after is not None
    before, after = (sum(each.by_module.values()) - each.by_module.get("", 0) for each in (report.before, report.after))
    assert before > 3 * after, report


@pytest.mark.parametrize("family", ["bloom", "gptj"])
def test_a_cache_that_the_first_run_fills_is_not_filled_again(family: str) -> None:
    model, ids = make_model(family), make_ids(length=16)
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, bits=8)
    results = []
    for each in (model, twin):
        torch.manual_seed(0)
        out = each(input_ids=ids, labels=ids, use_cache=True)
        out.loss.backward()
        results.append((out, gradients_of(each)))
    assert torch.equal(results[0][0].loss, results[1][0].loss)
    assert [getattr(out, cache_name()).get_seq_length(layer) for out, _ in results for layer in (0, 1)] == [16] * 4
    for name, grad in results[1][1].items():
        assert relative_error(grad, results[0][1][name]) < 0.1, name


def test_a_call_with_a_filled_cache_runs_as_it_is() -> None:
    model, ids = make_model("bloom"), make_ids(length=16)
    with torch.no_grad():
        past = getattr(model(input_ids=ids, use_cache=True), cache_name())
    twin, past_of_twin = copy.deepcopy(model), copy.deepcopy(past)
    laconic.compress_activations(twin, bits=8)
    losses = []
    for each, cache in ((model, past), (twin, past_of_twin)):
        torch.manual_seed(0)
        loss = each(input_ids=ids, labels=ids, **{cache_name(): cache}).loss
        loss.backward()
        losses.append(loss.detach())
    assert torch.equal(*losses)


def test_only_the_code_of_mixers_counts() -> None:
    kinds = {site.name: site.kind for site in find_sites(Language("eager"))}
    assert kinds["h.0.mixer"] == "mixer"
    assert {site.kind for site in find_sites(nn.ModuleList([Attention(0.0)])) if site.name == "0"} == {"attention"}


def test_a_mixer_with_sharp_logits_keeps_its_input_exactly() -> None:
    ids = make_ids()
    for scale, sharp in ((1.0, False), (30.0, True)):
        model = Language("eager", rate=0.0)
        with torch.no_grad():
            for layer in model.h:
                layer.mixer.c_attn.weight.mul_(scale)
        twin = copy.deepcopy(model)
        laconic.compress_activations(twin, bits=8, example_inputs={"ids": ids})
        forwards = [next(replacements_of(layer.mixer)) for layer in twin.h]
        assert all(isinstance(each, MixerForward) and each.is_sensitive is sharp for each in forwards)
        expected, got = step(model, ids), step(twin, ids)
        assert relative_error(everything(got[2]), everything(expected[2])) < 0.05


class Gated(nn.Module):
    """A gated block whose children have names of its own."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.one, self.two, self.shape = nn.Linear(64, 256), nn.Linear(128, 64), act

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.one(x).chunk(2, dim=-1)
        out: Tensor = self.two(self.shape(a) * b)
        return out


@pytest.mark.parametrize("act", [nn.GELU(), nn.SiLU(), nn.ReLU(), nn.GELU(approximate="tanh")])
def test_a_gated_block_with_other_names_keeps_gate_and_up_packed(act: nn.Module) -> None:
    model, x = nn.Sequential(nn.LayerNorm(64), Gated(act)), torch.randn(4, 32, 64)
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, bits=8)
    found = []
    for each in (model, twin):
        with SavedTensorTracker(each) as tracker:
            y = each(x)
        y.square().sum().backward()
        found.append((y.detach(), gradients_of(each), tracker.nbytes))
    assert torch.equal(found[0][0], found[1][0])
    assert relative_error(everything(found[1][1]), everything(found[0][1])) < 0.02
    signs = 128 / 8 if isinstance(act, nn.ReLU) else 0
    # norm's input and gate and up at 8.25 bits, and the output that the test squares
    assert found[1][2] <= 4 * 32 * ((64 + 256) * 8.25 / 8 + signs + 64 * 4)


class ByName(nn.Module):
    """Gives functions of torch their arguments by name, as may be."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        into, act, out = names
        self.add_module(into, nn.Linear(64, 128))
        self.add_module(act, nn.SiLU())
        self.add_module(out, nn.Linear(64, 64))
        self.names, self.norm = names, nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        into, act, out = (self.get_submodule(name) for name in self.names)
        gate, up = torch.chunk(input=into(self.norm(x)), chunks=2, dim=-1)
        y = F.dropout(input=torch.mul(input=act(gate), other=up), p=0.1, training=self.training)
        y = torch.transpose(input=F.gelu(input=y), dim0=0, dim1=1).contiguous()
        return out(torch.permute(input=y, dims=(1, 0, 2)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("names", [("a", "b", "c"), ("gate_up_proj", "act_fn", "down_proj")])
def test_functions_of_torch_may_get_their_arguments_by_name(names: tuple[str, str, str]) -> None:
    model, x, found = ByName(*names), torch.randn(4, 32, 64), []
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, bits=8)
    for each in (model, twin):
        torch.manual_seed(0)
        y = each(x)
        y.square().sum().backward()
        found.append((y.detach(), gradients_of(each)))
    assert torch.equal(found[0][0], found[1][0])
    assert relative_error(everything(found[1][1]), everything(found[0][1])) < 0.02


class Turning(nn.Module):
    """Turns what is made of a norm, by lists that it writes to afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        places, sizes = [0, 2, 1], [32, 32]
        y = F.gelu(self.into(x)).permute(places)
        left, right = y.split(sizes, 1)
        places[:], sizes[:] = [0, 1, 2], [16, 48]
        return self.out(torch.cat((right, left), 1).transpose(1, 2)) + self.out(y.transpose(1, 2))  # type: ignore[no-any-return]


def test_lists_among_arguments_may_change_later() -> None:
    model, x = Turning(), torch.randn(4, 64, 64)
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, bits=8)
    for each in (model, twin):
        each(x).square().sum().backward()
    assert relative_error(everything(gradients_of(twin)), everything(gradients_of(model))) < 0.02


def test_a_relu_passes_on_the_gradient_of_what_is_not_a_number() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(8, 64)
    x[3, 5] = torch.nan
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, bits=8)
    grads = []
    for each in (model, twin):
        given = x.clone().requires_grad_()
        each(given).sum().backward()
        assert given.grad is not None
        grads.append(given.grad)
    assert torch.equal(*grads)
    assert bool((grads[0][3] != 0).all())


def test_a_relu_passes_on_the_gradients_of_values_that_round_to_zero() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(64))
    x = torch.full((8, 64), 1e-3)
    x[:, 0] = 100.0
    exact, packed = x.clone().requires_grad_(), x.clone().requires_grad_()
    model(exact).sum().backward()
    laconic.compress_activations(model, policy=lambda site: BlockFormat("nf4"))
    model(packed).sum().backward()
    torch.testing.assert_close(packed.grad, exact.grad)


def test_a_permuted_input_comes_back_with_its_strides() -> None:
    x = torch.randn(2, 64, 12).transpose(1, 2).requires_grad_()
    strides = []

    def function(x: Tensor) -> Tensor:
        strides.append(x.stride())
        return x.square()

    checkpoint(function, x).sum().backward()
    assert strides == [x.stride()] * 2


class WithRelu(nn.Module):
    """A feed-forward block, plain or gated, as the names of its parts say."""

    def __init__(self, names: tuple[str, str, str]) -> None:
        super().__init__()
        self.names, self.gated = names, names[0] == "gate_up_proj"
        self.add_module(names[0], nn.Linear(64, 512 if self.gated else 256))
        self.add_module(names[1], nn.ReLU())
        self.add_module(names[2], nn.Linear(256, 64))

    def forward(self, x: Tensor) -> Tensor:
        into, act, out = (self.get_submodule(name) for name in self.names)
        if not self.gated:
            return out(act(into(x)))  # type: ignore[no-any-return]
        gate, up = into(x).chunk(2, -1)
        return out(act(gate) * up)  # type: ignore[no-any-return]


PARTS = [("fc1", "act", "fc2"), ("gate_up_proj", "act_fn", "down_proj")]


@pytest.mark.parametrize("names", PARTS)
@pytest.mark.parametrize("recompute", [False, True])
def test_a_relu_in_a_block_passes_on_the_gradients_of_values_that_round_to_zero(
    names: tuple[str, str, str], recompute: bool
) -> None:
    """One of a hundred values does at eight bits, whose gradients are a tenth of all by their norm."""
    model, x, found = nn.Sequential(nn.LayerNorm(64), WithRelu(names)), torch.randn(128, 64), []
    twin = copy.deepcopy(model)
    kinds = {site.name: site.kind for site in find_sites(twin)}
    assert kinds["1"] == "mlp"
    chosen = {name: Recompute() if kind == "mlp" and recompute else BlockFormat("int8") for name, kind in kinds.items()}
    laconic.compress_activations(twin, plan=ActivationPlan(chosen))
    for each in (model, twin):
        (each(x) * torch.arange(64).sin()).sum().backward()
        found.append(gradients_of(each))
    for name, gradient in found[0].items():
        assert relative_error(found[1][name], gradient) < 0.03, name


@pytest.mark.parametrize("names", PARTS)
@pytest.mark.parametrize("way", ["int8", "recompute"])
def test_a_relu_in_a_block_takes_dtensors(names: tuple[str, str, str], way: str, mesh: DeviceMesh) -> None:
    """As under tensor parallelism with `use_local_output=False`."""
    model, x, found = nn.Sequential(nn.LayerNorm(64), WithRelu(names)), torch.randn(128, 64), []
    twin = copy.deepcopy(model)
    for each in (model, twin):
        into, _, out = (f"1.{name}" for name in names)
        parallelize_module(each, mesh, {into: ColwiseParallel(use_local_output=False), out: RowwiseParallel()})
    assert {site.kind for site in find_sites(twin)} >= {"mlp"}
    chosen = {
        site.name: Recompute() if (way, site.kind) == ("recompute", "mlp") else BlockFormat("int8")
        for site in find_sites(twin)
    }
    laconic.compress_activations(twin, plan=ActivationPlan(chosen))
    for each in (model, twin):
        (each(x) * torch.arange(64).sin()).sum().backward()
        found.append({name: whole(grad) for name, grad in gradients_of(each).items()})
    errors = {name: relative_error(found[1][name], gradient) for name, gradient in found[0].items()}
    assert max(errors.values()) < 0.2, errors
    assert errors[f"{out}.weight"] > 0


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x
