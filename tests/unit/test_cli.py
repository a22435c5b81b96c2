"""The command line: one clean message for what a user can mend, help a newcomer understands, nothing loaded early."""

import errno
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import write_tiny_cohort

from deco_ray import cli
from deco_ray.cohort.splits import load_split
from deco_ray.cohort.store import Cohort
from deco_ray.errors import CohortError


def test_help_lists_every_command_with_a_sentence(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    wanted = {"doctor", "ingest", "synth", "split", "demo", "ui", "run", "sweep", "compare", "reproduce"}
    assert wanted | {"predict", "explain"} == set(cli.COMMANDS)
    for name, (_, _, sentence) in cli.COMMANDS.items():
        assert f"  {name}" in text
        assert sentence in text
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("deco-ray 0")


def test_no_command_and_a_mistyped_one_show_the_way(capsys):
    assert cli.main([]) == 2
    assert "usage: deco-ray" in capsys.readouterr().err
    assert cli.main(["splitt"]) == 2
    assert "did you mean `deco-ray split`?" in capsys.readouterr().err


def raising(error):
    def command(_):
        raise error

    return command


def test_errors_for_the_user_come_without_a_traceback(capsys, monkeypatch):
    monkeypatch.delenv(cli.TRACEBACK, raising=False)
    assert cli.guarded(raising(CohortError("slide s1 is empty")), []) == 1
    assert capsys.readouterr().err == "error: slide s1 is empty\n"
    monkeypatch.setenv(cli.TRACEBACK, "1")
    assert cli.guarded(raising(CohortError("slide s1 is empty")), []) == 1
    assert "Traceback" in capsys.readouterr().err


def test_no_message_tells_a_password(capsys, monkeypatch):
    monkeypatch.delenv(cli.TRACEBACK, raising=False)
    assert cli.guarded(raising(CohortError("cannot open s3://KEY:hunter2@bucket/x: no such bucket")), []) == 1
    assert capsys.readouterr().err == "error: cannot open s3://***@bucket/x: no such bucket\n"


URI = "s3://KEY:hunter2@bucket/x"


@pytest.mark.parametrize(
    "command",
    [
        ["ingest", "feats", URI],
        ["ingest", URI, "cohort"],
        ["synth", "--out", URI],
        ["predict", "--run", URI, "--features", "f", "--out", "g.csv"],
        ["run", "--set", f"storage={URI}"],
        ["run", "--set", f"tracking.uri=[{URI}]"],
        ["doctor", "--set", f"storage={URI}"],
    ],
)
def test_a_uri_where_a_folder_belongs_is_refused_without_its_password(capsys, monkeypatch, tmp_path, command):
    monkeypatch.delenv(cli.TRACEBACK, raising=False)
    monkeypatch.chdir(tmp_path)
    assert cli.main(command) == 1
    told = "".join(capsys.readouterr())
    assert "bucket/x" in told
    assert "hunter2" not in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", ["--help", "doctor"])
def test_a_reader_that_has_gone_is_no_error(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "deco_ray.cli", arguments]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert ended.returncode == 141
    assert ended.stderr == ""


def test_a_full_disk_anywhere_is_told_without_a_traceback(capsys):
    full = OSError(errno.ENOSPC, "No space left on device", "grades.csv")
    assert cli.guarded(raising(full), []) == 1
    expected = "cannot write to grades.csv: No space left on device; make room there or choose another place"
    assert capsys.readouterr().err == f"error: {expected}\n"
    with pytest.raises(OSError, match="not one of ours"):
        cli.guarded(raising(OSError(errno.EIO, "not one of ours")), [])


def test_an_error_from_a_worker_shows_its_cause_only(capsys, monkeypatch):
    monkeypatch.delenv(cli.TRACEBACK, raising=False)
    wrapped = CohortError("ray::work() pid=1\nTraceback ... slide s1 is empty")
    wrapped.cause = CohortError("slide s1 is empty")
    assert cli.guarded(raising(wrapped), []) == 1
    assert capsys.readouterr().err == "error: slide s1 is empty\n"


def test_interrupts_and_bugs_keep_their_meaning(capsys):
    assert cli.guarded(raising(KeyboardInterrupt()), []) == 130
    with pytest.raises(ZeroDivisionError):
        cli.guarded(raising(ZeroDivisionError()), [])
    assert cli.guarded(lambda _: None, []) == 0
    assert cli.guarded(lambda _: 3, []) == 3


@pytest.mark.parametrize(("name", "goes_on"), [("run", True), ("ingest", True), ("predict", False), ("synth", False)])
def test_only_what_can_be_resumed_promises_to_go_on(name, goes_on, capsys, monkeypatch):
    module, function, _ = cli.COMMANDS[name]
    interrupted = raising(KeyboardInterrupt())
    interrupted.__module__ = module
    monkeypatch.setattr(f"{module}.{function}", interrupted)
    expected = "interrupted; the same command goes on from here\n" if goes_on else "interrupted\n"
    assert cli.main([name]) == 130
    assert capsys.readouterr().err == expected
    with pytest.raises(SystemExit):  # the same as a script
        cli.run_job(interrupted)
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("name", "script"),
    [
        ("run", "full_pipeline.py"),
        *((n, f"{n}.py") for n in ("sweep", "compare", "reproduce", "ingest", "predict", "explain")),
    ],
)
def test_a_job_is_called_as_it_was_started(name, script, capsys, monkeypatch):
    with pytest.raises(SystemExit):
        cli.main([name, "--no-such-option"])
    assert f"usage: deco-ray {name} " in capsys.readouterr().err
    job = Path(__file__).parents[2] / "jobs" / script
    monkeypatch.setattr(sys, "argv", [str(job), "--help"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(job), run_name="__main__")
    assert capsys.readouterr().out.startswith(f"usage: {script} ")


def test_a_calibration_that_is_no_number_is_told_what_is_wanted(capsys):
    for text in ("abc", "5"):
        with pytest.raises(SystemExit):
            cli.main(["predict", "--calibrate", text])
        assert f"{text!r} is not a number between 0 and 4" in capsys.readouterr().err


def test_the_example_of_ingest_has_the_classes_in_the_order_its_configuration_wants(capsys):
    with pytest.raises(SystemExit):
        cli.main(["ingest", "--help"])
    classes = capsys.readouterr().out.partition("--classes negative")[2].split()[0]
    header = (Path(__file__).parents[2] / "configs" / "camelyon_lt.yaml").read_text()
    assert f"in this order: negative{classes.replace(',', ', ')}." in header


def test_a_job_ends_with_the_exit_code_of_its_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["job.py", "--config", "x"])
    with pytest.raises(SystemExit) as ended:
        cli.run_job(lambda arguments: 4 if arguments == ["--config", "x"] else 0)
    assert ended.value.code == 4
    with pytest.raises(SystemExit) as ended:
        cli.run_job(raising(CohortError("no")))
    assert ended.value.code == 1


