"""The run page: a web page that shows run directories, and the same page as one offline file.

Invariant: the page shows only data from `rundir.reader`, changes only a run's notes.json, and loads nothing from another host.
"""

PATH = "/ui"
"""The path of the page on a server."""
