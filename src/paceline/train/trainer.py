"""The Trainer: checks and puts together what a training consists of, and begins and ends it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from paceline.checkpoint import Checkpointer
from paceline.checkpoint.recovery.interrupts import Interrupts
from paceline.data import DataLoader
from paceline.ddp import DistributedDataParallel
from paceline.errors import UsageError
from paceline.train import validation
from paceline.train.callbacks.protocol import Callback
from paceline.train.callbacks.registry import Callbacks, validate_callbacks
from paceline.train.callbacks.run import Run
from paceline.train.callbacks.stop_request import StopRequest
from paceline.train.config import TrainConfig
from paceline.train.evaluation import Evaluation, validate_evaluation
from paceline.train.learning_rate import (
    lengths_of,
    own_schedule,
    scaled_lr,
    settings_of,
    steps_of,
    validate_unscheduled,
)
from paceline.train.loop import Loop
from paceline.train.metrics.loggers import MetricsLogger, open_loggers
from paceline.train.metrics.progress import ProgressDisplay
from paceline.train.metrics.reductions import check_same_data
from paceline.train.metrics.running_means import LossAverage
from paceline.train.prediction import PredictStep, apply_module, predict
from paceline.train.result import Result
from paceline.train.resume.checkpoint_folder import go_on, open_folder, open_memory, validate_stateful
from paceline.train.resume.run_identity import ChangedDataLoader, DataIdentity, Settings
from paceline.train.resume.run_state import RunState
from paceline.train.resume.saves import Saves
from paceline.train.training_step import Loss, TrainingStep
from paceline.train.validation import shared_out


class Trainer(Loop):
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
        loader: the training data; its global batch times ``accumulate`` is a step's. A stream needs ``max_steps``.
        config: how to train.
        evaluation: run after every epoch, or every ``evaluate_every`` steps.
        scheduler: of the optimizer's learning rates, in place of the config's warm-up, decay and scaling; it is saved.
            It is stepped after every optimizer step, a ``ReduceLROnPlateau`` after every evaluation, by the metric that
            the config's ``monitor`` names. Without one, and without warm-up and decay, rates are left alone.
        loggers: of your own, beside the config's files; rank 0's are written to.
        callbacks: objects that are called at the moments of a run, in this order; see
            :class:`~paceline.train.callbacks.Callback`. Those that have a state are in the checkpoints.

    Raises:
        UsageError: for a checkpoint folder in use while ``resume`` is off, and other settings that cannot work.
    """

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
        callbacks: Sequence[Callback | Any] = (),
    ) -> None:
        self.model, self.optimizer, self.loss, self.loader, self.loggers = model, optimizer, loss, loader, loggers
        self.config, self.evaluation, self.result = config, evaluation, Result()
        self._refuse_what_cannot_work(scheduler, callbacks)
        # After every refusal, because from here on the ranks communicate.
        self.optimizer = optimizer = shared_out(optimizer, scheduler, model, config)
        check_same_data(loader, model)
        self._sampler = loader.progress
        self._sampler.rewind()  # batches read before training are not consumed
        self._lengths = lengths_of(self._sampler, config)
        of_lengths = None if self._lengths is None else steps_of(self._lengths, config.accumulate)
        self._total_steps = config.max_steps or of_lengths
        self.batch_size = self._sampler.batch_size * config.accumulate
        self._own_schedule = scheduler is None
        self.scheduler = self._schedule() if scheduler is None else scheduler
        self._average, self._state = LossAverage(model), RunState(config, self.result)
        self._step = TrainingStep(model, optimizer, loss, config, self._average)
        stops = self._stops = StopRequest(model, self._state)
        # Weakly, because a Trainer that nobody refers to must release its checkpoint folder at once.
        is_line_due = weakref.WeakMethod(self._is_line_due)
        self.run = Run(model, optimizer, self._sampler, self.result, self._state, stops, is_line_due)
        self._callbacks = Callbacks(callbacks, self.run, stops)
        self._callbacks.check_same_on_all_ranks()
        self._closed = self._has_begun = False
        self._interrupts = Interrupts()  # of the latest fit()
        model.watch(self._sampler)
        # A GradScaler looks for NaN and Inf itself.
        model.check_finite = config.precision != "fp16" and (model.check_finite or config.check_finite)
        opened = self._checkpointer = self._open_checkpoints()
        has_folder = opened is not None and config.checkpoint_dir is not None
        self._saves = Saves(opened, model, config, self._state, self.result) if opened and has_folder else None

    def _schedule(self) -> LRScheduler:
        config, optimizer = self.config, self.optimizer
        for group in optimizer.param_groups:
            group["lr"] = scaled_lr(group["lr"], config.lr_scaling, self.batch_size, config.base_batch_size)
        return own_schedule(optimizer, config, self._total_steps)

    def _refuse_what_cannot_work(self, scheduler: LRScheduler | None, callbacks: Sequence[Any]) -> None:
        # In this order, because each takes for granted what those before it have found.
        validation.validate_config(self.config, self.loss)
        validation.validate_wrapper(self.model, "the Trainer")
        validation.validate_training_loader(self.loader, self.config)
        validation.validate_optimizer(self.optimizer, self.model)
        validation.check_same_world(self.model)
        validation.validate_loggers(self.loggers)
        validate_callbacks(callbacks)
        if scheduler is None:
            validate_unscheduled(self.optimizer)
        else:
            validation.validate_scheduler(scheduler, self.optimizer, self.config)
        if self.evaluation is not None:
            validate_evaluation(self.evaluation, self.loader)
        self._wanted = validation.wanted_metrics(self.config, scheduler, callbacks)
        validation.validate_evaluated(self.config, self.evaluation, self._wanted)
        if self.config.checkpoint_dir:
            validation.check_shared_buffers(self.model)
        evaluated = [] if self.evaluation is None else [self.evaluation.loader]
        # Last, because it changes the model and the loaders, which stay as they were after a refusal.
        validation.share_virtual_ranks(self.config, self.model, [self.loader, *evaluated])

    def fit(self) -> Result:
        """Train to the end of the last epoch, or for ``max_steps``, from the newest checkpoint if the config says so.

        Callbacks may end it earlier (:meth:`Run.stop`).

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
            CallbackError: if a callback raises; names its class and the rank.
            UsageError: if the Trainer was closed before its training ended, or an evaluation lacks a metric that the
                run depends on.
        """
        if self._closed and not self._is_over:
            raise UsageError(
                f"this Trainer was closed at step {self.result.steps}; make a new one, with resume=True to go on from "
                "its newest checkpoint"
            )
        with Interrupts() as self._interrupts:
            if self._checkpointer is not None and not self._has_begun:
                self._resume(self._checkpointer)
            self._has_begun = True
            if not self._closed:
                self._train_and_log()
                self._end()
            self.close()
        return self.result

    def predict(self, loader: DataLoader, predict_step: PredictStep = apply_module) -> Any:
        """Return the model's output for each sample of `loader`, in the data set's order; see :func:`predict`.

        Call it on all ranks; the rows are the same on all of them, whatever their number. It runs in the config's
        precision, and with the weights that evaluations use.

        Args:
            loader: another one than the training's.
            predict_step: ``predict_step(module, batch)`` returns a row for each sample of the batch. By default the
                module is called with the batch, or with its first item if it is a tuple or list.

        Raises:
            UsageError: for another loader, or rows that are not one for each sample.
        """
        validation.validate_loader(loader, "predict()")
        if loader.progress is self._sampler:
            raise UsageError("predict() would lose the training's place in its data; give it a DataLoader of its own")
        with self._step.autocast(), self._callbacks.evaluating():
            return predict(self.model, loader, predict_step)

    def register(self, name: str, stateful: Any, per_rank: bool = False) -> Any:
        """Save `stateful` as `name` in the run's checkpoints, and restore it on a resume; return it.

        Args:
            name: lower-case letters, digits and underscores.
            stateful: anything with ``state_dict`` and ``load_state_dict``.
            per_rank: whether each rank has a state of its own; otherwise rank 0's is saved for all.

        Raises:
            UsageError: for a name that is taken, an object without these methods, or after fit() has begun.
        """
        if self._has_begun:
            raise UsageError(f"{name!r} is registered after fit() has begun, too late to be restored; register before")
        if self._checkpointer is not None:
            self._checkpointer.register(name, stateful, per_rank)
        else:
            validate_stateful(name, stateful, per_rank)
        return stateful

    def close(self) -> None:
        """Release the checkpoint folder; :meth:`fit` trains no more. Harmless when already closed."""
        self._closed = True
        if self._checkpointer is not None:
            self._checkpointer.close()

    def _resume(self, checkpointer: Checkpointer) -> None:
        try:
            step = go_on(checkpointer, self.config)
        except BaseException:  # the folder must be free for the next attempt
            self.close()
            raise
        if step is not None:
            self.result.steps = self.result.resumed_from_step = step
        self.result.history = checkpointer.history

    def _train_and_log(self) -> None:
        log = open_loggers(self.config, self.loggers, self.result.steps, self._is_evaluation_due)
        on = self.config.show_progress and torch.distributed.get_rank() == 0
        try:
            self.model.train()  # type: ignore[no-untyped-call]  # before callbacks, which may freeze parts of it
            self._state.is_stopped |= self._callbacks.meet("on_start")
            with ProgressDisplay(self._total_steps, self.result.steps, on=on) as display:
                self._train(log, display)
        finally:
            log.close()

    def _end(self) -> None:
        """Finish the last save, choose the best checkpoint, and call callbacks."""
        if self._saves is not None:
            self._saves.finish()
            if self.config.keep_best:
                self._saves.find_best(["model", *self._callbacks.with_weights()])
        self._callbacks.meet("on_end")

    def _open_checkpoints(self) -> Checkpointer | None:
        # The rates that were chosen: a schedule has multiplied them by its first factor already.
        lrs = [float(group.get("initial_lr", group["lr"])) for group in self.optimizer.param_groups]
        schedule = {} if self._own_schedule else {"scheduler": settings_of(self.scheduler, self.config)}
        # Wherever their number was said; without them as in checkpoints of versions that had none.
        slices = {} if (count := self.model.virtual_ranks) is None else {"virtual_ranks": count}
        # Settings and data first: a restore compares in this order, and these explain a difference best.
        shared = {
            "settings": Settings(
                self.config, lr=lrs, batch_size=self.batch_size, seed=self._sampler.seed, **schedule, **slices
            ),
            "data": DataIdentity(self.loader.dataset, self.config.allow_changed_data),
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "loader": ChangedDataLoader(self.loader) if self.config.allow_changed_data else self.loader,
            "run": self._state,
            **({} if self._step.scaler is None else {"scaler": self._step.scaler}),
            **self._callbacks.stateful(),
        }
        own: dict[str, Any] = {"loss_average": self._average, "stop_request": self._stops}
        hook = self.model.comm_hook_state
        if hasattr(hook, "state_dict") and hasattr(hook, "load_state_dict"):
            own["comm_hook"] = hook  # each rank's residuals
        return (open_folder if self.config.checkpoint_dir else open_memory)(self.config, shared, own)
