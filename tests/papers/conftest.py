"""Studies that are run to see their numbers draw no more than is looked at."""

from __future__ import annotations

import pytest

from flatscope_papers import study_runs


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """No picture, where a study is run for what it leaves in its store."""
    monkeypatch.setattr(study_runs, "figure_bytes", lambda *_, **__: b"")
