"""Your own codec: gradients travel as bf16 through laconic's collectives. About 10 seconds.

    pip install 'laconic[train]'
    torchrun --nproc-per-node 2 examples/own_codec.py

A codec turns values into bytes and back; order, chunks, errors and the audit are the collectives'. Prints the error of
a sum and the bytes that were sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from common import need_torchrun
from torch import Tensor

from laconic.collectives import Raw, all_reduce, audit
from laconic.errors import FormatError


@dataclass(frozen=True)
class Bfloat16:
    """Values as bf16, two bytes each."""

    name: str = "bfloat16"
    lossless: bool = False

    def max_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return 2 * numel

    def capacity_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return 2 * numel  # known beforehand, so no lengths are exchanged

    def encode(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).view(torch.uint8)

    def cut(self, buffer: Tensor) -> Tensor:
        return buffer

    def fits(self, message: Tensor) -> bool:
        return True

    @property
    def fallback(self) -> Raw:
        return Raw()

    def decode_into(self, message: Tensor, out: Tensor) -> None:
        out.copy_(self._values(message, out.numel()))

    def decode_add(self, message: Tensor, total: Tensor, dtype: torch.dtype) -> None:
        total.add_(self._values(message, total.numel()))

    def _values(self, message: Tensor, numel: int) -> Tensor:
        if message.numel() != 2 * numel:
            raise FormatError(f"message has {message.numel()} bytes, but {numel} values take {2 * numel}")
        return message.view(torch.bfloat16)


def main() -> None:
    """Add a gradient on two ranks."""
    need_torchrun(__file__)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    gradient = torch.randn(1 << 18)
    exact = gradient.clone()
    dist.all_reduce(exact)
    all_reduce(gradient, codec=Bfloat16())
    if dist.get_rank() == 0:
        print(f"error of the sum: {float((gradient - exact).norm() / exact.norm()):.2%}")
        print(audit.snapshot().table())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
