"""Part 5: 50 training steps of a Llama of 1 and of 3 billion parameters in bf16: peak, tokens per second, loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import laconic
from benchmarks.gpu_day.setting import Setting
from benchmarks.registry import Table
from laconic.optim import AdamW8bit

_LAYERS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True}
_SIZES: dict[str, dict[str, Any]] = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256, **_LAYERS},
    "3B": {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "vocab_size": 128256,
        **_LAYERS,
        "num_attention_heads": 24,
        "head_dim": 128,
    },
}
"""Llama 3.2's."""
_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 128} | _LAYERS
_TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_HEADER = ["", "peak GiB", "tokens/s", "loss of step 1", "of step 10", "of the last", "steps"]


@dataclass(frozen=True)
class _Variant:
    """How a model is trained."""

    prepare: Callable[[nn.Module, Tensor], None]
    optimizer: Callable[..., torch.optim.Optimizer]
    is_slow_to_begin: bool = False


def _fused_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4, fused=True)


_VARIANTS = {
    "exact, fused AdamW": _Variant(lambda model, ids: None, _fused_adamw),
    "laconic: nf4, attention int8, chunked loss, AdamW8bit": _Variant(
        lambda model, ids: _compress(model, ids), lambda parameters: AdamW8bit(parameters, lr=3e-4)
    ),
    "activation checkpointing, fused AdamW": _Variant(lambda model, ids: _checkpoint(model), _fused_adamw),
    "laconic, its layers compiled": _Variant(
        lambda model, ids: _compress_and_compile(model, ids), lambda parameters: AdamW8bit(parameters, lr=3e-4), True
    ),
    "exact, torch.compile, fused AdamW": _Variant(lambda model, ids: _compile(model), _fused_adamw, True),
}


def run(setting: Setting) -> None:
    """What begins at once for both sizes, then what compiles; the tables grow as rows come."""
    rows: dict[str, list[list[str]]] = {size: [] for size in _SIZES}
    for is_slow in (False, True):
        for size in _SIZES:
            for name, variant in _VARIANTS.items():
                if variant.is_slow_to_begin != is_slow:
                    continue
                with setting.report.section(f"{size}: {name}"):
                    rows[size].append([name, *_trained(setting, size, variant)])
                    setting.table(_table(setting, size, rows[size]))
                setting.free()


def _table(setting: Setting, size: str, rows: list[list[str]]) -> Table:
    batch, length = _batch_shape(setting, size)
    return Table(
        f"Training a {setting.sized('', 'tiny ')}Llama {size} in bf16, {batch} x {length} tokens a step",
        _HEADER,
        rows,
        "Peak: the allocator's, weights and moments included. The time is that of the steps after the tenth.",
    )


def _batch_shape(setting: Setting, size: str) -> tuple[int, int]:
    return setting.sized((4, 2048) if size == "1B" else (2, 2048), (2, 16))


def _trained(setting: Setting, size: str, variant: _Variant) -> list[str]:
    """The cells of a row. Weights and tokens are the same for every variant."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    steps, warm = setting.sized((50, 10), (12, 2))
    batch, length = _batch_shape(setting, size)
    sizes = setting.sized(_SIZES[size], _TINY)
    torch.manual_seed(0)
    with torch.device(setting.device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes), dtype=torch.bfloat16, trust_remote_code=False)
    model.train()
    tokens = _tokens(steps, batch, length, sizes["vocab_size"]).to(setting.device)
    variant.prepare(model, tokens[0])
    optimizer = variant.optimizer(model.parameters())
    losses: list[Tensor] = []

    def step() -> None:
        ids = tokens[len(losses)]
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())

    def first_steps() -> None:
        for _ in range(warm):
            step()

    def later_steps() -> None:
        for _ in range(steps - warm):
            step()

    peak = setting.peak_nbytes(first_steps)
    seconds = setting.seconds_once(later_steps)
    rate = batch * length * (steps - warm) / seconds
    shown = [losses[0], losses[min(9, steps - 1)], losses[-1]]
    memory = "not measured" if setting.rehearses else f"{peak / 2**30:.1f}"
    return [memory, f"{rate:,.0f}", *(f"{x.item():.4f}" for x in shown), str(steps)]


def _tokens(steps: int, batch: int, length: int, vocabulary: int) -> Tensor:
    """[steps, batch, length] of a chain in which each token has four successors: there is something to learn."""
    generator = torch.Generator().manual_seed(0)
    known = min(vocabulary, 1024)
    successors = torch.randint(known, (known, 4), generator=generator)
    draws = torch.randint(4, (length, steps * batch), generator=generator)
    columns = [torch.randint(known, (steps * batch,), generator=generator)]
    for draw in draws[1:]:
        columns.append(successors[columns[-1], draw])
    return torch.stack(columns, dim=1).view(steps, batch, length)


def _compress(model: nn.Module, ids: Tensor) -> None:
    laconic.compress_activations(model, 4, attention="int8", loss="chunked", sequence_length=ids.shape[1])


def _compress_and_compile(model: Any, ids: Tensor) -> None:
    _compress(model, ids)
    for layer in model.model.layers:
        layer.compile(backend="inductor" if ids.is_cuda else "aot_eager")


def _checkpoint(model: Any) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _compile(model: nn.Module) -> None:
    model.compile(backend="inductor" if next(model.parameters()).is_cuda else "aot_eager")
