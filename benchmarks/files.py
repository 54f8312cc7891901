"""Checkpoints in fewer bytes: files that the trainer wrote, zipped by `laconic zip`, ZipNN and zstd.

`laconic train` trains a Llama of 15 million parameters for 30 steps; its export is the fp32 file, converted the bf16,
fp16 and fp8 ones, and its checkpoint is weights and moments. Times are of whole commands on files: read, code, write,
fsync; the limit is a copy. All files are in the page cache. The last table is about differences between two
checkpoints: ten steps of training, and ten of fine-tuning with a small learning rate.
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.kit.peers import installed
from benchmarks.kit.timing import seconds_of
from benchmarks.registry import Options, Table, benchmark, dtype_name, kernels_note
from laconic.cli.main import main
from laconic.formats.archive import unzip, zip_path

_SMALL = {"hidden-size": 64, "intermediate-size": 192, "num-hidden-layers": 2, "num-attention-heads": 2}
_LARGE = {"hidden-size": 384, "intermediate-size": 1152, "num-hidden-layers": 8, "num-attention-heads": 6}
_STEPS = (20, 30)

Command = Callable[[Path, Path], object]
"""Reads the first file and writes the second."""


@benchmark("files")
def files(options: Options) -> list[Table]:
    """Sizes and times of files; differences."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        small = options.small
        run = _trained(root / "run", small, "adamw")
        made = {
            "weights, bf16": _converted(root, run, _STEPS[1], torch.bfloat16),
            "weights, fp32": _exported(root, run, _STEPS[1]),
            "weights, fp16": _converted(root, run, _STEPS[1], torch.float16),
            "weights, fp8 (e4m3)": _converted(root, run, _STEPS[1], torch.float8_e4m3fn),
            "checkpoint, fp32: weights, AdamW": _checkpoint(root / "adamw.safetensors", run),
            "checkpoint: weights, AdamW8bit": _checkpoint(
                root / "adamw8bit.safetensors", _trained(root / "run8", small, "adamw8bit")
            ),
        }
        sizes, times = [], []
        for name, path in made.items():
            size, time = _measured(name, path, root, options)
            sizes += size
            times += time
        return [
            Table("Size, share of the original", ["", "MB", *_coders(options)], sizes),
            Table(
                f"MB/s there / back, {options.thread_text}",
                ["", "copy", *_coders(options)],
                times,
                f"Of original bytes. {kernels_note()}",
            ),
            _differences(root, run, small, options),
        ]


def _trained(run: Path, small: bool, optimizer: str) -> Path:
    sizes = [f"--model.{key}={size}" for key, size in (_SMALL if small else _LARGE).items()]
    _train(run, small, optimizer, _STEPS[1], sizes)
    return run


def _train(run: Path, small: bool, optimizer: str, steps: int, extra: list[str]) -> None:
    fixed = f"--nproc 1 --steps {steps} --checkpoint.every 10 --checkpoint.keep 9 --checkpoint.zip --eval-every 0"
    shape = f"--sequence-length {32 if small else 128} --batch-size 4 --optimizer.kind {optimizer}"
    _laconic("train", "--run-dir", str(run), *extra, *fixed.split(), *shape.split())


