"""Links over a process group of torch.distributed, by gloo: what they carry, what they refuse, and lost workers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from laconic.errors import CollectiveError, ConfigError, FormatError
from laconic.infer import AutoPlan, Engine, InferencePlan
from laconic.infer.device import take_device
from laconic.infer.group_link import GroupConnection, GroupExpertLink, join_link
from laconic.infer.links import serve
from laconic.infer.messages import Header, Rows, pack_rows
from laconic.infer.payload import INT8, Coder
from laconic.infer.settings import WorkerSettings
from laconic.infer.split import EngineSplit
from laconic.infer.worker import local_place
from laconic.train.launch.worker import leave
from tests.distributed.processes import start_ranks
from tests.infer.models import NEW_TOKENS, PROMPTS, expected, make
from tests.infer.test_links import CPU, SECONDS, join, negated, rows_of, serving
from tests.patience import patient


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda rows: rows.hidden[1:], r"differs from its rows in num_rows \(1, not 2\)"),
        (lambda rows: rows.hidden.bfloat16(), r"differs from its rows in dtype \(torch.bfloat16, not torch.float32\)"),
        (lambda rows: rows.hidden.repeat(1, 2), r"differs from its rows in width \(8, not 4\)"),
    ],
)
def test_an_answer_of_another_size_is_refused(answer: Callable[[Rows], Tensor], message: str) -> None:
    """Before it leaves: gloo would leave a part of the answer as it was, or end the process."""
    groups = join(2)
    server, raised = serving([GroupConnection(groups[1], 0)], answer)
    link = GroupExpertLink(groups[0], 1, "expert worker 0", 0.5)
    link.send(rows_of(3, 0, 0, 2))
    server.join(patient(10))
    (error,) = raised
    with pytest.raises(CollectiveError, match=message):
        raise error
    with pytest.raises(CollectiveError, match=r"expert worker 0 is lost: it did not answer within 0\.5 s"):
        link.receive(rows_of(3, 0, 0, 2))


def _header(**changes: Any) -> Tensor:
    header, _ = pack_rows(rows_of(0, 0, 0, 2), Coder())
    return Header(**vars(header) | changes).to_tensor()


@pytest.mark.parametrize(
    ("front", "message"),
    [
        (torch.arange(11), "which is no header of this version of laconic"),
        (_header(num_rows=3), "which is no header"),  # the bytes that follow are those of 2
        (_header(num_rows=1 << 40, width=1 << 10, values_nbytes=1 << 52), r"bytes follow, for which there is no room"),
        (_header(coding=INT8, num_rows=1, values_nbytes=8), "in coding 2 came over a link that takes raw rows"),
        (_header(kind=2, top_k=0), "a message of kind 2"),
    ],
)
def test_what_does_not_announce_raw_rows_is_refused(front: Tensor, message: str) -> None:
    groups = join(2)
    server, raised = serving([GroupConnection(groups[1], 0)], negated)
    groups[0].headers.send([front], 1, 1).wait()
    server.join(patient(10))
    (error,) = raised
    with pytest.raises(FormatError, match=message):
        raise error


class _FailsOnce:
    """A group whose first call of `name` raises `error`."""

    def __init__(self, group: Any, name: str, error: Exception) -> None:
        self._group, self._name, self._error = group, name, error

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            self._name = ""
            return self._fail
        return getattr(self._group, name)

    def _fail(self, *_: object) -> None:
        raise self._error


@pytest.mark.parametrize(("group", "call"), [("sums", "send"), ("rows", "recv")])
def test_an_error_that_is_no_peers_ends_the_expert_worker(group: str, call: str) -> None:
    """The next answer would otherwise land in the memory of the one that is missing."""
    groups, error = join(2), RuntimeError("CUDA error: an illegal memory access was encountered")
    failing = replace(groups[1], **{group: _FailsOnce(getattr(groups[1], group), call, error)})
    server, raised = serving([GroupConnection(failing, 0)], negated)
    link = GroupExpertLink(groups[0], 1, "expert worker 0", 0.5)
    many = [rows_of(0, 0, piece, 2) for piece in range(2)]
    for rows in many:
        link.send(rows)
    server.join(patient(10))
    assert not server.is_alive()
    assert raised == [error]
    for rows in many:
        with pytest.raises(CollectiveError, match=r"expert worker 0 is lost: it did not answer within 0\.5 s"):
            link.receive(rows)


def test_no_answer_follows_one_that_could_not_be_sent() -> None:
    groups = join(3)
    error = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")
    failing = replace(groups[2], sums=_FailsOnce(groups[2].sums, "send", error))
    begun = threading.Event()

    def run(rows: Rows) -> Tensor:
        begun.set()
        return -rows.hidden

    server, raised = serving([GroupConnection(failing, peer) for peer in range(2)], run)
    first = GroupExpertLink(groups[0], 2, "expert worker 0", 0.5)
    other = GroupExpertLink(groups[1], 2, "expert worker 0", SECONDS)
    many = [rows_of(0, 0, piece, 2) for piece in range(2)]
    for rows in many:
        first.send(rows)
    assert begun.wait(patient(10))
    other.send(many[0])
    assert torch.equal(other.receive(many[0]), -many[0].hidden)
    with pytest.raises(CollectiveError, match="expert worker 0 is lost: it did not answer within"):
        first.receive(many[0])
    other.close()
    server.join(patient(10))
    assert not server.is_alive()
    assert raised == []


def test_rows_that_could_not_be_sent_are_the_last_and_the_error_is_named() -> None:
    groups, error = join(2), RuntimeError("CUDA error: out of memory")
    serving([GroupConnection(groups[1], 0)], negated)
    link = GroupExpertLink(
        replace(groups[0], rows=_FailsOnce(groups[0].rows, "send", error)), 1, "expert worker 0", patient(0.5)
    )
    for _ in range(2):
        with pytest.raises(CollectiveError, match="expert worker 0 is lost: its link failed here: CUDA error: out of"):
            link.send(rows_of(0, 0, 0, 2))


def test_a_send_that_waits_does_not_hold_up_the_end() -> None:
    link = GroupExpertLink(join(2)[0], 1, "expert worker 0")
    with link._sending:
        closing = threading.Thread(target=link.close, args=(0.2,), daemon=True)
        closing.start()
        closing.join(patient(10))
        assert not closing.is_alive()


def _killed(rank: int, folder: str) -> None:
    groups = join_link(FileStore(f"{folder}/store", 3), rank, 3, CPU, SECONDS)
    if rank == 2:
        GroupConnection(groups, 0).receive()
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        serve([GroupConnection(groups, 0)], negated)
        leave(0)
    whole, lost = GroupExpertLink(groups, 1, "expert worker 0"), GroupExpertLink(groups, 2, "expert worker 1")
    rows, started = rows_of(0, 0, 0, 2), time.monotonic()
    for link in (lost, whole):
        link.send(rows)
    for _ in range(2):
        with pytest.raises(CollectiveError, match="expert worker 1 is lost: Connection closed by peer"):
            lost.receive(rows)
        with pytest.raises(CollectiveError, match="expert worker 1 is lost: "):
            lost.send(rows)
    assert time.monotonic() - started < patient(10)  # at once, not after the 120 s of an answer
    assert torch.equal(whole.receive(rows), -rows.hidden)
    for link in (lost, whole):
        link.close()
    leave(0)


def test_a_killed_worker_is_named_in_every_call_and_the_others_go_on(tmp_path: Path) -> None:
    processes = start_ranks(_killed, (str(tmp_path),), 3)
    for process, code in zip(processes, (0, 0, -signal.SIGKILL), strict=True):
        process.join(patient(60))
        assert process.exitcode == code


def test_the_others_are_served_when_an_attention_worker_is_gone() -> None:
    """Between a header and its rows."""
    groups = join(3)
    server, raised = serving([GroupConnection(groups[2], peer) for peer in range(2)], negated)
    groups[0].headers.send([_header()], 2, 1).wait()
    with pytest.raises(RuntimeError, match="Timed out"):  # at which gloo closes the connection
        groups[0].headers.recv([torch.empty(1)], 2, 9).wait(timedelta(seconds=0.1))
    link = GroupExpertLink(groups[1], 2, "expert worker 0")
    for layer in range(3):
        rows = rows_of(layer, 0, 0, 2)
        link.send(rows)
        assert torch.equal(link.receive(rows), -rows.hidden)
    link.close()
    server.join(patient(10))
    assert not server.is_alive()
    assert raised == []


# --- engines ---


@pytest.mark.parametrize(
    ("family", "attention", "experts"),
    [
        pytest.param("qwen2_moe", 1, 2, marks=pytest.mark.ci),
        *(
            pytest.param(family, *split, marks=pytest.mark.slow)
            for family, split in (
                ("qwen2_moe", (2, 1)),
                ("deepseek_v3", (1, 2)),
                ("deepseek_v3", (2, 1)),
                ("gpt_oss", (1, 2)),
                ("gpt_oss", (2, 1)),
            )
        ),
    ],
)
def test_tokens_are_those_of_generate(tmp_path: Path, family: str, attention: int, experts: int) -> None:
    path, plan = make(family, tmp_path), InferencePlan(num_micro_batches=2, num_slices=2, slicing="experts")
    limits = {"cache_tokens": 1024, "batch_tokens": 24, "threads": 1}
    with Engine(path, attention=attention, experts=experts, plan=plan, link="group", **limits) as engine:
        assert engine.generate(PROMPTS, NEW_TOKENS) == expected(path)
        a2e, e2a = engine.traffic
        assert a2e.messages == e2a.messages > 2 * NEW_TOKENS  # two layers of experts
        assert a2e.coded == e2a.coded == 0
        with pytest.raises(ConfigError, match="trace is asked for with link = 'group'"):
            engine.trace()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"link": "nccl"}, "^link is 'nccl', but it must be one of tcp, group$"),
        ({"payload": "lossless"}, "sizes that both ends know beforehand, but payload is 'lossless'; leave one of them"),
        ({"payload": "auto"}, "but payload is 'auto'"),
        ({"device": "cuda", "expert_device": "cpu"}, "attention workers are on 'cuda' and expert workers on 'cpu'"),
        ({"expert_device": "cuda"}, "attention workers are on 'cpu' and expert workers on 'cuda'"),
        ({"plan": "auto"}, "plan is automatic with link = 'group', but rates are those of link = 'tcp'"),
        ({"plan": AutoPlan()}, "plan is automatic with link = 'group'"),
        ({"trace": "run.json"}, "trace is asked for with link = 'group', over which nothing notes when"),
        ({"experts": 0}, "link is 'group' with experts = 0, but only expert workers use it"),
    ],
)
def test_what_does_not_work_over_a_group_is_refused(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(make("qwen2_moe", tmp_path), **{"link": "group", **arguments})


def test_a_shared_secret_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LACONIC_SECRET", "correct horse battery staple")
    with pytest.raises(ConfigError, match="link is 'group', but there is a shared secret, which torch's groups do not"):
        Engine(make("qwen2_moe", tmp_path), link="group")


def test_a_launcher_need_not_say_how_many_workers_a_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all machines would be too many for the devices of one."""
    settings = WorkerSettings(9, "model", split=EngineSplit(8, 8), store="tcp://10.0.0.1:29500", link="group")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert local_place(settings) == (1, 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert local_place(settings) == (1, 8)
    assert local_place(replace(settings, store="file:///store")) == (9, 16)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "LOCAL_RANK is not set in the environment, but it must be an integer of at least 0.*torchrun"),
        ({"LOCAL_RANK": "first"}, "LOCAL_RANK is 'first' in the environment"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK is '-1' in the environment"),
        ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE is '3' .* an integer of at least 4"),
    ],
)
def test_a_launcher_says_which_worker_of_a_machine_this_is(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        local_place(WorkerSettings(9, "model", split=EngineSplit(8, 8), store="tcp://10.0.0.1:29500", link="group"))


def test_workers_of_a_group_need_a_device_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"link is 'group' with device = 'cuda', but .* has 2 CUDA devices for 3"):
        take_device("cuda", 0, 3)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tokens_over_nccl_are_those_of_generate(tmp_path: Path) -> None:
    path = make("qwen3_moe", tmp_path)
    plan = InferencePlan(num_micro_batches=2, num_slices=2)
    with Engine(path, experts=1, plan=plan, device="cuda", dtype="float32", link="group") as engine:
        assert engine.generate(PROMPTS, NEW_TOKENS) == expected(path)
