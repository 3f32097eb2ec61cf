"""`rollbus generate`: rows of files and data sets, requests, and files of results."""
