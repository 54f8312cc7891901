"""Token mixers that run again in backward from their packed input.

State-space models (Mamba), delta rules (Qwen3-Next), and attention that a module spells out itself (Bloom, GPT-J) save
many tensors of [tokens, state] or [tokens, tokens] size inside of one module. No formula covers them all, and none is
needed: the module's own code runs again in backward, with the random numbers of the first run, and nothing is kept but
its input.

Whether that is allowed is proved once per module, at its first training call: it runs twice for its value alone, and
both runs have to give the same bits and leave arguments, buffers and attributes as they were. A module that fails stays
exact, and the log says so. A call with arguments that cannot be handed over twice (a filled cache, objects of unknown
kinds) runs as it is.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from laconic.activations.checkpoint import packed_inputs
from laconic.activations.choice import Offload, Packing
from laconic.activations.forwards import SiteForward
from laconic.activations.replay import Replay, forgetting
from laconic.activations.sites import Site
from laconic.formats import BlockFormat

__all__ = ["MixerForward"]


class MixerForward(SiteForward):
    """Keeps the packed input of a mixer, which runs again in backward.

    Args:
        module: the mixer.
        site: its description.
        format: how its input is packed.
    """

    def __init__(self, module: nn.Module, site: Site, format: Packing) -> None:
        super().__init__(module, site, format)
        self.repeats: bool | None = None  # not known before the first training call

    @property
    def input_format(self) -> BlockFormat:
        """The format of the kept input, which is not moved to the host."""
        return self.format.format if isinstance(self.format, Offload) else self.format

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, to be run again in backward where that is proved to give the same."""
        args, kwargs = self.positional(args, kwargs)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or self.stays_exact():
            return self.original(*args, **kwargs)
        if self.repeats is False or not self._may_run_again(args, kwargs):
            return self.original(*args, **kwargs)
        if self.repeats is None:
            self.repeats = self._repeats(args, kwargs)
            if not self.repeats:
                logging.getLogger("laconic").warning(
                    "%s (%s) stays exact: it does not compute the same when it runs twice, so backward cannot run it "
                    "again",
                    self.site.name,
                    type(self.module).__name__,
                )
                return self.original(*args, **kwargs)
        with packed_inputs(args, self.input_format):
            return torch.utils.checkpoint.checkpoint(self._run, *args, use_reentrant=False, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() != -1:  # in backward: what the first run wrote to a cache stays there
            args, kwargs = _without_caches(args, kwargs)
        return self.original(*args, **kwargs)

    def _may_run_again(self, args: Any, kwargs: Any) -> bool:
        """Whether a gradient is wanted, and arguments are tensors, plain values or caches without entries from it."""
        leaves = tree_leaves((args, kwargs))
        tensors = (*(leaf for leaf in leaves if isinstance(leaf, Tensor)), *self.module.parameters())
        if not args or not self.ours(args[0]) or not any(x.requires_grad for x in tensors):
            return False
        index = getattr(self.module, "layer_idx", None)
        for leaf in leaves:
            if _is_cache(leaf):
                if index is None or not _is_empty(leaf, index):
                    return False
            elif not (leaf is None or isinstance(leaf, Tensor | bool | int | float | str | torch.dtype | torch.device)):
                return False
        return True

    def _repeats(self, args: Any, kwargs: Any) -> bool:
        """Whether two runs give the same bits and change nothing."""
        args, kwargs = _without_caches(args, kwargs)
        replay = Replay(args[0].device, self.module)
        before = self._state(args, kwargs)
        random_state = replay.generators()
        values = []
        for _ in range(2):
            with forgetting(), replay.again(random_state):
                values.append(tree_flatten(self.original(*args, **kwargs)))
        if self._state(args, kwargs) != before or values[0][1] != values[1][1]:
            return False
        return all(_same(a, b) for a, b in zip(values[0][0], values[1][0], strict=True))

    def _state(self, args: Any, kwargs: Any) -> list[Any]:
        """What shows a change: versions of tensors, identities and plain attributes of all modules inside."""
        state: list[Any] = [leaf._version for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for module in self.module.modules():
            for name, value in module.__dict__.items():
                if isinstance(value, bool | int | float | str):
                    state.append((name, value))
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                state.append((name, id(tensor), None if tensor is None else tensor._version))
        return state


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b)


def _is_cache(value: Any) -> bool:
    """Whether a value is a cache of Hugging Face's."""
    return any(base.__name__ == "Cache" and "transformers" in base.__module__ for base in type(value).__mro__)


def _is_empty(cache: Any, layer: int) -> bool:
    """Whether a cache holds nothing for a layer; one that does not say so counts as filled."""
    try:
        return int(cache.get_seq_length(layer)) == 0
    except Exception:  # caches of state-space models have no lengths
        return False


def _without_caches(args: Any, kwargs: Any) -> tuple[Any, Any]:
    args = tuple(None if _is_cache(arg) else arg for arg in args)
    return args, {name: None if _is_cache(value) else value for name, value in kwargs.items()}
