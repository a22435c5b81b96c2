"""`jobs/explain.py` and `deco-ray explain`: tables, heatmaps and a page for each of the slides asked about."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deco_ray.cohort.schema import UNLABELLED
from deco_ray.errors import DecoError, ModelError

if TYPE_CHECKING:
    from deco_ray.cohort import Cohort
    from deco_ray.results.explain import Explanation
    from deco_ray.results.heatmaps import SlideMaps
    from deco_ray.results.slide_maps import Explainer

DESCRIPTION = """Why these slides got their grade: which kinds of tissue (anchors) speak for the class and against it,
patches that show them, and a heatmap. For each slide: <slide>.html to read, .png and .pdf, .geojson for QuPath,
.parquet with a row per patch, .anchors.csv and .examples.csv. Explained is the label, or the predicted class of a
slide without one."""
SHOWN = 10  # pages named at the end
EXAMPLE = "deco-ray explain --run runs/panda --slides panda_00012,panda_00031 --out why/"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    from deco_ray.config import ResourceSection
    from deco_ray.experiments.session import connect

    job = prepare(arguments)  # everything that can be wrong is found before Ray starts
    connect(ResourceSection())
    print(closing(run(job, keep_going=arguments.on_error == "skip")))
    return 0


@dataclass(frozen=True)
class Job:
    cohort: Cohort
    slide_ids: list[str]
    explainer: Explainer
    folder: Path
    images: dict[str, Path]
    annotations: dict[str, Path]
    ignore_labels: bool
    provenance: dict[str, Any]
    settings: str  # YAML


def prepare(arguments: argparse.Namespace) -> Job:
    """Model, anchors, cohort and slides, opened and checked against each other."""
    import yaml

    from deco_ray.anchors import Anchors
    from deco_ray.cohort import Cohort
    from deco_ray.experiments.session import check_storage, resolve
    from deco_ray.results.ensemble import Ensemble
    from deco_ray.results.slide_maps import Explainer
    from deco_ray.training.losses import log_prior

    chosen = _choose(arguments)
    ensemble = Ensemble.load([chosen.model], calibrate=0.0)  # contributions bring the prior themselves (Eq. 6)
    member = ensemble.members[0]
    anchors = Anchors.load(chosen.anchors)
    cohort = Cohort.open(resolve(chosen.cohort, "--cohort"))
    classes = () if arguments.ignore_labels else cohort.classes
    ensemble.check(cohort.dim, arguments.encoder or cohort.meta.encoder, classes, f"cohort {cohort.name}")
    if anchors.anchors.shape[1] != ensemble.dim:
        raise ModelError(
            f"the anchors at {chosen.anchors} have {anchors.anchors.shape[1]} dimensions, the model {ensemble.dim}; "
            "give the anchors of the same run"
        )
    counts = member.facts.get("train_counts") or []
    if chosen.counterfactual.tau and len(counts) != len(ensemble.classes):
        raise ModelError(f"the model at {chosen.model} does not say its training counts; --set counterfactual.tau=0")
    prior = log_prior(counts or [1] * len(ensemble.classes)).numpy().astype("float64")
    seed = int(member.facts.get("seed") or 0)
    ids = _slides(arguments.slides, cohort)
    sections = {"counterfactual": chosen.counterfactual, "masking": chosen.masking}
    return Job(
        cohort,
        ids,
        Explainer(member.model, anchors, prior, chosen.counterfactual, chosen.masking, seed),
        check_storage(resolve(arguments.out, "--out")),
        _files(arguments.image, ids, "--image"),
        _files(arguments.annotation, ids, "--annotation"),
        arguments.ignore_labels,
        {
            "model": chosen.model,
            "architecture": member.facts["name"],
            "seed": seed,
            "anchors": chosen.anchors,
            "cohort": f"{cohort.name} ({cohort.checksum})",
            "classes": ensemble.classes,
        },
        yaml.safe_dump({name: section.model_dump(mode="json") for name, section in sections.items()}, sort_keys=False),
    )


@dataclass(frozen=True)
class Outcome:
    slide_id: str
    page: Path | None
    trouble: str | None = None  # why it has no heatmap, or nothing at all


def run(job: Job, keep_going: bool = False) -> list[Outcome]:
    """Files of every slide, in the order asked for; Ray, which must be initialised, draws."""
    from deco_ray.results.explain import explain_slide, headline, write_page, write_tables
    from deco_ray.results.heatmap_batch import render_many

    classes = job.provenance["classes"]
    answers: dict[str, Explanation] = {}
    troubles: dict[str, str] = {}

    def maps() -> Iterator[SlideMaps]:
        for slide in job.slide_ids:
            try:
                bag = job.cohort.bag(slide)
                bag = replace(bag, label=UNLABELLED) if job.ignore_labels else bag
                answer = explain_slide(job.explainer, bag, classes, job.cohort.meta.normal_class)
            except DecoError as error:
                if not keep_going:
                    raise
                troubles[slide] = str(error)
                continue
            answers[slide] = answer
            write_tables(answer, job.folder)
            if bag.coords is None:
                troubles[slide] = (
                    f"slide {slide} has no patch coordinates, so there is nothing to draw a heatmap on; the tables are "
                    "complete. Ingest features that carry coordinates (`coords` in the .h5 file)"
                )
                continue
            yield job.explainer.maps(
                job.cohort,
                bag,
                answer.found,
                image=job.images.get(slide),
                annotation=job.annotations.get(slide),
                title=headline(answer, classes),
            )

    drawn = render_many(maps(), job.folder, total=len(job.slide_ids), keep_going=keep_going, label="explain")
    pictures = {entry.slide_id: entry.picture for entry in drawn if entry.error is None}
    troubles |= {entry.slide_id: entry.error for entry in drawn if entry.error is not None}
    pages = {
        slide: write_page(
            answer, classes, job.folder, job.provenance, job.settings, pictures.get(slide), troubles.get(slide)
        )
        for slide, answer in answers.items()
    }
    return [Outcome(slide, pages.get(slide), troubles.get(slide)) for slide in job.slide_ids]


@dataclass(frozen=True)
class Choice:
    model: Path
    anchors: Path
    cohort: str
    counterfactual: Any
    masking: Any


def _choose(arguments: argparse.Namespace) -> Choice:
    """Model, anchors, cohort and settings: those of a finished run, or those given one by one."""
    import yaml

    from deco_ray.config import load_config
    from deco_ray.experiments.session import resolve
    from deco_ray.results.trained import evidence, report_folder, trained_runs

    if arguments.run:
        if arguments.config or arguments.set:
            raise DecoError("with --run the settings are the run's own; leave out --config and --set")
        report = report_folder(resolve(arguments.run, "--run"))
        runs = {run.seed: run for run in trained_runs(report, arguments.method)}
        seed = min(runs) if arguments.seed is None else arguments.seed
        if seed not in runs:
            raise DecoError(f"{report} has no seed {seed}; it has {', '.join(map(str, sorted(runs)))}")
        print(f"{arguments.of} of {runs[seed].name}, seed {seed}, of {report}")
        basis = evidence(runs[seed])
        model = basis.judge if arguments.of == "judge" else runs[seed].folder
        cohort = arguments.cohort or yaml.safe_load((report / "config.yaml").read_text())["cohort"]
        return Choice(model, basis.anchors, cohort, basis.counterfactual, basis.masking)
    if not arguments.model or not arguments.anchors:
        raise DecoError("give --run STORAGE, or both --model FOLDER and --anchors FOLDER; --help has an example")
    config = load_config(arguments.config, arguments.set)
    if not arguments.cohort and not arguments.config:
        raise DecoError("say which cohort the slides are in: --cohort FOLDER")
    model, anchors = Path(resolve(arguments.model, "--model")), Path(resolve(arguments.anchors, "--anchors"))
    return Choice(model, anchors, arguments.cohort or config.cohort, config.counterfactual, config.masking)


def _slides(texts: Sequence[str], cohort: Cohort) -> list[str]:
    """Ids from any number of comma-separated lists; `all` is every slide."""
    every = list(cohort.slides["slide_id"])
    asked = list(dict.fromkeys(part.strip() for text in texts for part in text.split(",") if part.strip()))
    if asked == ["all"]:
        return every
    known = set(every)
    unknown = [slide for slide in asked if slide not in known]
    if unknown or not asked:
        raise DecoError(
            f"{', '.join(unknown) or 'no slide'}: not in cohort {cohort.name}, "
            f"whose slides are called {', '.join(every[:3])}, …"
        )
    return asked


def _files(path: str | None, slide_ids: Sequence[str], option: str) -> dict[str, Path]:
    """One file for one slide, or a folder with a file <slide_id>.* for each that has one."""
    from deco_ray.experiments.session import resolve

    if path is None:
        return {}
    given = Path(resolve(path, option))
    if given.is_dir():
        found = {file.stem: file for file in sorted(given.iterdir()) if file.is_file()}
        return {slide: found[slide] for slide in slide_ids if slide in found}
    if not given.is_file():
        raise DecoError(f"{option} {given}: no such file or folder")
    if len(slide_ids) != 1:
        raise DecoError(
            f"{option} {given} is one file for {len(slide_ids)} slides; give a folder with <slide_id>.* files"
        )
    return {slide_ids[0]: given}


def closing(outcomes: Sequence[Outcome]) -> str:
    """What went wrong, and which pages to open."""
    pages = [outcome.page for outcome in outcomes if outcome.page is not None]
    lines = [f"warning: {outcome.trouble}" for outcome in outcomes if outcome.trouble]
    lines += [f"{len(pages)} of {len(outcomes)} slides explained; open", *(f"  {page}" for page in pages[:SHOWN])]
    return "\n".join(lines + ([f"  and {len(pages) - SHOWN} more"] if len(pages) > SHOWN else []))


def _parser() -> argparse.ArgumentParser:
    from deco_ray.experiments.arguments import job_parser

    parser = job_parser("explain", DESCRIPTION, EXAMPLE)
    parser.add_argument("--run", metavar="PATH", help="a finished run (report.html or storage): its judge and anchors")
    parser.add_argument("--seed", type=int, help="with --run: which seed (default: the first)")
    parser.add_argument(
        "--of", choices=["judge", "final"], default="judge", help="with --run: whose grade (%(default)s)"
    )
    parser.add_argument("--method", metavar="NAME", help="with --run: which one, where the report holds several")
    parser.add_argument("--model", metavar="FOLDER", help="without --run: folder with model.json and model.pt")
    parser.add_argument("--anchors", metavar="FOLDER", help="without --run: folder with anchors.npz")
    parser.add_argument("--cohort", metavar="PATH", help="where the slides are (default: the run's own cohort)")
    parser.add_argument(
        "--slides", required=True, action="append", metavar="ID,ID", help="slides to explain; `all` for every one"
    )
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where the files go")
    parser.add_argument("--image", metavar="PATH", help="slide file or picture; for several slides a folder of them")
    parser.add_argument(
        "--annotation", metavar="PATH", help="lesion outlines (GeoJSON, ASAP XML) or mask; a folder for several slides"
    )
    parser.add_argument("--ignore-labels", action="store_true", help="explain the predicted class, label or not")
    parser.add_argument("--encoder", metavar="NAME", help="encoder of the features, where the cohort names another")
    parser.add_argument(
        "--on-error", choices=["stop", "skip"], default="stop", help="skip tells of bad slides and explains the rest"
    )
    return parser
