"""Notebooks as pages: text, code and the outputs that are stored in the notebook."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_FOLDER = ROOT / "examples" / "notebooks"


def menu() -> list[str]:
    """Entries for the menu."""
    return [f"notebooks/{path.stem}.md" for path in sorted(_FOLDER.glob("*.ipynb"))]


def pages() -> dict[str, str | bytes]:
    """Pages and their pictures by place in the site."""
    made: dict[str, str | bytes] = {}
    for path in sorted(_FOLDER.glob("*.ipynb")):
        parts = []
        for number, cell in enumerate(json.loads(path.read_text())["cells"]):
            source = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                parts.append(source)
                continue
            parts.append(f"```python\n{source}\n```")
            for output in cell["outputs"]:
                picture = output.get("data", {}).get("image/png")
                if picture is None:
                    parts.append(f"```text\n{_text(output).rstrip()}\n```")
                else:
                    name = f"{path.stem}_{number}.png"
                    made[f"notebooks/{name}"] = base64.b64decode(picture)
                    parts.append(f"![what the cell draws]({name})")
        parts.append(f"This page is the notebook `examples/notebooks/{path.name}`, which CI runs.")
        made[f"notebooks/{path.stem}.md"] = "\n\n".join(parts) + "\n"
    return made


def _text(output: dict[str, Any]) -> str:
    lines = output["text"] if "text" in output else output["data"]["text/plain"]
    return "".join(lines)
