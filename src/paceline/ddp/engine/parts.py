"""The parts that the engine of a wrapper is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from paceline.core.telemetry.spans import Recorder
from paceline.core.torch_internals.distributed.dtensor import as_local, release
from paceline.ddp.agreement.control_block import ControlBlock
from paceline.ddp.agreement.digest import WIDTH, StatusDigest
from paceline.ddp.agreement.join_events import JoinEvents
from paceline.ddp.agreement.late_reading import LateReading, patience
from paceline.ddp.agreement.ledger import Ledger
from paceline.ddp.consistency.buffer_sync import BufferSync
from paceline.ddp.consistency.replica_check import ReplicaCheck
from paceline.ddp.consistency.unused_parameters import UnusedReport
from paceline.ddp.engine.device.exposed_time import ExposedTime
from paceline.ddp.engine.device.graph_capture import check_capturable, is_capturing
from paceline.ddp.engine.gradients.arrivals import Arrivals
from paceline.ddp.engine.gradients.bucket_set import BucketSet
from paceline.ddp.engine.gradients.published_gradients import PublishedGradients
from paceline.ddp.engine.parameters.module_changes import Named
from paceline.ddp.engine.parameters.shared_parameters import Sharing
from paceline.ddp.options.config import Options
from paceline.ddp.transport.channel import Channel
from paceline.ddp.transport.finisher import Algorithms, AllReduce, Finisher

if TYPE_CHECKING:
    from paceline.ddp.engine.backward.new_parameters import NewParameters

GradientHook = Callable[[int, Tensor], None]
"""Called as ``hook(index, parameter)`` when a gradient was accumulated into a parameter."""


@dataclass(frozen=True)
class EngineParts:
    """The parts that every backward of a wrapper works with. Replaced as a whole, between two backwards."""

    # These go by a parameter's index, in the order of the module.
    names: list[str]
    """Names of the parameters, in module order."""
    given: list[nn.Parameter]
    """The parameters as the module holds them."""
    local: list[nn.Parameter]
    """The same, but of a DTensor what stands for this rank's shard."""
    parameters: list[nn.Parameter]
    """`local`, but for stand-ins while the module has put others in their place; a backward reads and sets their
    ``grad``."""
    storage: BucketSet
    """The buckets."""
    arrivals: Arrivals
    """Which gradients have arrived."""
    control: ControlBlock
    """Status that ranks exchange besides gradients."""
    sharing: Sharing
    """Which of the parameters other wrappers have, too."""
    published: PublishedGradients
    """Sets ``p.grad`` to averages, and knows them again."""
    unused: UnusedReport
    """Finds parameters without a gradient."""

    # These stay as long as the wrapper does.
    channel: Channel
    """Reaches the other ranks."""
    ledger: Ledger
    """Counts this rank's backwards and weights."""
    recorder: Recorder
    """Records spans while it is on."""
    options: Options
    """Options of the user, except `check_finite`."""
    new_parameters: NewParameters
    """Looks for parameters that the module got later."""
    buffers: BufferSync
    """Travel at the end of backwards."""
    join: JoinEvents
    """Inside ``join``, tells ranks that ran out of data what comes next."""
    replica_check: ReplicaCheck | None
    """Compares replicas from time to time."""
    late_reading: LateReading
    """Decides whether control blocks are read at the end of backward or later."""
    digest: StatusDigest
    """Tells, in the tail of the last bucket, whether control blocks have to be exchanged."""
    finisher: Finisher
    """Makes a bucket's gradients the same on every rank."""
    check_finite: bool
    """Whether gradients are checked for NaN and Inf."""
    exposed_time: ExposedTime
    """Adds up how long backwards wait for communication."""

    def rebuilt(self, named: Named, hook: GradientHook) -> EngineParts:
        """The parts for the parameters `named`, which are the module's from now on."""
        self.release()
        names, given = [name for name, _ in named], [parameter for _, parameter in named]
        local = [as_local(parameter) for parameter in given]
        parameters, channel, storage = list(local), self.channel, self.storage
        storage.use_parameters(names, parameters, self.new_parameters.watch.sparse(given))
        channel.host.free(self.control.vector)
        control = ControlBlock(names, channel.rank, channel.size, channel.host.allocate)
        sharing = self.sharing.renewed(names, given, parameters)
        published = PublishedGradients(names, parameters, storage, sharing)
        gradients = ((index, parameter.grad) for index, parameter in enumerate(parameters))
        published.remember({index: gradient for index, gradient in gradients if gradient is not None})
        return replace(
            self,
            names=names,
            given=given,
            local=local,
            parameters=parameters,
            arrivals=_expecting_all(parameters, storage, hook),
            control=control,
            sharing=sharing,
            published=published,
            unused=UnusedReport(self.options.unused, names, parameters, channel),
        )

    def check_ready(self) -> None:
        """Refuse a backward that cannot be carried out, before anything else.

        Raises:
            CommunicationError: as :meth:`.Channel.check_open`.
            UsageError: as :func:`.check_capturable`.
        """
        self.channel.check_open()
        if is_capturing(self.exposed_time.device):
            check_capturable(self)

    @property
    def always_exchanges(self) -> bool:
        """Whether the next backward launches control blocks without asking whether they are needed, on all ranks."""
        return (
            not self.late_reading.is_quiet
            or not self.finisher.carries_tail
            or not self.storage.has_tail
            or not self.arrivals.order_known
            or self.join.is_active
        )

    @property
    def is_ordinary(self) -> bool:
        """Whether a backward may take the path of ordinary steps, as far as one knows before it begins."""
        return (
            not self.always_exchanges
            and self.storage.is_plain
            and self.arrivals.expects_all
            and self.replica_check is None
            and not self.check_finite
            and not self.sharing
            and not self.new_parameters.has_change
            and not self.recorder.on
            and self.recorder.bucket_watch is None
        )

    def follow_layout(self) -> None:
        """Use the buckets as they are from now on; the order of arrival is no longer asked for."""
        self.control.forget_order()
        self.arrivals.use_layout(self.storage.layout, order_known=True)

    def release(self) -> None:
        """Remove the hooks from the parameters."""
        self.arrivals.close()
        for parameter in self.local:
            release(parameter)


