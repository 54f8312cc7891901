"""Engines whose workers are small programs: real processes and pipes, but no model, so that faults cost little."""

from __future__ import annotations

from pathlib import Path

import pytest

from laconic.infer import Engine
from laconic.infer.control import LocalWorker

SILENT, HALF_A_LINE, NO_EVENT, STALLED, SLOW, DESERTED = 90, 91, 92, 93, 94, 95
"""First tokens of prompts at which a worker answers nothing, dies amid a line, writes something else, answers after
1.5 s, of which one of its micro-batches makes progress in none or in each, or ends because its peers have."""

WORKER = f"""
import json, os, sys, time
def say(what, **values):
    sys.stdout.write(json.dumps({{"is": what}} | values) + "\\n")
    sys.stdout.flush()
say("ready", nbytes=1, notes=[], eos_token_ids=[])
for line in sys.stdin:
    command = json.loads(line)
    if command["do"] == "stop":
        break
    if command["do"] != "request":
        continue
    first, name = command["prompt"][0], command["name"]
    if first == {SILENT}:
        continue
    if first == {HALF_A_LINE}:
        os.write(1, b'{{"is": "finished", "na')
        os._exit(7)
    if first == {DESERTED}:
        say("deserted")
        os._exit(0)
    if first == {NO_EVENT}:
        os.write(1, b"Segmentation fault\\n")
        continue
    for step in range(30 if first in ({STALLED}, {SLOW}) else 0):
        say("progress", stalled_seconds=0.05 * step if first == {STALLED} else 0.0)
        time.sleep(0.05)
    tokens = [first] * command["sampling"]["max_new_tokens"]
    for token in tokens if command["stream"] else []:
        say("tokens", tokens=[[name, token, None, []]])
    nothing = dict(raw_nbytes=0, sent_nbytes=0, messages=0, coded=0)
    say("finished", name=name, tokens=tokens, error=None, traffic=[nothing, nothing])
"""


def script_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers that are started from now on be WORKER: each answers with the first token of the prompt."""
    monkeypatch.setattr(LocalWorker, "program", ("-S", "-c", WORKER))


def scripted_engine(model: Path, attention: int = 1, answer_timeout_seconds: float = 120.0) -> Engine:
    """Start an engine of attention workers; `script_workers` comes first."""
    timeout = {"answer_timeout_seconds": answer_timeout_seconds}
    return Engine(model, attention=attention, experts=0, threads=1, **timeout)
