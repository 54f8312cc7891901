"""Shared experts of a block, run while its rows are with the other experts.

A block calls its shared experts before its experts (Qwen2-MoE) or after them (DeepSeek, GLM). Either way their work is
moved in between sending and waiting, without a change to the block's own code:

- after: RemoteLayer computes them on the hidden states it was given; the block's later call gets that result.
- before: the block's call gets a tensor full of NaN; RemoteLayer fills it before its own call returns. A block that
  reads the tensor earlier computes NaN.

`overlap_shared` tries each block on random rows and leaves one alone whose output changes by a bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from laconic.infer.remote_experts import RemoteLayer


def shared_experts(block: nn.Module) -> list[nn.Module]:
    """List the shared experts among the children of `block`, which every family names so; not their gate."""
    return [child for name, child in block.named_children() if "shared" in name and "gate" not in name]


def overlap_shared(block: nn.Module, layer: RemoteLayer, width: int, dtype: torch.dtype) -> bool:
    """Move shared experts of `block`, which calls `layer`, if it has any, behind the sending of its rows [..., width].

    Returns whether they were moved; False leaves the block as it was.
    """
    named = shared_experts(block)
    if len(named) != 1:
        return False
    shared = named[0]
    rows = torch.randn(1, 5, width, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    rows = rows.to(next(shared.parameters()).device, dtype)
    trial = _Trial(block, layer, shared)
    try:
        expected, when = trial.plain(rows)
        if when is None:
            return False
        overlapped = _Overlapped(shared, when)
        shared.forward = overlapped
        layer.shared = overlapped.while_rows_are_away
        if torch.equal(trial.run(rows), expected):
            return True
    except Exception:  # a block that cannot be tried, whatever its code raises, is left alone
        pass
    shared.__dict__.pop("forward", None)
    layer.shared = None
    return False


class _Overlapped:
    """The forward of one block's shared experts; each thread, that is each micro-batch, has its own call in it."""

    def __init__(self, shared: nn.Module, when: Literal["before", "after"]) -> None:
        self._compute: Callable[[Tensor], Tensor] = type(shared).forward.__get__(shared)
        self._when = when
        self._local = threading.local()

    def __call__(self, x: Tensor) -> Tensor:
        if self._when == "before":
            out = torch.full_like(x, torch.nan)
            self._local.pending = (x, out)
            return out
        hidden, result = self._local.__dict__.pop("done", (None, None))
        if hidden is None or hidden.data_ptr() != x.data_ptr() or hidden.numel() != x.numel():
            return self._compute(x)
        assert result is not None
        return result.view(x.shape)

    def while_rows_are_away(self, hidden: Tensor) -> Callable[[], None] | None:
        """Return what RemoteLayer is to run for hidden states [n, M]."""
        if self._when == "before":
            pending = self._local.__dict__.pop("pending", None)
            return None if pending is None else lambda: self._fill(*pending)
        return lambda: self._keep(hidden)

    def _fill(self, x: Tensor, out: Tensor) -> None:
        out.copy_(self._compute(x))

    def _keep(self, hidden: Tensor) -> None:
        self._local.done = (hidden, self._compute(hidden.unsqueeze(0)))


class _Trial:
    """A block on random rows, with experts of which only the hidden states matter."""

    def __init__(self, block: nn.Module, layer: RemoteLayer, shared: nn.Module) -> None:
        self._block, self._layer, self._shared = block, layer, shared

    def plain(self, rows: Tensor) -> tuple[Tensor, Literal["before", "after"] | None]:
        """Return the block's output, and when it calls its shared experts; None if not once with the rows alone."""
        calls: list[str] = []
        hook = self._shared.register_forward_pre_hook(
            lambda module, args, kwargs: calls.append("shared" if len(args) == 1 and not kwargs else "other"),
            with_kwargs=True,
        )
        try:
            output = self.run(rows, lambda: calls.append("experts"))
        finally:
            hook.remove()
        when: dict[tuple[str, ...], Literal["before", "after"]] = {
            ("shared", "experts"): "before",
            ("experts", "shared"): "after",
        }
        return output, when.get(tuple(calls))

    @torch.no_grad()
    def run(self, rows: Tensor, called: Callable[[], None] = lambda: None) -> Tensor:
        """Return the block's output for rows [1, n, M], with experts that halve their input."""

        def halve(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            called()
            if self._layer.shared is not None and (shared := self._layer.shared(hidden_states)) is not None:
                shared()
            return hidden_states / 2

        self._layer.forward = halve  # type: ignore[method-assign]
        try:
            output = self._block(rows)
        finally:
            del self._layer.__dict__["forward"]
        return output[0] if isinstance(output, tuple) else output
