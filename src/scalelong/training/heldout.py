"""The denoising loss on images that are never trained on: always the same images, times and noise."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..data import ImageSet, keyed_generator
from ..data.loader import to_float
from ..diffusion import DiffusionProcess, noise_predictor

Reduce = Callable[[Tensor], Tensor]


class HeldOut:
    """Measures the mean loss over the held-out images, one time for each, the times spread evenly.

    Several processes share the images; `add` sums a tensor over them.
    """

    def __init__(
        self,
        data: ImageSet,
        process: DiffusionProcess,
        *,
        seed: int,
        batch_size: int,
        rank: int = 0,
        world: int = 1,
        add: Reduce | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        generator = keyed_generator(seed, "held-out", 0)
        times = process.stratified_times(len(data), generator)
        noise = torch.randn(data.images.shape, generator=generator)
        # All processes make as many forward passes, as shards of weights need; a repeated image counts nothing.
        own = torch.arange(rank, len(data) + -len(data) % world, world)
        self.counts = (own < len(data)).double()
        own %= len(data)
        self.images, self.times, self.noise = data.images[own], times[own], noise[own]
        self.total, self.process, self.batch_size, self.add = len(data), process, batch_size, add
        self.device = torch.device(device)

    @torch.no_grad()
    def loss(self, model: nn.Module) -> float:
        """The mean loss of a model; it is left in the mode it was in."""
        was_training = model.training
        model.eval()
        tensors = (self.counts, self.images, self.times, self.noise)
        total = torch.zeros((), dtype=torch.float64)
        for counts, *part in zip(*(tensor.split(self.batch_size) for tensor in tensors), strict=True):
            total += counts @ self._losses(model, *part).double().cpu()
        model.train(was_training)
        # Not every device adds in float64, and a sum over processes does not need it.
        total = total.float().to(self.device)
        return (total if self.add is None else self.add(total)).item() / self.total

    def _losses(self, model: nn.Module, images: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        x0, t, noise = to_float(images.to(self.device)), times.to(self.device), noise.to(self.device)
        noisy = self.process.add_noise(x0, noise, t)
        prediction = noise_predictor(model)(noisy, self.process.model_time(t))
        return self.process.loss(prediction, x0, noise, t).per_sample
