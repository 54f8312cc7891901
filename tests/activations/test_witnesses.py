"""What backward rebuilds is what forward consumed: writes that torch does not see, planted faults, no false alarm."""

from __future__ import annotations

import copy
import ctypes
import re
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import laconic
from laconic.activations.backward import gated
from laconic.activations.forwards.checkpoint import checkpoint
from laconic.activations.keep import witnesses
from laconic.activations.keep.kept import pack
from laconic.activations.keep.witnesses import ALWAYS, EVERY, Witness
from laconic.errors import ModelError
from laconic.formats import BlockFormat, BlockTensor
from laconic.ops.codebooks import BITS
from tests.grid import grid

ROWS, FEATURES = 48, 64
MODES = ("sites", "hooks", "combined")


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """One process in a gloo group."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def by_numpy(x: Tensor, values: Tensor) -> None:
    x.detach().numpy()[:] = values.numpy()


def by_data(x: Tensor, values: Tensor) -> None:
    x.data.copy_(values)


def by_new_data(x: Tensor, values: Tensor) -> None:
    x.data = values.clone()


def by_dlpack(x: Tensor, values: Tensor) -> None:
    torch.from_dlpack(x.detach()).copy_(values)


def by_broadcast(x: Tensor, values: Tensor) -> None:
    # What rank 0 sends, in the memory of the rank that receives.
    received = x.detach()
    dist.broadcast(received, 0)
    received.data.copy_(values)


def by_all_reduce(x: Tensor, values: Tensor) -> None:
    received = x.detach()
    received.data.copy_(values)
    dist.all_reduce(received)


def by_a_kernel(x: Tensor, values: Tensor) -> None:
    ctypes.memmove(x.data_ptr(), values.contiguous().data_ptr(), values.nbytes)


def by_set(x: Tensor, values: Tensor) -> None:
    x.data.set_(values.clone())


def by_storage(x: Tensor, values: Tensor) -> None:
    x.untyped_storage().copy_(values.contiguous().untyped_storage())


def by_a_resized_storage(x: Tensor, values: Tensor) -> None:
    storage = x.untyped_storage()
    storage.resize_(0)
    storage.resize_(values.nbytes)
    by_a_kernel(x, values)


WRITES: list[Callable[[Tensor, Tensor], None]] = [
    by_numpy,
    by_data,
    by_new_data,
    by_dlpack,
    by_broadcast,
    by_all_reduce,
    by_a_kernel,
    by_set,
    by_storage,
    by_a_resized_storage,
]


class Written(nn.Module):
    """A norm and layers that read it; `write` comes between, or before the second of two readers."""

    def __init__(self, between: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(FEATURES)
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.last = nn.Linear(FEATURES, 8)
        self.between = between
        self.write: Callable[[Tensor], None] | None = None

    def forward(self, input: Tensor) -> Tensor:
        h = self.norm(input) if self.between != "readers of the batch" else input
        if self.write is not None and self.between == "norm and linear":
            self.write(h)
        first = self.first(h)
        if self.write is not None and self.between in ("two readers", "readers of the batch"):
            self.write(h)
        return self.last(F.gelu(first) + self.second(h))


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return [g for g in torch.autograd.grad(loss, list(model.parameters()), allow_unused=True) if g is not None]


def near(got: list[Tensor], expected: list[Tensor], tolerance: float) -> bool:
    return all((a - b).norm() <= tolerance * b.norm() + 1e-6 for a, b in zip(got, expected, strict=True))


def compressed(model: nn.Module, mode: str, bits: int = 8) -> nn.Module:
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, mode=mode, bits=bits, example_inputs={"input": torch.randn(ROWS, FEATURES)})
    return twin


@pytest.mark.parametrize(
    ("between", "mode", "write"), grid(["norm and linear", "two readers", "readers of the batch"], MODES, WRITES)
)
def test_what_a_layer_consumed_is_what_backward_has(
    group: None, write: Callable[[Tensor, Tensor], None], mode: str, between: str
) -> None:
    model = Written(between)
    twin = compressed(model, mode)
    x, other = torch.randn(ROWS, FEATURES), 2 * torch.randn(ROWS, FEATURES)
    twin.write = lambda h: write(h, other)
    try:
        y = twin(x.clone())
        got = gradients(twin, y.square().sum())
    except (ModelError, RuntimeError) as refusal:  # torch's own, or ours by name
        if not re.search("changed|modified|consumed", str(refusal)):
            raise
        return
    # Each layer consumed what a copy of the written tensor holds; the first one what was there before.
    h = model.norm(x) if between != "readers of the batch" else x
    put = other + (h - h.detach())
    before = put if between == "norm and linear" else h
    expected = gradients(model, model.last(F.gelu(model.first(before)) + model.second(put)).square().sum())
    # As torch has it where it keeps the tensor itself: with the values of now also for the first reader.
    theirs_model = copy.deepcopy(model)
    theirs_model.write = lambda h: write(h, other)
    theirs = gradients(theirs_model, theirs_model(x.clone()).square().sum())
    assert near(got, expected, 0.03) or near(got, theirs, 0.03)


@pytest.mark.parametrize(
    ("hold", "mode", "write"), grid([1, 3], MODES, [by_numpy, by_data, by_dlpack, by_broadcast, by_a_kernel])
)
def test_a_buffer_that_is_filled_again_while_earlier_graphs_live(
    group: None, write: Callable[[Tensor, Tensor], None], mode: str, hold: int
) -> None:
    torch.manual_seed(1)
    model = compressed(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.GELU(), nn.Linear(FEATURES, 8)), mode)
    exact = copy.deepcopy(model)
    laconic.decompress_activations(exact)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    buffer, held = torch.zeros(ROWS, FEATURES), []
    for step in range(16):
        write(buffer, torch.randn(ROWS, FEATURES))
        loss = model(buffer).square().mean()
        if step % 3 == 0:  # a step that is left out while its graph lives on
            held = [*held, loss][-hold:]
            continue
        optimizer.zero_grad()
        loss.backward(retain_graph=step % 2 == 0)
        exact.load_state_dict(model.state_dict())
        expected = gradients(exact, exact(buffer.clone()).square().mean())
        assert near([parameter.grad for parameter in model.parameters() if parameter.grad is not None], expected, 0.03)
        optimizer.step()


def test_gradient_accumulation_over_one_buffer() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.GELU(), nn.Linear(FEATURES, 8))
    twin, buffer = compressed(model, "sites"), torch.zeros(ROWS, FEATURES)
    batches = torch.randn(4, ROWS, FEATURES)
    total, expected = torch.zeros(()), torch.zeros(())
    for batch in batches:
        by_numpy(buffer, batch)
        total = total + twin(buffer).square().mean()  # all graphs are alive until one backward
        expected = expected + model(batch).square().mean()
    assert near(gradients(twin, total), gradients(model, expected), 0.03)


def test_outside_of_a_root_forward_a_batch_is_not_shared() -> None:
    model = nn.ModuleDict({"one": nn.Linear(FEATURES, 8), "two": nn.Linear(FEATURES, 8)})
    model.forward = lambda input: model["one"](input) + model["two"](input)  # type: ignore[assignment]
    laconic.compress_activations(model, mode="sites", example_inputs={"input": torch.randn(ROWS, FEATURES)})
    x = torch.randn(ROWS, FEATURES)
    first = model["one"](x)
    x.numpy()[1:-1] = 0  # at none of few places, perhaps
    second = model["two"](x)
    grad = torch.autograd.grad((first + second).sum(), [model["two"].weight])[0]
    torch.testing.assert_close(grad[0], x.sum(0), atol=0.3, rtol=0.02)


# Planted faults


def feed_forward(bits: int = 4) -> nn.Module:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(FEATURES, 192), nn.Linear(FEATURES, 192)
            self.act, self.down = nn.SiLU(), nn.Linear(192, FEATURES)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.act(self.gate(x)) * self.up(x))

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mlp = nn.LayerNorm(FEATURES), Block()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.mlp(self.norm(x))

    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer(), nn.LayerNorm(FEATURES), nn.Linear(FEATURES, 8))
    laconic.compress_activations(model, bits=bits, example_inputs={"input": torch.randn(4, FEATURES)})
    return model


def neighbours(packed: BlockTensor) -> BlockTensor:
    return BlockTensor(packed.codes, packed.scales.roll(1, 0), packed.format, packed.shape, packed.dtype)


def of_another(packed: BlockTensor) -> BlockTensor:
    return BlockTensor(packed.codes.roll(5, 0), packed.scales.roll(5, 0), packed.format, packed.shape, packed.dtype)


def codes_alone(packed: BlockTensor) -> BlockTensor:
    return BlockTensor(packed.codes.roll(5, 0), packed.scales, packed.format, packed.shape, packed.dtype)


FAULTS: dict[str, Callable[[BlockTensor], BlockTensor]] = {
    "scale of the neighbouring block": neighbours,
    "codes and scales of other rows": of_another,
    "codes of other rows": codes_alone,
}


def run(model: nn.Module, seed: int = 2) -> None:
    x = torch.randn(40, FEATURES, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    model(x).square().sum().backward()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_a_fault_of_dequantizing_is_found(fault: str, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = feed_forward(bits)
    run(model)
    plain = BlockTensor.dequantize
    monkeypatch.setattr(BlockTensor, "dequantize", lambda self, **kwargs: plain(FAULTS[fault](self), **kwargs))
    with pytest.raises(ModelError, match=r"norm.*what backward computes with is not what the layer consumed"):
        run(model)


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_a_wrong_level_is_found(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = feed_forward(bits)
    run(model)
    plain = BlockTensor.dequantize

    def one_up(packed: BlockTensor, **kwargs: Any) -> Tensor:
        values = plain(packed, **kwargs)
        return torch.where(values > 0, values + 0.5 * values.abs().amax(-1, keepdim=True), values)

    monkeypatch.setattr(BlockTensor, "dequantize", one_up)
    with pytest.raises(ModelError, match="what backward computes with"):
        run(model)


@pytest.mark.parametrize(
    ("dtype", "code"), grid([torch.float32, torch.bfloat16, torch.float16], sorted(BITS), strength=1)
)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_one_value_beyond_rounding_is_found_in_every_dtype(
    code: str, dtype: torch.dtype, scale_dtype: torch.dtype
) -> None:
    x = torch.randn(4, 256).to(dtype)
    saved = pack(x, BlockFormat(code, 64, scale_dtype), "test")
    assert saved.witness is not None
    saved.witness.saw(x, saved.tensors[1])
    wrong = x.clone()
    wrong[-1, -1] += 3 * x.abs().max()
    with pytest.raises(ModelError, match="what backward computes with"):
        saved.witness.saw(wrong, saved.tensors[1])


OF_CODES: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "gate and up swapped": lambda g, gs, u, us: (u, us, g, gs),
    "scale of the neighbouring block": lambda g, gs, u, us: (g, gs.roll(1, 0), u, us),
    "codes and scales of other rows": lambda g, gs, u, us: (g, gs, u.roll(3, 0), us.roll(3, 0)),
    "codes of other rows": lambda g, gs, u, us: (g.roll(3, 0), gs, u, us),
}


@pytest.mark.parametrize("way", ["rebuild", "gradients", "gate_and_up"])
@pytest.mark.parametrize("fault", OF_CODES)
def test_a_fault_of_a_gated_product_is_found(way: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = feed_forward()
    run(model)
    plain, held = getattr(gated._Product, way), []

    def other(self: Any, *args: Any) -> Any:
        return plain(self, *(OF_CODES[fault](*arg) if isinstance(arg, tuple) else arg for arg in args))

    monkeypatch.setattr(gated._Product, way, other)
    if way == "gate_and_up":  # as while somebody holds the activation
        model[0].mlp.act.register_forward_hook(lambda module, args, output: held.append(output))
    with pytest.raises(ModelError, match=r"mlp.*what backward computes with"):
        run(model)


@pytest.mark.parametrize("name", ["gated_product_blockwise", "gated_backward_blockwise"])
def test_a_gated_kernel_that_reads_other_codes_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, original = feed_forward(), getattr(gated, name)
    run(model)
    monkeypatch.setattr(
        gated, name, lambda *args, **options: original(*args[:-4], args[-4].roll(3, 0), *args[-3:], **options)
    )
    with pytest.raises(ModelError, match=r"mlp.*what backward computes with"):
        run(model)


def test_what_was_saved_in_another_step_is_found() -> None:
    model = feed_forward()
    stored: list[list[Tensor]] = [[], []]

    def forward(step: int) -> Tensor:
        def save(tensor: Tensor) -> tuple[int, int]:
            stored[step].append(tensor)
            return step, len(stored[step]) - 1

        with torch.autograd.graph.saved_tensors_hooks(save, lambda place: stored[0][place[1]]):
            x = torch.randn(40, FEATURES, generator=torch.Generator().manual_seed(step)).requires_grad_()
            return model(x).square().sum()

    first, second = forward(0), forward(1)
    first.backward()
    with pytest.raises(ModelError, match=r"what backward computes with|holds other values"):
        second.backward()


def test_codes_that_are_written_over_are_found() -> None:
    model, x = feed_forward(), torch.randn(40, FEATURES)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        loss = model(x.requires_grad_()).square().sum()
    for tensor in saved:
        if tensor.dtype == torch.uint8:
            tensor.data.random_(0, 255)
    with pytest.raises(ModelError, match=r"norm.*what backward computes with"):
        loss.backward()
    run(model)  # and the next step is as any other


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_checkpointed_layers_input_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(40, FEATURES).requires_grad_()
    layer = nn.Linear(FEATURES, FEATURES)

    def step() -> None:
        h = x * 1
        checkpoint(lambda h: layer(h).tanh(), h, format=BlockFormat("nf4")).sum().backward()

    step()
    plain = BlockTensor.dequantize
    monkeypatch.setattr(BlockTensor, "dequantize", lambda self, **kwargs: plain(FAULTS[fault](self), **kwargs))
    with pytest.raises(ModelError, match=r"input of a checkpointed layer.*what backward computes with"):
        step()


def test_what_a_device_finds_late_is_raised_by_the_next_forward_and_the_next_step() -> None:
    model = feed_forward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    entry = witnesses._Entry(witnesses._differs, (), (torch.zeros(1), torch.ones(1)), ("layer 7",))
    for later in (lambda: run(model), optimizer.step):
        witnesses._leave(torch.tensor([False]), [entry])
        later()
        assert not witnesses._LEFT
        witnesses._leave(torch.tensor([False, True]), [entry, entry])
        with pytest.raises(ModelError, match="layer 7: what backward computes with"):
            later()
        later()  # said once


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("fault", ["a write between layers", "scales"])
def test_a_cuda_device_finds_faults_without_waiting(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = feed_forward().cuda(), torch.randn(40, FEATURES, device="cuda").requires_grad_()
    model(x).sum().backward()
    witnesses.make_checks(wait=True)
    plain = BlockTensor.dequantize
    if fault == "scales":
        monkeypatch.setattr(BlockTensor, "dequantize", lambda self, **kwargs: plain(neighbours(self), **kwargs))
    else:
        model[0].norm.register_forward_hook(lambda module, args, output: output.data.mul_(2))
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(ModelError, match="what backward computes with"):
        witnesses.make_checks(wait=True)


# No false alarm

DATA: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "outliers": lambda x: torch.where(torch.rand_like(x) < 0.01, x * 1e4, x),
    "zeros": lambda x: x * 0,
    "half zeros": lambda x: x.relu(),
    "denormals": lambda x: x * torch.finfo(x.dtype).tiny * 0.1,
    "tiny": lambda x: x * torch.finfo(x.dtype).tiny * 8,
    "huge": lambda x: x.tanh() * torch.finfo(x.dtype).max,
    "infinities": lambda x: torch.where(torch.rand_like(x) < 0.02, float("inf"), x),
    "nan": lambda x: torch.where(torch.rand_like(x) < 0.02, float("nan"), x),
    "constant": lambda x: torch.full_like(x, 3.14159),
    "far from zero": lambda x: x * 1e-3 + 1000,
}


def test_lengths_that_vary_share_their_types() -> None:
    """Rows of experts are others in each step; a type of ctypes takes kilobytes, and is kept with what is looked at."""
    x = torch.arange(2000, dtype=torch.int32)
    windows = [witnesses._window(x.data_ptr(), ctypes.c_uint32, numel) for numel in range(1, 2001)]
    for numel, window in enumerate(windows, 1):
        assert array("I", window.tobytes()).tolist() == [*range(0, numel, max(1, (numel - 1) // witnesses._STEPS))]
    assert len({type(window.obj) for window in windows}) <= 12


def test_an_empty_tensor_looks_like_another_and_one_without_memory_like_none() -> None:
    assert witnesses.glance(torch.empty(0, 3)) == b""
    assert witnesses.same(b"", torch.empty(2, 0))
    assert not witnesses.same(b"", torch.zeros(2))
    assert witnesses.glance(torch.empty(2, device="meta")) is None


@pytest.mark.parametrize("code", sorted(BITS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@settings(max_examples=10)
@given(
    data=st.sampled_from(sorted(DATA)),
    shape=st.lists(st.integers(1, 70), min_size=0, max_size=3),
    block_size=st.sampled_from([16, 64, 256]),
    scale_dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 1000),
)
def test_what_a_format_rounds_is_no_fault(
    code: str,
    dtype: torch.dtype,
    data: str,
    shape: list[int],
    block_size: int,
    scale_dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    x = DATA[data](torch.randn(shape).to(dtype))
    saved = pack(x, BlockFormat(code, block_size, scale_dtype), "test")
    assert isinstance(saved.witness, Witness) == (saved.bits is not None)  # what codes do not shorten is kept as it is
    saved.memo.announce()
    saved.memo.take(saved.tensors)  # outside of backward the comparison is made at once


@pytest.mark.parametrize(
    ("dtype", "activation"),
    grid([torch.float32, torch.bfloat16, torch.float16], ["silu", "gelu_tanh", "quick_gelu"], strength=1),
)
@settings(max_examples=15)
@given(
    of_gate=st.sampled_from(sorted(DATA)),
    of_up=st.sampled_from(sorted(DATA)),
    of_grad=st.sampled_from(sorted(DATA)),
    code=st.sampled_from(["nf4", "e2m1", "int4", "int5", "int6", "int8"]),
    length=st.integers(1, 300),
    scale_dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 1000),
)
@example(  # activations that round to infinity
    of_gate="huge", of_up="constant", of_grad="denormals", code="int4", length=65, scale_dtype=torch.bfloat16, seed=132
)
def test_what_a_gated_product_rounds_is_no_fault(
    activation: str,
    dtype: torch.dtype,
    of_gate: str,
    of_up: str,
    of_grad: str,
    code: str,
    length: int,
    scale_dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    gate, up, grad = (DATA[data](torch.randn(5, length).to(dtype)) for data in (of_gate, of_up, of_grad))
    format = BlockFormat(code, 64, scale_dtype)
    packed = [pack(x, format, "test") for x in (gate, up)]
    assume(packed[0].format is not None)  # rows that share blocks, or are kept as they are, make no gated product
    assert packed[0].witness is not None
    assert packed[1].witness is not None
    both = (packed[0].witness, packed[1].witness)
    how = gated._Product(0, None, activation, torch.relu, format, gate.shape, dtype, both)
    codes = (*packed[0].tensors, *packed[1].tensors)
    how.rebuild(codes, None)
    how.gradients(grad, codes)
    how.gate_and_up(codes)


def test_the_curvature_of_activations_is_bounded() -> None:
    x = torch.linspace(-30, 30, 2_000_001, dtype=torch.float64)
    for linear, cubic, slope in witnesses.CURVES.values():
        sigmoid = torch.sigmoid(x * (linear + cubic * x * x))
        first = sigmoid + x * sigmoid * (1 - sigmoid) * (linear + slope * x * x)
        assert first.abs().max() < witnesses._SLOPE
        assert (first.diff() / x.diff()).abs().max() < witnesses._CURVATURE


def test_a_models_first_forwards_have_witnesses_and_then_one_in_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.LayerNorm(FEATURES), nn.Linear(FEATURES, 8))
    laconic.compress_activations(model, example_inputs={"input": torch.randn(4, FEATURES)})
    x = torch.randn(4, FEATURES).requires_grad_()
    model.forward._num_forwards = 0  # type: ignore[union-attr]
    saw: list[Witness] = []
    monkeypatch.setattr(Witness, "saw", lambda self, values, scales: saw.append(self))
    having = []
    for number in range(1, 2 * EVERY + 2):
        with torch.no_grad():
            model(x)  # does not count
        saw.clear()
        model(x).sum().backward()
        having += [number] if saw else []
    assert having == [*range(1, ALWAYS + 1), EVERY, 2 * EVERY]
