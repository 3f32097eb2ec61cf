"""Steps of a trainer over groups of answers: the groups that run, and those that a step returns, stops or drops."""
