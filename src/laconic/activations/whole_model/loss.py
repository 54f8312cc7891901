"""Linear layer and cross entropy in one, without the logits of all tokens.

[tokens, vocabulary] numbers are the largest tensors of a training step: at its peak a Llama-3-8B holds them once in
bf16 and twice in fp32, 156 times what one layer's input takes, and keeps 63 times of it for backward. Here logits exist
one tile at a time, and either pass turns them into gradients:

- Forward, which has them anyway (`_with_gradients`): a tile is some tokens by all of the vocabulary, its logits become
  their own gradient in place, and backward multiplies what has been added up by one number. Three matrix products, as
  the plain loss has. The gradient of the weight, the first thing that backward would make, exists a moment earlier.
- Backward (`_gradients`), where forward cannot: a tile is some tokens by some of the vocabulary, forward keeps one
  number per token (the log-sum-exp) beside the hidden states, and backward makes each tile again. Four products.

Which one it is `_Tiles.rows` says, see `tiled_loss`.

Per token, with z the logits, y the label, V the vocabulary and s the label smoothing:

    loss = lse(z) - (1 - s) z_y - s / V sum(z) + z_loss lse(z)^2
    d loss / d z = (1 + 2 z_loss lse) exp(z - lse) - (1 - s) [j = y] - s / V

The hidden states may be kept packed. Then the log-sum-exp is computed again from the values that backward sees, which
takes a fifth matrix product: with the saved one the probabilities of a token would not add up to one (the failure that
docs/activations.md describes for attention).

Gradients in forward as in Hsu et al., "Liger Kernel", 2024; log-sum-exp over pieces as in Milakov and Gimelshein,
"Online normalizer calculation for softmax", 2018.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from torch.overrides import handle_torch_function, has_torch_function

from laconic.activations.backward.derivatives import derivative, is_transformed, refuse_more
from laconic.activations.host.streams import record_reader
from laconic.activations.keep.kept import in_range
from laconic.activations.keep.rounding import quantized
from laconic.errors import DataError, ModelError
from laconic.formats import BlockFormat, BlockTensor
from laconic.ops.derivatives import connected, edge_of, gradients

TILES = {"cpu": (1 << 10, 1 << 20), "cuda": (1 << 12, 1 << 24)}
"""By device type, the tokens of a tile unless the caller says otherwise, and the most logits that a tile holds.

4 MiB in fp32 stay in a core's cache. A GPU wants larger products, and fewer passes over what they are added to.
"""

ROWS = {"cpu": 1 << 10, "cuda": 0}
"""By device type, the bytes that a tile has for each entry of the vocabulary where forward makes the gradients.

256 tokens in fp32. Each tile is added to the whole gradient of the weight, and with few tokens that takes longer than
the product that is saved; on a GPU it would for tiles that fit beside a model, by its rates, which nobody has measured.
"""

BLOCK = 1 << 18
"""The logits that what follows a product works on at once, so that all of it finds them in a core's cache."""


