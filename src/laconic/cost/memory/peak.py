"""Peak points of a rank: the moments at which its memory can be largest, and the workspace alive at each.

The peak occurs while a chunk computes and as many micro-batches are in flight as the schedule ever has. The candidates
are the end of its forward (the last layer's tensors are there, the loss's not yet), the loss, the start of its backward
(the loss's tensors are gone, the last layer's are rebuilt) and, where gradients start from nothing, its end. The
workspace at each was read off torch's memory profiler for Llama; tests/cost/test_peak.py compares the peak with the
profiler's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from laconic.cost.memory.job import Job, Stage
from laconic.cost.memory.persistent import persistent_nbytes
from laconic.cost.memory.saved_tensors import EXACT, Choice, layer_units
from laconic.cost.memory.traced import TracedModel

__all__ = ["PeakPoint", "peak_points"]

_LOSS_TILES = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Logits of a tile of the exact loss, as in laconic.activations."""

_TILES = {"cpu": (1 << 10, 1 << 20), "cuda": (1 << 12, 1 << 24)}
"""Tokens of a tile of the chunked loss, and the most logits it holds, as in laconic.activations."""


@dataclass(frozen=True)
class PeakPoint:
    """One candidate for the peak.

    Attributes:
        name: for tables.
        stage: the chunk that computes.
        loss_is_kept: whether tensors of head and loss of its current micro-batch are alive.
        only_first_layer: whether only the first layer of the current micro-batch is still alive.
        gradients_nbytes: gradients that are there.
        workspace_nbytes: workspace if every feed-forward block is exact and no layer runs again.
        packed_nbytes: added to it if a feed-forward block is not exact.
        again_nbytes: added to it if a layer runs again.
        casts: whether autocast's copies of weights are alive, which exact units include already.
        rebuilt_nbytes: added to `packed_nbytes` if a feed-forward block is offloaded or recomputed.
    """

    name: str
    stage: int
    loss_is_kept: bool
    only_first_layer: bool
    gradients_nbytes: int
    workspace_nbytes: int
    packed_nbytes: int
    again_nbytes: int
    casts: bool
    rebuilt_nbytes: int = 0

    def workspace(self, stages: Sequence[Stage], choices: Mapping[str, Choice], recomputed: Collection[int]) -> int:
        """Bytes of workspace for these choices."""
        total = self.workspace_nbytes
        units = [unit for stage in stages for unit in stage.units() if unit.layer not in recomputed]
        feed_forward = {choices.get(unit.name, EXACT) for unit in units if unit.is_feed_forward}
        if feed_forward - {EXACT}:
            total += self.packed_nbytes
        if any(choice.offload or choice.recompute for choice in feed_forward):
            total += self.rebuilt_nbytes
        if any(layer in recomputed for stage in stages for layer in stage.layers):
            total += self.again_nbytes
        if self.casts:
            total -= sum(unit.weight_nbytes for unit in units if choices.get(unit.name, EXACT) == EXACT)
        return max(0, total // stages[0].job.layout.tensor_parallel)


def peak_points(job: Job, stages: Sequence[Stage]) -> list[PeakPoint]:
    """The peak points of a rank that holds `stages`."""
    if isinstance(job.shape, TracedModel):
        return _traced_points(job, job.shape, stages)
    shape, precision, tokens = job.shape, job.precision, job.batch.tokens
    element, residual = precision.compute_nbytes, precision.residual_nbytes
    narrow, wide = tokens * shape.hidden_size, tokens * shape.active_width
    all_gradients = persistent_nbytes(job, list(stages))["gradients"]
    # Gradients of earlier micro-batches are there, and DDP and FSDP2 keep what they have allocated.
    start = 0 if job.layout.micro_batches == 1 and job.layout.data_parallel == 1 else all_gradients
    casts = 0
    if precision.autocast:
        casts = sum(len(stage.layers) for stage in stages) * shape.layer_linear_parameters * element
    one_of_each = {shape.window_of(layer): layer for layer in range(shape.num_layers)}.values()
    again = max(sum(u.exact_nbytes for u in layer_units(shape, layer, job.batch, precision)) for layer in one_of_each)

    # Forward: three of gate, up, their activation and product, since what is packed goes when the product is made; the
    # residual, a norm's output, what linears read of it.
    cast = precision.autocast
    forward = (3 * residual + (2 * element if cast else 0)) * narrow + casts
    packed_forward = 3 * wide * element
    # Backward: the gradients of gate, up and their product, which one operation makes from codes; without it also three
    # of gate, up, activation and product, rebuilt.
    from_codes = shape.traits.gated and not shape.traits.experts and not shape.exact_gelu
    gradients, rebuilt = 3 * wide * element, 3 * wide * element
    attention = 4 * tokens * (shape.query_size + shape.key_size) * element
    backward = max(2 * wide * element + 2 * narrow * residual, attention)
    packed_backward = gradients + (0 if from_codes else rebuilt) + narrow * residual - backward
    without_codes = rebuilt if from_codes else 0
    # The loss. Forward: logits as the model gives them, the fp32 copy of a tile; backward: their gradient, and those of
    # a tile's log-probabilities and fp32 logits.
    logits, copies_nbytes = tokens * shape.vocab_size, element + (4 if element != 4 else 0)
    head = shape.embedding_parameters * precision.parameter_nbytes
    tile = min(tokens, max(1, _LOSS_TILES[job.settings.device] // shape.vocab_size)) * shape.vocab_size
    loss = element * logits + (copies_nbytes - element) * tile
    loss += narrow * residual + shape.embedding_parameters * element if cast else 0
    loss_backward = element * logits + (4 if element == 4 else 8) * tile
    if job.settings.loss == "chunked":  # a few tiles, and in backward the gradients of hidden states and weight
        tile_tokens, most = _TILES[job.settings.device]
        rows = min(shape.vocab_size, most // min(tile_tokens, tokens))
        tile = min(tile_tokens, tokens) * rows
        loss = copies_nbytes * tile
        # One tile is still there while the next is made, if there is a next.
        previous = 4 if rows < shape.vocab_size or tile_tokens < tokens else 0
        loss_backward = (previous + copies_nbytes) * tile + 4 * narrow + 4 * rows * shape.hidden_size + head

    found = []
    for stage in stages:
        index = stage.index
        # The head's gradient is new; if it is tied, it waits for the embedding's before it joins the earlier ones.
        waits = shape.tied and stage.is_first and stage.is_last
        with_head = start + (head if stage.is_last else 0)
        with_head = with_head if waits else min(all_gradients, with_head)
        found.append(PeakPoint("forward", index, False, False, start, forward, packed_forward, again, cast))
        found.append(
            PeakPoint(
                "backward", index, False, False, with_head, backward, packed_backward, again, False, without_codes
            )
        )
        if stage.is_last:
            found.append(PeakPoint("loss", index, True, False, start, loss + casts, 0, 0, cast))
            found.append(PeakPoint("loss", index, True, False, start, loss_backward, 0, 0, False))
        if start == 0:
            found.append(
                PeakPoint(
                    "end", index, False, True, all_gradients, backward, packed_backward, again, False, without_codes
                )
            )
    return found


def _traced_points(job: Job, shape: TracedModel, stages: Sequence[Stage]) -> list[PeakPoint]:
    """The peak points of a traced model, whose workspace holds gradients of one tensor before they are added."""
    layers = [shape.layers[kind] for kind in sorted(set(shape.kinds))]
    again = max(sum(unit.exact_nbytes for unit in layer.units) for layer in layers)
    all_gradients = persistent_nbytes(job, list(stages))["gradients"]
    start = 0 if job.layout.micro_batches == 1 and job.layout.data_parallel == 1 else all_gradients
    head = shape.embedding_parameters * job.precision.parameter_nbytes
    found = []
    for stage in stages:
        with_head = min(all_gradients, start + (head if stage.is_last else 0))
        for name, gradients in (("forward", start), ("loss", start), ("backward", with_head), ("end", all_gradients)):
            if (name == "loss" and not stage.is_last) or (name == "end" and start != 0 and not stage.is_first):
                continue
            space = shape.workspace[name]
            more = again if name in ("forward", "backward", "end") else 0
            point = PeakPoint(
                name,
                stage.index,
                loss_is_kept=name == "loss",
                only_first_layer=name == "end",
                gradients_nbytes=gradients,
                workspace_nbytes=space.exact,
                packed_nbytes=space.packed,
                again_nbytes=more,
                casts=False,
            )
            found.append(point)
    return found
