"""Splits of other tools keep every slide where they put it."""

from __future__ import annotations

import pytest

from deco_ray.cohort.imports import read_clam_split, read_mil_baseline_split, read_split, split_files
from deco_ray.errors import CohortError


def write(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_clam_columns_are_ragged_and_ids_text(tmp_path):
    path = write(tmp_path / "splits_0.csv", ",train,val,test\n0,007,b,c\n1,d,,e\n2,f,,\n")
    expected = {"007": "train", "d": "train", "f": "train", "b": "val", "c": "test", "e": "test"}
    assert read_clam_split(path) == read_split(path) == expected


def test_clam_booleans_say_the_same(tmp_path):
    path = write(tmp_path / "splits_0_bool.csv", ",train,val,test\n007,True,False,False\nb,False,False,True\n")
    assert read_clam_split(path) == {"007": "train", "b": "test"}
    write(path, ",train,val,test\n007,True\nb,False,False,True\n")  # a short row
    assert read_clam_split(path) == {"007": "train", "b": "test"}


def test_mil_baseline_paths_become_ids(tmp_path):
    header = "train_slide_path,train_label,val_slide_path,val_label,test_slide_path,test_label\n"
    path = write(tmp_path / "fold.csv", header + "/x/a.pt,0,/x/b.1.h5,1,C:\\y\\c.pt,0\n/x/d.pt,1,,,,\n")
    expected = {"a": "train", "d": "train", "b.1": "val", "c": "test"}
    assert read_mil_baseline_split(path) == read_split(path) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (",train,val,test\n0,a,,a\n", "slide a is in train and in test"),
        ("x,y\n1,2\n", "have train,val,test"),
        ("", "is empty"),
        (",train,val,test\n0,,,\n", "names no slides"),
        ("train,val,test\nTrue", "booleans without the slide ids"),
        (",train,val,test,train\n0,a,b,c,d\n", "more than one column train; keep one"),
        ("train_slide_path,val_slide_path,val_slide_path\na,b,c\n", "more than one column val_slide_path; keep one"),
    ],
)
def test_what_is_no_split_is_refused(tmp_path, text, message):
    with pytest.raises(CohortError, match=message):
        read_split(write(tmp_path / "splits_0.csv", text))


def test_only_the_lists_of_ids_are_picked_up(tmp_path):
    names = ("splits_1.csv", "splits_0.csv", "splits_0_bool.csv", "splits_0_descriptor.csv", "other.csv")
    for name in names:
        write(tmp_path / name, "")
    write(tmp_path / "splits" / "splits_2.csv", "")
    assert [path.name for path in split_files(tmp_path)] == ["splits_2.csv", "splits_0.csv", "splits_1.csv"]
