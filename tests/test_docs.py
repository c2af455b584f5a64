"""The documentation is true: its examples run, its commands are CI's, its help is the program's."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = [
    page for page in sorted((ROOT / "docs").glob("*.md")) if "```python" in page.read_text()
]


def blocks(page: Path, language: str) -> list[str]:
    """Code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: page.name)
def test_the_examples_of_a_page_run_in_order(page: Path, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks(page, "python")))
    done = subprocess.run(
        [sys.executable, "-W", "error", script], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr


def test_every_command_that_guards_a_change_is_run_by_ci() -> None:
    readme = (ROOT / "README.md").read_text()
    section = readme.split("## Check a change")[1].split("\n## ")[0]
    commands = "".join(re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL))
    ci = (ROOT / ".ci/run").read_text()
    lines = [line.split("#")[0].strip() for line in commands.splitlines()]
    assert len(lines) >= 4
    for line in filter(None, lines):
        assert line in ci, f"README says `{line}`, .ci/run does not"


def test_the_readme_shows_the_current_help() -> None:
    shown = next(
        block for block in blocks(ROOT / "README.md", "text") if "Usage: pyengine" in block
    )
    done = subprocess.run(
        [sys.executable, "-m", "pyengine", "--help"],
        capture_output=True, text=True, env={"COLUMNS": "100", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert shown.strip() == done.stdout.strip()


def test_commands_in_the_readme_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    known = set(
        re.findall(r"^  (\w+) ", readme.split("Commands:")[1].split("```")[0], re.MULTILINE)
    )
    used = {
        shlex.split(line)[1]
        for block in blocks(ROOT / "README.md", "sh")
        for line in block.splitlines()
        if line.startswith("pyengine ")
    }
    assert used and used <= known


def test_the_readme_shows_the_suite_that_docs_parity_records() -> None:
    shown, recorded = (
        (ROOT / page).read_text().split("<!-- suite -->")[1].split("<!-- end of suite -->")[0]
        for page in ("README.md", "docs/parity.md")
    )
    assert shown == recorded
