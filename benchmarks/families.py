"""Compressed activations on every family of transformers that builds small: the table of docs/families.md.

python -m benchmarks.families --out docs/families.md
python -m benchmarks.families --only llama bert vit      # some of its rows
python -m benchmarks.families --only llama --out docs/families.md      # which replaces or adds these rows of the file
"""

from __future__ import annotations

import argparse
import copy
import random
import re
import sys
import textwrap
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

import laconic
from benchmarks.family_models import KINDS, Family, NotBuiltError, families, inputs_of, model_of, short, tensors_of
from benchmarks.registry import Table
from laconic.activations import SavedTensorTracker
from laconic.activations.whole_model.report import Report


@dataclass(frozen=True)
class Row:
    """What was measured for one family.

    problem: why there are no numbers. remarks: what else there is to say. bits: whether all outputs in training mode,
    with dropout, have the same bits: "equal", "differ", or "not repeatable" where those of the unmodified model differ
    between two runs. random_state: whether forward and backward leave it as the unmodified model does. cosine, worst:
    of all gradients with those of the unmodified model, and of one parameter's (of those with at least a thousandth of
    the norm of all), at 4 and at 8 bits. before_nbytes, after_nbytes: kept for backward, unmodified and at 4 bits.
    sites: converted ones by kind. left: what keeps tensors exactly, with its share of the bytes that are left.
    """

    family: Family
    problem: str = ""
    remarks: str = ""
    bits: str = ""
    random_state: str = ""
    cosine: tuple[float, float] = (0.0, 0.0)
    worst: tuple[float, float] = (0.0, 0.0)
    before_nbytes: int = 0
    after_nbytes: int = 0
    sites: Mapping[str, int] = field(default_factory=dict)
    left: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Step:
    """One forward and backward."""

    outputs: list[Tensor]
    random_state: Tensor
    gradients: dict[str, Tensor]
    nbytes: int


def measure(family: Family) -> Row:
    """Converts a small model of a family, at 4 and 8 bits, and compares a training step with the unmodified one's."""
    try:
        model = model_of(family)
        inputs = inputs_of(family, model)
    except NotBuiltError as error:
        return Row(family, problem=f"not built: {error}")
    try:
        try:
            _step(model, inputs)  # some models change themselves when they are called first
        except Exception:  # its loss is not one of a label per token or per picture
            inputs = {name: value for name, value in inputs.items() if name != "labels"}
            _step(model, inputs)
        exact = _step(_copy(model, family), inputs)
    except Exception as error:
        return Row(family, problem=f"does not run with made-up inputs: {short(error)}")
    steps: list[_Step] = []
    reports: list[Report] = []
    unchanged = True
    # Inputs of language models are made up by laconic, as in most programs.
    example = None if family.kind == "decoder" and "labels" in inputs else inputs
    for bits in (4, 8):
        twin = _copy(model, family)
        try:
            reports.append(laconic.compress_activations(twin, bits=bits, example_inputs=example))
            unchanged = unchanged and _equal([*model.state_dict().values()], [*twin.state_dict().values()])
            steps.append(_step(twin, inputs))
        except Exception as error:
            what = "refused" if isinstance(error, laconic.errors.LaconicError) else "fails"
            return Row(family, problem=f"{what}: {short(error)}", before_nbytes=exact.nbytes)
    cosines = [_cosines(step.gradients, exact.gradients) for step in steps]
    bits = "equal"
    if not all(_equal(step.outputs, exact.outputs) for step in steps):
        again = _step(_copy(model, family), inputs)
        bits = "differ" if _equal(again.outputs, exact.outputs) else "not repeatable"
    remarks = [] if unchanged else ["measuring changed buffers"]
    if "labels" not in inputs:
        remarks.append("a random projection of the output for a loss")
    return Row(
        family,
        remarks="; ".join(remarks),
        bits=bits,
        random_state="equal" if all(torch.equal(s.random_state, exact.random_state) for s in steps) else "differs",
        cosine=(cosines[0][0], cosines[1][0]),
        worst=(cosines[0][1], cosines[1][1]),
        before_nbytes=exact.nbytes,
        after_nbytes=steps[0].nbytes,
        sites=Counter(row.kind for row in reports[0].rows if row.format != "exact"),
        left=_left(model, reports[0]),
    )


def _copy(model: nn.Module, family: Family) -> nn.Module:
    """The same model once more."""
    try:
        return copy.deepcopy(model)
    except RuntimeError:  # it holds tensors of its last step
        return model_of(family)


