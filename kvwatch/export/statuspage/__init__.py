"""The status page: one cycle's document as a page for people, self-contained and a pure function of it."""

from kvwatch.export.statuspage.shell import apology as apology
from kvwatch.export.statuspage.shell import status_page as status_page
