"""The head of a Hugging Face language model, with its loss computed in chunks (see loss.py).

The model's own forward runs unchanged; only its output projection and its loss function are replaced while it runs with
labels. The projection takes the labels, computes the loss (inside of its own forward, where FSDP2's hooks have gathered
its weight) and returns logits of no tokens, [batch, 0, vocabulary], which pass through whatever the model does to
logits. The loss function returns the projection's loss: the model's own `loss_function`, or, where a masked or
sequence-to-sequence model spells out its loss, torch's `cross_entropy`.

A trial decides which models can be served: the forward runs on made-up hidden states and logits, with labels, and has
to give the loss of the formula.
"""

from __future__ import annotations

import inspect
import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_leaves

from laconic.activations.backward.derivatives import is_transformed
from laconic.activations.forwards.base import LinearForward
from laconic.activations.forwards.replacement import ModelReplacement, owner_of, replacements_of
from laconic.activations.host.modules import forward_of
from laconic.activations.keep.choice import Packing
from laconic.activations.recognize.sites import Site
from laconic.activations.recognize.trial import usual_numbers
from laconic.activations.whole_model.causal_loss import Running, loss_function_of, loss_functions, standing_in
from laconic.activations.whole_model.loss import LossSpec, VocabularyShard, check_range, divisor_of, tiled_loss
from laconic.activations.whole_model.report import text_config
from laconic.errors import DataError, ModelError
from laconic.formats import BlockFormat
from laconic.formats.shards import local_part

_IGNORED = -100
"""The label of tokens that do not count, in every Hugging Face loss for causal language models."""

_OPTIONS = ("num_items_in_batch", "shift_labels")
"""Arguments of a model's forward that change its loss."""


@dataclass(frozen=True)
class CausalHead:
    """The place of a model's head.

    Attributes:
        name: of the language model inside; "" if the model itself is it.
        projection: qualified name of the output projection.
        spec: the loss.
        shifts: whether the logits of a token are for the next one's label (causal), not for its own (masked,
            sequence-to-sequence).
        options: which of `num_items_in_batch` and `shift_labels` the loss heeds.
        calls_function: whether the model asks its `loss_function`; if not, its code calls torch's cross entropy.
    """

    name: str
    projection: str
    spec: LossSpec
    shifts: bool = True
    options: tuple[str, ...] = _OPTIONS
    calls_function: bool = True


@dataclass
class _Request:
    """Labels for the projection, and the loss that it returns.

    Attributes:
        labels: one for each token of the hidden states, shifted already.
        num_items: divisor of the sum.
        offset: what the model adds to the logits of each token, or None.
        calls_function: see `CausalHead`.
        loss: None until it is computed.
    """

    labels: Tensor
    num_items: int | float | Tensor | None
    offset: Tensor | None = None
    calls_function: bool = True
    loss: Tensor | None = None

    def answer(self, logits: Tensor) -> Tensor:
        """The loss; the sum of no logits is zero, and ties it to the projection's output, which FSDP2's hooks watch."""
        assert self.loss is not None
        return self.loss + local_part(logits).sum()


class _NoLogits(Tensor):
    """Logits of no tokens that carry a request: their cross entropy is its loss, and so is that of their views."""

    request: _Request | None = None

    @classmethod
    def carrying(cls, logits: Tensor, request: _Request) -> Tensor:
        """The logits as a tensor of this class.

        Raises:
            ModelError: they have no numbers, only a shape, as in planning: torch makes no such tensor of those.
        """
        if isinstance(logits, FakeTensor):
            raise ModelError(
                "loss is 'chunked', but the model computes its cross entropy without self.loss_function, which cannot "
                "be followed without numbers; plan it with the exact loss"
            )
        carrier = logits.as_subclass(cls)
        carrier.request = request
        return carrier

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        logits = kwargs.get("input", args[0] if args else None)
        request = next((x.request for x in tree_leaves((args, kwargs)) if isinstance(x, cls)), None)
        if func is F.cross_entropy and isinstance(logits, cls) and request is not None:
            return request.answer(logits.as_subclass(Tensor))
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, cls):
            result.request = request
        return result


