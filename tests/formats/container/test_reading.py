"""Zipped safetensors files: every byte comes back, whole or in part, and what is no such file is refused."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import laconic
from laconic.errors import FormatError
from laconic.formats.archive import unzip, verify, zip_path
from laconic.formats.container import ContainerFile
from laconic.ops import entropy
from laconic.ops.reference import entropy as reference
from tests.formats.container.files import CHUNK, entry, same, tensors, touched, write


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("code", ["auto", "window", "raw", "best"])
def test_a_file_comes_back_byte_for_byte(code: Any, num_threads: int, plain: Path, tmp_path: Path) -> None:
    seen: list[int] = []
    made = zip_path(plain, code=code, num_threads=num_threads, progress=seen.append)
    assert made.path == tmp_path / "model.safetensors.laconic"
    assert made.zipped_nbytes == made.path.stat().st_size
    assert made.original_nbytes == plain.stat().st_size
    back = unzip(made.path, tmp_path / "back.safetensors", num_threads=num_threads)
    assert back.path.read_bytes() == plain.read_bytes()
    assert sum(seen) == sum(t.numel() * t.element_size() for t in tensors().values())
    assert verify(made.path, num_threads=num_threads).num_tensors == len(tensors())


@pytest.mark.parametrize("code", ["auto", "best"])
def test_zipping_is_reproducible(code: Any, plain: Path, tmp_path: Path) -> None:
    one = zip_path(plain, tmp_path / "one", code=code, num_threads=1).path.read_bytes()
    assert zip_path(plain, tmp_path / "two", code=code, num_threads=3).path.read_bytes() == one


def test_weights_shrink_by_a_third(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.randn(1 << 18, generator=torch.Generator().manual_seed(0)).bfloat16()}, path)
    made = zip_path(path)
    assert made.zipped_nbytes < 0.68 * made.original_nbytes
    best = zip_path(path, tmp_path / "best", code="best")
    assert best.zipped_nbytes < 0.663 * made.original_nbytes


@pytest.mark.parametrize("code", ["auto", "best"])
def test_tensors_are_loaded_without_unzipping(code: Any, plain: Path) -> None:
    loaded = laconic.load_zipped(zip_path(plain, code=code).path)
    expected = tensors()
    assert set(loaded) == set(expected)
    assert len(loaded) == len(expected)
    for name, tensor in expected.items():
        assert same(loaded[name], tensor), name
        assert (loaded.shape(name), loaded.dtype(name)) == (tensor.shape, tensor.dtype)
    assert loaded.metadata == {"format": "pt"}
    assert all(same(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    loaded["weight"].zero_()  # memory of its own
    assert same(loaded["weight"], expected["weight"])
    with pytest.raises(KeyError):
        loaded["wait"]


@pytest.mark.gpu
@pytest.mark.parametrize("code", ["auto", "best"])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_are_decoded_on_a_gpu(code: Any, pair: tuple[Path, Path]) -> None:
    plain, later = pair
    for loaded, expected in (
        (laconic.load_zipped(zip_path(plain, code=code).path, device="cuda"), tensors()),
        (
            laconic.load_zipped(zip_path(later, base=plain, code=code).path, base=plain, device="cuda"),
            touched(tensors()),
        ),
    ):
        assert all(loaded[name].is_cuda for name in expected)
        assert all(same(loaded[name].cpu(), tensor) for name, tensor in expected.items())


def test_best_is_not_larger_where_windows_fit_better(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale that changes every 4096 elements is one that no code for all of them fits."""
    monkeypatch.undo()
    path = tmp_path / "rows.safetensors"
    scales = 2.0 ** -torch.arange(256)[:, None].div(4)
    rows = torch.randn(256, 4096, generator=torch.Generator().manual_seed(0)) * scales
    save_file({"rows": rows.bfloat16(), "few": torch.ones(3), "steps": torch.arange(7)}, path)
    auto, best = zip_path(path, tmp_path / "auto"), zip_path(path, tmp_path / "best", code="best")
    assert best.zipped_nbytes <= auto.zipped_nbytes
    assert unzip(best.path, tmp_path / "back").path.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("period", [2, 3, 8, 16, 31, 32, 64])
