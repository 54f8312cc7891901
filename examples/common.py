"""What the examples share: a small model, real text and two hosts, all without a network."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

LENGTH = 64


def need_torchrun(script: str) -> None:
    """End with the command that starts `script`, if it was started as one process."""
    if "RANK" not in os.environ:
        sys.exit(f"these are two processes; start them with: torchrun --nproc-per-node 2 {shlex.quote(script)}")


def llama(**changes: Any) -> LlamaForCausalLM:
    """A Llama of under a million parameters, whose tokens are bytes."""
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, **(shape | changes)))


def mixture(top_k: int) -> Qwen3MoeForCausalLM:
    """A mixture of eight experts, `top_k` for each token, whose tokens are bytes; the same weights on all ranks."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(vocab_size=256, num_experts=8, num_experts_per_tok=top_k, norm_topk_prob=True, **shape)
    )


def batches(count: int, seed: int = 0, size: int = 8) -> Iterator[Tensor]:
    """Bytes of the Python standard library, int64 [size, LENGTH], `count` times."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = b"\n".join(path.read_bytes() for path in sorted(root.glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(0, len(data) - LENGTH, (size, 1), generator=generator)
        yield data[starts + torch.arange(LENGTH)]


def on_two_hosts(script: str, ranks_per_host: int, bits_per_second: float) -> int:
    """Run `script` on two hosts with a slow link between them, as torchrun would; the exit code.

    The hosts are network namespaces (netlab), which need root and `ip`; where these are missing, two nodes of torchrun
    run on this machine, whose link is not slow, and a line says so.
    """
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from netlab import Lab, finish, why_not

    if (reason := why_not()) is None:
        print(f"two hosts, {bits_per_second / 1e6:.0f} Mbit/s between them", flush=True)
        with Lab(2, bits_per_second) as lab:
            command = [sys.executable, script]
            ranks = lab.start_ranks(
                command, ranks_per_host=ranks_per_host, on_line=lambda program, line: print(line, flush=True)
            )
            return max(abs(ending.code) for ending in finish(ranks, timeout_seconds=200))
    print(f"no slow link here ({reason}): two nodes on this machine, at its speed", flush=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(ranks_per_host)]
    launch += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    nodes = [subprocess.Popen([*launch, "--node-rank", str(node), script]) for node in range(2)]
    return max(abs(node.wait()) for node in nodes)