_REQUESTS = Running()
"""Of heads' forwards."""


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
        self._request: _Request | None = None

    @property
    def request(self) -> _Request | None:
        """What the forward that runs in this thread asks for; a graph of torch.compile does not know its thread."""
        return self._request if torch.compiler.is_compiling() else _REQUESTS.values.get(id(self))

    @request.setter
    def request(self, request: _Request | None) -> None:
        self._request = request
        if request is None:
            _REQUESTS.values.pop(id(self), None)
        else:
            _REQUESTS.values[id(self)] = request

    def keeps(self, x: Tensor) -> bool:
        """Whether a loss is requested, or the linear layer has to save its input."""
        return self.request is not None or (self.packs and super().keeps(x))

    def stays_exact(self) -> bool:
        """Whether the input is not worth packing; a requested loss is computed in any case."""
        return self.request is None and super().stays_exact()

    def run(self, x: Tensor, is_traced: bool) -> Tensor:
        """The requested loss, as logits of no tokens, or the linear layer of x."""
        return super().run(x, is_traced) if self.request is None else self._answer(self.request, x)

    @torch.compiler.disable(reason="laconic: a loop over tiles is no graph worth compiling")
    def _answer(self, request: _Request, x: Tensor) -> Tensor:
        """Compute the loss of x [..., hidden_size] for the request; returns logits of no tokens."""
        weight, bias, shard, place = self.weight, self.parameter("bias"), None, None
        if isinstance(x, DTensor):
            shard, place = self._vocabulary_shard(x), x
            # Each rank computes the gradient from its own entries.
            x = x.to_local(grad_placements=[Partial()])
            weight, bias = local_part(weight), None if bias is None else local_part(bias)
        rows = x.reshape(-1, x.shape[-1])
        labels = request.labels.reshape(-1).to(x.device, torch.int64)
        if labels.shape != rows.shape[:1]:
            raise DataError(
                f"labels have shape {tuple(request.labels.shape)}, but the hidden states {tuple(x.shape)} of "
                f"{type(self.module).__name__} need one for each of {rows.shape[0]} tokens"
            )
        check_range(labels, self.weight.shape[0], _IGNORED)
        offset = request.offset
        if offset is not None:
            if shard is not None:
                offset = offset[shard.start : shard.start + weight.shape[0]]
            bias = offset if bias is None else bias + offset
        divisor = divisor_of(labels, _IGNORED, request.num_items)
        request.loss, logits = tiled_loss(rows, weight, bias, labels, self.spec, divisor, shard=shard)
        # A copy of nothing: FSDP2 warns where a module returns a view.
        if x.dim() > 1:
            logits = logits.view(*x.shape[:-2], 0, logits.shape[-1]).clone()
        if shard is not None and place is not None:
            shape = torch.Size((*logits.shape[:-1], shard.num_entries))
            stride = torch.empty(shape, device="meta").stride()
            split = [Shard(logits.dim() - 1)]
            # The hooks of the parallel layer behind it take a DTensor.
            return DTensor.from_local(logits, place.device_mesh, split, run_check=False, shape=shape, stride=stride)
        return logits if request.calls_function else _NoLogits.carrying(logits, request)

    def _vocabulary_shard(self, x: DTensor) -> VocabularyShard:
        """The rows of the weight that this rank holds, if each rank has the whole input and some of the rows.

        Raises:
            ModelError: the layer is parallel in another way.
        """
        weight = self.weight
        assert isinstance(weight, DTensor)
        mesh, request = weight.device_mesh, self.request
        if mesh.ndim != 1 or weight.placements != (Shard(0),) or x.placements != (Replicate(),):
            raise ModelError(
                f"loss is 'chunked', but the input of {self.site.name!r} is placed {x.placements} and its weight "
                f"{weight.placements} on a mesh of {mesh.ndim} dimensions; it can be chunked where the projection is "
                f"column-parallel on one (Replicate, Shard(0)): use ColwiseParallel for it, or loss='exact'"
            )
        if request is not None and not request.calls_function:
            raise ModelError(
                f"loss is 'chunked', but the model around {self.site.name!r} spells out its loss, which is not known "
                f"for a column-parallel projection; use loss='exact'"
            )
        _, offsets = compute_local_shape_and_global_offset(weight.shape, mesh, weight.placements)
        return VocabularyShard(offsets[0], weight.shape[0], mesh.get_group())


def has_chunked_loss(model: nn.Module) -> bool:
    """Whether a loss in it is computed in chunks."""
    return any(isinstance(forward, CausalForward) for part in model.modules() for forward in replacements_of(part))


