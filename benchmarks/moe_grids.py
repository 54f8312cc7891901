"""What our schedules of experts gain on the layers that the papers timed, by our models and the papers' constants.

FSMoE (arXiv 2501.10714): 1458 layers on each of two clusters. Parm (2407.00599): 1296 layers on 8 and 32 GPUs. HierMoE
(2508.09591): the exchange of DeepSeek-V3 and Qwen3-30B on 32 GPUs. Each plan that we would run stands beside every
baseline under the same model. `benchmarks.kit.moe_papers` has layers, constants and prices; nothing is tuned to fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice, product
from statistics import mean

import torch
from torch import Tensor

from benchmarks.expert_packing import rebalance
from benchmarks.kit.moe_papers import (
    A_CORRECTED,
    HIERMOE_CLUSTER,
    PAPER_DEGREES,
    TESTBED_A,
    TESTBED_B,
    Cluster,
    StackLayer,
    chunk_time,
    fsmoe_layers,
    fsmoe_schedules,
    hiermoe_rates,
    parm_layers,
    parm_plans,
)
from benchmarks.kit.timing import seconds_of
from benchmarks.registry import Options, Table, benchmark
from laconic.cost.comm.rates import Line
from laconic.cost.moe.hierarchy import (
    LevelCost,
    RowCounts,
    best_depth,
    count_vector,
    counted_groups,
    depth_seconds,
    flat_seconds,
    hit_share,
    level_costs,
)
from laconic.moe.placement.search import Cost, best_swaps
from laconic.schedule.moe_gradients import BackwardPart, fill_slots
from laconic.schedule.moe_pipeline import LayerTimes, best_degree

Prices = Sequence[Mapping[str, float]]
"""Seconds of each layer, by plan."""


@benchmark("moe-grids")
def moe_grids(options: Options) -> Iterator[Table]:
    """Paper by paper; then what the models say of four GPUs over 25 GbE, and what planning takes."""
    step = 97 if options.small else 1
    for cluster in (TESTBED_A, TESTBED_B):
        yield _fsmoe(cluster, step)
    yield _readings(step)
    yield from _parm(
        [(grid.num_ranks, grid.mp, parm_plans(grid, shape)) for grid, shape in islice(parm_layers(), 0, None, step)]
    )
    yield _depths()
    yield from (_exchanges(routed, 3 if options.small else 32) for routed in _MODELS)
    yield _ethernet()
    yield _planning(options, step)


def _over(plan: str, other: str, prices: Prices) -> str:
    """How many times as fast a plan is: mean (least to most)."""
    return _spread(one[other] / one[plan] for one in prices)


def _spread(values: Iterable[float]) -> str:
    found = list(values)
    return f"{mean(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def _slower(plan: str, other: str, prices: Prices) -> str:
    """In how many layers a plan is slower, but for rounding."""
    return str(sum(one[plan] > (1 + 1e-9) * one[other] for one in prices))


# --- FSMoE ---


@cache
def _priced(cluster: Cluster, step: int, papers_rule: bool = False) -> list[dict[str, float]]:
    layers = islice(fsmoe_layers(cluster), 0, None, 3 * step)  # three numbers of heads are the same
    return [fsmoe_schedules(layer, cluster.reduce, papers_rule) for layer in layers]


def _fsmoe(cluster: Cluster, step: int) -> Table:
    prices = _priced(cluster, step)
    names = ("Tutel, reduction beside dense", "FSMoE, one wire", "FSMoE")
    published = dict(zip(names, cluster.published, strict=True))
    layers = list(islice(fsmoe_layers(cluster), 0, None, 3 * step))
    wanted = [
        [best_degree(times, 0.0, PAPER_DEGREES).degree for times in (layer.forward, layer.backward)] for layer in layers
    ]
    return Table.of(
        f"FSMoE: {3 * len(layers)} layers on cluster {cluster.name}",
        prices[0],
        [
            ("schedule", str),
            ("ours is so many times as fast", lambda name: _over("ours", name, prices)),
            ("ours is slower in", lambda name: _slower("ours", name, prices)),
            ("over Tutel with PipeMoE", lambda name: _over(name, "Tutel with PipeMoE", prices)),
            ("the paper measured", lambda name: f"{published[name]:.2f}" if name in published else ""),
        ],
        "Mean (least to most). Ours: FSMoE's schedule with the best of 1 to 16 chunks for each direction by simulation,"
        " and slots filled by dynamic programming; FSMoE's own planner rounds to 1, 2, 4 or 8."
        f" Forward and backward want different ones of these four in {3 * sum(a != b for a, b in wanted)} layers"
        " (912 on B in the paper). Tutel has the best common degree by simulation, better than by PipeMoE's formula.",
    )


def _readings(step: int) -> Table:
    short = "the same, one chunk where the all-to-all takes under 1 ms"
    cases = [
        ("as printed, per element", TESTBED_A, False),
        (short, TESTBED_A, True),
        ("as printed, per byte of fp32", replace(TESTBED_A, unit=4), False),
        ("gather and all-reduce ten times faster, per element", A_CORRECTED, False),
        ("gather and all-reduce ten times faster, per byte", replace(A_CORRECTED, unit=4), False),
        ("as printed, per element", TESTBED_B, False),
        (short, TESTBED_B, True),
        ("as printed, per byte of fp32", replace(TESTBED_B, unit=4), False),
    ]
    rows = []
    for reading, cluster, papers_rule in cases:
        prices = _priced(cluster, step, papers_rule)
        gains = [
            f"{mean(one['Tutel with PipeMoE'] / one[name] for one in prices):.2f} ({paper:.2f})"
            for name, paper in zip(
                ("Tutel, reduction beside dense", "FSMoE, one wire", "FSMoE"), cluster.published, strict=True
            )
        ]
        rows.append([cluster.name, reading, *gains, _over("ours", "Tutel with PipeMoE", prices)])
    return Table(
        "FSMoE: mean speedup over Tutel with PipeMoE by how its constants are read (measured in the paper)",
        ["cluster", "constants read", "Tutel, reduction beside dense", "FSMoE, one wire", "FSMoE", "ours"],
        rows,
        "The paper does not say whether its betas are per byte or per element, and prints a beta of A's gather that is"
        " ten times that of its scatter. Deviations: (1) Its planner takes one chunk where a whole all-to-all takes"
        " less than 1 ms. By its own constants that is most of the grid; on its machines all-to-alls took 4 to 7 times"
        " longer (Table 2). What was measured on B lies between the simulation with and without that rule. (2) The"
        " simulator overlaps perfectly. (3) In Table 2, experts and attention take 3 to 5 times longer than the paper's"
        " line for matrix products says: only the proportions are nearly those of the clusters. (4) Gate, order, norms"
        " and launches are not priced; no drop is taken as balanced, a capacity factor of 1.",
    )


# --- Parm ---


def _parm(layers: Sequence[tuple[int, int, Mapping[str, float]]]) -> list[Table]:
    groups = {
        f"{ranks} GPUs, MP {mp}": [one for *of, one in layers if of == [ranks, mp]]
        for ranks, mp in product((8, 32), (1, 2, 4))
    }
    groups = {name: prices for name, prices in groups.items() if prices}
    groups["all"] = [one for *_, one in layers]

    def over(plan: str, other: str) -> Callable[[str], str]:
        return lambda name: _over(plan, other, groups[name])

    def loses(plan: str, best: str) -> Callable[[str], str]:
        return lambda name: f"{max(one[plan] / one[best] - 1 for one in groups[name]):.1%}"

    gains = Table.of(
        f"Parm: {len(layers)} layers, forward and backward, so many times as fast",
        groups,
        [
            ("layers", str),
            ("number", lambda name: str(len(groups[name]))),
            ("the faster of S1 and S2 over DeepSpeed-MoE (paper: 1.13 to 5.77)", over("parm", "baseline")),
            ("ours over DeepSpeed-MoE", over("ours", "baseline")),
            ("ours over the faster of S1 and S2", over("ours", "parm")),
            ("ours over FSMoE's path in one chunk", over("ours", "fsmoe whole")),
            ("ours over FSMoE", over("ours", "fsmoe")),
        ],
        "Ours: the fastest of S1, S2 and FSMoE's path, whole or in chunks. The paper's 1296 layers and its constants"
        " are not public: the grid has its size and clusters, the constants are FSMoE's of cluster B. Predictions lie"
        " above the paper's measurements at both ends, because work within a GPU that all paths share (sorting,"
        " launches) is not priced.",
    )
    choice = Table.of(
        "Parm: what a fixed choice loses at most, and what ours is",
        groups,
        [
            ("layers", str),
            ("S1 is faster than S2 in", lambda name: str(sum(one["s1"] <= one["s2"] for one in groups[name]))),
            ("always S1 loses against the faster", loses("s1", "parm")),
            ("always S2 loses", loses("s2", "parm")),
            ("ours is FSMoE's path in", lambda name: str(sum(one["fsmoe"] == one["ours"] for one in groups[name]))),
            ("always FSMoE loses against ours", loses("fsmoe", "ours")),
            ("chunks of the path that is fastest whole, only: loses", loses("path first", "ours")),
            ("in layers", lambda name: _slower("path first", "ours", groups[name])),
        ],
        "So `autotune` runs the best of each path in chunks, not only the path that is fastest whole. On one node (8"
        " GPUs) gathers and exchanges use one wire.",
    )
    return [gains, choice]


# --- HierMoE ---

_TOKENS, _DRIFT_STEPS, _PER_RANK = 1024, 32, 64
_SPREADS = {"nearly even routing": 0.25, "skewed": 1.0}
"""Standard deviations of the logarithm of experts' popularity."""

