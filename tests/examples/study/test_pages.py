"""Numbers of the study's pages, and of the README, recomputed from the runs in docs/data.

From the files alone: the programs that made the tables are those of an older commit.
test_contrasts.py compares the pages with the tables that programs still print.
"""

import csv
import functools
import itertools
import pathlib
import re

import numpy as np
import pytest
from scipy import stats

ROOT = pathlib.Path(__file__).parents[3]
STUDY, DATA = ROOT / "docs" / "study", ROOT / "docs" / "data"
DENSE = ("dense-small", "dense-small-small-init", "prose", "prose-small-init")
PAIRED = ("mixture-small", "mixture-small-small-init")
TEXT, THREE = (*DENSE, *PAIRED), ("dense-small", *PAIRED)
LADDER = {1: "experts-1", 4: "experts-4", 8: PAIRED[1], 16: "experts-16",
          32: "experts-32"}  # fmt: skip
EIGHT = (*PAIRED, "experts-4", "experts-16", "experts-32", "like-16b",
         "mixture-large", "mixture-large-small-init")  # fmt: skip
FIVE = (*PAIRED, "experts-4", "experts-16", "experts-32")
LARGE = tuple(f"{kind}-large{init}" for kind in ("dense", "mixture")
              for init in ("", "-small-init"))  # fmt: skip
IMAGES = tuple(f"vision-{size}{init}" for size in ("small", "large")
               for init in ("", "-small-init"))  # fmt: skip
ALL = (*TEXT, *LARGE, *IMAGES)
MUON, RATIO = "muon_moonlight", "OrScale − Muon+Moonlight"
ARMS = {
    "OrScale": "orscale", "Muon+Moonlight": MUON, "Muon (s = 1)": "muon",
    "NorMuon": "normuon", "Hyperball": "hyperball", "one ratio for all": "pooled",
    "decoupled weight decay": "decoupled_weight_decay", "AdamW, two rates": "adamw_apart",
    "One scale for all shapes": "one_scale", "OrScale's mean replayed": "replayed",
    "OrScale, full-rank anchor": "full_rank_anchor", "A scale between": "scale_between",
    "OrScale's ratio on NorMuon": "orscale_on_normuon",
    "Twice the decay": "twice_the_decay", "r* of the class": "model_optimum",
    "Ratio within the class": "ratio_within_class",
    "OrScale, twice the decay": "orscale_twice_the_decay",
}  # fmt: skip
INTERVAL = r"[+-]\d\.\d{{{0}}} \[[+-]\d\.\d{{{0}}}, [+-]\d\.\d{{{0}}}\]"


@functools.cache
def words(page):
    return re.sub(r"\s+", " ", page.read_text())


def tables(page):
    """The tables of a page: columns by heading."""
    for block in re.findall(r"(?:^\|.*\|\n)+", page.read_text(), re.MULTILINE):
        rows = [
            [cell.strip(" *`") for cell in line[1:-1].split(" | ")]
            for line in block.splitlines()
        ]
        yield rows[0], rows[2:]


def the_table(page, heading):
    """The rows of the one table that has this heading."""
    [rows] = [rows for head, rows in tables(STUDY / f"{page}.md") if heading in head]
    return rows


@functools.cache
def rows_of(path):
    with (DATA / f"{path}.csv").open() as file:
        return list(csv.DictReader(file))


@functools.cache
def found(path, arm, seeds=range(100, 112), rate=None):
    """Losses by seed and rates, at the best rates, on the seeds that no search saw.

    Or at one shared rate.
    """
    by_rates = {}
    for row in rows_of(path):
        asked = rate in (None, row["rate"])
        if row["arm"] == arm and int(row["seed"]) in seeds and asked:
            rates = ", ".join(f"{float(row[x]):.3g}" for x in ("rate", "adam_rate"))
            by_rates.setdefault(rates, {})[int(row["seed"])] = float(row["loss"])
    if len(by_rates) > 1:  # A replay asks for runs of OrScale at the replay's rates.
        del by_rates[found(path, "replayed")[0]]
    [(rates, losses)] = by_rates.items()
    return rates, np.array([losses[seed] for seed in sorted(losses)])


def second(name, ours="orscale", theirs=MUON):
    return np.subtract(*(found(f"two_rates/{name}", arm)[1] for arm in (ours, theirs)))


