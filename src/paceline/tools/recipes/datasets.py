"""The recipes' data: windows of characters in a text file, and the sentence pairs of MRPC.

MRPC's files ``train.tsv`` and ``dev.tsv`` are tab-separated with a header line, and quotation marks are ordinary text:

    Quality    #1 ID    #2 ID    #1 String    #2 String

Quality is 1 for a paraphrase, otherwise 0.
"""

from __future__ import annotations

import hashlib
import os
from codecs import BOM_UTF8
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from paceline.core.digests import tensor_digest
from paceline.errors import UsageError

VALIDATION_SHARE = 0.1
IGNORED = -100
"""Target of positions after the end of the text: the default ignore_index of cross_entropy."""
COLUMNS = ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"]
_HUB_NAME = ("nyu-mll/glue", "mrpc")


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
    """Return the parts of `text` for training and, the last tenth, for validation."""
    cut = int(len(text) * (1 - VALIDATION_SHARE))
    return text[:cut], text[cut:]


class Pair(NamedTuple):
    """Two sentences."""

    ids: tuple[str, str]
    first: str
    second: str
    label: int
    """1 if they are paraphrases, else 0."""


class Splits(NamedTuple):
    """The training pairs and the held-out pairs."""

    train: list[Pair]
    dev: list[Pair]


def read_folder(folder: Path) -> Splits:
    """Read ``train.tsv`` and ``dev.tsv``; a pair that is in both files is held out from training."""
    dev = read_pairs(folder / "dev.tsv")
    held_out = {pair.ids for pair in dev}
    train = [pair for pair in read_pairs(folder / "train.tsv") if pair.ids not in held_out]
    if not train or not dev:
        raise UsageError(f"--data {folder}: train.tsv or dev.tsv has no pairs of its own; give another folder")
    return Splits(train, dev)


def read_pairs(file: Path) -> list[Pair]:
    """Read the rows of a file."""
    pairs: list[Pair] = []
    try:
        lines = file.read_bytes().removeprefix(BOM_UTF8).rstrip(b"\r\n").split(b"\n")
    except OSError as error:
        raise UsageError(
            f"{file} cannot be read: {error.strerror}; give a folder with MRPC's train.tsv and dev.tsv"
        ) from error
    for number, line in enumerate(lines, 1):
        try:
            # Not the csv module, which joins lines between quotation marks.
            label, first_id, second_id, first, second = cells = [cell.strip() for cell in line.decode().split("\t")]
            if number > 1:
                pairs.append(Pair((first_id, second_id), first, second, ("0", "1").index(label)))
            if (number == 1 and cells != COLUMNS) or not (first and second):
                raise ValueError
        except ValueError as error:  # also for another label, another number of cells, and text that is not UTF-8
            raise UsageError(
                f"{file}, line {number}: not {', '.join(COLUMNS)} in UTF-8, separated by tabs, with 0 or 1 as Quality; "
                "fix the file, or give another folder"
            ) from error
    return pairs


def hub_is_cached() -> bool:
    """Return whether the hub's copy is in the cache of this machine."""
    from huggingface_hub.constants import HF_HOME

    # Without ``datasets``, which takes seconds to import.
    cache = os.environ.get("HF_DATASETS_CACHE") or os.path.join(HF_HOME, "datasets")
    return any(Path(cache, _HUB_NAME[0].replace("/", "___"), _HUB_NAME[1]).glob("*/*/*.arrow"))


def read_hub() -> Splits:
    """Read the hub's copy with ``datasets``, which downloads it if it is not cached."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()  # otherwise, every rank would print a message about the cache

    def pairs(split: str) -> list[Pair]:
        rows = datasets.load_dataset(*_HUB_NAME, split=split)
        return [Pair((str(row["idx"]), ""), row["sentence1"], row["sentence2"], int(row["label"])) for row in rows]

    return Splits(pairs("train"), pairs("validation"))


class TokenizedPairs(Dataset[dict[str, Any]]):
    """Pairs as rows of model inputs, with a fingerprint of all tokens and labels."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows = rows
        self.lengths = [len(row["input_ids"]) for row in rows]
        """Number of tokens of each pair."""
        self.fingerprint = hashlib.sha256(repr(rows).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def tokenize(tokenizer: Any, pairs: Sequence[Pair], max_length: int) -> TokenizedPairs:
    """Return the pairs as at most `max_length` tokens each, joined by a newline if the tokenizer adds no separator."""
    first, second = [pair.first for pair in pairs], [pair.second for pair in pairs]
    texts: tuple[list[str], ...] = (first, second)
    if tokenizer.num_special_tokens_to_add(pair=True) == tokenizer.num_special_tokens_to_add(pair=False):
        texts = ([f"{a}\n{b}" for a, b in zip(first, second, strict=True)],)
    encoded = tokenizer(*texts, truncation=True, max_length=max_length)
    rows = [dict(zip(encoded, row, strict=True)) for row in zip(*encoded.values(), strict=True)]
    return TokenizedPairs([{**row, "label": pair.label} for row, pair in zip(rows, pairs, strict=True)])


def f1_score(true_positives: float, predicted: float, positives: float) -> float:
    """Return F1 of class 1 from its true positives, predictions and samples, as counts or shares."""
    return 2 * true_positives / (predicted + positives) if predicted + positives else 0.0
