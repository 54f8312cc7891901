"""transformers' own common tests, on models of six families whose activations are compressed as they are made."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest

pytest.importorskip("parameterized")
pytest.importorskip("transformers")

from tests.integrations.transformers_suite import FOLDER_VARIABLE, MODELS, compressed, make_case, outcomes

FOLDER = os.environ.get(FOLDER_VARIABLE, "")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    not FOLDER, reason=f"{FOLDER_VARIABLE} does not name the tests of transformers' source distribution"
)
@pytest.mark.parametrize("name", MODELS)
def test_what_passes_unmodified_passes_compressed(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, in its own tests
        case = make_case(Path(FOLDER), name)
        passing = [test for test, problem in outcomes(case).items() if not problem]
        with compressed():
            found = outcomes(case, passing)
    assert len(passing) > 50
    broken = {test: problem for test, problem in found.items() if problem}
    assert not broken, "\n".join(f"{test}: {problem}" for test, problem in broken.items())
