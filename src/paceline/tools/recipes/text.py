"""Text for language models: a file, its tokens, and the windows that a model reads.

The last tenth of the file's characters is for validation. The tokens of each part are cut into windows that do not
overlap, so that every token but the file's first is predicted exactly once in a pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from paceline.core.state.digests import tensor_digest
from paceline.errors import UsageError
from paceline.tools.shared.hub import one_line

VALIDATION_SHARE = 0.1
IGNORED = -100
"""Target of positions behind the end of the text, which have no loss; the default of cross_entropy's ignore_index."""


class Characters:
    """A tokenizer with one token for each different character of `text`, in the order of their code points."""

    def __init__(self, text: str) -> None:
        self._codes = _code_points(text).unique()
        self.size = len(self._codes)

    def encode(self, text: str) -> Tensor:
        return torch.searchsorted(self._codes, _code_points(text))

    def decode(self, tokens: Tensor) -> str:
        return "".join(map(chr, self._codes[tokens].tolist()))


def _code_points(text: str) -> Tensor:
    # Four bytes for each character are its code point, so that a long text needs no loop in Python.
    return torch.frombuffer(bytearray(text.encode("utf-32-le")), dtype=torch.int32)


class Subwords:
    """The tokenizer of a Hugging Face model."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        file = folder / "tokenizer.json"
        if not file.is_file():
            raise UsageError(f"--model {folder}: there is no file {file}; give a model with a fast tokenizer")
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises no class of its own
            raise UsageError(f"{file} is no tokenizer of the tokenizers library: {one_line(error)}") from error
        self.size = int(self._tokenizer.get_vocab_size())

    def encode(self, text: str) -> Tensor:
        """Return the tokens of `text`, (n,) int64, without those that mark beginning and end."""
        return torch.tensor(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=torch.int64)

    def decode(self, tokens: Tensor) -> str:
        return str(self._tokenizer.decode(tokens.tolist()))


def read_text(file: str | None) -> str:
    """Return the text of `file`, without a byte-order mark."""
    if not file:
        raise UsageError("--data is missing; give a text file: --data file.txt")
    try:
        text = Path(file).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"--data {file} cannot be read: {error.strerror}; give a text file") from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"--data {file} is not in UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}; convert it, for "
            "example with iconv"
        ) from error
    if not text:
        raise UsageError(f"--data {file} is empty; give a file with text")
    return text


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text: inputs and targets, (context,) int64 each, where a target is the token after the input.

    The windows do not overlap, and together they predict every token but the first. Behind the end of the text, in the
    last window, the targets are :data:`IGNORED`.
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


@dataclass(frozen=True)
class Corpus:
    """A text in the form that a model reads."""

    tokenizer: Characters | Subwords
    training: Windows
    validation: Windows


def make_corpus(text: str, tokenizer: Characters | Subwords, context: int) -> Corpus:
    """Split `text`, and cut its tokens into windows."""
    parts = [tokenizer.encode(part) for part in split(text)]
    training, validation = parts
    if len(training) <= context or len(validation) == 0:
        raise UsageError(
            f"--data is shorter than a sequence: the training part, nine tenths of it, has {len(training):,} tokens "
            f"and must have {context + 1:,}, one more than --context; give a longer text, or a smaller --context"
        )
    validation = torch.cat([training[-1:], validation])  # or its first token would be predicted from nothing
    return Corpus(tokenizer, Windows(training, context), Windows(validation, context))


def split(text: str) -> tuple[str, str]:
    """Return the parts of `text` for training and for validation."""
    cut = int(len(text) * (1 - VALIDATION_SHARE))
    return text[:cut], text[cut:]
