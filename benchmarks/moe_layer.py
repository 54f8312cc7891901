"""The mixture-of-experts layer in one process beside Hugging Face's blocks, and the ways to multiply group by group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.kit.timing import seconds_of
from benchmarks.registry import Options, Table, benchmark
from laconic.moe import GatedExperts, MoELayer, SoftmaxGate, grouped_mm, parallelize

_HUGGING_FACE = ("eager", "batched_mm", "grouped_mm")
_OURS = ("laconic", "parallelized")


@dataclass(frozen=True)
class Shape:
    """One layer: `family` names the Hugging Face block that computes the same."""

    family: str
    num_tokens: int
    model_dim: int
    hidden_dim: int
    num_experts: int
    top_k: int

    def __str__(self) -> str:
        sizes = f"{self.model_dim} x {self.hidden_dim}, top {self.top_k} of {self.num_experts}"
        return f"{self.family}, {self.num_tokens} tokens, {sizes}"


_SHAPES = (
    Shape("Mixtral", 512, 256, 896, 8, 2),
    Shape("Mixtral", 2048, 512, 1792, 8, 2),
    Shape("Qwen3-MoE", 64, 512, 192, 64, 8),
    Shape("Qwen3-MoE", 512, 256, 96, 64, 8),
    Shape("Qwen3-MoE", 2048, 512, 192, 64, 8),
)
_SMOKE_SHAPES = (Shape("Mixtral", 16, 32, 64, 4, 2), Shape("Qwen3-MoE", 16, 32, 16, 8, 4))


@benchmark("moe-layer")
def moe_layer(options: Options) -> list[Table]:
    """Forward, and forward with backward, in fp32 and bf16."""
    shapes = _SMOKE_SHAPES if options.small else _SHAPES
    dtypes = (torch.float32, torch.bfloat16)
    return [*(_layers(shapes, dtype, options) for dtype in dtypes), *(_products(shapes, t, options) for t in dtypes)]


def _layers(shapes: tuple[Shape, ...], dtype: torch.dtype, options: Options) -> Table:
    rows = []
    for shape in shapes:
        blocks = _blocks(shape, dtype)
        x = torch.randn(1, shape.num_tokens, shape.model_dim, dtype=dtype)
        if dtype == torch.float32:  # in bf16 their routers round logits, ours does not: a few tokens go elsewhere
            truth = blocks["eager"](x)
            for block in blocks.values():
                torch.testing.assert_close(block(x), truth, rtol=1e-4, atol=1e-5)
        forward = seconds_of({name: _forward(block, x) for name, block in blocks.items()}, options.rounds)
        both = seconds_of({name: _both(block, x) for name, block in blocks.items()}, options.rounds)
        for seconds, what in ((forward, "forward"), (both, "forward and backward")):
            best = min(seconds[name] for name in _HUGGING_FACE if name in seconds)
            cells = [f"{1e3 * seconds[name]:.1f}" if name in seconds else "-" for name in (*_HUGGING_FACE, *_OURS)]
            factors = [f"{best / seconds[name]:.2f}x" for name in _OURS]
            rows.append([str(shape), what, *cells, f"{seconds['eager'] / seconds['laconic']:.2f}x", *factors])
    return Table(
        f"Layer, {_name(dtype)}, milliseconds",
        (
            "layer",
            "",
            *(f"Hugging Face {name}" for name in _HUGGING_FACE),
            "laconic",
            "their block, parallelized",
            "laconic to eager",
            "laconic to the best of them",
            "parallelized to the best",
        ),
        rows,
        "One process, random tokens, the same weights; in fp32 equal outputs are checked before timing. Sizes are "
        "model x hidden width of gated experts. Parallelized: what laconic.moe.parallelize makes of their block, "
        "without a mesh. batched_mm copies an expert's weights for each row and is left out over 1 GiB.",
    )


def _products(shapes: tuple[Shape, ...], dtype: torch.dtype, options: Options) -> Table:
    """The first product of each layer, by each way."""
    rows = []
    for shape in shapes:
        num_rows = shape.num_tokens * shape.top_k
        even = torch.full((shape.num_experts,), num_rows // shape.num_experts)
        skewed = _zipf(num_rows, shape.num_experts)
        for routing, counts in (("even", even), ("Zipf", skewed)):
            x = torch.randn(int(counts.sum()), shape.model_dim, dtype=dtype)
            weights = torch.randn(shape.num_experts, shape.model_dim, 2 * shape.hidden_dim, dtype=dtype)
            ways: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
                "grouped": lambda x, w, counts: grouped_mm(x, w, counts, way="grouped"),
                "loop": lambda x, w, counts: grouped_mm(x, w, counts, way="loop"),
                "padded bmm": _padded_bmm,
            }
            seconds = seconds_of(
                {name: _product(way, x, weights, counts) for name, way in ways.items()}, options.rounds
            )
            cells = [f"{1e3 * seconds[name]:.1f}" for name in ways]
            rows.append([f"{shape}, {routing}", *cells, min(seconds, key=seconds.__getitem__)])
    return Table(
        f"One grouped product forward and backward, {_name(dtype)}, milliseconds",
        ("rows of", "torch._grouped_mm", "loop of mm", "padded bmm", "fastest"),
        rows,
        "Zipf: the share of an expert falls as 1 / rank.",
    )


def _blocks(shape: Shape, dtype: torch.dtype) -> dict[str, nn.Module]:
    """Hugging Face's block under each way to run its experts, our layer, and theirs parallelized: the same weights."""
    torch.manual_seed(0)
    blocks: dict[str, nn.Module] = {}
    first: dict[str, Any] = {}
    copied_nbytes = 3 * 4 * shape.num_tokens * shape.top_k * shape.model_dim * shape.hidden_dim
    for way in _HUGGING_FACE:
        if way == "batched_mm" and copied_nbytes > 1 << 30:
            continue
        block = _hugging_face_block(shape, way).to(dtype)
        if not first:
            for parameter in block.parameters():
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
            first = block.state_dict()
        block.load_state_dict(first)
        blocks[way] = block
    gate = SoftmaxGate(shape.num_experts, shape.model_dim, shape.top_k, normalize=True)
    layer = MoELayer(gate, GatedExperts(shape.num_experts, shape.model_dim, shape.hidden_dim)).to(dtype)
    layer.load_state_dict(
        {
            "gate.weight": first["gate.weight"],
            "experts.gate_up": first["experts.gate_up_proj"].transpose(1, 2),
            "experts.down": first["experts.down_proj"].transpose(1, 2),
        }
    )
    theirs = nn.Sequential(_hugging_face_block(shape, "eager").to(dtype))
    theirs[0].load_state_dict(first)
    parallelize(theirs)
    return blocks | {"laconic": layer, "parallelized": theirs}


