"""Ranked blocks, and the dtypes that only they code: every structure comes back, in not much more than its entropy."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laconic.errors import FormatError
from laconic.formats import lossless
from laconic.ops import reference
from laconic.ops.lossless import DTYPE_NUMBERS, EXPONENT_DTYPES, LAYOUTS, Status, front_checksum
from tests.formats import slow_decoder
from tests.formats.lossless_cases import EVERY_DTYPE, bits, same_tensor
from tests.formats.structured import N, entropy_bits, structured

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

DTYPES = tuple(DTYPE_NUMBERS)
GOLDEN = Path(__file__).parent / "golden"
# Bits above the entropy per byte of a word: windows and one-bit ranks cannot say less than a bit, and float8 whose
# windows fit are left to them, because they are several times as fast.
FLOAT8 = tuple(dtype for dtype in DTYPES if dtype.itemsize == 1 and dtype.is_floating_point)
ABOVE, ABOVE_FLOAT8 = 1.1, 2.0


@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=str)
def test_structure_comes_back_in_little_more_than_its_entropy(dtype: torch.dtype) -> None:
    for name, x in structured(dtype).items():
        for code in ("window", "tiered"):
            message = lossless.encode(x, code)
            assert same_tensor(lossless.decode(message), x), (name, code)
            assert len(message) <= 64 + 8 * (1 + dtype.is_complex) + x.nbytes
        entropy, most = entropy_bits(x), ABOVE_FLOAT8 if dtype in FLOAT8 else ABOVE
        assert 8 * len(message) <= entropy + most * 8 * x.nbytes / 8, name
        if dtype not in FLOAT8 and 8 * x.nbytes > 1.2 * entropy:
            assert x.nbytes > 1.1 * len(message), name


@pytest.mark.parametrize(
    "name", ["two far modes", "two far modes at random", "every third infinite", "every third NaN"]
)
def test_far_modes_of_bfloat16_reach_what_their_exponents_allow(name: str) -> None:
    x = structured(torch.bfloat16)[name]
    exponent = (x.view(torch.int16).int() >> 7) & 255
    share = torch.bincount(exponent).double() / N
    allowed = 16 / (8 - float((share * share.clamp(min=1e-300).log2()).sum()))
    assert x.nbytes / len(lossless.encode(x)) > 0.97 * allowed > 1.3


@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=str)
def test_the_documentation_is_enough_to_decode(dtype: torch.dtype) -> None:
    for name, x in structured(dtype).items():
        x = x[-4200:] if name in ("both zeros", "two far modes") else x[:333]
        number, shape, original = slow_decoder.decode(bytes(lossless.encode(x).tolist()))
        assert number == DTYPE_NUMBERS[dtype]
        assert shape == (len(x), 2)[: 1 + dtype.is_complex]
        assert original == bytes(bits(x).tolist()), name


@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=str)
def test_shapes_strides_and_extremes_come_back_as_what_they_were(dtype: torch.dtype) -> None:
    x = structured(dtype)["integers"]
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 2 if dtype == torch.bool else 256, (9000 * dtype.itemsize,), generator=generator)
    for y in (
        x[0],
        x[:0],
        x[:0].view(3, 0, 20),
        x[:6000].view(60, 100).t(),
        x[::7],
        x[:1].expand(30, 40),
        x[5:4102],
        x[:4096],
        x[:1].view((1,) * (8 - dtype.is_complex)),
        noise.to(torch.uint8).view(dtype),
    ):
        for code in ("raw", "window", "tiered"):
            message = lossless.encode(y, code)
            assert same_tensor(lossless.decode(message, expect=y), y)
            header = lossless.read_header(message)
            assert (header.dtype, header.shape) == (y.dtype, y.shape)
        out = torch.empty(y.shape, dtype=dtype)
        lossless.decode_into(message, out)
        assert same_tensor(out, y.contiguous())
    if dtype.is_complex:
        with pytest.raises(FormatError, match="x has 8 dimensions, but a message holds at most 7 of complex numbers"):
            lossless.encode(x[:1].view((1,) * 8))
    if dtype not in EXPONENT_DTYPES:
        with pytest.raises(FormatError, match="another dtype"):
            lossless.decode_add(lossless.encode(x), torch.zeros(x.shape))


@settings(max_examples=80, derandomize=True)
@given(st.data())
def test_any_mixture_of_words_comes_back(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([dtype for dtype in DTYPES if dtype != torch.bool]))
    size = LAYOUTS[dtype].nbytes * (1 + dtype.is_complex)
    seed = data.draw(st.integers(0, 2**32))
    words = data.draw(st.lists(st.binary(min_size=size, max_size=size), min_size=1, max_size=140))
    numel = data.draw(st.sampled_from([1, 9, 600, 4096, 5000]))
    generator = torch.Generator().manual_seed(seed)
    table = torch.frombuffer(bytearray(b"".join(words)), dtype=torch.uint8).view(-1, size)
    # Skewed, so that ranks differ in how often they come.
    skew = data.draw(st.sampled_from([0.0, 1.0, 3.0]))
    share = torch.arange(1, len(words) + 1).double() ** -skew
    x = table[torch.multinomial(share, numel, replacement=True, generator=generator)].flatten().view(dtype)
    code = data.draw(st.sampled_from(("window", "tiered")))
    message = lossless.encode(x, code)
    assert same_tensor(lossless.decode(message), x)
    assert torch.equal(reference.lossless_encode(x, code, None)[: len(message)], message)


# --- versions ---


def test_messages_that_version_1_could_write_are_still_written_so() -> None:
    values = structured(torch.bfloat16)
    for x in (values["coarse mantissas"] * 0 + torch.randn(N).bfloat16(), torch.randn(5000), torch.randn(500).half()):
        assert lossless.read_header(lossless.encode(x)).version == 1
    assert lossless.read_header(lossless.encode(values["two far modes"])).version == 2
    assert lossless.read_header(lossless.encode(values["two far modes"], "raw")).version == 1
    assert lossless.read_header(lossless.encode(torch.arange(3), "raw")).version == 2


def sealed(message: Tensor, front: int, **changes: int) -> Tensor:
    message = message.clone()
    for place, value in changes.items():
        message[int(place.removeprefix("at"))] = value
    header_sum = struct.pack("<Q", front_checksum(message[:front]))
    message[48:56] = torch.frombuffer(bytearray(header_sum), dtype=torch.uint8)
    return message


def test_what_a_version_does_not_have_is_refused() -> None:
    ranked = lossless.encode(structured(torch.bfloat16)["two far modes"][:500])
    integers = lossless.encode(torch.arange(500))
    for message, changes, text in (
        (ranked, {"at4": 3}, "version is 3, but this release reads versions 1 and 2"),
        (ranked, {"at4": 0}, "version is 0, but this release reads versions 1 and 2"),
        (ranked, {"at4": 1}, "has an entry that no encoder writes"),
        (integers, {"at4": 1}, "dtype is 12, but it must be at most 6 in version 1"),
        (integers, {"at5": 21}, "dtype is 21, but it must be at most 20 in version 2"),
        (integers, {"at5": 16}, "but that of complex numbers ends with 2 parts"),
    ):
        front = 77
        with pytest.raises(FormatError, match=text):
            lossless.decode(sealed(message, front, **changes))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16, torch.int64, torch.complex64], ids=str)
def test_golden_ranked_messages(dtype: torch.dtype) -> None:
    """Made by whole numbers alone, so that they are the same in every release of torch."""
    index = torch.arange(700)
    hashed = ((index * 2654435761 + 12345) % (1 << 32)) >> 20
    levels = torch.tensor([0.0, 1.5, -3.25, 1e-3, 2.0**40, -0.0, float("inf"), 7.0])
    x = levels[hashed % 8] if dtype.is_floating_point else hashed % 300
    x = torch.complex(levels[hashed % 8], levels[hashed % 5]) if dtype.is_complex else x.to(dtype)
    message = lossless.encode(x)
    path = GOLDEN / f"{str(dtype).removeprefix('torch.')}_ranked.bin"
    golden = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    assert golden[4] == 2
    assert same_tensor(lossless.decode(golden), x)
    assert torch.equal(message, golden)


# --- damage ---


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.uint8,
        *(pytest.param(d, marks=pytest.mark.slow) for d in (torch.float32, torch.int64, torch.complex64)),
    ],
    ids=str,
)
def test_every_flipped_bit_and_every_cut_of_a_ranked_message_is_found(dtype: torch.dtype) -> None:
    x = structured(dtype)["few levels" if dtype == torch.uint8 else "both zeros"][:90]
    message = lossless.encode(x)
    assert lossless.read_header(message).version == 2
    out = torch.empty_like(x)
    for place in range(len(message)):
        for bit in range(8):
            damaged = message.clone()
            damaged[place] ^= 1 << bit
            with pytest.raises(FormatError):
                lossless.decode_into(damaged, out)
            found = reference.lossless_decode_(out, damaged)
            assert found != Status.SOUND
        with pytest.raises(FormatError):
            lossless.decode(message[:place])


def test_ranked_payloads_that_no_encoder_writes_are_refused() -> None:
    x = structured(torch.bfloat16)["few levels"][:90]
    message = lossless.encode(x)
    front = 77
    assert front + 2 < len(message)
    number, listed = int(message[front]), int(message[front + 1])
    for place, values in ((front, range(256)), (front + 1, range(256))):
        for value in values:
            damaged = message.clone()
            damaged[place] = value
            if value != (number, listed)[place - front]:
                with pytest.raises(FormatError):
                    lossless.decode(damaged)


def test_constant_tensors_keep_the_bound_on_what_a_message_may_claim() -> None:
    for dtype in DTYPES:
        x = structured(dtype)["constant"]
        message = lossless.encode(x)
        assert x.nbytes <= 64 * (1 + dtype.is_complex) * len(message)
        header = lossless.read_header(message)
        assert header.numel <= 8 * (header.nbytes - header.payload_offset) or header.code == "raw"
