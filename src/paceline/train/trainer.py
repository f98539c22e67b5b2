"""The trainer: a plain loop over the wrapper, the loader, the checkpointer and the schedule."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from paceline.checkpoint import Checkpointer
from paceline.checkpoint.recovery.interrupts import Interrupts
from paceline.data import DataLoader, GlobalBatchSampler
from paceline.ddp import DistributedDataParallel, accumulate, clip_grad_norm_
from paceline.errors import UsageError
from paceline.train import validation
from paceline.train.config import TrainConfig
from paceline.train.evaluation import Evaluation, evaluate, evaluated, validate_evaluation
from paceline.train.learning_rate import (
    lengths_of,
    own_schedule,
    scaled_lr,
    settings_of,
    steps_of,
    validate_length,
    validate_unscheduled,
)
from paceline.train.metrics.loggers import Loggers, MetricsLogger, open_loggers
from paceline.train.metrics.progress import ProgressDisplay
from paceline.train.metrics.reductions import check_same_data
from paceline.train.metrics.running_means import LossAverage
from paceline.train.result import Result
from paceline.train.resume.checkpoint_folder import go_on, open_folder, open_memory
from paceline.train.resume.run_identity import ChangedDataLoader, DataIdentity, Settings
from paceline.train.validation import shared_out, summed_loss

Loss = Callable[[nn.Module, Any], tuple[Tensor, float]]
"""``loss(model, batch)`` returns the *summed* loss of a micro-batch, and the number of samples or tokens in the sum."""


class Trainer:
    """Trains a model over the ranks of its wrapper. Create and call it in the same way on all ranks.

    ::

        loader = DataLoader(data, batch_size=256, shuffle=True)
        trainer = Trainer(model, optimizer, loss, loader, TrainConfig(epochs=3))
        result = trainer.fit()

    The gradient of a step is that of the mean loss over its whole global batch, also for a short last batch and for a
    rank without samples.

    Args:
        model: the wrapped model.
        optimizer: over the model's parameters; its current learning rates are scaled as the config says.
        loss: gives a micro-batch's summed loss and weight; see :data:`Loss`.
        loader: the training data; its global batch times ``accumulate`` is a step's.
        config: how to train.
        evaluation: run after every epoch.
        scheduler: of the optimizer's learning rates, in place of the config's warm-up, decay and scaling; it is stepped
            after every optimizer step and saved. Without one, and without warm-up and decay, rates are left alone.
        loggers: of your own, beside the config's files; rank 0's are written to.

    Raises:
        UsageError: for a checkpoint folder in use while ``resume`` is off, and other settings that cannot work.
    """

    _stepped: int  # the position in the epoch up to which an optimizer step has used the batches

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        loader: DataLoader,
        config: TrainConfig,
        evaluation: Evaluation | None = None,
        scheduler: LRScheduler | None = None,
        loggers: Sequence[MetricsLogger] = (),
    ) -> None:
        self.model, self.optimizer, self.loss, self.loader, self.loggers = model, optimizer, loss, loader, loggers
        self.config, self.evaluation, self.result = config, evaluation, Result()
        self._refuse_what_cannot_work(scheduler)
        # After every refusal, because from here on the ranks communicate.
        self.optimizer = optimizer = shared_out(optimizer, scheduler, model, config)
        assert isinstance(loader.progress, GlobalBatchSampler)
        check_same_data(loader, model)
        self._sampler = loader.progress
        self._sampler.rewind()  # batches read before training are not consumed
        self._lengths = lengths_of(self._sampler, config.epochs, config.decay)
        self._total_steps = None if self._lengths is None else steps_of(self._lengths, config.accumulate)
        self.batch_size = self._sampler.batch_size * config.accumulate
        self._own_schedule = scheduler is None
        self.scheduler = self._schedule() if scheduler is None else scheduler
        self._lr = float(optimizer.param_groups[0]["lr"])  # of the latest step
        self._average = LossAverage(model)
        self._window: list[tuple[Tensor, float]] = []  # losses and weights since the last step
        self._closed = self._resumed = False
        self._interrupts = Interrupts()  # of the latest fit()
        model.watch(loader.progress)
        model.check_finite = model.check_finite or config.check_finite
        opened = self._checkpointer = self._open_checkpoints()
        self._saver = opened if config.checkpoint_dir else None
        if self._saver is not None:
            self.result.failed_saves = self._saver.due.failed

    def _schedule(self) -> LRScheduler:
        config, optimizer = self.config, self.optimizer
        for group in optimizer.param_groups:
            group["lr"] = scaled_lr(group["lr"], config.lr_scaling, self.batch_size, config.base_batch_size)
        return own_schedule(optimizer, config, self._total_steps)

    def _refuse_what_cannot_work(self, scheduler: LRScheduler | None) -> None:
        validation.validate_config(self.config, self.loss)
        validation.validate_wrapper(self.model, "the Trainer")
        validation.validate_loader(self.loader, "the Trainer")
        validation.validate_optimizer(self.optimizer, self.model)
        validation.check_same_world(self.model)
        validation.validate_loggers(self.loggers)
        if scheduler is None:
            validate_unscheduled(self.optimizer)
        else:
            validation.validate_scheduler(scheduler, self.optimizer, self.config)
        if self.evaluation is not None:
            validate_evaluation(self.evaluation, self.loader)
        if self.config.checkpoint_dir:
            validation.check_shared_buffers(self.model)

    def fit(self) -> Result:
        """Train to the end of the last epoch, from the newest checkpoint if the config says so.

        Ctrl-C ends it after the step, the batch of an evaluation, the restore or the save in progress, a second Ctrl-C
        at once. (This is for one process; the launcher ends several.) After that, or after an error, call it again to
        continue behind the last optimizer step: batches that no step followed are taken again. An evaluation that was
        due, also at the checkpoint that was resumed from, is done first. The Trainer keeps the checkpoint folder until
        training ends, or :meth:`close`.

        A checkpoint that cannot be written does not end the training: rank 0 warns, and the next save tries again
        (:attr:`Result.failed_saves`). A job that has written none ends with exit code 1.

        Raises:
            NoCheckpoint: if there is nothing to resume from.
            CheckpointMismatch: if the checkpoint is of another model, other data or other settings.
            NonFiniteGradient: if a gradient holds NaN or Inf, unless neither the config nor the wrapper checks for it.
            UsageError: if the Trainer was closed before its training ended.
        """
        if self._closed and self._sampler.epoch < self.config.epochs:
            raise UsageError(
                f"this Trainer was closed at step {self.result.steps}; make a new one, with resume=True to go on from "
                "its newest checkpoint"
            )
        with Interrupts() as self._interrupts:
            if self._checkpointer is not None and not self._resumed:
                self._resume(self._checkpointer)
            self._train_and_log()
            if self._saver is not None and not self._closed:
                self._saver.due.finish(self._saver, is_last=True)
            self.close()
        return self.result

    def _resume(self, checkpointer: Checkpointer) -> None:
        try:
            step = go_on(checkpointer, self.config)
        except BaseException:  # the folder must be free for the next attempt
            self.close()
            raise
        if step is not None:
            self.result.steps = self.result.resumed_from_step = step
            self._lr = self._average.lr
        self._resumed, self.result.history = True, checkpointer.history

    def close(self) -> None:
        """Release the checkpoint folder; :meth:`fit` trains no more. Harmless when already closed."""
        self._closed = True
        if self._checkpointer is not None:
            self._checkpointer.close()

    def _train_and_log(self) -> None:
        log = open_loggers(self.config, self.loggers, self.result.steps, self._epoch_is_over)
        on = self.config.show_progress and torch.distributed.get_rank() == 0
        try:
            with ProgressDisplay(self._total_steps, self.result.steps, on=on) as display:
                self._train(log, display)
        finally:
            log.close()

    def _train(self, log: Loggers, display: ProgressDisplay) -> None:
        self.model.train()  # type: ignore[no-untyped-call]
        self.optimizer.zero_grad()
        self.model.zero_grad()  # left by an interrupted window, also in parameters outside the optimizer
        self._sampler.rewind()
        if self._average.line_at < self.result.steps and self._is_line_due:  # the last start ended before it
            self._log_line(log)
        while True:
            self._interrupts.check()
            if self._epoch_is_over:
                self._end_epoch(log, display)
            if self._sampler.epoch >= self.config.epochs:
                break
            validate_length(self._lengths, self._sampler.epoch, self._sampler.length)
            self._train_epoch(log, display)
        if self.evaluation is not None and not self.result.metrics:
            self.result.metrics = evaluate(self.model, self.evaluation, self._interrupts.check)
        self.model.sync_buffers()

    @property
    def _epoch_is_over(self) -> bool:
        """Whether the epoch's last step was taken, here or before a resume, but its evaluation is still due."""
        return bool(self._sampler.position) and self._sampler.position == self._sampler.length

    def _end_epoch(self, log: Loggers, display: ProgressDisplay) -> None:
        if self.evaluation is not None:
            self.result.metrics = evaluate(self.model, self.evaluation, self._interrupts.check)
            log.write(self.result.steps, evaluated(self.result.metrics))
        values = {"train/loss": self._average.epoch(), "lr": self._lr} | evaluated(self.result.metrics)
        display.epoch_ended(self._sampler.epoch, self.config.epochs, values)
        self._sampler.finish()

    def _train_epoch(self, log: Loggers, display: ProgressDisplay) -> None:
        """Take the remaining steps of the epoch, which stays the current one until :meth:`_end_epoch`."""
        start, exposed, before = time.perf_counter(), self.model.exposed_seconds, self._sampler.samples_consumed
        epoch, self._stepped = self._sampler.epoch, self._sampler.position
        if self._stepped == 0:
            self._average.restart()
        batches = accumulate(self.model, self.loader, self.config.accumulate)
        try:
            with closing(batches):  # ends the loader's pass at once, also after a break or an error
                for batch in batches:
                    self._micro_batch(batch)
                    if not self.model.do_sync:
                        continue
                    self._step()
                    display.advance(epoch)
                    if self._is_line_due:
                        self._log_line(log)
                    self._save_if_due()
                    if self.loader.at_last:
                        break  # before the loader ends its pass, which would start the next epoch
                    self._interrupts.check()
        finally:
            self._window.clear()
            if self._sampler.position != self._stepped:  # batches that no step followed come again
                self._sampler.set_position(self._stepped)
            self.result.samples += self._sampler.samples_consumed - before
            self.result.seconds += time.perf_counter() - start
            self.result.exposed_seconds += self.model.exposed_seconds - exposed

    def _micro_batch(self, batch: Any) -> None:
        """Run forward and backward of one micro-batch; this rank may have no sample in it."""
        if batch is None:
            if self.model.do_sync:
                self.model.sync_gradients()
            return
        loss, weight = summed_loss(self.loss(self.model, batch))
        with self.model.weight(weight):
            loss.backward()
        self._window.append((loss.detach(), weight))

    @property
    def _is_line_due(self) -> bool:
        return self.result.steps % self.config.log_every == 0 or self._sampler.position == self._sampler.length

    def _log_line(self, log: Loggers) -> None:
        log.write(self.result.steps, {"train/loss": self._average.line(self.result.steps), "lr": self._lr})

    def _step(self) -> None:
        """Step the optimizer, and mark the end of the step."""
        if self.config.clip_norm is not None:
            clip_grad_norm_(self.model, self.config.clip_norm)
        self._lr = self._average.lr = float(self.optimizer.param_groups[0]["lr"])
        for loss, weight in self._window:  # before the optimizer steps, because a rank's own states are stored there
            self._average.add(loss, weight)
        self._window.clear()
        self.optimizer.step()
        self._stepped = self._sampler.position
        self.result.steps += 1
        self.optimizer.zero_grad()
        self.scheduler.step()
        if self._checkpointer is not None:
            self._checkpointer.step()

    # -- checkpoints --------------------------------------------------------------------------------------------

    def _open_checkpoints(self) -> Checkpointer | None:
        lrs = [float(group.get("initial_lr", group["lr"])) for group in self.optimizer.param_groups]
        schedule = {} if self._own_schedule else {"scheduler": settings_of(self.scheduler)}
        # Settings and data first: a restore compares in this order, and these explain a difference best.
        shared = {
            "settings": Settings(self.config, lr=lrs, batch_size=self.batch_size, seed=self._sampler.seed, **schedule),
            "data": DataIdentity(self.loader.dataset, self.config.allow_changed_data),
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "loader": ChangedDataLoader(self.loader) if self.config.allow_changed_data else self.loader,
        }
        own: dict[str, Any] = {"loss_average": self._average}
        hook = self.model.comm_hook_state
        if hasattr(hook, "state_dict") and hasattr(hook, "load_state_dict"):
            own["comm_hook"] = hook  # each rank's residuals
        return (open_folder if self.config.checkpoint_dir else open_memory)(self.config, shared, own)

    def _save_if_due(self) -> None:
        if self._saver is None:
            return
        self._saver.due.warn_of_failure(self._saver)
        every = self.config.checkpoint_every
        at_end = self.loader.at_last and (every is None or self._is_last_step)
        if at_end or (every is not None and self.result.steps % every == 0):
            self.model.sync_buffers()  # rank 0's buffers are saved, and a resumed run uses them on every rank
            self._saver.due.save(self._saver, self.result.steps, is_last=self._is_last_step)

    @property
    def _is_last_step(self) -> bool:
        return self.loader.at_last and self._sampler.epoch == self.config.epochs - 1
