"""A checkpoint of the very model in fewer bytes: laconic beside ZipNN, zstd and blosc2, there and back in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

import laconic
from benchmarks.contenders.training import Training, exact_optimizer
from benchmarks.kit.peers import installed
from benchmarks.kit.timing import Timing, seconds_of
from benchmarks.registry import dtype_name
from laconic.activations.whole_model.report import brief
from laconic.formats.archive import unzip, zip_path
from laconic.formats.chunk import Code

_ZSTD_LEVEL = 3


@dataclass
class Coded:
    """One coder on one checkpoint."""

    name: str
    nbytes: int = 0
    there: Timing | None = None
    back: Timing | None = None
    failure: str = ""


def checkpoints(model: nn.Module, ids: Tensor, steps: int = 3) -> dict[str, dict[str, Tensor]]:
    """Tensors of the model after some steps on text: weights as bf16 and fp32, moments of Adam."""
    training = Training(model.train())
    training.optimizer = exact_optimizer(model, 1e-3)
    for _ in range(steps):
        training.step(ids)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    state = training.optimizer.state
    moments = {
        f"{name}.{key}": state[parameter][key]
        for name, parameter in model.named_parameters()
        for key in ("exp_avg", "exp_avg_sq")
    }
    return {
        "weights, bf16": {name: weight.bfloat16() for name, weight in weights.items()},
        "weights, fp32": weights,
        "moments of AdamW, fp32": moments,
    }


def _size(path: Path) -> int:
    return path.stat().st_size


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


Pair = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], int], Callable[[Any], bool]]
"""Code; decode what was coded; its bytes; whether what came back is what it was."""


def code(tensors: dict[str, Tensor], threads: int, rounds: int) -> tuple[int, list[Coded]]:
    """Bytes of the checkpoint, and what each coder makes of it."""
    values = list(tensors.values())
    whole = save(tensors)
    nbytes = sum(value.nbytes for value in values)
    found: list[Coded] = []
    cases: dict[str, Callable[[], Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, make in _coders(values, whole, threads, Path(folder)).items():
            row = Coded(name)
            found.append(row)
            if make is None:
                row.failure = "not installed"
                continue
            try:
                there, back, size, same = make
                coded = there()
                row.nbytes = size(coded)
                if not same(back(coded)):
                    row.failure = "failed: other bytes came back"
                    continue
            except Exception as error:  # a peer's own, whatever it is
                row.failure = f"failed: {brief(error)}"
                continue
            cases |= {f"{name} there": there, f"{name} back": lambda back=back, coded=coded: back(coded)}
        seconds = seconds_of(cases, rounds)
    for row in found:
        row.there, row.back = seconds.get(f"{row.name} there"), seconds.get(f"{row.name} back")
    return nbytes, found


def _coders(values: list[Tensor], whole: bytes, threads: int, folder: Path) -> dict[str, Pair | None]:
    dtype = values[0].dtype
    source, zipped, returned = (folder / name for name in ("model.safetensors", "zipped.laconic", "returned"))
    source.write_bytes(whole)

    def zip_file(code: Code = "auto") -> Path:
        zipped.unlink(missing_ok=True)
        zip_path(source, zipped, code=code, num_threads=threads)
        return zipped

    def unzip_file(path: Path) -> Path:
        returned.unlink(missing_ok=True)
        unzip(path, returned, num_threads=threads)
        return returned

    def equal_bytes(back: Any) -> bool:
        return bytes(back) == whole

    def is_source(path: Path) -> bool:
        return path.read_bytes() == whole

    coders: dict[str, Pair | None] = {
        "laconic, encode": (
            lambda: [laconic.encode(value) for value in values],
            lambda coded: [laconic.decode(buffer) for buffer in coded],
            lambda coded: sum(buffer.nbytes for buffer in coded),
            lambda back: all(map(_same_bytes, values, back)),
        ),
        "laconic, zip (files)": (zip_file, unzip_file, _size, is_source),
        "laconic, zip --best (files)": (lambda: zip_file("best"), unzip_file, _size, is_source),
        "ZipNN": None,
        f"zstd -{_ZSTD_LEVEL}": None,
        "blosc2, zstd and bit shuffle": None,
    }
    if zipnn := installed("zipnn"):
        peer = zipnn.ZipNN(bytearray_dtype=dtype_name(dtype), threads=threads)
        # ZipNN writes to the bytes that it is given.
        coders["ZipNN"] = (lambda: peer.compress(bytearray(whole)), peer.decompress, len, equal_bytes)
    if zstandard := installed("zstandard"):
        there, back = zstandard.ZstdCompressor(_ZSTD_LEVEL, threads=threads), zstandard.ZstdDecompressor()
        coders[f"zstd -{_ZSTD_LEVEL}"] = (lambda: there.compress(whole), back.decompress, len, equal_bytes)
    if blosc2 := installed("blosc2"):
        blosc2.set_nthreads(threads)
        how = {"typesize": dtype.itemsize, "codec": blosc2.Codec.ZSTD, "filter": blosc2.Filter.BITSHUFFLE}
        coders["blosc2, zstd and bit shuffle"] = (
            lambda: blosc2.compress(whole, **how), blosc2.decompress, len, equal_bytes,
        )  # fmt: skip
    return coders
