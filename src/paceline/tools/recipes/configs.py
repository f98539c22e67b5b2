"""The recipes' configurations: each field is an option, and is checked before any rank starts.

Importing this needs no torch, because ``paceline train RECIPE --help`` does; checking may need it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from paceline.core import hub
from paceline.core.option_rules import choice, positive
from paceline.errors import MissingExtra, UsageError
from paceline.launch.program import option
from paceline.tools.recipes.training_options import TrainingOptions

if TYPE_CHECKING:
    from paceline.tools.recipes.language_model.text import Corpus, Tokenizer
    from paceline.tools.recipes.paraphrases.data import Splits
    from paceline.tools.recipes.paraphrases.model import Source

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-360M-Instruct"
HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
ON_THE_HUB = "glue/mrpc"


@dataclass(frozen=True)
class DigitsConfig(TrainingOptions):
    """The options of ``paceline train digits``."""

    passes: ClassVar[int] = 20
    epochs: int | None = option(None, f"Passes over the training data; {passes} by default, without --max-steps.")
    warmup_steps: int = option(10, "Steps in which the learning rate rises.")
    decay: str = option("linear", "How the learning rate falls afterwards: none, linear, cosine or wsd.", "RULE")

    def check(self) -> None:
        """Refuse options that cannot work, before any rank starts.

        Raises:
            UsageError: names the option, its value and the remedy.
            MissingExtra: if scikit-learn is not installed.
        """
        super().check()
        if find_spec("sklearn") is None:
            raise MissingExtra("scikit-learn", "digits", "the digits recipe")


@dataclass(frozen=True)
class LmConfig(TrainingOptions):
    """The options of ``paceline train lm``."""

    passes: ClassVar[int] = 2
    epochs: int | None = option(None, f"Passes over the training data; {passes} by default, without --max-steps.")
    batch_size: int = option(16, "Global batch: sequences per step, all ranks.")
    lr: float = option(0.02, "Learning rate of the recipe's own model.")
    model_lr: float = option(0.00005, "Learning rate of --model, in place of --lr.")
    warmup_steps: int = option(100, "Steps in which the learning rate rises.")
    decay: str = option("linear", "How the learning rate falls afterwards: none, linear, cosine or wsd.", "RULE")
    data: str | None = option(None, "Text in UTF-8; required. Its last tenth is for validation.", "FILE")
    tokenizer: str | None = option(
        None, "chars (the default), bpe, or a folder with tokenizer.json; --model brings its own.", "chars|bpe|DIR"
    )
    vocabulary: int = option(1024, "Tokens that --tokenizer bpe learns from the text.")
    context: int = option(128, "Tokens in a sequence.")
    width: int = option(128, "Width of the recipe's own model.")
    layers: int = option(4, "Its layers.")
    heads: int = option(4, "Its attention heads.")
    model: str | None = option(None, "A causal model of Hugging Face instead: name on the hub, or folder.", "NAME|DIR")
    model_dtype: str = option(
        "float32", "Numbers of --model: float32, or bfloat16 for half the memory, weights included.", "DTYPE"
    )
    sample: int = option(256, "Tokens to write at the end; 0 for none.")

    def check(self) -> None:
        """Refuse options that cannot work, before any rank starts.

        Raises:
            UsageError: names the option, its value and the remedy.
            MissingExtra: if a package is not installed.
        """
        super().check()
        positive("--model-lr", self.model_lr)
        choice("--model-dtype", self.model_dtype, ("float32", "bfloat16"))
        for name, least in (
            ("context", 1),
            ("width", 1),
            ("layers", 1),
            ("heads", 1),
            ("sample", 0),
            # A byte-level BPE begins with a token for each byte.
            ("vocabulary", 256),
        ):
            if getattr(self, name) < least:
                raise UsageError(f"--{name} must be at least {least}, not {getattr(self, name)}")
        # The recipe's model turns the dimensions of a head in pairs, see gpt.rotate().
        if self.width % (2 * self.heads):
            raise UsageError(f"--width {self.width} must be a multiple of twice --heads {self.heads}")
        for name in ("tokenizer", "model"):
            if getattr(self, name) == "":
                raise UsageError(f"--{name} must not be empty; give it a value, or leave it out")
        if self.model is not None and find_spec("transformers") is None:
            raise MissingExtra("transformers", "recipes", "--model")
        if self.model is None and self.model_dtype != "float32":
            raise UsageError(f"--model-dtype {self.model_dtype} is for --model; give one, or leave it out")
        from paceline.tools.recipes.hugging_face import check_fitting, folder_of

        # Made to be checked: each rank makes its own.
        corpus = self.corpus()
        if self.model is not None:
            check_fitting(folder_of(self.model), corpus.tokenizer.size, self.context)

    def corpus(self) -> Corpus:
        """Read the text, and cut it into windows of tokens.

        Raises:
            UsageError: if text or tokenizer cannot be had, or the text is too short.
            MissingExtra: if a package is not installed.
        """
        from paceline.tools.recipes.language_model.text import make_corpus, read_text

        text = read_text(self.data)
        return make_corpus(text, self._tokenizer(text), self.context)

    def _tokenizer(self, text: str) -> Tokenizer:
        """Return the tokenizer that the options ask for."""
        from paceline.tools.recipes.hugging_face import folder_of
        from paceline.tools.recipes.language_model.text import Characters, Subwords, learn_subwords, split, tokenizer_in

        match self.tokenizer:
            case None if self.model is not None:
                return Subwords.load(tokenizer_in(folder_of(self.model), "--model"))
            case None | "chars":
                return Characters(text)
            case "bpe":
                return learn_subwords(split(text)[0], self.vocabulary)
            case folder:
                return Subwords.load(tokenizer_in(Path(folder), "--tokenizer"))


@dataclass(frozen=True)
class MrpcConfig(TrainingOptions):
    """The options of ``paceline train mrpc``."""

    batch_size: int = option(16, "Global batch: sentence pairs per step, all ranks.")
    lr: float = option(2e-5, "Learning rate.")
    warmup_steps: int = option(50, "Steps in which the learning rate rises.")
    decay: str = option("cosine", "How the learning rate falls afterwards: none, linear, cosine or wsd.", "RULE")
    clip_norm: float | None = option(1.0, "Largest norm of the gradient.")
    model: str = option(DEFAULT_MODEL, "Hugging Face model: a folder, or a name on the hub.", "NAME|DIR")
    random_init: str | None = option(
        None, "Random weights instead: a folder with config.json and tokenizer, or the configuration.", "DIR|FILE"
    )
    data: str = option(ON_THE_HUB, "Folder with MRPC's TSV files, or glue/mrpc for the hub's copy.", "DIR")
    max_length: int = option(128, "Tokens of a pair, at most.")
    weight_decay: float = option(0.01, "Of AdamW, for matrices.")
    dropout: float | None = option(None, "Probability of dropout; the model's own by default.")
    balance: bool = option(False, "Split batches among ranks by padded length instead of count.")

    def check(self) -> None:
        """Refuse options that cannot work, before any rank starts, and fetch absent models and data from the hub.

        Raises:
            UsageError: names the option, its value and the remedy.
            MissingExtra: if a package is not installed.
        """
        super().check()
        if self.max_length < 8:
            raise UsageError(f"--max-length must be at least 8, not {self.max_length}")
        if not 0 <= self.weight_decay < 1:
            raise UsageError(f"--weight-decay must be at least 0 and below 1, not {self.weight_decay}")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise UsageError(f"--dropout must be at least 0 and below 1, not {self.dropout}")
        if self.balance and self.virtual_ranks is not None:
            raise UsageError(
                f"--balance cuts batches into unlike slices for the ranks, --virtual-ranks {self.virtual_ranks} into "
                "equal ones for any number of them; leave one of the two out"
            )
        needed = ["transformers", "tokenizers"] + (["datasets"] if not Path(self.data).is_dir() else [])
        for package in needed:
            if find_spec(package) is None:
                raise MissingExtra(package, "recipes", "the mrpc recipe")
        # Once, here, and together, so that one line names everything that is absent where there is no network.
        hub.fetch_all([each for each in (self._absent_model(), self._absent_data()) if each is not None])
        # Read to be checked, so that a broken row is told of before ranks start.
        if Path(self.data).is_dir():
            self.pairs()

    def _absent_model(self) -> hub.Absent | None:
        """Return the model, if it must be fetched; check the files of one that is on this machine."""
        if self.random_init is not None and self.model != DEFAULT_MODEL:
            raise UsageError("--model loads weights and --random-init makes them; leave one of them out")
        if self.random_init is not None or Path(self.model).is_dir():
            self.source()
            return None
        if not HUB_NAME.fullmatch(self.model):
            raise UsageError(f"--model {self.model} is neither a folder nor the name of a model on the hub")
        if hub.cached_model(self.model) is not None:
            return None
        return hub.Absent(
            f"the model {self.model}",
            "--model FOLDER (a model saved with its tokenizer) or --random-init FOLDER (config.json and tokenizer)",
            lambda: hub.fetch_model(self.model),
        )

    def _absent_data(self) -> hub.Absent | None:
        """Return the data, if they must be fetched."""
        from paceline.tools.recipes.paraphrases import data as mrpc_data

        if Path(self.data).is_dir():
            return None
        if self.data != ON_THE_HUB:
            raise UsageError(f"--data {self.data}: there is no such folder; give MRPC's, or {ON_THE_HUB} for the hub's")
        if mrpc_data.hub_is_cached():
            return None
        return hub.Absent(f"the data {ON_THE_HUB}", "--data FOLDER (with MRPC's TSV files)", mrpc_data.read_hub)

    def source(self) -> Source:
        """Return the files of the model.

        Raises:
            UsageError: if something is not there.
        """
        from paceline.tools.recipes.paraphrases.model import random_source, source_in

        if self.random_init is not None:
            return random_source(Path(self.random_init))
        folder = Path(self.model) if Path(self.model).is_dir() else hub.cached_model(self.model)
        if folder is None:
            raise UsageError(f"the model {self.model} is not in the cache of the Hugging Face hub on this machine")
        return source_in(folder, "--model")

    def pairs(self) -> Splits:
        """Read the data.

        Raises:
            UsageError: if they cannot be read.
        """
        from paceline.tools.recipes.paraphrases import data as mrpc_data

        return mrpc_data.read_folder(Path(self.data)) if Path(self.data).is_dir() else mrpc_data.read_hub()
