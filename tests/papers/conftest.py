"""Studies that are run to see their numbers draw no more than is looked at."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from flatscope.files import figure_bytes
from flatscope_papers import study_runs


def draw_only(monkeypatch: pytest.MonkeyPatch, *kinds: str) -> None:
    def drawn(figure: Figure, kind: str, *, dpi: int) -> bytes:
        return figure_bytes(figure, kind, dpi=dpi) if kind in kinds else b""

    monkeypatch.setattr(study_runs, "figure_bytes", drawn)


@pytest.fixture
def svg_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The PNG is the same figure once more; test_cli_study.py has one of both."""
    draw_only(monkeypatch, "svg")


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """No picture, where a study is run for what it leaves in its store."""
    draw_only(monkeypatch)
