"""Writes down what a comparison found: report.json, report.md and a self-contained report.html."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyengine.evidence.comparison import MAX_ERROR, Gate, Summary
from pyengine.evidence.controls import ControlResult
from pyengine.evidence.parity import ParityReport
from pyengine.evidence.suite import SuiteRow

Table = tuple[Sequence[str], Sequence[Sequence[str]]]  # header, rows

UNTRAINED = "UNTRAINED WEIGHTS: the oracle's loss was not checked"


def write_report(report: ParityReport, directory: Path) -> list[Path]:
    """Writes report.json, report.md and report.html; makes the directory. Returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    texts = {
        "report.json": json.dumps(report.to_json(), indent=1, ensure_ascii=False) + "\n",
        "report.md": markdown(report),
        "report.html": html(report),
    }
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")
    return [directory / name for name in texts]


# ---- tables -------------------------------------------------------------------------------------


def number(value: float | None) -> str:
    """A figure as short as it stays meaningful; cosines near 1 keep their nines."""
    if value is None or math.isnan(value):
        return "-"
    if 0.999 < value < 1.0:
        digits = min(max(7, math.ceil(-math.log10(1.0 - value)) + 1), 14)
        return f"{math.floor(value * 10**digits) / 10**digits:.{digits}f}"
    if math.isinf(value):
        return "not finite"
    return f"{value:.3g}" if abs(value) < 1e-2 or abs(value) >= 1e4 else f"{value:.4f}"


def share(value: float) -> str:
    """A share in per cent; 100 % only if it is all of them."""
    return "100 %" if value == 1.0 else f"{math.floor(value * 1e4) / 100:.2f} %"


def argmax_of(summary: Summary) -> str:
    """The share of equal largest logits, and how many positions are ties that either decides."""
    ties = f" ({summary.ties} tied)" if summary.ties else ""
    return share(summary.argmax) + ties


def gate_table(gates: Iterable[Gate]) -> Table:
    """Every gate with its figure, its limit and whether it holds."""
    rows = [
        (
            gate.name,
            number(gate.value),
            f"{'at least' if gate.at_least else 'at most'} {gate.limit:.9g}",
            "passed" if gate.passed else "FAILED",
        )
        for gate in gates
    ]
    return ("gate", "found", "required", ""), rows


def error_table(summary: Summary) -> Table:
    """Our errors beside Transformers' own in the same precision, where there are such."""
    rows = [
        ("root mean square error", number(summary.rms), number(summary.own_rms)),
        ("largest error", number(summary.max), number(summary.own_max)),
    ]
    return ("relative to the largest logit", "pyengine", "Transformers in this precision"), rows


def spread_table(summary: Summary) -> Table:
    """Distribution of each figure over positions."""
    keys = ("min", "p1", "p50", "mean", "p99", "max")
    rows = [(name, *(number(v[key]) for key in keys)) for name, v in summary.spread.items()]
    return ("per position", *keys), rows


def prompt_table(prompts: Iterable[Mapping[str, Any]]) -> Table:
    """Every prompt with its worst figures."""
    rows = [
        (
            p["name"],
            p["kind"],
            str(p["tokens"]),
            share(p["argmax"]),
            number(p["min_cosine"]),
            number(p["max_error"]),
        )
        for p in prompts
    ]
    return ("prompt", "kind", "tokens", "argmax", "min cosine", "max error"), rows


def control_table(controls: Iterable[ControlResult]) -> Table:
    """Every negative control with what it did."""
    rows = [
        (
            c.name,
            c.mistake,
            number(c.max_error),
            share(c.argmax),
            number(c.min_cosine),
            c.needed,
            c.outcome if c.succeeded else f"FAILED: {c.outcome}",
        )
        for c in controls
    ]
    header = ("control", "mistake", "max error", "argmax", "min cosine", "must", "outcome")
    return header, rows


