"""The page of the second protocol, and what the README says of it, from the tables."""

import csv
import dataclasses
import functools
import re
import statistics

import numpy as np
import pytest
from PIL import Image
from scipy import stats

from examples import figure_style as style
from examples.study import questions, two_rates
from examples.study.arms import KNOWN
from examples.study.plan import Runs
from examples.study.questions import FIRST, LIST, MARGIN, MIXTURES, SECOND
from examples.study.records import Cell, difference, read_records
from examples.study.second import JOBS, LARGE, REFERENCE, SMALLER, TEXTS, job_of
from examples.study.second_figures import FIGURES
from examples.study.second_tables import TABLES
from examples.study.selection import redrawn
from examples.study.statistics import NOT_TOLD, WORSE, endpoint
from examples.study.workloads import KNOWN_WORKLOADS, LADDER
from tests.examples.pretrain.tiny import ROOT

FOLDER = ROOT / "docs" / "data" / "two_rates"
PAGE = (ROOT / "docs" / "study" / "two_rates.md").read_text()
TEXT = re.sub(r"\s+", " ", PAGE)
README = re.sub(r"\s+", " ", (ROOT / "README.md").read_text())
POOLED = "pooled"


@pytest.fixture(scope="module")
def found():
    """What the tables hold; no run is done for it."""

    def refuse(self):
        raise AssertionError("A run would be done.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runs, "_trainer", property(refuse))
        return two_rates.read(FOLDER)


@functools.cache
def cells_of(name):
    """The lines of a table of the page, as lists of cells."""
    [table] = re.findall(rf"<!-- table: {name} -->\n(.*?)<!-- end -->", PAGE, re.DOTALL)
    lines = table.splitlines()[2:]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]


@functools.cache
def by_rates(workload, arm, first_seed=100):
    """From the table itself: losses of the seeds that no search saw, by both rates."""
    losses = {}
    with (FOLDER / f"{workload}.csv").open() as file:
        for row in csv.DictReader(file):
            if row["arm"] == arm and int(row["seed"]) >= first_seed:
                rates = row["rate"], row["adam_rate"]
                losses.setdefault(rates, {})[int(row["seed"])] = float(row["loss"])
    return losses


def losses(workload, arm):
    """Losses by seed and rates of an arm; None if a seed is missing.

    A replay asks for more runs of OrScale, at the rates of its own.
    """
    seeds = set(job_of(workload, arm).seeds)
    whole = {rates: x for rates, x in by_rates(workload, arm).items() if set(x) == seeds}
    if len(whole) > 1:
        replay = set(by_rates(workload, "replayed"))
        whole = {rates: x for rates, x in whole.items() if rates not in replay} or whole
    return next(((x, rates) for rates, x in whole.items()), None)


def by_hand(differences):
    mean = statistics.fmean(differences)
    error = stats.sem(differences) * stats.t.ppf(0.975, len(differences) - 1)
    return mean, mean - error, mean + error


def in_words(differences):
    return "{:+.4f} [{:+.4f}, {:+.4f}]".format(*by_hand(differences))


def of_workload(name, other=REFERENCE, ours="orscale"):
    """Differences by seed; None unless both arms are complete."""
    both = losses(name, ours), losses(name, other)
    if None in both:
        return None
    (ours, _), (theirs, _) = both
    return [ours[seed] - theirs[seed] for seed in sorted(ours)]


def means(differences):
    return list(map(statistics.fmean, zip(*differences, strict=True)))


def test_the_page_has_the_tables_of_the_results(found):
    assert sorted(re.findall(r"<!-- table: (\w+) -->", PAGE)) == sorted(TABLES)
    assert two_rates.with_tables(PAGE, found) == PAGE


@pytest.mark.parametrize(
    "question, margin, verdict", [(FIRST, MARGIN, WORSE), (SECOND, 0.0, NOT_TOLD)]
)
def test_the_endpoints(found, question, margin, verdict):
    names = TEXTS if question is FIRST else MIXTURES
    differences = [of_workload(name, question.theirs) for name in names]
    mean, low, high = by_hand(means(differences))
    answer = questions.comparison(question, found.records)
    assert answer.average == pytest.approx((mean, low, high))
    assert endpoint(answer.average, margin) == verdict
    ends = [by_hand(by_seed)[1:] for by_seed in differences]
    lower, higher = sum(x < 0 for _, x in ends), sum(x > 0 for x, _ in ends)
    assert (answer.lower, answer.higher) == (lower, higher)
    [row] = [row for row in cells_of("endpoints") if row[1] == question.over]
    assert row[2:] == [in_words(means(differences)), f"{lower} : {higher}", verdict]
    assert f"{mean:+.4f} nats, with a 95 % interval of [{low:+.4f}, {high:+.4f}]" in TEXT


def test_the_counts_in_words():
    assert "significantly higher in 3 workloads and significantly lower in 1." in TEXT
    assert "significantly lower in 1 workload and significantly higher in 1." in TEXT
    assert [row[3] for row in cells_of("endpoints")] == ["1 : 3", "1 : 1"]


