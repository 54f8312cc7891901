"""Part 6: the lossless codec's GB/s, and two processes on one device over gloo: collectives, DDP, FSDP2.

The processes share the device, as NCCL does not allow; what is proved is that values on a device come through every
path, not how fast. In a rehearsal they have CPU tensors for collectives and a simulated device for DDP and FSDP2.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks import gpu_ops
from benchmarks.gpu_day.kernels import ELEMENTS
from benchmarks.gpu_day.record import reason_of
from benchmarks.gpu_day.setting import Setting
from benchmarks.registry import Table
from laconic import collectives, ops
from laconic.collectives import Blockwise, Codec, Lossless, Raw
from laconic.formats import BlockFormat

_NUM_RANKS = 2
_TIMEOUT = timedelta(seconds=30)
"""Of one collective: a rank that has failed costs the others that much."""
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "gather", "scatter")
OPERATIONS += ("send and receive",)
_TORCHS_OWN = "torch's own"
_CODECS: dict[str, Codec | None] = {
    _TORCHS_OWN: None,
    "raw": Raw(),
    "lossless": Lossless(),
    "int8": Blockwise(BlockFormat("int8", 128)),
}
_RIGHT = ("equal", "near")
Row = list[str]


def run(setting: Setting) -> None:
    """The codec first; then each kind of exchange in two fresh processes."""
    with setting.report.section("lossless codec"):
        elements = setting.sized(1 << 26, 1 << 12)
        setting.table(gpu_ops.lossless_table(elements, setting.device, setting.device_seconds))
    with setting.report.section("lossless kernels"):
        setting.table(_kernels_table(setting))
    title = f"over gloo, two processes{' on one device' if not setting.rehearses else ''}"
    _exchange(setting, f"Collectives {title}", ["operation", "codec", "result", "ms"], _collectives, 40)
    header = ["program", "parameters beside those on the CPU", "s"]
    for name in ("FSDP2", "DDP"):
        _exchange(setting, f"{name} {title}", header, _trained, 30, name)


def _kernels_table(setting: Setting) -> Table:
    """Times of the lossless ops on as many values as `gpu-code` predicts for."""
    elements = setting.sized(ELEMENTS, 1 << 12)
    rows = []
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        x = torch.randn(elements, generator=torch.Generator().manual_seed(0)).to(dtype).to(setting.device)
        out, total = torch.empty_like(x), torch.zeros(elements, device=setting.device)
        message = ops.lossless_encode(x, code="tiered")
        cases: dict[str, Callable[[], object]] = {
            f"lossless_encode, {name}, tiered": lambda x=x: ops.lossless_encode(x, code="tiered"),
            f"lossless_decode_, {name}": lambda out=out, m=message: ops.lossless_decode_(out, m),
            f"lossless_decode_add_, {name}": lambda total=total, m=message: ops.lossless_decode_add_(total, m),
        }
        for case, call in cases.items():
            taken = setting.device_seconds(call)
            setting.report.figure(f"kernel: {case}", taken * 1e6, "us")
            rows.append([case, f"{taken * 1e6:.1f}", f"{x.nbytes / taken / 1e9:.1f}"])
    return Table(f"Lossless kernels on {elements:,} Gaussian values", ["", "us", "GB/s of the tensor"], rows)


def _exchange(
    setting: Setting, title: str, header: Sequence[str], work: Callable[..., None], seconds: float, *arguments: Any
) -> None:
    """Two processes that write rows; a rank that fails or hangs leaves the rows so far and the reason."""
    with setting.report.section(title), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        context = mp.start_processes(
            _as_rank,
            (folder, setting.rehearses, work, arguments),
            nprocs=_NUM_RANKS,
            join=False,
            start_method="spawn",
        )
        end = time.monotonic() + seconds * setting.sized(1, 10)
        reason = ""
        try:
            while not context.join(timeout=1.0):
                if time.monotonic() > end:
                    reason = f"killed after {seconds * setting.sized(1, 10):.0f} s"
                    break
        except Exception as error:
            reason = "\n".join(str(error).strip().splitlines()[-4:])
        finally:
            for process in context.processes:
                process.kill()
                process.join()
        rows = _rows(folder / "rows.jsonl")
        setting.table(Table(title, header, rows or [["none"] + [""] * (len(header) - 1)]))
        if reason:
            raise RuntimeError(reason)
        # What gloo itself does not do with tensors of a device is not this package's fault.
        if wrong := [row for row in rows if row[-2] not in _RIGHT and _TORCHS_OWN not in row]:
            raise RuntimeError("\n".join(": ".join(row[:-1]) for row in wrong))


def _rows(path: Path) -> list[Row]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = []
    for line in lines:
        with suppress(ValueError):  # cut off with its process
            rows.append(json.loads(line))
    return rows


def _as_rank(rank: int, folder: Path, rehearses: bool, work: Callable[..., None], arguments: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"

    def put(*cells: str) -> None:
        if rank == 0:
            with (folder / "rows.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(cells) + "\n")

    work(rank, folder, rehearses, put, *arguments)


@contextmanager
def _gloo(rank: int, store: Path) -> Iterator[dist.ProcessGroup]:
    """The default group of both processes while the block runs."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), _NUM_RANKS), rank=rank, world_size=_NUM_RANKS, timeout=_TIMEOUT
    )
    assert dist.group.WORLD is not None
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def _collectives(rank: int, folder: Path, rehearses: bool, put: Callable[..., None]) -> None:
    """Each operation with each codec; what it has to leave is computed from all ranks' inputs, on the CPU."""
    device = "cpu" if rehearses else "cuda"
    inputs = [_normal(1 << (12 if rehearses else 22), seed) for seed in range(_NUM_RANKS)]
    with _gloo(rank, folder / "store"):
        _compare_collectives(rank, device, inputs, put)


