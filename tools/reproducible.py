"""Two builds of the same commit give the same bytes: sdist and wheels, made twice by `make wheels` and compared.

    python tools/reproducible.py
    python tools/reproducible.py --pythons python3.11 python3.12 --keep dist

Each build has a copy of the checkout's files of its own, whose path is as long as no other's, a virtual environment of
its own, another umask, time zone, language and home, and begins at another time. SOURCE_DATE_EPOCH is the commit's time
for both. Ends with 1, and names the members that differ, if one byte does. Takes as long as four compilations.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILDS = {
    "first": {"TZ": "UTC", "LC_ALL": "C", "umask": "022"},
    "second/in-a-folder-with-a-longer-name": {"TZ": "Asia/Kathmandu", "LC_ALL": "C.UTF-8", "umask": "077"},
}


def commit_time() -> str:
    """Seconds since 1970 of the checkout's commit."""
    done = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def copy_checkout(to: Path) -> None:
    """Copy the files that git knows, as they are now."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, done.stdout.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)


def build(name: str, folder: Path, pythons: list[str], epoch: str) -> Path:
    """Run `make wheels` in a copy of the checkout that is there; the folder with what it made."""
    differing = BUILDS[name]
    checkout = folder / name
    home = Path(tempfile.mkdtemp(dir=folder))
    variables = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV", "LC_"))
    }
    variables |= {"TZ": differing["TZ"], "LC_ALL": differing["LC_ALL"], "HOME": str(home), "SOURCE_DATE_EPOCH": epoch}
    command = ["make", "wheels", f"PYTHON={sys.executable}", f"WHEEL_PYTHONS={' '.join(pythons)}"]
    print(f"{name}: {' '.join(command)}", flush=True)
    done = subprocess.run(
        command,
        cwd=checkout,
        env=variables,
        umask=int(differing["umask"], 8),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}\nmake wheels ended with {done.returncode}")
    return checkout / "dist"


def members(archive: Path) -> dict[str, tuple[object, ...]]:
    """What an archive says of each of its members, its contents last."""
    if archive.name.endswith(".tar.gz"):
        with tarfile.open(archive) as tar:
            return {
                one.name: (one.mtime, oct(one.mode), one.uname, one.uid, _digest(tar.extractfile(one).read()))
                for one in tar
                if one.isfile()
            }
    with zipfile.ZipFile(archive) as wheel:
        return {
            one.filename: (one.date_time, oct(one.external_attr >> 16), one.compress_size, _digest(wheel.read(one)))
            for one in wheel.infolist()
        }


def differences(one: Path, other: Path) -> list[str]:
    """What differs between two folders of archives, a line each."""
    names = [sorted(path.name for path in folder.iterdir()) for folder in (one, other)]
    if names[0] != names[1]:
        return [f"one build made {', '.join(names[0])}, the other {', '.join(names[1])}"]
    found = []
    for name in names[0]:
        digests = [_digest((folder / name).read_bytes()) for folder in (one, other)]
        print(f"{digests[0]}  {name}" if digests[0] == digests[1] else f"{name} differs", flush=True)
        if digests[0] == digests[1]:
            continue
        lists = [members(folder / name) for folder in (one, other)]
        found += [
            f"{name}: {member}: {lists[0].get(member)} and {lists[1].get(member)}"
            for member in sorted({*lists[0], *lists[1]})
            if lists[0].get(member) != lists[1].get(member)
        ] or [f"{name}: members are equal, their order or the archive's own header is not"]
    return found


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def main() -> int:
    """Build twice, compare, and say what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", nargs="+", default=["python3.11", "python3.12"], help="interpreters to build for")
    parser.add_argument("--keep", type=Path, help="folder that the archives of the first build are copied to")
    options = parser.parse_args()
    epoch = os.environ.get("SOURCE_DATE_EPOCH") or commit_time()
    with tempfile.TemporaryDirectory() as name:
        for each in BUILDS:  # before either is built: the checkout may be worked on
            copy_checkout(Path(name) / each)
        one, other = (build(each, Path(name), options.pythons, epoch) for each in BUILDS)
        if options.keep is not None:
            shutil.copytree(one, options.keep, dirs_exist_ok=True)
        found = differences(one, other)
    print("\n".join(found) if found else "both builds are the same, byte for byte")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
