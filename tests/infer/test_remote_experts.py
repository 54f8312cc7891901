"""However rows are cut into slices and spread over workers, a layer's sums are those of all experts in one place."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from benchmarks.kit.local_link import LocalLink
from laconic.errors import CollectiveError
from laconic.infer.expert_share import ExpertShare
from laconic.infer.messages import Rows
from laconic.infer.remote_experts import ComputeTurns, Kind, RemoteExperts
from laconic.infer.split import EngineSplit
from laconic.moe.huggingface.experts import FusedExperts
from laconic.schedule.inference import InferencePlan, Order, Slicing
from tests.patience import patient

WIDTH, NUM_EXPERTS = 8, 5


def experts_module() -> Any:
    config = Qwen3MoeConfig(hidden_size=WIDTH, moe_intermediate_size=4, num_experts=NUM_EXPERTS)
    config._experts_implementation = "grouped_mm"
    module = Qwen3MoeExperts(config)
    generator = torch.Generator().manual_seed(0)  # what other tests drew must not choose these values
    for parameter in module.parameters():
        nn.init.normal_(parameter, generator=generator)
    return module.requires_grad_(False)


ORIGINAL = experts_module()


class CountingLink(LocalLink):
    """Records what it is sent."""

    def __init__(self, share: ExpertShare) -> None:
        super().__init__(share.run)
        self.sent: list[Rows] = []

    def send(self, rows: Rows) -> None:
        self.sent.append(rows)
        super().send(rows)


def remote(num_workers: int, plan: InferencePlan) -> tuple[RemoteExperts, list[CountingLink]]:
    split = EngineSplit(1, num_workers)
    ranges = [split.expert_range(worker, NUM_EXPERTS) for worker in range(num_workers)]
    links = []
    for held in ranges:
        part = {name: nn.Parameter(p[held.start : held.stop]) for name, p in ORIGINAL.named_parameters()}
        links.append(CountingLink(ExpertShare([FusedExperts(ORIGINAL, part)])))
    return RemoteExperts(links, [ranges], plan), links


def run(experts: RemoteExperts, inputs: tuple[Tensor, Tensor, Tensor], num_rows: int) -> Tensor:
    experts.begin_forward(num_rows)
    try:
        return experts.run(0, *inputs)
    finally:
        experts.end_forward()


@settings(max_examples=60)
@given(
    st.integers(0, 12),
    st.integers(0, 3),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 6),
    st.sampled_from(["tokens", "experts"]),
    st.randoms(use_true_random=False),
)
def test_sums_are_those_of_all_experts_in_one_place(
    num_rows: int, padding: int, top_k: int, num_workers: int, num_slices: int, slicing: Slicing, random: Any
) -> None:
    experts, links = remote(num_workers, InferencePlan(num_slices=num_slices, slicing=slicing))
    length = num_rows + padding
    hidden, weights = torch.randn(length, WIDTH), torch.rand(length, top_k)
    chosen = [random.sample(range(NUM_EXPERTS), top_k) for _ in range(length)]
    index = torch.tensor(chosen, dtype=torch.int64).view(length, top_k)
    got = run(experts, (hidden, index, weights), num_rows)
    wanted = torch.zeros(length, WIDTH)
    if num_rows:
        wanted[:num_rows] = ORIGINAL(hidden[:num_rows], index[:num_rows], weights[:num_rows])
    assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-3)  # sums of some hundreds in another order
    # Each row goes once to each worker that it concerns, and slice; no message is empty, and no padding travels.
    sent = [rows for link in links for rows in link.sent]
    assert all(len(rows.hidden) and (rows.experts >= 0).any(1).all() for rows in sent)
    assert sum(int((rows.experts >= 0).sum()) for rows in sent) == num_rows * top_k
    if num_workers == num_slices == 1 and num_rows:
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("num_rows", [1, 100, 1500])
def test_one_worker_and_one_slice_give_the_bits_of_all_experts(num_rows: int) -> None:
    """With few rows experts run as one product, with many one by one; the bits are the same."""
    experts, _ = remote(1, InferencePlan())
    weights, index = torch.rand(num_rows, NUM_EXPERTS).topk(2)
    inputs = (torch.randn(num_rows, WIDTH), index, weights)
    assert torch.equal(run(experts, inputs, num_rows), ORIGINAL(*inputs))


@pytest.mark.parametrize("shared_first", [False, True])
def test_shared_experts_run_between_sending_and_waiting_or_before(shared_first: bool) -> None:
    happened: list[str] = []
    experts, links = remote(1, InferencePlan(shared_first=shared_first))
    send, receive = links[0].send, links[0].receive
    links[0].send = lambda rows: (happened.append("send"), send(rows))[1]  # type: ignore[method-assign]
    links[0].receive = lambda rows: (happened.append("receive"), receive(rows))[1]  # type: ignore[method-assign]
    inputs = (torch.ones(1, WIDTH), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))
    experts.begin_forward(1)
    experts.run(0, *inputs, lambda: happened.append("shared"))
    experts.end_forward()
    assert happened == (["shared", "send", "receive"] if shared_first else ["send", "shared", "receive"])


def test_turn_is_held_again_after_a_lost_worker() -> None:
    experts, links = remote(1, InferencePlan())

    def lost(rows: Rows) -> Tensor:
        raise CollectiveError("expert worker 0 is lost")

    links[0].receive = lost  # type: ignore[method-assign]
    inputs = (torch.ones(1, WIDTH), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))
    for _ in range(2):  # a second forward would wait forever if the first had kept the turn
        with pytest.raises(CollectiveError, match="lost"):
            run(experts, inputs, 1)


@pytest.mark.parametrize("fails_in", ["shared experts", "receiving"])
def test_a_forward_that_failed_leaves_no_rows_unanswered(fails_in: str) -> None:
    """They would be refused, as an expert worker's loss, when the forward is tried again."""
    experts, links = remote(3, InferencePlan())
    receive = links[0].receive

    def fails(*arguments: Any) -> Any:
        if arguments:
            receive(*arguments)
        raise MemoryError("no room")

    inputs = (torch.ones(3, WIDTH), torch.tensor([[0], [2], [4]]), torch.ones(3, 1))
    links[0].receive = fails  # type: ignore[method-assign]
    experts.begin_forward(3)
    with pytest.raises(MemoryError, match="no room"):
        experts.run(0, *inputs, fails if fails_in == "shared experts" else None)
    experts.end_forward()
    assert [len(link.sent) for link in links] == [1, 1, 1]
    assert [link._answers for link in links] == [{}, {}, {}]
    links[0].receive = receive  # type: ignore[method-assign]
    assert torch.allclose(run(experts, inputs, 3), ORIGINAL(*inputs), rtol=1e-5, atol=1e-5)


