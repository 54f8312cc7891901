"""What is alive between forward and backward: no more than what is counted, and nothing that hooks around take away."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import laconic
from laconic import BlockFormat
from laconic.activations import ActivationPlan, Recompute, SavedTensorTracker, find_sites
from laconic.activations.recognize.sites import Site
from tests.activations.models import make_ids, make_model
from tests.grid import grid

NF4 = BlockFormat("nf4")
SMALL = 1 << 11
"""Bytes of a storage that does not count: a scalar, a row of positions."""


def counts(nbytes: int) -> bool:
    """Whether a storage of so many bytes counts: the state of torch's generator, which no operation makes, does not."""
    return nbytes > SMALL and nbytes != torch.get_rng_state().numel()


class Made(TorchDispatchMode):
    """Notes the storages that operations make."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}  # of what was there before, no bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note((args, kwargs), is_made=False)
        result = func(*args, **(kwargs or {}))
        self._note(result, is_made=True)
        return result

    def _note(self, nest: Any, *, is_made: bool) -> None:
        for x in tree_leaves(nest):
            if type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided:
                storage = x.untyped_storage()
                nbytes = storage.nbytes() if is_made else 0
                self._seen.setdefault(storage._cdata, (StorageWeakRef(storage), nbytes))

    @property
    def nbytes(self) -> int:
        """Of those that are alive and not small."""
        alive = (nbytes for storage, nbytes in self._seen.values() if not storage.expired())
        return sum(filter(counts, alive))


def planned(model: nn.Module, choose: Callable[[Site], Any], layers: Any = ()) -> dict[str, Any]:
    return {"plan": ActivationPlan({site.name: choose(site) for site in find_sites(model)}, dict(layers))}


def recomputed(model: nn.Module) -> dict[str, Any]:
    return planned(model, lambda site: Recompute() if site.kind in ("mlp", "attention") else NF4)


def layers_again(model: nn.Module) -> dict[str, Any]:
    names = [name for name, _ in model.named_modules() if re.fullmatch(r"\w+\.\w+\.\d+", name)]
    return planned(model, lambda site: NF4, {name: BlockFormat("int8") for name in names})


def checkpointed(model: nn.Module) -> dict[str, Any]:
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    return {}


WAYS: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "exact": lambda model: {"bits": 16},
    "2 bits": lambda model: {"bits": 2},
    "4 bits": lambda model: {"bits": 4},
    "attention exact": lambda model: {"attention": "exact"},
    "attention recompute": lambda model: {"attention": "recompute"},
    "combined": lambda model: {"mode": "combined"},
    "hooks": lambda model: {"mode": "hooks"},
    "recompute": recomputed,
    "layers": layers_again,
    "checkpointed": checkpointed,
}

FAMILIES = ("llama", "gpt2", "mixtral", "mamba", "bloom")


def ready(family: str, way: str) -> nn.Module:
    model = make_model(family).train()
    laconic.compress_activations(model, **WAYS[way](model))
    return model


def loss_of(model: nn.Module, ids: Tensor, around: AbstractContextManager[Any] | None = None, **options: Any) -> Tensor:
    with nullcontext() if around is None else around:
        loss: Tensor = model(input_ids=ids, labels=ids, **{"use_cache": False, **options}).loss
    return loss


def of_host(family: str, way: str) -> int:
    """Bytes that transformers holds for its checkpoints without saving them: positions or, for Bloom, a mask."""
    return 0 if way != "checkpointed" else 2 * 48 * 48 * 4 if family == "bloom" else 2 * 48 * 16 * 4


def alive_nbytes(forward: Callable[[], Tensor]) -> int:
    """Bytes that a forward leaves, once what it returned beside its loss is gone; nothing may be left by its backward.

    The first two forwards try code, and make what stays.
    """
    for _ in range(2):
        forward().backward()
    made = Made()
    with made:
        loss = forward()
    gc.collect()
    nbytes = made.nbytes
    loss.backward()
    del loss
    return nbytes


def counted_nbytes(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    with SavedTensorTracker(model) as tracker:
        loss = forward()
    del loss
    return sum(x.nbytes for x in tracker.tensors if counts(x.nbytes))


@contextmanager
def taken_away() -> Iterator[None]:
    """Hooks that hold bytes in memory that torch knows nothing of."""

    def take(x: Tensor) -> Any:
        if x.is_leaf and x.requires_grad:
            return x
        return bytearray(x.detach().contiguous().reshape(-1).view(torch.uint8).numpy()), x.dtype, x.shape, x.stride()

    def give(taken: Any) -> Tensor:
        if isinstance(taken, Tensor):
            return taken
        values, dtype, shape, stride = taken
        if not values:
            return torch.empty(shape, dtype=dtype)
        x = torch.frombuffer(values, dtype=dtype).view(shape).clone()
        return torch.empty_strided(shape, stride, dtype=dtype).copy_(x)

    with torch.autograd.graph.saved_tensors_hooks(take, give):
        yield


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize(
    ("family", "way", "cache", "autocast"), grid(FAMILIES, list(WAYS), [True, False], [False, True], strength=1)
)
def test_nothing_is_alive_that_is_not_counted_or_that_hooks_around_leave(
    family: str, way: str, cache: bool, autocast: bool
) -> None:
    """Also where a cache of keys and values is filled, which ends with the forward.

    Hooks take all as `save_on_cpu` and those that write files do: no codes stay behind.
    """
    model, ids = ready(family, way), make_ids()

    def forward(around: AbstractContextManager[Any]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return loss_of(model, ids, around, use_cache=cache)

    alive = alive_nbytes(lambda: forward(nullcontext()))
    counted = counted_nbytes(model, lambda: forward(nullcontext()))
    assert abs(alive - counted) <= 0.01 * counted + of_host(family, way), (alive, counted)
    left = alive_nbytes(lambda: forward(taken_away()))
    assert left <= of_host(family, way) + 0.05 * alive, (left, alive)


def test_weights_that_a_forward_computes_are_counted() -> None:
    """As those of a hypernetwork, which are gone when it has no graph."""
    model, ids = ready("llama", "4 bits"), make_ids()
    name = "model.layers.0.mlp.up_proj.weight"
    made = nn.Parameter(torch.randn(model.get_parameter(name).shape) * 0.02)

    def forward() -> Tensor:
        given = {"input_ids": ids, "labels": ids, "use_cache": False}
        loss: Tensor = torch.func.functional_call(model, {name: made * 0.5}, (), given).loss
        return loss

    alive, counted = alive_nbytes(forward), counted_nbytes(model, forward)
    assert abs(alive - counted) <= 0.01 * counted, (alive, counted)


def test_hooks_around_take_all_of_a_convolutional_network() -> None:
    parts = [part for _ in range(3) for part in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())]
    model, x = nn.Sequential(*parts), torch.randn(4, 8, 16, 16)
    laconic.compress_activations(model, bits=4)

    def forward(around: AbstractContextManager[Any]) -> Tensor:
        with around:
            return model(x).sum()  # type: ignore[no-any-return]

    whole, left = alive_nbytes(lambda: forward(nullcontext())), alive_nbytes(lambda: forward(taken_away()))
    assert left <= 0.05 * whole, (left, whole)


@pytest.mark.parametrize("way", ["exact", "4 bits", "attention recompute", "combined", "hooks", "layers"])
def test_backward_lets_go_of_one_layer_after_the_other(way: str) -> None:
    model, ids = make_model("llama", num_hidden_layers=6).train(), make_ids()
    laconic.compress_activations(model, **WAYS[way](model))
    loss_of(model, ids).backward()
    at: list[int] = []
    made = Made()

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        x.register_hook(lambda grad: at.append(made.nbytes))

    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.register_forward_pre_hook(note, with_kwargs=True)
    with made:
        loss = loss_of(model, ids)
    whole = made.nbytes
    loss.backward()
    assert len(at) == 6
    assert all(b < a for a, b in pairwise(at)), at
    assert at[-1] <= 0.1 * whole, (at, whole)
