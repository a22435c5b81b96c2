"""The paper's split protocol: every count of its four statistics tables, its groups, and what must be refused."""

import pickle
import warnings

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import write_tiny_cohort

from deco_ray.cohort.schema import CohortMeta
from deco_ray.cohort.splits import (
    describe_groups,
    frequency_groups,
    leaks,
    load_split,
    long_tail_counts,
    make_split,
    new_split,
    realised_ratio,
    resolve_split,
    save_split,
    split_names,
)
from deco_ray.cohort.store import Cohort
from deco_ray.config import SplitSection
from deco_ray.errors import CohortError

# supplement, section A: full dataset, quotas, order head to tail
CAMELYON = ([870, 174, 251, 54], 10, 16, None)
PANDA = ([2603, 2399, 1209, 1118, 1124, 1102], 100, 200, (0, 1, 2, 4, 3, 5))
TISSUENET = ([268, 288, 238, 219], 20, 30, (1, 0, 2, 3))
PAPER_TRAIN = [
    (CAMELYON, None, [844, 148, 225, 28], 30.1),
    (PANDA, 10, [2303, 1453, 909, 365, 578, 230], 10.0),
    (PANDA, 20, [2303, 1264, 694, 209, 381, 115], 20.0),
    (PANDA, 30, [2303, 1166, 590, 151, 299, 76], 30.3),
    (PANDA, 40, [2303, 1101, 526, 120, 251, 57], 40.4),
    (PANDA, 50, [2303, 1053, 481, 100, 220, 46], 50.1),
    (TISSUENET, 10, [110, 238, 51, 23], 10.3),
]


def manifest(counts, slides_per_case=1, unlabelled=0, path="nowhere", seed=0) -> Cohort:
    """A cohort's rows without its patches; cases mix classes when they hold several slides."""
    labels = [label for label, count in enumerate(counts) for _ in range(count)] + [-1] * unlabelled
    labels = np.random.default_rng(seed).permutation(labels)
    slides = pd.DataFrame(
        {
            "slide_id": [f"s{i:05d}" for i in range(len(labels))],
            "case_id": [f"c{i // slides_per_case}" for i in range(len(labels))],
            "label": labels,
        }
    )
    classes = tuple(f"class{c}" for c in range(len(counts)))
    return Cohort(str(path), CohortMeta(name="rows", classes=classes, dim=4, checksum=f"sum{seed}"), slides)


def section(dataset, ratio, **more) -> SplitSection:
    _, val, test, order = dataset
    return SplitSection(val_per_class=val, test_per_class=test, imbalance_ratio=ratio, order=order, **more)


@pytest.mark.parametrize(("dataset", "ratio", "train", "realised"), PAPER_TRAIN)
def test_every_count_of_the_papers_statistics_tables(dataset, ratio, train, realised):
    cohort = manifest(dataset[0])
    split = make_split(cohort, section(dataset, ratio))
    assert split.train_counts(cohort) == train
    assert split.counts(cohort, "val") == [dataset[1]] * len(train)
    assert split.counts(cohort, "test") == [dataset[2]] * len(train)
    assert round(realised_ratio(train), 1) == realised


@pytest.mark.parametrize(("dataset", "ratio"), [(PANDA, 50), (TISSUENET, 10)])
def test_the_papers_orders_are_those_of_the_training_pools(dataset, ratio):
    full, val, test, order = dataset
    pools = [count - val - test for count in full]
    assert sorted(range(len(pools)), key=lambda label: -pools[label]) == list(order)
    cohort = manifest(full)
    by_size = section(dataset, ratio).model_copy(update={"order": None})
    assert make_split(cohort, by_size).digest == make_split(cohort, section(dataset, ratio)).digest


def test_the_papers_frequency_groups():
    assert frequency_groups(PAPER_TRAIN[0][2]) == {"head": [0, 2], "medium": [1], "tail": [3]}
    assert frequency_groups(PAPER_TRAIN[5][2]) == {"head": [0, 1], "medium": [2, 4], "tail": [3, 5]}
    assert frequency_groups(PAPER_TRAIN[6][2]) == {"head": [1, 0], "medium": [2], "tail": [3]}


@pytest.mark.parametrize(
    ("counts", "groups"),
    [
        ([101, 100, 20, 19], ([0], [1, 2], [3])),  # a class below 20: absolute bounds, both strict
        ([19, 500, 200], ([1, 2], [], [0])),
        ([20, 20, 20, 20, 20], ([0, 1], [2, 3], [4])),  # remainder to Head, then Medium; ties by index
        ([30, 40], ([1], [0], [])),
    ],
)
def test_group_bounds_and_remainders(counts, groups):
    assert frequency_groups(counts) == dict(zip(("head", "medium", "tail"), groups))


