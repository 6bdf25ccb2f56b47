"""The experience log in Redis: the run record, the ledger with its scripts, and the audit that checks its integrity."""
