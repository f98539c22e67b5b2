"""The recipes' configurations: each field is an option, and is checked before any rank starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from paceline.core.option_rules import choice, flag_of, text, whole_number
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

    summary: ClassVar[str] = "Train a small classifier of handwritten digits, in seconds, on CPU or GPU."
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

    summary: ClassVar[str] = (
        "Train a language model on a text file: a compact GPT in minutes, or a causal model of Hugging Face."
    )
    passes: ClassVar[int] = 2
    batch_size: int = changed("batch_size", 16)
    lr: float = option(0.02, "Learning rate; about 0.00005 suits a --model.")
    warmup_steps: int = changed("warmup_steps", 100)
    decay: str = changed("decay", "linear")
    data: str | None = option(None, "Text in UTF-8; required. Its last tenth is for validation.", "FILE")
    context: int = option(128, "Tokens in a sequence.")
    width: int = option(128, "Width of the recipe's own model, whose tokens are characters.")
    layers: int = option(4, "Its layers.")
    heads: int = option(4, "Its attention heads.")
    model: str | None = option(
        None, "A causal model of Hugging Face instead, with its tokenizer: name on the hub, or folder.", "NAME|DIR"
    )
    model_dtype: str = option(
        "float32", "Numbers of --model: float32, or bfloat16 for half the memory, weights included.", "DTYPE"
    )
    sample: int = option(256, "Tokens to write at the end; 0 for none.")

    def check(self) -> None:
        super().check()
        choice("--model-dtype", self.model_dtype, ("float32", "bfloat16"))
        for name, least in {"context": 1, "width": 1, "layers": 1, "heads": 1, "sample": 0}.items():
            whole_number(flag_of(name), getattr(self, name), least)
        # The recipe's model turns the dimensions of a head in pairs, see gpt.rotate().
        if self.width % (2 * self.heads):
            raise UsageError(f"--width {self.width} must be a multiple of twice --heads {self.heads}")
        if self.model is not None:
            text("--model", self.model)
            validate_installed(("transformers",), "recipes", "--model")
        elif self.model_dtype != "float32":
            raise UsageError(f"--model-dtype {self.model_dtype} is for --model; give one, or leave it out")
        self.corpus()  # made to be checked: each rank makes its own

    def folder(self) -> Path:
        """Return the folder of ``--model``, which is fetched if it is a name on the hub."""
        from paceline.tools.recipes.hugging_face import absent_model, folder_of

        hub.fetch_all(absent_model(self.model or "", "--model DIR, the folder of a model"))
        return folder_of(self.model or "")

    def corpus(self) -> Corpus:
        """Read the text, and cut it into windows of tokens."""
        from paceline.tools.recipes.text import Characters, Subwords, make_corpus, read_text

        content = read_text(self.data)
        tokenizer = Characters(content) if self.model is None else Subwords(self.folder())
        return make_corpus(content, tokenizer, self.context)


@dataclass(frozen=True)
class MrpcConfig(TrainingOptions):
    """The options of ``paceline train mrpc``."""

    summary: ClassVar[str] = "Train a Hugging Face model to tell paraphrases, on GLUE's MRPC."
    batch_size: int = changed("batch_size", 16)
    lr: float = changed("lr", 2e-5)
    warmup_steps: int = changed("warmup_steps", 50)
    decay: str = changed("decay", "cosine")
    clip_norm: float | None = changed("clip_norm", 1.0)
    model: str = option(DEFAULT_MODEL, "Hugging Face model: a folder, or a name on the hub.", "NAME|DIR")
    random_init: str | None = option(None, "Random weights instead: a folder with config.json and tokenizer.", "DIR")
    data: str = option(ON_THE_HUB, "Folder with MRPC's TSV files, or glue/mrpc for the hub's copy.", "DIR")
    max_length: int = option(128, "Tokens of a pair, at most.")
    weight_decay: float = option(0.01, "Of AdamW, for matrices.")
    dropout: float | None = option(None, "Probability of dropout; the model's own by default.")
    balance: bool = option(False, "Split batches among ranks by padded length instead of count.")

    def check(self) -> None:
        from paceline.tools.recipes import pairs
        from paceline.tools.recipes.hugging_face import absent_model

        super().check()
        whole_number("--max-length", self.max_length, least=8)
        for name in ("weight_decay", "dropout"):
            if (value := getattr(self, name)) is not None and not 0 <= value < 1:
                raise UsageError(f"{flag_of(name)} must be at least 0 and below 1, not {value}")
        if self.balance and self.virtual_ranks is not None:
            raise UsageError(
                f"--balance cuts batches into unlike slices for the ranks, --virtual-ranks {self.virtual_ranks} into "
                "equal ones for any number of them; leave one of the two out"
            )
        if self.random_init is not None and self.model != DEFAULT_MODEL:
            raise UsageError("--model loads weights and --random-init makes them; leave one of them out")
        in_folder = Path(self.data).is_dir()
        validate_installed(("transformers", *(() if in_folder else ("datasets",))), "recipes", "the mrpc recipe")
        if not in_folder and self.data != ON_THE_HUB:
            raise UsageError(f"--data {self.data}: there is no such folder; give MRPC's, or {ON_THE_HUB} for the hub's")
        remedy = "--model FOLDER (a model saved with its tokenizer) or --random-init FOLDER (config.json and tokenizer)"
        absent = absent_model(self.model, remedy) if self.random_init is None else []
        if not in_folder and not pairs.hub_is_cached():
            absent.append(hub.Absent(f"the data {ON_THE_HUB}", "--data FOLDER (with MRPC's TSV files)", pairs.read_hub))
        # Once, here, and together, so that one line names everything that is absent where there is no network.
        hub.fetch_all(absent)
        self.folder()
        if in_folder:
            self.pairs()  # read to be checked, so that a broken row is reported before ranks start

    def folder(self) -> Path:
        """Return the folder with configuration, tokenizer and, without ``--random-init``, weights."""
        from paceline.tools.recipes.hugging_face import folder_of

        return folder_of(self.model) if self.random_init is None else folder_of(self.random_init, "--random-init")

    def pairs(self) -> Splits:
        from paceline.tools.recipes import pairs

        return pairs.read_folder(Path(self.data)) if Path(self.data).is_dir() else pairs.read_hub()
