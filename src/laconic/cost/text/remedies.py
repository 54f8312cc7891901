"""The terms of a prediction that take most, and the switch of `laconic plan` that makes each smaller."""

from __future__ import annotations

from laconic.cost.memory.job import Job
from laconic.cost.planner.policy import Chosen
from laconic.cost.sizes import format_nbytes


def largest_terms_text(job: Job, chosen: Chosen) -> str:
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
