"""Token mixers that run again in backward from their packed input.

State-space models (Mamba), delta rules (Qwen3-Next), and attention that a module spells out itself (Bloom, GPT-J) save
many tensors of [tokens, state] or [tokens, tokens] size inside of one module. No formula covers them all, and none is
needed: the module's own code runs again in backward, with the random numbers and the decisions of the first run, and
nothing else is kept but its input.

Whether that is allowed is proved once per module and state of its flags, at the first training call: it runs twice for
its value alone, and both runs have to give the same bits and leave arguments, buffers, numbers and lists as they were.
What they leave, such as a tensor in an attribute, is undone. A module that fails stays exact, and the log says so. Then
its gradients for a random output gradient are compared, from the exact input and from the packed one: where they differ
too much (attention with very sharp logits), the input is kept exactly. A call with arguments that cannot be handed over
twice (a filled cache, objects of unknown kinds) runs as it is.
"""

from __future__ import annotations

import inspect
import logging
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_of_torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from laconic.activations.backward.decisions import Decisions, Habit
from laconic.activations.backward.replay import Replay, forgetting, put_back
from laconic.activations.forwards.base import SiteForward
from laconic.activations.forwards.checkpoint import is_cache, is_empty, packed_inputs, run_again, without_caches
from laconic.activations.host.modules import modules_of, plain_attributes
from laconic.activations.keep.choice import Offload, Packing
from laconic.activations.keep.preserve import CONTAINERS, noted_random_states, preserved
from laconic.activations.keep.rounding import quantized
from laconic.activations.recognize.sites import Site
from laconic.formats import BlockFormat

LARGEST_ERROR = 0.1
"""Relative error of a mixer's gradients, run from its packed input, above which the input is kept exactly.

Eight bits are off by half a per cent, of which most mixers make a few per cent (benchmarks/families.py tries many).
"""


_MAX_VERDICTS = 64
"""Combinations of flags of which a mixer remembers whether it may run again: a module may write others for ever."""


