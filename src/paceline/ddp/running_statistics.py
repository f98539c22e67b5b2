"""BatchNorm's running statistics with virtual ranks, computed as if one process saw all slices one after another.

Every forward pass of a layer starts from zero, so that afterwards the running mean and variance contain only this
slice's contribution. The contributions of all slices are gathered with the synchronized backward pass, and every rank
adds them in slice order. Between forward passes the buffers show the values from before the step. Forward passes
outside a step, and copies of the module, behave as they do without virtual ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.torch_distributed import AnyBatchNorm
from paceline.core.torch_internals import never_compiled
from paceline.ddp.channel import Channel, Launched
from paceline.ddp.module_changes import ModuleWatch
from paceline.errors import UsageError

REPEAT = -1
"""Used instead of a slice number for a repeated slice, whose contribution is not added."""


@dataclass
class _Layer:
    """A layer with running statistics, and the contributions of a step's slices."""

    name: str
    module: AnyBatchNorm
    shown: tuple[Tensor, Tensor] | None = None
    """Mean and variance from before the step; set during a forward pass."""
    parts: dict[int, tuple[int, Tensor]] = field(default_factory=dict)
    """For each slice: its number of forward passes, and its contribution (mean, then variance)."""

    @property
    def decay(self) -> float:
        assert self.module.momentum is not None
        return 1 - self.module.momentum

    @property
    def statistics(self) -> tuple[Tensor, Tensor]:
        mean, variance = self.module.running_mean, self.module.running_var
        assert mean is not None
        assert variance is not None
        return mean, variance


class _Hook:
    """A hook for one layer, which does nothing in a copy or a pickle of the layer."""

    def __init__(self, function: Callable[[_Layer], None], layer: _Layer) -> None:
        self._function, self._layer = function, layer

    @never_compiled  # otherwise torch.compile would guard on its counts and recompile until it gives up
    def __call__(self, *_: Any) -> None:
        self._function(self._layer)

    def __reduce__(self) -> Any:
        return _no_hook, ()


