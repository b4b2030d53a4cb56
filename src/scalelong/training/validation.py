"""The denoising loss on images that are never trained on: always the same images, times and noise."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..data import Batch, Examples
from ..data.batches import make_batch
from ..diffusion import DiffusionProcess
from ..diffusion.guidance import Conditioning
from ..utils.rng import keyed_generator

Reduce = Callable[[Tensor], Tensor]


class Validation:
    """Measures the mean loss over the validation images, one time for each, the times spread evenly.

    Several processes share the images; `add` sums a tensor over them.
    """

    def __init__(
        self,
        data: Examples,
        process: DiffusionProcess,
        conditioning: Conditioning,
        *,
        seed: int,
        batch_size: int,
        rank: int = 0,
        world: int = 1,
        add: Reduce | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        generator, count = keyed_generator(seed, "held-out", 0), len(data)
        self.seeds = torch.randint(2**63 - 1, (count,), generator=keyed_generator(seed, "held-out examples", 0))
        self.times = process.stratified_times(count, generator)
        shape = data.pick(torch.zeros(1, dtype=torch.int64), self.seeds[:1]).images.shape[1:]
        self.noise = torch.randn(count, *shape, generator=generator)
        # All processes make as many forward passes, as shards of weights need; a repeated image counts nothing.
        self.rows = torch.arange(rank, count + -count % world, world)
        self.data, self.process, self.conditioning = data, process, conditioning
        self.batch_size, self.add, self.device = batch_size, add, torch.device(device)

    def loss(self, model: nn.Module) -> float:
        """The mean loss of a model; it is left in the mode it was in."""
        count = len(self.data)
        total = (self.losses(model, self.rows % count) * (self.rows < count)).sum()
        # Not every device adds in float64, and a sum over processes does not need it.
        total = total.float().to(self.device)
        return (total if self.add is None else self.add(total)).item() / count

    @torch.no_grad()
    def losses(self, model: nn.Module, rows: Tensor, told: Tensor | None = None) -> Tensor:
        """The loss of each of some images, with the condition of others where `told` says whose.

        Shape: (B,), (B,) → (B,), float64, on the CPU.
        """
        was_training = model.training
        model.eval()
        told = rows if told is None else told
        parts = zip(rows.split(self.batch_size), told.split(self.batch_size), strict=True)
        found = torch.cat([self._losses(model, *part).cpu().double() for part in parts])
        model.train(was_training)
        return found

    def _losses(self, model: nn.Module, rows: Tensor, told: Tensor) -> Tensor:
        images, condition = self._pick(rows).images, self.conditioning.of(self._pick(told))
        t, noise = self.times[rows].to(self.device), self.noise[rows].to(self.device)
        noisy = self.process.add_noise(images, noise, t)
        prediction = self.conditioning.predictor(model, condition)(noisy, self.process.model_time(t))
        return self.process.loss(prediction, images, noise, t).per_sample

    def _pick(self, rows: Tensor) -> Batch:
        return make_batch(0, self.data.pick(rows, self.seeds[rows]), flips=None, device=self.device)
