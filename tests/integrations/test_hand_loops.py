"""One line in programs of one file: nanoGPT's and nanochat's structure with their loops, and litgpt's GPT."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.activations import SavedTensorTracker
from tests.distributed.processes import free_port, rank_environment, run_ranks
from tests.integrations.hand_loops import LENGTH, VOCABULARY, Classic, Modern


def batch(seed: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = (torch.randint(VOCABULARY, (rows, 1), generator=generator) + 3 * torch.arange(LENGTH + 1)) % VOCABULARY
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def loss_of(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    out = model(ids, targets)
    loss: Tensor = out[1] if isinstance(out, tuple) else out
    return loss


def classic(bias: bool = False, rate: float = 0.0) -> Callable[[], nn.Module]:
    return lambda: Classic(bias, rate)


@pytest.mark.parametrize(
    ("make", "least"),
    [(classic(), 7.0), (classic(bias=True, rate=0.1), 7.0), (Modern, 6.0)],
    ids=["classic", "classic with biases and dropout", "modern"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_line_saves_bytes_and_leaves_the_loss_as_it_is(
    make: Callable[[], nn.Module], least: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = make().to(dtype)
    twin = copy.deepcopy(model)
    laconic.compress_activations(twin, bits=4)
    found = []
    for each in (model, twin):
        torch.manual_seed(1)
        with SavedTensorTracker(each) as tracker:
            loss = loss_of(each, *batch(0))
        loss.backward()
        gradients = torch.cat([p.grad.flatten().float() for p in each.parameters() if p.grad is not None])
        found.append((loss.detach(), tracker.nbytes, gradients))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] > (least if dtype is torch.float32 else least / 2) * found[1][1]
    assert F.cosine_similarity(found[0][2], found[1][2], dim=0) > 0.98


def train_classic(compressed: bool) -> tuple[list[float], Tensor]:
    """nanoGPT's loop: DDP reduces in the last micro-batch only, a scaler, clipping, decay of matrices."""
    torch.manual_seed(0)
    model = Classic()
    if compressed:
        laconic.compress_activations(model, bits=4)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu")
    parallel = dist.is_initialized()
    wrapped = DistributedDataParallel(model) if parallel else model
    losses = []
    for step in range(8):
        for micro in range(2):
            if parallel:
                wrapped.require_backward_grad_sync = micro == 1
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(wrapped, *batch(100 * step + 10 * micro + (dist.get_rank() if parallel else 0))) / 2
            scaler.scale(loss).backward()
        losses.append(loss.item() * 2)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    assert model(batch(0)[0])[0].shape == (4, 1, VOCABULARY)
    return losses, torch.cat([p.detach().flatten() for p in model.parameters()])


def train_modern(compressed: bool) -> tuple[list[float], Tensor]:
    """nanochat's loop: Muon for matrices of layers, AdamW for embedding and head."""
    torch.manual_seed(0)
    model = Modern()
    if compressed:
        laconic.compress_activations(model, bits=4)
    matrices = list(model.transformer["h"].parameters())
    others = [*model.transformer["wte"].parameters(), *model.lm_head.parameters()]
    optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=3e-3, betas=(0.8, 0.95))]
    losses = []
    for step in range(8):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, *batch(step))
        loss.backward()
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
    return losses, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("train", [train_classic, train_modern])
def test_a_loop_ends_where_it_ended(train: Callable[[bool], tuple[list[float], Tensor]]) -> None:
    expected, _ = train(False)
    losses, _ = train(True)
    assert losses[0] == expected[0]
    assert expected[-1] < expected[0] - 0.1
    assert losses == pytest.approx(expected, rel=0.02)


def _train_in_ddp(rank: int, port: int) -> None:
    os.environ.update(rank_environment(rank, 2, port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    expected, _ = train_classic(False)
    losses, weights = train_classic(True)
    assert losses[0] == expected[0]
    assert losses == pytest.approx(expected, rel=0.02)
    first = weights.clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, weights)
    dist.destroy_process_group()


@pytest.mark.ci
def test_ddp_that_reduces_in_the_last_micro_batch() -> None:
    run_ranks(_train_in_ddp, (free_port(),), 2)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("pythia-14m", {"intermediate_size": 256}),
        ("Llama-3-8B", {"intermediate_size": 128, "n_query_groups": 2, "head_size": 16}),
        ("Qwen3-0.6B", {"intermediate_size": 128, "n_query_groups": 2, "head_size": 16}),
    ],
)
def test_litgpt_pretrains(name: str, options: dict[str, int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its imports
        litgpt = pytest.importorskip("litgpt")
        from litgpt.utils import chunked_cross_entropy
    from lightning.fabric import Fabric

    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "block_size": LENGTH, "padded_vocab_size": VOCABULARY}
    found = []
    for compressed in (False, True):
        fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
        torch.manual_seed(0)
        model = litgpt.GPT(litgpt.Config.from_name(name, **sizes, **options))
        model.apply(model._init_weights)
        if compressed:
            laconic.compress_activations(model, bits=4)
        with SavedTensorTracker(model) as tracker:
            kept = model(batch(0)[0])
        del kept
        model = fabric.setup(model)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=3e-3))
        losses = []
        for step in range(6):
            ids, targets = batch(step)
            loss = chunked_cross_entropy(model(ids), targets, chunk_size=16)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append((losses, tracker.nbytes))
    (expected, before), (losses, after) = found
    assert losses[0] == expected[0]
    assert expected[-1] < expected[0]
    assert losses == pytest.approx(expected, rel=0.02)
    assert before > 6 * after
