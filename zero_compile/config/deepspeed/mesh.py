"""Shard within groups of ranks and replicate between them, as hpZ and MiCS have it."""

import weakref

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zero_runtime import compat
from zero_runtime.errors import OptionError

#: Groups are made once: options are read for every graph, and each rank's groups are a scarce resource.
_MESHES: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, DeviceMesh]] = (
    weakref.WeakKeyDictionary()
)


def hybrid_mesh(key: str, shard_size: int, world_size: int) -> DeviceMesh | None:
    """A (replicate, shard) mesh with ``shard_size`` consecutive ranks a group; None for a single group.

    Collective at its first call.

    Raises:
        OptionError: ``shard_size`` does not divide ``world_size``, or is 1, which shards nothing.
            ``key`` is what the message calls it.
    """
    if shard_size == 1 and world_size > 1:
        raise OptionError(f"DeepSpeed config: {key} = 1 shards nothing: leave it out")
    if world_size % shard_size:
        raise OptionError(
            f"DeepSpeed config: {key} = {shard_size} does not divide the {world_size} ranks"
        )
    world = dist.group.WORLD if dist.is_initialized() else None
    if shard_size == world_size or world is None:
        return None
    meshes = _MESHES.setdefault(world, {})
    if shard_size not in meshes:
        meshes[shard_size] = init_device_mesh(
            _device_type(world),
            (world_size // shard_size, shard_size),
            mesh_dim_names=("replicate", "shard"),
        )
    return meshes[shard_size]


def _device_type(world: dist.ProcessGroup) -> str:
    """An accelerator, if the group has a backend for one."""
    kinds = [device.type for device in compat.devices_of(world)]
    return next((kind for kind in kinds if kind != "cpu"), "cpu")
