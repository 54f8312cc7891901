"""`laconic run --zip`: scripts over torch.distributed that know nothing of laconic, in two processes."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.test_run import NET
from tests.distributed.forked import ForkedPython
from tests.distributed.processes import free_port, rank_environment

DDP = """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    {start}
    torch.manual_seed(0)
    net = nn.Sequential(*[Net() for _ in range(4)])
    model = DistributedDataParallel(net)
    torch.manual_seed(1 + dist.get_rank())
    train(model, torch.optim.AdamW(net.parameters()))
    torch.save([p.detach() for p in net.parameters()], f"{name}-{{dist.get_rank()}}.pt")
    dist.destroy_process_group()
"""


def run_two(directory: Path, script: str, *flags: str) -> list[tuple[int, str, str]]:
    """Exit code, standard output and standard error of both ranks of `laconic run FLAGS script.py`."""
    (directory / "net.py").write_text(NET)
    (directory / "script.py").write_text("from net import *\n" + textwrap.dedent(script))
    command = [sys.executable, "-m", "laconic", "run", *flags, "--json", "script.py"]
    port = free_port()
    ranks = [
        ForkedPython(
            command,
            cwd=directory,
            env=rank_environment(rank, 2, port, PYTHONWARNINGS="ignore"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    found = []
    for rank in ranks:
        out, err = rank.communicate(timeout=240)
        found.append((rank.wait(), out, err))
    return found


def messages_of(err: str) -> Any:
    return json.loads(err.splitlines()[-1])["messages"]


@pytest.mark.parametrize(
    "start",
    [
        'dist.init_process_group("gloo")',
        "from torch.distributed import init_process_group; init_process_group()",
        "from torch.distributed.device_mesh import init_device_mesh; init_device_mesh('cpu', (2,))",
    ],
    ids=["gloo", "default", "mesh"],
)
def test_parameters_keep_every_bit_and_fewer_bytes_are_sent(start: str, tmp_path: Path) -> None:
    for name, flags in (("plain", ()), ("zipped", ("--zip", "on"))):
        (_, _, err), *_ = ended = run_two(tmp_path, DDP.format(start=start, name=name), "--activations", "16", *flags)
        assert [code for code, _, _ in ended] == [0, 0], err
        sent = messages_of(err)
        if not flags:
            assert sent is None
            continue
        assert sum(sent["groups"].values()) == 1
        # Gradients of four blocks in fp32, three steps and more: they shrink by a sixth.
        assert sent["raw_nbytes"] > 1_000_000
        assert sent["sent_nbytes"] < 0.95 * sent["raw_nbytes"]
    for rank in range(2):
        plain, zipped = (torch.load(tmp_path / f"{name}-{rank}.pt") for name in ("plain", "zipped"))
        assert all(map(torch.equal, plain, zipped))


def test_auto_says_why_nothing_was_coded_and_groups_of_groups_follow(tmp_path: Path) -> None:
    script = """
        import torch.distributed as dist
        dist.init_process_group("gloo")
        pair, own = dist.new_group([0, 1]), dist.new_group([0, 1], backend="gloo")
        for group in (None, pair, own):
            x = torch.ones(4)
            dist.all_reduce(x, group=group)
            assert x.tolist() == [2.0] * 4
        dist.destroy_process_group()
    """
    (code, _, err), other = run_two(tmp_path, script, "--zip", "auto")
    assert (code, other[0]) == (0, 0), err
    sent = messages_of(err)
    assert sent["groups"] == {"gloo": 2}
    assert sent["calls"] == 3
    assert sent["sent_nbytes"] == sent["raw_nbytes"] == 3 * 16
    assert sum(sent["left_raw"].values()) == 3


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ('dist.init_process_group("fake", rank=0, world_size=1)', "init_process_group with backend 'fake'"),
        ('dist.init_process_group("nccl", pg_options=object())', "init_process_group with pg_options"),
    ],
)
def test_what_cannot_be_coded_is_refused(call: str, said: str, tmp_path: Path) -> None:
    for code, _, err in run_two(tmp_path, f"import torch.distributed as dist\n{call}", "--zip", "on"):
        assert code == 2
        assert said in err
        assert "leave out --zip" in err


def test_a_script_without_a_group_or_with_laconics_own_is_told_apart(tmp_path: Path) -> None:
    for script, said in (
        ("pass", "--zip changed nothing: the script made no process group"),
        (
            "import torch.distributed as dist\n"
            "dist.init_process_group('laconic', store=dist.HashStore(), rank=0, world_size=1)\n"
            "dist.destroy_process_group()",
            "--zip changed nothing: the script made its own groups laconic's",
        ),
    ):
        (tmp_path / "alone.py").write_text(script)
        command = [sys.executable, "-m", "laconic", "run", "--zip", "on", "alone.py"]
        process = ForkedPython(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        _, err = process.communicate(timeout=120)
        assert process.wait() == 0, err
        assert said in err


TRAINER = """
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
    set_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4))
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 256, (32,), generator=generator) for _ in range(32)]
    settings = TrainingArguments("out", use_cpu=True, ddp_backend="gloo", max_steps=3, save_strategy="no",
                                 report_to=[], disable_tqdm=True, per_device_train_batch_size=4)
    trainer = Trainer(model, settings, train_dataset=[{{"input_ids": row, "labels": row}} for row in ids])
    trainer.train()
    torch.save([p.detach() for p in model.parameters()], f"{name}-{{dist.get_rank()}}.pt")
"""


def test_a_trainer_that_makes_the_group_itself(tmp_path: Path) -> None:
    for name, flags in (("plain", ()), ("zipped", ("--zip", "on"))):
        (code, _, err), other = run_two(tmp_path, TRAINER.format(name=name), "--activations", "16", *flags)
        assert (code, other[0]) == (0, 0), err + other[2]
    assert messages_of(err)["sent_nbytes"] < 0.95 * messages_of(err)["raw_nbytes"]
    plain, zipped = (torch.load(tmp_path / f"{name}-1.pt") for name in ("plain", "zipped"))
    assert all(map(torch.equal, plain, zipped))
