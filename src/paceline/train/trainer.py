"""The Trainer: checks and puts together what a training consists of, and begins and ends it."""

from __future__ import annotations

import logging
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
from paceline.train.callbacks.registry import validate_callbacks
from paceline.train.config import TrainConfig
from paceline.train.evaluation import Evaluation, validate_evaluated, validate_evaluation, wanted_metrics
from paceline.train.loop import Loop
from paceline.train.metrics.loggers import Logger, validate_loggers
from paceline.train.metrics.reductions import check_same_data
from paceline.train.prediction import PredictStep, apply_module, predict
from paceline.train.resume.data import ChangedDataLoader, DataIdentity
from paceline.train.resume.saves import Saves, in_memory, is_restart
from paceline.train.resume.settings import Settings
from paceline.train.run.result import Result
from paceline.train.schedule import settings_of, validate_schedule
from paceline.train.training_step import Loss

logger = logging.getLogger(__name__)


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
        optimizer: over the model's parameters.
        loss: gives a micro-batch's summed loss and weight; see :data:`Loss`.
        loader: the training data; its global batch times ``accumulate`` is a step's. A stream needs ``max_steps``.
        config: how to train.
        evaluation: run after every epoch, or every ``evaluate_every`` steps.
        scheduler: of the optimizer's learning rates, one of ``torch.optim.lr_scheduler``; it is saved. It is stepped
            after every optimizer step, a ``ReduceLROnPlateau`` after every evaluation, by the metric that the config's
            ``monitor`` names. :func:`~paceline.train.lr_factor` has warm-ups and decays for a ``LambdaLR``.
        loggers: get the metrics on rank 0; see :class:`~paceline.train.Logger`.
        callbacks: objects that are called at the moments of a run, in this order; see
            :class:`~paceline.train.Callback`. Those that have a state are in the checkpoints.
        checkpointer: saves the run, with everything that you have registered with it. It saves as often as its
            ``every`` says, by default at the end of every epoch, at the last step, and, with ``keep_best``, after every
            evaluation that is the best so far. It is closed when the training ends.

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
        loggers: Sequence[Logger] = (),
        callbacks: Sequence[Callback | Any] = (),
        checkpointer: Checkpointer | None = None,
    ) -> None:
        # In this order, because each check takes for granted what those before it have found.
        validation.validate_config(config, loss)
        validation.validate_wrapper(model, "the Trainer")
        validation.validate_training_loader(loader, config)
        validation.validate_optimizer(optimizer, model)
        validation.validate_same_world(model)
        validate_loggers(loggers)
        validate_callbacks(callbacks)
        validate_schedule(scheduler, optimizer)
        if evaluation is not None:
            validate_evaluation(evaluation, loader)
        validation.validate_checkpointer(checkpointer, config, model)
        keep_best = None if checkpointer is None else checkpointer.keep_best
        wanted = wanted_metrics(config, keep_best, scheduler, callbacks)
        validate_evaluated(config, evaluation, wanted)
        # Last, because it changes the model and the loaders, which stay as they were after a refusal.
        evaluated = [] if evaluation is None else [evaluation.loader]
        validation.share_virtual_ranks(config, model, [loader, *evaluated])
        # From here on the ranks communicate.
        check_same_data(loader, model)
        loader.progress.rewind()  # batches read before training are not consumed
        loop = self._loop = Loop(model, optimizer, loss, loader, config, evaluation, scheduler, callbacks)
        loop.wanted = wanted
        loop.callbacks.check_same_on_all_ranks()
        model.watch(loader.progress)
        # A GradScaler looks for NaN and Inf itself.
        model.check_finite = config.precision != "fp16" and (model.check_finite or config.check_finite)
        self.model, self.optimizer, self.loader, self.scheduler = model, optimizer, loader, scheduler
        self.config, self.result, self._loggers = config, loop.result, loggers
        self._has_begun = self._has_ended = False
        self._save_with(checkpointer)

    def _save_with(self, checkpointer: Checkpointer | None) -> None:
        """Register everything that a resume needs with `checkpointer`; without one, with one for rescues in memory."""
        loop = self._loop
        if checkpointer is None:
            try:
                loop.checkpointer = in_memory()
                if loop.checkpointer is not None:
                    self._register(loop.checkpointer)
            except UsageError as error:  # objects that cannot be saved, which nobody asked for
                loop.checkpointer = None
                logger.info("a failure would cost all steps of this training: %s", error)
            return
        if (steps := checkpointer.steps()) and not (self.config.resume or is_restart()):
            raise UsageError(
                f"the Checkpointer's folder already holds checkpoints up to step {steps[-1]}; continue them with "
                "resume=True (--resume), or choose another folder"
            )
        self._register(checkpointer)
        loop.checkpointer = checkpointer
        loop.saves = Saves(checkpointer, loop.model, loop.state)

    def _register(self, checkpointer: Checkpointer) -> None:
        loop, config = self._loop, self.config
        # The rates that were chosen: a schedule has multiplied them by its first factor already.
        lrs = [float(group.get("initial_lr", group["lr"])) for group in loop.optimizer.param_groups]
        facts: dict[str, Any] = {"lr": lrs, "batch_size": loop.position.batch_size * config.accumulate}
        facts |= {"seed": loop.position.seed, **settings_of(loop.scheduler, config)}
        if loop.model.virtual_ranks is not None:  # wherever their number was said
            facts["virtual_ranks"] = loop.model.virtual_ranks
        # Settings and data first: a restore compares in this order, and these explain a difference best.
        checkpointer.register("settings", Settings(config, **facts))
        checkpointer.register("data", DataIdentity(loop.loader.dataset, config.allow_changed_data))
        checkpointer.register("model", loop.model)
        checkpointer.register("optimizer", loop.optimizer)
        if loop.views.are_two:
            checkpointer.register("training_weights", loop.views)
        if loop.scheduler is not None:
            checkpointer.register("scheduler", loop.scheduler)
        loader: Any = ChangedDataLoader(loop.loader) if config.allow_changed_data else loop.loader
        checkpointer.register("loader", loader)
        checkpointer.register("run", loop.state)
        if loop.step.scaler is not None:
            checkpointer.register("scaler", loop.step.scaler)
        for name, callback in loop.callbacks.stateful().items():
            checkpointer.register(name, callback)
        checkpointer.register("loss_average", loop.average, per_rank=True)
        checkpointer.register("stop_request", loop.run.stops, per_rank=True)
        hook = loop.model.comm_hook_state
        if hasattr(hook, "state_dict") and hasattr(hook, "load_state_dict"):
            checkpointer.register("comm_hook", hook, per_rank=True)  # each rank's residuals

    def fit(self) -> Result:
        """Train to the end of the last epoch, or for ``max_steps``, from the newest checkpoint if the config says so.

        Callbacks may end it earlier (:meth:`Run.stop`).

        Ctrl-C ends it after the step, the batch of an evaluation, the restore or the save in progress, a second Ctrl-C
        at once. (This is for one process; the launcher ends several.) After that, or after an error, call it again to
        continue behind the last optimizer step: batches that no step followed are taken again. An evaluation that was
        due, also at the checkpoint that was resumed from, is done first. The Checkpointer stays open until training
        ends, or you close it.

        A checkpoint that cannot be written does not end the training: rank 0 warns, and the next save tries again
        (:attr:`Result.failed_saves`). A job that has written none ends with exit code 1.

        Raises:
            NoCheckpoint: if there is nothing to resume from.
            CheckpointMismatch: if the checkpoint is of another model, other data or other settings.
            NonFiniteGradient: if a gradient holds NaN or Inf, unless neither the config nor the wrapper checks for it.
            CallbackError: if a callback raises; names its class and the rank.
            UsageError: if the Checkpointer was closed before the training ended, or an evaluation lacks a metric that
                the run depends on.
        """
        if self._has_ended:
            return self.result
        with Interrupts() as self._loop.interrupts:
            checkpointer = self._loop.checkpointer
            if checkpointer is not None and not self._has_begun:
                self._resume(checkpointer)
            self._has_begun = True
            self._loop.train(self._loggers)
            self._has_ended = True
            if checkpointer is not None:
                checkpointer.close()
        return self.result

    def _resume(self, checkpointer: Checkpointer) -> None:
        try:
            # A restarted job may have failed before its first checkpoint.
            if checkpointer.steps() if is_restart() else self.config.resume:
                step = checkpointer.restore(allow_changed_settings=self.config.allow_changed_settings)
                self.result.steps = self.result.resumed_from_step = step
        except BaseException:  # the folder must be free for the next attempt
            checkpointer.close()
            raise
        checkpointer.step()  # before the first optimizer step, so that no later step is lost
        self.result.history = checkpointer.history

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
        if loader.progress is self._loop.position:
            raise UsageError("predict() would lose the training's place in its data; give it a DataLoader of its own")
        loop = self._loop
        with loop.views.evaluating(), loop.step.autocast(), loop.callbacks.evaluating():
            return predict(loop.model, loader, predict_step)