_MEASURED = {  # experts, top-k: HD2, de-duplication with the best depth, over Megatron's all-to-all
    (128, 6): (0.95, 1.37),
    (128, 8): (1.26, 1.72),
    (128, 10): (1.30, 1.82),
    (64, 8): (1.12, 1.57),
    (256, 8): (1.18, 1.61),
}


def _depths() -> Table:
    depths = HIERMOE_CLUSTER.depths

    def gains(case: tuple[int, int]) -> list[float]:
        found = best_depth(RowCounts.uniform(_TOKENS, *case, HIERMOE_CLUSTER), 2048 * 2, hiermoe_rates())
        return [found.flat_seconds / sum(found.candidates[depth].values()) for depth in depths]

    predicted = {case: gains(case) for case in _MEASURED}
    best = {case: max(of_depths) for case, of_depths in predicted.items()}
    return Table.of(
        "HierMoE: exchange over one with duplicates, 32 GPUs, 1024 tokens each, 2048 wide, bf16, uniform routing",
        _MEASURED,
        [
            ("experts", lambda case: str(case[0])),
            ("top-k", lambda case: str(case[1])),
            *((f"d = {d}", lambda case, d=d: f"{predicted[case][d - 1]:.2f}") for d in depths),
            ("d*", lambda case: str(depths[predicted[case].index(best[case])])),
            ("predicted", lambda case: f"{best[case]:.2f}"),
            ("measured", lambda case: f"{_MEASURED[case][1]:.2f}"),
            ("off by", lambda case: f"{best[case] / _MEASURED[case][1] - 1:+.0%}"),
            ("HD2 measured", lambda case: f"{_MEASURED[case][0]:.2f}"),
        ],
        "Measured: the paper, without swaps. Its two-level runs stay far below the model (d = 2), which has no index"
        " work, no launches and no uneven routing; at the best depth those errors are small.",
    )


