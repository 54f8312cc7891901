"""A request that fails takes only itself along; what nobody can survive is said at once, and never hidden."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import torch
from torch import nn

from laconic.errors import CollectiveError, ConfigError, ModelError
from laconic.infer import Engine, Sampling
from laconic.infer.control import LocalWorker
from laconic.infer.sampling import ChosenToken, sample
from laconic.infer.server import ByteTokenizer, ServerSettings, create_app
from laconic.infer.transformers_seam import Finished
from laconic.infer.transformers_seam.faulty_batches import FaultyBatches
from tests.distributed.processes import wait_until
from tests.infer.alone import worker_of
from tests.infer.failing_worker import FLAG, POISON
from tests.infer.models import NEW_TOKENS, PROMPTS, expected, generated, make
from tests.infer.serving import running


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("models"))


class Held:
    """A worker in this process whose model raises what `fault` does, and what has become of its requests."""

    def __init__(self, path: Path, cache_tokens: int = 1024, batch_tokens: int = 64) -> None:
        self.fault: Callable[[dict[str, Any]], None] = lambda arguments: None
        self.ended: dict[str, Finished] = {}
        self.broken: list[str] = []
        self.forwards: list[int] = []
        self.tokens: dict[str, list[int]] = {}
        self.worker = worker_of(
            path,
            cache_tokens=cache_tokens,
            batch_tokens=batch_tokens,
            on_finished=lambda end: self.ended.update({end.name: end}),
            on_tokens=self._hear,
            on_broken=self.broken.append,
        )
        self.requests = self.worker._requests[0]
        self.manager: Any = cast(Any, self.requests)._manager
        self.manager.model.register_forward_pre_hook(self._before, with_kwargs=True)

    def _hear(self, chosen: list[tuple[str, ChosenToken]]) -> None:
        for name, token in chosen:
            self.tokens.setdefault(name, []).append(token.token)

    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.forwards.append(len(kwargs["cu_seq_lens_q"]) - 1)
        self.fault(kwargs)

    def run(self, prompts: dict[str, list[int]], **sampling: Any) -> dict[str, list[int] | str]:
        """The tokens of each request, or its error; they come together."""
        with self.manager.pause():
            for name, prompt in prompts.items():
                self.worker.add(name, prompt, Sampling(**{"max_new_tokens": NEW_TOKENS} | sampling))
        wait_until(lambda: set(prompts) <= set(self.ended))
        return {name: self.ended[name].error or self.ended[name].tokens for name in prompts}


@pytest.fixture
def held(path: Path) -> Iterator[Held]:
    held = Held(path)
    yield held
    held.worker.close()


def poisoned(arguments: dict[str, Any]) -> None:
    if (arguments["input_ids"] == POISON).any():
        raise RuntimeError("out of memory")


def good(path: Path) -> dict[str, list[int] | str]:
    return {str(number): tokens for number, tokens in enumerate(expected(path))}


def test_a_request_whose_forward_fails_takes_no_other_along(held: Held, path: Path) -> None:
    held.fault = poisoned
    prompts = {str(number): prompt for number, prompt in enumerate(PROMPTS)}
    assert not any(POISON in tokens for tokens in expected(path))
    found = held.run(prompts | {"bad": [3, POISON], "worse": [POISON] * 70})
    assert [found.pop(name) for name in ("bad", "worse")] == ["out of memory"] * 2
    assert found == good(path)
    assert all(held.ended[name].is_own for name in ("bad", "worse"))
    assert held.tokens == good(path)  # nobody hears a token twice
    assert held.run({"again": PROMPTS[0]})["again"] == expected(path)[0]
    assert not held.broken
    assert 1 in held.forwards
    assert max(held.forwards[-NEW_TOKENS:]) <= 2  # nobody is left over


def test_a_request_that_fails_amid_its_answer_takes_no_other_along(held: Held, path: Path) -> None:
    """Those that have decoded before keep their tokens, whether they decode or come while others are tried alone."""
    third = expected(path)[0][2]
    seen = threading.Event()

    def fault(arguments: dict[str, Any]) -> None:
        ends = arguments["cu_seq_lens_q"][1:] - 1
        behind = arguments["position_ids"][0, ends] == len(PROMPTS[0]) + 2
        if (behind & (arguments["input_ids"][0, ends] == third)).any():
            seen.set()
            raise IndexError("no such row")

    held.fault = fault
    found = held.run({str(number): prompt for number, prompt in enumerate(PROMPTS)})
    assert seen.is_set()
    assert found.pop("0") == "no such row"
    assert held.tokens.pop("0") == expected(path)[0][:3]
    assert found == held.tokens == {name: tokens for name, tokens in good(path).items() if name != "0"}


def test_a_batch_that_fails_for_its_size_goes_on_one_by_one(held: Held, path: Path) -> None:
    def fault(arguments: dict[str, Any]) -> None:
        if len(arguments["cu_seq_lens_q"]) > 2:
            raise RuntimeError("out of memory")

    held.fault = fault
    assert held.run({str(number): prompt for number, prompt in enumerate(PROMPTS[:3])}) == {
        name: tokens for name, tokens in good(path).items() if name < "3"
    }
    assert not held.broken


def test_a_small_cache_and_cut_prompts_survive_a_failing_request(path: Path) -> None:
    held = Held(path, cache_tokens=128, batch_tokens=8)
    held.fault = poisoned
    found = held.run({str(number): prompt for number, prompt in enumerate(PROMPTS)} | {"bad": [5] * 30 + [POISON]})
    assert found.pop("bad") == "out of memory"
    assert found == good(path)
    held.worker.close()


def test_who_lost_its_place_in_the_cache_goes_on_when_the_others_are_cancelled(path: Path) -> None:
    """Three pages: both begin in one, only one gets the third, and nobody finishes who could let the other in."""
    held, prompts = Held(path, cache_tokens=48), {"one": list(range(10)), "other": list(range(20, 30))}
    cancelled: list[str] = []

    def cancel_who_runs_alone(arguments: dict[str, Any]) -> None:
        batch = held.manager.batch_processor.inputs_and_outputs.requests_in_batch
        if len(batch) == 1 and len(held.tokens) == 2 and not cancelled:
            cancelled.append(batch[0].state.request_id)
            held.worker.cancel(cancelled[0])

    held.fault = cancel_who_runs_alone
    try:
        with held.manager.pause():
            for name, prompt in prompts.items():
                held.worker.add(name, prompt, Sampling(max_new_tokens=22))
        wait_until(lambda: len(held.ended) == 1)
        (left,) = prompts.keys() - set(cancelled)
        assert held.ended[left].tokens == generated(path, [prompts[left]], 22)[0] == held.tokens[left]
    finally:
        held.worker.close()


def test_who_is_tried_alone_waits_for_those_that_hold_the_cache() -> None:
    manager = SimpleNamespace(_generation_loop_body=None, _generation_step=None)
    faults = FaultyBatches(manager, lambda *failed: None, lambda error: None)
    scheduler = SimpleNamespace(
        active_requests={"holds": "its state"},
        waiting_requests={"suspect": "its state"},
        waiting_requests_order=deque(["suspect"]),
        block_new_requests=True,
    )

    def schedule(*budgets: int) -> tuple[list[str] | None, bool, int, int]:
        if scheduler.waiting_requests:  # there is no room for one more
            return None, False, 0, 0
        return list(scheduler.active_requests), False, 1, 1

    scheduler.schedule_batch = schedule
    faults.watch(SimpleNamespace(scheduler=scheduler, inputs_and_outputs=SimpleNamespace(requests_in_batch=[])))
    faults._suspects.append("suspect")
    before = deepcopy({name: value for name, value in vars(scheduler).items() if name != "schedule_batch"})
    assert scheduler.schedule_batch(8, 8)[0] == ["holds"]
    assert {name: vars(scheduler)[name] for name in before} == before
    scheduler.active_requests.clear()  # then the manager makes room, or says that it cannot
    assert scheduler.schedule_batch(8, 8)[0] is None


def test_one_that_is_tried_alone_can_be_cancelled(held: Held, path: Path) -> None:
    def fault(arguments: dict[str, Any]) -> None:
        if len(arguments["cu_seq_lens_q"]) > 2:
            held.worker.cancel("0")
            held.worker.cancel("gone")
        poisoned(arguments)

    held.fault = fault
    with held.manager.pause():
        held.worker.add("gone", [5, POISON], Sampling(max_new_tokens=NEW_TOKENS))
    assert held.run({str(number): PROMPTS[number] for number in (1, 2)}) == {
        name: tokens for name, tokens in good(path).items() if name in "12"
    }


def test_an_engine_whose_every_forward_fails_is_broken_before_it_says_so(held: Held) -> None:
    def fault(arguments: dict[str, Any]) -> None:
        raise RuntimeError("no kernel image")

    held.fault = fault
    held.run({"0": PROMPTS[0], "1": PROMPTS[1]})
    assert held.broken[0] == "it can no longer run a prompt that it could run when it was loaded"


def test_an_engine_whose_logits_have_changed_is_broken(held: Held) -> None:
    def fault(arguments: dict[str, Any]) -> None:
        poisoned(arguments)
        arguments["position_ids"].zero_()

    held.fault = fault
    held.run({"bad": [POISON]})
    assert "fails: its logits are off by" in held.broken[0]


@pytest.mark.parametrize("every", [True, False])
def test_a_token_that_cannot_be_chosen_ends_its_request_alone(
    held: Held, path: Path, monkeypatch: pytest.MonkeyPatch, every: bool
) -> None:
    def draw(logits: torch.Tensor, sampling: Sampling, position: int) -> ChosenToken:
        if every or sampling.seed == 99:
            raise ZeroDivisionError("no weights")
        return sample(logits, sampling, position)

    monkeypatch.setattr("laconic.infer.transformers_seam.sampler.sample", draw)
    with held.manager.pause():
        held.worker.add("bad", [5], Sampling(temperature=1.0, seed=99))
    found = held.run({str(number): prompt for number, prompt in enumerate(PROMPTS)})
    wait_until(lambda: "bad" in held.ended)
    assert held.ended["bad"].error == "no weights"
    assert found == good(path)
    assert bool(held.broken) == every  # greedy tokens are chosen by other code


@pytest.mark.parametrize(
    "what", ["scheduler.schedule_batch", "scheduler.finish_request", "update_batch", "cache.free_blocks"]
)
def test_a_fault_beside_the_forward_ends_the_engine_aloud(
    held: Held, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    owner: Any = held.manager.batch_processor
    *outer, name = what.split(".")
    for part in outer:
        owner = getattr(owner, part)
    works = getattr(owner, name)

    def fails_once(*args: Any) -> Any:
        setattr(owner, name, works)
        raise KeyError(what)

    monkeypatch.setattr(owner, name, fails_once)
    found = held.run({"0": [5]})
    assert held.broken[0] == f"KeyError: {what!r}"
    assert not held.ended["0"].is_own
    assert found["0"]
    held.worker.add("1", [5], Sampling())
    assert held.ended["1"].error.startswith("the generation loop has ended: KeyError: ")  # with what has raised


def test_what_exceeds_the_positions_is_refused_before_it_runs(tmp_path: Path) -> None:
    path = make("gpt2", tmp_path, max_position_embeddings=30, num_key_value_heads=4)
    wanted = generated(path, [PROMPTS[0]], 27)
    with Engine(path, threads=1) as engine:
        assert engine.max_request_tokens == 30
        assert engine.cache_tokens == 4096
        with pytest.raises(
            ConfigError, match=r"prompt of 29 tokens and max_new_tokens = 2 need 31 positions, .* with 30"
        ):
            engine.submit([1] * 29, 2)
        assert engine.generate([PROMPTS[0]], 27) == wanted


def test_longrope_is_served_as_far_as_its_frequencies_are_one_requests(tmp_path: Path) -> None:
    """Behind these positions the rows of a short prompt would have those of its longest neighbour."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 32}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0} | factors
    path = make("phi3", tmp_path, rope_parameters=rope, original_max_position_embeddings=32)
    prompts = [[5, 9, 2], list(range(1, 21))]
    with Engine(path, experts=0, threads=1) as engine:
        assert engine.max_request_tokens == 32
        assert any("names 16384 positions, of which 32 are served" in note for note in engine.notes)
        with pytest.raises(ConfigError, match="served with 32"):
            engine.submit(list(range(1, 40)), 12)
        assert engine.generate(prompts, 12) == generated(path, prompts, 12)


