"""Report of a conversion: sites found, bits of each, and measured bytes per token before and after.

The bytes are not computed from formulas that could drift away from the code: a forward of a few tokens runs on the
model before and after, and a `SavedTensorTracker` counts.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from laconic.activations.choice import Choice, Offload, Recompute
from laconic.activations.leaves import LeafSpec
from laconic.activations.preserve import preserved
from laconic.activations.rounding import seeds_restored
from laconic.activations.sites import Site
from laconic.activations.tracker import SavedTensor, SavedTensorTracker, kind_of
from laconic.errors import ModelError
from laconic.formats import BlockFormat

__all__ = ["Measurement", "Report", "SiteReport", "measure", "saved_nbytes_per_token", "tensors_in"]


_LEAST_FACTOR = 2.0
"""Below this a conversion saves so little that the report says why."""


@dataclass(frozen=True)
class Measurement:
    """Bytes saved for backward by one forward: of how many `tokens`, `by_module` name (the root is ""), the `largest`.

    `largest` are the three tensors that cost most.
    """

    tokens: int
    by_module: Mapping[str, int]
    largest: tuple[SavedTensor, ...] = ()


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
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    bits: int
    format: str
    origin: str | None
    before_nbytes_per_token: float | None
    after_nbytes_per_token: float | None


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
    """

    mode: str
    dtype: torch.dtype
    rows: tuple[SiteReport, ...]
    before: Measurement | None = None
    after: Measurement | None = None
    kinds: Mapping[str, str] = field(default_factory=dict)
    unmeasured: str | None = None

    @property
    def before_nbytes_per_token(self) -> float | None:
        """Bytes that the unmodified model keeps for backward per token."""
        return None if self.before is None else sum(self.before.by_module.values()) / self.before.tokens

    @property
    def after_nbytes_per_token(self) -> float | None:
        """Bytes that the converted model keeps for backward per token."""
        return None if self.after is None else sum(self.after.by_module.values()) / self.after.tokens

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
        return f"less than {_LEAST_FACTOR:.0f}x is saved; most is kept of {largest}; {remedy}"

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
                {
                    "name": row.name,
                    "kind": row.kind,
                    "shape": list(row.shape),
                    "bits": row.bits,
                    "format": row.format,
                    "origin": row.origin,
                    "before_nbytes_per_token": row.before_nbytes_per_token,
                    "after_nbytes_per_token": row.after_nbytes_per_token,
                }
                for row in self.rows
            ],
        }

    def __str__(self) -> str:
        def number(value: float | None) -> str:
            return "-" if value is None else f"{value:,.0f}"

        header = ("site", "kind", "shape", "kept", "before", "after")
        table = [header]
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
        widths = [max(len(line[column]) for line in table) for column in range(len(header))]
        lines = []
        for line in table:
            left = [cell.ljust(width) for cell, width in zip(line[:4], widths[:4], strict=True)]
            right = [cell.rjust(width) for cell, width in zip(line[4:], widths[4:], strict=True)]
            lines.append("  ".join(left + right).rstrip())
        lines.insert(1, "-" * len(lines[0]))
        before, after = self.before_nbytes_per_token, self.after_nbytes_per_token
        if before is None or after is None:
            lines.append(f"bytes unknown: {self.unmeasured}")
        else:
            saved = f"{before / after:.2f}x less" if after else "nothing is kept"
            dtype = str(self.dtype).removeprefix("torch.")
            lines.append(f"kept for backward per token ({dtype}): {before:,.0f} -> {after:,.0f} bytes, {saved}")
            logits = sum(row.after_nbytes_per_token or 0.0 for row in self.rows if row.kind == "loss")
            if self.warning is not None:
                lines.append(self.warning)
            if self.mode != "hooks" and logits > after / 4:
                lines.append(f'{logits:,.0f} of them belong to the loss; loss="chunked" would not keep them')
        return "\n".join(lines)


def measure(model: nn.Module, inputs: Mapping[str, Any], tokens: int) -> Measurement:
    """Run one forward and count the bytes that it saves for backward. Everything in the model stays as it was."""
    eagerly = torch.compiler.set_stance("force_eager")  # a compiled part has hooks of its own
    with seeds_restored(), preserved(model, inputs), torch.enable_grad(), eagerly, SavedTensorTracker(model) as tracker:
        model(**inputs)
    largest = sorted(tracker.tensors, key=lambda tensor: tensor.nbytes, reverse=True)[:3]
    return Measurement(tokens, dict(tracker.by_module), tuple(largest))


Sample = tuple[dict[str, Any], int]
"""Keyword arguments of a forward, and how many tokens they hold."""


