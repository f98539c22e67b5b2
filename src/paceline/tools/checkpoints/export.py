"""Export of one saved object to a file for safetensors or ``torch.load``."""

from __future__ import annotations

import os
import secrets
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.format import manifest, safetensors_file, state_codec
from paceline.checkpoint.loading.load_weights import read_folder
from paceline.checkpoint.step_names import step_at
from paceline.checkpoint.storage import step_folders
from paceline.core.output.files import check_file
from paceline.errors import UsageError

TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")


def check_target(file: str) -> Path:
    """Check that `file` can be written and does not exist yet, and return its path."""
    if not file:
        raise UsageError("--out is empty; name a file")
    check_file("--out", file)
    if os.path.lexists(file):  # exists() is False for a dangling link
        raise UsageError(f"--out {file} already exists; remove it or choose another file")
    path = Path(os.path.realpath(file))
    if step_at(Path(file).parent) is not None and (path.parent / manifest.NAME).exists():
        raise UsageError(f"--out {file} is inside the checkpoint {path.parent}; choose another folder")
    return path


def export(folder: Path, name: str, target: Path) -> tuple[int, int, int]:
    """Write the state of the object `name` to `target`; return its step, number of tensors, and bytes.

    The `folder` of a run selects its newest intact checkpoint, and the suffix of `target` selects the format. The file
    is written whole or not at all. A safetensors file stores each tied weight under all of its names.
    """
    step, node, tensors = read_folder(folder, name)
    state = state_codec.decode(node["state"], tensors)
    is_torch = target.suffix in TORCH_ENDINGS
    if is_torch:
        # Like Module.state_dict(), store the versions of the submodules.
        metadata = state_codec.decode(node["metadata"], tensors)
        if metadata is not None and isinstance(state, OrderedDict):
            state._metadata = metadata  # type: ignore[attr-defined]
    else:
        tensors = _flat(state, name)
    draft = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}")  # file systems allow 255 bytes
    try:
        with draft.open("xb") as file:
            if is_torch:
                torch.save(state, file)
            else:
                file.writelines(safetensors_file.pieces(tensors))
            file.flush()
            # Before the rename, because a crash could otherwise leave a partial file under the final name.
            os.fsync(file.fileno())
        draft.replace(target)
        step_folders.sync_folder(target.parent)
    except (OSError, RuntimeError) as error:  # torch.save() raises a RuntimeError from the OSError
        cause = error if isinstance(error, OSError) else error.__context__
        reason = step_folders.reason(cause) if isinstance(cause, OSError) else str(error)
        raise UsageError(f"cannot write --out {target}: {reason}; choose another place") from error
    finally:
        with suppress(OSError):
            draft.unlink()  # exists only after an error or Ctrl-C
    return step, len(tensors), target.stat().st_size


def _flat(state: Any, name: str) -> dict[str, torch.Tensor]:
    """Return `state` after checking that a safetensors file can hold it."""
    remedy = "give --out a name that ends in .pt"
    if not isinstance(state, dict):
        raise UsageError(f"the state of {name!r} is not a dict, as safetensors requires; {remedy}")
    for key, value in state.items():
        if not isinstance(key, str) or not isinstance(value, torch.Tensor):
            raise UsageError(
                f"{key!r} in the state of {name!r} is not a tensor, and safetensors holds only tensors; "
                f"{remedy}, or name a module with --name"
            )
        if value.is_complex():
            raise UsageError(f"{key!r} of {name!r} is complex, which not every safetensors reader supports; {remedy}")
        if key == "__metadata__":
            raise UsageError(f"a tensor of {name!r} has the reserved name {key!r}; {remedy}")
    return state
