"""Large results are mapped in huge pages, and what a message does not need goes back to the system."""

from __future__ import annotations

import copy
import gc
import io
import resource
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import laconic
from laconic.ops import huge_pages
from laconic.ops.huge_pages import LARGE_NBYTES, cut, empty

_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
on_linux = pytest.mark.skipif(not _THP.exists(), reason="the system has no huge pages to give")
MB = 1 << 20


def resident_nbytes() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@on_linux
@pytest.mark.skipif(_THP.exists() and "[never]" in _THP.read_text(), reason="huge pages are switched off")
def test_a_large_result_takes_few_page_faults() -> None:
    def faults(x: torch.Tensor) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        x.fill_(1)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    few, many = faults(empty([64 * MB], torch.uint8)), faults(torch.empty(64 * MB, dtype=torch.uint8))
    if many < 8192:
        pytest.skip("torch asks for huge pages itself")
    assert few < many / 4


@settings(max_examples=10)
@given(st.integers(LARGE_NBYTES - 9000, LARGE_NBYTES + 9000), st.integers(0, 20000))
def test_what_is_cut_keeps_its_bytes_and_no_more(nbytes: int, more: int) -> None:
    x = empty([nbytes + more], torch.uint8)
    x.copy_(torch.arange(nbytes + more).remainder_(251))
    expected = x[:nbytes].clone()
    result = cut(x, nbytes)
    del x
    assert torch.equal(result, expected)
    assert result.untyped_storage().nbytes() == nbytes
    result.fill_(7)  # it can be written
    assert bool((result == 7).all())


@on_linux
def test_memory_behind_a_cut_goes_back_at_once_and_the_rest_with_the_result() -> None:
    gc.collect()
    before = resident_nbytes()
    x = empty([96 * MB], torch.uint8).fill_(1)
    assert resident_nbytes() - before > 80 * MB
    result = cut(x, 16 * MB)
    del x
    assert resident_nbytes() - before < 40 * MB
    assert int(result.sum(dtype=torch.int64)) == 16 * MB
    del result
    gc.collect()
    assert resident_nbytes() - before < 12 * MB


def test_a_cut_message_can_be_saved_copied_and_shared() -> None:
    x = torch.randn(2 * MB)
    message = laconic.encode(x)
    assert LARGE_NBYTES < message.numel() == message.untyped_storage().nbytes() < x.nbytes
    buffer = io.BytesIO()
    torch.save(message, buffer)
    assert len(buffer.getvalue()) < message.numel() + 4096
    buffer.seek(0)
    again = [torch.load(buffer), copy.deepcopy(message), message.clone(), message.numpy().copy()]
    again.append(message.share_memory_())
    assert all(torch.equal(laconic.decode(torch.as_tensor(each)), x) for each in again)


def test_large_messages_of_many_threads_are_their_own() -> None:
    tensors = [torch.full((2 * MB,), float(number)).add_(torch.rand(2 * MB)) for number in range(3)]
    found: list[bool] = []

    def work(x: torch.Tensor) -> None:
        messages = [laconic.encode(x) for _ in range(2)]
        found.append(all(torch.equal(laconic.decode(message), x) for message in messages))

    threads = [threading.Thread(target=work, args=(x,)) for x in tensors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * len(tensors)


def test_without_madvise_results_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2 * MB)
    expected = laconic.encode(x)
    monkeypatch.setattr(huge_pages, "_madvise", lambda: None)
    message = laconic.encode(x)
    assert torch.equal(message, expected)
    assert message.untyped_storage().nbytes() == message.numel()
    assert torch.equal(laconic.decode(message), x)
