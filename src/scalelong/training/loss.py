"""The loss of a step: times and noise of the global batch are a function of seed and batch, whoever computes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..data import Batch
from ..diffusion import DiffusionProcess
from ..diffusion.guidance import NOTHING, Condition, Conditioning
from ..utils.rng import keyed_generator


@dataclass(frozen=True)
class NoisyBatch:
    """Images with the times, the noise and the condition they are trained with.

    Shape: (B, C, H, W), (B,), (B, C, H, W).
    """

    images: Tensor
    times: Tensor
    noise: Tensor
    condition: Condition = NOTHING

    def split(self, parts: int) -> list[NoisyBatch]:
        """Equal parts in order, for gradient accumulation."""
        columns = (self.images, self.times, self.noise, self.condition)
        return [NoisyBatch(*part) for part in zip(*(column.chunk(parts) for column in columns), strict=True)]


@dataclass(frozen=True)
class DiffusionLoss:
    """What one process computes of a global batch: `own` are its positions.

    All processes draw the times and noise of the whole batch and keep their own, so that the loss does not depend on
    how many there are, and a resumed run needs no generator's state.
    """

    process: DiffusionProcess
    conditioning: Conditioning
    seed: int
    batch_size: int
    own: slice
    channels_last: bool = False

    def noise(self, batch: Batch) -> NoisyBatch:
        device, shape = batch.images.device, batch.images.shape[1:]
        # Drawn where it is used: a GPU does it in no time, and the same seed gives the same noise on the same device.
        seed = keyed_generator(self.seed, "noise", batch.step).initial_seed()
        generator = torch.Generator(device).manual_seed(seed)
        times = self.process.sample_times(self.batch_size, generator, device=device)[self.own]
        noise = torch.randn(self.batch_size, *shape, generator=generator, device=device)[self.own]
        return NoisyBatch(batch.images, times, noise, self._withheld(batch))

    def loss(self, model: nn.Module, part: NoisyBatch) -> Tensor:
        """The mean loss of some images. Shape: ()."""
        noisy = self.process.add_noise(part.images, part.noise, part.times)
        if self.channels_last:
            noisy = noisy.contiguous(memory_format=torch.channels_last)
        predict = self.conditioning.predictor(model, part.condition)
        prediction = predict(noisy, self.process.model_time(part.times))
        return self.process.loss(prediction, part.images, part.noise, part.times).mean

    def seed_dropout(self, step: int, rank: int) -> None:
        """Set the global generators, from which dropout draws, by seed, step and process: resuming needs no state."""
        torch.manual_seed(keyed_generator(self.seed, f"dropout/{rank}", step).initial_seed())

    def _withheld(self, batch: Batch) -> Condition:
        """The batch's condition, replaced by none now and then."""
        condition, share = self.conditioning.of(batch), self.conditioning.drop
        if not share:
            return condition
        chosen = torch.rand(self.batch_size, generator=keyed_generator(self.seed, "withheld", batch.step)) < share
        return self.conditioning.drop_condition(condition, chosen[self.own].to(batch.images.device))