def measure_first(model: nn.Module, samples: Sequence[Sample]) -> tuple[Measurement | None, dict[str, Any], str | None]:
    """The measurement of the first sample that the model runs on, and its inputs; or why there is none."""
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters()):
        return None, {}, "the model has parameters that get their shape in its first forward; run it once before"
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        # Its first forward sets up groups of parameters, which cannot be undone.
        return None, {}, "the model is in FSDP2 already; count a step of yours with SavedTensorTracker"
    if not samples:
        return None, {}, f"inputs of {type(model).__name__} cannot be made up; pass example_inputs="
    reasons = []
    for inputs, tokens in samples:
        try:
            return measure(model, inputs, tokens), inputs, None
        except Exception as error:  # a model may ask for anything
            reasons.append(brief(error))
    where = {p.device.type for p in model.parameters()}
    remedy = "its parameters hold no values" if where == {"meta"} else "pass example_inputs= that its forward takes"
    return None, {}, f"the measuring forward failed ({reasons[0]}); {remedy}"


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
) -> tuple[Sample, ...]:
    """Inputs for a measuring forward, the likeliest to be taken first; none if they cannot be made up.

    Args:
        model: a Hugging Face model that takes tokens and labels (inputs are made up: one token [1,
            sequence_length] times, the same or one class as labels), or any module with `example_inputs`.
        example_inputs: keyword arguments of the model's forward. Tokens are the product of all dimensions but the last
            of the first floating-point tensor, or of all dimensions of the first integer tensor; either may lie in a
            nest of mappings, lists, tuples and dataclasses.

    Raises:
        ModelError: `example_inputs` is no dict of keyword arguments, or holds no tensor.
    """
    if example_inputs is not None:
        if not isinstance(example_inputs, Mapping):
            raise ModelError(
                f"example_inputs is a {type(example_inputs).__name__}, not a dict of keyword arguments; "
                f"pass those of a training forward, as {{'input_ids': ids, 'labels': ids}}"
            )
        for value in tensors_in(example_inputs):
            if value.dim() > 0:
                shape = value.shape[:-1] if value.is_floating_point() else value.shape
                return ((dict(example_inputs), max(1, shape.numel())),)
        raise ModelError(
            "example_inputs holds no tensor of one dimension or more, so tokens cannot be counted; "
            "pass the keyword arguments of a training forward"
        )
    # Adapters hand everything on to the model they wrap.
    get_base_model = getattr(model, "get_base_model", None)
    inner = model if get_base_model is None else get_base_model()
    accepted = inspect.signature(type(inner).forward).parameters
    device = next((p.device for p in model.parameters()), None)
    if not hasattr(inner, "config") or not {"input_ids", "labels"} <= set(accepted) or device is None:
        return ()
    length = min(sequence_length, _num_positions(inner.config) or sequence_length)
    samples = []
    for tokens in dict.fromkeys((length, max(1, length // 2))):  # some positions may be reserved
        ids = torch.full((1, tokens), _usual_token(inner.config), dtype=torch.int64, device=device)
        classes = torch.zeros(1, dtype=torch.int64, device=device)
        # Of the next token or of each token, of one class for the sequence, of one number for it.
        for labels in (ids, classes, classes.float()):
            inputs: dict[str, Any] = {"input_ids": ids, "labels": labels}
            if "use_cache" in accepted:
                inputs["use_cache"] = False
            samples.append((inputs, tokens))
    return tuple(samples)


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
    return sum(measurement.by_module.values()) / measurement.tokens


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
) -> Report:
    """The report from sites, the input formats of recomputed layers, and measurements.

    `packed_bits` is the width at which hooks pack what no site covers; None without hooks.
    """
    kinds = {name: kind_of(module, name, model) for name, module in model.named_modules()}
    kinds |= {site.name: site.kind for site, _, _ in sites}

    def per_token(measurement: Measurement | None, name: str) -> float | None:
        return None if measurement is None else measurement.by_module.get(name, 0) / measurement.tokens

    # What a child of a site keeps without being a site itself (the activation in an MLP) belongs to the site.
    owners = {site.name: site for site, _, _ in sites}
    before, after = (_booked(m, owners) for m in (before, after))
    rows = [
        SiteReport(
            name=site.name,
            kind=site.kind,
            shape=site.features,
            bits=_described(choice, site)[0],
            format=_described(choice, site)[1],
            origin=origin if origin not in (site.kind, "recompute") else None,
            before_nbytes_per_token=per_token(before, site.name),
            after_nbytes_per_token=per_token(after, site.name),
        )
        for site, choice, origin in sites
    ]
    rows += [
        SiteReport(name, "layer", (), *_described(format), None, per_token(before, name), per_token(after, name))
        for name, format in layers.items()
    ]
    others = {name for m in (before, after) if m is not None for name, nbytes in m.by_module.items() if nbytes}

    def kept_by_other(name: str) -> tuple[int, str]:
        saved = [0 if m is None else m.by_module.get(name, 0) for m in (before, after)]
        return (packed_bits, "hooks") if packed_bits is not None and saved[1] < saved[0] else (16, "exact")

    rows += [
        SiteReport(
            name,
            kinds.get(name, "other"),
            (),
            *kept_by_other(name),
            None,
            per_token(before, name),
            per_token(after, name),
        )
        for name in kinds
        if name in others and name not in owners and name not in layers
    ]
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())
    return Report(mode, dtype, tuple(rows), before, after, kinds, unmeasured)


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


def _booked(measurement: Measurement | None, owners: Mapping[str, Site]) -> Measurement | None:
    if measurement is None:
        return None
    booked: Counter[str] = Counter()
    for name, nbytes in measurement.by_module.items():
        parent = name.rpartition(".")[0]
        owned = name not in owners and parent in owners and owners[parent].kind in ("mlp", "experts")
        booked[parent if owned else name] += nbytes
    return replace(measurement, by_module=dict(booked))
