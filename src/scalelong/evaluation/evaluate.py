"""The job on a run: draw images, compute their features and compare them with a reference."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data import Progress
from ..data.facts import short_hash
from ..data.prepare import WHOLE, Share
from ..training.conditions import Condition, Conditioning
from ..training.config import Config
from ..training.engine import best_device, check_compiler
from ..training.files import sha256_of
from ..training.manifest import Checkpoint
from ..training.run import Run, RunError
from ..training.sampling import Weights, Wish, draw, grant, load_network, with_sampling
from .blocks import BLOCK, Blocks
from .feature_network import EFFICIENTNET, INCEPTION, FeatureNetwork
from .features import load_features
from .metrics import Figure, frechet_figure, kernel_distance, precision_recall, shuffled
from .references import KEPT, build_reference, network_facts
from .results import Evaluation, NotComparable, record
from .statistics import Facts, Reference, load_reference

IMAGES = 10_000


@dataclass(frozen=True)
class Plan:
    """What is asked of an evaluation; what is None is as the run's recipe says."""

    images: int = IMAGES
    weights: tuple[Weights, ...] = ("ema",)
    network: str = EFFICIENTNET
    reference: Path | None = None
    """Statistics; None = those of the images that the run was trained on."""
    seed: int = 0
    sampling: Mapping[str, Any] | None = None
    compile: bool = False
    """Draw with compiled code; its images may be a grey level apart, and are not mixed or compared with others."""


@dataclass(frozen=True)
class Draws:
    """The images of a network: image k has the seed `seed + k` and the k-th condition."""

    model: nn.Module
    config: Config
    conditioning: Conditioning
    condition: Condition
    seed: int = 0

    def images(self, start: int, stop: int) -> Tensor:
        """Some of them. Shape: (stop − start, C, H, W), uint8."""
        condition = self.condition[slice(start, stop)]
        return draw(self.model, self.config, self.conditioning, condition, count=stop - start, seed=self.seed + start)

    def features(self, network: FeatureNetwork, start: int, stop: int) -> Tensor:
        """Of some of the images. Shape: (stop − start, D)."""
        return network(self.images(start, stop))


def evaluate_network(
    model: nn.Module,
    config: Config,
    reference: Reference,
    *,
    network: FeatureNetwork,
    images: int = 1000,
    seed: int = 0,
    granted: tuple[Conditioning, Condition] | None = None,
    step: int = 0,
    weights: Weights = "ema",
) -> Evaluation:
    """Evaluate a network in eval mode, in memory and in this process alone.

    `granted` is what `grant(config, Wish(), images)` gives: for captions it opens the data, so keep it between calls.
    The figures are those of `evaluate_run` with as many images and the same seed.
    """
    check_reference(reference, network)
    draws = Draws(model, config, *(granted or grant(config, Wish(), images)), seed)
    starts = range(0, images, BLOCK)
    parts = [draws.features(network, start, min(start + BLOCK, images)) for start in starts]
    return measure(torch.cat(parts), reference, network, config, step=step, weights=weights)


def evaluate_run(
    folder: str | Path, plan: Plan, *, share: Share = WHOLE, progress: Progress | None = None
) -> list[Evaluation]:
    """Evaluate a run's last checkpoint and write it to the run's evaluation.json; nothing in other processes."""
    run = Run(Path(folder))
    if plan.compile:
        check_compiler(best_device())
    config, checkpoint = with_sampling(run.config(), **(plan.sampling or {})), run.checkpoints().latest()
    if checkpoint is None:
        raise RunError(f"{run.folder} has no checkpoint yet")
    network = load_features(plan.network)
    file = plan.reference or build_reference(config.data, network, share=share, progress=progress)
    reference = None if file is None else load_reference(file)
    if reference is not None:
        check_reference(reference, network)
    found = []
    for weights in plan.weights:
        features = run_features(run, config, checkpoint, weights, plan, network, share, progress)
        if features is not None and reference is not None:
            facts = {"step": checkpoint.step, "weights": weights, "compiled": plan.compile}
            found.append(measure(features, reference, network, config, **facts))
    if found:
        record(run.folder, found)
    return found


