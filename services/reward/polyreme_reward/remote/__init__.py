"""Rewards behind HTTP. `protocols` encodes and decodes, `endpoints` chooses the URL, `reward` sends, retries and enforces deadlines."""
