"""Messages come out as they went in, whatever the sizes and the dtype; what is no message is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.errors import FormatError
from laconic.infer.messages import HEADER_LENGTH, Header, Rows, pack_rows, pack_sums, unpack_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@settings(deadline=None)
@given(
    st.integers(0, 9),
    st.integers(1, 5),
    st.integers(1, 9),
    st.sampled_from(DTYPES),
    st.tuples(st.integers(0, 99), st.integers(0, 9), st.integers(0, 9)),
)
def test_rows_and_sums_arrive_as_they_left(
    num_rows: int, top_k: int, width: int, dtype: torch.dtype, place: tuple[int, int, int]
) -> None:
    rows = Rows(
        *place,
        torch.randn(width, num_rows).t().to(dtype),  # not contiguous
        torch.randint(-1, 7, (num_rows, top_k), dtype=torch.int32),
        torch.rand(num_rows, top_k),
    )
    header, body = pack_rows(rows)
    read = Header.from_tensor(header.to_tensor())
    assert read == header
    assert read.nbytes == body.numel()
    got = unpack_rows(read, body)
    assert (got.layer, got.micro_batch, got.slice) == place
    for name in ("hidden", "experts", "weights"):
        assert torch.equal(getattr(got, name), getattr(rows, name))
        assert getattr(got, name).dtype == getattr(rows, name).dtype

    answer, body = pack_sums(rows, rows.hidden)
    assert Header.from_tensor(answer.to_tensor()) == answer
    assert torch.equal(body.view(dtype).view(num_rows, width), rows.hidden)
    assert (answer.layer, answer.micro_batch, answer.slice) == place


@pytest.mark.parametrize("position", range(HEADER_LENGTH))
def test_what_is_no_header_is_refused(position: int) -> None:
    header = Header(kind=1, num_rows=3, top_k=2, width=4).to_tensor()
    header[position] = -5
    with pytest.raises(FormatError, match="no header of this version"):
        Header.from_tensor(header)


def test_rows_that_cannot_travel_are_refused() -> None:
    rows = Rows(0, 0, 0, torch.zeros(1, 2, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1))
    with pytest.raises(FormatError, match="float64"):
        pack_rows(rows)
