"""The modules that a script has made and that are still alive.

torch's registration hooks name a module when it gets a parameter or a child, its `__setstate__` when it is copied or
unpickled. Python's collector, which knows all objects, is asked once, before the script runs: while its list is held,
CPython's `tuple(generator)` raises SystemError in any other thread.
"""

from __future__ import annotations

import gc
from typing import Any
from weakref import WeakValueDictionary

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)


class ModulesAlive:
    """Context manager that knows the modules that were made before it, and takes note of those made in it."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
        self._set_state = nn.Module.__setstate__
        self._handles: list[Any] = []

    def __enter__(self) -> ModulesAlive:
        known, original = self._known, self._set_state

        def set_state(module: nn.Module, state: dict[str, Any]) -> None:
            original(module, state)
            known[id(module)] = module

        nn.Module.__setstate__ = set_state  # type: ignore[method-assign]
        self._handles = [
            register_module_module_registration_hook(self._note),
            register_module_parameter_registration_hook(self._note),
        ]
        self._ask_the_collector()
        return self

    def __exit__(self, *_: object) -> None:
        nn.Module.__setstate__ = self._set_state  # type: ignore[method-assign]
        for handle in self._handles:
            handle.remove()

    def _note(self, module: nn.Module, name: str, value: Any) -> None:
        self._known[id(module)] = module

    def _ask_the_collector(self) -> None:
        for found in gc.get_objects():
            if issubclass(type(found), nn.Module):
                self._known[id(found)] = found

    def all(self, called: nn.Module | None = None) -> list[nn.Module]:
        """The modules that are known, and those in them. Other threads may make modules meanwhile.

        Args:
            called: a module; the collector is asked again if it is not known, which takes a class that restores its
                state without nn.Module's `__setstate__`.
        """
        found = self._descend()
        if called is not None and id(called) not in found:
            self._ask_the_collector()
            found = self._descend()
        return list(found.values())

    def _descend(self) -> dict[int, nn.Module]:
        found: dict[int, nn.Module] = {}
        pending = [module for ref in self._known.valuerefs() if (module := ref()) is not None]
        for module in pending:  # which grows
            if id(module) not in found and "_modules" in module.__dict__ and "_parameters" in module.__dict__:
                found[id(module)] = module
                pending.extend(child for child in list(module._modules.values()) if child is not None)
        return found
