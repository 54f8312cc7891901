"""The gradient store's ops: what the numbers are, under every implementation, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laconic.errors import FormatError
from laconic.ops import accumulate_blockwise_, dequantize_blockwise, reference, square_sum_blockwise
from tests.ops.cases import DTYPES, every_pattern, same_bits, threads
from tests.ops.implementations import Kernels, each_implementation, each_kernel, each_native, few
from tests.ops.interpreter import INTERPRETED, on_device, slow_in_interpreter

ACCUMULATE = torch.ops.laconic.accumulate_blockwise_.default
SQUARE_SUM = torch.ops.laconic.square_sum_blockwise.default
NAN, INF = float("nan"), float("inf")
BITS = (8, 12)
QUICK = ((torch.bfloat16, 12), (torch.float32, 8))
LENGTHS = (0, 1, 2, 31, 32, 127, 128, 129, 255, 300, 1000)


@dataclass
class Store:
    """The four parts of a stored gradient, empty at first."""

    length: int
    bits: int
    parts: tuple[Tensor | None, ...] = field(init=False)

    def __post_init__(self) -> None:
        blocks = -(-self.length // 128)
        main = (torch.zeros(self.length, dtype=torch.uint8), torch.zeros(blocks))
        rest = (torch.zeros((self.length + 1) // 2, dtype=torch.uint8), torch.zeros(blocks))
        self.parts = main + (rest if self.bits == 12 else (None, None))

    def copy(self) -> Store:
        other = Store(self.length, self.bits)
        other.parts = tuple(None if part is None else part.clone() for part in self.parts)
        return other

    def values(self) -> Tensor:
        codes, scales, residual_codes, residual_scales = self.parts
        value = dequantize_blockwise(
            codes, scales, length=self.length, code="int8", block_size=128, dtype=torch.float32
        )
        if residual_codes is not None:
            value = value + dequantize_blockwise(
                residual_codes, residual_scales, length=self.length, code="int4", block_size=128, dtype=torch.float32
            )
        return value


def same_store(a: Store, b: Store) -> bool:
    return all(x is y is None or same_bits(x, y) for x, y in zip(a.parts, b.parts, strict=True))


def awkward_gradients(dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    for length in LENGTHS:
        yield f"length {length}", normal(length).to(dtype)
    yield "matrix", normal(7, 60).to(dtype)
    yield "transposed", normal(70, 6).to(dtype).t()
    yield "every second", normal(300)[::2].to(dtype)
    yield "expanded", normal(1, 70).to(dtype).expand(3, 70)
    yield "0-d", normal().to(dtype)
    yield "zeros", -torch.zeros(300).to(dtype)
    yield "tiny", (normal(300) * 2.0**-130).to(dtype)
    yield "vanishing at 8 bits only", torch.full((300,), 2.0**-121).to(dtype)
    yield "wide", (normal(900) * torch.exp2(60 * normal(900))).to(dtype)
    yield "largest", torch.full((200,), torch.finfo(dtype).max, dtype=dtype)
    broken = normal(700)
    broken[3], broken[130], broken[511], broken[699] = NAN, INF, -INF, NAN
    yield "broken", broken.to(dtype)
    yield "all patterns", every_pattern(torch.bfloat16).to(dtype)


# docs/formats.md, "A gradient in 8 or 12 bits": gradient added; codes, scale, residual codes and scale then; values.
EXAMPLE = [
    ([127, 2.4375, -50.0625, 0.25], "7f 02 ce 00", 1.0, "70 4f", 0.0625, [127, 2.4375, -50.0625, 0.25]),
    ([-63.5, 0, 0, 0], "7f 05 9c 00", 0.5, "e0 7e", 0.25 / 7, [63.5, 2.4285715, -50.07143, 0.25]),
]


def as_hex(codes: Tensor) -> str:
    return bytes(codes.tolist()).hex(" ")


@each_implementation
def test_worked_example_is_true(ops: Kernels) -> None:
    store = Store(4, 12)
    for gradient, codes, scale, residual_codes, residual_scale, values in EXAMPLE:
        ops.accumulate_blockwise_(*store.parts, torch.tensor(gradient), 1.0)
        assert as_hex(store.parts[0]) == codes
        assert as_hex(store.parts[2]) == residual_codes
        assert store.parts[1].item() == scale
        assert store.parts[3].item() == torch.tensor(residual_scale).item()
        assert torch.equal(store.values(), torch.tensor(values))


@each_implementation
def test_sum_is_the_exact_one_within_half_a_step(ops: Kernels) -> None:
    # Each accumulation rounds by at most half a step of its own scale; the last scale is the largest here.
    torch.manual_seed(0)
    gradients = [torch.rand(40, 25) + 0.1 for _ in range(8)]
    for bits, half_steps in ((8, 1 / 254), (12, 1 / 254 / 14)):
        store = Store(1000, bits)
        for gradient in gradients:
            ops.accumulate_blockwise_(*store.parts, gradient, 1.0)
        exact = torch.stack(gradients).double().sum(0).flatten()
        largest = torch.nn.functional.pad(exact, (0, 24)).view(-1, 128).amax(-1).repeat_interleave(128)[:1000]
        bound = 8 * half_steps * largest * (1 + 1e-3)
        assert ((store.values().double() - exact).abs() <= bound).all()


@each_implementation
@pytest.mark.parametrize("bits", [8, 12])
def test_first_accumulation_is_quantization(ops: Kernels, bits: int) -> None:
    x = torch.randn(300)
    store = Store(300, bits)
    ops.accumulate_blockwise_(*store.parts, x, 1.0)
    codes, scales = reference.quantize_blockwise(x, "int8", 128, torch.float32, None)
    assert same_bits(store.parts[0], codes)
    assert same_bits(store.parts[1], scales)
    if bits == 12:
        rest = x - reference.dequantize_blockwise(codes, scales, "int8", 128, 300, torch.float32)
        codes, scales = reference.quantize_blockwise(rest, "int4", 128, torch.float32, None)
        assert same_bits(store.parts[2], codes)
        assert same_bits(store.parts[3], scales)


@each_implementation
@pytest.mark.parametrize("bits", [8, 12])
def test_broken_block_stays_broken_and_alone(ops: Kernels, bits: int) -> None:
    store = Store(300, bits)
    gradient = torch.ones(300)
    gradient[130] = INF
    ops.accumulate_blockwise_(*store.parts, gradient, 1.0)
    ops.accumulate_blockwise_(*store.parts, torch.ones(300), 1.0)
    values = store.values()
    assert values[128:256].isnan().all()
    assert (values[:128] == 2).all()
    assert (values[256:] == 2).all()
    assert ops.square_sum_blockwise(*store.parts).isnan()


@each_implementation
def test_alpha_times_gradient_that_overflows_is_broken(ops: Kernels) -> None:
    store = Store(4, 8)
    ops.accumulate_blockwise_(*store.parts, torch.full((4,), 3e38), 2.0)
    assert store.values().isnan().all()


@each_implementation
@pytest.mark.parametrize("bits", [8, 12])
def test_square_sum_is_that_of_the_values(ops: Kernels, bits: int) -> None:
    torch.manual_seed(1)
    for length in (*LENGTHS, 128 * 512, 128 * 1500 + 7):
        store = Store(length, bits)
        ops.accumulate_blockwise_(*store.parts, torch.randn(length) * torch.exp2(10 * torch.randn(length)), 1.0)
        found = ops.square_sum_blockwise(*store.parts)
        assert found.shape == ()
        assert found.dtype == torch.float64
        codes, scales, residual_codes, residual_scales = store.parts
        exact = exact_values(codes, scales, "int8", length)
        if residual_codes is not None:
            exact = exact + exact_values(residual_codes, residual_scales, "int4", length)
        torch.testing.assert_close(found, exact.square().sum(), rtol=1e-13, atol=0)


def exact_values(codes: Tensor, scales: Tensor, code: str, length: int) -> Tensor:
    """Level times scale in fp64, which is exact."""
    levels = reference.dequantize_blockwise(codes, torch.ones_like(scales), code, 128, length, torch.float32)
    return levels.double() * scales.double().repeat_interleave(128)[:length]


@each_implementation
@pytest.mark.parametrize("bits", [8, 12])
def test_every_pair_of_codes_counts_in_the_square_sum(ops: Kernels, bits: int) -> None:
    # Codes that quantize never writes (-128, -8) included.
    store = Store(4096, bits)
    every = torch.arange(4096)
    store.parts[0].copy_((every // 16).to(torch.uint8))
    store.parts[1].fill_(2.0)
    main = (every // 16).to(torch.uint8).view(torch.int8).double() * 2
    rest = torch.zeros(4096, dtype=torch.float64)
    if bits == 12:
        store.parts[2].copy_(
            torch.tensor([low | (low + 1) << 4 for low in range(0, 16, 2)], dtype=torch.uint8).repeat(256)
        )
        store.parts[3].fill_(0.5)
        low = every % 16
        rest = torch.where(low < 8, low, low - 16).double() * 0.5
    assert ops.square_sum_blockwise(*store.parts) == (main + rest).square().sum()


@each_kernel
@pytest.mark.parametrize(
    ("dtype", "bits"),
    # In the interpreter each number of bits takes one dtype.
    [
        ((dtype, bits) if (dtype, bits) in QUICK else slow_in_interpreter(dtype, bits))
        for dtype in DTYPES
        for bits in BITS
    ],
)
def test_all_bits_are_the_references(kernels: Kernels, dtype: torch.dtype, bits: int) -> None:
    for name, gradient in few(list(awkward_gradients(dtype)), 2, bits == 8):
        if INTERPRETED and gradient.numel() > 4096:
            gradient = gradient[::37]
        begun = Store(gradient.numel(), bits)
        for alpha, more in (
            (1.0, gradient),
            (-0.37, gradient.flip(0) if gradient.dim() else gradient),
            (2.0**-9, gradient),
        ):
            expected = begun.copy()
            reference.accumulate_blockwise_(*expected.parts, more, alpha)
            total = reference.square_sum_blockwise(*expected.parts)
            found = begun.copy()
            kernels.accumulate_blockwise_(*found.parts, more, alpha)
            assert same_store(found, expected), (name, alpha)
            sums = torch.stack((kernels.square_sum_blockwise(*found.parts), total))
            assert sums[0] == sums[1] or sums.isnan().all(), (name, alpha)
            begun = expected


@each_native
@settings(max_examples=60)
@given(
    length=st.sampled_from((0, 1, 127, 128, 129)) | st.integers(0, 700),
    bits=st.sampled_from((8, 12)),
    seed=st.integers(0, 2**31),
    spread=st.floats(0, 40),
)
def test_any_store_is_the_references(kernels: Kernels, length: int, bits: int, seed: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    expected = Store(length, bits)
    found = expected.copy()
    for _ in range(3):
        scale = torch.exp2(spread * torch.randn(length, generator=generator)).clamp(max=1e36)
        gradient = torch.randn(length, generator=generator) * scale
        reference.accumulate_blockwise_(*expected.parts, gradient, 0.75)
        kernels.accumulate_blockwise_(*found.parts, gradient, 0.75)
        assert same_store(found, expected)


@on_device
def test_square_sum_over_many_programs_of_triton_has_the_references_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    from laconic.ops.triton import accumulate

    monkeypatch.setattr(accumulate, "_FOLD", 8)
    store = Store(128 * 16 * 70 + 3, 8)
    store.parts[0].random_(0, 256, generator=torch.Generator().manual_seed(0))
    store.parts[1].normal_(generator=torch.Generator().manual_seed(1)).abs_()
    found = Kernels("triton").square_sum_blockwise(*store.parts)
    assert found == reference.square_sum_blockwise(*store.parts)


@each_native
def test_threads_do_not_change_bits(kernels: Kernels) -> None:
    gradient = torch.randn(128 * 3000 + 5)
    stores, sums = [], []
    for number in (1, 3):
        with threads(number):
            store = Store(gradient.numel(), 12)
            kernels.accumulate_blockwise_(*store.parts, gradient, 1.0)
            stores.append(store)
            sums.append(kernels.square_sum_blockwise(*store.parts))
    assert same_store(*stores)
    assert sums[0] == sums[1]


@pytest.mark.ci
def test_compiled_call_gives_the_same_bits() -> None:
    def step(store: tuple[Tensor | None, ...], gradient: Tensor) -> Tensor:
        ACCUMULATE(*store, gradient * 2, 1.0)
        return SQUARE_SUM(*store)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for bits in (8, 12):
        one, other = Store(300, bits), Store(300, bits)
        for _ in range(2):
            gradient = torch.randn(300)
            assert compiled(one.parts, gradient) == step(other.parts, gradient)
        assert same_store(one, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": torch.zeros(300, dtype=torch.int8)}, "codes.dtype is torch.int8, but it must be torch.uint8"),
        ({"codes": torch.zeros(3, 100, dtype=torch.uint8)}, "codes have shape (3, 100)"),
        ({"codes": torch.zeros(600, dtype=torch.uint8)[::2]}, "take a contiguous (300,)"),
        ({"scales": torch.zeros(2)}, "scales have shape (2,) and strides (1,), but 300 elements in blocks of 128 take"),
        ({"scales": torch.zeros(3, dtype=torch.bfloat16)}, "scales.dtype is torch.bfloat16, but it must be"),
        ({"scales": torch.zeros(3, device="meta")}, "scales are on meta and codes on cpu, but all must be on one"),
        ({"residual_codes": torch.zeros(150, dtype=torch.uint8)}, "must both be given (12 bits) or both be None"),
        ({"gradient": torch.zeros(299)}, "gradient has 299 elements, but the store has 300"),
        ({"gradient": torch.zeros(300).double()}, "gradient.dtype is torch.float64, but it must be one of float32"),
        ({"gradient": torch.zeros(300, device="meta")}, "gradient is on meta and codes on cpu"),
        ({"gradient": torch.zeros(300).to_sparse()}, "use sparse=False"),
        ({"alpha": math.inf}, "alpha is inf, but it must be a finite fp32 number"),
        ({"alpha": 1e39}, "alpha is 1e+39, but it must be a finite fp32 number"),
    ],
)
def test_bad_argument_is_named(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "codes": torch.zeros(300, dtype=torch.uint8),
        "scales": torch.zeros(3),
        "gradient": torch.zeros(300),
    } | change
    with pytest.raises(FormatError) as caught:
        accumulate_blockwise_(arguments.pop("codes"), arguments.pop("scales"), arguments.pop("gradient"), **arguments)
    assert message in str(caught.value)


def test_square_sum_refuses_parts_that_do_not_fit() -> None:
    with pytest.raises(FormatError, match="scales have shape"):
        square_sum_blockwise(torch.zeros(300, dtype=torch.uint8), torch.zeros(4))
