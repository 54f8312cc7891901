"""Experts of inference held as codes: bytes and seconds of an expert worker, and what rounding does to a trained model.

The model is small and trained here for a few minutes, on the bytes of this project's pages: its loss says whether
rounding harms what training has made, not how far a large model would move.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.kit.timing import processor_clock, seconds_of
from benchmarks.registry import Options, Table, benchmark
from laconic.formats.blockwise import BlockFormat, BlockTensor
from laconic.infer.bench.demo_model import save_demo_model
from laconic.infer.coded_experts import keep_experts
from laconic.infer.expert_share import ExpertShare
from laconic.infer.load_check import difference
from laconic.moe.huggingface.blocks import find_blocks
from laconic.moe.huggingface.experts import FusedExperts
from laconic.ops import linear_blockwise
from laconic.options import EXPERT_BLOCK_SIZE, EXPERT_FORMATS, EXPERT_ROWS_FROM_CODES

_PAGES = Path(__file__).parent.parent / "docs"
_FEW_ROWS = (1, 2, 3, 4, 6, 8)
_TOKENS = 128
_BATCH = 8


@benchmark("expert-formats")
def expert_formats(options: Options) -> Iterator[Table]:
    """Experts in every format: bytes, seconds by rows and by path, and the logits of a small trained mixture."""
    yield _seconds(options)
    yield _paths(options)
    yield _logits(options)


def _seconds(options: Options) -> Table:
    width, hidden, num_experts = (64, 64, 4) if options.small else (2048, 768, 16)
    dtype = torch.bfloat16
    layer = _random_layer(width, hidden, num_experts, dtype)
    held = {name: keep_experts(name, "experts", layer) for name in EXPERT_FORMATS}
    rows_of_each = (1, 2, 4, 64)
    times: dict[int, dict[str, Any]] = {}
    for rows in rows_of_each:
        x, counts = torch.randn(rows * num_experts, width).to(dtype), torch.full((num_experts,), rows)
        with torch.no_grad():
            cases = {name: partial(each, x, counts) for name, each in held.items()}
            times[rows] = seconds_of(cases, options.rounds, clock=processor_clock)
    exact = ExpertShare([layer]).nbytes
    table = []
    for name, each in held.items():
        nbytes = ExpertShare([each]).nbytes
        cells = []
        for rows in rows_of_each:
            took = times[rows][name]
            cells += [f"{took / num_experts * 1e3:.3f}", f"{took.over(times[rows]['exact']):.2f}"]
        table.append([name, f"{nbytes / 2**20:.1f}", f"{exact / nbytes:.2f}", *cells])
    header = ["format", "MiB", "smaller by"]
    for rows in rows_of_each:
        header += [f"ms, {rows} rows", "of exact"]
    note = (
        f"{num_experts} experts of [{width}, {hidden}] in bfloat16, {options.thread_text}; processor milliseconds of"
        " one expert with as many rows."
    )
    return Table("Bytes and seconds of experts", header, table, note)


def _paths(options: Options) -> Table:
    """One product by both paths, from which EXPERT_ROWS_FROM_CODES comes."""
    outputs, inputs, num_matrices = (64, 64, 2) if options.small else (1536, 2048, 32)
    table = []
    for name in EXPERT_FORMATS[1:]:
        format = BlockFormat(name, EXPERT_BLOCK_SIZE)
        packed = [format.quantize(torch.randn(outputs, inputs).bfloat16()) for _ in range(num_matrices)]

        def from_codes(x: Tensor, packed: Sequence[BlockTensor] = packed, format: BlockFormat = format) -> None:
            for each in packed:
                linear_blockwise(x, each.codes, each.scales, code=format.code, block_size=format.block_size)

        def decoded_first(x: Tensor, packed: Sequence[BlockTensor] = packed) -> None:
            for each in packed:
                x @ each.dequantize().T

        cells = []
        for rows in _FEW_ROWS:
            x = torch.randn(rows, inputs).bfloat16()
            cases = {path.__name__: partial(path, x) for path in (from_codes, decoded_first)}
            times = seconds_of(cases, options.rounds, clock=processor_clock)
            cells.append(f"{times['from_codes'].over(times['decoded_first']):.2f}")
        table.append([name, *cells])
    note = (
        f"A matrix [{outputs}, {inputs}] in bfloat16, {options.thread_text}, {num_matrices} of them in turn."
        f" As many rows of an expert are multiplied from codes: {EXPERT_ROWS_FROM_CODES}."
    )
    header = ["format", *(f"{rows} rows" for rows in _FEW_ROWS)]
    return Table("Time of a product from codes, of one that decodes first", header, table, note)


def _random_layer(width: int, hidden: int, num_experts: int, dtype: torch.dtype) -> FusedExperts:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=8,
        hidden_size=width,
        moe_intermediate_size=hidden,
        num_experts=num_experts,
        num_experts_per_tok=1,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    experts = model.get_submodule(next(iter(find_blocks(model))))
    torch.manual_seed(0)
    drawn = {key: (torch.randn(p.shape) / p.shape[-1] ** 0.5).to(dtype) for key, p in experts.named_parameters()}
    return FusedExperts(experts, {key: nn.Parameter(p, requires_grad=False) for key, p in drawn.items()})


def _logits(options: Options) -> Table:
    steps = 2 if options.small else 300
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted(_PAGES.glob("*.md"))).encode()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    cut = len(tokens) * 9 // 10
    model = _trained(tokens[:cut], steps)
    held_out = _batches(tokens[cut:], 2 if options.small else 16)
    exact = _asked(model, held_out)
    rows = []
    for name in EXPERT_FORMATS:
        found = exact if name == "exact" else _asked(_rounded(model, name), held_out)
        apart = torch.tensor(difference(found.logits, exact.logits))
        agree = (found.logits.argmax(-1) == exact.logits.argmax(-1)).float().mean()
        rows.append(
            [
                name,
                f"{found.loss:.4f}",
                f"{found.loss - exact.loss:+.4f}",
                f"{float(apart.square().mean().sqrt()):.4f}",
                f"{float(agree):.1%}",
            ]
        )
    header = [
        "format",
        "held-out loss",
        "against exact",
        "logits, rms of the difference over their spread",
        "same token",
    ]
    note = (
        f"A Qwen2-MoE of 4 layers, 256 wide, 16 experts of 128, top-4, float32, after {steps} steps of {_BATCH} x"
        f" {_TOKENS} bytes of docs/*.md; {len(exact.logits)} held-out positions. Attention, router and shared expert"
        " are exact."
    )
    return Table("What rounding changes in a trained mixture", header, rows, note)


@dataclass(frozen=True)
class _Asked:
    logits: Tensor
    loss: float


def _trained(tokens: Tensor, steps: int) -> Any:
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        save_demo_model(Path(folder), hidden_size=256, layers=4, experts=16)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 20) * (1 - step / steps)
        starts = torch.randint(len(tokens) - _TOKENS, (_BATCH,), generator=generator).tolist()
        batch = torch.stack([tokens[start : start + _TOKENS] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def _batches(tokens: Tensor, number: int) -> Tensor:
    places = torch.linspace(0, len(tokens) - _TOKENS, number).long().tolist()
    return torch.stack([tokens[place : place + _TOKENS] for place in places])


@torch.no_grad()
def _asked(model: Any, batch: Tensor) -> _Asked:
    out = model(input_ids=batch, labels=batch)
    return _Asked(out.logits.float().flatten(0, 1), float(out.loss))


@torch.no_grad()
def _rounded(model: Any, name: str) -> Any:
    """A copy of a model with its experts rounded, which is what an engine with expert_format computes."""
    twin = copy.deepcopy(model)
    for experts in find_blocks(twin):
        for parameter in twin.get_submodule(experts).parameters():
            parameter.copy_(BlockFormat(name, EXPERT_BLOCK_SIZE).quantize(parameter).dequantize())
    return twin
