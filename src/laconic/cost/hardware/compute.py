"""Cost of a choice besides bytes: error of the gradient and seconds, from numbers that name their source.

The numbers are data files in `laconic/cost/data/`; `laconic plan --calibrate` writes one of the same form for the model
and data at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from laconic.cost.memory.job import Job
from laconic.cost.memory.saved_tensors import Choice, Unit
from laconic.errors import PlanError
from laconic.json_text import parse_json, read_record
from laconic.options import BLOCK_CODES, CODE_BITS

EXPOSED_OFFLOAD = 0.25
"""Share of the transfers to and from host memory that computation does not hide. An assumption, not measured."""


@dataclass(frozen=True)
class Hardware:
    """Rates of a device. Bytes count what is read and written, in the dtype of the activations."""

    name: str
    matmul_flops_per_second: float
    pack_bytes_per_second: float
    host_bytes_per_second: float

    @classmethod
    def named(cls, name: str) -> Hardware:
        """One of the devices that are shipped."""
        known = _data("hardware.json")
        if name not in known:
            raise PlanError(f"hardware is {name!r}, but it must be one of {', '.join(known)}")
        return cls(name, **{key: float(entry["value"]) for key, entry in known[name].items()})


_Table = Mapping[str, Mapping[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]]]


@dataclass(frozen=True)
class Sensitivity:
    """Error of the gradient when all units of one kind are kept in one format and nothing else is.

    Attributes:
        errors: kind -> code -> norm of the gradient's error over norm of the gradient, all parameters together.
        source: who measured it, on what and when.
        time_shares: kind -> code -> added seconds over seconds of the exact step, where measured; else time is
            estimated from `Hardware`.
    """

    errors: _Table
    source: str
    time_shares: _Table = field(default_factory=dict)

    @classmethod
    def default(cls) -> Sensitivity:
        """The table that is shipped: a small Llama on text (see `source`)."""
        return cls.from_dict(_data("sensitivity.json"))

    @classmethod
    def load(cls, path: str | Path) -> Sensitivity:
        """Read what `laconic plan --calibrate` wrote."""
        try:
            return cls.from_dict(parse_json(Path(path).read_text(encoding="utf-8")))
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error
        except OSError as error:
            raise PlanError(f"calibration is {str(path)!r}, but it must be a file: {error}") from error
        except ValueError as error:
            raise PlanError(f"calibration {path} is not JSON: {error}") from error

    @classmethod
    def from_dict(cls, data: Any) -> Sensitivity:
        """From {"format": "laconic sensitivity", "errors": {kind: {code: error}}, "source": text}."""
        if not isinstance(data, dict) or data.get("format") != "laconic sensitivity":
            raise PlanError("calibration is no laconic sensitivity; write one with laconic plan --calibrate")
        try:
            return read_record(cls, {"errors": {}, "source": "", "time_shares": {}} | data)
        except ValueError as error:
            raise PlanError(f"calibration: {error}; write it again with laconic plan --calibrate") from error

    def squared_error(self, unit: Unit, choice: Choice, num_units: int) -> float:
        """A unit's share of the squared relative error, if all `num_units` of its kind share it equally.

        A choice that was not measured for the kind counts like the next coarser one that was.
        """
        if choice.code is None or choice.recompute or unit.num_elements is None:
            return 0.0
        known = self.errors.get(unit.kind, {})
        # Two bits are another way of rounding; what they cost stands for nothing else, and nothing else for them.
        candidates = ["uint2"] if choice.code == "uint2" else _BY_FINENESS[_BY_FINENESS.index(choice.code) :]
        coarser = [code for code in candidates if code in known]
        if not coarser:
            raise PlanError(
                f"nothing is known about {unit.kind} at {choice.code}; measure it with laconic plan --calibrate"
            )
        return known[coarser[0]] ** 2 / num_units

    def time_share(self, unit: Unit, choice: Choice, num_units: int) -> float | None:
        """A unit's share of the measured time, None where nothing was measured for the choice."""
        if choice.recompute or choice.offload or choice.code is None or unit.num_elements is None:
            return None
        share = self.time_shares.get(unit.kind, {}).get(choice.code)
        return None if share is None else share / num_units


_BY_FINENESS = sorted(
    (name for name, code in BLOCK_CODES.items() if not code.is_affine), key=lambda name: -CODE_BITS[name]
)


def _data(name: str) -> Any:
    return parse_json((resources.files("laconic.cost") / "data" / name).read_text(encoding="utf-8"))


def layer_forward_flops(job: Job) -> float:
    """Floating-point operations of one layer's forward on one micro-batch and rank, the mean of all layers."""
    model = job.model
    return sum(model.layers[kind].flops for kind in model.kinds) / model.num_layers / job.layout.tensor_parallel


def recompute_seconds(job: Job, hardware: Hardware) -> float:
    """Seconds to run one decoder layer's forward again."""
    return layer_forward_flops(job) / hardware.matmul_flops_per_second


def pack_seconds(job: Job, hardware: Hardware, unit: Unit, choice: Choice) -> float:
    """Seconds that a choice adds to one micro-batch's forward and backward of a unit, against keeping it exact."""
    tp = job.layout.tensor_parallel
    if choice.recompute:
        return (unit.recompute_flops or 0.0) / tp / hardware.matmul_flops_per_second
    if choice.code is None or unit.num_elements is None:
        return 0.0
    element = job.precision.compute_nbytes
    seconds = 2.0 * unit.num_elements * element / tp / hardware.pack_bytes_per_second
    seconds += (unit.again_flops or 0.0) / tp / hardware.matmul_flops_per_second
    if choice.offload:
        moved = 2.0 * unit.packed_nbytes(choice) / tp
        seconds += EXPOSED_OFFLOAD * moved / hardware.host_bytes_per_second
    return seconds
