"""Experts of a worker whose matrices are held as codes.

Codes are those of laconic.formats, in blocks of 64 values with a bfloat16 scale: 8.25 bits of a value in int8, 4.25 in
nf4. Biases stay as they are. A few rows are multiplied from the codes themselves. For more rows one matrix at a time is
decoded, for which a worker needs room; tiles that stay in a core's cache were slower than all of it at once.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from laconic.errors import ModelError
from laconic.formats.blockwise import BlockFormat, BlockTensor
from laconic.moe.experts.modules import Experts
from laconic.moe.huggingface.experts import FusedExperts
from laconic.ops import linear_blockwise
from laconic.options import EXPERT_BLOCK_SIZE, EXPERT_ROWS_FROM_CODES


def keep_experts(expert_format: str, name: str, layer: FusedExperts) -> Experts:
    """Return what an expert worker keeps of a layer's experts, the module `name` of the model."""
    if expert_format == "exact":
        return layer
    return CodedExperts(layer, BlockFormat(expert_format, EXPERT_BLOCK_SIZE), name)


class CodedExperts(Experts):
    """FusedExperts with codes in the place of matrices: outputs are those of the decoded matrices.

    In 16 bits they differ by roundings: decoded matrices are rounded to the dtype, a few rows are multiplied in fp32.

    Buffers are `<name>_codes` uint8 [E, outputs, codes] and `<name>_scales` bfloat16 [E, outputs, blocks] of each
    matrix, whatever layout the original has, and its biases. `squares` are sums of the squares of all values, and of
    what coding moved them by. A matrix of the module `name` that holds NaN or infinity, which would be a block of NaN
    in codes, is a ModelError.
    """

    def __init__(self, layer: FusedExperts, format: BlockFormat, name: str) -> None:
        super().__init__()
        self.num_experts = layer.num_experts
        self.format = format
        self.squares = (0.0, 0.0)
        kind = self.__dict__["_behaviour"] = layer.__dict__["_behaviour"]  # flags and gating, without parameters
        self._matrices: dict[str, tuple[torch.Size, torch.dtype]] = {}
        for key, parameter in layer.named_parameters():
            values = parameter.detach()
            if values.dim() < 3:
                self.register_buffer(key, values)
                continue
            values = values.mT if kind.is_transposed else values
            packed = format.quantize(values)
            self._matrices[key] = values.shape[1:], values.dtype
            self.register_buffer(f"{key}_codes", packed.codes)
            self.register_buffer(f"{key}_scales", packed.scales)
            for expert in range(self.num_experts):
                exact = values[expert].float()
                self._add_squares(exact, self._matrix(key, expert).float() - exact)
            if not math.isfinite(sum(self.squares)):
                raise ModelError(
                    f"{name}.{key} holds NaN or infinity, or values that float32 cannot square, so it has no codes in"
                    f" {format.code}; mend the checkpoint, or serve it with expert_format='exact'"
                )

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return outputs [q, M] of rows [q, M] sorted by expert; `counts`, int64 [E], says how many each has."""
        kind: Any = self.__dict__["_behaviour"]
        activation, first = (kind._apply_gate, "gate_up_proj") if kind.has_gate else (kind.act_fn, "up_proj")
        out = torch.empty_like(rows)
        sizes = counts.tolist()
        for expert, (part, place) in enumerate(zip(rows.split(sizes), out.split(sizes), strict=True)):
            if len(part):
                place.copy_(self._product(activation(self._product(part, first, expert)), "down_proj", expert))
        return out

    def _product(self, rows: Tensor, key: str, expert: int) -> Tensor:
        kind: Any = self.__dict__["_behaviour"]
        if len(rows) <= EXPERT_ROWS_FROM_CODES[self.format.code]:
            codes, scales = self._packed(key, expert)
            out = linear_blockwise(rows, codes, scales, code=self.format.code, block_size=self.format.block_size)
        else:
            out = rows @ self._matrix(key, expert).T
        return out + self.get_buffer(f"{key}_bias")[expert].to(out.dtype) if kind.has_bias else out

    def _matrix(self, key: str, expert: int) -> Tensor:
        shape, dtype = self._matrices[key]
        return BlockTensor(*self._packed(key, expert), self.format, shape, dtype).dequantize()

    def _packed(self, key: str, expert: int) -> tuple[Tensor, Tensor]:
        return self.get_buffer(f"{key}_codes")[expert], self.get_buffer(f"{key}_scales")[expert]

    def _add_squares(self, exact: Tensor, moved: Tensor) -> None:
        of_exact, of_moved = self.squares
        self.squares = of_exact + float(exact.square().sum()), of_moved + float(moved.square().sum())
