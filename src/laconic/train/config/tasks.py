"""Tasks by name: each file of `laconic.train.tasks` is one, and its name, with hyphens, is the value of `task`."""

from __future__ import annotations

import importlib
from functools import cache
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from laconic.train import tasks

if TYPE_CHECKING:
    from laconic.train.task import Task

DEFAULT_TASK = "language-modeling"


def task_names() -> tuple[str, ...]:
    """List the names of all tasks, the default one first."""
    names = {module.name.replace("_", "-") for module in iter_modules(tasks.__path__)}
    return (DEFAULT_TASK, *sorted(names - {DEFAULT_TASK}))


@cache
def find_task(name: str) -> type[Task]:
    """Import the task of a name in `task_names`: the class that its file calls TASK."""
    task: type[Task] = importlib.import_module(f"laconic.train.tasks.{name.replace('-', '_')}").TASK
    return task