class SliceStatistics:
    """The running statistics of one wrapper's layers.

    Args:
        watch: detects changes of the wrapped module.
        channel: connects all ranks.
        slices: number of slices that this rank computes in a step.
    """

    def __init__(self, watch: ModuleWatch, channel: Channel, slices: int) -> None:
        self._watch, self._channel, self._slices, self._slice = watch, channel, slices, 0
        self._layers: list[_Layer] = []
        self._hooks: list[Any] = []
        self._changes = 0
        """The module's number of changes when the layers were last collected."""
        self._gathered: tuple[Tensor, Launched] | None = None
        self.is_in_step = False
        """Whether a step is in progress; the statistics of its forward passes are kept separately."""
        self._was_left = False
        """Whether the latest step was abandoned."""
        self._find_layers()

    def _find_layers(self) -> None:
        named = self._watch.module.named_modules()
        layers = [_Layer(name, layer) for name, layer in _with_statistics(named, self._channel.rank)]  # or refuses one
        self.close()
        self._layers, self._changes = layers, self._watch.changes
        for layer in self._layers:
            self._hooks.append(layer.module.register_forward_pre_hook(_Hook(self._before, layer)))
            # Called even if the forward raises, so that the buffers are restored.
            self._hooks.append(layer.module.register_forward_hook(_Hook(self._after, layer), always_call=True))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @property
    def buffers(self) -> list[tuple[nn.Module, str]]:
        """The buffers that this class adds up, each as its layer and name."""
        return [(layer.module, name) for layer in self._layers for name in _BUFFERS]

    def begin_slice(self, number: int, *, is_first: bool) -> None:
        """Begin slice `number` of this rank; the first slice of a step drops leftovers of an unfinished step."""
        self._slice, self.is_in_step = number, True
        if is_first:
            self._was_left = False
            if self._watch.changes != self._changes:
                self._find_layers()
            for layer in self._layers:
                layer.parts.clear()

    def begin_repeat(self) -> None:
        """Begin a repeated slice; its contribution is stored under :data:`REPEAT`."""
        self._slice = REPEAT
        for layer in self._layers:
            layer.parts.pop(REPEAT, None)

    def parts_of(self, number: int) -> list[Tensor]:
        return [layer.parts[number][1] for layer in self._layers if number in layer.parts]

    @torch.no_grad()
    def leave_step(self) -> None:
        """Discard an abandoned step, as if its slices had not run a forward pass."""
        self.is_in_step, self._was_left = False, True
        for layer in self._layers:
            if (tracked := layer.module.num_batches_tracked) is not None:
                tracked -= sum(count for number, (count, _) in layer.parts.items() if number != REPEAT)
            layer.parts.clear()

    @torch.no_grad()
    def _before(self, layer: _Layer) -> None:
        if self.is_in_step and layer.module.training:
            if layer.module.momentum is None:
                raise _cumulative(layer.name, self._channel.rank)
            # New tensors instead of new values, because autograd would report an in-place change of the buffers.
            layer.shown = mean, variance = layer.statistics
            layer.module.running_mean, layer.module.running_var = torch.zeros_like(mean), torch.zeros_like(variance)

    @torch.no_grad()
    def _after(self, layer: _Layer) -> None:
        if layer.shown is None:
            return
        added = torch.cat(layer.statistics)
        count, previous = layer.parts.get(self._slice, (0, None))
        layer.parts[self._slice] = (count + 1, added if previous is None else previous.mul_(layer.decay).add_(added))
        layer.module.running_mean, layer.module.running_var = layer.shown
        layer.shown = None

    # -- at the end of a synchronized backward ------------------------------------------------------------------

    @torch.no_grad()
    def launch(self) -> None:
        """Launch the collective that gathers the contributions of all slices."""
        self.is_in_step = False
        if not self._layers:
            return
        rows = torch.stack([self._row(number) for number in range(self._slices)])
        self._gathered = self._channel.gather_rows(rows)

    def _row(self, number: int) -> Tensor:
        """Return the number of forward passes in slice `number` for each layer, followed by the layers' contributions.

        The numbers are -1 if an exception ended the step on this rank.
        """
        first = self._layers[0].statistics[0]
        none = -1 if self._was_left else 0
        counts = [layer.parts[number][0] if number in layer.parts else none for layer in self._layers]
        parts = [
            layer.parts[number][1] if number in layer.parts else torch.cat(layer.statistics).zero_()
            for layer in self._layers
        ]
        return torch.cat([torch.tensor(counts, dtype=first.dtype, device=first.device), *parts])

    @torch.no_grad()
    def wait(self, *, are_rank_0s: bool) -> None:
        """Add the contributions of all slices, in order, to the running statistics, unless a rank left the step.

        `are_rank_0s` means that rank 0's buffers were just broadcast, and so already count its forward passes.
        """
        if self._gathered is None:
            return
        (table, launched), self._gathered = self._gathered, None
        self._channel.wait(launched, "gathering of BatchNorm's statistics")
        rows = table.flatten(0, 1)
        counts = rows[:, : len(self._layers)].long().tolist()
        is_whole = min(map(min, counts)) >= 0
        sizes = [2 * layer.statistics[0].numel() for layer in self._layers]
        total = torch.cat([statistic for layer in self._layers for statistic in layer.statistics])
        for row, forwards in zip(rows, counts, strict=True) if is_whole else ():
            decays = [layer.decay**count for layer, count in zip(self._layers, forwards, strict=True)]
            decay = torch.tensor(decays, dtype=total.dtype, device=total.device)
            total.mul_(decay.repeat_interleave(torch.tensor(sizes, device=total.device))).add_(row[len(self._layers) :])
        for index, (layer, values) in enumerate(zip(self._layers, total.split(sizes), strict=True)):
            for statistic, value in zip(layer.statistics, values.chunk(2), strict=True):
                statistic.copy_(value)
            if (tracked := layer.module.num_batches_tracked) is not None:
                offset = 0 if are_rank_0s else self._channel.rank * self._slices
                counted = counts[offset : offset + self._slices]  # already counted by the layer itself
                tracked += sum(forwards[index] for forwards in counts) if is_whole else 0
                tracked -= sum(max(0, forwards[index]) for forwards in counted)
            layer.parts.clear()


_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def _nothing(*_: Any) -> None:
    """Replaces the hook in a copy of the layer."""


def _no_hook() -> Callable[..., None]:
    return _nothing


def _with_statistics(modules: Iterable[tuple[str, nn.Module]], rank: int) -> Iterable[tuple[str, AnyBatchNorm]]:
    for name, module in modules:
        if not isinstance(module, AnyBatchNorm):
            continue
        if not isinstance(module, nn.modules.batchnorm.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            # Also refused without running statistics, because the layer synchronizes the statistics of the batch.
            raise UsageError(
                f"rank {rank}: {name!r} is a {type(module).__name__}, which normalizes over all ranks at once, but "
                "with virtual_ranks a rank computes its slices one after another; use BatchNorm, or no virtual_ranks"
            )
        if not module.track_running_stats or module.running_mean is None:
            continue
        if module.momentum is None:
            raise _cumulative(name, rank)
        yield name, module


def _cumulative(name: str, rank: int) -> UsageError:
    return UsageError(
        f"rank {rank}: {name!r} has momentum=None, so the contribution of a slice depends on the number of earlier "
        "slices; set a momentum, such as 0.1, with virtual_ranks"
    )
