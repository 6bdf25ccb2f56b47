"""Reads run directories of live and ended runs.

Invariant: a reader changes no file of the run. Its own data is in the run's `index.sqlite`, which may be deleted at any time.
"""

from polyreme.rundir.reader.directories import run_directories
from polyreme.rundir.reader.run import RunReader
from polyreme.rundir.reader.samples import EVERYTHING, Range, Sample, SampleQuery, parse_range, sample_query

__all__ = ["EVERYTHING", "Range", "RunReader", "Sample", "SampleQuery", "parse_range", "run_directories", "sample_query"]