def sums_of_the_list():
    """A number for each seed for each question, by other ways; None where incomplete."""

    def mean(names, ours="orscale", theirs=REFERENCE):
        found = [of_workload(name, theirs, ours) for name in names]
        return None if None in found else means(found)

    dense, mixture = (
        mean([f"{name}{init}" for init in ("", "-small-init")])
        for name in ("dense-small", "mixture-small")
    )
    rungs = [of_workload(name) for name in LADDER.values()]
    slopes = [
        stats.linregress([0, 2, 3, 4, 5], by_workload).slope
        for by_workload in zip(*rungs, strict=True)
    ]
    longer = [
        [f"{name}-{steps}-steps" for name in ("dense-small", "mixture-small-small-init")]
        for steps in (1200, 4800)
    ]
    return [
        [x - y for x, y in zip(mixture, dense, strict=True)],
        slopes,
        mean(["like-16b"]),
        mean(["vision-small-small-init", "vision-large-small-init"]),
        mean(longer[0]),
        mean(longer[1], theirs="decoupled_weight_decay"),
        mean(TEXTS, "muon"),
        mean(TEXTS, "normuon"),
        mean(SMALLER, "one_scale"),
        mean(SMALLER, "full_rank_anchor", "orscale"),
        mean(SMALLER, "orscale", "replayed"),
        mean(SMALLER, "orscale_on_normuon", "normuon"),
    ]


def test_the_list_with_holms_correction():
    sums = sums_of_the_list()
    complete = {i: by_seed for i, by_seed in enumerate(sums) if by_seed is not None}
    p = {i: float(stats.ttest_1samp(x, 0).pvalue) for i, x in complete.items()}
    corrected, largest = {}, 0.0
    for rank, i in enumerate(sorted(p, key=p.__getitem__), 1):
        largest = max(largest, min(1.0, p[i] * (len(sums) - rank + 1)))
        corrected[i] = largest
    rows = cells_of("list")
    assert len(rows) == len(LIST) == len(sums) == 12
    for i, row in enumerate(rows):
        if i not in complete:
            assert row[2:] == ["not complete", "", "", "", ""]
            continue
        side = "higher" if statistics.fmean(complete[i]) > 0 else "lower"
        sure = side if corrected[i] < 0.05 else "no"
        numbers = [f"{x[i]:.2g}" for x in (p, corrected)]
        assert [row[2], *row[4:]] == [in_words(complete[i]), *numbers, sure]


@pytest.mark.parametrize(
    "table, names, other",
    [("text", TEXTS, REFERENCE), ("mixtures", MIXTURES, POOLED)],
)
def test_rates_and_differences_of_the_endpoints(table, names, other):
    for name, row in zip(names, cells_of(table), strict=True):
        pairs = [losses(name, arm)[1] for arm in ("orscale", other)]
        rates = [", ".join(f"{float(rate):.3g}" for rate in pair) for pair in pairs]
        assert row == [f"`{name}`", *rates, in_words(of_workload(name, other))]


def test_muon_without_moonlights_scale():
    """Ahead of Muon+Moonlight in all workloads, and of OrScale in five."""
    higher = []
    for name, row in zip(TEXTS, cells_of("scales"), strict=True):
        rates = ", ".join(f"{float(rate):.3g}" for rate in losses(name, "muon")[1])
        ours = of_workload(name, ours="muon")
        theirs = of_workload(name, "muon")
        assert row == [f"`{name}`", rates, in_words(ours), in_words(theirs)]
        assert by_hand(ours)[2] < 0
        higher.append(by_hand(theirs)[1] > 0)
        assert float(losses(name, "muon")[1][0]) == 0.032
    assert higher == [True] * 5 + [False] and by_hand(theirs)[2] > 0
    assert "OrScale is ahead of Muon with s = 1 on none of the six" in README
    times = [
        float(losses(n, "muon")[1][0]) / float(losses(n, REFERENCE)[1][0]) for n in TEXTS
    ]
    assert times == [2] * 6
    ratio = statistics.fmean(means([of_workload(n, ours="muon") for n in TEXTS]))
    one_scale = [
        means([of_workload(name, other, "one_scale") for name in SMALLER])
        for other in (REFERENCE, "muon")
    ]
    assert f"({in_words(one_scale[0])})" in TEXT
    assert f"({in_words(one_scale[1])}, exploratory)" in TEXT
    shape, decay = map(statistics.fmean, one_scale)
    assert 0.4 < -shape / (decay - shape) < 0.5  # "About half".
    assert -3.5 < ratio / statistics.fmean(means(map(of_workload, TEXTS))) < -3


