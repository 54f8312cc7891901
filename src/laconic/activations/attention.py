"""Attention that keeps packed queries, keys and values, and runs again in backward.

[Note: compressed attention]
Attention's backward multiplies exponentials of the logits with a saved statistic (the log-sum-exp of each row). If the
logits come from quantized tensors and the statistic does not, the rows of probabilities no longer sum to one, and the
error of the gradient grows with the logits: that is why four bits everywhere does not train (AGoQ, arXiv 2605.00539;
`benchmarks/saved_statistic.py` shows it). Here nothing but query, key and value is kept. Backward dequantizes them and
runs the very same attention code again under autograd, so that logits, statistic, output and gradients all belong to
the same tensors. The output projection takes its input from that second run as well, so the output costs no bytes.

Keys and values are packed before they are repeated for groups of query heads; what else the code was given (masks,
block masks, positions, scaling, windows) is held by reference; what it drew (dropout) is drawn again.

Hugging Face's attention modules ask `AttentionInterface.get_interface` for the code to run. From the first conversion
on, what that hands out looks at the module it is called with: one without a site of ours runs the code as it is. So the
configuration stays untouched, masks are made for the implementation the user chose, and one chosen or registered later
is served too. A graph of torch.compile runs attention again in its own way
(see laconic.activations.rerun), without dropout.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from laconic.activations.checkpoint import runs_twice
from laconic.activations.choice import Packing
from laconic.activations.decisions import Habit
from laconic.activations.derivatives import derivative, is_transformed
from laconic.activations.dtensors import warn_exact
from laconic.activations.kept import Kept, Memo, Tensors, attach, derive, pack, take_all
from laconic.activations.replacement import OfModule, follow_copies, forget_copies
from laconic.activations.replay import Replay, forgetting, swapped_parameters
from laconic.activations.rerun import graft, rebuilt
from laconic.activations.sites import Site
from laconic.activations.traceable import as_result
from laconic.activations.witnesses import check_unchanged, glances, named
from laconic.errors import ModelError
from laconic.ops import DTYPES
from laconic.ops.derivatives import connected, edge_of

__all__ = ["AttentionCore", "attention_core_of"]

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
        self._checked = False
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
        if len(args) < 4 or not torch.is_grad_enabled() or runs_twice() or is_transformed():
            return attend(*args, **kwargs)
        module, query, key, value, *rest = args
        packable = all(_packable(x) for x in (query, key, value))
        own = {name: p for name, p in module._parameters.items() if p is not None}
        if not packable or not any(x.requires_grad for x in (query, key, value, *own.values())):
            return attend(*args, **kwargs)
        if torch.compiler.is_compiling():
            return self._traced(attend, module, (query, key, value), rest, kwargs)
        return self._run(attend, module, (query, key, value), own, (rest, kwargs))

    def _traced(self, attend: Callable[..., Any], module: nn.Module, qkv: Tensors, rest: Any, kwargs: Any) -> Any:
        """The same in a graph of torch.compile (see laconic.activations.rerun)."""
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
        self, attend: Callable[..., Any], module: nn.Module, qkv: Tensors, own: dict[str, Tensor], others: Any
    ) -> Any:
        # 1. The value, by the module's own code.
        replay = Replay(qkv[0].device, module, self.habit.decisions(module.training, *others))
        leaves, spec = tree_flatten(others)
        with forgetting():
            results, state = replay.run(lambda: attend(module, *qkv, *others[0], **others[1]))
        outputs, results_spec = tree_flatten(results)
        outputs = [value.detach() if isinstance(value, Tensor) else value for value in outputs]
        found = tuple(index for index, value in enumerate(outputs) if isinstance(value, Tensor))

        # 2. What backward gets instead of it.
        context = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        rest = tuple(_SLOT if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        named(self.site.name)
        packed = tuple(pack(x, self.format, "attention") for x in qkv)
        codes = tuple(tensor for kept in packed for tensor in kept.tensors)
        memos = tuple(kept.memo for kept in packed)
        run = _AttentionCall(
            core=self,
            attend=attend,
            module=module,
            memos=memos,
            counts=tuple(len(kept.tensors) for kept in packed),
            own=tuple(own),
            requires_grad=tuple(x.requires_grad for x in (*qkv, *own.values(), *context)),
            rest=rest,
            spec=spec,
            found=found,
            replay=replay,
            returned=[],
        )
        saved = (*codes, *own.values(), *context, *state)
        kept = Kept(saved, Memo(run.rebuild, memos), "attention")
        values = [outputs[index] for index in found]
        # The output projection flattens the heads. Of a contiguous tensor that is a view, and a view finds the note.
        values[0] = values[0].contiguous()
        tensors: tuple[Tensor, ...] = _Attention.apply(kept.memo, run, values, *qkv, *saved)

        # 3. Whoever reads the output can have it from the second run.
        attach(tensors[0], derive(_output, (kept,), (), "attention"))
        for index, tensor in zip(found, tensors, strict=True):
            outputs[index] = tensor
            run.returned.append(weakref.ref(tensor))
        return tree_unflatten(outputs, results_spec)

    def check(self, outputs: Tensors, leaves: Tensors) -> None:
        """Check once that the code uses no parameters that this backward gives no gradient.

        Raises:
            ModelError: it does.
        """
        if self._checked:
            return
        known = {id(leaf) for leaf in leaves}
        # What is in the place of an input of the first run ends the search: behind it lies the rest of the model.
        stack, seen = [output.grad_fn for output in outputs], {leaf.grad_fn for leaf in leaves}
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) not in known:
                raise ModelError(
                    f"the attention code of {self.site.name!r} uses a parameter of shape {list(variable.shape)} that "
                    f"is neither the module's own nor an argument, so compressed attention would lose its gradient; "
                    f"keep this site exact: None in the plan, or attention='exact'"
                )
            stack.extend(next_node for next_node, _ in node.next_functions)
        self._checked = True


def _positional(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments, with query, key and value by position also where they were given by name."""
    missing = ("query", "key", "value")[max(0, len(args) - 1) :]
    if not missing or not all(name in kwargs for name in missing):
        return args, kwargs
    rest = {name: value for name, value in kwargs.items() if name not in missing}
    return (*args, *(kwargs[name] for name in missing)), rest


