"""Evaluations of a run while it trains, by all of its processes, which exchange nothing but files.

None waits in a collective for the length of an evaluation. Only with sharded weights, where a forward pass takes every
process, do they draw in step.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor, nn

from ..config.schema import Config, Weights
from ..diffusion.guidance import Condition, Conditioning
from ..sampling.sample_folder import wait_until
from ..sampling.sample_run import BATCH, Sampler, fixed
from ..utils.atomic import replace_text
from ..utils.device import best_device, resolve_precision
from ..utils.distributed import SINGLE, Rank
from .blocks import BLOCK, Blocks
from .evaluate import features_of, measure
from .facts import result_facts
from .feature_network import FeatureNetwork
from .features import load_features
from .metrics import check_libraries
from .progress import Report, unseen
from .references import await_reference
from .results import Evaluation, forget_after, record
from .statistics import Facts, Reference

EXCHANGE = ".evaluation"


class Stopped(Exception):
    """A process was told to stop, so the evaluation is given up."""


@dataclass(frozen=True)
class Evaluator:
    """Evaluates a run's network as `scalelong evaluate` would; every process of the run has one, and calls it alike.

    `together` says that a forward pass takes all processes, as with sharded weights.
    """

    config: Config
    folder: Path
    artist: Callable[[nn.Module], Sampler]
    network: FeatureNetwork
    reference: Reference
    rank: Rank = SINGLE
    together: bool = False

    @classmethod
    def open(
        cls,
        config: Config,
        folder: Path,
        granted: tuple[Conditioning, Condition],
        *,
        rank: Rank = SINGLE,
        together: bool = False,
        report: Report = unseen,
    ) -> Evaluator:
        """Load the feature network, and the statistics of the training images, which are made if they are not there.

        `granted` is how the network is conditioned, and the condition of each image.
        """
        check_libraries()
        network = load_features(config.evaluation.network)
        reference = await_reference(config.data, network, rank, report=report)
        conditioning, conditions = granted[0], fixed(granted[1])

        def artist(model: nn.Module) -> Sampler:
            return Sampler(model, config, conditioning, conditions)

        return cls(config, folder, artist, network, reference, rank, together)

    def begin(self, step: int) -> None:
        """Forget what came after a step, and what a killed evaluation left; for the first process."""
        self.tidy()
        forget_after(self.folder, step)

    def tidy(self) -> None:
        """Remove the files that were exchanged; for the first process, once all have their result."""
        shutil.rmtree(self.exchange, ignore_errors=True)

    def evaluate(self, model: nn.Module, step: int, weights: Weights, told: Callable[[], bool]) -> Evaluation | None:
        """The figures of a model in eval mode, the same in every process; None if one of them was told to stop."""
        outcome = self.exchange / f"{step}-{weights}.json"
        features = self._features(model, step, weights, told)
        if self.rank.index:
            wait_until(outcome.is_file)
            content = json.loads(outcome.read_bytes())
            return None if content is None else Evaluation.from_json(content)
        found = None
        if features is not None:
            found = measure(features, self.reference, self.network, self.facts(), step=step, weights=weights)
            record(self.folder, [found])
        self.exchange.mkdir(exist_ok=True)
        replace_text(outcome, json.dumps(None if found is None else asdict(found)))
        return found

    def facts(self) -> Facts:
        """Those of every result."""
        images = self.config.evaluation.images
        return result_facts(self.config, self.network, self.reference, images, precision=self.precision)

    @property
    def precision(self) -> str:
        """float32 whatever the training's, but shards draw in that of the training."""
        if not self.together:
            return "fp32"
        return resolve_precision(self.config.training.precision, best_device())

    @property
    def exchange(self) -> Path:
        return self.folder / EXCHANGE

    def _features(self, model: nn.Module, step: int, weights: Weights, told: Callable[[], bool]) -> Tensor | None:
        """Of all images, in the first process; None in the others, and if one was told to stop."""
        artist, images = self.artist(model), self.config.evaluation.images
        blocks = Blocks(
            self.exchange / f"{step}-{weights}",
            {"step": step, "weights": weights},
            images,
            lambda numbers, progress: features_of(artist, self.network, numbers, progress),
            # Those that draw in step would wait for one that stopped.
            lambda done, total: None if self.together else self._check(told),
        )
        try:
            features = blocks.compute(self.rank)
        except Stopped:
            return None
        if self.together:
            self.run_dummy_forwards(artist)
        return features

    def _check(self, told: Callable[[], bool]) -> None:
        """Stop if this process or another was told to; the others see it by a file."""
        stop = self.exchange / "stop"
        if told():
            stop.touch()
        if stop.exists():
            raise Stopped

    def _draws_of(self, rank: int) -> int:
        """How many batches a process draws; the first never has fewer than another."""
        images = self.config.evaluation.images
        starts = range(rank * BLOCK, images, self.rank.world * BLOCK)
        return sum(math.ceil(min(BLOCK, images - start) / BATCH) for start in starts)

    def run_dummy_forwards(self, artist: Sampler) -> None:
        """Draw, for nothing, as often as the first process, whose forward passes take this one as well."""
        for _ in range(self._draws_of(0) - self._draws_of(self.rank.index)):
            artist.images(range(1))