class MixerForward(SiteForward):
    """Keeps the packed input of a mixer, which runs again in backward.

    Args:
        module: the mixer.
        site: its description.
        format: how its input is packed.
    """

    def __init__(self, module: nn.Module, site: Site, format: Packing) -> None:
        super().__init__(module, site, format)
        self.repeats: bool | None = None  # not known before the first training call, nor once a flag has changed
        self._flags: list[Any] | None = None
        self._verdicts: dict[tuple[Any, ...], tuple[bool, bool, bool]] = {}
        self._has_warned = False
        self.is_sensitive = False
        self.seeds = False
        self.habit = Habit(site.name)

    @property
    def input_format(self) -> BlockFormat | None:
        """The format of the kept input, which is not moved to the host; None keeps it exactly."""
        if self.is_sensitive:
            return None
        return self.format.format if isinstance(self.format, Offload) else self.format

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, to be run again in backward where that is proved to give the same."""
        args, kwargs = self.positional(args, kwargs)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or self.stays_exact():
            return self.original(*args, **kwargs)
        flags = plain_attributes(parts := modules_of(self.module))
        if self._flags not in (None, flags):
            self._flags = flags
            self.repeats, self.is_sensitive, self.seeds = self._verdicts.get(tuple(flags), (None, False, False))
        if self.repeats is False or not self._may_run_again(args, kwargs):
            return self.original(*args, **kwargs)
        if self.repeats is None:
            self._flags = flags
            lists = self._outside_lists()
            with preserved(self.module, (args, kwargs, lists), tensors="copied"):
                self.repeats = self._repeats(args, kwargs, lists)
            if len(self._verdicts) == _MAX_VERDICTS:
                self._verdicts.clear()
            self._verdicts[tuple(flags)] = self.repeats, self.is_sensitive, self.seeds
            if not self.repeats and not self._has_warned:
                self._has_warned = True
                logging.getLogger("laconic").warning(
                    "%s (%s) stays exact: it does not compute the same when it runs twice, or leaves something in a "
                    "tensor, an argument or a list, so backward cannot run it again",
                    self.site.name,
                    type(self.module).__name__,
                )
            if not self.repeats:
                return self.original(*args, **kwargs)
        decisions = self.habit.decisions(parts, args, kwargs)
        caches = {name: leaf for name, leaf in (*enumerate(args), *kwargs.items()) if is_cache(leaf)}
        args, kwargs = without_caches(args, kwargs)  # which the graph would hold, with all keys and values
        with packed_inputs(
            self.inputs(args, kwargs), self.input_format, decisions, with_data=self.packs_data
        ) as region:
            return run_again(region(self._writing_once(caches)), args, kwargs, parts, self.site.name)

    def _writing_once(self, caches: dict[Any, Any]) -> Callable[..., Any]:
        """The module's own forward, whose first call alone has the caches and writes to attributes for good."""
        has_run = False

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal has_run
            if has_run:
                with ExitStack() as undo:
                    if self.seeds:
                        undo.callback(noted_random_states())
                    for own in map(vars, modules_of(self.module)):
                        undo.callback(put_back, own, own.copy())
                    return self.run_module(*args, **kwargs)
            has_run = True
            args = tuple(caches.pop(place, arg) for place, arg in enumerate(args))
            kwargs = {name: caches.pop(name, value) for name, value in kwargs.items()}
            return self.run_module(*args, **kwargs)

        return run

    packs_data = False
    """Whether an input that requires no grad is packed, too."""

    def inputs(self, args: Any, kwargs: Any) -> list[Tensor]:
        """The tensors among the arguments that are packed: what has another shape is a mask, a position or a bias."""
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.shape == args[0].shape]
        return [x for x in tensors if x.requires_grad and self.ours(x)]  # a mask may have that shape, too

    def run_module(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        return self.original(*args, **kwargs)

    def _may_run_again(self, args: Any, kwargs: Any) -> bool:
        """Whether a gradient is wanted, and arguments are tensors, plain values or caches without entries from it."""
        leaves = tree_leaves((args, kwargs))
        tensors = (*(leaf for leaf in leaves if isinstance(leaf, Tensor)), *self.module.parameters())
        if not args or not self.serves(args[0]) or not any(x.requires_grad for x in tensors):
            return False
        index = getattr(self.module, "layer_idx", None)
        for leaf in leaves:
            if is_cache(leaf):
                if index is None or not is_empty(leaf, index):
                    return False
            elif not (leaf is None or isinstance(leaf, Tensor | bool | int | float | str | torch.dtype | torch.device)):
                return False
        return True

    def _outside_lists(self) -> list[Any]:
        """The lists and dicts outside of the module that its forward names."""
        try:
            outside = inspect.getclosurevars(inspect.unwrap(type(self.module).forward))
        except (TypeError, ValueError):  # an object that is called, or a closure with an empty cell
            return []
        return [x for x in (*outside.globals.values(), *outside.nonlocals.values()) if isinstance(x, CONTAINERS)]

    def _repeats(self, args: Any, kwargs: Any, lists: list[Any]) -> bool:
        """Whether two runs give the same bits and change nothing; notes whether the packed input moves the output.

        What the first run alone fills, such as a dict of masks, the second run finds filled in backward, too. Numbers
        that are drawn from Python's or NumPy's generators are the same again if the module seeds these itself.
        """
        args, kwargs = without_caches(args, kwargs)
        replay = Replay(args[0].device, self.module)
        values = (*tree_leaves((args, kwargs)), *(x for part in modules_of(self.module) for x in vars(part).values()))
        tensors = [x for x in values if isinstance(x, Tensor) and not x.is_inference()]
        before, host_before = self._state(tensors), _host_generators(draw=True)
        random_state = replay.generators()

        def run() -> tuple[list[Any], Any]:
            with forgetting(), ExitStack() as undo:
                replay.again(random_state, undo)
                return tree_flatten(self.run_module(*args, **kwargs))

        first, spec = run()
        host_after = _host_generators()
        self.seeds = host_after != host_before
        with preserved(self.module, (args, kwargs, lists), tensors="left") as after_first:
            second, other_spec = run()
            if self._state(tensors) != before or spec != other_spec or _host_generators() != host_after:
                return False
            if not all(_same(a, b) for a, b in zip(first, second, strict=True)):
                return False
            self._compare_gradients(first, args, kwargs, replay, random_state)
        return not after_first.has_undone

    def _compare_gradients(self, first: list[Any], args: Any, kwargs: Any, replay: Replay, random_state: Any) -> None:
        """Note whether the packed input moves the gradients of a run that gave `first`."""
        if self.input_format is not None and first and isinstance(first[0], Tensor) and first[0].is_floating_point():
            cotangent = torch.randn(
                first[0].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu"
            ).to(first[0])
            inputs = {id(x): x.detach() for x in self.inputs(args, kwargs)}
            packed = {key: quantized(x, self.input_format).dequantize() for key, x in inputs.items()}
            decisions = Decisions(self.site.name)
            exact, rounded = (
                self._gradient(values, args, kwargs, cotangent, partial(replay.again, random_state), run)
                for values, run in ((inputs, decisions.first_run()), (packed, decisions.again()))
            )
            # Not the other way round: NaN is too large.
            self.is_sensitive = not (rounded - exact).norm() <= LARGEST_ERROR * exact.norm()

    def _gradient(
        self,
        values: dict[int, Tensor],
        args: Any,
        kwargs: Any,
        cotangent: Tensor,
        again: Callable[[ExitStack], None],
        decided: AbstractContextManager[Any],
    ) -> Tensor:
        """The gradients of the inputs and the mixer's parameters at `values` of the inputs, flattened, in fp64."""
        leaves = {key: value.detach().requires_grad_() for key, value in values.items()}
        given = {
            key: leaf.clone() for key, leaf in leaves.items()
        }  # forward hooks may put hooks on what they are given
        args, kwargs = tree_map(lambda x: given.get(id(x), x), (args, kwargs))
        hidden_from_trackers = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: tensor.detach(), lambda saved: saved
        )
        wanted = [*leaves.values(), *(p for p in self.module.parameters() if p.requires_grad)]
        with _no_hooks_on_gradients(self.module):
            with hidden_from_trackers, ExitStack() as undo:
                again(undo)
                undo.enter_context(decided)
                output = tree_flatten(self.run_module(*args, **kwargs))[0][0]
            if not output.requires_grad:  # a mask, say, in front of what does
                return cotangent.new_zeros(0)
            # A weight that was computed before, as adapters do, has a graph that the call's own backward needs, too.
            grads = torch.autograd.grad(output, wanted, cotangent, allow_unused=True, retain_graph=True)
        return torch.cat([grad.detach().double().flatten() for grad in grads if grad is not None])

    def _state(self, tensors: list[Tensor]) -> list[Any]:
        """What shows a change: versions of tensors, identities and plain attributes of all modules inside."""
        state: list[Any] = [x._version for x in tensors]
        for module in self.module.modules():
            for name, value in module.__dict__.items():
                if isinstance(value, bool | int | float | str):
                    state.append((name, value))
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                state.append((name, id(tensor), None if tensor is None else tensor._version))
        return state


