"""The engine with real workers: tokens, cancelled requests, lost workers, and the command."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path

import pytest

from laconic.cli.main import main
from laconic.errors import CollectiveError, ConfigError, ModelError
from laconic.infer import Engine, InferencePlan
from laconic.schedule.inference import Slicing
from tests.infer.models import NEW_TOKENS, PROMPTS, expected, generated, make


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("qwen2_moe", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    plan = InferencePlan(num_micro_batches=2, num_slices=2)
    with Engine(model, attention=1, experts=1, plan=plan, cache_tokens=1024, batch_tokens=24, threads=1) as engine:
        yield engine


def test_tokens_are_those_of_generate(engine: Engine, model: Path) -> None:
    assert engine.generate(PROMPTS, NEW_TOKENS) == expected(model)


def test_workers_say_what_they_hold(engine: Engine, model: Path) -> None:
    attention, experts = engine.workers
    assert (attention.role, attention.number, experts.role, experts.number) == ("attention", 0, "expert", 0)
    size = os.path.getsize(model / "model.safetensors")
    assert 0 < attention.nbytes < size
    assert experts.nbytes == 2 * 6 * 3 * 24 * 32 * 4  # layers, experts, matrices of each, 24 x 32 float32
    assert size - 16384 < attention.nbytes + experts.nbytes < size
    assert "expert worker 0 (pid" in str(engine)


def test_cancelled_requests_end_and_the_others_go_on(engine: Engine, model: Path) -> None:
    long = [engine.submit(prompt, 800) for prompt in PROMPTS[:3]]
    others = [engine.submit(prompt, NEW_TOKENS) for prompt in PROMPTS]
    for generation in long:
        assert generation.cancel()
        assert generation.done
        assert not generation.cancel()
        with pytest.raises(CancelledError):
            generation.result()
    assert [other.result(60) for other in others] == expected(model)
    assert not others[0].cancel()


def test_requests_that_do_not_fit_are_refused(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="prompt has 0 tokens"):
        engine.submit([])
    with pytest.raises(ConfigError, match="max_new_tokens is 0"):
        engine.submit([1], 0)
    for token in (-1, 97):
        with pytest.raises(ConfigError, match=rf"tokens from .*{token}.* are from 0 to 96"):
            engine.submit([5, token])
    with pytest.raises(ConfigError, match="cache_tokens is 1024"):
        engine.submit([1] * 1000, 25)


def test_bad_arguments_are_refused_before_a_process_starts(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no config"):
        Engine(tmp_path)
    with pytest.raises(ConfigError, match=r"^dtype is 'int8'"):
        Engine(model, dtype="int8")
    with pytest.raises(ConfigError, match=r"^threads is 0"):
        Engine(model, threads=0)
    with pytest.raises(ConfigError, match=r"^attention is 0"):
        Engine(model, attention=0)
    with pytest.raises(ConfigError, match=r"^answer_timeout_seconds is 0"):
        Engine(model, answer_timeout_seconds=0)
    with pytest.raises(ConfigError, match="at most 6 expert workers"):
        Engine(model, experts=7)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["attention", "expert"])
def test_a_lost_worker_fails_requests_at_once(model: Path, role: str) -> None:
    with Engine(model, attention=2, experts=2, threads=1) as engine:
        assert engine.generate(PROMPTS[:2], NEW_TOKENS) == expected(model)[:2]
        requests = [engine.submit(prompt, 2000) for prompt in PROMPTS]
        time.sleep(0.5)
        lost = next(worker for worker in engine.workers if worker.role == role and worker.number == 1)
        os.kill(lost.pid, signal.SIGKILL)
        start = time.monotonic()
        for request in requests:
            with pytest.raises(CollectiveError, match=rf"{role} worker 1 \(pid {lost.pid}\) was killed by SIGKILL"):
                request.result(60)
        assert time.monotonic() - start < 20  # two seconds where processors are free
        with pytest.raises(CollectiveError, match="was killed"):
            engine.submit([1])
    for worker in engine.workers:
        with pytest.raises(ProcessLookupError):
            os.kill(worker.pid, 0)


@pytest.mark.slow
def test_an_expert_worker_that_hangs_is_given_up(model: Path) -> None:
    with Engine(model, attention=2, answer_timeout_seconds=2.0, threads=1) as engine:
        assert engine.generate(PROMPTS[:2], NEW_TOKENS) == expected(model)[:2]
        os.kill(engine.workers[2].pid, signal.SIGSTOP)
        start = time.monotonic()
        requests = [engine.submit(prompt, 100) for prompt in PROMPTS]
        for request in requests:
            with pytest.raises(CollectiveError, match=r"expert worker 0 is lost: it did not answer within 2 s"):
                request.result(120)
        assert time.monotonic() - start < 2 + 40
        with pytest.raises(CollectiveError, match="did not answer"):
            engine.submit([1])


@pytest.mark.slow
def test_a_worker_that_cannot_load_its_weights_says_why(tmp_path: Path) -> None:
    path = make("mixtral", tmp_path)
    (path / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(ModelError, match="worker 0: "):
        Engine(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "experts", "slicing"),
    [(1, 2, "experts"), (2, 1, "tokens"), (2, 2, "experts"), (3, 1, "experts"), (1, 3, "tokens")],
)
def test_tokens_stay_however_many_workers(model: Path, attention: int, experts: int, slicing: Slicing) -> None:
    plan = InferencePlan(num_micro_batches=2, num_slices=3, slicing=slicing, order="AASS")
    with Engine(model, attention=attention, experts=experts, plan=plan, batch_tokens=24, threads=1) as engine:
        assert engine.plan == replace(plan, order="greedy")
        assert engine.notes[0].startswith("order AASS runs as greedy: ")
        assert engine.generate(PROMPTS * 2, NEW_TOKENS) == expected(model) * 2
        assert len(engine.workers) == attention + experts


@pytest.mark.slow
def test_dense_models_and_no_expert_workers_are_served_whole(model: Path, tmp_path: Path) -> None:
    dense = make("llama", tmp_path)
    with Engine(dense, attention=2, experts=2, threads=1) as engine:
        assert engine.generate(PROMPTS, NEW_TOKENS) == expected(dense)
        assert [worker.role for worker in engine.workers] == ["attention", "attention"]
        assert "without experts" in engine.notes[0]
    with Engine(model, experts=0, threads=1) as engine:
        assert engine.generate(PROMPTS, NEW_TOKENS) == expected(model)
        assert engine.notes == ()


@pytest.mark.slow
def test_generation_ends_with_the_end_of_sequence_token(tmp_path: Path) -> None:
    free = generated(make("mixtral", tmp_path))
    eos = free[0][4]
    path = make("mixtral", tmp_path / "eos", eos_token_id=eos, pad_token_id=0)
    wanted = generated(path)
    assert any(len(tokens) < NEW_TOKENS for tokens in wanted)
    with Engine(path, threads=1) as engine:
        assert engine.generate(PROMPTS, NEW_TOKENS) == wanted


@pytest.mark.slow
def test_the_command_prints_what_the_engine_generates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make("mixtral", tmp_path, vocab_size=257)
    texts = ["one", "another prompt"]
    (tmp_path / "prompts.txt").write_text("another prompt\n\n")
    flags = ["--prompts", str(tmp_path / "prompts.txt"), "--max-new-tokens", "6", "--slices", "2"]
    assert main(["generate", "--model", str(path), "--prompt", "one", "--json", *flags]) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["prompt"] for each in shown] == texts
    assert [each["tokens"] for each in shown] == generated(path, [list(text.encode()) for text in texts], 6)


def test_the_command_refuses_what_it_cannot_do(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", str(model)]) == 2
    assert "there is no prompt" in capsys.readouterr().err
    assert main(["generate", "--model", str(tmp_path), "--prompt", "x"]) == 2
    assert "holds no config.json" in capsys.readouterr().err
    assert main(["generate", "--model", str(model), "--prompt", "x"]) == 2
    assert "no tokenizer" in capsys.readouterr().err
