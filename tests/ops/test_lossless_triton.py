"""The Triton kernels write the reference's messages and read them alike: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from laconic.ops import reference
from laconic.ops.lossless import DTYPE_NUMBERS, EXPONENT_DTYPES, Status
from tests.formats.structured import structured
from tests.ops.interpreter import (
    DEVICE,
    INTERPRETED,
    numpy_may_warn,
    on_device,
    slow_in_interpreter,
    slow_where_interpreted,
)
from tests.ops.test_lossless_native import GUARD, _with_header_sum, awkward_tensors, bits, cast, message_of

triton = pytest.importorskip("triton")

DTYPES = EXPONENT_DTYPES
pytestmark = [numpy_may_warn, pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")]


@pytest.fixture
def whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks as large as blocks in the interpreter, which is slow by the operation."""
    if INTERPRETED:
        from laconic.ops.triton import lossless_decoder, lossless_encoder

        for module in (lossless_decoder, lossless_encoder):
            monkeypatch.setattr(module, "_CHUNK", 4096)


TYPICAL = (torch.bfloat16,)


@on_device
@pytest.mark.usefixtures("whole_blocks")
@pytest.mark.parametrize("dtype", [d if d in TYPICAL else slow_in_interpreter(d) for d in DTYPES], ids=str)
def test_messages_are_the_references_and_come_back(dtype: torch.dtype) -> None:
    from laconic.ops.triton import lossless

    for number, (name, x) in enumerate(awkward_tensors(dtype)):
        # The interpreter is slow: there each tensor takes every eighth dtype and a block or two.
        if INTERPRETED and (number + DTYPES.index(dtype)) % 8 and name not in ("0", "random bits"):
            continue
        if INTERPRETED and x.numel() > 4500:
            x = x[:4101] if x.dim() == 1 else x[:2]
        for code in ("tiered", "raw") if number % 4 == 0 else ("window", "tiered")[number % 2 :]:
            where = (name, code)
            expected = message_of(reference.lossless_encode, x, code)
            assert torch.equal(message_of(lossless.lossless_encode, x.to(DEVICE), code).cpu(), expected), where
            out = torch.empty(x.shape, dtype=dtype, device=DEVICE)
            assert lossless.lossless_decode_(out, expected.to(DEVICE)) == Status.SOUND, where
            assert torch.equal(bits(out.cpu()), bits(x)), where
            total = torch.randn(x.numel(), generator=torch.Generator().manual_seed(4))
            summed = total + x.reshape(-1).float()
            added = total.to(DEVICE)
            assert lossless.lossless_decode_add_(added, expected.to(DEVICE)) == Status.SOUND, where
            assert torch.equal(added.cpu().isnan(), summed.isnan()), where
            assert torch.equal(bits(added.cpu().nan_to_num()), bits(summed.nan_to_num())), where


@on_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, *map(slow_in_interpreter, (torch.float32, torch.float16))], ids=str)
def test_chunks_of_a_block_meet(dtype: torch.dtype) -> None:
    # Lengths around chunks; with and without zeros, with exponents for every tier and escapes.
    from laconic.ops.triton import lossless

    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1300, generator=generator) * torch.randn(1300, generator=generator).mul(2).exp2()
    for length, zeros in ((1300, 0.0), (1027, 0.4), (512, 0.0)):
        values = cast(x[:length] * (torch.rand(length, generator=generator) >= zeros), dtype)
        expected = message_of(reference.lossless_encode, values, "tiered")
        assert torch.equal(message_of(lossless.lossless_encode, values.to(DEVICE), "tiered").cpu(), expected)
        out = torch.empty(length, dtype=dtype, device=DEVICE)
        assert lossless.lossless_decode_(out, expected.to(DEVICE)) == Status.SOUND
        assert torch.equal(bits(out.cpu()), bits(values))


RANKED = (torch.int64,)