def test_the_rule_that_made_the_groups_is_told_with_their_classes():
    assert describe_groups(("a", "b", "c"), [19, 500, 50]) == (
        "Head (more than 100 training slides): b; Medium: c; Tail (fewer than 20): a."
    )
    assert describe_groups(("a", "b"), [30, 40]) == (
        "Head: b; Medium: a; Tail: none (thirds of the classes by training slides, as none has fewer than 20)."
    )


def test_long_tail_counts_follow_the_formula_and_the_pools():
    assert long_tail_counts([1000, 1000, 1000, 1000], 1000) == [1000, 100, 10, 1]  # exact powers do not lose one
    assert long_tail_counts([100, 20, 100], 4) == [100, 20, 25]
    assert long_tail_counts([50, 60], 1) == [50, 50]
    assert long_tail_counts([7], 10) == [7]
    with pytest.raises(CohortError, match="below 1"):
        long_tail_counts([10, 10], 0.5)


def test_validation_and_test_are_the_same_for_every_ratio_and_training_sets_nest():
    cohort = manifest([300, 250, 200])
    splits = [
        make_split(cohort, SplitSection(val_per_class=5, test_per_class=7, imbalance_ratio=r)) for r in (None, 5, 20)
    ]
    assert len({(tuple(s.ids("val")), tuple(s.ids("test"))) for s in splits}) == 1
    natural, mild, steep = (set(s.ids("train")) for s in splits)
    assert steep < mild < natural
    assert not steep & set(splits[0].ids("test"))


def test_a_split_depends_on_its_seed_and_not_on_the_order_of_rows():
    cohort = manifest([40, 30, 20])
    turned = Cohort("nowhere", cohort.meta, cohort.slides.iloc[::-1].reset_index(drop=True))
    make = SplitSection(val_per_class=3, test_per_class=3, imbalance_ratio=4)
    split = make_split(cohort, make)
    assert make_split(cohort, make).digest == split.digest == make_split(turned, make).digest
    assert make_split(cohort, make.model_copy(update={"seed": 1})).digest != split.digest
    assert make_split(turned, make).ids("train") == split.ids("train")[::-1]  # ids come in the cohort's order
    assert pickle.loads(pickle.dumps(split)).digest == split.digest


def test_unlabelled_slides_are_never_in_a_split():
    cohort = manifest([20, 20], unlabelled=15)
    split = make_split(cohort, SplitSection(val_per_class=3, test_per_class=3))
    unlabelled = set(cohort.slides.loc[cohort.slides["label"] == -1, "slide_id"])
    assert len(unlabelled) == 15
    assert not unlabelled & set(split.assignment)
    with pytest.raises(CohortError, match="no label"):
        new_split(cohort, "x", {next(iter(unlabelled)): "train"}, {})


def test_quotas_beyond_a_class_name_the_class_and_the_numbers():
    with pytest.raises(CohortError, match=r"class class1 has 9 slides.* 4 validation and 5 test"):
        make_split(manifest([50, 9]), SplitSection(val_per_class=4, test_per_class=5))
    make_split(manifest([50, 10]), SplitSection(val_per_class=4, test_per_class=5))


def test_a_ratio_that_empties_a_class_and_a_wrong_order_are_refused():
    with pytest.raises(CohortError, match="no training slide would remain of class class2"):
        make_split(manifest([30, 30, 30]), SplitSection(val_per_class=2, test_per_class=2, imbalance_ratio=50))
    with pytest.raises(CohortError, match="each of the classes 0 to 1 once"):
        make_split(
            manifest([9, 9]), SplitSection(val_per_class=1, test_per_class=1, imbalance_ratio=2, order=(0, 2, 1))
        )


def test_grouping_by_case_fills_the_quotas_and_leaves_no_leak():
    cohort = manifest([120, 90, 60], slides_per_case=4)
    loose = SplitSection(val_per_class=8, test_per_class=10, imbalance_ratio=3)
    with pytest.warns(UserWarning, match="patients have slides in more than one part"):
        assert leaks(cohort, resolve_split(cohort, loose))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grouped = resolve_split(cohort, loose.model_copy(update={"group_by": "case_id"}))
    assert leaks(cohort, grouped) == []
    assert grouped.counts(cohort, "val") == [8] * 3
    assert grouped.counts(cohort, "test") == [10] * 3
    assert min(grouped.train_counts(cohort)) > 0