@dataclass(frozen=True)
class LossSpec:
    """What is computed from the logits scale * (hidden @ weight.T + bias); see `linear_cross_entropy`."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    scale: float = 1.0


@torch.compiler.disable(reason="laconic: a loop over tiles is no graph worth compiling")
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    chunk_tokens: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
    num_items: int | float | Tensor | None = None,
    format: BlockFormat | None = None,
) -> Tensor:
    """`F.cross_entropy(F.linear(hidden, weight, bias).float(), labels)` that never holds all logits.

    On the CPU, with a sum or a mean, forward makes the gradients: it has the logits of 256 tokens at once (512 in 16
    bits; a million of a small vocabulary), and the gradients of hidden and weight exist from then on. Elsewhere (other
    devices, fp16, reduction="none", `format`, several such tiles for a large 16-bit weight that is trained) backward
    makes them, and no tensor has more logits than a tile of `TILES` (a million on the CPU), for one more matrix
    product.

    Products are made in the dtype of `hidden` (under autocast in autocast's) and everything behind them in fp32 (fp64
    for fp64), so the value differs from the plain one by the order of summation only; docs/activations.md has the
    bound. Gradients of the weight are added up in fp32 over the chunks and rounded once.

    Args:
        hidden: [..., hidden_size], floating point.
        weight: [vocabulary, hidden_size], of the same dtype unless autocast is on.
        labels: [...] integers in [0, vocabulary), or ignore_index for tokens that do not count.
        bias: [vocabulary].
        chunk_tokens: tokens of a tile; None takes the usual.
        ignore_index: the label of tokens that do not count.
        label_smoothing: share of the target that is spread evenly over the vocabulary, in [0, 1].
        z_loss: adds this times the square of the log-sum-exp of each token that counts (PaLM uses 1e-4).
        logit_softcap: logits become cap * tanh(logits / cap) (Gemma 2).
        logit_scale: multiplies the logits, before the cap (Cohere, Granite).
        reduction: "mean" over the tokens that count, "sum", or "none" for [...] with 0 at the others.
        num_items: with "mean", what the sum is divided by instead, such as the tokens of all micro-batches.
        format: how the hidden states are kept for backward; None keeps them as they are.

    Returns:
        fp32 (fp64 for fp64): a 0-d tensor, or [...] without reduction. If no token counts, the mean is NaN and all
        gradients are zero, as torch has it.

    Raises:
        DataError: a label is out of range (on CUDA the device reports it, as in torch), or labels do not fit hidden.
        ModelError: weight, bias or an option is not valid.
    """
    spec = LossSpec(ignore_index, label_smoothing, z_loss, logit_softcap, logit_scale)
    _check(hidden, weight, bias, labels, spec, chunk_tokens, reduction, num_items)
    if is_transformed(needs_hooks=False):
        raise ModelError(
            "linear_cross_entropy runs under a torch.func transform, forward-mode AD, torch.jit.trace or somebody's "
            "function mode, where its chunks have no derivative; call torch.nn.functional.cross_entropy on the logits"
        )
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).to(hidden.device, torch.int64)
    check_range(targets, weight.shape[0], ignore_index)
    divisor = None
    if reduction != "none":
        divisor = 1 if reduction == "sum" else divisor_of(targets, ignore_index, num_items)
    loss, _ = tiled_loss(rows, weight, bias, targets, spec, divisor, chunk_tokens, format)
    return loss.view(labels.shape) if reduction == "none" else loss


def divisor_of(labels: Tensor, ignore_index: int, num_items: int | float | Tensor | None) -> int | float | Tensor:
    """What the sum of the losses is divided by: `num_items`, or the number of tokens that count."""
    if num_items is None:
        return (labels != ignore_index).sum()
    # A copy: backward reads it, and hosts count on in theirs.
    return num_items.to(labels.device, copy=True) if isinstance(num_items, Tensor) else num_items


def tiled_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    spec: LossSpec,
    divisor: int | float | Tensor | None = None,
    chunk_tokens: int | None = None,
    format: BlockFormat | None = None,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, Tensor]:
    """The sum of the losses over a divisor, and no logits: checked arguments of `linear_cross_entropy`, flat.

    hidden [tokens, hidden_size], labels int64 [tokens] -> 0-d fp32 (without a divisor the losses, [tokens]), and
    an empty tensor [0, vocabulary] of the dtype of the logits, which stands for them in the graph: whoever watches a
    module's output for its gradient (as FSDP2 does) can watch this one. With a `shard`, weight and bias are its rows,
    all ranks of its group have the same hidden states and labels and get the same losses, and the gradient of hidden is
    this rank's part of a sum.

    Forward makes the gradients if each token's loss has the same one, no rank waits for another's part of the
    log-sum-exp, a factor that only backward knows (that of a GradScaler) is not needed to keep them from underflow, and
    no sum in fp32 stands beside the gradient of a 16-bit weight.
    """
    if has_torch_function((hidden, weight)):  # an override of torch's functions gets this one as a whole
        overridden: tuple[Tensor, Tensor] = handle_torch_function(
            tiled_loss, (hidden, weight), hidden, weight, bias, labels, spec, divisor, chunk_tokens, format, shard
        )
        return overridden
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    if hidden.dtype == torch.float64:
        dtype = hidden.dtype  # autocast leaves double precision alone
    hidden = hidden.to(dtype)  # what the product reads is what is kept
    kind, has_graph = "cpu" if device == "cpu" else "cuda", torch.is_grad_enabled()
    usual, numel = TILES[kind]
    num_tokens, num_entries = hidden.shape[0], weight.shape[0]
    chunk = max(1, min(chunk_tokens or usual, num_tokens, numel))
    rows = 0
    if has_graph and divisor is not None and format is None and shard is None and dtype != torch.float16 and ROWS[kind]:
        rows = max(1, min(chunk_tokens or max(ROWS[kind] // dtype.itemsize, numel // num_entries), num_tokens))
        if rows < num_tokens and weight.requires_grad and weight.element_size() < 4 and weight.numel() > numel:
            rows = 0  # tiles are added up in fp32, which is twice the gradient and would be held until backward
    tiles = _Tiles(num_tokens, num_entries, chunk, max(1, min(numel // chunk, num_entries)), rows, dtype)
    result: tuple[Tensor, Tensor] = _TiledLoss.apply(
        hidden, weight, bias, labels, spec, divisor, tiles, format if has_graph else None, shard
    )
    return result


@dataclass(frozen=True)
class VocabularyShard:
    """The rows of a vocabulary-parallel output projection that this rank holds.

    Attributes:
        start: number of the first row.
        num_entries: of the whole vocabulary.
        group: whose ranks hold the other rows.
    """

    start: int
    num_entries: int
    group: dist.ProcessGroup

    def whole(self, statistics: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """`_statistics` over the whole vocabulary from those over the rows of each rank."""
        lse, target, total = statistics
        largest = lse.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, self.group)
        sums = torch.stack(((lse - largest).exp_(), target, total))
        dist.all_reduce(sums, dist.ReduceOp.SUM, self.group)
        return sums[0].log_().add_(largest), sums[1], sums[2]


@dataclass(frozen=True)
class _Tiles:
    """How [num_tokens, num_entries] logits are cut, and the dtype of the products.

    `rows` are the tokens of a tile whose gradients forward makes; 0 if backward makes them.
    """

    num_tokens: int
    num_entries: int
    chunk_tokens: int
    chunk_entries: int
    rows: int
    dtype: torch.dtype

    @property
    def wide(self) -> torch.dtype:
        """The dtype of everything that is added up."""
        return torch.promote_types(self.dtype, torch.float32)

    def tokens(self) -> Iterator[slice]:
        """Chunks of tokens."""
        return _cut(self.num_tokens, self.chunk_tokens)

    def entries(self) -> Iterator[slice]:
        """Chunks of the vocabulary."""
        return _cut(self.num_entries, self.chunk_entries)


def _cut(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, entries: slice, spec: LossSpec, tiles: _Tiles
) -> Tensor:
    """A tile of logits, in fp32, freshly made: [tokens of hidden, entries]."""
    part = None if bias is None else bias[entries].to(tiles.dtype)
    return _shaped(linear(hidden, weight[entries].to(tiles.dtype), part).to(tiles.wide), spec)


def _shaped(logits: Tensor, spec: LossSpec) -> Tensor:
    """Logits from products, in place."""
    if spec.scale != 1.0:
        logits.mul_(spec.scale)
    if spec.softcap is not None:
        logits.div_(spec.softcap).tanh_().mul_(spec.softcap)
    return logits


def _place(labels: Tensor, entries: slice) -> tuple[Tensor, Tensor]:
    """Whether each label lies among the entries, and its column there (some column if it does not): [tokens, 1]."""
    column = (labels - entries.start).unsqueeze(1)
    inside = (column >= 0) & (column < entries.stop - entries.start)
    return inside, torch.where(inside, column, 0)


def _statistics(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, spec: LossSpec, tiles: _Tiles
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-sum-exp, logit of the label, and sum of the logits of each token, [tokens] in fp32."""
    shape = (tiles.num_tokens,)
    lse = hidden.new_full(shape, -torch.inf, dtype=tiles.wide)
    target, total = (hidden.new_zeros(shape, dtype=tiles.wide) for _ in range(2))
    for tokens in tiles.tokens():
        for entries in tiles.entries():
            logits = _logits(hidden[tokens].to(tiles.dtype), weight, bias, entries, spec, tiles)
            inside, column = _place(labels[tokens], entries)
            target[tokens] += torch.where(inside, logits.gather(1, column), 0.0).squeeze(1)
            if spec.label_smoothing > 0:
                total[tokens] += logits.sum(1)
            largest = logits.amax(1, keepdim=True)
            largest.masked_fill_(largest == -torch.inf, 0.0)  # of a tile of entries that a bias rules out
            here = logits.sub_(largest).exp_().sum(1).log_().add_(largest.squeeze(1))
            lse[tokens] = torch.logaddexp(lse[tokens], here)
    return lse, target, total


