"""What inference workers compute: over TCP on the stream of the caller, over NCCL on its own, and no host waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from laconic.infer.coded_experts import keep_experts
from laconic.infer.expert_share import ExpertShare
from laconic.infer.group_link import GroupConnection, GroupExpertLink, LinkGroups
from laconic.infer.messages import Rows, pack_sums, unpack_rows
from laconic.infer.payload import Coder
from laconic.infer.recorder import Recorder, now_ns
from laconic.infer.remote_experts import RemoteExperts
from laconic.infer.split import EngineSplit
from laconic.moe.huggingface.experts import FusedExperts
from laconic.schedule.inference import InferencePlan
from tests.infer.test_remote_experts import NUM_EXPERTS, ORIGINAL, WIDTH
from tests.streams.cuda import CUDA, counted_waits, cuda, lost_waits
from tests.streams.device import RaceError
from tests.streams.stream_group import StreamWork

NUM_WORKERS = 2


class Link:
    """An expert worker in this thread, the only one that the simulated device records."""

    def __init__(self, share: ExpertShare) -> None:
        self._share = share
        self._answers: dict[int, Tensor] = {}

    def send(self, rows: Rows) -> None:
        self._answers[id(rows)] = self._share.run(rows)

    def receive(self, rows: Rows) -> Tensor:
        return self._answers.pop(id(rows))

    def arrived_ns(self, rows: Rows) -> int:
        return now_ns()


def remote(device: torch.device, recorder: Recorder | None = None, shared_first: bool = False) -> RemoteExperts:
    split = EngineSplit(1, NUM_WORKERS)
    ranges = [split.expert_range(worker, NUM_EXPERTS) for worker in range(NUM_WORKERS)]
    links: list[Any] = []
    for held in ranges:
        part = {
            name: torch.nn.Parameter(p[held.start : held.stop].clone().to(device), requires_grad=False)
            for name, p in ORIGINAL.named_parameters()
        }
        links.append(Link(ExpertShare([FusedExperts(ORIGINAL, part)])))
    return RemoteExperts(links, [ranges], InferencePlan(num_slices=2, shared_first=shared_first), recorder)


def layers(experts: RemoteExperts, device: torch.device, shared: Callable[[], None] | None = None) -> Tensor:
    """Hidden states behind three layers with a residual, each a pass of its own."""
    torch.manual_seed(0)
    hidden = torch.randn(6, WIDTH).to(device)
    for _ in range(3):
        weights, index = torch.rand(6, NUM_EXPERTS).topk(2)
        experts.begin_forward(5)
        try:
            hidden = hidden + experts.run(0, hidden * 0.5, index.to(device), weights.to(device), shared)
        finally:
            experts.end_forward()
    return hidden


@pytest.mark.parametrize("waits", [True, False])
def test_rows_go_to_expert_workers_and_back_on_one_stream(waits: bool) -> None:
    expected = layers(remote(torch.device("cpu")), torch.device("cpu"))
    with cuda() as device:
        experts = remote(CUDA)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        num_before = len(device.defaults[0].nodes)
        with torch.cuda.stream(side):
            hidden = layers(experts, CUDA)
        assert len(device.defaults[0].nodes) == num_before
        assert device.num_streams == 1  # that of the caller
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        found = (hidden * 1).cpu()
    assert torch.equal(found, expected)
    if waits:
        device.check(40)
    else:
        with pytest.raises(RaceError):
            device.check(40)


@pytest.mark.parametrize("shared_first", [False, True])
def test_a_recording_has_the_times_of_the_device_and_no_host_waits_for_them(shared_first: bool) -> None:
    waits = []
    with cuda() as device:
        x = torch.ones(3, device=CUDA)
        for recorder in (Recorder(), Recorder(CUDA)):
            experts = remote(CUDA, recorder, shared_first)
            torch.cuda.synchronize()
            recorder.start()
            with counted_waits(device) as waited:
                layers(experts, CUDA, lambda: x.mul_(2).sub_(1).mul_(3))
            waits.append(len(waited))
            log = recorder.stop()
    assert waits[0] == waits[1] > 0  # those for the rows
    assert (len(log.passes), log.num_dropped) == (3, 0)
    for passed in log.passes:
        (layer,) = passed.layers
        assert layer.shared_end_ns - layer.shared_start_ns == 4_000_000  # three operations, and an event behind them
        assert layer.attention_end_ns == (layer.shared_start_ns if shared_first else layer.messages[0].posted_ns)
        assert layer.turn_ns < layer.attention_end_ns
        assert layer.shared_end_ns < passed.turn_ns < passed.end_ns


def test_a_pass_that_failed_before_the_host_had_waited_for_it_counts_as_dropped() -> None:
    with cuda():
        recorder = Recorder(CUDA)
        experts = remote(CUDA, recorder)
        recorder.start()
        layers(experts, CUDA)
        experts.begin_forward(5)
        experts.end_forward()
        log = recorder.stop()
    assert (len(log.passes), log.num_dropped) == (3, 1)


# --- over a group ---


class Host:
    """Gloo's end of a group for messages of the host; what one end sends is there when the other asks."""

    def __init__(self, here: deque[Tensor], there: deque[Tensor]) -> None:
        self._here, self._there = here, there

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Host:
        self._there.append(tensors[0].clone())
        return self

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Host:
        tensors[0].copy_(self._here.popleft())
        return self

    def wait(self, timeout: timedelta | None = None) -> None:
        pass


