"""The recipes' configurations: each field is an option, checked before any rank starts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from paceline.core.option_rules import flag_of, whole_number
from paceline.errors import UsageError
from paceline.tools.recipes.options import TrainingOptions, changed, validate_installed
from paceline.tools.shared import hub
from paceline.tools.shared.program import option

if TYPE_CHECKING:
    from paceline.tools.recipes.pairs import Splits
    from paceline.tools.recipes.text import Corpus

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-360M-Instruct"
ON_THE_HUB = "glue/mrpc"


@dataclass(frozen=True)
class DigitsConfig(TrainingOptions):
    """The options of ``paceline train digits``."""

    summary: ClassVar[str] = "Train a small classifier of handwritten digits in seconds, on CPU or GPU."
    needs: ClassVar[tuple[str, ...]] = ("sklearn.datasets", "sklearn.model_selection")
    passes: ClassVar[int] = 20
    warmup_steps: int = changed("warmup_steps", 10)
    decay: str = changed("decay", "linear")

    def check(self) -> None:
        super().check()
        validate_installed(("sklearn",), "digits", "the digits recipe")


@dataclass(frozen=True)
class LmConfig(TrainingOptions):
    """The options of ``paceline train lm``."""

    summary: ClassVar[str] = "Train a compact GPT on the characters of a text file, in minutes."
    passes: ClassVar[int] = 2
    batch_size: int = changed("batch_size", 16)
    lr: float = changed("lr", 0.02)
    warmup_steps: int = changed("warmup_steps", 100)
    decay: str = changed("decay", "linear")
    data: str | None = option(None, "Required: a UTF-8 text file. Its last tenth is for validation.", "FILE")
    context: int = option(128, "Tokens in a sequence.")
    width: int = option(128, "Width of the model.")
    layers: int = option(4, "Number of layers.")
    heads: int = option(4, "Number of attention heads.")
    sample: int = option(256, "Tokens to generate at the end; 0 for none.")

    def check(self) -> None:
        super().check()
        for name, minimum in {"context": 1, "width": 1, "layers": 1, "heads": 1, "sample": 0}.items():
            whole_number(flag_of(name), getattr(self, name), minimum)
        if self.width % (2 * self.heads):  # gpt.rotate() rotates pairs of a head's dimensions
            raise UsageError(f"--width {self.width} must be a multiple of twice --heads {self.heads}")
        if self.sharded:
            raise UsageError("--sharded cannot shard Muon, which updates whole matrices; leave it out")
        self.corpus()  # to check it before ranks start; each rank reads it again

    def corpus(self) -> Corpus:
        """Read the text, and cut it into windows of tokens."""
        from paceline.tools.recipes.text import make_corpus, read_text

        return make_corpus(read_text(self.data), self.context)


@dataclass(frozen=True)
class MrpcConfig(TrainingOptions):
    """The options of ``paceline train mrpc``."""

    summary: ClassVar[str] = "Train a Hugging Face model to recognize paraphrases, on GLUE's MRPC."
    batch_size: int = changed("batch_size", 16)
    lr: float = changed("lr", 2e-5)
    warmup_steps: int = changed("warmup_steps", 50)
    decay: str = changed("decay", "cosine")
    clip_norm: float | None = changed("clip_norm", 1.0)
    model: str = option(DEFAULT_MODEL, "Hugging Face model: a folder, or a name on the hub.", "NAME|DIR")
    random_init: str | None = option(None, "Start from random weights: folder with config.json and tokenizer.", "DIR")
    data: str = option(ON_THE_HUB, "Folder with MRPC's TSV files, or glue/mrpc for the hub's copy.", "DIR")
    max_length: int = option(128, "Maximum number of tokens in a pair.")
    dropout: float | None = option(None, "Dropout probability. Default: the model's.")
    balance: bool = option(False, "Balance padded lengths between ranks instead of pair counts.")

    def check(self) -> None:
        from paceline.tools.recipes import pairs

        super().check()
        whole_number("--max-length", self.max_length, minimum=8)
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise UsageError(f"--dropout must be at least 0 and below 1, not {self.dropout}")
        if self.balance and self.virtual_ranks is not None:
            raise UsageError(
                f"--balance cuts batches into unequal slices, but --virtual-ranks {self.virtual_ranks} needs equal "
                "ones; leave one of them out"
            )
        if self.random_init is not None and self.model != DEFAULT_MODEL:
            raise UsageError("--model and --random-init exclude each other; leave one of them out")
        in_folder = Path(self.data).is_dir()
        validate_installed(("transformers", *(() if in_folder else ("datasets",))), "recipes", "the mrpc recipe")
        if not in_folder and self.data != ON_THE_HUB:
            raise UsageError(
                f"--data {self.data}: no such folder; give MRPC's folder, or {ON_THE_HUB} for the hub's copy"
            )
        remedy = "--model FOLDER (a model saved with its tokenizer) or --random-init FOLDER (config.json and tokenizer)"
        if self.random_init is None and not Path(self.model).is_dir() and hub.cached_model(self.model) is None:
            hub.fetch(f"the model {self.model}", remedy, partial(hub.fetch_model, self.model))
        if not in_folder and not pairs.hub_is_cached():
            hub.fetch(f"the data {ON_THE_HUB}", "--data FOLDER (with MRPC's TSV files)", pairs.read_hub)
        self.folder()
        if in_folder:
            self.pairs()  # reports a broken row before ranks start

    def folder(self) -> Path:
        """Return the folder with configuration, tokenizer and, without ``--random-init``, weights."""
        from paceline.tools.recipes.hugging_face import folder_of

        return folder_of(self.model) if self.random_init is None else folder_of(self.random_init, "--random-init")

    def pairs(self) -> Splits:
        from paceline.tools.recipes import pairs

        return pairs.read_folder(Path(self.data)) if Path(self.data).is_dir() else pairs.read_hub()
