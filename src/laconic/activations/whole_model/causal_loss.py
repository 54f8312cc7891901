"""The loss of Hugging Face language models, with the same bits and without copies of the logits.

From 16-bit logits, transformers' loss for causal language models makes an fp32 copy, and log-probabilities of that,
which it keeps; its backward has these, their gradient and that of the copy at once, twelve bytes per logit. These are
the largest tensors of a step once activations are packed. Here the same operations of torch run on some rows at a time.
Kept are the logits as they are, of which backward makes the same log-probabilities again; of fp32 logits these
themselves, which are no larger.

Rows are independent of each other in all of these operations, and what is added up over rows, the loss itself, is made
in one call. A trial proves at the first use that transformers' function computes this, and again whenever a host has
put another function in the place of it or of one that it calls (Liger Kernel does).
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from laconic.activations.backward.derivatives import derivative, is_transformed
from laconic.activations.forwards.replacement import ModelReplacement
from laconic.activations.keep.witnesses import check_unchanged, glances
from laconic.activations.recognize.trial import usual_numbers
from laconic.ops.derivatives import connected, edge_of, gradients

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_IGNORED = -100

TILES = {"cpu": 1 << 18, "cuda": 1 << 24}
"""By device type, the logits of a tile: on the CPU three of them in fp32 stay in a core's cache."""


def causal_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = _IGNORED,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """transformers' `ForCausalLMLoss`: the cross entropy of each next token, with the same bits.

    Args:
        logits: [..., tokens, vocab_size], of 16 or 32 bits.
        labels: int64 [..., tokens]; the logits of a token are for the label of the next one.
        vocab_size: of the last dimension.
        num_items_in_batch: divides the sum; None takes the mean over tokens that count.
        ignore_index: the label of tokens that do not count.
        shift_labels: labels that are shifted already, instead of `labels`.

    Returns:
        fp32 0-dim.
    """
    if shift_labels is None:
        assert labels is not None
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
    targets = shift_labels.reshape(-1).to(logits.device)
    reduction = 1 if num_items_in_batch is None else 2
    loss: Tensor = _CrossEntropy.apply(logits.reshape(-1, vocab_size), targets, reduction, ignore_index)
    if num_items_in_batch is None:
        return loss
    divisor = num_items_in_batch.to(loss.device) if isinstance(num_items_in_batch, Tensor) else num_items_in_batch
    return loss / divisor


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy of logits [n, vocabulary] and targets int64 [n]; reduction 1 is the mean, 2 the sum."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, reduction: int, ignore_index: int) -> Tensor:
        aten, is_wide = torch.ops.aten, logits.dtype == torch.float32
        kept = torch.empty_like(logits, memory_format=torch.contiguous_format) if is_wide else logits
        of_targets = torch.empty((len(logits), 1), dtype=torch.float32, device=logits.device)
        for rows in _tiles(logits):
            if is_wide:
                part = aten._log_softmax.out(logits[rows], 1, False, out=kept[rows])
            else:
                part = aten._log_softmax(logits[rows].float(), 1, False)
            losses, _ = aten.nll_loss_forward(part, targets[rows], None, 0, ignore_index)
            torch.neg(losses.unsqueeze(1), out=of_targets[rows])
        columns = torch.where(targets == ignore_index, _IGNORED, 0)  # there is one
        loss, total_weight = aten.nll_loss_forward(of_targets, columns, None, reduction, _IGNORED)
        ctx.dtype, ctx.reduction, ctx.ignore_index = logits.dtype, reduction, ignore_index
        ctx.seen = () if is_wide else glances((logits,))
        ctx.save_for_backward(edge_of(logits), kept, targets, total_weight)
        value: Tensor = loss
        return value

    @staticmethod
    @derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        edge, kept, targets, total_weight = ctx.saved_tensors
        is_wide = ctx.dtype == torch.float32
        if not is_wide:
            check_unchanged(ctx.seen, (kept,), "a tensor of logits")
        if torch.is_grad_enabled():
            # Log-probabilities differ from the logits by a number per row, which the loss does not depend on.
            formula = partial(
                F.cross_entropy,
                target=targets,
                reduction="mean" if ctx.reduction == 1 else "sum",
                ignore_index=ctx.ignore_index,
            )
            (found,) = gradients(formula, (connected(kept.float(), edge),), grad, (True,))
            return None if found is None else found.to(ctx.dtype), None, None, None
        dlogits = torch.empty(kept.shape, dtype=ctx.dtype, device=kept.device)
        for rows in _tiles(kept):
            out = dlogits[rows]
            part = kept[rows] if is_wide else torch.ops.aten._log_softmax(kept[rows].float(), 1, False)
            of_loss = torch.ops.aten.nll_loss_backward(
                grad, part, targets[rows], None, ctx.reduction, ctx.ignore_index, total_weight
            )
            if is_wide:
                torch.ops.aten._log_softmax_backward_data.out(of_loss, part, 1, torch.float32, out=out)
            else:
                out.copy_(torch.ops.aten._log_softmax_backward_data(of_loss, part, 1, torch.float32))
            del of_loss, part  # before the next tile's are made
        return dlogits, None, None, None


