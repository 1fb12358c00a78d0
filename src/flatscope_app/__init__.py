"""What a person sees: the command line (`cli`) and the page with its figures (`reports`).

The library finds this package by its entry point in the group `flatscope.parts`, and asks it for `OFFER`.
"""

from typing import TYPE_CHECKING, Any

from flatscope.parts import Offer

if TYPE_CHECKING:
    from flatscope_app.reports.page import report

__all__ = ["OFFER", "report"]

OFFER = Offer("flatscope_app", names={"report": "reports.page:report"}, main="cli:main")


def __getattr__(name: str) -> Any:
    return OFFER.attribute(name)
