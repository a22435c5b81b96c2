"""`deco-ray doctor`: what is installed, what the machine offers, and what is wrong, in plain words; starts nothing."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement

from deco_ray.address import ray_address, reachable
from deco_ray.config import Config, load_config
from deco_ray.results.redact import redact

SHOWN = (
    "torch",
    "ray",
    "faiss-cpu",
    "mlflow",
    "pyarrow",
    "numpy",
    "pandas",
    "pydantic",
    "optuna",
    "scikit-learn",
    "h5py",
)
STORE_SHARE = 0.3  # of memory: Ray's default for the object store
STORE_LEAST = 500 * 2**20  # below this, prefetched bags start to spill to disk
DISK_LEAST = 5 * 2**30
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
GIGA = 2**30


@dataclass
class Findings:
    """Facts to print, and problems: what is wrong and what to do about it."""

    facts: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def fact(self, name: str, value: object) -> None:
        self.facts.append((name, str(value)))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="deco-ray doctor",
        description="Print versions, Ray, processors, memory, object store, disk and tracking, and what is wrong. "
        "Starts nothing and changes nothing; exit code 1 if something is wrong.",
    )
    parser.add_argument("--config", help="look at the storage and tracking of this configuration")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one of its keys")
    arguments = parser.parse_args(argv)
    findings = examine(load_config(arguments.config, arguments.set))
    width = max(len(name) for name, _ in findings.facts)
    for name, value in findings.facts:
        print(f"{name:<{width}}  {value}")
    if not findings.problems:
        print("\nNothing is wrong.")
        return 0
    print(f"\nWhat is wrong ({len(findings.problems)}):")
    for problem in findings.problems:
        print(f"- {problem}")
    return 1


def examine(config: Config) -> Findings:
    findings = Findings()
    check_versions(findings)
    check_processors(findings, config)
    check_memory(findings)
    check_ray(findings, os.environ)
    check_storage(findings, config.storage)
    check_tracking(findings, config, Path.cwd())
    check_threads(findings, os.environ, os.cpu_count() or 1)
    return findings


def check_versions(findings: Findings) -> None:
    findings.fact("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for package in SHOWN:
        findings.fact(package, installed_version(package) or "not installed")
    try:
        wanted = importlib.metadata.requires("deco_ray") or []
    except importlib.metadata.PackageNotFoundError:
        findings.problems.append("deco_ray itself is not installed here: run `pip install -e .` in its folder")
        return
    findings.problems += unmet(wanted)


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def unmet(requirements: list[str]) -> list[str]:
    """A sentence for each requirement that is missing or of another version; extras are not asked for."""
    problems = []
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = installed_version(requirement.name)
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            state = "is not installed" if found is None else f"is {found}"
            wanted = f"{requirement.name}{requirement.specifier}"
            problems.append(f"{requirement.name} {state}, wanted {wanted}: pip install '{wanted}'")
    return problems


def check_processors(findings: Findings, config: Config) -> None:
    import torch

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    findings.fact("cpus", f"{usable} usable of {os.cpu_count()}")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(gpus))
    findings.fact("gpus", f"{gpus} ({names})" if gpus else "none that torch can use")
    cards = graphics_cards()
    if cards and not gpus:
        build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        findings.problems.append(
            f"the machine has {cards} NVIDIA GPU(s) but torch {torch.__version__} ({build}) cannot use them: "
            "install the torch build that matches the driver (`nvidia-smi` names its CUDA version)"
        )
    if config.resources.gpus_per_run > gpus and config.resources.gpus_per_run > 0:
        findings.problems.append(
            f"resources.gpus_per_run is {config.resources.gpus_per_run:g} but this node has {gpus} usable GPU(s): "
            "set it to 0, or submit to a cluster that has them"
        )


def graphics_cards() -> int:
    """How many GPUs the driver sees, whether torch does or not."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def check_memory(findings: Findings, shared_memory: Path = Path("/dev/shm")) -> None:
    import psutil

    memory = psutil.virtual_memory()
    findings.fact("memory", f"{memory.total / GIGA:.1f} GB, {memory.available / GIGA:.1f} GB free")
    shared = shutil.disk_usage(shared_memory).free if shared_memory.is_dir() else None
    described, problem = object_store(memory.total, shared)
    findings.fact("object store", described)
    findings.problems += [problem] if problem else []


def object_store(memory: int, shared: int | None) -> tuple[str, str | None]:
    """What Ray will give its object store by default, and whether shared memory can hold it."""
    wanted = int(memory * STORE_SHARE)
    text = f"{wanted / GIGA:.1f} GB by default ({STORE_SHARE:.0%} of memory)"
    if shared is None:
        return f"{text}; no /dev/shm here", None
    text += f"; /dev/shm has {shared / GIGA:.1f} GB free"
    if shared < wanted:
        return text, (
            f"/dev/shm has {shared / GIGA:.1f} GB, less than the {wanted / GIGA:.1f} GB object store: Ray falls back "
            f"to slow files in /tmp. In Docker start with --shm-size={wanted / GIGA:.0f}g, or give Ray a smaller "
            "--object-store-memory"
        )
    if wanted < STORE_LEAST:
        return text, f"the object store would be {wanted / 2**20:.0f} MB: use a machine with more memory"
    return text, None


