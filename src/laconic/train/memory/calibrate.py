"""Measures the planner's tables for a model: error of the gradient and time of a step by kind of site and format.

All sites of one kind are kept in one format and nothing else is.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor, nn

from laconic.activations import Site, compress_activations, decompress_activations, find_sites
from laconic.cost import Batch
from laconic.cost.memory.saved_tensors import Unit
from laconic.errors import DataError
from laconic.formats import BlockFormat
from laconic.options import DEFAULT_CODES
from laconic.train.config.schema import DataConfig, ModelConfig
from laconic.train.data.corpus import TokenDataset, check_vocab, prepare
from laconic.train.data.sampler import sample_id
from laconic.train.memory.trace import traced_job
from laconic.train.model import build_model
from laconic.train.model_source import own_tokenizer

_CODES = tuple(code for _, code in sorted(DEFAULT_CODES.items(), reverse=True))
"""Formats that are measured, finest first; behind the layers only those of 8 bits."""

_BLOCK_SIZE = 64
_CPU = torch.device("cpu")


def calibrate(model: nn.Module, batches: Sequence[Tensor]) -> dict[str, Any]:
    """Measure a causal language model of transformers. The model stays unchanged.

    Args:
        model: without compressed activations. Gradients are cleared.
        batches: tokens, int64 [sequences, length] each. The error is that of their gradients together.

    Returns:
        {"format": "laconic sensitivity", "source": text, "errors": {kind: {code: error}}, "time_shares": {kind: {code:
        share}}}: norm of the gradient's error over norm of the gradient, added seconds over seconds of the exact step.

    Raises:
        PlanError: the model cannot be traced, see `laconic.train.memory.trace`.
        DataError: there are no batches, or the exact gradient is zero or not finite.
    """
    if not batches:
        raise DataError("batches are empty, but at least one is needed to measure gradients")
    sequences, length = batches[0].shape
    job = traced_job(model, Batch(sequences, length))
    units, traced = [unit for stage in job.stages() for unit in stage.units()], job.model
    known = {site.name for site in find_sites(model)}
    exact, exact_seconds = _gradients(model, batches)
    norm = torch.stack([grad.double().square().sum() for grads in exact for grad in grads.values()]).sum().sqrt().item()
    if not 0 < norm < float("inf"):
        raise DataError(f"the norm of the exact gradient is {norm}, but errors are relative to it; use another batch")

    errors: dict[str, dict[str, float]] = {}
    shares: dict[str, dict[str, float]] = {}
    for kind in sorted({unit.kind for unit in units if unit.num_elements is not None}):
        sites = {site for unit in units if _belongs(unit, kind) for site in unit.sites} & known
        for code in _CODES:
            format = BlockFormat(code, _BLOCK_SIZE)
            if kind == "head" and format.bits < 8:
                continue
            compress_activations(model, policy=_only(sites, format))
            try:
                got, seconds = _gradients(model, batches)
            finally:
                decompress_activations(model)
            off = sum(
                (grads[name].double() - reference[name].double()).square().sum().item()
                for grads, reference in zip(got, exact, strict=True)
                for name in reference
            )
            errors.setdefault(kind, {})[code] = off**0.5 / norm
            shares.setdefault(kind, {})[code] = max(0.0, seconds / exact_seconds - 1)
    parameters = f"{traced.num_parameters:,} parameters ({traced.family}, {traced.num_layers} layers)"
    where = next(model.parameters()).device
    device = torch.cuda.get_device_name(where) if where.type == "cuda" else platform.processor() or platform.machine()
    return {
        "format": "laconic sensitivity",
        "source": f"measured by laconic plan --calibrate, {datetime.now(UTC):%Y-%m-%d}: {parameters}, {len(batches)} "
        f"batches of {sequences} x {length} tokens, blocks of {_BLOCK_SIZE}, {device}, torch {torch.__version__}",
        "errors": errors,
        "time_shares": shares,
    }


def calibrate_directory(
    path: str,
    data: Sequence[str] = (),
    tokenizer: str | None = None,
    *,
    sequences: int = 4,
    sequence_length: int = 256,
    num_batches: int = 4,
) -> dict[str, Any]:
    """`calibrate` for a model directory and text files, as `laconic train` would read them.

    Args:
        path: of a directory with config.json and weights; without weights the model is a random one.
        data: files, directories or patterns; empty is the Python standard library.
        tokenizer: a tokenizer.json; None takes the directory's own, or bytes if it has none.
        sequences, sequence_length, num_batches: what is measured on.

    Raises:
        PlanError, DataError, ConfigError, ModelError: see `calibrate`, and what `laconic train` refuses.
    """
    corpus = prepare(DataConfig(paths=tuple(data), tokenizer=tokenizer or own_tokenizer(path)))
    model = build_model(ModelConfig(path=path), corpus.vocab_size, sequence_length, 0, corpus.end_of_document)
    check_vocab(corpus, next(model.get_input_embeddings().parameters()).shape[0])
    device = torch.device("cuda") if torch.cuda.is_available() else _CPU
    nn.Module.to(model, device)
    dataset = TokenDataset(corpus.train, sequence_length)
    picked = [sample_id(0, index, len(dataset)) for index in range(sequences * num_batches)]
    windows = [dataset[sample][:sequence_length] for sample in picked]
    batches = [torch.stack(windows[at : at + sequences]).to(device) for at in range(0, len(windows), sequences)]
    return calibrate(model, batches)


def _belongs(unit: Unit, kind: str) -> bool:
    """Whether a unit is measured with a kind: an output projection goes with the attention that rebuilds its input."""
    return unit.kind == kind or (kind == "attention" and unit.rebuilt_with is not None)


def _only(sites: set[str], format: BlockFormat) -> Callable[[Site], BlockFormat | None]:
    return lambda site: format if site.name in sites else None


def _gradients(model: nn.Module, batches: Sequence[Tensor]) -> tuple[list[dict[str, Tensor]], float]:
    """Gradients by parameter name for every batch, on the CPU, and the seconds of the fastest forward and backward."""
    found, seconds = [], []
    for ids in batches:
        model.zero_grad(set_to_none=True)
        with torch.random.fork_rng():
            torch.manual_seed(0)  # the same dropout each time
            started = _now(ids.device)
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            seconds.append(_now(ids.device) - started)
        found.append({name: p.grad.cpu().clone() for name, p in model.named_parameters() if p.grad is not None})
    model.zero_grad(set_to_none=True)
    return found, min(seconds)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
