"""What a scaling keeps in the model's state dict, so that a checkpoint means the same wherever it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class KeptBuffers(nn.Module):
    """A module whose buffers come back from the meta device with the values they had before.

    Parameters that leave it are loaded or initialised anew; constants are neither, and `to_empty` would leave them
    random.
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


class Signed(KeptBuffers):
    """A module that says in the state dict, as text, how it was made; weights that say otherwise are refused."""

    signature: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.signed_as = ""
        self.register_buffer("signature", as_signature(self.signed_as))

    def sign(self, text: str) -> None:
        self.signed_as, self.signature = text, as_signature(text)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:  # type: ignore[override]
        error_messages = rest[-1]
        theirs, ours = text_of(state_dict.get(f"{prefix}signature")), self.signed_as
        if theirs is not None and theirs != ours:
            error_messages.append(f"the weights were scaled as {theirs!r}, this model as {ours!r}: scale it alike")
        super()._load_from_state_dict(state_dict, prefix, *rest)


def as_signature(text: str) -> Tensor:
    """The text's bytes, as a tensor that any checkpoint can hold."""
    # Floats: an average of weights that takes buffers along rounds integers down at each step, and cannot have bools.
    return torch.tensor(list(text.encode()), dtype=torch.float32, device="cpu")


def text_of(signature: Tensor | None) -> str | None:
    """The text of a signature, unless there is none or it has no values."""
    if signature is None or signature.is_meta:
        return None
    return bytes(signature.round().clamp(0, 255).to(torch.uint8).tolist()).decode(errors="replace")
