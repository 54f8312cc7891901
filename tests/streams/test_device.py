"""The simulated device finds the races that textbooks name, and none in programs that have none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from tests.streams.cuda import CUDA, cuda, lost_waits
from tests.streams.device import Device, RaceError


def check(device: Device, is_ordered: bool, race: str) -> None:
    """Check that a program that waits has no race, and that without waiting the usual number of orders finds this."""
    if is_ordered:
        device.check(150)
    else:
        with pytest.raises(RaceError, match=race):
            device.check()


def test_one_stream_needs_no_events() -> None:
    with cuda() as device:
        x = torch.ones(5, device=CUDA)
        for _ in range(3):
            x = x * 2 + 1
        x.mul_(2)
        assert x.device == CUDA
        assert x.is_cuda
        assert x.tolist() == [30.0] * 5
    device.check(50)


@pytest.mark.parametrize("waits", [False, True])
def test_a_stream_that_does_not_wait_for_what_it_reads(waits: bool) -> None:
    with cuda() as device:
        x = torch.ones(5, device=CUDA) * 2
        side = torch.cuda.Stream()
        if waits:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x + 1
        torch.cuda.current_stream().wait_stream(side)
        assert (y * 3).sum().item() == 45.0
    check(device, waits, r"aten\.add\.Tensor on stream 1, issued at test_device\.py:\d+")


@pytest.mark.parametrize("above", ["laconic", "tests", "a sp\u00e1ce/laconic/.venv/lib", "tests/laconic", None])
def test_names_of_folders_do_not_say_whose_an_operation_is(above: str | None, tmp_path: Path) -> None:
    """Libraries may lie in a folder of any name, and in an environment below the checkout itself."""
    folder = Path(__file__).parents[2] / ".venv" if above is None else tmp_path / above
    library: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
    exec(compile("def plus(x): return x + 1", str(folder / "site-packages" / "library.py"), "exec"), library)
    with cuda() as device:
        x = torch.ones(5, device=CUDA) * 2
        with torch.cuda.stream(torch.cuda.Stream()):
            library["plus"](x)
    with pytest.raises(RaceError, match=r"aten\.add\.Tensor on stream 1, issued at test_device\.py:\d+"):
        device.check()


@pytest.mark.parametrize("late", [False, True])
def test_an_event_that_is_recorded_too_early(late: bool) -> None:
    with cuda() as device:
        x = torch.zeros(5, device=CUDA)
        side = torch.cuda.Stream()
        event = torch.cuda.Event()
        event.record()
        x += 1
        if late:
            event.record()
        side.wait_event(event)
        with torch.cuda.stream(side):
            y = x * 2
        torch.cuda.current_stream().wait_stream(side)
        del y
    check(device, late, r"aten\.mul")


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_that_another_stream_still_reads_is_given_away(recorded: bool) -> None:
    with cuda() as device:
        x = torch.ones(5, device=CUDA)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x.view(5)[1:] * 2
        if recorded:
            x.record_stream(side)
        del x
        torch.empty(5, device=CUDA)
        torch.cuda.current_stream().wait_stream(side)
        del y
    check(device, recorded, r"aten\.mul")


def test_memory_that_is_held_until_the_stream_was_waited_for() -> None:
    with cuda() as device:
        x = torch.ones(5, device=CUDA)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
        torch.cuda.current_stream().wait_stream(side)
        del x
        assert y.sum().item() == 10.0
    device.check()


@pytest.mark.parametrize("waits", [False, True])
def test_the_owner_of_memory_runs_ahead_of_who_read_it(waits: bool) -> None:
    """Memory of a side stream goes back to that stream, which need not wait for the reader."""
    with cuda() as device:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            x = torch.ones(5, device=CUDA)
        torch.cuda.current_stream().wait_stream(side)
        y = x * 2
        del x
        if waits:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.empty(5, device=CUDA)
        del y
    check(device, waits, r"aten\.mul")


@pytest.mark.parametrize("waits", [False, True])
def test_pinned_memory_that_the_host_reads_too_early(waits: bool) -> None:
    with cuda() as device:
        x = torch.full((5,), 3.0, device=CUDA)
        host = torch.empty(5, pin_memory=True)
        host.copy_(x, non_blocking=True)
        if waits:
            torch.cuda.current_stream().synchronize()
        assert host.sum().item() == 15.0
    check(device, waits, r"aten\.sum\.default on host")


def test_two_streams_write_the_same_memory() -> None:
    with cuda() as device:
        x = torch.zeros(5, device=CUDA)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.fill_(1.0)
        x.fill_(2.0)
        torch.cuda.synchronize()
    with pytest.raises(RaceError, match=r"memory allocated at test_device\.py:\d+ holds other bits at the end"):
        device.check()


def test_a_future_is_waited_for_by_what_it_holds_only() -> None:
    """What torch does: a future without tensors records no event."""
    for holds in (True, False):
        with cuda() as device:
            x = torch.ones(5, device=CUDA)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            future: torch.futures.Future[torch.Tensor | None] = torch.futures.Future(devices=[CUDA])
            with torch.cuda.stream(side):
                x.mul_(2)
                future.set_result(x if holds else None)
            future.wait()
            assert (x + 1).sum().item() == 15.0
        check(device, holds, r"aten\.")


def test_autograd_runs_on_the_device() -> None:
    torch.manual_seed(0)
    values = torch.randn(4, 8)
    model, plain = nn.Linear(8, 3), nn.Linear(8, 3)
    plain.load_state_dict(model.state_dict())
    plain(values).pow(2).sum().backward()
    with cuda() as device:
        model.weight = nn.Parameter(model.weight.detach().to(CUDA))
        model.bias = nn.Parameter(model.bias.detach().to(CUDA))
        model(values.to(CUDA)).pow(2).sum().backward()
        assert model.weight.grad is not None
        assert plain.weight.grad is not None
        assert model.weight.grad.is_cuda
        assert torch.equal(model.weight.grad.cpu(), plain.weight.grad)
    device.check(50)


def test_an_operation_that_changes_memory_is_refused() -> None:
    with cuda():
        x = torch.ones(5, device=CUDA)
        with pytest.raises(NotImplementedError, match="changes the memory"):
            x.set_(torch.ones(3))


@pytest.mark.parametrize("waits", [False, True])
def test_memory_that_is_freed_by_resizing_while_another_stream_reads_it(waits: bool) -> None:
    """As FSDP2 frees parameters, whose tensors stay."""
    with cuda() as device:
        x = torch.ones(5, device=CUDA)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        x.untyped_storage().resize_(0)
        assert x.device == CUDA
        torch.empty(5, device=CUDA)
        torch.cuda.current_stream().wait_stream(side)
        del y
    check(device, waits, r"aten\.mul")


@pytest.mark.parametrize("waits", [False, True])
def test_memory_that_is_allocated_again_by_resizing(waits: bool) -> None:
    with cuda() as device:
        x = torch.ones(5, device=CUDA)
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(20)
        x.copy_(torch.full((5,), 2.0, device=CUDA))
        side = torch.cuda.Stream()
        if waits:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x + 1
        torch.cuda.current_stream().wait_stream(side)
        assert y.tolist() == [3.0] * 5
    check(device, waits, r"aten\.add")


@pytest.mark.parametrize("waits", [False, True])
def test_fresh_memory_that_another_stream_writes_to(waits: bool) -> None:
    """Its stream may not be done with what it used the memory for before."""
    with cuda() as device:
        x = torch.empty(5, device=CUDA)
        side = torch.cuda.Stream()
        if waits:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.fill_(1.0)
        torch.cuda.current_stream().wait_stream(side)
        assert (x * 2).sum().item() == 10.0
    check(device, waits, r"aten\.")


def test_memory_that_grows_is_refused() -> None:
    with cuda():
        x = torch.ones(5, device=CUDA)
        with pytest.raises(NotImplementedError, match="20 bytes become 40"):
            x.untyped_storage().resize_(40)


@pytest.mark.parametrize("waits", [False, True])
def test_work_outside_of_the_process_is_done_once(waits: bool) -> None:
    outside: list[float] = []

    def reach_out() -> None:
        outside.append(x[0].item())
        y.copy_(x * 3)

    with cuda() as device:
        x = torch.ones(5, device=CUDA)
        side = torch.cuda.Stream()
        if waits:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = torch.empty(5, device=CUDA)
            device.external("message", [x], [y], reach_out)
        torch.cuda.current_stream().wait_stream(side)
        assert y.tolist() == [3.0] * 5
    check(device, waits, r"message on stream 1, issued at .*, reads other bits")
    assert outside == [1.0]


def test_collectives_that_are_operations_are_refused() -> None:
    with cuda():
        x = torch.ones(5, device=CUDA)
        with pytest.raises(NotImplementedError, match="has no stream here"):
            torch.ops._c10d_functional.wait_tensor(x)


def test_waits_are_dropped_by_the_name_of_who_waits() -> None:
    def waits() -> None:
        torch.cuda.current_stream().wait_event(event)

    with cuda() as device:
        event = torch.cuda.Stream().record_event()
        with lost_waits("waits") as dropped:
            waits()
            torch.cuda.current_stream().wait_event(event)
    assert [place.split(":")[0] for place in dropped] == ["test_device.py"]
    assert [node.name for node in device._nodes] == ["event", "wait"]


class _Times(torch.autograd.Function):
    """Three times x; says which stream is current in backward."""

    seen: ClassVar[list[str]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _Times.seen.append(torch.cuda.current_stream().queue.name)
        return gradient * 3


@pytest.mark.parametrize("waits", [False, True])
def test_backward_runs_on_the_stream_of_its_forward(waits: bool) -> None:
    """Its nodes wait for the gradients they get, and the caller's stream for the leaves; forward is not waited for."""
    with cuda() as device:
        side = torch.cuda.Stream()
        x = torch.ones(3, device=CUDA).requires_grad_()
        y = _Times.apply(x)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            there = _Times.apply(y)
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        _Times.seen.clear()
        (_Times.apply(y) * there).sum().backward()
        assert sorted(_Times.seen) == ["default stream", "default stream", side.queue.name]
        x.grad.mul_(2)
        assert torch.cuda.current_stream().queue.name == "default stream"
    check(device, waits, r"aten\.")


def test_numbers_that_are_read_as_conjugates() -> None:
    """A bit of the tensor says so, not its memory."""
    with cuda() as device:
        x = torch.view_as_complex(torch.randn(5, 2).to(CUDA))
        y = x.conj() * (1 + 2j)
        assert (y + x.conj().imag.clone()).isfinite().all().item()
    device.check(5)
