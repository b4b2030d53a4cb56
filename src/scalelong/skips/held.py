"""Hooks that use a module which their network holds."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class NetworkHook:
    """A hook that calls whatever its network holds under a name: adapters and sharding put another module there.

    An object, not a closure: a deep copy of the network copies it together with the module, so that an EMA copy never
    calls the original's. The network is referred to weakly, or it would have to wait for the garbage collector.
    """

    handle: RemovableHandle
    """Kept with the hook because unpickling it keeps its number in the module's table from being given away again."""

    def __init__(self, network: nn.Module, name: str, module: nn.Module) -> None:
        self.reference: weakref.ref[nn.Module] | None = weakref.ref(network)
        self.name, self.module = name, module

    @property
    def network(self) -> nn.Module | None:
        return None if self.reference is None else self.reference()

    @property
    def held(self) -> Any:
        """The module; its first one serves a part that was copied without its network."""
        held = None if self.network is None else self.network._modules.get(self.name)
        return self.module if held is None else held

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"reference": self.network}

    def __setstate__(self, state: dict[str, Any]) -> None:
        network = state["reference"]
        self.__dict__ |= state | {"reference": None if network is None else weakref.ref(network)}
