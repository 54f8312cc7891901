"""The engine with real workers: tokens, cancelled requests, lost workers, and the command."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from laconic.cli.engine_flags import add_engine_flags, serve_if_not_first
from laconic.cli.main import main
from laconic.errors import CollectiveError, ConfigError, LaconicError, ModelError
from laconic.infer import Engine, InferencePlan, Sampling
from laconic.infer.payload import PayloadCoding
from laconic.schedule.inference import Slicing
from tests.infer.models import NEW_TOKENS, PROMPTS, expected, generated, make
from tests.patience import patient


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("qwen2_moe", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    plan = InferencePlan(num_micro_batches=2, num_slices=2)
    limits = {"cache_tokens": 1024, "batch_tokens": 24, "threads": 1}
    with Engine(model, attention=1, experts=1, plan=plan, payload="lossless", **limits) as engine:
        yield engine


def test_tokens_are_those_of_generate(engine: Engine, model: Path) -> None:
    assert engine.generate(PROMPTS, NEW_TOKENS) == expected(model)
    for direction in engine.traffic:
        assert direction.messages == direction.coded >= 2 * NEW_TOKENS  # two layers of experts
        assert direction.sent_nbytes != direction.raw_nbytes


def test_workers_say_what_they_hold(engine: Engine, model: Path) -> None:
    attention, experts = engine.workers
    assert (attention.role, attention.number, experts.role, experts.number) == ("attention", 0, "expert", 0)
    size = os.path.getsize(model / "model.safetensors")
    assert 0 < attention.nbytes < size
    assert experts.nbytes == 2 * 6 * 3 * 24 * 32 * 4  # layers, experts, matrices of each, 24 x 32 float32
    assert size - 16384 < attention.nbytes + experts.nbytes < size
    assert "expert worker 0 (pid" in str(engine)
    assert engine.notes[-1].startswith("checked: qwen2_moe in float32 gives the logits of the model's plain forward")
    assert engine.notes[-1] in str(engine)


def test_cancelled_requests_end_and_the_others_go_on(engine: Engine, model: Path) -> None:
    long = [engine.submit(prompt, 800) for prompt in PROMPTS[:3]]
    others = [engine.submit(prompt, NEW_TOKENS) for prompt in PROMPTS]
    for generation in long:
        assert generation.cancel()
        assert generation.done
        assert not generation.cancel()
        with pytest.raises(CancelledError):
            generation.result()
    assert [other.result(patient(60)) for other in others] == expected(model)
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
    heard: Any = object()
    with pytest.raises(ConfigError, match="stop_token_ids has tokens from 3 to 5000, but this model's are from 0 to"):
        engine.stream([1], Sampling(stop_token_ids=(3, 5000)), heard)
    with pytest.raises(ConfigError, match="a bias is given for tokens from 3 to 5000, but this model's are from 0 to"):
        engine.stream([1], Sampling(rules={"sequence_bias": {(3,): 1.0, (4, 5000): 1.0}}), heard)


def test_of_a_call_with_a_refused_prompt_none_runs(engine: Engine) -> None:
    free = engine.free_cache_tokens
    with pytest.raises(ConfigError, match="the prompt has 0 tokens"):
        engine.generate([[1], [2], []], max_new_tokens=2)
    with pytest.raises(ConfigError, match="max_new_tokens is 0"):
        engine.generate([[1]], max_new_tokens=0)
    assert engine.free_cache_tokens == free
    assert engine.generate([], 2) == []


def test_a_forked_process_neither_asks_nor_closes(engine: Engine, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as child:
        child.setattr("os.getpid", lambda: 1)
        with pytest.raises(ConfigError, match="this is process 1, forked from it"):
            engine.submit([1])
        engine.close()
    assert engine.generate(PROMPTS[:1], NEW_TOKENS) == expected(model)[:1]


def test_bad_arguments_are_refused_before_a_process_starts(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no config"):
        Engine(tmp_path)
    with pytest.raises(ConfigError, match=r"^dtype is 'int8'"):
        Engine(model, dtype="int8")
    with pytest.raises(ConfigError, match=r"^threads is 0"):
        Engine(model, threads=0)
    with pytest.raises(ConfigError, match=r"^attention is 0"):
        Engine(model, attention=0)
    for name, value in itertools.product(
        ("answer_timeout_seconds", "start_timeout_seconds"), (0, math.nan, math.inf, "1", True)
    ):
        with pytest.raises(ConfigError, match=rf"^{name} is {value!r}, but it must be a number above 0 and at most 1e"):
            Engine(model, **{name: value})
    numbers = ("attention", "experts", "cache_tokens", "batch_tokens", "threads", "max_restarts", "redundant_experts")
    for name, value in itertools.product(numbers, (1.0, True, "1", np.int64(1))):
        with pytest.raises(ConfigError, match=rf"^{name} is {re.escape(repr(value))}, but it must be an int"):
            Engine(model, **{name: value})
    with pytest.raises(ConfigError, match="at most 6 expert workers"):
        Engine(model, experts=7)
    with pytest.raises(ConfigError, match=r"^payload is 'int4'.* auto, raw, lossless, int8"):
        Engine(model, payload="int4")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^launcher is 'mpi'"):
        Engine(model, launcher="mpi")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^max_restarts is -1"):
        Engine(model, max_restarts=-1)
    with pytest.raises(ConfigError, match=r"^max_restarts is 1, .* 0 under torchrun"):
        Engine(model, max_restarts=1, launcher="torchrun")


def _cut(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _empty(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"")


def _only_bin(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def _missing_shard(path: Path) -> None:
    (path / "model.safetensors").unlink()  # it would go before an index
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-2.safetensors"}}')


def _broken_index(path: Path) -> None:
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text("[")


def _index_to_elsewhere(path: Path) -> None:
    (path / "model.safetensors").rename(path.parent / "model.safetensors")
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../model.safetensors"}}')


def _broken_config(path: Path) -> None:
    (path / "config.json").write_text('{"model_type":')


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_cut, r"model\.safetensors' is no whole safetensors file"),
        (_empty, r"model\.safetensors' is no whole safetensors file"),
        (_only_bin, r"holds no model\.safetensors \(it holds pytorch_model\.bin, a pickle.*save_pretrained"),
        (_missing_shard, r"holds no model-2\.safetensors"),
        (_broken_index, r"index\.json' is not an index"),
        (_index_to_elsewhere, r"shard '\.\./model\.safetensors', which is not the name of a file beside it"),
        (_broken_config, r"config\.json' cannot be read"),
    ],
)
def test_a_directory_that_is_no_whole_model_is_refused_before_a_process_starts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None], words: str
) -> None:
    path = Path(shutil.copytree(model, tmp_path / "model"))
    damage(path)
    monkeypatch.setattr("laconic.infer.launch.LocalWorker", None)  # a start would raise a TypeError
    with pytest.raises(ModelError, match=words):
        Engine(path)


@pytest.mark.slow
@pytest.mark.parametrize("link", ["tcp", "group"])
@pytest.mark.parametrize("role", ["attention", "expert"])
def test_a_lost_worker_fails_requests_at_once(model: Path, role: str, link: Any) -> None:
    with Engine(model, attention=2, experts=2, threads=1, link=link) as engine:
        assert engine.generate(PROMPTS[:2], NEW_TOKENS) == expected(model)[:2]
        requests = [engine.submit(prompt, 2000) for prompt in PROMPTS]
        time.sleep(0.5)
        lost = next(worker for worker in engine.workers if worker.role == role and worker.number == 1)
        os.kill(lost.pid, signal.SIGKILL)
        start = time.monotonic()
        for request in requests:
            with pytest.raises(CollectiveError, match=rf"{role} worker 1 \(pid {lost.pid}\) was killed by SIGKILL"):
                request.result(patient(60))
        assert time.monotonic() - start < patient(20)  # two seconds where processors are free
        with pytest.raises(CollectiveError, match="was killed"):
            engine.submit([1])
    for worker in engine.workers:
        with pytest.raises(ProcessLookupError):
            os.kill(worker.pid, 0)


@pytest.mark.slow
@pytest.mark.parametrize("link", ["tcp", "group"])
def test_an_expert_worker_that_hangs_is_given_up(model: Path, link: Any) -> None:
    with Engine(model, attention=2, answer_timeout_seconds=2.0, threads=1, link=link) as engine:
        assert engine.generate(PROMPTS[:2], NEW_TOKENS) == expected(model)[:2]
        os.kill(engine.workers[2].pid, signal.SIGSTOP)
        start = time.monotonic()
        requests = [engine.submit(prompt, 100) for prompt in PROMPTS]
        for request in requests:
            with pytest.raises(CollectiveError, match=r"expert worker 0 is lost: it did not answer within 2 s"):
                request.result(patient(120))
        assert time.monotonic() - start < patient(2 + 40)
        with pytest.raises(CollectiveError, match="did not answer"):
            engine.submit([1])


@pytest.mark.slow
def test_an_attention_worker_that_hangs_is_given_up_and_one_that_is_slow_is_not(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laconic.infer.watch._ATTRIBUTION_SECONDS", 2.0)
    with Engine(model, experts=0, answer_timeout_seconds=1.0, threads=1, max_restarts=1) as engine:
        slow = engine.submit([1], 4000)  # tells nothing until it ends, but its forwards do
        with pytest.raises(TimeoutError):
            slow.result(5)
        stopped = engine.workers[0].pid
        os.kill(stopped, signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(CollectiveError, match=rf"attention worker 0 \(pid {stopped}\).* no progress within 3 s"):
            slow.result(patient(30))
        assert 1 < time.monotonic() - start < patient(10)
        assert engine.submit(PROMPTS[0], NEW_TOKENS).result(patient(60)) == expected(model)[0]
        with pytest.raises(ProcessLookupError):
            os.kill(stopped, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("role", "link"), [("attention", "tcp"), ("expert", "tcp"), ("expert", "group")])
def test_after_a_restart_requests_are_served_again(model: Path, role: str, link: Any) -> None:
    """Those in flight fail by name within two seconds; those that come before the workers are back wait for them."""
    with Engine(model, attention=1, experts=2, threads=1, max_restarts=1, link=link) as engine:
        lost = next(worker for worker in engine.workers if worker.role == role)
        assert engine.generate(PROMPTS[:2], NEW_TOKENS) == expected(model)[:2]
        messages = engine.traffic[0].messages
        requests = [engine.submit(prompt, 2000) for prompt in PROMPTS]
        os.kill(lost.pid, signal.SIGKILL)
        start = time.monotonic()
        for request in requests:
            with pytest.raises(CollectiveError, match=rf"{role} worker 0 \(pid {lost.pid}\) was killed by SIGKILL"):
                request.result(patient(60))
        assert time.monotonic() - start < patient(2)
        assert engine.error is None
        waiting = [engine.submit(prompt, NEW_TOKENS) for prompt in PROMPTS]
        cancelled = engine.submit(PROMPTS[0], 2000)
        assert cancelled.cancel()
        assert [request.result(patient(120)) for request in waiting] == expected(model)
        assert engine.num_restarts == 1
        assert engine.traffic[0].messages > messages
        assert lost.pid not in [worker.pid for worker in engine.workers]
        # There is no second restart.
        os.kill(engine.workers[-1].pid, signal.SIGKILL)
        with pytest.raises(CollectiveError, match=r"expert worker 1 .* was killed"):
            engine.submit([1], 2000).result(patient(60))
        with pytest.raises(CollectiveError, match=r"expert worker 1 .* was killed"):
            engine.submit([1])


@pytest.mark.slow
def test_an_engine_that_is_closed_while_it_restarts_ends_at_once(model: Path) -> None:
    engine = Engine(model, threads=1, max_restarts=3)
    os.kill(engine.workers[1].pid, signal.SIGKILL)
    while engine.num_restarts == 0:
        time.sleep(0.01)
    waiting = engine.submit([1], 5)
    start = time.monotonic()
    engine.close()
    assert time.monotonic() - start < patient(20)
    with pytest.raises(CollectiveError, match="closed"):
        waiting.result(1)


@pytest.mark.slow
def test_a_model_that_is_gone_at_a_restart_fails_who_waits(tmp_path: Path) -> None:
    path = make("mixtral", tmp_path)
    with Engine(path, threads=1, max_restarts=2) as engine:
        (path / "config.json").unlink()
        os.kill(engine.workers[1].pid, signal.SIGKILL)
        while engine.num_restarts == 0:
            time.sleep(0.01)
        with pytest.raises(LaconicError, match=r"worker 0: .* holds no config\.json"):
            engine.submit([1], 5).result(patient(120))
        assert engine.num_restarts == 2
        with pytest.raises(LaconicError, match="config"):
            engine.submit([1], 5)


@pytest.mark.slow
def test_a_worker_that_cannot_load_its_weights_says_why(tmp_path: Path) -> None:
    path = make("mixtral", tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    with pytest.raises(ModelError, match=r"worker 0: the checkpoint in .* lacks"):
        Engine(path)


@pytest.mark.slow
def test_int8_rows_give_tokens_and_fewer_bytes(tmp_path: Path) -> None:
    """Rounded rows may lead to other tokens; most of those of a large enough margin stay."""
    path = make("mixtral", tmp_path, hidden_size=256)
    with Engine(path, threads=1, payload="int8") as engine:
        found, wanted = engine.generate(PROMPTS, NEW_TOKENS), expected(path)
        assert [len(tokens) for tokens in found] == [len(tokens) for tokens in wanted]
        assert sum(one[0] == other[0] for one, other in zip(found, wanted, strict=True)) >= 4
        for direction in engine.traffic:
            assert direction.coded == direction.messages
            assert direction.sent_nbytes < 0.4 * direction.raw_nbytes  # a quarter, scales, numbers and headers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "experts", "slicing", "payload"),
    [
        (1, 2, "experts", "lossless"),
        (2, 1, "tokens", "lossless"),
        (2, 2, "experts", "auto"),
        (3, 1, "experts", "raw"),
        (1, 3, "tokens", "auto"),
    ],
)
def test_tokens_stay_however_many_workers(
    model: Path, attention: int, experts: int, slicing: Slicing, payload: PayloadCoding
) -> None:
    plan = InferencePlan(num_micro_batches=2, num_slices=3, slicing=slicing, order="AASS")
    workers = {"attention": attention, "experts": experts, "batch_tokens": 24, "threads": 1}
    with Engine(model, plan=plan, payload=payload, **workers) as engine:
        assert engine.plan == replace(plan, order="greedy")
        assert engine.notes[0].startswith("order AASS runs as greedy: ")
        assert engine.generate(PROMPTS * 2, NEW_TOKENS) == expected(model) * 2
        assert len(engine.workers) == attention + experts


@pytest.mark.slow
def test_dense_models_and_no_expert_workers_are_served_whole(model: Path, tmp_path: Path) -> None:
    dense = make("llama", tmp_path)
    with Engine(dense, attention=2, plan=InferencePlan(num_micro_batches=2), payload="auto", threads=1) as engine:
        assert engine.generate(PROMPTS, NEW_TOKENS) == expected(dense)
        assert [worker.role for worker in engine.workers] == ["attention", "attention"]
        assert "without experts" in engine.notes[0]
    with Engine(dense, experts=0, threads=1) as engine:
        assert [note.partition(":")[0] for note in engine.notes] == ["checked"]
    with Engine(model, experts=0, threads=1) as engine:
        assert engine.generate(PROMPTS, NEW_TOKENS) == expected(model)
        assert [note.partition(":")[0] for note in engine.notes] == ["checked"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"experts": 2}, "experts is 2"),
        ({"experts": 1, "payload": "int8"}, "experts is 1, payload is 'int8'"),
        ({"payload": "lossless"}, "payload is 'lossless'"),
        (
            {"expert_loads": "loads.json", "redundant_experts": 1},
            "expert_loads is 'loads.json', redundant_experts is 1",
        ),
        ({"plan": InferencePlan(num_slices=2, shared_first=True)}, "num_slices (--slices) is 2, shared_first is True"),
        ({"plan": "auto"}, "plan is 'auto'"),
        ({"plan": "auto", "experts": 1}, "experts is 1, plan is 'auto'"),
    ],
)
def test_what_needs_expert_workers_is_refused_for_a_dense_model(
    tmp_path: Path, arguments: dict[str, Any], named: str
) -> None:
    it = "them" if ", " in named else "it"
    why = rf"but llama has no experts .*\(it is dense\), so every .*; leave {it} out"
    with pytest.raises(ConfigError, match=f"^{re.escape(named)}, {why}"):
        Engine(make("llama", tmp_path), **arguments)


@pytest.mark.parametrize(
    ("arguments", "named", "it"),
    [
        ({"payload": "lossless"}, "payload is 'lossless'", "it"),
        ({"expert_loads": "loads.json", "expert_device": "cpu"}, "expert_device is 'cpu', expert_loads is", "them"),
        ({"plan": InferencePlan(order="greedy")}, "order is 'greedy'", "it"),
    ],
)
def test_what_needs_expert_workers_is_refused_with_none(
    model: Path, arguments: dict[str, Any], named: str, it: str
) -> None:
    why = f"with experts = 0, but only expert workers use {it}; give at least one, or leave {it} out"
    with pytest.raises(ConfigError, match=f"^{named}.* {why}"):
        Engine(model, experts=0, **arguments)


def test_a_rank_of_torchrun_has_the_default_number_of_workers(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[bool] = []
    monkeypatch.setattr("laconic.infer.serve_rank", lambda: served.append(True))
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    serve_if_not_first(parser.parse_args(["--model", str(model)]))
    assert served == [True]
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 3, but 1 attention and 1 expert workers"):
        serve_if_not_first(parser.parse_args(["--model", str(model)]))


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
    texts = ["one", "another\u2028prompt"]  # no end of a line of a file
    (tmp_path / "prompts.txt").write_text("another\u2028prompt\r\n\n", encoding="utf-8-sig")
    flags = ["--prompts", str(tmp_path / "prompts.txt"), "--max-new-tokens", "6", "--slices", "2"]
    capsys.readouterr()  # of libraries that making a model has loaded
    assert main(["generate", "--model", str(path), "--prompt", "one", "--json", *flags]) == 0
    shown = json.loads(capsys.readouterr().out)["generations"]
    assert [each["prompt"] for each in shown] == texts
    assert [each["tokens"] for each in shown] == generated(path, [list(text.encode()) for text in texts], 6)


def test_the_command_refuses_what_it_cannot_do(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", str(model)]) == 2
    assert "there is no prompt" in capsys.readouterr().err
    assert main(["generate", "--model", str(tmp_path), "--prompt", "x"]) == 2
    assert "holds no config.json" in capsys.readouterr().err
    assert main(["generate", "--model", str(model), "--prompt", "x"]) == 2
    assert "no tokenizer" in capsys.readouterr().err
