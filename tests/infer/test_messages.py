"""Messages come out as they went in, whatever the sizes and the dtype; what is no message is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laconic.errors import FormatError
from laconic.infer.messages import HEADER_LENGTH, Header, Rows, pack_rows, pack_sums, unpack_rows, unpack_sums
from laconic.infer.payload import INT8, INT8_FORMAT, LOSSLESS, RAW, Coder, coder_of
from tests.formats.lossless_cases import bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def rows_of(num_rows: int, top_k: int, width: int, dtype: torch.dtype, place: tuple[int, int, int] = (0, 0, 0)) -> Rows:
    return Rows(
        *place,
        torch.randn(width, num_rows).t().to(dtype),  # not contiguous
        torch.randint(-1, 7, (num_rows, top_k), dtype=torch.int32),
        torch.rand(num_rows, top_k),
    )


@given(
    st.integers(0, 9),
    st.integers(1, 5),
    st.integers(1, 300),
    st.sampled_from(DTYPES),
    st.tuples(st.integers(0, 99), st.integers(0, 9), st.integers(0, 9)),
    st.sampled_from(["raw", "lossless"]),
)
def test_rows_and_sums_arrive_as_they_left(
    num_rows: int, top_k: int, width: int, dtype: torch.dtype, place: tuple[int, int, int], payload: str
) -> None:
    rows, coder = rows_of(num_rows, top_k, width, dtype, place), coder_of(payload)
    header, body = pack_rows(rows, coder)
    read = Header.from_tensor(header.to_tensor())
    assert read == header
    assert read.nbytes == body.numel()
    assert read.coding == (LOSSLESS if payload == "lossless" and num_rows else RAW)
    got = unpack_rows(read, body)
    assert (got.layer, got.micro_batch, got.slice) == place
    for name in ("hidden", "experts", "weights"):
        assert torch.equal(bits(getattr(got, name)), bits(getattr(rows, name)))
        assert getattr(got, name).dtype == getattr(rows, name).dtype

    answer, body = pack_sums(rows, rows.hidden, coder)
    assert Header.from_tensor(answer.to_tensor()) == answer
    assert torch.equal(bits(unpack_sums(answer, body)), bits(rows.hidden))
    assert (answer.layer, answer.micro_batch, answer.slice) == place


@given(st.integers(1, 9), st.integers(1, 300), st.floats(-30, 30))
def test_int8_is_within_its_bound_and_rows_do_not_mix(num_rows: int, width: int, exponent: float) -> None:
    """The bound of payload.INT8_FORMAT; float32, whose own rounding is some 2**-24 of a value."""
    rows = rows_of(num_rows, 2, width, torch.float32)
    rows.hidden.mul_(10**exponent)
    header, body = pack_rows(rows, coder_of("int8"))
    assert header.coding == INT8
    assert header.nbytes == 16 * num_rows + num_rows * (width + 4 * -(-width // 128))
    got = unpack_rows(Header.from_tensor(header.to_tensor()), body)
    for block in range(0, width, INT8_FORMAT.block_size):
        here = slice(block, block + INT8_FORMAT.block_size)
        largest = rows.hidden[:, here].abs().amax(1, keepdim=True)
        assert ((got.hidden[:, here] - rows.hidden[:, here]).abs() <= largest / 254 * (1 + 1e-5)).all()
    # A row alone is coded as it is beside others: what it becomes does not depend on how a batch is cut.
    alone = Rows(0, 0, 0, rows.hidden[-1:], rows.experts[-1:], rows.weights[-1:])
    assert torch.equal(unpack_rows(*pack_rows(alone, coder_of("int8"))).hidden, got.hidden[-1:])
    assert torch.equal(got.weights, rows.weights)
    assert torch.equal(got.experts, rows.experts)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_int8_never_makes_a_number_of_what_is_none(broken: float) -> None:
    rows = rows_of(2, 1, 256, torch.bfloat16)
    rows.hidden[1, 200] = broken
    got = unpack_rows(*pack_rows(rows, coder_of("int8"))).hidden
    assert got[1, 128:].isnan().all()
    assert got[0].isfinite().all()
    assert got[1, :128].isfinite().all()


@pytest.mark.parametrize("payload", ["raw", "lossless", "int8"])
def test_traffic_counts_the_bytes_of_header_and_body(payload: str) -> None:
    rows = rows_of(64, 2, 256, torch.bfloat16)
    header, body = pack_rows(rows, coder_of(payload))
    traffic = header.traffic
    assert traffic.sent_nbytes == header.to_tensor().nbytes + body.numel()
    assert traffic.raw_nbytes == 8 * HEADER_LENGTH + 64 * (2 * 8 + 256 * 2)
    assert (traffic.messages, traffic.coded) == (1, int(payload != "raw"))
    if payload != "raw":
        assert traffic.sent_nbytes < 0.75 * traffic.raw_nbytes  # normal values


def test_each_message_states_its_own_coding() -> None:
    """A coder may choose by size, as "auto" does."""
    coder = Coder(lambda numel, dtype: LOSSLESS if numel > 100 else RAW)
    for num_rows, coding in ((2, RAW), (60, LOSSLESS)):
        rows = rows_of(num_rows, 1, 40, torch.bfloat16)
        header, body = pack_rows(rows, coder)
        assert header.coding == coding
        assert torch.equal(unpack_rows(Header.from_tensor(header.to_tensor()), body).hidden, rows.hidden)


def test_a_damaged_lossless_message_is_refused() -> None:
    rows = rows_of(32, 1, 64, torch.bfloat16)
    header, body = pack_sums(rows, rows.hidden, coder_of("lossless"))
    body[body.numel() // 2] ^= 1
    with pytest.raises(FormatError):
        unpack_sums(header, body)


@pytest.mark.parametrize("position", range(HEADER_LENGTH))
def test_what_is_no_header_is_refused(position: int) -> None:
    header = Header(kind=1, num_rows=3, top_k=2, width=4, values_nbytes=48).to_tensor()
    Header.from_tensor(header)
    header[position] = -5
    with pytest.raises(FormatError, match="no header of this version"):
        Header.from_tensor(header)


def test_rows_that_cannot_travel_are_refused() -> None:
    rows = Rows(0, 0, 0, torch.zeros(1, 2, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1))
    with pytest.raises(FormatError, match="float64"):
        pack_rows(rows, Coder())