class CausalForward(ModelReplacement):
    """Replaces the forward of a language model: the original one, with the loss computed by its projection.

    With labels and gradients enabled, the output's `logits` hold no tokens. All other calls are the original's: without
    labels, without gradients, with `logits_to_keep`, or after another loss function was given to the model.

    Args:
        module: whose forward is replaced.
        head: the forward of its output projection.
        place: what its loss is.
    """

    def __init__(self, module: nn.Module, head: HeadForward, place: CausalHead) -> None:
        super().__init__(module)
        self.head = head
        self.place = place
        self.loss_function = loss_function_of(module)
        self.loss_functions = loss_functions()
        self.factors = _factors_of(module)
        self.projection = place.projection.removeprefix(f"{place.name}.")
        self.forwards = [type(part).forward for part in _path(module, self.projection)]
        self.is_running = False
        self._warned: set[str] = set()

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
                result = self.original(*args, **kwargs)
            return _with_plain_logits(result)
        finally:
            self.is_running = False

    def warn(self, reason: str) -> None:
        """Warn that the chunked loss is not used, once per model and reason."""
        if reason not in self._warned:
            self._warned.add(reason)
            logging.getLogger("laconic").warning("loss='chunked' is inactive: %s", reason)

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
                self.warn(reason)
            return None
        options = {name: arguments.get(name) for name in self.place.options}
        labels = options.get("shift_labels")
        if labels is None:
            labels = _shift(arguments["labels"]) if self.place.shifts else arguments["labels"]
        offset = _offset_of(self.module)
        return _Request(labels, options.get("num_items_in_batch"), offset, self.place.calls_function)

    def _obstacle(self, arguments: dict[str, Any]) -> str | None:
        """Why a call with these arguments needs all logits, None if it does not."""
        if loss_function_of(self.module) is not self.loss_function:
            return "another loss_function was given to the model after the conversion"
        if loss_functions() != self.loss_functions:
            return "another function took the place of torch's cross entropy or transformers' loss after the conversion"
        if _attribute(self.module, "get_output_embeddings")() is not self.head.module:
            return "the output projection was replaced or adapted after the conversion"
        if (factors := _factors_of(self.module)) != self.factors:
            changed = sorted(name for name, _ in factors.items() ^ self.factors.items())
            return f"{', '.join(dict.fromkeys(changed))} changed after the conversion, and may scale or cap logits"
        path = list(_path(self.module, self.projection))
        is_own = all(_is_own(forward_of(part)) for part in path) and self.head.attributes.unchanged(self.head.module)
        if not is_own or [type(part).forward for part in path] != self.forwards:
            return "code of the output projection, or around it, was replaced after the conversion"
        if (hook := _hook_on_logits(path)) is not None:
            return f"{hook}, which may read or change logits or their gradient; register it on the model instead"
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
            if request.loss is None:  # the projection ran as it is
                if self.module.training:
                    self.warn("the output projection got fp64, a part of a sum, or a DTensor in a compiled graph")
                value: Tensor = self.loss_function(logits, *args, **kwargs)
                return value
            return request.answer(logits)

        self.head.request = request
        try:
            with standing_in(self.module, loss_function):
                yield
        finally:
            self.head.request = None


class BodyForward(ModelReplacement):
    """Replaces the forward of the model below the head, to warn when a host bypasses the head, as TRL does."""

    def __init__(self, module: nn.Module, causal: CausalForward) -> None:
        super().__init__(module)
        self.causal = causal

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The original forward; warns in training if the head is bypassed."""
        past_head = self.causal.enabled and not self.causal.is_running
        if past_head and self.module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.causal.warn(
                "the loss is computed from hidden states past the model's own head, as TRL's SFTTrainer does; how much"
                " it keeps is the host's choice there"
            )
        return self.original(*args, **kwargs)


def _attribute(module: nn.Module, name: str) -> Any:
    return getattr(module, name, None)


def _factors_of(module: nn.Module) -> dict[str, float | None]:
    """Numbers of the model and of its configuration by which it may scale or cap logits."""
    found: dict[str, float | None] = {}
    for owner in (module, text_config(module)):
        for name, value in vars(owner).items() if owner is not None else ():
            if ("logit" in name or "multiplier" in name) and (value is None or type(value) in (int, float)):
                found[f"{type(owner).__name__}.{name}"] = value
    return found


_HOOKS = ("_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_HOSTS = ("torch.distributed.", "transformers.", "accelerate.", "deepspeed.", "wandb.", "laconic.")
"""Whose hooks on a module gather, place and record, and leave values alone."""


def _path(module: nn.Module, projection: str) -> Iterator[nn.Module]:
    """The parts of a model from a head to the projection in it."""
    part: nn.Module | None = module
    for child in projection.split("."):
        part = None if part is None else part._modules.get(child)
        if part is not None:
            yield part


def _is_own(forward: Any) -> bool:
    """Whether a module's own forward is laconic's, or a host's that moves tensors only; None is that of its class."""
    code = getattr(forward, "func", forward)  # functions take the module of what they wrap for theirs
    home = getattr(code, "__globals__", {}).get("__name__", "")
    return forward is None or owner_of(forward) is not None or f"{home}.".startswith(_HOSTS)


