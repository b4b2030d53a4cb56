"""The processes that train one model together, and what they tell each other of a step that is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")


@dataclass(frozen=True)
class Team:
    """Every process must ask for the same at the same time; one that is alone asks nobody."""

    rank: int = 0
    size: int = 1
    group: Any = None
    """The process group; None = all processes."""

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the processes. Shape: any."""
        if self.size == 1:
            return values
        total = values.clone()
        torch.distributed.all_reduce(total, group=self.group)
        return total

    def gather(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Each vector with those of the other processes behind it, which may be longer or shorter. Shape: (n,) each."""
        if self.size == 1 or not parts:
            return list(parts)
        sizes = self._gather(parts[0].new_tensor([len(part) for part in parts])).long()
        longest = int(sizes.sum(dim=1).max())
        rows = self._gather(nn.functional.pad(own := torch.cat(list(parts)), (0, longest - len(own))))
        split = [row[: int(size.sum())].split(size.tolist()) for row, size in zip(rows, sizes, strict=True)]
        return [torch.cat(found) for found in zip(*split, strict=True)]

    def _gather(self, row: Tensor) -> Tensor:
        """Shape: (n,) → (processes, n)."""
        rows = [torch.empty_like(row) for _ in range(self.size)]
        torch.distributed.all_gather(rows, row.contiguous(), group=self.group)
        return torch.stack(rows)


def unwrapped(model: nn.Module) -> nn.Module:
    """The network inside DDP, DataParallel or FSDP."""
    while type(model).__name__ in WRAPPERS:
        model = model.get_submodule("module")
    return model


def team_of(model: nn.Module) -> Team:
    """The processes that DDP or FSDP let train this model; a bare network is one process's own."""
    wrapped = getattr(model, "process_group", None) if type(model).__name__ in WRAPPERS else None
    # What `fully_shard` makes of a module has this method, and no name or class that need be imported.
    sharded = hasattr(model, "set_requires_gradient_sync")
    if wrapped is None and not sharded:
        return Team()
    group = wrapped if wrapped is not None else group_of(next(model.parameters()))
    return Team(torch.distributed.get_rank(group), torch.distributed.get_world_size(group), group)


def group_of(parameter: Any) -> Any:
    """The processes that hold the shards of a parameter."""
    mesh = parameter.device_mesh
    return mesh.get_group() if mesh.ndim == 1 else None
