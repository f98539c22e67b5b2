"""Optimizers for slow networks: steps are local to an island of ranks, and islands average every `sync_every` steps.

    inner step  1 … S−d        S−d+1 … S             (S = sync_every / fragments, d = delay)
                     │              │
                     send fragment  receive the mean, take the outer step, merge

Decision 0062 explains the design. docs/slow-networks.md is the user guide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.core.flat_views import split_like
from paceline.core.torch_distributed import is_sharded
from paceline.core.torch_internals import never_compiled
from paceline.core.unwrapping import plain_name, unwrap
from paceline.errors import CheckpointMismatch, UsageError
from paceline.optim.islands import Compression, Islands, Lost, Message

_LOCAL = "local"
"""Key that this module adds to the inner optimizer's state dict."""
_CANNOT_BE_INNER = {"ShardedOptimizer", "ZeroRedundancyOptimizer", "PostLocalSGDOptimizer", "IslandOptimizer"}


class IslandOptimizer(Optimizer):
    """Base of LocalSGD and DiLoCo: takes inner steps, and exchanges one fragment after another."""

    _step_supports_amp_scaling = True  # so that a GradScaler calls step() even if this island skips an inner step

    def __init__(
        self,
        model: nn.Module,
        inner: Optimizer,
        settings: Mapping[str, Any],
        on_lost_island: Lost,
        timeout: float | None,
    ) -> None:
        kind = type(self).__name__
        self._parameters = _validate(kind, model, inner, settings, on_lost_island, timeout)
        super().__init__(inner.param_groups, inner.defaults)
        self._model, self._inner = model, inner
        self._link()
        self._settings, self._delay = {"inner": type(inner).__name__, **settings}, int(settings["delay"])
        self._interval = settings["sync_every"] // settings["fragments"]
        self._fragments = _cut(self._parameters, settings["fragments"])
        self.islands = Islands(model, settings["compress"], on_lost_island, timeout, self._settings)
        self._settings["ranks of an island"] = len(self.islands.members[0])
        self._message: Message | None = None
        """The current fragment's message while it is in flight."""
        self._residuals: list[Tensor | None] = [None] * len(self._fragments)
        """Accumulated compression error of each fragment, on leaders."""
        self._steps = self._local = self._rounds = 0
        """Numbers of inner steps, of inner steps since the last outer step, and of outer steps."""
        self._received_at = [0] * len(self._fragments)
        """Number of inner steps at each fragment's last outer step."""
        self._synced_at = -1
        """Number of inner steps at the last sync()."""
        self._aside: dict[nn.Parameter, Tensor] = {}
        """Inside ``outer_weights``, the local values of the parameters."""
        self._is_stepping = False
        inner.register_step_pre_hook(self._refuse_direct_step)

    def _link(self) -> None:
        self.param_groups, self.state = self._inner.param_groups, self._inner.state

    def _refuse_direct_step(self, optimizer: Optimizer, *_: object) -> None:
        if not self._is_stepping:
            raise UsageError(
                f"{type(optimizer).__name__}.step() was called, but this optimizer belongs to a {type(self).__name__}, "
                f"which counts its steps; call step() on the {type(self).__name__} instead"
            )

    def _check_local(self, call: str) -> None:
        if self._aside:
            raise UsageError(f"{call} was called inside outer_weights(), which would lose its result; leave the block")

    @contextmanager
    def _stepping(self, call: str) -> Iterator[None]:
        """Let the inner and the outer optimizer step in the block; after a resume, first send the message again."""
        self._check_local(call)
        if self._message is not None and self._message.work is None:
            self.islands.send(self._message)
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False

    @property
    def is_apart(self) -> bool:
        """Whether the island has taken inner steps since the last outer step."""
        return self._local > 0

    @never_compiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take an inner step. After every ``sync_every / fragments`` inner steps, also take one fragment's outer step.

        Raises:
            CommunicationError: if another island does not answer within the timeout. The message names the island.
        """
        with self._stepping("step()"):
            loss = self._inner_step(closure)
            self._steps, self._local = self._steps + 1, self._local + 1
            with torch.no_grad():
                if self._local == self._interval - self._delay:
                    self._send()
                if self._local == self._interval:
                    self._receive()
        return loss

    def _inner_step(self, closure: Callable[[], Any] | None) -> Any:
        # A GradScaler sets these attributes. Steps that it skips count, so that all islands count the same steps.
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf is not None and found_inf.item():
            return None
        if scale is not None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.div_(scale.to(parameter.device))
        return self._inner.step() if closure is None else self._inner.step(closure)

    @torch.no_grad()
    def sync(self) -> None:
        """Average now, so that all islands have the same weights, for example at the end of training.

        Call it on all ranks after the same number of steps. It also averages floating-point buffers. The next step
        begins a new round of ``sync_every`` steps. A second call before that step averages only buffers.

        Raises:
            CommunicationError: if another island does not answer within the timeout. The message names the island.
        """
        with self._stepping("sync()"):
            if self._synced_at != self._steps:
                self._sync_parameters()
        self.islands.mean_of([buffer for buffer in unwrap(self._model).buffers() if buffer.is_floating_point()])

    def _sync_parameters(self) -> None:
        if self._message is not None:
            self._receive()
        for _ in self._fragments:
            if self._received_at[self._rounds % len(self._fragments)] < self._steps:
                self._send()
                self._receive()
            else:
                self._rounds += 1
        self.use_outer_weights()
        self._local, self._synced_at = 0, self._steps

    def _send(self) -> None:
        number = self._rounds % len(self._fragments)
        payload = numbers = self._numbers(self._fragments[number])
        if not self.islands.is_leader:
            payload = numbers.new_empty(0)
        elif self._settings["compress"] is not None:
            if (residual := self._residuals[number]) is not None:
                numbers += residual
            payload = self.islands.encode(numbers)
            self._residuals[number] = numbers - self.islands.decode(payload, numbers.numel(), numbers.dtype)
        self._message = Message(payload)
        self.islands.send(self._message)

    def _receive(self) -> None:
        assert self._message is not None
        number = self._rounds % len(self._fragments)
        fragment = self._fragments[number]
        count, like = sum(parameter.numel() for parameter in fragment), fragment[0]
        mean = self.islands.receive(self._message, count, _wide(fragment), like.device)
        self._apply(fragment, split_like(mean, fragment))
        self._message, self._local, self._rounds = None, 0, self._rounds + 1
        self._received_at[number] = self._steps

    def _numbers(self, fragment: list[nn.Parameter]) -> Tensor:
        """Return the flat numbers that are averaged over the islands."""
        raise NotImplementedError

    def _apply(self, fragment: list[nn.Parameter], means: list[Tensor]) -> None:
        raise NotImplementedError

    def use_outer_weights(self) -> None:
        """Set the parameters to the weights that all islands share, if the optimizer keeps them."""

    def replace_lost(self) -> None:
        """Continue as a new island after loading the state of another one, from the weights that all islands share.

        Keeps the other island's inner optimizer state, and its message if one was in flight.
        """
        self.use_outer_weights()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse new parameters, because the fragments are fixed when the optimizer is created."""
        if hasattr(self, "islands"):  # not yet when the constructor calls this
            raise UsageError(
                f"parameters cannot be added to a {type(self).__name__}; add the group to the inner optimizer before "
                f"creating the {type(self).__name__}"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that this rank needs to resume at this inner step, including its local parameters."""
        local = {
            "settings": self._settings,
            "counts": [self._steps, self._local, self._rounds, self._synced_at, self._received_at],
            "parameters": [self._aside.get(each, each.detach()) for each in self._parameters],
            "buffers": dict(unwrap(self._model).named_buffers()),
            "payload": None if self._message is None else self._message.payload,
            "residuals": list(self._residuals),
            "outer": self._outer_state(),
        }
        return {**self._inner.state_dict(), _LOCAL: local}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Refuse a state from another kind of optimizer or with different settings."""
        kind = type(self).__name__
        if _LOCAL not in state:
            raise CheckpointMismatch(f"the state was not saved by a {kind}; resume with the optimizer that was saved")
        local = state[_LOCAL]
        shapes = [[list(each.shape) for each in group] for group in (self._parameters, local["parameters"])]
        pairs = {name: (value, local["settings"].get(name)) for name, value in self._settings.items()}
        for name, (value, saved) in {**pairs, "list of parameter shapes": shapes}.items():
            if value != saved:
                raise CheckpointMismatch(
                    f"{name} of {kind} is {value!r:.80} in this run but {saved!r:.80} in the checkpoint; give the "
                    "saved value"
                )

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of one rank. All ranks must load states of the same step.

        Raises:
            CheckpointMismatch: if the state is from another kind of optimizer or has different settings.
        """
        self._check_local("load_state_dict()")
        self.check_state_dict(state_dict)
        self._inner.load_state_dict({key: value for key, value in state_dict.items() if key != _LOCAL})
        self._link()
        local, device = state_dict[_LOCAL], self._fragments[0][0].device
        self._steps, self._local, self._rounds, self._synced_at, received_at = local["counts"]
        self._received_at = list(received_at)
        for parameter, value in zip(self._parameters, local["parameters"], strict=True):
            parameter.copy_(value)
        for name, buffer in unwrap(self._model).named_buffers():
            buffer.copy_(local["buffers"][name])
        payload = local["payload"]
        self._message = None if payload is None else Message(payload.to(device, copy=True))
        self._residuals = [None if each is None else each.to(device, copy=True) for each in local["residuals"]]
        self._load_outer_state(local["outer"])

    def _outer_state(self) -> Any:
        return None

    def _load_outer_state(self, state: Any) -> None:
        pass

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError(f"a {type(self).__name__} cannot be copied or pickled; create a new one and load the state")


class LocalSGD(IslandOptimizer):
    """Averages the parameters over all islands every `sync_every` steps of `optimizer` (Stich, arXiv 1805.09767).

    An island is the process group of the wrapper `model`. In a job of two hosts with four GPUs each::

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("between", "inside"))
        model = paceline.DistributedDataParallel(net, device_mesh=mesh["inside"])
        optimizer = paceline.optim.LocalSGD(model, torch.optim.SGD(net.parameters(), lr=0.1), sync_every=32)

    With a plain module instead of a wrapper, each rank is an island. All ranks begin with the parameters and buffers of
    rank 0. Optimizer state is never averaged. A Checkpointer saves the state of every rank, so a run that resumes at
    any step has the same bits as a run without a stop.

    Args:
        model: a wrapper, or a plain module.
        optimizer: an optimizer of all parameters of the model.
        sync_every: H, the number of steps between averages.
        on_lost_island: what to do if other islands do not answer: ``"raise"`` an error that names them, or
            ``"continue"`` as the only island.
        timeout: timeout of an exchange with other islands, in seconds; by default, the timeout of the job.

    Raises:
        UsageError: if an argument is invalid, or islands have different sizes.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        sync_every: int,
        *,
        on_lost_island: Lost = "raise",
        timeout: float | None = None,
    ) -> None:
        settings = {"sync_every": sync_every, "fragments": 1, "delay": 0, "compress": None, "outer": None}
        super().__init__(model, optimizer, settings, on_lost_island, timeout)

    def _numbers(self, fragment: list[nn.Parameter]) -> Tensor:
        return _flat(fragment, _wide(fragment))

    def _apply(self, fragment: list[nn.Parameter], means: list[Tensor]) -> None:
        for parameter, mean in zip(fragment, means, strict=True):
            parameter.copy_(mean)


