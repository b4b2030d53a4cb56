"""What is due after a step besides saving it: the validation loss, a grid of samples, and an evaluation of images."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from ..config.build import build_process
from ..config.conditioning import spread_labels
from ..config.inputs import Inputs
from ..config.schema import Config
from ..diffusion.guidance import Condition, Conditioning
from ..runs.resume import ResumePoint
from ..runs.run_dir import Run
from ..sampling.images import save_grid
from ..sampling.sample_run import sample_network, validation_condition
from ..utils.blocks import wait_until
from ..utils.distributed import Rank
from .agreement import any_rank
from .engine import uses_fsdp
from .logger import RunLogger
from .quality import MakeEvaluator, Quality, plain
from .state import TrainState
from .validation import Validation

GRID_IMAGES = 64


class Due:
    """Looks at the network as it is after the state's last step; every process calls it alike."""

    def __init__(
        self,
        config: Config,
        run: Run,
        state: TrainState,
        journal: RunLogger,
        inputs: Inputs,
        conditioning: Conditioning,
        *,
        evaluate: MakeEvaluator | None = None,
    ) -> None:
        self.config, self.run, self.state, self.journal = config, run, state, journal
        self.inputs, self.conditioning = inputs, conditioning
        self.accelerator = journal.accelerator
        self.sharded = uses_fsdp(config.training, self.accelerator)
        self.rank = Rank(self.accelerator.process_index, self.accelerator.num_processes)
        self.validation = self._build_validation()
        self.quality = self._build_quality(evaluate)

    def _build_validation(self) -> Validation:
        return Validation(
            self.inputs.validation,
            build_process(self.config.diffusion),
            self.conditioning,
            seed=self.config.seed,
            batch_size=self.config.training.batch_size,
            rank=self.rank.index,
            world=self.rank.world,
            add=lambda total: self.accelerator.reduce(total, "sum"),
            device=self.accelerator.device,
        )

    def _build_quality(self, evaluate: MakeEvaluator | None) -> Quality | None:
        config, state = self.config.evaluation, self.state
        if evaluate is None or config.every is None:
            return None
        condition = self._condition(config.images)
        evaluator = evaluate(
            self.config, self.run.folder, self.conditioning, condition, rank=self.rank, uses_fsdp=self.sharded
        )
        return Quality(evaluator, config, state.network, state.ema, self.journal, sharded=self.sharded)

    def begin(self, step: int) -> None:
        """The run goes on from a step: what was evaluated later is forgotten."""
        if self.quality is not None:
            self.quality.begin(step)

    def validation_loss(self) -> float | None:
        """The validation loss of the EMA weights, by which the best checkpoint is kept; None if it is not due."""
        state, network = self.state, self.state.network
        if not self._is_due(self.config.training.validate_every):
            return None
        # Shards stay as they are.
        with self.journal.watch.paused(), nullcontext() if self.sharded else plain(network):
            raw = self.validation.loss(network)
            with state.ema.swap(network):
                averaged = self.validation.loss(network)
        self.journal.record(state.step, {"validation_loss": raw, "validation_loss_ema": averaged})
        self.journal.note(f"step {state.step}: validation loss {raw:.4f}, EMA weights {averaged:.4f}")
        return averaged

    def samples(self) -> None:
        """A grid of images from the EMA weights, always of the same noise, if it is due."""
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
        if any_rank(self.accelerator, self.journal.is_main and self.state.step > 0 and not self.grid.is_file()):
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
            condition = self._condition(GRID_IMAGES)
            images = sample_network(network, self.config, self.conditioning, condition, count=GRID_IMAGES)
        network.train()
        if self.journal.is_main:
            save_grid(images, self.grid)

    def _condition(self, count: int) -> Condition:
        """Class after class, or the captions of validation images."""
        if self.config.text is None:
            return spread_labels(self.config, count)
        return validation_condition(self.inputs, self.conditioning, count)


def grid_of(run: Run, step: int) -> Path:
    """The file of the grid of a step."""
    return run.samples / f"step-{step:06d}.png"


def is_finished(config: Config, run: Run, start: ResumePoint, *, evaluates: bool) -> bool:
    """Whether nothing is left to do: all steps are done, and the last has the grid and the evaluation that are due."""
    steps, checkpoint = config.training.steps, start.checkpoint
    if start.step != steps or checkpoint is None:
        return start.step >= steps
    if start.own and config.training.sample_every is not None and not grid_of(run, steps).is_file():
        return False
    return not evaluates or config.evaluation.every is None or checkpoint.state().get("evaluated") == steps
