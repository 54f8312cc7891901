"""What cannot be encoded or decoded gets a FormatError with a remedy, before memory is asked for."""

import re

import numpy as np
import pytest
import torch

from laconic.errors import FormatError
from laconic.formats import lossless
from laconic.formats.lossless import Expect
from laconic.ops.lossless import front_checksum

NOT_TENSORS = {
    "list": ([1.0, 2.0], "x is a list, but it must be a torch.Tensor; torch.as_tensor makes one"),
    "array": (np.ones(3), "x is a numpy.ndarray, but it must be a torch.Tensor"),
    "none": (None, "x is a NoneType"),
    "bytes": (b"12", "x is a bytes"),
    "meta": (torch.empty(3, device="meta"), "x is on the meta device and has no values"),
    "sparse": (
        torch.eye(3).to_sparse(),
        "x has layout torch.sparse_coo, but it must be strided; encode its .to_dense()",
    ),
    "nested": (
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "x has layout nested, but it must be strided; encode its parts, of .unbind(),",
    ),
}


@pytest.mark.parametrize("name", NOT_TENSORS)
def test_what_has_no_bytes_in_memory_is_refused_with_a_remedy(name: str) -> None:
    x, message = NOT_TENSORS[name]
    with pytest.raises(FormatError, match=re.escape(message)):
        lossless.encode(x)
    good = lossless.encode(torch.ones(3))
    for call in (
        lambda: lossless.decode_into(good, x),
        lambda: lossless.decode_add(good, x),
        lambda: lossless.decode(x),
        lambda: lossless.read_header(x),
    ):
        with pytest.raises(FormatError, match=r"(out|total|the message) (is|has)"):
            call()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantized_tensors_are_refused_with_a_remedy() -> None:
    x = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    with pytest.raises(FormatError, match=r"x is a quantized tensor; encode its \.int_repr\(\)"):
        lossless.encode(x)


def test_values_that_wait_for_their_conjugate_or_sign_are_those_that_are_seen() -> None:
    x = torch.randn(100, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    assert torch.equal(lossless.decode(lossless.encode(x)), x)


def test_a_message_that_was_too_long_cannot_ask_for_memory() -> None:
    # It has no payload that could vouch for its shape.
    message = lossless.encode(torch.randn(1000), capacity_nbytes=200)
    message[8:16] = message[64:72] = torch.tensor([1 << 60]).view(torch.uint8)
    message[48:56] = torch.tensor([front_checksum(message[:72])]).view(torch.uint8)
    for expect in (None, Expect(torch.float32, (1 << 60,))):
        with pytest.raises(FormatError, match="did not fit the encoder's capacity_nbytes"):
            lossless.decode(message, expect)
