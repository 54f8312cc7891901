"""Let a virtual environment see the packages of the one that runs this: python tools/host_environment.py ENVIRONMENT.

Its own packages come first. The folders are added by `site`, which follows their .pth files (laconic is installed
through one).
"""

from __future__ import annotations

import site
import sys
import sysconfig
from pathlib import Path


def main(environment: Path) -> None:
    """Write the .pth file."""
    places = {"base": str(environment), "platbase": str(environment)}
    target = Path(sysconfig.get_path("purelib", "venv", vars=places))
    seen = [folder for folder in site.getsitepackages() if folder in sys.path]
    (target / "seen.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
