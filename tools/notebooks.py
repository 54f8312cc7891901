"""Run the notebooks of examples/ without Jupyter and print what their cells print.

    python tools/notebooks.py            # runs all, writes nothing
    python tools/notebooks.py --store    # runs all, and stores what they print and draw in the files

A cell runs as in Jupyter, in names that all cells share. What it prints is stored as text, the figure it leaves open in
`matplotlib.pyplot` as a small PNG.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "notebooks"


def outputs_of(source: str, name: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell; its outputs in the notebook format."""
    import matplotlib.pyplot as plt

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(source, name, "exec"), names)
    made: list[dict[str, Any]] = []
    if out.getvalue():
        made.append({"output_type": "stream", "name": "stdout", "text": out.getvalue().splitlines(keepends=True)})
    for number in plt.get_fignums():
        picture = io.BytesIO()
        plt.figure(number).savefig(picture, format="png", dpi=80, metadata={"Software": None})
        data = {"image/png": base64.b64encode(picture.getvalue()).decode()}
        made.append({"output_type": "display_data", "metadata": {}, "data": data})
    plt.close("all")
    return made


def run(path: Path) -> dict[str, Any]:
    """Run a notebook; the same with outputs."""
    import matplotlib

    matplotlib.use("Agg")
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    count = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            cell["outputs"] = outputs_of("".join(cell["source"]), f"{path.name}, cell {count}", names)
            cell["execution_count"] = count
    return notebook


def main() -> None:
    """Run all notebooks."""
    if sys.argv[1:] not in ([], ["--store"]):
        sys.exit(f"{sys.argv[1:]} is not known; give nothing, or --store")
    for path in sorted(FOLDER.glob("*.ipynb")):
        print(f"running {path.name}", file=sys.stderr, flush=True)
        notebook = run(path)
        for cell in notebook["cells"]:
            print(*(line for output in cell.get("outputs", ()) for line in output.get("text", ())), sep="", end="")
        if sys.argv[1:]:
            path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
