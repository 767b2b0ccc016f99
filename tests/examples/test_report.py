"""The report of a run: what the page holds, and that no history breaks it."""

import html.parser
import re
import runpy
import sys

import numpy as np
import pandas as pd
import pytest

from examples import report as module
from examples.report import (
    FIGURES,
    OTHERS,
    RunError,
    read_run,
    write_report,
)

HOSTILE = '<script>alert("&")</script> $x^2$'
CLASSES = ("attention query", "mlp up", "routed expert down")
VOID = {"meta", "br", "img", "link", "hr", "input"}


def history(layers=3, steps=5, seed=0, names="blocks.{layer}.{kind}.kernel"):
    """A plausible history in the documented format."""
    rng = np.random.default_rng(seed)
    frames = []
    matrices = [
        (names.format(layer=layer, kind=kind.replace(" ", "_")), kind)
        for layer in range(layers)
        for kind in CLASSES
    ]
    n = len(matrices)
    final_growth = rng.uniform(0.8, 4, n)
    for index in range(1, steps + 1):
        growth = final_growth ** (index / steps)
        raw = growth * rng.uniform(0.9, 1.1, n)
        frame = pd.DataFrame(matrices, columns=["matrix", "class"])
        frames.append(
            frame.assign(
                step=10 * index,
                trust_ratio=np.clip(raw, 0.1, 3),
                raw_trust_ratio=raw,
                calibration=rng.uniform(0.01, 0.05, n),
                weight_norm=10 * growth,
                direction_norm=5.0,
                relative_step=1e-3 * raw / growth,
                growth=growth,
                at_r_min=0,
                at_r_max=(raw >= 3).astype(int),
                started=1,
                anchored=1,
                loss=3 / index,
                val_loss=3.1 / index,
            )
        )
    return pd.concat(frames, ignore_index=True)


def audit(rows):
    parameters = rows["matrix"].unique()
    sizes = {"m": 64, "n": 256, "s": 3.2, "rule": "matrix", "check": HOSTILE}
    return pd.DataFrame({"parameter": parameters}).assign(**sizes)


def write(folder, rows, with_audit=True):
    folder.mkdir(parents=True, exist_ok=True)
    first = ["step", "matrix", "class"]
    rows = rows[first + [name for name in rows.columns if name not in first]]
    rows.to_csv(folder / "history.csv", index=False, float_format="%.7g")
    if with_audit:
        audit(rows).to_csv(folder / "audit.csv", index=False)
    return folder


def run_of(rows, tmp_path):
    return read_run(write(tmp_path / "run", rows))


class Page(html.parser.HTMLParser):
    """What a page holds; refuses tags that are not closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.links, self.ids = [], [], [], []
        self.text, self.headings = [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append(tag)
        self.links += [attributes[name] for name in ("src", "href") if name in attributes]
        self.ids += [attributes["id"]] if "id" in attributes else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)
        if self.open and self.open[-1] in ("h1", "h2", "h3"):
            self.headings.append(data)


def page_of(path):
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report of a run with everything, some of it hostile."""
    rows = history()
    rows.loc[rows["matrix"] == "blocks.0.mlp_up.kernel", "matrix"] = HOSTILE
    rows.loc[rows["class"] == "mlp up", "class"] = HOSTILE
    rows.loc[rows.index[-1], ["raw_trust_ratio", "weight_norm"]] = [np.nan, np.inf]
    return write_report(write(tmp_path_factory.mktemp("runs") / "run <b>", rows))


