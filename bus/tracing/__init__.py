"""Spans of requests. Nothing here imports OpenTelemetry but `otel`, which is imported where tracing is switched on."""
