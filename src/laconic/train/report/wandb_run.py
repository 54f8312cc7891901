"""A run in Weights & Biases, online or, with WANDB_MODE=offline, in files below the run directory.

wandb keeps a run under an id. A run directory has the id in the names of the folders that wandb makes in `wandb/`, one
for each start of the run (`offline-run-<date>_<time>-<id>`), so a run that is resumed takes the id of the newest one.
"""

from __future__ import annotations

import importlib.util
import os
import re
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from laconic.errors import ConfigError
from laconic.output_lines import say

_FOLDER = re.compile(r"(?:offline-)?run-(\d{8}_\d{6})-(.+)")
_PROJECT = "laconic"


class WandbRun:
    """Sends rows of metrics to wandb, step by step.

    Mode, project, entity, name, tags and id are wandb's environment variables (WANDB_MODE and so on); without them the
    project is "laconic" and the name that of the run directory. If wandb fails while training goes on, it is left out
    from then on, and stderr says so once.

    Args:
        run_dir: of the run; wandb's files go to `run_dir`/wandb.
        settings: of the run, shown as its configuration.
    """

    def __init__(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        check_wandb()
        import wandb

        self._run: Any
        try:
            self._run = wandb.init(
                dir=str(run_dir),
                id=os.environ.get("WANDB_RUN_ID") or _free_id(run_dir),
                resume=None if os.environ.get("WANDB_RESUME") else "allow",
                project=os.environ.get("WANDB_PROJECT") or _PROJECT,
                name=os.environ.get("WANDB_NAME") or run_dir.resolve().name,
            )
        except wandb.Error as error:
            raise ConfigError(f"wandb is True, but wandb cannot begin a run: {error}") from error
        # Not an argument of init: a resumed run may have other steps than wandb's server remembers.
        self._run.config.update(dict(settings), allow_val_change=True)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add numbers to the row of a step."""
        if self._run is None:
            return
        try:
            self._run.log(dict(numbers), step=step)
        except Exception as error:  # of wandb's process, whatever happened to it: training does not depend on it
            self._leave_out(error)

    def close(self, failed: bool) -> None:
        """Finish the run in wandb, as failed or not; more than once is fine."""
        run, self._run = self._run, None
        if run is None:
            return
        try:
            run.finish(exit_code=1 if failed else 0)
        except Exception as error:
            self._leave_out(error)

    def _leave_out(self, error: Exception) -> None:
        self._run = None
        say(
            f"wandb has failed ({type(error).__name__}: {error}); the run goes on without it, and metrics.jsonl has "
            "all steps"
        )


def check_wandb() -> None:
    """Check that wandb is installed and, unless it is offline, that it knows whose account it is for.

    On a terminal wandb asks for the account.
    """
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError("wandb is True, but Weights & Biases is not installed: pip install 'laconic[wandb]'")
    import wandb

    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return
    try:
        wandb.login()
    except wandb.Error as error:
        raise ConfigError(
            f"wandb is True, but wandb has no account to log to ({error}); call `wandb login`, set WANDB_API_KEY, or "
            "set WANDB_MODE=offline, which keeps the run on this machine"
        ) from error


def _free_id(run_dir: Path) -> str | None:
    """The id of the run that wandb has in `run_dir`, once its next folder would have a name of its own; None if none.

    wandb names folders by the second, and would write over the one of a start in the same second.
    """
    known = sorted(match.groups() for path in run_dir.glob("wandb/*run-*") if (match := _FOLDER.fullmatch(path.name)))
    if not known:
        return None
    last, name = known[-1]
    while f"{datetime.now():%Y%m%d_%H%M%S}" <= last:
        time.sleep(0.05)
    return name
