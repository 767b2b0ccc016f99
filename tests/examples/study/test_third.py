"""The third protocol: its search, its runs, each done once, and its endpoints."""

import math

import numpy as np
import pytest
from scipy import stats

from examples.study import plan, third, third_tables
from examples.study.results import read_results, read_rows
from examples.study.runs import Run
from examples.study.search import Rates, Settings
from examples.study.surface import optimum
from examples.study.workloads import EXPERTS, THIRD
from tests.examples.pretrain.tiny import ROOT

BEST = Settings(0.0113, 0.064, 0.2)
PAGE = (ROOT / "docs" / "study" / "study_protocol_3.md").read_text()
CELL, SMALL = "ladder-4", "ladder-4-small-init"


def bowl(best):
    def loss_of(point):
        x, y, z = np.subtract(point, best) / 4
        return 2 + 0.03 * x * x + 0.02 * y * y + 0.006 * z * z + 0.01 * x * z

    return loss_of


@pytest.mark.parametrize("best", [(0, 0, 0), (2, -3, 1), (-7, 5, 5)])
def test_the_search_finds_the_lowest_point(best):
    tried = []

    def loss_of(point):
        tried.append(point)
        return bowl(best)(point)

    found = np.subtract(optimum(loss_of), best)
    assert np.max(np.abs(found)) <= 3 and len(set(tried)) == len(tried)
    assert bowl(best)(optimum(bowl(best))) < 2.002


def test_noise_costs_the_search_little():
    """As the protocol says: little above 0.001 nats on average, after some 32 points."""
    random = np.random.default_rng(0)
    costs, points = [], []
    for _ in range(30):
        best = tuple(random.uniform(-6, 6, 3))
        tried = []

        def loss_of(point, best=best, tried=tried):
            tried.append(point)
            return bowl(best)(point) + random.normal(0, 0.01) / 2**0.5

        costs.append(bowl(best)(optimum(loss_of)) - 2)
        points.append(len(tried))
    assert np.mean(costs) < 0.0015 and 26 < np.mean(points) < 36


def test_a_search_without_an_end_says_so():
    with pytest.raises(RuntimeError, match="still at an edge"):
        optimum(lambda point: 2 - 0.1 * point[0])


@pytest.fixture
def trained(monkeypatch):
    """Replaces training; holds what was asked for."""
    asked = []

    def train(self, rates, seed, factors=None):
        arm = self.arm.optimizer
        asked.append((self.workload.name, arm, rates, seed))
        near = np.log2(np.divide(rates, BEST[: len(rates)]))
        loss = 2 + 0.03 * float(near @ near) + 0.001 * seed - 0.01 * (arm == "orscale")
        return Run([loss], 1.0, [], math.nan, math.nan, {})

    monkeypatch.setattr(plan.Trainer, "train", train)
    return asked


def test_rates_and_decay_are_searched_and_confirmed_on_fresh_seeds(tmp_path, trained):
    plan.prepare([CELL], tmp_path)
    for which, (searched, fresh) in enumerate(third.ROUNDS):
        trained.clear()
        losses = third.tuned_losses(CELL, "orscale", which, tmp_path)
        assert set(losses) == set(fresh)
        assert {seed for *_, seed in trained} == {*searched, *fresh}
        settings = {asked[2] for asked in trained if asked[3] in fresh}
        [found] = settings
        np.testing.assert_allclose(np.log2(np.divide(found, BEST)), 0, atol=0.4)
    rows = read_results(plan.table_of(tmp_path, CELL))
    assert all(isinstance(row.rates, Settings) for row in rows)
    count = len(rows)
    assert third.tuned_losses(CELL, "orscale", 0, tmp_path, train=False)
    lines = plan.table_of(tmp_path, CELL).read_text().splitlines()
    plan.table_of(tmp_path, CELL).write_text("\n".join(lines[:20]) + "\n")
    for which in range(2):  # Interrupted: only what is missing is done.
        third.tuned_losses(CELL, "orscale", which, tmp_path)
    again = plan.table_of(tmp_path, CELL).read_text().splitlines()
    assert len(again) == count + 1 and sorted(again) == sorted(lines)


