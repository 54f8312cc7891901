"""A plan as a file: model, layout, the choice of every site, and the predicted bytes.

docs/planning.md has the format. A plan is made for one model and one layout; whoever executes it checks both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from laconic.cost.memory.job import Job, Layout, Settings
from laconic.cost.memory.predict import Prediction, predict
from laconic.cost.memory.saved_tensors import EXACT, Batch, Choice
from laconic.cost.memory.traced import TracedModel
from laconic.cost.planner.policy import Chosen
from laconic.durable import write_whole
from laconic.errors import PlanError
from laconic.json_text import first_difference, parse_json

_FORMAT = "laconic plan"
_VERSION = 1


@dataclass(frozen=True)
class Plan:
    """A job with its choices.

    Attributes:
        job: the run.
        choices: by name of the unit.
        recomputed: decoder layers that run again in backward, with the format of their saved input.
        policy: who decided.
        budget_nbytes: of each device, None if none was given.
    """

    job: Job
    choices: Mapping[str, Choice]
    recomputed: Mapping[int, Choice]
    policy: str
    budget_nbytes: int | None = None

    @classmethod
    def of(cls, job: Job, chosen: Chosen, budget_nbytes: int | None = None) -> Plan:
        """The plan of what a policy or the solver chose, with the split of layers made explicit."""
        job = replace(job, layout=replace(job.layout, split=job.split))
        return cls(job, chosen.choices, chosen.recomputed, chosen.policy, budget_nbytes)

    @property
    def prediction(self) -> Prediction:
        """Predicted bytes of every rank, computed again from the choices."""
        return predict(self.job, self.choices, self.recomputed)

    @property
    def attention(self) -> str:
        """How attention is kept: "exact", a code, or "mixed"."""
        names = {
            self.choices.get(unit.name, EXACT).code or "exact"
            for stage in self.job.stages()
            for unit in stage.units()
            if unit.kind == "attention" and unit.layer not in self.recomputed
        }
        return names.pop() if len(names) == 1 else "mixed" if names else "exact"

    def activation_plan(self) -> dict[str, Any]:
        """The part that `laconic.activations.ActivationPlan` reads, version 2.

        "sites": by module name a format, {"recompute": true}, or null for exact. "layers": decoder layers that run
        again in backward, by module name, with how their input is kept.
        """
        sites: dict[str, Any] = {}
        for stage in self.job.stages():
            for unit in stage.units():
                choice = EXACT if unit.layer in self.recomputed else self.choices.get(unit.name, EXACT)
                for index, site in enumerate(unit.sites):
                    # The down projection reads what its block rebuilds, so it is rewritten whatever is chosen for that.
                    inner = choice.recompute and index > 0
                    sites[site] = (Choice("nf4") if inner else choice).to_json()
        names = self.job.model.names
        layers = {names[i]: {"input": choice.to_json()} for i, choice in sorted(self.recomputed.items())}
        return {"version": 2, "sites": sites, "layers": layers}

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        job, prediction = self.job, self.prediction
        layout = asdict(job.layout) | {"split": list(job.split), "world_size": job.layout.world_size}
        activations = {"attention": self.attention, "activations": self.activation_plan()}
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "model": job.model.to_dict(),
            "world": layout,
            "batch": asdict(job.batch),
            "schedule": [[str(action) for action in line] for line in job.layout.make_schedule().actions],
            "settings": asdict(job.settings) | activations,
            "policy": self.policy,
            "budget_nbytes": self.budget_nbytes,
            "choices": {name: choice.to_json() for name, choice in self.choices.items()},
            "recomputed_layers": {str(layer): choice.to_json() for layer, choice in self.recomputed.items()},
            "predicted": {
                "ranks": [rank.to_dict() for rank in prediction.ranks],
                "saved_nbytes_per_micro_batch": dict(prediction.saved_nbytes),
                "not_counted": {f"moe.{name}": what for name, what in job.not_counted.items()},
            },
        }

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; a file of that name is replaced only when the new one is complete.

        Raises:
            PlanError: it cannot be written; nothing is left behind then.
        """
        text = json.dumps(self.to_dict(), indent=1) + "\n"
        try:
            write_whole(Path(path), text)
        except (OSError, ValueError) as error:  # ValueError: no name, or a NUL in it
            raise PlanError(f"the plan cannot be written to {str(path)!r}: {error}") from error

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """Read what `to_dict` wrote.

        Raises:
            PlanError: the data is no plan, of another version, says something impossible, or has a field that is
                missing, unknown or not what follows from the others, as in files of another laconic.
        """
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise PlanError("the file is no laconic plan; write one with laconic plan")
        if data.get("version") != _VERSION:
            raise PlanError(f"the plan has version {data.get('version')!r}, but only {_VERSION} is known")
        try:
            world = {field.name: data["world"][field.name] for field in fields(Layout)}
            settings = {field.name: data["settings"][field.name] for field in fields(Settings)}
            plan = cls(
                job=Job(
                    TracedModel.from_dict(data["model"]),
                    Batch(**data["batch"]),
                    Layout(**world | {"split": tuple(world["split"])}),
                    Settings(**settings),
                ),
                choices={name: Choice.from_json(entry) for name, entry in data["choices"].items()},
                recomputed={int(layer): Choice.from_json(entry) for layer, entry in data["recomputed_layers"].items()},
                policy=data["policy"],
                budget_nbytes=data["budget_nbytes"],
            )
            _ = plan.prediction.peak_nbytes, plan.job.split  # refused if layers, stages and choices do not fit
            # What was predicted may change with the cost model, and nothing is run by it
            known = json.loads(json.dumps(plan.to_dict())) | {"predicted": None}
            name = first_difference(known, data | {"predicted": None})
        except KeyError as error:
            raise PlanError(f"the plan has no {error.args[0]!r}; write it again with laconic plan") from error
        except (TypeError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(f"the plan is damaged: {error!r}; write it again with laconic plan") from error
        if name is not None:
            raise PlanError(
                f"the plan's {name} is not what this laconic writes for its model, world and choices; write it again"
                " with laconic plan, and do not change it by hand"
            )
        return plan

    def check(self, config: Mapping[str, Any], **world: Any) -> None:
        """Check that the plan was made for this model and this layout.

        Args:
            config: Hugging Face configuration of the run's model, as a dictionary.
            world: fields of `Layout` and `Batch`, and `world_size`, as far as the run knows them.

        Raises:
            PlanError: names the first field that differs, its value in the plan and in the run.
        """
        # A run that differs may build another model, too: a random one has as many positions as its sequences.
        layout = self.job.layout
        known = {**asdict(layout), **asdict(self.job.batch), "split": self.job.split, "world_size": layout.world_size}
        for name, value in world.items():
            if name not in known:
                raise PlanError(f"a plan says nothing about {name!r}; it knows {', '.join(known)}")
            if known[name] != value:
                raise PlanError(
                    f"the plan is for a run with {name} = {known[name]!r}, but this run has {value!r}; run it as "
                    f"planned or make another plan with laconic plan"
                )
        model = self.job.model
        theirs = model.fingerprint(config)
        for name, mine in model.fingerprint(model.config).items():
            if theirs.get(name) != mine:
                raise PlanError(
                    f"the plan is for a model with {name} = {mine!r}, but this model has {theirs.get(name)!r}; make a "
                    "plan for this model with laconic plan"
                )


def load_plan(path: str | Path) -> Plan:
    """Read a plan from a file.

    Raises:
        PlanError: there is no such file, or see `Plan.from_dict`.
    """
    try:
        data = parse_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"plan is {str(path)!r}, but it must be a file: {error}") from error
    except ValueError as error:
        raise PlanError(f"plan {path} is not JSON: {error}") from error
    try:
        return Plan.from_dict(data)
    except PlanError as error:
        raise PlanError(f"plan {path}: {error}") from error
