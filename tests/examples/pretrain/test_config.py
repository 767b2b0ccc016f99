import dataclasses
import re

import pytest

from examples.pretrain.__main__ import main
from examples.pretrain.config import Config, UsageError


def test_help_explains_every_option(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as exit:
        main(["--help"])
    assert exit.value.code == 0
    shown = re.sub(r"[│\s]+", " ", capsys.readouterr().out)
    _, shown = shown.split("show this help message and exit")
    explained = dict(re.findall(r"--([a-z][a-z-]*) .*?([A-Z][a-z].*?) \(default", shown))
    names = [field.name.replace("_", "-") for field in dataclasses.fields(Config)]
    assert list(explained) == names
    # Tyro gives a field without a comment that of the field above.
    assert len(set(explained.values())) == len(names)


@pytest.mark.parametrize(
    "options", [["--lr", "1"], ["--arms", "sgd"], ["--steps", "many"], ["stray"]]
)
def test_unknown_options_and_values_are_refused(options, capsys):
    with pytest.raises(SystemExit) as exit:
        main(options)
    assert exit.value.code != 0
    assert options[-1] in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "--steps 0 must be at least 1"),
        ({"seq_len": -1}, "--seq-len -1 must be at least 1"),
        ({"vocab_size": 0}, "--vocab-size 0 must be at least 1"),
        ({"seed": 2**32}, r"--seed .* below 2\*\*32"),
        ({"seed": -1}, "--seed -1 must be at least 0"),
        ({"warmup_steps": 200}, "--warmup-steps 200 must be below --steps 200"),
        ({"learning_rate": 0.0}, "--learning-rate 0.0 must"),
        ({"learning_rate": float("nan")}, "--learning-rate nan must"),
        ({"weight_decay": -0.1}, "--weight-decay -0.1 must"),
        ({"heads": 3}, r"--width 128 must be a multiple of 2 \* --heads 3"),
        ({"arms": ()}, "--arms .* at least one"),
        ({"val_data": ("a",)}, "--val-data .* needs --data"),
    ],
)
def test_impossible_options_are_refused(changes, message):
    defaults = {"steps": 200, "warmup_steps": 20, "width": 128}
    with pytest.raises(UsageError, match=message):
        Config(**(defaults | changes))
