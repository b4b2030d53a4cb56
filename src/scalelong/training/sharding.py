"""FSDP: weights, averages and optimiser state in shards, one on each process; checkpoints hold whole tensors.

Torch's `fully_shard` is used as it is, because Accelerate's own FSDP leaves out the CPU. A run saved sharded goes on
unsharded, and the other way round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def shard(network: nn.Module, device: torch.device, precision: str = "no") -> nn.Module:
    """Keep only this process's part of the weights, on its device; the network is changed in place and returned.

    Every block is gathered when it is entered and let go of when it is left. `precision` is Accelerate's name.
    """
    from torch.distributed import get_world_size
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # Gathered in bf16 and averaged in float32; autocast decides what is computed in bf16, as without shards.
    gathered = torch.bfloat16 if precision == "bf16" else None
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(gathered, torch.float32, cast_forward_inputs=False),
        # Also for the root, which torch would leave whole after a forward pass: swapped weights must be seen.
        "reshard_after_forward": True,
    }
    for block in blocks_of(network):
        fully_shard(block, **options)
    return fully_shard(network, **options)  # pyright: ignore[reportReturnType]


def blocks_of(network: nn.Module) -> list[nn.Module]:
    """The outermost entries of module lists: in and out blocks of a U-ViT, down and up blocks of a UNet."""
    lists = [module for module in network.modules() if isinstance(module, nn.ModuleList)]
    inner = {id(module) for found in lists for entry in found for module in entry.modules()}
    return [entry for found in lists if id(found) not in inner for entry in found if has_weights(entry)]


def has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


@contextmanager
def no_sync(network: nn.Module) -> Iterator[None]:
    """Gradients stay in the process that computed them, to be added to those of the next part of a batch."""
    sharded: Any = network
    sharded.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        sharded.set_requires_gradient_sync(True)


def is_sharded(tensor: Tensor) -> bool:
    # Not by class, which lives in a package that takes long to import and is needed by sharded runs only.
    return hasattr(tensor, "full_tensor")


def local(tensor: Tensor) -> Tensor:
    """This process's part, sharing its memory; a tensor that is not sharded itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def whole(tensor: Tensor) -> Tensor:
    """All parts together; every process must ask at the same time."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def gather(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Whole tensors, one after the other, on the CPU where `keep` says so, else nothing; for all processes at once."""
    found = ((name, whole(tensor)) for name, tensor in tensors.items())
    kept = ((name, tensor.cpu() if is_sharded(tensors[name]) else tensor) for name, tensor in found if keep)
    return dict(kept)


def scatter(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors cut as those of the same name in `like` are, where they are cut; for all processes at once."""
    return {name: part(tensor, like[name]) if name in like else tensor for name, tensor in tensors.items()}


def part(tensor: Tensor, like: Tensor) -> Tensor:
    if not is_sharded(like) or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = like
    return distribute_tensor(tensor.to(like.device, like.dtype), sharded.device_mesh, sharded.placements)
