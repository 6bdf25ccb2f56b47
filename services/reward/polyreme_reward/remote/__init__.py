"""Rewards behind HTTP. `protocols` encodes and decodes, `endpoints` chooses URLs, `reward` sends, retries and keeps deadlines."""
