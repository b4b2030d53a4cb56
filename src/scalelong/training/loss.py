"""The loss of a step: times and noise of the global batch are a function of seed and step, whoever computes them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ..data import Batch
from ..diffusion import DiffusionProcess
from ..diffusion.guidance import NOTHING, Condition, Conditioning
from ..guard.nonfinite import find_first_nonfinite
from ..utils.process import keyed_generator
from .parallel import Parallel


@dataclass(frozen=True)
class NoisyBatch:
    """Images with the times, the noise and the condition they are trained with.

    Shape: (B, C, H, W), (B,), (B, C, H, W).
    """

    images: Tensor
    times: Tensor
    noise: Tensor
    condition: Condition = NOTHING

    def split(self, count: int) -> list[NoisyBatch]:
        """Equal micro-batches in order, for gradient accumulation."""
        columns = (self.images, self.times, self.noise, self.condition)
        return [NoisyBatch(*part) for part in zip(*(column.chunk(count) for column in columns), strict=True)]


@dataclass(frozen=True)
class DiffusionLoss:
    """What one process computes of a global batch: `positions` are its own.

    All processes draw the times and noise of the whole batch and keep their own, so that the loss does not depend on
    how many there are, and a resumed run needs no generator's state.
    """

    process: DiffusionProcess
    conditioning: Conditioning
    seed: int
    batch_size: int
    positions: slice
    channels_last: bool = False

    def add_noise(self, batch: Batch) -> NoisyBatch:
        """Times, noise and dropped conditions of a batch."""
        device, shape = batch.images.device, batch.images.shape[1:]
        # Drawn where it is used: a GPU does it in no time, and the same seed gives the same noise on the same device.
        seed = keyed_generator(self.seed, "noise", batch.step).initial_seed()
        generator = torch.Generator(device).manual_seed(seed)
        times = self.process.sample_times(self.batch_size, generator, device=device)[self.positions]
        noise = torch.randn(self.batch_size, *shape, generator=generator, device=device)[self.positions]
        return NoisyBatch(batch.images, times, noise, self._condition(batch))

    def __call__(self, model: nn.Module, batch: NoisyBatch) -> Tensor:
        """The mean loss of a micro-batch. Shape: ()."""
        noisy = self.process.add_noise(batch.images, batch.noise, batch.times)
        if self.channels_last:
            noisy = noisy.contiguous(memory_format=torch.channels_last)
        predict = self.conditioning.predictor(model, batch.condition)
        # Half precision ends where the network does.
        prediction = predict(noisy, self.process.model_time(batch.times)).float()
        return self.process.loss(prediction, batch.images, batch.noise, batch.times).mean

    def _condition(self, batch: Batch) -> Condition:
        """The batch's condition, replaced by none now and then."""
        condition, probability = self.conditioning.of(batch), self.conditioning.drop
        if not probability:
            return condition
        generator = keyed_generator(self.seed, "withheld", batch.step)
        dropped = torch.rand(self.batch_size, generator=generator) < probability
        return self.conditioning.drop_condition(condition, dropped[self.positions].to(batch.images.device))


def seed_dropout(seed: int, step: int, rank: int) -> None:
    """Set the global generators, from which dropout draws, by seed, step and process: resuming needs no state."""
    torch.manual_seed(keyed_generator(seed, f"dropout/{rank}", step).initial_seed())


def find_origin(loss: DiffusionLoss, network: nn.Module, micro_batches: list[NoisyBatch], parallel: Parallel) -> str:
    """Where a non-finite number of a step began, found by repeating its forward passes; for all processes at once."""

    def forward(micro_batch: NoisyBatch) -> Tensor:
        with parallel.autocast():
            return loss(network, micro_batch)

    def mean_loss() -> Tensor:
        # With shards a pass takes every process, so that none may end before the others: all micro-batches at once.
        # Gradients cannot be had apart from an exchange: there are none then.
        network.zero_grad()
        with torch.no_grad():
            return torch.stack([forward(each) for each in micro_batches]).mean()

    passes = [mean_loss] if parallel.uses_fsdp else [partial(forward, each) for each in micro_batches]
    origin = find_first_nonfinite(network, *passes)
    # A process that was finite itself has received the others' gradients, and can blame only those.
    found = [own for own in parallel.gather(origin) if own is not None]
    return str(min(found, key=lambda own: own.kind == "gradient", default="where it began could not be found"))
