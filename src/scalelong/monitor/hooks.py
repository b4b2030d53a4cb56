"""What reads a training step: hooks, and the probe of its robustness; all numbers stay on the device.

The hooks read features, gradients, coefficients and updates. They are attached for the steps that are read and for no
others, and change no number of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..skips import Argument, Channels, Inline, SkipSite
from ..skips.apply import scaled_networks
from ..skips.hooks import NAME
from ..skips.inline import Interceptor, register
from ..skips.record import unchanged
from ..skips.site import as_argument, forward_parameters
from ..utils.runtime import Hook, blocks_of, tensors_in
from .readings import Processes, Sums

SIZE = 0.1
"""‖δ‖ over ‖x‖ of each image that the probe disturbs: far above the rounding of bf16, small beside the image."""


@dataclass(frozen=True)
class Call:
    """How the network was called last, to call it so again: its arguments and the precision of autocast, if any."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: torch.dtype | None


class SkipHooks:
    """Reads the steps during which it is attached, all micro-batches of one, and the optimiser's step.

    The optimiser is read by hooks of torch on every optimiser, so that nobody has to hand theirs over.
    """

    def __init__(self, network: nn.Module, sites: Sequence[SkipSite], processes: Processes, scaler: Any = None) -> None:
        self.network, self.sites, self.processes, self.scaler = network, sites, processes, scaler
        self.blocks = {name: block for name, block in blocks_of(network).items() if name != NAME}
        of_skips = [f"skip{site.index}/{name}" for site in sites for name in ("feature", "gradient", "share")]
        self.names = [*of_skips, *(f"block/{name}/feature" for name in self.blocks)]
        self.order: dict[str, None] = {}
        """The blocks in the order in which they ended."""
        self.loss_scale = 1.0
        self.handles = ExitStack()
        self._forget()

    def _forget(self) -> None:
        self.sums = Sums()
        self.of_optimizer: dict[str, Tensor] = {}
        self.before: dict[str, tuple[list[Tensor], Tensor]] = {}
        """The weights of each block before the optimiser's step, and their norm."""
        self.call: Call | None = None

    def attach(self) -> None:
        enter = self.handles.enter_context
        enter(self.network.register_forward_pre_hook(Hook(self._enter), with_kwargs=True))
        for name, block in self.blocks.items():
            enter(block.register_forward_hook(Hook(partial(self._read_block, name))))
        for _, scaling in scaled_networks(self.network):
            enter(scaling.register_forward_hook(Hook(self._read_coefficient)))
        for site in self.sites:
            consumer = self.network.get_submodule(site.consumer)
            # Registered after the hook that scales the skip, and so called after it.
            if isinstance(site.entry, Inline):
                read = Interceptor(site.entry, partial(self._read_argument, site, None))
                for handle in register(consumer, Hook(read)):
                    enter(handle)
                self._attach_reader(site)
                continue
            hook = Hook(partial(self._read_skip, site, forward_parameters(consumer)[0]))
            enter(consumer.register_forward_pre_hook(hook, with_kwargs=True))
            self._attach_reader(site)
        self.handles.callback(register_optimizer_step_pre_hook(self._before_update).remove)
        self.handles.callback(register_optimizer_step_post_hook(self._after_update).remove)

    def _attach_reader(self, site: SkipSite) -> None:
        if site.readers and site.joined is not None:
            reader = self.network.get_submodule(site.readers[0])
            hook = Hook(partial(self._read_joined, site, site.joined))
            self.handles.enter_context(reader.register_forward_pre_hook(hook))

    def detach(self) -> None:
        self.handles.close()
        self._forget()

    def values(self) -> dict[str, Tensor]:
        """What was read since it was attached, over the whole batch; nothing if there was no pass. Shape: () each."""
        of_passes = self.sums.values(self.names, self.processes) if self.sums.sums else {}
        return of_passes | self.of_optimizer

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        device = next(module.parameters()).device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        self.call = Call(args, kwargs, autocast)
        self.loss_scale = 1.0 if self.scaler is None else self.scaler.get_scale()

    def _read_block(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        features = first_tensor(output)
        if features is not None:
            self.order.setdefault(name)
            self.sums.add_features(f"block/{name}/feature", energies(features))

    def _read_coefficient(self, module: nn.Module, args: tuple[Any, ...], output: Tensor | float) -> None:
        values = torch.as_tensor(output, device=args[1].device).detach().float().flatten()
        self.sums.coefficients.setdefault(args[0], []).append(values)

    def _read_skip(self, site: SkipSite, first: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Read what the consumer is called with; `first` is the first parameter of its forward."""
        trunk: Any = args[0] if args else kwargs.get(first)
        entry = site.entry
        if isinstance(entry, Argument):
            is_all = not site.readers and entry.item in (None, -1)
            return entry.changed(args, kwargs, partial(self._read_argument, site, trunk if is_all else None))
        assert isinstance(entry, Channels), "a skip that is joined inline is read there"
        self.sums.add_features(f"skip{site.index}/feature", energies(entry.of(trunk)))
        self._add_share(site, entry.of(trunk), trunk)
        if trunk.requires_grad:
            trunk.register_hook(lambda gradient: self._add_gradient(site, entry.of(gradient)))
        return None

    def _read_argument(self, site: SkipSite, trunk: Any, skip: Any) -> Any:
        """Read the skip and return a view of it, whose gradient is that of this way alone, without the trunk's."""
        if not isinstance(skip, Tensor):
            return skip
        self.sums.add_features(f"skip{site.index}/feature", energies(skip))
        if isinstance(trunk, Tensor):
            self._add_share(site, skip, trunk, skip)
        if not skip.requires_grad:
            return skip
        seen = skip.view_as(skip)
        seen.register_hook(lambda gradient: self._add_gradient(site, gradient))
        return seen

    def _read_joined(self, site: SkipSite, joined: Channels, module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            self._add_share(site, joined.of(args[0]), args[0])

    def _add_share(self, site: SkipSite, skip: Tensor, *joined: Tensor) -> None:
        total = torch.stack([norm(features).square() for features in joined]).sum()
        self.sums.add(f"skip{site.index}/share", norm(skip).square(), total)

    def _add_gradient(self, site: SkipSite, gradient: Tensor) -> None:
        # Each process has the loss of its own images, and the gradient is that of the mean of these losses.
        own = norm(gradient) / (self.loss_scale * self.processes.size)
        self.sums.add(f"skip{site.index}/gradient", own.square())

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # What a fused optimiser has yet to divide the gradients by, under a gradient scaler.
        scale = getattr(optimizer, "grad_scale", None)
        for name, weights in self._weights_of(optimizer).items():
            gradients = [weight.grad for weight in weights if weight.grad is not None]
            if gradients:
                size = norm_of_all(gradients)
                self.of_optimizer[f"block/{name}/gradient"] = size if scale is None else size / scale
            self.before[name] = [weight.detach().clone() for weight in weights], norm_of_all(weights)

    def _after_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for name, weights in self._weights_of(optimizer).items():
            if name not in self.before:
                continue
            moved, size = self.before.pop(name)
            for old, weight in zip(moved, weights, strict=True):
                old.sub_(weight.detach())
            self.of_optimizer[f"block/{name}/update"] = norm_of_all(moved) / size

    def _weights_of(self, optimizer: Optimizer) -> dict[str, list[nn.Parameter]]:
        """The weights of each block that this optimiser moves; none of other models."""
        own = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        moved = {name: [w for w in block.parameters() if id(w) in own] for name, block in self.blocks.items()}
        return {name: weights for name, weights in moved.items() if weights}


def norm(tensor: Tensor) -> Tensor:
    """The 2-norm in float32, whatever the precision of the features. Shape: ()."""
    return torch.linalg.vector_norm(tensor.detach(), dtype=torch.float32)


def norm_of_all(tensors: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all of them together, over all processes where they are sharded. Shape: ()."""
    norms: list[Any] = [norm(tensor) for tensor in tensors]
    return torch.stack([(n.full_tensor() if hasattr(n, "full_tensor") else n).square() for n in norms]).sum().sqrt()


def energies(features: Tensor) -> Tensor:
    """The squared 2-norm of each image's features. Shape: (B, …) → (B,), float32."""
    if features.ndim < 2:
        return features.detach().float().square().reshape(-1)
    dims = tuple(range(1, features.ndim))
    return torch.linalg.vector_norm(features.detach(), dim=dims, dtype=torch.float32).square()


def first_tensor(output: Any) -> Tensor | None:
    """The first tensor of a module's output; of an object that is no nest, of its `sample`."""
    return next(tensors_in(output if isinstance(output, Mapping) else getattr(output, "sample", output)), None)


@torch.no_grad()
def output_change(network: nn.Module, call: Call, *, seed: int = 0, rank: int = 0) -> Tensor | None:
    """How much the output moves when the input does: ‖f(x+δ) − f(x)‖ / ‖δ‖ of each image, bounded by Theorem 3.4.

    δ is Gaussian with a tenth of the image's norm, a function of `seed` and of the image's place in the batch, of which
    each process has a part of its own, in the order of the ranks. The network runs twice in evaluation mode; its modes
    and buffers and all random states are left as they were. None if the call shows no image. Shape: (B,), float32.
    """
    image = as_argument(network, 0)
    x = call.args[0] if call.args else call.kwargs.get(str(image.name))
    if not (isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1):
        return None
    disturbance = disturbance_of(x, seed, first=rank * len(x))
    # Weights that autocast casts here, without gradients, must not be kept for the next pass.
    precision = torch.autocast(x.device.type, call.autocast, enabled=call.autocast is not None, cache_enabled=False)
    with unchanged(network), precision:
        calm = first_tensor(network(*call.args, **call.kwargs))
        disturbed = image.changed(call.args, call.kwargs, lambda x: x + disturbance)
        assert disturbed is not None, "the call has an image, at the place it was read from"
        moved = first_tensor(network(*disturbed[0], **disturbed[1]))
    return None if calm is None or moved is None else per_image(moved.float() - calm.float()) / per_image(disturbance)


def disturbance_of(x: Tensor, seed: int, *, first: int = 0) -> Tensor:
    """Gaussian noise with `SIZE` times the norm of each image, the `first` of which counts. Shape: (B, …) → (B, …)."""
    generator = torch.Generator(x.device)
    noise = torch.empty(x.shape, device=x.device)
    for row, values in enumerate(noise, start=first):
        values.normal_(generator=generator.manual_seed((seed << 32) + row))
    size = SIZE * per_image(x) / per_image(noise)
    return (noise * size.view(-1, *[1] * (x.ndim - 1))).to(x.dtype)


def per_image(tensor: Tensor) -> Tensor:
    """The norm of each image. Shape: (B, …) → (B,), float32."""
    return torch.linalg.vector_norm(tensor.flatten(1), dim=1, dtype=torch.float32)
