"""Where `laconic.encode` and `decode` make the host wait on CUDA, and that streams order what they do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from laconic.collectives import Lossless
from laconic.errors import FormatError
from laconic.formats import lossless
from laconic.formats.lossless import Expect, decode, decode_add, decode_into, encode, max_nbytes
from tests.streams.cuda import CUDA, counted_waits, cuda


def numbers(numel: int = 9000) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel)).bfloat16()


def added(message: Tensor, x: Tensor) -> Tensor:
    total = torch.zeros(x.numel(), device=message.device)
    decode_add(message, total)
    return total.bfloat16()


def added_by_codec(message: Tensor, x: Tensor) -> Tensor:
    total = torch.zeros(x.numel(), device=message.device)
    Lossless().decode_add(message, total, torch.bfloat16)
    return total.bfloat16()


def into(message: Tensor, x: Tensor) -> Tensor:
    out = torch.empty(x.numel(), dtype=x.dtype, device=message.device)
    decode_into(message, out)
    return out


def into_out(message: Tensor, x: Tensor) -> Tensor:
    return decode(message, out=torch.empty(x.numel(), dtype=x.dtype, device=message.device))


DECODERS: list[tuple[Callable[[Tensor, Tensor], Tensor], int]] = [
    (lambda message, x: decode(message), 2),
    (lambda message, x: decode(message, Expect(x.dtype, x.shape)), 2),
    (into_out, 2),
    (into, 1),
    (added, 1),
    (added_by_codec, 1),
]


@pytest.mark.parametrize(("decoder", "num_waits"), DECODERS)
def test_decoding_waits_for_what_it_has_found_and_for_a_size_it_does_not_know(
    decoder: Callable[[Tensor, Tensor], Tensor], num_waits: int
) -> None:
    here = numbers()
    with cuda() as device:
        x = here.to(CUDA)
        message = encode(x, capacity_nbytes=max_nbytes(x.numel(), x.dtype))
        with counted_waits(device) as waits:
            out = decoder(message, x)
        assert len(waits) == num_waits
        out.mul_(2)  # on the caller's stream, behind it
        assert torch.equal(out.cpu(), here * 2)
    device.check(20)


def test_encoding_waits_for_the_length_and_with_a_capacity_for_nothing() -> None:
    here = numbers()
    with cuda() as device:
        x = here.to(CUDA)
        with counted_waits(device) as waits:
            fixed = encode(x, capacity_nbytes=20_000)
            assert not waits
            exact = encode(x)
            assert len(waits) == 1
            buffer = torch.empty(20_000, dtype=torch.uint8, device=CUDA)
            written = encode(x, out=buffer)
            assert len(waits) == 2
        for message in (fixed, exact, written):
            assert torch.equal(decode(message).cpu(), here)
        assert exact.cpu().tolist() == encode(here).tolist()
    device.check(20)


@pytest.mark.parametrize(("decoder", "num_waits"), DECODERS)
def test_a_damaged_message_is_refused_as_on_the_host(
    decoder: Callable[[Tensor, Tensor], Tensor], num_waits: int
) -> None:
    here = numbers()
    for place in (5, 9, 20, 30, 40, 50, 70, 90, 5000):
        message = encode(here)
        message[place] ^= 4
        with pytest.raises(FormatError) as expected:
            decoder(message, here)
        with cuda(), pytest.raises(lossless.DamagedMessage) as found:
            decoder(message.to(CUDA), here.to(CUDA))
        assert str(found.value) == str(expected.value), place