class _Slot:
    """Placeholder of a tensor among the arguments."""


_SLOT = _Slot()


@dataclass(frozen=True)
class _SecondRun:
    """The second run: its outputs with their graph, and where that graph begins, in the order of the first inputs."""

    outputs: Tensors
    leaves: Tensors


@dataclass(frozen=True)
class _AttentionCall:
    """One call of the attention code: everything about it that is not a tensor.

    Attributes:
        core, attend, module: the arguments of the call.
        memos, counts: rebuild query, key and value, each from so many saved tensors.
        own: names of the module's own parameters.
        requires_grad: of query, key, value, own parameters and the tensors among the other arguments.
        rest, spec: the other arguments, with `_SLOT` for the tensors.
        found: indices of the results that are tensors.
        replay: random state, decisions, autocast and modes of the first run.
        returned: the tensors that the caller got, which may be gone.
    """

    core: AttentionCore
    attend: Callable[..., Any]
    module: nn.Module
    memos: tuple[Memo, ...]
    counts: tuple[int, ...]
    own: tuple[str, ...]
    requires_grad: tuple[bool, ...]
    rest: tuple[Any, ...]
    spec: TreeSpec
    found: tuple[int, ...]
    replay: Replay
    returned: list[weakref.ref[Tensor]]

    def watched(self) -> dict[int, Tensor]:
        """Results beside the output (probabilities of eager attention) of which somebody wants the gradient, by place.

        The output is computed from them, so their gradient is that of the second run's.

        Raises:
            ModelError: one has a hook, whose result could not be used.
        """
        found: dict[int, Tensor] = {}
        for place, reference in enumerate(self.returned[1:], 1):
            tensor = reference()
            if tensor is None:
                continue
            if tensor._backward_hooks:
                raise ModelError(
                    f"a tensor that the attention of {self.core.site.name!r} returns beside its output has a hook, but "
                    f"compressed attention computes its gradient in a second run; call retain_grad() on it instead, or "
                    f"keep this site exact: None in the plan, or attention='exact'"
                )
            if tensor.retains_grad:
                found[place] = tensor
        return found

    def rebuild(self, saved: Tensors, *_: object, edges: tuple[Tensor | None, ...] | None = None) -> Any:
        """Run the attention code again, under autograd, on the tensors that `saved` rebuilds.

        Given the `edges` of query, key and value, it runs on tensors in the places of the first inputs.
        """
        codes, saved = saved[: sum(self.counts)], saved[sum(self.counts) :]
        with torch.no_grad():
            qkv = take_all(self.memos, self.counts, codes)
        inputs, state = (*qkv, *saved[: len(self.requires_grad) - 3]), saved[len(self.requires_grad) - 3 :]
        # torch's fused kernels have no second derivative, its own steps have.
        kernel = nullcontext() if edges is None else sdpa_kernel(SDPBackend.MATH)
        with torch.enable_grad(), self.replay.again(state), kernel:
            if edges is None:
                leaves = tuple(
                    x.detach().requires_grad_(requires) for x, requires in zip(inputs, self.requires_grad, strict=True)
                )
            else:
                leaves = (*map(connected, qkv, edges), *(x.view_as(x) for x in inputs[3:]))
            own, context = leaves[3 : 3 + len(self.own)], iter(leaves[3 + len(self.own) :])
            others, kwargs = tree_unflatten([next(context) if x is _SLOT else x for x in self.rest], self.spec)
            with swapped_parameters(self.module, dict(zip(self.own, own, strict=True))):
                results, _spec = tree_flatten(self.attend(self.module, *leaves[:3], *others, **kwargs))
        outputs = tuple(results[index] for index in self.found)
        self.core.check(outputs, leaves)
        return _SecondRun(outputs, leaves)


