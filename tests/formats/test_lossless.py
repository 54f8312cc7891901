"""Lossless messages: every bit comes back, equal values give equal bytes, and sizes keep their bounds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import laconic
from laconic.errors import FormatError
from laconic.formats import lossless
from laconic.ops import reference
from laconic.ops.lossless import DTYPE_NUMBERS, LAYOUTS, Header, Status, parse_header
from tests.formats import slow_decoder
from tests.formats.lossless_cases import DTYPES, arithmetic, bits, every_pattern, normal, same_tensor, special_tensors
from tests.grid import slow_but

CODES = ("raw", "window", "tiered", "auto")
GOLDEN = Path(__file__).parent / "golden"


def comes_back(x: Tensor, code: str) -> bool:
    """And the message keeps its bound."""
    message = lossless.encode(x, code)
    assert message.numel() <= 64 + 8 * x.dim() + x.numel() * x.element_size() <= lossless.max_nbytes(x.numel(), x.dtype)
    return same_tensor(lossless.decode(message), x)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_of_elements_comes_back(dtype: torch.dtype, code: str) -> None:
    for numel in (0, 1, 2, 7, 8, 9, 31, 32, 33, 511, 512, 513, 4095, 4096, 4097, 8191, 8193, 10007):
        assert comes_back(normal(numel, dtype=dtype), code), numel


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_pattern_shape_and_extreme_comes_back(dtype: torch.dtype, code: str) -> None:
    for name, x in special_tensors(dtype):
        assert comes_back(x, code), name


@pytest.mark.parametrize("dtype", slow_but(DTYPES, torch.bfloat16, torch.float32))
def test_the_reference_reads_and_writes_the_same(dtype: torch.dtype) -> None:
    for name, x in special_tensors(dtype):
        for code in ("window", "tiered"):
            message = lossless.encode(x, code)
            buffer = reference.lossless_encode(x, code, None)
            assert torch.equal(buffer[: message.numel()], message), (name, code)
            out = torch.empty(x.shape, dtype=dtype)
            assert reference.lossless_decode_(out, message) == Status.SOUND, (name, code)
            assert same_tensor(out, x), (name, code)


@pytest.mark.parametrize("dtype", slow_but(DTYPES, torch.bfloat16, torch.float32))
def test_the_documentation_is_enough_to_decode(dtype: torch.dtype) -> None:
    for name, x in special_tensors(dtype):
        for code in ("window", "tiered"):
            if x.numel() < 6000:
                message = lossless.encode(x, code, capacity_nbytes=None if x.numel() % 2 else 80_000)
                number, shape, original = slow_decoder.decode(bytes(message.tolist()))
                assert (number, shape) == (DTYPE_NUMBERS[dtype], x.shape), name
                assert original == bytes(bits(x).tolist()), name


@settings(max_examples=60, derandomize=True)
@given(
    st.sampled_from(DTYPES),
    st.sampled_from(("window", "tiered")),
    # Few different words in long runs take other ways through an encoder than random bits do.
    st.lists(st.tuples(st.binary(min_size=4, max_size=4), st.integers(1, 900)), max_size=12),
    st.integers(0, 300),
    st.integers(0, 2**32),
)
def test_any_bytes_come_back(
    dtype: torch.dtype, code: str, runs: list[tuple[bytes, int]], num_random: int, seed: int
) -> None:
    repeated = b"".join(word * count for word, count in runs)
    noise = torch.randint(0, 256, (4 * num_random,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    data = torch.cat((torch.frombuffer(bytearray(repeated), dtype=torch.uint8), noise)) if repeated else noise
    assert comes_back(data.view(dtype), code)
    assert comes_back(
        data[torch.randperm(data.numel(), generator=torch.Generator().manual_seed(seed))].view(dtype), code
    )


@pytest.mark.parametrize("code", ["window", "tiered"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_are_those_of_the_golden_file(dtype: torch.dtype, code: str) -> None:
    path = GOLDEN / f"{str(dtype).removeprefix('torch.')}_{code}.bin"
    is_golden(arithmetic(4500 if dtype == torch.bfloat16 else 700, dtype), code, path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bytes_of_sparse_cubes_are_those_of_the_golden_file(dtype: torch.dtype) -> None:
    # Zeros left out, the wide tiers, escapes and all byte planes.
    x = arithmetic(4500, torch.float32)
    cubes = torch.where(torch.arange(4500) % 7 < 2, 0, x * x * x * 1.7).to(dtype)
    is_golden(cubes, "tiered", GOLDEN / f"{str(dtype).removeprefix('torch.')}_sparse_cubes.bin")


def is_golden(x: Tensor, code: str, path: Path) -> None:
    golden = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    assert same_tensor(lossless.decode(golden), x)
    message = lossless.encode(x, code)
    if lossless.read_header(message).version == 2:  # some of these have few mantissas, which version 1 did not see
        assert len(message) < len(golden)
        return
    assert torch.equal(message, golden)
    assert torch.equal(reference.lossless_encode(x, code, golden.numel()), golden)


def test_near_normal_values_reach_the_promised_ratios() -> None:
    # Bits per element of normal values at four phases of their scale: derived in docs/formats.md, with room for the
    # noise of 2**16 of them.
    for phase in (0.0, 0.25, 0.5, 0.75):
        x = normal(1 << 16) * 2**-phase
        for dtype, code, ratio in (
            (torch.bfloat16, "tiered", 1.485),
            (torch.bfloat16, "window", 1.415),
            (torch.float32, "tiered", 1.19),
            (torch.float8_e5m2, "tiered", 1.39),
        ):
            values = (x / x.abs().max() * 448).to(dtype) if LAYOUTS[dtype].nbytes == 1 else x.to(dtype)
            assert x.numel() * values.element_size() / lossless.encode(values, code).numel() > ratio


def test_zeros_cost_about_a_bit() -> None:
    x = normal(1 << 16, dtype=torch.bfloat16)
    sparse = torch.where(torch.arange(1 << 16) % 10 == 0, x, 0)
    assert 8 * lossless.encode(torch.zeros_like(x)).numel() < 1.05 * x.numel()
    # A tenth of the values at 10.7 bits and the mask.
    assert 8 * lossless.encode(sparse).numel() < (1.07 + 1.05) * x.numel()


def test_float32_that_holds_bfloat16_costs_what_bfloat16_does() -> None:
    x = normal(1 << 14, dtype=torch.bfloat16)
    assert lossless.encode(x.float()).numel() == lossless.encode(x).numel()


@pytest.mark.parametrize("code", ["window", "tiered", "raw"])
def test_capacity_decides_the_size(code: str) -> None:
    for x in (normal(5000, dtype=torch.bfloat16), every_pattern(torch.bfloat16)[:5000], normal(2, 3)):
        exact = lossless.encode(x, code)
        for more in (0, 1, 1000):
            message = lossless.encode(x, code, capacity_nbytes=exact.numel() + more)
            assert message.numel() == exact.numel() + more
            assert not message[exact.numel() :].any()
            assert lossless.read_header(message).nbytes == exact.numel()
            assert same_tensor(lossless.decode(message, expect=x), x)


@pytest.mark.parametrize("capacity_nbytes", [72, 73, 6000, 6900])
def test_a_message_that_does_not_fit_says_so_and_keeps_its_size(capacity_nbytes: int) -> None:
    x = normal(5000, dtype=torch.bfloat16)
    assert lossless.encode(x).numel() > 6600
    message = lossless.encode(
        x if capacity_nbytes < 6600 else every_pattern(torch.bfloat16)[:5000], capacity_nbytes=capacity_nbytes
    )
    header = lossless.read_header(message)
    assert (header.code, header.shape, header.nbytes, message.numel()) == ("too long", (5000,), 72, capacity_nbytes)
    for decode in (lossless.decode, lambda m: lossless.decode_into(m, x), lambda m: lossless.decode_add(m, x.float())):
        with pytest.raises(FormatError, match=r"did not fit the encoder's capacity_nbytes .* encode with a larger one"):
            decode(message)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_add_adds_in_fp32(dtype: torch.dtype) -> None:
    for numel in (0, 1, 33, 5000):
        x, total = normal(numel, dtype=dtype), normal(numel, seed=7)
        expected = total + x.float()
        lossless.decode_add(lossless.encode(x), total)
        assert same_tensor(total, expected)


def test_decode_into_takes_any_shape() -> None:
    x, out = normal(6, 50, dtype=torch.float16), torch.empty(300, dtype=torch.float16)
    lossless.decode_into(lossless.encode(x), out)
    assert same_tensor(out.view(6, 50), x)


def test_offsets_beyond_two_to_the_31_are_exact() -> None:
    """By arithmetic: no tensor of that size is made."""
    numel = 2**33 + 4097
    for dtype, layout in LAYOUTS.items():
        words = numel * (1 + dtype.is_complex)
        assert lossless.max_nbytes(numel, dtype) == 128 + words * layout.nbytes + 5 * -(-words // 4096)
    header = Header(torch.bfloat16, "tiered", (2**20, 2**13), 2**34, 2**34, 0, 0, 0, 2**33)
    assert (header.num_blocks, header.directory_offset, header.payload_offset) == (2**21, 80, 80 + 5 * 2**21)
    # A raw header of that size is read back as it was written, and its length is checked in full.
    front = bytearray(bytes(lossless.encode(torch.zeros(1, 1, dtype=torch.bfloat16), "raw")[:80].tolist()))
    front[8:16] = front[64:72] = numel.to_bytes(8, "little")
    front[72:80] = (1).to_bytes(8, "little")
    nbytes = 80 + 2 * numel
    front[16:24] = front[24:32] = nbytes.to_bytes(8, "little")
    assert parse_header(bytes(front), nbytes).shape == (numel, 1)
    for wrong in (nbytes - 1, nbytes - 2**32, 80 + 2 * 4097):
        with pytest.raises(FormatError, match=f"ascend to at most the {wrong} bytes that are there"):
            parse_header(bytes(front), wrong)


def test_the_package_offers_the_format() -> None:
    x = normal(3, 3)
    assert same_tensor(laconic.decode(laconic.encode(x), expect=laconic.Expect(torch.float32, (3, 3))), x)


def test_results_own_their_memory_and_need_no_gradient() -> None:
    x = normal(5000).requires_grad_()
    message = laconic.encode(x)
    assert message.untyped_storage().nbytes() == message.numel()
    assert not message.requires_grad
    assert not laconic.decode(message).requires_grad
