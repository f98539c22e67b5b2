"""Prepares a rank for error reports. Python imports this module before the script runs.

It removes itself from the path, so that neither the script nor its child processes see it, imports the user's own
``sitecustomize``, and then installs the hook that records uncaught exceptions. In the fork server, this happens after
the fork.
"""

import os
import sys
from types import ModuleType

FORK_SERVER = "PACELINE_FORK_SERVER"  # set in the fork server


def _leave() -> None:
    """Remove this folder from the path and the environment, and import the user's module of the same name."""
    folder = os.path.dirname(os.path.abspath(__file__))
    if folder in sys.path:
        sys.path.remove(folder)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if paths[0] == folder:
        del paths[0]
        if paths:
            os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        else:
            del os.environ["PYTHONPATH"]
    this_module = sys.modules.pop(__name__)
    try:
        __import__(__name__)
    except ImportError as error:
        sys.modules[__name__] = this_module
        if error.name != __name__:
            raise


def _load(module: str) -> ModuleType:
    """Load a module of the launcher by path, because importing paceline would import torch."""
    from importlib.util import module_from_spec, spec_from_file_location

    launcher = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    name = "_paceline_" + module
    spec = spec_from_file_location(name, os.path.join(launcher, module + ".py"))
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = loaded = module_from_spec(spec)  # dataclasses look up their module there
    spec.loader.exec_module(loaded)
    return loaded


def _serve() -> None:
    """Fork ranks; returns only in a rank."""
    child, server = _load("child"), _load("fork_server")
    server.serve(os.environ.pop(FORK_SERVER), int(os.environ["PACELINE_LAUNCHER"]), child.die_with)
    for module in (child, server):
        del sys.modules[module.__name__]


def _print_in_lines() -> None:
    """Make ``print`` write whole lines, as on a terminal; ``python -u`` writes each argument separately.

    Threads and DataLoader workers share the rank's streams.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, write_through=False)


def _share_folder() -> None:
    """Make multiprocessing create its sockets in the job's folder, because killed processes do not remove them."""
    from multiprocessing import heap, process
    from tempfile import gettempdir

    folder = os.environ["PACELINE_BLACK_BOX"]
    if len(folder) < 80:  # the path of a socket has at most 107 bytes
        process.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]
        # Shared arrays that are too large for /dev/shm need another folder, because the job's folder is in /dev/shm.
        heap.Arena._dir_candidates = [*heap.Arena._dir_candidates, gettempdir()]  # type: ignore[attr-defined]


if __name__ == "sitecustomize":  # False if a tool imports every module of the package
    if FORK_SERVER in os.environ:
        _serve()
    _print_in_lines()
    _share_folder()
    _leave()
    _load("failure_record").install()
    _load("stack_dump").install()
