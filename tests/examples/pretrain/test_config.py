"""The command line: which options there are, and which of their values are refused."""

import dataclasses
import re

import pytest

from examples.pretrain.__main__ import main
from examples.pretrain.errors import UsageError
from examples.pretrain.recipes import DEMOS, find_config, parse
from tests.examples.pretrain import tiny


@pytest.mark.parametrize("name", [*DEMOS, "125m-orscale"])
def test_help_explains_every_option(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")  # Narrow: one panel below another.
    with pytest.raises(SystemExit) as exit:
        main(["--recipe", name, "--help"])
    assert exit.value.code == 0
    shown = re.sub(r"[│─╭╮╰╯\s]+", " ", capsys.readouterr().out)
    _, shown = shown.split("show this help message and exit")
    option = r"--([a-z][a-z0-9.-]*)(?:, --\S*no-\S+| \S+| \[.*?\])? ([A-Z].*?) \(default"
    explained = {n.replace("-", "_"): text for n, text in re.findall(option, shown)}
    assert explained.keys() == find_config(name).to_dict().keys()
    # Tyro gives a field without a comment that of the field above.
    assert len(set(explained.values())) == len(explained)


@pytest.mark.parametrize("name", [*DEMOS, "16b-a3b-orscale", "cifar10-orscale-vision"])
def test_a_recipe_without_other_options_is_what_its_name_says(name):
    assert parse(["--recipe", name], "") == find_config(name)
    assert parse([], "") == DEMOS["text"]


def test_options_override_the_recipes():
    options = "--steps 10 --warmup-steps 2 --model.layers 3 --optimizer adamw lamb"
    config = parse(["--recipe", "125m-orscale", *options.split()], "")
    assert config.recipe.steps == 10
    assert config.model.layers == 3
    assert [config.recipe_of(name).optimizer for name in config.optimizer] == [
        "adamw",
        "lamb",
    ]
    expected = find_config("125m-orscale").to_dict()
    expected |= {"steps": 10, "warmup_steps": 2, "model.layers": 3}
    assert config.to_dict() == expected | {"optimizer": ("adamw", "lamb")}


COUNTS = """steps batch_size val_every val_batches per_device_batch loss_chunks log_every
    measure_every checkpoint_every keep mesh.fsdp mesh.data"""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({name: 0}, f"--{name.replace('_', '-')} 0 must be at least 1")
            for name in COUNTS.split()
        ),
        ({"seq_len": -1}, "--seq-len -1 must be at least 1"),
        ({"seed": 2**32}, r"--seed .* below 2\*\*32"),
        ({"seed": -1}, "--seed -1 must be at least 0"),
        ({"warmup_steps": 6}, "--warmup-steps 6 must be below the 6 steps"),
        ({"warmup_steps": -1}, "--warmup-steps -1 must be at least 0"),
        ({"learning_rate": 0.0}, "--learning-rate 0.0 must"),
        ({"learning_rate": float("nan")}, "--learning-rate nan must"),
        ({"adam_learning_rate": -1.0}, "--adam-learning-rate -1.0 must"),
        ({"clip": 0.0}, "--clip 0.0 must be a number above 0"),
        ({"weight_decay": -0.1}, "--weight-decay -0.1 must"),
        ({"momentum": 1.0}, "--momentum 1.0 must be at least 0 and below 1"),
        ({"adam_b1": -0.1}, "--adam-b1 -0.1 must be at least 0 and below 1"),
        ({"adam_b2": float("nan")}, "--adam-b2 nan must be at least 0 and below 1"),
        ({"optimizer": ()}, "--optimizer must name at least one"),
        ({"val_data": ("a",)}, "--val-data needs --data"),
        ({"demo": "demo-moe", "balance_rate": float("inf")}, "--balance-rate inf must"),
    ],
)
def test_impossible_options_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        tiny.config(**changes)


