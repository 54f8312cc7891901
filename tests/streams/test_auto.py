""" "auto" and `Auto` on CUDA: raw messages make the host wait for nothing, coded ones with a capacity late and once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from laconic.collectives import Auto, Lossless, audit
from laconic.collectives.codec import Codec, setting_of
from laconic.collectives.integrations.fsdp2 import ZipAllGather
from laconic.collectives.policy.selector import use_rates
from laconic.collectives.runtime.background import BackgroundWork
from laconic.errors import FormatError
from tests.collectives.simulated import made_up_rates
from tests.streams.cuda import CUDA, counted_waits, cuda
from tests.streams.device import Device
from tests.streams.echo import echo
from tests.streams.test_late_checks import Call, exchanged, gathered, numbers, right, scattered

NUMEL = 1 << 16
"""In bfloat16 twice what is coded at least."""


@contextmanager
def linked(bytes_per_second: float) -> Iterator[tuple[Device, dist.ProcessGroup]]:
    """Two ranks on a link of this speed, on a device that codes at 8 GB/s."""
    rates = made_up_rates(bytes_per_second)
    link = rates.links["across"]
    try:
        with cuda() as device, echo() as group:
            use_rates(replace(rates, links={"node": link, "across": link}, device="cuda"))
            yield device, group
    finally:
        use_rates(None)


def codes_of() -> dict[str, int]:
    """Calls by codec since the audit was reset."""
    found: dict[str, int] = {}
    for entry in audit.snapshot().entries:
        found[entry.codec] = found.get(entry.codec, 0) + entry.num_calls
    return found


@pytest.mark.parametrize("call", [gathered, scattered, exchanged])
def test_with_a_capacity_the_host_waits_once_for_a_coded_call(call: Call) -> None:
    here = numbers(NUMEL)
    with linked(12.5e6) as (device, group):
        x = here.to(CUDA)
        call(x, group, Auto(capacity_bits=14.0), False)  # rates and announcements are new
        audit.reset()
        with counted_waits(device) as waits:
            work = call(x, group, Auto(capacity_bits=14.0), True)
            assert not waits
            out = work.wait()
            assert len(waits) == 1
        assert torch.equal(out.cpu(), right(call, here, 2))
        assert codes_of() == {"tiered-14-bits": 1}
        with counted_waits(device) as waits:
            call(x, group, "auto", False)  # type: ignore[arg-type]
            assert len(waits) > 2  # what the capacity is for
        tight = call(x, group, Auto(capacity_bits=4.0), True).wait()
        assert torch.equal(tight.cpu(), right(call, here, 2))
    device.check(3)


@pytest.mark.parametrize("codec", ["auto", Auto(capacity_bits=14.0)], ids=["auto", "Auto"])
@pytest.mark.parametrize("call", [gathered, scattered, exchanged])
def test_for_a_raw_call_the_host_waits_not_at_all(call: Call, codec: Codec) -> None:
    here = numbers(NUMEL)
    with linked(1e12) as (device, group):
        x = here.to(CUDA)
        call(x, group, codec, False)
        audit.reset()
        with counted_waits(device) as waits:
            out = call(x, group, codec, True).wait()
            again = call(x, group, codec, False).wait()
            assert not waits
        assert set(codes_of()) == {"raw"}
        for values in (out, again):
            assert torch.equal(values.cpu(), right(call, here, 2))
    device.check(5)


def test_raw_calls_come_behind_what_a_coded_one_sends_again() -> None:
    here, short = numbers(NUMEL), numbers(512)
    with linked(12.5e6) as (device, group):
        x, y = here.to(CUDA), short.to(CUDA)
        codec = Auto(capacity_bits=4.0)
        gathered(x, group, codec, False)
        coded = gathered(x, group, codec, True)  # does not fit
        raw = gathered(y, group, codec, True)  # too short to be coded
        assert torch.equal(raw.wait().cpu(), right(gathered, short, 2))
        assert torch.equal(coded.wait().cpu(), right(gathered, here, 2))
    device.check(20)


def test_fsdp2_gathers_with_it_in_the_background() -> None:
    here = numbers(NUMEL)
    with linked(12.5e6) as (device, group):
        gather = ZipAllGather(Auto(capacity_bits=14.0))
        shard, whole = here.to(CUDA), torch.empty(2 * NUMEL, dtype=torch.bfloat16, device=CUDA)
        gather(whole, shard, group, False).wait()
        with counted_waits(device) as waits:
            work = gather(whole, shard, group, False)
            assert isinstance(work, BackgroundWork)
            assert not waits
            work.wait()
            assert len(waits) == 1
        assert torch.equal(whole.cpu(), here.repeat(2))
    device.check(3)


def test_ranks_tell_it_from_others_and_it_needs_a_capacity() -> None:
    assert len({setting_of(codec) for codec in ("auto", Auto(capacity_bits=8), Auto(capacity_bits=9), Lossless())}) == 4
    assert setting_of(Auto(capacity_bits=8)) != setting_of(Lossless(capacity_bits=8))
    with pytest.raises(FormatError, match=r"needs a capacity; write Auto\(capacity_bits=11\.5\)"):
        Auto()
    with pytest.raises(FormatError, match="it chooses the code"):
        Auto("tiered", 11.5)
