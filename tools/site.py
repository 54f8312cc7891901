"""Hook of mkdocs: what pages link to outside of docs/ becomes part of the site, and pages are made from the code.

Pages are written to be read where the repository is, too, so their links lead to files of it. The README is a page of
the site; other Markdown and programs become pages of their own, pictures are copied, folders become lists. Reference
(site_reference.py), pictures of measured tables (site_charts.py) and notebooks (site_notebooks.py) are made at each
build and never committed.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import site_charts
import site_notebooks
import site_reference
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(\]\()\.\./([^)#\s]+)(#[^)\s]*)?\)")
_PAGES = {"README.md": "overview.md"}  # mkdocs would take a README for the index


def _address() -> str | None:
    """Where this clone came from, as an address for a browser; None if that is no host of repositories."""
    command = ["git", "-C", str(ROOT), "config", "--get", "remote.origin.url"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    match = re.fullmatch(r"(?:https://(?:[^@/]*@)?|git@|ssh://git@)([\w.-]+)[:/](.+?)(?:\.git)?/?", found)
    return f"https://{match[1]}/{match[2]}" if match else None


def on_config(config: Any) -> Any:
    """Put pages that are made into the menu."""
    menus = {title: entries for section in config["nav"] for title, entries in section.items()}
    menus["Start"] += site_notebooks.menu()
    menus["Reference"] += site_reference.menu()
    menus["Benchmarks"].append(site_charts.PAGE)
    return config


def _place(target: str) -> str:
    """Where a file of the repository is in the site, from the folder of the documentation."""
    path = ROOT / target
    if target in _PAGES:
        return _PAGES[target]
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    if path.is_dir():
        return f"files/{target.rstrip('/')}/list.md"
    return f"files/{target}" + ("" if path.suffix in (".md", ".png") else ".md")


def _linked(text: str) -> list[str]:
    return [match[2] for match in _LINK.finditer(text)]


def on_files(files: Any, config: Any) -> Any:
    """Add what pages link to."""
    texts = [path.read_text() for path in (ROOT / "docs").glob("*.md")]
    readme = re.sub(r"\]\((?!http|#|docs/)", "](../", (ROOT / "README.md").read_text()).replace("](docs/", "](")
    targets = {target for text in [*texts, readme] for target in _linked(text)} - set(_PAGES)
    files.append(File.generated(config, _PAGES["README.md"], content=readme))
    made = {**site_reference.pages(), **site_charts.pages(), **site_notebooks.pages()}
    for place, content in made.items():
        files.append(File.generated(config, place, content=content))
    targets |= set(site_charts.sources())
    for folder in [target for target in targets if (ROOT / target).is_dir()]:
        targets |= {str(path.relative_to(ROOT)) for path in (ROOT / folder).glob("*.md")}
        targets |= {str(path.relative_to(ROOT)) for path in (ROOT / folder).glob("*.png")}
    for target in sorted(targets):
        path, place = ROOT / target, _place(target)
        if path.is_dir():
            names = sorted(found.name for found in path.glob("*.md"))
            content: str | bytes = f"# {target}\n\n" + "".join(f"- [{name}]({name})\n" for name in names)
        elif path.suffix == ".md":
            content = path.read_text() if target.startswith("benchmarks/") else _outside(path.read_text())
        elif path.suffix == ".png":
            content = path.read_bytes()
        else:
            content = f"# {target}\n\n```{path.suffix.removeprefix('.')}\n{path.read_text()}```\n"
        files.append(File.generated(config, place, content=content))
    return files


def _outside(text: str) -> str:
    """A page from the root of the repository, without its links."""
    return re.sub(r"\[([^\]]*)\]\((?!http)[^)]*\)", r"\1", text)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let links to the repository lead to the site's own copies."""
    if "/" in page.file.src_uri:  # copies, and pages that are made: their links are the site's already
        return markdown
    if page.file.src_uri == "api.md":
        return site_reference.linked_names(markdown)
    if address := _address():
        markdown = markdown.replace("git clone ADDRESS", f"git clone {address}")
        if page.file.src_uri == "index.md":
            # As a line of text: the theme's own link would ask the host for its stars.
            markdown = markdown.replace("\n## ", f"\nThe repository: [{address}]({address}).\n\n## ", 1)
    return _LINK.sub(lambda match: f"{match[1]}{_place(match[2])}{match[3] or ''})", markdown)
