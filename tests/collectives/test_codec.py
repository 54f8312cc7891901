"""Codecs: what they promise about sizes, bits and damaged messages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.collectives.codec import Blockwise, Codec, Raw
from laconic.errors import FormatError
from laconic.formats import BlockFormat

BLOCKWISE = [Blockwise(BlockFormat(code)) for code in ("nf4", "int5", "int8", "uint2")]
CODECS: list[Codec] = [Raw(), *BLOCKWISE, Blockwise(BlockFormat("int8", 128, torch.float32))]
CODECS.append(Blockwise(BlockFormat("int8"), checksum=True))
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@given(st.integers(0, 300), st.sampled_from(CODECS), st.sampled_from(FLOATS), st.integers(0, 5))
def test_message_is_decoded_to_what_its_codec_stands_for(
    numel: int, codec: Codec, dtype: torch.dtype, seed: int
) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)
    message = codec.encode(x)
    assert message.dtype == torch.uint8
    assert message.numel() <= codec.max_nbytes(numel, dtype)
    assert codec.capacity_nbytes(numel, dtype) in (None, message.numel())
    assert codec.fits(message)
    out = torch.empty_like(x)
    codec.decode_into(message, out)
    if isinstance(codec, Blockwise):
        expected = codec.format.quantize(x).dequantize()
    else:
        expected = x
    assert torch.equal(out, expected)
    total = torch.ones(numel)
    codec.decode_add(message, total, dtype)
    assert torch.equal(total, 1 + expected.float())


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float8_e4m3fn, torch.float64, torch.complex64])
def test_raw_takes_any_dtype(dtype: torch.dtype) -> None:
    x = torch.arange(40).to(torch.float32).to(dtype)
    out = torch.empty_like(x)
    Raw().decode_into(Raw().encode(x), out)
    assert torch.equal(out.view(torch.uint8), x.view(torch.uint8))


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_message_of_another_length_is_refused(codec: Codec) -> None:
    message = codec.encode(torch.randn(100))
    for wrong in (message[:-1], message[:3], torch.cat((message, message[:1]))):
        with pytest.raises(FormatError, match="bytes, but"):
            codec.decode_into(wrong, torch.empty(100))
        with pytest.raises(FormatError, match="bytes, but"):
            codec.decode_add(wrong, torch.empty(100), torch.float32)


def test_damaged_header_of_a_blockwise_message_is_refused() -> None:
    codec = BLOCKWISE[0]
    message = codec.encode(torch.randn(100))
    for bit in range(8 * 32):
        damaged = message.clone()
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError, match="it was damaged or is another's"):
            codec.decode_into(damaged, torch.empty(100))


@given(numel=st.integers(1, 700), seed=st.integers(0, 2**31), place=st.floats(0, 1, exclude_max=True))
@settings(max_examples=60)
def test_any_flipped_bit_of_a_checked_blockwise_message_is_refused(numel: int, seed: int, place: float) -> None:
    plain = BLOCKWISE[seed % len(BLOCKWISE)]
    codec = Blockwise(plain.format, checksum=True)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    message = codec.encode(x)
    assert torch.equal(message[:-8], plain.encode(x))
    out, expected = torch.empty(numel), torch.empty(numel)
    codec.decode_into(message, out)
    plain.decode_into(plain.encode(x), expected)
    assert torch.equal(out, expected)
    bit = int(place * 8 * message.numel())
    message[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FormatError, match="damaged"):
        codec.decode_into(message, out)
    with pytest.raises(FormatError, match="damaged"):
        codec.decode_add(message, torch.zeros(numel), torch.float32)


def test_blockwise_message_of_a_dtype_without_blocks_is_refused() -> None:
    with pytest.raises(FormatError, match=r"int64, but nf4-b64-bfloat16 takes .*; use Raw\(\) or Lossless\(\)"):
        BLOCKWISE[0].encode(torch.arange(3))


def test_names_tell_codecs_apart() -> None:
    assert len({codec.name for codec in CODECS}) == len(CODECS)
