"""The job on a run: draw images, compute their features and compare them with a reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config.schema import Config, Weights
from ..data.fingerprint import short_hash
from ..diffusion.guidance import Conditioning
from ..runs.choice import choose_checkpoint
from ..runs.manifest import Checkpoint
from ..runs.model import load_network, weights_digest
from ..runs.run_dir import Run
from ..sampling.sample_run import Conditions, Sampler, SampleRequest, conditions_of, with_sampling
from ..utils.device import best_device, check_compiler
from ..utils.distributed import SINGLE, Rank
from .blocks import BLOCK, Blocks
from .facts import check_reference, describe_sampler, network_facts, result_facts
from .feature_network import EFFICIENTNET, FeatureNetwork
from .features import load_features
from .metrics import Figure, check_libraries, frechet_figure, kernel_distance, precision_recall, shuffled
from .progress import DRAWN, Report, phase, unseen
from .references import KEPT, build_reference
from .results import Evaluation, check_comparable, counterpart, record
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
    granted: tuple[Conditioning, Conditions] | None = None,
    step: int = 0,
    weights: Weights = "ema",
) -> Evaluation:
    """Evaluate a network in eval mode, in memory and in this process alone.

    `granted` is what `conditions_of(config, SampleRequest())` gives: for captions it opens the data, so keep it between
    calls.
    The figures are those of `evaluate_run` with as many images and the same seed.
    """
    check_libraries()
    check_reference(reference, network)
    artist = Sampler(model, config, *(granted or conditions_of(config, SampleRequest())), seed)
    blocks = (range(start, min(start + BLOCK, images)) for start in range(0, images, BLOCK))
    features = torch.cat([features_of(artist, network, block) for block in blocks])
    facts = result_facts(config, network, reference, images)
    return measure(features, reference, network, facts, step=step, weights=weights, seed=seed)


def features_of(
    artist: Sampler, network: FeatureNetwork, numbers: range, told: Callable[[float], None] = lambda share: None
) -> Tensor:
    """Of the images of these numbers. Shape: (len(numbers), D)."""
    return network(artist.images(numbers, told))


def evaluate_run(
    folder: str | Path,
    plan: Plan,
    *,
    rank: Rank = SINGLE,
    report: Report = unseen,
    others: Sequence[Evaluation] = (),
) -> list[Evaluation]:
    """Evaluate a run's checkpoint and write it to the run's evaluation.json; nothing in other processes.

    `others` are what the figures shall be compared with: if they cannot be, it raises before an image is drawn.
    """
    job = Job.open(Path(folder), plan)
    reference = job.reference(rank, report)
    facts = None if reference is None else job.facts(reference)
    if facts is not None and others:
        for weights in plan.weights:
            check_comparable(counterpart(facts, weights, others).facts, facts)
    found = []
    for weights in plan.weights:
        features = job.features(weights, rank, report)
        if features is not None and reference is not None and facts is not None:
            which = {"step": job.checkpoint.step, "weights": weights, "seed": plan.seed}
            found.append(measure(features, reference, job.network, facts, **which))
    if found:
        record(job.run.folder, found)
    return found


@dataclass(frozen=True)
class Job:
    """A plan for a run, with the checkpoint and the feature network that it asks for."""

    run: Run
    plan: Plan
    config: Config
    checkpoint: Checkpoint
    network: FeatureNetwork

    @classmethod
    def open(cls, folder: Path, plan: Plan) -> Job:
        """Raises where something is missing that would be needed only once the images are drawn."""
        check_libraries()
        if plan.compile:
            check_compiler(best_device())
        run = Run(folder)
        config = with_sampling(run.config(), **(plan.sampling or {}))
        return cls(run, plan, config, choose_checkpoint(run, plan.checkpoint), load_features(plan.network))

    def reference(self, rank: Rank, report: Report) -> Reference | None:
        """What images are compared with; None in a process that only helps to make it."""
        file = self.plan.reference or build_reference(self.config.data, self.network, rank=rank, report=report)
        if file is None:
            return None
        reference = load_reference(file)
        check_reference(reference, self.network)
        return reference

    def facts(self, reference: Reference) -> Facts:
        return result_facts(self.config, self.network, reference, self.plan.images, compiled=self.plan.compile)

    def features(self, weights: Weights, rank: Rank, report: Report) -> Tensor | None:
        """Those of the images, kept in the run's folder; None in processes that are not the first. Shape: (N, D)."""
        step, artists = self.checkpoint.step, list[Sampler]()
        facts = self._block_facts(weights)

        def make(numbers: range, told: Callable[[float], None]) -> Tensor:
            if not artists:  # Only when something is missing: a finished evaluation loads no network.
                artists.append(self._artist(weights))
            return features_of(artists[0], self.network, numbers, told)

        place = self.run.folder / "evaluation" / f"step-{step:06d}-{weights}-{short_hash(facts)}"
        return Blocks(place, facts, self.plan.images, make, phase(report, DRAWN)).compute(rank)

    def _block_facts(self, weights: Weights) -> Facts:
        """What a block depends on. The number of images is none of it: more of them go on with the blocks of fewer."""
        return {
            **network_facts(self.network),
            "sampler": describe_sampler(self.config, compiled=self.plan.compile),
            "seed": self.plan.seed,
            "step": self.checkpoint.step,
            "model": weights_digest(self.checkpoint, weights)[:16],
        }

    def _artist(self, weights: Weights) -> Sampler:
        model = load_network(self.config, self.checkpoint, weights, compile=self.plan.compile)
        return Sampler(model, self.config, *conditions_of(self.config, SampleRequest()), self.plan.seed)


def measure(
    features: Tensor,
    reference: Reference,
    network: FeatureNetwork,
    facts: Facts,
    *,
    step: int,
    weights: Weights,
    seed: int = 0,
) -> Evaluation:
    """The result of images' features. Shape: (N, D)."""
    return Evaluation(facts, figures_of(features, reference, network.distance), step, weights, seed)


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
