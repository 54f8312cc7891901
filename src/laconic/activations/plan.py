"""Who decides how many bits, and the decision itself as data.

A policy looks at a site's description, never at tensors, and answers with a format or None for "leave it exact". Asking
it about every site of a model gives the plan: a table that prints, saves and loads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from laconic.activations.sites import Site
from laconic.errors import FormatError, ModelError
from laconic.formats import BlockFormat

__all__ = ["ATTENTION", "ActivationPlan", "Policy", "careful_head", "uniform"]

Policy = Callable[[Site], BlockFormat | None]


ATTENTION = "exact"
"""What is kept for attention unless told otherwise: "exact", "int8" or "nf4"."""


def uniform(format: BlockFormat | None, attention: BlockFormat | None = None) -> Policy:
    """The policy that gives every site the same format, but attention its own."""
    return lambda site: attention if site.kind == "attention" else format


def careful_head(format: BlockFormat | None, attention: BlockFormat | None = None) -> Policy:
    """The default policy: the same format everywhere, but at least 8 bits behind the stack of layers.

    The gradient of the output projection is the one place where four bits show. A small Llama is 0.06 to 0.10 nats
    behind after 150 steps when its final norm is kept at nf4 and nothing else is, and within noise when everything but
    that is (docs/activations.md). It is one tensor per model, so 8 bits cost next to nothing.
    """
    everywhere = uniform(format, attention)
    if format is None or format.bits >= 8:
        return everywhere
    head = BlockFormat("int8", block_size=format.block_size, scale_dtype=format.scale_dtype)
    return lambda site: head if site.head else everywhere(site)


@dataclass(frozen=True)
class ActivationPlan:
    """Format by site name; None keeps the site exact, as it was before."""

    formats: Mapping[str, BlockFormat | None]

    @classmethod
    def make(cls, sites: Iterable[Site], policy: Policy) -> ActivationPlan:
        """Asks the policy about every site."""
        return cls({site.name: policy(site) for site in sites})

    def check(self, sites: Iterable[Site]) -> None:
        """Refuses a plan with sites that the model does not have.

        Raises:
            ModelError: names the first such site.
        """
        known = {site.name for site in sites}
        for name in self.formats:
            if name not in known:
                raise ModelError(
                    f"the plan names the site {name!r}, but the model has no such site; make the plan from "
                    f"laconic.activations.find_sites(model) of the same model"
                )

    def to_json(self) -> str:
        """The plan as JSON text: {"version": 1, "sites": {name: {"code", "block_size", "scale_dtype"} or null}}."""
        sites = {
            name: None
            if format is None
            else {
                "code": format.code,
                "block_size": format.block_size,
                "scale_dtype": str(format.scale_dtype).removeprefix("torch."),
            }
            for name, format in self.formats.items()
        }
        return json.dumps({"version": 1, "sites": sites}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> ActivationPlan:
        """Reads what `to_json` wrote.

        Raises:
            FormatError: the text is not such a plan.
        """
        try:
            plan = json.loads(text)
            if plan["version"] != 1:
                raise FormatError(f"version of the activation plan is {plan['version']!r}, but only 1 is known")
            formats = {
                name: None
                if entry is None
                else BlockFormat(
                    code=entry["code"],
                    block_size=entry["block_size"],
                    scale_dtype=getattr(torch, entry["scale_dtype"]),
                )
                for name, entry in plan["sites"].items()
            }
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise FormatError(f"not an activation plan: {error!r}; write one with ActivationPlan.to_json") from error
        return cls(formats)
