"""The sentence pairs of MRPC, the Microsoft Research Paraphrase Corpus, from its files or from the Hugging Face hub.

Its files are tab-separated, with a header, and quotation marks in them mean nothing but themselves:

    Quality    #1 ID    #2 ID    #1 String    #2 String

Quality is 1 for a paraphrase, else 0. The corpus has msr_paraphrase_train.txt and msr_paraphrase_test.txt; GLUE names
the pairs of the former that are held out in dev_ids.tsv, and most copies of it have train.tsv and dev.tsv instead.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from paceline.errors import UsageError

COLUMNS = ("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String")
_HUB_NAME = ("nyu-mll/glue", "mrpc")


class Pair(NamedTuple):
    """Two sentences."""

    ids: tuple[str, str]
    first: str
    second: str
    label: int
    """1 if they are paraphrases, else 0."""


class Splits(NamedTuple):
    """The pairs to train on, and the held-out ones."""

    train: list[Pair]
    dev: list[Pair]


class BrokenRow(UsageError):
    """A line of a file that is not a row; names file and line."""

    def __init__(self, file: Path, line: int, problem: str) -> None:
        super().__init__(f"{file}, line {line}: {problem}; mend the file, or give another folder")


def read_folder(folder: Path) -> Splits:
    """Read the pairs in a folder's files; no pair that is held out is trained on."""
    source = _first(folder, "train.tsv", "msr_paraphrase_train.txt")
    if source is None:
        raise UsageError(f"--data {folder} has neither train.tsv nor msr_paraphrase_train.txt; give MRPC's folder")
    pairs = read_pairs(source)
    if (ids := _first(folder, "dev_ids.tsv")) and source.name != "train.tsv" and not (folder / "dev.tsv").is_file():
        names = read_ids(ids)
        dev = [pair for pair in pairs if pair.ids in names]
    else:
        held_out = _first(folder, "dev.tsv", "msr_paraphrase_test.txt")
        if held_out is None:
            raise UsageError(
                f"--data {folder} has {source.name} but no held-out pairs: it needs dev.tsv, msr_paraphrase_test.txt, "
                "or dev_ids.tsv beside msr_paraphrase_train.txt"
            )
        dev = read_pairs(held_out)
    # Copies of the corpus differ in whether the held-out pairs are among the others; here they never are.
    taken = {pair.ids for pair in dev}
    train = [pair for pair in pairs if pair.ids not in taken]
    if not (train and dev):
        raise UsageError(f"--data {folder}: {'nothing is held out' if train else 'nothing is left to train on'}")
    return Splits(train, dev)


def _first(folder: Path, *names: str) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


def read_pairs(file: Path) -> list[Pair]:
    """Read the rows of a file."""
    pairs: list[Pair] = []
    for number, line in _lines(file):
        # Not the csv module, which takes quotation marks for more than text, and joins lines between them.
        cells = [cell.strip() for cell in line.split("\t")]
        if number == 1:
            if tuple(cells) != COLUMNS:
                raise BrokenRow(file, 1, f"the header is not {', '.join(COLUMNS)}, separated by tabs")
            continue
        if len(cells) != len(COLUMNS):
            raise BrokenRow(file, number, f"{len(cells)} columns separated by tabs instead of {len(COLUMNS)}")
        label, one, other, first, second = cells
        if label not in ("0", "1"):
            raise BrokenRow(file, number, f"the Quality is {label!r} instead of 0 or 1")
        if not (first and second):
            raise BrokenRow(file, number, "a sentence is empty")
        pairs.append(Pair((one, other), first, second, int(label)))
    if not pairs:
        raise UsageError(f"{file} has no sentence pairs; give another folder")
    return pairs


def read_ids(file: Path) -> set[tuple[str, str]]:
    """Read pairs of ids."""
    ids = set()
    for number, line in _lines(file):
        cells = line.split("\t")
        if len(cells) != 2:
            raise BrokenRow(file, number, f"{len(cells)} columns separated by tabs instead of two ids")
        ids.add((cells[0].strip(), cells[1].strip()))
    return ids


def _lines(file: Path) -> Iterable[tuple[int, str]]:
    """Yield the lines of a UTF-8 file with their numbers, without a byte order mark and empty lines at the end."""
    try:
        lines = file.read_bytes().removeprefix(b"\xef\xbb\xbf").rstrip(b"\r\n").split(b"\n")
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        try:
            yield number, line.rstrip(b"\r").decode()
        except UnicodeDecodeError as error:
            raise BrokenRow(file, number, f"it is not UTF-8 at byte {error.start + 1}") from error


def hub_is_cached() -> bool:
    """Return whether the hub's copy has been fetched and prepared on this machine."""
    from huggingface_hub.constants import HF_HOME

    # Computed here, because importing the library takes seconds, and this runs before every training.
    cache = os.environ.get("HF_DATASETS_CACHE") or os.path.join(HF_HOME, "datasets")
    # The library keeps VERSION/HASH/*.arrow there.
    return any(Path(cache, _HUB_NAME[0].replace("/", "___"), _HUB_NAME[1]).glob("*/*/*.arrow"))


def read_hub() -> Splits:
    """Read the hub's copy through ``datasets``, which fetches it where it is not cached."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()  # or each rank says that it uses the cache
    both = (datasets.load_dataset(*_HUB_NAME, split=split) for split in ("train", "validation"))
    train, dev = ([_from_hub(row) for row in rows] for rows in both)
    return Splits(train, dev)


def _from_hub(row: dict[str, Any]) -> Pair:
    return Pair((str(row["idx"]), ""), row["sentence1"], row["sentence2"], int(row["label"]))


class TokenizedPairs(Dataset[dict[str, Any]]):
    """Pairs as rows of a model's inputs. Their fingerprint, which a checkpoint keeps, covers every token and label."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows = rows
        self.fingerprint = hashlib.sha256(repr(rows).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each pair."""
        return [len(row["input_ids"]) for row in self.rows]


def tokenize(tokenizer: Any, pairs: Sequence[Pair], max_length: int) -> TokenizedPairs:
    """Return the pairs as at most `max_length` tokens each.

    Where the tokenizer would put nothing between the two sentences, a new line stands there.
    """
    first, second = [pair.first for pair in pairs], [pair.second for pair in pairs]
    texts: tuple[list[str], ...] = (first, second)
    if tokenizer.num_special_tokens_to_add(pair=True) == tokenizer.num_special_tokens_to_add(pair=False):
        texts = ([f"{one}\n{other}" for one, other in zip(first, second, strict=True)],)
    encoded = tokenizer(*texts, truncation=True, max_length=max_length)
    rows = [dict(zip(encoded, row, strict=True)) for row in zip(*encoded.values(), strict=True)]
    return TokenizedPairs([{**row, "label": pair.label} for row, pair in zip(rows, pairs, strict=True)])


def f1_score(true_positives: float, predicted: float, positives: float) -> float:
    """Return F1 of the class 1, given its true positives, predictions and samples, as counts or shares."""
    return 2 * true_positives / (predicted + positives) if predicted + positives else 0.0


def majority_baseline(train: Sequence[Pair], dev: Sequence[Pair]) -> dict[str, float]:
    """Return accuracy and F1 of always answering with the more frequent class of `train`, on the pairs of `dev`."""
    answer = int(2 * sum(pair.label for pair in train) >= len(train))
    positives = sum(pair.label for pair in dev) / len(dev)
    f1 = f1_score(positives * answer, answer, positives)
    return {"majority_accuracy": positives if answer else 1 - positives, "majority_f1": f1}
