"""Reports: complete, readable, self-contained, and loud about what they do not show."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest

from pyengine.evidence.controls import applicable, run_controls
from pyengine.evidence.parity import run_parity
from pyengine.evidence.report import number, share, suite_table, write_report, write_suite
from pyengine.evidence.suite import run_suite
from pyengine.generation.source import open_model
from tests.conftest import CHECKPOINTS, GOLDEN, ROOT


@pytest.fixture(scope="module")
def report():
    found = run_parity(CHECKPOINTS["bloom"], reference=GOLDEN / "bloom", dtype="f16", device="cpu",
                       repeat=2, command="pyengine parity bloom --dtype f16")  # fmt: skip
    found.controls = run_controls(
        CHECKPOINTS["bloom"], ["no-alibi", "gelu"], reference=GOLDEN / "bloom", device="cpu"
    )
    return found


class _Page(HTMLParser):
    """Which tags a page has, and what it would fetch."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.fetched = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.fetched += [value for key, value in attrs if key in ("src", "href")]


def test_three_files_are_written(report, tmp_path):
    paths = write_report(report, tmp_path / "new" / "folder")
    assert [path.name for path in paths] == ["report.json", "report.md", "report.html"]
    values = json.loads(paths[0].read_text())
    assert values["identical_bits"] is True
    assert [c["name"] for c in values["controls"]] == ["no-alibi", "gelu"]
    text = paths[1].read_text()
    for fact in ("no-alibi", "rms ratio", "transformers", "model.safetensors", "--dtype f16"):
        assert fact in text


def test_the_page_has_plots_and_fetches_nothing(report, tmp_path):
    page = _Page(write_report(report, tmp_path)[2].read_text())
    assert page.tags.count("svg") == 3
    assert page.fetched == []
    assert "script" not in page.tags


def test_untrained_weights_stand_in_red(golden_model, tmp_path):
    name = "tiny-llama-head-dim"
    found = run_parity(golden_model(name), reference=GOLDEN / name, device="cpu", untrained=True)
    _, markdown, html = write_report(found, tmp_path)
    assert "**UNTRAINED WEIGHTS" in markdown.read_text()
    assert "<p class=bad>UNTRAINED WEIGHTS" in html.read_text()


def test_a_failure_is_marked(report, tmp_path):
    report.gates[0] = type(report.gates[0])("rms ratio", 2.0, 0.8, at_least=False)
    text = write_report(report, tmp_path)[2].read_text()
    assert "<h1 class=bad>" in text
    assert "<td class=bad>FAILED</td>" in text


def test_a_suite_gives_one_table(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "llama").symlink_to(CHECKPOINTS["llama"])
    rows = run_suite(tmp_path / "models", dtypes=["f32", "bf16"], references=GOLDEN, device="cpu")
    _, lines = suite_table(rows)
    assert [line[2] for line in lines] == ["f32", "bf16"]
    assert lines[0][9] == f"{len(rows[0].controls)}/{len(rows[0].controls)}"
    paths = write_suite(rows, tmp_path / "out")
    assert {path.name for path in paths} >= {"suite.md", "suite.json", "report.html"}
    assert "| llama | llama | f32 | 1,000 |" in paths[0].read_text()


def _block(name):
    """Rows of a generated table in the documentation, without the header."""
    text = (ROOT / "docs" / "parity.md").read_text()
    block = text.split(f"<!-- {name} -->\n")[1].split("\n<!-- end")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines()[2:]]


def test_the_documented_suite_covers_every_checkpoint_and_passes():
    rows = _block("suite")
    assert {(row[0], row[2]) for row in rows} == {
        (name, dtype) for name in CHECKPOINTS for dtype in ("f32", "f16", "bf16")
    }
    assert all(int(row[3].replace(",", "")) >= 2000 for row in rows)
    assert {row[-1] for row in rows} == {"passed"}
    assert all(row[6] == "100 %" for row in rows if row[2] == "f32")


def test_the_documented_controls_are_all_those_that_apply():
    counts = {row[0]: row[9] for row in _block("suite") if row[2] == "f32"}
    shown = _block("controls")
    for name, path in CHECKPOINTS.items():
        source = open_model(path)
        controls = {control.name for control in applicable(source)}
        source.close()
        assert counts[name] == f"{len(controls)}/{len(controls)}"
        column = 1 + sorted(CHECKPOINTS).index(name)
        assert {row[0] for row in shown if row[column]} == controls
    assert not any("FAILED" in cell for row in shown for cell in row)


@pytest.mark.parametrize(
    "value, text",
    [
        (None, "-"),
        (float("nan"), "-"),
        (float("inf"), "not finite"),
        (1.0, "1.0000"),
        (0.99999987, "0.99999987"),
        (0.9999999999893, "0.999999999989"),
        (0.5, "0.5000"),
        (1.5e-6, "1.5e-06"),
    ],
)
def test_numbers_keep_the_digits_that_matter(value, text):
    assert number(value) == text


def test_only_all_is_a_hundred_per_cent():
    assert share(1.0) == "100 %"
    assert share(0.999999) == "99.99 %"