@pytest.mark.ci
def test_health_and_ready_say_what_an_engine_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing request leaves all well; an engine that fails restarts as often as is wanted, and then says so."""
    path, flag = make("llama", tmp_path), tmp_path / "fails"
    monkeypatch.setenv(FLAG, str(flag))
    monkeypatch.setattr(LocalWorker, "program", ("-m", "tests.infer.failing_worker"))
    with Engine(path, threads=1, max_restarts=1) as engine:
        app = create_app(engine, ByteTokenizer(), ServerSettings("tiny", api_key="k"))
        with running(app) as url:

            def status(route: str) -> int:
                return httpx.get(f"{url}/{route}").status_code

            assert (status("health"), status("ready")) == (200, 200)
            with pytest.raises(CollectiveError, match="failed: poison"):
                engine.submit([POISON]).result(60)
            assert (status("health"), status("ready")) == (200, 200)
            assert engine.generate(PROMPTS, NEW_TOKENS) == expected(path)

            flag.touch()
            with pytest.raises(CollectiveError, match="attention worker 0: it can no longer run a prompt"):
                engine.submit([5]).result(60)
            assert (status("health"), status("ready")) == (200, 503)
            flag.unlink()
            assert engine.generate(PROMPTS, NEW_TOKENS) == expected(path)
            assert (status("health"), status("ready"), engine.num_restarts) == (200, 200, 1)

            flag.touch()
            with pytest.raises(CollectiveError, match="attention worker 0: it can no longer run a prompt"):
                engine.submit([5]).result(60)
            assert (status("health"), status("ready")) == (503, 503)
    flag.touch()
    with pytest.raises(ModelError, match=r"attention worker 0: the engine fails .* \(short prompt: out of memory\)"):
        Engine(path, threads=1)
