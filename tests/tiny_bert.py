"""A BERT small enough for tests, whose tokenizer has learnt its words from MRPC."""

from __future__ import annotations

from pathlib import Path

from paceline.core.processes.world import World


def make_bert(world: World, data: str, folder: str) -> None:
    """Write the configuration of a BERT with dropout, and its tokenizer. Only ranks import transformers."""
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertConfig

    from paceline.tools.recipes.pairs import read_folder

    pieces = BertWordPieceTokenizer()
    pairs = read_folder(Path(data)).train[:500]
    pieces.train_from_iterator((pair.first for pair in pairs), vocab_size=500, show_progress=False)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertConfig(vocab_size=500, **sizes).save_pretrained(folder)
    pieces.save(f"{folder}/tokenizer.json")
