"""The training loop: it loses nothing when it is stopped, and lets nothing non-finite into the weights.

`train(load_recipe("digits"), "runs/digits-cs")`, alone or in every process of `torchrun`.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import SIGTERM
from typing import Any

import torch
from torch import Tensor, nn

from ..config.build import build_model, build_process
from ..config.conditioning import conditioning_of
from ..config.inputs import open_inputs
from ..config.layout import has_channels_last
from ..config.schema import Config
from ..guard.nonfinite import Guard, StepDecision, TrainingDiverged
from ..runs.checkpoint import Checkpoint
from ..runs.resume import ResumePoint, check_unchanged, drop_later, find_start
from ..runs.run_dir import Run, environment, last_precision
from .agreement import all_or_none, in_contact
from .display import Display
from .due import Due, is_finished
from .ema import EMA
from .engine import build_accelerator, build_optimizer, check_batch_divides, learning_rate, place, uses_fsdp, wrap
from .logger import RunLogger
from .loss import DiffusionLoss, NoisyBatch
from .passes import Passes
from .quality import MakeEvaluator
from .sharding import whole
from .signals import StopSignals
from .state import TrainState
from .watching import MakeMonitor, Watching


@dataclass(frozen=True)
class Result:
    """How far a run came: `signal` is the number of the one that stopped it, `trained` the steps done this time."""

    folder: Path
    step: int
    steps: int
    trained: int
    signal: int | None = None

    @property
    def finished(self) -> bool:
        return self.step >= self.steps


def train(
    config: Config,
    out: str | Path,
    resume: str | Path = "auto",
    *,
    display: Display | None = None,
    monitor: MakeMonitor | None = None,
    evaluate: MakeEvaluator | None = None,
) -> Result:
    """Train a recipe in a run folder, or go on with the run in it; a finished one is left as it is.

    `monitor` is SkipMonitor, which is made if the recipe sets training.monitor_every, and `evaluate` is Evaluator.open,
    which is called if it sets evaluation.every.
    """
    run = Run(Path(out))
    start = find_start(run, config, resume)
    if is_finished(config, run, start, evaluates=evaluate is not None):
        return Result(run.folder, start.step, config.training.steps, trained=0)
    with in_contact():
        trainer = Trainer(config, run, start, display=display, monitor=monitor, evaluate=evaluate)
        try:
            return trainer.run()
        finally:
            trainer.accelerator.end_training()


class Trainer:
    """One run in one process: `__init__` builds everything, `run` writes to the folder."""

    def __init__(
        self,
        config: Config,
        run: Run,
        start: ResumePoint,
        *,
        display: Display | None = None,
        monitor: MakeMonitor | None = None,
        evaluate: MakeEvaluator | None = None,
    ) -> None:
        self.config, self.folder, self.begin = config, run, start
        self.accelerator = build_accelerator(config.training, run.folder)
        self.device: torch.device = self.accelerator.device
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        check_batch_divides(config, world)
        self.is_main: bool = self.accelerator.is_main_process
        self.journal = RunLogger(self.accelerator, run.metrics, config.training, display)
        self.signals = StopSignals(several=world > 1, leave=self.journal.display.leave)
        self.stopping = False
        self.saved = start.step  # The step of the last checkpoint.
        self._build_data(rank, world)
        self._build_model()
        self.monitor = self._build_monitor(monitor)
        self.watching = Watching(self.monitor, self.journal)
        self.due = Due(config, run, self.state, self.journal, self.inputs, self.conditioning, evaluate=evaluate)
        self.store = start.store or run.checkpoints(config.training.keep_last)

    def _build_data(self, rank: int, world: int) -> None:
        config = self.config
        batch_size, process = config.training.batch_size, build_process(config.diffusion)
        self.inputs = open_inputs(config, rank=rank, world=world, device=self.device)
        self.batches = self.inputs.batches
        self.conditioning = conditioning_of(config, self.inputs.empty_text)
        own, channels_last = self.batches.own, has_channels_last(config.training, self.device)
        self.objective = DiffusionLoss(process, self.conditioning, config.seed, batch_size, own, channels_last)

    def _build_model(self) -> None:
        config = self.config
        self.sharded = uses_fsdp(config.training, self.accelerator)
        self.network = place(build_model(config), config.training, self.accelerator)
        optimizer = build_optimizer(self.network, config.optim, self.device)
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.model, self.optimizer = wrap(self.network, optimizer, config.training, self.accelerator)
        self.passes = Passes(self.objective, self.model, self.network, self.accelerator, self.sharded)
        guard = Guard(self.network, max_skipped=config.training.max_skipped, average=self._agree)
        ema = EMA(self.network, config.optim.ema_decay)
        self.state = TrainState(self.network, optimizer, ema, guard, self.accelerator.scaler)

    def _build_monitor(self, make: MakeMonitor | None) -> Any:
        every = self.config.training.monitor_every
        if make is None or every is None:
            return None
        return make(self.model, every=every, probe_every=10 * every, scaler=self.accelerator.scaler)

    def run(self) -> Result:
        """Train to the end, or until a signal comes; returns how far it came."""
        # Dropout draws from the global generators, which are the caller's.
        devices = [self.device] if self.device.type == "cuda" else []
        with ExitStack() as held, torch.random.fork_rng(devices):
            with all_or_none(self.accelerator):
                if self.is_main:
                    held.enter_context(self.folder.locked())
            with all_or_none(self.accelerator):
                check_unchanged(self.folder, self.begin)
            return self._run()

    def _run(self) -> Result:
        steps = self.config.training.steps
        self._begin()
        first = self.state.step
        self.journal.start(first)
        try:
            with self.signals, self.watching.running():
                self._make_up()
                while self.state.step < steps and not self.stopping:
                    self._advance()
        finally:
            self.journal.stop()
        stopped = self.stopping and self.state.step < steps
        # Another process may be the one that was told to stop.
        signal = (self.signals.received or SIGTERM) if stopped else None
        return Result(self.folder.folder, self.state.step, steps, self.state.step - first, signal)

    def _begin(self) -> None:
        """Load the checkpoint to begin at, and write what the run is; a first checkpoint shows that there is room."""
        start = self.begin
        size = 0 if start.checkpoint is None else self._load(start.checkpoint)
        if not start.own:
            # Before the recipe, which makes the folder a run: without a checkpoint it would begin with other weights.
            self._save()
        before = last_precision(self.folder) if start.own else None
        with all_or_none(self.accelerator):
            self.due.begin(start.step)
            if self.is_main:
                drop_later(self.folder, start, self.store, metrics_size=size)
                facts = environment(self.accelerator, seed=self.config.seed, step=start.step)
                self.folder.begin(self.config, facts)
            self.journal.begin(self.config)
        self._say_begin(before)
        if start.checkpoint is None:
            self._save()

    def _say_begin(self, before: str | None) -> None:
        """Say where the run goes on, and what is not as one might think; `before` is the precision that it had."""
        start, config = self.begin, self.config
        if config.training.monitor_every is not None and self.monitor is None:
            self.journal.note("training.monitor_every: nothing is read, as train() got no monitor=SkipMonitor")
        if config.evaluation.every is not None and self.due.quality is None:
            self.journal.note("evaluation.every: nothing is evaluated, as train() got no evaluate=Evaluator.open")
        if before not in (None, self.accelerator.mixed_precision):
            self.journal.note(f"another precision than before ({before}): set training.precision to keep one")
        if start.checkpoint is not None:
            self.journal.note(f"going on from step {start.step} ({start.checkpoint.path})")

    def _load(self, checkpoint: Checkpoint) -> int:
        """Go on from a checkpoint; returns the size that metrics.jsonl had."""
        saved = self.state.load(checkpoint)
        self.watching.load_state_dict(saved.get("monitor"), saved["step"])
        return saved["metrics_size"]

    def _advance(self) -> None:
        """One step, and whatever is due after it."""
        verdict = self.train_step()
        if verdict.action == "rollback":
            self._roll_back()
            return
        training, step = self.config.training, self.state.step
        last = step == training.steps
        if step % training.log_every == 0 or last:
            self._log(verdict.grad_norm)
        validation = self.due.validation_loss()
        # Before what takes long or may fail, so that neither costs the steps since the last checkpoint.
        saved = last or self.stopping or self._is_saved(step)
        if saved:
            self._save(validation)
        if not self.stopping:
            self.due.samples()
        if self.due.owes_evaluation() and self._evaluate() == saved:
            self._save(validation)  # It knows of the evaluation now; or the run was stopped after a step not saved yet.

    def _make_up(self) -> None:
        """Do what was due after the step that the run goes on from, if it was stopped or killed before that."""
        start = self.begin
        if start.own:
            self.due.missing_samples()
        if self.due.owes_evaluation() and self._evaluate():
            self._save(start.checkpoint.metric if start.checkpoint is not None and start.own else None)

    def _evaluate(self) -> bool:
        """Evaluate drawn images; a signal stops it, and then the run, which makes up for it when it goes on."""
        if not self.stopping and self.due.evaluate(lambda: self.signals.received is not None):
            return True
        self.stopping = True
        if self.state.step == self.config.training.steps:
            self.journal.note(f"the last step was not evaluated: scalelong evaluate {self.folder.folder}")
        return False

    def train_step(self) -> StepDecision:
        """Forward, backward and, if the guard agrees, an update; the step counts in either case."""
        state, parts = self.state, self.config.training.grad_accumulation
        for group in state.optimizer.param_groups:
            group["lr"] = learning_rate(self.config.optim, state.step)
        self.objective.seed_dropout(state.step, self.accelerator.process_index)
        batch = self.objective.noise(self.batches.at(state.step + state.offset)).split(parts)
        loss = self.passes.backward(batch)
        verdict = self._judge(loss, self._clip(), batch)
        if verdict.ok:
            self.optimizer.step()
            state.ema.update(self.network)
        elif state.scaler is not None:
            state.scaler.update()  # Without an update of the weights: halves a scale that made gradients overflow.
        self.optimizer.zero_grad()
        state.step += 1
        self._note(verdict)
        self.watching.step(state.step)
        if self.accelerator.num_processes == 1:
            self.stopping = self.signals.received is not None
        return verdict

    def _is_saved(self, step: int) -> bool:
        """Whether a checkpoint is due; it waits for a good step, as a rollback must not lead back to a bad one."""
        every = self.config.training.checkpoint_every
        return self.state.guard.consecutive == 0 and step // every > self.saved // every

    def _judge(self, loss: Tensor, grad_norm: Tensor, batch: list[NoisyBatch]) -> StepDecision:
        step, scaler = self.state.step + 1, self.state.scaler
        scale = None if scaler is None else scaler.get_scale
        try:
            return self.state.guard.check(loss, grad_norm, step=step, forwards=self.passes.again(batch), scale=scale)
        except TrainingDiverged as error:
            self.journal.record(step, {"event": "diverged", "message": str(error)})
            raise

    def _clip(self) -> Tensor:
        self.accelerator.unscale_gradients(self.optimizer)
        limit = self.config.optim.clip_norm or math.inf
        return whole(nn.utils.clip_grad_norm_(self.parameters, limit, foreach=True))

    def _agree(self, pair: Tensor) -> Tensor:
        """The mean of loss and gradient norm over the processes, which also settle whether one was told to stop."""
        if self.accelerator.num_processes == 1:
            return pair
        told = self.signals.received is not None
        means = self.accelerator.reduce(torch.cat([pair, pair.new_tensor([float(told)])]), "mean").cpu()
        self.stopping = bool(means[2] > 0)
        return means[:2]

    def _note(self, verdict: StepDecision) -> None:
        """Keep the loss of a step for the log, and log at once what was unusual about it."""
        state = self.state
        spike = state.add_loss(verdict.loss) if verdict.ok else None
        if spike is not None:
            self.journal.record(state.step, {"event": "spike", **asdict(spike)})
        if verdict.action == "overflow":
            self.journal.record(state.step, {"event": "overflow", "scale": state.scaler.get_scale()})
        self.journal.step(state.step, verdict)

    def _roll_back(self) -> None:
        checkpoint = self.store.latest()
        assert checkpoint is not None, "a run has a checkpoint from its first step on"
        bad = self.state.step
        self.state.roll_back(checkpoint)
        self.saved = self.state.step
        self.watching.seek(self.state.step)
        self.due.begin(self.state.step)
        self.journal.record(self.state.step, {"event": "rollback", "from_step": bad})
        self.journal.note(f"went back from step {bad} to the checkpoint of step {checkpoint.step}")

    def _log(self, grad_norm: float) -> None:
        """Log the mean loss since the last time."""
        step, rate = self.state.step, learning_rate(self.config.optim, self.state.step - 1)
        self.journal.log(step, loss=self.state.take_mean_loss(), lr=rate, grad_norm=grad_norm)

    def _save(self, metric: float | None = None) -> None:
        """Write a checkpoint; every process waits for it, so that none is a checkpoint ahead of another."""
        self.saved = self.state.step
        with self.journal.watch.paused(), all_or_none(self.accelerator):
            if not self.is_main and not self.sharded:
                return
            tensors = self.state.tensors(keep=self.is_main)
            if self.is_main:
                size = self.journal.metrics.synced_size()
                windows = self.watching.state_dict()
                self.state.save(self.store, tensors, metrics_size=size, metric=metric, monitor=windows)