def test_an_impossible_cutout_is_refused():
    with pytest.raises(UsageError, match="--cutout -1 must be at least 0"):
        dataclasses.replace(DEMOS["demo-vision"].recipe, cutout=-1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--lr 1", "Unrecognized options: --lr, 1"),
        # Options of other models.
        ("--recipe demo-vision --seq-len 8", "Unrecognized options: --seq-len, 8"),
        ("--router adamw", "Unrecognized options: --router, adamw"),
        ("--balance-rate 1e-2", "Unrecognized options: --balance-rate, 1e-2"),
        ("--cutout 8", "Unrecognized options: --cutout, 8"),
        ("--rates twice", "twice"),
        ("--steps many", "many"),
        ("--steps 0", "--steps 0 must be at least 1"),
        ("--model.heads 3", "width=128 with heads=3"),
        ("--model.vocab-size 0", "vocab_size=0: choose at least 1"),
        ("--recipe demo-moe --model.kv-rank 0", "kv_rank=0: choose at least 1"),
        ("--recipe sgd", "--recipe sgd is unknown. Choose one of: text, demo, "),
        ("--optimizer sgd", "--optimizer sgd is unknown. Choose one of: adamw, lamb, "),
    ],
)
def test_a_wrong_command_ends_with_a_message(options, message, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    try:
        code = main(options.split())
    except SystemExit as exit:  # Tyro's.
        code = exit.code
    assert code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--data", "--out"])
def test_an_empty_argument_is_refused(option, capsys):
    assert main([option, ""]) == 2
    assert "an argument is empty" in capsys.readouterr().err


NOTHING = "would change nothing with --optimizer"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        # Hyperparameters that no optimizer takes.
        (
            "--optimizer adamw --momentum 0.9",
            f"--momentum 0.9 {NOTHING} adamw. Leave it out, or choose an optimizer that "
            "takes it, such as muon.",
        ),
        ("--optimizer adamw --momentum 0.95", "--momentum 0.95 would change nothing"),
        ("--optimizer adamw muon --r-max 2", "--r-max 2.0 .* --optimizer adamw muon. .*"),
        ("--optimizer unclipped --r_max=2", "--r-max 2.0 would change nothing"),
        ("--optimizer lamb --adam-learning-rate 1", "--adam-learning-rate 1.0 would"),
        # What is for matrices or readings that there are not.
        (
            "--recipe demo-moe --optimizer adamw --router adamw",
            f"--router adamw {NOTHING}",
        ),
        ("--optimizer adamw --measure-every 5", f"--measure-every 5 {NOTHING}"),
    ],
)
def test_what_nothing_would_read_is_refused(options, message):
    with pytest.raises(UsageError, match=message):
        parse(options.split(), "")


@pytest.mark.parametrize(
    "options",
    [
        "--recipe demo-moe --router adamw --balance-rate 1e-4",
        "--recipe demo-vision --cutout 4 --clip 1",
        "--optimizer adamw orscale --r-max 2 --adam-learning-rate 1e-3",
        "--optimizer adamw --r-max None",  # What the recipe has by default.
        "--optimizer adamw orscale --measure-every 5",
        "--optimizer adamw --measure-every None",
    ],
)
def test_options_that_something_reads_are_taken(options):
    parse(options.split(), "")


IMAGES = "--recipe demo-vision --steps 2 --warmup-steps 1 "


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--batch-size 10", "batch of 10 does not divide among 8 devices"),
        ("--per-device-batch 3", "batch of 8 does not divide into .* 8 devices × 3 = 24"),
        ("--mesh.fsdp 3", "--mesh.data 2 × --mesh.fsdp 3 .* are 6 devices"),
        ("--mesh.fsdp 8 --model.width 12", r"--mesh: blocks\.0\..* of shape \(12, 12\)"),
        ("--loss-chunks 7", "--loss-chunks 7 does not divide the vocabulary of 256"),
        ("--optimizer adamw orscale --r-min 3 --r-max 1", "--optimizer orscale: .*r_max"),
        ("--data /nowhere", "/nowhere: no such file"),
        (IMAGES + "--data a b", "--data a b: name one folder"),
        (IMAGES + "--data /nowhere", "/nowhere is no folder"),
        (IMAGES + "--data a --val-data b", "--val-data: CIFAR-10 comes with its own"),
        (IMAGES + "--loss-chunks 2", "--loss-chunks: images have no vocabulary"),
        (IMAGES + "--model.classes 9", "--model.classes 9 must be at least the 10"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_written(
    options, message, tmp_path, capsys
):
    """So that the right command finds the folder as it was."""
    data, out = tiny.write_texts(tmp_path / "texts"), tmp_path / "out"
    text = tiny.arguments(data, out, batch_size=8)
    given = ["--out", str(out)] if options.startswith("--recipe") else text
    assert main([*given, *options.split()]) == 2
    error = capsys.readouterr().err
    assert re.match(f"error: .*{message}", error, re.DOTALL)
    assert not out.exists()