def test_synth_writes_a_cohort_and_shows_its_split(tmp_path, capsys):
    out = tmp_path / "panda"
    assert cli.main(["synth", "--preset", "panda_lt", "--scale", "0.001", "--seed", "2", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert load_split(Cohort.open(str(out)), "paper").ids("test")
    assert "isup5" in text
    assert "realised imbalance ratio 1.0" in text
    assert cli.main(["synth", "--out", str(out)]) == 1
    assert "exists already" in capsys.readouterr().err


def test_split_stores_and_shows_counts_groups_ratio_and_leaks(tmp_path, capsys):
    cohort = write_tiny_cohort(tmp_path / "c", slides=(40, 30, 20), dim=4, patches=(1, 3))
    common = ["split", "--cohort", cohort.uri, "--val", "2", "--test", "3", "--imbalance-ratio", "5"]
    assert cli.main([*common, "--name", "a", "--order", "0,1,2", "--seed", "3"]) == 0
    text = capsys.readouterr().out
    assert ["0", "a", "35", "2", "3", "0", "medium"] in [line.split() for line in text.splitlines()]
    assert ["2", "c", "7", "2", "3", "8", "tail"] in [line.split() for line in text.splitlines()]
    assert "realised imbalance ratio 5.0" in text
    assert "patients have slides in more than one part" in text
    assert load_split(cohort, "a").train_counts(cohort) == [35, 15, 7]
    assert cli.main([*common, "--name", "b", "--group-by", "case_id"]) == 0
    assert "patients" not in capsys.readouterr().out
    assert cli.main([*common, "--name", "a", "--seed", "4"]) == 1
    told = capsys.readouterr().err
    assert "holds another split" in told
    assert "(--overwrite)" in told
    assert cli.main([*common, "--name", "a", "--seed", "4", "--overwrite"]) == 0


def test_the_order_of_a_split_is_checked_whether_it_matters_or_not(tmp_path, capsys):
    cohort = write_tiny_cohort(tmp_path / "c", dim=4, patches=(1, 3))
    common = ["split", "--cohort", cohort.uri, "--val", "2", "--test", "3"]
    assert cli.main([*common, "--name", "a", "--order", "0,1"]) == 1
    assert capsys.readouterr().err == "error: order [0, 1] must name each of the classes 0 to 2 once\n"
    assert cli.main([*common, "--name", "a", "--order", "2,1,0"]) == 0
    assert "--order has no effect without --imbalance-ratio" in capsys.readouterr().out
    assert cli.main([*common, "--name", "b", "--val", "20"]) == 1
    assert "lower val_per_class (--val) or test_per_class (--test)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--name", "x"], 2, "--cohort"),
        (["--cohort", "/nowhere", "--name", "x"], 1, "no cohort at /nowhere"),
        (["--cohort", "/nowhere", "--name", "x", "--val", "0"], 1, "val_per_class = 0"),
        (["--cohort", "/nowhere", "--name", "x", "--order", "0,b"], 1, "--order 0,b: give the numbers of the classes"),
        (["--cohort", "/nowhere", "--name", "x", "--order", "0,0"], 1, "must name each class from 0 to 1 once"),
        (["--cohort", "/nowhere", "--name", "x", "--imbalance-ratio", "0.5"], 1, "greater than or equal to 1"),
    ],
)
def test_wrong_arguments_of_split_say_which(arguments, code, message, capsys):
    with pytest.raises(SystemExit) as ended:  # argparse leaves by itself
        sys.exit(cli.main(["split", *arguments]))
    assert ended.value.code == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["doctor", "synth", "split"])
