"""The numbered promises of rollbus: their texts, the tests that prove them, and the page with both."""
