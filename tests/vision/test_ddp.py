"""AFI-ResNets on two processes: lossless collectives change no bit, gradients in 8 bits a quarter of the bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.collectives import Lossless
from laconic.gradients import quantize_reduction
from laconic.train.distributed.traffic import WireCounter
from tests.activations.models import relative_error
from tests.moe.worlds import run_world
from tests.vision.reference import tiny

WORLD, STEPS = 2, 5
WIDTHS = [16, 32, 64]


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return {"pixel_values": torch.randn(8, 3, 24, 24, generator=generator), "labels": torch.arange(8) % 5}


def network(bits: int = 32) -> nn.Module:
    torch.manual_seed(0)
    model = tiny(hidden_sizes=WIDTHS).to(memory_format=torch.channels_last)
    if bits < 32:
        laconic.compress_activations(model, bits, example_inputs=batch())
    return model


def ddp(bits: int = 32) -> nn.Module:
    return DistributedDataParallel(network(bits))


def losses(model: nn.Module, reduce: Callable[[], object] = lambda: None, *, codes: bool = False) -> list[float]:
    optimizer = laconic.AdamW8bit if codes else torch.optim.AdamW
    update = optimizer(model.parameters(), lr=3e-3)
    found = []
    for _ in range(STEPS):
        loss = model(**batch()).loss
        loss.backward()
        reduce()
        update.step()
        update.zero_grad()
        found.append(loss.item())
    return found


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def same_on_all_ranks(model: nn.Module) -> bool:
    """Whether all ranks have the same parameters; buffers of batch norm are each rank's own."""
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    others = [torch.empty_like(mine) for _ in range(WORLD)]
    dist.all_gather(others, mine)
    return all(torch.equal(mine, other) for other in others)


def sent_nbytes(model: nn.Module) -> int:
    loss = model(**batch()).loss
    with WireCounter(WORLD) as wire:
        loss.backward()
    return wire.nbytes


def lossless_collectives_give_the_same_losses() -> None:
    for bits in (32, 4):
        plain, zipped = ddp(bits), ddp(bits)
        laconic.zip_collectives(zipped, codec=Lossless())
        expected = losses(plain)
        assert losses(zipped) == expected
        assert expected[-1] < 0.7 * expected[0]
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), zipped.parameters(), strict=True))


def a_reduction_in_8_bits_sends_a_quarter() -> None:
    plain, quantized = ddp(), ddp()
    quantize_reduction(quantized, min_nbytes=0)
    for model in (plain, quantized):
        model(**batch()).loss.backward()
    assert 0 < relative_error(gradients(quantized), gradients(plain)) < 0.02
    assert 3.5 < sent_nbytes(plain) / sent_nbytes(quantized) <= 128 * 4 / 132
    expected = losses(plain)
    assert losses(quantized) == pytest.approx(expected, abs=0.1 * expected[0])
    assert same_on_all_ranks(quantized)


def gradients_in_codes_train_compressed_activations() -> None:
    plain = ddp()
    expected = losses(plain)
    for bits in (32, 8, 4):
        model = network(bits)
        stored = laconic.compress_gradients(model, dist.group.WORLD)
        found = losses(model, stored.reduce, codes=True)
        assert found[0] == expected[0]  # a forward in bits is the exact one
        assert found[-1] < 0.7 * found[0]
        assert same_on_all_ranks(model)


SCENARIOS = (
    lossless_collectives_give_the_same_losses,
    a_reduction_in_8_bits_sends_a_quarter,
    gradients_in_codes_train_compressed_activations,
)


@pytest.mark.slow
def test_two_processes_train_with_few_bytes_on_the_wire(tmp_path: Path) -> None:
    run_world(SCENARIOS, WORLD, tmp_path)
