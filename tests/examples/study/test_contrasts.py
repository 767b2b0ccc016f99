"""What README says of the study, recomputed from the runs in docs/data by NumPy alone."""

import csv
import re

import numpy as np
import pytest
from scipy import stats

from examples.study import contrasts, repeat
from examples.study.results import Runs
from examples.study.statistics import markdown
from tests.examples.pretrain.tiny import ROOT

DATA = ROOT / "docs" / "data"
DENSE = ["dense-small", "dense-small-small-init", "prose", "prose-small-init"]
PAIRED = ["mixture-small", "mixture-small-small-init"]
MIXTURES = [*PAIRED, "experts-4", "experts-16", "experts-32"]
IMAGES = [
    f"vision-{x}" for x in ("small", "large", "small-small-init", "large-small-init")
]
USUAL = ["dense-small", "dense-large", "prose", "mixture-small", "mixture-large"]
SMALL = [f"{name}-small-init" for name in USUAL]
MUON = "muon_moonlight"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def losses(table, arm, seeds):
    """From the file itself: the losses of some seeds by rates, where all were run."""
    found = {}
    with (DATA / f"{table}.csv").open() as file:
        for row in csv.DictReader(file):
            if row["arm"] == arm and int(row["seed"]) in seeds:
                rates = row["rate"], row.get("adam_rate")
                found.setdefault(rates, {})[int(row["seed"])] = float(row["loss"])
    return {
        rates: np.array([of[seed] for seed in seeds])
        for rates, of in found.items()
        if len(of) == len(seeds)
    }


def searched(table, ours, theirs=MUON, seeds=range(100, 112)):
    """By seed, at the rates of both that a search found."""
    both = []
    for arm in (ours, theirs):
        found = losses(table, arm, seeds)
        if len(found) > 1:  # OrScale was also run at the rates of its replay.
            [replay] = losses(table, "replayed", seeds)
            del found[replay]
        both += found.values()
    return np.subtract(*both)


def second(names, ours="orscale", theirs=MUON):
    return np.mean([searched(f"two_rates/{n}", ours, theirs) for n in names], axis=0)


def candidates(ours, theirs, first):
    """Mixtures minus dense, in the runs for a better rule."""
    seeds = range(first, first + 12)
    mixtures, dense = (
        np.mean([searched(f"better_rule/{n}", ours, theirs, seeds) for n in x], axis=0)
        for x in (PAIRED, DENSE)
    )
    return mixtures - dense


def at_adamws(names, ours="orscale", theirs=MUON, times=1):
    """In the first study, at AdamW's best rate, or theirs at a multiple of it."""
    found = []
    for name in names:
        adamw, one, other = (
            losses(name, arm, range(5)) for arm in ("adamw", ours, theirs)
        )
        best = min(adamw, key=lambda rates: adamw[rates].mean())
        of = {float(rate): x for (rate, _), x in other.items()}
        found.append(one[best] - of[times * float(best[0])])
    return np.mean(found, axis=0)


def shown(by_seed, digits=3):
    ends = stats.ttest_1samp(by_seed, 0).confidence_interval(0.95)
    mean, low, high = (f"{x:+.{digits}f}" for x in (np.mean(by_seed), *ends))
    return f"{mean} [{low}, {high}]"


def test_the_table_of_the_readme():
    text = (ROOT / "README.md").read_text()
    _, table = text.split("| models | mean, 95 % interval | asked |\n")
    rows = [[cell.strip() for cell in line.strip()[1:-1].split("|")]
            for line in table.split("\n\n")[0].splitlines()[1:]]  # fmt: skip
    decayed = candidates("orscale_twice_the_decay", "twice_the_decay", 300)
    on_normuon = candidates("orscale_on_normuon", "normuon", 200)
    muon = second([*DENSE, *PAIRED], "muon")
    assert [row[2] for row in rows] == [
        shown(second(DENSE)),
        shown(second(MIXTURES)),
        shown(second(PAIRED) - second(DENSE)),
        f"{shown(decayed)}; {shown(on_normuon)}",
        "; ".join(shown(at_adamws(names)) for names in (IMAGES, SMALL, USUAL)),
        shown(muon),
    ]
    words = re.sub(r"\s+", " ", text)
    assert f"s = 1 gains {-muon.mean():.3f} nats on text" in words
    twice = at_adamws([*IMAGES, *SMALL, *USUAL], times=2)
    _, low, high = re.findall(r"[\d.]+", shown(twice))
    told = (
        f"{twice.mean():.3f} nats below that of `orscale` at AdamW's rate (95 % interval"
    )
    assert f"{told} [{low}, {high}])" in words
    for rate, arm in (("0.032", "muon"), ("0.016", "normuon")):
        for name in DENSE:
            [(found, _)] = losses(f"two_rates/{name}", arm, range(100, 112))
            assert found == rate


def test_the_programs_table_is_that_of_the_files():
    found = {(label, over): str(x) for label, over, x in contrasts.contrasts()}
    two = "OrScale − Muon+Moonlight"
    expected = {
        (two, "four dense models"): second(DENSE),
        (two, "five mixtures"): second(MIXTURES),
        (two, "mixtures minus dense: the six of text"): second(PAIRED) - second(DENSE),
        (two, "8 experts minus 1"): second(PAIRED[1:]) - second(["experts-1"]),
        (two, "images, AdamW's rate"): at_adamws(IMAGES),
        ("OrScale's ratio on NorMuon − NorMuon",
         "mixtures minus dense, seeds 200 to 211"):
            candidates("orscale_on_normuon", "normuon", 200),
        ("Muon (s = 1) − Muon+Moonlight", "six of text"):
            second([*DENSE, *PAIRED], "muon"),
    }  # fmt: skip
    for row, by_seed in expected.items():
        assert found[row] == shown(by_seed, digits=4)
    assert len(found) == 14


def test_the_ladder_with_the_tokens_of_the_first_batch():
    rows = {row[0].strip("`"): row[1:] for row in contrasts.first_batch()}
    tokens = {"experts-1": 512, "experts-4": 256, PAIRED[1]: 128, "experts-16": 64,
              "experts-32": 32, "like-16b": 64, "experts-32-first-batch-64": 256,
              "like-16b-first-batch-64": 512}  # fmt: skip
    for name, count in tokens.items():
        assert rows[name][0] == str(count)
        assert rows[name][2] == shown(second([name]), digits=4)
    for title, last in (("", "experts-32"), (", 64 sequences at 32", [*tokens][6])):
        rungs = [second([name]) for name in [*list(tokens)[:4], last]]
        slopes = [stats.linregress([0, 2, 3, 4, 5], x).slope for x in np.transpose(rungs)]
        told = rows[f"slope for a doubling of the experts{title}"][2]
        assert told == shown(slopes, digits=4)


def test_a_repeat_has_the_settings_of_the_table(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(
        Runs, "losses", lambda self, settings, seeds: asked.append((settings, seeds))
    )
    repeat.repeat("dense-small", "orscale", tmp_path)
    assert asked == [((0.016, 0.064, None), range(100, 112))]


def test_a_table_is_markdown():
    found = markdown(("", "a"), [("x", "1"), ("y", "2")])
    assert found == "|  | a |\n| --- | --: |\n| x | 1 |\n| y | 2 |"
