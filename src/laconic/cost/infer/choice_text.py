"""A choice of the inference planner as text."""

from __future__ import annotations

from laconic.cost.comm.rates import Line
from laconic.cost.infer.arrivals import ArrivalChoice, Arrivals
from laconic.cost.infer.costs import InferenceCostModel, Workload
from laconic.cost.infer.planner import Candidate, Choice, Workers, busy_shares, priced
from laconic.cost.infer.rates import InferenceRates
from laconic.cost.infer.shape import InferenceShape
from laconic.cost.sizes import format_nbytes
from laconic.text_columns import columns

_NAMES = {
    "replicated": "unsplit, replicas",
    "sharded": "unsplit, experts sharded",
    "naive": "naive",
    "pppipe": "PPPipe",
    "findep": "FinDEP",
}


def candidate_name(candidate: Candidate) -> str:
    """Name a candidate in a table: "FinDEP, slices of experts"."""
    sliced = candidate.kind == "findep" and candidate.plan.num_slices > 1
    return _NAMES[candidate.kind] + (f", slices of {candidate.plan.slicing}" if sliced else "")


def choice_text(model: InferenceCostModel, workers: Workers, choice: Choice, title: str) -> str:
    """Draw the table of candidates, fastest first, then the chosen plan and what memory limits, in plain ASCII."""
    header = ["", "workers", "m_a", "r1", "r2", "order", "ms per pass", "requests", "tokens/s", "against best"]
    unsplit = workers.without_split(model.rates)
    rows = [_row(one, choice.candidates[0], unsplit) for one in choice.candidates]
    best, split = choice.best, choice.best.split
    lines = [title, describe(model, workers), "", columns(header, rows), ""]
    if split is None:
        kind = "attention workers" if workers.are_of_two_kinds(model.rates) else "workers"
        groups = f"{best.num_groups} x {unsplit // best.num_groups} {kind}"
        plan = f"do not split: {candidate_name(best)}, {groups}, {best.batch} requests per worker and micro-batch"
        others = [one for one in choice.candidates if one.split is not None]
        if others:
            slower = best.tokens_per_second / others[0].tokens_per_second
            plan += f"; the best split is slower by {slower:.2f}x"
        else:
            plan += "; no split fits" + (f": {choice.no_split}" if choice.no_split else "")
    else:
        how = best.plan
        plan = (
            f"split: {best.num_groups} x {split.attention} attention and {split.experts} expert workers, "
            f"r1 = {how.num_micro_batches} micro-batches of {best.batch} requests per attention worker, "
            f"r2 = {how.num_slices} slices of {how.slicing}, order {how.order}"
        )
        whole = [one for one in choice.candidates if one.split is None]
        if whole:
            plan += f"; {best.tokens_per_second / whole[0].tokens_per_second:.2f}x of the best unsplit run"
        else:
            plan += f"; unsplit, no request fits: {choice.no_unsplit.removeprefix('unsplit, ')}"
    lines.append(f"plan: {plan}")
    if choice.best_split is not None:
        of = "" if choice.split_pays else " of the best split"
        lines.append(f"bottleneck{of}: {_bottleneck(model, choice.best_split)}")
    limit = choice.limits[best]
    lines.append(f"memory allows {limit.batch} requests per micro-batch; full is the {limit}")
    return "\n".join(lines)


def _bottleneck(model: InferenceCostModel, one: Candidate) -> str:
    (name, most), *others = sorted(busy_shares(model, one).items(), key=lambda share: -share[1])
    return f"{name}, busy for {most:.0%} of a pass; {', '.join(f'{name} {share:.0%}' for name, share in others)}"


def arrivals_text(
    shape: InferenceShape,
    rates: InferenceRates,
    workers: Workers,
    arrivals: Arrivals,
    choice: ArrivalChoice,
    shares: tuple[float, ...] = (),
) -> str:
    """Draw the table of what carries the arrivals, fastest first, then the chosen plan, in plain ASCII."""
    unsplit = workers.without_split(rates)
    header = ["", "workers", "r1", "r2", "order", "m_a prefill", "m_a decode", "s to first token", "ms per token"]
    header += ["s in all", "in flight", "prefill"]
    rows = []
    for one in choice.candidates:
        size = unsplit // one.num_groups
        findep = one.kind == "findep"
        rows.append(
            [
                _NAMES[one.kind] + (f", slices of {one.plan.slicing}" if findep and one.plan.num_slices > 1 else ""),
                f"{one.num_groups} x {one.split or size}",
                str(one.plan.num_micro_batches),
                *([str(one.plan.num_slices), one.plan.order] if findep else ["-", "-"]),
                str(one.prefill_batch),
                str(one.decode_batch),
                f"{one.first_token_seconds:.3f}",
                f"{1e3 * one.token_seconds:.2f}",
                f"{one.seconds:.2f}",
                f"{one.requests_in_flight:.1f}",
                f"{one.prefill_share:.0%}",
            ]
        )
    best = choice.best
    load = f"prompts of {arrivals.prompt} tokens, answers of {arrivals.output}"
    lines = [
        f"arrivals: {arrivals.requests_per_second:g} requests/s, {load}",
        _of_model(shape),
        _of_workers(workers, rates),
        "",
        columns(header, rows),
        "",
        f"plan: {rows[choice.candidates.index(best)][0]} on {best.num_groups} x"
        f" {best.split or unsplit // best.num_groups} workers, r1 = {best.plan.num_micro_batches}, r2 ="
        f" {best.plan.num_slices}, room for {best.decode_slots} requests in decoding",
    ]
    split = next((one for one in (best, *choice.candidates) if one.split is not None), None)
    if split is None:
        return "\n".join(lines)
    of = ""
    if split is not best:
        lines[-1] += f"; do not split, the best split takes {split.seconds / best.seconds:.2f}x of the time"
        of = " of the best split"
    if arrivals.output > 1:
        phase, work, batch = "decoding", Workload.decode(arrivals.prompt, arrivals.output), split.decode_batch
    else:
        phase, work, batch = "prefill", Workload.prefill(arrivals.prompt, arrivals.output), split.prefill_batch
    assert split.split is not None
    model = InferenceCostModel(shape, rates, work, shares)
    busy = _bottleneck(model, priced(model, split.kind, split.split, batch, split.plan))
    return "\n".join([*lines, f"bottleneck{of} in {phase}: {busy}"])


