"""What would be faster: each finding from the reading that causes it, and none from a good machine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from laconic.cli import host
from laconic.cli.host import Host, improvements, links, read_host
from laconic.installation import IS_RELEASED, command, source

GOOD = Host(
    kernels="c++",
    num_threads=8,
    num_cores=8,
    huge_pages="madvise",
    torch_version="2.13.0+cpu",
    open_files=65536,
    locked_nbytes=-1,
    shared_nbytes=1 << 33,
    gloo_interfaces=("eth0",),
    interfaces=("lo", "eth0"),
    cuda_without_triton=False,
)


def test_a_good_machine_has_nothing_to_improve() -> None:
    assert list(improvements(GOOD)) == []
    unknown = dataclasses.replace(GOOD, kernels=None, huge_pages=None, open_files=-1, locked_nbytes=None)
    assert list(improvements(dataclasses.replace(unknown, shared_nbytes=None))) == []


@pytest.mark.parametrize(
    ("change", "finding", "remedy"),
    [
        ({"kernels": "reference"}, "the C++ kernels are not in use", source()),
        ({"num_threads": 1}, "torch uses 1 of 8 cores", "OMP_NUM_THREADS"),
        ({"huge_pages": "never"}, "transparent huge pages are off", "echo madvise"),
        ({"torch_version": "2.11.1"}, "torch 2.11 is older than 2.13", "pip install 'torch>=2.13'"),
        ({"torch_version": "2.9.0"}, "torch 2.9 is older than 2.13", "pip install"),
        ({"open_files": 1024}, "a process may open 1024 files", "ulimit -n"),
        ({"locked_nbytes": 65536}, "a process may lock 65.54 KB", "ulimit -l unlimited"),
        ({"shared_nbytes": 1 << 26}, "/dev/shm holds 67.11 MB", "--shm-size"),
        ({"gloo_interfaces": ("eth7",)}, "GLOO_SOCKET_IFNAME names eth7", "name one of lo, eth0"),
        ({"cuda_without_triton": True}, "there is a GPU, but no Triton", "pip install triton"),
    ],
)
def test_each_reading_has_its_finding_and_remedy(change: dict[str, Any], finding: str, remedy: str) -> None:
    ((found, remedy_of_it),) = improvements(dataclasses.replace(GOOD, **change))
    assert finding in found
    assert remedy in remedy_of_it


def test_this_machine_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nowhere0")
    found = read_host({"cpu": {"implementation": "reference"}})
    assert found.kernels == "reference"
    assert found.gloo_interfaces == ("lo", "nowhere0")
    assert any("nowhere0" in finding for finding, _ in improvements(found))
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    assert host._huge_pages(tmp_path / "enabled") == "madvise"
    assert host._huge_pages(tmp_path / "absent") is None


def test_links_have_a_measured_loopback() -> None:
    *_, loopback = links()
    assert loopback["name"] == "loopback"
    assert loopback["bytes_per_second"] > 0


def test_installing_again_names_where_this_laconic_came_from(tmp_path: Path) -> None:
    checkout = tmp_path / "a folder"
    checkout.mkdir()
    url = checkout.as_uri()
    assert source(json.dumps({"url": url, "dir_info": {"editable": True}})) == f"-e '{checkout}'"
    assert source(json.dumps({"url": url, "dir_info": {}})) == f"'{checkout}'"
    checkout.rmdir()
    gone = source(json.dumps({"url": url, "archive_info": {}}))
    assert gone == source("") == ("laconic" if IS_RELEASED else "CHECKOUT_OR_WHEEL")


def test_the_command_is_named_as_this_shell_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = tmp_path / "a folder", tmp_path / "other"
    for folder in (own, other):
        folder.mkdir()
        (folder / "laconic").write_text("#!/bin/sh\n")
        (folder / "laconic").chmod(0o755)
    monkeypatch.setattr("sys.executable", str(own / "python"))
    monkeypatch.setenv("PATH", str(own))
    assert command() == "laconic"
    monkeypatch.setenv("PATH", str(other))
    assert command() == f"'{own}/laconic'"
    (own / "laconic").unlink()  # python -m laconic in an environment that has no such program
    assert command() == "laconic"