def candidate(name, ours, theirs=MUON, seeds=range(200, 212)):
    both = (found(f"better_rule/{name}", arm, seeds)[1] for arm in (ours, theirs))
    return np.subtract(*both)


def mean(names, *arms, of=second):
    return np.mean([of(name, *arms) for name in names], axis=0)


quantile = functools.cache(functools.partial(stats.t.ppf, 0.975))


def ends(by_seed):
    mean, count = np.mean(by_seed), len(by_seed)
    half = quantile(count - 1) * np.std(by_seed, ddof=1) / count**0.5
    return mean, mean - half, mean + half


def told(by_seed, digits=4):
    mean, low, high = (f"{x:+.{digits}f}" for x in ends(by_seed))
    return f"{mean} [{low}, {high}]"


def counted(differences):
    """In how many workloads a difference is significantly lower and higher."""
    intervals = [ends(by_seed) for by_seed in differences]
    lower = sum(high < 0 for _, _, high in intervals)
    return f"{lower} : {sum(low > 0 for _, low, _ in intervals)}"


def slope(names):
    octaves = np.log2(list(LADDER))
    weights = (octaves - octaves.mean()) / np.sum((octaves - octaves.mean()) ** 2)
    return weights @ np.array([second(name) for name in names])


def decayed(name):
    return candidate(name, "orscale_twice_the_decay", "twice_the_decay", range(300, 312))


def ratio_on_normuon(name):
    return candidate(name, "orscale_on_normuon", "normuon")


def contrast(of=second, mixtures=PAIRED, dense=DENSE):
    return mean(mixtures, of=of) - mean(dense, of=of)


def contrasts():
    gains = [mean(TEXT, "muon"), mean(TEXT, "twice_the_decay", of=candidate)]
    usual, pair = ["mixture-small", "mixture-large"], DENSE[:2]
    small = [name for name in EIGHT if name not in usual]
    yield from (mean(DENSE), mean(EIGHT), mean(small), mean(FIVE), second("like-16b"))
    yield from (mean(usual), contrast(second, PAIRED, pair))
    yield from (contrast(), contrast(decayed))
    yield from (contrast(ratio_on_normuon), second(LADDER[8]) - second(LADDER[1]))
    yield from (contrast(second, LARGE[2:], LARGE[:2]), mean(THREE, "muon", "one_scale"))
    welch = stats.ttest_ind(*gains, equal_var=False).confidence_interval()
    yield np.mean(gains[0]) - np.mean(gains[1]), *welch


def test_what_replicates():
    _, rows = next(tables(STUDY / "two_rates.md"))
    expected = list(contrasts())
    assert len(rows) == len(expected) + 1  # The last needs the surfaces of the searches.
    for (*_, interval), by_seed in zip(rows, expected, strict=False):
        if len(by_seed) == 12:
            assert interval == told(by_seed)
        else:
            assert interval == "{:+.4f} [{:+.4f}, {:+.4f}]".format(*by_seed)


def test_differences_and_rates_of_workloads():
    """In each table of the second study that has a row for each workload."""
    seen = 0
    for heading, rows in tables(STUDY / "two_rates.md"):
        if heading[0] == "workload":
            for name, *cells in rows:
                for title, cell in zip(heading[1:], cells, strict=True):
                    arms = [ARMS[label] for label in title.split(" − ")]
                    rates, _ = found(f"two_rates/{name}", arms[0])
                    assert cell == (told(second(name, *arms)) if arms[1:] else rates)
                    seen += 1
    assert seen == 6 * 3 + 6 * 4 + 11 * 3


def shared(cell, rate=None):
    """At one rate, on the third protocol's ladder: AdamW's best where none is given."""
    rate = rate or ("0.004" if cell == "ladder-1-small-init" else "0.008")
    arms = ("orscale", MUON)
    return np.subtract(
        *(found(f"ladder/{cell}", x, range(400, 416), rate)[1] for x in arms)
    )


def at_equal_rates(rate):
    """On small initial weights: each rung, the step, and the slope from 4 experts on."""
    rungs = [shared(f"ladder-{n}-small-init", rate) for n in (1, 4, 16, 32)]
    return [*rungs, rungs[1] - rungs[0], np.polyfit([2, 4, 5], rungs[1:], 1)[0]]


