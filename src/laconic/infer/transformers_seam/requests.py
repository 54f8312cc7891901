"""The requests of one micro-batch, by transformers' continuous batching."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from laconic.errors import ConfigError, LaconicError, ModelError
from laconic.infer.grammars import GrammarMask
from laconic.infer.logits_rules import LogitsRules, make_rules, try_rules
from laconic.infer.sampling import ChosenToken, Sampling
from laconic.infer.transformers_seam.faulty_batches import FaultyBatches
from laconic.infer.transformers_seam.prompt_rows import PromptReport
from laconic.infer.transformers_seam.sampler import Finished, Replay, Sampler


@dataclass(frozen=True)
class CacheLimits:
    """Size of one micro-batch's paged cache and of its batches.

    The cache holds `cache_tokens` of prompts and answers together; a forward takes `batch_tokens` at most, and longer
    prompts are cut.
    """

    cache_tokens: int = 4096
    batch_tokens: int = 256

    PAGE_TOKENS = 16

    def __post_init__(self) -> None:
        for name, least in (("cache_tokens", self.PAGE_TOKENS), ("batch_tokens", 1)):
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"{name} is {value}, but it must be at least {least}")


class Requests:
    """The requests of one micro-batch, by a ContinuousBatchingManager with a thread of its own.

    `model` is of `load_attention_model`; several managers may share it, unless transformers does not batch requests of
    it, a ModelError. Callbacks are called on another thread: `on_finished` for every request that ends, unless it was
    cancelled (one for which no token can be chosen may end a second time); `on_tokens` once per forward, with requests'
    names and tokens; `on_trouble` with the name of a request that has failed by itself in a way that may not be its
    own, and with what ends it, to be called once the others are known to be well; `on_ended` with what ends the loop,
    before any request hears of it. `grammar_tokenizer` returns that of the model; None if there are no grammars.
    """

    def __init__(
        self,
        model: Any,
        limits: CacheLimits,
        on_finished: Callable[[Finished], None],
        on_tokens: Callable[[list[tuple[str, ChosenToken]]], None] = lambda tokens: None,
        on_trouble: Callable[[str, Callable[[], None]], None] = lambda name, end: end(),
        on_ended: Callable[[str], None] = lambda why: None,
        grammar_tokenizer: Callable[[], Any] | None = None,
    ) -> None:
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        self._model, self._generation = model, model.generation_config
        eos = self._generation.eos_token_id
        eos = -1 if eos is None else eos
        try_rules(model, self._generation)
        # Without rules: see logits_rules.py.
        generation = GenerationConfig(do_sample=False, num_beams=1, eos_token_id=eos)
        batching = ContinuousBatchingConfig(
            page_size=limits.PAGE_TOKENS,
            num_blocks=-(-limits.cache_tokens // limits.PAGE_TOKENS),
            max_batch_tokens=limits.batch_tokens,
            max_requests_per_batch=limits.batch_tokens,
            auto_switch_to_flash=False,
            use_cuda_graph=False,
            use_async_batching=False,
        )
        try:
            self._manager = model.init_continuous_batching(generation, batching)
        except Exception as error:  # foreign code may raise anything
            raise ModelError(
                f"transformers does not batch requests of {model.config.model_type} models ({type(error).__name__}:"
                f" {error}); use its own generate for this model"
            ) from error
        self.eos_token_ids = tuple(token for token in ([eos] if isinstance(eos, int) else eos) if token >= 0)
        self._on_finished, self._on_trouble = on_finished, on_trouble
        self._grammar_tokenizer = grammar_tokenizer
        self._why_ended = ""

        def end(error: Exception) -> None:
            self._note_end(error)
            on_ended(f"{type(error).__name__}: {error}")

        faults = FaultyBatches(self._manager, self._fail_alone, end)
        sampler = self._sampler = Sampler(self._manager.logit_processor, on_tokens, self._fail)
        create = self._manager._create_batch_processor

        def create_with_sampler() -> Any:
            try:
                processor = create()
                processor.model_runner._sample = sampler.choose
                faults.watch(processor)
                sampler.prompts.watch(processor)
                if getattr(model.config.get_text_config(), "kv_lora_rank", None) is not None:
                    _widen_rows(processor.cache)
            except Exception as error:
                self._note_end(error)
                raise
            return processor

        self._manager.logit_processor = sampler
        self._manager._create_batch_processor = create_with_sampler
        self._manager.start()
        threading.Thread(target=self._watch, name="laconic-results", daemon=True).start()

    @property
    def runs_here(self) -> bool:
        """Whether this thread is the one that runs the model for these requests."""
        return threading.current_thread() is self._manager._generation_thread

    def add(self, name: str, prompt: list[int], sampling: Sampling) -> None:
        """Add a request for tokens after `prompt`."""
        eos = [*(() if sampling.ignore_eos else self.eos_token_ids), *sampling.stop_token_ids]
        try:
            grammar = self._grammar(sampling, len(prompt))
            rules = make_rules(self._model, self._generation, sampling, prompt, eos, grammar)
        except Exception as error:  # transformers checks the values of a request's rules
            self._end(Finished(name, [], f"the request's rules for logits are refused: {error}", is_own=True))
            return
        self._add(name, prompt, sampling, eos or [-1], rules)

    def _grammar(self, sampling: Sampling, prompt_tokens: int) -> GrammarMask | None:
        if sampling.grammar is None:
            return None
        if self._grammar_tokenizer is None:
            raise ConfigError("no tokenizer is there for a grammar")
        return GrammarMask(self._grammar_tokenizer(), sampling.grammar, prompt_tokens)

    def replay(self, name: str, prompt: list[int], replay: Replay) -> None:
        """Add a request whose tokens are given; neither `on_finished` nor `on_tokens` hears of it."""
        self._sampler.replays[name] = replay
        self._add(name, prompt, Sampling(max_new_tokens=len(replay.tokens)), [-1], None)

    def _add(
        self, name: str, prompt: list[int], sampling: Sampling, end_tokens: list[int], rules: LogitsRules | None
    ) -> None:
        added = self._manager.add_request(
            prompt,
            name,
            sampling.max_new_tokens,
            eos_token_id=end_tokens,
            sampling=sampling,
            rules=rules,
            prompt_tokens=len(prompt),
            report=None if sampling.prompt_logprobs is None else PromptReport(prompt, sampling.prompt_logprobs),
        )
        if added is None:
            self._end(Finished(name, [], f"the generation loop has ended{self._why_ended}"))

    def _note_end(self, error: Exception) -> None:
        self._why_ended = f": {type(error).__name__}: {error}"

    def _end(self, finished: Finished) -> None:
        replay = self._sampler.replays.pop(finished.name, None)
        (self._on_finished if replay is None else replay.on_end)(finished)

    def cancel(self, name: str) -> None:
        """Forget a request; nothing more is heard of it, unless it has ended already."""
        self._manager.cancel_request(name)

    def stop(self) -> None:
        """End the manager's thread; requests in flight fail."""
        self._manager.stop(block=True, timeout=5.0, hard_stop=True)

    def _fail(self, name: str, error: Exception) -> None:
        """End a request for which no token can be chosen."""
        self._manager.cancel_request(name)
        if isinstance(error, LaconicError):
            self._end(Finished(name, [], str(error), is_own=True))
        else:
            logging.getLogger("laconic").error("no token can be chosen for %s", name, exc_info=error)
            self._fail_alone(name, [], error)

    def _fail_alone(self, name: str, tokens: list[int], error: Exception) -> None:
        finished = Finished(name, tokens, str(error) or type(error).__name__, is_own=True)
        self._on_trouble(name, lambda: self._end(finished))

    def _watch(self) -> None:
        while True:
            running = self._manager.is_running()
            output = self._manager.get_result(timeout=0.1)
            if output is not None and output.is_finished():
                self._end(Finished(output.request_id, output.generated_tokens, output.error))
            elif output is None and not running:
                return


