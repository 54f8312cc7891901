"""The engine without expert workers against transformers' own continuous batching, which it runs on, and `generate`.

Same weights, threads, cache and requests; greedy; all answers must be equal. The engine adds a process, pipes and a
sampler. `generate` takes a batch padded on the left, and ends with its longest answer. Forwards alone, of the same
requests in transformers' manager, say how far ahead of it an engine can be that runs the model as it is.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.kit.timing import Case, Timing, seconds_of, wall_clock
from benchmarks.registry import Options, Table, benchmark
from laconic.infer import Engine
from laconic.infer.bench.demo_model import save_demo_model
from laconic.infer.bench.measure import Listener, run_together
from laconic.infer.sampling import Sampling

_CACHE_TOKENS, _BATCH_TOKENS, _PAGE_TOKENS = 8192, 256, 16
_SIZES = {
    "small": {"hidden_size": 128, "layers": 4, "experts": 16, "vocab_size": 257},
    "small, 32k tokens": {"hidden_size": 128, "layers": 4, "experts": 16, "vocab_size": 32000},
    "middle": {"hidden_size": 512, "layers": 8, "experts": 16, "vocab_size": 32000},
}
_SMOKE = {"smoke": {"hidden_size": 32, "layers": 2, "experts": 4, "vocab_size": 257}}
_LONGEST_PROMPT = 96


@benchmark("infer-unsplit")
def infer_unsplit(options: Options) -> list[Table]:
    """The table."""
    sizes = _SMOKE if options.smoke else {n: s for n, s in _SIZES.items() if n != "middle" or not options.small}
    count, new_tokens = (3, 4) if options.smoke else (32, 32)
    rows = [_row(name, size, count, new_tokens, options) for name, size in sizes.items()]
    few, longest = (3, 4) if options.smoke else (16, 64)
    beside_generate = [_generate_row(name, size, few, longest, options) for name, size in sizes.items()]
    return [
        Table(
            f"Tokens per second of {count} requests at once, prompts of 4 to {_LONGEST_PROMPT} tokens, {new_tokens} new"
            f" tokens each, float32, {options.thread_text}",
            [
                *("model", "parameters", "engine, experts=0", "engine, streams"),
                *("transformers, a manager that stays", "transformers, generate_batch"),
                *("engine over the better of transformers", "lowest to highest of the rounds"),
            ],
            rows,
            "The quotient is the median over the rounds, each round with its own times. generate_batch makes a manager "
            "and a cache for every call. Streams: every token is heard of when it is made.",
        ),
        Table(
            f"Tokens per second of {few} requests at once, prompts of 4 to {_LONGEST_PROMPT} tokens, 1 to {longest} new"
            f" tokens, float32, {options.thread_text}",
            [
                *("model", "engine, experts=0", "generate, a batch"),
                *("engine over generate", "lowest to highest of the rounds", "forwards alone over generate"),
            ],
            beside_generate,
            "Tokens that were asked for, per second. The batch is padded on the left and runs until its longest answer "
            "has ended. Forwards alone: those of transformers' manager with the same requests, without its scheduler, "
            "batches and choice of tokens; no engine that runs this model's forward is further ahead.",
        ),
    ]


def _prompts(size: dict[str, int], count: int, generator: random.Random) -> list[list[int]]:
    return [
        [generator.randrange(size["vocab_size"]) for _ in range(generator.randint(4, _LONGEST_PROMPT))]
        for _ in range(count)
    ]


@contextmanager
def _both(size: dict[str, int], options: Options) -> Iterator[tuple[Engine, _Peer]]:
    """The engine without expert workers and transformers, on the same model."""
    with tempfile.TemporaryDirectory() as folder:
        save_demo_model(Path(folder), **size)
        peer = _Peer(Path(folder))
        with Engine(
            folder, experts=0, cache_tokens=_CACHE_TOKENS, batch_tokens=_BATCH_TOKENS, threads=options.threads
        ) as engine:
            yield engine, peer
        peer.stop()


def _row(name: str, size: dict[str, int], count: int, new_tokens: int, options: Options) -> list[str]:
    prompts = _prompts(size, count, random.Random(0))
    with _both(size, options) as (engine, peer):
        each = [new_tokens] * count
        expected = peer.managed(prompts, each)
        assert engine.generate(prompts, new_tokens) == expected, "the engine's tokens differ"
        assert _streamed(engine, prompts, new_tokens) == expected, "the streams' tokens differ"
        assert peer.batch(prompts, new_tokens) == expected
        cases: dict[str, Case] = {
            "engine": lambda: engine.generate(prompts, new_tokens),
            "streams": lambda: _streamed(engine, prompts, new_tokens),
            "manager": lambda: peer.managed(prompts, each),
            "generate_batch": lambda: peer.batch(prompts, new_tokens),
        }
        seconds = seconds_of(cases, options.rounds, shuffle=True)
    tokens = count * new_tokens
    better = min(seconds["manager"], seconds["generate_batch"])
    return [
        *(name, f"{peer.parameters / 1e6:.1f} M"),
        *(_rate(tokens, seconds[case]) for case in cases),
        *_gain(better, seconds["engine"]),
    ]


def _generate_row(name: str, size: dict[str, int], count: int, longest: int, options: Options) -> list[str]:
    generator = random.Random(0)
    prompts = _prompts(size, count, generator)
    lengths = [generator.randint(1, longest) for _ in prompts]
    with _both(size, options) as (engine, peer):
        cases: dict[str, Case] = {
            "engine": lambda: _asked(engine, prompts, lengths),
            "batch": lambda: peer.padded(prompts, lengths),
            "forwards": lambda: peer.managed(prompts, lengths),
        }
        ours, theirs, managed = (answer() for answer in cases.values())
        assert ours == theirs == managed, "the engine's tokens differ from those of generate"

        def clock(case: Case) -> Callable[[], float]:
            return peer.forward_clock(case) if case is cases["forwards"] else wall_clock(case)

        seconds = seconds_of(cases, options.rounds, rotate=True, clock=clock)
    rates = [_rate(sum(lengths), seconds[case]) for case in ("engine", "batch")]
    bound = seconds["batch"].over(seconds["forwards"])
    return [name, *rates, *_gain(seconds["batch"], seconds["engine"]), f"{bound:.3f}"]


def _gain(theirs: Timing, ours: Timing) -> tuple[str, str]:
    """How many times as fast ours is: the median over the rounds, lowest and highest."""
    quotients = [a / b for a, b in zip(theirs.samples, ours.samples, strict=True)]
    return f"{theirs.over(ours):.3f}", f"{min(quotients):.3f} to {max(quotients):.3f}"


def _asked(engine: Engine, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
    """Answers of these lengths, all asked for at once."""
    listeners = [Listener(0.0) for _ in prompts]
    for prompt, length, listener in zip(prompts, lengths, listeners, strict=True):
        engine.stream(prompt, Sampling(max_new_tokens=length), listener)
    return [listener.wait().tokens for listener in listeners]


def _rate(tokens: int, timing: Timing) -> str:
    return f"{tokens / timing:.0f} ({timing.spread:.1%})"


def _streamed(engine: Engine, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    return [answer.tokens for answer in run_together(engine, prompts, new_tokens)]


class _Peer:
    """transformers in this process, with the engine's limits."""

    def __init__(self, model_dir: Path) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, trust_remote_code=False
        ).eval()
        self.parameters = sum(parameter.numel() for parameter in self._model.parameters())
        self._generation = self._model.generation_config
        self._generation.update(do_sample=False, eos_token_id=-1)
        self._config = lambda: ContinuousBatchingConfig(
            page_size=_PAGE_TOKENS,
            num_blocks=_CACHE_TOKENS // _PAGE_TOKENS,
            max_batch_tokens=_BATCH_TOKENS,
            max_requests_per_batch=_BATCH_TOKENS,
            auto_switch_to_flash=False,
            use_cuda_graph=False,
            use_async_batching=False,
        )
        self._manager: Any = self._model.init_continuous_batching(
            generation_config=self._generation, continuous_batching_config=self._config()
        )
        self._manager.start()

    def managed(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        """Answers of these lengths by the manager that stays."""
        names = [
            self._manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1)
            for prompt, length in zip(prompts, lengths, strict=True)
        ]
        found: dict[str, list[int]] = {}
        while len(found) < len(prompts):
            result = self._manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                assert result.error is None, result.error
                found[result.request_id] = result.generated_tokens
        return [found[name] for name in names]

    def batch(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        results = self._model.generate_batch(
            prompts,
            generation_config=self._generation,
            continuous_batching_config=self._config(),
            max_new_tokens=new_tokens,
        )
        return [result.generated_tokens for result in results.values()]

    @torch.no_grad()
    def padded(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        """Answers of `generate` to a batch that is padded on the left, cut to these lengths."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        made = self._model.generate(
            ids, attention_mask=mask, max_new_tokens=max(lengths), do_sample=False, pad_token_id=0
        )
        return [row[:length].tolist() for row, length in zip(made[:, width:], lengths, strict=True)]

    def forward_clock(self, case: Case) -> Callable[[], float]:
        """Seconds of the model's forwards, for `seconds_of`."""
        taken, forward = [0.0], self._model.forward

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = forward(*args, **kwargs)
            taken[0] += time.perf_counter() - started
            return result

        self._model.forward = timed
        try:
            case()
        finally:
            del self._model.forward
        return lambda: taken[0]

    def stop(self) -> None:
        self._manager.stop(block=True, timeout=5.0)
