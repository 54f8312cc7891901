"""The C++ kernels write the reference's messages and read them alike, under every instruction set."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from laconic.ops import native, reference
from laconic.ops.lossless import DTYPE_NUMBERS, EXPONENT_DTYPES, Status, max_nbytes
from tests.formats.lossless_cases import bits
from tests.formats.structured import structured
from tests.grid import slow_but
from tests.ops.cases import threads

pytestmark = [
    pytest.mark.skipif(not native.supported_isas(), reason="the C++ kernels are not built"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

ISAS = native.supported_isas()
GUARD = 64
FEW_DTYPES = slow_but(DTYPE_NUMBERS, torch.bfloat16, torch.float32)
"""Which code an encoder takes depends on the width of a word, and on whether it has an exponent."""


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.uint8:
        return (x * 20 + 128).clamp(0, 255).to(dtype)
    if dtype == torch.int8:
        return (x * 30).clamp(-128, 127).to(dtype)
    if not dtype.is_floating_point and not dtype.is_complex:
        return (x.double() * 1000).clamp(0, 60000).long().to(dtype)
    if dtype == torch.float8_e8m0fnu:
        return cast(x, torch.uint8).view(dtype)
    return x.to(dtype)


def awkward_tensors(dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Sizes around vectors, samples and blocks; data that takes each branch of the encoder's decisions."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    for numel in (0, 1, 7, 31, 32, 33, 63, 64, 65, 127, 511, 545, 4095, 4096, 4097, 8255):
        yield f"{numel}", cast(normal(numel), dtype)
    for zeros in (0.05, 0.13, 0.6, 0.999, 1.0):
        kept = torch.rand(9001, generator=generator) >= zeros
        yield f"{zeros:.1%} zeros", cast(torch.where(kept, normal(9001), 0), dtype)
    yield "minus zeros", cast(-torch.zeros(4500), dtype)
    yield "heavy tails", cast(normal(9001) / normal(9001), dtype)
    yield "equal", cast(torch.full((4500,), 3.0), dtype)
    yield "bfloat16 numbers", cast(normal(4500).bfloat16().float(), dtype)
    yield "float16 numbers", cast(normal(4500).half().float(), dtype)
    for scale in (1e-40, 1e-20, 1e20):
        yield f"times {scale}", cast(normal(4500) * scale, dtype)
    yield "a scale per block", cast(normal(9, 4096) * torch.exp2(20 * normal(9, 1)), dtype)
    size = torch.empty((), dtype=dtype).element_size()
    random = torch.randint(256, (9001 * size,), generator=generator, dtype=torch.uint8)
    yield "random bits", random.view(dtype)
    yield "all bits set", torch.full((4500 * size,), 255, dtype=torch.uint8).view(dtype)
    if size == 2:
        yield "every pattern", torch.arange(1 << 16).to(torch.int16).view(dtype)
    yield "misaligned", random[: 4500 * size].clone().view(dtype)[3:] if size == 1 else random.view(dtype)[1:4400]
    yield "0-d", cast(normal(), dtype)
    yield "3-d, transposed", cast(normal(3, 40, 50).transpose(0, 2), dtype)


def message_of(encode: Callable[..., Tensor], x: Tensor, code: str, **how: str) -> Tensor:
    buffer = encode(x, code, None, **how)
    assert buffer.shape == (max_nbytes(x.numel(), x.dtype),)
    return buffer[: int(buffer[16:24].view(torch.int64))]


def guarded(numel: int, dtype: torch.dtype) -> tuple[Tensor, Callable[[], bool]]:
    """Room for a result with bytes around it, and whether these are still what they were."""
    nbytes = numel * torch.empty((), dtype=dtype).element_size()
    room = torch.full((nbytes + 2 * GUARD,), 0x5A, dtype=torch.uint8)
    return room[GUARD : GUARD + nbytes].view(dtype), lambda: bool(
        (room[:GUARD] == 0x5A).all() and (room[GUARD + nbytes :] == 0x5A).all()
    )


@pytest.mark.parametrize("dtype", slow_but(DTYPE_NUMBERS, torch.bfloat16, torch.float32, torch.uint8))
def test_messages_are_the_references_and_come_back(dtype: torch.dtype) -> None:
    for name, x in awkward_tensors(dtype):
        for code in ("window", "tiered", "raw"):
            expected = message_of(reference.lossless_encode, x, code)
            for isa in ISAS:
                where = (name, code, isa)
                assert torch.equal(message_of(native.lossless_encode, x, code, isa=isa), expected), where
                out, is_untouched_around = guarded(x.numel(), dtype)
                # A copy of just the message, so that a sanitizer sees a read behind its end.
                assert native.lossless_decode_(out, expected.clone(), isa=isa) == Status.SOUND, where
                assert torch.equal(bits(out), bits(x.reshape(-1))), where
                assert is_untouched_around(), where
                total = torch.randn(x.numel(), generator=torch.Generator().manual_seed(4))
                if dtype not in EXPONENT_DTYPES:
                    assert native.lossless_decode_add_(total, expected, isa=isa) == Status.MISMATCH
                    assert reference.lossless_decode_add_(total, expected) == Status.MISMATCH
                    continue
                summed = total + x.reshape(-1).float()
                added = total.clone()
                assert native.lossless_decode_add_(added, expected, isa=isa) == Status.SOUND, where
                # torch itself turns a NaN into one or another, depending on its place in a vector.
                assert torch.equal(added.isnan(), summed.isnan()), where
                assert torch.equal(bits(added.nan_to_num()), bits(summed.nan_to_num())), where


@pytest.mark.parametrize("dtype", FEW_DTYPES)
def test_ranked_messages_are_the_references_and_come_back(dtype: torch.dtype) -> None:
    for name, x in structured(dtype).items():
        code = ("window", "tiered")[len(name) % 2]
        expected = message_of(reference.lossless_encode, x, code)
        out, is_untouched_around = guarded(x.numel(), dtype)
        assert reference.lossless_decode_(out, expected) == Status.SOUND, name
        assert torch.equal(bits(out), bits(x)), name
        for isa in ISAS:
            assert torch.equal(message_of(native.lossless_encode, x, code, isa=isa), expected), (name, isa)
            out, is_untouched_around = guarded(x.numel(), dtype)
            assert native.lossless_decode_(out, expected.clone(), isa=isa) == Status.SOUND, (name, isa)
            assert torch.equal(bits(out), bits(x)), (name, isa)
            assert is_untouched_around(), (name, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8], ids=str)
def test_capacity_gives_the_references_bytes(dtype: torch.dtype, isa: str) -> None:
    x = cast(torch.randn(5000, generator=torch.Generator().manual_seed(0)), dtype)
    for code in ("window", "tiered", "raw"):
        exact = message_of(reference.lossless_encode, x, code).numel()
        raw = 72 + x.nbytes
        for capacity in {72, 90, exact - 1, exact, exact + 1, exact + 999, raw - 1, raw, raw + 5000}:
            where = (code, capacity)
            expected = reference.lossless_encode(x, code, capacity)
            message = native.lossless_encode(x, code, capacity, isa=isa)
            assert torch.equal(message, expected), where
            out = torch.empty_like(x)
            fits = capacity >= exact
            assert native.lossless_decode_(out, message, isa=isa) == (Status.SOUND if fits else Status.TOO_LONG), where
            assert not fits or torch.equal(bits(out), bits(x)), where


@pytest.mark.parametrize("isa", ISAS)
def test_threads_do_not_change_messages(isa: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300_001, generator=generator).bfloat16()
    incompressible = torch.randint(256, (600_000,), generator=generator, dtype=torch.uint8).view(torch.bfloat16)
    for tensor in (x, incompressible):
        with threads(1):
            message = message_of(native.lossless_encode, tensor, "tiered", isa=isa)
            short = native.lossless_encode(tensor, "tiered", 10_000, isa=isa)
        with threads(3):
            assert torch.equal(message_of(native.lossless_encode, tensor, "tiered", isa=isa), message)
            assert torch.equal(native.lossless_encode(tensor, "tiered", 10_000, isa=isa), short)
            out = torch.empty_like(tensor)
            assert native.lossless_decode_(out, message, isa=isa) == Status.SOUND
            assert torch.equal(bits(out), bits(tensor))
            damaged = message.clone()
            damaged[-1] ^= 128
            assert native.lossless_decode_(out, damaged, isa=isa) == reference.lossless_decode_(out, damaged)


@pytest.mark.parametrize("dtype", FEW_DTYPES)
def test_damage_has_the_references_status(dtype: torch.dtype) -> None:
    # Every byte of the front and every 13th bit behind it; the front of a damaged directory is made to fit its
    # checksum again, so that the decoder walks payloads by lists that nobody wrote.
    generator = torch.Generator().manual_seed(5)
    normal = torch.randn(4300, generator=generator) * (torch.rand(4300, generator=generator) > 0.3)
    plain = [cast(normal, dtype)] * 2 if dtype in EXPONENT_DTYPES else []
    for number, x in enumerate([*plain, structured(dtype)["both zeros"][:4300]]):
        code = ("window", "tiered")[number % 2]
        message = message_of(reference.lossless_encode, x, code)
        front = 72 + (8 + 5 * 3 if dtype.is_complex else 5 * 2)
        for place in [*range(front), *range(front, message.numel(), 13 * 61)]:
            damaged = message.clone()
            damaged[place] ^= 1 << (place % 8)
            _compare_status(x, damaged)
            if place not in range(48, 56):
                _compare_status(x, _with_header_sum(damaged, front))
        for length in (0, 63, 64, 71, 72, front, front + 1, message.numel() - 1):
            _compare_status(x, message[:length].clone())
        _compare_status(x[1:], message)
        _compare_status(x, torch.cat((message, torch.ones(9, dtype=torch.uint8))))


def _with_header_sum(message: Tensor, front: int) -> Tensor:
    padded = torch.zeros(-(-front // 4) * 4, dtype=torch.uint8)
    padded[:front] = message[:front]
    padded[48:56] = 0
    words = padded.view(torch.int32).long() & 0xFFFFFFFF
    value = words.sum() + ((words * torch.arange(1, len(words) + 1)).sum() << 20)
    message = message.clone()
    message[48:56] = value.view(1).view(torch.uint8)
    return message


def _compare_status(x: Tensor, message: Tensor) -> None:
    out = torch.empty_like(x)
    expected = reference.lossless_decode_(out, message)
    assert expected != Status.SOUND or torch.equal(bits(out), bits(x))
    for isa in ISAS:
        out, is_untouched_around = guarded(x.numel(), x.dtype)
        assert native.lossless_decode_(out, message, isa=isa) == expected, isa
        assert is_untouched_around()
