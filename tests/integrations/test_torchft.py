"""torchft's Manager and DistributedDataParallel over two replica groups: activations are compressed, replicas alike."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import laconic
from laconic.errors import ModelError
from tests.distributed.processes import run_ranks
from tests.integrations.hand_loops import LENGTH, VOCABULARY, Classic

torchft = pytest.importorskip("torchft")
coordination = pytest.importorskip("torchft.coordination")


def _train(rank: int, lighthouse: str, folder: Path, compressed: bool) -> None:
    import warnings

    warnings.simplefilter("ignore")  # torchft's and torch's, about each other
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Classic()
    if compressed:
        laconic.compress_activations(model, bits=4)
    own = laconic.AdamW8bit if compressed else torch.optim.AdamW
    inner = own(model.parameters(), lr=3e-3)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=lambda state: (model.load_state_dict(state["model"]), inner.load_state_dict(state["optim"])),
        state_dict=lambda: {"model": model.state_dict(), "optim": inner.state_dict()},
        min_replica_size=2,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica-{rank}",
        hostname="127.0.0.1",
    )
    try:
        replica = torchft.DistributedDataParallel(manager, model)
        optimizer = torchft.Optimizer(manager, inner)
        with pytest.raises(ModelError, match="is a DistributedDataParallel"):
            laconic.compress_gradients(replica)
        losses = []
        for step in range(4):
            generator = torch.Generator().manual_seed(2 * step + rank)
            ids = torch.randint(VOCABULARY, (4, LENGTH + 1), generator=generator)
            optimizer.zero_grad()
            _, loss = replica(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert manager.num_participants() == 2
        torch.save({"losses": losses, "model": model.state_dict()}, folder / f"{compressed}-{rank}.pt")
    finally:
        manager.shutdown(wait=False)


@pytest.mark.slow
def test_two_replica_groups_train_as_without_compression_and_stay_alike(tmp_path: Path) -> None:
    for compressed in (False, True):
        lighthouse = coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=10_000)
        try:
            address = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
            run_ranks(_train, (address, tmp_path, compressed), 2)
        finally:
            lighthouse.shutdown()
    found = {
        (compressed, rank): torch.load(tmp_path / f"{compressed}-{rank}.pt", weights_only=True)
        for compressed in (False, True)
        for rank in (0, 1)
    }
    for rank in (0, 1):
        plain, ours = (found[compressed, rank]["losses"] for compressed in (False, True))
        assert ours[0] == plain[0]
        assert ours == pytest.approx(plain, rel=0.02)
    for name, expected in found[True, 0]["model"].items():
        assert torch.equal(found[True, 1]["model"][name], expected), name
