"""Recovers from an exception that ended a backward: restores the gradients, and later gives peers their part."""

from __future__ import annotations

from collections.abc import Generator

from paceline.ddp.engine.backward.backward import Backward
from paceline.ddp.engine.backward.phase import Phase


def restore_gradients(backward: Backward) -> None:
    """Restore the gradients from before `backward`, which an exception has ended."""
    parts = backward.parts
    for index, parameter in enumerate(parts.parameters):
        if index in backward.share.elsewhere:
            continue
        if backward.clear:
            parameter.grad = None
        elif index in backward.held:
            parameter.grad = backward.held[index]
    parts.new_parameters.restore()
    backward.held.clear()  # these keep their values while the others' collectives are met
    parts.sharing.abort(backward.share)


def resync(backward: Backward) -> Generator[None, None, None]:
    """Carry `backward`, which an exception has ended, to its end, so that no peer waits for this rank.

    Launches the rest, pauses, waits, and pauses again; when it is run on or closed, the gradients come back.
    """
    parameters = backward.parts.parameters
    gradients = [parameter.grad for parameter in parameters]
    backward.enter(Phase.LAUNCHING if backward.is_cut_short else Phase.WAITING)
    backward.is_settling = True
    try:
        for parameter in parameters:
            parameter.grad = None
        if backward.is_cut_short:
            backward.advance()
        yield  # the other wrappers launch, too
        while backward.advance():
            pass
        yield  # the gradients stay away until the others have finished, too
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
