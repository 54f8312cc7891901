"""Report of a conversion: sites found, bits of each, and measured bytes per token before and after.

The bytes are not computed from formulas that could drift away from the code: a forward of a few tokens runs on the
model before and after, and a `SavedTensorTracker` counts.
"""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map_only

from laconic.activations.host.tracker import SavedTensor, SavedTensorTracker, kind_of
from laconic.activations.keep.choice import Choice, Offload, Recompute
from laconic.activations.keep.preserve import preserved
from laconic.activations.keep.rounding import seeds_restored
from laconic.activations.recognize.leaf_layers import LeafSpec
from laconic.activations.recognize.sites import Site
from laconic.errors import ModelError
from laconic.formats import BlockFormat
from laconic.text_columns import columns

SAVINGS_LOGGER = "laconic.savings"
"""Name of the logger that says how little a conversion saves: whoever tells that by a table mutes it, and no other."""

UNMEASURED: Mapping[str, Any] = MappingProxyType({})
"""As `example_inputs`: a conversion that runs nothing, because its caller is going to measure a call of the script."""


_LEAST_FACTOR = 2.0
"""Below this a conversion saves so little that the report says why."""


@dataclass(frozen=True)
class Measurement:
    """Bytes saved for backward by one forward: of how many `tokens`, `by_module` name (the root is ""), the `largest`.

    `largest` are the three tensors that cost most; `is_of_tokens` says whether the main input is of integers.
    """

    tokens: int
    by_module: Mapping[str, int]
    largest: tuple[SavedTensor, ...] = ()
    is_of_tokens: bool = True

    @property
    def nbytes(self) -> int:
        """Of all modules."""
        return sum(self.by_module.values())

    def __add__(self, other: Measurement) -> Measurement:
        """Of both forwards."""
        largest = sorted((*self.largest, *other.largest), key=lambda tensor: tensor.nbytes, reverse=True)[:3]
        by_module = dict(Counter(self.by_module) + Counter(other.by_module))
        of_tokens = self.is_of_tokens and other.is_of_tokens
        return Measurement(self.tokens + other.tokens, by_module, tuple(largest), of_tokens)


@dataclass(frozen=True)
class TrainingCall:
    """A training call of `module`, which is a model or lies in it, that measuring makes once more.

    `is_hosts` says that a host is about to make it, in the modes that its modules have; other calls are made in
    training mode, as models are loaded in evaluation mode.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    is_hosts: bool = False

    @property
    def tokens(self) -> int:
        """Positions of the main input: all dimensions of one of integers, all but the last of a floating-point one.

        The main input is the one that a Hugging Face model names, else the first tensor; 1 if there is none.
        """
        value = self._main_input
        if value is None:
            return 1
        return max(1, (value.shape[:-1] if value.is_floating_point() else value.shape).numel())

    @property
    def is_of_tokens(self) -> bool:
        """Whether the main input is of integers, as tokens are."""
        value = self._main_input
        return value is not None and not value.is_floating_point() and not value.is_complex()

    @property
    def num_rows(self) -> int | None:
        """Rows of the batch, the first dimension of the main input; None if there is none."""
        return None if self._main_input is None else len(self._main_input)

    def first_rows(self, count: int) -> TrainingCall:
        """The call with the first rows of all tensors that have as many as the batch."""
        rows = self.num_rows

        def cut(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value[:count] if value.dim() > 0 and len(value) == rows else value
            if type(value) is dict:
                return {key: cut(item) for key, item in value.items()}
            return type(value)(map(cut, value)) if type(value) in (list, tuple) else value

        return replace(self, args=cut(tuple(self.args)), kwargs=cut(dict(self.kwargs)))

    @property
    def _main_input(self) -> Tensor | None:
        given: dict[Any, Any] = {**dict(enumerate(self.args)), **self.kwargs}
        name = getattr(self.module, "main_input_name", None)
        first = [given[name]] if name in given else []
        return next((value for value in tensors_in([*first, *given.values()]) if value.dim() > 0), None)


@dataclass(frozen=True)
class SiteReport:
    """One site, or one module that is no site but saves something.

    Attributes:
        name: of the module.
        kind: of the site.
        shape: of the saved tensor per token.
        bits: per value (16: exact, 0: recomputed, or nothing but a shape).
        format: name of the block format, with "on host" behind it if it is offloaded; of the exact code ("mask",
            "offsets"); or "exact", "recompute", or "hooks" for what is packed without a site.
        origin: the kind of site whose saved tensors rebuild this one's; None if it saves its own.
        before_nbytes_per_token, after_nbytes_per_token: None if the model could not be measured.
        is_site: whether the conversion decided about it, rather than that something of it was measured.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    bits: int
    format: str
    origin: str | None
    before_nbytes_per_token: float | None = None
    after_nbytes_per_token: float | None = None
    is_site: bool = True


