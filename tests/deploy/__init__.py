"""Tests of deploy/helm: the chart, rendered by Helm itself, and what its objects run."""
