"""Process groups of a grid: of the dense parameters, of experts and of levels; divided as in `laconic.topology`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from laconic.errors import ConfigError
from laconic.topology import GridLayout, groups_of_ranks

_NAMED_SIZES = {"mp": "mp", "tp": "mp", "ep": "ep", "esp": "esp", "etp": "esp"}


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
        linked: process group of the ranks that a layer's forward lets wait for each other: those that MP and joint
            groups link, which need not lie in one another.
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
        num_linked, known = lcm(mp, layout.joint), {layout.joint: self.joint, mp: self.mp}
        self.linked = known.get(num_linked) or self._new_group(groups_of_ranks(num_ranks, 1, num_linked))
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

        "mp" or "tp", "ep", and "esp" or "etp" give sizes (1 if there is no such dimension), and the only dimension of a
        mesh without names is ep. A first dimension "pp" gives the stages. The groups of every such dimension have to be
        the grid's. Before them, dimensions of other names ("dp", "dp_replicate", "dp_shard", "efsdp", "cp", "edp") are
        of processes that hold the same experts and have other tokens.

        Raises:
            ConfigError: the mesh is not over ranks 0, 1, ... of the world, or a dimension has other groups.
        """
        ranks, names, sizes = mesh.mesh.flatten().tolist(), _names(mesh), _sizes(mesh)
        if ranks != list(range(dist.get_world_size())):
            raise ConfigError(
                f"mesh has the ranks {ranks}, but a grid is over all {dist.get_world_size()} of the world in order;"
                f" pass the mesh of all ranks, or {_call(sizes or {'ep': len(ranks)})}"
            )
        if not sizes:
            raise ConfigError(
                f"mesh has the dimensions {names or 'without names'}, but one of them must be called mp, tp, ep or esp;"
                f" name them with mesh_dim_names, or pass {_call({'ep': mesh.size(mesh.ndim - 1)})}"
            )
        stages = mesh.size(names.index("pp")) if "pp" in names else 1
        layout = GridLayout(len(ranks) // stages, sizes.get("mp", 1), sizes.get("ep", 1), sizes.get("esp", 1))
        for dim, name in enumerate(names):
            if name != "pp" and name not in _NAMED_SIZES:
                continue
            lines, wanted = sorted(_lines(mesh.mesh, dim)), _groups(layout, name, stages)
            if lines != wanted:
                raise ConfigError(
                    f"dimension {name} of the mesh {tuple(mesh.shape)} {names} has the groups {lines}, but a grid's are"
                    f" {wanted}; {_remedy(names, sizes, stages)}"
                )
        return Grid(**{"ep": 1, **sizes}, levels=levels, stages=stages, device_type=mesh.device_type)

    def __repr__(self) -> str:
        layout = self.layout
        return (
            f"Grid(dp={layout.dp}, mp={layout.mp}, edp={layout.edp}, ep={layout.ep}, esp={layout.esp},"
            f" levels={layout.levels})"
        )


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or (("ep",) if mesh.ndim == 1 else ())


def _sizes(mesh: DeviceMesh) -> dict[str, int]:
    """Return the arguments of Grid that a mesh's dimensions give."""
    return {_NAMED_SIZES[name]: mesh.size(dim) for dim, name in enumerate(_names(mesh)) if name in _NAMED_SIZES}


def _call(sizes: dict[str, int]) -> str:
    return f"Grid({', '.join(f'{name}={size}' for name, size in sizes.items())})"


def _remedy(names: Sequence[str], sizes: dict[str, int], stages: int) -> str:
    """Say which calls make a grid of the dimensions of a mesh whose groups are others."""
    more = {"stages": stages} if stages > 1 else {}
    inner, mp, ep = names[-1], sizes.get("mp", 1), sizes.get("ep", 1)
    if _NAMED_SIZES.get(inner) == "mp" and "ep" in sizes and "esp" not in sizes:
        cut, spread = {"mp": mp, "ep": ep, "esp": mp, **more}, {"mp": mp, "ep": ep * mp, **more}
        return (
            f"pass {_call(cut)}, which cuts each expert over {inner}, or {_call(spread)}, which spreads experts over ep"
            f" and {inner}"
        )
    return f"pass {_call(sizes | more)}, or order the dimensions (pp, dp, mp) or (pp, dp, ep, esp)"


def _groups(layout: GridLayout, name: str, stages: int) -> list[list[int]]:
    """List the groups that a dimension of a mesh has to have, of all stages."""
    size = layout.num_ranks
    if name == "pp":
        return groups_of_ranks(size * stages, size, stages)
    ranks = layout.ranks(_NAMED_SIZES[name])
    return sorted([rank + stage * size for rank in group] for stage in range(stages) for group in ranks)


def _lines(ranks: torch.Tensor, dim: int) -> list[list[int]]:
    lines: list[list[int]] = ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist()
    return lines


def _mesh(device: str, stages: int, sizes: dict[str, int]) -> DeviceMesh:
    if stages == 1:
        return init_device_mesh(device, (*sizes.values(),), mesh_dim_names=(*sizes,))
    return init_device_mesh(device, (stages, *sizes.values()), mesh_dim_names=("pp", *sizes))[(*sizes,)]


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "checked when the grid is made"
    return group
