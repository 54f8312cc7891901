"""The largest Llama that trains inside a limit of memory: laconic beside what others do best.

    python -m benchmarks.run largest --memory 3GB --threads 2 --out benchmarks/results/largest_NAME.md
    python -m benchmarks.run largest --memory 20GB --only "exact" "laconic, AdamW4bit"

Weights are in bf16, a step is of 1 x 1,024 tokens, the vocabulary has 32,000. The width follows from the memory, so
that the exact training has some sixteen layers; then layers are added until three steps no longer run. Every try is a
process of its own, whose data may take no more than what it has before the model is made and the memory that was asked
for (RLIMIT_DATA: heap and private mappings): the allocator of torch or of the C library fails beyond it, which the
table quotes. Tokens per second are those of the faster of the last two steps of the largest model; times its parameters
they are the arithmetic that was done in a second, the same for all if nothing were lost.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import laconic
from benchmarks.contenders import optimizers
from benchmarks.contenders.activations import checkpointed, compiled, compressed
from benchmarks.contenders.losses import torch_chunked
from benchmarks.contenders.optimizers import adamw4bit, adamw8bit, coded_gradients, in_backward, peer_adamw
from benchmarks.contenders.training import EXACT, Contender, built, not_installed
from benchmarks.kit.isolated_parts import end_with_parent, run_part
from benchmarks.kit.models import HEAD_DIM, causal_model
from benchmarks.registry import CASES, Options, Table, Text, benchmark
from laconic.activations.whole_model.report import brief
from laconic.cost import Batch, Choice, Layout, Settings
from laconic.cost.memory.saved_tensors import EXACT as UNPACKED
from laconic.cost.planner.largest import most_layers
from laconic.cost.planner.policy import by_bits
from laconic.cost.sizes import format_nbytes
from laconic.train.config.schema import ModelConfig
from laconic.train.memory.trace import traced_job
from laconic.train.model import sized_config

TOKENS, VOCAB = 1024, 32000
STEPS = 3
LAYERS = 16
"""Of the exact model, about."""
_EXACT_NBYTES = 10
"""For a weight of the exact model: bf16 weight, gradient and moments, and a share of activations."""
_MOST_SECONDS = 3600.0
"""For one try."""
_MAPPED_NBYTES = 65536
"""Tensors of so many bytes and more get a mapping of their own."""

_SMOKE_NBYTES = 700_000_000

LACONIC_8, LACONIC_4 = "laconic, AdamW8bit", "laconic, AdamW4bit"
IN_BACKWARD = "laconic, AdamW4bit, updates in backward"
_PLANNED: dict[str, dict[str, Any]] = {
    EXACT: {},
    LACONIC_8: {"optimizer": "adamw8bit", "loss": "chunked", "gradient_bits": 8},
    LACONIC_4: {"optimizer": "adamw4bit", "loss": "chunked", "gradient_bits": 8},
    IN_BACKWARD: {"optimizer": "adamw4bit", "loss": "chunked", "update_in_backward": True},
}
"""What the planner knows of rows."""
_SMOKE = (EXACT, LACONIC_4)


def contenders() -> list[Contender]:
    """The rows of the table; what peers leave to each other they do together."""
    activations = compressed(bits=4, attention="int8", loss="chunked")
    ours = [activations, coded_gradients(8)]
    stack = [checkpointed(), *([torch_chunked()] if hasattr(torch.nn, "LinearCrossEntropyOptions") else [])]
    others = {contender.name: contender for contender in optimizers.contenders()}

    def stacked(name: str) -> Contender:
        other = others[name]
        return Contender(
            f"recompute, chunked loss, {name}", [*stack, *other.changes], other.package, other.optional, other.cannot
        )

    return [
        Contender(EXACT),
        Contender("transformers' checkpointing", [checkpointed()]),
        Contender("torch.compile, memory budget 0.5", [compiled(0.5)], compiled=True),
        Contender("recompute, chunked loss", stack),
        Contender("recompute, chunked loss, torchao, AdamW4bit",
                  [*stack, peer_adamw("torchao.optim", "AdamW4bit")], package="torchao"),
        stacked("bitsandbytes, AdamW8bit"),
        stacked("GaLore, AdamW"),
        stacked("APOLLO"),
        stacked("torch, Adafactor"),
        Contender(LACONIC_8, [*ours, adamw8bit()]),
        Contender(LACONIC_4, [*ours, adamw4bit()]),
        Contender(IN_BACKWARD, [activations, in_backward(laconic.optim.AdamW4bit)]),
        Contender("laconic, AdamW4bit, recompute of layers", [checkpointed(), *ours, adamw4bit()]),
    ]  # fmt: skip


@dataclass(frozen=True)
class Try:
    """What became of three steps with so many layers.

    Attributes:
        failure: why there are no three steps; empty if there are.
        num_parameters: of the model, 0 if it was not made.
        peak_nbytes: resident at most, beyond what the process had before the model was made.
        seconds: of the faster of the last two steps.
    """

    num_layers: int
    failure: str = ""
    num_parameters: int = 0
    peak_nbytes: int = 0
    seconds: float = 0.0


def _sizes(hidden_size: int, num_layers: int) -> dict[str, int]:
    return {
        "hidden_size": hidden_size,
        "intermediate_size": -(-8 * hidden_size // 3 // 64) * 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": hidden_size // HEAD_DIM,
    }


def hidden_size_for(memory_nbytes: int) -> int:
    """The width with which exact training has some sixteen layers, a multiple of 128."""
    hidden = 128
    while _EXACT_NBYTES * (2 * VOCAB * hidden + LAYERS * 12 * hidden**2) <= memory_nbytes:
        hidden += 128
    return max(128, hidden - 128)


def _try(contender: Contender, hidden_size: int, num_layers: int, memory_nbytes: int | None, threads: int) -> Try:
    """Three steps in a process of its own, without a limit if `memory_nbytes` is None."""
    told = {"name": contender.name, "sizes": _sizes(hidden_size, num_layers), "memory_nbytes": memory_nbytes}
    command = [sys.executable, "-m", "benchmarks.largest", json.dumps(told | {"threads": threads})]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(_MAPPED_NBYTES)}
    part = run_part(contender.name, command, _MOST_SECONDS, environment=environment)
    for line in reversed(part.text.splitlines()):
        if line.startswith("{"):
            return Try(**json.loads(line))
    return Try(num_layers, part.failure.strip().splitlines()[-1] if part.failure else "it said nothing")


def _guess(contender: Contender, hidden_size: int, memory_nbytes: int, threads: int) -> int | Try:
    """The layers that may fit, by two tries without a limit; or a try that failed."""
    small, larger = (_try(contender, hidden_size, layers, None, threads) for layers in (6, 14))
    if small.failure or larger.failure:
        return small if small.failure else larger
    per_layer = max(1.0, (larger.peak_nbytes - small.peak_nbytes) / 8)
    return max(1, int(6 + (memory_nbytes - small.peak_nbytes) / per_layer))


def _largest(
    contender: Contender, hidden_size: int, memory_nbytes: int, threads: int, predicted: int | None
) -> tuple[Try | None, Try | None]:
    """The largest try that ran, and the smallest beyond it."""
    guess = predicted or _guess(contender, hidden_size, memory_nbytes, threads)
    if isinstance(guess, Try):
        return None, guess
    ran: dict[int, Try] = {}
    step = max(1, guess // 16)
    layers = guess
    while layers not in ran:
        found = ran[layers] = _try(contender, hidden_size, layers, memory_nbytes, threads)
        print(f"{contender.name}: {layers} layers: {found.failure or 'ran'}", file=sys.stderr, flush=True)
        fitting = max((n for n, one in ran.items() if not one.failure), default=0)
        failing = min((n for n, one in ran.items() if one.failure), default=0)
        if failing and fitting:
            layers = (fitting + failing) // 2
        elif failing:
            layers = max(1, failing - step)
        else:
            layers = fitting + step
        step *= 2
        if failing == fitting + 1:
            break
    return ran.get(fitting), ran.get(failing)


def _predicted(name: str, hidden_size: int, memory_nbytes: int) -> int | None:
    """The layers that the planner expects, where it knows the training."""
    if name not in _PLANNED:
        return None
    settings = Settings(precision="bf16-pure", device="cpu", **_PLANNED[name])
    config = sized_config(ModelConfig(**_sizes(hidden_size, 2), tie_word_embeddings=False), VOCAB, TOKENS)
    config.architectures = ["LlamaForCausalLM"]
    job = traced_job(config, Batch(1, TOKENS), Layout(), settings)
    bits, attention = (16, UNPACKED) if name == EXACT else (4, Choice("int8"))

    def choices(job: Any) -> Any:
        chosen = by_bits(job, [bits], attention)
        return chosen if chosen.prediction.peak_nbytes <= memory_nbytes else None

    return most_layers(job, choices)


@benchmark("largest", cases=[contender.name for contender in contenders()])
def largest(options: Options) -> Iterator[Table | Text]:
    """One table."""
    memory_nbytes = options.memory_nbytes or (_SMOKE_NBYTES if options.smoke else 3_000_000_000)
    hidden_size = hidden_size_for(memory_nbytes)
    predicted: dict[str, int | None] = {}
    found: list[tuple[Contender, Try | None, Try | None]] = []
    for contender in contenders():
        if contender.name not in (options.only or (_SMOKE if options.smoke else CASES["largest"])):
            continue
        missing = not_installed(contender)
        if missing is not None:
            found.append((contender, None, Try(0, missing.failure)))
            continue
        layers = predicted[contender.name] = _predicted(contender.name, hidden_size, memory_nbytes)
        found.append((contender, *_largest(contender, hidden_size, memory_nbytes, options.threads, layers)))
    exact = next((ran for contender, ran, _ in found if contender.name == EXACT), None)

    def beside(value: float, usual: float | None) -> str:
        return f"{value / usual:.2f}" if usual else ""

    rows = []
    for contender, ran, beyond in found:
        why = "" if beyond is None else beyond.failure
        if ran is None:
            rows.append([contender.name, *[""] * 6, why])
            continue
        layers = predicted[contender.name]
        speed = TOKENS / ran.seconds
        rows.append(
            [
                contender.name,
                str(ran.num_layers) + ("" if layers is None else f" ({layers})"),
                f"{ran.num_parameters / 1e6:.0f}",
                beside(ran.num_parameters, exact and exact.num_parameters),
                format_nbytes(ran.peak_nbytes),
                f"{speed:.0f}",
                beside(speed * ran.num_parameters, exact and TOKENS / exact.seconds * exact.num_parameters),
                why,
            ]
        )
    yield Table(
        f"The largest Llama that trains in {format_nbytes(memory_nbytes)}: hidden {hidden_size}, 1 x {TOKENS} tokens,"
        f" bf16, {options.thread_text}",
        [
            "",
            "layers (predicted)",
            "million parameters",
            "of exact",
            "resident at most",
            "tokens per second",
            "times parameters, of exact",
            "what ended the next larger one",
        ],
        rows,
        "Predicted by `most_layers` of laconic.cost.planner.largest, as `laconic plan --largest --reserve 0` does it.",
        failed=[contender.name for contender, ran, _ in found if ran is None and not contender.optional],
    )


def _status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}: this benchmark needs Linux")


def _run(name: str, sizes: dict[str, int], memory_nbytes: int | None, threads: int) -> Try:
    torch.set_num_threads(threads)
    contender = next(one for one in contenders() if one.name == name)
    torch.manual_seed(0)
    ids = torch.randint(0, VOCAB, (1, TOKENS))
    tiny = built(contender, causal_model("llama", 128, num_hidden_layers=1, vocab_size=256), ids % 256, 1e-4)
    if not contender.compiled:
        tiny.step(ids % 256)  # modules are loaded, threads and kernels are there
    del tiny
    before = _status("VmRSS")
    if memory_nbytes is not None:
        most = _status("VmData") + memory_nbytes
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    made, seconds = 0, []
    where = "making the model"
    torch.set_default_dtype(torch.bfloat16)
    try:
        how = {key: value for key, value in sizes.items() if key != "hidden_size"} | {"use_cache": False}
        model = causal_model("llama", sizes["hidden_size"], vocab_size=VOCAB, **how)
        made = sum(p.numel() for p in model.parameters())
        training = built(contender, model.train(), ids, 1e-4)
        for step in range(STEPS):
            where = f"step {step + 1}"
            started = time.perf_counter()
            loss = training.step(ids)
            seconds.append(time.perf_counter() - started)
            if not torch.isfinite(loss):
                raise ArithmeticError(f"the loss is {loss.item()}")
    except Exception as error:  # of whichever allocator
        return Try(sizes["num_hidden_layers"], f"{where}: {brief(error)}", made)
    peak = _status("VmHWM") - before
    return Try(sizes["num_hidden_layers"], "", made, peak, min(seconds[1:]))


if __name__ == "__main__":
    end_with_parent()
    print(json.dumps(asdict(_run(**json.loads(sys.argv[1])))), flush=True)
