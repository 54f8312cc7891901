"""Two hosts that train one model under FSDP2 over a slow link: bytes, time and loss.

The ZeRO++ rows are a plain torch implementation of the published scheme (Wang et al., arXiv 2306.10209), because
DeepSpeed's kernels need CUDA: weights are gathered as int8 codes with a scale for each block (qwZ), gradients travel
once as int4 or int8 codes in an all-to-all and are summed in fp32 (qgZ). hpZ, which keeps a second shard inside each
node, has nothing to do on hosts of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.slow_links import as_rank, time_all

KINDS = (
    "FSDP2 over gloo",
    "laconic, zip_collectives",
    "laconic, quantize_reduction (8 bits)",
    "laconic, zip_collectives and quantize_reduction",
    "laconic, quantize_gathers and quantize_reduction (8 bits)",
    "ZeRO++ scheme in torch: weights int8, gradients int8",
    "ZeRO++ scheme in torch: weights int8, gradients int4",
)

_BLOCK = 2048
"""Values per scale."""


def quantized(x: Tensor, bits: int) -> Tensor:
    """x [rows, n] as bytes [rows, m]: symmetric codes and an fp32 scale for each block of a row.

    n is padded to whole blocks; two codes of 4 bits share a byte.
    """
    rows, length = x.shape
    blocks = nn.functional.pad(x.float(), (0, -length % _BLOCK)).view(rows, -1, _BLOCK)
    largest = 2 ** (bits - 1) - 1
    scales = blocks.abs().amax(-1, keepdim=True).div_(largest)
    codes = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
    codes = codes.view(rows, -1)
    if bits == 4:
        codes = (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)
    return torch.cat([codes.view(torch.uint8), scales.view(rows, -1).view(torch.uint8)], 1)


def dequantized(message: Tensor, length: int, bits: int) -> Tensor:
    """The values [rows, length] of `quantized`, fp32."""
    rows = message.shape[0]
    num_blocks = -(-length // _BLOCK)
    codes = message[:, : num_blocks * _BLOCK * bits // 8].contiguous().view(torch.int8)
    scales = message[:, num_blocks * _BLOCK * bits // 8 :].contiguous().view(torch.float32)
    if bits == 4:
        codes = torch.stack([(codes << 4) >> 4, codes >> 4], -1).view(rows, -1)
    values = codes.view(rows, num_blocks, _BLOCK).float() * scales[..., None]
    return values.view(rows, -1)[:, :length]


def zeropp(model: nn.Module, gradient_bits: int) -> None:
    """Give an FSDP2 model the collectives of the scheme."""
    from laconic.collectives.integrations.fsdp2 import AllGather, ReduceScatter

    class Allocating:
        def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

    class Gather(Allocating, AllGather):
        def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
            message = quantized(input_tensor[None], 8)
            messages = message.new_empty(group.size(), message.shape[1])
            dist.all_gather(list(messages.unsqueeze(1).unbind()), message, group=group)
            output_tensor.copy_(dequantized(messages, input_tensor.numel(), 8).reshape(-1))

    class Reduce(Allocating, ReduceScatter):
        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
        ) -> None:
            message = quantized(input_tensor.view(group.size(), -1), gradient_bits)
            messages = torch.empty_like(message)
            dist.all_to_all_single(messages, message, group=group)
            total = dequantized(messages, output_tensor.numel(), gradient_bits).sum(0)
            output_tensor.copy_(total / group.size() if op == dist.ReduceOp.AVG else total)

    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(Gather())
            module.set_custom_reduce_scatter(Reduce())
            module.set_force_sum_reduction_for_comms(True)


# --- what each rank does ---


class _Training:
    def __init__(self, kind: str, task: dict[str, Any], seed: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        import laconic
        from benchmarks.contenders.text import LENGTH, Run, corpus, llama, rate_at
        from benchmarks.contenders.training import LEARNING_RATE
        from laconic.collectives import Lossless
        from laconic.gradients import quantize_reduction
        from laconic.train.data.corpus import TokenDataset
        from laconic.train.data.sampler import global_indices

        run = Run(**task["run"])
        model: Any = llama(run.hidden, run.layers, corpus().vocab_size, seed)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if "zip_collectives" in kind:
            laconic.zip_collectives(model, codec=Lossless())
        if "quantize_gathers" in kind:
            laconic.quantize_gathers(model)
        if "quantize_reduction" in kind:
            quantize_reduction(model)
        if "ZeRO++" in kind:
            zeropp(model, 4 if "int4" in kind else 8)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: rate_at(step, task["steps"]))
        self.data = TokenDataset(corpus().train, LENGTH)
        self._indices, self._size, self._seed = global_indices, run.batch_size, seed
        self.losses: list[float] = []
        self._number = 0

    def step(self) -> None:
        """Forward, backward, update on this rank's half of the batch."""
        indices = self._indices(self._number, self._size, 1, 0, dist.get_rank(), dist.get_world_size())
        ids = self.data.drawn(self._seed, indices)
        self._number += 1
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.losses.append(loss.item())


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """What one rank measures: kinds take turns, step after step, seed after seed."""
    from benchmarks.contenders.text import held_out_loss

    kinds, steps = task["kinds"], task["steps"]
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    nbytes: dict[str, float] = {}
    losses: dict[str, list[float]] = {kind: [] for kind in kinds}
    for seed in range(task["seeds"]):
        runs = {kind: _Training(kind, task, seed) for kind in kinds}
        timed = time_all({kind: run.step for kind, run in runs.items()}, rounds=steps - 1)
        for kind, run in runs.items():
            seconds[kind] += timed[kind].seconds.samples
            nbytes[kind] = timed[kind].payload_nbytes
            losses[kind].append(held_out_loss(run.model))
        num_parameters = runs[kinds[0]].num_parameters
        del runs
    return {"seconds": seconds, "nbytes": nbytes, "losses": losses, "num_parameters": num_parameters}


if __name__ == "__main__":
    as_rank(measure)
