"""Let a virtual environment see the packages of the one that runs this: python tools/host_environment.py ENVIRONMENT.

Its own packages come first. The folders are added by `site`, which follows their .pth files (laconic is installed
through one).
"""

from __future__ import annotations

import sys
from pathlib import Path


def main(environment: Path) -> None:
    """Write the .pth file."""
    [target] = environment.glob("lib/python*/site-packages")
    seen = [path for path in sys.path if path.endswith("site-packages")]
    (target / "seen.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
