"""Images from a trained run."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config.build import Inputs, build_process, conditioning_of, open_inputs, spread_labels
from ..config.load import check_config
from ..config.schema import Config
from ..config.sections import Weights
from ..data.encoders import LatentEncoder, TextEncoder
from ..diffusion import sample, to_uint8
from ..diffusion.guidance import NOTHING, Condition, Conditioning
from ..diffusion.samplers import Spacing, Variance
from ..runs.checkpoint import Checkpoint
from ..runs.model import choose_checkpoint, load_network, weights_digest
from ..runs.run_dir import Run
from ..utils.block_folder import Progress
from ..utils.runtime import Rank, best_device, check_compiler, own_device
from ..utils.team import check_shared, together
from .images import SampleBatch, SampleFolder

logger = logging.getLogger(__name__)

Conditions = Callable[[range], Condition]
"""The conditions of the images of these numbers."""

BATCH = 64


@dataclass(frozen=True)
class SampleRequest:
    """Images of a class, of a prompt or of both; else of all classes by turns, or of validation captions."""

    label: int | None = None
    prompt: str | None = None


DEFAULT = SampleRequest()


def sample_run(
    folder: str | Path,
    count: int = 64,
    *,
    steps: int | None = None,
    sampler: str | None = None,
    timestep_spacing: Spacing | None = None,
    variance: Variance | None = None,
    clip: bool | None = None,
    guidance: float | None = None,
    request: SampleRequest = DEFAULT,
    seed: int = 0,
    weights: Weights = "ema",
    checkpoint: str | int = "last",
    batch: int = BATCH,
    compile: bool = False,
    allow_code: bool = False,
    progress: Progress = lambda done, count: None,
) -> Path:
    """Sample images with a checkpoint of a run; returns the folder of the PNGs and `grid.png`, complete or absent.

    Image k has the noise of the seed `seed + k`, so it does not depend on how many there are. Its class or caption,
    where none is requested, is the k-th of them by turns, whatever the seed. Finished blocks are not sampled again,
    after an interruption or for a larger `count`; processes started by torchrun share the rest. On one machine the
    files are the same to the bit at the same `batch` and number of threads, and with others but for rounding. `compile`
    takes its time once for every size of batch, is faster then, and has a folder of its own. `allow_code` lets a run
    bring the code of its network. `checkpoint` is last, best or a step. What is not given is as the recipe's
    `sampling:` block says.
    """
    with together(Rank.here()) as rank:
        run = Run(Path(folder))
        check_shared(rank, run.folder, "run folder")
        config = with_sampling(
            run.config(allow_code=allow_code),
            steps=steps,
            sampler=sampler,
            timestep_spacing=timestep_spacing,
            variance=variance,
            clip=clip,
            guidance=guidance,
        )
        check_request(config, request)
        chosen = choose_checkpoint(run, checkpoint)
        settings = describe_samples(config, request, chosen, weights, seed)
        place = run.samples / title(config, request, chosen.step, weights, seed)
        if compile:
            check_compiler(best_device())
            # Compiled code rounds differently: a grey level here and there.
            settings, place = {**settings, "compiled": True}, place.with_name(f"{place.name}-compiled")

        def open_sampler() -> SampleBatch:
            conditioning, conditions = conditions_of(config, request)
            network = load_network(config, chosen, weights, compile=compile)
            return Sampler(network, config, conditioning, conditions, seed).sample_batch

        SampleFolder(place, settings, count, batch).fill(open_sampler, rank, progress)
        return place


def describe_samples(
    config: Config, request: SampleRequest, checkpoint: Checkpoint, weights: Weights, seed: int
) -> dict[str, Any]:
    """All that an image depends on, besides its number and its batch."""
    sampling = config.sampling
    return {
        "weights": weights,
        "step": checkpoint.step,
        "sha256": weights_digest(checkpoint, weights),
        "seed": seed,
        "sampler": sampling.sampler,
        "steps": config.sampling_steps,
        # Only where they are unusual: folders of before these keys keep their images.
        **({"details": details} if (details := sampling_details(config)) else {}),
        "guidance": sampling.guidance if config.conditional else None,
        "class": request.label,
        "prompt": request.prompt,
    }


def sampling_details(config: Config) -> list[str]:
    """What samples depend on besides sampler, steps and guidance, where it is not the usual."""
    sampling = config.sampling
    applies = {
        sampling.timestep_spacing: sampling.timestep_spacing != "quadratic",
        "large-variance": sampling.sampler == "ddpm" and sampling.variance == "large",
        "clipped": config.clips_samples and config.latents is not None,
        "unclipped": not config.clips_samples and config.latents is None,
    }
    return [detail for detail, is_so in applies.items() if is_so]


def with_sampling(config: Config, **given: object) -> Config:
    """The recipe with other settings, where not None, of its `sampling:` block, checked like the recipe's own."""
    given = {key: value for key, value in given.items() if value is not None}
    raw = {**config.model_dump(), "sampling": {**config.sampling.model_dump(), **given}}
    options = {("sampling", key): f"--{key.replace('_', '-')}" for key in given}
    changed = check_config(raw, {(): "the run's recipe", **options})
    if "steps" in given and changed.sampling_steps < changed.sampling.steps:
        most, asked = changed.sampling_steps, changed.sampling.steps
        raise ValueError(f"steps must be between 1 and {most}, the schedule's number of times, got {asked}")
    return changed


