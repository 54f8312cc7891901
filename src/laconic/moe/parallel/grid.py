"""One world of processes, seen twice: by the dense part of a model and by its experts.

    dense rank  = dp * N_MP + mp                    mp: ranks that share the dense part and have the same tokens
    expert rank = (edp * N_EP + ep) * N_ESP + esp   ep: experts spread; esp: one expert's hidden dimension spread

Both numbers are the global rank, so neither side knows of the other: N_MP, N_EP and N_ESP need not fit each other, only
the world. A *joint* group has all N_EP * N_ESP ranks that together hold every expert once; the ranks of an edp group
hold the same shards, whose gradients they add.

Levels cut an EP group into nested groups along slow links, for exchanges in several steps (HierMoE, arXiv 2508.09591,
section III): U[0] = 1 group, U[1] groups (nodes), U[2] groups within those and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from laconic.errors import ConfigError

__all__ = ["Grid", "GridLayout", "Level"]

_NAMED_SIZES = {"mp": "mp", "tp": "mp", "ep": "ep", "esp": "esp"}
_GROUPS = ("dp", "mp", "edp", "ep", "esp", "joint")


@dataclass(frozen=True)
class GridLayout:
    """Which ranks belong together; plain arithmetic."""

    num_ranks: int
    mp: int = 1
    """N_MP, ranks with the same tokens."""
    ep: int = 1
    """N_EP, ranks among which experts are spread."""
    esp: int = 1
    """N_ESP, ranks that share each expert's hidden dimension."""
    levels: tuple[int, ...] = ()
    """U[1], U[2], ...: groups of an EP group at each level, each a multiple of the one before and a divisor of N_EP."""

    def __post_init__(self) -> None:
        for name in ("num_ranks", "mp", "ep", "esp"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}, but it must be a whole number of ranks, at least 1; change it")
        if self.num_ranks % self.mp:
            raise ConfigError(
                f"mp is {self.mp}, but it must divide the world of {self.num_ranks} processes; change one of them"
            )
        if self.num_ranks % (self.ep * self.esp):
            raise ConfigError(
                f"ep is {self.ep} and esp is {self.esp}, but their product must divide the world of {self.num_ranks}"
                " processes; change one of them"
            )
        coarser = 1
        for num_groups in self.levels:
            if num_groups <= coarser or num_groups % coarser or self.ep % num_groups:
                raise ConfigError(
                    f"levels are {self.levels}, but numbers of groups must grow, each a multiple of the one before (the"
                    f" first of 1) and a divisor of ep, which is {self.ep}; change them"
                )
            coarser = num_groups

    @property
    def dp(self) -> int:
        """N_DP, replicas of the dense part."""
        return self.num_ranks // self.mp

    @property
    def edp(self) -> int:
        """N_EDP, replicas of the experts."""
        return self.num_ranks // self.joint

    @property
    def joint(self) -> int:
        """Ranks that together hold every expert once."""
        return self.ep * self.esp

    def ranks(self, name: str) -> list[list[int]]:
        """All groups called `name`, one of dp, mp, edp, ep, esp and joint, each in the order of its ranks' places."""
        if name not in _GROUPS:
            raise ConfigError(f"name is {name!r}, but the groups of a grid are {', '.join(_GROUPS)}; use one of them")
        if name in ("dp", "mp"):
            grid = _grid(self.dp, self.mp)
            return _lines(grid, 0 if name == "dp" else 1)
        if name == "joint":
            return _lines(_grid(self.edp, self.joint), 1)
        return _lines(_grid(self.edp, self.ep, self.esp), ("edp", "ep", "esp").index(name))

    def within(self, level: int) -> list[list[int]]:
        """The groups of `level`: ranks of one EP group that are in the same of its U[level] parts."""
        num_groups = (1, *self.levels)[level]
        return _lines(_grid(self.edp * num_groups, self.ep // num_groups, self.esp), 1)

    def across(self, level: int) -> list[list[int]]:
        """Ranks at the same place of the parts of `level` >= 1 that are in one part of the level before."""
        coarse, fine = (1, *self.levels)[level - 1 : level + 1]
        return _lines(_grid(self.edp * coarse, fine // coarse, self.joint // fine), 1)


@dataclass(frozen=True)
class Level:
    """This rank's place in one level of its EP group."""

    num_groups: int
    """U, parts of the EP group at this level."""
    within: dist.ProcessGroup
    """The N_EP / U ranks of this rank's part; the EP group itself at level 0."""
    across: dist.ProcessGroup | None
    """One rank of each sister part, all at this rank's place; None at level 0."""


class Grid:
    """The process groups of this rank, made by all ranks of the default group together.

    Attributes:
        layout: who belongs to whom.
        dense_mesh: DeviceMesh (dp, mp); FSDP2 shards what all experts share over `dense_mesh["dp"]`.
        expert_mesh: DeviceMesh (edp, ep, esp); FSDP2 shards experts over `expert_mesh["edp"]`.
        dp, mp, edp, ep, esp, joint: process groups.
        levels: level 0 is the whole EP group, further ones as asked for.

    Raises ConfigError if there is no default group or sizes do not fit its world.
    """

    def __init__(
        self,
        mp: int = 1,
        ep: int | None = None,
        esp: int = 1,
        *,
        levels: Sequence[int] = (),
        device_type: str | None = None,
    ) -> None:
        """`ep` None: all ranks, divided by `esp`. `device_type` as in init_device_mesh; cuda where it is available."""
        if not dist.is_initialized():
            raise ConfigError("no process group exists, but a grid needs one; call init_process_group first")
        num_ranks = dist.get_world_size()
        if isinstance(levels, int):
            raise ConfigError(f"levels is {levels}, but it must be one number for each level; pass ({levels},)")
        self.layout = GridLayout(num_ranks, mp, max(1, num_ranks // max(1, esp)) if ep is None else ep, esp, (*levels,))
        layout, device = self.layout, device_type or ("cuda" if torch.cuda.is_available() else "cpu")
        self.dense_mesh = init_device_mesh(device, (layout.dp, mp), mesh_dim_names=("dp", "mp"))
        shape = (layout.edp, layout.ep, esp)
        self.expert_mesh = init_device_mesh(device, shape, mesh_dim_names=("edp", "ep", "esp"))
        self.dp, self.mp = (self.dense_mesh.get_group(name) for name in ("dp", "mp"))
        self.edp, self.ep, self.esp = (self.expert_mesh.get_group(name) for name in ("edp", "ep", "esp"))
        self.joint = self.ep if esp == 1 else self.esp if layout.ep == 1 else _new_group(layout.ranks("joint"))
        found = [Level(1, self.ep, None)]
        for number, num_groups in enumerate(layout.levels, 1):
            found.append(Level(num_groups, _new_group(layout.within(number)), _new_group(layout.across(number))))
        self.levels: tuple[Level, ...] = tuple(found)

    @staticmethod
    def from_mesh(mesh: DeviceMesh, *, levels: Sequence[int] = ()) -> Grid:
        """The grid that a mesh over the whole world means by the names of its dimensions.

        "mp" or "tp", "ep" and "esp" give sizes (1 if there is no such dimension); "dp" and "edp" may be there too, and
        the only dimension of a mesh without names is ep. The groups of every such dimension have to be the grid's.

        Raises ConfigError if the mesh is not over ranks 0, 1, ... of the world, or a dimension has other groups.
        """
        ranks = mesh.mesh.flatten().tolist()
        if ranks != list(range(dist.get_world_size())):
            raise ConfigError(
                f"mesh has the ranks {ranks}, but a grid is over all {dist.get_world_size()} of the world in order;"
                " make the mesh with init_device_mesh"
            )
        names = mesh.mesh_dim_names or (("ep",) if mesh.ndim == 1 else ())
        if not names or not {*_NAMED_SIZES} & {*names}:
            raise ConfigError(
                f"mesh has the dimensions {names or 'without names'}, but one of them must be called mp, tp, ep or esp;"
                " name them with mesh_dim_names"
            )
        sizes = {"mp": 1, "ep": 1, "esp": 1}
        sizes |= {_NAMED_SIZES[name]: mesh.size(dim) for dim, name in enumerate(names) if name in _NAMED_SIZES}
        layout = GridLayout(len(ranks), sizes["mp"], sizes["ep"], sizes["esp"])
        for dim, name in enumerate(names):
            wanted = {"tp": "mp"}.get(name, name)
            if wanted in _GROUPS and sorted(_lines(mesh.mesh, dim)) != sorted(layout.ranks(wanted)):
                raise ConfigError(
                    f"dimension {name} of the mesh {tuple(mesh.shape)} {names} has the groups {_lines(mesh.mesh, dim)},"
                    f" but a grid's are {layout.ranks(wanted)}; order the dimensions (dp, mp) or (edp, ep, esp)"
                )
        return Grid(**sizes, levels=levels, device_type=mesh.device_type)

    def __repr__(self) -> str:
        layout = self.layout
        return (
            f"Grid(dp={layout.dp}, mp={layout.mp}, edp={layout.edp}, ep={layout.ep}, esp={layout.esp},"
            f" levels={layout.levels})"
        )


def _grid(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


def _lines(ranks: torch.Tensor, dim: int) -> list[list[int]]:
    """The rows of `ranks` along `dim`."""
    lines: list[list[int]] = ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist()
    return lines


def _new_group(lists: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """This rank's of the groups with these ranks; every rank of the world comes here."""
    if len(lists) == 1:
        return _world()
    group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in lists])
    assert group is not None, "the lists are a partition of the world"
    return group


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "checked when the grid is made"
    return group
