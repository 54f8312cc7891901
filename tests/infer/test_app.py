"""The application that environment variables describe."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from starlette.testclient import TestClient

from laconic.errors import ConfigError, ModelError
from laconic.infer import Engine, InferencePlan
from laconic.infer.app import _EngineArguments, _ServerArguments, create_app_from_env
from laconic.infer.bench.demo_model import save_demo_model
from laconic.infer.server import ServerSettings
from tests.distributed.processes import wait_until
from tests.patience import patient

ASK = {"model": "tiny", "prompt": "Hello", "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_demo_model(path, hidden_size=32, layers=1, experts=4)
    return path


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MODEL", "ENGINE", "SERVER", "API_KEY"):
        monkeypatch.delenv(f"LACONIC_{name}", raising=False)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("MODEL", "", "LACONIC_MODEL is not set; set it to the directory"),
        ("ENGINE", "experts=2", "LACONIC_ENGINE is 'experts=2', but it must be a JSON object"),
        ("ENGINE", "[]", r"LACONIC_ENGINE is '\[\]', but it must be a JSON object"),
        ("ENGINE", '{"experts": 2, "experts": 3}', "but it must be a JSON object: 'experts' comes twice"),
        ("ENGINE", '{"expert": 2}', "LACONIC_ENGINE has expert, but fields are attention, experts, plan"),
        ("ENGINE", '{"plan": {"r1": 2}}', "LACONIC_ENGINE has plan.r1, but fields are num_micro_batches, num_slices"),
        ("ENGINE", '{"experts": "2"}', "LACONIC_ENGINE: experts is '2', but it must be a valid integer"),
        ("ENGINE", '{"plan": {"order": "AAAA"}}', "order"),
        ("ENGINE", '{"threads": 0}', "threads is 0"),
        ("SERVER", '{"api_key": "secret"}', "LACONIC_SERVER has api_key, but fields are model_name"),
        ("SERVER", '{"max_waiting": -1}', "max_waiting is -1, but it must be a whole number"),
        pytest.param("SERVER", "[" * 100_000, "LACONIC_SERVER is .*, but it must be a JSON object", id="nested"),
        ("API_KEY", "", "api_key must be of printable ASCII characters and not empty"),
    ],
)
def test_mistakes_are_named(
    model: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv("LACONIC_MODEL", str(model))
    monkeypatch.setenv(f"LACONIC_{variable}", value)
    with pytest.raises((ConfigError, ValueError), match=message):
        create_app_from_env()


def test_every_argument_and_field_has_its_place() -> None:
    engine = set(inspect.signature(Engine).parameters) - {"model_dir", "launcher", "trace"}
    assert set(_EngineArguments.model_fields) == engine
    server = {field.name for field in dataclasses.fields(ServerSettings)} - {"api_key"}
    assert set(_ServerArguments.model_fields) == server


def test_arguments_reach_the_engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr("laconic.infer.app.Engine", lambda directory, **arguments: given.update(arguments))
    monkeypatch.setattr("laconic.infer.app.create_app", lambda *_: None)
    monkeypatch.setenv("LACONIC_MODEL", str(model))
    wanted = {"plan": "auto", "rates": "rates.json", "device": "cuda", "payload": "lossless", "max_restarts": 2}
    for arguments in (wanted, wanted | {"plan": {"num_slices": 3}}):
        monkeypatch.setenv("LACONIC_ENGINE", json.dumps(arguments))
        create_app_from_env()
        assert given.pop("plan") in ("auto", InferencePlan(num_slices=3))
        assert given == {name: value for name, value in wanted.items() if name != "plan"}


def test_a_directory_without_a_model_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LACONIC_MODEL", str(tmp_path))
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        create_app_from_env()


@pytest.mark.usefixtures("fresh_workers")
@pytest.mark.ci
def test_the_engine_serves_and_ends_with_the_application(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LACONIC_MODEL", str(model))
    monkeypatch.setenv("LACONIC_ENGINE", '{"experts": 0, "cache_tokens": 64}')
    monkeypatch.setenv("LACONIC_SERVER", '{"max_waiting": 3}')
    monkeypatch.setenv("LACONIC_API_KEY", "secret")
    before = set(psutil.Process().children())
    app = create_app_from_env()
    with monkeypatch.context() as other_process:
        other_process.setattr(os, "getpid", lambda: 1)
        with pytest.raises(ConfigError, match="is served by 1, which has no engine"), TestClient(app):
            pass
    with TestClient(app) as client:
        (worker,) = set(psutil.Process().children()) - before
        assert client.post("/v1/completions", json=ASK).status_code == 401
        client.headers["Authorization"] = "Bearer secret"
        done = client.post("/v1/completions", json=ASK)
        assert done.json()["usage"]["completion_tokens"] == 4
        assert "laconic_cache_tokens 64" in client.get("/metrics").text
    assert not worker.is_running()


@pytest.mark.slow
def test_uvicorn_builds_the_application(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "--factory", "laconic.infer.app:create_app_from_env"]
    variables = {"LACONIC_MODEL": str(model), "LACONIC_ENGINE": json.dumps({"plan": {"num_slices": 2}})}
    server = subprocess.Popen([*command, "--port", str(port)], env=os.environ | variables)
    try:
        url = f"http://127.0.0.1:{port}"

        def up() -> bool:
            try:
                return httpx.get(f"{url}/health").status_code == 200
            except httpx.TransportError:
                return False

        wait_until(up, 60)
        workers = psutil.Process(server.pid).children()
        assert len(workers) == 2
        assert httpx.post(f"{url}/v1/completions", json=ASK).json()["choices"][0]["finish_reason"] == "length"
        server.send_signal(signal.SIGTERM)
        server.wait(patient(20))
        assert not any(worker.is_running() for worker in workers)
    finally:
        server.kill()
        server.wait()
