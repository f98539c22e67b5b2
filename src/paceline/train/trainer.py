"""The trainer: a plain loop over the wrapper, the loader, the checkpointer and the schedule."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from paceline.checkpoint import Checkpointer, exchange
from paceline.data import DataLoader, GlobalBatchSampler
from paceline.ddp import DistributedDataParallel, accumulate, clip_grad_norm_
from paceline.errors import CheckpointError, CheckpointWarning, NoCheckpoint, UsageError
from paceline.modules import unwrap
from paceline.train.agreement import expect_same_data
from paceline.train.averages import LossAverage
from paceline.train.config import TrainConfig
from paceline.train.evaluation import Evaluation, evaluate
from paceline.train.identity import DataIdentity, Settings
from paceline.train.reporting import MetricsLog, ProgressDisplay
from paceline.train.schedule import lr_factor, scaled_lr

Loss = Callable[[nn.Module, Any], tuple[Tensor, float]]
"""``loss(model, batch)``: the *summed* loss of a micro-batch, and what it sums over: samples, or tokens."""


@dataclass
class Result:
    """What a run came to."""

    steps: int = 0
    """Optimizer steps since the very beginning, those before a resume included."""
    resumed_from_step: int | None = None
    seconds: float = 0.0
    """Time spent training in this process: forward, backward, optimizer, data and checkpoints, not evaluation."""
    samples: int = 0
    """Samples that all ranks trained on in this process."""
    exposed_seconds: float = 0.0
    """Of ``seconds``, time this rank waited for communication at the end of backwards."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The last evaluation."""
    failed_saves: list[int] = field(default_factory=list)
    """Steps whose checkpoint could not be written, by a full disk, say; every rank has warned of each."""

    @property
    def samples_per_second(self) -> float:
        """Samples per second, over all ranks."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def exposed_share(self) -> float:
        """Share of the training time spent waiting for communication, 0..1."""
        return self.exposed_seconds / self.seconds if self.seconds else 0.0


class Trainer:
    """Trains a model over the ranks of its wrapper. Made and called on all of them alike.

    ::

        trainer = Trainer(model, optimizer, loss, DataLoader(data, batch_size=256, shuffle=True), TrainConfig(epochs=3))
        result = trainer.fit()

    The gradient of a step is that of the mean loss over its whole global batch, also for a short last batch and for a
    rank without samples.

    Args:
        model: the wrapped model.
        optimizer: over the model's parameters; its learning rates are scaled as the config says.
        loss: gives a micro-batch's summed loss and weight; see :data:`Loss`.
        loader: the training data; its global batch times ``accumulate`` is a step's.
        config: how to train.
        evaluation: run after every epoch.

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
    ) -> None:
        self.model, self.optimizer, self.loss, self.loader = model, optimizer, loss, loader
        self.config, self.evaluation = config, evaluation
        self.result = Result()
        if not isinstance(loader.progress, GlobalBatchSampler):
            raise UsageError("the Trainer needs data of a known length; write a plain loop for a stream")
        self._refuse_what_cannot_work()
        expect_same_data(loader, model)
        loader.progress.rewind()  # looking at a batch before is no training
        self._dataset_size = loader.progress.size
        self._steps_per_epoch = -(-len(loader) // config.accumulate)
        self.batch_size = loader.progress.batch_size * config.accumulate
        for group in optimizer.param_groups:
            group["lr"] = scaled_lr(group["lr"], config.lr_scaling, self.batch_size, config.base_batch_size)
        total = self._steps_per_epoch * config.epochs
        factor = partial(lr_factor, warmup_steps=config.warmup_steps, decay=config.decay, total_steps=total)
        self.scheduler = LambdaLR(optimizer, factor)
        self._average = LossAverage(model)
        model.watch(loader.progress)
        model.check_finite = model.check_finite or config.check_finite
        self._checkpointer = self._open_checkpoints() if config.checkpoint_dir else None

    def _refuse_what_cannot_work(self) -> None:
        size = torch.distributed.get_world_size(self.model.process_group)
        if size != (world_size := torch.distributed.get_world_size()):
            raise UsageError(
                f"the model averages over {size} ranks but the world has {world_size}, over all of which the Trainer "
                "splits the data and writes checkpoints; wrap the model without process_group, or write a plain loop"
            )
        if self.evaluation is not None and self.evaluation.loader.progress is self.loader.progress:
            raise UsageError(
                "training and evaluation share one loader or sampler, and an evaluation starts its loader anew, so "
                "training would never end; give Evaluation a DataLoader of its own"
            )
        buffers = unwrap(self.model).state_dict().keys() & dict(unwrap(self.model).named_buffers()).keys()
        if self.config.checkpoint_dir and size > 1 and buffers and not self.model.forward_sync_buffers:
            raise UsageError(
                f"with broadcast_buffers=False every rank has buffers of its own ({min(buffers)!r}, say), but a "
                "checkpoint holds rank 0's; leave it out, or checkpoint_dir"
            )

    def fit(self) -> Result:
        """Train to the end of the last epoch, from the newest checkpoint if the config says so.

        A checkpoint that cannot be written does not end the training: every rank warns, and the next save tries
        again (:attr:`Result.failed_saves`).

        Raises:
            NoCheckpoint: if there is nothing to resume from.
            CheckpointMismatch: if the checkpoint is of another model, other data or other settings.
            NonFiniteGradient: if a gradient holds NaN or Inf, unless neither the config nor the wrapper checks for it.
        """
        try:
            if self.config.resume and self._checkpointer is not None:
                step = self._checkpointer.restore(allow_changed_settings=self.config.allow_changed_settings)
                self.result.steps = self.result.resumed_from_step = step
            self._train_and_log()
        finally:
            if self._checkpointer is not None:
                self._checkpointer.close()
        return self.result

    def _train_and_log(self) -> None:
        rank, config = torch.distributed.get_rank(), self.config
        log = self._open_log(rank)
        total = self._steps_per_epoch * config.epochs
        try:
            with ProgressDisplay(total, self.result.steps, on=rank == 0 and config.show_progress) as display:
                self._train(log, display)
        finally:
            log.close()

    def _open_log(self, rank: int) -> MetricsLog:
        """The log; if rank 0 cannot write its files, every rank raises."""
        config, failure, log = self.config, None, MetricsLog(None, None, step=self.result.steps)
        if rank == 0:
            try:
                log = MetricsLog(config.metrics_file, config.tensorboard_dir, step=self.result.steps)
            except UsageError as error:
                failure = error
        exchange.agree(exchange.here(), failure)
        return log

    def _train(self, log: MetricsLog, display: ProgressDisplay) -> None:
        self.model.train()  # type: ignore[no-untyped-call]
        self.optimizer.zero_grad()
        sampler = self.loader.progress
        sampler.rewind()
        if sampler.position == len(self.loader):
            sampler.finish()  # the checkpoint was written after an epoch's last step
        while sampler.epoch < self.config.epochs:
            epoch = sampler.epoch
            values = self._train_epoch(log, display)
            if self.evaluation is not None:
                self.result.metrics = evaluate(self.model, self.evaluation)
                log.write(self.result.steps, self.result.metrics)
            display.epoch_ended(epoch, self.config.epochs, values | self.result.metrics)
        if self.evaluation is not None and not self.result.metrics:
            self.result.metrics = evaluate(self.model, self.evaluation)
        self.model.sync_buffers()

    def _train_epoch(self, log: MetricsLog, display: ProgressDisplay) -> dict[str, float]:
        """The rest of the epoch; returns the mean loss over it and the learning rate at its end."""
        start, exposed, before = time.perf_counter(), self.model.exposed_seconds, self._samples_consumed()
        epoch = self.loader.progress.epoch
        if self.loader.progress.position == 0:
            self._average.restart()
        values: dict[str, float] = {}
        for batch in accumulate(self.model, self.loader, self.config.accumulate):
            self._micro_batch(batch)
            if not self.model.do_sync:
                continue
            lr = self._step()
            display.advance(epoch)
            if self.result.steps % self.config.log_every == 0 or self.loader.at_last:
                values = {"loss": self._average.line(), "lr": lr}
                log.write(self.result.steps, values)
            self._save_if_due()
            if self.loader.at_last:
                self.result.samples += self._samples_consumed() - before
        self.result.seconds += time.perf_counter() - start
        self.result.exposed_seconds += self.model.exposed_seconds - exposed
        return values | {"loss": self._average.epoch()} if values else {}

    def _samples_consumed(self) -> int:
        """Samples of this epoch that were consumed so far, by all ranks."""
        sampler = self.loader.progress
        return min(sampler.position * sampler.batch_size, self._dataset_size)

    def _micro_batch(self, batch: Any) -> None:
        """Forward and backward of one micro-batch, of which this rank may have no sample."""
        if batch is None:
            if self.model.do_sync:
                self.model.sync_gradients()
            return
        loss, weight = self.loss(self.model, batch)
        with self.model.weight(weight):
            loss.backward()
        self._average.add(loss, weight)

    def _step(self) -> float:
        """The optimizer's step; returns the learning rate that it used."""
        if self.config.clip_norm is not None:
            clip_grad_norm_(self.model, self.config.clip_norm)
        lr = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.result.steps += 1
        return lr

    # -- checkpoints --------------------------------------------------------------------------------------------

    def _open_checkpoints(self) -> Checkpointer:
        config = self.config
        assert config.checkpoint_dir is not None
        if config.resume:
            exchange.decide(exchange.here(), self._expect_folder)
        checkpointer = Checkpointer(config.checkpoint_dir, config.keep)
        try:
            self._fill(checkpointer)
        except BaseException:
            checkpointer.close()
            raise
        return checkpointer

    def _expect_folder(self) -> None:
        """There is nothing to resume from in a folder that is not there, and it shall not be made."""
        if not Path(str(self.config.checkpoint_dir)).is_dir():
            raise NoCheckpoint(
                f"there is no folder {self.config.checkpoint_dir} to resume from; check the path, or start without "
                "resuming"
            )

    def _fill(self, checkpointer: Checkpointer) -> None:
        config = self.config
        if (steps := checkpointer.steps()) and not config.resume:
            raise UsageError(
                f"{config.checkpoint_dir} already holds checkpoints up to step {steps[-1]}; continue them with "
                "--resume (resume=True), or choose another folder"
            )
        lrs = [group["initial_lr"] for group in self.optimizer.param_groups]
        settings = Settings(config, lr=lrs, batch_size=self.batch_size, seed=self.loader.progress.seed)
        checkpointer.register("settings", settings)
        checkpointer.register("data", DataIdentity(self.loader.dataset))
        checkpointer.register("model", self.model)
        checkpointer.register("optimizer", self.optimizer)
        checkpointer.register("scheduler", self.scheduler)
        checkpointer.register("loader", self.loader)
        checkpointer.register("loss_average", self._average)
        hook_state = self.model.comm_hook_state
        if hasattr(hook_state, "state_dict") and hasattr(hook_state, "load_state_dict"):
            checkpointer.register("comm_hook", hook_state, per_rank=True)  # every rank has residuals of its own

    def _save_if_due(self) -> None:
        if self._checkpointer is None:
            return
        every = self.config.checkpoint_every
        at_end = self.loader.at_last and (every is None or self.loader.progress.epoch == self.config.epochs - 1)
        if at_end or (every is not None and self.result.steps % every == 0):
            self.model.sync_buffers()  # rank 0's are saved, and a resumed run goes on with them on every rank
            self._save()

    def _save(self) -> None:
        """Save, or say on every rank that it failed: what was learnt is worth more than the checkpoint."""
        assert self._checkpointer is not None
        step, last = self.result.steps, self._steps_per_epoch * self.config.epochs
        self._average.gather()
        try:
            self._checkpointer.save(step)
        except CheckpointError as error:
            self.result.failed_saves.append(step)
            goes_on = "training goes on, and the next save tries again" if step < last else "training has ended with it"
            warnings.warn(f"{error}; {goes_on}", CheckpointWarning, stacklevel=2)
