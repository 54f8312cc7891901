"""Attention that keeps packed queries, keys and values, and runs again in backward.

[Note: compressed attention]
Attention's backward multiplies exponentials of the logits with a saved statistic (the log-sum-exp of each row). If the
logits come from quantized tensors and the statistic does not, the rows of probabilities no longer sum to one, and the
error of the gradient grows with the logits: that is why four bits everywhere does not train (AGoQ, arXiv 2605.00539;
`benchmarks/saved_statistic.py` shows it). Here nothing but query, key and value is kept. Backward dequantizes them and
runs the very same attention code again, and what torch saves there is what its backward reads (`SecondRun`): logits,
statistic, output and gradients all belong to the same tensors. The output projection takes its input from that second
run as well, so the output costs no bytes.

Keys and values are packed before they are repeated for groups of query heads; what else the code was given (masks,
block masks, positions, scaling, windows) is held by reference; what it drew (dropout) is drawn again.

Hugging Face's attention modules ask `AttentionInterface.get_interface` for the code to run. From the first conversion
on, what that hands out looks at the module it is called with: one without a site of ours runs the code as it is. So the
configuration stays untouched, masks are made for the implementation the user chose, and one chosen or registered later
is served too. A graph of torch.compile runs attention again in its own way
(see laconic.activations.backward.rerun), without dropout.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from laconic.activations.backward.decisions import Habit
from laconic.activations.backward.derivatives import is_transformed
from laconic.activations.backward.replay import Replay
from laconic.activations.backward.rerun import graft, rebuilt
from laconic.activations.backward.saving import BoundFunction, SecondRun, first_tensor
from laconic.activations.forwards.base import SiteForward
from laconic.activations.forwards.checkpoint import is_plain, runs_twice
from laconic.activations.forwards.replacement import OfModule, follow_copies, forget_copies
from laconic.activations.host.dtensors import warn_exact
from laconic.activations.host.storages import overlaps
from laconic.activations.keep.choice import Packing
from laconic.activations.keep.exact_codes import MemoryLayout
from laconic.activations.keep.kept import Kept, Tensors, attach, derive, held, pack, whole_of
from laconic.activations.keep.witnesses import RUNNING
from laconic.activations.recognize.sites import Site

_ATTRIBUTE = "_laconic_attention"


def attention_core_of(module: nn.Module) -> AttentionCore | None:
    """The `AttentionCore` of a module, or None if its attention is not converted."""
    # Not by __dict__: torch.compile guards attributes, but not a key that is missing there.
    core = getattr(module, _ATTRIBUTE, None)
    return core if isinstance(core, AttentionCore) else None


class AttentionCore(OfModule):
    """Stands between an attention module and the code that computes its attention.

    Args:
        module: which module; it gets the core as an attribute.
        site: what it is.
        format: how query, key and value are packed, along the head dimension.
    """

    origin: str | None = None

    def __init__(self, module: nn.Module, site: Site, format: Packing) -> None:
        self.module = module
        self.site = site
        self.format = format
        self.habit = Habit(site.name)
        module.__dict__[_ATTRIBUTE] = self
        follow_copies(module)
        _serve_attention_modules()

    def remove(self) -> None:
        """Restore the module's own attention."""
        del self.module.__dict__[_ATTRIBUTE]
        forget_copies(self.module)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _serve_attention_modules()  # a model may be unpickled in a process that never converted one

    def __call__(self, attend: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """attend(module, query, key, value, ...) with query [batch, heads, tokens, head_dim]."""
        args, kwargs = _positional(args, kwargs)
        is_usual = is_plain()
        if len(args) < 4 or not (is_usual or (torch.is_grad_enabled() and not runs_twice() and not is_transformed())):
            return attend(*args, **kwargs)
        module, qkv, rest = args[0], args[1:4], args[4:]
        own = {name: p for name, p in module._parameters.items() if p is not None}
        if not all(map(SiteForward.ours, qkv)) or not any([x.requires_grad for x in (*qkv, *own.values())]):
            for x in qkv:
                warn_exact("attention", x)
            return attend(*args, **kwargs)
        if not is_usual and torch.compiler.is_compiling():
            return self._traced(attend, module, qkv, rest, kwargs)
        return self._run(attend, module, qkv, own, rest, kwargs)

    def _traced(self, attend: Callable[..., Any], module: nn.Module, qkv: Tensors, rest: Any, kwargs: Any) -> Any:
        """The same in a graph of torch.compile (see laconic.activations.backward.rerun)."""
        if kwargs.get("dropout"):  # a graph would draw it twice, and differently
            return attend(module, *qkv, *rest, **kwargs)
        with torch.no_grad():
            results = attend(module, *qkv, *rest, **kwargs)
        second = attend(module, *(rebuilt(x, self.format, "attention", False) for x in qkv), *rest, **kwargs)
        return tuple(
            graft(value.contiguous(), again, "attention") if isinstance(value, Tensor) else value
            for value, again in zip(results, second, strict=True)
        )

    def _run(
        self,
        attend: Callable[..., Any],
        module: nn.Module,
        qkv: Tensors,
        own: dict[str, Tensor],
        rest: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        RUNNING.site = self.site.name
        decisions = self.habit.decisions((module,), (*qkv, *rest), kwargs, attend)
        replay = Replay(qkv[0].device, module, decisions, calls_forward=False)
        call, others = BoundFunction.of(partial(attend, module), 3, rest, kwargs)
        run = SecondRun(
            self.site.name,
            call,
            tuple([_packed(x, self.format) for x in qkv]),
            module,
            own,
            replay,
        )
        results = run.first(*qkv, *others)
        output = first_tensor(results)
        kept = run.output("attention")
        # The output projection flattens the heads. Its input is then a view of what this output is a view of, or of it.
        if output.is_contiguous() and (whole := whole_of(output)) is not output:
            attach(whole, derive(partial(torch.reshape, shape=whole.shape), (kept,), (), "attention"))
        elif output._base is not None or not output.is_contiguous():
            output = torch.ops.aten._unsafe_view.default(output.contiguous(), output.shape)
            results = output if isinstance(results, Tensor) else (output, *results[1:])
        attach(output, kept)
        return results


def _packed(x: Tensor, format: Packing) -> Kept:
    """The `Kept` of a query, key or value [batch, heads, tokens, head_dim] in the order in which it lies in memory."""
    if x.dim() == 4 and not x.is_contiguous() and (turned := x.detach().transpose(1, 2)).is_contiguous():
        return pack(turned, format, "attention", layout=MemoryLayout(x.shape, x.stride(), x.dtype))
    if overlaps(x):
        return held(x.detach(), "attention")
    return pack(x, format, "attention")


def _positional(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments, with query, key and value by position also where they were given by name."""
    missing = ("query", "key", "value")[max(0, len(args) - 1) :]
    if not missing or not all(name in kwargs for name in missing):
        return args, kwargs
    rest = {name: value for name, value in kwargs.items() if name not in missing}
    return (*args, *(kwargs[name] for name in missing)), rest


def _serve_attention_modules() -> None:
    """Make the functions of `AttentionInterface.get_interface` look for our cores; done once per process."""
    interface: Any = getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", None)
    if interface is None:
        return
    original = interface.get_interface
    if getattr(original, "serves_laconic", False):
        return

    @functools.wraps(original)
    def get_interface(self: Any, *args: Any, **kwargs: Any) -> Any:
        attend = original(self, *args, **kwargs)
        served = functools.partial(_dispatch, attend)
        return served if torch.compiler.is_compiling() else functools.wraps(attend)(served)

    get_interface.serves_laconic = True  # type: ignore[attr-defined]  # so that it is wrapped once
    interface.get_interface = get_interface


def _dispatch(attend: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    core = attention_core_of(module) if isinstance(module, nn.Module) else None
    return attend(module, *args, **kwargs) if core is None else core(attend, module, *args, **kwargs)