def _host_generators(*, draw: bool = False) -> list[Any]:
    """The states of Python's and NumPy's generators, after a draw from each: then they are none that a seed leaves."""
    numpy = sys.modules.get("numpy")
    if draw:
        random.random()
        if numpy is not None:
            numpy.random.random()
    if numpy is None:
        return [random.getstate()]
    kind, keys, *rest = numpy.random.get_state()
    return [random.getstate(), kind, keys.tobytes(), *rest]


@contextmanager
def _no_hooks_on_gradients(module: nn.Module) -> Iterator[None]:
    """While the block runs, hooks of a module, its parts and its parameters see no gradient: it is one of a trial."""
    parts = modules_of(module)
    tensors = (x for part in parts for x in (*part._parameters.values(), *vars(part).values()))
    # Those in attributes are weights that an adapter has merged, for example.
    owners: tuple[Any, ...] = (*parts, *{id(x): x for x in tensors if isinstance(x, Tensor)}.values())
    found = [owner._backward_hooks for owner in owners]
    found += [part._backward_pre_hooks for part in parts]
    found += [module_of_torch._global_backward_hooks, module_of_torch._global_backward_pre_hooks]
    with ExitStack() as stack:
        for hooks in found:
            if hooks:
                stack.callback(hooks.update, dict(hooks))
                hooks.clear()
        yield


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b)
