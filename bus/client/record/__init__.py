"""The record of a run: a folder with a row for each sample, which survives a crash and is read without a worker."""