def _hook_on_logits(path: Iterable[nn.Module]) -> str | None:
    """Whose hook sees logits, on the projection or on a head around it; None if there is none."""
    for part in path:
        for kind in _HOOKS:
            for hook in part.__dict__[kind].values():
                home = str(getattr(getattr(hook, "func", hook), "__module__", ""))
                if not f"{home}.".startswith(_HOSTS):
                    return f"{type(part).__name__} has a hook of {home}"
    return None


def _with_plain_logits(result: Any) -> Any:
    """An output of the model whose logits are a plain tensor again."""
    if isinstance(result, tuple):
        return tuple(x.as_subclass(Tensor) if isinstance(x, _NoLogits) else x for x in result)
    if isinstance(result, dict):
        for name, value in result.items():
            if isinstance(value, _NoLogits):
                result[name] = value.as_subclass(Tensor)
    return result


def _shift(labels: Tensor) -> Tensor:
    """For each token the label of the next one; the last has none."""
    return F.pad(labels, (0, 1), value=_IGNORED)[..., 1:]


def find_head(model: nn.Module) -> CausalHead:
    """The language model in `model` (itself, or what an adapter wraps) and what its loss is.

    Raises:
        ModelError: there is none, or it computes another loss; says which part does not fit.
    """
    for name, module in model.named_modules():
        if hasattr(type(module), "get_output_embeddings") and _takes(module, "labels"):
            projection = _projection_of(module)
            full_name = f"{name}.{projection}" if name else projection
            with usual_numbers():
                return replace(_head_of(module, projection), name=name, projection=full_name)
    raise _no_language_model(model)


def _no_language_model(model: nn.Module) -> ModelError:
    return ModelError(
        f"loss is 'chunked', but {type(model).__name__} holds no Hugging Face language model; "
        f"call laconic.linear_cross_entropy where the loss is computed"
    )


def _takes(module: nn.Module, *names: str) -> bool:
    return set(names) <= set(inspect.signature(type(module).forward).parameters)


def _projection_of(module: nn.Module) -> str:
    """The name of the output projection, a plain linear layer in the language model."""
    projection = _attribute(module, "get_output_embeddings")()
    if projection is None:  # a classifier, a detector
        raise _no_language_model(module)
    name = next((name for name, child in module.named_modules() if child is projection), None)
    if name is None or type(projection) is not nn.Linear:
        raise ModelError(
            f"loss is 'chunked', but the output projection of {type(module).__name__} is "
            f"{type(projection).__name__}, and it must be a plain nn.Linear in it; use loss='exact'"
        )
    return name


def _offset_of(module: nn.Module) -> Tensor | None:
    """What BART and its relatives add to the logits: a buffer, [vocabulary] here."""
    offset = module._buffers.get("final_logits_bias")
    return None if offset is None else offset.reshape(-1)


class _Output(dict[str, Any]):
    """Hidden states as the result of a base model; whatever else is asked for is None."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int):
            return self["last_hidden_state"] if key == 0 else None
        return () if isinstance(key, slice) else super().__getitem__(key)


class _Returns(nn.Module):
    """Returns the same value whatever it is called with, and so does every child that it is asked for.

    So does a function of torch that takes it, as `x.to(head.weight.dtype)` does.
    """

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.value

    def __getattr__(self, name: str) -> Any:
        return self  # nothing else is there, or this would not be called

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return next(x.value for x in tree_leaves((args, kwargs)) if isinstance(x, cls))


class _PassesOn(nn.Module):
    """Returns its first argument: stands for what comes before the projection in a head of several layers."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return x


