"""The run page: a web page of run directories, and the same page as one offline file.

Invariant: the page shows what `polyreme.cli.reader` reads, and changes nothing. It loads nothing from another host.
"""
