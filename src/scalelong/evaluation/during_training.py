"""Evaluations of a run while it trains, by all of its processes, which exchange nothing but files.

None waits in a collective for the length of an evaluation. Only with sharded weights, where a forward pass takes every
process, do they sample in step.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ..config.schema import Config, Weights
from ..diffusion.guidance import Condition, Conditioning
from ..sampling.sample_run import BATCH, Sampler, fixed
from ..utils.atomic import replace_text
from ..utils.blocks import Fingerprint, wait_until
from ..utils.device import best_device, resolve_precision
from ..utils.distributed import Rank
from .evaluate import features_of, figures_of
from .feature_network import BLOCK, FeatureNetwork, ShareDone, fill_features, stored_features
from .features import load_features
from .metrics import check_libraries
from .reference import Reference, Report, build_reference, load_reference
from .results import Evaluation, forget_after, record, result_fingerprint

EXCHANGE = ".evaluation"


class Stopped(Exception):
    """A process was told to stop, so the evaluation is given up."""


@dataclass(frozen=True)
class Evaluator:
    """Evaluates a run's network as `scalelong evaluate` would; every process of the run has one, and calls it alike."""

    config: Config
    run_folder: Path
    conditioning: Conditioning
    condition: Condition
    feature_network: FeatureNetwork
    reference: Reference
    rank: Rank
    uses_fsdp: bool

    @classmethod
    def open(
        cls,
        config: Config,
        run_folder: Path,
        conditioning: Conditioning,
        condition: Condition,
        *,
        rank: Rank,
        uses_fsdp: bool,
        progress: Report | None = None,
    ) -> Evaluator:
        """Load the feature network, and the statistics of the training images, which are made if they are not there.

        `condition` is that of each image. With FSDP a forward pass takes all processes.
        """
        check_libraries()
        network = load_features(config.evaluation.network)
        reference = load_reference(build_reference(config.data, network, rank=rank, progress=progress))
        return cls(config, run_folder, conditioning, condition, network, reference, rank, uses_fsdp)

    def begin(self, step: int) -> None:
        """Forget what came after a step, and what a killed evaluation left; for the first process."""
        self.tidy()
        forget_after(self.run_folder, step)

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
            wait_until(outcome.is_file)
            content = json.loads(outcome.read_bytes())
            return None if content is None else Evaluation.from_json(content)
        found = None
        if features is not None:
            figures = figures_of(features, self.reference, self.feature_network.distance)
            found = Evaluation(self.fingerprint, figures, step, weights)
            record(self.run_folder, [found])
        self.exchange.mkdir(exist_ok=True)
        replace_text(outcome, json.dumps(None if found is None else asdict(found)))
        return found

    @property
    def fingerprint(self) -> Fingerprint:
        """That of every result: in float32 whatever the training's precision, but shards sample in that of training."""
        precision, images = "no", self.config.evaluation.images
        if self.uses_fsdp:
            precision = resolve_precision(self.config.training.precision, best_device())
        precision = "fp32" if precision == "no" else precision
        return result_fingerprint(self.config, self.feature_network, self.reference, images, precision=precision)

    @property
    def exchange(self) -> Path:
        return self.run_folder / EXCHANGE

    def _features(
        self, network: nn.Module, step: int, weights: Weights, should_stop: Callable[[], bool]
    ) -> Tensor | None:
        """Of all images, in the first process; None in the others, and if one should stop."""
        sampler = Sampler(network, self.config, self.conditioning, fixed(self.condition))
        folder, images = self.exchange / f"{step}-{weights}", self.config.evaluation.images

        def describe(numbers: range, done: ShareDone) -> Tensor:
            return features_of(sampler, self.feature_network, numbers, done)

        def check(done: float, count: int) -> None:
            # Processes that sample in step would wait for one that stopped.
            if not self.uses_fsdp:
                self._check_stop(should_stop)

        try:
            is_first = fill_features(folder, {"step": step, "weights": weights}, images, describe, self.rank, check)
        except Stopped:
            return None
        if self.uses_fsdp:
            self._run_dummy_forwards(sampler)
        return torch.cat(list(stored_features(folder, images))) if is_first else None

    def _check_stop(self, should_stop: Callable[[], bool]) -> None:
        """Stop if this process or another should; the others see it by a file."""
        stop = self.exchange / "stop"
        if should_stop():
            stop.touch()
        if stop.exists():
            raise Stopped

    def _run_dummy_forwards(self, sampler: Sampler) -> None:
        """Sample, for nothing, as often as the first process, whose forward passes take this one as well."""

        def batches_of(rank: int) -> int:
            images = self.config.evaluation.images
            starts = range(rank * BLOCK, images, self.rank.world * BLOCK)
            return sum(math.ceil(min(BLOCK, images - start) / BATCH) for start in starts)

        for _ in range(batches_of(0) - batches_of(self.rank.index)):
            sampler.sample(range(1))