def test_one_shared_rate_is_adamws(tmp_path, trained):
    plan.prepare([CELL], tmp_path)
    losses = [third.shared_losses(CELL, arm, tmp_path) for arm in third.PAIR]
    assert set(losses[0]) == set(losses[1]) == set(range(400, 416))
    of_adamw = {rates for _, arm, rates, _ in trained if arm == "adamw"}
    assert all(rates.matrix == rates.adam for rates in of_adamw) and len(of_adamw) >= 3
    [shared] = {rates for _, arm, rates, _ in trained if arm != "adamw"}
    assert shared in of_adamw and isinstance(shared, Rates)


@pytest.mark.extended
def test_the_anchor_to_confirm_is_the_better_one_of_the_pilots(
    tmp_path, trained, monkeypatch
):
    monkeypatch.setattr(third, "first_ranks", lambda cell, seed: [0.1, 0.01 * seed, 1.0])
    plan.prepare(THIRD, tmp_path)
    assert sum(1 for _ in third.pilots(tmp_path)) == 25
    ranks = read_rows(tmp_path / "first_ranks.csv")
    assert len(ranks) == 18 and {row["rank"] for row in ranks} == {"0.2", "0.21", "0.22"}
    names = {name for name, arm, *_ in trained if arm == "orscale"}
    assert {f"{cell}{third.FEW}" for cell in third.FEW_CELLS} < names
    assert set(third.FEW_CELLS) < names
    assert {seed for *_, seed in trained} == {20, 21, 22}
    path = plan.table_of(tmp_path, f"{SMALL}{third.FEW}")
    text = path.read_text()
    for arm in third.ANCHORS[1:]:
        lines = [
            line.replace(",2.", ",1.") if line.startswith(arm) else line
            for line in text.splitlines()
        ]
        path.write_text("\n".join(lines) + "\n")
        assert third.candidate(tmp_path, train=False) == arm


def test_the_records_rates_are_the_papers_multiples():
    rates = [s.matrix for s in third.record_settings("orscale", 0.1)]
    np.testing.assert_allclose(np.divide(rates, 0.008), [0.3, 1, 3, 10])
    of_muon = third.record_settings("muon", 0.01)
    assert {s.adam for s in of_muon} == {0.008} and {s.decay for s in of_muon} == {0.01}
    betas = [THIRD[f"dense-small-800-windows{end}"].config.recipe.adam_b2
             for end in ("", "-0.999")]  # fmt: skip
    assert betas == [0.95, 0.999]


def test_workloads_are_those_of_the_protocol():
    for name, workload in THIRD.items():
        recipe = workload.config.recipe
        assert recipe.val_batches * recipe.batch_size == 800 and recipe.steps == 300
        few = name.endswith(third.FEW)
        assert workload.first_batch == (None if few else 128)
        assert recipe.batch_size == 8 and recipe.seq_len == 64
    sizes = [THIRD[f"ladder-{n}"].config.model for n in EXPERTS]
    assert {size.experts_per_token * size.expert_hidden for size in sizes} == {128}
    seeds = [*third.SHARED_SEEDS, *third.RECORD_SEEDS, *third.ANCHOR_SEEDS]
    seeds += [seed for of_round in third.ROUNDS for of in of_round for seed in of]
    assert len(set(seeds)) == len(seeds) and min(seeds) >= 30


def differences(cell, which, seeds):
    """Made up: a slope of -0.004, a step, noise, and what a search's choice costs."""
    experts = int(cell.removesuffix("-small-init").removeprefix("ladder-"))
    noise = np.random.default_rng([len(cell), experts, which]).normal(
        0, 0.004, len(seeds)
    )
    chosen = 0.002 * ((experts + which) % 2)
    return dict(zip(seeds, -0.004 * np.log2(experts) + chosen + noise, strict=True))


