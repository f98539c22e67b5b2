"""The training loop, in order: epochs, steps, lines of metrics, evaluations and saves."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.checkpoint import Checkpointer
from paceline.checkpoint.signals import Interrupts
from paceline.core import consensus
from paceline.core.data_position import Origin, difference
from paceline.core.stacks import warn
from paceline.core.unwrapping import unwrap
from paceline.data import DataLoader, GlobalBatchStream
from paceline.ddp import DistributedDataParallel, accumulate
from paceline.errors import DesyncError
from paceline.optim.local_sgd import DiLoCo, IslandOptimizer
from paceline.train.callbacks import Callbacks
from paceline.train.checkpoints import Saves
from paceline.train.config import TrainConfig
from paceline.train.evaluation import Evaluation, evaluate, evaluated, validate_metrics
from paceline.train.loggers import Logger, Loggers, ProgressDisplay
from paceline.train.metrics import LossAverage, ranks_of
from paceline.train.run import Run, RunState
from paceline.train.training_step import Loss, TrainingStep


class Loop:
    """Runs the steps of a training run. Every rank makes the same decisions.

    Decisions depend only on the configuration, on the position in the data (compared between ranks in every step), and
    on metrics that are reduced over the ranks. Ranks agree on stop requests; see ``train/run.py``. Islands compare
    positions and agree on stop requests only after outer steps.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        loader: DataLoader,
        config: TrainConfig,
        evaluation: Evaluation | None,
        scheduler: LRScheduler | None,
        callbacks: Sequence[Any],
    ) -> None:
        self.model, self.optimizer, self.scheduler, self.loader = model, optimizer, scheduler, loader
        self.config, self.evaluation, self.position = config, evaluation, loader.progress
        self.outer = optimizer if isinstance(optimizer, IslandOptimizer) else None
        """The optimizer if it is a LocalSGD or DiLoCo, or else None."""
        self.average = LossAverage(model, ranks_of(loader, model))
        self.step = TrainingStep(model, optimizer, loss, config, self.average, loader.progress.batch_size)
        self.state = RunState(may_continue=config.allow_changed_settings)
        self.result = self.state.result
        self.run = Run(model, optimizer, self.position, asdict(config), self.state)
        self.callbacks = Callbacks(callbacks, self.run)
        self.wanted: Mapping[str, str] = {}
        """The evaluation metrics that the run depends on; each key describes the setting that names the metric."""
        self.checkpointer: Checkpointer | None = None
        """Marks the end of every step."""
        self.saves: Saves | None = None
        """Writes checkpoints; None if the user gave no Checkpointer."""
        self.interrupts = Interrupts()
        """Defers Ctrl-C during the latest fit()."""
        self._is_save_due = False
        """Whether the Checkpointer's interval ends with the current step."""
        self._stepped = 0
        """The position in the epoch after the last optimizer step."""
        self._counted = 0
        """Number of samples of the epoch that the result already includes."""
        self._skipped = 0
        """Number of steps that a GradScaler skipped, since this process started."""
        self._clock = 0.0
        """Start of the training time that is not yet in the result."""

    def train(self, loggers: Sequence[Logger]) -> None:
        """Train from the current position to the end."""
        self.run.is_evaluation_due = self._is_evaluation_due
        log = Loggers(loggers)
        log.open(self.run)
        on = torch.distributed.get_rank() == 0
        try:
            self.model.train()  # type: ignore[no-untyped-call]  # before the callbacks, which may put parts into eval mode
            self.state.is_stopped |= self.callbacks.meet("on_start")
            with ProgressDisplay(self._total_steps, self.result.steps, on=on) as display:
                self._train(log, display)
        finally:
            log.close()
        if self.saves is not None:
            weights = ["model", *self.callbacks.with_weights()]
            self.saves.finish(weights if self.config.load_best_at_end else [])
        taken = self.result.steps - (self.result.resumed_from_step or 0)
        if on and self._skipped > taken:
            warn(
                f"{self._skipped} of {self._skipped + taken} steps were skipped, because the gradient of the scaled "
                'loss had NaN or Inf; each skipped step halves the scale, so train longer, or use precision="bf16"'
            )
        self.callbacks.meet("on_end")

    def _train(self, log: Loggers, display: ProgressDisplay) -> None:
        if not unwrap(self.model).training:  # a callback left the model in eval mode
            self.model.train()  # type: ignore[no-untyped-call]
        self.optimizer.zero_grad()
        self.model.zero_grad()  # also clears gradients outside the optimizer, from an interrupted window
        self.position.rewind()
        self._clock = time.perf_counter()
        history = self.result.history
        if history is not None and history.rescued_from == "memory":
            self._after_step(log, display)  # the failure may have prevented the line, save and evaluation of this step
        else:
            if self._is_line_due:
                self._log_line(log)
            self._evaluate_if_due(log, display)
        while True:
            self.interrupts.check()
            if self._epoch_is_over:
                self._end_epoch(display)
            if self._is_over:
                break
            self._train_epoch(log, display)
        # A loss or a callback may have changed buffers since the last backward pass.
        self.model.sync_buffers()
        self._unite_islands()

    def _train_epoch(self, log: Loggers, display: ProgressDisplay) -> None:
        """Train on the rest of the epoch, or up to the last step."""
        self._clock, exposed = time.perf_counter(), self._exposed_seconds
        self._stepped, self._counted = self.position.position, self.position.samples_consumed
        if self._stepped == 0:
            self.average.restart()
        batches = accumulate(self.model, self.loader, None if self.model.virtual_ranks else self.config.accumulate)
        try:
            with closing(batches):  # after a break or an error, ends the pass over the loader at once
                for batch in batches:
                    self.step.micro_batch(batch, is_empty=self.loader.slice_is_empty)
                    if not self.model.do_sync:
                        continue
                    if self._finish_step():
                        display.advance(self.position.epoch)
                        self._after_step(log, display)
                    elif self._epoch_is_over:  # the GradScaler skipped the epoch's last step
                        self._after_step(log, display)
                    if self.loader.at_last or self._is_over:
                        break  # before the loader finishes its pass and starts the next epoch
                    self.interrupts.check()
        finally:
            self.step.drop()
            if self.position.position != self._stepped:  # repeat batches that did not end in a step
                self.position.set_position(self._stepped)
            self._count_time()
            self.result.exposed_seconds += self._exposed_seconds - exposed

    def _finish_step(self) -> bool:
        """Step the optimizer and mark the end of the step; return False if a GradScaler skipped the step."""
        rates = tuple(float(group["lr"]) for group in self.optimizer.param_groups)
        self.average.lr = rates[0]  # before optimizer.step(), which stores per-rank state for rescues
        is_step = self.step.finish()
        self._stepped, consumed = self.position.position, self.position.samples_consumed
        self.result.samples += consumed - self._counted
        self._counted = consumed
        self.result.weight += self.model.total_weight
        self._count_time()
        if not is_step:
            self._skipped += 1
            return False
        self.result.steps += 1
        self.result.learning_rates = rates
        if self.scheduler is not None and not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()
        self.state.is_stopped |= self.model.stop_agreed if self.outer is None else self._stops_at_exchange(self.outer)
        self._unite_islands()
        # Call these before marking the end of the step, so that a rescued step includes their state; see decision 0053.
        self.run.is_evaluation_due = self._is_evaluation_due
        self.callbacks.on_step()
        if self.checkpointer is not None:
            self._is_save_due = self.checkpointer.mark_step()
        return True

    def _stops_at_exchange(self, outer: IslandOptimizer) -> bool:
        """After an outer step, compare positions in the data and return whether any rank has asked to stop."""
        if outer.is_apart:
            return False
        reports = consensus.gather(consensus.here(), [self.run.stops.is_asked, *self.position.origin()])
        if message := difference({rank: Origin(*report[1:]) for rank, report in enumerate(reports)}):
            raise DesyncError(message)
        return any(report[0] for report in reports)

    def _unite_islands(self) -> None:
        """Average islands at the end of training, so that all ranks evaluate and save the same weights."""
        if self.outer is not None and (self._is_last_step or self._is_over):
            self.outer.sync()

    def shared_weights(self) -> AbstractContextManager[None]:
        """Use the weights that all islands share inside the block, if the optimizer keeps any."""
        return self.outer.outer_weights() if isinstance(self.outer, DiLoCo) else nullcontext()

    def _after_step(self, log: Loggers, display: ProgressDisplay) -> None:
        """Write a line of metrics, save a checkpoint and evaluate, whichever is due."""
        if self._is_line_due:
            self._log_line(log)
        is_due = False
        if (saves := self.saves) is not None and self.checkpointer is not None:
            is_due = self._is_last_step or (
                self._epoch_is_over if self.checkpointer.every is None else self._is_save_due
            )
            # Save before the evaluation, because it may fail. With keep_best, save after it, because its result counts.
            if is_due and not (saves.keeps_best and self._is_evaluation_due):
                self._save(saves)
        self._evaluate_if_due(log, display, is_save_due=is_due)

    def _end_epoch(self, display: ProgressDisplay) -> None:
        values = {"train/loss": self.average.epoch(), "lr": self.average.lr, **evaluated(self.result.metrics)}
        display.epoch_ended(self.position.epoch, self.config.epochs, values)
        self.position.finish()

    def _count_time(self) -> None:
        now = time.perf_counter()
        self.result.seconds += now - self._clock
        self._clock = now

    @property
    def _exposed_seconds(self) -> float:
        return self.model.exposed_seconds + (0.0 if self.outer is None else self.outer.islands.exposed_seconds)

    # -- decisions ------------------------------------------------------------------------------------------------

    @property
    def _total_steps(self) -> int | None:
        """Total number of training steps, if known."""
        config, position = self.config, self.position
        if config.epochs is None or isinstance(position, GlobalBatchStream) or position.varies:
            return config.max_steps
        return config.epochs * -(-position.length // config.accumulate)  # the epoch's last window may be short

    @property
    def _epoch_is_over(self) -> bool:
        """Whether the epoch's last step has been taken and the next epoch has not begun."""
        return bool(self.position.position) and self.position.position == self.position.length

    @property
    def _is_over(self) -> bool:
        """Whether the training is complete."""
        epochs = self.config.epochs
        return self._has_enough_steps or (epochs is not None and self.position.epoch >= epochs)

    @property
    def _is_last_step(self) -> bool:
        """Whether the latest step is the last step of the training."""
        epochs = self.config.epochs
        is_last_epoch = epochs is not None and self.position.epoch == epochs - 1
        return self._has_enough_steps or (self._epoch_is_over and is_last_epoch)

    @property
    def _has_enough_steps(self) -> bool:
        max_steps = self.config.max_steps
        return self.state.is_stopped or (max_steps is not None and self.result.steps >= max_steps)

    @property
    def _is_line_due(self) -> bool:
        """Whether a line of metrics for the current step still has to be written."""
        steps = self.result.steps
        if self.average.line_at >= steps:
            return False
        # Not due at a last step caused by a stop request, because the request may arrive after this decision.
        return steps % self.config.log_every == 0 or steps == self.config.max_steps or self._epoch_is_over

    @property
    def _is_evaluation_due(self) -> bool:
        """Whether the current step still has to be evaluated."""
        steps, every = self.result.steps, self.config.evaluate_every
        if self.evaluation is None or self.state.evaluated_at == steps:
            return False
        return self._is_last_step or (self._epoch_is_over if every is None else steps > 0 and steps % every == 0)

    # -- lines, evaluations, saves --------------------------------------------------------------------------------

    def _log_line(self, log: Loggers) -> None:
        values = {"train/loss": self.average.line(self.result.steps), "lr": self.average.lr}
        log.write(self.result.steps, self.state.line(values))

    def _evaluate_if_due(self, log: Loggers, display: ProgressDisplay, *, is_save_due: bool = False) -> None:
        if self.evaluation is not None and self._is_evaluation_due:
            self._evaluate(self.evaluation, log, display, is_save_due)

    def _evaluate(self, evaluation: Evaluation, log: Loggers, display: ProgressDisplay, is_save_due: bool) -> None:
        """Evaluate, and pass the result to the scheduler, the callbacks, the loggers and the saves."""

        def interruptible_sums(module: torch.nn.Module, batch: Any) -> Any:
            sums = evaluation.sums(module, batch)
            self.interrupts.check()
            return sums

        self._count_time()
        self._unite_islands()
        with self.step.autocast(), self.callbacks.evaluating(), self.shared_weights():
            metrics = evaluate(self.model, replace(evaluation, sums=interruptible_sums))
        self._clock = time.perf_counter()
        # Checked here because the names that derive() returns are unknown before the first evaluation.
        validate_metrics(self.wanted, metrics)
        self.state.evaluated(metrics)
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(metrics[self.config.monitor])
        stops = self.callbacks.meet("on_evaluation") and not self.state.is_stopped
        self.state.is_stopped |= stops
        log.write(self.result.steps, self.state.line(evaluated(metrics)))
        if self.config.evaluate_every is not None:
            display.evaluated(self.result.steps, evaluated(metrics))
        if self.saves is None:
            return
        if self.saves.keeps_best:
            is_save_due = self.saves.is_best() or is_save_due
        if stops or (self.saves.keeps_best and is_save_due):
            self._save(self.saves)

    def _save(self, saves: Saves) -> None:
        """Save the current step, and call the callbacks."""
        self._unite_islands()
        saves.save(is_last=self._is_last_step)
        if self.callbacks.meet("on_save") and not self.state.is_stopped:
            self.state.is_stopped = True
            self._unite_islands()
            saves.save(is_last=True)  # again, because the run now ends at this step
