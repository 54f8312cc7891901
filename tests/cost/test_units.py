"""Choices: the bytes that they pack to, their JSON, and what is refused."""

from __future__ import annotations

import pytest
import torch

from laconic.activations.keep.kept import pack
from laconic.cost import Batch, Choice, Layout, Settings
from laconic.cost.memory.saved_tensors import CODE_BITS, EXACT
from laconic.errors import PlanError
from laconic.formats import BlockFormat


@pytest.mark.parametrize("code", CODE_BITS)
def test_packed_bytes_are_those_that_are_kept(code: str) -> None:
    for length in (1, 7, 16, 57, 64, 65, 96, 127, 300):
        kept = pack(torch.randn(9, length), BlockFormat(code, 64), "linear")
        assert kept.bits == CODE_BITS[code], length
        assert Choice(code).packed_nbytes(9, length) == sum(tensor.nbytes for tensor in kept.tensors), length


def test_choices_go_through_json() -> None:
    for choice in (EXACT, Choice("nf4"), Choice("int8", 32, "float32", offload=True), Choice(recompute=True)):
        assert Choice.from_json(choice.to_json()) == choice
    for entry in ("nf4", {"code": "fp3"}, {"bits": 4}, {"code": "nf4", "scale_dtype": "int8"}):
        with pytest.raises(PlanError):
            Choice.from_json(entry)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout(data_parallel=0), r"data_parallel is 0"),
        (lambda: Layout(stages=4, micro_batches=1 << 40), r"micro_batches is 1099511627776 on 4 chunks of layers, but"),
        (lambda: Layout(stages=2, split=(1, 2, 3)), r"split is \[1, 2, 3\], but it must give each of 2 chunks"),
        (lambda: Settings(gradient_bits=4), r"gradient_bits is 4, but it must be one of 8, 12, 16, 32"),
        (lambda: Batch(0, 4), r"sequences is 0"),
    ],
)
def test_layouts_that_cannot_be_are_refused(make: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()  # type: ignore[operator]
