"""What is due after a step besides saving it: the held-out loss, a grid of samples, and an evaluation of images."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from ..data.prepare import Share
from ..recipes.build import build_process
from ..recipes.conditions import Condition, Conditioning, spread_labels
from ..recipes.config import Config
from ..recipes.inputs import Inputs
from ..runs.resume import Start
from ..runs.run import Run
from ..sampling.draw import draw, heldout_condition
from ..sampling.folder import wait_until
from ..sampling.pictures import save_grid
from .agreement import in_any
from .engine import shares_weights
from .heldout import HeldOut
from .journal import Journal
from .quality import MakeEvaluator, Quality, plain
from .state import TrainState

GRID_IMAGES = 64


class Due:
    """Looks at the network as it is after the state's last step; every process calls it alike."""

    def __init__(
        self,
        config: Config,
        run: Run,
        state: TrainState,
        journal: Journal,
        inputs: Inputs,
        conditioning: Conditioning,
        *,
        evaluate: MakeEvaluator | None = None,
    ) -> None:
        self.config, self.run, self.state, self.journal = config, run, state, journal
        self.inputs, self.conditioning = inputs, conditioning
        self.accelerator = journal.accelerator
        self.sharded = shares_weights(config.training, self.accelerator)
        self.share = Share(self.accelerator.process_index, self.accelerator.num_processes)
        self.heldout = self._build_heldout()
        self.quality = self._build_quality(evaluate)

    def _build_heldout(self) -> HeldOut:
        return HeldOut(
            self.inputs.heldout,
            build_process(self.config.diffusion),
            self.conditioning,
            seed=self.config.seed,
            batch_size=self.config.training.batch_size,
            rank=self.share.rank,
            world=self.share.world,
            add=lambda total: self.accelerator.reduce(total, "sum"),
            device=self.accelerator.device,
        )

    def _build_quality(self, evaluate: MakeEvaluator | None) -> Quality | None:
        config, state = self.config.evaluation, self.state
        if evaluate is None or config.every is None:
            return None
        granted = self.conditioning, self._condition(config.images)
        evaluator = evaluate(self.config, self.run.folder, granted, share=self.share, together=self.sharded)
        return Quality(evaluator, config, state.network, state.ema, self.journal, sharded=self.sharded)

    def begin(self, step: int) -> None:
        """The run goes on from a step: what was evaluated later is forgotten."""
        if self.quality is not None:
            self.quality.begin(step)

    def heldout_loss(self) -> float | None:
        """The held-out loss of the averaged weights, by which the best checkpoint is kept; None if it is not due."""
        state, network = self.state, self.state.network
        if not self._is_due(self.config.training.eval_every):
            return None
        # Shards stay as they are.
        with self.journal.watch.paused(), nullcontext() if self.sharded else plain(network):
            raw = self.heldout.loss(network)
            with state.ema.swap(network):
                averaged = self.heldout.loss(network)
        self.journal.record(state.step, {"heldout_loss": raw, "heldout_loss_ema": averaged})
        self.journal.note(f"step {state.step}: held-out loss {raw:.4f}, averaged weights {averaged:.4f}")
        return averaged

    def samples(self) -> None:
        """A grid of images from the averaged weights, always of the same noise, if it is due."""
        if not self._is_due(self.config.training.sample_every):
            return
        with self.journal.watch.paused():
            if self.journal.is_main or self.sharded:
                self._draw_grid()
            else:
                # Not in a collective: drawing may take longer than those wait.
                wait_until(self.grid.is_file)

    def missing_samples(self) -> None:
        """The grid of the step that the run goes on from, if it is due and a signal or a kill came before it."""
        if in_any(self.accelerator, self.journal.is_main and self.state.step > 0 and not self.grid.is_file()):
            self.samples()

    def owes_evaluation(self) -> bool:
        """Whether drawn images of the last step are due to be evaluated, and have not been."""
        due = self.quality is not None and self._is_due(self.config.evaluation.every)
        return due and self.state.step > 0 and self.state.evaluated != self.state.step

    def evaluate(self, told: Callable[[], bool]) -> bool:
        """Evaluate drawn images; False if a process was `told` to stop before it was done."""
        assert self.quality is not None
        if not self.quality.evaluate(self.state.step, told):
            return False
        self.state.evaluated = self.state.step
        return True

    @property
    def grid(self) -> Path:
        """The file of the grid of the state's step."""
        return grid_of(self.run, self.state.step)

    def _is_due(self, every: int | None) -> bool:
        return every is not None and (self.state.step % every == 0 or self.state.step == self.config.training.steps)

    def _draw_grid(self) -> None:
        network = self.state.network
        with self.state.ema.swap(network.eval()):
            images = draw(network, self.config, self.conditioning, self._condition(GRID_IMAGES), count=GRID_IMAGES)
        network.train()
        if self.journal.is_main:
            save_grid(images, self.grid)

    def _condition(self, count: int) -> Condition:
        """Class after class, or the captions of held-out images."""
        if self.config.text is None:
            return spread_labels(self.config, count)
        return heldout_condition(self.inputs, self.conditioning, count)


def grid_of(run: Run, step: int) -> Path:
    """The file of the grid of a step."""
    return run.samples / f"step-{step:06d}.png"


def is_finished(config: Config, run: Run, start: Start, *, evaluates: bool) -> bool:
    """Whether nothing is left to do: all steps are done, and the last has the grid and the evaluation that are due."""
    steps, checkpoint = config.training.steps, start.checkpoint
    if start.step != steps or checkpoint is None:
        return start.step >= steps
    if start.own and config.training.sample_every is not None and not grid_of(run, steps).is_file():
        return False
    return not evaluates or config.evaluation.every is None or checkpoint.state().get("evaluated") == steps