def test_normuon():
    """Ahead of Muon+Moonlight on dense models, level on mixtures."""
    against_muon = {}
    for name, row in zip(TEXTS, cells_of("neurons"), strict=True):
        rates = ", ".join(f"{float(rate):.3g}" for rate in losses(name, "normuon")[1])
        ours = of_workload(name, ours="normuon")
        against_muon[name] = of_workload(name, "muon", "normuon")
        numbers = in_words(ours), in_words(against_muon[name])
        assert row == [f"`{name}`", rates, *numbers]
        _, low, high = by_hand(ours)
        assert low < 0 < high if "mixture" in name else high < 0
    dense, mixtures = TEXTS[:4], TEXTS[4:]
    gained = [of_workload(name, ours="normuon") for name in dense]
    assert f"by {in_words(means(gained))} over the four" in TEXT
    for names, place in ((dense, "on the dense models"), (mixtures, "on the mixtures")):
        assert f"{place}, {with_counts([against_muon[n] for n in names])}" in TEXT
    with_ratio = [of_workload(n, "normuon", "orscale_on_normuon") for n in SMALLER]
    for numbers in (*with_ratio, means(with_ratio)):
        assert in_words(numbers) in TEXT
    for other in (REFERENCE, "orscale", "muon"):
        ahead = [of_workload(n, other, "orscale_on_normuon") for n in SMALLER]
        assert f"by {with_counts(ahead)}" in TEXT and by_hand(means(ahead))[2] < 0
        if other == REFERENCE:
            assert all(by_hand(numbers)[2] < 0 for numbers in ahead)
    for name, best in zip(SMALLER, ("normuon", "muon", "muon"), strict=True):
        _, low, high = by_hand(of_workload(name, best, "orscale_on_normuon"))
        assert low < 0 < high  # Level with what the first table has.
    rates = [losses(name, "normuon")[1] for name in TEXTS]
    assert {rate for rate, _ in rates} == {"0.016"} and rates[2][1] == "0.0452548"


def test_hyperball():
    """Best of all but with small initial weights, where it is far behind."""
    dense, mixture, small = (of_workload(n, REFERENCE, "hyperball") for n in SMALLER)
    assert f"by {in_words(dense)} on `dense-small` and {in_words(mixture)} on" in TEXT
    assert f"behind Muon+Moonlight by {in_words(small)}, many times" in TEXT
    usual = SMALLER[:2]
    ahead = [of_workload(name, "normuon", "hyperball") for name in usual]
    assert f"of NorMuon by {in_words(ahead[0])} and {in_words(ahead[1])};" in TEXT
    for name in usual:
        arms = [
            arm for arm in KNOWN if arm in {j.arm for j in JOBS if j.workload == name}
        ]
        found = {arm: losses(name, arm) for arm in arms}
        best = {arm: statistics.fmean(x[0].values()) for arm, x in found.items() if x}
        assert min(best, key=best.get) == "hyperball"
        _, low, high = by_hand(of_workload(name, "orscale_on_normuon", "hyperball"))
        assert low < 0 < high
    rates = [", ".join(losses(name, "hyperball")[1]) for name in usual]
    assert rates == ["0.032, 0.0452548", "0.0452548, 0.064"]
    _, low, high = by_hand(of_workload("mixture-small", "muon", "hyperball"))
    assert low < 0 < high  # Level with what the first table has.


def with_counts(differences):
    """The mean over workloads, and in how many it is lower and higher by itself."""
    ends = [by_hand(by_seed)[1:] for by_seed in differences]
    lower, higher = sum(x < 0 for _, x in ends), sum(x > 0 for x, _ in ends)
    return f"{in_words(means(differences))} ({lower} : {higher})"


def sums_in_words(question):
    return in_words(sums_of_the_list()[question - 1])


def test_what_of_the_ratio_counts():
    """A replay of OrScale's mean is not behind it, nor is the full-rank anchor."""

    def of_smaller(other, ours):
        return [of_workload(name, other, ours) for name in SMALLER]

    against_replay = of_smaller("replayed", "orscale")
    for numbers in (*against_replay, means(against_replay)):
        assert in_words(numbers) in TEXT
    assert f"OrScale − replay is {with_counts(against_replay)}, " in TEXT
    [*rates] = (losses(name, "replayed")[1] for name in SMALLER)
    assert rates == [losses(name, "full_rank_anchor")[1] for name in SMALLER]
    there = [by_rates(n, "orscale")[at] for n, at in zip(SMALLER, rates, strict=True)]
    equal = {
        control: [
            [sign * (of[seed] - theirs[seed]) for seed in sorted(of)]
            for of, name in zip(there, SMALLER, strict=True)
            for theirs in [losses(name, control)[0]]
        ]
        for control, sign in (("replayed", 1), ("full_rank_anchor", -1))
    }
    for control, between in (("replayed", ", and"), ("full_rank_anchor", ", and")):
        whole, dense = with_counts(equal[control]), in_words(equal[control][0])
        assert f"At equal rates it is {whole}{between} {dense} on `dense-small`" in TEXT
    assert [by_hand(x)[1] > 0 for x in against_replay] == [True, False, False]
    assert f"by {with_counts(of_smaller(REFERENCE, 'replayed'))}." in TEXT
    anchored = of_smaller("orscale", "full_rank_anchor")
    mean, counts = with_counts(anchored).split(" (")
    assert f"{mean} against OrScale ({counts}, most" in TEXT
    assert f"`dense-small` ({in_words(anchored[0])})" in TEXT
    assert [by_hand(x)[2] < 0 for x in anchored] == [True, False, False]
    ahead = of_smaller(REFERENCE, "full_rank_anchor")
    assert f"by {with_counts(ahead)}: in none" in TEXT
    assert [by_hand(x)[2] < 0 for x in ahead] == [False, False, True]
    assert not any(by_hand(x)[1] > 0 for x in ahead)
    verdicts = [row[6] for row in cells_of("list")]
    assert [verdicts[i - 1] for i in (6, 10, 11)] == ["no"] * 3
    assert f"({sums_in_words(6)}): what the coupling" in TEXT
    one = of_workload("dense-small", POOLED)
    assert f"by {in_words(one)}." in TEXT and by_hand(one)[1] > 0


