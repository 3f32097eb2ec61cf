"""Spans of requests. Only `otel` imports OpenTelemetry, and `otel` is imported only if tracing is on."""
