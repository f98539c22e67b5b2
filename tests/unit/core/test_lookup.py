"""``paceline.get``: every value on every rank, with and without a mesh, compared with torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import paceline
from insides import rank_lookup_NAMES as NAMES
from paceline import World, cache_mesh, get
from paceline.errors import UsageError, WorldError
from twins import Pools

CPU = torch.device("cpu")


def answers(mesh: Any = None) -> tuple[Any, ...]:
    """Return ws, rank, grank, lrank, device and the global ranks of pg."""
    ranks = dist.get_process_group_ranks(get("pg", mesh))
    return (*(get(what, mesh) for what in ("ws", "rank", "grank", "lrank", "device")), ranks)


def refusal(*arguments: Any) -> tuple[type, str]:
    try:
        get(*arguments)
    except UsageError as error:
        return type(error), str(error)
    raise AssertionError(f"get{arguments} was not refused")


def of_two_dimensions(world: World) -> dict[str, Any]:
    without = answers()
    assert without == (4, world.rank, world.rank, world.rank, CPU, [0, 1, 2, 3])
    assert get("pg") is dist.group.WORLD
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    get.register_mesh(mesh)
    assert answers("dp") == answers(mesh["dp"])
    assert answers("tp") == answers(mesh["tp"])
    assert [get(what, mesh) for what in NAMES[3:]] == [world.rank, world.local_rank, CPU]
    assert answers() == without
    # The group works: an all-reduce over it sums over the ranks along the dimension.
    total = torch.tensor([10**world.rank])
    dist.all_reduce(total, group=get("pg", "dp"))
    return {"dp": answers("dp"), "tp": answers("tp"), "sum over dp": int(total)}


def test_values_are_global_without_a_mesh_and_per_dimension_with_one(pools: Pools) -> None:
    seen = pools.run(4, of_two_dimensions)
    #  ranks   tp 0  tp 1
    #  dp 0       0     1
    #  dp 1       2     3
    for rank, one in enumerate(seen):
        dp, tp = divmod(rank, 2)
        assert one["dp"] == (2, dp, rank, rank, CPU, [tp, 2 + tp])
        assert one["tp"] == (2, tp, rank, rank, CPU, [2 * dp, 2 * dp + 1])
        assert one["sum over dp"] == [101, 1010][tp]


def refusals(world: World) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    get.register_mesh(mesh)
    seen = {
        "several": [refusal(what, mesh) for what in NAMES[:3]],
        "dimension": refusal("rank", "pp"),
        "kind": refusal("rank", 0),
        "word": refusal("world_size"),
        "unnamed": refusal("ws", DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]]))),
    }
    with pytest.raises(UsageError, match=r"no dimension names; create it with init_device_mesh\('cpu', \(2, 2\), "):
        get.register_mesh(DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]])))
    part = DeviceMesh("cpu", torch.tensor([0, 2]))
    seen["outside"] = refusal("grank", part) if world.rank in (1, 3) else get("rank", part)
    return seen


def test_invalid_queries_are_refused_with_the_remedy(pools: Pools) -> None:
    for rank, seen in enumerate(pools.run(4, refusals)):
        needs = "needs one dimension, but the mesh has 2 (dp, tp); pass one of them, mesh['dp']"
        assert seen["several"] == [(UsageError, f"get({what!r}) {needs}") for what in NAMES[:3]]
        assert seen["dimension"] == (UsageError, "the registered mesh has no dimension 'pp'; it has 'dp', 'tp'")
        assert seen["kind"][1] == "mesh must be a DeviceMesh or the name of a dimension of the registered one, not int"
        assert seen["word"][1] == "get('world_size') is unknown; use one of ws, rank, pg, grank, lrank, device"
        assert "the mesh has 2; pass a mesh of one dimension" in seen["unnamed"][1]
        if rank in (1, 3):
            message = f"rank {rank} is not part of the mesh, which has ranks [0, 2]; call get() only on those ranks"
            assert seen["outside"] == (WorldError, message)
        else:
            assert seen["outside"] == rank // 2


@pytest.mark.ranks(2)
def test_a_registered_mesh_lasts_as_long_as_its_process_group() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    nothing_yet = refusal("ws", "dp")
    assert nothing_yet[0] is WorldError
    assert "call paceline.get.register_mesh(mesh) first" in nothing_yet[1]
    get.register_mesh(mesh)
    assert get("ws", "dp") == 2
    dist.destroy_process_group()
    no_group = WorldError, "no process group exists yet; call paceline.init() first"
    assert refusal("ws") == refusal("ws", "dp") == no_group
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    assert refusal("ws", "dp") == nothing_yet
    dist.destroy_process_group()


def test_get_requires_init() -> None:
    for call in (lambda: paceline.get("rank"), lambda: get("ws", "dp"), lambda: get.register_mesh(object())):  # type: ignore[arg-type]
        with pytest.raises(WorldError, match=r"call paceline\.init\(\) first"):
            call()


def registered_without_names(world: World) -> list[Any]:
    """Register the mesh as tutorials do, also with an extra pair of brackets."""
    found = []
    for ranks in ([0, 1, 2, 3], [[0, 1, 2, 3]]):
        assert get.register_mesh(DeviceMesh("cpu", torch.tensor(ranks))) is get
        found.append(answers())
    half = DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]]), mesh_dim_names=("dp", "tp"))["tp"]
    found += [answers(half), refusal("rank", "dp")]
    own = dist.new_subgroups(2)[0]
    mesh = DeviceMesh.from_group(own, "cpu")
    get.register_mesh(mesh)
    found.append(answers())
    assert get("pg") is own
    part = DeviceMesh("cpu", torch.tensor([1, 3]))
    get.register_mesh(part)
    found.append([get("grank"), get("rank") if world.rank in (1, 3) else refusal("rank")])
    get.register_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    assert answers() == found[0]
    return found


def test_a_registered_mesh_of_one_dimension_without_names_is_the_default(pools: Pools) -> None:
    for rank, (whole, nested, half, named, own, part) in enumerate(pools.run(4, registered_without_names)):
        assert whole == nested == (4, rank, rank, rank, CPU, [0, 1, 2, 3])
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert half == (2, rank % 2, rank, rank, CPU, pair)
        assert named[1] == "dimension 'dp' is unknown, because the registered mesh has no names; leave it out"
        assert own == (2, rank % 2, rank, rank % 2, CPU, pair)  # lrank is also the position in the mesh
        assert part[0] == rank
        assert part[1] == rank // 2 if rank in (1, 3) else part[1][0] is WorldError


@cache_mesh
def whole_name(what: str, mesh: DeviceMesh | None = None) -> str:
    """A docstring."""
    return f"{what} of {'no mesh' if mesh is None else mesh.size()}"


@pytest.mark.ranks(2)
def test_a_decorated_function_defaults_to_the_registered_mesh(world: World) -> None:
    assert whole_name("rank") == "rank of no mesh"
    assert whole_name.register_mesh(DeviceMesh("cpu", torch.tensor([0, 1]))) is whole_name
    assert whole_name("rank") == "rank of 2"
    alone = DeviceMesh("cpu", torch.tensor([world.rank]))
    assert whole_name("rank", alone) == whole_name(what="rank", mesh=alone) == "rank of 1"
    assert get("ws", dm=alone) == cache_mesh(lambda what, dm=None: dm.size())("ws", dm=alone) == 1
    assert whole_name.__doc__ == "A docstring."
    with pytest.raises(UsageError, match="mesh must be a DeviceMesh"):
        whole_name.register_mesh([0, 1])  # type: ignore[arg-type]
    dist.destroy_process_group()
    assert whole_name("rank") == "rank of no mesh"