def test_the_page(report):
    """Sections in order, no network, all figures, unique ids."""
    page, text = page_of(report), report.read_text()
    sections = [
        "run <b>", "Verdict, at step 50", "Warnings", "Not finite", "Figures",
        "Trust ratio by class", "How much of the ratio is uniform",
        "Growth against ratio", "Matrices at a bound", "Relative step",
        "Loss", "Matrices", "Audit",
    ]  # fmt: skip
    assert [title for title in page.headings if title in sections] == sections
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in page.links)
    assert not {"script", "link", "iframe"} & {*page.tags}
    assert not re.search(r"https?:|@import|url\((?!#)", text)
    assert page.tags.count("img") == len(FIGURES) and len(text) < 2_000_000
    assert len({*page.ids}) == len(page.ids)
    for name in FIGURES:
        image = report.with_name(f"{name}.png").read_bytes()
        assert image.startswith(b"\x89PNG") and len(image) > 5000, name


def test_hostile_names_are_text(report):
    assert "<script" not in report.read_text()
    assert any(HOSTILE in text for text in page_of(report).text)


@pytest.fixture
def few(monkeypatch):
    """One figure instead of all, where only the way through is tested."""
    others = {
        name: entry._replace(needs=("none",))
        for name, entry in FIGURES.items()
        if name != "growth_against_ratio"
    }
    monkeypatch.setattr(module, "FIGURES", FIGURES | others)


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "has no history.csv: pass the folder of"),
        ("", "history.csv is not the history of a run"),
        ("step,matrix,class,trust_ratio\n", "holds no complete step"),
        ("step,matrix,class\n1,a,other", "holds no complete step"),
        ("a,b\n1,2\n", "has no column step or matrix or class"),
        ("step,matrix,class\n1,a,other\n1,b,other,3\n", "is not the history"),
        ("step,matrix,class\nx,a,other\n", "rows without a step"),
    ],
)
def test_a_folder_without_a_history(tmp_path, text, message):
    if text is None:
        with pytest.raises(RunError, match="is not a folder"):
            write_report(tmp_path / "none")
    else:
        (tmp_path / "history.csv").write_text(text)
    with pytest.raises(RunError, match=message):
        write_report(tmp_path)


def test_the_command(tmp_path, monkeypatch, capsys):
    folder = write(tmp_path / "run", history(layers=1, steps=1))
    monkeypatch.setattr(sys, "argv", ["report", str(folder)])
    runpy.run_path(module.__file__, run_name="__main__")
    assert capsys.readouterr().out == f"{folder / 'report' / 'report.html'}\n"
    (folder / "history.csv").unlink()
    with pytest.raises(SystemExit, match=r"has no history\.csv"):
        runpy.run_path(module.__file__, run_name="__main__")


class TestHistories:
    def test_muon_has_no_ratios_and_a_report(self, tmp_path):
        rows = history(layers=1, steps=2)
        kept = ["step", "matrix", "class", "weight_norm", "started"]
        rows = rows.assign(**dict.fromkeys(rows.columns.difference(kept), np.nan))
        page = page_of(write_report(write(tmp_path / "run", rows, with_audit=False)))
        text = " ".join(page.text)
        assert "img" not in page.tags and text.count("Left out.") == len(FIGURES)
        assert "The history has no growth and no raw_trust_ratio." in text
        assert "no trust ratios, like any run of Muon" in text
        assert "There is no audit.csv" in text

    @pytest.mark.extended
    def test_one_step_with_everything_broken(self, tmp_path):
        rows = history(layers=2, steps=1)
        numbers = rows.columns.difference(["step", "matrix", "class", "loss"])
        rows[numbers] = rows[numbers].astype(float)
        for index, value in enumerate((np.nan, np.inf, -np.inf, 0.0, -1.0)):
            rows.loc[index, numbers] = value
        page = page_of(write_report(write(tmp_path / "run", rows)))
        assert page.tags.count("img") == len(FIGURES)
        assert "Not finite" in page.headings

    @pytest.mark.extended
    def test_figures_of_an_earlier_report_go(self, tmp_path, few):
        rows = history(layers=1, steps=1)
        path = write_report(write(tmp_path / "run", rows)).with_name(
            "growth_against_ratio.png"
        )
        assert path.exists()
        write_report(write(tmp_path / "run", rows.assign(growth=np.nan)))
        assert not path.exists()