def test_best_sees_scales_that_change_between_rows_of_one_scale(
    period: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at rows a fixed distance apart could meet those of one scale only."""
    monkeypatch.undo()
    path = tmp_path / "rows.safetensors"
    dice = torch.Generator().manual_seed(0)
    scales = 2.0 ** torch.randint(-60, 60, (512, 1), generator=dice)
    scales[::period] = 1
    rows = torch.randn(512, 4096, generator=dice) * scales
    save_file({"rows": rows.bfloat16()}, path)
    auto, best = zip_path(path, tmp_path / "auto"), zip_path(path, tmp_path / "best", code="best")
    assert best.zipped_nbytes <= auto.zipped_nbytes


def test_a_plain_file_is_loaded_too(plain: Path) -> None:
    loaded = laconic.load_zipped(plain)
    assert all(same(loaded[name], tensor) for name, tensor in tensors().items())


def test_a_part_of_a_tensor_is_read(plain: Path) -> None:
    zipped = ContainerFile(zip_path(plain).path)
    whole = tensors()["double"].view(torch.uint8)
    for start, stop in [(0, 0), (1, 2), (CHUNK - 1, CHUNK + 1), (100, 3 * CHUNK), (0, len(whole))]:
        assert torch.equal(zipped.read("double", start, stop), whole[start:stop])


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ({}, b""),
        ({"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}, b""),
        # Out of order, with spaces, and data that is not aligned.
        (
            b'{"b": {"data_offsets":[ 6,10],"shape":[1],"dtype":"F32"}, "a":{"dtype":"BF16","shape":[3],'
            b'"data_offsets":[0,6]} , "__metadata__":{"k":"v"}}   ',
            bytes(range(10)),
        ),
        ({"a": {"dtype": "F4", "shape": [4, 2], "data_offsets": [0, 4]}}, b"abcd"),
        ({"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}, b"abc"),
    ],
)
@pytest.mark.parametrize("code", ["auto", "window", "raw", "best"])
def test_unusual_files_come_back(code: Any, header: Any, data: bytes, tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", header, data)
    made = zip_path(path, code=code)
    assert unzip(made.path, tmp_path / "back").path.read_bytes() == path.read_bytes()
    verify(made.path)


@pytest.mark.parametrize("implementation", ["c++", "reference"])
@pytest.mark.parametrize("code", ["auto", "window", "raw", "best"])
def test_files_whose_data_is_not_aligned_come_back(
    code: Any, implementation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if implementation == "reference":
        monkeypatch.setattr(entropy, "_implementation", lambda: reference)
    generator = torch.Generator().manual_seed(0)
    header, data, end = {}, b"", 0
    for name, dtype in (("BF16", torch.bfloat16), ("F16", torch.float16), ("F32", torch.float32), ("I64", torch.int64)):
        values = torch.randn(700, generator=generator).mul(100).to(dtype).view(torch.uint8).numpy().tobytes()
        header[name] = entry(end, end + len(values), name, [700])
        data, end = data + values, end + len(values)
    text = json.dumps(header).encode()
    for num_spaces in range(8):
        (folder := tmp_path / str(num_spaces)).mkdir()
        spaced = text + b" " * (-len(text) % 8 + num_spaces)
        path = write(folder / "a.safetensors", spaced, data)
        made = zip_path(path, code=code)
        assert unzip(made.path, folder / "back").path.read_bytes() == path.read_bytes(), num_spaces
        later = write(folder / "later.safetensors", spaced, data[:-8] + bytes(8))
        changed = zip_path(later, base=path, code=code)
        assert unzip(changed.path, folder / "changed", base=path).path.read_bytes() == later.read_bytes(), num_spaces


@pytest.mark.parametrize("num_bytes", [1, 2, 8])
def test_chunks_of_changing_scale_need_not_be_aligned(
    num_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the whole chunk is laid out in its own dtype, not the sample only."""
    monkeypatch.undo()
    scales = 2.0 ** -torch.arange(64)[:, None].div(2)
    rows = (torch.randn(64, 4096, generator=torch.Generator().manual_seed(0)) * scales).bfloat16()
    text = json.dumps({"a": entry(0, rows.nbytes, "BF16", [64, 4096])}).encode()
    text += b" " * (-(len(text) + 8) % 64 + num_bytes)
    path = write(tmp_path / "a.safetensors", text, rows.view(torch.uint8).numpy().tobytes())
    best = zip_path(path, code="best")
    assert best.zipped_nbytes < 0.7 * best.original_nbytes
    assert unzip(best.path, tmp_path / "back").path.read_bytes() == path.read_bytes()


def test_what_torch_cannot_hold_is_said(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", {"a": {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}}, b"abcd")
    loaded = laconic.load_zipped(zip_path(path).path)
    with pytest.raises(FormatError, match="tensor 'a' has dtype F4, which torch cannot hold"):
        loaded["a"]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": entry(0, 6), "b": entry(5, 10)}, "'b' begins at byte 5 of the data, but the one before it ends at 6"),
        ({"a": entry(0, 4), "b": entry(5, 10)}, "'b' begins at byte 5 .* ends at 4"),
        ({"a": entry(1, 10)}, "'a' begins at byte 1"),
        ({"a": entry(0, 9)}, "its tensors have 9 bytes, but the data has 10"),
        ({"a": entry(0, 11)}, "its tensors have 11 bytes, but the data has 10"),
        ({"a": entry(0, 10, shape=[11])}, r"'a' has 10 bytes, but U8 of shape \[11\] takes 88 bits"),
        ({"a": entry(0, 10, shape=[2**62, 2**62])}, "'a' has 10 bytes, but"),
        ({"a": entry(0, 10, shape=[-10])}, "'a' has shape"),
        ({"a": entry(0, 10, shape=[10.0])}, "'a' has shape"),
        ({"a": entry(0, 10, shape=[True, 10])}, "'a' has shape"),
        ({"a": entry(0, 10, dtype="F128")}, "'a' has dtype 'F128'; known are BF16"),
        ({"a": entry(0, 10, dtype=["U8"])}, "'a' has dtype"),
        ({"a": entry(0, 10) | {"data_offsets": [10, 0]}}, "'a' has data_offsets"),
        ({"a": entry(0, 10) | {"data_offsets": [0]}}, "'a' has data_offsets"),
        ({"a": entry(0, 10) | {"more": 1}}, "'a' must have dtype, shape and data_offsets"),
        ({"a": [0, 10]}, "'a' must have dtype"),
        ({"__metadata__": {"a": 1}}, "__metadata__ must be a table of strings"),
        (b'{"a": {}, "a": {}}', "not valid JSON .*'a' comes twice"),
        (b"[1]", "is a list, but it must be an object"),
        (b'{"a"', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
    ],
)
def test_a_false_safetensors_header_is_refused(header: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", header, bytes(10))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(FormatError, match=f"^{path}: .*{message}"):
        zip_path(path)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 9, struct.pack("<Q", 1 << 40) + b"{}"])
def test_what_is_no_safetensors_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"a\.safetensors: "):
        zip_path(path)
    path.rename(tmp_path / "a.safetensors.laconic")
    with pytest.raises(FormatError, match="not a file that `laconic zip` wrote"):
        unzip(tmp_path / "a.safetensors.laconic")
