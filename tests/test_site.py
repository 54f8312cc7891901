"""The documentation builds as a site: no warning, every page found by the search, nothing from other hosts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.processes import ROOT, environment


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    quiet = environment(PYTHONWARNINGS="ignore", NO_MKDOCS_2_WARNING="1")
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_in_the_menu_and_found_by_the_search(site: Path) -> None:
    found = {
        entry["location"].partition("#")[0]
        for entry in json.loads((site / "search/search_index.json").read_text())["docs"]
    }
    menu = (site / "index.html").read_text()
    for page in [path.stem for path in (ROOT / "docs").glob("*.md")]:
        if page != "index":
            assert f"{page}.html" in found
            assert f'href="{page}.html"' in menu


def test_links_to_the_repository_lead_to_copies_in_the_site(site: Path) -> None:
    overview = (site / "overview.html").read_text()
    assert 'src="files/benchmarks/results/quality_attention_xeon_202611.png"' in overview
    assert (site / "files/benchmarks/results/quality_attention_xeon_202611.png").stat().st_size > 10_000
    for page in site.rglob("*.html"):
        for target in re.findall(r'href="([^"#:]+\.(?:html|png))', page.read_text()):
            assert (page.parent / target).exists() or page.name == "404.html", f"{target} in {page.name}"


def test_nothing_is_fetched_from_other_hosts(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert not re.findall(r'(?:src|<link[^>]*stylesheet[^>]*href)="(https?:[^"]*)"', text), page.name
