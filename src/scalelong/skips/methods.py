"""The scaling methods, one class each: by what is the i-th skip multiplied? See CONTRIBUTING.md to add one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .gates import ACTIVATIONS, Gate, InstanceEnhance, SqueezeExcite
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
        self.register_buffer("signature", torch.zeros(0, dtype=torch.float32, device="cpu"))

    @abstractmethod
    def coefficient(self, index: int, skip: Tensor) -> Tensor | float:
        """The factor of skip `index` (1 = outermost), a number or a shape that broadcasts over `skip` (B, C, …)."""

    def forward(self, index: Any, skip: Tensor | None = None) -> Tensor | float:
        # An nn.Sequential also calls, with its features alone, what is held beside its layers.
        return index if skip is None else self.coefficient(index, skip)

    def constants(self) -> Tensor | None:
        """Coefficients that do not depend on the input, shape (num_skips,), or None if they do."""
        return None

    def settings(self) -> str:
        """What must agree, besides the shapes, for weights trained with one scaling to mean the same in another."""
        return type(self).__name__

    def sign(self, text: str) -> None:
        """Keep the text's bytes as a tensor that any checkpoint can hold."""
        # Floats: averages of weights that take buffers along round integers down at each step, and cannot have bools.
        self.signature = torch.tensor(list(text.encode()), dtype=torch.float32, device="cpu")
        self.signed_as = text

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:  # type: ignore[override]
        error_messages = rest[-1]
        theirs, ours = text_of(state_dict.get(f"{prefix}signature")), self.signed_as
        if theirs is not None and theirs != ours:
            error_messages.append(f"the weights were scaled as {theirs!r}, this model as {ours!r}: scale it alike")
        super()._load_from_state_dict(state_dict, prefix, *rest)


class ConstantScaling(SkipScaling):
    """Fixed coefficients, kept in a persistent buffer so that a scaled checkpoint cannot pass for a plain one."""

    coefficients: Tensor

    def __init__(self, sites: Sites, coefficients: Sequence[float] | Tensor) -> None:
        """`coefficients` are one for each skip up to the innermost that is scaled, outermost first."""
        super().__init__(sites)
        # On the CPU whatever the default device is: a model on the meta device keeps the values for later.
        values = torch.as_tensor(coefficients, dtype=torch.float32, device="cpu")
        count = innermost(sites)
        require(values.shape == (count,), f"{count} coefficients are needed, one per skip, got {tuple(values.shape)}")
        self.register_buffer("coefficients", values)

    def coefficient(self, index: int, skip: Tensor) -> Tensor:
        return self.coefficients[index - 1]

    def constants(self) -> Tensor | None:
        return self.coefficients


def constant_coefficients(num_skips: int, kappa: float) -> Tensor:
    """Coefficients kappa_i = kappa^(i-1), i = 1 outermost (Eq. 8). Shape: (num_skips,).

    >>> constant_coefficients(3, 0.5).tolist()
    [1.0, 0.5, 0.25]
    """
    return torch.tensor([float(kappa) ** i for i in range(num_skips)], dtype=torch.float32, device="cpu")


class UniformScaling(ConstantScaling):
    """The same constant at every skip; 1/√2 by default."""

    def __init__(self, sites: Sites, value: float = 1 / math.sqrt(2)) -> None:
        value = as_number(value, "value")
        require(value > 0, f"value must be positive, got {value}")
        super().__init__(sites, [value] * innermost(sites))


class CS(ConstantScaling):
    """Constant scaling, kappa_i = kappa^(i-1) (Eq. 8): the outermost skip keeps 1."""

    def __init__(self, sites: Sites, kappa: float = 0.7) -> None:
        coefficients = constant_coefficients(innermost(sites), as_kappa(kappa))
        require(coefficients[-1].item() > 0, f"kappa={kappa} is so small that the innermost coefficient becomes 0")
        super().__init__(sites, coefficients)


class CSReversed(ConstantScaling):
    """kappa_i = kappa^(N-i+1): the outermost skip shrinks most. Worse than CS, kept as a control (Table 4).

    `num_skips` is N; by default the innermost skip that is scaled.
    """

    def __init__(self, sites: Sites, kappa: float = 0.7, num_skips: int | None = None) -> None:
        curve = constant_coefficients((num_skips or innermost(sites)) + 1, as_kappa(kappa))
        require(curve[-1].item() > 0, f"kappa={kappa} is so small that the outermost coefficient becomes 0")
        super().__init__(sites, curve[1:].flip(0)[: innermost(sites)].contiguous())


class Learnable(SkipScaling):
    """One plain learnable number per skip (Table 2), from `init`."""

    def __init__(self, sites: Sites, init: float = 1.0) -> None:
        super().__init__(sites)
        self.coefficients = nn.Parameter(torch.full((self.num_skips,), as_number(init, "init"), dtype=torch.float32))

    def coefficient(self, index: int, skip: Tensor) -> Tensor:
        return self.coefficients[index - 1]

    def constants(self) -> Tensor | None:
        return self.coefficients.detach()


class LearnedKappa(SkipScaling):
    """CS whose single kappa in (0, 1] is trained, so that it need not be picked by hand; `init` is its start."""

    def __init__(self, sites: Sites, init: float = 0.7) -> None:
        super().__init__(sites)
        # kappa = exp(-|decay|) reaches 1 without a sigmoid's vanishing gradient, and bounces back from it.
        # One number with a dimension of its own: fully_shard refuses parameters that have none.
        self.decay = nn.Parameter(torch.tensor([-math.log(as_kappa(init, "init"))], dtype=torch.float32))

    @property
    def kappa(self) -> Tensor:
        return self._power(1)

    def _power(self, steps: int | Tensor) -> Tensor:
        decay = self.decay[0]
        return torch.exp(-steps * torch.where(decay < 0, -decay, decay))

    def coefficient(self, index: int, skip: Tensor) -> Tensor:
        return self._power(index - 1)

    def constants(self) -> Tensor | None:
        return self._power(torch.arange(self.num_skips, device=self.decay.device)).detach()


