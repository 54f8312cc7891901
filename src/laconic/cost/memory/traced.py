"""A model whose bytes were read from a step without numbers: all that the planner knows of a model.

`laconic.train.memory.trace` makes it. Layers of one kind keep the same bytes, so each kind stands here once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from laconic.cost.memory.saved_tensors import Unit
from laconic.errors import PlanError
from laconic.json_text import read_record

POINTS = ("forward", "loss", "backward", "end")
"""Moments at which a rank's memory can be largest, see laconic.cost.memory.peak."""

_ANY = frozenset(("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"))
_ANY |= frozenset(("bos_token_id", "eos_token_id", "pad_token_id"))
"""Entries of a configuration that change no bytes."""

_NUM_LAYERS = "num_hidden_layers"

Tensors = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Workspace:
    """Bytes alive beside saved tensors, parameters, buffers and whole gradients, at one of `POINTS`.

    Attributes:
        exact: of a model that keeps everything exactly.
        packed: what one whose sites are packed needs more.
    """

    exact: int
    packed: int


@dataclass(frozen=True)
class TracedLayer:
    """One kind of layers.

    Attributes:
        units: named within the layer.
        tensors: rows and columns of each parameter (vectors have one column), but those of experts.
        experts: of parameters that hold all experts, stacked: experts, rows and columns of each.
        flops: of a forward.
        shared_nbytes: saved once for all layers of the kind in a stage, such as rotary tables.
        arguments_nbytes: once for all of these whose attention is packed or that run again.
    """

    units: tuple[Unit, ...]
    tensors: Tensors
    experts: tuple[tuple[int, int, int], ...]
    flops: float
    shared_nbytes: int
    arguments_nbytes: int

    @property
    def num_parameters(self) -> int:
        """Parameters, those of all experts included."""
        return sum(a * b for a, b in self.tensors) + sum(n * a * b for n, a, b in self.experts)


