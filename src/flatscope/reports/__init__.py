"""The report: one self-contained page, and the same figures for papers."""