def _step(model: nn.Module, inputs: Mapping[str, Any]) -> _Step:
    """In training mode, from the same random state each time."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    with SavedTensorTracker(model) as tracker:
        output = model(**inputs)
    found = list(tensors_of(output))
    loss = output.get("loss")
    if loss is None:
        tensor = next(tensor for tensor in found if tensor.requires_grad)
        loss = (tensor * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3))).mean()
    loss.backward()
    gradients = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return _Step([tensor.detach() for tensor in found], torch.get_rng_state(), gradients, tracker.nbytes)


def _cosines(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, float]:
    """Of all gradients as one vector, and of the parameter that is furthest off among those that count."""
    if set(got) != set(expected):
        return 0.0, 0.0
    norms = {name: gradient.norm().item() for name, gradient in expected.items()}
    own = {name: gradient.norm().item() for name, gradient in got.items()}
    products = {name: (got[name] * expected[name]).sum().item() for name in expected}
    total, size = (sum(norm**2 for norm in of.values()) ** 0.5 for of in (norms, own))
    each = [products[name] / max(norms[name] * own[name], 1e-300) for name in norms if norms[name] >= 1e-3 * total]
    return sum(products.values()) / max(total * size, 1e-300), min(each)


def _equal(got: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """The same numbers everywhere; NaN equals NaN."""
    return len(got) == len(expected) and all(
        a.shape == b.shape and torch.equal(a.nan_to_num(12345.0), b.nan_to_num(12345.0))
        for a, b in zip(got, expected, strict=True)
    )


def _left(model: nn.Module, report: Report) -> dict[str, float]:
    """Class names of modules that keep tensors exactly, with their share of what is kept, largest first."""
    names = {name: type(module).__name__ for name, module in model.named_modules()} | {"": "loss"}
    kept = {row.name: row.after_nbytes_per_token or 0.0 for row in report.rows}
    total = sum(kept.values())
    shares: Counter[str] = Counter()
    for name in report.left_exact:
        shares[names.get(name, "other")] += kept[name] / total
    return dict(shares.most_common())


# The page

_HEADER = (
    "family",
    "forward bits",
    "random state",
    "gradient, 4 bits (worst)",
    "gradient, 8 bits (worst)",
    "kept, bytes",
    "",
    "sites",
    "left exact, share of what is kept",
)
_MISSING, _MISSING_HEADER = "Families without a row", ("family", "why")
_ABOUT = """# Hugging Face families

`compress_activations` on every family of transformers {version} that its auto classes list for language models, vision
and sound, as small as its configuration lets it be (width {width}, {layers} layers), made by

```
python -m benchmarks.families --out docs/families.md
```

{summary}

- **Forward bits**: all outputs of a forward in training mode, with dropout switched on at {dropout}, against those of
  the unmodified model from the same seed.
- **Random state**: after forward and backward, against the unmodified model's: as many random numbers were drawn.
- **Gradient**: cosine of all gradients with the unmodified model's; in brackets the smallest of one parameter's, of
  those with at least a thousandth of the norm of all. A wrong formula shows at 8 bits; at 4 bits (the default) the
  format's own error shows, too.
- **Kept**: bytes that autograd keeps for backward of one step, before and after, at 4 bits
  (`SavedTensorTracker`). Small models keep much for the loss and little for layers, so the factors of large models are
  higher.
- **Sites**: what was converted. **Left exact**: classes of modules with at least 3 % of what is kept after the
  conversion; "loss" is the model itself.
- **Lower than the others**: levit and pp_lcnet have about thirty batch norms over few values, most of them behind one
  another. The gradient of such a norm's weight is what is left of terms that almost cancel (0.1 to 0.9 % of the norm of
  all), and 4 bits show in it. cpmant starts from weights of deviation 1, so the inputs of its GELU have a deviation of
  8, and one step of the format is as wide as the bend of the function. From deviation 0.05 its cosine is 0.999.

