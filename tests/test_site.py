"""The documentation builds as a site: no warning, every page found by the search, nothing from other hosts."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from laconic.cli.main import COMMANDS
from tests.browser import browser, served
from tests.distributed.forked import ForkedPython
from tests.distributed.processes import ROOT, environment
from tests.patience import patient

pytestmark = pytest.mark.slow  # the build imports every package and draws


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    quiet = environment(PYTHONWARNINGS="ignore", NO_MKDOCS_2_WARNING="1")
    process = ForkedPython(command, cwd=ROOT, env=quiet, stdout=-1, stderr=-1)
    _, error = process.communicate(timeout=patient(280))
    assert process.returncode == 0, error
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
    pictures = re.findall(r"\((benchmarks/results/[^)]+\.png)\)", (ROOT / "README.md").read_text())
    assert pictures
    for picture in pictures:
        assert f'src="files/{picture}"' in overview
        assert (site / "files" / picture).stat().st_size > 10_000
    for page in site.rglob("*.html"):
        for target in re.findall(r'href="([^"#:]+\.(?:html|png))', page.read_text()):
            assert (page.parent / target).exists() or page.name == "404.html", f"{target} in {page.name}"


def test_nothing_is_fetched_from_other_hosts(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert not re.findall(r'(?:src|<link[^>]*stylesheet[^>]*href)="(https?:[^"]*)"', text), page.name


def test_reference_has_signatures_docstrings_flags_and_fields(site: Path) -> None:
    api = (site / "reference/laconic.html").read_text()
    assert 'id="compress_activations"' in api
    assert "Raises" in api
    assert "{ #" not in api, "an identifier is shown instead of set"
    names = (site / "api.html").read_text()
    for package, name in [("laconic", "advise"), ("laconic.moe", "grid")]:
        assert f'href="reference/{package}.html#{name}"' in names
    commands = (site / "reference/cli.html").read_text()
    assert all(f'id="laconic-{name}"' in commands for name in COMMANDS)
    fields = (site / "reference/configuration.html").read_text()
    assert 'id="activations"' in fields
    assert "sequence_length" in fields


def test_pictures_are_drawn_from_the_tables(site: Path) -> None:
    page = (site / "benchmarks_pictures.html").read_text()
    for picture in re.findall(r'<img[^>]*src="([^"]+)"', page):
        assert (site / picture).stat().st_size > 3000, picture
    assert page.count('src="charts/') == 4


def test_the_search_answers_in_a_browser(site: Path) -> None:
    with served(site) as url, browser() as chromium:
        page = chromium.new_page()
        page.goto(f"{url}/index.html")
        page.fill(".md-search__input", "activations")
        page.wait_for_selector(".md-search-result__link", timeout=60_000)
        links = [link.get_attribute("href") for link in page.query_selector_all(".md-search-result__link")]
        assert any("activations.html" in link for link in links), links
        page.fill(".md-search__input", "OOM")
        page.wait_for_selector(".md-search-result__link[href*='troubleshooting.html']", timeout=60_000)


@pytest.mark.timeout(900)
def test_pages_fit_a_phone(site: Path) -> None:
    with served(site) as url, browser() as chromium:
        page = chromium.new_page(viewport={"width": 390, "height": 844}, color_scheme="dark")
        for path in sorted(site.glob("*.html")):
            page.goto(f"{url}/{path.name}")
            beyond = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
            assert beyond <= 0, f"{path.name} is {beyond} pixels wider than its window"
