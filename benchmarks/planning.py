"""Whether the planner's predictions hold, and how long it takes to choose.

Peaks are those of torch's allocator during a step, by its memory profiler, on sizes that no test has; choosing is timed
for published models over many ranks.
"""

from __future__ import annotations

import time

import torch

import laconic
from benchmarks.kit.allocated import peak_of_step
from benchmarks.kit.models import causal_model
from benchmarks.kit.timing import seconds_of
from benchmarks.registry import Options, Table, benchmark
from laconic.cost import Batch, Choice, Layout, Settings, predict
from laconic.cost.memory.saved_tensors import EXACT
from laconic.cost.planner.policy import by_bits, choose
from laconic.train.config.schema import ModelConfig
from laconic.train.memory.trace import traced_job
from laconic.train.model import sized_config

_SETTINGS = ((16, "exact", "exact"), (4, "exact", "exact"), (4, "int8", "chunked"), (8, "nf4", "chunked"))


@benchmark("planning")
def planning(options: Options) -> list[Table]:
    """The two tables."""
    return [_peaks(options.small), _choosing(options.small)]


def _peaks(small: bool) -> Table:
    hidden, layers, length = (64, 2, 64) if small else (320, 6, 512)
    sizes = {"intermediate_size": 3 * hidden, "num_hidden_layers": layers, "vocab_size": 2048, "head_dim": 32}
    sizes |= {"num_key_value_heads": hidden // 64}
    rows = []
    for precision in ("fp32", "bf16"):
        for bits, attention, loss in _SETTINGS:
            model = causal_model("llama", hidden, **sizes)
            if bits < 16 or loss == "chunked":
                laconic.compress_activations(model, bits=bits, attention=attention, loss=loss)
            settings = Settings(precision=precision, loss=loss, device="cpu")
            job = traced_job(model, Batch(2, length), Layout(micro_batches=2), settings)
            rank = by_bits(job, [bits], EXACT if attention == "exact" else Choice(attention)).prediction.ranks[0]
            predicted = rank.total_nbytes - rank.parameters_nbytes - rank.optimizer_nbytes
            ids = torch.randint(0, 2048, (job.batch.sequences, job.batch.sequence_length))
            measured = peak_of_step(model, ids, precision == "bf16", job.layout.micro_batches, loss == "chunked")
            kept = f"{bits} bits, attention {attention}, loss {loss}"
            numbers = f"{predicted / 1e6:.2f}", f"{measured / 1e6:.2f}", f"{predicted / measured - 1:+.1%}"
            rows.append([f"{precision}: {kept}", *numbers, rank.moment])
    return Table(
        f"Peak of a step beside parameters: Llama, hidden {hidden}, {layers} layers, 2 x 2 x {length} tokens",
        ["", "predicted MB", "allocator MB", "error", "fullest in"],
        rows,
    )


_MODELS = {  # hidden, feed-forward, layers, heads, key/value heads; stages, chunks, data parallel
    "8B": (4096, 14336, 32, 32, 8, 4, 2, 8),
    "70B": (8192, 28672, 80, 64, 8, 8, 2, 16),
    "405B": (16384, 53248, 126, 128, 8, 16, 3, 32),
}


def _choosing(small: bool) -> Table:
    rows = []
    for name in list(_MODELS)[: 1 if small else None]:
        hidden, ffn, layers, heads, kv_heads, stages, chunks, replicas = _MODELS[name]
        sizes = ModelConfig(
            hidden_size=hidden,
            intermediate_size=ffn,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            tie_word_embeddings=False,
        )
        layout = Layout(
            data_parallel=replicas,
            sharded=True,
            stages=stages,
            stages_per_rank=chunks,
            schedule="interleaved-1f1b",
            micro_batches=2 * stages,
        )
        started = time.perf_counter()
        config = sized_config(sizes, 128256, 8192)
        job = traced_job(config, Batch(1, 8192), layout, Settings(optimizer="adamw8bit", loss="chunked"))
        traced_seconds = time.perf_counter() - started
        least = by_bits(job, [4] * layout.num_chunks, Choice("int8")).prediction.peak_nbytes
        most = predict(job).peak_nbytes
        for share in (0.1, 0.5):
            budget = int(least + share * (most - least))
            choices = []
            case = {"choose": lambda job=job, budget=budget, found=choices: found.append(choose(job, budget))}
            seconds = seconds_of(case, 1, warm_up_rounds=0)["choose"]
            (chosen,) = choices
            rows.append(
                [
                    f"Llama {name}, {layout.world_size} ranks",
                    f"{most / 1e9:.0f}",
                    f"{budget / 1e9:.0f}",
                    f"{chosen.relative_error:.1%}",
                    f"{chosen.time_share:.1%}",
                    f"{traced_seconds:.1f}",
                    f"{seconds:.1f}",
                ]
            )
    return Table(
        "Choosing under a budget: 8192 tokens per micro-batch, interleaved 1F1B, FSDP2, 8-bit AdamW, chunked loss",
        [
            "",
            "all exact, GB",
            "budget, GB",
            "gradient off by",
            "step longer by",
            "seconds to trace",
            "seconds to choose",
        ],
        rows,
        "Error and time are the planner's estimates, from laconic/cost/data.",
    )
