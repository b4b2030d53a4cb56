"""Evaluate a run's checkpoint: sample images, compute their features and compare them with a reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config.schema import Config, Weights
from ..diffusion.guidance import Conditioning
from ..runs.checkpoint import Checkpoint
from ..runs.choice import choose_checkpoint
from ..runs.model import load_network, weights_digest
from ..runs.run_dir import Run
from ..sampling.sample_run import Conditions, Sampler, SampleRequest, conditions_of, with_sampling
from ..utils.blocks import short_hash
from ..utils.device import best_device, check_compiler
from ..utils.distributed import SINGLE, Rank
from .feature_network import BLOCK, EFFICIENTNET, FeatureNetwork, ShareDone, fill_features, stored_features
from .features import load_features
from .metrics import Figure, check_libraries, frechet_figure, kernel_distance, precision_recall, shuffled
from .reference import KEPT, Reference, Report, build_reference, load_reference
from .results import (
    Evaluation,
    check_comparable,
    check_reference,
    counterpart,
    describe_sampler,
    record,
    result_fingerprint,
)

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
    """Sample with compiled code; its images may be a grey level apart, and are not mixed or compared with others."""
    checkpoint: str | int = "last"
    """last, best (by validation loss) or a step."""


def evaluate_network(
    model: nn.Module,
    config: Config,
    reference: Reference,
    *,
    network: FeatureNetwork,
    images: int = 1000,
    seed: int = 0,
    conditioning: tuple[Conditioning, Conditions] | None = None,
    step: int = 0,
    weights: Weights = "ema",
) -> Evaluation:
    """Evaluate a network in eval mode, in memory and in this process alone.

    `conditioning` is what `conditions_of(config, SampleRequest())` gives: for captions it opens the data, so keep it
    between calls. The figures are those of `evaluate_run` with as many images and the same seed.
    """
    check_libraries()
    check_reference(reference, network)
    sampler = Sampler(model, config, *(conditioning or conditions_of(config, SampleRequest())), seed)
    blocks = (range(start, min(start + BLOCK, images)) for start in range(0, images, BLOCK))
    features = torch.cat([features_of(sampler, network, block) for block in blocks])
    fingerprint = result_fingerprint(config, network, reference, images)
    return Evaluation(fingerprint, figures_of(features, reference, network.distance), step, weights, seed)


def features_of(
    sampler: Sampler, network: FeatureNetwork, numbers: range, progress: ShareDone = lambda share: None
) -> Tensor:
    """Of the images of these numbers. Shape: (len(numbers), D)."""
    return network(sampler.sample(numbers, progress))


def evaluate_run(
    folder: str | Path,
    plan: Plan,
    *,
    rank: Rank = SINGLE,
    progress: Report | None = None,
    others: Sequence[Evaluation] = (),
) -> list[Evaluation]:
    """Evaluate a run's checkpoint and write it to the run's evaluation.json; nothing in other processes.

    `others` are what the figures shall be compared with: if they cannot be, it raises before an image is sampled.
    """
    check_libraries()
    if plan.compile:
        check_compiler(best_device())
    run, report = Run(Path(folder)), progress or (lambda what, done, count: None)
    config = with_sampling(run.config(), **(plan.sampling or {}))
    checkpoint, network = choose_checkpoint(run, plan.checkpoint), load_features(plan.network)
    file = plan.reference or build_reference(config.data, network, rank=rank, progress=report)
    reference = load_reference(file)
    check_reference(reference, network)
    fingerprint = result_fingerprint(config, network, reference, plan.images, compiled=plan.compile)
    for weights in plan.weights if others else ():
        check_comparable(counterpart(fingerprint, weights, others).fingerprint, fingerprint)
    found = []
    for weights in plan.weights:
        features = run_features(run, plan, config, checkpoint, weights, network, rank, report)
        if features is not None:
            figures = figures_of(features, reference, network.distance)
            found.append(Evaluation(fingerprint, figures, checkpoint.step, weights, plan.seed))
    if found:
        record(run.folder, found)
    return found


def run_features(
    run: Run,
    plan: Plan,
    config: Config,
    checkpoint: Checkpoint,
    weights: Weights,
    network: FeatureNetwork,
    rank: Rank,
    progress: Report,
) -> Tensor | None:
    """Those of the images, kept in the run's folder; None in processes that are not the first. Shape: (N, D)."""
    # What a block depends on. The number of images is none of it: more of them add to the blocks of fewer.
    fingerprint = {
        **network.fingerprint,
        "sampler": describe_sampler(config, compiled=plan.compile),
        "seed": plan.seed,
        "step": checkpoint.step,
        "model": weights_digest(checkpoint, weights)[:16],
    }
    folder = run.folder / "evaluation" / f"step-{checkpoint.step:06d}-{weights}-{short_hash(fingerprint)}"

    @cache
    def sampler() -> Sampler:
        model = load_network(config, checkpoint, weights, compile=plan.compile)
        return Sampler(model, config, *conditions_of(config, SampleRequest()), plan.seed)

    def describe(numbers: range, done: ShareDone) -> Tensor:
        # Only here: a finished evaluation loads no network.
        return features_of(sampler(), network, numbers, done)

    shown = partial(progress, "images sampled")
    if not fill_features(folder, fingerprint, plan.images, describe, rank, shown):
        return None
    return torch.cat(list(stored_features(folder, plan.images)))


def figures_of(features: Tensor, reference: Reference, distance: str) -> dict[str, Figure]:
    """Fréchet distance; and with raw features of the reference KID, precision and recall. Shape: features (N, D)."""
    figures = {distance: frechet_figure(reference.statistics, features)}
    if reference.features is None:
        return figures
    kernel = distance.replace("FD-", "KID-") if distance != "FID" else "KID"
    figures[kernel] = kernel_distance(reference.features, features)
    figures["precision"], figures["recall"] = precision_recall(reference.features, shuffled(features)[:KEPT])
    return figures