@dataclass(frozen=True)
class Report:
    """The result of `compress_activations`.

    Attributes:
        mode: "sites", "hooks" or "combined".
        dtype: of the model's parameters.
        rows: every site in model order, then every other module that saves tensors, left exact.
        before, after: the measured forwards; None if the model could not be run, and then `unmeasured` says why.
        kinds: kind of each module.
        unmeasured: see `before`.
        packed_bits: the width at which hooks pack what no site covers; None without hooks.
        loss_owner: name of the module whose loss `loss="chunked"` would compute, "" for the model itself; None if that
            does not know its loss, or computes it.
        fills_cache: whether a training forward fills a cache of keys and values, unless a call says use_cache=False.
    """

    mode: str
    dtype: torch.dtype
    rows: tuple[SiteReport, ...]
    before: Measurement | None = None
    after: Measurement | None = None
    kinds: Mapping[str, str] = field(default_factory=dict)
    unmeasured: str | None = None
    packed_bits: int | None = None
    loss_owner: str | None = None
    fills_cache: bool = False

    def measured(self, before: Measurement | None, after: Measurement | None, unmeasured: str | None = None) -> Report:
        """The same conversion with other measured forwards."""
        sites = {row.name: row.kind for row in self.rows if row.is_site}
        before, after = _booked(before, sites), _booked(after, sites)

        def per_token(measurement: Measurement | None, name: str) -> float | None:
            return None if measurement is None else measurement.by_module.get(name, 0) / measurement.tokens

        def kept_by_other(name: str) -> tuple[int, str]:
            saved = [0 if m is None else m.by_module.get(name, 0) for m in (before, after)]
            is_packed = self.packed_bits is not None and saved[1] < saved[0]
            return (self.packed_bits or 16, "hooks") if is_packed else (16, "exact")

        rows = [
            replace(
                row,
                before_nbytes_per_token=per_token(before, row.name),
                after_nbytes_per_token=per_token(after, row.name),
            )
            for row in self.rows
            if row.is_site
        ]
        saving = {name for m in (before, after) if m is not None for name, nbytes in m.by_module.items() if nbytes}
        rows += [
            SiteReport(
                name, kind, (), *kept_by_other(name), None, per_token(before, name), per_token(after, name), False
            )
            for name, kind in self.kinds.items()
            if name in saving and name not in sites
        ]
        return replace(self, rows=tuple(rows), before=before, after=after, unmeasured=unmeasured)

    @property
    def before_nbytes_per_token(self) -> float | None:
        """Bytes that the unmodified model keeps for backward per token."""
        return None if self.before is None else self.before.nbytes / self.before.tokens

    @property
    def after_nbytes_per_token(self) -> float | None:
        """Bytes that the converted model keeps for backward per token."""
        return None if self.after is None else self.after.nbytes / self.after.tokens

    @property
    def warning(self) -> str | None:
        """What to say if less than 2x is saved: the three tensors that cost most, and a remedy; None if it is more."""
        before, after = self.before_nbytes_per_token, self.after_nbytes_per_token
        if before is None or after is None or self.after is None or before >= _LEAST_FACTOR * after:
            return None
        if before == after and all(row.format == "exact" for row in self.rows):  # which was asked for
            return None
        largest = "; ".join(map(str, self.after.largest))
        remedy = "mode='combined' also packs what no site covers" if self.mode == "sites" else "they are kept exactly"
        remedy = self.loss_advice() or remedy
        return f"less than {_LEAST_FACTOR:.0f}x is saved; most is kept of {largest}; {remedy}"

    @property
    def loss_nbytes_per_token(self) -> float:
        """Bytes kept per token that `loss="chunked"` would not keep; 0 if it has no part, or nothing is measured."""
        if self.after is None or self.loss_owner is None:
            return 0.0
        return self.after.by_module.get(self.loss_owner, 0) / self.after.tokens

    def loss_advice(self, setting: str = 'loss="chunked"', unit: str = "token") -> str | None:
        """Return what `setting` would save if that is more than a quarter of what is kept, else None."""
        nbytes, after = self.loss_nbytes_per_token, self.after_nbytes_per_token or 0.0
        if nbytes <= after / 4:
            return None
        return f"{setting} would not keep the {nbytes:,.0f} bytes a {unit} of the loss"

    @property
    def left_exact(self) -> tuple[str, ...]:
        """Names of the modules that save tensors exactly as before because no site covers them."""
        return tuple(row.name for row in self.rows if row.format == "exact" and row.after_nbytes_per_token)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data for JSON."""

        def by_kind(measurement: Measurement | None) -> dict[str, float]:
            kinds: Counter[str] = Counter()
            if measurement is not None:
                for name, nbytes in measurement.by_module.items():
                    kinds[self.kinds.get(name, "other")] += nbytes
                return {kind: nbytes / measurement.tokens for kind, nbytes in kinds.items()}
            return {}

        return {
            "mode": self.mode,
            "reference_dtype": str(self.dtype).removeprefix("torch."),
            "unmeasured": self.unmeasured,
            "tokens": 0 if self.before is None else self.before.tokens,
            "before_nbytes_per_token": self.before_nbytes_per_token,
            "after_nbytes_per_token": self.after_nbytes_per_token,
            "by_kind_before": by_kind(self.before),
            "by_kind_after": by_kind(self.after),
            "sites": [
                {name: value for name, value in asdict(row).items() if name != "is_site"} | {"shape": list(row.shape)}
                for row in self.rows
            ],
        }

    def kept(self, unit: str = "token") -> str:
        """Return one line: what is kept for backward in all; what the trainer's task counts is called `unit`."""
        before, after = self.before_nbytes_per_token, self.after_nbytes_per_token
        if before is None or after is None:
            return f"bytes unknown: {self.unmeasured}"
        saved = f"{before / after:.2f}x less" if after else "nothing is kept"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"kept for backward per {unit} ({dtype}): {before:,.0f} -> {after:,.0f} bytes, {saved}"

    def __str__(self) -> str:
        def number(value: float | None) -> str:
            return "-" if value is None else f"{value:,.0f}"

        header = ("site", "kind", "shape", "kept", "before", "after")
        table = []
        for row in self.rows:
            own = row.format if row.format in ("exact", "recompute") else f"{row.bits} bit {row.format}"
            kept = own if row.origin is None else f"from {row.origin}"
            shape = "x".join(map(str, row.shape)) or "-"
            table.append(
                (
                    row.name or "(model)",
                    row.kind,
                    shape,
                    kept,
                    number(row.before_nbytes_per_token),
                    number(row.after_nbytes_per_token),
                )
            )
        lines = [columns(header, table, left=range(4)), self.kept()]
        if (advice := self.warning or self.loss_advice()) is not None:
            lines.append(advice)
        if self.fills_cache:
            lines.append(
                "config.use_cache is on: a training forward holds the keys and values of all layers until it ends; set "
                "model.config.use_cache = False"
            )
        return "\n".join(lines)


