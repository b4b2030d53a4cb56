"""The processes that train one model together, and how the numbers of a step are taken over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")


@dataclass(frozen=True)
class Processes:
    """Every process must call `sum` and `gather` at the same time; with one process they change nothing."""

    rank: int = 0
    size: int = 1
    group: Any = None
    """The process group; None = all processes."""

    @classmethod
    def of(cls, model: nn.Module) -> Processes:
        """Those of DDP or FSDP; a bare network is trained by one process."""
        group: Any = getattr(model, "process_group", None) if type(model).__name__ in WRAPPERS else None
        # What `fully_shard` makes of a module has this method, and parameters that know their processes.
        if group is None and hasattr(model, "set_requires_gradient_sync"):
            mesh: Any = next(model.parameters()).device_mesh  # type: ignore[attr-defined]
            group = mesh.get_group() if mesh.ndim == 1 else None
        elif group is None:
            return cls()
        return cls(torch.distributed.get_rank(group), torch.distributed.get_world_size(group), group)

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
        own, longest = torch.cat(list(parts)), int(sizes.sum(dim=1).max())
        rows = self._gather(nn.functional.pad(own, (0, longest - len(own))))
        split = [row[: int(size.sum())].split(size.tolist()) for row, size in zip(rows, sizes, strict=True)]
        return [torch.cat(vectors) for vectors in zip(*split, strict=True)]

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
