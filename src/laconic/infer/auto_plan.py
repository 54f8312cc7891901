"""plan="auto": the engine asks the planner, with measured rates and the requests that are expected."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from laconic.cost.infer import InferenceRates, default_infer_path
from laconic.cost.infer import Split as PlannedSplit
from laconic.cost.infer.engine_plan import Demand, EngineChoice, EngineLimits, Fixed, choose_for_engine
from laconic.cost.infer.rates import OF_EXPERTS
from laconic.errors import ConfigError
from laconic.infer.device import DeviceKind
from laconic.infer.split import EngineSplit
from laconic.infer.transformers_seam import planned_shape
from laconic.schedule.inference import InferencePlan, Order, Slicing

_MEASURED = re.compile(r"\Ameasure_infer, [^,]*, \d+ ranks, (\w+), ")
"""How the source of rates begins that `laconic profile --infer` has measured; with the kind of device."""
BESIDE_HOST = "messages with a process of the CPU"
"""What that source says where expert workers' messages are those of a CPU, though the rest is a CUDA device's."""
_ITEM_NBYTES = {"auto": None, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class AutoPlan:
    """A plan that the engine chooses when it starts: the fastest that its planner predicts.

    Fields of InferencePlan that are given are kept, the others chosen. Rates are those of workers that do not share a
    processor; where they do, measure instead.

    Attributes:
        rates: file of `laconic profile --infer`; None takes its default path.
        prompt, output: what is expected, see Demand: tokens of a prompt and of an answer; None: 512 and 128, or four
            fifths and a fifth of what a request may have, if that is less.
        requests: in flight together.
        num_micro_batches, num_slices, order, slicing: as in InferencePlan; None leaves it to the planner.
        shared_first: as in InferencePlan; never chosen, only asked for.
        expert_rates: file of `laconic profile --infer` on machines like those of expert workers, where these are of
            another kind; links are those of `rates`. Expert workers are then kept. None: all machines are alike.
    """

    rates: str | os.PathLike[str] | None = None
    prompt: int | None = None
    output: int | None = None
    requests: int = 8
    num_micro_batches: int | None = None
    num_slices: int | None = None
    order: Order | None = None
    slicing: Slicing | None = None
    shared_first: bool = False
    expert_rates: str | os.PathLike[str] | None = None

    def demand(self, most: int) -> Demand:
        """What is expected, if a request may have so many tokens; a PlanError if a number is below 1."""
        prompt, output = self.prompt, self.output
        if output is None:
            output = max(1, min(128, most // 5 if prompt is None else most - prompt))
        return Demand(max(1, min(512, most - output)) if prompt is None else prompt, output, self.requests)

    @property
    def fixed(self) -> Fixed:
        """What is not to be chosen; a ScheduleError if fields of the plan are impossible, or contradict each other."""
        given = {
            "num_micro_batches": self.num_micro_batches,
            "num_slices": self.num_slices,
            "order": self.order,
            "slicing": self.slicing,
        }
        InferencePlan(**{k: v for k, v in given.items() if v is not None}, shared_first=self.shared_first)  # type: ignore[arg-type]
        order = self.order
        if order == "AASS":  # as the engine runs it
            order = "ASAS" if self.shared_first else "greedy"
        return Fixed(self.num_micro_batches, self.num_slices, order, self.slicing, self.shared_first)

    def choose(
        self,
        model_dir: Path,
        split: EngineSplit,
        limits: EngineLimits,
        *,
        dtype: str = "auto",
        may_unsplit: bool = True,
        expert_format: str = "exact",
        device: DeviceKind = "cpu",
        expert_device: DeviceKind = "cpu",
    ) -> EngineChoice:
        """Choose for a model and workers of an engine with these arguments.

        `may_unsplit` says whether all workers may run the whole model instead; on CUDA devices, whose memory is not
        counted here, they do not.

        Raises:
            ConfigError: there are no rates, or they are those of another kind of device; or devices are of two kinds
                without `expert_rates`.
            PlanError: the model's sizes cannot be counted, or a request does not fit into cache or positions.
            ScheduleError: fixed fields contradict each other.
        """
        path = Path(self.rates) if self.rates is not None else default_infer_path()
        if self.rates is None and not path.exists():
            raise ConfigError(
                f"plan is 'auto', but {path} does not exist; measure with laconic profile --infer, or give rates"
            )
        fixed, rates = self.fixed, InferenceRates.load(path)
        of_attention, _, of_experts = rates.source.partition(OF_EXPERTS)
        check_measured(of_attention, path, device)
        if self.expert_rates is not None:
            path = Path(self.expert_rates)
            measured = InferenceRates.load(path)
            rates, of_experts = rates.with_experts(measured), measured.source
        elif rates.experts is None:
            of_experts = of_attention
            if expert_device != device:
                raise ConfigError(
                    f"plan is automatic with device = {device!r} and expert_device = {expert_device!r}, but the rates"
                    f" in {str(path)!r} are those of attention workers alone; give expert_rates, an InferencePlan, or"
                    " leave expert_device out"
                )
        check_measured(of_experts, path, expert_device, "expert_device")
        shape = replace(planned_shape(model_dir, _ITEM_NBYTES[dtype]), expert_format=expert_format)
        most = limits.cache_tokens if shape.positions is None else min(limits.cache_tokens, shape.positions)
        return choose_for_engine(
            shape,
            rates,
            PlannedSplit(split.attention, split.experts),
            self.demand(most),
            limits,
            fixed=fixed,
            may_unsplit=may_unsplit and device == "cpu",
            memory_nbytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if device == "cpu" else None,
        )


def check_measured(source: str, path: Path, device: DeviceKind, name: str = "device") -> None:
    """Check that rates are those of a kind of device; what laconic has not measured may be of CPUs.

    `device` of the workers is the engine's argument `name`. A ConfigError also if rates do not say that they are of
    CUDA, or have no messages of expert workers on CUDA.
    """
    found = _MEASURED.match(source)
    said = f"were measured on {found[1]!r}" if found else "do not say on what they were measured"
    if (found[1] if found else "cpu") == device:
        if name == "device" or device == "cpu" or BESIDE_HOST not in source:
            return
        said = f"have {BESIDE_HOST}"
    raise ConfigError(
        f"plan is automatic with {name} = {device!r}, but the rates in {str(path)!r} {said}; give those of laconic"
        f" profile --infer on machines {'with' if device == 'cuda' else 'without'} CUDA devices, or an InferencePlan"
    )