def _tiles(x: Tensor) -> Iterator[slice]:
    """Rows of x [n, vocabulary], some at a time."""
    size = max(1, TILES["cpu" if x.device.type == "cpu" else "cuda"] // max(1, x.shape[1]))
    return (slice(start, start + size) for start in range(0, x.shape[0], size))


def has_causal_loss(module: nn.Module) -> bool:
    """Whether a module is a language model of transformers that may ask for its loss for causal language models."""
    cls = type(module)
    if not hasattr(cls, "loss_function") or "labels" not in inspect.signature(cls.forward).parameters:
        return False
    return _is_proved(*loss_functions())


def loss_functions() -> tuple[Callable[..., Tensor] | None, ...]:
    """transformers' loss for causal language models, and what it calls, as they are now."""
    module = sys.modules.get("transformers.loss.loss_utils")
    return getattr(module, "ForCausalLMLoss", None), getattr(module, "fixed_cross_entropy", None), F.cross_entropy


@lru_cache(8)
def _is_proved(original: Callable[..., Tensor] | None, *_: Callable[..., Tensor] | None) -> bool:
    """Whether transformers' function, by those that it calls, gives the same bits on a few numbers."""
    if original is None:
        return False
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(11, (2, 5), generator=generator, device="cpu")
    labels[0, 2] = _IGNORED
    options: list[dict[str, Any]] = [{}, {"num_items_in_batch": 7}, {"shift_labels": labels.flip(1)}]
    options.append({"label_smoothing": 0.5, "weight": torch.arange(11.0, device="cpu")})  # which it takes and ignores
    with usual_numbers(), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        for dtype in _DTYPES:
            logits = (torch.randn(2, 5, 11, generator=generator) * 4).to(dtype).requires_grad_()
            for option in options:
                try:
                    losses = [loss(logits, labels, vocab_size=11, **option) for loss in (original, causal_loss)]
                    grads = [torch.autograd.grad(loss, logits)[0] for loss in losses]
                except Exception:  # whatever it is, it is not the function that was known
                    return False
                if not torch.equal(*losses) or not torch.equal(*grads):
                    return False
    return True


class CausalLossForward(ModelReplacement):
    """Runs the model's own forward, in which `causal_loss` stands for transformers' loss for causal language models.

    A model that has another loss, or is given one later, keeps that, and a compiled graph computes it in its own way.
    """

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The original forward; where gradients are wanted, with the loss made some rows at a time."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or is_transformed():
            return self.original(*args, **kwargs)
        with standing_in(self.module, self._loss):
            return self.original(*args, **kwargs)

    def _loss(self, *args: Any, **kwargs: Any) -> Any:  # losses have arguments of their own
        original: Any = loss_function_of(self.module)
        logits: Any = args[0] if args else kwargs.get("logits")
        plain = type(logits) in (Tensor, FakeTensor)  # also where the planner traces a step
        served = plain and logits.dtype in _DTYPES and logits.requires_grad
        now = loss_functions()
        is_known = served and original is now[0] and _is_proved(*now)
        return (causal_loss if is_known else original)(*args, **kwargs)


class _StandIn:
    """Stands in the place of a model's loss function while forwards run, for the threads in which they do.

    Any other thread that runs the model meanwhile, as an evaluation may, gets the model's own.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.before = module.__dict__.get(_ATTRIBUTE)
        self.num_forwards = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = _RUNNING.values.get(id(self))
        return (self.own() if function is None else function)(*args, **kwargs)

    def own(self) -> Any:
        """The loss function without this."""
        if self.before is not None:
            return self.before
        twin: Any = object.__new__(type(self.module))
        twin.__dict__.update(self.module.__dict__)
        twin.__dict__.pop(_ATTRIBUTE, None)
        return twin.loss_function


class Running(threading.local):
    """What the forwards that run in this thread set for others, by the identity of who asks for it."""

    def __init__(self) -> None:
        self.values: dict[int, Any] = {}


_RUNNING = Running()
_LOCK = threading.Lock()
_ATTRIBUTE = "_loss_function"


@contextmanager
def standing_in(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """While the block runs, the model's code gets `function` for its loss function, in this thread alone."""
    own = module.__dict__
    with _LOCK:
        found = own.get(_ATTRIBUTE)
        there = found if isinstance(found, _StandIn) and found.module is module else _StandIn(module)
        own[_ATTRIBUTE] = there
        there.num_forwards += 1
    outer = _RUNNING.values.get(id(there))
    _RUNNING.values[id(there)] = function
    try:
        yield
    finally:
        if outer is None:
            del _RUNNING.values[id(there)]
        else:
            _RUNNING.values[id(there)] = outer
        with _LOCK:
            there.num_forwards -= 1
            if not there.num_forwards and own.get(_ATTRIBUTE) is there:
                del own[_ATTRIBUTE]
                if there.before is not None:
                    own[_ATTRIBUTE] = there.before


def loss_function_of(module: Any) -> Any:
    """The model's loss function, whatever stands for it while forwards run."""
    found = getattr(module, "loss_function", None)
    return found.own() if isinstance(found, _StandIn) else found
