"""A text file as windows of characters.

The last tenth of the file is for validation. The windows of each part do not overlap, so every character except the
first one of the file is predicted exactly once per epoch.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from paceline.core.state.digests import tensor_digest
from paceline.errors import UsageError

VALIDATION_SHARE = 0.1
IGNORED = -100
"""Target of positions after the end of the text: the default ignore_index of cross_entropy."""


class Characters:
    """A tokenizer with one token for each character of `text`, in the order of code points."""

    def __init__(self, text: str) -> None:
        self._codes = _code_points(text).unique()
        self.size = len(self._codes)

    def encode(self, text: str) -> Tensor:
        return torch.searchsorted(self._codes, _code_points(text))

    def decode(self, tokens: Tensor) -> str:
        return "".join(map(chr, self._codes[tokens].tolist()))


def _code_points(text: str) -> Tensor:
    # UTF-32 has one int32 per code point, so a long text needs no Python loop.
    return torch.frombuffer(bytearray(text.encode("utf-32-le")), dtype=torch.int32)


def read_text(file: str | None) -> str:
    """Return the text of `file`, without a byte-order mark."""
    if not file:
        raise UsageError("--data is missing; give a text file: --data file.txt")
    try:
        return Path(file).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"--data {file} cannot be read: {error.strerror}; give a text file") from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"--data {file} is not in UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}; convert it, for "
            "example with iconv"
        ) from error


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text: inputs and targets, (context,) int64 each. Each target is the token after its input.

    The windows do not overlap, and together they predict every token except the first. After the end of the text, the
    targets are :data:`IGNORED`.
    """

    def __init__(self, tokens: Tensor, context: int) -> None:
        self.context, self.tokens = context, len(tokens) - 1
        windows = -(-self.tokens // context)
        padding = windows * context - self.tokens
        nothing = tokens.new_full((padding,), 0)
        self._inputs = torch.cat([tokens[:-1], nothing]).view(windows, context)
        self._targets = torch.cat([tokens[1:], nothing + IGNORED]).view(windows, context)
        self.fingerprint = f"{tensor_digest(tokens).hex()} {context}"

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._inputs[index], self._targets[index]


class Corpus(NamedTuple):
    """A text as windows of tokens."""

    tokenizer: Characters
    training: Windows
    validation: Windows


def make_corpus(text: str, context: int) -> Corpus:
    """Split `text`, and cut its characters into windows."""
    parts = split(text)
    if len(parts[0]) <= context:
        raise UsageError(
            f"--data is shorter than a sequence: its first nine tenths have {len(parts[0]):,} characters but need "
            f"{context + 1:,}, one more than --context; give a longer text, or a smaller --context"
        )
    tokenizer = Characters(text)
    training, validation = map(tokenizer.encode, parts)
    validation = torch.cat([training[-1:], validation])  # so that the first validation token is predicted too
    return Corpus(tokenizer, Windows(training, context), Windows(validation, context))


def split(text: str) -> tuple[str, str]:
    """Return the parts of `text` for training and for validation."""
    cut = int(len(text) * (1 - VALIDATION_SHARE))
    return text[:cut], text[cut:]
