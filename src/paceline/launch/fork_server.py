"""The fork server: a process that has imported torch and forks a rank on each request.

    launcher                     fork server                               rank
    python -u script.py …   ──▶  1. its sitecustomize imports torch
                            ◀──  2. ready, or refused and why
    fork: environment,      ──▶  3. forks                            ──▶   4. own session, streams, environment
    streams                 ◀──     process id                             5. sitecustomize ends, the script begins
                            ◀──  6. process id and exit code         ◀──   6. ends
    reap                    ──▶  7. waits for it, which frees its process id

The server runs the rank's command but pauses during interpreter startup: ``launch/hook/sitecustomize.py`` calls
:func:`serve`, which returns only in a forked rank. In that rank the interpreter does everything else as usual, from
setting ``sys.path[0]`` to printing uncaught exceptions.

Standard library only, loaded by path. Linux only.
"""

import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from fcntl import F_DUPFD_CLOEXEC, fcntl
from io import FileIO
from typing import Any, NoReturn

LONGEST = 65536  # maximum message size in bytes; environments may be longer, so they are sent as a file
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
KEPT_BY_FORKS = {"jemalloc_bg_thd"}  # allocator threads that survive forks, because they use pthread_atfork
THREADS_S = 1.0  # a joined thread may still be listed for this long


def serve(setting: str, parent: int, die_with: Callable[[int], None]) -> None:
    """Import modules and fork ranks until the launcher exits; returns only in a rank.

    Args:
        setting: descriptor of the socket to the launcher, followed by the modules, separated by spaces.
        parent: the launcher's process id.
        die_with: makes this process exit when the given process exits.
    """
    number, *modules = setting.split()
    server = os.getpid()
    try:
        die_with(parent)
        launcher = socket.socket(fileno=int(number))
        launcher.set_inheritable(False)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, exit codes are lost
        _send(launcher, refused=preload(modules) or unfit())
        request, descriptors = _fork_on_request(launcher)
    # The server must not return, because its interpreter would then run the script.
    except BaseException:
        _fail()
    try:
        os.setsid()
        die_with(server)
        # The server blocks signals (see signals.sheltered()). Pending ones are delivered now.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        _take_streams(request["streams"], descriptors)
        os.environ.clear()
        os.environ.update(request["environment"])
        _refresh()
    except BaseException:
        _fail()


def _fail() -> NoReturn:
    """Print the current exception, if possible, and exit at once."""
    try:
        traceback.print_exc()
    finally:
        os._exit(1)


# The server


def preload(modules: "list[str]") -> str:
    """Import `modules` as the script would; return an empty string, or the reason if an import fails."""
    first = first_path()
    sys.path[:0] = first
    try:
        for module in modules:
            try:
                importlib.import_module(module)
            except BaseException as error:  # including SystemExit from a file that shadows a module
                return f"{module} cannot be imported here ({type(error).__name__}: {error})"
    finally:
        if sys.path[: len(first)] == first:
            del sys.path[: len(first)]
    return ""


def first_path() -> "list[str]":
    """Return the entry that the interpreter will prepend to ``sys.path``: the script's folder."""
    if getattr(sys.flags, "safe_path", False):
        return []
    if sys.argv[0] in ("-m", "-c"):
        return [os.getcwd() if sys.argv[0] == "-m" else ""]
    return [os.path.dirname(os.path.realpath(sys.argv[0])) if os.path.isfile(sys.argv[0]) else sys.argv[0]]


