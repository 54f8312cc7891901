"""`laconic run --zip`: what unmodified scripts send is shorter, and they compute the same bits."""

import json
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.run.zipped_groups import laconic_backend
from tests.distributed.forked import ForkedPython
from tests.patience import patient

SCRIPT = """
    import sys, torch, torch.distributed as dist
    from torch import nn
    from torch.distributed import init_process_group
    from torch.distributed.fsdp import fully_shard

    kind, backend, out = sys.argv[1:]
    init_process_group(None if backend == "none" else backend)
    assert dist.get_backend() == ("undefined" if backend == "none" else backend), dist.get_backend()
    torch.manual_seed(0)
    net = call = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 64))
    if kind == "fsdp2":
        for layer in net[::2]:
            fully_shard(layer)
        fully_shard(net)
    elif kind == "ddp":
        call = nn.parallel.DistributedDataParallel(net)
    pair = dist.new_group([0, 1])
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(3):
        call(torch.randn(8, 64)).square().mean().backward()
        if kind == "plain":
            for parameter in net.parameters():
                dist.all_reduce(parameter.grad, group=pair)
        optimizer.step()
        optimizer.zero_grad()
    found = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in net.parameters()]
    objects = [None, None]
    dist.all_gather_object(objects, dist.get_rank())
    assert objects == [0, 1]
    if dist.get_rank() == 0:
        torch.save(found, out)
    del call  # before its group: where torch's own ends first, freeing it can wait for ever for a thread of gloo
    dist.destroy_process_group()
"""


def run_pair(directory: Path, *flags: str, arguments: Sequence[str], ranks: int = 2) -> tuple[list[int], list[str]]:
    """Exit codes and standard errors of `laconic run FLAGS` in processes that torchrun could have started."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        ForkedPython(
            [sys.executable, "-m", "laconic", "run", "--activations", "16", *flags, *arguments],
            cwd=directory,
            env={
                **os.environ,
                **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]
    errors = [process.communicate(timeout=patient(200))[1] for process in processes]
    return [process.wait() for process in processes], errors


def sent_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "summary.json").read_text())["sent"]
    return found


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("ddp", "gloo"),
        pytest.param("fsdp2", "none", marks=pytest.mark.slow),
        pytest.param("plain", "cpu:gloo", marks=pytest.mark.slow),
    ],
)
def test_a_script_sends_less_and_trains_to_the_same_bits(tmp_path: Path, kind: str, backend: str) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    parameters = {}
    for flag in ("off", "on"):
        arguments = ("script.py", kind, backend, f"{flag}.pt")
        codes, errors = run_pair(tmp_path, "--zip", flag, "--json", "summary.json", arguments=arguments)
        assert codes == [0, 0], errors
        parameters[flag] = torch.load(tmp_path / f"{flag}.pt")
        sent = json.loads((tmp_path / "summary.json").read_text())["sent"]
        if flag == "off":
            assert sent is None
        else:
            assert sent["groups"] == 2
            assert sent["left_groups"] == {}
            assert sent["sent_nbytes"] < 0.9 * sent["nbytes"]
            assert 0 < sent["coded_calls"] < sent["calls"]
            assert sum(sent["uncoded"].values()) == sent["calls"] - sent["coded_calls"]
    assert parameters["on"]
    assert all(torch.equal(a, b) for a, b in zip(parameters["off"], parameters["on"], strict=True))


def test_a_script_without_groups_is_told_that_the_flag_had_no_effect(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('nothing')")
    codes, errors = run_pair(tmp_path, "--zip", "auto", arguments=("script.py",), ranks=1)
    assert codes == [0]
    assert "--zip auto had no effect: this process made no process group" in errors[0]
    codes, errors = run_pair(tmp_path, arguments=("script.py",), ranks=1)
    assert codes == [0]
    assert "--zip" not in errors[0]


FAKE = """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    print(dist.get_backend())
"""


def test_groups_that_cannot_be_coded_are_named_or_refused(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(FAKE))
    codes, errors = run_pair(tmp_path, "--zip", "auto", arguments=("script.py",), ranks=1)
    assert codes == [0], errors
    assert "left as the script made it, and not counted: 1 group(s), its backend is fake" in errors[0]
    codes, errors = run_pair(tmp_path, "--zip", "on", arguments=("script.py",), ranks=1)
    assert codes == [2]
    assert "--zip is on, but a process group cannot be coded: its backend is fake" in errors[0]


@pytest.mark.parametrize(
    ("backend", "ours"),
    [
        ("gloo", "laconic:gloo"),
        ("nccl", "laconic:nccl"),
        ("NCCL", "laconic:nccl"),
        ("undefined", "laconic"),
        ("cuda:nccl,cpu:gloo", "laconic"),
        ("cpu:gloo", "laconic:gloo"),
        ("cuda:nccl", "laconic:nccl"),
        ("cpu:gloo,cuda:gloo", "laconic:gloo"),
        ("mpi", None),
        ("cpu:gloo,cuda:ucc", None),
        ("", None),
    ],
)
def test_each_backend_of_torch_has_its_own_of_laconic(backend: str, ours: str | None) -> None:
    assert laconic_backend(backend) == ours


TRAINER = """
    import sys
    import torch
    from torch import nn
    from transformers import Trainer, TrainingArguments

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(64, 512), nn.Linear(512, 64)
        def forward(self, x, labels=None):
            y = self.down(self.up(x).relu())
            return {"loss": (y - labels).square().mean(), "logits": y}

    if __name__ == "__main__":
        torch.manual_seed(0)
        data = [{"x": torch.randn(64), "labels": torch.randn(64)} for _ in range(16)]
        arguments = TrainingArguments(sys.argv[1], max_steps=2, report_to=[], use_cpu=True, save_strategy="no",
                                      per_device_train_batch_size=4, disable_tqdm=True, ddp_backend="gloo")
        Trainer(Net(), arguments, train_dataset=data).train()
"""

ACCELERATE = """
    import torch
    from accelerate import Accelerator
    if __name__ == "__main__":
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        net = torch.nn.Linear(256, 256)
        net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
        for _ in range(2):
            accelerator.backward(net(torch.randn(4, 256)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        accelerator.end_training()
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", [TRAINER, ACCELERATE], ids=["trainer", "accelerate"])
def test_modules_whose_library_makes_the_group(tmp_path: Path, script: str) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "train_it.py").write_text(textwrap.dedent(script))
    codes, errors = run_pair(tmp_path, "--zip", "on", "--json", "summary.json", arguments=("-m", "train_it", "out"))
    assert codes == [0, 0], errors
    sent = sent_of(tmp_path)
    assert sent["groups"] >= 1
    assert sent["coded_calls"] > 0
    assert sent["sent_nbytes"] < sent["nbytes"]