class LS(SkipScaling):
    """Learned scaling (Eq. 9): a tiny network reads the pooled skip and gives its coefficients in (0, 1).

    The gate weighs dimension 1 of the skip, as in the paper: channels of a conv UNet, tokens of a U-ViT.
    `gate="channels"` weighs the token width instead and so works at any resolution; it is the default where nothing in
    the network fixes the number of tokens. One gate serves all skips of the same width.
    """

    def __init__(
        self,
        sites: Sites,
        ratio: int = 16,
        activation: str = "relu",
        init: float | None = None,
        gate: str | None = None,
    ) -> None:
        require(isinstance(ratio, int) and ratio >= 1, f"ratio must be a positive integer, got {ratio}")
        require(activation in ACTIVATIONS, f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        require(gate in (None, "width", "channels"), f"gate must be 'width' or 'channels', got {gate!r}")
        init = None if init is None else as_number(init, "init")
        require(init is None or 0 < init < 1, f"init must lie strictly between 0 and 1, got {init}")
        super().__init__(sites)
        self.ratio, self.activation, self.init = ratio, activation, init
        self.gate = gate or ("channels" if any(site.varies for site in sites) else "width")
        self.dims: dict[int, int] = {}
        self.gate_names: dict[int, str] = {}
        self.gates = nn.ModuleDict()
        for site in sites:
            self.dims[site.index], width = (
                (1, site.width) if self.gate == "width" else (site.channel_dim, site.channels)
            )
            self.gate_names[site.index] = name = self.gate_name(site, width)
            if name not in self.gates:
                self.gates[name] = self.make_gate(width)

    def settings(self) -> str:
        return f"{type(self).__name__} {self.activation} gate={self.gate}"

    def gate_name(self, site: SkipSite, width: int) -> str:
        return f"width{width}"

    def make_gate(self, width: int) -> Gate:
        return SqueezeExcite(width, self.ratio, self.activation, self.init)

    def coefficient(self, index: int, skip: Tensor) -> Tensor:
        dim = self.dims[index] % skip.ndim
        others = [d for d in range(1, skip.ndim) if d != dim]
        # Global average pooling in float32; shape (B, skip.shape[dim]).
        pooled = skip.mean(dim=others, dtype=torch.float32) if others else skip.float()
        weights = self.gates[self.gate_names[index]](pooled)
        shape = [1] * skip.ndim
        shape[0], shape[dim] = weights.shape
        return weights.view(shape).to(skip.dtype)


class LSIndividual(LS):
    """LS with a gate of its own for every skip."""

    def gate_name(self, site: SkipSite, width: int) -> str:
        return f"skip{site.index}"


class IE(LS):
    """Instance enhancement (Table 2): a per-channel scale and shift of the pooled value, then a sigmoid."""

    def __init__(self, sites: Sites, init: float | None = None, gate: str | None = None) -> None:
        super().__init__(sites, init=init, gate=gate)

    def make_gate(self, width: int) -> Gate:
        return InstanceEnhance(width, self.init)


class RMSNormed(SkipScaling):
    """The skip divided by the root mean square of its channels at each position, times one learnable gain per skip."""

    def __init__(self, sites: Sites, init: float = 1.0) -> None:
        super().__init__(sites)
        self.dims = {site.index: site.channel_dim for site in sites}
        self.gain = nn.Parameter(torch.full((self.num_skips,), as_number(init, "init"), dtype=torch.float32))

    def coefficient(self, index: int, skip: Tensor) -> Tensor:
        dim, precision = self.dims[index], torch.promote_types(skip.dtype, torch.float32)
        norm = torch.linalg.vector_norm(skip, dim=dim, keepdim=True, dtype=precision)
        mean_square = norm.square() / skip.shape[dim]
        return (self.gain[index - 1] * torch.rsqrt(mean_square + 1e-6)).to(skip.dtype)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def as_number(value: Any, name: str) -> float:
    """The value as a finite float; numpy and torch scalars are numbers, texts and truth values are not."""
    try:
        number = math.nan if isinstance(value, (str, bool)) else float(value)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    require(math.isfinite(number), f"{name} must be a finite number, got {value!r}")
    return number


def as_kappa(value: Any, name: str = "kappa") -> float:
    number, advice = as_number(value, name), "the paper's range is 0.5 to 0.95, and 1 changes nothing"
    require(0 < number <= 1, f"{name} must lie in (0, 1], got {value!r}; {advice}")
    return number


def innermost(sites: Sites) -> int:
    return max(site.index for site in sites)


def text_of(signature: Tensor | None) -> str | None:
    """The text of a signature, unless there is none or it has no values."""
    if signature is None or signature.is_meta:
        return None
    return bytes(signature.round().clamp(0, 255).to(torch.uint8).tolist()).decode(errors="replace")


METHODS: dict[str, type[SkipScaling] | None] = {
    "none": None,
    "uniform": UniformScaling,
    "cs": CS,
    "cs-reversed": CSReversed,
    "ls": LS,
    "ls-individual": LSIndividual,
    "ie": IE,
    "learnable": Learnable,
    "learned-kappa": LearnedKappa,
    "norm": RMSNormed,
}
