"""Bytes and step time of a Llama block and of demo-size training, compressed beside unmodified and recomputed.

    python -m benchmarks.activations --out benchmarks/results/activations_NAME.md

Every variant takes one step in turn, again and again, so that a machine whose speed drifts slows all of them; the ratio
is the median over the rounds. U is batch x sequence x hidden x 2 bytes.
"""

from __future__ import annotations

import argparse
import copy
import platform
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import laconic
from laconic.activations import SavedTensorTracker
from laconic.formats import BlockFormat
from laconic.train.config import ModelConfig
from laconic.train.model import build_model

Step = Callable[[], object]


def ratios(steps: dict[str, Step], rounds: int) -> dict[str, tuple[float, float]]:
    """Median seconds of each step and median ratio to the first, in turns; two warm-up rounds are not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 2):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - started)
    first = next(iter(seconds.values()))[2:]
    return {
        name: (median(taken[2:]), median(b / a for a, b in zip(first, taken[2:], strict=True)))
        for name, taken in seconds.items()
    }


def block(hidden: int, length: int, rounds: int) -> list[str]:
    """One Llama block with multi-head attention and a 4x feed-forward layer, bf16."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    torch.manual_seed(0)
    heads = hidden // 64
    config = LlamaConfig(hidden_size=hidden, intermediate_size=4 * hidden, num_attention_heads=heads)
    config._attn_implementation = "sdpa"
    plain = LlamaDecoderLayer(config, 0).to(torch.bfloat16)
    x = torch.randn(1, length, hidden).to(torch.bfloat16)
    positions = LlamaRotaryEmbedding(config)(x, torch.arange(length)[None])
    inputs = {"hidden_states": x, "position_embeddings": positions}

    def compressed(**options: object) -> nn.Module:
        twin = copy.deepcopy(plain)
        laconic.compress_activations(twin, example_inputs=inputs, **options)
        return twin

    def forward(layer: nn.Module, source: Tensor) -> Tensor:
        out = layer(source, position_embeddings=positions)
        return out[0] if isinstance(out, tuple) else out

    def recomputed(source: Tensor) -> Tensor:
        return checkpoint(lambda t: forward(plain, t), source, use_reentrant=False)

    layers = {"nf4, block 64": compressed(bits=4), "int8, block 64": compressed(bits=8)}
    forwards: dict[str, Callable[[Tensor], Tensor]] = {"unmodified": lambda t: forward(plain, t)}
    forwards |= {f"laconic {name}": lambda t, layer=layer: forward(layer, t) for name, layer in layers.items()}
    forwards["activation checkpointing"] = recomputed

    def step(run: Callable[[Tensor], Tensor]) -> None:
        run(x.clone().requires_grad_()).backward(x)
        for layer in (plain, *layers.values()):
            layer.zero_grad(set_to_none=True)

    unit = length * hidden * 2
    measured = ratios({name: lambda run=run: step(run) for name, run in forwards.items()}, rounds)
    lines = [
        f"## One Llama block: hidden {hidden}, {heads} heads, feed-forward {4 * hidden}, {length} tokens, bf16",
        "",
        "| | kept for backward | of unmodified | step | of unmodified |",
        "|---|---|---|---|---|",
    ]
    kept: dict[str, int] = {}
    for name, run in forwards.items():
        with SavedTensorTracker(layers.get(name.removeprefix("laconic "), plain)) as tracker:
            out = run(x.clone().requires_grad_())
        del out
        # A checkpointed region hides behind its own hooks; what it keeps is its input.
        kept[name] = tracker.nbytes if name != "activation checkpointing" else unit
        seconds, ratio = measured[name]
        share = kept[name] / kept["unmodified"]
        lines.append(f"| {name} | {kept[name] / unit:.2f} U | {share:.3f} | {seconds * 1e3:.0f} ms | {ratio:.3f} |")
    packed = 2 * BlockFormat("nf4").nbytes((length, hidden)) + 2 * BlockFormat("nf4").nbytes((length, 4 * hidden))
    attention = 4 * unit + 4 * length * heads + 2 * positions[0].nbytes
    lines += [
        "",
        f"The formula (q, k, v, output exact; log-sum-exp; rotary tables; 2 norms and gate/up at 4.25 bits) gives "
        f"{(packed + attention) / unit:.2f} U. Paper's account: 28 U unmodified, 7.75 U for AGoQ (ratio 0.277).",
        "",
    ]
    return lines


def training(rounds: int) -> list[str]:
    """Steps of the demo's model (forward, backward, AdamW) on random bytes."""
    lines = [
        "## Demo-size training: the model of `laconic train`, 8 x 256 bytes per step and process, fp32",
        "",
        "| | tokens/s | of unmodified | kept for backward |",
        "|---|---|---|---|",
    ]
    plain = build_model(ModelConfig(), 257, 256, 0)
    models: dict[str, nn.Module] = {"unmodified": plain}
    for name, bits in (("laconic nf4", 4), ("laconic int8", 8)):
        models[name] = copy.deepcopy(plain)
        laconic.compress_activations(models[name], bits)
    optimizers = {name: torch.optim.AdamW(model.parameters(), fused=True) for name, model in models.items()}
    ids = torch.randint(0, 257, (8, 256), generator=torch.Generator().manual_seed(0))

    def loss(name: str) -> Tensor:
        value: Tensor = models[name](input_ids=ids, labels=ids, use_cache=False).loss
        return value

    def step(name: str) -> None:
        loss(name).backward()
        optimizers[name].step()
        optimizers[name].zero_grad()

    measured = ratios({name: lambda name=name: step(name) for name in models}, rounds)
    for name, (seconds, ratio) in measured.items():
        with SavedTensorTracker(models[name]) as tracker:
            value = loss(name)
        del value
        kept = tracker.nbytes / ids.numel()
        lines.append(f"| {name} | {ids.numel() / seconds:,.0f} | {1 / ratio:.3f} | {kept:,.0f} bytes/token |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="Markdown file to write; printed otherwise")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lines = [
        "# Activations: bytes and time",
        "",
        f"`python -m benchmarks.activations --hidden {options.hidden} --length {options.length} "
        f"--rounds {options.rounds} --threads {options.threads}`",
        "",
        f"{date.today()}, {processor()}, torch {torch.__version__}",
        "",
        *block(options.hidden, options.length, options.rounds),
        *training(4 * options.rounds),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out is not None:
        options.out.write_text(text)
    return 0


def processor() -> str:
    """Name of the CPU."""
    try:
        text = Path("/proc/cpuinfo").read_text()
        return next(line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    sys.exit(main())
