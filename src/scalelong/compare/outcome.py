"""What the process of a run does: train, or resume; then measure how it ended, and keep that in a small file."""

from __future__ import annotations

import logging
import math
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..config import Config, build_model
from ..config.build import open_inputs
from ..config.sections import EvaluationConfig
from ..evaluation import Plan as EvaluationPlan
from ..evaluation import evaluate_run
from ..evaluation.results import FILE as EVALUATIONS
from ..evaluation.results import Evaluation, read_evaluations
from ..guard.losses import TrainingDiverged
from ..monitor.readings import with_nulls
from ..runs import Run, read_metrics
from ..runs.model import load_network
from ..training import Display, train
from ..training.logger import Silent
from ..training.loss import open_validation
from ..training.parallel import Parallel
from ..training.samples import save_samples
from ..utils.atomic import Damaged, locked, read_json, write_signed
from ..utils.runtime import keyed_generator
from .failure import Cause, Reference, cause_of_failure, has_clearly_failed
from .reference import reference_of

logger = logging.getLogger(__name__)

FILE = "outcome.json"
STOPPED = 128 + signal.SIGTERM  # The exit code of a run that was told to stop, and has saved.
WAIT_SECONDS = 60.0  # For the process of a comparison that was killed just now, which needs a moment to notice.
SIGMAS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)  # Standard deviations of the extra noise; images lie in [−1, 1].


@dataclass(frozen=True)
class Outcome:
    """A run that came to its end; `noise_losses` are validation losses (EMA) with extra input noise of `SIGMAS`."""

    status: Literal["finished", "failed"]
    step: int
    message: str | None = None
    initial_loss: float | None = None
    noise_losses: tuple[float | None, ...] | None = None
    cause: Cause | None = None
    nothing_loss: float | None = None
    """Of predicting nothing."""


def run(folder: Path, config: Config) -> None:
    """The job of a run."""
    run_in(folder, config, None)


def run_until_failed(folder: Path, config: Config) -> None:
    """The job of a run that is stopped as soon as it has clearly failed."""
    display = StopsFailed(folder, config)
    display.look()
    run_in(folder, config, display)


def run_in(folder: Path, config: Config, display: Display | None) -> None:
    with locked(folder / ".job", f"another process is training in {folder}", wait=WAIT_SECONDS):
        outcome = train_and_measure(folder, config, display)
    if outcome is None:
        sys.exit(STOPPED)


class StopsFailed(Silent):
    """Looks at the validation losses of a run whenever it says something, which it does after each of them.

    All lines of its metrics count, and what they say is a function of the step: a run that was killed and resumes stops
    at the same one.
    """

    def __init__(self, folder: Path, config: Config) -> None:
        self.folder, self.training, self.config = folder, config.training, config
        self.reference: Reference | None = None

    def info(self, message: str) -> None:
        self.look()

    def look(self) -> None:
        losses = [losses[0] for losses in validation_losses(self.folder)]
        planned = math.ceil(self.training.steps / (self.training.validate_every or self.training.steps))
        if 0 < len(losses) < planned:
            self.reference = self.reference or reference_of(open_validation(self.config))
            self.ends = has_clearly_failed(losses, self.reference, self.training.must_gain, planned)


def train_and_measure(folder: Path, config: Config, display: Display | None = None) -> Outcome | None:
    """Train, or resume; then measure how it ended and write it down. None if it was told to stop."""
    display, given_up = display or Silent(), None
    try:
        with noticing_signals() as told_to_stop:
            # It may have been killed after it had failed, and before that was written down.
            if not display.ends:
                train(config, folder, display=display)
            if told_to_stop():
                return None
    except TrainingDiverged as error:
        given_up = str(error)
    outcome = measure_outcome(folder, config, given_up)
    if outcome.status == "finished":
        evaluate_last_step(folder, config)
    else:
        sample_where_it_ended(folder, config)
    write_signed(folder / FILE, with_nulls(asdict(outcome)))
    return outcome