def _hugging_face_block(shape: Shape, way: str) -> nn.Module:
    from transformers import MixtralConfig, Qwen3MoeConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    common: dict[str, Any] = {"hidden_size": shape.model_dim, "num_experts_per_tok": shape.top_k}
    if shape.family == "Mixtral":
        mixtral = MixtralConfig(intermediate_size=shape.hidden_dim, num_local_experts=shape.num_experts, **common)
        mixtral._experts_implementation = way
        return MixtralSparseMoeBlock(mixtral)
    experts = {"moe_intermediate_size": shape.hidden_dim, "num_experts": shape.num_experts, "norm_topk_prob": True}
    qwen = Qwen3MoeConfig(**experts, **common)
    qwen._experts_implementation = way
    return Qwen3MoeSparseMoeBlock(qwen)


def _forward(block: nn.Module, x: Tensor) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return block(x)

    return run


def _both(block: nn.Module, x: Tensor) -> Callable[[], object]:
    grad = torch.randn_like(x)

    def run() -> None:
        block.zero_grad()
        block(x.clone().requires_grad_()).backward(grad)

    return run


def _product(
    way: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, weights: Tensor, counts: Tensor
) -> Callable[[], object]:
    x, weights = x.requires_grad_(), weights.requires_grad_()
    grad = torch.randn(x.shape[0], weights.shape[2], dtype=x.dtype)

    def run() -> object:
        return torch.autograd.grad(way(x, weights, counts), [x, weights], grad)

    return run


def _padded_bmm(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Every group padded with zeros to the largest, one batched product."""
    most = int(counts.max())
    place = torch.arange(x.shape[0]) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    index = torch.arange(len(counts)).repeat_interleave(counts) * most + place
    padded = x.new_zeros(len(counts) * most, x.shape[1]).index_copy(0, index, x)
    return torch.bmm(padded.view(len(counts), most, -1), weights).flatten(0, 1).index_select(0, index)


def _zipf(num_rows: int, num_experts: int) -> Tensor:
    shares = 1 / torch.arange(1, num_experts + 1)
    counts = (num_rows * shares / shares.sum()).long()
    counts[0] += num_rows - counts.sum()
    return counts


def _name(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