def test_another_micro_batch_computes_while_one_waits() -> None:
    """Both wait for their answers at the same time, which a micro-batch that kept its turn would not let happen."""
    experts, links = remote(1, InferencePlan(num_micro_batches=2))
    together, receive = threading.Barrier(2, timeout=patient(10)), links[0].receive

    def receive_together(rows: Rows) -> Tensor:
        together.wait()
        return receive(rows)

    links[0].receive = receive_together  # type: ignore[method-assign]
    found: dict[int, Tensor] = {}

    def work(number: int) -> None:
        inputs = (torch.full((2, WIDTH), float(number)), torch.tensor([[0], [3]]), torch.ones(2, 1))
        found[number] = run(experts, inputs, 2) - ORIGINAL(*inputs)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patient(20))
    assert {rows.micro_batch for rows in links[0].sent} == {0, 1}
    assert [float(found[number].abs().max()) for number in range(2)] == [0.0, 0.0]


@pytest.mark.parametrize("order", ["ASAS", "AASS", "greedy"])
def test_shared_experts_give_way_to_attention_under_all_orders_but_asas(order: Order) -> None:
    """While the first micro-batch sends, the second asks for its turn; but under ASAS, it gets it before S1."""
    experts, _ = remote(1, InferencePlan(num_micro_batches=2, order=order))
    happened: list[str] = []
    inputs = (torch.ones(1, WIDTH), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))

    def second() -> None:
        experts.begin_forward(1)
        happened.append("A2")
        experts.run(0, *inputs, lambda: happened.append("S2"))
        experts.end_forward()

    experts.begin_forward(1)
    happened.append("A1")
    other = threading.Thread(target=second)
    other.start()
    while not experts._turns._waiting["attention"]:
        time.sleep(0.001)
    experts.run(0, *inputs, lambda: happened.append("S1"))
    experts.end_forward()
    other.join(patient(10))
    assert happened[:3] == (["A1", "S1", "A2"] if order == "ASAS" else ["A1", "A2", "S1"])
    assert sorted(happened) == ["A1", "A2", "S1", "S2"]


def waiting(turns: ComputeTurns) -> int:
    return sum(len(queue) for queue in turns._waiting.values())


def test_attention_goes_before_shared_experts_each_in_order_of_call() -> None:
    turns, ran = ComputeTurns(), []
    turns.take()

    def work(name: str, kind: Kind) -> None:
        turns.take(kind)
        ran.append(name)
        turns.give()

    calls: list[tuple[str, Kind]] = [
        ("S1", "shared"),
        ("A1", "attention"),
        ("S2", "shared"),
        ("A2", "attention"),
        ("A3", "attention"),
    ]
    threads = []
    for number, call in enumerate(calls):
        threads.append(threading.Thread(target=work, args=call))
        threads[-1].start()
        while waiting(turns) <= number:
            time.sleep(0.001)
    assert ran == []
    turns.give()
    for thread in threads:
        thread.join(patient(10))
    assert ran == ["A1", "A2", "A3", "S1", "S2"]


def test_only_one_computes_at_a_time() -> None:
    turns, inside, most = ComputeTurns(), [0], [0]

    def work(kind: Kind) -> None:
        for _ in range(50):
            turns.take(kind)
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0)
            inside[0] -= 1
            turns.give()

    kinds: list[Kind] = ["attention", "shared", "attention", "shared"]
    threads = [threading.Thread(target=work, args=(kind,)) for kind in kinds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patient(10))
        assert not thread.is_alive()
    assert most == [1]
