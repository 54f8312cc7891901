"""Reads what a model saves for backward off steps without numbers: any model that trains, of any size, by its config.

The model is built on the meta device and cut into layers; of each kind of layers two run, the others repeat what the
last of their kind gave. The same step runs exactly and with packed activations, so that the bytes of each kind of site
are known under every choice. What the first layer of a kind saves beyond the second is shared by all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from laconic.activations import ActivationPlan, Site, decompress_activations, find_sites
from laconic.activations.recognize.leaf_layers import LeafSpec
from laconic.activations.recognize.plan import careful_head
from laconic.activations.recognize.sites import MlpSpec
from laconic.activations.whole_model import causal_loss, loss
from laconic.activations.whole_model.apply import convert
from laconic.activations.whole_model.head import find_head
from laconic.cost import Batch, Choice, Job, Layout, Settings, Unit
from laconic.cost.memory.job import check_together, precision_of
from laconic.cost.memory.saved_tensors import Precision
from laconic.cost.memory.traced import POINTS, TracedLayer, TracedModel, Workspace
from laconic.errors import PlanError
from laconic.formats import BlockFormat
from laconic.moe.huggingface.experts import FusedExperts
from laconic.moe.parallel.link_streams import in_callers_thread
from laconic.train.memory.directory import build_meta, made_up_batches, usual_loss
from laconic.train.memory.fake_experts import spread_evenly
from laconic.train.memory.fake_runs import FakeRuns, Step

_TIMES = 2
"""Layers of a kind that run: the first, which may save for all of them, and one that does not."""

_MOST_TILES = 64

_CODES = ("int8", "int6", "int5", "nf4", "uint2")

# Codes of sites and of attention; None is exact.
_VARIANTS: dict[str, tuple[str | None, str | None]] = {
    "exact": (None, None),
    "only attention": (None, "int8"),
    "all but attention": ("int8", None),
    **{code: (code, code) for code in _CODES},
}
_WITH_PEAKS = ("exact", "nf4")
_Saved = Mapping[str, Mapping[str, int]]  # by variant, then by module


def traced_job(
    source: Any,
    batch: Batch,
    layout: Layout | None = None,
    settings: Settings | None = None,
    *,
    sequence_length: int | None = None,
    image_size: int | None = None,
) -> Job:
    """The planner's description of a run: the model traced for it, see `trace_config`.

    Raises:
        ConfigError, ModelError, PlanError: see `trace_config`; or the model and the layout do not fit.
    """
    layout, settings = layout or Layout(), settings or Settings()
    check_together(layout, settings)  # before the trace, which takes seconds
    model = trace_config(
        source,
        batch,
        precision_of(settings, layout),
        chunked=settings.loss == "chunked",
        device=settings.device,
        expert_parallel=layout.expert_parallel,
        sequence_length=sequence_length,
        image_size=image_size,
    )
    return Job(model, batch, layout, settings)


def trace_config(
    source: Any,
    batch: Batch,
    precision: Precision,
    *,
    chunked: bool = False,
    device: str = "cuda",
    expert_parallel: int = 1,
    sequence_length: int | None = None,
    image_size: int | None = None,
) -> TracedModel:
    """Trace the model of a configuration; weights are neither needed nor read.

    Args:
        source: directory with a config.json, or that file; a configuration of transformers; or a model like it.
        batch: one micro-batch: samples, and tokens of each where the model takes tokens.
        device: "cuda" or "cpu", where losses are computed in smaller tiles.
        expert_parallel: processes that share the experts of a layer; with 1 they are the model's own modules.
        sequence_length: that of the batch if somebody has asked for it, which a model of images refuses.
        image_size: pixels of a side; None takes the configuration's, or 224.

    Raises:
        ConfigError, ModelError: see `build_meta`.
        PlanError: the model has no layers or sites, or its forward depends on values.
    """
    model = build_meta(source)

    def inputs(model: nn.Module) -> Mapping[str, Any]:
        made = made_up_batches(model, sequence_length, image_size, usual_length=batch.sequence_length)
        return made(batch.sequences)

    config = model.config.to_dict()  # type: ignore[operator, union-attr]
    if config.get("quantization_config"):
        raise PlanError(
            f"quantization_config is in the configuration of {type(model).__name__}, but weights must be unquantized"
        )
    return trace_model(
        model, inputs, batch, precision, config, chunked=chunked, device=device, expert_parallel=expert_parallel
    )


def trace_model(
    model: nn.Module,
    inputs: Callable[[nn.Module], Mapping[str, Any]],
    batch: Batch,
    precision: Precision,
    config: Mapping[str, Any],
    *,
    chunked: bool = False,
    device: str = "cuda",
    expert_parallel: int = 1,
) -> TracedModel:
    """Trace a model, which is used up by it: give one that was built on the meta device for this.

    Args:
        model: with sites and with layers in an nn.ModuleList or nn.Sequential, in training mode.
        inputs: keyword arguments of a training forward, made while everything is fake.
        precision: of the run; bf16 parameters are made where it has them.

    Raises:
        ModelError: it has no experts that could be shared.
        PlanError: the model has no layers or sites, or its forward depends on values.
    """
    if precision.residual_nbytes == 2:
        model = nn.Module.to(model, torch.bfloat16)
    model.train()
    blocks = _blocks(model) or _lone_layer(model)
    if not blocks:
        raise PlanError(f"{type(model).__name__} has no layers in a list, whose bytes could be read and counted")
    names = list(blocks)
    kinds = _kinds(model, blocks)
    tensors = {name: list(block.named_parameters()) for name, block in blocks.items()}
    parameters = list(model.named_parameters(remove_duplicate=False))
    buffers_nbytes = sum(buffer.nbytes for buffer in model.buffers())
    ran = _leave_out_repeated(model, blocks, kinds)
    num_logits = batch.tokens * int((config.get("text_config") or config).get("vocab_size") or 0)
    with _one_thread(), in_callers_thread(torch.device("cpu")):
        if expert_parallel > 1:
            spread_evenly(model, expert_parallel, device)
        sites = find_sites(model)
        experts = {site.name for site in sites if site.kind == "experts"}
        experts |= {name for name, module in model.named_modules() if isinstance(module, FusedExperts)}
        runs = FakeRuns(model, (names[0], names[-1]))
        steps = dict(_steps(runs, sites, inputs, precision, chunked, device, num_logits))
        is_stack = len({name.rpartition(".")[0] for name in names}) == 1
        shares = any(isinstance(site.spec, LeafSpec) and _is_in(site.name, name) for site in sites for name in names)
        saved = {variant: step.saved for variant, step in steps.items()}

    # What belongs to the layers, to what runs in front of them, and to the rest.
    order = steps["exact"].modules
    before = set(order[: order.index(names[0])]) - {""}

    def is_inside(name: str) -> bool:
        return any(name == block or name.startswith(f"{block}.") for block in blocks)

    def outside(first: bool) -> dict[str, dict[str, int]]:
        return {
            variant: {n: nbytes for n, nbytes in found.items() if not is_inside(n) and (n in before) == first}
            for variant, found in saved.items()
        }

    others = [site for site in sites if not is_inside(site.name)]
    first_units, first_nbytes = _ends([s for s in others if s.name in before], outside(True), 0)
    last_units, last_nbytes = _ends([s for s in others if s.name not in before], outside(False), len(names) - 1)
    made = []
    for kind in range(1 + max(kinds)):
        own = ran[kind]
        made.append(_layer(own, sites, experts, saved, steps["exact"].flops, tensors[own[-1]], precision.autocast))
    block_ids = {id(p) for found in tensors.values() for _, p in found}
    in_front = {id(p): p for name, p in parameters if name.rpartition(".")[0] in before and id(p) not in block_ids}
    behind = {id(p): p for name, p in parameters if name.rpartition(".")[0] not in before and id(p) not in block_ids}
    tied = next((p for key, p in behind.items() if key in in_front), None)
    casts = sum(_cast_nbytes(tensors[name]) for own in ran.values() for name in own) if precision.autocast else 0
    rows = runs.layer_input
    assert rows is not None
    return TracedModel(
        family=str(config.get("model_type", type(model).__name__)),
        model_class=type(model).__name__,
        config=dict(config),
        setting={
            "sequences": batch.sequences,
            "sequence_length": batch.sequence_length,
            "precision": [precision.name, precision.residual_nbytes],
            "loss": "chunked" if chunked else "exact",
            "expert_parallel": expert_parallel,
            "inputs": {k: list(x.shape) for k, x in runs.inputs.items() if isinstance(x, Tensor)},
        },
        names=tuple(names),
        kinds=tuple(kinds),
        layers=tuple(made),
        first_units=first_units,
        last_units=last_units,
        first_tensors=tuple(_shape(p) for p in in_front.values()),
        last_tensors=tuple(_shape(p) for p in behind.values()),
        tied_tensor=None if tied is None else _shape(tied),
        first_nbytes=first_nbytes,
        last_nbytes=last_nbytes,
        layer_input=(prod(rows[:-1]), rows[-1]),
        buffers_nbytes=buffers_nbytes,
        workspace=_workspace(steps, outside(False), is_inside, names[0], casts),
        is_stack=is_stack and not first_units,
        shares=shares,
    )


def _steps(
    runs: FakeRuns,
    sites: Sequence[Site],
    inputs: Callable[[nn.Module], Mapping[str, Any]],
    precision: Precision,
    chunked: bool,
    device: str,
    num_logits: int,
) -> Iterator[tuple[str, Step]]:
    name = type(runs.model).__name__
    try:
        with runs.inside():
            runs.inputs = inputs(runs.model)
        for variant, (code, attention) in _VARIANTS.items():
            peaks = variant in _WITH_PEAKS
            few = num_logits // (_MOST_TILES if peaks else 1)
            with _compressed(runs.model, sites, code, attention, chunked), _tiles(device, few):
                in_place = precision.autocast or chunked  # a cast, or the loss, has made the head's gradient
                yield variant, runs.step(usual_loss, precision.autocast, backward=peaks, adds_in_place=in_place)
    except torch._subclasses.fake_tensor.DynamicOutputShapeException as error:
        raise _depends(name, error) from error
    except torch._subclasses.fake_tensor.DataDependentOutputException as error:
        raise _depends(name, error) from error


@contextmanager
def _tiles(device: str, least: int) -> Iterator[None]:
    """Losses in the tiles of a device, but of so many logits at least: thousands of tiles would take minutes."""
    kept = loss.TILES["cpu"], loss.ROWS["cpu"], loss.BLOCK, causal_loss.TILES["cpu"]
    (tokens, numel), rows = loss.TILES[device], causal_loss.TILES[device]
    loss.TILES["cpu"], causal_loss.TILES["cpu"] = (tokens, max(numel, least)), max(rows, least)
    loss.ROWS["cpu"], loss.BLOCK = loss.ROWS[device], max(loss.BLOCK, least)
    try:
        yield
    finally:
        loss.TILES["cpu"], loss.ROWS["cpu"], loss.BLOCK, causal_loss.TILES["cpu"] = kept


@contextmanager
def _one_thread() -> Iterator[None]:
    """What little is computed is not worth the start of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _depends(name: str, error: Exception) -> PlanError:
    return PlanError(
        f"the forward of {name} depends on values ({error}), so its bytes cannot be read without running it; measure"
        " a step with laconic.activations.SavedTensorTracker"
    )


