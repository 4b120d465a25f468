"""The autograder for Gradescope: a zip of two scripts and the code, as git's last commit has it.

The image is built once by setup.sh; run_autograder grades each submission as root, and what was handed
in runs as a user of its own, who can read neither solutions nor hidden cases.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from lessons.grading.classroom import MACHINERY, from_git, torch_command
from lessons.grading.spec import ROOT

GIVEN = ("minirad", "lessons", "pyproject.toml", "LICENSE", "README.md")
IN_A_LESSON = {"README.md", "exercises.py", "hidden.py", "solution.py"}
USER = "submission"

SETUP = """#!/usr/bin/env bash
# Gradescope runs this once, as root, when the image is built.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
cd /autograder/source
apt-get update
apt-get install -y --no-install-recommends python3 python3-venv
python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' \\
  || {{ echo "Python 3.10 is needed: choose Ubuntu 22.04 or newer"; exit 1; }}
python3 -m venv /opt/minirad
{torch}/opt/minirad/bin/pip install -e course
id {user} || useradd --system --no-create-home --shell /usr/sbin/nologin {user}
bash protect
"""

PROTECT = """# Who may read what: the code everybody; solutions, hidden cases and grades nobody but root.
course="${{AUTOGRADER:-/autograder}}/source/course"
chown -R root:root "$course"
chmod -R u=rwX,go=rX "$course"
chmod 600 "$course"/lessons/*/hidden.py "$course"/lessons/*/solution.py
"""

RUN = """#!/usr/bin/env bash
# Gradescope runs this as root for each submission.
home="${{AUTOGRADER:-/autograder}}"
python="${{MINIRAD_PYTHON:-/opt/minirad/bin/python}}"
cd "$home/source/course" || exit 2
bash ../protect
chmod -R go= "$home/submission" "$home/results"
test -e "$home/submission_metadata.json" && chmod 600 "$home/submission_metadata.json"
# Each student has random cases of his own, the same ones each time.
MINIRAD_STUDENT=$("$python" -c 'import json, sys
print("+".join(sorted(str(user["id"]) for user in json.load(open(sys.argv[1]))["users"])))' \\
  "$home/submission_metadata.json" 2>/dev/null)
export MINIRAD_STUDENT PYTHONPATH="$home/source/course"
"$python" -m lessons grade{due} --submission "$home/submission" --json "$home/results/results.json" \\
  --user {user}
test -s "$home/results/results.json"  # not all points is no failure of the autograder
"""


def write_autograder(
    out: Path, due: Sequence[str] = (), torch_index: str = "", source: Path | None = None
) -> int:
    """Writes the zip; returns how many files are in it.

    due: names of the lessons that are graded; none: all. torch_index: a package index for torch, for
    setup.sh. source: the checkout. ValueError says what stands in the way.
    """
    if out.exists():
        raise ValueError(f"{out} exists already: name a new file")
    if not out.parent.is_dir():
        raise ValueError(f"there is no folder {out.parent}")
    files = from_git((source or ROOT.parent).resolve(), GIVEN)
    torch = torch_command(torch_index, files)
    scripts = {
        "setup.sh": SETUP.format(torch=f"/opt/minirad/bin/{torch}\n" if torch else "", user=USER),
        "run_autograder": RUN.format(due="".join(f" {name[:2]}" for name in due), user=USER),
        "protect": PROTECT.format(),
    }
    given = {f"course/{path}": data for path, data in files.items() if _is_needed(path)}
    with zipfile.ZipFile(out, "x", zipfile.ZIP_DEFLATED) as archive:
        for name, words in scripts.items():
            archive.writestr(_entry(name, 0o755), words)
        for name, data in given.items():
            archive.writestr(_entry(name, 0o600 if "/lessons/" in name else 0o644), data)
    return len(scripts) + len(given)


def _is_needed(path: PurePosixPath) -> bool:
    if path.parts[0] != "lessons":
        return True
    if len(path.parts) == 2:
        return path.name in ("__init__.py", "__main__.py")
    return path.name in (MACHINERY if path.parts[1] == "grading" else IN_A_LESSON)


def _entry(name: str, mode: int) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = (0o100000 | mode) << 16
    return entry
