"""Measures what `laconic infer plan` needs: products, attention, links, and both ends of messages."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, combinations, cycle

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from laconic.collectives.cluster_profile import measure_link
from laconic.collectives.policy.microbench import Ranks
from laconic.cost.comm.rates import Line, fit_line
from laconic.cost.infer.rates import ExchangeCosts, InferenceRates, LinkPair
from laconic.cost.moe.shape import LayerShape
from laconic.infer.auto_plan import BESIDE_HOST
from laconic.infer.exchange_costs import copy_seconds, measure_attention_end, measure_experts_end

_ROWS, _QUICK_ROWS = (1, 4, 16, 64, 256), (1, 16, 64)
_LENGTHS, _QUICK_LENGTHS = (128, 256, 512, 1024), (32, 64)
_HEADS, _HEAD_DIM = 8, 64
_SIZES, _QUICK_SIZES = tuple(1 << power for power in (12, 14, 16, 18, 20, 22)), (1 << 12, 1 << 16)
_MESSAGE_ROWS, _QUICK_MESSAGE_ROWS = (1, 8, 32, 128, 512), (1, 64)
_WEIGHTS_NBYTES, _QUICK_WEIGHTS_NBYTES = 1 << 28, 1 << 22
"""Weights that take turns, so that caches hold none of them: each call reads its own from memory."""
_LONGEST_SECONDS = 0.2


def measure_infer(
    shape: LayerShape, *, dtype: torch.dtype, device: torch.device, quick: bool = False, beside_host: bool = False
) -> InferenceRates:
    """Measure rates on all ranks of the world at once; all call it together and get the same.

    On CUDA devices every measured interval ends when the device has: products and attention run there; messages travel
    as the engine's do, from and to host memory over the links between hosts, and copies to and from an expert worker's
    device are part of what a message takes there. Those of an attention worker, one each way a layer, are not measured.

    Args:
        shape: sizes of the products: model_dim x hidden_dim and back.
        beside_host: the world is two ranks over gloo, the first on a CUDA device and the second on the CPU. The device
            alone is measured, and messages between both.
    """
    assert dist.group.WORLD is not None
    ranks = Ranks(dist.group.WORLD, device, torch.device("cpu") if beside_host else None)
    kind = "cuda" if beside_host else device.type
    is_measured = device.type == kind
    products = _products(ranks, shape, dtype, quick, is_measured)
    gemm, read = fit_products(products, dtype.itemsize)
    attention = _attention(ranks, dtype, _QUICK_LENGTHS if quick else _LENGTHS, is_measured)
    sizes = _QUICK_SIZES if quick else _SIZES
    hosts = Ranks(ranks.group, torch.device("cpu"))
    send = measure_link(hosts, hosts.group, sizes, ("send",), _LONGEST_SECONDS).operations["send"]
    source = f"measure_infer, {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}, {ranks.world} ranks, {kind}, "
    source += str(dtype).removeprefix("torch.")
    if beside_host:
        source += f": products, attention and reading on the CUDA device, {BESIDE_HOST}"
    # On CPUs a product of groups is a loop over them.
    return InferenceRates(
        gemm,
        attention,
        LinkPair(send, send),
        read,
        grouped=kind == "cuda",
        exchange=_exchange(ranks, shape, dtype, _QUICK_MESSAGE_ROWS if quick else _MESSAGE_ROWS),
        source=ranks.texts(source)[0],
    )


def _exchange(ranks: Ranks, shape: LayerShape, dtype: torch.dtype, num_rows: Sequence[int]) -> ExchangeCosts:
    """Lines of both ends, between the first two ranks; the others wait."""
    rank = ranks.group.rank()
    store = dist.PrefixStore("laconic exchange costs", distributed_c10d._get_default_store())  # type: ignore[attr-defined]
    timeout = store.timeout  # type: ignore[attr-defined]
    mine: list[tuple[int, float]] = []
    if rank < 2:
        measure = measure_experts_end if rank else measure_attention_end
        mine = measure(store, num_rows, shape.model_dim, dtype)
    if rank == 1:
        copies = copy_seconds(num_rows, shape.model_dim, dtype, ranks.device)
        mine = [(size, seconds + copied) for (size, seconds), copied in zip(mine, copies, strict=True)]
    store.set_timeout(timeout)  # which connecting has set
    sizes = [rows * shape.model_dim * dtype.itemsize for rows in num_rows]
    values = [round(seconds * 1e9) for _, seconds in mine] or [0] * len(sizes)
    ends = ranks.exchange(values)[:2]
    return ExchangeCosts(*(fit_line(zip(sizes, (v * 1e-9 for v in end), strict=True)) for end in ends))


def fit_products(points: Sequence[tuple[int, int, float]], item_nbytes: int) -> tuple[Line, float]:
    """Fit seconds = alpha + beta * rows * weights + gamma * bytes of the weights, by least squared relative errors.

    Args:
        points: rows, values of the weights and seconds of every product; at least three.

    Returns:
        The line by multiply-adds, with its worst relative error, and gamma, in seconds per byte. None is negative.
    """
    columns = [[1.0, float(rows * weights), float(weights * item_nbytes)] for rows, weights, _ in points]
    seconds = torch.tensor([taken for _, _, taken in points], dtype=torch.float64, device="cpu")
    matrix = torch.tensor(columns, dtype=torch.float64, device="cpu") / seconds[:, None]
    scale = matrix.norm(dim=0)
    best, least = torch.zeros(3, dtype=torch.float64, device="cpu"), float("inf")
    # With three unknowns, the constrained optimum is the free one of some subset of them, the others being 0.
    for kept in chain.from_iterable(combinations(range(3), count) for count in (1, 2, 3)):
        chosen = list(kept)
        solution = torch.linalg.lstsq(
            (matrix / scale)[:, chosen], torch.ones(len(points), 1, dtype=torch.float64, device="cpu")
        ).solution
        tried = torch.zeros(3, dtype=torch.float64, device="cpu")
        tried[chosen] = solution[:, 0] / scale[chosen]
        residual = float((matrix @ tried - 1).norm())
        if bool((tried >= 0).all()) and residual < least:
            best, least = tried, residual
    alpha, beta, gamma = best.tolist()
    return Line(alpha, beta, float((matrix @ best - 1).abs().max())), gamma


def _products(
    ranks: Ranks, shape: LayerShape, dtype: torch.dtype, quick: bool, is_measured: bool
) -> list[tuple[int, int, float]]:
    """Rows, weights and seconds of products of the layer's size and of a quarter of it."""
    found = []
    for k, n in ((shape.model_dim, shape.hidden_dim), (shape.hidden_dim, max(1, shape.model_dim // 4))):
        wanted = _QUICK_WEIGHTS_NBYTES if quick else _WEIGHTS_NBYTES
        count = max(2, wanted // (k * n * dtype.itemsize)) if is_measured else 0
        weights = [torch.full((n, k), 0.01, dtype=dtype, device=ranks.device) for _ in range(count)]
        for rows in _QUICK_ROWS if quick else _ROWS:
            x = torch.ones(rows, k, dtype=dtype, device=ranks.device)
            case = partial(_product, x, cycle(weights)) if is_measured else None
            found.append((rows, k * n, ranks.seconds_alone(case)))
    return found


def _product(x: Tensor, weights: Iterator[Tensor]) -> Tensor:
    return torch.nn.functional.linear(x, next(weights))


def _attention(ranks: Ranks, dtype: torch.dtype, lengths: Sequence[int], is_measured: bool) -> Line:
    """Line of causal attention, by heads * pairs * (d_k + d_v) without masked pairs."""
    points = []
    for length in lengths:
        q = torch.ones(1, _HEADS, length, _HEAD_DIM, dtype=dtype, device=ranks.device)
        case = partial(torch.nn.functional.scaled_dot_product_attention, q, q, q, is_causal=True)
        seconds = ranks.seconds_alone(case if is_measured else None)
        points.append((_HEADS * length * length / 2 * 2 * _HEAD_DIM, seconds))
    return fit_line(points)
