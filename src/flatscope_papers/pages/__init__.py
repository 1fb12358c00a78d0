"""Results of studies on pages: the section of a report, and the page of all claims."""
