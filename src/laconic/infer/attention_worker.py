"""An attention worker: everything of a model but its experts, and the requests of its micro-batches."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from laconic.infer.grammars import grammar_tokenizer
from laconic.infer.links import ExpertLink
from laconic.infer.load_check import expected_logits, made_up_trials, recheck, try_engine
from laconic.infer.payload import LinkTraffic
from laconic.infer.remote_experts import RemoteExperts, RemoteLayer
from laconic.infer.shared_experts import overlap_shared, shared_experts
from laconic.infer.tokenizer import load_text_tokenizer
from laconic.infer.transformers_seam import (
    CacheLimits,
    Finished,
    Requests,
    find_experts,
    fit_latent_attention,
    load_attention_model,
    read_config,
)

if TYPE_CHECKING:
    from laconic.infer.recorder import Recorder
    from laconic.infer.sampling import ChosenToken, Sampling
    from laconic.infer.settings import WorkerSettings

_RECHECK = "recheck"


class AttentionWorker:
    """Serves requests with a model whose experts are elsewhere, or with a whole one if there are no expert workers.

    The model computes on `device`; rows and sums travel from and to host memory, or over link = "group" the device's.
    `meet` connects to the expert workers once the model is loaded, and returns links in their order. The callbacks are
    called on any thread: `on_finished` for every request that ends, unless it was cancelled, `on_tokens` once per
    forward, with requests' names and tokens, `on_broken` with why the engine here can serve nobody any more.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        dtype: torch.dtype | None,
        device: torch.device,
        meet: Callable[[], Sequence[ExpertLink]],
        on_finished: Callable[[Finished], None],
        on_tokens: Callable[[list[tuple[str, ChosenToken]]], None],
        recorder: Recorder | None = None,
        on_broken: Callable[[str], None] = lambda why: None,
    ) -> None:
        split, plan, model_dir = settings.split, settings.plan, Path(settings.model_dir)
        self._links: list[ExpertLink] = []
        self._experts: RemoteExperts | None = None
        self.notes: list[str] = []
        if split.experts == 0:
            model: Any = load_attention_model(model_dir, dtype, None).to(device)
        else:
            _, blocks = find_experts(read_config(model_dir), dtype)
            held = [
                [settings.experts_of(layer, worker, block.num_experts) for worker in range(split.experts)]
                for layer, block in enumerate(blocks.values())
            ]
            travels_from = device if settings.link == "group" else torch.device("cpu")
            experts = self._experts = RemoteExperts(self._links, held, plan, recorder, travels_from)
            model = load_attention_model(model_dir, dtype, lambda layer, _: RemoteLayer(experts, layer)).to(device)
            _, left = put_remote_experts(model, experts)
            if left:
                self.notes.append(
                    f"shared experts of {', '.join(left[:3])}{' and others' * (len(left) > 3)} run where the model runs"
                    " them, not while rows are away"
                )
            self._links += meet()
        limits = CacheLimits(settings.cache_tokens, settings.batch_tokens)
        coarse = split.experts > 0 and settings.payload == "int8"
        expected = self._expected = expected_logits(
            model, made_up_trials(model.config, limits), coarse, settings.expert_format
        )
        fit_latent_attention(model)
        self._watch_blocks(model)
        self.nbytes = sum(p.nbytes for p in model.parameters())
        self._progress_times = [time.monotonic()] * plan.num_micro_batches
        self._micro_batch_of: dict[str, int] = {}
        self._requests: list[Requests] = []
        self._on_broken, self._is_loading = on_broken, True
        self._troubled: list[list[Callable[[], None]]] = [[] for _ in range(plan.num_micro_batches)]
        self._troubled_lock = threading.Lock()
        ended = self._end(on_finished)
        self._grammar_tokenizer = functools.cache(
            lambda: grammar_tokenizer(load_text_tokenizer(model_dir), self._requests[0].eos_token_ids)
        )
        try:
            for number in range(plan.num_micro_batches):
                trouble = functools.partial(self._recheck, number)
                self._requests.append(
                    Requests(model, limits, ended, on_tokens, trouble, self._break, self._grammar_tokenizer)
                )
            self.notes.append(try_engine(expected, self._requests, self._explain))
        except BaseException:
            for requests in self._requests:
                requests.stop()
            raise
        self._is_loading = False
        for link in self._links:
            link.forget_traffic()
        if self._experts is not None:
            self._experts.forget_loads()
        self.eos_token_ids = self._requests[0].eos_token_ids

    def add(self, name: str, prompt: list[int], sampling: Sampling) -> None:
        """Add a request to the micro-batch that has the fewest."""
        counts = [0] * len(self._requests)
        for number in list(self._micro_batch_of.values()):
            counts[number] += 1
        number = counts.index(min(counts))
        if counts[number] == 0:
            self._progress_times[number] = time.monotonic()
        self._micro_batch_of[name] = number
        self._requests[number].add(name, prompt, sampling)

    def cancel(self, name: str) -> None:
        """Forget a request, if it has not ended."""
        if (number := self._micro_batch_of.pop(name, None)) is not None:
            self._requests[number].cancel(name)

    @property
    def progress_time(self) -> float:
        """When a block of the model last ended, by time.monotonic: what tells progress from a hang."""
        return max(self._progress_times)

    @property
    def stalled_seconds(self) -> float:
        """For how long no block has ended of the micro-batch that has waited longest, of those that have requests."""
        busy = set(list(self._micro_batch_of.values()))
        now = time.monotonic()
        return max((now - self._progress_times[number] for number in busy), default=0.0)

    @property
    def expert_loads(self) -> list[list[int]]:
        """Rows that each expert of each layer was chosen for; none where models are whole."""
        return [] if self._experts is None else self._experts.loads

    def traffic(self) -> tuple[LinkTraffic, LinkTraffic]:
        """Return what has passed to all expert workers (a2e) and from them (e2a)."""
        a2e, e2a = LinkTraffic(), LinkTraffic()
        for link in self._links:
            a2e, e2a = a2e + link.a2e_traffic, e2a + link.e2a_traffic
        return a2e, e2a

    def close(self) -> None:
        """End the managers and say stop to the expert workers."""
        for requests in self._requests:
            requests.stop()
        for link in self._links:
            link.close()

    def _recheck(self, number: int, name: str, end: Callable[[], None]) -> None:
        """End a request that has failed, once a prompt of the load's check has shown that it is alone in that."""
        if self._is_loading:
            end()
            return
        if name.startswith(_RECHECK):
            self._break("it can no longer run a prompt that it could run when it was loaded")
            end()
            return
        with self._troubled_lock:
            self._troubled[number].append(end)
            if len(self._troubled[number]) > 1:
                return  # the prompt is on its way

        def ended(why: str | None) -> None:
            if why is not None:
                self._break(f"a prompt that it could run when it was loaded fails: {why}")
            with self._troubled_lock:
                ends, self._troubled[number] = self._troubled[number], []
            for each in ends:
                each()

        recheck(self._expected, self._requests[number], f"{_RECHECK}-{number}", ended)

    def _break(self, why: str) -> None:
        if not self._is_loading:
            self._on_broken(why)

    def _explain(self) -> None:
        for link in self._links:
            link.check()

    def _watch_blocks(self, model: nn.Module) -> None:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            for number, requests in enumerate(self._requests):
                if requests.runs_here:
                    self._progress_times[number] = time.monotonic()

        for blocks in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
            for block in blocks:
                block.register_forward_hook(note)

    def _end(self, on_finished: Callable[[Finished], None]) -> Callable[[Finished], None]:
        def end(finished: Finished) -> None:
            if self._micro_batch_of.pop(finished.name, None) is not None:
                on_finished(finished)

        return end


def put_remote_experts(model: Any, experts: RemoteExperts) -> tuple[list[str], list[str]]:
    """Connect a model, whose experts have been replaced by RemoteLayers, with the turns of its micro-batches.

    Returns:
        Names of blocks whose shared experts run while rows are with the experts, and of those where they stay.
    """
    moved: list[str] = []
    left: list[str] = []
    for name, layer in list(model.named_modules()):
        if isinstance(layer, RemoteLayer):
            owner = name.rpartition(".")[0]
            block = model.get_submodule(owner)
            if overlap_shared(block, layer, model.config.get_text_config().hidden_size, model.dtype):
                moved.append(owner)
            elif shared_experts(block):
                left.append(owner)

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        lengths = kwargs.get("cu_seq_lens_q")
        experts.begin_forward(None if lengths is None else int(lengths[-1]))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        experts.end_forward()

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after, always_call=True)
    return moved, left
