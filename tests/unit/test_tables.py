"""One table in four notations, and the paper's figures beside ours."""

from __future__ import annotations

import csv
import io

import numpy as np
import pandas as pd
import pytest

from deco_ray.results.paper import CONSTRUCTION, PAPER_ROWS, paper_datasets, paper_note, paper_value
from deco_ray.results.performance import PaperColumns, comparison_table, run_table, summarise
from deco_ray.results.tables import Column, Estimate, Table, estimate


def results() -> pd.DataFrame:
    rows = [
        (method, seed, metric, base + 0.01 * seed)
        for method, base in (("abmil", 0.5), ("deco", 0.6))
        for seed in range(3)
        for metric in ("acc", "macro_f1", "tail_f1")
    ]
    return pd.DataFrame(rows, columns=["method", "seed", "metric", "value"])


HOSTILE = Table(
    (Column("Name"), Column("F1", best="high"), Column("ECE", best="low", digits=1)),
    [["a|b_<script> & 50%\n", Estimate(61.556, 2.544), 3.21], ["x", Estimate(70.0), None], ["y", None, 3.24]],
    "Cap_tion",
    "note # 1",
)


def test_estimate_is_the_sample_deviation():
    found = estimate([0.1, 0.2, 0.6, float("nan")], 100)
    assert found.mean == pytest.approx(30)
    assert found.std == pytest.approx(np.std([10, 20, 60], ddof=1))
    assert estimate([0.5]).std is None
    assert estimate([float("nan")]) is None


def test_markdown_keeps_its_cells():
    lines = HOSTILE.markdown().splitlines()
    assert lines[2] == "| Name | F1 | ECE |"
    assert lines[3] == "| --- | ---: | ---: |"
    assert lines[4] == "| a\\|b_&lt;script> & 50% | 61.56 ± 2.54 | 3.2 |"
    assert lines[6] == "| y | – | 3.2 |"


def test_csv_reads_back_at_full_precision():
    rows = list(csv.reader(io.StringIO(HOSTILE.csv())))
    assert rows[0] == ["Name", "F1", "F1 std", "ECE"]
    assert rows[1] == ["a|b_<script> & 50%\n", "61.556", "2.544", "3.21"]
    assert rows[2] == ["x", "70.0", "", ""]


def test_latex_escapes_subscripts_and_bolds_only_when_asked():
    text = HOSTILE.latex()
    assert r"a|b\_\textless{}script\textgreater{} \& 50\%" in text
    assert r"$61.56_{\scriptscriptstyle 2.54}$" in text
    assert r"\toprule" in text
    assert "mathbf" not in text
    bold = HOSTILE.latex(bold_best=True)
    assert r"$\mathbf{70.00}$" in bold
    assert bold.count(r"$\mathbf{3.2}$") == 2  # equal as shown: both best
    assert text.count("{") == text.count("}")


def test_latex_sets_numbers_as_mathematics_and_says_what_the_subscript_is():
    table = Table(
        (Column("Class-1"), Column("Change", digits=1), Column("F1"), Column("Slides")),
        [["-", -18.44, Estimate(-66.25, 8.84), 1234], ["x", np.float32(2.5), None, -1]],
        note="Percent, mean ± sample std.",
    )
    lines = table.latex().splitlines()
    assert r"- & $-18.4$ & $-66.25_{\scriptscriptstyle 8.84}$ & $1{,}234$ \\" in lines
    assert r"x & $2.5$ & -- & $-1$ \\" in lines
    assert r"\par\smallskip\footnotesize Percent, mean $\pm$ sample std. The subscript is the std." in lines
    assert "subscript" not in Table(table.columns, [["x", 1.0, Estimate(2.0), 3]], note="one seed").latex()
    assert "subscript" not in table.markdown()


def test_what_rounds_to_zero_has_no_sign():
    table = Table((Column("E", digits=3), Column("F1")), [[-0.0004, Estimate(-0.001, 0.0)]])
    assert (table.text(0, 0), table.text(0, 1)) == ("0.000", "0.00 ± 0.00")
    assert "-0.0" not in table.markdown() + table.plain() + table.latex()
    assert "-0.0004" in table.csv()  # full precision


def test_plain_is_aligned():
    lines = HOSTILE.plain().splitlines()
    table = [line for line in lines if "±" in line or line.startswith(("Name", "x "))]
    assert len({line.index(part) + len(part) for line, part in zip(table, ("F1", "61.56 ± 2.54", "70.00"))}) == 1


def test_best_respects_direction_and_missing_values():
    assert HOSTILE.best_rows(1) == {1}
    assert HOSTILE.best_rows(2) == {0, 2}
    assert HOSTILE.best_rows(0) == set()


def test_save_writes_three_files(tmp_path):
    path = HOSTILE.save(tmp_path / "tables", "t1")
    assert path.read_text() == HOSTILE.markdown()
    assert {p.name for p in path.parent.iterdir()} == {"t1.md", "t1.csv", "t1.tex"}


def test_every_paper_row_has_our_name_and_every_value_is_reachable():
    for table, rows in PAPER_ROWS.items():
        for name in rows:
            for dataset in paper_datasets():
                assert paper_value(table, dataset, name, "macro_f1") is not None
    assert paper_value("table1_comparison", "panda_lt", "deco", "macro_f1") == Estimate(59.49, 0.43)
    assert paper_value(CONSTRUCTION, "panda_lt", "normal", "acc") is None
    assert "not directly comparable" in paper_note(False)
    assert "not directly comparable" not in paper_note(True)


def test_summary_is_in_percent():
    score = summarise(results())[("deco",)]["acc"]
    assert score.mean == pytest.approx(61)
    assert score.std == pytest.approx(1)


def test_comparison_table_puts_the_paper_beside_ours():
    table = comparison_table(results(), paper=PaperColumns("panda_lt", same_features=False))
    assert [column.group for column in table.columns].count("paper") == 3
    assert [row[0] for row in table.rows] == ["AB-MIL", "DeCo-MIL"]
    assert table.rows[1][-1] == Estimate(53.07, 1.34)
    assert "not directly comparable" in table.note
    assert r"\multicolumn{3}{c}{paper}" in table.latex()


def test_run_table_has_a_row_per_metric_and_judges_by_alias():
    frame = results().replace({"method": {"abmil": "judge", "deco": "final"}})
    paper = PaperColumns("camelyon_lt", True, alias={"judge": "abmil", "final": "deco"})
    table = run_table(frame, methods=["judge", "final"], names={"judge": "Judge"}, paper=paper)
    assert table.titles() == ["Metric (%)", "Judge", "final", "AB-MIL (paper)", "DeCo-MIL (paper)"]
    assert [row[0] for row in table.rows] == ["ACC", "Macro-F1", "Tail-F1"]
    assert table.rows[0][3] == Estimate(61.56, 2.54)
