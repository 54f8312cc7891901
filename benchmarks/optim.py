"""One step of AdamW on the CPU: moments in 8 and 4 bits beside torch's fused fp32 AdamW, bitsandbytes and torchao.

Every row updates the same number of fp32 weights, in matrices of 2048 columns. The limit is the memory: a copy that
reads and writes as many bytes as AdamW8bit has to (16 per weight: weight twice, gradient once, codes twice). torch's
fused AdamW moves 28.

The last table follows the trajectory: how far weights are from those of exact AdamW after some steps, and the largest
step any weight took, for gradients with heavy tails and with outliers, which are hard for block-wise formats.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.kit.peers import installed
from benchmarks.kit.timing import Case, seconds_of
from benchmarks.registry import Options, Table, benchmark, kernels_note
from laconic.formats import QuantizedGradient, set_quantized_gradient
from laconic.ops import native
from laconic.ops.adamw_scalars import largest_step
from laconic.optim import AdamW8bit

_COLUMNS = 2048
_OPTIONS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 1e-2}
_STEPS = 30
_TRAJECTORY_ELEMENTS = 1 << 18


@benchmark("optim")
def optim(options: Options) -> list[Table]:
    """Time of one step; instruction sets; distance from exact AdamW and largest step."""
    return [_speed_table(options), _instruction_sets_table(options), _trajectory_table(options)]


def _matrix(elements: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(max(elements // _COLUMNS, 1), _COLUMNS).to(dtype))


def _stepping(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], p: nn.Parameter, bits: int = 32) -> Any:
    """The step of an optimizer over one matrix that has a gradient."""
    gradient = torch.randn(p.shape) * 1e-3
    if bits == 32:
        p.grad = gradient.to(p.dtype)
    else:
        stored = QuantizedGradient.zeros(p.shape, bits)
        stored.accumulate_(gradient)
        set_quantized_gradient(p, stored)
    return make([p]).step


def _peers() -> dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]]:
    """bitsandbytes and torchao, where they are installed."""
    found: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {}
    for package in ("bitsandbytes", "torchao"):
        if (theirs := installed(package, "optim")) is not None:
            found[f"{package} AdamW8bit"] = partial(theirs.AdamW8bit, **_OPTIONS)
    return found


def _speed_table(options: Options) -> Table:
    n = options.elements
    ours = partial(AdamW8bit, **_OPTIONS)
    source = torch.empty(2 * n)
    cases: dict[str, Case] = {
        "memcpy, 16 bytes per weight": partial(torch.empty_like(source).copy_, source),
        "torch AdamW, fused": _stepping(partial(torch.optim.AdamW, fused=True, **_OPTIONS), _matrix(n)),
        "**AdamW8bit**": _stepping(ours, _matrix(n)),
        "**AdamW8bit, bits=4**": _stepping(partial(ours, bits=4), _matrix(n)),
        "AdamW8bit, gradient in 8 bits": _stepping(ours, _matrix(n), bits=8),
        "AdamW8bit, gradient in 12 bits": _stepping(ours, _matrix(n), bits=12),
        "AdamW8bit, bf16 weights and gradient": _stepping(ours, _matrix(n, torch.bfloat16)),
    }
    cases |= {name: _stepping(make, _matrix(n)) for name, make in _peers().items()}
    seconds = seconds_of(cases, options.rounds, warm_ups=1)
    fused = seconds["torch AdamW, fused"]
    return Table.of(
        f"One step over {n:,} weights, {options.thread_text}",
        seconds.items(),
        [
            ("", lambda row: row[0]),
            ("ms", lambda row: f"{1e3 * row[1]:.1f}"),
            ("time of fused AdamW", lambda row: f"{row[1] / fused:.2f}"),
        ],
        kernels_note(),
    )


def _instruction_sets_table(options: Options) -> Table:
    p = _matrix(options.elements)
    optimizer = AdamW8bit([p], **_OPTIONS)
    p.grad = torch.randn(p.shape) * 1e-3
    optimizer.step()
    state = optimizer.state[p]
    tensors = (p, *(state[f"exp_avg{moment}_{part}"] for moment in ("", "_sq") for part in ("codes", "scales")), p.grad)
    lists = [*([tensor] for tensor in tensors), [], [], []]
    numbers = (None, 1e-3, 0.9, 0.999, 1e-8, 1e-2, 10, False)
    cases = {isa: lambda isa=isa: native.adamw8bit_multi_(*lists, *numbers, isa=isa) for isa in native.supported_isas()}
    with torch.no_grad():
        seconds = seconds_of(cases, options.rounds)
    return Table("Instruction sets", ["", "ms"], [[isa, f"{1e3 * taken:.1f}"] for isa, taken in seconds.items()])


def _gradients(kind: str, shape: torch.Size, step: int) -> Tensor:
    torch.manual_seed(step)
    if kind == "heavy tails":
        return torch.distributions.StudentT(3.0).sample(shape) * 1e-3
    if kind == "outliers":
        gradient = torch.randn(shape) * 1e-3
        return gradient * torch.where(torch.rand(shape) < 1e-3, 1e4, 1.0)
    return torch.randn(shape) * 1e-3


def _trajectory_table(options: Options) -> Table:
    n = min(options.elements, _TRAJECTORY_ELEMENTS)
    rows = []
    torch.manual_seed(0)
    start = _matrix(n).detach()
    makers: dict[str, Any] = {
        "AdamW8bit": partial(AdamW8bit, **_OPTIONS),
        "AdamW8bit, bits=4": partial(AdamW8bit, bits=4, **_OPTIONS),
        **_peers(),
    }
    for kind in ("Gaussian", "heavy tails", "outliers"):
        exact, _ = _follow(partial(torch.optim.AdamW, **_OPTIONS), start, kind)
        moved = (exact - start).norm()
        for name, make in makers.items():
            found, largest = _follow(make, start, kind)
            rows.append(
                [kind, name, f"{((found - exact).norm() / moved).item():.3f}", f"{largest / _OPTIONS['lr']:.2f}"]
            )
    return Table(
        f"{_STEPS} steps over {n:,} weights",
        ["gradients", "", "distance from exact AdamW / distance moved", "largest step / lr"],
        rows,
        f"Adam's own worst case rises from 1.00 in step 1 to {largest_step(0.9, 0.999, _STEPS):.2f} in step {_STEPS}.",
    )


def _follow(make: Any, start: Tensor, kind: str) -> tuple[Tensor, float]:
    """Weights after some steps, and the largest step of any weight."""
    p = nn.Parameter(start.clone())
    optimizer = make([p])
    largest = 0.0
    for step in range(_STEPS):
        before = p.detach().clone()
        p.grad = _gradients(kind, p.shape, step)
        optimizer.step()
        largest = max(
            largest, (p.detach() - before * (1 - _OPTIONS["lr"] * _OPTIONS["weight_decay"])).abs().max().item()
        )
    return p.detach(), largest
