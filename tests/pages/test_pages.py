"""The Python of every page runs, top to bottom, as one program in a directory of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.distributed.forked import ForkedPython
from tests.distributed.processes import ROOT, environment, free_port
from tests.pages.names import PAGES
from tests.pages.program import Block, blocks_of, promised, run_block
from tests.patience import patient

_ALL = [page.name for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])]
_WITH_PYTHON = {name for name in _ALL if any(block.not_run is None for block in blocks_of(name))}


def test_every_page_with_python_is_run() -> None:
    assert PAGES.keys() == _WITH_PYTHON


def test_few_blocks_are_left_out_each_with_its_reason() -> None:
    left_out = [(name, block.not_run) for name in _ALL for block in blocks_of(name) if block.not_run is not None]
    assert all(reason and len(reason) > 10 for _, reason in left_out)
    assert len(left_out) <= 12, left_out  # most are of hosts that need a cluster, or that CI does not install


def test_a_comment_that_promises_another_value_is_found() -> None:
    assert promised("a.b  # 8.0: of all\n# 1\nf(x)  # the answer\n(1,\n 2)  # (1, 2)\n") == {1: 8.0, 5: (1, 2)}
    run_block(Block("2 + 2  # 4: of course\n", 1, None), "page.md", {})
    with pytest.raises(AssertionError, match=r"page\.md:7: 2 \+ 2 is 4"):
        run_block(Block("2 + 2  # 5\n", 7, None), "page.md", {})


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(name, marks=[pytest.mark.slow] * page.slow + [pytest.mark.ci] * page.in_ci)
        for name, page in PAGES.items()
    ],
)
def test_the_python_of_a_page_runs(page: str, tmp_path: Path) -> None:
    num_ranks = PAGES[page].num_ranks
    port = str(free_port())
    started = []
    for rank in range(num_ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        ranks = {name: str(value) for name, value in place.items()}
        variables = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, HF_HUB_OFFLINE="1", **ranks)
        command = [sys.executable, "-m", "tests.pages.program", page]
        started.append(ForkedPython(command, env=variables, cwd=tmp_path, stdout=-1, stderr=-1))
    ended = [process.communicate(timeout=patient(240)) for process in started]
    failed = [
        f"rank {rank}:\n{out[-500:]}\n{error[-3000:]}"
        for rank, (process, (out, error)) in enumerate(zip(started, ended, strict=True))
        if process.returncode != 0
    ]
    assert not failed, "\n".join(failed)
