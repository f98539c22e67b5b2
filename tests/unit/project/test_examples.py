"""The examples run as their docstrings say, and examples ported from other trainers match the original."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline
from drawn import LONG
from paceline.data import GlobalBatchSampler
from processes import paceline as command
from processes import script, strike

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
EXAMPLE = EXAMPLES / "plain_loop.py"
RESILIENT = EXAMPLE.with_name("resilient_loop.py")


def completed(folder: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command, or the `program` in the options, successfully."""
    done = command(folder, *arguments, fork="all", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", **options)
    assert done.returncode == 0, done.stderr
    return done


def accuracy(folder: Path, *arguments: str, **options: Any) -> str:
    done = completed(folder, *arguments, **options)
    assert ("restarting all ranks from step 99" in done.stderr) == ("first" in options)
    [line] = [line for line in done.stdout.splitlines() if "accuracy" in line]
    return line


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The line that the script prints without a launcher."""
    return accuracy(tmp_path_factory.mktemp("alone"), program=(str(EXAMPLE),))


@pytest.mark.slow
def test_the_plain_loop_ends_with_the_same_accuracy_on_two_ranks(alone: str, tmp_path: Path) -> None:
    assert accuracy(tmp_path, "run", "--nproc", "2", str(EXAMPLE)) == alone
    assert alone.startswith("accuracy 0.9")


def test_unmarked_lines_form_an_ordinary_script() -> None:
    _, docstring, code = EXAMPLE.read_text().split('"""', 2)
    assert "Only the lines marked with ## differ" in docstring
    unmarked = [line for line in code.splitlines() if "##" not in line]
    assert not [line for line in unmarked if "paceline" in line or "world" in line]
    # An indented block belongs to its header line, so it is marked as well if that differs.
    lines = code.splitlines()
    heads = [number for number, line in enumerate(lines) if line.strip().startswith("with ") and "##" in line]
    assert heads
    assert all("##" in lines[number + 1] for number in heads)


@pytest.mark.slow
def test_the_resilient_loop_ends_with_the_same_accuracy_if_a_rank_is_killed(alone: str, tmp_path: Path) -> None:
    first = partial(strike, "forward rank=1 at=100")
    assert accuracy(tmp_path, "run", "--nproc", "2", str(RESILIENT), first=first) == alone


@pytest.mark.slow
def test_the_image_folder_is_learned_and_logged(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("tensorboard")
    for label, shade in (("dark", 40), ("light", 200)):
        (tmp_path / "images" / label).mkdir(parents=True)
        for number in range(32):
            image.new("L", (20, 24), shade + number % 30).save(tmp_path / "images" / label / f"{number}.png")
    done = completed(tmp_path, "run", "--nproc", "2", str(EXAMPLES / "image_folder.py"), "images")
    assert "accuracy 100.0%" in done.stdout
    assert list((tmp_path / "runs" / "images").glob("events.*"))


only_long = pytest.mark.skipif(not LONG, reason="each rank imports much: make test-long")
SERVER = EXAMPLES / "parameter_server.py"


@pytest.mark.slow
def test_the_parameter_server_trains_and_plots_both_modes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = completed(tmp_path, "run", "--nproc", "3", str(SERVER), "--seconds", "1")
    asynchronous, synchronous = done.stdout.splitlines()
    match = re.fullmatch(r"asynchronous: (\d+) updates, ([\d.]+) stale on average; loss ([\d.]+)", asynchronous)
    assert match
    # In the long run, the other worker has always sent one gradient between two of a worker's own.
    assert 0 < float(match[2]) < 2
    synced = re.fullmatch(r"synchronous: (\d+) updates, none stale; loss ([\d.]+); see (.*)", synchronous)
    assert synced
    assert int(match[1]) > 0
    assert int(synced[1]) > 0
    assert all(float(loss) < 2.3 for loss in (match[3], synced[2]))  # ln 10 is the loss of guessing among ten classes
    assert (tmp_path / synced[3]).read_bytes().startswith(b"\x89PNG")


EXPERTS = EXAMPLES / "mixture_of_experts.py"


@pytest.mark.slow
def test_the_mixture_of_experts_matches_the_losses_of_one_process(tmp_path: Path) -> None:
    options, sizes = [str(EXPERTS), "--epochs", "2"], (0, 4)
    losses, tables, unused = [], [], []
    for size in sizes:  # 0: without a launcher
        how: Any = {"program": tuple(options)} if size == 0 else {}
        words = [] if size == 0 else ["run", "--nproc", str(size), *options]
        done = completed(tmp_path, *words, **how)
        assert "UnusedParameterWarning" not in done.stderr
        losses.append([float(loss) for loss in re.findall(r"^epoch \d: loss ([\d.]+)$", done.stdout, re.MULTILINE)])
        tables.append(re.findall(r"^expert \d: .*$", done.stdout, re.MULTILINE))
        unused += map(float, re.findall(r"on rank 0 ([\d.]+) of 8 experts had no token", done.stdout))
    alone = losses[0]
    assert len(alone) == 2
    assert alone[1] < 0.2 < alone[0]
    for size, found in zip(sizes, losses, strict=True):
        assert found == pytest.approx(alone, abs=1e-6), size
    assert tables == [tables[0]] * len(sizes)
    assert len(tables[0]) == 8
    assert unused[-1] > unused[0]  # so ranks differed in which experts had gradients


@pytest.mark.slow
def test_tutorial_claims_match_the_docs(tmp_path: Path) -> None:
    done = completed(tmp_path, "run", "--nproc", "2", str(EXAMPLES / "tutorial_claims.py"))
    noise, seeds, sgd, adamw = done.stdout.splitlines()
    assert noise.endswith("replicas differ by 0.0")
    assert re.search(r"differ by 0\.[1-9]\d before wrapping and by 0\.0 after it$", seeds)
    assert sgd.startswith("3. SGD")
    assert sgd.endswith("summing is at 1.00")
    assert adamw.startswith("3. AdamW")
    assert adamw.endswith("summing is at 0.00")


FRAMEWORKS = [
    pytest.param("accelerate_loop", "accelerate", marks=only_long),
    pytest.param("hugging_face_trainer", "transformers", marks=only_long),
    pytest.param("fabric_loop", "lightning_fabric", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "framework"), FRAMEWORKS)
def test_frameworks_train_with_our_wrapper(tmp_path: Path, name: str, framework: str) -> None:
    pytest.importorskip(framework)
    program = tmp_path / "program.py"
    program.write_text(CHECKED.format(example=str(EXAMPLES / f"{name}.py")))
    done = completed(tmp_path, "run", "--nproc", "2", str(program))
    [line] = re.findall(r"^accuracy (0\.9\d*) on 2 ranks$", done.stdout, re.MULTILINE)
    assert float(line) > 0.9
    # Half of the micro-batches are only accumulated, which the framework passes on to our wrapper.
    assert done.stdout.count("forwards of our wrapper: [False, True]") == 2


CHECKED = """
import runpy, torch, paceline
own, forwards = paceline.DistributedDataParallel.forward, []
def counted(self, *arguments, **named):
    forwards.append(self.require_backward_grad_sync)
    return own(self, *arguments, **named)
paceline.DistributedDataParallel.forward = counted
runpy.run_path({example!r}, run_name="__main__")
print("forwards of our wrapper:", sorted(set(forwards)), flush=True)
"""

SCRIPTS = [EXAMPLES / "torchrun_two_hosts.sh", EXAMPLES / "slurm.sbatch"]


@pytest.mark.parametrize(
    ("number", "saves", "code", "is_put_back"),
    [
        (signal.SIGUSR1, True, 0, True),
        (signal.SIGUSR1, False, 0, True),  # before Python handles it, the signal ends the launcher with code 138
        (signal.SIGTERM, True, 85, False),  # a cancelled job is not requeued, although its step is saved
        (signal.SIGTERM, False, 143, False),
    ],
)
def test_the_slurm_job_is_only_requeued_after_its_time_limit_warning(
    tmp_path: Path, number: signal.Signals, saves: bool, code: int, is_put_back: bool
) -> None:
    launcher = "#!/bin/bash\n" + ("trap 'exit 85' USR1 TERM\n" if saves else "")
    launcher += "touch started\nwhile :; do sleep 0.05; done\n"
    for name, text in (("paceline", launcher), ("scontrol", '#!/bin/sh\necho "$@" >> requeued\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "42"}
    job = subprocess.Popen(["bash", str(SCRIPTS[1]), "loop.py"], env=environment, cwd=tmp_path)
    try:
        while not (tmp_path / "started").exists():
            assert job.poll() is None
            time.sleep(0.01)
        job.send_signal(number)
        assert job.wait(60) == code
    finally:
        job.kill()
    assert (tmp_path / "requeued").exists() is is_put_back


# -- examples ported from other trainers -------------------------------------------------------------------------------


EPOCHS = 5
"""Epochs of the autoencoder here, instead of 20."""


def autoencoder_by_hand() -> float:
    """Return the validation loss after a plain PyTorch loop over the same batches."""
    from sklearn.datasets import load_digits

    with paceline.set_seed(0):
        encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 3))
        net = nn.Sequential(encoder, nn.Sequential(nn.Linear(3, 128), nn.ReLU(), nn.Linear(128, 64)))
        images = torch.tensor(load_digits().data / 16, dtype=torch.float32)
        order = torch.randperm(len(images))
    train, val = images[order[:1500]], images[order[1500:]]
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    batches = GlobalBatchSampler(len(train), 50, shuffle=True)
    for _ in range(EPOCHS):
        for batch in batches:
            optimizer.zero_grad()
            F.mse_loss(net(train[batch]), train[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        return F.mse_loss(net(val), val).item()


@pytest.mark.slow
def test_the_autoencoder_matches_a_plain_loop_on_one_and_two_ranks(tmp_path: Path) -> None:
    whole = (EXAMPLES / "autoencoder.py").read_text()
    assert "epochs=20" in whole
    file = script(tmp_path, whole.replace("epochs=20", f"epochs={EPOCHS}"))
    outputs = [completed(tmp_path, program=(file,)), completed(tmp_path, "run", "--nproc", "2", file)]
    losses = [float(re.findall(r"^loss ([\d.]+)$", done.stdout, re.MULTILINE)[0]) for done in outputs]
    assert losses == pytest.approx([autoencoder_by_hand()] * 2, rel=1e-3)
    assert losses[0] < 0.06  # a constant image has 0.07


THEIRS = """
import csv, json, sys
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, Trainer
from transformers import TrainingArguments

model, data, order = sys.argv[1:]
files = {"train": f"{data}/train.tsv", "validation": f"{data}/dev.tsv"}
table = load_dataset("csv", data_files=files, sep="\\t", quoting=csv.QUOTE_NONE)
tokenizer = AutoTokenizer.from_pretrained(model)
table = table.map(lambda rows: tokenizer(rows["#1 String"], rows["#2 String"], truncation=True, max_length=128),
                  batched=True).rename_column("Quality", "label")

class InOrder(Trainer):
    def _get_train_sampler(self, *_):
        return json.loads(order)  # of the same global batches

arguments = TrainingArguments("out", num_train_epochs=1, per_device_train_batch_size=16, learning_rate=5e-3,
                              use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True)
trainer = InOrder(
    AutoModelForSequenceClassification.from_pretrained(model, num_labels=2),
    arguments,
    train_dataset=table["train"],
    eval_dataset=table["validation"],
    data_collator=DataCollatorWithPadding(tokenizer),
    compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())},
)
trainer.train()
found = trainer.evaluate()
print(f"loss {found['eval_loss']:.6f}, accuracy {found['eval_accuracy']:.6f}")
"""


def make_pairs(folder: Path, words: list[str]) -> None:
    """Write MRPC's files; a pair is equivalent if the second sentence contains the first one's word."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    for name, count in (("train", 250), ("dev", 70)):
        lines = ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"]
        for number in range(count):
            chosen = [words[int(index)] for index in torch.randint(len(words), (8,), generator=generator)]
            label = int(words.index(chosen[0]) < len(words) // 2)
            lines.append(f"{label}\t{number}\t{number}\t{chosen[0]} {' '.join(chosen[:label])}\t{' '.join(chosen[1:])}")
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n", "utf-8")


def make_bert(folder: Path, words: list[str]) -> None:
    """Save a small BERT with random weights, without dropout, and its tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    tokens = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *words])}
    tokenizer = Tokenizer(WordLevel(tokens, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    with paceline.set_seed(0):
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
        off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        BertForSequenceClassification(BertConfig(vocab_size=len(tokens), **sizes, **off)).save_pretrained(folder)


def figures(done: subprocess.CompletedProcess[str]) -> dict[str, float]:
    [line] = re.findall(r"^loss .*$", done.stdout, re.MULTILINE)
    return {name: float(value) for name, value in (part.split() for part in line.split(", "))}


@pytest.mark.slow
def test_mrpc_matches_loss_and_accuracy_of_the_hugging_face_trainer(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    words = [f"word{number}" for number in range(20)]
    make_pairs(tmp_path / "data", words)
    make_bert(tmp_path / "model", words)
    folders = [str(tmp_path / "model"), str(tmp_path / "data")]
    order = json.dumps([index for batch in GlobalBatchSampler(250, 16, shuffle=True, seed=42) for index in batch])
    theirs = figures(completed(tmp_path, program=(script(tmp_path, THEIRS), *folders, order)))
    how: Any = ["--model", folders[0], "--data", folders[1], "--epochs", "1", "--batch-size", "16", "--lr", "5e-3"]
    first = partial(import_module, "transformers.models.bert.modeling_bert")  # once, before the ranks are forked
    ours = figures(completed(tmp_path, "run", "--nproc", "2", str(EXAMPLES / "glue_mrpc.py"), *how, first=first))
    assert ours["accuracy"] == theirs["accuracy"]
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-2)
    assert ours["accuracy"] > 0.9
