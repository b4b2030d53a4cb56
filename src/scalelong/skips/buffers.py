"""Buffers that survive the meta device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class KeptBuffers(nn.Module):
    """A module whose buffers come back from the meta device with the values they had before.

    Parameters that leave it are loaded or drawn anew; constants are neither, and `to_empty` would leave them random.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KeptBuffers:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and old.is_meta != new.is_meta:
                self._keep(name, old, new)
        return self

    @torch.no_grad()
    def _keep(self, name: str, old: Tensor, new: Tensor) -> None:
        if new.is_meta:
            self.kept[name] = old
        elif name in self.kept:
            new.copy_(self.kept[name])
