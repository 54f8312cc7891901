"""Torch's own attention and recurrent layers, which run again in backward from their packed input.

`nn.MultiheadAttention` keeps query, key, value, its attention's output and, with dropout, probabilities of all pairs of
tokens; `nn.LSTM`, `nn.GRU` and `nn.RNN` keep the gates of all steps, inside of one kernel where no hook reaches. So the
whole module runs again (see mixer.py), and its input is all that is kept: query, key and value, one that is several of
them once; the input of a recurrent layer, also of packed sequences. States that are passed in stay exact.

cuDNN draws the dropout between recurrent layers from a state of its own, which cannot be set back: such a layer stays
exact on CUDA.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from laconic.activations.forwards.mixer import MixerForward


def mixer_of(module: nn.Module) -> type[MixerForward]:
    """The forward for a module that runs again."""
    if isinstance(module, nn.MultiheadAttention):
        return AttentionModuleForward
    return RecurrentForward if isinstance(module, nn.RNNBase) else MixerForward


class AttentionModuleForward(MixerForward):
    """Keeps packed query, key and value of an `nn.MultiheadAttention`."""

    packs_data = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, to be run again in backward."""
        given = []
        for name in ("query", "key", "value")[len(args) :]:
            if name not in kwargs:
                break
            given.append(kwargs[name])
        kwargs = {name: value for name, value in kwargs.items() if name not in ("query", "key", "value")}
        args = (*args, *given)
        if any(isinstance(x, Tensor) and x.is_nested for x in args[:3]):
            return self.original(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def inputs(self, args: Any, kwargs: Any) -> list[Tensor]:
        """Query, key and value."""
        return [x for x in args[:3] if self.ours(x)]


class RecurrentForward(MixerForward):
    """Keeps the packed input of an LSTM, GRU or RNN."""

    packs_data = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, to be run again in backward."""
        args, kwargs = self.positional(args, kwargs)
        module = self.module
        assert isinstance(module, nn.RNNBase)
        if not args or (module.training and module.dropout > 0 and module.num_layers > 1 and _on_cuda(args[0])):
            return self.original(*args, **kwargs)
        if isinstance(args[0], PackedSequence):  # its parts, so that each is a tensor among the arguments
            args = (*args[0], *args[1:])
        return super().__call__(*args, **kwargs)

    def run_module(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, of a packed sequence from its parts."""
        if not _is_sequence(args):
            return self.original(*args, **kwargs)
        output, states = self.original(PackedSequence(*args[:4]), *args[4:], **kwargs)
        return output, states

    def inputs(self, args: Any, kwargs: Any) -> list[Tensor]:
        """What is computed step by step, without the states before the first one."""
        return [args[0]]


def _on_cuda(x: Any) -> bool:
    data = x.data if isinstance(x, PackedSequence) else x
    return isinstance(data, Tensor) and data.is_cuda


def _is_sequence(args: Any) -> bool:
    """Whether arguments are the parts of a packed sequence: behind the data follow sizes of batches, not a state."""
    return len(args) >= 4 and isinstance(args[1], Tensor) and not args[1].is_floating_point()