def test_the_ladder_at_equal_rates():
    rows = the_table("two_rates", "both at 0.004")
    expected = zip(
        *(map(told, at_equal_rates(x)) for x in ("0.004", "0.008")), strict=True
    )
    assert [tuple(cells) for _, *cells in rows] == list(expected)


ROUNDS = ((range(30, 32), range(500, 512)), (range(40, 42), range(512, 524)))
CELLS = [f"ladder-{n}{init}" for init in ("-small-init", "") for n in (1, 4, 16, 32)]
SLOPE = [(x - 2.75) / 14.75 for x in (0, 2, 4, 5)]  # By least squares.
# Means over these cells: of small initial weights, of usual ones; of mixtures; slopes.
INITS = [
    [0.125] * 8,
    *([*a, *b]
      for rungs in ([0.25] * 4, [0, *[1 / 3] * 3], SLOPE)
      for a, b in ((rungs, [0] * 4), ([0] * 4, rungs))),
    [0.25] * 4 + [-0.25] * 4,
]  # fmt: skip


@functools.cache
def searches(cell, arm):
    """Of two searches, losses by fresh seed: at the end, and at the lowest it tried."""
    found = []
    for searched, fresh in ROUNDS:
        tried, confirmed = {}, {}
        for row in rows_of(f"ladder/{cell}"):
            settings = row["rate"], row["adam_rate"], row["decay"]
            for seeds, by_settings in ((searched, tried), (fresh, confirmed)):
                if row["arm"] == arm and (seed := int(row["seed"])) in seeds:
                    by_settings.setdefault(settings, {})[seed] = float(row["loss"])
        lowest = min(tried, key=lambda x: np.mean(list(tried[x].values())))
        [end] = [x for x in confirmed if x != lowest] or [lowest]
        both = [[confirmed[x][seed] for seed in fresh] for x in (end, lowest)]
        found.append((*map(np.array, both), lowest, tried))
    return found


def searched(cell, lowest):
    """OrScale − Muon+Moonlight by seed, of both searches."""
    both = (searches(cell, arm) for arm in ("orscale", MUON))
    return [ours[lowest] - theirs[lowest] for ours, theirs in zip(*both, strict=True)]


def told_of_searches(weights, lowest=False, digits=4):
    """With the variance of the seeds, and of what two searches of a cell differ by."""
    pairs = [searched(cell, lowest) for cell in CELLS]
    beyond = [
        ((x.mean() - y.mean()) ** 2 - stats.sem(x) ** 2 - stats.sem(y) ** 2) / 2
        for x, y in pairs
    ]
    rounds = [sum(w * x[i] for w, x in zip(weights, pairs, strict=True)) for i in (0, 1)]
    variance = sum(stats.sem(x) ** 2 for x in rounds) / 4
    variance += max(0, np.mean(beyond)) * sum(w * w for w in weights) / 2
    mean, half = np.mean(rounds), quantile(8) * variance**0.5
    mean, low, high = (f"{x:+.{digits}f}" for x in (mean, mean - half, mean + half))
    return f"{mean} [{low}, {high}]"


def anchored(cell, arm="largest_anchor"):
    """After a first batch of 8 sequences, another anchor minus the paper's."""
    few = f"ladder/{cell}-first-batch-8"
    where = (f"ladder/{cell}", "orscale") if arm == "waited" else (few, arm)
    seeds = range(700, 712)
    return np.subtract(found(*where, seeds)[1], found(few, "orscale", seeds)[1])