def title(config: Config, request: SampleRequest, step: int, weights: Weights, seed: int) -> str:
    """A name for a folder of samples that says how they were made; for a prompt, which may hold anything, its hash."""
    sampling = config.sampling
    parts = [f"step-{step:06d}-{weights}-seed-{seed}-{sampling.sampler}-{config.sampling_steps}-steps"]
    parts += sampling_details(config)
    parts += [f"guidance-{sampling.guidance:g}"] if config.conditional else []
    parts += [f"class-{request.label}"] if request.label is not None else []
    parts += [f"prompt-{hashlib.sha256(request.prompt.encode()).hexdigest()[:8]}"] if request.prompt is not None else []
    return "-".join(parts)


def check_request(config: Config, request: SampleRequest) -> None:
    if request.label is not None and config.labels is None:
        raise ValueError("this run has no classes to choose from")
    if request.prompt is not None and config.text is None:
        raise ValueError("this run knows no text: leave the prompt out")
    spread_labels(config, 1, request.label)


def conditions_of(config: Config, request: SampleRequest = DEFAULT) -> tuple[Conditioning, Conditions]:
    """How the network is conditioned, and on what for any images: the text of all of them may not fit in memory."""

    def labels(own: range) -> Condition:
        return spread_labels(config, own.stop, request.label)[own.start : own.stop]

    if config.text is None:
        return conditioning_of(config), labels
    if request.prompt is not None:
        text, empty = TextEncoder(config.text, own_device()).encode([request.prompt, ""]).clone().cpu()
        return conditioning_of(config, empty), lambda own: Condition(labels(own).labels, text.expand(len(own), -1, -1))
    inputs = open_inputs(config)
    conditioning = conditioning_of(config, inputs.empty_text)

    def captions(own: range) -> Condition:
        found = validation_condition(inputs, conditioning, len(own), first=own.start)
        return found if request.label is None else replace(found, labels=labels(own).labels)

    return conditioning, captions


def fixed(condition: Condition) -> Conditions:
    """Conditions that are all there already, the k-th for image k."""
    return lambda own: condition[own.start : own.stop]


def validation_condition(inputs: Inputs, conditioning: Conditioning, count: int, *, first: int = 0) -> Condition:
    """The conditions of the validation examples from the first on, over and over if there are fewer."""
    rows = torch.arange(first, first + count) % len(inputs.validation)
    return conditioning.of(inputs.validation.pick(rows, torch.zeros_like(rows)))


@dataclass(frozen=True)
class Sampler:
    """A network in eval mode, and all that it takes to sample images of it; image k has the seed `seed + k`."""

    network: nn.Module
    config: Config
    conditioning: Conditioning
    conditions: Conditions
    seed: int = 0

    def sample(self, numbers: range, progress: Callable[[float], None] = lambda share: None) -> Tensor:
        """The images of these numbers, in batches that depend on the first one alone. Shape: (B, C, H, W), uint8."""

        def sample_from(start: int) -> Tensor:
            batch = numbers[start : start + BATCH]
            return self.sample_batch(batch, lambda share: progress((start + share * len(batch)) / len(numbers)))

        return torch.cat([sample_from(start) for start in range(0, len(numbers), BATCH)])

    def sample_batch(self, numbers: range, progress: Callable[[float], None] = lambda share: None) -> Tensor:
        """The images of these numbers at once. Shape: (len(numbers), C, H, W), uint8."""
        config, sampling = self.config, self.config.sampling
        # Shards keep the weights that they gather, and could not train with them after inference mode.
        with torch.no_grad() if hasattr(self.network, "unshard") else torch.inference_mode():
            samples = sample(
                self.conditioning.guided(self.network, self.conditions(numbers).to(self.device), sampling.guidance),
                build_process(config.diffusion),
                config.sample_shape,
                seeds=[self.seed + number for number in numbers],
                steps=config.sampling_steps,
                sampler=sampling.sampler,
                timestep_spacing=sampling.timestep_spacing,
                variance=sampling.variance,
                clip=config.clips_samples,
                device=self.device,
                progress=lambda done, steps: progress(done / steps),
            )
        images = samples if self.decoder is None else self.decoder.decode(samples)
        if broken := int(images.isnan().flatten(1).any(1).sum()):
            what = f"{broken} of the images {numbers.start} to {numbers.stop - 1}"
            logger.warning("%s are not numbers everywhere, and black there: the network has diverged", what)
        return to_uint8(images).cpu()

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    @cached_property
    def decoder(self) -> LatentEncoder | None:
        latents = self.config.latents
        return None if latents is None else LatentEncoder(latents, self.device)


def sample_network(
    network: nn.Module, config: Config, conditioning: Conditioning, condition: Condition = NOTHING, *, count: int
) -> Tensor:
    """Images of a network in eval mode, image k with the seed k. Shape: (count, C, H, W), uint8."""
    return Sampler(network, config, conditioning, fixed(condition)).sample(range(count))
