"""The experts that a run with expert parallelism has, in a model that is traced: one process's, with balanced rows.

`laconic.moe.huggingface.parallelize` makes the layers, as in the run. Only what sends is replaced: every process sends
every other as many rows, so a process's numbers of rows are known without values, and nothing is sent.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.errors import ModelError
from laconic.moe.dispatch.chunking import Chunk, SlicedRows
from laconic.moe.dispatch.flat import FlatDispatcher, RowsPlan
from laconic.moe.huggingface import parallelize
from laconic.moe.huggingface.apart import ApartLayer
from laconic.moe.huggingface.apply import check_layout
from laconic.moe.huggingface.blocks import place_in_block
from laconic.moe.huggingface.gate import GivenRouting, RoutedRows, WithIdentities
from laconic.moe.permute import Order, SortedOrder
from laconic.moe.routing import Routing


def spread_evenly(model: nn.Module, expert_parallel: int, device: str) -> None:
    """Replace the experts of a model on the meta device by the part that one of so many processes has.

    Args:
        device: "cuda" or "cpu", by which weighted sums of rows are made.

    Raises:
        ModelError: the model has no experts that can be spread.
        ConfigError: so many processes cannot share them.
    """
    for name, module in model.named_modules():
        check_layout(name, module, ep=expert_parallel)
    order = SortedOrder() if device == "cpu" else _MultipliedSums()
    try:
        done = parallelize(
            model, dispatcher=lambda _: _EvenDispatcher(expert_parallel), order=order, check_logits=False
        )
    except ModelError as error:
        raise ModelError(f"expert_parallel is {expert_parallel}, but {error}") from None
    if apart := [name for name, layer in done.layers.items() if isinstance(layer, ApartLayer)]:
        raise ModelError(
            f"expert_parallel is {expert_parallel}, but the experts of {apart[0]} are called apart, which is predicted"
            " for one process only; leave it out, and measure over processes"
        )
    for name, layer in done.layers.items():
        experts = layer.experts
        experts.num_experts = -(-experts.num_global_experts // expert_parallel)
        for key, whole in [*experts.named_parameters()]:
            here = whole.detach()[: -(-len(whole) // expert_parallel)].clone()
            experts.register_parameter(key, nn.Parameter(here, whole.requires_grad))
        if isinstance(layer.gate, RoutedRows):
            block: Any = model.get_submodule(place_in_block(name)[0])
            layer.gate = _EvenRows(layer.gate.num_experts, block.top_k)
        if isinstance(layer.gate, WithIdentities):
            layer.gate = _EvenShare(layer.gate.num_experts, experts.num_identities)


class _Ranks:
    """Stands for the process group of an EP group in which nothing is sent, at its first process."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks

    def size(self) -> int:
        return self._num_ranks

    def rank(self) -> int:
        return 0


class _EvenDispatcher(FlatDispatcher):
    """Moves rows as a FlatDispatcher does, but between processes that all send each other as many."""

    def __init__(self, num_ranks: int) -> None:
        group: Any = _Ranks(num_ranks)
        super().__init__(group)

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        return ()

    def plan(self, routing: Routing, order: Order, num_slices: int = 1) -> RowsPlan:
        counts, num_ranks = routing.counts(), self.num_places
        sent = [len(part) for part in routing.tokens.tensor_split(num_ranks)]
        index = torch.arange(len(routing), device=counts.device)
        chunk = Chunk(None, sent, sent, sent, index, torch.empty_like(index), [len(routing)], [sent] * num_ranks)
        here = -(-routing.num_experts // num_ranks)
        arriving, table = (counts.new_zeros(num_ranks, places, 1) for places in (here, num_ranks))
        rows = SlicedRows(counts[:, None], arriving, table, 0)
        rows._chunks[1] = [chunk]
        return RowsPlan(self, rows, routing, order)


class _EvenRows(GivenRouting):
    """In the place of RoutedRows: `top_k` rows of each token go to their experts, whatever their values."""

    def __init__(self, num_experts: int, top_k: int) -> None:
        super().__init__(num_experts, check_weights=False)
        self.top_k = top_k

    def of_call(self, x: Tensor, /, *_: Tensor) -> tuple[Tensor, Routing]:
        assert self.top_k is not None
        num_tokens = max(1, len(x) // self.num_experts)
        tokens = torch.arange(num_tokens * self.top_k, device=x.device)
        return x, Routing(tokens, tokens // num_tokens, x.new_ones(len(tokens)), len(x), self.num_experts)


class _EvenShare(WithIdentities):
    """In the place of WithIdentities: identities get their share of the choices, whatever these are."""

    def __init__(self, num_experts: int, num_identities: int) -> None:
        super().__init__(num_experts, check_weights=False)
        self.num_identities = num_identities

    def routing(self, x: Tensor, indices: Tensor, weights: Tensor) -> Routing:
        num_tokens, weights = indices[..., 0].numel(), weights.flatten()
        num_rows = len(weights) * self.num_experts // (self.num_experts + self.num_identities)
        rows = torch.arange(num_rows, device=x.device)
        tokens = rows * num_tokens // max(1, num_rows)
        return Routing(tokens, rows % self.num_experts, weights[:num_rows], num_tokens, self.num_experts)


class _MultipliedSums(SortedOrder):
    """Sums rows as on a GPU, wherever it runs."""

    combine = SortedOrder.multiplied