@contextmanager
def noticing_signals() -> Iterator[Callable[[], bool]]:
    """Whether a signal has come since, whoever handled it: a trainer does not tell of one during its last step."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield lambda: bool(select.select([reading], [], [], 0)[0])
    finally:
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)


def measure_outcome(folder: Path, config: Config, given_up: str | None = None) -> Outcome:
    """The outcome of a run that reached its last step, was stopped, or that the guard gave up for that reason."""
    validation = open_validation(config)
    initial = validation.loss(build_model(config).to(validation.device))
    reference, worst = reference_of(validation), last_loss(folder)
    limit = reference.limit(config.training.must_gain)
    if cause := cause_of_failure(worst, limit, given_up=given_up is not None):
        said = f"final validation loss {worst:.4g}, untrained {initial:.4g}, predicting nothing {reference.nothing:.4g}"
        step = Run(folder).metrics.last_step()
        return Outcome("failed", step, given_up or said, initial, None, cause, reference.nothing)
    checkpoint = Run(folder).checkpoints().latest()
    assert checkpoint is not None, "a run that ended has a checkpoint"
    network = load_network(config, checkpoint, "ema")
    noisy = tuple(validation.loss(NoisyInput(network, sigma, config.seed)) for sigma in SIGMAS)
    return Outcome("finished", config.training.steps, None, initial, noisy, None, reference.nothing)


def sample_where_it_ended(folder: Path, config: Config) -> None:
    """A grid of samples of a run that failed, as the others have one of their last step."""
    checkpoint = Run(folder).checkpoints().latest()
    if config.training.sample_every is None or checkpoint is None:
        return
    grid, network = Run(folder).grid(checkpoint.step), load_network(config, checkpoint, "ema")
    if not grid.is_file():
        save_samples(grid, network, config, open_inputs(config), Parallel.open(config.training))


def last_loss(folder: Path) -> float:
    """The larger of the last validation losses of the weights and of their EMA; NaN if one of them is."""
    found = validation_losses(folder)
    return math.nan if not found or any(map(math.isnan, found[-1])) else max(found[-1])


def validation_losses(folder: Path) -> list[tuple[float, float]]:
    """Those of the weights and of their EMA, in the order of the steps."""
    path = Run(folder).metrics.path
    lines = [line for line in read_metrics(path) if "validation_loss" in line] if path.is_file() else []
    return [(float(line["validation_loss"]), float(line["validation_loss_ema"])) for line in lines]


class NoisyInput(nn.Module):
    """A network whose input gets Gaussian noise of its own: x_t' = x_t + σ·δ (Section 3.3), the same δ for every σ."""

    def __init__(self, network: nn.Module, sigma: float, seed: int) -> None:
        super().__init__()
        self.network, self.sigma = network, sigma
        self.generator = keyed_generator(seed, "extra noise", 0)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        extra = torch.randn(x.shape, generator=self.generator).to(x)
        return self.network(x + self.sigma * extra, *args, **kwargs)


def evaluate_last_step(folder: Path, config: Config) -> None:
    """Evaluate the weights of the last step that a signal kept the trainer from."""
    wanted = config.evaluation
    done = {one.weights for one in evaluations(folder, wanted) if one.step == config.training.steps}
    missing: Any = tuple(weights for weights in wanted.chosen if weights not in done)
    if wanted.every is not None and missing:
        evaluate_run(folder, EvaluationPlan(wanted.images, missing, wanted.network, allow_code=True))


def evaluations(folder: Path, wanted: EvaluationConfig) -> list[Evaluation]:
    """Those of a run with a Fréchet distance of the wanted network and number of images; others are not comparable."""
    if not (folder / EVALUATIONS).is_file():
        return []
    # The recipe names a network, a network with its weights, or the path of a file, which is called by its name.
    kind, _, file = wanted.network.partition(":")
    names = {wanted.network, kind, Path(file or kind).name}
    # A run's own evaluations begin with image 0; others were made by hand.
    own = [one for one in read_evaluations(folder) if one.seed == 0 and one.fingerprint.get("network") in names]
    return [one for one in own if one.fingerprint.get("images") == wanted.images and distance_of(one)]


def distance_of(one: Evaluation) -> str:
    """The name of an evaluation's Fréchet distance: FID, or FD- and the network; empty if it has none."""
    return next((name for name in one.figures if name == "FID" or name.startswith("FD-")), "")


def read_outcome(folder: Path) -> Outcome | None:
    """None for a run that has not come to its end, or whose end must be measured again."""
    file = folder / FILE
    if not file.is_file():
        return None
    try:
        content = read_json(file)
        noise = content.pop("noise_losses")
        return Outcome(**content, noise_losses=noise and tuple(noise))
    except (Damaged, KeyError, TypeError) as damage:
        logger.warning("%s is damaged (%s): how the run ended is measured again", file, damage)
        return None