@contextmanager
def _compressed(
    model: nn.Module, sites: Sequence[Site], code: str | None, attention: str | None, chunked: bool
) -> Iterator[None]:
    format = None if code is None else BlockFormat(code)
    plan = ActivationPlan.make(sites, careful_head(format, None if attention is None else BlockFormat(attention)))
    if not chunked and not any(plan.choices.values()):
        yield
        return
    try:
        convert(model, sites, plan, find_head(model) if chunked else None, None)
        yield
    finally:
        decompress_activations(model)


# --- layers ---


def _blocks(model: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """The layers by name: members of lists, as far out as some of them are alike, else further in if there are such."""
    found: dict[str, nn.Module] = {}
    for name, child in model.named_children():
        at = f"{prefix}{name}"
        if not isinstance(child, nn.ModuleList | nn.Sequential) or len(child) < 2:
            found |= _blocks(child, f"{at}.")
            continue
        members = {f"{at}.{key}": member for key, member in child.named_children()}
        alike = len({_likeness(member) for member in members.values()}) < len(members)
        inner = {} if alike else {k: v for n, m in members.items() for k, v in _blocks(m, f"{n}.").items()}
        if isinstance(child, nn.Sequential) and not alike and not inner:
            continue  # steps of one layer
        within = Counter(name.rpartition(".")[0] for name in inner)
        found |= inner if within and max(within.values()) > 1 and _some_alike(inner) else members
    return found


def _lone_layer(model: nn.Module) -> dict[str, nn.Module]:
    """The layer of a model of one layer, by name, if its only list is that layer's."""
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 0]
    return {f"{name}.0": only[0] for name, only in lists} if len(lists) == 1 and len(lists[0][1]) == 1 else {}