def make_parts(
    named: Named,
    channel: Channel,
    ledger: Ledger,
    options: Options,
    recorder: Recorder,
    new_parameters: NewParameters,
    buffers: BufferSync,
    join: JoinEvents,
    replica_check: ReplicaCheck | None,
    hook: GradientHook,
) -> EngineParts:
    """The parts for the parameters `named`; the other arguments are parts themselves."""
    names, given = [name for name, _ in named], [parameter for _, parameter in named]
    local = [as_local(parameter) for parameter in given]
    parameters = list(local)
    sparse = new_parameters.watch.sparse(given)
    # Beside a GPU the tail would have to be copied to the host, behind all that is queued there.
    tail = WIDTH * channel.size if channel.host is channel else 0
    storage = BucketSet(names, parameters, options.capacities, channel, sparse, options.reduce_dtype, tail)
    sharing = Sharing(names, given, parameters, ledger, channel.members)
    sums = Algorithms(channel, options.algorithm) if options.algorithm else None
    return EngineParts(
        names,
        given,
        local,
        parameters,
        storage,
        _expecting_all(parameters, storage, hook),
        ControlBlock(names, channel.rank, channel.size, channel.host.allocate),
        sharing,
        PublishedGradients(names, parameters, storage, sharing),
        UnusedReport(options.unused, names, parameters, channel),
        channel,
        ledger,
        recorder,
        options,
        new_parameters,
        buffers,
        join,
        replica_check,
        LateReading(is_wanted=channel.host is not channel, patience=patience()),
        StatusDigest(channel.rank, channel.size),
        AllReduce(channel, ledger, recorder, sums),
        options.check_finite,
        ExposedTime(parameters[0].device if parameters else torch.device("cpu")),
    )


def _expecting_all(parameters: list[nn.Parameter], storage: BucketSet, hook: GradientHook) -> Arrivals:
    """Arrivals that wait for the gradients of all parameters, in an order that is not known yet."""
    arrivals = Arrivals(parameters, hook)
    arrivals.use_layout(storage.layout, order_known=False)
    arrivals.begin(clear=True)
    return arrivals
