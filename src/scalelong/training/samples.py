"""Samples of a network while it trains: the grid of a step, and the evaluator of the recipe."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from torch import nn

from ..config.build import Inputs, conditioning_of, spread_labels
from ..config.schema import Config
from ..diffusion.guidance import Condition
from ..evaluation import Evaluator
from ..runs.run_dir import Run
from ..sampling.images import save_grid
from ..sampling.sample_run import sample_network, validation_condition
from .parallel import Parallel
from .state import TrainState

GRID_IMAGES = 64


def save_samples(path: Path, network: nn.Module, config: Config, inputs: Inputs, parallel: Parallel) -> None:
    """A grid of samples as a PNG, always of the same noise; with shards every process takes part in each pass."""
    if not parallel.is_main and not parallel.uses_fsdp:
        # Not in a collective: sampling may take longer than those wait.
        parallel.rank.wait(f"the grid {path}", path.is_file)
        return
    conditioning, condition = conditioning_of(config, inputs.empty_text), sample_condition(config, inputs, GRID_IMAGES)
    network.eval()
    samples = sample_network(network, config, conditioning, condition, count=GRID_IMAGES)
    network.train()
    if parallel.is_main:
        save_grid(samples, path)


def sample_condition(config: Config, inputs: Inputs, count: int) -> Condition:
    """Class after class, or the captions of validation images."""
    if config.text is None:
        return spread_labels(config, count)
    return validation_condition(inputs, conditioning_of(config, inputs.empty_text), count)


def open_evaluator(
    config: Config, run: Run, inputs: Inputs, parallel: Parallel, progress: Callable[[str, float, int], None]
) -> Evaluator:
    """The evaluator of samples; the statistics of the data may take their time."""
    conditioning = conditioning_of(config, inputs.empty_text)
    condition = sample_condition(config, inputs, config.evaluation.images)
    return Evaluator(
        config,
        run.folder,
        conditioning,
        condition,
        rank=parallel.rank,
        uses_fsdp=parallel.uses_fsdp,
        progress=progress,
    )


def evaluate_samples(
    evaluator: Evaluator,
    network: nn.Module,
    config: Config,
    state: TrainState,
    parallel: Parallel,
    stopped: Callable[[], bool],
    say: Callable[[str], None],
) -> dict[str, float] | None:
    """The numbers of the recipe's evaluation after this step; None if it was stopped."""
    numbers, found = dict[str, float](), None
    network.eval()
    for weights in config.evaluation.chosen:
        with state.ema.swap(network) if weights == "ema" else nullcontext():
            found = evaluator.evaluate(network, state.step, weights, stopped)
        if found is None:
            break
        numbers |= found.numbers()
        say(f"step {state.step}, {found}")
    parallel.rank.meet("the evaluation of the others")
    network.train()
    if parallel.is_main:
        evaluator.tidy()
    return None if found is None else numbers