def test_grouping_that_cannot_fill_a_quota_says_so():
    cohort = manifest([12, 12], slides_per_case=24)
    with pytest.raises(CohortError, match="keeping patients together"):
        make_split(cohort, SplitSection(val_per_class=2, test_per_class=2, group_by="case_id"))


def test_slides_without_a_case_are_their_own_patients():
    cohort = manifest([20, 20])
    cohort.slides["case_id"] = None
    split = make_split(cohort, SplitSection(val_per_class=3, test_per_class=3, group_by="case_id"))
    assert leaks(cohort, split) == []


def test_a_stored_split_reads_back_equal_with_its_metadata(tmp_path):
    cohort = write_tiny_cohort(tmp_path / "c", dim=4, patches=(1, 3))
    assert split_names(cohort) == []
    keys = SplitSection(name="mine", val_per_class=2, test_per_class=2, imbalance_ratio=2, seed=4)
    split = make_split(cohort, keys)
    save_split(cohort, split)
    save_split(cohort, split)  # the same split again is no quarrel
    with pytest.warns(UserWarning, match="patients"):
        loaded = resolve_split(cohort, keys)
    assert (loaded, loaded.digest, split_names(cohort)) == (split, split.digest, ["mine"])
    assert (loaded.metadata["imbalance_ratio"], loaded.metadata["seed"]) == (2, 4)
    with pytest.raises(CohortError, match="holds another split"):
        save_split(cohort, make_split(cohort, keys.model_copy(update={"seed": 5})))
    with pytest.raises(CohortError, match="no split 'other'; stored: mine"):
        load_split(cohort, "other")


def test_a_changed_cohort_refuses_the_old_split(tmp_path):
    cohort = write_tiny_cohort(tmp_path / "c", dim=4, patches=(1, 3))
    save_split(cohort, make_split(cohort, SplitSection(name="a", val_per_class=2, test_per_class=2)))
    changed = Cohort(cohort.uri, cohort.meta.model_copy(update={"checksum": "f" * 32}), cohort.slides)
    with pytest.raises(CohortError, match="has changed; make the split again"):
        load_split(changed, "a")


def test_a_damaged_or_foreign_split_file_is_explained(tmp_path):
    cohort = write_tiny_cohort(tmp_path / "c", dim=4, patches=(1, 3))
    folder = tmp_path / "c" / "splits"
    folder.mkdir()
    (folder / "torn.parquet").write_bytes(b"PAR1 half")
    with pytest.raises(CohortError, match="cannot read split"):
        load_split(cohort, "torn")
    pq.write_table(pa.table({"slide_id": ["who"], "split": ["train"]}), folder / "foreign.parquet")
    with pytest.raises(CohortError, match="not in cohort tiny, first 'who'"):
        load_split(cohort, "foreign")


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden", "a..b"])
def test_split_names_stay_in_their_folder(name):
    with pytest.raises(CohortError, match="split name"):
        new_split(manifest([3, 3]), name, {}, {})
    with pytest.raises(CohortError, match="split name"):
        load_split(manifest([3, 3]), name)


def test_a_part_or_assignment_nobody_knows_is_refused():
    cohort = manifest([3, 3])
    with pytest.raises(CohortError, match="'dev'"):
        new_split(cohort, "x", {"s00000": "dev"}, {})
    with pytest.raises(CohortError, match="'dev'"):
        new_split(cohort, "x", {}, {}).ids("dev")


def test_splits_of_a_cohort_on_s3_are_written_and_read_there(tmp_path, monkeypatch):
    from moto.server import ThreadedMotoServer
    from pyarrow import fs

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    local = write_tiny_cohort(tmp_path / "c", dim=4, patches=(1, 3))
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        options = f"scheme=http&endpoint_override={host}:{port}&region=us-east-1&allow_bucket_creation=true"
        uri = f"s3://bucket/cohorts/tiny?{options}"
        remote, root = fs.FileSystem.from_uri(uri)
        remote.create_dir("bucket")
        fs.copy_files(local.uri, root, destination_filesystem=remote)
        cohort = Cohort.open(uri)
        assert split_names(cohort) == []
        split = make_split(cohort, SplitSection(name="far", val_per_class=2, test_per_class=2))
        save_split(cohort, split)
        assert split_names(cohort) == ["far"]
        assert (
            load_split(cohort, "far").digest
            == split.digest
            == make_split(local, SplitSection(val_per_class=2, test_per_class=2)).digest
        )
        with pytest.raises(CohortError, match="no split 'near'; stored: far"):
            load_split(cohort, "near")
    finally:
        server.stop()
