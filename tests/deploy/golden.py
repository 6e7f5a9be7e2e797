"""What the charts become, kept in `golden/`: `python -m tests.deploy.golden` writes it anew."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.deploy.charts import ALL, Case, rendered

FOLDER = Path(__file__).parent / "golden"


def golden_path(case: Case) -> Path:
    """Where a case is kept."""
    return FOLDER / f"{case.name}.yaml"


def golden_text(case: Case, major: str = "4") -> str:
    """A case's objects, by kind and name; comments and the order of keys do not matter."""
    return yaml.safe_dump_all(rendered(case, major), width=120, allow_unicode=True)


def main() -> None:
    """Writes all, and removes what belongs to no case."""
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.yaml"):
        if path.stem not in ALL:
            path.unlink()
    for case in ALL.values():
        golden_path(case).write_text(golden_text(case))


if __name__ == "__main__":
    main()