def unfit() -> str:
    """Return why forks of this process would differ from new processes; an empty string if they would not.

    Forks once as a trial, because libraries such as OpenBLAS stop their threads before a fork and restart them when
    needed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns about these threads
        try:
            attempt = os.fork()
        except OSError as error:
            return f"no process can be forked: {error.strerror}"
    if attempt == 0:
        os._exit(0)
    os.waitpid(attempt, 0)
    end = time.monotonic() + THREADS_S
    while len(threads()) > 1 and time.monotonic() < end:
        time.sleep(0.01)
    if len(threads()) > 1:
        return f"importing it started threads ({', '.join(threads()[1:])}), which a fork would not have"
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            file = os.readlink(f"/proc/self/fd/{descriptor}")
            if file.startswith(DEVICES):
                return f"importing it opened {file}, which a fork cannot use"
    return ""


def threads() -> "list[str]":
    """Return the name of the main thread, followed by the names of the threads that a fork would lack."""
    names = []
    for thread in sorted(os.listdir("/proc/self/task"), key=int):
        with suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:
            names.append(file.read().strip())
    return names[:1] + [name for name in names[1:] if name not in KEPT_BY_FORKS]


def _fork_on_request(launcher: socket.socket) -> "tuple[dict[str, Any], list[int]]":
    """Serve the launcher's requests until it closes the socket; in a forked rank, return its request."""
    ended: dict[int, int] = {}  # pidfd (readable once the rank has exited) -> process id
    poll = select.poll()
    poll.register(launcher, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in ended:
                poll.unregister(descriptor)
                os.close(descriptor)
                _report(launcher, ended.pop(descriptor))
                continue
            message, descriptors, _, _ = socket.recv_fds(launcher, LONGEST, 4)
            if not message:
                os._exit(0)
            order = json.loads(message)
            if "reap" in order:
                os.waitpid(order["reap"], 0)
                continue
            pid = _fork(launcher)
            if pid == 0:
                # If this copy stayed open, the launcher would not notice that the server has exited.
                launcher.close()
                for pidfd in ended:
                    os.close(pidfd)
                with open(descriptors.pop(0), "rb") as file:
                    return json.load(file), descriptors
            for copy in descriptors:
                os.close(copy)
            if pid > 0:
                watched = os.pidfd_open(pid)
                ended[watched] = pid
                poll.register(watched, select.POLLIN)
                _send(launcher, pid=pid)


def _fork(launcher: socket.socket) -> int:
    """Fork, and return what ``os.fork`` returns; if that fails, send the reason and return -1."""
    if len(threads()) > 1:
        _send(launcher, error=f"the fork server has threads: {', '.join(threads()[1:])}")
        return -1
    try:
        return os.fork()
    except OSError as error:
        _send(launcher, error=f"no process can be forked: {error.strerror}")
        return -1


def _report(launcher: socket.socket, pid: int) -> None:
    """Report how the rank `pid` ended. It stays a zombie until the launcher answers, so that its id is not reused."""
    end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert end is not None
    _send(launcher, pid=pid, code=end.si_status if end.si_code == os.CLD_EXITED else -end.si_status)


def _send(launcher: socket.socket, **message: Any) -> None:
    try:
        launcher.send(json.dumps(message).encode())
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)


# The rank


def _take_streams(streams: "list[int]", descriptors: "list[int]") -> None:
    """Install `descriptors` as the given standard streams, and close the other standard streams."""
    sources = []
    for descriptor in descriptors:
        sources.append(fcntl(descriptor, F_DUPFD_CLOEXEC, 3))
        os.close(descriptor)
    for stream in (0, 1, 2):
        if stream not in streams:
            with suppress(OSError):
                os.close(stream)
    for stream, source in zip(streams, sources, strict=True):
        os.dup2(source, stream, inheritable=True)
        os.close(source)
    for output in (sys.stdout, sys.stderr):
        if output is not None:
            _reset_stream(output)


def _reset_stream(output: Any) -> None:
    """Reinitialize an unbuffered (``-u``) text stream for its new file, in place because loggers refer to it."""
    file = FileIO(output.fileno(), "w", closefd=False)
    file.name = output.name
    output.__init__(file, output.encoding, output.errors, newline="\n", write_through=True)


def _refresh() -> None:
    """Renew random seeds and cached properties of the process. Python's ``random`` reseeds itself after a fork."""
    if "torch" in sys.modules:
        # Only the CPU generator, because in a new process device generators have a fixed seed.
        sys.modules["torch"].default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
    if "threading" in sys.modules:
        sys.modules["threading"].main_thread()._native_id = os.getpid()
    importlib.invalidate_caches()  # files may have been written since the import
