"""torch's own backward on what hooks keep: of one tensor (`Instead`), or of code that runs again (`SecondRun`)."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import laconic
from laconic.activations import SavedTensorTracker
from laconic.activations.backward.replay import Replay
from laconic.activations.backward.saving import BoundFunction, Instead, SecondRun
from laconic.activations.keep.kept import Kept, Memo
from laconic.errors import ModelError


def held(x: Tensor) -> Kept:
    """Keeps a copy of `x`, in memory of its own."""
    return Kept((x.detach().clone(memory_format=torch.contiguous_format),), Memo(lambda saved, *_: saved[0]), "test")


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w: F.linear(x, w),
    "product": lambda x, w: x @ w,
    "transposed, of a square": lambda x, w: (w @ x.mT).mT,
    "in rows": lambda x, w: x.reshape(-1, x.shape[-1]) @ w,
    "twice": lambda x, w: F.linear(x, w) * (x @ w),
    "a part": lambda x, w: x[1:] @ w,
    "elementwise": lambda x, w: (x * x).sigmoid() * w[: x.shape[-2]],
}


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "with gaps"])
@pytest.mark.parametrize("use", USES)
def test_gradients_are_those_of_torch_whatever_view_is_saved(use: str, layout: str) -> None:
    found = []
    for kept in (False, True):
        torch.manual_seed(0)
        x, w = torch.randn(6, 6, requires_grad=True), torch.randn(6, 6, requires_grad=True)
        y = x * 1
        y = {"contiguous": y, "transposed": y.t(), "with gaps": torch.cat((y, y), 1)[:, :6]}[layout]
        if kept:
            z = Instead(y, held(y)).around(USES[use], y, w)
        else:
            z = USES[use](y, w)
        first = torch.autograd.grad(z.square().sum(), (x, w), create_graph=True)
        found.append([z, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), (x, w))])
    assert all(map(torch.equal, *(tensors[:3] for tensors in found)))
    # Twice differentiated, what is kept is multiplied in a layout of its own, and some processors add in another order.
    rounding = 0.0 if layout == "contiguous" else 1e-6
    for ours, exact in zip(found[1][3:], found[0][3:], strict=True):
        torch.testing.assert_close(ours, exact, rtol=rounding, atol=rounding * float(exact.abs().max()))


@pytest.mark.parametrize("pruned", [False, True])
def test_hooks_around_sites_pack_neither_scales_nor_computed_weights(pruned: bool) -> None:
    """In `combined` mode, whose hooks round what linear layers save: 65,536 values have 1024 scales."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64), nn.Linear(64, 8))
    if pruned:
        prune.l1_unstructured(model[2], "weight", 0.5)
    found = []
    for mode in (None, "sites", "combined"):
        twin = model if pruned else copy.deepcopy(model)
        twin.zero_grad()
        if mode is not None:
            laconic.compress_activations(twin, bits=8, mode=mode)
        twin(torch.ones(256, 1) * torch.linspace(-1, 1, 256)).square().sum().backward()
        found.append([p.grad for p in twin.parameters()])
        if mode is not None:
            laconic.decompress_activations(twin)
    for exact, alone, combined in zip(*found, strict=True):
        assert exact is not None
        assert alone is not None
        assert combined is not None
        assert (combined - exact).norm() <= 0.02 * exact.norm()
        assert (alone - exact).norm() <= 0.02 * exact.norm()


def test_a_factor_that_changes_is_refused() -> None:
    def step(change: Callable[[Tensor], Any]) -> None:
        x, w = torch.randn(4, 8, requires_grad=True) * 1, nn.Parameter(torch.randn(8, 8))
        y = Instead(x, held(x)).around(F.linear, x, w)
        with torch.no_grad():
            change(w)
        y.sum().backward()

    step(lambda w: None)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(lambda w: w.add_(1))
    with pytest.raises(ModelError, match="holds other values in backward than in forward"):
        step(lambda w: w.data.add_(1))


class Two(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, 24, bias)
        self.second = nn.Linear(24, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(F.gelu(self.first(self.norm(x))))
        return y


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 16), (2, 5, 16), (24, 16), (16, 16)])  # also of as many values as a weight
def test_autocast_keeps_neither_casts_of_inputs_nor_of_weights(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    model = Two(16, bias)
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, bits=8, block_size=16)
    x, found, kept = torch.randn(*shape), [], []
    for each in (model, twin):
        own = x.clone().requires_grad_()
        with SavedTensorTracker(each) as tracker, torch.autocast("cpu", torch.bfloat16):
            y = each(own)
        (y.float().square().sum()).backward()
        found.append([y, own.grad, *(p.grad for p in each.parameters())])
        kept.append(tracker.nbytes)
    assert torch.equal(found[0][0], found[1][0])
    for exact, packed in zip(found[0][1:], found[1][1:], strict=True):
        assert exact.dtype == packed.dtype
        assert (exact - packed).norm() <= 0.02 * exact.norm()
    weights = 2 * 2 * 16 * 24  # which exact autocast holds in bf16
    assert kept[1] + weights < kept[0]


def test_autocast_keeps_the_cast_of_a_weight_that_is_made_in_forward() -> None:
    """The weight itself is gone when the forward ends, and twice as large."""
    model, made = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 24)), nn.Parameter(torch.randn(24, 16))
    laconic.compress_activations(model, bits=8, block_size=16)
    weight = made * 0.5
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.func.functional_call(model, {"1.weight": weight}, (torch.randn(5, 16),))
    gone = weakref.ref(weight.untyped_storage())
    del weight
    gc.collect()
    assert gone() is None
    y.float().sum().backward()
    assert made.grad is not None