def test_the_ladder():
    for (experts, name), row in zip(LADDER.items(), cells_of("ladder"), strict=True):
        numbers = [in_words(of_workload(name, other)) for other in (REFERENCE, POOLED)]
        assert row == [str(experts), *numbers]


def test_other_workloads_and_what_has_no_verdict():
    for row in cells_of("others"):
        assert row[3] == in_words(of_workload(row[0].strip("`")))
    longest = [f"{name}-4800-steps" for name in ("dense-small", SMALLER[2])]
    expected = [
        (TEXTS, "adamw_apart"), (["like-16b"], "adamw_apart"), (SMALLER, "hyperball"),
        (LARGE, "orscale"), (longest, "orscale"),
    ]  # fmt: skip
    for (names, arm), row in zip(expected, cells_of("reported"), strict=True):
        found = [of_workload(name, ours=arm) for name in names]
        complete = None not in found
        assert row[2] == (in_words(means(found)) if complete else "not complete")


def test_the_lowest_losses():
    labels = {KNOWN[job.arm].label: job.arm for job in JOBS}
    assert len(cells_of("lowest")) == len({job.workload for job in JOBS})
    for row in cells_of("lowest"):
        name, best = row[0].strip("`"), labels[row[1]]
        arms = {job.arm for job in JOBS if job.workload == name}
        assert row[4] == str(len(arms))
        mean = {arm: statistics.fmean(losses(name, arm)[0].values()) for arm in arms}
        assert min(mean, key=mean.get) == best
        assert row[2] == ", ".join(f"{float(x):.3g}" for x in losses(name, best)[1])
        level = []
        for arm in arms - {best}:
            _, low, high = by_hand(of_workload(name, best, arm))
            if low < 0 < high:
                level.append(arm)
        level.sort(key=mean.get)
        assert row[3] == ("; ".join(KNOWN[arm].label for arm in level) or "–")


def test_how_much_of_the_first_endpoint_is_the_choice_of_rates():
    """OrScale at the rates for which a replay asked, on the same fresh seeds."""
    [at] = by_rates("dense-small", "replayed")
    there = {n: by_rates(n, "orscale")[at] for n in ("dense-small", "mixture-small")}
    chosen = losses("dense-small", "orscale")[0]
    muon = {name: losses(name, REFERENCE)[0] for name in there}
    lower = [there["dense-small"][seed] - chosen[seed] for seed in chosen]
    assert f"chose, by {in_words(lower)}, and not significantly different" in TEXT
    found = {name: of_workload(name) for name in TEXTS}
    for name, of in there.items():
        found[name] = [of[seed] - muon[name][seed] for seed in sorted(of)]
    assert f"from Muon+Moonlight's ({in_words(found['dense-small'])})" in TEXT
    assert f"over the six would be {in_words(means(found.values()))}." in TEXT
    mixture, dense = (
        means([found[f"{kind}{init}"] for init in ("", "-small-init")])
        for kind in ("mixture-small", "dense-small")
    )
    first = [x - y for x, y in zip(mixture, dense, strict=True)]
    assert f"does not hang on it ({in_words(first)} with" in TEXT


def test_what_decoupling_the_decay_does_to_the_weights():
    def mean(name, arm, column):
        with (FOLDER / f"{name}-4800-steps.csv").open() as file:
            rows = [r for r in csv.DictReader(file) if r["arm"] == arm]
        return statistics.fmean(float(r[column]) for r in rows if int(r["seed"]) >= 100)

    arms = ("decoupled_weight_decay", "orscale")
    (dense, coupled), (mixture, of_mixture) = (
        [[mean(name, arm, column) for column in ("growth", "at_bound")] for arm in arms]
        for name in ("dense-small", SMALLER[2])
    )
    grown = "(to {:.2f} times the initial ones, instead of {:.2f}, on the dense model; "
    grown += "{:.2f} instead of {:.2f} on the mixture)"
    assert grown.format(dense[0], coupled[0], mixture[0], of_mixture[0]) in TEXT
    shares = [round(100 * of[1]) for of in (dense, coupled, mixture, of_mixture)]
    assert shares[1] == 0
    told = f"({shares[0]} % instead of none; {shares[2]} % instead of {shares[3]} %)"
    assert told in TEXT


