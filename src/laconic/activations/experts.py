"""Forwards for mixture-of-experts blocks: routing exact, experts run again in backward.

[Note: experts] Routing is saved, never recomputed: the indices and weights that the router made stay as they are, and
so does everything between its logits and them. The router's linear layer is like any other: the gradient of its weight
takes the input from what is kept for the norm in front.

The experts keep the same packed input, so a block of experts costs no bytes of its own. Their backward dequantizes it
and runs the module's own code again under autograd, with the same indices and weights, one layer at a time. That serves
whatever they compute and however they are run (a loop, grouped or batched products; biases, clamps, norms inside), at
the price of one more forward of the experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from laconic.activations import functions
from laconic.activations.choice import Packing
from laconic.activations.decisions import Habit
from laconic.activations.derivatives import derivative, take
from laconic.activations.forwards import SiteForward
from laconic.activations.kept import Memo, keep
from laconic.activations.replay import Replay, forgetting, swapped_parameters
from laconic.activations.rerun import graft, rebuilt
from laconic.activations.sites import Site
from laconic.activations.traceable import as_result
from laconic.activations.witnesses import check_unchanged, glances, named
from laconic.ops.derivatives import edge_of

__all__ = ["ExpertsForward", "RouterForward"]


class RouterForward(SiteForward):
    """Runs the router's own code; its linear layer keeps what rebuilds the input."""

    def keeps(self, x: Tensor) -> bool:
        """Whether the router's weight needs a gradient."""
        weight = self.module.weight
        return isinstance(weight, Tensor) and weight.requires_grad

    def run(self, x: Tensor) -> Any:
        """The router's own forward, whose linear layer saves what rebuilds its input."""
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        if not torch.compiler.is_compiling():
            self.origin = keep(x, self.format, "router").origin
        with _LinearOf(weight.shape, self.format):
            return self.original(x)


_CASTS = (Tensor.to, Tensor.type, Tensor.float)


class _LinearOf(TorchFunctionMode):
    """Lets the product with a weight of a given shape keep its input packed, also when the input was cast before."""

    def __init__(self, shape: torch.Size, format: Packing) -> None:
        super().__init__()
        self._shape = shape
        self._format = format

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and not kwargs and args[1].shape == self._shape:
            x, weight, *bias = args
            with forgetting():
                value = func(*args)
            return functions.linear(x, weight, value, False, self._format, bias=bias[0] if bias else None)
        result = func(*args, **kwargs)
        return functions.cast(args[0], result) if func in _CASTS and result is not args[0] else result


class ExpertsForward(SiteForward):
    """Saves what rebuilds the tokens' hidden states; backward recomputes the rest.

    A second run gives gradients to the parameters that the module had when it was converted. Where others have come in
    their place (adapters of expert weights parametrize them while forward runs; pruning), the module's own code runs.
    """

    def __init__(self, module: nn.Module, site: Site, format: Packing) -> None:
        super().__init__(module, site, format)
        self._names = [name for name, _ in module.named_parameters()]
        self.habit = Habit(site.name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward; in training, one that saves the packed hidden states only."""
        args, kwargs = self.positional(args, kwargs)
        if not args:
            return self.original(**kwargs)
        return self._run(*args, **kwargs)

    def _run(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        own = dict(self.module.named_parameters())
        tensors = [x, *own.values(), *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
        wanted = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if not wanted or not self.serves(x) or self.stays_exact() or list(own) != self._names:
            return self.original(x, *args, **kwargs)
        if torch.compiler.is_compiling():  # see laconic.activations.rerun
            with torch.no_grad():
                result = self.original(x, *args, **kwargs)
            again = self.original(rebuilt(x, self.format, "experts", True), *args, **kwargs)
            return graft(result, again, "experts")

        # 1. The value, by the module's own code.
        replay = Replay(x.device, self.module, self.habit.decisions(self.module.training, args, kwargs))
        with forgetting():
            value, state = replay.run(lambda: self.original(x, *args, **kwargs))

        # 2. What backward gets instead of all that was made on the way.
        named(self.site.name)
        kept = keep(x, self.format, "experts")
        self.origin = kept.origin
        others = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        inputs = (x, *own.values(), *others)
        run = _ExpertsCall(
            forward=self,
            memo=kept.memo,
            own=tuple(own),
            requires_grad=tuple(t.requires_grad for t in inputs),
            rest=tuple(None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves),
            spec=spec,
            num_kept=len(kept.tensors),
            replay=replay,
        )
        y: Tensor = _Experts.apply(run, (value,), *inputs, *kept.tensors, *state)
        return y


@dataclass(frozen=True)
class _ExpertsCall:
    """One call of experts: everything about it that is not a tensor.

    Attributes:
        forward: whose call.
        memo: rebuilds the hidden states, from `num_kept` saved tensors.
        own: names of the parameters.
        requires_grad: of hidden states, parameters and other tensors.
        rest, spec: the other arguments, None in the place of a tensor.
        num_kept: see `memo`.
        replay: random state, decisions, autocast and modes of the first run.
    """

    forward: ExpertsForward
    memo: Memo
    own: tuple[str, ...]
    requires_grad: tuple[bool, ...]
    rest: tuple[tuple[Any] | None, ...]
    spec: TreeSpec
    num_kept: int
    replay: Replay

    def again(self, leaves: tuple[Tensor, ...], state: tuple[Tensor, ...]) -> Tensor:
        """Run the module's own code on `leaves`, under autograd."""
        x, own, others = leaves[0], leaves[1 : 1 + len(self.own)], iter(leaves[1 + len(self.own) :])
        args, kwargs = tree_unflatten([next(others) if leaf is None else leaf[0] for leaf in self.rest], self.spec)
        parameters = swapped_parameters(self.forward.module, dict(zip(self.own, own, strict=True)))
        with torch.enable_grad(), self.replay.again(state), parameters:
            y: Tensor = self.forward.original(x, *args, **kwargs)
        return y


class _Experts(torch.autograd.Function):
    """Inputs: hidden states, parameters and other tensors (routing weights, indices), then what is kept."""

    @staticmethod
    def forward(ctx: Any, run: _ExpertsCall, value: tuple[Tensor], *inputs: Tensor) -> Tensor:
        run.memo.announce()
        ctx.run = run
        ctx.save_for_backward(edge_of(inputs[0]), *inputs[1:])
        ctx.glances = glances(inputs[1 : 1 + len(run.own)])
        return as_result(value[0])

    @staticmethod
    @derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        run: _ExpertsCall = ctx.run
        edge, *saved = ctx.saved_tensors
        num_given = len(run.requires_grad) - 1
        given, kept, state = (
            saved[:num_given],
            saved[num_given:][: run.num_kept],
            saved[num_given + run.num_kept :],
        )
        check_unchanged(ctx.glances, given[: len(run.own)])
        inputs = (take(run.memo, tuple(kept), edge, after=grad), *given)
        has_graph = torch.is_grad_enabled()
        leaves = tuple(
            t.view_as(t) if has_graph else t.detach().requires_grad_(requires)
            for t, requires in zip(inputs, run.requires_grad, strict=True)
        )
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        y = run.again(leaves, tuple(state))
        grads = iter(torch.autograd.grad(y, wanted, grad, create_graph=has_graph, allow_unused=True))
        given_grads = [next(grads) if leaf.requires_grad else None for leaf in leaves]
        return (None, None, *given_grads, *[None] * (len(kept) + len(state)))
