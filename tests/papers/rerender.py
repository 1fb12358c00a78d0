"""Analyse stored trials again and compare with saved results: `python rerender.py RESULTS STORE [STORE …]`.

For a change of the studies' code that must not change a number. Every result under RESULTS whose trials are all in one
of the stores is analysed anew; its table, answers and verdicts must be those that were saved. Stores may lack their
weights, and may have been written by version 0.1.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from flatscope_papers import find_study, load_result
from flatscope_papers.declaration import Runs
from flatscope_papers.read_only_store import ReadOnlyStore
from flatscope_papers.study_result import StudyResult
from flatscope_papers.study_runs import judged_study_result

CLOSE = 1e-9
ROUNDED = 1e-7  # saved tables have eight digits


def differences(old: StudyResult, new: StudyResult) -> list[str]:
    """Where two results differ; the table of the new one is rounded as saved tables are."""
    found = [f"{key}: {a} → {b}" for key, a, b in _estimates(old, new) if not _same(a, b, CLOSE)]
    for before, after in zip(old.findings, new.findings, strict=True):
        if before.verdict != after.verdict:
            found.append(f"{before.claim.key}: {before.verdict} → {after.verdict}")
    if list(old.table.columns) != list(new.table.columns) or len(old.table) != len(new.table):
        return [*found, f"table {old.table.shape} → {new.table.shape}"]
    for name in old.table.columns:
        pairs = zip(old.table[name], new.table[name], strict=True)
        found += [f"{name}, row {row}: {a} → {b}" for row, (a, b) in enumerate(pairs) if not _same(a, b, ROUNDED)][:3]
    return found


def _estimates(old: StudyResult, new: StudyResult) -> list[tuple[str, Any, Any]]:
    return [
        (f"{before.claim.key}, {part}", getattr(before.answer, part), getattr(after.answer, part))
        for before, after in zip(old.findings, new.findings, strict=True)
        for part in ("value", "low", "high", "runs")
    ]


def _same(a: Any, b: Any, close: float) -> bool:
    if isinstance(a, str) or isinstance(b, str) or a is None or b is None:
        return str(a) == str(b) or (pd.isna(a) and pd.isna(b))
    a, b = float(a), float(b)
    return (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=close, abs_tol=1e-300)


def main(results: Path, stores: list[Path]) -> int:
    compared = differing = 0
    for verdicts in sorted(results.glob("*/*/verdicts.json")):
        old = load_result(verdicts.parent)
        declared = find_study(old.name)
        stages = declared.stages(old.scale)
        whole = [
            s for s in map(ReadOnlyStore, stores) if all(config in s for stage in stages for config in stage.configs)
        ]
        if not whole:
            continue
        new = judged_study_result(
            declared, old.scale, declared.analyse(Runs(old.scale, stages, whole[0])), old.provenance
        )
        found = differences(old, new)
        compared += 1
        differing += bool(found)
        print(f"{old.name} at {old.scale} scale: {'; '.join(found[:5]) or 'the same'}", flush=True)
    print(f"{compared} results compared, {differing} differ")
    return 1 if differing or not compared else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [Path(word) for word in sys.argv[2:]]))