def _compare_collectives(rank: int, device: str, inputs: Sequence[Tensor], put: Callable[..., None]) -> None:
    for operation in OPERATIONS:
        expected = _expected(operation, inputs, rank)
        for name, codec in _CODECS.items():
            if codec is None and operation == "send and receive" and device == "cuda":
                put(operation, name, "not tried: gloo ends the process", "")
                continue
            there = inputs[rank].to(device)
            started = time.perf_counter()
            try:
                found = call(operation, there, rank, codec)
                verdict = _verdict(None if found is None else found.cpu(), expected, is_exact=name != "int8")
            except Exception as error:
                verdict = reason_of(error).splitlines()[0]
            taken = time.perf_counter() - started
            verdicts: list[Any] = [None] * _NUM_RANKS
            dist.all_gather_object(verdicts, verdict)
            put(operation, name, next((one for one in verdicts if one not in _RIGHT), verdict), f"{taken * 1e3:.1f}")


def _normal(numel: int, seed: int) -> Tensor:
    """bf16 [numel] from a normal distribution, as weights are."""
    return (0.02 * torch.randn(numel, generator=torch.Generator().manual_seed(seed))).bfloat16()


def _expected(operation: str, inputs: Sequence[Tensor], rank: int) -> Tensor | None:
    """What an operation leaves on a rank: sums in fp32 in the order of ranks, rounded once."""
    total = sum((x.float() for x in inputs[1:]), inputs[0].float()).bfloat16()
    parts = [x.chunk(_NUM_RANKS)[rank] for x in inputs]
    match operation:
        case "all_reduce":
            return total
        case "all_gather":
            return torch.cat(list(inputs))
        case "reduce_scatter":
            return total.chunk(_NUM_RANKS)[rank]
        case "all_to_all":
            return torch.cat(parts)
        case "broadcast":
            return inputs[0]
        case "gather":
            return torch.cat(list(inputs)) if rank == 0 else None
        case "scatter":
            return parts[0]
        case _:  # send and receive
            return inputs[1 - rank]


