"""The endpoints of the second protocol, and the page and README that quote them."""

import csv
import re
import statistics

import pytest
from scipy import stats

from examples.study import endpoints
from examples.study.second import REFERENCE, TEXTS
from examples.study.statistics import NOT_TOLD, WORSE, endpoint
from tests.examples.pretrain.tiny import ROOT

FOLDER = ROOT / "docs" / "data" / "two_rates"
PAGE = (ROOT / "docs" / "two_rates.md").read_text()
POOLED = "pooled"
README = (ROOT / "README.md").read_text()


def losses(workload, arm):
    """From the table itself: the losses of the seeds that no search saw, and rates."""
    with (FOLDER / f"{workload}.csv").open() as file:
        rows = [r for r in csv.DictReader(file) if r["arm"] == arm]
    rows = [row for row in rows if int(row["seed"]) >= 100]
    [rates] = {(row["rate"], row["adam_rate"]) for row in rows}
    return {int(row["seed"]): float(row["loss"]) for row in rows}, rates


def by_hand(differences):
    mean = statistics.fmean(differences)
    error = stats.sem(differences) * stats.t.ppf(0.975, len(differences) - 1)
    return mean, mean - error, mean + error


def of_workload(name, other=REFERENCE):
    (ours, _), (theirs, _) = losses(name, "orscale"), losses(name, other)
    assert sorted(ours) == sorted(theirs) == list(range(100, 112))
    return [ours[seed] - theirs[seed] for seed in sorted(ours)]


def test_the_first_endpoint():
    means = list(map(statistics.fmean, zip(*map(of_workload, TEXTS), strict=True)))
    mean, low, high = by_hand(means)
    found = endpoints.comparison(TEXTS, "orscale", REFERENCE, FOLDER)
    assert found.average == pytest.approx((mean, low, high))
    assert endpoint(found.average, endpoints.MARGIN) == WORSE
    text = re.sub(r"\s+", " ", PAGE)
    assert f"{mean:+.4f} nats, with a 95 % interval of [{low:+.4f}, {high:+.4f}]" in text
    assert f"surely higher in {found.higher} workloads" in text
    assert f"surely lower in {found.lower}." in text
    readme = re.sub(r"\s+", " ", README)
    assert f"{mean:.3f} nats higher than Muon+Moonlight's over six" in readme
    assert f"workloads (95 % interval [{low:+.3f}, {high:+.3f}]" in readme


def test_the_second_endpoint():
    differences = [of_workload(name, POOLED) for name in endpoints.MIXTURES]
    mean, low, high = by_hand(list(map(statistics.fmean, zip(*differences, strict=True))))
    found = endpoints.comparison(endpoints.MIXTURES, "orscale", POOLED, FOLDER)
    assert found.average == pytest.approx((mean, low, high))
    assert endpoint(found.average, 0.0) == NOT_TOLD
    text = re.sub(r"\s+", " ", PAGE)
    assert f"{mean:+.4f} nats, with a 95 % interval of [{low:+.4f}, {high:+.4f}]" in text
    assert (
        f"surely lower in {found.lower} workload and surely higher in {found.higher}."
        in text
    )


@pytest.mark.parametrize(
    "name, other",
    [
        *((name, REFERENCE) for name in TEXTS),
        *((name, POOLED) for name in endpoints.MIXTURES),
    ],
)
def test_rows_of_the_page(name, other):
    mean, low, high = by_hand(of_workload(name, other))
    rates = [losses(name, arm)[1] for arm in ("orscale", other)]
    cells = [", ".join(f"{float(rate):.3g}" for rate in pair) for pair in rates]
    number = f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]"
    assert f"| `{name}` | {cells[0]} | {cells[1]} | {number} |" in PAGE


def test_the_advice_of_the_readme():
    readme = re.sub(r"\s+", " ", README)
    dense = [losses(name, REFERENCE)[1] for name in TEXTS if "mixture" not in name]
    ratios = [float(adam) / float(matrix) for matrix, adam in dense]
    assert min(ratios) > 2.8 and max(ratios) <= 4  # "About three times".
    assert (
        "here 0.016 for matrices, 0.045 for" in readme and ("0.016", "0.0452548") in dense
    )
    mixture = TEXTS[-1]
    assert losses(mixture, "orscale")[1] == ("0.008", "0.032")
    mean, low, high = by_hand(of_workload(mixture))
    assert (
        f"`orscale` (0.008, 0.032) is ahead by {-mean:.3f} nats [{low:+.3f}, {high:+.3f}]"
        in readme
    )


def test_what_is_not_complete_is_not_reported(tmp_path):
    source = (FOLDER / "prose.csv").read_text().splitlines()
    [missing] = [
        line for line in source if line.startswith("orscale,") and ",111," in line
    ]
    source.remove(missing)
    (tmp_path / "prose.csv").write_text("\n".join(source) + "\n")
    assert endpoints.difference("prose", "orscale", REFERENCE, tmp_path) is None
    assert endpoints.comparison(TEXTS, "orscale", REFERENCE, tmp_path) is None
    assert endpoints.difference("prose", "orscale", REFERENCE, FOLDER) is not None
    assert endpoint(endpoints.interval([0.01, -0.01]), 0.005) == NOT_TOLD
