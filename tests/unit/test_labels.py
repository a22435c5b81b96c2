"""Labels are text; the order of classes is the user's; whatever does not match is named."""

from __future__ import annotations

import pytest

from deco_ray.cohort.labels import Classes, LabelRow, check_files, match_labels, read_labels, resolve_classes
from deco_ray.errors import CohortError


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_ids_and_labels_stay_text(tmp_path):
    path = write(tmp_path / "labels.csv", "\ufeffcase_id,slide_id,label\n01,007,1e3\n,008, no \n\n")
    assert read_labels(path) == [LabelRow("007", "01", "1e3"), LabelRow("008", "008", "no")]


def test_missing_columns_are_named(tmp_path):
    with pytest.raises(CohortError, match="no column slide_id, label"):
        read_labels(write(tmp_path / "labels.csv", "id,y\n1,2\n"))
    with pytest.raises(CohortError, match="cannot read the labels"):
        read_labels(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("header", "named"),
    [
        ("slide_id,label,label", "label"),
        ("slide_id,slide_id,label", "slide_id"),
        ("case_id,slide_id,label,case_id", "case_id"),
    ],
)
def test_a_column_given_twice_is_named(tmp_path, header, named):
    path = write(tmp_path / "labels.csv", f"{header}\n1,2,3,4\n")
    with pytest.raises(CohortError, match=rf"labels\.csv: more than one column {named}; keep one"):
        read_labels(path)


def test_columns_nobody_reads_may_repeat(tmp_path):
    path = write(tmp_path / "labels.csv", "slide_id,note,label,note\na,x,1,y\n")
    assert read_labels(path) == [LabelRow("a", "a", "1")]


def test_classes_come_from_arguments_yaml_or_integers(tmp_path):
    assert resolve_classes(["a", "b"], "b", [], None) == Classes(("a", "b"), 1)
    assert resolve_classes(["a", "b"], 1, [], None) == Classes(("a", "b"), 1)
    assert resolve_classes(None, None, ["2", "0", "10"], None).names == tuple(map(str, range(11)))
    path = write(tmp_path / "classes.yaml", "classes: [no, 007, yes, ~, 1e3, 2020-01-01]\nnormal_class: 007\n")
    assert resolve_classes(path, None, [], None) == Classes(("no", "007", "yes", "~", "1e3", "2020-01-01"), 1)
    assert resolve_classes(None, "yes", ["no"], tmp_path).normal == 2


@pytest.mark.parametrize(
    ("classes", "normal", "message"),
    [
        (None, None, "order of the classes is not given; the labels hold micro, negative"),
        (["a", "a"], None, "must differ"),
        (["a", "b"], "c", "normal class 'c' is not among the classes: a, b"),
        (["a", "b"], 2, "normal class 2"),
    ],
)
def test_unclear_classes_are_refused(classes, normal, message):
    with pytest.raises(CohortError, match=message):
        resolve_classes(classes, normal, ["negative", "micro"], None)


def test_a_yaml_without_classes_is_refused(tmp_path):
    with pytest.raises(CohortError, match="must hold `classes"):
        resolve_classes(write(tmp_path / "c.yaml", "names: [a]"), None, [], None)


@pytest.mark.parametrize("key", ["classes", "normal_class", "note"])
def test_a_yaml_with_a_key_twice_is_refused(tmp_path, key):
    text = f"classes: [a, b]\nnormal_class: a\nnote: x\n{key}: [b, a]\n"
    with pytest.raises(CohortError, match=rf"cannot read the classes .*c\.yaml: [\s\S]*'{key}' twice[\s\S]*line 4"):
        resolve_classes(write(tmp_path / "c.yaml", text), None, [], None)


@pytest.mark.parametrize("text", ["[" * 2000, "classes: [a, b]\nnormal_class: [a]", "classes: &c [a, *c]"])
def test_a_yaml_that_holds_more_than_names_is_refused(tmp_path, text):
    with pytest.raises(CohortError, match=r"c\.yaml"):
        resolve_classes(write(tmp_path / "c.yaml", text), None, [], None)


@pytest.mark.parametrize("label", ["1000", "20240131", "9" * 5000])
def test_a_number_that_would_make_countless_classes_is_refused_by_name(label):
    with pytest.raises(CohortError, match=rf"the label {label[:40]} would make more than 1000 classes.*--classes"):
        resolve_classes(None, None, ["0", "1", label], None)
    assert Classes(("a", "b")).index(label) is None
    with pytest.raises(CohortError, match="is not among the classes"):
        resolve_classes(["a", "b"], label, [], None)


def test_zeros_before_a_number_do_not_count():
    assert len(resolve_classes(None, None, ["0", "999"], None).names) == 1000
    assert resolve_classes(None, None, ["0" * 5000, "0" * 5000 + "1"], None).names == ("0", "1")
    assert Classes(("a", "b")).index("0" * 5000 + "1") == 1


def test_a_name_goes_before_an_index():
    assert Classes(("1", "0", "x")).index("0") == 1
    assert Classes(("a", "b")).index("1") == 1
    assert Classes(("a", "b")).index("2") is None


def test_everything_that_does_not_match_is_named():
    files = [("a", "a.h5"), ("b", "b.h5"), ("c", "c.h5"), ("twice", "twice.h5"), ("bare", "bare.h5")]
    rows = [LabelRow(slide, "case", label) for slide, label in [("a", "x"), ("b", "1"), ("c", "ITC"), ("gone", "x")]]
    rows += [LabelRow("twice", "case", "x"), LabelRow("twice", "case", "y"), LabelRow("../d", "case", "x")]
    matched, problems = match_labels(files, rows, Classes(("x", "y")), "labels.csv")
    assert matched == {"a": ("case", 0), "b": ("case", 1)}
    reasons = {problem.slide_id: str(problem) for problem in problems}
    assert "label 'ITC' is not among the classes: x, y" in reasons["c"]
    assert "slide c (labels.csv)" in reasons["c"]
    assert "no feature file" in reasons["gone"]
    assert "duplicate slide id" in reasons["twice"]
    assert "path separator" in reasons["../d"]
    assert "has no label in labels.csv" in reasons["bare"]
    assert len(problems) == 5


def test_unusable_and_repeated_file_names_are_named():
    problems = check_files([("a", "x/a.pt"), ("a", "y/a.pt"), ("b..c", "b..c.pt"), ("d\udcff", "d.pt")])
    assert "duplicate slide id: x/a.pt has it too" in str(problems[0])
    assert "'..'" in str(problems[1])
    assert r"slide id 'd\udcff'" in problems[2].reason