def test_each_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert f"usage: deco-ray {command}" in capsys.readouterr().out


def test_every_job_names_both_numbers_of_epochs(capsys):
    for command in ("run", "sweep", "compare", "reproduce"):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        assert "--set judge_training.epochs=5 --set training.epochs=5" in " ".join(capsys.readouterr().out.split())


def test_a_dry_run_on_synthetic_cohorts_says_what_it_made(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DECO_RAY_HOME", raising=False)
    plan = Path(__file__).parents[2] / "configs" / "paper.yaml"
    common = ["--config", str(plan), "--only", "table3", "--cohorts", "panda_lt", "--set", "seeds=[0]"]
    assert cli.main(["reproduce", *common, "--scale", "0.03", "--dry-run"]) == 0
    made = tmp_path / "cohorts" / "rehearsal_panda_lt_0.03"
    assert made.is_dir()
    assert f"counted on {made} (synthetic, kept for the rehearsal)" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["reproduce", "--help"])
    assert "with --scale the synthetic cohorts to count on are made first" in " ".join(capsys.readouterr().out.split())


def test_help_loads_no_heavy_library_and_cohorts_load_no_ray():
    code = (
        "import sys, deco_ray.cli; deco_ray.cli.main(['--help'])\n"
        "assert not {'ray', 'torch', 'pyarrow', 'mlflow'} & set(sys.modules)\n"
        "import deco_ray.cohort.synthetic, deco_ray.cohort.splits, deco_ray.doctor\n"
        "assert 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
