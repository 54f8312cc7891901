"""Files zipped as the difference to a base."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import laconic
from laconic.errors import FormatError
from laconic.formats.archive import unzip, verify, zip_path
from laconic.formats.container import ContainerFile
from tests.formats.container.files import same, tensors, touched


@pytest.mark.parametrize("code", ["auto", "best"])
@pytest.mark.parametrize("zipped_base", [False, True])
def test_a_difference_comes_back(zipped_base: bool, code: Any, pair: tuple[Path, Path], tmp_path: Path) -> None:
    plain, later = pair
    base = zip_path(plain, code=code).path if zipped_base else plain
    made = zip_path(later, base=base, code=code)
    assert made.zipped_nbytes < 0.5 * zip_path(later, tmp_path / "direct", code=code).zipped_nbytes
    assert unzip(made.path, tmp_path / "back", base=plain).path.read_bytes() == later.read_bytes()
    assert verify(made.path, base=base).unchecked is None
    assert verify(made.path).unchecked == str(base)
    expected = touched(tensors())
    for given in (plain, base, tensors()):
        loaded = laconic.load_zipped(made.path, base=given)
        assert all(same(loaded[name], tensor) for name, tensor in expected.items())
    assert same(laconic.load_zipped(made.path)["new"], expected["new"])  # it was not in the base


@pytest.mark.parametrize("code", ["auto", "best"])
def test_an_unchanged_tensor_costs_nothing(code: Any, plain: Path, tmp_path: Path) -> None:
    made = zip_path(plain, base=plain, code=code)
    stored = ContainerFile(made.path).stored
    assert all(set(s.messages) <= {(64, 0)} for s in stored.values())
    assert made.zipped_nbytes < 250 * len(tensors())
    assert unzip(made.path, tmp_path / "back", base=plain).path.read_bytes() == plain.read_bytes()


def test_a_difference_that_is_longer_is_not_stored(plain: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    save_file(tensors(seed=5) | {"weight": tensors(seed=5)["weight"] * 1e3}, other)
    made = zip_path(plain, base=other)
    assert ContainerFile(made.path).stored["weight"].base_checksum is None
    assert ContainerFile(made.path).stored["zeros"].base_checksum is not None
    assert unzip(made.path, tmp_path / "back", base=other).path.read_bytes() == plain.read_bytes()


def test_another_base_is_refused_and_both_are_named(pair: tuple[Path, Path], tmp_path: Path) -> None:
    plain, later = pair
    zipped = zip_path(later, base=plain).path
    other = tmp_path / "other.safetensors"
    changed = tensors()
    changed["weight"].view(torch.int16)[7, 7] ^= 1
    save_file(changed, other)
    for base in (other, zip_path(other).path):
        with pytest.raises(
            FormatError, match=f"'weight' is stored as the difference to '{plain}' .*given, {base}, has"
        ):
            unzip(zipped, tmp_path / "back", base=base)
        with pytest.raises(FormatError, match="give the one it was zipped with"):
            verify(zipped, base=base)
    with pytest.raises(FormatError, match=f"difference to '{plain}', which is needed to read it"):
        unzip(zipped, tmp_path / "back")
    with pytest.raises(FormatError, match="which is needed to read it"):
        laconic.load_zipped(zipped)["weight"]
    save_file({"weight": torch.ones(3)}, other)
    with pytest.raises(FormatError, match=r"has no such tensor"):
        unzip(zipped, tmp_path / "back", base=other)
    assert not (tmp_path / "back").exists()


def test_flipped_bits_of_a_difference_are_found(tmp_path: Path) -> None:
    base, later = tmp_path / "b.safetensors", tmp_path / "l.safetensors"
    values = torch.randn(300, generator=torch.Generator().manual_seed(1)).bfloat16()
    save_file({"a": values}, base)
    values[5] += 1
    save_file({"a": values}, later)
    zipped = zip_path(later, base=base).path
    content = zipped.read_bytes()
    for position in range(0, len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        zipped.write_bytes(damaged)
        with pytest.raises(FormatError, match=zipped.name):
            verify(zipped)
        with pytest.raises(FormatError, match=zipped.name):
            unzip(zipped, tmp_path / "back", base=base)


# Directories.


def test_best_is_not_larger_where_differences_change_their_size_between_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There planes by tiers are shortest, which `auto` finds."""
    monkeypatch.undo()
    dice = torch.Generator().manual_seed(0)
    words = torch.randn(512, 4096, generator=dice).bfloat16()
    widths = torch.randint(0, 14, (512, 1), generator=dice)
    flips = (torch.randint(0, 1 << 30, (512, 4096), generator=dice) % 2**widths).to(torch.int16)
    save_file({"w": words}, tmp_path / "base.safetensors")
    later = tmp_path / "later.safetensors"
    save_file({"w": (words.view(torch.int16) ^ flips).view(torch.bfloat16)}, later)
    base = tmp_path / "base.safetensors"
    auto = zip_path(later, tmp_path / "auto.laconic", base=base)
    best = zip_path(later, tmp_path / "best.laconic", base=base, code="best")
    assert best.zipped_nbytes <= auto.zipped_nbytes
    assert unzip(best.path, tmp_path / "back", base=base).path.read_bytes() == later.read_bytes()
