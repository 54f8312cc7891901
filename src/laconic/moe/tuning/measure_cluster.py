"""Measures the rates of mixture-of-experts layers: a grid's links, products of experts, copies, codecs.

All ranks call `measure_moe` together and get the same rates: of every repeat the slowest rank counts, of the repeats
the median, and lines through them have neither negative start-up nor negative slope; their worst error is in
`Line.error`. Products and copies are measured in the sizes of the layer that is to be planned, some smaller than it,
because processors are not lines over all sizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from laconic.collectives.cluster_profile import measure_link
from laconic.collectives.codec import Codec, Lossless, Raw
from laconic.collectives.policy.microbench import Ranks, codec_rates, gaussian, group_shape_of, host_name
from laconic.collectives.runtime import torch_compat
from laconic.collectives.runtime.group_facts import ranks_of
from laconic.cost.comm.rates import ITEM_NBYTES, CodecRates, Line, LinkRates, WireRates, fit_line
from laconic.cost.moe.rates import MoERates
from laconic.cost.moe.shape import LayerShape, group_shape
from laconic.errors import ConfigError
from laconic.moe.experts.grouped_mm import grouped_mm
from laconic.moe.parallel.grid import Grid
from laconic.moe.tuning.measure_dispatch import layout_of, measure_routes
from laconic.topology import GROUPS

_OPERATIONS = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce", "send")
_SIZES = tuple(1 << power for power in (12, 16, 20, 22))
_QUICK_SIZES = (1 << 12, 1 << 16)
_SHARES = (1 / 16, 1 / 4, 1.0)
"""Measured shares of the layer's rows."""
_REPEATS, _QUICK_REPEATS = 5, 2
_CODEC_NBYTES = (1 << 14, 1 << 18, 1 << 22)
_CODEC_NUMEL = (1 << 13, 1 << 17, 1 << 20)
_OVERLAP_NBYTES = 1 << 21
_LONGEST_SECONDS = 0.2
"""Limit of one message; on slow networks longer ones add no information."""


def measure_moe(
    grid: Grid,
    shape: LayerShape,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | None = None,
    wire: WireRates | None = None,
    codecs: Sequence[Codec] = (),
    routes: bool = True,
    quick: bool = False,
) -> MoERates:
    """Measure every group of the grid that has more than one rank, and this layer's work within a rank.

    Args:
        grid: the process groups.
        shape: of the layer, as each rank sees it.
        dtype: of its rows and weights.
        device: this process's GPU or the CPU; None: the CPU.
        wire: links by kind and lossless codecs, as `laconic.collectives.cluster_profile` measures them; None:
            the groups of this grid stand for their kinds, and codecs are measured on `dtype` alone.
        codecs: further codecs of rows, as laconic.collectives.codec.Blockwise; `Coding` names them by their name.
        routes: also run every route of this grid, with experts that do nothing, for its fixed overhead.
        quick: small messages, few repeats; for a smoke test.

    Raises:
        ConfigError: the grid does not divide the layer, or the layer has no tokens to measure.
    """
    device, layout = device or torch.device("cpu"), grid.layout
    shape.check(layout)
    if shape.num_tokens == 0:
        raise ConfigError("num_tokens is 0, but a layer is measured with the rows it will have; give a usual number")
    assert dist.group.WORLD is not None
    ranks = Ranks(dist.group.WORLD, device)
    found: dict[tuple[int, ...], LinkRates] = {}  # a group that has two names is measured once
    links = {}
    for name, group in groups_of(grid).items():
        members = ranks_of(group)
        if members not in found:
            # Levels come last, and exchange rows only.
            operations = _OPERATIONS if name in GROUPS else ("all_to_all", "send")
            sizes = _QUICK_SIZES if quick else _SIZES
            found[members] = measure_link(ranks, group, sizes, operations, longest_seconds=_LONGEST_SECONDS)
        links[name] = found[members]
    wire = wire or _wire(ranks, grid, links, dtype, quick)
    repeats = _QUICK_REPEATS if quick else _REPEATS
    numel = _CODEC_NUMEL[:2] if quick else _CODEC_NUMEL
    names = {codec.name: _codec(ranks, codec, dtype, numel) for codec in codecs}
    source = f"measure_moe, {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}, {grid!r}, {device.type}"
    rates = MoERates(
        wire,
        _products(ranks, shape, layout.ep, layout.esp, layout.mp, dtype, repeats),
        _copies(ranks, shape, dtype, repeats),
        links,
        {str(dtype).removeprefix("torch."): names} if names else {},
        _overlap(ranks, grid),
        grouped=True,
        source=ranks.texts(source)[0],
    )
    if not routes:
        return rates
    per_node = group_shape_of(ranks.texts(host_name())).ranks_per_node
    travelling: list[Codec] = [Raw(), *codecs]
    if "tiered" in wire.codecs.get(str(dtype).removeprefix("torch."), {}):
        travelling.insert(1, Lossless("tiered"))
    return measure_routes(
        grid, shape, rates, ranks, ranks_per_node=per_node, codecs=travelling, dtype=dtype, repeats=repeats
    )


