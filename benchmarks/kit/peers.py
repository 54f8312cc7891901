"""Other libraries that do the same, where they are installed (`pip install laconic[bench]`)."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from benchmarks.registry import dtype_name

BITSANDBYTES_CODES = {"nf4": "nf4", "e2m1": "fp4", "int8": ""}
"""Our codes, and what bitsandbytes calls those that are nearest; its 8-bit code is a dynamic one."""


def installed(package: str, module: str = "") -> Any:
    """A package's module, None where the package is not installed."""
    if importlib.util.find_spec(package) is None:
        return None
    logging.getLogger(package).setLevel(logging.ERROR)
    return importlib.import_module(f"{package}.{module}" if module else package)


def bitsandbytes_cases(x: Tensor, code: str, block_size: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """bitsandbytes' quantize and dequantize of a tensor, for one of `BITSANDBYTES_CODES`."""
    peer = installed("bitsandbytes", "functional")
    if kind := BITSANDBYTES_CODES[code]:
        packed = peer.quantize_4bit(x, blocksize=block_size, quant_type=kind)
        return (
            lambda: peer.quantize_4bit(x, blocksize=block_size, quant_type=kind),
            lambda: peer.dequantize_4bit(*packed),
        )
    packed = peer.quantize_blockwise(x, blocksize=block_size)
    return lambda: peer.quantize_blockwise(x, blocksize=block_size), lambda: peer.dequantize_blockwise(*packed)


def coders(
    x: Tensor, threads: int, zipnn_method: str = "HUFFMAN"
) -> Iterator[tuple[str, Callable[[bytes], bytes], Callable[[bytes], object]]]:
    """Name, compress and decompress of ZipNN, if it knows the tensor's type, and of zstd."""
    name = dtype_name(x.dtype)
    if (zipnn := installed("zipnn")) is not None and name in ("bfloat16", "float32"):
        peer = zipnn.ZipNN(method=zipnn_method, input_format="byte", bytearray_dtype=name, threads=threads)
        # ZipNN writes to the bytes that it is given.
        yield "ZipNN", lambda part: bytes(peer.compress(bytearray(part))), peer.decompress
    if (zstandard := installed("zstandard")) is not None:
        yield "zstd -1", zstandard.ZstdCompressor(level=1).compress, zstandard.ZstdDecompressor().decompress