def _whole_losses(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    spec: LossSpec,
    divisor: int | float | Tensor | None,
    tiles: _Tiles,
) -> Tensor:
    """The result of `tiled_loss` from all logits at once, which torch differentiates as often as asked."""
    logits = linear(hidden, weight.to(tiles.dtype), None if bias is None else bias.to(tiles.dtype)).to(tiles.wide)
    logits = logits * spec.scale
    if spec.softcap is not None:
        logits = torch.tanh(logits / spec.softcap) * spec.softcap
    counts = labels != spec.ignore_index
    lse = logits.logsumexp(1)
    target = logits.gather(1, torch.where(counts, labels, 0).unsqueeze(1)).squeeze(1)
    losses = lse - (1 - spec.label_smoothing) * target - spec.label_smoothing * logits.mean(1)
    losses = torch.where(counts, losses + spec.z_loss * lse.square(), 0.0)
    return losses if divisor is None else losses.sum() / divisor


def _losses(lse: Tensor, target: Tensor, total: Tensor | float, spec: LossSpec, num_entries: int) -> Tensor:
    """The losses of tokens from `_statistics`; `num_entries` is the size of the whole vocabulary."""
    losses = lse - (1 - spec.label_smoothing) * target
    if spec.label_smoothing > 0:
        losses -= spec.label_smoothing / num_entries * total
    return losses + spec.z_loss * lse.square() if spec.z_loss > 0 else losses


