"""Threads of one process that work side by side get the bits that each would get alone, from the first call on.

On an interpreter without a global lock (3.13t and later) laconic also has to leave it off.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig

import pytest

from tests.distributed.processes import ROOT, environment
from tests.patience import patient
from tests.trust.thread_jobs import JOBS, NUM_THREADS

_NEEDS = {"hugging face": "transformers", "zip": "safetensors"}
_HAS_NO_LOCK = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
_IMPORT_TRITON = ("train", "hugging face")  # through torch; it switches the lock on unless PYTHON_GIL says otherwise


@pytest.mark.parametrize(
    "job", [pytest.param(name, marks=pytest.mark.slow) if name in _IMPORT_TRITON else name for name in JOBS]
)
@pytest.mark.ci
def test_threads_that_begin_together_get_the_bits_of_one_alone(job: str) -> None:
    if job in _NEEDS:
        pytest.importorskip(_NEEDS[job])
    done = subprocess.run(
        [sys.executable, "-m", "tests.trust.thread_jobs", job],
        cwd=ROOT,
        env=environment(**({"PYTHON_GIL": "0"} if _HAS_NO_LOCK and job in _IMPORT_TRITON else {})),
        capture_output=True,
        text=True,
        timeout=patient(100),
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["differ"] == [], f"of {NUM_THREADS} threads, over {told['tensors']} tensors each"
    if _HAS_NO_LOCK:
        assert not told["gil"], "something that laconic imports has switched the lock on"