def test_searches_are_counted_and_their_best_rates_are_those_of_the_fresh_seeds(found):
    labels = {KNOWN[job.arm].label: job.arm for job in JOBS}
    for row in cells_of("searches"):
        name, arm = row[0].strip("`"), labels[row[1]]
        rates = ", ".join(f"{float(rate):.3g}" for rate in losses(name, arm)[1])
        assert row[2] == rates
        record = found.records[Cell(name, arm)]
        with (FOLDER / f"{name}.csv").open() as file:
            rows = [r for r in csv.DictReader(file) if r["arm"] == arm]
        fresh = [r for r in rows if int(r["seed"]) >= 100]
        pairs = {(r["rate"], r["adam_rate"]) for r in rows if r not in fresh}
        # A replay asks for runs of OrScale that its own search has not asked for.
        of_replay = by_rates(name, "replayed", 20) if arm == "orscale" else {}
        assert len(pairs - set(of_replay)) <= int(row[3]) <= len(pairs)
        assert int(row[3]) == len(record.searched)
        best = map(float, losses(name, arm)[1])
        tried = np.array([list(map(float, pair)) for pair in pairs])
        axes = zip(tried.min(axis=0), best, tried.max(axis=0), strict=True)
        inside = all(low < rate < high for low, rate, high in axes)
        assert row[4] == ("yes" if inside else "no")
        counts = [sum(int(r["diverged"]) for r in x) for x in (rows, fresh)]
        assert row[5].startswith(f"{counts[0] - counts[1]} of ")


def test_classes_and_their_agreement(found):
    logs = {}
    with (FOLDER / "classes.csv").open() as file:
        for row in csv.DictReader(file):
            pair = np.log([float(row["ratio"]), float(row["optimum"])])
            key = row["workload"], row["arm"], row["class"]
            logs.setdefault(key, []).append(pair)
    mean = {key: np.exp(np.mean(pairs, axis=0)) for key, pairs in logs.items()}
    for row in cells_of("agreement"):
        name = row[0].strip("`")
        pairs = [x for key, x in mean.items() if key[:2] == (name, "orscale")]
        assert row[1] == str(len(pairs))
        rho = stats.spearmanr(np.array(pairs))
        assert row[2] == f"{rho.statistic:+.2f}" and rho.pvalue > 0.05
        assert row[3] == in_words(of_workload(name))
    [head] = re.findall(r"<!-- table: classes -->\n(.*)\n", PAGE)
    names = re.findall(r"`([^`]+)`", head)
    for row in cells_of("classes"):
        for name, cell in zip(names, row[1:], strict=True):
            ours, theirs = (
                mean.get((name, arm, row[0])) for arm in ("orscale", REFERENCE)
            )
            if ours is not None:
                along = "–" if theirs is None else f"{theirs[1]:.2f}"
                assert cell == f"{ours[0]:.2f}; {ours[1]:.2f}, {along}"


def test_what_the_page_says_of_classes(found):
    for cell, by_class in found.optima.items():
        ratios = {name: of.ratio for name, of in by_class.items()}
        optima = {name: of.optimum for name, of in by_class.items()}
        order = sorted(optima, key=optima.__getitem__)
        if cell.arm == "orscale" and "mixture" in cell.workload:
            assert all(name.startswith("routed") for name in order[-3:])
            largest = max(ratios[name] for name in order[-3:])
            others = [name for name in ratios if name.startswith("shared")]
            assert min(ratios[n] for n in (*others, "mlp down", "router")) > largest
        elif cell.arm == "orscale":
            assert order[-2:] == ["attention key", "attention query"]
            assert set(order[:2]) == {"mlp up", "mlp down"}
            largest = max(of for name, of in ratios.items() if "mlp" not in name)
            assert min(ratios["mlp up"], ratios["mlp down"]) > largest


def test_the_advice_of_the_page():
    """Which optimizer, with which rates: sides, and best rates."""

    def sides(names, other=REFERENCE):
        ends = [by_hand(of_workload(name, other))[1:] for name in names]
        return [int(low > 0) - int(high < 0) for low, high in ends]

    def rates(names, arm):
        return [tuple(map(float, losses(name, arm)[1])) for name in names]

    both = [job.workload for job in JOBS if job.arm == "orscale"]
    by_side = {side: set() for side in (-1, 0, 1)}
    for name, side in zip(both, sides(both), strict=True):
        by_side[side].add(name)
    rungs = [LADDER[experts] for experts in (4, 8, 16)]
    small = SMALLER[2]
    assert by_side[-1] == {
        *rungs, "dense-small-1200-steps", f"{small}-4800-steps", "vision-large-small-init"
    }  # fmt: skip
    dense = [name for name in TEXTS if "mixture" not in name]
    assert sides(dense) == [1, 1, 0, 1]
    assert by_side[1] == {*dense, *LARGE[:2], "like-16b"} - {"prose"}
    assert set(rates([*rungs, "dense-small-1200-steps"], "orscale")) == {(0.008, 0.032)}
    assert sides([LADDER[16], LADDER[4]], POOLED) == [-1, 1]
    times = [b / a for arm in ("orscale", REFERENCE) for a, b in rates(TEXTS, arm)]
    assert len(times) == 12 and min(times) > 1.9 and max(times) < 6