def known():
    """Intervals that the second study's sentences may have, to four digits."""
    arms = ["orscale", MUON, "muon", "normuon", "hyperball", "replayed", "pooled",
            "full_rank_anchor", "orscale_on_normuon"]  # fmt: skip
    for ours, theirs in itertools.permutations(arms, 2):
        whole = {"orscale", MUON, "muon", "normuon"}
        groups = [[name] for name in THREE] + [THREE]
        if {ours, theirs} <= whole:
            groups += [TEXT, DENSE, PAIRED]
        if {ours, theirs} == {"orscale", "pooled"}:
            groups += [FIVE]
        yield from (told(mean(names, ours, theirs)) for names in groups)
    rungs = [
        mean([f"ladder-{n}", f"ladder-{n}-small-init"], of=shared) for n in (1, 4, 16, 32)
    ]
    yield from (told(np.polyfit([0, 2, 4, 5], rungs, 1)[0]), told(rungs[1] - rungs[0]))
    repaired = (shared("ladder-1-small-init", "0.008") + shared("ladder-1")) / 2
    yield told(np.polyfit([0, 2, 4, 5], [repaired, *rungs[1:]], 1)[0])
    yield told(rungs[1] - repaired)
    for rungs in (SLOPE, [-1, 1, 0, 0], [1, 0, 0, 0]):
        weights = [float(x) / 2 for x in (*rungs, *rungs)]
        yield from (told_of_searches(weights, lowest) for lowest in (False, True))
    yield from (told_of_searches(weights, lowest=True) for weights in INITS)
    few = [f"ladder-{n}{init}" for init in ("-small-init", "") for n in (4, 16, 32)]
    waited = functools.partial(anchored, arm="waited")
    yield told(mean(few, of=anchored))
    yield told(mean(few, of=anchored) - mean(few, of=waited))
    low = [few[2], few[3]]  # Below the pilots' threshold.
    yield told(-mean(low, of=waited))
    yield told(-mean([cell for cell in few if cell not in low], of=waited))
    later = "experts-32-first-batch-64"
    yield told(second("like-16b-first-batch-64"))
    yield told(slope([*list(LADDER.values())[:-1], later]))
    yield from (told(mean(x, of=decayed)) for x in (TEXT, DENSE, PAIRED))
    yield from (told(mean(x, of=ratio_on_normuon)) for x in (DENSE, PAIRED))
    yield from (told(contrast(decayed)), told(contrast()))
    for seeds in (range(200, 212), range(300, 312)):
        of = functools.partial(candidate, ours="twice_the_decay", seeds=seeds)
        yield told(mean(TEXT, of=of))
    for control, sign in (("replayed", 1), ("full_rank_anchor", -1)):  # At equal rates.
        of_all = []
        for name in THREE:
            rates, losses = found(f"two_rates/{name}", control)
            rows = [
                (int(row["seed"]), float(row["loss"]))
                for row in rows_of(f"two_rates/{name}")
                if row["arm"] == "orscale" and int(row["seed"]) >= 100
                and rates == f"{float(row['rate']):.3g}, {float(row['adam_rate']):.3g}"
            ]  # fmt: skip
            of_all.append(sign * (np.array([loss for _, loss in sorted(rows)]) - losses))
        yield told(np.mean(of_all, axis=0))


@pytest.mark.parametrize("page", ["two_rates", "better_rule_protocol"])
def test_intervals_in_sentences(page):
    table = {interval for *_, interval in next(tables(STUDY / "two_rates.md"))[1]}
    text = re.sub(r"(?m)^\|.*$", "", (STUDY / f"{page}.md").read_text())
    intervals = re.findall(INTERVAL.format(4), re.sub(r"\s+", " ", text))
    assert len(intervals) > 7 and set(intervals) <= {*table, *known()}


SEARCHED_TWICE = {"adamw", MUON, "orscale", "pooled", "replayed", "full_rank_anchor"}


@functools.cache
def first_losses(name, arm, column):
    """Of five seeds, at AdamW's best rate, at twice it, or at the optimizer's own."""
    by_arm = {}
    for row in rows_of(name):
        rates = by_arm.setdefault(row["arm"], {})
        rates.setdefault(float(row["rate"]), {})[int(row["seed"])] = float(row["loss"])

    def best(arm):
        seeds = range(5) if arm in SEARCHED_TWICE else range(1)
        whole = {r: x for r, x in by_arm[arm].items() if set(seeds) <= set(x)}
        return min(whole, key=lambda rate: sum(whole[rate][seed] for seed in seeds))

    times = 4 if arm in ("muon", "hyperball") else {"twice": 2}.get(column, 1)
    rate = best(arm) if column == "own" else times * best("adamw")
    return np.array([by_arm[arm][rate][seed] for seed in range(5)])


def first(one, other, names=ALL):
    """Differences of two optimizers, each with a column, by workload and seed."""
    return [first_losses(n, *one) - first_losses(n, *other) for n in names]


def kinds():
    small = [n for n in (*TEXT, *LARGE) if n.endswith("-small-init")]
    usual = [n for n in (*TEXT, *LARGE) if n not in small]
    return [[*TEXT, *LARGE], IMAGES, small, usual]


