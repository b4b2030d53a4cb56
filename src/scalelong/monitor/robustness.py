"""How much the output moves when the input does: ‖f(x+δ) − f(x)‖ / ‖δ‖, bounded by Theorem 3.4."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..skips.site import forward_parameters
from .hooks import Call, tensors_in, with_argument

SIZE = 0.1
"""‖δ‖ over ‖x‖ of each image: far above the rounding of bf16, small beside the image."""


@torch.no_grad()
def output_change(network: nn.Module, call: Call, *, seed: int = 0, rank: int = 0) -> Tensor | None:
    """The change of each image's output per unit of change of its input, on the inputs of a call. Shape: (B,), float32.

    δ is Gaussian with a tenth of the image's norm, a function of `seed` and of the image's place in the batch, of which
    each process has a part of its own, in the order of the ranks. The network runs twice in evaluation mode;
    its modes and buffers and all random states are left as they were. None if the call shows no image.
    """
    position = input_of(network, call)
    if position is None:
        return None
    x = call.args[position] if isinstance(position, int) else call.kwargs[position]
    disturbance = disturbance_of(x, seed, first=rank * len(x))
    # Weights that autocast casts here, without gradients, must not be kept for the next pass.
    precision = torch.autocast(x.device.type, call.autocast, enabled=call.autocast is not None, cache_enabled=False)
    with evaluating(network), precision:
        calm = next(tensors_in(network(*call.args, **call.kwargs)), None)
        args, kwargs = with_argument(call.args, call.kwargs, position, x + disturbance)
        moved = next(tensors_in(network(*args, **kwargs)), None)
    return None if calm is None or moved is None else per_image(moved.float() - calm.float()) / per_image(disturbance)


def input_of(network: nn.Module, call: Call) -> int | str | None:
    """Where the image is in a call: the first argument of the forward."""
    name = next(iter(forward_parameters(network)), "")
    key, value = (0, call.args[0]) if call.args else (name, call.kwargs.get(name))
    return key if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1 else None


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


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """The network in evaluation mode for a while; afterwards its modes and buffers and the random states are back."""
    modes = [(module, module.training) for module in network.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in network.buffers()]
    devices = {parameter.device for parameter in network.parameters() if parameter.device.type == "cuda"}
    # Flags are set directly: some models override train() to freeze or merge weights.
    for module, _ in modes:
        module.training = False
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for buffer, value in buffers:
            buffer.copy_(value)