@pytest.mark.parametrize("change", ["in place", "unseen"])
def test_a_weight_that_changes_under_autocast_is_refused(change: str) -> None:
    model = Two(16, True)
    laconic.compress_activations(model, bits=8, block_size=16)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(torch.randn(3, 16, requires_grad=True))
    with torch.no_grad():
        model.second.weight.add_(1) if change == "in place" else model.second.weight.data.add_(1)
    with pytest.raises((RuntimeError, ModelError), match=r"modified by an inplace operation|holds other values"):
        y.float().sum().backward()


def again(function: Callable[..., Any], x: Tensor, *others: Tensor, module: nn.Module | None = None) -> tuple[Any, Any]:
    owner = nn.Module() if module is None else module
    own = dict(owner.named_parameters())
    run = SecondRun("a site", function, (held(x),), owner, own, Replay(x.device, owner))
    return run, run.first(x, *others)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "with gaps"])
@pytest.mark.parametrize("outer", [False, True])
def test_a_second_run_gives_the_gradients_of_the_first(layout: str, outer: bool) -> None:
    def code(x: Tensor, other: Tensor, flag: Tensor) -> tuple[Tensor, Tensor]:
        weights = (x @ other.mT).masked_fill(flag, -3.0).softmax(-1)
        return weights @ other, F.dropout(weights, 0.5)

    found = []
    for twice in (False, True):
        torch.manual_seed(0)
        x, other = torch.randn(4, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
        y, flag = x * 1, torch.tensor([[True], [False], [False], [True]]).expand(4, 6)
        y = {"contiguous": y, "transposed": (x.t().contiguous() * 1).t(), "with gaps": torch.cat((y, y), 1)[:, :8]}[
            layout
        ]
        with torch.autograd.graph.save_on_cpu() if outer else torch.enable_grad():
            value = again(code, y, other, flag)[1] if twice else code(y, other, flag)
        drawn = torch.rand(1)
        total = value[0].square().sum() + value[1].square().sum()
        first = torch.autograd.grad(total, (x, other), create_graph=True)
        found.append([*value, drawn, *first, *torch.autograd.grad(first[0].square().sum(), (x, other))])
    assert all(map(torch.equal, *found))


def test_a_second_run_reads_the_parameters_of_the_first() -> None:
    """Which `functional_call` has put in the place of others for the length of a forward."""
    layer, weight = nn.Linear(8, 8, bias=False), torch.randn(8, 8, requires_grad=True)
    grads = []
    for twice in (False, True):

        class Runs(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = layer

            def forward(self, x: Tensor) -> Tensor:
                def code(x: Tensor) -> Tensor:
                    y: Tensor = self.layer(x).sigmoid()
                    return y

                y: Tensor = again(code, x, module=self)[1] if twice else code(x)  # noqa: B023
                return y

        x = torch.arange(16.0).view(2, 8).div(16).requires_grad_()
        y = torch.func.functional_call(Runs(), {"layer.weight": weight}, (x,))
        grads.append(torch.autograd.grad(y.square().sum(), (x, weight)))
    assert all(map(torch.equal, *grads))


def test_a_second_run_that_saves_other_tensors_is_refused() -> None:
    calls = []

    def code(x: Tensor) -> Tensor:
        calls.append(1)
        return x.sin() if len(calls) == 1 else x.sin().cos()

    _, y = again(code, torch.randn(4, requires_grad=True) * 1)
    with pytest.raises(ModelError, match=r"a site runs again .* saves 2 tensors .* the 1 of its first"):
        y.sum().backward()


def test_a_retained_graph_runs_once_per_pass_and_frees_what_it_saved() -> None:
    calls = []

    def code(x: Tensor) -> Tensor:
        calls.append(1)
        return (x.sin() * x).exp()

    x = torch.randn(4, requires_grad=True)
    run, y = again(code, x * 1)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    assert len(calls) == 2
    assert not any(x is not None for x in run._values)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], first)
    assert len(calls) == 3
    assert not any(x is not None for x in run._values)


def test_what_a_second_run_saved_is_freed_with_its_backward() -> None:
    """Also outputs, whose node holds the hooks that they were given to."""
    freed = []

    def code(x: Tensor) -> Tensor:
        y = x.exp()
        weakref.finalize(y, freed.append, 1)
        return y * x

    gc.disable()  # a cycle would wait for it
    try:
        _, y = again(code, torch.randn(4, requires_grad=True) * 1)
        y.sum().backward()
        assert len(freed) == 2
    finally:
        gc.enable()


def test_tensors_in_nests_of_arguments_are_held_like_others() -> None:
    x, bias = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    mask, cache = torch.ones(4), object()

    def code(x: Tensor, scale: float, parts: Any, *, more: Any, other: object) -> Tensor:
        assert other is cache
        return (x.exp() * parts[0] + more["bias"][0]).sin() * scale * parts[1]

    args, kwargs = (2.0, [mask, 3.0]), {"more": {"bias": (bias,)}, "other": cache}
    exact = torch.autograd.grad(code(x, *args, **kwargs).sum(), (x, bias))  # type: ignore[arg-type]

    def twice() -> Tensor:
        call, others = BoundFunction.of(code, 1, args, kwargs)
        assert [id(other) for other in others] == [id(mask), id(bias)]
        y: Tensor = again(call, x * 1, *others)[1]
        return y.sum()

    assert all(map(torch.equal, torch.autograd.grad(twice(), (x, bias)), exact))
    y = twice()
    mask.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