def test_the_main_differences_of_the_first_study():
    rows = the_table("does_it_work", "text")
    ours, theirs = ("orscale", "inherited"), (MUON, "inherited")
    text, images, small, usual = kinds()
    apart = [(f"{arm}_apart", "own") for arm in ("orscale", MUON)]
    pairs = [(ours, theirs), (("orscale", "own"), (MUON, "own")), apart,
             ((MUON, "twice"), ours)]  # fmt: skip
    for (_, *cells), pair in zip([rows[0], *rows[3:]], pairs, strict=True):
        expected = []
        for names in (ALL, text, images):
            differences = first(*pair, names)
            expected += [told(np.mean(differences, axis=0), 3), counted(differences)]
        assert cells == expected
    for (_, _, _, interval, counts, *_), names in zip(
        rows[1:3], (small, usual), strict=True
    ):
        differences = first(ours, theirs, names)
        assert interval == told(np.mean(differences, axis=0), 3)
        assert counts == counted(differences)


SUMMARIES = ["README.md", "docs/index.md", "docs/results.md", "docs/study/index.md"]


@pytest.mark.parametrize("page", SUMMARIES)
def test_intervals_of_summaries(page):
    """Three or four digits, in whatever words."""
    ours, theirs = ("orscale", "inherited"), (MUON, "inherited")
    _, *parts = kinds()
    of = [x for x in contrasts() if len(x) == 12]
    of += [mean(TEXT, arm) for arm in ("orscale", "muon", "normuon")]
    of += [mean(TEXT, MUON, "adamw_apart"), second("experts-32-first-batch-64")]
    of += [np.mean(first(ours, theirs, names), axis=0) for names in parts]
    shown = {told(by_seed, digits) for by_seed in of for digits in (3, 4)}
    shown |= {told_of_searches(w, True, digits) for w in INITS for digits in (3, 4)}
    shown |= {*known()}
    intervals = re.findall(INTERVAL.format("3,4"), words(ROOT / page))
    assert {*intervals} <= shown


def test_muon_at_twice_adamws_rate():
    """Its gain over AdamW, without a sign, beside that at AdamW's own rate."""
    text, images, *_ = kinds()
    pages = {page: words(ROOT / page) for page in ("README.md", "docs/results.md")}
    for names in (text, images):
        by_seed = -np.mean(first((MUON, "twice"), ("adamw", "inherited"), names), axis=0)
        mean, low, high = (f"{x:.3f}" for x in ends(by_seed))
        for page in pages.values():
            assert mean in page and f"[{low}, {high}]" in page
        same = -np.mean(first((MUON, "inherited"), ("adamw", "inherited"), names))
        assert f"{same:.3f}" in pages["docs/results.md"]


def passed_after(name, seed, twice=False):
    """The share of the steps after which Muon is at AdamW's final loss."""

    def curve(arm):
        rates = {}
        for row in rows_of(name):
            if row["arm"] == arm and int(row["seed"]) < 5:
                rates.setdefault(row["rate"], {})[int(row["seed"])] = row
        whole = [by_seed for by_seed in rates.values() if len(by_seed) == 5]
        best = min(whole, key=lambda x: sum(float(row["loss"]) for row in x.values()))
        at = best[seed]
        if twice and arm == MUON:
            rate = f"{2 * float(curve('adamw')['rate']):.6g}"
            at = rates[rate][seed]
        return at

    ours, theirs = (
        list(map(float, curve(arm)["losses"].split())) for arm in (MUON, "adamw")
    )
    target = theirs[-1]
    i = next(i for i, loss in enumerate(ours) if loss <= target)
    return (i + (ours[i - 1] - target) / (ours[i - 1] - ours[i])) / len(ours)


def test_how_early_muon_passes_adamw():
    readme = words(ROOT / "README.md")
    for twice in (True, False):
        shares = 100 * np.array(
            [[passed_after(n, seed, twice) for seed in range(5)] for n in ALL]
        )
        mean, low, high = ends(shares.mean(axis=0))
        assert f"after {mean:.0f} % of the steps (" in readme
        assert f"{low:.0f} to {high:.0f} %" in readme
    by_workload = shares.mean(axis=1)
    assert f"({min(by_workload):.0f} to {max(by_workload):.0f} %)" in readme