def suite_table(rows: Iterable[SuiteRow]) -> Table:
    """One line for each model and precision, as the README shows it."""
    header = (
        "model", "family", "precision", "positions", "cosine min", "cosine mean", "argmax",
        "rms error (ratio)", "max error (ratio)", "controls broken", "",
    )  # fmt: skip
    found: list[tuple[str, ...]] = []
    for row in rows:
        broken = f"{sum(c.succeeded for c in row.controls)}/{len(row.controls)}"
        for report in row.reports.values():
            s = report.summary
            ratios = {gate.name: f" ({gate.value:.2f})" for gate in report.gates}
            found.append(
                (
                    row.name,
                    report.family,
                    report.dtype,
                    f"{s.positions:,}",
                    number(s.spread["cosine"]["min"]),
                    number(s.spread["cosine"]["mean"]),
                    argmax_of(s),
                    number(s.rms) + ratios.get("rms ratio", ""),
                    number(s.max) + ratios.get("max ratio", ""),
                    broken if row.controls and report.dtype == "f32" else "",
                    report.verdict,
                )
            )
        if row.error:
            found.append((row.name, *[""] * 9, f"not compared: {row.error}"))
    return header, found


def markdown_table(table: Table) -> str:
    """A GitHub table."""
    header, rows = table
    lines = [header, ["---"] * len(header), *rows]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def html_table(table: Table) -> str:
    """An HTML table; cells that begin with FAILED are marked."""
    header, rows = table
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=bad' if cell.startswith('FAILED') else ''}>{escape(cell)}</td>"
            for cell in row
        )
        + "</tr>\n"
        for row in rows
    )
    return f"<table><tr>{head}</tr>\n{body}</table>"


# ---- documents ----------------------------------------------------------------------------------


def _sections(report: ParityReport) -> list[tuple[str, Table]]:
    facts = {**report.environment, "repeats": report.repeats, "identical bits": report.identical}
    if report.repeats > 1:
        facts["rms of each run"] = ", ".join(number(rms) for rms in report.repeat_rms)
    sections = [
        ("Gates", gate_table(report.gates)),
        ("Errors", error_table(report.summary)),
        ("Positions", spread_table(report.summary)),
        ("Prompts", prompt_table(report.prompts)),
    ]
    if report.cost is not None:
        sections.append(("What q8_0 costs", cost_table(report)))
    if report.controls:
        sections.append(("Negative controls", control_table(report.controls)))
    return [
        *sections,
        ("Reference", _pairs(_flat(report.reference))),
        ("Environment", _pairs({k: str(v) for k, v in facts.items() if v not in (None, "")})),
        ("SHA-256", _pairs(report.sha256)),
    ]


def cost_table(report: ParityReport) -> Table:
    """Ours beside Transformers on dequantised weights: never one without the other."""
    cost = report.cost
    rows = [
        ("Transformers on dequantised weights", "original", cost.yardstick, "yardstick"),
        ("ours", "original", report.summary, "ours"),
        ("ours, activations in f32", "dequantised", cost.exact, ""),
    ]
    head = ("", "against", "1 - cosine, mean", "cosine min", "argmax", "max error", "perplexity")
    table = [
        (
            name, against, number(1.0 - s.spread["cosine"]["mean"]),
            number(s.spread["cosine"]["min"]), share(s.argmax), number(s.max),
            f"{cost.perplexity[key]:.3f}" if key else "",
        )
        for name, against, s, key in rows
    ]  # fmt: skip
    table.append(("original", "", "", "", "", "", f"{cost.perplexity['original']:.3f}"))
    return head, table


def _flat(info: Mapping[str, Any]) -> dict[str, str]:
    """What a reference says of itself, without prompts and hashes, which stand elsewhere."""
    kept = "reference dtype attention device loss_nats loss_limit_nats untrained".split()
    flat = {key: str(info[key]) for key in kept if info.get(key) is not None}
    return flat | {name: str(version) for name, version in info.get("versions", {}).items()}


def _pairs(values: Mapping[str, str]) -> Table:
    return ("", ""), list(values.items())


def _headline(report: ParityReport) -> str:
    s = report.summary
    return (
        f"{report.model}, {report.dtype}: {report.verdict}; "
        f"{s.positions} positions, argmax {argmax_of(s)}, "
        f"cosine at least {number(s.spread['cosine']['min'])}"
    )