`tests/activations/test_families.py` measures all of it again and compares: bits and random state, gradients, bytes.
"""


def rows_of(text: str) -> dict[str, dict[str, str]]:
    """The rows of a page by family: column to text."""
    found: dict[str, dict[str, str]] = {}
    header: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| family |"):
            header = cells
        elif line.startswith("| ") and cells[0] != "---" and len(cells) == len(header):
            found[cells[0]] = dict(zip(header, cells, strict=True))
    return found


def page(rows: Sequence[Row]) -> str:
    """docs/families.md."""
    from benchmarks import family_models

    about = _ABOUT.format(
        version=transformers.__version__,
        width=family_models.WIDTH,
        layers=family_models.LAYERS,
        dropout=family_models.DROPPED,
        summary=summary(rows),
    )
    tables = []
    for kind, title in KINDS.items():
        measured = [row for row in rows if row.family.kind == kind and not row.problem]
        tables.append(Table(title, _HEADER, [cells(row) for row in measured]).render())
    missing = [(row.family.name, row.problem) for row in rows if row.problem]
    tables.append(Table(_MISSING, _MISSING_HEADER, missing).render())
    return "\n".join([about, *tables]).rstrip() + "\n"


def with_rows(text: str, rows: Sequence[Row]) -> str:
    """A page with some of its rows measured again, or with new ones; the sentence that counts rows follows.

    Raises:
        ValueError: the page is of another transformers, or not one that `page` made.
    """
    if f"transformers {transformers.__version__} " not in text:
        raise ValueError(f"the page is not of transformers {transformers.__version__}; measure all of it")
    about, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    kinds = {title: kind for kind, title in KINDS.items()}
    kind_of = {family.name: family.kind for family in families()}
    lines: dict[str, tuple[str, str]] = {}  # by family: the title of its table, and its line there
    shown: dict[str, Row] = {}
    for section in sections:
        title = section.partition("\n")[0]
        for name, cell_of in rows_of(section).items():
            (line,) = [line for line in section.splitlines() if line.startswith(f"| {name} |")]
            lines[name] = title, line
            kind = kinds.get(title) or kind_of.get(name, "")
            bits, kept = cell_of.get("forward bits", ""), cell_of.get("kept, bytes", "0 -> 0")
            before, after = (int(number) for number in kept.replace(",", "").split(" -> "))
            family = Family(name, kind, ())
            shown[name] = Row(family, cell_of.get("why", ""), bits=bits, before_nbytes=before, after_nbytes=after)
    for row in rows:
        shown[row.family.name] = row
        cells_of = [row.family.name, row.problem] if row.problem else cells(row)
        line = "| " + " | ".join(cells_of) + " |"
        lines[row.family.name] = _MISSING if row.problem else KINDS[row.family.kind], line
    order = {name: index for index, name in enumerate(kind_of)}
    tables = []
    for title, header in [*((title, _HEADER) for title in KINDS.values()), (_MISSING, _MISSING_HEADER)]:
        names = sorted((n for n, (where, _) in lines.items() if where == title), key=lambda n: order.get(n, len(order)))
        empty = Table(title, header, []).render().rstrip()
        tables.append("\n".join([empty, *(lines[name][1] for name in names), ""]))
    counted, found = re.subn(
        r"^\*\*\d+ of .*?(?=\n\n)", lambda _: summary([*shown.values()]), about, flags=re.MULTILINE | re.DOTALL
    )
    if found != 1:
        raise ValueError("the page has no sentence that counts its rows; measure all of it")
    return "\n".join([counted.rstrip() + "\n", *tables]).rstrip() + "\n"


def summary(rows: Sequence[Row]) -> str:
    """What the tables say, in a few sentences."""
    measured = [row for row in rows if not row.problem]
    decoders = [row for row in measured if row.family.kind == "decoder"]
    equal = [row for row in measured if row.bits == "equal"]
    odd = [f"{row.family.name} ({row.bits})" for row in measured if row.bits != "equal"]
    idle = [row.family.name for row in measured if row.before_nbytes < 1.01 * row.after_nbytes]
    lines = [
        f"**{len(measured)} of {len(rows)} families build and run small; {len(equal)} of them give the same bits in "
        f"training mode.**"
    ]
    if odd:
        lines.append(f"Not {', '.join(odd)}.")
    if decoders:
        saved = sorted(row.before_nbytes / row.after_nbytes for row in decoders)
        lines.append(
            f"{len(decoders)} are decoder-only (state-space models and mixtures of experts among them); half of these "
            f"keep at least {saved[len(saved) // 2]:.1f} times less."
        )
    if idle:
        lines.append(f"(Almost) nothing is gained for {', '.join(idle)}, whose layers are no sites.")
    return "\n".join(textwrap.fill(line, 120) for line in lines)


def cells(row: Row) -> list[str]:
    """A row of a table."""
    factor = row.before_nbytes / max(row.after_nbytes, 1)
    sites = ", ".join(f"{count} {kind}" for kind, count in row.sites.items()) or "**none: nothing is converted**"
    left = ", ".join(f"{name} {share:.0%}" for name, share in row.left.items() if share >= 0.03) or "-"
    return [
        row.family.name,
        row.bits,
        row.random_state,
        *(f"{cosine:.4f} ({worst:.3f})" for cosine, worst in zip(row.cosine, row.worst, strict=True)),
        f"{row.before_nbytes:,} -> {row.after_nbytes:,}",
        f"{factor:.2f}x",
        sites,
        left + (f" ({row.remarks})" if row.remarks else ""),
    ]


def main(arguments: Sequence[str]) -> int:
    """Measure and write; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.families", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="FAMILY", help="these families (default: all)")
    parser.add_argument("--out", type=Path, help="Markdown file to write (default: print)")
    chosen = parser.parse_args(arguments)
    unknown = sorted({*(chosen.only or ())} - {family.name for family in families()})
    if unknown:
        parser.error(
            f"--only names {', '.join(unknown)}, but transformers {transformers.__version__} lists no such family"
        )
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for family in families():
            if chosen.only is None or family.name in chosen.only:
                rows.append(measure(family))
                print(family.name, rows[-1].problem or cells(rows[-1])[1:], file=sys.stderr, flush=True)
    if chosen.out is None:
        print(page(rows))
    elif chosen.only is not None and chosen.out.exists():
        chosen.out.write_text(with_rows(chosen.out.read_text(encoding="utf-8"), rows), encoding="utf-8")
    else:
        chosen.out.write_text(page(rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
