"""Evaluate samples: of a run's checkpoint, of a network in memory, or of a run while it trains.

The processes of a run exchange files: none waits in a collective for the length of an evaluation. Only with sharded
weights, where a forward pass takes every process, do they sample in step.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config.schema import Config
from ..config.sections import Weights
from ..data.sources import short_hash
from ..diffusion.guidance import Condition, Conditioning
from ..runs.model import choose_checkpoint, load_network, weights_digest
from ..runs.run_dir import Run
from ..sampling.sample_run import BATCH, Conditions, Sampler, conditions_of, fixed, with_sampling
from ..utils.atomic import replace_text
from ..utils.block_folder import Fingerprint, Progress, block_ranges
from ..utils.runtime import SINGLE, Rank, best_device, check_compiler, resolve_precision
from ..utils.team import check_shared
from .arrays import IMAGES, existing, read_arrays
from .features import BLOCK, FeatureNetwork, ShareDone, fill_features, stored_features
from .manifold import precision_recall
from .metrics import Figure, check_libraries, frechet_figure, inception_score, kernel_distance, shuffled
from .networks import EFFICIENTNET, load_features
from .reference import KEPT, Reference, Report, build_reference, describe_batch, load_reference, quiet
from .results import (
    FILE,
    Evaluation,
    check_comparable,
    check_reference,
    counterpart,
    describe_sampler,
    forget_after,
    read_evaluations,
    record,
    result_fingerprint,
)

EXCHANGE = ".evaluation"


@dataclass(frozen=True)
class Plan:
    """What is asked of an evaluation; what is None is as the run's recipe says."""

    images: int = 10_000
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
    resize: str | None = None
    """How the Inception resizes; None = as pytorch-fid does."""
    allow_code: bool = False
    """Whether a run may bring the code of its network."""


def evaluate_run(
    folder: str | Path, plan: Plan, *, rank: Rank = SINGLE, progress: Report = quiet, others: Sequence[Evaluation] = ()
) -> list[Evaluation]:
    """Evaluate a run's checkpoint and write it to the run's evaluation.json; nothing in other processes.

    `others` are what the figures shall be compared with: if they cannot be, it raises before an image is sampled.
    """
    check_libraries()
    if plan.compile:
        check_compiler(best_device())
    run = Run(Path(folder))
    check_shared(rank, run.folder, "run folder")
    config = with_sampling(run.config(allow_code=plan.allow_code), **(plan.sampling or {}))
    checkpoint, network = choose_checkpoint(run, plan.checkpoint), load_features(plan.network, plan.resize)
    if plan.reference is None:
        reference = load_reference(build_reference(config.data, network, rank=rank, progress=progress))
    else:
        reference = open_reference(plan.reference, network, rank=rank, progress=progress)
    network = with_all_features(network, reference)
    fingerprint = result_fingerprint(config, network, reference, plan.images, compiled=plan.compile)
    for weights in plan.weights if others else ():
        check_comparable(counterpart(fingerprint, weights, others).fingerprint, fingerprint)

    def open_sampler(weights: Weights) -> Sampler:
        model = load_network(config, checkpoint, weights, compile=plan.compile)
        return Sampler(model, config, *conditions_of(config), plan.seed)

    found = []
    for weights in plan.weights:
        # What a block depends on. The number of images is none of it: more of them add to the blocks of fewer.
        content = {
            **network.fingerprint,
            "sampler": describe_sampler(config, compiled=plan.compile),
            "seed": plan.seed,
            "step": checkpoint.step,
            "model": weights_digest(checkpoint, weights)[:16],
            **({"spatial": True} if reference.spatial is not None else {}),
        }
        place = run.folder / "evaluation" / f"step-{checkpoint.step:06d}-{weights}-{short_hash(content)}"
        sampler, shown = partial(open_sampler, weights), partial(progress, "images sampled")
        features = sampled_features(place, content, sampler, network, plan.images, rank, shown)
        if features is not None:
            figures = figures_of(features, reference, network)
            found.append(Evaluation(fingerprint, figures, checkpoint.step, weights, plan.seed))
    if found:
        record(run.folder, found)
    return found


