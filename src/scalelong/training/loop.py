"""The training loop: everything that happens in a step stands here.

`train(load_recipe("digits"), "runs/digits-cs")`, alone or in every process of `torchrun`.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from signal import SIGTERM

import torch
from torch import nn

from ..config.build import build_model, build_process, conditioning_of, has_channels_last, open_inputs
from ..config.schema import Config
from ..guard.belt import SeatBelt
from ..guard.losses import Restoration, StepDecision, TrainingDiverged, check_finite
from ..monitor import SkipMonitor
from ..runs.checkpoint import Checkpoint
from ..runs.run_dir import ResumePoint, Run, drop_later, environment, find_resume_point, is_finished, last_precision
from ..utils.runtime import whole
from .clip import AdaptiveClip
from .hosts import begin_together
from .logger import Display, RunLogger
from .loss import DiffusionLoss, NoisyBatch, build_validation, find_origin, seed_dropout
from .parallel import Parallel, StopSignals, alone_in, build_optimizer, check_batch_divides, explain_lost_peer, launched
from .samples import evaluate_samples, open_evaluator, save_samples
from .state import EMA, TrainState, learning_rate


@dataclass(frozen=True)
class TrainResult:
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
    config: Config, out: str | Path, resume: str | Path = "auto", *, display: Display | None = None
) -> TrainResult:
    """Train a recipe in a run folder, or resume the run in it; a finished one is left as it is."""
    with launched() as rank, explain_lost_peer(rank):
        run = Run(Path(out))
        config = run.note_network(config)
        start = find_resume_point(run, config, resume) if rank.world == 1 else begin_together(run, config, resume, rank)
        if rank.meet("whether a step is left", "no" * is_finished(config, run, start))[0]:
            return TrainResult(run.folder, start.step, config.training.steps, trained=0)
        parallel = Parallel.open(config.training, rank)
        result = Trainer(config, run, start, parallel, display).train()
        parallel.close()  # Not after an error: others may still wait for this process, and learn of its end.
        return result


class Trainer:
    """One run in one process: `__init__` builds everything, `train` writes to the folder."""

    def __init__(
        self, config: Config, run: Run, start: ResumePoint, parallel: Parallel, display: Display | None = None
    ) -> None:
        self.config, self.run, self.start, self.parallel = config, run, start, parallel
        training, self.device, rank = config.training, parallel.device, parallel.rank
        check_batch_divides(config, rank.world)
        self.logger = RunLogger(run, config, display, is_main=parallel.is_main)
        self.signals = StopSignals(several=rank.world > 1, leave=self.logger.display.leave)

        progress = partial(self.logger.display.show_progress, "images read")
        self.inputs = open_inputs(config, rank=rank.index, world=rank.world, device=self.device, progress=progress)
        self.batches, self.conditioning = self.inputs.batches, conditioning_of(config, self.inputs.empty_text)
        process, channels_last = build_process(config.diffusion), has_channels_last(training, self.device)
        self.loss = DiffusionLoss(
            process, self.conditioning, config.seed, training.batch_size, self.batches.own, channels_last
        )
        self.validation = build_validation(config, self.inputs, rank=rank, device=self.device)
        self.network = parallel.place(build_model(config, fresh=start.checkpoint is None), training)
        self.model = parallel.wrap(self.network, training)
        optimizer = build_optimizer(self.network, config.optim, self.device)
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        ema = EMA(self.network, config.optim.ema_decay, warmup=config.optim.ema_warmup)
        ratio, scaler = config.optim.adaptive_clip, parallel.build_scaler()
        clip = None if ratio is None else AdaptiveClip(ratio, self.parameters)
        self.state = TrainState(self.network, optimizer, ema, scaler, clip)
        if training.seat_belt:
            nothing = self.loss.process.loss_of_nothing()
            also = () if clip is None else (clip,)
            self.state.belt = SeatBelt(self.network, optimizer, ema, nothing=nothing, scaler=scaler, also=also)
        self.origin = ""  # Of the last numbers that were not finite.
        self.monitor = None
        if every := training.monitor_every:
            known = {"sites": config.model.sites, "scaler": scaler, "nothing": process.loss_of_nothing()}
            self.monitor = SkipMonitor(self.model, every=every, probe_every=10 * every, **known)
        self.evaluator = None
        if config.evaluation.every is not None:
            self.evaluator = open_evaluator(config, run, self.inputs, parallel, self.logger.display.show_progress)
        self.store = start.store or run.checkpoints(training.keep_last)
        self.saved = start.step  # The step of the last checkpoint.
        self.stopping = False

    def train(self) -> TrainResult:
        """Train to the end, or until a signal comes; returns how far it came."""
        steps, state = self.config.training.steps, self.state
        # Dropout draws from the global generators, which are the caller's.
        own_random_state = torch.random.fork_rng([self.device] if self.device.type == "cuda" else [])
        with alone_in(self.run, self.start, self.parallel), own_random_state:
            try:
                self.begin()
                first = state.step
                self.logger.start(first)
                with self.signals, self.monitor or nullcontext():
                    self.finish_pending()
                    while state.step < steps and not self.stopping:
                        self.advance()
            except TrainingDiverged as error:
                self.logger.log_end(state.step, error)
                raise
            finally:
                self.logger.stop()
        stopped = self.stopping and state.step < steps
        # Another process may be the one that was asked to stop.
        signal = (self.signals.received or SIGTERM) if stopped else None
        return TrainResult(self.run.folder, state.step, steps, state.step - first, signal)

    def advance(self) -> None:
        """One step, and whatever is due after it."""
        decision = self.train_step()
        restoration = self.check_collapse(decision)
        if restoration is not None:
            self.go_back(restoration)
            return
        config, step = self.config, self.state.step
        last = step == config.training.steps
        if step % config.training.log_every == 0 or last:
            lr = learning_rate(config.optim, step - 1, config.training.steps) * self.state.factor
            self.logger.log(step, loss=self.state.take_mean_loss(), lr=lr, grad_norm=decision.grad_norm)
        validation_loss = self.validate() if (validated := self.is_due(config.training.validate_every)) else None
        self.stopping |= validated and self.parallel.any_rank(self.logger.display.ends)
        # Before what takes long or may fail, so that neither costs the steps since the last checkpoint.
        due = last or self.checkpoint_is_due()
        saved = due or self.stopping
        if due and self.state.belt is not None:
            self.state.belt.rebase()  # The checkpoint is the older snapshot.
        if saved:
            self.save(validation_loss)
        if self.is_due(config.training.sample_every) and not self.stopping:
            self.sample_grid()
        if self.evaluation_is_due() and not self.stopping:
            self.evaluate()
            # A checkpoint that is there learns of the evaluation; a run that was stopped meanwhile needs one.
            if saved != self.stopping:
                self.save(validation_loss)
        if last and self.evaluation_is_due():
            self.logger.info(f"the last step was not evaluated: scalelong evaluate {self.run}")

    def train_step(self) -> StepDecision:
        """Forward, backward and, if loss and gradients are finite, an update; the step counts in either case."""
        config, state, parallel = self.config, self.state, self.parallel
        for group in state.optimizer.param_groups:
            group["lr"] = learning_rate(config.optim, state.step, config.training.steps) * group["lr_factor"]
        seed_dropout(config.seed, state.step, parallel.rank.index)
        batch = self.loss.sample_noise(self.batches.at(state.step + state.batch_offset))
        micro_batches = batch.split(config.training.grad_accumulation)

        losses = []
        for number, micro_batch in enumerate(micro_batches, start=1):
            # Gradients are exchanged between processes with those of the last micro-batch.
            with nullcontext() if number == len(micro_batches) else parallel.no_sync(self.model):
                with parallel.autocast():
                    loss = self.loss(self.model, micro_batch)
                part = loss / len(micro_batches)
                (part if state.scaler is None else state.scaler.scale(part)).backward()
            losses.append(loss.detach())

        if state.scaler is not None:
            state.scaler.unscale_(state.optimizer)
        limit, clip = config.optim.clip_norm or math.inf, state.clip or nn.utils.clip_grad_norm_
        norm = whole(clip(self.parameters, limit, foreach=True))

        # The only exchange besides the gradients, and the only wait for the device: the processes decide alike.
        stop = torch.tensor(float(self.signals.requested()), device=self.device)
        numbers = torch.stack([torch.stack(losses).mean().float(), norm.float(), stop])
        mean_loss, grad_norm, stop_share = parallel.mean(numbers).tolist()
        scale = state.scaler.get_scale() if state.scaler is not None and not math.isfinite(grad_norm) else 1.0
        decision = check_finite(
            mean_loss, grad_norm, skipped=state.skipped, max_skipped=config.training.max_skipped, scale=scale
        )
        if decision.ok:
            self.update_weights()
        elif decision.is_nonfinite:
            self.count_nonfinite(decision, micro_batches)
        if state.scaler is not None:
            state.scaler.update()  # Without an update of the weights: halves a scale that made gradients overflow.
        state.optimizer.zero_grad()
        state.step += 1
        self.logger.log_step(state, decision)
        if self.monitor is not None and self.monitor.step(state.step, mean_loss):
            self.logger.log_reading(state.step, self.monitor)
        # Alone, a signal may still come while the step ends.
        self.stopping = stop_share > 0 if parallel.rank.world > 1 else self.signals.requested()
        return decision

    def update_weights(self) -> None:
        optimizer, scaler = self.state.optimizer, self.state.scaler
        optimizer.step() if scaler is None else scaler.step(optimizer)
        self.state.ema.update(self.network)
        self.state.skipped = 0

    # Before the first step

    def begin(self) -> None:
        """Load the checkpoint to begin at, and write what the run is; a first checkpoint shows that there is room."""
        start, config, run = self.start, self.config, self.run
        if start.checkpoint is not None:
            self.load(start.checkpoint)
        if not start.same_run:
            # Before the recipe, which makes the folder a run: without a checkpoint it would begin with other weights.
            self.save()
        precision = last_precision(run) if start.same_run else None
        if self.parallel.is_main:
            evaluated = self.state.evaluated if start.same_run else 0
            if self.evaluator is not None and (lost := self.evaluator.begin(start.step, evaluated=evaluated)):
                self.logger.info(lost)
            self.logger.mark_damage(start.step, drop_later(run, start, self.store))
            run.begin(config, environment(seed=config.seed, step=start.step, **self.parallel.describe()))
        self.logger.start_trackers()
        self.parallel.rank.meet(f"the beginning of {run}")
        if precision not in (None, self.parallel.precision):
            self.logger.info(f"another precision than before ({precision}): set training.precision to keep one")
        if start.checkpoint is None:
            self.save()
        else:
            self.logger.info(f"resuming from step {start.step} ({start.checkpoint.path})")

    def load(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint."""
        saved = self.state.load(checkpoint, same_run=self.start.same_run)
        if self.monitor is not None:
            self.monitor.load_state_dict(saved["monitor"]) if saved["monitor"] else self.monitor.seek(saved["step"])

    def finish_pending(self) -> None:
        """Do what was due after the step that the run resumes from, if it was stopped or killed before that."""
        start, step = self.start, self.state.step
        grid_is_due = start.same_run and step > 0 and self.is_due(self.config.training.sample_every)
        # The first process alone looks: the others may see its file a moment later.
        is_missing = self.parallel.is_main and not self.run.grid(step).is_file()
        if grid_is_due and self.parallel.any_rank(is_missing):
            self.sample_grid()
        if self.evaluation_is_due() and not self.stopping:
            self.evaluate()
            if not self.stopping:
                self.save(start.checkpoint.metric if start.checkpoint is not None and start.same_run else None)

    # What is due after a step

    def is_due(self, every: int | None) -> bool:
        return every is not None and (self.state.step % every == 0 or self.state.step == self.config.training.steps)

    def checkpoint_is_due(self) -> bool:
        """Whether it is time; a checkpoint waits for a good step, as a rollback must not lead back to a bad one."""
        every = self.config.training.checkpoint_every
        return self.state.skipped == 0 and self.state.step // every > self.saved // every

    def evaluation_is_due(self) -> bool:
        due = self.evaluator is not None and self.is_due(self.config.evaluation.every)
        return due and self.state.step > 0 and self.state.evaluated != self.state.step

    def validate(self) -> float:
        """Log the validation losses of raw and EMA weights; returns the latter, by which checkpoints are the best."""
        step, network, count = self.state.step, self.network, len(self.validation)
        with self.logger.clock.paused(), self.parallel.evaluating():
            raw = self.parallel.sum(self.validation.loss_sum(network)).item() / count
            with self.state.ema.swap(network):
                ema = self.parallel.sum(self.validation.loss_sum(network)).item() / count
        self.logger.record(step, {"validation_loss": raw, "validation_loss_ema": ema})
        self.logger.info(f"step {step}: validation loss {raw:.4f}, EMA weights {ema:.4f}")
        return ema

    def save(self, validation_loss: float | None = None) -> None:
        """Write a checkpoint; every process waits for it, so that none is a checkpoint ahead of another."""
        parallel, state = self.parallel, self.state
        self.saved = state.step
        with self.logger.clock.paused():
            tensors = state.tensors(keep=parallel.is_main) if parallel.is_main or parallel.uses_fsdp else {}
            if parallel.is_main:
                monitor = None if self.monitor is None else self.monitor.state_dict()
                facts = {**state.as_json(), **self.logger.facts(), "monitor": monitor}
                self.store.save(state.step, tensors, facts, validation_loss)
            parallel.rank.meet(f"the checkpoint of step {state.step}")

    def sample_grid(self) -> None:
        """A grid of samples of the EMA weights, always of the same noise."""
        grid = self.run.grid(self.state.step)
        with self.logger.clock.paused(), self.parallel.evaluating(), self.state.ema.swap(self.network):
            save_samples(grid, self.network, self.config, self.inputs, self.parallel)

    def evaluate(self) -> None:
        """Evaluate samples of the last step; a signal stops it, and then the run, which evaluates when it resumes."""
        assert self.evaluator is not None
        what, told = (self.evaluator, self.network, self.config, self.state), (self.signals.requested, self.logger.info)
        with self.logger.clock.paused(), self.parallel.evaluating():
            numbers = evaluate_samples(*what, self.parallel, *told)
        self.stopping = self.stopping or numbers is None
        if numbers is not None:
            self.logger.record(self.state.step, numbers)
            self.state.evaluated = self.state.step

    # When something goes wrong

    def count_nonfinite(self, decision: StepDecision, micro_batches: list[NoisyBatch]) -> None:
        """Count a non-finite step, and say where it began."""
        self.origin = find_origin(self.loss, self.network, micro_batches, self.parallel)
        self.state.skipped += 1
        self.logger.log_skipped(self.state.step + 1, decision, self.origin)

    def check_collapse(self, decision: StepDecision) -> Restoration | None:
        """What the seat belt did about a loss that collapsed, or about too many steps that were not finite."""
        belt, step = self.state.belt, self.state.step
        if decision.action == "rollback":
            why = f"the numbers were still not finite (loss {decision.loss:.4g}: {self.origin})"
            if belt is None or not belt.ring:  # No step was ever good.
                raise TrainingDiverged(f"at step {step} {why}")
            return belt.restore(why, step=step)
        # Steps that were skipped count here, too.
        return belt.step(decision.loss, number=step) if belt is not None and decision.ok else None

    def go_back(self, restoration: Restoration) -> None:
        """Continue after the step that the seat belt went back to, with other batches."""
        self.state.go_back(restoration.back_to)
        self.saved = min(self.saved, self.state.step)
        if self.monitor is not None:
            self.monitor.seek(self.state.step)
        if self.evaluator is not None and self.parallel.is_main:
            self.evaluator.begin(self.state.step)
        self.logger.log_restoration(restoration)
