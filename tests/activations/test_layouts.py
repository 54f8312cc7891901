"""Tensors of any layout beside compressed sites, and batches in any nest: counted, left alone, and trained with."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.activations import SavedTensorTracker
from laconic.activations.forwards.checkpoint import packed_inputs
from laconic.activations.host.storages import dense_parts, place_of
from laconic.formats import BlockFormat

NUM_NODES = 64

pytestmark = pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state:UserWarning")

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": Tensor.to_sparse,
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
    "bsr": lambda x: x.to_sparse_bsr((2, 2)),
    "bsc": lambda x: x.to_sparse_bsc((2, 2)),
    "strided": Tensor.clone,
}


def adjacency() -> Tensor:
    torch.manual_seed(1)
    return (torch.rand(NUM_NODES, NUM_NODES) < 0.1).float() + torch.eye(NUM_NODES)


class Graph(nn.Module):
    """Two layers of a graph network, whose neighbors are a buffer of some layout."""

    def __init__(self, neighbors: Tensor) -> None:
        super().__init__()
        self.first, self.second, self.act = nn.Linear(32, 128), nn.Linear(128, 8), nn.GELU()
        self.register_buffer("neighbors", neighbors)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.act(self.neighbors @ self.first(x)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_parts_of_a_tensor_are_what_holds_its_numbers(layout: str) -> None:
    x = LAYOUTS[layout](adjacency())
    parts = dense_parts(x)
    assert all(part.layout == torch.strided for part in parts)
    values = {"coo": lambda: x._values(), "strided": lambda: x}.get(layout, lambda: x.values())()
    assert any(part.data_ptr() == values.data_ptr() for part in parts)
    assert place_of(x) == place_of(x.detach()) != place_of(x.clone())


def test_parts_of_nested_and_opaque_tensors() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
    assert [part.numel() for part in dense_parts(nested)] == [20, 3]
    assert dense_parts(torch.ones(4, 4).to_mkldnn()) == ()


@pytest.mark.parametrize("layout", ["coo", "csr", "strided"])
def test_a_model_with_buffers_of_any_layout_is_compressed_and_trained(layout: str) -> None:
    model = Graph(LAYOUTS[layout](adjacency()))
    exact = Graph(model.neighbors)
    exact.load_state_dict(model.state_dict(), strict=False)
    x = torch.randn(NUM_NODES, 32)
    report = laconic.compress_activations(model, bits=8, example_inputs={"x": x})
    assert report.before is not None
    assert report.after is not None
    assert sum(report.after.by_module.values()) < 0.6 * sum(report.before.by_module.values())
    for one in (exact, model):
        one(x).square().mean().backward()
    for name, parameter in model.named_parameters():
        expected = exact.get_parameter(name).grad
        assert parameter.grad is not None
        assert expected is not None
        assert (parameter.grad - expected).norm() <= 0.05 * expected.norm(), name


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_buffers_of_any_layout_are_not_counted_and_saved_ones_once(layout: str) -> None:
    model, x = Graph(LAYOUTS[layout](adjacency())), torch.randn(NUM_NODES, 32)
    dense = Graph(adjacency())
    with SavedTensorTracker(model) as tracker:
        model(x)
    with SavedTensorTracker(dense) as expected:
        dense(x)
    assert tracker.nbytes == expected.nbytes
    made = LAYOUTS[layout](adjacency())
    weight = torch.randn(NUM_NODES, 8, requires_grad=True)
    with SavedTensorTracker(nn.Identity()) as tracker:
        _ = (made @ weight, made @ weight)
    assert tracker.nbytes == sum(part.untyped_storage().nbytes() for part in dense_parts(made))


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_blocks_whose_inputs_are_packed_may_save_tensors_of_any_layout(layout: str) -> None:
    model = Graph(LAYOUTS[layout](adjacency()))
    x = torch.randn(NUM_NODES, 32, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).square().mean(), x)
    with SavedTensorTracker(model) as tracker, packed_inputs((x,), BlockFormat.from_bits(8)):
        loss = model(x).square().mean()
    (found,) = torch.autograd.grad(loss, x)
    assert (found - expected).norm() <= 0.05 * expected.norm()
    assert x.numel() in [one.nbytes for one in tracker.tensors]  # a byte each


@pytest.mark.ci
def test_advice_on_a_model_with_sparse_buffers() -> None:
    advice = laconic.advise(Graph(adjacency().to_sparse()), torch.randn(NUM_NODES, 32), rounds=1)
    assert {"exact", "4 bits", "8 bits"} <= {row.name for row in advice.rows}


Pair = namedtuple("Pair", "x scale")  # as loaders make them


@dataclass
class Sample:
    x: Tensor
    scale: float


NESTS: dict[str, Callable[[Tensor], Any]] = {
    "dict": lambda x: {"scale": 2.0, "x": x},
    "mapping of its own": lambda x: UserDict(x=x),
    "list": lambda x: ["name", x],
    "tuple in a dict": lambda x: {"inner": (1, {"x": x})},
    "named tuple": lambda x: Pair(x, 1.0),
    "dataclass": lambda x: Sample(x, 1.0),
}


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, batch: Any) -> Tensor:
        while not isinstance(batch, Tensor):
            if isinstance(batch, Sample):
                batch = batch.x
            elif isinstance(batch, dict | UserDict):
                batch = batch.get("x", batch.get("inner"))
            else:
                batch = next(part for part in batch if isinstance(part, Tensor | dict))
        return self.block(batch)


@pytest.mark.parametrize("nest", NESTS)
def test_batches_in_any_nest_are_measured(nest: str) -> None:
    x = torch.randn(4, 16, 64)
    flat = laconic.compress_activations(Nested(), example_inputs={"batch": x})
    nested = laconic.compress_activations(Nested(), example_inputs={"batch": NESTS[nest](x)})
    assert nested.before is not None
    assert nested.after is not None
    assert flat.before is not None
    assert flat.after is not None
    assert nested.before.by_module == flat.before.by_module
    assert nested.after.by_module == flat.after.by_module
    assert nested.before.tokens == flat.before.tokens == 64


VIEWS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "a row of each sequence": ((NUM_NODES, 3, NUM_NODES), lambda x: x[:, :1]),
    "some columns": ((NUM_NODES, 2 * NUM_NODES), lambda x: x[:, :NUM_NODES]),
    "every second row": ((2 * NUM_NODES, NUM_NODES), lambda x: x[::2]),
    "transposed": ((NUM_NODES, NUM_NODES), Tensor.t),
    "permuted, with gaps": ((NUM_NODES, NUM_NODES, 6), lambda x: x[..., :2].permute(2, 0, 1)),
    "expanded": ((1, 1, NUM_NODES), lambda x: x.expand(NUM_NODES, 1, NUM_NODES)),
    "overlapping windows": ((2 * NUM_NODES - 1,), lambda x: x.unfold(0, NUM_NODES, 1)),
}


@pytest.mark.parametrize("view", VIEWS)
def test_the_second_run_reads_an_input_of_the_same_strides(view: str) -> None:
    """With as many rows as features, a kernel that saves in another order would swap weight and input unnoticed."""
    shape, of = VIEWS[view]
    x, layer = torch.randn(shape, requires_grad=True), nn.Linear(NUM_NODES, NUM_NODES)
    seen = []

    def region(x: Tensor) -> Tensor:
        seen.append((x.shape, x.stride()))
        output: Tensor = layer(x)
        return output

    given = of(x)
    expected = torch.autograd.grad(layer(given).square().sum(), (x, layer.weight))
    got = torch.autograd.grad(laconic.activations.checkpoint(region, given).square().sum(), (x, layer.weight))
    assert seen == 2 * [(given.shape, given.stride())]
    for gradient, exact in zip(got, expected, strict=True):
        assert (gradient - exact).norm() < 0.01 * exact.norm()


class Attention(nn.Module):
    """Attention that is spelled out, of some rows to all rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, some: Tensor, rows: Tensor) -> Tensor:
        query, key, value = self.query(some), self.key(rows), self.value(rows)
        output: Tensor = self.out(torch.softmax(query @ key.transpose(1, 2) / 8, -1) @ value)
        return output


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(NUM_NODES), nn.Linear(NUM_NODES, 3)
        self.layers = nn.ModuleList([Attention(NUM_NODES)])

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x)
        output: Tensor = self.head(self.layers[0](rows[:, :1], rows))
        return output


def test_attention_of_one_row_of_each_sequence_is_trained_with() -> None:
    model, x = Pooled(), torch.randn(NUM_NODES, 5, NUM_NODES)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    report = laconic.compress_activations(model, bits=8, example_inputs={"x": x})
    assert "mixer" in str(report)
    got = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    size = torch.stack([gradient.norm() for gradient in expected]).max()
    for gradient, exact in zip(got, expected, strict=True):
        assert (gradient - exact).norm() < 0.03 * exact.norm() + 1e-4 * size