class _Measuring(threading.local):
    """Attribute: `now`: whether this thread runs a model to measure it."""

    now = False


_MEASURING = _Measuring()


def is_measuring() -> bool:
    """Whether the running forward is one of `measure`, which no hook of training is meant for."""
    return _MEASURING.now


def measure(model: nn.Module, call: TrainingCall) -> Measurement:
    """Make a call as training does, and count the bytes that it saves for backward. Everything stays as it was.

    So with dropout, and with the gradient checkpointing that is switched on, which are without effect in evaluation.
    What is saved is counted and let go of: who compresses may have no memory for all of it.
    """
    tracker = SavedTensorTracker(model, drops=True)
    try:
        _count(model, call, tracker)
    except Exception:
        if not tracker.was_asked:
            raise
    if tracker.was_asked:  # a forward with a backward of its own, as for forces
        tracker = SavedTensorTracker(model)
        _count(model, call, tracker)
    largest = sorted(tracker.tensors, key=lambda tensor: tensor.nbytes, reverse=True)[:3]
    return Measurement(call.tokens, dict(tracker.by_module), tuple(largest), call.is_of_tokens)


def _count(model: nn.Module, call: TrainingCall, tracker: SavedTensorTracker) -> None:
    eagerly = torch.compiler.set_stance("force_eager")  # a compiled part has hooks of its own
    inputs = tree_map_only(
        Tensor, lambda x: x.clone() if x.is_inference() else x, (tuple(call.args), dict(call.kwargs))
    )
    with seeds_restored(), preserved(model, inputs), torch.enable_grad(), eagerly, tracker:
        if not (call.is_hosts or model.training):
            model.train()
        _MEASURING.now = True
        try:
            call.module(*inputs[0], **inputs[1])
        finally:
            _MEASURING.now = False