def test_the_excess_in_words():
    of_arm = {row[0]: row[-2:] for row in cells_of("arms")}
    text, ladder = zip(of_arm["OrScale"], of_arm["Muon+Moonlight"], strict=True)
    assert f"is {text[0]} nats for OrScale and {text[1]} for Muon+Moonlight" in TEXT
    assert float(text[0]) - float(text[1]) == pytest.approx(0.003, abs=5e-4)
    assert abs(float(ladder[0]) - float(ladder[1])) < 5e-4
    longer = [row for row in cells_of("searches") if "-1200-steps" in row[0]]
    muon, ours = (
        statistics.fmean(float(row[-1]) for row in longer if row[1] == label)
        for label in ("Muon+Moonlight", "OrScale")
    )
    assert f"is {muon:.4f}, OrScale's {ours:.4f} nats)" in TEXT
    gain = -statistics.fmean(sums_of_the_list()[4])
    assert muon - ours == pytest.approx(gain / 2, rel=0.2)  # "About half of it".
    images = {row[1]: row[-1] for row in cells_of("searches") if "vision-small" in row[0]}
    assert f"is {images['OrScale']} and {images['Muon+Moonlight']} nats, as" in TEXT


def test_the_advice_of_the_readme():
    dense = [losses(name, REFERENCE)[1] for name in TEXTS if "mixture" not in name]
    ratios = [float(adam) / float(matrix) for matrix, adam in dense]
    assert min(ratios) > 2.8 and max(ratios) <= 4  # "About three times".
    assert "`muon(rate, adam_learning_rate=3 * rate)`" in README
    assert ("0.016", "0.0452548") in dense
    calls = (
        "muon(0.032, consistent_rms=None, adam_learning_rate=0.045)",
        "family.normuon(0.016, adam_learning_rate=0.045)",
    )
    assert all(f"`{call}`" in text for call in calls for text in (README, TEXT))
    for mixture in ("experts-4", TEXTS[-1], "experts-16"):
        assert losses(mixture, "orscale")[1] == ("0.008", "0.032")
        assert by_hand(of_workload(mixture))[2] < 0
    for mixture in ("experts-1", "experts-32", "mixture-small", *LARGE[2:]):
        _, low, high = by_hand(of_workload(mixture))
        assert low < 0 < high
    rates = [losses(name, "muon")[1] for name in TEXTS]
    assert rates.count(("0.032", "0.0452548")) == 3
    longer = [f"{name}-1200-steps" for name in ("dense-small", SMALLER[2])]
    assert f"({in_words(of_workload(longer[0]))})" in TEXT
    longest = [of_workload(name.replace("1200", "4800")) for name in longer]
    assert f"({in_words(means(longest))}, {len(longest[0])} seeds)" in TEXT
    assert all(f"({in_words(numbers)})" in TEXT for numbers in longest)
    (_, low, high), (_, _, top) = map(by_hand, longest)
    assert low < 0 < high and top < 0
    _, low, high = by_hand(means(longest))
    assert low < 0 < high


DENSE, PAIRED = TEXTS[:4], TEXTS[4:]


def of_candidates(ours, theirs, name):
    """Differences by seed in the runs for a better rule."""
    losses = {}
    with (FOLDER.parent / "better_rule" / f"{name}.csv").open() as file:
        for row in csv.DictReader(file):
            losses.setdefault(row["arm"], {})[int(row["seed"])] = float(row["loss"])
    first = 300 if ours == "orscale_twice_the_decay" else 200
    seeds = range(first, first + 12)
    return [losses[ours][seed] - losses[theirs][seed] for seed in seeds]


def minus(mixtures, dense):
    return [x - y for x, y in zip(means(mixtures), means(dense), strict=True)]


def expected_contrasts():
    """The rows of the table, by other ways."""
    of = {name: of_workload(name) for name in {*TEXTS, *MIXTURES, *LARGE, "experts-1"}}
    two = [
        minus(*([of_candidates(*arms, n) for n in names] for names in (PAIRED, DENSE)))
        for arms in (
            ("orscale_twice_the_decay", "twice_the_decay"),
            ("orscale_on_normuon", "normuon"),
        )
    ]
    return [
        means([of[name] for name in DENSE]),
        means([of[name] for name in MIXTURES]),
        minus([of[name] for name in PAIRED], [of[name] for name in DENSE]),
        *two,
        minus([of[SMALLER[2]]], [of["experts-1"]]),
        minus([of[name] for name in LARGE[2:]], [of[name] for name in LARGE[:2]]),
        means([of_workload(name, "one_scale", "muon") for name in SMALLER]),
    ]