class _TiledLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        spec: LossSpec,
        divisor: int | float | Tensor | None,
        tiles: _Tiles,
        format: BlockFormat | None,
        shard: VocabularyShard | None,
    ) -> tuple[Tensor, Tensor]:
        start, num_entries = (0, tiles.num_entries) if shard is None else (shard.start, shard.num_entries)
        needs, lse = ctx.needs_input_grad[:3], None
        ctx.made = None
        with torch.autocast(hidden.device.type, enabled=False):
            if tiles.rows and any(needs):
                assert divisor is not None
                losses, lse, made = _with_gradients(hidden, weight, bias, labels, spec, divisor, tiles, needs)
                dtypes = (tiles.dtype, weight.dtype, None if bias is None else bias.dtype)
                ctx.made = tuple(zip(made, dtypes, strict=True))  # beyond hooks of saved tensors: none may round them
            else:
                statistics = _statistics(hidden, weight, bias, labels - start, spec, tiles)
                lse, target, total = statistics if shard is None else shard.whole(statistics)
                losses = _losses(lse, target, total, spec, num_entries)
        ctx.spec, ctx.divisor, ctx.tiles, ctx.format, ctx.shard = spec, divisor, tiles, format, shard
        if format is None:
            ctx.save_for_backward(edge_of(hidden), weight, bias, labels, lse, hidden)
        else:
            record_reader(hidden)
            packed = quantized(hidden, format)
            ctx.save_for_backward(edge_of(hidden), weight, bias, labels, None, packed.codes, packed.scales)
        logits = hidden.new_empty((0, tiles.num_entries), dtype=tiles.dtype)
        losses = losses.masked_fill_(labels == spec.ignore_index, 0.0)
        return losses if divisor is None else losses.sum() / divisor, logits

    @staticmethod
    @derivative
    def backward(ctx: Any, grad: Tensor, of_logits: Tensor) -> tuple[Tensor | None, ...]:
        made, tiles, shard = ctx.made, ctx.tiles, ctx.shard
        if made is not None and not torch.is_grad_enabled():
            ctx.made = None  # they are the caller's from here on; a second backward makes its own
            return *(None if x is None else x.mul_(grad).to(dtype) for x, dtype in made), *[None] * 6
        edge, weight, bias, labels, lse, *saved = ctx.saved_tensors
        hidden = saved[0]
        if ctx.format is not None:
            shape = torch.Size((tiles.num_tokens, weight.shape[1]))
            hidden = in_range(BlockTensor(saved[0], saved[1], ctx.format, shape, tiles.dtype).dequantize())
        if torch.is_grad_enabled():
            if shard is not None:
                with torch.no_grad():
                    results = _TiledLoss.backward(ctx, grad, of_logits)
                return refuse_more(ctx, (grad,), results)
            formula = partial(_whole_losses, labels=labels, spec=ctx.spec, divisor=ctx.divisor, tiles=tiles)
            inputs = (connected(hidden, edge), weight, bias)
            return *gradients(formula, inputs, grad, ctx.needs_input_grad[:3]), *[None] * 6
        if ctx.divisor is not None:
            grad = (grad / ctx.divisor).expand(labels.shape)
        grad = torch.where(labels == ctx.spec.ignore_index, 0.0, grad)
        if shard is not None:
            labels = labels - shard.start
        with torch.autocast(hidden.device.type, enabled=False):
            if lse is None:
                statistics = _statistics(hidden, weight, bias, labels, ctx.spec, tiles)
                lse, _, _ = statistics if shard is None else shard.whole(statistics)
            dhidden, dweight, dbias = _gradients(
                grad, hidden, weight, bias, labels, lse, ctx.spec, tiles, ctx.needs_input_grad[:3], shard
            )
        return (
            None if dhidden is None else dhidden.to(tiles.dtype),
            dweight,
            dbias,
            *[None] * 6,
        )