class DiLoCo(IslandOptimizer):
    """Takes a step of `outer` with the mean change of the parameters, every `sync_every` steps of `inner`.

    Implements DiLoCo (Douillard et al., arXiv 2311.08105) and, with fragments, streaming DiLoCo (arXiv 2501.18512). ::

        inner = torch.optim.AdamW(net.parameters(), lr=4e-4)
        outer = torch.optim.SGD(net.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        optimizer = paceline.optim.DiLoCo(model, inner, outer, sync_every=32)

    The outer gradient of a parameter is its value at the fragment's last outer step minus its current value, averaged
    over the islands. Islands and checkpoints work as in :class:`LocalSGD`. In addition to the inner optimizer's state,
    DiLoCo keeps a copy of the parameters, which `outer` updates, the state of `outer`, and compression errors.

    Args:
        model: a wrapper, or a plain module.
        inner: an optimizer of all parameters of the model.
        outer: a new optimizer of the same parameters.
        sync_every: H, the number of inner steps between outer steps of the same parameter.
        fragments: number of parts of about equal size. They take outer steps in turn, every ``sync_every / fragments``
            inner steps.
        delay: number of inner steps that overlap with the exchange of a fragment; less than
            ``sync_every / fragments``.
        alpha: weight of the local parameters in the merge with the result of the outer step; 0 drops them.
        compress: send ``"fp16"`` or ``"int8"`` instead of float32, and add the error to the next message.
        on_lost_island: as in :class:`LocalSGD`.
        timeout: as in :class:`LocalSGD`.

    Raises:
        UsageError: if an argument is invalid, or islands have different sizes.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: Optimizer,
        outer: Optimizer,
        sync_every: int,
        *,
        fragments: int = 1,
        delay: int = 0,
        alpha: float = 0.0,
        compress: Compression | None = None,
        on_lost_island: Lost = "raise",
        timeout: float | None = None,
    ) -> None:
        _validate_outer(inner, outer, alpha)
        self._outer, self._alpha = outer, alpha
        settings = {
            "sync_every": sync_every,
            "fragments": fragments,
            "delay": delay,
            "alpha": alpha,
            "compress": compress,
            "outer": type(outer).__name__,
        }
        super().__init__(model, inner, settings, on_lost_island, timeout)
        # Copied after the base class has made the islands equal, and in at least float32, because small outer steps
        # would be rounded away in bf16.
        self._outer_weights = {
            parameter: parameter.detach().to(_wide([parameter]), copy=True) for parameter in self._parameters
        }
        for group in outer.param_groups:
            group["params"] = [self._outer_weights[parameter] for parameter in group["params"]]
        outer.register_step_pre_hook(self._refuse_direct_step)

    def _numbers(self, fragment: list[nn.Parameter]) -> Tensor:
        # Cast to the parameters' dtype first, so that the change of an unchanged parameter is zero.
        changes = _flat([self._outer_weights[parameter].to(parameter.dtype) for parameter in fragment], _wide(fragment))
        for change, parameter in zip(split_like(changes, fragment), fragment, strict=True):
            change.sub_(parameter)
        return changes

    def _apply(self, fragment: list[nn.Parameter], means: list[Tensor]) -> None:
        for parameter, mean in zip(fragment, means, strict=True):
            self._outer_weights[parameter].grad = mean.to(self._outer_weights[parameter].dtype)
        self._outer.step()
        for parameter in fragment:
            weights = self._outer_weights[parameter]
            weights.grad = None
            merged = weights.to(parameter.dtype)
            parameter.copy_(torch.lerp(merged, parameter, self._alpha) if self._alpha else merged)

    @torch.no_grad()
    def use_outer_weights(self) -> None:
        """Set the parameters to the outer weights."""
        for parameter, weights in self._outer_weights.items():
            parameter.copy_(weights)

    @contextmanager
    def outer_weights(self) -> Iterator[None]:
        """Use the outer weights, which are equal on all islands, inside the block, for example in an evaluation."""
        if self._aside:  # in another such block
            yield
            return
        self._aside = {parameter: parameter.data for parameter in self._outer_weights}
        # Through .data, because a copy would count as a change of the parameters since the last step.
        for parameter, weights in self._outer_weights.items():
            parameter.data = weights.to(parameter.dtype)
        try:
            yield
        finally:
            for parameter, values in self._aside.items():
                parameter.data = values
            self._aside = {}

    def _outer_state(self) -> Any:
        return {"weights": list(self._outer_weights.values()), "optimizer": self._outer.state_dict()}

    def _load_outer_state(self, state: Any) -> None:
        for weights, saved in zip(self._outer_weights.values(), state["weights"], strict=True):
            weights.copy_(saved)
        self._outer.load_state_dict(state["optimizer"])


def _wide(tensors: list[Any]) -> torch.dtype:
    """Return the dtype of messages and outer weights: float32, or float64 if any of `tensors` has it."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def _flat(tensors: list[Any], dtype: torch.dtype) -> Tensor:
    """Return a flat copy of `tensors`."""
    flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=dtype, device=tensors[0].device)
    for view, tensor in zip(split_like(flat, tensors), tensors, strict=True):
        view.copy_(tensor)
    return flat


