"""The report of a run: what the page holds, and that no history breaks it."""

import dataclasses
import html.parser
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from orscale_jax.diagnostics.__main__ import main
from orscale_jax.diagnostics.report import (
    RunError,
    figures,
    findings,
    gains,
    heatmap,
    tables,
    theory,
    trajectories,
    write_report,
)
from orscale_jax.diagnostics.report.run import OTHERS, layer_of, read_run, thinned

HOSTILE = '<script>alert("&")</script> $x^2$'
CLASSES = ("attention query", "mlp up", "routed expert down")
VOID = {"meta", "br", "img", "link", "hr", "input"}


def history(layers=3, steps=5, seed=0, names="blocks.{layer}.{kind}.kernel"):
    """A plausible history in the documented format, with an estimate at the last step."""
    rng = np.random.default_rng(seed)
    frames = []
    matrices = [
        (names.format(layer=layer, kind=kind.replace(" ", "_")), kind)
        for layer in range(layers)
        for kind in CLASSES
    ]
    n = len(matrices)
    final_growth = rng.uniform(0.8, 4, n)
    a, b = rng.uniform(1, 3, n), rng.uniform(1, 3, n)
    for index in range(1, steps + 1):
        growth = final_growth ** (index / steps)
        raw = growth * rng.uniform(0.9, 1.1, n)
        measured = 1.0 if index == steps else np.nan
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
                signal=a * measured,
                signal_stderr=0.01 * measured,
                noise=a * measured,
                noise_stderr=0.01 * measured,
                smoothness=b * measured,
                smoothness_stderr=0.01 * measured,
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
        self.labels, self.text, self.headings = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append(tag)
        self.links += [attributes[name] for name in ("src", "href") if name in attributes]
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.labels += [attributes["aria-label"]] if tag == "svg" else []
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


class TestPage:
    @pytest.mark.extended
    def test_it_has_every_section_in_order(self, report):
        page = page_of(report)
        titles = [entry.title for entry in figures.FIGURES]
        assert [text for text in page.headings if text in titles] == titles
        sections = ["run <b>", "Verdict, at step 50", "Warnings", "Figures", "Matrices"]
        found = [text for text in page.headings if text in [*sections, "Audit"]]
        assert found == [*sections, "Audit"]

    @pytest.mark.extended
    def test_it_opens_without_a_network(self, report):
        page = page_of(report)
        assert all(
            link.startswith(("#", "data:image/png;base64,")) for link in page.links
        )
        assert not {"script", "link", "iframe", "img"} & {*page.tags}
        text = report.read_text()
        assert not re.search(r"https?:|@import|url\((?!#)", text)

    @pytest.mark.extended
    def test_figures_are_in_the_page_and_beside_it(self, report):
        page = page_of(report)
        assert page.tags.count("svg") == len(figures.FIGURES)
        for entry in figures.FIGURES:
            image = report.with_name(f"{entry.name}.png").read_bytes()
            assert image.startswith(b"\x89PNG") and len(image) > 5000, entry.name

    def test_figures_say_their_numbers_in_words(self, report):
        labels = page_of(report).labels
        assert all(len(label) > 20 for label in labels)
        assert any("attention query" in label for label in labels)

    def test_ids_are_unique_and_found(self, report):
        page = page_of(report)
        assert len({*page.ids}) == len(page.ids)
        used = re.findall(r"url\(#([^)]+)\)", report.read_text())
        assert {*used} <= {*page.ids}

    def test_hostile_names_are_text(self, report):
        assert "<script" not in report.read_text()
        assert any(HOSTILE in text for text in page_of(report).text)

    def test_colors_of_figures_follow_the_page(self, report):
        figure = report.read_text().partition("<svg")[2].partition("</svg>")[0]
        assert "var(--series-0)" in figure and "var(--ink)" in figure
        assert not re.search(r"(fill|stroke): #(?!b0b0b0)", figure)

    def test_it_names_what_is_wrong(self, report):
        assert "Not finite" in page_of(report).headings

    def test_it_is_small(self, report):
        assert report.stat().st_size < 1_000_000


