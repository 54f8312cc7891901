"""Sizes of Llamas, and by closed formulas the bytes that the planner reads off a traced step, without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from laconic.cost import Batch, Choice, TracedModel, Unit
from laconic.cost.memory.saved_tensors import PRECISIONS, Precision
from laconic.cost.memory.traced import POINTS, TracedLayer, Workspace
from laconic.options import DEFAULT_CODES


@dataclass(frozen=True)
class Sizes:
    """Sizes of a Llama."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    tied: bool = False
    head_dim: int = 128

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def key_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Of one layer: q, k, v, output; gate, up, down."""
        hidden, ffn, query, key = self.hidden_size, self.intermediate_size, self.query_size, self.key_size
        attention = (query, hidden), (key, hidden), (key, hidden), (hidden, query)
        return (*attention, (ffn, hidden), (ffn, hidden), (hidden, ffn))

    @property
    def num_parameters(self) -> int:
        layer = sum(rows * columns for rows, columns in self.matrices) + 2 * self.hidden_size
        ends = self.vocab_size * self.hidden_size * (1 if self.tied else 2) + self.hidden_size
        return self.num_layers * layer + ends


_PUBLISHED = {
    "llama2-7b": Sizes(4096, 11008, 32, 32, 32, 32000),
    "llama2-13b": Sizes(5120, 13824, 40, 40, 40, 32000),
    "llama3-8b": Sizes(4096, 14336, 32, 32, 8, 128256),
    "llama3.2-1b": Sizes(2048, 8192, 16, 32, 8, 128256, True, 64),
    "codellama-34b": Sizes(8192, 22016, 48, 64, 8, 32000),
    "olmo-1b": Sizes(2048, 8192, 16, 16, 16, 50304, True),
}


def shape_of(name: str, num_layers: int | None = None) -> Sizes:
    """A published model, with another number of layers if asked for."""
    sizes = _PUBLISHED[name]
    return sizes if num_layers is None else replace(sizes, num_layers=num_layers)


def traced_llama(
    sizes: Sizes,
    batch: Batch,
    precision: Precision = PRECISIONS["fp32"],
    loss: str = "exact",
    kinds: tuple[int, ...] | None = None,
) -> TracedModel:
    """What a trace gives of a Llama, workspace roughly; `kinds` of layers differ in nothing but their number."""
    rows, hidden, ffn = batch.tokens, sizes.hidden_size, sizes.intermediate_size
    element, residual, autocast = precision.compute_nbytes, precision.residual_nbytes, precision.autocast
    query, key, heads = sizes.query_size, sizes.key_size, sizes.num_heads + 2 * sizes.num_kv_heads
    # A norm keeps its input in fp32, the normalized value and the inverse root mean square.
    norm = rows * (hidden * (4 + residual) + 4)
    cast = [2 * a * b if autocast else 0 for a, b in sizes.matrices]
    # Linears that read one tensor share it, or make a copy each under autocast.
    read = (5 if autocast else 2) * rows * hidden * element
    codes = [code for _, code in sorted(DEFAULT_CODES.items(), reverse=True)]

    def packed(*tensors: tuple[int, int]) -> tuple[tuple[str, int], ...]:
        return tuple((code, sum(Choice(code).packed_nbytes(n, length) for n, length in tensors)) for code in codes)

    def unit(
        name: str, kind: str, sites: tuple[str, ...], exact: int, *tensors: tuple[int, int], **more: object
    ) -> Unit:
        elements = sum(n * length for n, length in tensors) if tensors else None
        return Unit(name, kind, None, sites, exact, elements, packed=packed(*tensors) if tensors else (), **more)  # type: ignore[arg-type]

    projections = tuple(f"self_attn.{name}_proj" for name in "qkv")
    gate_up = "mlp.gate_proj", "mlp.up_proj"
    norms = "input_layernorm", "post_attention_layernorm"
    linears, scores = 2.0 * rows * ffn * hidden, 2.0 * rows * batch.sequence_length * query
    units = (
        unit(
            projections[0],
            "norm",
            (*projections, *gate_up, *norms),
            2 * norm + read + sum(cast[:3]) + sum(cast[4:6]),
            *[(rows, hidden)] * 2,
            weight_nbytes=sum(cast[:3]) + sum(cast[4:6]),
            rebuilds=True,
        ),
        unit(
            "self_attn",
            "attention",
            ("self_attn",),
            rows * ((2 * query + 2 * key) * element + 4 * sizes.num_heads),
            (rows * heads, sizes.head_dim),
            again_flops=scores,
        ),
        unit(
            "mlp",
            "mlp",
            ("mlp", "mlp.down_proj"),
            4 * rows * ffn * element + cast[6],
            *[(rows, ffn)] * 2,
            weight_nbytes=cast[6],
            rebuilds=True,
            recompute_flops=2 * linears,
        ),
        unit(
            "self_attn.o_proj",
            "linear",
            ("self_attn.o_proj",),
            cast[3],
            weight_nbytes=cast[3],
            rebuilt_with="self_attn",
            input_nbytes=rows * query * element,
            rebuilds=True,
        ),
    )
    flops = 2.0 * rows * sum(a * b for a, b in sizes.matrices) + scores
    vectors = ((hidden, 1), (hidden, 1))
    layer = TracedLayer(
        units,
        (*sizes.matrices, *vectors),
        (),
        flops,
        2 * batch.sequence_length * sizes.head_dim * residual,
        8 * batch.sequence_length,
    )
    chunked = loss == "chunked"
    # In chunks the loss keeps what the projection reads, a log-sum-exp for each token, and labels.
    behind = 0 if chunked else rows * hidden * element + 2 * hidden * sizes.vocab_size * autocast
    # Where everything is exact the loss keeps log-probabilities in fp32, else what has the dtype of the logits.
    behind += 0 if chunked else rows * sizes.vocab_size * (4 - element)
    kept = rows * (hidden * element + 12) if chunked else 0
    head = Unit(
        "model.norm",
        "head",
        None,
        ("model.norm", "lm_head"),
        norm + behind + kept,
        rows * hidden,
        packed=tuple((code, nbytes + kept) for code, nbytes in packed((rows, hidden))),
        minimum_bits=8,
    )
    wide, matrix = rows * ffn * element, (sizes.vocab_size, hidden)
    chosen = kinds or (0,) * sizes.num_layers
    return TracedModel(
        family="llama",
        model_class="LlamaForCausalLM",
        config={"model_type": "llama", "num_hidden_layers": sizes.num_layers, "hidden_size": hidden},
        setting={
            "sequences": batch.sequences,
            "sequence_length": batch.sequence_length,
            "precision": [precision.name, residual],
            "loss": loss,
            "expert_parallel": 1,
            "inputs": {"input_ids": [batch.sequences, batch.sequence_length]},
        },
        names=tuple(f"model.layers.{index}" for index in range(sizes.num_layers)),
        kinds=chosen,
        layers=(layer,) * (1 + max(chosen)),
        first_units=(),
        last_units=(head,),
        first_tensors=(matrix,),
        last_tensors=((hidden, 1), matrix),
        tied_tensor=matrix if sizes.tied else None,
        first_nbytes=8 * rows,
        last_nbytes=0 if chunked else rows * (element * sizes.vocab_size + 8) + 4,
        layer_input=(rows, hidden),
        buffers_nbytes=4 * sizes.head_dim,
        workspace={point: Workspace(2 * wide, 3 * wide) for point in POINTS},
        is_stack=True,
        shares=False,
    )
