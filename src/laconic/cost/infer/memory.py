"""Bytes of workers in inference by kind, and the largest batch that fits.

An attention worker holds all but the routed experts, the key-value cache of its requests and the activations of its
micro-batches; an expert worker holds its experts and the rows of the micro-batches in flight. Workers that run the
whole model hold both. FinDEP bounds r1 * m_a by a capacity and gives no formula; this is ours:

- every micro-batch keeps its residual stream and the rows that it sent and will get;
- one micro-batch at a time has queries, keys, values, attention's output and the shared experts' hidden layer;
- logits are those of one token per request, in fp32; scores of attention are never whole.

All bytes grow linearly with the batch, so the largest one follows by division.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from laconic.cost.infer.costs import InferenceCostModel, Split
from laconic.cost.sizes import format_nbytes
from laconic.errors import PlanError
from laconic.schedule.slices import largest_slice

ATTENTION_WORKER, EXPERT_WORKER, WHOLE_WORKER = "attention worker", "expert worker", "worker"
WEIGHTS, CACHE, ACTIVATIONS = "weights", "key-value cache", "activations"
_LOGIT_NBYTES = 4


@dataclass(frozen=True)
class Limit:
    """The largest batch that fits, and what keeps it from being larger."""

    batch: int
    """m_a, requests of a micro-batch on an attention worker; 0: not even one fits."""
    worker: str
    """Role of the worker that is full."""
    kind: str
    """What most of its bytes are, with one more request."""
    nbytes: Mapping[str, Mapping[str, float]]
    """By role and kind, at this batch, or at 1 if none fits."""

    def __str__(self) -> str:
        of = self.nbytes[self.worker]
        text = ", ".join(f"{kind} {format_nbytes(nbytes)}" for kind, nbytes in of.items())
        return f"{self.worker}: {self.kind} ({text})"


def worker_nbytes(
    model: InferenceCostModel, split: Split, batch: int, num_micro_batches: int = 1, *, whole: bool = False
) -> dict[str, dict[str, float]]:
    """Predict the bytes of the fullest worker of each role, by kind.

    Args:
        model: shape and workload; its rates are not used.
        split: the workers. With `whole`, `experts` is over how many workers experts are spread (1: each has all), and
            `attention` how many there are.
        batch: m_a.
        num_micro_batches: r1.
        whole: every worker runs both roles.
    """
    model = model.unsplit if whole else model
    shape, work = model.shape, model.workload
    rows, requests = batch * work.new_tokens, batch * num_micro_batches
    experts = largest_slice(shape.num_experts, split.experts)
    sent = model.sent_nbytes(batch, Split(1, split.experts))
    width = shape.num_heads * (shape.key_dim + shape.value_dim) + shape.cache_values
    hidden = max(width, 2 * shape.shared_hidden, 2 * shape.dense_hidden)
    attention = {
        WEIGHTS: shape.attention_worker_parameters * shape.item_nbytes,
        CACHE: requests * work.cached_tokens * shape.num_layers * shape.cache_values * shape.item_nbytes,
        ACTIVATIONS: num_micro_batches * (rows * shape.row_nbytes + 2 * sent)
        + rows * hidden * shape.item_nbytes
        + batch * shape.vocab_size * _LOGIT_NBYTES,
    }
    everywhere = rows * model.hosts(split)
    received = 2 * num_micro_batches * sent * model.hosts(split) / split.experts
    pairs = everywhere * shape.top_k / split.experts
    routed = {
        WEIGHTS: shape.num_moe_layers * experts * shape.expert_nbytes,
        ACTIVATIONS: received + pairs * 2 * shape.expert_hidden * shape.item_nbytes,
    }
    if not whole:
        return {ATTENTION_WORKER: attention, EXPERT_WORKER: routed}
    if split.experts == 1:  # nothing travels: each worker computes its own rows
        routed[ACTIVATIONS] = rows * shape.top_k * 2 * shape.expert_hidden * shape.item_nbytes
        attention[ACTIVATIONS] -= 2 * num_micro_batches * sent
    return {WHOLE_WORKER: {kind: attention[kind] + routed.get(kind, 0) for kind in attention}}


def largest_batch(
    model: InferenceCostModel,
    split: Split,
    memory_nbytes: int,
    num_micro_batches: int = 1,
    *,
    whole: bool = False,
    expert_memory_nbytes: int | None = None,
) -> Limit:
    """Find the largest m_a whose bytes fit on every worker.

    Args:
        model, split, num_micro_batches, whole: as in `worker_nbytes`.
        memory_nbytes: of each worker.
        expert_memory_nbytes: of each expert worker; None: as much. With `whole` there are none.

    Raises:
        PlanError: the memory is not positive.
    """
    for name, nbytes in (("memory_nbytes", memory_nbytes), ("expert_memory_nbytes", expert_memory_nbytes)):
        if nbytes is not None and nbytes <= 0:
            raise PlanError(f"{name} is {nbytes}, but it must be positive")

    def at(batch: int) -> dict[str, dict[str, float]]:
        return worker_nbytes(model, split, batch, num_micro_batches, whole=whole)

    none, one = at(0), at(1)
    by_role = {}
    for role in none:
        base = sum(none[role].values())
        own = expert_memory_nbytes if role == EXPERT_WORKER and expert_memory_nbytes is not None else memory_nbytes
        by_role[role] = int((own - base) // (sum(one[role].values()) - base))
    full = min(by_role, key=lambda role: by_role[role])
    batch = max(0, by_role[full])
    more = at(batch + 1)[full]
    return Limit(batch, full, max(more, key=lambda kind: more[kind]), at(max(1, batch)))