class _Attention(torch.autograd.Function):
    """Inputs: query, key, value, then what is saved: packed tensors, own parameters, tensors among other arguments."""

    @staticmethod
    def forward(ctx: Any, memo: Memo, run: _AttentionCall, values: list[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        memo.announce()
        ctx.memo, ctx.run = memo, run
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*map(edge_of, inputs[:3]), *inputs[3:])
        start = 3 + sum(run.counts)
        ctx.glances = glances(inputs[start : start + len(run.own)])
        return tuple(as_result(value) for value in values)

    @staticmethod
    @derivative
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        all_saved = ctx.saved_tensors
        edges, saved = all_saved[:3], all_saved[3:]
        start = sum(ctx.run.counts)
        check_unchanged(ctx.glances, saved[start : start + len(ctx.run.own)])
        has_graph = torch.is_grad_enabled()
        if has_graph:
            ctx.memo.leave()
        second: Any = ctx.run.rebuild(saved, edges=edges) if has_graph else ctx.memo.take(saved)
        watched = {place: x for place, x in ctx.run.watched().items() if second.outputs[place].requires_grad}
        leaves = [leaf for leaf in second.leaves if leaf.requires_grad]
        wanted = [*leaves, *(second.outputs[place] for place in watched)]
        reached = [(y, g) for y, g in zip(second.outputs, grads, strict=True) if g is not None and y.requires_grad]
        found: dict[int, Tensor | None] = {}
        if reached and wanted:
            outputs, given = zip(*reached, strict=True)
            got = torch.autograd.grad(outputs, wanted, given, create_graph=has_graph, allow_unused=True)
            found = {id(leaf): grad for leaf, grad in zip(leaves, got, strict=False)}
            for (place, tensor), grad in zip(watched.items(), got[len(leaves) :], strict=True):
                # What came from outside of this attention has been added by autograd.
                ours = grad if grad is None or grads[place] is None else grad - grads[place]
                if ours is not None:
                    tensor.grad = ours if tensor.grad is None else tensor.grad + ours
        dleaves = [found.get(id(leaf)) for leaf in second.leaves]
        num_codes = sum(ctx.run.counts)
        num_state = len(ctx.needs_input_grad) - 3 - len(dleaves) - num_codes
        return (None, None, None, *dleaves[:3], *[None] * num_codes, *dleaves[3:], *[None] * num_state)


def _output(second: Any) -> Tensor:
    output: Tensor = second.outputs[0]
    return output.detach()


def _packable(x: Any) -> bool:
    warn_exact("attention", x)
    return isinstance(x, Tensor) and not isinstance(x, DTensor) and x.dtype in DTYPES


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
