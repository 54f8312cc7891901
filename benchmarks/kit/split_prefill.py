"""Prefill by one attention worker: the parts of laconic.infer's worker, without the processes of its engine.

`Prefill` runs prompts through a model whose experts are behind a link, one prompt in each micro-batch, and says how
long the forwards took. `traced` runs the same code with the experts in this process, and times every task alone.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.kit.local_link import LocalLink
from laconic.infer.attention_worker import put_remote_experts
from laconic.infer.expert_share import ExpertShare
from laconic.infer.links import ExpertLink
from laconic.infer.messages import Rows
from laconic.infer.remote_experts import RemoteExperts, RemoteLayer
from laconic.infer.sampling import Sampling
from laconic.infer.transformers_seam import (
    CacheLimits,
    Finished,
    Requests,
    find_experts,
    load_attention_model,
    load_experts,
    read_config,
)
from laconic.schedule.inference import InferencePlan

_VOCABULARY = 512
_PAGES_FOR_THE_ANSWER = 2
_PASS_SECONDS = 120.0


@dataclass(frozen=True)
class Model:
    """A random mixture-of-experts model, and the prompts that it reads.

    Attributes:
        family: "qwen2_moe", which has shared experts, or "qwen3_moe", which has none.
        width: M, of the hidden states.
        expert_width: intermediate size of a routed expert.
        shared_width: intermediate size of the shared expert; qwen3_moe ignores it.
        num_experts, top_k: per layer, and choices of a row.
        num_layers: T.
        prompt_tokens: length of a prompt, of which each micro-batch has one.
    """

    family: str
    width: int
    expert_width: int
    shared_width: int
    num_experts: int
    top_k: int
    num_layers: int
    prompt_tokens: int

    def __str__(self) -> str:
        shared = f", shared {self.shared_width}" if self.family == "qwen2_moe" else ""
        return (
            f"{self.family}, M {self.width}, {self.num_experts} experts of {self.expert_width}, top {self.top_k}"
            f"{shared}, {self.num_layers} layers, prompts of {self.prompt_tokens}"
        )


def save_model(model: Model, folder: Path) -> None:
    """Write the model with random weights, float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    heads = model.width // 64 or 1
    values: dict[str, Any] = {
        "vocab_size": _VOCABULARY,
        "hidden_size": model.width,
        "intermediate_size": model.width,
        "moe_intermediate_size": model.expert_width,
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.top_k,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 2 * model.prompt_tokens,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    if model.family == "qwen2_moe":
        values["shared_expert_intermediate_size"] = model.shared_width
    else:
        values["head_dim"] = model.width // heads
    torch.manual_seed(0)
    config = AutoConfig.for_model(model.family, **values)
    written = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    # Tokens that stay apart through the layers spread over the experts as those of a trained model do.
    torch.nn.init.normal_(written.get_input_embeddings().weight)
    written.save_pretrained(folder)


def load_share(folder: Path) -> ExpertShare:
    """All experts of the model in `folder`: those of a single expert worker."""
    return ExpertShare(load_experts(folder, torch.float32, range))


class _ClockedExperts(RemoteExperts):
    """Notes when the forwards of a pass begin and end."""

    def __init__(self, link: ExpertLink | LocalLink, num_experts: Sequence[int], plan: InferencePlan) -> None:
        super().__init__([link], [[range(count)] for count in num_experts], plan)
        self.begun: list[float] = []
        self.ended: list[float] = []

    def begin_forward(self, num_rows: int) -> None:
        super().begin_forward(num_rows)
        self.begun.append(time.perf_counter())

    def end_forward(self) -> None:
        self.ended.append(time.perf_counter())
        super().end_forward()


class Prefill:
    """Runs prompts through the attention side of a model, by a plan.

    Args:
        folder: of the model.
        prompt_tokens: length of each prompt.
        plan: whose micro-batches have a prompt each.
        link: to the only expert worker.
    """

    def __init__(
        self,
        folder: Path,
        prompt_tokens: int,
        plan: InferencePlan,
        link: ExpertLink | LocalLink,
        experts_class: type[_ClockedExperts] = _ClockedExperts,
    ) -> None:
        _, blocks = find_experts(read_config(folder))
        self.experts = experts_class(link, [block.num_experts for block in blocks.values()], plan)
        self.plan, self.prompt_tokens = plan, prompt_tokens
        model: Any = load_attention_model(folder, torch.float32, lambda layer, _: RemoteLayer(self.experts, layer))
        self.moved, left = put_remote_experts(model, self.experts)
        if left:
            raise RuntimeError(f"shared experts of {left} stay where the model runs them, so no plan can move them")
        limits = CacheLimits(prompt_tokens + _PAGES_FOR_THE_ANSWER * CacheLimits.PAGE_TOKENS, prompt_tokens)
        self._ended: queue.SimpleQueue[Finished] = queue.SimpleQueue()
        self._requests = [Requests(model, limits, self._ended.put) for _ in range(plan.num_micro_batches)]

    def run(self, seed: int) -> tuple[float, list[int]]:
        """Read random prompts; the same for a seed, and new ones for a new seed (the cache knows old ones).

        Returns:
            Seconds from the beginning of the first forward to the end of the last, and the token after each prompt.
        """
        self.experts.begun.clear()
        self.experts.ended.clear()
        generator = torch.Generator().manual_seed(seed)
        for number, requests in enumerate(self._requests):
            prompt = torch.randint(_VOCABULARY, (self.prompt_tokens,), generator=generator).tolist()
            requests.add(f"{seed}.{number}", prompt, Sampling(max_new_tokens=1))
        tokens: dict[str, list[int]] = {}
        for _ in self._requests:
            finished = self._ended.get(timeout=_PASS_SECONDS)
            if finished.error is not None:
                raise RuntimeError(f"a prompt failed: {finished.error}")
            tokens[finished.name] = finished.tokens
        if len(self.experts.begun) != len(self._requests):
            raise RuntimeError(f"{len(self._requests)} prompts took {len(self.experts.begun)} forwards, not one each")
        seconds = max(self.experts.ended) - min(self.experts.begun)
        return seconds, [tokens[f"{seed}.{number}"][0] for number in range(len(self._requests))]

    def close(self) -> None:
        """End its threads."""
        for requests in self._requests:
            requests.stop()


# --- every task alone ---


@dataclass(frozen=True)
class LayerTrace:
    """Seconds of one micro-batch's tasks in one layer, and bytes of its messages.

    Attributes:
        attention: from the sums of the layer before to the rows ready to leave: addition of slices, attention, norms,
            gate, packing.
        shared: shared experts; 0 without.
        experts: of each slice: unpacking, the experts, packing of the sums.
        sent, received: bytes of each slice's rows and sums; 0 of a slice without rows, which does not travel.
    """

    attention: float
    shared: float
    experts: tuple[float, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]


@dataclass(frozen=True)
class Trace:
    """All layers of a pass, and the seconds after the last one (norm, output projection)."""

    layers: tuple[LayerTrace, ...]
    tail: float

    def to_values(self) -> dict[str, Any]:
        """What JSON can hold."""
        return asdict(self)

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Trace:
        """Read what `to_values` wrote."""
        layers = [
            LayerTrace(one["attention"], one["shared"], *(tuple(one[key]) for key in ("experts", "sent", "received")))
            for one in values["layers"]
        ]
        return cls(tuple(layers), values["tail"])


class _Stopwatch:
    """Processor seconds of the calling thread by task, of one pass at a time."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, int, int], float] = {}
        self.nbytes: dict[tuple[str, int, int], int] = {}
        self._since = 0.0

    def start(self) -> None:
        self.seconds.clear()
        self.nbytes.clear()
        self._since = time.thread_time()

    def lap(self, task: str, layer: int, number: int = 0) -> None:
        now = time.thread_time()
        place = (task, layer, number)
        self.seconds[place] = self.seconds.get(place, 0.0) + now - self._since
        self._since = time.thread_time()


class _TracedLink(LocalLink):
    """An expert worker in this thread."""

    def __init__(self, share: ExpertShare, watch: _Stopwatch) -> None:
        super().__init__(self._work)
        self._share, self.watch = share, watch

    def _work(self, rows: Rows) -> Tensor:
        self.watch.lap("attention", rows.layer)
        sums = self._share.run(rows)
        self.watch.lap("experts", rows.layer, rows.slice)
        nbytes = sum(tensor.nbytes for tensor in (rows.hidden, rows.experts, rows.weights))
        self.watch.nbytes["sent", rows.layer, rows.slice] = nbytes
        self.watch.nbytes["received", rows.layer, rows.slice] = sums.nbytes
        return sums


class _TracedExperts(_ClockedExperts):
    """Laps the stopwatch of its link between tasks. A layer's attention ends when its last slice is packed."""

    def __init__(self, link: Any, num_experts: Sequence[int], plan: InferencePlan) -> None:
        super().__init__(link, num_experts, plan)
        self._watch: _Stopwatch = link.watch
        self._num_layers = len(num_experts)

    def begin_forward(self, num_rows: int) -> None:
        super().begin_forward(num_rows)
        self._watch.start()

    def end_forward(self) -> None:
        self._watch.lap("attention", self._num_layers)
        super().end_forward()

    def run(
        self, layer: int, hidden: Tensor, experts: Tensor, weights: Tensor, shared: Callable[[], None] | None = None
    ) -> Tensor:
        """See RemoteExperts; the shared experts are timed."""

        def timed() -> None:
            assert shared is not None
            self._watch.lap("attention", layer)
            shared()
            self._watch.lap("shared", layer)

        return super().run(layer, hidden, experts, weights, None if shared is None else timed)


def traced(
    folder: Path, prompt_tokens: int, plans: Sequence[InferencePlan], share: ExpertShare, rounds: int
) -> list[Trace]:
    """Time the tasks of one micro-batch under each plan, in this process, where nothing else runs.

    Args:
        folder: of the model.
        prompt_tokens: length of the prompt.
        plans: of one micro-batch.
        share: all experts.
        rounds: that count; one before them does not.

    Returns:
        Medians over the rounds, for each plan. Seconds are those of the thread on its processor.
    """
    watches = [_Stopwatch() for _ in plans]
    prefills = [
        Prefill(folder, prompt_tokens, plan, _TracedLink(share, watch), _TracedExperts)
        for plan, watch in zip(plans, watches, strict=True)
    ]
    found: list[list[dict[tuple[str, int, int], float]]] = [[] for _ in plans]
    for number in range(-1, rounds):
        for prefill, watch, kept in zip(prefills, watches, found, strict=True):
            prefill.run(number + 1)
            if number >= 0:
                kept.append(dict(watch.seconds))
    for prefill in prefills:
        prefill.close()
    return [
        _trace(plan.num_slices, kept, watch.nbytes) for plan, kept, watch in zip(plans, found, watches, strict=True)
    ]


def _trace(
    num_slices: int,
    rounds: Sequence[dict[tuple[str, int, int], float]],
    nbytes: dict[tuple[str, int, int], int],
) -> Trace:
    seconds = {place: median(one.get(place, 0.0) for one in rounds) for place in rounds[0]}
    num_layers = max(layer for task, layer, _ in seconds if task == "experts") + 1
    slices = range(num_slices)
    layers = [
        LayerTrace(
            seconds["attention", layer, 0],
            seconds.get(("shared", layer, 0), 0.0),
            tuple(seconds.get(("experts", layer, number), 0.0) for number in slices),
            tuple(nbytes.get(("sent", layer, number), 0) for number in slices),
            tuple(nbytes.get(("received", layer, number), 0) for number in slices),
        )
        for layer in range(num_layers)
    ]
    return Trace(tuple(layers), seconds["attention", num_layers, 0])
