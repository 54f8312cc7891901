"""Checkpoints loaded by several processes, each its own experts and no others."""

from __future__ import annotations

import math
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import MixtralConfig, MixtralForCausalLM

from laconic.formats.shards import local_part
from laconic.moe.huggingface import from_pretrained, load_pretrained, parallelize
from laconic.moe.parallel.grid import Grid
from tests.activations.models import make_ids, make_model
from tests.distributed.test_moe_huggingface import assert_gradients_are_means, average_gradients, close, loss_on, whole
from tests.moe.worlds import run_world


class CountedFile:
    """safe_open's file; notes the bytes of every tensor that is taken out of it, by name."""

    taken: dict[str, int]

    def __init__(self, *args: Any, **options: Any) -> None:
        self._context = SAFE_OPEN(*args, **options)

    def __enter__(self) -> CountedFile:
        self._file = self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def get_slice(self, name: str) -> CountedSlice:
        return CountedSlice(name, self._file.get_slice(name))


class CountedSlice:
    def __init__(self, name: str, found: Any) -> None:
        self._name, self._slice = name, found

    def get_shape(self) -> list[int]:
        shape: list[int] = self._slice.get_shape()
        return shape

    def __getitem__(self, index: Any) -> torch.Tensor:
        part: torch.Tensor = self._slice[index]
        CountedFile.taken[self._name] = CountedFile.taken.get(self._name, 0) + part.nbytes
        return part


SAFE_OPEN = safetensors.safe_open


def each_reads_its_own(folder: Path, family: str, num_experts: int, *sizes: int, **options: Any) -> None:
    name = "num_experts" if family == "qwen3_moe" else "num_local_experts"
    reference = make_model(family, **{name: num_experts}).double()
    directory = folder / f"{family}-{num_experts}-{'-'.join(map(str, sizes))}"
    if dist.get_rank() == 0:
        reference.save_pretrained(directory, max_shard_size="100KB")
    dist.barrier()
    CountedFile.taken = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors, "safe_open", CountedFile)
        done = from_pretrained(directory, Grid(*sizes), **options)
    for (key, parameter), one in zip(done.model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(whole(parameter.detach()), one.detach()), key

    # 1. Each byte of an expert that was read is one that is kept here.
    held = sum(local_part(parameter).nbytes for parameter in done.experts())
    read = sum(nbytes for key, nbytes in CountedFile.taken.items() if ".experts." in key)
    assert read == held
    assert held < sum(one.nbytes for key, one in reference.named_parameters() if ".experts." in key)
    numbers = {int(number) for key in CountedFile.taken for number in re.findall(r"\.experts\.(\d+)\.", key)}
    most = math.ceil(num_experts / done.grid.layout.ep)
    assert numbers <= {*range(done.grid.ep.rank() * most, (done.grid.ep.rank() + 1) * most)}
    assert bool(numbers) == (family != "gpt_oss")  # whose files have stacks

    # 2. It computes, and trains under DDP, whose hooks are on the new parameters.
    ids = make_ids(4, 6, 1).chunk(done.grid.layout.dp)[done.grid.dp.rank()]
    model = DistributedDataParallel(done.model, process_group=done.grid.dp)  # in evaluation mode, with gradients
    reference.set_experts_implementation("eager")
    expected, got = loss_on(reference, ids), loss_on(model, ids)
    assert close(got, expected)
    expected.backward()
    got.backward()
    average_gradients(reference)
    assert_gradients_are_means(reference, done.model)


def shards_of_fsdp_are_read(folder: Path) -> None:
    reference = make_model("mixtral")
    if dist.get_rank() == 0:
        reference.save_pretrained(folder / "fsdp")
    dist.barrier()
    with torch.device("meta"):
        model = make_model("mixtral")
    done = parallelize(model, Grid(ep=2))
    done.fully_shard(model.model.layers)
    loaded = load_pretrained(model, folder / "fsdp")
    held = sum(local_part(parameter).nbytes for parameter in model.parameters())
    assert loaded.nbytes == held
    for (key, parameter), one in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert torch.equal(whole(parameter.detach()), one[1].detach()), key
    ids = make_ids(2, 6, 1)
    assert close(loss_on(model, ids), loss_on(reference, ids), 1e-5)


def memory(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{name}:")[1].split()[0]) << 10


def other_experts_never_come_to_memory(directory: Path) -> None:
    """Pages of files that are read count as memory of a process, too, as long as it has them mapped."""
    experts = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    from_pretrained(directory.parent / "small")  # imports what is needed
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
    before = memory("VmHWM")
    done = from_pretrained(directory, Grid())
    peak = memory("VmHWM") - before
    own = sum(local_part(parameter).nbytes for parameter in done.experts())
    assert own < experts / 1.9
    assert peak < 2 * own + (24 << 20) < own + experts, (peak, own, experts)


def big(folder: Path) -> Path:
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=2048,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=16,
        bos_token_id=None,
        eos_token_id=None,
    )
    MixtralForCausalLM(config).save_pretrained(folder / "big", max_shard_size="30MB")
    make_model("mixtral").save_pretrained(folder / "small")
    return folder / "big"


@pytest.mark.ci
def test_two_processes_read_their_own_experts(tmp_path: Path) -> None:
    scenarios = [
        partial(each_reads_its_own, tmp_path, "mixtral", 4, 1, 2, 1),
        partial(each_reads_its_own, tmp_path, "qwen3_moe", 5, 1, 2, 1),
        partial(each_reads_its_own, tmp_path, "gpt_oss", 4, 1, 2, 1),
        partial(each_reads_its_own, tmp_path, "mixtral", 4, 1, 1, 2),
        partial(each_reads_its_own, tmp_path, "qwen3_moe", 4, 2, 1, 2, dispatcher="sharded"),
        partial(each_reads_its_own, tmp_path, "mixtral", 4, 1, 2, 1, movable=True),
        partial(shards_of_fsdp_are_read, tmp_path),
    ]
    run_world(scenarios, 2, tmp_path)


@pytest.mark.ci
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak of memory is Linux's")
def test_other_experts_never_come_to_memory(tmp_path: Path) -> None:
    run_world([partial(other_experts_never_come_to_memory, big(tmp_path))], 2, tmp_path)


@pytest.mark.slow
def test_four_processes_read_their_own_experts(tmp_path: Path) -> None:
    scenarios = [
        partial(each_reads_its_own, tmp_path, "mixtral", 4, 2, 2, 2),
        partial(shards_of_fsdp_are_read, tmp_path),
    ]
    run_world(scenarios, 4, tmp_path)
