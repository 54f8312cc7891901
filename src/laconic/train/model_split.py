"""Cuts a Hugging Face causal language model into the chunks of a pipeline; nothing here knows of processes.

A chunk is the model itself with parts missing. A `Gap` replaces a missing decoder layer and passes its input on, so the
layers that are there keep their numbers, parameters keep their global names, and the model's own forward still makes
masks and rotary positions for them. A chunk that is not the first takes its hidden states in at layer 0, whatever
embeddings came before; one that is not the last gives out what reaches the last layer. Watching a forward finds the
modules before and after the layers, and the chain of chunks is compared with the model bit for bit before it is used: a
model that cannot be cut this way is refused, not trained wrongly.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from laconic.activations.whole_model.causal_loss import causal_loss
from laconic.cost.memory import split as layer_split
from laconic.errors import ConfigError, ModelError

_TRIAL_TOKENS = 8


class Gap(nn.Module):
    """Replaces a decoder layer that another chunk has."""

    def __init__(self, layer: nn.Module, gives_tuple: bool) -> None:
        super().__init__()
        # What a model's forward may ask its layers, such as `attention_type`.
        plain = {name: value for name, value in vars(layer).items() if isinstance(value, str | int | float | bool)}
        self.__dict__.update({name: value for name, value in plain.items() if not name.startswith("_")})
        self._gives_tuple = gives_tuple
        self.taken_in: Tensor | None = None
        """Hidden states to hand on instead of what the forward is given."""
        self.given_out: Tensor | None = None
        """Hidden states of the last forward."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Pass the hidden states on, in the form that the layer gives them."""
        self.given_out = hidden_states if self.taken_in is None else self.taken_in
        return (self.given_out,) if self._gives_tuple else self.given_out


class Absent(nn.Module):
    """Replaces an embedding, norm or head that another chunk has; its output is thrown away."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The input, or a zero in place of token ids: a value that nothing reads."""
        return x if x.is_floating_point() else torch.zeros((), device=x.device, dtype=torch.float32)


class ModelChunk(nn.Module):
    """Consecutive layers of a causal language model, with the embedding if they are the first and the head if the last.

    Args:
        model: the model with parts missing, under the global names.
        entry, exit: where hidden states [n, T, hidden] come in and go out, None at the ends of the pipeline.
    """

    def __init__(self, model: nn.Module, entry: Gap | None, exit: Gap | None) -> None:
        super().__init__()
        self.model = model
        # In a tuple, as they are registered inside the model already.
        self._gaps = (entry, exit)

    @property
    def is_first(self) -> bool:
        """Whether the chunk takes tokens."""
        return self._gaps[0] is None

    @property
    def is_last(self) -> bool:
        """Whether the chunk gives logits, and the loss."""
        return self._gaps[1] is None

    def hidden_states(self, x: Tensor) -> Tensor:
        """Hidden states [n, T, h] after the layers of this chunk, not the last.

        `x` are tokens int64 [n, T] or hidden states [n, T, h].
        """
        _, exit = self._gaps
        assert exit is not None
        with self._taken_in(x) as inputs:
            self.model(**inputs, use_cache=False)
        out, exit.given_out = exit.given_out, None
        assert out is not None
        return out

    def loss(self, x: Tensor, labels: Tensor, chunked: bool = False) -> Tensor:
        """`mean_loss` of the whole pipeline, in the last chunk; `labels` int64 [n, T]."""
        with self._taken_in(x) as inputs:
            return mean_loss(self.model, labels, chunked, **inputs)

    def logits(self, x: Tensor) -> Tensor:
        """The model's logits [n, T, vocabulary], in the last chunk."""
        with self._taken_in(x) as inputs:
            logits: Tensor = self.model(**inputs, use_cache=False).logits
        return logits

    @contextmanager
    def _taken_in(self, x: Tensor) -> Any:
        entry, _ = self._gaps
        if entry is None:
            yield {"input_ids": x}
            return
        entry.taken_in = x
        try:
            # The embeddings give the model shape, dtype and device; their values end at the entry.
            yield {"inputs_embeds": x}
        finally:
            entry.taken_in = entry.given_out = None


def mean_loss(model: nn.Module, labels: Tensor, chunked: bool = False, **inputs: Tensor) -> Tensor:
    """Mean cross entropy, fp32 0-dim, of the model's predictions for `inputs` against `labels`, int64 [n, T].

    Labels of -100 do not count; with nothing else the loss is 0. `chunked` says that the model was given
    `loss="chunked"` (laconic.compress_activations), which serves where gradients are wanted.
    """
    if chunked and torch.is_grad_enabled():
        labels = labels.contiguous()  # the model's own loss, which an audit runs, wants a view of them
        loss: Tensor = model(**inputs, labels=labels, shift_labels=labels, use_cache=False).loss
        return loss
    logits = model(**inputs, use_cache=False).logits
    num_labels = (labels != -100).sum().clamp(min=1)
    # Labels are those of the next token already, so nothing is left to shift.
    return causal_loss(logits, None, logits.shape[-1], num_items_in_batch=num_labels, shift_labels=labels)