@dataclass(frozen=True, kw_only=True)
class TracedModel:
    """What a step without numbers showed of a model, for one shape of micro-batch and one precision.

    Attributes:
        family, model_class: model_type of the configuration, and the class that was built.
        config: the configuration, by which a run is recognized.
        setting: what was traced: sequences, sequence_length, precision, loss, expert_parallel and shapes of inputs.
            Others need another trace.
        names: of the layers, first to last.
        kinds: of the layers, an index of `layers` each.
        layers: by kind.
        first_units, last_units: sites in front of the layers and behind them; of a language model the head.
        first_tensors, last_tensors: rows and columns of parameters there.
        tied_tensor: one of `last_tensors`, the output projection, is one of `first_tensors`; None if it is not.
        first_nbytes, last_nbytes: saved there, whatever is chosen.
        layer_input: rows and columns of what a layer takes in.
        buffers_nbytes: of the model.
        workspace: by point.
        is_stack: the layers are one list of alike layers, which may run again and can be cut into stages.
        settings: fields of `[model]` that make the model: sizes, or the path of its directory; empty if neither does.
        shares: layers have convolutions or batch norms, which keep tensors together with their neighbours, and exactly
            until both are packed; so only one choice for all of them can be predicted.
    """

    family: str
    model_class: str
    config: Mapping[str, Any]
    setting: Mapping[str, Any]
    names: tuple[str, ...]
    kinds: tuple[int, ...]
    layers: tuple[TracedLayer, ...]
    first_units: tuple[Unit, ...]
    last_units: tuple[Unit, ...]
    first_tensors: Tensors
    last_tensors: Tensors
    tied_tensor: tuple[int, int] | None
    first_nbytes: int
    last_nbytes: int
    layer_input: tuple[int, int]
    buffers_nbytes: int
    workspace: Mapping[str, Workspace]
    is_stack: bool
    shares: bool
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        """Layers of all kinds."""
        return len(self.names)

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; a tied matrix counts once."""
        ends = [*self.first_tensors, *self.last_tensors]
        tied = 0 if self.tied_tensor is None else self.tied_tensor[0] * self.tied_tensor[1]
        return sum(self.layers[kind].num_parameters for kind in self.kinds) + sum(a * b for a, b in ends) - tied

    @property
    def embedding_parameters(self) -> int:
        """Parameters behind the layers: as much work as so many parameters in the layers."""
        return sum(rows * columns for rows, columns in self.last_tensors)

    @property
    def hidden_size(self) -> int:
        """Features of what a layer takes in."""
        return self.layer_input[1]

    def layer(self, number: int) -> TracedLayer:
        """What is known of a layer."""
        return self.layers[self.kinds[number]]

    def units_of(self, layer: int) -> list[Unit]:
        """The units of a layer, by the names that they have in the model."""
        at = self.names[layer]
        return [
            replace(
                unit,
                name=f"{at}.{unit.name}",
                layer=layer,
                sites=tuple(f"{at}.{site}" if site else at for site in unit.sites),
                rebuilt_with=None if unit.rebuilt_with is None else f"{at}.{unit.rebuilt_with}",
            )
            for unit in self.layer(layer).units
        ]

    def with_num_layers(self, num_layers: int) -> TracedModel:
        """The same model with more or fewer layers, whose kinds follow each other as they do here.

        Raises:
            PlanError: `num_layers` is below 1, the layers are no single list, or their number is not one of the
                configuration's.
        """
        if num_layers < 1:
            raise PlanError(f"num_layers is {num_layers}, but a model has at least one layer")
        if not self.is_stack or self.config.get(_NUM_LAYERS) != self.num_layers:
            raise PlanError(f"{self.model_class} has no single list of {_NUM_LAYERS} layers, so it has no other depth")
        above = self.names[0].rpartition(".")[0]
        kinds = tuple([self.kinds[layer % self.num_layers] for layer in range(num_layers)])
        return replace(
            self,
            config=dict(self.config) | {_NUM_LAYERS: num_layers},
            names=tuple([f"{above}.{layer}" for layer in range(num_layers)]),
            kinds=kinds,
            layers=self.layers[: 1 + max(kinds)],  # numbered as they come first
        )

    def describe(self) -> str:
        """Family, layers and parameters in a line."""
        kinds = f"{self.num_layers} layers" + (f" of {len(self.layers)} kinds" if len(self.layers) > 1 else "")
        experts = max((count for layer in self.layers for count, _, _ in layer.experts), default=0)
        mixture = f", {experts} experts" if experts else ""
        return f"{self.family} ({self.model_class}): {kinds}, hidden {self.hidden_size:,}{mixture}"

    @staticmethod
    def fingerprint(config: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of a configuration that say which model it is, as JSON would give them back."""
        known: dict[str, Any] = json.loads(json.dumps({k: v for k, v in config.items() if k not in _ANY}, default=str))
        return known

    def check_setting(self, **setting: Any) -> None:
        """Refuse what the model was not traced for.

        Raises:
            PlanError: names the first difference.
        """
        for name, value in setting.items():
            if self.setting[name] != value:
                raise PlanError(
                    f"{name} is {value!r}, but the bytes of {self.family} were read for {self.setting[name]!r}; plan "
                    "it again with laconic plan"
                )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TracedModel:
        """Read what `to_dict` gave.

        Raises:
            PlanError: it is something else.
        """
        try:
            model = read_record(cls, data)
        except ValueError as error:
            raise PlanError(f"the plan's model.{error}; write the plan again with laconic plan") from error
        kinds = set(model.kinds)
        if len(model.names) != len(model.kinds) or not kinds or not kinds <= set(range(len(model.layers))):
            raise PlanError("the plan's layers have kinds that it does not describe; write it again with laconic plan")
        if set(model.workspace) != set(POINTS):
            raise PlanError(f"the plan's model.workspace has not all of {', '.join(POINTS)}; write it again")
        return model