def _head_of(module: nn.Module, projection: str) -> CausalHead:
    """What happens between the projection and the loss, found by running the forward on made-up logits."""
    config = text_config(module)
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
    offset = None if _offset_of(module) is None else torch.randn(num_entries, generator=generator)
    shifted_logits = logits if offset is None else logits + offset
    try:
        results = [_try(module, projection, logits, offset, labels, trial) for trial in trials]
    except Exception as error:  # whatever it is, it is not a forward of the kind looked for
        raise ModelError(
            f"loss is 'chunked', but the forward of {type(module).__name__} cannot be tried on made-up logits "
            f"({type(error).__name__}: {error}); use loss='exact'"
        ) from error
    found, calls_function = [loss for loss, _ in results], all(called for _, called in results)
    for scale, cap in product((scale for scale in scales if scale is not None), caps):
        if cap is None and caps[1] is not None:
            continue
        spec = LossSpec(softcap=cap, scale=float(scale))
        for shifts, options in product((True, False), (_OPTIONS, _OPTIONS[:1], ())):
            head = CausalHead("", projection, spec, shifts, options, calls_function)
            expected = [_expected(head, shifted_logits, labels, trial) for trial in trials]
            if all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(found, expected, strict=True)):
                return head
    raise ModelError(
        f"loss is 'chunked', but {type(module).__name__} computes another loss than the cross entropy of each token, "
        f"or of the next (tried on made-up logits); use loss='exact'"
    )


def _twin_of(module: nn.Module, projection: str, answer: nn.Module, other: nn.Module) -> nn.Module:
    """A module with `answer` in place of its projection; `other` for its other children, and inside of heads none."""
    twin = module.__class__.__new__(module.__class__)
    twin.__dict__.update(module.__dict__)
    child, _, below = projection.partition(".")
    inner = _twin_of(module.get_submodule(child), below, answer, _PassesOn()) if below else answer
    rest = {name: part if isinstance(part, nn.CrossEntropyLoss) else other for name, part in module._modules.items()}
    twin.__dict__["_modules"] = {**rest, child: inner}
    for hooks in ("_forward_hooks", "_forward_pre_hooks"):
        twin.__dict__[hooks] = OrderedDict()
    return twin


def _try(
    module: nn.Module,
    projection: str,
    logits: Tensor,
    offset: Tensor | None,
    labels: Tensor,
    options: dict[str, Any],
) -> tuple[Tensor, bool]:
    """The loss that the module's forward computes from these logits, and whether by its `loss_function`."""
    hidden = torch.zeros(*labels.shape, 8)
    twin = _twin_of(module, projection, _Returns(logits.clone()), _Returns(_Output(last_hidden_state=hidden)))
    loss_function, called = _attribute(module, "loss_function"), False

    def record(*args: Any, **kwargs: Any) -> Any:
        nonlocal called
        called = True
        return loss_function(*args, **kwargs)

    twin.__dict__["_loss_function"] = record
    if offset is not None:
        twin.__dict__["_buffers"] = {**module._buffers, "final_logits_bias": offset.unsqueeze(0)}
    arguments = {"input_ids": torch.zeros_like(labels), "labels": labels} | options
    for name in ("output_router_logits", "use_cache"):
        if _takes(module, name):
            arguments[name] = False
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        loss = type(module).forward(twin, **arguments).loss
    if not isinstance(loss, Tensor):
        raise TypeError(f"its loss is {type(loss).__name__}")
    return loss, called


def _expected(head: CausalHead, logits: Tensor, labels: Tensor, options: dict[str, Any]) -> Tensor:
    """The loss of these logits by the formula."""
    spec, options = head.spec, {name: value for name, value in options.items() if name in head.options}
    logits = logits * spec.scale
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    shifted = options.get("shift_labels", _shift(labels) if head.shifts else labels).reshape(-1)
    counts = shifted != _IGNORED  # not by `cross_entropy`, in whose place a host may have put its own
    found = logits.flatten(0, 1).log_softmax(-1).gather(1, shifted.where(counts, 0).unsqueeze(1)).squeeze(1)
    losses = -found.where(counts, 0.0)
    return losses.sum() / divisor_of(shifted, _IGNORED, options.get("num_items_in_batch"))