class TestCommand:
    @pytest.mark.extended
    def test_it_prints_the_page_and_writes_where_it_is_told(self, tmp_path, capsys, few):
        folder = write(tmp_path / "run", history(layers=1, steps=2))
        assert main([str(folder), "--out", str(tmp_path / "out")]) == 0
        path = tmp_path / "out" / "report.html"
        assert capsys.readouterr().out.strip() == str(path) and path.exists()
        assert not (folder / "report").exists()

    def test_a_folder_that_is_none(self, tmp_path, capsys):
        assert main([str(tmp_path / "none")]) == 2
        assert "is not a folder" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "text, message",
        [
            (None, "has no history.csv: write one with"),
            ("", "history.csv is empty"),
            ("step,matrix,class,trust_ratio\n", "holds no complete step"),
            ("step,matrix,class\n1,a,other", "holds no complete step"),
            ("a,b\n1,2\n", "has no column step or matrix or class"),
            ("step,matrix,class\n1,a,other\n1,b,other,3\n", "is not the history"),
            ("step,matrix,class\nx,a,other\n", "rows without a step"),
        ],
    )
    def test_a_folder_without_a_history(self, tmp_path, capsys, text, message):
        if text is not None:
            (tmp_path / "history.csv").write_text(text)
        assert main([str(tmp_path)]) == 2
        captured = capsys.readouterr()
        assert message in captured.err and not captured.out

    def test_a_place_that_cannot_be_written(self, tmp_path, capsys):
        folder = write(tmp_path / "run", history(layers=1, steps=1))
        assert main([str(folder), "--out", str(folder / "history.csv")]) == 2
        assert "history.csv" in capsys.readouterr().err

    @pytest.mark.parametrize("package", ["pandas", "matplotlib"])
    def test_an_extra_that_is_not_installed(self, tmp_path, capsys, monkeypatch, package):
        for name in list(sys.modules):
            if name.startswith("orscale_jax.diagnostics.report"):
                monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)
        assert main([str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert package in error and "pip install 'orscale-jax[report]'" in error


@pytest.fixture
def few(monkeypatch):
    """One figure instead of all, where only the way through is tested."""
    monkeypatch.setattr(
        "orscale_jax.diagnostics.report.page.FIGURES", figures.FIGURES[2:3]
    )


class TestHistories:
    def test_muon_has_no_ratios_and_a_report(self, tmp_path):
        rows = history(layers=1, steps=2)
        kept = ["step", "matrix", "class", "weight_norm", "started"]
        rows = rows.assign(**dict.fromkeys(rows.columns.difference(kept), np.nan))
        page = page_of(write_report(write(tmp_path / "run", rows, with_audit=False)))
        text = " ".join(page.text)
        assert "svg" not in page.tags and text.count("Left out.") == len(figures.FIGURES)
        assert "The history has no calibration." in text
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
        assert page.tags.count("svg") == len(figures.FIGURES)
        assert "Not finite" in page.headings

    @pytest.mark.extended
    def test_nothing_finite(self, tmp_path, few):
        rows = history(layers=1, steps=2).assign(
            trust_ratio=np.nan, raw_trust_ratio=np.nan
        )
        page = page_of(write_report(write(tmp_path / "run", rows)))
        assert "0 of 3 matrices" in " ".join(page.text)

    @pytest.mark.extended
    def test_figures_of_an_earlier_report_go(self, tmp_path, few):
        rows = history(layers=1, steps=1)
        path = write_report(write(tmp_path / "run", rows)).with_name("calibration.png")
        assert path.exists()
        write_report(write(tmp_path / "run", rows.assign(calibration=np.nan)))
        assert not path.exists()

    def test_without_shapes_there_is_no_gain_and_a_hint(self, tmp_path):
        folder = write(tmp_path / "run", history(), with_audit=False)
        run = read_run(folder)
        assert "audit.csv" in figures.without_gain(run)
        found, _ = gains.verdict_of(run)
        assert any("audit.csv" in text for text in findings.explanations(run, found))


@pytest.mark.parametrize(
    "scales, found",
    [
        ([0.2 * 16, 0.2 * 8], {"consistent_rms": pytest.approx(0.2)}),
        ([1, 1], {"consistent_rms": None}),
        ([2, 1], {"consistent_rms": None, "scale_mode": "shape_scaling"}),
        ([2, 0.7071], {"consistent_rms": None, "scale_mode": "unit_rms_norm"}),
    ],
)
def test_the_audit_tells_the_scale(tmp_path, scales, found):
    run = run_of(history(), tmp_path)
    wide = run.audit.index % 2 == 0
    sizes = run.audit.assign(m=64, n=np.where(wide, 256, 32), s=np.where(wide, *scales))
    run = dataclasses.replace(run, audit=sizes)
    assert gains.shapes_of(run).scale == found


class TestReading:
    def test_a_torn_tail_is_dropped(self, tmp_path):
        rows = history(layers=2, steps=3)
        run = run_of(rows[:-1], tmp_path)
        assert run.steps == [10, 20] and run.matrices == 6
        path = write(tmp_path / "torn", rows) / "history.csv"
        path.write_text(path.read_text()[:-20])
        assert read_run(path.parent).steps == [10, 20]

    def test_a_hole_is_refused(self, tmp_path):
        with pytest.raises(RunError, match="step 20 has 8 rows, and step 10 has 9"):
            run_of(history().drop(index=10), tmp_path)

    def test_names_that_pandas_takes_for_missing_stay(self, tmp_path):
        rows = history(layers=1, steps=1).assign(matrix=["nan", "", "null"])
        assert list(run_of(rows, tmp_path).final["matrix"]) == ["nan", "", "null"]

    def test_many_classes_are_put_together(self, tmp_path):
        rows = history(layers=10, steps=1)
        rows["class"] = [
            f"class {index // 2 if index > 3 else 0}" for index in rows.index
        ]
        run = run_of(rows, tmp_path)
        assert len(run.groups) <= 20
        rows["class"] = [f"class {index}" for index in rows.index]
        run = run_of(rows, tmp_path)
        assert len(run.groups) == 20 and run.groups[-1] == OTHERS

    def test_classes_stand_in_the_order_of_a_block(self, tmp_path):
        assert run_of(history()[::-1], tmp_path).groups == list(CLASSES)

    @pytest.mark.parametrize(
        "matrix, layer",
        [
            ("blocks.0.attention.query.kernel", "blocks.0"),
            ("encoder.layers_12.mlp.up.kernel[3]", "encoder.layers_12"),
            ("layers.up[2, 17]", "layers.2"),
            ("experts.up.kernel[3]", ""),
            ("head.kernel", ""),
            ("", ""),
        ],
    )
    def test_layers_are_told_from_names(self, matrix, layer):
        assert layer_of(matrix) == layer

    def test_few_of_many_steps_are_shown(self):
        assert thinned(range(5000), 4) == [0, 1666, 3333, 4999]
        assert thinned([7]) == [7] and thinned([]) == []


class TestNumbers:
    def test_bands_are_means_and_percentiles(self, tmp_path):
        run = run_of(history(), tmp_path)
        band = trajectories.band_of(run.shown, "trust_ratio")
        last = run.final["trust_ratio"].to_numpy()
        expected = [last.mean(), *np.quantile(last, [0.05, 0.95])]
        np.testing.assert_allclose([line.iloc[-1] for line in band], expected)

    @pytest.mark.extended
    def test_the_uniform_part_is_the_geometric_mean_by_relative_step(self, tmp_path):
        run = run_of(history(), tmp_path)
        found = theory.decomposition(run)
        last = run.final
        weights = last["relative_step"] / last["relative_step"].sum()
        expected = np.exp((weights * np.log(last["trust_ratio"])).sum())
        np.testing.assert_allclose(found.uniform[-1], expected, rtol=1e-5)

    def test_the_gain_is_that_of_the_paper(self, tmp_path):
        run = run_of(history(), tmp_path)
        [step], [found] = zip(*gains.verdicts(run).items(), strict=True)
        last = run.final
        r, s = last["trust_ratio"].to_numpy(), 3.2
        a, b = s * last["signal"].to_numpy(), s**2 * 64 * last["smoothness"].to_numpy()
        phi = [(x @ a) ** 2 / (b @ x**2) for x in (r, np.ones_like(r))]
        assert step == 50
        np.testing.assert_allclose(found.numbers["kappa_eff"], phi[0] / phi[1], rtol=1e-5)

    def test_the_map_has_a_row_for_each_matrix_or_layer(self, tmp_path):
        few = heatmap.rows_of(run_of(history(layers=11), tmp_path))
        assert len(few.values) == 33
        assert list(few.labels.values()) == list(CLASSES) and few.edges == [11, 22]
        assert few.values.index[10] == "blocks.10.attention_query.kernel"
        run = run_of(history(layers=21), tmp_path)
        many = heatmap.rows_of(run)
        assert list(many.values.index) == [f"blocks.{layer}" for layer in range(21)]
        first = run.final[run.final["layer"] == "blocks.0"]["trust_ratio"]
        np.testing.assert_allclose(many.values.iloc[0, -1], np.exp(np.log(first).mean()))

    def test_many_matrices_without_layers_are_mapped_by_class(self, tmp_path):
        rows = history(layers=21)
        rows["matrix"] = rows["matrix"].str.replace(
            r"blocks.(\d+).(.*)", r"\2[\1]", regex=True
        )
        assert list(heatmap.rows_of(run_of(rows, tmp_path)).values.index) == list(CLASSES)

    def test_the_table_shows_extremes_of_many(self, tmp_path):
        table = tables.matrices_table(run_of(history(layers=70), tmp_path))
        assert table.count("<tr>") == 81 and "of 210" in table
        table = tables.matrices_table(run_of(history(layers=3), tmp_path))
        assert table.count("<tr>") == 10 and "All 9 matrices" in table

    @pytest.mark.parametrize(
        "value, text",
        [(np.nan, "–"), (np.inf, "∞"), (-0.25, "−0.25"), (12345.6, "1.235e+04")],
    )
    def test_numbers_in_tables(self, value, text):
        assert tables.number(value) == text

    def test_the_largest_step_along_the_run_stands_beside_the_last(self, tmp_path):
        """At the end of a schedule the last step is the smallest."""
        rows = history(layers=1)
        rows["relative_step"] = 0.02 * (1 - rows["step"] / 50) + 1e-5
        rows.loc[0, "relative_step"] = np.inf
        numbers = dict(findings.key_numbers(run_of(rows, tmp_path)))
        label = "median relative step (at most 1.6%, at step 10)"
        assert numbers[label] == "0.001%"

    def test_problems_that_are_over_are_told_from_those_that_last(self, tmp_path):
        rows = history(layers=1)
        rows.loc[rows["step"] == 20, "weight_norm"] = np.nan
        rows.loc[rows["step"] >= 40, "relative_step"] = 0.5
        found = findings.occurrences(run_of(rows, tmp_path))
        told = [(each.problem.title, each.first, each.last) for each in found]
        assert told == [("Large steps", 40, 50), ("Not finite", 20, 20)]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
@pytest.mark.parametrize("scheme", ["", "--blink-settings=preferredColorScheme=0"])
def test_a_browser_shows_the_page_without_errors(report, tmp_path, scheme):
    command = [
        shutil.which("chromium"), "--headless=new", "--no-sandbox", "--disable-gpu",
        "--enable-logging=stderr", "--v=0", f"--user-data-dir={tmp_path / 'profile'}",
        "--host-resolver-rules=MAP * ~NOTFOUND", "--window-size=1280,2400",
        f"--screenshot={tmp_path / 'page.png'}", *filter(None, [scheme]), report.as_uri(),
    ]  # fmt: skip
    environment = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment, check=True
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    assert (tmp_path / "page.png").stat().st_size > 20_000


@pytest.mark.slow
def test_thousands_of_matrices(tmp_path):
    rows = history(layers=1700, steps=30)
    path = write_report(write(tmp_path / "run", rows))
    assert path.stat().st_size < 5_000_000
