"""Steps of a trainer over groups of answers: which groups run, and which of them a step takes, stops or drops."""
