"""One part as a process: `python -m benchmarks.gpu_day PART [--rehearse]`. Exit code 1 if a section has no result."""

from __future__ import annotations

import importlib
import sys

import torch

from benchmarks.gpu_day.setting import Setting
from benchmarks.kit.isolated_parts import end_with_parent


def main(name: str, *flags: str) -> int:
    """Run the part; returns the exit code."""
    end_with_parent()
    torch.manual_seed(0)
    if flags:
        torch.set_num_threads(1)
    setting = Setting(rehearses="--rehearse" in flags)
    importlib.import_module(f"benchmarks.gpu_day.{name}").run(setting)
    if setting.report.problems:
        print(f"no result: {', '.join(setting.report.problems)}", file=sys.stderr)
    return 1 if setting.report.problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
