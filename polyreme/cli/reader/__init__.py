"""Reads run directories, of live and of ended runs.

Invariant: a reader changes no file of the run. What it derives is in `index.sqlite` beside them, which may be deleted at any time.
"""

from polyreme.cli.reader.run import RunReader, run_directories
from polyreme.cli.reader.samples import Sample, SampleQuery

__all__ = ["RunReader", "Sample", "SampleQuery", "run_directories"]
