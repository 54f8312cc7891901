"""Damaged, cut and lying messages: each is refused with a FormatError, and none makes the receiver allocate."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from laconic.errors import FormatError
from laconic.formats import lossless
from laconic.ops import lossless_decode_, lossless_decode_add_, reference
from laconic.ops.lossless import MAX_FRONT_NBYTES, DamagedMessage, Status, front_checksum, parse_header
from tests.formats.lossless_cases import DTYPES, as_dtype, normal, same_tensor
from tests.grid import grid


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that is made."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.nbytes = max(self.nbytes, result.untyped_storage().nbytes())
        return result


def small_message(dtype: torch.dtype, code: str, capacity: int = 0) -> tuple[Tensor, Tensor]:
    """Values with zeros left out, every tier and escapes; its message, with zeros at the end if asked for."""
    x = normal(90)
    x[::4] = 0
    x[-7:] *= 1e-6
    x = as_dtype(x, dtype).view(9, 10)
    exact = lossless.encode(x, code)
    return x, lossless.encode(x, code, capacity_nbytes=exact.numel() + capacity) if capacity else exact


def resealed(message: Tensor) -> Tensor:
    """The message with the header_sum that its front would have, whatever the front says."""
    message = message.clone()
    dims, (numel,) = int(message[7]), struct.unpack("<Q", bytes(message[8:16].tolist()))
    lists = 5 * -(-numel // 4096) if 0 < message[6] < 255 else 0
    front = message[: min(64 + 8 * dims + lists, message.numel())]
    message[48:56] = torch.frombuffer(bytearray(struct.pack("<Q", front_checksum(front))), dtype=torch.uint8)
    return message


def with_number(message: Tensor, place: int, format: str, *values: int) -> Tensor:
    message = message.clone()
    data = struct.pack(f"<{format}", *values)
    message[place : place + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return message


@pytest.mark.parametrize(("dtype", "code"), grid(DTYPES, ["raw", "window", "tiered"], strength=1))
def test_every_flipped_bit_is_found(dtype: torch.dtype, code: str) -> None:
    x, message = small_message(dtype, code, capacity=3)
    out, total = torch.empty_like(x), torch.zeros(x.shape)
    for bit in range(8 * message.numel()):
        damaged = message.clone()
        damaged[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(FormatError):
            lossless.decode(damaged)
        assert lossless_decode_(out, damaged) != Status.SOUND, bit
        assert bit % 5 or lossless_decode_add_(total, damaged) != Status.SOUND, bit
        assert bit % 19 or reference.lossless_decode_(out, damaged) != Status.SOUND, bit


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_flipped_bits_of_larger_messages_are_found(dtype: torch.dtype) -> None:
    x = normal(20_000, dtype=dtype)
    out = torch.empty_like(x)
    generator = torch.Generator().manual_seed(0)
    for code in ("raw", "window", "tiered"):
        message = lossless.encode(x, code)
        for bit in torch.randint(0, 8 * message.numel(), (300,), generator=generator).tolist():
            damaged = message.clone()
            damaged[bit // 8] ^= 1 << (bit % 8)
            assert lossless_decode_(out, damaged) != Status.SOUND, (code, bit)


@pytest.mark.parametrize("code", ["raw", "window", "tiered"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_shorter_and_longer_message_is_refused(dtype: torch.dtype, code: str) -> None:
    x, message = small_message(dtype, code, capacity=5)
    for nbytes in range(message.numel()):
        with pytest.raises(FormatError):
            lossless.decode(message[:nbytes])
        assert lossless_decode_(torch.empty_like(x), message[:nbytes]) != Status.SOUND
    with pytest.raises(FormatError, match=f"capacity is {message.numel()}, but the message has {message.numel() + 1}"):
        lossless.decode(torch.cat((message, message[:1])))
    # The op takes a buffer that is longer than its message.
    out = torch.empty_like(x)
    assert lossless_decode_(out, torch.cat((message, message))) == Status.SOUND
    assert same_tensor(out, x)


def test_each_lie_in_the_header_is_named() -> None:
    x, message = small_message(torch.bfloat16, "tiered")
    size = message.numel()
    lies: list[tuple[Callable[[Tensor], Tensor], Status, str]] = [
        (lambda m: m[:63], Status.TRUNCATED, "the message has 63 bytes, but its header alone takes 64"),
        (lambda m: with_number(m, 0, "I", 7), Status.NOT_A_MESSAGE, "magic is .* but a lossless message begins with"),
        (lambda m: with_number(m, 4, "B", 3), Status.VERSION, "version is 3, but this release reads versions 1 "),
        (lambda m: with_number(m, 5, "B", 7), Status.FIELD, "dtype is 7, but it must be at most 6"),
        (lambda m: with_number(m, 6, "B", 3), Status.FIELD, "code is 3, but it must be 0, 1, 2 or 255"),
        (lambda m: with_number(m, 7, "B", 9), Status.FIELD, "num_dims is 9, but it must be at most 8"),
        (lambda m: with_number(m, 56, "Q", 1), Status.FIELD, "bytes 56 to 63 hold 1, but they must be 0"),
        (lambda m: with_number(m, 16, "Q", size + 1), Status.LENGTH, f"nbytes is {size + 1} and capacity {size}"),
        (lambda m: with_number(m, 24, "Q", size + 1), Status.LENGTH, "ascend to at most the .* bytes that are there"),
        (lambda m: with_number(m, 24, "Q", size - 1), Status.LENGTH, f"nbytes is {size} and capacity {size - 1}"),
        (lambda m: with_number(m, 8, "Q", 2**63), Status.LENGTH, f"nbytes is {size}, but that cannot hold 9223372"),
        (lambda m: with_number(m, 8, "Q", 0), Status.LENGTH, "cannot hold 0 elements with code 'tiered'"),
        (lambda m: with_number(m, 6, "B", 0), Status.LENGTH, "cannot hold 90 elements with code 'raw'"),
        (lambda m: with_number(m, 6, "B", 255), Status.LENGTH, "cannot hold 90 elements with code 'too long'"),
        (lambda m: with_number(m, 64, "2Q", 9, 11), Status.FIELD, r"shape is \(9, 11\), but its product must be numel"),
        (
            lambda m: with_number(m, 64, "2Q", 10, 9),
            Status.MISMATCH,
            r"holds torch.bfloat16 \(10, 9\), but .* expected",
        ),
        (lambda m: with_number(m, 5, "B", 2), Status.MISMATCH, r"holds torch.float16 \(9, 10\), but torch.bfloat16"),
    ]
    for lie, status, text in lies:
        with pytest.raises(DamagedMessage, match=text) as caught:
            lossless.decode(resealed(lie(message)) if status is not Status.TRUNCATED else lie(message), expect=x)
        assert caught.value.status == status


def test_damage_behind_the_header_is_named() -> None:
    x, message = small_message(torch.bfloat16, "tiered", capacity=4)
    lists, payload = 80, 85
    for damaged, status, text in (
        (with_number(message, 48, "Q", 0), Status.HEADER_SUM, "header_sum does not fit"),
        (with_number(message, lists, "H", 1), Status.DIRECTORY, "an entry that no encoder writes"),
        (with_number(message, lists + 2, "B", 4), Status.DIRECTORY, "an entry that no encoder writes"),
        (with_number(message, lists + 2, "B", 2 | 64), Status.DIRECTORY, "an entry that no encoder writes"),
        (with_number(message, lists + 2, "B", 2 | 16), Status.DIRECTORY, "an entry that no encoder writes"),
        (with_number(message, lists + 2, "B", 0), Status.DIRECTORY, "an entry that no encoder writes"),
        (with_number(message, lists + 4, "B", 4), Status.DIRECTORY, "an entry that no encoder writes"),
        (with_number(message, lists + 4, "B", 64), Status.DIRECTORY, "an entry that no encoder writes"),
        (with_number(message, lists + 2, "B", 2), Status.PAYLOAD, "payload has another length than its codes need"),
        (with_number(message, payload, "I", 0), Status.PAYLOAD, "payload has another length than its codes need"),
        (with_number(message, payload + 20, "I", 99), Status.CHECKSUM, "do not have the checksum of the original"),
        (with_number(message, message.numel() - 1, "B", 1), Status.TRAILING, "are not all zero"),
    ):
        sealed = damaged if status is Status.HEADER_SUM else resealed(damaged)
        with pytest.raises(DamagedMessage, match=text) as caught:
            lossless.decode(sealed, expect=x)
        assert caught.value.status == status
        assert reference.lossless_decode_(torch.empty_like(x), sealed) == status
    assert lossless.read_header(resealed(with_number(message, lists, "H", 1))).shape == (9, 10)
    with pytest.raises(FormatError, match="header_sum does not fit"):
        lossless.read_header(with_number(message, lists, "H", 1))


def test_an_empty_message_with_blocks_is_refused() -> None:
    message = with_number(lossless.encode(torch.empty(0, dtype=torch.bfloat16)), 6, "B", 2)
    out = torch.empty(0, dtype=torch.bfloat16)
    with pytest.raises(FormatError, match="cannot hold 0 elements with code 'tiered'"):
        lossless.decode(resealed(message))
    for decode in (lossless_decode_, reference.lossless_decode_):
        assert decode(out, resealed(message)) == Status.LENGTH


def test_shapes_that_overflow_are_refused() -> None:
    message = lossless.encode(torch.empty(0, 1, 1), "raw")
    for shape in ((0, 2**62, 2**62), (2**62, 2**62, 0), (0, 2**63, 1), (2**64 - 1, 1, 0), (2**32, 2**32, 1)):
        lie = resealed(with_number(message, 64, "3Q", *shape))
        with pytest.raises(FormatError, match="and without zeros below 2"):
            lossless.decode(lie)
        assert lossless_decode_(torch.empty(0), lie) == Status.FIELD
    for shape in ((0, 2**62, 1), (2**31, 0, 2**31)):
        assert lossless.decode(resealed(with_number(message, 64, "3Q", *shape))).shape == shape


@pytest.mark.parametrize("code", [0, 1, 2])
@pytest.mark.parametrize("numel", [8 * 4096 + 1, 2**20, 2**31, 2**40, 2**62])
def test_a_lying_number_of_elements_allocates_nothing(numel: int, code: int) -> None:
    # A message of 4 KB that claims much more, with shape, checksum and lengths to fit wherever that is possible.
    message = with_number(lossless.encode(normal(2000, dtype=torch.bfloat16), "raw"), 8, "Q", numel)
    message = resealed(with_number(with_number(message, 64, "Q", numel), 6, "B", code))
    with Largest() as largest, pytest.raises(FormatError):
        lossless.decode(message)
    assert largest.nbytes <= 2 * message.numel()


def test_no_message_expands_more_than_eight_elements_per_byte() -> None:
    # What a hostile sender can reach without an expectation: rows of zeros, the densest that there is.
    x = torch.zeros(1 << 16, dtype=torch.float32)
    message = lossless.encode(x)
    with Largest() as largest:
        lossless.decode(message)
    assert largest.nbytes == x.nbytes <= 32 * message.numel()
    # And a header for more than the payload can hold goes no further than that.
    lie = with_number(with_number(message, 8, "Q", 8 * message.numel()), 64, "Q", 8 * message.numel())
    with Largest() as largest, pytest.raises(FormatError, match="cannot hold"):
        lossless.decode(resealed(lie))
    assert largest.nbytes <= message.numel()


def test_an_unexpected_message_allocates_nothing() -> None:
    message = lossless.encode(torch.zeros(1 << 16))
    for expect in (
        torch.empty(3),
        lossless.Expect(torch.float32, (1 << 16, 1)),
        lossless.Expect(torch.int8, (1 << 16,)),
    ):
        with Largest() as largest, pytest.raises(FormatError, match="sender and receiver must mean the same tensor"):
            lossless.decode(message, expect=expect)
        assert largest.nbytes <= 2 * message.numel()
    for decode in (lossless.decode_into, lossless.decode_add):
        with pytest.raises(
            FormatError, match=r"holds 65536 elements of torch.float32, but it is decoded into 3 elements"
        ):
            decode(message, torch.empty(3))


def test_what_is_not_a_buffer_of_bytes_is_refused() -> None:
    for buffer, text in (
        (torch.zeros(100), r"the message is torch.float32 with shape \(100,\) .* but it must be contiguous uint8"),
        (torch.zeros(10, 10, dtype=torch.uint8), r"the message is torch.uint8 with shape \(10, 10\)"),
        (
            torch.zeros(100, 2, dtype=torch.uint8)[:, 0],
            r"with shape \(100,\) and strides \(2,\), but it must be contig",
        ),
        (torch.zeros(0, dtype=torch.uint8), "the message has 0 bytes"),
        (torch.zeros(100, dtype=torch.uint8), "but a lossless message begins with"),
    ):
        with pytest.raises(FormatError, match=text):
            lossless.decode(buffer)


def test_misaligned_buffers_are_read() -> None:
    for dtype in DTYPES:
        x, message = small_message(dtype, "tiered")
        for offset in range(1, 9):
            room = torch.zeros(message.numel() + 16, dtype=torch.uint8)
            view = room[offset : offset + message.numel()]
            view.copy_(message)
            assert same_tensor(lossless.decode(view), x)
            assert parse_header(bytes(view[:MAX_FRONT_NBYTES].tolist()), view.numel()).shape == (9, 10)
