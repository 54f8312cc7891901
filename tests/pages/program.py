"""The Python of a page as one program, and the process that runs it.

python -m tests.pages.program PAGE        # RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as of torchrun
"""

from __future__ import annotations

import ast
import io
import math
import re
import sys
import tokenize
import warnings
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from tests.distributed.processes import ROOT

_BLOCK = re.compile(r"(?:^<!-- not run: ([^\n]+) -->\n)?^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One block of Python.

    Attributes:
        source: what it says.
        line: of its first line in the page, from 1.
        not_run: why it is not run; from the comment `<!-- not run: ... -->` in the line above it.
    """

    source: str
    line: int
    not_run: str | None


def path_of(page: str) -> Path:
    """Where a page is."""
    return ROOT / page if (ROOT / page).exists() else ROOT / "docs" / page


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page, top to bottom."""
    text = path_of(page).read_text()
    return [Block(found[2], text.count("\n", 0, found.start(2)) + 1, found[1]) for found in _BLOCK.finditer(text)]


def promised(source: str) -> dict[int, Any]:
    """Values that comments promise, by the line of the expression: `timeline.makespan_seconds  # 8.0: of all`."""
    found = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.line[: token.start[1]].strip():
            for text in (token.string[1:].strip(), token.string[1:].partition(": ")[0].strip()):
                try:
                    found[token.start[0]] = ast.literal_eval(text)
                    break
                except (SyntaxError, ValueError):
                    continue
    return found


def run_block(block: Block, file: str, names: dict[str, Any]) -> None:
    """Run a block in `names`; where a comment promises the value of an expression, it has to be that."""
    values = promised(block.source)
    for node in ast.parse(block.source).body:
        ast.increment_lineno(node, block.line - 1)
        line = (node.end_lineno or 0) - block.line + 1
        if isinstance(node, ast.Expr) and line in values:
            value = eval(compile(ast.Expression(node.value), file, "eval"), names)
            promise = values[line]
            close = isinstance(promise, float) and math.isclose(value, promise, rel_tol=1e-9)
            assert close or value == promise, f"{file}:{node.lineno}: {ast.unparse(node)} is {value!r}"
        else:
            exec(compile(ast.Module([node], []), file, "exec"), names)


def check_given(names: dict[str, Any]) -> None:
    """A page gets models, batches and groups, but neither modules nor anything of laconic that it has to import."""
    for name, value in names.items():
        is_code = isinstance(value, ModuleType | type) or getattr(value, "__module__", "").startswith("laconic")
        assert not is_code or not callable(value) or hasattr(value, "forward"), f"a page has to import {name}"


def run_page(page: str) -> None:
    """Run the blocks of a page in the current directory."""
    from tests.pages.names import PAGES, SERVED_AT

    file, needed = str(path_of(page)), PAGES[page]
    names: dict[str, Any] = {"__name__": "__main__", "__file__": file}
    with ExitStack() as until_the_end:
        for number, block in enumerate(block for block in blocks_of(page) if block.not_run is None):
            if number == 0 or needed.fresh:
                given = needed.names(block.source, until_the_end)
                check_given(given)
                names |= given
            url = names.get("url", SERVED_AT)
            run_block(replace(block, source=block.source.replace(SERVED_AT, url)), file, names)
        if dist.is_initialized():  # the first rank takes the store along, by which others may still be meeting
            dist.barrier()


if __name__ == "__main__":
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "'pin_memory' argument")  # torch's, in hosts that always ask for it
    run_page(sys.argv[1])
