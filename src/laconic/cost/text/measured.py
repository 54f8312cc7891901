"""Plans of measured tables for a terminal."""

from __future__ import annotations

from collections import Counter

from laconic.cost.planner.measured import EXACT_WORD, MeasuredPlan, MeasuredTable
from laconic.cost.sizes import format_nbytes
from laconic.text_columns import columns

__all__ = ["measured_plan_text", "measured_table_text"]


def measured_table_text(table: MeasuredTable) -> str:
    """What was measured, for a batch of the largest size."""
    words = list(table.workspace_nbytes)
    rows = []
    for group in table.groups:
        cells = []
        for word in words:
            option = group.options.get(word)
            if option is None:
                cells.append("-")
                continue
            nbytes = format_nbytes(option.saved_nbytes.at(table.largest_batch) * len(group.blocks))
            error = (option.squared_error * len(group.blocks)) ** 0.5
            cells.append(nbytes if word == EXACT_WORD else f"{nbytes}, {error:.1%}")
        rows.append([f"{group.kind} x {len(group.blocks)}", *cells])
    header = ["saved, gradient off by", *("exact" if word == EXACT_WORD else f"{word} bits" for word in words)]
    return f"{table.source}\n\n{columns(header, rows, left='all')}\n(a batch of {table.largest_batch})"


def measured_plan_text(plan: MeasuredPlan, budget_nbytes: int | None) -> str:
    """The plan, in plain ASCII."""
    table = plan.table
    samples = ", ".join(f"{name} {list(shape)}" for name, shape in table.sample_shape.items())
    parts = [f"model     {table.source}\nbatch     {plan.samples} samples of {samples}, {table.precision}"]
    rows = []
    for group in table.groups:
        counted = Counter(plan.choices[block] for block in group.blocks)
        chosen = " + ".join(
            f"{count} {'exact' if word == EXACT_WORD else f'at {word} bits'}"
            for word, count in sorted(counted.items(), key=lambda entry: int(entry[0]))
        )
        rows.append([f"{group.kind} x {len(group.blocks)}", chosen])
    parts.append(columns(["blocks", "kept"], rows, left="all"))
    kinds = list(plan.nbytes)
    parts.append(
        columns([*kinds, "total"], [[format_nbytes(n) for n in (*plan.nbytes.values(), plan.total_nbytes)]], left=())
    )
    parts.append(
        f"gradient off by about {plan.relative_error:.1%}, step about {plan.time_share:.1%} longer than with everything"
        f" exact; {format_nbytes(plan.saved_nbytes)} saved for backward"
    )
    if plan.samples > 4 * table.largest_batch:
        parts.append(
            f"note: bytes were measured with up to {table.largest_batch} samples and are extended to {plan.samples}"
        )
    peak = format_nbytes(plan.total_nbytes)
    if budget_nbytes is None:
        parts.append(f"peak: {peak}")
    elif plan.total_nbytes <= budget_nbytes:
        parts.append(f"fits: {peak} of {format_nbytes(budget_nbytes)}")
    else:
        over = format_nbytes(plan.total_nbytes - budget_nbytes)
        parts.append(f"does not fit: {peak}, {over} more than {format_nbytes(budget_nbytes)}")
    return "\n\n".join(parts)