def _cut(parameters: list[nn.Parameter], count: int) -> list[list[nn.Parameter]]:
    """Split `parameters` into `count` consecutive groups with about the same number of elements."""
    total, done = sum(parameter.numel() for parameter in parameters), 0
    fragments: list[list[nn.Parameter]] = [[]]
    for place, parameter in enumerate(parameters):
        missing = count - len(fragments)
        is_full = done + parameter.numel() / 2 > total * len(fragments) / count
        if fragments[-1] and missing and (is_full or len(parameters) - place <= missing):
            fragments.append([])
        fragments[-1].append(parameter)
        done += parameter.numel()
    return fragments


def _validate(
    kind: str, model: nn.Module, inner: Any, settings: Mapping[str, Any], on_lost_island: str, timeout: Any
) -> list[nn.Parameter]:
    """Check the arguments; return the parameters of `inner` in the model's order."""
    if not isinstance(model, nn.Module) or not isinstance(inner, Optimizer):
        raise UsageError(f"{kind} takes a model and an optimizer, not {type(model).__name__}, {type(inner).__name__}")
    # By name, because torch's classes take long to import.
    if _CANNOT_BE_INNER & {base.__name__ for base in type(inner).__mro__}:
        raise UsageError(
            f"{kind} cannot use {type(inner).__name__} as its inner optimizer; pass a plain optimizer, such as AdamW"
        )
    named = {parameter: plain_name(name) for name, parameter in unwrap(model).named_parameters()}
    trained = {parameter for group in inner.param_groups for parameter in group["params"]}
    for parameter, name in named.items():
        if parameter.requires_grad and parameter not in trained:
            raise UsageError(f"parameter {name!r} is not in the inner optimizer of {kind}; add it, or freeze it")
        if is_sharded(parameter) or (parameter in trained and not parameter.is_floating_point()):
            raise UsageError(f"parameter {name!r} is sharded or not real; {kind} supports only real, whole parameters")
    if unknown := trained - named.keys():
        shape = tuple(next(iter(unknown)).shape)
        raise UsageError(
            f"the inner optimizer of {kind} has a parameter of shape {shape} that is not in the model; remove it"
        )
    _validate_settings(kind, settings, on_lost_island, len(trained))
    if not (timeout is None or (type(timeout) in (int, float) and 0 < timeout < 1e9)):
        raise UsageError(f"{kind}(timeout={timeout!r}): give a positive number of seconds")
    return [parameter for parameter in named if parameter in trained]


