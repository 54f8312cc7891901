"""What the Python that will run the parts has: printed as JSON by `python -m benchmarks.gpu_day.probe`.

A process of its own, so that the driver starts without torch and sees what a broken installation says.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import platform
import sys
import warnings
from typing import Any


def _module(name: str) -> dict[str, str]:
    try:
        importlib.import_module(name)
    except Exception as error:  # a missing or broken package is the finding
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    try:
        return {"version": importlib.metadata.version(name)}
    except importlib.metadata.PackageNotFoundError:
        return {"version": ""}


def _device() -> dict[str, Any]:
    try:
        import torch
    except Exception as error:
        return {"error": f"torch cannot be imported: {error}"}
    build = {"built for CUDA": torch.version.cuda or "no"}
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        try:
            torch.cuda.init()
            properties = torch.cuda.get_device_properties(0)
        except Exception as error:  # no device, a driver that is too old, a build without CUDA
            return build | {"error": str(error).splitlines()[0]}
    return build | {
        "device": properties.name,
        "memory": f"{properties.total_memory / 2**30:.0f} GiB",
        "capability": f"{properties.major}.{properties.minor}",
    }


def main(names: list[str]) -> None:
    """Print what there is of `names`, and the device."""
    found = {name: _module(name) for name in names}
    print(json.dumps({"python": platform.python_version(), "modules": found, "device": _device()}))


if __name__ == "__main__":
    main(sys.argv[1:])
