"""Seconds of the tasks of disaggregated inference: attention, shared experts, links, routed experts (FinDEP 4.1).

Corrections and additions to the paper:

- a gated expert has three products in alpha and in beta; the paper's folded constants drop the factor;
- a batch of n rows activates E (1 - (1 - k/E)^n) of E experts, and each slice of the batch reads the weights of all
  that it activates. In decode, slices of tokens therefore read weights again, and slices of experts do not;
- an attention worker sends to, and an expert worker receives from, several others: the busier end decides;
- in decode, attention reads its key-value cache;
- messages take processor time at both ends, which is part of the attention and expert tasks beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import fsum, prod

from laconic.cost.infer.rates import InferenceRates
from laconic.cost.infer.shape import InferenceShape, check_whole
from laconic.errors import PlanError
from laconic.options import EXPERT_ROWS_FROM_CODES
from laconic.schedule.inference import BlockTimes, InferencePlan
from laconic.schedule.slices import largest_slice, slice_ranges


@dataclass(frozen=True)
class Split:
    """Numbers of workers of the two roles, ag and eg."""

    attention: int
    experts: int

    def __str__(self) -> str:
        return f"{self.attention}:{self.experts}"


@dataclass(frozen=True)
class Workload:
    """One pass of the model over the requests of a batch.

    Raises:
        PlanError: a number is not possible.
    """

    new_tokens: int
    """Of each request in this pass: the length of its prompt in prefill, 1 in decode."""
    context: int = 0
    """Tokens of each request that are already in its cache."""
    reserved: int | None = None
    """Tokens of each request for which the cache has room; None: context and new tokens."""
    requests: int | None = None
    """Requests that wait; a pass takes no more. None: as many as fit."""

    def __post_init__(self) -> None:
        for name, least in (("new_tokens", 1), ("context", 0)):
            check_whole(name, getattr(self, name), least)
        if self.reserved is not None:
            check_whole("reserved", self.reserved, self.context + self.new_tokens)
        if self.requests is not None:
            check_whole("requests", self.requests, 1)

    @property
    def cached_tokens(self) -> int:
        """Tokens of a request for which memory is needed."""
        return self.context + self.new_tokens if self.reserved is None else self.reserved

    @classmethod
    def prefill(cls, prompt: int, output: int = 1, requests: int | None = None) -> Workload:
        """Prompts of `prompt` tokens, whose answers will have `output` tokens."""
        return cls(prompt, 0, prompt + output, requests)

    @classmethod
    def decode(cls, prompt: int, output: int = 1, requests: int | None = None) -> Workload:
        """One token of each request, in the middle of its answer."""
        return cls(1, prompt + output // 2, prompt + max(1, output), requests)


def active_experts(num_experts: float, probability: float, rows: float) -> float:
    """Expect how many of `num_experts` experts have a row, if each row chooses each with this probability."""
    if probability >= 1:
        return num_experts if rows > 0 else 0.0
    return float(num_experts * (1 - (1 - probability) ** rows))


def reach(held: float, num_experts: int, top_k: int) -> float:
    """Probability that a row needs a worker with `held` of the experts: 1 - C(E - held, k) / C(E, k).

    `held` may be a fraction, the mean of groups that differ by one expert.
    """
    return 1 - prod(max(0.0, num_experts - held - i) / (num_experts - i) for i in range(top_k))


@dataclass(frozen=True)
class InferenceCostModel:
    """Seconds of a model's tasks at given rates.

    Raises:
        PlanError: `shares` has not one entry from 0 to 1 per expert, or they do not add up to top_k; or a request has
            more tokens than the model has positions.
    """

    shape: InferenceShape
    rates: InferenceRates
    workload: Workload
    shares: Sequence[float] = ()
    """Measured routing: the share of rows that choose each expert, adding up to top_k. Empty: uniform. Experts lie on
    workers in order, and the busiest worker decides."""
    deduplicated: bool = True
    """A row travels once to a worker that has several of its experts, and its results return summed. Otherwise once per
    expert, as in the paper."""
    _known: dict[object, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        shape, longest = self.shape, self.workload.cached_tokens
        if shape.positions is not None and longest > shape.positions:
            raise PlanError(
                f"a request has {longest} tokens, prompt and answer, but {shape.name or 'the model'} has"
                f" {shape.positions} positions; plan for shorter requests"
            )
        if not self.shares:
            return
        if len(self.shares) != shape.num_experts or not all(0 <= share <= 1 for share in self.shares):
            raise PlanError(
                f"shares has {len(self.shares)} entries, but it must have one from 0 to 1 for each of num_experts = "
                f"{shape.num_experts}"
            )
        if abs(fsum(self.shares) - shape.top_k) > 1e-6 * shape.top_k:
            raise PlanError(
                f"shares add up to {fsum(self.shares):g}, but each row has top_k = {shape.top_k} experts; divide the "
                "rows of each expert by the number of rows"
            )

    @property
    def unsplit(self) -> InferenceCostModel:
        """Costs of attention workers that run the whole model: experts are exact, whatever expert workers hold."""
        if self.shape.expert_format == "exact" and self.rates.experts is None:
            return self
        return replace(self, shape=replace(self.shape, expert_format="exact"), rates=self.rates.without_experts)

    def hosts(self, split: Split) -> int:
        """Number of attention workers that have requests: fewer than there are, if fewer wait."""
        return split.attention if self.workload.requests is None else min(split.attention, self.workload.requests)

    def attention_seconds(self, batch: float) -> float:
        """Predict attention with its projections and the router, for `batch` requests on one attention worker."""
        shape, rates, work = self.shape, self.rates, self.workload
        rows = batch * work.new_tokens
        projections = rates.product_seconds(
            rows, shape.attention_parameters + shape.router_parameters, shape.attention_products + 1, shape.item_nbytes
        )
        # Of the new tokens, each sees those before it: half of the square.
        pairs = rows * shape.keys_seen(work.context + work.new_tokens / 2)
        kernel = rates.attention.seconds(shape.num_heads * pairs * (shape.key_dim + shape.value_dim))
        cached = batch * shape.keys_seen(work.context) * shape.cache_values * shape.item_nbytes
        return projections + kernel + cached * rates.read_seconds_per_byte

    def shared_seconds(self, batch: float) -> float:
        """Predict the shared experts for `batch` requests on one attention worker; 0 without any."""
        shape = self.shape
        if not shape.shared_hidden:
            return 0.0
        rows = batch * self.workload.new_tokens
        return self.rates.product_seconds(rows, shape.shared_parameters, shape.shared_products, shape.item_nbytes)

    def experts_seconds(self, rows: float, workers: int, group: int = 0, num_groups: int = 1) -> float:
        """Predict routed experts on the busiest of `workers`.

        Args:
            rows: tokens of all attention workers, before they are copied to their k experts.
            group, num_groups: which part of each worker's experts computes.
        """
        key = (rows, workers, group if self.shares else 0, num_groups)
        if key not in self._known:
            self._known[key] = max(
                self._experts_on_one(rows, load, active)
                for load, active in self._held(rows, workers, group, num_groups)
            )
        return self._known[key]

    def _experts_on_one(self, rows: float, load: float, active: float) -> float:
        """Seconds of a worker on which each row has `load` experts, and `active` experts have rows."""
        shape, rates = self.shape, self.rates.of_experts
        calls = 3 * (1 if rates.grouped else active)
        arithmetic = rows * load * shape.expert_parameters * rates.gemm.seconds_per_byte
        read = active * shape.expert_nbytes
        if shape.expert_format != "exact":
            # What is decoded is written to a cache and read from there: taken for one read. Fewer rows are multiplied
            # from codes, each for its part of that time: so slices and smaller batches still do no less in all.
            decoded = min(active, rows * load / EXPERT_ROWS_FROM_CODES[shape.expert_format])
            read += decoded * shape.expert_parameters * shape.item_nbytes
        return calls * rates.gemm.alpha_seconds + arithmetic + read * rates.read_seconds_per_byte

    def _held(self, rows: float, workers: int, group: int, num_groups: int) -> list[tuple[float, float]]:
        """Expect, by worker and for its experts in this group, how many a row has and how many are active."""
        shape = self.shape
        if not self.shares:
            held, chance = largest_slice(shape.num_experts, workers) / num_groups, shape.top_k / shape.num_experts
            return [(held * chance, active_experts(held, chance, rows))]
        found = []
        for worker in slice_ranges(shape.num_experts, workers):
            own = [self.shares[worker[place]] for place in slice_ranges(len(worker), num_groups)[group]]
            found.append((fsum(own), fsum(active_experts(1, share, rows) for share in own)))
        return found

    def sent_nbytes(self, batch: float, split: Split, num_groups: int = 1) -> float:
        """Predict bytes at the busier end of a link, for one of `num_groups` groups of experts and uniform routing.

        Args:
            batch: requests on each attention worker; a fraction for a slice of tokens.
        """
        shape = self.shape
        if self.deduplicated:
            held = largest_slice(shape.num_experts, split.experts) / num_groups
            copies = min(shape.top_k / num_groups, split.experts * reach(held, shape.num_experts, shape.top_k))
        else:
            copies = shape.top_k / num_groups
        busier = max(1.0, self.hosts(split) / split.experts)
        return batch * self.workload.new_tokens * copies * busier * shape.row_nbytes

    def exchange_seconds(self, nbytes: float, split: Split) -> tuple[float, float]:
        """Predict processor seconds of one slice's messages and answers, on an attention and on an expert worker.

        Args:
            nbytes: of the slice at the busier end, as `sent_nbytes` returns.
            split: the workers; each attention worker with requests exchanges one message with every expert worker.
        """
        on_attention, on_experts = self.rates.exchange.attention, self.rates.of_experts.exchange
        hosts = self.hosts(split)
        busier = max(hosts, split.experts)
        attention, experts = nbytes * split.experts / busier, nbytes * hosts / busier
        return (
            split.experts * on_attention.alpha_seconds + on_attention.seconds_per_byte * attention,
            hosts * on_experts.alpha_seconds + on_experts.seconds_per_byte * experts,
        )

    def block_times(self, batch: float, split: Split, plan: InferencePlan) -> BlockTimes:
        """Predict one layer with experts.

        Args:
            batch: m_a, requests of one micro-batch on one attention worker.
        """
        slices, by_experts = plan.num_slices, plan.slicing == "experts"
        rows = batch * self.workload.new_tokens * self.hosts(split)
        if by_experts:
            experts = tuple(self.experts_seconds(rows, split.experts, group, slices) for group in range(slices))
            nbytes = self.sent_nbytes(batch, split, slices)
        else:
            experts = (self.experts_seconds(rows / slices, split.experts),) * slices
            nbytes = self.sent_nbytes(batch / slices, split)
        link = self.rates.link_of(split.attention, split.experts)
        # An attention worker sends and receives all slices; the graph has no tasks for that on its stream.
        on_attention, on_experts = self.exchange_seconds(nbytes, split)
        experts = tuple(seconds + on_experts for seconds in experts)
        return BlockTimes(
            self.attention_seconds(batch) + slices * on_attention,
            self.shared_seconds(batch),
            (link.dispatch.seconds(nbytes),) * slices,
            experts,
            (link.combine.seconds(nbytes),) * slices,
        )

    def dense_times(self, batch: float) -> BlockTimes:
        """Predict one layer with a feed-forward block in place of experts."""
        rows = batch * self.workload.new_tokens
        dense = self.rates.product_seconds(rows, self.shape.dense_parameters, 3, self.shape.item_nbytes)
        return BlockTimes(self.attention_seconds(batch), dense, (), (), ())

    def head_seconds(self, batch: float) -> float:
        """Predict the output projection, for one token of each request; 0 where the shape has no vocabulary."""
        shape = self.shape
        if not shape.vocab_size:
            return 0.0
        return self.rates.product_seconds(batch, shape.vocab_size * shape.hidden_size, 1, shape.item_nbytes)

    def layer_times(self, batch: float, split: Split, plan: InferencePlan) -> tuple[BlockTimes, ...]:
        """Predict all layers: dense ones, taken to be the first, those with experts, and the output projection."""
        shape = self.shape
        dense = (self.dense_times(batch),) * shape.num_dense_layers if shape.num_dense_layers else ()
        head = (BlockTimes(self.head_seconds(batch), 0.0, (), (), ()),) if shape.vocab_size else ()
        return (*dense, *(self.block_times(batch, split, plan),) * shape.num_moe_layers, *head)
