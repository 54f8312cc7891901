"""Updates in backward: the bits of updates after it, no gradient left, and nothing that needs all gradients passes."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import laconic
from laconic.errors import ConfigError, TrainingError
from laconic.optim import AdamW4bit, AdamW8bit, adamw
from laconic.optim.in_backward import UsedGradient
from tests.activations.models import alive_gradients, loss_of, make_ids
from tests.activations.models import make_model as make_llama

WORDS = 300


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """With tied weights, vectors, and a layer whose parameters one backward leaves out."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(WORDS, 64),
        nn.Linear(64, 256),
        nn.GELU(),
        nn.Linear(256, 64),
        nn.LayerNorm(64),
        nn.Linear(64, WORDS, bias=False),
    )
    model[5].weight = model[0].weight
    return model.to(dtype)


def backward(model: nn.Module, seed: int = 0) -> None:
    ids = torch.randint(0, WORDS, (4, 16), generator=torch.Generator().manual_seed(seed))
    F.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten()).backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(steps):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def in_backward(model: nn.Module, kind: type[AdamW8bit] = AdamW8bit, **options: Any) -> AdamW8bit:
    optimizer = kind(model.parameters(), lr=1e-2, **options)
    optimizer.update_in_backward()
    return optimizer


def same(one: nn.Module, two: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", [AdamW8bit, AdamW4bit])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_moments_have_the_bits_of_updates_after_backward(kind: type[AdamW8bit], dtype: torch.dtype) -> None:
    usual, model = make_model(dtype), make_model(dtype)
    exact, optimizer = kind(usual.parameters(), lr=1e-2), in_backward(model, kind)
    train(usual, exact)
    train(model, optimizer)
    assert not same(model, make_model(dtype))
    assert same(model, usual)
    for p, q in zip(model.parameters(), usual.parameters(), strict=True):
        assert all(torch.equal(optimizer.state[p][key], value) for key, value in exact.state[q].items())


def test_one_gradient_is_alive_at_a_time() -> None:
    model = make_model()
    counts = alive_gradients(model)
    optimizer = in_backward(model)
    backward(model)
    assert (len(counts), max(counts)) == (7, 1)
    assert all(isinstance(parameter.grad, UsedGradient) for parameter in model.parameters())
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_compressed_activations_and_a_chunked_loss_change_nothing() -> None:
    usual, model = make_llama("llama"), make_llama("llama")
    ids = make_ids()
    for one in (usual, model):
        laconic.compress_activations(one, bits=4, loss="chunked")
    optimizers = (AdamW8bit(usual.parameters()), in_backward(model))
    optimizers[1].param_groups[0]["lr"] = optimizers[0].param_groups[0]["lr"]
    for _ in range(3):
        for one, optimizer in zip((usual, model), optimizers, strict=True):
            loss_of(one, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert same(usual, model)


def unscale(_: nn.Module, optimizer: AdamW8bit) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


USES: dict[str, Callable[[nn.Module, AdamW8bit], Any]] = {
    "clipping by norm": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "clipping by value": lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "a second backward": lambda model, _: backward(model),
    "a norm": lambda model, _: [p.grad.norm() for p in model.parameters() if p.grad is not None],
    "reading on the host": lambda model, _: next(model.parameters()).grad.tolist(),  # type: ignore[union-attr]
    "a gradient scaler": unscale,
    "another optimizer": lambda model, _: torch.optim.AdamW(model.parameters()).step(),
    "zeros": lambda model, _: model.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("use", USES)
def test_what_needs_gradients_after_backward_is_refused(use: str) -> None:
    model = make_model()
    optimizer = in_backward(model)
    backward(model)
    with pytest.raises(
        (TrainingError, RuntimeError), match=r"used for its update already|not supported for tensor subclasses"
    ):
        USES[use](model, optimizer)


def test_ddp_is_refused(one_rank: None) -> None:
    model = make_model()
    optimizer = in_backward(model)
    assert optimizer.param_groups
    wrapped = nn.parallel.DistributedDataParallel(model)
    with pytest.raises(TrainingError, match="used for its update already"):
        backward(wrapped)


@pytest.mark.parametrize("first", ["codes", "updates"])
def test_gradients_in_codes_are_refused(first: str) -> None:
    model = make_model()
    if first == "codes":
        gradients = laconic.compress_gradients(model)
        optimizer = in_backward(model)
    else:
        optimizer = in_backward(model)
        gradients = laconic.compress_gradients(model)
    assert optimizer.param_groups
    assert gradients is not None
    with pytest.raises(TrainingError, match="update_in_backward"):
        backward(model)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")
def test_fsdp2_updates_its_shards_in_backward(one_rank: None) -> None:
    models = [make_model(), make_model()]
    for model in models:
        model[5].weight = nn.Parameter(model[5].weight.detach().clone())  # FSDP2 takes no weight for two units
        for number in (1, 3, 5):
            fully_shard(model[number])
        fully_shard(model)
    usual, model = models
    train(usual, AdamW8bit(usual.parameters(), lr=1e-2))
    optimizer = in_backward(model)
    train(model, optimizer)
    assert same(usual, model)
    backward(model)
    assert all(isinstance(parameter.grad, UsedGradient) for parameter in model.parameters())


def test_parameters_that_are_replaced_or_added_are_updated_all_the_same() -> None:
    usual, model = make_model(), make_model()
    optimizers = AdamW8bit(usual.parameters(), lr=1e-2), in_backward(model)
    for one, optimizer in zip((usual, model), optimizers, strict=True):
        fresh = nn.Parameter(one[1].weight.detach().clone())
        place = next(n for n, p in enumerate(optimizer.param_groups[0]["params"]) if p is one[1].weight)
        optimizer.param_groups[0]["params"][place] = one[1].weight = fresh  # without a hook: step() updates it
        one.append(nn.Linear(WORDS, WORDS))
        nn.init.eye_(one[6].weight)
        nn.init.zeros_(one[6].bias)
        optimizer.add_param_group({"params": list(one[6].parameters()), "lr": 1e-3})
        train(one, optimizer)
    assert same(usual, model)
    backward(model)
    assert not isinstance(model[1].weight.grad, UsedGradient)
    assert isinstance(model[6].weight.grad, UsedGradient)


def test_a_state_that_is_loaded_goes_on_in_backward() -> None:
    usual, model = make_model(), make_model()
    exact, optimizer = AdamW8bit(usual.parameters(), lr=1e-2), in_backward(model)
    train(usual, exact)
    model.load_state_dict(usual.state_dict())
    optimizer.load_state_dict(exact.state_dict())
    for one, its in ((usual, exact), (model, optimizer)):
        backward(one)
        its.step()
    assert same(usual, model)


@pytest.mark.parametrize("updates_in_backward", [False, True])
def test_a_second_optimizer_does_not_miss_its_updates_in_silence(updates_in_backward: bool) -> None:
    model = make_model()
    optimizer, other = in_backward(model), AdamW8bit(model.parameters())
    if updates_in_backward:
        other.update_in_backward()
        with pytest.raises(TrainingError, match=r"another optimizer, .* has used the gradient of"):
            backward(model)
        return
    backward(model)
    with pytest.raises(TrainingError, match=r"another optimizer, .* has used the gradient of"):
        other.step()
    optimizer.zero_grad()
    del optimizer
    gc.collect()
    before = model[1].weight.detach().clone()
    backward(model)
    other.step()
    assert not torch.equal(model[1].weight, before)


@pytest.mark.parametrize("shape", [(64, 128), (8, 8)])
def test_gradients_of_another_dtype_are_used(shape: tuple[int, int]) -> None:
    ends = []
    for in_backward in (False, True):
        p = nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))
        p.grad_dtype = torch.float32
        optimizer = AdamW8bit([p], lr=0.1)
        if in_backward:
            optimizer.update_in_backward()
        for seed in range(3):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
            (p.float() * x).sum().backward()
            assert p.grad is not None
            assert p.grad.dtype == torch.float32
            optimizer.step()
            optimizer.zero_grad()
        ends.append(p.detach())
    assert torch.equal(*ends)


def test_copies_update_in_step_and_the_optimizer_can_go() -> None:
    model = make_model()
    optimizer = in_backward(model)
    twin, its = copy.deepcopy((model, optimizer))
    backward(twin)
    before = twin[1].weight.detach().clone()
    its.step()
    assert not torch.equal(before, twin[1].weight)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    backward(model)
    assert not isinstance(model[1].weight.grad, UsedGradient)


def test_frozen_parameters_are_left_and_updated_in_step_once_they_are_trained() -> None:
    usual, model = make_model(), make_model()
    for one in (usual, model):
        one[1].requires_grad_(False)
    exact, optimizer = AdamW8bit(usual.parameters(), lr=1e-2), in_backward(model)
    train(usual, exact)
    train(model, optimizer)
    for one, its in ((usual, exact), (model, optimizer)):
        one[1].requires_grad_(True)
        train(one, its)
    assert same(usual, model)


@pytest.mark.parametrize("move", [nn.Module.bfloat16, lambda model: model.to("meta")], ids=["dtype", "device"])
def test_a_model_can_move_before_its_gradients_are_let_go_of(move: Callable[[nn.Module], nn.Module]) -> None:
    model = make_model()
    optimizer = in_backward(model)
    backward(model)
    move(model)
    for parameter in model.parameters():
        assert isinstance(parameter.grad, UsedGradient)
        assert (parameter.grad.dtype, parameter.grad.device) == (parameter.dtype, parameter.device)
    optimizer.zero_grad()


def test_it_is_called_once_and_takes_no_factor() -> None:
    optimizer = in_backward(make_model())
    with pytest.raises(ConfigError, match="was called before"):
        optimizer.update_in_backward()
    with pytest.raises(ConfigError, match="gradient_factor is given"):
        optimizer.step(gradient_factor=torch.ones(()))


def test_a_parameter_that_has_no_shape_yet_is_refused_before_any_gets_its_hook() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4))
    optimizer = AdamW8bit(model.named_parameters())
    with pytest.raises(ConfigError, match=r"parameter 1\.weight gets its shape in a first forward.*run the model once"):
        optimizer.update_in_backward()
    backward_of = lambda: model(torch.randn(2, 4)).sum().backward()  # noqa: E731
    backward_of()
    assert all(type(p.grad) is Tensor for p in model.parameters())
    optimizer.zero_grad()
    optimizer.update_in_backward()
    backward_of()
    assert all(isinstance(p.grad, UsedGradient) for p in model.parameters())