def measure_first(
    model: nn.Module, samples: Sequence[TrainingCall]
) -> tuple[Measurement | None, TrainingCall | None, str | None]:
    """The measurement of the first call that can be made, and the call; or why there is none."""
    if (reason := unmeasurable(model)) is not None:
        return None, None, reason
    if not samples:
        return None, None, f"inputs of {type(model).__name__} cannot be made up; pass example_inputs="
    reasons = []
    for call in samples:
        try:
            return measure(model, call), call, None
        except Exception as error:  # a model may ask for anything
            reasons.append(brief(error))
    where = {p.device.type for p in model.parameters()}
    remedy = "its parameters hold no values" if where == {"meta"} else "pass example_inputs= that its forward takes"
    return None, None, f"the measuring forward failed ({reasons[0]}); {remedy}"


def unmeasurable(model: nn.Module) -> str | None:
    """Why no forward of the model can be made for measuring; None if one can."""
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters()):
        return "the model has parameters that get their shape in its first forward; run it once before"
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        # Its first forward sets up groups of parameters, which cannot be undone.
        return "the model is in FSDP2 already; count a step of yours with SavedTensorTracker"
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        return "the model is in FSDP1"
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        return "DeepSpeed's ZeRO 3 has its parameters"
    return None


def only_runs_exactly(model: nn.Module, error: Exception) -> ModelError:
    """The error for a measuring forward that failed with compressed activations only, with what to do about it."""
    if is_out_of_memory(error):
        why = "for whose codes memory is short: pass example_inputs= of fewer tokens"
    else:
        why = "so leave sites exact that it may come from: attention='exact', or a policy that answers None"
    return ModelError(
        f"{type(model).__name__} runs on the inputs of the measuring forward, but not with compressed activations "
        f"({brief(error)}), {why}"
    )


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocator had no more memory; that of torch for the CPU raises a RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def brief(error: Exception) -> str:
    """An error as one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".rstrip(": ")


def tensors_in(nest: Any) -> Iterator[Tensor]:
    """The tensors of mappings, lists, tuples and dataclasses in any nest, in their order."""
    if isinstance(nest, Tensor):
        yield nest
    elif isinstance(nest, Mapping):
        yield from chain.from_iterable(map(tensors_in, nest.values()))
    elif isinstance(nest, list | tuple):
        yield from chain.from_iterable(map(tensors_in, nest))
    elif is_dataclass(nest) and not isinstance(nest, type):
        yield from chain.from_iterable(tensors_in(getattr(nest, part.name)) for part in fields(nest))


def sample_inputs(
    model: nn.Module, example_inputs: Mapping[str, Any] | None, sequence_length: int
) -> tuple[TrainingCall, ...]:
    """Calls for a measuring forward, the likeliest to be taken first; none if they cannot be made up.

    Args:
        model: a Hugging Face model that takes tokens (inputs are made up: one token [1, sequence_length] times, and
            what the usual heads take as labels), or any module with `example_inputs`.
        example_inputs: keyword arguments of the model's forward. Tokens are the product of all dimensions but the last
            of the first floating-point tensor, or of all dimensions of the first integer tensor; either may lie in a
            nest of mappings, lists, tuples and dataclasses.

    Raises:
        ModelError: `example_inputs` is no dict of keyword arguments, or holds no tensor.
    """
    if example_inputs is UNMEASURED:
        return ()
    if example_inputs is not None:
        if not isinstance(example_inputs, Mapping):
            raise ModelError(
                f"example_inputs is a {type(example_inputs).__name__}, not a dict of keyword arguments; "
                f"pass those of a training forward, as {{'input_ids': ids, 'labels': ids}}"
            )
        if any(value.dim() > 0 for value in tensors_in(example_inputs)):
            return (TrainingCall(model, (), dict(example_inputs)),)
        raise ModelError(
            "example_inputs holds no tensor of one dimension or more, so tokens cannot be counted; "
            "pass the keyword arguments of a training forward"
        )
    # Adapters hand everything on to the model they wrap.
    get_base_model = getattr(model, "get_base_model", None)
    inner = model if get_base_model is None else get_base_model()
    accepted = set(inspect.signature(type(inner).forward).parameters)
    device = next((p.device for p in model.parameters()), None)
    if not hasattr(inner, "config") or "input_ids" not in accepted or device is None:
        return ()
    length = min(sequence_length, _num_positions(inner.config) or sequence_length)
    calls = []
    for tokens in dict.fromkeys((length, max(1, length // 2))):  # some positions may be reserved
        ids = torch.full((1, tokens), _usual_token(inner.config), dtype=torch.int64, device=device)
        for given in _with_labels(ids, accepted, getattr(inner.config, "num_labels", None) or 1):
            calls.append(TrainingCall(model, (), {**given, "use_cache": False} if "use_cache" in accepted else given))
    return tuple(calls)


def _with_labels(ids: Tensor, accepted: Collection[str], num_labels: int) -> Iterator[dict[str, Tensor]]:
    """Arguments with tokens [1, T] and what a head may want beside them, the likeliest first."""
    one = torch.zeros(1, dtype=torch.int64, device=ids.device)
    if "labels" in accepted:
        # Of the next token or of each token, of a class of each token, of one class for the sequence, of one number
        # for it, of several classes for it; of one of two choices.
        several = torch.zeros(1, num_labels, device=ids.device, dtype=torch.float32)
        for labels in (ids, torch.zeros_like(ids), one, one.float(), several):
            yield {"input_ids": ids, "labels": labels}
        yield {"input_ids": ids.unsqueeze(1).repeat(1, 2, 1), "labels": one}
    elif {"start_positions", "end_positions"} <= set(accepted):  # of an answer
        yield {"input_ids": ids, "start_positions": one, "end_positions": one}
    else:
        yield {"input_ids": ids}  # a model without a loss


def _usual_token(config: Any) -> int:
    """The first token that no Hugging Face configuration gives a meaning, such as that of padding."""
    names = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "forced_bos_token_id")
    special = {getattr(config, name, None) for name in names}
    return next((token for token in range(len(special) + 1) if token not in special), 0)


def _num_positions(config: Any) -> int | None:
    """How many positions a Hugging Face configuration allows for, as far as it says so."""
    names = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
    found = [value for name in names if isinstance(value := getattr(config, name, None), int) and value > 0]
    return min(found, default=None)


def saved_nbytes_per_token(
    model: nn.Module,
    *,
    sequence_length: int = 128,
    dtype: torch.dtype | None = torch.bfloat16,
    example_inputs: Mapping[str, Any] | None = None,
) -> float:
    """Bytes per token that `model` as it is keeps for backward when its parameters have `dtype`.

    Args:
        model: a Hugging Face causal language model, or any module with `example_inputs`.
        sequence_length: tokens of the measuring forward.
        dtype: of the parameters and buffers during the measurement; None takes them as they are. A copy in that dtype
            exists while it runs.
        example_inputs: keyword arguments of the forward.

    Raises:
        ModelError: no inputs are given and none that the model runs on can be made up; says why.
    """
    samples = sample_inputs(model, example_inputs, sequence_length)
    with _cast(model, dtype):
        measurement, _, why = measure_first(model, samples)
    if measurement is None:
        raise ModelError(f"the bytes of {type(model).__name__} cannot be measured: {why}")
    return measurement.nbytes / measurement.tokens


@contextmanager
def _cast(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """The model's floating-point parameters in another dtype, for a while."""
    originals = {p: p.data for p in model.parameters() if dtype is not None and p.is_floating_point()}
    try:
        for parameter, data in originals.items():
            parameter.data = data.to(dtype)
        yield
    finally:
        for parameter, data in originals.items():
            parameter.data = data


