"""Reports: one page that shows what runs did, and the figures and numbers behind it."""

from ekiden.lab.reporting.page import report

__all__ = ["report"]