def _validate_settings(kind: str, settings: Mapping[str, Any], on_lost_island: str, parameters: int) -> None:
    every, fragments, delay = (settings[name] for name in ("sync_every", "fragments", "delay"))
    for name, least in {"sync_every": 1, "fragments": 1, "delay": 0}.items():
        if type(settings[name]) is not int or settings[name] < least:
            raise UsageError(f"{kind}({name}={settings[name]!r}): give a whole number >= {least}")
    if every % fragments:
        raise UsageError(f"{kind}: sync_every={every} is not divisible by fragments={fragments}; choose a multiple")
    if delay >= every // fragments:
        raise UsageError(
            f"{kind}: delay={delay} must be less than sync_every / fragments = {every // fragments}; choose a smaller "
            "delay"
        )
    if fragments > parameters:
        raise UsageError(f"{kind}: fragments={fragments}, but the model has {parameters} parameters; choose fewer")
    if settings["compress"] not in (None, "fp16", "int8"):
        raise UsageError(f"{kind}(compress={settings['compress']!r}): give None, 'fp16' or 'int8'")
    if on_lost_island not in ("raise", "continue"):
        raise UsageError(f"{kind}(on_lost_island={on_lost_island!r}): give 'raise' or 'continue'")


def _validate_outer(inner: Any, outer: Any, alpha: Any) -> None:
    if not isinstance(outer, Optimizer) or isinstance(outer, IslandOptimizer | torch.optim.LBFGS):
        raise UsageError(
            f"DiLoCo(outer=…) takes an optimizer with step() alone, not {type(outer).__name__}; give torch.optim.SGD(…)"
        )
    if not isinstance(alpha, int | float) or not 0 <= alpha <= 1:
        raise UsageError(f"DiLoCo(alpha={alpha!r}): give a number from 0 to 1")
    inner_ids, outer_ids = (
        {id(parameter) for group in getattr(each, "param_groups", ()) for parameter in group["params"]}
        for each in (inner, outer)
    )
    if inner_ids != outer_ids:
        raise UsageError("DiLoCo: inner and outer have different parameters; pass model.parameters() to both")
    if outer.state:
        raise UsageError("DiLoCo: outer has already taken steps; pass a new optimizer, and load the state into DiLoCo")
