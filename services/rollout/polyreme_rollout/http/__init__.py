"""The HTTP interface of a replica: `/v1`, health, metrics."""
