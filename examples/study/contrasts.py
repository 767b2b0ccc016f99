"""What replicates in the second study, and what the first batch decided.

    python -m examples.study.contrasts

does the runs with a larger first batch that are missing, and prints two tables of
docs/study/two_rates.md. All of it was asked once the results were known: exploratory.
"""

from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from scipy import stats

from examples.study import better_rule
from examples.study.plan import find_workload, prepare
from examples.study.questions import FIRST, MIXTURES
from examples.study.records import Cell, Records, difference, read_record, read_records
from examples.study.second import (
    FOLDER,
    LARGE,
    POST_HOC,
    REFERENCE,
    SMALLER,
    TEXTS,
    do,
)
from examples.study.selection import redrawn
from examples.study.statistics import Interval, in_words, interval, paired
from examples.study.tables import markdown
from examples.study.workloads import FIRST_BATCH, LADDER

# Losses of one arm minus another's, by workload and seed.
Differences = Callable[[str], Mapping[int, float] | None]
DENSE, PAIRED = TEXTS[:4], TEXTS[4:]
_TWO = ("orscale", REFERENCE)
_LABEL = "OrScale − Muon+Moonlight"
_BETWEEN = "mixtures minus dense"


def contrasts(records: Records) -> str:
    """OrScale's differences by the kind of model, and what is like them."""

    def of(ours: str, theirs: str) -> Differences:
        return lambda workload: difference(records, workload, ours, theirs)

    two, rows = of(*_TWO), []
    for label, over, differences, plus, minus in (
        (_LABEL, "four dense models", two, DENSE, ()),
        (_LABEL, "five mixtures", two, MIXTURES, ()),
        (_LABEL, f"{_BETWEEN}: the six of text", two, PAIRED, DENSE),
        ("with twice the decay in both", f"{_BETWEEN}, seeds 300 to 311",
         _of_candidates("orscale_twice_the_decay"), PAIRED, DENSE),
        ("OrScale's ratio on NorMuon − NorMuon", f"{_BETWEEN}, seeds 200 to 211",
         _of_candidates("orscale_on_normuon"), PAIRED, DENSE),
        (_LABEL, "8 experts minus 1", two, [LADDER[8]], [LADDER[1]]),
        (_LABEL, f"{_BETWEEN}, 96 wide", two, LARGE[2:], LARGE[:2]),
        ("Muon (s = 1) − one scale for all shapes", "three workloads",
         of("muon", "one_scale"), SMALLER, ()),
    ):  # fmt: skip
        by_seed = contrast(differences, plus, minus)
        rows.append([label, over, in_words(interval(by_seed))] if by_seed else None)
    muon = contrast(of("muon", REFERENCE), TEXTS)
    if muon:
        decayed = contrast(_of_candidates("twice_the_decay", REFERENCE), TEXTS)
        found = in_words(_unpaired(muon, decayed or []))
        label = "Muon (s = 1) − Muon+Moonlight with twice the decay"
        rows.append([label, "text, each on its own seeds", found])
    if (chosen := with_choice_of_rates(records)) is not None:
        over = "text, with the error of the choice of rates"
        rows.append([_LABEL, over, in_words(chosen)])
    heading = ["difference", "over", "mean, 95 % interval"]
    return markdown(heading, [row for row in rows if row], left=2)


def contrast(
    of: Differences, plus: Sequence[str], minus: Sequence[str] = ()
) -> list[float] | None:
    """By seed, the mean over some workloads minus that over others, in nats."""
    found = [of(name) for name in (*plus, *minus)]
    rows = [list(by_seed.values()) for by_seed in found if by_seed is not None]
    if len(rows) < len(found):
        return None
    weights = [1 / len(plus)] * len(plus) + [-1 / len(minus) for _ in minus]
    return (np.array(weights) @ np.array(rows)).tolist()


