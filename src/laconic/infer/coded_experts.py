"""Experts of a worker whose matrices are held as codes, of which one expert at a time is decoded and multiplied.

Codes are those of laconic.formats, in blocks of 64 values with a bfloat16 scale: 8.25 bits of a value in int8, 4.25 in
nf4. Biases stay as they are. Beside the codes a worker needs room for one decoded expert, while it multiplies.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.func import functional_call

from laconic.errors import ConfigError, ModelError
from laconic.formats.blockwise import BlockFormat, BlockTensor
from laconic.infer.split import Split
from laconic.moe.experts.modules import Experts
from laconic.moe.huggingface.blocks import unknown_experts
from laconic.moe.huggingface.experts import FusedExperts
from laconic.options import EXPERT_BLOCK_SIZE, EXPERT_FORMATS, refused

__all__ = ["CodedExperts", "check_expert_format", "check_experts_reachable", "keep_experts"]


def check_expert_format(expert_format: str, experts: int | None) -> None:
    """Check what an engine is told, before its model is looked at.

    Args:
        expert_format: see Engine.
        experts: workers that are asked for; None is as many as the plan says.

    Raises:
        ConfigError: there is no such format, or there are no expert workers to hold it.
    """
    if expert_format not in EXPERT_FORMATS:
        raise ConfigError(refused("expert_format", expert_format, EXPERT_FORMATS))
    if expert_format != "exact" and experts == 0:
        raise ConfigError(
            f"expert_format is {expert_format!r} with experts = 0, but only expert workers hold codes; give at least"
            " one, or 'exact'"
        )


def check_experts_reachable(expert_format: str, split: Split, family: str, model: nn.Module) -> None:
    """Check that a model has experts which expert workers hold.

    Args:
        expert_format: see Engine.
        split: the workers by which the model can be served.
        family: its model_type.
        model: on any device, the meta device too.

    Raises:
        ConfigError: it has none.
    """
    if expert_format == "exact" or split.experts:
        return
    why = "; ".join(unknown_experts(model)[:1]) or "it is dense"
    raise ConfigError(
        f"expert_format is {expert_format!r}, but {family} has no experts that an expert worker could hold ({why});"
        " give 'exact'"
    )


def keep_experts(expert_format: str, name: str, layer: FusedExperts) -> Experts:
    """Return what an expert worker keeps of a layer's experts, the module `name` of the model."""
    if expert_format == "exact":
        return layer
    return CodedExperts(layer, BlockFormat(expert_format, EXPERT_BLOCK_SIZE), name)


class CodedExperts(Experts):
    """FusedExperts with codes in the place of matrices: outputs are those of the decoded matrices.

    Buffers are `<name>_codes` uint8 [E, rows, codes] and `<name>_scales` bfloat16 [E, rows, blocks] of each matrix, in
    the layout that the original has, and its biases.

    Args:
        layer: on any device, where codes will be; not held.
        format: of the codes.
        name: of the module, for messages.

    Attributes:
        squares: sums of the squares of all values, and of what coding moved them by.

    Raises:
        ModelError: a matrix holds NaN or infinity, which would be a block of NaN in codes.
    """

    def __init__(self, layer: FusedExperts, format: BlockFormat, name: str) -> None:
        super().__init__()
        self.num_experts = layer.num_experts
        self.format = format
        self.squares = (0.0, 0.0)
        self._matrices: dict[str, tuple[torch.Size, torch.dtype]] = {}
        alone: dict[str, nn.Parameter] = {}  # one expert, without memory: it computes with what it is lent
        for key, parameter in layer.named_parameters():
            values = parameter.detach()
            alone[key] = nn.Parameter(values[:1].to("meta"), requires_grad=False)
            if values.dim() < 3:
                self.register_buffer(key, values)
                continue
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
        self.__dict__["_alone"] = FusedExperts(layer.__dict__["_behaviour"], alone)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return outputs [q, M] of rows [q, M] sorted by expert.

        Args:
            rows: [q, M].
            counts: int64 [E].
        """
        alone: FusedExperts = self.__dict__["_alone"]
        out = torch.empty_like(rows)
        sizes = counts.tolist()
        for expert, (part, place) in enumerate(zip(rows.split(sizes), out.split(sizes), strict=True)):
            if len(part):
                weights = {key: self._weight(key, expert)[None] for key, _ in alone.named_parameters()}
                place.copy_(functional_call(alone, weights, (part, counts[expert : expert + 1])))
        return out

    def _weight(self, key: str, expert: int) -> Tensor:
        if key in self._matrices:
            return self._matrix(key, expert)
        return self.get_buffer(key)[expert]

    def _matrix(self, key: str, expert: int) -> Tensor:
        """Decode one expert's matrix."""
        shape, dtype = self._matrices[key]
        codes, scales = self.get_buffer(f"{key}_codes")[expert], self.get_buffer(f"{key}_scales")[expert]
        return BlockTensor(codes, scales, self.format, shape, dtype).dequantize()

    def _add_squares(self, exact: Tensor, moved: Tensor) -> None:
        of_exact, of_moved = self.squares
        self.squares = of_exact + float(exact.square().sum()), of_moved + float(moved.square().sum())
