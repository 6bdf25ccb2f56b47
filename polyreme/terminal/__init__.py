"""What commands print: tables, verdicts, progress bars."""
