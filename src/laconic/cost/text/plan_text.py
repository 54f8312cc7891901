"""A plan as text: bytes of every rank, choices of every stage, and switches that make the largest terms smaller."""

from __future__ import annotations

from collections import Counter

from laconic.cost.memory.job import Job
from laconic.cost.memory.saved_tensors import EXACT
from laconic.cost.planner.policy import Chosen
from laconic.cost.sizes import format_nbytes
from laconic.text_columns import columns


def _describe_job(job: Job) -> str:
    model, layout, settings, batch = job.model, job.layout, job.settings, job.batch
    stages = f"{layout.stages} stages" if layout.stages > 1 else "no pipeline"
    if layout.stages_per_rank > 1:
        stages += f" x {layout.stages_per_rank} chunks"
    if layout.stages > 1:
        stages += f" ({layout.schedule}, {layout.micro_batches} micro-batches)"
    replicas = f"{layout.data_parallel} x {'FSDP2' if layout.sharded else 'DDP'}" if layout.data_parallel > 1 else ""
    if layout.expert_parallel > 1:
        replicas += f", experts shared by {layout.expert_parallel}"
    tensor = f"tensor parallel {layout.tensor_parallel}" if layout.tensor_parallel > 1 else ""
    world = ", ".join(part for part in (stages, replicas, tensor) if part)
    inputs = (f"{name} {'x'.join(map(str, sizes))}" for name, sizes in model.setting["inputs"].items())
    plural = "s" if batch.sequences > 1 else ""
    micro_batch = f"{batch.sequences} sample{plural} per micro-batch: {', '.join(inputs)}"
    return "\n".join(
        [
            f"model     {model.describe()}; {_short(model.num_parameters)} parameters",
            f"world     {layout.world_size} process{'es' * (layout.world_size > 1)}: {world}",
            f"batch     {micro_batch}",
            f"settings  {settings.precision}, {settings.optimizer}, {settings.gradient_bits}-bit gradients"
            f"{' used in backward' * settings.update_in_backward}, {settings.loss} loss",
        ]
    )


def plan_text(job: Job, chosen: Chosen, budget_nbytes: int | None) -> str:
    """The plan for a terminal, in plain ASCII."""
    parts = [_describe_job(job), _memory_table(chosen), _choice_table(job, chosen)]
    error, time = f"{chosen.relative_error:.1%}", f"{chosen.time_share:.1%}"
    parts.append(
        f"policy {chosen.policy}: gradient off by about {error}, step about {time} longer than with everything exact"
    )
    fullest = max(chosen.prediction.ranks, key=lambda rank: rank.total_nbytes)
    peak = f"{format_nbytes(fullest.total_nbytes)} on rank {fullest.rank} of the pipeline"
    if budget_nbytes is None:
        parts.append(f"peak: {peak}")
    elif fullest.total_nbytes <= budget_nbytes:
        parts.append(f"fits: {peak}, of {format_nbytes(budget_nbytes)}")
    else:
        over = format_nbytes(fullest.total_nbytes - budget_nbytes)
        parts.append(f"does not fit: {peak}, {over} more than {format_nbytes(budget_nbytes)}")
    if job.not_counted:
        uncounted = "".join(f"\n  moe.{name} ({what})" for name, what in job.not_counted.items())
        parts.append(f"not counted, if the run has them; experts are shared by one raw all-to-all here:{uncounted}")
    parts.append(_largest_terms(job, chosen))
    return "\n\n".join(parts)


def _memory_table(chosen: Chosen) -> str:
    ranks = chosen.prediction.ranks
    unit, size = next(
        ((u, s) for u, s in (("GB", 1e9), ("MB", 1e6)) if chosen.prediction.peak_nbytes >= s), ("KB", 1e3)
    )

    def amount(nbytes: int) -> str:
        return f"{nbytes / size:.2f}"

    kinds = list(ranks[0].kinds)
    with_host = any(rank.host_nbytes for rank in ranks)
    header = ["rank", "stages", "in flight", *kinds, "total", *(["on host"] if with_host else [])]
    rows = [
        [
            str(rank.rank),
            ",".join(map(str, rank.stages)),
            str(rank.in_flight),
            *(amount(rank.kinds[kind]) for kind in kinds),
            amount(rank.total_nbytes),
            *([amount(rank.host_nbytes)] if with_host else []),
        ]
        for rank in ranks
    ]
    by_site: Counter[str] = Counter()
    for rank in ranks:
        by_site.update({kind: n for kind, n in rank.activations_nbytes.items() if kind != "logits"})
    sites = ", ".join(f"{kind} {amount(n)}" for kind, n in by_site.most_common() if n)
    return f"{columns(header, rows, left=())}\n({unit}; activations of all ranks by site: {sites})"


