"""Two processes, started once for all tests that only read what they left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.pair import SMOOTH, everything, more
from tests.distributed.processes import run_joined
from tests.train.runs import AGOQ, resumed, tiny_config, train_alone


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which two processes have done what `tests.distributed.pair` lists."""
    folder = tmp_path_factory.mktemp("pair")
    # Alone: the reference of all smooth runs, and the first third of one that the two go on with.
    train_alone(tiny_config(folder, "smooth-alone", SMOOTH))
    train_alone(tiny_config(folder, "smooth-1-2-1", SMOOTH), stop_after=2)
    train_alone(tiny_config(folder, "agoq-alone", AGOQ))
    train_alone(tiny_config(folder, "agoq-1-2-1", AGOQ), stop_after=2)
    run_joined(everything, (folder,), 2)
    train_alone(resumed(tiny_config(folder, "smooth-1-2-1", SMOOTH)))
    train_alone(resumed(tiny_config(folder, "agoq-1-2-1", AGOQ)))
    return folder


@pytest.fixture(scope="session")
def pair_with_more(pair: Path) -> Path:
    """The same folder, with the slow runs as well."""
    run_joined(more, (pair,), 2)
    return pair