def _some_alike(blocks: Mapping[str, nn.Module]) -> bool:
    return len({_likeness(block) for block in blocks.values()}) < len(blocks)


def _likeness(module: nn.Module) -> tuple[Any, ...]:
    """Equal for modules that compute the same of tensors of the same shapes."""
    seen: list[Any] = []
    for name, part in module.named_modules():
        plain = {
            key: value
            for key, value in vars(part).items()
            if key[0] != "_" and isinstance(value, bool | int | float | str | tuple) and not _is_number(key)
        }
        shapes = [(key, p.shape, p.dtype) for key, p in part._parameters.items() if p is not None]
        seen.append((name, type(part), repr(sorted(plain.items(), key=str)), repr(shapes)))
    return tuple(seen)


def _is_number(name: str) -> bool:
    return name.endswith(("idx", "index", "_id", "number", "layer_num"))


def _kinds(model: nn.Module, blocks: Mapping[str, nn.Module]) -> list[int]:
    """The kind of each layer, numbered as they come; what the configuration lists layer by layer counts too."""
    config = getattr(model, "config", None)
    lists = [v for v in vars(config).values() if isinstance(v, list | tuple)] if config is not None else []
    lists = [v for v in lists if len(v) == len(blocks) and all(isinstance(x, str | int | float) for x in v)]
    known: dict[Any, int] = {}
    kinds = []
    for index, (name, block) in enumerate(blocks.items()):
        key = name.rpartition(".")[0], _likeness(block), repr([v[index] for v in lists])
        kinds.append(known.setdefault(key, len(known)))
    return kinds


