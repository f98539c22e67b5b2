from __future__ import annotations

from pathlib import Path

from processes import paceline, script


def test_without_ray_one_line_says_how_to_install_it(tmp_path: Path) -> None:
    name = script(tmp_path, "import sys\nsys.modules['ray'] = None\nimport paceline.integrations.ray\n", "driver.py")
    done = paceline(tmp_path, program=(name,), fork="all")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("error: paceline.integrations.ray needs the package 'ray', which is not installed; ")
