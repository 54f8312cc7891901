"""Converts modules that are added after the conversion: adapters (LoRA), and replacements of converted layers.

A new layer under the name of a converted site, or below it (`q_proj` becomes `q_proj.base_layer` and `q_proj.lora_A`),
is converted with that site's choice before the next training forward. New modules elsewhere stay exact, and the log
says so once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from laconic.activations.backward.derivatives import is_transformed
from laconic.activations.forwards.replacement import ModelReplacement, replacements_of
from laconic.activations.host.modules import modules_of
from laconic.activations.keep.choice import RECOMPUTED, Choice, Recompute
from laconic.activations.recognize.sites import Site, find_sites

Install = Callable[[Sequence[tuple[nn.Module, Site, Choice]]], None]


class _Follower:
    """Records the modules of a converted model and converts those that are added later.

    Args:
        model: the converted model.
        choices: the choice for each of its sites, by name.
        install: gives modules that are sites the forwards for their choices; a function that can be pickled.
    """

    def __init__(self, model: nn.Module, choices: Mapping[str, Choice], install: Install) -> None:
        self.model = model
        self.choices = dict(choices)
        self.install = install
        self.modules = modules_of(model)

    def look(self) -> None:
        """Convert the new ones among the modules."""
        modules = modules_of(self.model)
        if modules == self.modules:
            return
        known, self.modules = {id(module) for module in self.modules}, modules
        found = [(module, site, self._inherited(site)) for site, module in self._sites_outside(known)]
        self.install(found)
        followed = [site.name for _, site, choice in found if choice is not None]
        exact = [site.name for _, site, choice in found if choice is None]
        log = logging.getLogger("laconic")
        if followed:
            log.info(
                "compressed %d layers that came in the place of compressed ones: %s", len(followed), _few(followed)
            )
        if exact:
            log.warning(
                "%d layers came after compress_activations and stay exact, because no compressed layer was in their "
                "place: %s; call decompress_activations(model) and compress_activations(model) to include them",
                len(exact),
                _few(exact),
            )

    def _sites_outside(self, known: set[int]) -> Iterator[tuple[Site, nn.Module]]:
        """The sites among the modules that are not known, by their names in the model."""
        seen = set(known)
        for name, module in list(self.model.named_modules()):
            if id(module) in seen:
                continue
            seen.update(map(id, module.modules()))
            with torch.no_grad():
                sites = find_sites(module)
            for site in sites:
                child = module.get_submodule(site.name)
                # A copy of a converted module, as adapters make of those that they train whole, is converted already.
                if id(child) not in known and not any(replacements_of(child)):
                    yield replace(site, name=f"{name}.{site.name}".rstrip(".")), child

    def _inherited(self, site: Site) -> Choice:
        """The choice for the site that this one replaces; None without one, or if it does not apply to this one."""
        name = site.name
        while name and name not in self.choices:
            name = name.rpartition(".")[0]
        choice = self.choices.get(name)
        return None if isinstance(choice, Recompute) and site.kind not in RECOMPUTED else choice


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


class FollowingForward(ModelReplacement):
    """The forward of a model, or of a part of it, that looks for new sites before training forwards."""

    def __init__(self, module: nn.Module, follower: _Follower) -> None:
        super().__init__(module)
        self.follower = follower

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Convert new sites if gradients are wanted, then run the original forward."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and not is_transformed():
            self.follower.look()
        return self.original(*args, **kwargs)


def follow(model: nn.Module, choices: Mapping[str, Choice], install: Install) -> None:
    """Install forwards that convert sites added later.

    On the model and on the child that holds most of its sites, because hosts may call only the latter: TRL computes the
    loss from the base model's hidden states.
    """
    if all(choice is None for choice in choices.values()):
        return
    follower = _Follower(model, choices, install)
    for name, module in (("", model), *model.named_children()):
        num_sites = sum(site.startswith(f"{name}." if name else "") and site != name for site in choices)
        is_called = getattr(type(module), "forward", nn.Module.forward) is not nn.Module.forward  # containers are not
        if 2 * num_sites > len(choices) and is_called and name not in choices:
            FollowingForward(module, follower).install()
