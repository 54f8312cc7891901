"""What is attached to experts before and after `parallelize`: hooks, ties, marks, gradients; kept or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from laconic.errors import ConfigError, ModelError, TrainingError
from laconic.formats import CodedGradient
from laconic.formats.shards import local_part
from laconic.gradients import compress_gradients
from laconic.moe import ChunkedSchedule, copy_hot_experts
from laconic.moe.huggingface import parallelize
from laconic.moe.parallel.grid import Grid
from laconic.optim import AdamW8bit
from tests.activations.models import make_ids, make_model
from tests.moe.huggingface.test_parallelize import close
from tests.moe.worlds import run_world


def _model(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    return make_model("qwen3_moe", experts_implementation="eager", **changes).double().train()


def _experts(model: nn.Module, layer: int = 0) -> nn.Module:
    return model.get_submodule(f"model.layers.{layer}.mlp.experts")


def _backward(model: nn.Module, rank: int = 0) -> None:
    ids = make_ids(2, 8) if not rank else make_ids(2, 8).flip(1)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


def _shifted(seen: list[Any], _: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
    seen.append([tuple(x.shape) for x in (*args, out)])
    return out + 0.1 * args[0].square()


def _scaled_input(seen: list[Any], _: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    seen.append([tuple(x.shape) for x in args])
    return args[0].sin(), *args[1:]


def _doubled(seen: list[Any], _: nn.Module, inward: Any, outward: tuple[Tensor, ...]) -> Any:
    seen.append([tuple(x.shape) for x in outward])
    return (inward[0] * 2 + inward[0].square(), *inward[1:])


def _squared(seen: list[Any], _: nn.Module, outward: tuple[Tensor, ...]) -> Any:
    seen.append([tuple(x.shape) for x in outward])
    return (outward[0] + outward[0].square(),)


HOOKS: dict[str, tuple[str, Callable[..., Any]]] = {
    "forward": ("register_forward_hook", _shifted),
    "before forward": ("register_forward_pre_hook", _scaled_input),
    "backward": ("register_full_backward_hook", _doubled),
    "before backward": ("register_full_backward_pre_hook", _squared),
}


def _hooked(name: str, before: bool, grid: Grid | None, rank: int = 0) -> tuple[nn.Module, nn.Module, list[Any]]:
    """A model and its parallelized twin with a hook on their experts, after a backward; what the twin's hook saw."""
    method, hook = HOOKS[name]
    model, seen = _model(norm_topk_prob=False), []
    twin = copy.deepcopy(model)
    getattr(_experts(model), method)(partial(hook, []))
    handles = [getattr(_experts(twin), method)(partial(hook, seen))] if before else []
    done = parallelize(twin, grid)
    handles += [] if before else [getattr(_experts(twin), method)(partial(hook, seen))]
    if grid is None:
        _backward(model)
    else:
        for other in range(grid.dp.size()):
            _backward(model, other)
        for parameter in model.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad / grid.dp.size()
    _backward(twin, rank)
    done.reduce_gradients()
    number = len(seen)
    assert number > 0
    handles[0].remove()
    twin.zero_grad()
    if grid is None:
        _backward(twin)
        assert len(seen) == number, "a hook that was removed"
        twin.zero_grad()
        handles[0] = getattr(_experts(twin), method)(partial(hook, seen))
        _backward(twin)
    return model, twin, seen


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_on_experts_see_and_change_the_call_of_their_block(name: str, before: bool) -> None:
    model, twin, seen = _hooked(name, before, None)
    assert {shape[0] for call in seen for shape in call} == {16}  # tokens, not rows sorted by expert
    for (key, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert a.grad is not None, key
        assert b.grad is not None, key
        assert close(b.grad, a.grad), key


def test_experts_at_two_places_are_refused_and_a_block_at_two_places_is_not() -> None:
    model = _model()
    model.get_submodule("model.layers.1.mlp").experts = _experts(model)
    with pytest.raises(ModelError, match=r"experts is model\.layers\.0\.mlp\.experts and model\.layers\.1\.mlp\.expe"):
        parallelize(model)
    shared = _model()
    shared.get_submodule("model.layers.1").mlp = shared.get_submodule("model.layers.0.mlp")
    twin = copy.deepcopy(shared)
    parallelize(twin)
    for each in (shared, twin):
        _backward(each)
    for a, b in zip(shared.parameters(), twin.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert close(b.grad, a.grad)


@pytest.mark.parametrize(
    "register",
    [
        lambda experts: experts.register_state_dict_post_hook(lambda *_: None),
        lambda experts: experts.register_state_dict_pre_hook(lambda *_: None),
        lambda experts: experts.register_load_state_dict_pre_hook(lambda *_: None),
        lambda experts: experts.register_load_state_dict_post_hook(lambda *_: None),
    ],
)
def test_hooks_on_state_dicts_are_refused(register: Callable[[nn.Module], object]) -> None:
    model = _model()
    register(_experts(model))
    with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp\.experts has .*state_dict.*hooks, which the module"):
        parallelize(model)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT reads it
def test_adapters_around_a_router_that_a_gate_reads_are_refused() -> None:
    peft = pytest.importorskip("peft")
    options = {"target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"]}
    for gate in (None, "softmax"):
        model = _model(norm_topk_prob=True)
        parallelize(model, gate=gate)  # type: ignore[arg-type]  # a name of a gate
        adapted = partial(peft.get_peft_model, model, peft.LoraConfig(r=2, **options))
        if gate is None:
            adapted()
        else:
            with pytest.raises(ConfigError, match=r"router model\.layers\.0\.mlp\.gate, but the gate in its place"):
                adapted()


def test_a_model_that_is_a_module_of_experts_is_refused() -> None:
    with pytest.raises(ModelError, match=r"the model is a module of experts itself \(Qwen3MoeExperts\)"):
        parallelize(_experts(_model()))


def hooks_of_a_pair() -> None:
    rank = dist.get_rank()
    for name in HOOKS:
        _, _, seen = _hooked(name, False, Grid(ep=2), rank)
        assert {shape[0] for call in seen for shape in call} == {16}


def what_is_attached_to_parameters() -> None:
    def refused(change: Callable[[nn.Module], object], message: str) -> None:
        model = _model()
        change(model)
        with pytest.raises(ModelError, match=message):
            parallelize(model, Grid(ep=2))
        parallelize(model)  # the same parameters, with all that they have

    def tie(model: nn.Module) -> None:
        _experts(model, 1).down_proj = _experts(model).down_proj

    refused(tie, r"layers\.0\.mlp\.experts\.down_proj is model\.layers\.0.* and model\.layers\.1.* at once")
    refused(lambda model: _experts(model).down_proj.register_hook(lambda g: 2 * g), "has hooks on its gradient")
    refused(
        lambda model: _experts(model, 1).down_proj.register_post_accumulate_grad_hook(lambda p: None),
        r"layers\.1\.mlp\.experts\.down_proj has hooks on its gradient",
    )
    refused(lambda model: AdamW8bit(model.parameters()).update_in_backward(), "has hooks .*update_in_backward")
    refused(_backward, r"experts\.gate_up_proj has a gradient, which would be lost; call zero_grad")

    model = _model().float()
    gradients = compress_gradients(model)
    parallelize(model, Grid(ep=2))
    gradients.reduce()
    _backward(model)
    gradients.reduce()
    assert all(
        isinstance(local_part(p.grad), CodedGradient) for p in _experts(model).parameters() if p.grad is not None
    )

    model = _model()
    _experts(model).down_proj.no_weight_decay = True
    parallelize(model, Grid(ep=2))
    assert _experts(model).down_proj.no_weight_decay


def weights_that_change_before_backward() -> None:
    """Refused as autograd refuses it of plain parameters: gradients would be of other weights than outputs."""
    for kind in ("plain", "ddp", "chunks", "copies"):
        grid, model = Grid(ep=2), _model()
        done = parallelize(model, grid, schedule=ChunkedSchedule(2, 2) if kind == "chunks" else None)
        if kind == "copies":
            loads = [torch.arange(layer.gate.num_experts) ** 3 for layer in done.layers.values()]
            copy_hot_experts(list(done.layers.values()), grid, 1, loads=loads)
        host = DistributedDataParallel(model) if kind == "ddp" else model
        optimizer, ids = torch.optim.AdamW(done.experts()), make_ids(2, 8)
        for _ in range(2):  # a step behind backward is what there is every time
            host(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            model.zero_grad()
        first, second = (host(input_ids=ids, labels=ids, use_cache=False).loss for _ in range(2))
        (first if kind != "ddp" else first + 0 * second).backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(TrainingError, match="were changed in place between a forward and its backward"):
            (second if kind != "ddp" else first + second).backward()


def test_a_pair_keeps_or_refuses_what_is_attached(tmp_path: Path) -> None:
    run_world([hooks_of_a_pair, what_is_attached_to_parameters, weights_that_change_before_backward], 2, tmp_path)