def test_options_that_are_written_later_are_checked_before_an_update() -> None:
    model = make_model()
    optimizer = in_backward(model)
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ConfigError, match="lr is nan"):
        backward(model)
    assert same(model, make_model())


def test_options_are_checked_once_per_group_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, checked = make_model(), list[int]()
    groups = [{"params": model[:3].parameters()}, {"params": model[3:5].parameters()}]
    optimizer = AdamW8bit(groups)
    optimizer.update_in_backward()
    plain = adamw._read_options
    monkeypatch.setattr(adamw, "_read_options", lambda group: (checked.append(len(group["params"])), plain(group))[1])
    for number in (1, 2):
        backward(model, number)
        assert sorted(checked) == sorted([3, 4] * number)
        optimizer.zero_grad()
    optimizer.param_groups[1]["eps"] = -1.0
    with pytest.raises(ConfigError, match=r"eps is -1\.0"):
        backward(model, 3)


class Reads(TorchDispatchMode):
    """Counts how often the host reads a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self._tensor = tensor
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default and args[0] is self._tensor
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("updates_in_backward", [True, False])
def test_a_rate_that_is_a_tensor_is_read_once_per_step_and_group(updates_in_backward: bool) -> None:
    models, rate = [make_model(), make_model()], torch.tensor(1e-2)
    usual, optimizer = (AdamW8bit(one.parameters(), lr=lr) for one, lr in zip(models, (rate.item(), rate), strict=True))
    if updates_in_backward:
        optimizer.update_in_backward()
    for number in (1, 2):
        for one, its in zip(models, (usual, optimizer), strict=True):
            with Reads(rate) as reads:
                backward(one, number)
                its.step()
            assert reads.count == (its is optimizer)
            its.zero_grad()
    assert same(*models)
