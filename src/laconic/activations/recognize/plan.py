"""Policies, and their decisions as data.

A policy looks at a site's description, never at tensors, and answers with a `Choice`: a format, a format in host
memory, recomputation, or None for "leave it exact". Asking it about every site of a model gives the plan: a table that
prints, saves and loads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from laconic.activations.keep.choice import RECOMPUTED, Choice, Recompute, choice_of, entry_of
from laconic.activations.recognize.sites import Site
from laconic.errors import FormatError, ModelError
from laconic.formats import BlockFormat
from laconic.json_text import parse_json

_VERSION = 2

Policy = Callable[[Site], Choice]
"""Chooses how the activation of each site is kept."""


ATTENTION = "int8"
"""Default format of query, key and value: "exact", "int8" or "nf4".

Training with int8 ends at the loss of exact attention (benchmarks/results/quality_attention_*), and costs a few per
cent of a step for 2.5 U of 6.7 (benchmarks/results/memory_*). nf4 takes 0.75 U less, but its gradients of queries and
keys are off by a fifth (benchmarks/results/gradient_error_*).
"""


def uniform(format: Choice, attention: Choice = None) -> Policy:
    """The policy that gives every site the same format, except attention and other mixers of tokens."""
    return lambda site: attention if site.kind in ("attention", "mixer") else format


def careful_head(format: BlockFormat | None, attention: Choice = None) -> Policy:
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
    """The choice for each site by name, and the layers that are recomputed as a whole.

    Attributes:
        choices: of the sites; those that are not named stay exact.
        layers: names of recomputed decoder layers, each with the format of its saved input (None: exact). Nothing else
            of such a layer is saved, whatever `choices` says.
    """

    choices: Mapping[str, Choice]
    layers: Mapping[str, BlockFormat | None] = field(default_factory=dict)

    @classmethod
    def make(cls, sites: Iterable[Site], policy: Policy) -> ActivationPlan:
        """The plan of a policy for these sites."""
        return cls({site.name: policy(site) for site in sites})

    def check(self, sites: Iterable[Site]) -> None:
        """Check that the model has the plan's sites and layers, and that each site can follow its choice.

        Raises:
            ModelError: names the first that does not fit.
        """
        known = {site.name: site for site in sites}
        for name, choice in self.choices.items():
            site = known.get(name)
            if site is None:
                raise ModelError(
                    f"the plan names the site {name!r}, but the model has no such site; make the plan from "
                    f"laconic.activations.find_sites(model) of the same model"
                )
            if isinstance(choice, Recompute) and site.kind not in RECOMPUTED:
                raise ModelError(
                    f"the plan says recompute for {name!r}, a site of kind {site.kind!r}, but only feed-forward "
                    f"blocks, attention and other mixers can be computed again on their own; give it a format, or name "
                    f"its layer under 'layers'"
                )
        for layer in self.layers:
            is_index = layer.rpartition(".")[2].isdigit()
            if not is_index or not any(name.startswith(f"{layer}.") for name in known):
                raise ModelError(
                    f"the plan names the layer {layer!r}, but the model has no such layer with sites; layers are named "
                    f"like the modules in the stack, for example 'model.layers.0'"
                )

    def recomputes(self, site: Site) -> bool:
        """Whether the site is inside of a layer that is recomputed as a whole."""
        return any(site.name.startswith(f"{layer}.") for layer in self.layers)

    def to_json(self) -> str:
        """The plan as JSON text.

        {"version": 2, "sites": {name: entry}, "layers": {name: {"input": entry}}}, where an entry is {"code",
        "block_size", "scale_dtype"}, also with "offload": true, or {"recompute": true}, or null for exact. Inputs of
        layers are packed or exact.
        """
        sites = {name: entry_of(choice) for name, choice in self.choices.items()}
        layers = {name: {"input": entry_of(format)} for name, format in self.layers.items()}
        return json.dumps({"version": _VERSION, "sites": sites, "layers": layers}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> ActivationPlan:
        """Read what `to_json` wrote.

        Raises:
            FormatError: the text is not such a plan.
        """
        try:
            plan = parse_json(text)
        except ValueError as error:
            raise FormatError(f"not an activation plan: {error!r}; write one with ActivationPlan.to_json") from error
        try:
            if plan["version"] != _VERSION:
                raise FormatError(
                    f"version of the activation plan is {plan['version']!r}, but this laconic reads {_VERSION}; write "
                    "it again with ActivationPlan.to_json"
                )
            choices = {name: choice_of(entry) for name, entry in plan["sites"].items()}
            layers = {name: choice_of(entry["input"]) for name, entry in plan["layers"].items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"not an activation plan: {error!r}; write one with ActivationPlan.to_json") from error
        formats: dict[str, BlockFormat | None] = {}
        for name, choice in layers.items():
            if not (choice is None or isinstance(choice, BlockFormat)):
                raise FormatError(f"not an activation plan: the input of layer {name!r} must be a format or null")
            formats[name] = choice
        return cls(choices, formats)
