"""Ray's TorchTrainer on two nodes: `python ray_driver.py FOLDER [ADDRESS]`.

Without the address of a cluster both nodes are of this machine. Each worker writes its losses, what it sent and where
it began to FOLDER. The second worker fails once, after a checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

STEPS = 6
VARIABLES = {
    "PYTHONWARNINGS": "ignore",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "150",
    "RAY_worker_niceness": "0",  # 15 by default: workers would wait for every other test
}
"""Environment of Ray's processes."""


def make_model() -> Any:
    """The model of each worker before it is wrapped."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import laconic

    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape))
    laconic.compress_activations(model)
    return model


def train_step(model: Any, optimizer: Any, step: int, rank: int) -> float:
    """Train on the batch of a step and a rank; the loss."""
    import torch

    generator = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(0, 256, (4, 32), generator=generator)
    loss = model(input_ids=ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.item())


def train(config: dict[str, Any]) -> None:
    """What a worker does."""
    import ray.train
    import ray.train.torch
    import ray.util
    import torch
    import torch.distributed as dist

    from laconic.collectives import audit

    rank = ray.train.get_context().get_world_rank()
    model = ray.train.torch.prepare_model(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first, folder = 0, Path(config["folder"])
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as saved:
            state = torch.load(Path(saved) / "state.pt")
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    losses = []
    for step in range(first, STEPS):
        if step == 4 and checkpoint is None and rank == 1:
            raise RuntimeError("this worker fails")
        losses.append(train_step(model, optimizer, step, rank))
        if step == 2:
            with tempfile.TemporaryDirectory() as saved:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                torch.save(state, Path(saved) / "state.pt")
                kept = ray.train.Checkpoint.from_directory(saved) if rank == 0 else None
                ray.train.report({"loss": losses[-1]}, checkpoint=kept)
    sent = audit.snapshot()
    found = {
        "losses": losses,
        "first": first,
        "backend": dist.get_backend(),
        "wrapped": type(model).__name__,
        "node": ray.get_runtime_context().get_node_id(),
        "host": ray.util.get_node_ip_address(),
        "raw": sent.raw_nbytes,
        "sent": sent.sent_nbytes,
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    ray.train.report({"loss": losses[-1]})


def main(folder: str, address: str | None = None) -> None:
    """Train on a cluster."""
    import ray
    from ray.cluster_utils import Cluster
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from laconic.collectives import Lossless
    from laconic.integrations.ray import LaconicTorchConfig

    cluster = None
    if address is None:
        store = {"object_store_memory": 80 << 20, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **store})
        cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
        address = cluster.address
    ray.init(address=address, log_to_driver=False)
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": folder},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        torch_config=LaconicTorchConfig(codec=Lossless(), min_nbytes=1024),
        run_config=RunConfig(
            storage_path=str(Path(folder) / "ray"), name="run", failure_config=FailureConfig(max_failures=1)
        ),
    )
    result = trainer.fit()
    assert result.error is None, result.error
    ray.shutdown()
    if cluster is not None:
        cluster.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    main(*sys.argv[1:])
