"""What the study found, from the losses in docs/data.

    python -m examples.study.contrasts

prints the numbers of README's table and of the first one of docs/study/two_rates.md, the
table of the first batch, and OrScale's losses at multiples of AdamW's rate. All but
question 1 of the second protocol, "the two pairs", and Muon with s = 1 were asked once
the results were known: exploratory.
"""

import csv
import functools
import itertools
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np
from scipy import stats

from examples.study.statistics import Interval, interval, markdown, paired
from examples.study.workloads import LADDER, SMALL_INIT, find_workload

DATA = pathlib.Path("docs/data")
REFERENCE = "muon_moonlight"
SEEDS = range(100, 112)  # That no search of the second protocol has seen.


def _both(*names: str) -> list[str]:
    return [f"{name}{init}" for name in names for init in ("", SMALL_INIT)]


DENSE, PAIRED = _both("dense-small", "prose"), _both("mixture-small")
LARGE_DENSE, LARGE_MIXTURES = _both("dense-large"), _both("mixture-large")
# The set of the second endpoint of the second protocol.
MIXTURES = [*PAIRED, LADDER[4], LADDER[16], LADDER[32]]
# All mixtures of 300 to 600 steps with two searched rates.
ALL_MIXTURES = [*MIXTURES, "like-16b", *LARGE_MIXTURES]
USUAL_MIXTURES = ["mixture-small", "mixture-large"]
SMALLER = ["dense-small", *PAIRED]
TEXT = [*DENSE, *PAIRED, *LARGE_DENSE, *LARGE_MIXTURES]  # Of the first study.
IMAGES = _both("vision-small", "vision-large")

Losses = dict[int, float]  # By seed, in nats.


