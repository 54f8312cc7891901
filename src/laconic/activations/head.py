"""The head of a Hugging Face causal language model, with its loss computed in chunks (see loss.py).

The model's own forward runs unchanged; only its output projection and its loss function are replaced while it runs with
labels. The projection takes the labels, computes the loss (inside of its own forward, where FSDP2's hooks have gathered
its weight) and returns logits of no tokens, [batch, 0, vocabulary], which pass through whatever the model does to
logits. The loss function returns the projection's loss.

A trial decides which models can be served: the forward runs on made-up hidden states and logits, with labels, and has
to give the loss of the formula.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from laconic.activations.choice import Packing
from laconic.activations.derivatives import is_transformed
from laconic.activations.forwards import LinearForward
from laconic.activations.loss import LossSpec, check_range, mean, token_losses
from laconic.activations.replacement import ModelReplacement
from laconic.activations.sites import Site
from laconic.errors import DataError, ModelError
from laconic.formats import BlockFormat

__all__ = ["CausalForward", "CausalHead", "HeadForward", "find_head", "warn_inactive"]

_IGNORED = -100
"""The label of tokens that do not count, in every Hugging Face loss for causal language models."""


@dataclass(frozen=True)
class CausalHead:
    """The place of a model's head.

    Attributes:
        name: of the causal language model inside; "" if the model itself is it.
        projection: qualified name of the output projection.
        spec: the loss.
    """

    name: str
    projection: str
    spec: LossSpec


@dataclass
class _Request:
    """Labels for the projection, and the loss that it returns.

    Attributes:
        labels: one for each token of the hidden states, shifted already.
        num_items: divisor of the sum.
        loss: None until it is computed.
    """

    labels: Tensor
    num_items: int | float | Tensor | None
    loss: Tensor | None = None


class HeadForward(LinearForward):
    """The forward of the output projection: the loss of a request, or without one that of a linear layer.

    Args:
        module: an nn.Linear.
        site: what it is.
        format: how its input is kept if there is no request; None keeps it exact. A request keeps it exact, because
            packing would cost one more product with the vocabulary to save one tensor of the model.
        spec: what the model does to logits.
    """

    def __init__(self, module: nn.Module, site: Site, format: Packing | None, spec: LossSpec) -> None:
        super().__init__(module, site, format or BlockFormat())
        self.packs = format is not None
        self.spec = spec
        self.request: _Request | None = None

    def keeps(self, x: Tensor) -> bool:
        """Whether a loss is requested, or the linear layer has to save its input."""
        if self.request is not None and not isinstance(self.weight, DTensor):
            return True
        return self.packs and super().keeps(x)

    def stays_exact(self) -> bool:
        """Whether the input is not worth packing; a requested loss is computed in any case."""
        return self.request is None and super().stays_exact()

    def run(self, x: Tensor) -> Tensor:
        """The requested loss, as logits of no tokens, or the linear layer of x."""
        if self.request is None or isinstance(self.weight, DTensor):
            return super().run(x)
        return self._answer(self.request, x)

    @torch.compiler.disable(reason="laconic: a loop over tiles is no graph worth compiling")
    def _answer(self, request: _Request, x: Tensor) -> Tensor:
        """Compute the loss of x [..., hidden_size] for the request; returns logits of no tokens."""
        rows = x.reshape(-1, x.shape[-1])
        labels = request.labels.reshape(-1).to(x.device, torch.int64)
        if labels.shape != rows.shape[:1]:
            raise DataError(
                f"labels have shape {tuple(request.labels.shape)}, but the hidden states {tuple(x.shape)} of "
                f"{type(self.module).__name__} need one for each of {rows.shape[0]} tokens"
            )
        check_range(labels, self.weight.shape[0], _IGNORED)
        losses, logits = token_losses(rows, self.weight, self.module._parameters["bias"], labels, self.spec)
        request.loss = mean(losses, labels, _IGNORED, request.num_items)
        # A copy of nothing: FSDP2 warns where a module returns a view.
        return logits.view(*x.shape[:-2], 0, logits.shape[-1]).clone() if x.dim() > 1 else logits


class CausalForward(ModelReplacement):
    """Replaces the forward of a causal language model: the original one, with the loss computed by its projection.

    With labels and gradients enabled, the output's `logits` hold no tokens. All other calls are the original's: without
    labels, without gradients, with `logits_to_keep`, or after another loss function was given to the model.

    Args:
        module: whose forward is replaced.
        head: the forward of its output projection.
    """

    def __init__(self, module: nn.Module, head: HeadForward) -> None:
        super().__init__(module)
        self.head = head
        self.loss_function = _attribute(module, "loss_function")
        self.is_running = False

    def install(self) -> None:
        """Replace the forwards of the model and of the model below the head."""
        super().install()
        body = _attribute(self.module, "base_model")
        if isinstance(body, nn.Module) and body is not self.module:
            BodyForward(body, self).install()

    # What is inside of the model is compiled; this frame only hands labels over.
    @torch.compiler.disable(
        recursive=False, reason="laconic: the loss is computed in chunks outside of compiled graphs"
    )
    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The original forward, with the chunked loss where the arguments allow it."""
        request = self._request(args, kwargs)
        self.is_running = True
        try:
            with nullcontext() if request is None else self._standing_in(request):
                return self.original(*args, **kwargs)
        finally:
            self.is_running = False

    def _request(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Request | None:
        """The request to the projection for this call, None if the original computes the loss."""
        if not torch.is_grad_enabled() or is_transformed():
            return None
        given = inspect.signature(type(self.module).forward).bind_partial(self.module, *args, **kwargs)
        given.apply_defaults()
        arguments = {**given.arguments, **given.arguments.get("kwargs", {})}
        reason = self._obstacle(arguments)
        if reason is not None:
            if self.module.training:
                warn_inactive(reason)
            return None
        labels, shifted = arguments["labels"], arguments.get("shift_labels")
        return _Request(_shift(labels) if shifted is None else shifted, arguments.get("num_items_in_batch"))

    def _obstacle(self, arguments: dict[str, Any]) -> str | None:
        """Why a call with these arguments needs all logits, None if it does not."""
        if _attribute(self.module, "loss_function") is not self.loss_function:
            return "another loss_function was given to the model after the conversion"
        if _attribute(self.module, "get_output_embeddings")() is not self.head.module:
            return "the output projection was replaced or adapted after the conversion"
        if not isinstance(arguments.get("labels"), Tensor):
            return (
                "the model was called without labels, so its loss is computed from the logits elsewhere, as Hugging "
                "Face's Trainer does for label_smoothing_factor and compute_loss_func; hand the labels to the model, "
                "or compute the loss by laconic.linear_cross_entropy, which knows label smoothing"
            )
        if arguments.get("ignore_index", _IGNORED) != _IGNORED:
            return f"ignore_index is {arguments['ignore_index']}, and only {_IGNORED} is served"
        kept = arguments.get("logits_to_keep", 0)
        return None if isinstance(kept, int) and kept == 0 else "logits_to_keep asks for the logits of some tokens"

    @contextmanager
    def _standing_in(self, request: _Request) -> Iterator[None]:
        def loss_function(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if request.loss is None:  # the projection ran as it is, for fp64 or a weight that is not gathered
                value: Tensor = self.loss_function(logits, *args, **kwargs)
                return value
            # The sum of no logits is zero, and ties the loss to the projection's output, which FSDP2's hooks watch.
            return request.loss + logits.sum()

        own = self.module.__dict__.get("_loss_function")
        self.head.request = request
        self.module.__dict__["_loss_function"] = loss_function
        try:
            yield
        finally:
            self.head.request = None
            del self.module.__dict__["_loss_function"]
            if own is not None:
                self.module.__dict__["_loss_function"] = own


class BodyForward(ModelReplacement):
    """Replaces the forward of the model below the head, to warn when a host bypasses the head, as TRL does."""

    def __init__(self, module: nn.Module, causal: CausalForward) -> None:
        super().__init__(module)
        self.causal = causal

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The original forward; warns in training if the head is bypassed."""
        past_head = self.causal.enabled and not self.causal.is_running
        if past_head and self.module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            warn_inactive(
                "the loss is computed from hidden states past the model's own head, as TRL's SFTTrainer does; how much"
                " it keeps is the host's choice there"
            )
        return self.original(*args, **kwargs)


@cache
def warn_inactive(reason: str) -> None:
    """Warn once that the chunked loss is not used."""
    logging.getLogger("laconic").warning("loss='chunked' is inactive: %s", reason)


def _attribute(module: nn.Module, name: str) -> Any:
    return getattr(module, name, None)


def _shift(labels: Tensor) -> Tensor:
    """For each token the label of the next one; the last has none."""
    return F.pad(labels, (0, 1), value=_IGNORED)[..., 1:]


def find_head(model: nn.Module) -> CausalHead:
    """The causal language model in `model` (itself, or what an adapter wraps) and what its loss is.

    Raises:
        ModelError: there is none, or it computes another loss; says which part does not fit.
    """
    for name, module in model.named_modules():
        if hasattr(type(module), "get_output_embeddings") and _takes(module, "labels"):
            projection = _projection_of(module)
            full_name = f"{name}.{projection}" if name else projection
            return CausalHead(name, full_name, _spec_of(module, projection))
    raise ModelError(
        f"loss is 'chunked', but {type(model).__name__} holds no Hugging Face causal language model; "
        f"call laconic.linear_cross_entropy where the loss is computed"
    )


def _takes(module: nn.Module, *names: str) -> bool:
    return set(names) <= set(inspect.signature(type(module).forward).parameters)


def _projection_of(module: nn.Module) -> str:
    """The name of the output projection, a plain linear child of the language model."""
    projection = _attribute(module, "get_output_embeddings")()
    name = next((name for name, child in module.named_children() if child is projection), None)
    if name is None or type(projection) is not nn.Linear:
        raise ModelError(
            f"loss is 'chunked', but the output projection of {type(module).__name__} is "
            f"{type(projection).__name__}, and it must be a plain nn.Linear child; use loss='exact'"
        )
    return name


class _Output(dict[str, Any]):
    """Hidden states as the result of a base model; whatever else is asked for is None."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int):
            return self["last_hidden_state"] if key == 0 else None
        return () if isinstance(key, slice) else super().__getitem__(key)


class _Returns(nn.Module):
    """Returns the same value whatever it is called with, and so does every child that it is asked for."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.value

    def __getattr__(self, name: str) -> Any:
        return self  # nothing else is there, or this would not be called


def _spec_of(module: nn.Module, projection: str) -> LossSpec:
    """What happens between the projection and the loss, found by running the forward on made-up logits."""
    config = _attribute(module, "config")
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    scales = [1.0, getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)]
    scales += [None if not scale else 1.0 / scale for scale in scales[1:]]
    caps = [None, getattr(config, "final_logit_softcapping", None)]
    generator = torch.Generator().manual_seed(0)
    num_entries = len(next(module.get_submodule(projection).parameters()))
    logits = 20 * torch.randn(1, 6, num_entries, generator=generator)
    labels = torch.randint(num_entries, (1, 6), generator=generator)
    labels[0, 2] = _IGNORED
    trials: list[dict[str, Any]] = [{}]
    if any(p.kind is p.VAR_KEYWORD for p in inspect.signature(type(module).forward).parameters.values()):
        trials += [{"num_items_in_batch": 7}, {"shift_labels": labels.flip(1)}]
    try:
        found = [_try(module, projection, logits, labels, trial) for trial in trials]
    except Exception as error:  # whatever it is, it is not a forward of the kind looked for
        raise ModelError(
            f"loss is 'chunked', but the forward of {type(module).__name__} cannot be tried on made-up logits "
            f"({type(error).__name__}: {error}); use loss='exact'"
        ) from error
    for scale, cap in product((scale for scale in scales if scale is not None), caps):
        if cap is None and caps[1] is not None:
            continue
        spec = LossSpec(softcap=cap, scale=float(scale))
        expected = [_expected(spec, logits, labels, trial) for trial in trials]
        if all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(found, expected, strict=True)):
            return spec
    raise ModelError(
        f"loss is 'chunked', but {type(module).__name__} computes another loss than the cross entropy of the next "
        f"token (tried on made-up logits); use loss='exact'"
    )


def _try(module: nn.Module, projection: str, logits: Tensor, labels: Tensor, options: dict[str, Any]) -> Tensor:
    """The loss that the module's forward computes from these logits."""
    twin = module.__class__.__new__(module.__class__)
    twin.__dict__.update(module.__dict__)
    hidden = torch.zeros(*labels.shape, 8)
    rest = {name: _Returns(_Output(last_hidden_state=hidden)) for name in module._modules if name != projection}
    twin.__dict__["_modules"] = {**rest, projection: _Returns(logits.clone())}
    arguments = {"input_ids": torch.zeros_like(labels), "labels": labels} | options
    for name in ("output_router_logits", "use_cache"):
        if _takes(module, name):
            arguments[name] = False
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        loss: Tensor = type(module).forward(twin, **arguments).loss
    return loss


def _expected(spec: LossSpec, logits: Tensor, labels: Tensor, options: dict[str, Any]) -> Tensor:
    """The loss of these logits by the formula."""
    logits = logits * spec.scale
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    shifted = options.get("shift_labels", _shift(labels)).reshape(-1)
    losses = F.cross_entropy(logits.flatten(0, 1), shifted, reduction="none")
    return mean(losses, shifted, _IGNORED, options.get("num_items_in_batch"))
