"""The denoising loss of a step and of the validation images: times and noise are a function of seed and step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ..config.build import Inputs, build_process, conditioning_of, open_inputs
from ..config.schema import Config
from ..data import Batch, Examples
from ..data.batches import make_batch
from ..diffusion import DiffusionProcess
from ..diffusion.guidance import NOTHING, Condition, Conditioning
from ..guard.nonfinite import find_first_nonfinite
from ..utils.runtime import SINGLE, Rank, best_device, keyed_generator
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

    def sample_noise(self, batch: Batch) -> NoisyBatch:
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


class Validation:
    """The mean loss on images that are never trained on: always the same images, times and noise, times spread evenly.

    Several processes share the images: the sum of what `loss_sum` gives each of them is that of all images.
    """

    def __init__(
        self,
        data: Examples,
        process: DiffusionProcess,
        conditioning: Conditioning,
        *,
        seed: int,
        batch_size: int,
        rank: Rank = SINGLE,
        device: torch.device | str = "cpu",
    ) -> None:
        generator, count = keyed_generator(seed, "held-out", 0), len(data)
        self.seeds = torch.randint(2**63 - 1, (count,), generator=keyed_generator(seed, "held-out examples", 0))
        self.times = process.stratified_times(count, generator)
        shape = data.pick(torch.zeros(1, dtype=torch.int64), self.seeds[:1]).images.shape[1:]
        self.noise = torch.randn(count, *shape, generator=generator)
        # All processes make as many forward passes, as shards of weights need; a repeated image counts nothing.
        self.rows = torch.arange(rank.index, count + -count % rank.world, rank.world)
        self.data, self.process, self.conditioning = data, process, conditioning
        self.batch_size, self.device = batch_size, torch.device(device)

    def __len__(self) -> int:
        return len(self.data)

    def loss(self, model: nn.Module) -> float:
        """The mean loss of a model, for a process that is alone; the model is left in the mode it was in."""
        return self.loss_sum(model).item() / len(self)

    def loss_sum(self, model: nn.Module) -> Tensor:
        """The sum of the losses of this process's images. Shape: ()."""
        count = len(self)
        total = (self.losses(model, self.rows % count) * (self.rows < count)).sum()
        # Not every device adds in float64, and a sum over processes does not need it.
        return total.float().to(self.device)

    @torch.no_grad()
    def losses(self, model: nn.Module, rows: Tensor, condition_rows: Tensor | None = None) -> Tensor:
        """The loss of each of some images, with the condition of others where `condition_rows` says whose.

        Shape: (B,), (B,) → (B,), float64, on the CPU.
        """
        was_training = model.training
        model.eval()
        condition_rows = rows if condition_rows is None else condition_rows
        batches = zip(rows.split(self.batch_size), condition_rows.split(self.batch_size), strict=True)
        found = torch.cat([self._losses(model, *batch).cpu().double() for batch in batches])
        model.train(was_training)
        return found

    def _losses(self, model: nn.Module, rows: Tensor, condition_rows: Tensor) -> Tensor:
        images, condition = self._pick(rows).images, self.conditioning.of(self._pick(condition_rows))
        times, noise = self.times[rows].to(self.device), self.noise[rows].to(self.device)
        noisy = self.process.add_noise(images, noise, times)
        prediction = self.conditioning.predictor(model, condition)(noisy, self.process.model_time(times)).float()
        return self.process.loss(prediction, images, noise, times).per_sample

    def _pick(self, rows: Tensor) -> Batch:
        return make_batch(0, self.data.pick(rows, self.seeds[rows]), flips=None, device=self.device)


def build_validation(config: Config, inputs: Inputs, *, rank: Rank = SINGLE, device: torch.device | str) -> Validation:
    """The validation loss of a recipe on its opened data."""
    conditioning, process = conditioning_of(config, inputs.empty_text), build_process(config.diffusion)
    size = config.training.batch_size
    return Validation(
        inputs.validation, process, conditioning, seed=config.seed, batch_size=size, rank=rank, device=device
    )


def open_validation(config: Config) -> Validation:
    """The validation loss as the recipe's trainer measures it, for a network that is not in training."""
    return build_validation(config, open_inputs(config), device=best_device())