class TestReading:
    def test_a_torn_tail_is_dropped(self, tmp_path):
        rows = history(layers=2, steps=3)
        assert [*run_of(rows[:-1], tmp_path).step] == [10] * 6 + [20] * 6
        path = write(tmp_path / "torn", rows) / "history.csv"
        path.write_text(path.read_text()[:-20])
        assert [*read_run(path.parent).step] == [10] * 6 + [20] * 6

    def test_a_hole_is_refused(self, tmp_path):
        with pytest.raises(RunError, match="step 20 has 8 rows, and step 10 has 9"):
            run_of(history().drop(index=10), tmp_path)

    def test_names_that_pandas_takes_for_missing_stay(self, tmp_path):
        rows = history(layers=1, steps=1).assign(matrix=["nan", "", "null"])
        assert list(run_of(rows, tmp_path)["matrix"]) == ["nan", "", "null"]

    def test_many_classes_are_put_together(self, tmp_path):
        rows = history(layers=10, steps=1)
        rows["class"] = [f"class {index}" for index in rows.index]
        classes = {*run_of(rows, tmp_path)["class"]}
        assert len(classes) == module.MAX_CLASSES and OTHERS in classes

    def test_few_of_many_steps_are_shown(self, tmp_path, monkeypatch):
        monkeypatch.setattr(module, "MAX_STEPS", 4)
        rows = module.thinned(run_of(history(layers=1, steps=50), tmp_path))
        assert rows["step"].unique().tolist() == [10, 170, 340, 500]


class TestNumbers:
    def test_the_uniform_part_is_the_geometric_mean_by_relative_step(self, tmp_path):
        rows = history()
        rows.loc[rows.index[-1], "calibration"] = 0  # Not measured.
        run = run_of(rows, tmp_path)
        found, last = module.uniform_part(run).iloc[-1], run[run.step == 50][:-1]
        log, weights = np.log(last["trust_ratio"]), last["relative_step"]
        mean = np.average(log, weights=weights)
        spread = np.average((log - mean) ** 2, weights=weights) ** 0.5
        np.testing.assert_allclose(found[["uniform", "spread"]], [np.exp(mean), spread])
        own = last["class"] == "mlp up"
        rest = np.average(log[own], weights=weights[own]) - mean
        np.testing.assert_allclose(found["mlp up"], np.exp(rest))

    @pytest.mark.parametrize(
        "changes, told",
        [
            ({}, "The ratios differ from matrix to matrix."),
            ({"at_r_max": 1}, "Saturated at the upper bound: 100% of the matri"),
            ({"at_r_max": 1, "at_r_min": 1, "trust_ratio": 1.0}, "Uniform: this is Muon"),
            ({"trust_ratio": 2.0}, "Uniform: this is Muon at 2 × the learning rate"),
            ({"calibration": 0.0}, "no matrix has a ratio yet"),
        ],
    )
    def test_the_verdict(self, tmp_path, changes, told):
        [first, *_] = module.verdict(run_of(history().assign(**changes), tmp_path))
        assert told in first

    @pytest.mark.parametrize(
        "layers, rows, title", [(120, 301, "the last 150"), (3, 10, "9 matrices")]
    )
    def test_the_table_shows_extremes_of_many(self, tmp_path, few, layers, rows, title):
        folder = write(tmp_path / "run", history(layers=layers), with_audit=False)
        page = write_report(folder).read_text()
        assert page.count("<tr") == rows and title in page

    def test_problems_that_are_over_are_told_from_those_that_last(self, tmp_path):
        rows = history(layers=1)
        rows.loc[rows["step"] == 20, "weight_norm"] = np.nan
        rows.loc[rows["step"] >= 40, "relative_step"] = 0.5
        found = module.occurrences(run_of(rows, tmp_path))
        told = [(problem.title, first, last) for problem, first, last in found]
        assert told == [("Large steps", 40, 50), ("Not finite", 20, 20)]
