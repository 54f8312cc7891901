"""Forwards inside of a backward pass: second runs of checkpoints stay exact, forwards that hooks run are packed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

import laconic
from laconic.activations import SavedTensorTracker
from tests.activations.models import are_equal, cache_name, gradients_of, make_ids, make_model, relative_error
from tests.grid import grid

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


class Tower(nn.Module):
    """An encoder: tokens [batch, length] to embeddings [batch, vocabulary]."""

    def __init__(self, family: str, **options: Any) -> None:
        super().__init__()
        self.model = make_model(family, **options).train()

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits.mean(1)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(97, 64)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2))
        )

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.layers(self.embedding(ids)).mean(1)
        return y


def loss_of_embeddings(embeddings: Tensor) -> Tensor:
    """Contrastive, of all embeddings with each other."""
    embeddings = nn.functional.normalize(embeddings)
    scores = embeddings @ embeddings.roll(1, 0).t()
    return nn.functional.cross_entropy(scores, torch.arange(len(embeddings)))


def on_loss(loss: Tensor, embeddings: Tensor, step: Callable[[], None]) -> Tensor:
    (grad,) = torch.autograd.grad(loss, embeddings)
    embeddings.grad = grad
    loss = loss.detach().requires_grad_()
    loss.register_hook(lambda grad: step())
    return loss


def on_leaf(loss: Tensor, embeddings: Tensor, step: Callable[[], None]) -> Tensor:
    embeddings.register_post_accumulate_grad_hook(lambda _: step())
    return loss


def on_node(loss: Tensor, embeddings: Tensor, step: Callable[[], None]) -> Tensor:
    def hook(*grads: Any) -> None:
        embeddings.grad = ended[0]
        step()

    ended = torch.autograd.grad(loss, embeddings, retain_graph=True)
    node = loss.grad_fn
    assert node is not None
    node.register_prehook(hook)
    return loss


def on_all(loss: Tensor, embeddings: Tensor, step: Callable[[], None]) -> Tensor:
    def hook(grads: Any) -> None:
        embeddings.grad = grads[0]
        step()

    torch.autograd.graph.register_multi_grad_hook([embeddings], hook)
    return loss


def directly(loss: Tensor, embeddings: Tensor, step: Callable[[], None]) -> Tensor:
    """The same outside of any backward."""
    (embeddings.grad,) = torch.autograd.grad(loss, embeddings)
    step()
    return torch.zeros((), requires_grad=True)


HOOKS = {"loss": on_loss, "leaf": on_leaf, "node": on_node, "multi-grad": on_all}


def cached_step(model: nn.Module, ids: Tensor, install: Any) -> tuple[int, dict[str, Tensor]]:
    """Gradients by GradCache: embeddings without graphs, their gradients, then chunk by chunk with graphs, in a hook.

    Returns:
        The bytes that the last chunk's forward in the hook kept, and the gradients.
    """
    with torch.no_grad():
        embeddings = model(ids)
    embeddings = embeddings.detach().requires_grad_()
    kept: list[int] = []

    def step() -> None:
        grad = embeddings.grad
        assert grad is not None
        for chunk, part in zip(ids.split(4), grad.clone().split(4), strict=True):
            with torch.enable_grad():
                with SavedTensorTracker(model) as tracker:
                    again = model(chunk)
                kept.append(tracker.nbytes)
                again.backward(part)

    install(loss_of_embeddings(embeddings), embeddings, step).backward()
    return kept[-1], gradients_of(model)


def kept_outside(model: nn.Module, ids: Tensor) -> int:
    with SavedTensorTracker(model) as tracker:
        model(ids)
    return tracker.nbytes


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: Tower("llama"),
    "qwen3_moe": lambda: Tower("qwen3_moe"),
    "gpt2": lambda: Tower("gpt2", attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0),
    "blocks": Blocks,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "sites": {"bits": 8},
    "recompute": {"bits": 8, "attention": "recompute"},
    "hooks": {"bits": 8, "mode": "hooks"},
    "combined": {"bits": 8, "mode": "combined"},
}


@pytest.mark.parametrize(("name", "options", "hook"), grid(list(MODELS), list(OPTIONS), list(HOOKS), strength=1))
def test_a_forward_in_a_hook_keeps_what_it_keeps_outside(name: str, options: str, hook: str) -> None:
    model, ids = MODELS[name](), make_ids(8, 32)
    exact = kept_outside(model, ids[:4])
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, example_inputs={"ids": ids[:1]}, **OPTIONS[options])
    outside = kept_outside(twin, ids[:4])
    inside, got = cached_step(twin, ids, HOOKS[hook])
    assert inside == outside < 0.7 * exact
    assert are_equal(got, cached_step(twin, ids, directly)[1])


def _all(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradients[name].flatten() for name in sorted(gradients)])


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of torch, where gradients are off
@pytest.mark.parametrize(("name", "use_reentrant"), grid(["llama", "qwen3_moe"], [False, True], strength=1))
def test_checkpoints_in_a_hook_pack_their_inputs(name: str, use_reentrant: bool) -> None:
    model, ids = MODELS[name](), make_ids(8, 32)
    laconic.compress_activations(model, bits=8, example_inputs={"ids": ids[:1]})
    model.model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})  # type: ignore[union-attr]
    outside = kept_outside(model, ids[:4])
    inside, got = cached_step(model, ids, on_loss)
    assert inside == outside
    assert are_equal(got, cached_step(model, ids, directly)[1])


# Second runs


class CheckpointFunction(torch.autograd.Function):
    """As those of DeepSpeed, FairScale and Megatron: forward without a graph, and again in backward."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