def test_what_replicates():
    """On dense models OrScale costs, on mixtures it gains: the table and the words."""
    rows, expected = cells_of("contrasts"), expected_contrasts()
    for row, by_seed in zip(rows, expected, strict=False):
        assert row[2] == in_words(by_seed)
    (dense, low, high), (mixtures, bottom, top) = map(by_hand, expected[:2])
    assert (
        f"costs {dense:.3f} nats over four dense models [{low:+.4f}, {high:+.4f}]" in TEXT
    )
    assert (
        f"gains {-mixtures:.3f} over five mixtures of experts [{bottom:+.4f}, {top:+.4f}]"
        in TEXT
    )
    assert f"minus dense, the contrast is {in_words(expected[2])}." in TEXT
    for by_seed in expected[3:7]:
        assert f"({in_words(by_seed)})" in TEXT and by_hand(by_seed)[2] < 0
    first = in_words(means(map(of_workload, TEXTS)))
    assert f"-muonmoonlight-on-text), {first}, is a mean of four" in TEXT
    index = re.sub(r"\s+", " ", (ROOT / "docs" / "index.md").read_text())
    assert f"costs {dense:.3f} nats on dense models [{low:+.3f}, {high:+.3f}]" in index
    assert (
        f"gains {-mixtures:.3f} on mixtures of experts [{bottom:+.3f}, {top:+.3f}]"
        in index
    )


def test_the_gain_of_s_1_at_equal_decay():
    """Welch's interval, since the two were run on other seeds."""
    ours = means([of_workload(name, ours="muon") for name in TEXTS])
    names = ("twice_the_decay", REFERENCE)
    theirs = means([of_candidates(*names, name) for name in TEXTS])
    found = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval()
    gain = statistics.fmean(ours) - statistics.fmean(theirs)
    told = f"{gain:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"
    assert cells_of("contrasts")[8][2] == told
    assert (
        f"is {-gain:.3f} rather than {-statistics.fmean(ours):.3f} nats: {told}" in TEXT
    )


def test_the_first_endpoint_with_the_choice_of_rates(found):
    """The choices of resampled searches cost what the surface of all seeds says."""
    excess = variance = 0.0
    for name in TEXTS:
        for arm, sign in (("orscale", 1), (REFERENCE, -1)):
            mean, of = redrawn(found.records[Cell(name, arm)])
            assert mean >= 0 and of >= 0
            excess, variance = excess + sign * mean / 6, variance + of / 36
    by_seed = means(map(of_workload, TEXTS))
    mean = statistics.fmean(by_seed) - excess
    half = stats.t.ppf(0.975, 11) * (stats.sem(by_seed) ** 2 + variance) ** 0.5
    told = f"{mean:+.4f} [{mean - half:+.4f}, {mean + half:+.4f}]"
    assert cells_of("contrasts")[9][2] == told and mean - half < 0
    assert f"inside the interval, the mean is {told}: inconclusive" in TEXT


def test_a_search_whose_seeds_agree_has_no_excess(found):
    record = found.records[Cell("dense-small", REFERENCE)]
    same = {point: runs[:1] * 3 for point, runs in record.searched.items()}
    assert redrawn(dataclasses.replace(record, searched=same)) == (0.0, 0.0)
    assert redrawn(record)[1] > 0


def test_what_the_first_batch_decides():
    """Tokens for an expert, the ratio that its c leaves, and larger first batches."""
    rows = {row[0].strip("`"): row for row in cells_of("first_batch")}
    tokens = {"experts-1": 512, "experts-4": 256, SMALLER[2]: 128, "experts-16": 64,
              "experts-32": 32, "like-16b": 64, "experts-32-first-batch-64": 256,
              "like-16b-first-batch-64": 512}  # fmt: skip
    later = {}
    for name, count in tokens.items():
        logs = []
        found = {arm: by_rates(name, arm) for arm in ("orscale", REFERENCE)}
        with (FOLDER / f"{name}.csv").open() as file:
            for row in csv.DictReader(file):
                if row["arm"] == "orscale" and int(row["seed"]) >= 100:
                    pairs = dict(x.split("=") for x in row["class_ratio"].split(";"))
                    logs += [np.log(float(x)) for k, x in pairs.items() if "routed" in k]
        if "first-batch" in name:
            [ours], [theirs] = (of.values() for of in found.values())
            assert set(ours) == set(theirs) == set(range(100, 112))
            of_rates = {arm: losses(name[:-15], arm)[1] for arm in found}
            assert all([rates] == [*found[arm]] for arm, rates in of_rates.items())
            later[name] = [ours[seed] - theirs[seed] for seed in ours]
        by_seed = later.get(name) or of_workload(name)
        ratio = f"{np.exp(np.mean(logs)):.1f}"
        assert rows[name][1:] == [str(count), ratio, in_words(by_seed)]
    rungs = [of_workload(name) for name in LADDER.values()]
    with_64 = later["experts-32-first-batch-64"]
    told = [row[3] for name, row in rows.items() if name.startswith("slope")]
    for last, number in zip((rungs[-1], with_64), told, strict=True):
        slopes = [
            stats.linregress([0, 2, 3, 4, 5], x).slope
            for x in zip(*rungs[:-1], last, strict=True)
        ]
        assert number == in_words(slopes)
    assert f"experts, too, by {in_words(with_64)}, and" in TEXT
    assert f"of the experts is {in_words(slopes)}: inconclusive" in TEXT
    assert f"stays behind, by {in_words(later['like-16b-first-batch-64'])}." in TEXT