def _of_candidates(ours: str, theirs: str = "") -> Differences:
    """From the runs for a better rule; by default the same without OrScale's ratio."""
    theirs = theirs or better_rule.RATIOS[ours]
    seeds = better_rule.fresh_seeds(ours)

    def losses(workload: str, arm: str) -> Mapping[int, float]:
        if arm == REFERENCE:
            return better_rule.reference_losses(workload, better_rule.FOLDER, seeds)
        return better_rule.candidate(workload, arm, better_rule.FOLDER, seeds)[1]

    return lambda workload: paired(losses(workload, ours), losses(workload, theirs))


def _unpaired(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """The difference of two means, by Welch's t."""
    found = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    return Interval(float(np.mean(ours) - np.mean(theirs)), found.low, found.high)


def with_choice_of_rates(records: Records) -> Interval | None:
    """The first endpoint, less what the choices cost, with their error."""
    by_seed = FIRST.by_seed(records)
    if by_seed is None:
        return None
    excess, variance = np.sum(
        [
            [sign * weight * mean, weight**2 * of]
            for workload, weight in FIRST.weights.items()
            for arm, sign in zip(_TWO, (1, -1), strict=True)
            for mean, of in [redrawn(records[Cell(workload, arm)])]
        ],
        axis=0,
    )
    mean = float(np.mean(by_seed) - excess)
    error = (np.var(by_seed, ddof=1) / len(by_seed) + variance) ** 0.5
    half = float(stats.t.ppf(0.975, len(by_seed) - 1) * error)
    return Interval(mean, mean - half, mean + half)


def first_batch(records: Records) -> str:
    """The ladder, with how many tokens c was set at; and larger first batches."""
    records = dict(records) | dict(_post_hoc())
    rows = []
    for name in (*LADDER.values(), "like-16b", *FIRST_BATCH):
        by_seed = difference(records, name, *_TWO)
        if by_seed is not None:
            ratio = _routed_ratio(records, name)
            cells = [f"`{name}`", f"{tokens_per_expert(name):.0f}", f"{ratio:.1f}"]
            rows.append([*cells, in_words(interval(list(by_seed.values())))])
    later = f"{LADDER[32]}-first-batch-64"
    for title, last in (("", LADDER[32]), (", 64 sequences at 32", later)):
        names = [*list(LADDER.values())[:-1], last]
        found = [difference(records, name, *_TWO) for name in names]
        if None not in found:
            octaves = np.log2(list(LADDER)) - np.mean(np.log2(list(LADDER)))
            losses = np.array([list(by_seed.values()) for by_seed in found if by_seed])
            slope = (octaves @ losses / np.sum(octaves**2)).tolist()
            told = in_words(interval(slope))
            rows.append([f"slope for a doubling of the experts{title}", "", "", told])
    heading = ["", "tokens", "ratio", _LABEL]
    return markdown(heading, rows)


def tokens_per_expert(name: str) -> float:
    """Of the first batch, in the mean."""
    workload = find_workload(name)
    recipe, model = workload.config.recipe, workload.config.model
    sequences = workload.first_batch or recipe.batch_size
    return float(sequences * recipe.seq_len * model.experts_per_token / model.experts)


def _routed_ratio(records: Records, name: str) -> float:
    """The geometric mean of the routed experts' ratios at the end of OrScale's runs."""
    runs = records[Cell(name, "orscale")].confirmed
    ratios = [x for r in runs for k, x in r.class_ratio.items() if k.startswith("routed")]
    return float(np.exp(np.mean(np.log(ratios))))


def _post_hoc() -> Records:
    found = {Cell(job.workload, job.arm): read_record(job, FOLDER) for job in POST_HOC}
    return {cell: record for cell, record in found.items() if record is not None}


def main() -> None:
    """Does the runs that are missing, and prints the tables."""
    jax.config.update("jax_compilation_cache_dir", "runs/study/compiled")
    prepare(FIRST_BATCH, FOLDER)
    for job in POST_HOC:
        do(job, FOLDER)
    prepare(FIRST_BATCH, FOLDER)
    records = read_records(FOLDER)
    print(contrasts(records), first_batch(records), sep="\n\n")


if __name__ == "__main__":
    main()
