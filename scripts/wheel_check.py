"""Build the sdist and the wheel, install the wheel into a new environment, and train there: ``make wheel-check``.

1. The sdist contains every file of the repository.
2. The wheel is built from the sdist alone. It is installed with the versions of constraints.txt into an environment
   without access to the source tree.
3. The first commands of a new user run in an empty folder: version, env, explain, and a short training.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 900
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
"""The environment without PYTHONPATH, which may contain the source tree."""
IMPORTED = """
import paceline, importlib.metadata
print(paceline.__file__)
assert paceline.__version__ == importlib.metadata.version("paceline")
"""


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="paceline-wheel-") as folder:
        place = Path(folder)
        run(place, sys.executable, "-m", "build", "--outdir", str(place), str(copy_sources(place / "sources")))
        [sdist], [wheel] = place.glob("*.tar.gz"), place.glob("*.whl")
        with tarfile.open(sdist) as archive:
            held = {name.partition("/")[2] for name in archive.getnames()}
        check_holds("sdist", held, tracked(), "MANIFEST.in")
        with zipfile.ZipFile(wheel) as archive:
            held = {f"src/{name}" for name in archive.namelist()}
        check_holds("wheel", held, tracked("src"), "[tool.setuptools.package-data]")
        use(install(wheel, place / "venv"), place)
    print("the wheel works by itself")


def run(folder: Path, *command: str) -> str:
    """Run `command` in `folder`, and return its stdout. Print the output only if the command fails."""
    print("  " + " ".join(command), flush=True)
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode != 0:
        raise SystemExit(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def tracked(*folders: str) -> list[str]:
    return [name for name in run(ROOT, "git", "ls-files", *folders).splitlines() if (ROOT / name).exists()]


def copy_sources(place: Path) -> Path:
    """Copy only tracked files, so that files from an earlier build do not end up in the sdist."""
    for name in tracked():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, place / name)
    return place


def check(right: bool, complaint: str) -> None:
    if not right:
        raise SystemExit(f"error: {complaint}")


def check_holds(archive: str, held: set[str], wanted: list[str], place: str) -> None:
    missing = sorted(set(wanted) - held)
    check(not missing, f"the {archive} lacks {', '.join(missing)}; name them in {place}")


def install(wheel: Path, place: Path) -> Path:
    """Install the wheel into a new environment, and return the environment's folder of commands."""
    venv.create(place, with_pip=True)
    commands = place / "bin"
    options = ("--quiet", "--no-compile", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt"))
    run(place, str(commands / "python"), "-m", "pip", "install", *options, f"{wheel}[digits]")
    return commands


def use(commands: Path, place: Path) -> None:
    """Run the first commands of a new user in an empty folder."""
    empty = place / "empty"
    empty.mkdir()
    imported = run(empty, str(commands / "python"), "-c", IMPORTED).strip()
    check(Path(imported).is_relative_to(commands.parent), f"{imported} was imported, which is not the wheel")
    paceline = str(commands / "paceline")
    run(empty, paceline, "--version")
    check(
        imported.removesuffix("/__init__.py") in run(empty, paceline, "env"), "paceline env describes another package"
    )
    run(empty, paceline, "explain", "ring", "--out", "ring.html")
    trained = run(empty, paceline, "train", "digits", "--nproc", "2", "--epochs", "2")
    check("replicas identical" in trained, f"the training reported\n{trained}")


if __name__ == "__main__":
    main()
