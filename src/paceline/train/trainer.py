"""The Trainer: checks the parts of a training run, then starts or resumes the run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from paceline.checkpoint import Checkpointer
from paceline.checkpoint.signals import Interrupts
from paceline.data import DataLoader
from paceline.ddp import DistributedDataParallel
from paceline.errors import UsageError
from paceline.train import validation
from paceline.train.callbacks import Callback, ExponentialMovingAverage, validate_callbacks
from paceline.train.checkpoints import DataIdentity, Saves, Settings, in_memory, is_restart
from paceline.train.config import TrainConfig
from paceline.train.evaluation import (
    Evaluation,
    PredictStep,
    apply_module,
    predict,
    validate_evaluated,
    validate_evaluation,
    wanted_metrics,
)
from paceline.train.loggers import Logger, validate_loggers
from paceline.train.loop import Loop
from paceline.train.metrics import check_same_data
from paceline.train.run import Result
from paceline.train.schedule import settings_of, validate_schedule
from paceline.train.training_step import Loss

logger = logging.getLogger(__name__)


class Trainer:
    """Trains a model on all ranks. Create and call it in the same way on every rank.

    ::

        loader = DataLoader(data, batch_size=256, shuffle=True)
        trainer = Trainer(model, optimizer, loss, loader, TrainConfig(epochs=3))
        result = trainer.fit()

    The gradient of a step is the gradient of the mean loss over the whole global batch, even for a short last batch or
    a rank without samples.

    With :class:`~paceline.optim.LocalSGD` or :class:`~paceline.optim.DiLoCo`, wrap the model over an island. A batch is
    still split over all ranks, and metrics are means over all ranks. Evaluations use the outer weights of DiLoCo, but
    each island's own weights with LocalSGD. Training ends with ``optimizer.sync()``, before the last save and
    evaluation, so resuming a finished run with more steps gives different results than one longer run.

    Args:
        model: the wrapped model.
        optimizer: an optimizer of the model's parameters.
        loss: ``loss(model, batch)`` returns the summed loss of a micro-batch and the number of samples or tokens in it.
        loader: the training data. A step uses ``accumulate`` of its global batches. A stream needs ``max_steps``.
        config: settings of the training.
        evaluation: runs after every epoch, or every ``evaluate_every`` steps.
        scheduler: a scheduler of ``torch.optim.lr_scheduler``, saved in checkpoints. It steps after every optimizer
            step; a ``ReduceLROnPlateau`` steps after every evaluation, with the metric ``config.monitor``.
            :func:`~paceline.train.lr_factor` provides warm-up and decay for a ``LambdaLR``.
        loggers: receive the metrics on rank 0; see :class:`~paceline.train.Logger`.
        callbacks: called in the given order during the run; see :class:`~paceline.train.Callback`. Checkpoints contain
            their state.
        checkpointer: saves the run and everything else that is registered with it, at the interval ``every``. By
            default it saves at the end of every epoch. It also saves the last step and, with ``keep_best``, every step
            with a new best evaluation. It is closed when the training ends.

    Raises:
        UsageError: if the folder already holds checkpoints and ``resume`` is not set, or if settings are invalid.
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
        # The order matters: each check relies on the earlier ones.
        validation.validate_config(config, loss)
        validation.validate_wrapper(model, "the Trainer")
        validation.validate_training_loader(loader, config)
        validation.validate_optimizer(optimizer, model)
        validation.validate_same_world(model, optimizer, config)
        validate_loggers(loggers)
        validate_callbacks(callbacks)
        validate_schedule(scheduler, optimizer)
        if evaluation is not None:
            validate_evaluation(evaluation, loader)
        validation.validate_checkpointer(checkpointer, config, model)
        keep_best = None if checkpointer is None else checkpointer.keep_best
        wanted = wanted_metrics(config, keep_best, scheduler, callbacks)
        validate_evaluated(config, evaluation, wanted)
        evaluated = [] if evaluation is None else [evaluation.loader]
        validation.validate_virtual_ranks(model, config, [loader, *evaluated])
        check_same_data(loader, model)
        loader.progress.rewind()  # batches that were read before training do not count as consumed
        loop = self._loop = Loop(model, optimizer, loss, loader, config, evaluation, scheduler, callbacks)
        loop.wanted = wanted
        loop.callbacks.check_same_on_all_ranks()
        if loop.outer is not None and any(isinstance(callback, ExponentialMovingAverage) for callback in callbacks):
            raise UsageError(
                f"ExponentialMovingAverage averages weights that differ between islands of {type(optimizer).__name__}; "
                "leave it out"
            )
        # A GradScaler checks for NaN and Inf itself.
        model.check_finite = config.precision != "fp16" and (model.check_finite or config.check_finite)
        self.model, self.optimizer, self.loader, self.scheduler = model, optimizer, loader, scheduler
        self.config, self.result, self._loggers = config, loop.result, loggers
        self._has_begun = self._has_ended = False
        self._save_with(checkpointer)

    def _save_with(self, checkpointer: Checkpointer | None) -> None:
        """Register everything that a resume needs with `checkpointer`, or with a new Checkpointer in memory."""
        loop = self._loop
        if checkpointer is None:
            try:
                loop.checkpointer = in_memory()
                if loop.checkpointer is not None:
                    self._register(loop.checkpointer)
            except UsageError as error:  # an object cannot be saved, and the user did not ask for saves
                loop.checkpointer = None
                logger.info("a failure would cost all steps of this training: %s", error)
            return
        if (steps := checkpointer.steps()) and not (self.config.resume or is_restart()):
            raise UsageError(
                f"the Checkpointer's folder already holds checkpoints up to step {steps[-1]}; resume with resume=True "
                "(--resume), or choose another folder"
            )
        self._register(checkpointer)
        loop.checkpointer = checkpointer
        loop.saves = Saves(checkpointer, loop.model, loop.state)

    def _register(self, checkpointer: Checkpointer) -> None:
        loop, config = self._loop, self.config
        # Learning rates and seed are left out, because the states of the optimizer and the loader contain them.
        facts = {"batch_size": loop.position.batch_size * config.accumulate, **settings_of(loop.scheduler, config)}
        if loop.model.virtual_ranks is not None:
            facts["virtual_ranks"] = loop.model.virtual_ranks
        # Register settings and data first: a restore compares in this order, and they explain a mismatch best.
        checkpointer.register("settings", Settings(config, **facts))
        checkpointer.register("data", DataIdentity(loop.loader.dataset))
        checkpointer.register("model", loop.model)
        checkpointer.register("optimizer", loop.optimizer)
        if loop.scheduler is not None:
            checkpointer.register("scheduler", loop.scheduler)
        checkpointer.register("loader", loop.loader)
        checkpointer.register("run", loop.state)
        if loop.step.scaler is not None:
            checkpointer.register("scaler", loop.step.scaler, per_rank=loop.outer is not None)
        for name, callback in loop.callbacks.stateful().items():
            checkpointer.register(name, callback)
        checkpointer.register("loss_average", loop.average, per_rank=True)
        checkpointer.register("stop_request", loop.run.stops, per_rank=True)
        hook = loop.model.comm_hook_state
        if hasattr(hook, "state_dict") and hasattr(hook, "load_state_dict"):
            checkpointer.register("comm_hook", hook, per_rank=True)  # each rank's residuals

    def fit(self) -> Result:
        """Train for ``epochs`` or ``max_steps``; with ``resume``, continue from the newest checkpoint.

        Callbacks may end the training earlier (:meth:`Run.stop`).

        Ctrl-C ends the training after the step, evaluation batch, restore or save in progress; a second Ctrl-C ends it
        at once. (This applies to a single process; with several processes, the launcher ends the job.) Afterwards, or
        after an error, call ``fit()`` again to continue after the last optimizer step. An evaluation that was due runs
        first. The Checkpointer stays open until the training ends or you close it.

        A checkpoint that cannot be written does not end the training: rank 0 warns, and the next save tries again
        (:attr:`Result.failed_saves`). A job that has written no checkpoint ends with exit code 1.

        Raises:
            NoCheckpoint: if there is no checkpoint to resume from.
            CheckpointMismatch: if the checkpoint has a different model, different data or different settings.
            NonFiniteGradient: if a gradient holds NaN or Inf, and the config or the wrapper checks for it.
            CallbackError: if a callback raises; the message names its class and the rank.
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
        except BaseException:  # release the folder for the next attempt
            checkpointer.close()
            raise
        checkpointer.step()  # before the first optimizer step, so that no later step is lost
        self.result.history = checkpointer.history

    def predict(self, loader: DataLoader, predict_step: PredictStep = apply_module) -> Any:
        """Return the model's output for each sample of `loader`, in the dataset's order. Call this on all ranks.

        The model runs in the config's precision, with the weights that evaluations use. `loader` must not be the
        training loader. See :func:`paceline.train.predict`.
        """
        validation.validate_loader(loader, "predict()")
        if loader.progress is self._loop.position:
            raise UsageError("predict() would change the training's position in its data; give it another DataLoader")
        loop = self._loop
        with loop.step.autocast(), loop.callbacks.evaluating(), loop.shared_weights():
            return predict(loop.model, loader, predict_step)