def check_ray(findings: Findings, environ: Mapping[str, str]) -> None:
    address = ray_address(environ)
    if address is None:
        findings.fact("ray cluster", "none running here; commands start their own")
    elif reachable(address):
        findings.fact("ray cluster", f"running at {address}")
    elif environ.get("RAY_ADDRESS"):
        findings.fact("ray cluster", f"nothing answers at {address}")
        findings.problems.append(
            f"RAY_ADDRESS is {redact(environ['RAY_ADDRESS'])} but nothing answers there: start that cluster or unset it"
        )
    else:
        findings.fact("ray cluster", f"none; one ran at {address} before")
    has_token = (Path.home() / ".ray" / "auth_token").exists()
    mode = environ.get("RAY_AUTH_MODE")
    findings.fact(
        "ray authentication", f"RAY_AUTH_MODE={mode or 'unset'}, token file {'there' if has_token else 'absent'}"
    )
    findings.problems += authentication_problems(mode, has_token)
    if environ.get("RAY_TRAIN_V2_ENABLED", "1").lower() in ("0", "false"):
        findings.problems.append("RAY_TRAIN_V2_ENABLED switches Ray Train v2 off, which training needs: unset it")


def authentication_problems(mode: str | None, has_token: bool) -> list[str]:
    """The trap of Ray 2.60: a local ray.init() leaves a token, the next `ray start --head` then demands it."""
    if mode is None and has_token:
        return [
            "Ray's token file exists but RAY_AUTH_MODE is unset: after `ray start --head`, `ray job submit` would be "
            "refused as unauthorised. Run `export RAY_AUTH_MODE=token` in every shell that talks to the cluster"
        ]
    if mode not in (None, "token", "disabled", "k8s"):
        return [f"RAY_AUTH_MODE={mode} means nothing to Ray: use token, or disabled on a machine nobody else reaches"]
    return []


def check_storage(findings: Findings, storage: str) -> None:
    if "://" in storage:
        findings.problems.append(f"storage {redact(storage)} is a URI: set `storage` to a folder")
        return
    existing = folder = Path(storage).absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    findings.fact("storage", f"{folder}, {free / GIGA:.0f} GB free")
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        findings.problems.append(f"{existing} is not a folder one can write to: set `storage` to another")
    if free < DISK_LEAST:
        findings.problems.append(
            f"only {free / GIGA:.1f} GB free at {existing}: models and checkpoints need {DISK_LEAST / GIGA:.0f} GB"
        )


def check_tracking(findings: Findings, config: Config, here: Path) -> None:
    uri = config.tracking.uri or f"sqlite:///{Path(config.storage).absolute() / 'mlflow.db'}"
    findings.fact("tracking", without_password(uri) if config.tracking.enabled else "switched off (tracking.enabled)")
    if config.tracking.enabled and uri.startswith(("http://", "https://")):
        host = uri.split("://", 1)[1].split("/", 1)[0].rpartition("@")[2]
        if not reachable(host if ":" in host else f"{host}:{443 if uri.startswith('https') else 80}"):
            findings.problems.append(
                f"no tracking server answers at {without_password(uri)}: start it or unset tracking.uri"
            )
    if uri.startswith("file:") or "://" not in uri:
        findings.problems.append(
            f"tracking.uri {uri} is a folder, which MLflow no longer writes to: use sqlite:///FILE.db"
        )
    if any(here.glob("mlruns/[0-9]*/meta.yaml")):
        findings.problems.append(
            f"{here / 'mlruns'} holds an old MLflow file store, which `mlflow ui` started here picks up and refuses: "
            "move it away or run `mlflow migrate-filestore`"
        )


def without_password(uri: str) -> str:
    scheme, separator, rest = uri.partition("://")
    login, at, place = rest.partition("@")
    return f"{scheme}{separator}{login.split(':')[0]}:***@{place}" if at and ":" in login else uri


def check_threads(findings: Findings, environ: Mapping[str, str], cpus: int) -> None:
    settings = {name: environ[name] for name in THREAD_VARIABLES if name in environ}
    findings.fact(
        "threads", ", ".join(f"{name}={value}" for name, value in settings.items()) or "left to Ray and torch"
    )
    for name, value in settings.items():
        if not value.isdigit() or int(value) < 1:
            findings.problems.append(f"{name}={value} is not a number of threads: unset it")
        elif int(value) > cpus:
            findings.problems.append(
                f"{name}={value} on {cpus} CPUs: every worker would start {value} threads and slow the others; unset it"
            )