@functools.cache
def rows_of(table: str) -> list[dict[str, str]]:
    """The rows of a table in docs/data: one for each run."""
    with (DATA / f"{table}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def losses_of(table: str, arm: str) -> dict[tuple[float, ...], Losses]:
    """The final losses of an arm by its rates and its decay, as far as they are given.

    The rates are those of the matrices and of AdamW's parameters.
    """
    found: dict[tuple[float, ...], Losses] = {}
    for row in rows_of(table):
        if row["arm"] == arm:
            given = [row.get(name) for name in ("rate", "adam_rate", "decay")]
            settings = tuple(float(x) for x in given if x)
            found.setdefault(settings, {})[int(row["seed"])] = float(row["loss"])
    return found


def confirmed(table: str, arm: str, seeds: Iterable[int] = SEEDS) -> Losses:
    """At the rates that a search found: those at which all fresh seeds were run.

    A replay of OrScale's ratios asked for more runs of it, at the replay's own rates.
    """
    wanted = {*seeds}
    ours, replays = (
        {rates: x for rates, x in losses_of(table, name).items() if wanted <= {*x}}
        for name in (arm, "replayed")
    )
    [rates] = ours if len(ours) == 1 else ours.keys() - replays.keys()
    return {seed: ours[rates][seed] for seed in wanted}


def adamws_rate(workload: str) -> float:
    """AdamW's best rate in the first study, for the mean of its five seeds."""
    of_adamw = losses_of(workload, "adamw")
    whole = {rate: x for (rate,), x in of_adamw.items() if len(x) == 5}
    return min(whole, key=lambda rate: sum(whole[rate].values()))


def at_adamws_rate(workload: str, arm: str, times: int = 1) -> Losses:
    """In the first study, at a multiple of AdamW's best rate."""
    return losses_of(workload, arm)[float(f"{times * adamws_rate(workload):.6g}"),]


def contrast(
    plus: Sequence[str],
    minus: Sequence[str] = (),
    arms: tuple[str, str] = ("orscale", REFERENCE),
    folder: str = "two_rates",
    seeds: Iterable[int] = SEEDS,
) -> np.ndarray:
    """By seed, one arm minus another: the mean over workloads, minus that over others."""

    def mean(names: Sequence[str]) -> np.ndarray:
        tables = [f"{folder}/{name}" for name in names]
        pairs = ([confirmed(table, arm, seeds) for arm in arms] for table in tables)
        return np.mean([paired(*pair) for pair in pairs], axis=0)

    return mean(plus) - mean(minus) if minus else mean(plus)


def contrasts() -> list[tuple[str, str, Interval]]:
    """Differences of final validation losses: what of, over what, and the interval."""
    two, minus_dense = "OrScale − Muon+Moonlight", "mixtures minus dense"
    decayed = ("orscale_twice_the_decay", "twice_the_decay")
    on_normuon = ("orscale_on_normuon", "normuon")
    of_candidates = "better_rule"
    both = (PAIRED, DENSE)
    muon = contrast([*DENSE, *PAIRED], arms=("muon", REFERENCE))
    more_decay = contrast(
        [*DENSE, *PAIRED],
        (),
        ("twice_the_decay", REFERENCE),
        of_candidates,
        range(200, 212),
    )
    welch = stats.ttest_ind(muon, more_decay, equal_var=False).confidence_interval(0.95)
    found = [
        (two, "four dense models", contrast(DENSE)),
        (two, "eight mixtures", contrast(ALL_MIXTURES)),
        (two, "the six of them with small initial weights",
         contrast([x for x in ALL_MIXTURES if x not in USUAL_MIXTURES])),
        (two, "five of them: the set of the second endpoint", contrast(MIXTURES)),
        (two, "one of them, `like-16b`, planned", contrast(["like-16b"])),
        (two, "two mixtures with usual ones, 64 and 96 wide",
         contrast(USUAL_MIXTURES)),
        (two, f"{minus_dense}: the two pairs",
         contrast(PAIRED, _both("dense-small"))),
        (two, f"{minus_dense}: the six of text", contrast(*both)),
        ("with twice the decay in both", f"{minus_dense}, seeds 300 to 311",
         contrast(*both, decayed, of_candidates, range(300, 312))),
        ("OrScale's ratio on NorMuon − NorMuon", f"{minus_dense}, seeds 200 to 211",
         contrast(*both, on_normuon, of_candidates, range(200, 212))),
        (two, "8 experts minus 1", contrast([LADDER[8]], [LADDER[1]])),
        (two, f"{minus_dense}, 96 wide", contrast(LARGE_MIXTURES, LARGE_DENSE)),
        ("Muon+Moonlight − AdamW", "six of text",
         contrast([*DENSE, *PAIRED], arms=(REFERENCE, "adamw_apart"))),
        ("Muon (s = 1) − Muon+Moonlight", "six of text", muon),
        ("Muon (s = 1) − one scale for all shapes", "three workloads",
         contrast(SMALLER, arms=("muon", "one_scale"))),
    ]  # fmt: skip
    rows = [(label, over, interval(by_seed)) for label, over, by_seed in found]
    label = "Muon (s = 1) − Muon+Moonlight with twice the decay"
    gain = Interval(float(muon.mean() - more_decay.mean()), welch.low, welch.high)
    rows.append((label, "text, each on its own seeds", gain))
    for over, names in (
        ("images, AdamW's rate", IMAGES),
        ("text with small initial weights, AdamW's rate",
         [name for name in TEXT if name.endswith(SMALL_INIT)]),
        ("text with usual initial weights, AdamW's rate",
         [name for name in TEXT if not name.endswith(SMALL_INIT)]),
    ):  # fmt: skip
        by_seed = np.mean(
            [
                paired(*(at_adamws_rate(name, arm) for arm in ("orscale", REFERENCE)))
                for name in names
            ],
            axis=0,
        )
        rows.append((two, over, interval(by_seed)))
    for arm, (group, names) in itertools.product(
        ("adamw", "orscale"), (("text", TEXT), ("images", IMAGES))
    ):
        twice = [
            paired(at_adamws_rate(name, REFERENCE, times=2), at_adamws_rate(name, arm))
            for name in names
        ]
        lower = sum(np.mean(twice, axis=1) < 0)
        label = f"Muon+Moonlight at twice AdamW's best rate − `{arm}` at it"
        over = f"{group}: {len(names)} workloads ({lower} are below 0)"
        rows.append((label, over, interval(np.mean(twice, axis=0))))
    for group, names in (("text", TEXT), ("images", IMAGES)):
        pairs = [[at_adamws_rate(name, "orscale", x) for x in (2, 1)] for name in names]
        found_here = [paired(*pair) for pair in pairs]
        lower = sum(np.mean(found_here, axis=1) < 0)
        label = "OrScale at twice AdamW's best rate − OrScale at it"
        over = f"{group}: {len(names)} workloads ({lower} are below 0)"
        rows.append((label, over, interval(np.mean(found_here, axis=0))))
    return rows


def first_batch() -> list[list[str]]:
    """The ladder, with how many tokens c was set at; and larger first batches.

    The ratio is the geometric mean of the routed experts' at the end of OrScale's runs.
    """
    more = "-first-batch-64"
    later = f"{LADDER[32]}{more}"
    rows = []
    for name in (*LADDER.values(), "like-16b", later, f"like-16b{more}"):
        workload = find_workload(name)
        recipe, model = workload.config.recipe, workload.config.model
        tokens = (workload.first_batch or recipe.batch_size) * recipe.seq_len
        per_expert = tokens * model.experts_per_token / model.experts
        logs = [
            np.log(float(pair.partition("=")[2]))
            for row in rows_of(f"two_rates/{name}")
            if row["arm"] == "orscale" and int(row["seed"]) in SEEDS
            for pair in row["class_ratio"].split(";")
            if pair.startswith("routed")
        ]
        told = str(interval(contrast([name])))
        rows.append(
            [f"`{name}`", f"{per_expert:.0f}", f"{np.exp(np.mean(logs)):.1f}", told]
        )
    octaves = np.log2(list(LADDER)) - np.mean(np.log2(list(LADDER)))
    for title, last in (("", LADDER[32]), (", 64 sequences at 32", later)):
        rungs = [contrast([name]) for name in [*list(LADDER.values())[:-1], last]]
        slope = str(interval(octaves @ np.array(rungs) / np.sum(octaves**2)))
        rows.append([f"slope for a doubling of the experts{title}", "", "", slope])
    return rows


def orscale_at_multiples() -> list[list[str]]:
    """OrScale at multiples of AdamW's best rate, minus OrScale at that rate.

    The multiples are those of the matrices and of AdamW's parameters. Of text, these are
    the workloads with all of them, on the seeds of the searches.
    """
    names = [*_both("dense-small"), *PAIRED, f"mixture-large{SMALL_INIT}"]
    rows = []
    for pair in ((1, 2), (1, 4), (2, 2), (2, 4)):
        found = []
        for name in names:
            of_rates = losses_of(f"two_rates/{name}", "orscale")
            losses, at_it = (
                of_rates[tuple(float(f"{x * adamws_rate(name):.6g}") for x in multiples)]
                for multiples in (pair, (1, 1))
            )
            found.append(paired(losses, at_it))
        lower = sum(np.mean(found, axis=1) < 0)
        told = str(interval(np.mean(found, axis=0)))
        rows.append(["{}, {}".format(*pair), told, f"{lower} of {len(names)}"])
    return rows


def main() -> None:
    """Prints the tables."""
    rows = [[label, over, str(found)] for label, over, found in contrasts()]
    print(
        markdown(["difference", "over", "mean, 95 % interval"], rows, left=2), end="\n\n"
    )
    titles = ["", "tokens", "ratio", "OrScale − Muon+Moonlight"]
    print(markdown(titles, first_batch()), end="\n\n")
    titles = ["multiples of AdamW's rate", "loss minus the loss at 1, 1"]
    titles += ["workloads with a lower loss"]
    print(markdown(titles, orscale_at_multiples()))


if __name__ == "__main__":
    main()
