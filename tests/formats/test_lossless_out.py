"""`encode` and `decode` into the caller's memory."""

from __future__ import annotations

import pytest
import torch

from laconic.errors import FormatError
from laconic.formats.lossless import decode, encode, max_nbytes
from tests.formats.lossless_cases import normal, same_tensor


@pytest.mark.parametrize("numel", [0, 1, 5000, 100_003])
def test_out_receives_what_a_new_tensor_would(numel: int) -> None:
    x = normal(numel, dtype=torch.bfloat16)
    message = encode(x)
    buffer = torch.full((max_nbytes(numel, x.dtype),), 7, dtype=torch.uint8)
    written = encode(x, out=buffer)
    assert written.data_ptr() == buffer.data_ptr()
    assert torch.equal(written, message)
    assert (buffer[message.numel() :] == 7).all()  # nothing behind the message is touched
    out = torch.empty_like(x)
    assert decode(written, out=out) is out
    assert same_tensor(out, x)
    assert same_tensor(decode(message), x)


def test_encoding_over_its_own_input_is_safe() -> None:
    memory = torch.randn(5000).view(torch.uint8)
    x = memory.view(torch.float32)
    wanted = encode(x)
    assert torch.equal(encode(x[:4000], out=memory), encode(decode(wanted)[:4000]))


def test_a_short_out_is_refused_and_untouched() -> None:
    x = normal(5000, dtype=torch.bfloat16)
    buffer = torch.full((encode(x).numel() - 1,), 7, dtype=torch.uint8)
    with pytest.raises(FormatError, match=r"out has \d+ bytes, but the message has"):
        encode(x, out=buffer)
    assert (buffer == 7).all()


@pytest.mark.parametrize(
    ("out", "capacity_nbytes", "words"),
    [
        (torch.empty(99, dtype=torch.int8), None, "must be contiguous uint8"),
        (torch.empty(99, 2, dtype=torch.uint8), None, "must be contiguous uint8"),
        (torch.empty(99, dtype=torch.uint8)[::2], None, "must be contiguous uint8"),
        (torch.empty(99, dtype=torch.uint8, device="meta"), None, "out is on the meta device"),
        (torch.empty(99, dtype=torch.uint8), 99, "with out it must be None"),
        ([0] * 99, None, "out is a list"),
    ],
)
def test_encode_refuses_an_out_by_name(out: torch.Tensor, capacity_nbytes: int | None, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        encode(torch.ones(3), capacity_nbytes=capacity_nbytes, out=out)


@pytest.mark.parametrize(
    "out", [torch.empty(6), torch.empty(2, 3, dtype=torch.int32), torch.empty(3, 2).t(), torch.empty(3, 2)]
)
def test_decode_refuses_an_out_that_does_not_fit(out: torch.Tensor) -> None:
    with pytest.raises(FormatError, match="out"):
        decode(encode(torch.ones(2, 3)), out=out)


@pytest.mark.parametrize("first", [0, 4, 8])
def test_decode_refuses_an_out_over_the_message(first: int) -> None:
    x = torch.ones(4, 1)
    message = encode(x)
    memory = torch.empty(message.numel() + 8, dtype=torch.uint8)
    placed = memory[8:].copy_(message)
    with pytest.raises(FormatError, match="overlap"):
        decode(placed, out=memory[first : first + 16].view(torch.float32).view(4, 1))
    assert same_tensor(decode(placed), x)


def test_decode_takes_an_out_right_behind_the_message() -> None:
    x = torch.ones(4, 1)
    message = encode(x, "raw")  # a multiple of four bytes long
    memory = torch.cat([message, torch.zeros(16, dtype=torch.uint8)])
    decode(memory[:-16], out=memory[-16:].view(torch.float32).view(4, 1))
    assert same_tensor(memory[-16:].view(torch.float32).view(4, 1), x)