def describe(model: InferenceCostModel, workers: Workers) -> str:
    """Say in two lines what is planned."""
    return f"{_of_model(model.shape)}\n{_of_workers(workers, model.rates)}; {_workload(model.workload)}"


def _of_workers(workers: Workers, rates: InferenceRates) -> str:
    memory = format_nbytes(workers.memory_nbytes)
    if not workers.are_of_two_kinds(rates):
        return f"{workers.total} workers of {memory}"
    of_experts = format_nbytes(workers.expert_memory_nbytes or workers.memory_nbytes)
    if workers.attention is not None:
        of_each = workers.attention, workers.total - workers.attention
        return f"workers: {of_each[0]} for attention of {memory}, {of_each[1]} for experts of {of_experts}"
    return f"{workers.total} workers, of {memory} for attention, of {of_experts} for experts"


def _of_model(shape: InferenceShape) -> str:
    shared = f", {shape.shared_hidden} wide shared experts" if shape.shared_hidden else ""
    held = "" if shape.expert_format == "exact" else f"; expert workers hold experts in {shape.expert_format}"
    return (
        f"{shape.name or 'model'}: {shape.num_layers} layers, hidden {shape.hidden_size}, {shape.num_experts} experts "
        f"{shape.expert_hidden} wide, top-{shape.top_k}{shared}; {shape.num_parameters / 1e9:.4g} billion parameters"
        f"{held}"
    )


def _workload(work: Workload) -> str:
    waiting = "as many requests as fit" if work.requests is None else f"{work.requests} requests"
    step = f"prompts of {work.new_tokens} tokens" if not work.context else f"decode, {work.context} tokens cached"
    return f"{waiting}, {step}"


def _row(one: Candidate, best: Candidate, unsplit: int) -> list[str]:
    plan = one.plan
    cut = [str(plan.num_slices), plan.order] if one.kind == "findep" else ["-", "-"]
    return [
        candidate_name(one),
        f"{one.num_groups} x {one.split or unsplit // one.num_groups}",
        str(one.batch),
        str(plan.num_micro_batches),
        *cut,
        f"{one.seconds * 1e3:.2f}",
        str(one.num_requests),
        f"{one.tokens_per_second:,.1f}",
        f"{one.tokens_per_second / best.tokens_per_second:.3f}",
    ]


def infer_rates_text(rates: InferenceRates) -> str:
    """Draw the rates as a table."""
    products, kernel, reading = rates.gemm, rates.attention, rates.read_seconds_per_byte
    rows = [
        _rate("matrix product", products, "mul-adds"),
        _rate("attention", kernel, "mul-adds"),
        ["weights and caches", "", _per_second(reading, "B"), ""],
    ]
    of_experts = rates.of_experts
    if rates.experts is not None:
        rows.append(_rate("expert workers, matrix product", of_experts.gemm, "mul-adds"))
        rows.append(["expert workers, weights", "", _per_second(of_experts.read_seconds_per_byte, "B"), ""])
    for name, pair in {"any split": rates.link, **rates.links}.items():
        rows.append(_rate(f"link to experts, {name}", pair.dispatch, "B"))
        rows.append(_rate(f"link home, {name}", pair.combine, "B"))
    rows.append(_rate("message and answer, attention's core", rates.exchange.attention, "B"))
    rows.append(_rate("message and answer, experts' core", of_experts.exchange, "B"))
    calls = {True: "one call for all experts of a worker", False: "a call for each active expert"}
    experts = f"experts: {calls[of_experts.grouped]}"
    if rates.grouped != of_experts.grouped:
        experts += f"; on attention workers without a split: {calls[rates.grouped]}"
    table = columns(["", "start-up us", "per second", "worst error"], rows)
    return "\n".join([table, experts, rates.source])


def _rate(name: str, line: Line, unit: str) -> list[str]:
    return [name, f"{line.alpha_seconds * 1e6:.1f}", _per_second(line.seconds_per_byte, unit), f"{line.error:.0%}"]


def _per_second(seconds: float, unit: str) -> str:
    return f"{1e-9 / seconds:,.2f} G{unit}" if seconds else "free"
