"""The denoising loss on images that are never trained on: always the same images, times and noise."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config import Config, build_process
from ..config.build import conditioning_of
from ..config.inputs import Inputs, open_inputs
from ..data import Batch, Examples
from ..data.batches import make_batch
from ..diffusion import DiffusionProcess
from ..diffusion.guidance import Conditioning
from ..utils.process import SINGLE, Rank, best_device, keyed_generator


class Validation:
    """Measures the mean loss over the validation images, one time for each, the times spread evenly.

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
