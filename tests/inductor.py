"""Where torch's inductor can compile, for the tests that need it."""

from __future__ import annotations

import shutil

import pytest
import torch

__all__ = ["needs_inductor"]


def _reason() -> str | None:
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        return "no C++ compiler"
    if any(character.isspace() for character in torch.__path__[0]):
        # torch 2.13 splits the command of the linker at spaces; a link to the environment whose name has none helps.
        return f"inductor cannot link below a folder with a space in its name, and torch is in {torch.__path__[0]!r}"
    return None


needs_inductor = pytest.mark.skipif(_reason() is not None, reason=_reason() or "")