@on_device
@pytest.mark.parametrize("dtype", [d if d in RANKED else slow_in_interpreter(d) for d in DTYPE_NUMBERS], ids=str)
def test_ranked_messages_are_the_references_and_come_back(dtype: torch.dtype) -> None:
    from laconic.ops.triton import lossless

    for number, (name, x) in enumerate(structured(dtype).items()):
        if INTERPRETED:
            if (number + DTYPE_NUMBERS[dtype]) % 6:
                continue
            x = x[: 4096 + 50 if number == 6 else 300]
        code = ("window", "tiered")[number % 2]
        expected = message_of(reference.lossless_encode, x, code)
        assert torch.equal(message_of(lossless.lossless_encode, x.to(DEVICE), code).cpu(), expected), name
        out = torch.empty(x.shape, dtype=dtype, device=DEVICE)
        assert lossless.lossless_decode_(out, expected.to(DEVICE)) == Status.SOUND, name
        assert torch.equal(bits(out.cpu()), bits(x)), name
        total = torch.zeros(x.shape, device=DEVICE)
        status = lossless.lossless_decode_add_(total, expected.to(DEVICE))
        assert status == (Status.SOUND if dtype in EXPONENT_DTYPES else Status.MISMATCH), name


@on_device
@slow_where_interpreted
def test_damage_of_ranked_messages_has_the_references_status() -> None:
    from laconic.ops.triton import lossless

    x = structured(torch.bfloat16)["both zeros"][:200]
    message = message_of(reference.lossless_encode, x, "tiered")
    assert message[4] == 2
    front = 72 + 5
    cases = []
    for place in range(front, message.numel(), 9 if INTERPRETED else 1):
        damaged = message.clone()
        damaged[place] ^= 1 << (place % 8)
        cases.append(damaged)
    kind, base, nest = 74, 75, 76
    for place, value in ((4, 1), (4, 3), (kind, 5), (kind, 20), (base, 1), (nest, 1), (5, 7), (5, 12), (5, 16)):
        damaged = message.clone()
        damaged[place] = value
        cases.append(_with_header_sum(damaged, front))
    for number, damaged in enumerate(cases):
        expected = reference.lossless_decode_(torch.empty_like(x), damaged)
        found = lossless.lossless_decode_(torch.empty_like(x, device=DEVICE), damaged.to(DEVICE))
        assert found == expected, (number, expected)


@on_device
@pytest.mark.usefixtures("whole_blocks")
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.itemsize < 4], ids=str)
def test_every_pattern_adds_as_torch_does(dtype: torch.dtype) -> None:
    from laconic.ops.triton import lossless

    x = torch.arange(256 if dtype.itemsize == 1 else 1 << 16).to(torch.uint8 if dtype.itemsize == 1 else torch.int16)
    x = x.view(dtype)
    total = torch.zeros(x.numel(), device=DEVICE)
    message = message_of(reference.lossless_encode, x, "raw").to(DEVICE)
    assert lossless.lossless_decode_add_(total, message) == Status.SOUND
    assert torch.equal(total.cpu().isnan(), x.float().isnan())
    assert torch.equal(total.cpu().nan_to_num(), x.float().nan_to_num())


@on_device
@slow_where_interpreted
def test_capacity_gives_the_references_bytes() -> None:
    from laconic.ops.triton import lossless

    x = torch.randn(3, 1400, generator=torch.Generator().manual_seed(0)).bfloat16()
    for code in ("window", "tiered", "raw"):
        exact = message_of(reference.lossless_encode, x, code).numel()
        everything = {80, exact - 1, exact, exact + 1, exact + 999, 80 + x.nbytes, 9000 + x.nbytes}
        for capacity in {exact - 1, exact + 999} if INTERPRETED and code != "tiered" else everything:
            where = (code, capacity)
            expected = reference.lossless_encode(x, code, capacity)
            message = lossless.lossless_encode(x.to(DEVICE), code, capacity)
            assert torch.equal(message.cpu(), expected), where
            out = torch.empty_like(x, device=DEVICE)
            fits = capacity >= exact
            assert lossless.lossless_decode_(out, message) == (Status.SOUND if fits else Status.TOO_LONG), where
            assert not fits or torch.equal(bits(out.cpu()), bits(x)), where
            if fits and capacity > exact:
                message[-1] = 1
                assert lossless.lossless_decode_(out, message) == Status.TRAILING, where