@pytest.fixture
def made_up(monkeypatch):
    def shared(cell, arm, folder, train):
        of = differences(cell, 0, third.SHARED_SEEDS)
        return {s: x if arm == "orscale" else 0.0 for s, x in of.items()}

    def tuned(cell, arm, which, folder, train):
        of = differences(cell, which, third.ROUNDS[which][1])
        return {s: x if arm == "orscale" else 0.0 for s, x in of.items()}

    monkeypatch.setattr(third, "shared_losses", shared)
    monkeypatch.setattr(third, "tuned_losses", tuned)


def test_the_endpoints(made_up, tmp_path):
    """Recomputed with scipy: slopes, steps, and the variance between searches."""

    def by_hand(seeds, which):
        of = {c: list(differences(c, which, seeds).values()) for c in third.CELLS}
        means = [
            np.mean([of[f"ladder-{n}{init}"] for init in ("", "-small-init")], axis=0)
            for n in EXPERTS
        ]
        slopes = [stats.linregress([0, 2, 4, 5], x).slope for x in np.transpose(means)]
        return of, {"slope": np.array(slopes), "step": means[1] - means[0], "1": means[0]}

    of_rounds = [by_hand(seeds, i) for i, (_, seeds) in enumerate(third.ROUNDS)]
    _, of_shared = by_hand(third.SHARED_SEEDS, 0)
    beyond = np.mean(
        [
            ((np.mean(a) - np.mean(b)) ** 2 - stats.sem(a) ** 2 - stats.sem(b) ** 2) / 2
            for a, b in ((of_rounds[0][0][c], of_rounds[1][0][c]) for c in third.CELLS)
        ]
    )
    table = third_tables.endpoints(tmp_path).splitlines()[2:]
    names = dict(zip(("slope", "step", "1"), third_tables.CONTRASTS, strict=True))
    for short, name in names.items():
        [line] = [x for x in table if x.startswith(f"| {name} | searched")]
        first, second = (of[1][short] for of in of_rounds)
        weights = third_tables.CONTRASTS[name].values()
        variance = (stats.sem(first) ** 2 + stats.sem(second) ** 2) / 4
        variance += max(beyond, 0) * sum(w * w for w in weights) / 2
        mean = (first.mean() + second.mean()) / 2
        half = stats.t.ppf(0.975, 8) * variance**0.5
        assert f"{mean:+.4f} [{mean - half:+.4f}, {mean + half:+.4f}]" in line
        if short != "1":
            [line] = [x for x in table if x.startswith(f"| {name} | AdamW's")]
            x = of_shared[short]
            low, high = stats.ttest_1samp(x, 0).confidence_interval()
            assert f"{x.mean():+.4f} [{low:+.4f}, {high:+.4f}]" in line
    assert "| lower |" in table[0] and "| lower |" in table[2]


@pytest.mark.parametrize(
    "ends, said",
    [((-0.004, 0.004), "equal within the margin"), ((0.001, 0.006), "higher"),
     ((-0.009, -0.001), "lower"), ((-0.004, 0.006), "inconclusive"),
     ((0.001, 0.004), "equal within the margin")],
)  # fmt: skip
def test_what_is_said_of_the_level(ends, said):
    found = third_tables.Interval(sum(ends) / 2, *ends)
    assert third_tables.of_level(found) == said


def test_what_is_missing_has_no_endpoint(tmp_path):
    plan.prepare(THIRD, tmp_path)
    assert third_tables.endpoints(tmp_path).count("not complete") == 5
    for table in (third_tables.cells, third_tables.record):
        assert "not complete" in table(tmp_path)


@pytest.mark.extended
def test_the_first_ranks_are_of_routed_experts():
    found = third.first_ranks(SMALL, 20)
    model = THIRD[SMALL].config.model
    layers = model.layers - 1  # The first one is dense.
    assert len(found) == 3 * model.experts * layers
    assert all(1 / 64 <= share <= 1 for share in found)