def decoder_stack(model: nn.Module) -> nn.ModuleList | None:
    """The largest module list of `model` by parameters, which is its stack of layers; None without one."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=_num_parameters, default=None)


def balanced_split(model: nn.Module, num_chunks: int) -> tuple[int, ...]:
    """Layers per chunk such that the work of the largest chunk, by parameters, is as small as it can be.

    The head counts with the last chunk; looking up an embedding is no work.

    Raises:
        ConfigError: there are fewer layers than chunks.
    """
    layers = _layers(model, num_chunks)
    head = model.get_output_embeddings()  # type: ignore[operator]
    last = 0 if head is None else _num_parameters(head)
    return layer_split.balanced_split([_num_parameters(layer) for layer in layers], num_chunks, last=last)


def split_model(model: nn.Module, split: Sequence[int]) -> list[ModelChunk]:
    """The chunks of `model`, a Hugging Face causal language model on the CPU, with `split[i]` layers in chunk i.

    They share parameters and layers with `model`. The last chunk keeps an embedding that is tied to the head, so that
    its parameter has the name it has in the whole model.

    Raises:
        ConfigError: `split` does not fit the layers.
        ModelError: the chain of chunks does not compute what the model computes.
    """
    layers = _layers(model, len(split))
    if min(split) < 1 or sum(split) != len(layers):
        raise ConfigError(
            f"pipeline.split is {list(split)}, but it must give each of {len(split)} chunks at least one of the "
            f"model's {len(layers)} layers and leave none over"
        )
    before, after, gives_tuple = _watch(model, layers)
    chunks = []
    start = 0
    for index, count in enumerate(split):
        is_first, is_last = index == 0, index == len(split) - 1
        gaps = {
            number: Gap(layer, gives_tuple)
            for number, layer in enumerate(layers)
            if not start <= number < start + count
        }
        absent = [] if is_first else before
        if is_last:
            head = {id(parameter) for module in after for parameter in module.parameters()}
            absent = [m for m in absent if not any(id(parameter) in head for parameter in m.parameters())]
        else:
            absent = [*absent, *after]
        chunks.append(_chunk(model, layers, gaps, absent, is_first, is_last))
        start += count
    _check(model, chunks)
    return chunks


def _layers(model: nn.Module, num_chunks: int) -> list[nn.Module]:
    stack = decoder_stack(model)
    layers = [] if stack is None else list(stack)
    if len(layers) < num_chunks:
        raise ConfigError(
            f"the model has {len(layers)} decoder layers, but pipeline.stages x pipeline.virtual_stages asks for "
            f"{num_chunks} chunks of at least one layer; lower them"
        )
    return layers


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _chunk(
    model: nn.Module,
    layers: Sequence[nn.Module],
    gaps: dict[int, Gap],
    absent: Sequence[nn.Module],
    is_first: bool,
    is_last: bool,
) -> ModelChunk:
    """A copy of the model's skeleton: tensors and kept modules are shared, missing ones replaced."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    memo |= {id(layer): gaps.get(number, layer) for number, layer in enumerate(layers)}
    memo |= {id(module): Absent() for module in absent}
    skeleton = copy.deepcopy(model, memo)
    return ModelChunk(skeleton, None if is_first else gaps[0], None if is_last else gaps[len(layers) - 1])


def _watch(model: nn.Module, layers: Sequence[nn.Module]) -> tuple[list[nn.Module], list[nn.Module], bool]:
    """Modules with parameters of their own that run before and after the layers, and whether layers give tuples."""
    inside = {id(module) for layer in layers for module in layer.modules()}
    order: list[nn.Module] = []
    gives_tuple = False

    def note(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal gives_tuple
        order.append(module)
        gives_tuple |= isinstance(output, tuple)

    handles = [
        module.register_forward_hook(note)
        for module in model.modules()
        if id(module) == id(layers[0]) or (id(module) not in inside and any(True for _ in module.parameters(False)))
    ]
    try:
        _trial(model)
    finally:
        for handle in handles:
            handle.remove()
    if layers[0] not in order:
        raise _cannot_cut(model, "its decoder layers do not run in a forward")
    at = order.index(layers[0])
    return order[:at], order[at + 1 :], gives_tuple


def _trial_tokens(model: nn.Module) -> Tensor:
    parameter = next(model.parameters())
    return torch.arange(_TRIAL_TOKENS, device=parameter.device)[None] % 7


@torch.no_grad()
def _trial(model: nn.Module) -> Tensor:
    training = model.training
    model.eval()
    try:
        logits: Tensor = model(input_ids=_trial_tokens(model), use_cache=False).logits
    finally:
        model.train(training)
    return logits


@torch.no_grad()
def _check(model: nn.Module, chunks: Sequence[ModelChunk]) -> None:
    expected = _trial(model)
    training = model.training
    for chunk in chunks:
        chunk.eval()
    try:
        x = _trial_tokens(model)
        for chunk in chunks[:-1]:
            x = chunk.hidden_states(x)
        got = chunks[-1].logits(x)
    except Exception as error:
        raise _cannot_cut(model, f"a part of it fails: {error}") from error
    finally:
        for chunk in chunks:
            chunk.train(training)
    if not torch.equal(got, expected):
        raise _cannot_cut(model, "the parts one after another compute something else than the whole")


def _cannot_cut(model: nn.Module, why: str) -> ModelError:
    return ModelError(
        f"{type(model).__name__} cannot be cut into pipeline stages: {why}; train it with pipeline.stages = 1 and "
        'parallel = "fsdp"'
    )
