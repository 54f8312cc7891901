"""Entropy-coded messages: every word comes back, C++ writes the reference's bytes, damage is refused."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laconic.errors import KernelError
from laconic.formats.chunk import Code, encode_chunk
from laconic.formats.safetensors_header import Element
from laconic.ops import entropy, native
from laconic.ops.entropy import MAX_ELEMENTS_PER_BYTE, entropy_decode_, entropy_encode, max_nbytes
from laconic.ops.lossless import DamagedMessage, Status, checksum
from laconic.ops.native import entropy as kernels
from laconic.ops.reference import entropy as reference

GOLDEN = Path(__file__).parent / "golden" / "entropy.bin"
ISAS = native.supported_isas()
KINDS = {
    torch.bfloat16: (2, True),
    torch.float32: (4, True),
    torch.float16: (2, True),
    torch.int16: (2, False),
    torch.float8_e4m3fn: (1, False),
    torch.float64: (8, False),
}
CODES: tuple[Code, Code] = ("tiered", "best")
HEADER = 32


def normal(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    return (x * (0.02 if dtype.is_floating_point else 300)).to(dtype)


def bytes_of(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def comes_back(data: Tensor, itemsize: int, is_rotated: bool, with_reference: bool = True) -> int:
    """The message's bytes: the same ones by every implementation, each of which takes them back."""
    message, *sums = entropy_encode(data, itemsize, is_rotated)
    assert sums == [int(each) & (1 << 64) - 1 for each in checksum(data)]
    assert len(message) <= max_nbytes(len(data) // itemsize, itemsize)
    assert len(data) <= itemsize * MAX_ELEMENTS_PER_BYTE * len(message)
    out = torch.empty_like(data)
    assert entropy_decode_(out, message, itemsize, is_rotated) == tuple(sums)
    assert out.equal(data)

    rooms, backs = [], []
    for isa in (*ISAS, *(["reference"] if with_reference else [])):
        encode, decode = (
            (reference.encode_blocks, reference.decode_blocks_)
            if isa == "reference"
            else (_of(kernels.encode_blocks, isa), _of(kernels.decode_blocks_, isa))
        )
        room, back = torch.zeros(max_nbytes(len(data) // itemsize, itemsize), dtype=torch.uint8), torch.zeros_like(data)
        made = encode(data, itemsize, is_rotated, room)
        assert decode(back, room[: made[0]], itemsize, is_rotated) == made
        rooms.append(room[: made[0]])
        backs.append(back)
    assert all(room.equal(rooms[0]) for room in rooms)
    assert all(back.equal(data) for back in backs)
    assert message[HEADER:].equal(torch.nn.functional.pad(rooms[0], (0, len(message) - HEADER - len(rooms[0]))))
    return len(message)


def _of(function: Any, isa: str) -> Any:
    return lambda *arguments: function(*arguments, isa=isa)


@pytest.mark.parametrize("is_rotated", [True, False])
def test_all_values_of_two_bytes_come_back(is_rotated: bool) -> None:
    words = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    comes_back(bytes_of(words), 2, is_rotated)
    order = torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))
    comes_back(bytes_of(words[order]), 2, is_rotated)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_all_lengths_come_back(dtype: torch.dtype) -> None:
    for numel in range(301):
        comes_back(bytes_of(normal(numel, dtype)), *KINDS[dtype], with_reference=numel % 7 == 0 or numel < 20)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_blocks_and_samples_of_any_size_come_back(dtype: torch.dtype) -> None:
    block = reference.BLOCK_NUMEL
    for numel in (8 * 2048 - 1, 8 * 2048, 8 * 2048 + 129, block - 1, block, block + 1, 2 * block + 77):
        comes_back(bytes_of(normal(numel, dtype)), *KINDS[dtype], with_reference=False)
    comes_back(bytes_of(normal(8 * 2048 + 129, dtype)), *KINDS[dtype])


def test_few_and_many_values_come_back_in_about_their_entropy() -> None:
    n = 1 << 13
    dice = torch.Generator().manual_seed(0)
    for value in (0, 1, 255):
        assert comes_back(torch.full((n,), value, dtype=torch.uint8), 1, False) == n / MAX_ELEMENTS_PER_BYTE
    two = torch.randint(0, 2, (n,), generator=dice, dtype=torch.uint8) * 201
    assert n / 8 < comes_back(two, 1, False) < n / 8 + 180
    each = torch.arange(n).to(torch.uint8)  # all values as often: as they are
    assert comes_back(each, 1, False) == HEADER + 8 + 2 + n
    many = torch.arange(n).to(torch.uint8) % 128
    assert 7 * n / 8 < comes_back(many, 1, False) < 7 * n / 8 + 260
    skewed = (torch.rand(n, generator=dice) ** 8 * 256).to(torch.uint8)
    counts = skewed.long().bincount().double()
    bits = -(counts * (counts / n).log2().nan_to_num(0, 0, 0)).sum().item()
    assert bits / 8 < comes_back(skewed, 1, False) < 1.02 * bits / 8 + 450


def test_one_rare_value_among_a_million_comes_back() -> None:
    n = 1 << 20
    for place in (0, 1000, n // 2, n - 1):
        x = torch.zeros(n, dtype=torch.uint8)
        x[place] = 7
        assert comes_back(x, 1, False, with_reference=False) < n / 8 + 500
    for dtype in (torch.bfloat16, torch.float32):
        y = torch.ones(n, dtype=dtype)
        y[4711] = -3e5
        comes_back(bytes_of(y), *KINDS[dtype], with_reference=False)
    rare = torch.zeros(1 << 14, dtype=torch.uint8)
    rare[3] = 7
    comes_back(rare, 1, False)


def test_all_values_but_one_may_be_rare() -> None:
    """Their codes would be longer than 11 bits."""
    x = torch.zeros(1 << 13, dtype=torch.uint8)
    x[:256] = torch.arange(256)
    comes_back(x, 1, False)
    fibonacci = [1, 1]
    while sum(fibonacci) < 1 << 14:
        fibonacci.append(sum(fibonacci[-2:]))
    y = torch.repeat_interleave(torch.arange(len(fibonacci)), torch.tensor(fibonacci)).to(torch.uint8)
    counts = y.long().bincount(minlength=256).tolist()
    assert 8 <= max(reference._lengths(counts)) <= reference.MAX_BITS
    comes_back(y, 1, False)


@pytest.mark.parametrize("dtype", [d for d in KINDS if d.itemsize > 1], ids=str)
def test_zeros_are_left_out(dtype: torch.dtype) -> None:
    n = 3001
    for share in (0.01, 0.04, 0.5, 0.99, 1):
        x = normal(n, dtype)
        x[torch.rand(n, generator=torch.Generator().manual_seed(1)) < share] = 0
        comes_back(bytes_of(x), *KINDS[dtype])
        x[x == 0] = -0.0  # which is no word of zeros
        comes_back(bytes_of(x), *KINDS[dtype])
    rows = normal(1 << 16, torch.float32).view(-1, 128)
    rows[::2] = 0
    assert comes_back(bytes_of(rows), 4, True, with_reference=False) < 0.5 * 0.85 * 4 * (1 << 16)


@settings(max_examples=60)
@given(st.binary(max_size=400), st.sampled_from([(1, False), (2, False), (2, True), (4, False), (4, True), (8, False)]))
def test_any_bytes_come_back(data: bytes, kind: tuple[int, bool]) -> None:
    whole = data[: len(data) // kind[0] * kind[0]]
    comes_back(
        torch.frombuffer(bytearray(whole), dtype=torch.uint8) if whole else torch.empty(0, dtype=torch.uint8), *kind
    )


@settings(max_examples=40)
@given(
    st.sampled_from(list(KINDS)),
    st.integers(0, 3000),
    st.integers(-40, 20),
    st.floats(0, 1),
    st.integers(1, 300),
    st.integers(0, 1 << 20),
)
def test_values_like_those_of_models_come_back(
    dtype: torch.dtype, numel: int, exponent: int, zeros: float, repeats: int, seed: int
) -> None:
    x = normal(numel, seed=seed).double() * 2.0**exponent
    x = x[torch.arange(numel) // repeats]
    x[torch.rand(numel, generator=torch.Generator().manual_seed(seed)) < zeros] = 0
    comes_back(bytes_of(x.clamp(-400, 400).to(dtype)), *KINDS[dtype])


def golden_words() -> Tensor:
    """bf16 in two blocks: a constant; exponents, few mantissas, zeros by runs."""
    i = torch.arange(8 * reference.SAMPLE_STEP + 100)
    x = ((i * 2654435761 % 4294967296).double() / 2**32 - 0.5) ** 3 * (1 + i % 7)
    x[i % 1000 < 300] = 0
    return torch.cat([torch.full((reference.BLOCK_NUMEL,), 1.5), x.to(torch.float32)]).bfloat16()


def test_bytes_are_those_of_the_golden_file() -> None:
    data = bytes_of(golden_words())
    golden = torch.frombuffer(bytearray(GOLDEN.read_bytes()), dtype=torch.uint8)
    assert entropy_encode(data, 2, True)[0].equal(golden)
    out = torch.empty_like(data)
    entropy_decode_(out, golden, 2, True)
    assert out.equal(data)
    room = torch.zeros(max_nbytes(len(data) // 2, 2), dtype=torch.uint8)
    used, *_ = reference.encode_blocks(data, 2, True, room)
    assert room[:used].equal(golden[HEADER : HEADER + used])


def test_the_example_of_the_page() -> None:
    x = torch.tensor([1, 1, 1, 2, 1, 1, 0.5, 1] * 8, dtype=torch.bfloat16)
    message = entropy_encode(bytes_of(x), 2, True)[0]
    page = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    example = page.partition("## Example of an entropy-coded message")[2].partition("\n## ")[0]
    shown = "".join(line.split("|")[1] for line in example.splitlines() if line.startswith("| `"))
    assert bytes.fromhex(shown.replace("`", "").replace(",", "")) == bytes(message.tolist())


@pytest.mark.skipif(not ISAS, reason="the C++ kernels were not built")
def test_the_pages_figures_of_what_entropy_coding_gains() -> None:
    def chunk_of(dtype: torch.dtype) -> Tensor:
        return normal((1 << 22) // dtype.itemsize, dtype)

    rows = chunk_of(torch.float32).view(-1, 512)
    rows[torch.arange(len(rows)) % 5 < 2] = 0
    dtypes = (torch.bfloat16, torch.float32, torch.float16, torch.float8_e4m3fn)
    cases = {str(dtype).removeprefix("torch."): chunk_of(dtype) for dtype in dtypes}
    cases["squares (no sign), float32"] = chunk_of(torch.float32).square()
    cases["rows of 512, two in five of them zeros, float32"] = rows
    page = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    table = page.partition("\n## What entropy coding gains\n")[2].partition("\n## ")[0]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if " % |" in line]
    assert [line[0] for line in lines] == [*cases]
    for (name, *shown), x in zip(lines, cases.values(), strict=True):
        element, data = Element(8 * x.element_size(), x.dtype, x.dtype), bytes_of(x)
        for text, code in zip(shown, CODES, strict=True):
            message, *_ = encode_chunk(data, element, code, None)
            assert message is not None
            assert abs(100 * len(message) / len(data) - float(text.removesuffix(" %"))) < 0.1, (name, code)


# --- damage ---


def refused(message: Tensor, numel: int, kind: tuple[int, bool] = (2, True)) -> Status:
    """The status of the error, which the reference gives too."""
    found = []
    for implementation in (None, reference):
        with pytest.MonkeyPatch.context() as patch:
            if implementation is not None:
                patch.setattr(entropy, "_implementation", lambda: reference)
            with pytest.raises(DamagedMessage) as error:
                entropy_decode_(torch.empty(numel * kind[0], dtype=torch.uint8), message, *kind)
        found.append(error.value.status)
    assert found[0] == found[1]
    return found[0]


def test_every_flipped_bit_and_every_cut_is_refused() -> None:
    x = normal(600, torch.bfloat16)
    x[::5] = 0
    message = entropy_encode(bytes_of(x), 2, True)[0]
    seen = set()
    for place in range(len(message)):
        for bit in range(8) if place < 64 else (place % 8,):
            damaged = message.clone()
            damaged[place] ^= 1 << bit
            seen.add(refused(damaged, 600))
    assert seen == {
        Status.NOT_A_MESSAGE, Status.VERSION, Status.FIELD, Status.MISMATCH, Status.PAYLOAD, Status.CHECKSUM,
        Status.TRAILING,
    }  # fmt: skip
    for n in range(0, len(message), 3):
        refused(message[:n].clone(), 600)
    refused(torch.cat([message, message[:1] * 0]), 600)


def test_another_kind_or_number_of_words_is_refused() -> None:
    message = entropy_encode(bytes_of(normal(40, torch.bfloat16)), 2, True)[0]
    for numel, kind in ((40, (2, False)), (20, (4, True)), (80, (1, False)), (41, (2, True)), (39, (2, True))):
        assert refused(message, numel, kind) == Status.MISMATCH


def three_values() -> Tensor:
    return torch.tensor([0, 0, 1, 0, 2]).repeat(20).to(torch.uint8)


def plane(
    *,
    first: int = 0,
    last: int = 2,
    halves: bytes = b"\x21\2",
    streams: tuple[bytes, ...] | None = None,
    sizes: tuple[int, ...] | None = None,
) -> bytes:
    """That of `three_values`, or what is like it."""
    if streams is None:
        streams = (reference._stream(three_values()[:25].tolist(), {0: "0", 1: "10", 2: "11"}),) * 4
    head = b"".join(size.to_bytes(4, "little") for size in sizes or map(len, streams))
    return bytes([2, first, last]) + head + halves + b"".join(streams)


def test_a_plane_as_an_encoder_writes_it_is_taken() -> None:
    message = entropy_encode(three_values(), 1, False)[0]
    assert bytes(message[HEADER:-8].tolist()) == b"\0" + plane()


@pytest.mark.parametrize(
    "blocks",
    [
        b"",
        b"\0",
        b"\0\3",
        b"\0\0" + bytes(99),
        b"\0\1",
        b"\1\0" + bytes(100),
        b"\2\0" + bytes(100),
        b"\0" + plane(first=2, last=0),
        b"\0" + plane(last=0, halves=b"\1"),
        b"\0" + plane(last=3),
        b"\0" + plane(first=1, last=4, halves=b"\x10\x22"),
        b"\0" + plane(halves=b"\x21\x12"),
        b"\0" + plane(halves=b"\x22\2"),
        b"\0" + plane(halves=b"\x11\2"),
        b"\0" + plane(halves=b"\xc1\x0c"),
        b"\0" + plane(halves=b"\x21\0"),
        b"\0" + plane(streams=(b"",) * 4),
        b"\0" + plane(streams=(b"\xff" * 6,) * 4),
        b"\0" + plane(streams=(bytes(3),) * 4),
        b"\0" + plane(streams=(bytes(5),) * 4),
        b"\0" + plane(streams=(bytes(3) + b"\2",) * 4),
        b"\0" + plane(sizes=(5, 5, 5, 6)),
        b"\0" + plane(sizes=(2**32 - 1,) * 4),
        b"\0" + plane()[:-1],
        b"\0\2\0\xff" + b"\xff" * 16 + bytes(2000),
        b"\0\2\0\xff" + b"\1\0\0\0" * 4 + bytes(range(100)),
    ],
    ids=lambda blocks: blocks[:9].hex(),
)
def test_blocks_that_no_encoder_writes_are_refused(blocks: bytes) -> None:
    header = entropy_encode(three_values(), 1, False)[0][:HEADER]
    message = torch.cat([header, torch.frombuffer(bytearray(blocks + bytes(8)), dtype=torch.uint8)])
    assert refused(message, 100, (1, False)) == Status.PAYLOAD


def test_a_mask_with_bits_behind_its_end_is_refused() -> None:
    header = entropy_encode(torch.zeros(26, dtype=torch.uint8), 2, False)[0][:HEADER]
    for mask, status in ((0xE0, Status.PAYLOAD), (0x1F, Status.CHECKSUM)):
        blocks = bytes([1, 0, 0, mask]) + bytes([1, 5]) * 2 + bytes(8)
        message = torch.cat([header, torch.frombuffer(bytearray(blocks), dtype=torch.uint8)])
        assert refused(message, 13, (2, False)) == status


def test_implementations_agree_on_changed_blocks() -> None:
    dice = random.Random(0)
    for _ in range(300):
        itemsize, is_rotated = dice.choice(list(KINDS.values()))
        numel = dice.randrange(1, 400)
        x = normal(numel, seed=dice.randrange(99))
        x[:: dice.randrange(2, 9)] = 0
        dtype = next(dtype for dtype, kind in KINDS.items() if kind == (itemsize, is_rotated))
        data = bytes_of(x.to(dtype))
        room = torch.zeros(max_nbytes(numel, itemsize), dtype=torch.uint8)
        used, *_ = reference.encode_blocks(data, itemsize, is_rotated, room)
        for _ in range(dice.randrange(1, 4)):
            room[dice.randrange(used)] = dice.randrange(256)
        outs = [torch.zeros_like(data) for _ in (*ISAS, "reference")]
        results = [
            kernels.decode_blocks_(out, room[:used], itemsize, is_rotated, isa=isa)
            for out, isa in zip(outs, ISAS, strict=False)
        ]
        results.append(reference.decode_blocks_(outs[-1], room[:used], itemsize, is_rotated))
        assert len(set(results)) == 1
        if results[0][0]:
            assert all(out.equal(outs[0]) for out in outs)


@pytest.mark.skipif(not ISAS, reason="the C++ kernels were not built")
def test_a_kernel_with_other_bytes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: Any) -> Any:
        made = kernels.encode_blocks(*arguments)
        arguments[3][5] ^= 1
        return made

    entropy._implementation.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(
            "laconic.ops.native.entropy", SimpleNamespace(encode_blocks=wrong, decode_blocks_=kernels.decode_blocks_)
        )
        with pytest.raises(KernelError, match="entropy-coded messages gives other bytes"):
            entropy_encode(torch.zeros(100, dtype=torch.uint8), 1, False)
    entropy._implementation.cache_clear()
    entropy_encode(torch.zeros(100, dtype=torch.uint8), 1, False)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("implementation", ["c++", "reference"])
def test_a_first_use_does_not_follow_the_callers_device_and_dtype(
    implementation: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes_of(normal(1 << 15, torch.bfloat16))
    data[: 1 << 14] = 0
    expected = entropy_encode(data, 2, True)[0]
    out = torch.empty_like(data)
    if implementation == "reference":
        monkeypatch.setattr(entropy, "_implementation", lambda: reference)
    else:
        entropy._implementation.cache_clear()
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device(device):
            message = entropy_encode(data, 2, True)[0]
            entropy_decode_(out, message, 2, True)
    finally:
        torch.set_default_dtype(default)
    assert message.equal(expected)
    assert out.equal(data)
