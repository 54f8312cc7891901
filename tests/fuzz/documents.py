"""Targets that read text: plans, rates, configurations, token indexes, manifests, metrics, bodies of requests.

Their seeds are the files that releases wrote (tests/compatibility). JSON is changed as a tree, for changed bytes are
nearly always no JSON; what a checksum covers gets a new one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import struct
import tempfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch

from laconic.activations.recognize.plan import ActivationPlan
from laconic.cost import Batch, Job, Plan, Settings, load_plan
from laconic.cost.comm.rates import WireRates
from laconic.cost.hardware.compute import Sensitivity
from laconic.cost.infer import InferenceRates
from laconic.cost.moe import MoERates
from laconic.cost.planner.policy import by_bits
from laconic.errors import LaconicError
from laconic.formats.dcp import read_dcp_metadata
from laconic.formats.zip_manifest import manifest_sha256
from laconic.infer.messages import HEADER_LENGTH, Header, Rows, pack_rows, unpack_rows, unpack_sums
from laconic.infer.payload import coder_of
from laconic.infer.server.bodies import ChatBody, CompletionBody, parse_body
from laconic.infer.server.wire import Refusal
from laconic.schedule.pipeline import PipelineSchedule
from laconic.schedule.streams import StreamPlan
from laconic.train.checkpoint.manifest import read_manifest
from laconic.train.config.toml import load_config
from laconic.train.data.sources import read_documents
from laconic.train.data.token_file import TokenFile
from laconic.train.report.run_reader import load_runs
from tests.cost.shapes import Sizes, traced_llama
from tests.fuzz.target import Target

__all__ = ["DOCUMENTS", "changed_json"]

GOLDEN = Path(__file__).parents[1] / "compatibility" / "0.1.0"
REFUSALS = (LaconicError, Refusal)


# --- changing JSON as a tree ---

_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**53, -(2**63), 2**64, 10**30, 10**400, 0.5, -0.0, 1e-300, 1e308),
    *(float("inf"), float("nan"), "", "0", "nf4", "../../x", "/etc/passwd", "\0", "\ud800", "x" * 3000, [], [[]], {}),
    *({"": None}, {"code": "int8"}, ["a", 1, None], [0] * 300),
)


def changed_json(seed: bytes, dice: random.Random) -> bytes:
    """A JSON document after one to three changes of its tree."""
    tree = json.loads(seed)
    for _ in range(dice.choice((1, 1, 2, 3))):
        tree = _changed(tree, dice)
    text = json.dumps(tree)
    if dice.random() < 0.05:  # nested deeper than parsers recurse
        depth = dice.choice((500, 20_000, 200_000))
        text = text.replace(dice.choice(("null", "1", "[]", '""')), "[" * depth + "]" * depth, 1)
    return text.encode("utf-8", "surrogatepass")


def _changed(tree: Any, dice: random.Random) -> Any:
    """Walk down a random way, and change what is there."""
    below = list(tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ())
    if not below or dice.random() < 0.15:
        return deepcopy(dice.choice(_VALUES)) if dice.random() < 0.8 or not isinstance(tree, (int, float)) else -tree
    key, value = dice.choice(below)
    kind = dice.random()
    if kind < 0.75:
        tree[key] = _changed(value, dice)
    elif kind < 0.87:
        del tree[key]
    elif isinstance(tree, dict):
        tree[dice.choice(("extra", "", key + "x", key.upper()))] = value
    else:
        tree.insert(key, value)
    return tree


# --- what reads them ---


def _as_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    def run(data: bytes) -> object:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            path.write_bytes(data)
            read(path)
        return True

    return run


def _golden(name: str) -> Callable[[], list[bytes]]:
    return lambda: [(GOLDEN / name).read_bytes()]


def _json_file(name: str, read: Callable[[Path], object]) -> Target:
    return Target(_as_file(name, read), _golden(name), change=changed_json, refusals=REFUSALS)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _manifests() -> list[bytes]:
    return [path.read_bytes() for path in sorted(GOLDEN.glob("*run/checkpoints/*/manifest.json"))]


def _reseal_manifest(data: bytes) -> bytes:
    try:
        manifest = json.loads(data)
        manifest.pop("sha256", None)
        return json.dumps({**manifest, "sha256": manifest_sha256(manifest)}).encode()
    except (ValueError, AttributeError, TypeError, RecursionError):
        return data


def _read_token_index(data: bytes) -> object:
    (source,) = (GOLDEN / "cache").glob("*.bin")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "t.bin").symlink_to(source)
        (Path(folder) / "t.idx").write_bytes(data)
        file = TokenFile.open(Path(folder) / "t")
        assert file.offsets[-1] == len(file.tokens)
        assert np.asarray(file.tokens[: file.offsets[1]]).size == file.offsets[1]
    return True


def _reseal_token_index(data: bytes) -> bytes:
    return data[:-32] + hashlib.sha256(data[:-32]).digest() if len(data) > 32 else data


def _read_metrics(path: Path) -> object:
    run_dir = path.parent / "run"
    run_dir.mkdir()
    path.rename(run_dir / "metrics.jsonl")
    for name in ("config.toml", "activations.json", "summary.json"):
        (run_dir / name).symlink_to(GOLDEN / "run" / name)
    (run,) = load_runs([run_dir])
    return run.series("loss")


def _changed_lines(seed: bytes, dice: random.Random) -> bytes:
    lines = seed.splitlines()
    at = dice.randrange(len(lines))
    lines[at] = changed_json(lines[at], dice)
    return b"\n".join(lines) + dice.choice((b"\n", b""))


def _metadata(path: Path) -> object:
    return read_dcp_metadata(path.parent)


def _messages() -> list[bytes]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 8, generator=generator)
    found = []
    for dtype, coder in (
        (torch.float32, coder_of("raw")),
        (torch.bfloat16, coder_of("lossless")),
        (torch.float32, coder_of("int8")),
    ):
        rows = Rows(1, 0, 2, hidden.to(dtype), torch.zeros(6, 2, dtype=torch.int32), torch.ones(6, 2))
        header, body = pack_rows(rows, coder)
        found.append(bytes(header.to_tensor().numpy().tobytes()) + bytes(body.tolist()))
    return found


def _read_message(data: bytes) -> object:
    """As `Connection.receive` does, from a peer that may say anything but has sent no more than it has."""
    if len(data) < 8 * HEADER_LENGTH:
        return False
    numbers = struct.unpack_from(f"<{HEADER_LENGTH}q", data)
    header = Header.from_tensor(torch.tensor(numbers, dtype=torch.int64))
    body = torch.frombuffer(bytearray(data[8 * HEADER_LENGTH :]), dtype=torch.uint8) if len(data) > 88 else None
    if body is None or header.nbytes != body.numel():
        return True  # the connection waits for the rest
    if header.kind == 1:
        unpack_rows(header, body)
    elif header.kind == 2 and header.top_k == 0:
        unpack_sums(header, body)
    return True


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with open(os.devnull, "w") as null, contextlib.redirect_stderr(null):
        yield


def _read_config(path: Path) -> object:
    with _quiet():
        return load_config(path)


_COMPLETION = {"model": "m", "prompt": ["a", "b"], "max_tokens": 5, "temperature": 0.5, "stop": ["x"], "seed": 3}
_CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "logprobs": True,
    "top_logprobs": 2,
}


def _bodies(body: dict[str, Any]) -> Callable[[], list[bytes]]:
    return lambda: [json.dumps(body).encode()]


def _traced_plans() -> list[bytes]:
    batch = Batch(2, 64)
    job = Job(traced_llama(Sizes(64, 160, 2, 4, 2, 97, True, 16), batch), batch, settings=Settings(precision="fp32"))
    return [json.dumps(Plan.of(job, by_bits(job, [bits])).to_dict()).encode() for bits in (16, 4)]


DOCUMENTS = {
    "plan": _json_file("plan.json", load_plan),
    "traced_plan": Target(_as_file("plan.json", load_plan), _traced_plans, change=changed_json, refusals=REFUSALS),
    "activation_plan": Target(
        lambda data: bool(ActivationPlan.from_json(_text(data))),
        _golden("activation_plan.json"),
        change=changed_json,
        refusals=REFUSALS,
    ),
    "wire_rates": _json_file("wire_rates.json", WireRates.load),
    "moe_rates": _json_file("moe_rates.json", MoERates.load),
    "inference_rates": _json_file("infer_rates.json", InferenceRates.load),
    "sensitivity": _json_file("sensitivity.json", Sensitivity.load),
    "stream_plan": Target(
        lambda data: bool(StreamPlan.from_json(_text(data))),
        _golden("streams.json"),
        change=changed_json,
        refusals=REFUSALS,
    ),
    "pipeline": Target(
        lambda data: bool(PipelineSchedule.parse(_text(data))), _golden("pipeline.txt"), refusals=REFUSALS
    ),
    "config": Target(_as_file("c.toml", _read_config), _golden("run/config.toml"), refusals=REFUSALS),
    "manifest": Target(
        _as_file("manifest.json", lambda path: read_manifest(path.parent)),
        _manifests,
        _reseal_manifest,
        change=changed_json,
        refusals=REFUSALS,
    ),
    "dcp_metadata": Target(_as_file(".metadata", _metadata), _golden("sharded/.metadata"), refusals=REFUSALS),
    "token_index": Target(
        _read_token_index,
        lambda: [path.read_bytes() for path in (GOLDEN / "cache").glob("*.idx")],
        _reseal_token_index,
        refusals=REFUSALS,
    ),
    "metrics": Target(
        _as_file("metrics.jsonl", _read_metrics),
        _golden("run/metrics.jsonl"),
        change=_changed_lines,
        refusals=REFUSALS,
    ),
    "json_lines": Target(
        _as_file("t.jsonl", lambda path: list(read_documents(path, "text"))),
        lambda: [b'{"text": "one"}\n{"text": "two", "id": 3}\n'],
        change=_changed_lines,
        refusals=REFUSALS,
    ),
    "worker_message": Target(_read_message, _messages, refusals=REFUSALS),
    "completion_body": Target(
        lambda data: bool(parse_body(CompletionBody, data)),
        _bodies(_COMPLETION),
        change=changed_json,
        refusals=REFUSALS,
    ),
    "chat_body": Target(
        lambda data: bool(parse_body(ChatBody, data)), _bodies(_CHAT), change=changed_json, refusals=REFUSALS
    ),
}
