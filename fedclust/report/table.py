"""The table that ends a run: plain text, aligned."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedclust.report.summary import Summary, totals

ROWS = {
    "test/acc": "accuracy (one-to-one)",
    "test/nmi": "normalised mutual information",
    "test/ari": "adjusted Rand index",
    "test/dbi": "Davies-Bouldin, latent space",
    "test/silhouette": "simplified silhouette, latent space",
    "test/silhouette_input": "simplified silhouette, input space",
    "test/recon": "reconstruction error",
    "test/populated": "populated clusters",
    "test/acc_mean": "accuracy, mean over clients",
    "test/acc_worst": "accuracy of the worst client",
    "test/acc_pooled": "accuracy over all rows",
    "test/f1_macro": "macro F1, mean over clients",
    "test/f1_worst": "macro F1 of the worst client",
    "test/auc": "area under the ROC, mean over clients",
    "test/auc_worst": "area under the ROC of the worst client",
    "test/auc_users": "clients with two classes, whose area is defined",
    "clusters/pre": "clusters of clients before refinement",
    "clusters/final": "clusters of clients",
    "clients/ari": "clusters of clients against planted groups",
    "privacy/epsilon_round": "of the last round, for what the notes say is covered",
    "privacy/epsilon_total": "of the whole run",
    "privacy/delta": "for both",
}
_COUNTS = ("clusters/pre", "clusters/final", "test/auc_users")
_MOST_NOTES = 12
_NOT_SHOWN = ("test/collapsed", "test/latent_variance")


def results_table(summary: Summary) -> str:
    """The table of a finished run: metrics, bytes, seconds per stage, monitor and notes.

    Args:
        summary: What `RunRecorder.summary` holds, or summary.json read back.
    """
    return "\n".join([_title(summary), *_aligned(_rows(summary)), *_notes(summary["notes"])])


def human_bytes(count: int) -> str:
    """A number of bytes with its unit, powers of 1000: "999 B", "1.2 kB", "12.3 MB"."""
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.95 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{count} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def number(value: float | str | None) -> str:
    """A metric's value with four decimals; whole numbers without, tiny ones in powers of ten."""
    if value is None:
        return "not a number"
    if isinstance(value, str) or not math.isfinite(value):
        return str(value)
    if 0 < abs(value) < 5e-4:
        return f"{value:.2g}"
    return f"{value:.0f}" if value == int(value) and abs(value) > 1 else f"{value:.4f}"


def _value(name: str, value: float | str | None) -> str:
    return f"{value:.0f}" if name in _COUNTS and isinstance(value, float) and math.isfinite(value) else number(value)


def _title(summary: Summary) -> str:
    parts = [f"{summary['method']} on {summary['source']}" if summary["source"] else summary["method"]]
    if summary["clients"]:
        parts.append(f"{summary['clients']} clients")
    unit = "rounds" if summary["clients"] else "epochs"
    unit = unit if summary["rounds"] != 1 else unit.removesuffix("s")
    parts += [f"{summary['rounds']} {unit}", f"seed {summary['seed']}", summary["status"]]
    return ", ".join(parts)


def _rows(summary: Summary) -> list[tuple[str, str, str]]:
    metrics = summary["metrics"]
    known = [(name, _value(name, metrics[name]), text) for name, text in ROWS.items() if name in metrics]
    others = [
        (name, number(value), "")
        for name, value in sorted(metrics.items())
        if name.startswith("test/") and name not in ROWS and name not in _NOT_SHOWN
    ]
    up, down = totals(summary["bytes"])
    seconds = summary["seconds"]
    rows = [*known, *others]
    if summary["bytes"]:
        rows += [
            ("bytes up", human_bytes(up), "clients to server"),
            ("bytes down", human_bytes(down), "server to clients"),
        ]
    rows += [(f"seconds {stage}", f"{spent:.1f}", "") for stage, spent in seconds.items()]
    if summary["monitor"]:
        labels = "uses labels" if summary["uses_labels"] else "uses no labels"
        chosen = f"{summary['selected']} round {summary['selected_round']}" if summary["selected"] else ""
        rows.append(
            ("monitor", f"{summary['monitor']} ({summary['monitor_mode']})", f"{labels}; {chosen}".rstrip("; "))
        )
    return rows


def _aligned(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    if not rows:
        return []
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = [f"  {name:<{first}}  {value:>{second}}  {text}".rstrip() for name, value, text in rows]
    return ["-" * max(map(len, lines)), *lines]


def _notes(notes: Sequence[str]) -> list[str]:
    lines = [f"  note: {note}" for note in notes[:_MOST_NOTES]]
    if len(notes) > _MOST_NOTES:
        lines.append(f"  and {len(notes) - _MOST_NOTES} more notes: summary.json has all (in Python: result.notes)")
    return lines


def metrics_table(summary: Summary) -> str:
    """The table of a run that only evaluates: names and values of its metrics.

    Args:
        summary: What `RunRecorder.summary` holds, or summary.json read back.
    """
    rows = [
        (name, number(value), ROWS.get(f"test/{name.partition('/')[2]}", ""))
        for name, value in sorted(summary["metrics"].items())
    ]
    parts = [f"{summary['command']}: {summary['method']}" + (f" on {summary['source']}" if summary["source"] else "")]
    return "\n".join([", ".join([*parts, f"seed {summary['seed']}"]), *_aligned(rows)])