def _with_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    spec: LossSpec,
    divisor: int | float | Tensor,
    tiles: _Tiles,
    needs: tuple[bool, ...],
) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
    """Losses and log-sum-exps [tokens], and the gradients of the sum of the losses that count over the divisor.

    Those of weight and bias are in the dtype of the products if there is one tile, as a plain product's are; of several
    tiles they are added up in fp32.
    """
    num_tokens, num_entries = tiles.num_tokens, tiles.num_entries
    weight = weight.to(tiles.dtype)
    summed = tiles.dtype if num_tokens <= tiles.rows else tiles.wide
    share = (labels != spec.ignore_index).to(tiles.wide)
    share = torch.where(share > 0, share / divisor, 0.0)
    losses, lse = (hidden.new_empty(num_tokens, dtype=tiles.wide) for _ in range(2))
    dhidden = hidden.new_empty(hidden.shape) if needs[0] else None
    dweight = torch.zeros(weight.shape, dtype=summed, device=weight.device) if needs[1] else None
    dbias = torch.zeros(num_entries, dtype=tiles.wide, device=weight.device) if needs[2] else None
    tile = hidden.new_empty((tiles.rows, num_entries))
    for tokens in _cut(num_tokens, tiles.rows):
        part = hidden[tokens]
        dlogits = tile[: len(part)]
        if bias is None:
            torch.mm(part, weight.t(), out=dlogits)
        else:
            torch.addmm(bias.to(tiles.dtype), part, weight.t(), out=dlogits)
        for block in _cut(len(part), max(1, BLOCK // num_entries)):
            rows = slice(tokens.start + block.start, tokens.start + block.stop)
            logits = _shaped(dlogits[block].to(tiles.wide), spec)
            losses[rows], lse[rows] = _turn(logits, share[rows], labels[rows], spec)
            if dbias is not None:
                dbias += logits.sum(0)
            if tiles.wide != tiles.dtype:
                dlogits[block] = logits
        if dhidden is not None:
            torch.mm(dlogits, weight, out=dhidden[tokens])
        if dweight is not None and summed == tiles.dtype:
            dweight.addmm_(dlogits.t(), part)
        elif dweight is not None:
            for entries in tiles.entries():
                dweight[entries] += dlogits[:, entries].t() @ part
    return losses, lse, (dhidden, dweight, dbias)


def _turn(logits: Tensor, share: Tensor, labels: Tensor, spec: LossSpec) -> tuple[Tensor, Tensor]:
    """Losses and log-sum-exps of whole rows of logits, which become `share` [rows] times the gradient of products."""
    whole = slice(0, logits.shape[1])
    target = logits.gather(1, _place(labels, whole)[1]).squeeze(1)
    total = logits.sum(1) if spec.label_smoothing > 0 else 0.0
    slope = _slope(logits, spec)
    largest = logits.amax(1, keepdim=True)
    sums = logits.sub_(largest).exp_().sum(1)
    lse = sums.log().add_(largest.squeeze(1))
    _gradient_of_logits(logits, share, lse, labels, whole, spec, whole.stop, slope, sums)
    return _losses(lse, target, total, spec, whole.stop), lse


def _gradients(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    lse: Tensor,
    spec: LossSpec,
    tiles: _Tiles,
    needs: tuple[bool, ...],
    shard: VocabularyShard | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden (fp32), weight and bias (in their dtypes), from that of each token's loss [tokens].

    The vocabulary is the outer loop, so the rows of the weight's gradient are finished one chunk after the other and no
    copy of it in fp32 is needed.
    """
    dhidden = torch.zeros(hidden.shape, dtype=tiles.wide, device=hidden.device) if needs[0] else None
    dweight = torch.empty_like(weight) if needs[1] else None
    dbias = torch.empty_like(bias) if bias is not None and needs[2] else None
    num_entries = tiles.num_entries if shard is None else shard.num_entries
    for entries in tiles.entries():
        size = entries.stop - entries.start
        rows = torch.zeros((size, hidden.shape[1]), dtype=tiles.wide, device=hidden.device) if needs[1] else None
        sums = torch.zeros(size, dtype=tiles.wide, device=hidden.device) if dbias is not None else None
        for tokens in tiles.tokens():
            part = hidden[tokens].to(tiles.dtype)
            logits = _logits(part, weight, bias, entries, spec, tiles)
            slope = _slope(logits, spec)
            dlogits = _gradient_of_logits(
                logits.sub_(lse[tokens].unsqueeze(1)).exp_(),
                grad[tokens],
                lse[tokens],
                labels[tokens],
                entries,
                spec,
                num_entries,
                slope,
            )
            if sums is not None:
                sums += dlogits.sum(0)
            dlogits = dlogits.to(tiles.dtype)
            if dhidden is not None:
                _add_product(dhidden[tokens], dlogits, weight[entries].to(tiles.dtype))
            if rows is not None:
                _add_product(rows, dlogits.t(), part)
        if dweight is not None and rows is not None:
            dweight[entries] = rows
        if dbias is not None and sums is not None:
            dbias[entries] = sums
    return dhidden, dweight, dbias


def _slope(logits: Tensor, spec: LossSpec) -> Tensor | None:
    """The derivative of the cap at capped logits, None if there is no cap."""
    return None if spec.softcap is None else (logits / spec.softcap).square_().neg_().add_(1.0)


def _gradient_of_logits(
    exponentials: Tensor,
    grad: Tensor,
    lse: Tensor,
    labels: Tensor,
    entries: slice,
    spec: LossSpec,
    num_entries: int,
    slope: Tensor | None,
    sums: Tensor | float = 1.0,
) -> Tensor:
    """The gradient of a tile's products, before scale and cap; overwrites the exponentials [tokens, entries].

    These over `sums` [tokens] are the probabilities. `num_entries` is the size of the whole vocabulary.
    """
    dlogits = exponentials.mul_((grad * (1 + 2 * spec.z_loss * lse) / sums).unsqueeze(1))
    inside, column = _place(labels, entries)
    of_label = torch.where(inside, -(1 - spec.label_smoothing) * grad.unsqueeze(1), 0.0)
    dlogits.scatter_add_(1, column, of_label)
    if spec.label_smoothing > 0:
        dlogits.sub_((grad * (spec.label_smoothing / num_entries)).unsqueeze(1))
    if slope is not None:
        dlogits.mul_(slope)
    return dlogits.mul_(spec.scale) if spec.scale != 1.0 else dlogits


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, where total may be wider than a and b."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


def _check(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    spec: LossSpec,
    chunk_tokens: int | None,
    reduction: str,
    num_items: object,
) -> None:
    if any(isinstance(tensor, DTensor) for tensor in (hidden, weight, bias)):
        raise ModelError(
            "hidden, weight or bias is a DTensor, but they must be whole; call this inside of the module whose "
            "FSDP2 hooks gather the weight, or pass weight.full_tensor()"
        )
    if weight.dim() != 2 or hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1]:
        raise ModelError(
            f"hidden has shape {tuple(hidden.shape)} and weight {tuple(weight.shape)}, but they must be "
            f"[..., hidden_size] and [vocabulary, hidden_size]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ModelError(f"bias has shape {tuple(bias.shape)}, but it must be [{weight.shape[0]}] as weight has rows")
    if not hidden.is_floating_point() or not weight.is_floating_point():
        raise ModelError(f"hidden is {hidden.dtype} and weight {weight.dtype}, but both must be floating point")
    if hidden.dtype != weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
        raise ModelError(
            f"hidden is {hidden.dtype} and weight {weight.dtype}, but outside of autocast they must be alike; "
            f"convert one of them"
        )
    if labels.shape != hidden.shape[:-1]:
        raise DataError(
            f"labels have shape {tuple(labels.shape)}, but hidden {tuple(hidden.shape)} needs "
            f"{tuple(hidden.shape[:-1])}"
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise DataError(f"labels are {labels.dtype}, but they must be integers")
    if not 0.0 <= spec.label_smoothing <= 1.0:
        raise ModelError(f"label_smoothing is {spec.label_smoothing}, but it must be in [0, 1]")
    if not spec.z_loss >= 0.0:
        raise ModelError(f"z_loss is {spec.z_loss}, but it must be at least 0")
    if spec.softcap is not None and not spec.softcap > 0.0:
        raise ModelError(f"logit_softcap is {spec.softcap}, but it must be above 0, or None for no cap")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ModelError(f"chunk_tokens is {chunk_tokens}, but it must be at least 1, or None for the usual")
    if reduction not in ("mean", "sum", "none"):
        raise ModelError(f"reduction is {reduction!r}, but it must be 'mean', 'sum' or 'none'")
    if num_items is not None and reduction != "mean":
        raise ModelError(f"num_items divides the sum of a mean, but reduction is {reduction!r}; leave one of them out")
    if isinstance(num_items, Tensor) and num_items.requires_grad:
        raise ModelError("num_items requires a gradient, which the loss has none for; pass num_items.detach()")


def check_range(labels: Tensor, num_entries: int, ignore_index: int) -> None:
    """Check that labels lie in the vocabulary; on CUDA the device checks, so that the host does not wait.

    Raises:
        DataError: a label is out of range.
    """
    fits = ((labels >= 0) & (labels < num_entries)) | (labels == ignore_index)
    rule = f"but it must be in [0, {num_entries}), the vocabulary, or {ignore_index} (ignore_index)"
    if labels.is_cuda:
        torch._assert_async(fits.all(), f"a label is out of range, {rule}")
    elif not labels.is_meta and not isinstance(labels, FakeTensor) and not bool(fits.all()):
        raise DataError(f"a label is {int(labels[~fits][0])}, {rule}")
