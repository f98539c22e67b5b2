"""Writes one saved object into a file that needs no Paceline: for safetensors, or for ``torch.load``."""

from __future__ import annotations

import os
import secrets
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch

from paceline.checkpoint.format import manifest, safetensors_file, state_codec
from paceline.checkpoint.format.manifest import Manifest
from paceline.checkpoint.loading.load_weights import read_object
from paceline.checkpoint.step_names import step_of
from paceline.checkpoint.storage import step_folders
from paceline.core.output.files import check_file
from paceline.errors import UsageError

FORMATS = ("safetensors", "torch")
TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")


def format_of(file: str, wanted: str | None) -> str:
    """Return the format to write into `file`: the `wanted` one, or else the one of its ending."""
    if wanted is None:
        return "torch" if Path(file).suffix in TORCH_ENDINGS else "safetensors"
    if wanted not in FORMATS:
        raise UsageError(f"--format is {wanted!r}; choose one of {', '.join(FORMATS)}")
    return wanted


def check_target(file: str, force: bool) -> Path:
    """Return the path to write, through links; raise now if that cannot or should not be done."""
    path = Path(os.path.realpath(file))  # the file appears by a rename, which would replace a link, and not its target
    if not file:
        raise UsageError("--out is empty; name a file")
    if path.exists() and not path.is_dir() and not path.is_file():
        raise UsageError(f"--out {file} is no regular file; choose another")
    # Not exists(), for which a link to nothing is not there.
    if os.path.lexists(file) and not path.is_dir() and not force:
        raise UsageError(f"--out {file} is there already; choose another file, or give --force to replace it")
    for folder in path.parents:
        if step_of(folder.name) is not None and (folder / manifest.NAME).exists():
            raise UsageError(f"--out {file} is inside the checkpoint {folder}, which it would damage; choose another")
    check_file("--out", file)
    return path


def export(checkpoint: Path, found: Manifest, name: str, target: Path, kind: str) -> tuple[int, int]:
    """Write the state of the object `name` in the folder `checkpoint` to `target`; return its tensors and bytes.

    The checkpoint was verified by its manifest `found`.

    The file appears whole or not at all. In a safetensors file tied weights are there under each of their names.
    """
    node, tensors = read_object(checkpoint, found, name)
    state = state_codec.decode(node["state"], tensors)
    try:
        if kind == "torch":
            _set_metadata(state, node, tensors)
            with _appearing(target) as file:
                torch.save(state, file)
        else:
            tensors = _flat(state, name)
            with _appearing(target) as file:
                for piece in safetensors_file.pieces(tensors):
                    file.write(piece)
    except (OSError, RuntimeError) as error:  # torch's own writer turns a file's OSError into a RuntimeError
        cause = error if isinstance(error, OSError) else error.__context__
        reason = step_folders.reason(cause) if isinstance(cause, OSError) else str(error)
        raise UsageError(f"--out {target} cannot be written: {reason}; choose another place") from error
    return len(tensors), target.stat().st_size


def _set_metadata(state: Any, node: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Give a module's `state` the versions of its sub-modules, which ``Module.state_dict`` attaches, too."""
    metadata = state_codec.decode(node["metadata"], tensors)
    if metadata is not None and isinstance(state, OrderedDict):
        state._metadata = metadata  # type: ignore[attr-defined]


def _flat(state: Any, name: str) -> dict[str, torch.Tensor]:
    """Return `state`, which a safetensors file can hold."""
    if not isinstance(state, dict):
        raise UsageError(f"the state of {name!r} is no dict, which safetensors needs; give --format torch")
    for key, value in state.items():
        if not isinstance(key, str) or not isinstance(value, torch.Tensor):
            raise UsageError(
                f"{key!r} in the state of {name!r} is no tensor, and safetensors holds nothing else; "
                "give --format torch, or --name of a module"
            )
        if value.is_complex():
            raise UsageError(f"{key!r} of {name!r} is complex, which not every reader knows; give --format torch")
        if key == "__metadata__":
            raise UsageError(f"a tensor of {name!r} is called {key!r}, safetensors' own name; give --format torch")
    return state


@contextmanager
def _appearing(target: Path) -> Iterator[IO[bytes]]:
    """Return a file that becomes `target` when the block ends, durably, and vanishes if it raises."""
    # A name of its own, cut because file systems allow 255 bytes.
    draft = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}")
    try:
        with draft.open("xb") as file:
            yield file
            file.flush()
            # Before the rename, or a crash could leave the name with half of the contents.
            os.fsync(file.fileno())
        draft.replace(target)
        step_folders.sync_folder(target.parent)
    # Also Ctrl-C: a half-written file under a hidden name would take the disk unseen.
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise
