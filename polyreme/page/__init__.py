"""The run page: a web page that shows run directories, and the same page as one offline file.

Invariant: the page shows only data from `polyreme.rundir.reader`, and changes nothing but a run's notes.json (see `notes`). It loads nothing from another host.
"""

PATH = "/ui"
"""The path of the page on a server."""
