"""Plans with tensors: threads make one graph, CUDA streams keep the plan's order."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from laconic.errors import ScheduleError
from laconic.moe.parallel.cuda_streams import CudaStream
from laconic.schedule.execute import ThreadStream, execute
from laconic.schedule.streams import StreamPlan, Task


def test_a_graph_that_threads_made_is_one_graph() -> None:
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    held: dict[str, torch.Tensor] = {}
    plan = StreamPlan((Task("square", "a", 1.0), Task("sum", "b", 1.0, ("square",))))
    with ThreadStream() as a, ThreadStream() as b:
        actions = {
            "square": lambda: held.__setitem__("square", x * x),
            "sum": lambda: held.__setitem__("sum", held["square"].sum()),
        }
        execute(plan, actions, {"a": a, "b": b})
    held["sum"].backward()
    assert x.grad is not None
    assert x.grad.tolist() == [4.0, 6.0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_streams_without_a_device_are_refused() -> None:
    with pytest.raises(ScheduleError, match="there is no CUDA device; use ThreadStream"):
        CudaStream()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_streams_keep_the_order_of_a_plan() -> None:
    """Long kernels before short ones that read what they wrote, over and over; one wrong order changes the sum."""
    tasks, actions = [], {}
    held: dict[str, torch.Tensor] = {"": torch.ones(1 << 22, device="cuda")}
    for number in range(50):
        name, before = str(number), str(number - 1) if number else ""

        def action(name: str = name, before: str = before) -> torch.Tensor:
            found = held[before]
            for _ in range(20):
                found = found * 1.0 + 0.05
            held[name] = found
            return found

        tasks.append(Task(name, "ab"[number % 2], 1.0, (before,) if before else ()))
        actions[name] = action
    streams = {"a": CudaStream(torch.cuda.current_stream()), "b": CudaStream()}
    execution = execute(StreamPlan(tuple(tasks)), actions, streams)
    assert held["49"].sum().item() == pytest.approx(51.0 * (1 << 22), rel=1e-4)
    spans = [execution.timeline.spans[str(number)] for number in range(50)]
    assert all(one.end_seconds <= other.start_seconds + 1e-4 for one, other in pairwise(spans))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_error_on_a_cuda_stream_comes_back() -> None:
    plan = StreamPlan((Task("bad", "a", 1.0), Task("later", "a", 1.0)))
    ran = []

    def bad() -> None:
        raise OSError("wire cut")

    with pytest.raises(OSError, match="wire cut"):
        execute(plan, {"bad": bad, "later": lambda: ran.append(1)}, {"a": CudaStream()})
    assert ran == []