def _choice_table(job: Job, chosen: Chosen) -> str:
    header = ["stage", "layers", "norm", "attention", "mlp", "other", "run again"]
    rows = []
    for stage in job.stages():
        found: dict[str, Counter[str]] = {}
        for unit in stage.units():
            if unit.num_elements is not None and unit.layer not in chosen.recomputed:
                kind = unit.kind if unit.kind in ("norm", "attention", "mlp") else "other"
                found.setdefault(kind, Counter())[chosen.choices.get(unit.name, EXACT).name] += 1
        again = sum(layer in chosen.recomputed for layer in stage.layers)
        cells = [_counted(found.get(kind, Counter())) for kind in ("norm", "attention", "mlp", "other")]
        layers = f"{stage.layers[0]}-{stage.layers[-1]}" if len(stage.layers) > 1 else str(stage.layers[0])
        rows.append([str(stage.index), layers, *cells, str(again) if again else "-"])
    return columns(header, rows, left="all")


def _counted(names: Counter[str]) -> str:
    if len(names) == 1:
        return next(iter(names))
    return " + ".join(f"{count} {name}" for name, count in sorted(names.items())) or "-"


def _short(count: int) -> str:
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:,}"


def _largest_terms(job: Job, chosen: Chosen) -> str:
    """The three largest terms of the fullest rank, a line each: name, bytes, and what to switch on."""
    fullest = max(chosen.prediction.ranks, key=lambda rank: rank.total_nbytes)
    largest = sorted(fullest.kinds.items(), key=lambda item: -item[1])[:3]
    buffers = max(fullest.buffers_nbytes, key=fullest.buffers_nbytes.__getitem__, default="")
    terms = [(name, nbytes, _remedy(name, job, chosen, buffers)) for name, nbytes in largest if nbytes]
    width = max(len(name) for name, _, _ in terms)
    sizes = [format_nbytes(nbytes) for _, nbytes, _ in terms]
    room = max(map(len, sizes))
    lines = [f"  {name:<{width}}  {size:>{room}}  {told}" for (name, _, told), size in zip(terms, sizes, strict=True)]
    return "\n".join(["largest there, and what makes it smaller:", *lines])


def _remedy(term: str, job: Job, chosen: Chosen, buffers: str) -> str:
    """The first switch that is not on yet and makes a term smaller; `buffers` is the largest kind of these."""
    layout, settings = job.layout, job.settings
    spread = "more --dp" if layout.sharded and layout.data_parallel > 1 else "--fsdp with --dp 2 or more"
    if term == "optimizer" and settings.optimizer == "adamw":
        return "--optimizer adamw8bit"
    if term == "gradients" and settings.gradient_bits > 8:
        alone = layout.micro_batches == layout.stages == layout.expert_parallel == 1
        alone &= settings.optimizer != "adamw" and (layout.sharded or layout.data_parallel == 1)
        return "--gradients 8" + ", or --update-in-backward" * alone
    if term in ("parameters", "gradients", "optimizer"):
        return f"{spread}, or more --stages"
    if term == "buffers" and buffers == "pipeline receive":
        return "fewer --micro-batches"
    if term == "buffers" and buffers in ("gathered parameters", "gradient reduction"):
        more = "--stages 2 or more: " if layout.stages == 1 else ""
        return f"{more}embedding and output projection are gathered whole"
    if term == "logits" and settings.loss != "chunked":
        return "--loss chunked"
    if term == "activations" and chosen.policy == "exact":
        return "--policy uniform4, or --memory SIZE, which chooses"
    if term == "activations" and not chosen.recomputed and chosen.policy != "budget":
        return "--memory SIZE, which also chooses what runs again"
    return "fewer tokens per micro-batch: --batch, --sequence-length, or more --tp"