def groups_of(grid: Grid) -> dict[str, dist.ProcessGroup]:
    """Return the groups of more than one rank by their names in `MoERates.groups`."""
    groups = {name: getattr(grid, name) for name in ("mp", "dp", "esp", "ep", "joint", "edp")}
    for number, level in enumerate(grid.levels):
        groups[f"intra{number}"] = level.within
        if level.across is not None:
            groups[f"inter{number}"] = level.across
    return {name: group for name, group in groups.items() if group.size() > 1}


def _wire(ranks: Ranks, grid: Grid, links: Mapping[str, LinkRates], dtype: torch.dtype, quick: bool) -> WireRates:
    """Return links of the grid's groups by kind, and the codecs of one dtype."""
    hosts = ranks.texts(host_name())
    whole = group_shape_of(hosts)
    machines = layout_of(grid, whole.ranks_per_node)
    kinds = {group_shape(machines, name).kind: link for name, link in links.items() if name in GROUPS}
    sizes = _CODEC_NBYTES[:2] if quick else _CODEC_NBYTES
    name = str(dtype).removeprefix("torch.")
    codecs = {name: codec_rates(ranks, dtype, sizes)} if name in ITEM_NBYTES else {}
    layout = whole.num_nodes, whole.ranks_per_node
    return WireRates(kinds, codecs, ranks.device.type, layout, tuple(dict.fromkeys(hosts)), "measure_moe")


def _line(ranks: Ranks, cases: Sequence[tuple[float, Callable[[], object]]], repeats: int) -> Line:
    return fit_line([(size, median(ranks.seconds(case, repeats))) for size, case in cases])


def _products(ranks: Ranks, shape: LayerShape, ep: int, esp: int, mp: int, dtype: torch.dtype, repeats: int) -> Line:
    """Measure one product of all experts of a rank, rows spread evenly over them."""
    experts, hidden = shape.num_experts // ep, shape.hidden_dim // esp
    weights = torch.zeros(experts, shape.model_dim, hidden, dtype=dtype, device=ranks.device)
    weights += gaussian(hidden, dtype, ranks.device)
    cases = []
    for share in _SHARES:
        each = max(1, round(share * shape.rows_per_token * shape.num_tokens * esp / mp / experts))
        rows = gaussian(each * experts * shape.model_dim, dtype, ranks.device).view(-1, shape.model_dim)
        counts = torch.full((experts,), each, dtype=torch.int64, device=ranks.device)
        cases.append((len(rows) * shape.model_dim * hidden, partial(grouped_mm, rows, weights, counts)))
    return _line(ranks, cases, repeats)


def _copies(ranks: Ranks, shape: LayerShape, dtype: torch.dtype, repeats: int) -> Line:
    """Measure gathering rows in random order."""
    cases = []
    for share in _SHARES:
        number = max(1, round(share * shape.rows_per_token * shape.num_tokens))
        rows = torch.zeros(number, shape.model_dim, dtype=dtype, device=ranks.device)
        order = torch.randperm(number, generator=torch.Generator().manual_seed(0), device="cpu").to(ranks.device)
        cases.append((rows.nbytes, partial(torch.index_select, rows, 0, order)))
    return _line(ranks, cases, repeats)


def _codec(ranks: Ranks, codec: Codec, dtype: torch.dtype, numbers: Sequence[int]) -> CodecRates:
    points: dict[str, list[tuple[float, float]]] = {"encode": [], "decode": [], "decode_add": []}
    ratio = 1.0
    for numel in numbers:
        x = gaussian(numel, dtype, ranks.device)
        message, out, total = (
            codec.encode(x),
            torch.empty_like(x),
            torch.zeros(numel, device=x.device, dtype=torch.float32),
        )
        ratio = x.nbytes / message.numel()
        cases: dict[str, Callable[[], object]] = {
            "encode": partial(codec.encode, x),
            "decode": partial(codec.decode_into, message, out),
            "decode_add": partial(codec.decode_add, message, total, dtype),
        }
        for name, case in cases.items():
            points[name].append((x.nbytes, ranks.seconds_alone(case)))
    encode, decode, add = (fit_line(points[name]) for name in ("encode", "decode", "decode_add"))
    (agreed,) = max(ranks.exchange([round(ratio * 1e6)]))
    return CodecRates(encode, decode, add, agreed * 1e-6)


def _overlap(ranks: Ranks, grid: Grid) -> float:
    """Measure how much of the shorter of a gather (ESP or MP) and an all-to-all (EP) overlaps when both run, 0 to 1."""
    inside = grid.esp if grid.esp.size() > 1 else grid.mp
    if inside.size() == 1 or grid.ep.size() == 1:
        return 1.0
    sent = torch.zeros(grid.ep.size(), _OVERLAP_NBYTES // grid.ep.size(), dtype=torch.uint8, device=ranks.device)
    mine = torch.zeros(_OVERLAP_NBYTES // inside.size(), dtype=torch.uint8, device=ranks.device)
    received, gathered = torch.empty_like(sent), mine.new_empty(inside.size(), len(mine))

    def run(exchanges: bool, gathers: bool) -> None:
        works = [torch_compat.all_to_all(received, sent, grid.ep)] if exchanges else []
        works += [torch_compat.all_gather(gathered, mine, inside)] if gathers else []
        for work in works:
            work.wait()

    one, other, both = (
        median(ranks.seconds(partial(run, *which), 3)) for which in ((True, False), (False, True), (True, True))
    )
    return min(1.0, max(0.0, (one + other - both) / min(one, other)))