def run_features(
    run: Run,
    config: Config,
    checkpoint: Checkpoint,
    weights: Weights,
    plan: Plan,
    network: FeatureNetwork,
    share: Share,
    progress: Progress | None,
) -> Tensor | None:
    """The features of a checkpoint's images, kept in the run's folder; None in processes that are not the first."""
    group = "ema" if weights == "ema" else "model"
    facts: Facts = {
        **network_facts(network),
        "sampler": describe_sampler(config, compiled=plan.compile),
        "seed": plan.seed,
        "step": checkpoint.step,
        "model": sha256_of(checkpoint.path / f"{group}.safetensors")[:16],
    }
    # The number of images is no fact of a block: a later evaluation with more of them goes on with these.
    place = run.folder / "evaluation" / f"step-{checkpoint.step:06d}-{weights}-{short_hash(facts)}"
    draws: list[Draws] = []

    def make(start: int, stop: int) -> Tensor:
        if not draws:  # Only when something is missing: a finished evaluation loads no network.
            model = load_network(config, checkpoint, weights, compile=plan.compile)
            draws.append(Draws(model, config, *grant(config, Wish(), plan.images), plan.seed))
        return draws[0].features(network, start, stop)

    return Blocks(place, facts, plan.images, make, progress).compute(share)


def measure(
    features: Tensor,
    reference: Reference,
    network: FeatureNetwork,
    config: Config,
    *,
    step: int = 0,
    weights: Weights = "ema",
    compiled: bool = False,
) -> Evaluation:
    """Every figure that the reference allows, with the facts that decide what it may be compared with."""
    facts: Facts = {
        **network_facts(network),
        "images": len(features),
        "sampler": describe_sampler(config, compiled=compiled),
        "reference": content_of(reference),
        "reference_images": reference.statistics.count,
    }
    return Evaluation(facts, figures_of(features, reference, network.distance), step, weights)


def figures_of(features: Tensor, reference: Reference, distance: str) -> dict[str, Figure]:
    """Fréchet distance; and with raw features of the reference KID, precision and recall. Shape: features (N, D)."""
    figures = {distance: frechet_figure(reference.statistics, features)}
    if reference.features is None:
        return figures
    some = shuffled(features)[:KEPT]
    precision, recall = precision_recall(reference.features, some)
    kernel = distance.replace("FD-", "KID-") if distance != "FID" else "KID"
    return figures | {
        kernel: kernel_distance(reference.features, features),
        "precision": precision,
        "recall": recall,
    }


def describe_sampler(config: Config, *, compiled: bool = False) -> str:
    """
    >>> from scalelong.training import load_recipe
    >>> describe_sampler(load_recipe("digits"))
    'ddpm, 200 steps'
    """
    sampling = config.sampling
    guidance = f", guidance {sampling.guidance:g}" if config.conditional else ""
    steps = min(sampling.steps, config.diffusion.steps)
    return f"{sampling.sampler}, {steps} steps{guidance}{', compiled' if compiled else ''}"


def content_of(reference: Reference) -> str:
    """The hash of the reference's images; of its mean, where the file does not say."""
    said = reference.facts.get("data")
    mean = reference.statistics.mean.numpy().tobytes()
    return hashlib.sha256(mean).hexdigest()[:16] if said is None else str(said)


def check_reference(reference: Reference, network: FeatureNetwork) -> None:
    """Raise unless a reference was made with the same network, weights and resize.

    A file that says nothing is taken for one of pytorch-fid, which knows one network only.
    """
    wanted = network_facts(network)
    said = reference.facts if reference.facts else {"network": INCEPTION}
    for key in said.keys() & wanted.keys():
        if said[key] != wanted[key]:
            stated = "" if reference.facts else ", as files that do not say are taken to be"
            raise NotComparable(
                f"the reference's {key} is {said[key]!r}{stated}, and the evaluation's is {wanted[key]!r}: "
                "make statistics with the same network (scalelong stats --network)"
            )