def open_reference(file: Path, network: FeatureNetwork, *, rank: Rank = SINGLE, progress: Report = quiet) -> Reference:
    """That of a file; the network describes images in it, as in ADM's batches, which KID, precision and recall need."""
    names = read_arrays(existing(file), ()).keys()
    if IMAGES in names and "mu" not in names:
        return load_reference(describe_batch(file, network, rank=rank, progress=progress))
    published = load_reference(file)
    check_reference(published, network)
    if IMAGES not in names:
        return published
    described = load_reference(describe_batch(file, network, rank=rank, progress=progress))
    return replace(published, features=described.features)


def with_all_features(network: FeatureNetwork, reference: Reference) -> FeatureNetwork:
    """The network with the features that a reference has statistics of."""
    return network if reference.spatial is None or network.with_spatial is None else network.with_spatial


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

    `conditioning` is what `conditions_of(config)` gives: for captions it opens the data, so keep it between calls. The
    figures are those of `evaluate_run` with as many images and the same seed.
    """
    check_libraries()
    check_reference(reference, network)
    sampler = Sampler(model, config, *(conditioning or conditions_of(config)), seed)
    network = with_all_features(network, reference)
    features = [features_of(sampler, network, block) for block in block_ranges(images, BLOCK).values()]
    figures = figures_of(torch.cat(features), reference, network)
    return Evaluation(result_fingerprint(config, network, reference, images), figures, step, weights, seed)


def features_of(
    sampler: Sampler, network: FeatureNetwork, numbers: range, progress: ShareDone = lambda share: None
) -> Tensor:
    """Of the images of these numbers. Shape: (len(numbers), D)."""
    return network(sampler.sample(numbers, progress))


def sampled_features(
    folder: Path,
    fingerprint: Fingerprint,
    open_sampler: Callable[[], Sampler],
    network: FeatureNetwork,
    count: int,
    rank: Rank,
    progress: Progress,
) -> Tensor | None:
    """Those of samples, kept in blocks in a folder; None in processes that are not the first. Shape: (N, D)."""
    sampler = cache(open_sampler)  # Where nothing is missing, no network is loaded.

    def describe(numbers: range, done: ShareDone) -> Tensor:
        return features_of(sampler(), network, numbers, done)

    is_first = fill_features(folder, fingerprint, count, describe, rank, progress)
    return torch.cat(list(stored_features(folder, count))) if is_first else None


def figures_of(features: Tensor, reference: Reference, network: FeatureNetwork) -> dict[str, Figure]:
    """Fréchet distances; with raw features of the reference KID, precision and recall; the Inception Score.

    Shape: features (N, D), or with the sFID's behind them where the reference has statistics of those.
    """
    distance, width = network.distance, reference.statistics.width
    pooled = features if reference.spatial is None else features[:, :width]
    figures = {distance: frechet_figure(reference.statistics, pooled)}
    if reference.spatial is not None:
        figures["sFID"] = frechet_figure(reference.spatial, features[:, width:])
    if reference.features is not None:
        kernel = distance.replace("FD-", "KID-").replace("FID", "KID")
        figures[kernel] = kernel_distance(reference.features, pooled)
        figures["precision"], figures["recall"] = precision_recall(reference.features, shuffled(pooled)[:KEPT])
    if network.classifier is not None:
        figures["IS"], figures["IS-std"] = inception_score(pooled, network.classifier)
    return figures


class Stopped(Exception):
    """A process should stop, so the evaluation is given up."""


class Evaluator:
    """Evaluates a run's network as `scalelong evaluate` would; every process of the run has one, and calls it alike."""

    def __init__(
        self,
        config: Config,
        run_folder: Path,
        conditioning: Conditioning,
        condition: Condition,
        *,
        rank: Rank,
        uses_fsdp: bool,
        progress: Report = quiet,
    ) -> None:
        """Load the feature network, and the statistics of the training images, which are made if they are not there.

        `condition` is that of each image; with FSDP a forward pass takes all processes.
        """
        check_libraries()
        self.config, self.run_folder, self.exchange = config, run_folder, run_folder / EXCHANGE
        self.conditioning, self.condition = conditioning, condition
        self.rank, self.uses_fsdp = rank, uses_fsdp
        self.network = load_features(config.evaluation.network)
        self.reference = load_reference(build_reference(config.data, self.network, rank=rank, progress=progress))

    def begin(self, step: int, *, evaluated: int = 0) -> str:
        """Forget what came after a step, and what a killed evaluation left; for the first process.

        Says what is lost if the file has nothing of the step that was `evaluated` last.
        """
        self.tidy()
        forget_after(self.run_folder, step)
        file = self.run_folder / FILE
        if not evaluated or (file.is_file() and any(one.step == evaluated for one in read_evaluations(file))):
            return ""
        return f"{file} has lost what was evaluated up to step {evaluated}: those figures are in metrics.jsonl only"

    def tidy(self) -> None:
        """Remove the files that were exchanged; for the first process, once all have their result."""
        shutil.rmtree(self.exchange, ignore_errors=True)

    def evaluate(
        self, network: nn.Module, step: int, weights: Weights, should_stop: Callable[[], bool]
    ) -> Evaluation | None:
        """The figures of a network in eval mode, the same in every process; None if one of them should stop."""
        outcome = self.exchange / f"{step}-{weights}.json"
        features = self._features(network, step, weights, should_stop)
        if self.rank.index:
            self.rank.wait(f"the figures of step {step}", outcome.is_file)
            content = json.loads(outcome.read_bytes())
            return None if content is None else Evaluation.from_json(content)
        found = None
        if features is not None:
            figures = figures_of(features, self.reference, self.network)
            found = Evaluation(self.fingerprint, figures, step, weights)
            record(self.run_folder, [found])
        self.exchange.mkdir(exist_ok=True)
        replace_text(outcome, json.dumps(None if found is None else asdict(found)))
        return found

    @property
    def fingerprint(self) -> Fingerprint:
        """That of every result: in float32 whatever the training's precision, but shards sample in that of training."""
        config, precision = self.config, "fp32"
        if self.uses_fsdp:
            precision = resolve_precision(config.training.precision, best_device())
        images = config.evaluation.images
        return result_fingerprint(config, self.network, self.reference, images, precision=precision)

    def _features(
        self, network: nn.Module, step: int, weights: Weights, should_stop: Callable[[], bool]
    ) -> Tensor | None:
        """Of all images, in the first process; None in the others, and if one should stop."""
        sampler = Sampler(network, self.config, self.conditioning, fixed(self.condition))
        folder, stop = self.exchange / f"{step}-{weights}", self.exchange / "stop"

        def check_stop(done: float, count: int) -> None:
            # Processes that sample in step would wait for one that stopped.
            if not self.uses_fsdp:
                if should_stop():
                    stop.touch()
                if stop.exists():
                    raise Stopped

        images, content = self.config.evaluation.images, {"step": step, "weights": weights}
        try:
            features = sampled_features(folder, content, lambda: sampler, self.network, images, self.rank, check_stop)
        except Stopped:
            return None
        if self.uses_fsdp:
            # Sample, for nothing, as often as the first process, whose forward passes take this one as well.
            for _ in range(self._batches(0) - self._batches(self.rank.index)):
                sampler.sample(range(1))
        return features

    def _batches(self, rank: int) -> int:
        """How many batches a process samples."""
        own = list(block_ranges(self.config.evaluation.images, BLOCK).values())[rank :: self.rank.world]
        return sum(math.ceil(len(block) / BATCH) for block in own)
