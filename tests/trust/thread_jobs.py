"""Work that several threads of one process do side by side, each on tensors and modules of its own.

    python -m tests.trust.thread_jobs JOB

runs a job in four threads that begin together, in a process in which laconic has done nothing yet, so that whatever is
set up at first use is set up by all of them at once; then once more, one after the other. It prints a JSON object:
"differ", the numbers of the threads that got other bits; "gil", whether the interpreter had its lock afterwards.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

__all__ = ["JOBS", "NUM_THREADS"]

NUM_THREADS = 4
_ROUNDS = 6

Job = Callable[[], list[Tensor]]


def _values(number: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))


def _quantize(number: int) -> Job:
    def job() -> list[Tensor]:
        from laconic.formats import BlockFormat

        found = []
        for code in ("uint2", "nf4", "e2m1", "int4", "int5", "int6", "int8"):
            for block_size in (16, 64, 256):
                packed = BlockFormat(code, block_size).quantize(_values(number, 96, 1000), seed=number)
                found += [packed.codes, packed.scales, packed.dequantize()]
        return found

    return job


def _shorten(number: int) -> Job:
    def job() -> list[Tensor]:
        from laconic.formats import decode, encode

        found = []
        for round_number in range(_ROUNDS):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                x = _values(number + 100 * round_number, 70_000 + number).to(dtype)
                message = encode(x)
                found += [message, decode(message, x)]
        return found

    return job


def _network() -> nn.Module:
    layers: list[nn.Module] = [nn.Embedding(50, 64)]
    for _ in range(3):
        layers += [nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)]
    return nn.Sequential(*layers, nn.Linear(64, 50))


def _train(number: int) -> Job:
    torch.manual_seed(number)
    model = _network()

    def job() -> list[Tensor]:
        import laconic

        laconic.compress_activations(model, bits=4)
        gradients = laconic.compress_gradients(model)
        optimizer = laconic.AdamW8bit(model.parameters(), lr=1e-2)
        losses = []
        for step in range(_ROUNDS):
            ids = torch.randint(50, (8, 40), generator=torch.Generator().manual_seed(number + 100 * step))
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            gradients.reduce()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses + [parameter.detach() for parameter in model.parameters()]

    return job


def _hugging_face(number: int) -> Job:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(number)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=60, **sizes)).train()

    def job() -> list[Tensor]:
        import laconic

        laconic.compress_activations(model, bits=4, attention="int8", loss="chunked")
        ids = torch.randint(60, (2, 24), generator=torch.Generator().manual_seed(number))
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        assert all(gradient is not None for gradient in gradients)
        return [loss.detach(), *(gradient for gradient in gradients if gradient is not None)]

    return job


def _zip(number: int) -> Job:
    from safetensors.torch import save_file

    state = {f"layer{index}.weight": _values(number + index, 300, 200).bfloat16() for index in range(3)}

    def job() -> list[Tensor]:
        from laconic.formats.archive import unzip, zip_path

        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            save_file(state, folder / "model.safetensors")
            zip_path(folder / "model.safetensors", folder / "zipped")
            unzip(folder / "zipped", folder / "back.safetensors")
            files = [folder / "zipped", folder / "back.safetensors"]
            return [torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8) for file in files]

    return job


JOBS: dict[str, Callable[[int], Job]] = {
    "quantize": _quantize,
    "shorten": _shorten,
    "train": _train,
    "hugging face": _hugging_face,
    "zip": _zip,
}
"""Each takes a thread's number and returns what the thread does; that gives tensors of which every bit counts."""


def side_by_side(make: Callable[[int], Job]) -> list[list[Tensor]]:
    """What each thread gets when all begin together."""
    jobs = [make(number) for number in range(NUM_THREADS)]
    begin = threading.Barrier(NUM_THREADS)
    found: list[list[Tensor]] = [[] for _ in jobs]
    errors: list[BaseException] = []

    def run(number: int) -> None:
        begin.wait()
        try:
            found[number] = jobs[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return copy.deepcopy(found)


def main() -> None:
    """Run the job that the command line names."""
    sys.setswitchinterval(1e-5)  # where threads take turns, they do so often
    torch.set_num_threads(2)  # a thread's own kernels use the pool of all
    make = JOBS[sys.argv[1]]
    together = side_by_side(make)
    alone = [make(number)() for number in range(NUM_THREADS)]
    differ = [
        number
        for number, (one, other) in enumerate(zip(together, alone, strict=True))
        if len(one) != len(other) or not one or not all(map(torch.equal, one, other))
    ]
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    print(json.dumps({"differ": differ, "gil": gil, "tensors": len(alone[0])}))


if __name__ == "__main__":
    main()
