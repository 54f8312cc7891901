"""A compressed model asks a device for no value, size or copy: the host runs ahead, and graphs can hold it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attend

import laconic
from laconic.activations.host.cuda_graph import without_draws
from laconic.activations.keep.offload import CudaCopier
from laconic.activations.keep.witnesses import ALWAYS
from laconic.activations.whole_model.loss import ROWS
from laconic.errors import ModelError
from tests.activations.models import gradients_of, make_ids, make_model
from tests.streams.cuda import CUDA, _Event, counted_waits, cuda

ATTENTION = ("exact", "int8", "nf4", "recompute")


def compressed(family: str = "llama", overrides: dict[str, Any] | None = None, **options: Any) -> nn.Module:
    model = make_model(family, **(overrides or {}))
    laconic.compress_activations(model, sequence_length=4, **options)
    return model


def step(model: nn.Module, ids: Tensor) -> Tensor:
    """The causal loss, forward and backward, with the same draws every time."""
    torch.manual_seed(0)
    loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss


def _refused(*_: object) -> NoReturn:
    raise RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture.")


@contextmanager
def capture() -> Iterator[None]:
    """What torch.cuda says and refuses while a CUDA graph is captured."""
    generators = {"get_rng_state": _refused, "set_rng_state": _refused}
    with (
        mock.patch.multiple(torch.cuda, is_current_stream_capturing=lambda: True, **generators),
        mock.patch.multiple(_Event, query=_forbidden, synchronize=_forbidden),
    ):
        yield


def _forbidden(*_: object) -> NoReturn:
    raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


def on_device(model: nn.Module) -> nn.Module:
    """The same values in the device's memory; tied parameters stay tied."""
    moved: dict[int, Tensor] = {}

    def move(x: Tensor) -> Tensor:
        if id(x) not in moved:
            there = x.detach().to(CUDA)
            moved[id(x)] = nn.Parameter(there, x.requires_grad) if isinstance(x, nn.Parameter) else there
        return moved[id(x)]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({name: move(x) for name, x in tensors.items() if x is not None})
    return model


def check_step(model: nn.Module) -> None:
    """A step of `model` captured after another on the device gives the CPU's bits, and its host waits for nothing."""
    ids = make_ids(length=32)
    twin = copy.deepcopy(model)
    loss = step(model, ids)
    expected = gradients_of(model)
    with cuda() as device:
        on_device(twin)
        there = ids.to(CUDA)
        step(twin, there)  # leaves checks that the device has not made
        twin.zero_grad(set_to_none=True)
        with capture(), counted_waits(device) as waits:
            found = step(twin, there)
            assert not waits
        assert torch.equal(found.detach().cpu(), loss.detach())
        for name, grad in gradients_of(twin).items():
            assert torch.equal(grad.cpu(), expected[name]), name


def test_steps_without_witnesses_are_those_of_the_cpu() -> None:
    """The first forwards of a model have witnesses, and later ones have not."""
    model = compressed(bits=4, attention="int8")
    ids = make_ids(length=16)
    losses = [step(model, ids).detach() for _ in range(2)]
    with cuda():
        on_device(model)
        model.forward._num_forwards = ALWAYS - 1  # type: ignore[union-attr]
        there = ids.to(CUDA)
        for loss in losses:
            assert torch.equal(step(model, there).detach().cpu(), loss)


@pytest.mark.parametrize(
    ("bits", "attention"),
    [
        # Each of both once by default.
        pytest.param(bits, attention, marks=[] if number == place else pytest.mark.slow)
        for place, attention in enumerate(ATTENTION)
        for number, bits in enumerate((4, 5, 6, 8))
    ],
)
def test_a_captured_step_asks_nothing_of_the_device(bits: int, attention: str) -> None:
    check_step(compressed(bits=bits, attention=attention))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"loss": "chunked"}),
        *(
            pytest.param(name, {}, marks=pytest.mark.slow)
            for name in ("qwen3", "gemma2", "phi3", "opt", "gptj", "bloom")
        ),
    ],
)
def test_other_losses_and_families_ask_nothing_either(
    family: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ROWS, "cpu", ROWS["cuda"])  # gradients where a GPU makes them
    check_step(compressed(family, **options))


def test_dropout_is_drawn_again_and_in_a_captured_graph_refused() -> None:
    model = compressed("gpt2", {"attn_implementation": "eager"})
    with cuda() as device:
        on_device(model)
        ids = make_ids(length=32).to(CUDA)
        state = torch.zeros(16, dtype=torch.uint8)
        generators = {"get_rng_state": lambda _: state, "set_rng_state": lambda *_: None}
        with mock.patch.multiple(torch.cuda, **generators):
            step(model, ids)  # the first one compares torch's kernels of norms with their steps
            with counted_waits(device) as waits:
                step(model, ids)
            assert len(waits) <= 1  # transformers looks at its mask
        with capture(), pytest.raises(ModelError, match=r"aten\.\w+\.\w+ draws random numbers while a CUDA graph"):
            step(model, ids)


def test_a_recomputed_block_that_draws_is_refused_in_a_captured_graph() -> None:
    def block(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5)

    with cuda():
        x = torch.ones(64, 64, device=CUDA).requires_grad_()
        with capture(), pytest.raises(ModelError, match="draws random numbers while a CUDA graph"):
            laconic.activations.checkpoint(block, x)
        with capture():
            laconic.activations.checkpoint(torch.sin, x).sum().backward()
        assert torch.allclose(x.grad.cpu(), torch.full((64, 64), 1.0).cos(), atol=0.01)


def test_attention_that_is_tagged_as_random_may_run_without_dropout() -> None:
    query = torch.randn(1, 2, 8, 16)
    with without_draws():
        attend(query, query, query, dropout_p=0.0)
        with pytest.raises(ModelError, match="draws random numbers"):
            attend(query, query, query, dropout_p=0.5)
        with pytest.raises(ModelError, match="draws random numbers"):
            torch.rand(3)


def test_offload_is_refused_in_a_captured_graph() -> None:
    with cuda():
        x = torch.ones(8, device=CUDA)
        copier = CudaCopier(CUDA)
        with capture(), pytest.raises(ModelError, match="offloaded to host memory while a CUDA graph is captured"):
            copier.send((x,))
        assert copier.send((x,))[0][0].tolist() == [1.0] * 8
