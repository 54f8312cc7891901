"""What an expert worker computes: its experts of each layer on rows from attention workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from laconic.infer.coded_experts import CodedExperts
from laconic.infer.messages import Rows
from laconic.moe.experts.modules import Experts
from laconic.moe.huggingface.experts import FusedExperts


class ExpertShare:
    """A range of the experts of every layer."""

    def __init__(self, layers: Sequence[Experts]) -> None:
        """Take each layer's local experts."""
        self._layers = list(layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters, or of codes and scales."""
        return sum(p.nbytes for layer in self._layers for p in _tensors(layer))

    @property
    def rounding(self) -> float | None:
        """By how much codes have moved the values of all matrices, root mean square over theirs; None without codes."""
        squares = [layer.squares for layer in self._layers if isinstance(layer, CodedExperts)]
        if not squares:
            return None
        exact, moved = (sum(each) for each in zip(*squares, strict=True))
        return (moved / exact) ** 0.5 if exact else 0.0

    @torch.no_grad()
    def run(self, rows: Rows) -> Tensor:
        """Return, for each row, the weighted sum of the outputs of its choices that are here; [m, M].

        Products are added in float32, in the order of the row's choices, as transformers' grouped experts do, and
        rounded once.

        Rows are in host memory, as the result is, and the experts on any device; or all of it is on one CUDA device. No
        host waits then, if experts are exact and without biases, and their products grouped: all choices are sorted,
        those that are elsewhere behind the others, and masked.
        """
        # 1. One row per choice that is here, sorted by expert.
        (num_rows, top_k), width = rows.experts.shape, rows.hidden.shape[1]
        layer = self._layers[rows.layer]
        device = next(_tensors(layer)).device
        choices, hidden = rows.experts.to(device).flatten().long(), rows.hidden.to(device)
        is_masked = rows.hidden.is_cuda and isinstance(layer, FusedExperts) and layer.is_grouped(hidden)
        if is_masked:
            nobody = layer.num_experts
            numbers, places = torch.where(choices < 0, nobody, choices).sort(stable=True)
            counts = torch.zeros(nobody + 1, dtype=torch.int64, device=device)
            counts = counts.index_add_(0, numbers, torch.ones_like(numbers))[:-1]
        else:
            here = (choices >= 0).nonzero().squeeze(1)
            numbers, order = choices[here].sort(stable=True)
            places = here[order]
            counts = torch.bincount(numbers, minlength=layer.num_experts)

        # 2. The experts, and each output back at its choice's place.
        outputs = layer(hidden[places // top_k], counts)
        sum_dtype = torch.promote_types(outputs.dtype, torch.float32)
        terms = torch.zeros(num_rows * top_k, width, dtype=sum_dtype, device=device)
        weights = rows.weights.to(device).flatten()
        weighted = outputs.to(sum_dtype) * weights[places, None].to(sum_dtype)
        if is_masked:
            weighted = weighted.masked_fill(numbers[:, None] == layer.num_experts, 0.0)
        terms[places] = weighted
        return terms.view(num_rows, top_k, width).sum(1).to(hidden.dtype).to(rows.hidden.device)


def _tensors(layer: nn.Module) -> Iterator[Tensor]:
    return chain(layer.parameters(), layer.buffers())
