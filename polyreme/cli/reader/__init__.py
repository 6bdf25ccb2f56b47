"""Reads run directories, of live and of ended runs.

Invariant: a reader changes no file of the run. What it derives is in `index.sqlite` beside them, which may be deleted at any time.
"""

from polyreme.cli.reader.run import RunReader, run_directories
from polyreme.cli.reader.samples import EVERYTHING, Range, Sample, SampleQuery, parse_range, sample_query

__all__ = ["EVERYTHING", "Range", "RunReader", "Sample", "SampleQuery", "parse_range", "run_directories", "sample_query"]