def call(operation: str, x: Tensor, rank: int, codec: Codec | None) -> Tensor | None:
    """One operation of torch.distributed, or of laconic with a codec; returns what it left on this rank."""
    whole, part, out = x.new_empty(_NUM_RANKS * x.numel()), x.new_empty(x.numel() // _NUM_RANKS), x.clone()
    rows = list(whole.chunk(_NUM_RANKS))
    if codec is None:
        match operation:
            case "all_reduce":
                dist.all_reduce(out)
                return out
            case "all_gather":
                dist.all_gather(rows, x)
                return whole
            case "reduce_scatter":
                dist.reduce_scatter(part, list(x.chunk(_NUM_RANKS)))
                return part
            case "all_to_all":
                dist.all_to_all_single(out, x)
                return out
            case "broadcast":
                dist.broadcast(out, 0)
                return out
            case "gather":
                dist.gather(x, rows if rank == 0 else None, 0)
                return whole if rank == 0 else None
            case "scatter":
                dist.scatter(part, list(x.chunk(_NUM_RANKS)) if rank == 0 else None, 0)
                return part
            case _:
                ends = [dist.send, dist.recv] if rank == 0 else [dist.recv, dist.send]
                for end in ends:
                    end(x if end is dist.send else out, 1 - rank)
                return out
    match operation:
        case "all_reduce":
            return collectives.all_reduce(out, codec=codec).wait()
        case "all_gather":
            return collectives.all_gather(whole, x, codec=codec).wait()
        case "reduce_scatter":
            return collectives.reduce_scatter(part, x, codec=codec).wait()
        case "all_to_all":
            return collectives.all_to_all(out, x, codec=codec).wait()
        case "broadcast":
            return collectives.broadcast(out, 0, codec=codec).wait()
        case "gather":
            return collectives.gather(whole if rank == 0 else None, x, 0, codec=codec).wait()
        case "scatter":
            return collectives.scatter(part, x if rank == 0 else None, 0, codec=codec).wait()
        case _:
            if rank == 0:
                collectives.send(x, 1, codec=codec).wait()
            collectives.recv(out, 1 - rank, codec=codec).wait()
            if rank == 1:
                collectives.send(x, 0, codec=codec).wait()
            return out


def _verdict(found: Tensor | None, expected: Tensor | None, is_exact: bool) -> str:
    if found is None or expected is None:
        return "equal" if found is expected else "nothing where there should be something"
    if gpu_ops.same_bits(found, expected):
        return "equal"
    error = ((found.float() - expected.float()).norm() / expected.float().norm()).item()
    return "near" if not is_exact and error < 0.02 else f"off by {error:.1e} of its norm"


def _trained(rank: int, folder: Path, rehearses: bool, put: Callable[..., None], kind: str) -> None:
    """Models inside of torch's own objects with laconic's collectives: the CPU's parameters, and the device's."""
    from tests.streams import programs
    from tests.streams.test_wrappers import recorded

    chosen: list[Any] = getattr(programs, kind)
    with _gloo(rank, folder / "cpu") as group:
        expected = [program(torch.device("cpu"), group, rank) for program in chosen]

    def found(number: int) -> list[Tensor]:
        if rehearses:
            device, parameters = recorded(rank, chosen[number], folder / f"simulated {number}")
            device.check(5, seed=rank)
            return parameters
        with _gloo(rank, folder / f"device {number}") as group:
            return chosen[number](torch.device("cuda"), group, rank)

    for number, program in enumerate(chosen):
        started = time.perf_counter()
        try:
            verdict = _beside(found(number), expected[number])
        except Exception as error:
            verdict = reason_of(error).splitlines()[0]
        put(program.__name__, verdict, f"{time.perf_counter() - started:.1f}")
        if verdict not in _RIGHT:  # the ranks may no longer be at the same call
            raise RuntimeError(f"{program.__name__}: {verdict}")


def _beside(found: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """Products of a device add in another order than the CPU's."""
    if all(torch.equal(one, right) for one, right in zip(found, expected, strict=True)):
        return "equal"
    is_near = all(torch.allclose(one, right, rtol=1e-4, atol=1e-5) for one, right in zip(found, expected, strict=True))
    return "near" if is_near else "other values"
