"""`jobs/predict.py` and `deco-ray predict`: grade slides with trained models, write a table, print how good it is."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deco_ray.cli import program
from deco_ray.errors import ModelError

if TYPE_CHECKING:
    from deco_ray.results.predict import Graded

EXAMPLE = """examples:
  deco-ray predict --run runs/panda --features features_conch/ --out grades.csv
  deco-ray predict --model runs/panda/model/0e6b… --features cohorts/new --out grades.parquet --calibrate 1
  deco-ray predict --mlflow runs:/4f1c…/model --storage runs --features slides/ --out grades.csv --on-error skip

The table has slide_id, predicted and p_<class> for every class; with several models p is their mean, std_<class>
their spread and agreement the share of models that choose the predicted class. Slides need no labels; where labels
are known (in the cohort, in labels.csv beside the features, or with --labels), scores are printed too, of the slides
that no model was trained on or chosen by."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    from deco_ray.config import ResourceSection
    from deco_ray.experiments.session import connect, resolve
    from deco_ray.results import predict as job
    from deco_ray.results.ensemble import Ensemble
    from deco_ray.results.ungraded import open_slides, read_truth

    # everything that can be wrong is found before Ray starts
    out = job.check_output(resolve(arguments.out, "--out"))
    with tempfile.TemporaryDirectory() as scratch:
        folders = _folders(arguments, Path(scratch))
        ensemble = Ensemble.load(folders, arguments.calibrate)
    slides = open_slides(resolve(arguments.features, "--features"), arguments.encoder)
    classes = () if arguments.ignore_labels else slides.classes
    ensemble.check(slides.dim, arguments.encoder or slides.encoder, classes, slides.where)
    truth: dict[str, int] = {}
    if arguments.labels and not arguments.ignore_labels:
        truth = read_truth(resolve(arguments.labels, "--labels"), ensemble.classes)
    elif not arguments.ignore_labels:
        truth = slides.labels(ensemble.classes)
    connect(ResourceSection())
    graded = job.predict(ensemble, slides, on_error=arguments.on_error)
    frame = job.prediction_frame(graded, ensemble.classes, truth)
    job.write_predictions(out, frame, graded.rejected)
    labelled = [slide for slide in graded.slide_ids if slide in truth]
    seen = ensemble.seen(labelled)
    new = {slide: truth[slide] for slide in labelled if slide not in seen}
    found = job.scores(graded, ensemble, new)
    cautions = seen_cautions(len(labelled), len(new), ensemble.says_seen)
    kind = "labelled" if len(new) == len(labelled) else "new labelled"
    print(closing(graded, ensemble.classes, frame["predicted"].tolist(), out, found, kind, cautions))
    return 0


def seen_cautions(labelled: int, new: int, models_say: bool) -> list[str]:
    """What to hold of the scores where slides with labels are those the models learnt from, or may be."""
    cautions = []
    if new < labelled:
        rest = f"those above are of the other {new}" if new else "none are shown"
        cautions.append(
            f"warning: {labelled - new} of the {labelled} labelled slides were trained on or chosen by (told by their "
            f"ids); their scores say nothing about new slides, so {rest}"
        )
    if new and not models_say:
        cautions.append(
            "note: a model does not say which slides it was trained on (an older version made it); the scores promise "
            "too much if some of these are among them"
        )
    return cautions


def _folders(arguments: argparse.Namespace, scratch: Path) -> list[Path]:
    """The models asked for, in the order given; those of MLflow are copied to `scratch`."""
    from deco_ray.experiments.session import resolve
    from deco_ray.results.trained import fetch, report_folder, trained_runs

    folders = [Path(resolve(folder, "--model")) for folder in arguments.model]
    storage = Path(resolve(arguments.storage, "--storage"))
    folders += [fetch(uri, storage, scratch / str(index)) for index, uri in enumerate(arguments.mlflow)]
    if arguments.run:
        report = report_folder(resolve(arguments.run, "--run"))
        runs = trained_runs(report, arguments.method)
        print(f"{runs[0].name}, seeds {', '.join(str(run.seed) for run in runs)}, of {report}")
        folders += [run.folder for run in runs]
    if not folders:
        raise ModelError("say which model: --run STORAGE, --model FOLDER or --mlflow URI; --help has examples")
    return folders


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program("predict"),
        description="Grade slides with one trained model, or with several (seeds) as an ensemble.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_argument_group("which models (any mix; several make an ensemble)")
    which.add_argument(
        "--run", metavar="PATH", help="all seeds of a finished run: its report.html or its storage folder"
    )
    which.add_argument("--method", metavar="NAME", help="with --run: which one, where the report holds several methods")
    which.add_argument(
        "--model", metavar="FOLDER", action="append", default=[], help="folder with model.json, model.pt"
    )
    which.add_argument(
        "--mlflow", metavar="URI", action="append", default=[], help="runs:/<run id>/model or models:/<name>/<version>"
    )
    which.add_argument(
        "--storage",
        default="runs",
        metavar="FOLDER",
        help="with --mlflow: folder of mlflow.db, unless MLFLOW_TRACKING_URI is set (%(default)s)",
    )
    parser.add_argument(
        "--features",
        required=True,
        metavar="PATH",
        help="a cohort, or a folder of CLAM, TRIDENT, STAMP, .pt or .npy files",
    )
    parser.add_argument("--out", required=True, metavar="FILE", help="table to write, .csv or .parquet")
    parser.add_argument(
        "--calibrate",
        type=_tau,
        metavar="TAU",
        help="take TAU times the log training prior from the logits, 1 for balanced classes (default: as in training)",
    )
    parser.add_argument("--labels", metavar="CSV", help="case_id,slide_id,label, to compare with")
    parser.add_argument("--ignore-labels", action="store_true", help="do not compare with the labels there are")
    parser.add_argument("--encoder", metavar="NAME", help="encoder of the features, where they name none or another")
    parser.add_argument(
        "--on-error",
        choices=["stop", "skip"],
        default="stop",
        help="skip lists bad slides in <out>.rejected.csv and grades the rest (default: stop)",
    )
    return parser


def _tau(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 4:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number between 0 and 4")
    return value


def closing(
    graded: Graded,
    classes: Sequence[str],
    predicted: Sequence[str],
    out: Path,
    found: dict[str, Any] | None,
    scored: str = "labelled",
    cautions: Sequence[str] = (),
) -> str:
    """How many slides got which class, how good that is on the `scored` slides, and where the table lies."""
    from deco_ray.results.canvas import metric_name
    from deco_ray.results.predict import rejected_path
    from deco_ray.results.tables import Column, Table

    counts: list[list[Any]] = [[name, predicted.count(name)] for name in classes]
    columns = [Column("class"), Column("predicted")]
    if found is not None:
        columns += [Column(scored), Column("F1", digits=3)]
        for row, support, f1 in zip(counts, found["support"], found["f1_per_class"]):
            row += [support, f1]
    lines = ["", Table(tuple(columns), counts).plain()]
    if found is not None:
        names = ("acc", "balanced_acc", "auc", "macro_f1", "head_f1", "medium_f1", "tail_f1", "ece")
        rows = [[metric_name(name), found[name]] for name in names if found[name] is not None]
        lines.append(Table((Column(f"{found['n']} {scored} slides"), Column("score", digits=3)), rows).plain())
    lines += cautions
    models = graded.probabilities.shape[1]
    lines.append(f"{len(graded.slide_ids)} slides, {models} {'model' if models == 1 else 'models'}: {out}")
    if graded.rejected:
        lines.append(f"warning: {len(graded.rejected)} slides were left out, see {rejected_path(out)}")
    return "\n".join(lines)