class _Repeated(nn.Module):
    """In place of a layer that is like others: gives copies of what the last of these gave."""

    def __init__(self, layer: nn.Module, given: dict[str, Any]) -> None:
        super().__init__()
        self.__dict__["_layer"], self.__dict__["_given"] = layer, given

    def __getattr__(self, name: str) -> Any:  # what a model's forward asks its layers
        return getattr(self.__dict__["_layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What a layer like this one gave, in other storages, of which autograd saves nothing."""
        output = self._given["output"]
        self._given["left"] -= 1
        if self._given["left"] == 0:  # or it would stay alive
            del self._given["output"]
        return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, output)


def _give(given: dict[str, Any], times: int, block: nn.Module, args: Any, output: Any) -> None:
    if times > 0:
        given.update(output=output, left=times)


def _leave_out_repeated(
    model: nn.Module, blocks: Mapping[str, nn.Module], kinds: Sequence[int]
) -> dict[int, tuple[str, ...]]:
    """Put `_Repeated` in the place of all but the first layers of each kind; names of those that run, by kind."""
    ran: dict[int, tuple[str, ...]] = {}
    outputs: dict[int, dict[str, Any]] = {}
    for (name, block), kind in zip(blocks.items(), kinds, strict=True):
        given = outputs.setdefault(kind, {})
        own = ran.get(kind, ())
        if len(own) < _TIMES:
            ran[kind] = (*own, name)
            block.register_forward_hook(partial(_give, given, kinds.count(kind) - _TIMES))
            continue
        owner, _, key = name.rpartition(".")
        model.get_submodule(owner)._modules[key] = _Repeated(block, given)
    return ran


def _layer(
    names: Sequence[str],
    sites: Sequence[Site],
    experts: Collection[str],
    saved: _Saved,
    flops: Mapping[str, int],
    tensors: Sequence[tuple[str, nn.Parameter]],
    autocast: bool,
) -> TracedLayer:
    first, last = names[0], names[-1]
    own = [site for site in sites if site.name == last or site.name.startswith(f"{last}.")]
    kept = {variant: _within(last, found) for variant, found in saved.items()}
    work = _within(last, flops)
    more = {v: sum(_within(first, saved[v]).values()) - sum(kept[v].values()) for v in _WITH_PEAKS}
    casts = {name.rpartition(".")[0]: _cast_nbytes([(name, p)]) for name, p in tensors if autocast and p.dim() == 2}
    stacked, plain = [], []
    for name, p in tensors:
        if _joined(last, name.rpartition(".")[0]) in experts and p.dim() > 1:
            stacked.append((p.shape[0], prod(p.shape[1:-1]), p.shape[-1]))
        else:
            plain.append(_shape(p))
    shared = max(0, more["exact"])
    return TracedLayer(
        units=_units([(_relative(site.name, last), site) for site in own], kept, work, casts),
        tensors=tuple(plain),
        experts=tuple(stacked),
        flops=float(sum(work.values())),
        shared_nbytes=shared,
        arguments_nbytes=max(0, more["nf4"] - shared),
    )


_REST = "the rest"


def _units(
    sites: Sequence[tuple[str, Site]], saved: _Saved, flops: Mapping[str, int], casts: Mapping[str, int]
) -> tuple[Unit, ...]:
    """The units of a layer: attention and other mixers, their output projections, feed-forward blocks, and the rest."""
    mixers = [name for name, site in sites if site.kind == "mixer"]
    attention = [name for name, site in sites if site.kind == "attention"]
    owner: dict[str, str] = {}
    kinds: dict[str, Literal["norm", "linear", "mlp", "attention", "head"]] = {_REST: "norm"}
    behind: dict[str, str] = {}
    for name, site in sites:
        if any(name != other and _is_in(name, other) for other in mixers):
            continue  # runs again with it
        if name in mixers or name in attention:
            owner[name], kinds[name] = name, "attention"
        elif isinstance(site.spec, MlpSpec):
            owner |= {name: name, _joined(name, site.spec.down): name}
            kinds[name] = "mlp"
    for name, site in sites:
        if name in owner or any(_is_in(name, other) for other in mixers):
            continue
        owner[name] = _REST
        core = next((other for other in attention if _is_in(name, other)), None)
        if site.kind == "linear" and core is not None:
            grown = saved["only attention"].get(name, 0) - saved["exact"].get(name, 0)
            # Packed, it keeps nothing where backward makes attention again.
            alone, beside = (saved[variant].get(name, 0) for variant in ("all but attention", "int8"))
            if grown > 0 or alone > beside:
                owner[name], kinds[name], behind[name] = name, "linear", core

    def owner_of(name: str) -> str:
        while name and name not in owner:
            name = name.rpartition(".")[0]
        return owner.get(name, _REST)

    def summed(found: Mapping[str, int]) -> Counter[str]:
        counted: Counter[str] = Counter()
        for name, number in found.items():
            counted[owner_of(name)] += number
        return counted

    kept = {variant: summed(found) for variant, found in saved.items()}
    work, weights = summed(flops), summed(casts)
    experts = sum(n for name, n in flops.items() if any(_is_in(name, s) for s, site in sites if site.kind == "experts"))
    units = []
    for unit, kind in kinds.items():
        packs = [name for name, site in sites if owner.get(name) == unit]
        if not packs and not any(kept[variant][unit] for variant in kept):
            continue
        core = behind.get(unit)
        if core is None:
            packing = _packing({code: kept[code][unit] for code in _CODES})
        else:  # what it keeps where attention is exact
            packing = {"num_elements": kept["all but attention"][unit] * 32 // 33}
        inner = [name for name, site in sites if unit != _REST and isinstance(site.spec, MlpSpec) and name == unit]
        again = sum(n for name, n in flops.items() for at in inner if _is_in(name, at)) - work[unit] if inner else 0
        units.append(
            Unit(
                name=unit if unit != _REST else (packs[0] or "itself" if packs else "itself"),
                kind=kind,
                layer=None,
                sites=tuple(packs),
                exact_nbytes=kept["exact"][unit],
                **packing if core is None or kept["all but attention"][unit] else {"num_elements": None},
                weight_nbytes=weights[unit],
                rebuilt_with=core,
                input_nbytes=0 if core is None else kept["only attention"][unit] - kept["exact"][unit],
                rebuilds=kind != "attention",
                again_flops=float(work[unit] if kind == "attention" else experts if unit == _REST else 0),
                recompute_flops=float(again),
            )
        )
    return tuple(units)


def _packing(found: Mapping[str, int]) -> dict[str, Any]:
    """Fields of a unit from the bytes that it keeps by code: what grows with the bits of a code is packed."""
    elements = max(0, 2 * (found["int8"] - found["nf4"])) or found["int8"] * 32 // 33
    beside = max(0, found["int8"] - Choice("int8").packed_nbytes(1, elements)) if found["int8"] > found["nf4"] else 0
    if beside * 50 < found["int8"]:  # blocks that rows do not fill
        beside = 0
    packed = tuple((code, max(0, nbytes - beside)) for code, nbytes in found.items())
    return {"num_elements": elements, "beside_nbytes": beside, "packed": packed}


def _ends(sites: Sequence[Site], saved: _Saved, layer: int) -> tuple[tuple[Unit, ...], int]:
    """The units of sites before or behind the layers, and bytes that no choice changes there."""
    names = {site.name for site in sites}
    rest = {v: sum(n for name, n in found.items() if name not in names) for v, found in saved.items()}
    fixed = min(rest.values()) if names else max(rest.values())
    units: list[Unit] = []
    for is_head in (True, False):
        own = [site.name for site in sites if site.head == is_head]
        if not own:
            continue
        # What varies beside the sites is booked on the first unit.
        kept = {
            v: sum(found.get(name, 0) for name in own) + (0 if units else rest[v] - fixed) for v, found in saved.items()
        }
        units.append(
            Unit(
                name=own[0],
                kind="head" if is_head else "norm",
                layer=None if is_head else layer,
                sites=tuple(own),
                exact_nbytes=kept["exact"],
                **_packing({code: kept[code] for code in _CODES}),
                minimum_bits=8 if is_head else 2,
                rebuilds=False,
            )
        )
    return tuple(units), fixed


def _workspace(
    steps: Mapping[str, Step], behind: _Saved, is_inside: Callable[[str], bool], first_layer: str, casts: int
) -> dict[str, Workspace]:
    found: dict[str, dict[str, int]] = {}
    for variant in _WITH_PEAKS:
        step = steps[variant]
        total, tail = sum(step.saved.values()), sum(behind[variant].values())
        inner = total - tail
        first = inner - sum(n for name, n in step.saved.items() if is_inside(name) and not _is_in(name, first_layer))
        saved = {"forward": inner, "loss": total, "backward": inner, "end": first}
        found[variant] = {point: max(0, step.peaks[point] - saved[point]) for point in POINTS}
    workspace = {}
    for point in POINTS:
        exact = found[_WITH_PEAKS[0]][point]
        # Casts of weights in layers, which the planner counts by layer.
        more = found[_WITH_PEAKS[1]][point] - (casts if point in ("forward", "loss") else 0) - exact
        if point != "loss":  # which a converted model computes in tiles, so it takes less
            more = max(0, more)
        workspace[point] = Workspace(exact, more)
    return workspace


# --- names and shapes ---


def _is_in(name: str, other: str) -> bool:
    return not other or name == other or name.startswith(f"{other}.")


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))


def _relative(name: str, block: str) -> str:
    return name.removeprefix(block).removeprefix(".")


def _within(block: str, found: Mapping[str, int]) -> dict[str, int]:
    return {_relative(name, block): n for name, n in found.items() if _is_in(name, block)}


def _cast_nbytes(tensors: Sequence[tuple[str, Tensor]]) -> int:
    return sum(2 * p.numel() for _, p in tensors if p.dim() == 2)


def _shape(p: Tensor) -> tuple[int, int]:
    """Rows and columns of a parameter as AdamW8bit sees it; a vector has one column."""
    if p.dim() < 2:
        return p.numel(), 1
    return (p.shape[0], prod(p.shape[1:])) if p.dim() > 3 else (prod(p.shape[:-1]), p.shape[-1])