def test_the_validation_in_words():
    recipes = [KNOWN_WORKLOADS[name].config.recipe for name in (*TEXTS, *LADDER.values())]
    assert {(r.val_batches * r.batch_size, r.seq_len) for r in recipes} == {(80, 64)}
    assert "on 80 windows of 64 bytes" in TEXT


def shown(by_seed):
    return "{:+.3f} [{:+.3f}, {:+.3f}]".format(*by_hand(by_seed))


def test_the_finding_of_the_readme():
    """At most 120 words and six rows, each from the results.

    The row at AdamW's rate is in test_study.py.
    """
    text = (ROOT / "README.md").read_text()
    [finding] = re.findall(r"- (\*\*OrScale costs.*?)\n\n(?=  \|)", text, re.DOTALL)
    assert len(re.sub(r"\(docs/\S+\)", "", finding).split()) <= 120
    _, table = text.split("| models | mean, 95 % interval | asked |\n")
    rows = [
        [cell.strip() for cell in line.strip()[1:-1].split("|")]
        for line in table.split("\n\n")[0].splitlines()[1:]
    ]
    dense, mixtures, contrast, decayed, normuon = expected_contrasts()[:5]
    muon = means([of_workload(name, ours="muon") for name in TEXTS])
    values = [shown(dense), shown(mixtures), shown(contrast)]
    values.append(f"{shown(decayed)}; {shown(normuon)}")
    assert len(rows) == 6
    assert [row[2] for row in rows[:4] + rows[5:]] == [*values, shown(muon)]
    assert f"s = 1 gains {-statistics.fmean(muon):.3f} nats on text" in README
    holm = [row[3].endswith("significant by Holm's correction") for row in rows]
    assert holm == [False, False, True, False, False, True]
    assert [cells_of("list")[i][6] for i in (0, 6)] == ["lower", "lower"]


def test_the_large_workloads_in_words():
    """Behind on dense models, level on mixtures."""
    assert "behind on both dense models, and not significantly different on both" in TEXT
    signs = [np.sign(by_hand(of_workload(name))[1:]).tolist() for name in LARGE]
    assert signs == [[1, 1], [1, 1], [-1, 1], [-1, 1]]


def lines_of(name):
    return (FOLDER / f"{name}.csv").read_text().splitlines()


def write(folder, name, lines):
    (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")


def test_what_is_not_complete_is_not_reported(tmp_path):
    lines = lines_of("prose")
    missing = [x for x in lines if x.startswith("orscale,") and ",111," in x]
    write(tmp_path, "prose", [line for line in lines if line not in missing])
    records = read_records(tmp_path)
    assert Cell("prose", REFERENCE) in records and Cell("prose", "orscale") not in records
    assert difference(records, "prose", "orscale", REFERENCE) is None
    assert questions.comparison(FIRST, records) is None
    assert endpoint(questions.interval([0.01, -0.01]), 0.005) == NOT_TOLD


def test_missing_runs_leave_the_list_its_length(tmp_path):
    write(tmp_path, "like-16b", lines_of("like-16b"))
    answers = questions.answers(read_records(tmp_path))
    [place] = [i for i, answer in enumerate(answers) if answer is not None]
    assert len(answers) == 12 and LIST[place].over == "`like-16b`"
    p = stats.ttest_1samp(of_workload("like-16b"), 0).pvalue
    assert answers[place].p == pytest.approx(p)
    assert answers[place].corrected == pytest.approx(12 * p)


def test_runs_that_a_replay_asked_for_are_not_those_at_the_best_rates(tmp_path):
    lines = lines_of("prose")
    of_seeds, (rate, _) = losses("prose", "orscale")
    fresh = [line for line in lines if line.startswith(f"orscale,{rate},1")]
    assert len(fresh) == len(of_seeds)
    moved = [line.replace(f",{rate},", ",0.0226274,", 1) for line in fresh]
    write(tmp_path, "prose", lines + moved)
    assert read_records(tmp_path)[Cell("prose", "orscale")].losses == of_seeds


@pytest.mark.extended
def test_the_figures(found, tmp_path):
    widths = {False: style.WIDTH, True: style.NARROW}
    for name, draw in FIGURES.items():
        for narrow, width in widths.items():
            draw(found, tmp_path / f"{name}.png", narrow)
            drawn = np.asarray(Image.open(tmp_path / f"{name}.png").convert("L"))
            assert np.ptp(drawn) > 200 and drawn.shape[1] == width * style.DPI