def _laconic(*arguments: str) -> None:
    """Carry out a command of laconic in this process, which has imported all that it needs."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as errors:
        code = main(arguments)
    if code:
        raise RuntimeError(f"laconic {' '.join(arguments)} ended with {code}:\n{errors.getvalue()}")


def _exported(root: Path, run: Path, step: int) -> Path:
    out = root / f"hf-{run.name}-{step}"
    if not out.exists():
        _laconic("export", str(run), str(out), "--checkpoint", str(step))
    return out / "model.safetensors"


def _converted(root: Path, run: Path, step: int, dtype: torch.dtype) -> Path:
    path = root / f"{dtype_name(dtype)}-{run.name}-{step}.safetensors"
    weights = load_file(_exported(root, run, step))
    save_file({name: weight.to(dtype) for name, weight in weights.items()}, path, metadata={"format": "pt"})
    return path


def _checkpoint(path: Path, run: Path) -> Path:
    shard = run / "checkpoints" / f"step-{_STEPS[1]:08d}" / "__0_0.safetensors.laconic"
    unzip(shard, path)
    return path


def _coders(options: Options) -> dict[str, tuple[Command, Command]]:
    """Name -> (there, back), of what is installed."""
    back = partial(unzip, num_threads=options.threads)
    found: dict[str, tuple[Command, Command]] = {
        "**laconic zip**": (partial(zip_path, num_threads=options.threads), back),
        "laconic zip, window": (partial(zip_path, code="window", num_threads=options.threads), back),
        "laconic zip --best": (partial(zip_path, code="best", num_threads=options.threads), back),
    }
    if installed("zipnn"):
        found["ZipNN"] = (
            _on_bytes(lambda data, path: _zipnn(path, options).compress(data)),
            _on_bytes(lambda data, path: _zipnn(path, options).decompress(data)),
        )
    if installed("zstandard"):
        found |= {f"zstd -{level}": _zstd(level, options) for level in (1, 3)}
    return found


def _zipnn(path: Path, options: Options) -> Any:
    """ZipNN set up for the type that most of the file has."""
    names = {"bfloat16": "bfloat16", "float16": "float16", "float8_e4m3fn": "float8_e4m3fn"}
    dtype = next((name for prefix, name in names.items() if path.name.startswith(prefix)), "float32")
    return installed("zipnn").ZipNN(bytearray_dtype=dtype, threads=options.threads)


def _zstd(level: int, options: Options) -> tuple[Command, Command]:
    zstandard = installed("zstandard")
    there = zstandard.ZstdCompressor(level, threads=options.threads)
    return _on_bytes(lambda data, path: there.compress(data)), _on_bytes(
        lambda data, path: zstandard.ZstdDecompressor().decompress(data)
    )


def _on_bytes(code: Callable[..., Any]) -> Command:
    def run(path: Path, out: Path) -> None:
        data = code(bytearray(path.read_bytes()), path)
        with open(out, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    return run


def _copy(path: Path, out: Path) -> None:
    shutil.copyfile(path, out)
    with open(out, "rb") as file:
        os.fsync(file.fileno())


def _measured(name: str, path: Path, root: Path, options: Options) -> tuple[list[list[str]], list[list[str]]]:
    """A row of sizes and one of times."""
    nbytes = path.stat().st_size
    size, time = [name, f"{nbytes / 1e6:.1f}"], [name]
    cases: dict[str, Callable[[], object]] = {"copy": _repeatable(_copy, path, root / "copy")}
    results = {}
    for coder, (there, back) in _coders(options).items():
        # The file keeps the beginning of its name, by which ZipNN's setting is found.
        results[coder] = root / f"{path.stem}.{len(results)}"
        cases[f"{coder} there"] = _repeatable(there, path, results[coder])
        cases[f"{coder} back"] = _repeatable(back, results[coder], root / f"{path.stem}.back")
        try:
            cases[f"{coder} there"]()
            cases[f"{coder} back"]()
            same = (root / f"{path.stem}.back").read_bytes() == path.read_bytes()
        except Exception as error:  # a peer's own, whatever it is
            size.append(f"fails: {type(error).__name__}")
            del cases[f"{coder} there"], cases[f"{coder} back"]
            continue
        share = f"{results[coder].stat().st_size / nbytes:.1%}"
        size.append(share if same else f"{share}, but other bytes came back")
    seconds = seconds_of(cases, options.rounds)
    rates = {case: f"{nbytes / 1e6 / taken:,.0f}" for case, taken in seconds.items()}
    time.append(rates["copy"])
    time += [f"{rates.get(f'{coder} there', '-')} / {rates.get(f'{coder} back', '-')}" for coder in results]
    return [size], [time]


def _repeatable(command: Command, path: Path, out: Path) -> Callable[[], object]:
    def run() -> None:
        out.unlink(missing_ok=True)
        command(path, out)

    return run


def _differences(root: Path, run: Path, small: bool, options: Options) -> Table:
    """A later checkpoint with and without the earlier one as its base."""
    tuned = root / "tuned"
    extra = ["--model.path", str(_exported(root, run, _STEPS[1]).parent), "--optimizer.learning-rate", "1e-5"]
    _train(tuned, small, "adamw", 10, extra)
    pairs = {f"steps {_STEPS[0]} and {_STEPS[1]}": (run, _STEPS[0], run), "fine-tuned": (run, _STEPS[1], tuned)}
    rows = []
    for what, (first, step, second) in pairs.items():
        for dtype in (torch.bfloat16, torch.float32):
            earlier = _converted(root, first, step, dtype)
            later = _converted(root, second, 10 if second is tuned else _STEPS[1], dtype)
            rows.append([f"{what}, {dtype_name(dtype)}", *_difference(root, earlier, later, options)])
    header = ["", "elements that did not change", "zip", "zip --delta", "MB/s there / back"]
    return Table("Differences, share of the original", header, rows)


def _difference(root: Path, earlier: Path, later: Path, options: Options) -> list[str]:
    one, two = load_file(earlier), load_file(later)
    total = sum(tensor.numel() for tensor in one.values())
    equal = sum(int((one[name] == two[name]).sum()) for name in one) / total
    zipped, out, alone = root / "delta", root / "delta.back", root / "alone"
    with_base = {"base": earlier, "num_threads": options.threads}
    cases = {
        "alone": _repeatable(partial(zip_path, num_threads=options.threads), later, alone),
        "there": _repeatable(partial(zip_path, **with_base), later, zipped),
        "back": _repeatable(partial(unzip, **with_base), zipped, out),
    }
    seconds = seconds_of(cases, options.rounds)
    assert out.read_bytes() == later.read_bytes()
    nbytes = later.stat().st_size
    shares = [f"{path.stat().st_size / nbytes:.1%}" for path in (alone, zipped)]
    return [f"{equal:.1%}", *shares, " / ".join(f"{nbytes / 1e6 / seconds[case]:,.0f}" for case in ("there", "back"))]
