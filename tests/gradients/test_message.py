"""Bytes on the wire."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.gradients.message import ChunkLayout, Parts, num_blocks
from tests.ops.shards import shards_of


@pytest.mark.parametrize(
    ("length", "bits", "nbytes"), [(256, 8, 264), (256, 12, 400), (5, 8, 12), (5, 12, 16), (0, 8, 0)]
)
def test_row_holds_codes_and_scales_and_no_more(length: int, bits: int, nbytes: int) -> None:
    assert ChunkLayout(length, bits).nbytes == nbytes


def test_worked_example() -> None:
    # 3 elements, scale 2.0, int8 codes 1, -1, 127; residual scale 0.5, int4 codes 7, 0, -1.
    parts = Parts(
        torch.tensor([1, 255, 127], dtype=torch.uint8),
        torch.tensor([2.0]),
        torch.tensor([0x07, 0x0F], dtype=torch.uint8),
        torch.tensor([0.5]),
    )
    message = ChunkLayout(3, bits=12)
    buffer = message.zeros(1, torch.device("cpu"))
    message.write(parts, buffer)
    assert bytes(buffer[0].tolist()).hex(" ") == "00 00 00 40 00 00 00 3f 01 ff 7f 07 0f 00 00 00"


@settings(max_examples=60)
@given(st.integers(1, 5), st.integers(1, 1500), st.sampled_from([8, 12]))
def test_what_is_written_is_read(num_rows: int, length: int, bits: int) -> None:
    flat = Parts(*(x if x is None else x[0] for x in shards_of(torch.randn(1, length), bits)))
    message = ChunkLayout(-(-num_blocks(length) // num_rows) * 128, bits)
    buffer = message.zeros(num_rows, torch.device("cpu"))
    message.write(flat, buffer)
    for one, other in zip(message.read(buffer, length), flat, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)
