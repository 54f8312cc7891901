"""Programs set torch's default dtype and device for their own tensors; ours do not follow them.

A buffer in the caller's default dtype would hand a kernel half of the memory that it writes to.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import laconic
from tests.distributed.processes import run_joined

SOURCE = Path(__file__).resolve().parents[1] / "src" / "laconic"
FLOATS = {"empty", "zeros", "ones", "rand", "randn", "linspace", "eye", "normal", "empty_strided"}
FACTORIES = FLOATS | {"full", "tensor", "arange", "randint", "randperm", "scalar_tensor"}
USUAL = {  # runs under `usual_numbers`, or under the self-check's own device
    "activations/recognize/mixture.py",
    "activations/recognize/sites.py",
    "activations/whole_model/causal_loss.py",
    "activations/whole_model/head.py",
}


def follows_defaults(code: str) -> Iterator[str]:
    """Calls that make a tensor in the caller's default dtype or on its default device."""
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if ast.unparse(node.func.value) != "torch" or (name := node.func.attr) not in FACTORIES:
            continue
        given = {keyword.arg for keyword in node.keywords}
        literals = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
        is_float = name in FLOATS or (
            name in ("full", "tensor", "scalar_tensor") and any(isinstance(value, float) for value in literals)
        )
        if "device" not in given or (is_float and "dtype" not in given):
            yield ast.unparse(node)


def test_the_gate_finds_what_follows_defaults() -> None:
    for code in ("torch.empty(3, device=d)", "torch.arange(3)", "torch.tensor([0.5], device=d)"):
        assert list(follows_defaults(code)) == [code]
    for code in ("torch.empty(3, dtype=t, device=d)", "torch.tensor([n], device=d)", "x.new_empty(3)"):
        assert not list(follows_defaults(code))


def test_no_tensor_of_ours_follows_defaults() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 300
    found = {path.relative_to(SOURCE).as_posix(): list(follows_defaults(path.read_text())) for path in files}
    assert {name: calls for name, calls in found.items() if calls and name not in USUAL} == {}


@contextmanager
def defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    """As a program sets them."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)


OTHERS = [(torch.bfloat16, "meta"), (torch.float64, "cpu")]


def _made() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)), torch.randint(0, 64, (2, 16))


def _steps(model: nn.Module, ids: Tensor, loss: str) -> list[Tensor]:
    laconic.compress_activations(model, bits=4, attention="int8", loss=loss)
    optimizer = laconic.AdamW8bit(model.parameters(), lr=1e-2)
    laconic.audit(model, {"input_ids": ids, "labels": ids}, optimizer=optimizer)
    losses = []
    for _ in range(2):
        found = model(input_ids=ids, labels=ids).loss
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(found.detach())
    return [*losses, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("loss", ["exact", "chunked"])
def test_a_step_has_the_same_bits_whatever_the_defaults(loss: str) -> None:
    expected = _steps(*_made(), loss)
    for dtype, device in OTHERS:
        model, ids = _made()
        with defaults(dtype, device):
            found = _steps(model, ids, loss)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), (dtype, device)


def _joined(world: Any) -> None:
    torch.manual_seed(world.rank)
    x = torch.randn(5000)
    made, ids = _made()

    def run() -> list[Tensor]:
        parts = x.new_empty(world.size * len(x))
        laconic.collectives.all_gather(parts, x, codec=laconic.collectives.Lossless())
        total = x.clone()
        laconic.collectives.all_reduce(total, codec=laconic.collectives.Lossless())
        model = copy.deepcopy(made)
        gradients = laconic.compress_gradients(model, dist.group.WORLD, bits=8)
        optimizer = laconic.AdamW8bit(model.parameters(), lr=1e-2)
        with gradients.last_micro_batch():
            model(input_ids=ids, labels=ids).loss.backward()
        gradients.reduce()
        gradients.clip_(1.0)
        optimizer.step()
        return [parts, total, *(p.detach() for p in model.parameters())]

    expected = run()
    for dtype, device in OTHERS:
        with defaults(dtype, device):
            found = run()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), (dtype, device)


def test_ranks_exchange_the_same_bits_whatever_the_defaults() -> None:
    run_joined(_joined, (), 2)