class Reversible(CheckpointFunction):
    """One whose name says nothing about its backward."""


CHECKPOINTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "reentrant": lambda run, x: torchs_checkpoint(run, x, use_reentrant=True),
    "not reentrant": lambda run, x: torchs_checkpoint(run, x, use_reentrant=False),
    "of a library": CheckpointFunction.apply,
    "nested": lambda run, x: torchs_checkpoint(
        lambda x: torchs_checkpoint(run, x, use_reentrant=False), x, use_reentrant=True
    ),
}


@pytest.mark.parametrize("mode", ["sites", "hooks", "combined"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_second_run_of_a_checkpoint_stays_exact(name: str, mode: str) -> None:
    blocks, x = Blocks().layers, torch.randn(8, 64, requires_grad=True)
    expected = CHECKPOINTS[name](blocks, x)
    expected.sum().backward()
    exact = gradients_of(blocks)
    laconic.compress_activations(blocks, mode=mode, example_inputs={"input": x})
    got = CHECKPOINTS[name](blocks, x)
    got.sum().backward()
    assert torch.equal(got, expected)
    assert are_equal(gradients_of(blocks), exact)


def test_code_in_the_backward_of_any_other_function_is_packed() -> None:
    blocks, x = Blocks().layers, torch.randn(8, 64, requires_grad=True)
    Reversible.apply(blocks, x).sum().backward()
    exact = gradients_of(blocks)
    laconic.compress_activations(blocks, bits=8)
    Reversible.apply(blocks, x).sum().backward()
    assert 0 < relative_error(_all(gradients_of(blocks)), _all(exact)) < 0.03


@pytest.mark.parametrize("name", ["reentrant", "of a library"])
def test_a_hook_on_what_a_checkpoint_returned_is_no_second_run(name: str) -> None:
    blocks, other, x = Blocks().layers, Blocks().layers, torch.randn(8, 64, requires_grad=True)
    laconic.compress_activations(blocks)
    laconic.compress_activations(other)
    outside = kept_outside(other, x)
    kept: list[int] = []

    def hook(grad: Tensor) -> None:
        with torch.enable_grad():
            kept.append(kept_outside(other, x.detach().requires_grad_()))

    y = CHECKPOINTS[name](blocks, x)
    y.register_hook(hook)
    y.sum().backward()
    assert kept == [outside]


def test_a_cache_is_filled_by_the_first_run_wherever_that_is() -> None:
    from transformers import DynamicCache

    model, ids = make_model("llama").train(), make_ids()
    laconic.compress_activations(model, attention="recompute")
    model(input_ids=ids, use_cache=False).logits.sum().backward()  # in which mixers are tried
    lengths: list[int] = []

    def hook(grad: Tensor) -> None:
        with torch.enable_grad():
            cache = DynamicCache(config=model.config)
            model(input_ids=ids, **{cache_name(): cache}, use_cache=True).logits.sum().backward()
        lengths.append(cache.get_seq_length())

    x = torch.ones((), requires_grad=True)
    x.register_hook(hook)
    x.backward()
    assert lengths == [ids.shape[1]]
