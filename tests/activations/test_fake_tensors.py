"""A step of a compressed model under FakeTensorMode and in a graph: static sizes, no values, our ops single nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

import laconic.ops
from laconic.optim import AdamW8bit
from tests.activations.models import loss_of, make_ids, make_model

QUANTIZE = torch.ops.laconic.quantize_blockwise.default
DEQUANTIZE = torch.ops.laconic.dequantize_blockwise.default
DEQUANTIZE_AFTER = torch.ops.laconic.dequantize_blockwise_after.default
PRODUCT = torch.ops.laconic.gated_product_blockwise.default
PRODUCT_AFTER = torch.ops.laconic.gated_product_blockwise_after.default
GATED_BACKWARD = torch.ops.laconic.gated_backward_blockwise.default


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compressed(**options: Any) -> nn.Module:
    model = make_model("llama")
    laconic.compress_activations(model, sequence_length=4, **options)
    return model


def fake(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """The model with fake parameters and buffers, which keep their shapes only."""
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = nn.Parameter(mode.from_tensor(p.detach()))
        module._buffers.update({name: mode.from_tensor(x) for name, x in module._buffers.items() if x is not None})
    return model


def ours(graph: fx.Graph) -> set[Any]:
    """The operations of this package in a graph."""
    return {node.target for node in graph.nodes if str(node.target).startswith("laconic.")}


def values_of(node: fx.Node) -> list[Any]:
    value = node.meta.get("val")
    return list(value) if isinstance(value, tuple | list) else [value]


@pytest.mark.parametrize(
    ("bits", "options"),
    [
        (4, {"attention": "int8"}),
        pytest.param(5, {"attention": "exact"}, marks=pytest.mark.slow),
        pytest.param(6, {"attention": "nf4"}, marks=pytest.mark.slow),
        pytest.param(8, {"attention": "recompute", "loss": "chunked"}, marks=pytest.mark.slow),
    ],
)
def test_steps_run_without_values(bits: int, options: dict[str, Any]) -> None:
    model = compressed(bits=bits, **options)
    mode = FakeTensorMode()
    fake(model, mode)
    with mode:
        optimizer = AdamW8bit(model.parameters())
        ids = torch.empty(2, 32, dtype=torch.int64)
        for _ in range(3):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                assert parameter.grad.shape == parameter.shape
            optimizer.step()
            optimizer.zero_grad()
        assert loss.shape == ()
    # What was made meanwhile is not found again by those who have values.
    x = torch.randn(64, 64)
    codes, scales = laconic.ops.quantize_blockwise(x)
    assert torch.isfinite(laconic.ops.dequantize_blockwise(codes, scales, length=64)).all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_layer_has_our_ops_as_single_nodes() -> None:
    graphs: list[fx.Graph] = []

    def compiler(module: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(module.graph)
        return make_boxed_func(module)

    model = compressed(attention="int8")
    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)
    model.model.layers[1].compile(backend=backend, fullgraph=True)
    loss_of(model, make_ids()).backward()
    forward, backward = graphs
    assert ours(forward) == {QUANTIZE}
    # Without `after` where code runs again.
    assert ours(backward) == {DEQUANTIZE, DEQUANTIZE_AFTER, PRODUCT_AFTER, GATED_BACKWARD}
    for graph in graphs:  # nothing else makes bytes, so no compiler has looked inside of an op
        for node in graph.nodes:
            is_codes = any(isinstance(x, Tensor) and x.dtype == torch.uint8 for x in values_of(node))
            names = ("laconic", "getitem")
            assert not is_codes or node.op != "call_function" or any(name in str(node.target) for name in names), node


@pytest.mark.parametrize("attention", ["int8", pytest.param("exact", marks=pytest.mark.slow)])
def test_a_whole_step_is_one_graph_of_static_sizes(attention: str) -> None:
    model = compressed(attention=attention)
    mode = FakeTensorMode()
    fake(model, mode)
    with mode:
        parameters = dict(model.named_parameters())

        def step(parameters: dict[str, Tensor], ids: Tensor) -> tuple[Tensor, ...]:
            inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
            loss = functional_call(model, parameters, kwargs=inputs).loss
            return loss, *torch.autograd.grad(loss, list(parameters.values()))

        graph = make_fx(step)(parameters, torch.empty(2, 32, dtype=torch.int64)).graph
    assert {QUANTIZE, PRODUCT, GATED_BACKWARD} < ours(graph)
    assert ours(graph) <= {QUANTIZE, DEQUANTIZE, DEQUANTIZE_AFTER, PRODUCT, GATED_BACKWARD}
    for node in graph.nodes:
        assert not any(isinstance(x, torch.SymInt | torch.SymFloat | torch.SymBool) for x in values_of(node)), node
