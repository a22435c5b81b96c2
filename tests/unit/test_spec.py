import pytest
from pydantic import ValidationError

from deco_ray.config import MaskingSection, ModelSection, TrainingSection
from deco_ray.training.spec import DecoSpec, RunSpec


def make(**changes):
    return RunSpec(**{"cohort": "c", "split": "s", **changes})


def make_deco(**changes):
    return make(kind="deco", deco=DecoSpec(**{"contributions": "t", "anchors": "a", **changes}))


def test_the_stage_is_only_a_label():
    assert make(stage="judge").digest == make(stage="abmil").digest


@pytest.mark.parametrize(
    "change",
    [
        {"cohort": "d"},
        {"split": "t"},
        {"seed": 1},
        {"threads": 2},
        {"workers": 2},
        {"pretrained": "p"},
        {"model": ModelSection(options={"gated": True})},
        {"training": TrainingSection(lr=1e-3)},
    ],
)
def test_whatever_decides_the_numbers_decides_the_digest(change):
    assert make(**change).digest != make().digest


def test_a_deco_run_depends_on_its_table_and_masking():
    digests = {
        make_deco().digest,
        make_deco(contributions="u").digest,
        make_deco(masking=MaskingSection(lam=0.4)).digest,
    }
    assert len(digests) == 3


def test_judge_and_final_share_no_draw():
    assert make().key("init", "abmil") != make_deco().key("init", "abmil")


def test_deco_needs_its_section_and_plain_has_none():
    with pytest.raises(ValidationError, match="deco"):
        make(kind="deco")
    with pytest.raises(ValidationError, match="deco"):
        make(deco=DecoSpec(contributions="t", anchors="a"))


def test_a_file_named_by_an_option_counts_by_what_it_holds(tmp_path):
    path = tmp_path / "texts.npy"
    model = ModelSection(name="mde", options={"text_embeddings": str(path)})
    digests = [make(model=model).digest]
    for content in (b"one", b"two", b"one"):
        path.write_bytes(content)
        digests.append(make(model=model).digest)
    assert len(set(digests)) == 3
    assert digests[1] == digests[3]
