"""What every scaling method is: a module that chooses coefficients, and whose checkpoint means the same everywhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .site import SkipSite

Sites = Sequence[SkipSite]


class KeptBuffers(nn.Module):
    """A module whose buffers come back from the meta device with the values they had before.

    Parameters that leave it are loaded or initialised anew; `to_empty` would leave constants random.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KeptBuffers:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is None or new is None or old.is_meta == new.is_meta:
                continue
            if new.is_meta:
                self.kept[name] = old
            elif name in self.kept:
                with torch.no_grad():
                    new.copy_(self.kept[name])
        return self


class SkipScaling(KeptBuffers, ABC):
    """Chooses the coefficient of every long skip; its parameters and buffers live in the scaled model's state dict.

    The state dict also says, as text, how the model was scaled; weights that say otherwise are refused.

    >>> class Halve(SkipScaling):
    ...     def coefficient(self, index, skip):
    ...         return skip.new_tensor(0.5)
    """

    signature: Tensor

    def __init__(self, sites: Sites) -> None:
        super().__init__()
        self.num_skips = innermost(sites)
        self.signed_as = ""
        self.register_buffer("signature", as_signature(self.signed_as))

    @abstractmethod
    def coefficient(self, index: int, skip: Tensor) -> Tensor | float:
        """The factor of skip `index` (1 = outermost), a number or a shape that broadcasts over `skip` (B, C, …)."""

    def forward(self, index: int, skip: Tensor) -> Tensor | float:
        return self.coefficient(index, skip)

    def constants(self) -> Tensor | None:
        """Coefficients that do not depend on the input, shape (num_skips,), or None if they do."""
        return None

    def settings(self) -> str:
        """What must agree, besides the shapes, for weights trained with one scaling to mean the same in another."""
        return type(self).__name__

    def sign(self, text: str) -> None:
        self.signed_as, self.signature = text, as_signature(text)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:  # type: ignore[override]
        error_messages = rest[-1]
        theirs, ours = text_of(state_dict.get(f"{prefix}signature")), self.signed_as
        if theirs is not None and theirs != ours:
            error_messages.append(f"the weights were scaled as {theirs!r}, this model as {ours!r}: scale it alike")
        super()._load_from_state_dict(state_dict, prefix, *rest)


class ConstantScaling(SkipScaling):
    """Fixed coefficients, kept in a persistent buffer so that a scaled checkpoint cannot pass for a plain one."""

    coefficients: Tensor

    def __init__(self, sites: Sites, coefficients: Tensor) -> None:
        super().__init__(sites)
        self.register_buffer("coefficients", coefficients)

    def coefficient(self, index: int, skip: Tensor) -> Tensor:
        return self.coefficients[index - 1]

    def constants(self) -> Tensor | None:
        return self.coefficients


def innermost(sites: Sites) -> int:
    return max(site.index for site in sites)


def as_signature(text: str) -> Tensor:
    """The text's bytes, as a tensor that any checkpoint can hold."""
    # Floats: an average of weights that takes buffers along rounds integers down at each step, and cannot have bools.
    return torch.tensor(list(text.encode()), dtype=torch.float32, device="cpu")


def text_of(signature: Tensor | None) -> str | None:
    """The text of a signature, unless there is none or it has no values."""
    if signature is None or signature.is_meta:
        return None
    return bytes(signature.round().clamp(0, 255).to(torch.uint8).tolist()).decode(errors="replace")