def markdown(report: ParityReport) -> str:
    """report.md."""
    parts = [f"# Parity: {_headline(report)}"]
    if report.untrained:
        parts.append(f"**{UNTRAINED}**")
    for title, table in _sections(report):
        parts += [f"## {title}", markdown_table(table)]
    return "\n\n".join(parts) + "\n"


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums; }
td, th { border: 1px solid #ccc; padding: .2em .6em; text-align: left; vertical-align: top; }
.bad { color: #b00020; font-weight: bold; }
svg { background: #fafafa; border: 1px solid #ccc; max-width: 100%; }
svg text { font: 12px system-ui, sans-serif; fill: #444; }
"""


def html(report: ParityReport) -> str:
    """report.html: one file, plots included, nothing fetched."""
    mark = "" if report.passed else " class=bad"
    parts = [f"<h1{mark}>Parity: {escape(_headline(report))}</h1>"]
    if report.untrained:
        parts.append(f"<p class=bad>{escape(UNTRAINED)}</p>")
    sections = _sections(report)
    parts += [f"<h2>{escape(title)}</h2>{html_table(table)}" for title, table in sections[:3]]
    parts.append(f"<h2>Cosine per position</h2>{plot_cosine(report)}")
    parts.append(f"<h2>Largest error per position</h2>{plot_errors(report)}")
    if report.controls:
        parts.append(f"<h2>What each control does</h2>{plot_controls(report.controls)}")
    parts += [f"<h2>{escape(title)}</h2>{html_table(table)}" for title, table in sections[3:]]
    title = escape(f"Parity of {report.model} in {report.dtype}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


# ---- plots --------------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 900, 260, 70, 30
_OURS, _THEIRS = "#1f5fa8", "#d08a1d"


class _LogAxis:
    """Maps positive values to pixels by their logarithm, whole decades at both ends."""

    def __init__(self, values: NDArray[np.float64], start: float, stop: float) -> None:
        logs = np.log10(np.maximum(values[np.isfinite(values)], 1e-17))
        self.low = math.floor(logs.min(initial=0.0)) if logs.size else -1
        self.high = max(math.ceil(logs.max(initial=-17.0)), self.low + 1)
        self._start = start
        self._scale: float = (stop - start) / (self.high - self.low)

    def at(self, value: float) -> float:
        """Pixel of a value; below the axis is drawn on its end."""
        log = math.log10(value) if value > 0 else self.low
        inside = min(max(log, float(self.low)), float(self.high))
        return self._start + (inside - self.low) * self._scale

    @property
    def decades(self) -> range:
        """Exponents to label, at most about ten of them."""
        return range(self.low, self.high + 1, max((self.high - self.low) // 9, 1))


def _svg(height: int, body: Iterable[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" role="img" '
        f'aria-label="{escape(label)}">' + "".join(body) + "</svg>"
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, color: str = "#ddd") -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{color}" fill="none"/>'


def _power(exponent: int) -> str:
    return "1" if exponent == 0 else f"1e{exponent}"


def plot_cosine(report: ParityReport) -> str:
    """1 - cosine of every compared position, in order, on a logarithmic axis; SVG."""
    distance = np.concatenate([1.0 - c.cosine for c in report.comparisons])
    distance = np.maximum(distance, 1e-17)
    axis = _LogAxis(distance, _HEIGHT - _BOTTOM, 10)
    step = (_WIDTH - _LEFT - 10) / max(len(distance), 1)
    body = []
    for exponent in axis.decades:
        y = axis.at(10.0**exponent)
        body += [_line(_LEFT, y, _WIDTH - 10, y), _text(_LEFT - 6, y + 4, _power(exponent), "end")]
    start = 0
    for comparison in report.comparisons:
        x = _LEFT + start * step
        body.append(_line(x, 10, x, _HEIGHT - _BOTTOM))
        start += len(comparison.cosine)
    points = "".join(
        f"M{_LEFT + (i + 0.5) * step:.1f} {axis.at(float(d)):.1f}h0" for i, d in enumerate(distance)
    )
    body.append(f'<path d="{points}" stroke="{_OURS}" stroke-width="3" stroke-linecap="round"/>')
    legend = "1 - cosine, positions in order; a line before each prompt"
    body.append(_text(_LEFT, _HEIGHT - 8, legend))
    return _svg(_HEIGHT, body, "one minus cosine per position")


def plot_errors(report: ParityReport) -> str:
    """Histogram of the largest error of each position, ours and Transformers' own; SVG."""
    ours = np.concatenate([c.max for c in report.comparisons])
    theirs = np.concatenate([c.own_max for c in report.comparisons])
    axis = _LogAxis(np.concatenate([ours, theirs]), _LEFT, _WIDTH - 10)
    edges = np.linspace(axis.low, axis.high, 61)
    series = [("pyengine", ours, _OURS)]
    if len(theirs):
        series.append(("Transformers in this precision", theirs, _THEIRS))
    counts = [np.histogram(np.log10(np.maximum(v, 1e-17)), edges)[0] for _, v, _ in series]
    most = max(int(c.max()) for c in counts) or 1
    body = []
    for exponent in axis.decades:
        x = axis.at(10.0**exponent)
        body.append(_line(x, 10, x, _HEIGHT - _BOTTOM))
        body.append(_text(x, _HEIGHT - 14, _power(exponent), "middle"))
    body.append(_text(_LEFT - 6, 20, str(most), "end"))
    for index, ((name, _, color), count) in enumerate(zip(series, counts, strict=True)):
        for low, high, n in zip(edges[:-1], edges[1:], count, strict=True):
            height = (_HEIGHT - _BOTTOM - 20) * n / most
            x, width = axis.at(10.0**low), axis.at(10.0**high) - axis.at(10.0**low)
            if n:
                body.append(
                    f'<rect x="{x:.1f}" y="{_HEIGHT - _BOTTOM - height:.1f}" width="{width:.1f}" '
                    f'height="{height:.1f}" fill="{color}" fill-opacity=".6"/>'
                )
        y = 16 + 18 * index
        body.append(f'<rect x="{_LEFT + 10}" y="{y}" width="12" height="12" fill="{color}"/>')
        body.append(_text(_LEFT + 28, y + 11, name))
    body.append(_text(_LEFT, _HEIGHT - 1, "largest error of a position over its largest logit"))
    return _svg(_HEIGHT, body, "histogram of errors")


def plot_controls(controls: Sequence[ControlResult]) -> str:
    """The largest error each control brings, beside what f32 may have; SVG."""
    left, row = 210, 20
    height = row * len(controls) + 40
    errors = np.array([c.max_error for c in controls] + [MAX_ERROR])
    axis = _LogAxis(errors, left, _WIDTH - 90)
    body = []
    for exponent in axis.decades:
        x = axis.at(10.0**exponent)
        body += [_line(x, 5, x, height - 30), _text(x, height - 14, _power(exponent), "middle")]
    for i, control in enumerate(controls):
        y = 8 + row * i
        finite = math.isfinite(control.max_error)
        stop = axis.at(control.max_error) if finite else _WIDTH - 90
        width = max(stop - left, 1)
        color = _OURS if control.succeeded else "#b00020"
        body += [
            _text(left - 8, y + 12, control.name, "end"),
            f'<rect x="{left}" y="{y}" width="{width:.1f}" height="14" fill="{color}"/>',
            _text(stop + 6, y + 12, number(control.max_error)),
        ]
    gate = axis.at(MAX_ERROR)
    body += [
        _line(gate, 5, gate, height - 30, "#b00020"),
        _text(left, height - 1, "largest error over the largest logit; red: what f32 may have"),
    ]
    return _svg(height, body, "largest error of each control")


# ---- suites -------------------------------------------------------------------------------------


def suite_json(rows: Iterable[SuiteRow]) -> list[dict[str, Any]]:
    """Plain values: name, error, one report a precision, and the controls of each model."""
    return [
        {
            "name": row.name,
            "error": row.error,
            "reports": {dtype: report.to_json() for dtype, report in row.reports.items()},
            "controls": [control.to_json() for control in row.controls],
        }
        for row in rows
    ]


def control_matrix(rows: Sequence[SuiteRow]) -> Table:
    """Controls by models: largest error and argmax; empty where a control does not apply."""
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        for c in row.controls:
            text = f"{number(c.max_error)}, {share(c.argmax)}"
            cells.setdefault(c.name, {})[row.name] = text if c.succeeded else f"FAILED: {text}"
    names = [row.name for row in rows]
    found = [(control, *(by.get(name, "") for name in names)) for control, by in cells.items()]
    return ("control", *names), found


def write_suite(rows: Sequence[SuiteRow], directory: Path) -> list[Path]:
    """suite.md with the tables, suite.json with all reports, and a report for each of them."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / "suite.md", directory / "suite.json"]
    tables = [markdown_table(suite_table(rows)), markdown_table(control_matrix(rows))]
    paths[0].write_text("\n\n".join(tables) + "\n", encoding="utf-8")
    text = json.dumps(suite_json(rows), indent=1, ensure_ascii=False) + "\n"
    paths[1].write_text(text, encoding="utf-8")
    for row in rows:
        for dtype, report in row.reports.items():
            report.controls = row.controls if dtype == "f32" else []
            paths += write_report(report, directory / f"{row.name}-{dtype}")
    return paths
