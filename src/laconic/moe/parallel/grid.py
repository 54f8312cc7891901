"""Process groups of a grid: of the dense parameters, of experts and of levels; divided as in `laconic.topology`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from laconic.errors import ConfigError
from laconic.topology import GROUPS, GridLayout

__all__ = ["Grid", "Level"]

_NAMED_SIZES = {"mp": "mp", "tp": "mp", "ep": "ep", "esp": "esp"}


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
    """Process groups of this rank, made by all ranks of the default group together.

    Attributes:
        layout: the ranks of every group, numbered within a pipeline stage.
        stages: pipeline stages; groups are of ranks of one stage.
        dense_mesh: DeviceMesh (dp, mp); FSDP2 shards dense parameters over `dense_mesh["dp"]`.
        expert_mesh: DeviceMesh (edp, ep, esp); FSDP2 shards experts over `expert_mesh["edp"]`.
        dp, mp, edp, ep, esp, joint: process groups.
        levels: level 0 is the whole EP group, further ones as asked for.

    Raises:
        ConfigError: there is no default group, or sizes do not fit its world.
    """

    def __init__(
        self,
        mp: int = 1,
        ep: int | None = None,
        esp: int = 1,
        *,
        levels: Sequence[int] = (),
        stages: int = 1,
        device_type: str | None = None,
    ) -> None:
        """Make the groups.

        Args:
            mp: ranks that hold the same tokens.
            ep: ranks over which experts are spread; None: all ranks, divided by `esp`.
            esp: ranks that share each expert.
            levels: numbers of parts of the EP group, one for each further level.
            stages: pipeline stages that the world is cut into, each with a grid of its own: stage s has the next world
                / stages ranks.
            device_type: as in init_device_mesh; cuda where it is available.
        """
        if not dist.is_initialized():
            raise ConfigError("no process group exists, but a grid needs one; call init_process_group first")
        if type(stages) is not int or stages < 1 or dist.get_world_size() % stages:
            raise ConfigError(
                f"stages is {stages!r}, but it must divide the {dist.get_world_size()} ranks of the world; change it"
            )
        num_ranks = dist.get_world_size() // stages
        if isinstance(levels, int):
            raise ConfigError(f"levels is {levels}, but it must be one number for each level; pass ({levels},)")
        ep = max(1, num_ranks // max(1, esp)) if ep is None else ep
        self.layout = GridLayout(num_ranks, mp, ep, esp, levels=(*levels,))
        layout, device = self.layout, device_type or ("cuda" if torch.cuda.is_available() else "cpu")
        self.stages = stages
        self.dense_mesh = _mesh(device, stages, {"dp": layout.dp, "mp": mp})
        self.expert_mesh = _mesh(device, stages, {"edp": layout.edp, "ep": layout.ep, "esp": esp})
        self.dp, self.mp = (self.dense_mesh.get_group(name) for name in ("dp", "mp"))
        self.edp, self.ep, self.esp = (self.expert_mesh.get_group(name) for name in ("edp", "ep", "esp"))
        self.joint = self.ep if esp == 1 else self.esp if layout.ep == 1 else self._new_group(layout.ranks("joint"))
        found = [Level(1, self.ep, None)]
        for number, num_groups in enumerate(layout.levels, 1):
            found.append(Level(num_groups, *map(self._new_group, (layout.within(number), layout.across(number)))))
        self.levels: tuple[Level, ...] = tuple(found)

    def _new_group(self, lists: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """Return this rank's group of those with these ranks in its stage; every rank of the world calls it."""
        size = self.layout.num_ranks
        everywhere = [[rank + stage * size for rank in ranks] for stage in range(self.stages) for ranks in lists]
        if len(everywhere) == 1:
            return _world()
        group, _ = dist.new_subgroups_by_enumeration(everywhere)
        assert group is not None, "the lists are a partition of the world"
        return group

    @staticmethod
    def from_mesh(mesh: DeviceMesh, *, levels: Sequence[int] = ()) -> Grid:
        """Make the grid of a mesh over the whole world by the names of its dimensions.

        "mp" or "tp", "ep" and "esp" give sizes (1 if there is no such dimension), and the only dimension of a mesh
        without names is ep. A first dimension "pp" gives the stages. The groups of every such dimension have to be the
        grid's; so have those of "dp" in a mesh of the dense part. Before "ep", dimensions of other names ("dp",
        "dp_replicate", "dp_shard", "cp", "edp") are of processes that hold the same experts and have other tokens.

        Raises:
            ConfigError: the mesh is not over ranks 0, 1, ... of the world, or a dimension has other groups.
        """
        ranks = mesh.mesh.flatten().tolist()
        if ranks != list(range(dist.get_world_size())):
            raise ConfigError(
                f"mesh has the ranks {ranks}, but a grid is over all {dist.get_world_size()} of the world in order;"
                f" pass the mesh of all ranks, or Grid({_sizes_as_call(mesh)})"
            )
        names = mesh.mesh_dim_names or (("ep",) if mesh.ndim == 1 else ())
        if not names or not {*_NAMED_SIZES} & {*names}:
            raise ConfigError(
                f"mesh has the dimensions {names or 'without names'}, but one of them must be called mp, tp, ep or esp;"
                " name them with mesh_dim_names"
            )
        sizes = {"mp": 1, "ep": 1, "esp": 1}
        sizes |= {_NAMED_SIZES[name]: mesh.size(dim) for dim, name in enumerate(names) if name in _NAMED_SIZES}
        if "pp" in names[1:]:
            raise ConfigError(f"mesh has the dimensions {names}, but pp must be the first; order them like this")
        stages = mesh.size(0) if names[0] == "pp" else 1
        layout = GridLayout(len(ranks) // stages, sizes["mp"], sizes["ep"], sizes["esp"])
        for dim, name in enumerate(names):
            wanted = {"tp": "mp"}.get(name, name)
            if wanted == "dp" and "ep" in names and sizes["mp"] == 1:
                continue  # ranks of ep have tokens of their own, too: it is a part of the grid's dp
            if wanted in GROUPS and sorted(_lines(mesh.mesh, dim)) != _in_stages(layout, wanted, stages):
                raise ConfigError(
                    f"dimension {name} of the mesh {tuple(mesh.shape)} {names} has the groups {_lines(mesh.mesh, dim)},"
                    f" but a grid's are {layout.ranks(wanted)}; {_remedy(names, sizes)}"
                )
        return Grid(**sizes, levels=levels, stages=stages, device_type=mesh.device_type)

    def __repr__(self) -> str:
        layout = self.layout
        return (
            f"Grid(dp={layout.dp}, mp={layout.mp}, edp={layout.edp}, ep={layout.ep}, esp={layout.esp},"
            f" levels={layout.levels})"
        )


def _sizes_as_call(mesh: DeviceMesh) -> str:
    """Return the arguments of Grid that have the sizes of a mesh's named dimensions."""
    names = mesh.mesh_dim_names or (("ep",) if mesh.ndim == 1 else ())
    sizes = {_NAMED_SIZES[name]: mesh.size(dim) for dim, name in enumerate(names) if name in _NAMED_SIZES}
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def _remedy(names: Sequence[str], sizes: dict[str, int]) -> str:
    """Say which call makes a grid of the dimensions of a mesh whose groups are others."""
    inner = names[-1]
    if _NAMED_SIZES.get(inner) == "mp" and "ep" in names and sizes["esp"] == 1:
        mp, ep = sizes["mp"], sizes["ep"]
        return (
            f"pass Grid(mp={mp}, ep={ep}, esp={mp}), which cuts each expert over {inner}, or Grid(mp={mp},"
            f" ep={ep * mp}), which spreads experts over ep and {inner}"
        )
    return "order the dimensions (dp, mp) or (dp, ep, esp)"


def _in_stages(layout: GridLayout, group: str, stages: int) -> list[list[int]]:
    """List the groups of all stages."""
    size = layout.num_ranks
    return sorted([rank + stage * size for rank in ranks] for stage in range(stages) for ranks in layout.ranks(group))


def _lines(ranks: torch.Tensor, dim: int) -> list[list[int]]:
    """List the rows of `ranks` along `dim`."""
    lines: list[list[int]] = ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist()
    return lines


def _mesh(device: str, stages: int, sizes: dict[str, int]) -> DeviceMesh:
    """Return the mesh of this rank's stage."""
    if stages == 1:
        return init_device_mesh(device, (*sizes.values(),), mesh_dim_names=(*sizes,))
    return init_device_mesh(device, (stages, *sizes.values()), mesh_dim_names=("pp", *sizes))[(*sizes,)]


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "checked when the grid is made"
    return group
