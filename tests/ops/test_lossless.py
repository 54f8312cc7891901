"""The lossless ops: what they accept, what the compiler may assume, and the documentation's worked example."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from laconic.errors import FormatError
from laconic.ops import lossless_decode_, lossless_decode_add_, lossless_encode, native, reference
from laconic.ops.lossless import HEADER_NBYTES, Status
from tests.formats.lossless_cases import DTYPES, bits, normal, same_tensor


def message_of(x: Tensor, code: str = "tiered") -> Tensor:
    buffer = lossless_encode(x, code=code)
    return buffer[: int(buffer[16:24].view(torch.int64))].clone()


def test_the_documentations_worked_example() -> None:
    # 16 values: eight of 1, three of 2, two of 0.5, then -4, 0.125 and infinity, as version 1 wrote them.
    x = torch.tensor([1.0] * 8 + [2.0] * 3 + [0.5] * 2 + [-4.0, 0.125, float("inf")], dtype=torch.bfloat16)
    message = bytes.fromhex(
        "4c434e5a01010201 1000000000000000 6700000000000000 6700000000000000"
        " 00fb01bd02000000 00e488740e000000 9f241d24c1d65501 0000000000000000 1000000000000000"
        "1a00 02 7e 3a"
        "00 00 00 00 00 00 00 00 00 00 00 00 00 80 00 00"  # mantissas and signs
        "ff e0 00 e7"  # tier 1: the codes 1 x 8, 2 x 3, 0 x 2, 3 x 3
        "04 05"  # tier 2: 2, 0, 3
        "01 01 01"  # tier 3: 7
        "ff"  # the exponent that escaped
    )
    for decode in (lossless_decode_, reference.lossless_decode_):
        out = torch.empty_like(x)
        assert decode(out, torch.frombuffer(bytearray(message), dtype=torch.uint8)) == Status.SOUND
        assert same_tensor(out, x)
    assert len(message_of(x)) < len(message)  # by rank


def test_the_documentations_ranked_example() -> None:
    x = torch.tensor([1.0, 2.0**-40]).repeat(8).bfloat16()
    for encode in (lossless_encode, lambda x, code: reference.lossless_encode(x, code, None)):
        buffer = encode(x, code="tiered")
        assert buffer[:8].tolist() == [*b"LCNZ", 2, 1, 2, 1]
        assert int(buffer[16:24].view(torch.int64)) == 86
        assert buffer[72:77].tolist() == [9, 0, 4, 0, 0]
        assert bytes(buffer[77:86].tolist()).hex(" ") == "00 01 00 01 02 57 7f 55 55"


# opcheck multiplies its arguments, which torch does not do in fp8.
def test_compiled_calls_give_the_same_bytes() -> None:
    def there_and_back(x: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
        message = lossless_encode(x * 2, code="tiered", capacity_nbytes=capacity)
        out, total = torch.zeros_like(x), torch.ones(x.shape)
        status = lossless_decode_(out, message) + lossless_decode_add_(total, message)
        return message, total + out, status

    compiled = torch.compile(there_and_back, fullgraph=True, dynamic=True, backend="aot_eager")
    for numel, capacity in ((5000, 9000), (5001, 9001), (40, 300)):
        x = normal(numel, dtype=torch.bfloat16)
        for a, b in zip(compiled(x, capacity), there_and_back(x, capacity), strict=True):
            assert same_tensor(a, b)
        assert there_and_back(x, capacity)[2] == Status.SOUND


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"x": torch.empty(3, dtype=torch.bits8)},
            "x.dtype is torch.bits8, but it must be one of bfloat16, float32, fl",
        ),
        ({"x": torch.empty(3, dtype=torch.bits16)}, "x.dtype is torch.bits16, .*; view other types as uint8"),
        ({"x": torch.ones(2, 2).to_sparse()}, "x.layout is torch.sparse_coo, but it must be strided"),
        ({"x": torch.ones((1,) * 9)}, "x has 9 dimensions, but a message holds at most 8; flatten x first"),
        ({"code": "auto"}, "code is 'auto', but it must be one of raw, window, tiered"),
        ({"capacity_nbytes": 79}, "capacity_nbytes is 79, but the header of a tensor of 2 dimensions takes 80"),
        ({"capacity_nbytes": -1}, "capacity_nbytes is -1, but the header"),
    ],
)
def test_bad_argument_of_encode_is_named(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"x": torch.ones(2, 3), "code": "tiered", "capacity_nbytes": None} | change
    with pytest.raises(FormatError, match=message):
        lossless_encode(arguments.pop("x"), **arguments)


@pytest.mark.parametrize(
    ("out", "message", "text"),
    [
        (
            torch.empty(3, dtype=torch.bits8),
            torch.zeros(80, dtype=torch.uint8),
            "out.dtype is torch.bits8, but it must be",
        ),
        (torch.ones(4, 3).t(), torch.zeros(80, dtype=torch.uint8), "out must be strided and contiguous"),
        (torch.ones(3), torch.zeros(80, dtype=torch.int8), "message is torch.int8 with shape (80,) and strides (1,)"),
        (torch.ones(3), torch.zeros(8, 10, dtype=torch.uint8), "message is torch.uint8 with shape (8, 10)"),
        (torch.ones(3), torch.zeros(80, dtype=torch.uint8)[::2], "and strides (2,), but it must be contiguous uint8"),
        (torch.ones(3), torch.zeros(80, dtype=torch.uint8, device="meta"), "message is on meta and out on cpu"),
    ],
)
def test_bad_argument_of_decode_is_named(out: Tensor, message: Tensor, text: str) -> None:
    with pytest.raises(FormatError, match=re.escape(text)):
        lossless_decode_(out, message)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_message_that_does_not_fit_is_a_header_that_says_so(dtype: torch.dtype) -> None:
    for shape in ((), (1,), (3, 100), (2, 3, 50), (2, 1, 3, 50)):
        x, capacity = torch.ones(shape).to(dtype), HEADER_NBYTES + 8 * len(shape)
        message = reference.lossless_encode(x, "tiered", capacity)
        assert torch.equal(native.lossless_encode(x, "tiered", capacity), message), shape
        assert int.from_bytes(bytes(message[16:24].tolist()), "little") == capacity, shape


def test_sums_are_float32() -> None:
    with pytest.raises(FormatError, match=r"total.dtype is torch.bfloat16, but sums are float32"):
        lossless_decode_add_(torch.ones(3, dtype=torch.bfloat16), message_of(torch.ones(3)))


def test_decoding_takes_only_its_own_type_and_size() -> None:
    message = message_of(normal(6, 7, dtype=torch.bfloat16))
    for decode in (lossless_decode_, reference.lossless_decode_):
        assert decode(torch.empty(42, dtype=torch.bfloat16), message) == Status.SOUND
        assert decode(torch.empty(42, dtype=torch.float16), message) == Status.MISMATCH
        assert decode(torch.empty(41, dtype=torch.bfloat16), message) == Status.MISMATCH
    for decode_add in (lossless_decode_add_, reference.lossless_decode_add_):
        assert decode_add(torch.zeros(7, 6), message) == Status.SOUND
        assert decode_add(torch.zeros(43), message) == Status.MISMATCH


def test_a_sum_over_messages_is_the_sum_in_their_order() -> None:
    parts = [normal(5000, dtype=torch.bfloat16, seed=seed) for seed in range(5)]
    total, expected = torch.zeros(5000), torch.zeros(5000)
    for part in parts:
        assert lossless_decode_add_(total, message_of(part)) == Status.SOUND
        expected += part.float()
    assert torch.equal(bits(total), bits(expected))