def make_report(
    model: nn.Module,
    mode: str,
    sites: list[tuple[Site, Choice, str | None]],
    layers: Mapping[str, BlockFormat | None],
    before: Measurement | None,
    after: Measurement | None,
    unmeasured: str | None,
    packed_bits: int | None = None,
    loss_owner: str | None = None,
) -> Report:
    """The report from sites, the input formats of recomputed layers, and measurements.

    `packed_bits` and `loss_owner` are the report's.
    """
    kinds = {name: kind_of(module, name, model) for name, module in model.named_modules()}
    kinds |= {site.name: site.kind for site, _, _ in sites}
    rows = [
        SiteReport(
            site.name,
            site.kind,
            site.features,
            *_described(choice, site),
            origin if origin not in (site.kind, "recompute") else None,
        )
        for site, choice, origin in sites
    ]
    rows += [SiteReport(name, "layer", (), *_described(format), None) for name, format in layers.items()]
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())
    report = Report(
        mode,
        dtype,
        tuple(rows),
        kinds=kinds,
        packed_bits=packed_bits,
        loss_owner=loss_owner,
        fills_cache=_fills_cache(model),
    )
    return report.measured(before, after, unmeasured)


def _fills_cache(model: nn.Module) -> bool:
    """Whether a Hugging Face model makes a cache of keys and values in a forward that is not told otherwise."""
    return getattr(text_config(model), "use_cache", False) is True and hasattr(model, "generate")


def text_config(model: nn.Module) -> Any:
    """The configuration of a Hugging Face model, or of its part that takes text; None of other models."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _described(choice: Choice, site: Site | None = None) -> tuple[int, str]:
    """Bits and name of a choice for a site."""
    if choice is not None and site is not None and isinstance(site.spec, LeafSpec) and site.spec.exact is not None:
        return site.spec.exact
    match choice:
        case None:
            return 16, "exact"
        case Recompute():
            return 0, "recompute"
        case Offload(format):
            return format.bits, f"{format.code} on host"
        case BlockFormat():
            return choice.bits, choice.code


def _booked(measurement: Measurement | None, sites: Mapping[str, str]) -> Measurement | None:
    """What a child of a site keeps without being a site itself (the activation in an MLP) belongs to the site.

    `sites` has the kind of each.
    """
    if measurement is None:
        return None
    booked: Counter[str] = Counter()
    for name, nbytes in measurement.by_module.items():
        parent = name.rpartition(".")[0]
        owned = name not in sites and sites.get(parent) in ("mlp", "experts")
        booked[parent if owned else name] += nbytes
    return replace(measurement, by_module=dict(booked))