class Wire:
    """One direction between two devices, as NCCL has it: at each end a stream, and no host waits for a message."""

    def __init__(self) -> None:
        self._streams = {"send": torch.cuda.Stream(), "recv": torch.cuda.Stream()}
        self._posted: dict[str, deque[tuple[Tensor, Any, StreamWork]]] = {"send": deque(), "recv": deque()}

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> StreamWork:
        return self._post("send", tensors[0])

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> StreamWork:
        return self._post("recv", tensors[0])

    def _post(self, end: str, x: Tensor) -> StreamWork:
        stream, work = self._streams[end], StreamWork([x], [x])
        stream.wait_stream(torch.cuda.current_stream())
        self._posted[end].append((x, stream.record_event(), work))
        if all(self._posted.values()):
            (sent, ready, one), (received, _, other) = (posted.popleft() for posted in self._posted.values())
            with torch.cuda.stream(self._streams["recv"]):
                torch.cuda.current_stream().wait_event(ready)
                assert sent.numel() == received.numel()
                received.copy_(sent)
                other.event = torch.cuda.current_stream().record_event()
            self._streams["send"].wait_event(other.event)
            one.event = self._streams["send"].record_event()
        return work


class OneThread(GroupExpertLink):
    """A link whose expert worker, with a stream of its own, answers when the attention worker asks for that."""

    def __init__(self, share: ExpertShare) -> None:
        boxes: tuple[deque[Tensor], deque[Tensor]] = (deque(), deque())
        rows, sums = Wire(), Wire()
        super().__init__(LinkGroups(Host(*boxes), rows, sums, CUDA), 1, "expert worker")
        self._end = GroupConnection(LinkGroups(Host(*boxes[::-1]), rows, sums, CUDA), 0)
        self._share, self._stream, self.num_rows = share, torch.cuda.Stream(), 0

    def receive(self, rows: Rows) -> Tensor:
        with torch.cuda.stream(self._stream):
            arrived = unpack_rows(*self._end.receive())
            self._end.hand_over()
            self._end.send(*pack_sums(arrived, self._share.run(arrived), Coder()))
        self.num_rows += len(rows.hidden)
        return super().receive(rows)


def grouped(rows: Tensor, weights: Tensor, offs: Tensor) -> Tensor:
    """torch._grouped_mm as on a GPU: what is behind the last group is never written."""
    number = torch.arange(len(rows), device=rows.device)[:, None]
    out = torch.full((len(rows), weights.shape[2]), torch.nan, device=rows.device)
    for group in range(len(weights)):
        begin = offs[group - 1] if group else 0
        out = torch.where((number >= begin) & (number < offs[group]), rows @ weights[group], out)
    return out


def over_groups(slicing: Any, expert_format: str = "exact") -> tuple[RemoteExperts, list[OneThread]]:
    split = EngineSplit(1, NUM_WORKERS)
    ranges = [split.expert_range(worker, NUM_EXPERTS) for worker in range(NUM_WORKERS)]
    links = []
    for held in ranges:
        part = {
            name: torch.nn.Parameter(p[held.start : held.stop].clone().to(CUDA), requires_grad=False)
            for name, p in ORIGINAL.named_parameters()
        }
        links.append(OneThread(ExpertShare([keep_experts(expert_format, "experts", FusedExperts(ORIGINAL, part))])))
    return RemoteExperts(links, [ranges], InferencePlan(num_slices=2, slicing=slicing), device=CUDA), links


@pytest.mark.parametrize("slicing", ["tokens", pytest.param("experts", marks=pytest.mark.ci)])
@pytest.mark.parametrize("lost", [None, "hand_over", "receive"])
def test_over_a_group_no_host_waits_for_a_message(slicing: str, lost: str | None) -> None:
    expected = layers(remote(torch.device("cpu")), torch.device("cpu"))
    torch.manual_seed(0)
    hidden = torch.randn(6, WIDTH)
    routes = [torch.rand(6, NUM_EXPERTS).topk(2) for _ in range(3)]
    with cuda() as device, mock.patch.object(torch, "_grouped_mm", grouped):
        experts, links = over_groups(slicing)
        x, there = hidden.to(CUDA), [(index.to(CUDA), weights.to(CUDA)) for weights, index in routes]
        torch.cuda.synchronize()
        with counted_waits(device) as waits, lost_waits(*([lost] if lost else [])):
            for index, weights in there:
                experts.begin_forward(5)
                x = x + experts.run(0, x * 0.5, index, weights)
                experts.end_forward()
        assert waits == []
        found = x.cpu()
        torch.cuda.synchronize()
        loads = experts.loads
    # Three layers, each of them cubic: what cancels has errors of the largest value's size.
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-5 * float(expected.abs().max()))
    assert loads == [torch.bincount(torch.cat([index[:5].flatten() for _, index in routes]), minlength=5).tolist()]
    # All rows travel, whoever they are meant for.
    assert [link.num_rows for link in links] == [3 * 5 * (2 if slicing == "experts" else 1)] * 2
    if lost is None:
        device.check(40)
    else:
        with pytest.raises(RaceError):
            device.check(40)


@pytest.mark.parametrize("expert_format", ["exact", "int8"])
def test_over_a_group_the_plain_forward_of_the_loads_check_asks_for_each_expert(expert_format: str) -> None:
    """With the numbers of rows that the host has counted; so do experts in codes, of whatever rows."""
    torch.manual_seed(0)
    hidden, (weights, index) = torch.randn(6, WIDTH), torch.rand(6, NUM_EXPERTS).topk(2)
    expected = ORIGINAL(hidden, index, weights)
    with cuda() as device, mock.patch.object(torch, "_grouped_mm", grouped):
        experts, _ = over_groups("tokens", expert_format)
        found = []
        for num_rows in (None, 6):
            experts.begin_forward(num_rows)
            found.append(experts.run(0, hidden.to(CUDA), index.to(CUDA), weights.to(CUDA)).cpu())
            experts.end_forward()
    device.check(20)
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found[0], expected, rtol=0.0, atol=1e-4 if expert_format == "exact" else 1.0)
