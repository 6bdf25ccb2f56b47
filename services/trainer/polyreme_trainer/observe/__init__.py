"""Metric records, the Prometheus exporter and alarms."""