@on_device
@slow_where_interpreted
def test_programs_that_write_several_blocks_write_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from laconic.ops.triton import lossless, lossless_encoder

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7 * 4096 + 5, generator=generator) * (torch.rand(7 * 4096 + 5, generator=generator) > 0.3)
    monkeypatch.setattr(lossless_encoder, "_MAX_PROGRAMS", 3)
    message = message_of(lossless.lossless_encode, x.half().to(DEVICE), "tiered")
    assert torch.equal(message.cpu(), message_of(reference.lossless_encode, x.half(), "tiered"))


@on_device
@pytest.mark.usefixtures("whole_blocks")
@pytest.mark.parametrize("dtype", [torch.bfloat16, *map(slow_in_interpreter, (torch.float32, torch.float16))], ids=str)
def test_damage_has_the_references_status(dtype: torch.dtype) -> None:
    # Every byte of the front, some behind it; the front of a damaged directory is made to fit its checksum again, so
    # that the decoder walks payloads by lists that nobody wrote.
    from laconic.ops.triton import lossless

    generator = torch.Generator().manual_seed(5)
    x = cast(torch.randn(4120, generator=generator) * (torch.rand(4120, generator=generator) > 0.3), dtype)
    code = "window" if dtype == torch.float16 else "tiered"
    message = message_of(reference.lossless_encode, x, code)
    front = 72 + 5 * 2
    cases = [message[:length] for length in (0, 63, 64, 71, 72, front, front + 1, message.numel() - 1)]
    cases.append(torch.cat((message, torch.ones(9, dtype=torch.uint8))))
    step = 11 if INTERPRETED else 1
    for place in [*range(DTYPE_NUMBERS[dtype] % step, front, step), *range(front, message.numel(), 250 * step)]:
        damaged = message.clone()
        damaged[place] ^= 1 << ((place + place // 8) % 8)
        cases.append(damaged)
    # Entries of the lists that pass for an encoder's, and counts with their highest bits.
    for place, value in [(p, v) for p in range(72, front) for v in ((10,) if INTERPRETED else (0, 1, 2, 3, 10, 255))]:
        damaged = message.clone()
        damaged[place] = value
        cases.append(_with_header_sum(damaged, front))
    for place in (15, 23, 31, 39, 47, 55, 71):
        damaged = message.clone()
        damaged[place] = 255
        cases += [damaged, _with_header_sum(damaged, front)]
    for number, damaged in enumerate(cases):
        expected = reference.lossless_decode_(torch.empty_like(x), damaged)
        room = torch.full((x.nbytes + 2 * GUARD,), 0x5A, dtype=torch.uint8, device=DEVICE)
        found = room[GUARD : GUARD + x.nbytes].view(dtype)
        assert lossless.lossless_decode_(found, damaged.to(DEVICE)) == expected, (number, expected)
        assert expected != Status.SOUND or torch.equal(bits(found.cpu()), bits(x))
        assert (room[:GUARD] == 0x5A).all()
        assert (room[GUARD + x.nbytes :] == 0x5A).all()
    other = torch.empty(x.numel() + 1, dtype=dtype, device=DEVICE)
    assert lossless.lossless_decode_(other, message.to(DEVICE)) == Status.MISMATCH
    assert lossless.lossless_decode_(other[:100], message.to(DEVICE)) == Status.MISMATCH
    wrong = torch.empty(x.numel(), dtype=torch.uint8, device=DEVICE)
    assert lossless.lossless_decode_(wrong, message.to(DEVICE)) == Status.MISMATCH


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nothing_waits_for_the_device() -> None:
    from laconic.ops import lossless_decode_, lossless_decode_add_, lossless_encode

    x = torch.randn(100_000, device="cuda").bfloat16()
    out, total = torch.empty_like(x), torch.zeros(x.shape, device="cuda")
    lossless_decode_(out, lossless_encode(x))  # the first calls compare kernels with the reference, and wait
    lossless_decode_add_(torch.zeros_like(total), lossless_encode(x))
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        message = lossless_encode(x)
        status = lossless_decode_(out, message)
        added = lossless_decode_add_(total, message)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert status == Status.SOUND
    assert added == Status.SOUND
    assert torch.equal(out, x)
    assert torch.equal(total, x.float())