def fit_latent_attention(model: Any) -> None:
    """Let the paged cache, which `Requests` makes, hold the rows of multi-head latent attention.

    The cache has one width for keys and values, and takes it, and their number of heads, from the configuration, whose
    `head_dim` counts the rotary part alone. Where attention functions fill the cache, they have keys and values, of
    which the keys are wider. From transformers 5.24 on the model's layers do, with the latents that both are made of,
    as one head. The model's modules have been built by then.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    text = model.config.get_text_config()
    if getattr(text, "kv_lora_rank", None) is None:
        return
    by_layers = "cache" not in inspect.signature(sdpa_attention_forward).parameters
    if by_layers and any(hasattr(module, "expand_kv") for module in model.modules()):
        text.head_dim, text.num_key_value_heads = max(text.kv_lora_rank, text.qk_rope_head_dim), 1
    else:
        text.head_dim = text.qk_nope_head_dim + text.qk_rope_head_dim


def _widen_rows(cache: Any) -> None:
    """Let a paged cache take rows that are narrower than it is: zeros fill them, and are cut off what it returns."""
    update = cache.update

    def widened(key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]) -> Any:
        width = cache.layer_to_allocator[layer_idx].head_dim
        rows = (key_states, value_states)
        found = update(*(nn.functional.pad(each, (0, width - each.shape[-1])) for each in rows), layer_idx, kwargs)
        return tuple(whole[..., : each.shape[-1]].contiguous() for whole, each in zip(found, rows, strict=True))

    cache.update = widened
