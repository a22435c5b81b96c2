"""Synthetic cohorts: the paper's counts, features that behave like an encoder's, known lesions, stable bytes."""

import hashlib
import shutil

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from scipy.ndimage import label as connected_regions

from deco_ray.cohort import Cohort, synthesize
from deco_ray.cohort.presets import PRESETS
from deco_ray.cohort.schema import CohortMeta
from deco_ray.cohort.splits import load_split, make_split, realised_ratio, save_split
from deco_ray.cohort.synthetic import DIM, Palette, lesion_map, make_slide, scaled_counts, tissue_region
from deco_ray.errors import CohortError
from deco_ray.keys import generator


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Cohort:
    return synthesize(tmp_path_factory.mktemp("synthetic") / "panda", "panda_lt", scale=0.02, seed=1)


def slides_of(preset: str, label: int, count: int, seed: int = 0):
    made = PRESETS[preset]
    palette = Palette.draw(made, seed)
    return [make_slide(f"t{i}", label, made, palette, seed) for i in range(count)]


def unit(rows):
    rows = np.asarray(rows, dtype=np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.parametrize("name", list(PRESETS))
def test_presets_have_the_papers_exact_counts_at_scale_one(name):
    preset = PRESETS[name]
    counts = scaled_counts(preset, 1.0)
    assert [sum(parts.values()) for parts in counts] == list(preset.full)
    assert [parts["train"] for parts in counts] == list(preset.train)
    assert {parts["val"] for parts in counts} == {preset.split.val_per_class}
    assert {parts["test"] for parts in counts} == {preset.split.test_per_class}


@pytest.mark.parametrize("name", list(PRESETS))
def test_the_presets_training_counts_follow_from_the_protocol(name):
    preset = PRESETS[name]
    rows = [(label, index) for label, size in enumerate(preset.full) for index in range(size)]
    slides = pd.DataFrame(
        {"slide_id": [f"{a}_{b}" for a, b in rows], "case_id": None, "label": [label for label, _ in rows]}
    )
    cohort = Cohort("nowhere", CohortMeta(name="rows", classes=preset.classes, dim=4), slides)
    assert make_split(cohort, preset.split).train_counts(cohort) == list(preset.train)


def test_a_tiny_scale_still_has_a_few_slides_of_every_class_and_part(small):
    split = load_split(small, "paper")
    assert all(min(split.counts(small, part)) >= least for part, least in (("train", 5), ("val", 4), ("test", 8)))
    assert split.train_counts(small) == [parts["train"] for parts in scaled_counts(PRESETS["panda_lt"], 0.02)]
    assert realised_ratio(split.train_counts(small)) > 4
    assert (small.dim, small.classes, small.meta.normal_class) == (DIM, PRESETS["panda_lt"].classes, 0)


def test_the_same_arguments_give_the_same_bytes_and_another_seed_others(tmp_path):
    def digests(name, seed):
        synthesize(tmp_path / name, "panda_lt", scale=0.001, seed=seed)
        files = sorted(file for file in (tmp_path / name).rglob("*") if file.is_file())
        return {str(f.relative_to(tmp_path / name)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}

    first = digests("a", 3)
    assert first == digests("b", 3)
    assert {"cohort.json", "splits/paper.parquet", "instances/lesions.parquet"} < set(first)
    assert first["patches/part-00000.parquet"] != digests("c", 4)["patches/part-00000.parquet"]
    assert not list(tmp_path.glob(".*"))  # no temporary folder remains


def test_lesion_patches_are_recorded_for_lesion_slides_only(small):
    lesions = pq.read_table(f"{small.uri}/instances/lesions.parquet").to_pandas()
    labels = small.slides.set_index("slide_id")["label"]
    sizes = small.slides.set_index("slide_id")["n_patches"]
    assert set(lesions["slide_id"]) == set(labels[labels > 0].index)
    assert (lesions["patch"] < lesions["slide_id"].map(sizes)).all()
    own = lesions[lesions["lesion"] == lesions["slide_id"].map(labels)]
    assert set(own["slide_id"]) == set(labels[labels > 0].index)


@pytest.mark.parametrize("name", list(PRESETS))
def test_tail_lesions_are_smaller_and_come_with_a_commoner_one(name):
    preset = PRESETS[name]
    order = sorted(range(1, len(preset.classes)), key=lambda label: -preset.train[label])
    head, tail = order[0], order[-1]
    share = {}
    for label in (head, tail):
        maps = [
            lesion_map(tissue_region(1000, generator(i, "region")), label, preset, generator(i, label))
            for i in range(40)
        ]
        share[label] = np.mean([(found == label).mean() for found in maps])
        commoner = [set(found) - {0, label} for found in maps]
        assert all(commoner) if label == tail else not any(commoner)
    assert share[tail] < 0.6 * share[head]
    assert not lesion_map(tissue_region(50, generator(0, "r")), 0, preset, generator(0, "l")).any()


def test_random_patches_lie_in_a_narrow_cone_and_slides_have_a_stain():
    bags = [unit(slide.features) for slide, _ in slides_of("tissuenet_lt", 0, 6)]
    across = np.mean([a[:40] @ b[:40].T for i, a in enumerate(bags) for b in bags[:i]])
    assert 0.3 < across < 0.9
    within = np.mean([bag[:20] @ bag[-20:].T for bag in bags])
    assert within > across + 0.02


def test_lesions_are_relatives_of_a_normal_tissue_and_neighbouring_grades_of_each_other():
    palette = Palette.draw(PRESETS["panda_lt"], 0)
    tissue, lesion = palette.cone + palette.tissue, palette.cone + (palette.parent + palette.step)[1:]
    likeness = unit(lesion) @ unit(tissue).T  # [C-1, T]
    assert (likeness.max(1) > 0.85).all()
    assert (likeness.max(1) > np.median(likeness, axis=1) + 0.05).all()
    alike = unit(palette.step[1:]) @ unit(palette.step[1:]).T
    assert np.diag(alike, 1).min() > np.diag(alike, 2).max()
    assert (np.diff(palette.step[1:] @ palette.malignancy) > 0).all()


@pytest.mark.parametrize(
    ("name", "low", "high"), [("camelyon_lt", 1000, 4000), ("panda_lt", 20, 60), ("tissuenet_lt", 150, 500)]
)
def test_bag_sizes_spread_with_a_long_tail(name, low, high):
    _, _, least, most = PRESETS[name].bag_size
    sizes = np.array([len(slide.features) for slide, _ in slides_of(name, 0, 12 if name == "camelyon_lt" else 60)])
    assert low < np.median(sizes) < high
    assert least <= sizes.min() < sizes.max() <= most
    assert sizes.max() > 1.5 * np.median(sizes)


@pytest.mark.parametrize("n", [1, 2, 7, 36, 900])
def test_tissue_is_one_connected_region_without_repeats(n):
    for seed in range(5):
        cells = tissue_region(n, generator(seed, "region"))
        assert len({tuple(cell) for cell in cells}) == n
        grid = np.zeros(cells.max(0) + 1, int)
        grid[tuple(cells.T)] = 1
        assert connected_regions(grid)[1] == 1


def test_coordinates_lie_on_the_grid_inside_the_slide_and_lesions_cluster():
    for slide, lesion in slides_of("tissuenet_lt", 1, 8):
        assert not (slide.coords % 512).any()
        assert (slide.coords + 512 <= [slide.level0_width, slide.level0_height]).all()
        places, everywhere = slide.coords[lesion > 0], slide.coords
        nearest = [np.sort(np.abs(places - place).sum(1))[1] for place in places] if len(places) > 3 else [512]
        assert np.median(nearest) <= 1024 < np.ptp(everywhere, axis=0).sum()


def test_wrong_arguments_are_explained(tmp_path, small):
    with pytest.raises(CohortError, match="no synthetic preset 'panda'; there are camelyon_lt, panda_lt"):
        synthesize(tmp_path / "x", "panda")
    for scale in (0, 1.5):
        with pytest.raises(CohortError, match="must lie in"):
            synthesize(tmp_path / "x", "panda_lt", scale)
    with pytest.raises(CohortError, match="exists already"):
        synthesize(small.uri, "panda_lt")
    with pytest.raises(CohortError, match="local folder"):
        synthesize("s3://bucket/x", "panda_lt")
    with pytest.raises(CohortError, match="cannot write to /proc/x: No such file or directory; "):
        synthesize("/proc/x", "panda_lt", 0.001)
    assert not list(tmp_path.iterdir())


def test_a_failure_half_way_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr("deco_ray.cohort.synthetic.save_split", fail)
    with pytest.raises(CohortError, match=r"cannot write to .*no space left; make room there or choose another place"):
        synthesize(tmp_path / "x", "panda_lt", 0.001)
    assert not list(tmp_path.iterdir())


def test_the_slower_of_two_first_runs_opens_the_other_ones_cohort(tmp_path, monkeypatch):
    def overtaken(cohort, split):
        save_split(cohort, split)
        shutil.copytree(cohort.uri, tmp_path / "x")

    monkeypatch.setattr("deco_ray.cohort.synthetic.save_split", overtaken)
    assert synthesize(tmp_path / "x", "panda_lt", 0.001).uri == str(tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