@dataclass(frozen=True)
class _Routed:
    """A model's routing: tokens choose k experts, of their best groups only."""

    name: str
    num_experts: int
    model_dim: int
    groups: tuple[int, int]
    """Number of groups, and how many a token may choose from."""
    published: Mapping[str, str]
    top_k: int = 8

    def choices(self, step: int, spread: float) -> Tensor:
        """Experts of all ranks' tokens [32 * `_PER_RANK`, k]: skewed, turning to another skew as steps go by."""
        turn, rest = divmod(step, _DRIFT_STEPS)
        one, other = (
            torch.randn(self.num_experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            for seed in (turn, turn + 1)
        )
        angle = math.pi / 2 * rest / _DRIFT_STEPS
        generator = torch.Generator().manual_seed(1000 + step)
        tokens = HIERMOE_CLUSTER.num_ranks * _PER_RANK
        noise = -(-torch.rand(tokens, self.num_experts, generator=generator, dtype=torch.float64).log()).log()
        scores = spread * (math.cos(angle) * one + math.sin(angle) * other) + noise
        grouped = scores.unflatten(1, (self.groups[0], -1))
        chosen = grouped.topk(2).values.sum(-1).topk(self.groups[1]).indices  # a group is as good as its two best
        allowed = torch.zeros(grouped.shape[:2], dtype=torch.bool).scatter(1, chosen, True)
        return grouped.masked_fill(~allowed[..., None], -math.inf).flatten(1).topk(self.top_k).indices


_MODELS = (
    _Routed(
        *("DeepSeek-V3 at half its width", 256, 3584, (8, 4)),
        {"ours, a swap each step": "2.55 to 2.72"},
    ),
    _Routed(
        *("Qwen3-30B-A3B", 128, 2048, (1, 1)),
        {"two levels": "1.26", "best depth": "1.72", "ours, a swap each step": "1.99"},
    ),
)


def _exchanges(routed: _Routed, steps: int) -> Table:
    """Every system's exchange on the same drifting routing, step by step."""
    ours = "ours, a swap each step"
    found = {name: _exchange_seconds(routed, spread, steps) for name, spread in _SPREADS.items()}
    rows: dict[str, Prices] = {
        name: [dict(zip(prices, of_step, strict=True)) for of_step in zip(*prices.values(), strict=True)]
        for name, prices in found.items()
    }

    def columns(routing: str) -> list[tuple[str, Callable[[str], str]]]:
        return [
            (f"{routing}: ours is so many times as fast", lambda name: _over(ours, name, rows[routing])),
            ("ours is slower in", lambda name: f"{_slower(ours, name, rows[routing])} steps"),
            ("over Megatron's", lambda name: _over(name, _FLAT, rows[routing])),
        ]

    limits = (
        f"; a token's experts are in {routed.groups[1]} of {routed.groups[0]} groups" if routed.groups[0] > 1 else ""
    )
    return Table.of(
        f"HierMoE: exchange of {routed.name} ({routed.num_experts} experts, top-{routed.top_k}), {steps} steps",
        next(iter(found.values())),
        [
            ("exchange", str),
            *(column for routing in _SPREADS for column in columns(routing)),
            ("the paper measured over Megatron's", lambda name: routed.published.get(name, "")),
        ],
        f"Mean (least to most) of steps. Made-up routing: log-popularities from N(0, {_SPREADS['nearly even routing']})"
        f" and N(0, {_SPREADS['skewed']}), turning to other ones in {_DRIFT_STEPS} steps{limits}. A placement counts on"
        " one step's routing and serves from the next on; moving experts costs nothing here. The paper measured a real"
        " model's routing, and 2.34 to 3.32 over Tutel's two levels, 1.55 to 1.64 over two levels with SmartMoE's"
        " placement.",
    )


_FLAT = "all-to-all with duplicates (Megatron)"


def _exchange_seconds(routed: _Routed, spread: float, steps: int) -> dict[str, list[float]]:
    rates, row_nbytes, experts = hiermoe_rates(), 2.0 * routed.model_dim, routed.num_experts
    home = torch.arange(experts)
    placements = {"smart": home, "each": home, "eighth": home}
    found: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        found.setdefault(name, []).append(seconds)

    for step in range(steps):
        choices = routed.choices(step, spread)
        counts = {name: _counts(slots[choices], experts) for name, slots in {"home": home, **placements}.items()}

        def levels(depth: int, of: RowCounts) -> float:
            return sum(depth_seconds(of, depth, row_nbytes, rates).values())

        note(_FLAT, flat_seconds(counts["home"], row_nbytes, rates))
        note("two levels with duplicates (Tutel 2DH)", levels(2, _with_duplicates(counts["home"])))
        note("two levels", levels(2, counts["home"]))
        note("two levels, experts packed by load (as SmartMoE)", levels(2, counts["smart"]))
        note("best depth", best_depth(counts["home"], row_nbytes, rates).seconds)
        for name, label in (("eighth", "ours, a swap every 8 steps"), ("each", "ours, a swap each step")):
            chosen = best_depth(counts[name], row_nbytes, rates)
            note(label, chosen.seconds)
            if name == "each" or step % 8 == 0:
                costs = level_costs(counts[name], chosen.depth, row_nbytes, rates)
                chosen_slots = _chosen(placements[name][choices], experts)
                plan = best_swaps(chosen_slots, torch.ones(len(choices)), _costs(costs, experts))
                placements[name] = torch.tensor(plan.new_slots(experts))[placements[name]]
        loads = torch.bincount(choices.flatten(), minlength=experts).tolist()
        packed = rebalance(loads, HIERMOE_CLUSTER.num_ranks, current=placements["smart"].tolist())
        placements["smart"] = torch.tensor(packed)
    return found


def _chosen(slots: Tensor, num_slots: int) -> Tensor:
    return torch.zeros(len(slots), num_slots).scatter_(1, slots, 1.0)


def _costs(lines: Sequence[LevelCost], num_slots: int) -> list[Cost]:
    slots = torch.arange(num_slots)
    return [Cost(slots // (num_slots // one.num_groups), one.alpha_seconds, one.seconds_per_row) for one in lines]


def _counts(slots: Tensor, num_experts: int) -> RowCounts:
    ranks = slots.view(HIERMOE_CLUSTER.num_ranks, -1, slots.shape[1])
    tokens = torch.arange(ranks.shape[1]).repeat_interleave(slots.shape[1]).numpy()
    vectors = [count_vector(tokens, rank.flatten().numpy(), num_experts, HIERMOE_CLUSTER) for rank in ranks]
    # Fewer tokens than a rank has are drawn; the rest is taken to be alike.
    return RowCounts.of_vectors([vector * (_TOKENS / ranks.shape[1]) for vector in vectors], HIERMOE_CLUSTER)


def _with_duplicates(counts: RowCounts) -> RowCounts:
    """The same rows as if every assignment were a token of its own."""
    by_rank = counts.assignments
    rows = {g: by_rank.reshape(len(by_rank), g, -1).sum(-1) for g in counted_groups(counts.levels)}
    return RowCounts(counts.levels, rows, by_rank)


# --- four GPUs over 25 GbE ---

_LINK = Line(50e-6, 1 / 2.8e9)
_GEMM = Line(10e-6, 1 / 78e12)
_BLOCKS = {  # model width, expert's width, experts, top-k, width of keys and values over that of queries
    "Mixtral 8x7B": (4096, 14336, 8, 2, 0.25),
    "Qwen3-30B-A3B": (2048, 768, 128, 8, 0.125),
}


def _ethernet() -> Table:
    reduce = Line(_LINK.alpha_seconds, 2 * 3 / 4 * _LINK.seconds_per_byte)
    cases = list(product(_BLOCKS, (4096, 16384)))
    layers = {case: _block(*_BLOCKS[case[0]], case[1]) for case in cases}
    prices = {case: fsmoe_schedules(layer, reduce) for case, layer in layers.items()}
    once = {case: fsmoe_schedules(_block(*_BLOCKS[case[0]], case[1], once=True), reduce) for case in cases}
    whole = "nothing, reduction beside dense"
    return Table.of(
        "Predicted: a block's part of a training step on 4 hosts of one GPU, 25 GbE",
        layers,
        [
            ("model", lambda case: case[0]),
            ("tokens of a GPU", lambda case: str(case[1])),
            ("exchange, ms", lambda case: f"{1e3 * layers[case].forward.dispatch.seconds(1):.1f}"),
            ("experts forward, ms", lambda case: f"{1e3 * layers[case].forward.experts.seconds(1):.1f}"),
            ("one all-to-all, reduction beside dense, ms", lambda case: f"{1e3 * prices[case][whole]:.0f}"),
            ("in chunks, ms", lambda case: f"{1e3 * prices[case]['ours']:.0f}"),
            ("gain", lambda case: f"{prices[case][whole] / prices[case]['ours']:.2f}x"),
            ("2 chunks", lambda c: f"{prices[c][whole] / prices[c]['always 2 chunks, gradients in slots']:.2f}x"),
            ("a row once per GPU", lambda case: f"{prices[case][whole] / once[case][whole]:.2f}x"),
            ("that, in chunks", lambda case: f"{prices[case][whole] / once[case]['ours']:.2f}x"),
        ],
        "A prediction; no such machine was measured. Assumed: 2.8 GB/s and 50 us a collective, 156 TFLOP/s of bf16"
        " products (half of an A100's data sheet), experts evenly loaded, attention's own dense gradients reduced in"
        " bf16. All blocks alike, so a step gains what a block gains, less what the optimizer and the head take.",
    )


def _block(
    width: int, expert_width: int, experts: int, top_k: int, shared: float, tokens: int, once: bool = False
) -> StackLayer:
    copies = 4 * hit_share(experts, top_k, 4) if once else top_k
    a2a = chunk_time(_LINK, 3 / 4 * tokens * copies * width * 2)
    products = chunk_time(_GEMM, tokens * top_k * 3 * width * expert_width, 3)
    forward = LayerTimes(a2a, products, a2a)
    projections = (2 + 2 * shared) * width**2
    attention = _GEMM.seconds(tokens * projections + tokens * 4096 * width)  # causal, sequences of 4096
    return StackLayer(forward, forward.backward(), (attention, 2 * attention), 2 * projections)


# --- planning ---


def _planning(options: Options, step: int) -> Table:
    layers = list(islice(fsmoe_layers(TESTBED_B), 0, None, 21 if step == 1 else 3 * step))[:66]
    one = layers[len(layers) // 2]

    def parts(alike: bool) -> list[BackwardPart]:
        return [
            part
            for number, layer in enumerate(layers)
            for part in (
                BackwardPart(f"mixture {number}", times=(one if alike else layer).backward),
                BackwardPart(f"dense {number}", layer.gradient_volume, dense_seconds=layer.dense_seconds[1]),
            )
        ]

    choices = _MODELS[1].choices(0, 1.0)
    costs = _costs([LevelCost(groups, 0.0, 1.0) for groups in (4, 8, 32)], 128)
    chosen, weights = _chosen(choices, 128), torch.ones(len(choices))
    cases = {
        "degree of one layer, 16 tried by simulation": lambda: best_degree(one.forward),
        f"reduction slots of {len(layers)} equal layers": partial(fill_slots, parts(True), TESTBED_B.reduce),
        f"reduction slots of {len(layers)} different layers": partial(fill_slots, parts(False), TESTBED_B.reduce),
        f"swap of {len(choices)} tokens, 128 experts, 3 levels": partial(best_swaps, chosen, weights, costs),
    }
    seconds = seconds_of(cases, options.rounds)
    papers = {"degree": "193 ms (SLSQP)", "reduction": "differential evolution, no time given"}
    return Table.of(
        "Time to plan, on this CPU",
        seconds,
        [
            ("", str),
            ("ms", lambda name: f"{1e3 * seconds[name]:.1f}"),
            ("the paper", lambda name: papers.get(name.split()[0], "")),
        ],
    )
