"""Write the families of metrics into docs/metrics.md, between the two marks.

python scripts/metrics_table.py
"""

from pathlib import Path

from probemon.adapters.routing import routing_metrics as routing
from probemon.ops.telemetry import metric_families as runs

PAGE = Path(__file__).parents[1] / "docs/metrics.md"
BEGIN, END = "<!-- families, by scripts/metrics_table.py -->", "<!-- end of families -->"


def main() -> None:
    """Replace what lies between the marks."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    tables = f"{runs.table()}\n\n{routing.table()}"
    PAGE.write_text(f"{before}{BEGIN}\n{tables}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
